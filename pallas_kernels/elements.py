"""How kernels read what belongs to single pairs of query and key (`element_arrays.py`).

Threads read mask and bias straight from global memory (in fact from L2), in the layout of a wgmma
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
from jax import lax

from pallas_kernels.element_arrays import compressed
from pallas_kernels.problem import LOG2E, Problem
from pallas_kernels.ptx.compiler import fresh_zero
from pallas_kernels.ptx.elements import keep_where, load_bits, load_elements
from pallas_kernels.score_functions import ScoreRefs


class Loaded(NamedTuple):
    """What gives the elements of a tile: from registers, or by loading them only then.

    `score` gives of products the logits that a function makes of them (`score_functions.py`).
    `place` is where the tile is: batch entry, head, first row and first column.
    """

    bits: Callable[[], jax.Array] | None = None
    bias: Callable[[], jax.Array] | None = None
    score: Callable[..., tuple[jax.Array, jax.Array | None]] | None = None
    place: tuple[Any, Any, Any, Any] | None = None


NOTHING_LOADED = Loaded()


@dataclasses.dataclass(frozen=True)
class ElementRefs:
    """The elements of a problem inside a kernel.

    Attributes:
      refs: of `Elements.operands`, in global memory, but for scores.
      scores: with the function that makes logits, if the problem has one.
      transposed: tiles are of keys by queries.
      comes_by_tma: the bias does, and `load` leaves it out.
    """

    problem: Problem
    refs: tuple[Any, ...]
    scores: ScoreRefs
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
        transposed = options.get("transposed", False)
        scores, others = ScoreRefs.split(problem, refs[count:], transposed=transposed)
        return cls(problem, tuple(refs[:count]), scores, **options), others

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
        if early:
            found = Loaded(found.bits and _done(found.bits), found.bias and _done(found.bias))
        found = found._replace(place=(batch, head, first_row, first_column))
        if self.problem.has_score:
            corner = batch, head, first_row, first_column
            found = found._replace(score=functools.partial(self.scores.of, corner))
        return found

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
      products: of query and key, and what these were added to; or what a function made of them.
      exact: a bias may be far from 0, and be all that a row has; so may what a function makes.
    """
    if problem.has_score:
        return compressed(products, problem) if exact else products, LOG2E
    if loaded.bias is None:
        return products, problem.scale * LOG2E
    bias = loaded.bias()
    is_short = bias.dtype == jnp.float16
    bias = bias.astype(jnp.float32)
    if exact and not is_short:
        bias = compressed(bias, problem)
    return products * problem.scale + bias, LOG2E


def masked(tile: jax.Array, loaded: Loaded, fill: float) -> jax.Array:
    """The tile with `fill` where the mask hides a key from a query."""
    return tile if loaded.bits is None else keep_where(tile, loaded.bits(), fill)
