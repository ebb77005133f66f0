"""The gradients of key and value alone, at width 256, each product computed once.

The accumulators of dK and dV for 64 keys fill half of both consumers' registers, so each has half
of the columns. Neither computes S' and dP' for itself: they have roles, and send each other a tile
a step. As in `backward.py`, a thread block per SM walks a list of tiles, here of 64 keys of one key
head, and loops over the query blocks, of every query head of the group, that see any of them; tiles
are transposed.

    producer   K Q0 V dO0 | Q1 dO1 | ...                         TMA into circular buffers
    weights    S' = K Q' - LSE / scale;  dK += dS' Q of the step before, left columns
               P' = exp2(S' * scale * log2(e))                   while that is computed
               P' to the other;  dV += P' dO, left columns
    d_logits   dP' = V dO'
               P' from the other;  dV += P' dO, right columns
               dS' = P' * (dP' - delta)                          while that is computed
               dS' to the other;  dK += dS' Q, right columns

Both tiles are left operands from registers, and go through one place in shared memory in which
each thread finds what the same thread of the other consumer left (`primitives.send_tile`).

P' is sent as float32: rounded to the dtype of the inputs, as for dV, it would add to the error of
dS'. The right columns of K stay in registers of the first consumer, which saves reading them from
shared memory in every step.

A tile's gradients leave in the first step of the next, under its first products: each half of dV
through that half of the last slot of dO, each half of dK through that of Q, which the same consumer
was the last to read. Only then are the slots free, and the producer sends what it finds there
before it loads what is next. The first tile has none before it; what its first step computes and
leaves for that goes nowhere.

Barriers. Full: an mbarrier for K, for V, and for each slot of Q and dO, completed by TMA. Free: a
named barrier for each of these, the consumers arrive and the producer waits. A named barrier for
each tile that is sent; the receipt of one is what lets the other overwrite it.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.config import BACKWARD_CONSUMERS, BackwardKeyConfig, Problem
from pallas_kernels.key_tiles import QUERIES, KeyTiles, Walk, per_query
from pallas_kernels.online_softmax import LOG2E
from pallas_kernels.primitives import (
    OPERAND,
    NamedBarriers,
    div_rem,
    fence_async_shared,
    fresh_zero,
    interpreting,
    mail_shape,
    receive_tile,
    send_tile,
    store_operand,
    zero_tile,
)

_CONSUMERS = BACKWARD_CONSUMERS
_HALVES = 2  # column halves, each contiguous in shared memory
_LEFT, _RIGHT = range(_HALVES)
_STAGES = 2  # slots of Q and of dO, as many as fit; see `loads_of_step` for why not 1
_TILE = plgpu.Layout.WGMMA


def key_value_gradients(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    d_out: jax.Array,
    start: jax.Array,
    minus_delta: jax.Array,
    intervals: jax.Array | None = None,
    ids: tuple[jax.Array, jax.Array] | None = None,
    *,
    problem: Problem,
    config: BackwardKeyConfig,
) -> tuple[jax.Array, jax.Array]:
    """Gradients of key and value, the same bit by bit from run to run.

    Args:
      query, d_out: `[B, T, N, H]`; T a multiple of 8, rows from problem.query_length on zero. d_out
        is finite in rows that see no key.
      key, value: `[B, S, K, H]`; S a multiple of 8, finite in rows that no query sees.
      start: `[B, N, T up to a multiple of config.block_q]` float32, -LSE / scale; -inf for rows
        that see no key or are beyond the end.
      minus_delta: in the shape of start, dLSE - rowsum(d_out * out); 0 where start is -inf.
      intervals: None, or the keys that each query sees, `[B, 2, problem.query_length]` int32, for a
        problem that is dynamic.
      ids: None, or for a problem that is segmented the segment ids of queries and keys, int32
        `[B, problem.query_length]` and `[B, problem.key_length]` (`segments.py`).
      problem: static description; its lengths may be up to 7 below T and S.
      config: registers and thread blocks.

    Returns:
      Gradients in the shape and dtype of key. Rows from key_length on are arbitrary.
    """
    kernel = _build(problem, config, key.shape[1], interpreting())
    return kernel(intervals, ids, query, key, value, d_out, start, minus_delta)


@functools.lru_cache
def _build(problem: Problem, config: BackwardKeyConfig, key_rows: int, interpret: bool):
    block_q, block_kv = config.block_q, config.block_kv
    group, width, dtype = problem.group, problem.width, problem.dtype
    half = width // _HALVES
    factor = problem.scale * LOG2E
    # Tiles read Q and dO.
    tiles = KeyTiles(problem, block_kv, block_q, row_bytes=2 * width * dtype.itemsize)

    weights_sent = NamedBarriers(first=_CONSUMERS + 2, count=1, arrivers=1)
    ds_sent = NamedBarriers(weights_sent.first + 1, count=1, arrivers=1)
    late_free = NamedBarriers(ds_sent.first + 1, _STAGES + 1, arrivers=1)
    q_free = NamedBarriers(late_free.first + late_free.count, _STAGES, arrivers=_CONSUMERS)
    o_free = NamedBarriers(q_free.first + q_free.count, _STAGES, arrivers=_CONSUMERS)
    k_free = NamedBarriers(o_free.first + o_free.count, 1, arrivers=1)
    v_free = NamedBarriers(k_free.first + 1, 1, arrivers=1)
    named = dict(
        weights_sent=weights_sent,
        ds_sent=ds_sent,
        late_free=late_free,
        q_free=q_free,
        o_free=o_free,
        k_free=k_free,
        v_free=v_free,
    )

    smem = functools.partial(plgpu.SMEM, dtype=dtype, transforms=OPERAND)
    scratch: dict[str, Any] = dict(
        k_smem=smem((_HALVES, block_kv, half)),
        v_smem=smem((_HALVES, block_kv, half)),
        late_smem=smem((_STAGES + 1, block_q, half)),  # left columns of Q
        q_smem=smem((_STAGES, block_q, half)),  # right columns of Q
        o_smem=smem((_STAGES, _HALVES, block_q, half)),
        start_smem=plgpu.SMEM((_STAGES, block_q), jnp.float32),
        delta_smem=plgpu.SMEM((_STAGES, block_q), jnp.float32),
        mail=plgpu.SMEM(mail_shape(block_q, jnp.float32), jnp.int32),
        k_full=plgpu.Barrier(num_arrivals=_HALVES),
        v_full=plgpu.Barrier(num_arrivals=_HALVES),
        late_full=plgpu.Barrier(num_barriers=_STAGES + 1),
        q_full=plgpu.Barrier(num_arrivals=2, num_barriers=_STAGES),
        o_full=plgpu.Barrier(num_arrivals=_HALVES + 1, num_barriers=_STAGES),
    )
    if interpret:
        scratch["twins"] = {name: barriers.scratch() for name, barriers in named.items()}

    def attention_backward_key(
        *all_refs,
        k_smem, v_smem, late_smem, q_smem, o_smem, start_smem, delta_smem, mail,
        k_full, v_full, late_full, q_full, o_full, twins=None,
    ):  # fmt: skip
        warpgroup = lax.axis_index("warpgroup")
        walk, refs = Walk.of_refs(tiles, lax.axis_index("block"), all_refs)
        q_ref, k_ref, v_ref, do_ref, start_ref, delta_ref, dk_ref, dv_ref = refs
        weights_sent, ds_sent, late_free, q_free, o_free, k_free, v_free = (
            dataclasses.replace(barriers, twins=twins and twins[name])
            for name, barriers in named.items()
        )
        weights_mail = mail
        ds_mail = mail.at[pl.ds(0, mail_shape(block_q, dtype)[0])]
        zero = jnp.int32(0)

        def slot_of(j):
            """Of step j, and as well of step j - _STAGES."""
            return lax.rem(j + _STAGES, jnp.int32(_STAGES))

        def late_slot_of(j):
            return lax.rem(j + (_STAGES + 1), jnp.int32(_STAGES + 1))

        def take(accumulator, scale, *, wait_n):
            """A gradient from its accumulator; `wait_n` other products stay in flight."""
            gradient = plgpu.wgmma_accumulator_load(accumulator, wait_n=wait_n) * scale
            return gradient.astype(dtype)

        def leave(staging, gradient, accumulator):
            """Leaves a gradient for the producer to send, and the accumulator empty."""
            store_operand(staging, gradient)
            fence_async_shared()  # also for K's right half, which was read before it is overwritten
            accumulator[...] = zero_tile(block_kv, half)

        def run_with_accumulators(compute):
            accumulator = lambda columns: plgpu.ACC((block_kv, columns), jnp.float32)
            pl.run_scoped(compute, accumulator(half), accumulator(half), accumulator(block_q))

        @pl.when(warpgroup == 0)
        def _weights():
            plgpu.set_max_registers(config.registers[0], action="increase")

            def compute(dk_acc, dv_acc, s_acc):
                def issue_logits(j, slot, k_right):
                    plgpu.barrier_wait(q_full.at[slot])
                    start = plgpu.load(start_smem.at[slot], layout=QUERIES)
                    s_acc[...] = per_query(start, block_kv)
                    plgpu.wgmma(s_acc, k_right, q_smem.at[slot].transpose((1, 0)))
                    plgpu.barrier_wait(late_full.at[late_slot_of(j)])
                    queries = late_smem.at[late_slot_of(j)].transpose((1, 0))
                    plgpu.wgmma(s_acc, k_smem.at[_LEFT + fresh_zero()], queries)

                def issue_late_dk(j):
                    """dK of the step before j."""
                    ds_sent.wait(0)
                    ds = receive_tile(ds_mail, block_q, dtype)
                    plgpu.wgmma(dk_acc, ds, late_smem.at[late_slot_of(j - 1)])

                def hand_over_dv(j, dv):
                    """Once the other's dS' has come: by then it has read that slot of dO."""
                    leave(o_smem.at[slot_of(j - 1), _LEFT], dv, dv_acc)
                    o_free.arrive(slot_of(j - 1))

                def hand_over_dk(j, *, wait_n):
                    dk = take(dk_acc, problem.scale, wait_n=wait_n)
                    plgpu.commit_smem()  # all warps have read Q
                    leave(late_smem.at[late_slot_of(j - 1)], dk, dk_acc)
                    late_free.arrive(late_slot_of(j - 1))

                def step(j, mask, *, k_right, end, is_first=False):
                    slot = slot_of(j) + fresh_zero()  # made anew each step: registers are short
                    if is_first:
                        dv = take(dv_acc, 1.0, wait_n=0)
                    else:
                        o_free.arrive(slot_of(j - 1))
                    issue_logits(j, slot, k_right)
                    issue_late_dk(j)
                    if is_first:
                        hand_over_dv(j, dv)
                    logits = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
                    k_free.arrive(0, when=j + 1 == end)
                    weights = jnp.exp2(logits * factor)
                    if mask is not None:
                        weights = mask(weights, j, mask.equal_ids(j))
                    send_tile(weights_mail, weights)
                    weights_sent.arrive(0)
                    plgpu.barrier_wait(o_full.at[slot])
                    plgpu.wgmma(dv_acc, weights.astype(dtype), o_smem.at[slot, _LEFT])
                    fence_async_shared()  # TMA will overwrite the row statistics that were read
                    q_free.arrive(slot)
                    if is_first:
                        hand_over_dk(j, wait_n=1)
                    else:
                        plgpu.wgmma_wait(1)
                        late_free.arrive(late_slot_of(j - 1))
                    plgpu.wgmma_wait(0)

                def whole_tile(index, j):
                    plgpu.barrier_wait(k_full)
                    k_right = plgpu.load(k_smem.at[_RIGHT + fresh_zero()], layout=_TILE)
                    settings = dict(k_right=k_right, end=j + walk.steps(index))
                    return walk.loop_over_steps(
                        functools.partial(step, **settings),
                        index,
                        j,
                        first_step=functools.partial(step, **settings, is_first=True),
                    )

                q_free.arrive(slot_of(zero - 1))
                j = lax.fori_loop(zero, walk.count(), whole_tile, zero)
                dv = take(dv_acc, 1.0, wait_n=0)
                issue_late_dk(j)
                hand_over_dv(j, dv)
                hand_over_dk(j, wait_n=0)

            run_with_accumulators(compute)

        @pl.when(warpgroup == 1)
        def _d_logits():
            plgpu.set_max_registers(config.registers[0], action="increase")

            def compute(dk_acc, dv_acc, dp_acc):
                def issue_d_weights(slot):
                    plgpu.barrier_wait(o_full.at[slot])
                    dp_acc[...] = zero_tile(block_kv, block_q)
                    for half_number in range(_HALVES):
                        v_half = v_smem.at[half_number + fresh_zero()]
                        d_out = o_smem.at[slot, half_number].transpose((1, 0))
                        plgpu.wgmma(dp_acc, v_half, d_out)

                def take_gradients():
                    return take(dk_acc, problem.scale, wait_n=0), take(dv_acc, 1.0, wait_n=None)

                def hand_over(j, dk, dv):
                    """The gradients of the tile that ended with the step before j."""
                    plgpu.commit_smem()  # all warps have read Q and dO
                    leave(q_smem.at[slot_of(j - 1)], dk, dk_acc)
                    leave(o_smem.at[slot_of(j - 1), _RIGHT], dv, dv_acc)
                    free(j - 1)

                def free(j):
                    o_free.arrive(slot_of(j))
                    q_free.arrive(slot_of(j))

                def step(j, *, end, is_first=False):
                    slot = slot_of(j) + fresh_zero()
                    if is_first:
                        gradients = take_gradients()
                    else:
                        free(j - 1)
                    issue_d_weights(slot)
                    if is_first:
                        hand_over(j, *gradients)
                    weights_sent.wait(0)
                    weights = receive_tile(weights_mail, block_q, jnp.float32)
                    plgpu.wgmma(dv_acc, weights.astype(dtype), o_smem.at[slot, _RIGHT])
                    d_weights = plgpu.wgmma_accumulator_load(dp_acc, wait_n=1)
                    v_free.arrive(0, when=j + 1 == end)
                    minus_delta = plgpu.load(delta_smem.at[slot], layout=QUERIES)
                    ds = (weights * (d_weights + per_query(minus_delta, block_kv))).astype(dtype)
                    send_tile(ds_mail, ds)
                    ds_sent.arrive(0)
                    plgpu.barrier_wait(q_full.at[slot])
                    plgpu.wgmma(dk_acc, ds, q_smem.at[slot])
                    fence_async_shared()  # as above
                    plgpu.wgmma_wait(0)

                def whole_tile(index, j):
                    end = j + walk.steps(index)
                    plgpu.barrier_wait(v_full)
                    step(j, end=end, is_first=True)
                    pl.loop(j + 1, end)(functools.partial(step, end=end))
                    return end

                ds_sent.arrive(0)
                j = lax.fori_loop(zero, walk.count(), whole_tile, zero)
                hand_over(j, *take_gradients())

            run_with_accumulators(compute)

        @pl.when(warpgroup == _CONSUMERS)
        def _producer():
            plgpu.set_max_registers(config.registers[1], action="decrease")
            halves = [pl.ds(n * half, half) for n in range(_HALVES)]

            def when_there_is(index):
                return pl.when(index < walk.count())

            def keys_of(index):
                """Batch entry, keys and key head of a tile."""
                tile, kv_head_of_all = walk.locate(index)
                batch, kv_head = div_rem(kv_head_of_all, problem.kv_heads)
                return batch, pl.ds(tile * block_kv, block_kv), kv_head

            def queries_of(index, t):
                """Index of a tile; batch entry, rows and query head of its step t."""
                place = _, kv_head_of_all = walk.locate(index)
                query_block, member = walk.step_of(place, t)
                batch, kv_head = div_rem(kv_head_of_all, problem.kv_heads)
                rows = pl.ds(query_block * block_q, block_q)
                return index, batch, rows, kv_head * group + member

            def load_keys(index, ref, buffer, full):
                @when_there_is(index)
                def _():
                    for n, columns in enumerate(halves):
                        source = ref.at[*keys_of(index), columns]
                        plgpu.copy_gmem_to_smem(source, buffer.at[n], full)

            def load_late(slot, index, batch, rows, head):
                @when_there_is(index)
                def _():
                    source = q_ref.at[batch, rows, head, halves[_LEFT]]
                    plgpu.copy_gmem_to_smem(source, late_smem.at[slot], late_full.at[slot])

            def load_query(slot, index, batch, rows, head):
                @when_there_is(index)
                def _():
                    source = q_ref.at[batch, rows, head, halves[_RIGHT]]
                    plgpu.copy_gmem_to_smem(source, q_smem.at[slot], q_full.at[slot])
                    row_source = start_ref.at[batch, head, rows]
                    plgpu.copy_gmem_to_smem(row_source, start_smem.at[slot], q_full.at[slot])

            def load_d_out(slot, index, batch, rows, head):
                @when_there_is(index)
                def _():
                    for n, columns in enumerate(halves):
                        source = do_ref.at[batch, rows, head, columns]
                        plgpu.copy_gmem_to_smem(source, o_smem.at[slot, n], o_full.at[slot])
                    row_source = delta_ref.at[batch, head, rows]
                    plgpu.copy_gmem_to_smem(row_source, delta_smem.at[slot], o_full.at[slot])

            def send(index, *copies):
                """From (shared memory, gradient, number of its half); done reading on return."""
                for source, ref, n in copies:
                    plgpu.copy_smem_to_gmem(source, ref.at[*keys_of(index), halves[n]])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

            def loads_of_step(j, index, t, near):
                """Refills the slots of the step before j, which is step t of a tile.

                The consumers free them in step j, after they have begun its first products, for
                which Q and dO must be there by then.

                Args:
                  near: tile and number in it of the step that the slots of Q and dO are for.

                Returns:
                  The step after that, which the slot of Q's left columns is for.
                """
                slot, late_slot = slot_of(j - 1), late_slot_of(j - 1)
                is_last = (index < walk.count()) & (t + 1 == walk.steps(index))
                gradients_left = (index > 0) & (t == 0)

                near_queries = queries_of(*near)
                q_free.wait(slot)
                o_free.wait(slot)
                pl.when(gradients_left)(
                    lambda: send(
                        index - 1,
                        (q_smem.at[slot], dk_ref, _RIGHT),
                        *((o_smem.at[slot, n], dv_ref, n) for n in range(_HALVES)),
                    )
                )
                load_query(slot, *near_queries)
                load_d_out(slot, *near_queries)

                @pl.when(is_last)
                def _():
                    k_free.wait(0)
                    load_keys(index + 1, k_ref, k_smem, k_full)

                following = walk.advance(*near)
                following_queries = queries_of(*following)
                late_free.wait(late_slot)
                pl.when(gradients_left)(
                    lambda: send(index - 1, (late_smem.at[late_slot], dk_ref, _LEFT))
                )
                load_late(late_slot, *following_queries)

                @pl.when(is_last)
                def _():
                    v_free.wait(0)
                    load_keys(index + 1, v_ref, v_smem, v_full)

                return following

            def whole_tile(index, carry):
                def one_step(t, carry):
                    j, *near = carry
                    return j + 1, *loads_of_step(j, index, t, near)

                return lax.fori_loop(zero, walk.steps(index), one_step, carry)

            near = zero, zero
            load_keys(zero, k_ref, k_smem, k_full)
            for slot in range(_STAGES - 1):
                load_query(slot, *queries_of(*near))
                load_late(slot, *queries_of(*near))
                if slot == 0:
                    load_keys(zero, v_ref, v_smem, v_full)
                load_d_out(slot, *queries_of(*near))
                near = walk.advance(*near)
            load_late(_STAGES - 1, *queries_of(*near))
            carry = lax.fori_loop(zero, walk.count(), whole_tile, (zero, *near))
            loads_of_step(carry[0], walk.count(), zero, carry[1:])
            plgpu.wait_smem_to_gmem(0)

    return tiles.gradient_kernel(attention_backward_key, key_rows, config.thread_blocks, scratch)
