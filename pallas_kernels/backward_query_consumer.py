"""Consumers of `backward_query.py`: the steps of a tile."""

import functools
from collections.abc import Callable

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import scores
from pallas_kernels.backward_query_block import ThreadBlock
from pallas_kernels.backward_query_masks import KeyBlocks, hide, key_blocks
from pallas_kernels.config import ROWS
from pallas_kernels.dropout import d_logits
from pallas_kernels.elements import NOTHING_LOADED
from pallas_kernels.elements import masked as masked_by_element
from pallas_kernels.far_rows import start_and_share_of_marks, weights_by_query
from pallas_kernels.online_softmax import spread
from pallas_kernels.problem import LOG2E
from pallas_kernels.ptx.compiler import fresh_zero
from pallas_kernels.ptx.loads import load_intervals, load_rows
from pallas_kernels.ptx.masks import equal_columns, keep_bits
from pallas_kernels.ptx.mlir import zero_tile
from pallas_kernels.row_masks import PER_ROW


def consume(block: ThreadBlock) -> None:
    plan, block_kv = block.plan, block.plan.config.block_kv
    pl.run_scoped(
        lambda *accumulators: _Consumer(block, *accumulators).run(),
        plgpu.ACC((ROWS, plan.dq_columns.size), jnp.float32),
        plgpu.ACC((ROWS, block_kv), jnp.float32),
        plgpu.ACC((ROWS, block_kv), jnp.float32),
    )


class _Consumer:
    """dQ of 64 rows.

    Attributes:
      dq_acc, s_acc, dp_acc: accumulators.
      start, minus_delta, query_words: of the rows; words None without dropout.
    """

    def __init__(self, block: ThreadBlock, dq_acc, s_acc, dp_acc):
        self.block, self.plan = block, block.plan
        self.dq_acc, self.s_acc, self.dp_acc = dq_acc, s_acc, dp_acc
        self.start, _ = self.start_and_share()
        self.minus_delta = self.per_row(block.delta)
        self.query_words = None
        if self.plan.problem.has_dropout:
            batch, head = block.batch_and_head()
            self.query_words = block.dropout.of_rows(batch, head, self.first_row())

    def run(self) -> None:
        block, plan, problem = self.block, self.plan, self.plan.problem
        if problem.has_lists:
            self.run_list()
            return
        own = self.key_blocks()
        plgpu.barrier_wait(block.q_full)
        plgpu.barrier_wait(block.o_full)
        masking = functools.partial(self.step, needs_mask=True)
        # The bias of rows that see nothing, or what a function makes there, may be NaN.
        mask_throughout = problem.by_batch and problem.beyond_products
        rest = functools.partial(self.step, needs_mask=mask_throughout)
        begin, end, begin_rest, end_rest = (
            n - block.first_block
            for n in (own.first, own.end, own.first_unmasked, own.end_unmasked)
        )
        if problem.has_far_edge:
            lax.fori_loop(jnp.int32(0), begin, self.skip, None)
            lax.fori_loop(begin, begin_rest, masking, None)
        lax.fori_loop(begin_rest, end_rest, rest, None)
        if plan.any_mask:
            lax.fori_loop(end_rest, end, masking, None)
        lax.fori_loop(end, block.blocks, self.skip, None)
        self.store_dq()

    def run_list(self) -> None:
        """The same of a tile that has a list, of which the first steps need a mask."""
        block = self.block
        plgpu.barrier_wait(block.q_full)
        plgpu.barrier_wait(block.o_full)
        needing_mask = block.ordered(3)
        masking, rest = (functools.partial(self.step, needs_mask=x) for x in (True, False))
        lax.fori_loop(jnp.int32(0), needing_mask, masking, None)
        lax.fori_loop(needing_mask, block.blocks, rest, None)
        self.store_dq()

    def key_blocks(self) -> KeyBlocks:
        """Of these rows."""
        block, problem = self.block, self.plan.problem
        if problem.by_batch:
            columns = range(len(KeyBlocks._fields))
            own_first = 4 + len(columns) * block.warpgroup
            return KeyBlocks(*(block.ordered(own_first + n) for n in columns))
        own = key_blocks(problem, self.plan.config.block_kv, self.first_row(), ROWS, jnp)
        if problem.has_far_edge:  # a consumer that sees nothing has none, at the tile's first
            own = KeyBlocks(*(jnp.maximum(n, block.first_block) for n in own))
        return own

    # --- rows ---

    def first_row(self):
        return self.block.first_row_of(self.block.warpgroup)

    def place(self):
        """Batch entry, head and first row."""
        return *self.block.batch_and_head(), self.first_row()

    def per_row(self, ref, *more):
        place = *self.block.batch_and_head(), *more, pl.ds(self.first_row(), ROWS)
        return plgpu.load(ref.at[*place], layout=PER_ROW, optimized=False)

    def start_and_share(self):
        """Of each row, with the share that dQ is multiplied with, where there is one."""
        block, problem = self.block, self.plan.problem
        start = self.per_row(block.start, 0)
        if problem.has_shares:
            return start, self.per_row(block.start, 1)
        if problem.beyond_products or not problem.has_marks:
            return start, None
        return start_and_share_of_marks(start, block.far, self.place(), problem)

    def compare_ids(self, j):
        """Where keys of step j and rows have equal segment ids; None if there are none.

        With a mask function where it shows them.
        """
        block, problem, block_kv = self.block, self.plan.problem, self.plan.config.block_kv
        if block.lists is not None:
            batch, head = block.batch_and_head()
            first_key = block.first_key_of(j)
            return block.lists.bits(batch, head, self.first_row(), first_key, block_kv)
        if not problem.segmented:
            return None
        batch, _ = block.batch_and_head()
        query_ids_ref, key_ids_ref = block.masks[-2:]
        first_key = block.first_key_of(j)
        ids = load_rows(query_ids_ref.at[batch], self.first_row(), problem.query_length - 1)
        return equal_columns(ids, key_ids_ref.at[batch], first_key, block_kv)

    def masked(self, weights, j, equal_ids, fill=0.0):
        """Weights with `fill` where the row may not see the key, or there is none."""
        block, problem = self.block, self.plan.problem

        def bounds():
            batch, _ = block.batch_and_head()
            last_row = problem.query_length - 1
            return load_intervals(block.masks[0].at[batch], self.first_row(), last_row)

        weights = hide(weights, problem, self.first_row, block.first_key_of(j), bounds, fill)
        return weights if equal_ids is None else keep_bits(weights, equal_ids, fill)

    # --- steps ---

    def skip(self, j, _) -> None:
        """A key block that no row of this consumer sees."""
        block = self.block
        for ring in (block.keys, block.values):
            ring.await_full(ring.slot(j))
            ring.give_back(ring.slot(j))

    def step(self, j, _, *, needs_mask: bool) -> None:
        """What the keys of a block add to dQ."""
        block, plan, problem = self.block, self.plan, self.plan.problem
        # Addresses made anew each step: registers are short.
        k_slot, v_slot = block.keys.slot(j), block.values.slot(j)
        own_rows = block.warpgroup + fresh_zero()
        equal_ids = self.compare_ids(j) if needs_mask else None
        block.keys.await_full(k_slot)
        # Both before the first product, or ptxas injects a wait.
        self.s_acc[...] = zero_tile(ROWS, plan.config.block_kv)
        if not plan.weights_first:
            self.dp_acc[...] = zero_tile(ROWS, plan.config.block_kv)
        for columns, q, k in zip(plan.key_parts, block.q_smem, block.keys.at(k_slot), strict=True):
            columns.contract(self.s_acc, q.at[own_rows], k)
        if not plan.weights_first:
            self.issue_d_weights(own_rows, v_slot)
        loaded = self.load_elements(j) if problem.has_elements else NOTHING_LOADED
        open_products = 0 if plan.weights_first else plan.value_columns.products
        products = plgpu.wgmma_accumulator_load(self.s_acc, wait_n=open_products)
        mask = functools.partial(self.masked, j=j, equal_ids=equal_ids)
        tile = self.tile(loaded, mask if needs_mask else None, j)
        weights = scores.ended(scores.begun(products, tile, problem), tile, problem).of_logits()
        if plan.weights_first:
            self.dp_acc[...] = zero_tile(ROWS, plan.config.block_kv)
            self.issue_d_weights(own_rows, v_slot)
        d_weights = plgpu.wgmma_accumulator_load(self.dp_acc, wait_n=0)
        block.values.give_back(v_slot)
        minus_deltas = spread(self.minus_delta, weights.shape)
        ds = d_logits(weights, d_weights, minus_deltas, problem).astype(problem.dtype)
        plan.dq_columns.expand(self.dq_acc, ds, block.keys.at(k_slot)[plan.part])
        plgpu.wgmma_wait(0)
        block.keys.give_back(k_slot)

    def load_elements(self, j):
        block, block_kv = self.block, self.plan.config.block_kv
        batch, head = block.batch_and_head()
        first_key = block.first_key_of(j)
        return block.elements.load(batch, head, self.first_row(), first_key, block_kv)

    def issue_d_weights(self, own_rows, slot) -> None:
        block = self.block
        block.values.await_full(slot)
        (value,) = block.values.at(slot)
        self.plan.value_columns.contract(self.dp_acc, block.o_smem.at[own_rows], value)

    def tile(self, loaded, mask: Callable | None, j) -> scores.Tile:
        def hidden(tile, fill):
            return masked_by_element(mask(tile, fill=fill) if mask else tile, loaded, fill)

        return scores.Tile(
            loaded,
            weights=lambda products: self.weights(products, loaded),
            hidden=hidden,
            dropped=functools.partial(self.dropped, j=j),
            minus_lse=lambda: spread(self.start, (ROWS, self.plan.config.block_kv)),
        )

    def weights(self, products, loaded):
        """Weights; of rows far from 0, a share short of them, where dQ is multiplied with it."""
        problem = self.plan.problem
        if problem.beyond_products:
            far = self.block.far
            return weights_by_query(products, loaded, problem, self.start, far, self.place)
        factor = problem.scale * LOG2E
        of_rows = spread(self.start * factor, products.shape)
        return jnp.minimum(jnp.exp2(products * factor + of_rows), 1.0)

    def dropped(self, weights, j):
        """The weights, negative where they are dropped."""
        block = self.block
        if not self.plan.problem.has_dropout:
            return weights
        (batch, _), first_key = block.batch_and_head(), block.first_key_of(j)
        return block.dropout.negated(weights, self.query_words, batch, first_key)

    def store_dq(self) -> None:
        block, plan, problem = self.block, self.plan, self.plan.problem
        dq = plgpu.wgmma_accumulator_load(self.dq_acc, wait_n=0)
        # dQ leaves from where Q was, once all warps have read it.
        plgpu.commit_smem()
        factor: float | jax.Array = problem.gradient_factor
        if not (plan.problem.has_cap or problem.beyond_products):
            _, share = self.start_and_share()
            factor = spread(share * factor, dq.shape)
        own_q = block.q_smem[plan.part].at[block.warpgroup]
        plan.dq_columns.put(own_q, (dq * factor).astype(problem.dtype))
        plgpu.commit_smem()
        batch, head = block.batch_and_head()
        rows = pl.ds(self.first_row(), ROWS)
        plan.dq_columns.store(own_q, block.dq.at[batch, rows, head])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
