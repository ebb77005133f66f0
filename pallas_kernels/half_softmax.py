"""The softmax of logits in float16, in tiles of 64 rows in wgmma registers, for weights in FP8.

As in `online_softmax.py` a weight is 2^(factor * logit - reference), and the reference of a row's
first tile (`start`) is kept (`go_on`), but what asks for a new one (`renew`) is looked at in every
tile: e4m3 has 2^-9 to 448.

float16 has the 11 significant bits that are left of products of FP8, and is exact enough for
exponents: the smaller a weight, the larger its error, from 2^-11 of it on. So where factor and
reference are float16 numbers too, one multiply-add makes two exponents. Where a reference is so far
from 0 that few bits are left for the exponents, `go_on` makes NaN of the weights, and `renew` the
weights themselves, in float32.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.online_softmax import NOTHING_SEEN, RowState, spread
from pallas_kernels.ptx.float8 import half_maxima, half_sums, half_weights

# A new reference makes the largest weight of a row that, as a power of 2, which e4m3 has exactly:
# where few keys have most of the weight, rounding them is most of the error.
LARGEST = 4.0
# The partial sum of a tile that asks for a new reference: none of its weights is beyond e4m3 then,
# and those of a thread, 16 of 2^4, make 2^8.
SUM_LIMIT = 448.0

# From there on a reference is not rounded, as the largest weight would not be near `LARGEST`, and
# `half_weights` does not take it.
_FAR = 2.0**11

# From there on a reference is rounded by more than 1, and weights may be beyond e4m3 but for this.
_ROUNDED = 2.0**24
_MOST = 8.8073  # as a power of 2: 448

_COLUMNS = 16  # of logits that are in float32 at a time, as a whole tile has no room


def start(logits: jax.Array, factor: jax.Array) -> tuple[jax.Array, RowState]:
    """The first tile of a row: its weights, float16, and the state; `(64,)` factors."""
    factor = _in_half(factor)
    reference = _reference(half_maxima(logits) * factor)
    weights, sums = _weights_by_float32(logits, factor, reference)
    return weights, RowState(reference, sums)


def go_on(
    logits: jax.Array, factor: jax.Array, state: RowState
) -> tuple[jax.Array, jax.Array, RowState]:
    """A further tile, with the reference that there is.

    Returns:
      Its weights, float16, their own `(64, 8)` partial sums, and the state. Where a sum is
      `SUM_LIMIT` or more, or NaN, `renew` is to take the place of all.
    """
    weights = half_weights(logits, factor, state.reference)
    sums = half_sums(weights)
    return weights, sums, RowState(state.reference, state.sums + sums)


def renew(
    logits: jax.Array, factor: jax.Array, sums: jax.Array, state: RowState
) -> tuple[jax.Array, jax.Array, RowState]:
    """A further tile, with a new reference for those rows whose sums ask for one.

    Args:
      logits, factor: as for `go_on`.
      sums: of this tile, from `go_on`.
      state: before this tile.

    Returns:
      Its weights, what earlier ones must be multiplied with, `(64,)`, and the state.
    """
    fits = sums.max(axis=1) < SUM_LIMIT
    factor = _in_half(factor)
    risen = jnp.maximum(_reference(half_maxima(logits) * factor), state.reference)
    reference = jnp.where(fits, state.reference, risen)
    correction = jnp.exp2(state.reference - reference)
    weights, sums = _weights_by_float32(logits, factor, reference)
    earlier = state.sums * spread(correction, state.sums.shape)
    return weights, correction, RowState(reference, earlier + sums)


def _reference(maxima):
    """Of rows with these maxima in log2 units; far from 0 a little below them, once rounded."""
    maxima = jnp.maximum(maxima, NOTHING_SEEN)
    lower = maxima - jnp.abs(maxima) * 2.0**-23
    return _in_half(jnp.where(jnp.abs(maxima) < _ROUNDED, maxima - LARGEST, lower))


def _in_half(x):
    """float32 rounded to the 11 bits of float16 (Dekker 1971), but for what is far from 0."""
    lower = x * (2.0**13 + 1.0)
    return jnp.where(jnp.abs(x) < _FAR, lower - (lower - x), x)


def _weights_by_float32(logits, factor, reference):
    """Weights, and their `(64, 8)` sums."""
    parts = []
    sums: jax.Array | float = 0.0
    for first in range(0, logits.shape[1], _COLUMNS):
        part = logits[:, first : first + _COLUMNS].astype(jnp.float32)
        part = part * spread(factor, part.shape) - spread(reference, part.shape)
        part = jnp.exp2(jnp.minimum(part, _MOST))
        sums = sums + part[:, :8] + part[:, 8:]
        parts.append(part.astype(jnp.float16))
    assert isinstance(sums, jax.Array)
    return jnp.concatenate(parts, axis=1), sums
