"""Segment ids on the kernels in interpret mode, beside float64."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from pallas_kernels import defaults, intervals, key_tiles_order, scheduler, segments
from pallas_kernels.backward_query_masks import key_blocks_of
from pallas_kernels.forward_tiles import Tiles
from pallas_kernels.key_tiles import KeyTiles
from pallas_kernels.key_tiles_dealing import Listed
from pallas_kernels.key_tiles_walk import Walk
from pallas_kernels.problem import Problem
from tests.support.cases import long, slow
from tests.support.elements import random_bias, random_mask, shape_of
from tests.support.interpret import interpret_mode
from tests.support.kernel_calls import (
    check,
    check_that_rows_alone_do_not_count,
    check_vmap_over_options,
    few_thread_blocks,
    inputs,
)
from tests.support.key_tiles import check_query_blocks
from tests.support.nonzero import assert_none_is_zero
from tests.support.segment_ids import BATCH, at_random, packed

# Ids of queries and keys, whose numbers need not be the same.
IDS = {
    "documents": (packed([100, 37, 1, 162], [300]),) * 2,
    "tiles": (packed([128, 64, 192, 128], [256, 256]),) * 2,
    "of other lengths": (packed([130, 70], [1, 199]), packed([10, 300], [200, 110])),
    "in another order": (
        packed([64, 200, 120], [90, 90, 204]),
        packed([130, 70, 200], [300, 1, 99])[:, ::-1],
    ),
    "far apart": (packed([150, 150], [70, 230]) * -(2**31),) * 2,
    "one side alone": (packed([60, 140], [199, 1]), packed([60, 200], [130, 130], first_id=1)),
    "nothing in common": (packed([200], [100, 100]), packed([250], [120, 130], first_id=5)),
    "padding": (np.where(np.arange(280) % 270 < 20, -1, packed([100, 180], [140, 140])),) * 2,
    "in order in one entry": (
        np.where(np.arange(300) < 250, packed([90, 100, 110], [60, 40, 200], first_id=1), 0)
        ^ np.array([[0], [3]], np.int32),
    )
    * 2,
    "interleaved": (np.tile(np.arange(200) % 3, (BATCH, 1)).astype(np.int32),) * 2,
    "at random": (at_random(260, (-2, 3)), at_random(150, (-1, 4), seed=1)),
    # Two stretches of whole blocks that need no mask.
    "there and back": (packed([192] * 3, [192] * 3) % 2, packed([128] * 4, [128] * 4) % 2),
    "short": (np.tile(np.arange(300) // 7, (BATCH, 1)).astype(np.int32),) * 2,
}
BOUNDS = {"all": (None, None), "causal": (None, 0), "window": (-50, 20), "nothing": (None, -1000)}
# A window has the end of causality too.
END_AT_BOTH = [slow(x) if name == "causal" else x for name, x in BOUNDS.items()]
# Bounds, whether they are known at run time only, and the width, for the size of tiles.
CASES = [
    (BOUNDS["all"], False, 64),
    slow(BOUNDS["all"], True, 128),
    slow(BOUNDS["causal"], False, 128),
    slow(BOUNDS["causal"], True, 64),
    slow(BOUNDS["window"], False, 64),
    (BOUNDS["window"], True, 128),
]
by_ids = pytest.mark.parametrize("ids", IDS.values(), ids=IDS)


def problem(ids, bounds=(None, None), dynamic=False, N=4, K=2) -> Problem:
    (B, T), (_, S) = (x.shape for x in ids)
    return Problem(
        B, T, S, N, K, 64, np.dtype(jnp.bfloat16), 1.0, *bounds, dynamic=dynamic, segmented=True
    )


def visible(ids, bounds=(None, None)) -> np.ndarray:
    """`[B, T, S]`, by the definition."""
    query_ids, key_ids = ids
    distance = np.arange(key_ids.shape[1]) - np.arange(query_ids.shape[1])[:, None]
    lowest, highest = bounds
    near = np.ones_like(distance, bool) if highest is None else distance <= highest
    far = np.ones_like(distance, bool) if lowest is None else distance >= lowest
    return (query_ids[:, :, None] == key_ids[:, None, :]) & near & far


def kept(ids, bounds) -> np.ndarray:
    """The keys `[B, 2, T]` that each query sees but for ids, known at run time."""
    (B, T), (_, S) = (x.shape for x in ids)
    return np.broadcast_to(intervals.of_bounds(*bounds, np.arange(T), S), (B, 2, T))


def blocks_of(array, size, axis):
    """A bool array in blocks of an axis, beyond whose end nothing is true."""
    array = np.moveaxis(array, axis, 0)
    array = np.pad(array, [(0, -len(array) % size)] + [(0, 0)] * (array.ndim - 1))
    return np.moveaxis(array.reshape(-1, size, *array.shape[1:]), (0, 1), (axis, axis + 1))


@pytest.mark.long
@by_ids
def test_what_tiles_have_in_common(ids):
    """Never less than there is, and no more where each document is a run of at least a tile."""
    got = segments.sharing(*map(jnp.asarray, ids), 192, 64)
    equal = visible(ids)
    some = blocks_of(blocks_of(equal, 192, 1), 64, 3)
    np.testing.assert_array_equal(np.asarray(got.some) | ~some.any((2, 4)), True)
    firsts = equal[:, ::192, ::64]
    np.testing.assert_array_equal(got.first, firsts)
    padded = [
        np.asarray(segments.padded(jnp.asarray(x), n)) for x, n in zip(ids, (192, 64), strict=True)
    ]
    every = blocks_of(blocks_of(visible(padded), 192, 1), 64, 3).all((2, 4))
    np.testing.assert_array_equal(got.all, every)
    if all((np.diff(x) >= 0).all() for x in ids):
        np.testing.assert_array_equal(np.asarray(got.some), some.any((2, 4)))


@pytest.mark.long
@pytest.mark.parametrize(
    ("documents", "length"),
    [
        ([7, -3, 2**31 - 1, 5, -(2**31), 6], 100),
        (np.random.default_rng(0).permutation(32) + 1000, 40),
        (np.random.default_rng(1).integers(-(2**31), 2**31, 40), 50),
        (np.random.default_rng(2).permutation(100) * 1000, 90),
    ],
    ids=["extremes", "in a row", "any", "of a pattern"],
)
def test_documents_of_any_ids_are_told_apart(documents, length):
    """Also those that do not rise, where tiles hold no more than a few."""
    ids = np.repeat(np.array([documents]), length, axis=1).astype(np.int32)
    got = segments.sharing(jnp.asarray(ids), jnp.asarray(ids), 64, 64)
    some = blocks_of(blocks_of(visible((ids, ids)), 64, 1), 64, 3).any((2, 4))
    np.testing.assert_array_equal(got.some, some)
    assert not some.all()


@pytest.mark.long
@by_ids
@pytest.mark.parametrize("bounds", END_AT_BOTH, ids=BOUNDS)
def test_partners(ids, bounds):
    query_ids, key_ids = map(jnp.asarray, ids)
    seen = visible(ids, bounds)
    of_queries = kept(ids, bounds)
    of_keys = intervals.of_bounds_of_keys(problem(ids, bounds))
    got = segments.has_partner(query_ids, key_ids, of_queries)
    np.testing.assert_array_equal(got, seen.any(2))
    got = segments.has_partner(key_ids, query_ids, of_keys)
    np.testing.assert_array_equal(got, seen.any(1))


@pytest.mark.long
@by_ids
@pytest.mark.parametrize("within", [None, slow(BOUNDS["causal"]), BOUNDS["window"]], ids=str)
def test_intervals_of_ids(ids, within):
    """Of rows of queries and of keys: all that have a row's id, and no others."""
    query_ids, key_ids = map(jnp.asarray, ids)
    bounds = within or (None, None)
    every, without_ids = visible(ids, bounds), visible([0 * x for x in ids], bounds)
    of_keys = intervals.of_bounds_of_keys(problem(ids, bounds))
    for rows, columns, limits, wanted, unlimited in (
        (query_ids, key_ids, kept(ids, bounds), every, without_ids),
        (key_ids, query_ids, of_keys, every.mT, without_ids.mT),
    ):
        with interpret_mode():
            found, are_sorted = segments.intervals(
                rows, columns, None if within is None else limits
            )
        exact = np.asarray(columns).astype(object)
        turned = ((exact - exact[:, :1]) % 2**32).astype(np.int64)
        np.testing.assert_array_equal(are_sorted, (np.diff(turned) >= 0).all(1))
        begin, end = np.asarray(found)[:, :, : rows.shape[1], None].swapaxes(0, 1)
        number = np.arange(columns.shape[1])
        got = (begin <= number) & (number < end)
        is_sorted = np.asarray(are_sorted)
        np.testing.assert_array_equal(got[is_sorted], wanted[is_sorted])
        if within is not None:
            np.testing.assert_array_equal(got[~is_sorted], unlimited[~is_sorted])


@pytest.mark.parametrize(
    ("ids", "wanted"),
    [
        ([3, 3, 5, 9], True),
        ([1, 1, 2, 2, 0, 0], True),
        ([5, 7, 1, 2, 4], True),
        ([5, 7, 1, 2, 5], False),
        ([1, 2, 1], False),
        ([2, 1, 0], False),
        ([-(2**31), 0, 2**31 - 1], True),
        ([2**31 - 1, -(2**31), 0], True),
        ([0, 2**31 - 1, -(2**31), -1], True),
        ([7], True),
    ],
)
def test_ids_that_lie_side_by_side(ids, wanted):
    with interpret_mode():
        _, are_sorted = segments.intervals(*[jnp.array([ids], jnp.int32)] * 2)
    assert are_sorted.tolist() == [wanted]


@pytest.mark.long
def test_steps_that_compare_ids():
    """Those of a batch entry whose ids are in no order; its first step is of a block of no keys."""
    ids = tuple(map(jnp.asarray, IDS["in order in one entry"]))
    tiles = Tiles(problem(ids, BOUNDS["causal"]), defaults.FORWARD[128])
    plain = np.asarray(tiles.key_blocks_of(None, ids))
    table = np.asarray(tiles.key_blocks_of(None, ids, jnp.array([True, False])))
    np.testing.assert_array_equal(table[0, :, :4], plain[0])
    np.testing.assert_array_equal(table[1, :, :4], np.maximum(plain[1], [0, 1, 0, 0]) + 1)
    np.testing.assert_array_equal(table[..., 4], [[0] * tiles.per_head, [1] * tiles.per_head])
    tiles = KeyTiles(problem(ids, BOUNDS["causal"]), 128, 64, row_bytes=1)
    seeing = tiles.seeing(None)
    plain = np.asarray(tiles.seeing_blocks_of(seeing, ids))
    table = np.asarray(tiles.seeing_blocks_of(seeing, ids, jnp.array([True, False])))
    np.testing.assert_array_equal(table[..., :10], plain)
    np.testing.assert_array_equal(table[:BATCH, :, 10], np.array([[0] * 3, [1] * 3]))
    np.testing.assert_array_equal(table[:, 0, 11], 0)  # no tile is before the first one
    np.testing.assert_array_equal(table[:, 1:, 11], plain[:, :-1, 1])


@pytest.mark.long
@by_ids
@pytest.mark.parametrize(("bounds", "dynamic", "width"), CASES)
def test_key_blocks_of_query_tiles(ids, bounds, dynamic, width):
    """Blocks left out are invisible to all rows, those without a mask visible to all that see any.

    And where one is without a mask, each of these has seen a key in an exact step before.
    """
    tiles = Tiles(
        problem(ids, (None, None) if dynamic else bounds, dynamic), defaults.FORWARD[width]
    )
    block_q, block_kv = tiles.config.block_q, tiles.config.block_kv
    seen = jnp.asarray(kept(ids, bounds)) if dynamic else None
    table = np.asarray(tiles.key_blocks_of(seen, tuple(map(jnp.asarray, ids))))
    every, without_ids = visible(ids, bounds), visible([0 * x for x in ids], bounds)
    S = every.shape[2]
    assert table.shape == (BATCH, tiles.per_head, 4)
    for b, tile in np.ndindex(table.shape[:2]):
        count, exact, near, end = table[b, tile]
        rows = slice(tile * block_q, (tile + 1) * block_q)
        own = every[b, rows]
        assert 0 <= exact <= near <= count
        assert 1 <= count <= end
        assert not own[:, end * block_kv :].any()
        assert not own[:, : (end - count) * block_kv].any()
        # Rows that see nothing by intervals are closed, if these are dynamic.
        counts = without_ids[0, rows].any(1) if dynamic else np.ones(len(own), bool)
        if exact < count:
            unmasked = slice((end - near) * block_kv, (end - exact) * block_kv)
            assert own[counts][:, unmasked].all()
            assert unmasked.stop <= S
            assert own[counts][:, (end - max(exact, 1)) * block_kv :].any(axis=1).all()
            far = without_ids[0, rows][counts][:, : (end - near) * block_kv]
            assert (np.diff(far.astype(int), axis=1) >= 0).all()  # nothing is behind the interval


@pytest.mark.long
@pytest.mark.parametrize("width", [64, 256])
def test_rows_that_see_themselves_need_few_exact_steps(width):
    """Of causal documents, only blocks that hold keys of the tile's own rows."""
    ids = jnp.sort(jax.random.randint(jax.random.key(0), (BATCH, 900), 0, 9))
    p = dataclasses.replace(problem((ids, ids), (None, 0)), width=width, value_width=width)
    tiles = Tiles(p, defaults.for_problem(p).forward)
    count, exact, near, end = np.moveaxis(np.asarray(tiles.key_blocks_of(None, (ids, ids))), -1, 0)
    first_row = np.arange(tiles.per_head) * tiles.config.block_q
    np.testing.assert_array_equal(exact, end - first_row // tiles.config.block_kv)
    assert (near < count).any()
    # Not where ids of rows and of their own keys differ.
    other = tiles.key_blocks_of(None, (ids, jnp.roll(ids, 1, axis=1)))
    assert (np.asarray(other)[..., 1] > exact).any()


@pytest.mark.long
@by_ids
@pytest.mark.parametrize(("bounds", "dynamic", "width"), CASES)
def test_query_blocks_of_key_tiles(ids, bounds, dynamic, width):
    """Blocks left out see no key of a tile, those without a mask all keys of a consumer."""
    block_kv, block_q = 128, 128 * 64 // width
    p = problem(ids, (None, None) if dynamic else bounds, dynamic)
    tiles = KeyTiles(p, block_kv, block_q, row_bytes=1)
    seeing = tiles.seeing(jnp.asarray(kept(ids, bounds)) if dynamic else None)
    table = tiles.seeing_blocks_of(seeing, tuple(map(jnp.asarray, ids)))
    schedule = jnp.asarray([[tiles.count, *range(tiles.count)]])
    walk = Walk(tiles, Listed(schedule, 0), table)
    every = visible(ids, bounds)
    for index in range(tiles.count):
        tile, kv_head_of_all = walk.locate(jnp.int32(index))
        if (kv_head_of_all - tile) % 2:  # heads of an entry share a table: every other tile of each
            continue
        keys = every[kv_head_of_all // 2][:, int(tile) * block_kv : (int(tile) + 1) * block_kv]
        check_query_blocks(walk, jnp.int32(index), int(tile), keys, exact=False)


@pytest.mark.long
@by_ids
@pytest.mark.parametrize("bounds", END_AT_BOTH, ids=BOUNDS)
def test_key_blocks_of_query_rows(ids, bounds):
    """Blocks left out are invisible to all, those without a mask visible to all that see any."""
    blocks = key_blocks_of(kept(ids, bounds), 64, 64, tuple(map(jnp.asarray, ids)))
    every = visible(ids, bounds)
    for (b, tile), end in np.ndenumerate(np.asarray(blocks.end)):
        first, _, first_unmasked, end_unmasked = (int(x[b, tile]) for x in blocks)
        own = every[b, tile * 64 : (tile + 1) * 64]
        assert 0 <= first <= first_unmasked <= end_unmasked <= end
        assert not own[:, end * 64 :].any()
        assert not own[:, : first * 64].any()
        assert own[own.any(1)][:, first_unmasked * 64 : end_unmasked * 64].all()
        assert end_unmasked * 64 <= every.shape[2] or first_unmasked == end_unmasked


def test_packed_documents_are_worked_on_alone():
    """The blocks of a document, and of these those with its ends, or the diagonal, with a mask."""
    ids = (packed([512, 1024, 512]),) * 2
    ids = tuple(map(jnp.asarray, ids))
    forward = Tiles(problem(ids, (None, 0)), defaults.FORWARD[128]).key_blocks_of(None, ids)
    blocks, exact, near, end = np.asarray(forward)[0].T
    first = np.repeat([0, 4, 12], [4, 8, 4])
    np.testing.assert_array_equal(end, np.arange(16) + 1)
    np.testing.assert_array_equal(end - blocks, first)
    np.testing.assert_array_equal(exact, 1)
    np.testing.assert_array_equal(near, blocks)
    tiles = KeyTiles(problem(ids, (None, 0)), 128, 128, row_bytes=1)
    table = np.asarray(tiles.seeing_blocks_of(tiles.seeing(None), ids))[0]
    tile, last = np.arange(16), np.repeat([4, 12, 16], [4, 8, 4])
    own = tile, last, tile + 1, last
    for column, wanted in enumerate((tile, last, *own, *own)):
        np.testing.assert_array_equal(table[:, column], wanted)


@pytest.mark.long
@pytest.mark.parametrize(
    ("T", "N", "K", "H", "documents"),
    [(16384, 16, 16, 128, 16), slow(32768, 32, 8, 128, 8), (16384, 32, 32, 64, 32)],
)
def test_thread_blocks_have_as_much_to_do(T, N, K, H, documents):
    """Every tile is dealt once, and drawn once, and no list has 15% more steps than the mean."""
    ids = (jnp.arange(T, dtype=jnp.int32)[None] // (T // documents),) * 2
    p = Problem(1, T, T, N, K, H, np.dtype(jnp.bfloat16), 1.0, highest=0, segmented=True)
    forward = Tiles(p, defaults.for_problem(p).forward)
    backward = KeyTiles(p, 128, defaults.BACKWARD[H].block_q, row_bytes=8 * H)
    blocks = backward.seeing_blocks_of(backward.seeing(None), ids)[:-1]
    of_backward = key_tiles_order.schedule(backward, 132)
    for tiles, schedule, heads, cost in (
        (forward, forward.schedule(132), N, forward.key_blocks_of(None, ids)[:, :, 0]),
        (backward, of_backward, K, blocks[:, :, 1] - blocks[:, :, 0]),
    ):
        table = np.asarray(scheduler.longest_first(schedule, cost, heads))
        lists = [row[1 : 1 + row[0]] for row in table]
        np.testing.assert_array_equal(
            np.sort(np.concatenate(lists)), np.arange(heads * tiles.per_head)
        )
        steps = [np.asarray(cost)[0, row % tiles.per_head].sum() for row in lists]
        assert max(steps) < 1.15 * np.mean(steps)
    drawn = scheduler.order_by_rank(key_tiles_order.order_to_draw(backward, 132), cost, K)
    np.testing.assert_array_equal(np.sort(drawn), np.arange(backward.count))


def test_tiles_are_ranked_by_cost_for_each_batch_entry():
    schedule = np.array([[4, 0, 4, 8, 9, 0], [2, 1, 11, 0, 0, 0]])
    cost = jnp.array([[5, 9, 7], [1, 2, 2]])
    table = scheduler.longest_first(schedule[None], cost, heads=2)
    # Entry 0, heads 0 and 1: tiles 1, 2, 0; entry 1, heads 2 and 3: tiles 1, 2, 0.
    np.testing.assert_array_equal(table, [[4, 1, 5, 6, 10, 1], [2, 2, 9, 1, 1, 1]])


def test_the_order_of_tickets_ranks_the_tiles_of_each_batch_entry():
    """Heads 0 and 1 of entry 0 side by side, then 2 and 3 of entry 1, the most costly first."""
    numbers = np.array([0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11])
    cost = jnp.array([[5, 9, 7], [1, 2, 2]])
    order = scheduler.order_by_rank(numbers, cost, heads=2)
    np.testing.assert_array_equal(order, [1, 4, 2, 5, 0, 3, 7, 10, 8, 11, 6, 9])


def test_tiles_that_cost_the_same_keep_their_order(monkeypatch):
    """Counted or, as where there are many, sorted."""
    cost = jnp.asarray(np.random.default_rng(0).integers(1, 9, (3, 50)) + 1.2)
    numbers = np.random.default_rng(1).permutation(3 * 2 * 50)
    rank = np.argsort(-np.asarray(cost), axis=1, stable=True)
    head, expected = numbers // 50, rank[numbers // 50 // 2, numbers % 50]
    for counted in (50, 49):
        monkeypatch.setattr(scheduler, "_COUNTED", counted)
        order = scheduler.order_by_rank(numbers, cost, heads=2)
        np.testing.assert_array_equal(order, head * 50 + expected)


@pytest.mark.parametrize("power", [0, 1, 2])
def test_the_deal_is_even_however_costs_fall(power):
    """Of 64 heads with 32 tiles each, the most costly tiles first, 4 heads at a time."""
    tile, head = scheduler.tile_order(np.zeros(32), heads=64, section=4)
    schedules = scheduler.deals_by_rank(32 * head + tile, tile, 32, 132)
    cost = jnp.asarray(np.random.default_rng(0).permuted(np.linspace(1, 33, 32) ** power)[None])
    table = np.asarray(scheduler.longest_first(schedules, cost, heads=64))
    lists = [row[1 : 1 + row[0]] for row in table]
    np.testing.assert_array_equal(np.sort(np.concatenate(lists)), np.arange(64 * 32))
    costs = [np.asarray(cost)[0, row % 32].sum() for row in lists]
    assert max(costs) < 1.1 * np.mean(costs)


def of_one_entry(kind):
    """Where a batch of more makes no difference to what is tested."""
    query_ids, key_ids = IDS[kind]
    one = query_ids[:1]
    return one, one if key_ids is query_ids else key_ids[:1]


def options_of(ids, **options):
    query_ids, key_ids = map(jnp.asarray, ids)
    if ids[0] is ids[1]:
        key_ids = query_ids
    return dict(query_segment_ids=query_ids, key_value_segment_ids=key_ids) | options


@pytest.mark.parametrize(
    ("kind", "N", "K", "H", "dtype", "options"),
    [
        ("documents", 2, 1, 64, jnp.bfloat16, dict(is_causal=True)),
        slow("documents", 1, 1, 128, jnp.float16, {}),
        slow("tiles", 1, 1, 64, jnp.bfloat16, dict(is_causal=True)),
        slow("of other lengths", 2, 2, 256, jnp.bfloat16, {}),
        slow("in another order", 1, 1, 96, jnp.bfloat16, {}),
        slow("one side alone", 2, 1, 64, jnp.float16, dict(is_causal=True, query_offset=60)),
        slow("nothing in common", 1, 1, 128, jnp.bfloat16, {}),
        slow("padding", 1, 1, 64, jnp.bfloat16, dict(local_window_size=(100, 30))),
        slow("in order in one entry", 2, 1, 64, jnp.bfloat16, dict(is_causal=True)),
        long(
            "in order in one entry", 1, 1, 128, jnp.float16, dict(key_value_seq_lengths=[290, 300])
        ),
        slow("interleaved", 1, 1, 256, jnp.float16, dict(is_causal=True)),
        slow("at random", 2, 1, 128, jnp.bfloat16, dict(local_window_size=(5, 3), query_offset=-9)),
        slow("short", 1, 1, 64, jnp.bfloat16, dict(key_value_seq_lengths=[200, 299])),
        slow(
            "documents",
            1,
            1,
            128,
            jnp.bfloat16,
            dict(is_causal=True, query_seq_lengths=[250, 0], query_offset=[3, -7]),
        ),
    ],
)
def test_in_interpret_mode(kind, N, K, H, dtype, options):
    ids = IDS[kind]
    options = {k: jnp.array(v) if isinstance(v, list) else v for k, v in options.items()}
    arrays = inputs(BATCH, ids[0].shape[1], ids[1].shape[1], N, K, H, dtype)
    with interpret_mode():
        check(arrays, **options_of(ids, **options))


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "H", "options"),
    [
        ("at random", 128, {}),
        slow("documents", 64, dict(is_causal=True)),
        slow("short", 128, dict(key_value_seq_lengths=jnp.array([150, 0]))),
    ],
)
def test_deterministic_gradients(kind, H, options):
    ids = IDS[kind] if "key_value_seq_lengths" in options else of_one_entry(kind)
    arrays = inputs(len(ids[0]), ids[0].shape[1], ids[1].shape[1], 1, 1, H, jnp.bfloat16)
    with interpret_mode():
        check(arrays, **options_of(ids, **options), deterministic=True)


@pytest.mark.parametrize(
    ("kind", "H", "deterministic", "options"),
    [
        long("documents", 64, False, dict(is_causal=True)),
        slow("documents", 128, True, dict(key_value_seq_lengths=jnp.array([150, 0]))),
        slow("of other lengths", 128, False, dict(local_window_size=(100, 30))),
        slow("interleaved", 64, True, {}),
        slow("at random", 256, False, dict(is_causal=True)),
    ],
)
def test_soft_cap(kind, H, deterministic, options):
    """Where ids differ, the capped logits are hidden, and with them the slope of the cap."""
    ids = IDS[kind] if "key_value_seq_lengths" in options else of_one_entry(kind)
    arrays = inputs(len(ids[0]), ids[0].shape[1], ids[1].shape[1], 2, 1, H, jnp.bfloat16)
    options = options_of(ids, **options, deterministic=deterministic)
    with interpret_mode():
        check(arrays, **options, logits_soft_cap=1.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "H", "mask", "bias", "options"),
    [
        slow("documents", 64, None, "nts", dict(is_causal=True)),
        slow("at random", 128, "bts", "nts", dict(deterministic=True)),
        slow("one side alone", 64, None, "bs", {}),
        slow("padding", 256, None, "nts", dict(is_causal=True)),  # dQ in two parts
        slow("interleaved", 128, "bs", None, dict(is_causal=True)),
        slow("of other lengths", 128, None, "nts", dict(key_value_seq_lengths=[250, 0])),
        ("short", 256, "bnts", None, dict(is_causal=True, deterministic=True)),
        slow("documents", 96, "bts", "bt", dict(local_window_size=(90, 10))),
        slow("tiles", 208, None, "bs", dict(logits_soft_cap=2.0, dropout_rate=0.5)),
        slow("at random", 256, None, None, dict(logits_soft_cap=2.0, dropout_rate=0.5)),
    ],
)
def test_beside_a_mask_and_a_bias(kind, H, mask, bias, options):
    """And what else takes registers, at widths where dQ is made in parts for it."""
    ids = IDS[kind]
    (_, T), (_, S) = (x.shape for x in ids)
    options = {k: jnp.array(v) if isinstance(v, list) else v for k, v in options.items()}
    if mask is not None:
        options["mask"] = random_mask(shape_of(mask, BATCH, 2, T, S))
    if bias is not None:
        options["bias"] = random_bias(shape_of(bias, BATCH, 2, T, S))
    arrays = inputs(BATCH, T, S, 2, 1, H, jnp.bfloat16)
    with interpret_mode():
        check(arrays, **options_of(ids, **options))


@pytest.mark.long
@pytest.mark.parametrize("H", [64, slow(256)])
def test_a_bias_may_be_nan_where_ids_differ(H):
    """In rows that see nothing too, which share tiles with others."""
    ids = IDS["one side alone"]
    arrays = inputs(BATCH, 200, 260, 1, 1, H, jnp.bfloat16)
    bias = random_bias((BATCH, 1, 200, 260))
    seen = visible(ids)
    assert not seen.any(2).all()

    def results(bias):
        run = functools.partial(attention, **options_of(ids))
        results, vjp = jax.vjp(lambda *x: run(*x[:3], bias=x[3]), *arrays[:3], bias)
        return *results, *vjp(arrays[3:])

    with interpret_mode(detect_races=False):  # which `check` does
        clean, got = results(bias), results(jnp.where(seen[:, None], bias, jnp.nan))
    chex.assert_trees_all_equal(got, clean)
    out, lse, *gradients = clean
    assert_none_is_zero(clean)
    chex.assert_tree_all_finite((out, gradients))
    np.testing.assert_array_equal(np.isneginf(lse[..., 0]), ~seen.any(2))
    assert not np.asarray(gradients[3])[~seen[:, None]].any()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "H", "thread_blocks"),
    [("tiles", 64, 1), slow("documents", 128, 2), slow("short", 256, 1)],
)
def test_a_thread_block_walks_many_tiles(kind, H, thread_blocks):
    ids = IDS[kind]
    arrays = inputs(BATCH, ids[0].shape[1], ids[1].shape[1], 2, 1, H, jnp.bfloat16)
    with interpret_mode():
        settings = few_thread_blocks(H, thread_blocks)
        check(arrays, **options_of(ids, is_causal=True), config=settings)


@pytest.mark.slow
def test_sinks():
    """Also in rows that see nothing, where they take no weight."""
    ids = IDS["one side alone"]
    arrays = inputs(BATCH, ids[0].shape[1], ids[1].shape[1], 2, 1, 64, jnp.bfloat16)
    with interpret_mode():
        check(arrays, **options_of(ids), sinks=jnp.array([3.0, 40.0]))


@pytest.mark.long
def test_maxima_that_jump():
    """A second round, in which every step compares ids."""
    query, key, *rest = inputs(1, 512, 512, 1, 1, 64, jnp.bfloat16)
    arrays = (query, key.at[:, :100].multiply(60), *rest)
    with interpret_mode():
        check(arrays, **options_of(of_one_entry("tiles")), config=few_thread_blocks(64, 1))


def attention(query, key, value, **options):
    return jax_flash.attention(
        query, key, value, **options, return_residual=True, implementation="mosaic_gpu"
    )


@pytest.mark.slow
def test_one_id_everywhere_is_as_good_as_none():
    """To the bit where the steps are the same, as they are in a full window's gradients."""
    query, key, value, dout, dlse = inputs(1, 256, 256, 1, 1, 64, jnp.bfloat16)
    ids = jnp.full((1, 256), -5)

    def results(**options):
        results, vjp = jax.vjp(functools.partial(attention, **options), query, key, value)
        return *results, *vjp((dout, dlse))

    with interpret_mode():
        with_ids = results(query_segment_ids=ids, key_value_segment_ids=ids, is_causal=True)
        without = results(is_causal=True)
    assert_none_is_zero(without)
    chex.assert_trees_all_close(with_ids, without, rtol=2**-7, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "H", "deterministic", "options", "poison"),
    [
        ("one side alone", 64, False, {}, jnp.nan),
        slow("of other lengths", 128, True, dict(is_causal=True), jnp.inf),
        slow("at random", 256, False, dict(local_window_size=(1, 0)), jnp.nan),
    ],
)
def test_what_sees_nothing_and_is_not_seen_does_not_count(kind, H, deterministic, options, poison):
    """In rows that share a tile with others that count, and blocks without a mask."""
    ids = IDS[kind]
    arrays = inputs(BATCH, ids[0].shape[1], ids[1].shape[1], 1, 1, H, jnp.bfloat16)
    bounds = {"at random": (-1, 0), "of other lengths": (None, 0)}.get(kind, (None, None))
    seen = visible(ids, bounds)
    no_query, no_key = ~seen.any(2), ~seen.any(1)
    run = functools.partial(attention, **options_of(ids, **options), deterministic=deterministic)
    assert no_query.any() or no_key.any()
    check_that_rows_alone_do_not_count(run, arrays, no_query, no_key, poison)


@pytest.mark.slow
def test_vmap_over_ids():
    query_ids = jnp.stack([jnp.arange(40) // 10, jnp.arange(40) % 2, jnp.full(40, 7)])[:, None]
    key_ids = jnp.stack([jnp.arange(48) // 10, jnp.arange(48) % 3, jnp.full(48, 8)])[:, None]
    losses = check_vmap_over_options(
        lambda *x, **ids: attention(*x, **ids)[0],
        query_segment_ids=query_ids,
        key_value_segment_ids=key_ids,
    )
    assert losses[2] == 0 and abs(losses[0] - losses[1]) > 1


def test_one_array_of_ids_makes_no_pass_over_the_inputs():
    """Every position sees itself, so that nothing needs to be set to zero."""
    arrays = inputs(1, 64, 64, 1, 1, 64, jnp.bfloat16)[:3]
    ids = jnp.zeros((1, 64), jnp.int32)

    def selects(key_ids, **options):
        """How many of the inputs have zeros in the place of what does not count."""
        options = dict(query_segment_ids=ids, key_value_segment_ids=key_ids, **options)
        closed = jax.make_jaxpr(functools.partial(attention, **options))(*arrays)
        (call,) = (e for e in closed.jaxpr.eqns if e.primitive.name == "custom_vjp_call")
        return sum(x not in closed.jaxpr.invars for x in call.invars[:3])

    assert selects(ids) == selects(ids, is_causal=True) == 0
    assert selects(ids + 0) == 3
    assert selects(ids, local_window_size=(5, 5), query_offset=20) == 3
    assert selects(ids, query_seq_lengths=jnp.array([50])) == 3
