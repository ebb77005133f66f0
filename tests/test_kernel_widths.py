"""Widths other than 64, 128 and 256 on the kernels, in interpret mode and on a Hopper GPU."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from pallas_kernels.columns import Columns
from pallas_kernels.problem import Problem
from tests.support.cases import slow
from tests.support.interpret import interpret_mode
from tests.support.kernel_calls import check, few_thread_blocks, inputs, with_a_jump
from tests.support.nonzero import assert_none_is_zero

attention = functools.partial(jax_flash.attention, implementation="mosaic_gpu")

# Of query and key, and of value.
WIDTHS = [
    (8, 8),
    (64, 128),
    (80, 40),
    (96, 96),
    (128, 64),
    (160, 160),
    (192, 128),
    (64, 192),
    (224, 224),
    (256, 8),
    (80, 80),
    (32, 96),
]


@pytest.mark.long
@pytest.mark.fast_cases("8-8", "256-8")
@pytest.mark.parametrize(("H", "h"), WIDTHS)
def test_widths_in_interpret_mode(H, h):
    """Masks, heads, dtype and lengths change from case to case."""
    case = WIDTHS.index((H, h))
    T, S = [(70, 77), (67, 150), (100, 61)][case % 3]
    N, K = [(2, 1), (1, 1)][case // 3 % 2]
    arrays = inputs(1, T, S, N, K, H, [jnp.bfloat16, jnp.float16][case % 2], h=h)
    with interpret_mode():
        check(arrays, is_causal=case % 4 > 0, query_offset=0 if case % 4 < 2 else S - T)


@pytest.mark.long
@pytest.mark.parametrize(
    ("H", "h", "options"),
    [
        (96, 96, dict(is_causal=True)),
        slow(40, 72, dict(is_causal=False)),
        slow(128, 64, dict(local_window_size=(40, 20), query_offset=10)),
    ],
)
def test_deterministic_gradients(H, h, options):
    arrays = inputs(1, 100, 150, 2, 1, H, jnp.bfloat16, h=h)
    with interpret_mode():
        check(arrays, **options, deterministic=True)


@pytest.mark.long
@pytest.mark.parametrize(
    ("H", "h", "options"),
    [
        (192, 128, dict(is_causal=True, local_window_size=(60, 0))),
        slow(192, 128, dict(key_value_seq_lengths=jnp.array([100]), is_causal=True)),
        slow(80, 80, dict(query_seq_lengths=jnp.array([150]), sinks=jnp.array([1.0, -2.0]))),
        slow(160, 224, dict(is_causal=True)),
    ],
)
def test_a_thread_block_walks_many_tiles(H, h, options):
    arrays = inputs(1, 170, 210, 2, 1, H, jnp.bfloat16, h=h)
    with interpret_mode():
        check(arrays, **options, config=few_thread_blocks(H, 1, h))


@pytest.mark.slow
@pytest.mark.parametrize(("H", "h"), [(72, 72), (192, 128)])
def test_maxima_that_jump(H, h):
    arrays = with_a_jump(inputs(1, 100, 300, 2, 2, H, jnp.bfloat16, h=h), 0, 100)
    with interpret_mode():
        check(arrays, is_causal=False)


def check_that_other_heads_do_not_leak(T, S, H, h):
    """NaN in the heads on both sides: what lies behind the last column is the next head's first."""
    arrays = inputs(1, T, S, 3, 3, H, jnp.bfloat16, h=h)[:4]
    poisoned = [x.at[:, :, jnp.array([0, 2])].set(jnp.nan) for x in arrays]

    @jax.jit
    def results(query, key, value, dout):
        out, vjp = jax.vjp(functools.partial(attention, is_causal=True), query, key, value)
        return [x[:, :, 1].astype(jnp.float32) for x in (out, *vjp(dout))]

    clean, got = results(*arrays), results(*poisoned)
    assert_none_is_zero(clean)
    chex.assert_tree_all_finite(got)
    chex.assert_trees_all_close(got, clean, atol=1e-2)


@pytest.mark.long
@pytest.mark.parametrize(("H", "h"), [(40, 72), slow(160, 80)])
def test_other_heads_do_not_leak(H, h):
    with interpret_mode():
        check_that_other_heads_do_not_leak(17, 40, H, h)


@pytest.mark.slow
def test_vmap_and_grad():
    query, key, value, _, _ = inputs(2, 24, 24, 1, 1, 24, jnp.bfloat16, h=16)

    def loss(q, k, v):
        return (attention(q, k, v).astype("float32") ** 2).sum()

    with interpret_mode():
        expected = jax.grad(loss, (0, 1, 2))(query, key, value)
        unbatched = jax.vmap(jax.grad(loss, (0, 1, 2)))(query, key, value)
    assert_none_is_zero(expected)
    chex.assert_trees_all_equal(unbatched, expected)
    assert [x.shape[-1] for x in expected] == [24, 24, 16]


@pytest.mark.parametrize(("H", "h", "name"), [(100, 64, "width"), (64, 264, "value_width")])
def test_problems_that_cannot_be(H, h, name):
    with pytest.raises(ValueError, match=f"^{name}: got .*, needs a multiple of 8, up to 256"):
        Problem(1, 8, 8, 1, 1, H, np.dtype(jnp.bfloat16), 1.0, value_width=h)


@pytest.mark.parametrize(
    ("width", "size", "first", "tiles", "tile_width"),
    [
        (192, 192, 0, 1, 192),
        (256, 128, 128, 1, 128),
        (96, 128, 0, 2, 64),
        (224, 128, 128, 2, 64),
        (64, 128, 0, 2, 64),  # the second tile is zeros
        (40, 64, 0, 1, 64),
    ],
)
def test_columns(width, size, first, tiles, tile_width):
    columns = Columns(width, size, first)
    assert (columns.tiles, columns.tile_width) == (tiles, tile_width)
    covered = np.concatenate([np.r_[x] for x in columns.tile_slices])
    np.testing.assert_array_equal(covered, np.arange(size))


@pytest.mark.parametrize(
    ("width", "size", "tiles", "parts"),
    [
        (32, 32, 1, [32]),
        (80, 80, 1, [80]),
        (96, 96, 1, [96]),
        (160, 160, 1, [32] * 5),
        (224, 224, 1, [32] * 7),
        (72, 128, 2, [128]),
        (192, 192, 1, [64] * 3),
        (256, 256, 1, [128] * 2),
    ],
)
def test_whole_columns(width, size, tiles, parts):
    """Of up to 128 columns a part."""
    columns = Columns.of_keys(Problem(1, 16, 8, 1, 1, width, np.dtype(jnp.bfloat16), 1.0))
    assert (columns.size, columns.tiles, columns.products) == (size, tiles, tiles)
    assert [part.size for part in columns.in_parts(128)] == parts
    assert [part.first for part in columns.in_parts(128)] == list(np.cumsum([0, *parts[:-1]]))


@pytest.mark.parametrize(("T", "S"), [(16, 9), (15, 8), (1, 1)])
@pytest.mark.parametrize(("width", "tiles"), [(64, 1), (72, 2), (80, 5), (96, 3), (256, 4)])
def test_columns_of_odd_rows(T, S, width, tiles):
    """All boxes have a copy, and together they are one operand."""
    columns = Columns.of_values(Problem(1, T, S, 1, 1, width, np.dtype(jnp.bfloat16), 1.0))
    assert (columns.tiles, columns.products) == (tiles, 1)
    assert columns.tiles * columns.tile_width == columns.size


GPU_WIDTHS = [
    *WIDTHS,
    *((40, 40), (72, 72), (192, 192), (24, 112), (136, 80), (8, 256)),
    *((32, 32), (80, 96), (96, 64), (160, 96), (224, 160)),
]


@pytest.mark.fast_cases("8-8", "96-96", "64-192", "32-96", "24-112", "80-96")
@pytest.mark.gpu
@pytest.mark.parametrize(("H", "h"), GPU_WIDTHS)
def test_widths_on_a_gpu(H, h):
    case = GPU_WIDTHS.index((H, h))
    arrays = inputs(
        2, 517, 613, *[(4, 2), (2, 2)][case % 2], H, [jnp.bfloat16, jnp.float16][case % 2], h=h
    )
    check(arrays, is_causal=case % 3 > 0, query_offset=96, deterministic=case % 4 == 0)


@pytest.mark.gpu
@pytest.mark.parametrize(("H", "h"), [(192, 128), slow(96, 96), slow(200, 40)])
def test_a_thread_block_walks_many_tiles_on_a_gpu(H, h):
    arrays = inputs(4, 1157, 1091, 8, 4, H, jnp.bfloat16, h=h)
    check(arrays, is_causal=True, config=few_thread_blocks(H, 20, h))
    check(with_a_jump(arrays, 0, 300), local_window_size=(400, 100))


@pytest.mark.gpu
@pytest.mark.parametrize(("H", "h"), [(40, 72), slow(160, 80)])
def test_other_heads_do_not_leak_on_a_gpu(H, h):
    check_that_other_heads_do_not_leak(200, 333, H, h)


@pytest.mark.fast_cases("False-32-32", "True-32-32")
@pytest.mark.gpu
@pytest.mark.parametrize(("H", "h"), [(32, 32), (80, 80), (96, 96), (160, 160)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_soft_cap_and_segment_ids_on_a_gpu(H, h, deterministic):
    """What is stored at addresses made anew, and where ids are compared."""
    arrays = inputs(2, 517, 613, 4, 2, H, jnp.bfloat16, h=h)
    options = dict(is_causal=True, query_offset=96, deterministic=deterministic)
    check(arrays, **options, logits_soft_cap=3.0)
    ids = dict(
        query_segment_ids=jnp.repeat(jnp.arange(11), 47),
        key_value_segment_ids=jnp.repeat(jnp.arange(14), 44)[:613],
    )
    check(arrays, **options, **{name: jnp.tile(x[None], (2, 1)) for name, x in ids.items()})


@pytest.mark.gpu
@pytest.mark.parametrize(("H", "h"), [(192, 128), slow(96, 96)])
def test_lengths_and_sinks_on_a_gpu(H, h):
    arrays = inputs(4, 517, 613, 4, 2, H, jnp.bfloat16, h=h)
    lengths = dict(key_value_seq_lengths=jnp.array([613, 0, 77, 512]))
    check(arrays, is_causal=True, **lengths, sinks=jnp.array([0.0, 2.0, -3.0, 12.0]))


@pytest.mark.gpu
@pytest.mark.parametrize(("H", "h"), [(192, 128), slow(96, 96)])
def test_repeats_are_bit_equal_on_a_gpu(H, h):
    """Forward and deterministic gradients, with every buffer used again and again."""
    query, key, value, dout, _ = inputs(4, 1157, 1157, 8, 4, H, jnp.bfloat16, h=h)
    settings = few_thread_blocks(H, 32, h)

    @jax.jit
    def results(query, key, value, dout):
        run = functools.partial(attention, is_causal=True, deterministic=True, config=settings)
        out, vjp = jax.vjp(run, query, key, value)
        return out, *vjp(dout)

    @jax.jit
    def same(x, y):
        return jnp.stack([(a == b).all() for a, b in zip(x, y, strict=True)]).all()

    first = results(query, key, value, dout)
    assert all(same(first, results(query, key, value, dout)) for _ in range(200))
