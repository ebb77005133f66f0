"""The running maximum and sum of a row of logits, for tiles of 64 rows in wgmma registers.

Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018), Algorithm 3, in base 2:
`factor` is scale * log2(e), so that one fused multiply-add feeds the hardware's exp2. The sum stays
spread over the threads until the end, as eight partial sums a row; only the maximum is shared
between the four threads of a row at each step.
"""

import functools
import math
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

LOG2E = math.log2(math.e)

# Stands for the maximum of a row that has seen nothing: finite, so that -inf minus it is -inf.
_NOTHING_SEEN = -1e30


class RowState(NamedTuple):
    """What is known of each row: `(64,)` maximum in log2 units and `(64, 8)` partial sums."""

    maximum: jax.Array
    sums: jax.Array


def spread(rows: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Broadcasts one value a row over `shape`."""
    return lax.broadcast_in_dim(rows, shape, [0])


def start(logits: jax.Array, factor: float) -> tuple[jax.Array, RowState]:
    """The first tile of a row: its weights 2^(factor * logits - maximum) and the state."""
    maximum = jnp.maximum(logits.max(axis=1) * factor, _NOTHING_SEEN)
    weights = jnp.exp2(logits * factor - spread(maximum, logits.shape))
    return weights, RowState(maximum, _partial_sums(weights))


def advance(
    logits: jax.Array, factor: float, state: RowState
) -> tuple[jax.Array, jax.Array, RowState]:
    """A further tile: its weights, what earlier weights must be multiplied with, and the state."""
    maximum = jnp.maximum(state.maximum, logits.max(axis=1) * factor)
    correction = jnp.exp2(state.maximum - maximum)
    weights = jnp.exp2(logits * factor - spread(maximum, logits.shape))
    sums = state.sums * spread(correction, state.sums.shape) + _partial_sums(weights)
    return weights, correction, RowState(maximum, sums)


def finish(state: RowState) -> tuple[jax.Array, jax.Array]:
    """What to multiply the output with, 0 where nothing was seen, and the natural-log LSE."""
    total = state.sums.sum(axis=1)
    inverse = jnp.where(total > 0.0, 1.0 / total, 0.0)
    return inverse, state.maximum * (1.0 / LOG2E) + jnp.log(total)


def _partial_sums(weights: jax.Array) -> jax.Array:
    groups = [weights[:, g : g + 8] for g in range(0, weights.shape[1], 8)]
    # Two chains, so that an addition need not wait for the last one.
    even, odd = (
        functools.reduce(operator.add, groups[0::2]),
        functools.reduce(operator.add, groups[1::2]),
    )
    return even + odd
