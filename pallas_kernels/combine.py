"""Puts together the parts of attention that splits of the keys have given.

    out = sum of w_s O_s / sum of w_s,    w_s = exp(LSE_s)

A thread block takes a row, or as many as 128 threads hold. It does nothing but wait for memory, so
every load is issued before any is used, and many thread blocks share an SM.
"""

import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.interpret import interpreting
from pallas_kernels.problem import LOG2E
from pallas_kernels.ptx.arithmetic import div_rem
from pallas_kernels.ptx.mlir import WARPGROUP_THREADS


def combine(
    parts: jax.Array, lse: jax.Array, sinks: jax.Array | None, *, kv_heads: int, dtype: np.dtype
) -> jax.Array:
    """The output over all splits.

    Args:
      parts: `[splits, B, T, N, H]` float32; finite where their LSE is -inf.
      lse: `[splits, B * K, >= T * N / K]` float32, natural log; token by token for each key head;
        -inf for a row that sees no key.
      sinks: None, or `[N]` float32: one more logit of each head.
      kv_heads: K.
      dtype: of the output.

    Returns:
      Output `[B, T, N, H]`. A row that sees no key: 0.
    """
    optional = () if sinks is None else (sinks,)
    kernel = _build(parts.shape, kv_heads, np.dtype(dtype), bool(optional), interpreting())
    return kernel(parts, lse, *optional)


@functools.lru_cache
def _build(
    shape: tuple[int, ...], kv_heads: int, dtype: np.dtype, with_sinks: bool, interpret: bool
):
    splits, batch, tokens, heads, width = shape
    all_rows, group = batch * tokens * heads, heads // kv_heads
    side_by_side = max(1, WARPGROUP_THREADS // width)
    columns = side_by_side * width
    strided = plgpu.Layout.WG_STRIDED((columns,), vec_size=columns // WARPGROUP_THREADS)

    def combine_splits(parts_ref, lse_ref, *refs):
        *sinks_ref, out_ref = refs
        block = lax.axis_index("block")

        def places(row):
            """Where a row has its LSE, and its sink."""
            token, head = div_rem(row, heads)
            entry, token = div_rem(token, tokens)
            kv_head, of_group = div_rem(head, group)
            return (entry * kv_heads + kv_head, token * group + of_group), (head,)

        rows = [jnp.minimum(block * side_by_side + n, all_rows - 1) for n in range(side_by_side)]
        lse_places, sink_places = zip(*map(places, rows), strict=True)

        def in_each_column(ref, places):
            """What an array has at a place for each row, in the columns of the row."""
            values = [jnp.broadcast_to(ref[place], (columns,)) for place in places]
            values = [plgpu.layout_cast(value, strided) for value in values]
            if len(values) == 1:
                return values[0]
            column = plgpu.broadcasted_iota(jnp.int32, (columns,), 0, layout=strided)
            return jnp.where(column < width, *values)

        parts = [plgpu.load(parts_ref.at[s, block], layout=strided) for s in range(splits)]
        logits = [in_each_column(lse_ref.at[s], lse_places) for s in range(splits)]
        top = functools.reduce(jnp.maximum, logits)
        is_empty = top == -jnp.inf
        if sinks_ref:
            sink = in_each_column(sinks_ref[0], sink_places)
            top = jnp.maximum(top, sink)
        top = jnp.where(is_empty, 0.0, top)
        weights = [jnp.exp2((x - top) * LOG2E) for x in logits]
        total = sum(weights[1:], start=weights[0])
        if sinks_ref:
            # It may be infinite, and then has all weight.
            total += jnp.where(sink < top, jnp.exp2((sink - top) * LOG2E), 1.0)
        out = sum(
            (w * x for w, x in zip(weights[1:], parts[1:], strict=True)), weights[0] * parts[0]
        )
        out_ref[block] = jnp.where(is_empty, 0.0, out / total).astype(dtype)

    blocks = -(-all_rows // side_by_side)
    kernel = plgpu.kernel(
        combine_splits,
        out_type=jax.ShapeDtypeStruct((blocks, columns), dtype),
        grid=(blocks,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )

    def run(parts, lse, *optional):
        parts = parts.reshape(splits, all_rows, width)
        if all_rows % side_by_side:
            parts = jnp.pad(parts, ((0, 0), (0, 1), (0, 0)))
        out = kernel(parts.reshape(splits, blocks, columns), lse, *optional)
        return out.reshape(-1, width)[:all_rows].reshape(shape[1:])

    return run
