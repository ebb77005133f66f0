"""What the FP8 forward does, its buffers and barriers, and what its warpgroups share of them."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import forward_fp8_spills
from pallas_kernels.columns import Columns
from pallas_kernels.config import ROWS, ForwardFP8Config
from pallas_kernels.forward_block import Block
from pallas_kernels.forward_deals import FromList
from pallas_kernels.forward_key_blocks import OfTable
from pallas_kernels.forward_tiles import Tiles
from pallas_kernels.hopper import Ring, Turns
from pallas_kernels.problem import Problem
from pallas_kernels.ptx.barriers import NamedBarriers, twins_of, with_twins
from pallas_kernels.ptx.operands import float8_operand
from pallas_kernels.row_masks import RowMasks
from pallas_kernels.spills import would_spill


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the kernel does, and with what buffers and barriers.

    Attributes:
      problem: static description.
      config: tile sizes.
      out_dtype: of the output.
      interpret: whether it is for interpret mode.
    """

    problem: Problem
    config: ForwardFP8Config
    out_dtype: np.dtype
    interpret: bool

    @functools.cached_property
    def tiles(self) -> Tiles:
        return Tiles(self.problem, self.config)

    @property
    def registers_are_scarce(self) -> bool:
        """Then addresses and entries of lists are made anew where they are used."""
        return would_spill(forward_fp8_spills.ADDRESSES, self)

    @property
    def accumulated(self) -> Any:
        """The dtype of logits; interpret mode has no sums in float16."""
        return jnp.float32 if self.interpret else jnp.float16

    @property
    def lag(self) -> int:
        """Steps by which V is turned after it was asked for, where the next one goes."""
        return self.config.stages - 1

    @functools.cached_property
    def key_columns(self) -> Columns:
        return Columns.of_keys(self.problem)

    @functools.cached_property
    def value_columns(self) -> Columns:
        return Columns.of_values(self.problem)

    @functools.cached_property
    def staged_columns(self) -> list[Columns]:
        """The output is staged some at a time."""
        p = self.problem
        out_columns = Columns(p.value_width, self.value_columns.size, odd_rows=p.has_odd_rows)
        return out_columns.in_parts(self.config.staged_columns)

    @functools.cached_property
    def barriers(self) -> dict[str, NamedBarriers]:
        """Those with a number, by name."""
        c = self.config
        turn = NamedBarriers(first=c.consumers + 2, count=c.consumers, arrivers=1)
        k_free = NamedBarriers(turn.first + c.consumers, c.stages, arrivers=c.consumers)
        v_free = NamedBarriers(k_free.first + c.stages, c.value_stages, arrivers=c.consumers)
        q_free = NamedBarriers(v_free.first + c.value_stages, c.query_buffers, arrivers=c.consumers)
        return dict(turn=turn, k_free=k_free, v_free=v_free, q_free=q_free)

    def scratch(self) -> dict[str, Any]:
        """Types of shared memory and barriers, by name."""
        c, dtype = self.config, self.problem.dtype
        keys, values = self.key_columns, self.value_columns
        found: dict[str, Any] = dict(
            q_smem=keys.smem(c.query_buffers, c.consumers, ROWS, dtype=dtype),
            k_smem=keys.smem(c.stages, c.block_kv, dtype=dtype),
            v_smem=values.smem(self.lag, c.block_kv, dtype=dtype),
            turned_smem=plgpu.SMEM(
                (c.value_stages, values.size, c.block_kv),
                dtype,
                transforms=float8_operand(c.block_kv),
            ),
            o_smem=self.staged_columns[0].smem(c.consumers, ROWS, dtype=self.out_dtype),
            q_full=plgpu.Barrier(
                num_arrivals=c.consumers * keys.tiles, num_barriers=c.query_buffers
            ),
            k_full=plgpu.Barrier(num_arrivals=keys.tiles, num_barriers=c.stages),
            v_full=plgpu.Barrier(num_arrivals=values.tiles, num_barriers=self.lag),
            turned_full=plgpu.Barrier(num_arrivals=1, num_barriers=c.value_stages),
        )
        if self.interpret:
            found["twins"] = twins_of(self.barriers)
        return found


class ThreadBlock(Block):
    """What producer and consumers share: operands, results, buffers, barriers, and the list.

    Attributes:
      plan: of the kernel.
      q, k, v, row_scales, key_scales, value_scales, ratios, o, lse: refs in global memory.
      masks: of rows and keys.
      queries, keys: rings that TMA fills; values, one of V turned, which the producer fills.
      v_smem, v_full: V as TMA brings it, an mbarrier a buffer; o_smem: what it stores.
      turns: of the consumers.
      warpgroup: index of this one; the consumers come first.
    """

    def __init__(
        self, plan: Plan, refs, *, q_smem, k_smem, v_smem, turned_smem, o_smem,
        q_full, k_full, v_full, turned_full, twins=None,
    ):  # fmt: skip
        problem = plan.problem
        self.plan = plan
        self.v_smem, self.v_full, self.o_smem = v_smem, v_full, o_smem
        turn, k_free, v_free, q_free = with_twins(plan.barriers, twins)
        self.queries = Ring((q_smem,), q_full, q_free)
        self.keys = Ring((k_smem,), k_full, k_free, (plan.key_columns.load,))
        self.values = Ring((turned_smem,), turned_full, v_free)
        schedule, key_blocks, self.q, self.k, self.v, *rest = refs
        self.row_scales, self.key_scales, self.value_scales, self.ratios, *rest = rest
        *optional, self.o, self.lse = rest
        self.masks = RowMasks(
            problem,
            plan.config.block_kv,
            plan.tiles.rows,
            intervals_ref=optional[0] if problem.dynamic else None,
            ids_refs=optional[int(problem.dynamic) :] if problem.segmented else None,
        )
        self.warpgroup = lax.axis_index("warpgroup")
        self.turns = Turns(turn, self.warpgroup)
        self.key_blocks = OfTable(
            key_blocks, by_batch=problem.by_batch, have_ends=plan.tiles.have_ends
        )
        number, anew = lax.axis_index("block"), plan.registers_are_scarce
        self.deal = FromList(number, schedule, anew=anew, keeps_count=False)

    def tile_count(self):
        return self.deal.count()

    def locate(self, index):
        """Tile, batch entry and head of an index of the list."""
        return self.plan.tiles.locate(self.deal.number(index))

    def raw_slot(self, step):
        """Of V before it is turned."""
        return lax.rem(step, jnp.int32(self.plan.lag))

    def kv_head_of(self, head):
        return self.plan.problem.kv_head_of(head)

    def over_tiles(self, body: Callable, carry):
        """As `fori_loop`, but for the count, which is in no register during a tile."""

        def turn(at):
            index, _, carry = at
            return index + 1, *body(index, carry)

        begin = jnp.int32(0), self.tile_count() > 0, carry
        _, _, carry = lax.while_loop(lambda at: at[1], turn, begin)
        return carry
