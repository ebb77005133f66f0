"""Consumers of the backward: the steps of a tile, and the gradients that they hand over."""

import functools

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import scores
from pallas_kernels.backward_block import ThreadBlock
from pallas_kernels.backward_dq import fragment_of, size_of
from pallas_kernels.backward_plan import BLOCK_KV, KEYS
from pallas_kernels.backward_products import Products
from pallas_kernels.columns import Columns, put_tile
from pallas_kernels.config import DQ_TILE
from pallas_kernels.dropout import as_operand
from pallas_kernels.key_tiles_loops import loop_over_steps
from pallas_kernels.key_tiles_masks import masked
from pallas_kernels.online_softmax import spread
from pallas_kernels.ptx.barriers import fence_async_shared
from pallas_kernels.ptx.compiler import code_fence, fresh_rows, fresh_zero
from pallas_kernels.ptx.fragments import store_fragment
from pallas_kernels.ptx.mlir import zero_tile
from pallas_kernels.ptx.stores import store_tile, store_turned_inside


def consume(block: ThreadBlock, number: int) -> None:
    plan, block_q = block.plan, block.plan.config.block_q
    plgpu.set_max_registers(plan.registers[0], action="increase")
    accumulator = lambda rows, columns: plgpu.ACC((rows, columns), jnp.float32)
    accumulators = [
        accumulator(KEYS, plan.key_columns.size),
        accumulator(KEYS, plan.value_columns.size),
        accumulator(KEYS, block_q),
        accumulator(KEYS, block_q),
    ]
    if plan.with_query_gradient:
        _, dq_columns = block.plan.dq.place(number)
        accumulators.append(accumulator(DQ_TILE, size_of(dq_columns)))
    pl.run_scoped(lambda *refs: _Consumer(block, number, *refs).walk(), *accumulators)


class _Consumer(Products):
    """dK and dV of 64 keys of each tile, and part of its dQ."""

    def walk(self) -> None:
        self.dk_acc[...] = zero_tile(KEYS, self.plan.key_columns.size)
        self.dv_acc[...] = zero_tile(KEYS, self.plan.value_columns.size)
        if self.block.drawn:
            self.block.drawn.wait_for_first()
        self.block.over_tiles(self.whole_tile, jnp.int32(0))

    def whole_tile(self, index, j):
        """A tile of keys. Returns the number of the step after its last."""
        block, plan, walk = self.block, self.plan, self.block.walk
        self.await_keys(index)
        step = self.step_without_dq
        if plan.with_query_gradient:
            step = self.step_after_dq if block.dq_first else self.step_with_dq_or_after
        first_key = KEYS * self.number
        key_words = walk.key_words(index, first_key)
        step = functools.partial(step, index=index, key_words=key_words)
        blank = functools.partial(self.blank_step, index=index) if plan.has_blank_steps else None
        j = loop_over_steps(
            walk, step, index, j, first_key, blank_step=blank, far_in_masked=plan.far_in_masked
        )
        block.v_free.arrive(0)
        parity = lax.rem(j + 1, jnp.int32(2))  # of the last step
        if plan.with_query_gradient:
            self.issue_late_dq(parity, index)
            self.hand_over_dq()
        else:
            block.sent.wait(self.number)
        self.hand_over_gradients(1 - parity, index)
        return j

    # --- steps ---

    def step_with_dq(self, j, mask, far, load_elements, index, key_words) -> None:
        """The queries of a step, under dQ of the step before.

        Args:
          mask: of the step, None without.
          far: whether rows may be far from 0.
          load_elements: of a step, gives mask and bias.
          key_words: of dropout.
        """
        block, plan = self.block, self.plan
        slot, o_slot, parity = self.slots(j)
        equal_ids = None
        if mask is not None and plan.ids_first:
            equal_ids = mask.equal_ids(j)
        self.await_query(slot, mask, j)
        self.issue_logits(slot, index)
        self.issue_late_dq(1 - parity, index)
        if mask is not None and not plan.ids_first:  # while S' is made
            equal_ids = mask.equal_ids(j)
        loaded = load_elements(j)
        products = plgpu.wgmma_accumulator_load(self.s_acc, wait_n=1)
        weights = self.unshared_weights(products, loaded, j, far=far)
        if plan.drops_early:
            weights = self.dropped(weights, key_words, slot)
        if plan.early_weights:
            # A wait here keeps ptxas from computing the weights after dQ.
            self.await_d_out(o_slot, mask, j)
            weights = self.shared(weights, j, far=far)
            self.hand_over_dq()
        else:
            self.hand_over_dq()
            self.await_d_out(o_slot, mask, j)
            weights = self.shared(weights, j, far=far)
        if not plan.drops_early:
            weights = self.dropped(weights, key_words, slot)
        self.issue_d_weights(o_slot)
        weights = masked(weights, mask, j, equal_ids, loaded)
        operand = as_operand(weights, plan.problem)
        plan.value_columns.expand(self.dv_acc, operand, *block.d_outs.at(o_slot))
        ds = self.load_ds(weights, o_slot)
        self.store_d_bias(ds, loaded)
        plan.key_columns.expand(self.dk_acc, ds, *block.queries.at(slot))
        self.hand_over_ds(parity, ds)
        plgpu.wgmma_wait(0)
        block.queries.give_back(slot)

    def step_without_dq(self, j, mask, far, load_elements, index, key_words) -> None:
        """The same, and no product of dQ beside it."""
        block, plan = self.block, self.plan
        slot, o_slot, parity = self.slots(j)
        equal_ids = mask.equal_ids(j) if mask is not None else None
        self.await_query(slot, mask, j)
        self.issue_logits(slot, index)
        loaded = load_elements(j)
        wait_n = 0 if plan.weights_first else plan.value_columns.products
        if not plan.weights_first:
            self.await_d_out(o_slot, mask, j)
            self.issue_d_weights(o_slot)
        tile = scores.Tile(
            loaded,
            weights=functools.partial(self.weights_of, loaded=loaded, j=j, far=far),
            hidden=lambda x, fill: masked(x, mask, j, equal_ids, loaded, fill),
            dropped=lambda weights: self.dropped(weights, key_words, slot),
            minus_lse=lambda: self.load_start(o_slot),
            words=lambda: self.words_of_pairs(key_words, o_slot),
        )
        products = plgpu.wgmma_accumulator_load(self.s_acc, wait_n=wait_n)
        weights = scores.begun(products, tile, plan.problem)
        if plan.weights_first:
            self.await_d_out(o_slot, mask, j)
            self.issue_d_weights(o_slot)
        weights = scores.ended(weights, tile, plan.problem)
        operand = weights.of_values(plan.problem)
        of_logits = weights.of_logits()
        plan.value_columns.expand(self.dv_acc, operand, *block.d_outs.at(o_slot))
        ds = self.load_ds(of_logits, o_slot)
        self.store_d_bias(ds, loaded)
        plan.key_columns.expand(self.dk_acc, ds, *block.queries.at(slot))
        if plan.with_query_gradient:
            self.hand_over_ds(parity, ds)
        else:
            fence_async_shared()  # TMA will overwrite row statistics that were read
        plgpu.wgmma_wait(0)
        block.queries.give_back(slot)

    def step_after_dq(self, j, mask, far, load_elements, index, key_words) -> None:
        """Where registers are short: dQ of the step before is done first."""
        self.issue_late_dq(1 - lax.rem(j, jnp.int32(2)), index)
        self.hand_over_dq()
        self.step_without_dq(j, mask, far, load_elements, index, key_words)

    def step_with_dq_or_after(self, j, mask, far, load_elements, index, key_words) -> None:
        step = self.step_after_dq if far and self.plan.far_after_dq else self.step_with_dq
        step(j, mask, far, load_elements, index, key_words)

    def blank_step(self, j, mask, index) -> None:
        """Of queries that see none of the consumer's keys: it makes its part of dQ."""
        slot, o_slot, parity = self.slots(j)
        self.await_query(slot, mask, j)
        if self.plan.with_query_gradient:
            self.issue_late_dq(1 - parity, index)
        self.await_d_out(o_slot, mask, j)
        if self.plan.with_query_gradient:
            self.hand_over_dq()
            none = zero_tile(KEYS, self.plan.config.block_q).astype(self.plan.problem.dtype)
            self.hand_over_ds(parity, none)
        self.block.queries.give_back(slot)

    # --- what arrives ---

    def keep_rows(self, ref, columns: Columns, first, end) -> None:
        """Zeroes other rows of a tile: 0 times what they hold may be NaN."""
        self.block.unseen_rows.keep_rows(ref, first, end, self.number, columns.box_width)

    def await_keys(self, index) -> None:
        block, plan = self.block, self.plan
        slot = block.k_slot(index)
        plgpu.barrier_wait(block.k_full.at[slot])
        plgpu.barrier_wait(block.v_full)
        operands = (
            (block.k_smem.at[slot], plan.key_columns),
            (block.v_smem.at[0], plan.value_columns),
        )
        if plan.zeroes_keys and not plan.problem.has_key_mask:
            first, end = block.walk.counting_keys(block.walk.locate(index))

            @pl.when((first > 0) | (end < BLOCK_KV))
            def _():
                for ref, columns in operands:
                    self.keep_rows(ref, columns, first, end)

        elif plan.zeroes_keys or plan.problem.has_dense_lists:
            by_bits = block.walk.unmasked_keys if plan.zeroes_keys else block.walk.seen_keys
            words, has_unseen = by_bits(block.walk.locate(index))

            @pl.when(has_unseen)
            def _():
                keep = block.unseen_rows.keep_marked_rows
                for ref, columns in operands:
                    keep(ref, words, self.number, columns.box_width)

    def await_query(self, slot, mask, j) -> None:
        block, plan = self.block, self.plan
        block.queries.await_full(slot)
        if mask is None or not plan.zeroes_queries:
            return
        block.d_outs.await_full(slot)  # while no product is open
        first, end, is_cut = mask.counting_queries(j)

        @pl.when(is_cut)
        def _():
            (query,), (d_out,) = block.queries.at(slot), block.d_outs.at(slot)
            self.keep_rows(query, plan.key_columns, first, end)
            self.keep_rows(d_out, plan.value_columns, first, end)

    def await_d_out(self, slot, mask, j) -> None:
        if mask is None or not self.plan.zeroes_queries:
            self.block.d_outs.await_full(slot)
        else:  # as it has been waited for; the code stays where it is all the same
            code_fence(j)

    # --- what is handed over ---

    def hand_over_dq(self) -> None:
        block, problem = self.block, self.plan.problem
        dq = plgpu.wgmma_accumulator_load(self.dq_acc, wait_n=0)
        block.sent.wait(self.number)
        if self.plan.dq_is_whole:
            dq = (dq * problem.gradient_factor).astype(problem.dtype)
            self.plan.dq.whole_part(self.number).put(block.dq_smem[self.number], dq, anew=True)
        else:
            store_fragment(fragment_of(block.dq_smem.at[self.number], self.dq_columns), dq)
        fence_async_shared()
        block.dq_staged.arrive(self.number)

    def store_d_bias(self, ds, loaded) -> None:
        """dS of a step, if it is a gradient."""
        if self.plan.with_bias_gradient:
            batch, head, first_key, first_query = loaded.place
            target = self.block.d_bias.at[batch, head + fresh_zero()]
            store_turned_inside(target, ds, first_query, first_key)

    def hand_over_ds(self, parity, ds) -> None:
        # Two buffers: the other may still read what was stored one step ago.
        block, plan, box_width = self.block, self.plan, self.plan.key_columns.box_width
        for n, first in enumerate(range(0, plan.config.block_q, DQ_TILE)):
            stored = block.ds_smem.at[parity, n, self.own]
            put_tile(stored, ds[:, first : first + DQ_TILE], box_width, anew=plan.crowded)
        fence_async_shared()
        block.ds_stored.arrive(2 * parity + self.number)

    def hand_over_gradients(self, parity, index) -> None:
        """Stages dK where K was, and dV where dS' was, once the other has read them."""
        block, plan, problem = self.block, self.plan, self.plan.problem
        dk = plgpu.wgmma_accumulator_load(self.dk_acc, wait_n=0) * problem.gradient_factor
        dv = plgpu.wgmma_accumulator_load(self.dv_acc, wait_n=0)
        if plan.zeroes_keys:  # 0 times NaN of a query that counts is none of theirs
            place = block.walk.locate(index)
            if problem.has_key_mask:
                seen = block.walk.unmasked_rows(place, KEYS * self.number)
            else:
                first, end = block.walk.counting_keys(place)
                row = fresh_rows() + KEYS * self.number
                seen = (row >= first) & (row < end)
            dk, dv = (jnp.where(spread(seen, x.shape), x, 0.0) for x in (dk, dv))
        if plan.problem.has_dropout:
            dv *= 1.0 / problem.kept_share
        self.dk_acc[...] = zero_tile(KEYS, plan.key_columns.size)
        self.dv_acc[...] = zero_tile(KEYS, plan.value_columns.size)
        block.ds_stored.arrive(2 * parity + self.number)
        block.ds_stored.wait(2 * parity + (1 - self.number))
        if plan.tiles.all_are_shares:
            self.store_share(index, dk, dv)
            block.gradients_staged.arrive(0)
            return
        if plan.tiles.are_shared:  # what is staged besides, nothing sends
            is_share = block.walk.locate(index)[0] >= plan.tiles.whole_per_head
            pl.when(is_share)(lambda: self.store_share(index, dk, dv))
        dk = dk.astype(problem.dtype)
        k = block.k_smem.at[block.k_slot(index) + fresh_zero(), :, self.own]
        plan.key_columns.put(k, dk, anew=True)  # or addresses are kept over all steps
        for n, columns in enumerate(plan.staged_values):
            d_value = dv[:, columns.first : columns.first + columns.size].astype(problem.dtype)
            staging = block.value_staging(n + fresh_zero(), self.number)
            columns.put(staging, d_value, anew=True)
        fence_async_shared()
        block.gradients_staged.arrive(0)

    def store_share(self, index, dk, dv) -> None:
        """dK and dV of a share, in float32, for a sum over shares."""
        block = self.block
        batch, tile, share = self.plan.tiles.share_of(block.walk.locate(index))
        rows = pl.ds(tile * BLOCK_KV + KEYS * self.number, KEYS)
        for ref, gradient in ((block.dk_shares, dk), (block.dv_shares, dv)):
            store_tile(ref.at[batch, rows, share, pl.ds(0, gradient.shape[1])], gradient)
