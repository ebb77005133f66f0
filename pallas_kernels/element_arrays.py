"""What belongs to single pairs of query and key: a bias of their logits, a mask that hides them.

Both are `[b, n, t, s]`, each axis that of `[B, N, T, S]`, or 1, or for b a divisor of B whose
entries serve B / b batch entries in a row. No axis is ever broadcast in memory. Here is what
becomes of them before kernels read them (`elements.py`).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bit_words import words
from pallas_kernels.problem import Problem

BIAS_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
_TILE_COLUMNS = 128  # the most columns of a tile: bits are there for whole ones


class MaskBits(NamedTuple):
    """Of a mask with a value a pair (`mask_bits.py`).

    Attributes:
      by_query: int32 `[b, n, T, words]`: bit j of word i is that of key 32 * i + j, 0 beyond the
        end, in whole tiles.
      by_key: the same `[b, n, S, words]`, of queries.
      kinds, seen: those of `Blocks`. What the bounds of a problem that has lists hide is hidden in
        these, too.
    """

    by_query: jax.Array
    by_key: jax.Array
    kinds: jax.Array
    seen: jax.Array


class Elements(NamedTuple):
    """None where there is none.

    Attributes:
      mask: bool `[b, n, t, s]`; True is visible. Or its bits, where they have been made.
      bias: `[b, n, t, s]` of one of `BIAS_DTYPES`; added to the scaled logits.
      scores: of a score function (`score_functions.py`), if it reads them: batch entry and head as
        it counts them, int32 `[b, N, 1, 2]`, then its arrays, `[b, 1, 1, size]` of int32 or
        float32.
    """

    mask: jax.Array | MaskBits | None = None
    bias: jax.Array | None = None
    scores: tuple[jax.Array, ...] = ()

    def operands(self, *, transposed: bool = False) -> tuple[jax.Array, ...]:
        """What `ElementRefs` and `ScoreRefs` stand for in a kernel; transposed: rows are keys."""
        axis = 2 if transposed else 3
        mask: tuple[jax.Array, ...] = ()
        if isinstance(self.mask, MaskBits):
            mask = (self.mask.by_key if transposed else self.mask.by_query,)
        elif self.mask is not None:
            mask = (pack(self.mask, axis),)
        bias = () if self.bias is None else (_whole_tiles(self.bias, axis),)
        return *mask, *bias, *self.scores

    @property
    def has_bias_of_keys(self) -> bool:
        """Whether the bias is one value a key."""
        return self.bias is not None and self.bias.shape[2] == 1 and self.bias.shape[3] > 1

    @property
    def tiled_bias_dtype(self) -> np.dtype | None:
        """That of a bias of a value a pair that TMA takes tiles of; None of another, or of none."""
        bias = self.bias
        if bias is None or not is_of_pairs(bias) or bias.dtype.itemsize != 2:
            return None
        return bias.dtype if bias.shape[3] % 8 == 0 else None

    @property
    def shares_bias(self) -> bool:
        """Whether batch entries share a bias that has a value a pair."""
        return self.bias is not None and is_of_pairs(self.bias) and self.bias.shape[0] == 1

    def forward_operands(self, problem: Problem) -> tuple[jax.Array, ...]:
        """`operands` with a bias of keys as what the accumulators of logits begin with."""
        if self.bias is None or not (self.has_bias_of_keys and problem.may_begin_with_bias):
            return self.operands()
        bias = self.bias.astype(jnp.float32)
        if problem.unbounded:
            bias = compressed(bias, problem)
        return self._replace(bias=bias / problem.scale).operands()


class Blocks(NamedTuple):
    """What kernels take of a mask whose blocks are known at run time only.

    A leading axis is that of the batch, or 1, or what divides it, as in `Elements`.

    Attributes:
      kinds: int8 `[b, n, query blocks, key blocks]`.
      seen: int32 `[b, n, words]`: bit j of word i is that of key 32 * i + j, which a query sees, or
        which is beyond the end. None where keys that none sees are zero.
      numbers: None, or int32 `[b, N, 2]`: batch entry and query head as the function counts them.
      captured: the arrays that it reads, `[b, size]` of int32 or float32.
    """

    kinds: jax.Array
    seen: jax.Array | None = None
    numbers: jax.Array | None = None
    captured: tuple[jax.Array, ...] = ()

    @property
    def operands(self) -> tuple[jax.Array, ...]:
        """Those of kernels beside lists."""
        return self.captured if self.numbers is None else (self.numbers, *self.captured)


def is_of_pairs(x: jax.Array | None) -> bool:
    """Whether a mask or bias has a value a pair, and kernels read it so."""
    return x is not None and 1 not in x.shape[2:]


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
    length = mask.shape[3]
    if length == 1:
        return -mask.astype(jnp.int32)
    return words(jnp.pad(mask, ((0, 0),) * 3 + ((0, -length % _TILE_COLUMNS),)))


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
