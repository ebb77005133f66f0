"""The kernel of thread blocks that own keys, with the tables that it takes."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import hopper, scheduler, segments
from pallas_kernels import intervals as run_time_intervals
from pallas_kernels import key_tiles_order as order
from pallas_kernels.config import BACKWARD_CONSUMERS
from pallas_kernels.dropout import Words
from pallas_kernels.key_tiles import KeyTiles
from pallas_kernels.key_tiles_dealing import Dealing
from pallas_kernels.mask_functions import COUNT, seen_keys
from pallas_kernels.problem import Problem
from pallas_kernels.ptx.barriers import HAND_ORDERED

# Their entries have no room beside what sums over rows might need, of which there are none here.
_DRAWING = dataclasses.replace(HAND_ORDERED, reduction_scratch_bytes=0)


def gradient_kernel(
    tiles: KeyTiles,
    body: Callable,
    gradients: tuple[jax.ShapeDtypeStruct, ...],
    most_thread_blocks: int | None,
    scratch: dict[str, Any],
    from_end: bool = False,
    dealing: Dealing = Dealing.LISTED,
    more_results: tuple[jax.ShapeDtypeStruct, ...] = (),
) -> Callable:
    """The kernel that makes dK and dV.

    Args:
      body: takes the refs that `Walk.of_refs` takes, those of the operands, and of dK, dV and
        more results.
      gradients: shapes of dK and dV.
      most_thread_blocks: as `key_tiles_order.thread_blocks` takes it.
      from_end: thread blocks walk their lists from the end.
      dealing: how thread blocks come to their tiles. They draw those of all heads.
      more_results: shapes of what the kernel makes beside dK and dV; with any, `first_steps`
        goes with `seeing_blocks`.

    Returns:
      A function of the intervals of keys `[B, 2, T]` that queries see, or None, or of a mask of
      keys its bits (`key_masks.words_of`), of the segment
      ids of queries and keys, or None, of the words of dropout, or None, and of the operands; by
      name of `element_arrays.Blocks`, where lists are given.
      Of a section the kernel takes its heads alone, and if there are refs of results, it writes
      those heads of them.
    """
    p, draws = tiles.problem, dealing is Dealing.DRAWN
    seeing_blocks = np.zeros(0) if p.has_given_lists else tiles.seeing_blocks()
    if more_results:
        seeing_blocks = np.append(seeing_blocks, tiles.first_steps()[None], axis=0)

    @functools.lru_cache
    def kernel_of(thread_blocks: int, has_results: bool) -> Callable:
        out_type = () if has_results else (*gradients, *more_results)
        params = _DRAWING if draws else HAND_ORDERED
        kernel = hopper.kernel(body, out_type, thread_blocks, BACKWARD_CONSUMERS, scratch, params)
        return jax.jit(kernel)  # lowered once for all sections

    def cost_of_lists(lists):
        """Of each tile of all key heads, `[B * key heads, tiles]`."""
        entries, heads = lists.shape[:2]
        cost = jnp.repeat(lists[..., COUNT].astype(jnp.float32), p.batch // entries, axis=0)
        if heads == 1:
            return cost[:, 0] + order.TILE_OVERHEAD
        return cost.reshape(-1, tiles.per_head) + order.TILE_OVERHEAD

    def table_by_cost(cost, thread_blocks, kv_heads) -> jax.Array:
        """What there is to draw, or lists, by costs that are known at run time."""
        if draws:
            return order.table_to_draw(tiles, thread_blocks, cost)
        schedule = order.schedule(tiles, thread_blocks, from_end, kv_heads)
        sharing = len(tiles.kv_heads) // cost.shape[0]
        return scheduler.longest_first(schedule, cost, sharing)

    def run(intervals, ids, words: Words | None, *operands, blocks=None, kv_heads=None, results=()):
        thread_blocks = order.thread_blocks(tiles, most_thread_blocks, kv_heads, dealing)
        kernel = kernel_of(thread_blocks, bool(results))
        operands = (*operands, *results)
        if words is not None:  # those of queries come with their start
            operands = (words[1], *operands)
        if blocks is not None:
            lists = tiles.given_lists(blocks.kinds)
            table = table_by_cost(cost_of_lists(lists), thread_blocks, kv_heads)
            seen: tuple[jax.Array, ...] = ()
            if p.has_dense_lists:
                seen = seen_keys(blocks.seen, tiles.block_kv, (p.kv_heads, p.group))
            return kernel(table, lists, *blocks.operands, *seen, *operands)
        # One entry more, for what `Walk.locate` may ask for behind the last tile.
        if p.has_key_mask:
            operands = (jnp.pad(intervals, ((0, 1), (0, 0))), *operands)
        if p.has_lengths:
            lengths = jnp.pad(run_time_intervals.lengths_of(intervals), (0, 1))
            operands = (lengths, *operands)
        if not p.by_batch:
            if draws:
                table = order.table_to_draw(tiles, thread_blocks)
            else:
                table = jnp.asarray(order.schedule(tiles, thread_blocks, from_end, kv_heads))
            return kernel(table, jnp.asarray(seeing_blocks), *operands)
        seeing = bounds = tiles.seeing(intervals)
        ids_are_sorted = None
        if ids is not None:
            query_ids, key_ids = ids
            within = None if intervals is None else seeing
            key_ids = segments.padded(key_ids, tiles.block_kv)
            bounds, ids_are_sorted = segments.intervals(key_ids, query_ids, within)
        blocks = tiles.seeing_blocks_of(seeing, ids, ids_are_sorted)
        steps = p.group * (blocks[:-1, :, 1] - blocks[:-1, :, 0])
        cost = steps.astype(jnp.float32) + order.TILE_OVERHEAD
        table = table_by_cost(cost, thread_blocks, kv_heads)
        if ids is not None:
            operands = (segments.padded(query_ids, tiles.block_q), key_ids, *operands)
        return kernel(table, blocks, jnp.asarray(bounds), *operands)

    return run


def key_gradients(problem: Problem) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes of dK and dV."""
    p = problem
    return tuple(
        jax.ShapeDtypeStruct((p.batch, p.key_length, p.kv_heads, width), p.dtype)
        for width in (p.width, p.value_width)
    )


def with_words(words: Words | None, start: jax.Array, *statistics: jax.Array) -> jax.Array:
    """What kernels that own keys take as `start`: one array, as each copy takes registers.

    Args:
      words: of dropout, or None.
      start: `[B, N, 1 or 2, R]` float32, with the share of rows.
      *statistics: `[B, N, R]` float32.

    Returns:
      Without words start; with them `[B, N, more, R]` float32 of start, the bits of the words of
      queries, and the other statistics.
    """
    if words is None:
        return start
    query_words = jnp.pad(words[0], ((0, 0), (0, 0), (0, start.shape[3] - words[0].shape[2])))
    query_words = lax.bitcast_convert_type(query_words, jnp.float32)
    return jnp.concatenate([start, *(x[:, :, None] for x in (query_words, *statistics))], axis=2)
