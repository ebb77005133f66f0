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
float8 too: each of them in two parts (`ptx/float8_parts.py`), so that a tile has
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
from collections.abc import Callable
from typing import Any, NamedTuple

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
from pallas_kernels.ptx.arithmetic import column_maxima, column_sums, div_rem
from pallas_kernels.ptx.compiler import fresh_zero
from pallas_kernels.ptx.float8 import transpose_float8
from pallas_kernels.ptx.float8_parts import join_parts, store_queries_float8, store_weights_float8
from pallas_kernels.ptx.mlir import zero_tile
from pallas_kernels.ptx.operands import OPERAND, float8_operand, keep_operand_rows
from pallas_kernels.ptx.queries import load_queries, store_grouped, store_queries
from pallas_kernels.ptx.stores import store_columns
from pallas_kernels.ptx.votes import vote_any

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


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What the kernel does, and with what buffers.

    Attributes:
      problem: static description.
      splits: parts of the keys.
      optional: names of the operands beside queries, caches and lengths.
    """

    problem: DecodeProblem
    splits: int
    optional: tuple[str, ...]

    @property
    def rows(self) -> int:
        """Of a tile."""
        return self.problem.tile_rows

    @property
    def thread_blocks(self) -> int:
        return self.problem.key_heads_of_all * self.problem.row_tiles * self.splits

    @property
    def stages(self) -> int:
        return self.problem.config.stages(self.rows, self.thread_blocks)

    @property
    def factor(self) -> float:
        """What logits are multiplied with; capped ones are in log2 units already."""
        return self.problem.scale * LOG2E if self.problem.soft_cap is None else 1.0

    @property
    def is_float8(self) -> bool:
        return self.problem.cache_dtype.itemsize == 1

    @property
    def _is_narrow(self) -> bool:
        return self.problem.cache_dtype != jnp.bfloat16

    @property
    def in_doubt(self) -> bool:
        """Whether the reference may have to rise in every step.

        With a window, the first keys of a later token may come after the first step. And what is
        far below a sink, which may be the first key, must not vanish in a narrow dtype.
        """
        return self._is_narrow or (self.problem.window is not None and self.problem.tokens > 1)

    @property
    def allowed(self) -> online_softmax.Range:
        return online_softmax.weight_range(self.problem.cache_dtype, searched=self._is_narrow)

    @property
    def early(self) -> bool:
        """Whether the first key blocks can be loaded before a length is known."""
        return self.splits == 1 and self.problem.window is None and self.problem.page_size is None

    @property
    def blocks_of_cache(self) -> int:
        return -(-self.problem.capacity // BLOCK_KV)

    # --- copies and boxes ---

    @property
    def copies(self) -> int:
        """Of a key block, one a page."""
        page_size = self.problem.page_size
        return 1 if page_size is None else max(1, BLOCK_KV // page_size)

    @property
    def rows_of_copy(self) -> int:
        return BLOCK_KV // self.copies

    @property
    def in_boxes(self) -> bool:
        """A key block comes in one box where its rows can be tiles."""
        return self.problem.page_size is None and self.problem.capacity % 8 != 0

    @property
    def box(self) -> int:
        """Columns of one."""
        p = self.problem
        return box_columns(p.width, p.cache_dtype.itemsize) if self.in_boxes else p.width

    @property
    def boxes(self) -> int:
        return self.problem.width // self.box

    @property
    def columns(self) -> int:
        """Of a product: queries in two parts where they are float8."""
        return 2 * self.rows if self.is_float8 else self.rows

    @property
    def part(self) -> int:
        """Columns of the output that one product adds to."""
        most = min(self.problem.width, _MOST_PART // self.rows)
        return most if self.is_float8 else self.box

    def scratch(self) -> dict[str, Any]:
        """Types of shared memory and barriers, by name."""
        p = self.problem
        barrier = plgpu.Barrier(num_arrivals=self.copies * self.boxes, num_barriers=self.stages)
        found: dict[str, Any] = dict(
            q_smem=self._smem(self.columns, p.width),
            k_smem=self._slots(),
            v_smem=self._slots(),
            p_smem=self._smem(self.columns, BLOCK_KV),
            reduced_smem=plgpu.SMEM((4 * self.rows,), jnp.float32),
            k_full=barrier,
            v_full=barrier,
        )
        if self.is_float8:
            found["turned_smem"] = self._smem(p.width, BLOCK_KV)
            found["units_smem"] = plgpu.SMEM((self.rows,), jnp.float32)
        return found

    def _smem(self, *shape: int) -> Any:
        transforms = float8_operand(shape[-1]) if self.is_float8 else OPERAND
        return plgpu.SMEM(shape, self.problem.cache_dtype, transforms=transforms)

    def _slots(self) -> Any:
        """The circular buffer of K or of V; in boxes, for copies and for products."""
        if not self.in_boxes:
            return self._smem(self.stages, BLOCK_KV, self.problem.width)
        for_products = self._smem(self.stages, self.boxes, BLOCK_KV, self.box)
        _, swizzle = for_products.transforms
        for_copies = dataclasses.replace(for_products, transforms=(swizzle,))
        return plgpu.RefUnion(for_copies, for_products)


@functools.lru_cache
def _build(problem: DecodeProblem, splits: int, optional: tuple[str, ...], interpret: bool):
    plan, p = _Plan(problem, splits, optional), problem

    def decode_attention(*refs, **scratch):
        _ThreadBlock(plan, refs, **scratch).run()

    out_shape = (splits, p.batch, p.tokens, p.heads, p.width)
    lse_shape = (splits, p.key_heads_of_all, p.row_tiles * plan.rows)
    return plgpu.kernel(
        decode_attention,
        out_type=(
            jax.ShapeDtypeStruct(out_shape, p.dtype if splits == 1 else jnp.float32),
            jax.ShapeDtypeStruct(lse_shape, jnp.float32),
        ),
        grid=(plan.thread_blocks,),
        grid_names=("block",),
        num_threads=1,
        thread_name="warpgroup",
        scratch_types=plan.scratch(),
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )


class _Cache(NamedTuple):
    """Keys or values: in global memory; buffers for copies, and for products; full barriers."""

    ref: Any
    copies: Any
    buffers: Any
    full: Any


class _ThreadBlock:
    """A tile of rows of one key head, and a part of its keys.

    Attributes:
      plan: of the kernel.
      q, out, lse: refs in global memory; given, those of optional operands by name.
      keys, values: of the cache.
      batch, split, head, head_of_all, tile: which tile and part of keys it has.
      steps: key blocks of the part, from block `begin` on.
      first_key, end_key: what rows of the sequence see at most.
      first_position: of its first token; position, of each row's token.
    """

    def __init__(
        self, plan: _Plan, refs, *, q_smem, k_smem, v_smem, p_smem, reduced_smem, k_full, v_full,
        turned_smem=None, units_smem=None,
    ):  # fmt: skip
        p = plan.problem
        self.plan = plan
        self.q_smem, self.p_smem, self.reduced_smem = q_smem, p_smem, reduced_smem
        self.turned_smem, self.units_smem = turned_smem, units_smem
        self.lengths, self.q, k, v, *optional, self.out, self.lse = refs
        self.given = dict(zip(plan.optional, optional, strict=True))
        k_copies, k_smem = k_smem if plan.in_boxes else (k_smem, k_smem)
        v_copies, v_smem = v_smem if plan.in_boxes else (v_smem, v_smem)
        self.keys = _Cache(k, k_copies, k_smem, k_full)
        self.values = _Cache(v, v_copies, v_smem, v_full)
        rest, self.tile = div_rem(lax.axis_index("block"), p.row_tiles)
        rest, self.head = div_rem(rest, p.kv_heads)
        self.batch, self.split = div_rem(rest, plan.splits)
        self.head_of_all = self.batch * p.kv_heads + self.head
        self.heads = pl.ds(self.head * p.group, p.group)

    def run(self) -> None:
        plan, p = self.plan, self.plan.problem
        # Before TMA fills the memory's queues.
        queries = load_queries(self.q.at[self.batch, :, self.heads], self.first_row, plan.rows)
        length = self.lengths[self.batch]
        self.begin: Any = jnp.int32(0)
        if plan.early:
            self.first_loads(plan.blocks_of_cache, lambda step: ())
        self.find_keys(length)
        if not plan.early:
            self.first_loads(self.steps, self.pages_of)
        if plan.is_float8:
            store_queries_float8(self.q_smem, self.units_smem, queries, p.dtype)
        else:
            store_queries(self.q_smem, queries)
        plgpu.commit_smem()
        self.position = self.positions()
        scale = self.given.get("key_scale")
        self.key_scale = None if scale is None else scale[self.head]
        pl.run_scoped(
            self.attend,
            [plgpu.ACC((plan.part, plan.columns), jnp.float32)]
            * (1 if plan.is_float8 else plan.boxes),
            plgpu.ACC((BLOCK_KV, plan.columns), jnp.float32),
        )

    @property
    def first_row(self):
        """Of the tile."""
        return self.tile * self.plan.rows

    def find_keys(self, length) -> None:
        """Which keys count, and which of them are this thread block's."""
        p, splits = self.plan.problem, self.plan.splits
        self.end_key = jnp.clip(length, 0, p.capacity)
        self.first_position = length - p.tokens
        self.first_key: Any = jnp.int32(0)
        if p.window is not None:
            self.first_key = jnp.clip(self.first_position - p.window, 0, self.end_key)
        first_block = lax.div(self.first_key, jnp.int32(BLOCK_KV))
        end_block = lax.div(self.end_key + (BLOCK_KV - 1), jnp.int32(BLOCK_KV))
        share = lax.div(end_block - first_block + (splits - 1), jnp.int32(splits))
        self.begin = first_block + self.split * share
        self.steps = jnp.clip(end_block - self.begin, 0, share)

    def positions(self):
        """Of each row's token."""
        p, rows = self.plan.problem, self.plan.rows
        if p.tokens == 1:
            return self.first_position
        row = plgpu.broadcasted_iota(jnp.int32, (rows,), 0, layout=QUERIES) + self.first_row
        group = plgpu.layout_cast(jnp.full((rows,), p.group, jnp.int32), QUERIES)
        # Rows that are none are of the last token: they see nothing that does not count.
        return jnp.minimum(lax.div(row, group), p.tokens - 1) + self.first_position

    # --- loads ---

    def slot(self, step):
        return lax.rem(step, jnp.int32(self.plan.stages))

    def load(self, step, end, pages, cache: _Cache) -> None:
        """Loads the key block of a step, if it comes before the end."""
        plan, page_size = self.plan, self.plan.problem.page_size

        @pl.when(step < end)
        def _():
            first, buffer = (self.begin + step) * BLOCK_KV, cache.copies.at[self.slot(step)]
            full = lambda: cache.full.at[self.slot(step)]
            if plan.in_boxes:
                for n in range(plan.boxes):
                    rows, columns = pl.ds(first, BLOCK_KV), pl.ds(n * plan.box, plan.box)
                    source = cache.ref.at[self.batch, rows, self.head, columns]
                    plgpu.copy_gmem_to_smem(source, buffer.at[n], full())
                return
            for n in range(plan.copies):
                if page_size is None:
                    source = cache.ref.at[self.batch, pl.ds(first, BLOCK_KV), self.head]
                else:
                    row = lax.rem(first + n * plan.rows_of_copy, jnp.int32(page_size))
                    source = cache.ref.at[pages[n], pl.ds(row, plan.rows_of_copy), self.head]
                target = buffer.at[pl.ds(n * plan.rows_of_copy, plan.rows_of_copy)]
                plgpu.copy_gmem_to_smem(source, target, full())

    def first_loads(self, end, pages_of: Callable) -> None:
        for step in map(jnp.int32, range(self.plan.stages)):
            pages = pages_of(step)
            self.load(step, end, pages, self.keys)
            self.load(step, end, pages, self.values)

    def pages_of(self, step) -> tuple:
        """The page of each copy of a key block; looked up a step before they are needed."""
        plan, page_size = self.plan, self.plan.problem.page_size
        if page_size is None:
            return ()
        first = lambda n: (self.begin + step) * BLOCK_KV + n * plan.rows_of_copy
        firsts = [first(n) for n in range(plan.copies)]
        # A page that holds nothing that counts may have any number.
        keys = [jnp.maximum(jnp.clip(x, self.first_key, self.end_key - 1), 0) for x in firsts]
        table = self.given["page_table"]
        pages = [table[self.batch, div_rem(key, page_size)[0]] for key in keys]
        return tuple(jnp.clip(page, 0, self.keys.ref.shape[0] - 1) for page in pages)

    def boxes_of(self, cache: _Cache, slot) -> list:
        """What a slot has for products."""
        if not self.plan.in_boxes:
            return [cache.buffers.at[slot]]
        return [cache.buffers.at[slot, n] for n in range(self.plan.boxes)]

    # --- logits ---

    def capped(self, logits):
        """What `factor` brings to log2 units."""
        p = self.plan.problem
        if p.soft_cap is None:
            return logits
        # tanh(x) = 1 - 2 / (1 + exp(2x)), as the tanh of the hardware is right to 2^-11.
        powers = jnp.exp2(logits * (2 * LOG2E * p.scale / p.soft_cap))
        return p.soft_cap * LOG2E * (1.0 - 2.0 / (1.0 + powers))

    def masked(self, logits, first):
        """Hides keys from the rows that do not see them."""
        p = self.plan.problem

        def hidden():
            key = plgpu.broadcasted_iota(jnp.int32, logits.shape, 0, layout=plgpu.Layout.WGMMA)
            # Not kept in registers from step to step, of which float8 has none to spare.
            own = self.position + fresh_zero() if self.plan.is_float8 else self.position
            last = jnp.minimum(own, p.capacity - 1) - first
            seen = key <= spread(last, logits.shape)
            if p.window is not None:
                seen &= key >= spread(own - p.window - first, logits.shape)
            return jnp.where(seen, logits, -jnp.inf)

        is_edge = first + BLOCK_KV > jnp.minimum(self.first_position + 1, p.capacity)
        if p.window is not None:
            is_edge |= first < self.first_position + p.tokens - 1 - p.window
        return lax.cond(is_edge, hidden, lambda: logits)

    # --- steps ---

    def attend(self, o_accs, s_acc) -> None:
        plan = self.plan
        operands = self.q_smem, self.p_smem, s_acc, o_accs
        self.products = _Products(*operands)
        if plan.is_float8:
            self.products = _Float8Products(*operands, self.units_smem, self.turned_smem)
        start = *nothing_seen(plan.rows), self.products.no_output()
        reference, sums, output = self.walk(self.steps, start, plan.in_doubt)
        if plan.early:
            self.await_loads_of_no_use()
        total = column_sums(sums, self.reduced_smem)
        if not plan.in_doubt:
            again = vote_any(jnp.where(total < 2.0**plan.allowed.limit, 0, 1))
            pl.when(again)(lambda: self.first_loads(self.steps, self.pages_of))
            end = jnp.where(again, self.steps, 0)
            risen, sums, _ = self.walk(end, (*nothing_seen(plan.rows), []), True)
            reference, total = lax.cond(
                again,
                lambda: (risen, column_sums(sums, self.reduced_smem)),
                lambda: (reference, total),
            )
        self.store(reference, total, output)

    def walk(self, end, state, in_doubt: bool):
        """All steps before the end.

        Args:
          state: reference, sums and output.
          in_doubt: the reference may have to rise.
        """
        step = functools.partial(self.key_step, end=end, in_doubt=in_doubt)
        carry = *state, self.pages_of(jnp.int32(self.plan.stages))
        return lax.fori_loop(jnp.int32(0), end, step, carry)[:3]

    def key_step(self, step, carry, *, end, in_doubt: bool):
        plan, allowed, products = self.plan, self.plan.allowed, self.products
        reference, sums, output, pages = carry
        first = (self.begin + step) * BLOCK_KV
        slot = self.slot(step)
        plgpu.barrier_wait(self.keys.full.at[slot])
        load_next = lambda cache: self.load(step + plan.stages, end, pages, cache)
        logits = products.logits(self.boxes_of(self.keys, slot), lambda: load_next(self.keys))
        if self.key_scale is not None:
            logits *= spread(self.key_scale, logits.shape)
        logits = self.masked(self.capped(logits), first)

        def risen():
            maximum = column_maxima(logits, self.reduced_smem) * plan.factor
            return online_softmax.risen(reference, maximum, allowed)

        if in_doubt:
            before, reference = reference, risen()
            correction = jnp.exp2(before - reference)
            sums *= spread(correction, sums.shape)
            output = products.scaled(output, correction, step == 0)
        else:
            reference = lax.cond(step == 0, risen, lambda: reference)
        exponents = logits * plan.factor - spread(reference, logits.shape)
        if in_doubt:
            bounds = online_softmax.bounds_of(reference, allowed)
            exponents = jnp.minimum(exponents, spread(bounds, logits.shape))
        weights = jnp.exp2(exponents)
        sums += weights
        products.put_weights(weights)
        plgpu.barrier_wait(self.values.full.at[slot])
        block = self.boxes_of(self.values, slot)
        self.zero_rows_of_no_key(block, first)
        output = products.add(output, block, lambda: load_next(self.values))
        return reference, sums, output, self.pages_of(step + 1 + plan.stages)

    def zero_rows_of_no_key(self, block: list, first) -> None:
        """Of values: 0 times what stands there may be NaN."""

        @pl.when((first < self.first_key) | (first + BLOCK_KV > self.end_key))
        def _():
            for part in block:
                keep_operand_rows(part, self.first_key - first, self.end_key - first)
            if self.plan.is_float8:
                plgpu.commit_smem()  # before other threads turn it

    def await_loads_of_no_use(self) -> None:
        """Nothing may be on its way at the end."""
        for step in range(min(self.plan.stages, self.plan.blocks_of_cache)):

            @pl.when(step >= self.steps)
            def _(step=step):
                plgpu.barrier_wait(self.keys.full.at[step])
                plgpu.barrier_wait(self.values.full.at[step])

    def store(self, reference, total, output) -> None:
        plan, given = self.plan, self.given
        sink = None
        if "sinks" in given:
            of_rows = given["sinks"].at[self.head, pl.ds(self.first_row, plan.rows)]
            sink = plgpu.load(of_rows, layout=QUERIES, optimized=False)
        row_end = online_softmax.normalised(reference, total, sink)
        inverse, lse = row_end.inverse, row_end.lse
        if "value_scale" in given:
            inverse *= given["value_scale"][self.head]
        rows = pl.ds(self.first_row, plan.rows)
        store_columns(self.lse.at[self.split, self.head_of_all, rows], lse)
        for n, x in enumerate(self.products.result(output)):
            columns = pl.ds(n * plan.part, plan.part)
            target = self.out.at[self.split, self.batch, :, self.heads, columns]
            store_grouped(target, x * spread(inverse, x.shape), self.first_row)


def spread(columns: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Broadcasts a scalar, or one value a column, over `shape`."""
    return columns if jnp.ndim(columns) == 0 else per_query(columns, shape[0])


def nothing_seen(rows: int) -> tuple[jax.Array, jax.Array]:
    """Reference and sums of rows before their first key block."""
    reference = jnp.full((rows,), online_softmax.NOTHING_SEEN, jnp.float32)
    return plgpu.layout_cast(reference, QUERIES), zero_tile(BLOCK_KV, rows)
