"""What the producer and the consumers of a thread block of the forward share."""

from collections.abc import Callable
from typing import Any

import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.config import ROWS
from pallas_kernels.dropout import DropoutRefs
from pallas_kernels.elements import ElementRefs
from pallas_kernels.forward_deals import deal_of
from pallas_kernels.forward_key_blocks import blocks_of_tiles
from pallas_kernels.forward_plan import Plan
from pallas_kernels.hopper import Ring, Turns
from pallas_kernels.mask_functions import MaskRefs
from pallas_kernels.ptx import notes
from pallas_kernels.ptx.barriers import with_twins
from pallas_kernels.ptx.compiler import fresh_zero
from pallas_kernels.row_masks import RowMasks, in_each_row


class Block:
    """What both forwards know of their tiles.

    Attributes:
      plan: of the kernel.
      q: queries in global memory.
      queries, keys: what TMA brings, a buffer or slot for all consumers; what a slot has of keys
        consumers have of values too.
      turns: of the consumers.
      warpgroup: index of this one; the consumers come first.
      key_blocks: which each tile has.
    """

    plan: Any
    q: Any
    queries: Ring
    keys: Ring
    turns: Turns
    warpgroup: Any
    key_blocks: Any

    def query_buffer(self, index):
        has_one = self.plan.config.query_buffers == 1
        buffer = jnp.int32(0) if has_one else self.queries.slot(index)
        return buffer + fresh_zero() if self.plan.registers_are_scarce else buffer

    def load_queries(self, index, place) -> None:
        """Those of a tile, when their buffer is free.

        Args:
          place: tile, batch entry and head.
        """
        plan, (tile, batch, head) = self.plan, place
        buffer = self.query_buffer(index)
        self.queries.await_free(index, buffer)
        for w in range(plan.config.consumers):
            source = self.q.at[batch, pl.ds(plan.tiles.first_row(tile, w), ROWS), head]
            (queries,) = self.queries.at(buffer, w)
            plan.key_columns.load(source, queries, self.queries.full.at[buffer])


class ThreadBlock(Block):
    """Operands, results, buffers and barriers, and the tiles that it walks over.

    Attributes:
      plan: of the kernel.
      q, k, v, o, lse, references: refs of operands and results, in global memory.
      lengths: ref of where keys end, of a problem that has them, else None.
      key_words: ref of the bits of a mask of keys, else None.
      reach: refs of the first key that a tile's rows see and of the end, if rows ignore others.
      of_unseen: of a dense mask, refs of `Blocks.seen` and of whether blocks have a key unseen.
      sinks: ref of them, or None.
      lists: of tiles, with the mask function, None without.
      dropout, elements, masks: of rows and keys.
      queries, keys, values: rings that TMA fills.
      bias_smem: what it brings beside keys.
      block_vote, unseen_values: see `Plan.barriers`.
      warpgroup: index of this one; the consumers come first.
      deal: how it comes to its tiles.
      key_blocks: which each of these has.
    """

    def __init__(
        self, plan: Plan, refs: tuple, *, q_smem, k_smem, v_smem, q_full, k_full, v_full,
        o_smem=None, noted=None, bias_smem=None, entries=None, twins=None,
    ):  # fmt: skip
        problem, by_batch = plan.problem, plan.problem.by_batch
        self.plan = plan
        self.bias_smem, self._o_smem, self._noted = bias_smem, o_smem, noted
        barriers = with_twins(plan.barriers, twins)
        turn, k_free, v_free, q_free, self.block_vote, self.unseen_values = barriers
        self.queries = Ring((q_smem,), q_full, q_free)
        self.keys = Ring((k_smem,), k_full, k_free, (plan.key_columns.load,))
        self.values = Ring((v_smem,), v_full, v_free, (plan.value_columns.load,))

        schedule, *rest = refs
        drawn_refs, rest = rest[: int(by_batch)], rest[int(by_batch) :]
        self.lists, table = None, None
        if problem.has_lists:
            self.lists, (self.q, self.k, self.v, *rest) = MaskRefs.split(problem, rest)
        else:
            table, self.q, self.k, self.v, *rest = rest
        *rest, self.o, self.lse, self.references = rest
        # Intervals, lengths or a mask of keys come first, then the reach of tiles, ids, words,
        # elements and sinks.
        count = int(problem.has_intervals or problem.picks_keys) + 3 * int(problem.has_key_mask)
        intervals, rest = rest[:count], rest[count:]
        self.lengths = intervals[0] if problem.has_lengths else None
        self.key_words = intervals[0] if problem.has_key_mask else None
        count = 2 * int(problem.forward_ignores_unseen and problem.dynamic)
        self.reach, rest = rest[:count], rest[count:]
        count = 2 * int(problem.has_dense_lists)
        self.of_unseen, rest = rest[:count], rest[count:]
        ids, rest = rest[: 2 * int(problem.segmented)], rest[2 * int(problem.segmented) :]
        self.dropout, rest = DropoutRefs.split(problem, rest)
        self.elements, rest = ElementRefs.split(problem, rest, comes_by_tma=plan.comes_by_tma)
        self.sinks = rest[0] if plan.with_sinks else None
        self.masks = RowMasks(
            problem,
            plan.config.block_kv,
            plan.tiles.rows,
            intervals_ref=intervals[0] if problem.has_intervals else None,
            ids_refs=ids,
        )

        self.warpgroup = lax.axis_index("warpgroup")
        self.turns = Turns(turn, self.warpgroup)
        of_mask = intervals if problem.has_key_mask else ()
        self.key_blocks = blocks_of_tiles(plan.tiles, table, self.lists, self.lengths, of_mask)
        self.deal = deal_of(
            plan.tiles, schedule, drawn_refs, entries, anew=plan.registers_are_scarce
        )

    def staging(self, index):
        """Shared memory that the output of a tile leaves from, that of this warpgroup's rows."""
        if self.plan.stages_in_queries:
            (queries,) = self.queries.at(self.query_buffer(index), self.warpgroup)
            return queries
        assert self._o_smem is not None
        return self._o_smem.at[self.warpgroup]

    def own_notes(self):
        """Where threads of this consumer note that a row's reference was too low."""
        assert self._noted is not None
        return self._noted.at[self.warpgroup]

    def rounds(self, one_round: Callable[[Any, Any], tuple], *, is_consumer: bool) -> None:
        """Runs a round over all tiles, and another if a reference was too low.

        Indices of tiles, and steps, go on from one round to the next: the second begins at an index
        above 0.

        Args:
          one_round: of the index it begins at and the steps before it, returns the index after its
            last tile, and the steps by then.
          is_consumer: others have no rows.
        """
        zero = jnp.int32(0)
        if self.plan.one_round_does:
            one_round(zero, zero)
            return

        def any_too_low():
            too_low = notes.noted(self.own_notes()) if is_consumer else in_each_row(jnp.int32(0))
            return self.block_vote.any(too_low, self.warpgroup)

        self.deal.rounds(one_round, any_too_low)
