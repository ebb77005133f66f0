"""matmul.py and plain.py, the way up to the kernels that are in use."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import matmul, plain
from tests import oracle
from tests.support.cases import slow
from tests.support.compile import compile_kernels
from tests.support.interpret import interpret_mode

DTYPES = [jnp.bfloat16, jnp.float16]
BOUND = {jnp.bfloat16: 4e-3, jnp.float16: 6e-4}  # of the norm; the result is rounded once


def check_matmul(m, k, n, dtype, splits=None) -> jax.Array:
    a_key, b_key = jax.random.split(jax.random.key(m + k + n))
    a, b = jax.random.normal(a_key, (m, k), dtype), jax.random.normal(b_key, (k, n), dtype)
    c = matmul.matmul(a, b, splits=splits)
    assert (c.shape, c.dtype) == ((m, n), a.dtype)
    expected = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    error = np.linalg.norm(np.asarray(c, np.float64) - expected) / np.linalg.norm(expected)
    assert error < BOUND[dtype]
    return c


@pytest.mark.parametrize(
    ("m", "k", "n", "splits"),
    [
        (128, 256, 256, 1),
        (64, 640, 256, 4),  # of unlike shares
        (72, 200, 328, None),
        slow(264, 64, 8, 3),  # shares of nothing
        slow(1000, 136, 520, 1),
        (8, 8, 8, None),
    ],
)
def test_matmul(m, k, n, splits):
    with interpret_mode():
        check_matmul(m, k, n, jnp.bfloat16, splits)


def test_thread_blocks_walk_over_many_tiles_of_a_matmul(monkeypatch):
    monkeypatch.setattr(matmul, "SM_COUNT", 2)
    matmul._build.cache_clear()
    with interpret_mode():
        check_matmul(200, 320, 600, jnp.float16)
    matmul._build.cache_clear()


@pytest.mark.parametrize("shapes", [((8, 16), (8, 8)), ((4, 8), (8, 8)), ((8, 8), (8, 4))])
def test_matmul_says_what_it_needs(shapes):
    a, b = (jnp.zeros(shape, jnp.bfloat16) for shape in shapes)
    with pytest.raises(ValueError, match="multiples of 8"):
        matmul.matmul(a, b)


def check_attention(B, T, N, dtype) -> jax.Array:
    operands = [
        jax.random.normal(key, (B, T, N, plain.WIDTH), dtype)
        for key in jax.random.split(jax.random.key(T), 3)
    ]
    out = plain.attention(*operands)
    expected, _ = oracle.attention(*(np.asarray(x, np.float64) for x in operands), is_causal=True)
    error = np.linalg.norm(np.asarray(out, np.float64) - expected) / np.linalg.norm(expected)
    assert error < BOUND[dtype]
    return out


@pytest.mark.parametrize(
    ("B", "T", "N", "dtype"),
    [(1, 384, 1, jnp.bfloat16), (2, 128, 3, jnp.float16), slow(1, 640, 2, jnp.float16)],
)
def test_plain(B, T, N, dtype):
    with interpret_mode():
        check_attention(B, T, N, dtype)


def test_thread_blocks_walk_over_many_tiles_of_plain(monkeypatch):
    monkeypatch.setattr(plain, "SM_COUNT", 2)
    plain._build.cache_clear()
    with interpret_mode():
        check_attention(1, 384, 2, jnp.bfloat16)
    plain._build.cache_clear()


@pytest.mark.parametrize("shape", [(1, 100, 1, 128), (1, 128, 1, 64)])
def test_plain_says_what_it_needs(shape):
    query = jnp.zeros(shape, jnp.bfloat16)
    with pytest.raises(ValueError, match="a multiple of 128"):
        plain.attention(query, query, query)


@pytest.mark.compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("of", ["matmul", "split", "plain"])
def test_compiles_without_faults(of, dtype):
    rows = {"matmul": 2048, "split": 64}.get(of, 0)
    shapes = [(rows, 4096), (4096, 4096)] if rows else [(2, 4096, 16, 128)] * 3
    function = matmul.matmul if rows else plain.attention
    operands = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    for report in compile_kernels(function, operands, sass=False):
        assert not report.faults(), report


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("m", "k", "n", "splits"),
    [
        (8192, 1024, 4096, None),
        (64, 4096, 4096, None),
        (1000, 3000, 2008, None),
        (264, 64, 8, 3),
        (72, 200, 328, None),
        (64, 64, 64, None),
        (8, 8, 8, None),
    ],
)
def test_matmul_on_a_gpu(m, k, n, splits, dtype):
    results = [np.asarray(check_matmul(m, k, n, dtype, splits)) for _ in range(3)]
    for again in results[1:]:
        np.testing.assert_array_equal(again, results[0])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("B", "T", "N"), [(1, 128, 1), (2, 2048, 8), (1, 8192, 2)])
def test_plain_on_a_gpu(B, T, N, dtype):
    results = [np.asarray(check_attention(B, T, N, dtype)) for _ in range(3)]
    for again in results[1:]:
        np.testing.assert_array_equal(again, results[0])
