"""Intervals known only at run time: of the keys a query sees, of the queries that see a key.

An array of intervals is int32 `[B, 2, rows]`: where each row's interval begins and where it ends,
both never decreasing from row to row. A row whose end is not above its beginning sees nothing.

From them come, in plain JAX, the tables that say which blocks a tile needs and which of these need
no mask; their sizes, and so the kernels, depend on no value. Masked steps read the array itself.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.problem import Problem

FAR = np.iinfo(np.int32).max  # the first of nothing


class Reach(NamedTuple):
    """What tiles of rows see, `[B, tiles]` int32 each, in single keys (or queries).

    Attributes:
      first, end: what any row sees lies between them; `first` is above `end` if there is nothing.
      common_first, common_end: what lies between them is seen by all rows; it may be nothing.
    """

    first: jax.Array
    end: jax.Array
    common_first: jax.Array
    common_end: jax.Array


def of_bounds(lowest: int | None, highest: int | None, rows: np.ndarray, others: int) -> np.ndarray:
    """What rows of some numbers see by `Problem`'s bounds, as intervals `[1, 2, rows]`."""
    first = np.zeros_like(rows) if lowest is None else rows + lowest
    end = np.full_like(rows, others) if highest is None else rows + (1 + highest)
    return np.stack([first, end])[None].clip(0, others).astype(np.int32)


def of_bounds_of_queries(problem: Problem) -> np.ndarray:
    """The keys that each query sees by `Problem`'s bounds, as intervals `[1, 2, queries]`."""
    rows = np.arange(problem.query_length)
    return of_bounds(problem.lowest, problem.highest, rows, problem.key_length)


def of_bounds_of_keys(problem: Problem) -> np.ndarray:
    """The queries that see each key by `Problem`'s bounds, as intervals `[1, 2, keys]`."""
    lowest, highest = (None if x is None else -x for x in (problem.highest, problem.lowest))
    return of_bounds(lowest, highest, np.arange(problem.key_length), problem.query_length)


def reach(intervals: jax.Array | np.ndarray, rows: int, *, empty_rows_count: bool) -> Reach:
    """What each tile of `rows` rows sees; the last one may have fewer.

    Args:
      intervals: `[B or 1, 2, R]`.
      rows: of a tile.
      empty_rows_count: whether a row that sees nothing leaves its tile without anything in common,
        as rows beyond the last one then do; else it does not matter.
    """
    batch, _, length = intervals.shape
    beyond = -length % rows
    first, end = jnp.pad(intervals, ((0, 0), (0, 0), (0, beyond))).swapaxes(0, 1)
    first, end = (x.reshape(batch, -1, rows) for x in (first, end))
    seeing = first < end
    counts = seeing | empty_rows_count
    return Reach(
        first=jnp.where(seeing, first, FAR).min(-1),
        end=jnp.where(seeing, end, 0).max(-1),
        common_first=jnp.where(counts, first, 0).max(-1),
        common_end=jnp.where(counts, end, FAR).min(-1),
    )


def lengths_of(intervals: jax.Array) -> jax.Array:
    """Where the keys of each batch entry end, `[B]`, of a problem that `has_lengths`."""
    return intervals[:, 1, -1]


def hull(chosen: jax.Array) -> tuple[jax.Array, jax.Array]:
    """First and end of what is true along the last axis of a bool array; first > end for none."""
    first, end = hulls(chosen)
    return first.min(-1), end.max(-1)


def hulls(chosen: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The same of each element alone: `FAR` and 0 where it is false."""
    number = jnp.arange(chosen.shape[-1], dtype=jnp.int32)
    return jnp.where(chosen, number, FAR), jnp.where(chosen, number + 1, 0)


def of_keys(intervals: jax.Array, key_length: int) -> jax.Array:
    """The queries that see each key, `[B, 2, key_length]`, from the keys that each query sees.

    They are an interval, as the bounds never decrease: those whose end is above the key, and which
    do not begin behind it.
    """
    keys = jnp.arange(key_length, dtype=jnp.int32)
    count_up_to = lambda bounds: jnp.searchsorted(
        bounds, keys, side="right", method="scan_unrolled"
    )
    counts = jax.vmap(jax.vmap(count_up_to))(intervals).astype(jnp.int32)
    return counts[:, ::-1]
