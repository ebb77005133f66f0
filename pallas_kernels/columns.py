"""Columns of arrays whose width need not be a multiple of the 64 that wgmma and TMA tiles have.

Where it is one, an operand is one tile in shared memory, and a TMA copy moves it as a whole. So it
is with some widths that are multiples of 16 or 32, in tiles that are swizzled that narrow
(`problem.box_width`). Of others the tiles of 64 columns stand one after the other, and TMA moves
each as a box of its own, which may reach beyond the last column: loads fill it with zeros there,
and stores leave it out. Nothing is read from the columns behind, which are another head's, and no
array is padded in global memory. Zeros add nothing to logits, and make columns of zeros in outputs
and gradients, which no store takes.
"""

import dataclasses
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.interpret import interpreting
from pallas_kernels.problem import box_width
from pallas_kernels.ptx.operands import operand_form, store_operand


@dataclasses.dataclass(frozen=True)
class Columns:
    """`size` columns of an array from `first` on, and how they stand in shared memory.

    Attributes:
      width: of the array, a multiple of 8.
      size: a multiple of `box_width`; what lies beyond the array's width is 0.
      first: a multiple of `box_width`.
      box_width: columns of a box. At most 128 bytes, which is as wide as TMA swizzles.
    """

    width: int
    size: int
    first: int = 0
    box_width: int = 64

    @classmethod
    def whole(cls, width: int) -> "Columns":
        """All columns of an array of 16 bits."""
        box = box_width(width)
        return cls(width, -(-width // box) * box, box_width=box)

    @classmethod
    def whole_float8(cls, width: int) -> "Columns":
        """All columns of an array of 8 bits, in boxes of 128 where there are more than 64."""
        box_width = 64 if width <= 64 else 128
        return cls(width, -(-width // box_width) * box_width, box_width=box_width)

    @property
    def _in_boxes(self) -> bool:
        return self.width % self.box_width > 0 or self.first + self.size > self.width

    @property
    def tile_width(self) -> int:
        return self.box_width if self._in_boxes else self.size

    @property
    def tiles(self) -> int:
        """Copies that a load takes, and products that a product takes."""
        return self.size // self.tile_width

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

    def part(self, buffer, columns: slice):
        """All rows and some columns, whole boxes of one tile, of what is in shared memory."""
        n, start = divmod(columns.start, self.tile_width)
        return buffer.at[n, :, pl.ds(start, columns.stop - columns.start)]

    def put(self, buffer, values: jax.Array, *, anew: bool = False) -> None:
        """Stores `(rows, size)` values to shared memory; anew as in `put_tile`."""
        for n, columns in enumerate(self.tile_slices):
            put_tile(buffer.at[n], values[:, columns], self.box_width, anew=anew)

    def contract(self, accumulator, a, b) -> None:
        """Issues accumulator += a b', a and b of these columns, in `tiles` commit groups.

        a is in shared memory, or a list of its tiles in registers.
        """
        for n in range(self.tiles):
            left = a[n] if isinstance(a, list) else a.at[n]
            plgpu.wgmma(accumulator, left, b.at[n].transpose((1, 0)))

    def expand(self, accumulator, a, b) -> None:
        """Issues accumulator += a b, accumulator and b of these columns, in `tiles` commit groups.

        a is in registers, or a matrix in shared memory.
        """
        for n, columns in enumerate(self.tile_slices):
            part = accumulator.at[:, columns] if self.tiles > 1 else accumulator
            plgpu.wgmma(part, a, b.at[n])

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
