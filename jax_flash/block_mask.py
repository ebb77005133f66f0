"""The blocks that a mask function shows, to look at, and to take in the place of the function."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_flash import mask_blocks
from jax_flash.checks import need, need_count
from jax_flash.functions import Function, KnownBlocks, traced

_PICTURE = 32  # characters a side
_CHARACTERS = ".+#"  # of empty, partial and full blocks


@dataclasses.dataclass(frozen=True, eq=False)
class BlockMask:
    """A mask_mod of known sizes: what `attention` takes as `mask_mod`, and can be printed.

    Attributes:
      function: what was traced of the mask_mod; arrays that it captured are as they were then.
      batch, heads: 1 where it is the same for all.
      query_length, key_length: of the arrays that it is for.
      kinds: int8 `[batch, heads, query blocks, key blocks]` of blocks of `BLOCK` queries by `BLOCK`
        keys: 0 where no pair is visible, 1 where some are, 2 where all are.
    """

    BLOCK = mask_blocks.BLOCK

    function: Function
    batch: int
    heads: int
    query_length: int
    key_length: int
    kinds: np.ndarray

    @property
    def share(self) -> float:
        """Of blocks that are not empty: about what a call costs of one without a mask."""
        return float((self.kinds > 0).mean())

    def __repr__(self) -> str:
        sizes = (self.batch, self.heads, self.query_length, self.key_length)
        names = ("batch", "heads", "query_length", "key_length")
        given = ", ".join(f"{name}={size}" for name, size in zip(names, sizes, strict=True))
        empty, partial, full = ((self.kinds == kind).mean() for kind in range(3))
        return f"BlockMask({given}): {empty:.0%} empty, {partial:.0%} partial, {full:.0%} full"

    def __str__(self) -> str:
        """With a picture of the first batch entry and head: "." empty, "+" partial, "#" full."""
        return "\n".join([repr(self), *self.picture()])

    def picture(self, entry: int = 0, head: int = 0) -> list[str]:
        """Lines of one batch entry and head; a character stands for one block, or for several."""
        kinds = self.kinds[entry, head]
        steps = [-(-size // _PICTURE) for size in kinds.shape]
        starts = [range(0, size, step) for size, step in zip(kinds.shape, steps, strict=True)]

        def character(row: int, column: int) -> str:
            blocks = kinds[row : row + steps[0], column : column + steps[1]]
            return _CHARACTERS[0 if not blocks.any() else 2 if (blocks == 2).all() else 1]

        return ["".join(character(row, column) for column in starts[1]) for row in starts[0]]

    def check(self, sizes: tuple[int, int, int, int]) -> None:
        """Raises a ValueError where it is for other arrays than those of B, N, T and S."""
        reads = self.function.program.reads
        given = self.batch, self.heads, self.query_length, self.key_length
        may_be_one = not reads[0], not reads[1], False, False
        for name, got, size, one in zip(
            ("batch", "heads", "query_length", "key_length"), given, sizes, may_be_one, strict=True
        ):
            needs = f"{size}{' or 1' * (one and size > 1)}, that of the call"
            fits = got == size or (one and got == 1)
            need(fits, "mask_mod", f"a BlockMask of {name} {got}", needs)


def block_mask(
    mask_mod: Callable[..., Any], batch: int, heads: int, query_length: int, key_length: int
) -> BlockMask:
    """Asks a mask function of all pairs of queries and keys, once for all calls that take it.

        mask = jax_flash.block_mask(causal, 1, 1, 4096, 4096)
        print(mask)
        out = jax_flash.attention(query, key, value, mask_mod=mask)

    It needs none: `attention` does the same of a function. Here it can be looked at, and is done
    once for all layers of a model.

    Args:
      mask_mod: as for `attention`. Arrays that it captures must be known, not traced.
      batch: B of the arrays that it is for, or 1 if it does not read b.
      heads: N, or 1 if it does not read h.
      query_length, key_length: T and S.

    Returns:
      A `BlockMask`.

    Raises:
      TypeError: mask_mod is no function that gives bool, or captures what is being traced; or a
        size is no integer.
      ValueError: a size is less than 1.
    """
    sizes = dict(batch=batch, heads=heads, query_length=query_length, key_length=key_length)
    for name, size in sizes.items():
        need_count(name, size, least=1)
    function = traced("mask_mod", mask_mod)
    needs = "a function (b, h, q_idx, kv_idx) that gives bool"
    if function is None:
        raise TypeError(f"mask_mod: got None; needs {needs}")
    is_known = not any(isinstance(x, jax.core.Tracer) for x in function.captured)
    needs = "one that captures arrays that are known: make it outside of jit"
    need(is_known, "mask_mod", "a function that captures traced arrays", needs, TypeError)
    sizes_of_all = batch, heads, query_length, key_length
    known = KnownBlocks(*mask_blocks.computed_now(_shown, function, *sizes_of_all))
    function = dataclasses.replace(function, known=known)
    batch, heads, query_length, key_length = map(int, sizes.values())
    return BlockMask(function, batch, heads, query_length, key_length, known.kinds)


@functools.partial(jax.jit, static_argnums=range(1, 5))
def _shown(function: Function, batch: int, heads: int, query_length: int, key_length: int):
    """What `KnownBlocks` has, each axis of batch and heads whole."""
    block = BlockMask.BLOCK
    blocks = [-(-length // block) for length in (query_length, key_length)]
    key = jnp.arange(blocks[1] * block, dtype=jnp.int32)
    keys = jnp.minimum(key, key_length - 1).reshape(1, 1, 1, -1)

    def of_rows(place):
        """Of a batch entry, a head and a row of blocks."""
        entry, head, row = (x.reshape(1, 1, 1, 1) for x in place)
        query = row * block + jnp.arange(block, dtype=jnp.int32).reshape(1, 1, -1, 1)
        visible = function.at(entry, head, jnp.minimum(query, query_length - 1), keys)
        there = (query < query_length) & (key < key_length)
        visible = jnp.broadcast_to(visible, there.shape) & there
        return visible.sum(2, dtype=jnp.uint8)

    sizes = batch, heads, blocks[0]
    places = jnp.stack(jnp.unravel_index(jnp.arange(np.prod(sizes), dtype=jnp.int32), sizes))
    counts = lax.map(of_rows, tuple(places)).reshape(*sizes, len(key))
    return mask_blocks.by_blocks(counts, query_length, key_length)
