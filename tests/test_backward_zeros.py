"""Zeros of dQ that tiles make for others, which interpret mode does without: in numbers alone."""

import collections
import dataclasses
import types
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import backward_zeros as zeros
from pallas_kernels import defaults, key_tiles_order
from pallas_kernels.backward_plan import Plan
from pallas_kernels.config import Last, Shares
from pallas_kernels.problem import Problem


class _Walk:
    """Tiles whose index is their number, and counters whose name is that of their section."""

    def __init__(self, per_head: int):
        self.per_head = per_head

    def number(self, index: int) -> int:
        return index

    def locate(self, index: int) -> tuple[int, int]:
        return index % self.per_head, index // self.per_head

    def prepared_tiles(self, section: int) -> int:
        return section


class _Dq:
    """References to its tiles are their numbers."""

    @property
    def at(self):
        return self

    def __getitem__(self, place: tuple) -> int:
        return place[0]


def _loop(first: int, end: int):
    return lambda body: [body(n) for n in range(first, end)]


def _when(holds: bool):
    return lambda body: body() if holds else None


@pytest.mark.parametrize(
    ("sizes", "bounds", "shares"),
    [
        ((4, 1024, 1024, 16, 16, 128), {}, None),
        ((16, 1024, 1024, 8, 4, 64), {"highest": 0}, None),
        ((3, 3000, 3000, 19, 19, 64), {"highest": 0, "lowest": -500}, None),
        ((3, 8440, 816, 7, 7, 128), {}, None),  # sections of one head
        ((4, 8440, 360, 50, 50, 128), {}, Shares(1, 3, Last(29, 3))),  # cut in several
        ((16, 1024, 1024, 8, 4, 128), {}, Shares(1, 2, Last(16, 8))),
        ((6, 1000, 700, 12, 3, 64), {}, Shares(2, 3)),
    ],
)
def test_each_is_made_once_and_before_any_tile_behind_it_waits(sizes, bounds, shares):
    """So in the order of drawing, in which nobody waits for what comes later."""
    problem = Problem(*sizes, np.dtype(jnp.bfloat16), 0.1, **bounds)
    config = dataclasses.replace(defaults.BACKWARD[sizes[-1]], shares=shares)
    plan = Plan(problem, config)
    tiles, made = plan.tiles, zeros.dq_tiles_made(plan)
    assert plan.sums_dq and made
    zeroed = collections.Counter(set(range(plan.dq_tiles)) - set(made))  # `row_statistics.py`
    stored = collections.Counter()

    def await_count(section: int, count: int) -> None:
        assert stored[section] == count

    here = types.SimpleNamespace
    replaced = dict(
        pl=here(loop=_loop, when=_when, ds=slice),
        jnp=here(int32=int, minimum=min),
        lax=here(div=lambda a, b: a // b),
        div_rem=divmod,
        zero_fragment=lambda tile: zeroed.update([tile]),
        add_when_stored=lambda section: stored.update([section]),
        await_count=await_count,
    )
    block = here(plan=plan, tiles=tiles, walk=_Walk(tiles.per_head), dq=_Dq())
    of_head = plan.dq_tiles // len(tiles.kv_heads)
    with mock.patch.multiple(zeros, **replaced):
        for number in key_tiles_order.order_to_draw(tiles, plan.thread_blocks).tolist():
            zeros.await_own(block, number)
            first = number // tiles.per_head * of_head
            assert all(zeroed[n] == 1 for n in range(first, first + of_head))
            zeros.zero_ahead(block, number)
    assert set(zeroed.values()) == {1} and len(zeroed) == plan.dq_tiles
