"""Consumers of the forward: the steps of a tile, and its end under the first logits of the next."""

import functools
from collections.abc import Callable

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import online_softmax
from pallas_kernels.config import ROWS
from pallas_kernels.dropout import kept
from pallas_kernels.elements import NOTHING_LOADED
from pallas_kernels.forward_block import ThreadBlock
from pallas_kernels.forward_products import Products
from pallas_kernels.forward_rows import Rows
from pallas_kernels.online_softmax import RowState, spread
from pallas_kernels.ptx import notes
from pallas_kernels.ptx.barriers import warpgroup_any
from pallas_kernels.ptx.compiler import code_fence, fresh_zero


def consume(block: ThreadBlock) -> None:
    plan = block.plan
    block.turns.begin()
    if not plan.one_round_does:
        notes.clear(block.own_notes())
    accumulators = (
        plgpu.ACC((ROWS, plan.value_columns.size), jnp.float32),
        plgpu.ACC((ROWS, plan.config.block_kv), jnp.float32),
    )

    def one_round(begin, steps):
        walk = lambda o_acc, s_acc: _Consumer(block, o_acc, s_acc, begin).walk(steps)
        return pl.run_scoped(walk, *accumulators)

    block.rounds(one_round, is_consumer=True)


class _Consumer(Products):
    """Attention of 64 rows of each tile of a round."""

    def __init__(self, block: ThreadBlock, o_acc, s_acc, begin):
        super().__init__(block, Rows(block, begin), o_acc, s_acc)
        self.round = block.deal.round(begin)

    def walk(self, first_step):
        """The round. Returns the index after its last tile, and the steps by then."""
        begin = self.round.begin
        if not self.plan.one_round_does:  # what the first round stored is there before others
            pl.when(begin > 0)(lambda: plgpu.wait_smem_to_gmem(0))
        number = self.round.first_number
        place = self.plan.tiles.locate(number())
        weights, state = self.start_tile(begin, first_step, place, number)
        begun = first_step, weights, state
        if self.plan.tiles.one_each:
            end, (steps, *_) = begin + 1, self.whole_tile(begin, begun)
        else:
            end, (steps, *_) = self.round.each(self.whole_tile, begun)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        return end, steps

    # --- a tile ---

    def start_tile(self, index, steps, place, number: Callable):
        """The first key block of a tile, with no other product open."""
        block, rows = self.block, self.rows
        tile, batch, _ = place
        end_block, bounds = block.key_blocks.end(place), rows.bounds(tile, batch)
        bits = rows.bits(place, jnp.int32(0), is_first=True)
        loaded = rows.load_elements(number, jnp.int32(0), is_first=True)
        block.queries.await_full(block.query_buffer(index))
        block.keys.await_full(block.keys.slot(steps))
        self.put_bias(block.keys.slot(steps))
        self.issue_logits(block.query_buffer(index), block.keys.slot(steps))
        logits = plgpu.wgmma_accumulator_load(self.s_acc, wait_n=0)
        block.keys.give_back(block.keys.slot(steps))
        weights, state = rows.first_weights(logits, tile, end_block - 1, bounds, bits, loaded)
        self.await_first_value(block.values.slot(steps))
        # LLVM would carry float32 into the loop and cast there.
        operand = lax.optimization_barrier(rows.first_operand(weights, place, end_block - 1))
        if self.plan.zeroes_values:
            self.zero_unseen_values(block.values.slot(steps), place, end_block - 1)
        return operand, state

    def key_step(
        self, j, carry, *, steps, index, place, words, end_block, exact, far=False, comparing=False
    ):
        """Logits of step j's key block together with the output of the step before.

        Args:
          steps: before those of the tile.
          place: tile, batch entry and head.
          words: of dropout.
          exact: the step has a mask at the near edge, and looks for maxima.
          far: it has one at the far edge.
          comparing: its mask compares ids.
        """
        block, plan, rows = self.block, self.plan, self.rows
        problem, config = plan.problem, plan.config
        weights, state = carry
        tile, batch, _ = place
        needs_mask = exact or far
        if plan.loads_elements:  # made anew: registers are short
            number = self.round.number(index + fresh_zero())
            tile, batch, _ = place = plan.tiles.locate(number)
            if not block.key_blocks.are_listed:
                end_block = block.key_blocks.end(place)
        if plan.asks_for_key_block(needs_mask):
            end_block = block.key_blocks.number(place, j) + 1 + j
        mask = lambda values: values
        if needs_mask:
            bounds = rows.bounds(tile, batch)
            ids = rows.ids(place, j) if comparing else None
            bits = None if comparing else rows.bits(place, j, near=exact)
            if plan.tiles.any_mask:
                mask = lambda values: rows.masked(
                    values, tile, end_block - 1 - j, bounds(), bits, ids=ids, near=exact
                )
        k_slot, v_slot = block.keys.slot(steps + j), block.values.slot(steps + j - 1)
        looks = exact or plan.exact_throughout  # for maxima
        block.keys.await_full(k_slot)
        self.put_bias(k_slot, exact=looks)
        block.turns.take()
        self.issue_logits(block.query_buffer(index), k_slot)
        self.issue_output(weights, v_slot)
        if not config.products_first:
            block.turns.pass_on()
        loaded = NOTHING_LOADED
        if problem.has_key_mask:
            if needs_mask:
                loaded = rows.load_key_mask(batch, end_block - 1 - j)
        # Beside lists a mask is all that there is to load.
        elif needs_mask or problem.has_score or not block.key_blocks.are_listed:
            loaded = rows.load_elements(lambda: number, j)
        products = self.load_logits()
        if config.products_first:
            output = self.load_output()
            block.turns.pass_on()
            block.keys.give_back(k_slot)
            block.values.give_back(v_slot)
            code_fence(end_block)
        else:
            block.keys.give_back(k_slot)
        weights, correction, state = rows.weights(products, loaded, state, mask, looks=looks)
        first_key = (end_block - 1 - j) * config.block_kv
        dropped = block.dropout.dropped(words, batch, first_key, config.block_kv)
        if not config.products_first:
            # A cast of the weights before the wait makes ptxas serialise every wgmma.
            weights, dropped, correction, state = lax.optimization_barrier(
                (weights, dropped, correction, state)
            )
            # A wait here keeps ptxas from computing the weights after the product.
            if config.early_values:
                block.values.await_full(k_slot)
            output = self.load_output()
            block.values.give_back(v_slot)
        if correction is not None:
            output *= spread(correction, output.shape)
        self.o_acc[...] = output
        operand = kept(weights, dropped, problem.dtype)
        if plan.own_values and not config.early_values:
            block.values.await_full(k_slot)
        if plan.zeroes_values and needs_mask:
            key_block = end_block - 1 - j
            if plan.registers_are_scarce:  # read anew: registers are short
                place = plan.tiles.locate(self.round.number(index + fresh_zero()))
                key_block = block.key_blocks.number(place, j)
            self.zero_unseen_values(k_slot, place, key_block)
        return operand, state

    def whole_tile(self, index, carry):
        """All steps of a tile but the first, which came under the tile before, and its end."""
        plan = self.plan
        steps, weights, state = carry
        number = self.round.number(index)
        following = self.round.following(index, late=plan.loads_elements)
        place = plan.tiles.locate(number)
        blocks, carry = self.key_steps(index, steps, place, (weights, state))
        if plan.ends_anew:
            number = self.round.number(index + fresh_zero())  # read anew: registers are short
        following = following()
        weights, state = self.end_tile(index, steps + blocks, number, carry, following)
        return steps + blocks, weights, RowState(*state)

    def key_steps(self, index, steps, place, carry):
        """The steps of a tile but the first: how many key blocks these make, and their result.

        First those with a mask at the near edge, which look for maxima, then those without a mask,
        then those with one at the far edge.
        """
        plan, key_blocks = self.plan, self.block.key_blocks
        has_far_edge, mask_throughout = plan.has_far_edge, plan.mask_throughout
        tile, _, _ = place
        if key_blocks.are_listed:
            return self.listed_steps(index, steps, place, carry)
        blocks, needing_mask = key_blocks.count(place), key_blocks.exact(place)
        exact = jnp.where(self.round.begin > 0, blocks, jnp.maximum(needing_mask, 1))
        if mask_throughout:
            exact = blocks
        end_block = key_blocks.end(place, blocks)
        step = functools.partial(
            self.key_step,
            steps=steps,
            index=index,
            place=place,
            words=self.rows.words(*place),
            end_block=end_block,
        )

        def masked_steps(first, end, carry, **options):
            """Steps with a mask: all compare segment ids, or none does."""
            if plan.problem.segmented:
                compared = jnp.where(key_blocks.comparing(place) > 0, end, first)
                comparing = functools.partial(step, comparing=True, **options)
                carry = lax.fori_loop(first, compared, comparing, carry)
                first = compared
            return lax.fori_loop(first, end, functools.partial(step, **options), carry)

        if plan.settles:
            exact, carry = self.steps_until_settled(step, exact, blocks, carry)
        else:
            carry = masked_steps(jnp.int32(1), exact, carry, exact=True)
        near = blocks
        if has_far_edge and not mask_throughout:
            near = jnp.maximum(exact, key_blocks.far(place))
        if not mask_throughout:
            first = self.blank_steps(tile, steps, exact, near) if plan.has_blank_steps else exact
            rest = functools.partial(step, exact=False)
            carry = lax.fori_loop(first, near, rest, carry)
        if has_far_edge and not mask_throughout:
            carry = masked_steps(near, blocks, carry, exact=False, far=True)
        return blocks, carry

    def listed_steps(self, index, steps, place, carry):
        """The same of a list: those that look for maxima, others with a mask, those without."""
        plan, key_blocks = self.plan, self.block.key_blocks
        blocks, needing_mask = key_blocks.count(place), key_blocks.masked(place)
        step = functools.partial(
            self.key_step,
            steps=steps,
            index=index,
            place=place,
            words=self.rows.words(*place),
            end_block=blocks,
        )
        if plan.settles:
            exact = jnp.where(self.round.begin > 0, blocks, 1)
            exact, carry = self.steps_until_settled(step, exact, blocks, carry)
            masked = jnp.maximum(exact, needing_mask)
            masked_step = functools.partial(step, exact=False, far=True)
            carry = lax.fori_loop(exact, masked, masked_step, carry)
        else:
            masked = jnp.maximum(needing_mask, 1)
            carry = lax.fori_loop(jnp.int32(1), masked, functools.partial(step, exact=True), carry)
        rest = functools.partial(step, exact=False)
        return blocks, lax.fori_loop(masked, blocks, rest, carry)

    def steps_until_settled(self, step: Callable, exact, blocks, carry):
        """Exact steps, at least so many, until every row has seen a key that is not hidden."""

        def unsettled(state):
            rows = online_softmax.unsettled(state, self.plan.allowed)
            return warpgroup_any(rows.astype(jnp.int32), self.block.warpgroup)

        def exact_step(carry):
            j, carry, _ = carry
            weights, state = step(j, carry, exact=True)
            return j + 1, (weights, state), unsettled(state)

        exact, carry, _ = lax.while_loop(
            lambda carry: (carry[0] < exact) | ((carry[0] < blocks) & carry[2]),
            exact_step,
            (jnp.int32(1), carry, unsettled(carry[1])),
        )
        return exact, carry

    # --- the end of a tile ---

    def end_tile(self, index, steps, number, carry, following):
        """With the first step of the next tile, if there is one; what is carried on of none has no
        meaning."""

        def end_last():
            self.end_alone(index, steps, self.plan.tiles.locate(number), carry)
            return carry

        if self.plan.tiles.one_each:
            return end_last()
        more = self.round.goes_on(index, following)
        of_both = index, steps, number, carry, following
        if self.plan.ends_apart:
            return lax.cond(more, lambda: self.end_tile_before_next(*of_both), end_last)
        if self.plan.branches_at_ends:
            run = lambda do: do()
            return lax.cond(more, lambda: self.end_tile_under_next(*of_both, run), end_last)
        return self.end_tile_under_next(*of_both, pl.when(more))

    def end_tile_under_next(self, index, steps, number, carry, following, if_there):
        """The next tile's first logits run with this tile's last output product.

        Args:
          if_there: calls a function if there is a next tile. Else its logits are of none, and go
            nowhere.
        """
        block, rows, tiles = self.block, self.rows, self.plan.tiles
        weights, state = carry
        tile, batch, head = tiles.locate(number)
        next_tile, next_batch, _ = next_place = tiles.locate(following)
        buffer = block.query_buffer(index + 1)
        k_slot, v_slot = block.keys.slot(steps), block.values.slot(steps - 1)
        block.queries.give_back(block.query_buffer(index))
        inverse = rows.finish(state, tile, batch, head)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        bounds = rows.bounds(next_tile, next_batch)
        bits = rows.bits(next_place, jnp.int32(0), is_first=True)
        if_there(lambda: block.queries.await_full(buffer))
        if_there(lambda: block.keys.await_full(k_slot))
        self.put_bias(k_slot)
        block.turns.take()
        self.issue_logits(buffer, k_slot)
        self.issue_output(weights, v_slot)
        block.turns.pass_on()
        loaded = rows.load_elements(lambda: following, jnp.int32(0), is_first=True)
        logits = self.load_logits()
        if_there(lambda: block.keys.give_back(k_slot))
        end_block = block.key_blocks.end(next_place)
        first = rows.first_weights(logits, next_tile, end_block - 1, bounds, bits, loaded)
        weights, next_state = lax.optimization_barrier(first)
        output = self.load_output()
        block.values.give_back(v_slot)
        if_there(lambda: self.await_first_value(k_slot))
        # Only now are there registers for what dropout takes.
        weights = rows.first_operand(weights, next_place, end_block - 1)
        self.store_output(output, inverse, index, tile, batch, head)
        if self.plan.zeroes_values:
            if_there(lambda: self.zero_unseen_values(k_slot, next_place, end_block - 1))
        return weights, next_state

    def end_tile_before_next(self, index, steps, number, carry, following):
        """With one buffer the next queries arrive where this tile's were while it ends."""
        place, next_place = map(self.plan.tiles.locate, (number, following))
        self.end_alone(index, steps, place, carry)
        return self.start_tile(index + 1, steps, next_place, lambda: self.round.number(index + 1))

    def end_alone(self, index, steps, place, carry) -> None:
        """With no other product open."""
        block, (tile, batch, head) = self.block, place
        weights, state = carry
        block.queries.give_back(block.query_buffer(index))
        block.turns.take()
        self.issue_output(weights, block.values.slot(steps - 1))
        block.turns.pass_on()
        inverse = self.rows.finish(state, tile, batch, head)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        output = self.load_output()
        block.values.give_back(block.values.slot(steps - 1))
        self.store_output(output, inverse, index, tile, batch, head)
