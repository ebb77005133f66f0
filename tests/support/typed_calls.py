"""Calls and what a type checker makes of them: `mypy` reads this, nothing runs it."""

from typing import assert_type

import jax

import jax_flash

type OneOrTwo = jax.Array | tuple[jax.Array, jax.Array]


def of_attention(x: jax.Array, quantized: jax_flash.Quantized, residual: bool) -> None:
    assert_type(jax_flash.attention(x, x, x), jax.Array)
    assert_type(jax_flash.attention(x, x, x, x, x, is_causal=True, scale=0.1), jax.Array)
    assert_type(jax_flash.attention(x, x, x, return_residual=False), jax.Array)
    out, lse = jax_flash.attention(x, x, x, return_residual=True, query_offset=3)
    assert_type(out, jax.Array)
    assert_type(lse, jax.Array)
    assert_type(jax_flash.attention(x, x, x, return_residual=residual), OneOrTwo)
    assert_type(jax_flash.attention(quantized, quantized, quantized), jax.Array)
    assert_type(jax_flash.attention(x, x, x, mask_mod=lambda b, h, i, j: j <= i), jax.Array)
    assert_type(jax_flash.attention(x, x, x, score_mod=lambda s, b, h, i, j: s + x[h]), jax.Array)
    assert_type(jax_flash.explain(x, x, x, is_causal=True).implementation, str)


def of_settings(x: jax.Array, settings: jax_flash.Config) -> None:
    assert_type(jax_flash.attention(x, x, x, config=settings), jax.Array)


def of_fp8(x: jax.Array, residual: bool) -> None:
    assert_type(jax_flash.attention_fp8(x, x, x, incoherent_key=x, mask=x), jax.Array)
    out, lse = jax_flash.attention_fp8(x, x, x, return_residual=True, block_size=64)
    assert_type(out, jax.Array)
    assert_type(lse, jax.Array)
    assert_type(jax_flash.attention_fp8(x, x, x, return_residual=residual), OneOrTwo)
    query, _, _ = jax_flash.quantize_fp8(x, x, x)
    assert_type(query, jax_flash.Quantized)


def of_decoding(x: jax.Array, residual: bool) -> None:
    assert_type(jax_flash.decode_attention(x, x, x, x, page_table=x), jax.Array)
    out, lse = jax_flash.decode_attention(x, x, x, x, return_residual=True)
    assert_type(out, jax.Array)
    assert_type(lse, jax.Array)
    assert_type(jax_flash.decode_attention(x, x, x, x, return_residual=residual), OneOrTwo)
    assert_type(jax_flash.update_cache(x, x, x, x, x, num_new=x), tuple[jax.Array, jax.Array])
    assert_type(jax_flash.explain_decode(x, x, x, x, num_splits=2).implementation, str)


def over_devices(x: jax.Array, residual: bool) -> None:
    assert_type(jax_flash.ring_attention(x, x, x, axis_name="c", zigzag=True), jax.Array)
    pair = jax_flash.ring_attention(x, x, x, axis_name="c", return_residual=True)
    assert_type(pair, tuple[jax.Array, jax.Array])
    either = jax_flash.ring_attention(x, x, x, axis_name="c", return_residual=residual)
    assert_type(either, OneOrTwo)

    assert_type(jax_flash.ulysses_attention(x, x, x, axis_name="c", query_offset=1), jax.Array)
    pair = jax_flash.ulysses_attention(x, x, x, axis_name=("c", "d"), return_residual=True)
    assert_type(pair, tuple[jax.Array, jax.Array])
    either = jax_flash.ulysses_attention(x, x, x, axis_name="c", return_residual=residual)
    assert_type(either, OneOrTwo)

    assert_type(jax_flash.all_gather_attention(x, x, x, axis_name="c", sinks=x), jax.Array)
    pair = jax_flash.all_gather_attention(x, x, x, axis_name="c", return_residual=True)
    assert_type(pair, tuple[jax.Array, jax.Array])
    either = jax_flash.all_gather_attention(x, x, x, axis_name="c", return_residual=residual)
    assert_type(either, OneOrTwo)


def refused(x: jax.Array) -> None:
    """An error each, or mypy would call the ignoring of it unused."""
    jax_flash.attention(x, x, x, casual=True)  # type: ignore[call-overload]
    jax_flash.attention(x, x, x, is_causal="yes")  # type: ignore[call-overload]
    jax_flash.attention_fp8(x, x, x, local_window_size=1.5)  # type: ignore[call-overload]
    jax_flash.decode_attention(x, x, x)  # type: ignore[call-overload]
    jax_flash.update_cache(x, x, x, x, x, num_old=x)  # type: ignore[call-arg]
    jax_flash.ring_attention(x, x, x)  # type: ignore[call-overload]
    jax_flash.all_gather_attention(x, x, x, axis_name="c", query_offset=1)  # type: ignore[call-overload]
