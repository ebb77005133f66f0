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

import functools
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np

from pallas_kernels import segments
from pallas_kernels.config import ForwardFP8Config
from pallas_kernels.forward_fp8_block import Plan, ThreadBlock
from pallas_kernels.forward_fp8_consumer import consume
from pallas_kernels.forward_tiles import Tiles
from pallas_kernels.hopper import warp_specialised
from pallas_kernels.interpret import interpreting
from pallas_kernels.problem import Problem
from pallas_kernels.ptx.barriers import fence_async_shared
from pallas_kernels.ptx.float8 import transpose_float8


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
      query: float8_e4m3fn `[B, T, N, H]`; H a multiple of 16.
      key: `[B, S, K, H]`. The largest magnitudes of query and key, times H, are 65504 at most.
      value: `[B, S, K, h]`; h a multiple of 16; finite.
      scales: of the operands.
      intervals: None, or the keys that each query sees, `[B, 2, problem.query_length]` int32, for a
        problem that is dynamic (`intervals.py`).
      ids: None, or for a problem that is segmented the segment ids of queries and keys, int32
        `[B, problem.query_length]` and `[B, problem.key_length]` (`segments.py`).
      problem: static description.
      config: tile sizes.
      out_dtype: of the output, 16 bits.

    Returns:
      Output `[B, T, N, h]` and natural-log LSE `[B, N, ceil(T / block_q) * block_q]` float32, whose
      rows from T on are arbitrary. A row that sees no key: 0 and -inf.
    """
    kernel = _build(problem, config, np.dtype(out_dtype), interpreting())
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


@functools.lru_cache
def _build(
    problem: Problem,
    config: ForwardFP8Config,
    out_dtype: np.dtype,
    interpret: bool,
):
    plan = Plan(problem, config, out_dtype, interpret)

    def attention_forward_fp8(*refs, **scratch):
        block = ThreadBlock(plan, refs, **scratch)
        roles = functools.partial(consume, block), functools.partial(_produce, block)
        warp_specialised(block.warpgroup, config.consumers, config.registers, *roles)

    kernel = plan.tiles.kernel(attention_forward_fp8, plan.scratch(), out_dtype)
    return plan.tiles.with_lists(kernel)


# --- the producer ---------------------------------------------------------------------------------


def _produce(block: ThreadBlock) -> None:
    _Producer(block).walk()


class _Producer:
    """Fills the buffers of all tiles, each as it gets free, and turns V."""

    def __init__(self, block: ThreadBlock):
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
        _, batch, head = place = block.locate(index)
        kv_head = block.kv_head_of(head)
        blocks = block.key_blocks.count(place)
        key_block = block.key_blocks.numbers(place, blocks)

        def load(j):
            step = steps + j
            rows = pl.ds(key_block(j) * config.block_kv, config.block_kv)
            block.keys.fill(step, block.k.at[batch, rows, kv_head])
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
        slot = block.values.slot(step)
        plgpu.barrier_wait(block.v_full.at[block.raw_slot(step)])
        block.values.await_free(step, slot)
        for n, columns in enumerate(self.plan.value_columns.tile_slices):
            size = columns.stop - columns.start
            (target,) = block.values.at(slot, pl.ds(columns.start, size))
            transpose_float8(target, block.v_smem.at[block.raw_slot(step), n])
        fence_async_shared()
        # The warpgroup meets here: what follows may overwrite V.
        plgpu.barrier_arrive(block.values.full.at[slot])
