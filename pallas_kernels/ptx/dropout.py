"""Which elements of a tile are dropped, and tiles without them."""

import functools
import itertools

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.dropout_words import SEVEN_BITS, four_values, reaches_limit
from pallas_kernels.interpret import interpreting
from pallas_kernels.ptx.mlir import (
    ROWS,
    TILE,
    extract,
    fragments,
    insert,
    int32,
    like_array,
    pair_reader,
    result_type,
    scalar,
)


def dropped_bytes(rows: jax.Array, ref, first, columns: int) -> jax.Array:
    """Which elements of a tile are dropped, as their `four_values` reach their limits.

    Args:
      rows: `(64,)` int32; of each 16, 8 words of rows, and 8 words of limits.
      ref: a one-dimensional int32 view of global memory, of the columns' words from `first` on,
        equal in the first and last 8 of 16; that place is aligned to 8 bytes.
      columns: how many, a multiple of 32.

    Returns:
      On a GPU `(64, columns / 4)` int32, of which each thread has its own elements', one to each
      byte's highest bit. In interpret mode `(64, columns)` bool.
    """
    if interpreting():
        return _dropped_in_numbers(rows, ref[pl.ds(first, columns)])

    zeros = plgpu.layout_cast(jnp.zeros((64, columns // 4), jnp.int32), TILE)
    shape = result_type(zeros.shape, jnp.int32, layout=TILE)
    splat = plgpu.Layout.WG_SPLAT

    @plgpu.inline_mgpu(arg_types=(ROWS, plgpu.RefType(), splat, TILE), return_type=shape)
    def add_limits(_, rows, ref, first, like):
        read_pair = pair_reader(ref, first)
        row, limits = (scalar(r) for r in rows.registers.flat)
        limits = arith.ori(limits, arith.shrui(limits, int32(8)))
        out = like.registers.copy()
        for index, group, half, pair in fragments(like.registers):
            for e, column in enumerate(read_pair(2 * (2 * group + half))):
                word = arith.addi(_four_values(row, column), limits)
                pair = insert(pair, word, e)
            out[index] = pair
        return like_array(like, out)

    return add_limits(rows, ref, jnp.int32(first), zeros)


def kept_operand(tile: jax.Array, dropped: jax.Array, dtype) -> jax.Array:
    """A `(64, n)` float32 tile as an operand, bfloat16 or float16, with 0 where it is dropped.

    dropped is what `dropped_bytes` gives.
    """
    if interpreting():
        return jnp.where(dropped, 0.0, tile).astype(dtype)

    shape = result_type(tile.shape, dtype, layout=TILE)

    @plgpu.inline_mgpu(arg_types=(TILE, TILE), return_type=shape)
    def cast(_, tile, dropped):
        i32 = ir.IntegerType.get_signless(32)
        element = mgpu_utils.dtype_to_ir_type(dtype)
        pair_type = ir.VectorType.get((2,), element)
        words = {2 * group + half: pair for _, group, half, pair in fragments(dropped.registers)}
        out = np.empty_like(tile.registers)
        for index, group, half, pair in fragments(tile.registers):
            # The sign of a byte of either word becomes 16 bits.
            byte = (9, 8)[half] + 2 * (group % 2)
            selector = 0x11 * byte + 0x1100 * (byte + 4)
            word = llvm.inline_asm(
                i32,
                [extract(x, e) for x in (pair, words[group // 2]) for e in range(2)],
                "{ .reg .b32 kept, dropped;"
                f" cvt.rn.{element}x2.f32 kept, $2, $1;"
                f" prmt.b32 dropped, $3, $4, {selector};"
                " not.b32 dropped, dropped; and.b32 $0, kept, dropped; }",
                "=r,f,f,r,r",
            )
            out[index] = llvm.bitcast(pair_type, word)
        return mgpu.FragmentedArray(_registers=out, _layout=tile.layout, _is_signed=None)

    return cast(tile, dropped)


def negate_dropped(tile: jax.Array, rows: jax.Array, ref, first, *, few: bool) -> jax.Array:
    """`(64, n)` float32 tile that is not negative, negated where `dropped_bytes` has it dropped.

    Args:
      tile: n a multiple of 16.
      rows, ref, first: as for `dropped_bytes`.
      few: whether limits are 2^6 or about that at most. They, or else 2^7 less them, are compared.
    """
    if interpreting():
        dropped = _dropped_in_numbers(rows, ref[pl.ds(first, tile.shape[1])])
        return jnp.where(dropped, -tile, tile)

    shape = result_type(tile.shape, jnp.float32, layout=TILE)
    splat = plgpu.Layout.WG_SPLAT

    @plgpu.inline_mgpu(arg_types=(TILE, ROWS, plgpu.RefType(), splat), return_type=shape)
    def negate(_, tile, rows, ref, first):
        read_pair = functools.cache(pair_reader(ref, first))
        row, limits = (scalar(r) for r in rows.registers.flat)
        words_of = lambda group, _, e: (row, limits, read_pair(group)[e])
        fours = [
            [((group, half, e), (group + 1, half, e)) for half in range(2)]
            for group, e in itertools.product(range(0, tile.shape[1] // 8, 2), range(2))
        ]
        # An addition, of which the units have most; the compiler makes a select of `neg`.
        return _negated_fours(tile, fours, words_of, few, "sub.f32 {0}, 0f00000000, {0};")

    return negate(tile, rows, ref, jnp.int32(first))


def negate_dropped_transposed(
    tile: jax.Array, rows: jax.Array, columns: jax.Array, *, few: bool
) -> jax.Array:
    """The same of a `(64, n)` tile of keys by queries.

    Args:
      tile: n a multiple of 16.
      rows: int32 words in the shape of tile, one value a row; equal in the first and last 8 of 16.
      columns: the same, one value a column; of each 16, 8 words of columns, and 8 words of limits.
      few: as for `negate_dropped`.
    """
    if interpreting():
        return jnp.where(_dropped_in_numbers(columns[0], rows[:, 0]).T, -tile, tile)

    shape = result_type(tile.shape, jnp.float32, layout=TILE)

    @plgpu.inline_mgpu(arg_types=(TILE, TILE, TILE), return_type=shape)
    def negate(_, tile, *words):
        rows, columns = (
            {(group, half): pair for _, group, half, pair in fragments(x.registers)} for x in words
        )

        def words_of(group, _, e):
            return [
                extract(pair, e)
                for pair in (columns[group, 0], columns[group + 1, 0], rows[group, 0])
            ]

        fours = [
            [((g, 0, e), (g, 1, e)) for g in (group, group + 1)]
            for group, e in itertools.product(range(0, tile.shape[1] // 8, 2), range(2))
        ]
        # The compiler makes a select of this; with an `xor` it would spill registers.
        return _negated_fours(tile, fours, words_of, few, "neg.f32 {0}, {0};")

    return negate(tile, rows, columns)


def _dropped_in_numbers(query_words, key_words) -> jax.Array:
    """Which of `(queries, keys)` are dropped, of words in the order that kernels have them in."""
    query_words, key_words = (x.astype(jnp.uint32) for x in (query_words, key_words))
    words, limits = jnp.moveaxis(query_words.reshape(-1, 2, 8), 1, 0)[..., None]
    values = four_values(words, key_words)
    later_key = (jnp.arange(key_words.size) & 8) > 0
    halves = [reaches_limit(values, limits, later, later_key) for later in (False, True)]
    return jnp.stack(halves, 1).reshape(query_words.size, key_words.size)


def _four_values(row, column):
    """`four_values` of two words."""
    i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
    # As LLVM has it, the upper words of factors, all 0, would be added up too.
    product = llvm.inline_asm(i64, [row, column], "mul.wide.u32 $0, $1, $2;", "=l,r,r")
    upper = arith.shrui(product, arith.constant(i64, ir.IntegerAttr.get(i64, 32)))
    value = arith.xori(arith.trunci(i32, upper), arith.trunci(i32, product))
    return arith.andi(value, int32(SEVEN_BITS))


def _negated_fours(tile, fours, words_of, few: bool, negation: str):
    """A float32 tile, negated where bytes of values reach their limits.

    Args:
      fours: four places of elements (column group, row half, place in the register pair) that share
        a value: those of a query's two keys, and of the query's 8 farther.
      words_of: the words of query, limits and key, of the first place of four.
      few: as for `negate_dropped`.
      negation: PTX that negates {0}.
    """
    f32 = ir.F32Type.get()
    # One instruction compares both halves of a word, as float16, the order of which is that of
    # their bits. Values beyond infinity are NaN, and limits are not: NaN is not `lt` them, but
    # `geu`. The lower byte of a half, that of another element, makes no difference to it.
    compare = "lt" if few else "geu"
    text = (
        f"{{ .reg .pred p, q; setp.{compare}.f16x2 p|q, $2, $5;"
        f" @p {negation.format('$0')} @q {negation.format('$1')} }}"
    )
    out = tile.registers.copy()
    index_of = {(group, half): index for index, group, half, _ in fragments(tile.registers)}
    for pairs in fours:
        query, limits, key = words_of(*pairs[0][0])
        value = _four_values(query, key)
        if few:  # 2^7 - 1 less the bytes
            value = arith.xori(value, int32(SEVEN_BITS))
        else:
            limits = arith.subi(int32(-0x7FFF8000), limits)  # 2^7 less each
        for pair, shift in zip(pairs, (0, 8), strict=True):
            halves = arith.shli(value, int32(shift))
            numbers = [extract(out[index_of[group, half]], e) for group, half, e in pair]
            results = llvm.inline_asm(
                llvm.StructType.get_literal([f32] * 2),
                [halves, *numbers, limits],
                text,
                "=f,=f,r,0,1,r",
            )
            for n, (group, half, e) in enumerate(pair):
                index = index_of[group, half]
                out[index] = insert(out[index], llvm.extractvalue(f32, results, [n]), e)
    return like_array(tile, out)


def positive_operand(tile: jax.Array, dtype) -> jax.Array:
    """A float32 tile as an operand, bfloat16 or float16, with 0 where it is negative."""
    if interpreting():
        return jnp.maximum(tile, 0.0).astype(dtype)

    shape = result_type(tile.shape, dtype, layout=TILE)

    @plgpu.inline_mgpu(arg_types=(TILE,), return_type=shape)
    def cast(_, tile):
        i32 = ir.IntegerType.get_signless(32)
        element = mgpu_utils.dtype_to_ir_type(dtype)
        pair_type = ir.VectorType.get((2,), element)
        text = f"cvt.rn.relu.{element}x2.f32 $0, $2, $1;"
        out = np.empty_like(tile.registers)
        for index, pair in np.ndenumerate(tile.registers):
            word = llvm.inline_asm(i32, [extract(pair, e) for e in range(2)], text, "=r,f,f")
            out[index] = llvm.bitcast(pair_type, word)
        return mgpu.FragmentedArray(_registers=out, _layout=tile.layout, _is_signed=None)

    return cast(tile)
