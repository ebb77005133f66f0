"""attention(): its forms of input, its checks, and that it can stand in for jax.nn's."""

import functools
import inspect

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from jax_flash import api, arguments
from jax_flash.masks import Visibility
from pallas_kernels import config, defaults
from tests import oracle
from tests.support.parity import PARITY, B, H, K, N, S, T, draw, qkv, random_mask

# --- jax.nn.dot_product_attention ---------------------------------------------------------------


@pytest.mark.parametrize("options", PARITY.values(), ids=PARITY.keys())
def test_parity_with_jax_nn(options):
    query, key, value = qkv()
    dout = draw(9, (B, T, N, H))
    differentiated = [0, 1, 2, 3] if "bias" in options else [0, 1, 2]

    def run(function):
        options_left = {k: v for k, v in options.items() if k != "bias"}

        def loss(query, key, value, bias=None):
            out = function(query, key, value, bias, implementation="xla", **options_left)
            return jnp.vdot(out, dout), out

        arguments = [query, key, value]
        if "bias" in options:
            arguments.append(jnp.asarray(options["bias"]))
        return jax.grad(loss, argnums=differentiated, has_aux=True)(*arguments)

    ours, theirs = run(jax_flash.attention), run(jax.nn.dot_product_attention)
    chex.assert_trees_all_equal_shapes_and_dtypes(ours, theirs)
    # A bfloat16 bias has bfloat16 gradients: one rounding apart.
    tolerance = 1e-2 if options.get("bias", query).dtype == jnp.bfloat16 else 2e-5
    chex.assert_trees_all_close(ours, theirs, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_parity_in_low_precision(dtype):
    query, key, value = qkv(dtype)
    ours = jax_flash.attention(query, key, value, is_causal=True)
    theirs = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    assert ours.dtype == theirs.dtype == dtype
    chex.assert_trees_all_close(
        ours.astype(jnp.float32), theirs.astype(jnp.float32), atol=2e-2, rtol=2e-2
    )


def test_parity_without_a_batch():
    query, key, value = (x[0] for x in qkv())
    options = {"is_causal": True, "key_value_seq_lengths": jnp.array([4])}
    ours = jax_flash.attention(query, key, value, return_residual=True, **options)
    theirs = jax.nn.dot_product_attention(query, key, value, return_residual=True, **options)
    chex.assert_trees_all_equal_shapes_and_dtypes(ours, theirs)
    chex.assert_trees_all_close(ours, theirs, atol=2e-6)


def test_parity_of_numpy_inputs():
    query, key, value = (np.asarray(x, np.float64) for x in qkv())
    ours = jax_flash.attention(query, key, value)
    theirs = jax.nn.dot_product_attention(query, key, value)
    assert isinstance(ours, jax.Array)
    assert ours.dtype == theirs.dtype
    chex.assert_trees_all_close(ours, theirs, atol=2e-6)


def test_signature_begins_as_that_of_jax_nn():
    ours = inspect.signature(jax_flash.attention).parameters
    theirs = inspect.signature(jax.nn.dot_product_attention).parameters
    assert [(p.name, p.default) for p in ours.values()][: len(theirs)] == [
        (p.name, p.default) for p in theirs.values()
    ]
    assert [ours[name].kind for name in theirs] == [p.kind for p in theirs.values()]


def test_takes_the_place_of_jax_nn(monkeypatch):
    query, key, value = qkv()
    expected = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    monkeypatch.setattr(jax.nn, "dot_product_attention", jax_flash.attention)
    chex.assert_trees_all_close(
        jax.nn.dot_product_attention(query, key, value, is_causal=True), expected, atol=2e-6
    )


def test_differs_from_jax_nn_where_a_query_sees_no_key():
    query, key, value = qkv()
    mask = np.ones((B, 1, T, S), bool)
    mask[0, 0, 3] = False
    out, lse = jax_flash.attention(query, key, value, mask=mask, return_residual=True)
    assert not out[0, 3].any()
    assert (lse[0, 3] == -jnp.inf).all()
    theirs = jax.nn.dot_product_attention(query, key, value, mask=mask)
    means = jnp.repeat(value[0].mean(0), N // K, axis=0)
    chex.assert_trees_all_close(theirs[0, 3], means, atol=1e-6)


def test_differs_from_jax_nn_in_the_lse():
    query, key, value = qkv(jnp.bfloat16)

    def lse(function, query):
        return function(query, key, value, return_residual=True)[1]

    ours, theirs = jax_flash.attention, jax.nn.dot_product_attention
    assert lse(ours, query).dtype == jnp.float32
    assert lse(theirs, query).dtype == jnp.bfloat16
    assert jax.grad(lambda x: lse(ours, x).sum())(query).any()
    assert not jax.grad(lambda x: lse(theirs, x).sum())(query).any()
    chex.assert_trees_all_close(
        lse(ours, query), lse(theirs, query).astype(jnp.float32), rtol=1e-2, atol=1e-2
    )


# --- beyond jax.nn ------------------------------------------------------------------------------

BEYOND = {
    "offset": {"query_offset": S - T, "is_causal": True},
    "negative offset": {"query_offset": -2, "is_causal": True},
    "offset numpy": {"query_offset": np.int64(2), "is_causal": True},
    "offset scalar array": {"query_offset": jnp.int32(2), "is_causal": True},
    "offset per batch": {"query_offset": np.array([0, 3]), "local_window_size": (1, 1)},
    "segments": {
        "query_segment_ids": np.array([[0, 0, 1, 1, 2], [0, 1, 0, 1, 5]]),
        "key_value_segment_ids": np.array([[0, 0, 1, 1, 2, 2, 2], [1, 0, 1, 0, 1, 0, 1]]),
    },
    "soft cap": {"logits_soft_cap": 2, "bias": draw(3, (N, T, S))},
    "sinks": {"sinks": draw(4, (N,))},
    "sinks bfloat16 numpy": {"sinks": np.asarray(draw(4, (N,), jnp.bfloat16))},
    "all": {
        "query_offset": 2,
        "is_causal": True,
        "local_window_size": (3, 4),
        "query_segment_ids": np.zeros((B, T), np.int8),
        "key_value_segment_ids": np.array([[0] * S, [0, 0, 1, 0, 1, 0, 0]], np.uint16),
        "logits_soft_cap": 1.5,
        "sinks": draw(4, (N,)),
        "key_value_seq_lengths": np.array([0, 6]),
    },
}


@pytest.mark.parametrize("options", BEYOND.values(), ids=BEYOND.keys())
def test_options_beyond_jax_nn(options):
    query, key, value = qkv()
    ours = jax_flash.attention(query, key, value, return_residual=True, **options)
    theirs = oracle.attention(query, key, value, **options)
    chex.assert_shape(ours, [(B, T, N, H), (B, T, N)])
    chex.assert_trees_all_close(ours, jax.tree.map(np.float32, theirs), atol=2e-6)


def test_value_of_another_width():
    query, key, _ = qkv()
    value = draw(2, (B, S, K, 3))
    out = jax_flash.attention(query, key, value)
    chex.assert_shape(out, (B, T, N, 3))
    chex.assert_trees_all_close(out, np.float32(oracle.attention(query, key, value)[0]), atol=2e-6)


def test_every_option_without_a_batch():
    query, key, value = (x[0] for x in qkv())
    unbatched = {
        "bias": draw(3, (N, T, S)),
        "mask": random_mask(1, T, S),
        "query_seq_lengths": 4,
        "key_value_seq_lengths": np.int32(6),
        "query_segment_ids": np.arange(T) // 3,
        "key_value_segment_ids": np.arange(S) // 3,
        "query_offset": jnp.int32(1),
        "local_window_size": 4,
        "sinks": draw(4, (N,)),
    }
    batched = unbatched | {
        "bias": unbatched["bias"][None],
        "query_seq_lengths": jnp.array([4]),
        "key_value_seq_lengths": jnp.array([6]),
        "query_segment_ids": unbatched["query_segment_ids"][None],
        "key_value_segment_ids": unbatched["key_value_segment_ids"][None],
        "query_offset": jnp.array([1]),
    }
    ours = jax_flash.attention(query, key, value, return_residual=True, **unbatched)
    chex.assert_shape(ours, [(T, N, H), (T, N)])
    expected = jax_flash.attention(
        query[None], key[None], value[None], return_residual=True, **batched
    )
    chex.assert_trees_all_equal(ours, jax.tree.map(lambda x: x[0], expected))
    # Lengths and ids may keep their batch axis of one.
    kept = unbatched | {k: batched[k] for k in ("query_seq_lengths", "query_segment_ids")}
    chex.assert_trees_all_equal(
        ours, jax_flash.attention(query, key, value, return_residual=True, **kept)
    )


@pytest.mark.parametrize(("b", "t", "s"), [(0, 5, 7), (2, 0, 7), (2, 5, 0), (2, 0, 0)])
def test_empty_axes(b, t, s):
    query, key = jnp.ones((b, t, N, H)), jnp.ones((b, s, K, H))
    out, lse = jax_flash.attention(query, key, key, is_causal=True, return_residual=True)
    chex.assert_trees_all_equal(out, jnp.zeros((b, t, N, H)))
    chex.assert_trees_all_equal(lse, jnp.full((b, t, N), -jnp.inf))


def test_float64():
    with jax.enable_x64(True):
        query, key, value = (jnp.asarray(np.asarray(x), jnp.float64) for x in qkv())
        out, lse = jax_flash.attention(
            query, key, value, query_seq_lengths=np.array([2, 5]), return_residual=True
        )
        assert (out.dtype, lse.dtype) == (jnp.float64, jnp.float32)
        expected = oracle.attention(query, key, value, query_seq_lengths=np.array([2, 5]))
        np.testing.assert_allclose(out, expected[0], rtol=1e-12, atol=1e-12)


def test_gradient_of_a_traced_scale():
    query, key, value = qkv()

    def loss(function, scale):
        return function(query, key, value, scale=scale).sum()

    ours = jax.grad(functools.partial(loss, jax_flash.attention))(0.3)
    theirs = jax.grad(functools.partial(loss, jax.nn.dot_product_attention))(0.3)
    chex.assert_trees_all_close(ours, theirs, rtol=1e-4)


# --- dropout keys -------------------------------------------------------------------------------


def dropped(key, rate=0.5):
    """Which weights are dropped: value j is the unit vector j, so outputs are the weights."""
    query, weights_seen = jnp.zeros((1, 16, 1, H)), jnp.eye(32)[None, :, None, :]
    out = jax_flash.attention(
        query, jnp.zeros((1, 32, 1, H)), weights_seen, dropout_rate=rate, dropout_key=key
    )
    return np.asarray(out[0, :, 0] == 0)


def test_dropout_takes_every_kind_of_key():
    typed = dropped(jax.random.key(1))
    assert 0.4 < typed.mean() < 0.6
    chex.assert_trees_all_equal(typed, dropped(jax.random.PRNGKey(1)))
    chex.assert_trees_all_equal(typed, dropped(np.asarray(jax.random.PRNGKey(1))))
    assert (typed != dropped(jax.random.key(2))).any()


def test_dropout_with_keys_of_four_words():
    keys = jax.random.split(jax.random.key(1, impl="rbg"), 4)
    sets = [dropped(key) for key in keys]
    assert all((a != b).any() for i, a in enumerate(sets) for b in sets[:i])
    chex.assert_trees_all_equal(sets[0], dropped(jax.random.key_data(keys[0])))
    last_word = jnp.array([1, 2, 3, 4], jnp.uint32), jnp.array([1, 2, 3, 5], jnp.uint32)
    assert (dropped(last_word[0]) != dropped(last_word[1])).any()


def test_no_dropout_at_rate_zero():
    query, key, value = qkv()
    chex.assert_trees_all_equal(
        jax_flash.attention(query, key, value),
        jax_flash.attention(query, key, value, dropout_rate=0, dropout_key=jax.random.key(0)),
    )


# --- the canonical form -------------------------------------------------------------------------


@pytest.mark.parametrize(("t", "s"), [(1, 1), (1, 4), (4, 1), (3, 4), (4, 3)])
def test_simplest_positions_mean_the_same(t, s):
    windows = [None, *((left, right) for left in range(6) for right in range(6))]
    for is_causal in (False, True):
        for window in windows:
            for offset in range(-5, 6):
                visible = []
                for args in (
                    (is_causal, window, offset),
                    arguments.simplest(is_causal, window, offset, t, s),
                ):
                    lo, hi = Visibility(*args).row_intervals(t, s)
                    keys = np.arange(s)
                    visible.append(np.broadcast_to((keys >= lo.T) & (keys < hi.T), (t, s)))
                np.testing.assert_array_equal(*visible, err_msg=f"{is_causal} {window} {offset}")


def test_simplest_positions():
    assert arguments.simplest(True, None, 0, 4, 4) == (True, None, 0)
    assert arguments.simplest(True, None, 6, 1, 7) == (False, None, 0)  # decoding
    assert arguments.simplest(True, (9, 9), 0, 4, 4) == (True, None, 0)
    assert arguments.simplest(False, (2, 0), 0, 4, 4) == (True, (2, 0), 0)
    assert arguments.simplest(True, (2, 5), 0, 4, 4) == (True, (2, 0), 0)
    assert arguments.simplest(False, (2, 3), 0, 4, 4) == (False, (2, 3), 0)
    assert arguments.simplest(False, None, 5, 4, 4) == (False, None, 0)


# --- checks -------------------------------------------------------------------------------------

# Of numpy: there is nothing to compile for each shape.
zeros, ones = (functools.partial(f, dtype=np.float32) for f in (np.zeros, np.ones))
Q, KV = zeros((B, T, N, H)), zeros((B, S, K, H))

ERRORS = [
    # arguments that differ from a good call, the error, what its message says
    ({"query": zeros((T, H))}, ValueError, r"query: got \(5, 8\); needs \[\.\.\., T, N, H\]"),
    ({"query": Q[None]}, ValueError, r"key: got .*the batch axes of query, \(1, 2\)"),
    ({"query": None}, TypeError, "query: got NoneType; needs an array"),
    ({"query": "text"}, TypeError, "query: got str; needs an array"),
    ({"query": Q.astype(jnp.int32)}, TypeError, "query: got int32; needs one of bfloat16"),
    ({"query": Q > 0}, TypeError, "query: got bool"),
    ({"query": Q.astype(jnp.complex64)}, TypeError, "query: got complex64"),
    ({"query": Q.astype(jnp.float8_e4m3fn)}, TypeError, "query: got float8_e4m3fn"),
    ({"query": Q[0]}, ValueError, r"key: got \(2, 7, 2, 8\); needs \[S, K, H\]"),
    ({"key": KV[0]}, ValueError, r"key: got \(7, 2, 8\); needs \[B, S, K, H\], as query has a"),
    ({"value": KV[0]}, ValueError, r"value: got \(7, 2, 8\); needs \[B, S, K, h\]"),
    ({"key": KV.astype(jnp.bfloat16)}, TypeError, "key: got bfloat16; needs the dtype of query"),
    ({"value": KV.astype(jnp.float16)}, TypeError, "value: got float16; needs the dtype of query"),
    ({"key": KV[:1]}, ValueError, "key: got batch 1; needs that of query, 2"),
    ({"value": KV[:1]}, ValueError, "value: got batch 1; needs that of query, 2"),
    ({"key": KV[..., :4]}, ValueError, "key: got head width 4; needs that of query, 8"),
    ({"value": KV[:, :4]}, ValueError, "value: got length 4; needs that of key, 7"),
    ({"value": KV[:, :, :1]}, ValueError, "value: got 1 heads; needs as many as key, 2"),
    ({"query": Q[:, :, :3]}, ValueError, "query: got 3 heads; needs a positive multiple"),
    (
        {x: array.swapaxes(1, 2) for x, array in (("query", Q), ("key", KV), ("value", KV))},
        ValueError,
        r"query: got 5 heads; needs .* key heads, 7; .* if these are \[B, N, T, H\], swap",
    ),
    ({"query": Q[:, :, :0]}, ValueError, "query: got 0 heads"),
    ({"key": KV[:, :, :0], "value": KV[:, :, :0]}, ValueError, "query: got 4 heads; .* heads, 0"),
    ({"query": Q[..., :0], "key": KV[..., :0]}, ValueError, "query: got head width 0"),
    ({"value": KV[..., :0]}, ValueError, "value: got head width 0"),
    ({"bias": zeros((B, N, T, S), dtype=jnp.int32)}, TypeError, "bias: got int32; needs floating"),
    ({"bias": zeros((B, K, T, S))}, ValueError, r"bias: got shape \(2, 2, 5, 7\); needs one"),
    ({"bias": zeros((3, N, T, S))}, ValueError, "bias: got shape"),
    ({"bias": zeros((1, B, N, T, S))}, ValueError, "bias: got 5 axes; needs at most 4"),
    ({"mask": ones((B, N, T, S))}, TypeError, r"mask: got float32; needs .*, or bias=mask"),
    (
        {"mask": ones((T, S), dtype=np.int32)},
        TypeError,
        r"mask: got int32; needs bool: mask.astype\(bool\), if it is 0 where a key is hidden\.",
    ),
    ({"mask": ones((B, N, S, T), dtype=bool)}, ValueError, r"mask: got .* = \(2, 4, 5, 7\)"),
    ({"mask": ones((1, B, N, T, S), dtype=bool)}, ValueError, "mask: got 5 axes"),
    ({"scale": ones(2)}, ValueError, r"scale: got shape \(2,\); needs a number"),
    ({"scale": True}, TypeError, "scale: got bool"),
    ({"scale": "a"}, TypeError, "scale: got str; needs None, a number or a scalar array"),
    ({"scale": np.ones((), bool)}, TypeError, "scale: got bool; needs a real number"),
    ({"is_causal": jnp.array(True)}, TypeError, "is_causal: got jax.Array; needs True or False"),
    ({"bias": ones((T, S), dtype=bool)}, TypeError, "bias: got bool; needs .*; mask=bias"),
    ({"scale": float("nan")}, ValueError, "scale: got nan; needs a finite number"),
    ({"scale": 10**400}, ValueError, "scale: got an integer beyond all floats"),
    ({"scale": -1e39}, ValueError, r"scale: got -1e\+39; needs a finite number, in float32"),
    ({"scale": 1j}, TypeError, "scale: got complex; needs None, a number"),
    ({"is_causal": 1}, TypeError, "is_causal: got int; needs True or False"),
    ({"is_causal": None}, TypeError, "is_causal: got NoneType"),
    ({"return_residual": "yes"}, TypeError, "return_residual: got str"),
    ({"deterministic": 0}, TypeError, "deterministic: got int"),
    ({"query_seq_lengths": ones(3, dtype=jnp.int32)}, ValueError, r"query_seq_lengths: .*\(3,\)"),
    ({"query_seq_lengths": 3}, ValueError, r"query_seq_lengths: got shape \(\); needs \(2,\)"),
    ({"query_seq_lengths": ones(2)}, TypeError, "query_seq_lengths: got float32; needs int32"),
    ({"query_seq_lengths": ones(2, dtype=bool)}, TypeError, "query_seq_lengths: got bool"),
    (
        {"query_seq_lengths": jnp.array([1, 2**31], jnp.uint32)},
        ValueError,
        "query_seq_lengths: .* within int32",
    ),
    ({"query_seq_lengths": np.array([1, 2**31])}, ValueError, "query_seq_lengths: .* within int32"),
    (
        {"key_value_seq_lengths": ones((2, 1), dtype=jnp.int32)},
        ValueError,
        "key_value_seq_lengths:",
    ),
    ({"key_value_seq_lengths": ones(2)}, TypeError, "key_value_seq_lengths: got float32"),
    ({"local_window_size": -1}, ValueError, "local_window_size: got -1; needs no negative side"),
    ({"mask": ones((B, S), dtype=bool)}, ValueError, r"mask: .*mask\[:, None, None, :\]"),
    ({"mask": lambda *_: True}, TypeError, "mask: got function; needs an array; mask_mod takes"),
    ({"local_window_size": (3, -1)}, ValueError, r"local_window_size: got \(3, -1\)"),
    ({"local_window_size": 1.5}, TypeError, "local_window_size: got 1.5; needs None, an integer"),
    ({"local_window_size": (1, 2, 3)}, TypeError, "local_window_size: got"),
    ({"local_window_size": (1, None)}, TypeError, "local_window_size: got"),
    ({"local_window_size": True}, TypeError, "local_window_size: got True"),
    ({"implementation": "cuda"}, ValueError, "implementation: got 'cuda'; needs .* mosaic_gpu, c"),
    ({"implementation": 1}, ValueError, "implementation: got 1"),
    ({"implementation": np.array(["xla"])}, ValueError, r"implementation: got array\(\['xla'\]"),
    ({"config": object()}, TypeError, "config: got object"),
    (
        {"config": defaults.default(64), "implementation": "xla"},
        ValueError,
        "config: got one",
    ),
    (
        {"config": defaults.default(64), "implementation": "cudnn"},
        ValueError,
        "config: got one",
    ),
    ({"query_segment_ids": zeros((B, T), dtype=np.int32)}, ValueError, "one without the other"),
    ({"key_value_segment_ids": zeros((B, S), dtype=np.int32)}, ValueError, "one without the other"),
    (
        {
            "query_segment_ids": zeros((B, S), dtype=np.int32),
            "key_value_segment_ids": zeros((B, S), dtype=np.int32),
        },
        ValueError,
        r"query_segment_ids: got shape \(2, 7\); needs \(2, 5\)",
    ),
    (
        {
            "query_segment_ids": zeros((B, T), dtype=np.int32),
            "key_value_segment_ids": zeros((B, S)),
        },
        TypeError,
        "key_value_segment_ids: got float32",
    ),
    ({"query_offset": np.array([1.5, "a"], object)}, TypeError, "query_offset: got object"),
    ({"query_offset": 1.0}, TypeError, "query_offset: got float32; needs int32"),
    ({"query_offset": True}, TypeError, "query_offset: got bool"),
    ({"query_offset": None}, TypeError, "query_offset: got NoneType"),
    ({"query_offset": 2**31}, ValueError, "query_offset: got 2147483648; needs an integer within"),
    ({"query_offset": zeros(3, dtype=np.int32)}, ValueError, r"query_offset: got shape \(3,\)"),
    ({"logits_soft_cap": 0}, ValueError, "logits_soft_cap: got 0; needs a finite number above 0"),
    ({"logits_soft_cap": -1.0}, ValueError, "logits_soft_cap: got -1.0"),
    ({"logits_soft_cap": 1e-44}, ValueError, "logits_soft_cap: got 1e-44"),
    ({"logits_soft_cap": 3e38}, ValueError, r"logits_soft_cap: got 3e\+38"),
    ({"logits_soft_cap": float("inf")}, ValueError, "logits_soft_cap: got inf"),
    ({"logits_soft_cap": float("nan")}, ValueError, "logits_soft_cap: got nan"),
    ({"logits_soft_cap": 10**400}, ValueError, "logits_soft_cap: got an integer beyond all"),
    ({"logits_soft_cap": "30"}, TypeError, "logits_soft_cap: got str"),
    ({"sinks": zeros(K)}, ValueError, r"sinks: got \(2,\); needs one per query head, \(4,\)"),
    ({"sinks": zeros((1, N))}, ValueError, "sinks: got"),
    ({"sinks": zeros(N, dtype=np.int32)}, TypeError, "sinks: got int32; needs floating"),
    ({"dropout_rate": 0.1}, ValueError, "dropout_key: got None; needs a key, for a rate of 0.1"),
    ({"dropout_rate": 1.0}, ValueError, "dropout_rate: got 1.0; needs at least 0 and less than 1"),
    ({"dropout_rate": -0.1}, ValueError, "dropout_rate: got -0.1"),
    ({"dropout_rate": float("nan")}, ValueError, "dropout_rate: got nan"),
    ({"dropout_rate": jnp.float32(0.1)}, TypeError, "dropout_rate: got .*; needs a number"),
    (
        {"dropout_rate": 0.1, "dropout_key": jax.random.split(jax.random.key(0))},
        ValueError,
        r"dropout_key: got words of shape \(2, 2\); needs one key",
    ),
    ({"dropout_rate": 0.1, "dropout_key": 0}, TypeError, "dropout_key: got int32; needs a JAX"),
    ({"dropout_rate": 0.1, "dropout_key": "x"}, TypeError, "dropout_key: got str; needs a JAX"),
    (
        {"dropout_rate": 0.1, "dropout_key": zeros(3, dtype=jnp.uint32)},
        ValueError,
        r"dropout_key: got words of shape \(3,\)",
    ),
]


@pytest.mark.parametrize(
    ("changes", "error", "message"), ERRORS, ids=[message for _, _, message in ERRORS]
)
def test_bad_arguments(changes, error, message):
    arguments = {"query": Q, "key": KV, "value": KV} | changes
    with pytest.raises(error, match=message):
        jax_flash.attention(**arguments)
    with pytest.raises(error, match=message):
        jax_flash.explain(**arguments)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("is_causal", True),
        ("return_residual", True),
        ("deterministic", False),
        ("local_window_size", 3),
        ("local_window_size", (3, 0)),
        ("logits_soft_cap", 30.0),
        ("dropout_rate", 0.1),
    ],
)
def test_what_decides_what_is_traced_is_static(name, value):
    run = jax.jit(lambda x: jax_flash.attention(Q, KV, KV, **{name: x}))
    with pytest.raises(TypeError, match=f"{name}: got a traced value; needs a static value: .*jit"):
        run(value)


def test_checks_come_before_any_implementation(monkeypatch):
    def unreachable(call, implementation):
        raise AssertionError("an implementation was called")

    monkeypatch.setattr(api.dispatch, "attention", unreachable)
    for changes, error, _ in ERRORS:
        with pytest.raises(error):
            jax_flash.attention(**{"query": Q, "key": KV, "value": KV} | changes)


def test_ids_that_int32_cannot_hold_are_refused():
    with jax.enable_x64(True), pytest.raises(ValueError, match=r"query_segment_ids: .* int32"):
        jax_flash.attention(
            Q,
            KV,
            KV,
            query_segment_ids=jnp.full((B, T), 2**31, jnp.int64),
            key_value_segment_ids=jnp.zeros((B, S), jnp.int64),
        )


def test_explain_has_the_signature_of_attention():
    assert inspect.signature(jax_flash.explain) == inspect.signature(jax_flash.attention)
    assert "which implementation" in jax_flash.explain.__doc__


def test_public_names():
    assert jax_flash.__all__ == [
        "CHECKPOINT_NAMES",
        "BlockMask",
        "Config",
        "Quantized",
        "all_gather_attention",
        "attention",
        "attention_fp8",
        "block_mask",
        "decode_attention",
        "explain",
        "explain_decode",
        "from_zigzag",
        "install",
        "quantize_fp8",
        "ring_attention",
        "segment_ids",
        "to_zigzag",
        "ulysses_attention",
        "update_cache",
    ]


def test_settings_are_those_of_the_kernels():
    assert jax_flash.Config is config.Config
    assert isinstance(defaults.default(64), jax_flash.Config)
