"""The decode kernel in interpret mode, with race detection, beside float64 attention."""

import dataclasses
import functools
import math
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from jax_flash import decode
from pallas_kernels import decode_config
from pallas_kernels.config import SM_COUNT
from pallas_kernels.ptx.float8_parts import in_two_parts, join_parts
from tests.support import compile as support
from tests.support.cases import long
from tests.support.decode_kernel_calls import (
    SCALES,
    attention,
    check,
    check_float8_queries_of_any_size,
    relative_error_of_float8,
)
from tests.support.decoding import exact, inputs, paged
from tests.support.interpret import interpret_mode


@pytest.mark.parametrize(
    ("T", "S", "N", "K", "H", "dtype", "lengths", "options"),
    [
        (1, 264, 4, 2, 64, "bfloat16", [130, 264], {}),
        (1, 256, 4, 4, 128, "float16", [-(2**31), 193], dict(num_splits=2)),
        long(1, 136, 3, 1, 256, "bfloat16", [70, 1], dict(num_splits=1)),
        (3, 256, 6, 2, 128, "bfloat16", [2, 131, -1], dict(num_splits=3)),  # tokens that are none
        long(
            22, 128, 6, 2, 64, "bfloat16", [100], dict(num_splits=1)
        ),  # two tiles, one with a tail
        long(32, 128, 4, 1, 128, "float16", [101], dict(num_splits=2)),  # two whole ones
        # Positions beyond the cache.
        (2, 128, 2, 1, 64, "bfloat16", [129, 150], dict(num_splits=2, local_window_size=40)),
        long(2, 128, 2, 1, 64, "bfloat16", [150, 280], dict(num_splits=2, local_window_size=200)),
    ],
)
def test_kernel(T, S, N, K, H, dtype, lengths, options):
    with interpret_mode():
        check(inputs(len(lengths), T, S, N, K, H, dtype), lengths, **options)


@pytest.mark.parametrize(
    ("T", "S", "N", "K", "H", "dtype", "lengths", "options"),
    [
        (1, 197, 4, 2, 64, "bfloat16", [197, 0], dict(num_splits=2)),
        long(2, 261, 2, 1, 128, "float16", [261, 0], dict(num_splits=1)),  # slots are filled again
        long(2, 131, 2, 1, 256, "bfloat16", [131], dict(num_splits=2, local_window_size=90)),
        (2, 67, 4, 2, 256, "bfloat16", [67, 0], dict(num_splits=1, scales=SCALES)),
    ],
)
def test_lengths_that_are_no_multiple_of_8(T, S, N, K, H, dtype, lengths, options):
    """What follows the last rows of a cache is those of the next sequence, NaN or not seen."""
    with interpret_mode():
        check(inputs(len(lengths), T, S, N, K, H, dtype), lengths, **options)


@pytest.mark.parametrize(
    ("H", "options"),
    [
        (128, dict(page_size=16)),
        long(256, dict(local_window_size=300)),
    ],
)
def test_slots_are_filled_again(H, options):
    """Two slots take five blocks."""
    p = problem(1, 1, 320, H, 2, group=2)
    assert p.config.stages(p.tile_rows, 1) == 2
    with interpret_mode():
        check(inputs(1, 1, 320, 2, 1, H, "bfloat16"), [315], num_splits=1, **options)


@pytest.mark.fast_cases(*(f"{name}-2" for name in ("window", "soft cap", "sinks", "window of one")))
@pytest.mark.long_cases("sinks-1")
@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize(
    "options",
    [
        dict(local_window_size=70),
        dict(logits_soft_cap=2.0, scale=0.3),
        dict(sinks=np.array([1.0, 20.0, -1e4, -np.inf, 0.0, np.inf], np.float32)),
        dict(local_window_size=0, sinks=np.zeros(6, np.float32)),
    ],
    ids=["window", "soft cap", "sinks", "window of one"],
)
def test_options(options, num_splits):
    arrays = inputs(2, 2, 256, 6, 2, 64, "bfloat16")
    with interpret_mode():
        check(arrays, [1, 230], num_splits=num_splits, **options)


@pytest.mark.parametrize("page_size", [16, long(64), 256])
def test_pages(page_size):
    arrays = inputs(2, 2, 256, 4, 2, 128, "bfloat16")
    with interpret_mode():
        check(arrays, [77, 250], page_size=page_size, num_splits=2, local_window_size=150)


@pytest.mark.long
@pytest.mark.parametrize(
    ("H", "dtype", "options"),
    [
        (64, "bfloat16", dict(num_splits=1, local_window_size=40)),
        (128, "float16", dict(num_splits=2, page_size=16)),
        (256, "bfloat16", dict(num_splits=1, page_size=64, logits_soft_cap=3.0)),
        (128, "bfloat16", dict(num_splits=1, local_window_size=0)),
        (64, "bfloat16", dict(num_splits=2, sinks=np.array([1.0, 20.0, -1e4, 0.0], np.float32))),
    ],
)
def test_float8_caches(H, dtype, options):
    with interpret_mode():
        check(inputs(2, 2, 256, 4, 2, H, dtype), [70, 231], scales=SCALES, **options)


@pytest.mark.long
@pytest.mark.parametrize(
    ("H", "T", "lengths", "num_splits"),
    [(64, 11, [100], 1), (256, 6, [128], 1), (64, 1, [0, 1, 128], 2)],
)
def test_float8_caches_of_many_rows_and_of_few_keys(H, T, lengths, num_splits):
    """Two tiles, the second with a tail; two products a step; a sequence without a token."""
    arrays = inputs(len(lengths), T, 128, 8, 2, H, "bfloat16")
    with interpret_mode():
        check(arrays, lengths, scales=SCALES, num_splits=num_splits)


def test_float8_queries_of_any_size():
    with interpret_mode():
        check_float8_queries_of_any_size(64)


@pytest.mark.parametrize(
    "case",
    [{}, dict(outlier=64.0), dict(favourite=9.0), dict(favourite=13.0), dict(mean=1.0)],
    ids=str,
)
def test_float8_has_the_error_of_bfloat16(case):
    """And not that of e4m3, 3%, to which one part of queries or of weights alone would come."""
    with interpret_mode():
        assert relative_error_of_float8(64, 512, [512, 389], **case) < 2.5e-3


def test_float8_queries_that_are_not_finite_are_their_own_concern():
    query, *caches = inputs(1, 2, 128, 4, 2, 64, "bfloat16")
    caches = [x.astype(jnp.float8_e4m3fn) for x in caches]
    run = functools.partial(attention, key_scale=jnp.ones(2), value_scale=jnp.ones(2))
    bad = query.at[0, 0, 1, 7].set(jnp.inf).at[0, 1, 2, 3].set(jnp.nan)
    with interpret_mode():
        expected, got = (run(x, *caches, jnp.array([100])) for x in (query, bad))
    is_bad = np.zeros((1, 2, 4), bool)
    is_bad[0, 0, 1] = is_bad[0, 1, 2] = True
    got, expected = (np.asarray(x, np.float32) for x in (got, expected))
    assert np.isnan(got[is_bad]).all()
    np.testing.assert_array_equal(got[~is_bad], expected[~is_bad])


@pytest.mark.parametrize("dtype", ["bfloat16", long("float16")])
def test_a_value_that_is_nan_stays_where_a_later_key_takes_all_weight(dtype):
    query, key, value = inputs(1, 1, 128, 2, 1, 64, dtype)
    key = key.at[0, 100].set(4)
    with interpret_mode():
        out = attention(abs(query), key, value.at[0, 3].set(jnp.nan), jnp.array([128]), scale=2.0)
    assert np.isnan(out).all()


def test_two_parts_of_float8_have_all_of_bfloat16():
    rows = jax.random.normal(jax.random.key(0), (8, 64)).astype(jnp.bfloat16)
    rows = rows.astype(jnp.float32) * 2.0 ** jnp.linspace(0, -6, 64) * 60
    rows = rows.astype(jnp.bfloat16).astype(jnp.float32)
    with interpret_mode():
        parts = in_two_parts(rows).astype(jnp.float32)
    joined = join_parts(parts.T).T
    np.testing.assert_allclose(joined, rows, rtol=0, atol=2.0**-14)
    is_large = abs(rows) >= 2.0**-6
    np.testing.assert_array_equal(joined[is_large], rows[is_large])


@pytest.mark.parametrize("dtype", ["bfloat16", long("float16")])
def test_logits_that_grow(dtype):
    """From block to block, beyond what a weight may be."""
    query, key, value = inputs(1, 1, 256, 2, 1, 64, dtype)
    key *= jnp.array([1.0, 8.0], key.dtype).repeat(128)[:, None, None]
    with interpret_mode():
        check((abs(query) * 3, abs(key), value), [200], num_splits=1)


@pytest.mark.parametrize("dtype", ["bfloat16", long("float16")])
def test_keys_far_below_a_sink_keep_their_weight(dtype):
    """The first key leads by 13 nats and has no value: what is left is the others'."""
    query = jnp.zeros((1, 1, 1, 64), dtype).at[..., 0].set(1)
    key = jnp.zeros((1, 256, 1, 64), dtype).at[:, 0, :, 0].set(13)
    value = jnp.ones((1, 256, 1, 64), dtype).at[:, 0].set(0)
    with interpret_mode():
        out = attention(query, key, value, jnp.array([256]), scale=1.0, num_splits=1)
    weight = 255 / (255 + math.exp(13))
    np.testing.assert_allclose(np.float64(out), weight, rtol=1e-2)


@pytest.mark.parametrize(("dtype", "large"), [("bfloat16", 1e15), long("float16", 61440.0)])
def test_logits_far_from_0(dtype, large):
    """Of any finite size: equal ones have the mean of the values, however they are rounded.

    Products of these sizes add up exactly, in whatever order a CPU adds them for which key.
    """
    _, _, value = inputs(4, 1, 72, 2, 1, 64, dtype)
    sizes = jnp.array([large, -large, 133120.0 if large > 65504 else 30720.0, 0.0], dtype)
    query = jnp.broadcast_to(abs(sizes)[:, None, None, None], (4, 1, 2, 64))
    key = jnp.broadcast_to(sizes[:, None, None, None], (4, 72, 1, 64))
    lengths = np.array([70, 70, 1, 70])
    with interpret_mode():
        out, lse = attention(
            query, key, value, jnp.asarray(lengths), num_splits=1, return_residual=True
        )
    exact_out, exact_lse = exact(query, key, value, lengths)
    np.testing.assert_allclose(np.asarray(out, np.float64), exact_out, atol=2e-2)
    np.testing.assert_allclose(lse, exact_lse, rtol=1e-6)


@pytest.mark.long
def test_others_in_the_batch_change_nothing():
    query, *caches = inputs(3, 2, 256, 4, 2, 64, "bfloat16")
    run = functools.partial(attention, num_splits=2, return_residual=True)
    poisoned = [x.at[1].set(jnp.nan) for x in (query, *caches)]
    with interpret_mode():
        first = run(query, *caches, jnp.array([130, 256, 5]))
        second = run(*poisoned, jnp.array([130, 70, 256]))
        alone = run(*(x[:1] for x in (query, *caches)), jnp.array([130]))
    for other in (second, alone):
        chex.assert_trees_all_equal(*(jax.tree.map(lambda x: x[0], x) for x in (first, other)))


@pytest.mark.long
def test_pages_give_the_same_bits():
    query, *caches = inputs(1, 1, 128, 2, 2, 64, "bfloat16")
    (key_cache, table), (value_cache, _) = (paged(x, 32) for x in caches)
    lengths = jnp.array([100])
    with interpret_mode():
        expected = attention(query, *caches, lengths)
        got = attention(query, key_cache, value_cache, lengths, page_table=table)
    chex.assert_trees_all_equal(got, expected)


def test_vmap_over_sequences():
    query, *caches = inputs(2, 1, 64, 2, 1, 64, "bfloat16")
    lengths = jnp.array([30, 64])
    one = lambda *arrays: attention(*(x[None] for x in arrays))[0]
    with interpret_mode():
        chex.assert_trees_all_equal(
            jax.vmap(one)(query, *caches, lengths), attention(query, *caches, lengths)
        )


@pytest.mark.long
def test_vmap_over_sequences_in_pages():
    query, *caches = inputs(2, 1, 64, 2, 1, 64, "bfloat16")
    (key_cache, table), (value_cache, _) = (paged(x, 16) for x in caches)
    lengths = jnp.array([30, 64])

    def one(query, length, pages):
        options = {"page_table": pages[None]}
        return attention(query[None], key_cache, value_cache, length[None], **options)[0]

    with interpret_mode():
        expected = attention(query, key_cache, value_cache, lengths, page_table=table)
        chex.assert_trees_all_equal(jax.vmap(one)(query, lengths, jnp.asarray(table)), expected)


def test_vmap_over_what_a_batch_shares():
    arrays = (*inputs(1, 1, 64, 2, 1, 64, "bfloat16"), jnp.array([30]))
    sinks = jnp.array([[0.0, 1.0], [2.0, -1.0]])
    with_sinks = lambda sinks: attention(*arrays, sinks=sinks)
    with interpret_mode():
        expected = jnp.stack([with_sinks(x) for x in sinks])
        chex.assert_trees_all_equal(jax.vmap(with_sinks)(sinks), expected)


def problem(batch, kv_heads, capacity, width, itemsize, tokens=1, group=4):
    heads, dtype = kv_heads * group, np.dtype(jnp.bfloat16)
    cache_dtype = np.dtype(jnp.float8_e4m3fn) if itemsize == 1 else dtype
    return decode_config.DecodeProblem(
        batch, tokens, heads, kv_heads, width, dtype, cache_dtype, capacity, None, 1.0
    )


@pytest.mark.parametrize(("width", "itemsize"), decode_config.CONFIG)
@pytest.mark.parametrize("capacity", [8, 64, 1000, 8192, 131072])
@pytest.mark.parametrize("batch", [1, 2, 9, 16, 200])
def test_splits_fill_the_gpu_and_no_more(batch, capacity, width, itemsize):
    p = problem(batch, 8, capacity, width, itemsize)
    config = p.config
    splits = decode_config.splits_for(p)
    thread_blocks = batch * 8 * splits
    blocks = -(-capacity // decode_config.BLOCK_KV)
    assert 1 <= splits <= min(blocks, decode_config.MOST_SPLITS)
    if splits > 1:
        assert thread_blocks <= config.blocks_per_sm * SM_COUNT
        assert (splits - 1) * -(-blocks // splits) < blocks  # none is always empty
    else:
        full = SM_COUNT * config.blocks_per_sm // 2
        assert thread_blocks >= min(full, 0.8 * SM_COUNT) or blocks <= decode_config._SPLIT_STEPS


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(dtype="float32"), "dtype float32"),
        (dict(H=80), "head width 80"),
        (dict(h=32), "value width 32"),
        (dict(scale=0.0), "scale 0.0"),
        (dict(num_splits=129), "num_splits 129"),
        (dict(logits_soft_cap=1e4), r"logits_soft_cap 10000.0 is not in"),
    ],
)
def test_refusals(change, reason):
    shapes = dict(B=2, T=1, S=64, N=2, K=1, H=64, dtype="bfloat16")
    arrays = inputs(**shapes | {k: x for k, x in change.items() if k not in _OPTIONS})
    options = {k: x for k, x in change.items() if k in _OPTIONS}
    with pytest.raises(NotImplementedError, match=f"implementation='mosaic_gpu': .*{reason}"):
        attention(*arrays, jnp.array([3, 4]), **options)
    jax_flash.decode_attention(*arrays, jnp.array([3, 4]), **options)  # plain JAX takes all of it


_OPTIONS = ("scale", "num_splits", "logits_soft_cap")


def test_choice_by_device(monkeypatch, caplog):
    call = decode.DecodeCall(
        *inputs(1, 1, 64, 2, 1, 64, "bfloat16"), jnp.array([3]), None, 0.1, *(None,) * 6
    )
    here = decode._choose(call, None)
    if jax.default_backend() == "cpu":
        assert here.implementation == "xla" and "Hopper" in here.reasons["mosaic_gpu"]
    hopper = decode.device.Device("gpu", "NVIDIA H200", (9, 0))
    monkeypatch.setattr(decode.device, "device_of", lambda _: hopper)
    assert decode._choose(call, None).implementation == "mosaic_gpu"
    assert decode._choose(call, "xla").implementation == "xla"
    refused = dataclasses.replace(call, scale=-1.0)
    assert decode._choose(refused, None).reasons["mosaic_gpu"].startswith("scale -1.0")
    assert "scale -1.0" in caplog.text


def launches(program: str) -> int:
    """Custom calls, fusions and copies of a compiled program."""
    return len(re.findall(r" = \S.* (custom-call|fusion|copy|convert|broadcast)\(", program))


@pytest.mark.compiler
@pytest.mark.parametrize("num_splits", [1, 2])
def test_a_token_takes_a_launch_and_splits_one_more(num_splits):
    """Also where the LSE is of no use, though it stands behind a barrier."""
    arrays = (*inputs(2, 1, 72, 8, 2, 64, "bfloat16"), jnp.array([3, 4]))
    run = functools.partial(attention, num_splits=num_splits)
    assert launches(support.compiled_program(run, arrays)) == num_splits


@pytest.mark.compiler
def test_update_cache_takes_a_launch_a_cache():
    """On a GPU too it is in place."""
    _, *caches = inputs(2, 1, 72, 6, 2, 64, "bfloat16")
    arrays = (*caches, *(x[:, :1] for x in caches), jnp.array([3, 4]))
    program = support.compiled_program(jax_flash.update_cache, arrays, donate_argnums=(0, 1))
    assert launches(program) == 2 and program.count(" fusion(") == 2


def test_lowering_for_cuda_and_refusal_elsewhere():
    arrays = (*inputs(1, 1, 64, 2, 1, 64, "bfloat16"), jnp.array([3]))
    lowered = jax.jit(attention).trace(*arrays).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()
    if jax.default_backend() == "cpu":
        with pytest.raises(NotImplementedError, match=r"Hopper GPUs.*lowered for cpu"):
            attention(*arrays)
