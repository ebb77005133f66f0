"""The kernels in interpret mode, with race detection, beside float64 attention."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from pallas_kernels import (
    backward_query_block,
    backward_query_product,
    config,
    defaults,
    forward_plan,
    key_tiles_order,
    scheduler,
)
from pallas_kernels.backward_key_plan import key_tiles
from pallas_kernels.forward_plan import Plan as ForwardPlan
from pallas_kernels.forward_tiles import Tiles
from pallas_kernels.forward_times import Timed
from pallas_kernels.key_tiles import KeyTiles
from pallas_kernels.key_tiles_shares import d_logits_sections
from pallas_kernels.problem import Problem
from pallas_kernels.ptx.barriers import NamedBarriers
from tests import oracle
from tests.support import launches
from tests.support.cases import long, slow
from tests.support.interpret import interpret_mode
from tests.support.kernel_calls import (
    check,
    check_that_keys_do_not_count,
    few_thread_blocks,
    inputs,
    with_a_jump,
)
from tests.support.nonzero import assert_none_is_zero


@pytest.mark.parametrize(
    ("T", "S", "N", "K", "H", "dtype", "is_causal", "query_offset"),
    [
        slow(256, 256, 1, 1, 64, jnp.bfloat16, False, 0),
        (200, 264, 2, 1, 64, jnp.bfloat16, True, 0),
        slow(1, 239, 2, 2, 64, jnp.float16, False, 0),
        slow(256, 256, 1, 1, 128, jnp.bfloat16, True, 0),
        slow(67, 300, 4, 2, 128, jnp.float16, False, 0),
        slow(113, 203, 2, 1, 128, jnp.bfloat16, True, 90),
        long(200, 70, 1, 1, 128, jnp.bfloat16, True, -50),
        (150, 67, 4, 2, 256, jnp.bfloat16, False, 0),
        slow(100, 150, 2, 1, 256, jnp.float16, True, 50),
    ],
)
def test_kernels_in_interpret_mode(T, S, N, K, H, dtype, is_causal, query_offset):
    with interpret_mode():
        check(inputs(1, T, S, N, K, H, dtype), is_causal=is_causal, query_offset=query_offset)


@pytest.mark.parametrize(
    ("T", "S", "N", "K", "H", "dtype", "is_causal", "query_offset"),
    [
        (256, 256, 1, 1, 64, jnp.bfloat16, False, 0),
        slow(113, 203, 4, 2, 128, jnp.bfloat16, True, 90),  # in CI by test_kernel_shares.py
        slow(200, 70, 1, 1, 128, jnp.bfloat16, True, -150),  # a tile that sees nothing
        slow(150, 67, 1, 1, 256, jnp.bfloat16, False, 0),  # at this width all gradients are
        slow(100, 150, 2, 1, 256, jnp.float16, True, 50),
    ],
)
def test_deterministic_gradients(T, S, N, K, H, dtype, is_causal, query_offset):
    arrays = inputs(1, T, S, N, K, H, dtype)
    with interpret_mode():
        check(arrays, is_causal=is_causal, query_offset=query_offset, deterministic=True)


@pytest.mark.long
@pytest.mark.parametrize(
    ("H", "dtype", "is_causal", "query_offset", "sinks"),
    [
        slow(64, jnp.bfloat16, False, 0, (0.0, 3.0)),
        slow(128, jnp.float16, True, 0, (-5.0, 40.0)),  # one that takes nearly all weight
        (64, jnp.bfloat16, True, -50, (1e4, -1e4)),  # all of it, and none
        slow(256, jnp.bfloat16, True, 10, (2.0, -jnp.inf)),
    ],
)
def test_sinks(H, dtype, is_causal, query_offset, sinks):
    """Also in rows that see nothing, where they take no weight."""
    arrays = inputs(1, 200, 150, 2, 1, H, dtype)
    with interpret_mode():
        check(arrays, is_causal=is_causal, query_offset=query_offset, sinks=jnp.array(sinks))


@pytest.mark.long
def test_sinks_where_maxima_jump():
    arrays = with_a_jump(inputs(1, 150, 400, 2, 2, 64, jnp.bfloat16), 0, 100)
    with interpret_mode():
        check(
            arrays, is_causal=False, sinks=jnp.array([30.0, 1.0]), config=few_thread_blocks(64, 1)
        )


@pytest.mark.slow
def test_vmap_over_sinks():
    query, key, value, _, _ = inputs(1, 40, 48, 2, 2, 64, jnp.bfloat16)
    sinks = jnp.array([[0.0, 1.0], [2.0, -1.0]])

    def loss(sinks):
        out = jax_flash.attention(query, key, value, sinks=sinks, implementation="mosaic_gpu")
        return (out.astype(jnp.float32) ** 2).sum()

    with interpret_mode():
        values, gradients = jax.vmap(jax.value_and_grad(loss))(sinks)
        one_by_one = [jax.value_and_grad(loss)(row) for row in sinks]
    chex.assert_trees_all_close(
        (values, gradients), jax.tree.map(lambda *x: jnp.stack(x), *one_by_one), rtol=1e-6
    )
    assert abs(gradients).min() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    "backward_query",
    [
        config.BackwardQueryConfig(block_kv=128, stages=(1, 2)),
        slow(config.BackwardQueryConfig(block_kv=64, stages=(2, 1))),
    ],
)
def test_deterministic_settings_other_than_the_default(backward_query):
    settings = dataclasses.replace(defaults.default(64), backward_query=backward_query)
    arrays = inputs(1, 200, 290, 1, 1, 64, jnp.bfloat16)
    with interpret_mode():
        check(arrays, is_causal=True, query_offset=60, config=settings, deterministic=True)


@pytest.mark.parametrize(
    ("S", "deterministic_alone", "other"),
    [
        (300, {"attention_backward_query"}, {"cast_dq"}),
        (200, {"cast_dq"}, {"cast_dq"}),  # each of two tiles of keys has dQ of its own
        (64, set(), set()),  # one has it whole
    ],
)
def test_deterministic_gradients_take_kernels_of_their_own(S, deterministic_alone, other):
    arrays = inputs(1, 64, S, 1, 1, 64, jnp.bfloat16)

    def kernels(deterministic: bool) -> set[str]:
        def gradients(query, key, value, dout):
            attention = functools.partial(
                jax_flash.attention, implementation="mosaic_gpu", deterministic=deterministic
            )
            return jax.vjp(attention, query, key, value)[1](dout)

        traced = launches.kernels(gradients, *arrays[:4])
        return {name for name in ("attention_backward_query", "cast_dq") if name in traced}

    assert kernels(deterministic=True) == deterministic_alone
    assert kernels(deterministic=False) == other


@pytest.mark.slow
def test_rows_of_large_logits_and_maxima_that_grow():
    """Each later key block, in the order of the kernel, brings a larger maximum."""
    query, key, value, dout, dlse = inputs(1, 64, 512, 1, 1, 64, jnp.bfloat16)
    growth = jnp.repeat(jnp.array([8.0, 4.0, 2.0, 1.0], jnp.bfloat16), 128)
    with interpret_mode():
        check((query, key * growth[:, None, None], value, dout, dlse), is_causal=False)


@pytest.mark.long
@pytest.mark.parametrize(
    ("H", "dtype", "is_causal"),
    [(64, jnp.bfloat16, False), slow(128, jnp.float16, True), slow(256, jnp.bfloat16, False)],
)
def test_maxima_that_jump_and_other_heads(H, dtype, is_causal):
    """A second round over the tiles of a thread block, which leaves other heads as they were.

    To the bit on a GPU; on a CPU, XLA contracts multiplications and additions as it pleases.
    """
    arrays = inputs(1, 150, 400, 2, 2, H, dtype)
    options = dict(is_causal=is_causal, query_offset=250 if is_causal else 0)
    settings = few_thread_blocks(H, 1)
    attention = functools.partial(
        jax_flash.attention,
        **options,
        return_residual=True,
        implementation="mosaic_gpu",
        config=settings,
    )
    with interpret_mode():
        check(with_a_jump(arrays, 0, 100), **options, config=settings)
        calm = attention(*arrays[:3])
        jumping = attention(*with_a_jump(arrays, 0, 100)[:3])
    chex.assert_trees_all_close(
        *(jax.tree.map(lambda x: x[:, :, 1].astype(jnp.float32), r) for r in (jumping, calm)),
        rtol=2.0**-7,
        atol=1e-4,
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("H", "thread_blocks", "is_causal", "query_offset", "deterministic"),
    [
        slow(64, 2, True, 0, False),
        slow(64, 1, False, 0, False),
        (128, 1, True, -130, False),
        slow(128, 1, True, -290, False),  # tiles of one step, and tiles that nothing sees
        (64, 1, True, 20, True),
        slow(256, 2, True, 0, False),
        slow(256, 1, False, 0, False),  # beside one of width 192 in test_kernel_widths.py
        slow(256, 1, True, -130, False),
        slow(256, 2, True, -290, False),
    ],
)
def test_a_thread_block_walks_many_tiles(H, thread_blocks, is_causal, query_offset, deterministic):
    arrays = inputs(1, 300, 277, 2, 1, H, jnp.bfloat16)
    options = dict(is_causal=is_causal, query_offset=query_offset, deterministic=deterministic)
    settings = few_thread_blocks(H, thread_blocks)
    with interpret_mode():
        check(arrays, **options, config=settings)


@pytest.mark.long
@pytest.mark.fast_cases("64-options0")
@pytest.mark.parametrize(
    ("H", "options"),
    [
        (64, {"is_causal": True}),
        (128, {"local_window_size": (90, 10)}),
        slow(128, {"is_causal": True, "query_offset": -130}),
        slow(64, {"is_causal": True, "logits_soft_cap": 20.0}),
    ],
)
def test_many_tiles_end_without_a_branch(monkeypatch, H, options):
    """With logits of no tile after the last one of each round, which go nowhere."""
    monkeypatch.setattr(forward_plan, "_FEW_TILES", 0)
    branches = []
    asks = ForwardPlan.branches_at_ends

    def asked(plan):
        branches.append(asks.fget(plan))
        return branches[-1]

    monkeypatch.setattr(ForwardPlan, "branches_at_ends", property(asked))
    arrays = inputs(1, 310, 270, 2, 1, H, jnp.bfloat16)
    with interpret_mode():
        check(with_a_jump(arrays, 0, 60), **options, config=few_thread_blocks(H, 2))
    assert branches and not any(branches)


@pytest.mark.long
@pytest.mark.fast_cases("window-(2, 1)")
@pytest.mark.parametrize("sections", [(2, 1), (), (1, 1, 1)], ids=str)
@pytest.mark.parametrize(
    "options", [dict(is_causal=True), dict(local_window_size=(20, 30))], ids=["causal", "window"]
)
def test_sections_of_heads_at_width_256(sections, options):
    """As few as the memory for dS' allows; where it is too little dQ has products of its own."""
    arrays = inputs(3, 140, 70, 2, 1, 256, jnp.bfloat16)
    step_bytes = 64 * 64 * 2
    head_bytes = 2 * 2 * 3 * step_bytes  # two query heads, two key tiles, three query blocks
    most = {(1, 1, 1): head_bytes, (2, 1): 3 * head_bytes - 1, (): step_bytes}[sections]
    backward = config.BackwardKeyConfig(d_logits_bytes=most, shares=1)
    problem = Problem(3, 140, 70, 2, 1, 256, np.dtype(jnp.bfloat16), scale=1.0)
    made = d_logits_sections(key_tiles(problem, backward), most)
    assert tuple(len(section.kv_heads) for section in made) == sections
    settings = dataclasses.replace(defaults.default(256), backward=backward)
    with interpret_mode():
        check(arrays, **options, config=settings)


def test_two_heads_rather_than_one_may_take_a_quarter_more():
    problem = Problem(1, 640, 640, 4, 4, 192, np.dtype(jnp.bfloat16), 1.0)
    head = 640 * 640 * 2
    sizes = {}
    for share in (0.99, 1.0, 1.59, 1.61, 2.0):
        backward = config.BackwardKeyConfig(d_logits_bytes=int(share * head), shares=1)
        made = d_logits_sections(key_tiles(problem, backward), backward.d_logits_bytes)
        sizes[share] = [len(section.kv_heads) for section in made]
    assert sizes == {0.99: [], 1.0: [1] * 4, 1.59: [1] * 4, 1.61: [2, 2], 2.0: [2, 2]}


@pytest.mark.parametrize(
    ("length", "heads", "width", "highest", "consumers"),
    [
        (12288, 2, 192, None, 3),  # 192 tiles for 132 SMs, or 128
        (12288, 2, 256, None, 2),  # for which there are no registers
        (4096, 16, 192, None, 2),
        (4096, 4, 192, None, 2),  # 128 tiles, or 88
        (5000, 4, 136, 0, 2),  # the long ones first, in any number
    ],
)
def test_tiles_of_a_query_product_fill_sms(length, heads, width, highest, consumers):
    dtype = np.dtype(jnp.bfloat16)
    problem = Problem(1, length, length, heads, heads, width, dtype, 1.0, highest=highest)
    tiles = key_tiles(problem, defaults.BACKWARD[256]).in_one_part
    assert backward_query_product._consumers(tiles, range(heads)) == consumers


def test_tiles_of_queries_come_head_by_head_where_l2_has_not_their_keys():
    problem = Problem(2, 700, 20000, 9, 9, 256, np.dtype(jnp.bfloat16), 1.0)
    tiles = key_tiles(problem, defaults.BACKWARD[256]).in_one_part
    number, _ = backward_query_product._order(tiles, tiles.kv_heads, 2)
    np.testing.assert_array_equal(number, np.arange(18 * 6))
    plan = backward_query_block.Plan(problem, defaults.BACKWARD_QUERY[256], part=0)
    tile, head, _ = plan.order.T
    np.testing.assert_array_equal(head * plan.tiles + tile, np.arange(18 * plan.tiles))


@pytest.mark.long
@pytest.mark.parametrize(("H", "options"), [(192, {}), slow(136, dict(is_causal=True))])
def test_a_query_product_of_three_consumers(monkeypatch, H, options):
    """In the last tile one of them has no rows, or two."""
    monkeypatch.setattr(backward_query_product, "_consumers", lambda *_: 3)
    with interpret_mode():
        check(inputs(1, 300 if H == 192 else 250, 150, 2, 1, H, jnp.bfloat16), **options)


@pytest.mark.long
@pytest.mark.parametrize("H", [64, slow(256)])
def test_an_lse_that_nothing_differentiates(H):
    """Its gradient is left out, not made of zeros."""
    query, key, value, dout, dlse = inputs(1, 70, 130, 2, 1, H, jnp.bfloat16)

    def attention(query, key, value):
        options = dict(is_causal=True, query_offset=60, implementation="mosaic_gpu")
        return jax_flash.attention(query, key, value, **options, return_residual=True)

    with interpret_mode(detect_races=False):  # which `check` does
        (_, lse), vjp = jax.vjp(attention, query, key, value)
        assert lse.shape == dlse.shape
        with_zeros = vjp((dout, jnp.zeros_like(dlse)))
        _, vjp_of_out = jax.vjp(lambda *x: attention(*x)[0], query, key, value)
        chex.assert_trees_all_equal(vjp_of_out(dout), with_zeros)
    assert_none_is_zero(with_zeros)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("H", "options"),
    [
        (64, dict(is_causal=True)),
        slow(128, dict(is_causal=True, local_window_size=(100, 0))),
        slow(256, dict(is_causal=True)),
        slow(128, dict(key_value_seq_lengths=[200])),
    ],
)
def test_gradients_do_not_depend_on_thread_blocks(H, options):
    """One for each tile or lists: to the bit, but for dQ that is summed over thread blocks."""
    options = {name: jnp.array(x) if isinstance(x, list) else x for name, x in options.items()}
    *arrays, dout, _ = inputs(1, 150, 277, 2, 1, H, jnp.bfloat16)

    def gradients(thread_blocks, deterministic):
        settings = defaults.default(H)
        backward = dataclasses.replace(settings.backward, thread_blocks=thread_blocks)
        attention = functools.partial(
            jax_flash.attention,
            **options,
            implementation="mosaic_gpu",
            deterministic=deterministic,
            config=dataclasses.replace(settings, backward=backward),
        )
        return jax.vjp(attention, *arrays)[1](dout)

    with interpret_mode():
        for deterministic in (False, True):
            of_lists, one_each = (gradients(count, deterministic) for count in (1, 1000))
            assert_none_is_zero(one_each)
            first = 0 if deterministic else 1
            chex.assert_trees_all_equal(of_lists[first:], one_each[first:])
            chex.assert_trees_all_close(
                *(x[0].astype(jnp.float32) for x in (of_lists, one_each)), atol=1e-2, rtol=2e-2
            )


@pytest.mark.long
def test_settings_other_than_the_default():
    settings = config.Config(
        config.ForwardConfig(
            consumers=2, block_kv=64, stages=3, query_buffers=1, registers=(240, 24)
        ),
        config.BackwardConfig(block_q=64, stages=1),
    )
    with interpret_mode():
        check(inputs(1, 200, 150, 2, 1, 128, jnp.bfloat16), is_causal=True, config=settings)


@pytest.mark.long
@pytest.mark.parametrize("is_causal", [False, slow(True)])
def test_four_consumers(is_causal):
    settings = dataclasses.replace(defaults.default(64), forward=defaults.FOUR_CONSUMERS)
    with interpret_mode():
        check(
            inputs(1, 300, 140, 2, 1, 64, jnp.bfloat16),
            is_causal=is_causal,
            sinks=jnp.array([0.5, -1.0]),
            config=settings,
        )


@pytest.mark.slow
def test_keys_that_no_query_sees_at_width_256():
    with interpret_mode():
        check(inputs(1, 70, 200, 1, 1, 256, jnp.bfloat16), is_causal=True, query_offset=-10)


@pytest.mark.long
def test_key_gradients_do_not_come_from_rounded_weights():
    """Weights rounded to bfloat16 before dS would bring the error of dK from 2.3e-3 to 2.8e-3."""
    arrays = inputs(1, 256, 64, 1, 1, 256, jnp.bfloat16)
    attention = functools.partial(
        jax_flash.attention, implementation="mosaic_gpu", return_residual=True
    )
    with interpret_mode():
        d_key = jax.vjp(attention, *arrays[:3])[1](arrays[3:])[1]
    exact = oracle.gradients(*arrays[:3], dout=arrays[3], dlse=arrays[4]).key
    error = np.linalg.norm(np.asarray(d_key, np.float64) - exact) / np.linalg.norm(exact)
    assert error < 2.5e-3


def trace_gradients(width: int, settings: config.Config) -> None:
    """Traces forward and backward, and runs nothing."""
    attention = functools.partial(jax_flash.attention, implementation="mosaic_gpu", config=settings)
    gradients = lambda *arrays: jax.vjp(attention, *arrays[:3])[1](arrays[3])
    jax.eval_shape(gradients, *inputs(1, 64, 64, 1, 1, width, jnp.bfloat16)[:4])


@pytest.mark.parametrize(("width", "backward"), [(256, 64), (64, 256)])
def test_settings_of_the_other_backward_kernel(width, backward):
    settings = dataclasses.replace(defaults.default(width), backward=defaults.BACKWARD[backward])
    with pytest.raises(TypeError, match=f"config: got .* at width {width}"):
        trace_gradients(width, settings)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (dict(thread_blocks=0), "thread_blocks"),
        (dict(registers=(240, 32)), "registers"),
    ],
)
def test_backward_key_settings_that_cannot_be(change, name):
    with pytest.raises(ValueError, match=f"{name}: got"):
        dataclasses.replace(defaults.BACKWARD[256], **change)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (dict(consumers=0), "consumers"),
        (dict(consumers=4), "registers"),
        (dict(registers=(240, 24)), "registers"),
        (dict(registers=(161, 32)), "registers"),
        (dict(block_kv=96), "block_kv"),
        (dict(stages=1), "stages"),
        (dict(query_buffers=3), "query_buffers"),
        (dict(staged_columns=80), "staged_columns"),
        (dict(section_bytes=-1), "section_bytes"),
        (dict(thread_blocks=0), "thread_blocks"),
    ],
)
def test_forward_settings_that_cannot_be(change, name):
    with pytest.raises(ValueError, match=f"{name}: got"):
        dataclasses.replace(defaults.FORWARD[64], **change)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (dict(block_q=96), "block_q"),
        (dict(stages=0), "stages"),
        (dict(stages=3), "stages"),
        (dict(thread_blocks=0), "thread_blocks"),
        (dict(registers=(240, 32)), "registers"),
    ],
)
def test_backward_settings_that_cannot_be(change, name):
    with pytest.raises(ValueError, match=f"{name}: got"):
        dataclasses.replace(defaults.BACKWARD[64], **change)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (dict(block_kv=96), "block_kv"),
        (dict(stages=(2,)), "stages"),
        (dict(stages=(1, 0)), "stages"),
        (dict(registers=(240, 32)), "registers"),
    ],
)
def test_backward_query_settings_that_cannot_be(change, name):
    with pytest.raises(ValueError, match=f"{name}: got"):
        dataclasses.replace(defaults.BACKWARD_QUERY[64], **change)


@pytest.mark.parametrize(
    ("widths", "name"), [((264,), "width"), ((0,), "width"), ((64, 12), "value_width")]
)
def test_no_settings_of_widths_that_kernels_do_not_take(widths, name):
    with pytest.raises(ValueError, match=f"^{name}: got {widths[-1]}"):
        defaults.default(*widths)


def described(width: int, keys: int, length: int = 2048, heads: int = 528, **options) -> Problem:
    dtype = np.dtype(jnp.bfloat16)
    return Problem(1, length, keys, heads, heads, width, dtype, 1.0, **options)


@pytest.mark.parametrize(
    ("width", "keys", "options", "consumers", "block_kv"),
    [
        (64, 157, {}, 4, 64),
        (64, 200, {}, 3, 128),  # as many in either steps
        (64, 577, {}, 3, 128),
        (64, 157, dict(length=197, heads=768, dynamic=True), 2, 64),
        (64, 157, dict(length=197, heads=768, dropout=99), 2, 128),
        (64, 157, dict(soft_cap=1.0), 2, 128),
        (64, 157, dict(segmented=True), 2, 128),
        (40, 157, {}, 4, 64),
        (80, 157, {}, 3, 64),
        (128, 157, {}, 2, 64),
        (128, 577, {}, 2, 128),
        (128, 157, dict(has_bias=True), 2, 128),
        (128, 157, dict(segmented=True), 2, 128),
        (256, 157, {}, 2, 64),
    ],
)
def test_few_keys_take_steps_of_64(width, keys, options, consumers, block_kv):
    forward = defaults.for_problem(described(width, keys, **options)).forward
    assert (forward.consumers, forward.block_kv) == (consumers, block_kv)


@pytest.mark.parametrize(
    ("shape", "options", "block_kv"),
    [
        ((1, 64, 64, 132), dict(width=64), 64),
        ((1, 128, 128, 66), dict(width=64), 128),
        ((2, 300, 297, 13), dict(width=96), 64),
        ((2, 300, 1000, 13), dict(width=128), 128),
        ((1, 72, 72, 7), dict(width=192, highest=0), 64),
        ((1, 128, 128, 4), dict(width=256, has_bias=True), 64),
        ((1, 128, 200, 4), dict(width=128, segmented=True), 128),
        ((1, 128, 128, 4), dict(width=64, dropout=100), 128),
    ],
)
def test_tiles_that_find_an_sm_each_have_one_consumer(shape, options, block_kv):
    batch, queries, keys, heads = shape
    options = {"dtype": np.dtype(jnp.bfloat16), "scale": 1.0} | options
    problem = lambda heads, keys: Problem(batch, queries, keys, heads, heads, **options)
    forward = lambda *sizes: defaults.for_problem(problem(*sizes)).forward
    assert (forward(heads, keys).consumers, forward(heads, keys).block_kv) == (1, block_kv)
    tiles = batch * -(-queries // 64)
    most = 132 // tiles
    assert forward(most, 64).consumers == 1 and forward(most + 1, 64).consumers > 1
    assert forward(most, 132 * 1024 // (tiles * most) + 1).consumers > 1


@pytest.mark.parametrize(
    ("length", "heads", "keys", "causal", "consumers", "block_kv"),
    [
        (4096, 128, 4096, False, 3, 128),  # many rounds: the one with most products a second
        (4096, 128, 4096, True, 3, 128),
        (2048, 8, 2048, False, 2, 128),  # one round: the one with the shortest tiles
        (256, 128, 256, False, 4, 64),  # 128 tiles for 132 SMs, of which 256 would take two rounds
        (1024, 32, 1024, False, 4, 64),
        (1024, 32, 1024, True, 2, 128),
        (1024, 32, 4096, True, 2, 128),  # as many are seen
        (197, 768, 197, False, 4, 64),
        (64, 1536, 64, False, 2, 64),
    ],
)
def test_settings_of_width_64_are_those_that_end_earliest(
    length, heads, keys, causal, consumers, block_kv
):
    highest = 0 if causal else None
    problem = described(64, keys, length, heads, highest=highest)
    settings = defaults.for_problem(problem).forward
    assert (settings.consumers, settings.block_kv) == (consumers, block_kv)


@pytest.mark.parametrize("highest", [None, 300])
def test_times_are_those_of_tiles(highest):
    """Of 44 heads of 3 tiles, one for each SM, 88 and 48; of 5 steps or causal of 5, 4 and 3."""
    timed = Timed(defaults.TIMED_64[2].config, launch=100.0, tile=10.0, edge=7.0, step=1.0)
    time = lambda heads: timed.time(described(64, 600, 300, heads, highest=highest))
    wanted = (15, 30, 30) if highest is None else (22, 22 + 20, 20 + 20)
    assert [time(44), time(88), time(48)] == [100 + x for x in wanted]


def test_times_of_windows_are_those_of_the_blocks_that_they_see():
    """One of 128 keys has two blocks a tile, but for the first; with 20 keys more it has three."""
    timed = Timed(defaults.TIMED_64[2].config, launch=0.0, tile=0.0, edge=5.0, step=1.0)
    time = lambda window: timed.time(described(64, 512, 512, 33, lowest=-window, highest=0))
    assert [time(127), time(148)] == [12.0, 13.0]


def test_query_blocks_that_two_consumers_cannot_share():
    backward = config.BackwardConfig(block_q=64, stages=2)
    settings = dataclasses.replace(defaults.default(64), backward=backward)
    with pytest.raises(ValueError, match="block_q: got 64 at width 64"):
        trace_gradients(64, settings)


@pytest.mark.long
@pytest.mark.parametrize(
    ("H", "deterministic", "options"),
    [
        (64, False, {}),
        slow(64, True, {}),
        (64, True, dict(is_causal=True, query_offset=50)),
        (256, False, {}),
        *(
            pytest.param(*case, dict(is_causal=True, query_offset=50), marks=pytest.mark.slow)
            for case in ((64, False), (256, True))
        ),
    ],
)
def test_keys_beyond_the_end_where_every_logit_is_very_negative(H, deterministic, options):
    """A zero in the place of a missing key would have a weight beyond float32."""
    query, key, *rest = inputs(1, 64, 77, 1, 1, H, jnp.bfloat16)
    arrays = (abs(query) * 8, -abs(key) * 8, *rest)
    with interpret_mode():
        check(arrays, **options, deterministic=deterministic)


@pytest.mark.long
@pytest.mark.parametrize("H", [64, slow(256)])
def test_keys_that_no_query_sees_do_not_count(H):
    check_that_keys_do_not_count(200, H, np.r_[75:200], is_causal=True, query_offset=5)


@pytest.mark.long
@pytest.mark.fast_cases("nan-False", "inf-False")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("poison", [jnp.nan, jnp.inf])
def test_cotangents_of_rows_that_see_nothing_do_not_count(poison, deterministic):
    query, key, value, dout, dlse = inputs(1, 40, 40, 1, 1, 64, jnp.bfloat16)
    attention = functools.partial(
        jax_flash.attention,
        is_causal=True,
        query_offset=-20,
        return_residual=True,
        implementation="mosaic_gpu",
        deterministic=deterministic,
    )
    with interpret_mode():
        _, vjp = jax.vjp(attention, query, key, value)
        clean = vjp((dout, dlse))
        poisoned = vjp((dout.at[:, :20].set(poison), dlse.at[:, :20].set(poison)))
    chex.assert_tree_all_finite(clean)
    assert_none_is_zero(clean)
    chex.assert_trees_all_equal(poisoned, clean)


@pytest.mark.long
def test_other_batch_entries_do_not_leak():
    """NaN in the sequences beside one whose length is no multiple of any tile."""
    arrays = inputs(3, 70, 77, 1, 1, 64, jnp.bfloat16)
    poisoned = [x.at[jnp.array([0, 2])].set(jnp.nan) for x in arrays[:4]]
    attention = functools.partial(jax_flash.attention, implementation="mosaic_gpu")

    def results(query, key, value, dout):
        out, vjp = jax.vjp(attention, query, key, value)
        return [x[1] for x in (out, *vjp(dout))]

    with interpret_mode():
        clean = results(*arrays[:4])
        chex.assert_trees_all_equal(results(*poisoned), clean)
    assert_none_is_zero(clean)


@pytest.mark.long
def test_vmap_over_any_axis_folds_into_the_batch():
    query, key, value, _, _ = inputs(2, 40, 48, 2, 2, 64, jnp.bfloat16)
    attention = functools.partial(jax_flash.attention, implementation="mosaic_gpu")
    over_heads = jax.vmap(attention, in_axes=(2, 2, 2), out_axes=2)
    with interpret_mode():
        expected = attention(query, key, value)
        one_head = over_heads(*(x[:, :, :, None] for x in (query, key, value)))
        shared_keys = jax.vmap(attention, in_axes=(0, None, None))(
            query[:, None], key[:1], value[:1]
        )
    assert_none_is_zero(expected)
    chex.assert_trees_all_equal(one_head[:, :, :, 0], expected)
    with interpret_mode():
        again = attention(query, jnp.repeat(key[:1], 2, axis=0), jnp.repeat(value[:1], 2, axis=0))
    chex.assert_trees_all_equal(shared_keys[:, 0], again)


@pytest.mark.long
def test_gradient_of_vmap_and_vmap_of_gradient():
    query, key, value, _, _ = inputs(2, 24, 24, 1, 1, 64, jnp.bfloat16)

    def loss(q, k, v):
        return (
            jax_flash.attention(q, k, v, implementation="mosaic_gpu").astype("float32") ** 2
        ).sum()

    with interpret_mode():
        expected = jax.grad(loss, (0, 1, 2))(query, key, value)
        unbatched = jax.vmap(jax.grad(loss, (0, 1, 2)))(query, key, value)
        total = jax.grad(lambda *x: jax.vmap(loss)(*x).sum(), (0, 1, 2))(query, key, value)
    assert_none_is_zero(expected)
    chex.assert_trees_all_equal(unbatched, expected)
    chex.assert_trees_all_equal(total, expected)


def test_checkpoint_names_save_the_forward_kernel():
    query, key, value, _, _ = inputs(1, 64, 64, 1, 1, 64, jnp.bfloat16)

    def forward_kernels(**checkpoint_options) -> int:
        @functools.partial(jax.checkpoint, **checkpoint_options)
        def loss(q, k, v):
            return jax_flash.attention(q, k, v, implementation="mosaic_gpu").astype("float32").sum()

        names = launches.names(jax.grad(loss, (0, 1, 2)), query, key, value)
        assert names.count("_backward") == 1
        return names.count("_forward")

    save = jax.checkpoint_policies.save_only_these_names(*jax_flash.CHECKPOINT_NAMES)
    assert forward_kernels(policy=save) == 1
    assert forward_kernels() > 1


@pytest.mark.long
def test_lowering_for_cuda_and_refusal_elsewhere():
    query, key, value, _, _ = inputs(1, 64, 64, 1, 1, 64, jnp.bfloat16)
    attention = jax.jit(functools.partial(jax_flash.attention, implementation="mosaic_gpu"))
    exported = jax.export.export(attention, platforms=["cuda"])(query, key, value)
    assert exported.out_avals[0].shape == query.shape
    lowered = attention.trace(query, key, value).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()
    if jax.default_backend() == "cpu":
        with pytest.raises(NotImplementedError, match=r"Hopper GPUs.*lowered for cpu"):
            attention(query, key, value)


@pytest.mark.parametrize("blocks", [1, 7, 132])
@pytest.mark.parametrize("tile_count", [1, 5, 40_000])
def test_every_piece_of_work_is_dealt_once(blocks, tile_count):
    costs = np.random.default_rng(0).uniform(1, 9, tile_count)
    pieces = np.random.default_rng(1).permutation(tile_count)
    table = scheduler.deal(pieces, costs, blocks)
    reverse = scheduler.deal(pieces, costs, blocks, reverse=True)
    for row, reversed_row in zip(table, reverse, strict=True):
        assert row[0] == reversed_row[0]
        assert list(row[1 : 1 + row[0]]) == list(reversed_row[1 : 1 + row[0]])[::-1]
    dealt = np.concatenate([row[1 : 1 + row[0]] for row in table])
    np.testing.assert_array_equal(np.sort(dealt), np.arange(tile_count))
    assert not table[np.arange(blocks), 1 + table[:, 0]].any()


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("tile_count", [1, 5, 40_000])
def test_a_thread_block_for_each_piece_takes_them_in_order(tile_count, reverse):
    costs = np.random.default_rng(0).uniform(1, 9, tile_count)
    pieces = np.random.default_rng(1).permutation(tile_count)
    table = scheduler.deal(pieces, costs, tile_count, reverse)
    expected = np.stack([np.ones_like(pieces), pieces, np.zeros_like(pieces)], axis=1)
    np.testing.assert_array_equal(table, expected)


@pytest.mark.parametrize(
    ("pieces", "steps", "is_known", "expected"),
    [
        (1000, [1, 511], True, 132),
        (1000, [1, 512], True, 1000),
        (1000, [1, 191], False, 132),
        (1000, [1, 192], False, 1000),
        (100, [1, 1], True, 100),
        (100, [900, 900], True, 100),
    ],
)
def test_long_tiles_have_a_thread_block_each(pieces, steps, is_known, expected):
    assert scheduler.thread_blocks(pieces, np.array(steps), 132, is_known) == expected


@pytest.mark.parametrize(
    ("length", "bounds", "dynamic", "segmented", "expected"),
    [
        (16384, {}, False, False, 132),  # 256 steps
        (16448, {}, False, False, 129 * 20),
        (6144, {}, True, False, 132),
        (6208, {}, True, False, 49 * 20),
        (12160, {"highest": 0}, False, True, 132),  # 96 steps in the mean
        (12288, {"highest": 0}, False, False, 132),
        (12288, {"highest": 0}, False, True, 96 * 20),
        (32768, {"highest": 0}, False, False, 256 * 20),
        (16384, {"highest": 0, "lowest": -1000}, False, False, 132),
    ],
)
def test_thread_blocks_of_the_backward(length, bounds, dynamic, segmented, expected):
    """By the most steps that tiles can have, which is how all are dealt, longest first."""
    p = Problem(
        *(1, length, length, 20, 20, 128, np.dtype(jnp.bfloat16), 1.0),
        **bounds,
        dynamic=dynamic,
        segmented=segmented,
    )
    tiles = KeyTiles(p, 128, 64, row_bytes=1)
    assert key_tiles_order.thread_blocks(tiles, None) == expected
    assert key_tiles_order.thread_blocks(tiles, 7) == 7
    assert key_tiles_order.thread_blocks(tiles, 10**6) == tiles.count
    one_each = key_tiles_order.schedule(tiles, tiles.count)
    if p.by_batch:
        (one_each,) = one_each
    np.testing.assert_array_equal(np.sort(one_each[:, 1]), np.arange(tiles.count))
    assert (one_each[:, 0] == 1).all()
    if not p.by_batch:
        section = np.flatnonzero(one_each[:, 1] // tiles.per_head == 0)
        steps = tiles.steps()[one_each[section, 1]]
        assert (np.diff(steps) <= 0).all()


@pytest.mark.long
@pytest.mark.parametrize(
    ("H", "kernel", "block_kv"),
    [(128, "attention_backward", 128), (256, "attention_backward_key", 64)],
)
def test_an_explicit_number_of_thread_blocks_is_kept(H, kernel, block_kv):
    """The default has one for each of the long tiles; its schedule is an operand.

    With a soft cap, as without one those of width 128 are drawn.
    """
    length = 32768
    shape = jax.ShapeDtypeStruct((1, length, 4, H), jnp.bfloat16)
    backward = dataclasses.replace(defaults.default(H).backward, thread_blocks=30)
    explicit = dataclasses.replace(defaults.default(H), backward=backward)
    tiles = 4 * length // block_kv

    def program(settings):
        loss = lambda *x: jax_flash.attention(
            *x, implementation="mosaic_gpu", logits_soft_cap=9.0, config=settings
        ).sum()
        return launches.kernels(jax.grad(loss, (0, 1, 2)), shape, shape, shape)

    assert kernel in program(None)
    assert f"i32[{tiles},3]" in program(None)
    assert f"i32[{tiles},3]" not in program(explicit)
    assert "i32[30," in program(explicit)


@pytest.mark.parametrize(
    ("B", "T", "S", "K", "bounds", "options", "heads"),
    [
        (16, 1024, 1024, 16, {"highest": 0}, {}, 240),
        (1, 16384, 16384, 16, {"highest": 0, "lowest": -1000}, {}, 15),
        (3, 5000, 7000, 7, {}, {}, 20),
        (1, 16384, 16384, 16, {"highest": 0}, {"segmented": True}, 11),
        (16, 1024, 1024, 16, {}, {"dynamic": True}, 176),
        (1, 4096, 4096, 4, {}, {}, 0),
        (1, 4096, 4096, 19, {"highest": 0}, {}, 15),  # sections of 3, the last of 4
        (3, 8440, 816, 7, {}, {}, 20),  # sections of 1, as two are more than L2 holds
    ],
)
def test_tiles_prepare_for_the_section_after_their_own(B, T, S, K, bounds, options, heads):
    """All that do are drawn before any tile that waits for them, and all counters are there."""
    p = Problem(B, T, S, 2 * K, K, 128, np.dtype(jnp.bfloat16), 1.0, **bounds, **options)
    tiles = KeyTiles(p, 128, 64, row_bytes=1024)
    section, prepared = key_tiles_order.prepared(tiles, 132)
    assert len(prepared) == heads
    place = np.empty(tiles.count, int)
    place[key_tiles_order.order_to_draw(tiles, 132)] = np.arange(tiles.count)
    place = place.reshape(B * K, tiles.per_head)
    assert key_tiles_order.counters_to_draw(tiles, 132) > (prepared.stop - 1) // section
    for first in range(section, prepared.stop, section):
        assert place[first - section : first].max() < place[first : first + section].min()


@pytest.mark.parametrize(
    ("section_bytes", "tiles", "kv_heads", "expected"),
    [
        (1000, 500, 32, 8 * 3),  # L2 holds 10 heads, which are 4 sections
        (0, 500, 32, 1 * 3),
        (0, 33, 32, 4 * 3),  # 132 slots are 4 heads
        (1000, 500, 34, 8 * 3),  # the last of 4 sections has 10
        (1300, 500, 32, 8 * 3),  # not 10 and 12 in the last, where L2 holds 13
        (600, 500, 64, 4 * 3),  # nor 5, where it holds 6
        (1500, 500, 32, 10 * 3),  # of 15 half would stay away
        (0, 1, 7, 7 * 3),
    ],
)
def test_heads_of_a_section(section_bytes, tiles, kv_heads, expected):
    section = scheduler.heads_per_section(section_bytes, 100, tiles, 132, kv_heads, group=3)
    assert section == expected


@pytest.mark.parametrize(
    ("megabytes", "cost", "expected"),
    [
        (2, [5, 5, 5, 5], 18),  # 132 slots are 33 heads, which are more than L2 has; it holds 6
        (1, [5, 5, 5, 5], 99),  # 33 MB, which L2 has
        (2, [5, 5, 5, 4], 18),
        (2, [5, 5, 5, 3], 99),
        (2, None, 99),
    ],
)
def test_heads_whose_tiles_are_alike_wait_for_no_others_beyond_l2(megabytes, cost, expected):
    cost = None if cost is None else np.array(cost)
    sizes = 12 << 20, megabytes << 20, 4, 132, 66
    assert scheduler.heads_per_section(*sizes, group=3, cost=cost) == expected


@pytest.mark.parametrize(
    ("width", "length", "heads", "has_key_mask", "expected"),
    [
        (32, 256, 512, True, (4, 64, 2)),
        (32, 384, 512, True, (3, 64, 2)),
        (64, 256, 512, True, (2, 128, 2)),  # four spill beside a mask of keys
        (64, 512, 192, False, (4, 64, 1)),
        (64, 1024, 48, False, (2, 128, 2)),
        (32, 48, 4096, False, (3, 64, 2)),
        (128, 512, 192, True, (2, 64, 2)),
        (64, 512, 2, False, (1, 128, 2)),
    ],
)
def test_consumers_beside_a_bias_that_comes_in_tiles(width, length, heads, has_key_mask, expected):
    more = dict(has_bias=True, has_key_mask=has_key_mask)
    problem = Problem(1, length, length, heads, heads, width, np.dtype(jnp.bfloat16), 0.1, **more)
    found = defaults.for_problem(problem, tiled_bias=True).forward
    assert (found.consumers, found.block_kv, found.query_buffers) == expected
    assert found.brings_bias


def test_longest_tiles_come_first_within_a_section():
    tile, head = scheduler.tile_order(np.array([1.0, 3.0, 2.0]), heads=4, section=2)
    np.testing.assert_array_equal(tile, [1, 1, 2, 2, 0, 0] * 2)
    np.testing.assert_array_equal(head, [0, 1] * 3 + [2, 3] * 3)


@pytest.mark.parametrize(
    ("last_section", "heads"),
    [
        (6, [[0, 1], [2, 3], [4, 5]]),
        (7, [[0, 1], [2, 3, 4, 5]]),  # 4 heads have 12 tiles, 2 have 6
        (100, [[0, 1, 2, 3, 4, 5]]),
    ],
)
def test_the_last_section_has_at_least_so_many_tiles(last_section, heads):
    order = scheduler.tile_order(np.array([1.0, 3.0, 2.0]), 6, section=2, last_section=last_section)
    expected = [(tile, head) for section in heads for tile in (1, 2, 0) for head in section]
    assert list(zip(*order, strict=True)) == expected


def test_named_barriers_are_sixteen():
    with pytest.raises(ValueError, match="16"):
        NamedBarriers(first=14, count=3, arrivers=1)


@pytest.mark.parametrize(
    ("S", "options"),
    [
        (520, {}),
        long(1030, {"key_value_seq_lengths": jnp.array([700])}),
        slow(1030, {"local_window_size": (600, 300)}),
    ],
)
def test_a_warpgroup_without_rows_in_the_last_tile(S, options):
    """Its turns come and go; of three, beside one with few rows."""
    own = dataclasses.replace(defaults.default(64), forward=defaults.FORWARD[64])
    with interpret_mode():
        check(inputs(1, 200, S, 2, 1, 64, jnp.bfloat16), config=own, **options)


@pytest.mark.parametrize(
    ("T", "width", "highest", "has_some"),
    [
        (200, 64, None, True),
        (1, 64, None, True),
        (320, 64, None, True),
        (321, 64, None, False),  # each warpgroup has a row
        (384, 64, None, False),
        (200, 64, 0, False),  # the first tile is the one with rows that are none
        (200, 128, None, False),  # two consumers
    ],
)
def test_steps_of_a_warpgroup_without_rows(T, width, highest, has_some):
    described = Problem(1, T, 512, 2, 1, width, np.dtype(jnp.bfloat16), 1.0, highest=highest)
    plan = ForwardPlan(Tiles(described, defaults.FORWARD[width]), False, False, None)
    assert plan.has_blank_steps == has_some


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((1, 130, 150, 2, 1, 64), dict(is_causal=True)),
        ((2, 70, 200, 1, 1, 128), {}),
        slow((1, 72, 72, 1, 1, 192), dict(is_causal=True)),
        slow((1, 130, 70, 1, 1, 256), {}),
        slow((1, 60, 300, 2, 1, 40), dict(local_window_size=(80, 20))),
        ((1, 100, 140, 2, 2, 64), dict(logits_soft_cap=5.0, dropout_rate=0.25)),
        slow((2, 100, 140, 2, 2, 128), dict(key_value_seq_lengths=jnp.array([90, 140]))),
        slow((2, 100, 140, 1, 1, 72), dict(query_offset=jnp.array([0, 40]), is_causal=True)),
    ],
)
def test_one_consumer(shape, options):
    """Of tiles that find an SM each."""
    with interpret_mode(alone=132):
        check(inputs(*shape, jnp.bfloat16), **options)


@pytest.mark.long
@pytest.mark.parametrize(
    ("T", "S", "H", "options"),
    [(70, 400, 256, {}), slow(130, 300, 64, dict(is_causal=True, query_offset=170))],
)
def test_a_second_round_of_one_consumer(T, S, H, options):
    """Queries come again to where the output of the first round left from."""
    with interpret_mode(alone=132):
        check(with_a_jump(inputs(1, T, S, 1, 1, H, jnp.bfloat16), 0, 64), **options)
