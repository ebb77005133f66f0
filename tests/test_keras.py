"""The user's guide's attention for Keras, in its layers, beside what they run by themselves."""

import os

import chex
import jax
import jax.numpy as jnp
import pytest

os.environ["KERAS_BACKEND"] = "jax"  # read when keras is imported
pytest.importorskip("keras", reason="needs the extra keras")

import keras

import jax_flash
from jax_flash import drop_in
from tests.support.pages import block_that_imports

pytestmark = pytest.mark.extras

B, T, S, WIDTH = 2, 7, 12, 32
QUERY = jax.random.normal(jax.random.key(0), (B, T, WIDTH))
VALUE = jax.random.normal(jax.random.key(1), (B, S, WIDTH))
LENGTHS = jnp.array([7, 12])
PADDED = jnp.arange(S) < LENGTHS[:, None]
MASK = jnp.tril(jnp.ones((B, T, S), bool), 3)

LAYERS = {
    "MultiHeadAttention": lambda **x: keras.layers.MultiHeadAttention(4, 8, **x),
    "GroupQueryAttention": lambda **x: keras.layers.GroupQueryAttention(8, 4, 2, **x),
}
MASKS = {
    "none": {},
    "causal": dict(use_causal_mask=True),
    "mask": dict(attention_mask=MASK),
    "integers": dict(attention_mask=MASK.astype(int)),
    "lengths": dict(value_mask=PADDED),
    "all": dict(use_causal_mask=True, attention_mask=MASK, value_mask=PADDED),
}
# Each leaves the layer an implementation of its own.
NEVER = {
    "dropout": (dict(dropout=0.1), {}, (QUERY, VALUE)),
    "scores": ({}, dict(return_attention_scores=True), (QUERY, VALUE)),
    "two axes": (dict(attention_axes=(1, 2)), {}, (QUERY[None], VALUE[None])),
}


@pytest.fixture
def calls(monkeypatch):
    """Calls of `jax_flash.attention`, none of them before the guide is run."""
    found: list[dict] = []
    attention = jax_flash.attention

    def recorded(*args, **kwargs):
        found.append(kwargs)
        return attention(*args, **kwargs)

    monkeypatch.setattr(drop_in, "attention", recorded)
    yield found
    while drop_in._installed:
        drop_in._installed[-1].undo()


def run_the_guide() -> dict:
    names: dict = {}
    block_that_imports("keras").run(names)
    return names


def results(layer, options):
    """Output, and gradients of weights and inputs."""

    def loss(weights, query, value):
        out, _ = layer.stateless_call(weights, [], query, value, **options)
        return (out**2).sum(), out

    weights = [x.value for x in layer.trainable_variables]
    return jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(weights, QUERY, VALUE)


@pytest.mark.parametrize("options", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
@pytest.mark.fast_cases(
    *(f"GroupQueryAttention-{mask}" for mask in MASKS),
    "MultiHeadAttention-none",
    "MultiHeadAttention-all",
)
def test_before_and_after(make, options, calls):
    layer = make()
    layer.build(QUERY.shape, VALUE.shape)
    before = results(layer, options)
    assert not calls
    run_the_guide()
    calls.clear()
    chex.assert_trees_all_close(results(layer, options), before, atol=1e-4, rtol=1e-4)
    assert len(calls) == 1


def test_the_guide_and_the_operation(calls):
    names = run_the_guide()
    assert names["out"].shape == (2, 16, 64) and len(calls) == 1 and calls[0]["is_causal"]
    keras.ops.dot_product_attention(*[QUERY[:, :, None]] * 3)
    assert len(calls) == 2


def test_a_model_that_is_fitted(calls):
    run_the_guide()
    calls.clear()
    x = keras.Input((T, WIDTH))
    model = keras.Model(x, LAYERS["GroupQueryAttention"]()(x, x, use_causal_mask=True))
    model.compile("sgd", "mse")
    before = model.evaluate(QUERY, QUERY, verbose=0)
    model.fit(QUERY, QUERY, epochs=3, verbose=0)
    assert calls and model.evaluate(QUERY, QUERY, verbose=0) < before


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_flash_attention(make, calls, monkeypatch):
    """True needs cuDNN before anything is called; where that is there, it changes nothing."""
    run_the_guide()
    calls.clear()
    make(flash_attention=False)(QUERY, VALUE)
    assert len(calls) == 1
    if jax.default_backend() == "cpu":
        with pytest.raises(RuntimeError, match="cuDNN"):
            make(flash_attention=True)(QUERY, VALUE)
        assert len(calls) == 1
    monkeypatch.setattr("keras.src.backend.jax.nn._can_use_flash_attention", lambda *_, **__: True)
    make(flash_attention=True)(QUERY, VALUE)
    assert len(calls) == 2


@pytest.mark.parametrize("options, arguments, x", NEVER.values(), ids=NEVER)
def test_what_never_calls_it(options, arguments, x, calls):
    run_the_guide()
    calls.clear()
    LAYERS["MultiHeadAttention"](**options)(*x, **arguments)
    assert not calls


def test_an_error_is_logged_and_keras_goes_on(calls, monkeypatch, caplog):
    run_the_guide()
    layer = LAYERS["MultiHeadAttention"]()
    expected = layer(QUERY, VALUE)

    def refuse(*args, **kwargs):
        raise NotImplementedError("not here")

    monkeypatch.setattr(drop_in, "attention", refuse)
    chex.assert_trees_all_close(layer(QUERY, VALUE), expected, atol=1e-5)
    assert "not here" in caplog.text
