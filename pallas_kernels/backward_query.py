"""The gradient of the query alone, for gradients that are the same bit by bit from run to run.

In `backward.py` a thread block owns keys, so that many of them add to one row of dQ, in the order
in which they get to it. Here it owns `block_q` query rows of one head, 64 for each consumer
warpgroup, and adds up what each key block gives in a fixed order. Logits and their gradients are
computed once more for it: seven products a tile pair in all, where `backward.py` with dQ has five.
Above width 128 it serves where `backward_query_product.py` does not.

    producer   Q | K0 dO V0 | K1 V1 | ...                TMA, K and V into circular buffers
    consumer   S = Q K';  dP = dO V'
               P = exp2(S * scale * log2(e) - LSE * log2(e))      while dP is computed
               dS = P * (dP - delta)
               dQ += dS K                                         dS from registers

A consumer has no product in flight from one step to the next; the other's fill the gap, as the two
meet only where the producer waits for both. Where registers are too few for 256 columns of dQ,
two kernels make half of them each. Key blocks run from the first to the last: under a causal mask
tiles differ in the last, so that those that begin at the same time read the same keys, which is
easy on L2. First come those that need no mask, then those that do, then those that this consumer
cannot see at all; with a sliding window, before them those it cannot see, and more that need a
mask. As in `backward.py`, -LSE and -delta come from `row_statistics.py`, and rows that do not count
have a start of -inf.

Barriers. Full: an mbarrier for Q, for dO, and for each slot of K and of V, completed by TMA. Free:
a named barrier a slot, the consumers arrive and the producer waits.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import intervals as run_time_intervals
from pallas_kernels import scheduler, segments, soft_cap
from pallas_kernels.columns import Columns
from pallas_kernels.config import (
    BACKWARD_CONSUMERS,
    FORWARD_SECTION_BYTES,
    LOG2E,
    SM_COUNT,
    BackwardQueryConfig,
    Problem,
)
from pallas_kernels.dropout import DropoutRefs, Words, d_logits
from pallas_kernels.dropout import operands as dropout_operands
from pallas_kernels.element_arrays import NO_ELEMENTS, Elements
from pallas_kernels.elements import NOTHING_LOADED, ElementRefs
from pallas_kernels.elements import masked as masked_by_element
from pallas_kernels.far_rows import start_and_share_of_marks, weights_by_query
from pallas_kernels.interpret import interpreting
from pallas_kernels.online_softmax import spread
from pallas_kernels.primitives import (
    HAND_ORDERED,
    NamedBarriers,
    div_rem,
    equal_columns,
    fresh_zero,
    keep_bits,
    keep_columns_from,
    keep_columns_to,
    load_intervals,
    load_rows,
    zero_tile,
)

_CONSUMERS = BACKWARD_CONSUMERS
_ROWS = 64  # query rows of a consumer: the M of a wgmma
_PER_ROW = plgpu.Layout.WGMMA.reduce(1)


def query_gradient(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    d_out: jax.Array,
    start: jax.Array,
    minus_delta: jax.Array,
    far: jax.Array,
    intervals: jax.Array | None = None,
    ids: tuple[jax.Array, jax.Array] | None = None,
    elements: Elements = NO_ELEMENTS,
    dropout_words: Words | None = None,
    *,
    problem: Problem,
    config: BackwardQueryConfig,
) -> jax.Array:
    """Gradient of the query, the same bit by bit from run to run.

    Args:
      query, d_out: `[B, T, N, H]` and `[B, T, N, h]`; T a multiple of 8, rows from
        problem.query_length on zero. d_out is finite in rows that see no key.
      key, value: `[B, S, K, H]` and `[B, S, K, h]`; S a multiple of 8, rows from problem.key_length
        on zero, finite where no query sees them.
      start: of `row_statistics`, of T up to a multiple of config.block_q: -LSE / unit; -inf for
        rows that see no key or are beyond the end.
      minus_delta: `[B, N, as start]` float32, dLSE - rowsum(d_out * out), times
        problem.delta_unit; 0 where start is -inf.
      far: of rows far from 0, as `far_rows.far_shape` has it.
      intervals: None, or the keys that each query sees, `[B, 2, problem.query_length]` int32, for a
        problem that is dynamic.
      ids: None, or for a problem that is segmented the segment ids of queries and keys, int32
        `[B, problem.query_length]` and `[B, problem.key_length]` (`segments.py`).
      elements: mask and bias of a problem that has them (`element_arrays.py`).
      dropout_words: None, or for a problem with dropout the words of queries and keys, as
        `dropout.Words` has them.
      problem: static description; its lengths may be up to 7 below T and S.
      config: tile sizes.

    Returns:
      `[B, T, N, H]` in the input dtype. Rows that see no key are 0.
    """
    words = dropout_operands(dropout_words, keys=config.block_kv)
    operands = *words, *elements.operands(), query, key, value, d_out, start, minus_delta, far
    build = functools.partial(_build, problem, config, query.shape[1], interpreting())
    parts = range(len(_key_parts(problem)))
    if len(parts) == 1:
        return build(0)(intervals, ids, *operands)
    d_query = jax.new_ref(jnp.zeros(query.shape, query.dtype))
    for part in parts:
        build(part)(intervals, ids, *operands, d_query)
    return jax.freeze(d_query)


def _key_parts(problem: Problem) -> list[Columns]:
    """The columns of query and key: all, or where registers are short parts of dQ, a kernel each.

    A part takes S and dP once more, but half of the registers that 256 columns of dQ do.
    """
    columns = Columns.whole(problem.width)
    options = (
        problem.dynamic,
        problem.segmented,
        problem.has_mask,
        problem.has_bias,
        problem.soft_cap is not None,
        problem.dropout > 0,
    )
    # In boxes more addresses are in use.
    most = 2 if columns.tiles == 1 else 1
    is_short = sum(options) > most or (problem.segmented and problem.has_bias)
    return columns.in_parts(128) if columns.size > 224 and is_short else [columns]


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
    row = plgpu.broadcasted_iota(jnp.int32, (_ROWS,), 0, layout=_PER_ROW)
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


class _KeyBlocks(NamedTuple):
    """The key blocks that some rows see, and those of them in which no row needs a mask."""

    first: Any
    end: Any
    first_unmasked: Any
    end_unmasked: Any


def _key_blocks(problem: Problem, block_kv: int, first_row, rows: int, xp) -> _KeyBlocks:
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
        return _KeyBlocks(0, end, 0, end_unmasked)
    first_key = lambda row: xp.maximum(row + problem.lowest, 0)
    first = xp.minimum(first_key(first_row) // block_kv, end)
    first_unmasked = (first_key(last_row) + (block_kv - 1)) // block_kv
    first_unmasked = xp.clip(first_unmasked, first, end)
    return _KeyBlocks(first, end, first_unmasked, xp.maximum(end_unmasked, first_unmasked))


def _key_blocks_of(
    intervals: jax.Array | np.ndarray,
    block_kv: int,
    rows: int,
    ids: tuple[jax.Array, jax.Array] | None = None,
) -> _KeyBlocks:
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
    return _KeyBlocks(first, end, first_unmasked, end_unmasked)


@functools.lru_cache
def _build(
    problem: Problem, config: BackwardQueryConfig, query_rows: int, interpret: bool, part: int
):
    """The kernel for one of `_key_parts` of dQ: its result, or in a ref if there are more."""
    block_q, block_kv, (k_stages, v_stages) = config.block_q, config.block_kv, config.stages
    dtype = problem.dtype
    key_parts = _key_parts(problem)
    dq_columns = key_parts[part]
    value_columns = Columns.whole(problem.value_width)
    has_cap = problem.soft_cap is not None

    tiles = -(-problem.query_length // block_q)
    first_rows = np.arange(tiles) * block_q
    dynamic, by_batch, has_far_edge = problem.dynamic, problem.by_batch, problem.has_far_edge
    # There are no registers for dP beside a cap, nor with 256 columns of dQ beside elements.
    is_wide = dq_columns.size > 192
    # With dropout nor for bounds or ids, or for addresses of the order over the loop.
    crowded = is_wide and problem.dropout > 0 and (problem.has_elements or by_batch)
    weights_first = crowded or has_cap or (is_wide and problem.has_elements)
    # What is known at run time only is left out.
    of_tiles = _key_blocks(problem, block_kv, first_rows, block_q, np)
    key_blocks = of_tiles.end - of_tiles.first
    any_mask = has_far_edge or bool((of_tiles.end_unmasked < of_tiles.end).any())

    section = scheduler.heads_per_section(
        FORWARD_SECTION_BYTES,
        bytes_per_kv_head=problem.key_length * problem.pair_bytes,
        tiles_per_kv_head=tiles * problem.group,
        slots=SM_COUNT,
        kv_heads=problem.batch * problem.kv_heads,
        group=problem.group,
    )
    tile, head = scheduler.tile_order(key_blocks, problem.batch * problem.heads, section)
    order = np.stack([tile, head, key_blocks[tile]], axis=1)
    if has_far_edge:
        order = np.c_[order, of_tiles.end[tile]]
    order = order.astype(np.int32)

    def order_of(intervals, ids) -> jax.Array:
        """The order, with key blocks by batch entry, and `_KeyBlocks` of each consumer."""
        if intervals is None:
            intervals = run_time_intervals.of_bounds_of_queries(problem)
        batch = head // problem.heads
        blocks = _key_blocks_of(intervals, block_kv, _ROWS, ids)
        of_consumers = jnp.stack([with_all_consumers(x) for x in blocks], axis=-1)
        of_consumers = of_consumers.reshape(problem.batch, tiles, _CONSUMERS, -1)
        first, end = of_consumers[..., 0], of_consumers[..., 1]
        tile_end = end.max(-1, keepdims=True)
        tile_first = jnp.where(first < end, first, tile_end).min(-1, keepdims=True)
        # A consumer that sees nothing has no blocks, at the tile's first.
        of_consumers = jnp.maximum(of_consumers, tile_first[..., None])
        by_consumer = of_consumers.reshape(problem.batch, tiles, -1)
        numbers = jnp.concatenate([tile_end - tile_first, tile_end, by_consumer], axis=-1)
        numbers = numbers[batch, tile]
        return jnp.concatenate([jnp.asarray(order[:, :2]), numbers], axis=1)

    def with_all_consumers(of_consumers: jax.Array) -> jax.Array:
        """`[B, 2 * tiles]`, with 0 where the last consumer has no rows."""
        return jnp.pad(of_consumers, ((0, 0), (0, _CONSUMERS * tiles - of_consumers.shape[1])))

    k_free = NamedBarriers(first=_CONSUMERS + 2, count=k_stages, arrivers=_CONSUMERS)
    v_free = NamedBarriers(k_free.first + k_stages, v_stages, arrivers=_CONSUMERS)
    named = dict(k_free=k_free, v_free=v_free)

    key_tiles = sum(columns.tiles for columns in key_parts)
    scratch: dict[str, Any] = dict(
        q_smem=[columns.smem(_CONSUMERS, _ROWS, dtype=dtype) for columns in key_parts],
        o_smem=value_columns.smem(_CONSUMERS, _ROWS, dtype=dtype),
        k_smem=[columns.smem(k_stages, block_kv, dtype=dtype) for columns in key_parts],
        v_smem=value_columns.smem(v_stages, block_kv, dtype=dtype),
        q_full=plgpu.Barrier(num_arrivals=_CONSUMERS * key_tiles),
        o_full=plgpu.Barrier(num_arrivals=_CONSUMERS * value_columns.tiles),
        k_full=plgpu.Barrier(num_arrivals=key_tiles, num_barriers=k_stages),
        v_full=plgpu.Barrier(num_arrivals=value_columns.tiles, num_barriers=v_stages),
    )
    if interpret:
        scratch["twins"] = {name: barriers.scratch() for name, barriers in named.items()}

    def attention_backward_query(
        order_ref, *more_refs,
        q_smem, o_smem, k_smem, v_smem, q_full, o_full, k_full, v_full, twins=None,
    ):  # fmt: skip
        # Intervals if dynamic, ids if segmented, then words of dropout, elements and the operands.
        mask_refs = more_refs[: int(dynamic) + 2 * int(problem.segmented)]
        dropout, refs = DropoutRefs.split(problem, more_refs[len(mask_refs) :])
        elements, refs = ElementRefs.split(problem, refs)
        q_ref, k_ref, v_ref, do_ref, start_ref, delta_ref, far_ref, dq_ref = refs
        k_free, v_free = (
            dataclasses.replace(barriers, twins=twins and twins[name])
            for name, barriers in named.items()
        )
        warpgroup = lax.axis_index("warpgroup")
        block = lax.axis_index("block")
        ordered = lambda column: order_ref[block + fresh_zero() if crowded else block, column]
        blocks = ordered(2)
        first_block = ordered(3) - blocks if has_far_edge else 0

        def key_block_of(j):
            anew = crowded and has_far_edge
            return (ordered(3) - ordered(2) if anew else first_block) + j

        k_slot = lambda j: lax.rem(j, jnp.int32(k_stages))
        v_slot = lambda j: lax.rem(j, jnp.int32(v_stages))

        def batch_and_head():
            """Read where needed: kept over the loop, they cost registers."""
            return div_rem(ordered(1), problem.heads)

        def first_row_of(consumer):
            return ordered(0) * block_q + consumer * _ROWS

        @pl.when(warpgroup < _CONSUMERS)
        def _consumer():
            plgpu.set_max_registers(config.registers[0], action="increase")

            def per_row(ref, *more):
                place = *batch_and_head(), *more, pl.ds(first_row_of(warpgroup), _ROWS)
                return plgpu.load(ref.at[*place], layout=_PER_ROW, optimized=False)

            def start_and_share():
                """Of each row, with the share that dQ is multiplied with, where there is one."""
                start = per_row(start_ref, 0)
                if problem.has_shares:
                    return start, per_row(start_ref, 1)
                if problem.has_bias or not problem.has_marks:
                    return start, None
                place = *batch_and_head(), first_row_of(warpgroup)
                return start_and_share_of_marks(start, far_ref, place, problem)

            def compare_ids(j):
                """Where keys of step j and rows have equal segment ids; None if there are none."""
                if not problem.segmented:
                    return None
                batch, _ = batch_and_head()
                query_ids_ref, key_ids_ref = mask_refs[-2:]
                first_key = key_block_of(j) * block_kv
                first_row, last_row = first_row_of(warpgroup), problem.query_length - 1
                ids = load_rows(query_ids_ref.at[batch], first_row, last_row)
                return equal_columns(ids, key_ids_ref.at[batch], first_key, block_kv)

            def masked(weights, key_block, equal_ids, fill=0.0):
                """Weights with `fill` where the row may not see the key, or there is none."""
                first_row = lambda: first_row_of(warpgroup)

                def bounds():
                    batch, _ = batch_and_head()
                    last_row = problem.query_length - 1
                    return load_intervals(mask_refs[0].at[batch], first_row(), last_row)

                weights = hide(weights, problem, first_row, key_block * block_kv, bounds, fill)
                return weights if equal_ids is None else keep_bits(weights, equal_ids, fill)

            def compute(dq_acc, s_acc, dp_acc):
                start, _ = start_and_share()
                minus_delta = per_row(delta_ref)
                query_words = None
                if problem.dropout:
                    batch, head = batch_and_head()
                    query_words = dropout.of_rows(batch, head, first_row_of(warpgroup))

                def skip(j, _):
                    """A key block that no row of this consumer sees."""
                    plgpu.barrier_wait(k_full.at[k_slot(j)])
                    k_free.arrive(k_slot(j))
                    plgpu.barrier_wait(v_full.at[v_slot(j)])
                    v_free.arrive(v_slot(j))

                def load_elements(j):
                    batch, head = batch_and_head()
                    first_key = key_block_of(j) * block_kv
                    return elements.load(batch, head, first_row_of(warpgroup), first_key, block_kv)

                def issue_d_weights(own_rows, vs):
                    plgpu.barrier_wait(v_full.at[vs])
                    value_columns.contract(dp_acc, o_smem.at[own_rows], v_smem.at[vs])

                def step(j, _, *, needs_mask):
                    # Addresses made anew each step: registers are short.
                    ks, vs, own_rows = k_slot(j), v_slot(j), warpgroup + fresh_zero()
                    equal_ids = compare_ids(j) if needs_mask else None
                    plgpu.barrier_wait(k_full.at[ks])
                    # Both before the first product, or ptxas injects a wait.
                    s_acc[...] = zero_tile(_ROWS, block_kv)
                    if not weights_first:
                        dp_acc[...] = zero_tile(_ROWS, block_kv)
                    for columns, q, k in zip(key_parts, q_smem, k_smem, strict=True):
                        columns.contract(s_acc, q.at[own_rows], k.at[ks])
                    if not weights_first:
                        issue_d_weights(own_rows, vs)

                    loaded = load_elements(j) if problem.has_elements else NOTHING_LOADED
                    open_products = 0 if weights_first else value_columns.tiles
                    logits = plgpu.wgmma_accumulator_load(s_acc, wait_n=open_products)
                    if has_cap:
                        logits, _ = soft_cap.capped(logits, loaded, problem)
                        if needs_mask:
                            logits = masked(logits, key_block_of(j), equal_ids, soft_cap.UNSEEN)
                        logits = masked_by_element(logits, loaded, soft_cap.UNSEEN)
                        minus_lse = spread(start, logits.shape)
                        _, weights = soft_cap.capped_weights(logits, minus_lse, problem)
                    else:
                        if problem.has_bias:
                            place = lambda: (*batch_and_head(), first_row_of(warpgroup))
                            weights = weights_by_query(
                                logits, loaded, problem, start, far_ref, place
                            )
                        else:  # of rows far from 0 a share, which dQ is multiplied with
                            factor = problem.scale * LOG2E
                            of_rows = spread(start * factor, logits.shape)
                            weights = jnp.minimum(jnp.exp2(logits * factor + of_rows), 1.0)
                        if needs_mask:
                            weights = masked(weights, key_block_of(j), equal_ids)
                        weights = masked_by_element(weights, loaded, 0.0)
                    if problem.dropout:
                        batch, _ = batch_and_head()
                        first_key = key_block_of(j) * block_kv
                        weights = dropout.negated(weights, query_words, batch, first_key)
                    if weights_first:
                        dp_acc[...] = zero_tile(_ROWS, block_kv)
                        issue_d_weights(own_rows, vs)
                    d_weights = plgpu.wgmma_accumulator_load(dp_acc, wait_n=0)
                    v_free.arrive(vs)
                    minus_deltas = spread(minus_delta, weights.shape)
                    ds = d_logits(weights, d_weights, minus_deltas, problem).astype(dtype)
                    dq_columns.expand(dq_acc, ds, k_smem[part].at[ks])
                    plgpu.wgmma_wait(0)
                    k_free.arrive(ks)

                if by_batch:
                    columns = range(len(_KeyBlocks._fields))
                    own_first = 4 + len(columns) * warpgroup
                    own = _KeyBlocks(*(ordered(own_first + n) for n in columns))
                else:
                    own = _key_blocks(problem, block_kv, first_row_of(warpgroup), _ROWS, jnp)
                    if has_far_edge:  # a consumer that sees nothing has none, at the tile's first
                        own = _KeyBlocks(*(jnp.maximum(n, first_block) for n in own))
                plgpu.barrier_wait(q_full)
                plgpu.barrier_wait(o_full)
                masking = functools.partial(step, needs_mask=True)
                # The bias of rows that see nothing may be NaN.
                mask_throughout = by_batch and problem.has_bias
                rest = functools.partial(step, needs_mask=mask_throughout)
                begin, end, begin_rest, end_rest = (
                    n - first_block
                    for n in (own.first, own.end, own.first_unmasked, own.end_unmasked)
                )
                if has_far_edge:
                    lax.fori_loop(jnp.int32(0), begin, skip, None)
                    lax.fori_loop(begin, begin_rest, masking, None)
                lax.fori_loop(begin_rest, end_rest, rest, None)
                if any_mask:
                    lax.fori_loop(end_rest, end, masking, None)
                lax.fori_loop(end, blocks, skip, None)

                dq = plgpu.wgmma_accumulator_load(dq_acc, wait_n=0)
                # dQ leaves from where Q was, once all warps have read it.
                plgpu.commit_smem()
                factor_of_dq: float | jax.Array = problem.scale * problem.d_logit_unit
                if not (has_cap or problem.has_bias):
                    _, share = start_and_share()
                    factor_of_dq = spread(share * factor_of_dq, dq.shape)
                own_q = q_smem[part].at[warpgroup]
                dq_columns.put(own_q, (dq * factor_of_dq).astype(dtype))
                plgpu.commit_smem()
                batch, head = batch_and_head()
                rows = pl.ds(first_row_of(warpgroup), _ROWS)
                dq_columns.store(own_q, dq_ref.at[batch, rows, head])
                plgpu.wait_smem_to_gmem(0)

            pl.run_scoped(
                compute,
                plgpu.ACC((_ROWS, dq_columns.size), jnp.float32),
                plgpu.ACC((_ROWS, block_kv), jnp.float32),
                plgpu.ACC((_ROWS, block_kv), jnp.float32),
            )

        @pl.when(warpgroup == _CONSUMERS)
        def _producer():
            plgpu.set_max_registers(config.registers[1], action="decrease")
            batch, head = batch_and_head()
            kv_head = lax.div(head, jnp.int32(problem.group))

            def load_rows(ref, buffer, columns, full):
                for consumer in range(_CONSUMERS):
                    source = ref.at[batch, pl.ds(first_row_of(consumer), _ROWS), head]
                    columns.load(source, buffer.at[consumer], full)

            def load(ref, buffers, parts, slot, stages, full, free, j):
                pl.when(j >= stages)(lambda: free.wait(slot))
                source = ref.at[batch, pl.ds(key_block_of(j) * block_kv, block_kv), kv_head]
                for columns, buffer in zip(parts, buffers, strict=True):
                    columns.load(source, buffer.at[slot], full.at[slot])

            def load_d_out():
                load_rows(do_ref, o_smem, value_columns, o_full)

            for columns, buffer in zip(key_parts, q_smem, strict=True):
                load_rows(q_ref, buffer, columns, q_full)

            @pl.loop(jnp.int32(0), blocks)
            def _(j):
                load(k_ref, k_smem, key_parts, k_slot(j), k_stages, k_full, k_free, j)
                pl.when(j == 0)(load_d_out)
                load(v_ref, [v_smem], [value_columns], v_slot(j), v_stages, v_full, v_free, j)

            pl.when(blocks == 0)(load_d_out)

    d_query = jax.ShapeDtypeStruct((problem.batch, query_rows, problem.heads, problem.width), dtype)
    kernel = plgpu.kernel(
        attention_backward_query,
        out_type=d_query if len(key_parts) == 1 else (),
        grid=(len(order),),
        grid_names=("block",),
        num_threads=_CONSUMERS + 1,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=HAND_ORDERED,
    )

    def run(intervals, ids, *operands):
        if not by_batch:
            return kernel(jnp.asarray(order), *operands)
        masks: tuple[jax.Array, ...] = () if intervals is None else (intervals,)
        if ids is not None:
            query_ids, key_ids = ids
            masks = (*masks, query_ids, segments.padded(key_ids, block_kv))
        return kernel(order_of(intervals, ids), *masks, *operands)

    return run
