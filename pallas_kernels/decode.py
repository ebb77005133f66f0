"""Attention of a few new tokens of each sequence to a long cache of keys, for Hopper GPUs.

All there is to do is to read the cache once, at the speed of memory. The query heads that share a
key head, times the new tokens, are the rows of a tile of 64, so that a key is read once for all of
them, and the keys of a sequence are split over thread blocks until these fill the GPU:

    thread block = (sequence, split of its keys, key head, tile of rows), one warpgroup

    K0 V0, K1 V1, K2 V2, and Q            TMA into circular buffers, what shared memory holds
    S = Q K0    softmax    O += P V0      K3 into K0's place after S, V3 into V0's after O
    S = Q K1    softmax    O += P V1      ...

The one warpgroup loads and computes: what it refills is a step or more ahead of what it needs, and
while it waits or computes, the loads of another thread block of the SM are in flight. Thread blocks
that the GPU has no room for yet start as others end, which evens out sequences of unlike lengths.

A split covers its share of the key blocks that its own sequence needs, so that the result of a
sequence does not depend on the others in the batch. The parts are put together in `combine.py`.
Every step has a mask and looks for new maxima: there is time for both.

A float8 cache comes as it is. The warpgroup widens each block of K, and then of V, into one buffer
that wgmma reads: as float16, which takes one instruction for two elements. Queries in bfloat16 are
brought into its range, row by row, by powers of 2. These, and the scales of keys, go into the
logits; the scales of values go into the output.

Barriers. Full: an mbarrier a slot of K and of V, completed by TMA. Queries come through registers,
as the rows of a tile do not stand in a row in memory where there are several tokens.
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

from pallas_kernels import combine, online_softmax
from pallas_kernels.config import SM_COUNT
from pallas_kernels.online_softmax import LOG2E, spread
from pallas_kernels.primitives import (
    OPERAND,
    div_rem,
    fresh_rows,
    fresh_zero,
    interpreting,
    keep_columns_from,
    keep_columns_to,
    keep_operand_rows,
    load_grouped,
    load_rows,
    store_grouped,
    store_operand,
    store_rows,
    widen_operand,
    zero_tile,
)

ROWS = 64  # of a tile: the M of a wgmma
_PER_ROW = plgpu.Layout.WGMMA.reduce(1)
_SPLIT_STEPS = 2  # at least, of a split where the heuristic decides


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """Settings of one width and size of the cache's elements.

    Attributes:
      block_kv: keys a step; a multiple of 64, as the second product needs.
      stages: slots of the circular buffers of K and of V.
      blocks_per_sm: how many thread blocks an SM has room for.
      busy_blocks: how many it needs to read its share of the memory's rate.
    """

    block_kv: int
    stages: int
    blocks_per_sm: int
    busy_blocks: int


# (Width, bytes of an element of the cache) -> settings. Two thread blocks of 112 KB each where they
# fit. Width 64: 64 keys a step would be half of the bytes for nearly the time of 128. A float8
# cache brings half of the bytes for more work: three thread blocks of 64 and 72 KB.
CONFIG = {
    (64, 2): DecodeConfig(block_kv=128, stages=3, blocks_per_sm=2, busy_blocks=2),
    (128, 2): DecodeConfig(block_kv=64, stages=3, blocks_per_sm=2, busy_blocks=1),
    (256, 2): DecodeConfig(block_kv=64, stages=3, blocks_per_sm=1, busy_blocks=1),
    (64, 1): DecodeConfig(block_kv=128, stages=3, blocks_per_sm=3, busy_blocks=3),
    (128, 1): DecodeConfig(block_kv=64, stages=2, blocks_per_sm=3, busy_blocks=3),
    (256, 1): DecodeConfig(block_kv=64, stages=4, blocks_per_sm=1, busy_blocks=1),
}
WIDTHS = tuple(width for width, itemsize in CONFIG if itemsize == 2)


@dataclasses.dataclass(frozen=True)
class DecodeProblem:
    """The static part of one call: what a kernel is built for.

    Attributes:
      batch: sequences.
      tokens: new tokens of each sequence, its last ones.
      heads, kv_heads: of queries and of keys.
      width: of a head.
      dtype: of queries.
      cache_dtype: of keys and values: dtype, or float8_e4m3fn.
      capacity: tokens of a sequence that the cache has room for.
      page_size: tokens of a page, a power of two from 16 on; None where the cache is contiguous.
      scale: multiplies query.key.
      window: None, or how many keys before its own position a token sees.
      soft_cap: None, or logits become soft_cap * tanh(logits / soft_cap).
    """

    batch: int
    tokens: int
    heads: int
    kv_heads: int
    width: int
    dtype: np.dtype
    cache_dtype: np.dtype
    capacity: int
    page_size: int | None
    scale: float
    window: int | None = None
    soft_cap: float | None = None

    @property
    def config(self) -> DecodeConfig:
        return CONFIG[self.width, self.cache_dtype.itemsize]

    @property
    def group(self) -> int:
        """Query heads that share one key head."""
        return self.heads // self.kv_heads

    @property
    def rows(self) -> int:
        """Of a key head of a sequence: token by token, each with the heads of the group."""
        return self.tokens * self.group

    @property
    def row_tiles(self) -> int:
        return -(-self.rows // ROWS)

    @property
    def key_heads_of_all(self) -> int:
        return self.batch * self.kv_heads


def splits_for(problem: DecodeProblem) -> int:
    """Into how many parts to split the keys of each sequence, so that the GPU is full."""
    config = problem.config
    tiles = problem.key_heads_of_all * problem.row_tiles
    # Copies of pages smaller than a block take longer: one thread block an SM is not enough.
    small_pages = problem.page_size is not None and problem.page_size < config.block_kv
    busy_blocks = config.blocks_per_sm if small_pages else config.busy_blocks
    if tiles >= 0.8 * SM_COUNT * busy_blocks:
        return 1
    blocks = -(-problem.capacity // config.block_kv)
    most = max(1, min(combine.MOST_SPLITS, SM_COUNT * config.blocks_per_sm // tiles))
    share = max(_SPLIT_STEPS, -(-blocks // most))
    return -(-blocks // share)


def attention(
    query: jax.Array,
    key_cache: jax.Array,
    value_cache: jax.Array,
    lengths: jax.Array,
    page_table: jax.Array | None = None,
    sinks: jax.Array | None = None,
    key_scale: jax.Array | None = None,
    value_scale: jax.Array | None = None,
    *,
    problem: DecodeProblem,
    splits: int,
) -> tuple[jax.Array, jax.Array]:
    """Exact attention of the last `problem.tokens` tokens of each sequence to its cache.

    Args:
      query: `[B, T, N, H]`.
      key_cache: `[B, S, K, H]`, S a multiple of 8; or `[pages, page_size, K, H]`.
      value_cache: as key_cache.
      lengths: `[B]` int32, with the new tokens: token t is at position length - tokens + t.
      page_table: None, or `[B, max_pages]` int32. Pages that hold no token within the lengths, or
        none that is seen, may have any number.
      sinks: None, or `[N]` float32: one more logit of each head, without a value.
      key_scale, value_scale: None, or `[K]` float32, which keys and values are multiplied with.
      problem: static description.
      splits: into how many parts to split the keys, at most `combine.MOST_SPLITS`.

    Returns:
      Output `[B, T, N, H]` and natural-log LSE `[B, T, N]` float32. A row that sees no key: 0 and
      -inf.
    """
    p = problem
    sinks_of_rows = None
    if sinks is not None and splits == 1:  # else they take part when the splits are put together
        sinks_of_rows = jnp.tile(sinks.reshape(p.kv_heads, p.group), (1, p.tokens)) * LOG2E
    optional = {
        "page_table": page_table,
        "sinks": sinks_of_rows,
        "key_scale": key_scale,
        "value_scale": value_scale,
    }
    given = {name: x for name, x in optional.items() if x is not None}
    kernel = _build(p, splits, tuple(given), interpreting())
    parts, lse_parts = kernel(lengths, query, key_cache, value_cache, *given.values())
    by_head = (p.batch, p.kv_heads, p.tokens, p.group)
    lse = functools.reduce(jnp.logaddexp, list(lse_parts))[:, : p.rows].reshape(by_head)
    lse = lse.swapaxes(1, 2).reshape(query.shape[:3])
    if splits == 1:
        return parts[0], lse
    if sinks is not None:
        lse = jnp.where(lse == -jnp.inf, -jnp.inf, jnp.logaddexp(lse, sinks))
    return combine.combine(parts, lse_parts, sinks, kv_heads=p.kv_heads, dtype=p.dtype), lse


def _to_float16(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`(64, n)` bfloat16 rows as float16, and what to multiply them with to have them back.

    That is a power of 2 for each row, so that all but elements below 2^-28 of the row's largest
    are exact, and the others off by less than 2^-39 of it.
    """
    wide = rows.astype(jnp.float32)
    largest = jnp.maximum(wide, -wide).max(axis=1)
    exponent = lax.bitcast_convert_type(largest, jnp.int32) & 0x7F800000
    power = lax.bitcast_convert_type(exponent, jnp.float32)
    unit = jnp.clip(power, 2.0**-100, 2.0**127) * 2.0**-14
    return (wide * spread(1.0 / unit, wide.shape)).astype(jnp.float16), unit


@functools.lru_cache
def _build(problem: DecodeProblem, splits: int, optional: tuple[str, ...], interpret: bool):
    p, config = problem, problem.config
    block_kv, stages, width, dtype = config.block_kv, config.stages, p.width, p.dtype
    # Capped logits are in log2 units already.
    factor = p.scale * LOG2E if p.soft_cap is None else 1.0
    is_float8 = p.cache_dtype != dtype
    product_dtype = np.dtype(jnp.float16) if is_float8 else dtype
    headroom, limit = online_softmax.weight_range(product_dtype)
    page_size = p.page_size
    copies = 1 if page_size is None else max(1, block_kv // page_size)
    rows_of_copy = block_kv // copies

    smem = functools.partial(plgpu.SMEM, dtype=product_dtype, transforms=OPERAND)
    slots = (stages, block_kv, width)
    cache_smem = plgpu.SMEM(slots, p.cache_dtype) if is_float8 else smem(slots)
    scratch: dict[str, Any] = dict(
        q_smem=smem((ROWS, width)),
        k_smem=cache_smem,
        v_smem=cache_smem,
        k_full=plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
        v_full=plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
    )
    if is_float8:
        scratch["wide_smem"] = smem((1, block_kv, width))

    def decode_attention(
        lengths_ref, q_ref, k_ref, v_ref, *more_refs,
        q_smem, k_smem, v_smem, k_full, v_full, wide_smem=None,
    ):  # fmt: skip
        *optional_refs, out_ref, lse_ref = more_refs
        given = dict(zip(optional, optional_refs, strict=True))
        rest, tile = div_rem(lax.axis_index("block"), p.row_tiles)
        rest, head = div_rem(rest, p.kv_heads)
        batch, split = div_rem(rest, splits)
        head_of_all = batch * p.kv_heads + head
        heads = pl.ds(head * p.group, p.group)
        zero = jnp.int32(0)
        slot = lambda step: lax.rem(step, jnp.int32(stages))

        length = lengths_ref[batch]
        end_key = jnp.clip(length, 0, p.capacity)
        first_position = length - p.tokens
        first_key = zero
        if p.window is not None:
            first_key = jnp.clip(first_position - p.window, 0, end_key)
        first_block = lax.div(first_key, jnp.int32(block_kv))
        end_block = lax.div(end_key + (block_kv - 1), jnp.int32(block_kv))
        share = lax.div(end_block - first_block + (splits - 1), jnp.int32(splits))
        begin = first_block + split * share
        steps = jnp.clip(end_block - begin, 0, share)

        def pages_of(step):
            """The page of each copy of a key block; looked up a step before they are needed."""
            if page_size is None:
                return ()
            firsts = [(begin + step) * block_kv + n * rows_of_copy for n in range(copies)]
            # A page that holds nothing that counts may have any number.
            keys = [jnp.maximum(jnp.clip(key, first_key, end_key - 1), 0) for key in firsts]
            pages = [given["page_table"][batch, div_rem(key, page_size)[0]] for key in keys]
            return tuple(jnp.clip(page, 0, k_ref.shape[0] - 1) for page in pages)

        def load(step, pages, ref, buffers, full):
            """Loads the key block of a step, if there is one."""

            @pl.when(step < steps)
            def _():
                first, buffer = (begin + step) * block_kv, buffers.at[slot(step)]
                for n in range(copies):
                    if page_size is None:
                        source = ref.at[batch, pl.ds(first, block_kv), head]
                    else:
                        row = lax.rem(first + n * rows_of_copy, jnp.int32(page_size))
                        source = ref.at[pages[n], pl.ds(row, rows_of_copy), head]
                    target = buffer.at[pl.ds(n * rows_of_copy, rows_of_copy)]
                    plgpu.copy_gmem_to_smem(source, target, full.at[slot(step)])

        load_key = lambda step, pages: load(step, pages, k_ref, k_smem, k_full)
        load_value = lambda step, pages: load(step, pages, v_ref, v_smem, v_full)

        def in_each_row(scalar):
            return plgpu.layout_cast(jnp.broadcast_to(scalar, (ROWS,)), _PER_ROW)

        queries = load_grouped(q_ref.at[batch, :, heads], tile * ROWS)  # on their way meanwhile
        for step in map(jnp.int32, range(stages)):
            pages = pages_of(step)
            load_key(step, pages)
            load_value(step, pages)
        row_factor = None
        if "key_scale" in given:
            row_factor = in_each_row(given["key_scale"][head])
        if product_dtype != dtype:
            queries, units = _to_float16(queries)
            row_factor = units if row_factor is None else units * row_factor
        store_operand(q_smem, queries)
        plgpu.commit_smem()

        def positions():
            """Of the tokens of the rows; made anew in each step, as they would cost registers."""
            if p.tokens == 1:
                return in_each_row(first_position)
            row = fresh_rows() + tile * ROWS
            return lax.div(row, in_each_row(jnp.int32(p.group))) + first_position

        def capped(logits):
            """What `factor` brings to log2 units."""
            if p.soft_cap is None:
                return logits
            # tanh(x) = 1 - 2 / (1 + exp(2x)), as the tanh of the hardware is right to 2^-11.
            powers = jnp.exp2(logits * (2 * LOG2E * p.scale / p.soft_cap))
            return p.soft_cap * LOG2E * (1.0 - 2.0 / (1.0 + powers))

        def widened(narrow):
            """The buffer with a float8 block as float16."""
            plgpu.commit_smem()  # all warps have done with what stands there
            wide = wide_smem.at[fresh_zero()]
            widen_operand(wide, narrow)
            plgpu.commit_smem()
            return wide

        def compute(o_acc, s_acc):
            def key_step(step, carry):
                state, pages = carry
                first = (begin + step) * block_kv
                this = slot(step)
                plgpu.barrier_wait(k_full.at[this])
                keys = k_smem.at[this]
                if is_float8:
                    keys = widened(keys)
                    load_key(step + stages, pages)
                s_acc[...] = zero_tile(ROWS, block_kv)
                plgpu.wgmma(s_acc, q_smem, keys.transpose((1, 0)))
                logits = plgpu.wgmma_accumulator_load(s_acc, wait_n=0)
                if not is_float8:
                    load_key(step + stages, pages)
                if row_factor is not None:
                    logits *= spread(row_factor, logits.shape)
                logits = capped(logits)
                position = positions()
                last = jnp.minimum(position, p.capacity - 1)
                logits = keep_columns_to(logits, last - first, -jnp.inf)
                if p.window is not None:
                    logits = keep_columns_from(logits, position - p.window - first, -jnp.inf)
                weights, correction, state = online_softmax.advance(
                    logits, factor, headroom, limit, state
                )
                plgpu.barrier_wait(v_full.at[this])

                values = v_smem.at[this]
                if is_float8:
                    values = widened(values)
                    load_value(step + stages, pages)

                @pl.when((first < first_key) | (first + block_kv > end_key))
                def _():
                    # 0 times what stands there may be NaN.
                    keep_operand_rows(values, first_key - first, end_key - first)
                    plgpu.commit_smem()

                output = plgpu.wgmma_accumulator_load(o_acc, wait_n=0)
                o_acc[...] = output * spread(correction, output.shape)
                plgpu.wgmma(o_acc, weights.astype(product_dtype), values)
                plgpu.wgmma_wait(0)
                if not is_float8:
                    load_value(step + stages, pages)
                return state, pages_of(step + 1 + stages)

            carry = online_softmax.nothing_seen(ROWS), pages_of(jnp.int32(stages))
            state, _ = lax.fori_loop(zero, steps, key_step, carry)
            sink = None
            if "sinks" in given:
                sink = load_rows(given["sinks"].at[head], tile * ROWS, p.rows - 1)
            inverse, lse, _ = online_softmax.finish(state, limit, sink)
            if "value_scale" in given:
                inverse *= given["value_scale"][head]
            store_rows(lse_ref.at[split, head_of_all, pl.ds(tile * ROWS, ROWS)], lse)
            output = plgpu.wgmma_accumulator_load(o_acc, wait_n=0)
            output = (output * spread(inverse, output.shape)).astype(out_ref.dtype)
            store_grouped(out_ref.at[split, batch, :, heads], output, tile * ROWS)

        pl.run_scoped(
            compute,
            plgpu.ACC((ROWS, width), jnp.float32),
            plgpu.ACC((ROWS, block_kv), jnp.float32),
        )

    out_shape = (splits, p.batch, p.tokens, p.heads, width)
    lse_shape = (splits, p.key_heads_of_all, p.row_tiles * ROWS)
    return plgpu.kernel(
        decode_attention,
        out_type=(
            jax.ShapeDtypeStruct(out_shape, dtype if splits == 1 else jnp.float32),
            jax.ShapeDtypeStruct(lse_shape, jnp.float32),
        ),
        grid=(p.key_heads_of_all * p.row_tiles * splits,),
        grid_names=("block",),
        num_threads=1,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            reduction_scratch_bytes=0,  # rows are reduced by shuffles
        ),
    )
