"""Rows far from 0 in the backward: one float32 has no bits for both their logits and their sum.

A weight is exp(logit - LSE). An LSE of -1e30, as of a row whose keys are all hidden by a bias, has
no bits left for the log of how many keys there are, and each of them would weigh 1. So from
`LEAST_LSE` on a row has no start but a mark in its place, which is as good as 0: products of query
and key begin there as in the forward, and weights are those of the forward:

    2^(min(logit in log2 units - reference, bound) - log_sum)         (`online_softmax.py`)

That is behind a branch, which costs a step the reading of its marks. Reference and log_sum are in
tables of 64 rows, of which a mark is the number.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.config import Problem
from pallas_kernels.elements import Loaded, biased, compressed
from pallas_kernels.online_softmax import LOG2E, Range, bounds_of, is_far, spread, weight_range
from pallas_kernels.primitives import (
    any_marked,
    any_row,
    bounded_columns,
    is_mark,
    load_rows,
    mark,
)

LEAST_LSE = 2.0**14  # an LSE is right to 2^-10 of a weight below
ROWS = 64  # of a table
_LEAST_START = 1e-30  # starts nearer to 0 are 0, not to be taken for marks


def far_shape(problem: Problem, padded_rows: int) -> jax.ShapeDtypeStruct:
    """Reference and log_sum of rows, in tables of 64: [batch * heads * tables, 2, 64]."""
    tables = problem.batch * problem.heads * (padded_rows // ROWS)
    return jax.ShapeDtypeStruct((tables, 2, ROWS), jnp.float32)


def marked(
    start: jax.Array, lse: jax.Array, number: jax.Array, problem: Problem
) -> tuple[jax.Array, jax.Array]:
    """The start of rows, or what marks them; and which are marked, `(64,)` bool.

    Args:
      number: of their table; what fits into memory has fewer than marks have numbers.
    """
    start = jnp.where(jnp.abs(start) < _LEAST_START, 0.0, start)
    if problem.soft_cap is not None:  # it bounds logits
        return start, jnp.zeros_like(lse, bool)
    distance = jnp.abs(lse)
    is_marked = (distance >= LEAST_LSE) & (distance < jnp.inf)
    return jnp.where(is_marked, mark(number), start), is_marked


def reference_of(
    lse: jax.Array, given: Sequence[jax.Array], problem: Problem
) -> tuple[jax.Array, jax.Array]:
    """Reference and log_sum of rows: the two that the forward gave, or by their LSE alone.

    Far from 0 the reference is a little lower than in the forward, where logits may have been
    rounded otherwise.
    """
    if not given:
        nats = compressed(lse, problem) if problem.adds_bias else lse
        given = nats * LOG2E, jnp.zeros_like(lse)
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


def weights_by_query(
    products: jax.Array, loaded: Loaded, problem: Problem, start: jax.Array, far_ref: Any, place
) -> jax.Array:
    """The same of a tile of queries and keys, with products that began at 0.

    Args:
      start: `(64,)`.
      place: gives batch entry, head and first row of the tile.
    """
    is_marked = is_mark(start)

    def near():
        logits, to_log2 = biased(products, problem, loaded)
        return logits * to_log2 + spread(start * (problem.scale * LOG2E), logits.shape)

    def far():
        logits, to_log2 = biased(products, problem, loaded, exact=True)
        batch, head, first_row = place()
        head_of_all = batch * problem.heads + head
        tables = far_ref.shape[0] // (problem.batch * problem.heads)
        table = far_ref.at[head_of_all * tables + lax.div(first_row, jnp.int32(ROWS))]
        reference, log_sum = (load_rows(table.at[n], 0, ROWS - 1) for n in range(2))
        bounds = jnp.where(is_marked, bounds_of(reference, _allowed(problem)), jnp.inf)
        log_sum = jnp.where(is_marked, log_sum, 0.0)
        reference = jnp.where(is_marked, reference, start * (-problem.scale * LOG2E))
        exponents = logits * to_log2 - spread(reference, logits.shape)
        exponents = jnp.minimum(exponents, spread(bounds, logits.shape))
        return exponents - spread(log_sum, logits.shape)

    return jnp.exp2(lax.cond(any_row(is_marked), far, near))


def _allowed(problem: Problem) -> Range:
    return weight_range(problem.dtype)
