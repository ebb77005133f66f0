"""The user's guide's attention for Haiku, beside Haiku's own."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("haiku", reason="needs the extra haiku")

import haiku as hk

from tests.support.pages import block_that_imports

pytestmark = pytest.mark.extras

B, T, S, N = 2, 7, 12, 4
VISIBLE = np.tril(np.ones((T, S)), 2)
MASKS = {
    "none": None,
    "bool": jnp.asarray(VISIBLE > 0),
    "float32": jnp.asarray(VISIBLE, jnp.float32),
    "int32": jnp.asarray(VISIBLE, jnp.int32),
}
SIZES = dict(value_size=16, model_size=40, b_init=hk.initializers.RandomNormal())


@pytest.fixture(scope="module")
def ours():
    names: dict = {}
    block_that_imports("haiku").run(names)
    return names["MultiHeadAttention"]


def results(attention, x, mask, options):
    """Weights, output and gradients."""

    def forward(*x, mask):
        init = hk.initializers.VarianceScaling()
        return attention(N, key_size=8, w_init=init, **options)(*x, mask=mask)

    module = hk.without_apply_rng(hk.transform(forward))
    weights = module.init(jax.random.key(1), *x, mask=mask)
    run = lambda weights, x: module.apply(weights, *x, mask=mask)
    loss = lambda *arguments: (run(*arguments) ** 2).sum()
    return weights, run(weights, x), jax.jit(jax.grad(loss, argnums=(0, 1)))(weights, x)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("options", [{}, SIZES, dict(with_bias=False)], ids=["", "sizes", "bare"])
@pytest.mark.parametrize("batch", [(), (B,), (3, B)], ids=str)
@pytest.mark.fast_cases(
    *(f"{batch}--{mask}" for batch in ((), (B,), (3, B)) for mask in MASKS),
    *(f"{(B,)}-{options}-{mask}" for options in ("sizes", "bare") for mask in MASKS),
)
def test_beside_haiku(ours, mask, options, batch):
    """Without a batch, and with one and two batch axes."""
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (T, 32), (S, 16), (S, 24)
    x = [jax.random.normal(k, (*batch, *y)) for k, y in zip(keys, shapes, strict=True)]
    if mask is not None:
        mask = mask.reshape((1,) * len(batch) + (1, T, S))
    expected = results(hk.MultiHeadAttention, x, mask, options)
    chex.assert_trees_all_close(results(ours, x, mask, options), expected, atol=1e-4, rtol=1e-4)


def test_a_mask_of_each_head_and_entry(ours):
    x = [jax.random.normal(jax.random.key(0), (B, S, 32))] * 3
    mask = jax.random.bernoulli(jax.random.key(2), 0.7, (B, N, S, S)) | jnp.eye(S, dtype=bool)
    expected = results(hk.MultiHeadAttention, x, mask, {})
    chex.assert_trees_all_close(results(ours, x, mask, {}), expected, atol=1e-4, rtol=1e-4)
