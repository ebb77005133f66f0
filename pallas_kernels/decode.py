"""Attention of a few new tokens of each sequence to a long cache of keys, for Hopper GPUs.

All there is to do is to read the cache once, at the speed of memory. The query heads that share a
key head, times the new tokens, are the rows of a tile, so that a key is read once for all of them,
and the keys of a sequence are split over thread blocks until these fill the GPU:

    thread block = (sequence, split of its keys, key head, tile of rows), one warpgroup

    K0 V0, K1 V1, K2 V2, and Q            TMA into circular buffers, what shared memory holds
    S' = K0 Q'    weights    O' += V0' P'      K3 into K0's place after S', V3 into V0's after O'
    S' = K1 Q'    weights    O' += V1' P'      ...

There are few rows, 4 or 8 as a rule, and a wgmma has 64. So its rows are keys, and those of the
queries are columns, 8 at least: exponentials, masks and sums are of the rows that there are. What a
step costs decides even though memory is what it waits for: a thread block that is late, or has the
longest sequence, can go no faster than its steps.

The one warpgroup loads and computes: what it refills is a step or more ahead of what it needs, and
while it waits or computes, the loads of another thread block of the SM are in flight. Thread blocks
that the GPU has no room for yet start as others end, which evens out sequences of unlike lengths.
Where nothing else decides what comes first, the first blocks are loaded before the length is known.

A split covers its share of the key blocks that its own sequence needs, so that the result of a
sequence does not depend on the others in the batch. The parts are put together in `combine.py`.

A row's maximum is over keys, which all warps have. In bfloat16 it is looked for in the first step
alone, and a sum that grew too large sends the thread block over its keys again, now looking in
every step (`online_softmax.py`). Float16 and float8 look in every step.

A float8 cache comes as it is, and so it goes into products, which takes queries and weights in
float8 too: each of them in two parts (`primitives.py`, "float8 in two parts"), so that a tile has
twice the columns.

    Q, by row a power of 2       (2 rows, width)    S' = K Q'      logits = S'1 + S'2 / 16
    weights, up to 2^8.5         (2 rows, 64)       P = V' W'      O' = O' c + P1 + P2 / 16

V stands with its keys side by side for that: a block is turned in shared memory before its product.
And as Hopper adds up FP8 products with some 14 bits, those of a step are a product of their own,
added to the output in float32 registers. The units of queries and the scales of keys go into the
logits, those of values into the output.

Where a cache's length is no multiple of 8, TMA cannot have it as tiles of 8 rows. But a box of rows
that is as wide as its swizzle lands as such tiles do. So a slot of K or V is then `boxes` side by
side, each a copy, and two views of one memory: without tiles for TMA, which knows the true length
and brings zeros beyond it, and with tiles for products. A product is of a box: logits add up over
boxes, and each has columns of the output of its own.

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
from jax import lax

from pallas_kernels import combine, online_softmax
from pallas_kernels.config import LOG2E
from pallas_kernels.decode_config import BLOCK_KV, DecodeProblem
from pallas_kernels.interpret import interpreting
from pallas_kernels.key_tiles import QUERIES, per_query
from pallas_kernels.primitives import (
    OPERAND,
    column_maxima,
    column_sums,
    div_rem,
    float8_operand,
    fresh_zero,
    join_parts,
    keep_operand_rows,
    load_queries,
    store_columns,
    store_grouped,
    store_queries,
    store_queries_float8,
    store_weights_float8,
    transpose_float8,
    vote_any,
    zero_tile,
)

_MOST_PART = 4096  # elements of an output of float8 that are one product, of 64 registers


def box_columns(width: int, itemsize: int) -> int:
    """Columns of a box of a cache's rows, which is as wide as TMA swizzles."""
    tiling, _ = OPERAND if itemsize == 2 else float8_operand(width)
    return tiling.tiling[1]


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
      key_cache: `[B, S, K, H]`, or `[pages, page_size, K, H]`.
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
        padding = p.row_tiles * p.tile_rows - p.rows
        sinks_of_rows = jnp.pad(sinks_of_rows, ((0, 0), (0, padding)))
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
        lse = jnp.where(lse == -jnp.inf, -jnp.inf, jnp.logaddexp(lse, sinks[None, None]))
    return combine.combine(parts, lse_parts, sinks, kv_heads=p.kv_heads, dtype=p.dtype), lse


@dataclasses.dataclass(frozen=True)
class _Products:
    """The two products of a step, of 16-bit operands, each waited for.

    Attributes:
      q_smem: `(rows, width)`.
      p_smem: `(rows, BLOCK_KV)`, the weights.
      s_acc: `(BLOCK_KV, rows)`.
      o_accs: for each box of values `(columns, rows)`, which have the output.
    """

    q_smem: Any
    p_smem: Any
    s_acc: Any
    o_accs: Any

    def logits(self, keys, free) -> jax.Array:
        """`(BLOCK_KV, rows)`, of keys in boxes; calls `free` when they have been read."""
        self.s_acc[...] = zero_tile(*self.s_acc.shape)
        for queries, box in zip(self.query_boxes(len(keys)), keys, strict=True):
            plgpu.wgmma(self.s_acc, box, queries.transpose((1, 0)))
        logits = plgpu.wgmma_accumulator_load(self.s_acc, wait_n=0)
        free()
        return logits

    def query_boxes(self, count: int) -> list:
        """The columns of queries that go with each box of keys."""
        if count == 1:
            return [self.q_smem]
        columns = self.q_smem.shape[1] // count
        return [self.q_smem.at[:, pl.ds(n * columns, columns)] for n in range(count)]

    def no_output(self) -> list[jax.Array]:
        """The output before the first step, but for what the accumulators have."""
        for acc in self.o_accs:
            acc[...] = zero_tile(*acc.shape)
        return []

    def scaled(self, output, factors, is_first) -> list[jax.Array]:
        """The output with each row multiplied by its factor; 0 in the first step of a round."""
        for acc in self.o_accs:
            so_far = plgpu.wgmma_accumulator_load(acc, wait_n=0)
            # The round before may have left what overflowed.
            acc[...] = jnp.where(is_first, 0.0, so_far * spread(factors, so_far.shape))
        return output

    def put_weights(self, weights) -> None:
        self.p_smem.transpose((1, 0))[...] = weights.astype(self.p_smem.dtype)

    def add(self, output, values, free) -> list[jax.Array]:
        """The output and weights values, in boxes; calls `free` when values have been read."""
        plgpu.commit_smem()
        for acc, box in zip(self.o_accs, values, strict=True):
            plgpu.wgmma(acc, box.transpose((1, 0)), self.p_smem.transpose((1, 0)))
        plgpu.wgmma_wait(0)
        free()
        return output

    def result(self, output) -> list[jax.Array]:
        """The output, as tiles of columns of it, `(columns, rows)`."""
        return [plgpu.wgmma_accumulator_load(acc, wait_n=0) for acc in self.o_accs]


@dataclasses.dataclass(frozen=True)
class _Float8Products(_Products):
    """The same of float8 operands, with queries and weights in two parts.

    Of rows there are twice as many in q_smem, p_smem, s_acc and the one of o_accs, which takes n
    columns of the output at a time: `(n, 2 * rows)`.

    Attributes:
      units_smem: `(rows,)`, which logits are multiplied with.
      turned_smem: `(width, BLOCK_KV)`, values.
    """

    units_smem: Any
    turned_smem: Any

    def logits(self, keys, free) -> jax.Array:
        logits = join_parts(super().logits(keys, free))
        # Loaded in each step: registers are few where rows are many.
        units = plgpu.load(self.units_smem, layout=QUERIES, optimized=False)
        return logits * spread(units, logits.shape)

    def no_output(self) -> list[jax.Array]:
        part, columns = self.o_accs[0].shape
        return [zero_tile(part, columns // 2)] * (self.turned_smem.shape[0] // part)

    def scaled(self, output, factors, is_first) -> list[jax.Array]:
        return [x * spread(factors, x.shape) for x in output]  # there is one round alone

    def put_weights(self, weights) -> None:
        # All warps have done with those of the last step, as they have met for maxima.
        store_weights_float8(self.p_smem, weights)

    def add(self, output, values, free) -> list[jax.Array]:
        for turned, box in zip(self.turned_boxes(len(values)), values, strict=True):
            transpose_float8(turned, box)
        plgpu.commit_smem()
        (acc,) = self.o_accs
        part, columns = acc.shape
        for n in range(len(output)):
            if n == len(output) - 1:
                free()  # its branch keeps the compiler from zeroing the accumulators of both parts
            acc[...] = zero_tile(part, columns)
            turned = self.turned_smem.at[pl.ds(n * part, part)]
            plgpu.wgmma(acc, turned, self.p_smem.transpose((1, 0)))
            output[n] += join_parts(plgpu.wgmma_accumulator_load(acc, wait_n=0))
        return output

    def turned_boxes(self, count: int) -> list:
        """Where the columns of each box of values go as rows."""
        if count == 1:
            return [self.turned_smem]
        rows = self.turned_smem.shape[0] // count
        return [self.turned_smem.at[pl.ds(n * rows, rows)] for n in range(count)]

    def result(self, output) -> list[jax.Array]:
        return output


@functools.lru_cache
def _build(problem: DecodeProblem, splits: int, optional: tuple[str, ...], interpret: bool):
    p = problem
    config, rows, width, dtype = p.config, p.tile_rows, p.width, p.dtype
    thread_blocks = p.key_heads_of_all * p.row_tiles * splits
    stages = config.stages(rows, thread_blocks)
    # Capped logits are in log2 units already.
    factor = p.scale * LOG2E if p.soft_cap is None else 1.0
    is_float8 = p.cache_dtype.itemsize == 1
    # With a window, the first keys of a later token may come after the first step. And what is far
    # below a sink, which may be the first key, must not vanish in a narrow dtype.
    is_narrow = p.cache_dtype != jnp.bfloat16
    in_doubt = is_narrow or (p.window is not None and p.tokens > 1)
    allowed = online_softmax.weight_range(p.cache_dtype, searched=is_narrow)
    page_size = p.page_size
    copies = 1 if page_size is None else max(1, BLOCK_KV // page_size)
    rows_of_copy = BLOCK_KV // copies
    in_boxes = page_size is None and p.capacity % 8 != 0
    # A key block comes in one box where its rows can be tiles.
    box = box_columns(width, p.cache_dtype.itemsize) if in_boxes else width
    boxes = width // box
    # The first key blocks can be loaded before a length is known.
    early = splits == 1 and p.window is None and page_size is None
    blocks_of_cache = -(-p.capacity // BLOCK_KV)

    def smem(*shape):
        transforms = float8_operand(shape[-1]) if is_float8 else OPERAND
        return plgpu.SMEM(shape, p.cache_dtype, transforms=transforms)

    def slots():
        """The circular buffer of K or of V; in boxes, for copies and for products."""
        if not in_boxes:
            return smem(stages, BLOCK_KV, width)
        for_products = smem(stages, boxes, BLOCK_KV, box)
        _, swizzle = for_products.transforms
        for_copies = dataclasses.replace(for_products, transforms=(swizzle,))
        return plgpu.RefUnion(for_copies, for_products)

    columns = 2 * rows if is_float8 else rows  # of a product: queries in two parts
    # Of the output, as many columns as one product adds to.
    part = min(width, _MOST_PART // rows) if is_float8 else box
    scratch: dict[str, Any] = dict(
        q_smem=smem(columns, width),
        k_smem=slots(),
        v_smem=slots(),
        p_smem=smem(columns, BLOCK_KV),
        reduced_smem=plgpu.SMEM((4 * rows,), jnp.float32),
        k_full=plgpu.Barrier(num_arrivals=copies * boxes, num_barriers=stages),
        v_full=plgpu.Barrier(num_arrivals=copies * boxes, num_barriers=stages),
    )
    if is_float8:
        scratch["turned_smem"] = smem(width, BLOCK_KV)
        scratch["units_smem"] = plgpu.SMEM((rows,), jnp.float32)

    def decode_attention(
        lengths_ref, q_ref, k_ref, v_ref, *more_refs,
        q_smem, k_smem, v_smem, p_smem, reduced_smem, k_full, v_full,
        turned_smem=None, units_smem=None,
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

        def load(step, end, begin, pages, ref, buffers, full):
            """Loads the key block of a step, if it comes before the end."""

            @pl.when(step < end)
            def _():
                first, buffer = (begin + step) * BLOCK_KV, buffers.at[slot(step)]
                if in_boxes:
                    for n in range(boxes):
                        columns = pl.ds(n * box, box)
                        source = ref.at[batch, pl.ds(first, BLOCK_KV), head, columns]
                        plgpu.copy_gmem_to_smem(source, buffer.at[n], full.at[slot(step)])
                    return
                for n in range(copies):
                    if page_size is None:
                        source = ref.at[batch, pl.ds(first, BLOCK_KV), head]
                    else:
                        row = lax.rem(first + n * rows_of_copy, jnp.int32(page_size))
                        source = ref.at[pages[n], pl.ds(row, rows_of_copy), head]
                    target = buffer.at[pl.ds(n * rows_of_copy, rows_of_copy)]
                    plgpu.copy_gmem_to_smem(source, target, full.at[slot(step)])

        k_copies, k_smem = k_smem if in_boxes else (k_smem, k_smem)
        v_copies, v_smem = v_smem if in_boxes else (v_smem, v_smem)
        keys, values = (k_ref, k_copies, k_full), (v_ref, v_copies, v_full)

        def boxes_of(buffers, slot):
            """What a slot has for products."""
            if not in_boxes:
                return [buffers.at[slot]]
            return [buffers.at[slot, n] for n in range(boxes)]

        def first_loads(end, begin, pages_of):
            for step in map(jnp.int32, range(stages)):
                pages = pages_of(step)
                load(step, end, begin, pages, *keys)
                load(step, end, begin, pages, *values)

        # Before TMA fills the memory's queues.
        queries = load_queries(q_ref.at[batch, :, heads], tile * rows, rows)
        length = lengths_ref[batch]
        if early:
            first_loads(blocks_of_cache, zero, lambda step: ())
        end_key = jnp.clip(length, 0, p.capacity)
        first_position = length - p.tokens
        first_key = zero
        if p.window is not None:
            first_key = jnp.clip(first_position - p.window, 0, end_key)
        first_block = lax.div(first_key, jnp.int32(BLOCK_KV))
        end_block = lax.div(end_key + (BLOCK_KV - 1), jnp.int32(BLOCK_KV))
        share = lax.div(end_block - first_block + (splits - 1), jnp.int32(splits))
        begin = first_block + split * share
        steps = jnp.clip(end_block - begin, 0, share)

        def pages_of(step):
            """The page of each copy of a key block; looked up a step before they are needed."""
            if page_size is None:
                return ()
            firsts = [(begin + step) * BLOCK_KV + n * rows_of_copy for n in range(copies)]
            # A page that holds nothing that counts may have any number.
            keys = [jnp.maximum(jnp.clip(key, first_key, end_key - 1), 0) for key in firsts]
            pages = [given["page_table"][batch, div_rem(key, page_size)[0]] for key in keys]
            return tuple(jnp.clip(page, 0, k_ref.shape[0] - 1) for page in pages)

        if not early:
            first_loads(steps, begin, pages_of)
        if is_float8:
            store_queries_float8(q_smem, units_smem, queries, dtype)
        else:
            store_queries(q_smem, queries)
        plgpu.commit_smem()

        position = first_position  # of each row's token
        if p.tokens > 1:
            row = plgpu.broadcasted_iota(jnp.int32, (rows,), 0, layout=QUERIES) + tile * rows
            group = plgpu.layout_cast(jnp.full((rows,), p.group, jnp.int32), QUERIES)
            # Rows that are none are of the last token: they see nothing that does not count.
            position = jnp.minimum(lax.div(row, group), p.tokens - 1) + first_position

        key_scale = given["key_scale"][head] if "key_scale" in given else None

        def capped(logits):
            """What `factor` brings to log2 units."""
            if p.soft_cap is None:
                return logits
            # tanh(x) = 1 - 2 / (1 + exp(2x)), as the tanh of the hardware is right to 2^-11.
            powers = jnp.exp2(logits * (2 * LOG2E * p.scale / p.soft_cap))
            return p.soft_cap * LOG2E * (1.0 - 2.0 / (1.0 + powers))

        def masked(logits, first):
            """Hides keys from the rows that do not see them."""

            def hidden():
                key = plgpu.broadcasted_iota(jnp.int32, logits.shape, 0, layout=plgpu.Layout.WGMMA)
                # Not kept in registers from step to step, of which float8 has none to spare.
                own = position + fresh_zero() if is_float8 else position
                last = jnp.minimum(own, p.capacity - 1) - first
                seen = key <= spread(last, logits.shape)
                if p.window is not None:
                    seen &= key >= spread(own - p.window - first, logits.shape)
                return jnp.where(seen, logits, -jnp.inf)

            is_edge = first + BLOCK_KV > jnp.minimum(first_position + 1, p.capacity)
            if p.window is not None:
                is_edge |= first < first_position + p.tokens - 1 - p.window
            return lax.cond(is_edge, hidden, lambda: logits)

        def compute(o_accs, s_acc):
            operands = q_smem, p_smem, s_acc, o_accs
            products = _Products(*operands)
            if is_float8:
                products = _Float8Products(*operands, units_smem, turned_smem)

            def attend(end, state, in_doubt):
                """All steps before the end. `in_doubt`: the reference may have to rise."""

                def key_step(step, carry):
                    reference, sums, output, pages = carry
                    first = (begin + step) * BLOCK_KV
                    this = slot(step)
                    plgpu.barrier_wait(k_full.at[this])
                    load_next = lambda cache: load(step + stages, end, begin, pages, *cache)
                    logits = products.logits(boxes_of(k_smem, this), lambda: load_next(keys))
                    if key_scale is not None:
                        logits *= spread(key_scale, logits.shape)
                    logits = masked(capped(logits), first)

                    def risen():
                        maximum = column_maxima(logits, reduced_smem) * factor
                        return online_softmax.risen(reference, maximum, allowed)

                    if in_doubt:
                        before, reference = reference, risen()
                        correction = jnp.exp2(before - reference)
                        sums *= spread(correction, sums.shape)
                        output = products.scaled(output, correction, step == 0)
                    else:
                        reference = lax.cond(step == 0, risen, lambda: reference)
                    exponents = logits * factor - spread(reference, logits.shape)
                    if in_doubt:
                        bounds = online_softmax.bounds_of(reference, allowed)
                        exponents = jnp.minimum(exponents, spread(bounds, logits.shape))
                    weights = jnp.exp2(exponents)
                    sums += weights
                    products.put_weights(weights)
                    plgpu.barrier_wait(v_full.at[this])
                    block = boxes_of(v_smem, this)

                    @pl.when((first < first_key) | (first + BLOCK_KV > end_key))
                    def _():
                        # 0 times what stands there may be NaN.
                        for part_of_block in block:
                            keep_operand_rows(part_of_block, first_key - first, end_key - first)
                        if is_float8:
                            plgpu.commit_smem()  # before other threads turn it

                    output = products.add(output, block, lambda: load_next(values))
                    return reference, sums, output, pages_of(step + 1 + stages)

                carry = *state, pages_of(jnp.int32(stages))
                return lax.fori_loop(zero, end, key_step, carry)[:3]

            start = *nothing_seen(rows), products.no_output()
            reference, sums, output = attend(steps, start, in_doubt)
            if early:
                for step in range(min(stages, blocks_of_cache)):

                    @pl.when(step >= steps)
                    def _(step=step):  # nothing may be on its way at the end
                        plgpu.barrier_wait(k_full.at[step])
                        plgpu.barrier_wait(v_full.at[step])

            total = column_sums(sums, reduced_smem)
            if not in_doubt:
                again = vote_any(jnp.where(total < 2.0**allowed.limit, 0, 1))
                pl.when(again)(lambda: first_loads(steps, begin, pages_of))
                end = jnp.where(again, steps, 0)
                risen, sums, _ = attend(end, (*nothing_seen(rows), []), True)
                reference, total = lax.cond(
                    again,
                    lambda: (risen, column_sums(sums, reduced_smem)),
                    lambda: (reference, total),
                )
            sink = None
            if "sinks" in given:
                sink = plgpu.load(
                    given["sinks"].at[head, pl.ds(tile * rows, rows)],
                    layout=QUERIES,
                    optimized=False,
                )
            row_end = online_softmax.normalised(reference, total, sink)
            inverse, lse = row_end.inverse, row_end.lse
            if "value_scale" in given:
                inverse *= given["value_scale"][head]
            store_columns(lse_ref.at[split, head_of_all, pl.ds(tile * rows, rows)], lse)
            for n, x in enumerate(products.result(output)):
                target = out_ref.at[split, batch, :, heads, pl.ds(n * part, part)]
                store_grouped(target, x * spread(inverse, x.shape), tile * rows)

        pl.run_scoped(
            compute,
            [plgpu.ACC((part, columns), jnp.float32)] * (1 if is_float8 else boxes),
            plgpu.ACC((BLOCK_KV, columns), jnp.float32),
        )

    out_shape = (splits, p.batch, p.tokens, p.heads, width)
    lse_shape = (splits, p.key_heads_of_all, p.row_tiles * rows)
    return plgpu.kernel(
        decode_attention,
        out_type=(
            jax.ShapeDtypeStruct(out_shape, dtype if splits == 1 else jnp.float32),
            jax.ShapeDtypeStruct(lse_shape, jnp.float32),
        ),
        grid=(thread_blocks,),
        grid_names=("block",),
        num_threads=1,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )


def spread(columns: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Broadcasts a scalar, or one value a column, over `shape`."""
    return columns if jnp.ndim(columns) == 0 else per_query(columns, shape[0])


def nothing_seen(rows: int) -> tuple[jax.Array, jax.Array]:
    """Reference and sums of rows before their first key block."""
    reference = jnp.full((rows,), online_softmax.NOTHING_SEEN, jnp.float32)
    return plgpu.layout_cast(reference, QUERIES), zero_tile(BLOCK_KV, rows)
