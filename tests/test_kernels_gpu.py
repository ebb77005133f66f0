"""The kernels on a Hopper GPU."""

import dataclasses
import functools
import threading

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from pallas_kernels import backward_query_product, config, defaults
from tests import oracle
from tests.support.cases import slow
from tests.support.elements import (
    check_bias_that_is_nan_where_hidden_and_infinite_elsewhere,
    random_bias,
    random_mask,
    shape_of,
)
from tests.support.kernel_calls import (
    as_arrays,
    check,
    few_thread_blocks,
    inputs,
    with_a_jump,
    with_shares,
)
from tests.support.segment_ids import at_random, packed

pytestmark = pytest.mark.gpu

attention = functools.partial(jax_flash.attention, implementation="mosaic_gpu")

MASKS = {
    "full": {},
    "causal": {"is_causal": True},
    "window": {"is_causal": True, "local_window_size": (400, 0)},
}
all_masks = pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)

LENGTHS = [
    (1, 1),
    (3, 3),
    (1, 239),
    (64, 1),
    (799, 3),
    (113, 203),
    (128, 217),
    (108, 256),
    (255, 256),
    (384, 256),
    (1023, 1024),
    (1024, 1023),
    (4224, 4224),
]


@pytest.mark.fast_cases(
    "1-1-64-full",
    "1-1-256-full",
    "3-3-128-causal",
    "1-239-128-full",
    "64-1-64-causal",
    "799-3-64-full",
    "799-3-256-causal",
    "113-203-256-full",
    "128-217-128-causal",
    "108-256-64-causal",
    "255-256-64-full",
    "255-256-256-causal",
    "384-256-256-full",
    "1023-1024-128-causal",
    "1024-1023-128-full",
    "4224-4224-64-causal",
)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("H", [64, 128, 256])
@pytest.mark.parametrize(("T", "S"), LENGTHS)
def test_lengths(T, S, H, is_causal):
    """Heads and dtype change from case to case, so that each meets every width and mask."""
    case = LENGTHS.index((T, S)) + H // 64 + is_causal
    N, K = [(2, 2), (4, 2), (3, 1)][case % 3]
    dtype = [jnp.bfloat16, jnp.float16][case // 3 % 2]
    B = 2
    if T > 2000:  # a float64 reference of gigabytes otherwise
        B, N, K = 1, 2, 1
    check(inputs(B, T, S, N, K, H, dtype, seed=case), is_causal=is_causal)


@pytest.mark.fast_cases("160-full", "160-causal", "256-full", "256-causal")
@all_masks
@pytest.mark.parametrize("H", [160, 256])
def test_sections_of_heads(H, mask):
    """With dS of two of six key heads in memory, or more where less is visible, and with none."""
    arrays = inputs(3, 700, 900, 4, 2, H, jnp.bfloat16)
    for heads in (2, 0):
        head_bytes = 2 * 15 * 11 * 64 * 64 * 2  # two query heads, tiles of 64 keys by 64 queries
        backward = config.BackwardKeyConfig(d_logits_bytes=heads * head_bytes, shares=1)
        check(arrays, **mask, config=dataclasses.replace(defaults.default(H), backward=backward))


@all_masks
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("H", "shares"), [(64, 5), (64, 8), (64, 24), (80, 2), (128, 4), (128, 11), (128, 40)]
)
def test_shares_of_the_queries_of_a_tile(H, shares, deterministic, mask):
    """Of the eight heads of a group, of the blocks of each, and of steps that end amid a head."""
    arrays = inputs(1, 700, 900, 16, 2, H, jnp.bfloat16)
    check(arrays, **mask, config=with_shares(H, shares), deterministic=deterministic)


@all_masks
@pytest.mark.parametrize("d_logits_heads", [0, 5, 16])
@pytest.mark.parametrize(
    ("H", "shares"), [(160, 4), (160, 8), (192, 5), (192, 24), (256, 8), (256, 11), (256, 40)]
)
def test_shares_of_wide_heads(H, shares, d_logits_heads, mask):
    """With dS' of no head in memory, of five of sixteen, or more where less is visible, of all."""
    arrays = inputs(1, 700, 900, 16, 2, H, jnp.bfloat16)
    settings = with_shares(H, shares)
    most = d_logits_heads * 15 * 11 * 64 * 64 * 2
    backward = dataclasses.replace(settings.backward, d_logits_bytes=most)
    check(arrays, **mask, config=dataclasses.replace(settings, backward=backward))


@pytest.mark.parametrize(
    ("B", "T", "S", "N", "K", "H"),
    [
        (3, 3000, 64, 6, 1, 256),
        (2, 3521, 557, 7, 1, 192),
        (1, 2688, 856, 4, 1, 64),
        (3, 264, 200, 32, 4, 24),
        (3, 400, 864, 16, 2, 64),
        # Some tiles more than whole rounds take.
        (13, 1024, 1024, 12, 4, 24),
        (3, 328, 5888, 7, 1, 128),
        (3, 696, 696, 5, 1, 96),
        (8, 3824, 256, 10, 10, 32),
        (2, 256, 8528, 5, 1, 72),
    ],
)
def test_shares_of_rows_that_were_drawn(B, T, S, N, K, H):
    """Few tiles of many queries, and tiles of a last round."""
    check(inputs(B, T, S, N, K, H, jnp.bfloat16))


@all_masks
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("H", "last"), [(64, (1, 8)), (80, (2, 3)), (128, (4, 1)), (40, (1, 2))])
def test_last_tiles_alone_in_parts(H, last, deterministic, mask):
    """Beside whole ones of these heads and of others."""
    arrays = inputs(2, 700, 900, 6, 2, H, jnp.bfloat16)
    settings = with_shares(H, config.Shares(1, 5, config.Last(*last)))
    check(arrays, **mask, config=settings, deterministic=deterministic)


@pytest.mark.parametrize(
    ("kind", "T", "S"),
    [
        ("full", 1000, 1000),
        ("causal", 1000, 1000),
        ("documents", 1000, 1000),
        ("lengths", 1000, 1000),
        ("parts", 1000, 1000),
        # Sections of two heads of 64 and of one of 128, as those in work are beyond L2.
        ("full", 6400, 400),
        ("parts of several sections", 6400, 400),
    ],
)
@pytest.mark.parametrize("H", [64, 128])
def test_dq_that_tiles_of_another_section_zero(H, kind, T, S):
    """In memory that held NaN, beside deterministic gradients, of which dQ is never added to."""
    query, key, value, dout, _ = inputs(2, T, S, 128, 128, H, jnp.bfloat16)
    ids = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32) // 300, (2, T))
    options = {
        "full": {},
        "causal": {"is_causal": True},
        "documents": {"query_segment_ids": ids, "key_value_segment_ids": ids},
        "lengths": {
            "query_seq_lengths": jnp.array([T, 900]),
            "key_value_seq_lengths": jnp.array([T, 500]),
        },
        "parts": {"config": with_shares(H, config.Shares(1, 3, config.Last(1, 8)))},
        "parts of several sections": {
            "config": with_shares(H, config.Shares(1, 3, config.Last(20, 3)))
        },
    }[kind]

    def gradients(deterministic):
        function = functools.partial(attention, **options, deterministic=deterministic)
        return jax.jit(lambda *x: jax.vjp(function, *x[:3])[1](x[3]))

    expected = gradients(deterministic=True)(query, key, value, dout)
    run = gradients(deterministic=False)
    for _ in range(3):
        jnp.full(2 * dout.size, jnp.nan).block_until_ready()
        got = run(query, key, value, dout)
        chex.assert_trees_all_close(
            *jax.tree.map(lambda x: x.astype("float32"), (got, expected)), atol=2e-3, rtol=2e-2
        )


@pytest.mark.fast_cases("64-full", "64-window", "128-causal", "256-full")
@all_masks
@pytest.mark.parametrize("H", [64, 128, 256])
def test_a_thread_block_walks_many_tiles(H, mask):
    """In the forward and in the backward, with dQ and without: four tiles and more."""
    arrays = inputs(2, 1157, 1091, 4, 2, H, jnp.bfloat16)
    settings = few_thread_blocks(H, 8)
    check(arrays, **mask, config=settings)
    check(arrays, **mask, config=settings, deterministic=True)


@pytest.mark.parametrize("H", [64, slow(128), slow(256)])
def test_keys_beyond_the_end_where_every_logit_is_very_negative(H):
    query, key, *rest = inputs(2, 300, 333, 2, 1, H, jnp.bfloat16)
    check((abs(query) * 8, -abs(key) * 8, *rest), is_causal=False)


@pytest.mark.fast_cases("64-full-bfloat16", "128-full-bfloat16", "256-full-bfloat16")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("H", [64, 128, 256])
def test_maxima_that_jump_and_other_heads(H, is_causal, dtype):
    """Thread blocks with a second round, which leaves other heads and sequences as they were."""
    arrays = inputs(1, 1157, 1091, 3, 3, H, dtype)
    check(with_a_jump(arrays, 0, 300), is_causal=is_causal)
    forward = functools.partial(attention, is_causal=is_causal, return_residual=True)
    calm, jumping = forward(*arrays[:3]), forward(*with_a_jump(arrays, 0, 300)[:3])
    chex.assert_trees_all_equal(
        jax.tree.map(lambda x: x[:, :, 1:], jumping), jax.tree.map(lambda x: x[:, :, 1:], calm)
    )


@pytest.mark.fast_cases("64-mha-bfloat16", "64-mqa-bfloat16", "128-gqa-float16", "256-mha-float16")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize(("N", "K"), [(4, 4), (4, 2), (4, 1)], ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize("H", [64, 128, 256])
def test_heads(H, N, K, dtype):
    check(inputs(2, 300, 413, N, K, H, dtype), is_causal=True, query_offset=413 - 300)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("B", "T", "S", "N", "K", "H"), [(3, 1000, 1013, 4, 2, 64), (2, 333, 77, 3, 3, 40)]
)
def test_four_consumers(B, T, S, N, K, H, is_causal):
    settings = dataclasses.replace(defaults.default(H), forward=defaults.FOUR_CONSUMERS)
    arrays = inputs(B, T, S, N, K, H, jnp.float16)
    check(arrays, is_causal=is_causal, config=settings)
    check(arrays, is_causal=is_causal, config=settings, sinks=jnp.linspace(-1.0, 3.0, N))
    forward = functools.partial(attention, *arrays[:3], is_causal=is_causal, config=settings)
    chex.assert_trees_all_equal(forward(), forward())


@pytest.mark.parametrize(
    ("B", "T", "N", "K", "H", "is_causal"),
    [
        (40, 152, 8, 4, 64, True),
        (20, 128, 16, 16, 64, False),
        (20, 128, 16, 8, 128, True),
        (30, 256, 8, 8, 96, True),
        (50, 64, 8, 8, 128, False),
    ],
)
def test_few_short_tiles(B, T, N, K, H, is_causal):
    """Of the backward, which come from lists, a few for each SM."""
    arrays = inputs(B, T, T, N, K, H, jnp.bfloat16)
    check(arrays, is_causal=is_causal)

    @jax.jit
    def gradients(query, key, value, dout):
        function = functools.partial(attention, is_causal=is_causal)
        return jax.vjp(function, query, key, value)[1](dout)

    chex.assert_trees_all_equal(gradients(*arrays[:4]), gradients(*arrays[:4]))


@pytest.mark.parametrize(
    ("B", "T", "S", "N", "K", "H", "options"),
    [
        (7, 72, 72, 1, 1, 192, {"is_causal": True}),
        (2, 128, 300, 2, 2, 256, {}),
        (3, 465, 127, 3, 3, 136, {}),
        (1, 700, 700, 4, 2, 128, {"is_causal": True}),
        (2, 333, 600, 4, 4, 64, {"local_window_size": (200, 60)}),
        (1, 1000, 1000, 6, 3, 40, {}),
        (2, 150, 1900, 4, 2, 128, {}),  # with shares of keys
        (1, 90, 90, 12, 12, 64, {"dropout_rate": 0.25}),
        (2, 200, 200, 2, 2, 128, {"logits_soft_cap": 5.0, "is_causal": True}),
    ],
)
def test_one_consumer(B, T, S, N, K, H, options):
    """Of tiles of 64 rows that find an SM each."""
    arrays = inputs(B, T, S, N, K, H, jnp.bfloat16)
    check(arrays, **options)
    own_key = {"dropout_key": jax.random.key(0)} if "dropout_rate" in options else {}
    forward = functools.partial(attention, *arrays[:3], **options, **own_key)
    chex.assert_trees_all_equal(forward(), forward())


@pytest.mark.parametrize(
    ("B", "T", "S", "N", "K", "H", "options"),
    [
        (25, 112, 73, 10, 2, 128, {}),
        (4, 128, 128, 48, 6, 128, {"is_causal": True}),
        (30, 200, 300, 16, 16, 64, {}),
        (20, 257, 257, 16, 8, 72, {}),
        (9, 300, 100, 16, 16, 256, {}),
        (16, 150, 150, 16, 16, 64, {"dropout_rate": 0.25}),
    ],
)
def test_tiles_by_number(B, T, S, N, K, H, options):
    """Of the forward, all alike and several for each SM."""
    check(inputs(B, T, S, N, K, H, jnp.bfloat16), **options)


@pytest.mark.parametrize(
    ("S", "N", "H", "options"),
    [(3000, 9, 192, {}), (1333, 5, 136, {"is_causal": True}), (2000, 7, 160, {})],
)
def test_query_products_of_192_rows(monkeypatch, S, N, H, options):
    monkeypatch.setattr(backward_query_product, "_consumers", lambda *_: 3)
    check(inputs(2, 2000, S, N, 1, H, jnp.bfloat16), **options)


@pytest.mark.parametrize(
    "query_offset", [-1000, slow(-450), slow(-77), 1, slow(63), slow(500), slow(10**9)]
)
def test_query_offset(query_offset):
    arrays = inputs(1, 500, 300, 2, 1, 128, jnp.bfloat16)
    check(arrays, is_causal=True, query_offset=query_offset)


@pytest.mark.fast_cases("64-full", "64-causal", "128-causal", "256-full")
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("H", [64, 128, 256])
def test_sinks(H, is_causal):
    """Among them one that takes all weight, and one that takes none."""
    arrays = inputs(2, 517, 613, 6, 2, H, jnp.bfloat16)
    sinks = jnp.array([0.0, 2.0, -3.0, 12.0, 1e4, -1e4])
    check(arrays, is_causal=is_causal, query_offset=-20 * is_causal, sinks=sinks)


WINDOWS: dict[str, dict] = {
    "causal": {"is_causal": True, "local_window_size": (200, 0)},
    "both sides": {"local_window_size": (64, 100)},
    "one key": {"local_window_size": (0, 0), "query_offset": 3},
    "all after": {"local_window_size": (300, 10**9)},
    "wide": {"local_window_size": (900, 700), "query_offset": -150},
    "behind": {"local_window_size": (30, 20), "query_offset": 500},
    "ahead": {"local_window_size": (30, 20), "query_offset": -70},
}


@pytest.mark.fast_cases(
    "one length-64-causal",
    "one length-64-all after",
    "one length-128-causal",
    "one length-128-wide",
    "one length-256-both sides",
    "one length-256-behind",
    "lengths-64-both sides",
    "lengths-64-behind",
    "lengths-128-one key",
    "lengths-128-ahead",
    "lengths-256-all after",
)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("H", [64, 128, 256])
@pytest.mark.parametrize(
    "lengths",
    [[(1157, 1091)], [(3, 3), (799, 3), (113, 703), (1024, 512)]],
    ids=["one length", "lengths"],
)
def test_windows(lengths, H, window):
    """Also those that no query, or no key, is in; lengths, heads and dtype change between cases."""
    options = WINDOWS[window]
    case = H // 64 + list(WINDOWS).index(window)
    T, S = lengths[case % len(lengths)]
    N, K = [(2, 2), (4, 2), (3, 1)][case % 3]
    arrays = inputs(2, T, S, N, K, H, [jnp.bfloat16, jnp.float16][case % 2], seed=case)
    check(arrays, **options, deterministic=case % 4 == 0)


@pytest.mark.parametrize("H", [64, slow(128), slow(256)])
def test_windows_of_long_sequences(H):
    arrays = inputs(1, 4224, 4224, 2, 1, H, jnp.bfloat16)
    check(arrays, is_causal=True, local_window_size=(1024, 0))
    check(arrays, local_window_size=(1000, 300), deterministic=True)


INTERVALS = {
    "key lengths": dict(key_value_seq_lengths=[0, 10**6, 77, 512]),
    "query lengths": dict(query_seq_lengths=[10**6, 64, 0, 300]),
    "causal": dict(is_causal=True, key_value_seq_lengths=[500, 1, 128, 1000]),
    "offsets": dict(is_causal=True, query_offset=[-90, 0, 64, 500]),
    "window": dict(local_window_size=(200, 70), query_offset=[-300, 30, 1000, 5]),
    "all": dict(
        is_causal=True,
        local_window_size=(300, 0),
        query_offset=[100, -50, 3, 0],
        query_seq_lengths=[10**6, 250, 300, 129],
        key_value_seq_lengths=[300, 40, 256, 10**6],
    ),
}


@pytest.mark.fast_cases(
    "113-703-key lengths-64",
    "113-703-query lengths-256",
    "113-703-offsets-256",
    "113-703-all-128",
    "1157-1091-query lengths-128",
    "1157-1091-offsets-128",
    "1157-1091-all-64",
    "799-3-all-64",
)
@pytest.mark.parametrize("H", [64, 128, 256])
@pytest.mark.parametrize(
    ("T", "S", "kind"),
    [
        *((T, S, kind) for T, S in [(113, 703), (1157, 1091)] for kind in INTERVALS),
        *((T, S, "all") for T, S in [(3, 3), (799, 3), (1024, 512)]),
    ],
)
def test_lengths_and_offsets_by_batch_entry(T, S, H, kind):
    case = T + H // 64 + list(INTERVALS).index(kind)
    N, K = [(2, 2), (4, 2), (3, 1)][case % 3]
    arrays = inputs(4, T, S, N, K, H, [jnp.bfloat16, jnp.float16][case % 2], seed=case)
    check(arrays, **as_arrays(INTERVALS[kind]), deterministic=case % 4 == 0)


@pytest.mark.parametrize("of_queries", [{}, {"query_seq_lengths": [1157, 1000, 9, 800]}])
@pytest.mark.parametrize("H", [64, 128, 256])
def test_lengths_where_a_thread_block_walks_many_tiles(H, of_queries):
    arrays = inputs(4, 1157, 1091, 2, 1, H, jnp.bfloat16)
    options = as_arrays(INTERVALS["causal"] | of_queries)
    check(arrays, **options, config=few_thread_blocks(H, 8))
    check(arrays, **options, config=few_thread_blocks(H, 8), deterministic=True)
    sinks = jnp.linspace(-3.0, 12.0, 2)
    check(with_a_jump(arrays, 0, 300), **options, sinks=sinks, config=few_thread_blocks(H, 8))


def check_that_nan_is_left_out(arrays, **options):
    """In queries that see no key and keys that no query sees, beside any options."""
    query, key = arrays[:2]
    others = ("deterministic", "config", "bias")
    see = {name: options[name] for name in options if name not in others}
    seen = oracle.visibility(query.shape[0], query.shape[1], key.shape[1], **see)[:, 0]
    no_query, no_key = (jnp.asarray(~seen.any(axis)) for axis in (2, 1))
    assert no_query.any() and no_key.any()

    @jax.jit
    def results(query, key, value, dout, dlse):
        function = functools.partial(attention, **options, return_residual=True)
        out, vjp = jax.vjp(function, query, key, value)
        return *out, *vjp((dout, dlse))

    def poisoned(x, where):
        return jnp.where(where.reshape(where.shape + (1,) * (x.ndim - 2)), jnp.nan, x)

    wheres = (no_query, no_key, no_key, no_query, no_query)
    clean = results(*arrays)
    got = results(*(poisoned(x, where) for x, where in zip(arrays, wheres, strict=True)))
    out, lse, dq, dk, dv = got
    chex.assert_tree_all_finite((out, dq, dk, dv))
    chex.assert_trees_all_equal((out, lse, dk, dv), (*clean[:2], *clean[3:]))
    np.testing.assert_allclose(dq.astype("float32"), clean[2].astype("float32"), atol=1e-2)


@pytest.mark.fast_cases("64-False", "128-True")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("H", [64, 128, 256])
def test_lengths_leave_nan_out(H, deterministic):
    check_that_nan_is_left_out(
        inputs(4, 1157, 1091, 4, 2, H, jnp.bfloat16),
        query_seq_lengths=jnp.array([1000, 1157, 64, 0]),
        key_value_seq_lengths=jnp.array([700, 0, 1091, 5]),
        deterministic=deterministic,
    )


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("T", "S", "N", "K", "H"),
    [
        (1157, 1091, 4, 2, 64),
        (1157, 1091, 4, 2, 128),
        (1157, 1091, 64, 64, 64),  # more tiles than SMs
        slow(1152, 1088, 64, 32, 128),
        (1157, 1091, 4, 2, 80),
        slow(1157, 1091, 4, 2, 40),
        slow(1157, 1091, 4, 2, 72),
        (700, 650, 2, 1, 256),
        (300, 128, 4, 4, 64),  # one tile, of one for each thread block and of many
        slow(300, 100, 64, 64, 128),
        (150, 100, 64, 64, 64),
        (150, 150, 40, 40, 64),  # few short tiles
    ],
)
def test_lengths_of_keys_alone(T, S, N, K, H, is_causal):
    """Right, whatever stands behind them, and in queries of an entry without keys."""
    arrays = inputs(4, T, S, N, K, H, [jnp.bfloat16, jnp.float16][is_causal])
    lengths = jnp.array([(2 * S) // 3, 0, S, 5])
    options = dict(is_causal=is_causal, key_value_seq_lengths=lengths)
    check(arrays, **options)
    check_that_nan_is_left_out(arrays, **options)


@pytest.mark.parametrize("kind", ["right", "left", "holes", "blocks"])
@pytest.mark.parametrize(
    ("T", "S", "N", "K", "H"),
    [
        (1157, 1091, 4, 2, 64),
        (1157, 1091, 4, 2, 128),
        (512, 512, 64, 32, 64),  # more tiles than SMs
        (612, 580, 40, 40, 128),
        (1157, 1091, 4, 2, 80),
        slow(1157, 1091, 4, 2, 40),
        slow(1157, 1091, 4, 2, 72),
        (300, 128, 8, 8, 64),  # one tile of keys
        (300, 100, 64, 64, 128),
    ],
)
def test_masks_of_keys_alone(kind, T, S, N, K, H):
    """Right, whatever stands where they hide a key, and in queries of an entry without keys."""
    arrays = inputs(4, T, S, N, K, H, [jnp.bfloat16, jnp.float16][kind == "holes"])
    key, entry = np.arange(S), np.arange(4)[:, None]
    masks = {
        "right": key < (2 * S) // 3 + 10 * entry,
        "left": key >= S // 3 + 10 * entry,
        "holes": np.random.default_rng(S).random((4, S)) < 0.7,
        "blocks": (key // 64 + entry) % 3 == 1,
    }
    mask = jnp.asarray(masks[kind] & (entry != 1))[:, None, None]
    check(arrays, mask=mask)
    check_that_nan_is_left_out(arrays, mask=mask)


@pytest.mark.parametrize("kind", ["right", "left", "holes"])
@pytest.mark.parametrize(
    ("B", "T", "S", "N", "H", "of"),
    [
        (64, 256, 256, 4, 32, "pairs"),  # tiles of four consumers
        (64, 384, 384, 4, 32, "pairs"),  # of three
        (32, 256, 264, 8, 64, "pairs"),  # of two
        (16, 500, 504, 8, 128, "pairs"),
        (16, 500, 501, 8, 64, "keys"),
        slow(64, 200, 200, 8, 48, "pairs"),
        slow(16, 500, 504, 8, 96, "keys"),
    ],
)
def test_masks_of_keys_beside_a_bias(kind, B, T, S, N, H, of):
    """Right, whatever stands where they hide a key."""
    arrays = inputs(B, T, S, N, N, H, jnp.bfloat16)
    key, entry = np.arange(S), np.arange(B)[:, None]
    masks = {
        "right": key < S // 2 + entry,
        "left": key >= S // 3 + entry,
        "holes": np.random.default_rng(S).random((B, S)) < 0.7,
    }
    mask = jnp.asarray(masks[kind] & (entry != 1))[:, None, None]
    shape = {"pairs": (1, N, T, S), "keys": (B, 1, 1, S)}[of]
    bias = jax.random.normal(jax.random.key(7), shape, jnp.bfloat16)
    check(arrays, mask=mask, bias=bias)
    check_that_nan_is_left_out(arrays, mask=mask, bias=bias)


@pytest.mark.parametrize(
    ("H", "h"), [(64, 64), slow(40, 72), (80, 80), slow(96, 96), slow(192, 128)]
)
def test_windows_leave_nan_out(H, h):
    """Of blocks cut at both ends, in thread blocks that walk many tiles."""
    check_that_nan_is_left_out(
        inputs(2, 700, 1091, 4, 2, H, jnp.bfloat16, h=h),
        local_window_size=(200, 70),
        query_offset=jnp.array([-300, 433]),
        config=few_thread_blocks(H, 4, h),
    )


@pytest.mark.parametrize("H", [64, slow(128), slow(256)])
def test_maxima_that_jump_towards_the_far_edge(H):
    """A second round with masks at both edges."""
    arrays = inputs(1, 500, 1157, 3, 3, H, jnp.bfloat16)
    check(with_a_jump(arrays, 0, 300), local_window_size=(600, 50), query_offset=500)


@pytest.mark.parametrize("H", [64, slow(128), slow(256)])
def test_other_batch_entries_do_not_leak(H):
    arrays = inputs(3, 613, 517, 4, 2, H, jnp.bfloat16)[:4]
    poisoned = [x.at[jnp.array([0, 2])].set(jnp.nan) for x in arrays]

    @jax.jit
    def results(query, key, value, dout):
        out, vjp = jax.vjp(attention, query, key, value)
        return [x[1] for x in (out, *vjp(dout))]

    (out, dq, dk, dv), (clean_out, clean_dq, clean_dk, clean_dv) = (
        results(*arrays),
        results(*poisoned),
    )
    chex.assert_trees_all_equal((out, dk, dv), (clean_out, clean_dk, clean_dv))
    np.testing.assert_allclose(dq.astype("float32"), clean_dq.astype("float32"), atol=1e-2)


@pytest.mark.fast_cases("64-full", "64-window", "128-causal", "256-full")
@all_masks
@pytest.mark.parametrize("H", [64, 128, 256])
def test_repeats_are_bit_equal(H, mask):
    check_repeats(H, **mask)


@pytest.mark.parametrize("H", [64, 128])
@pytest.mark.parametrize("of_queries", [{}, {"query_seq_lengths": jnp.array([1157, 1000, 9, 800])}])
def test_repeats_where_tiles_are_drawn_are_bit_equal(H, of_queries):
    """Whichever thread block draws them."""
    lengths = {"key_value_seq_lengths": jnp.array([1157, 400, 1, 900])}
    check_repeats(H, is_causal=True, **lengths, **of_queries)


def check_repeats(H, **options):
    """1000 forward runs, and 100 backward runs of which only dQ may round differently.

    Thread blocks take five tiles and more, and with them every buffer again.
    """
    query, key, value, dout, _ = inputs(4, 1157, 1157, 8, 4, H, jnp.bfloat16)
    function = functools.partial(attention, **options, config=few_thread_blocks(H, 32))
    forward = jax.jit(functools.partial(function, return_residual=True))

    @jax.jit
    def gradients(query, key, value, dout):
        return jax.vjp(function, query, key, value)[1](dout)

    @jax.jit
    def same(x, y):
        return jnp.stack([(a == b).all() for a, b in zip(x, y, strict=True)]).all()

    first = forward(query, key, value)
    assert all(same(first, forward(query, key, value)) for _ in range(1000))
    dq, dk, dv = gradients(query, key, value, dout)
    for _ in range(100):
        dq_again, *again = gradients(query, key, value, dout)
        assert same([dk, dv], again)
        np.testing.assert_allclose(
            dq_again.astype("float32"), dq.astype("float32"), atol=2e-3, rtol=2e-2
        )


@pytest.mark.fast_cases(
    "1-239-2-2-64-full",
    "1-239-2-2-256-full",
    "64-1-2-1-128-causal",
    "255-256-4-1-128-full",
    "1157-1091-4-2-64-causal",
)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("H", [64, 128, 256])
@pytest.mark.parametrize(
    ("T", "S", "N", "K"),
    [(1, 239, 2, 2), (64, 1, 2, 1), (255, 256, 4, 1), (1157, 1091, 4, 2)],
)
def test_deterministic_gradients(T, S, N, K, H, is_causal):
    dtype = jnp.float16 if T % 2 else jnp.bfloat16
    arrays = inputs(2, T, S, N, K, H, dtype)
    check(arrays, is_causal=is_causal, deterministic=True)
    check(arrays, is_causal=True, query_offset=S - T, deterministic=True)


@pytest.mark.parametrize("H", [64, slow(128), slow(256)])
def test_deterministic_keys_beyond_the_end(H):
    query, key, *rest = inputs(2, 300, 333, 2, 1, H, jnp.bfloat16)
    check((abs(query) * 8, -abs(key) * 8, *rest), is_causal=False, deterministic=True)


@pytest.mark.fast_cases("64-full", "128-causal")
@all_masks
@pytest.mark.parametrize("H", [64, 128, 256])
def test_gradients_do_not_depend_on_thread_blocks(H, mask):
    """One for each tile, five a SM and more, or lists; but for dQ summed over thread blocks."""
    query, key, value, dout, _ = inputs(6, 1157, 1157, 24, 12, H, jnp.bfloat16)

    def gradients(thread_blocks, deterministic):
        settings = few_thread_blocks(H, thread_blocks)
        function = functools.partial(
            attention, **mask, deterministic=deterministic, config=settings
        )
        return jax.jit(lambda *x: jax.vjp(function, *x[:3])[1](x[3]))(query, key, value, dout)

    for deterministic in (False, True):
        dq, *of_lists = gradients(132, deterministic)
        dq_again, *one_each = gradients(10**6, deterministic)
        chex.assert_trees_all_equal(of_lists, one_each)
        if deterministic:
            chex.assert_trees_all_equal(dq, dq_again)
        np.testing.assert_allclose(
            dq_again.astype("float32"), dq.astype("float32"), atol=2e-3, rtol=2e-2
        )


@pytest.mark.fast_cases("64-full", "128-causal")
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("H", [64, 128, 256])
def test_a_thread_block_for_each_tile(H, is_causal):
    """133 steps in the mean and more, in more tiles than there are SMs."""
    T = 128 * 132 if H == 64 else 64 * 132
    query, key, value, dout, _ = inputs(1, T, T, 8, 4, H, jnp.bfloat16)
    function = functools.partial(attention, is_causal=is_causal)

    def gradients(settings):
        with_settings = functools.partial(function, config=settings)
        return jax.jit(lambda *x: jax.vjp(with_settings, *x[:3])[1](x[3]))(query, key, value, dout)

    dq, *of_each = gradients(few_thread_blocks(H, 10**6))
    dq_of_lists, *of_lists = gradients(few_thread_blocks(H, 132))
    chex.assert_trees_all_equal(of_each, of_lists)
    np.testing.assert_allclose(
        dq.astype("float32"), dq_of_lists.astype("float32"), atol=2e-3, rtol=2e-2
    )


@pytest.mark.fast_cases("64-full", "64-window", "128-causal", "256-full")
@all_masks
@pytest.mark.parametrize("H", [64, 128, 256])
def test_deterministic_repeats_are_bit_equal(H, mask):
    query, key, value, dout, _ = inputs(4, 1157, 1157, 8, 4, H, jnp.bfloat16)
    settings = few_thread_blocks(H, 32)
    function = functools.partial(attention, **mask, deterministic=True, config=settings)

    @jax.jit
    def gradients(query, key, value, dout):
        return jax.vjp(function, query, key, value)[1](dout)

    @jax.jit
    def same(x, y):
        return jnp.stack([(a == b).all() for a, b in zip(x, y, strict=True)]).all()

    first = gradients(query, key, value, dout)
    assert all(same(first, gradients(query, key, value, dout)) for _ in range(1000))


def test_more_elements_than_int32_counts():
    """The last sequences of 2^31 elements and more, beside the same sequences alone."""
    B, T, N, H = 1032, 1024, 16, 128
    assert B * T * N * H > 2**31
    keys = jax.random.split(jax.random.key(0), 4)
    query, dout = (jax.random.normal(k, (B, T, N, H), jnp.bfloat16) for k in keys[:2])
    key, value = (jax.random.normal(k, (B, T, 2, H), jnp.bfloat16) for k in keys[2:])

    @jax.jit
    def results(query, key, value, dout):
        causal = functools.partial(attention, is_causal=True)
        out, vjp = jax.vjp(causal, query, key, value)
        return out, *vjp(dout)

    last = slice(B - 2, B)
    whole = [np.asarray(x[last].astype(jnp.float32)) for x in results(query, key, value, dout)]
    alone = [np.asarray(x.astype(jnp.float32)) for x in results(
        query[last], key[last], value[last], dout[last]
    )]  # fmt: skip
    for index, (a, b) in enumerate(zip(whole, alone, strict=True)):
        if index == 0:  # the output
            np.testing.assert_array_equal(a, b)
        elif index == 1:  # dQ
            np.testing.assert_allclose(a, b, atol=2e-3, rtol=2e-2)
        else:  # dK and dV, which are of shares where there are few tiles
            np.testing.assert_allclose(a, b, atol=2e-2, rtol=2e-2)


def test_second_call_compiles_nothing():
    query, key, value, dout, _ = inputs(1, 200, 200, 2, 1, 64, jnp.bfloat16)
    compiled = []
    own = threading.get_ident()  # others begin to compile kernels ahead, and may end later

    def listen(event: str, duration: float, **_) -> None:
        if event.endswith("backend_compile_duration") and threading.get_ident() == own:
            compiled.append(event)

    def run(query):
        out, vjp = jax.vjp(attention, query, key, value)
        return jax.block_until_ready((out, vjp(dout)))

    another = query + 1
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        run(query)
        assert compiled  # the test would see a compilation
        compiled.clear()
        run(another)
        assert not compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


SEGMENTS = {
    "documents": (packed([400, 57, 700], [1157]), None),
    "other lengths": (packed([400, 57, 700], [1157]), packed([300, 200, 591], [1, 1090])),
    "at random": (at_random(1157, (-2, 3)), at_random(1091, (-1, 4), seed=1)),
    # Documents that rise and zeros for padding behind them, and in the other entry no order.
    "in order in one entry": (
        np.where(np.arange(1152) < 1100, packed([400, 57, 695], [500, 600, 52], first_id=1), 0)
        ^ np.array([[0], [3]], np.int32),
        None,
    ),
}


def segment_ids(kind: str) -> tuple[dict, int, int]:
    """Options of `attention`, T and S."""
    query_ids, key_ids = (None if x is None else jnp.asarray(x) for x in SEGMENTS[kind])
    key_ids = query_ids if key_ids is None else key_ids
    ids = dict(query_segment_ids=query_ids, key_value_segment_ids=key_ids)
    return ids, query_ids.shape[1], key_ids.shape[1]


@pytest.mark.fast_cases(
    "64-documents",
    "64-at random",
    "128-other lengths",
    "160-documents",
    "160-at random",
    "256-other lengths",
)
@pytest.mark.parametrize("kind", SEGMENTS)
@pytest.mark.parametrize("H", [64, 128, 160, 256])
def test_segment_ids(H, kind):
    """One array for both sides, documents that are cut, and ids in no order; all masks."""
    ids, T, S = segment_ids(kind)
    N, K = [(2, 2), (4, 2), (3, 1)][H // 64 % 3]
    arrays = inputs(2, T, S, N, K, H, [jnp.bfloat16, jnp.float16][H // 64 % 2])
    lengths = dict(key_value_seq_lengths=jnp.array([S - 200, 64]))
    check(arrays, **ids, is_causal=True)
    check(arrays, **ids, local_window_size=(300, 50), deterministic=True)
    check(arrays, **ids, **lengths, config=few_thread_blocks(H, 8))


@pytest.mark.fast_cases("64-documents", "128-documents", "160-at random")
@pytest.mark.parametrize("kind", ["documents", "at random"])
@pytest.mark.parametrize("H", [64, 128, 160, 256])
def test_segment_ids_with_soft_cap(H, kind):
    ids, T, S = segment_ids(kind)
    options = dict(**ids, logits_soft_cap=2.0)
    arrays = inputs(2, T, S, 4, 2, H, jnp.bfloat16)
    check(arrays, **options, is_causal=True)
    lengths = dict(key_value_seq_lengths=jnp.array([S - 200, 64]))
    check(arrays, **options, **lengths, deterministic=True, config=few_thread_blocks(H, 8))


@pytest.mark.fast_cases("64-documents", "128-at random", "208-in order in one entry")
@pytest.mark.parametrize("kind", ["documents", "at random", "in order in one entry"])
@pytest.mark.parametrize("H", [64, 128, 208, 256])
def test_segment_ids_beside_a_mask_and_a_bias(H, kind):
    """And all else that takes registers at a time, where dQ of 256 columns is made in parts."""
    options, T, S = segment_ids(kind)
    arrays = inputs(2, T, S, 4, 2, H, jnp.bfloat16)
    bias = random_bias((1, 4, T, S))
    check(arrays, **options, bias=bias, is_causal=True)
    check(arrays, **options, bias=random_bias((2, 1, 1, S)), mask=random_mask((2, 1, T, S)))
    more = dict(logits_soft_cap=2.0, dropout_rate=0.125, deterministic=True)
    check(arrays, **options, **more, config=few_thread_blocks(H, 8))
    lengths = dict(key_value_seq_lengths=jnp.array([S - 200, 64]))
    check(arrays, **options, **more, **lengths, bias=bias, mask=random_mask((2, 1, 1, S)))


@pytest.mark.parametrize("H", [64, slow(128), slow(256)])
def test_segment_ids_repeat_bit_equal(H):
    """Forward, and dK and dV, with thread blocks that take many tiles."""
    query, key, value, dout, _ = inputs(2, 1157, 1157, 8, 4, H, jnp.bfloat16)
    ids = jnp.asarray(SEGMENTS["documents"][0])
    function = functools.partial(
        attention,
        query_segment_ids=ids,
        key_value_segment_ids=ids,
        is_causal=True,
        config=few_thread_blocks(H, 32),
    )

    @jax.jit
    def results(query, key, value, dout):
        out, vjp = jax.vjp(function, query, key, value)
        return out, *vjp(dout)[1:]

    first = results(query, key, value, dout)
    for _ in range(100):
        chex.assert_trees_all_equal(results(query, key, value, dout), first)


ELEMENTS = {
    "dense mask": dict(mask="bnts"),
    "key mask": dict(mask="bs", is_causal=True),
    "dense bias": dict(bias="bnts", local_window_size=(300, 100)),
    "bias of heads": dict(bias="nts", is_causal=True),
    "bias of keys": dict(bias="bs"),
    "both": dict(mask="bts", bias="nts", query_seq_lengths=[500, 1157]),
}


@pytest.mark.fast_cases(
    "64-dense mask",
    "64-bias of heads",
    "128-dense mask",
    "128-bias of keys",
    "160-key mask",
    "160-both",
    "256-dense bias",
)
@pytest.mark.parametrize("kind", ELEMENTS)
@pytest.mark.parametrize("H", [64, 128, 160, 256])
def test_mask_and_bias(H, kind):
    """With rows that see nothing, odd lengths, and the gradient of the bias."""
    options = as_arrays(ELEMENTS[kind])
    case = H // 64 + list(ELEMENTS).index(kind)
    T, S = [(1157, 1091), (640, 768)][case % 2]
    N, K = [(2, 2), (4, 2), (3, 1)][case % 3]
    if "mask" in options:
        options["mask"] = random_mask(shape_of(options["mask"], 2, N, T, S))
    if "bias" in options:
        dtype = [jnp.bfloat16, jnp.float32][case % 2]
        options["bias"] = random_bias(shape_of(options["bias"], 2, N, T, S), dtype)
    arrays = inputs(2, T, S, N, K, H, [jnp.bfloat16, jnp.float16][case % 2], seed=case)
    check(arrays, **options, deterministic=case % 4 == 0)


@pytest.mark.fast_cases(
    "64-640-768-nts-options0",
    "64-1-200-nts-options3",
    "96-640-768-nts-options0",
    "96-1-200-nts-options3",
    "128-640-768-nts-options0",
    "128-1-200-nts-options3",
)
@pytest.mark.parametrize(
    ("T", "S", "axes", "options"),
    [
        (640, 768, "nts", dict(is_causal=True)),
        (1157, 1096, "bnts", {}),
        (70, 8, "ts", dict(sinks=jnp.array([2.0, -1.0, 0.0, 9.0]))),
        (1, 200, "nts", dict(query_offset=150, is_causal=True)),
        (1000, 1032, "bts", dict(local_window_size=(300, 100))),
        (700, 840, "nts", dict(key_value_seq_lengths=[840, 77], query_offset=[0, -40])),
        (501, 616, "nts", dict(logits_soft_cap=5.0, dropout_rate=0.25, is_causal=True)),
    ],
)
@pytest.mark.parametrize("H", [64, 96, 128])
def test_bias_that_comes_in_tiles(T, S, axes, options, H):
    """Of 16 bits, one a pair, with keys in a multiple of 8."""
    bias = random_bias(shape_of(axes, 2, 4, T, S), [jnp.bfloat16, jnp.float16][T % 2])
    arrays = inputs(2, T, S, 4, 2, H, jnp.bfloat16)
    check(arrays, bias=bias, **as_arrays(options))


@pytest.mark.fast_cases("64-150-float32", "128-152-bfloat16")
@pytest.mark.parametrize(("S", "dtype"), [(150, jnp.float32), (152, jnp.bfloat16)])
@pytest.mark.parametrize("H", [64, 128, 256])
def test_bias_that_is_nan_where_hidden_and_infinite_elsewhere(H, S, dtype):
    check_bias_that_is_nan_where_hidden_and_infinite_elsewhere(H, S, dtype)


@pytest.mark.parametrize("masks", [None, "bts"])
@pytest.mark.parametrize(
    ("T", "S", "N", "K", "H"),
    [
        (1157, 1091, 4, 2, 64),
        (768, 768, 8, 8, 24),
        (612, 580, 16, 4, 128),
        slow(612, 580, 40, 40, 64),
        slow(300, 128, 8, 2, 80),
    ],
)
def test_bias_of_each_pair_and_head(T, S, N, K, H, masks):
    """Whose gradient the main kernel has at hand."""
    dtype = [jnp.bfloat16, jnp.float16][K % 3 == 2]
    options = dict(mask=random_mask(shape_of(masks, 2, N, T, S))) if masks else {}
    check(inputs(2, T, S, N, K, H, dtype), bias=random_bias((2, N, T, S), dtype), **options)


@pytest.mark.parametrize(("B", "N", "axes"), [(40, 3, "nts"), (9, 4, "ts")])
def test_bias_whose_pieces_are_dealt_out(B, N, axes):
    arrays = inputs(B, 200, 141, N, N, 64, jnp.bfloat16)
    check(arrays, bias=random_bias(shape_of(axes, B, N, 200, 141), jnp.bfloat16))


@pytest.mark.fast_cases("64-1157", "128-1160")
@pytest.mark.parametrize("S", [1157, 1160])  # a bias in tiles with the latter
@pytest.mark.parametrize("H", [64, 128, 256])
def test_mask_and_bias_repeats_are_bit_equal(H, S):
    """All gradients, 100 times, with thread blocks of many tiles."""
    query, key, value, dout, _ = inputs(2, 1157, S, 8, 4, H, jnp.bfloat16)
    mask, bias = random_mask((2, 1, 1157, S)), random_bias((1, 8, 1157, S), jnp.bfloat16)

    @jax.jit
    def results(query, key, value, bias, dout):
        function = functools.partial(attention, mask=mask, deterministic=True)
        out, vjp = jax.vjp(function, query, key, value, bias)
        return out, *vjp(dout)

    first = results(query, key, value, bias, dout)
    for _ in range(100):
        chex.assert_trees_all_equal(results(query, key, value, bias, dout), first)


def test_a_scan_over_layers_runs_each_kernel_once():
    """XLA may run a kernel twice, if a scan stacks its result and something else uses it."""
    arrays = inputs(2, 256, 256, 4, 2, 128, jnp.bfloat16)
    query, key, value, *_ = arrays
    weights = jnp.ones((3, 512, 512), jnp.bfloat16)

    def loss(query, weights):
        def layer(x, weight):
            out = attention(x, key, value, is_causal=True)
            return (out.reshape(2, 256, 512) @ weight).reshape(x.shape), None

        return jax.lax.scan(layer, query, weights)[0].astype("float32").sum()

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(query, weights).compile()
    calls = [line for line in compiled.as_text().splitlines() if "mosaic_gpu" in line]
    for kernel in ("attention_forward", "row_statistics", "attention_backward", "cast_dq"):
        assert sum(f"/{kernel}/" in line for line in calls) == 1, kernel


@pytest.mark.parametrize(
    ("H", "cap", "deterministic", "options"),
    [
        (64, 50.0, False, {}),
        slow(64, 0.5, True, {"local_window_size": (300, 40)}),
        slow(64, 2.0, False, {"is_causal": True, "key_value_seq_lengths": [700, 0, 1091]}),
        (128, 5.0, False, {"is_causal": True, "query_offset": -30}),
        slow(128, 50.0, True, {}),
        slow(128, 2.0, False, {"is_causal": True, "key_value_seq_lengths": [700, 0, 1091]}),
        (192, 5.0, False, {"is_causal": True}),
        slow(256, 0.5, False, {"local_window_size": (300, 40)}),
        slow(256, 2.0, False, {"key_value_seq_lengths": [700, 0, 1091]}),
    ],
)
def test_soft_cap(H, cap, deterministic, options):
    """Logits on both sides of the cap, odd lengths, and many tiles for each thread block."""
    arrays = inputs(3, 1157, 1091, 4, 2, H, jnp.float16 if cap < 3 else jnp.bfloat16)
    options = as_arrays(options) | dict(logits_soft_cap=cap, deterministic=deterministic)
    check(arrays, **options, config=few_thread_blocks(H, 20))


@pytest.mark.parametrize(("H", "mask", "bias"), [(64, "bts", "nts"), slow(128, None, "bs")])
def test_soft_cap_with_mask_and_bias(H, mask, bias):
    """And sinks, which no cap is for."""
    N, T, S = 4, 640, 768
    mask = random_mask(shape_of(mask, 2, N, T, S)) if mask else None
    bias = random_bias(shape_of(bias, 2, N, T, S), jnp.bfloat16)
    options = dict(mask=mask, bias=bias, sinks=jnp.array([7.0, -1.0, 3.0, 0.0]))
    check(inputs(2, T, S, N, 2, H, jnp.bfloat16), logits_soft_cap=5.0, **options)


@pytest.mark.parametrize("H", [64, slow(256)])
def test_soft_cap_where_maxima_jump(H):
    """A second round, and sinks."""
    arrays = with_a_jump(inputs(1, 500, 1091, 3, 3, H, jnp.bfloat16), 0, 300)
    check(arrays, logits_soft_cap=100.0, sinks=jnp.array([70.0, -1.0, 3.0]))


DROPOUT = [
    (64, {}),
    (64, {"is_causal": True}),
    (64, {"local_window_size": (300, 0)}),
    (128, {}),
    (128, {"is_causal": True, "deterministic": True}),
    (128, {"key_value_seq_lengths": jnp.array([900, 3])}),
    (256, {"is_causal": True}),
    (256, {"logits_soft_cap": 5.0}),
    (96, {"is_causal": True}),
    (64, {"logits_soft_cap": 5.0, "local_window_size": (300, 0)}),
    (128, {"logits_soft_cap": 5.0, "key_value_seq_lengths": jnp.array([900, 3])}),
    (256, {"key_value_seq_lengths": jnp.array([900, 3])}),
]


@pytest.mark.parametrize(
    ("H", "axes", "dtype", "bias_dtype", "slope"),
    [
        (64, "s", jnp.bfloat16, jnp.float32, -0.1),
        slow(64, "nts", jnp.float16, jnp.bfloat16, 0.1),  # in tiles
        (128, "nts", jnp.bfloat16, jnp.float32, 0.5),
        slow(128, "s", jnp.float16, jnp.float32, 0.02),
        (128, "nts", jnp.bfloat16, jnp.bfloat16, -0.5),
        slow(256, "bs", jnp.float16, jnp.float16, 0.1),
    ],
)
def test_bias_that_rises_or_falls(H, axes, dtype, bias_dtype, slope):
    """Over 1000 keys, by more than weights may, or by what a row that has settled takes."""
    bias = slope * jnp.arange(1000.0).at[700:].add(300.0)
    bias = jnp.broadcast_to(bias, shape_of(axes, 2, 4, 901, 1000)).astype(bias_dtype)
    check(inputs(2, 901, 1000, 4, 2, H, dtype), bias=bias)


@pytest.mark.parametrize(
    ("H", "hidden", "options"),
    [(64, None, {}), slow(64, -1e9, {}), (128, -jnp.inf, {"is_causal": True}), slow(256, None, {})],
)
def test_padding_that_a_mask_or_a_bias_hides(H, hidden, options):
    """Of batch entries with all of their keys, with some and with one, on either side."""
    padding = jnp.arange(1000) >= jnp.array([1000, 501, 1])[:, None]
    padding = jnp.concatenate([padding, padding[:, ::-1]])[:, None, None]
    if hidden is None:
        options = options | {"mask": ~padding}
    else:
        options = options | {"bias": jnp.where(padding, hidden, 0.0)}
    check(inputs(6, 700, 1000, 2, 1, H, jnp.bfloat16), **options)


@pytest.mark.fast_cases("64-options0", "128-options3", "256-options6", "64-options9")
@pytest.mark.parametrize(("H", "options"), DROPOUT)
def test_dropout(H, options):
    check(inputs(2, 1001, 1013, 4, 2, H, jnp.bfloat16), dropout_rate=0.25, **options)


@pytest.mark.parametrize(
    ("H", "mask_axes", "bias_axes", "options"),
    [
        (64, None, "nts", {"is_causal": True}),
        slow(64, "bs", None, {}),
        slow(64, "bnts", None, {"logits_soft_cap": 5.0}),
        (96, "bs", None, {"local_window_size": (300, 0)}),
        slow(128, "bts", "nts", {"is_causal": True}),
        slow(128, None, "nts", {"logits_soft_cap": 5.0}),
        (256, "bnts", None, {"local_window_size": (300, 0)}),
        slow(256, "bts", "nts", {"key_value_seq_lengths": jnp.array([900, 3])}),
        slow(256, None, "bs", {"is_causal": True}),
    ],
)
def test_dropout_with_mask_and_bias(H, mask_axes, bias_axes, options):
    N, T, S = 4, 501, 613
    if mask_axes:
        options = options | {"mask": random_mask(shape_of(mask_axes, 2, N, T, S))}
    if bias_axes:
        options = options | {"bias": random_bias(shape_of(bias_axes, 2, N, T, S))}
    check(inputs(2, T, S, N, 2, H, jnp.bfloat16), dropout_rate=0.25, **options)


@pytest.mark.parametrize(("H", "logits_soft_cap"), [(64, 5.0), slow(160, 5.0), slow(256, None)])
def test_dropout_with_segment_ids(H, logits_soft_cap):
    ids = jnp.arange(900) // 70
    ids = jnp.stack([ids, ids[::-1]])
    options = dict(query_segment_ids=ids, key_value_segment_ids=ids, is_causal=True)
    arrays = inputs(2, 900, 900, 4, 2, H, jnp.bfloat16)
    check(arrays, dropout_rate=0.25, logits_soft_cap=logits_soft_cap, **options)


# The backward compares in another way from 16385 steps on.
@pytest.mark.parametrize(
    ("H", "steps"),
    [
        (64, 1),
        slow(64, 1024),
        (64, 16384),
        slow(64, 16385),
        (64, 32767),
        slow(128, 31745),
        slow(256, 3277),
    ],
)
def test_dropout_drops_the_same_as_xla(H, steps):
    """With logits of 0 outputs and dV are of what is kept alone."""
    _, _, value, d_out, _ = inputs(2, 1001, 1013, 4, 2, H, jnp.float16)
    zeros = jnp.zeros((2, 1001, 4, H), jnp.float16), jnp.zeros_like(value)
    options = dict(dropout_rate=steps / 2**15, dropout_key=jax.random.key(0))

    def run(implementation):
        attend = functools.partial(
            jax_flash.attention, *zeros, implementation=implementation, **options
        )
        out, vjp = jax.vjp(attend, value)
        return out, *vjp(d_out)

    ours, theirs = run("mosaic_gpu"), run("xla")
    chex.assert_trees_all_close(ours, theirs, rtol=2**-9, atol=2**-13)


ENTRIES = (np.arange(2048).reshape(2, 1024) // 190).astype(np.int32)
PAIRS = np.random.default_rng(3).random((1024, 1024)) < 0.5
MASK_FUNCTIONS = {
    "neighbours": lambda b, h, q, k: (abs(q // 32 - k // 32) <= 3) & (abs(q % 32 - k % 32) <= 3),
    "dilated": lambda b, h, q, k: (k <= q) & ((q - k) % 5 == 0),
    "prefix": lambda b, h, q, k: (k < 200) | (k <= q),
    "blocks": lambda b, h, q, k: ((k // 128 + q // 256) % 3 == 0) & (q != 300),
    "signs": lambda b, h, q, k: ((q - k) // 7 % 3 == 1) | ((k - 2 * q) % 9 < 2),
    "by_head": lambda b, h, q, k: (k <= q) & ((q - k) % (h + 1 + b) == 0),
    "documents": lambda b, h, q, k: jnp.asarray(ENTRIES)[b, q] == jnp.asarray(ENTRIES)[0, k],
    "pairs": lambda b, h, q, k: jnp.asarray(PAIRS)[q, k],
    "floats": lambda b, h, q, k: jnp.exp2(-0.01 * q) + jnp.float32(0.3) * k > q,
}


@pytest.mark.parametrize("function", MASK_FUNCTIONS.values(), ids=MASK_FUNCTIONS)
@pytest.mark.parametrize(
    ("T", "S", "N", "K", "H", "options"),
    [
        (600, 600, 4, 2, 128, {}),
        (1000, 777, 2, 2, 64, {}),
        slow(800, 1000, 4, 1, 128, dict(logits_soft_cap=3.0)),
        slow(800, 1000, 4, 1, 64, dict(dropout_rate=0.25)),
        slow(500, 600, 2, 1, 96, dict(local_window_size=(300, 40))),
    ],
)
def test_mask_functions(function, T, S, N, K, H, options):
    check(inputs(2, T, S, N, K, H, jnp.bfloat16), mask_mod=function, **options)


@pytest.mark.parametrize("name", ["neighbours", "dilated", "blocks", "signs"])
@pytest.mark.parametrize(("H", "deterministic"), [(256, False), (64, True), slow(128, True)])
def test_mask_functions_of_other_kernels(name, H, deterministic):
    arrays = inputs(1, 500, 700, 2, 1, H, jnp.float16)
    check(arrays, mask_mod=MASK_FUNCTIONS[name], deterministic=deterministic)


BESIDE_MASK_FUNCTIONS = {
    "lengths": dict(
        query_seq_lengths=jnp.array([600, 333]), key_value_seq_lengths=jnp.array([77, 700])
    ),
    "ids and offsets": dict(
        query_segment_ids=jnp.asarray(ENTRIES[:, :600]),
        key_value_segment_ids=jnp.asarray(ENTRIES[:, :700]),
        query_offset=jnp.array([40, -90]),
        is_causal=True,
        local_window_size=(400, 0),
    ),
    "bias and mask of keys": dict(
        bias=random_bias((1, 2, 600, 700)), mask=random_mask((2, 1, 1, 700))
    ),
}


@pytest.mark.parametrize("H", [64, 128])
@pytest.mark.parametrize("beside", BESIDE_MASK_FUNCTIONS)
def test_mask_functions_beside_others(beside, H):
    function = MASK_FUNCTIONS["by_head" if beside == "lengths" else "neighbours"]
    arrays = inputs(2, 600, 700, 2, 1, H, jnp.bfloat16)
    check(arrays, mask_mod=function, **BESIDE_MASK_FUNCTIONS[beside])


@pytest.mark.parametrize("H", [64, 128])
@pytest.mark.parametrize("axes", ["ts", "bts", "bnts"])
def test_dense_masks_whose_hidden_blocks_are_skipped(axes, H):
    sizes = dict(b=2, n=2, t=700, s=900)
    shape = tuple(size if axis in axes else 1 for axis, size in sizes.items())
    mask = np.tril(np.ones((700, 900), bool), 100) & (np.arange(900) // 128 != 2)
    mask = jnp.asarray(mask & np.ones(shape, bool)).at[:, :, 5].set(False)
    check(inputs(2, 700, 900, 2, 1, H, jnp.bfloat16), mask=mask)


@pytest.mark.parametrize("H", [64, 128])
@pytest.mark.parametrize("axes", ["ts", slow("bts"), "bnts"])
def test_keys_that_a_dense_mask_hides_may_be_nan(axes, H):
    mask = np.tril(np.ones((700, 900), bool), 100) & (np.arange(900) // 128 != 2)
    mask = random_mask(shape_of(axes, 2, 4, 700, 900)) & mask
    mask = mask.at[:, :, :, 5].set(False)
    hidden = np.arange(900) // 128 == 2
    hidden[5] = True
    query, key, value, dout, _ = inputs(2, 700, 900, 4, 2, H, jnp.bfloat16)
    attention = functools.partial(jax_flash.attention, mask=mask, implementation="mosaic_gpu")

    @jax.jit
    def results(query, key, value, dout):
        out, vjp = jax.vjp(attention, query, key, value)
        return out, *vjp(dout)

    poisoned = (jnp.where(hidden[:, None, None], jnp.nan, x) for x in (key, value))
    got, clean = results(query, *poisoned, dout), results(query, key, value, dout)
    chex.assert_trees_all_close(got, clean, rtol=0.02, atol=0.02)  # dQ in any order
    for x in got[2:]:
        assert not np.asarray(x)[:, hidden].any()


SLOPES = np.random.default_rng(4).random(8).astype(np.float32)
TABLE = np.random.default_rng(5).normal(size=(8, 129)).astype(np.float32)
VALUES = np.random.default_rng(6).normal(size=(2, 1024)).astype(np.float32)
SCORE_FUNCTIONS = {
    "alibi": lambda s, b, h, q, k: s - jnp.asarray(SLOPES)[h] * abs(q - k),
    "table": lambda s, b, h, q, k: s + jnp.asarray(TABLE)[h, jnp.clip(k - q + 64, 0, 128)],
    "narrow": lambda s, b, h, q, k: s + jnp.asarray(VALUES, jnp.bfloat16)[b, k],
    "cap": lambda s, b, h, q, k: 3 * jnp.tanh(s / 3),
    "gate": lambda s, b, h, q, k: s * jax.nn.sigmoid(jnp.asarray(VALUES)[b, k]),
    "mixed": lambda s, b, h, q, k: jnp.where((q + k) % 7 == 0, s * s, jnp.exp2(-0.01 * q) - s),
    "hiding": lambda s, b, h, q, k: jnp.where((q % 50 == 7) | (k % 3 == 0), -jnp.inf, s),
    "far": lambda s, b, h, q, k: jnp.where(q % 40 == 3, -1e30, s + 1e6 * (q % 40 == 5)),
}


@pytest.mark.parametrize("function", SCORE_FUNCTIONS.values(), ids=SCORE_FUNCTIONS)
@pytest.mark.parametrize(
    ("T", "S", "N", "K", "H", "options"),
    [
        (600, 600, 4, 2, 128, dict(is_causal=True)),
        (1000, 777, 2, 2, 64, {}),
        (500, 700, 2, 1, 64, dict(deterministic=True)),
        slow(500, 700, 2, 1, 128, dict(deterministic=True)),
        slow(800, 1000, 4, 1, 128, dict(logits_soft_cap=3.0)),
        slow(500, 600, 2, 1, 96, dict(local_window_size=(300, 40))),
    ],
)
def test_score_functions(function, T, S, N, K, H, options):
    check(inputs(2, T, S, N, K, H, jnp.bfloat16), score_mod=function, **options)


SHOWN = np.random.default_rng(7).random((1, 1, 600, 600)) < 0.5
BESIDE_SCORES = {
    "mask_mod": dict(mask_mod=MASK_FUNCTIONS["dilated"]),
    "mask": dict(mask=jnp.asarray(SHOWN)),
    "dropout": dict(dropout_rate=0.25),
    "ids": dict(
        query_segment_ids=jnp.asarray(ENTRIES[:, :600]),
        key_value_segment_ids=jnp.asarray(ENTRIES[:, :600]),
    ),
    "lengths": dict(key_value_seq_lengths=jnp.array([600, 77])),
}


@pytest.mark.parametrize("H", [64, 128])
@pytest.mark.parametrize("beside", BESIDE_SCORES)
def test_score_functions_beside_others(beside, H):
    arrays = inputs(2, 600, 600, 4, 2, H, jnp.bfloat16)
    check(arrays, score_mod=SCORE_FUNCTIONS["alibi"], **BESIDE_SCORES[beside])


@pytest.mark.parametrize(
    ("T", "S", "H", "options"),
    [
        (300, 400, 64, {}),
        (1001, 777, 128, dict(is_causal=True)),
        (640, 700, 80, dict(key_value_seq_lengths=jnp.array([700, 333]))),
    ],
)
@pytest.mark.parametrize("name", ["alibi", "table", "gate", "queries", "pairs"])
def test_gradients_of_what_score_functions_capture(name, T, S, H, options):
    check_gradients_of_captured(name, T, S, H, options)


@pytest.mark.parametrize("mask", ["dilated", "documents"])
@pytest.mark.parametrize("name", ["alibi", "table"])
def test_gradients_of_what_score_functions_capture_beside_mask_functions(name, mask):
    options = dict(mask_mod=MASK_FUNCTIONS[mask])
    check_gradients_of_captured(name, 600, 600, 128 if name == "table" else 64, options)


def check_gradients_of_captured(name, T, S, H, options):
    """They are those of XLA, to the rounding of outputs."""
    query, key, value, d_out, _ = inputs(2, T, S, 2, 1, H, jnp.bfloat16)
    captured = {"alibi": SLOPES, "table": TABLE}.get(name, VALUES)
    functions = {
        "alibi": lambda x, s, b, h, q, k: s - x[h] * abs(q - k),
        "table": lambda x, s, b, h, q, k: s + x[h, jnp.clip(k - q + 64, 0, 128)],
        "gate": lambda x, s, b, h, q, k: s * jax.nn.sigmoid(x[b, k]),
        "queries": lambda x, s, b, h, q, k: s * jnp.cos(x[h, q]) + x[h, 3],
        "pairs": lambda x, s, b, h, q, k: s + x[q % 2, k],
    }

    def gradient(implementation):
        def loss(captured):
            score_mod = functools.partial(functions[name], captured)
            out = jax_flash.attention(
                query, key, value, score_mod=score_mod, implementation=implementation, **options
            )
            return (out * d_out).astype(jnp.float32).sum()

        return jax.jit(jax.grad(loss))(jnp.asarray(captured))

    ours, theirs = gradient("mosaic_gpu"), gradient("xla")
    largest = float(np.abs(theirs).max())
    assert largest > 0.1
    # A slope's is what is left of terms with large factors, each with the rounding of its row.
    chex.assert_trees_all_close(ours, theirs, atol=2.0 ** (-3 if name == "alibi" else -6) * largest)
