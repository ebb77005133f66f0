"""A mask of keys alone, known at run time, as kernels take it.

Tiles are dealt out as if all keys counted. A few numbers of a batch entry say which key blocks it
has, and where some keys of a block do not count, steps look at bits.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.bit_words import WORD
from pallas_kernels.element_arrays import Elements, pack
from pallas_kernels.problem import Problem

ALL_COUNT = -1  # a word of bits: all are set


def words_of(mask: jax.Array, batch: int) -> jax.Array:
    """Bits of bool `[b, 1, 1, S]`, where b divides the batch: int32 `[batch, words]`, as `pack`."""
    words = pack(mask, 3)[:, 0, 0]
    return jnp.repeat(words, batch // words.shape[0], axis=0)


def taken_from(elements: Elements, problem: Problem) -> tuple[jax.Array | None, Elements]:
    """Those bits of a problem that has a mask of keys, or None, and the other elements."""
    if not problem.has_key_mask:
        return None, elements
    assert isinstance(elements.mask, jax.Array)
    return words_of(elements.mask, problem.batch), elements._replace(mask=None)


class KeyBlocks(NamedTuple):
    """Which key blocks a batch entry has: int32 `[batch]` each, or a ref of it.

    A block is cut if not all of its keys count; one of which none do is, too.

    Attributes:
      last: twice the number of the last block with a key that counts, and 1 more if it is cut.
      first: the same of the first one, but 1 more if it is not cut.
      cuts: how many are cut.
    """

    last: Any
    first: Any
    cuts: Any

    @classmethod
    def of_words(cls, words: jax.Array, block_kv: int) -> "KeyBlocks":
        """In one kernel, as there is but one reduction."""
        count = block_kv // WORD
        of_block = [words[:, n::count] for n in range(count)]
        are_seen = functools.reduce(jnp.bitwise_or, of_block) != 0
        is_cut = functools.reduce(jnp.bitwise_and, of_block) != ALL_COUNT
        number = lax.broadcasted_iota(jnp.int32, are_seen.shape, 1)
        cut = is_cut.astype(jnp.int32)
        none = jnp.int32(1), jnp.int32(2 * are_seen.shape[1]), jnp.int32(0)
        last = jnp.where(are_seen, 2 * number + cut, none[0])
        first = jnp.where(are_seen, 2 * number + 1 - cut, none[1])
        combine = lambda a, b: (jnp.maximum(a[0], b[0]), jnp.minimum(a[1], b[1]), a[2] + b[2])
        return cls(*lax.reduce((last, first, cut), none, combine, (1,)))

    def end(self, batch):
        """The end of the last one, at least 1."""
        return (self.last[batch] >> 1) + 1

    def count(self, batch):
        """From the first to the last, at least 1."""
        end = self.end(batch)
        return end - jnp.minimum(self.first[batch] >> 1, end - 1)

    def unmasked(self, batch, blocks: int):
        """How many steps, from the last block on, come before those with a mask; the first has one.

        Args:
          blocks: that there are in the words.
        """
        last, first = self.last[batch], self.first[batch]
        end, is_first_cut = (last >> 1) + 1, 1 - (first & 1)
        at_ends = (first >> 1) + is_first_cut + (last & 1) + (blocks - end)
        count = end - (first >> 1)
        return jnp.where(self.cuts[batch] > at_ends, 1, count - is_first_cut)


def counting(words: tuple) -> jax.Array:
    """Of 64 keys, by two words of bits: 64 if all count, 0 if none do, else 1."""
    first, second = words
    any_counts = ((first | second) != 0).astype(jnp.int32)
    return jnp.where(first & second == ALL_COUNT, 2 * WORD, any_counts)
