"""The plain JAX implementation against the float64 oracle, in every mode of differentiation."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash import dispatch, xla
from jax_flash.call import Call
from jax_flash.masks import Visibility, dropout_keep
from tests import oracle

DROPOUT_KEY = (17, 42)
VISIBILITY_NAMES = (
    "is_causal",
    "query_seq_lengths",
    "key_value_seq_lengths",
    "query_segment_ids",
    "key_value_segment_ids",
    "query_offset",
    "mask",
)


# Most of this file's time is compilation, and its arrays are tiny.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def run(query, key, value, bias=None, sinks=None, *, scale=None, local_window_size=None, **options):
    """The call in plain JAX, with the keywords of the oracle."""
    visible = {name: options.pop(name) for name in VISIBILITY_NAMES if name in options}
    visible = {
        name: jnp.asarray(x) if isinstance(x, list | np.ndarray) else x
        for name, x in visible.items()
    }
    options.pop("dropout_keep", None)
    if options.get("dropout_rate"):
        options["dropout_key"] = jnp.asarray(DROPOUT_KEY, jnp.uint32)
    call = Call(
        query,
        key,
        value,
        Visibility(window=local_window_size, **visible),
        query.shape[-1] ** -0.5 if scale is None else scale,
        bias=bias,
        sinks=sinks,
        **options,
    )
    assert xla.unsupported(call) is None
    return dispatch.attention(call, "xla")


def normal(rng, *shape, dtype=jnp.float32):
    return jnp.asarray(rng.standard_normal(shape), dtype)


def inputs(rng, B=2, T=21, S=18, N=4, K=2, H=8, h=12, dtype=jnp.float32):
    """query, key, value."""
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, h)
    return tuple(normal(rng, *shape, dtype=dtype) for shape in shapes)


def keep_mask(rate, B, N, T, S):
    positions = np.ix_(range(B), range(N), range(T), range(S))
    return np.asarray(dropout_keep(jnp.asarray(DROPOUT_KEY, jnp.uint32), rate, *positions))


def with_gradients(**options):
    """A function of (query, key, value, bias, sinks), dout and dlse: (out, lse) and gradients."""

    @jit
    def forward_and_back(arrays, dout, dlse):
        primals, pull = jax.vjp(functools.partial(run, **options), *arrays)
        return primals, pull((dout, dlse))

    return forward_and_back


def check(rng, arrays, bias=None, sinks=None, **options):
    """out, LSE and all gradients against the oracle, in float32."""
    query, _, value = arrays
    dout = normal(rng, *query.shape[:3], value.shape[-1])
    dlse = normal(rng, *query.shape[:3])
    if options.get("dropout_rate"):
        B, T, N, _ = query.shape
        options["dropout_keep"] = keep_mask(options["dropout_rate"], B, N, T, value.shape[1])
    (out, lse), got = with_gradients(**options)((*arrays, bias, sinks), dout, dlse)
    mask = options.pop("mask", None)
    expected = oracle.attention(*arrays, bias, mask, sinks=sinks, **options)
    want = oracle.gradients(*arrays, bias, mask, dout=dout, dlse=dlse, sinks=sinks, **options)

    chex.assert_type([out, lse], [query.dtype, jnp.float32])
    np.testing.assert_allclose(out, expected[0], atol=1e-5)
    np.testing.assert_allclose(lse, expected[1], atol=1e-5)
    for name, x, dx, reference in zip(want._fields, (*arrays, bias, sinks), got, want, strict=True):
        if x is None:
            continue
        chex.assert_equal_shape_suffix([dx, x], x.ndim)
        assert dx.dtype == x.dtype, name
        atol = 3e-5 * max(1, abs(reference).max(initial=0))
        np.testing.assert_allclose(dx, reference, atol=atol, err_msg=name)


@pytest.fixture(params=["whole", "chunked"])
def chunking(request, monkeypatch):
    """Both with one chunk of rows and with several, the last one overlapping."""
    if request.param == "chunked":
        small_chunks(monkeypatch)


def small_chunks(monkeypatch, rows=4):
    monkeypatch.setattr(xla, "LOGITS_BYTES", 0)
    monkeypatch.setattr(xla, "MIN_ROWS", rows)


def ids(rng, B, length, count=3):
    return rng.integers(0, count, (B, length)).tolist()


# Shapes are B=2, T=21, S=18, N=4, K=2 unless the case says otherwise.
OPTIONS = {
    "plain": {},
    "scale": {"scale": 0.3},
    "causal": {"is_causal": True},
    "causal_offset": {"is_causal": True, "query_offset": -3},
    "causal_offset_beyond": {"is_causal": True, "query_offset": 7},
    "causal_offset_array": {"is_causal": True, "query_offset": [5, -19]},
    "window": {"local_window_size": (3, 2)},
    "window_left": {"local_window_size": (4, 0)},
    "window_right": {"local_window_size": (0, 3)},
    "window_causal": {"local_window_size": (2, 9), "is_causal": True},
    "window_offset": {"local_window_size": (2, 2), "query_offset": -4},
    "window_offset_beyond": {"local_window_size": (3, 2), "query_offset": 11},
    "window_offset_array": {"local_window_size": (2, 1), "query_offset": [-3, 6]},
    "window_endless": {"local_window_size": (2**40, 1)},
    "lengths": {"query_seq_lengths": [21, 9], "key_value_seq_lengths": [7, 18]},
    "lengths_zero": {"query_seq_lengths": [0, 21], "key_value_seq_lengths": [18, 0]},
    "segments": {
        "query_segment_ids": ids(np.random.default_rng(1), 2, 21),
        "key_value_segment_ids": ids(np.random.default_rng(2), 2, 18, 2),
    },
    "soft_cap": {"logits_soft_cap": 1.5},
    "dropout": {"dropout_rate": 0.4},
    "nothing_visible": {"mask": np.zeros((1, 1, 1, 1), bool)},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_option_alone(name, monkeypatch):
    small_chunks(monkeypatch)
    rng = np.random.default_rng(0)
    check(rng, inputs(rng), **OPTIONS[name])


@pytest.mark.parametrize(
    "N, K, T, S",
    [(1, 1, 1, 1), (6, 2, 1, 30), (4, 1, 30, 1), (3, 3, 17, 16), (6, 2, 16, 17), (4, 1, 13, 33)],
)
def test_heads_and_lengths(N, K, T, S, monkeypatch):
    small_chunks(monkeypatch)
    rng = np.random.default_rng(0)
    check(rng, inputs(rng, T=T, S=S, N=N, K=K, H=5, h=3), is_causal=True, query_offset=S - T)


@pytest.mark.usefixtures("chunking")
def test_sinks_with_rows_that_see_nothing():
    rng = np.random.default_rng(0)
    sinks = jnp.asarray([-1.0, 0.0, 3.0, 200.0])  # exp(200) is infinite in float32
    check(rng, inputs(rng), sinks=sinks, is_causal=True, query_offset=-3)


BROADCAST_SHAPES = [(1, 1, 1, 1), (1, 1, 1, 18), (2, 1, 21, 1), (1, 4, 1, 18), (2, 4, 21, 18)]


@pytest.mark.parametrize("shape", BROADCAST_SHAPES)
def test_bias_of_any_broadcast_shape(shape, monkeypatch):
    small_chunks(monkeypatch)
    rng = np.random.default_rng(0)
    window = (3, 4) if shape[0] == 2 else None
    check(rng, inputs(rng), bias=normal(rng, *shape), local_window_size=window)


@pytest.mark.parametrize("shape", BROADCAST_SHAPES)
def test_mask_of_any_broadcast_shape(shape, monkeypatch):
    small_chunks(monkeypatch)
    rng = np.random.default_rng(0)
    check(rng, inputs(rng), mask=rng.random(shape) < 0.5, local_window_size=(3, 4))


@pytest.mark.usefixtures("chunking")
def test_minus_infinite_bias_masks():
    rng = np.random.default_rng(0)
    bias = np.where(rng.random((1, 4, 21, 18)) < 0.4, -np.inf, 0.5)
    bias[:, :, 3] = -np.inf  # a row of which nothing is left is a row that sees nothing
    check(rng, inputs(rng), bias=jnp.asarray(bias, jnp.float32))


def random_case(rng):
    """Shapes and a random subset of all options."""
    B, T, S = rng.integers(1, 4), rng.integers(1, 40), rng.integers(1, 40)
    K, group = rng.integers(1, 4), rng.integers(1, 4)
    N = K * group
    H, h = rng.integers(1, 17, 2)

    def maybe(make, chance=0.3):
        return make() if rng.random() < chance else None

    def broadcast_shape():
        return [n if rng.random() < 0.6 else 1 for n in (B, N, T, S)]

    options = {
        "scale": maybe(lambda: float(rng.uniform(0.1, 1))),
        "is_causal": bool(rng.random() < 0.5),
        "local_window_size": maybe(lambda: tuple(rng.integers(0, 20, 2).tolist())),
        "query_offset": maybe(lambda: rng.integers(-8, 30, B).tolist())
        or int(rng.integers(-5, 20)),
        "query_seq_lengths": maybe(lambda: rng.integers(0, T + 3, B).tolist()),
        "key_value_seq_lengths": maybe(lambda: rng.integers(0, S + 3, B).tolist()),
        "mask": maybe(lambda: rng.random(broadcast_shape()) < 0.7),
        "logits_soft_cap": maybe(lambda: float(rng.uniform(0.5, 5))),
        "dropout_rate": maybe(lambda: 0.3) or 0.0,
        "bias": maybe(lambda: normal(rng, *broadcast_shape())),
        "sinks": maybe(lambda: normal(rng, N)),
    }
    if rng.random() < 0.3:
        options["query_segment_ids"] = np.sort(rng.integers(0, 3, (B, T))).tolist()
        options["key_value_segment_ids"] = rng.integers(0, 3, (B, S)).tolist()
    shapes = {"B": B, "T": T, "S": S, "N": N, "K": K, "H": H, "h": h}
    return shapes, options


@pytest.mark.fast_cases(*map(str, range(4)))
@pytest.mark.long_cases(*map(str, range(4, 8)))
@pytest.mark.parametrize("seed", range(24))
def test_random_combination(seed, monkeypatch):
    rng = np.random.default_rng(seed)
    shapes, options = random_case(rng)
    if seed % 3:
        small_chunks(monkeypatch, rows=int(rng.integers(1, 12)))
    check(rng, inputs(rng, **shapes), **options)


@chex.variants(with_jit=True, without_jit=True)
class VariantsTest(chex.TestCase):
    def test_with_and_without_jit(self):
        rng = np.random.default_rng(0)
        arrays = inputs(rng, S=40)
        attend = self.variant(functools.partial(run, local_window_size=(9, 0), logits_soft_cap=2.0))
        want = oracle.attention(*arrays, local_window_size=(9, 0), logits_soft_cap=2.0)
        chex.assert_trees_all_close(attend(*arrays), want, atol=1e-5)

    def test_scale_may_be_traced(self):
        rng = np.random.default_rng(0)
        arrays = inputs(rng)
        attend = self.variant(lambda scale, *arrays: run(*arrays, scale=scale))
        want = oracle.attention(*arrays, scale=0.7)
        chex.assert_trees_all_close(attend(jnp.float32(0.7), *arrays), want, atol=1e-5)


def test_gradient_of_scale():
    rng = np.random.default_rng(0)
    arrays = inputs(rng)
    loss = jit(
        jax.value_and_grad(
            lambda scale, q: (run(q, *arrays[1:], scale=scale)[0] ** 2).sum(), (0, 1)
        )
    )
    # The product scale * query is all that matters: scale d/dscale = query . d/dquery.
    _, (dscale, dquery) = loss(0.7, arrays[0])
    np.testing.assert_allclose(0.7 * dscale, (arrays[0] * dquery).sum(), rtol=1e-4)


@pytest.mark.usefixtures("chunking")
def test_vmap():
    rng = np.random.default_rng(0)
    query, key, value = (normal(rng, 3, *x.shape) for x in inputs(rng))
    bias = normal(rng, 3, 1, 4, 1, 18)
    attend = functools.partial(run, is_causal=True)
    out, lse = jit(jax.vmap(attend, (2, 0, 0, 0), (1, 0)))(
        jnp.moveaxis(query, 0, 2), key, value, bias
    )
    for n in range(3):
        want = oracle.attention(query[n], key[n], value[n], bias[n], is_causal=True)
        np.testing.assert_allclose(out[:, n], want[0], atol=1e-5)
        np.testing.assert_allclose(lse[n], want[1], atol=1e-5)


# Precision.


def plain(query, key, value, is_causal):
    """The textbook expression in the input dtype, what a user would write without this library."""
    groups = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x, groups, 2) for x in (key, value))
    logits = jnp.einsum("btnh,bsnh->bnts", query, key) * query.shape[-1] ** -0.5
    if is_causal:
        logits = jnp.where(jnp.tri(*logits.shape[2:], dtype=bool), logits, -jnp.inf)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(logits.astype(query.dtype)), value)


@pytest.mark.parametrize("dtype, is_causal", [(jnp.bfloat16, True), (jnp.float16, False)])
def test_half_precision_is_as_exact_as_plain_attention(dtype, is_causal, monkeypatch):
    small_chunks(monkeypatch, rows=16)
    rng = np.random.default_rng(0)
    arrays = inputs(rng, B=1, T=256, S=256, N=4, K=2, H=64, h=64, dtype=dtype)
    dout = normal(rng, *arrays[0].shape, dtype=dtype)
    dlse = jnp.zeros(dout.shape[:3])
    (out, lse), grads = with_gradients(is_causal=is_causal)(arrays, dout, dlse)
    chex.assert_type([out, lse, *grads], [dtype, jnp.float32, dtype, dtype, dtype])
    low_precision = jax.jit(functools.partial(plain, is_causal=is_causal))
    low_out, pull = jax.vjp(low_precision, *arrays)
    want = oracle.attention(*arrays, is_causal=is_causal)
    want_grads = oracle.gradients(*arrays, dout=dout, is_causal=is_causal)
    np.testing.assert_allclose(lse, want[1], atol=1e-4)

    def error(x, reference):
        return abs(np.asarray(x, np.float64) - reference).max()

    for name, got, low, reference in [
        ("out", out, low_out, want[0]),
        *zip(want_grads._fields, grads, pull(dout), want_grads, strict=False),
    ]:
        assert error(got, reference) <= 2 * error(low, reference) + 1e-5, name


def test_many_chunks_lose_no_precision_in_half_precision_gradients(monkeypatch):
    rng = np.random.default_rng(0)
    # All queries pull every key the same way: a bfloat16 running sum would stall.
    query, key, value = inputs(rng, B=1, T=4096, S=8, N=1, K=1, H=8, h=8, dtype=jnp.bfloat16)
    small_chunks(monkeypatch, rows=4)
    bias, sinks = jnp.zeros((1, 1, 1, 8), jnp.bfloat16), jnp.zeros(1, jnp.bfloat16)
    arrays = (abs(query), key, value, bias, sinks)
    dout, dlse = jnp.ones((1, 4096, 1, 8), jnp.bfloat16), jnp.ones((1, 4096, 1))
    _, got = with_gradients()(arrays, dout, dlse)
    want = oracle.gradients(*arrays[:4], sinks=sinks, dout=dout, dlse=dlse)
    for name, dx, reference in zip(want._fields[1:], got[1:], want[1:], strict=True):
        error = abs(np.asarray(dx, np.float64) - reference).max()
        assert error <= 0.006 * abs(reference).max(), name


def test_bias_gradient_has_the_dtype_of_bias():
    rng = np.random.default_rng(0)
    arrays = inputs(rng)
    for shape in [(1, 4, 21, 18), (2, 1, 1, 18)]:
        bias = normal(rng, *shape, dtype=jnp.bfloat16)
        _, grads = with_gradients()(
            (*arrays, bias), jnp.ones((2, 21, 4, 12)), jnp.zeros((2, 21, 4))
        )
        want = oracle.gradients(*arrays, bias, dout=np.ones((2, 21, 4, 12)))
        chex.assert_shape(grads[3], shape)
        assert grads[3].dtype == jnp.bfloat16
        np.testing.assert_allclose(grads[3].astype(jnp.float32), want.bias, rtol=0.01, atol=1e-3)


def test_float32_products_are_not_rounded_to_less():
    arrays = inputs(np.random.default_rng(0))
    text = str(jax.make_jaxpr(jax.grad(lambda *x: run(*x)[0].sum()))(*arrays))
    products = text.count("dot_general[")
    assert products >= 5
    assert text.count("precision=(Precision.HIGHEST, Precision.HIGHEST)") == products or (
        text.count("precision=Precision.HIGHEST") == products
    )


# Rows that see nothing, and what is hidden.

EMPTY_ROWS = {
    "is_causal": True,
    "query_offset": -2,
    "query_seq_lengths": [21, 11],
    "key_value_seq_lengths": [18, 6],
}


def empty_rows():
    seen = oracle.visibility(2, 21, 18, **EMPTY_ROWS)[:, 0]
    empty = ~seen.any(-1)
    assert empty.sum() == 2 + 12
    return empty


@pytest.mark.parametrize("extra", [{}, {"logits_soft_cap": 2.0, "dropout_rate": 0.5}])
def test_rows_that_see_nothing_are_exactly_zero(extra, monkeypatch):
    small_chunks(monkeypatch)
    rng = np.random.default_rng(0)
    empty = empty_rows()
    bias, sinks = normal(rng, 2, 4, 21, 18), normal(rng, 4)
    arrays = (*inputs(rng), bias, sinks)
    tangents = jax.tree.map(lambda x: normal(rng, *x.shape), arrays)
    options = EMPTY_ROWS | extra

    def loss(arrays):
        out, lse = run(*arrays, **options)
        return (out**2).sum() + jnp.where(lse > -jnp.inf, lse**2, 0).sum()

    @jit
    def everything(arrays, tangents):
        primals, out_tangents = jax.jvp(lambda *arrays: run(*arrays, **options), arrays, tangents)
        second = jax.jvp(jax.grad(loss), (arrays,), (tangents,))
        return primals, out_tangents, second

    (out, lse), out_tangents, second = everything(arrays, tangents)
    assert (np.asarray(lse)[empty] == -np.inf).all() and np.isfinite(np.asarray(lse)[~empty]).all()
    for x in (out, *out_tangents):
        assert np.isfinite(np.asarray(x)).all() and not np.asarray(x)[empty].any()
    for dquery, dkey, dvalue, dbias, dsinks in second:
        chex.assert_tree_all_finite((dquery, dkey, dvalue, dbias, dsinks))
        assert not np.asarray(dquery)[empty].any()
        assert not np.asarray(dbias).transpose(0, 2, 1, 3)[empty].any()
        assert not np.asarray(dkey)[1, 6:].any() and not np.asarray(dvalue)[1, 6:].any()
        assert np.asarray(dsinks).all()


def test_sinks_get_no_gradient_from_empty_rows():
    arrays = (*inputs(np.random.default_rng(0)), None, jnp.asarray([0.0, 1.0, -2.0, 500.0]))
    mask = np.zeros((1, 1, 1, 1), bool)
    dout, dlse = jnp.ones((2, 21, 4, 12)), jnp.ones((2, 21, 4))
    (out, lse), grads = with_gradients(mask=mask)(arrays, dout, dlse)
    assert not np.asarray(out).any() and (np.asarray(lse) == -np.inf).all()
    for dx in jax.tree.leaves(grads):
        np.testing.assert_array_equal(dx, np.zeros_like(dx))


keys = np.arange(18)
HIDDEN_KEYS = {  # name: options, and which keys nobody sees, `[B, S]`
    "lengths": ({"key_value_seq_lengths": [5, 11]}, keys >= np.array([[5], [11]])),
    "causal_cache": (
        {"is_causal": True, "query_offset": [-15, -10]},
        keys > np.array([[5], [10]]),
    ),
    "window": (
        {"local_window_size": (1, 1), "query_offset": 9},
        np.tile(keys < 8, (2, 1)),
    ),
    "padding_mask": (
        {"mask": np.tile(keys % 3 > 0, (2, 1))[:, None, None]},
        np.tile(keys % 3 == 0, (2, 1)),
    ),
    "segments": (
        {
            "query_segment_ids": np.ones((2, 21), np.int32),
            "key_value_segment_ids": np.tile(np.where(keys < 9, 1, 2), (2, 1)),
        },
        np.tile(keys >= 9, (2, 1)),
    ),
}


@pytest.mark.parametrize("name", HIDDEN_KEYS)
def test_poisoned_padding_does_not_leak(name, monkeypatch):
    """What is hidden changes neither outputs nor gradients, not in a single bit."""
    small_chunks(monkeypatch)
    rng = np.random.default_rng(0)
    options, hidden_keys = HIDDEN_KEYS[name]
    attend = with_gradients(query_seq_lengths=[17, 21], logits_soft_cap=3.0, **options)
    hidden_rows = np.arange(21) >= np.array([[17], [21]])
    hidden_pairs = (hidden_rows[:, :, None] | hidden_keys[:, None])[:, None]
    query, key, value = inputs(rng)
    bias = normal(rng, 2, 1, 21, 18)
    dout, dlse = normal(rng, 2, 21, 4, 12), normal(rng, 2, 21, 4)

    def filled(poison):
        def fill(x, where):
            return jnp.where(where.reshape(where.shape + (1,) * (x.ndim - where.ndim)), poison, x)

        arrays = (
            fill(query, hidden_rows),
            fill(key, hidden_keys),
            fill(value, hidden_keys),
            fill(bias, hidden_pairs),
        )
        return attend(arrays, fill(dout, hidden_rows), fill(dlse, hidden_rows))

    clean = filled(0.0)
    assert np.isfinite(clean[0][0]).all()
    chex.assert_tree_all_finite(clean[1])
    assert not np.asarray(clean[1][0])[hidden_rows].any()
    assert not np.asarray(clean[1][1])[hidden_keys].any()
    chex.assert_trees_all_equal(filled(np.nan), clean)
    chex.assert_trees_all_equal(filled(np.inf), clean)


@pytest.mark.parametrize("zero", ["B", "T", "S"])
def test_empty_axes(zero):
    rng = np.random.default_rng(0)
    shapes = {"B": 2, "T": 3, "S": 5} | {zero: 0}
    B, T, S = shapes.values()
    arrays = (*inputs(rng, **shapes), normal(rng, 1, 4, T, S), normal(rng, 4))
    dout, dlse = jnp.ones((B, T, 4, 12)), jnp.ones((B, T, 4))
    options = {"is_causal": True, "key_value_seq_lengths": jnp.full((B,), S)}
    (out, lse), grads = with_gradients(**options)(arrays, dout, dlse)
    chex.assert_shape([out, lse], [(B, T, 4, 12), (B, T, 4)])
    np.testing.assert_array_equal(out, np.zeros((B, T, 4, 12)))
    np.testing.assert_array_equal(lse, np.full((B, T, 4), -np.inf))
    chex.assert_trees_all_equal(grads, jax.tree.map(jnp.zeros_like, arrays))


# Forward mode and second derivatives.


@pytest.mark.long
def test_first_and_second_derivatives_against_finite_differences(monkeypatch):
    small_chunks(monkeypatch)
    options = {
        "local_window_size": (3, 0),
        "query_offset": 1,
        "key_value_seq_lengths": [5, 0],
        "logits_soft_cap": 2.0,
        "dropout_rate": 0.3,
    }
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        arrays = inputs(rng, T=6, S=7, H=3, h=2, dtype=jnp.float64)
        arrays += (normal(rng, 1, 4, 1, 7, dtype=jnp.float64), normal(rng, 4, dtype=jnp.float64))
        tangents = jax.tree.map(lambda x: normal(rng, *x.shape, dtype=jnp.float64), arrays)
        weights = normal(rng, 2, 6, 4, 2, dtype=jnp.float64)

        def loss(arrays):
            return (run(*arrays, **options)[0] ** 2 * weights).sum()

        def along(function):
            return lambda x: jax.jvp(function, (x,), (tangents,))[1]

        def reverse_over_reverse(x):
            return jax.grad(lambda x: sum(map(jnp.vdot, jax.grad(loss)(x), tangents)))(x)

        def difference(function, step=1e-5):
            after = function(jax.tree.map(lambda x, t: x + step * t, arrays, tangents))
            before = function(jax.tree.map(lambda x, t: x - step * t, arrays, tangents))
            return jax.tree.map(lambda x, y: (x - y) / (2 * step), after, before)

        gradient = jit(jax.grad(loss))
        first = difference(jit(loss))
        assert first.dtype == jnp.float64
        chex.assert_trees_all_close(jit(along(loss))(arrays), first, rtol=1e-7)
        slope = sum(map(jnp.vdot, gradient(arrays), tangents))
        chex.assert_trees_all_close(slope, first, rtol=1e-7)

        second = difference(gradient)
        tolerance = {"rtol": 1e-7, "atol": 1e-7}
        chex.assert_trees_all_close(jit(along(jax.grad(loss)))(arrays), second, **tolerance)
        chex.assert_trees_all_close(jit(reverse_over_reverse)(arrays), second, **tolerance)


@pytest.mark.usefixtures("chunking")
def test_jvp_is_the_transpose_of_vjp():
    rng = np.random.default_rng(0)
    arrays = (*inputs(rng), normal(rng, 1, 1, 21, 18), normal(rng, 4))
    tangents = jax.tree.map(lambda x: normal(rng, *x.shape), arrays)
    options = {"is_causal": True, "logits_soft_cap": 3.0, "dropout_rate": 0.2}
    attend = functools.partial(run, **options)
    _, (out_dot, lse_dot) = jit(functools.partial(jax.jvp, attend))(arrays, tangents)
    dout, dlse = normal(rng, *out_dot.shape), normal(rng, *lse_dot.shape)
    _, grads = with_gradients(**options)(arrays, dout, dlse)
    forward = (out_dot * dout).sum() + (lse_dot * dlse).sum()
    reverse = sum((t * g).sum() for t, g in zip(tangents, grads, strict=True))
    np.testing.assert_allclose(forward, reverse, rtol=1e-4)


@pytest.mark.usefixtures("chunking")
def test_hessian_of_lse_is_the_covariance_of_the_keys():
    rng = np.random.default_rng(0)
    query, key, value = inputs(rng, B=1, T=21, S=9, N=1, K=1, H=4, h=4)

    def row_lse(q):
        return run(query.at[0, 7, 0].set(q), key, value, scale=0.6)[1][0, 7, 0]

    q = np.asarray(query[0, 7, 0])
    keys = np.asarray(key[0, :, 0], np.float64)
    weights = np.exp(0.6 * keys @ q)
    weights /= weights.sum()
    mean = weights @ keys
    covariance = 0.36 * ((weights[:, None] * keys).T @ keys - np.outer(mean, mean))
    for hessian in (jax.hessian(row_lse), jax.jacrev(jax.jacrev(row_lse))):
        np.testing.assert_allclose(jit(hessian)(q), covariance, atol=1e-5)


# Memory.


def temporary_bytes(function, T, S, N, K=None, H=64, bias=False):
    shapes = [(1, T, N, H), (1, S, K or N, H), (1, S, K or N, H)] + [(1, N, T, S)] * bias
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    return jax.jit(function).lower(*arrays).compile().memory_analysis().temp_size_in_bytes


def loss_of(**options):
    return lambda *arrays: run(*arrays, **options)[0].astype(jnp.float32).sum()


@pytest.mark.parametrize("options", [{"is_causal": True}, {"local_window_size": (256, 0)}])
def test_memory_is_linear_in_length(options):
    loss = loss_of(**options)
    for function in (loss, jax.grad(loss, (0, 1, 2))):
        short, long = (temporary_bytes(function, T, T, 8) for T in (8192, 32768))
        assert long < 8 * 4 * 32768**2 / 30
        assert long < 4.5 * short


def test_memory_of_jvp_and_second_derivative():
    loss = loss_of(is_causal=True)

    def jvp(*arrays):
        return jax.jvp(loss, arrays, arrays)[1]

    def second(*arrays):
        return jax.jvp(jax.grad(loss), arrays, arrays)[1]

    for function in (jvp, second):
        assert temporary_bytes(function, 16384, 16384, 8) < 8 * 4 * 16384**2 / 5


def test_bias_and_its_gradient_are_not_copied():
    T = 8192
    loss = loss_of(is_causal=True)
    bytes_used = temporary_bytes(jax.grad(loss, (0, 1, 2, 3)), T, T, 8, bias=True)
    assert bytes_used < 0.75 * (2 * 8 * T * T)


def test_keys_are_not_repeated_for_grouped_heads():
    S, N, H = 65536, 32, 64
    loss = loss_of()
    for function in (loss, jax.grad(loss, (0, 1, 2))):
        assert temporary_bytes(function, 1, S, N, K=1) < 4 * S * N * H / 4


@pytest.mark.parametrize(
    "T, S, heads", list(itertools.product((1, 100, 5000), (64, 10**5), (1, 256)))
)
@pytest.mark.parametrize("reach", [None, 7, 1000])
def test_chunks_cover_the_rows_within_the_budget(T, S, heads, reach):
    num_chunks, rows = xla._chunks(heads, T, S, reach)
    assert T <= num_chunks * rows < T + num_chunks
    cols = S if reach is None else min(S, rows + reach)
    assert rows <= xla.MIN_ROWS or 4 * heads * rows * cols <= xla.LOGITS_BYTES


def test_unsupported_dtype_is_named():
    query = jnp.zeros((1, 2, 1, 8), jnp.float8_e4m3fn)
    reason = xla.unsupported(Call(query, query, query, Visibility(), 1.0))
    assert reason is not None and "float8_e4m3fn" in reason
