"""Lengths and offsets by batch entry on the kernels in interpret mode, beside float64."""

import dataclasses
import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from jax_flash.masks import Visibility
from pallas_kernels import defaults, intervals
from pallas_kernels.backward_query_masks import key_blocks_of
from pallas_kernels.forward_tiles import Tiles
from pallas_kernels.key_tiles import KeyTiles
from pallas_kernels.key_tiles_dealing import Listed
from pallas_kernels.key_tiles_walk import Walk
from pallas_kernels.problem import Problem
from tests import oracle
from tests.support.cases import long, slow
from tests.support.interpret import interpret_mode
from tests.support.kernel_calls import (
    as_arrays,
    check,
    check_that_rows_alone_do_not_count,
    check_vmap_over_options,
    few_thread_blocks,
    inputs,
)
from tests.support.kernel_cases import BATCH as KERNEL_BATCH
from tests.support.kernel_cases import KEY_LENGTHS
from tests.support.kernel_cases import SHAPES as SHAPES_OF_CASES
from tests.support.key_tiles import check_query_blocks
from tests.support.nonzero import assert_none_is_zero

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
_CAUSAL_AND_LENGTHS = dict(is_causal=True, key_value_seq_lengths=[128, 257])


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


def visible(seen: np.ndarray, S) -> np.ndarray:
    """`[B, T, S]`."""
    first, end = seen[:, :, :, None].swapaxes(0, 1)
    return (first <= np.arange(S)) & (np.arange(S) < end)


def dynamic(T, S, N=4, K=2):
    return Problem(BATCH, T, S, N, K, 128, np.dtype(jnp.bfloat16), 1.0, None, None, dynamic=True)


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
        found = intervals.reach(jnp.asarray(seen), 64, empty_rows_count=count_empty)
        reach = type(found)(*map(np.asarray, found))
        for (b, tile), end in np.ndenumerate(reach.end):
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
    tiles = Tiles(dynamic(T, S), defaults.FORWARD[width])
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


@pytest.mark.long
@every_case
@pytest.mark.parametrize(("block_kv", "block_q"), [slow(128, 128), (128, 64), slow(64, 64)])
def test_query_blocks_of_key_tiles(T, S, seen, block_kv, block_q):
    """Blocks left out see no key of a tile, those without a mask all keys of a consumer."""
    tiles = KeyTiles(dynamic(T, S), block_kv, block_q, row_bytes=1)
    seeing = intervals.of_keys(jnp.asarray(seen), S)
    seeing = jnp.pad(seeing, ((0, 0), (0, 0), (0, tiles.per_head * block_kv - S)))
    table = tiles.seeing_blocks_of(seeing)
    schedule = jnp.asarray([[tiles.count, *range(tiles.count)]])
    walk = Walk(tiles, Listed(schedule, 0), table, (seeing,))
    every = visible(seen, S)
    for index in range(tiles.count):
        place = tile, kv_head_of_all = walk.locate(jnp.int32(index))
        if (kv_head_of_all - tile) % 2:  # heads of an entry share a table: every other tile of each
            continue
        keys = every[kv_head_of_all // 2][:, int(tile) * block_kv : (int(tile) + 1) * block_kv]
        first, end = int(walk.first_block(place)), int(walk.end_block(place))
        if keys.any():
            assert keys[first * block_q :][:block_q].any()
            assert keys[(end - 1) * block_q :].any()
        else:
            assert end - first == 1
        check_query_blocks(walk, jnp.int32(index), int(tile), keys, exact=True)


@pytest.mark.long
@pytest.mark.parametrize(("block_kv", "block_q"), [(128, 64), (64, 64)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_query_blocks_where_keys_end_at_a_length(is_causal, block_kv, block_q):
    """The same of lengths of keys alone, of which tiles know no more."""
    T, S, lengths = 200, 300, np.array([0, 70, 200 if is_causal else 256])
    described = dataclasses.replace(
        dynamic(T, S), dynamic=False, has_lengths=True, highest=0 if is_causal else None
    )
    tiles = KeyTiles(described, block_kv, block_q, row_bytes=1)
    schedule = jnp.asarray([[tiles.count, *range(tiles.count)]])
    blocks = jnp.asarray(tiles.seeing_blocks())
    walk = Walk(tiles, Listed(schedule, 0), blocks, (jnp.asarray(lengths),))
    keys = np.arange(tiles.per_head * block_kv)
    every = keys < np.minimum(lengths[:, None, None], S)
    if is_causal:
        every = every & (keys <= np.arange(T)[:, None])
    every = np.broadcast_to(every, (BATCH, T, keys.size))
    for index in range(0, tiles.count, 2):
        place = tile, kv_head_of_all = walk.locate(jnp.int32(index))
        own = every[kv_head_of_all // 2][:, int(tile) * block_kv : (int(tile) + 1) * block_kv]
        first, end = int(walk.first_block(place)), int(walk.end_block(place))
        assert not own[: first * block_q].any() and not own[end * block_q :].any()
        assert end > first
        if lengths[kv_head_of_all // 2] <= int(tile) * block_kv:
            assert end - first == 1
        check_query_blocks(walk, jnp.int32(index), int(tile), own[:, :S], exact=True)


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_all_settings_of_width_64_are_compiled_with_lengths_of_keys(mask):
    highest = 0 if mask == "causal" else None
    compiled = set()
    for shape in (shape for width, own, shape in KEY_LENGTHS if (width, own) == (64, mask)):
        T, S, N, *_ = SHAPES_OF_CASES[shape]
        dtype = np.dtype(jnp.bfloat16)
        described = Problem(KERNEL_BATCH, T, S, N, N, 64, dtype, 1.0, highest=highest)
        compiled.add(defaults.for_problem(described).forward)
    most = 4 if highest is None else 3
    assert compiled >= {x.config for x in defaults.TIMED_64 if x.config.consumers <= most}


@every_case
@pytest.mark.parametrize("rows", [64, 128])
def test_key_blocks_of_query_rows(T, S, seen, rows):
    """Blocks left out are invisible to all, those without a mask visible to all that see any."""
    found = key_blocks_of(jnp.asarray(seen), 64, rows)
    blocks = type(found)(*map(np.asarray, found))
    every = visible(seen, S)
    for (b, tile), end in np.ndenumerate(blocks.end):
        first, _, first_unmasked, end_unmasked = (int(x[b, tile]) for x in blocks)
        own = every[b, tile * rows : (tile + 1) * rows]
        assert 0 <= first <= first_unmasked <= end_unmasked <= end
        assert not own[:, end * 64 :].any()
        assert not own[:, : first * 64].any()
        assert own[own.any(1)][:, first_unmasked * 64 : end_unmasked * 64].all()
        assert end_unmasked * 64 <= S or first_unmasked == end_unmasked
        assert own.any() == (first < end)


@pytest.mark.parametrize(
    ("T", "S", "N", "K", "H", "dtype", "options"),
    [
        (200, 264, 2, 1, 64, jnp.bfloat16, dict(key_value_seq_lengths=[150, 0])),
        long(130, 300, 4, 2, 128, jnp.bfloat16, _CAUSAL_AND_LENGTHS),
        slow(70, 80, 2, 2, 64, jnp.bfloat16, dict(key_value_seq_lengths=[0, 79])),
        slow(200, 264, 2, 1, 40, jnp.float16, _CAUSAL_AND_LENGTHS),
        slow(130, 140, 2, 2, 256, jnp.bfloat16, dict(key_value_seq_lengths=[100, 0])),
        slow(200, 130, 1, 1, 128, jnp.float16, dict(query_seq_lengths=[128, 77])),
        long(130, 67, 1, 1, 256, jnp.bfloat16, dict(query_seq_lengths=[0, 130])),
        slow(67, 300, 2, 2, 64, jnp.float16, dict(is_causal=True, query_offset=[-20, 233])),
        long(
            150,
            200,
            1,
            1,
            128,
            jnp.bfloat16,
            dict(local_window_size=(50, 20), query_offset=[-60, 90]),
        ),
        slow(
            120,
            150,
            2,
            1,
            256,
            jnp.bfloat16,
            dict(is_causal=True, key_value_seq_lengths=[64, 1], query_offset=[0, -40]),
        ),
        slow(
            230,
            230,
            1,
            1,
            64,
            jnp.bfloat16,
            dict(
                is_causal=True,
                local_window_size=(90, 0),
                query_seq_lengths=[230, 140],
                key_value_seq_lengths=[99, 230],
            ),
        ),
    ],
)
def test_in_interpret_mode(T, S, N, K, H, dtype, options):
    with interpret_mode():
        check(inputs(2, T, S, N, K, H, dtype), **as_arrays(options))


@pytest.mark.long
@pytest.mark.parametrize(
    ("H", "options"),
    [
        (64, dict(query_seq_lengths=[128, 77], key_value_seq_lengths=[150, 0])),
        slow(128, dict(is_causal=True, query_offset=[-20, 90])),
        slow(128, dict(local_window_size=(70, 15), query_offset=[30, -100])),
    ],
)
def test_deterministic_gradients(H, options):
    """Also where a consumer's rows, or a whole tile, see nothing."""
    arrays = inputs(2, 150, 200, 2, 1, H, jnp.bfloat16)
    with interpret_mode():
        check(arrays, **as_arrays(options), deterministic=True)


@pytest.mark.parametrize(
    ("H", "thread_blocks", "options"),
    [
        slow(256, 1, dict(is_causal=True, key_value_seq_lengths=[100, 210])),
        long(64, 1, dict(key_value_seq_lengths=[0, 200])),
        slow(64, 1, dict(is_causal=True, query_offset=[100, -30], query_seq_lengths=[150, 90])),
        slow(128, 2, dict(local_window_size=(60, 30), key_value_seq_lengths=[0, 200])),
    ],
)
def test_a_thread_block_walks_many_tiles(H, thread_blocks, options):
    arrays = inputs(2, 150, 210, 2, 1, H, jnp.bfloat16)
    with interpret_mode():
        check(arrays, **as_arrays(options), config=few_thread_blocks(H, thread_blocks))


@pytest.mark.slow
def test_sinks():
    """Also in rows that see nothing, where they take no weight."""
    arrays = inputs(2, 150, 200, 2, 1, 64, jnp.bfloat16)
    options = as_arrays(dict(query_seq_lengths=[100, 150], key_value_seq_lengths=[140, 0]))
    with interpret_mode():
        check(arrays, **options, sinks=jnp.array([3.0, 40.0]))


@pytest.mark.parametrize(
    "options",
    [
        long(dict(key_value_seq_lengths=[500, 0], sinks=jnp.array([3.0]))),
        slow(dict(query_seq_lengths=[40, 64], key_value_seq_lengths=[500, 300])),
    ],
)
def test_maxima_that_jump_beside_rows_that_see_nothing(options):
    """A second round, in which such rows take part."""
    query, key, *rest = inputs(2, 64, 512, 1, 1, 64, jnp.bfloat16)
    arrays = (query, key.at[:, :100].multiply(60), *rest)
    with interpret_mode():
        check(arrays, **as_arrays(options), config=few_thread_blocks(64, 1))


@pytest.mark.slow
@pytest.mark.parametrize("poison", [jnp.nan, jnp.inf])
@pytest.mark.parametrize(("H", "deterministic"), [(64, False), (128, True), (256, False)])
def test_what_sees_nothing_and_is_not_seen_does_not_count(H, deterministic, poison):
    """In rows that share a tile with others that count, and blocks without a mask."""
    arrays = inputs(2, 140, 330, 1, 1, H, jnp.bfloat16)
    options = as_arrays(dict(query_seq_lengths=[75, 140], key_value_seq_lengths=[270, 0]))
    no_query = jnp.arange(140) >= jnp.array([[75], [0]])
    no_key = jnp.arange(330) >= jnp.array([[270], [0]])
    attention = functools.partial(
        jax_flash.attention,
        **options,
        return_residual=True,
        implementation="mosaic_gpu",
        deterministic=deterministic,
    )
    check_that_rows_alone_do_not_count(attention, arrays, no_query, no_key, poison)


@pytest.mark.long
@pytest.mark.fast_cases(
    "200-264-2-1-64-64-bfloat16-options0-nan",
    "200-264-2-1-64-64-bfloat16-options1-nan",
    "70-80-2-2-64-64-bfloat16-options2-nan",
)
@pytest.mark.parametrize("poison", [jnp.nan, -jnp.inf])
@pytest.mark.parametrize(
    ("T", "S", "N", "K", "H", "h", "dtype", "options"),
    [
        # Blocks cut at one end, rows that count beside others that do not, and an entry of neither.
        (
            200,
            264,
            2,
            1,
            64,
            64,
            jnp.bfloat16,
            dict(query_seq_lengths=[120, 200], key_value_seq_lengths=[150, 0]),
        ),
        # The same of lengths of keys alone; and one tile.
        (200, 264, 2, 1, 64, 64, jnp.bfloat16, dict(key_value_seq_lengths=[150, 0])),
        (70, 80, 2, 2, 64, 64, jnp.bfloat16, dict(key_value_seq_lengths=[0, 79])),
        # At both ends, beside queries that see nothing.
        (
            150,
            330,
            1,
            1,
            128,
            128,
            jnp.bfloat16,
            dict(local_window_size=(50, 20), query_offset=[-90, 140]),
        ),
        (
            200,
            420,
            2,
            1,
            64,
            64,
            jnp.float16,
            dict(
                local_window_size=(300, 10),
                query_offset=[80, 350],
                key_value_seq_lengths=[250, 400],
                query_seq_lengths=[140, 200],
            ),
        ),
        # Between blocks.
        (
            140,
            300,
            1,
            1,
            128,
            128,
            jnp.float16,
            dict(is_causal=True, query_offset=[160, 0], key_value_seq_lengths=[128, 64]),
        ),
        (130, 200, 2, 1, 256, 256, jnp.bfloat16, dict(key_value_seq_lengths=[64, 100])),
        (130, 200, 1, 1, 192, 128, jnp.bfloat16, dict(key_value_seq_lengths=[70, 200])),
        (100, 150, 1, 1, 40, 72, jnp.float16, dict(query_offset=[-40, 30], is_causal=True)),
    ],
)
def test_what_does_not_count_may_be_anything(T, S, N, K, H, h, dtype, options, poison):
    """The results are those of other numbers there, and right."""
    arrays = inputs(2, T, S, N, K, H, dtype, h=h)
    options = as_arrays(options)
    seen = oracle.visibility(2, T, S, **options)[:, 0]
    attention = functools.partial(
        jax_flash.attention, **options, return_residual=True, implementation="mosaic_gpu"
    )
    no_query, no_key = (jnp.asarray(~seen.any(axis)) for axis in (2, 1))
    assert no_key.any()
    check_that_rows_alone_do_not_count(attention, arrays, no_query, no_key, poison)
    # As compiled above; `test_in_interpret_mode` looks for races.
    with interpret_mode(detect_races=False):
        check(arrays, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("H", "more"),
    [
        (64, dict(sinks=jnp.array([3.0, 40.0]))),
        slow(64, dict(logits_soft_cap=5.0)),
        slow(128, dict(dropout_rate=0.25, dropout_key=jax.random.key(3))),
        slow(64, dict(dropout_rate=0.25, dropout_key=jax.random.key(3))),
        slow(64, dict(config=few_thread_blocks(64, 1))),
        slow(64, dict(config=few_thread_blocks(64, 1, block_kv=192))),
        slow(64, dict(config=few_thread_blocks(64, 1, query_buffers=1))),
    ],
    ids=["sinks", "cap", "dropout", "64 dropout", "many tiles", "192 keys", "one query buffer"],
)
def test_what_does_not_count_beside_other_options(H, more):
    """Also in tiles that come one after the other, and in a second round."""
    query, key, *rest = inputs(2, 200, 530, 2, 1, H, jnp.bfloat16)
    arrays = (query, key.at[:, :100].multiply(60), *rest)
    options = as_arrays(dict(query_seq_lengths=[90, 200], key_value_seq_lengths=[500, 300]))
    no_query = jnp.arange(200) >= jnp.array([[90], [200]])
    no_key = jnp.arange(530) >= jnp.array([[500], [300]])
    attention = functools.partial(
        jax_flash.attention, **options, **more, return_residual=True, implementation="mosaic_gpu"
    )
    check_that_rows_alone_do_not_count(attention, arrays, no_query, no_key, jnp.nan)


@pytest.mark.slow
@pytest.mark.parametrize("which", [0, slow(1), slow(2)])
def test_nan_in_what_counts_stays(which):
    """In all that it is a part of, be it beside rows that see nothing."""
    arrays = list(inputs(1, 70, 200, 1, 1, 64, jnp.bfloat16)[:3])
    arrays[which] = arrays[which].at[:, 10, :, 3].set(jnp.nan)
    options = as_arrays(dict(query_seq_lengths=[40], key_value_seq_lengths=[150]))
    attention = functools.partial(
        jax_flash.attention, **options, return_residual=True, implementation="mosaic_gpu"
    )
    with interpret_mode():
        (out, lse), vjp = jax.vjp(attention, *arrays)
        d_query, d_key, d_value = vjp((jnp.ones_like(out), jnp.ones_like(lse)))
    assert not d_query[:, 40:].any() and not d_key[:, 150:].any() and not d_value[:, 150:].any()
    rows = np.arange(70)
    wrong = (rows == 10) if which == 0 else rows < 40
    np.testing.assert_array_equal(np.isnan(out).any((0, 2, 3)), wrong)
    if which < 2:
        np.testing.assert_array_equal(np.isnan(lse)[0, :, 0], wrong)
    assert not out[:, 40:].any() and np.isneginf(lse[:, 40:]).all()


def test_kernels_take_their_inputs_as_they_are():
    """Where intervals alone decide what is seen; else some are set to zero before, or results."""
    arrays = inputs(2, 64, 96, 2, 1, 64, jnp.bfloat16)[:3]

    def selects(transform=lambda attention: attention, **options):
        attention = functools.partial(
            jax_flash.attention,
            query_seq_lengths=jnp.array([3, 64]),
            implementation="mosaic_gpu",
            **options,
        )
        with interpret_mode():
            program = str(jax.make_jaxpr(transform(attention))(*arrays))
        return re.search(r"bf16\[2,(64,2|96,1),64\] = select_n", program) is not None

    def gradients(attention):
        return jax.grad(lambda *arrays: attention(*arrays).astype(jnp.float32).sum(), (0, 1, 2))

    assert not selects() and selects(bias=jnp.zeros((1, 1, 1, 96)))
    assert not selects(gradients) and selects(gradients, deterministic=True)


@pytest.mark.slow
@pytest.mark.parametrize("width", [64, slow(128)])
def test_vmap_over_lengths_and_offsets(width):
    """Where the backward has lists of tiles, and where it draws them."""
    attention = functools.partial(jax_flash.attention, is_causal=True, implementation="mosaic_gpu")
    options = dict(
        key_value_seq_lengths=jnp.array([[48], [0], [17]]),
        query_offset=jnp.array([[3], [0], [-9]]),
    )
    losses = check_vmap_over_options(attention, width, **options)
    assert losses[1] == 0 and abs(losses[0] - losses[2]) > 1


@pytest.mark.long
def test_one_compilation_serves_all_lengths():
    query, key, value, _, _ = inputs(1, 40, 300, 1, 1, 64, jnp.bfloat16)
    attention = functools.partial(jax_flash.attention, implementation="mosaic_gpu")
    traces = []

    @jax.jit
    def with_length(length):
        traces.append(length)
        return attention(query, key, value, key_value_seq_lengths=length)

    with interpret_mode():
        for length in (300, 128, 5):
            got = with_length(jnp.array([length]))
            shorter = key[:, :length], value[:, :length]
            expected = jax_flash.attention(query, *shorter, implementation="xla")
            chex.assert_trees_all_close(got, expected, atol=1e-2, rtol=2**-7)
            assert_none_is_zero(expected)
    assert len(traces) == 1


def test_bounds_beside_intervals_are_refused():
    with pytest.raises(ValueError, match="None where dynamic"):
        Problem(1, 10, 10, 1, 1, 64, np.dtype(jnp.bfloat16), 1.0, highest=0, dynamic=True)
