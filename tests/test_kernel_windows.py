"""Sliding windows on the kernels in interpret mode, with race detection, beside float64."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from pallas_kernels import defaults
from pallas_kernels.backward_query_masks import key_blocks
from pallas_kernels.forward_tiles import Tiles
from pallas_kernels.key_tiles import KeyTiles
from pallas_kernels.key_tiles_dealing import Listed
from pallas_kernels.key_tiles_walk import Walk
from pallas_kernels.ptx.barriers import BlockVote
from tests.support.cases import long, slow
from tests.support.interpret import interpret_mode
from tests.support.kernel_calls import (
    check,
    check_that_keys_do_not_count,
    few_thread_blocks,
    inputs,
    problem,
)
from tests.support.key_tiles import check_query_blocks
from tests.support.nonzero import assert_none_is_zero

FAR = 10**9  # a side of a window that hides nothing


@pytest.mark.parametrize(
    ("T", "S", "N", "K", "H", "dtype", "options"),
    [
        # Smaller than a tile, as large, and larger.
        long(190, 190, 1, 1, 64, jnp.bfloat16, dict(is_causal=True, local_window_size=(40, 0))),
        slow(150, 260, 1, 1, 64, jnp.bfloat16, dict(local_window_size=(128, 128), query_offset=9)),
        (400, 400, 1, 1, 128, jnp.bfloat16, dict(is_causal=True, local_window_size=(280, 9))),
        # One side.
        slow(150, 256, 1, 1, 64, jnp.float16, dict(local_window_size=(0, 60))),
        long(101, 256, 1, 1, 128, jnp.bfloat16, dict(local_window_size=(60, FAR))),
        # Whole tiles hidden, T < S, T > S, offsets.
        slow(67, 300, 2, 1, 128, jnp.bfloat16, dict(local_window_size=(20, 10), query_offset=140)),
        long(330, 70, 1, 1, 64, jnp.float16, dict(local_window_size=(64, 30), query_offset=-170)),
        slow(70, 300, 1, 1, 256, jnp.bfloat16, dict(local_window_size=(150, 40), query_offset=110)),
        slow(64, 64, 1, 1, 64, jnp.bfloat16, dict(local_window_size=(3, 3), query_offset=FAR)),
    ],
)
def test_windows_in_interpret_mode(T, S, N, K, H, dtype, options):
    with interpret_mode():
        check(inputs(1, T, S, N, K, H, dtype), **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("H", "thread_blocks", "options"),
    [
        (128, 2, dict(local_window_size=(50, 30), query_offset=-60)),
        slow(64, 1, dict(is_causal=True, local_window_size=(90, 0))),
        slow(256, 1, dict(is_causal=True, local_window_size=(130, 0), query_offset=-30)),
    ],
)
def test_a_thread_block_walks_many_tiles(H, thread_blocks, options):
    arrays = inputs(1, 150, 210, 2, 1, H, jnp.bfloat16)
    with interpret_mode():
        check(arrays, **options, config=few_thread_blocks(H, thread_blocks))


@pytest.mark.slow
@pytest.mark.parametrize("H", [64, slow(256)])
def test_deterministic_gradients(H):
    arrays = inputs(1, 150, 200, 2, 1, H, jnp.bfloat16)
    options = dict(local_window_size=(70, 15), query_offset=30)
    with interpret_mode():
        check(arrays, **options, deterministic=True)


@pytest.mark.long
@pytest.mark.parametrize("jump", [1, 60])
def test_maxima_that_grow_and_jump_towards_the_far_edge(jump):
    """With a jump, rows work with their masks a second time, and look for maxima in every step."""
    query, key, *rest = inputs(1, 64, 512, 1, 1, 64, jnp.bfloat16)
    growth = jnp.repeat(jnp.array([8.0 * jump, 4.0, 2.0, 1.0], jnp.bfloat16), 128)
    arrays = (query, key * growth[:, None, None], *rest)
    with interpret_mode():
        check(arrays, local_window_size=(380, 10), query_offset=440)


def test_rows_beyond_the_last_query_ask_for_no_second_round(monkeypatch):
    """Those of the first tile see other keys than its queries: none in their first block."""
    query, key, value, _, _ = inputs(1, 199, 512, 1, 1, 64, jnp.bfloat16)  # as in no other test
    attention = functools.partial(
        jax_flash.attention,
        is_causal=True,
        local_window_size=(260, 0),
        query_offset=300,
        implementation="mosaic_gpu",
        config=defaults.default(64),  # three consumers, of whom one has no queries
    )
    votes = []
    real = BlockVote.any

    def listening(self, seen, warpgroup):
        vote = real(self, seen, warpgroup)
        jax.debug.callback(votes.append, vote)
        return vote

    def any_second_round(key) -> bool:
        votes.clear()
        with interpret_mode():
            jax.block_until_ready(attention(query, key, value))
            jax.effects_barrier()
        assert votes
        return any(votes)

    monkeypatch.setattr(BlockVote, "any", listening)
    assert not any_second_round(key)
    assert any_second_round(key.at[:, 100:200].multiply(60))


@pytest.mark.long
@pytest.mark.fast_cases("128-True-nan")
@pytest.mark.parametrize("poison", [jnp.nan, jnp.inf])
@pytest.mark.parametrize(("H", "deterministic"), [(64, False), (128, True), (256, False)])
def test_rows_that_see_nothing_at_either_end_do_not_count(H, deterministic, poison):
    query, key, value, dout, dlse = inputs(1, 200, 60, 1, 1, H, jnp.bfloat16)
    attention = functools.partial(
        jax_flash.attention,
        local_window_size=(30, 20),
        query_offset=-70,
        return_residual=True,
        implementation="mosaic_gpu",
        deterministic=deterministic,
    )
    unseeing = np.r_[:50, 160:200]  # i - 70 + 20 < 0, and i - 70 - 30 >= 60

    def results(query, dout, dlse):
        results, vjp = jax.vjp(attention, query, key, value)
        return *results, *vjp((dout, dlse))

    with interpret_mode():
        clean = results(query, dout, dlse)
        poisoned = results(*(x.at[:, unseeing].set(poison) for x in (query, dout, dlse)))
    out, lse, *gradients = clean
    chex.assert_trees_all_equal(np.isneginf(lse[0, :, 0]), np.isin(np.arange(200), unseeing))
    assert not out[:, unseeing].any() and not gradients[0][:, unseeing].any()
    chex.assert_tree_all_finite(gradients)
    assert_none_is_zero(clean)
    chex.assert_trees_all_equal(poisoned, clean)


@pytest.mark.long
@pytest.mark.parametrize("H", [64, slow(256)])
def test_keys_that_no_query_sees_do_not_count(H):
    options = dict(local_window_size=(20, 15), query_offset=110)
    check_that_keys_do_not_count(300, H, np.r_[:90, 195:300], **options)


def test_bounds_that_hide_nothing_are_none():
    """So that calls share code with plain ones."""
    query = jax.ShapeDtypeStruct((1, 100, 1, 64), jnp.bfloat16)
    key = jax.ShapeDtypeStruct((1, 80, 1, 64), jnp.bfloat16)

    def tables(**options):
        attention = functools.partial(jax_flash.attention, implementation="mosaic_gpu", **options)
        return str(jax.make_jaxpr(attention)(query, key, key))

    full, causal = tables(), tables(is_causal=True)
    assert full != causal
    assert tables(local_window_size=(99, 79)) == full
    assert tables(local_window_size=(49, 129), query_offset=-50) == full
    assert tables(local_window_size=(99, 5), is_causal=True) == causal
    assert tables(local_window_size=(98, 0)) != causal
    assert tables(local_window_size=(99, 78)) != full


WINDOWS = [
    (None, None),
    (None, 0),
    (None, -37),
    # Where a block begins with the first query, or ends with the first key, that counts.
    (None, 1),
    (None, 127),
    (-127, 1),
    (None, 400),
    (-40, 0),
    (-300, 0),
    (-64, 64),
    (-1, None),
    (-270, None),
    (30, 90),
    (-500, -380),
    (90, 90),
    (520, 530),
]


def visible(T, S, lowest, highest):
    distance = np.arange(S) - np.arange(T)[:, None]
    low, high = (-FAR if lowest is None else lowest), (FAR if highest is None else highest)
    return (low <= distance) & (distance <= high)


@pytest.mark.parametrize(
    ("T", "lowest", "shift"),
    [(1024, None, 0), (960, None, 64), (960, -128, 0), (960, -64, 64), (960, -900, 64)],
)
def test_tiles_are_not_shifted_where_they_see_more_blocks_so(T, lowest, shift):
    """Of 128 rows, by 64: with a window of one block of 128 keys each sees three for two."""
    p = problem(T, T, lowest=lowest, highest=0)
    assert Tiles(p, defaults.FORWARD[128]).shift == shift


@pytest.mark.parametrize(("lowest", "highest"), WINDOWS)
@pytest.mark.parametrize(("T", "S"), [(300, 300), (1, 77), (513, 100), (130, 520)])
@pytest.mark.parametrize("width", [64, 128])
def test_key_blocks_of_query_tiles(width, T, S, lowest, highest):
    """Blocks left out are invisible to all rows, those without a mask visible to all.

    And where a step is not exact, each row has seen a key in an exact step before.
    """
    tiles = Tiles(problem(T, S, lowest=lowest, highest=highest), defaults.FORWARD[width])
    block_q, block_kv = tiles.config.block_q, tiles.config.block_kv
    seen = visible(T, S, lowest, highest)
    for tile, row in enumerate(tiles.key_blocks()):
        first_row = tile * block_q - tiles.shift
        rows = seen[max(first_row, 0) : first_row + block_q]
        assert rows.shape[0]
        blocks, exact = row[:2]
        near, end = (blocks, blocks) if lowest is None else row[2:]
        assert 0 <= exact <= near <= blocks
        assert 1 <= blocks <= end
        assert not rows[:, end * block_kv :].any()
        assert not rows[:, : (end - blocks) * block_kv].any()
        unmasked = slice((end - near) * block_kv, (end - exact) * block_kv)
        if exact < near:
            assert rows[:, unmasked].all()
            assert unmasked.stop <= S
        if exact < blocks:
            assert rows[:, (end - max(exact, 1)) * block_kv :].any(axis=1).all()
        elif lowest is not None and rows.any(axis=1).all():
            last_of_first = np.flatnonzero(rows[0])[-1]  # no step is exact for nothing
            assert last_of_first // block_kv == end - max(exact, 1)
        far = slice((end - blocks) * block_kv, (end - near) * block_kv)
        assert visible(T, S, None, highest)[max(first_row, 0) : first_row + block_q, far].all()


@pytest.mark.parametrize(("lowest", "highest"), WINDOWS)
@pytest.mark.parametrize(("T", "S"), [(300, 300), (1, 77), (513, 100), (130, 520)])
@pytest.mark.parametrize(("block_kv", "block_q"), [(128, 128), (128, 64), long(64, 64)])
def test_query_blocks_of_key_tiles(block_kv, block_q, T, S, lowest, highest):
    """Blocks left out see no key of a tile, those without a mask all keys of a consumer."""
    tiles = KeyTiles(problem(T, S, lowest=lowest, highest=highest), block_kv, block_q, row_bytes=1)
    schedule = np.array([[tiles.per_head, *range(tiles.per_head)]])  # of the first head
    blocks = tiles.seeing_blocks()
    walk = Walk(tiles, Listed(jnp.asarray(schedule), 0), jnp.asarray(blocks))
    seen = visible(T, S, lowest, highest)
    for tile, (first, end) in enumerate(blocks.T):
        keys = seen[:, tile * block_kv : (tile + 1) * block_kv]
        assert walk.steps(tile) == (end - first) * tiles.problem.group
        check_query_blocks(walk, jnp.int32(tile), tile, keys, exact=True)


@pytest.mark.parametrize(("lowest", "highest"), WINDOWS)
@pytest.mark.parametrize(("T", "S"), [(300, 300), (1, 77), (513, 100), (130, 520)])
@pytest.mark.parametrize("rows", [64, 128])
def test_key_blocks_of_query_rows(rows, T, S, lowest, highest):
    """Blocks left out are invisible to all rows, those without a mask visible to all."""
    first_rows = np.arange(0, -(-T // 128) * 128, rows)
    described = problem(T, S, lowest=lowest, highest=highest)
    blocks = key_blocks(described, 64, first_rows, rows, np)
    seen = visible(T, S, lowest, highest)
    for first_row, *row in zip(first_rows, *np.broadcast_arrays(*blocks), strict=True):
        first, end, first_unmasked, end_unmasked = row
        own = seen[first_row : first_row + rows]
        assert 0 <= first <= first_unmasked <= end_unmasked <= end
        assert not own[:, end * 64 :].any()
        assert not own[:, : first * 64].any()
        assert own[:, first_unmasked * 64 : end_unmasked * 64].all()
        assert end_unmasked * 64 <= S or first_unmasked == end_unmasked


@pytest.mark.parametrize(("lowest", "highest"), WINDOWS)
@pytest.mark.parametrize(("T", "S"), [(300, 300), (1, 77), (513, 100), (130, 520)])
def test_what_counts_of_queries_and_keys(T, S, lowest, highest):
    seen = visible(T, S, lowest, highest)
    described = problem(T, S, lowest=lowest, highest=highest)
    np.testing.assert_array_equal(np.arange(T)[described.seeing_queries], seen.any(1).nonzero()[0])
    np.testing.assert_array_equal(np.arange(S)[described.seen_keys], seen.any(0).nonzero()[0])


def test_a_lowest_key_above_the_highest_is_refused():
    with pytest.raises(ValueError, match="lowest: got 3, needs at most highest, 2"):
        problem(10, 10, lowest=3, highest=2)
