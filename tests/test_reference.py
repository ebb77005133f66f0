"""The textbook algorithms against NumPy in float64, and against each other."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash import reference
from tests import oracle
from tests.support.cases import long, slow

MEMORY = 4 * 8 * 4  # with width 8: tiles of 4 rows and 4 keys


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def close(actual, expected, tolerance=1e-12):
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


def qkv(rows, keys, width=8, value_width=5, seed=0):
    rng = np.random.default_rng(seed)
    shapes = (rows, width), (keys, width), (keys, value_width)
    return tuple(rng.standard_normal(shape) * 1.5 for shape in shapes)


def one_head(keep=None, **options):
    """Options of the oracle, whose arrays have a head axis, for arrays without one."""
    return options if keep is None else options | {"dropout_keep": keep}


def expected(query, key, value, **options):
    arrays = (array[:, None] for array in (query, key, value))
    out, lse = oracle.attention(*arrays, **one_head(**options))
    return out[:, 0], lse[:, 0]


def expected_gradients(query, key, value, **options):
    cotangents = {name: options.pop(name)[:, None] for name in ("dout", "dlse") if name in options}
    arrays = (array[:, None] for array in (query, key, value))
    gradients = oracle.gradients(*arrays, **cotangents, **one_head(**options))
    return gradients.query[:, 0], gradients.key[:, 0], gradients.value[:, 0]


def pairs(mask):
    """A dense `[T, S]` mask as a function of positions."""
    mask = jnp.asarray(mask)
    return lambda rows, cols: mask[rows, cols]


def causal(rows, cols):
    return cols <= rows


def stack(trees):
    return jax.tree.map(lambda *arrays: jnp.stack(arrays), *trees)


def algorithm_2(*args, memory=MEMORY, **kwargs):
    out, l, m = reference.flash_algorithm_2(*args, memory=memory, **kwargs)
    return out, reference._lse(m, l)


ALGORITHMS = {
    "naive": reference.naive,
    "online": reference.online_attention,
    "algorithm_2": algorithm_2,
    "flash_attention_2": functools.partial(reference.flash_attention_2, block_q=5, block_kv=4),
    "decoding": functools.partial(reference.flash_decoding, splits=4),
}

# Below, at and beyond the tiles, and not their multiples.
LENGTHS = [(1, 1), slow((3, 3)), (1, 13), slow((13, 1)), (4, 8), (9, 13), (13, 7)]


@pytest.mark.long
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_full(name, lengths):
    arrays = qkv(*lengths)
    out, lse = ALGORITHMS[name](*arrays)
    expected_out, expected_lse = expected(*arrays)
    chex.assert_shape(out, (lengths[0], 5))
    close(out, expected_out)
    close(lse, expected_lse)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_no_queries_and_no_keys(name):
    out, lse = ALGORITHMS[name](*qkv(0, 5))
    chex.assert_shape([out, lse], [(0, 5), (0,)])
    out, lse = ALGORITHMS[name](*qkv(5, 0), visible=causal)
    close(out, np.zeros((5, 5)))
    close(lse, np.full(5, -np.inf))


@pytest.mark.parametrize("lengths", [(9, 13), long((13, 7))])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_causal_and_scale(name, lengths):
    arrays = qkv(*lengths)
    mask = np.tril(np.ones(lengths, bool))
    out, lse = ALGORITHMS[name](*arrays, scale=0.7, visible=causal)
    expected_out, expected_lse = expected(*arrays, scale=0.7, mask=mask)
    close(out, expected_out)
    close(lse, expected_lse)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_rows_that_see_nothing(name):
    arrays = qkv(9, 13)
    mask = np.random.default_rng(1).random((9, 13)) < 0.4
    mask[[0, 5, 8]] = False
    mask[:, :4] = False  # whole tiles and a whole part are masked before anything is seen
    mask[3, 2] = True  # and one row sees only its first tile
    mask[3, 3:] = False
    out, lse = ALGORITHMS[name](*arrays, visible=pairs(mask))
    expected_out, expected_lse = expected(*arrays, mask=mask)
    close(out, expected_out)
    close(lse, expected_lse)
    for row in (0, 5, 8):
        assert np.all(np.asarray(out[row]) == 0)
        assert lse[row] == -np.inf


@pytest.mark.parametrize("name", ALGORITHMS)
def test_logits_beyond_the_range_of_exp(name):
    query, key, value = qkv(9, 20)
    out, lse = ALGORITHMS[name](query * 1e3, key, value)
    expected_out, expected_lse = expected(query * 1e3, key, value)
    assert expected_lse.max() > 1000
    close(out, expected_out)
    close(lse, expected_lse)


@pytest.mark.long
@pytest.mark.parametrize("name", ALGORITHMS)
def test_float32_and_bfloat16_compute_in_float32(name):
    arrays = qkv(9, 13)
    for dtype, tolerance in ((jnp.float32, 3e-6), (jnp.bfloat16, 3e-6)):
        low = [jnp.asarray(array, dtype) for array in arrays]
        out, lse = ALGORITHMS[name](*low, visible=causal)
        assert out.dtype == lse.dtype == jnp.float32
        exact = [np.asarray(array, np.float64) for array in low]
        expected_out, expected_lse = expected(*exact, mask=np.tril(np.ones((9, 13), bool)))
        close(out, expected_out, tolerance)
        close(lse, expected_lse, tolerance)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_jit_and_vmap(name):
    heads = [qkv(9, 11, seed=seed) for seed in range(3)]
    batch = stack(heads)
    out, lse = jax.jit(jax.vmap(functools.partial(ALGORITHMS[name], visible=causal)))(*batch)
    for b, arrays in enumerate(heads):
        expected_out, expected_lse = expected(*arrays, mask=np.tril(np.ones((9, 11), bool)))
        close(out[b], expected_out)
        close(lse[b], expected_lse)


@pytest.mark.parametrize("name", ["naive", "algorithm_2"])
def test_dropout_keeps_what_it_is_told_to(name):
    arrays = qkv(9, 13)
    keep = np.asarray(jax.random.bernoulli(jax.random.key(3), 0.7, (9, 13)))
    assert 0.5 < keep.mean() < 0.9
    mask = np.tril(np.ones((9, 13), bool))
    out, lse = ALGORITHMS[name](*arrays, visible=causal, keep=pairs(keep), dropout_rate=0.3)
    expected_out, expected_lse = expected(*arrays, mask=mask, keep=keep, dropout_rate=0.3)
    close(out, expected_out)
    close(lse, expected_lse)
    close(lse, expected(*arrays, mask=mask)[1])  # dropout leaves the statistics alone


def test_dropout_is_unbiased():
    arrays = qkv(3, 6)
    keeps = jax.random.bernoulli(jax.random.key(0), 0.6, (20000, 3, 6))

    def one(keep):
        return reference.naive(*arrays, keep=pairs(keep), dropout_rate=0.4)[0]

    outs = jax.jit(jax.vmap(one))(keeps)
    error = np.mean(outs, axis=0) - expected(*arrays)[0]
    spread = np.std(outs, axis=0) / np.sqrt(len(keeps))
    assert np.max(np.abs(error) / spread) < 5
    assert np.max(spread) < 0.02


@pytest.mark.long
@pytest.mark.parametrize("memory", [4 * 8 * 3, MEMORY, MEMORY + 1, 10**6])
@pytest.mark.parametrize("lengths", [(9, 13), (13, 7)])
def test_algorithm_1_and_2_for_every_memory(memory, lengths):
    arrays = qkv(*lengths)
    out = reference.flash_algorithm_1(*arrays, memory=memory)
    close(out, expected(*arrays, scale=1.0)[0])
    full, l, m = reference.flash_algorithm_2(*arrays, memory=memory, scale=1.0)
    close(out, full)
    logits = arrays[0] @ arrays[1].T
    np.testing.assert_allclose(m, logits.max(axis=1), rtol=1e-14)
    close(l, np.exp(logits - logits.max(axis=1, keepdims=True)).sum(axis=1))


def test_flash_block_sizes_are_those_of_the_paper():
    assert reference.flash_block_sizes(memory=4 * 64 * 100, width=64) == (64, 100)
    assert reference.flash_block_sizes(memory=4 * 64 * 10 + 1, width=64) == (11, 11)
    assert reference.flash_block_sizes(memory=1, width=64) == (1, 1)
    for memory in (1000, 24576, 49152):
        for width in (16, 64, 128):
            block_q, block_kv = reference.flash_block_sizes(memory, width)
            assert 4 * width * (block_kv - 1) < memory <= 4 * width * block_kv
            assert block_q * block_kv <= width * block_kv  # the logits fit where K or V does


@pytest.mark.long
@pytest.mark.parametrize("memory", [MEMORY, MEMORY + 1, 10**6])
def test_algorithm_4_is_the_gradient_of_algorithm_2(memory):
    arrays = qkv(9, 13)
    mask = np.random.default_rng(1).random((9, 13)) < 0.4
    mask[5] = False
    keep = np.random.default_rng(2).random((9, 13)) < 0.8
    dout = np.random.default_rng(3).standard_normal((9, 5))

    options = {"scale": 0.4, "visible": pairs(mask), "keep": pairs(keep), "dropout_rate": 0.2}
    out, l, m = reference.flash_algorithm_2(*arrays, memory=memory, **options)
    gradients = reference.flash_algorithm_4(*arrays, out, dout, l, m, memory=memory, **options)
    exact = expected_gradients(
        *arrays, scale=0.4, mask=mask, keep=keep, dropout_rate=0.2, dout=dout
    )
    for gradient, exact_gradient in zip(gradients, exact, strict=True):
        close(gradient, exact_gradient)
    assert np.all(np.asarray(gradients[0][5]) == 0)


def test_derivative_of_naive():
    arrays = qkv(9, 13)
    mask = np.tril(np.ones((9, 13), bool), -1)  # the first row sees nothing
    rng = np.random.default_rng(4)
    dout, dlse = rng.standard_normal((9, 5)), rng.standard_normal(9)

    _, pullback = jax.vjp(functools.partial(reference.naive, visible=pairs(mask)), *arrays)
    exact = expected_gradients(*arrays, mask=mask, dout=dout, dlse=dlse)
    for gradient, exact_gradient in zip(pullback((dout, dlse)), exact, strict=True):
        close(gradient, exact_gradient)


@pytest.mark.parametrize("length", [1, 2, 37])
def test_online_softmax(length):
    logits = np.random.default_rng(0).standard_normal(length) * 5
    weights = np.exp(logits)
    close(reference.online_softmax(logits), weights / weights.sum())


def test_online_softmax_of_growing_huge_and_missing_logits():
    logits = np.array([-np.inf, -900.0, -np.inf, 0.0, 900.0, 900.0, -np.inf])
    close(reference.online_softmax(logits), [0, 0, 0, 0, 0.5, 0.5, 0])
    close(reference.online_softmax(np.full(4, -np.inf)), np.zeros(4))
    chex.assert_shape(reference.online_softmax(np.zeros(0)), (0,))


@pytest.mark.long
@pytest.mark.parametrize("splits", [1, 2, 3, 8, 13, 20])
def test_decoding_for_every_split(splits):
    arrays = qkv(2, 13)
    out, lse = reference.flash_decoding(*arrays, splits=splits)
    expected_out, expected_lse = expected(*arrays)
    close(out, expected_out)
    close(lse, expected_lse)


def test_combine_in_any_order_and_grouping():
    query, key, value = qkv(4, 30)
    cuts = [slice(0, 3), slice(3, 17), slice(17, 17), slice(17, 30)]
    outs, lses = stack([reference.naive(query, key[cut], value[cut]) for cut in cuts])
    expected_out, expected_lse = expected(query, key, value)
    order = np.array([2, 3, 0, 1])
    halves = [reference.combine(outs[half], lses[half]) for half in (slice(0, 2), slice(2, 4))]
    grouped = reference.combine(*stack(halves))
    for out, lse in (
        reference.combine(outs, lses),
        reference.combine(outs[order], lses[order]),
        grouped,
    ):
        close(out, expected_out)
        close(lse, expected_lse)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_shifting_all_logits_changes_only_the_lse(name):
    query, key, value = qkv(9, 13)
    out, lse = ALGORITHMS[name](query, key, value)
    shift = query @ np.ones(8) / np.sqrt(8)
    moved_out, moved_lse = ALGORITHMS[name](query, key + 1, value)
    close(moved_out, out, 1e-11)
    close(moved_lse, lse + shift, 1e-11)
