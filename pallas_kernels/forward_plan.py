"""What a forward kernel does, and with what buffers and barriers, decided before it is traced."""

import dataclasses
import functools
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np

from pallas_kernels import forward_spills, online_softmax, seen_blocks, tickets
from pallas_kernels.columns import Columns
from pallas_kernels.config import ROWS, ForwardConfig
from pallas_kernels.forward_tiles import Tiles
from pallas_kernels.problem import Problem, need
from pallas_kernels.ptx import notes
from pallas_kernels.ptx.barriers import BlockVote, NamedBarriers, twins_of
from pallas_kernels.ptx.operands import SharedZeros, operand_form
from pallas_kernels.soft_cap import known_reference
from pallas_kernels.spills import would_spill

# Tiles of a thread block. b4 s8192 64/8 heads H64 causal window 128, of 124: 418 us*, with branches
# 439; b4 s4096 16 heads H128 causal, of 16: 369 either way.
_FEW_TILES = 16
BIAS_BOX = 64  # keys: of 16 bits, as wide as TMA swizzles


@dataclasses.dataclass(frozen=True)
class Plan:
    """The forward kernel of a problem.

    Attributes:
      tiles: which there are.
      with_sinks: whether rows have one more logit.
      has_bias_of_keys: whether a bias of one value a key comes with K.
      bias_dtype: of a bias that comes with K in tiles, None without.
    """

    tiles: Tiles
    with_sinks: bool
    has_bias_of_keys: bool
    bias_dtype: np.dtype | None

    @property
    def problem(self) -> Problem:
        return self.tiles.problem

    @property
    def config(self) -> ForwardConfig:
        return self.tiles.config

    # --- elements ---

    @property
    def brings_bias(self) -> bool:
        """In tiles, by TMA."""
        return self.bias_dtype is not None

    @property
    def comes_by_tma(self) -> bool:
        """Whether a bias does, beside K."""
        return self.has_bias_of_keys or self.brings_bias

    @property
    def loads_bias(self) -> bool:
        """Whether threads do themselves."""
        return self.problem.has_bias and not self.comes_by_tma

    @property
    def loads_elements(self) -> bool:
        return self.problem.has_mask or self.loads_bias or self.problem.has_score

    @property
    def bias_boxes(self) -> int:
        """Of a consumer."""
        return self.config.block_kv // BIAS_BOX if self.brings_bias else 0

    # --- which steps mask, and which look for maxima ---

    @property
    def has_far_edge(self) -> bool:
        """Whether steps may need a mask behind some that need none."""
        return self.problem.has_far_edge or self.problem.has_key_mask

    @property
    def mask_throughout(self) -> bool:
        """Whether all steps mask: with a window, loops of other steps take a bias's registers."""
        return self.problem.beyond_products and self.problem.has_far_edge

    @property
    def has_blank_steps(self) -> bool:
        """Whether a warpgroup that has no rows in the last tile takes shorter steps there.

        Of two, the other one alone would be as slow, or slower.
        """
        p = self.problem
        unused = seen_blocks.unused_rows(p.query_length, self.config.block_q)
        has_none = unused > 0 and not self.tiles.shift
        fits = not (p.has_lists or p.by_batch or self.mask_throughout)
        return has_none and fits and self.config.consumers > 2

    @functools.cached_property
    def reference(self) -> float | None:
        """Of all rows, where a soft cap bounds their maxima. Then no step looks for them."""
        return known_reference(self.problem)

    @property
    def _searches(self) -> bool:
        # With a bias or a mask a row's first keys may be hidden, or as good as that.
        may_hide = self.problem.has_elements or self.problem.has_lists
        return may_hide and self.reference is None

    @property
    def settles(self) -> bool:
        """Whether steps look for maxima until each row has seen a key that is not hidden."""
        return self._searches and not (self.problem.segmented or self.mask_throughout)

    @property
    def exact_throughout(self) -> bool:
        """Whether all do: loops of both kinds take registers that there are not."""
        return self._searches and not self.settles

    @property
    def one_round_does(self) -> bool:
        """Whether no reference can prove too low."""
        return self.exact_throughout or self.reference is not None

    @property
    def always_bounded(self) -> bool:
        """Whether exponents are bounded at once, not in a second round.

        So it is without one, or where a bias may be so far from 0 that its rows never settle.
        """
        return self.exact_throughout or (self.settles and self.problem.unbounded)

    @property
    def unseen(self) -> float:
        """What stands for a key that a row does not see: a logit, or a weight."""
        return -np.inf if self.reference is None else 0.0

    @property
    def zeroes_values(self) -> bool:
        """Whether rows of V may be NaN that no query sees, or none of a tile."""
        return self.problem.forward_ignores_unseen or self.problem.has_dense_lists

    @property
    def closes_rows(self) -> bool:
        """Whether rows that see nothing may have steps without a mask, and see NaN there."""
        return self.problem.forward_ignores_unseen and self.problem.dynamic

    @property
    def own_values(self) -> bool:
        """Whether a step waits for V of its own keys: those with a mask zero rows of it."""
        return self.config.early_values or self.zeroes_values

    @functools.cached_property
    def allowed(self) -> online_softmax.Range:
        return online_softmax.weight_range(self.problem.dtype)

    # --- registers: where there are few, it does as `forward_spills.py` says ---

    @property
    def registers_are_scarce(self) -> bool:
        """Then addresses, bounds and entries of lists are made anew where they are used."""
        return would_spill(forward_spills.ADDRESSES, self)

    @property
    def ends_apart(self) -> bool:
        """Whether a tile ends before the next one's first logits."""
        return self.config.query_buffers == 1 or would_spill(forward_spills.ENDS, self)

    @property
    def ends_anew(self) -> bool:
        """Whether the number of a tile is made anew at its end."""
        return self.loads_elements or would_spill(forward_spills.NUMBERS, self)

    def asks_for_key_block(self, needs_mask: bool) -> bool:
        """Whether a step asks its list which key block it has, as it needs to know."""
        p = self.problem
        if not p.has_lists:
            return False
        return p.has_dropout or (needs_mask and p.mask_function.is_dense)

    @property
    def branches_at_ends(self) -> bool:
        """Whether the end of a tile asks if there is a next one, whose logits come under it.

        Of many listed tiles that costs more than logits of none after the last one.
        """
        tiles = self.tiles
        is_listed = tiles.are_plain and not tiles.by_number
        return not is_listed or tiles.count <= _FEW_TILES * tiles.thread_blocks

    # --- shared memory and barriers ---

    @functools.cached_property
    def key_columns(self) -> Columns:
        return Columns.of_keys(self.problem)

    @functools.cached_property
    def value_columns(self) -> Columns:
        return Columns.of_values(self.problem)

    @property
    def stages_in_queries(self) -> bool:
        """Whether the output leaves from where its queries were, which no others will take.

        All at once then, where it would be staged in parts.
        """
        return self.tiles.one_each and self.key_columns == self.value_columns

    @functools.cached_property
    def staged_columns(self) -> list[Columns]:
        """The output is staged some at a time. A bias of keys is where half of it would be."""
        if self.stages_in_queries:
            return [self.value_columns]
        at_a_time = 64 if self.has_bias_of_keys else self.config.staged_columns
        return self.value_columns.in_parts(at_a_time)

    @functools.cached_property
    def barriers(self) -> dict[str, Any]:
        """Those with a number, by name."""
        consumers, stages = self.config.consumers, self.config.stages
        count = 2 * consumers + 2 + 2 * stages + self.config.query_buffers
        need(count <= 16, "stages", stages, f"fewer: they take {count} named barriers of 16")
        turn = NamedBarriers(first=consumers + 2, count=consumers, arrivers=1)
        k_free = NamedBarriers(turn.first + consumers, stages, arrivers=consumers)
        v_free = NamedBarriers(k_free.first + stages, stages, arrivers=consumers)
        q_free = NamedBarriers(v_free.first + stages, self.config.query_buffers, arrivers=consumers)
        return dict(
            turn=turn,
            k_free=k_free,
            v_free=v_free,
            q_free=q_free,
            block_vote=BlockVote(consumers + 1),
            unseen_values=SharedZeros(consumers),
        )

    def scratch(self, interpret: bool) -> dict[str, Any]:
        """Types of shared memory and barriers, by name."""
        c, dtype = self.config, self.problem.dtype
        keys, values = self.key_columns, self.value_columns
        found: dict[str, Any] = dict(
            q_smem=keys.smem(c.query_buffers, c.consumers, ROWS, dtype=dtype),
            k_smem=keys.smem(c.stages, c.block_kv, dtype=dtype),
            v_smem=values.smem(c.stages, c.block_kv, dtype=dtype),
            q_full=plgpu.Barrier(
                num_arrivals=c.consumers * keys.tiles, num_barriers=c.query_buffers
            ),
            k_full=plgpu.Barrier(
                num_arrivals=keys.tiles
                + c.consumers * self.bias_boxes
                + int(self.has_bias_of_keys),
                num_barriers=c.stages,
            ),
            v_full=plgpu.Barrier(num_arrivals=values.tiles, num_barriers=c.stages),
        )
        if not self.stages_in_queries:
            found["o_smem"] = self.staged_columns[0].smem(c.consumers, ROWS, dtype=dtype)
        if not self.one_round_does:
            found["noted"] = notes.smem(c.consumers)
        if self.has_bias_of_keys:
            found["bias_smem"] = plgpu.SMEM((c.stages, c.block_kv), jnp.float32)
        if self.bias_dtype is not None:
            found["bias_smem"] = plgpu.SMEM(
                (c.stages, c.consumers, self.bias_boxes, ROWS, BIAS_BOX),
                self.bias_dtype,
                transforms=operand_form(BIAS_BOX),
            )
        if self.problem.by_batch:
            found["entries"] = tickets.TicketsInRounds.scratch()
        if interpret:
            found["twins"] = twins_of(self.barriers)
        return found
