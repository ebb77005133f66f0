"""Which query blocks see the keys of one consumer of a tile, and which of these need no mask."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_kernels.key_tiles import CONSUMER_KEYS
from pallas_kernels.key_tiles_walk import Walk


@dataclasses.dataclass(frozen=True)
class ConsumerBlocks:
    """Those of 64 keys of a tile, where it has no list, in every query head.

    Attributes:
      walk: over tiles of keys.
      index: of the tile, in the thread block.
      own_first_key: the first of the keys, in the tile.
    """

    walk: Walk
    index: Any
    own_first_key: int

    def first(self):
        """The first query block of a head that sees any of these keys."""
        walk, tiles, problem = self.walk, self.walk.tiles, self.walk.tiles.problem
        place = walk.locate(self.index)
        if problem.by_batch:
            return walk.own_entry(place, self.own_first_key, 0)
        first_block = walk.first_block(place)
        if problem.picks_keys:
            are_there = walk.keys_from(place, self.own_first_key) > 0
            first_block = jnp.where(are_there, first_block, walk.end_block(place))
        if problem.highest is not None:
            first_key = walk.tile_of(place) * tiles.block_kv
            query = jnp.maximum(first_key + (self.own_first_key - problem.highest), 0)
            first = lax.div(query, jnp.int32(tiles.block_q))
            return jnp.clip(first, first_block, walk.end_block(place))
        if not problem.picks_keys and tiles.are_beyond(self.own_first_key):
            is_last = walk.tile_of(place) == tiles.whole_per_head - 1
            return jnp.where(is_last, walk.end_block(place), first_block)
        return first_block

    def end(self):
        """The end of the query blocks of a head that see any of these keys."""
        walk, tiles, problem = self.walk, self.walk.tiles, self.walk.tiles.problem
        place = walk.locate(self.index)
        if problem.by_batch:
            return walk.own_entry(place, self.own_first_key, 1)
        end_block = walk.end_block(place)
        if problem.lowest is None:
            return end_block
        end_key = walk.tile_of(place) * tiles.block_kv + (self.own_first_key + CONSUMER_KEYS)
        queries = jnp.maximum(end_key - problem.lowest, 0)
        end = lax.div(queries + (tiles.block_q - 1), jnp.int32(tiles.block_q))
        return jnp.clip(end, walk.first_block(place), end_block)

    def first_unmasked(self):
        """The query blocks of a head from there on need no mask, up to `end_unmasked`."""
        walk, tiles, problem = self.walk, self.walk.tiles, self.walk.tiles.problem
        place = walk.locate(self.index)
        if problem.dynamic and problem.beyond_products:
            return walk.end_block(place)  # what rows that see nothing get may be NaN
        if problem.by_batch:
            return walk.own_entry(place, self.own_first_key, 2)
        unmasked = first_block = walk.first_block(place)
        end_block = walk.end_block(place)
        if problem.highest is not None:
            last_key = walk.tile_of(place) * tiles.block_kv + (
                self.own_first_key + CONSUMER_KEYS - 1
            )
            last_key = jnp.maximum(last_key - problem.highest, 0)
            unmasked = lax.div(last_key + (tiles.block_q - 1), jnp.int32(tiles.block_q))
        if problem.picks_keys:
            are_all_there = walk.keys_from(place, self.own_first_key) >= CONSUMER_KEYS
            unmasked = jnp.where(are_all_there, unmasked, end_block)
        elif tiles.ragged:
            is_last = walk.tile_of(place) == tiles.whole_per_head - 1
            unmasked = jnp.where(is_last, end_block, unmasked)
        return jnp.clip(unmasked, first_block, end_block)

    def end_unmasked(self, first_unmasked):
        """The query blocks of a head from there on need a mask for the lower bound."""
        walk, tiles, problem = self.walk, self.walk.tiles, self.walk.tiles.problem
        place = walk.locate(self.index)
        if problem.by_batch:
            end = walk.own_entry(place, self.own_first_key, 3)
            return jnp.maximum(end, first_unmasked)
        if problem.lowest is None:
            return walk.end_block(place)
        first_key = walk.tile_of(place) * tiles.block_kv + self.own_first_key
        queries = jnp.maximum(first_key + (1 - problem.lowest), 0)
        end = lax.div(queries, jnp.int32(tiles.block_q))
        return jnp.clip(end, first_unmasked, walk.end_block(place))
