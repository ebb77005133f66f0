"""decode_attention and update_cache on a Hopper GPU."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from tests.support.cases import slow
from tests.support.decode_kernel_calls import (
    SCALES,
    attention,
    check,
    check_float8_queries_of_any_size,
    relative_error_of_float8,
)
from tests.support.decoding import inputs, paged, written

pytestmark = pytest.mark.gpu

LENGTHS = [1000, 0, 1, 517, 64, 65]  # the whole cache among them


@pytest.mark.fast_cases("64-None-bfloat16", "128-1-float16")
@pytest.mark.parametrize(("num_splits", "dtype"), [(None, "bfloat16"), (1, "float16")])
@pytest.mark.parametrize("H", [64, 128, 256])
def test_widths(H, num_splits, dtype):
    check(inputs(6, 1, 1000, 8, 2, H, dtype), LENGTHS, num_splits=num_splits)


@pytest.mark.fast_cases(
    "64-bfloat16-None-1",
    "128-float16-None-83",
    "128-bfloat16-scales2-1001",
    "256-bfloat16-None-2047",
)
@pytest.mark.parametrize("S", [1, 83, 1001, 2047])
@pytest.mark.parametrize(
    ("H", "dtype", "scales"),
    [
        (64, "bfloat16", None),
        (128, "float16", None),
        (128, "bfloat16", SCALES),
        (256, "bfloat16", None),
        (256, "bfloat16", SCALES),
    ],
)
def test_lengths_that_are_no_multiple_of_8(H, dtype, scales, S):
    """What follows the last rows of a cache is those of the next sequence, some of them NaN."""
    for num_splits in (1, 3):
        arrays = inputs(6, 2, S, 8, 2, H, dtype)
        check(arrays, [S, 0, S // 2, S - 1, S, 1], scales=scales, num_splits=num_splits)


@pytest.mark.parametrize(
    ("T", "N", "K"), [(1, 4, 4), slow(1, 64, 1), (7, 6, 2), slow(40, 16, 4), slow(16, 32, 8)]
)
def test_tokens_and_groups(T, N, K):
    check(inputs(6, T, 1000, N, K, 128, "bfloat16"), LENGTHS)


@pytest.mark.parametrize(("H", "page_size"), [(64, 16), slow(128, 64), (128, 512), slow(256, 32)])
def test_pages(H, page_size):
    check(inputs(6, 3, 1024, 8, 2, H, "bfloat16"), LENGTHS, page_size=page_size)


@pytest.mark.parametrize(
    ("H", "dtype"),
    [(64, "float16"), slow(128, "bfloat16"), (128, "float16"), slow(256, "bfloat16")],
)
def test_float8_caches(H, dtype):
    options = dict(page_size=16, local_window_size=600) if dtype == "float16" else {}
    check(inputs(6, 2, 1024, 8, 2, H, dtype), LENGTHS, scales=SCALES, **options)


@pytest.mark.fast_cases("64-1-1-None", "128-1-1-None", "256-1-1-None")
@pytest.mark.parametrize(("T", "num_splits", "page_size"), [(1, 1, None), (3, 2, 16), (40, 3, 64)])
@pytest.mark.parametrize("H", [64, 128, 256])
def test_float8_caches_with_all_options(H, T, num_splits, page_size):
    check(
        inputs(6, T, 1024, 8, 2, H, "bfloat16"),
        LENGTHS,
        scales=SCALES,
        num_splits=num_splits,
        page_size=page_size,
        local_window_size=300,
        logits_soft_cap=5.0,
        sinks=np.linspace(-3.0, 12.0, 8, dtype=np.float32),
    )


@pytest.mark.fast_cases("case0-64", "case1-128", "case2-256")
@pytest.mark.parametrize("H", [64, 128, 256])
@pytest.mark.parametrize("case", [{}, dict(outlier=64.0), dict(favourite=9.0), dict(mean=1.0)])
def test_float8_has_the_error_of_bfloat16(H, case):
    """Also over many keys: products of FP8 add up 14 bits."""
    assert relative_error_of_float8(H, 32768, [32768, 30001], **case) < 3e-3


def test_float8_gives_the_same_bits_in_every_run():
    query, *caches = inputs(9, 1, 4000, 8, 2, 128, "bfloat16")
    caches = [x.astype(jnp.float8_e4m3fn) for x in caches]
    run = functools.partial(attention, key_scale=jnp.ones(2), value_scale=jnp.ones(2))
    lengths = jnp.array([1300, 3999, 5, 0, 700, 800, 2900, 4000, 1100])
    first = run(query, *caches, lengths)
    for _ in range(50):
        chex.assert_trees_all_equal(run(query, *caches, lengths), first)


def test_float8_queries_of_any_size():
    check_float8_queries_of_any_size(128)


@pytest.mark.parametrize("num_splits", [1, slow(5)])
def test_all_options(num_splits):
    check(
        inputs(6, 5, 1000, 8, 2, 128, "bfloat16"),
        LENGTHS,
        num_splits=num_splits,
        local_window_size=300,
        logits_soft_cap=5.0,
        scale=0.2,
        sinks=np.linspace(-3.0, 12.0, 8, dtype=np.float32),
    )


def test_a_long_sequence():
    check(inputs(1, 1, 65536, 4, 1, 64, "bfloat16"), [65000])


def test_others_in_the_batch_change_nothing():
    """And every run gives the same bits."""
    query, *caches = inputs(9, 2, 2000, 8, 2, 128, "bfloat16")
    run = functools.partial(attention, num_splits=3, return_residual=True)
    lengths = jnp.array([1300, 1999, 5, 0, 700, 800, 900, 1000, 1100])
    first = run(query, *caches, lengths)
    poisoned = [x.at[1:].set(jnp.nan) for x in (query, *caches)]
    alone = run(*(x[:1] for x in (query, *caches)), lengths[:1])
    for other in (run(*poisoned, lengths[::-1].at[0].set(1300)), alone):
        chex.assert_trees_all_equal(*(jax.tree.map(lambda x: x[0], x) for x in (first, other)))
    for _ in range(20):
        chex.assert_trees_all_equal(run(query, *caches, lengths), first)


def test_update_cache():
    lengths = np.array([0, 2, 3, 31, 32, 34], np.int32)
    _, *caches = inputs(6, 1, 32, 2, 2, 64, "bfloat16")
    new = [x[:, :4] for x in inputs(6, 4, 8, 2, 2, 64, "bfloat16", seed=1)[1:]]
    pages, (table, _) = zip(*(paged(x, 16) for x in caches), strict=True)
    update = jax.jit(jax_flash.update_cache)
    got, in_pages = update(*caches, *new, lengths), update(*pages, *new, lengths, table)
    for actual, actual_pages, cache, x in zip(got, in_pages, caches, new, strict=True):
        truth = written(cache, np.asarray(x), lengths)
        np.testing.assert_array_equal(actual, truth)
        np.testing.assert_array_equal(
            actual_pages[table.ravel()], truth.reshape(12, 16, *truth.shape[2:])
        )
