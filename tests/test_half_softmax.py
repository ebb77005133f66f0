"""The softmax of logits in float16, on plain arrays of 64 rows in interpret mode."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import half_softmax, online_softmax
from pallas_kernels.half_softmax import SUM_LIMIT, go_on, renew, start
from tests.support.interpret import interpret_mode


@pytest.fixture(autouse=True)
def _interpreting():
    with interpret_mode():
        yield


def tiles(*sizes: float) -> list[jax.Array]:
    """Random `(64, 32)` logits of these sizes, in float16."""
    keys = jax.random.split(jax.random.key(0), len(sizes))
    return [
        (size * jax.random.normal(key, (64, 32))).astype(jnp.float16)
        for key, size in zip(keys, sizes, strict=True)
    ]


def run(logits, factor):
    """Probabilities and LSE; each tile takes `renew` where a row asks for it, as in the kernel."""
    weights, state = start(logits[0], factor)
    total, renewals = weights.astype(jnp.float32), 0
    for tile in logits[1:]:
        weights, sums, new = go_on(tile, factor, state)
        if not (sums < SUM_LIMIT).all():
            weights, correction, new = renew(tile, factor, sums, state)
            total *= correction[:, None]
            renewals += 1
        total = jnp.concatenate([total, weights.astype(jnp.float32)], axis=1)
        state = new
    inverse, lse, _ = online_softmax.normalised(state.reference, state.sums.sum(axis=1))
    return total * inverse[:, None], lse, renewals


def exactly(logits, factor):
    """The same in float64."""
    exponents = np.concatenate([np.float64(x) for x in logits], axis=1)
    exponents *= np.float64(factor)[:, None] * np.log(2)
    maxima = exponents.max(axis=1, keepdims=True)
    weights = np.exp(exponents - maxima)
    total = weights.sum(axis=1, keepdims=True)
    return weights / total, (maxima + np.log(total))[:, 0]


def factors(size):
    return size * jnp.linspace(0.5, 1.5, 64)


@pytest.mark.parametrize(
    ("sizes", "factor", "renewals"),
    [((1, 1, 1), 1, 0), ((300, 300, 300), 1 / 300, 0), ((1, 9, 60), 1, 2), ((1, 2, 4), 6, 2)],
)
def test_weights_and_lse(sizes, factor, renewals):
    logits, factor = tiles(*sizes), factors(factor)
    weights, lse, found = run(logits, factor)
    exact_weights, exact_lse = exactly(logits, factor)
    assert found == renewals
    # factor, reference and exponents have 11 bits
    largest = max(1.0, np.abs(exact_lse).max())
    np.testing.assert_allclose(lse, exact_lse, rtol=2**-11, atol=2**-11)
    np.testing.assert_allclose(weights, exact_weights, rtol=2**-9 * largest, atol=2**-11)


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("factor", [1e-9, 1e-20, 3e4, 1e6, 1e12])
def test_factors_and_references_beyond_float16(factor, sign):
    """All logits far above 0, or far below; one in each row leads by more than it has bits."""
    logits = [sign * (20.0 + jnp.abs(x)) for x in tiles(1, 1, 1)]
    winner = np.arange(64) % 96
    logits = jnp.concatenate(logits, axis=1).at[np.arange(64), winner].set(sign * 20.0 + 10.0)
    logits = [x.astype(jnp.float16) for x in jnp.split(logits, 3, axis=1)]
    weights, lse, _ = run(logits, factors(factor))
    exact_weights, exact_lse = exactly(logits, factors(factor))
    np.testing.assert_allclose(weights, exact_weights, atol=2**-11)
    np.testing.assert_allclose(lse, exact_lse, rtol=2**-11, atol=2**-9)
    if factor > 1:
        np.testing.assert_array_equal(weights.argmax(axis=1), winner)


@pytest.mark.parametrize("sign", [-1, 1])
def test_references_near_the_last_that_float16_takes(sign):
    """On either side of 2^11 all tiles must have the same one."""
    logits = [(sign * 51 + x / 64).astype(jnp.float16) for x in tiles(1, 1, 1)]
    factor = jnp.linspace(39.9, 40.3, 64)
    _, state = start(logits[0], factor)
    assert 10 < (jnp.abs(state.reference) < 2048).sum() < 54
    weights, lse, _ = run(logits, factor)
    exact_weights, exact_lse = exactly(logits, factor)
    np.testing.assert_allclose(lse, exact_lse, rtol=2**-11)
    np.testing.assert_allclose(weights, exact_weights, rtol=2**-5, atol=2**-9)


def test_only_rows_that_ask_for_it_get_a_new_reference():
    """So that their largest weight is a power of 2; others are the same to float16's rounding."""
    first, second = tiles(1, 1)
    second = (second + jnp.linspace(0.0, 6.0, 64)[:, None]).astype(jnp.float16)
    _, state = start(first, factors(1.0))
    weights, sums, kept = go_on(second, factors(1.0), state)
    is_low = sums.max(axis=1) >= SUM_LIMIT
    assert 10 < is_low.sum() < 54
    new_weights, correction, renewed = renew(second, factors(1.0), sums, state)
    np.testing.assert_array_equal(correction < 1.0, is_low)
    np.testing.assert_allclose(new_weights[~is_low], weights[~is_low], rtol=2**-7)
    np.testing.assert_allclose(renewed.sums[~is_low], kept.sums[~is_low], rtol=2**-8)
    np.testing.assert_allclose(
        new_weights[is_low].max(axis=1), 2.0**half_softmax.LARGEST, rtol=0.02
    )


def test_rows_that_see_nothing_and_then_something():
    nothing = jnp.full((64, 32), -jnp.inf, jnp.float16)
    (later,) = tiles(3)
    for factor in (1.0, 1e-9):  # the second is 0 in float16
        weights, lse, renewals = run([nothing, nothing, later], factors(factor))
        exact_weights, exact_lse = exactly([later], factors(factor))
        assert renewals == 2 and not weights[:, :64].any()
        np.testing.assert_allclose(weights[:, 64:], exact_weights, rtol=2**-7, atol=2**-11)
        np.testing.assert_allclose(lse, exact_lse, rtol=2**-10, atol=2**-10)
    weights, lse, _ = run([nothing, nothing], factors(1.0))
    assert not weights.any() and (lse == -jnp.inf).all()


def test_closed_rows_stay_so():
    first, second = tiles(1, 1)
    hidden = jnp.arange(64)[:, None] % 2 == 0
    _, state = start(jnp.where(hidden, -jnp.inf, first).astype(jnp.float16), factors(1.0))
    state = online_softmax.close(state, seeing=~hidden[:, 0])
    _, sums, _ = go_on(second, factors(1.0), state)
    weights, correction, state = renew(second, factors(1.0), sums, state)
    assert not weights[::2].any() and not state.sums[::2].any() and (correction == 1.0).all()
    assert (weights[1::2].max(axis=1) > 0).all()


def test_nan_stays():
    first, second = tiles(1, 1)
    _, state = start(first, factors(1.0))
    second = second.at[3, 7].set(jnp.nan)
    _, sums, _ = go_on(second, factors(1.0), state)
    assert not (sums[3] < SUM_LIMIT).all()
    _, _, state = renew(second, factors(1.0), sums, state)
    np.testing.assert_array_equal(jnp.isnan(state.sums.sum(axis=1)), jnp.arange(64) == 3)
