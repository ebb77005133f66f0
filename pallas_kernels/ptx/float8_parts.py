"""Float8 in two parts.

A number in e4m3 has 4 bits; what they leave over, 16 times, is another one: together 8 bits and a
sign, as many as bfloat16 has. An operand in two parts has the first parts of its rows, and behind
them the second parts, as rows of their own.
"""

import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.interpret import interpreting
from pallas_kernels.ptx.float8 import to_float8
from pallas_kernels.ptx.mlir import (
    TILE,
    asm,
    extract,
    fragments,
    int32,
    shared_address,
    thread_index,
)
from pallas_kernels.ptx.operands import float8_box, float8_operand
from pallas_kernels.ptx.queries import loaded_chunks, words_layout

_SECOND_PART = 16.0


def join_parts(product: jax.Array) -> jax.Array:
    """`(m, n)` product of which `(m, 2n)` is that with an operand of n rows in two parts."""
    columns = product.shape[1] // 2
    return product[:, :columns] + product[:, columns:] * (1 / _SECOND_PART)


def in_two_parts(rows):
    first = to_float8(rows)
    second = to_float8((rows - first.astype(jnp.float32)) * _SECOND_PART)
    return jnp.concatenate([first, second])


def store_queries_float8(target, units_ref, loaded: jax.Array, dtype) -> None:
    """As `store_queries`, to an operand in two parts, with the unit of each row.

    bfloat16 is exact down to 2^-13 of a row's largest element; float16 loses two bits.

    Args:
      target: `(2 * rows, n)` e4m3, in the form of `float8_operand(n)`.
      units_ref: `(rows,)` float32 in shared memory, powers of 2 to multiply logits with. Infinite
        for a row with an element that is not finite, whose parts are NaN then.
      loaded: rows from `load_queries`.
      dtype: of what they were loaded from.
    """
    rows, columns = units_ref.shape[0], target.shape[1]
    # The largest is from 2^7 on, and below 2^8.
    smallest = 2.0**-107
    if interpreting():
        wide = loaded.astype(jnp.float32)
        bits = lax.bitcast_convert_type(wide, jnp.int32) & 0x7FFFFFFF
        power = lax.bitcast_convert_type(bits.max(axis=1) & 0x7F800000, jnp.float32)
        units = jnp.maximum(power * 2.0**-7, smallest)
        units_ref[...] = units
        target[...] = in_two_parts(wide * (1.0 / units)[:, None])
        return

    box = float8_box(columns)
    is_bfloat16 = dtype == jnp.bfloat16
    types = plgpu.RefType(float8_operand(columns)), plgpu.RefType(), words_layout(loaded.size)

    @plgpu.inline_mgpu(arg_types=types)
    def store(_, target, units_ref, loaded):
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        element = ir.BF16Type.get() if is_bfloat16 else ir.F16Type.get()
        pair_type = ir.VectorType.get((2,), element)
        for row, chunk, words in loaded_chunks(loaded, columns):
            pairs = [llvm.bitcast(pair_type, word) for word in words]
            wide = [arith.extf(f32, extract(pair, e)) for pair in pairs for e in range(2)]
            magnitudes = [arith.andi(arith.bitcast(i32, x), int32(0x7FFFFFFF)) for x in wide]
            largest = functools.reduce(arith.maxsi, magnitudes)
            distance = columns // 16
            while distance:  # over the threads that have the row
                text = f"shfl.sync.bfly.b32 $0, $1, {distance}, 31, 0xffffffff;"
                largest = arith.maxsi(largest, asm(text, "=r,r", [largest], i32))
                distance //= 2
            power = arith.bitcast(f32, arith.andi(largest, int32(0x7F800000)))
            scale = arith.constant(f32, ir.FloatAttr.get(f32, 2.0**-7))
            floor = arith.constant(f32, ir.FloatAttr.get(f32, smallest))
            unit = arith.maximumf(arith.mulf(power, scale), floor)
            # 1 / unit, which for infinity is 0.
            exponent = arith.subi(int32(254 << 23), arith.bitcast(i32, unit))
            inverse = arith.bitcast(f32, arith.maxsi(exponent, int32(0)))
            scaled = [arith.mulf(x, inverse) for x in wide]
            quads = [_split_float8(scaled[n : n + 4]) for n in (0, 4)]
            row_in_tile, of_16 = arith.andi(row, int32(7)), arith.shrui(chunk, int32(1))
            swizzle = row_in_tile if box == 128 else arith.shrui(row_in_tile, int32(1))
            there = shared_address(
                target,
                (arith.shrui(row, int32(3)), 8 * columns),
                (arith.divui(of_16, int32(box // 16)), 8 * box),
                (row_in_tile, box),
                (arith.xori(arith.andi(of_16, int32(box // 16 - 1)), swizzle), 16),
                (arith.andi(chunk, int32(1)), 8),
            )
            asm(
                "{ .reg .pred p; setp.lt.s32 p, $1, " + str(rows) + ";"
                " @p st.shared.v2.b32 [$0], {$2, $3};"
                f" @p st.shared.v2.b32 [$0+{rows * columns}], {{$4, $5}};"
                " setp.eq.and.s32 p, $6, 0, p; @p st.shared.f32 [$7], $8; }",
                "r,r,r,r,r,r,r,r,f,~{memory}",
                [
                    there,
                    row,
                    *(quad[part] for part in range(2) for quad in quads),
                    chunk,
                    shared_address(units_ref, (row, 4)),
                    unit,
                ],
            )

    store(target, units_ref, loaded)


def store_weights_float8(target, weights: jax.Array) -> None:
    """Stores `(64, rows)` float32 weights, transposed, to an operand in two parts.

    The target is `(2 * rows, 64)` e4m3 in shared memory, in the form of `float8_operand(64)`. On a
    GPU its columns are in the order of those that `transpose_float8` stores. `commit_smem` must
    follow.
    """
    if interpreting():
        target[...] = in_two_parts(weights.T)
        return

    keys, rows = weights.shape

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(float8_operand(keys)), TILE))
    def store(_, target, weights):
        # Of 16 keys a thread has key g = lane / 4 and g + 8, of two columns. Their places are
        # 4 (g / 2) + g % 2 and 2 behind: the threads of g and g ^ 1 have the 4 bytes of a word,
        # that of one column for each of them.
        lane = arith.andi(thread_index(), int32(31))
        key = arith.shrui(lane, int32(2))
        is_odd = arith.cmpi(arith.CmpIPredicate.ne, arith.andi(key, int32(1)), int32(0))
        # Bytes of a word of both columns: column 0 of g and g + 8, then column 1.
        give = arith.select(is_odd, int32(0x5410), int32(0x7632))
        first, second = (
            arith.select(is_odd, int32(odd), int32(even))
            for even, odd in ((0x5140, 0x3524), (0x7160, 0x3726))
        )
        row = arith.addi(
            arith.muli(arith.andi(lane, int32(3)), int32(2)), arith.andi(key, int32(1))
        )
        warp = arith.shrui(thread_index(), int32(5))
        there = shared_address(
            target,
            (row, keys),
            (arith.xori(warp, arith.shrui(row, int32(1))), 16),
            (arith.shrui(key, int32(1)), 4),
        )
        pairs = {(group, half): pair for _, group, half, pair in fragments(weights.registers)}
        for group in range(rows // 8):
            values = [extract(pairs[group, half], e) for e in range(2) for half in range(2)]
            parts = _split_float8(values)
            text = (
                "{ .reg .b32 give, got, word;"
                " prmt.b32 give, $1, $2, $3;"
                " shfl.sync.bfly.b32 got, give, 4, 31, 0xffffffff;"
                " prmt.b32 word, $1, got, $4;"
                f" st.shared.b32 [$0+{8 * keys * group}], word;"
                " prmt.b32 word, $2, got, $5;"
                f" st.shared.b32 [$0+{8 * keys * group + keys * rows}], word; }}"
            )
            asm(text, "r,r,r,r,r,r,~{memory}", [there, *parts, give, first, second])

    store(target, weights)


def _split_float8(values: list) -> list:
    """Two words of 4 e4m3 each, the first parts and the second, of 4 float32."""
    i32 = ir.IntegerType.get_signless(32)
    # float16 has all the bits of both parts.
    parts = llvm.inline_asm(
        llvm.StructType.get_literal([i32] * 2),
        values,
        "{ .reg .b16 low, high; .reg .b32 x<2>, first<2>, sixteen;"
        " mov.b32 sixteen, 0x4c004c00;"
        " cvt.rn.f16x2.f32 x0, $3, $2;"
        " cvt.rn.f16x2.f32 x1, $5, $4;"
        " cvt.rn.satfinite.e4m3x2.f16x2 low, x0;"
        " cvt.rn.satfinite.e4m3x2.f16x2 high, x1;"
        " cvt.rn.f16x2.e4m3x2 first0, low;"
        " cvt.rn.f16x2.e4m3x2 first1, high;"
        " mov.b32 $0, {low, high};"
        " sub.rn.f16x2 x0, x0, first0;"
        " sub.rn.f16x2 x1, x1, first1;"
        " mul.rn.f16x2 x0, x0, sixteen;"
        " mul.rn.f16x2 x1, x1, sixteen;"
        " cvt.rn.satfinite.e4m3x2.f16x2 low, x0;"
        " cvt.rn.satfinite.e4m3x2.f16x2 high, x1;"
        " mov.b32 $1, {low, high}; }",
        "=&r,=&r,f,f,f,f",
    )
    return [llvm.extractvalue(i32, parts, [part]) for part in range(2)]
