"""The softmax of a row of logits that comes in tiles, for 64 rows in wgmma registers.

In base 2: `factor` is scale * log2(e), so that one fused multiply-add feeds the hardware's exp2. A
weight is 2^(factor * logit - reference), and any reference is exact: it cancels when the output is
divided by the sum of the weights. It only has to keep weights within the range of their dtype.

The online normaliser (Milakov and Gimelshein 2018, Algorithm 3) finds the maximum of every tile and
corrects sum and output when it rises. That is a third of the instructions, in the one chain of
dependent steps that nothing hides, and a row's maximum hardly changes after its first tile. So the
reference stands `headroom` above the maximum of the first tile (`start`) and stays there (`go_on`),
until a sum of weights reaches `limit`. `finish` reports such rows, and they are computed again with
`advance`, which looks for weights beyond `limit` in each tile. A row that needs no new reference is
the same to the bit either way.

A reference is rounded where it is made, and logits are not: far from 0 that is as much as the whole
range of weights. Such rows have a reference that is surely too low (`_reference_of`), so that their
sums ask for the second round, where steps are `bounded`: what is beyond a row's bound becomes it,
and these are the keys whose logits are its maximum, to rounding.
"""

import functools
import operator
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.problem import LOG2E

# Stands for the maximum of a row that has seen nothing: finite, so that -inf minus it is -inf.
NOTHING_SEEN = -3e38
# The reference of a row that will see nothing: weights are 0 whatever its logits, also unmasked.
_NOTHING_TO_SEE = 3e38

# Added and subtracted, it rounds a float32 to a whole number, for which Mosaic GPU has nothing. XLA
# folds both away where a CPU runs it under jit, as interpret mode does: any reference is right.
_TO_WHOLE = 1.5 * 2.0**23


class Range(NamedTuple):
    """How large weights may be, as powers of 2."""

    headroom: float  # a new reference makes the largest weight 2^-headroom
    limit: float  # a weight or a sum of weights from 2^limit on asks for a new reference
    # Whether a reference rises by a whole number, so that weights round as before. Else the largest
    # is a power of 2, which does not round: of much of a row's weight that tells in few bits.
    by_whole: bool = True
    # From there on a reference is far from 0: the largest weight may be 2^4 times what it should.
    far: float = 2.0**26

    @property
    def least_far(self) -> float:
        """What tells references far from 0 from others: none is near it."""
        return self.far + 100.0


def weight_range(dtype: np.dtype, *, searched: bool = False) -> Range:
    """The range for weights that are cast to `dtype`.

    `searched` says that the maximum of every tile is looked for, so that the limit is one of
    weights, and not of their sum.
    """
    if dtype == jnp.float8_e4m3fn:
        # The largest weight is near the largest number, 448, from which 2^17 are to the smallest.
        return Range(headroom=-8.0, limit=8.5, by_whole=False, far=2.0**22)
    if dtype == jnp.float16:
        # Weights below 2^-14 lose precision, from 2^16 on they are infinite.
        return Range(headroom=-8.0 if searched else 6.0, limit=15.0)
    # As wide as float32 takes with a margin for values below 1, and none above it, as a row's sum
    # of values is then no larger than the largest of them: a causal row's first tile may hold one
    # key alone, of a logit far below the others.
    return Range(headroom=48.0, limit=0.0)


class RowState(NamedTuple):
    """What is known of each row: `(64,)` reference in log2 units and `(64, 8)` partial sums."""

    reference: jax.Array
    sums: jax.Array


def spread(rows: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Broadcasts one value a row over `shape`."""
    return lax.broadcast_in_dim(rows, shape, [0])


def begin(rows: int, reference: float) -> RowState:
    """The state of rows whose reference is known, before their first tile: one for `add`."""
    return RowState(
        plgpu.layout_cast(jnp.full((rows,), reference, jnp.float32), plgpu.Layout.WGMMA.reduce(1)),
        plgpu.layout_cast(jnp.zeros((rows, 8), jnp.float32), plgpu.Layout.WGMMA),
    )


def start(
    logits: jax.Array,
    factor: float | jax.Array,
    allowed: Range,
    bounded: bool | jax.Array = False,
) -> tuple[jax.Array, RowState]:
    """The first tile of a row: its weights and the state. `(64,)` factors are those of rows."""

    def start(bounded):
        reference = _reference_of(jnp.maximum(logits.max(axis=1) * factor, NOTHING_SEEN), allowed)
        weights = _weights(logits, factor, reference, allowed if bounded else None)
        return weights, RowState(reference, partial_sums(weights))

    return _either(start, bounded)


def close(state: RowState, seeing: jax.Array) -> RowState:
    """Keeps rows from ever seeing a key, where `(64,)` seeing is not true, and none was seen yet.

    Their logits must be finite, or what became of them be `cleared`.
    """
    return RowState(jnp.where(seeing, state.reference, _NOTHING_TO_SEE), state.sums)


def cleared(state: RowState) -> tuple[RowState, jax.Array]:
    """The state without what closed rows have seen, be it NaN; and which they are, `(64,)` bool.

    After all tiles. Those with logits that are not finite must not have been for `advance`.
    """
    closed = state.reference == _NOTHING_TO_SEE
    sums = jnp.where(spread(closed, state.sums.shape), 0.0, state.sums)
    return RowState(state.reference, sums), closed


def advance(
    logits: jax.Array,
    factor: float | jax.Array,
    allowed: Range,
    state: RowState,
    bounded: bool | jax.Array = False,
) -> tuple[jax.Array, jax.Array, RowState]:
    """A further tile: its weights, what earlier weights must be multiplied with, and the state."""

    def advance(bounded):
        maximum = logits.max(axis=1) * factor
        reference = risen(state.reference, maximum, allowed)
        correction = jnp.exp2(state.reference - reference)
        weights = _weights(logits, factor, reference, allowed if bounded else None)
        sums = state.sums * spread(correction, state.sums.shape) + partial_sums(weights)
        return weights, correction, RowState(reference, sums)

    return _either(advance, bounded)


def _either(compute: Callable, bounded: bool | jax.Array):
    """`compute(bounded)`, in branches where that is known at run time only.

    All of it, as ptxas moves nothing over a branch.
    """
    if isinstance(bounded, bool):
        return compute(bounded)
    return lax.cond(bounded, lambda: compute(True), lambda: compute(False))


def risen(reference: jax.Array, maximum: jax.Array, allowed: Range) -> jax.Array:
    """The reference of rows after a further tile, whose `maximum` is in log2 units."""
    return _raised_where(maximum >= reference + allowed.limit, reference, maximum, allowed)


def _raised_where(is_low, reference, maximum, allowed):
    new = maximum
    if allowed.by_whole:  # but for ties, what a row gets depends on neither headroom nor limit
        raised = reference + ((maximum - reference + _TO_WHOLE) - _TO_WHOLE)
        # Far from 0 a difference would have bits of neither.
        is_apart = is_far(reference, allowed) | is_far(maximum, allowed)
        new = jnp.where(is_apart, maximum, raised)
    # No lower than it was: far from 0 one that is no higher than the rounding may look too low.
    raised = jnp.maximum(reference, _reference_of(new, allowed))
    return jnp.where(is_low, raised, reference)


def _reference_of(maximum: jax.Array, allowed: Range) -> jax.Array:
    """A new reference of rows with that maximum in log2 units.

    Far from 0 a little below the maximum, whatever it was before it was rounded.
    """
    lower = maximum - jnp.abs(maximum) * 2.0**-23
    return jnp.where(jnp.abs(maximum) < allowed.far + 200.0, maximum + allowed.headroom, lower)


def is_far(reference: jax.Array, allowed: Range) -> jax.Array:
    """Whether the references of rows are far from 0, or of rows that see nothing."""
    return jnp.abs(reference) >= allowed.least_far


def bounds_of(reference: jax.Array, allowed: Range) -> jax.Array:
    """What the exponents of no weight of rows with that reference exceed, `(64,)`."""
    return jnp.where(is_far(reference, allowed), -allowed.headroom, allowed.limit)


def unsettled(state: RowState, allowed: Range) -> jax.Array:
    """Which rows should look for maxima still, `(64,)` bool: a reference may rise in go_on no more.

    Those whose keys so far are hidden, or have a bias far below 0: other logits may be far above.
    """
    # A settled row's maximum may rise from -x at least to x, which are `limit` + `headroom` apart.
    return state.reference < 0.5 * (allowed.headroom - allowed.limit)


def go_on(
    logits: jax.Array, factor: float | jax.Array, state: RowState
) -> tuple[jax.Array, RowState]:
    """A further tile of rows that have seen a key, with the reference they have."""
    weights = _weights(logits, factor, state.reference)
    return weights, add(weights, state)


def add(weights: jax.Array, state: RowState) -> RowState:
    """The state after a further tile whose weights are known."""
    return RowState(state.reference, state.sums + partial_sums(weights))


class RowEnd(NamedTuple):
    """What ends rows, `(64,)` each.

    Attributes:
      inverse: what to multiply the output with; 0 where nothing was seen.
      lse: natural log of the sum of exp(logits).
      log_sum: log2 of the sum of 2^(logits in log2 units - the row's reference), which an LSE far
        from 0 has no bits for.
    """

    inverse: jax.Array
    lse: jax.Array
    log_sum: jax.Array


def finish(
    state: RowState,
    limit: float,
    sink: jax.Array | None = None,
    in_nats: Callable[[jax.Array], jax.Array] | None = None,
) -> tuple[RowEnd, jax.Array]:
    """What ends a row, and whether its reference was too low, or an input NaN.

    Args:
      state: after the last tile.
      limit: as for `advance`.
      sink, in_nats: as for `normalised`.
    """
    total = state.sums.sum(axis=1)
    too_low = jnp.logical_not(total < 2.0**limit)
    return normalised(state.reference, total, sink, in_nats), too_low


def normalised(
    reference: jax.Array,
    total: jax.Array,
    sink: jax.Array | None = None,
    in_nats: Callable[[jax.Array], jax.Array] | None = None,
) -> RowEnd:
    """What ends rows whose weights add up to `total`.

    Args:
      reference, total: of rows.
      sink: None, or `(64,)` one more logit, in log2 units, of a row that has seen anything.
      in_nats: of a reference in log2 units, where it is not that alone.
    """
    own_reference = reference
    correction: jax.Array | float = 1.0
    if sink is not None:
        # It may stand above all weights, by more than float32 holds, and be infinite.
        reference = jnp.where(total == 0.0, reference, jnp.maximum(reference, sink))
        correction = jnp.exp2(own_reference - reference)
        of_sink = jnp.where(sink < reference, jnp.exp2(sink - reference), 1.0)
        total = jnp.where(total == 0.0, 0.0, total * correction + of_sink)
    inverse = jnp.where(total > 0.0, correction / total, 0.0)
    log = jnp.log(total)
    nats = reference * (1.0 / LOG2E) if in_nats is None else in_nats(reference)
    log_sum = log * LOG2E
    if sink is not None:
        log_sum += reference - own_reference
    return RowEnd(inverse, nats + log, log_sum)


def _weights(logits, factor, reference, allowed: Range | None = None):
    """Weights, none of them beyond the bound of its row if it is known what is allowed."""
    if not isinstance(factor, float):
        factor = spread(factor, logits.shape)
    exponents = logits * factor - spread(reference, logits.shape)
    if allowed is not None:
        exponents = jnp.minimum(exponents, spread(bounds_of(reference, allowed), logits.shape))
    return jnp.exp2(exponents)


def partial_sums(weights: jax.Array) -> jax.Array:
    groups = [weights[:, g : g + 8] for g in range(0, weights.shape[1], 8)]
    # Two chains, so that an addition need not wait for the last one.
    even, odd = (
        functools.reduce(operator.add, groups[0::2]),
        functools.reduce(operator.add, groups[1::2]),
    )
    return even + odd
