"""Tiles of keys that thread blocks own, and which query blocks see any of them.

The tiles of a thread block stand in its list, or it draws them (`tickets.py`). Where there are few
(`key_tiles_shares.py`), each share of a tile's queries counts as a tile of its own here: one of
query heads as a tile of another key head, one of steps as another tile of that head.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import intervals as run_time_intervals
from pallas_kernels import segments
from pallas_kernels.config import Shares
from pallas_kernels.mask_functions import COUNT, query_lists
from pallas_kernels.problem import Problem
from pallas_kernels.ptx.arithmetic import div_rem

CONSUMER_KEYS = 64  # of one consumer: the M of a wgmma


class Section(NamedTuple):
    """Key heads, of every batch entry, that kernels work on before they go on to the next.

    Attributes:
      kv_heads: which.
      size: how many all sections but the last have. What is kept of one section at a time stands
        at the head's number modulo this.
    """

    kv_heads: range
    size: int


ONE_SHARE = Shares()


@dataclasses.dataclass(frozen=True)
class KeyTiles:
    """Tiles of `block_kv` keys, and the blocks of `block_q` queries that see any of them.

    Attributes:
      problem: static description, with a key head for each share of a group.
      row_bytes: what a tile reads and adds to for each query row of one head.
      shares: what is a tile of its own.
    """

    problem: Problem
    block_kv: int
    block_q: int
    row_bytes: int
    shares: Shares = ONE_SHARE

    @property
    def are_shared(self) -> bool:
        return self.shares.total > 1

    @property
    def has_parts(self) -> bool:
        """Whether tiles are parts of some, cut amid their steps."""
        return self.shares.parts > 1

    @functools.cached_property
    def per_head(self) -> int:
        """Tiles of a head; where the last ones alone are cut, those of any, whole and in parts."""
        return self.seeing_blocks().shape[1] if self.has_parts else self.whole_per_head

    @property
    def per_uncut_head(self) -> int:
        """Tiles of a head that is not one of the last, which alone are cut."""
        return self.whole_per_head if self.shares.last else self.per_head

    @property
    def whole_per_head(self) -> int:
        """How many there would be with one part each."""
        return -(-self.problem.key_length // self.block_kv)

    @property
    def all_are_shares(self) -> bool:
        """Whether each gives dK and dV of its own in float32."""
        return self.are_shared and self.shares.last is None

    @property
    def in_one_part(self) -> "KeyTiles":
        return dataclasses.replace(self, shares=Shares(self.shares.heads))

    @property
    def kv_heads(self) -> range:
        """All key heads, of every batch entry."""
        return range(self.problem.batch * self.problem.kv_heads)

    @property
    def count(self) -> int:
        """Tiles of all heads, of every batch entry."""
        if self.shares.last is None:
            return len(self.kv_heads) * self.per_head
        heads, tiles = self.shares.last
        parts = self.per_head - self.whole_per_head
        return len(self.kv_heads) * self.whole_per_head + heads * (parts - tiles)

    @property
    def numbers(self) -> int:
        """The end of the numbers of tiles; where the last ones alone are cut, some are of none."""
        return len(self.kv_heads) * self.per_head

    @property
    def shares_in_place(self) -> tuple[int, int, int]:
        """Batch entries, tiles of a head, and heads, of what `share_of` gives."""
        if self.shares.last is None:
            return self.problem.batch, self.per_head, self.problem.kv_heads
        return 1, self.per_head - self.whole_per_head, self.shares.last.kv_heads

    @property
    def query_blocks(self) -> int:
        return -(-self.problem.query_length // self.block_q)

    @property
    def ragged(self) -> bool:
        """Whether a tile has keys that do not count: the last one, or where `picks_keys`."""
        return self.problem.key_length % self.block_kv != 0 or self.problem.picks_keys

    def are_beyond(self, own_first_key: int) -> bool:
        """Whether there are no keys in the last tile from this one of it on."""
        last_tile = (self.whole_per_head - 1) * self.block_kv
        return last_tile + own_first_key >= self.problem.key_length

    @property
    def any_mask(self) -> bool:
        p = self.problem
        return p.highest is not None or p.has_far_edge or p.has_lists or self.ragged

    def seeing_blocks(self) -> np.ndarray:
        """`[2, per_head]` int32: first and end of the query blocks that see a key of the tile.

        A tile that no row sees takes one, fully masked, so that every tile has a step. What is
        known at run time only is left out, as if it let every query see every key. With a mask
        function they are its lists. With parts it is `[5, per_head]`: then come the tile that is
        cut, and first and end of the part's steps among those of the tile, in their order. Where
        the last ones alone are cut, the tiles of other heads come before their parts.
        """
        if self.problem.has_lists:
            return self.lists
        first, end = self._seeing_blocks(0, self.block_kv)
        first = np.minimum(first, self.query_blocks - 1)
        end = np.maximum(end, first + 1)
        if not self.has_parts:
            return np.stack([first, end])
        steps = self.problem.group * (end - first)
        last = self.shares.last
        cut = np.arange(len(steps))[-last.tiles if last else 0 :]
        most = -(-steps[cut].max() // self.shares.parts)
        count = -(-steps[cut] // most)
        tile = np.repeat(cut, count)
        first_step = most * (np.arange(len(tile)) - np.repeat(count.cumsum() - count, count))
        end_step = np.minimum(first_step + most, steps[tile])
        if last:
            tile = np.append(np.arange(len(steps)), tile)
            first_step = np.append(np.zeros_like(steps), first_step)
            end_step = np.append(steps, end_step)
        columns = [first[tile], end[tile], tile, first_step, end_step]
        return np.stack(columns).astype(np.int32)

    @functools.cached_property
    def lists(self) -> np.ndarray:
        """`mask_functions.query_lists` of a problem whose kinds of blocks are static."""
        p = self.problem
        return p.mask_function.query_lists(self.block_kv, self.block_q, p.key_length, p.group)

    def given_lists(self, kinds: jax.Array) -> jax.Array:
        """The same where kinds come at run time."""
        p, heads = self.problem, (self.problem.kv_heads, self.problem.group)
        return query_lists(jnp, kinds, self.block_kv, self.block_q, p.key_length, heads)

    def _seeing_blocks(self, own_first_key: int, keys: int) -> np.ndarray:
        """The same of some keys of each tile, of which there may be no block."""
        p = self.problem
        first_key = np.arange(self.whole_per_head) * self.block_kv + own_first_key
        last_key = np.minimum(first_key + keys, p.key_length) - 1
        first = np.zeros(self.whole_per_head, np.int64)
        end = np.full(self.whole_per_head, self.query_blocks)
        if p.lowest is not None:
            end = (last_key - p.lowest) // self.block_q + 1
        if p.highest is not None:
            first = (first_key - p.highest) // self.block_q
        elif self.are_beyond(own_first_key):
            first[-1] = self.query_blocks
        return np.stack([first, end]).clip(0, self.query_blocks).astype(np.int32)

    def blank_steps(self, own_first_key: int) -> tuple[bool, bool]:
        """Whether a tile may have steps whose queries see none of the 64 keys of a consumer.

        First those of queries before the ones that see its keys, then of those behind them.
        """
        if self.problem.by_batch:
            return (self.block_kv > CONSUMER_KEYS,) * 2
        if self.problem.picks_keys:
            return self.block_kv > CONSUMER_KEYS, False
        first, end = self.in_one_part.seeing_blocks()
        own_first, own_end = self._seeing_blocks(own_first_key, CONSUMER_KEYS)
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
        reach = run_time_intervals.reach(seeing, CONSUMER_KEYS, empty_rows_count=True)
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
            sharing = segments.sharing(key_ids, query_ids, CONSUMER_KEYS, self.block_q)
            blocks = segments.restricted(blocks, sharing)
        by_tile = lambda x: x.reshape(x.shape[0], self.per_head, -1)
        own_first, own_end, first_unmasked, end_unmasked = map(by_tile, blocks)
        # Element by element, as each reduction would be a kernel.
        parts = range(self.block_kv // CONSUMER_KEYS)
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
        """`[per_head]`: query blocks that a tile or a part takes, of all heads of the group."""
        if self.problem.has_given_lists:  # the most that they can be
            return np.full(self.per_head, self.problem.group * self.query_blocks)
        if self.problem.has_lists:
            return self.lists[0, 0, :, COUNT]
        first, end, *of_parts = self.seeing_blocks()
        if of_parts:
            _, first_step, end_step = of_parts
            return end_step - first_step
        return self.problem.group * (end - first)

    @property
    def steps_per_head(self) -> int:
        """Of all tiles of a key head."""
        return int(self.steps().sum())

    def first_steps(self) -> np.ndarray:
        """`[per_head]` int32: how many steps the tiles before each take."""
        steps = self.steps()
        return (steps.cumsum() - steps).astype(np.int32)

    def share_of(self, place):
        """Where dK and dV of a share of what `locate` gives stand: batch entry, tile, head."""
        tile, kv_head_of_all = place
        if self.shares.last:
            first_head = len(self.kv_heads) - self.shares.last.kv_heads
            return 0, tile - self.whole_per_head, kv_head_of_all - first_head
        batch, share = div_rem(kv_head_of_all, self.problem.kv_heads)
        return batch, tile, share

    def locate(self, number):
        """Tile and key head, of every batch entry, of a tile's number."""
        kv_head_of_all, tile = div_rem(number, self.per_head)
        return tile, kv_head_of_all
