"""Forward attention in FP8 (e4m3) for Hopper GPUs.

Tiles, lists of thread blocks, circular buffers and turns are those of `forward.py`. What is
different comes of five things (Shah et al. 2024, "FlashAttention-3", section 3.3).

Values. wgmma takes 8-bit operands along the axis of the sum only, so V must stand in shared memory
with its keys side by side. The producer warpgroup turns each tile after it came by TMA:

    producer   K0 V0 | Q' | K1 V0' V1 | K2 V1' V2 | ...       V' = V turned
    consumer   S=Q K0 | S=Q K1, O+=P V0' | S=Q K2, O+=P V1' | ...

with one step between TMA and turning, or `stages` - 1 of them.

Order of keys. Weights are the left operand of the second product, from registers, of which a thread
must have 4 keys side by side; the first product leaves it pairs. Sums do not ask for the order of
their terms, so nothing moves between threads: V' has its keys in the order of the weights.

Logits. wgmma gives them in float16 as fast as in float32, in half of the registers, which makes
room for a third consumer at width 128 and for 128 keys a step at 256. `half_softmax.py` makes
weights of two at a time. Products of query and key must be float16 numbers for that.

Range. e4m3 has 2^-9 to 448. The largest weight of a row is 2^4 when its reference is made, in the
first step, and may grow: once some weights have a sum of 448 or more their warp computes the step
again with a new reference. The search for maxima in every step that it spares was a sixth of the
instructions.

Scales. Those of a query's row and of a step's keys multiply the logits, in the exponent. The values
of a step have one scale, in which the output is kept: where the next step has another it is
multiplied by their ratio.

Hopper adds up FP8 products with some 14 bits. With `promotes`, those of a step are a product of
their own, and are added to the output in float32.
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

from pallas_kernels import half_softmax, online_softmax, segments
from pallas_kernels.columns import Columns
from pallas_kernels.config import ForwardFP8Config, Problem
from pallas_kernels.forward_tiles import Tiles
from pallas_kernels.half_softmax import SUM_LIMIT
from pallas_kernels.interpret import interpreting
from pallas_kernels.online_softmax import RowState, spread
from pallas_kernels.primitives import (
    NamedBarriers,
    any_from,
    code_fence,
    fence_async_shared,
    float8_operand,
    fresh_zero,
    load_rows,
    store_rows,
    to_float8,
    transpose_float8,
    zero_tile,
)
from pallas_kernels.row_masks import ROWS, RowMasks

# Logits that are masked at a time, in float32.
_MASKED_COLUMNS = 16


class Scales(NamedTuple):
    """What FP8 operands are multiplied with, float32.

    Attributes:
      rows: `[B, N, T]`, what logits in units of query and key are multiplied with, in base 2, but
        for the key's scale; positive.
      keys: `[B, K, steps]`, of each `block_kv` keys; positive.
      values: `[B, K, steps]`, of each `block_kv` values; not 0.
    """

    rows: jax.Array
    keys: jax.Array
    values: jax.Array


class _Carry(NamedTuple):
    """What a consumer knows between two steps.

    Attributes:
      weights: of the last step, float8.
      output: `(64, h)` of all steps before the last; nothing where it is kept in the accumulator.
      state: of the softmax.
    """

    weights: jax.Array
    output: tuple[jax.Array, ...]
    state: RowState


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    scales: Scales,
    intervals: jax.Array | None = None,
    ids: tuple[jax.Array, jax.Array] | None = None,
    *,
    problem: Problem,
    config: ForwardFP8Config,
    out_dtype: np.dtype,
) -> tuple[jax.Array, jax.Array]:
    """Attention of FP8 operands.

    Args:
      query: float8_e4m3fn `[B, T, N, H]`; T a multiple of 8, H of 16.
      key: `[B, S, K, H]`; S a multiple of 8, of which problem.key_length are attended. The largest
        magnitudes of query and key, times H, are 65504 at most.
      value: `[B, S, K, h]`; h a multiple of 16; finite.
      scales: of the operands.
      intervals: None, or the keys that each query sees, `[B, 2, problem.query_length]` int32, for a
        problem that is dynamic (`intervals.py`).
      ids: None, or for a problem that is segmented the segment ids of queries and keys, int32
        `[B, problem.query_length]` and `[B, problem.key_length]` (`segments.py`).
      problem: static description; its lengths may be up to 7 below T and S.
      config: tile sizes.
      out_dtype: of the output, 16 bits.

    Returns:
      Output `[B, T, N, h]` and natural-log LSE `[B, N, ceil(T / block_q) * block_q]` float32. Rows
      from problem.query_length on are arbitrary in both. A row that sees no key: 0 and -inf.
    """
    kernel = _build(problem, config, query.shape[1], np.dtype(out_dtype), interpreting())
    # Key blocks run from the last to the first.
    ratios = jnp.pad(scales.values[..., 1:] / scales.values[..., :-1], ((0, 0), (0, 0), (0, 1)))
    operands = (query, key, value, *scales, ratios)
    if not problem.by_batch:
        return kernel(*operands)
    key_blocks = Tiles(problem, config).key_blocks_of(intervals, ids)
    optional: tuple[jax.Array, ...] = () if intervals is None else (intervals,)
    if ids is not None:
        optional = (*optional, ids[0], segments.padded(ids[1], config.block_kv))
    return kernel(key_blocks, *operands, *optional)


@functools.lru_cache
def _build(
    problem: Problem,
    config: ForwardFP8Config,
    padded_query_length: int,
    out_dtype: np.dtype,
    interpret: bool,
):
    tiles = Tiles(problem, config)
    by_batch, has_far_edge = problem.by_batch, problem.has_far_edge
    key_blocks = None if by_batch else tiles.key_blocks()
    any_mask = has_far_edge or (key_blocks is not None and bool(key_blocks[:, 1].any()))

    consumers, stages, query_buffers = config.consumers, config.stages, config.query_buffers
    # Then addresses and entries of lists are made anew where they are used.
    registers_are_short = max(problem.width, problem.value_width) > 64 or by_batch
    value_stages, block_kv, dtype = config.value_stages, config.block_kv, problem.dtype
    # Of logits; interpret mode has no sums in float16.
    accumulated = jnp.float32 if interpret else jnp.float16
    lag = stages - 1  # steps by which V is turned after it was asked for, where the next one goes
    key_columns = Columns.whole_float8(problem.width)
    value_columns = Columns.whole_float8(problem.value_width)
    out_columns = Columns(problem.value_width, value_columns.size)
    staged_columns = out_columns.in_parts(config.staged_columns)

    turn = NamedBarriers(first=consumers + 2, count=consumers, arrivers=1)
    k_free = NamedBarriers(turn.first + consumers, stages, arrivers=consumers)
    v_free = NamedBarriers(k_free.first + stages, value_stages, arrivers=consumers)
    q_free = NamedBarriers(v_free.first + value_stages, query_buffers, arrivers=consumers)
    named = dict(turn=turn, k_free=k_free, v_free=v_free, q_free=q_free)

    scratch: dict[str, Any] = dict(
        q_smem=key_columns.smem(query_buffers, consumers, ROWS, dtype=dtype),
        k_smem=key_columns.smem(stages, block_kv, dtype=dtype),
        v_smem=value_columns.smem(lag, block_kv, dtype=dtype),
        turned_smem=plgpu.SMEM(
            (value_stages, value_columns.size, block_kv),
            dtype,
            transforms=float8_operand(block_kv),
        ),
        o_smem=staged_columns[0].smem(consumers, ROWS, dtype=out_dtype),
        q_full=plgpu.Barrier(
            num_arrivals=consumers * key_columns.tiles, num_barriers=query_buffers
        ),
        k_full=plgpu.Barrier(num_arrivals=key_columns.tiles, num_barriers=stages),
        v_full=plgpu.Barrier(num_arrivals=value_columns.tiles, num_barriers=lag),
        turned_full=plgpu.Barrier(num_arrivals=1, num_barriers=value_stages),
    )
    if interpret:
        scratch["twins"] = {name: barriers.scratch() for name, barriers in named.items()}

    def attention_forward_fp8(
        schedule_ref, key_blocks_ref, q_ref, k_ref, v_ref,
        row_scales_ref, key_scales_ref, value_scales_ref, ratios_ref, *more_refs,
        q_smem, k_smem, v_smem, turned_smem, o_smem,
        q_full, k_full, v_full, turned_full, twins=None,
    ):  # fmt: skip
        *optional_refs, o_ref, lse_ref = more_refs
        masks = RowMasks(
            problem,
            block_kv,
            tiles.rows,
            intervals_ref=optional_refs[0] if problem.dynamic else None,
            ids_refs=optional_refs[int(problem.dynamic) :] if problem.segmented else None,
        )
        turn, k_free, v_free, q_free = (
            dataclasses.replace(barriers, twins=twins and twins[name])
            for name, barriers in named.items()
        )
        warpgroup = lax.axis_index("warpgroup")
        block = lax.axis_index("block")
        zero = jnp.int32(0)

        def listed(column):
            """An entry of this thread block's list."""
            return schedule_ref[block + fresh_zero() if registers_are_short else block, column]

        tile_count = lambda: listed(0)
        number_of = lambda index: listed(1 + index)
        slot = lambda step: lax.rem(step, jnp.int32(stages))
        raw_slot = lambda step: lax.rem(step, jnp.int32(lag))
        value_slot = lambda step: lax.rem(step, jnp.int32(value_stages))

        def query_buffer(index):
            buffer = lax.rem(index, jnp.int32(query_buffers))
            return buffer + fresh_zero() if registers_are_short else buffer

        kv_head_of = lambda head: lax.div(head, jnp.int32(problem.group))

        def needs(tile, batch, column):
            """An entry of `Tiles.key_blocks`."""
            entry = (batch, tile, column) if by_batch else (tile, column)
            return key_blocks_ref[entry]

        def end_of(tile, batch):
            """The end of the first key block of a tile, in blocks."""
            return needs(tile, batch, 3 if has_far_edge else 0)

        def over_tiles(body, carry):
            """As `fori_loop`, but for the count, which is in no register during a tile."""

            def turn(at):
                index, _, carry = at
                return index + 1, *body(index, carry)

            _, _, carry = lax.while_loop(lambda at: at[1], turn, (zero, tile_count() > 0, carry))
            return carry

        @pl.when(warpgroup < consumers)
        def _consumer():
            plgpu.set_max_registers(config.registers[0], action="increase")
            take_turn = lambda: turn.wait(warpgroup)
            pass_turn = lambda: turn.arrive(lax.rem(warpgroup + 1, jnp.int32(consumers)))
            pl.when(warpgroup == consumers - 1)(pass_turn)  # warpgroup 0 begins
            first_row_of = lambda tile: tiles.first_row(tile, warpgroup)

            def compute(p_acc, s_acc):
                """With `promotes` p_acc is of one step, else it is the output."""

                def issue_logits(buffer, k_slot):
                    s_acc[...] = zero_tile(ROWS, block_kv, accumulated)
                    key_columns.contract(s_acc, q_smem.at[buffer, warpgroup], k_smem.at[k_slot])

                def loaded_logits(wait_n):
                    return plgpu.wgmma_accumulator_load(s_acc, wait_n=wait_n).astype(jnp.float16)

                def issue_output(weights, v_slot):
                    if config.promotes:
                        p_acc[...] = zero_tile(ROWS, value_columns.size)
                    plgpu.barrier_wait(turned_full.at[v_slot])
                    plgpu.wgmma(p_acc, weights, turned_smem.at[v_slot].transpose((1, 0)))

                def end_output(carry):
                    """The output with that of the last step, when its product has ended."""
                    product = plgpu.wgmma_accumulator_load(p_acc, wait_n=0)
                    if not config.promotes:
                        return product
                    (output,) = carry.output
                    return output + product

                def load_row_scales(tile, batch, head):
                    last_row = problem.query_length - 1
                    return load_rows(row_scales_ref.at[batch, head], first_row_of(tile), last_row)

                def row_scales_of(tile, batch, head):
                    """What gives the scales of rows: loads them only then unless they are kept."""
                    if not config.keeps_row_scales:
                        return lambda: load_row_scales(tile, batch, head)
                    row_scales = load_row_scales(tile, batch, head)
                    return lambda: row_scales

                def masked(logits, first_row, first_key, bounds, ids, *, near=True):
                    """Some columns at a time, as all in float32 would not fit."""
                    parts = []
                    for first in range(0, block_kv, _MASKED_COLUMNS):
                        part = logits[:, first : first + _MASKED_COLUMNS].astype(jnp.float32)
                        own_ids = ids and (*ids[:2], ids[2] + first)
                        part = masks.masked(
                            part, first_row, first_key + first, bounds, own_ids, near=near
                        )
                        parts.append(part.astype(jnp.float16))
                    return jnp.concatenate(parts, axis=1)

                def first_softmax(logits, tile, batch, head, row_scales):
                    """Of a tile's first key block."""
                    key_block = end_of(tile, batch) - 1
                    key_scale = key_scales_ref[batch, kv_head_of(head), key_block]
                    factor = row_scales * key_scale
                    first_row, first_key = first_row_of(tile), key_block * block_kv
                    bounds = masks.load_bounds(batch, first_row)
                    ids = masks.load_ids(batch, first_row, first_key)
                    if any_mask:
                        logits = masked(logits, first_row, first_key, bounds, ids)
                    weights, state = half_softmax.start(logits, factor)
                    if bounds is not None:
                        state = online_softmax.close(state, seeing=bounds[0] < bounds[1])
                    return weights, state

                def start_tile(index, steps, tile, batch, head):
                    """The first key block of a tile, with no other product open."""
                    row_scales = load_row_scales(tile, batch, head)

                    @pl.when(index < tile_count())
                    def _():
                        plgpu.barrier_wait(q_full.at[query_buffer(index)])
                        plgpu.barrier_wait(k_full.at[slot(steps)])

                    issue_logits(query_buffer(index), slot(steps))
                    logits = loaded_logits(wait_n=0)
                    pl.when(index < tile_count())(lambda: k_free.arrive(slot(steps)))
                    return begun(*first_softmax(logits, tile, batch, head, row_scales))

                def begun(weights, state):
                    output = (zero_tile(ROWS, value_columns.size),) if config.promotes else ()
                    return _Carry(to_float8(weights), output, state)

                def key_step(j, carry, *, steps, index, place, row_scales, end_block, near, far):
                    """Logits of step j's key block together with the output of the step before."""
                    carry = _Carry(*carry)
                    tile, batch, head = place
                    key_block = end_block - 1 - j
                    first_row, first_key = first_row_of(tile), key_block * block_kv
                    key_scale = key_scales_ref[batch, kv_head_of(head), key_block]
                    ratio = ratios_ref[batch, kv_head_of(head), key_block]
                    own_scales = row_scales()
                    if near or far:
                        bounds = masks.load_bounds(batch, first_row)
                        ids = masks.load_ids(batch, first_row, first_key)
                    k_slot, v_slot = slot(steps + j), value_slot(steps + j - 1)
                    plgpu.barrier_wait(k_full.at[k_slot])
                    take_turn()
                    issue_logits(query_buffer(index), k_slot)
                    issue_output(carry.weights, v_slot)
                    if config.products_first:
                        logits = loaded_logits(wait_n=0)
                        output = end_output(carry)
                        pass_turn()
                        k_free.arrive(k_slot)
                        v_free.arrive(v_slot)
                        code_fence(key_block)
                    else:
                        pass_turn()
                        logits = loaded_logits(wait_n=1)
                        k_free.arrive(k_slot)
                    if near or far:
                        logits = masked(logits, first_row, first_key, bounds, ids, near=near)
                    factor = own_scales * key_scale
                    weights, sums, state = half_softmax.go_on(logits, factor, carry.state)
                    if not config.products_first:
                        # A cast of the weights before the wait makes ptxas serialise every wgmma.
                        weights, sums, state = lax.optimization_barrier((weights, sums, state))
                        output = end_output(carry)
                        v_free.arrive(v_slot)
                    weights = to_float8(weights)

                    def again(output, *_):
                        weights, correction, state = half_softmax.renew(
                            logits, factor, sums, carry.state
                        )
                        return output * spread(correction, output.shape), to_float8(weights), state

                    def mend(output, weights, state):
                        """What few steps need, behind one branch."""
                        output, weights, state = lax.cond(
                            any_too_large, again, lambda *x: x, output, weights, state
                        )
                        return output * ratio, weights, state

                    any_too_large = any_from(SUM_LIMIT, sums)
                    output, weights, state = lax.cond(
                        any_too_large | (ratio != 1.0),
                        mend,
                        lambda *x: x,
                        output,
                        weights,
                        state,
                    )
                    if config.promotes:
                        return _Carry(weights, (output,), state)
                    p_acc[...] = output
                    return _Carry(weights, (), state)

                def end_rows(state, tile, batch, head):
                    """Stores the LSE; returns what the output is to be multiplied with."""
                    total = state.sums.sum(axis=1)
                    inverse, lse, _ = online_softmax.normalised(state.reference, total)
                    store_rows(lse_ref.at[batch, head, pl.ds(first_row_of(tile), ROWS)], lse)
                    last_block = end_of(tile, batch) - needs(tile, batch, 0)
                    return inverse * value_scales_ref[batch, kv_head_of(head), last_block]

                def store_output(output, inverse, tile, batch, head):
                    """Divides by the row sums and sends output to global memory."""
                    staging = o_smem.at[warpgroup]
                    output *= spread(inverse, output.shape)
                    if not config.promotes:
                        p_acc[...] = zero_tile(ROWS, value_columns.size)
                    target = o_ref.at[batch, pl.ds(first_row_of(tile), ROWS), head]
                    for columns in staged_columns:
                        if columns.first > 0:
                            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                        staged = slice(columns.first, columns.first + columns.size)
                        values = output[:, staged].astype(out_dtype)
                        columns.put(staging, values, anew=registers_are_short)
                        plgpu.commit_smem()
                        columns.store(staging, target)

                def end_tile_under_next(index, steps, carry):
                    """The next tile's first logits run with this tile's last output product."""
                    tile, batch, head = tiles.locate(number_of(index))
                    next_tile, next_batch, next_head = tiles.locate(number_of(index + 1))
                    buffer, k_slot, v_slot = (
                        query_buffer(index + 1),
                        slot(steps),
                        value_slot(steps - 1),
                    )
                    q_free.arrive(query_buffer(index))
                    more = index + 1 < tile_count()

                    # After the last tile the logits are of no tile, and go nowhere.
                    @pl.when(more)
                    def _():
                        plgpu.barrier_wait(q_full.at[buffer])
                        plgpu.barrier_wait(k_full.at[k_slot])

                    take_turn()
                    issue_logits(buffer, k_slot)
                    issue_output(carry.weights, v_slot)
                    pass_turn()
                    row_scales = load_row_scales(next_tile, next_batch, next_head)
                    inverse = end_rows(carry.state, tile, batch, head)
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    logits = loaded_logits(wait_n=1)
                    pl.when(more)(lambda: k_free.arrive(k_slot))
                    first = first_softmax(logits, next_tile, next_batch, next_head, row_scales)
                    first = lax.optimization_barrier(first)
                    output = end_output(carry)
                    v_free.arrive(v_slot)
                    begun_next = begun(*first)
                    store_output(output, inverse, tile, batch, head)
                    return more, begun_next

                def end_tile_before_next(index, steps, carry):
                    """The next queries arrive where this tile's were while it ends."""
                    tile, batch, head = tiles.locate(number_of(index))
                    q_free.arrive(0)
                    inverse = end_rows(carry.state, tile, batch, head)
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    take_turn()
                    issue_output(carry.weights, value_slot(steps - 1))
                    pass_turn()
                    output = end_output(carry)
                    v_free.arrive(value_slot(steps - 1))
                    store_output(output, inverse, tile, batch, head)
                    more = index + 1 < tile_count()
                    return more, start_tile(index + 1, steps, *tiles.locate(number_of(index + 1)))

                end_tile = end_tile_under_next if query_buffers > 1 else end_tile_before_next

                def whole_tile(index, carry):
                    steps, carry = carry
                    tile, batch, _ = place = tiles.locate(number_of(index))
                    blocks, needing_mask = needs(tile, batch, 0), needs(tile, batch, 1)
                    near_end = jnp.maximum(needing_mask, 1)
                    step = functools.partial(
                        key_step,
                        steps=steps,
                        index=index,
                        place=place,
                        row_scales=row_scales_of(*place),
                        end_block=end_of(tile, batch) if has_far_edge else blocks,
                    )
                    if any_mask:
                        masked_step = functools.partial(step, near=True, far=has_far_edge)
                        carry = lax.fori_loop(jnp.int32(1), near_end, masked_step, carry)
                    else:
                        near_end = jnp.int32(1)
                    far = blocks
                    if has_far_edge:
                        far = jnp.maximum(near_end, needs(tile, batch, 2))
                    plain_step = functools.partial(step, near=False, far=False)
                    carry = lax.fori_loop(near_end, far, plain_step, carry)
                    if has_far_edge:
                        far_step = functools.partial(step, near=False, far=True)
                        carry = lax.fori_loop(far, blocks, far_step, carry)
                    more, carry = end_tile(index, steps + blocks, _Carry(*carry))
                    return more, (steps + blocks, carry)

                if not config.promotes:
                    p_acc[...] = zero_tile(ROWS, value_columns.size)
                first = start_tile(zero, zero, *tiles.locate(number_of(0)))
                over_tiles(whole_tile, (zero, first))
                plgpu.wait_smem_to_gmem(0)

            pl.run_scoped(
                compute,
                plgpu.ACC((ROWS, value_columns.size), jnp.float32),
                plgpu.ACC((ROWS, block_kv), accumulated),
            )

        @pl.when(warpgroup == consumers)
        def _producer():
            plgpu.set_max_registers(config.registers[1], action="decrease")
            locate = lambda index: tiles.locate(number_of(index))

            def load_queries(index):
                tile, batch, head = locate(index)
                buffer = query_buffer(index)
                pl.when(index >= query_buffers)(lambda: q_free.wait(buffer))
                for w in range(consumers):
                    rows = pl.ds(tiles.first_row(tile, w), ROWS)
                    source = q_ref.at[batch, rows, head]
                    key_columns.load(source, q_smem.at[buffer, w], q_full.at[buffer])

            def turn_values(step):
                """Of a step, when they are there."""
                v_slot = value_slot(step)
                plgpu.barrier_wait(v_full.at[raw_slot(step)])
                pl.when(step >= value_stages)(lambda: v_free.wait(v_slot))
                for n, columns in enumerate(value_columns.tile_slices):
                    size = columns.stop - columns.start
                    target = turned_smem.at[v_slot, pl.ds(columns.start, size)]
                    transpose_float8(target, v_smem.at[raw_slot(step), n])
                fence_async_shared()
                # The warpgroup meets here: what follows may overwrite V.
                plgpu.barrier_arrive(turned_full.at[v_slot])

            def whole_tile(index, steps):
                tile, batch, head = locate(index)
                kv_head = kv_head_of(head)
                blocks = needs(tile, batch, 0)
                end_block = end_of(tile, batch) if has_far_edge else blocks

                def load(j):
                    step = steps + j
                    rows = pl.ds((end_block - 1 - j) * block_kv, block_kv)
                    buffer = slot(step)
                    pl.when(step >= stages)(lambda: k_free.wait(buffer))
                    source = k_ref.at[batch, rows, kv_head]
                    key_columns.load(source, k_smem.at[buffer], k_full.at[buffer])
                    pl.when(step >= lag)(lambda: turn_values(step - lag))
                    buffer = raw_slot(step)
                    source = v_ref.at[batch, rows, kv_head]
                    value_columns.load(source, v_smem.at[buffer], v_full.at[buffer])

                load(zero)
                wanted = index + (query_buffers - 1)
                pl.when(wanted < tile_count())(lambda: load_queries(wanted))
                pl.loop(jnp.int32(1), blocks)(load)
                return index + 1 < tile_count(), steps + blocks

            if query_buffers > 1:
                load_queries(zero)
            steps = over_tiles(whole_tile, zero)
            pl.loop(jnp.maximum(steps - lag, 0), steps)(turn_values)

    return tiles.with_lists(
        tiles.kernel(attention_forward_fp8, scratch, padded_query_length, out_dtype)
    )
