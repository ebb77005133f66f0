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
leaves for that goes nowhere. Those of shares (`key_tiles_shares.py`) consumers store themselves, in
float32; what the first step has of none stands where its own tile's will, stored by the same
threads.

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

from pallas_kernels.backward_key_block import ThreadBlock
from pallas_kernels.backward_key_consumer import LEFT, RIGHT, DLogits, Weights, consume
from pallas_kernels.backward_key_plan import CONSUMERS, STAGES, Parts, Plan
from pallas_kernels.columns import Columns
from pallas_kernels.config import BackwardKeyConfig
from pallas_kernels.dropout import Words
from pallas_kernels.element_arrays import NO_ELEMENTS, Elements
from pallas_kernels.interpret import interpreting
from pallas_kernels.key_tiles import Section
from pallas_kernels.key_tiles_kernel import gradient_kernel
from pallas_kernels.problem import Problem
from pallas_kernels.ptx.arithmetic import div_rem


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
      query, d_out: `[B, T, N, H]` and `[B, T, N, h]`. d_out is finite in rows that see no key.
      key, value: `[B, S, K, H]` and `[B, S, K, h]`, finite in rows that no query sees.
      start: of `row_statistics` and `key_tiles_kernel.with_words`, of T up to a multiple of
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
      problem: static description.
      config: registers, thread blocks and shares.
      section: None for all heads, or one of `d_logits_sections`.
      results: none, or refs of what is returned, which the kernel writes to then.

    Returns:
      Gradients in the shapes and dtype of key and value, or of shares, as
      `key_tiles_shares.gradients_of_tiles` has them. With a section other heads are arbitrary, and
      third comes dS' of its heads in the input dtype, of each step of `key_tiles(problem, config)`
      64 keys by 64 queries, in the order of the key heads, their tiles and the steps of these:
      `[section.size * steps, 64, 64]`. Queries are in the order of `ptx.stores.store_by_quads`.
    """
    kernel = _build(problem, config, interpreting(), section.size if section else 0)
    of_elements = elements.operands(transposed=True)
    operands = *of_elements, any_far, query, key, value, d_out, start, minus_delta, far
    kv_heads = section.kv_heads if section else None
    return kernel(intervals, ids, dropout_words, *operands, kv_heads=kv_heads, results=results)


@functools.lru_cache
def _build(
    problem: Problem,
    config: BackwardKeyConfig,
    interpret: bool,
    stored_heads: int,
):
    """The kernel; it stores dS' too, of sections of so many heads, or if 0 does not."""
    plan = Plan(problem, config, stored_heads)

    def attention_backward_key(*refs, **scratch):
        warpgroup = lax.axis_index("warpgroup")
        block = ThreadBlock(plan, refs, **scratch)
        pl.when(warpgroup == 0)(lambda: consume(block, Weights, LEFT))
        pl.when(warpgroup == 1)(lambda: consume(block, DLogits, RIGHT))
        pl.when(warpgroup == CONSUMERS)(lambda: _produce(block))

    more_results: tuple[jax.ShapeDtypeStruct, ...] = ()
    if stored_heads:
        shape = stored_heads * plan.tiles.steps_per_head, config.block_kv, config.block_q
        more_results = (jax.ShapeDtypeStruct(shape, problem.dtype),)
    return gradient_kernel(
        plan.tiles,
        attention_backward_key,
        plan.key_gradients(),
        config.thread_blocks,
        plan.scratch(interpret),
        more_results=more_results,
    )


# --- the producer ---------------------------------------------------------------------------------


def _produce(block: ThreadBlock) -> None:
    plgpu.set_max_registers(block.plan.config.registers[1], action="decrease")
    _Producer(block).walk_over_tiles()


class _Producer:
    """Loads what each step needs, and sends what consumers leave in the slots."""

    def __init__(self, block: ThreadBlock):
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
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

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
        block.queries.free.wait(slot)
        block.d_outs.free.wait(slot)
        pl.when(gradients_left)(
            lambda: self.send(
                index - 1,
                (plan.keys.right, *block.queries.at(slot), block.dk),
                *(
                    (columns, plan.values.at(block.d_outs.slots, n, slot), block.dv)
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
        block.late.free.wait(late_slot)
        late = plan.keys.left, *block.late.at(late_slot), block.dk
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
        batch, tile, kv_head = self.block.walk.keys_of(self.block.walk.locate(index))
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
            block.late.load(slot, block.q.at[batch, rows, head])

    def load_query(self, slot, index, batch, rows, head) -> None:
        block, plan = self.block, self.plan

        @self.when_there_is(index)
        def _():
            block.queries.load(slot, block.q.at[batch, rows, head])
            row_source = block.start.at[batch, head, pl.ds(0, plan.together), rows]
            full = block.queries.full.at[slot]
            plgpu.copy_gmem_to_smem(row_source, block.start_smem.at[slot], full)

    def load_d_out(self, slot, index, batch, rows, head) -> None:
        block, values = self.block, self.plan.values

        @self.when_there_is(index)
        def _():
            full = block.d_outs.full.at[slot]
            for n, columns in enumerate(values):
                source = block.d_out.at[batch, rows, head]
                columns.load(source, values.at(block.d_outs.slots, n, slot), full)
            row_source = block.delta.at[batch, head, rows]
            plgpu.copy_gmem_to_smem(row_source, block.delta_smem.at[slot], full)

    def send(self, index, *copies: tuple[Columns, Any, Any]) -> None:
        """From (columns, shared memory, gradient); done reading on return."""
        if self.plan.tiles.are_shared:  # consumers store them
            return
        for columns, source, ref in copies:
            columns.store(source, ref.at[*self.keys_of(index)])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
