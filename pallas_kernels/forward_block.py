"""What the producer and the consumers of a thread block of the forward share."""

from collections.abc import Callable
from typing import Any

import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels import tickets
from pallas_kernels.bit_words import WORD
from pallas_kernels.config import ROWS
from pallas_kernels.dropout import DropoutRefs
from pallas_kernels.elements import ElementRefs
from pallas_kernels.forward_plan import Plan
from pallas_kernels.forward_tiles import BLOCKS, END, EXACT, FAR
from pallas_kernels.hopper import Ring, Turns
from pallas_kernels.key_masks import KeyBlocks
from pallas_kernels.mask_functions import LISTED, MaskRefs
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
      schedule, key_blocks: refs of what `Tiles.with_lists` or `with_tickets` gives.
      number: of the thread block.
    """

    plan: Any
    q: Any
    queries: Ring
    keys: Ring
    turns: Turns
    warpgroup: Any
    schedule: Any
    key_blocks: Any
    number: Any

    def listed(self, column, *, anew: bool | None = None):
        """An entry of this thread block's list, whose address is made anew if registers are few."""
        anew = self.plan.registers_are_scarce if anew is None else anew
        return self.schedule[self.number + fresh_zero() if anew else self.number, column]

    def query_buffer(self, index):
        has_one = self.plan.config.query_buffers == 1
        buffer = jnp.int32(0) if has_one else self.queries.slot(index)
        return buffer + fresh_zero() if self.plan.registers_are_scarce else buffer

    def needs(self, tile, batch, column):
        """An entry of `Tiles.key_blocks`."""
        entry = (batch, tile, column) if self.plan.problem.by_batch else (tile, column)
        return self.key_blocks[entry]

    def end_of(self, tile, batch):
        """The end of the first key block of a tile, in blocks."""
        return self.needs(tile, batch, END if self.plan.tiles.have_ends else BLOCKS)

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
      key_words, blocks_of_entries: of a mask of keys its bits, and refs of `KeyBlocks`, else None.
      reach: refs of the first key that a tile's rows see and of the end, if rows ignore others.
      of_unseen: of a dense mask, refs of `Blocks.seen` and of whether blocks have a key unseen.
      sinks: ref of them, or None.
      lists: of tiles, with the mask function, None without.
      dropout, elements, masks: of rows and keys.
      queries, keys, values: rings that TMA fills.
      bias_smem: what it brings beside keys.
      block_vote, unseen_values: see `Plan.barriers`.
      warpgroup: index of this one; the consumers come first.
      drawn: tiles that are drawn, None where they are listed.
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

        self.schedule, *rest = refs
        drawn_refs, rest = rest[: int(by_batch)], rest[int(by_batch) :]
        self.lists = None
        if problem.has_lists:
            self.lists, (self.q, self.k, self.v, *rest) = MaskRefs.split(problem, rest)
        else:
            self.key_blocks, self.q, self.k, self.v, *rest = rest
        *rest, self.o, self.lse, self.references = rest
        # Intervals, lengths or a mask of keys come first, then the reach of tiles, ids, words,
        # elements and sinks.
        count = int(problem.has_intervals or problem.picks_keys) + 3 * int(problem.has_key_mask)
        intervals, rest = rest[:count], rest[count:]
        self.lengths = intervals[0] if problem.has_lengths else None
        self.key_words = self.blocks_of_entries = None
        if problem.has_key_mask:
            self.key_words, self.blocks_of_entries = intervals[0], KeyBlocks(*intervals[1:])
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
        self.number = lax.axis_index("block")
        self.drawn = None
        if by_batch:
            (drawn_ref,) = drawn_refs
            entries_ref, entries_full = entries
            self.drawn = tickets.TicketsInRounds(
                self.schedule,
                drawn_ref,
                entries_ref,
                plan.tiles.count,
                plan.tiles.thread_blocks,
                lambda: self.number,
                entries_full,
            )
        elif not plan.tiles.by_number:
            self._tile_count = self.listed(0)

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

    def needs(self, tile, batch, column):
        if self.lengths is not None:
            return self._needs_of_length(tile, batch, column)
        if self.blocks_of_entries is not None:
            return self._needs_of_mask(batch, column)
        needed_by_all = self.plan.tiles.needed_by_all
        if needed_by_all is not None:  # no load to wait for; where ptxas knows the number it spills
            return jnp.int32(needed_by_all[column]) + fresh_zero()
        return super().needs(tile, batch, column)

    def _needs_of_length(self, tile, batch, column):
        """The same where keys end at a length: no block behind it, and a mask in its last one."""
        block_kv, length = jnp.int32(self.plan.config.block_kv), self.length(batch)
        all_blocks = super().needs(tile, batch, BLOCKS)
        blocks = jnp.minimum(all_blocks, lax.div(jnp.maximum(length, 1) + (block_kv - 1), block_kv))
        if column == BLOCKS:
            return blocks
        unmasked = all_blocks - super().needs(tile, batch, EXACT)
        return blocks - jnp.minimum(unmasked, lax.div(jnp.maximum(length - 1, 0), block_kv))

    def _needs_of_mask(self, batch, column):
        """The same of a mask of keys, which all tiles of a batch entry have."""
        of_entries, words = self.blocks_of_entries, self.key_words
        assert of_entries is not None and words is not None
        if column == EXACT:
            return jnp.int32(1)  # as its last block has a key that counts
        if column == FAR:
            return of_entries.unmasked(batch, words.shape[1] * WORD // self.plan.config.block_kv)
        return of_entries.end(batch) if column == END else of_entries.count(batch)

    def length(self, batch):
        """Where the keys of a batch entry end."""
        assert self.lengths is not None
        return self.lengths[batch]

    def of_list(self, place, column):
        """An entry of the list of a tile, batch entry and head (`mask_functions.lists`)."""
        assert self.lists is not None
        tile, batch, head = place
        return self.lists.entry(batch, head, tile, column)

    def end_of_first(self, place):
        """The end of the first key block of a tile, in blocks."""
        if self.lists is not None:
            return self.key_block(place, jnp.int32(0)) + 1
        tile, batch, _ = place
        return self.end_of(tile, batch)

    def key_block(self, place, j):
        """The key block of step j of a tile."""
        if self.lists is not None:
            return self.of_list(place, LISTED + j)
        tile, batch, _ = place
        return self.end_of(tile, batch) - 1 - j

    def tile_count(self):
        """Tiles of this thread block that are not drawn."""
        tiles = self.plan.tiles
        if tiles.one_each:
            return jnp.int32(1)
        if tiles.by_number:
            return lax.div(tiles.count - 1 - self.number, jnp.int32(tiles.thread_blocks)) + 1
        scarce = self.plan.registers_are_scarce
        return self.listed(0) if scarce else self._tile_count

    def tile_number(self, position, *, anew: bool | None = None):
        """Number of one of them, by its position; anew as for `listed`."""
        tiles = self.plan.tiles
        if tiles.one_each:
            return self.number
        if tiles.by_number:
            return self.number + position * tiles.thread_blocks
        return self.listed(1 + position, anew=anew)

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

        if self.drawn:
            self.drawn.rounds(one_round, any_too_low)
            return

        def run(carry):
            begin, steps = carry
            _, steps = one_round(begin, steps)
            is_last = jnp.logical_not(any_too_low()) | (begin > 0)
            return jnp.where(is_last, 2 * self.tile_count(), self.tile_count()), steps

        lax.while_loop(lambda carry: carry[0] < 2 * self.tile_count(), run, (zero, zero))
