"""Stores to global memory."""

import itertools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm

from pallas_kernels.interpret import interpreting
from pallas_kernels.ptx.mlir import (
    COLUMNS,
    ROWS,
    TILE,
    asm,
    base_address,
    bytes_to,
    column_of_thread,
    extract,
    fragments,
    global_address,
    int32,
    quad_of_thread,
    row_of_thread,
    scalar,
    thread_index,
    turned,
    warp_of_thread,
)


def store_rows(ref, rows: jax.Array) -> None:
    """Stores `(64,)` float32 or int32, one value a row, to a `(64,)` view of global memory."""
    if interpreting():
        ref[...] = rows
        return

    kind = "f" if ref.dtype == jnp.float32 else "r"
    store_one = "st.global.f32" if kind == "f" else "st.global.b32"

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), ROWS))
    def store(_, ref, rows):
        thread = thread_index()
        lane = arith.andi(thread, int32(31))
        address = global_address(ref, arith.muli(row_of_thread(), int32(4)))
        first_of_quad = arith.extui(
            ir.IntegerType.get_signless(32),
            arith.cmpi(arith.CmpIPredicate.eq, arith.andi(lane, int32(3)), int32(0)),
        )
        low, high = (scalar(r) for r in rows.registers.flat)
        asm(
            "{ .reg .pred p; setp.ne.u32 p, $1, 0;"
            f" @p {store_one} [$0], $2; @p {store_one} [$0+32], $3; }}",
            f"l,r,{kind},{kind},~{{memory}}",
            [address, first_of_quad, low, high],
        )

    store(ref, rows)


def store_columns(ref, columns: jax.Array) -> None:
    """Stores one float32 value a column to global memory, as `store_rows` does of rows."""
    if interpreting():
        ref[...] = columns
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), COLUMNS))
    def store(_, ref, columns):
        thread = thread_index()  # of the first warp, four have all columns
        address = global_address(ref, arith.muli(thread, int32(8)))
        for group, pair in enumerate(columns.registers.flat):
            asm(
                "{ .reg .pred p; setp.lt.u32 p, $1, 4;"
                f" @p st.global.v2.f32 [$0+{32 * group}], {{$2, $3}}; }}",
                "l,r,f,f,~{memory}",
                [address, thread, *(extract(pair, e) for e in range(2))],
            )

    store(ref, columns)


def store_tile(ref, tile: jax.Array) -> None:
    """Stores a `(64, n)` tile to a `(64, n)` view of global memory, in float32 or 16 bits."""
    if interpreting():
        ref[...] = tile
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), TILE))
    def store(_, ref, tile):
        row_stride = ir.MemRefType(ref.type).get_strides_and_offset()[0][0]
        size = tile.mlir_dtype.width // 8
        column = arith.muli(column_of_thread(), int32(size))
        first = global_address(ref, column)
        own_row = row_of_thread()
        addresses = [
            arith.addi(first, bytes_to(row, size * row_stride))
            for row in (own_row, arith.addi(own_row, int32(8)))
        ]
        for _, group, half, pair in fragments(tile.registers):
            offset = 8 * size * group
            if size == 2:
                text = f"st.global.b32 [$0+{offset}], $1;"
                word = llvm.bitcast(ir.IntegerType.get_signless(32), pair)
                asm(text, "l,r,~{memory}", [addresses[half], word])
                continue
            text = f"st.global.v2.f32 [$0+{offset}], {{$1, $2}};"
            values = [extract(pair, e) for e in range(2)]
            asm(text, "l,f,f,~{memory}", [addresses[half], *values])

    store(ref, tile)


def store_tile_inside(ref, tile: jax.Array, first_row, first_column) -> None:
    """Stores what of a `(64, n)` tile is inside of a matrix, in float32 or 16 bits.

    Args:
      ref: the matrix `(rows, columns)`, a view of global memory.
      tile: to be stored.
      first_row, first_column: where it begins, at multiples of its own rows and columns.
    """
    rows, columns = ref.shape
    if interpreting():
        sizes = itertools.product(
            {tile.shape[0], rows % tile.shape[0]} - {0},
            {tile.shape[1], columns % tile.shape[1]} - {0},
        )
        for own_rows, own_columns in sizes:
            inside = jnp.minimum(rows - first_row, tile.shape[0]) == own_rows
            inside &= jnp.minimum(columns - first_column, tile.shape[1]) == own_columns

            @pl.when(inside)
            def _store(own_rows=own_rows, own_columns=own_columns):
                place = pl.ds(first_row, own_rows), pl.ds(first_column, own_columns)
                ref[place] = tile[:own_rows, :own_columns]

        return

    splat = plgpu.Layout.WG_SPLAT

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), TILE, splat, splat))
    def store(_, ref, tile, first_row, first_column):
        row_stride = ir.MemRefType(ref.type).get_strides_and_offset()[0][0]
        size = tile.mlir_dtype.width // 8
        row = arith.addi(row_of_thread(), first_row.registers[()])
        column = arith.addi(column_of_thread(), first_column.registers[()])
        first = global_address(ref, arith.muli(column, int32(size)))
        for _, group, half, pair in fragments(tile.registers):
            own_row = arith.addi(row, int32(8 * half))
            address = arith.addi(first, bytes_to(own_row, size * row_stride))
            # Of an odd number of columns a pair may end beyond the last, or begin within a word.
            values = [pair] if columns % 2 == 0 else [extract(pair, e) for e in range(2)]
            for e, value in enumerate(values):
                bits = size * 16 // len(values)
                bits_type = ir.IntegerType.get_signless(bits)
                place, offset = arith.addi(column, int32(8 * group + e)), size * (8 * group + e)
                constraint = {16: "h", 32: "r", 64: "l"}[bits]
                asm(
                    f"{{ .reg .pred p; setp.lt.s32 p, $2, {rows};"
                    f" setp.lt.and.s32 p, $3, {columns}, p;"
                    f" @p st.global.b{bits} [$0+{offset}], $1; }}",
                    f"l,{constraint},r,r,~{{memory}}",
                    [address, llvm.bitcast(bits_type, value), own_row, place],
                )

    store(ref, tile, jnp.int32(first_row), jnp.int32(first_column))


def store_turned_inside(ref, tile: jax.Array, first_row, first_column) -> None:
    """As `store_tile_inside`, the transpose of a `(64, n)` tile of 16 bits, which warps turn.

    Args:
      ref: the matrix `(rows, columns)`, a view of global memory.
      first_row, first_column: where the transpose begins, at multiples of its own rows and columns.
    """
    if interpreting():
        store_tile_inside(ref, tile.T, first_row, first_column)
        return

    rows, columns = ref.shape
    splat = plgpu.Layout.WG_SPLAT

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), TILE, splat, splat))
    def store(_, ref, tile, first_row, first_column):
        i32, i16 = (ir.IntegerType.get_signless(bits) for bits in (32, 16))
        stride = ir.MemRefType(ref.type).get_strides_and_offset()[0][0]
        row = arith.addi(first_row.registers[()], quad_of_thread())
        column = arith.addi(arith.muli(warp_of_thread(), int32(16)), column_of_thread())
        column = arith.addi(first_column.registers[()], column)
        base = arith.addi(base_address(ref), bytes_to(row, 2 * stride))
        address = arith.addi(base, bytes_to(column, 2))
        for _, group, half, pair in fragments(tile.registers):
            word = turned(llvm.bitcast(i32, pair))
            offset = 2 * (8 * group * stride + 8 * half)
            own_row = arith.addi(row, int32(8 * group))
            # Of an odd number of columns a pair may end beyond the last, or begin within a word.
            parts = [(0, "b32", "r", word)]
            if columns % 2:
                high = arith.shrui(word, int32(16))
                parts = [(e, "b16", "h", arith.trunci(i16, x)) for e, x in enumerate((word, high))]
            for e, kind, constraint, value in parts:
                asm(
                    f"{{ .reg .pred p; setp.lt.s32 p, $2, {rows};"
                    f" setp.lt.and.s32 p, $3, {columns}, p;"
                    f" @p st.global.{kind} [$0+{offset + 2 * e}], $1; }}",
                    f"l,{constraint},r,r,~{{memory}}",
                    [address, value, own_row, arith.addi(column, int32(8 * half + e))],
                )

    store(ref, tile, jnp.int32(first_row), jnp.int32(first_column))


def store_by_quads(ref, tile: jax.Array) -> None:
    """Stores a `(64, 64)` 16-bit tile to a view of global memory, columns in an order of its own.

    A thread's columns of a row stand side by side, so that it stores 16 bytes at a time and a quad
    of threads a whole row of 128. `store_operand` puts rows in that order back in their places.
    """
    if interpreting():
        ref[...] = tile.reshape(64, 8, 4, 2).swapaxes(1, 2).reshape(64, 64)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), TILE))
    def store(_, ref, tile):
        i32 = ir.IntegerType.get_signless(32)
        words = {(g, half): llvm.bitcast(i32, x) for _, g, half, x in fragments(tile.registers)}
        own_columns = arith.muli(arith.andi(thread_index(), int32(3)), int32(32))
        offset = arith.addi(arith.muli(row_of_thread(), int32(128)), own_columns)
        address = global_address(ref, offset)
        for half, first in itertools.product(range(2), (0, 4)):
            asm(
                f"st.global.v4.b32 [$0+{1024 * half + 4 * first}], {{$1, $2, $3, $4}};",
                "l,r,r,r,r,~{memory}",
                [address, *(words[group, half] for group in range(first, first + 4))],
            )

    store(ref, tile)


def store_column_sums(ref, tile: jax.Array) -> None:
    """Stores what each warp's 16 rows of a `(64, n)` float32 tile add up to, in a `(4, n)` view."""
    if interpreting():
        ref[...] = tile.reshape(4, 16, -1).sum(1)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), TILE))
    def store(_, ref, tile):
        row_stride = ir.MemRefType(ref.type).get_strides_and_offset()[0][0]
        thread = thread_index()
        lane = arith.andi(thread, int32(31))
        column = arith.muli(arith.andi(thread, int32(3)), int32(8))
        warp = arith.shrui(thread, int32(5))
        address = arith.addi(global_address(ref, column), bytes_to(warp, 4 * row_stride))
        pairs = {(group, half): pair for _, group, half, pair in fragments(tile.registers)}
        for group in range(len(pairs) // 2):
            sums = []
            for e in range(2):
                total = arith.addf(*(extract(pairs[group, half], e) for half in range(2)))
                for distance in (4, 8, 16):
                    total = arith.addf(total, mgpu_utils.shfl_bfly(total, distance))
                sums.append(total)
            asm(
                "{ .reg .pred p; setp.lt.u32 p, $1, 4;"
                f" @p st.global.v2.f32 [$0+{32 * group}], {{$2, $3}}; }}",
                "l,r,f,f,~{memory}",
                [address, lane, *sums],
            )

    store(ref, tile)


def _of_lane(x: ir.Value, lane: ir.Value) -> ir.Value:
    """A float32 of another lane."""
    i32 = ir.IntegerType.get_signless(32)
    bits = llvm.bitcast(i32, x)
    bits = nvvm.shfl_sync(int32(-1), bits, lane, int32(31), nvvm.ShflKind.idx)
    return llvm.bitcast(x.type, bits)


def store_diagonal_sums(ref, tile: jax.Array) -> None:
    """Stores what the diagonals of each warp's 16 rows of a `(64, n)` float32 tile add up to.

    Args:
      ref: a `(4, n + 16)` view of global memory; element (i, j) of a warp's rows is added to column
        j - i + 16, and the first column is 0.
    """
    rows, columns = 16, tile.shape[1]
    if interpreting():
        own = tile.reshape(4, rows, columns)
        moved = (jnp.pad(own[:, row], ((0, 0), (rows - row, row))) for row in range(rows))
        ref[...] = sum(moved)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), TILE))
    def store(_, ref, tile):
        row_stride = ir.MemRefType(ref.type).get_strides_and_offset()[0][0]
        zero = arith.constant(tile.mlir_dtype, 0.0)
        thread = thread_index()
        lane = arith.andi(thread, int32(31))
        quad, row = arith.andi(lane, int32(3)), arith.shrui(lane, int32(2))
        pairs = {(group, half): pair for _, group, half, pair in fragments(tile.registers)}
        groups = len(pairs) // 2

        def value(group, half, e):
            return extract(pairs[group, half], e) if 0 <= group < groups else zero

        # Rows i and i + 8 of a thread have the same diagonals in groups one apart.
        own = {
            (group, e): arith.addf(value(group, 0, e), value(group + 1, 1, e))
            for group in range(-1, groups)
            for e in range(2)
        }
        is_odd = arith.cmpi(arith.CmpIPredicate.ne, arith.andi(row, int32(1)), int32(0))
        address = global_address(ref, arith.muli(quad, int32(8)))
        address = arith.addi(address, bytes_to(arith.shrui(thread, int32(5)), 4 * row_stride))
        sums: dict[tuple[int, int], ir.Value] = {}
        for e in range(2):
            # What is added to column m of a group is in column m + row, here or in the next group.
            column = arith.addi(arith.addi(arith.muli(quad, int32(2)), int32(e)), row)
            is_next = arith.cmpi(arith.CmpIPredicate.sge, column, int32(8))
            source = arith.shrui(arith.andi(column, int32(7)), int32(1))
            source = arith.ori(source, arith.andi(lane, int32(28)))
            moved = {-2: zero, groups: zero}
            for group in range(-1, groups):
                given = arith.select(is_odd, own[group, 1 - e], own[group, e])
                moved[group] = _of_lane(given, source)
            for group in range(-2, groups):
                total = arith.select(is_next, moved[group + 1], moved[group])
                for distance in (4, 8, 16):
                    total = arith.addf(total, mgpu_utils.shfl_bfly(total, distance))
                sums[group, e] = total
        for group in range(-2, groups):
            asm(
                "{ .reg .pred p; setp.lt.u32 p, $1, 4;"
                f" @p st.global.v2.f32 [$0+{32 * (group + 2)}], {{$2, $3}}; }}",
                "l,r,f,f,~{memory}",
                [address, lane, *(sums[group, e] for e in range(2))],
            )

    store(ref, tile)
