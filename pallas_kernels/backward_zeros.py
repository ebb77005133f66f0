"""Zeros that dQ begins with, where tiles make those of the section of heads after theirs.

Others come from `row_statistics.py`.
"""

import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels import key_tiles_order as order
from pallas_kernels.backward_block import ThreadBlock
from pallas_kernels.backward_plan import CONSUMERS, Plan
from pallas_kernels.interpret import interpreting
from pallas_kernels.key_tiles_dealing import Dealing
from pallas_kernels.ptx.arithmetic import div_rem
from pallas_kernels.ptx.counters import add_when_stored, await_count
from pallas_kernels.ptx.fragments import fragment_shape, zero_fragment


def dq_tiles_made(plan: Plan) -> range:
    """The tiles of dQ that the kernel zeros."""
    _, kv_heads = _heads_ahead(plan)
    of_kv_head = _dq_tiles_of_kv_head(plan)
    return range(kv_heads.start * of_kv_head, kv_heads.stop * of_kv_head)


def await_own(block: ThreadBlock, index) -> None:
    """Waits until what a tile adds to is zero."""
    section, zeroed = _heads_ahead(block.plan)
    if not zeroed:
        return
    walk, tiles = block.walk, block.tiles
    _, kv_head_of_all = walk.locate(index)

    @pl.when((kv_head_of_all >= zeroed.start) & (kv_head_of_all < zeroed.stop))
    def _():
        counter = walk.prepared_tiles(lax.div(kv_head_of_all, jnp.int32(section)))
        await_count(counter, section * tiles.per_uncut_head)


def zero_ahead(block: ThreadBlock, index) -> None:
    """Zeros a tile's part of dQ of a head of the section after its own."""
    plan, tiles = block.plan, block.tiles
    section, zeroed = _heads_ahead(plan)
    if not zeroed:
        return
    number = block.walk.number(index) + section * tiles.per_head
    kv_head_of_all, part = div_rem(number, tiles.per_head)

    @pl.when(kv_head_of_all < zeroed.stop)
    def _():
        of_kv_head = _dq_tiles_of_kv_head(plan)
        size = -(-of_kv_head // tiles.per_uncut_head)
        rows = pl.ds(0, fragment_shape(max(plan.dq.columns_of_tiles))[0])

        @pl.loop(part * size, jnp.minimum((part + 1) * size, of_kv_head))
        def _zero(n):
            first = kv_head_of_all * of_kv_head
            zero_fragment(block.dq.at[first + n, rows])

        of_section = lax.div(kv_head_of_all, jnp.int32(section))
        add_when_stored(block.walk.prepared_tiles(of_section))


def _heads_ahead(plan: Plan) -> tuple[int, range]:
    """Key heads of a section, and those whose dQ is zeroed by tiles of the section before.

    In interpret mode, where thread blocks run one after the other, there are none of these.
    """
    if interpreting() or plan.dealing is not Dealing.DRAWN or not plan.sums_dq:
        return 1, range(0)
    return order.prepared(plan.tiles, plan.thread_blocks)


def _dq_tiles_of_kv_head(plan: Plan) -> int:
    """Tiles of dQ of all query heads of a key head: one for each consumer in a step."""
    return plan.problem.group * plan.tiles.query_blocks * CONSUMERS
