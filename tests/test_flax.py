"""jax_flash.flax in the modules of Flax, beside Flax's own attention."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax", reason="needs the extra flax")

from flax import linen, nnx

from jax_flash.flax import attention_fn
from tests.support.pages import block_that_imports

pytestmark = pytest.mark.extras

B, T, N, WIDTH = 2, 12, 4, 32
X = jax.random.normal(jax.random.key(0), (B, T, WIDTH))
VISIBLE = np.tril(np.ones((T, T)), 2)
MASKS = {
    "none": None,
    "bool": jnp.asarray(VISIBLE > 0)[None, None],
    "float32": jnp.asarray(VISIBLE, jnp.float32)[None, None],
    "int32": jnp.asarray(VISIBLE, jnp.int32)[None, None],
}


def of_nnx(attention, **options):
    return nnx.MultiHeadAttention(
        N, WIDTH, WIDTH, WIDTH, decode=False, rngs=nnx.Rngs(0), attention_fn=attention, **options
    )


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_nnx(mask, is_causal):
    """Output and gradients, with the same weights."""

    def results(*attention):
        module = of_nnx(*attention) if attention else of_nnx(nnx.dot_product_attention)
        loss = lambda module, x: (module(x, mask=mask, is_causal=is_causal) ** 2).sum()
        return module(X, mask=mask, is_causal=is_causal), nnx.grad(loss)(module, X)

    chex.assert_trees_all_close(results(attention_fn), results(), atol=1e-4, rtol=1e-4)


def test_nnx_decodes_from_its_cache():
    def tokens(attention):
        module = of_nnx(attention)
        module.init_cache((B, T, WIDTH), dtype=jnp.float32)
        return jnp.concatenate([module(X[:, i : i + 1], decode=True) for i in range(T)], axis=1)

    expected = tokens(nnx.dot_product_attention)
    chex.assert_trees_all_close(tokens(attention_fn), expected, atol=1e-5)


def test_nnx_drops_in_training_alone():
    module = of_nnx(attention_fn, dropout_rate=0.5)
    run = lambda seed, **options: module(X, rngs=nnx.Rngs(seed), **options)
    training = [np.asarray(run(seed, deterministic=False)) for seed in (0, 0, 1)]
    np.testing.assert_array_equal(training[0], training[1])
    assert np.abs(training[0] - training[2]).max() > 0.01
    expected = of_nnx(nnx.dot_product_attention)(X)
    chex.assert_trees_all_close(run(0, deterministic=True), expected, atol=1e-5)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("shape", [(T,), (B, T), (3, B, T)], ids=str)
@pytest.mark.fast_cases(
    *(f"{(B, T)}-{mask}" for mask in MASKS),
    *(f"{shape}-{mask}" for shape in ((T,), (3, B, T)) for mask in ("none", "bool")),
)
def test_linen(mask, shape):
    """Also without a batch, and with two batch axes."""
    x = jax.random.normal(jax.random.key(1), (*shape, WIDTH))
    if mask is not None:
        mask = mask.reshape((1,) * (len(shape) - 1) + (1, T, T))
    results = []
    for attention in (attention_fn, linen.dot_product_attention):
        module = linen.MultiHeadDotProductAttention(N, attention_fn=attention)
        weights = module.init(jax.random.key(2), x)
        run = functools.partial(module.apply, mask=mask)
        results.append((run(weights, x), jax.grad(lambda w, run=run: run(w, x).sum())(weights)))
    chex.assert_trees_all_close(*results, atol=1e-4, rtol=1e-4)


def test_linen_is_causal_by_a_partial():
    causal = functools.partial(attention_fn, is_causal=True)
    module = linen.MultiHeadDotProductAttention(N, attention_fn=causal)
    weights = module.init(jax.random.key(2), X)
    plain = linen.MultiHeadDotProductAttention(N)
    mask = linen.make_causal_mask(jnp.ones((B, T)))
    chex.assert_trees_all_close(
        module.apply(weights, X), plain.apply(weights, X, mask=mask), atol=1e-5
    )


def test_linen_decodes_from_its_cache():
    def tokens(attention):
        module = linen.MultiHeadDotProductAttention(N, decode=True, attention_fn=attention)
        variables = module.init(jax.random.key(2), X)
        found = []
        for i in range(T):
            x, changed = module.apply(variables, X[:, i : i + 1], mutable=["cache"])
            variables |= changed
            found.append(x)
        return jnp.concatenate(found, axis=1)

    expected = tokens(linen.dot_product_attention)
    chex.assert_trees_all_close(tokens(attention_fn), expected, atol=1e-5)


def test_linen_drops_in_training_alone():
    module = linen.MultiHeadDotProductAttention(N, dropout_rate=0.5, attention_fn=attention_fn)
    weights = module.init(jax.random.key(2), X, deterministic=True)
    run = lambda seed: module.apply(
        weights, X, deterministic=False, rngs={"dropout": jax.random.key(seed)}
    )
    chex.assert_trees_all_equal(run(0), run(0))
    assert jnp.abs(run(0) - run(1)).max() > 0.01
    plain = linen.MultiHeadDotProductAttention(N).apply(weights, X)
    chex.assert_trees_all_close(module.apply(weights, X, deterministic=True), plain, atol=1e-5)


def test_the_dtype_is_that_of_the_module():
    module = linen.MultiHeadDotProductAttention(N, dtype=jnp.bfloat16, attention_fn=attention_fn)
    out, _ = module.init_with_output(jax.random.key(2), X)
    assert out.dtype == jnp.bfloat16


def test_what_cannot_be_done_is_said():
    with pytest.raises(NotImplementedError, match="sow"):
        of_nnx(attention_fn)(X, sow_weights=True)
    with pytest.raises(NotImplementedError, match="einsums"):
        attention_fn(X, X, X, einsum_dot_general=jnp.einsum)


def test_the_guide():
    names: dict = {}
    block_that_imports("nnx").run(names)
    module = nnx.MultiHeadAttention(4, 256, decode=False, rngs=nnx.Rngs(0))
    expected = module(names["x"], is_causal=True)
    as_float32 = lambda x: x.astype(jnp.float32)
    chex.assert_trees_all_close(as_float32(names["out"]), expected, atol=3e-2)
    chex.assert_trees_all_close(as_float32(names["token"]), expected[:, -1:], atol=3e-2)
