"""Forward attention in FP8 (e4m3) for Hopper GPUs.

Tiles, lists of thread blocks, circular buffers and turns are those of `forward.py`. What is
different comes of five things (Shah et al. 2024, "FlashAttention-3", section 3.3).

Values. wgmma takes 8-bit operands along the axis of the sum only, so V must stand in shared memory
with its keys side by side. The producer warpgroup turns each tile after it came by TMA:

    producer   K0 V0 | Q' | K1 V0' V1 | K2 V1' V2 | ...       V' = V turned
    consumer   S=Q K0 | S=Q K1, O+=P V0' | S=Q K2, O+=P V1' | ...

with one step between TMA and turning, or `stages` - 1 of them.

Order of keys. Weights are the left operand of the second product, from registers, of which a thread
must have 4 keys side by side; the first product leaves it pairs. Sums do not ask for the order of
their terms, so nothing moves between threads: V' has its keys in the order of the weights.

Logits. wgmma gives them in float16 as fast as in float32, in half of the registers, which makes
room for a third consumer at width 128 and for 128 keys a step at 256. `half_softmax.py` makes
weights of two at a time. Products of query and key must be float16 numbers for that.

Range. e4m3 has 2^-9 to 448. The largest weight of a row is 2^4 when its reference is made, in the
first step, and may grow: once some weights have a sum of 448 or more their warp computes the step
again with a new reference. The search for maxima in every step that it spares was a sixth of the
instructions.

Scales. Those of a query's row and of a step's keys multiply the logits, in the exponent. The values
of a step have one scale, in which the output is kept: where the next step has another it is
multiplied by their ratio.

Hopper adds up FP8 products with some 14 bits. With `promotes`, those of a step are a product of
their own, and are added to the output in float32.
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

from pallas_kernels import half_softmax, online_softmax, segments
from pallas_kernels.columns import Columns
from pallas_kernels.config import ForwardFP8Config, Problem
from pallas_kernels.forward_block import Block
from pallas_kernels.forward_tiles import Tiles
from pallas_kernels.half_softmax import SUM_LIMIT
from pallas_kernels.interpret import interpreting
from pallas_kernels.online_softmax import RowState, spread
from pallas_kernels.ptx.barriers import NamedBarriers, fence_async_shared, twins_of, with_twins
from pallas_kernels.ptx.compiler import code_fence
from pallas_kernels.ptx.float8 import to_float8, transpose_float8
from pallas_kernels.ptx.loads import load_rows
from pallas_kernels.ptx.mlir import zero_tile
from pallas_kernels.ptx.operands import float8_operand
from pallas_kernels.ptx.stores import store_rows
from pallas_kernels.ptx.votes import any_from
from pallas_kernels.row_masks import ROWS, RowMasks

# Logits that are masked at a time, in float32.
_MASKED_COLUMNS = 16


class Scales(NamedTuple):
    """What FP8 operands are multiplied with, float32.

    Attributes:
      rows: `[B, N, T]`, what logits in units of query and key are multiplied with, in base 2, but
        for the key's scale; positive.
      keys: `[B, K, steps]`, of each `block_kv` keys; positive.
      values: `[B, K, steps]`, of each `block_kv` values; not 0.
    """

    rows: jax.Array
    keys: jax.Array
    values: jax.Array


class _Carry(NamedTuple):
    """What a consumer knows between two steps.

    Attributes:
      weights: of the last step, float8.
      output: `(64, h)` of all steps before the last; nothing where it is kept in the accumulator.
      state: of the softmax.
    """

    weights: jax.Array
    output: tuple[jax.Array, ...]
    state: RowState


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    scales: Scales,
    intervals: jax.Array | None = None,
    ids: tuple[jax.Array, jax.Array] | None = None,
    *,
    problem: Problem,
    config: ForwardFP8Config,
    out_dtype: np.dtype,
) -> tuple[jax.Array, jax.Array]:
    """Attention of FP8 operands.

    Args:
      query: float8_e4m3fn `[B, T, N, H]`; T a multiple of 8, H of 16.
      key: `[B, S, K, H]`; S a multiple of 8, of which problem.key_length are attended. The largest
        magnitudes of query and key, times H, are 65504 at most.
      value: `[B, S, K, h]`; h a multiple of 16; finite.
      scales: of the operands.
      intervals: None, or the keys that each query sees, `[B, 2, problem.query_length]` int32, for a
        problem that is dynamic (`intervals.py`).
      ids: None, or for a problem that is segmented the segment ids of queries and keys, int32
        `[B, problem.query_length]` and `[B, problem.key_length]` (`segments.py`).
      problem: static description; its lengths may be up to 7 below T and S.
      config: tile sizes.
      out_dtype: of the output, 16 bits.

    Returns:
      Output `[B, T, N, h]` and natural-log LSE `[B, N, ceil(T / block_q) * block_q]` float32. Rows
      from problem.query_length on are arbitrary in both. A row that sees no key: 0 and -inf.
    """
    kernel = _build(problem, config, query.shape[1], np.dtype(out_dtype), interpreting())
    # Key blocks run from the last to the first.
    ratios = jnp.pad(scales.values[..., 1:] / scales.values[..., :-1], ((0, 0), (0, 0), (0, 1)))
    operands = (query, key, value, *scales, ratios)
    if not problem.by_batch:
        return kernel(*operands)
    key_blocks = Tiles(problem, config).key_blocks_of(intervals, ids)
    optional: tuple[jax.Array, ...] = () if intervals is None else (intervals,)
    if ids is not None:
        optional = (*optional, ids[0], segments.padded(ids[1], config.block_kv))
    return kernel(key_blocks, *operands, *optional)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What the kernel does, and with what buffers and barriers.

    Attributes:
      problem: static description.
      config: tile sizes.
      out_dtype: of the output.
      interpret: whether it is for interpret mode.
    """

    problem: Problem
    config: ForwardFP8Config
    out_dtype: np.dtype
    interpret: bool

    @functools.cached_property
    def tiles(self) -> Tiles:
        return Tiles(self.problem, self.config)

    @property
    def registers_are_scarce(self) -> bool:
        """Then addresses and entries of lists are made anew where they are used."""
        p = self.problem
        return max(p.width, p.value_width) > 64 or p.by_batch

    @property
    def accumulated(self) -> Any:
        """The dtype of logits; interpret mode has no sums in float16."""
        return jnp.float32 if self.interpret else jnp.float16

    @property
    def lag(self) -> int:
        """Steps by which V is turned after it was asked for, where the next one goes."""
        return self.config.stages - 1

    @functools.cached_property
    def key_columns(self) -> Columns:
        return Columns.whole_float8(self.problem.width)

    @functools.cached_property
    def value_columns(self) -> Columns:
        return Columns.whole_float8(self.problem.value_width)

    @functools.cached_property
    def staged_columns(self) -> list[Columns]:
        """The output is staged some at a time."""
        out_columns = Columns(self.problem.value_width, self.value_columns.size)
        return out_columns.in_parts(self.config.staged_columns)

    @functools.cached_property
    def barriers(self) -> dict[str, NamedBarriers]:
        """Those with a number, by name."""
        c = self.config
        turn = NamedBarriers(first=c.consumers + 2, count=c.consumers, arrivers=1)
        k_free = NamedBarriers(turn.first + c.consumers, c.stages, arrivers=c.consumers)
        v_free = NamedBarriers(k_free.first + c.stages, c.value_stages, arrivers=c.consumers)
        q_free = NamedBarriers(v_free.first + c.value_stages, c.query_buffers, arrivers=c.consumers)
        return dict(turn=turn, k_free=k_free, v_free=v_free, q_free=q_free)

    def scratch(self) -> dict[str, Any]:
        """Types of shared memory and barriers, by name."""
        c, dtype = self.config, self.problem.dtype
        keys, values = self.key_columns, self.value_columns
        found: dict[str, Any] = dict(
            q_smem=keys.smem(c.query_buffers, c.consumers, ROWS, dtype=dtype),
            k_smem=keys.smem(c.stages, c.block_kv, dtype=dtype),
            v_smem=values.smem(self.lag, c.block_kv, dtype=dtype),
            turned_smem=plgpu.SMEM(
                (c.value_stages, values.size, c.block_kv),
                dtype,
                transforms=float8_operand(c.block_kv),
            ),
            o_smem=self.staged_columns[0].smem(c.consumers, ROWS, dtype=self.out_dtype),
            q_full=plgpu.Barrier(
                num_arrivals=c.consumers * keys.tiles, num_barriers=c.query_buffers
            ),
            k_full=plgpu.Barrier(num_arrivals=keys.tiles, num_barriers=c.stages),
            v_full=plgpu.Barrier(num_arrivals=values.tiles, num_barriers=self.lag),
            turned_full=plgpu.Barrier(num_arrivals=1, num_barriers=c.value_stages),
        )
        if self.interpret:
            found["twins"] = twins_of(self.barriers)
        return found


@functools.lru_cache
def _build(
    problem: Problem,
    config: ForwardFP8Config,
    padded_query_length: int,
    out_dtype: np.dtype,
    interpret: bool,
):
    plan = _Plan(problem, config, out_dtype, interpret)

    def attention_forward_fp8(*refs, **scratch):
        block = _ThreadBlock(plan, refs, **scratch)
        pl.when(block.warpgroup < config.consumers)(lambda: _consume(block))
        pl.when(block.warpgroup == config.consumers)(lambda: _produce(block))

    kernel = plan.tiles.kernel(
        attention_forward_fp8, plan.scratch(), padded_query_length, out_dtype
    )
    return plan.tiles.with_lists(kernel)


class _ThreadBlock(Block):
    """What producer and consumers share: operands, results, buffers, barriers, and the list.

    Attributes:
      plan: of the kernel.
      q, k, v, row_scales, key_scales, value_scales, ratios, o, lse: refs in global memory.
      masks: of rows and keys.
      q_smem, k_smem, v_smem: buffers that TMA fills; o_smem, one that it stores.
      turned_smem: V, turned.
      q_full, k_full, v_full, turned_full: mbarriers a buffer.
      turn, k_free, v_free, q_free: see `_Plan.barriers`.
      warpgroup: index of this one; the consumers come first.
    """

    def __init__(
        self, plan: _Plan, refs, *, q_smem, k_smem, v_smem, turned_smem, o_smem,
        q_full, k_full, v_full, turned_full, twins=None,
    ):  # fmt: skip
        problem = plan.problem
        self.plan = plan
        self.q_smem, self.k_smem, self.v_smem, self.o_smem = q_smem, k_smem, v_smem, o_smem
        self.turned_smem, self.turned_full = turned_smem, turned_full
        self.q_full, self.k_full, self.v_full = q_full, k_full, v_full
        self.schedule, self.key_blocks, self.q, self.k, self.v, *rest = refs
        self.row_scales, self.key_scales, self.value_scales, self.ratios, *rest = rest
        *optional, self.o, self.lse = rest
        self.masks = RowMasks(
            problem,
            plan.config.block_kv,
            plan.tiles.rows,
            intervals_ref=optional[0] if problem.dynamic else None,
            ids_refs=optional[int(problem.dynamic) :] if problem.segmented else None,
        )
        self.turn, self.k_free, self.v_free, self.q_free = with_twins(plan.barriers, twins)
        self.warpgroup = lax.axis_index("warpgroup")
        self.number = lax.axis_index("block")

    def tile_count(self):
        return self.listed(0)

    def locate(self, index):
        """Tile, batch entry and head of an index of the list."""
        return self.plan.tiles.locate(self.listed(1 + index))

    def raw_slot(self, step):
        """Of V before it is turned."""
        return lax.rem(step, jnp.int32(self.plan.lag))

    def value_slot(self, step):
        """Of V turned."""
        return lax.rem(step, jnp.int32(self.plan.config.value_stages))

    def kv_head_of(self, head):
        return lax.div(head, jnp.int32(self.plan.problem.group))

    def over_tiles(self, body: Callable, carry):
        """As `fori_loop`, but for the count, which is in no register during a tile."""

        def turn(at):
            index, _, carry = at
            return index + 1, *body(index, carry)

        begin = jnp.int32(0), self.tile_count() > 0, carry
        _, _, carry = lax.while_loop(lambda at: at[1], turn, begin)
        return carry


# --- the consumers --------------------------------------------------------------------------------


def _consume(block: _ThreadBlock) -> None:
    plan, config = block.plan, block.plan.config
    plgpu.set_max_registers(config.registers[0], action="increase")
    is_last = block.warpgroup == config.consumers - 1
    pl.when(is_last)(block.pass_turn)  # warpgroup 0 begins
    pl.run_scoped(
        lambda *accumulators: _Consumer(block, *accumulators).walk(),
        plgpu.ACC((ROWS, plan.value_columns.size), jnp.float32),
        plgpu.ACC((ROWS, config.block_kv), plan.accumulated),
    )


class _Consumer:
    """Attention of 64 rows of each tile.

    Attributes:
      p_acc: accumulator, with `promotes` of the output of one step, else of all.
      s_acc: of logits.
    """

    def __init__(self, block: _ThreadBlock, p_acc, s_acc):
        self.block, self.plan = block, block.plan
        self.p_acc, self.s_acc = p_acc, s_acc

    def walk(self) -> None:
        block, zero = self.block, jnp.int32(0)
        if not self.plan.config.promotes:
            self.p_acc[...] = zero_tile(ROWS, self.plan.value_columns.size)
        first = self.start_tile(zero, zero, *block.locate(0))
        block.over_tiles(self.whole_tile, (zero, first))
        plgpu.wait_smem_to_gmem(0)

    def first_row(self, tile):
        return self.plan.tiles.first_row(tile, self.block.warpgroup)

    # --- products ---

    def issue_logits(self, buffer, slot) -> None:
        block, plan = self.block, self.plan
        self.s_acc[...] = zero_tile(ROWS, plan.config.block_kv, plan.accumulated)
        queries = block.q_smem.at[buffer, block.warpgroup]
        plan.key_columns.contract(self.s_acc, queries, block.k_smem.at[slot])

    def load_logits(self, wait_n):
        return plgpu.wgmma_accumulator_load(self.s_acc, wait_n=wait_n).astype(jnp.float16)

    def issue_output(self, weights, slot) -> None:
        block = self.block
        if self.plan.config.promotes:
            self.p_acc[...] = zero_tile(ROWS, self.plan.value_columns.size)
        plgpu.barrier_wait(block.turned_full.at[slot])
        plgpu.wgmma(self.p_acc, weights, block.turned_smem.at[slot].transpose((1, 0)))

    def end_output(self, carry: _Carry):
        """The output with that of the last step, when its product has ended."""
        product = plgpu.wgmma_accumulator_load(self.p_acc, wait_n=0)
        if not self.plan.config.promotes:
            return product
        (output,) = carry.output
        return output + product

    # --- scales and masks ---

    def load_row_scales(self, tile, batch, head):
        last_row = self.plan.problem.query_length - 1
        return load_rows(self.block.row_scales.at[batch, head], self.first_row(tile), last_row)

    def row_scales_of(self, tile, batch, head) -> Callable[[], jax.Array]:
        """What gives the scales of rows: loads them only then unless they are kept."""
        if not self.plan.config.keeps_row_scales:
            return lambda: self.load_row_scales(tile, batch, head)
        row_scales = self.load_row_scales(tile, batch, head)
        return lambda: row_scales

    def masked(self, logits, first_row, first_key, bounds, ids, *, near=True):
        """Some columns at a time, as all in float32 would not fit."""
        parts = []
        for first in range(0, self.plan.config.block_kv, _MASKED_COLUMNS):
            part = logits[:, first : first + _MASKED_COLUMNS].astype(jnp.float32)
            own_ids = ids and (*ids[:2], ids[2] + first)
            part = self.block.masks.masked(
                part, first_row, first_key + first, bounds, own_ids, near=near
            )
            parts.append(part.astype(jnp.float16))
        return jnp.concatenate(parts, axis=1)

    # --- a tile ---

    def start_tile(self, index, steps, tile, batch, head) -> _Carry:
        """The first key block of a tile, with no other product open."""
        block = self.block
        row_scales = self.load_row_scales(tile, batch, head)

        @pl.when(index < block.tile_count())
        def _():
            plgpu.barrier_wait(block.q_full.at[block.query_buffer(index)])
            plgpu.barrier_wait(block.k_full.at[block.slot(steps)])

        self.issue_logits(block.query_buffer(index), block.slot(steps))
        logits = self.load_logits(wait_n=0)
        pl.when(index < block.tile_count())(lambda: block.k_free.arrive(block.slot(steps)))
        return self.begun(*self.first_softmax(logits, tile, batch, head, row_scales))

    def first_softmax(self, logits, tile, batch, head, row_scales):
        """Of a tile's first key block."""
        block = self.block
        key_block = block.end_of(tile, batch) - 1
        key_scale = block.key_scales[batch, block.kv_head_of(head), key_block]
        factor = row_scales * key_scale
        first_row, first_key = self.first_row(tile), key_block * self.plan.config.block_kv
        bounds = block.masks.load_bounds(batch, first_row)
        ids = block.masks.load_ids(batch, first_row, first_key)
        if self.plan.tiles.any_mask:
            logits = self.masked(logits, first_row, first_key, bounds, ids)
        weights, state = half_softmax.start(logits, factor)
        if bounds is not None:
            state = online_softmax.close(state, seeing=bounds[0] < bounds[1])
        return weights, state

    def begun(self, weights, state) -> _Carry:
        promotes, columns = self.plan.config.promotes, self.plan.value_columns.size
        output = (zero_tile(ROWS, columns),) if promotes else ()
        return _Carry(to_float8(weights), output, state)

    def key_step(self, j, carry, *, steps, index, place, row_scales, end_block, near, far):
        """Logits of step j's key block together with the output of the step before.

        Args:
          steps: before those of the tile.
          place: tile, batch entry and head.
          row_scales: gives them.
          near, far: whether it has a mask at that edge.
        """
        block, config = self.block, self.plan.config
        carry = _Carry(*carry)
        tile, batch, head = place
        key_block = end_block - 1 - j
        first_row, first_key = self.first_row(tile), key_block * config.block_kv
        key_scale = block.key_scales[batch, block.kv_head_of(head), key_block]
        ratio = block.ratios[batch, block.kv_head_of(head), key_block]
        own_scales = row_scales()
        if near or far:
            bounds = block.masks.load_bounds(batch, first_row)
            ids = block.masks.load_ids(batch, first_row, first_key)
        k_slot, v_slot = block.slot(steps + j), block.value_slot(steps + j - 1)
        plgpu.barrier_wait(block.k_full.at[k_slot])
        block.take_turn()
        self.issue_logits(block.query_buffer(index), k_slot)
        self.issue_output(carry.weights, v_slot)
        if config.products_first:
            logits = self.load_logits(wait_n=0)
            output = self.end_output(carry)
            block.pass_turn()
            block.k_free.arrive(k_slot)
            block.v_free.arrive(v_slot)
            code_fence(key_block)
        else:
            block.pass_turn()
            logits = self.load_logits(wait_n=1)
            block.k_free.arrive(k_slot)
        if near or far:
            logits = self.masked(logits, first_row, first_key, bounds, ids, near=near)
        factor = own_scales * key_scale
        weights, sums, state = half_softmax.go_on(logits, factor, carry.state)
        if not config.products_first:
            # A cast of the weights before the wait makes ptxas serialise every wgmma.
            weights, sums, state = lax.optimization_barrier((weights, sums, state))
            output = self.end_output(carry)
            block.v_free.arrive(v_slot)
        weights = to_float8(weights)

        def again(output, *_):
            weights, correction, state = half_softmax.renew(logits, factor, sums, carry.state)
            return output * spread(correction, output.shape), to_float8(weights), state

        def mend(output, weights, state):
            """What few steps need, behind one branch."""
            output, weights, state = lax.cond(
                any_too_large, again, lambda *x: x, output, weights, state
            )
            return output * ratio, weights, state

        any_too_large = any_from(SUM_LIMIT, sums)
        output, weights, state = lax.cond(
            any_too_large | (ratio != 1.0), mend, lambda *x: x, output, weights, state
        )
        if config.promotes:
            return _Carry(weights, (output,), state)
        self.p_acc[...] = output
        return _Carry(weights, (), state)

    def whole_tile(self, index, carry):
        """All steps of a tile but the first, which came under the tile before, and its end."""
        block, plan, has_far_edge = self.block, self.plan, self.plan.problem.has_far_edge
        steps, carry = carry
        tile, batch, _ = place = block.locate(index)
        blocks, needing_mask = block.needs(tile, batch, 0), block.needs(tile, batch, 1)
        near_end = jnp.maximum(needing_mask, 1)
        step = functools.partial(
            self.key_step,
            steps=steps,
            index=index,
            place=place,
            row_scales=self.row_scales_of(*place),
            end_block=block.end_of(tile, batch) if has_far_edge else blocks,
        )
        if plan.tiles.any_mask:
            masked_step = functools.partial(step, near=True, far=has_far_edge)
            carry = lax.fori_loop(jnp.int32(1), near_end, masked_step, carry)
        else:
            near_end = jnp.int32(1)
        far = blocks
        if has_far_edge:
            far = jnp.maximum(near_end, block.needs(tile, batch, 2))
        plain_step = functools.partial(step, near=False, far=False)
        carry = lax.fori_loop(near_end, far, plain_step, carry)
        if has_far_edge:
            far_step = functools.partial(step, near=False, far=True)
            carry = lax.fori_loop(far, blocks, far_step, carry)
        end_tile = self.end_tile_under_next
        if plan.config.query_buffers == 1:
            end_tile = self.end_tile_before_next
        more, carry = end_tile(index, steps + blocks, _Carry(*carry))
        return more, (steps + blocks, carry)

    # --- the end of a tile ---

    def end_tile_under_next(self, index, steps, carry: _Carry):
        """The next tile's first logits run with this tile's last output product."""
        block = self.block
        tile, batch, head = block.locate(index)
        next_tile, next_batch, next_head = block.locate(index + 1)
        buffer = block.query_buffer(index + 1)
        k_slot, v_slot = block.slot(steps), block.value_slot(steps - 1)
        block.q_free.arrive(block.query_buffer(index))
        more = index + 1 < block.tile_count()

        # After the last tile the logits are of no tile, and go nowhere.
        @pl.when(more)
        def _():
            plgpu.barrier_wait(block.q_full.at[buffer])
            plgpu.barrier_wait(block.k_full.at[k_slot])

        block.take_turn()
        self.issue_logits(buffer, k_slot)
        self.issue_output(carry.weights, v_slot)
        block.pass_turn()
        row_scales = self.load_row_scales(next_tile, next_batch, next_head)
        inverse = self.end_rows(carry.state, tile, batch, head)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        logits = self.load_logits(wait_n=1)
        pl.when(more)(lambda: block.k_free.arrive(k_slot))
        first = self.first_softmax(logits, next_tile, next_batch, next_head, row_scales)
        first = lax.optimization_barrier(first)
        output = self.end_output(carry)
        block.v_free.arrive(v_slot)
        begun_next = self.begun(*first)
        self.store_output(output, inverse, tile, batch, head)
        return more, begun_next

    def end_tile_before_next(self, index, steps, carry: _Carry):
        """The next queries arrive where this tile's were while it ends."""
        block = self.block
        tile, batch, head = block.locate(index)
        block.q_free.arrive(0)
        inverse = self.end_rows(carry.state, tile, batch, head)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        block.take_turn()
        self.issue_output(carry.weights, block.value_slot(steps - 1))
        block.pass_turn()
        output = self.end_output(carry)
        block.v_free.arrive(block.value_slot(steps - 1))
        self.store_output(output, inverse, tile, batch, head)
        more = index + 1 < block.tile_count()
        return more, self.start_tile(index + 1, steps, *block.locate(index + 1))

    def end_rows(self, state: RowState, tile, batch, head):
        """Stores the LSE; returns what the output is to be multiplied with."""
        block = self.block
        total = state.sums.sum(axis=1)
        inverse, lse, _ = online_softmax.normalised(state.reference, total)
        store_rows(block.lse.at[batch, head, pl.ds(self.first_row(tile), ROWS)], lse)
        last_block = block.end_of(tile, batch) - block.needs(tile, batch, 0)
        return inverse * block.value_scales[batch, block.kv_head_of(head), last_block]

    def store_output(self, output, inverse, tile, batch, head) -> None:
        """Divides by the row sums and sends output to global memory."""
        block, plan = self.block, self.plan
        staging = block.o_smem.at[block.warpgroup]
        output *= spread(inverse, output.shape)
        if not plan.config.promotes:
            self.p_acc[...] = zero_tile(ROWS, plan.value_columns.size)
        target = block.o.at[batch, pl.ds(self.first_row(tile), ROWS), head]
        for columns in plan.staged_columns:
            if columns.first > 0:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            values = output[:, columns.first : columns.first + columns.size].astype(plan.out_dtype)
            columns.put(staging, values, anew=plan.registers_are_scarce)
            plgpu.commit_smem()
            columns.store(staging, target)


# --- the producer ---------------------------------------------------------------------------------


def _produce(block: _ThreadBlock) -> None:
    plgpu.set_max_registers(block.plan.config.registers[1], action="decrease")
    _Producer(block).walk()


class _Producer:
    """Fills the buffers of all tiles, each as it gets free, and turns V."""

    def __init__(self, block: _ThreadBlock):
        self.block, self.plan = block, block.plan

    def walk(self) -> None:
        zero, lag = jnp.int32(0), self.plan.lag
        if self.plan.config.query_buffers > 1:
            self.block.load_queries(zero, self.block.locate(zero))
        steps = self.block.over_tiles(self.whole_tile, zero)
        pl.loop(jnp.maximum(steps - lag, 0), steps)(self.turn_values)

    def whole_tile(self, index, steps):
        """Keys and values of a tile, and queries of one to come."""
        block, plan, config = self.block, self.plan, self.plan.config
        tile, batch, head = block.locate(index)
        kv_head = block.kv_head_of(head)
        blocks = block.needs(tile, batch, 0)
        end_block = block.end_of(tile, batch) if plan.problem.has_far_edge else blocks

        def load(j):
            step = steps + j
            rows = pl.ds((end_block - 1 - j) * config.block_kv, config.block_kv)
            buffer = block.slot(step)
            pl.when(step >= config.stages)(lambda: block.k_free.wait(buffer))
            source = block.k.at[batch, rows, kv_head]
            plan.key_columns.load(source, block.k_smem.at[buffer], block.k_full.at[buffer])
            pl.when(step >= plan.lag)(lambda: self.turn_values(step - plan.lag))
            buffer = block.raw_slot(step)
            source = block.v.at[batch, rows, kv_head]
            plan.value_columns.load(source, block.v_smem.at[buffer], block.v_full.at[buffer])

        load(jnp.int32(0))
        wanted = index + (config.query_buffers - 1)
        pl.when(wanted < block.tile_count())(
            lambda: block.load_queries(wanted, block.locate(wanted))
        )
        pl.loop(jnp.int32(1), blocks)(load)
        return index + 1 < block.tile_count(), steps + blocks

    def turn_values(self, step) -> None:
        """Of a step, when they are there."""
        block = self.block
        slot = block.value_slot(step)
        plgpu.barrier_wait(block.v_full.at[block.raw_slot(step)])
        pl.when(step >= self.plan.config.value_stages)(lambda: block.v_free.wait(slot))
        for n, columns in enumerate(self.plan.value_columns.tile_slices):
            size = columns.stop - columns.start
            target = block.turned_smem.at[slot, pl.ds(columns.start, size)]
            transpose_float8(target, block.v_smem.at[block.raw_slot(step), n])
        fence_async_shared()
        # The warpgroup meets here: what follows may overwrite V.
        plgpu.barrier_arrive(block.turned_full.at[slot])
