"""Tiles of queries whose keys are dealt out in shares, in the forward."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from pallas_kernels import config, defaults
from pallas_kernels.forward_shares import dealt_out
from pallas_kernels.forward_tiles import BLOCKS, END, EXACT, FAR, Tiles
from pallas_kernels.problem import Problem
from tests.support.cases import long, slow
from tests.support.interpret import interpret_mode
from tests.support.kernel_calls import check, inputs

WINDOW = {"local_window_size": (150, 60)}


def with_shares(H: int, shares: int | None) -> config.Config:
    """Default settings, but for the shares of the forward."""
    own = defaults.default(H)
    return dataclasses.replace(own, forward=dataclasses.replace(own.forward, shares=shares))


def tiles(B, T, S, N, K, H, lowest=None, highest=None, **options) -> Tiles:
    """In one share."""
    dtype = np.dtype(jnp.bfloat16)
    described = Problem(B, T, S, N, K, H, dtype, scale=1.0, lowest=lowest, highest=highest)
    described = dataclasses.replace(described, **options)
    return Tiles(described, defaults.for_problem(described).forward)


@pytest.mark.parametrize(
    ("T", "S", "N", "K", "H", "shares", "options"),
    [
        (70, 300, 2, 1, 64, 3, {}),
        long(140, 300, 2, 1, 40, 2, {"is_causal": True}),  # the first tile has one block
        slow(300, 300, 1, 1, 80, 3, {"is_causal": True}),
        long(140, 400, 1, 1, 128, 3, WINDOW),
        slow(140, 300, 1, 1, 128, 100, {}),
        slow(30, 200, 2, 1, 256, 3, {"is_causal": True}),
        slow(30, 200, 2, 1, 192, 2, {}),
        slow(70, 300, 2, 2, 64, 3, {"dropout_rate": 0.25}),
        long(70, 300, 2, 2, 128, 2, {"logits_soft_cap": 5.0, "dropout_rate": 0.25}),
    ],
)
def test_shares(T, S, N, K, H, shares, options):
    """The last block of keys is not whole, and the last rows are none."""
    with interpret_mode():
        arrays = inputs(1, T, S, N, K, H, jnp.bfloat16)
        check(arrays, config=with_shares(H, shares), **options)


@pytest.mark.parametrize(
    ("T", "S", "N", "K", "H", "options"),
    [
        (140, 300, 2, 1, 64, {"is_causal": True}),
        long(140, 400, 2, 1, 128, WINDOW),
        long(70, 300, 3, 3, 256, {}),
        slow(300, 300, 2, 1, 72, {"is_causal": True, "dropout_rate": 0.25}),
        slow(140, 300, 2, 2, 40, {"logits_soft_cap": 5.0}),
    ],
)
def test_thread_blocks_with_several_shares(T, S, N, K, H, options):
    """The end of a share runs under the next one's first logits, or of another tile's."""
    own = with_shares(H, 3)
    own = dataclasses.replace(own, forward=dataclasses.replace(own.forward, thread_blocks=2))
    with interpret_mode():
        check(inputs(1, T, S, N, K, H, jnp.bfloat16), config=own, **options)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["nts", slow("bs")])
def test_beside_a_mask_a_bias_and_sinks(kind):
    """Of which rows see some keys in one share alone, and a row none."""
    rng = np.random.default_rng(5)
    mask = rng.random((1, 2, 70, 300)) < 0.4
    mask[:, :, 3] = False
    mask[:, :, 5, 60:] = False
    sizes = dict(b=1, n=2, t=70, s=300)
    shape = tuple(size if axis in kind else 1 for axis, size in sizes.items())
    bias = jnp.asarray(rng.standard_normal(shape), jnp.float32)
    own = with_shares(64, 3)
    arrays = inputs(1, 70, 300, 2, 1, 64, jnp.bfloat16)
    with interpret_mode():
        check(arrays, config=own, mask=jnp.asarray(mask), bias=bias, sinks=jnp.array([0.3, -2.0]))


@pytest.mark.long
@pytest.mark.parametrize("large", [1e30, slow(3e4)])
def test_rows_far_from_0(large):
    """Where an LSE has no bits for a sum: keys alike have a weight alike, in whichever share."""
    _, _, value, d_out, _ = inputs(1, 70, 300, 1, 1, 64, jnp.bfloat16)
    query = jnp.full((1, 70, 1, 64), 1.0, jnp.bfloat16)
    key = jnp.where(jnp.arange(300)[:, None] % 3 == 0, large, -large).astype(jnp.bfloat16)
    key = jnp.broadcast_to(key[None, :, None], (1, 300, 1, 64))

    def attention(value):
        options = dict(implementation="mosaic_gpu", config=with_shares(64, 3))
        return jax_flash.attention(query, key, value, **options)

    with interpret_mode():
        out, vjp = jax.vjp(attention, value)
        (d_value,) = vjp(d_out)
    mean = np.asarray(value, np.float64)[:, ::3].mean(1, keepdims=True)
    np.testing.assert_allclose(
        np.asarray(out, np.float64), np.broadcast_to(mean, out.shape), atol=2e-2
    )
    of_each = np.asarray(d_out, np.float64).sum(1, keepdims=True) / 100
    exact = np.where(np.arange(300)[:, None, None] % 3 == 0, of_each, 0.0)
    np.testing.assert_allclose(np.asarray(d_value, np.float64), exact, atol=1e-2)


@pytest.mark.parametrize("bounds", [(None, None), (None, 0), (None, -40), (-300, 40), (-90, 500)])
@pytest.mark.parametrize("shares", [2, 3, 7])
@pytest.mark.parametrize("width", [64, 256])
def test_shares_have_each_key_block_once(bounds, shares, width):
    """In the order that the whole tile has them, with a mask where it has one."""
    whole = tiles(1, 500, 700, 1, 1, width, *bounds)
    table = whole.key_blocks()
    shared = dataclasses.replace(whole, shares=shares)
    counts = shared.rows_that_count()
    assert shared.per_head == len(shared.key_blocks()) == shares * len(table)
    for tile, needs in enumerate(table):
        end = needs[END] if len(needs) > 2 else needs[BLOCKS]
        near, exact = needs[FAR] if len(needs) > 2 else needs[BLOCKS], needs[EXACT]
        masked = np.arange(needs[BLOCKS])
        masked = (masked < exact) | (masked >= near)
        seen, with_mask = [], []
        for share in range(shares):
            number = share * len(table) + tile
            row = int(shared.first_row(jnp.int32(number), 0))
            assert row == int(whole.first_row(jnp.int32(tile), 0))
            assert int(shared.first_stored(jnp.int32(number), 0)) == share * whole.rows + row
            own = shared.key_blocks()[number]
            assert own[BLOCKS] >= 1 and own[END] >= 1
            if counts[share, row]:
                steps = np.arange(own[BLOCKS])
                seen += list(own[END] - 1 - steps)
                with_mask += list((steps < own[EXACT]) | (steps >= own[FAR]))
        assert seen == list(end - 1 - np.arange(needs[BLOCKS]))
        if bounds[0] is None:
            np.testing.assert_array_equal(with_mask, masked)
        else:  # beside a window all steps look for maxima too
            assert all(with_mask)


@pytest.mark.parametrize(
    ("sizes", "options", "expected"),
    [
        ((3, 120, 994, 1, 1, 256), {}, 8),
        ((1, 64, 8192, 8, 1, 128), {}, 16),
        ((1, 512, 32768, 8, 1, 128), {}, 4),
        ((1, 4096, 4096, 2, 2, 128), {"highest": 0}, 3),  # more shares than SMs
        ((2, 264, 12544, 55, 55, 128), {}, 2),  # two rounds and a half of tiles
        ((1, 8192, 8192, 8, 1, 128), {"highest": 0}, 1),  # tiles enough
        ((1, 300, 600, 4, 4, 128), {}, 1),  # to put shares together takes longer than the steps
        ((8, 128, 128, 12, 12, 64), {}, 1),
        ((1, 64, 8192, 8, 1, 128), {"dynamic": True}, 1),
        ((1, 64, 8192, 8, 1, 256), {"lowest": -4000}, 16),
    ],
)
def test_where_there_are_few_tiles_their_keys_are_dealt_out(sizes, options, expected):
    assert dealt_out(tiles(*sizes, **options), None).shares == expected


@pytest.mark.parametrize(("wanted", "taken"), [(1, 1), (3, 3), (16, 16), (100, 16)])
def test_there_are_as_many_shares_as_key_blocks(wanted, taken):
    assert dealt_out(tiles(3, 120, 994, 1, 1, 256), wanted).shares == taken


@pytest.mark.parametrize(("thread_blocks", "shares"), [(1, 2), (2, 4), (3, 6), (264, 16)])
def test_a_thread_block_has_twelve_shares_at_most(thread_blocks, shares):
    whole = tiles(3, 120, 994, 1, 1, 256)
    own = dataclasses.replace(whole.config, thread_blocks=thread_blocks)
    assert dealt_out(dataclasses.replace(whole, config=own), 100).shares == shares


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("B", "T", "S", "N", "K", "H", "shares", "options"),
    [
        (1, 100, 4099, 4, 2, 64, None, {}),
        (3, 120, 994, 1, 1, 256, None, {}),
        (1, 1999, 1999, 2, 1, 128, 5, {"is_causal": True}),
        (1, 197, 3001, 2, 1, 80, 7, {"is_causal": True}),
        (1, 1500, 1500, 1, 1, 64, 4, {"is_causal": True, "local_window_size": (900, 0)}),
        (2, 30, 2000, 2, 2, 192, None, {"dropout_rate": 0.25}),
        (1, 70, 3000, 2, 1, 128, None, {"logits_soft_cap": 5.0}),
        (2, 2477, 2477, 2, 2, 128, None, {"is_causal": True}),  # more shares than SMs
        (1, 4856, 4856, 2, 1, 40, None, {"is_causal": True, "dropout_rate": 0.25}),
        (3, 1888, 5888, 1, 1, 192, 2, {}),
        (3, 952, 7152, 9, 9, 64, 5, {"local_window_size": (3000, 2000)}),
    ],
)
def test_shares_on_a_gpu(B, T, S, N, K, H, shares, options):
    """As often as it is run the same to the bit."""
    arrays = inputs(B, T, S, N, K, H, jnp.bfloat16)
    own = with_shares(H, shares)
    check(arrays, config=own, **options)
    if options.get("dropout_rate"):
        return
    attention = jax.jit(
        functools.partial(
            jax_flash.attention,
            config=own,
            implementation="mosaic_gpu",
            return_residual=True,
            **options,
        )
    )
    first = attention(*arrays[:3])
    for _ in range(100):
        for one, other in zip(first, attention(*arrays[:3]), strict=True):
            np.testing.assert_array_equal(one, other)
