"""A mask of keys alone on the kernels in interpret mode, beside float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from jax_flash import kernel_operands
from pallas_kernels import defaults, key_masks
from pallas_kernels.bit_words import WORD
from tests.support.cases import long, slow
from tests.support.interpret import interpret_mode
from tests.support.kernel_calls import (
    check,
    check_that_rows_alone_do_not_count,
    check_vmap_over_options,
    few_thread_blocks,
    inputs,
)


@pytest.fixture(autouse=True)
def tiles_are_enough(monkeypatch):
    """Few tiles go another way, for speed alone."""
    monkeypatch.setattr(kernel_operands, "SM_COUNT", 0)


def _mask(kind: str, S: int, batch: int = 2) -> np.ndarray:
    """bool `[batch, S]`; the last entry differs from the others."""
    key, entry = np.arange(S), np.arange(batch)[:, None]
    rng = np.random.default_rng(S)
    masks = {
        "right": key < S - 70 - 90 * entry,
        "left": key >= 70 + 65 * entry,
        "both": (key >= 20) & (key < S - 30 - 60 * entry),
        "holes": rng.random((batch, S)) < 0.4,
        "blocks": (key // 64 + entry) % 3 == 1,
        "one": key == 40 + (S - 80) * entry,
        "none": (key < 100) & (entry == 0),
        "all": np.ones((batch, S), bool),
    }
    return np.broadcast_to(masks[kind], (batch, S))


KINDS = ["right", "left", "both", "holes", "blocks", "one", "none", "all"]


@pytest.mark.parametrize("block_kv", [64, 128])
@pytest.mark.parametrize("S", [90, 256, 700])
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_batch_entries(kind, S, block_kv):
    """Those with a key that counts, and what lies between; steps without a mask are whole."""
    mask = _mask(kind, S)
    words = key_masks.words_of(jnp.asarray(mask)[:, None, None], 2)
    found = key_masks.KeyBlocks.of_words(words, block_kv)
    blocks = -(-S // block_kv)
    for entry in range(2):
        counts = [mask[entry, n * block_kv : (n + 1) * block_kv].sum() for n in range(blocks)]
        are_whole = [count == min(block_kv, S - n * block_kv) for n, count in enumerate(counts)]
        seen = np.flatnonzero(counts) if any(counts) else np.array([0])
        end, count = int(found.end(entry)), int(found.count(entry))
        assert (end, count) == (seen[-1] + 1, seen[-1] + 1 - seen[0])
        unmasked = max(1, int(found.unmasked(entry, words.shape[1] * WORD // block_kv)))
        assert all(are_whole[end - unmasked : end - 1])
        others = are_whole[end - count : end - 1]
        if kind != "holes" and all(others[1:]) and any(counts):  # cut at ends alone
            assert unmasked == max(1, count - (not all(others)))


@pytest.mark.parametrize(
    "words", [(-1, -1), (0, 0), (1, 0), (0, -(2**31)), (-1, 2**31 - 1), (-1, 0)]
)
def test_what_counts_of_64_keys(words):
    count = sum(bin(word % 2**32).count("1") for word in words)
    got = int(key_masks.counting(tuple(map(jnp.int32, words))))
    assert got == {0: 0, 64: 64}.get(count, 1)


@pytest.mark.fast_cases("right-130-200-2-1-64-bfloat16")
@pytest.mark.parametrize(
    ("kind", "T", "S", "N", "K", "H", "dtype"),
    [
        ("right", 130, 200, 2, 1, 64, jnp.bfloat16),
        long("holes", 70, 200, 1, 1, 128, jnp.float16),
        long("left", 130, 300, 1, 1, 64, jnp.bfloat16),
        long("none", 70, 300, 2, 2, 64, jnp.bfloat16),
        ("both", 70, 330, 2, 1, 128, jnp.bfloat16),
        ("blocks", 70, 330, 1, 1, 72, jnp.bfloat16),
        ("one", 130, 264, 1, 1, 64, jnp.float16),
        ("none", 40, 90, 1, 1, 128, jnp.bfloat16),
        ("holes", 200, 100, 1, 1, 64, jnp.bfloat16),
        ("all", 70, 264, 1, 1, 40, jnp.bfloat16),
    ],
)
def test_in_interpret_mode(kind, T, S, N, K, H, dtype):
    arrays = inputs(2, T, S, N, K, H, dtype)
    with interpret_mode():
        check(arrays, mask=jnp.asarray(_mask(kind, S))[:, None, None])


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "T", "S", "H"),
    [
        ("holes", 200, 264, 64),
        slow("none", 130, 200, 64),
        ("left", 70, 330, 128),
        slow("none", 40, 80, 64),
        slow("blocks", 130, 330, 64),
    ],
)
def test_what_does_not_count_may_be_anything(kind, T, S, H):
    mask = _mask(kind, S)
    arrays = inputs(2, T, S, 2, 1, H, jnp.bfloat16)
    attention = functools.partial(
        jax_flash.attention,
        mask=jnp.asarray(mask)[:, None, None],
        return_residual=True,
        implementation="mosaic_gpu",
    )
    no_query = jnp.broadcast_to(jnp.asarray(~mask.any(1))[:, None], (2, T))
    for poison in (jnp.nan, -jnp.inf):
        check_that_rows_alone_do_not_count(attention, arrays, no_query, jnp.asarray(~mask), poison)


def _bias(shape: tuple[int, ...], dtype=jnp.bfloat16) -> jax.Array:
    return jax.random.normal(jax.random.key(7), shape, dtype)


@pytest.mark.long
@pytest.mark.fast_cases("holes-130-264-2-64-pairs", "left-70-328-1-128-pairs")
@pytest.mark.parametrize(
    ("kind", "T", "S", "K", "H", "of"),
    [
        ("holes", 130, 264, 2, 64, "pairs"),
        ("left", 70, 328, 1, 128, "pairs"),
        ("right", 200, 256, 2, 32, "pairs"),
        slow("blocks", 70, 200, 1, 72, "pairs"),
        ("none", 130, 200, 2, 64, "keys"),
        slow("one", 70, 264, 1, 64, "queries"),
        slow("all", 70, 128, 2, 64, "pairs"),
    ],
)
def test_beside_a_bias_hidden_keys_may_be_anything(kind, T, S, K, H, of):
    """In forward and backward; the forward reads the bias by TMA where S is a multiple of 8."""
    arrays = inputs(2, T, S, 2, K, H, jnp.bfloat16)
    mask = jnp.asarray(_mask(kind, S))
    shape = {"pairs": (1, 2, T, S), "keys": (2, 1, 1, S), "queries": (1, 2, T, 1)}[of]
    options = dict(mask=mask[:, None, None], bias=_bias(shape))
    with interpret_mode():
        check(arrays, **options)
    attention = functools.partial(
        jax_flash.attention, return_residual=True, implementation="mosaic_gpu", **options
    )
    no_query = jnp.broadcast_to(~mask.any(1)[:, None], (2, T))
    check_that_rows_alone_do_not_count(attention, arrays, no_query, ~mask, jnp.nan)


@pytest.mark.long
@pytest.mark.parametrize("timed", defaults.TIMED_TILED_BIAS_64[1:], ids=["three", "four"])
def test_beside_a_bias_in_tiles_of_more_consumers(monkeypatch, timed):
    monkeypatch.setattr(defaults, "TIMED_TILED_BIAS_64", (timed,))
    S = 264
    arrays = inputs(2, 200, S, 2, 2, 32, jnp.bfloat16)
    mask = jnp.asarray(_mask("holes", S))[:, None, None]
    with interpret_mode():
        check(arrays, mask=mask, bias=_bias((1, 2, 200, S)))


@pytest.mark.long
def test_beside_a_bias_gradients_of_hidden_keys_are_zero_whatever_a_query_is():
    query, key, value, dout, _ = inputs(2, 70, 136, 2, 1, 64, jnp.bfloat16)
    mask = jnp.asarray(_mask("left", 136))
    attention = functools.partial(
        jax_flash.attention,
        mask=mask[:, None, None],
        bias=_bias((1, 2, 70, 136)),
        implementation="mosaic_gpu",
    )
    with interpret_mode():
        _, vjp = jax.vjp(attention, query.at[0, 3].set(jnp.nan), key, value)
        _, *of_keys = vjp(dout.at[0, 5].set(jnp.inf))
    for gradient in of_keys:
        assert not (gradient[~mask] != 0).any()
        assert jnp.isnan(gradient[mask]).any()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["left", "holes"])
@pytest.mark.parametrize("options", [dict(), dict(sinks=jnp.array([3.0, 1.0]))])
def test_thread_blocks_with_many_tiles(kind, options):
    """Also in a second round, for rows whose maxima jump."""
    query, key, *rest = inputs(2, 200, 530, 2, 1, 64, jnp.bfloat16)
    arrays = (query, key.at[:, :200].multiply(40), *rest)
    mask = jnp.asarray(_mask(kind, 530))[:, None, None]
    with interpret_mode():
        check(arrays, mask=mask, config=few_thread_blocks(64, 1), **options)


@pytest.mark.long
def test_vmap_over_masks():
    masks = jnp.asarray(np.random.default_rng(0).random((3, 1, 1, 1, 48)) < [[[[[0.5]]]]] * 3)
    attention = functools.partial(jax_flash.attention, implementation="mosaic_gpu")
    losses = check_vmap_over_options(attention, mask=masks)
    assert abs(losses[0] - losses[2]) > 1


@pytest.mark.parametrize("batch", [1, 2])
def test_no_operand_is_copied(batch):
    """Neither forward nor backward; where gradients are deterministic, some are."""
    query = jnp.zeros((2, 40, 3, 64), jnp.bfloat16)
    mask = jnp.ones((batch, 1, 1, 40), bool)

    def selects(of=lambda function: function, **options):
        attention = functools.partial(
            jax_flash.attention, mask=mask, implementation="mosaic_gpu", **options
        )
        text = str(jax.make_jaxpr(of(attention))(query, query, query))
        return text.count("bf16[2,40,3,64] = select_n")

    def gradients(attention):
        return jax.grad(lambda *arrays: attention(*arrays).astype(jnp.float32).sum(), (0, 1, 2))

    assert selects() == selects(gradients) == 0
    assert selects(gradients, deterministic=True) > 0


@pytest.mark.parametrize("options", [{}, {"logits_soft_cap": 20.0}], ids=["plain", "cap"])
def test_no_operand_of_the_forward_is_copied_beside_a_bias(options):
    """The backward copies them, and so does the forward beside more than a bias."""
    query = jnp.zeros((2, 40, 3, 64), jnp.bfloat16)
    mask, bias = jnp.ones((2, 1, 1, 40), bool), jnp.zeros((1, 3, 40, 40), jnp.bfloat16)
    attention = functools.partial(
        jax_flash.attention, mask=mask, bias=bias, implementation="mosaic_gpu", **options
    )
    text = str(jax.make_jaxpr(attention)(query, query, query))
    assert ("bf16[2,40,3,64] = select_n" in text) == bool(options)


def test_few_tiles_share_keys_out(monkeypatch):
    """Which kernels that pick keys cannot."""
    monkeypatch.undo()
    assert kernel_operands.SM_COUNT > 100
    query, key = jnp.zeros((1, 64, 2, 64), jnp.bfloat16), jnp.zeros((1, 2048, 2, 64), jnp.bfloat16)
    mask = jnp.ones((1, 1, 1, 2048), bool)
    call = functools.partial(jax_flash.attention, mask=mask, implementation="mosaic_gpu")
    few = str(jax.make_jaxpr(call)(query, key, key))
    many = str(jax.make_jaxpr(call)(jnp.tile(query, (1, 80, 1, 1)), key, key))
    is_zeroed = "bf16[1,2048,2,64] = select_n"
    assert is_zeroed in few and is_zeroed not in many
