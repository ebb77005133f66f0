"""Tiles of keys whose queries are dealt out in shares, in the backward."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import config, defaults, key_tiles_order, scheduler
from pallas_kernels.backward_key_plan import key_tiles
from pallas_kernels.backward_plan import Plan
from pallas_kernels.config import BackwardKeyConfig, Last, Shares
from pallas_kernels.defaults import BACKWARD
from pallas_kernels.key_tiles import KeyTiles
from pallas_kernels.key_tiles_dealing import Listed
from pallas_kernels.key_tiles_shares import (
    d_logits_sections,
    gradients_of_tiles,
    in_shares,
    summed,
)
from pallas_kernels.key_tiles_walk import Walk
from pallas_kernels.mask_functions import MaskFunction
from pallas_kernels.problem import Problem
from tests.support.cases import long, slow
from tests.support.interpret import interpret_mode
from tests.support.kernel_calls import check, inputs, with_shares

IDS = jnp.arange(140)[None] // 60


@pytest.mark.parametrize(
    ("N", "K", "H", "shares", "options"),
    [
        (4, 1, 64, 2, {"is_causal": True}),
        slow(4, 2, 80, 2, {}),
        long(8, 1, 128, 8, {"is_causal": True, "deterministic": True}),
        slow(6, 2, 128, 3, {"local_window_size": (90, 40)}),
        long(4, 1, 40, 2, {"key_value_seq_lengths": jnp.array([130])}),
        long(4, 1, 40, 2, {"query_seq_lengths": jnp.array([130])}),
        slow(4, 1, 128, 2, {"query_segment_ids": IDS, "key_value_segment_ids": IDS}),
        long(4, 1, 64, 4, {"is_causal": True, "dropout_rate": 0.25}),
    ],
)
def test_shares(N, K, H, shares, options):
    """The last tile of keys, and the last block of queries, are not whole."""
    with interpret_mode():
        check(inputs(1, 140, 140, N, K, H, jnp.bfloat16), config=with_shares(H, shares), **options)


@pytest.mark.parametrize(
    ("N", "K", "H", "shares", "options"),
    [
        (2, 1, 160, 2, {"is_causal": True}),
        slow(2, 2, 256, 3, {}),
        slow(4, 2, 256, 4, {"local_window_size": (90, 40)}),
        slow(4, 1, 160, 4, {"key_value_seq_lengths": jnp.array([130])}),
        slow(4, 1, 160, 2, {"query_segment_ids": IDS, "key_value_segment_ids": IDS}),
        slow(4, 1, 160, 2, {"is_causal": True, "dropout_rate": 0.25}),
        slow(2, 1, 160, 2, {"is_causal": True, "deterministic": True}),
    ],
)
def test_shares_of_wide_heads(N, K, H, shares, options):
    with interpret_mode():
        check(inputs(1, 140, 140, N, K, H, jnp.bfloat16), config=with_shares(H, shares), **options)


@pytest.mark.parametrize(
    ("N", "K", "H", "T", "shares", "options"),
    [
        (2, 1, 64, 400, 3, {"is_causal": True}),
        slow(2, 1, 64, 400, 6, {}),
        slow(1, 1, 80, 400, 3, {"is_causal": True}),
        slow(2, 2, 128, 200, 3, {"is_causal": True, "deterministic": True}),
        slow(6, 2, 128, 270, 5, {"local_window_size": (90, 40)}),
        long(3, 1, 160, 270, 4, {"local_window_size": (90, 40)}),
        slow(2, 1, 256, 140, 5, {}),
        slow(1, 1, 256, 270, 3, {"local_window_size": (90, 40)}),
    ],
)
def test_parts_of_tiles(N, K, H, T, shares, options):
    """Steps in a row, which begin and end amid a head, or of one head alone."""
    with interpret_mode():
        arrays = inputs(1, T, 140, N, K, H, jnp.bfloat16)
        check(arrays, config=with_shares(H, shares), **options)


@pytest.mark.parametrize(
    ("N", "K", "H", "T", "S", "shares", "options"),
    [
        (2, 1, 64, 140, 300, Shares(1, 3, Last(1, 2)), {}),
        slow(2, 2, 80, 300, 300, Shares(1, 2, Last(4, 3)), {"is_causal": True}),
        long(2, 2, 128, 140, 300, Shares(1, 2, Last(1, 1)), {"deterministic": True}),
        slow(3, 1, 40, 400, 400, Shares(1, 5, Last(1, 3)), {"local_window_size": (90, 40)}),
        slow(2, 1, 72, 140, 400, Shares(1, 2, Last(2, 1)), {"is_causal": True}),
    ],
)
def test_last_tiles_alone_in_parts(N, K, H, T, S, shares, options):
    """Beside whole ones of these heads and of others, whose dK and dV leave in another way."""
    with interpret_mode():
        arrays = inputs(2, T, S, N, K, H, jnp.bfloat16)
        check(arrays, config=with_shares(H, shares), **options)


def test_sections_of_heads_end_early():
    """The last is half as large, where even ones of 9 leave more SMs without a tile."""
    tiles = key_tiles(
        problem(1, 4828, 4828, 35, 7, 256), dataclasses.replace(BACKWARD[256], shares=5)
    )
    sections = d_logits_sections(tiles, BACKWARD[256].d_logits_bytes)
    assert [len(section.kv_heads) for section in sections] == [10, 10, 10, 5]


@pytest.mark.long
def test_sections_of_shares():
    """dS' of one share at a time."""
    backward = config.BackwardKeyConfig(shares=4, d_logits_bytes=3 * 3 * 64 * 64 * 2)
    own = dataclasses.replace(defaults.default(160), backward=backward)
    with interpret_mode():
        check(inputs(1, 140, 140, 2, 1, 160, jnp.bfloat16), config=own)


def problem(B, T, S, N, K, H, is_causal=False) -> Problem:
    dtype = np.dtype(jnp.bfloat16)
    return Problem(B, T, S, N, K, H, dtype, scale=1.0, highest=0 if is_causal else None)


def dealt(described: Problem, shares: int | Shares | None = None):
    """The shares of tiles, and what is dealt out."""
    own = dataclasses.replace(BACKWARD[described.widest], shares=shares)
    if isinstance(own, BackwardKeyConfig):
        tiles = key_tiles(described, own)
    else:
        tiles = Plan(described, own).tiles
    return tiles.shares, tiles


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((1, 8192, 8192, 8, 1, 128, True), (8, 1)),  # of 64 tiles
        ((1, 656, 656, 16, 2, 64), (2, 5)),  # five steps each of 24 of four heads
        ((4, 256, 256, 28, 4, 64, True), (1, 5)),  # a group that is a prime number
        ((3, 264, 200, 32, 4, 24), (1, 5)),  # five of the 24 steps of a tile of eight heads
        ((11, 2048, 2048, 7, 1, 24, True), (1, 4)),
        ((4, 4096, 4096, 32, 8, 128, True), (1, 1)),
        ((1, 16384, 16384, 32, 8, 128, True), (4, 1)),  # which are at one head at a time then
        ((1, 256, 256, 16, 16, 64), (1, 1)),  # nothing to deal out
        ((2, 8889, 1184, 4, 1, 64), (2, 3)),  # of 80 shares of heads two for some SMs are too long
        ((2, 14080, 557, 21, 3, 192), (7, 1)),  # in two sections, of 28 and of 14 shares
        ((2, 6656, 6656, 6, 2, 192, True), (3, 1)),  # tiles of unlike length stay at one head
        ((3, 3922, 3922, 42, 6, 192, True), (7, 1)),
        ((2, 4096, 4096, 16, 4, 192), (1, 1)),
        ((3, 12288, 64, 6, 1, 256), (6, 7)),
        ((4, 4096, 4096, 8, 8, 256, True), (1, 1)),
        ((4, 2136, 2136, 16, 2, 128), (1, 32, Last(1, 4))),  # 136 tiles: four of a second round
        ((13, 1024, 1024, 12, 4, 24), (1, 6, Last(4, 5))),  # 20 of the fourth round
        ((51, 696, 696, 5, 1, 96), (1, 3, Last(7, 6))),
        ((2, 4096, 4096, 64, 8, 128, True), (2, 1)),  # eight heads of unlike tiles are too many
        ((1, 4096, 4096, 64, 4, 128, True), (4, 1)),
        ((2, 4096, 4096, 64, 8, 128), (1, 1)),
        ((7, 8440, 816, 28, 28, 128), (1, 1)),  # 52 of the eleventh
        ((4, 2136, 2136, 16, 2, 256), (4, 1)),  # no registers for both ways out of a tile
    ],
)
def test_where_there_are_few_tiles_their_queries_are_dealt_out(sizes, expected):
    assert dealt(problem(*sizes))[0] == Shares(*expected)


@pytest.mark.parametrize("width", [64, 256])
@pytest.mark.parametrize(
    ("T", "wanted", "taken"),
    [(64, 1, 1), (64, 2, 2), (64, 5, 4), (64, 6, 6), (64, 100, 12)],
)
def test_shares_come_out_even(width, T, wanted, taken):
    """Of no other number is the longest as short."""
    shares, tiles = dealt(problem(1, T, 64, 12, 1, width), wanted)
    assert shares.total == taken
    assert (tiles.problem.kv_heads, tiles.problem.group) == (shares.heads, 12 // shares.heads)


def test_tiles_that_nothing_sees_have_a_share():
    """A mask function may hide all: then lists have one block, of all heads of a group."""
    hides = MaskFunction(None, np.zeros((4, 4), np.int8))
    described = dataclasses.replace(problem(1, 200, 200, 4, 2, 64), mask_function=hides)
    assert dealt(described)[0].parts == 1


@pytest.mark.parametrize("options", [{"dynamic": True}, {"segmented": True}])
def test_blocks_known_at_run_time_have_no_parts(options):
    described = dataclasses.replace(problem(1, 4096, 64, 2, 1, 128), **options)
    assert dealt(described, 64)[0] == Shares(2, 1)
    with pytest.raises(ValueError, match=r"shares: got Shares.*, needs one part"):
        dealt(described, Shares(1, 2))


@pytest.mark.parametrize("bounds", [(None, None), (None, 0), (-300, 40)])
@pytest.mark.parametrize("parts", [2, 100])
@pytest.mark.parametrize("group", [1, 3])
def test_parts_are_the_steps_of_their_tile(bounds, parts, group):
    """Each step once, in their order, and none has more than its share of the longest tile."""
    lowest, highest = bounds
    described = problem(2, 260, 300, 3 * group, 3, 64)
    described = dataclasses.replace(described, lowest=lowest, highest=highest)
    whole = KeyTiles(described, 128, 64, row_bytes=1)
    cut = dataclasses.replace(whole, shares=Shares(1, parts))
    tile = cut.seeing_blocks()[2]
    assert 1 <= cut.steps().min() <= cut.steps().max() == -(-whole.steps().max() // parts)
    assert cut.steps_per_head == whole.steps_per_head
    assert cut.count == 6 * cut.per_head == 6 * len(tile)
    walk_over = lambda tiles: Walk(
        tiles,
        Listed(jnp.arange(-1, tiles.per_head)[None], 0),
        jnp.asarray(tiles.seeing_blocks()),
    )
    steps: list[list] = [[] for _ in range(whole.per_head)]
    for index in range(cut.per_head):
        walk = walk_over(cut)
        place = walk.locate(jnp.int32(index))
        assert walk.keys_of(place) == (0, tile[index], 0)
        assert walk.block_of_first_step(place) == walk.step_of(place, 0)[0]
        own = [walk.step_of(place, t) for t in range(int(walk.steps_of(place)))]
        steps[tile[index]] += [tuple(map(int, step)) for step in own]
    for index, (first, end) in enumerate(whole.seeing_blocks().T):
        blocks = range(int(end) - 1, int(first) - 1, -1)
        assert steps[index] == [(block, head) for head in range(group) for block in blocks]


@pytest.mark.parametrize("bounds", [(None, None), (None, 0), (-300, 40)])
@pytest.mark.parametrize(("heads", "tiles"), [(1, 1), (2, 3), (4, 2)])
@pytest.mark.parametrize("group", [1, 3])
def test_parts_of_last_tiles_are_their_steps(bounds, heads, tiles, group):
    """Each step of each tile once, of which only those of the last tiles are cut."""
    lowest, highest = bounds
    described = problem(3, 260, 300, 2 * group, 2, 64)
    described = dataclasses.replace(described, lowest=lowest, highest=highest)
    whole = KeyTiles(described, 128, 64, row_bytes=1)
    cut = in_shares(whole, Shares(1, 3, Last(heads, tiles)))
    order = key_tiles_order.order_to_draw(cut, 132)
    assert len(set(order)) == len(order) == cut.count and max(order) < cut.numbers
    np.testing.assert_array_equal(
        np.sort(key_tiles_order.schedule(cut, cut.count)[:, 1]), np.sort(order)
    )
    walk = Walk(cut, Listed(jnp.asarray(order)[None], 0), jnp.asarray(cut.seeing_blocks()))
    steps: dict[tuple[int, int], list] = {}
    stored = set()
    for number in order.tolist():
        row, head = place = cut.locate(jnp.int32(number))
        tile = int(walk.tile_of(place))
        first, end = int(cut.seeing_blocks()[3, row]), int(walk.end_step(place))
        assert end - first == walk.steps_of(place) == cut.steps()[row]
        is_whole = int(head) < 6 - heads or tile < 3 - tiles
        assert (row < cut.whole_per_head) == is_whole
        if is_whole:
            assert (row, first, end) == (tile, 0, whole.steps()[tile])
        else:
            stored.add(tuple(int(x) for x in cut.share_of(place)))
        steps.setdefault((int(head), tile), []).extend(range(first, end))
    assert stored == set(itertools.product(*map(range, cut.shares_in_place)))
    for head, tile in itertools.product(range(6), range(3)):
        assert sorted(steps[head, tile]) == list(range(whole.steps()[tile]))


@pytest.mark.parametrize(("heads", "tiles"), [(1, 1), (2, 2), (4, 2)])
def test_gradients_of_last_tiles_come_beside_others(heads, tiles):
    whole = KeyTiles(problem(3, 512, 250, 2, 2, 64), 128, 64, row_bytes=1)
    cut = in_shares(whole, Shares(1, 3, Last(heads, tiles)))
    d_key, _, shape = gradients_of_tiles(cut, 64, 40)
    rng = np.random.default_rng(0)
    both = rng.standard_normal(shape.shape, np.float32)
    gradients = [rng.standard_normal((3, 250, 2, width), np.float32) for width in (64, 40)]
    assert d_key.shape == gradients[0].shape
    expected = [x.copy() for x in gradients]
    for head in range(6 - heads, 6):
        for tile in range(2 - tiles, 2):
            parts = np.flatnonzero(cut.seeing_blocks()[2, 2:] == tile)
            of_tile = both.reshape(2, -1, 128, heads, 64)[:, parts].sum(1)[:, :, head - (6 - heads)]
            rows = slice(128 * tile, min(128 * (tile + 1), 250))
            for x, of_either in zip(expected, of_tile, strict=True):
                x[head // 2, rows, head % 2] = of_either[: rows.stop - rows.start, : x.shape[3]]
    key, value = (jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in gradients)
    found = summed(key, value, [*map(jnp.asarray, gradients), jnp.asarray(both)], cut)
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("sizes", "last_heads"),
    [
        ((16, 1024, 1024, 8, 4, 128), 16),  # of one section
        ((4, 15019, 360, 50, 50, 128), 29),  # of several, of one head each
    ],
)
def test_all_that_is_zeroed_ahead_is_of_whole_tiles(sizes, last_heads):
    whole = KeyTiles(problem(*sizes), 128, 64, row_bytes=1024)
    section, prepared = key_tiles_order.prepared(whole, 132)
    assert prepared and key_tiles_order.last_heads(whole) >= last_heads
    cut = in_shares(whole, Shares(1, 2, Last(last_heads, whole.whole_per_head)))
    own_section, of_cut = key_tiles_order.prepared(cut, 132)
    assert own_section == section and of_cut.start == prepared.start
    heads = len(whole.kv_heads) - last_heads
    row, head = np.divmod(key_tiles_order.order_to_draw(cut, 132), cut.per_head)[::-1]
    assert (row[head < heads] < cut.per_uncut_head).all()
    assert of_cut and of_cut.stop - section <= heads


@pytest.mark.parametrize(
    ("shares", "width"),
    [
        (Shares(5), 64),
        (Shares(2, 3, Last(1, 1)), 64),
        (Shares(1, 2, Last(3, 1)), 64),
        (Shares(1, 2, Last(1, 9)), 64),
        (Shares(1, 2, Last(1, 1)), 160),
    ],
)
def test_shares_that_do_not_come_out_even(shares, width):
    with pytest.raises(ValueError, match="shares: got Shares"):
        dealt(problem(2, 500, 500, 4, 2, width), shares)


@pytest.mark.parametrize("bounds", [(None, None), (None, 0)])
def test_gradients_of_shares_are_added_up(bounds):
    lowest, highest = bounds
    whole = dataclasses.replace(problem(2, 512, 250, 6, 3, 64), lowest=lowest, highest=highest)
    own = dataclasses.replace(whole, kv_heads=6)
    tiles = KeyTiles(own, 128, 64, row_bytes=1, shares=Shares(2, 3))
    (shape,) = gradients_of_tiles(tiles, 64, 40)
    both = np.random.default_rng(0).standard_normal(shape.shape, np.float32)
    expected = np.zeros((2, 2, 256, 3, 64))
    for piece, tile in enumerate(tiles.seeing_blocks()[2]):
        rows = both[:, :, 128 * piece : 128 * (piece + 1)].reshape(2, 2, 128, 3, 2, 64)
        expected[:, :, 128 * tile : 128 * (tile + 1)] += rows.sum(4)
    key, value = (jax.ShapeDtypeStruct((2, 250, 3, width), jnp.float32) for width in (64, 40))
    found = summed(key, value, [jnp.asarray(both)], tiles)
    for x, y in zip(found, (expected[0, :, :250], expected[1, :, :250, :, :40]), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("width", [64, 256])
def test_shares_are_at_least_one(width):
    with pytest.raises(ValueError, match=r"shares: got Shares.*, needs at least 1"):
        dataclasses.replace(BACKWARD[width], shares=Shares(1, 0))
    with pytest.raises(ValueError, match="shares: got 0, needs at least 1, or None"):
        dataclasses.replace(BACKWARD[width], shares=0)


def test_time_of_a_deal_is_that_of_its_longest_list():
    costs = np.array([9.0, 7, 6, 5, 4, 3])
    table = scheduler.deal(np.arange(6), costs, 3)
    lists = [row[1 : 1 + row[0]] for row in table]
    assert scheduler.time_of_deal(costs, 3) == max(costs[x].sum() for x in lists) == 12


@pytest.mark.parametrize(
    ("sizes", "of_one_section"),
    [
        ((11, 2048, 2048, 1, 1, 64, True), 11),  # else sections would be of one head: 11 is prime
        ((3, 1840, 1840, 7, 7, 64, True), 10),  # the last one has 11
        ((4, 4096, 4096, 32, 8, 128, True), 4),  # ends no earlier in longer ones
        ((2, 65536, 65536, 2, 2, 128, True), 1),  # two heads would not stay in L2
    ],
)
def test_sections_are_longer_where_tiles_end_earlier_so(sizes, of_one_section):
    _, tiles = dealt(problem(*sizes), shares=1)
    size, _ = key_tiles_order.prepared(tiles, 132)
    assert size == of_one_section
