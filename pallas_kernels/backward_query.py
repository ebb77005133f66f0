"""The gradient of the query alone, for gradients that are the same bit by bit from run to run.

In `backward.py` a thread block owns keys, so that many of them add to one row of dQ, in the order
in which they get to it. Here it owns `block_q` query rows of one head, 64 for each consumer
warpgroup, and adds up what each key block gives in a fixed order. Logits and their gradients are
computed once more for it: seven products a tile pair in all, where `backward.py` with dQ has five.
Above width 128 it serves where `backward_query_product.py` does not.

    producer   Q | K0 dO V0 | K1 V1 | ...                TMA, K and V into circular buffers
    consumer   S = Q K';  dP = dO V'
               P = exp2(S * scale * log2(e) - LSE * log2(e))      while dP is computed
               dS = P * (dP - delta)
               dQ += dS K                                         dS from registers

A consumer has no product in flight from one step to the next; the other's fill the gap, as the two
meet only where the producer waits for both. Where registers are too few for 256 columns of dQ,
two kernels make half of them each. Key blocks run from the first to the last: under a causal mask
tiles differ in the last, so that those that begin at the same time read the same keys, which is
easy on L2. First come those that need no mask, then those that do, then those that this consumer
cannot see at all; with a sliding window, before them those it cannot see, and more that need a
mask. As in `backward.py`, -LSE and -delta come from `row_statistics.py`, and rows that do not count
have a start of -inf.

Barriers. Full: an mbarrier for Q, for dO, and for each slot of K and of V, completed by TMA. Free:
a named barrier a slot, the consumers arrive and the producer waits.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import intervals as run_time_intervals
from pallas_kernels import scheduler, segments, soft_cap
from pallas_kernels.columns import Columns
from pallas_kernels.config import (
    BACKWARD_CONSUMERS,
    FORWARD_SECTION_BYTES,
    LOG2E,
    SM_COUNT,
    BackwardQueryConfig,
    Problem,
)
from pallas_kernels.dropout import DropoutRefs, Words, d_logits
from pallas_kernels.dropout import operands as dropout_operands
from pallas_kernels.element_arrays import NO_ELEMENTS, Elements
from pallas_kernels.elements import NOTHING_LOADED, ElementRefs
from pallas_kernels.elements import masked as masked_by_element
from pallas_kernels.far_rows import start_and_share_of_marks, weights_by_query
from pallas_kernels.interpret import interpreting
from pallas_kernels.online_softmax import spread
from pallas_kernels.ptx.arithmetic import div_rem
from pallas_kernels.ptx.barriers import HAND_ORDERED, NamedBarriers, twins_of, with_twins
from pallas_kernels.ptx.compiler import fresh_zero
from pallas_kernels.ptx.loads import load_intervals, load_rows
from pallas_kernels.ptx.masks import equal_columns, keep_bits, keep_columns_from, keep_columns_to
from pallas_kernels.ptx.mlir import zero_tile

_CONSUMERS = BACKWARD_CONSUMERS
_ROWS = 64  # query rows of a consumer: the M of a wgmma
_PER_ROW = plgpu.Layout.WGMMA.reduce(1)


def query_gradient(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    d_out: jax.Array,
    start: jax.Array,
    minus_delta: jax.Array,
    far: jax.Array,
    intervals: jax.Array | None = None,
    ids: tuple[jax.Array, jax.Array] | None = None,
    elements: Elements = NO_ELEMENTS,
    dropout_words: Words | None = None,
    *,
    problem: Problem,
    config: BackwardQueryConfig,
) -> jax.Array:
    """Gradient of the query, the same bit by bit from run to run.

    Args:
      query, d_out: `[B, T, N, H]` and `[B, T, N, h]`; T a multiple of 8, rows from
        problem.query_length on zero. d_out is finite in rows that see no key.
      key, value: `[B, S, K, H]` and `[B, S, K, h]`; S a multiple of 8, rows from problem.key_length
        on zero, finite where no query sees them.
      start: of `row_statistics`, of T up to a multiple of config.block_q: -LSE / unit; -inf for
        rows that see no key or are beyond the end.
      minus_delta: `[B, N, as start]` float32, dLSE - rowsum(d_out * out), times
        problem.delta_unit; 0 where start is -inf.
      far: of rows far from 0, as `far_rows.far_shape` has it.
      intervals: None, or the keys that each query sees, `[B, 2, problem.query_length]` int32, for a
        problem that is dynamic.
      ids: None, or for a problem that is segmented the segment ids of queries and keys, int32
        `[B, problem.query_length]` and `[B, problem.key_length]` (`segments.py`).
      elements: mask and bias of a problem that has them (`element_arrays.py`).
      dropout_words: None, or for a problem with dropout the words of queries and keys, as
        `dropout.Words` has them.
      problem: static description; its lengths may be up to 7 below T and S.
      config: tile sizes.

    Returns:
      `[B, T, N, H]` in the input dtype. Rows that see no key are 0.
    """
    words = dropout_operands(dropout_words, keys=config.block_kv)
    operands = *words, *elements.operands(), query, key, value, d_out, start, minus_delta, far
    build = functools.partial(_build, problem, config, query.shape[1], interpreting())
    parts = range(len(_key_parts(problem)))
    if len(parts) == 1:
        return build(0)(intervals, ids, *operands)
    d_query = jax.new_ref(jnp.zeros(query.shape, query.dtype))
    for part in parts:
        build(part)(intervals, ids, *operands, d_query)
    return jax.freeze(d_query)


def _key_parts(problem: Problem) -> list[Columns]:
    """The columns of query and key: all, or where registers are short parts of dQ, a kernel each.

    A part takes S and dP once more, but half of the registers that 256 columns of dQ do.
    """
    columns = Columns.whole(problem.width)
    options = (
        problem.dynamic,
        problem.segmented,
        problem.has_mask,
        problem.has_bias,
        problem.soft_cap is not None,
        problem.dropout > 0,
    )
    # In boxes more addresses are in use.
    most = 2 if columns.tiles == 1 else 1
    is_short = sum(options) > most or (problem.segmented and problem.has_bias)
    return columns.in_parts(128) if columns.size > 224 and is_short else [columns]


def hide(weights, problem: Problem, first_row, first_key, bounds, fill: float = 0.0) -> jax.Array:
    """`(64, n)` weights with `fill` where the row may not see the key, or there is no such key.

    Args:
      first_row: gives the first row; called where it is needed, as registers are short.
      first_key: the key of the first column.
      bounds: gives the interval of each row, `(64,)` first and end, of a problem that is dynamic.
    """
    if problem.dynamic:
        first, end = bounds()
        weights = keep_columns_from(weights, first - first_key, fill)
        return keep_columns_to(weights, end - (first_key + 1), fill)
    row = plgpu.broadcasted_iota(jnp.int32, (_ROWS,), 0, layout=_PER_ROW)
    if problem.lowest is not None:
        first = row + (first_row() + problem.lowest)
        weights = keep_columns_from(weights, first - first_key, fill)
    if problem.highest is not None:
        last = jnp.minimum(row + (first_row() + problem.highest), problem.key_length - 1)
    elif problem.key_length % weights.shape[1]:
        last = row * 0 + (problem.key_length - 1)
    else:
        return weights
    return keep_columns_to(weights, last - first_key, fill)


class _KeyBlocks(NamedTuple):
    """The key blocks that some rows see, and those of them in which no row needs a mask."""

    first: Any
    end: Any
    first_unmasked: Any
    end_unmasked: Any


def _key_blocks(problem: Problem, block_kv: int, first_row, rows: int, xp) -> _KeyBlocks:
    """Which key blocks some rows need: `first <= first_unmasked <= end_unmasked <= end`.

    Args:
      first_row: traced int32, or an array with `xp` numpy.
      rows: how many rows from there on, some of which may be beyond the last query.
    """
    last_row = xp.minimum(first_row + rows, problem.query_length) - 1
    if problem.highest is None:
        seen_by_first = seen_by_last = xp.full_like(first_row, problem.key_length)
    else:
        seen = lambda row: xp.clip(row + (1 + problem.highest), 0, problem.key_length)
        seen_by_first, seen_by_last = seen(first_row), seen(last_row)
    seen_by_last = xp.where(first_row < problem.query_length, seen_by_last, 0)
    end = (seen_by_last + (block_kv - 1)) // block_kv
    end_unmasked = xp.minimum(seen_by_first // block_kv, end)
    if problem.lowest is None:
        return _KeyBlocks(0, end, 0, end_unmasked)
    first_key = lambda row: xp.maximum(row + problem.lowest, 0)
    first = xp.minimum(first_key(first_row) // block_kv, end)
    first_unmasked = (first_key(last_row) + (block_kv - 1)) // block_kv
    first_unmasked = xp.clip(first_unmasked, first, end)
    return _KeyBlocks(first, end, first_unmasked, xp.maximum(end_unmasked, first_unmasked))


def _key_blocks_of(
    intervals: jax.Array | np.ndarray,
    block_kv: int,
    rows: int,
    ids: tuple[jax.Array, jax.Array] | None = None,
) -> _KeyBlocks:
    """The same of each tile of `rows` rows, `[B, tiles]`.

    A row that sees nothing needs no mask, as it has no weight.

    Args:
      intervals: the keys `[B or 1, 2, T]` of each query.
      ids: segment ids of queries and keys, if the problem is segmented.
    """
    reach = run_time_intervals.reach(intervals, rows, empty_rows_count=False)
    blocks = segments.Blocks(
        first=reach.first // block_kv,
        end=-(-reach.end // block_kv),
        first_unmasked=-(-reach.common_first // block_kv),
        end_unmasked=reach.common_end // block_kv,
    )
    if ids is not None:
        blocks = segments.restricted(blocks, segments.sharing(*ids, rows, block_kv))
    end = blocks.end
    first = jnp.minimum(blocks.first, end)
    first_unmasked = jnp.clip(blocks.first_unmasked, first, end)
    end_unmasked = jnp.clip(blocks.end_unmasked, first_unmasked, end)
    return _KeyBlocks(first, end, first_unmasked, end_unmasked)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """One of the kernels that make dQ.

    Attributes:
      problem: static description.
      config: tile sizes.
      part: of `_key_parts`, the columns of dQ that it makes.
    """

    problem: Problem
    config: BackwardQueryConfig
    part: int

    @functools.cached_property
    def key_parts(self) -> list[Columns]:
        return _key_parts(self.problem)

    @property
    def dq_columns(self) -> Columns:
        return self.key_parts[self.part]

    @functools.cached_property
    def value_columns(self) -> Columns:
        return Columns.whole(self.problem.value_width)

    # --- registers ---

    @property
    def _is_wide(self) -> bool:
        return self.dq_columns.size > 192

    @property
    def crowded(self) -> bool:
        """Whether there are none for bounds or ids, or for addresses of the order over the loop."""
        p = self.problem
        return self._is_wide and p.dropout > 0 and (p.has_elements or p.by_batch)

    @property
    def weights_first(self) -> bool:
        """Whether there are none for dP: beside a cap, or elements and 256 columns of dQ."""
        beside_elements = self._is_wide and self.problem.has_elements
        return self.crowded or self.problem.has_cap or beside_elements

    # --- tiles ---

    @property
    def tiles(self) -> int:
        """Of a head."""
        return -(-self.problem.query_length // self.config.block_q)

    @functools.cached_property
    def key_blocks(self) -> _KeyBlocks:
        """Of each tile. What is known at run time only is left out."""
        first_rows = np.arange(self.tiles) * self.config.block_q
        block_kv, block_q = self.config.block_kv, self.config.block_q
        return _key_blocks(self.problem, block_kv, first_rows, block_q, np)

    @functools.cached_property
    def any_mask(self) -> bool:
        blocks = self.key_blocks
        return self.problem.has_far_edge or bool((blocks.end_unmasked < blocks.end).any())

    @functools.cached_property
    def order(self) -> np.ndarray:
        """The tiles as thread blocks take them: of each its number, head and key blocks."""
        p, counts = self.problem, self.key_blocks.end - self.key_blocks.first
        section = scheduler.heads_per_section(
            FORWARD_SECTION_BYTES,
            bytes_per_kv_head=p.key_length * p.pair_bytes,
            tiles_per_kv_head=self.tiles * p.group,
            slots=SM_COUNT,
            kv_heads=p.batch * p.kv_heads,
            group=p.group,
        )
        tile, head = scheduler.tile_order(counts, p.batch * p.heads, section)
        order = np.stack([tile, head, counts[tile]], axis=1)
        if p.has_far_edge:
            order = np.c_[order, self.key_blocks.end[tile]]
        return order.astype(np.int32)

    def order_of(self, intervals, ids) -> jax.Array:
        """The order, with key blocks by batch entry, and `_KeyBlocks` of each consumer."""
        p, (tile, head, *_) = self.problem, self.order.T
        if intervals is None:
            intervals = run_time_intervals.of_bounds_of_queries(p)
        blocks = _key_blocks_of(intervals, self.config.block_kv, _ROWS, ids)
        of_consumers = jnp.stack([self._with_all_consumers(x) for x in blocks], axis=-1)
        of_consumers = of_consumers.reshape(p.batch, self.tiles, _CONSUMERS, -1)
        first, end = of_consumers[..., 0], of_consumers[..., 1]
        tile_end = end.max(-1, keepdims=True)
        tile_first = jnp.where(first < end, first, tile_end).min(-1, keepdims=True)
        # A consumer that sees nothing has no blocks, at the tile's first.
        of_consumers = jnp.maximum(of_consumers, tile_first[..., None])
        by_consumer = of_consumers.reshape(p.batch, self.tiles, -1)
        numbers = jnp.concatenate([tile_end - tile_first, tile_end, by_consumer], axis=-1)
        numbers = numbers[head // p.heads, tile]
        return jnp.concatenate([jnp.asarray(self.order[:, :2]), numbers], axis=1)

    def _with_all_consumers(self, of_consumers: jax.Array) -> jax.Array:
        """`[B, 2 * tiles]`, with 0 where the last consumer has no rows."""
        missing = _CONSUMERS * self.tiles - of_consumers.shape[1]
        return jnp.pad(of_consumers, ((0, 0), (0, missing)))

    # --- shared memory and barriers ---

    @functools.cached_property
    def barriers(self) -> dict[str, NamedBarriers]:
        """Those with a number, by name."""
        k_stages, v_stages = self.config.stages
        k_free = NamedBarriers(first=_CONSUMERS + 2, count=k_stages, arrivers=_CONSUMERS)
        v_free = NamedBarriers(k_free.first + k_stages, v_stages, arrivers=_CONSUMERS)
        return dict(k_free=k_free, v_free=v_free)

    def scratch(self, interpret: bool) -> dict[str, Any]:
        """Types of shared memory and barriers, by name."""
        (k_stages, v_stages), block_kv = self.config.stages, self.config.block_kv
        parts, values, dtype = self.key_parts, self.value_columns, self.problem.dtype
        key_tiles = sum(columns.tiles for columns in parts)
        found: dict[str, Any] = dict(
            q_smem=[columns.smem(_CONSUMERS, _ROWS, dtype=dtype) for columns in parts],
            o_smem=values.smem(_CONSUMERS, _ROWS, dtype=dtype),
            k_smem=[columns.smem(k_stages, block_kv, dtype=dtype) for columns in parts],
            v_smem=values.smem(v_stages, block_kv, dtype=dtype),
            q_full=plgpu.Barrier(num_arrivals=_CONSUMERS * key_tiles),
            o_full=plgpu.Barrier(num_arrivals=_CONSUMERS * values.tiles),
            k_full=plgpu.Barrier(num_arrivals=key_tiles, num_barriers=k_stages),
            v_full=plgpu.Barrier(num_arrivals=values.tiles, num_barriers=v_stages),
        )
        if interpret:
            found["twins"] = twins_of(self.barriers)
        return found


@functools.lru_cache
def _build(
    problem: Problem, config: BackwardQueryConfig, query_rows: int, interpret: bool, part: int
):
    """The kernel for one of `_key_parts` of dQ: its result, or in a ref if there are more."""
    plan = _Plan(problem, config, part)

    def attention_backward_query(*refs, **scratch):
        block = _ThreadBlock(plan, refs, **scratch)
        pl.when(block.warpgroup < _CONSUMERS)(lambda: _consume(block))
        pl.when(block.warpgroup == _CONSUMERS)(lambda: _produce(block))

    shape = problem.batch, query_rows, problem.heads, problem.width
    kernel = plgpu.kernel(
        attention_backward_query,
        out_type=jax.ShapeDtypeStruct(shape, problem.dtype) if len(plan.key_parts) == 1 else (),
        grid=(len(plan.order),),
        grid_names=("block",),
        num_threads=_CONSUMERS + 1,
        thread_name="warpgroup",
        scratch_types=plan.scratch(interpret),
        compiler_params=HAND_ORDERED,
    )

    def run(intervals, ids, *operands):
        if not problem.by_batch:
            return kernel(jnp.asarray(plan.order), *operands)
        masks: tuple[jax.Array, ...] = () if intervals is None else (intervals,)
        if ids is not None:
            query_ids, key_ids = ids
            masks = (*masks, query_ids, segments.padded(key_ids, config.block_kv))
        return kernel(plan.order_of(intervals, ids), *masks, *operands)

    return run


class _ThreadBlock:
    """What producer and consumers share: operands, dQ, buffers, barriers, and the tile.

    Attributes:
      plan: of the kernel.
      q, k, v, d_out, start, delta, far, dq: refs of operands and result, in global memory.
      masks: refs of intervals if dynamic, then of ids if segmented.
      dropout, elements: of rows and keys.
      q_smem, k_smem: lists of buffers of `Plan.key_parts`; o_smem, v_smem: buffers.
      q_full, o_full, k_full, v_full: mbarriers a buffer, completed by TMA.
      k_free, v_free: see `_Plan.barriers`.
      warpgroup: index of this one; the consumers come first.
      blocks: how many key blocks the tile has; first_block, the first of these.
    """

    def __init__(
        self, plan: _Plan, refs, *, q_smem, o_smem, k_smem, v_smem, q_full, o_full, k_full, v_full,
        twins=None,
    ):  # fmt: skip
        problem = plan.problem
        self.plan = plan
        self.q_smem, self.k_smem, self.o_smem, self.v_smem = q_smem, k_smem, o_smem, v_smem
        self.q_full, self.o_full, self.k_full, self.v_full = q_full, o_full, k_full, v_full
        self._order, *refs = refs
        count = int(problem.dynamic) + 2 * int(problem.segmented)
        self.masks = refs[:count]
        self.dropout, refs = DropoutRefs.split(problem, refs[count:])
        self.elements, refs = ElementRefs.split(problem, refs)
        self.q, self.k, self.v, self.d_out, self.start, self.delta, self.far, self.dq = refs
        self.k_free, self.v_free = with_twins(plan.barriers, twins)
        self.warpgroup = lax.axis_index("warpgroup")
        self._number = lax.axis_index("block")
        self.blocks = self.ordered(2)
        self.first_block = self.ordered(3) - self.blocks if problem.has_far_edge else 0

    def ordered(self, column):
        """An entry of the order."""
        crowded = self.plan.crowded
        return self._order[self._number + fresh_zero() if crowded else self._number, column]

    def key_block_of(self, j):
        anew = self.plan.crowded and self.plan.problem.has_far_edge
        return (self.ordered(3) - self.ordered(2) if anew else self.first_block) + j

    def first_key_of(self, j):
        return self.key_block_of(j) * self.plan.config.block_kv

    def k_slot(self, j):
        return lax.rem(j, jnp.int32(self.plan.config.stages[0]))

    def v_slot(self, j):
        return lax.rem(j, jnp.int32(self.plan.config.stages[1]))

    def batch_and_head(self):
        """Read where needed: kept over the loop, they cost registers."""
        return div_rem(self.ordered(1), self.plan.problem.heads)

    def first_row_of(self, consumer):
        return self.ordered(0) * self.plan.config.block_q + consumer * _ROWS


# --- the consumers --------------------------------------------------------------------------------


def _consume(block: _ThreadBlock) -> None:
    plan, block_kv = block.plan, block.plan.config.block_kv
    plgpu.set_max_registers(plan.config.registers[0], action="increase")
    pl.run_scoped(
        lambda *accumulators: _Consumer(block, *accumulators).run(),
        plgpu.ACC((_ROWS, plan.dq_columns.size), jnp.float32),
        plgpu.ACC((_ROWS, block_kv), jnp.float32),
        plgpu.ACC((_ROWS, block_kv), jnp.float32),
    )


class _Consumer:
    """dQ of 64 rows.

    Attributes:
      dq_acc, s_acc, dp_acc: accumulators.
      start, minus_delta, query_words: of the rows; words None without dropout.
    """

    def __init__(self, block: _ThreadBlock, dq_acc, s_acc, dp_acc):
        self.block, self.plan = block, block.plan
        self.dq_acc, self.s_acc, self.dp_acc = dq_acc, s_acc, dp_acc
        self.start, _ = self.start_and_share()
        self.minus_delta = self.per_row(block.delta)
        self.query_words = None
        if self.plan.problem.dropout:
            batch, head = block.batch_and_head()
            self.query_words = block.dropout.of_rows(batch, head, self.first_row())

    def run(self) -> None:
        block, plan, problem = self.block, self.plan, self.plan.problem
        own = self.key_blocks()
        plgpu.barrier_wait(block.q_full)
        plgpu.barrier_wait(block.o_full)
        masking = functools.partial(self.step, needs_mask=True)
        # The bias of rows that see nothing may be NaN.
        mask_throughout = problem.by_batch and problem.has_bias
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

    def key_blocks(self) -> _KeyBlocks:
        """Of these rows."""
        block, problem = self.block, self.plan.problem
        if problem.by_batch:
            columns = range(len(_KeyBlocks._fields))
            own_first = 4 + len(columns) * block.warpgroup
            return _KeyBlocks(*(block.ordered(own_first + n) for n in columns))
        own = _key_blocks(problem, self.plan.config.block_kv, self.first_row(), _ROWS, jnp)
        if problem.has_far_edge:  # a consumer that sees nothing has none, at the tile's first
            own = _KeyBlocks(*(jnp.maximum(n, block.first_block) for n in own))
        return own

    # --- rows ---

    def first_row(self):
        return self.block.first_row_of(self.block.warpgroup)

    def place(self):
        """Batch entry, head and first row."""
        return *self.block.batch_and_head(), self.first_row()

    def per_row(self, ref, *more):
        place = *self.block.batch_and_head(), *more, pl.ds(self.first_row(), _ROWS)
        return plgpu.load(ref.at[*place], layout=_PER_ROW, optimized=False)

    def start_and_share(self):
        """Of each row, with the share that dQ is multiplied with, where there is one."""
        block, problem = self.block, self.plan.problem
        start = self.per_row(block.start, 0)
        if problem.has_shares:
            return start, self.per_row(block.start, 1)
        if problem.has_bias or not problem.has_marks:
            return start, None
        return start_and_share_of_marks(start, block.far, self.place(), problem)

    def compare_ids(self, j):
        """Where keys of step j and rows have equal segment ids; None if there are none."""
        block, problem, block_kv = self.block, self.plan.problem, self.plan.config.block_kv
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
        plgpu.barrier_wait(block.k_full.at[block.k_slot(j)])
        block.k_free.arrive(block.k_slot(j))
        plgpu.barrier_wait(block.v_full.at[block.v_slot(j)])
        block.v_free.arrive(block.v_slot(j))

    def step(self, j, _, *, needs_mask: bool) -> None:
        """What the keys of a block add to dQ."""
        block, plan, problem = self.block, self.plan, self.plan.problem
        # Addresses made anew each step: registers are short.
        ks, vs, own_rows = block.k_slot(j), block.v_slot(j), block.warpgroup + fresh_zero()
        equal_ids = self.compare_ids(j) if needs_mask else None
        plgpu.barrier_wait(block.k_full.at[ks])
        # Both before the first product, or ptxas injects a wait.
        self.s_acc[...] = zero_tile(_ROWS, plan.config.block_kv)
        if not plan.weights_first:
            self.dp_acc[...] = zero_tile(_ROWS, plan.config.block_kv)
        for columns, q, k in zip(plan.key_parts, block.q_smem, block.k_smem, strict=True):
            columns.contract(self.s_acc, q.at[own_rows], k.at[ks])
        if not plan.weights_first:
            self.issue_d_weights(own_rows, vs)
        loaded = self.load_elements(j) if problem.has_elements else NOTHING_LOADED
        open_products = 0 if plan.weights_first else plan.value_columns.tiles
        logits = plgpu.wgmma_accumulator_load(self.s_acc, wait_n=open_products)
        mask = functools.partial(self.masked, j=j, equal_ids=equal_ids)
        weights = self.weights(logits, loaded, mask if needs_mask else None)
        if problem.dropout:
            batch, _ = block.batch_and_head()
            first_key = block.first_key_of(j)
            weights = block.dropout.negated(weights, self.query_words, batch, first_key)
        if plan.weights_first:
            self.dp_acc[...] = zero_tile(_ROWS, plan.config.block_kv)
            self.issue_d_weights(own_rows, vs)
        d_weights = plgpu.wgmma_accumulator_load(self.dp_acc, wait_n=0)
        block.v_free.arrive(vs)
        minus_deltas = spread(self.minus_delta, weights.shape)
        ds = d_logits(weights, d_weights, minus_deltas, problem).astype(problem.dtype)
        plan.dq_columns.expand(self.dq_acc, ds, block.k_smem[plan.part].at[ks])
        plgpu.wgmma_wait(0)
        block.k_free.arrive(ks)

    def load_elements(self, j):
        block, block_kv = self.block, self.plan.config.block_kv
        batch, head = block.batch_and_head()
        first_key = block.first_key_of(j)
        return block.elements.load(batch, head, self.first_row(), first_key, block_kv)

    def issue_d_weights(self, own_rows, slot) -> None:
        block = self.block
        plgpu.barrier_wait(block.v_full.at[slot])
        d_out, value = block.o_smem.at[own_rows], block.v_smem.at[slot]
        self.plan.value_columns.contract(self.dp_acc, d_out, value)

    def weights(self, logits, loaded, mask: Callable | None):
        """Weights; of rows far from 0, a share short of them, where dQ is multiplied with it."""
        problem = self.plan.problem
        if self.plan.problem.has_cap:
            logits, _ = soft_cap.capped(logits, loaded, problem)
            if mask:
                logits = mask(logits, fill=soft_cap.UNSEEN)
            logits = masked_by_element(logits, loaded, soft_cap.UNSEEN)
            minus_lse = spread(self.start, logits.shape)
            _, weights = soft_cap.capped_weights(logits, minus_lse, problem)
            return weights
        if problem.has_bias:
            far = self.block.far
            weights = weights_by_query(logits, loaded, problem, self.start, far, self.place)
        else:
            factor = problem.scale * LOG2E
            of_rows = spread(self.start * factor, logits.shape)
            weights = jnp.minimum(jnp.exp2(logits * factor + of_rows), 1.0)
        if mask:
            weights = mask(weights)
        return masked_by_element(weights, loaded, 0.0)

    def store_dq(self) -> None:
        block, plan, problem = self.block, self.plan, self.plan.problem
        dq = plgpu.wgmma_accumulator_load(self.dq_acc, wait_n=0)
        # dQ leaves from where Q was, once all warps have read it.
        plgpu.commit_smem()
        factor: float | jax.Array = problem.scale * problem.d_logit_unit
        if not (plan.problem.has_cap or problem.has_bias):
            _, share = self.start_and_share()
            factor = spread(share * factor, dq.shape)
        own_q = block.q_smem[plan.part].at[block.warpgroup]
        plan.dq_columns.put(own_q, (dq * factor).astype(problem.dtype))
        plgpu.commit_smem()
        batch, head = block.batch_and_head()
        rows = pl.ds(self.first_row(), _ROWS)
        plan.dq_columns.store(own_q, block.dq.at[batch, rows, head])
        plgpu.wait_smem_to_gmem(0)


# --- the producer ---------------------------------------------------------------------------------


def _produce(block: _ThreadBlock) -> None:
    """Loads Q and dO, and fills the buffers of K and V, each as it gets free."""
    plan, block_kv = block.plan, block.plan.config.block_kv
    plgpu.set_max_registers(plan.config.registers[1], action="decrease")
    batch, head = block.batch_and_head()
    kv_head = lax.div(head, jnp.int32(plan.problem.group))
    k_stages, v_stages = plan.config.stages

    def load_rows(ref, buffer, columns, full):
        for consumer in range(_CONSUMERS):
            source = ref.at[batch, pl.ds(block.first_row_of(consumer), _ROWS), head]
            columns.load(source, buffer.at[consumer], full)

    def load(ref, buffers, parts, slot, stages, full, free, j):
        pl.when(j >= stages)(lambda: free.wait(slot))
        source = ref.at[batch, pl.ds(block.first_key_of(j), block_kv), kv_head]
        for columns, buffer in zip(parts, buffers, strict=True):
            columns.load(source, buffer.at[slot], full.at[slot])

    def load_d_out():
        load_rows(block.d_out, block.o_smem, plan.value_columns, block.o_full)

    for columns, buffer in zip(plan.key_parts, block.q_smem, strict=True):
        load_rows(block.q, buffer, columns, block.q_full)

    @pl.loop(jnp.int32(0), block.blocks)
    def _(j):
        keys = block.k, block.k_smem, plan.key_parts
        load(*keys, block.k_slot(j), k_stages, block.k_full, block.k_free, j)
        pl.when(j == 0)(load_d_out)
        values = block.v, [block.v_smem], [plan.value_columns]
        load(*values, block.v_slot(j), v_stages, block.v_full, block.v_free, j)

    pl.when(block.blocks == 0)(load_d_out)
