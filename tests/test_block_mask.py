"""`jax_flash.block_mask`: what it says of a function, and that it does as well as the function."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from tests.support.interpret import interpret_mode
from tests.support.kernel_calls import dense_mask, inputs

BLOCK = jax_flash.BlockMask.BLOCK


def window(b, h, q_idx, kv_idx):
    return (kv_idx <= q_idx) & (q_idx - kv_idx < 150)


def by_head(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx) % (h + 1) == 0


DOCUMENTS = jnp.array([[0] * 100 + [1] * 50 + [2] * 80, [0] * 20 + [1] * 210])


def documents(b, h, q_idx, kv_idx):
    return DOCUMENTS[b, q_idx] == DOCUMENTS[b, kv_idx]


@pytest.mark.parametrize(
    ("function", "sizes"),
    [
        (window, (1, 1, 256, 256)),
        (window, (1, 1, 300, 170)),
        (by_head, (1, 2, 100, 130)),
        (documents, (2, 1, 230, 230)),
    ],
)
def test_kinds(function, sizes):
    mask = jax_flash.block_mask(function, *sizes)
    shown = dense_mask(function, *sizes)
    assert mask.kinds.shape == (*sizes[:2], -(-sizes[2] // BLOCK), -(-sizes[3] // BLOCK))
    for entry, head, row, column in np.ndindex(*mask.kinds.shape):
        block = shown[entry, head, row * BLOCK :, column * BLOCK :][:BLOCK, :BLOCK]
        kind = 2 if block.all() else 1 if block.any() else 0
        assert mask.kinds[entry, head, row, column] == kind
    assert mask.share == (mask.kinds > 0).mean()


def test_printed():
    mask = jax_flash.block_mask(window, 1, 1, 256, 256)
    assert str(mask).splitlines() == [
        "BlockMask(batch=1, heads=1, query_length=256, key_length=256):"
        " 38% empty, 44% partial, 19% full",
        "+...",
        "#+..",
        "+#+.",
        "++#+",
    ]
    large = jax_flash.block_mask(window, 1, 1, 8192, 4096)
    assert len(large.picture()) == 32
    assert {len(line) for line in large.picture()} == {32}


@pytest.mark.parametrize("function", [window, by_head, documents])
def test_taken_in_the_place_of_a_function(function):
    query, key, value, *_ = inputs(2, 230, 230, 2, 1, 16, jnp.float32)
    mask = jax_flash.block_mask(function, 2, 2, 230, 230)
    run = functools.partial(jax_flash.attention, query, key, value, implementation="xla")
    chex.assert_trees_all_equal(run(mask_mod=mask), run(mask_mod=function))
    jitted = jax.jit(lambda query: jax_flash.attention(query, key, value, mask_mod=mask))
    chex.assert_trees_all_close(jitted(query), run(mask_mod=function), atol=1e-6)


@pytest.mark.long
def test_taken_by_the_kernels():
    query, key, value, *_ = inputs(1, 230, 230, 2, 1, 64, jnp.bfloat16)
    run = functools.partial(jax_flash.attention, query, key, value, implementation="mosaic_gpu")
    with interpret_mode():
        mask = jax_flash.block_mask(window, 1, 1, 230, 230)
        chex.assert_trees_all_equal(run(mask_mod=mask), run(mask_mod=window))


def test_made_while_something_is_traced():
    @jax.jit
    def attend(query):
        mask = jax_flash.block_mask(window, 1, 1, 96, 96)
        return jax_flash.attention(query, query, query, mask_mod=mask)

    chex.assert_tree_all_finite(attend(jnp.ones((1, 96, 2, 8))))


def of_traced(allowed):
    return jax_flash.block_mask(lambda b, h, q_idx, kv_idx: allowed[kv_idx], 1, 1, 8, 8)


def test_errors():
    make = functools.partial(jax_flash.block_mask, window)
    with pytest.raises(ValueError, match="batch: got 0; needs 1 or more"):
        make(0, 1, 8, 8)
    with pytest.raises(TypeError, match="key_length: got float; needs an integer"):
        make(1, 1, 8, 2.0)
    with pytest.raises(TypeError, match="mask_mod: got None; needs a function"):
        jax_flash.block_mask(None, 1, 1, 8, 8)
    with pytest.raises(TypeError, match="mask_mod: got a function that captures traced arrays"):
        jax.jit(of_traced)(jnp.ones(8, bool))
    query = jnp.ones((2, 16, 2, 8))
    for mask, name in (
        (make(1, 1, 16, 24), "key_length 24; needs 16"),
        (make(3, 1, 16, 16), "batch 3; needs 2 or 1"),
        (jax_flash.block_mask(by_head, 1, 1, 16, 16), "heads 1; needs 2, that of the call"),
    ):
        with pytest.raises(ValueError, match=f"mask_mod: got a BlockMask of {name}"):
            jax_flash.attention(query, query, query, mask_mod=mask)
