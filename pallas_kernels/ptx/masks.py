"""Elements of a tile that are kept: by their column, or as a row and a column are equal."""

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_kernels.interpret import interpreting
from pallas_kernels.ptx.mlir import (
    COLUMNS,
    ROWS,
    TILE,
    asm,
    bit_mask,
    column_of_thread,
    columns_like,
    extract,
    fragments,
    insert,
    int32,
    like_array,
    pair_reader,
    result_type,
    rows_like,
    scalar,
)


def keep_columns_to(tile: jax.Array, last: jax.Array, fill: float) -> jax.Array:
    """`(64, n)` float32 tile where column <= last[row], else `fill`; last is `(64,)` int32."""
    return _keep_columns(tile, last, fill, arith.CmpIPredicate.sge, lax.ge)


def keep_columns_from(tile: jax.Array, first: jax.Array, fill: float) -> jax.Array:
    """`(64, n)` float32 tile where column >= first[row], else `fill`; first is `(64,)` int32."""
    return _keep_columns(tile, first, fill, arith.CmpIPredicate.sle, lax.le)


def _keep_columns(tile, bound, fill, predicate, compare):
    """Compares a bound per row with column numbers that are immediates.

    A two-dimensional iota in registers costs a register and several instructions an element.
    """
    if interpreting():
        bounds = lax.broadcast_in_dim(bound, tile.shape, [0])
        keep = compare(bounds, lax.broadcasted_iota(jnp.int32, tile.shape, 1))
        return jnp.where(keep, tile, fill)

    shape = result_type(tile.shape, jnp.float32, layout=TILE)

    @plgpu.inline_mgpu(arg_types=(TILE, ROWS), return_type=shape)
    def keep(_, tile, bound):
        own_column = column_of_thread()
        bounds = [arith.subi(scalar(r), own_column) for r in bound.registers.flat]
        filler = arith.constant(ir.F32Type.get(), ir.FloatAttr.get(ir.F32Type.get(), fill))
        out = tile.registers.copy()
        for index, group, half, pair in fragments(tile.registers):
            for e in range(2):
                ok = arith.cmpi(predicate, bounds[half], int32(8 * group + e))
                pair = insert(pair, arith.select(ok, extract(pair, e), filler), e)
            out[index] = pair
        return like_array(tile, out)

    return keep(tile, bound)


def keep_equal_columns(
    tile: jax.Array, rows: jax.Array, ref, first, fill: float, last: jax.Array | None = None
) -> jax.Array:
    """`(64, n)` float32 tile where a row's value is equal to a column's, else `fill`.

    Args:
      tile: n a multiple of 8.
      rows: `(64,)` int32.
      ref: a one-dimensional int32 view of global memory, of the columns' values from `first` on;
        that place is aligned to 8 bytes.
      last: None, or `(64,)` int32, where a row's columns behind last[row] are `fill` too.
    """
    if interpreting():
        keep = rows[:, None] == ref[pl.ds(first, tile.shape[1])][None, :]
        if last is not None:
            keep &= lax.broadcasted_iota(jnp.int32, tile.shape, 1) <= last[:, None]
        return jnp.where(keep, tile, fill)

    shape = result_type(tile.shape, jnp.float32, layout=TILE)
    splat = plgpu.Layout.WG_SPLAT
    bounds = () if last is None else (last,)
    layouts = TILE, ROWS, plgpu.RefType(), splat, *[ROWS] * len(bounds)
    keep_both = (
        "{ .reg .pred p; setp.ge.s32 p, $1, $2;"
        " setp.eq.and.s32 p, $3, $4, p; selp.f32 $0, $5, $6, p; }"
    )

    @plgpu.inline_mgpu(arg_types=layouts, return_type=shape)
    def keep(_, tile, rows, ref, first, *bounds):
        read_pair = pair_reader(ref, first)
        own = [scalar(r) for r in rows.registers.flat]
        own_column = column_of_thread()
        limits = [arith.subi(scalar(r), own_column) for x in bounds for r in x.registers.flat]
        filler = arith.constant(ir.F32Type.get(), ir.FloatAttr.get(ir.F32Type.get(), fill))
        out = tile.registers.copy()
        columns: dict[int, list] = {}
        for index, group, half, pair in fragments(tile.registers):
            if group not in columns:
                columns[group] = read_pair(group)
            for e, value in enumerate(columns[group]):
                x = extract(pair, e)
                if last is None:
                    is_equal = arith.cmpi(arith.CmpIPredicate.eq, own[half], value)
                    kept = arith.select(is_equal, x, filler)
                else:  # LLVM would make two selects of a conjunction
                    operands = [limits[half], int32(8 * group + e), own[half], value, x, filler]
                    kept = asm(keep_both, "=f,r,n,r,r,f,f", operands, ir.F32Type.get())
                pair = insert(pair, kept, e)
            out[index] = pair
        return like_array(tile, out)

    return keep(tile, rows, ref, jnp.int32(first), *bounds)


def equal_columns(rows: jax.Array, ref, first, columns: int) -> jax.Array:
    """Where a row's value is equal to a column's, for `bits_from`, `bits_to` and `keep_bits` alone.

    Every thread has a bit for each of its elements, two registers in all. The result passes for one
    of a value a row, which it is not: each thread of a quad has bits of its own.

    Args:
      rows: `(64,)` int32.
      ref: a one-dimensional int32 view of global memory, of the columns' values from `first` on;
        that place is aligned to 8 bytes.
      columns: how many, a multiple of 8 and at most 128.
    """
    if interpreting():
        return rows[:, None] == ref[pl.ds(first, columns)][None, :]

    shape = result_type((64,), jnp.int32, layout=ROWS)
    splat = plgpu.Layout.WG_SPLAT

    @plgpu.inline_mgpu(arg_types=(ROWS, plgpu.RefType(), splat), return_type=shape)
    def equal(_, rows, ref, first):
        i32 = ir.IntegerType.get_signless(32)
        read_pair = pair_reader(ref, first)
        own = [scalar(r) for r in rows.registers.flat]
        bits = [int32(0)] * 2
        for group in range(columns // 8):
            for e, value in enumerate(read_pair(group)):
                for half in range(2):
                    is_equal = arith.cmpi(arith.CmpIPredicate.eq, own[half], value)
                    bit = arith.select(is_equal, bit_mask(2 * group + e), int32(0))
                    bits[half] = arith.ori(bits[half], bit)
        # The compiler must not see through them, and keep all comparisons in their stead.
        opaque = [asm("mov.b32 $0, $1;", "=r,r", [x], i32) for x in bits]
        return rows_like(rows, opaque)

    return equal(rows, ref, jnp.int32(first))


def all_columns(rows: int, columns: int, there=True) -> jax.Array:
    """What `equal_columns` gives where all are equal; or none, unless the bool `there` is true."""
    if interpreting():
        return jnp.broadcast_to(there, (rows, columns))
    bits = jnp.where(there, jnp.int32(-1), jnp.int32(0))
    return plgpu.layout_cast(jnp.broadcast_to(bits, (rows,)), ROWS)


def no_columns(columns: int) -> jax.Array:
    """What `equal_columns` gives where none is equal, for `with_columns`."""
    if interpreting():
        return jnp.zeros((64, columns), bool)
    return plgpu.layout_cast(jnp.zeros((64,), jnp.int32), ROWS)


def column_numbers(columns: int) -> jax.Array:
    """`(columns,)` int32, the numbers of a tile's columns, made anew like `compiler.fresh_zero`."""
    if interpreting():
        return lax.iota(jnp.int32, columns)

    zeros = plgpu.layout_cast(jnp.zeros((columns,), jnp.int32), COLUMNS)
    shape = result_type((columns,), jnp.int32, layout=COLUMNS)

    @plgpu.inline_mgpu(arg_types=(COLUMNS,), return_type=shape)
    def numbers(_, like):
        own = column_of_thread()
        count = 2 * len(like.registers.flat)
        values = [arith.addi(own, int32(n // 2 * 8 + n % 2)) for n in range(count)]
        return columns_like(like, values)

    return numbers(zeros)


def with_columns(bits: jax.Array, tile: jax.Array, first: int) -> jax.Array:
    """What `equal_columns` gave, and where a bool tile of some columns, from `first` on, is true.

    In interpret mode the tile has all columns.
    """
    if interpreting():
        return bits | tile

    shape = result_type((64,), jnp.int32, layout=ROWS)

    @plgpu.inline_mgpu(arg_types=(ROWS, TILE), return_type=shape)
    def put(_, bits, tile):
        words = [scalar(r) for r in bits.registers.flat]
        for _, group, half, pair in fragments(tile.registers):
            for e in range(2):
                is_set = arith.cmpi(arith.CmpIPredicate.ne, extract(pair, e), int32(0))
                bit = arith.select(is_set, bit_mask(first // 4 + 2 * group + e), int32(0))
                words[half] = arith.ori(words[half], bit)
        # The compiler must not see through them, and keep all comparisons in their stead.
        i32 = ir.IntegerType.get_signless(32)
        return rows_like(bits, [asm("mov.b32 $0, $1;", "=r,r", [x], i32) for x in words])

    return put(bits, jnp.where(tile, jnp.int32(1), jnp.int32(0)))


def bits_from(bits: jax.Array, first: jax.Array) -> jax.Array:
    """What `equal_columns` gave, without columns < first[row]; first is `(64,)` int32."""
    if interpreting():
        return bits & (lax.broadcasted_iota(jnp.int32, bits.shape, 1) >= first[:, None])
    return _bits_masked(bits, first, 0)


def bits_to(bits: jax.Array, last: jax.Array) -> jax.Array:
    """What `equal_columns` gave, without columns > last[row]; last is `(64,)` int32."""
    if interpreting():
        return bits & (lax.broadcasted_iota(jnp.int32, bits.shape, 1) <= last[:, None])
    return _bits_masked(bits, last + 1, -1)


def _bits_masked(bits, bound, flip: int):
    """Bits from bound[row] on, or with flip = -1 those before it."""
    shape = result_type((64,), jnp.int32, layout=ROWS)

    @plgpu.inline_mgpu(arg_types=(ROWS, ROWS), return_type=shape)
    def mask(_, bits, bound):
        i32 = ir.IntegerType.get_signless(32)
        own_column, masked = column_of_thread(), []
        for word, row_bound in zip(bits.registers.flat, bound.registers.flat, strict=True):
            # A thread has two of 8 columns: of those before the bound there are so many its own.
            before = arith.maxsi(arith.subi(scalar(row_bound), own_column), int32(0))
            groups, rest = arith.shrui(before, int32(3)), arith.andi(before, int32(7))
            count = arith.addi(arith.addi(groups, groups), arith.minsi(rest, int32(2)))
            # The shift by PTX, as 32 and more shift all out there.
            kept = asm("shl.b32 $0, -1, $1;", "=r,r", [count], i32)
            kept = arith.xori(kept, int32(flip)) if flip else kept
            masked.append(arith.andi(scalar(word), kept))
        return rows_like(bits, masked)

    return mask(bits, bound)


def keep_bits(tile: jax.Array, bits: jax.Array, fill: float) -> jax.Array:
    """`(64, n)` float32 tile where the bit of `equal_columns` is set, else `fill`."""
    if interpreting():
        return jnp.where(bits, tile, fill)

    shape = result_type(tile.shape, jnp.float32, layout=TILE)

    @plgpu.inline_mgpu(arg_types=(TILE, ROWS), return_type=shape)
    def keep(_, tile, bits):
        filler = arith.constant(ir.F32Type.get(), ir.FloatAttr.get(ir.F32Type.get(), fill))
        words = [scalar(r) for r in bits.registers.flat]
        out = tile.registers.copy()
        for index, group, half, pair in fragments(tile.registers):
            for e in range(2):
                bit = arith.andi(words[half], bit_mask(2 * group + e))
                ok = arith.cmpi(arith.CmpIPredicate.ne, bit, int32(0))
                pair = insert(pair, arith.select(ok, extract(pair, e), filler), e)
            out[index] = pair
        return like_array(tile, out)

    return keep(tile, bits)
