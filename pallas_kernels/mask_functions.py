"""Masks that are functions of indices: `mask_mod` inside a kernel, and the blocks that it shows.

Before the kernel the function is asked of all pairs, and what is kept is the kind of each block of
64 queries by 64 keys: whether none of its pairs is seen, some, or all. So a tile has a list of the
blocks that it needs, those first that need a mask, and loops over its list in the place of an
interval. Empty blocks are neither loaded nor computed. In partial ones each thread evaluates the
function for its own elements (`on_rows.py`), and keeps a bit of each.

Kinds are known before run time where the function reads positions alone; else they come as an
array, for each batch entry and head where these differ. So do those of a dense mask, which has no
function: its bits are loaded (`elements.py`).
"""

import dataclasses
import functools
import hashlib
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.bit_words import WORD
from pallas_kernels.interpret import interpreting
from pallas_kernels.on_rows import OnRows, Part, entry_of
from pallas_kernels.programs import Operations
from pallas_kernels.ptx.compiler import code_fence, fresh_rows
from pallas_kernels.ptx.loads import load_at
from pallas_kernels.ptx.masks import column_numbers, no_columns, with_columns

BLOCK = 64  # queries, and keys, of a block
EMPTY, PARTIAL, FULL = range(3)
_ROWS, _GROUP = 64, 16  # of a tile; columns that are evaluated together
# Columns of a table of lists before the blocks themselves.
COUNT, MASKED, LISTED = range(3)
BEYOND = 8  # columns behind them: producers look so far ahead at most, and use nothing of it


@dataclasses.dataclass(frozen=True, eq=False)
class MaskFunction:
    """A mask of blocks, with what is known of it before run time.

    Attributes:
      program: what it computes; can be hashed, and is equal for functions that do the same. None
        of a dense mask.
      kinds: int8 `[query blocks, key blocks]`, of the pairs that it and `Problem`'s bounds show;
        None where they come at run time (`element_arrays.Blocks`).
      seeing: bool `[T]`, which queries see a key; None likewise.
      seen: bool `[S]`, which keys a query sees; None likewise.
    """

    program: Any
    kinds: np.ndarray | None = None
    seeing: np.ndarray | None = None
    seen: np.ndarray | None = None

    @functools.cached_property
    def _digest(self) -> str:
        arrays = [x for x in (self.kinds, self.seeing, self.seen) if x is not None]
        parts = [x for array in arrays for x in (repr(array.shape).encode(), array.tobytes())]
        return hashlib.sha256(b"".join(parts)).hexdigest()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MaskFunction):
            return False
        return self._digest == other._digest and self.program == other.program

    def __hash__(self) -> int:
        return hash((self._digest, self.program))

    def __repr__(self) -> str:
        """All that a kernel depends on, as `launch` wants it."""
        return f"MaskFunction({self.program!r}, {self._digest})"

    @functools.cached_property
    def operations(self) -> Operations:
        return Operations(self.program.steps)

    @property
    def is_dense(self) -> bool:
        return self.program is None

    @property
    def reads_numbers(self) -> bool:
        """Whether it reads the batch entry or the head."""
        return self.program is not None and any(self.program.reads[:2])

    @property
    def operand_count(self) -> int:
        """How many operands of kernels it has beside lists."""
        return 0 if self.is_dense else int(self.reads_numbers) + self.operations.captured

    @property
    def all_count(self) -> bool:
        """Whether each query is known to see a key, and each key to be seen."""
        if self.seeing is None or self.seen is None:
            return False
        return bool(self.seeing.all() and self.seen.all())

    def grows(self) -> bool:
        """Whether the first queries are known to see fewer blocks than the last ones."""
        if self.kinds is None:
            return False
        counts = (self.kinds != EMPTY).sum(1)
        return bool(counts[0] < counts[-1])

    def key_lists(self, rows: int, keys: int, shift: int, key_length: int) -> np.ndarray:
        """`lists` of tiles of `rows` queries, the first of which begins `shift` before query 0."""
        assert self.kinds is not None
        return np.asarray(key_lists(np, self.kinds[None, None], rows, keys, shift, key_length))

    def query_lists(self, keys: int, rows: int, key_length: int, group: int) -> np.ndarray:
        """The same of tiles of keys: lists of blocks of `rows` queries of all heads of a group."""
        assert self.kinds is not None
        table = query_lists(np, self.kinds[None, None], keys, rows, key_length, (1, group))
        return np.asarray(table)


def key_lists(xp, kinds, rows: int, keys: int, shift: int, key_length: int):
    """`lists` of tiles of `rows` queries, `[b, n, tiles, columns]`.

    Args:
      xp: numpy, or jax.numpy.
      kinds: `[b, n, query blocks, key blocks]`.
      shift: how many rows before query 0 the first tile begins.
    """
    some, whole = coarse(xp, kinds, rows // BLOCK, keys // BLOCK, shift // BLOCK)
    if key_length % keys:  # beyond the end there are none to see
        is_last = np.arange(whole.shape[-1]) == whole.shape[-1] - 1
        whole = whole & ~np.broadcast_to(is_last, whole.shape)
    return lists(xp, some, whole)


def query_lists(xp, kinds, keys: int, rows: int, key_length: int, heads: tuple[int, int]):
    """The same of tiles of keys, `[b, key heads or 1, tiles, columns]`.

    A number is that of a block of `rows` queries, and of blocks of the first heads of a group.

    Args:
      heads: key heads, and query heads of each.
    """
    some, whole = coarse(xp, kinds.swapaxes(2, 3), keys // BLOCK, rows // BLOCK, 0)
    if key_length % keys:
        is_last = np.arange(whole.shape[2])[:, None] == whole.shape[2] - 1
        whole = whole & ~np.broadcast_to(is_last, whole.shape)
    batch, n, tiles, blocks = some.shape
    kv_heads, group = heads

    def together(x):
        if n == 1:
            x = xp.broadcast_to(x[:, :, :, None], (batch, 1, tiles, group, blocks))
        else:
            x = x.reshape(batch, kv_heads, group, tiles, blocks).swapaxes(2, 3)
        return x.reshape(*x.shape[:3], group * blocks)

    return lists(xp, together(some), together(whole))


def coarse(xp, kinds, rows: int, columns: int, shift: int):
    """Of tiles of so many blocks whether any of their pairs is seen, and whether all are.

    Args:
      shift: blocks that the first tile has before the first one.
    """
    ends = (shift, -(kinds.shape[2] + shift) % rows), (0, -kinds.shape[3] % columns)

    def by_tile(x, beyond: bool, together: Callable):
        x = xp.pad(x, ((0, 0), (0, 0), *ends), constant_values=beyond)
        x = x.reshape(*x.shape[:2], x.shape[2] // rows, rows, x.shape[3] // columns, columns)
        # Not by a reduction, which is a kernel of its own.
        parts = (x[:, :, :, r, :, c] for r in range(rows) for c in range(columns))
        return functools.reduce(together, parts)

    some = by_tile(kinds != EMPTY, False, operator.or_)
    return some, by_tile(kinds == FULL, True, operator.and_)


def lists(xp, some, whole):
    """The blocks that each tile needs, those that need a mask first, each from the last on.

    A tile that sees nothing takes one block, fully masked, so that every tile has a first step.

    Args:
      xp: numpy, or jax.numpy.
      some, whole: bool `[b, n, tiles, blocks]`.

    Returns:
      `[b, n, tiles, 2 + blocks + BEYOND]` int32: how many blocks, how many of them need a mask, and
      their numbers. Of numpy without columns that no tile needs.
    """
    blocks = some.shape[-1]
    number = np.broadcast_to(np.arange(blocks, dtype=np.int32), some.shape)
    masked = (some & ~whole) | (~some.any(-1, keepdims=True) & (number == 0))
    rank = xp.where(masked, 0, xp.where(some, 1, 2)).astype(np.int32)
    places = rank * blocks + (blocks - 1 - number)
    if xp is np:
        places = np.sort(places, -1)
    else:  # XLA would sort what is known when it compiles, for seconds
        places = lax.sort(lax.optimization_barrier(places), dimension=-1)
    count = (rank < 2).sum(-1, keepdims=True).astype(np.int32)
    needing = masked.sum(-1, keepdims=True).astype(np.int32)
    table = xp.concatenate([count, needing, blocks - 1 - places % blocks], axis=-1)
    if xp is np:
        table = table[..., : LISTED + int(count.max())]
    return xp.pad(table, ((0, 0), (0, 0), (0, 0), (0, BEYOND)))


def seen_keys(
    seen: jax.Array, keys: int, heads: tuple[int, int] | None = None
) -> tuple[jax.Array, jax.Array]:
    """`Blocks.seen` in whole blocks, and int32 `[b, n, blocks]`: above 0 for one with other keys.

    Args:
      seen: int32 `[b, n, words]`, of query heads.
      keys: of a block.
      heads: None, or key heads and query heads of each: of key heads.
    """
    if heads is not None and seen.shape[1] > 1:
        seen = seen.reshape(seen.shape[0], *heads, seen.shape[2])
        seen = functools.reduce(jnp.bitwise_or, (seen[:, :, n] for n in range(heads[1])))
    words = keys // WORD
    padding = [(0, 0), (0, 0), (0, -seen.shape[2] % words)]
    seen = jnp.pad(seen, padding, constant_values=-1)
    in_all = functools.reduce(jnp.bitwise_and, (seen[..., n::words] for n in range(words)))
    return seen, (in_all != -1).astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class MaskRefs:
    """Lists and the function of a problem that has them, inside a kernel.

    Attributes:
      problem: static description.
      lists: `[b, n or key heads or 1, tiles, columns]`, in global memory.
      others: `Blocks.operands`.
    """

    problem: Any
    lists: Any
    others: tuple[Any, ...]

    @classmethod
    def split(cls, problem: Any, refs) -> "tuple[MaskRefs, list]":
        """Those that a kernel's refs begin with, and the other refs."""
        count = 1 + problem.mask_function.operand_count
        return cls(problem, refs[0], tuple(refs[1:count])), list(refs[count:])

    def entry(self, batch, head, tile, column):
        """An entry of a tile's list."""
        heads = self.lists.shape[1]
        return self.lists[
            entry_of(self.lists, batch, self.problem), 0 if heads == 1 else head, tile, column
        ]

    def bits(
        self,
        batch,
        head,
        first_row,
        first_column,
        columns: int,
        *,
        rows_are_keys: bool = False,
    ) -> jax.Array | None:
        """Bits of a tile of 64 rows, as `equal_columns` gives them: what the function shows.

        None of a dense mask.

        Args:
          batch, head: of the kernel.
          first_row, first_column: scalars; the tile begins there.
          columns: a multiple of 8 and at most 128.
          rows_are_keys: else they are queries.
        """
        problem, function = self.problem, self.problem.mask_function
        if function.is_dense:
            return None
        arrays, zero = list(self.others), Part(jnp.int32(0))
        numbers = [zero, zero]
        if function.reads_numbers:
            ref = arrays.pop(0)
            numbers = [Part(ref[entry_of(ref, batch, self.problem), head, n]) for n in range(2)]
        last_row = (problem.key_length if rows_are_keys else problem.query_length) - 1
        rows = Part(jnp.minimum(fresh_rows() + first_row, last_row), by_row=True)
        place = [rows, zero][:: -1 if rows_are_keys else 1]
        captured = len(arrays)
        column_at = captured + (2 if rows_are_keys else 3)
        views = [ref.at[entry_of(ref, batch, self.problem)] for ref in arrays]

        def load(array: int, index: Part):
            return load_at(views[array], index.x, by_row=index.by_row, by_column=index.by_column)

        given = [*[zero] * captured, *numbers, *place]
        width = columns if interpreting() else min(columns, _GROUP)
        own, bits = column_numbers(width), no_columns(columns)
        on_rows = OnRows(function.operations, given, {column_at}, _ROWS, load)
        for first in range(0, columns, width):
            number = Part(own + (first_column + first), by_column=True)
            (shown,) = on_rows.evaluate({column_at: number}, width)
            bits = with_columns(bits, shown, first)
        # Else ptxas evaluates it where accumulators take the registers that it needs.
        code_fence(first_column)
        return bits
