"""Soft caps on the kernels in interpret mode, beside float64."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from pallas_kernels import soft_cap
from pallas_kernels.problem import Problem
from tests.support.cases import slow
from tests.support.elements import random_bias, random_mask, shape_of, with_lengths
from tests.support.interpret import interpret_mode
from tests.support.kernel_calls import check, few_thread_blocks, inputs
from tests.support.nonzero import assert_none_is_zero

TANH = [  # of x, its relative error
    pytest.param(lambda x: soft_cap.tanh(x, 1.0, 64), 2.6e-6, id="near, or by sinh"),
    pytest.param(lambda x: soft_cap.tanh(x / 0.03125, 0.03125, 64), 2.6e-6, id="with a factor"),
    pytest.param(lambda x: soft_cap.tanh(x * 2.0**40, 2.0**-40, 64), 2.6e-6, id="a small factor"),
    pytest.param(lambda x: soft_cap.tanh(x / 2.0**20, 2.0**20, 64), 2.6e-6, id="a large factor"),
    pytest.param(soft_cap.tanh_by_sinh, 1.2e-6, id="by sinh"),
]


@pytest.mark.parametrize(("tanh", "error"), TANH)
def test_tanh(tanh, error):
    x = np.concatenate([np.geomspace(1e-30, 1e16, 20_001), np.linspace(0, 12, 20_001)])
    x = np.concatenate([x, -x]).astype(np.float32)[:, None].repeat(2, axis=1)
    exact = np.tanh(x.astype(np.float64))
    with interpret_mode():
        actual = np.asarray(tanh(jnp.asarray(x)), np.float64)
        below = x[abs(x[:, 0]) < 0.6]
        alone = np.asarray(tanh(jnp.asarray(below)), np.float64)
        assert np.isnan(tanh(jnp.full((1, 2), np.nan, jnp.float32))).all()
    assert (abs(actual - exact) <= error * abs(exact)).all()
    assert (np.sign(actual) == np.sign(x)).all()
    assert (abs(actual) <= 1 + 2.0**-22).all()
    # The same beside others and without them, but for how a compiler rounds.
    np.testing.assert_allclose(alone, actual[abs(x[:, 0]) < 0.6], rtol=2.0**-22)


@pytest.mark.parametrize(
    ("T", "S", "N", "K", "H", "dtype", "cap", "options"),
    [
        (200, 264, 2, 1, 64, jnp.bfloat16, 1.0, dict(is_causal=True)),
        slow(1, 239, 2, 2, 64, jnp.float16, 50.0, dict(deterministic=True)),
        slow(113, 203, 2, 1, 128, jnp.bfloat16, 5.0, dict(is_causal=True, query_offset=90)),
        slow(
            90, 80, 1, 1, 128, jnp.float16, 2.0, dict(local_window_size=(40, 9), deterministic=True)
        ),
        slow(70, 200, 1, 1, 256, jnp.bfloat16, 2.0, dict(is_causal=True, query_offset=-10)),
    ],
)
def test_soft_cap(T, S, N, K, H, dtype, cap, options):
    arrays = inputs(1, T, S, N, K, H, dtype)
    with interpret_mode():
        check(arrays, logits_soft_cap=cap, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("H", "h", "options"),
    [
        (40, 72, dict(is_causal=True)),
        slow(192, 128, dict(local_window_size=(60, 20))),
    ],
)
def test_other_widths(H, h, options):
    with interpret_mode():
        check(inputs(2, 70, 133, 2, 1, H, jnp.bfloat16, h=h), logits_soft_cap=2.0, **options)


@pytest.mark.long
@pytest.mark.parametrize(
    ("H", "factor", "cap"),
    [
        (64, 30.0, 2.0),  # all weights e^2, e^-2 or nearly so
        slow(128, 1.0, 1e-3),  # tanh(1000), weights all the same
        slow(64, 3.0, 1e6),  # no cap to speak of
    ],
)
def test_logits_far_beyond_the_cap_or_below_it(H, factor, cap):
    query, *rest = inputs(1, 80, 150, 1, 1, H, jnp.bfloat16)
    with interpret_mode():
        check((query * factor, *rest), logits_soft_cap=cap, is_causal=True, query_offset=70)


@pytest.mark.long
@pytest.mark.parametrize(("cap", "is_known"), [(50.0, True), slow(60.0, False)])
def test_rows_at_both_ends_of_the_cap(cap, is_known):
    """All logits of a row at -cap, at cap, or half of them at each."""
    problem = Problem(1, 80, 150, 1, 1, 64, jnp.dtype(jnp.bfloat16), scale=1.0, soft_cap=cap)
    assert (soft_cap.known_reference(problem) is not None) == is_known
    query, key, *rest = inputs(1, 80, 150, 1, 1, 64, jnp.bfloat16)
    signs = jnp.where(jnp.arange(80) % 3 == 0, -1.0, 1.0)[:, None, None]
    key = key.at[..., 0].set(64.0).at[:, 40:90, :, 0].set(-64.0)
    query = query.at[..., 0].set(64.0) * signs.astype(query.dtype)
    with interpret_mode():
        check((query, key, *rest), logits_soft_cap=cap, is_causal=True)


@pytest.mark.slow
def test_sinks_where_maxima_jump():
    """A second round over the tiles of a thread block; the sink is a logit that no cap is for."""
    query, key, *rest = inputs(1, 150, 400, 2, 2, 64, jnp.bfloat16)
    arrays = query, key.at[:, :100, 0].multiply(60), *rest
    with interpret_mode():
        check(
            arrays,
            logits_soft_cap=100.0,
            sinks=jnp.array([70.0, -1.0]),
            config=few_thread_blocks(64, 1),
        )


@pytest.mark.slow
@pytest.mark.parametrize("H", [64, slow(256)])
def test_lengths_by_batch_entry(H):
    """Among them rows and keys that nothing sees, whose NaN do no harm."""
    arrays = inputs(2, 90, 80, 2, 1, H, jnp.bfloat16)
    lengths = jnp.array([50, 0])
    options = dict(is_causal=True, query_offset=jnp.array([-20, 5]), key_value_seq_lengths=lengths)
    with interpret_mode():
        check(arrays, logits_soft_cap=3.0, **options, config=few_thread_blocks(H, 2))
        query, key, value, dout, _ = arrays
        unseen = (jnp.arange(80) >= lengths[:, None])[..., None, None]
        attention = functools.partial(
            jax_flash.attention, **options, logits_soft_cap=3.0, implementation="mosaic_gpu"
        )
        clean, vjp = jax.vjp(attention, query, key, value)
        out, poisoned_vjp = jax.vjp(
            attention, query, *(jnp.where(unseen, jnp.nan, x) for x in (key, value))
        )
        chex.assert_trees_all_equal(out, clean)
        gradients = vjp(dout)
        assert_none_is_zero((clean, gradients))
        chex.assert_trees_all_close(poisoned_vjp(dout), gradients, rtol=2**-7, atol=1e-2)


@pytest.mark.long
@pytest.mark.parametrize(
    ("H", "dtype", "mask_axes", "bias_axes", "options"),
    [
        slow(64, jnp.bfloat16, "bnts", None, dict(local_window_size=(60, 20))),
        slow(64, jnp.bfloat16, None, "bs", dict(is_causal=True, deterministic=True)),
        (128, jnp.bfloat16, None, "bs", with_lengths(key_value_seq_lengths=[100, 0])),
        slow(128, jnp.float16, "bs", "nt", dict(is_causal=True, deterministic=True)),
        slow(256, jnp.bfloat16, "nts", None, dict(is_causal=True)),
    ],
)
def test_with_mask_and_bias(H, dtype, mask_axes, bias_axes, options):
    """The bias is below the cap, the mask above it, and the bias's gradient is through the cap."""
    B, T, S, N, K = 2, 70, 140, 2, 1
    mask = random_mask(shape_of(mask_axes, B, N, T, S)) if mask_axes else None
    bias = random_bias(shape_of(bias_axes, B, N, T, S)) if bias_axes else None
    with interpret_mode():
        check(inputs(B, T, S, N, K, H, dtype), mask=mask, bias=bias, logits_soft_cap=2.0, **options)


@pytest.mark.slow
@pytest.mark.parametrize("axes", ["bs", "bts"])
def test_infinite_bias(axes):
    """Gives the cap, with the sign of the bias, and hides nothing; NaN where no query sees it."""
    query, key, value, dout, dlse = inputs(2, 40, 150, 1, 1, 64, jnp.bfloat16)
    lengths = jnp.array([120, 0])
    bias = random_bias(shape_of(axes, 2, 1, 40, 150)).at[..., 9:30].set(-jnp.inf)
    bias = bias.at[..., 50].set(jnp.inf).at[..., 60].set(jnp.finfo(jnp.float32).min)
    hidden = (jnp.arange(150) >= lengths[:, None])[:, None, None]
    attention = functools.partial(
        jax_flash.attention,
        key_value_seq_lengths=lengths,
        logits_soft_cap=2.0,
        return_residual=True,
        implementation="mosaic_gpu",
    )

    def results(bias):
        results, vjp = jax.vjp(attention, query, key, value, bias)
        return *results, *vjp((dout, dlse))

    with interpret_mode():
        clean = results(jnp.clip(bias, -1e3, 1e3))
        chex.assert_trees_all_close(results(bias), clean, rtol=1e-5)
        chex.assert_trees_all_equal(results(jnp.where(hidden, jnp.nan, bias)), results(bias))
    chex.assert_tree_all_finite(clean[2:])
    assert not np.asarray(clean[0][1]).any() and abs(clean[5]).max() > 1e-3


@pytest.mark.slow
def test_vmap():
    query, key, value, _, _ = inputs(2, 40, 48, 2, 2, 64, jnp.bfloat16)
    attention = functools.partial(
        jax_flash.attention, logits_soft_cap=2.0, implementation="mosaic_gpu"
    )
    with interpret_mode():
        alone = attention(query, key, value)
        together = jax.vmap(attention)(query[:, None], key[:, None], value[:, None])[:, 0]
    assert_none_is_zero(alone)
    chex.assert_trees_all_equal(together, alone)
