"""Bits of a bool matrix in global memory, in tiles of 128 by 128 of four warps."""

import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_kernels.bit_words import WORD, words
from pallas_kernels.interpret import interpreting
from pallas_kernels.ptx.mlir import (
    asm,
    base_address,
    bytes_to,
    int32,
    shared_address,
    thread_index,
)

TILE = 128
ROWS, COLUMNS = 32, 64  # of a block
SOME, ALL = 0, 1  # entries of a block, then two words of the columns in which anything is set
ENTRIES = 4
_WORDS = TILE // WORD


def store_bits(matrices, results: tuple[Any, ...], staging, place, bounds, *, inside: bool) -> None:
    """Stores the bits of a tile, along rows and along columns.

    Elements beyond the end, and those that the bounds hide, are 0.

    Args:
      matrices: bool `(entries, rows, columns)`, in one piece.
      results: of an entry int32 `(rows, words)`, of which bit j of word i is that of column
        32 * i + j, for whole tiles; the same of columns, `(columns, words)`; and int32
        `(row blocks, column blocks, ENTRIES)`: whether some and whether all elements are set of
        those that there are.
      staging: int32 `(TILE // ROWS, TILE)` in shared memory.
      place: of the tile: entry, which of the rows' tiles, and which of the columns'.
      bounds: least and greatest of column - row, None for any.
      inside: whether no element of the tile is beyond the end.
    """
    place = tuple(map(jnp.int32, place))
    if interpreting():
        entry, row, column = place
        _store_bits_in_jax(matrices.at[entry], results, row, column, bounds)
        return

    rows, columns = matrices.shape[1:]
    (_, row_words), (_, column_words), (row_blocks, column_blocks, _) = (
        ref.shape for ref in results
    )
    sizes = _Sizes(rows, columns, row_blocks, column_blocks, row_words, column_words)
    splat = plgpu.Layout.WG_SPLAT

    @plgpu.inline_mgpu(arg_types=(*[plgpu.RefType()] * 5, *[splat] * 3))
    def store(_, matrices, *args):
        *bases, staging = args[:4]
        entry, row, column = (x.registers[()] for x in args[4:])
        # A view of an entry would begin elsewhere: to Mosaic bools are bits.
        matrix = arith.addi(base_address(matrices), bytes_to(entry, rows * columns))
        by_row, by_column, blocks = map(base_address, bases)
        warp = _Warp(sizes, bounds, matrix, by_row, by_column, blocks, staging, row, column)
        warp.store(inside)

    store(matrices, *results, staging, *place)


class _Sizes(NamedTuple):
    rows: int
    columns: int
    row_blocks: int
    column_blocks: int
    row_words: int
    column_words: int


class _Warp:
    """32 rows of a tile, of which a lane has four columns side by side.

    It loads four bytes of each row, and makes a nibble of them. Eight lanes have a word of a row, a
    nibble each; of eight rows they have eight words, a nibble of each in every lane, and exchange
    them so that each has a whole word. Words of columns come together in a lane itself.
    """

    def __init__(self, sizes, bounds, matrix, by_row, by_column, blocks, staging, row, column):
        self.sizes, self.bounds, self.matrix, self.staging = sizes, bounds, matrix, staging
        self.by_row, self.by_column, self.blocks = by_row, by_column, blocks
        self.row_tile, self.column_tile = row, column
        times = lambda x, count: arith.muli(x, int32(count))
        self.warp = arith.shrui(thread_index(), int32(5))
        self.lane = arith.andi(thread_index(), int32(31))
        self.number = arith.andi(self.lane, int32(7))  # among those with the same words
        self.word = arith.shrui(self.lane, int32(3))
        self.first_row = arith.addi(times(row, TILE), times(self.warp, ROWS))
        self.first_column = times(column, TILE)

    def store(self, inside: bool) -> None:
        of_rows, of_columns = self.words(inside)
        self.store_rows(of_rows)
        self.store_block(of_rows, of_columns)
        self.store_columns(of_columns)

    def words(self, inside: bool) -> tuple[list, list]:
        """Those of rows number, number + 8 and so on, and of the lane's columns."""
        loaded = self.loaded(inside)
        nibbles, in_bytes = [int32(0)] * _WORDS, [int32(0)] * _WORDS
        for row, x in enumerate(loaded):
            of_eight, place = divmod(row, 8)
            bits = arith.shli(x, int32(place))
            in_bytes[of_eight] = arith.ori(in_bytes[of_eight], bits)
            # Four bytes of 0 or 1 become the first four bits of a product.
            product = arith.muli(x, int32(0x10204080))
            bits = arith.andi(arith.shrui(product, int32(28 - 4 * place)), _nibble(place))
            nibbles[of_eight] = arith.ori(nibbles[of_eight], bits)
        of_rows = [self.exchanged(x) for x in nibbles]
        of_columns = [
            _bytes(_bytes(*in_bytes[:2], e, 4 + e), _bytes(*in_bytes[2:], e, 4 + e), 0, 1, 4, 5)
            for e in range(4)
        ]
        return self.within(of_rows, of_columns)

    def loaded(self, inside: bool) -> list:
        """Four bytes of each row."""
        sizes = self.sizes
        column = arith.addi(self.first_column, arith.shli(self.lane, int32(2)))
        place = arith.addi(bytes_to(self.first_row, sizes.columns), bytes_to(column, 1))
        address = arith.addi(self.matrix, place)
        if inside and sizes.columns % 4 == 0:
            return [_load("b32", address, r * sizes.columns) for r in range(ROWS)]
        limits: list = [None] * 4
        if not inside:
            left = arith.subi(int32(sizes.rows), self.first_row)
            there = lambda e: _is(column, "slt", int32(sizes.columns - e))
            limits = [arith.select(there(e), left, int32(0)) for e in range(4)]

        def four(row: int):
            out = int32(0)
            for e in range(4):
                byte = _load("u8", address, row * sizes.columns + e, limits[e], row)
                out = arith.ori(out, arith.shli(byte, int32(8 * e)))
            return out

        return list(map(four, range(ROWS)))

    def exchanged(self, x):
        """Of eight words by eight nibbles: a nibble of each becomes a word that the lane has."""
        is_odd = lambda bit: _is(arith.andi(self.lane, int32(bit)), "ne", int32(0))
        choice = lambda bit, odd, even: arith.select(is_odd(bit), int32(odd), int32(even))
        x = _permuted(x, _from_lane(x, 4), choice(4, 0x3276, 0x5410))
        x = _permuted(x, _from_lane(x, 2), choice(2, 0x3715, 0x6240))
        other, four = _from_lane(x, 1), int32(4)
        other = arith.select(is_odd(1), arith.shrui(other, four), arith.shli(other, four))
        own = choice(1, -0x0F0F0F10, 0x0F0F0F0F)
        return arith.ori(arith.andi(x, own), arith.andi(other, arith.xori(own, int32(-1))))

    def row(self, n: int):
        return arith.addi(arith.addi(self.first_row, self.number), int32(8 * n))

    def column(self, e: int):
        first = arith.addi(self.first_column, arith.shli(self.lane, int32(2)))
        return arith.addi(first, int32(e))

    def first_of_word(self):
        return arith.addi(self.first_column, arith.shli(self.word, int32(5)))

    def within(self, of_rows: list, of_columns: list) -> tuple[list, list]:
        """Words without what the bounds hide."""
        least, greatest = self.bounds
        for n in range(_WORDS):
            # Where in the words column - row is 0.
            of_row = arith.subi(self.row(n), self.first_of_word())
            of_column = arith.subi(self.column(n), self.first_row)
            if least is not None:
                of_rows[n] = _kept(of_rows[n], arith.addi(of_row, int32(least)), 0)
                of_columns[n] = _kept(of_columns[n], arith.addi(of_column, int32(1 - least)), -1)
            if greatest is not None:
                of_rows[n] = _kept(of_rows[n], arith.addi(of_row, int32(greatest + 1)), -1)
                of_columns[n] = _kept(of_columns[n], arith.subi(of_column, int32(greatest)), 0)
        return of_rows, of_columns

    def store_rows(self, words) -> None:
        sizes = self.sizes
        of_tile = arith.addi(arith.shli(self.column_tile, int32(2)), self.word)
        for n, word in enumerate(words):
            place = arith.addi(bytes_to(self.row(n), 4 * sizes.row_words), bytes_to(of_tile, 4))
            there = _is(self.row(n), "slt", int32(sizes.rows))
            _store_if(there, arith.addi(self.by_row, place), [word])

    def store_columns(self, words) -> None:
        """By way of shared memory, as warps have one word each of a column."""
        sizes = self.sizes
        address = shared_address(self.staging, (self.warp, 4 * TILE), (self.lane, 16))
        text = "st.shared.v4.b32 [$0], {$1, $2, $3, $4};"
        asm(text, "r,r,r,r,r,~{memory}", [address, *words])
        mgpu_utils.warpgroup_barrier()
        i32 = ir.IntegerType.get_signless(32)
        address = shared_address(self.staging, (thread_index(), 4))
        load = "ld.shared.b32 $0, [$1+{}];"
        found = [
            asm(load.format(4 * TILE * n), "=r,r,~{memory}", [address], i32) for n in range(_WORDS)
        ]
        column = arith.addi(self.first_column, thread_index())
        place = arith.addi(
            bytes_to(column, 4 * sizes.column_words), bytes_to(self.row_tile, 4 * _WORDS)
        )
        there = _is(column, "slt", int32(sizes.columns))
        _store_if(there, arith.addi(self.by_column, place), found)

    def store_block(self, of_rows, of_columns) -> None:
        """What is known of the warp's rows: 16 lanes have a block of their columns."""
        sizes = self.sizes
        left = arith.subi(int32(sizes.columns), self.first_of_word())
        all_columns = _kept(int32(-1), left, -1)
        some, whole = int32(0), _is(int32(0), "eq", int32(0))
        for n, word in enumerate(of_rows):
            is_beyond = _is(self.row(n), "sge", int32(sizes.rows))
            whole = arith.andi(whole, arith.ori(_is(word, "eq", all_columns), is_beyond))
            some = arith.ori(some, word)
        seen = int32(0)
        for e, word in enumerate(of_columns):
            is_seen = _word(_is(word, "ne", int32(0)))
            place = arith.addi(arith.shli(self.number, int32(2)), int32(e))
            seen = arith.ori(seen, arith.shli(is_seen, place))
        for distance in (1, 2, 4):
            seen = arith.ori(seen, _from_lane(seen, distance))
        first_lane = arith.andi(self.lane, int32(16))
        own = lambda flag: arith.andi(arith.shrui(_ballot(flag), first_lane), int32(0xFFFF))
        entries = [
            _word(_is(own(_is(some, "ne", int32(0))), "ne", int32(0))),
            _word(_is(own(whole), "eq", int32(0xFFFF))),
            seen,
            _from_lane(seen, 8),
        ]
        row_block = arith.shrui(self.first_row, int32(5))
        column_block = arith.shrui(self.first_of_word(), int32(6))
        block = arith.addi(arith.muli(row_block, int32(sizes.column_blocks)), column_block)
        there = arith.andi(
            _is(row_block, "slt", int32(sizes.row_blocks)),
            _is(column_block, "slt", int32(sizes.column_blocks)),
        )
        there = arith.andi(there, _is(self.lane, "eq", first_lane))
        _store_if(there, arith.addi(self.blocks, bytes_to(block, 4 * ENTRIES)), entries)


def _is(a, how: str, b):
    return arith.cmpi(getattr(arith.CmpIPredicate, how), a, b)


def _word(flag):
    return arith.extui(ir.IntegerType.get_signless(32), flag)


def _load(kind: str, address, offset: int, limit=None, number: int = 0):
    """A byte or four of them; 0 unless number < limit."""
    i32 = ir.IntegerType.get_signless(32)
    load = f"ld.global.nc.{kind} $0, [$1+{offset}];"
    if limit is None:
        return asm(load, "=r,l", [address], i32)
    text = f"{{ .reg .pred p; setp.gt.s32 p, $2, {number}; mov.b32 $0, 0; @p {load} }}"
    return asm(text, "=&r,l,r", [address, limit], i32)


def _store_if(there, address, words) -> None:
    """One word or four."""
    values = [f"${2 + n}" for n in range(len(words))]
    stored = f".b32 [$0], {values[0]}"
    if len(words) > 1:
        stored = f".v{len(words)}.b32 [$0], {{{', '.join(values)}}}"
    text = f"{{ .reg .pred p; setp.ne.s32 p, $1, 0; @p st.global{stored}; }}"
    constraints = ",".join(["l,r", *["r"] * len(words), "~{memory}"])
    asm(text, constraints, [address, _word(there), *words])


def _nibble(number: int):
    mask = 0xF << 4 * number
    return int32(mask if number < 7 else mask - (1 << 32))


def _permuted(a, b, selector):
    """Four of eight bytes, as PTX has them."""
    i32 = ir.IntegerType.get_signless(32)
    return asm("prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, selector], i32)


def _bytes(a, b, *chosen: int):
    """Those of a, which are the first four, and of b; others are of no matter."""
    return _permuted(a, b, int32(sum(byte << 4 * n for n, byte in enumerate(chosen))))


def _from_lane(x, distance: int):
    """That of the lane whose number differs in one bit."""
    i32 = ir.IntegerType.get_signless(32)
    return asm(f"shfl.sync.bfly.b32 $0, $1, {distance}, 31, -1;", "=r,r", [x], i32)


def _ballot(flag):
    """A bit of each lane."""
    text = "{ .reg .pred p; setp.ne.s32 p, $1, 0; vote.sync.ballot.b32 $0, p, -1; }"
    return asm(text, "=r,r", [_word(flag)], ir.IntegerType.get_signless(32))


def _kept(word, bound, flip: int):
    """Bits of a word from the bound on, or with flip = -1 those before it."""
    bound = arith.maxsi(bound, int32(0))
    i32 = ir.IntegerType.get_signless(32)
    # The shift by PTX, as 32 and more shift all out there.
    kept = asm("shl.b32 $0, -1, $1;", "=r,r", [bound], i32)
    return arith.andi(word, arith.xori(kept, int32(flip)) if flip else kept)


def _store_bits_in_jax(ref, results, row_tile, column_tile, bounds) -> None:
    by_row_ref, by_column_ref, blocks_ref = results
    (rows, columns), number = ref.shape, jnp.arange(TILE)
    row, column = row_tile * TILE + number, column_tile * TILE + number
    there = (row < rows)[:, None] & (column < columns)
    whole = ref[...]
    bits = whole[jnp.minimum(row, rows - 1)][:, jnp.minimum(column, columns - 1)] & there
    least, greatest = bounds
    if least is not None:
        bits &= column - row[:, None] >= least
    if greatest is not None:
        bits &= column - row[:, None] <= greatest
    _put(by_row_ref, row_tile, column_tile, words(bits))
    _put(by_column_ref, column_tile, row_tile, words(bits.T))
    in_blocks = lambda x: x.reshape(TILE // ROWS, ROWS, TILE // COLUMNS, COLUMNS).swapaxes(1, 2)
    bits, there = in_blocks(bits), in_blocks(there)
    some_and_all = jnp.stack([bits.any((2, 3)), (bits | ~there).all((2, 3))], axis=-1)
    entries = jnp.concatenate([some_and_all.astype(jnp.int32), words(bits.any(2))], axis=-1)
    for n, of_columns in enumerate(entries.swapaxes(0, 1)):
        column_block = column_tile * (TILE // COLUMNS) + n
        pl.when(column_block < blocks_ref.shape[1])(
            functools.partial(_put, blocks_ref.at[:, column_block], row_tile, 0, of_columns)
        )


def _put(ref, tile, other_tile, of_rows: jax.Array) -> None:
    """Four words of each row of a tile, of those that there are."""
    size, (numbers, _) = len(of_rows), ref.shape
    whole, rest = divmod(numbers, size)
    for rows, there in ((size, tile < whole), (rest, tile == whole)):
        if rows:

            @pl.when(there)
            def _(rows=rows):
                place = pl.ds(tile * size, rows), pl.ds(other_tile * _WORDS, _WORDS)
                ref[place] = of_rows[:rows]
