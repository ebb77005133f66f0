"""What rows of `backward_query.py` see: which key blocks, and which keys of a block."""

from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np

from pallas_kernels import intervals as run_time_intervals
from pallas_kernels import segments
from pallas_kernels.config import ROWS
from pallas_kernels.problem import Problem
from pallas_kernels.ptx.masks import keep_columns_from, keep_columns_to
from pallas_kernels.row_masks import PER_ROW


def hide(weights, problem: Problem, first_row, first_key, bounds, fill: float = 0.0) -> jax.Array:
    """`(64, n)` weights with `fill` where the row may not see the key, or there is no such key.

    Args:
      first_row: gives the first row; called where it is needed, as registers are short.
      first_key: the key of the first column.
      bounds: gives the interval of each row, `(64,)` first and end, of a problem that is dynamic.
    """
    if problem.dynamic:
        first, end = bounds()
        weights = keep_columns_from(weights, first - first_key, fill)
        return keep_columns_to(weights, end - (first_key + 1), fill)
    row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=PER_ROW)
    if problem.lowest is not None:
        first = row + (first_row() + problem.lowest)
        weights = keep_columns_from(weights, first - first_key, fill)
    if problem.highest is not None:
        last = jnp.minimum(row + (first_row() + problem.highest), problem.key_length - 1)
    elif problem.key_length % weights.shape[1]:
        last = row * 0 + (problem.key_length - 1)
    else:
        return weights
    return keep_columns_to(weights, last - first_key, fill)


class KeyBlocks(NamedTuple):
    """The key blocks that some rows see, and those of them in which no row needs a mask."""

    first: Any
    end: Any
    first_unmasked: Any
    end_unmasked: Any


def key_blocks(problem: Problem, block_kv: int, first_row, rows: int, xp) -> KeyBlocks:
    """Which key blocks some rows need: `first <= first_unmasked <= end_unmasked <= end`.

    Args:
      first_row: traced int32, or an array with `xp` numpy.
      rows: how many rows from there on, some of which may be beyond the last query.
    """
    last_row = xp.minimum(first_row + rows, problem.query_length) - 1
    if problem.highest is None:
        seen_by_first = seen_by_last = xp.full_like(first_row, problem.key_length)
    else:
        seen = lambda row: xp.clip(row + (1 + problem.highest), 0, problem.key_length)
        seen_by_first, seen_by_last = seen(first_row), seen(last_row)
    seen_by_last = xp.where(first_row < problem.query_length, seen_by_last, 0)
    end = (seen_by_last + (block_kv - 1)) // block_kv
    end_unmasked = xp.minimum(seen_by_first // block_kv, end)
    if problem.lowest is None:
        return KeyBlocks(0, end, 0, end_unmasked)
    first_key = lambda row: xp.maximum(row + problem.lowest, 0)
    first = xp.minimum(first_key(first_row) // block_kv, end)
    first_unmasked = (first_key(last_row) + (block_kv - 1)) // block_kv
    first_unmasked = xp.clip(first_unmasked, first, end)
    return KeyBlocks(first, end, first_unmasked, xp.maximum(end_unmasked, first_unmasked))


def key_blocks_of(
    intervals: jax.Array | np.ndarray,
    block_kv: int,
    rows: int,
    ids: tuple[jax.Array, jax.Array] | None = None,
) -> KeyBlocks:
    """The same of each tile of `rows` rows, `[B, tiles]`.

    A row that sees nothing needs no mask, as it has no weight.

    Args:
      intervals: the keys `[B or 1, 2, T]` of each query.
      ids: segment ids of queries and keys, if the problem is segmented.
    """
    reach = run_time_intervals.reach(intervals, rows, empty_rows_count=False)
    blocks = segments.Blocks(
        first=reach.first // block_kv,
        end=-(-reach.end // block_kv),
        first_unmasked=-(-reach.common_first // block_kv),
        end_unmasked=reach.common_end // block_kv,
    )
    if ids is not None:
        blocks = segments.restricted(blocks, segments.sharing(*ids, rows, block_kv))
    end = blocks.end
    first = jnp.minimum(blocks.first, end)
    first_unmasked = jnp.clip(blocks.first_unmasked, first, end)
    end_unmasked = jnp.clip(blocks.end_unmasked, first_unmasked, end)
    return KeyBlocks(first, end, first_unmasked, end_unmasked)
