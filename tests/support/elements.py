"""Biases and masks for calls of the kernels."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np

import jax_flash
from tests.support.kernel_calls import inputs
from tests.support.nonzero import assert_none_is_zero


def shape_of(axes: str, B, N, T, S) -> tuple[int, ...]:
    sizes = dict(b=B, n=N, t=T, s=S)
    return tuple(size if axis in axes else 1 for axis, size in sizes.items())


def random_mask(shape, seed=3, share=0.6, empty_rows=True) -> jax.Array:
    """Holes at random, and where there are rows some that see nothing."""
    mask = jax.random.bernoulli(jax.random.key(seed), share, shape)
    return mask.at[:, :, 5:9].set(False) if empty_rows and shape[2] > 9 else mask


def random_bias(shape, dtype=jnp.float32, seed=4) -> jax.Array:
    return (2 * jax.random.normal(jax.random.key(seed), shape)).astype(dtype)


def with_lengths(**options):
    return {k: jnp.array(v) if isinstance(v, list) else v for k, v in options.items()}


def check_bias_that_is_nan_where_hidden_and_infinite_elsewhere(H, S, dtype):
    """Also in rows that see nothing, which share tiles with others; -inf hides a key."""
    arrays = inputs(2, 80, S, 1, 1, H, jnp.bfloat16)
    options = with_lengths(query_seq_lengths=[50, 80], key_value_seq_lengths=[140, 0])
    attention = functools.partial(
        jax_flash.attention, **options, return_residual=True, implementation="mosaic_gpu"
    )
    bias = random_bias((2, 1, 80, S), dtype).at[:, :, 3].set(-jnp.inf).at[..., 9:30].set(-jnp.inf)
    hidden = (jnp.arange(80) >= jnp.array([50, 0])[:, None])[:, None, :, None]
    hidden = hidden | (jnp.arange(S) >= 140)

    def results(bias):
        results, vjp = jax.vjp(lambda *x: attention(*x), *arrays[:3], bias)
        return *results, *vjp(arrays[3:])

    clean, got = results(bias), results(jnp.where(hidden, jnp.nan, bias).astype(dtype))
    chex.assert_trees_all_equal(got, clean)
    out, lse, *gradients = clean
    assert_none_is_zero(clean)
    chex.assert_tree_all_finite((out, gradients))
    assert np.isneginf(lse[:, 3]).all() and np.isfinite(lse[0, 4:50]).all()
    assert not np.asarray(gradients[3])[..., 9:30].any()
    assert not np.asarray(gradients[3])[np.asarray(hidden)].any()
