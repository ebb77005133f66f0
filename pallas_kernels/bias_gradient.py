"""The gradient of a bias: that of the logits, summed over what the bias is broadcast over.

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

The sums of the latter two over heads, batch entries and warps are left to XLA: they are small.

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
from jax import lax

from pallas_kernels import segments, soft_cap
from pallas_kernels.backward_query import hide
from pallas_kernels.columns import Columns
from pallas_kernels.config import BACKWARD_CONSUMERS, BIAS_GRADIENT, BiasGradientConfig, Problem
from pallas_kernels.dropout import DropoutRefs, Words, d_logits
from pallas_kernels.dropout import operands as dropout_operands
from pallas_kernels.element_arrays import Elements
from pallas_kernels.elements import ElementRefs, masked
from pallas_kernels.far_rows import weights_by_query
from pallas_kernels.interpret import interpreting
from pallas_kernels.online_softmax import spread
from pallas_kernels.primitives import (
    HAND_ORDERED,
    NamedBarriers,
    div_rem,
    equal_columns,
    fresh_zero,
    keep_bits,
    load_intervals,
    load_rows,
    store_column_sums,
    store_rows,
    store_tile,
    zero_tile,
)

_CONSUMERS = BACKWARD_CONSUMERS
_ROWS = 64  # query rows of a consumer: the M of a wgmma
BLOCK_Q = _CONSUMERS * _ROWS
_WARPS = 4  # of a consumer
_REGISTERS = (232, 40)  # of a thread of a consumer, and of the producer
_PER_ROW = plgpu.Layout.WGMMA.reduce(1)


def bias_gradient(
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
    dropout_words: Words | None = None,
    *,
    problem: Problem,
) -> jax.Array:
    """Gradient of the bias, the same bit by bit from run to run.

    Args:
      query, d_out: `[B, T, N, H]` and `[B, T, N, h]`; T a multiple of 8, rows from
        problem.query_length on zero. Both are finite in rows that see no key.
      key, value: `[B, S, K, H]` and `[B, S, K, h]`; S a multiple of 8, finite where no query sees
        them.
      start: of `row_statistics`, of T up to a multiple of BLOCK_Q: -LSE / unit; -inf for rows that
        see no key or are beyond the end.
      minus_delta: `[B, N, as start]` float32, dLSE - rowsum(d_out * out), times
        problem.delta_unit; 0 where start is -inf.
      far: of rows far from 0, as `far_rows.far_shape` has it.
      intervals: None, or the keys that each query sees, `[B, 2, problem.query_length]` int32, for a
        problem that is dynamic.
      ids: None, or for a problem that is segmented the segment ids of queries and keys, int32
        `[B, problem.query_length]` and `[B, problem.key_length]` (`segments.py`).
      elements: the bias, and the mask of a problem that has one.
      dropout_words: None, or for a problem with dropout the words of queries and keys, as
        `dropout.Words` has them.
      problem: static description; its lengths may be up to 7 below T and S.

    Returns:
      In shape and dtype of the bias.
    """
    bias = elements.bias
    if bias is None:
        raise ValueError("elements: got none with a bias, needs one")
    pieces = _Pieces(problem, BIAS_GRADIENT[problem.widest], bias.shape, bias.dtype)
    words = dropout_operands(dropout_words, keys=pieces.config.block_kv)
    operands = (*words, *elements.operands(), query, key, value, d_out, start, minus_delta, far)
    if ids is not None:
        query_ids, key_ids = ids
        key_ids = segments.padded(key_ids, pieces.config.block_kv)
        operands = query_ids, key_ids, *operands
    if intervals is not None:
        operands = intervals, *operands
    gradient = _build(pieces, interpreting())(*operands)
    return pieces.summed(gradient).astype(bias.dtype)


@dataclasses.dataclass(frozen=True)
class _Pieces:
    """What the thread blocks own, of a bias of that shape and dtype."""

    problem: Problem
    config: BiasGradientConfig
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def kind(self) -> str:
        if self.shape[2] == 1:
            return "columns"
        return "rows" if self.shape[3] == 1 else "whole"

    @property
    def row_blocks(self) -> int:
        return -(-self.problem.query_length // BLOCK_Q)

    @property
    def key_blocks(self) -> int:
        return -(-self.problem.key_length // self.config.block_kv)

    @property
    def entries(self) -> int:
        """How many of batch and head have pieces of their own."""
        if self.kind == "whole":
            return self.shape[0] * self.shape[1]
        return self.problem.batch * self.problem.heads

    @property
    def per_entry(self) -> int:
        rows, keys = self.row_blocks, self.key_blocks
        return {"whole": rows * keys, "columns": keys, "rows": rows}[self.kind]

    @property
    def count(self) -> int:
        return self.entries * self.per_entry

    def steps(self) -> np.ndarray:
        """`[per_entry, 3]` int32: number of each piece of an entry, its first step, and its steps.

        Those with most come first, those with none last.
        """
        p, block_kv = self.problem, self.config.block_kv
        first_row = np.arange(self.row_blocks)[:, None] * BLOCK_Q
        first_key = np.arange(self.key_blocks)[None] * block_kv
        last_row = np.minimum(first_row + BLOCK_Q, p.query_length) - 1
        last_key = np.minimum(first_key + block_kv, p.key_length) - 1
        seen = np.ones((self.row_blocks, self.key_blocks), bool)
        if p.highest is not None:
            seen &= first_key <= last_row + p.highest
        if p.lowest is not None:
            seen &= last_key >= first_row + p.lowest
        if self.kind == "whole":
            sharing = p.batch * p.heads // self.entries
            count = np.where(seen, sharing, 0).ravel()
            first = np.zeros_like(count)
        else:
            seen = seen.T if self.kind == "columns" else seen
            first, count = seen.argmax(1), seen.sum(1)  # what is seen is an interval
        number = np.argsort(-count, kind="stable")
        return np.stack([number, first[number], count[number]], axis=1).astype(np.int32)

    def place(self, entry, number, step):
        """Batch entry, head, row block and key block of a step of a piece of an entry."""
        p = self.problem
        if self.kind != "whole":
            batch, head = div_rem(entry, p.heads)
            return (batch, head, *((step, number) if self.kind == "columns" else (number, step)))
        row_block, key_block = div_rem(number, self.key_blocks)
        own_batch, head = div_rem(entry, self.shape[1])
        sharing = p.batch // self.shape[0]
        if self.shape[1] == 1:
            batch, head = div_rem(step, p.heads)
        else:
            batch = step
        return own_batch * sharing + batch, head, row_block, key_block

    def gradient(self) -> jax.ShapeDtypeStruct:
        """What the kernel makes, in whole tiles."""
        p = self.problem
        rows, keys = self.row_blocks * BLOCK_Q, self.key_blocks * self.config.block_kv
        shape = {
            "whole": (*self.shape[:2], rows, keys),
            "columns": (p.batch, p.heads, _CONSUMERS * _WARPS, keys),
            "rows": (p.batch, p.heads, rows),
        }[self.kind]
        return jax.ShapeDtypeStruct(shape, self.dtype if self.kind == "whole" else jnp.float32)

    def summed(self, gradient: jax.Array) -> jax.Array:
        """The gradient in the shape of the bias, from what the kernel makes."""
        p = self.problem
        if self.kind == "whole":
            return gradient[:, :, : p.query_length, : p.key_length]
        if self.kind == "columns":
            gradient = gradient[..., : p.key_length].sum(2)[:, :, None]
        else:
            gradient = gradient[..., : p.query_length][..., None]
        gradient = gradient.reshape(self.shape[0], -1, *gradient.shape[1:]).sum(1)
        axes = tuple(axis for axis, size in enumerate(self.shape) if size == 1)
        return gradient.sum(axes, keepdims=True)


@functools.lru_cache
def _build(pieces: _Pieces, interpret: bool):
    problem, config = pieces.problem, pieces.config
    block_kv, stages = config.block_kv, config.stages
    dtype = problem.dtype
    key_columns = Columns.whole(problem.width)
    value_columns = Columns.whole(problem.value_width)
    has_cap = problem.soft_cap is not None
    steps = pieces.steps()
    with_steps = max(1, int(np.count_nonzero(steps[:, 2])))
    thread_blocks = min(pieces.count, config.thread_blocks)

    free = NamedBarriers(first=_CONSUMERS + 2, count=stages, arrivers=_CONSUMERS)
    copies = (_CONSUMERS + 1) * (key_columns.tiles + value_columns.tiles)
    scratch: dict[str, Any] = dict(
        q_smem=key_columns.smem(stages, _CONSUMERS, _ROWS, dtype=dtype),
        o_smem=value_columns.smem(stages, _CONSUMERS, _ROWS, dtype=dtype),
        k_smem=key_columns.smem(stages, block_kv, dtype=dtype),
        v_smem=value_columns.smem(stages, block_kv, dtype=dtype),
        full=plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
    )
    if interpret:
        scratch["twin"] = free.scratch()

    def attention_bias_gradient(
        steps_ref, *more_refs, q_smem, o_smem, k_smem, v_smem, full, twin=None
    ):
        intervals_ref, *refs = more_refs if problem.dynamic else (None, *more_refs)
        ids_refs = refs[: 2 * int(problem.segmented)]
        dropout, refs = DropoutRefs.split(problem, refs[len(ids_refs) :])
        elements, refs = ElementRefs.split(problem, refs)
        q_ref, k_ref, v_ref, do_ref, start_ref, delta_ref, far_ref, gradient_ref = refs
        slot_free = dataclasses.replace(free, twins=twin)
        warpgroup = lax.axis_index("warpgroup")
        block = lax.axis_index("block")
        slot_of = lambda j: lax.rem(j, jnp.int32(stages))

        def over_pieces(whole_piece):
            """Runs `whole_piece(entry, place, count, j)` for all; j steps are done before.

            `place(step)` is what `pieces.place` gives. A list of all pieces, as others walk, would
            grow with the square of the lengths.
            """

            def one(n, j):
                nth = block + n * thread_blocks
                entry, rank = div_rem(nth, with_steps)
                if with_steps < pieces.per_entry:  # pieces without come after those of all entries
                    first_without = pieces.entries * with_steps
                    other = div_rem(nth - first_without, pieces.per_entry - with_steps)
                    entry = jnp.where(nth < first_without, entry, other[0])
                    rank = jnp.where(nth < first_without, rank, with_steps + other[1])
                number, first_step, count = (steps_ref[rank, column] for column in range(3))
                place = lambda step: pieces.place(entry, number, first_step + step)
                whole_piece(entry, place, count, j)
                return j + count

            count = lax.div(pieces.count - 1 - block, jnp.int32(thread_blocks)) + 1
            lax.fori_loop(jnp.int32(0), count, one, jnp.int32(0))

        @pl.when(warpgroup < _CONSUMERS)
        def _consumer():
            plgpu.set_max_registers(_REGISTERS[0], action="increase")

            def compute(s_acc, dp_acc):
                @over_pieces
                def _whole_piece(entry, place, count, j):
                    def own_place(step) -> tuple[Any, Any, Any, Any]:
                        batch, head, row_block, key_block = place(step)
                        first_row = row_block * BLOCK_Q + warpgroup * _ROWS
                        return batch, head, first_row, key_block * block_kv

                    def add_step(step, total, own_bias):
                        batch, head, first_row, first_key = own = own_place(step)
                        rows, slot = pl.ds(first_row, _ROWS), slot_of(j + step) + fresh_zero()
                        start, minus_delta = (
                            plgpu.load(ref, layout=_PER_ROW, optimized=False)
                            for ref in (
                                start_ref.at[batch, head, 0, rows],
                                delta_ref.at[batch, head, rows],
                            )
                        )
                        plgpu.barrier_wait(full.at[slot])
                        # Both before the first product, or ptxas injects a wait.
                        s_acc[...] = zero_tile(_ROWS, block_kv)
                        dp_acc[...] = zero_tile(_ROWS, block_kv)
                        key_columns.contract(s_acc, q_smem.at[slot, warpgroup], k_smem.at[slot])
                        value_columns.contract(dp_acc, o_smem.at[slot, warpgroup], v_smem.at[slot])
                        loaded = elements.load(*own, block_kv, early=True, bias=own_bias)

                        logits = plgpu.wgmma_accumulator_load(s_acc, wait_n=value_columns.tiles)

                        def bounds():
                            last_row = problem.query_length - 1
                            return load_intervals(intervals_ref.at[batch], first_row, last_row)

                        def hidden(weights, fill):
                            weights = hide(
                                weights, problem, lambda: first_row, first_key, bounds, fill
                            )
                            if problem.segmented:
                                query_ids, key_ids = (ref.at[batch] for ref in ids_refs)
                                ids = load_rows(query_ids, first_row, problem.query_length - 1)
                                equal = equal_columns(ids, key_ids, first_key, block_kv)
                                weights = keep_bits(weights, equal, fill)
                            return masked(weights, loaded, fill)

                        if has_cap:
                            logits, _ = soft_cap.capped(logits, loaded, problem)
                            logits = hidden(logits, soft_cap.UNSEEN)
                            minus_lse = spread(start, logits.shape)
                            _, weights = soft_cap.capped_weights(logits, minus_lse, problem)
                        else:
                            place = lambda: (batch, head, first_row)
                            weights = weights_by_query(
                                logits, loaded, problem, start, far_ref, place
                            )
                            weights = hidden(weights, 0.0)
                        # A row that does not count may have a bias that is NaN.
                        weights = jnp.where(spread(start, weights.shape) > -jnp.inf, weights, 0.0)
                        if problem.dropout:
                            query_words = dropout.of_rows(batch, head, first_row)
                            weights = dropout.negated(weights, query_words, batch, first_key)
                        d_weights = plgpu.wgmma_accumulator_load(dp_acc, wait_n=0)
                        slot_free.arrive(slot)
                        minus_deltas = spread(minus_delta, weights.shape)
                        return total + d_logits(weights, d_weights, minus_deltas, problem)

                    def sum_of_steps():
                        own_bias = None
                        if pieces.kind == "whole":  # that of all steps
                            bias = elements.bias_of(*own_place(0), block_kv)()
                            own_bias = lambda: bias
                        add = functools.partial(add_step, own_bias=own_bias)
                        return lax.fori_loop(jnp.int32(0), count, add, zero_tile(_ROWS, block_kv))

                    total = lax.cond(count > 0, sum_of_steps, lambda: zero_tile(_ROWS, block_kv))
                    if problem.dropout:
                        total *= problem.d_logit_unit
                    batch, head, first_row, first_key = own_place(0)
                    own_rows, own_keys = pl.ds(first_row, _ROWS), pl.ds(first_key, block_kv)
                    if pieces.kind == "whole":
                        own = div_rem(entry, pieces.shape[1])
                        target = gradient_ref.at[*own, own_rows, own_keys]
                        store_tile(target, total.astype(target.dtype))
                    elif pieces.kind == "columns":
                        warps = pl.ds(warpgroup * _WARPS, _WARPS)
                        store_column_sums(gradient_ref.at[batch, head, warps, own_keys], total)
                    else:
                        store_rows(gradient_ref.at[batch, head, own_rows], total.sum(axis=1))

            accumulator = plgpu.ACC((_ROWS, block_kv), jnp.float32)
            pl.run_scoped(compute, accumulator, accumulator)

        @pl.when(warpgroup == _CONSUMERS)
        def _producer():
            plgpu.set_max_registers(_REGISTERS[1], action="decrease")

            @over_pieces
            def _whole_piece(entry, place, count, j):
                @pl.loop(jnp.int32(0), count)
                def _load_step(step):
                    batch, head, row_block, key_block = place(step)
                    kv_head = lax.div(head, jnp.int32(problem.group))
                    slot = slot_of(j + step)
                    pl.when(j + step >= stages)(lambda: slot_free.wait(slot))
                    for consumer in range(_CONSUMERS):
                        rows = pl.ds(row_block * BLOCK_Q + consumer * _ROWS, _ROWS)
                        of_rows, own = (batch, rows, head), (slot, consumer)
                        key_columns.load(q_ref.at[*of_rows], q_smem.at[*own], full.at[slot])
                        value_columns.load(do_ref.at[*of_rows], o_smem.at[*own], full.at[slot])
                    of_keys = batch, pl.ds(key_block * block_kv, block_kv), kv_head
                    key_columns.load(k_ref.at[*of_keys], k_smem.at[slot], full.at[slot])
                    value_columns.load(v_ref.at[*of_keys], v_smem.at[slot], full.at[slot])

    kernel = plgpu.kernel(
        attention_bias_gradient,
        out_type=pieces.gradient(),
        grid=(thread_blocks,),
        grid_names=("block",),
        num_threads=_CONSUMERS + 1,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=HAND_ORDERED,
    )
    return lambda *operands: kernel(jnp.asarray(steps), *operands)
