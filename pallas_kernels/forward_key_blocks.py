"""The key blocks of a tile of the forward, and their kinds: five sources that answer alike.

Blocks are those of `Tiles.key_blocks`: they run from the last that a row sees to the first, or
stand in a list. A place is tile, batch entry and head.
"""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import key_masks
from pallas_kernels.bit_words import WORD
from pallas_kernels.forward_tiles import BLOCKS, COMPARING, END, EXACT, FAR, Tiles
from pallas_kernels.mask_functions import COUNT, LISTED, MASKED, MaskRefs
from pallas_kernels.ptx.compiler import fresh_zero


def blocks_of_tiles(tiles: Tiles, table, lists: MaskRefs | None, lengths, of_mask) -> "TileBlocks":
    """Those of a kernel's tiles, by what the problem has.

    Args:
      table: ref of `Tiles.key_blocks`.
      lists: those of a mask function or of a dense mask, or None.
      lengths: ref of where keys end, or None.
      of_mask: refs of the bits of a mask of keys, and of numbers of batch entries; or none.
    """
    problem, block_kv = tiles.problem, tiles.config.block_kv
    if lists is not None:
        return OfLists(lists)
    if lengths is not None:
        return UpToLengths(table, lengths, block_kv)
    if of_mask:
        words, *of_entries = of_mask
        blocks = words.shape[1] * WORD // block_kv
        return OfKeyMask(key_masks.KeyBlocks(*of_entries), blocks)
    if tiles.needed_by_all is not None:
        return Alike(tiles.needed_by_all, have_ends=tiles.have_ends)
    return OfTable(table, by_batch=problem.by_batch, have_ends=tiles.have_ends)


class TileBlocks:
    """What a kernel asks of them.

    Attributes:
      are_listed: whether they stand in a list, those first that need a mask. Then there are
        `masked` steps; else `exact`, `far` and, of segment ids, `comparing` say it.
    """

    are_listed = False

    def count(self, place):
        raise NotImplementedError

    def exact(self, place):
        """How many steps must have a mask at the near edge, and look for maxima."""
        raise NotImplementedError

    def far(self, place):
        """How many come before those with a mask at the far edge."""
        raise NotImplementedError

    def comparing(self, place):
        """Whether steps with a mask compare segment ids, but for the first: above 0 if so."""
        raise NotImplementedError

    def masked(self, place):
        """How many come first that need a mask."""
        raise NotImplementedError

    def end(self, place, count=None):
        """The end of the first one, in blocks.

        Args:
          count: what `count` gave, where that is known.
        """
        raise NotImplementedError

    def number(self, place, j):
        """Of the block of step j."""
        return self.end(place) - 1 - j

    def numbers(self, place, count) -> Callable:
        """The same as a function of steps, for all of a tile."""
        end = self.end(place, count)
        return lambda j: end - 1 - j


class OfTable(TileBlocks):
    """Those of a table `[tiles, 2 or 4]`, or of one for each batch entry.

    Attributes:
      table: ref of it.
      by_batch: whether it has batch entries.
      have_ends: whether blocks need not begin with the first key.
    """

    def __init__(self, table, *, by_batch: bool, have_ends: bool):
        self.table, self.by_batch, self.have_ends = table, by_batch, have_ends

    def entry(self, place, column):
        tile, batch, _ = place
        return self.table[(batch, tile, column) if self.by_batch else (tile, column)]

    def count(self, place):
        return self.entry(place, BLOCKS)

    def exact(self, place):
        return self.entry(place, EXACT)

    def far(self, place):
        return self.entry(place, FAR)

    def end(self, place, count=None):
        if self.have_ends:
            return self.entry(place, END)
        return self.count(place) if count is None else count

    def comparing(self, place):
        return self.entry(place, COMPARING)


class Alike(OfTable):
    """The same where all tiles need the same, which no load has to be waited for."""

    def __init__(self, needed: np.ndarray, *, have_ends: bool):
        super().__init__(needed, by_batch=False, have_ends=have_ends)

    def entry(self, place, column):
        return jnp.int32(self.table[column]) + fresh_zero()  # where ptxas knows it, it spills


class UpToLengths(TileBlocks):
    """Those of a table of all keys, up to a length: none behind it, and a mask in its last one."""

    def __init__(self, table, lengths, block_kv: int):
        self._of_all = OfTable(table, by_batch=False, have_ends=False)
        self._lengths, self._block_kv = lengths, block_kv

    def count(self, place):
        length, all_blocks = self._lengths[place[1]], self._of_all.count(place)
        return self._of_length(length, all_blocks)

    def exact(self, place):
        length, all_blocks = self._lengths[place[1]], self._of_all.count(place)
        blocks = self._of_length(length, all_blocks)
        unmasked = all_blocks - self._of_all.exact(place)
        whole_blocks = lax.div(jnp.maximum(length - 1, 0), jnp.int32(self._block_kv))
        return blocks - jnp.minimum(unmasked, whole_blocks)

    def end(self, place, count=None):
        return self.count(place) if count is None else count

    def _of_length(self, length, all_blocks):
        block_kv = jnp.int32(self._block_kv)
        return jnp.minimum(all_blocks, lax.div(jnp.maximum(length, 1) + (block_kv - 1), block_kv))


@dataclasses.dataclass(frozen=True)
class OfKeyMask(TileBlocks):
    """Those of a mask of keys, which all tiles of a batch entry have.

    Attributes:
      of_entries: refs of numbers of batch entries.
      blocks: that there are.
    """

    of_entries: key_masks.KeyBlocks
    blocks: int

    def count(self, place):
        return self.of_entries.count(place[1])

    def exact(self, place):
        return jnp.int32(1)  # as its last block has a key that counts

    def far(self, place):
        return self.of_entries.unmasked(place[1], self.blocks)

    def end(self, place, count=None):
        return self.of_entries.end(place[1])


@dataclasses.dataclass(frozen=True)
class OfLists(TileBlocks):
    """Those of the list that each tile has of a mask function or of a dense mask.

    Attributes:
      lists: with the mask function.
    """

    lists: MaskRefs
    are_listed = True

    def entry(self, place, column):
        tile, batch, head = place
        return self.lists.entry(batch, head, tile, column)

    def count(self, place):
        return self.entry(place, COUNT)

    def masked(self, place):
        return self.entry(place, MASKED)

    def end(self, place, count=None):
        return self.number(place, jnp.int32(0)) + 1

    def number(self, place, j):
        return self.entry(place, LISTED + j)

    def numbers(self, place, count):
        return lambda j: self.number(place, j)
