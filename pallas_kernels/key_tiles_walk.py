"""The walk of a thread block over its tiles of keys: where it is, and what tables say of that."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels import key_masks
from pallas_kernels.bit_words import WORD
from pallas_kernels.elements import NOTHING_LOADED, ElementRefs, Loaded
from pallas_kernels.key_tiles import CONSUMER_KEYS, KeyTiles
from pallas_kernels.key_tiles_dealing import Listed, OneEach
from pallas_kernels.mask_functions import COUNT, LISTED, MaskRefs
from pallas_kernels.on_rows import entry_of
from pallas_kernels.ptx.arithmetic import div_rem
from pallas_kernels.ptx.compiler import fresh_rows
from pallas_kernels.ptx.loads import load_rows
from pallas_kernels.ptx.votes import any_positive
from pallas_kernels.tickets import Tickets


@dataclasses.dataclass(frozen=True)
class Walk:
    """The tiles of one thread block, inside a kernel.

    What there is to know of a tile is read where it is needed: kept over a loop it costs registers.

    Attributes:
      deal: which tile is next.
      seeing_blocks_ref: `KeyTiles.seeing_blocks` or `seeing_blocks_of`, in global memory.
      more_refs: in global memory, where the problem has lengths those, where it has a mask of keys
        its bits; where it is dynamic or segmented the queries that see each key, and where it is
        segmented the ids of queries and of keys, as many as there are in all blocks and tiles.
      elements: mask and bias, with rows of keys, of a problem that has them.
      key_words_ref: in global memory, words of keys `[B, S]` of a problem with dropout.
      counters_ref: int32 in global memory: the first is more than 0 if any row is far from 0
        (`far_rows.py`), and is read as what no kernel writes meanwhile. Where tiles are drawn the
        next is that of tickets, and others are what `prepared_tiles` counts
        (`key_tiles_order.counters_to_draw`).
      lists: of tiles, with the mask function, in the place of seeing_blocks_ref; None without.
      seen: of a dense mask what `mask_functions.seen_keys` gives.
    """

    tiles: KeyTiles
    deal: OneEach | Listed | Tickets
    seeing_blocks_ref: Any
    more_refs: tuple[Any, ...] = ()
    elements: ElementRefs | None = None
    key_words_ref: Any = None
    counters_ref: Any = None
    lists: MaskRefs | None = None
    seen: tuple[Any, ...] = ()

    @classmethod
    def of_refs(
        cls,
        tiles: KeyTiles,
        refs,
        deal: Callable[[Any, Any], OneEach | Listed | Tickets],
    ) -> "tuple[Walk, list]":
        """The walk by the first refs of a kernel of `gradient_kernel`, and its other refs.

        Args:
          deal: of the ref of lists, or of the order to draw, and of `counters_ref`.
        """
        table_ref, *refs = refs
        lists, seeing_blocks_ref, seen = None, None, ()
        if tiles.problem.has_lists:
            lists, refs = MaskRefs.split(tiles.problem, refs)
            count = 2 * int(tiles.problem.has_dense_lists)
            seen, refs = tuple(refs[:count]), refs[count:]
        else:
            seeing_blocks_ref, *refs = refs
        count = int(tiles.problem.has_intervals or tiles.problem.picks_keys)
        count += 2 * int(tiles.problem.segmented)
        more_refs = tuple(refs[:count])
        key_words_ref = None
        if tiles.problem.has_dropout:
            key_words_ref, count = refs[count], count + 1
        elements, operands = ElementRefs.split(tiles.problem, refs[count:], transposed=True)
        counters_ref, *operands = operands
        walk = cls(
            tiles,
            deal(table_ref, counters_ref),
            seeing_blocks_ref,
            more_refs,
            elements,
            key_words_ref,
            counters_ref,
            lists,
            seen,
        )
        return walk, operands

    def count(self):
        """How many tiles there are, where they are not drawn; at least 1."""
        assert not isinstance(self.deal, Tickets)
        return self.deal.count()

    def locate(self, index):
        """Tile and key head, of every batch entry, of the thread block's tile of that index."""
        return self.tiles.locate(self.number(index))

    def number(self, index):
        """Number of the thread block's tile of that index."""
        return self.deal.number(index)

    def prepared_tiles(self, section):
        """Counter of a section's tiles that are prepared, from 1 (`key_tiles_order.prepared`)."""
        return self.counters_ref.at[1 + section]

    def batch_of(self, place):
        """Batch entry of what `locate` gives."""
        _, kv_head_of_all = place
        return lax.div(kv_head_of_all, jnp.int32(self.tiles.problem.kv_heads))

    def tile_of(self, place):
        """Number of the tile of keys that what `locate` gives is, or is a part of."""
        return self.seeing(place, 2) if self.tiles.has_parts else place[0]

    def keys_of(self, place):
        """Batch entry, tile of keys and key head, of what `locate` gives."""
        batch, kv_head = div_rem(place[1], self.tiles.problem.kv_heads)
        if self.tiles.shares.heads > 1:
            kv_head = lax.div(kv_head, jnp.int32(self.tiles.shares.heads))
        return batch, self.tile_of(place), kv_head

    def seeing(self, place, column: int):
        """An entry of the table of query blocks."""
        if self.tiles.problem.by_batch:
            return self.seeing_blocks_ref[self.batch_of(place), place[0], column]
        return self.seeing_blocks_ref[column, place[0]]

    def first_block(self, place):
        """The first query block that sees a key of a tile; place is what `locate` gives."""
        problem = self.tiles.problem
        # Read for dense masks and biases too, where a kernel would spill.
        if problem.highest is None and not (problem.by_batch or problem.has_elements):
            return jnp.int32(0)
        return self.seeing(place, 0)

    def end_block(self, place):
        """The end of the query blocks that see a key of a tile: of one block if it has no key.

        A head's only tile takes all blocks even so, as dQ of each is to be made.
        """
        if self.tiles.problem.picks_keys and self.tiles.whole_per_head > 1:
            is_there = self.keys_from(place, 0) > 0
            if self.tiles.problem.has_key_mask:
                is_there = functools.reduce(jnp.maximum, self._counts(place)) > 0
            return jnp.where(is_there, self.tiles.query_blocks, self.first_block(place) + 1)
        if not self.tiles.problem.has_far_edge:
            return self.tiles.query_blocks
        return self.seeing(place, 1)

    def is_first_to_see(self, place, query_block):
        """Whether a tile sees a query block and, most likely, none before it in its head does.

        Without ids it is true of the first tile alone, which sees what any other does unless a
        window has a far edge.
        """
        if not self.tiles.problem.segmented:
            return self.tile_of(place) == 0
        return query_block >= self.own_entry(place, self.tiles.block_kv, 1)

    def first_step(self, place):
        """How many steps the tiles of a head before it take, in a kernel with more results."""
        return self.seeing(place, 5 if self.tiles.has_parts else 2)

    def keys_from(self, place, own_first_key: int):
        """How many keys count from one of a tile on, 0 or less for none; by a mask of 64."""
        if self.tiles.problem.has_key_mask:
            return key_masks.counting(self._words_of_keys(place, own_first_key))
        length = self.more_refs[0][self.batch_of(place)]
        return length - (self.tile_of(place) * self.tiles.block_kv + own_first_key)

    def counting_queries(self, place):
        """First and end of the queries that see any key of a tile; for none first is above end."""
        return self._last_entries(place)[:2]

    def counting_keys(self, place):
        """First and end, in a tile, of its keys that queries see; for none first is above end."""
        if self.tiles.problem.has_lengths:
            return jnp.int32(0), self.keys_from(place, 0)
        return self._last_entries(place)[2:]

    def unmasked_keys(self, place) -> tuple[Any, jax.Array]:
        """By a mask of keys: words of bits of a tile's keys that count, and if some do not."""
        count = self.tiles.block_kv // WORD
        words = self.more_refs[0].at[
            self.batch_of(place), pl.ds(self.tile_of(place) * count, count)
        ]
        return words, functools.reduce(jnp.minimum, self._counts(place)) < CONSUMER_KEYS

    def unmasked_rows(self, place, own_first_key: int) -> jax.Array:
        """By a mask of keys: which of 64 keys of a tile count, `(64,)`."""
        row = fresh_rows()
        word = jnp.where(row < WORD, *self._words_of_keys(place, own_first_key))
        return ((word >> (row & (WORD - 1))) & 1) > 0

    def _words_of_keys(self, place, own_first_key: int) -> tuple[jax.Array, jax.Array]:
        """Those of a mask of keys of 64."""
        batch, words = self.batch_of(place), self.more_refs[0]
        first = self.tile_of(place) * (self.tiles.block_kv // WORD) + own_first_key // WORD
        return words[batch, first], words[batch, first + 1]

    def _counts(self, place) -> list[jax.Array]:
        """By a mask of keys: how many count of those of each consumer."""
        firsts = range(0, self.tiles.block_kv, CONSUMER_KEYS)
        return [self.keys_from(place, first) for first in firsts]

    def seen_keys(self, place) -> tuple[Any, jax.Array]:
        """By a dense mask: words of bits of a tile's keys that queries see, and if some are not."""
        seen, has_unseen = self.seen
        tile, kv_head_of_all = place
        batch, kv_head = div_rem(kv_head_of_all, self.tiles.problem.kv_heads)
        entry = entry_of(seen, batch, self.tiles.problem)
        head = 0 if seen.shape[1] == 1 else kv_head
        count = self.tiles.block_kv // WORD
        words = seen.at[entry, head, pl.ds(tile * count, count)]
        return words, has_unseen[entry, head, tile] > 0

    def own_entry(self, place, own_first_key: int, column: int):
        """An entry of those that the 64 keys of a consumer have in the table of query blocks.

        Behind those of the last one, at `block_kv`, are what else it holds of the tile.
        """
        return self.seeing(place, 2 + 4 * (own_first_key // CONSUMER_KEYS) + column)

    def _last_entries(self, place):
        return [self.own_entry(place, self.tiles.block_kv, n) for n in range(4)]

    def of_list(self, place, column):
        """An entry of the list of a tile (`mask_functions.query_lists`)."""
        assert self.lists is not None
        tile, kv_head_of_all = place
        problem = self.tiles.problem
        batch, kv_head = div_rem(kv_head_of_all, problem.kv_heads)
        if problem.has_given_lists:  # what is behind the last tile is asked for, and not used
            batch = jnp.minimum(batch, problem.batch - 1)
        return self.lists.entry(batch, kv_head, tile, column)

    def listed_step(self, place, t):
        """Query block of step t of a tile that has a list, and the query head's number."""
        number = self.of_list(place, LISTED + t)
        if self.tiles.problem.group == 1:
            return number, 0
        return div_rem(number, self.tiles.query_blocks)[::-1]

    def blocks_of(self, place):
        """First query block of a tile, and how many there are of each head of the group."""
        first_block = self.first_block(place)
        return first_block, self.end_block(place) - first_block

    def steps(self, index):
        """How many query blocks, of all heads of the group."""
        return self.steps_of(self.locate(index))

    def steps_of(self, place):
        """The same of what `locate` gives."""
        if self.lists is not None:
            return self.of_list(place, COUNT)
        if self.tiles.has_parts:
            return self.end_step(place) - self.seeing(place, 3)
        _, per_head = self.blocks_of(place)
        return per_head * self.tiles.problem.group

    def end_step(self, place):
        """The end of its steps, as the whole tile counts them."""
        return self.seeing(place, 4) if self.tiles.has_parts else self.steps_of(place)

    def step_of(self, place, t):
        """Query block of its step t, and the query head's number in its group."""
        return self.step_of_tile(place, t + self.seeing(place, 3) if self.tiles.has_parts else t)

    def step_of_tile(self, place, t):
        """The same of a step as the whole tile counts them."""
        if self.lists is not None:
            return self.listed_step(place, t)
        _, per_head = self.blocks_of(place)
        member = lax.div(t, per_head) if self.tiles.problem.group > 1 else 0
        return self.end_block(place) - 1 - t + member * per_head, member

    def block_of_first_step(self, place):
        """Query block of a tile's step 0, where it has no list."""
        if self.tiles.has_parts:
            return self.step_of(place, 0)[0]
        return self.end_block(place) - 1

    def advance(self, index, t):
        """The step after step t of a tile: index of its tile and number in it.

        After the last step of all, the index is `count()`, and the number means nothing.
        """
        is_last = (t + 1 == self.steps(index)) & (index < self.count())
        return index + is_last, jnp.where(is_last, 0, t + 1)

    @property
    def has_elements_of_queries(self) -> bool:
        return self.elements is not None and self.elements.any_of_queries

    def load_elements(self, j, *, index, end, own_first_key: int) -> Loaded:
        """Mask and bias of a consumer's part of step j, of a tile whose steps end before `end`."""
        problem = self.tiles.problem
        if self.elements is None or not problem.has_elements:
            return NOTHING_LOADED
        place = _, kv_head_of_all = self.locate(index)
        batch, kv_head = div_rem(kv_head_of_all, problem.kv_heads)
        query_block, member = self.step_of(place, j - end + self.steps(index))
        head = kv_head * problem.group + member
        first_key = self.tile_of(place) * self.tiles.block_kv + own_first_key
        block_q = self.tiles.block_q
        return self.elements.load(batch, head, first_key, query_block * block_q, block_q)

    def key_words(self, index, own_first_key: int) -> jax.Array | None:
        """Words of dropout of a consumer's keys of a tile, `(64,)` int32; None without dropout."""
        if self.key_words_ref is None:
            return None
        place = self.locate(index)
        first_key = self.tile_of(place) * self.tiles.block_kv + own_first_key
        last_key = self.tiles.problem.key_length - 1
        return load_rows(self.key_words_ref.at[self.batch_of(place)], first_key, last_key)

    def are_any_far(self) -> Callable[[], jax.Array]:
        """What tells whether any row of all is far from 0; with dropout read anew each time."""
        read = lambda: any_positive(self.counters_ref.at[0])
        if self.tiles.problem.has_dropout or self.tiles.problem.has_cap:
            return read
        is_far = read()
        return lambda: is_far

    def is_comparing(self, index):
        """Whether steps of a tile that need a mask compare segment ids."""
        place = self.locate(index)
        return self.own_entry(place, self.tiles.block_kv, 0) > 0
