"""Dropout on the kernels in interpret mode: what xla drops, and results beside float64."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from jax_flash.masks import dropout_keep
from tests.support.cases import long, slow
from tests.support.elements import random_bias, random_mask, shape_of, with_lengths
from tests.support.interpret import interpret_mode
from tests.support.kernel_calls import check, check_vmap_over_options, few_thread_blocks, inputs
from tests.support.nonzero import assert_none_is_zero

attention = functools.partial(jax_flash.attention, implementation="mosaic_gpu")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("T", "S", "H", "is_causal"),
    [
        (70, 150, 64, False),
        slow(130, 200, 128, True),
        slow(40, 140, 256, False),
        slow(9, 90, 40, False),
    ],
)
def test_forward_and_backward_drop_what_the_hash_says(T, S, H, is_causal):
    """All weights of a row are alike, so that outputs and dV are the dropped set itself."""
    B, N, rate, key = 2, 2, 0.25, jax.random.key(4)
    places = np.ix_(range(B), range(N), range(T), range(S))
    keep = np.asarray(dropout_keep(jax.random.key_data(key), rate, *places))
    seen = np.tri(T, S, dtype=bool) if is_causal else np.ones((T, S), bool)
    weights = keep * seen / seen.sum(1, keepdims=True) / (1 - rate)
    query, zeros = jnp.zeros((B, T, N, H), jnp.bfloat16), jnp.zeros((B, S, N, H), jnp.bfloat16)
    run = functools.partial(
        attention, query, zeros, dropout_rate=rate, dropout_key=key, is_causal=is_causal
    )
    for first in range(0, max(T, S), H):
        value = jnp.broadcast_to(jnp.eye(S, H, -first)[:, None], zeros.shape).astype(jnp.bfloat16)
        d_out = jnp.broadcast_to(jnp.eye(T, H, -first)[:, None], query.shape).astype(jnp.bfloat16)
        with interpret_mode():
            out, vjp = jax.vjp(run, value)
            (d_value,) = vjp(d_out)
        of_keys = weights[..., first : first + H].transpose(0, 2, 1, 3)
        np.testing.assert_allclose(out[..., : of_keys.shape[-1]], of_keys, rtol=2**-7)
        of_rows = weights[:, :, first : first + H].transpose(0, 3, 1, 2)
        np.testing.assert_allclose(d_value[..., : of_rows.shape[-1]], of_rows, rtol=2**-7)


@pytest.mark.parametrize(
    ("T", "S", "N", "K", "H", "dtype", "options"),
    [
        (200, 264, 2, 1, 64, jnp.bfloat16, dict(is_causal=True)),
        slow(1, 239, 2, 2, 64, jnp.float16, dict(deterministic=True)),
        slow(113, 203, 2, 1, 128, jnp.bfloat16, dict(is_causal=True, query_offset=90)),
        slow(90, 80, 1, 1, 128, jnp.float16, dict(local_window_size=(40, 9), deterministic=True)),
        slow(70, 200, 2, 1, 256, jnp.bfloat16, dict(is_causal=True, query_offset=-10)),
        slow(70, 133, 2, 1, 40, jnp.bfloat16, dict(local_window_size=(60, 30))),
        long(70, 100, 2, 1, 256, jnp.bfloat16, dict(logits_soft_cap=2.0, is_causal=True)),
        slow(70, 133, 2, 1, 128, jnp.float16, with_lengths(key_value_seq_lengths=[100, 0])),
        slow(90, 80, 2, 2, 64, jnp.bfloat16, with_lengths(query_seq_lengths=[50, 0])),
        slow(70, 133, 2, 1, 256, jnp.bfloat16, with_lengths(key_value_seq_lengths=[100, 0])),
        slow(90, 150, 2, 1, 64, jnp.bfloat16, dict(logits_soft_cap=2.0, local_window_size=(60, 9))),
        slow(70, 200, 2, 1, 128, jnp.float16, dict(logits_soft_cap=2.0, deterministic=True)),
        slow(
            *(113, 203, 2, 1, 128, jnp.bfloat16),
            with_lengths(logits_soft_cap=2.0, is_causal=True, query_offset=[90, -20]),
        ),
    ],
)
def test_dropout(T, S, N, K, H, dtype, options):
    with interpret_mode():
        check(inputs(2, T, S, N, K, H, dtype), dropout_rate=0.25, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("H", "axes", "options"),
    [(64, "bs", dict(is_causal=True)), slow(128, "s", dict(deterministic=True))],
)
def test_with_bias_and_sinks(H, axes, options):
    B, T, S, N, K = 2, 70, 140, 2, 1
    bias, sinks = random_bias(shape_of(axes, B, N, T, S)), jnp.array([1.0, -2.0])
    with interpret_mode():
        arrays = inputs(B, T, S, N, K, H, jnp.bfloat16)
        check(arrays, bias=bias, sinks=sinks, dropout_rate=0.5, **options)


@pytest.mark.long
@pytest.mark.parametrize(
    ("H", "dtype", "mask_axes", "bias_axes", "options"),
    [
        slow(64, jnp.bfloat16, None, "nts", dict(is_causal=True)),
        slow(64, jnp.float16, "bs", None, {}),
        slow(64, jnp.bfloat16, "bnts", None, dict(logits_soft_cap=2.0)),
        slow(96, jnp.bfloat16, "bs", None, dict(local_window_size=(60, 9))),
        (128, jnp.bfloat16, "bts", "nts", {}),
        slow(128, jnp.bfloat16, None, "bnt", dict(logits_soft_cap=2.0, is_causal=True)),
        slow(128, jnp.float16, "bnts", None, dict(deterministic=True)),
        slow(128, jnp.bfloat16, None, "nts", with_lengths(key_value_seq_lengths=[100, 0])),
        slow(256, jnp.bfloat16, "bnts", None, dict(local_window_size=(60, 9))),
        slow(256, jnp.bfloat16, "bts", "nts", dict(logits_soft_cap=2.0)),
        slow(256, jnp.float16, None, "nts", with_lengths(query_seq_lengths=[30, 70])),
        slow(256, jnp.bfloat16, None, "bs", {}),
    ],
)
def test_with_mask_and_bias(H, dtype, mask_axes, bias_axes, options):
    """The gradient of the bias too."""
    B, T, S, N, K = 2, 70, 133, 2, 1
    if mask_axes:
        options = options | dict(mask=random_mask(shape_of(mask_axes, B, N, T, S)))
    if bias_axes:
        options = options | dict(bias=random_bias(shape_of(bias_axes, B, N, T, S)))
    with interpret_mode():
        check(inputs(B, T, S, N, K, H, dtype), dropout_rate=0.25, **options)


@pytest.mark.long
@pytest.mark.parametrize(
    ("H", "logits_soft_cap"),
    [(64, None), slow(128, None), slow(256, None), slow(64, 2.0), slow(160, 2.0)],
)
def test_segment_ids_where_a_thread_block_walks_many_tiles(H, logits_soft_cap):
    ids = jnp.arange(140) // 60
    ids = jnp.stack([ids, ids[::-1]])
    with interpret_mode():
        check(
            inputs(2, 140, 140, 1, 1, H, jnp.bfloat16),
            dropout_rate=0.25,
            query_segment_ids=ids,
            key_value_segment_ids=ids,
            logits_soft_cap=logits_soft_cap,
            config=few_thread_blocks(H, 1),
        )


@pytest.mark.long
def test_vmap_over_keys():
    losses = check_vmap_over_options(
        functools.partial(attention, dropout_rate=0.5),
        dropout_key=jax.random.split(jax.random.key(1), 2),
    )
    assert losses[0] != losses[1]


@pytest.mark.slow
def test_vmap_drops_the_same_in_every_entry():
    query, key, value, _, _ = inputs(2, 40, 48, 2, 2, 64, jnp.bfloat16)
    run = functools.partial(attention, dropout_rate=0.5, dropout_key=jax.random.key(1))
    with interpret_mode():
        together = jax.vmap(run)(query[:, None], key[:, None], value[:, None])[:, 0]
        assert_none_is_zero(list(together))
        chex.assert_trees_all_equal(together[0], run(query[:1], key[:1], value[:1])[0])
        chex.assert_trees_all_equal(together[1], run(query[1:], key[1:], value[1:])[0])
