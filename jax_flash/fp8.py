"""attention_fp8(): a forward pass in FP8 that a model can be trained with."""

import dataclasses
import functools
import inspect
from typing import Any, Literal, Unpack, overload

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jax_flash import api, dispatch
from jax_flash.arguments import checked
from jax_flash.batches import as_given
from jax_flash.call import Call, by_device, named
from jax_flash.checks import as_array
from jax_flash.quantization import quantize_fp8


@overload
def attention_fp8(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    block_size: int | None = None,
    incoherent_key: jax.Array | None = None,
    return_residual: Literal[False] = False,
    **options: Unpack[api.Options],
) -> jax.Array: ...


@overload
def attention_fp8(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    block_size: int | None = None,
    incoherent_key: jax.Array | None = None,
    return_residual: Literal[True],
    **options: Unpack[api.Options],
) -> tuple[jax.Array, jax.Array]: ...


@overload
def attention_fp8(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    block_size: int | None = None,
    incoherent_key: jax.Array | None = None,
    return_residual: bool,
    **options: Unpack[api.Options],
) -> jax.Array | tuple[jax.Array, jax.Array]: ...


def attention_fp8(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    block_size: int | None = None,
    incoherent_key: jax.Array | None = None,
    **options: Any,
) -> Any:
    """`jax_flash.attention` in FP8, of inputs that are not, with gradients.

    Query, key and value are quantised (`jax_flash.quantize_fp8`), and the forward pass is that of
    FP8. The gradients are those of `jax_flash.attention` at the inputs as they were before, in
    their own dtype: quantisation counts as the identity (straight-through). The backward pass needs
    output and LSE of the logits that it computes itself, or the weights of rows with large logits
    would not add up to 1, and a model would not train. So it begins with a forward pass in the
    inputs' dtype, keeps only the inputs for that, and takes as long as the one of
    `jax_flash.attention` under `jax.checkpoint`.

    Values are quantised without their mean over the keys, which is added to the output: weights add
    up to 1, and rounding, as well as Hopper's sums of FP8 products, cost what is left of them. Not
    so with sinks or dropout.

    Rows beyond `query_seq_lengths` and `key_value_seq_lengths` are not read: they do not count in
    the scales. Reverse mode only, and once.

    Args:
      query: `[B, T, N, H]`, or `[T, N, H]` without a batch; bfloat16, float16 or float32.
      key: `[B, S, K, H]`, as in `jax_flash.attention`.
      value: `[B, S, K, h]`.
      block_size: rows that share a scale, as in `jax_flash.quantize_fp8`.
      incoherent_key: None, or a JAX random key, as in `jax_flash.quantize_fp8`: with it outliers in
        query and key cost less accuracy. A new one for each step is as good as the same for all.
      **options: all others of `jax_flash.attention` but functions; `implementation` is that of the
        forward and of the backward pass, and `config` has the settings of both.

    Returns:
      As `jax_flash.attention`: the output in the query's dtype, or (output, LSE).

    Raises:
      TypeError, ValueError, NotImplementedError: as `jax_flash.attention`.

    Source: Shah et al. 2024, "FlashAttention-3", section 3.3.
    """
    query, key, value = (
        as_array(name, x) for name, x in (("query", query), ("key", key), ("value", value))
    )
    bound = inspect.signature(api.attention).bind(query, key, value, **options)
    bound.apply_defaults()
    call = checked(**bound.arguments)
    if call.mask_mod is not None or call.score_mod is not None:
        raise NotImplementedError(
            "attention_fp8 takes no mask_mod and no score_mod; jax_flash.attention does, also of"
            " Quantized arrays."
        )
    statics = bound.arguments["implementation"], block_size
    out, lse = by_device(_attend, call, incoherent_key, statics=statics, plain=True)
    out, lse = as_given(query, out), as_given(query, lse)
    return (out, lse) if call.return_residual else out


def _attend(
    implementation: str | None, block_size: int | None, call: Call, incoherent_key
) -> tuple[jax.Array, jax.Array]:
    """Output `[B, T, N, h]` and LSE `[B, T, N]`."""
    see = call.visibility
    lengths = see.query_seq_lengths, see.key_value_seq_lengths, see.key_value_seq_lengths
    fp8_query, fp8_key, fp8_value = (
        lax.stop_gradient(_zero_beyond(x, length))
        for x, length in zip((call.query, call.key, call.value), lengths, strict=True)
    )
    offset = _offset(call, fp8_value)
    if offset is not None:
        fp8_value = fp8_value.astype(offset.dtype) - offset
        fp8_value = _zero_beyond(fp8_value, see.key_value_seq_lengths)
    quantized = quantize_fp8(
        fp8_query, fp8_key, fp8_value, block_size=block_size, incoherent_key=incoherent_key
    )
    in_fp8 = dataclasses.replace(
        call.with_arrays(lax.stop_gradient(call.arrays)),
        query=quantized[0].values,
        key=quantized[1].values,
        value=quantized[2].values,
        scales=(quantized[0].scales, quantized[1].scales, quantized[2].scales),
        block_sizes=(quantized[0].block_size,) * 3,
        largest=(quantized[0].largest, quantized[1].largest),
        return_residual=True,
    )
    out, lse = dispatch.attention(in_fp8, implementation)
    assert lse is not None  # as return_residual asks for it
    if offset is not None:
        seeing = jnp.logical_not(jnp.isneginf(lse))[..., None]
        of_heads = jnp.repeat(offset, call.query.shape[2] // call.key.shape[2], axis=2)
        out = out.astype(of_heads.dtype) + jnp.where(seeing, of_heads, 0)
    out = out.astype(call.query.dtype)
    # Named, as the backward pass takes nothing of the forward pass in FP8: it is not run again.
    return named(*_given(call.static, implementation, call.arrays, out, lse))


def _offset(call: Call, value: jax.Array) -> jax.Array | None:
    """The mean of the values `[B, 1, K, h]`, float32; None where weights do not add up to 1.

    Args:
      value: that of the call, with zeros beyond the lengths.
    """
    if call.sinks is not None or call.dropout_rate > 0:
        return None
    total = value.astype(jnp.float32).sum(axis=1, keepdims=True)
    count: jax.Array | int = 1 if value.shape[1] == 0 else value.shape[1]
    if call.visibility.key_value_seq_lengths is not None:
        count = jnp.clip(call.visibility.key_value_seq_lengths, 1, count).reshape(-1, 1, 1, 1)
    mean = total / jnp.asarray(count, total.dtype)
    return jnp.where(jnp.isfinite(mean), mean, 0)


def _zero_beyond(x: jax.Array, lengths: jax.Array | None) -> jax.Array:
    """x `[B, T, N, H]` with zeros in the rows from lengths `[B]` on."""
    if lengths is None:
        return x
    exists = jnp.arange(x.shape[1], dtype=jnp.int32)[None] < lengths[:, None]
    return jnp.where(exists[:, :, None, None], x, 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _given(call: Call, implementation: str | None, arrays, out: jax.Array, lse: jax.Array):
    """out `[B, T, N, h]` and LSE `[B, T, N]`, with the gradients of computing the call again.

    Args:
      call: without its arrays, which are an argument: a closure would leak them.
    """
    del call, implementation, arrays
    return out, lse


def _given_forward(call: Call, implementation: str | None, arrays, out, lse):
    del call, implementation
    return (out, lse), arrays


def _given_backward(call: Call, implementation: str | None, arrays, cotangents):
    is_floating = lambda x: jnp.issubdtype(x.dtype, jnp.floating)
    floating = {name: x for name, x in arrays.items() if is_floating(x)}
    run = lambda x: dispatch.attention(call.with_arrays(arrays | x), implementation)
    (_, lse), vjp = jax.vjp(run, floating)
    d_out, d_lse = cotangents
    (gradients,) = vjp((d_out, None if lse is None else d_lse))  # cuDNN gives no LSE
    return {name: gradients.get(name) for name in arrays}, None, None


_given.defvjp(_given_forward, _given_backward)
