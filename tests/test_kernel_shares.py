"""Groups of query heads that are dealt out in shares, in the backward."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import scheduler
from pallas_kernels.backward_plan import Plan, shares_of
from pallas_kernels.config import BACKWARD, BackwardConfig
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
        long(6, 2, 128, 3, {"local_window_size": (90, 40)}),
        long(6, 1, 40, 2, {"key_value_seq_lengths": jnp.array([130])}),
        long(4, 1, 128, 2, {"query_segment_ids": IDS, "key_value_segment_ids": IDS}),
        long(4, 1, 64, 4, {"is_causal": True, "dropout_rate": 0.25}),
    ],
)
def test_shares(N, K, H, shares, options):
    """The last tile of keys, and the last block of queries, are not whole."""
    with interpret_mode():
        check(inputs(1, 140, 140, N, K, H, jnp.bfloat16), config=with_shares(H, shares), **options)


def problem(B, T, S, N, K, H, is_causal=False) -> Problem:
    dtype = np.dtype(jnp.bfloat16)
    return Problem(B, T, S, N, K, H, dtype, scale=1.0, highest=0 if is_causal else None)


def settings(width: int) -> BackwardConfig:
    found = BACKWARD[width]
    assert isinstance(found, BackwardConfig)
    return found


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((1, 8192, 8192, 8, 1, 128, True), 4),  # of 64 tiles the longest takes a quarter of all
        ((1, 656, 656, 16, 2, 64), 8),
        ((4, 4096, 4096, 32, 8, 128, True), 1),
        ((1, 16384, 16384, 32, 8, 128, True), 1),
        ((1, 256, 256, 16, 16, 64), 1),  # nothing to deal out
    ],
)
def test_where_there_are_few_tiles_groups_are_dealt_out(sizes, expected):
    assert shares_of(problem(*sizes), settings(sizes[5])) == expected


@pytest.mark.parametrize(("wanted", "taken"), [(1, 1), (2, 2), (5, 4), (6, 6), (100, 12)])
def test_shares_divide_a_group(wanted, taken):
    own = dataclasses.replace(settings(64), shares=wanted)
    assert shares_of(problem(1, 64, 64, 12, 1, 64), own) == taken
    plan = Plan(problem(1, 64, 64, 12, 1, 64), own)
    assert (plan.problem.kv_heads, plan.problem.group) == (taken, 12 // taken)


def test_shares_are_at_least_one():
    with pytest.raises(ValueError, match="shares: got 0, needs at least 1, or None"):
        dataclasses.replace(settings(64), shares=0)


def test_time_of_a_deal_is_that_of_its_longest_list():
    costs = np.array([9.0, 7, 6, 5, 4, 3])
    table = scheduler.deal(np.arange(6), costs, 3)
    lists = [row[1 : 1 + row[0]] for row in table]
    assert scheduler.time_of_deal(costs, 3) == max(costs[x].sum() for x in lists) == 12
