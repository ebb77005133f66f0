"""Loads from global memory."""

import itertools
import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.interpret import interpreting
from pallas_kernels.ptx.mlir import (
    COLUMNS,
    ROWS,
    TILE,
    asm,
    base_address,
    bytes_to,
    clamped,
    extract,
    global_address,
    insert,
    int32,
    like_array,
    result_type,
    row_of_thread,
    rows_like,
    scalar,
    thread_index,
)


def load_rows(ref, first, last) -> jax.Array:
    """`(64,)` float32 or int32, one value a row, from row `first` of a view of global memory on.

    Rows after `last` read as `last`: nothing is read out of bounds, at any alignment.
    """
    if interpreting():
        return ref[...][jnp.minimum(first + jnp.arange(64), last)]

    is_float = ref.dtype == jnp.float32
    zeros = plgpu.layout_cast(jnp.zeros((64,), ref.dtype), ROWS)
    shape = result_type((64,), ref.dtype, layout=ROWS)
    splat = plgpu.Layout.WG_SPLAT

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), splat, splat, ROWS), return_type=shape)
    def load(_, ref, first, last, like):
        first, last = first.registers[()], last.registers[()]
        row = arith.addi(first, row_of_thread())
        value_type = ir.F32Type.get() if is_float else ir.IntegerType.get_signless(32)
        values = [
            asm(
                f"ld.global.nc.{'f' if is_float else 'b'}32 $0, [$1];",
                "=f,l" if is_float else "=r,l",
                [global_address(ref, arith.muli(clamped(row, half, last), int32(4)))],
                value_type,
            )
            for half in range(2)
        ]
        return rows_like(like, values)

    return load(ref, jnp.int32(first), jnp.int32(last), zeros)


def prefetch(ref, wanted) -> None:
    """Has what a ref to contiguous float32 in global memory holds come to L2, if `wanted`.

    All of a warpgroup call it; nothing waits for it.
    """
    if interpreting():
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT))
    def start(_, ref, wanted):
        size = 4 * math.prod(ref.type.shape)
        asm(
            "{ .reg .pred p; setp.lt.u32 p, $1, $2;"
            f" @p cp.async.bulk.prefetch.L2.global [$0], {size}; }}",
            "l,r,r,~{memory}",
            [base_address(ref), thread_index(), wanted.registers[()]],
        )

    start(ref, wanted.astype(jnp.int32))


def load_intervals(ref, first, last) -> tuple[jax.Array, jax.Array]:
    """Where the intervals of 64 rows begin and end, as `load_rows`, from a `(2, rows)` view."""
    begin, end = (load_rows(ref.at[n], first, last) for n in range(2))
    return begin, end


def count_sorted(ref, rows: jax.Array, *, or_equal: bool) -> jax.Array:
    """How many values of a one-dimensional int32 view of global memory, which rise, are less.

    Args:
      rows: `(64,)` int32: less than each row's value.
      or_equal: or equal to it.
    """
    (count,) = ref.shape
    if interpreting():
        side = "right" if or_equal else "left"
        return jnp.searchsorted(ref[...], rows, side=side).astype(jnp.int32)

    shape = result_type((64,), jnp.int32, layout=ROWS)

    @plgpu.inline_mgpu(arg_types=(ROWS, plgpu.RefType()), return_type=shape)
    def search(_, rows, ref):
        i32 = ir.IntegerType.get_signless(32)
        predicate = arith.CmpIPredicate.sle if or_equal else arith.CmpIPredicate.slt
        found = []
        for value in map(scalar, rows.registers.flat):
            place = int32(0)  # so many are known to be
            for bit in reversed(range(count.bit_length())):
                further = arith.addi(place, int32(1 << bit))
                last = arith.subi(arith.minsi(further, int32(count)), int32(1))
                address = global_address(ref, arith.muli(last, int32(4)))
                other = asm("ld.global.nc.b32 $0, [$1];", "=r,l", [address], i32)
                there = arith.cmpi(arith.CmpIPredicate.sle, further, int32(count))
                there = arith.andi(there, arith.cmpi(predicate, other, value))
                place = arith.select(there, further, place)
            found.append(place)
        return rows_like(rows, found)

    return search(rows, ref)


def row_products(a_ref, b_ref, first, last, copy: tuple[Any, Any] | None = None) -> jax.Array:
    """`(64,)` float32 rowsum(a * b) of rows of two 16-bit views `(rows, n)` of global memory.

    From row `first` on; rows after `last` read as `last`. n / 8 lanes read a row together, 16 bytes
    each, so that a warp reads whole rows. Each quad of them then gets the sum of one row. Where
    n / 8 is no power of two, or below 4, lanes that read the last bytes again fill up.

    Args:
      copy: None, or a view like b that gets these rows of b, of which those are 0 where the other,
        `(rows,)` float32, is -inf: what NaN there is takes no part in products that follow.
    """
    if interpreting():
        rows = jnp.minimum(first + jnp.arange(64), last)
        a, b = (ref[...][rows] for ref in (a_ref, b_ref))
        if copy is not None:
            copy_ref, marks_ref = copy
            kept = jnp.where(jnp.isneginf(marks_ref[...][rows])[:, None], 0, b)

            @pl.loop(0, jnp.clip(last + 1 - first, 0, 64))
            def _store(n):
                copy_ref[first + n] = kept[n]

        return (a.astype(jnp.float32) * b.astype(jnp.float32)).sum(1)

    zeros = plgpu.layout_cast(jnp.zeros((64,), jnp.float32), ROWS)
    shape = result_type((64,), jnp.float32, layout=ROWS)
    copies = copy or ()
    refs, splats = (plgpu.RefType(),) * (2 + len(copies)), (plgpu.Layout.WG_SPLAT,) * 2

    @plgpu.inline_mgpu(arg_types=(*refs, *splats, ROWS), return_type=shape)
    def products(_, a_ref, b_ref, *args):
        *copies, first, last, like = args
        i32 = ir.IntegerType.get_signless(32)
        first, last = first.registers[()], last.registers[()]
        row_type = ir.MemRefType(a_ref.type)
        strides, _ = row_type.get_strides_and_offset()
        pieces = row_type.shape[1] // 8  # of a row, of 16 bytes
        lanes = max(4, 1 << (pieces - 1).bit_length())  # that read a row together
        rows = lanes // 4  # that they read one after the other
        lane = arith.andi(thread_index(), int32(31))
        quad = arith.andi(arith.shrui(lane, int32(2)), int32(rows - 1))  # among those lanes
        first_row = arith.subi(arith.addi(first, row_of_thread()), quad)
        piece = arith.andi(lane, int32(lanes - 1))
        if pieces < lanes:
            has_piece = arith.cmpi(arith.CmpIPredicate.slt, piece, int32(pieces))
            piece = arith.minsi(piece, int32(pieces - 1))
        column = arith.muli(piece, int32(16))
        bases = [global_address(ref, column) for ref in (a_ref, b_ref)]

        def load(row):
            offset = bytes_to(row, 2 * strides[0])
            return [
                asm(
                    "ld.global.nc.L1::no_allocate.v4.b32 {$0, $1, $2, $3}, [$4];",
                    "=r,=r,=r,=r,l",
                    [arith.addi(base, offset)],
                    llvm.StructType.get_literal([i32] * 4),
                )
                for base in bases
            ]

        def store_copy(row, words):
            copy_ref, marks_ref = copies
            target_strides, _ = ir.MemRefType(copy_ref.type).get_strides_and_offset()
            target = global_address(copy_ref, column)
            asm(
                "{ .reg .pred p; .reg .f32 x; .reg .b32 w<4>; ld.global.nc.f32 x, [$1];"
                " setp.neu.f32 p, x, 0fFF800000;"
                + "".join(f" selp.b32 w{n}, ${n + 2}, 0, p;" for n in range(4))
                + " st.global.v4.b32 [$0], {w0, w1, w2, w3}; }",
                "l,l,r,r,r,r,~{memory}",
                [
                    arith.addi(target, bytes_to(row, 2 * target_strides[0])),
                    arith.addi(base_address(marks_ref), bytes_to(row, 4)),
                    *(llvm.extractvalue(i32, words, [n]) for n in range(4)),
                ],
            )

        def multiply(a, b):
            """Sum of 8 products."""
            f32, total = ir.F32Type.get(), None
            pair_type = ir.VectorType.get((2,), row_type.element_type)
            for word in range(4):
                pairs = [llvm.bitcast(pair_type, llvm.extractvalue(i32, x, [word])) for x in (a, b)]
                for e in range(2):
                    x, y = (arith.extf(f32, extract(pair, e)) for pair in pairs)
                    total = arith.mulf(x, y) if total is None else llvm.intr_fma(x, y, total)
            if pieces < lanes:
                zero = arith.constant(f32, ir.FloatAttr.get(f32, 0.0))
                total = arith.select(has_piece, total, zero)
            return total

        def one_row_a_quad(sums):
            """Of one sum a row in each lane, that of its quad's row over all lanes."""
            while len(sums) > 1:
                half = len(sums) // 2
                upper = arith.cmpi(arith.CmpIPredicate.ne, arith.andi(quad, int32(half)), int32(0))
                pairs = list(zip(sums[:half], sums[half:], strict=True))
                kept = [arith.select(upper, high, low) for low, high in pairs]
                sent = [arith.select(upper, low, high) for low, high in pairs]
                sums = [
                    arith.addf(x, mgpu_utils.shfl_bfly(y, 4 * half))
                    for x, y in zip(kept, sent, strict=True)
                ]
            (total,) = sums
            for distance in (2, 1):
                total = arith.addf(total, mgpu_utils.shfl_bfly(total, distance))
            return total

        def own_rows(half):
            return (clamped(arith.addi(first_row, int32(n)), half, last) for n in range(rows))

        loaded = [[(row, load(row)) for row in own_rows(half)] for half in range(2)]
        if copies:
            for row, (_, words) in itertools.chain(*loaded):
                store_copy(row, words)
        sums = [one_row_a_quad([multiply(*x) for _, x in of_half]) for of_half in loaded]
        return rows_like(like, sums)

    return products(a_ref, b_ref, *copies, jnp.int32(first), jnp.int32(last), zeros)


def load_at(ref, places, *, by_row: bool = False, by_column: bool = False) -> jax.Array:
    """Elements of a one-dimensional view of global memory, of int32 or float32.

    Args:
      places: int32, within the view: a scalar, or in the layout of rows, of columns, or of a tile.
      by_row, by_column: by which places vary.
    """
    if interpreting():
        return ref[...][places]
    if not (by_row or by_column):
        return ref[places]

    layout = TILE if by_row and by_column else ROWS if by_row else COLUMNS
    shape = result_type(places.shape, jnp.int32, layout=layout)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout), return_type=shape)
    def load(_, ref, places):
        i32, base = ir.IntegerType.get_signless(32), base_address(ref)

        def read(place):
            address = arith.addi(base, bytes_to(place, 4))
            return asm("ld.global.nc.b32 $0, [$1];", "=r,l", [address], i32)

        out = places.registers.copy()
        for index, register in np.ndenumerate(places.registers):
            if not isinstance(register.type, ir.VectorType):
                out[index] = read(register)
                continue
            for e in range(ir.VectorType(register.type).shape[0]):
                register = insert(register, read(extract(register, e)), e)
            out[index] = register
        return like_array(places, out)

    found = load(ref, places)
    return lax.bitcast_convert_type(found, ref.dtype) if ref.dtype == jnp.float32 else found
