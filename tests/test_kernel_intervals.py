"""Tables for intervals that are known only at run time, beside the definition of visibility."""

import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash.masks import Visibility
from pallas_kernels import config, intervals
from pallas_kernels.backward_query import _key_blocks_of
from pallas_kernels.forward import Tiles
from pallas_kernels.key_tiles import KeyTiles, Walk

BATCH = 3
VISIBILITIES = {
    "key lengths": dict(key_value_seq_lengths=[0, 128, 77]),
    "query lengths": dict(query_seq_lengths=[64, 10**6, 0]),
    "both": dict(query_seq_lengths=[190, 1, 128], key_value_seq_lengths=[1, 64, 10**6]),
    "offsets": dict(is_causal=True, query_offset=[-90, 0, 64]),
    "causal": dict(is_causal=True, key_value_seq_lengths=[200, 5, 128]),
    "window": dict(window=(64, 20), query_offset=[-300, 30, 500]),
    "all": dict(
        is_causal=True,
        window=(150, 0),
        query_offset=[100, -50, 3],
        query_seq_lengths=[250, 300, 129],
        key_value_seq_lengths=[300, 40, 256],
    ),
}
SHAPES = [(300, 300), (1, 77), (513, 100), (130, 520)]


def every_case(test):
    """Parametrises a test of `T`, `S` and `seen`."""
    test = pytest.mark.parametrize("kind", [*VISIBILITIES, "any"])(test)
    return pytest.mark.parametrize(("T", "S"), SHAPES)(test)


@pytest.fixture
def seen(T, S, kind) -> np.ndarray:
    """`[B, 2, T]`, by the definition of visibility; or at random, also nothing here and there."""
    if kind == "any":
        bounds = np.random.default_rng(T + S).integers(0, S + 1, (BATCH, 2, T))
        return np.sort(bounds, axis=-1).astype(np.int32)
    bounds = Visibility(**as_arrays(VISIBILITIES[kind])).row_intervals(T, S)
    return np.stack([np.broadcast_to(x, (BATCH, T)) for x in bounds], axis=1)


def as_arrays(options):
    return {k: jnp.array(v) if isinstance(v, list) else v for k, v in options.items()}


def visible(seen: np.ndarray, S) -> np.ndarray:
    """`[B, T, S]`."""
    first, end = seen[:, :, :, None].swapaxes(0, 1)
    return (first <= np.arange(S)) & (np.arange(S) < end)


def dynamic(T, S, N=4, K=2):
    return config.Problem(
        BATCH, T, S, N, K, 128, np.dtype(jnp.bfloat16), 1.0, None, None, dynamic=True
    )


@every_case
def test_queries_of_each_key(T, S, seen):
    seeing = intervals.of_keys(jnp.asarray(seen), S)
    assert seeing.shape == (BATCH, 2, S) and seeing.dtype == jnp.int32
    np.testing.assert_array_equal(visible(np.asarray(seeing), T).swapaxes(1, 2), visible(seen, S))
    assert (np.diff(seeing, axis=-1) >= 0).all()


@every_case
def test_what_tiles_of_rows_reach(T, S, seen):
    every = visible(seen, S)
    for count_empty in (False, True):
        reach = intervals.reach(jnp.asarray(seen), 64, empty_rows_count=count_empty)
        for (b, tile), end in np.ndenumerate(np.asarray(reach.end)):
            own = every[b, tile * 64 : (tile + 1) * 64]
            keys = own.any(0).nonzero()[0]
            first = int(reach.first[b, tile])
            assert (first, end) == (keys[0], keys[-1] + 1) if keys.size else first >= end
            common = own if count_empty else own[own.any(1)]
            common = common.all(0) if count_empty is False or len(own) == 64 else np.zeros(S, bool)
            between = np.zeros(S, bool)
            between[int(reach.common_first[b, tile]) : int(reach.common_end[b, tile])] = True
            np.testing.assert_array_equal(between, common)


@every_case
@pytest.mark.parametrize("width", [64, 128])
def test_key_blocks_of_query_tiles(T, S, seen, width):
    """Blocks left out are invisible to all rows, those without a mask visible to all that see any.

    And where one is without a mask, each of these has seen a key in an exact step before.
    """
    tiles = Tiles(dynamic(T, S), config.FORWARD[width])
    block_q, block_kv = tiles.config.block_q, tiles.config.block_kv
    every = visible(seen, S)
    table = np.asarray(tiles.key_blocks_of(jnp.asarray(seen)))
    assert table.shape == (BATCH, tiles.per_head, 4)
    for b, tile in np.ndindex(table.shape[:2]):
        blocks, exact, near, end = table[b, tile]
        rows = every[b, tile * block_q : (tile + 1) * block_q]
        seeing = rows[rows.any(1)]
        assert 0 <= exact <= near <= blocks
        assert 1 <= blocks <= end
        assert not rows[:, end * block_kv :].any()
        assert not rows[:, : (end - blocks) * block_kv].any()
        if exact < near:
            unmasked = slice((end - near) * block_kv, (end - exact) * block_kv)
            assert seeing[:, unmasked].all()
            assert unmasked.stop <= S or not seeing.size
            assert seeing[:, (end - max(exact, 1)) * block_kv :].any(axis=1).all()
            ends = seen[b, 1, tile * block_q : (tile + 1) * block_q][rows.any(1)]
            assert (ends >= (end - near) * block_kv).all()  # masked at their far edge alone
        else:
            assert exact == blocks
        if seeing.size:
            assert seeing[:, (end - 1) * block_kv :].any()
            assert seeing[:, (end - blocks) * block_kv :][:, :block_kv].any()
        else:
            assert blocks == 1


@every_case
@pytest.mark.parametrize(("block_kv", "block_q"), [(128, 128), (128, 64), (64, 64)])
def test_query_blocks_of_key_tiles(T, S, seen, block_kv, block_q):
    """Blocks left out see no key of a tile, those without a mask all keys of a consumer."""
    tiles = KeyTiles(dynamic(T, S), block_kv, block_q, row_bytes=1)
    seeing = intervals.of_keys(jnp.asarray(seen), S)
    seeing = jnp.pad(seeing, ((0, 0), (0, 0), (0, tiles.per_head * block_kv - S)))
    table = tiles.seeing_blocks_of(seeing)
    schedule = jnp.asarray([[tiles.count, *range(tiles.count)]])
    walk = Walk(tiles, schedule, table, 0, seeing)
    every = visible(seen, S)
    for index in range(tiles.count):
        place = tile, kv_head_of_all = walk.locate(jnp.int32(index))
        keys = every[kv_head_of_all // 2][:, int(tile) * block_kv : (int(tile) + 1) * block_kv]
        first, end = int(walk.first_block(place)), int(walk.end_block(place))
        assert 0 <= first < end <= tiles.query_blocks
        assert walk.steps(index) == (end - first) * tiles.problem.group
        assert not keys[: first * block_q].any()
        assert not keys[end * block_q :].any()
        if keys.any():
            assert keys[first * block_q :][:block_q].any()
            assert keys[(end - 1) * block_q :].any()
        else:
            assert end - first == 1
        for own in range(0, block_kv, 64):
            unmasked = int(walk.first_unmasked_block(index, own))
            until = int(walk.end_unmasked_block(index, own, unmasked))
            assert first <= unmasked <= until <= end
            if unmasked < until:
                assert keys[unmasked * block_q : until * block_q, own : own + 64].all()
                assert int(tile) * block_kv + own + 64 <= S


@every_case
@pytest.mark.parametrize("rows", [64, 128])
def test_key_blocks_of_query_rows(T, S, seen, rows):
    """Blocks left out are invisible to all, those without a mask visible to all that see any."""
    blocks = _key_blocks_of(jnp.asarray(seen), 64, rows)
    every = visible(seen, S)
    for (b, tile), end in np.ndenumerate(np.asarray(blocks.end)):
        first, _, first_unmasked, end_unmasked = (int(x[b, tile]) for x in blocks)
        own = every[b, tile * rows : (tile + 1) * rows]
        assert 0 <= first <= first_unmasked <= end_unmasked <= end
        assert not own[:, end * 64 :].any()
        assert not own[:, : first * 64].any()
        assert own[own.any(1)][:, first_unmasked * 64 : end_unmasked * 64].all()
        assert end_unmasked * 64 <= S or first_unmasked == end_unmasked
        assert own.any() == (first < end)


def test_bounds_beside_intervals_are_refused():
    with pytest.raises(ValueError, match="None where dynamic"):
        config.Problem(1, 10, 10, 1, 1, 64, np.dtype(jnp.bfloat16), 1.0, highest=0, dynamic=True)
