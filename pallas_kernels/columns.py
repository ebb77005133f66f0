"""Columns of arrays whose width need not be a multiple of the 64 that wgmma and TMA tiles have.

Where it is one, an operand is one tile in shared memory, and a TMA copy moves it as a whole. So it
is with some widths that are multiples of 16 or 32, in tiles that are swizzled that narrow
(`problem.box_width`). Of others the tiles of 64 columns stand one after the other, and TMA moves
each as a box of its own, which may reach beyond the last column: loads fill it with zeros there,
and stores leave it out. Nothing is read from the columns behind, which are another head's, and no
array is padded in global memory. Zeros add nothing to logits, and make columns of zeros in outputs
and gradients, which no store takes.

Rows are alike. Pallas sees tiles of 8 rows in global memory too, and takes no array that ends
within one. A box ends where the array does. So where a length is no multiple of 8
(`Problem.has_odd_rows`) columns of any width stand as boxes, and to products these are one operand
all the same (`joined.py`).
"""

import dataclasses
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import joined as joining
from pallas_kernels.interpret import interpreting
from pallas_kernels.problem import Problem, box_width
from pallas_kernels.ptx.operands import operand_form, store_operand


@dataclasses.dataclass(frozen=True)
class Columns:
    """`size` columns of an array from `first` on, and how they stand in shared memory.

    Attributes:
      width: of the array, a multiple of 8.
      size: a multiple of `box_width`; what lies beyond the array's width is 0.
      first: a multiple of `box_width`.
      box_width: columns of a box. At most 128 bytes, which is as wide as TMA swizzles.
      odd_rows: the array may have rows that are no multiple of 8, and is loaded in boxes.
    """

    width: int
    size: int
    first: int = 0
    box_width: int = 64
    odd_rows: bool = False

    @classmethod
    def of_keys(cls, problem: Problem) -> "Columns":
        """All columns of query and key, of 16 or 8 bits."""
        return cls._whole(problem.width, problem)

    @classmethod
    def of_values(cls, problem: Problem) -> "Columns":
        """All columns of value, of 16 or 8 bits."""
        return cls._whole(problem.value_width, problem)

    @classmethod
    def _whole(cls, width: int, problem: Problem) -> "Columns":
        box = box_width(width)
        if problem.dtype.itemsize == 1:  # boxes of 128 where there are more than 64
            box = 64 if width <= 64 else 128
        size = -(-width // box) * box
        return cls(width, size, box_width=box, odd_rows=problem.has_odd_rows)

    @property
    def _in_boxes(self) -> bool:
        beyond = self.width % self.box_width > 0 or self.first + self.size > self.width
        return self.odd_rows or beyond

    @property
    def tile_width(self) -> int:
        return self.box_width if self._in_boxes else self.size

    @property
    def tiles(self) -> int:
        """Copies that a load takes."""
        return self.size // self.tile_width

    @property
    def products(self) -> int:
        """Commit groups that a product takes: one for each tile, if they are not joined."""
        return 1 if self.odd_rows and joining.IS_KNOWN else self.tiles

    @property
    def tile_slices(self) -> list[slice]:
        """Of `size` columns, those of each tile."""
        starts = range(0, self.size, self.tile_width)
        return [slice(start, start + self.tile_width) for start in starts]

    def in_parts(self, most: int) -> list["Columns"]:
        """The same in as few parts as may be, all alike, of `most` columns at most."""
        boxes = self.size // self.box_width
        sizes = (self.size // n for n in range(1, boxes + 1) if boxes % n == 0)
        size = next(size for size in sizes if size <= most)
        return [
            dataclasses.replace(self, size=size, first=self.first + start)
            for start in range(0, self.size, size)
        ]

    def smem(self, *shape: int, dtype: np.dtype) -> Any:
        """Shared memory `(..., tiles, rows, tile_width)` for `(..., rows)` of these columns."""
        *leading, rows = shape
        whole = (*leading, self.tiles, rows, self.tile_width)
        transforms = operand_form(self.box_width, np.dtype(dtype).itemsize)
        return plgpu.SMEM(whole, dtype, transforms=transforms)

    def load(self, source, buffer, barrier) -> None:
        """Copies from `(rows, width)` of global memory; `tiles` arrivals at the barrier."""
        for n in range(self.tiles):
            plgpu.copy_gmem_to_smem(source.at[:, self._slice(n)], self._box(buffer, n), barrier)

    def store(self, buffer, target) -> None:
        """Copies to `(rows, width)` of global memory."""
        for n in range(self.tiles):
            if self.first + n * self.tile_width < self.width:
                plgpu.copy_smem_to_gmem(self._box(buffer, n), target.at[:, self._slice(n)])

    def put(self, buffer, values: jax.Array, *, anew: bool = False) -> None:
        """Stores `(rows, size)` values to shared memory; anew as in `put_tile`."""
        for n, columns in enumerate(self.tile_slices):
            put_tile(buffer.at[n], values[:, columns], self.box_width, anew=anew)

    def put_part(self, buffer, columns: slice, values: jax.Array) -> None:
        """Stores `(rows, columns)` values, of whole boxes and of one tile if it has more boxes."""
        for of_tile, part in self._pieces(buffer, columns):
            of_tile[...] = values[:, part]

    def contract(self, accumulator, a, b) -> None:
        """Issues accumulator += a b', a and b of these columns, in `products` commit groups.

        a is in shared memory, or a list of its tiles in registers, which are a group each.
        """
        if self._are_joined and not isinstance(a, list):
            plgpu.wgmma(accumulator, joining.joined(a), joining.joined(b).transpose((1, 0)))
            return
        for n in range(self.tiles):
            left = a[n] if isinstance(a, list) else a.at[n]
            plgpu.wgmma(accumulator, left, b.at[n].transpose((1, 0)))

    def expand(self, accumulator, a, b) -> None:
        """Issues accumulator += a b, accumulator and b of these columns, in `products` groups.

        a is in registers, or a matrix in shared memory.
        """
        if self._are_joined:
            plgpu.wgmma(accumulator, a, joining.joined(b))
            return
        for n, columns in enumerate(self.tile_slices):
            part = accumulator.at[:, columns] if self.tiles > 1 else accumulator
            plgpu.wgmma(part, a, b.at[n])

    def expand_part(self, accumulator, a, b, columns: slice) -> None:
        """The same with some columns of b, and an accumulator of these, as in `put_part`."""
        size = columns.stop - columns.start
        if self._are_joined:
            plgpu.wgmma(accumulator, a, joining.joined(b).at[:, pl.ds(columns.start, size)])
            return
        for of_tile, part in self._pieces(b, columns):
            is_all = part.stop - part.start == size
            plgpu.wgmma(accumulator if is_all else accumulator.at[:, part], a, of_tile)

    @property
    def _are_joined(self) -> bool:
        """Whether products see one operand; interpret mode has but its boxes."""
        return self.products < self.tiles and not interpreting()

    def _pieces(self, buffer, columns: slice):
        """Of each tile with some columns, its part of these, and which of them it has."""
        size = min(columns.stop - columns.start, self.tile_width)
        for first in range(columns.start, columns.stop, size):
            n, start = divmod(first, self.tile_width)
            part = slice(first - columns.start, first - columns.start + size)
            yield buffer.at[n, :, pl.ds(start, size)], part

    def _slice(self, n: int):
        start = self.first + n * self.tile_width
        if self._in_boxes:  # made by an operation, as Pallas refuses constants out of bounds
            return pl.ds(lax.add(jnp.int32(start), jnp.int32(0)), self.box_width)
        return pl.ds(start, self.tile_width)

    def _box(self, buffer: Any, n: int) -> Any:
        """Tile n of a buffer, as TMA is to see it."""
        return (as_rows(buffer) if self._in_boxes else buffer).at[n]


def as_rows(buffer):
    """Shared memory of `operand_form` whose tiles are one box wide, as TMA is to see it.

    Such a tile is the same to wgmma, as matrices of 8 rows one after the other, and to TMA, as
    rows. Only told so does Pallas take an array that does not end with a tile.
    """
    if interpreting():
        return buffer
    swizzle, tiling, *indices = buffer.transforms
    whole = dataclasses.replace(buffer, transforms=(swizzle, tiling))
    rows = dataclasses.replace(buffer, transforms=(swizzle,)).reshape(whole.shape)
    return dataclasses.replace(rows, transforms=(*rows.transforms, *indices))


def put_tile(ref, tile: jax.Array, box_width: int, *, anew: bool = False) -> None:
    """Stores one tile to shared memory; anew: with addresses that are in no register till then."""
    if anew:
        store_operand(ref, tile, box_width)
    else:
        ref[...] = tile
