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

import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import combine
from pallas_kernels.decode_block import ThreadBlock
from pallas_kernels.decode_config import DecodeProblem
from pallas_kernels.decode_plan import Plan
from pallas_kernels.interpret import interpreting
from pallas_kernels.problem import LOG2E


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


@functools.lru_cache
def _build(problem: DecodeProblem, splits: int, optional: tuple[str, ...], interpret: bool):
    plan, p = Plan(problem, splits, optional), problem

    def decode_attention(*refs, **scratch):
        ThreadBlock(plan, refs, **scratch).run()

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
