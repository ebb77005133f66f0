"""What belongs to single pairs of query and key: a bias of their logits, a mask that hides them.

Both are `[b, n, t, s]`, each axis that of `[B, N, T, S]`, or 1, or for b a divisor of B whose
entries serve B / b batch entries in a row. No axis is ever broadcast in memory.

Threads read both straight from global memory (in fact from L2), in the layout of a wgmma
accumulator, before they wait for the product that makes the logits. The mask comes as bits, packed
before the kernel along the axis that runs through the columns of its tiles: so a thread needs 16
bytes of a row for 128 columns, and no test of what is beyond the end, as such bits are not set.

Two biases are less work in the forward, where they come by TMA beside the keys, as what
accumulators of the logits begin with: of one value a key, and of 16 bits, one a pair, in tiles.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.config import Problem
from pallas_kernels.online_softmax import LOG2E
from pallas_kernels.primitives import fresh_zero, keep_where, load_bits, load_elements

BIAS_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
_WORD = 32
_TILE_COLUMNS = 128  # the most columns of a tile: bits are there for whole ones


class Elements(NamedTuple):
    """None where there is none.

    Attributes:
      mask: bool `[b, n, t, s]`; True is visible.
      bias: `[b, n, t, s]` of one of `BIAS_DTYPES`; added to the scaled logits.
    """

    mask: jax.Array | None = None
    bias: jax.Array | None = None

    def operands(self, *, transposed: bool = False) -> tuple[jax.Array, ...]:
        """The arrays that `ElementRefs` stands for in a kernel; transposed: rows are keys."""
        axis = 2 if transposed else 3
        mask = () if self.mask is None else (pack(self.mask, axis),)
        return mask if self.bias is None else (*mask, _whole_tiles(self.bias, axis))

    @property
    def has_bias_of_keys(self) -> bool:
        """Whether the bias is one value a key."""
        return self.bias is not None and self.bias.shape[2] == 1 and self.bias.shape[3] > 1

    @property
    def tiled_bias_dtype(self) -> np.dtype | None:
        """That of a bias of a value a pair that TMA takes tiles of; None of another, or of none."""
        bias = self.bias
        if bias is None or 1 in bias.shape[2:] or bias.dtype.itemsize != 2:
            return None
        return bias.dtype if bias.shape[3] % 8 == 0 else None

    @property
    def shares_bias(self) -> bool:
        """Whether batch entries share a bias that has a value a pair."""
        return self.bias is not None and 1 not in self.bias.shape[2:] and self.bias.shape[0] == 1

    def forward_operands(self, problem: Problem) -> tuple[jax.Array, ...]:
        """`operands` with a bias of keys as what the accumulators of logits begin with."""
        if self.bias is None or not (self.has_bias_of_keys and problem.may_begin_with_bias):
            return self.operands()
        bias = self.bias.astype(jnp.float32)
        if problem.adds_bias:
            bias = compressed(bias, problem)
        return self._replace(bias=bias / problem.scale).operands()


def _whole_tiles(bias: jax.Array, axis: int) -> jax.Array:
    """One value a column with zeros up to whole tiles, so that no column needs a test."""
    if bias.shape[axis] == 1 or bias.shape[5 - axis] > 1:
        return bias
    padding = [(0, 0)] * 4
    padding[axis] = (0, -bias.shape[axis] % _TILE_COLUMNS)
    return jnp.pad(bias, padding)


NO_ELEMENTS = Elements()


def pack(mask: jax.Array, axis: int) -> jax.Array:
    """Bits of a bool `[b, n, t, s]` mask along one of its last two axes.

    Returns:
      int32 `[b, n, other axis, words]`: bit j of word i is that of element 32 * i + j, 0 beyond the
      end, in whole tiles; of an axis of 1 it is one word with all bits alike.
    """
    if axis == 2:
        mask = mask.swapaxes(2, 3)
    *rest, length = mask.shape
    if length == 1:
        return -mask.astype(jnp.int32)
    mask = jnp.pad(mask, ((0, 0),) * 3 + ((0, -length % _TILE_COLUMNS),))
    places = lax.broadcast_to_rank(jnp.arange(_WORD, dtype=jnp.uint32), mask.ndim + 1)
    bits = mask.reshape(*rest, -1, _WORD).astype(jnp.uint32) << places
    return lax.bitcast_convert_type(bits.sum(-1, dtype=jnp.uint32), jnp.int32)


class Loaded(NamedTuple):
    """What gives the elements of a tile: from registers, or by loading them only then."""

    bits: Callable[[], jax.Array] | None = None
    bias: Callable[[], jax.Array] | None = None


NOTHING_LOADED = Loaded()


@dataclasses.dataclass(frozen=True)
class ElementRefs:
    """The elements of a problem inside a kernel.

    Attributes:
      refs: of `Elements.operands`, in global memory.
      transposed: tiles are of keys by queries.
      comes_by_tma: the bias does, and `load` leaves it out.
    """

    problem: Problem
    refs: tuple[Any, ...]
    transposed: bool = False
    comes_by_tma: bool = False

    @property
    def wide(self) -> bool:
        """Whether a dense bias takes a register or a load an element, or is beside a mask."""
        if not self.problem.has_bias or self.comes_by_tma:
            return False
        bias = self.refs[-1]
        takes_more = bias.dtype == jnp.float32 or bias.shape[-1] % 2 == 1
        return 1 not in bias.shape[2:] and (takes_more or self.problem.has_mask)

    @property
    def any_of_queries(self) -> bool:
        """Whether there is a mask, or a bias of more than one value along the queries."""
        return self.problem.has_mask or (self.problem.has_bias and self.refs[-1].shape[2] > 1)

    @classmethod
    def split(cls, problem: Problem, refs, **options: bool) -> "tuple[ElementRefs, list]":
        """The elements that a kernel's refs begin with, and the other refs."""
        count = int(problem.has_mask) + int(problem.has_bias)
        return cls(problem, tuple(refs[:count]), **options), list(refs[count:])

    def bias_of_keys(self, batch, head, first: Any, keys: int):
        """A view of `keys` of them in global memory, in whole tiles."""
        return self._of(self.refs[-1], batch, head).at[0, pl.ds(first, keys)]

    def bias_tile(self, batch, head, first_row, first_key):
        """A view of 64 by 64 of them in global memory, zeros beyond the end."""
        view = self._of(self.refs[-1], batch, head)
        return view.at[pl.ds(first_row, 64), pl.ds(first_key, 64)]

    def load(
        self,
        batch,
        head,
        first_row,
        first_column,
        columns: int,
        *,
        early: bool = False,
        bias: Callable[[], jax.Array] | None = None,
    ) -> Loaded:
        """Loads a tile of 64 rows; beyond the end these read as the last, columns as a bias of 0.

        Args:
          early: load now, into registers that are then taken, not where the elements are used.
          bias: what gives the bias where it has been loaded before.
        """
        found = Loaded(bias=bias)
        place = first_row, first_column, columns
        if self.problem.has_mask:
            view = self._of(self.refs[0], batch, head)
            found = found._replace(bits=functools.partial(load_bits, view, *place))
        if self.problem.has_bias and not (bias or self.comes_by_tma):
            found = found._replace(bias=self.bias_of(batch, head, *place))
        return Loaded(*(load and _done(load) for load in found)) if early else found

    def bias_of(
        self, batch, head, first_row, first_column, columns: int
    ) -> Callable[[], jax.Array]:
        """What loads the bias of a tile of 64 rows, as `load` has it."""
        view = self._of(self.refs[-1], batch, head)
        place = first_row, first_column, columns
        return functools.partial(load_elements, view, *place, transposed=self.transposed)

    def _of(self, ref, batch, head):
        """The view of a batch entry and head, which are 0 where all have the same."""
        entries, heads = ref.shape[:2]
        sharing = self.problem.batch // entries
        if entries == 1:
            batch = 0
        elif sharing > 1:
            batch = lax.div(batch, jnp.int32(sharing))
        # Made anew each time: kept over a loop, addresses cost registers.
        return ref.at[batch, 0 if heads == 1 else head + fresh_zero()]


def _done(load: Callable[[], jax.Array]) -> Callable[[], jax.Array]:
    value = load()
    return lambda: value


def biased(
    products: jax.Array, problem: Problem, loaded: Loaded, *, exact: bool = False
) -> tuple[jax.Array, float]:
    """Logits with their bias, and what to multiply them with to have them in log2 units.

    Args:
      products: of query and key, and what these were added to.
      exact: a bias may be far from 0, and be all that a row has.
    """
    if loaded.bias is None:
        return products, problem.scale * LOG2E
    bias = loaded.bias()
    is_short = bias.dtype == jnp.float16
    bias = bias.astype(jnp.float32)
    if exact and not is_short:
        bias = compressed(bias, problem)
    return products * problem.scale + bias, LOG2E


# A bias stands for hidden keys as often as not, and some of what does is near float32's largest
# number: `finfo.min`. In log2 units, or over scale, it would be infinite. Softmax of logits that
# far from 0 is a matter of which is largest, by however much: so what lies beyond 2^(126 - shift)
# or so comes nearer to it, in its order, by factors of 2^-shift.


def compressed(bias: jax.Array, problem: Problem) -> jax.Array:
    """The same bias near 0, and one that tells in the same way far from it; infinity as it is."""
    nearer, begin = bias * 2.0**-problem.bias_shift, 2.0 ** (126 - problem.bias_shift)
    return jnp.maximum(jnp.minimum(bias, nearer + begin), nearer - begin)


def expanded(logits: jax.Array, problem: Problem) -> jax.Array:
    """What `compressed` made these logits of, within float32."""
    shift, begin = 2.0**problem.bias_shift, 2.0 ** (126 - problem.bias_shift)
    below, above = (logits + begin) * shift, (logits - begin) * shift
    largest = float(jnp.finfo(jnp.float32).max)
    return jnp.clip(jnp.maximum(jnp.minimum(logits, below), above), -largest, largest)


def masked(tile: jax.Array, loaded: Loaded, fill: float) -> jax.Array:
    """The tile with `fill` where the mask hides a key from a query."""
    return tile if loaded.bits is None else keep_where(tile, loaded.bits(), fill)
