"""The arguments of `attention`, described there: checked, and in their canonical form."""

import dataclasses
import functools
import inspect
import math
import numbers
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash import dispatch
from jax_flash.batches import with_one_axis
from jax_flash.block_mask import BlockMask
from jax_flash.call import Call
from jax_flash.checks import (
    as_array,
    as_float,
    as_int32,
    broadcastable,
    finite,
    is_name,
    is_number,
    kind_of,
    need,
    need_flag,
    need_number_or_none,
    need_static,
    per_batch,
)
from jax_flash.functions import traced
from jax_flash.masks import Visibility
from jax_flash.quantization import DTYPES, FLOAT8, LARGEST, Quantized, accumulator, key_words
from pallas_kernels.config import Config
from pallas_kernels.dropout_words import steps_of
from pallas_kernels.problem import DROPOUT_STEPS

# Beyond these float32 loses what logits and caps are divided by each other to.
_SOFT_CAPS = (1e-30, 1e30)


def checked(
    *,
    query,
    key,
    value,
    bias,
    mask,
    scale,
    is_causal,
    query_seq_lengths,
    key_value_seq_lengths,
    local_window_size,
    implementation,
    return_residual,
    query_segment_ids,
    key_value_segment_ids,
    query_offset,
    logits_soft_cap,
    sinks,
    dropout_rate,
    dropout_key,
    deterministic,
    config,
    mask_mod,
    score_mod,
) -> Call:
    """Checks the arguments of `attention`, described there, and returns their canonical form."""
    if np.ndim(query) > 4:
        return checked(**with_one_axis(locals()))
    flags = dict(is_causal=is_causal, return_residual=return_residual, deterministic=deterministic)
    _check_choices(flags, implementation, config)
    query, key, value, has_batch, in_float8 = _operands(
        {"query": query, "key": key, "value": value}, config
    )
    B, T, N, H = query.shape
    S = value.shape[1]
    if bias is not None:
        needs = "floating, as it is added to logits; mask=bias, if False hides a key"
        bias = broadcastable("bias", _floating("bias", bias, needs), (B, N, T, S))
    if sinks is not None:
        sinks = _floating("sinks", sinks)
        need(sinks.shape == (N,), "sinks", sinks.shape, f"one per query head, {(N,)}")
    of_batch = functools.partial(per_batch, shape=(B,), has_batch=has_batch)
    if query_seq_lengths is not None:
        query_seq_lengths = of_batch("query_seq_lengths", query_seq_lengths)
    if key_value_seq_lengths is not None:
        key_value_seq_lengths = of_batch("key_value_seq_lengths", key_value_seq_lengths)
    ids = _segment_ids(query_segment_ids, key_value_segment_ids, (B, T, S), has_batch)
    window = None if local_window_size is None else as_window(local_window_size)
    query_offset = _offset(query_offset, B)
    is_causal, window, query_offset = simplest(bool(is_causal), window, query_offset, T, S)
    dropout_key = _dropout_key(dropout_rate, dropout_key)
    call = Call(
        query=query,
        key=key,
        value=value,
        visibility=Visibility(
            is_causal=is_causal,
            window=window,
            query_offset=query_offset,
            query_seq_lengths=query_seq_lengths,
            key_value_seq_lengths=key_value_seq_lengths,
            query_segment_ids=ids[0],
            key_value_segment_ids=ids[1],
            mask=None if mask is None else _mask(mask, (B, N, T, S)),
        ),
        scale=_scale(scale, H, accumulator(query.dtype)),
        bias=bias,
        logits_soft_cap=as_soft_cap(logits_soft_cap),
        sinks=sinks,
        dropout_rate=steps_of(float(dropout_rate)) / DROPOUT_STEPS,
        dropout_key=dropout_key,
        return_residual=bool(return_residual),
        deterministic=bool(deterministic),
        config=config,
        **in_float8,
    )
    if isinstance(mask_mod, BlockMask):
        mask_mod.check((B, N, T, S))
        call = dataclasses.replace(call, mask_mod=mask_mod.function)
    else:
        function = traced("mask_mod", mask_mod, operands=call.arrays)
        call = dataclasses.replace(call, mask_mod=function)
    scores = accumulator(query.dtype)
    score_mod = traced("score_mod", score_mod, scores, operands=call.arrays)
    return dataclasses.replace(call, score_mod=score_mod)


def explained(signature: inspect.Signature, choose: Callable, args, kwargs) -> dispatch.Explanation:
    """What `choose` says of the arguments by name, of which any array may be a ShapeDtypeStruct."""
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    arguments = bound.arguments
    is_shape = lambda x: isinstance(x, jax.ShapeDtypeStruct)
    shapes = {k: x for k, x in arguments.items() if any(map(is_shape, jax.tree.leaves(x)))}
    if not shapes:  # untraced, so that the query's own device counts
        return choose(**arguments)
    explanations = []
    jax.eval_shape(lambda arrays: explanations.append(choose(**arguments | arrays)), shapes)
    return explanations[0]


def _check_choices(flags: dict[str, Any], implementation, config) -> None:
    for name, flag in flags.items():
        need_flag(name, flag)
    need(
        implementation is None or is_name(implementation, dispatch.IMPLEMENTATIONS),
        "implementation",
        repr(implementation),
        f"None or one of {', '.join(dispatch.IMPLEMENTATIONS)}",
    )
    need(
        config is None or isinstance(config, Config),
        "config",
        type(config).__name__,
        "None or a jax_flash.Config",
        TypeError,
    )
    need(
        config is None or implementation in (None, "mosaic_gpu"),
        "config",
        f"one with implementation={implementation!r}",
        "None there: it is a setting of the mosaic_gpu kernels",
    )


class _Operands(NamedTuple):
    """Query, key and value, with a batch.

    Attributes:
      has_batch: whether they came with one.
      in_float8: what a `Call` has of them beside their values if they are Quantized.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    has_batch: bool
    in_float8: dict[str, Any]


def _operands(given: dict[str, Any], config: Config | None) -> _Operands:
    quantized = {name: x for name, x in given.items() if isinstance(x, Quantized)}
    need(
        len(quantized) in (0, len(given)),
        "query, key and value",
        f"Quantized for {' and '.join(quantized)} alone",
        "Quantized for all of them, or for none",
        TypeError,
    )
    need(
        config is None or not quantized or config.forward_fp8 is not None,
        "config",
        "one without forward_fp8 for Quantized arrays",
        "None there, or settings of the FP8 kernel",
    )
    query, key, value = (
        as_array(name, x.values if isinstance(x, Quantized) else x) for name, x in given.items()
    )
    dtype = query.dtype
    if quantized:
        need(dtype == FLOAT8, "query", f"values in {dtype}", FLOAT8.dtype.name, TypeError)
    else:
        need(dtype.name in DTYPES, "query", dtype, f"one of {', '.join(DTYPES)}", TypeError)
    need(key.dtype == dtype, "key", key.dtype, f"the dtype of query, {dtype}", TypeError)
    need(value.dtype == dtype, "value", value.dtype, f"the dtype of query, {dtype}", TypeError)
    need(query.ndim >= 3, "query", query.shape, "[..., T, N, H]")
    has_batch = query.ndim == 4
    needs = "[B, S, K, {}], as query has a batch" if has_batch else "[S, K, {}], as query has none"
    need(key.ndim == query.ndim, "key", key.shape, needs.format("H"))
    need(value.ndim == query.ndim, "value", value.shape, needs.format("h"))
    if not has_batch:
        query, key, value = query[None], key[None], value[None]
    _check_shapes(query, key, value)
    if not quantized:
        return _Operands(query, key, value, has_batch, {})
    scales = (
        _scales(name, x, values.shape, has_batch)
        for (name, x), values in zip(quantized.items(), (query, key, value), strict=True)
    )
    in_float8 = {
        "scales": tuple(scales),
        "block_sizes": tuple(int(x.block_size) for x in quantized.values()),
        "largest": (quantized["query"].largest, quantized["key"].largest),
    }
    return _Operands(query, key, value, has_batch, in_float8)


def _check_shapes(query: jax.Array, key: jax.Array, value: jax.Array) -> None:
    B, _, _, H = query.shape
    _, S, K, h = value.shape
    need(H > 0, "query", f"head width {H}", "at least 1")
    need(h > 0, "value", f"head width {h}", "at least 1")
    need(key.shape[0] == B, "key", f"batch {key.shape[0]}", f"that of query, {B}")
    need(value.shape[0] == B, "value", f"batch {value.shape[0]}", f"that of query, {B}")
    need(key.shape[3] == H, "key", f"head width {key.shape[3]}", f"that of query, {H}")
    need(key.shape[1] == S, "value", f"length {S}", f"that of key, {key.shape[1]}")
    need(key.shape[2] == K, "value", f"{K} heads", f"as many as key, {key.shape[2]}")
    need_heads_that_fit(query, key)


def _scales(name: str, x: Quantized, shape: tuple[int, ...], has_batch: bool) -> jax.Array:
    """The scales of an array of shape `[B, T, N, H]`, as float32 `[B, blocks, N]`."""
    block_size, scales = x.block_size, as_array(f"{name}, scales", x.scales)
    given_shape = scales.shape
    need(
        is_number(block_size, numbers.Integral) and block_size > 0,
        name,
        f"a block_size of {block_size!r}",
        "an integer of 1 or more",
    )
    need(
        is_number(x.largest, numbers.Real) and 0 < x.largest <= LARGEST,
        name,
        f"largest of {x.largest!r}",
        f"a number above 0, and {LARGEST} at most",
    )
    block_size = int(block_size)  # numpy's may be too short for a length
    need(scales.dtype == jnp.float32, name, f"scales in {scales.dtype}", "float32", TypeError)
    if not has_batch:
        scales = scales[None]
    B, T, N, _ = shape
    whole = B, -(-T // block_size), N
    need(
        scales.ndim == 3
        and scales.shape[1] == whole[1]
        and scales.shape[0] in (1, B)
        and scales.shape[2] in (1, N),
        name,
        f"scales of shape {given_shape}",
        f"{whole if has_batch else whole[1:]}, where batch and heads may be 1,"
        f" for blocks of {block_size} rows",
    )
    return jnp.broadcast_to(scales, whole)


def _floating(name: str, x, needs: str = "floating") -> jax.Array:
    x = as_array(name, x)
    need(jnp.issubdtype(x.dtype, jnp.floating), name, x.dtype, needs, TypeError)
    return x


def _mask(mask, shape: tuple[int, ...]) -> jax.Array:
    is_function = callable(mask) or isinstance(mask, BlockMask)
    needs = "an array; mask_mod takes a function or a BlockMask"
    need(not is_function, "mask", kind_of(mask), needs, TypeError)
    mask = as_array("mask", mask)
    needs = "bool: mask.astype(bool), if it is 0 where a key is hidden"
    if jnp.issubdtype(mask.dtype, jnp.floating):
        needs += ", or bias=mask, if it is to be added to logits"
    need(mask.dtype == jnp.bool_, "mask", mask.dtype, needs, TypeError)
    return broadcastable("mask", mask, shape)


def _scale(scale, H, dtype) -> Any:
    """A float, or a scalar array; None is 1 / sqrt(H), of which H may be a symbol of jax.export."""
    if scale is None:
        if isinstance(H, int):
            return 1 / math.sqrt(H)
        return jax.lax.rsqrt(jnp.asarray(H, dtype))
    if is_number(scale, numbers.Real):
        return finite("scale", scale, dtype)
    is_array = hasattr(scale, "shape")
    need(is_array, "scale", type(scale).__name__, "None, a number or a scalar array", TypeError)
    scale = as_array("scale", scale)
    is_real = jnp.issubdtype(scale.dtype, jnp.floating) or jnp.issubdtype(scale.dtype, jnp.integer)
    need(is_real, "scale", scale.dtype, "a real number", TypeError)
    need(scale.shape == (), "scale", f"shape {scale.shape}", "a number or a scalar array")
    return scale


def _segment_ids(
    of_queries, of_keys, sizes: tuple[int, int, int], has_batch: bool
) -> tuple[jax.Array | None, jax.Array | None]:
    """Those of queries and keys; sizes are B, T and S."""
    B, T, S = sizes
    need(
        (of_queries is None) == (of_keys is None),
        "query_segment_ids and key_value_segment_ids",
        "one without the other",
        "both or neither",
    )
    if of_queries is None:
        return None, None
    ids = functools.partial(per_batch, has_batch=has_batch, saturated=False)
    query_ids = ids("query_segment_ids", of_queries, (B, T))
    if of_keys is of_queries and T == S:
        # One array for both stays one: then every position has its own id on the other side.
        return query_ids, query_ids
    return query_ids, ids("key_value_segment_ids", of_keys, (B, S))


def _offset(query_offset, B: int) -> int | jax.Array:
    if is_number(query_offset, numbers.Integral):
        query_offset = int(query_offset)
        need(abs(query_offset) < 2**31, "query_offset", query_offset, "an integer within int32")
        return query_offset
    query_offset = as_int32("query_offset", query_offset)
    need(
        query_offset.shape in ((), (B,)),
        "query_offset",
        f"shape {query_offset.shape}",
        f"an integer or shape {(B,)}",
    )
    return jnp.broadcast_to(query_offset, (B,))


def _dropout_key(dropout_rate, dropout_key) -> jax.Array | None:
    need_static("dropout_rate", dropout_rate)
    is_real = is_number(dropout_rate, numbers.Real)
    need(is_real, "dropout_rate", type(dropout_rate).__name__, "a number", TypeError)
    need(0 <= dropout_rate < 1, "dropout_rate", dropout_rate, "at least 0 and less than 1")
    if dropout_rate == 0:
        return None
    need(dropout_key is not None, "dropout_key", None, f"a key, for a rate of {dropout_rate}")
    return _key_words(dropout_key)


def need_heads_that_fit(query: jax.Array, key: jax.Array) -> None:
    """Raises an error unless the heads of `[B, T, N, H]` are a multiple of those of the keys."""
    fit = lambda N, K: N > 0 and K > 0 and N % K == 0
    needs = f"a positive multiple of the key heads, {key.shape[2]}"
    if fit(query.shape[1], key.shape[1]):
        needs += "; axes are [B, T, N, H], and if these are [B, N, T, H], swap axes 1 and 2 of all"
    need(fit(query.shape[2], key.shape[2]), "query", f"{query.shape[2]} heads", needs)


def as_soft_cap(logits_soft_cap) -> float | None:
    need_number_or_none("logits_soft_cap", logits_soft_cap)
    if logits_soft_cap is None:
        return None
    cap = as_float("logits_soft_cap", logits_soft_cap)
    least, most = _SOFT_CAPS
    need(
        least <= cap <= most,
        "logits_soft_cap",
        logits_soft_cap,
        f"a finite number above 0, {least} to {most}, or None for no cap",
    )
    return cap


def as_window(local_window_size) -> tuple[int, int]:
    need_static("local_window_size", local_window_size)
    sides = local_window_size
    if is_number(sides, numbers.Integral):
        sides = (sides, sides)
    need(
        isinstance(sides, tuple | list)
        and len(sides) == 2
        and all(is_number(side, numbers.Integral) for side in sides),
        "local_window_size",
        repr(local_window_size),
        "None, an integer for both sides, or (left, right), where a large one is no limit",
        TypeError,
    )
    left, right = sides
    needs = "no negative side; a large one is no limit"
    need(left >= 0 and right >= 0, "local_window_size", local_window_size, needs)
    return int(left), int(right)


def simplest(
    is_causal: bool, window: tuple[int, int] | None, query_offset: int | jax.Array, T: int, S: int
) -> tuple[bool, tuple[int, int] | None, int | jax.Array]:
    """Drops positional conditions that always hold, so that more calls are plain ones.

    A window of right 0 is causal; one longer than the sequences restricts nothing; nor does
    causal where the only query is the last position, as in decoding.
    """
    left, right = window or (math.inf, math.inf)
    if is_causal:
        right = 0
    if all(isinstance(x, int) for x in (query_offset, T, S)):  # not a symbol of jax.export
        if left >= T - 1 + query_offset:
            left = math.inf
        if right >= S - 1 - query_offset:
            right = math.inf
    is_causal = right == 0
    if left == math.inf and right in (0, math.inf):
        window = None
    elif window is not None:
        window = (window[0], 0 if is_causal else window[1])
    if not is_causal and window is None:
        query_offset = 0
    return is_causal, window, query_offset


def _key_words(key) -> jax.Array:
    """The two uint32 words of a JAX random key, typed or not."""
    words = key_words("dropout_key", key)
    need(
        words.shape in ((2,), (4,)),
        "dropout_key",
        f"words of shape {words.shape}",
        "one key, of 2 or 4 words",
    )
    if words.shape == (4,):
        # The halves of an rbg key are equal, so a sum or an exclusive or would lose all or a bit.
        words = words[:2] + 2 * words[2:]
    return words
