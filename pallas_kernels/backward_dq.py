"""Which tiles dQ is made in by `backward.py`, and what of them each consumer has."""

import dataclasses
import functools

import jax.experimental.pallas as pl

from pallas_kernels.columns import Columns
from pallas_kernels.config import DQ_TILE
from pallas_kernels.problem import Problem, whole_tiles
from pallas_kernels.ptx.fragments import fragment_shape


@dataclasses.dataclass(frozen=True)
class QueryGradient:
    """How dQ is made: in tiles of 64 rows, and if it is summed in float32 and in fragment order.

    Attributes:
      problem: static description.
    """

    problem: Problem

    @functools.cached_property
    def operand_columns(self) -> tuple[Columns, Columns]:
        """Columns of query and key, and of value."""
        p = self.problem
        key, value = Columns.of_keys(p), Columns.of_values(p)
        # dQ is made of dS' and K, and dV leaves from where dS' was: all in boxes of one width.
        # Where dQ has two tiles of columns, zeros fill what is missing.
        if key.box_width == value.box_width and (key.size > DQ_TILE) == (p.widest > DQ_TILE):
            return key, value
        sizes = (p.width, p.widest), (p.value_width, whole_tiles(p.value_width))
        key, value = (Columns(*each, odd_rows=p.has_odd_rows) for each in sizes)
        return key, value

    @functools.cached_property
    def tiles(self) -> list[slice]:
        """The columns of one tile, or of two as much alike as whole boxes allow."""
        columns, _ = self.operand_columns
        if columns.size <= DQ_TILE:
            return [slice(0, columns.size)]
        middle = -(-columns.size // columns.box_width // 2) * columns.box_width
        return [slice(0, middle), slice(middle, columns.size)]

    @property
    def columns_of_tiles(self) -> tuple[int, ...]:
        return tuple(map(size_of, self.tiles))

    def place(self, consumer: int) -> tuple[int, slice]:
        """Which 64 rows of a step's dQ a consumer has, and which columns."""
        row, column = divmod(consumer, len(self.tiles))
        return row, self.tiles[column]

    def whole_part(self, consumer: int) -> Columns:
        """These columns, as whole dQ leaves."""
        _, columns = self.place(consumer)
        size, first = size_of(columns), columns.start
        return dataclasses.replace(self.operand_columns[0], size=size, first=first)


def size_of(columns: slice) -> int:
    return columns.stop - columns.start


def fragment_of(ref, columns: slice):
    """The part of a tile of dQ in fragment order that a tile of fewer columns takes."""
    return ref.at[pl.ds(0, fragment_shape(size_of(columns))[0])]
