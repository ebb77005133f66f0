"""The FP8 forward kernel for Hopper: "mosaic_gpu" of calls with `Call.scales`."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash.call import Call
from jax_flash.kernel_operands import (
    SCALES,
    folding_vmap,
    intervals_of,
    of_rows,
    result_types,
    segment_ids_of,
    zero_all_unseen,
)
from jax_flash.launch import launch
from jax_flash.quantization import halvings
from jax_flash.sharding import over_devices, vary_alike
from pallas_kernels import defaults
from pallas_kernels.config import ForwardFP8Config
from pallas_kernels.problem import LOG2E, SUPPORTED_WIDTHS, Problem

# TMA steps over heads, and rows of one head, in multiples of 16 bytes.
_WIDTHS = [width for width in SUPPORTED_WIDTHS if width % 16 == 0]
# What multiplies a logit of -inf must not be 0, nor be the product of two such: smaller ones of
# query rows, keys and values are taken for these, by which logits are as good as 0.
_LEAST_SCALES = (1e-20, 1e-15, 1e-30)


def unsupported(call: Call) -> str | None:
    """Why the kernel cannot do this call, or None if it can; devices are dispatch's business."""
    key_length, value_width = call.key.shape[1], call.value.shape[-1]
    width = call.query.shape[-1]
    is_number = isinstance(call.scale, (int, float))
    least, most = SCALES
    reasons = {
        f"head width {width}: the FP8 kernel takes multiples of 16 up to 256": (
            width not in _WIDTHS
        ),
        f"value width {value_width}: the FP8 kernel takes multiples of 16 up to 256": (
            value_width not in _WIDTHS
        ),
        "symbolic sizes: kernels are made for sizes that are known": call.is_symbolic,
        "a mask_mod or score_mod in FP8": call.mask_mod is not None or call.score_mod is not None,
        "scale as an array": not is_number,
        f"scale {call.scale} is not in {least, most}": is_number
        and not least <= call.scale <= most,
        "a mask or bias in FP8": call.visibility.mask is not None or call.bias is not None,
        "logits_soft_cap in FP8": call.logits_soft_cap is not None,
        "sinks in FP8": call.sinks is not None,
        "dropout in FP8": call.dropout_rate > 0,
    }
    if reason := next((reason for reason, holds in reasons.items() if holds), None):
        return reason
    block_kv = _config(call).block_kv
    for name, size in zip(("key", "value"), call.block_sizes[1:], strict=True):
        if size % block_kv and size < key_length:
            return (
                f"{name} in blocks of {size} rows: the FP8 kernel takes multiples of {block_kv}"
                f" at width {max(width, value_width)}"
            )
    return None


def _config(call: Call) -> ForwardFP8Config:
    if call.config is not None and call.config.forward_fp8 is not None:
        return call.config.forward_fp8
    return defaults.default_fp8(
        call.query.shape[-1],
        call.value.shape[-1],
        block_rows=math.gcd(*(x for x in call.block_sizes[1:] if x < call.key.shape[1])),
        segmented=call.visibility.query_segment_ids is not None,
    )


def attention(call: Call) -> tuple[jax.Array, jax.Array]:
    """Output `[B, T, N, h]` in `call.out_dtype`, and LSE `[B, T, N]` float32.

    call must be one that `unsupported` has no reason against.
    """
    assert isinstance(call.scale, (int, float))  # else unsupported
    lowest, highest, intervals = intervals_of(call)
    ids = segment_ids_of(call)
    call = _with_products_in_half(call)
    query, key, value = call.query, call.key, call.value
    problem = Problem.of(
        query,
        key,
        value,
        scale=float(call.scale),
        lowest=lowest,
        highest=highest,
        dynamic=bool(intervals),
        segmented=bool(ids),
    )
    settings = _Settings(problem, call.out_dtype, _config(call))
    query, key, value = zero_all_unseen(query, key, value, problem, intervals, ids)
    scales = _scales(call, settings)
    operands = vary_alike((query, key, value, scales, intervals, ids))
    out, lse = folding_vmap(functools.partial(_run, settings))(*operands)
    return out, of_rows(lse, out).transpose(0, 2, 1)


def _with_products_in_half(call: Call) -> Call:
    """The same, with values of query and key whose products are float16 numbers."""
    of_query, of_key = halvings(*call.largest, call.query.shape[-1])
    if of_query == 0:
        return call
    halved = lambda x, times: (x.astype(jnp.float32) * 2.0**-times).astype(x.dtype)
    assert call.scales is not None
    query_scales, key_scales, value_scales = call.scales
    return dataclasses.replace(
        call,
        query=halved(call.query, of_query),
        key=halved(call.key, of_key),
        scales=(query_scales * 2.0**of_query, key_scales * 2.0**of_key, value_scales),
    )


def _scales(call: Call, settings: "_Settings") -> tuple[jax.Array, ...]:
    """Those of `forward_fp8.Scales`, sharded as what they are the scales of."""
    assert call.scales is not None
    of_query, of_key, of_value = call.scales
    of_query = of_query * (settings.problem.scale * LOG2E)
    block_kv = settings.config.block_kv
    of_query, of_key, of_value = map(jnp.maximum, (of_query, of_key, of_value), _LEAST_SCALES)
    query_size, key_size, value_size = call.block_sizes
    return (
        _spread(of_query, query_size, call.query, 1),
        _spread(of_key, key_size, call.key, block_kv),
        _spread(of_value, value_size, call.value, block_kv),
    )


def _spread(scales: jax.Array, block_size: int, x: jax.Array, step: int) -> jax.Array:
    """`[B, N, ceil(T / step)]`: the scale of every `step`-th row of x `[B, T, N, H]`."""
    zeros = jnp.zeros_like(x[:, ::step, :, 0], jnp.float32)  # of x's sharding
    blocks = np.arange(0, x.shape[1], step) // block_size
    return (zeros + scales[:, blocks]).swapaxes(1, 2)


@dataclasses.dataclass(frozen=True)
class _Settings:
    """What of a call is no array; the problem is of the call's arrays, or of a device's."""

    problem: Problem
    out_dtype: np.dtype
    config: ForwardFP8Config


# Letters of `sharding.over_devices`.
_OPERANDS = "b.n.", "b.k.", "b.k.", ("bn.", "bk.", "bk."), "b..", "b."
_RESULTS = "b.n.", "bn."


@functools.partial(jax.jit, static_argnums=(0, 1))  # so that calls outside of jit compile once
def _run(settings, leading, *args):
    return over_devices(functools.partial(_local, settings), _OPERANDS, _RESULTS, leading)(*args)


def _local(settings, query, key, value, *operands):
    problem = settings.problem.with_sizes_of(query, key)
    settings = dataclasses.replace(settings, problem=problem)
    rows = settings.config.whole_tiles(problem.query_length)
    out_types = result_types(problem, settings.out_dtype, rows)[:2]
    return launch(_forward_fp8, (settings,), out_types, query, key, value, *operands)


def _forward_fp8(settings, query, key, value, scales, intervals, ids):
    from pallas_kernels import forward_fp8  # of Pallas, which is slow to import

    return forward_fp8.attention(
        query,
        key,
        value,
        forward_fp8.Scales(*scales),
        next(iter(intervals), None),
        ids or None,
        problem=settings.problem,
        config=settings.config,
        out_dtype=settings.out_dtype,
    )
