"""The softmax of the kernels, tile by tile, on plain arrays of 64 rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import online_softmax
from pallas_kernels.online_softmax import (
    LOG2E,
    Range,
    advance,
    cleared,
    close,
    finish,
    go_on,
    start,
    unsettled,
)

DTYPES = [jnp.bfloat16, jnp.float16]


def tiles(*scales: float) -> list[jax.Array]:
    """A `(64, 32)` tile of random logits for each scale."""
    keys = jax.random.split(jax.random.key(0), len(scales))
    return [s * jax.random.normal(k, (64, 32)) for k, s in zip(keys, scales, strict=True)]


def run(logits, dtype, exact: bool):
    """Weights over the end's reference, LSE, and whether a reference was too low."""
    allowed = online_softmax.weight_range(dtype)
    weights, state = start(logits[0], LOG2E, allowed, bounded=exact)
    all_weights = weights
    for tile in logits[1:]:
        if exact:
            weights, correction, state = advance(tile, LOG2E, allowed, state, bounded=True)
            all_weights *= correction[:, None]
        else:
            weights, state = go_on(tile, LOG2E, state)
        all_weights = jnp.concatenate([all_weights, weights], axis=1)
    (inverse, lse, _), too_low = finish(state, allowed.limit)
    return all_weights * inverse[:, None], lse, too_low


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("exact", [False, True])
def test_weights_are_those_of_softmax(dtype, exact):
    logits = tiles(1.0, 3.0, 2.0)
    weights, lse, too_low = run(logits, dtype, exact)
    whole = np.concatenate(logits, axis=1).astype(np.float64)
    expected = np.exp(whole - whole.max(1, keepdims=True))
    expected /= expected.sum(1, keepdims=True)
    np.testing.assert_allclose(weights, expected, rtol=1e-5, atol=1e-8)
    np.testing.assert_allclose(lse, np.log(np.exp(whole).sum(1)), rtol=1e-6)
    assert not too_low.any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_the_same_to_the_bit_unless_they_need_a_new_reference(dtype):
    first, second, third = tiles(1.0, 3.0, 3.0)
    logits = [first, second.at[::2].multiply(40.0), third]  # every other row jumps
    trusting, searching = run(logits, dtype, exact=False), run(logits, dtype, exact=True)
    np.testing.assert_array_equal(trusting[2], np.arange(64) % 2 == 0)
    for lazy, exact in zip(trusting, searching, strict=True):
        np.testing.assert_array_equal(lazy[1::2], exact[1::2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_settle_that_saw_a_key_of_no_small_logit(dtype):
    allowed = online_softmax.weight_range(dtype)
    room = (allowed.limit + allowed.headroom) / LOG2E
    maxima = jnp.array([-jnp.inf, -1e30, -1e9, -1e4, -room, -0.51 * room, -0.49 * room, 0, room])
    logits = jnp.full((64, 32), -jnp.inf).at[: maxima.size, 3].set(maxima)
    _, state = start(logits, LOG2E, allowed)
    np.testing.assert_array_equal(
        unsettled(state, allowed)[: maxima.size], np.arange(maxima.size) < 6
    )
    # The others may then see a logit as far above 0.
    later = jnp.full((64, 32), -jnp.inf).at[:, 3].set(0.48 * room)
    _, state = go_on(later, LOG2E, state)
    _, too_low = finish(state, allowed.limit)
    np.testing.assert_array_equal(too_low[: maxima.size], np.arange(maxima.size) < 5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("jump", [30.0, 300.0, 1e4, 1e30])
def test_maxima_that_jump(dtype, jump):
    """However far: the earlier tile then has no weight that float32 can tell from none."""
    first, second = tiles(1.0, 1.0)
    jumping = [first, jump * jnp.abs(second) + jump]
    _, _, too_low = run(jumping, dtype, exact=False)
    assert too_low.all()
    weights, lse, too_low = run(jumping, dtype, exact=True)
    assert not too_low.any()
    alone = np.asarray(jumping[1], np.float64)
    expected = np.exp(alone - alone.max(1, keepdims=True))
    expected /= expected.sum(1, keepdims=True)
    # Logits of this size are rounded to 2^-24 of themselves.
    np.testing.assert_allclose(weights[:, 32:], expected, atol=min(1.0, 1e-6 * jump + 1e-5))
    np.testing.assert_allclose(weights[:, :32], 0.0, atol=1e-8)
    np.testing.assert_allclose(lse, alone.max(1) - np.log(expected.max(1)), rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("top", [3e7, 1.41796e11, 1e30, 2e38, -3e7, -1e10, -1e30, -2e38])
def test_rows_far_from_0(dtype, top):
    """Their reference is rounded by more than weights have room for."""
    rng = np.random.default_rng(int(abs(np.log(abs(top)))))
    tops = np.float32(top) * rng.uniform(0.5, 1.0, 64).astype(np.float32)
    count = rng.integers(1, 97, 64)
    logits = np.full((64, 96), -np.inf, np.float32)
    for row, (largest, n) in enumerate(zip(tops, count, strict=True)):
        logits[row] = largest - abs(largest) * rng.uniform(0.1, 0.5, 96)  # of no weight
        logits[row, rng.choice(96, n, replace=False)] = largest
    expected = (logits == tops[:, None]) / count[:, None]
    logits = [jnp.asarray(part) for part in np.split(logits, 3, axis=1)]
    weights, lse, too_low = run(logits, dtype, exact=True)
    assert not too_low.any()
    np.testing.assert_allclose(weights, expected, rtol=1e-5)
    np.testing.assert_allclose(lse, tops, rtol=1e-6)
    *_, too_low = run(logits, dtype, exact=False)
    allowed = online_softmax.weight_range(dtype)
    assert too_low[np.abs(tops) * LOG2E >= allowed.far + 200.0].all()


@pytest.mark.long
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sink", [-np.inf, -1e30, -3.0, 2.0, 1e30, np.inf])
def test_sinks(dtype, sink):
    """With rows that see nothing, which a sink does not change."""
    (logits,) = tiles(1.0)
    logits = logits.at[::2].set(-jnp.inf)
    allowed = online_softmax.weight_range(dtype)
    weights, state = start(logits, LOG2E, allowed)
    (inverse, lse, log_sum), _ = finish(state, allowed.limit, jnp.full((64,), sink * LOG2E))
    expected = np.logaddexp(jax.nn.logsumexp(logits, axis=1), max(sink, -1e38))
    np.testing.assert_allclose(lse[1::2], expected[1::2], rtol=1e-6)
    np.testing.assert_array_equal(lse[::2], -np.inf)
    share = np.exp(np.float64(logits) - expected[:, None])
    np.testing.assert_allclose((weights * inverse[:, None])[1::2], share[1::2], rtol=1e-5)
    assert not (weights * inverse[:, None])[::2].any()
    exponents = logits * LOG2E - state.reference[:, None] - log_sum[:, None]
    np.testing.assert_allclose(jnp.exp2(exponents)[1::2], share[1::2], rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_maxima_that_creep_up_to_the_limit(dtype):
    """Many tiles, each a little above the last, with weights near the largest that may be."""
    allowed = online_softmax.weight_range(dtype)
    top = (allowed.headroom + allowed.limit - 6.0) / LOG2E
    logits = [jnp.full((64, 32), height) for height in np.linspace(0.0, top, 9)]
    weights, lse, too_low = run(logits, dtype, exact=False)
    assert not too_low.any()
    assert np.isfinite(weights.astype(dtype).astype(jnp.float32)).all()
    expected = jax.nn.logsumexp(jnp.concatenate(logits, axis=1), axis=1)
    np.testing.assert_allclose(lse, expected, rtol=1e-6)


@pytest.mark.parametrize("limit", [0.0, 3.0, 40.0])
def test_results_do_not_depend_on_when_the_reference_is_raised(limit):
    """Not even in how weights round to bfloat16, with maxima that grow from tile to tile."""
    logits = [tile + 2.3 * i for i, tile in enumerate(tiles(*[1.0] * 6))]

    def rounded_weights(allowed):
        weights, state = start(logits[0], LOG2E, allowed)
        total = weights.astype(jnp.bfloat16).astype(jnp.float32)
        raised = []
        for tile in logits[1:]:
            weights, correction, new = advance(tile, LOG2E, allowed, state)
            raised.append((new.reference > state.reference).mean())
            state = new
            total *= correction[:, None]
            weights = weights.astype(jnp.bfloat16).astype(jnp.float32)
            total = jnp.concatenate([total, weights], axis=1)
        (inverse, lse, _), _ = finish(state, allowed.limit)
        return total * inverse[:, None], lse, raised

    *often, raised = rounded_weights(Range(0.0, limit))
    assert (np.mean(raised) > 0.1) == (limit < 10.0)
    *never, raised = rounded_weights(online_softmax.weight_range(jnp.bfloat16))
    assert not np.any(raised)
    # Weights at the middle between two values may round either way.
    differs = np.abs(often[0] / never[0] - 1.0) > 1e-4
    assert differs.mean() < 1e-3
    np.testing.assert_allclose(often[1], never[1], rtol=1e-6)


@pytest.mark.parametrize("by_whole", [False, True])
def test_only_rows_that_ask_for_it_get_a_new_reference(by_whole):
    """By a whole number, or so that the largest weight is a power of 2."""
    first, second = tiles(1.0, 1.0)
    second += jnp.linspace(0.0, 4.0, 64)[:, None]
    allowed = Range(-4.0, 6.0, by_whole)
    _, state = start(first, LOG2E, allowed)
    weights, kept = go_on(second, LOG2E, state)
    np.testing.assert_allclose((kept.sums - state.sums).sum(1), weights.sum(1), rtol=1e-5)
    is_low = weights.max(axis=1) >= 2.0**allowed.limit
    assert 10 < is_low.sum() < 54
    new_weights, correction, renewed = advance(second, LOG2E, allowed, state)
    for new, old in [(new_weights, weights), (renewed.sums, kept.sums)]:
        np.testing.assert_array_equal(new[~is_low], old[~is_low])
        np.testing.assert_allclose(new[is_low], (old * correction[:, None])[is_low], rtol=1e-5)
    np.testing.assert_array_equal(correction < 1.0, is_low)
    largest = new_weights[is_low].max(axis=1)
    assert largest.max() <= 2.0**4.5
    whole, not_whole = correction[is_low], largest
    if not by_whole:
        whole, not_whole = not_whole, whole
    np.testing.assert_allclose(np.log2(whole), np.round(np.log2(whole)), atol=1e-5)
    assert np.std(np.log2(not_whole) % 1) > 0.1


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_weight_leaves_the_dtype_before_the_sum_tells(dtype):
    allowed = online_softmax.weight_range(dtype)
    largest = 2.0**allowed.limit
    assert jnp.isfinite(jnp.asarray(largest, dtype))
    assert 2.0**-allowed.headroom >= jnp.finfo(dtype).tiny


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_see_nothing_and_then_something(dtype):
    (later,) = tiles(1.0)
    nothing = jnp.full((64, 32), -jnp.inf)
    weights, lse, too_low = run([nothing, nothing, later - 200.0], dtype, exact=True)
    np.testing.assert_allclose(weights[:, 64:], jax.nn.softmax(later), rtol=1e-4, atol=1e-8)
    np.testing.assert_allclose(lse, jax.nn.logsumexp(later, axis=1) - 200.0, rtol=1e-6)
    assert not too_low.any()
    weights, lse, too_low = run([nothing, nothing], dtype, exact=True)
    assert not weights.any()
    np.testing.assert_array_equal(lse, -np.inf)
    assert not too_low.any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_is_reported(dtype):
    first, second = tiles(1.0, 1.0)
    _, _, too_low = run([first, second.at[5, 7].set(jnp.nan)], dtype, exact=False)
    np.testing.assert_array_equal(too_low, np.arange(64) == 5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("poison", [jnp.nan, jnp.inf, 1e9])
def test_rows_that_see_nothing_may_meet_anything_without_a_mask(dtype, poison):
    allowed = online_softmax.weight_range(dtype)
    first, second = tiles(1.0, 1.0)
    closed = jnp.arange(64) % 3 == 0

    def end(second):
        _, state = start(jnp.where(closed[:, None], -jnp.inf, first), LOG2E, allowed)
        state = close(state, ~closed)
        _, state = go_on(second, LOG2E, state)
        state, found = cleared(state)
        np.testing.assert_array_equal(found, closed)
        (inverse, lse, _), too_low = finish(state, allowed.limit)
        return inverse, lse, too_low

    got = end(jnp.where(closed[:, None], poison, second))
    for x, calm in zip(got, end(second), strict=True):
        np.testing.assert_array_equal(x, calm)
    inverse, lse, too_low = got
    assert not inverse[closed].any() and np.isneginf(lse[closed]).all() and not too_low.any()
