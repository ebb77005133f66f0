"""dQ where a head has one or two tiles of keys: none adds to what another has made."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from pallas_kernels.backward_plan import Plan
from pallas_kernels.defaults import default
from pallas_kernels.problem import Problem
from tests.support.cases import long, slow
from tests.support.interpret import interpret_mode
from tests.support.kernel_calls import DROPOUT_KEY, check, inputs, with_shares


def plan(T, S, N, K, H, **options) -> Plan:
    described = Problem(1, T, S, N, K, H, np.dtype(jnp.bfloat16), scale=1.0)
    described = dataclasses.replace(described, **options)
    return Plan(described, default(H).backward)


@pytest.mark.parametrize(
    ("B", "T", "S", "N", "K", "H", "options"),
    [
        (1, 70, 100, 2, 1, 64, {}),
        long(1, 150, 90, 2, 2, 72, {"is_causal": True}),
        long(1, 200, 128, 1, 1, 128, {}),
        long(2, 150, 60, 1, 1, 80, {}),  # consumers have 48 columns and 32
        slow(2, 150, 60, 4, 2, 40, {}),
        slow(1, 150, 104, 2, 2, 64, {"logits_soft_cap": 5.0}),
        slow(1, 150, 90, 2, 2, 128, {"dropout_rate": 0.25}),
        slow(2, 150, 60, 4, 2, 64, {"deterministic": True}),
    ],
)
def test_whole(B, T, S, N, K, H, options):
    """Of several blocks of queries, of which the last is not whole, and several heads."""
    with interpret_mode():
        check(inputs(B, T, S, N, K, H, jnp.bfloat16), **options)


@pytest.mark.parametrize(
    ("B", "T", "S", "N", "K", "H", "options"),
    [
        long(2, 150, 200, 2, 1, 64, {}),
        long(1, 300, 190, 2, 2, 72, {"is_causal": True}),  # the second tile sees not all queries
        slow(1, 300, 140, 2, 2, 80, {"local_window_size": (30, 20)}),  # and the first neither
        slow(1, 70, 256, 4, 2, 128, {"logits_soft_cap": 5.0}),
        slow(1, 300, 100, 2, 2, 128, {"local_window_size": (30, 20)}),  # of one tile
        slow(1, 150, 200, 4, 2, 40, {"deterministic": True}),
    ],
)
def test_of_each_tile_apart(B, T, S, N, K, H, options):
    with interpret_mode():
        check(inputs(B, T, S, N, K, H, jnp.bfloat16), **options)


@pytest.mark.long
def test_whole_where_queries_are_dealt_out():
    with interpret_mode():
        check(inputs(1, 300, 100, 4, 1, 64, jnp.bfloat16), config=with_shares(64, 8))


@pytest.mark.parametrize(
    ("sizes", "options", "is_whole"),
    [
        ((500, 128, 2, 2, 64), {}, True),
        ((500, 128, 2, 2, 64), {"highest": 0}, True),
        ((500, 129, 2, 2, 64), {}, False),
        ((500, 100, 8, 1, 128), {"soft_cap": 5.0}, True),
        ((504, 104, 8, 1, 128), {"dropout": 100}, True),
        ((504, 104, 8, 1, 64), {"has_bias": True}, True),
        ((504, 104, 8, 1, 64), {"dropout": 100, "has_bias": True}, False),
        ((500, 100, 8, 1, 128), {"dropout": 100}, False),  # in boxes
        ((500, 100, 2, 2, 64), {"dynamic": True}, False),
        ((500, 100, 2, 2, 64), {"segmented": True}, False),
        ((500, 100, 2, 2, 64), {"highest": -200}, False),  # its first block would be left out
        ((500, 100, 2, 2, 64), {"lowest": -200, "highest": 0}, False),  # and here its last
        ((500, 100, 2, 2, 80), {}, True),
    ],
)
def test_when_it_is_whole(sizes, options, is_whole):
    assert plan(*sizes, **options).dq_is_whole == is_whole


@pytest.mark.parametrize(
    ("S", "options", "is_whole", "is_apart"),
    [
        (100, {}, True, False),
        (100, {"highest": -200}, False, True),
        (129, {}, False, True),
        (256, {"highest": 0}, False, True),
        (257, {}, False, False),
        (200, {"segmented": True}, False, False),
    ],
)
def test_it_is_summed_where_there_are_more_than_two_tiles(S, options, is_whole, is_apart):
    own = plan(500, S, 2, 2, 64, **options)
    assert (own.dq_is_whole, own.dq_is_apart) == (is_whole, is_apart)
    assert own.sums_dq != (is_whole or is_apart)
    alone = dataclasses.replace(own, with_query_gradient=False)
    assert not (alone.sums_dq or alone.dq_is_whole or alone.dq_is_apart)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("B", "T", "S", "N", "K", "H", "options"),
    [
        (3, 1001, 128, 4, 2, 64, {}),
        (2, 3000, 67, 8, 1, 64, {"is_causal": True}),
        (2, 333, 100, 2, 2, 40, {}),
        (2, 1000, 64, 2, 2, 80, {}),
        (3, 333, 128, 4, 1, 96, {"is_causal": True}),
        (4, 1000, 121, 16, 16, 128, {}),
        (2, 77, 128, 40, 8, 128, {"is_causal": True}),
        (3, 1001, 200, 4, 2, 64, {}),
        (2, 3000, 256, 8, 1, 64, {"is_causal": True}),
        (4, 500, 150, 8, 8, 128, {"local_window_size": (60, 40)}),
        (2, 333, 157, 4, 4, 72, {"logits_soft_cap": 5.0}),
        (2, 500, 90, 4, 4, 72, {}),
        (1, 700, 104, 4, 4, 128, {"logits_soft_cap": 5.0}),
        (4, 128, 128, 12, 12, 64, {"dropout_rate": 0.25}),
        (2, 500, 90, 4, 2, 128, {"dropout_rate": 0.25}),
    ],
)
def test_no_tile_adds_on_a_gpu(B, T, S, N, K, H, options):
    """The same bit by bit from run to run, without being asked for it."""
    arrays = inputs(B, T, S, N, K, H, jnp.bfloat16)
    check(arrays, **options)
    query, key, value, d_out, _ = arrays
    attention = functools.partial(
        jax_flash.attention, implementation="mosaic_gpu", dropout_key=DROPOUT_KEY, **options
    )
    gradients = jax.jit(lambda *x: jax.vjp(attention, *x)[1](d_out))
    first = gradients(query, key, value)
    for _ in range(100):
        for one, other in zip(first, gradients(query, key, value), strict=True):
            np.testing.assert_array_equal(one, other)
