"""Which tiles a forward kernel has, which key blocks each needs, and in which order they come."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import intervals as run_time_intervals
from pallas_kernels import scheduler, seen_blocks, segments, tickets
from pallas_kernels.columns import Columns
from pallas_kernels.config import ROWS, ForwardConfig
from pallas_kernels.hopper import kernel
from pallas_kernels.mask_functions import COUNT, key_lists
from pallas_kernels.problem import Problem, sees_itself
from pallas_kernels.ptx.arithmetic import div_rem

TILE_OVERHEAD = 1.2  # what a tile costs beside its key blocks, in key blocks
_FEW_OF_A_HEAD = 12  # tiles; with 32 s4096 H128 took 1.3% longer by number than from lists

# Columns of what tiles need (`Tiles.key_blocks`); the last one of segment ids (`key_blocks_of`).
BLOCKS, EXACT, FAR, END, COMPARING = range(5)


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Which tiles there are, and which key blocks each one needs.

    Attributes:
      problem: static description.
      config: tile sizes.
      batch_inside: number batch entries within a head, as they share its bias.
      shares: in how many the keys of the tiles of a head are dealt out. Each is a tile of its own,
        those of the first share first, and has results of its own, in rows of its own.
    """

    problem: Problem
    config: ForwardConfig
    batch_inside: bool = False
    shares: int = 1

    @property
    def whole_per_head(self) -> int:
        return -(-self.problem.query_length // self.config.block_q)

    @property
    def per_head(self) -> int:
        return self.shares * self.whole_per_head

    @property
    def rows(self) -> int:
        return self.config.whole_tiles(self.problem.query_length)

    @property
    def are_shared(self) -> bool:
        return self.shares > 1

    @functools.cached_property
    def shift(self) -> int:
        """Rows by which the first tile starts before the first query (`seen_blocks.shift`)."""
        p, block_q = self.problem, self.config.block_q
        if p.has_lists:
            return seen_blocks.unused_rows(p.query_length, block_q) * p.mask_function.grows()
        return 0 if p.segmented else seen_blocks.shift(p, block_q, self.config.block_kv)

    def first_row(self, tile, warpgroup):
        """First query row of a warpgroup: beyond the last query for one that has none."""
        row = tile * self.config.block_q + warpgroup * ROWS
        if not (self.shift or self.are_shared):
            return row
        return lax.rem(row + (self.rows - self.shift), jnp.int32(self.rows))

    def first_stored(self, tile, warpgroup):
        """Where the results of a warpgroup's rows begin: with those of the tile's share."""
        row = self.first_row(tile, warpgroup)
        if not self.are_shared:
            return row
        return row + lax.div(tile, jnp.int32(self.whole_per_head)) * self.rows

    @property
    def count(self) -> int:
        """Of all heads of all batch entries."""
        return self.problem.batch * self.problem.heads * self.per_head

    @property
    def thread_blocks(self) -> int:
        return min(self.config.thread_blocks, self.count)

    @property
    def are_plain(self) -> bool:
        """Whether a tile may be its thread block's only one, one by number, or one of shares.

        Not if drawn or with lists of blocks.
        """
        p = self.problem
        return not (p.by_batch or p.has_lists)

    @property
    def one_each(self) -> bool:
        """Whether each thread block has one tile, that of its number, and no next one."""
        return self.are_plain and self.thread_blocks == self.count

    @property
    def have_ends(self) -> bool:
        """Whether key blocks need not begin with the first key, so that they have an `END`."""
        return self.problem.has_far_edge or self.problem.has_key_mask or self.are_shared

    def key_blocks(self) -> np.ndarray:
        """What each tile of a head needs, `[tiles, 2]` int32, or `[tiles, 4]` if they `have_ends`.

        Of its key blocks, which run from the last that a row sees to the first: how many they are
        (`BLOCKS`); how many steps must be `EXACT`, those with a mask at the near edge; where they
        `have_ends`, how many come before those with a mask at the `FAR` edge, and the `END` of the
        first one, in blocks.
        Where some row sees no key, all steps are exact. A tile that sees nothing takes one block,
        fully masked, so that every tile has a first one.

        With a mask function they are what `mask_functions.lists` gives.
        """
        p, block_q, block_kv = self.problem, self.config.block_q, self.config.block_kv
        if p.has_given_lists:
            raise ValueError("problem: got one whose lists come at run time, needs given_lists")
        if p.has_lists:
            return p.mask_function.key_lists(block_q, block_kv, self.shift, p.key_length)
        if p.by_batch:
            raise ValueError("problem: got one that is dynamic or segmented, needs key_blocks_of")
        if self.are_shared:
            return self._key_blocks_of_shares()[0]
        return seen_blocks.key_blocks(p, block_q, block_kv, self.shift)

    def _key_blocks_of_shares(self) -> tuple[np.ndarray, np.ndarray]:
        """`key_blocks` of shares, and of each how many blocks it has, `[tiles]`, be it none.

        One that has none takes a block, as a tile must, and what it makes of that counts for
        nothing.
        """
        whole = dataclasses.replace(self, shares=1)
        blocks, exact, *rest = whole.key_blocks().T
        near, end = rest or (blocks, blocks)
        if self.problem.has_far_edge:  # a share may have no other step in which its rows see a key
            exact = blocks
        share = np.arange(self.shares)[:, None]
        first, stop = (n * blocks // self.shares for n in (share, share + 1))  # steps
        count = stop - first
        needs = np.maximum(count, 1), exact - first, near - first, end - first
        columns = [np.clip(x, 0, needs[0]) for x in needs[:3]] + [needs[3]]
        table = np.stack([x.ravel() for x in columns], axis=1)
        return table.astype(np.int32), count.ravel()

    def rows_that_count(self) -> np.ndarray:
        """Which rows of each share are of a tile that has a key block, `[shares, rows]`."""
        _, count = self._key_blocks_of_shares()
        of_rows = np.repeat(count.reshape(self.shares, -1) > 0, self.config.block_q, axis=1)
        return np.roll(of_rows, -self.shift, axis=1)

    def given_lists(self, kinds: jax.Array) -> jax.Array:
        """The lists of tiles, `[b, n, tiles, columns]`, from `element_arrays.Blocks.kinds`."""
        c = self.config
        return key_lists(jnp, kinds, c.block_q, c.block_kv, self.shift, self.problem.key_length)

    @functools.cached_property
    def needed_by_all(self) -> np.ndarray | None:
        """What `key_blocks` says, where tiles are plain and all alike; else None."""
        if not self.are_plain:
            return None
        table = self.key_blocks()
        return table[0] if (table == table[0]).all() else None

    @property
    def by_number(self) -> bool:
        """Whether a thread block has the tile of its number and each `thread_blocks` on, unlisted.

        So it is where all are alike, and few of a head, whose keys else all SMs would load at once.
        """
        are_few = self.per_head <= _FEW_OF_A_HEAD
        return self.one_each or (are_few and self.needed_by_all is not None)

    @functools.cached_property
    def any_mask(self) -> bool:
        """Whether any step has one, but for segment ids."""
        if self.problem.has_far_edge or self.problem.has_lists or self.problem.has_lengths:
            return True
        if self.problem.has_key_mask:  # bits say it all
            return False
        return not self.problem.by_batch and bool(self.key_blocks()[:, 1].any())

    def reach(self, intervals: jax.Array | None) -> run_time_intervals.Reach:
        """What each tile sees, but for ids; intervals are those of `key_blocks_of`."""
        p = self.problem
        rows = np.minimum(np.arange(self.rows), p.query_length - 1)
        bounds = run_time_intervals.of_bounds(p.lowest, p.highest, rows, p.key_length)
        seen = bounds if intervals is None else intervals
        return run_time_intervals.reach(seen, self.config.block_q, empty_rows_count=not p.dynamic)

    def key_blocks_of(
        self,
        intervals: jax.Array | None,
        ids: tuple[jax.Array, jax.Array] | None = None,
        ids_are_sorted: jax.Array | None = None,
    ) -> jax.Array:
        """The same for each batch entry, `[B, tiles, 4 or 5]`.

        Args:
          intervals: the keys `[B, 2, T]` of each query, if the problem is dynamic. A row that sees
            nothing then lets its tile go without masks.
          ids: segment ids of queries and keys, if the problem is segmented.
          ids_are_sorted: None, or of each batch entry what `segments.intervals` says, for a fifth
            column: whether steps with a mask compare ids, but for the first. That is of one more
            block then, of which no row sees a key.
        """
        block_q, block_kv, reach = self.config.block_q, self.config.block_kv, self.reach(intervals)
        # One more block where none of the masked ones holds a key of some row.
        blocks = segments.Blocks(
            first=reach.first // block_kv,
            end=-(-reach.end // block_kv),
            first_unmasked=-(-reach.common_first // block_kv),
            end_unmasked=(reach.common_end - 1) // block_kv,
        )
        one_more: jax.Array | int = 0
        if ids is not None:
            sharing = segments.sharing(*ids, block_q, block_kv)
            blocks = segments.restricted(blocks, sharing)
            one_more = 1 - self._first_key_is_seen(sharing, blocks.end_unmasked)
        end = jnp.maximum(1, blocks.end)
        first = jnp.clip(blocks.first, 0, end - 1)
        unmasked, first_unmasked = jnp.clip(blocks.end_unmasked, 0, end), blocks.first_unmasked
        count, any_unmasked = end - first, first_unmasked < unmasked
        all_masked = count  # how many are exact where none is without a mask
        if ids is not None and not self.problem.dynamic:
            # Of the tile's first row.
            own_block = np.arange(self.per_head, dtype=np.int32)[None] * block_q // block_kv
            all_masked = jnp.where(self._see_themselves(*ids), end - own_block, count)
            all_masked = jnp.clip(all_masked, 1, count)
        exact = jnp.where(any_unmasked, end - unmasked + one_more, all_masked)
        near = jnp.where(any_unmasked, end - jnp.maximum(first_unmasked, first), all_masked)
        if ids_are_sorted is None:
            return jnp.stack([count, exact, near, end], axis=-1)
        comparing = jnp.broadcast_to(~ids_are_sorted[:, None], count.shape).astype(jnp.int32)
        exact = jnp.maximum(exact, 1)  # with the first step, which looks for maxima anyway
        entries = (x + comparing for x in (count, exact, near, end))
        return jnp.stack([*entries, comparing], axis=-1)

    def _see_themselves(self, query_ids: jax.Array, key_ids: jax.Array) -> jax.Array | np.ndarray:
        """Whether each row of a tile sees the key of its own number, `[B, tiles]`.

        Then every row has a key in the blocks from that of the tile's first row on, and those
        before them, even with a mask, need not be exact.
        """
        p = self.problem
        if not sees_itself(p.lowest, p.highest) or p.query_length > p.key_length:
            return np.zeros((1, self.per_head), bool)
        equal = query_ids == key_ids[:, : p.query_length]
        equal = jnp.pad(equal, ((0, 0), (0, self.rows - p.query_length)), constant_values=True)
        return equal.reshape(equal.shape[0], self.per_head, -1).all(-1)

    def _first_key_is_seen(self, sharing: segments.Sharing, block: jax.Array) -> jax.Array:
        """Whether ids let all rows of a tile see the first key of a block, `[B, tiles]` int32.

        Args:
          block: `[B, tiles]`; where its rows have one id.
        """
        block = jnp.clip(block, 0, sharing.first.shape[-1] - 1)
        seen = jnp.take_along_axis(sharing.first, block[:, :, None], axis=-1)
        return seen[..., 0].astype(jnp.int32)

    def schedule(self, thread_blocks: int) -> np.ndarray:
        """The tiles of each thread block, as `scheduler.deal` gives them; see `locate`.

        If costs are known at run time only, as `scheduler.deals_by_rank` does, with ranks in the
        place of tiles.
        """
        number, tile, cost = self.order()
        if self.problem.by_batch:
            return scheduler.deals_by_rank(number, tile, self.per_head, thread_blocks)
        return scheduler.deal(number, cost, thread_blocks)

    def order(self, last_section: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The order of starting: number of each tile, its number in its head, and its cost.

        If costs are known at run time only, with ranks in the place of tiles.

        Args:
          last_section: as for `scheduler.tile_order`.
        """
        p = self.problem
        cost = np.zeros(self.per_head)
        if not p.by_batch:
            table = self.key_blocks()
            cost = (table[0, 0, :, COUNT] if p.has_lists else table[:, 0]) + TILE_OVERHEAD
        sizes = dict(
            bytes_per_kv_head=p.key_length * p.pair_bytes,
            tiles_per_kv_head=self.per_head * p.group,
            slots=self.config.thread_blocks,
            kv_heads=p.batch * p.kv_heads,
            group=p.group,
        )
        if p.by_batch:
            section = scheduler.heads_per_section(self.config.section_bytes, **sizes, cost=None)
        else:
            section = scheduler.section_that_ends_early(cost, self.config.section_bytes, **sizes)
        tile, head = scheduler.tile_order(cost, p.batch * p.heads, section, last_section)
        return head * self.per_head + tile, tile, cost[tile]

    def kernel(
        self,
        body: Callable,
        scratch: dict[str, Any],
        out_dtype: np.dtype,
        references: bool = False,
    ) -> Callable:
        """A forward kernel over all tiles, for `with_lists` or `with_tickets`.

        Args:
          body: of refs of the schedule, or the order and what is drawn, of the key blocks, of the
            operands, of the results, and of scratch by name.
          scratch: types of shared memory and barriers.
          out_dtype: of the output.
          references: results are three.

        Returns:
          A function of what stands for these before the output, that returns the output, the LSE
          `[B, N, rows]`, and if wanted references of rows and their log_sum, `[B, N, 2, rows]`.
          Those of shares: one after the other, the output in float32, of all rows, and of columns
          that fill whole boxes.
        """
        p = self.problem
        out_shape = (p.batch, p.query_length, p.heads, p.value_width)
        of_rows = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
        rows = self.shares * self.rows
        if self.are_shared:
            out_shape = (p.batch, rows, p.heads, Columns.of_values(p).size)
            out_dtype = np.dtype(jnp.float32)
        results = (
            jax.ShapeDtypeStruct(out_shape, out_dtype),
            of_rows((p.batch, p.heads, rows)),
            of_rows((p.batch, p.heads, 2, rows)),
        )
        wanted = results if references else results[:2]
        return kernel(body, wanted, self.thread_blocks, self.config.consumers, scratch)

    def with_lists(self, kernel: Callable) -> Callable:
        """A function of the operands that runs a kernel whose schedule has lists of tiles.

        Operands begin with `key_blocks_of` where these depend on the batch entry.
        """
        schedule = self.schedule(self.thread_blocks)
        if not self.problem.by_batch:
            tables = schedule, scheduler.as_constant(self.key_blocks())
            return lambda *operands: kernel(*map(jnp.asarray, tables), *operands)

        def run(key_blocks, *operands):
            order = scheduler.longest_first(schedule, _cost(key_blocks), self.problem.heads)
            return kernel(order, key_blocks, *operands)

        return run

    def with_tickets(self, kernel: Callable) -> Callable:
        """The same, for a kernel whose thread blocks draw their tiles."""
        numbers, _, _ = self.order(tickets.LAST_TILES * self.thread_blocks)

        def run(key_blocks, *operands):
            cost, heads = _cost(key_blocks), self.problem.heads
            if self.problem.has_lists:
                cost, heads = self._cost_of_lists(key_blocks), 1
            order = scheduler.order_by_rank(numbers, cost, heads)
            drawn = jax.new_ref(tickets.none_drawn(self.thread_blocks, self.count))
            return kernel(order, drawn, key_blocks, *operands)

        return run

    def _cost_of_lists(self, lists: jax.Array) -> jax.Array:
        """Of each tile of all heads, `[B * N, tiles]`."""
        entries, _, tiles, _ = lists.shape
        p = self.problem
        cost = lists[:, :, :, COUNT].astype(jnp.float32) + TILE_OVERHEAD
        cost = jnp.repeat(cost, p.batch // entries, axis=0)
        return jnp.broadcast_to(cost, (p.batch, p.heads, tiles)).reshape(-1, tiles)

    def locate(self, number):
        """Tile, batch entry and head of a tile's number; of any if it is below 0."""
        if self.problem.by_batch:
            number = jnp.maximum(number, 0)
        head_of_all, tile = div_rem(number, self.per_head)
        if self.batch_inside:
            head, batch = div_rem(head_of_all, self.problem.batch)
        else:
            batch, head = div_rem(head_of_all, self.problem.heads)
        return tile, batch, head


def _cost(key_blocks: jax.Array) -> jax.Array:
    """Of each tile of a head, `[B, tiles]`, from `Tiles.key_blocks_of`."""
    return key_blocks[:, :, 0].astype(jnp.float32) + TILE_OVERHEAD
