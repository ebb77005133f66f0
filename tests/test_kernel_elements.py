"""Soft caps on the kernels, in interpret mode with race detection, beside float64 attention."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from pallas_kernels import element_ops
from tests import oracle
from tests.support.interpret import interpret_mode
from tests.support.rounding import assert_as_accurate_as_plain
from tests.test_kernels import few_thread_blocks, inputs


def xla_in_short_floats(query, key, value, **options):
    """Plain attention, its logits rounded to the dtype of the inputs like every other product."""

    def rounded(x):  # with the derivative of the identity
        return x + jax.lax.stop_gradient(x.astype(query.dtype).astype(jnp.float32) - x)

    wide = [x.astype(jnp.float32) for x in (query, key, value)]
    group = query.shape[2] // key.shape[2]
    wide[1:] = [jnp.repeat(x, group, axis=2) for x in wide[1:]]
    logits = rounded(jnp.einsum("btnh,bsnh->bnts", *wide[:2])) * query.shape[-1] ** -0.5
    cap = options.pop("logits_soft_cap", None)
    if cap is not None:
        logits = cap * jnp.tanh(logits / cap)
    sinks = options.pop("sinks", None)
    seen = oracle.visibility(query.shape[0], query.shape[1], key.shape[1], **options)
    logits = jnp.where(seen, logits, -1e30)
    if sinks is not None:
        sinks = jnp.broadcast_to(sinks[:, None, None], (*logits.shape[:-1], 1))
        logits = jnp.concatenate([logits, sinks], axis=-1)
    weights = jax.nn.softmax(logits, axis=-1)[..., : key.shape[1]]
    weights = rounded(jnp.where(seen, weights, 0.0))
    lse = jax.nn.logsumexp(logits, axis=-1).transpose(0, 2, 1)
    return jnp.einsum("bnts,bsnh->btnh", weights, wide[2]).astype(query.dtype), lse


def check(arrays, *, config=None, deterministic=False, **options):
    """Runs forward and backward and compares every result with float64.

    Args:
      arrays: what `inputs` gives.
      config, deterministic: as for `jax_flash.attention`.
      **options: its other options.
    """
    query, key, value, dout, dlse = arrays
    attention = functools.partial(
        jax_flash.attention,
        **options,
        return_residual=True,
        implementation="mosaic_gpu",
        config=config,
        deterministic=deterministic,
    )
    (out, lse), vjp = jax.vjp(attention, query, key, value)
    gradients = vjp((dout, dlse))
    exact_out, exact_lse = oracle.attention(query, key, value, **options)
    exact = oracle.gradients(query, key, value, dout=dout, dlse=dlse, **options)
    (plain, _), plain_vjp = jax.vjp(
        lambda *x: xla_in_short_floats(*x, **options), query, key, value
    )
    seen = np.isfinite(exact_lse)
    assert_as_accurate_as_plain(out, plain, exact_out, "out")
    np.testing.assert_allclose(np.asarray(lse)[seen], exact_lse[seen], atol=1e-4, rtol=1e-5)
    np.testing.assert_array_equal(np.asarray(lse)[~seen], -np.inf)
    plain_gradients = plain_vjp((dout, jnp.where(seen, dlse, 0.0)))
    for name, actual, rough, truth in zip(
        ("d_query", "d_key", "d_value"), gradients, plain_gradients, exact, strict=False
    ):
        assert_as_accurate_as_plain(actual, rough, truth, name)
    for empty in (np.asarray(out)[~seen], np.asarray(gradients[0])[~seen]):
        assert not empty.any()


# --- the tanh -----------------------------------------------------------------------------------


def test_tanh():
    x = np.concatenate([np.geomspace(1e-30, 1e16, 20_001), np.linspace(0, 12, 20_001)])
    x = np.concatenate([x, -x]).astype(np.float32)
    exact = np.tanh(x.astype(np.float64))
    with interpret_mode():
        actual = np.asarray(element_ops.tanh(jnp.asarray(x)), np.float64)
        assert np.isnan(element_ops.tanh(jnp.float32(np.nan)))
    assert (abs(actual - exact) <= 1.2e-6 * abs(exact)).all()
    assert (np.sign(actual) == np.sign(x)).all()
    assert (abs(actual) <= 1 + 2.0**-22).all()


# --- values and gradients -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("T", "S", "N", "K", "H", "dtype", "cap", "options"),
    [
        (200, 264, 2, 1, 64, jnp.bfloat16, 1.0, {"is_causal": True}),
        (1, 239, 2, 2, 64, jnp.float16, 50.0, {}),
        (113, 203, 2, 1, 128, jnp.bfloat16, 5.0, {"is_causal": True, "query_offset": 90}),
        (150, 140, 1, 1, 128, jnp.float16, 2.0, {"local_window_size": (40, 9)}),
        (70, 200, 1, 1, 256, jnp.bfloat16, 2.0, {"is_causal": True, "query_offset": -10}),
        (150, 67, 2, 1, 256, jnp.float16, 0.5, {}),
    ],
)
@pytest.mark.parametrize("deterministic", [False, True])
def test_soft_cap(T, S, N, K, H, dtype, cap, options, deterministic):
    if deterministic and H == 256:
        pytest.skip("the same kernels")
    arrays = inputs(1, T, S, N, K, H, dtype)
    with interpret_mode():
        check(arrays, logits_soft_cap=cap, **options, deterministic=deterministic)


@pytest.mark.parametrize(
    ("H", "factor", "cap"),
    [
        (64, 30.0, 2.0),  # all weights e^2, e^-2 or nearly so
        (128, 1.0, 1e-3),  # tanh(1000), weights all the same
        (64, 3.0, 1e6),  # no cap to speak of
    ],
)
def test_logits_far_beyond_the_cap_or_below_it(H, factor, cap):
    query, *rest = inputs(1, 80, 150, 1, 1, H, jnp.bfloat16)
    with interpret_mode():
        check((query * factor, *rest), logits_soft_cap=cap, is_causal=True, query_offset=70)


def test_soft_cap_with_sinks_where_maxima_jump():
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


@pytest.mark.parametrize("H", [64, 256])
def test_soft_cap_with_lengths_by_batch_entry(H):
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
        np.testing.assert_array_equal(out, clean)
        for actual, expected in zip(poisoned_vjp(dout), vjp(dout), strict=True):
            np.testing.assert_allclose(
                actual.astype("float32"), expected.astype("float32"), atol=1e-2
            )


def test_vmap_with_a_soft_cap():
    query, key, value, _, _ = inputs(2, 40, 48, 2, 2, 64, jnp.bfloat16)
    attention = functools.partial(
        jax_flash.attention, logits_soft_cap=2.0, implementation="mosaic_gpu"
    )
    with interpret_mode():
        np.testing.assert_array_equal(
            jax.vmap(attention)(query, key, value), attention(query, key, value)
        )
