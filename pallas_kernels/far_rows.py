"""Rows far from 0 in the backward: one float32 has no bits for both their logits and their sum.

A weight is exp(logit - LSE). An LSE of -1e30, as of a row whose keys are all hidden by a bias, has
no bits left for the log of how many keys there are, and each of them would weigh 1. So from
`LEAST_LSE` on weights are made of what the forward knows of a row (`online_softmax.py`):

    2^(min(logit in log2 units - reference, bound) - log_sum)

That is behind a branch, which costs a step the look at its rows, up to a tenth at width 64. So the
steps that take it have a loop of their own, for where any row of all is far from 0.

Without a bias the start of such a row is the reference, and a share, which comes with it, makes
weights of what steps get by that: `min(x, 1) * share`, once they have time.

A bias may be as far from 0 as float32 goes, and its logits would not survive; with ids or dropout
there is no room for shares. There a mark takes the place of the start, which is as good as 0, so
that products of query and key begin as in the forward. Reference and log_sum are in tables of 64
rows, of which a mark is the number.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.element_arrays import compressed
from pallas_kernels.elements import Loaded, biased
from pallas_kernels.online_softmax import Range, bounds_of, is_far, spread, weight_range
from pallas_kernels.problem import LOG2E, Problem
from pallas_kernels.ptx.loads import load_rows
from pallas_kernels.ptx.marks import (
    any_far,
    any_marked,
    bounded_columns,
    is_mark,
    mark,
    shared_columns,
)
from pallas_kernels.ptx.votes import any_row
from pallas_kernels.row_masks import in_each_row

LEAST_LSE = 2.0**14  # an LSE is right to 2^-10 of a weight below
ROWS = 64  # of a table
_LEAST_START = 1e-30  # starts nearer to 0 are 0, not to be taken for marks


def far_shape(problem: Problem, padded_rows: int) -> jax.ShapeDtypeStruct:
    """Reference and log_sum of rows, in tables of 64: [batch * heads * tables, 2, 64]."""
    tables = problem.batch * problem.heads * (padded_rows // ROWS)
    return jax.ShapeDtypeStruct((tables, 2, ROWS), jnp.float32)


def is_far_in_backward(lse: jax.Array) -> jax.Array:
    """Which rows, by their LSE."""
    distance = jnp.abs(lse)
    return (distance >= LEAST_LSE) & (distance < jnp.inf)


def marked(start: jax.Array, is_marked: jax.Array, number: jax.Array) -> jax.Array:
    """The start of rows, or what marks them.

    Args:
      number: of their table; what fits into memory has fewer than marks have numbers.
    """
    start = jnp.where(jnp.abs(start) < _LEAST_START, 0.0, start)
    return jnp.where(is_marked, mark(number), start)


def start_and_share(
    reference: jax.Array, log_sum: jax.Array, problem: Problem
) -> tuple[jax.Array, jax.Array]:
    """Of rows far from 0, without a bias.

    What steps get is at most 1: what share brings back, or where logits are rounded by more than
    weights have room for, the row's largest logits and no others.
    """
    unit, allowed = problem.scale * LOG2E, _allowed(problem)
    exact = reference + log_sum
    below = (-exact - jnp.abs(exact) * 2.0**-22) * (1.0 / unit)
    above = (jnp.abs(reference) * 2.0**-21 - reference) * (1.0 / unit)
    is_out = is_far(reference, allowed)
    share = jnp.where(is_out, -allowed.headroom, -(reference + below * unit)) - log_sum
    return jnp.where(is_out, above, below), jnp.exp2(share)


def shared_by_key(weights: jax.Array, rows_ref: Any, problem: Problem) -> jax.Array:
    """Weights of a tile of keys and queries, of what steps make of starts.

    Args:
      rows_ref: `(2 or more, n)` in shared memory: starts and shares.
    """

    least = LEAST_LSE / problem.scale
    share = lambda weights: shared_columns(weights, rows_ref.at[1])
    return lax.cond(any_far(rows_ref.at[0], least), share, lambda x: x, weights)


def reference_of(
    lse: jax.Array, given: Sequence[jax.Array], problem: Problem
) -> tuple[jax.Array, jax.Array]:
    """Reference and log_sum of rows: the two that the forward gave, or by their LSE alone.

    Far from 0 the reference is a little lower than in the forward, where logits may have been
    rounded otherwise.
    """
    if not given:  # then it is as good as a reference
        nats = compressed(lse, problem) if problem.unbounded else lse
        given = nats * LOG2E, in_each_row(jnp.float32(0))
    reference, log_sum = given
    lower = reference - jnp.abs(reference) * 2.0**-22
    return jnp.where(is_far(reference, _allowed(problem)), lower, reference), log_sum


def weights_by_key(
    products: jax.Array, loaded: Loaded, problem: Problem, start_ref: Any, far_ref: Any
) -> jax.Array:
    """Weights of a tile of keys and queries.

    Args:
      products: `(64, n)`, which began at the starts of the queries.
      loaded: what gives the bias.
      start_ref: `(n,)` starts, in shared memory.
      far_ref: of `far_shape`, in global memory.
    """
    allowed = _allowed(problem)

    def near():
        logits, to_log2 = biased(products, problem, loaded)
        return jnp.exp2(logits * to_log2)

    def far():
        logits, to_log2 = biased(products, problem, loaded, exact=True)
        exponents = bounded_columns(
            logits * to_log2,
            start_ref,
            far_ref,
            far=allowed.least_far,
            bound_far=-allowed.headroom,
            bound=allowed.limit,
        )
        return jnp.exp2(exponents)  # here, as ptxas spills where it is behind the branch

    return lax.cond(any_marked(start_ref), far, near)


def start_and_share_of_marks(
    start: jax.Array, far_ref: Any, place: tuple, problem: Problem
) -> tuple[jax.Array, jax.Array]:
    """What `start_and_share` gives, of rows that may be marked, and a share of 1 of others.

    Args:
      start: `(64,)`.
      far_ref, place: as for `weights_by_query`.
    """
    is_marked = is_mark(start)
    one = in_each_row(jnp.float32(1))

    def of_marks():
        own = start_and_share(*_of_table(far_ref, place, problem), problem)
        return jnp.where(is_marked, own[0], start), jnp.where(is_marked, own[1], one)

    return lax.cond(any_row(is_marked), of_marks, lambda: (start, one))


def weights_by_query(
    products: jax.Array,
    loaded: Loaded,
    problem: Problem,
    start: jax.Array,
    far_ref: Any,
    place: Callable[[], tuple],
) -> jax.Array:
    """The same of a tile of queries and keys, with products that began at 0.

    Args:
      start: `(64,)`.
      place: gives batch entry, head and first row of the tile.
    """
    is_marked = is_mark(start)
    unit = problem.logit_unit * LOG2E

    def near():
        logits, to_log2 = biased(products, problem, loaded)
        return logits * to_log2 + spread(start * unit, logits.shape)

    def far():
        logits, to_log2 = biased(products, problem, loaded, exact=True)
        reference, log_sum = _of_table(far_ref, place(), problem)
        bounds = jnp.where(is_marked, bounds_of(reference, _allowed(problem)), jnp.inf)
        log_sum = jnp.where(is_marked, log_sum, 0.0)
        reference = jnp.where(is_marked, reference, start * -unit)
        exponents = logits * to_log2 - spread(reference, logits.shape)
        exponents = jnp.minimum(exponents, spread(bounds, logits.shape))
        return exponents - spread(log_sum, logits.shape)

    return jnp.exp2(lax.cond(any_row(is_marked), far, near))


def _of_table(far_ref: Any, place: tuple, problem: Problem) -> tuple[jax.Array, jax.Array]:
    """Reference and log_sum of 64 rows from the one on that place names."""
    batch, head, first_row = place
    tables = far_ref.shape[0] // (problem.batch * problem.heads)
    number = (batch * problem.heads + head) * tables + lax.div(first_row, jnp.int32(ROWS))
    reference, log_sum = (load_rows(far_ref.at[number, n], 0, ROWS - 1) for n in range(2))
    return reference, log_sum


def _allowed(problem: Problem) -> Range:
    return weight_range(problem.dtype)
