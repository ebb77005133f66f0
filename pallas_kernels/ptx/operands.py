"""Operands of wgmma in shared memory."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.interpret import interpreting
from pallas_kernels.ptx.mlir import (
    TILE,
    WARPGROUP_THREADS,
    asm,
    base_address,
    fragments,
    int32,
    like_array,
    result_type,
    shared_address,
    thread_index,
)


def operand_form(box_width: int, itemsize: int = 2) -> tuple[Any, Any]:
    """How TMA and wgmma have operands in shared memory: boxes of 8 rows, swizzled in themselves."""
    swizzle = plgpu.SwizzleTransform(box_width * itemsize)
    return plgpu.TilingTransform((8, box_width)), swizzle


OPERAND = operand_form(64)


def float8_operand(columns: int) -> tuple:
    """How TMA and wgmma have a float8 operand of so many columns in shared memory."""
    box = float8_box(columns)
    return plgpu.TilingTransform((8, box)), plgpu.SwizzleTransform(box)


def float8_box(columns: int) -> int:
    """Columns of a box: as wide as TMA swizzles, if that divides them."""
    return 128 if columns % 128 == 0 else 64


def keep_operand_rows(ref, first, end) -> None:
    """Zeroes the rows outside of [first, end) of a `(rows, n)` tile that TMA has brought.

    In shared memory in the form of `OPERAND`, or if float8 of `float8_operand`, up to 128 rows.
    `commit_smem` must follow.
    """
    if interpreting():
        row = lax.broadcasted_iota(jnp.int32, ref.shape, 0)
        ref[...] = jnp.where((row >= first) & (row < end), ref[...], 0)
        return

    splat = plgpu.Layout.WG_SPLAT
    transforms = OPERAND if ref.dtype.itemsize == 2 else float8_operand(ref.shape[1])

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(transforms), splat, splat))
    def zero(_, ref, first, end):
        # 8 rows of 64 or 128 bytes are a tile. The swizzle moves nothing from one row to another.
        view = ir.MemRefType(ref.type)
        _, column_tiles, _, columns = view.shape
        row_bytes = columns * mgpu_utils.bytewidth(view.element_type)
        row = thread_index()
        tile, row_in_tile = arith.shrui(row, int32(3)), arith.andi(row, int32(7))
        address = shared_address(
            ref, (tile, 8 * row_bytes * column_tiles), (row_in_tile, row_bytes)
        )
        places = [
            8 * row_bytes * tile + chunk
            for tile in range(column_tiles)
            for chunk in range(0, row_bytes, 16)
        ]
        stores = " ".join(
            f"@p st.shared.v4.b32 [$0+{place}], {{zero, zero, zero, zero}};" for place in places
        )
        rows = ir.MemRefType(ref.type).shape[0] * 8
        asm(
            "{ .reg .pred p; .reg .b32 zero; mov.b32 zero, 0; setp.lt.s32 p, $1, $2;"
            f" setp.ge.or.s32 p, $1, $3, p; setp.lt.and.s32 p, $1, {rows}, p; {stores} }}",
            "r,r,r,r,~{memory}",
            [address, row, first.registers[()], end.registers[()]],
        )

    zero(ref, jnp.int32(first), jnp.int32(end))


@dataclasses.dataclass(frozen=True)
class SharedZeros:
    """Lets `warpgroups` zero the same rows of a tile, each before a product of its own reads them.

    All write the same zeros, so none waits for another. In interpret mode, which would call that a
    race, the first does it for all, who then meet at the mbarrier of `scratch()`.
    """

    warpgroups: int
    twins: Any = None

    def scratch(self) -> plgpu.Barrier:
        return plgpu.Barrier(num_arrivals=self.warpgroups)

    def keep_rows(self, ref, first, end, warpgroup, box_width: int) -> None:
        """Zeroes the rows outside of [first, end) of `(tiles, rows, n)`, of `operand_form` each.

        For products that follow; rows are a multiple of 64.
        """

        keep_interval = functools.partial(_keep_any_operand_rows, bounds=(first, end))
        self._keep(keep_interval, ref, warpgroup, box_width)

    def keep_marked_rows(self, ref, words_ref, warpgroup, box_width: int) -> None:
        """The same of rows whose bit is not set, 32 in each int32 of a view of global memory."""
        keep_marked = functools.partial(_keep_any_operand_rows, words_ref=words_ref)
        self._keep(keep_marked, ref, warpgroup, box_width)

    def _keep(self, keep_rows: Callable, ref, warpgroup, box_width: int) -> None:
        def keep():
            for n in range(ref.shape[0]):
                keep_rows(ref.at[n], box_width)
            plgpu.commit_smem()

        if self.twins is None:
            keep()
            return
        for action in (lambda: None, lambda: pl.when(warpgroup == 0)(keep)):
            action()
            plgpu.barrier_arrive(self.twins)
            plgpu.barrier_wait(self.twins)


def _keep_any_operand_rows(ref, box_width: int, *, bounds=None, words_ref=None) -> None:
    """As `keep_operand_rows`, of any multiple of 64 rows, and without bank conflicts.

    Args:
      bounds: first and end of what is kept, or words_ref: as for `SharedZeros.keep_marked_rows`.
    """
    if interpreting():
        if bounds is not None:
            keep_operand_rows(ref, *bounds)
            return
        row = lax.broadcasted_iota(jnp.int32, ref.shape, 0)
        is_kept = (words_ref[...][row // 32] >> (row % 32)) & 1
        ref[...] = jnp.where(is_kept == 1, ref[...], 0)
        return

    splat = plgpu.Layout.WG_SPLAT

    threads_a_row = box_width // 8
    threads_a_box, box_bytes = 8 * threads_a_row, 16 * box_width
    boxes_at_a_time = WARPGROUP_THREADS // threads_a_box
    shift = lambda x, by: arith.shrui(x, int32(by.bit_length() - 1))

    if bounds is not None:
        is_unseen = " setp.lt.s32 p, row, $2; setp.ge.or.s32 p, row, $3, p;"
        more: tuple = splat, splat
        arguments, constraints = tuple(map(jnp.int32, bounds)), "r,r,r,r"
        in_register = lambda x: x.registers[()]
    else:
        is_unseen = (
            " shr.u32 word, row, 5; mul.wide.u32 place, word, 4; add.s64 place, place, $2;"
            " ld.global.nc.b32 word, [place]; and.b32 bit, row, 31; shr.u32 word, word, bit;"
            " and.b32 word, word, 1; setp.eq.u32 p, word, 0;"
        )
        more = (plgpu.RefType(),)
        arguments, constraints = (words_ref,), "r,r,l"
        in_register = base_address

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(operand_form(box_width)), *more))
    def zero(_, ref, *which):
        # Threads side by side write 16 bytes side by side. A box is 8 rows, of which the swizzle
        # moves nothing from one row to another.
        row_tiles, column_tiles, _, _ = ir.MemRefType(ref.type).shape
        thread = thread_index()
        address = shared_address(
            ref,
            (shift(thread, threads_a_box), box_bytes * column_tiles),
            (arith.andi(thread, int32(threads_a_box - 1)), 16),
        )
        text = (
            "{ .reg .pred p; .reg .b32 zero, row, word, bit; .reg .b64 place;"
            " mov.b32 zero, 0; mov.b32 row, $1;"
        )
        for row_tile in range(0, row_tiles, boxes_at_a_time):
            text += is_unseen + f" add.s32 row, row, {8 * boxes_at_a_time};"
            for tile in range(column_tiles):
                place = box_bytes * (row_tile * column_tiles + tile)
                text += f" @p st.shared.v4.b32 [$0+{place}], {{zero, zero, zero, zero}};"
        row = shift(thread, threads_a_row)
        asm(text + " }", constraints + ",~{memory}", [address, row, *map(in_register, which)])

    zero(ref, *arguments)


def store_operand(ref, tile: jax.Array, box_width: int = 64, *, by_quads: bool = False) -> None:
    """Stores a `(64, n)` 16-bit tile to shared memory of `operand_form`.

    `ref[...] = tile` does the same, but the compiler keeps the addresses of all such stores of a
    kernel in registers across its loops.

    Args:
      by_quads: rows of the tile are in the order of `store_by_quads`, and leave it here.
    """
    if interpreting():
        if by_quads:
            tile = tile.reshape(4, 8, 2, -1).swapaxes(0, 1).reshape(tile.shape)
        ref[...] = tile
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(operand_form(box_width)), TILE))
    def store(_, ref, tile):
        i32 = ir.IntegerType.get_signless(32)
        words = {(g, half): llvm.bitcast(i32, x) for _, g, half, x in fragments(tile.registers)}
        for four, address, offset in _matrices(ref, len(words) // 2, box_width, by_quads):
            asm(
                f"stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0+{offset}], {{$1, $2, $3, $4}};",
                "r,r,r,r,r,~{memory}",
                [address, *(words[place] for place in four)],
            )

    store(ref, tile)


def load_operand(ref, columns: int, dtype, box_width: int = 64) -> jax.Array:
    """The `(64, columns)` 16-bit tile that is in shared memory of `operand_form`, as a tile."""
    if interpreting():
        return ref[...]

    zeros = plgpu.layout_cast(jnp.zeros((64, columns), dtype), TILE)
    shape = result_type((64, columns), dtype, layout=TILE)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(operand_form(box_width)), TILE), return_type=shape)
    def load(_, ref, like):
        i32 = ir.IntegerType.get_signless(32)
        words: dict[tuple[int, int], Any] = {}
        for four, address, offset in _matrices(ref, columns // 8, box_width):
            loaded = asm(
                f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{$0, $1, $2, $3}}, [$4+{offset}];",
                "=r,=r,=r,=r,r,~{memory}",
                [address],
                llvm.StructType.get_literal([i32] * 4),
            )
            words |= {place: llvm.extractvalue(i32, loaded, [n]) for n, place in enumerate(four)}
        out = like.registers.copy()
        for index, group, half, pair in fragments(like.registers):
            out[index] = llvm.bitcast(pair.type, words[group, half])
        return like_array(like, out)

    return load(ref, zeros)


def _matrices(ref, groups: int, box_width: int, by_quads: bool = False):
    """Yields what each ldmatrix or stmatrix of a tile of 8 * groups columns moves, and where.

    Which (column group, row half) are its four 8 by 8 matrices; the address of this thread's row,
    and an offset to it in bytes.
    """
    chunks = box_width // 8  # of 16 bytes, in a row of a box
    # 8 lanes each give the addresses of a matrix's rows: matrix 0 and 1 are the row halves of a
    # column group, 2 and 3 those of the next.
    thread = thread_index()
    matrix = arith.andi(arith.shrui(thread, int32(3)), int32(3))
    row = arith.andi(thread, int32(7))
    warp, row_half = arith.shrui(thread, int32(5)), arith.andi(matrix, int32(1))
    row_tile = arith.addi(arith.muli(warp, int32(2)), row_half)
    if by_quads:
        row_tile = arith.addi(arith.muli(row_half, int32(4)), arith.shrui(row, int32(1)))
        row = arith.addi(arith.muli(warp, int32(2)), arith.andi(row, int32(1)))
    # A box is swizzled by the bits of the address 128 bytes and more apart.
    swizzle = arith.shrui(row, int32((8 // chunks).bit_length() - 1))
    chunk = arith.xori(arith.shrui(matrix, int32(1)), swizzle)
    row_tile_bytes = 128 * groups  # 8 rows
    address = shared_address(ref, (row_tile, row_tile_bytes), (row, 16 * chunks), (chunk, 16))
    for first in range(0, groups, 2):
        column_tile, chunk_of_box = divmod(first, chunks)
        four = [(group, half) for group in (first, first + 1) for half in range(2)]
        yield four, arith.xori(address, int32(16 * chunk_of_box)), column_tile * 128 * chunks
