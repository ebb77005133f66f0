"""Rows far from 0: logits so large, or so far below 0, that float32 rounds them by more than 1.

Compared with plain JAX in float32, as float64 tells logits apart that float32 does not.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from pallas_kernels import element_arrays
from pallas_kernels.problem import Problem
from tests.support.cases import slow
from tests.support.interpret import interpret_mode

LOWEST = {dtype: float(jnp.finfo(dtype).min) for dtype in (jnp.bfloat16, jnp.float32)}
# Of hidden keys, by one convention or another, and of what is not hidden.
VALUES = [0.0, 1.0, -2e4, -1e9, -1e30, -2e38, LOWEST[jnp.bfloat16], LOWEST[jnp.float32], -np.inf]


def inputs(B, T, S, N, K, H, dtype=jnp.bfloat16):
    """Query, key, value, and the cotangents of output and LSE."""
    rng = np.random.default_rng(T * S)
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, H), (B, T, N, H)
    arrays = [jnp.array(rng.standard_normal(shape, np.float32), dtype) for shape in shapes]
    return (*arrays, jnp.array(rng.standard_normal((B, T, N), np.float32)))


def bias_of_all_kinds(shape, dtype=jnp.float32, seed=0) -> jax.Array:
    """Rows whose largest value is one or another of `VALUES`."""
    rng = np.random.default_rng(seed)
    largest = rng.integers(0, len(VALUES), (*shape[:3], 1))
    return jnp.array(
        np.array(VALUES)[np.maximum(rng.integers(0, len(VALUES), shape), largest)], dtype
    )


def results(arrays, bias, implementation, **options):
    """Output, LSE, and gradients, of the bias too."""
    query, key, value, dout, dlse = arrays

    def attention(*arrays):
        return jax_flash.attention(
            *arrays, return_residual=True, implementation=implementation, **options
        )

    out, vjp = jax.vjp(attention, query, key, value, bias)
    return *out, *vjp((dout, dlse))


def check(arrays, bias=None, **options):
    """The kernels beside plain JAX in float32."""
    names = "out", "lse", "d_query", "d_key", "d_value", "d_bias"
    got = results(arrays, bias, "mosaic_gpu", **options)
    options.pop("deterministic", None)
    widened = jax.tree.map(lambda x: x.astype(jnp.float32), (arrays, bias))
    expected = results(*widened, "xla", **options)
    # Units in the last place of the inputs, of the largest element.
    rough = 12 * float(jnp.finfo(arrays[0].dtype).eps) / 2
    for name, x, y in zip(names, got, expected, strict=True):
        if y is None:
            continue
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        if name == "lse":
            np.testing.assert_allclose(x, y, rtol=2e-6, atol=2e-3, err_msg=name)
        else:
            np.testing.assert_allclose(x, y, atol=rough * np.abs(y).max(), err_msg=name)


def is_hidden_by(kind: str, T: int, S: int):
    """A bias that hides all keys of rows, in one form or another, and its dtype."""
    if kind == "row":
        return jnp.zeros((1, 1, T, S)).at[:, :, 3].set(-1e30)
    if kind == "all":
        return jnp.full((1, 1, T, S), LOWEST[jnp.float32])
    if kind == "tiled":  # comes by TMA
        return jnp.zeros((1, 1, T, S), jnp.bfloat16).at[:, :, 2:5].set(LOWEST[jnp.bfloat16])
    if kind == "keys":
        return jnp.full((1, 1, 1, S), LOWEST[jnp.float32])
    assert kind == "query rows"
    return jnp.zeros((1, 1, T, 1)).at[:, :, 5].set(LOWEST[jnp.float32])


HIDDEN = [
    ("row", 64, {}),
    ("all", 64, dict(is_causal=True, query_offset=56)),
    ("tiled", 64, {}),
    ("keys", 64, dict(deterministic=True)),
    ("query rows", 128, {}),
    ("row", 256, {}),
    ("tiled", 128, dict(local_window_size=(30, 0), query_offset=40)),
]


@pytest.mark.fast_cases()
@pytest.mark.long_cases("row-64-options0")
@pytest.mark.parametrize(("kind", "H", "options"), HIDDEN)
def test_rows_whose_keys_a_finite_bias_hides(kind, H, options):
    with interpret_mode():
        check(inputs(1, 8, 64, 1, 1, H), is_hidden_by(kind, 8, 64), **options)


@pytest.mark.long
@pytest.mark.fast_cases("float32-False")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_bias_of_all_kinds(dtype, deterministic):
    bias = bias_of_all_kinds((1, 1, 40, 136), dtype)
    with interpret_mode():
        check(inputs(1, 40, 136, 2, 1, 64), bias, deterministic=deterministic)


def check_weights_of_hidden_rows(T, S, H, N=1):
    """They add up to 1, also where the first step's largest logit is a rounding above others."""
    query = jnp.ones((1, T, N, H), jnp.bfloat16)
    key = jnp.zeros((1, S, N, H), jnp.bfloat16).at[:, -1].set(60 * H**-0.5)  # a logit of 60
    bias = jnp.zeros((1, 1, T, 1)).at[:, :, ::2].set(-1e9)  # floats are 64 apart there

    def attention(*arrays):
        return jax_flash.attention(
            *arrays, bias=bias, return_residual=True, implementation="mosaic_gpu"
        )

    (out, lse), vjp = jax.vjp(attention, query, key, jnp.ones_like(key))
    np.testing.assert_allclose(out.astype(jnp.float32), 1.0, rtol=2**-7)
    np.testing.assert_allclose(lse[:, ::2], -1e9, rtol=1e-6)
    chex.assert_tree_all_finite((lse, vjp((out, lse))))


@pytest.mark.long
def test_weights_of_rows_that_a_bias_hides_over_several_steps():
    with interpret_mode():
        check_weights_of_hidden_rows(16, 384, 64)


@pytest.mark.gpu
@pytest.mark.parametrize("H", [64, 128, 256])
def test_weights_of_rows_that_a_bias_hides_over_several_steps_on_a_gpu(H):
    check_weights_of_hidden_rows(300, 1500, H, N=4)


def alike(T, S, H, size=133120.0, dtype=jnp.bfloat16):
    query, key, value = (jnp.full((1, n, 1, H), size, dtype) for n in (T, S, S))
    return query, key, value, jnp.ones_like(query), jnp.zeros((1, T, 1))


def check_alike(T, S, H, size=133120.0, dtype=jnp.bfloat16, **options):
    """All logits are the same, however large."""
    arrays = alike(T, S, H, size, dtype)
    out, lse, d_query, d_key, d_value, _ = results(arrays, None, "mosaic_gpu", **options)
    np.testing.assert_array_equal(out, arrays[2][:, :1] * jnp.ones_like(out))
    np.testing.assert_allclose(lse, np.sqrt(H) * size**2 + np.log(S), rtol=1e-6)
    np.testing.assert_allclose(d_value.astype(jnp.float32), T / S, rtol=2**-7)
    chex.assert_tree_all_finite((d_query, d_key))


@pytest.mark.long
@pytest.mark.parametrize(
    ("T", "S", "H", "deterministic"),
    [(5, 300, 64, False), slow(1, 1, 64, True), slow(5, 5, 128, False), slow(3, 70, 256, False)],
)
def test_finite_inputs_have_finite_results(T, S, H, deterministic):
    with interpret_mode():
        check_alike(T, S, H, deterministic=deterministic)


@pytest.mark.long
def test_infinite_sinks():
    """They take all of the weight: output and gradients are 0, and the LSE is infinite."""
    *arrays, dlse = inputs(1, 8, 64, 2, 1, 64)
    sinks = jnp.array([jnp.inf, 1.0])

    def attention(query, key, value, sinks):
        return jax_flash.attention(
            query, key, value, sinks=sinks, return_residual=True, implementation="mosaic_gpu"
        )

    with interpret_mode():
        (out, lse), vjp = jax.vjp(attention, *arrays[:3], sinks)
        gradients = vjp((arrays[3], dlse))
        (finite, _), _ = jax.vjp(attention, *arrays[:3], sinks.at[0].set(0.0))
    assert not out[:, :, 0].any() and np.isposinf(lse[:, :, 0]).all()
    np.testing.assert_array_equal(out[:, :, 1], finite[:, :, 1])
    d_query, *_, d_sinks = gradients
    assert not d_query[:, :, 0].any() and d_query[:, :, 1].any() and d_sinks[0] == 0.0
    chex.assert_tree_all_finite(gradients)


@pytest.mark.long
@pytest.mark.parametrize("hidden", [0.0, slow(-1.5e37)])
def test_sinks_far_from_0_beside_a_bias(hidden):
    sinks = jnp.array([2e37, 2.1e37, 2.2e37, 1e38, 3e38, -1e37, -3e38, 1.0, jnp.inf])
    query, key, value, dout, dlse = inputs(1, 8, 64, len(sinks), 1, 64)
    bias = jnp.full((1, 1, 8, 1), hidden)

    def results(implementation, *arrays):
        attention = lambda *arrays: jax_flash.attention(
            *arrays[:3],
            bias=bias,
            sinks=arrays[3],
            return_residual=True,
            implementation=implementation,
        )
        out, vjp = jax.vjp(attention, *arrays, sinks)
        return *out, *vjp((dout.astype(out[0].dtype), dlse))

    with interpret_mode():
        out, lse, *gradients = results("mosaic_gpu", query, key, value)
    widened = (x.astype(jnp.float32) for x in (query, key, value))
    expected, expected_lse, *expected_gradients = results("xla", *widened)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5)
    for x, y in ((out, expected), *zip(gradients, expected_gradients, strict=True)):
        np.testing.assert_allclose(x.astype(jnp.float32), y, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("scale", [1e4, 1.0, 0.125, 0.0625, 1e-3, 1e-9])
def test_compressed_biases_keep_their_order(scale):
    problem = Problem(1, 8, 8, 1, 1, 64, np.dtype(jnp.bfloat16), scale, has_bias=True)
    largest = float(jnp.finfo(jnp.float32).max)
    sizes = np.float32(np.geomspace(1e-3, 0.999 * largest, 5000))
    sizes = np.append(sizes, np.float32(largest))
    bias = jnp.concatenate([-sizes[::-1], sizes])
    got = np.asarray(element_arrays.compressed(bias, problem), np.float64)
    assert (np.diff(got) > 0).all()
    assert np.isfinite(np.float32(got * np.log2(np.e))).all()
    if problem.may_begin_with_bias:
        assert np.isfinite(np.float32(got / scale)).all()
    near = np.abs(bias) < 1e30
    np.testing.assert_array_equal(got[near], bias[near])
    back = np.asarray(element_arrays.expanded(jnp.float32(got), problem))
    np.testing.assert_allclose(back, bias, rtol=2.0 ** (problem.bias_shift - 22))
    assert np.isneginf(element_arrays.compressed(jnp.float32(-jnp.inf), problem))


@pytest.mark.gpu
@pytest.mark.fast_cases(
    "row-64-options0-8",
    "all-64-options1-8",
    "tiled-64-options2-8",
    "keys-64-options3-8",
    "query rows-128-options4-8",
    "row-256-options5-8",
    "tiled-128-options6-8",
)
@pytest.mark.parametrize("T", [8, 200])
@pytest.mark.parametrize(("kind", "H", "options"), HIDDEN)
def test_rows_whose_keys_a_finite_bias_hides_on_a_gpu(T, kind, H, options):
    check(inputs(2, T, 416, 4, 2, H), is_hidden_by(kind, T, 416), **options)


@pytest.mark.gpu
@pytest.mark.fast_cases(
    "64-float32-False",
    "64-bfloat16-False",
    "80-float32-False",
    "80-bfloat16-False",
    "128-float32-False",
    "128-bfloat16-False",
    "192-float32-False",
    "192-bfloat16-False",
)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("H", [64, 80, 128, 192])
def test_bias_of_all_kinds_on_a_gpu(H, dtype, deterministic):
    bias = bias_of_all_kinds((1, 4, 300, 520), dtype, seed=H)
    check(inputs(2, 300, 520, 4, 2, H), bias, deterministic=deterministic)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, dict(deterministic=True), dict(is_causal=True)])
@pytest.mark.parametrize("H", [64, 128, 256])
def test_finite_inputs_have_finite_results_on_a_gpu(H, options):
    size = 65504.0 if H == 128 else 133120.0
    dtype = jnp.float16 if H == 128 else jnp.bfloat16
    if options.get("is_causal"):
        check_alike(1, 1, H, size, dtype, **options)
    else:
        for T, S in ((1, 1), (5, 5), (3, 300), (200, 1000)):
            check_alike(T, S, H, size, dtype, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [30.0, 1e3, 1e5, 1e9])
@pytest.mark.parametrize(
    ("H", "B", "T", "S", "N", "K"),
    [
        *((H, 2, 200, 700, 2, 1) for H in (64, 128, 256)),
        (64, 140, 700, 128, 2, 1),  # dQ is whole, of tiles that are drawn
    ],
)
def test_large_logits_on_a_gpu(H, B, T, S, N, K, size):
    """One key has a row's weight: as a rule that of plain JAX; and no gradient is NaN."""
    query, key, value, dout, _ = inputs(B, T, S, N, K, H)
    arrays = query * size, key * size, value, dout, jnp.zeros((B, T, N))
    got = results(arrays, None, "mosaic_gpu")
    expected = results([x.astype(jnp.float32) for x in arrays], None, "xla")
    np.testing.assert_allclose(got[1], expected[1], rtol=1e-5)
    if size != 1e3:  # there logits are rounded by about 1
        for x, y in ((got[0], expected[0]), (got[4], expected[4])):
            x, y = np.float64(x), np.float64(y)
            off = np.linalg.norm(x - y, axis=-1) > 0.1 * np.linalg.norm(y, axis=-1) + 1e-3
            assert off.mean() < 0.02
    chex.assert_tree_all_finite(got[:5])
