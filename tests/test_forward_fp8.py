"""The FP8 forward kernel against xla and float64, in interpret mode and on a Hopper GPU."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from jax_flash import Quantized
from pallas_kernels import defaults, half_softmax
from tests import oracle
from tests.support.cases import slow
from tests.support.interpret import interpret_mode

attention = functools.partial(
    jax_flash.attention, implementation="mosaic_gpu", return_residual=True
)
attention_xla = functools.partial(jax_flash.attention, implementation="xla", return_residual=True)

# Rounding weights to e4m3 costs some 0.025. Logits have the 11 bits of float16.
OUT_ERROR, LSE_ERROR = 0.05, 1e-3
LOGIT_ERROR = 2.0**-11


def draw(seed, *shape, dtype=jnp.bfloat16):
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def inputs(B, T, S, N, K, H, h=None):
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, h or H)
    return [draw(seed, *shape) for seed, shape in enumerate(shapes)]


def quantized(*shape, **options):
    return jax_flash.quantize_fp8(*inputs(*shape), **options)


def relative(x, y):
    x, y = np.float64(x), np.float64(y)
    return np.linalg.norm(x - y) / max(np.linalg.norm(y), 1e-30)


def compare(results, expected, out_error=OUT_ERROR, lse_error=LSE_ERROR):
    """Of each head too: an error in one may be small in all."""
    (out, lse), (exact_out, exact_lse) = results, expected
    assert out.shape == exact_out.shape and lse.dtype == jnp.float32
    np.testing.assert_allclose(lse, exact_lse, atol=lse_error, rtol=LOGIT_ERROR)
    assert np.isfinite(np.float32(out)).all()
    for b, n in np.ndindex(out.shape[0], out.shape[2]):
        assert relative(out[b, :, n], exact_out[b, :, n]) < out_error


def check(arrays, out_error=OUT_ERROR, lse_error=LSE_ERROR, **options):
    """Against attention on xla; returns output and LSE."""
    results = attention(*arrays, **options)
    assert results[0].dtype == jnp.bfloat16
    compare(results, attention_xla(*arrays, **options), out_error, lse_error)
    return results


def interpreted(arrays, **options):
    with interpret_mode():
        return check(arrays, **options)


def exactly(arrays, **options):
    """Attention of what the arrays stand for, in float64."""
    return oracle.attention(*(x.dequantize(jnp.float32) for x in arrays), **options)


def ids(B, length, count):
    return jnp.asarray(np.random.default_rng(length).integers(0, count, (B, length)), jnp.int32)


def growing(S, nats, block=128, T=70, N=1, width=64):
    """Arrays whose logits grow by so many nats a block of keys from the last block to the first."""
    query, key, value = inputs(1, T, S, N, N, width)
    query = query.at[..., 0].set(8)
    blocks = (S - 1 - jnp.arange(S)) // block
    steps = nats * blocks * width**0.5 / 8
    return jax_flash.quantize_fp8(query, key.at[..., 0].set(steps[:, None]), value)


def with_sinks(lead, first, T=64, S=384, N=1, width=64, sinks=2):
    """Arrays where few keys take most weight, with values of 0: the first ones or the last."""
    query, key, value = inputs(1, T, S, N, N, width)
    where = slice(0, sinks) if first else slice(S - sinks, S)
    query = query.at[..., 0].set(8)
    key = key.at[..., 0].set(0).at[:, where, :, 0].set(lead * width**0.5 / 8)
    return jax_flash.quantize_fp8(query, key, (value + 1).at[:, where].set(0))


# --- in interpret mode --------------------------------------------------------------------------

# `(B, T, S, N, K, H, h)` and options.
CASES = {
    "full": ((1, 70, 300, 4, 2, 64, 64), {}),
    "causal": ((1, 201, 170, 2, 1, 64, 64), {"is_causal": True, "query_offset": -17}),
    "window": ((1, 150, 301, 1, 1, 64, 64), {"local_window_size": (60, 20), "query_offset": 130}),
    "lengths": (
        (3, 70, 150, 1, 1, 64, 64),
        {"query_seq_lengths": [70, 33, 70], "key_value_seq_lengths": [150, 131, 0]},
    ),
    "segments": (
        (2, 100, 150, 1, 1, 64, 64),
        {"query_segment_ids": ids(2, 100, 3), "key_value_segment_ids": ids(2, 150, 2)},
    ),
    "offsets": ((2, 100, 210, 1, 1, 64, 64), {"is_causal": True, "query_offset": [-60, 150]}),
    "scale": ((1, 64, 140, 1, 1, 64, 64), {"scale": 0.4}),
    "H128-h96": ((1, 130, 260, 1, 1, 128, 96), {"is_causal": True, "query_offset": 120}),
    "H80-h48": ((1, 70, 133, 2, 2, 80, 48), {}),
    "H16-h128": ((1, 70, 133, 1, 1, 16, 128), {"is_causal": True, "query_offset": 30}),
    "H256": ((1, 130, 140, 1, 1, 256, 256), {"is_causal": True, "query_offset": 5}),
    "H192-h128": ((1, 65, 150, 2, 1, 192, 128), {"local_window_size": (30, 10)}),
    "grouped heads": ((2, 64, 128, 6, 2, 64, 64), {"is_causal": True, "query_offset": 64}),
    "one query": ((2, 1, 200, 2, 1, 64, 64), {}),
    "one key": ((1, 70, 1, 1, 1, 128, 128), {}),
}


@pytest.mark.fast_cases("full")
@pytest.mark.long_cases("H256", "offsets")
@pytest.mark.parametrize("name", CASES)
def test_masks_and_widths(name):
    shape, options = CASES[name]
    block_size = 512 if list(CASES).index(name) % 2 else 128
    options = {k: jnp.array(x) if isinstance(x, list) else x for k, x in options.items()}
    interpreted(quantized(*shape, block_size=block_size), **options)


@pytest.mark.long
def test_rows_that_see_nothing_and_what_is_not_seen():
    """NaN behind lengths, in values and in scales; rows without a key: 0 and -inf."""
    B, T, S = 3, 70, 300
    query, key, value = quantized(B, T, S, 1, 1, 64, 64)
    poison = lambda x: Quantized(
        x.values.at[0, 256:].set(jnp.nan).at[2].set(jnp.nan),
        x.scales.at[0, 2:].set(jnp.nan),
        x.block_size,
    )
    options = {
        "query_seq_lengths": jnp.array([T, 9, T]),
        "key_value_seq_lengths": jnp.array([256, S, 0]),
    }
    expected = attention_xla(query, key, value, **options)
    with interpret_mode():
        out, lse = attention(query, poison(key), poison(value), **options)
    compare((out, lse), expected)
    for unseeing in (np.s_[1, 9:], np.s_[2]):
        assert not np.float32(out[unseeing]).any()
        assert (lse[unseeing] == -jnp.inf).all()


def promoting(width):
    return dataclasses.replace(
        defaults.default(width), forward_fp8=defaults.FORWARD_FP8_PROMOTING[width]
    )


@pytest.mark.long
def test_sums_in_float32():
    arrays, options = quantized(1, 70, 300, 2, 1, 64), {"is_causal": True, "query_offset": 230}
    expected = attention_xla(*arrays, **options)
    with interpret_mode():
        compare(attention(*arrays, config=promoting(64), **options), expected)


@pytest.mark.parametrize("options", [{}, slow({"is_causal": True, "query_offset": 230})], ids=str)
@pytest.mark.parametrize("nats", [3, slow(30), slow(300)])
@pytest.mark.long
def test_maxima_that_grow(nats, options):
    """From block to block, so that a row needs a new reference at each."""
    arrays = growing(384, nats)
    out_error = OUT_ERROR + 2 * nats * LOGIT_ERROR / 2  # half of the last bit of what has grown
    results = interpreted(arrays, out_error=out_error, **options)
    compare(results, exactly(arrays, **options), out_error)


@pytest.mark.parametrize("width", defaults.WIDTHS)
def test_sums_that_ask_for_a_new_reference(width):
    """None of weights that are all as large as a new reference makes them, any of larger ones."""
    weights_of_a_thread = defaults.FORWARD_FP8[width].block_kv // 8
    assert weights_of_a_thread * 2.0**half_softmax.LARGEST < half_softmax.SUM_LIMIT
    assert jnp.finfo(jnp.float8_e4m3fn).max >= half_softmax.SUM_LIMIT


@pytest.mark.long
def test_maxima_that_grow_in_some_rows():
    """The others keep their reference in the same step."""
    query, key, value = inputs(1, 130, 384, 1, 1, 64)
    query = query.at[..., 0].set(0).at[:, 5::17, :, 0].set(8)
    key = key.at[..., 0].set(30.0 * (2 - jnp.arange(384) // 128)[:, None])
    interpreted(jax_flash.quantize_fp8(query, key, value))


@pytest.mark.parametrize(
    ("lead", "first", "out_error"),
    [
        (6.0, True, 0.01),
        slow(9.0, True, 0.05),
        slow(6.0, False, 0.01),
        slow(9.0, False, 0.1),
        slow(12.0, True, 0.4),
    ],
)
def test_sinks_leave_the_other_keys_their_weight(lead, first, out_error):
    """What comes in the block of the sinks or after it has weights of few bits, 2^-9 at least.

    The largest weight of a row is 2^4 when it has a new reference: 9 nats lower there are 4 steps
    of 2^-9, and 12 nats lower nothing. All blocks that the kernel walks before have theirs in full.
    """
    arrays = with_sinks(lead, first)
    with interpret_mode():
        results = attention(*arrays)
    compare(results, exactly(arrays), out_error)


def of_sizes(query, key, value):
    """Values whose blocks differ by orders of magnitude, some of them of zeros."""
    sizes = jnp.array([1e3, 1e-6, 0.0, 1.0])[jnp.arange(value.shape[1]) // 128 % 4]
    return query, key, value.astype(jnp.float32) * sizes[:, None, None]


@pytest.mark.long
@pytest.mark.parametrize(
    ("order", "options"),
    [
        ("large first", {"is_causal": True, "query_offset": 60}),
        slow("small first", {"is_causal": True, "query_offset": 60}),
        ("large first", {"local_window_size": (50, 20), "query_offset": 300}),
        slow("small first", {}),
    ],
)
def test_values_of_blocks_with_very_different_scales(order, options):
    query, key, value = of_sizes(*inputs(1, 64, 512, 1, 1, 64))
    if order == "small first":
        value = value[:, ::-1]
    arrays = jax_flash.quantize_fp8(query, key, value)
    assert len(set(arrays[2].scales[0, :, 0].tolist())) == 4
    # Rows that see small values alone too, and with a window tiles that do not end with block 0.
    interpreted(arrays, **options)


@pytest.mark.parametrize("of", [(0,), slow((1,)), slow((0, 1)), slow((2,))], ids=str)
@pytest.mark.long
def test_scales_of_zero(of):
    """Logits of 0 or values of 0."""
    arrays = list(quantized(1, 70, 260, 1, 1, 64))
    for i in of:
        zeros = arrays[i].scales.at[:, ::2].set(0)
        arrays[i] = Quantized(arrays[i].values, zeros, arrays[i].block_size)
    interpreted(arrays)


def far_apart(power, T, S, N, H):
    """Logits of some 10^power, of both signs, of which one leads by a twentieth; and its place.

    In half of the rows all logits are below 0. Values use all of e4m3.
    """
    numbers = np.random.default_rng(power)
    winner = numbers.integers(0, S, (N, 2))
    first = numbers.uniform(1.0, 2.0, (S, N))
    for n, (highest, lowest) in enumerate(winner):
        first[highest, n], first[lowest, n] = 2.2, 0.8
    key = np.zeros((1, S, N, H), np.float32)
    key[0, :, :, 0] = 200.0 * first
    sign = np.where(np.arange(T) % 2, -1.0, 1.0)
    query = np.zeros((1, T, N, H), np.float32)
    query[0, :, :, 0] = 448.0 * sign[:, None]
    value = np.asarray(draw(power, 1, S, N, H), np.float32)
    scales = [np.full((1, 1, N), x, np.float32) for x in (10.0**power / 448 / 200, 1.0, 1.0)]
    arrays = [
        Quantized(jnp.asarray(x).astype(jnp.float8_e4m3fn), jnp.asarray(scale), max(T, S))
        for x, scale in zip((query, key, value), scales, strict=True)
    ]
    return arrays, np.where(sign[:, None] > 0, winner[:, 0], winner[:, 1])


def check_far_apart(power, T, S, N, H):
    """Where float16 does not hold references or factors, or too roughly."""
    arrays, winner = far_apart(power, T, S, N, H)
    out, lse = attention(*arrays, scale=1.0)
    _, expected = attention_xla(*arrays, scale=1.0)
    np.testing.assert_allclose(lse, expected, rtol=LOGIT_ERROR)
    values = np.float32(arrays[2].values)
    for n in range(N):
        # The weight that is 1 has four bits.
        seen = values[0, winner[:, n], n]
        np.testing.assert_allclose(np.float32(out[0, :, n]), seen, rtol=2.0**-4)


@pytest.mark.parametrize("power", [3, slow(4), slow(5), slow(7)])
@pytest.mark.long
def test_logits_beyond_float16(power):
    with interpret_mode():
        check_far_apart(power, 70, 300, 1, 64)


@pytest.mark.long
def test_all_of_e4m3():
    """Query and key that no one made for the kernel, some of whose values lose bits in it."""
    arrays = [
        Quantized((100 * x.astype(jnp.float32)).astype(jnp.float8_e4m3fn), scale, 1000)
        for x, scale in zip(
            inputs(1, 70, 300, 1, 1, 128), 3 * [jnp.full((1, 1, 1), 0.01)], strict=True
        )
    ]
    interpreted(arrays)


@pytest.mark.long
def test_vmap():
    """Of all operands, and of lengths."""
    arrays = quantized(2, 33, 140, 2, 1, 64)
    lengths = jnp.array([140, 77])
    run = lambda query, key, value, length: attention(
        query, key, value, key_value_seq_lengths=length[None]
    )
    one = lambda x: Quantized(x.values[:, None], x.scales[:, None], x.block_size)
    with interpret_mode():
        out, lse = jax.vmap(run)(*map(one, arrays), lengths)
    expected = attention_xla(*arrays, key_value_seq_lengths=lengths)
    compare((out[:, 0], lse[:, 0]), expected)


def test_gradient_of_attention_fp8():
    arrays = inputs(1, 70, 140, 2, 1, 64)
    cotangent = draw(9, 1, 70, 2, 64)

    def results(function, **options):
        run = lambda *x: function(*x, is_causal=True, query_offset=70, **options)
        out, vjp = jax.vjp(run, *arrays)
        return out, *vjp(cotangent)

    with interpret_mode():
        ours = results(jax_flash.attention_fp8, implementation="mosaic_gpu")
    exact = results(jax_flash.attention, implementation="xla")
    assert [x.dtype for x in ours] == [x.dtype for x in exact]
    of_out, *of_gradients = map(relative, ours, exact)
    assert 1e-2 < of_out < 0.1
    assert max(of_gradients) < 5e-3


@pytest.mark.long
def test_float16_and_scales_that_heads_share():
    arrays = inputs(1, 70, 140, 2, 2, 64)
    options = {"implementation": "mosaic_gpu", "return_residual": True}
    with interpret_mode():
        out, lse = jax_flash.attention_fp8(*(x.astype(jnp.float16) for x in arrays), **options)
        shared = [
            Quantized(x.values, jnp.full((1, 1, 1), 0.01 * (i + 1)), 1000)
            for i, x in enumerate(jax_flash.quantize_fp8(*arrays))
        ]
        check(shared)
    assert out.dtype == jnp.float16
    compare((out, lse), attention_xla(*jax_flash.quantize_fp8(*arrays)))


# --- what it refuses ----------------------------------------------------------------------------

FULL = (1, 16, 200, 2, 1, 64, 64)
REFUSED = {
    "head width 24: the FP8 kernel takes multiples of 16": ((1, 16, 20, 2, 1, 24, 32), {}),
    "value width 40: the FP8 kernel takes multiples of 16": ((1, 16, 20, 2, 1, 32, 40), {}),
    "head width 272": ((1, 16, 20, 2, 1, 272, 64), {}),
    "a mask or bias in FP8": (FULL, {"mask": jnp.ones((1, 1, 16, 200), bool)}),
    "mask or bias": (FULL, {"bias": jnp.zeros((1, 2, 16, 200))}),
    "logits_soft_cap in FP8": (FULL, {"logits_soft_cap": 10.0}),
    "sinks in FP8": (FULL, {"sinks": jnp.zeros(2)}),
    "dropout in FP8": (FULL, {"dropout_rate": 0.5, "dropout_key": jax.random.key(0)}),
    "scale as an array": (FULL, {"scale": jnp.float32(0.1)}),
    "key in blocks of 96 rows: the FP8 kernel takes multiples of 128": (FULL, {"block_size": 96}),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refused(reason, monkeypatch):
    shape, options = REFUSED[reason]
    options = dict(options)
    arrays = quantized(*shape, block_size=options.pop("block_size", None))
    with pytest.raises(NotImplementedError, match=f"'mosaic_gpu': .*{reason}"):
        attention(*arrays, **options)
    # On a GPU that has kernels.
    monkeypatch.setattr("jax_flash.dispatch._device_reason", lambda name, here: None)
    monkeypatch.setattr("jax_flash.cudnn.unsupported", lambda call: "not here")
    explanation = jax_flash.explain(*arrays, **options)
    assert explanation.implementation == "xla"
    assert reason in explanation.reasons["mosaic_gpu"]
    out, lse = jax_flash.attention(*arrays, **options, return_residual=True)
    chex.assert_trees_all_close((out, lse), attention_xla(*arrays, **options), atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "block_size"),
    [(FULL, 128), (FULL, 256), (FULL, 200), (FULL, 1000), ((1, 16, 200, 2, 1, 256, 256), 64)],
)
def test_chosen_on_a_gpu_that_has_kernels(shape, block_size, monkeypatch):
    monkeypatch.setattr("jax_flash.dispatch._device_reason", lambda name, here: None)
    arrays = quantized(*shape, block_size=block_size)
    assert jax_flash.explain(*arrays, is_causal=True).implementation == "mosaic_gpu"


# --- on a GPU -----------------------------------------------------------------------------------

# Products add up with some 14 bits there.
on_gpu = functools.partial(check, out_error=0.06, lse_error=1e-2)

T, S = 1000, 1300
MASKS = {
    "full": {},
    "causal": {"is_causal": True, "query_offset": S - T},
    "window": {"is_causal": True, "query_offset": S - T, "local_window_size": (300, 0)},
    "lengths": {
        "query_seq_lengths": jnp.array([T, 333]),
        "key_value_seq_lengths": jnp.array([777, S]),
    },
    "segments": {
        "is_causal": True,
        "query_segment_ids": ids(2, T, 3),
        "key_value_segment_ids": ids(2, S, 3),
    },
}
WIDTHS = [(64, 64), (128, 128), (256, 256), (192, 128), (80, 48)]


@pytest.mark.fast_cases(
    "64-64-full",
    "64-64-lengths",
    "128-128-window",
    "256-256-full",
    "256-256-segments",
    "192-128-window",
    "80-48-causal",
)
@pytest.mark.gpu
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("H", "h"), WIDTHS)
def test_masks_and_widths_on_a_gpu(H, h, mask):
    """Heads and block sizes change from case to case."""
    case = WIDTHS.index((H, h)) + list(MASKS).index(mask)
    N, K = [(2, 2), (4, 2), (3, 1)][case % 3]
    arrays = quantized(2, T, S, N, K, H, h, block_size=[128, 256, 2000][case % 3])
    results = on_gpu(arrays, **MASKS[mask])
    for _ in range(3):
        chex.assert_trees_all_equal(attention(*arrays, **MASKS[mask]), results)


@pytest.mark.gpu
@pytest.mark.parametrize(("H", "N", "K"), [(64, 16, 4), slow(128, 12, 3), slow(256, 8, 1)])
def test_many_tiles_on_a_gpu(H, N, K):
    """More tiles than a thread block has in one round, with tiles of unlike lengths."""
    arrays = quantized(2, 3001, 2999, N, K, H)
    on_gpu(arrays, is_causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, slow(128), slow(256)])
def test_maxima_that_grow_on_a_gpu(width):
    block = defaults.default_fp8(width).block_kv
    arrays = growing(S, 8, block, T=T, N=2, width=width)
    # Products lose some 2^-13 in each of up to 8 instructions, of logits of up to 165.
    errors = {"lse_error": 0.3, "out_error": 0.16}
    on_gpu(arrays, **errors)
    on_gpu(arrays, **errors, is_causal=True, query_offset=S - T)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, slow(128), slow(256)])
def test_maxima_that_grow_in_some_rows_on_a_gpu(width):
    """Warps decide by themselves whether they need a new reference."""
    query, key, value = inputs(2, T, S, 2, 2, width)
    query = query.at[..., 0].set(0).at[:, 5::37, :, 0].set(8)
    grown = 20.0 * (jnp.arange(S) < 300)[:, None]
    arrays = jax_flash.quantize_fp8(query, key.at[..., 0].set(grown), value)
    on_gpu(arrays, lse_error=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, slow(128), slow(256)])
def test_sinks_on_a_gpu(width):
    for first in (True, False):
        on_gpu(with_sinks(6.0, first, T=T, S=S, N=2, width=width), lse_error=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, slow(128), slow(256)])
def test_values_of_blocks_with_very_different_scales_on_a_gpu(width):
    query, key, value = inputs(1, T, S, 2, 1, width)
    sizes = jnp.array([1e3, 1e-6, 0.0, 1.0])[jnp.arange(S) // 128 % 4]
    arrays = jax_flash.quantize_fp8(query, key, value.astype(jnp.float32) * sizes[:, None, None])
    on_gpu(arrays)
    on_gpu(arrays, is_causal=True)


@pytest.mark.fast_cases("64")
@pytest.mark.gpu
@pytest.mark.parametrize("width", defaults.FORWARD_FP8_PROMOTING)
def test_sums_in_float32_on_a_gpu(width):
    """Values around 1, and weights that are alike: what few bits would lose."""
    query, key, value = inputs(1, T, 50_000, 1, 1, width)
    arrays = jax_flash.quantize_fp8(0 * query, key, value + 1)
    exact, _ = attention_xla(*arrays)
    out, _ = attention(*arrays, config=promoting(width))
    assert relative(out, exact) < 5e-3


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, slow(128), slow(256)])
@pytest.mark.parametrize("power", [3, 4, 5, 7])
def test_logits_beyond_float16_on_a_gpu(power, width):
    check_far_apart(power, T, S, 2, width)


@pytest.mark.gpu
def test_rows_that_see_nothing_on_a_gpu():
    arrays = quantized(2, T, S, 2, 1, 128)
    options = {"query_seq_lengths": jnp.array([T, 9]), "key_value_seq_lengths": jnp.array([0, S])}
    out, lse = on_gpu(arrays, **options)
    for unseeing in (np.s_[0], np.s_[1, 9:]):
        assert not np.float32(out[unseeing]).any()
        assert (lse[unseeing] == -jnp.inf).all()
