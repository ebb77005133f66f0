"""The gradient of a bias: that of the logits, summed over what the bias is broadcast over.

And of what a score function reads, likewise: times the derivative by that (`score_functions.py`).

It is made in pieces, each by one thread block, which adds up in registers whatever belongs there,
in a fixed order: so results are the same bit by bit from run to run, and nothing is in memory that
is as large as the logits, unless the bias is. Logits and their gradients are computed once more for
it, two products a tile pair. Thread blocks, one per SM, make one piece after the other, those
without a step last, so that what a piece needs arrives under the end of the one before. Consumers
have 64 query rows each:

    producer   Q dO K V | Q dO K V | ...                 TMA into circular buffers
    consumer   S = Q K';  dP = dO V'
               P = exp2(S * scale * log2(e) + bias - LSE)        while dP is computed
               sum += P * (dP - delta)

What a piece is, and its steps:

    whole      a tile of queries by keys; its steps are the heads and batch entries that share it,
               and the bias, which is loaded once. Stored in the dtype of the bias. Where that has
               one value for all queries, or all keys, the next two, in float32:
    columns    one value a key: a block of keys of one head; its steps are the query blocks that see
               any of them. At the end each warp adds up its rows.
    rows       one value a query: a block of queries of one head; its steps are key blocks.
    diagonals  one value a difference of places: blocks of queries and keys that are as far from
               each other, of one head, one after the other. At the end each warp adds up diagonals.

The sums of the latter three over heads, batch entries and warps are left to XLA: they are small.

As in `backward_query.py`, -LSE and -delta come from `row_statistics.py`, rows that do not count
have a start of -inf, and tiles that nothing sees are left out where that is static.

Barriers. Full: an mbarrier a slot, completed by TMA. Free: a named barrier a slot, the consumers
arrive and the producer waits.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import segments, soft_cap
from pallas_kernels.backward_query_masks import hide
from pallas_kernels.bias_gradient_pieces import BLOCK_Q, CONSUMERS, ROWS, WARPS, Pieces
from pallas_kernels.columns import Columns
from pallas_kernels.config import BIAS_GRADIENT
from pallas_kernels.dropout import DropoutRefs, Words, d_logits
from pallas_kernels.dropout import operands as dropout_operands
from pallas_kernels.element_arrays import Blocks, Elements
from pallas_kernels.elements import ElementRefs, masked
from pallas_kernels.far_rows import weights_by_query
from pallas_kernels.hopper import Ring, warp_specialised
from pallas_kernels.interpret import interpreting
from pallas_kernels.mask_functions import MaskRefs
from pallas_kernels.online_softmax import spread
from pallas_kernels.problem import Problem
from pallas_kernels.ptx.arithmetic import div_rem
from pallas_kernels.ptx.barriers import HAND_ORDERED, NamedBarriers
from pallas_kernels.ptx.compiler import code_fence, fresh_zero
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
from pallas_kernels.score_functions import ScoreFunction, ScoreRead, sloped

_REGISTERS = (232, 40)  # of a thread of a consumer, and of the producer
# With so many boxes of an operand that their addresses would spill 8 to 28 bytes.
_MANY_BOXES, _REGISTERS_OF_BOXES = 5, (224, 56)
_PER_ROW = plgpu.Layout.WGMMA.reduce(1)
_Place = tuple[Any, Any, Any, Any]  # batch entry, head, first row and first key


def bias_gradient(operands: tuple, masks: tuple, *, problem: Problem) -> jax.Array:
    """Gradient of the bias in its shape and dtype, the same bit by bit from run to run.

    Args:
      operands: the arrays of `_gradient` up to far.
      masks: intervals, ids, elements and dropout_words, likewise.
    """
    _, _, elements, _ = masks
    bias = elements.bias
    if bias is None:
        raise ValueError("elements: got none with a bias, needs one")
    pieces = Pieces.of_bias(problem, BIAS_GRADIENT[problem.widest], bias)
    return _gradient(*operands, *masks, pieces=pieces).astype(bias.dtype)


def score_gradient(
    operands: tuple, masks: tuple, blocks: Blocks | None, *, problem: Problem, read: ScoreRead
) -> jax.Array:
    """Gradient of what a score function reads, the same bit by bit from run to run.

    Args:
      operands, masks: as of `bias_gradient`.
      blocks: as of `_gradient`.

    Returns:
      `[B, N, n]` float32: sums over the pairs for which it is the same, for n of "heads" 1, of
      "columns" and "rows" the count of keys and queries, of "diagonals" that of differences, which
      begin at 1 - query_length.
    """
    problem = dataclasses.replace(problem, score_function=ScoreFunction(read.program))
    pieces = Pieces.of_heads(problem, BIAS_GRADIENT[problem.widest], read.kind)
    gradient = _gradient(*operands, *masks, blocks=blocks, pieces=pieces)
    return gradient.reshape(problem.batch, problem.heads, -1)


def _gradient(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    d_out: jax.Array,
    start: jax.Array,
    minus_delta: jax.Array,
    far: jax.Array,
    intervals: jax.Array | None,
    ids: tuple[jax.Array, jax.Array] | None,
    elements: Elements,
    dropout_words: Words | None,
    *,
    blocks: Blocks | None = None,
    pieces: Pieces,
) -> jax.Array:
    """Sums of gradients of logits, in the shape that `Pieces.summed` says.

    Args:
      query, d_out: `[B, T, N, H]` and `[B, T, N, h]`, finite in rows that see no key.
      key, value: `[B, S, K, H]` and `[B, S, K, h]`, finite in rows that no query sees.
      start: of `row_statistics`, of T up to a multiple of BLOCK_Q: -LSE / unit; -inf for rows that
        see no key or are beyond the end.
      minus_delta: `[B, N, as start]` float32, dLSE - rowsum(d_out * out), times
        problem.delta_unit; 0 where start is -inf.
      far: of rows far from 0, as `far_rows.far_shape` has it.
      intervals: None, or the keys that each query sees, `[B, 2, problem.query_length]` int32, for a
        problem that is dynamic.
      ids: None, or for a problem that is segmented the segment ids of queries and keys, int32
        `[B, problem.query_length]` and `[B, problem.key_length]` (`segments.py`).
      elements: the bias, and the mask of a problem that has one; or what a score function reads.
      dropout_words: None, or for a problem with dropout the words of queries and keys, as
        `dropout.Words` has them.
      blocks: None, or for a problem that has given lists what they are made of.
      pieces: with the static description of the problem.
    """
    words = dropout_operands(dropout_words, keys=pieces.config.block_kv)
    operands = (*words, *elements.operands(), query, key, value, d_out, start, minus_delta, far)
    if ids is not None:
        query_ids, key_ids = ids
        key_ids = segments.padded(key_ids, pieces.config.block_kv)
        operands = query_ids, key_ids, *operands
    if intervals is not None:
        operands = intervals, *operands
    if pieces.problem.has_lists:
        operands = pieces.seen(blocks), *(() if blocks is None else blocks.operands), *operands
    return pieces.summed(_build(pieces, interpreting())(*operands))


@functools.lru_cache
def _build(pieces: Pieces, interpret: bool):
    problem, config = pieces.problem, pieces.config
    stages, block_kv, dtype = config.stages, config.block_kv, problem.dtype
    keys, values = Columns.of_keys(problem), Columns.of_values(problem)
    free = NamedBarriers(first=CONSUMERS + 2, count=stages, arrivers=CONSUMERS)
    copies = (CONSUMERS + 1) * (keys.tiles + values.tiles)
    scratch: dict[str, Any] = dict(
        q_smem=keys.smem(stages, CONSUMERS, ROWS, dtype=dtype),
        o_smem=values.smem(stages, CONSUMERS, ROWS, dtype=dtype),
        k_smem=keys.smem(stages, block_kv, dtype=dtype),
        v_smem=values.smem(stages, block_kv, dtype=dtype),
        full=plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
    )
    if interpret:
        scratch["twin"] = free.scratch()
    steps = pieces.steps()
    with_steps = max(1, int(np.count_nonzero(steps[:, 2])))
    thread_blocks = min(pieces.count, config.thread_blocks)

    def attention_bias_gradient(*refs, **scratch):
        block = _ThreadBlock(pieces, with_steps, thread_blocks, free, refs, **scratch)
        roles = functools.partial(_consume, block), functools.partial(_produce, block)
        registers = _REGISTERS_OF_BOXES if block.has_many_boxes else _REGISTERS
        warp_specialised(block.warpgroup, CONSUMERS, registers, *roles)

    kernel = plgpu.kernel(
        attention_bias_gradient,
        out_type=pieces.gradient(),
        grid=(thread_blocks,),
        grid_names=("block",),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=HAND_ORDERED,
    )
    return lambda *operands: kernel(jnp.asarray(steps), *operands)


class _ThreadBlock:
    """What producer and consumers share: operands, the gradient, buffers, barriers, and pieces.

    Attributes:
      pieces: of the gradient.
      with_steps: of an entry, how many pieces have steps.
      thread_blocks: how many there are.
      intervals, ids: refs of them; None, and an empty list, without.
      dropout, elements: of rows and keys.
      q, k, v, d_out, start, delta, far, gradient: refs of operands and result, in global memory.
      pairs: ring of K and V that TMA fills, with Q and dO beside its slots in q_smem and o_smem.
      warpgroup: index of this one; the consumers come first.
    """

    def __init__(
        self, pieces: Pieces, with_steps: int, thread_blocks: int, free: NamedBarriers, refs,
        *, q_smem, o_smem, k_smem, v_smem, full, twin=None,
    ):  # fmt: skip
        self.pieces, self.problem = pieces, pieces.problem
        self.with_steps, self.thread_blocks = with_steps, thread_blocks
        self.key_columns = Columns.of_keys(self.problem)
        self.value_columns = Columns.of_values(self.problem)
        self.q_smem, self.o_smem = q_smem, o_smem
        loads = self.key_columns.load, self.value_columns.load
        self.pairs = Ring((k_smem, v_smem), full, dataclasses.replace(free, twins=twin), loads)
        self._steps, *refs = refs
        self._lists: MaskRefs | None = None
        if self.problem.has_lists:
            self._lists, refs = MaskRefs.split(self.problem, refs)
        self.intervals, *refs = refs if self.problem.dynamic else (None, *refs)
        count = 2 * int(self.problem.segmented)
        self.ids, refs = refs[:count], refs[count:]
        self.dropout, refs = DropoutRefs.split(self.problem, refs)
        self.elements, refs = ElementRefs.split(self.problem, refs)
        self.q, self.k, self.v, self.d_out, self.start, self.delta, self.far, self.gradient = refs
        self.warpgroup = lax.axis_index("warpgroup")
        self._number = lax.axis_index("block")

    @property
    def has_many_boxes(self) -> bool:
        return self.key_columns.odd_rows and self.key_columns.tiles >= _MANY_BOXES

    def over_pieces(self, whole_piece: Callable) -> None:
        """Runs `j = whole_piece(entry, number, place, count, j)` for all: so many steps are done.

        `place(step)` is what `pieces.place` gives. A list of all pieces, as others walk, would grow
        with the square of the lengths.
        """
        pieces, with_steps = self.pieces, self.with_steps

        def one(n, j):
            nth = self._number + n * self.thread_blocks
            entry, rank = div_rem(nth, with_steps)
            if with_steps < pieces.per_entry:  # pieces without come after those of all entries
                first_without = pieces.entries * with_steps
                other = div_rem(nth - first_without, pieces.per_entry - with_steps)
                entry = jnp.where(nth < first_without, entry, other[0])
                rank = jnp.where(nth < first_without, rank, with_steps + other[1])
            number, first_step, count = (self._steps[rank, column] for column in range(3))
            place = lambda step: pieces.place(entry, number, first_step + step)
            return whole_piece(entry, number, place, count, j)

        last = pieces.count - 1 - self._number
        count = lax.div(last, jnp.int32(self.thread_blocks)) + 1
        lax.fori_loop(jnp.int32(0), count, one, jnp.int32(0))

    def over_steps(self, place, count, j, one: Callable, carry=()):
        """`carry = one(step, j, carry)` for the steps of a piece; also j behind them.

        Without those that a mask function hides whole.
        """
        first = jnp.int32(0)
        lists = self._lists
        if lists is None:
            add = lambda step, carry: one(step, j + step, carry)
            return lax.fori_loop(first, count, add, carry), j + count

        def add_if_seen(step, state):
            carry, j = state
            is_seen = lists.entry(*place(step)) > 0
            return lax.cond(is_seen, lambda: (one(step, j, carry), j + 1), lambda: state)

        return lax.fori_loop(first, count, add_if_seen, (carry, j))

    def shown(self, weights, fill, batch, head, first_row, first_key):
        """Weights with `fill` where a mask function hides a key."""
        if self._lists is None:
            return weights
        columns = weights.shape[1]
        bits = self._lists.bits(batch, head, first_row, first_key, columns)
        return weights if bits is None else keep_bits(weights, bits, fill)


# --- the consumers --------------------------------------------------------------------------------


def _consume(block: _ThreadBlock) -> None:
    accumulator = plgpu.ACC((ROWS, block.pieces.config.block_kv), jnp.float32)
    run = lambda s_acc, dp_acc: block.over_pieces(_Consumer(block, s_acc, dp_acc).whole_piece)
    pl.run_scoped(run, accumulator, accumulator)


class _Consumer:
    """dS of 64 rows of each piece, summed over its steps."""

    def __init__(self, block: _ThreadBlock, s_acc, dp_acc):
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
            if pieces.kind == "whole":  # that of all steps
                bias = block.elements.bias_of(*own_place(0), self.block_kv)()
                own_bias = lambda: bias
            add = lambda step, j, total: total + self.step(own_place(step), j, own_bias)
            return block.over_steps(place, count, j, add, zero_tile(*shape))

        total, j = lax.cond(count > 0, sum_of_steps, lambda: (zero_tile(*shape), j))
        if self.problem.dropout:
            total *= self.problem.d_logit_unit
        self.store(entry, number, own_place(0), total)
        return j

    def step(self, place: _Place, j, own_bias) -> jax.Array:
        """dS of a step, number j of all."""
        block, problem = self.block, self.problem
        batch, head, first_row, first_key = place
        rows, slot = pl.ds(first_row, ROWS), block.pairs.slot(j) + fresh_zero()
        start, minus_delta = (
            plgpu.load(ref, layout=_PER_ROW, optimized=False)
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
        logits = plgpu.wgmma_accumulator_load(self.s_acc, wait_n=values.products)
        slope = None
        if loaded.score is not None:
            logits, slope = loaded.score(logits, slope=True)
        weights = self.weights(logits, loaded, start, place)
        # A row that does not count may have a bias that is NaN.
        weights = jnp.where(spread(start, weights.shape) > -jnp.inf, weights, 0.0)
        if problem.dropout:
            query_words = block.dropout.of_rows(batch, head, first_row)
            weights = block.dropout.negated(weights, query_words, batch, first_key)
        if slope is not None:
            weights = sloped(weights, slope)
        d_weights = plgpu.wgmma_accumulator_load(self.dp_acc, wait_n=0)
        block.pairs.give_back(slot)
        minus_deltas = spread(minus_delta, weights.shape)
        return d_logits(weights, d_weights, minus_deltas, problem)

    def weights(self, logits, loaded, start, place):
        """Of a tile; with a cap, times its derivative."""
        block, problem = self.block, self.problem
        batch, head, first_row, first_key = place
        last_row = problem.query_length - 1

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

        if problem.soft_cap is not None:
            logits, _ = soft_cap.capped(logits, loaded, problem)
            logits = hidden(logits, soft_cap.UNSEEN)
            _, weights = soft_cap.capped_weights(logits, spread(start, logits.shape), problem)
            return weights
        row_place = lambda: (batch, head, first_row)
        weights = weights_by_query(logits, loaded, problem, start, block.far, row_place)
        return hidden(weights, 0.0)

    def store(self, entry, number, place, total) -> None:
        block, pieces, gradient = self.block, self.block.pieces, self.block.gradient
        batch, head, first_row, first_key = place
        own_rows, own_keys = pl.ds(first_row, ROWS), pl.ds(first_key, self.block_kv)
        if pieces.kind == "whole":
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


# --- the producer ---------------------------------------------------------------------------------


def _produce(block: _ThreadBlock) -> None:
    problem, config = block.problem, block.pieces.config

    @block.over_pieces
    def _whole_piece(entry, number, place, count, j):
        del entry, number

        def load(step, j, _):
            batch, head, row_block, key_block = place(step)
            kv_head = lax.div(head, jnp.int32(problem.group))
            slot = block.pairs.slot(j)
            full = block.pairs.full.at[slot]
            block.pairs.await_free(j, slot)
            if block.has_many_boxes:  # whose addresses are not to be made ahead
                code_fence(step)
            for consumer in range(CONSUMERS):
                rows = pl.ds(row_block * BLOCK_Q + consumer * ROWS, ROWS)
                of_rows, own = (batch, rows, head), (slot, consumer)
                block.key_columns.load(block.q.at[*of_rows], block.q_smem.at[*own], full)
                block.value_columns.load(block.d_out.at[*of_rows], block.o_smem.at[*own], full)
            of_keys = batch, pl.ds(key_block * config.block_kv, config.block_kv), kv_head
            block.pairs.load(j, block.k.at[*of_keys], block.v.at[*of_keys], slot=slot)
            return ()

        return block.over_steps(place, count, j, load)[1]
