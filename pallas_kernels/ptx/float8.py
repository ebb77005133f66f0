"""FP8: weights in float16, and operands in e4m3.

Of each 16 columns, as a thread has them: two side by side, and two that are 8 columns behind. The
product that takes them has 4 side by side. Both of its operands have their 16 in this order.
"""

import itertools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.interpret import interpreting
from pallas_kernels.ptx.mlir import (
    ROWS,
    TILE,
    asm,
    fragments,
    insert,
    int32,
    like_array,
    result_type,
    rows_like,
    scalar,
    shared_address,
    thread_index,
    zero_tile,
)
from pallas_kernels.ptx.operands import float8_box, float8_operand


def half_weights(logits: jax.Array, factor: jax.Array, reference: jax.Array) -> jax.Array:
    """2^(factor * logits - reference), float16 as logits, `(64, n)`.

    factor and reference are `(64,)` float32, one value a row, cast to float16. All weights of a row
    are NaN where the reference is 2048 or more from 0, or the factor beyond float16's range.
    """
    if interpreting():
        factor, start = (x.astype(jnp.float16) for x in (factor, -reference))
        wrong = (start * 32 + factor * 0) * 0  # NaN of what is infinite
        exponents = logits.astype(jnp.float32) * factor.astype(jnp.float32)[:, None]
        exponents += (wrong + start).astype(jnp.float32)[:, None]
        # Of float16, XLA's own is off by 1% on a CPU.
        return jnp.exp2(lax.reduce_precision(exponents, 5, 10)).astype(jnp.float16)

    shape = result_type(logits.shape, jnp.float16, layout=TILE)

    @plgpu.inline_mgpu(arg_types=(TILE, ROWS, ROWS), return_type=shape)
    def compute(_, tile, factor, reference):
        i32 = ir.IntegerType.get_signless(32)
        factors, starts = [], []  # of the two row halves, each twice in a word
        for own in zip(factor.registers.flat, reference.registers.flat, strict=True):
            own_factor, own_reference = map(scalar, own)
            factors.append(
                llvm.inline_asm(i32, [own_factor], "cvt.rn.f16x2.f32 $0, $1, $1;", "=r,f")
            )
            starts.append(
                llvm.inline_asm(
                    i32,
                    [own_reference, factors[-1], int32(0x50005000), int32(0)],  # 32 and 0, twice
                    "{ .reg .f32 start; .reg .b32 wrong; neg.f32 start, $1;"
                    " cvt.rn.f16x2.f32 $0, start, start;"
                    " mul.rn.f16x2 wrong, $2, $4; fma.rn.f16x2 wrong, $0, $3, wrong;"
                    " fma.rn.f16x2 $0, wrong, $4, $0; }",
                    "=&r,f,r,r,r",
                )
            )
        # The compiler puts both halves of an ex2.f16x2 together anew for each use; not so a `prmt`.
        text = (
            "{ .reg .b16 low, high; .reg .b32 first, second; fma.rn.f16x2 $0, $1, $2, $3;"
            " mov.b32 {low, high}, $0; ex2.approx.f16 low, low; ex2.approx.f16 high, high;"
            " cvt.u32.u16 first, low; cvt.u32.u16 second, high;"
            " prmt.b32 $0, first, second, 0x5410; }"
        )
        out = np.empty_like(tile.registers)
        for index, _, half, pair in fragments(tile.registers):
            operands = [mgpu_utils.bitcast(pair, i32), factors[half], starts[half]]
            word = llvm.inline_asm(i32, operands, text, "=r,r,r,r")
            out[index] = mgpu_utils.bitcast(word, pair.type)
        return like_array(tile, out)

    return compute(logits, factor, reference)


def half_maxima(tile: jax.Array) -> jax.Array:
    """`(64,)` float32: the maximum of each row of a float16 tile; NaN where one is."""
    if interpreting():
        # XLA loses NaN in maxima over 64 and more on a CPU.
        maxima = tile.astype(jnp.float32).max(axis=1)
        return jnp.where(jnp.isnan(tile).any(axis=1), jnp.nan, maxima)

    zeros = plgpu.layout_cast(jnp.zeros((64,), jnp.float32), ROWS)
    shape = result_type((64,), jnp.float32, layout=ROWS)

    @plgpu.inline_mgpu(arg_types=(TILE, ROWS), return_type=shape)
    def compute(_, tile, like):
        maxima = []
        for word in _folded_halves(tile, "max.NaN.f16x2 $0, $1, $2;"):
            for distance in (1, 2):
                text = (
                    "{ .reg .b32 other;"
                    f" shfl.sync.bfly.b32 other, $1, {distance}, 31, 0xffffffff;"
                    " max.NaN.f16x2 $0, $1, other; }"
                )
                word = asm(text, "=r,r", [word], word.type)
            text = (
                "{ .reg .b16 low, high; mov.b32 {low, high}, $1;"
                " max.NaN.f16 low, low, high; cvt.f32.f16 $0, low; }"
            )
            maxima.append(llvm.inline_asm(ir.F32Type.get(), [word], text, "=f,r"))
        return rows_like(like, maxima)

    return compute(tile, zeros)


def half_sums(tile: jax.Array) -> jax.Array:
    """`(64, 8)` float32: of a `(64, n)` float16 tile the sums of each 8th column, in float16."""
    if interpreting():
        return tile.reshape(tile.shape[0], -1, 8).sum(axis=1).astype(jnp.float32)

    shape = result_type((64, 8), jnp.float32, layout=TILE)

    @plgpu.inline_mgpu(arg_types=(TILE, TILE), return_type=shape)
    def compute(_, tile, like):
        sums = _folded_halves(tile, "add.rn.f16x2 $0, $1, $2;")
        out = like.registers.copy()
        for index, _, half, pair in fragments(like.registers):
            for e, name in enumerate(("low", "high")):
                text = (
                    f"{{ .reg .b16 low, high; mov.b32 {{low, high}}, $1; cvt.f32.f16 $0, {name}; }}"
                )
                value = llvm.inline_asm(ir.F32Type.get(), [sums[half]], text, "=f,r")
                pair = insert(pair, value, e)
            out[index] = pair
        return like_array(like, out)

    return compute(tile, zero_tile(64, 8))


def _folded_halves(tile, text: str) -> list:
    """Of each row half of a float16 tile all words of this thread, put together two by two."""
    i32 = ir.IntegerType.get_signless(32)
    words: tuple[list, list] = [], []
    for _, _, half, pair in fragments(tile.registers):
        words[half].append(mgpu_utils.bitcast(pair, i32))
    folded = []
    for terms in words:
        while len(terms) > 1:  # a sum one by one would lose what is far below it
            two_by_two = zip(terms[0::2], terms[1::2], strict=True)
            terms = [llvm.inline_asm(i32, list(two), text, "=r,r,r") for two in two_by_two]
        folded += terms
    return folded


def to_float8(tile: jax.Array) -> jax.Array:
    """A `(64, n)` float16 tile in e4m3, as the left operand of a product from registers.

    Magnitudes above 448 become 448. On a GPU columns are in another order, that of the columns of
    what `transpose_float8` stores.
    """
    if interpreting():
        return jnp.clip(tile, -448, 448).astype(jnp.float8_e4m3fn)

    layout = plgpu.Layout.WGMMA_8BIT
    zeros = plgpu.layout_cast(jnp.zeros(tile.shape, jnp.float8_e4m3fn), layout)
    shape = result_type(tile.shape, jnp.float8_e4m3fn, layout=layout)

    @plgpu.inline_mgpu(arg_types=(TILE, layout), return_type=shape)
    def cast(_, tile, like):
        i32 = ir.IntegerType.get_signless(32)
        pairs = {(group, half): pair for _, group, half, pair in fragments(tile.registers)}
        out = like.registers.copy()
        for index, group, half, quad in fragments(like.registers):  # groups of 16
            word = llvm.inline_asm(
                i32,
                [mgpu_utils.bitcast(pairs[2 * group + n, half], i32) for n in range(2)],
                "{ .reg .b16 low, high;"
                " cvt.rn.satfinite.e4m3x2.f16x2 low, $1;"
                " cvt.rn.satfinite.e4m3x2.f16x2 high, $2;"
                " mov.b32 $0, {low, high}; }",
                "=r,r,r",
            )
            out[index] = mgpu_utils.bitcast(word, quad.type)
        return like_array(like, out)

    return cast(tile, zeros)


def transpose_float8(target, source) -> None:
    """Stores `(keys, n)` source to `(n, keys)` target, in shared memory, by one warpgroup.

    Both are e4m3, in boxes of 128 columns, or 64 where that does not divide them, that are swizzled
    as wide. n and keys are multiples of 64. On a GPU the columns of the target are in the order of
    `to_float8`.
    """
    if interpreting():
        target[...] = source[...].T
        return

    keys, columns = source.shape
    target_box, source_box = float8_box(keys), float8_box(columns)
    transforms = float8_operand(keys), float8_operand(columns)

    def swizzled(chunk, row, box: int):
        """The place of 16 bytes in a row of a box."""
        return arith.xori(chunk, row if box == 128 else arith.shrui(row, int32(1)))

    @plgpu.inline_mgpu(arg_types=tuple(plgpu.RefType(x) for x in transforms))
    def transpose(_, target, source):
        i32 = ir.IntegerType.get_signless(32)
        four = llvm.StructType.get_literal([i32] * 4)
        thread = thread_index()
        warp, lane = arith.shrui(thread, int32(5)), arith.andi(thread, int32(31))
        # A warp takes every fourth 16 columns of the source, 32 rows at a time: 4 matrices of 8
        # rows by 8 pairs. 8 lanes each give the addresses of a matrix's rows.
        matrix, row = arith.shrui(lane, int32(3)), arith.andi(lane, int32(7))
        # A lane then has the bytes of two columns, the pair of its number / 4, of 4 rows in two
        # words. It puts those of a column into one word. The first word has the even column in
        # lanes of the pairs 0 to 3 and the odd one in the others, so that the 8 rows that an
        # instruction stores differ in their place among 8, by which they are swizzled.
        is_late = arith.cmpi(arith.CmpIPredicate.sge, lane, int32(16))
        even, odd = int32(0x6420), int32(0x7531)
        selectors = [arith.select(is_late, odd, even), arith.select(is_late, even, odd)]
        read = shared_address(
            source,
            (matrix, 8 * columns),
            (row, source_box),
            (swizzled(warp, row, source_box), 16),
        )
        # Of matrices 0 and 2 the first word of 16 columns each, of 1 and 3 the second.
        is_second = arith.andi(matrix, int32(1))
        later = arith.extui(i32, arith.cmpi(arith.CmpIPredicate.sge, row, int32(4)))
        column = arith.addi(arith.muli(row, int32(2)), arith.xori(is_second, later))
        place = arith.andi(column, int32(7))
        write = shared_address(
            target,
            (warp, 16 * keys),
            (arith.shrui(column, int32(3)), 8 * keys),
            (place, target_box),
            (swizzled(arith.shrui(matrix, int32(1)), place, target_box), 16),
        )

        def load(first_row: int, first_column: int) -> list:
            box, column = divmod(first_column, source_box)
            loaded = asm(
                "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16"
                f" {{$0, $1, $2, $3}}, [$4+{first_row * columns + 8 * source_box * box}];",
                "=r,=r,=r,=r,r,~{memory}",
                [arith.xori(read, int32(column))],
                four,
            )
            return [llvm.extractvalue(i32, loaded, [e]) for e in range(4)]

        def store(first_row: int, first_column: int, words: list) -> None:
            values = [
                asm("prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [*words[e : e + 2], selector], i32)
                for e in (0, 2)
                for selector in selectors
            ]
            box, key = divmod(first_row, target_box)
            asm(
                "stmatrix.sync.aligned.m8n8.x4.shared.b16"
                f" [$0+{first_column * keys + 8 * target_box * box}], {{$1, $2, $3, $4}};",
                "r,r,r,r,r,~{memory}",
                [arith.xori(write, int32(key)), *values],
            )

        units = list(itertools.product(range(0, keys, 32), range(0, columns, 64)))
        for some in itertools.batched(units, _LOADS):
            for unit, words in zip(some, [load(*unit) for unit in some], strict=True):
                store(*unit, words)

    transpose(target, source)


_LOADS = 2  # on their way at a time, of 4 registers each
