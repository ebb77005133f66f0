"""Forward attention for Hopper GPUs: warp-specialised, persistent, pipelined across tiles.

The structure is FlashAttention-3's (Shah et al. 2024, Algorithm 2), in one thread block per SM that
walks over tiles. A tile is `block_q` query rows of one head, 64 for each consumer warpgroup:

    producer   K0  Q'  K1 V0  K2 V1  ...  V(n-1)      TMA into circular buffers of K and of V
    consumer   S=Q K0   softmax
               S=Q K1 | O+=P V0   softmax of S while O+=P V0 still runs
               ...
               S=Q' K0' | O+=P V(n-1)   the next tile's first logits; then O is divided and stored

Key blocks run from the last that any row sees to the first, so that the blocks that causality cuts
come first, and the steps that need a mask are over before the loop that needs none. These first
steps look for the maximum of each row; the others trust it (`online_softmax.py`). Where that went
wrong, the thread block walks over its tiles a second time and looks in every step. No step looks
where a soft cap bounds all maxima (`soft_cap.known_reference`). With a sliding window, the blocks
that its far edge cuts come last, in a loop of their own.

Where intervals are known only at run time, the table of key blocks is made from them before the
kernel, for each batch entry, and steps with a mask read the bounds of their rows. So it is with
segment ids, of which rows see an interval too where equal ids lie side by side; where they do not,
steps compare the ids of their rows and of their keys. What a tile costs is not known before
either, so thread blocks have no lists, but draw tiles as they get free (`tickets.py`).

A bias of one value a key, or of 16 bits in tiles, comes with K, and the logits begin with it.
Threads load other biases, and the bits of masks, themselves (`elements.py`).

With such intervals alone (`Problem.forward_ignores_unseen`) what does not count may be NaN. Masks
replace logits, steps with one zero those rows of V in shared memory that no row of the tile sees,
and at the end zeros replace the output of a row that sees nothing.

Barriers. Full: an mbarrier a slot of Q, K and V, completed by TMA. Free: a named barrier a slot,
the consumers arrive and the producer waits. Turn: a named barrier a consumer; who has the turn
issues its two products, so one warpgroup's softmax runs under another's products (ping-pong).
"""

import functools
import itertools
from collections.abc import Callable

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import online_softmax, segments
from pallas_kernels.columns import Columns, as_rows
from pallas_kernels.config import LOG2E, ForwardConfig, Problem
from pallas_kernels.dropout import Words, kept
from pallas_kernels.dropout import operands as dropout_operands
from pallas_kernels.element_arrays import NO_ELEMENTS, Elements, compressed
from pallas_kernels.forward_block import ThreadBlock
from pallas_kernels.forward_plan import BIAS_BOX, Plan
from pallas_kernels.forward_rows import Rows
from pallas_kernels.forward_tiles import Tiles
from pallas_kernels.interpret import interpreting
from pallas_kernels.online_softmax import RowState, spread
from pallas_kernels.ptx.barriers import fence_async_shared, warpgroup_any
from pallas_kernels.ptx.compiler import code_fence, fresh_zero
from pallas_kernels.ptx.mlir import zero_tile
from pallas_kernels.ptx.operands import load_operand
from pallas_kernels.row_masks import ROWS

_PER_KEY = plgpu.Layout.WGMMA.reduce(0)


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    sinks: jax.Array | None = None,
    intervals: jax.Array | None = None,
    ids: tuple[jax.Array, jax.Array] | None = None,
    elements: Elements = NO_ELEMENTS,
    dropout_words: Words | None = None,
    *,
    problem: Problem,
    config: ForwardConfig,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Exact attention.

    Args:
      query: `[B, T, N, H]`; T a multiple of 8. Rows that see no key by intervals are finite, or
        hold anything where `problem.forward_ignores_unseen`.
      key: `[B, S, K, H]`; S a multiple of 8, of which problem.key_length are attended.
      value: `[B, S, K, h]`. Where `problem.forward_ignores_unseen`, rows hold anything that no
        query sees, if no bound rises by more than one between queries that see a key.
      sinks: None, or `[B, N]` float32: one more logit of each row, without a value.
      intervals: None, or the keys that each query sees, `[B, 2, problem.query_length]` int32, for a
        problem that is dynamic (`intervals.py`).
      ids: None, or for a problem that is segmented the segment ids of queries and keys, int32
        `[B, problem.query_length]` and `[B, problem.key_length]` (`segments.py`).
      elements: mask and bias of a problem that has them (`element_arrays.py`).
      dropout_words: None, or for a problem with dropout the words of queries and keys, as
        `dropout.Words` has them.
      problem: static description; its lengths may be up to 7 below T and S.
      config: tile sizes.

    Returns:
      Output `[B, T, N, h]`, natural-log LSE `[B, N, R]` float32, R = ceil(T / block_q) * block_q,
      and references of rows with their log_sum, `[B, N, 2, R]` float32 (`online_softmax.py`), for
      the backward. Rows from problem.query_length on are arbitrary. A row that sees no key: output
      0 and LSE -inf.
    """
    kernel = _build(
        problem,
        config,
        query.shape[1],
        sinks is not None,
        elements.has_bias_of_keys and problem.may_begin_with_bias,
        elements.tiled_bias_dtype if config.brings_bias and problem.may_begin_with_bias else None,
        elements.shares_bias and not problem.by_batch,
        interpreting(),
    )
    words = dropout_operands(dropout_words, keys=config.block_kv)
    optional = *words, *elements.forward_operands(problem)
    if sinks is not None:
        optional = (*optional, sinks * LOG2E)
    if not problem.by_batch:
        return kernel(query, key, value, *optional)
    tiles = Tiles(problem, config)
    bounds, ids_are_sorted = intervals, None
    if ids is not None:
        query_ids, key_ids = ids
        bounds, ids_are_sorted = segments.intervals(query_ids, key_ids, intervals)
        optional = (query_ids, segments.padded(key_ids, config.block_kv), *optional)
    key_blocks = tiles.key_blocks_of(intervals, ids, ids_are_sorted)
    if problem.forward_ignores_unseen:
        reach = tiles.reach(intervals)
        optional = (reach.first, reach.end, *optional)
    return kernel(key_blocks, query, key, value, bounds, *optional)


@functools.lru_cache
def _build(
    problem: Problem,
    config: ForwardConfig,
    padded_query_length: int,
    with_sinks: bool,
    has_bias_of_keys: bool,
    bias_dtype: np.dtype | None,
    batch_inside: bool,
    interpret: bool,
):
    plan = Plan(problem, config, with_sinks, has_bias_of_keys, bias_dtype, batch_inside)
    consumers = config.consumers

    def attention_forward(*refs, **scratch):
        block = ThreadBlock(plan, refs, **scratch)
        pl.when(block.warpgroup < consumers)(lambda: _consume(block))
        pl.when(block.warpgroup == consumers)(lambda: _produce(block))

    tiles, scratch = plan.tiles, plan.scratch(interpret)
    kernel = tiles.kernel(
        attention_forward, scratch, padded_query_length, problem.dtype, references=True
    )
    return tiles.with_tickets(kernel) if problem.by_batch else tiles.with_lists(kernel)


# --- the producer ---------------------------------------------------------------------------------


def _produce(block: ThreadBlock) -> None:
    plgpu.set_max_registers(block.plan.config.registers[1], action="decrease")
    block.rounds(lambda begin, steps: _Producer(block, begin).walk(steps))


class _Producer:
    """Fills the buffers of all tiles of a round, each as it gets free.

    Attributes:
      begin: index of the round's first tile.
      end: the index after its last; of tiles that are drawn there is none.
    """

    def __init__(self, block: ThreadBlock, begin):
        self.block, self.plan, self.begin = block, block.plan, begin
        if block.drawn:
            block.drawn.begin(begin)
        else:
            self.end = begin + block.tile_count()

    def walk(self, first_step):
        """The round. Returns the index after its last tile, the steps by then, and what is 0."""
        block = self.block
        if block.drawn:
            return *block.drawn.each(self.begin, self.load_tile, first_step), block.no_rows
        if self.plan.config.query_buffers > 1:
            block.load_queries(self.begin, self.locate(self.begin))
        steps = lax.fori_loop(self.begin, self.end, self.load_tile, first_step)
        return self.end, steps, block.no_rows

    def locate(self, index):
        block = self.block
        if block.drawn:
            return self.plan.tiles.locate(block.drawn.number(index))
        return self.plan.tiles.locate(block.listed(1 + index - self.begin))

    def load_tile(self, index, steps):
        """Keys and values of a tile, and queries, of the next tile where these are listed."""
        block, plan = self.block, self.plan
        tile, batch, head = self.locate(index)
        kv_head = lax.div(head, jnp.int32(plan.problem.group))
        blocks = block.needs(tile, batch, 0)
        end_block = block.end_of(tile, batch) if plan.problem.has_far_edge else blocks

        def load(ref, buffers, columns: Columns, full, free, j):
            step = steps + j
            slot = lambda: block.slot(step)  # made anew, as registers are few
            pl.when(step >= plan.config.stages)(lambda: free.wait(slot()))
            rows = pl.ds((end_block - 1 - j) * plan.config.block_kv, plan.config.block_kv)
            columns.load(ref.at[batch, rows, kv_head], buffers.at[slot()], full.at[slot()])

        def load_key(j):
            load(block.k, block.k_smem, plan.key_columns, block.k_full, block.k_free, j)
            if plan.comes_by_tma:
                first_key = (end_block - 1 - j) * plan.config.block_kv
                self.load_bias((tile, batch, head), first_key, block.slot(steps + j))

        def load_value(j):
            load(block.v, block.v_smem, plan.value_columns, block.v_full, block.v_free, j)

        def load_pair(j):
            load_key(j)
            load_value(j - 1)

        load_key(jnp.int32(0))
        if block.drawn:  # the next tile is drawn too late for queries ahead
            block.load_queries(index, self.locate(index))
        else:
            wanted = index + (plan.config.query_buffers - 1)
            pl.when(wanted < self.end)(lambda: block.load_queries(wanted, self.locate(wanted)))
        load_last = lambda: load_value(blocks - 1)
        if block.drawn:
            block.drawn.load_and_draw(index, self.begin > 0, blocks, load_pair, load_last)
        else:
            pl.loop(jnp.int32(1), blocks)(load_pair)
            load_last()
        return steps + blocks

    def load_bias(self, place, first_key, slot) -> None:
        """A bias that comes by TMA: of keys, or in tiles of each consumer's rows."""
        block, plan = self.block, self.plan
        tile, batch, head = place
        full = block.k_full.at[slot]
        if plan.has_bias_of_keys:
            source = block.elements.bias_of_keys(batch, head, first_key, plan.config.block_kv)
            plgpu.copy_gmem_to_smem(source, block.bias_smem.at[slot], full)
        for w, n in itertools.product(range(plan.config.consumers), range(plan.bias_boxes)):
            row, key = plan.tiles.first_row(tile, w), first_key + n * BIAS_BOX
            source = block.elements.bias_tile(batch, head, row, key)
            plgpu.copy_gmem_to_smem(source, as_rows(block.bias_smem.at[slot, w]).at[n], full)


# --- the consumers --------------------------------------------------------------------------------


def _consume(block: ThreadBlock) -> None:
    plan = block.plan
    plgpu.set_max_registers(plan.config.registers[0], action="increase")
    is_last = block.warpgroup == plan.config.consumers - 1
    pl.when(is_last)(block.pass_turn)  # warpgroup 0 begins
    accumulators = (
        plgpu.ACC((ROWS, plan.value_columns.size), jnp.float32),
        plgpu.ACC((ROWS, plan.config.block_kv), jnp.float32),
    )

    def one_round(begin, steps):
        walk = lambda o_acc, s_acc: _Consumer(block, o_acc, s_acc, begin).walk(steps)
        return pl.run_scoped(walk, *accumulators)

    block.rounds(one_round)


class _Consumer:
    """Attention of 64 rows of each tile of a round.

    Attributes:
      o_acc, s_acc: accumulators of the output and of logits.
      begin: index of the round's first tile.
      end: the index after its last; of tiles that are drawn there is none.
    """

    def __init__(self, block: ThreadBlock, o_acc, s_acc, begin):
        self.block, self.plan, self.begin = block, block.plan, begin
        self.o_acc, self.s_acc = o_acc, s_acc
        self.rows = Rows(block, begin)
        if not block.drawn:
            self.end = begin + block.tile_count()

    def walk(self, first_step):
        """The round. Returns the index after its last tile, the steps by then, and of each row
        whether its reference was too low."""
        block, begin, drawn = self.block, self.begin, self.block.drawn
        number, there = lambda: self.number(begin), lambda: begin < self.end
        if drawn:
            number, there = lambda: drawn.first_number(begin), lambda: jnp.bool_(True)
        place = self.plan.tiles.locate(number())
        weights, state = self.start_tile(begin, first_step, place, number, there)
        carry = first_step, weights, state, block.no_rows
        if drawn:
            end, carry = drawn.each(begin, self.whole_tile, carry)
        else:
            end, carry = self.end, lax.fori_loop(begin, self.end, self.whole_tile, carry)
        steps, _, _, too_low = carry
        plgpu.wait_smem_to_gmem(0)
        return end, steps, too_low

    def number(self, index):
        """Of a tile of the round."""
        if self.block.drawn:
            return self.block.drawn.number(index)
        anew = self.plan.registers_are_short
        return self.block.listed(1 + index - self.begin, anew=anew)

    def is_there(self, index, number):
        """Whether there is such a tile."""
        return number() >= 0 if self.block.drawn else index < self.end

    # --- products ---

    def put_bias(self, slot, *, exact: bool = True) -> None:
        """Tiles of a bias where the product is added to them, outside of the turn."""
        block, problem, dtype = self.block, self.plan.problem, self.plan.bias_dtype
        if not self.plan.bias_boxes:
            return
        boxes = [block.bias_smem.at[slot, block.warpgroup, n] for n in range(self.plan.bias_boxes)]
        parts = [load_operand(box, BIAS_BOX, dtype) for box in boxes]
        bias = jnp.concatenate(parts, axis=1).astype(jnp.float32)
        if exact and problem.adds_bias and dtype != jnp.float16:
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
        queries = block.q_smem.at[buffer, block.warpgroup]
        self.plan.key_columns.contract(self.s_acc, queries, block.k_smem.at[slot])

    def load_logits(self):
        """While the output product that was issued behind them goes on, if any may."""
        waits = self.rows.elements_late or self.plan.config.products_first
        open_products = 0 if waits else self.plan.value_columns.tiles
        return plgpu.wgmma_accumulator_load(self.s_acc, wait_n=open_products)

    def issue_output(self, weights, slot) -> None:
        if not self.plan.own_values:
            plgpu.barrier_wait(self.block.v_full.at[slot])
        self.plan.value_columns.expand(self.o_acc, weights, self.block.v_smem.at[slot])

    def load_output(self):
        return plgpu.wgmma_accumulator_load(self.o_acc, wait_n=0)

    def await_first_value(self, there: Callable, slot) -> None:
        """V of a tile's first key block, if there is such a tile."""
        if self.plan.own_values:
            pl.when(there())(lambda: plgpu.barrier_wait(self.block.v_full.at[slot]))

    def zero_unseen_values(self, slot, tile, batch, key_block) -> None:
        """Rows of V that no query of a tile sees: 0 times what they hold may be NaN."""
        block, block_kv = self.block, self.plan.config.block_kv
        key_length = self.plan.problem.key_length
        # Addresses are made anew: registers are short.
        first, end = (ref[batch + fresh_zero(), tile] for ref in block.reach)
        first_key = key_block * block_kv
        is_cut = (first_key < first) | (first_key + block_kv > end)
        if key_length % block_kv:  # zeros stand behind the last key
            is_cut &= (first_key < first) | (end < key_length)

        @pl.when(is_cut)
        def _():
            rows, box_width = (
                (first - first_key, end - first_key),
                self.plan.value_columns.box_width,
            )
            block.unseen_values.keep_rows(block.v_smem.at[slot], *rows, block.warpgroup, box_width)

    # --- a tile ---

    def start_tile(self, index, steps, place, number: Callable, there: Callable):
        """The first key block of a tile, if it is there, with no other product open."""
        block, rows = self.block, self.rows
        tile, batch, _ = place
        end_block, bounds = block.end_of(tile, batch), rows.bounds(tile, batch)
        bits = rows.bits(tile, batch, jnp.int32(0), is_first=True)
        loaded = rows.load_elements(number, jnp.int32(0), is_first=True)

        @pl.when(there())
        def _():
            plgpu.barrier_wait(block.q_full.at[block.query_buffer(index)])
            plgpu.barrier_wait(block.k_full.at[block.slot(steps)])

        self.put_bias(block.slot(steps))
        self.issue_logits(block.query_buffer(index), block.slot(steps))
        logits = plgpu.wgmma_accumulator_load(self.s_acc, wait_n=0)
        pl.when(there())(lambda: block.k_free.arrive(block.slot(steps)))
        weights, state = rows.first_weights(logits, tile, end_block - 1, bounds, bits, loaded)
        self.await_first_value(there, block.slot(steps))
        # LLVM would carry float32 into the loop and cast there.
        operand = lax.optimization_barrier(rows.first_operand(weights, place, end_block - 1))
        if self.plan.problem.forward_ignores_unseen:
            pl.when(there())(
                lambda: self.zero_unseen_values(block.slot(steps), tile, batch, end_block - 1)
            )
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
        locate_anew = lambda: plan.tiles.locate(self.number(index + fresh_zero()))
        has_ids = needs_mask and problem.segmented and plan.registers_are_short
        if plan.loads_elements or has_ids or plan.cap_beside_lengths:  # registers are short
            number = self.number(index + fresh_zero())
            tile, batch, _ = plan.tiles.locate(number)
            end_block = block.end_of(tile, batch)
        mask = lambda values: values
        if needs_mask:
            bounds = rows.bounds(tile, batch)
            ids = rows.ids(tile, batch, j) if comparing else None
            bits = None if comparing else rows.bits(tile, batch, j, near=exact)
            if plan.tiles.any_mask:
                mask = lambda values: rows.masked(
                    values, tile, end_block - 1 - j, bounds(), bits, ids=ids, near=exact
                )
        k_slot, v_slot = block.slot(steps + j), block.slot(steps + j - 1)
        looks = exact or plan.exact_throughout  # for maxima
        plgpu.barrier_wait(block.k_full.at[k_slot])
        self.put_bias(k_slot, exact=looks)
        block.take_turn()
        self.issue_logits(block.query_buffer(index), k_slot)
        self.issue_output(weights, v_slot)
        if not config.products_first:
            block.pass_turn()
        loaded = rows.load_elements(lambda: number, j)
        products = self.load_logits()
        if config.products_first:
            output = self.load_output()
            block.pass_turn()
            block.k_free.arrive(k_slot)
            block.v_free.arrive(v_slot)
            code_fence(end_block)
        else:
            block.k_free.arrive(k_slot)
        weights, correction, state = rows.weights(products, loaded, state, mask, looks=looks)
        first_key = (end_block - 1 - j) * config.block_kv
        if plan.cap_beside_lengths and plan.problem.has_dropout:  # only now: registers are short
            words = rows.words(*locate_anew())
        dropped = block.dropout.dropped(words, batch, first_key, config.block_kv)
        if not config.products_first:
            # A cast of the weights before the wait makes ptxas serialise every wgmma.
            weights, dropped, correction, state = lax.optimization_barrier(
                (weights, dropped, correction, state)
            )
            # A wait here keeps ptxas from computing the weights after the product.
            if config.early_values:
                plgpu.barrier_wait(block.v_full.at[k_slot])
            output = self.load_output()
            block.v_free.arrive(v_slot)
        if correction is not None:
            output *= spread(correction, output.shape)
        self.o_acc[...] = output
        operand = kept(weights, dropped, problem.dtype)
        if plan.own_values and not config.early_values:
            plgpu.barrier_wait(block.v_full.at[k_slot])
        if problem.forward_ignores_unseen and needs_mask:
            if plan.registers_are_scarce:  # read anew: registers are short
                tile, batch, _ = locate_anew()
                end_block = block.end_of(tile, batch)
            self.zero_unseen_values(k_slot, tile, batch, end_block - 1 - j)
        return operand, state

    def whole_tile(self, index, carry):
        """All steps of a tile but the first, which came under the tile before, and its end."""
        plan, drawn = self.plan, self.block.drawn
        steps, weights, state, too_low = carry
        number = self.number(index)
        following = None if drawn else self.number(index + 1)
        place = plan.tiles.locate(number)
        blocks, carry = self.key_steps(index, steps, place, (weights, state))
        if plan.loads_elements or plan.cap_beside_lengths:
            number = self.number(index + fresh_zero())  # read anew: registers are short
        if drawn:  # by now
            drawn.wait(index + 1)
        if drawn or plan.loads_elements:
            following = self.number(index + 1 + fresh_zero())
        end_tile = self.end_tile_under_next
        if plan.config.query_buffers == 1:
            end_tile = self.end_tile_before_next
        weights, state, too_low = end_tile(
            index, steps + blocks, number, (*carry, too_low), following
        )
        return steps + blocks, weights, RowState(*state), too_low

    def key_steps(self, index, steps, place, carry):
        """The steps of a tile but the first: how many key blocks these make, and their result.

        First those with a mask at the near edge, which look for maxima, then those without a mask,
        then those with one at the far edge.
        """
        block, plan = self.block, self.plan
        has_far_edge, mask_throughout = plan.problem.has_far_edge, plan.mask_throughout
        tile, batch, _ = place
        blocks, needing_mask = block.needs(tile, batch, 0), block.needs(tile, batch, 1)
        exact = jnp.where(self.begin > 0, blocks, jnp.maximum(needing_mask, 1))
        if mask_throughout:
            exact = blocks
        end_block = block.end_of(tile, batch) if has_far_edge else blocks
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
                compared = jnp.where(block.needs(tile, batch, 4) > 0, end, first)
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
            near = jnp.maximum(exact, block.needs(tile, batch, 2))
        if not mask_throughout:
            rest = functools.partial(step, exact=False)
            carry = lax.fori_loop(exact, near, rest, carry)
        if has_far_edge and not mask_throughout:
            carry = masked_steps(near, blocks, carry, exact=False, far=True)
        return blocks, carry

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

    def end_tile_under_next(self, index, steps, number, carry, following):
        """The next tile's first logits run with this tile's last output product."""
        block, rows, tiles = self.block, self.rows, self.plan.tiles
        weights, state, too_low = carry
        tile, batch, head = tiles.locate(number)
        next_tile, next_batch, _ = next_place = tiles.locate(following)
        buffer = block.query_buffer(index + 1)
        k_slot, v_slot = block.slot(steps), block.slot(steps - 1)
        there = lambda: self.is_there(index + 1, lambda: following)
        block.q_free.arrive(block.query_buffer(index))
        inverse, too_low = rows.finish(state, too_low, tile, batch, head)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        bounds = rows.bounds(next_tile, next_batch)
        bits = rows.bits(next_tile, next_batch, jnp.int32(0), is_first=True)

        # After the last tile the logits are of no tile, and go nowhere.
        @pl.when(there())
        def _():
            plgpu.barrier_wait(block.q_full.at[buffer])
            plgpu.barrier_wait(block.k_full.at[k_slot])

        self.put_bias(k_slot)
        block.take_turn()
        self.issue_logits(buffer, k_slot)
        self.issue_output(weights, v_slot)
        block.pass_turn()
        loaded = rows.load_elements(lambda: following, jnp.int32(0), is_first=True)
        logits = self.load_logits()
        pl.when(there())(lambda: block.k_free.arrive(k_slot))
        end_block = block.end_of(next_tile, next_batch)
        first = rows.first_weights(logits, next_tile, end_block - 1, bounds, bits, loaded)
        weights, next_state = lax.optimization_barrier(first)
        output = self.load_output()
        block.v_free.arrive(v_slot)
        self.await_first_value(there, k_slot)
        # Only now are there registers for what dropout takes.
        weights = rows.first_operand(weights, next_place, end_block - 1)
        self.store_output(output, inverse, tile, batch, head)
        if self.plan.problem.forward_ignores_unseen:
            pl.when(there())(
                lambda: self.zero_unseen_values(k_slot, next_tile, next_batch, end_block - 1)
            )
        return weights, next_state, too_low

    def end_tile_before_next(self, index, steps, number, carry, following):
        """The next queries arrive where this tile's were while it ends."""
        block, tiles = self.block, self.plan.tiles
        weights, state, too_low = carry
        tile, batch, head = tiles.locate(number)
        next_place = tiles.locate(following)
        block.q_free.arrive(0)
        inverse, too_low = self.rows.finish(state, too_low, tile, batch, head)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        block.take_turn()
        self.issue_output(weights, block.slot(steps - 1))
        block.pass_turn()
        output = self.load_output()
        block.v_free.arrive(block.slot(steps - 1))
        self.store_output(output, inverse, tile, batch, head)
        number = lambda: self.number(index + 1)
        there = lambda: self.is_there(index + 1, number)
        return *self.start_tile(index + 1, steps, next_place, number, there), too_low

    def store_output(self, output, inverse, tile, batch, head) -> None:
        """Divides by the row sums and sends output to global memory."""
        block, plan = self.block, self.plan
        staging = block.o_smem.at[block.warpgroup]
        factor = spread(inverse, output.shape)
        output *= factor
        if plan.problem.forward_ignores_unseen:
            output = jnp.where(factor < 0.0, 0.0, output)
        self.o_acc[...] = zero_tile(ROWS, plan.value_columns.size)
        for columns in plan.staged_columns:
            if columns.first > 0:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            part = output[:, columns.first : columns.first + columns.size]
            columns.put(staging, part.astype(plan.problem.dtype), anew=plan.registers_are_scarce)
            plgpu.commit_smem()
            columns.store(staging, block.o.at[batch, self.rows.all(tile), head])
