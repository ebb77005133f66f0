"""The gradients of key and value alone, at widths above 128, each product computed once.

At width 256 the accumulators of dK and dV for 64 keys fill half of both consumers' registers, so
each has half of the columns; at other widths each has a part of them, such that the products of
both take as long. Neither computes S' and dP' for itself: they have roles, and send each other a
tile a step. As in `backward.py`, a thread block walks a list of tiles, here of 64 keys of one key
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
               dS' to global memory, for dQ                      where there is room for it

Both tiles are left operands from registers, and go through one place in shared memory in which
each thread finds what the same thread of the other consumer left (`primitives.send_tile`).

P' is sent as float32: rounded to the dtype of the inputs, as for dV, it would add to the error of
dS'. With a soft cap it is the capped logits that are sent, as their derivative is needed too; the
other computes P' once more. The right columns of K stay in registers of the first consumer, which
saves reading them from shared memory in every step.

A tile's gradients leave in the first step of the next, under its first products: each part of dV
through that part of the last slot of dO, each part of dK through that of Q, which the same consumer
was the last to read. Only then are the slots free, and the producer sends what it finds there
before it loads what is next. The first tile has none before it; what its first step computes and
leaves for that goes nowhere.

Barriers. Full: an mbarrier for K, for V, and for each slot of Q and dO, completed by TMA. Free: a
named barrier for each of these, the consumers arrive and the producer waits. A named barrier for
each tile that is sent; the receipt of one is what lets the other overwrite it.
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

from pallas_kernels import soft_cap
from pallas_kernels.columns import Columns
from pallas_kernels.config import (
    BACKWARD_CONSUMERS,
    BackwardKeyConfig,
    Problem,
    box_width,
    whole_tiles,
)
from pallas_kernels.dropout import Words, as_operand, d_logits, negated_transposed
from pallas_kernels.element_arrays import NO_ELEMENTS, Elements
from pallas_kernels.elements import biased
from pallas_kernels.elements import masked as masked_by_element
from pallas_kernels.far_rows import shared_by_key, weights_by_key
from pallas_kernels.interpret import interpreting
from pallas_kernels.key_tiles import QUERIES, KeyTiles, Section, Walk, per_query
from pallas_kernels.online_softmax import spread
from pallas_kernels.primitives import (
    NamedBarriers,
    commit_smem,
    div_rem,
    fence_async_shared,
    fresh_zero,
    load_operand,
    mail_shape,
    receive_tile,
    send_tile,
    store_by_quads,
    store_operand,
    zero_tile,
)

_CONSUMERS = BACKWARD_CONSUMERS
# Columns of a part of Q and K, and of V and dO, by their number; where it is not here by that of
# whole tiles, at least two.
# What the two consumers' products take is level: S' and dP', then dK and dV of their parts.
_KEY_PARTS = {128: (64, 64), 160: (64, 96), 192: (64, 128), 224: (96, 128), 256: (128, 128)}
_VALUE_PARTS = {128: (64, 64), 160: (96, 64), 192: (128, 64), 224: (128, 96), 256: (128, 128)}
_LEFT, _RIGHT = range(2)
_STAGES = 2  # slots of Q and of dO, as many as fit; see `loads_of_step` for why not 1
_TILE = plgpu.Layout.WGMMA


def key_value_gradients(
    any_far: jax.Array,
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
    config: BackwardKeyConfig,
    section: Section | None = None,
    results: tuple[Any, ...] = (),
) -> tuple[jax.Array, ...]:
    """Gradients of key and value, the same bit by bit from run to run.

    Args:
      any_far: int32 `[1]`, more than 0 if any row is far from 0.
      query, d_out: `[B, T, N, H]` and `[B, T, N, h]`; T a multiple of 8, rows from
        problem.query_length on zero. d_out is finite in rows that see no key.
      key, value: `[B, S, K, H]` and `[B, S, K, h]`; S a multiple of 8, finite in rows that no query
        sees.
      start: of `row_statistics` and `key_tiles.with_words`, of T up to a multiple of
        config.block_q: -LSE / unit; -inf for rows that see no key or are beyond the end.
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
      config: registers and thread blocks.
      section: None for all heads, or one of `d_logits_sections`.
      results: none, or refs of what is returned, which the kernel writes to then.

    Returns:
      Gradients in the shapes and dtype of key and value. Rows from key_length on are arbitrary.
      With a section other heads are too, and third comes dS' of its heads in the input dtype, of
      each step of `key_tiles(problem)` 64 keys by 64 queries, in the order of the key heads, their
      tiles and the steps of these: `[section.size * steps, 64, 64]`. Queries are in the order of
      `primitives.store_by_quads`.
    """
    kernel = _build(problem, config, key.shape[1], interpreting(), section.size if section else 0)
    of_elements = elements.operands(transposed=True)
    operands = *of_elements, any_far, query, key, value, d_out, start, minus_delta, far
    kv_heads = section.kv_heads if section else None
    return kernel(intervals, ids, dropout_words, *operands, kv_heads=kv_heads, results=results)


def key_tiles(problem: Problem, config: BackwardKeyConfig) -> KeyTiles:
    """Tiles of keys, and the blocks of queries that read Q and dO for them."""
    return KeyTiles(problem, config.block_kv, config.block_q, row_bytes=problem.pair_bytes)


def d_logits_sections(problem: Problem, config: BackwardKeyConfig) -> list[Section]:
    """The key heads whose dS' is in memory at a time, as few sections as may be.

    None where config.d_logits_bytes are too few for a head, or what is visited is known at run
    time only: `backward_query_product.py` takes no step that was not.
    """
    if problem.by_batch:
        return []
    tiles = key_tiles(problem, config)
    tile_bytes = config.block_kv * config.block_q * problem.dtype.itemsize
    head_bytes = tiles.steps_per_head * tile_bytes
    count = len(tiles.kv_heads)
    if head_bytes > config.d_logits_bytes:
        return []
    sections = -(-count // (config.d_logits_bytes // head_bytes))
    size = -(-count // sections)
    return [Section(tiles.kv_heads[first : first + size], size) for first in range(0, count, size)]


class _Parts(NamedTuple):
    """The left and the right columns of an operand, each contiguous in shared memory."""

    left: Columns
    right: Columns

    @classmethod
    def of(cls, width: int, parts: dict[int, tuple[int, int]]) -> "_Parts":
        size, box = width, box_width(width)
        if width not in parts:
            size, box = max(whole_tiles(width), min(parts)), 64
        left, right = parts[size]
        return cls(Columns(width, left, 0, box), Columns(width, right, left, box))

    @property
    def tiles(self) -> int:
        return self.left.tiles + self.right.tiles

    def smem(self, *shape: int, dtype: np.dtype) -> list[Any]:
        """Shared memory of both for `(..., rows)`: one array if they are alike, or one each."""
        *leading, rows = shape
        if self.left.size == self.right.size:
            return [self.left.smem(*leading, 2, rows, dtype=dtype)]
        return [columns.smem(*leading, 1, rows, dtype=dtype) for columns in self]

    def at(self, arrays: list, part: int, *slot):
        """What `Columns` take of one part: all of it, or a slot of it."""
        return arrays[part % len(arrays)].at[*slot, part // len(arrays)]

    def resident(self, arrays: list, part: int):
        """The same of one that has no slots, at an address that is made anew."""
        return arrays[part % len(arrays)].at[part // len(arrays) + fresh_zero()]


@functools.lru_cache
def _build(
    problem: Problem,
    config: BackwardKeyConfig,
    key_rows: int,
    interpret: bool,
    stored_heads: int,
):
    """The kernel; it stores dS' too, of sections of so many heads, or if 0 does not."""
    block_q, block_kv = config.block_q, config.block_kv
    group, dtype = problem.group, problem.dtype
    key_parts = _Parts.of(problem.width, _KEY_PARTS)
    value_parts = _Parts.of(problem.value_width, _VALUE_PARTS)
    dk_factor, dv_factor = problem.scale * problem.d_logit_unit, 1.0 / problem.kept_share
    has_cap, has_dropout = problem.soft_cap is not None, bool(problem.dropout)
    # Registers are short then.
    crowded = problem.has_elements or (has_cap and (has_dropout or problem.segmented))
    # The words of queries come with their start, as does their share.
    words_row = 1 + int(problem.has_shares)
    together = words_row + int(has_dropout)
    tiles = key_tiles(problem, config)

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

    left_key, right_key = key_parts
    scratch: dict[str, Any] = dict(
        k_smem=key_parts.smem(block_kv, dtype=dtype),
        v_smem=value_parts.smem(block_kv, dtype=dtype),
        late_smem=left_key.smem(_STAGES + 1, block_q, dtype=dtype),  # left columns of Q
        q_smem=right_key.smem(_STAGES, block_q, dtype=dtype),  # right columns of Q
        o_smem=value_parts.smem(_STAGES, block_q, dtype=dtype),
        start_smem=plgpu.SMEM((_STAGES, together, block_q), jnp.float32),
        delta_smem=plgpu.SMEM((_STAGES, block_q), jnp.float32),
        mail=plgpu.SMEM(mail_shape(block_q, jnp.float32), jnp.int32),
        k_full=plgpu.Barrier(num_arrivals=key_parts.tiles),
        v_full=plgpu.Barrier(num_arrivals=value_parts.tiles),
        late_full=plgpu.Barrier(num_arrivals=left_key.tiles, num_barriers=_STAGES + 1),
        q_full=plgpu.Barrier(num_arrivals=right_key.tiles + 1, num_barriers=_STAGES),
        o_full=plgpu.Barrier(num_arrivals=value_parts.tiles + 1, num_barriers=_STAGES),
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
        q_ref, k_ref, v_ref, do_ref, start_ref, delta_ref, far_ref, dk_ref, dv_ref, *ds_refs = refs
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

        def load_start(slot):
            start = plgpu.load(start_smem.at[slot, 0], layout=QUERIES)
            return per_query(start, block_kv)

        def load_query_words(slot):
            words = plgpu.load(start_smem.at[slot, words_row], layout=QUERIES)
            return lax.bitcast_convert_type(words, jnp.int32)

        def dropped(weights, key_words, slot):
            """The weights, negative where they are dropped."""
            if not has_dropout:
                return weights
            return negated_transposed(weights, key_words, load_query_words(slot), problem)

        def capped_weights(logits, slot, key_words):
            """Weights of capped logits: operand of dV, and times the derivative of the cap."""
            words = None
            if has_dropout:
                query_words = per_query(load_query_words(slot), block_kv)
                words = spread(key_words, logits.shape), query_words
            return soft_cap.capped_weights(logits, load_start(slot), problem, words)

        def take(accumulator, scale, *, wait_n):
            """A gradient from its accumulator; `wait_n` other products stay in flight."""
            gradient = plgpu.wgmma_accumulator_load(accumulator, wait_n=wait_n) * scale
            return gradient.astype(dtype)

        def leave(columns, staging, gradient, accumulator):
            """Leaves a gradient for the producer to send, and the accumulator empty."""
            for n, tile_columns in enumerate(columns.tile_slices):
                store_operand(staging.at[n], gradient[:, tile_columns], columns.box_width)
            fence_async_shared()  # also for K's right part, which was read before it is overwritten
            accumulator[...] = zero_tile(block_kv, columns.size)

        def run_with_accumulators(compute, part):
            accumulator = lambda columns: plgpu.ACC((block_kv, columns), jnp.float32)
            sizes = key_parts[part].size, value_parts[part].size, block_q
            pl.run_scoped(compute, *map(accumulator, sizes))

        @pl.when(warpgroup == 0)
        def _weights():
            plgpu.set_max_registers(config.registers[0], action="increase")

            own_key, own_value = key_parts[_LEFT], value_parts[_LEFT]

            def compute(dk_acc, dv_acc, s_acc):
                def issue_logits(j, slot, k_right):
                    plgpu.barrier_wait(q_full.at[slot])
                    # What a cap is for must come alone.
                    s_acc[...] = zero_tile(block_kv, block_q) if has_cap else load_start(slot)
                    right_key.contract(s_acc, k_right, q_smem.at[slot])
                    plgpu.barrier_wait(late_full.at[late_slot_of(j)])
                    k_left = key_parts.resident(k_smem, _LEFT)
                    left_key.contract(s_acc, k_left, late_smem.at[late_slot_of(j)])

                def masked(weights, mask, j, loaded, fill=0.0):
                    if mask is not None:
                        weights = mask(weights, j, mask.equal_ids(j), fill)
                    return masked_by_element(weights, loaded, fill)

                def issue_late_dk(j):
                    """dK of the step before j."""
                    ds_sent.wait(0)
                    ds = receive_tile(ds_mail, block_q, dtype)
                    own_key.expand(dk_acc, ds, late_smem.at[late_slot_of(j - 1)])

                def hand_over_dv(j, dv):
                    """Once the other's dS' has come: by then it has read that slot of dO."""
                    d_out = value_parts.at(o_smem, _LEFT, slot_of(j - 1))
                    leave(own_value, d_out, dv, dv_acc)
                    o_free.arrive(slot_of(j - 1))

                def hand_over_dk(j, *, wait_n):
                    dk = take(dk_acc, dk_factor, wait_n=wait_n)
                    commit_smem(anew=crowded)  # all warps have read Q
                    leave(own_key, late_smem.at[late_slot_of(j - 1)], dk, dk_acc)
                    late_free.arrive(late_slot_of(j - 1))

                def step(j, mask, far, load_elements, *, k_right, key_words, end, is_first=False):
                    slot = slot_of(j) + fresh_zero()  # made anew each step: registers are short
                    if is_first:
                        dv = take(dv_acc, dv_factor, wait_n=0)
                    else:
                        o_free.arrive(slot_of(j - 1))
                    issue_logits(j, slot, k_right)
                    issue_late_dk(j)
                    if is_first:
                        hand_over_dv(j, dv)
                    loaded = load_elements(j)
                    logits = plgpu.wgmma_accumulator_load(s_acc, wait_n=own_key.tiles)
                    k_free.arrive(0, when=j + 1 == end)
                    if has_cap:
                        logits, _ = soft_cap.capped(logits, loaded, problem, branches=False)
                        logits = masked(logits, mask, j, loaded, soft_cap.UNSEEN)
                        send_tile(weights_mail, logits)
                        operand, _ = capped_weights(logits, slot, key_words)
                    else:
                        if far and problem.has_marks:
                            start = start_smem.at[slot, 0]
                            weights = weights_by_key(logits, loaded, problem, start, far_ref)
                        else:
                            logits, to_log2 = biased(logits, problem, loaded)
                            weights = jnp.exp2(logits * to_log2)
                        if far and problem.has_shares:
                            weights = shared_by_key(weights, start_smem.at[slot], problem)
                        weights = masked(weights, mask, j, loaded)
                        weights = dropped(weights, key_words, slot)
                        send_tile(weights_mail, weights)
                    weights_sent.arrive(0)
                    plgpu.barrier_wait(o_full.at[slot])
                    d_out = value_parts.at(o_smem, _LEFT, slot)
                    if not has_cap:
                        operand = as_operand(weights, problem)
                    own_value.expand(dv_acc, operand, d_out)
                    fence_async_shared()  # TMA will overwrite the row statistics that were read
                    q_free.arrive(slot)
                    if is_first:
                        hand_over_dk(j, wait_n=own_value.tiles)
                    else:
                        plgpu.wgmma_wait(own_value.tiles)
                        late_free.arrive(late_slot_of(j - 1))
                    plgpu.wgmma_wait(0)

                def whole_tile(index, j):
                    plgpu.barrier_wait(k_full)
                    k_right = key_parts.resident(k_smem, _RIGHT)
                    if not problem.has_elements:
                        k_right = [
                            load_operand(
                                k_right.at[n], right_key.tile_width, dtype, right_key.box_width
                            )
                            for n in range(right_key.tiles)
                        ]
                    settings = dict(
                        k_right=k_right,
                        key_words=walk.key_words(index, 0),
                        end=j + walk.steps(index),
                    )
                    return walk.loop_over_steps(
                        functools.partial(step, **settings),
                        index,
                        j,
                        first_step=functools.partial(step, **settings, is_first=True),
                    )

                q_free.arrive(slot_of(zero - 1))
                j = lax.fori_loop(zero, walk.count(), whole_tile, zero)
                dv = take(dv_acc, dv_factor, wait_n=0)
                issue_late_dk(j)
                hand_over_dv(j, dv)
                hand_over_dk(j, wait_n=0)

            run_with_accumulators(compute, _LEFT)

        @pl.when(warpgroup == 1)
        def _d_logits():
            plgpu.set_max_registers(config.registers[0], action="increase")

            own_key, own_value = key_parts[_RIGHT], value_parts[_RIGHT]

            def compute(dk_acc, dv_acc, dp_acc):
                def issue_d_weights(slot):
                    plgpu.barrier_wait(o_full.at[slot])
                    dp_acc[...] = zero_tile(block_kv, block_q)
                    for part, columns in enumerate(value_parts):
                        v_part = value_parts.resident(v_smem, part)
                        columns.contract(dp_acc, v_part, value_parts.at(o_smem, part, slot))

                def take_gradients():
                    return take(dk_acc, dk_factor, wait_n=0), take(dv_acc, dv_factor, wait_n=None)

                def hand_over(j, dk, dv):
                    """The gradients of the tile that ended with the step before j."""
                    commit_smem(anew=crowded)  # all warps have read Q and dO
                    leave(own_key, q_smem.at[slot_of(j - 1)], dk, dk_acc)
                    d_out = value_parts.at(o_smem, _RIGHT, slot_of(j - 1))
                    leave(own_value, d_out, dv, dv_acc)
                    free(j - 1)

                def free(j):
                    o_free.arrive(slot_of(j))
                    q_free.arrive(slot_of(j))

                def first_stored(index):
                    """Where dS' of a tile's first step goes."""
                    place = _, kv_head_of_all = walk.locate(index)
                    own_head = lax.rem(kv_head_of_all, jnp.int32(stored_heads))
                    return own_head * tiles.steps_per_head + walk.first_step(place)

                def step(j, *, key_words, end, to_stored, is_first=False):
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
                    d_out = value_parts.at(o_smem, _RIGHT, slot)
                    if has_cap:
                        plgpu.barrier_wait(q_full.at[slot])  # for the start of its logits
                        operand, weights = capped_weights(weights, slot, key_words)
                    else:
                        operand = as_operand(weights, problem)
                    own_value.expand(dv_acc, operand, d_out)
                    d_weights = plgpu.wgmma_accumulator_load(dp_acc, wait_n=own_value.tiles)
                    v_free.arrive(0, when=j + 1 == end)
                    minus_delta = plgpu.load(delta_smem.at[slot], layout=QUERIES)
                    minus_delta = per_query(minus_delta, block_kv)
                    ds = d_logits(weights, d_weights, minus_delta, problem).astype(dtype)
                    send_tile(ds_mail, ds)
                    ds_sent.arrive(0)
                    for ds_ref in ds_refs:
                        store_by_quads(ds_ref.at[j + to_stored], ds)
                    if not has_cap:
                        plgpu.barrier_wait(q_full.at[slot])
                    own_key.expand(dk_acc, ds, q_smem.at[slot])
                    fence_async_shared()  # as above
                    plgpu.wgmma_wait(0)

                def whole_tile(index, j):
                    end = j + walk.steps(index)
                    plgpu.barrier_wait(v_full)
                    key_words = walk.key_words(index, 0) if has_cap else None
                    to_stored = first_stored(index) - j if stored_heads else None
                    settings = dict(key_words=key_words, end=end, to_stored=to_stored)
                    step(j, **settings, is_first=True)
                    pl.loop(j + 1, end)(functools.partial(step, **settings))
                    return end

                ds_sent.arrive(0)
                j = lax.fori_loop(zero, walk.count(), whole_tile, zero)
                hand_over(j, *take_gradients())

            run_with_accumulators(compute, _RIGHT)

        @pl.when(warpgroup == _CONSUMERS)
        def _producer():
            plgpu.set_max_registers(config.registers[1], action="decrease")

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

            def load_keys(index, ref, buffer, parts, full):
                @when_there_is(index)
                def _():
                    for n, columns in enumerate(parts):
                        columns.load(ref.at[*keys_of(index)], parts.at(buffer, n), full)

            def load_late(slot, index, batch, rows, head):
                @when_there_is(index)
                def _():
                    source = q_ref.at[batch, rows, head]
                    left_key.load(source, late_smem.at[slot], late_full.at[slot])

            def load_query(slot, index, batch, rows, head):
                @when_there_is(index)
                def _():
                    source = q_ref.at[batch, rows, head]
                    right_key.load(source, q_smem.at[slot], q_full.at[slot])
                    row_source = start_ref.at[batch, head, pl.ds(0, together), rows]
                    plgpu.copy_gmem_to_smem(row_source, start_smem.at[slot], q_full.at[slot])

            def load_d_out(slot, index, batch, rows, head):
                @when_there_is(index)
                def _():
                    for n, columns in enumerate(value_parts):
                        source = do_ref.at[batch, rows, head]
                        buffer = value_parts.at(o_smem, n, slot)
                        columns.load(source, buffer, o_full.at[slot])
                    row_source = delta_ref.at[batch, head, rows]
                    plgpu.copy_gmem_to_smem(row_source, delta_smem.at[slot], o_full.at[slot])

            def send(index, *copies):
                """From (columns, shared memory, gradient); done reading on return."""
                for columns, source, ref in copies:
                    columns.store(source, ref.at[*keys_of(index)])
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
                        (right_key, q_smem.at[slot], dk_ref),
                        *(
                            (columns, value_parts.at(o_smem, n, slot), dv_ref)
                            for n, columns in enumerate(value_parts)
                        ),
                    )
                )
                load_query(slot, *near_queries)
                load_d_out(slot, *near_queries)

                @pl.when(is_last)
                def _():
                    k_free.wait(0)
                    load_keys(index + 1, k_ref, k_smem, key_parts, k_full)

                following = walk.advance(*near)
                following_queries = queries_of(*following)
                late_free.wait(late_slot)
                pl.when(gradients_left)(
                    lambda: send(index - 1, (left_key, late_smem.at[late_slot], dk_ref))
                )
                load_late(late_slot, *following_queries)

                @pl.when(is_last)
                def _():
                    v_free.wait(0)
                    load_keys(index + 1, v_ref, v_smem, value_parts, v_full)

                return following

            def whole_tile(index, carry):
                def one_step(t, carry):
                    j, *near = carry
                    return j + 1, *loads_of_step(j, index, t, near)

                return lax.fori_loop(zero, walk.steps(index), one_step, carry)

            near = zero, zero
            load_keys(zero, k_ref, k_smem, key_parts, k_full)
            for slot in range(_STAGES - 1):
                load_query(slot, *queries_of(*near))
                load_late(slot, *queries_of(*near))
                if slot == 0:
                    load_keys(zero, v_ref, v_smem, value_parts, v_full)
                load_d_out(slot, *queries_of(*near))
                near = walk.advance(*near)
            load_late(_STAGES - 1, *queries_of(*near))
            carry = lax.fori_loop(zero, walk.count(), whole_tile, (zero, *near))
            loads_of_step(carry[0], walk.count(), zero, carry[1:])
            plgpu.wait_smem_to_gmem(0)

    more_results: tuple[jax.ShapeDtypeStruct, ...] = ()
    if stored_heads:
        count = stored_heads * tiles.steps_per_head
        more_results = (jax.ShapeDtypeStruct((count, block_kv, block_q), dtype),)
    return tiles.gradient_kernel(
        attention_backward_key,
        key_rows,
        config.thread_blocks,
        scratch,
        more_results=more_results,
    )
