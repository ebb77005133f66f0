"""Consumers of `backward_key.py`: one makes the weights, the other gradients of logits."""

import functools

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import soft_cap
from pallas_kernels.backward_key_block import ThreadBlock
from pallas_kernels.columns import Columns
from pallas_kernels.dropout import as_operand, d_logits, negated_transposed
from pallas_kernels.elements import biased
from pallas_kernels.far_rows import shared_by_key, weights_by_key
from pallas_kernels.key_tiles_loops import loop_over_steps
from pallas_kernels.key_tiles_masks import masked
from pallas_kernels.online_softmax import spread
from pallas_kernels.ptx.barriers import commit_smem, fence_async_shared
from pallas_kernels.ptx.compiler import fresh_zero
from pallas_kernels.ptx.mail import receive_tile, send_tile
from pallas_kernels.ptx.mlir import zero_tile
from pallas_kernels.ptx.operands import load_operand, store_operand
from pallas_kernels.ptx.stores import store_by_quads, store_tile
from pallas_kernels.transposed import load_per_query, load_words, per_query

LEFT, RIGHT = range(2)


def consume(block: ThreadBlock, role: "type[Weights | DLogits]", part: int) -> None:
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

    def __init__(self, block: ThreadBlock, part: int, dk_acc, dv_acc, tile_acc):
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

    def take_dk(self, index, *, wait_n):
        """dK of the tile before, from its accumulator; `wait_n` other products stay in flight.

        That of a share, which is in float32, is stored at once: there are no registers to keep it.
        """
        dk = self._scaled(self.dk_acc, self.plan.problem.gradient_factor, wait_n)
        return self._taken(index, self.keys, dk, self.block.dk)

    def take_dv(self, index, *, wait_n):
        dv = self._scaled(self.dv_acc, self.plan.dv_factor, wait_n)
        return self._taken(index, self.values, dv, self.block.dv)

    def _scaled(self, accumulator, scale, wait_n):
        return plgpu.wgmma_accumulator_load(accumulator, wait_n=wait_n) * scale

    def _taken(self, index, columns: Columns, gradient, ref):
        if not self.plan.tiles.are_shared:
            return gradient.astype(self.plan.problem.dtype)
        block_kv = self.plan.config.block_kv
        # The first tile has none before it: what it stores is in its own place, till that is known.
        place = self.block.walk.locate(jnp.maximum(index - 1, 0))
        batch, tile, share = self.plan.tiles.share_of(place)
        rows, own = pl.ds(tile * block_kv, block_kv), pl.ds(columns.first, columns.size)
        store_tile(ref.at[batch, rows, share, own], gradient)
        return None

    def leave_dk(self, staging, gradient) -> None:
        """Leaves dK for the producer to send, and the accumulator empty."""
        self._leave(self.keys, staging, gradient, self.dk_acc)

    def leave_dv(self, staging, gradient) -> None:
        self._leave(self.values, staging, gradient, self.dv_acc)

    def _leave(self, columns: Columns, staging, gradient, accumulator) -> None:
        if gradient is not None:
            for n, tile_columns in enumerate(columns.tile_slices):
                store_operand(staging.at[n], gradient[:, tile_columns], columns.box_width)
        fence_async_shared()  # also for K's right part, which was read before it is overwritten
        accumulator[...] = zero_tile(self.plan.config.block_kv, columns.size)

    def d_out(self, slot):
        """Its columns of a slot of dO."""
        return self.plan.values.at(self.block.d_outs.slots, self.part, slot)


class Weights(_Consumer):
    """Logits, the weights, which it sends, and the left columns of the gradients."""

    def walk_over_tiles(self) -> None:
        block, zero = self.block, jnp.int32(0)
        block.queries.give_back(block.slot_of(zero - 1))
        j = lax.fori_loop(zero, block.walk.count(), self.whole_tile, zero)
        dv = self.take_dv(block.walk.count(), wait_n=0)
        self.issue_late_dk(j)
        self.hand_over_dv(j, dv)
        self.hand_over_dk(block.walk.count(), j, wait_n=0)

    def whole_tile(self, index, j):
        block, plan, walk = self.block, self.plan, self.block.walk
        plgpu.barrier_wait(block.k_full)
        k_right, right = plan.keys.resident(block.k_smem, RIGHT), plan.keys.right
        if not plan.problem.has_elements:
            k_right = [
                load_operand(k_right.at[n], right.tile_width, plan.problem.dtype, right.box_width)
                for n in range(right.tiles)
            ]
        key_words, end = walk.key_words(index, 0), j + walk.steps(index)
        step = functools.partial(
            self.step, index=index, k_right=k_right, key_words=key_words, end=end
        )
        first_step = functools.partial(step, is_first=True)
        return loop_over_steps(walk, step, index, j, first_step=first_step)

    def step(self, j, mask, far, load_elements, *, index, k_right, key_words, end, is_first=False):
        """The queries of a step.

        Args:
          mask: of the step, None without.
          far: whether rows may be far from 0.
          load_elements: of a step, gives mask and bias.
          index: of the tile.
          k_right: the right columns of K.
          key_words: of dropout.
          end: the step after the tile's last.
          is_first: of its tile; then the gradients of the tile before leave.
        """
        block, plan = self.block, self.plan
        slot = block.slot_of(j) + fresh_zero()  # made anew each step: registers are short
        if is_first:
            dv = self.take_dv(index, wait_n=0)
        else:
            block.d_outs.give_back(block.slot_of(j - 1))
        self.issue_logits(j, slot, k_right)
        self.issue_late_dk(j)
        if is_first:
            self.hand_over_dv(j, dv)
        loaded = load_elements(j)
        logits = plgpu.wgmma_accumulator_load(self.tile_acc, wait_n=self.keys.products)
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
        block.d_outs.await_full(slot)
        d_out = self.d_out(slot)
        if not plan.problem.has_cap:
            operand = as_operand(weights, plan.problem)
        self.values.expand(self.dv_acc, operand, d_out)
        fence_async_shared()  # TMA will overwrite the row statistics that were read
        block.queries.give_back(slot)
        if is_first:
            self.hand_over_dk(index, j, wait_n=self.values.products)
        else:
            plgpu.wgmma_wait(self.values.products)
            block.late.give_back(block.late_slot_of(j - 1))
        plgpu.wgmma_wait(0)

    def issue_logits(self, j, slot, k_right) -> None:
        block, plan, config = self.block, self.plan, self.plan.config
        block.queries.await_full(slot)
        # What a cap is for must come alone.
        self.tile_acc[...] = (
            zero_tile(config.block_kv, config.block_q)
            if plan.problem.has_cap
            else self.load_start(slot)
        )
        plan.keys.right.contract(self.tile_acc, k_right, *block.queries.at(slot))
        block.late.await_full(block.late_slot_of(j))
        k_left = plan.keys.resident(block.k_smem, LEFT)
        plan.keys.left.contract(self.tile_acc, k_left, *block.late.at(block.late_slot_of(j)))

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
        self.keys.expand(self.dk_acc, ds, *block.late.at(block.late_slot_of(j - 1)))

    def hand_over_dv(self, j, dv) -> None:
        """Once the other's dS' has come: by then it has read that slot of dO."""
        slot_of = self.block.slot_of
        self.leave_dv(self.d_out(slot_of(j - 1)), dv)
        self.block.d_outs.give_back(slot_of(j - 1))

    def hand_over_dk(self, index, j, *, wait_n) -> None:
        block = self.block
        dk = self.take_dk(index, wait_n=wait_n)
        commit_smem(anew=self.plan.crowded)  # all warps have read Q
        (staging,) = block.late.at(block.late_slot_of(j - 1))
        self.leave_dk(staging, dk)
        block.late.give_back(block.late_slot_of(j - 1))


class DLogits(_Consumer):
    """Gradients of logits, which it sends, and the right columns of the gradients."""

    def walk_over_tiles(self) -> None:
        block, zero = self.block, jnp.int32(0)
        block.ds_sent.arrive(0)
        j = lax.fori_loop(zero, block.walk.count(), self.whole_tile, zero)
        self.hand_over(j, *self.take_gradients(block.walk.count()))

    def whole_tile(self, index, j):
        block, plan, walk = self.block, self.plan, self.block.walk
        end = j + walk.steps(index)
        plgpu.barrier_wait(block.v_full)
        key_words = walk.key_words(index, 0) if plan.problem.has_cap else None
        to_stored = self.first_stored(index) - j if plan.stored_heads else None
        step = functools.partial(
            self.step, index=index, key_words=key_words, end=end, to_stored=to_stored
        )
        step(j, is_first=True)
        pl.loop(j + 1, end)(step)
        return end

    def first_stored(self, index):
        """Where dS' of a tile's first step goes."""
        walk = self.block.walk
        place = _, kv_head_of_all = walk.locate(index)
        own_head = lax.rem(kv_head_of_all, jnp.int32(self.plan.stored_heads))
        return own_head * self.plan.tiles.steps_per_head + walk.first_step(place)

    def step(self, j, *, index, key_words, end, to_stored, is_first=False) -> None:
        """The queries of a step; see `Weights.step`.

        Args:
          to_stored: from a step's number to where its dS' goes.
        """
        block, plan, config = self.block, self.plan, self.plan.config
        slot = block.slot_of(j) + fresh_zero()
        if is_first:
            gradients = self.take_gradients(index)
        else:
            self.free(j - 1)
        self.issue_d_weights(slot)
        if is_first:
            self.hand_over(j, *gradients)
        block.weights_sent.wait(0)
        weights = receive_tile(block.weights_mail, config.block_q, jnp.float32)
        d_out = self.d_out(slot)
        if plan.problem.has_cap:
            block.queries.await_full(slot)  # for the start of its logits
            operand, weights = self.capped_weights(weights, slot, key_words)
        else:
            operand = as_operand(weights, plan.problem)
        self.values.expand(self.dv_acc, operand, d_out)
        d_weights = plgpu.wgmma_accumulator_load(self.tile_acc, wait_n=self.values.products)
        block.v_free.arrive(0, when=j + 1 == end)
        minus_delta = load_per_query(block.delta_smem.at[slot], config.block_kv)
        ds = d_logits(weights, d_weights, minus_delta, plan.problem).astype(plan.problem.dtype)
        send_tile(block.ds_mail, ds)
        block.ds_sent.arrive(0)
        for ds_ref in block.ds:
            store_by_quads(ds_ref.at[j + to_stored], ds)
        if not plan.problem.has_cap:
            block.queries.await_full(slot)
        self.keys.expand(self.dk_acc, ds, *block.queries.at(slot))
        fence_async_shared()  # as above
        plgpu.wgmma_wait(0)

    def issue_d_weights(self, slot) -> None:
        block, values, config = self.block, self.plan.values, self.plan.config
        block.d_outs.await_full(slot)
        self.tile_acc[...] = zero_tile(config.block_kv, config.block_q)
        for part, columns in enumerate(values):
            v_part = values.resident(block.v_smem, part)
            columns.contract(self.tile_acc, v_part, values.at(block.d_outs.slots, part, slot))

    def take_gradients(self, index):
        return self.take_dk(index, wait_n=0), self.take_dv(index, wait_n=None)

    def hand_over(self, j, dk, dv) -> None:
        """The gradients of the tile that ended with the step before j."""
        block = self.block
        commit_smem(anew=self.plan.crowded)  # all warps have read Q and dO
        (staging,) = block.queries.at(block.slot_of(j - 1))
        self.leave_dk(staging, dk)
        self.leave_dv(self.d_out(block.slot_of(j - 1)), dv)
        self.free(j - 1)

    def free(self, j) -> None:
        self.block.d_outs.give_back(self.block.slot_of(j))
        self.block.queries.give_back(self.block.slot_of(j))
