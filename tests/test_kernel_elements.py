"""A bias and a dense mask on the kernels in interpret mode, beside float64."""

import dataclasses
import functools
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from pallas_kernels import bias_gradient, defaults, element_arrays, mask_bits
from pallas_kernels.bias_gradient_pieces import Pieces
from pallas_kernels.problem import Problem
from tests.support.cases import long, slow
from tests.support.elements import (
    check_bias_that_is_nan_where_hidden_and_infinite_elsewhere,
    random_bias,
    random_mask,
    shape_of,
    with_lengths,
)
from tests.support.interpret import interpret_mode
from tests.support.kernel_calls import check, few_thread_blocks, inputs, with_shares
from tests.support.nonzero import assert_none_is_zero

# Which axes of [B, N, T, S] an array has; others are 1.
WHOLE, KEYS, HEADS, ROWS = "bnts", "bs", "nts", "nt"


@pytest.mark.parametrize("axes", ["bnts", "bs", "nts", "bt", "ns", "bts", ""])
@pytest.mark.parametrize("axis", [2, 3])
def test_bits_of_a_mask(axes, axis):
    shape = shape_of(axes, 2, 3, 70, 133)
    mask = np.asarray(random_mask(shape))
    words = np.asarray(element_arrays.pack(jnp.asarray(mask), axis))
    rows, length = shape[5 - axis], shape[axis]
    assert words.dtype == np.int32 and words.shape[:3] == (*shape[:2], rows)
    bits = (words[..., None] >> np.arange(32)) & 1
    bits = bits.reshape(*words.shape[:3], -1)
    if length == 1:
        assert bits.shape[-1] == 32
        np.testing.assert_array_equal(bits, np.broadcast_to(mask.swapaxes(axis, 3), bits.shape))
    else:
        assert bits.shape[-1] % 128 == 0
        np.testing.assert_array_equal(bits[..., :length], mask.swapaxes(axis, 3))
        assert not bits[..., length:].any()


@pytest.mark.parametrize(
    ("shape", "lowest", "highest"),
    [((2, 1, 65, 257), None, None), ((1, 2, 200, 130), -3, None), ((1, 1, 130, 300), None, 5)],
)
def test_bits_blocks_and_seen_keys_of_a_mask(shape, lowest, highest):
    B, N, T, S = shape
    mask = np.random.default_rng(T).random(shape) < 0.9
    mask[..., :64, :64] = True
    mask[..., 64:128, :64] = False
    mask[..., 7] = False
    with interpret_mode():
        found = mask_bits.mask_bits(jnp.asarray(mask), lowest, highest)
    difference = np.arange(S) - np.arange(T)[:, None]
    mask &= difference >= (-S - T if lowest is None else lowest)
    mask &= difference <= (S + T if highest is None else highest)
    chex.assert_trees_all_equal(found.by_query, element_arrays.pack(jnp.asarray(mask), 3))
    chex.assert_trees_all_equal(found.by_key, element_arrays.pack(jnp.asarray(mask), 2))
    np.testing.assert_array_equal(mask_bits.are_seen(found.seen, S), mask.any(2))
    kinds = np.zeros((B, N, -(-T // 64), -(-S // 64)), np.int8)
    for row, column in np.ndindex(kinds.shape[2:]):
        block = mask[:, :, 64 * row :, 64 * column :][:, :, :64, :64]
        kinds[:, :, row, column] = block.any((2, 3)) + 1 * block.all((2, 3))
    np.testing.assert_array_equal(found.kinds, kinds)


@pytest.mark.parametrize(
    ("T", "S", "N", "K", "H", "dtype", "axes", "options"),
    [
        (130, 200, 2, 1, 64, jnp.bfloat16, WHOLE, {}),
        slow(200, 133, 2, 1, 64, jnp.float16, KEYS, dict(is_causal=True, query_offset=-20)),
        slow(67, 150, 4, 2, 128, jnp.bfloat16, HEADS, dict(is_causal=True, query_offset=83)),
        slow(140, 77, 1, 1, 128, jnp.float16, "bts", dict(local_window_size=(60, 20))),
        long(130, 67, 2, 1, 256, jnp.bfloat16, WHOLE, {}),
        slow(70, 100, 1, 1, 256, jnp.bfloat16, KEYS, dict(is_causal=True)),
        slow(100, 90, 1, 1, 64, jnp.bfloat16, ROWS, {}),
    ],
)
def test_mask(T, S, N, K, H, dtype, axes, options):
    """With rows that see nothing, in tiles with others, holes, and keys that one head hides."""
    mask = random_mask(shape_of(axes, 2, N, T, S)).at[:, 0, :, -20:-10].set(False)
    with interpret_mode():
        check(inputs(2, T, S, N, K, H, dtype), mask=mask, **options)


@pytest.mark.long
def test_mask_that_hides_keys_and_tiles_of_one_head_of_a_group():
    """Of a group whose heads are worked on together, where few tiles would deal them out."""
    settings = defaults.default(64)
    backward = dataclasses.replace(settings.backward, shares=1)
    mask = random_mask((1, 2, 150, 300)).at[:, 0, :, 130:150].set(False)
    mask = mask.at[:, 1, 20:].set(False).at[..., 250:].set(False)  # the last tiles of both kinds
    with interpret_mode():
        check(
            inputs(1, 150, 300, 2, 1, 64, jnp.bfloat16),
            mask=mask,
            config=dataclasses.replace(settings, backward=backward),
        )


@pytest.mark.long
@pytest.mark.parametrize("H", [64, slow(128)])
def test_mask_with_deterministic_gradients_and_sinks(H):
    arrays = inputs(1, 150, 200, 2, 1, H, jnp.bfloat16)
    mask = random_mask((1, 2, 150, 200))
    sinks = jnp.array([2.0, -1.0])
    with interpret_mode():
        check(arrays, mask=mask, sinks=sinks, deterministic=True)


@pytest.mark.long
def test_rows_that_see_their_first_key_in_the_last_step():
    """And others in the first one alone, of logits that differ by more than weights may."""
    query, key, *rest = inputs(1, 64, 400, 1, 1, 64, jnp.bfloat16)
    key = key * jnp.where(jnp.arange(400) < 128, 30, 1).astype(key.dtype)[:, None, None]
    early = jnp.arange(400) < jnp.where(jnp.arange(64) % 2, 100, 400)[:, None]
    mask = jnp.where((jnp.arange(64) % 4 == 2)[:, None], jnp.arange(400) >= 390, early)
    with interpret_mode():
        check((query, key, *rest), mask=mask, config=few_thread_blocks(64, 1))


@pytest.mark.long
@pytest.mark.fast_cases("-0.5-128-nts-bfloat16-float32")
@pytest.mark.parametrize(
    ("H", "axes", "dtype", "bias_dtype"),
    [
        (64, "s", jnp.bfloat16, jnp.float32),
        (64, "nts", jnp.float16, jnp.bfloat16),  # in tiles
        (128, "nts", jnp.bfloat16, jnp.float32),
        (256, "bs", jnp.float16, jnp.float16),
    ],
)
@pytest.mark.parametrize("slope", [0.5, -0.5, 0.05])
def test_bias_that_rises_or_falls(H, axes, dtype, bias_dtype, slope):
    """Over 400 keys, by more than weights may, or by what a row that has settled takes."""
    bias = slope * jnp.arange(400.0).at[300:].add(100.0)
    bias = jnp.broadcast_to(bias, shape_of(axes, 1, 2, 70, 400)).astype(bias_dtype)
    with interpret_mode():
        check(inputs(1, 70, 400, 2, 1, H, dtype), bias=bias, config=few_thread_blocks(H, 1))


@pytest.mark.slow
@pytest.mark.parametrize(("H", "hidden"), [(64, -1e9), slow(128, -jnp.inf), slow(64, -1e4)])
def test_bias_of_keys_that_hides_padding(H, hidden):
    """All keys of the first steps, of one batch entry alone, and some keys of a later one."""
    is_padding = jnp.arange(400) >= jnp.array([140, 395])[:, None]
    bias = jnp.where(is_padding, hidden, 0.0)[:, None, None]
    with interpret_mode():
        check(inputs(2, 70, 400, 2, 1, H, jnp.bfloat16), bias=bias, is_causal=H == 128)


@pytest.mark.long
@pytest.mark.parametrize(
    ("H", "options"),
    [
        (64, with_lengths(key_value_seq_lengths=[150, 0], is_causal=True)),
        slow(128, with_lengths(query_seq_lengths=[100, 64], query_offset=[9, -40], is_causal=True)),
        slow(256, with_lengths(query_seq_lengths=[70, 100], key_value_seq_lengths=[0, 99])),
    ],
)
def test_mask_with_lengths(H, options):
    mask = random_mask((2, 1, 100, 180))
    with interpret_mode():
        check(inputs(2, 100, 180, 1, 1, H, jnp.bfloat16), mask=mask, **options)


@pytest.mark.long
@pytest.mark.parametrize("H", [64, slow(256)])
def test_many_tiles_of_a_thread_block(H):
    arrays = inputs(1, 200, 150, 2, 1, H, jnp.bfloat16)
    mask = random_mask((1, 2, 200, 150))
    with interpret_mode():
        check(arrays, mask=mask, is_causal=True, config=few_thread_blocks(H, 1))


@pytest.mark.long
@pytest.mark.fast_cases("64-nan")
@pytest.mark.parametrize("poison", [jnp.nan, jnp.inf])
@pytest.mark.parametrize("H", [64, 256])
def test_what_a_mask_hides_does_not_count(H, poison):
    """Keys that no query sees, queries that see no key, and their cotangents."""
    query, key, value, dout, dlse = inputs(1, 80, 150, 2, 1, H, jnp.bfloat16)
    hidden = np.r_[40:60, 140:145]  # of either tile
    mask = random_mask((1, 2, 80, 150)).at[..., hidden].set(False)
    no_query = np.asarray(~mask.any(3)).transpose(0, 2, 1)
    assert no_query.any()
    attention = functools.partial(
        jax_flash.attention, mask=mask, return_residual=True, implementation="mosaic_gpu"
    )

    def results(query, key, value, dout, dlse):
        results, vjp = jax.vjp(attention, query, key, value)
        return *results, *vjp((dout, dlse))

    def poisoned(x, poison=poison):
        return jnp.where(no_query.reshape(no_query.shape + (1,) * (x.ndim - 3)), poison, x)

    with interpret_mode(detect_races=False):  # which `check` does
        clean = results(query, key, value, dout, dlse)
        got = results(
            poisoned(query, jnp.nan),  # numpy warns of inf in a product, which stops a kernel
            key.at[:, hidden].set(poison),
            value.at[:, hidden].set(poison),
            poisoned(dout),
            poisoned(dlse),
        )
    out, lse, d_query, d_key, d_value = clean
    assert_none_is_zero(clean)
    chex.assert_trees_all_equal(got, clean)
    chex.assert_trees_all_equal(np.isneginf(lse), no_query)
    for x, nothing in ((out, no_query), (d_query, no_query)):
        assert not np.asarray(x)[nothing].any()
    for x in (d_key, d_value):
        assert not np.asarray(x)[:, hidden].any()


@pytest.mark.long
@pytest.mark.parametrize("axes", [slow((None, 0, None)), (0, None, 0), slow((0, None, None))])
def test_vmap(axes):
    """Over queries, masks or biases, of which each gets the gradient of its own call."""
    query, key, value, _, _ = inputs(1, 24, 40, 2, 1, 64, jnp.bfloat16)
    stacks = (
        jnp.stack([query, -query]),
        random_mask((2, 1, 1, 24, 40)),
        random_bias((2, 2, 24, 40)),
    )

    def gradients(query, mask, bias):
        def loss(query, key, bias):
            out = jax_flash.attention(query, key, value, bias, mask, implementation="mosaic_gpu")
            return (out.astype(jnp.float32) ** 2).sum()

        return jax.value_and_grad(loss, (0, 1, 2))(query, key, bias)

    one = lambda n: [x[n if axis == 0 else 0] for x, axis in zip(stacks, axes, strict=True)]
    args = [x if axis == 0 else x[0] for x, axis in zip(stacks, axes, strict=True)]
    with interpret_mode(detect_races=False):  # which `check` does
        together = jax.vmap(gradients, in_axes=axes)(*args)
        alone = jax.tree.map(lambda *x: jnp.stack(x), gradients(*one(0)), gradients(*one(1)))
    chex.assert_trees_all_close(together[0], alone[0], rtol=1e-5)
    chex.assert_trees_all_close(together[1], alone[1], rtol=2**-7, atol=1e-3)
    assert abs(alone[1][2]).max() > 1e-3


@pytest.mark.parametrize(
    ("T", "S", "N", "K", "H", "dtype", "axes", "bias_dtype", "options"),
    [
        (130, 200, 2, 1, 64, jnp.bfloat16, WHOLE, jnp.bfloat16, {}),
        slow(200, 133, 2, 1, 64, jnp.float16, KEYS, jnp.float32, dict(is_causal=True)),
        slow(67, 150, 4, 2, 128, jnp.bfloat16, HEADS, jnp.float32, dict(is_causal=True)),
        slow(140, 77, 1, 1, 128, jnp.float16, "bts", jnp.float16, dict(local_window_size=(60, 20))),
        slow(130, 67, 2, 1, 256, jnp.bfloat16, "ns", jnp.bfloat16, {}),
        long(70, 100, 1, 1, 256, jnp.bfloat16, HEADS, jnp.bfloat16, dict(is_causal=True)),
        slow(
            100,
            90,
            2,
            1,
            64,
            jnp.bfloat16,
            ROWS,
            jnp.float32,
            dict(is_causal=True, query_offset=-9),
        ),
        slow(70, 130, 2, 1, 64, jnp.bfloat16, "n", jnp.bfloat16, {}),
    ],
)
def test_bias(T, S, N, K, H, dtype, axes, bias_dtype, options):
    bias = random_bias(shape_of(axes, 2, N, T, S), bias_dtype)
    with interpret_mode():
        check(inputs(2, T, S, N, K, H, dtype), bias=bias, **options)


@pytest.mark.long
@pytest.mark.parametrize(
    ("T", "S", "H", "axes", "bias_dtype", "options"),
    [
        slow(130, 264, 64, HEADS, jnp.float16, dict(is_causal=True, query_offset=90)),
        slow(70, 8, 64, "ts", jnp.bfloat16, {}),
        (150, 72, 128, HEADS, jnp.bfloat16, dict(local_window_size=(60, 20))),
        slow(70, 136, 96, WHOLE, jnp.float16, dict(logits_soft_cap=5.0)),
    ],
)
def test_bias_that_comes_in_tiles(T, S, H, axes, bias_dtype, options):
    """Of 16 bits, one a pair, with keys in a multiple of 8."""
    bias = random_bias(shape_of(axes, 2, 2, T, S), bias_dtype)
    with interpret_mode():
        check(inputs(2, T, S, 2, 1, H, jnp.bfloat16), bias=bias, **options)


@pytest.mark.long
@pytest.mark.parametrize(
    ("T", "S", "N", "K", "H", "dtype", "masks", "options"),
    [
        (70, 100, 2, 1, 64, jnp.bfloat16, "bts", {}),
        slow(100, 141, 1, 1, 128, jnp.float16, None, {}),
        slow(70, 80, 2, 2, 40, jnp.float16, None, dict(logits_soft_cap=3.0)),
        slow(260, 300, 8, 2, 64, jnp.bfloat16, None, dict(config=with_shares(64, 4))),
    ],
)
def test_bias_of_each_pair_and_head(T, S, N, K, H, dtype, masks, options):
    """Whose gradient the main kernel has at hand."""
    if masks:
        options = options | dict(mask=random_mask(shape_of(masks, 2, N, T, S)))
    bias = random_bias((2, N, T, S), dtype)
    with interpret_mode(), mock.patch.object(bias_gradient, "bias_gradient", None):
        check(inputs(2, T, S, N, K, H, dtype), bias=bias, **options)


@pytest.mark.long
@pytest.mark.parametrize(
    ("B", "T", "S", "N", "H", "axes", "options"),
    [
        (6, 70, 60, 2, 64, "nts", {}),
        slow(7, 130, 60, 3, 40, "ts", dict(is_causal=True)),
        slow(9, 140, 300, 1, 128, "ts", dict(query_offset=-100, is_causal=True)),
    ],
)
def test_bias_whose_pieces_are_dealt_out(B, T, S, N, H, axes, options):
    """In shares of the batch entries and heads that have it."""
    bias = random_bias(shape_of(axes, B, N, T, S), jnp.bfloat16)
    made, pieces_of = [], Pieces.of_bias

    def noted(*args):
        made.append(pieces_of(*args))
        return made[-1]

    with interpret_mode(), mock.patch.object(Pieces, "of_bias", noted):
        check(inputs(B, T, S, N, N, H, jnp.bfloat16), bias=bias, **options)
    assert made and made[0].shares > 1


@pytest.mark.parametrize("highest", [None, 0, -200])
@pytest.mark.parametrize("shares", [1, 3, 7])
def test_shares_of_a_piece_are_all_of_its_steps(shares, highest):
    problem = Problem(
        7, 300, 200, 2, 1, 64, np.dtype(jnp.bfloat16), 1.0, has_bias=True, highest=highest
    )
    bias = jax.ShapeDtypeStruct((1, 1, 300, 200), jnp.bfloat16)
    whole = dataclasses.replace(Pieces.of_bias(problem, bias), shares=1)
    pieces = dataclasses.replace(whole, shares=shares)
    found = {}
    for number, first, count in pieces.steps().tolist():
        _, own = pieces.share_of(jnp.int32(number))
        found.setdefault(int(own), []).extend(range(first, first + count))
    expected = {number: [*range(count)] for number, _, count in whole.steps().tolist()}
    assert {number: sorted(steps) for number, steps in found.items()} == expected
    assert len(pieces.steps()) == pieces.per_entry == shares * whole.per_entry


@pytest.mark.long
@pytest.mark.fast_cases("nt-float32-options2-1")
@pytest.mark.parametrize("thread_blocks", [3, 1])
@pytest.mark.parametrize(
    ("axes", "bias_dtype", "options"),
    [
        ("nts", jnp.bfloat16, dict(is_causal=True, query_offset=-100)),  # pieces without a step
        ("ns", jnp.float32, dict(is_causal=True, query_offset=-100)),
        ("nt", jnp.float32, dict(local_window_size=(30, 20))),
        ("ts", jnp.float32, {}),
    ],
)
def test_bias_in_many_pieces_of_a_thread_block(
    axes, bias_dtype, options, thread_blocks, monkeypatch
):
    few = dataclasses.replace(defaults.BIAS_GRADIENT[64], thread_blocks=thread_blocks, stages=2)
    monkeypatch.setitem(defaults.BIAS_GRADIENT, 64, few)
    bias = random_bias(shape_of(axes, 2, 2, 150, 200), bias_dtype)
    with interpret_mode():
        check(inputs(2, 150, 200, 2, 1, 64, jnp.bfloat16), bias=bias, **options)


@pytest.mark.long
@pytest.mark.parametrize(
    ("H", "S", "dtype"),
    [(64, 150, jnp.float32), slow(64, 152, jnp.bfloat16), slow(256, 150, jnp.float32)],
)
def test_bias_that_is_nan_where_hidden_and_infinite_elsewhere(H, S, dtype):
    with interpret_mode(detect_races=False):  # which `check` does
        check_bias_that_is_nan_where_hidden_and_infinite_elsewhere(H, S, dtype)


@pytest.mark.long
@pytest.mark.parametrize(
    ("H", "h", "mask_axes", "bias_axes", "options"),
    [
        (40, 72, "bts", "bs", dict(is_causal=True)),
        slow(96, 96, None, HEADS, {}),
        slow(192, 128, WHOLE, KEYS, dict(deterministic=True)),
        slow(160, 224, KEYS, ROWS, dict(local_window_size=(60, 20))),
    ],
)
def test_other_widths(H, h, mask_axes, bias_axes, options):
    T, S, N, K = 70, 133, 2, 1
    mask = random_mask(shape_of(mask_axes, 2, N, T, S)) if mask_axes else None
    bias = random_bias(shape_of(bias_axes, 2, N, T, S))
    with interpret_mode():
        check(inputs(2, T, S, N, K, H, jnp.bfloat16, h=h), mask=mask, bias=bias, **options)


@pytest.mark.long
@pytest.mark.parametrize("H", [64, slow(256)])
def test_bias_of_keys_over_many_tiles(H):
    """Whose -inf hides all keys of the first steps, and one key of the last stands far above."""
    arrays = inputs(1, 200, 277, 1, 1, H, jnp.bfloat16)
    bias = random_bias((1, 1, 1, 277)).at[..., 100:].set(-jnp.inf).at[..., 5].set(200.0)
    with interpret_mode():
        check(arrays, bias=bias, config=few_thread_blocks(H, 1))
