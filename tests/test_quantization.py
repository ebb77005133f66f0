"""quantize_fp8() and incoherent processing: values, scales, and that the rotation is orthogonal."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jax_flash
from jax_flash import quantization
from jax_flash.quantization import halvings, largest_of_rows, rotate
from tests.support.cases import long

LARGEST = 448.0
HALF_MAX = 65504.0  # of float16
KEY = jax.random.key(3)


def draw(seed, *shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def quantize(x, **options):
    """The first of what quantize_fp8 gives."""
    return jax_flash.quantize_fp8(x, x, x, **options)[0]


def in_numpy(x, block_size):
    """Values and scales of queries or keys, one block at a time."""
    x = np.asarray(x, np.float64)
    most = largest_of_rows(x.shape[-1])
    B, T, N, _ = x.shape
    starts = range(0, T, block_size)
    scales = np.ones((B, len(starts), N))
    values = np.empty(x.shape, ml_dtypes.float8_e4m3fn)
    for b, i, n in np.ndindex(*scales.shape):
        rows = slice(starts[i], starts[i] + block_size)
        block = x[b, rows, n]
        largest = np.abs(block[np.isfinite(block)]).max(initial=0)
        if largest > 0:
            scales[b, i, n] = largest / most
        scaled = np.clip(block / scales[b, i, n], -most, most)
        values[b, rows, n] = scaled.astype(ml_dtypes.float8_e4m3fn)
    return values, scales


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("block_size", [1, 8, 37, 64, 1000])
def test_a_scale_for_each_block_of_each_head(block_size, dtype):
    x = draw(0, 2, 37, 3, 16) * jnp.exp(3 * draw(1, 2, 37, 3, 1))
    x = x.astype(dtype)
    quantized = quantize(x, block_size=block_size)
    values, scales = in_numpy(x, block_size)
    assert quantized.block_size == block_size
    np.testing.assert_allclose(quantized.scales, scales, rtol=3e-7)
    assert quantized.values.dtype == quantized.dtype == jnp.float8_e4m3fn
    # The same but where the scale's rounding decides which of two neighbours is nearer.
    got, values = np.float32(np.asarray(quantized.values)), np.float32(values)
    assert (got != values).mean() < 1e-2
    np.testing.assert_allclose(got, values, rtol=2**-3, atol=2**-9)


@pytest.mark.parametrize("width", [1, long(8), long(64), 80, 128, long(192), long(256), 384])
def test_products_of_rows_are_float16_numbers(width):
    most = largest_of_rows(width)
    rows = jnp.full((1, 9, 1, width), 3.0).at[0, 5].set(jnp.inf)
    query, key, value = jax_flash.quantize_fp8(rows, rows, rows)
    assert [x.largest for x in (query, key, value)] == [most, most, LARGEST]
    assert (query.values.astype(jnp.float32) == most).all()
    assert most**2 * width <= HALF_MAX
    following = float(np.nextafter(ml_dtypes.float8_e4m3fn(most), ml_dtypes.float8_e4m3fn(448)))
    assert most == LARGEST or following**2 * width > HALF_MAX
    assert halvings(most, most, width) == (0, 0)
    of_query, of_key = halvings(LARGEST, LARGEST, width)
    product = LARGEST**2 * width / 2.0 ** (of_query + of_key)
    assert HALF_MAX / 2 < product <= HALF_MAX
    assert 0 <= of_query - of_key <= 1


def test_default_block():
    quantized = jax_flash.quantize_fp8(
        draw(0, 300, 4, 8), draw(1, 129, 2, 8), draw(2, 129, 2, 24), block_size=None
    )
    assert [x.block_size for x in quantized] == [128] * 3
    assert [x.scales.shape for x in quantized] == [(3, 4), (2, 2), (2, 2)]
    assert [(x.shape, x.ndim) for x in quantized] == [
        ((300, 4, 8), 3),
        ((129, 2, 8), 3),
        ((129, 2, 24), 3),
    ]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_dequantized_is_near(dtype):
    x = draw(0, 2, 50, 3, 16)
    back = quantize(x, block_size=16).dequantize(dtype)
    assert back.dtype == dtype
    # 4 significant bits, and bfloat16's own rounding.
    np.testing.assert_allclose(np.float32(back), x, rtol=2**-4 + 2**-8, atol=1e-4)


def test_zeros_have_scale_1():
    x = draw(0, 1, 24, 2, 8).at[:, 8:16, 1].set(0)
    quantized = quantize(x, block_size=8)
    np.testing.assert_array_equal(quantized.scales[0, :, 1] == 1, [False, True, False])
    assert not quantized.values[0, 8:16, 1].astype(jnp.float32).any()
    nothing = quantize(jnp.zeros((1, 0, 2, 8)))
    assert nothing.scales.shape == (1, 0, 2)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_scales_of_values_are_powers_of_two(dtype):
    """The smallest that are at least max / 448, also at 448 times one and a bit above."""
    x = draw(0, 2, 60, 3, 16) * jnp.exp(8 * draw(1, 2, 60, 3, 1))
    edges = jnp.array([448.0, 450, 446, 7, 7 * 2**-100, 0])
    x = x.at[0, :48, 1].set(jnp.repeat(edges, 8)[:, None] * jnp.sign(x[0, :48, 1])).astype(dtype)
    value = jax_flash.quantize_fp8(x, x, x, block_size=8)[2]
    scales = np.asarray(value.scales, np.float64)
    largest = np.abs(np.pad(np.float64(x), [(0, 0), (0, 4), (0, 0), (0, 0)]))
    largest = largest.reshape(2, 8, 8, 3, 16).max((2, 4))
    fraction, _ = np.frexp(scales)
    assert (fraction == 0.5).all()
    least = np.where(largest == 0, 1, largest / LARGEST)
    assert (scales >= least).all() and (scales < 2 * least).all()
    np.testing.assert_array_equal(scales[0, :6, 1], [1, 2, 1, 2**-6, 2**-106, 1])
    # Dividing is exact, and nothing is above 448.
    exact = np.float64(x) / np.repeat(scales, 8, axis=1)[:, :60, :, None]
    rounded = np.float64(np.float32(exact).astype(ml_dtypes.float8_e4m3fn))
    np.testing.assert_array_equal(np.float64(value.values.astype(jnp.float32)), rounded)


def test_infinities_saturate_and_nan_stays():
    x = draw(0, 1, 16, 2, 8)
    odd = x.at[0, 3, 0, 2].set(jnp.inf).at[0, 3, 0, 3].set(-jnp.inf).at[0, 4, 0, 5].set(jnp.nan)
    values = quantize(odd, block_size=8).values.astype(jnp.float32)
    most = largest_of_rows(8)
    assert values[0, 3, 0, 2] == most and values[0, 3, 0, 3] == -most
    assert jnp.isnan(values).sum() == 1 and jnp.isnan(values[0, 4, 0, 5])
    # The scale is made from the others.
    replaced = jnp.where(jnp.isfinite(odd), odd, 0)
    np.testing.assert_array_equal(
        quantize(odd, block_size=8).scales, quantize(replaced, block_size=8).scales
    )
    only = quantize(jnp.full((1, 8, 1, 8), jnp.inf))
    assert only.scales[0, 0, 0] == 1 and (only.values.astype(jnp.float32) == most).all()


@pytest.mark.parametrize("magnitude", [1e-45, 1e-38, 1e-30, 3e38])
def test_extreme_magnitudes_stay_finite(magnitude):
    x = jnp.full((1, 8, 1, 8), magnitude, jnp.float32)
    quantized = quantize(x)
    assert jnp.isfinite(quantized.values.astype(jnp.float32)).all()
    assert (quantized.scales > 0).all() and jnp.isfinite(quantized.scales).all()
    if magnitude >= 1e-30:
        np.testing.assert_allclose(quantized.dequantize(jnp.float32), x, rtol=1e-6)


# --- incoherent processing ----------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 7, *range(8, 257, 8), 384, 512])
def test_factors_are_orthogonal(width):
    matrix = np.eye(1)
    for factor in quantization._factors(width):
        matrix = np.kron(factor, matrix)
    assert matrix.shape == (width, width)
    np.testing.assert_allclose(matrix @ matrix.T, width * np.eye(width), atol=1e-10 * width)


@pytest.mark.long
@pytest.mark.parametrize("width", [1, 7, 8, 64, 80, 128, 184, 256, 384, 512])
def test_rotation_is_orthogonal(width):
    matrix = np.float64(rotate(jnp.eye(width), KEY))
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(width), atol=1e-6)
    # Each column of the input goes to every column, evenly but for the odd factor.
    odd = width // (width & -width)
    assert np.abs(matrix).max() <= (2 / width) ** 0.5 * 1.0001
    if odd == 1:
        np.testing.assert_allclose(np.abs(matrix), width**-0.5, rtol=1e-6)


def test_rotation_in_small_factors(monkeypatch):
    whole = rotate(draw(0, 3, 96), KEY)
    monkeypatch.setattr(quantization, "_LARGEST_FACTOR", 4)
    matrix = np.float64(rotate(jnp.eye(96), KEY))
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(96), atol=1e-6)
    parts = rotate(draw(0, 3, 96), KEY)
    np.testing.assert_allclose(jnp.linalg.norm(parts), jnp.linalg.norm(whole), rtol=1e-6)


@pytest.mark.parametrize("width", [long(64), 80, long(128), long(200)])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_rotation_leaves_products_unchanged(width, dtype):
    query, key = draw(0, 1, 20, 2, width, dtype=dtype), draw(1, 1, 30, 2, width, dtype=dtype)
    before = np.einsum("btnh,bsnh->bnts", np.float64(query), np.float64(key))
    rotated = [np.float64(rotate(x, KEY)) for x in (query, key)]
    after = np.einsum("btnh,bsnh->bnts", *rotated)
    np.testing.assert_allclose(after, before, atol=2e-5)  # of products with a norm of `width`


def test_query_and_key_are_rotated_and_value_is_not():
    query, key, value = draw(0, 1, 20, 4, 16), draw(1, 1, 30, 2, 16), draw(2, 1, 30, 2, 24)
    plain = jax_flash.quantize_fp8(query, key, value)
    rotated = jax_flash.quantize_fp8(query, key, value, incoherent_key=KEY)
    for x, y, of in zip(rotated, plain, (rotate(query, KEY), rotate(key, KEY), value), strict=True):
        np.testing.assert_allclose(x.dequantize(jnp.float32), of, rtol=0.07, atol=1e-3)
        assert (x.values == y.values).all() == (of is value)
    other = jax_flash.quantize_fp8(query, key, value, incoherent_key=jax.random.key(4))
    assert not (other[0].values == rotated[0].values).all()


def test_outliers_are_spread():
    query, key = (draw(seed, 1, 128, 1, 128).at[0, seed::9, 0, 5].mul(50) for seed in (0, 1))
    exact = np.einsum("btnh,bsnh->ts", np.float64(query), np.float64(key))

    def error(**options):
        quantized = jax_flash.quantize_fp8(query, key, key, **options)[:2]
        query_and_key = (np.float64(x.dequantize(jnp.float32)) for x in quantized)
        return np.abs(np.einsum("btnh,bsnh->ts", *query_and_key) - exact).max()

    assert np.abs(rotate(query, KEY)).max() < 0.2 * np.abs(query).max()
    assert error(incoherent_key=KEY) < 0.3 * error()


# --- what is refused ----------------------------------------------------------------------------

X = jnp.zeros((2, 8, 2, 16))

ERRORS = [
    ({"query": jnp.zeros((2, 8, 2, 16), int)}, TypeError, "query: got int32; needs one of bfloat"),
    ({"key": jnp.zeros((8, 16))}, ValueError, r"key: got \(8, 16\); needs \[B, T, N, H\] or"),
    ({"value": "x"}, TypeError, "value: got str; needs an array"),
    ({"block_size": 0}, ValueError, "block_size: got 0; needs at least 1"),
    ({"block_size": 64.0}, TypeError, "block_size: got float; needs None or an integer"),
    ({"block_size": True}, TypeError, "block_size: got bool; needs None or an integer"),
    ({"query": X[..., :0]}, ValueError, "query: got head width 0; needs at least 1"),
    ({"value": X[..., :0]}, ValueError, "value: got head width 0; needs at least 1"),
    ({"incoherent_key": 7}, TypeError, "incoherent_key: got int32; needs a JAX random key"),
    ({"incoherent_key": jnp.ones(2)}, TypeError, "incoherent_key: got float32; needs a JAX"),
    ({"incoherent_key": "seven"}, TypeError, "incoherent_key: got str; needs a JAX random key"),
    (
        {"incoherent_key": jax.ShapeDtypeStruct((), KEY.dtype)},
        TypeError,
        "incoherent_key: got ShapeDtypeStruct; needs a JAX random key",
    ),
    (
        {"incoherent_key": jax.random.split(KEY)},
        ValueError,
        r"incoherent_key: got keys of shape \(2,\); needs one key",
    ),
    (
        {"incoherent_key": jax.random.split(jax.random.PRNGKey(0))},
        ValueError,
        r"incoherent_key: got words of shape \(2, 2\); needs one key, \(2,\)",
    ),
    (
        {"key": jnp.zeros((2, 8, 2, 8)), "incoherent_key": KEY},
        ValueError,
        "key: got head width 8; needs that of query, 16",
    ),
]


@pytest.mark.parametrize(("changes", "error", "message"), ERRORS, ids=[m for _, _, m in ERRORS])
def test_bad_arguments(changes, error, message):
    with pytest.raises(error, match=message):
        jax_flash.quantize_fp8(**{"query": X, "key": X, "value": X} | changes)


def test_block_size_is_static():
    with pytest.raises(TypeError, match="block_size: got a traced value; needs a static integer"):
        jax.jit(lambda size: quantize(X, block_size=size))(64)


@pytest.mark.parametrize("as_data", [lambda key: key, jax.random.key_data, np.asarray])
def test_kinds_of_keys(as_data):
    key = jax.random.PRNGKey(3) if as_data is np.asarray else KEY
    expected = quantize(draw(0, 1, 8, 2, 16), incoherent_key=KEY)
    got = quantize(draw(0, 1, 8, 2, 16), incoherent_key=as_data(key))
    np.testing.assert_array_equal(got.values.view(jnp.uint8), expected.values.view(jnp.uint8))


def test_dequantize_refuses_integers():
    with pytest.raises(TypeError, match=r"dtype: got .*int8.*; needs a floating one"):
        quantize(X).dequantize(jnp.int8)


@pytest.mark.parametrize("transform", [jax.grad, jax.jit, jax.checkpoint])
def test_quantisation_has_no_derivative(transform):
    def loss(x):
        return quantize(x).dequantize(jnp.float32).sum()

    with pytest.raises(NotImplementedError, match=r"quantize_fp8 has no derivative.*attention_fp8"):
        jax.grad(transform(loss) if transform is not jax.grad else loss)(X)


def test_quantize_under_jit_and_vmap():
    x = draw(0, 3, 2, 20, 2, 16)
    one_by_one = [quantize(row, block_size=8, incoherent_key=KEY) for row in x]
    together = jax.jit(jax.vmap(lambda x: quantize(x, block_size=8, incoherent_key=KEY)))(x)
    assert together.block_size == 8
    for i, alone in enumerate(one_by_one):
        np.testing.assert_allclose(together.scales[i], alone.scales, rtol=1e-6)
        near = np.float32(together.values[i]), np.float32(alone.values)
        np.testing.assert_allclose(*near, rtol=2**-3, atol=2**-8)  # one rounding apart


def test_the_largest_values_stay_finite():
    largest = float(jnp.finfo(jnp.float32).max)
    x = jnp.full((1, 64, 1, 16), largest)
    *_, value = jax_flash.quantize_fp8(0 * x, 0 * x, x)
    there = value.dequantize(jnp.float32)
    assert jnp.isfinite(there).all() and (there > 0.9 * largest).all()


def test_a_block_size_of_a_byte():
    x = draw(0, 1, 300, 2, 8)
    plain = jax_flash.quantize_fp8(x, x, x, block_size=127)
    short = [dataclasses.replace(part, block_size=np.int8(127)) for part in plain]
    chex.assert_trees_all_equal(jax_flash.attention(*short), jax_flash.attention(*plain))
