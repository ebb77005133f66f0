"""What kernels have in common whose thread blocks own keys and loop over queries that see them.

The tiles of a thread block stand in its list, or it draws them (`tickets.py`).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import intervals as run_time_intervals
from pallas_kernels import scheduler, segments, tickets
from pallas_kernels.config import BACKWARD_CONSUMERS, BACKWARD_SECTION_BYTES, SM_COUNT, Problem
from pallas_kernels.dropout import Words
from pallas_kernels.elements import NOTHING_LOADED, ElementRefs, Loaded
from pallas_kernels.elements import masked as masked_by_element
from pallas_kernels.ptx.arithmetic import div_rem
from pallas_kernels.ptx.barriers import HAND_ORDERED
from pallas_kernels.ptx.compiler import fresh_rows, fresh_zero
from pallas_kernels.ptx.loads import load_intervals, load_rows
from pallas_kernels.ptx.masks import (
    all_columns,
    bits_from,
    bits_to,
    equal_columns,
    keep_bits,
    keep_columns_from,
    keep_columns_to,
)
from pallas_kernels.ptx.votes import any_positive

QUERIES = plgpu.Layout.WGMMA.reduce(0)  # one value a column of a transposed tile
_KEYS = plgpu.Layout.WGMMA.reduce(1)  # one value a row of a transposed tile
_CONSUMER_KEYS = 64  # of one consumer: the M of a wgmma
_TILE_OVERHEAD = 1.0  # what a tile costs beside its steps, in steps
# Sections are longer by this where costs are known at run time only, as what thread blocks get is
# even over many tiles alone; yet not all heads, whose dQ would leave L2.
_LONGER_SECTIONS = 8
# The same where tiles are drawn, which is even over fewer. Tiles of documents are even enough
# without, and what evicts dQ from L2 costs them more.
_LONGER_DRAWN_SECTIONS = 3
# Their entries have no room beside what sums over rows might need, of which there are none here.
_DRAWING = dataclasses.replace(HAND_ORDERED, reduction_scratch_bytes=0)


class Section(NamedTuple):
    """Key heads, of every batch entry, that kernels work on before they go on to the next.

    Attributes:
      kv_heads: which.
      size: how many all sections but the last have. What is kept of one section at a time stands
        at the head's number modulo this.
    """

    kv_heads: range
    size: int


@dataclasses.dataclass(frozen=True)
class KeyTiles:
    """Tiles of `block_kv` keys, and the blocks of `block_q` queries that see any of them.

    Attributes:
      row_bytes: what a tile reads and adds to for each query row of one head.
    """

    problem: Problem
    block_kv: int
    block_q: int
    row_bytes: int

    @property
    def per_head(self) -> int:
        return -(-self.problem.key_length // self.block_kv)

    @property
    def kv_heads(self) -> range:
        """All key heads, of every batch entry."""
        return range(self.problem.batch * self.problem.kv_heads)

    @property
    def count(self) -> int:
        """Tiles of all heads, of every batch entry."""
        return len(self.kv_heads) * self.per_head

    @property
    def query_blocks(self) -> int:
        return -(-self.problem.query_length // self.block_q)

    @property
    def ragged(self) -> bool:
        """Whether the last tile has keys beyond the end."""
        return self.problem.key_length % self.block_kv != 0

    @property
    def any_mask(self) -> bool:
        p = self.problem
        return p.highest is not None or p.has_far_edge or self.ragged

    def seeing_blocks(self) -> np.ndarray:
        """`[2, per_head]` int32: first and end of the query blocks that see a key of the tile.

        A tile that no row sees takes one, fully masked, so that every tile has a step. What is
        known at run time only is left out, as if it let every query see every key.
        """
        first, end = self._seeing_blocks(0, self.block_kv)
        first = np.minimum(first, self.query_blocks - 1)
        return np.stack([first, np.maximum(end, first + 1)])

    def _seeing_blocks(self, own_first_key: int, keys: int) -> np.ndarray:
        """The same of some keys of each tile, of which there may be no block."""
        p = self.problem
        first_key = np.arange(self.per_head) * self.block_kv + own_first_key
        last_key = np.minimum(first_key + keys, p.key_length) - 1
        first = np.zeros(self.per_head, np.int64)
        end = np.full(self.per_head, self.query_blocks)
        if p.highest is not None:
            first = (first_key - p.highest) // self.block_q
        if p.lowest is not None:
            end = (last_key - p.lowest) // self.block_q + 1
        return np.stack([first, end]).clip(0, self.query_blocks).astype(np.int32)

    def blank_steps(self, own_first_key: int) -> tuple[bool, bool]:
        """Whether a tile may have steps whose queries see none of the 64 keys of a consumer.

        First those of queries before the ones that see its keys, then of those behind them.
        """
        if self.problem.by_batch:
            return (self.block_kv > _CONSUMER_KEYS,) * 2
        first, end = self.seeing_blocks()
        own_first, own_end = self._seeing_blocks(own_first_key, _CONSUMER_KEYS)
        return bool((own_first > first).any()), bool((own_end < end).any())

    def seeing(self, intervals: jax.Array | None) -> jax.Array | np.ndarray:
        """The queries that see each key, `[B or 1, 2, per_head * block_kv]` (`intervals.py`).

        Nothing sees the keys beyond the end. Segment ids are left out.

        Args:
          intervals: the keys `[B, 2, T]` of each query, if the problem is dynamic.
        """
        p = self.problem
        beyond = ((0, 0), (0, 0), (0, self.per_head * self.block_kv - p.key_length))
        if intervals is not None:
            return jnp.pad(run_time_intervals.of_keys(intervals, p.key_length), beyond)
        return np.pad(run_time_intervals.of_bounds_of_keys(p), beyond)

    def seeing_blocks_of(
        self,
        seeing: jax.Array | np.ndarray,
        ids: tuple[jax.Array, jax.Array] | None = None,
        ids_are_sorted: jax.Array | None = None,
    ) -> jax.Array:
        """The same for each batch entry, from the queries that see each key.

        Args:
          seeing: what the method of that name gives.
          ids, ids_are_sorted: if the problem is segmented, segment ids of queries and keys, and of
            each batch entry what `segments.intervals` says of the queries that keys see.

        Returns:
          `[B + 1, per_head, 2 + 4 * block_kv / 64 or more]` int32: first and end for the tile, then
          for each 64 keys of it first and end, and those of what needs no mask; with ids, whether
          steps with a mask compare them, and the end for the tile before; four more if the problem
          has `backward_ignores_unseen` (`Walk.counting_queries`, `Walk.counting_keys`). What the
          last batch entry says has no meaning: `Walk.locate` may ask for it.
        """
        reach = run_time_intervals.reach(seeing, _CONSUMER_KEYS, empty_rows_count=True)
        # Rows beyond the last query have no weight, masked or not.
        to_end = reach.common_end >= self.problem.query_length
        blocks = segments.Blocks(
            first=reach.first // self.block_q,
            end=-(-reach.end // self.block_q),
            first_unmasked=-(-reach.common_first // self.block_q),
            end_unmasked=jnp.where(to_end, self.query_blocks, reach.common_end // self.block_q),
        )
        if ids is not None:
            query_ids, key_ids = ids
            key_ids = segments.padded(key_ids, self.block_kv)
            sharing = segments.sharing(key_ids, query_ids, _CONSUMER_KEYS, self.block_q)
            blocks = segments.restricted(blocks, sharing)
        by_tile = lambda x: x.reshape(x.shape[0], self.per_head, -1)
        own_first, own_end, first_unmasked, end_unmasked = map(by_tile, blocks)
        # Element by element, as each reduction would be a kernel.
        parts = range(self.block_kv // _CONSUMER_KEYS)
        first = functools.reduce(jnp.minimum, (own_first[..., n, None] for n in parts))
        end = functools.reduce(jnp.maximum, (own_end[..., n, None] for n in parts))
        first = jnp.clip(first, 0, self.query_blocks - 1)
        end = jnp.clip(end, first + 1, self.query_blocks)
        own_first = jnp.clip(own_first, first, end)
        own_end = jnp.clip(own_end, own_first, end)
        first_unmasked = jnp.clip(first_unmasked, own_first, own_end)
        end_unmasked = jnp.clip(end_unmasked, first_unmasked, own_end)
        own = jnp.stack([own_first, own_end, first_unmasked, end_unmasked], axis=-1)
        columns = [first, end, own.reshape(*first.shape[:2], -1)]
        if ids_are_sorted is not None:
            comparing = ~ids_are_sorted[:, None, None]
            columns.append(jnp.broadcast_to(comparing, first.shape).astype(jnp.int32))
            # In each row, as a producer that reads the row before spills. Also, rows of 12 entries
            # take one with dropout a register less.
            columns.append(jnp.pad(end[:, :-1], ((0, 0), (1, 0), (0, 0))))
        if self.problem.backward_ignores_unseen:
            queries = run_time_intervals.reach(seeing, self.block_kv, empty_rows_count=False)
            seen = jnp.asarray(seeing[:, 0] < seeing[:, 1])
            keys = run_time_intervals.hull(seen.reshape(seen.shape[0], self.per_head, -1))
            columns += [x[..., None] for x in (queries.first, queries.end, *keys)]
        table = jnp.concatenate(columns, axis=-1)
        return jnp.pad(table, ((0, 1), (0, 0), (0, 0)), mode="edge")

    def steps(self) -> np.ndarray:
        """`[per_head]`: query blocks that a tile takes, of all heads of the group."""
        first, end = self.seeing_blocks()
        return self.problem.group * (end - first)

    @property
    def steps_per_head(self) -> int:
        """Of all tiles of a key head."""
        return int(self.steps().sum())

    def first_steps(self) -> np.ndarray:
        """`[per_head]` int32: how many steps the tiles before each take."""
        steps = self.steps()
        return (steps.cumsum() - steps).astype(np.int32)

    def thread_blocks(
        self, most: int | None, kv_heads: range | None = None, draws: bool = False
    ) -> int:
        """How many to launch: at most so many, or if None as `scheduler.thread_blocks` decides.

        Args:
          kv_heads: those that have tiles; None for all.
          draws: thread blocks draw their tiles: None stands for one on each SM.
        """
        count = len(kv_heads or self.kv_heads) * self.per_head
        if most is None and not draws:
            is_known = not self.problem.by_batch
            return scheduler.thread_blocks(count, self.steps(), SM_COUNT, is_known)
        return min(count, most or SM_COUNT)

    def schedule(
        self, thread_blocks: int, reverse: bool = False, kv_heads: range | None = None
    ) -> np.ndarray:
        """The tiles of each thread block, as `scheduler.deal` gives them; see `locate`.

        If costs are known at run time only, as `scheduler.deals_by_rank` does, with ranks in the
        place of tiles.
        """
        kv_heads = kv_heads or self.kv_heads
        section = self._section(kv_heads, _LONGER_SECTIONS if self.problem.by_batch else 1)
        number, tile, cost = self._order(kv_heads, section)
        if self.problem.by_batch:
            return scheduler.deals_by_rank(number, tile, self.per_head, thread_blocks, reverse)
        return scheduler.deal(number, cost, thread_blocks, reverse)

    def order_to_draw(self, thread_blocks: int) -> np.ndarray:
        """The numbers of all tiles in the order to draw them.

        If costs are known at run time only, with ranks in the place of tiles.
        """
        number, _, _ = self._order(self.kv_heads, *self._sections_to_draw(thread_blocks))
        return number.astype(np.int32)

    def prepared(self, thread_blocks: int) -> tuple[int, range]:
        """Key heads of a section, and those for which the section before can prepare something.

        Where thread blocks draw tiles. The tile of that number in each of these heads has one of
        its own in the section before: the one whose head is a section before.
        """
        section, last_section = self._sections_to_draw(thread_blocks)
        heads = len(self.kv_heads)
        *_, last, _ = scheduler.section_starts(self.per_head, heads, section, last_section)
        return section, range(section, last + section)

    def _sections_to_draw(self, thread_blocks: int) -> tuple[int, int]:
        """Key heads of a section, and tiles of the last one."""
        p = self.problem
        longer = _LONGER_DRAWN_SECTIONS if p.by_batch and not p.segmented else 1
        last_section = tickets.LAST_TILES * thread_blocks if p.by_batch else 0
        return self._section(self.kv_heads, longer), last_section

    def _section(self, kv_heads: range, longer: int) -> int:
        """Key heads of a section, of so many times `BACKWARD_SECTION_BYTES`."""
        p = self.problem
        return scheduler.heads_per_section(
            longer * BACKWARD_SECTION_BYTES,
            p.group * p.query_length * self.row_bytes,
            tiles_per_kv_head=self.per_head,
            slots=SM_COUNT,
            kv_heads=len(kv_heads),
            group=1,
        )

    def _order(
        self, kv_heads: range, section: int, last_section: int = 0
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The order of starting: number of each tile, its number in its head, and its cost.

        If costs are known at run time only, with ranks in the place of tiles.

        Args:
          kv_heads: those that have tiles.
          section, last_section: as for `scheduler.tile_order`.
        """
        cost = np.zeros(self.per_head)
        if not self.problem.by_batch:
            cost = self.steps() + _TILE_OVERHEAD
        tile, kv_head = scheduler.tile_order(cost, len(kv_heads), section, last_section)
        return (kv_heads.start + kv_head) * self.per_head + tile, tile, cost[tile]

    def _tables_to_draw(
        self, thread_blocks: int, cost: jax.Array | None = None
    ) -> tuple[jax.Array, Any]:
        """The order and, in a ref, what is drawn, as `Walk.of_refs` takes them.

        Args:
          cost: `[B, tiles]`, where costs are known at run time only.
        """
        order: jax.Array | np.ndarray = self.order_to_draw(thread_blocks)
        if cost is not None:
            order = scheduler.order_by_rank(order, cost, self.problem.kv_heads)
        order = jnp.pad(jnp.asarray(order), (0, 1), constant_values=self.count)
        section, _ = self.prepared(thread_blocks)
        counts = len(self.kv_heads) // section
        return order, jax.new_ref(jnp.zeros(1 + counts, jnp.int32))

    def locate(self, number):
        """Tile and key head, of every batch entry, of a tile's number."""
        kv_head_of_all, tile = div_rem(number, self.per_head)
        return tile, kv_head_of_all

    def gradient_kernel(
        self,
        body: Callable,
        key_rows: int,
        most_thread_blocks: int | None,
        scratch: dict[str, Any],
        from_end: bool = False,
        draws: bool = False,
        more_results: tuple[jax.ShapeDtypeStruct, ...] = (),
    ) -> Callable:
        """The kernel that makes dK and dV, `[batch, key_rows, kv_heads, width or value_width]`.

        Args:
          body: takes the refs that `Walk.of_refs` takes, those of the operands, and of dK, dV and
            more results.
          most_thread_blocks: as `thread_blocks` takes it.
          from_end: thread blocks walk their lists from the end.
          draws: thread blocks draw their tiles, of all heads, and have no lists.
          more_results: shapes of what the kernel makes beside dK and dV; with any, `first_steps`
            goes with `seeing_blocks`.

        Returns:
          A function of the intervals of keys `[B, 2, T]` that queries see, or None, of the segment
          ids of queries and keys, or None, of the words of dropout, or None, and of the operands.
          Of a section the kernel takes its heads alone, and if there are refs of results, it writes
          those heads of them.
        """
        p = self.problem
        seeing_blocks = self.seeing_blocks()
        if more_results:
            seeing_blocks = np.append(seeing_blocks, self.first_steps()[None], axis=0)
        d_key, d_value = (
            jax.ShapeDtypeStruct((p.batch, key_rows, p.kv_heads, width), p.dtype)
            for width in (p.width, p.value_width)
        )

        @functools.lru_cache
        def kernel_of(thread_blocks: int, has_results: bool) -> Callable:
            kernel = plgpu.kernel(
                body,
                out_type=() if has_results else (d_key, d_value, *more_results),
                grid=(thread_blocks,),
                grid_names=("block",),
                num_threads=BACKWARD_CONSUMERS + 1,
                thread_name="warpgroup",
                scratch_types=scratch,
                compiler_params=_DRAWING if draws else HAND_ORDERED,
            )
            return jax.jit(kernel)  # lowered once for all sections

        def run(intervals, ids, words: Words | None, *operands, kv_heads=None, results=()):
            thread_blocks = self.thread_blocks(most_thread_blocks, kv_heads, draws)
            kernel = kernel_of(thread_blocks, bool(results))
            operands = (*operands, *results)
            if words is not None:  # those of queries come with their start
                operands = (words[1], *operands)
            if not p.by_batch:
                tables: tuple[Any, ...]
                if draws:
                    tables = self._tables_to_draw(thread_blocks)
                else:
                    tables = (jnp.asarray(self.schedule(thread_blocks, from_end, kv_heads)),)
                return kernel(*tables, jnp.asarray(seeing_blocks), *operands)
            seeing = bounds = self.seeing(intervals)
            ids_are_sorted = None
            if ids is not None:
                query_ids, key_ids = ids
                within = None if intervals is None else seeing
                key_ids = segments.padded(key_ids, self.block_kv)
                bounds, ids_are_sorted = segments.intervals(key_ids, query_ids, within)
            blocks = self.seeing_blocks_of(seeing, ids, ids_are_sorted)
            steps = p.group * (blocks[:-1, :, 1] - blocks[:-1, :, 0])
            cost = steps.astype(jnp.float32) + _TILE_OVERHEAD
            if draws:
                tables = self._tables_to_draw(thread_blocks, cost)
            else:
                schedule = self.schedule(thread_blocks, from_end, kv_heads)
                tables = (scheduler.longest_first(schedule, cost, p.kv_heads),)
            tables = (*tables, blocks, jnp.asarray(bounds))
            if ids is not None:
                tables = (*tables, segments.padded(query_ids, self.block_q), key_ids)
            return kernel(*tables, *operands)

        return run


@dataclasses.dataclass(frozen=True)
class Walk:
    """The tiles of one thread block, inside a kernel.

    What there is to know of a tile is read where it is needed: kept over a loop it costs registers.

    Attributes:
      schedule_ref: `KeyTiles.schedule`, in global memory; None where tiles are drawn.
      seeing_blocks_ref: `KeyTiles.seeing_blocks` or `seeing_blocks_of`, in global memory.
      block: number of the thread block.
      more_refs: in global memory, where the problem is dynamic or segmented the queries that see
        each key, and where it is segmented the ids of queries and of keys, as many as there are in
        all blocks and tiles.
      elements: mask and bias, with rows of keys, of a problem that has them.
      key_words_ref: in global memory, words of keys `[B, S]` of a problem with dropout.
      any_far_ref: in global memory, `[1]`: more than 0 if any row is far from 0 (`far_rows.py`).
      drawn: the tickets of a thread block that draws its tiles. Behind the next ticket,
        `drawn.drawn_ref` has what `prepared_tiles` counts.
    """

    tiles: KeyTiles
    schedule_ref: Any
    seeing_blocks_ref: Any
    block: Any
    more_refs: tuple[Any, ...] = ()
    elements: ElementRefs | None = None
    key_words_ref: Any = None
    drawn: tickets.Tickets | None = None
    any_far_ref: Any = None

    @classmethod
    def of_refs(
        cls,
        tiles: KeyTiles,
        block,
        refs,
        thread_blocks: int = 0,
        entries: Any = None,
        first_full: Any = None,
    ) -> "tuple[Walk, list]":
        """The walk by the first refs of a kernel of `gradient_kernel`, and its other refs.

        Args:
          thread_blocks, entries, first_full: where they draw, how many there are and what
            `tickets.Tickets` takes.
        """
        drawn = None
        schedule_ref, *refs = refs
        if entries is not None:
            order_ref, schedule_ref = schedule_ref, None
            drawn_ref, *refs = refs
            drawn = tickets.Tickets(
                order_ref,
                drawn_ref,
                entries,
                tiles.count,
                thread_blocks,
                functools.partial(lax.axis_index, "block"),
                first_full,
            )
        seeing_blocks_ref, *refs = refs
        count = int(tiles.problem.by_batch) + 2 * int(tiles.problem.segmented)
        more_refs = tuple(refs[:count])
        key_words_ref = None
        if tiles.problem.dropout:
            key_words_ref, count = refs[count], count + 1
        elements, operands = ElementRefs.split(tiles.problem, refs[count:], transposed=True)
        any_far_ref, *operands = operands
        walk = cls(
            tiles,
            schedule_ref,
            seeing_blocks_ref,
            block,
            more_refs,
            elements,
            key_words_ref,
            drawn,
            any_far_ref,
        )
        return walk, operands

    def count(self):
        """How many tiles a list has, at least 1; it goes on with others, or one, of no meaning."""
        return self.schedule_ref[self.block, 0]

    def locate(self, index):
        """Tile and key head, of every batch entry, of the thread block's tile of that index."""
        return self.tiles.locate(self.number(index))

    def number(self, index):
        """Number of the thread block's tile of that index, in its list or of those that it drew."""
        if self.drawn:
            return self.drawn.number(index)
        return self.schedule_ref[self.block, 1 + index]

    def prepared_tiles(self, section):
        """Counter of the tiles that are prepared of a section of `KeyTiles.prepared`, from 1 on."""
        assert self.drawn is not None
        return self.drawn.drawn_ref.at[section]

    def batch_of(self, place):
        """Batch entry of what `locate` gives."""
        _, kv_head_of_all = place
        return lax.div(kv_head_of_all, jnp.int32(self.tiles.problem.kv_heads))

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
        """The end of the query blocks that see a key of a tile."""
        if not self.tiles.problem.has_far_edge:
            return self.tiles.query_blocks
        return self.seeing(place, 1)

    def is_first_to_see(self, place, query_block):
        """Whether a tile sees a query block and, most likely, none before it in its head does.

        Without ids it is true of the first tile alone, which sees what any other does unless a
        window has a far edge.
        """
        tile, _ = place
        if not self.tiles.problem.segmented:
            return tile == 0
        return query_block >= self._own_entry(place, self.tiles.block_kv, 1)

    def first_step(self, place):
        """How many steps the tiles of a head before it take, in a kernel with more results."""
        return self.seeing(place, 2)

    def counting_queries(self, place):
        """First and end of the queries that see any key of a tile; for none first is above end."""
        return self._last_entries(place)[:2]

    def counting_keys(self, place):
        """First and end, in a tile, of its keys that queries see; for none first is above end."""
        return self._last_entries(place)[2:]

    def _own_entry(self, place, own_first_key: int, column: int):
        """An entry of those that the 64 keys of a consumer have in the table of query blocks.

        Behind those of the last one, at `block_kv`, are what else it holds of the tile.
        """
        return self.seeing(place, 2 + 4 * (own_first_key // _CONSUMER_KEYS) + column)

    def _last_entries(self, place):
        return [self._own_entry(place, self.tiles.block_kv, n) for n in range(4)]

    def blocks_of(self, place):
        """First query block of a tile, and how many there are of each head of the group."""
        first_block = self.first_block(place)
        return first_block, self.end_block(place) - first_block

    def steps(self, index):
        """How many query blocks, of all heads of the group."""
        return self.steps_of(self.locate(index))

    def steps_of(self, place):
        """The same of what `locate` gives."""
        _, per_head = self.blocks_of(place)
        return per_head * self.tiles.problem.group

    def step_of(self, place, t):
        """Query block of step t of a tile, and the query head's number in its group."""
        _, per_head = self.blocks_of(place)
        member = lax.div(t, per_head) if self.tiles.problem.group > 1 else 0
        return self.end_block(place) - 1 - t + member * per_head, member

    def advance(self, index, t):
        """The step after step t of a tile: index of its tile and number in it.

        After the last step of all, the index is `count()`, and the number means nothing.
        """
        is_last = (t + 1 == self.steps(index)) & (index < self.count())
        return index + is_last, jnp.where(is_last, 0, t + 1)

    def masked(
        self,
        weights: jax.Array,
        j,
        equal_ids,
        fill: float = 0.0,
        *,
        index,
        from_block,
        own_first_key: int,
        comparing: bool,
    ) -> jax.Array:
        """`(64, block_q)` weights, 0 where the query may not see the key, or there is no such key.

        Args:
          j: number of the step; from_block - j is its query block.
          equal_ids: what the method of that name gives.
          fill: what stands there, where it is not 0.
          own_first_key: of the consumer, in the tile.
          comparing: as for `equal_ids`.
        """
        block = from_block - j
        first, last = self._seeing_columns(self.locate(index), block, own_first_key, comparing)
        if equal_ids is None:
            if first is not None:
                weights = keep_columns_from(weights, first, fill)
            return weights if last is None else keep_columns_to(weights, last, fill)
        # Bits of bounds too, so that there is one select an element.
        if first is not None:
            equal_ids = bits_from(equal_ids, first)
        if last is not None:
            equal_ids = bits_to(equal_ids, last)
        return keep_bits(weights, equal_ids, fill)

    def equal_ids(self, j, *, index, from_block, own_first_key: int, comparing: bool):
        """Where keys and queries have equal segment ids, for `masked`; None if there are no ids.

        Its registers are few, but those that it takes to find out are many. Unless comparing, all
        have that lie in a key's interval.
        """
        block_q = self.tiles.block_q
        if not self.tiles.problem.segmented:
            return None
        if not comparing:
            return all_columns(_CONSUMER_KEYS, block_q)
        *_, query_ids_ref, key_ids_ref = self.more_refs
        place = self.locate(index + fresh_zero())  # made anew each step: registers are short
        first_key = place[0] * self.tiles.block_kv + own_first_key
        batch, last_key = self.batch_of(place), self.tiles.per_head * self.tiles.block_kv - 1
        ids = load_rows(key_ids_ref.at[batch], first_key, last_key)
        return equal_columns(ids, query_ids_ref.at[batch], (from_block - j) * block_q, block_q)

    def _seeing_columns(self, place, query_block, own_first_key: int, comparing: bool):
        """First and last column of a step that see each key, `(64,)`; None for all.

        If comparing they are those but for ids.
        """
        tiles, problem = self.tiles, self.tiles.problem
        first_key = place[0] * tiles.block_kv + own_first_key
        first_query = query_block * tiles.block_q
        begin: jax.Array | None = None
        end: jax.Array | None = None
        first: jax.Array | None = None
        last: jax.Array | None = None
        if problem.dynamic or (problem.segmented and not comparing):
            last_key = tiles.per_head * tiles.block_kv - 1
            seeing_ref = self.more_refs[0].at[self.batch_of(place)]
            begin, end = load_intervals(seeing_ref, first_key, last_key)
            begin, end = begin - first_query, end - (first_query + 1)
        if problem.dynamic:
            return begin, end
        if not problem.has_far_edge:
            key = plgpu.broadcasted_iota(jnp.int32, (_CONSUMER_KEYS,), 0, layout=_KEYS)
        else:  # an iota would stay in registers across all loops
            key = fresh_rows()
        key = key + first_key
        if problem.highest is not None or tiles.ragged:
            first = jnp.zeros_like(key)
            if problem.highest is not None:
                first = key - (first_query + problem.highest)
            if tiles.ragged:
                first = jnp.where(key < problem.key_length, first, tiles.block_q)
        if problem.lowest is not None:
            last = key - (first_query + problem.lowest)
        if begin is not None and end is not None:
            first = begin if first is None else jnp.maximum(first, begin)
            last = end if last is None else jnp.minimum(last, end)
        return first, last

    @property
    def has_elements_of_queries(self) -> bool:
        return self.elements is not None and self.elements.any_of_queries

    def load_elements(self, j, *, index, end, own_first_key: int) -> Loaded:
        """Mask and bias of a consumer's part of step j, of a tile whose steps end before `end`."""
        problem = self.tiles.problem
        if self.elements is None or not problem.has_elements:
            return NOTHING_LOADED
        place = tile, kv_head_of_all = self.locate(index)
        batch, kv_head = div_rem(kv_head_of_all, problem.kv_heads)
        query_block, member = self.step_of(place, j - end + self.steps(index))
        head = kv_head * problem.group + member
        first_key = tile * self.tiles.block_kv + own_first_key
        block_q = self.tiles.block_q
        return self.elements.load(batch, head, first_key, query_block * block_q, block_q)

    def key_words(self, index, own_first_key: int) -> jax.Array | None:
        """Words of dropout of a consumer's keys of a tile, `(64,)` int32; None without dropout."""
        if self.key_words_ref is None:
            return None
        place = self.locate(index)
        first_key = place[0] * self.tiles.block_kv + own_first_key
        last_key = self.tiles.problem.key_length - 1
        return load_rows(self.key_words_ref.at[self.batch_of(place)], first_key, last_key)

    def own_first_block(self, index, own_first_key: int):
        """The first query block of a head that sees any of a consumer's keys."""
        tiles, problem = self.tiles, self.tiles.problem
        place = tile, _ = self.locate(index)
        if problem.by_batch:
            return self._own_entry(place, own_first_key, 0)
        first_block = self.first_block(place)
        if problem.highest is None:
            return first_block
        query = jnp.maximum(tile * tiles.block_kv + (own_first_key - problem.highest), 0)
        first = lax.div(query, jnp.int32(tiles.block_q))
        return jnp.clip(first, first_block, self.end_block(place))

    def own_end_block(self, index, own_first_key: int):
        """The end of the query blocks of a head that see any of a consumer's keys."""
        tiles, problem = self.tiles, self.tiles.problem
        place = tile, _ = self.locate(index)
        if problem.by_batch:
            return self._own_entry(place, own_first_key, 1)
        end_block = self.end_block(place)
        if problem.lowest is None:
            return end_block
        end_key = tile * tiles.block_kv + (own_first_key + _CONSUMER_KEYS)
        queries = jnp.maximum(end_key - problem.lowest, 0)
        end = lax.div(queries + (tiles.block_q - 1), jnp.int32(tiles.block_q))
        return jnp.clip(end, self.first_block(place), end_block)

    def first_unmasked_block(self, index, own_first_key: int):
        """The query blocks of a head from there on need no mask, up to `end_unmasked_block`."""
        tiles, problem = self.tiles, self.tiles.problem
        place = tile, _ = self.locate(index)
        if problem.dynamic and problem.has_bias:
            return self.end_block(place)  # the bias of rows that see nothing may be NaN
        if problem.by_batch:
            return self._own_entry(place, own_first_key, 2)
        unmasked = first_block = self.first_block(place)
        end_block = self.end_block(place)
        if problem.highest is not None:
            last_key = tile * tiles.block_kv + (own_first_key + _CONSUMER_KEYS - 1)
            last_key = jnp.maximum(last_key - problem.highest, 0)
            unmasked = lax.div(last_key + (tiles.block_q - 1), jnp.int32(tiles.block_q))
        if tiles.ragged:
            unmasked = jnp.where(tile == tiles.per_head - 1, end_block, unmasked)
        return jnp.clip(unmasked, first_block, end_block)

    def end_unmasked_block(self, index, own_first_key: int, first_unmasked):
        """The query blocks of a head from there on need a mask for the lower bound."""
        tiles, problem = self.tiles, self.tiles.problem
        place = tile, _ = self.locate(index)
        if problem.by_batch:
            end = self._own_entry(place, own_first_key, 3)
            return jnp.maximum(end, first_unmasked)
        if problem.lowest is None:
            return self.end_block(place)
        first_key = tile * tiles.block_kv + own_first_key
        queries = jnp.maximum(first_key + (1 - problem.lowest), 0)
        end = lax.div(queries, jnp.int32(tiles.block_q))
        return jnp.clip(end, first_unmasked, self.end_block(place))

    def _are_any_far(self) -> Callable[[], jax.Array]:
        """What tells whether any row of all is far from 0; with dropout read anew each time."""
        read = lambda: any_positive(self.any_far_ref.at[0])
        if self.tiles.problem.dropout or self.tiles.problem.soft_cap is not None:
            return read
        is_far = read()
        return lambda: is_far

    def is_comparing(self, index):
        """Whether steps of a tile that need a mask compare segment ids."""
        place = self.locate(index)
        return self._own_entry(place, self.tiles.block_kv, 0) > 0

    def loop_over_steps(
        self,
        step: Callable,
        index,
        j,
        own_first_key: int = 0,
        first_step: Callable | None = None,
        blank_step: Callable | None = None,
        far_in_masked: bool = False,
    ):
        """Runs `step(j, mask, far, load_elements)` for the query blocks of each head of the group.

        Query blocks run from the last to the first: under a causal mask tiles differ in the first,
        so that those that begin at the same time read the same blocks, which is easy on L2. Masked
        steps have a loop of their own, and code of their own, after those that need no mask; with a
        lower bound another before them. Each is two with segment ids, which are compared in one.
        Blank steps, if there are any, come first and last. Where there are rows far from 0 anywhere
        all steps are in a loop of their own, which alone knows of them.

        Args:
          step: mask is None, or a `StepMask` for the weights of that step; far says whether rows
            may be far from 0; load_elements gives, for a step, what `elements.py` does with logits
            and weights.
          j: number of the first step, of all that the thread block does.
          own_first_key: the first of 64 keys in the tile that weights are of.
          first_step: what to run in the place of the first step, which is then always masked.
          far_in_masked: where rows are far from 0 all steps are in the loops with a mask instead,
            as there are no registers for one more loop.
          blank_step: None, or `blank_step(j, mask)`, to run in the place of steps whose queries see
            none of these keys.

        Returns:
          The number after the last.
        """
        may_be_far = self.tiles.problem.soft_cap is None
        end = j + self.steps(index)
        load_elements = functools.partial(
            self.load_elements, index=index, end=end, own_first_key=own_first_key
        )
        loops = _Loops(
            self,
            index,
            own_first_key,
            functools.partial(step, load_elements=load_elements),
            blank_step,
            0 if first_step is None else 1,
            far_in_masked and may_be_far and self.tiles.any_mask,
        )
        if first_step is not None:
            mask = loops.mask_of(loops.end_block() - 1, j, comparing=True)
            first_step(j, mask=mask, far=may_be_far, load_elements=load_elements)
            j = j + 1
        one_head = functools.partial(loops.one_head, end)
        if self.tiles.problem.group > 1:
            return lax.while_loop(lambda j: j < end, one_head, j)
        return one_head(j)


@dataclasses.dataclass(frozen=True)
class _Loops:
    """The loops of `Walk.loop_over_steps` over the query blocks of one head.

    Attributes:
      walk, index, own_first_key, step, blank_step, far_in_masked: see there.
      done: steps of the tile that came before.
    """

    walk: Walk
    index: Any
    own_first_key: int
    step: Callable
    blank_step: Callable | None
    done: int
    far_in_masked: bool

    def first_block(self):
        return self.walk.first_block(self.walk.locate(self.index))

    def end_block(self):
        return self.walk.end_block(self.walk.locate(self.index))

    def first_unmasked_block(self):
        return self.walk.first_unmasked_block(self.index, self.own_first_key)

    def mask_of(self, block, j, comparing: bool = False) -> "StepMask | None":
        """Of steps from j on, whose blocks run from one on."""
        if not self.walk.tiles.any_mask:
            return None
        return StepMask(self.walk, self.index, block + j, self.own_first_key, comparing)

    def masked(self, block, j, end) -> None:
        """Steps j to end, from a block on; after others those that compare segment ids."""
        others, segmented = end, self.walk.tiles.problem.segmented
        if segmented:
            compares = self.walk.is_comparing(self.index)
            if self.far_in_masked:
                compares |= self.walk._are_any_far()()
            others = jnp.where(compares, j, end)
        far = self.far_in_masked and not segmented
        pl.loop(j, others)(functools.partial(self.step, mask=self.mask_of(block, j), far=far))
        if segmented:
            mask = self.mask_of(block, j, comparing=True)
            step = functools.partial(self.step, mask=mask, far=self.far_in_masked)
            pl.loop(others, end)(step)

    def far(self, block, j, end) -> None:
        """Steps j to end, from a block on, where rows may be far from 0, with any mask."""
        mask = self.mask_of(block, j, comparing=True)
        pl.loop(j, end)(functools.partial(self.step, mask=mask, far=True))

    def blank(self, block, j, end) -> None:
        """Steps j to end, from a block on, of queries that see none of these keys."""
        assert self.blank_step is not None
        pl.loop(j, end)(functools.partial(self.blank_step, mask=self.mask_of(block, j)))

    def one_head(self, end, j):
        """From step j on, which need not be the head's first; returns the number after its last.

        Args:
          end: the number after the tile's last.
        """
        walk, tiles, index, own_first_key = (
            self.walk,
            self.walk.tiles,
            self.index,
            self.own_first_key,
        )
        may_be_far, far_in_masked = tiles.problem.soft_cap is None, self.far_in_masked
        blank_before, blank_behind = False, False
        if self.blank_step:
            blank_before, blank_behind = tiles.blank_steps(own_first_key)
        is_far = walk._are_any_far()
        block = self.end_block() - 1 - self.done
        if tiles.problem.group > 1:
            first_block = self.first_block()
            block = first_block + lax.rem(end - j - 1, self.end_block() - self.first_block())
        if blank_behind:
            own = j + jnp.maximum(block + 1 - walk.own_end_block(index, own_first_key), 0)
            self.blank(block, j, own)
            j, block = own, block - (own - j)
        if tiles.problem.has_far_edge:
            first_unmasked = self.first_unmasked_block()
            end_unmasked = walk.end_unmasked_block(index, own_first_key, first_unmasked)
            unmasked = j + jnp.maximum(block + 1 - end_unmasked, 0)
            if may_be_far and not far_in_masked:
                unmasked = jnp.where(is_far(), j, unmasked)
            self.masked(block, j, unmasked)
            j, block = unmasked, block - (unmasked - j)
        masked = j + jnp.maximum(block + 1 - self.first_unmasked_block(), 0)
        masked = jnp.where(is_far(), j, masked) if may_be_far else masked
        pl.loop(j, masked)(functools.partial(self.step, mask=None, far=False))
        if not (tiles.any_mask or may_be_far):
            return masked
        j, block = masked, block - (masked - j)
        end_of_head = own_end = j + block + 1 - self.first_block()
        if blank_before:
            own_first = walk.own_first_block(index, own_first_key)
            own_end = j + jnp.maximum(block + 1 - own_first, 0)
        if may_be_far and not far_in_masked:
            others = jnp.where(is_far(), own_end, j)
            self.far(block, j, others)
            j, block = others, block - (others - j)
        if tiles.any_mask:
            self.masked(block, j, own_end)
        if blank_before:
            self.blank(block - (own_end - j), own_end, end_of_head)
        return end_of_head


def with_words(words: Words | None, start: jax.Array, *statistics: jax.Array) -> jax.Array:
    """What kernels that own keys take as `start`: one array, as each copy takes registers.

    Args:
      words: of dropout, or None.
      start: `[B, N, 1 or 2, R]` float32, with the share of rows.
      *statistics: `[B, N, R]` float32.

    Returns:
      Without words start; with them `[B, N, more, R]` float32 of start, the bits of the words of
      queries, and the other statistics.
    """
    if words is None:
        return start
    query_words = jnp.pad(words[0], ((0, 0), (0, 0), (0, start.shape[3] - words[0].shape[2])))
    query_words = lax.bitcast_convert_type(query_words, jnp.float32)
    return jnp.concatenate([start, *(x[:, :, None] for x in (query_words, *statistics))], axis=2)


@dataclasses.dataclass(frozen=True)
class StepMask:
    """The mask of the steps of a loop; from_block - j is the query block of step j.

    Attributes:
      comparing: segment ids are compared.
    """

    walk: Walk
    index: Any
    from_block: Any
    own_first_key: int
    comparing: bool

    def equal_ids(self, j):
        return self.walk.equal_ids(j, **self._place())

    def counting_queries(self, j):
        """Rows of the step's block that see any key of the tile, first and end; and if some do not.

        Those beyond the last query are zero, and count as if they did.
        """
        tiles = self.walk.tiles
        # Read anew: registers are short.
        first, end = self.walk.counting_queries(self.walk.locate(self.index + fresh_zero()))
        first_query = (self.from_block - j) * tiles.block_q
        end_query = jnp.minimum(first_query + tiles.block_q, tiles.problem.query_length)
        is_cut = (first > first_query) | (end < end_query)
        return first - first_query, end - first_query, is_cut

    def __call__(self, weights: jax.Array, j, equal_ids, fill: float = 0.0) -> jax.Array:
        return self.walk.masked(weights, j, equal_ids, fill, **self._place())

    def _place(self):
        return dict(
            index=self.index,
            from_block=self.from_block,
            own_first_key=self.own_first_key,
            comparing=self.comparing,
        )


def masked(weights, mask: StepMask | None, j, equal_ids, loaded: Loaded, fill: float = 0.0):
    """Weights, or logits, with `fill` where a query of step j does not see a key."""
    if mask is not None:
        weights = mask(weights, j, equal_ids, fill)
    return masked_by_element(weights, loaded, fill)


def load_per_query(row, keys: int) -> jax.Array:
    """A row of statistics in shared memory over a transposed tile."""
    return per_query(plgpu.load(row, layout=QUERIES), keys)


def load_words(row) -> jax.Array:
    """Words of dropout of queries that stand in a row of statistics."""
    return lax.bitcast_convert_type(plgpu.load(row, layout=QUERIES), jnp.int32)


def per_query(values: jax.Array, keys: int) -> jax.Array:
    """Broadcasts one value a query over a transposed tile."""
    return lax.broadcast_in_dim(values, (keys, values.shape[0]), [1])
