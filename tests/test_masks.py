"""Visibility against the oracle's element-by-element definition, and the dropout hash."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash.masks import Visibility, dropout_keep
from pallas_kernels import dropout_words
from pallas_kernels.dropout_words import four_values
from tests import oracle
from tests.support.cases import long

B, T, S = 2, 9, 13


def arrays(**options):
    return {
        name: jnp.asarray(x, jnp.int32) if isinstance(x, list) else x for name, x in options.items()
    }


OFFSETS = [0, 4, -3, 40, -40, 2**40, -(2**40), [2, -5], [-100, 100], [2**31 - 1, -(2**31)]]
WINDOWS = [None, (2, 3), (0, 0), (3, 0), (0, 4), (2**40, 1), (1, 2**40), (-2, 3), (-2, 1)]
LENGTHS = [(None, None), ([5, 9], None), (None, [13, 4]), ([0, 3], [7, 0])]
CASES = [
    {"is_causal": causal, "window": window, "query_offset": offset}
    | {"query_seq_lengths": queries, "key_value_seq_lengths": keys}
    for causal, window, offset, (queries, keys) in itertools.product(
        [False, True], WINDOWS, OFFSETS, LENGTHS
    )
]


def expected(mask=None, **options):
    options["local_window_size"] = options.pop("window", None)
    return oracle.visibility(B, T, S, mask, **options)


def test_row_intervals_are_the_visible_keys():
    cols = np.arange(S)
    for case in CASES:
        lo, hi = Visibility(**arrays(**case)).row_intervals(T, S)
        assert lo.dtype == hi.dtype == np.int32
        lo, hi = np.asarray(lo), np.asarray(hi)
        seen = (lo[..., None] <= cols) & (cols < hi[..., None])
        np.testing.assert_array_equal(
            np.broadcast_to(seen, (B, T, S)), expected(**case)[:, 0], err_msg=str(case)
        )
        for bound in (lo, hi):
            assert bound.min() >= 0 and bound.max() <= S, case
            assert (np.diff(bound, axis=1) >= 0).all(), case


def test_row_intervals_of_traced_lengths_and_offsets():
    for case in CASES[::7]:
        of_arrays = {name: x for name, x in arrays(**case).items() if isinstance(x, jax.Array)}
        static = {name: x for name, x in case.items() if name not in of_arrays}
        intervals = lambda x, static=static: Visibility(**static, **x).row_intervals(T, S)
        chex.assert_trees_all_equal(jax.jit(intervals)(of_arrays), intervals(of_arrays))


def test_row_intervals_are_numpy_where_static():
    def static(**options):
        traced = []

        def f(x):
            del x
            traced.extend(Visibility(**arrays(**options)).row_intervals(T, S))
            return 0

        jax.make_jaxpr(f)(0)
        return all(isinstance(bound, np.ndarray) for bound in traced)

    assert static(is_causal=True, window=(3, 1), query_offset=S - T)
    assert static()
    assert not static(is_causal=True, query_offset=[1, 2])
    assert not static(key_value_seq_lengths=[1, 2])
    assert not static(query_seq_lengths=[1, 2])


def test_row_intervals_leave_out_segments_and_mask():
    visibility = Visibility(
        is_causal=True,
        query_segment_ids=jnp.ones((B, T), jnp.int32),
        key_value_segment_ids=jnp.zeros((B, S), jnp.int32),
        mask=jnp.zeros((1, 1, 1, S), bool),
    )
    _, hi = visibility.row_intervals(T, S)
    np.testing.assert_array_equal(hi, np.arange(1, T + 1)[None])


@pytest.mark.parametrize("num_rows, num_keys", [(0, 5), (5, 0), (0, 0)])
def test_row_intervals_of_nothing(num_rows, num_keys):
    lo, hi = Visibility(is_causal=True, window=(1, 1)).row_intervals(num_rows, num_keys)
    chex.assert_shape([lo, hi], (1, num_rows))
    np.testing.assert_array_equal(hi, np.zeros((1, num_rows)))


def test_a_tile_of_everything_is_none():
    assert Visibility().tile(0, T, 0, S) is None
    assert Visibility(query_offset=3).tile(0, T, 0, S) is None


@chex.variants(with_jit=True, without_jit=True)
class TileTest(chex.TestCase):
    """A tile equals the same tile of the oracle's whole, start static or traced."""

    def check(self, **options):
        visibility = Visibility(**arrays(**options))
        tile = self.variant(lambda row, col: visibility.tile(row, 4, col, 6))
        whole = np.broadcast_to(expected(**options), (B, 3, T, S))
        for row, col in [(0, 0), (5, 7), (3, 2)]:
            got = np.broadcast_to(tile(row, col), (B, 3, 4, 6))
            np.testing.assert_array_equal(got, whole[:, :, row : row + 4, col : col + 6])

    def test_intervals(self):
        for case in CASES[100::19]:
            self.check(**case)

    def test_segments(self):
        rng = np.random.default_rng(0)
        self.check(
            query_segment_ids=rng.integers(0, 3, (B, T)).tolist(),
            key_value_segment_ids=rng.integers(0, 3, (B, S)).tolist(),
            is_causal=True,
            key_value_seq_lengths=[6, 13],
        )

    def test_masks_of_every_broadcast_shape(self):
        rng = np.random.default_rng(0)
        for shape in itertools.product((1, B), (1, 3), (1, T), (1, S)):
            mask = rng.random(shape) < 0.5
            self.check(mask=jnp.asarray(mask))
            self.check(mask=jnp.asarray(mask), window=(4, 2))


# The dropout hash.


def keep(key=(1, 2), rate=0.5, b=2, n=3, t=256, s=256):
    return np.asarray(
        dropout_keep(
            jnp.asarray(key, jnp.uint32),
            rate,
            jnp.arange(b).reshape(b, 1, 1, 1),
            jnp.arange(n).reshape(n, 1, 1),
            jnp.arange(t).reshape(t, 1),
            jnp.arange(s),
        )
    )


def test_dropout_keep_equals_its_definition_in_plain_integers():
    def finalise(x):
        x = ((x ^ (x >> 16)) * 0x21F0AAAD) % 2**32
        x = ((x ^ (x >> 15)) * 0xD35A2D97) % 2**32
        return x ^ (x >> 15)

    def hashed(word, *parts):
        for part in parts:
            word = finalise(((word + 0x9E3779B9) % 2**32) ^ part)
        return word | 1

    def kept(key, rate, b, n, i, j):
        row = hashed(0x9E3779B9, key[0], i & ~8, n, b, key[1])
        column = hashed(0x85EBCA6B, key[1], j & ~8, key[0])
        upper, lower = divmod(row * column, 2**32)
        byte = (0 if i & 8 else 1) + (2 if j & 8 else 0)
        value = ((upper ^ lower) >> 8 * byte) % 2**7
        random = finalise((row + 0x9E3779B9) % 2**32)
        both = (round(rate * 2**15) + random % 2**7) // 2**7
        first = (both + random // 2**7 % 2) // 2
        return value + (both - first if j & 8 else first) < 2**7

    key = (0xDEADBEEF, 7)
    for rate in (0.01, 0.3, 0.9):
        got = keep(key, rate, 2, 2, 24, 64)
        want = [[[[kept(key, rate, b, n, i, j) for j in range(64)] for i in range(24)]
                 for n in range(2)] for b in range(2)]  # fmt: skip
        np.testing.assert_array_equal(got, want)


@chex.variants(with_jit=True, without_jit=True)
class DropoutKeepTest(chex.TestCase):
    def test_depends_on_indices_alone(self):
        key = jnp.asarray([3, 4], jnp.uint32)
        whole = keep((3, 4), 0.4)
        tile = self.variant(
            lambda key, b, n, i, j: dropout_keep(
                key, 0.4, b, n, i + jnp.arange(64)[:, None], j + jnp.arange(32)
            )
        )
        for b, n, i, j in [(0, 0, 0, 0), (1, 2, 128, 96), (1, 0, 192, 224)]:
            np.testing.assert_array_equal(
                tile(key, b, n, i, j), whole[b, n, i : i + 64, j : j + 32]
            )


@pytest.mark.parametrize("rate", [0.0, 0.001, 0.1, 0.25, 0.5, 0.9, 0.999])
def test_dropout_rate(rate):
    for key in [(0, 0), (0, 1), (1, 0), (2**32 - 1, 12345)]:
        dropped = ~keep(key, rate)
        rate = round(rate * 2**15) / 2**15
        deviation = (rate * (1 - rate) / dropped.size) ** 0.5
        assert abs(dropped.mean() - rate) <= 5 * deviation, key
        # Rows and columns are binomial too, not just the whole: the variance of their counts.
        for axis in (-1, -2):
            counts = dropped.sum(axis)
            variance = rate * (1 - rate) * 256
            if variance > 10:
                np.testing.assert_allclose(
                    counts.var(), variance, rtol=5 * (2 / counts.size) ** 0.5
                )


def test_rates_near_the_ends_are_the_next_step():
    np.testing.assert_array_equal(keep(rate=1 - 2**-40), keep(rate=1 - 2**-15))
    np.testing.assert_array_equal(keep(rate=2**-40), keep(rate=2**-15))
    assert 0 < keep(rate=1 - 2**-40).mean() < 1e-4
    assert 0 < 1 - keep(rate=2**-40).mean() < 1e-4


def correlation(x, y):
    """In standard deviations of what independent fair bits would give."""
    x, y = (2.0 * z.ravel() - 1 for z in (x, y))
    return abs(x @ y) / x.size**0.5


def test_neighbours_are_uncorrelated():
    k = keep(rate=0.5)
    for distance in (1, 2, 3, 8, 64, 128):
        assert correlation(k[..., distance:], k[..., :-distance]) < 5
        assert correlation(k[..., distance:, :], k[..., :-distance, :]) < 5
        assert correlation(k[..., distance:, distance:], k[..., :-distance, :-distance]) < 5
    assert correlation(k[:, 0], k[:, 1]) < 5
    assert correlation(k[:, 1], k[:, 2]) < 5
    assert correlation(k[0], k[1]) < 5
    assert correlation(k[0, 1], k[1, 0]) < 5  # head 1 of batch 0 is not head 0 of batch 1
    assert correlation(k[0, 0], k[0, 0].T) < 5


def test_pairs_of_rows_are_uncorrelated():
    signs = 2.0 * keep(rate=0.5, b=1, n=2, t=256, s=1024).reshape(512, 1024) - 1
    gram = signs @ signs.T / 1024**0.5
    off_diagonal = gram[np.triu_indices(512, 1)]
    assert abs(off_diagonal).max() < 6
    np.testing.assert_allclose(off_diagonal.var(), 1, atol=0.03)


@pytest.mark.parametrize("rate", [long(0.1), 0.5])
def test_no_structure(rate):
    """Singular values are those of independent elements: no sum of products of rows and columns."""
    k = keep((7, 8), rate, b=1, n=1, t=1024, s=1024)[0, 0].astype(np.float32)
    z = (k - (1 - rate)) / (rate * (1 - rate)) ** 0.5
    assert np.linalg.norm(z, 2) / (2 * 1024**0.5) < 1.03
    for gram in (z @ z.T, z.T @ z):
        off_diagonal = gram[np.triu_indices(1024, 1)] / 1024**0.5
        np.testing.assert_allclose(off_diagonal.var(), 1, atol=0.02)
        assert abs(off_diagonal).max() < 7
    # Parity over two rows and two columns, which a sum of a row's and a column's bits would show.
    signs = np.where(k > 0, 1.0, -1.0) - (1 - 2 * rate)
    rng = np.random.default_rng(0)
    (i, other_i), (j, other_j) = rng.integers(0, 1024, (2, 2, 10**6))
    products = signs[i, j] * signs[other_i, j] * signs[i, other_j] * signs[other_i, other_j]
    products = products[(i != other_i) & (j != other_j)]
    assert abs(products.mean()) < 5 * products.std() / products.size**0.5


def test_values_are_uniform_and_bytes_of_a_word_independent():
    key = jnp.asarray([11, 12], jnp.uint32)
    rows = dropout_words.rows_of_queries(key, 0, 3, 16 * jnp.arange(2048))[:, None]
    columns = dropout_words.columns_of_keys(key, 16 * jnp.arange(1024))
    values = np.asarray(four_values(rows, columns)).ravel()
    values = [values >> (8 * byte) & 0xFF for byte in range(4)]
    for counts in (
        *(np.bincount(x, minlength=2**7) for x in values),
        *(np.bincount(x * 2**7 + y, minlength=2**14) for x, y in itertools.combinations(values, 2)),
        # All four, of each the upper 4 bits.
        np.bincount(functools.reduce(lambda x, y: x << 4 | y >> 3, values, 0), minlength=2**16),
    ):
        assert counts.size in (2**7, 2**14, 2**16)
        expected = values[0].size / counts.size
        chi_squared = ((counts - expected) ** 2 / expected).sum()
        assert abs(chi_squared - counts.size) < 5 * (2 * counts.size) ** 0.5


@pytest.mark.parametrize("rate", [0.001, 0.1, 0.5, 0.9])
def test_rates_of_rows_are_next_to_the_rate(rate):
    """And on average the rate itself, for the keys of either half of 16."""
    steps = dropout_words.steps_of(rate)
    words = dropout_words.query_words(jnp.asarray([5, 6], jnp.uint32), 0, 0, 2**16, steps)
    limits = np.asarray(words).reshape(-1, 2, 8)[:, 1].ravel()
    halves = np.stack([limits >> 8 & 0xFF, limits >> 24])
    np.testing.assert_array_equal(limits & 0x00FF00FF, 0)
    of_rows = halves.sum(0)
    assert of_rows.min() >= steps // 2**7
    assert of_rows.max() <= -(-steps // 2**7)
    assert abs(halves[0].astype(int) - halves[1]).max() <= 1
    deviation = 0.5 / halves.shape[1] ** 0.5
    np.testing.assert_allclose(halves.mean(1), steps / 2**8, atol=5 * deviation)


def test_every_bit_of_the_key_matters():
    base = keep(rate=0.5, b=1, n=1)
    for bit in range(32):
        assert correlation(base, keep((1 ^ (1 << bit), 2), 0.5, 1, 1)) < 5
        assert correlation(base, keep((1, 2 ^ (1 << bit)), 0.5, 1, 1)) < 5
    assert correlation(base, keep((2, 1), 0.5, 1, 1)) < 5


def test_far_positions_are_as_random():
    cols = jnp.arange(2**20, 2**20 + 4096)
    rows = jnp.arange(2**24, 2**24 + 64)[:, None]
    key = jnp.asarray([5, 6], jnp.uint32)
    far = np.asarray(dropout_keep(key, 0.5, 1000, 127, rows, cols))
    assert abs(far.mean() - 0.5) < 5 * 0.5 / far.size**0.5
    assert correlation(far[1:], far[:-1]) < 5
    assert correlation(far[:, 1:], far[:, :-1]) < 5
