"""Attention in plain JAX: any device, any dtype, any option, forward and reverse mode, any order.

    for each chunk of query rows:                    one lax.map, its body under jax.checkpoint
        logits = scale * q_chunk K' + bias           [B, K, N // K, rows, S] is all that is held
        weights = softmax(mask(soft_cap(logits)))    every key at once: no online rescaling
        out = dropout(weights) V

Derivatives are JAX's own. A row of which nothing is visible has weights 0, not 0 / 0, and what no
row may see is replaced by zeros before it meets a product, since 0 * NaN is NaN.

float8 values with scales (`quantization.Quantized`) are widened chunk by chunk: there the keys too
are walked in chunks, each of which is attention of its own and joins the others by its LSE. e4m3 is
exact in bfloat16, so the products are of values alone, and scales multiply logits and weights.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from jax_flash.call import Call, named
from jax_flash.masks import Visibility, dropout_keep, slice_axis
from jax_flash.quantization import accumulator, scales_of_rows
from jax_flash.sharding import vary_alike

DTYPES = ("float32", "bfloat16", "float16", "float64")

# Bytes of a chunk's logits. A chunk holds a few arrays of this size, forward and reverse.
LOGITS_BYTES = 2**27
# Fewer rows than this make the products too thin to be worth the memory they save.
MIN_ROWS = 16
# Keys of a chunk where they are quantised.
MAX_KEYS = 4096


def unsupported(call: Call) -> str | None:
    """Why plain JAX cannot do the call, None if it can."""
    if call.scales is None and call.query.dtype.name not in DTYPES:
        return f"query is {call.query.dtype.name}, plain JAX attention takes {', '.join(DTYPES)}"
    return None


def attention(call: Call) -> tuple[jax.Array, jax.Array]:
    """Exact attention, in memory linear in the number of keys.

    A row whose visible logits are all -inf (by bias) counts as a row that sees nothing.

    Args:
      call: the checked arguments.

    Returns:
      out: `[B, T, N, h]`, of `call.out_dtype`.
      lse: `[B, T, N]` float32, natural log of the softmax denominator, sinks included; -inf for a
        row that sees nothing.
    """
    return named(*_attention(_tiling(call), call))


def nothing_visible(query, width: int, dtype, operands) -> tuple[jax.Array, jax.Array]:
    """Output `[B, T, N, width]` and LSE where no row sees a key, typed like results of operands."""
    # Made of the query, so that they are sharded as results are.
    zeros = jnp.zeros_like(query[..., :1], dtype)
    out = zeros + jnp.zeros((1, 1, 1, width), dtype)
    return vary_alike((out, jnp.full_like(query[..., 0], -jnp.inf, jnp.float32)), operands)


@dataclasses.dataclass(frozen=True)
class _Tiling:
    """How a call is cut.

    Attributes:
      chunks: how many chunks of rows.
      rows: of each.
      cols: keys that the rows of a chunk may see.
      cols_at_once: of those, where keys are walked in chunks too.
    """

    chunks: int
    rows: int
    cols: int
    cols_at_once: int


def _tiling(call: Call) -> _Tiling:
    B, T, N, _ = call.query.shape
    S = call.key.shape[1]
    if call.is_symbolic:  # nothing is known of sizes
        return _Tiling(1, T, S, S)
    reach = _reach(call.visibility)
    num_keys = S if call.scales is None else min(S, MAX_KEYS)
    num_chunks, rows = _chunks(B * N, T, num_keys, reach)
    num_cols = S if reach is None else min(S, rows + reach)
    return _Tiling(num_chunks, rows, num_cols, min(num_cols, MAX_KEYS))


@functools.partial(jax.jit, static_argnums=0)  # so that calls outside of jit compile once
def _attention(tiling: _Tiling, call: Call) -> tuple[jax.Array, jax.Array]:
    T = call.query.shape[1]
    chunk = _chunk_function(call, tiling)
    if tiling.chunks == 1:
        return chunk(jnp.int32(0))
    # The last chunk starts early rather than be ragged; its repeated rows are dropped.
    starts = jnp.arange(tiling.chunks, dtype=jnp.int32) * tiling.rows
    starts = jnp.minimum(starts, T - tiling.rows)
    repeated = tiling.chunks * tiling.rows - T
    out, lse = lax.map(chunk, starts)
    return _rows_in_order(out, repeated), _rows_in_order(lse, repeated)


def _reach(visibility: Visibility) -> int | None:
    """Where statics bound the keys of a row on both sides: how many it sees, less one."""
    if visibility.window is None or not isinstance(visibility.query_offset, int):
        return None
    left, right = visibility.window
    return max(0, left + (min(right, 0) if visibility.is_causal else right))


def _chunks(heads: int, num_rows: int, num_keys: int, reach: int | None) -> tuple[int, int]:
    """How many chunks of how many rows: the fewest that keep to the budget, of equal size."""
    if reach is None:
        rows = LOGITS_BYTES // (4 * heads * num_keys)
    else:
        # Not more rows than keys in reach: rows + reach keys are loaded for a chunk.
        rows = min(reach, LOGITS_BYTES // (4 * heads * min(num_keys, 2 * reach + MIN_ROWS)))
    num_chunks = -(-num_rows // max(rows, MIN_ROWS))
    return num_chunks, -(-num_rows // num_chunks)


def _rows_in_order(chunks: jax.Array, repeated: int) -> jax.Array:
    """`[chunks, B, rows, ...]` to `[B, T, ...]`, without the rows the last chunk repeats."""
    num_chunks, B, rows, *rest = chunks.shape
    first = jnp.moveaxis(chunks[:-1], 0, 1).reshape(B, (num_chunks - 1) * rows, *rest)
    return jnp.concatenate([first, chunks[-1, :, repeated:]], axis=1)


def _chunk_function(call: Call, tiling: _Tiling):
    """A function of a chunk's first row that gives its out `[B, rows, N, h]` and LSE."""
    rows, num_cols, num_chunks = tiling.rows, tiling.cols, tiling.chunks
    B, T, N, H = call.query.shape
    _, S, K, h = call.value.shape
    quantized = call.scales is not None
    dtype = call.out_dtype
    accum = accumulator(dtype)
    # float32 products on a GPU are TF32 unless asked otherwise.
    precision = None if dtype.itemsize == 2 else lax.Precision.HIGHEST
    visibility = call.visibility

    # What every chunk shares is held in float32, for its gradient is a sum over the chunks.
    def shared(x):
        return x.astype(accum) if num_chunks > 1 and not quantized else x

    key, value = shared(call.key), shared(call.value)
    bias = call.bias
    if bias is not None and bias.shape[2] == 1:
        bias = shared(bias)
    sinks = None if call.sinks is None else call.sinks.astype(accum).reshape(1, K, N // K, 1, 1)
    scale = jnp.asarray(call.scale, accum)
    score_mod = call.score_mod
    if score_mod is not None and num_chunks > 1:
        score_mod = score_mod.held_in(accum)
    batch_entries = call.batch_entries.reshape(B, 1, 1, 1, 1)
    query_heads = call.query_heads.reshape(1, K, N // K, 1, 1)
    row_scales: list[jax.Array] = []
    if call.scales is not None:
        lengths = T, S, S
        row_scales = list(map(scales_of_rows, call.scales, call.block_sizes, lengths))

    def grouped(x):
        """`[b, n, t, s]`, axes whole or 1, to `[b, K or 1, N // K or 1, t, s]`."""
        heads = (1, 1) if x.shape[1] == 1 else (K, N // K)
        return x.reshape(x.shape[0], *heads, *x.shape[2:])

    def chunk(start):
        first_key = jnp.int32(0)
        if num_cols < S and visibility.window is not None:
            left = min(max(visibility.window[0] - visibility.query_offset, -S), T)
            first_key = jnp.clip(start - left, 0, S - num_cols)
        if quantized:
            out, lse = walk(start, first_key)
        else:
            out, lse = tile(start, first_key, num_cols, sinks)
        return out.astype(dtype), lse.astype(jnp.float32)

    def walk(start, first_key):
        """Output and LSE of rows from `start` on, whose num_cols keys are read part by part."""
        cols = tiling.cols_at_once

        def step(index, total):
            fresh = first_key + index * cols
            # The last part begins early rather than be ragged; the keys it repeats are hidden.
            begin = jnp.minimum(fresh, first_key + num_cols - cols)
            return joined(total, tile(start, begin, cols, None, fresh if num_cols % cols else None))

        queries = slice_axis(call.query, 1, start, rows)
        nothing = nothing_visible(queries, h, accum, (call.arrays, start))
        out, lse = lax.fori_loop(jnp.int32(0), jnp.int32(-(-num_cols // cols)), step, nothing)
        return (out, lse) if call.sinks is None else with_sinks(out, lse, call.sinks)

    def read(x, start, size):
        """x[:, start : start + size], for the products."""
        if not quantized:
            return slice_axis(x, 1, start, size).astype(dtype)
        # As bytes: where XLA cannot slice float8, on CPUs, it would widen all of x before the loop.
        part = slice_axis(lax.bitcast_convert_type(x, jnp.uint8), 1, start, size)
        return lax.bitcast_convert_type(part, x.dtype).astype(dtype)

    def tile(start, first_key, num_cols, sinks, fresh=None):
        """Output and LSE of `rows` rows and num_cols keys; those before fresh are hidden."""
        q = read(call.query, start, rows).reshape(B, rows, K, N // K, H)
        k = read(key, first_key, num_cols)
        v = read(value, first_key, num_cols)

        queries = (start + jnp.arange(rows, dtype=jnp.int32)).reshape(1, 1, 1, rows, 1)
        keys = (first_key + jnp.arange(num_cols, dtype=jnp.int32)).reshape(1, 1, 1, 1, num_cols)
        indices = batch_entries, query_heads, queries, keys

        conditions = []
        if (by_arguments := visibility.tile(start, rows, first_key, num_cols)) is not None:
            conditions.append(grouped(by_arguments))
        if fresh is not None:
            conditions.append(keys >= fresh)
        if call.mask_mod is not None:
            conditions.append(call.mask_mod.at(*indices))
        visible = functools.reduce(jnp.logical_and, conditions) if conditions else None
        if visible is not None:
            seeing = visible.any(4).transpose(0, 3, 1, 2)[..., None]
            seen = visible.any((2, 3)).transpose(0, 2, 1)[..., None]
            q = jnp.where(seeing, q, 0)
            k = jnp.where(seen, k, 0)
            v = jnp.where(seen, v, 0)
        if quantized:
            q_scale, k_scale, v_scale = (
                slice_axis(x, 1, first, size)
                for x, first, size in zip(
                    row_scales,
                    (start, first_key, first_key),
                    (rows, num_cols, num_cols),
                    strict=True,
                )
            )
            if visible is not None:
                v_scale = jnp.where(seen[..., 0], v_scale, 0)
            q_scale = q_scale.reshape(B, rows, K, N // K).transpose(0, 2, 3, 1)[..., None]
            k_scale, v_scale = (x.swapaxes(1, 2)[:, :, None, None] for x in (k_scale, v_scale))

        logits = scale * jnp.einsum(
            "btkgh,bskh->bkgts", q, k, precision=precision, preferred_element_type=accum
        )
        if quantized:
            logits = logits * q_scale * k_scale
        if bias is not None:
            part = slice_axis(slice_axis(bias, 2, start, rows), 3, first_key, num_cols)
            logits = logits + grouped(part).astype(accum)
        if score_mod is not None:
            logits = score_mod.at(logits, *indices, visible=visible).astype(accum)
            logits = jnp.broadcast_to(logits, (B, K, N // K, rows, num_cols))
        if call.logits_soft_cap is not None:
            if visible is not None:  # tanh'(NaN) * 0 is NaN
                logits = jnp.where(visible, logits, 0)
            logits = call.logits_soft_cap * jnp.tanh(logits / call.logits_soft_cap)
        if visible is not None:
            logits = jnp.where(visible, logits, -jnp.inf)

        # Softmax does not depend on what is subtracted: no derivative through the maximum.
        top = lax.stop_gradient(logits.max(-1, keepdims=True))
        empty = top == -jnp.inf
        if sinks is not None:
            sinks, takes_all = finite_sinks(sinks)
            top = jnp.maximum(top, lax.stop_gradient(sinks))
        top = jnp.where(empty, 0, top)
        weights = jnp.exp(logits - top)
        total = weights.sum(-1, keepdims=True)
        if sinks is not None:
            total = total + jnp.exp(jnp.where(empty, -jnp.inf, sinks) - top)
        total = jnp.where(empty, 1, total)
        weights = weights / total
        lse = top + jnp.log(total)
        if sinks is not None:
            weights, lse = jnp.where(takes_all, 0, weights), jnp.where(takes_all, jnp.inf, lse)
        lse = jnp.where(empty, -jnp.inf, lse)

        if call.dropout_rate > 0:
            keep = dropout_keep(call.dropout_key, call.dropout_rate, *indices)
            weights = jnp.where(keep, weights / (1 - call.dropout_rate), 0)
        if quantized:
            weights = weights * v_scale

        out = jnp.einsum(
            "bkgts,bskh->btkgh",
            weights.astype(dtype),
            v,
            precision=precision,
            preferred_element_type=accum,
        )
        # Also keeps the cotangent of an empty row, whatever it is, out of the products.
        out = jnp.where(empty[..., 0].transpose(0, 3, 1, 2)[..., None], 0, out)
        return (
            out.reshape(B, rows, N, h),
            lse[..., 0].transpose(0, 3, 1, 2).reshape(B, rows, N),
        )

    # Inside a loop nothing can be merged across forward and reverse anyway.
    return jax.checkpoint(chunk, prevent_cse=num_chunks == 1)


def joined(*parts) -> tuple[jax.Array, jax.Array]:
    """Output and LSE over the keys of several parts."""
    lse = functools.reduce(_log_sum, [part_lse for _, part_lse in parts])
    outs = []
    for part_out, part_lse in parts:
        weight = jnp.exp(part_lse - jnp.where(lse == -jnp.inf, 0.0, lse))
        accum = accumulator(part_out.dtype)
        outs.append(weight[..., None].astype(accum) * part_out.astype(accum))
    return functools.reduce(jnp.add, outs), lse


def _log_sum(a: jax.Array, b: jax.Array) -> jax.Array:
    """log(exp(a) + exp(b)), -inf of two such, and nowhere NaN on the way, for jax_debug_nans."""
    nothing = jnp.maximum(a, b) == -jnp.inf
    total = jnp.logaddexp(*(jnp.where(nothing, 0.0, x) for x in (a, b)))
    return jnp.where(nothing, -jnp.inf, total)


def with_sinks(out, lse, sinks) -> tuple[jax.Array, jax.Array]:
    """Output and LSE with one more logit for each head; a row that sees nothing stays so."""
    sinks, takes_all = finite_sinks(sinks.astype(jnp.float32)[None, None])
    empty = lse == -jnp.inf
    own = jnp.where(empty, 0.0, lse)
    total = jnp.logaddexp(own, sinks)
    share = jnp.where(takes_all, 0.0, jnp.exp(own - total))
    weighted = out.astype(jnp.float32) * share[..., None]
    total = jnp.where(takes_all, jnp.inf, total)
    return weighted.astype(out.dtype), jnp.where(empty, -jnp.inf, total)


def finite_sinks(sinks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sinks with 0 for what is infinite, and where: there they take all weight, come what may.

    By a formula they would give inf - inf.
    """
    takes_all = sinks == jnp.inf
    return jnp.where(takes_all, 0, sinks), takes_all
