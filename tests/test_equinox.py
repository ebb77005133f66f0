"""jax_flash.equinox beside Equinox's own MultiheadAttention."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("equinox", reason="needs the extra equinox")

import equinox as eqx

from jax_flash.equinox import MultiheadAttention
from tests.support.pages import block_that_imports

pytestmark = pytest.mark.extras

T, S, N, WIDTH = 7, 12, 4, 32
X = jax.random.normal(jax.random.key(0), (S, WIDTH))
VISIBLE = np.tril(np.ones((T, S), bool), 2)
MASKS = {
    "none": None,
    "of all heads": jnp.asarray(VISIBLE),
    "by head": jnp.stack([jnp.roll(jnp.asarray(VISIBLE), i, axis=1) for i in range(N)]),
}
SIZES = dict(key_size=16, value_size=24, output_size=40, qk_size=8, vo_size=16)
BIASES = {f"use_{name}_bias": True for name in ("query", "key", "value", "output")}


def pair(**options):
    """Ours and Equinox's, with the same weights."""
    options = dict(num_heads=N, query_size=WIDTH, key=jax.random.key(1)) | options
    return MultiheadAttention(**options), eqx.nn.MultiheadAttention(**options)


def inputs(sizes, *batch):
    keys = jax.random.split(jax.random.key(2), 3)
    widths = WIDTH, sizes.get("key_size", WIDTH), sizes.get("value_size", WIDTH)
    rows = T, S, S
    shapes = [(*batch, *x) for x in zip(rows, widths, strict=True)]
    return [jax.random.normal(k, x) for k, x in zip(keys, shapes, strict=True)]


def leaves(tree):
    return jax.tree.leaves(eqx.filter(tree, eqx.is_array))


def rotated(query, key, value):
    rotate = jax.vmap(eqx.nn.RotaryPositionalEmbedding(query.shape[-1]), in_axes=1, out_axes=1)
    return rotate(query), rotate(key), value


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("sizes", [{}, SIZES | BIASES], ids=["of one size", "of five"])
@pytest.mark.parametrize("process_heads", [None, rotated], ids=["plain", "rotary"])
def test_output_and_gradients(mask, sizes, process_heads):
    x = inputs(sizes)

    @eqx.filter_jit
    @eqx.filter_value_and_grad(has_aux=True)
    def results(layer):
        out = layer(*x, mask=mask, process_heads=process_heads)
        return (out**2).sum(), out

    ours, theirs = map(results, pair(**sizes))
    chex.assert_trees_all_close(leaves(ours), leaves(theirs), atol=1e-4, rtol=1e-4)


def test_vmap():
    x = inputs(SIZES, 3)
    masks = jnp.stack([jnp.asarray(np.tril(VISIBLE, k)) for k in range(3)])
    ours, theirs = [jax.vmap(layer)(*x, masks) for layer in pair(**SIZES)]
    chex.assert_trees_all_close(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_dtypes(dtype):
    """Of weights, and of a query that is of another."""
    query, key, value = [x.astype(dtype) for x in inputs({})]
    for x in (query, query.astype(jnp.float32)):
        ours, theirs = [layer(x, key, value) for layer in pair(dtype=dtype)]
        assert ours.dtype == theirs.dtype
        chex.assert_trees_all_close(ours, theirs, atol=2e-2)


def test_options_of_attention():
    ours, theirs = pair()
    mask = jnp.tril(jnp.ones((S, S), bool))
    expected = theirs(X, X, X, mask)
    chex.assert_trees_all_close(ours(X, X, X, is_causal=True), expected, atol=1e-5)


def test_dropout():
    ours, theirs = pair(dropout_p=0.5)
    expected = theirs(X, X, X, inference=True)
    off = [
        ours(X, X, X, inference=True),
        ours(X, X, X, deterministic=True),
        eqx.nn.inference_mode(ours)(X, X, X),
        pair(dropout_p=0.5, inference=True)[0](X, X, X),
        pair()[0](X, X, X, inference=False),  # nothing to drop
    ]
    for out in off:
        chex.assert_trees_all_close(out, expected, atol=1e-5)

    run = eqx.filter_jit(lambda seed, **kwargs: ours(X, X, X, key=jax.random.key(seed), **kwargs))
    chex.assert_trees_all_equal(run(0), run(0))
    chex.assert_trees_all_equal(run(0), run(0, deterministic=None, inference=False))
    assert jnp.abs(run(0) - run(1)).max() > 0.01
    seeds = jax.random.split(jax.random.key(0), 512)
    mean = jax.vmap(lambda key: ours(X, X, X, key=key))(seeds).mean(axis=0)
    chex.assert_trees_all_close(mean, expected, atol=0.1)


def test_a_batch_with_a_key_each():
    ours, _ = pair(dropout_p=0.5)
    run = jax.vmap(lambda key: ours(X, X, X, key=key))
    first, second = run(jax.random.split(jax.random.key(0), 2))
    assert jnp.abs(first - second).max() > 0.01
    run(jax.random.split(jax.random.PRNGKey(0), 2))  # the old kind of key


def bad_calls():
    mask = jnp.ones((T, S), bool)
    return {
        "no key": dict(inference=False),
        "mask of a row": dict(mask=mask[:1]),
        "mask of one head": dict(mask=mask[None]),
        "mask of four axes": dict(mask=mask[None, None]),
        "heads": dict(process_heads=lambda q, k, v: (q, k[:, :1], v[:, :1])),
    }


@pytest.mark.parametrize("bad", bad_calls().values(), ids=bad_calls())
def test_errors_are_of_the_type_of_equinox(bad):
    x = inputs({})
    options = dict(inference=True) | bad
    for layer in pair(dropout_p=0.5):
        with pytest.raises(RuntimeError if "inference" in bad else ValueError):
            layer(*x, **options)
    layer, _ = pair(dropout_p=0.5)
    name = "key" if "inference" in bad else next(iter(bad))
    with pytest.raises((RuntimeError, ValueError), match=f"^{name}: got .*; needs "):
        layer(*x, **options)


def test_lengths_that_differ():
    query, key, value = inputs({})
    for layer in pair():
        with pytest.raises(ValueError):
            layer(query, key, value[1:])


def test_a_row_that_sees_no_key():
    ours, _ = pair()
    out = ours(X, X, X, jnp.ones((S, S), bool).at[3].set(False))
    assert not out[3].any() and out[2].any()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("chunks", [[S], [1] * S, [5, 1, 4, 2]], ids=str)
def test_decoding(dtype, chunks):
    """Prompts and tokens, in a cache of float32 and of bfloat16, beside the forward pass."""
    sizes = dict(qk_size=8, vo_size=16) | BIASES
    ours, theirs = pair(**sizes)
    decode = eqx.filter_jit(ours.decode)
    cache, out = ours.init_cache(S + 3, dtype), []
    for x in jnp.split(X, np.cumsum(chunks)[:-1]):
        rows, cache = decode(x, cache)
        out.append(rows)
    expected = theirs(X, X, X, jnp.tril(jnp.ones((S, S), bool)))
    atol = 1e-5 if dtype == jnp.float32 else 3e-2
    chex.assert_trees_all_close(jnp.concatenate(out), expected, atol=atol)
    assert cache[0].shape == (S + 3, N, 8) and cache[1].shape == (S + 3, N, 16)
    assert cache[2] == S and cache[0].dtype == dtype


def test_decoding_under_vmap_and_scan():
    """Sequences of different lengths."""
    ours, _ = pair()
    x = jnp.stack([X, X[::-1]])
    caches = [ours.decode(x[i, :n], ours.init_cache(S))[1] for i, n in enumerate((3, 5))]
    cache = jax.tree.map(lambda *leaves: jnp.stack(leaves), *caches)
    new = jnp.stack([x[i, n : n + 4] for i, n in enumerate((3, 5))])

    def step(cache, token):
        out, cache = jax.vmap(ours.decode)(token[:, None], cache)
        return cache, out[:, 0]

    (*_, count), out = jax.lax.scan(step, cache, new.swapaxes(0, 1))
    for i, n in enumerate((3, 5)):
        expected = ours(x[i], x[i], x[i], is_causal=True)[n : n + 4]
        chex.assert_trees_all_close(out[:, i], expected, atol=1e-5)
    assert count.tolist() == [7, 9]


def test_decoding_with_positions():
    """process_heads knows from the cache where the tokens stand."""
    ours, _ = pair()
    turn = lambda x, at: x * jnp.cos(at)[:, None, None]
    at = lambda start: (
        lambda q, k, v: (
            *(turn(x, start + jnp.arange(len(x))) for x in (q, k)),
            v,
        )
    )
    cache, out = ours.init_cache(S), []
    for i in range(S):
        token, cache = ours.decode(X[i : i + 1], cache, process_heads=at(cache[2]))
        out.append(token)
    expected = ours(X, X, X, is_causal=True, process_heads=at(0))
    chex.assert_trees_all_close(jnp.concatenate(out), expected, atol=1e-5)


def test_decoding_in_a_full_cache():
    """As documented: the cache keeps what it has, and counts."""
    ours, _ = pair()
    _, cache = ours.decode(X, ours.init_cache(S))
    out, (keys, values, count) = ours.decode(X[:1], cache)
    chex.assert_trees_all_equal((keys, values), cache[:2])
    assert count == S + 1 and jnp.isfinite(out).all()


def test_what_decoding_refuses():
    ours, _ = pair()
    with pytest.raises(NotImplementedError, match="no derivative"):
        jax.grad(lambda x: ours.decode(x, ours.init_cache(S))[0].sum())(X)
    with pytest.raises(TypeError, match="query: got float8"):
        ours.decode(X, ours.init_cache(S, jnp.float8_e4m3fn))


def test_the_kernels_take_both():
    """Under vmap, lowered for a Hopper GPU."""
    layer, _ = pair(query_size=256, dtype=jnp.bfloat16, dropout_p=0.1)
    x = jax.ShapeDtypeStruct((2, 128, 256), jnp.bfloat16)
    named = dict(implementation="mosaic_gpu")

    def attend(x):
        keys = jax.random.split(jax.random.key(0), len(x))
        run = lambda x, key: layer(x, x, x, key=key, is_causal=True, **named)
        cache = jax.vmap(lambda _: layer.init_cache(128))(x)
        token, _ = jax.vmap(lambda x, cache: layer.decode(x[:1], cache, **named))(x, cache)
        return jax.vmap(run)(x, keys), token

    text = jax.jit(attend).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") >= 2, text.count("mosaic_gpu")


def test_the_guide():
    names: dict = {}
    block_that_imports("equinox").run(names)
    out = jnp.concatenate([names["prompt"], names["token"]], axis=1)
    out, expected = (x.astype(jnp.float32) for x in (out, names["out"]))
    chex.assert_trees_all_close(out, expected, atol=2e-2)
