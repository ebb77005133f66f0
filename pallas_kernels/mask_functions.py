"""Masks that are functions of indices: `mask_mod` inside a kernel, and the blocks that it shows.

Before the kernel the function is asked of all pairs, and what is kept is the kind of each block of
64 queries by 64 keys: whether none of its pairs is seen, some, or all. So a tile has a list of the
blocks that it needs, those first that need a mask, and loops over its list in the place of an
interval. Empty blocks are neither loaded nor computed. In partial ones each thread evaluates the
function for its own elements (`programs.py`), and keeps a bit of each.
"""

import dataclasses
import functools
import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.interpret import interpreting
from pallas_kernels.programs import OnRows, Operations, Part
from pallas_kernels.ptx.compiler import code_fence, fresh_rows
from pallas_kernels.ptx.masks import column_numbers, no_columns, with_columns

BLOCK = 64  # queries, and keys, of a block
EMPTY, PARTIAL, FULL = range(3)
_ROWS, _GROUP = 64, 16  # of a tile; columns that are evaluated together
# Columns of a table of lists before the blocks themselves.
COUNT, MASKED, LISTED = range(3)


@dataclasses.dataclass(frozen=True, eq=False)
class MaskFunction:
    """A function of the positions of a query and a key alone, with what is known of it by blocks.

    Attributes:
      program: what it computes; can be hashed, and is equal for functions that do the same.
      kinds: int8 `[query blocks, key blocks]`, of the pairs that it and `Problem`'s bounds show.
      seeing: bool `[T]`, which queries see a key.
      seen: bool `[S]`, which keys a query sees.
    """

    program: Any
    kinds: np.ndarray
    seeing: np.ndarray
    seen: np.ndarray

    @functools.cached_property
    def _digest(self) -> str:
        arrays = self.kinds, self.seeing, self.seen
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
    def all_count(self) -> bool:
        """Whether each query sees a key, and each key is seen."""
        return bool(self.seeing.all() and self.seen.all())

    def grows(self) -> bool:
        """Whether the first queries see fewer blocks than the last ones."""
        counts = (self.kinds != EMPTY).sum(1)
        return bool(counts[0] < counts[-1])

    def key_lists(self, rows: int, keys: int, shift: int, key_length: int) -> np.ndarray:
        """`lists` of tiles of `rows` queries, the first of which begins `shift` before query 0."""
        some, whole = _coarse(self.kinds, rows // BLOCK, keys // BLOCK, shift // BLOCK)
        if key_length % keys:  # beyond the end there are none to see
            whole[:, -1] = False
        return lists(some, whole)

    def query_lists(self, keys: int, rows: int, key_length: int) -> np.ndarray:
        """The same of tiles of keys: lists of blocks of `rows` queries."""
        some, whole = _coarse(self.kinds.T, keys // BLOCK, rows // BLOCK, 0)
        if key_length % keys:
            whole[-1] = False
        return lists(some, whole)


def _coarse(kinds: np.ndarray, rows: int, columns: int, shift: int):
    """Of tiles of so many blocks whether any of their pairs is seen, and whether all are.

    Args:
      shift: blocks that the first tile has before the first one.
    """
    ends = [(shift, -(kinds.shape[0] + shift) % rows), (0, -kinds.shape[1] % columns)]

    def by_tile(x: np.ndarray, beyond: bool) -> np.ndarray:
        x = np.pad(x, ends, constant_values=beyond)
        return x.reshape(x.shape[0] // rows, rows, x.shape[1] // columns, columns)

    return by_tile(kinds != EMPTY, False).any((1, 3)), by_tile(kinds == FULL, True).all((1, 3))


def lists(some: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """The blocks that each tile needs, those that need a mask first, each from the last on.

    A tile that sees nothing takes one block, fully masked, so that every tile has a first step.

    Args:
      some, whole: bool `[tiles, blocks]`.

    Returns:
      `[tiles, 2 + most]` int32: how many blocks, how many of them need a mask, and their numbers.
    """
    masked = some & ~whole
    nothing = ~some.any(1)
    masked[nothing, 0] = True
    count, needing = (masked | some).sum(1), masked.sum(1)
    table = np.zeros((len(some), LISTED + int(count.max())), np.int32)
    table[:, COUNT], table[:, MASKED] = count, needing
    for tile in range(len(some)):
        blocks = [np.flatnonzero(x[tile])[::-1] for x in (masked, some & whole)]
        table[tile, LISTED : LISTED + count[tile]] = np.concatenate(blocks)
    return table


def function_bits(
    function: MaskFunction,
    first_row,
    first_column,
    columns: int,
    last_row: int,
    *,
    rows_are_keys: bool = False,
) -> jax.Array:
    """Bits of a tile of 64 rows, as `ptx.masks.equal_columns` gives them: what the function shows.

    Args:
      first_row, first_column: scalars; the tile begins there.
      columns: a multiple of 8 and at most 128.
      last_row: of all; those beyond it are taken to be it.
      rows_are_keys: else they are queries.
    """
    row_at, column_at = (3, 2) if rows_are_keys else (2, 3)
    zero = Part(jnp.int32(0))
    given = [zero, zero, zero, zero]
    given[row_at] = Part(jnp.minimum(fresh_rows() + first_row, last_row), by_row=True)
    width = columns if interpreting() else min(columns, _GROUP)
    numbers, bits = column_numbers(width), no_columns(columns)
    on_rows = OnRows(function.operations, given, {column_at}, _ROWS)
    for first in range(0, columns, width):
        shown = on_rows.evaluate({column_at: numbers + (first_column + first)}, width)
        bits = with_columns(bits, shown, first)
    # Else ptxas evaluates it where accumulators take the registers that it needs.
    code_fence(first_column)
    return bits
