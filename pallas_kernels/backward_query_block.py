"""What `backward_query.py` does, its buffers and barriers, and what its warpgroups share."""

import dataclasses
import functools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import backward_query_spills, scheduler
from pallas_kernels import intervals as run_time_intervals
from pallas_kernels.backward_query_masks import KeyBlocks, key_blocks, key_blocks_of
from pallas_kernels.columns import Columns
from pallas_kernels.config import (
    BACKWARD_CONSUMERS,
    FORWARD_SECTION_BYTES,
    ROWS,
    SM_COUNT,
    BackwardQueryConfig,
)
from pallas_kernels.dropout import DropoutRefs
from pallas_kernels.elements import ElementRefs
from pallas_kernels.hopper import Ring
from pallas_kernels.mask_functions import COUNT, LISTED, MASKED, MaskRefs
from pallas_kernels.problem import Problem
from pallas_kernels.ptx.arithmetic import div_rem
from pallas_kernels.ptx.barriers import NamedBarriers, twins_of, with_twins
from pallas_kernels.ptx.compiler import fresh_zero
from pallas_kernels.spills import would_spill

CONSUMERS = BACKWARD_CONSUMERS


def key_parts(problem: Problem) -> list[Columns]:
    """The columns of query and key: all, or where registers are short parts of dQ, a kernel each.

    A part takes S and dP once more, but half of the registers that 256 columns of dQ do.
    """
    columns = Columns.of_keys(problem)
    options = (
        problem.dynamic,
        problem.segmented,
        problem.has_mask,
        problem.has_bias,
        problem.has_cap,
        problem.has_dropout,
    )
    # In boxes more addresses are in use.
    most = 2 if columns.products == 1 else 1
    is_short = sum(options) > most or (problem.segmented and problem.has_bias)
    return columns.in_parts(128) if columns.size > 224 and is_short else [columns]


@dataclasses.dataclass(frozen=True)
class Plan:
    """One of the kernels that make dQ.

    Attributes:
      problem: static description.
      config: tile sizes.
      part: of `key_parts`, the columns of dQ that it makes.
    """

    problem: Problem
    config: BackwardQueryConfig
    part: int

    @functools.cached_property
    def key_parts(self) -> list[Columns]:
        return key_parts(self.problem)

    @property
    def dq_columns(self) -> Columns:
        return self.key_parts[self.part]

    @functools.cached_property
    def value_columns(self) -> Columns:
        return Columns.of_values(self.problem)

    # --- registers: what would spill is in `backward_query_spills.py` ---

    @property
    def crowded(self) -> bool:
        """Whether bounds, ids and the place in the order are read where they are used."""
        return would_spill(backward_query_spills.ALL_READ, self)

    @property
    def weights_first(self) -> bool:
        """Whether dP is issued after the weights, not beside S."""
        return would_spill(backward_query_spills.WEIGHTS_FIRST, self)

    # --- tiles ---

    @property
    def tiles(self) -> int:
        """Of a head."""
        return -(-self.problem.query_length // self.config.block_q)

    @functools.cached_property
    def key_blocks(self) -> KeyBlocks:
        """Of each tile. What is known at run time only is left out."""
        first_rows = np.arange(self.tiles) * self.config.block_q
        block_kv, block_q = self.config.block_kv, self.config.block_q
        return key_blocks(self.problem, block_kv, first_rows, block_q, np)

    @functools.cached_property
    def lists(self) -> np.ndarray:
        """`mask_functions.lists` of a problem with a mask function."""
        c, p = self.config, self.problem
        return p.mask_function.key_lists(c.block_q, c.block_kv, 0, p.key_length)

    @functools.cached_property
    def any_mask(self) -> bool:
        blocks = self.key_blocks
        return self.problem.has_far_edge or bool((blocks.end_unmasked < blocks.end).any())

    @functools.cached_property
    def order(self) -> np.ndarray:
        """The tiles as thread blocks take them: of each its number, head and key blocks.

        With lists also how many of these need a mask.
        """
        p, counts = self.problem, self.key_blocks.end - self.key_blocks.first
        if p.has_lists:
            counts = self.lists[0, 0, :, COUNT]
        section = scheduler.heads_per_section(
            FORWARD_SECTION_BYTES,
            bytes_per_kv_head=p.key_length * p.pair_bytes,
            tiles_per_kv_head=self.tiles * p.group,
            slots=SM_COUNT,
            kv_heads=p.batch * p.kv_heads,
            group=p.group,
            cost=None if p.by_batch else counts,
        )
        tile, head = scheduler.tile_order(counts, p.batch * p.heads, section)
        order = np.stack([tile, head, counts[tile]], axis=1)
        if p.has_far_edge:
            order = np.c_[order, self.key_blocks.end[tile]]
        if p.has_lists:
            order = np.c_[order, self.lists[0, 0, tile, MASKED]]
        return order.astype(np.int32)

    def order_of(self, intervals, ids) -> jax.Array:
        """The order, with key blocks by batch entry, and `KeyBlocks` of each consumer."""
        p, (tile, head, *_) = self.problem, self.order.T
        if intervals is None:
            intervals = run_time_intervals.of_bounds_of_queries(p)
        blocks = key_blocks_of(intervals, self.config.block_kv, ROWS, ids)
        of_consumers = jnp.stack([self._with_all_consumers(x) for x in blocks], axis=-1)
        of_consumers = of_consumers.reshape(p.batch, self.tiles, CONSUMERS, -1)
        first, end = of_consumers[..., 0], of_consumers[..., 1]
        tile_end = end.max(-1, keepdims=True)
        tile_first = jnp.where(first < end, first, tile_end).min(-1, keepdims=True)
        # A consumer that sees nothing has no blocks, at the tile's first.
        of_consumers = jnp.maximum(of_consumers, tile_first[..., None])
        by_consumer = of_consumers.reshape(p.batch, self.tiles, -1)
        numbers = jnp.concatenate([tile_end - tile_first, tile_end, by_consumer], axis=-1)
        numbers = numbers[head // p.heads, tile]
        return jnp.concatenate([jnp.asarray(self.order[:, :2]), numbers], axis=1)

    def _with_all_consumers(self, of_consumers: jax.Array) -> jax.Array:
        """`[B, 2 * tiles]`, with 0 where the last consumer has no rows."""
        missing = CONSUMERS * self.tiles - of_consumers.shape[1]
        return jnp.pad(of_consumers, ((0, 0), (0, missing)))

    # --- shared memory and barriers ---

    @functools.cached_property
    def barriers(self) -> dict[str, NamedBarriers]:
        """Those with a number, by name."""
        k_stages, v_stages = self.config.stages
        k_free = NamedBarriers(first=CONSUMERS + 2, count=k_stages, arrivers=CONSUMERS)
        v_free = NamedBarriers(k_free.first + k_stages, v_stages, arrivers=CONSUMERS)
        return dict(k_free=k_free, v_free=v_free)

    def scratch(self, interpret: bool) -> dict[str, Any]:
        """Types of shared memory and barriers, by name."""
        (k_stages, v_stages), block_kv = self.config.stages, self.config.block_kv
        parts, values, dtype = self.key_parts, self.value_columns, self.problem.dtype
        key_tiles = sum(columns.tiles for columns in parts)
        found: dict[str, Any] = dict(
            q_smem=[columns.smem(CONSUMERS, ROWS, dtype=dtype) for columns in parts],
            o_smem=values.smem(CONSUMERS, ROWS, dtype=dtype),
            k_smem=[columns.smem(k_stages, block_kv, dtype=dtype) for columns in parts],
            v_smem=values.smem(v_stages, block_kv, dtype=dtype),
            q_full=plgpu.Barrier(num_arrivals=CONSUMERS * key_tiles),
            o_full=plgpu.Barrier(num_arrivals=CONSUMERS * values.tiles),
            k_full=plgpu.Barrier(num_arrivals=key_tiles, num_barriers=k_stages),
            v_full=plgpu.Barrier(num_arrivals=values.tiles, num_barriers=v_stages),
        )
        if interpret:
            found["twins"] = twins_of(self.barriers)
        return found


class ThreadBlock:
    """What producer and consumers share: operands, dQ, buffers, barriers, and the tile.

    Attributes:
      plan: of the kernel.
      q, k, v, d_out, start, delta, far, dq: refs of operands and result, in global memory.
      lists: of tiles, with the mask function, None without.
      masks: refs of intervals if dynamic, then of ids if segmented.
      dropout, elements: of rows and keys.
      keys, values: rings that TMA fills, the first one of buffers of `Plan.key_parts`.
      q_smem, o_smem: such a list of Q, and a buffer of dO; q_full, o_full: an mbarrier each.
      warpgroup: index of this one; the consumers come first.
      blocks: how many key blocks the tile has; first_block, the first of these.
    """

    def __init__(
        self, plan: Plan, refs, *, q_smem, o_smem, k_smem, v_smem, q_full, o_full, k_full, v_full,
        twins=None,
    ):  # fmt: skip
        problem = plan.problem
        self.plan = plan
        self.q_smem, self.o_smem, self.q_full, self.o_full = q_smem, o_smem, q_full, o_full
        k_free, v_free = with_twins(plan.barriers, twins)
        loads = tuple(columns.load for columns in plan.key_parts)
        self.keys = Ring(tuple(k_smem), k_full, k_free, loads)
        self.values = Ring((v_smem,), v_full, v_free, (plan.value_columns.load,))
        self._order, *refs = refs
        self.lists = None
        if problem.has_lists:
            self.lists, refs = MaskRefs.split(problem, refs)
        count = int(problem.dynamic) + 2 * int(problem.segmented)
        self.masks = refs[:count]
        self.dropout, refs = DropoutRefs.split(problem, refs[count:])
        self.elements, refs = ElementRefs.split(problem, refs)
        self.q, self.k, self.v, self.d_out, self.start, self.delta, self.far, self.dq = refs
        self.warpgroup = lax.axis_index("warpgroup")
        self._number = lax.axis_index("block")
        self.blocks = self.ordered(2)
        self.first_block = self.ordered(3) - self.blocks if problem.has_far_edge else 0

    def ordered(self, column):
        """An entry of the order."""
        crowded = self.plan.crowded
        return self._order[self._number + fresh_zero() if crowded else self._number, column]

    def key_block_of(self, j):
        if self.lists is not None:
            batch, head = self.batch_and_head()
            return self.lists.entry(batch, head, self.ordered(0), LISTED + j)
        anew = self.plan.crowded and self.plan.problem.has_far_edge
        return (self.ordered(3) - self.ordered(2) if anew else self.first_block) + j

    def first_key_of(self, j):
        return self.key_block_of(j) * self.plan.config.block_kv

    def batch_and_head(self):
        """Read where needed: kept over the loop, they cost registers."""
        return div_rem(self.ordered(1), self.plan.problem.heads)

    def first_row_of(self, consumer):
        return self.ordered(0) * self.plan.config.block_q + consumer * ROWS
