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
each thread finds what the same thread of the other consumer left (`ptx.mail.send_tile`).

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

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import soft_cap
from pallas_kernels.backward_key_plan import CONSUMERS, STAGES, Parts, Plan
from pallas_kernels.columns import Columns
from pallas_kernels.config import BackwardKeyConfig, Problem
from pallas_kernels.dropout import Words, as_operand, d_logits, negated_transposed
from pallas_kernels.element_arrays import NO_ELEMENTS, Elements
from pallas_kernels.elements import biased
from pallas_kernels.far_rows import shared_by_key, weights_by_key
from pallas_kernels.interpret import interpreting
from pallas_kernels.key_tiles import (
    Section,
    Walk,
    load_per_query,
    load_words,
    masked,
    per_query,
)
from pallas_kernels.online_softmax import spread
from pallas_kernels.ptx.arithmetic import div_rem
from pallas_kernels.ptx.barriers import commit_smem, fence_async_shared, with_twins
from pallas_kernels.ptx.compiler import fresh_zero
from pallas_kernels.ptx.mail import mail_shape, receive_tile, send_tile
from pallas_kernels.ptx.mlir import zero_tile
from pallas_kernels.ptx.operands import load_operand, store_operand
from pallas_kernels.ptx.stores import store_by_quads

_LEFT, _RIGHT = range(2)


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
      `ptx.stores.store_by_quads`.
    """
    kernel = _build(problem, config, key.shape[1], interpreting(), section.size if section else 0)
    of_elements = elements.operands(transposed=True)
    operands = *of_elements, any_far, query, key, value, d_out, start, minus_delta, far
    kv_heads = section.kv_heads if section else None
    return kernel(intervals, ids, dropout_words, *operands, kv_heads=kv_heads, results=results)


@functools.lru_cache
def _build(
    problem: Problem,
    config: BackwardKeyConfig,
    key_rows: int,
    interpret: bool,
    stored_heads: int,
):
    """The kernel; it stores dS' too, of sections of so many heads, or if 0 does not."""
    plan = Plan(problem, config, stored_heads)

    def attention_backward_key(*refs, **scratch):
        warpgroup = lax.axis_index("warpgroup")
        block = _ThreadBlock(plan, refs, **scratch)
        pl.when(warpgroup == 0)(lambda: _consume(block, _Weights, _LEFT))
        pl.when(warpgroup == 1)(lambda: _consume(block, _DLogits, _RIGHT))
        pl.when(warpgroup == CONSUMERS)(lambda: _produce(block))

    more_results: tuple[jax.ShapeDtypeStruct, ...] = ()
    if stored_heads:
        shape = stored_heads * plan.tiles.steps_per_head, config.block_kv, config.block_q
        more_results = (jax.ShapeDtypeStruct(shape, problem.dtype),)
    return plan.tiles.gradient_kernel(
        attention_backward_key,
        key_rows,
        config.thread_blocks,
        plan.scratch(interpret),
        more_results=more_results,
    )


class _ThreadBlock:
    """What producer and consumers share: operands, results, buffers, barriers, and the walk.

    Attributes:
      plan: of the kernel.
      walk: over tiles of keys.
      q, k, v, d_out, start, delta, far, dk, dv, ds: refs of operands and results, in global
        memory; ds is a list of none or one.
      k_smem, v_smem, o_smem: lists of the buffers of `Parts`.
      late_smem, q_smem: buffers of the left and right columns of Q.
      start_smem, delta_smem: of statistics of rows.
      weights_mail, ds_mail: where a consumer finds what the other sent.
      k_full, v_full, late_full, q_full, o_full: mbarriers a buffer, completed by TMA.
      weights_sent, ds_sent, late_free, q_free, o_free, k_free, v_free: `Plan.barriers`.
    """

    def __init__(
        self, plan: Plan, refs, *, k_smem, v_smem, late_smem, q_smem, o_smem, start_smem,
        delta_smem, mail, k_full, v_full, late_full, q_full, o_full, twins=None,
    ):  # fmt: skip
        self.plan = plan
        self.k_smem, self.v_smem, self.o_smem = k_smem, v_smem, o_smem
        self.late_smem, self.q_smem = late_smem, q_smem
        self.start_smem, self.delta_smem = start_smem, delta_smem
        self.k_full, self.v_full, self.late_full = k_full, v_full, late_full
        self.q_full, self.o_full = q_full, o_full
        (
            self.weights_sent, self.ds_sent, self.late_free, self.q_free, self.o_free, self.k_free,
            self.v_free,
        ) = with_twins(plan.barriers, twins)  # fmt: skip
        self.walk, refs = Walk.of_refs(plan.tiles, lax.axis_index("block"), refs)
        self.q, self.k, self.v, self.d_out, self.start, self.delta, self.far, *results = refs
        self.dk, self.dv, *self.ds = results
        self.weights_mail = mail
        self.ds_mail = mail.at[pl.ds(0, mail_shape(plan.config.block_q, plan.problem.dtype)[0])]

    def slot_of(self, j):
        """Of step j, and as well of step j - STAGES."""
        return lax.rem(j + STAGES, jnp.int32(STAGES))

    def late_slot_of(self, j):
        return lax.rem(j + (STAGES + 1), jnp.int32(STAGES + 1))


# --- the consumers --------------------------------------------------------------------------------


def _consume(block: _ThreadBlock, role: "type[_Weights | _DLogits]", part: int) -> None:
    plan, config = block.plan, block.plan.config
    plgpu.set_max_registers(config.registers[0], action="increase")
    sizes = plan.keys[part].size, plan.values[part].size, config.block_q
    accumulators = [plgpu.ACC((config.block_kv, columns), jnp.float32) for columns in sizes]
    pl.run_scoped(lambda *refs: role(block, part, *refs).walk_over_tiles(), *accumulators)


class _Consumer:
    """What both do: dK and dV of some columns.

    Attributes:
      keys, values: its columns.
      part: which part these are.
      dk_acc, dv_acc, tile_acc: accumulators; the last one of the products that are its own.
    """

    def __init__(self, block: _ThreadBlock, part: int, dk_acc, dv_acc, tile_acc):
        self.block, self.plan, self.part = block, block.plan, part
        self.keys, self.values = block.plan.keys[part], block.plan.values[part]
        self.dk_acc, self.dv_acc, self.tile_acc = dk_acc, dv_acc, tile_acc

    def load_start(self, slot):
        return load_per_query(self.block.start_smem.at[slot, 0], self.plan.config.block_kv)

    def load_query_words(self, slot):
        return load_words(self.block.start_smem.at[slot, self.plan.words_row])

    def capped_weights(self, logits, slot, key_words):
        """Weights of capped logits: operand of dV, and times the derivative of the cap."""
        words = None
        if self.plan.problem.has_dropout:
            query_words = per_query(self.load_query_words(slot), self.plan.config.block_kv)
            words = spread(key_words, logits.shape), query_words
        return soft_cap.capped_weights(logits, self.load_start(slot), self.plan.problem, words)

    def take_dk(self, *, wait_n):
        """dK from its accumulator; `wait_n` other products stay in flight."""
        return self._take(self.dk_acc, self.plan.dk_factor, wait_n)

    def take_dv(self, *, wait_n):
        return self._take(self.dv_acc, self.plan.dv_factor, wait_n)

    def _take(self, accumulator, scale, wait_n):
        gradient = plgpu.wgmma_accumulator_load(accumulator, wait_n=wait_n) * scale
        return gradient.astype(self.plan.problem.dtype)

    def leave_dk(self, staging, gradient) -> None:
        """Leaves dK for the producer to send, and the accumulator empty."""
        self._leave(self.keys, staging, gradient, self.dk_acc)

    def leave_dv(self, staging, gradient) -> None:
        self._leave(self.values, staging, gradient, self.dv_acc)

    def _leave(self, columns: Columns, staging, gradient, accumulator) -> None:
        for n, tile_columns in enumerate(columns.tile_slices):
            store_operand(staging.at[n], gradient[:, tile_columns], columns.box_width)
        fence_async_shared()  # also for K's right part, which was read before it is overwritten
        accumulator[...] = zero_tile(self.plan.config.block_kv, columns.size)

    def d_out(self, slot):
        """Its columns of a slot of dO."""
        return self.plan.values.at(self.block.o_smem, self.part, slot)


class _Weights(_Consumer):
    """Logits, the weights, which it sends, and the left columns of the gradients."""

    def walk_over_tiles(self) -> None:
        block, zero = self.block, jnp.int32(0)
        block.q_free.arrive(block.slot_of(zero - 1))
        j = lax.fori_loop(zero, block.walk.count(), self.whole_tile, zero)
        dv = self.take_dv(wait_n=0)
        self.issue_late_dk(j)
        self.hand_over_dv(j, dv)
        self.hand_over_dk(j, wait_n=0)

    def whole_tile(self, index, j):
        block, plan, walk = self.block, self.plan, self.block.walk
        plgpu.barrier_wait(block.k_full)
        k_right, right = plan.keys.resident(block.k_smem, _RIGHT), plan.keys.right
        if not plan.problem.has_elements:
            k_right = [
                load_operand(k_right.at[n], right.tile_width, plan.problem.dtype, right.box_width)
                for n in range(right.tiles)
            ]
        key_words, end = walk.key_words(index, 0), j + walk.steps(index)
        step = functools.partial(self.step, k_right=k_right, key_words=key_words, end=end)
        first_step = functools.partial(step, is_first=True)
        return walk.loop_over_steps(step, index, j, first_step=first_step)

    def step(self, j, mask, far, load_elements, *, k_right, key_words, end, is_first=False):
        """The queries of a step.

        Args:
          mask: of the step, None without.
          far: whether rows may be far from 0.
          load_elements: of a step, gives mask and bias.
          k_right: the right columns of K.
          key_words: of dropout.
          end: the step after the tile's last.
          is_first: of its tile; then the gradients of the tile before leave.
        """
        block, plan = self.block, self.plan
        slot = block.slot_of(j) + fresh_zero()  # made anew each step: registers are short
        if is_first:
            dv = self.take_dv(wait_n=0)
        else:
            block.o_free.arrive(block.slot_of(j - 1))
        self.issue_logits(j, slot, k_right)
        self.issue_late_dk(j)
        if is_first:
            self.hand_over_dv(j, dv)
        loaded = load_elements(j)
        logits = plgpu.wgmma_accumulator_load(self.tile_acc, wait_n=self.keys.tiles)
        block.k_free.arrive(0, when=j + 1 == end)
        equal_ids = lambda: mask.equal_ids(j) if mask is not None else None
        if plan.problem.has_cap:
            logits, _ = soft_cap.capped(logits, loaded, plan.problem, branches=False)
            logits = masked(logits, mask, j, equal_ids(), loaded, soft_cap.UNSEEN)
            send_tile(block.weights_mail, logits)
            operand, _ = self.capped_weights(logits, slot, key_words)
        else:
            weights = self.weights_of(logits, loaded, slot, far=far)
            weights = masked(weights, mask, j, equal_ids(), loaded)
            if plan.problem.has_dropout:  # negative where they are dropped
                words = self.load_query_words(slot)
                weights = negated_transposed(weights, key_words, words, plan.problem)
            send_tile(block.weights_mail, weights)
        block.weights_sent.arrive(0)
        plgpu.barrier_wait(block.o_full.at[slot])
        d_out = self.d_out(slot)
        if not plan.problem.has_cap:
            operand = as_operand(weights, plan.problem)
        self.values.expand(self.dv_acc, operand, d_out)
        fence_async_shared()  # TMA will overwrite the row statistics that were read
        block.q_free.arrive(slot)
        if is_first:
            self.hand_over_dk(j, wait_n=self.values.tiles)
        else:
            plgpu.wgmma_wait(self.values.tiles)
            block.late_free.arrive(block.late_slot_of(j - 1))
        plgpu.wgmma_wait(0)

    def issue_logits(self, j, slot, k_right) -> None:
        block, plan, config = self.block, self.plan, self.plan.config
        plgpu.barrier_wait(block.q_full.at[slot])
        # What a cap is for must come alone.
        self.tile_acc[...] = (
            zero_tile(config.block_kv, config.block_q)
            if plan.problem.has_cap
            else self.load_start(slot)
        )
        plan.keys.right.contract(self.tile_acc, k_right, block.q_smem.at[slot])
        plgpu.barrier_wait(block.late_full.at[block.late_slot_of(j)])
        k_left = plan.keys.resident(block.k_smem, _LEFT)
        plan.keys.left.contract(self.tile_acc, k_left, block.late_smem.at[block.late_slot_of(j)])

    def weights_of(self, logits, loaded, slot, *, far):
        block, problem = self.block, self.plan.problem
        if far and problem.has_marks:
            start = block.start_smem.at[slot, 0]
            weights = weights_by_key(logits, loaded, problem, start, block.far)
        else:
            logits, to_log2 = biased(logits, problem, loaded)
            weights = jnp.exp2(logits * to_log2)
        if far and problem.has_shares:
            weights = shared_by_key(weights, block.start_smem.at[slot], problem)
        return weights

    def issue_late_dk(self, j) -> None:
        """dK of the step before j."""
        block, plan = self.block, self.plan
        block.ds_sent.wait(0)
        ds = receive_tile(block.ds_mail, plan.config.block_q, plan.problem.dtype)
        self.keys.expand(self.dk_acc, ds, block.late_smem.at[block.late_slot_of(j - 1)])

    def hand_over_dv(self, j, dv) -> None:
        """Once the other's dS' has come: by then it has read that slot of dO."""
        slot_of = self.block.slot_of
        self.leave_dv(self.d_out(slot_of(j - 1)), dv)
        self.block.o_free.arrive(slot_of(j - 1))

    def hand_over_dk(self, j, *, wait_n) -> None:
        block = self.block
        dk = self.take_dk(wait_n=wait_n)
        commit_smem(anew=self.plan.crowded)  # all warps have read Q
        self.leave_dk(block.late_smem.at[block.late_slot_of(j - 1)], dk)
        block.late_free.arrive(block.late_slot_of(j - 1))


class _DLogits(_Consumer):
    """Gradients of logits, which it sends, and the right columns of the gradients."""

    def walk_over_tiles(self) -> None:
        block, zero = self.block, jnp.int32(0)
        block.ds_sent.arrive(0)
        j = lax.fori_loop(zero, block.walk.count(), self.whole_tile, zero)
        self.hand_over(j, *self.take_gradients())

    def whole_tile(self, index, j):
        block, plan, walk = self.block, self.plan, self.block.walk
        end = j + walk.steps(index)
        plgpu.barrier_wait(block.v_full)
        key_words = walk.key_words(index, 0) if plan.problem.has_cap else None
        to_stored = self.first_stored(index) - j if plan.stored_heads else None
        step = functools.partial(self.step, key_words=key_words, end=end, to_stored=to_stored)
        step(j, is_first=True)
        pl.loop(j + 1, end)(step)
        return end

    def first_stored(self, index):
        """Where dS' of a tile's first step goes."""
        walk = self.block.walk
        place = _, kv_head_of_all = walk.locate(index)
        own_head = lax.rem(kv_head_of_all, jnp.int32(self.plan.stored_heads))
        return own_head * self.plan.tiles.steps_per_head + walk.first_step(place)

    def step(self, j, *, key_words, end, to_stored, is_first=False) -> None:
        """The queries of a step; see `_Weights.step`.

        Args:
          to_stored: from a step's number to where its dS' goes.
        """
        block, plan, config = self.block, self.plan, self.plan.config
        slot = block.slot_of(j) + fresh_zero()
        if is_first:
            gradients = self.take_gradients()
        else:
            self.free(j - 1)
        self.issue_d_weights(slot)
        if is_first:
            self.hand_over(j, *gradients)
        block.weights_sent.wait(0)
        weights = receive_tile(block.weights_mail, config.block_q, jnp.float32)
        d_out = self.d_out(slot)
        if plan.problem.has_cap:
            plgpu.barrier_wait(block.q_full.at[slot])  # for the start of its logits
            operand, weights = self.capped_weights(weights, slot, key_words)
        else:
            operand = as_operand(weights, plan.problem)
        self.values.expand(self.dv_acc, operand, d_out)
        d_weights = plgpu.wgmma_accumulator_load(self.tile_acc, wait_n=self.values.tiles)
        block.v_free.arrive(0, when=j + 1 == end)
        minus_delta = load_per_query(block.delta_smem.at[slot], config.block_kv)
        ds = d_logits(weights, d_weights, minus_delta, plan.problem).astype(plan.problem.dtype)
        send_tile(block.ds_mail, ds)
        block.ds_sent.arrive(0)
        for ds_ref in block.ds:
            store_by_quads(ds_ref.at[j + to_stored], ds)
        if not plan.problem.has_cap:
            plgpu.barrier_wait(block.q_full.at[slot])
        self.keys.expand(self.dk_acc, ds, block.q_smem.at[slot])
        fence_async_shared()  # as above
        plgpu.wgmma_wait(0)

    def issue_d_weights(self, slot) -> None:
        block, values, config = self.block, self.plan.values, self.plan.config
        plgpu.barrier_wait(block.o_full.at[slot])
        self.tile_acc[...] = zero_tile(config.block_kv, config.block_q)
        for part, columns in enumerate(values):
            v_part = values.resident(block.v_smem, part)
            columns.contract(self.tile_acc, v_part, values.at(block.o_smem, part, slot))

    def take_gradients(self):
        return self.take_dk(wait_n=0), self.take_dv(wait_n=None)

    def hand_over(self, j, dk, dv) -> None:
        """The gradients of the tile that ended with the step before j."""
        block = self.block
        commit_smem(anew=self.plan.crowded)  # all warps have read Q and dO
        self.leave_dk(block.q_smem.at[block.slot_of(j - 1)], dk)
        self.leave_dv(self.d_out(block.slot_of(j - 1)), dv)
        self.free(j - 1)

    def free(self, j) -> None:
        self.block.o_free.arrive(self.block.slot_of(j))
        self.block.q_free.arrive(self.block.slot_of(j))


# --- the producer ---------------------------------------------------------------------------------


def _produce(block: _ThreadBlock) -> None:
    plgpu.set_max_registers(block.plan.config.registers[1], action="decrease")
    _Producer(block).walk_over_tiles()


class _Producer:
    """Loads what each step needs, and sends what consumers leave in the slots."""

    def __init__(self, block: _ThreadBlock):
        self.block, self.plan = block, block.plan

    def walk_over_tiles(self) -> None:
        walk, zero = self.block.walk, jnp.int32(0)
        near = zero, zero
        self.load_key(zero)
        for slot in range(STAGES - 1):
            self.load_query(slot, *self.queries_of(*near))
            self.load_late(slot, *self.queries_of(*near))
            if slot == 0:
                self.load_value(zero)
            self.load_d_out(slot, *self.queries_of(*near))
            near = walk.advance(*near)
        self.load_late(STAGES - 1, *self.queries_of(*near))
        carry = lax.fori_loop(zero, walk.count(), self.whole_tile, (zero, *near))
        self.loads_of_step(carry[0], walk.count(), zero, carry[1:])
        plgpu.wait_smem_to_gmem(0)

    def whole_tile(self, index, carry):
        def one_step(t, carry):
            j, *near = carry
            return j + 1, *self.loads_of_step(j, index, t, near)

        return lax.fori_loop(jnp.int32(0), self.block.walk.steps(index), one_step, carry)

    def loads_of_step(self, j, index, t, near):
        """Refills the slots of the step before j, which is step t of a tile.

        The consumers free them in step j, after they have begun its first products, for which Q and
        dO must be there by then.

        Args:
          near: tile and number in it of the step that the slots of Q and dO are for.

        Returns:
          The step after that, which the slot of Q's left columns is for.
        """
        block, plan, walk = self.block, self.plan, self.block.walk
        slot, late_slot = block.slot_of(j - 1), block.late_slot_of(j - 1)
        is_last = (index < walk.count()) & (t + 1 == walk.steps(index))
        gradients_left = (index > 0) & (t == 0)

        near_queries = self.queries_of(*near)
        block.q_free.wait(slot)
        block.o_free.wait(slot)
        pl.when(gradients_left)(
            lambda: self.send(
                index - 1,
                (plan.keys.right, block.q_smem.at[slot], block.dk),
                *(
                    (columns, plan.values.at(block.o_smem, n, slot), block.dv)
                    for n, columns in enumerate(plan.values)
                ),
            )
        )
        self.load_query(slot, *near_queries)
        self.load_d_out(slot, *near_queries)

        @pl.when(is_last)
        def _():
            block.k_free.wait(0)
            self.load_key(index + 1)

        following = walk.advance(*near)
        following_queries = self.queries_of(*following)
        block.late_free.wait(late_slot)
        late = plan.keys.left, block.late_smem.at[late_slot], block.dk
        pl.when(gradients_left)(lambda: self.send(index - 1, late))
        self.load_late(late_slot, *following_queries)

        @pl.when(is_last)
        def _():
            block.v_free.wait(0)
            self.load_value(index + 1)

        return following

    def when_there_is(self, index) -> Callable:
        return pl.when(index < self.block.walk.count())

    def keys_of(self, index):
        """Batch entry, keys and key head of a tile."""
        block_kv = self.plan.config.block_kv
        tile, kv_head_of_all = self.block.walk.locate(index)
        batch, kv_head = div_rem(kv_head_of_all, self.plan.problem.kv_heads)
        return batch, pl.ds(tile * block_kv, block_kv), kv_head

    def queries_of(self, index, t):
        """Index of a tile; batch entry, rows and query head of its step t."""
        walk, problem, block_q = self.block.walk, self.plan.problem, self.plan.config.block_q
        place = _, kv_head_of_all = walk.locate(index)
        query_block, member = walk.step_of(place, t)
        batch, kv_head = div_rem(kv_head_of_all, problem.kv_heads)
        rows = pl.ds(query_block * block_q, block_q)
        return index, batch, rows, kv_head * problem.group + member

    def load_key(self, index) -> None:
        block = self.block
        self.load_keys(index, block.k, block.k_smem, self.plan.keys, block.k_full)

    def load_value(self, index) -> None:
        block = self.block
        self.load_keys(index, block.v, block.v_smem, self.plan.values, block.v_full)

    def load_keys(self, index, ref, buffer, parts: Parts, full) -> None:
        @self.when_there_is(index)
        def _():
            for n, columns in enumerate(parts):
                columns.load(ref.at[*self.keys_of(index)], parts.at(buffer, n), full)

    def load_late(self, slot, index, batch, rows, head) -> None:
        block = self.block

        @self.when_there_is(index)
        def _():
            source = block.q.at[batch, rows, head]
            self.plan.keys.left.load(source, block.late_smem.at[slot], block.late_full.at[slot])

    def load_query(self, slot, index, batch, rows, head) -> None:
        block, plan = self.block, self.plan

        @self.when_there_is(index)
        def _():
            source, full = block.q.at[batch, rows, head], block.q_full.at[slot]
            plan.keys.right.load(source, block.q_smem.at[slot], full)
            row_source = block.start.at[batch, head, pl.ds(0, plan.together), rows]
            plgpu.copy_gmem_to_smem(row_source, block.start_smem.at[slot], full)

    def load_d_out(self, slot, index, batch, rows, head) -> None:
        block, values = self.block, self.plan.values

        @self.when_there_is(index)
        def _():
            full = block.o_full.at[slot]
            for n, columns in enumerate(values):
                source = block.d_out.at[batch, rows, head]
                columns.load(source, values.at(block.o_smem, n, slot), full)
            row_source = block.delta.at[batch, head, rows]
            plgpu.copy_gmem_to_smem(row_source, block.delta_smem.at[slot], full)

    def send(self, index, *copies: tuple[Columns, Any, Any]) -> None:
        """From (columns, shared memory, gradient); done reading on return."""
        for columns, source, ref in copies:
            columns.store(source, ref.at[*self.keys_of(index)])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
