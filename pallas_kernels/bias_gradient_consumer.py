"""Consumers of `bias_gradient.py`: gradients of logits, summed over the steps of a piece."""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import scores
from pallas_kernels.backward_query_masks import hide
from pallas_kernels.bias_gradient_block import ThreadBlock
from pallas_kernels.bias_gradient_pieces import BLOCK_Q, WARPS
from pallas_kernels.config import ROWS
from pallas_kernels.dropout import d_logits
from pallas_kernels.elements import masked
from pallas_kernels.far_rows import weights_by_query
from pallas_kernels.online_softmax import spread
from pallas_kernels.ptx.arithmetic import div_rem
from pallas_kernels.ptx.compiler import fresh_zero
from pallas_kernels.ptx.loads import load_intervals, load_rows
from pallas_kernels.ptx.masks import equal_columns, keep_bits
from pallas_kernels.ptx.mlir import zero_tile
from pallas_kernels.ptx.stores import (
    store_column_sums,
    store_diagonal_sums,
    store_rows,
    store_tile,
    store_tile_inside,
)
from pallas_kernels.row_masks import PER_ROW

_Place = tuple[Any, Any, Any, Any]  # batch entry, head, first row and first key


def consume(block: ThreadBlock) -> None:
    accumulator = plgpu.ACC((ROWS, block.pieces.config.block_kv), jnp.float32)
    run = lambda s_acc, dp_acc: block.over_pieces(_Consumer(block, s_acc, dp_acc).whole_piece)
    pl.run_scoped(run, accumulator, accumulator)


class _Consumer:
    """dS of 64 rows of each piece, summed over its steps."""

    def __init__(self, block: ThreadBlock, s_acc, dp_acc):
        self.block, self.problem = block, block.problem
        self.block_kv = block.pieces.config.block_kv
        self.s_acc, self.dp_acc = s_acc, dp_acc

    def whole_piece(self, entry, number, place, count, j):
        block, pieces, shape = self.block, self.block.pieces, (ROWS, self.block_kv)

        def own_place(step) -> _Place:
            batch, head, row_block, key_block = place(step)
            first_row = row_block * BLOCK_Q + block.warpgroup * ROWS
            return batch, head, first_row, key_block * self.block_kv

        def sum_of_steps():
            own_bias = None
            if pieces.has_one_step:  # neither a sum nor a bias takes registers over steps
                only = lambda step, j, _: self.step(own_place(step), j, None)
                return block.over_steps(place, count, j, only, zero_tile(*shape))
            if pieces.kind == "whole":  # that of all steps
                bias = block.elements.bias_of(*own_place(0), self.block_kv)()
                own_bias = lambda: bias
            add = lambda step, j, total: total + self.step(own_place(step), j, own_bias)
            return block.over_steps(place, count, j, add, zero_tile(*shape))

        total, j = lax.cond(count > 0, sum_of_steps, lambda: (zero_tile(*shape), j))
        if self.problem.has_dropout:
            total *= self.problem.d_logit_unit
        self.store(entry, number, own_place(0), total)
        return j

    def step(self, place: _Place, j, own_bias) -> jax.Array:
        """dS of a step, number j of all."""
        block, problem = self.block, self.problem
        batch, head, first_row, _ = place
        rows, slot = pl.ds(first_row, ROWS), block.pairs.slot(j) + fresh_zero()
        start, minus_delta = (
            plgpu.load(ref, layout=PER_ROW, optimized=False)
            for ref in (block.start.at[batch, head, 0, rows], block.delta.at[batch, head, rows])
        )
        block.pairs.await_full(slot)
        # Both before the first product, or ptxas injects a wait.
        self.s_acc[...] = zero_tile(ROWS, self.block_kv)
        self.dp_acc[...] = zero_tile(ROWS, self.block_kv)
        own = slot, block.warpgroup
        keys, values = block.key_columns, block.value_columns
        key, value = block.pairs.at(slot)
        keys.contract(self.s_acc, block.q_smem.at[*own], key)
        values.contract(self.dp_acc, block.o_smem.at[*own], value)
        loaded = block.elements.load(*place, self.block_kv, early=True, bias=own_bias)
        products = plgpu.wgmma_accumulator_load(self.s_acc, wait_n=values.products)
        tile = self.tile(loaded, start, place)
        weights = scores.ended(scores.begun(products, tile, problem), tile, problem).of_logits()
        d_weights = plgpu.wgmma_accumulator_load(self.dp_acc, wait_n=0)
        block.pairs.give_back(slot)
        minus_deltas = spread(minus_delta, weights.shape)
        return d_logits(weights, d_weights, minus_deltas, problem)

    def tile(self, loaded, start, place) -> scores.Tile:
        block, problem = self.block, self.problem
        batch, head, first_row, first_key = place
        last_row, shape = problem.query_length - 1, (ROWS, self.block_kv)
        row_place = lambda: (batch, head, first_row)

        def bounds():
            return load_intervals(block.intervals.at[batch], first_row, last_row)

        def hidden(weights, fill):
            weights = hide(weights, problem, lambda: first_row, first_key, bounds, fill)
            weights = block.shown(weights, fill, *place)
            if problem.segmented:
                query_ids, key_ids = (ref.at[batch] for ref in block.ids)
                ids = load_rows(query_ids, first_row, last_row)
                equal = equal_columns(ids, key_ids, first_key, self.block_kv)
                weights = keep_bits(weights, equal, fill)
            return masked(weights, loaded, fill)

        def dropped(weights):
            # A row that does not count may have a bias that is NaN.
            weights = jnp.where(spread(start, shape) > -jnp.inf, weights, 0.0)
            if not problem.has_dropout:
                return weights
            query_words = block.dropout.of_rows(batch, head, first_row)
            return block.dropout.negated(weights, query_words, batch, first_key)

        return scores.Tile(
            loaded,
            weights=lambda x: weights_by_query(x, loaded, problem, start, block.far, row_place),
            hidden=hidden,
            dropped=dropped,
            minus_lse=lambda: spread(start, shape),
        )

    def store(self, entry, number, place, total) -> None:
        block, pieces, gradient = self.block, self.block.pieces, self.block.gradient
        batch, head, first_row, first_key = place
        own_rows, own_keys = pl.ds(first_row, ROWS), pl.ds(first_key, self.block_kv)
        if pieces.kind == "whole":
            if pieces.shares > 1:
                gradient = gradient.at[pieces.share_of(number)[0]]
            target = gradient.at[*div_rem(entry, pieces.shape[1])]
            total = total.astype(target.dtype)
            if pieces.fill_whole_tiles:
                store_tile(target.at[own_rows, own_keys], total)
            else:
                store_tile_inside(target, total, first_row, first_key)
        elif pieces.kind == "columns":
            warps = pl.ds(block.warpgroup * WARPS, WARPS)
            store_column_sums(gradient.at[batch, head, warps, own_keys], total)
        elif pieces.kind == "diagonals":
            warps = pl.ds(block.warpgroup * WARPS, WARPS)
            store_diagonal_sums(gradient.at[batch, head, number, warps], total)
        else:
            store_rows(gradient.at[batch, head, own_rows], total.sum(axis=1))
