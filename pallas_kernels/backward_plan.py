"""What the backward does, and with what buffers and barriers, decided before it is traced."""

import dataclasses
import functools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import backward_spills as spills
from pallas_kernels import key_tiles_order as order
from pallas_kernels.backward_dq import QueryGradient
from pallas_kernels.columns import Columns
from pallas_kernels.config import BACKWARD_CONSUMERS, DQ_TILE, SM_COUNT, BackwardConfig
from pallas_kernels.key_tiles import KeyTiles
from pallas_kernels.key_tiles_dealing import Dealing
from pallas_kernels.key_tiles_shares import dealt_out, gradients_of_tiles
from pallas_kernels.problem import Problem
from pallas_kernels.ptx.barriers import NamedBarriers, twins_of
from pallas_kernels.ptx.fragments import fragment_shape
from pallas_kernels.ptx.operands import SharedZeros, operand_form
from pallas_kernels.spills import would_spill

CONSUMERS = BACKWARD_CONSUMERS
KEYS = 64  # of a consumer: the M of a wgmma
BLOCK_KV = CONSUMERS * KEYS
# Tiles of keys of a head whose dQ is not added to in global memory, and bytes that it may take.
MOST_APART, _MOST_APART_BYTES = 2, 2 << 30
K_SLOTS = 2
_FEW_TILES, _SHORT_TILE = 4, 3  # of a thread block; steps in the mean


@dataclasses.dataclass(frozen=True)
class Plan:
    """The main kernel, or without dQ one that gives dK and dV alone.

    Attributes:
      whole: static description.
      config: tile sizes.
      with_query_gradient: whether it gives dQ.
      with_bias_gradient: whether it gives that of a bias, which is dS.
    """

    whole: Problem
    config: BackwardConfig
    with_query_gradient: bool = True
    with_bias_gradient: bool = False

    @property
    def problem(self) -> Problem:
        """The same with a key head for each share of a group."""
        return self.tiles.problem

    def results(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes of dQ, if no tile adds to it, and of dK and dV, of shares of whole tiles.

        And of the gradient of a bias.
        """
        of_keys = gradients_of_tiles(self.tiles, self.key_columns.size, self.value_columns.size)
        if self.with_bias_gradient:
            p = self.whole
            of_pairs = p.batch, p.heads, p.query_length, p.key_length
            of_keys = *of_keys, jax.ShapeDtypeStruct(of_pairs, p.dtype)
        if self.dq_is_whole:
            return self.whole.query(), *of_keys
        if self.dq_is_apart:
            shape = self.tiles.whole_per_head * self.dq_tiles, *fragment_shape(DQ_TILE)
            return jax.ShapeDtypeStruct(shape, jnp.float32), *of_keys
        return of_keys

    @functools.cached_property
    def dq(self) -> QueryGradient:
        return QueryGradient(self.whole)

    @property
    def key_columns(self) -> Columns:
        return self.dq.operand_columns[0]

    @property
    def value_columns(self) -> Columns:
        return self.dq.operand_columns[1]

    @property
    def is_wide(self) -> bool:
        return self.whole.widest > 64

    # --- tiles ---

    @functools.cached_property
    def _whole_tiles(self) -> KeyTiles:
        """In one share."""
        # They read Q and dO, and add to dQ in float32.
        dq_bytes = 4 * self.key_columns.size if self.with_query_gradient else 0
        row_bytes = self.whole.pair_bytes + dq_bytes
        return KeyTiles(self.whole, BLOCK_KV, self.config.block_q, row_bytes=row_bytes)

    @property
    def _seeing_blocks(self) -> list[list[int]]:
        return self._whole_tiles.seeing_blocks().T.tolist()

    @functools.cached_property
    def tiles(self) -> KeyTiles:
        return dealt_out(self._whole_tiles, self.config.shares)

    @functools.cached_property
    def dq_is_whole(self) -> bool:
        """Whether dQ of a step is, and leaves as users get it, with nothing to add up or to cast.

        So it is where one tile has all keys, and sees all queries.
        """
        p = self.whole
        if p.by_batch or p.has_lists or not self.with_query_gradient:
            return False
        if would_spill(spills.WHOLE_DQ_ADDED, self):
            return False
        return self._seeing_blocks == [[0, self._whole_tiles.query_blocks]]

    @property
    def sees_all_pairs(self) -> bool:
        """Whether its steps are all pairs of blocks, each once."""
        p = self.whole
        if p.by_batch or p.has_lists or p.picks_keys:
            return False
        return p.lowest is None and p.highest is None

    @functools.cached_property
    def dq_is_apart(self) -> bool:
        """Whether each of a head's tiles of keys stores dQ of its own, and `cast_dq` adds them.

        There are neither zeros nor additions in global memory then, and bits are the same always.
        """
        p = self.whole
        if p.by_batch or p.has_lists or p.picks_keys:
            return False  # where keys are picked a tile may be without any, and go without dQ
        if self.dq_is_whole or not self.with_query_gradient:
            return False
        if would_spill(spills.DQ_APART_ADDED, self):
            return False
        tiles = self.tiles.whole_per_head
        return tiles <= MOST_APART and tiles * self.dq_tiles * 4 * DQ_TILE**2 <= _MOST_APART_BYTES

    @property
    def sums_dq(self) -> bool:
        """Whether tiles of keys add to dQ in global memory."""
        return self.with_query_gradient and not (self.dq_is_whole or self.dq_is_apart)

    @property
    def dq_tiles(self) -> int:
        """Tiles of dQ of all heads."""
        return self.whole.batch * self.whole.heads * self.tiles.query_blocks * CONSUMERS

    def rows_of_dq(self) -> list[tuple[int, int]]:
        """The first and the end of the queries whose dQ each tile of keys has, in tiles of dQ."""
        blocks_of_64 = self.config.block_q // DQ_TILE
        return [(first * blocks_of_64, end * blocks_of_64) for first, end in self._seeing_blocks]

    @property
    def is_plain(self) -> bool:
        """Whether it makes dQ of tiles whose costs are known, and registers do for any schedule."""
        return self.with_query_gradient and self.problem.is_plain and not self.problem.by_batch

    @functools.cached_property
    def dealing(self) -> Dealing:
        """Who says which tile is next; who draws also zeros dQ, if there is, of tiles to come."""
        p, tiles = self.problem, self.tiles
        if p.has_dropout:
            return Dealing.LISTED  # there is no buffer behind which a number that is drawn stands
        if self.is_plain:
            blocks = self.config.thread_blocks or SM_COUNT
            if tiles.count <= blocks and not tiles.shares.last:
                return Dealing.ONE_EACH
            # There is little to even out by draws, each of which takes as long as a step.
            if tiles.count <= _FEW_TILES * blocks and tiles.steps().mean() <= _SHORT_TILE:
                return Dealing.LISTED
            return Dealing.DRAWN
        if would_spill(spills.LISTED, self):
            return Dealing.LISTED
        if p.by_batch and self.is_wide:
            return Dealing.DRAWN  # what tiles cost is known at run time only
        if not self.with_query_gradient:
            return Dealing.LISTED  # it is as fast
        # Tiles of documents are so short that what a draw takes counts; lists would spill there
        # beside elements.
        return Dealing.LISTED if p.segmented and not p.has_elements else Dealing.DRAWN

    @property
    def switches_roles(self) -> bool:
        """Whether a warpgroup comes to its role by a switch, not by comparisons with its number.

        The number would be spilled for them in a consumer.
        """
        return not would_spill(spills.ROLES_COMPARED, self)

    @functools.cached_property
    def thread_blocks(self) -> int:
        return order.thread_blocks(self.tiles, self.config.thread_blocks, dealing=self.dealing)

    @property
    def counters(self) -> int:
        """How many there are in global memory: whether any row is far from 0, and what is drawn."""
        if self.dealing is not Dealing.DRAWN:
            return 1
        return 1 + order.counters_to_draw(self.tiles, self.thread_blocks)

    # --- rows of statistics ---

    @property
    def words_row(self) -> int:
        """Start and share, and with dropout words of queries and delta, are one array.

        Copies take registers. This is the row of it that has words, before that of delta.
        """
        return 1 + int(self.problem.has_shares)

    @property
    def together(self) -> int:
        """Rows of that array."""
        return self.words_row + (2 if self.problem.has_dropout else 0)

    # --- registers: what would spill is in `backward_spills.py` ---

    @property
    def keeps_numbers(self) -> bool:
        """Whether the producer keeps numbers of tiles, or reads them anew."""
        return not would_spill(spills.NUMBERS_READ, self)

    @property
    def keeps_nothing(self) -> bool:
        """Whether the producer reads all of a tile anew."""
        return would_spill(spills.ALL_READ, self)

    @property
    def fences_loads(self) -> bool:
        """Whether addresses for copies of boxes may not be made ahead."""
        return would_spill(spills.LOADS_FENCED, self)

    @property
    def early_weights(self) -> bool:
        """Whether there are registers for weights and dQ at a time: where all else is simple."""
        return not would_spill(spills.LATE_WEIGHTS, self)

    @property
    def weights_first(self) -> bool:
        """Whether there are none for dP' beside S'."""
        return would_spill(spills.WEIGHTS_FIRST, self)

    def dq_first(self, has_elements_of_queries: bool) -> bool:
        """Whether there are none for dQ of the step before beside S'. Then that is done first."""
        beside_elements = has_elements_of_queries and would_spill(spills.DQ_BEFORE_ELEMENTS, self)
        return would_spill(spills.DQ_FIRST, self) or beside_elements

    @property
    def far_after_dq(self) -> bool:
        """Whether there are none in steps that rows far from 0 may be in."""
        return would_spill(spills.DQ_BEFORE_FAR, self)

    @property
    def ids_first(self) -> bool:
        """Whether ids are compared before S' is made."""
        return would_spill(spills.IDS_FIRST, self)

    @property
    def drops_early(self) -> bool:
        """Whether there are registers for dropout beside dQ."""
        return not would_spill(spills.LATE_DROPS, self)

    @property
    def has_blank_steps(self) -> bool:
        """Whether a consumer whose keys a step's queries do not see takes a shorter one.

        Lists are of both consumers' keys.
        """
        return not self.problem.has_lists

    @property
    def crowded(self) -> bool:
        """Whether addresses are made anew in each step."""
        return would_spill(spills.ADDRESSES, self)

    @property
    def far_in_masked(self) -> bool:
        """As for `loop_over_steps`."""
        return would_spill(spills.FAR_IN_MASKED, self)

    @property
    def prefetches(self) -> bool:
        """Where query heads share keys times vary by more than it gains."""
        gains = self.sums_dq and self.is_wide and self.problem.group == 1
        return gains and not would_spill(spills.NO_PREFETCHES, self)

    @property
    def registers(self) -> tuple[int, int]:
        """Of a consumer and of the producer."""
        return (232, 40) if would_spill(spills.PRODUCER, self) else self.config.registers

    # --- rows that may be NaN ---

    @property
    def zeroes_keys(self) -> bool:
        """Whether rows of K and V may be NaN that no query sees."""
        return self.problem.backward_ignores_unseen and self.with_query_gradient

    @property
    def zeroes_queries(self) -> bool:
        """Whether rows of Q and dO may be NaN that see no key of a tile and some of others."""
        return self.zeroes_keys and self.problem.dynamic

    # --- shared memory and barriers ---

    @property
    def dv_apart(self) -> bool:
        """Whether dV has a buffer, or is of tiles of such a shape that it leaves from dS's."""
        return self.value_columns.size % DQ_TILE > 0

    @functools.cached_property
    def staged_values(self) -> list[Columns]:
        """The parts in which dV is staged."""
        return [self.value_columns] if self.dv_apart else self.value_columns.in_parts(DQ_TILE)

    @functools.cached_property
    def barriers(self) -> dict[str, Any]:
        """Those with a number, by name."""
        ds_stored = NamedBarriers(first=CONSUMERS + 2, count=2 * CONSUMERS, arrivers=1)
        free = NamedBarriers(
            ds_stored.first + ds_stored.count, self.config.stages, arrivers=CONSUMERS
        )
        v_free = NamedBarriers(free.first + self.config.stages, 1, arrivers=CONSUMERS)
        dq_staged = NamedBarriers(v_free.first + 1, CONSUMERS, arrivers=1)
        gradients_staged = NamedBarriers(dq_staged.first + CONSUMERS, 1, arrivers=CONSUMERS)
        sent = NamedBarriers(gradients_staged.first + 1, CONSUMERS, arrivers=1)
        return dict(
            ds_stored=ds_stored,
            free=free,
            v_free=v_free,
            dq_staged=dq_staged,
            gradients_staged=gradients_staged,
            sent=sent,
            unseen_rows=SharedZeros(CONSUMERS),
        )

    def scratch(self, interpret: bool) -> dict[str, Any]:
        """Types of shared memory and barriers, by name."""
        keys, values, dtype = self.key_columns, self.value_columns, self.problem.dtype
        block_q, stages = self.config.block_q, self.config.stages
        of_delta = int(not self.problem.has_dropout)  # else it comes with start
        found: dict[str, Any] = dict(
            k_smem=keys.smem(K_SLOTS, BLOCK_KV, dtype=dtype),
            v_smem=values.smem(1, BLOCK_KV, dtype=dtype),
            q_smem=keys.smem(stages, block_q, dtype=dtype),
            o_smem=values.smem(stages, block_q, dtype=dtype),
            ds_smem=plgpu.SMEM(
                (2, block_q // DQ_TILE, BLOCK_KV, DQ_TILE),
                dtype,
                transforms=operand_form(keys.box_width),
            ),
            start_smem=plgpu.SMEM((stages, self.together, block_q), jnp.float32),
            k_full=plgpu.Barrier(num_arrivals=keys.tiles, num_barriers=K_SLOTS),
            v_full=plgpu.Barrier(num_arrivals=values.tiles),
            q_full=plgpu.Barrier(num_arrivals=keys.tiles + 1, num_barriers=stages),
            o_full=plgpu.Barrier(num_arrivals=values.tiles + of_delta, num_barriers=stages),
        )
        # What thread blocks draw stands behind delta: there is no room for more, as each ref takes
        # whole KB.
        if not self.problem.has_dropout:
            rows = stages + int(self.dealing is Dealing.DRAWN)
            found["delta_smem"] = plgpu.SMEM((rows, block_q), jnp.float32)
        if self.dealing is Dealing.DRAWN:
            found["first_full"] = plgpu.Barrier(num_arrivals=1)
        if self.dv_apart:
            found["dv_smem"] = values.smem(1, BLOCK_KV, dtype=dtype)
        if self.dq_is_whole:
            parts = [self.dq.whole_part(consumer) for consumer in range(CONSUMERS)]
            found["dq_smem"] = [part.smem(DQ_TILE, dtype=dtype) for part in parts]
        elif self.with_query_gradient:
            found["dq_smem"] = plgpu.SMEM((CONSUMERS, *fragment_shape(DQ_TILE)), jnp.float32)
        if interpret:
            found["twins"] = twins_of(self.barriers)
        return found
