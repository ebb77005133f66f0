"""The products of a consumer of the forward: logits, the output, and where that is stored."""

import functools

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.bit_words import WORD
from pallas_kernels.config import ROWS
from pallas_kernels.element_arrays import compressed
from pallas_kernels.forward_block import ThreadBlock
from pallas_kernels.forward_plan import BIAS_BOX
from pallas_kernels.forward_rows import Rows
from pallas_kernels.key_masks import ALL_COUNT
from pallas_kernels.on_rows import entry_of
from pallas_kernels.online_softmax import spread
from pallas_kernels.ptx.barriers import fence_async_shared
from pallas_kernels.ptx.compiler import fresh_zero
from pallas_kernels.ptx.mlir import zero_tile
from pallas_kernels.ptx.operands import load_operand
from pallas_kernels.ptx.stores import store_tile

_PER_KEY = plgpu.Layout.WGMMA.reduce(0)


class Products:
    """Those of 64 rows of any tile, and what arrives for them.

    Attributes:
      rows: of this warpgroup.
      o_acc, s_acc: accumulators of the output and of logits.
    """

    def __init__(self, block: ThreadBlock, rows: Rows, o_acc, s_acc):
        self.block, self.plan, self.rows = block, block.plan, rows
        self.o_acc, self.s_acc = o_acc, s_acc

    def put_bias(self, slot, *, exact: bool = True) -> None:
        """Tiles of a bias where the product is added to them, outside of the turn."""
        block, problem, dtype = self.block, self.plan.problem, self.plan.bias_dtype
        if not self.plan.bias_boxes:
            return
        boxes = [block.bias_smem.at[slot, block.warpgroup, n] for n in range(self.plan.bias_boxes)]
        parts = [load_operand(box, BIAS_BOX, dtype) for box in boxes]
        bias = jnp.concatenate(parts, axis=1).astype(jnp.float32)
        if exact and problem.unbounded and dtype != jnp.float16:
            bias = compressed(bias, problem)
        self.s_acc[...] = bias * (1.0 / problem.scale)
        fence_async_shared()  # TMA will overwrite the bias that was read

    def issue_logits(self, buffer, slot) -> None:
        block, block_kv = self.block, self.plan.config.block_kv
        if self.plan.has_bias_of_keys:
            bias = plgpu.load(block.bias_smem.at[slot], layout=_PER_KEY)
            self.s_acc[...] = lax.broadcast_in_dim(bias, (ROWS, block_kv), [1])
            fence_async_shared()  # TMA will overwrite the bias that was read
        elif not self.plan.bias_boxes:
            self.s_acc[...] = zero_tile(ROWS, block_kv)
        (queries,), (keys,) = block.queries.at(buffer, block.warpgroup), block.keys.at(slot)
        self.plan.key_columns.contract(self.s_acc, queries, keys)

    def load_logits(self):
        """While the output product that was issued behind them goes on, if any may."""
        waits = self.rows.elements_late or self.plan.config.products_first
        open_products = 0 if waits else self.plan.value_columns.products
        return plgpu.wgmma_accumulator_load(self.s_acc, wait_n=open_products)

    def issue_output(self, weights, slot) -> None:
        if not self.plan.own_values:
            self.block.values.await_full(slot)
        self.plan.value_columns.expand(self.o_acc, weights, *self.block.values.at(slot))

    def load_output(self):
        return plgpu.wgmma_accumulator_load(self.o_acc, wait_n=0)

    def await_first_value(self, slot) -> None:
        """V of a tile's first key block."""
        if self.plan.own_values:
            self.block.values.await_full(slot)

    def blank_steps(self, tile, steps, first, end):
        """The steps without a mask of a tile in which the warpgroup has no rows; returns their end.

        It gives back what it gets, and its turn.
        """
        block, plan = self.block, self.plan
        is_blank = self.rows.first(tile) >= plan.problem.query_length
        end = jnp.where(is_blank, end, first)

        @pl.loop(first, end)
        def _(j):
            k_slot, v_slot = block.keys.slot(steps + j), block.values.slot(steps + j - 1)
            block.keys.await_full(k_slot)
            if not plan.own_values:
                block.values.await_full(v_slot)
            block.turns.take()
            block.turns.pass_on()
            block.keys.give_back(k_slot)
            block.values.give_back(v_slot)
            if plan.own_values:
                block.values.await_full(k_slot)

        return end

    def zero_unseen_values(self, slot, place, key_block) -> None:
        """Rows of V that no query of a tile sees: 0 times what they hold may be NaN."""
        tile, batch, head = place
        if self.plan.problem.has_dense_lists:
            self._zero_marked_values(slot, batch, head, key_block)
        elif self.plan.problem.has_key_mask:
            self._zero_masked_values(slot, batch, key_block)
        else:
            self._zero_values_out_of_reach(slot, tile, batch, key_block)

    def _zero_marked_values(self, slot, batch, head, key_block) -> None:
        """Those that no query of the head sees."""
        block, plan = self.block, self.plan
        seen, has_unseen = block.of_unseen
        entry = entry_of(seen, batch + fresh_zero(), plan.problem)  # registers are short
        head = 0 if seen.shape[1] == 1 else head
        count = plan.config.block_kv // WORD

        @pl.when(has_unseen[entry, head, key_block] > 0)
        def _():
            words = seen.at[entry, head, pl.ds(key_block * count, count)]
            (values,), box_width = block.values.at(slot), plan.value_columns.box_width
            block.unseen_values.keep_marked_rows(values, words, block.warpgroup, box_width)

    def _zero_masked_values(self, slot, batch, key_block) -> None:
        """Those that a mask of keys hides."""
        block, count, batch = self.block, self.plan.config.block_kv // WORD, batch + fresh_zero()
        key_words, first = block.key_words, key_block * count
        assert key_words is not None
        words = (key_words[batch, first + n] for n in range(count))
        is_cut = functools.reduce(jnp.bitwise_and, words) != ALL_COUNT

        @pl.when(is_cut)
        def _():
            words = key_words.at[batch, pl.ds(first, count)]
            (values,), box_width = block.values.at(slot), self.plan.value_columns.box_width
            block.unseen_values.keep_marked_rows(values, words, block.warpgroup, box_width)

    def _zero_values_out_of_reach(self, slot, tile, batch, key_block) -> None:
        block, block_kv = self.block, self.plan.config.block_kv
        key_length = self.plan.problem.key_length
        # Addresses are made anew: registers are short.
        if block.lengths is not None:
            first, end = jnp.int32(0), block.lengths[batch + fresh_zero()]
        else:
            first, end = (ref[batch + fresh_zero(), tile] for ref in block.reach)
        first_key = key_block * block_kv
        is_cut = (first_key < first) | (first_key + block_kv > end)
        if key_length % block_kv:  # zeros stand behind the last key
            is_cut &= (first_key < first) | (end < key_length)

        @pl.when(is_cut)
        def _():
            rows = first - first_key, end - first_key
            (values,), box_width = block.values.at(slot), self.plan.value_columns.box_width
            block.unseen_values.keep_rows(values, *rows, block.warpgroup, box_width)

    def store_output(self, output, inverse, index, tile, batch, head) -> None:
        """Divides by the row sums and sends output to global memory."""
        block, plan = self.block, self.plan
        staging = block.staging(index)
        factor = spread(inverse, output.shape)
        output *= factor
        if plan.closes_rows:
            output = jnp.where(factor < 0.0, 0.0, output)
        self.o_acc[...] = zero_tile(ROWS, plan.value_columns.size)
        if plan.tiles.are_shared:
            store_tile(block.o.at[batch, self.rows.stored(tile), head], output)
            return
        for columns in plan.staged_columns:
            if columns.first > 0:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            part = output[:, columns.first : columns.first + columns.size]
            columns.put(staging, part.astype(plan.problem.dtype), anew=plan.registers_are_scarce)
            plgpu.commit_smem()
            columns.store(staging, block.o.at[batch, self.rows.stored(tile), head])
