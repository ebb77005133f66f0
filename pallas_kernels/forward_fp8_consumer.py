"""Consumers of the FP8 forward: steps of a tile, and its end under the next one's first logits."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import half_softmax, online_softmax
from pallas_kernels.config import ROWS
from pallas_kernels.forward_fp8_block import ThreadBlock
from pallas_kernels.half_softmax import SUM_LIMIT
from pallas_kernels.online_softmax import RowState, spread
from pallas_kernels.ptx.compiler import code_fence
from pallas_kernels.ptx.float8 import to_float8
from pallas_kernels.ptx.loads import load_rows
from pallas_kernels.ptx.mlir import zero_tile
from pallas_kernels.ptx.stores import store_rows
from pallas_kernels.ptx.votes import any_from

# Logits that are masked at a time, in float32.
_MASKED_COLUMNS = 16


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


def consume(block: ThreadBlock) -> None:
    plan, config = block.plan, block.plan.config
    block.turns.begin()
    pl.run_scoped(
        lambda *accumulators: _Consumer(block, *accumulators).walk(),
        plgpu.ACC((ROWS, plan.value_columns.size), jnp.float32),
        plgpu.ACC((ROWS, config.block_kv), plan.accumulated),
    )


class _Consumer:
    """Attention of 64 rows of each tile.

    Attributes:
      p_acc: accumulator, with `promotes` of the output of one step, else of all.
      s_acc: of logits.
    """

    def __init__(self, block: ThreadBlock, p_acc, s_acc):
        self.block, self.plan = block, block.plan
        self.p_acc, self.s_acc = p_acc, s_acc

    def walk(self) -> None:
        block, zero = self.block, jnp.int32(0)
        if not self.plan.config.promotes:
            self.p_acc[...] = zero_tile(ROWS, self.plan.value_columns.size)
        first = self.start_tile(zero, zero, *block.locate(0))
        block.over_tiles(self.whole_tile, (zero, first))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def first_row(self, tile):
        return self.plan.tiles.first_row(tile, self.block.warpgroup)

    # --- products ---

    def issue_logits(self, buffer, slot) -> None:
        block, plan = self.block, self.plan
        self.s_acc[...] = zero_tile(ROWS, plan.config.block_kv, plan.accumulated)
        (queries,), (keys,) = block.queries.at(buffer, block.warpgroup), block.keys.at(slot)
        plan.key_columns.contract(self.s_acc, queries, keys)

    def load_logits(self, wait_n):
        return plgpu.wgmma_accumulator_load(self.s_acc, wait_n=wait_n).astype(jnp.float16)

    def issue_output(self, weights, slot) -> None:
        block = self.block
        if self.plan.config.promotes:
            self.p_acc[...] = zero_tile(ROWS, self.plan.value_columns.size)
        block.values.await_full(slot)
        (values,) = block.values.at(slot)
        plgpu.wgmma(self.p_acc, weights, values.transpose((1, 0)))

    def end_output(self, carry: _Carry):
        """The output with that of the last step, when its product has ended."""
        product = plgpu.wgmma_accumulator_load(self.p_acc, wait_n=0)
        if not self.plan.config.promotes:
            return product
        (output,) = carry.output
        return output + product

    # --- scales and masks ---

    def load_row_scales(self, tile, batch, head):
        last_row = self.plan.problem.query_length - 1
        return load_rows(self.block.row_scales.at[batch, head], self.first_row(tile), last_row)

    def row_scales_of(self, tile, batch, head) -> Callable[[], jax.Array]:
        """What gives the scales of rows: loads them only then unless they are kept."""
        if not self.plan.config.keeps_row_scales:
            return lambda: self.load_row_scales(tile, batch, head)
        row_scales = self.load_row_scales(tile, batch, head)
        return lambda: row_scales

    def masked(self, logits, first_row, first_key, bounds, ids, *, near=True):
        """Some columns at a time, as all in float32 would not fit."""
        parts = []
        for first in range(0, self.plan.config.block_kv, _MASKED_COLUMNS):
            part = logits[:, first : first + _MASKED_COLUMNS].astype(jnp.float32)
            own_ids = ids and (*ids[:2], ids[2] + first)
            part = self.block.masks.masked(
                part, first_row, first_key + first, bounds, own_ids, near=near
            )
            parts.append(part.astype(jnp.float16))
        return jnp.concatenate(parts, axis=1)

    # --- a tile ---

    def start_tile(self, index, steps, tile, batch, head) -> _Carry:
        """The first key block of a tile, with no other product open."""
        block = self.block
        row_scales = self.load_row_scales(tile, batch, head)

        @pl.when(index < block.tile_count())
        def _():
            block.queries.await_full(block.query_buffer(index))
            block.keys.await_full(block.keys.slot(steps))

        self.issue_logits(block.query_buffer(index), block.keys.slot(steps))
        logits = self.load_logits(wait_n=0)
        pl.when(index < block.tile_count())(lambda: block.keys.give_back(block.keys.slot(steps)))
        return self.begun(*self.first_softmax(logits, tile, batch, head, row_scales))

    def first_softmax(self, logits, tile, batch, head, row_scales):
        """Of a tile's first key block."""
        block = self.block
        key_block = block.key_blocks.end((tile, batch, head)) - 1
        key_scale = block.key_scales[batch, block.kv_head_of(head), key_block]
        factor = row_scales * key_scale
        first_row, first_key = self.first_row(tile), key_block * self.plan.config.block_kv
        bounds = block.masks.load_bounds(batch, first_row)
        ids = block.masks.load_ids(batch, first_row, first_key)
        if self.plan.tiles.any_mask:
            logits = self.masked(logits, first_row, first_key, bounds, ids)
        weights, state = half_softmax.start(logits, factor)
        if bounds is not None:
            state = online_softmax.close(state, seeing=bounds[0] < bounds[1])
        return weights, state

    def begun(self, weights, state) -> _Carry:
        promotes, columns = self.plan.config.promotes, self.plan.value_columns.size
        output = (zero_tile(ROWS, columns),) if promotes else ()
        return _Carry(to_float8(weights), output, state)

    def key_step(self, j, carry, *, steps, index, place, row_scales, end_block, near, far):
        """Logits of step j's key block together with the output of the step before.

        Args:
          steps: before those of the tile.
          place: tile, batch entry and head.
          row_scales: gives them.
          near, far: whether it has a mask at that edge.
        """
        block, config = self.block, self.plan.config
        carry = _Carry(*carry)
        tile, batch, head = place
        key_block = end_block - 1 - j
        first_row, first_key = self.first_row(tile), key_block * config.block_kv
        key_scale = block.key_scales[batch, block.kv_head_of(head), key_block]
        ratio = block.ratios[batch, block.kv_head_of(head), key_block]
        own_scales = row_scales()
        if near or far:
            bounds = block.masks.load_bounds(batch, first_row)
            ids = block.masks.load_ids(batch, first_row, first_key)
        k_slot, v_slot = block.keys.slot(steps + j), block.values.slot(steps + j - 1)
        block.keys.await_full(k_slot)
        block.turns.take()
        self.issue_logits(block.query_buffer(index), k_slot)
        self.issue_output(carry.weights, v_slot)
        if config.products_first:
            logits = self.load_logits(wait_n=0)
            output = self.end_output(carry)
            block.turns.pass_on()
            block.keys.give_back(k_slot)
            block.values.give_back(v_slot)
            code_fence(key_block)
        else:
            block.turns.pass_on()
            logits = self.load_logits(wait_n=1)
            block.keys.give_back(k_slot)
        if near or far:
            logits = self.masked(logits, first_row, first_key, bounds, ids, near=near)
        factor = own_scales * key_scale
        weights, sums, state = half_softmax.go_on(logits, factor, carry.state)
        if not config.products_first:
            # A cast of the weights before the wait makes ptxas serialise every wgmma.
            weights, sums, state = lax.optimization_barrier((weights, sums, state))
            output = self.end_output(carry)
            block.values.give_back(v_slot)
        weights = to_float8(weights)

        def again(output, *_):
            weights, correction, state = half_softmax.renew(logits, factor, sums, carry.state)
            return output * spread(correction, output.shape), to_float8(weights), state

        def mend(output, weights, state):
            """What few steps need, behind one branch."""
            output, weights, state = lax.cond(
                any_too_large, again, lambda *x: x, output, weights, state
            )
            return output * ratio, weights, state

        any_too_large = any_from(SUM_LIMIT, sums)
        output, weights, state = lax.cond(
            any_too_large | (ratio != 1.0), mend, lambda *x: x, output, weights, state
        )
        if config.promotes:
            return _Carry(weights, (output,), state)
        self.p_acc[...] = output
        return _Carry(weights, (), state)

    def whole_tile(self, index, carry):
        """All steps of a tile but the first, which came under the tile before, and its end."""
        block, plan, has_far_edge = self.block, self.plan, self.plan.problem.has_far_edge
        steps, carry = carry
        place, key_blocks = block.locate(index), block.key_blocks
        blocks, needing_mask = key_blocks.count(place), key_blocks.exact(place)
        near_end = jnp.maximum(needing_mask, 1)
        step = functools.partial(
            self.key_step,
            steps=steps,
            index=index,
            place=place,
            row_scales=self.row_scales_of(*place),
            end_block=key_blocks.end(place, blocks),
        )
        if plan.tiles.any_mask:
            masked_step = functools.partial(step, near=True, far=has_far_edge)
            carry = lax.fori_loop(jnp.int32(1), near_end, masked_step, carry)
        else:
            near_end = jnp.int32(1)
        far = blocks
        if has_far_edge:
            far = jnp.maximum(near_end, key_blocks.far(place))
        plain_step = functools.partial(step, near=False, far=False)
        carry = lax.fori_loop(near_end, far, plain_step, carry)
        if has_far_edge:
            far_step = functools.partial(step, near=False, far=True)
            carry = lax.fori_loop(far, blocks, far_step, carry)
        end_tile = self.end_tile_under_next
        if plan.config.query_buffers == 1:
            end_tile = self.end_tile_before_next
        more, carry = end_tile(index, steps + blocks, _Carry(*carry))
        return more, (steps + blocks, carry)

    # --- the end of a tile ---

    def end_tile_under_next(self, index, steps, carry: _Carry):
        """The next tile's first logits run with this tile's last output product."""
        block = self.block
        tile, batch, head = block.locate(index)
        next_tile, next_batch, next_head = block.locate(index + 1)
        buffer = block.query_buffer(index + 1)
        k_slot, v_slot = block.keys.slot(steps), block.values.slot(steps - 1)
        block.queries.give_back(block.query_buffer(index))
        more = index + 1 < block.tile_count()

        # After the last tile the logits are of no tile, and go nowhere.
        @pl.when(more)
        def _():
            block.queries.await_full(buffer)
            block.keys.await_full(k_slot)

        block.turns.take()
        self.issue_logits(buffer, k_slot)
        self.issue_output(carry.weights, v_slot)
        block.turns.pass_on()
        row_scales = self.load_row_scales(next_tile, next_batch, next_head)
        inverse = self.end_rows(carry.state, tile, batch, head)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        logits = self.load_logits(wait_n=1)
        pl.when(more)(lambda: block.keys.give_back(k_slot))
        first = self.first_softmax(logits, next_tile, next_batch, next_head, row_scales)
        first = lax.optimization_barrier(first)
        output = self.end_output(carry)
        block.values.give_back(v_slot)
        begun_next = self.begun(*first)
        self.store_output(output, inverse, tile, batch, head)
        return more, begun_next

    def end_tile_before_next(self, index, steps, carry: _Carry):
        """The next queries arrive where this tile's were while it ends."""
        block = self.block
        tile, batch, head = block.locate(index)
        block.queries.give_back(0)
        inverse = self.end_rows(carry.state, tile, batch, head)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        block.turns.take()
        self.issue_output(carry.weights, block.values.slot(steps - 1))
        block.turns.pass_on()
        output = self.end_output(carry)
        block.values.give_back(block.values.slot(steps - 1))
        self.store_output(output, inverse, tile, batch, head)
        more = index + 1 < block.tile_count()
        return more, self.start_tile(index + 1, steps, *block.locate(index + 1))

    def end_rows(self, state: RowState, tile, batch, head):
        """Stores the LSE; returns what the output is to be multiplied with."""
        block = self.block
        total = state.sums.sum(axis=1)
        inverse, lse, _ = online_softmax.normalised(state.reference, total)
        store_rows(block.lse.at[batch, head, pl.ds(self.first_row(tile), ROWS)], lse)
        place, key_blocks = (tile, batch, head), block.key_blocks
        last_block = key_blocks.end(place) - key_blocks.count(place)
        return inverse * block.value_scales[batch, block.kv_head_of(head), last_block]

    def store_output(self, output, inverse, tile, batch, head) -> None:
        """Divides by the row sums and sends output to global memory."""
        block, plan = self.block, self.plan
        staging = block.o_smem.at[block.warpgroup]
        output *= spread(inverse, output.shape)
        if not plan.config.promotes:
            self.p_acc[...] = zero_tile(ROWS, plan.value_columns.size)
        target = block.o.at[batch, pl.ds(self.first_row(tile), ROWS), head]
        for columns in plan.staged_columns:
            if columns.first > 0:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            values = output[:, columns.first : columns.first + columns.size].astype(plan.out_dtype)
            columns.put(staging, values, anew=plan.registers_are_scarce)
            plgpu.commit_smem()
            columns.store(staging, target)
