"""Which pairs of a key and a query a step of a tile of keys hides."""

import dataclasses
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.elements import Loaded
from pallas_kernels.elements import masked as masked_by_element
from pallas_kernels.key_tiles import CONSUMER_KEYS
from pallas_kernels.key_tiles_walk import Walk
from pallas_kernels.ptx.arithmetic import div_rem
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

_KEYS = plgpu.Layout.WGMMA.reduce(1)  # one value a row of a transposed tile


@dataclasses.dataclass(frozen=True)
class StepMask:
    """The mask of the steps of a loop; from_block - j is the query block of step j.

    Attributes:
      walk, index: of the tile.
      own_first_key: of the consumer, in the tile.
      comparing: segment ids are compared.
    """

    walk: Walk
    index: Any
    from_block: Any
    own_first_key: int
    comparing: bool

    def __call__(self, weights: jax.Array, j, equal_ids, fill: float = 0.0) -> jax.Array:
        """`(64, block_q)` weights, 0 where the query may not see the key, or there is no such key.

        Args:
          j: number of the step.
          equal_ids: what the method of that name gives.
          fill: what stands there, where it is not 0.
        """
        block = self.block_of(j)
        first, last = self._seeing_columns(self.walk.locate(self.index), block)
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

    def block_of(self, j):
        """The query block of step j."""
        return self.from_block - j

    def equal_ids(self, j):
        """Where keys and queries have equal segment ids, for a call; None if there are no ids.

        Its registers are few, but those that it takes to find out are many. Unless comparing, all
        have that lie in a key's interval.
        """
        walk, tiles = self.walk, self.walk.tiles
        block_q = tiles.block_q
        if not tiles.problem.segmented:
            return None
        if not self.comparing:
            return all_columns(CONSUMER_KEYS, block_q)
        *_, query_ids_ref, key_ids_ref = walk.more_refs
        place = walk.locate(self.index + fresh_zero())  # made anew each step: registers are short
        first_key = place[0] * tiles.block_kv + self.own_first_key
        batch, last_key = walk.batch_of(place), tiles.per_head * tiles.block_kv - 1
        ids = load_rows(key_ids_ref.at[batch], first_key, last_key)
        first_query = self.block_of(j) * block_q
        return equal_columns(ids, query_ids_ref.at[batch], first_query, block_q)

    def counting_queries(self, j):
        """Rows of the step's block that see any key of the tile, first and end; and if some do not.

        Those beyond the last query are zero, and count as if they did.
        """
        tiles = self.walk.tiles
        # Read anew: registers are short.
        first, end = self.walk.counting_queries(self.walk.locate(self.index + fresh_zero()))
        first_query = self.block_of(j) * tiles.block_q
        end_query = jnp.minimum(first_query + tiles.block_q, tiles.problem.query_length)
        is_cut = (first > first_query) | (end < end_query)
        return first - first_query, end - first_query, is_cut

    def _seeing_columns(self, place, query_block):
        """First and last column of a step that see each key, `(64,)`; None for all.

        If comparing they are those but for ids.
        """
        walk, tiles, problem = self.walk, self.walk.tiles, self.walk.tiles.problem
        first_key = walk.tile_of(place) * tiles.block_kv + self.own_first_key
        first_query = query_block * tiles.block_q
        begin: jax.Array | None = None
        end: jax.Array | None = None
        first: jax.Array | None = None
        last: jax.Array | None = None
        if problem.dynamic or (problem.segmented and not self.comparing):
            last_key = tiles.per_head * tiles.block_kv - 1
            seeing_ref = walk.more_refs[0].at[walk.batch_of(place)]
            begin, end = load_intervals(seeing_ref, first_key, last_key)
            begin, end = begin - first_query, end - (first_query + 1)
        if problem.dynamic:
            return begin, end
        if not problem.has_far_edge:
            key = plgpu.broadcasted_iota(jnp.int32, (CONSUMER_KEYS,), 0, layout=_KEYS)
        else:  # an iota would stay in registers across all loops
            key = fresh_rows()
        key = key + first_key
        if problem.highest is not None or tiles.ragged:
            first = jnp.zeros_like(key)
            if problem.highest is not None:
                first = key - (first_query + problem.highest)
            if problem.has_lengths:
                is_there = key - first_key < walk.keys_from(place, self.own_first_key)
                first = jnp.where(is_there, first, tiles.block_q)
            elif problem.has_key_mask:
                is_there = walk.unmasked_rows(place, self.own_first_key)
                first = jnp.where(is_there, first, tiles.block_q)
            elif tiles.ragged:
                first = jnp.where(key < problem.key_length, first, tiles.block_q)
        if problem.lowest is not None:
            last = key - (first_query + problem.lowest)
        if begin is not None and end is not None:
            first = begin if first is None else jnp.maximum(first, begin)
            last = end if last is None else jnp.minimum(last, end)
        return first, last


class ListedMask(StepMask):
    """The same where tiles have lists: from_block + j is the place of step j's block in one."""

    def block_of(self, j):
        place = self.walk.locate(self.index + fresh_zero())  # made anew: registers are short
        block, _ = self.walk.listed_step(place, self.from_block + j)
        return block

    def equal_ids(self, j):
        """Bits of what the mask function shows, but for bounds; None of a dense mask."""
        walk, tiles = self.walk, self.walk.tiles
        problem = tiles.problem
        assert walk.lists is not None
        place = tile, kv_head_of_all = walk.locate(self.index + fresh_zero())
        query_block, member = walk.listed_step(place, self.from_block + j)
        batch, kv_head = div_rem(kv_head_of_all, problem.kv_heads)
        return walk.lists.bits(
            batch,
            kv_head * problem.group + member,
            tile * tiles.block_kv + self.own_first_key,
            query_block * tiles.block_q,
            tiles.block_q,
            rows_are_keys=True,
        )


def masked(weights, mask: StepMask | None, j, equal_ids, loaded: Loaded, fill: float = 0.0):
    """Weights, or logits, with `fill` where a query of step j does not see a key."""
    if mask is not None:
        weights = mask(weights, j, equal_ids, fill)
    return masked_by_element(weights, loaded, fill)
