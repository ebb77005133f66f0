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

from pallas_kernels.online_softmax import LOG2E
from pallas_kernels.primitives import WARPGROUP_THREADS, div_rem, interpreting

MOST_SPLITS = 128  # all of them are written out in the code


def combine(
    parts: jax.Array, lse: jax.Array, sinks: jax.Array | None, *, rows: int, dtype: np.dtype
) -> tuple[jax.Array, jax.Array]:
    """Output and LSE over all splits.

    Args:
      parts: `[splits, heads * rows, H]` float32; finite where their LSE is -inf.
      lse: `[splits, heads, >= rows]` float32, natural log; -inf for a row that sees no key.
      sinks: None, or `[K, rows]` float32, heads a multiple of K: one more logit of each row.
      rows: of each head.
      dtype: of the output.

    Returns:
      Output `[heads * rows, H]` and LSE `[heads, >= rows]`.
    """
    splits, all_rows, width = parts.shape
    total = functools.reduce(jnp.logaddexp, list(lse))
    if sinks is not None:
        heads = lse.shape[1]
        beyond = lse.shape[2] - rows
        sinks = jnp.tile(jnp.pad(sinks, ((0, 0), (0, beyond))), (heads // sinks.shape[0], 1))
        total = jnp.where(total == -jnp.inf, -jnp.inf, jnp.logaddexp(total, sinks))
    optional = () if sinks is None else (sinks,)
    kernel = _build(splits, all_rows, width, rows, np.dtype(dtype), bool(optional), interpreting())
    return kernel(parts, lse, *optional), total


@functools.lru_cache
def _build(
    splits: int,
    all_rows: int,
    width: int,
    rows: int,
    dtype: np.dtype,
    with_sinks: bool,
    interpret: bool,
):
    side_by_side = max(1, WARPGROUP_THREADS // width)
    columns = side_by_side * width
    strided = plgpu.Layout.WG_STRIDED((columns,), vec_size=columns // WARPGROUP_THREADS)

    def combine_splits(parts_ref, lse_ref, *refs):
        *sinks_ref, out_ref = refs
        block = lax.axis_index("block")
        row_pairs = [
            div_rem(jnp.minimum(block * side_by_side + n, all_rows - 1), rows)
            for n in range(side_by_side)
        ]

        def in_each_column(ref):
            """What a `[heads, rows]` array has for the row of each column."""
            values = [jnp.broadcast_to(ref[head, row], (columns,)) for head, row in row_pairs]
            values = [plgpu.layout_cast(value, strided) for value in values]
            if len(values) == 1:
                return values[0]
            column = plgpu.broadcasted_iota(jnp.int32, (columns,), 0, layout=strided)
            return jnp.where(column < width, *values)

        parts = [plgpu.load(parts_ref.at[s, block], layout=strided) for s in range(splits)]
        logits = [in_each_column(lse_ref.at[s]) for s in range(splits)]
        top = functools.reduce(jnp.maximum, logits)
        is_empty = top == -jnp.inf
        if sinks_ref:
            sink = in_each_column(sinks_ref[0])
            top = jnp.maximum(top, sink)
        top = jnp.where(is_empty, 0.0, top)
        weights = [jnp.exp2((x - top) * LOG2E) for x in logits]
        total = sum(weights[1:], start=weights[0])
        if sinks_ref:
            total += jnp.exp2((sink - top) * LOG2E)
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
        if all_rows % side_by_side:
            parts = jnp.pad(parts, ((0, 0), (0, 1), (0, 0)))
        out = kernel(parts.reshape(splits, blocks, columns), lse, *optional)
        return out.reshape(-1, width)[:all_rows]

    return run
