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
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np

from pallas_kernels import hopper, segments
from pallas_kernels.bias_gradient_block import ThreadBlock
from pallas_kernels.bias_gradient_consumer import consume
from pallas_kernels.bias_gradient_pieces import BLOCK_Q, CONSUMERS, Pieces
from pallas_kernels.columns import Columns
from pallas_kernels.config import ROWS
from pallas_kernels.defaults import BIAS_GRADIENT
from pallas_kernels.dropout import Words
from pallas_kernels.dropout import operands as dropout_operands
from pallas_kernels.element_arrays import Blocks, Elements
from pallas_kernels.interpret import interpreting
from pallas_kernels.problem import Problem
from pallas_kernels.ptx.barriers import HAND_ORDERED, NamedBarriers
from pallas_kernels.ptx.compiler import code_fence
from pallas_kernels.score_functions import ScoreFunction, ScoreRead

_REGISTERS = (232, 40)  # of a thread of a consumer, and of the producer
_REGISTERS_OF_BOXES = (224, 56)  # where there are many (`ThreadBlock.has_many_boxes`)


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
    pieces = Pieces.of_bias(problem, bias)
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
        scratch["twins"] = free.scratch()
    steps = pieces.steps()
    with_steps = max(1, int(np.count_nonzero(steps[:, 2])))
    thread_blocks = min(pieces.count, config.thread_blocks)

    def attention_bias_gradient(*refs, **scratch):
        block = ThreadBlock(pieces, with_steps, thread_blocks, free, refs, **scratch)
        roles = functools.partial(consume, block), functools.partial(_produce, block)
        registers = _REGISTERS_OF_BOXES if block.has_many_boxes else _REGISTERS
        hopper.warp_specialised(block.warpgroup, CONSUMERS, registers, *roles)

    body, out_type, sizes = attention_bias_gradient, pieces.gradient(), (thread_blocks, CONSUMERS)
    kernel = hopper.kernel(body, out_type, *sizes, scratch, HAND_ORDERED)
    return lambda *operands: kernel(jnp.asarray(steps), *operands)


# --- the producer ---------------------------------------------------------------------------------


def _produce(block: ThreadBlock) -> None:
    problem, config = block.problem, block.pieces.config

    @block.over_pieces
    def _whole_piece(entry, number, place, count, j):
        del entry, number

        def load(step, j, _):
            batch, head, row_block, key_block = place(step)
            kv_head = problem.kv_head_of(head)
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
            block.pairs.load(slot, block.k.at[*of_keys], block.v.at[*of_keys])
            return ()

        return block.over_steps(place, count, j, load)[1]
