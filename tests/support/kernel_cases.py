"""The kernel variants that tests compile: every one that the library may launch."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jax_flash
from pallas_kernels import config

MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "window": {"is_causal": True, "local_window_size": (700, 0)},
}

BATCH = 2  # a batch of one takes fewer registers

# (T, S, N, K, dtype): tiles that fit, and tails at both ends with grouped heads.
SHAPES = {
    "even": (4096, 4096, 16, 16, jnp.bfloat16),
    "ragged": (1001, 1013, 8, 2, jnp.float16),
}


def kernel_cases() -> list[tuple[str, Callable, Any]]:
    """`(id, fn, args)`: fn calls kernels, args are pytrees of `jax.ShapeDtypeStruct`."""
    cases = []
    for width, mask, shape in itertools.product(config.WIDTHS, MASKS, SHAPES):
        T, S, N, K, dtype = SHAPES[shape]
        query = jax.ShapeDtypeStruct((BATCH, T, N, width), dtype)
        key = jax.ShapeDtypeStruct((BATCH, S, K, width), dtype)
        lse = jax.ShapeDtypeStruct((BATCH, T, N), jnp.float32)
        name = f"H{width}-{mask}-{shape}"
        args = (query, key, key, query, lse)
        # All masks that are known at run time alone have one code.
        lengths = jax.ShapeDtypeStruct((BATCH,), jnp.int32) if mask == "full" else None
        for deterministic in (False, True):
            fn = _forward_and_backward(MASKS[mask], deterministic)
            cases.append((f"{name}-deterministic" if deterministic else name, fn, args))
            if lengths is not None:
                case_name = f"H{width}-lengths-{shape}{'-deterministic' * deterministic}"
                cases.append((case_name, fn, (*args, lengths)))
        # A cap has steps of its own, at each mask, in every kernel.
        for deterministic in (False, True):
            fn = _forward_and_backward(MASKS[mask] | {"logits_soft_cap": 30.0}, deterministic)
            case_name = f"{name}-cap{'-deterministic' * deterministic}"
            cases.append((case_name, fn, args))
            if lengths is not None and shape == "ragged":
                case_name = f"H{width}-lengths-{shape}-cap{'-deterministic' * deterministic}"
                cases.append((case_name, fn, (*args, lengths)))
        if shape == "ragged":
            sinks = jax.ShapeDtypeStruct((N,), jnp.float32)
            fn = _forward_with_sinks(MASKS[mask])
            cases.append((f"{name}-sinks", fn, (*args[:3], sinks)))
            if lengths is not None:
                case_name = f"H{width}-lengths-{shape}-sinks"
                cases.append((case_name, fn, (*args[:3], sinks, lengths)))
    return cases


def _forward_with_sinks(mask: dict[str, Any]) -> Callable:
    def run(query, key, value, sinks, lengths=None):
        return jax_flash.attention(
            query,
            key,
            value,
            sinks=sinks,
            **mask,
            key_value_seq_lengths=lengths,
            implementation="mosaic_gpu",
        )

    return run


def _forward_and_backward(mask: dict[str, Any], deterministic: bool) -> Callable:
    def attention(query, key, value, lengths):
        return jax_flash.attention(
            query,
            key,
            value,
            **mask,
            key_value_seq_lengths=lengths,
            return_residual=True,
            implementation="mosaic_gpu",
            deterministic=deterministic,
        )

    def run(query, key, value, dout, dlse, lengths=None):
        results, backward = jax.vjp(lambda *x: attention(*x, lengths), query, key, value)
        return results, backward((dout, dlse))

    return run
