"""The pass over O and dO that the backward starts with, beside numpy in float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.problem import Problem
from pallas_kernels.ptx.fragments import fragment_shape
from pallas_kernels.row_statistics import row_statistics
from tests.support.cases import slow
from tests.support.interpret import interpret_mode


def problem(B, T, N, H, dtype) -> Problem:
    return Problem(B, T, 8, N, N, H, np.dtype(dtype), scale=0.3)


def inputs(B, T, N, H, dtype, unseen=0, more_lse_rows=0):
    """out, lse, d_out and d_lse; NaN or inf in each where it does not count.

    Args:
      unseen: how many rows see no key, the first ones.
      more_lse_rows: how many rows of lse are beyond the end.
    """
    keys = jax.random.split(jax.random.key(0), 4)
    out, d_out = (jax.random.normal(k, (B, T + -T % 8, N, H), dtype) for k in keys[:2])
    lse, d_lse = (
        jax.random.normal(k, (B, N, T + more))
        for k, more in zip(keys[2:], (more_lse_rows, 0), strict=True)
    )
    for poisoned in (slice(0, unseen), slice(T, None)):
        out = out.at[:, poisoned].set(jnp.nan)
        d_out = d_out.at[:, poisoned].set(jnp.inf)
    lse = lse.at[:, :, T:].set(jnp.nan).at[:, :, :unseen].set(-jnp.inf)
    return out, lse, d_out, d_lse.at[:, :, :unseen].set(jnp.nan)


def exact(out, lse, d_out, d_lse, problem, padded_rows):
    out, lse, d_out, d_lse = (np.asarray(x, np.float64) for x in (out, lse, d_out, d_lse))
    T = problem.query_length
    lse = lse[:, :, :T]
    start = np.full((*lse.shape[:2], padded_rows), -np.inf)
    minus_delta = np.zeros_like(start)
    start[:, :, :T] = -lse / problem.scale
    with np.errstate(invalid="ignore"):
        minus_delta[:, :, :T] = d_lse - np.einsum("btnh,btnh->bnt", out, d_out)[:, :, :T]
    unseen = np.isneginf(lse)
    start[:, :, :T][unseen] = -np.inf
    minus_delta[:, :, :T][unseen] = 0
    return start, minus_delta


def statistics_of(out, lse, d_out, d_lse, references=None, **settings):
    any_far = jax.new_ref(jnp.zeros(1, jnp.int32))
    return row_statistics(out, lse, d_out, d_lse, references, any_far, **settings)


def columns_of_dq(H) -> tuple[int, ...]:
    return (64,) * (H // 64) + ((H % 64,) if H % 64 else ())


def check(B, T, N, H, dtype, padded_rows, unseen=0, more_lse_rows=0):
    arrays, shape = inputs(B, T, N, H, dtype, unseen, more_lse_rows), problem(B, T, N, H, dtype)
    dq_columns = columns_of_dq(H)
    settings = dict(problem=shape, padded_rows=padded_rows, dq_columns=dq_columns)
    run = jax.jit(functools.partial(statistics_of, **settings))
    start, minus_delta, _, d_out, dq = (np.asarray(x) for x in run(*arrays))
    np.testing.assert_array_equal(d_out, arrays[2])
    exact_start, exact_minus_delta = exact(*arrays, shape, padded_rows)
    np.testing.assert_allclose(start[:, :, 0], exact_start, rtol=1e-6)
    np.testing.assert_array_equal(start[:, :, 1], 1.0)  # shares
    np.testing.assert_allclose(minus_delta, exact_minus_delta, rtol=1e-5, atol=1e-4)
    np.testing.assert_array_equal(minus_delta[np.isneginf(start[:, :, 0])], 0)
    row_tiles = B * N * padded_rows // 64
    assert dq.shape == (row_tiles * len(dq_columns), *fragment_shape(64))
    for tile, columns in enumerate(dq_columns):
        tiles = dq[tile :: len(dq_columns), : fragment_shape(columns)[0]]
        assert tiles.size == row_tiles * 64 * columns
        np.testing.assert_array_equal(tiles, 0)


@pytest.mark.long
@pytest.mark.parametrize(
    ("B", "T", "N", "H", "dtype", "padded_rows", "unseen", "more_lse_rows"),
    [
        (1, 64, 1, 64, jnp.bfloat16, 64, 0, 0),
        (2, 101, 3, 64, jnp.float16, 128, 0, 27),
        (2, 67, 1, 128, jnp.bfloat16, 256, 5, 0),  # tiles beyond the end
        (1, 1, 2, 64, jnp.bfloat16, 128, 0, 0),
        (1, 90, 2, 256, jnp.float16, 128, 70, 1),
        (1, 40, 2, 128, jnp.bfloat16, 64, 40, 0),
        (1, 70, 2, 96, jnp.bfloat16, 128, 3, 0),  # a tile of dQ of fewer columns
    ],
)
def test_row_statistics(B, T, N, H, dtype, padded_rows, unseen, more_lse_rows):
    with interpret_mode():
        check(B, T, N, H, dtype, padded_rows, unseen, more_lse_rows)


def test_tiles_of_dq_that_are_zeroed_later_are_left_alone():
    """Of two heads with two tiles of rows and two of columns each, those from 3 to 5."""
    arrays, shape = inputs(1, 128, 2, 128, jnp.bfloat16), problem(1, 128, 2, 128, jnp.bfloat16)
    settings = dict(problem=shape, padded_rows=128, dq_columns=(64, 64))
    with interpret_mode():
        *expected, _, _, _ = statistics_of(*arrays, **settings)
        *statistics, _, _, dq = statistics_of(*arrays, **settings, zeroed_later=range(3, 6))
    for got, whole in zip(statistics, expected, strict=True):
        np.testing.assert_array_equal(got, whole)
    # What nothing was stored to is NaN in interpret mode.
    untouched = np.isnan(dq).all((1, 2))
    np.testing.assert_array_equal(untouched, [n in range(3, 6) for n in range(8)])
    np.testing.assert_array_equal(dq[~untouched], 0)


def check_copy(B, T, N, H, unseen):
    arrays = inputs(B, T, N, H, jnp.bfloat16, unseen)
    shape = dataclasses.replace(problem(B, T, N, H, jnp.bfloat16), has_bias=True)
    run = jax.jit(functools.partial(statistics_of, problem=shape, padded_rows=T + -T % 64 + 64))
    _, _, _, d_out = run(*arrays)
    expected = arrays[2][:, :T].at[:, :unseen].set(0)
    np.testing.assert_array_equal(d_out, expected)


@pytest.mark.parametrize(("T", "unseen"), [(70, 3), (1, 1)])
def test_d_out_of_rows_that_a_bias_may_hide(T, unseen):
    """Infinity there does not come through, and rows beyond the end are not written."""
    with interpret_mode():
        check_copy(2, T, 2, 40, unseen)


@pytest.mark.gpu
@pytest.mark.parametrize(("T", "H"), [(1001, 64), (257, 24), (64, 256)])
def test_d_out_of_rows_that_a_bias_may_hide_on_a_gpu(T, H):
    check_copy(2, T, 5, H, 17)


@pytest.mark.fast_cases(
    "2-1024-32-0-0-64-bfloat16",
    "2-1024-32-0-0-256-bfloat16",
    "3-1001-5-77-23-128-bfloat16",
    "1-3-7-1-0-64-bfloat16",
    "1-3-7-1-0-256-bfloat16",
    "1-257-1-257-0-128-bfloat16",
)
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("H", [64, 128, 256])
@pytest.mark.parametrize(
    ("B", "T", "N", "unseen", "more_lse_rows"),
    [(2, 1024, 32, 0, 0), (3, 1001, 5, 77, 23), (1, 3, 7, 1, 0), (1, 257, 1, 257, 0)],
)
def test_row_statistics_on_a_gpu(B, T, N, H, dtype, unseen, more_lse_rows):
    padded_rows = T + -T % 128 + 128
    check(B, T, N, H, dtype, padded_rows, unseen, more_lse_rows)


@pytest.mark.gpu
@pytest.mark.parametrize("H", [8, slow(40), 96, slow(192), slow(248)])
def test_other_widths_on_a_gpu(H):
    """Rows whose 16 bytes a lane are no power of two, with NaN in the next head's columns."""
    arrays, shape = (
        inputs(2, 1001, 3, H, jnp.bfloat16, unseen=7),
        problem(2, 1001, 3, H, jnp.bfloat16),
    )
    run = jax.jit(functools.partial(statistics_of, problem=shape, padded_rows=1024))
    clean = run(*arrays)
    out, lse, d_out, d_lse = arrays
    start, minus_delta, _, _ = run(out.at[:, :, 1].set(jnp.nan), lse, d_out, d_lse)
    exact_start, exact_minus_delta = exact(*arrays, shape, 1024)
    np.testing.assert_allclose(start[:, :, 0], exact_start, rtol=1e-6)
    for head in (0, 2):
        np.testing.assert_allclose(
            minus_delta[:, head], exact_minus_delta[:, head], rtol=1e-5, atol=1e-4
        )
        np.testing.assert_array_equal(minus_delta[:, head], clean[1][:, head])


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements():
    """The last batch entry is the same as alone."""
    B, T, N, H = 9, 65536, 64, 64
    one = inputs(1, T, N, H, jnp.bfloat16)
    many = [jnp.concatenate([jnp.zeros((B - 1, *x.shape[1:]), x.dtype), x]) for x in one]
    results = [
        jax.jit(
            functools.partial(
                statistics_of,
                problem=problem(b, T, N, H, jnp.bfloat16),
                padded_rows=T,
                dq_columns=(64,),
            )
        )(*arrays)
        for b, arrays in ((B, many), (1, one))
    ]
    (*many_statistics, _, _, zeros), (*statistics, _, _, _) = results
    for last, alone in zip(many_statistics, statistics, strict=True):
        np.testing.assert_array_equal(last[-1:], alone)
    assert not zeros.any()


@pytest.mark.parametrize("padded_rows", [96, 64])
def test_padding_that_does_not_fit(padded_rows):
    arrays, shape = inputs(1, 65, 1, 64, jnp.bfloat16), problem(1, 65, 1, 64, jnp.bfloat16)
    with pytest.raises(ValueError, match=f"padded_rows: got {padded_rows}, needs a multiple of 64"):
        statistics_of(*arrays, problem=shape, padded_rows=padded_rows)
