"""Bits of a bool matrix in global memory, in tiles of 128 by 128 of four warps."""

import functools
from typing import Any, NamedTuple

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
    asm,
    base_address,
    bit_mask,
    bytes_to,
    int32,
    own_address,
    shared_address,
    thread_index,
)

TILE, WORD = 128, 32
ROWS, COLUMNS = 32, 64  # of a block
SOME, ALL = 0, 1  # entries of a block, then two words of the columns in which anything is set
ENTRIES = 4
_WORDS = TILE // WORD
_AT_ONCE = 16  # rows of a warp whose loads are under way


def store_bits(matrices, results: tuple[Any, ...], staging, place, bounds, *, inside: bool) -> None:
    """Stores the bits of a tile, along rows and along columns.

    Elements beyond the end, and those that the bounds hide, are 0.

    Args:
      matrices: bool `(entries, rows, columns)`, in one piece.
      results: of an entry int32 `(rows, words)`, of which bit j of word i is that of column
        32 * i + j, for whole tiles; the same of columns, `(columns, words)`; and int32
        `(row blocks, column blocks, ENTRIES)`: whether some and whether all elements are set of
        those that there are.
      staging: int32 `(TILE, 4)` in shared memory.
      place: of the tile: entry, which of the rows' tiles, and which of the columns'.
      bounds: least and greatest of column - row, None for any.
      inside: whether no element of the tile is beyond the end.
    """
    place = tuple(map(jnp.int32, place))
    if interpreting():
        entry, *tile = place
        _store_bits_in_jax(matrices.at[entry], *results, *tile, bounds)
        return

    rows, columns = matrices.shape[1:]
    by_row, by_column, blocks = (ref.shape for ref in results)
    splat = plgpu.Layout.WG_SPLAT

    @plgpu.inline_mgpu(arg_types=(*[plgpu.RefType()] * 5, *[splat] * 3))
    def store(_, matrices, *args):
        *bases, staging = args[:4]
        entry, *tile = (x.registers[()] for x in args[4:])
        sizes = _Sizes(rows, columns, *blocks[:2], by_row[1], by_column[1])
        # A view of an entry would begin elsewhere: to Mosaic bools are bits.
        matrix = arith.addi(base_address(matrices), bytes_to(entry, rows * columns))
        _Warp(sizes, bounds, matrix, *map(base_address, bases), staging, *tile).store(inside)

    store(matrices, *results, staging, *place)


class _Sizes(NamedTuple):
    rows: int
    columns: int
    row_blocks: int
    column_blocks: int
    row_words: int
    column_words: int


class _Warp:
    """32 rows of a tile. A lane has one of them, and a column of each word of a row.

    It loads its columns, 32 bytes of a row side by side with the other lanes. The word of a row is
    a vote over lanes, which one of them keeps.
    """

    def __init__(self, sizes, bounds, matrix, by_row, by_column, blocks, staging, row, column):
        self.sizes, self.bounds, self.matrix, self.staging = sizes, bounds, matrix, staging
        self.by_row, self.by_column, self.blocks = by_row, by_column, blocks
        self.row_tile, self.column_tile = row, column
        self.lane = arith.andi(thread_index(), int32(31))
        self.warp = arith.shrui(thread_index(), int32(5))
        times = lambda x, count: arith.muli(x, int32(count))
        self.first_row = arith.addi(times(row, TILE), times(self.warp, ROWS))
        self.row = arith.addi(self.first_row, self.lane)
        first = times(column, TILE)
        self.first_columns = [arith.addi(first, int32(WORD * n)) for n in range(_WORDS)]

    def store(self, inside: bool) -> None:
        of_row, of_columns = self.loaded_words(inside)
        for n, first in enumerate(self.first_columns):
            of_row[n], of_columns[n] = self.within(of_row[n], of_columns[n], first)
        self.store_rows(of_row)
        for number in range(TILE // COLUMNS):
            own = slice(2 * number, 2 * number + 2)
            self.store_block(number, of_row[own], of_columns[own])
        self.store_columns(of_columns)

    def loaded_words(self, inside: bool):
        """Those of the lane's row and of its columns."""
        sizes = self.sizes
        of_row, of_columns = [int32(0)] * _WORDS, [int32(0)] * _WORDS
        column = arith.addi(self.first_columns[0], self.lane)
        place = arith.addi(bytes_to(self.first_row, sizes.columns), bytes_to(column, 1))
        address = arith.addi(self.matrix, place)
        limits = [None] * _WORDS
        if not inside:
            left = arith.subi(int32(sizes.rows), self.first_row)
            there = lambda n: _is(column, "slt", int32(sizes.columns - WORD * n))
            limits = [arith.select(there(n), left, int32(0)) for n in range(_WORDS)]
        for begin in range(0, ROWS, _AT_ONCE):
            places = [(r, n) for r in range(begin, begin + _AT_ONCE) for n in range(_WORDS)]
            loaded = [_load(address, r * sizes.columns + WORD * n, limits[n], r) for r, n in places]
            for (r, n), x in zip(places, loaded, strict=True):
                is_own = _is(self.lane, "eq", int32(r))
                of_row[n] = arith.select(is_own, _vote("ballot", x), of_row[n])
                of_columns[n] = arith.addi(of_columns[n], arith.muli(x, bit_mask(r)))
        return of_row, of_columns

    def within(self, of_row, of_column, first_column):
        """Words without what the bounds hide."""
        least, greatest = self.bounds
        difference = arith.subi(self.first_row, first_column)
        in_row = arith.addi(self.lane, difference)  # where column - row is 0
        in_column = arith.subi(self.lane, difference)
        if least is not None:
            of_row = _kept(of_row, arith.addi(in_row, int32(least)), 0)
            of_column = _kept(of_column, arith.addi(in_column, int32(1 - least)), -1)
        if greatest is not None:
            of_row = _kept(of_row, arith.addi(in_row, int32(greatest + 1)), -1)
            of_column = _kept(of_column, arith.subi(in_column, int32(greatest)), 0)
        return of_row, of_column

    def store_rows(self, words) -> None:
        sizes = self.sizes
        place = arith.addi(
            bytes_to(self.row, 4 * sizes.row_words), bytes_to(self.column_tile, 4 * _WORDS)
        )
        _store_if(_is(self.row, "slt", int32(sizes.rows)), arith.addi(self.by_row, place), words)

    def store_columns(self, words) -> None:
        """By way of shared memory, as warps have one word each of a column."""
        sizes = self.sizes
        for n, word in enumerate(words):
            address = shared_address(
                self.staging, (self.lane, 4 * _WORDS), (self.warp, 4), (int32(n), 4 * TILE)
            )
            asm("st.shared.b32 [$0], $1;", "r,r,~{memory}", [address, word])
        mgpu_utils.warpgroup_barrier()
        i32 = ir.IntegerType.get_signless(32)
        text = "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];"
        of_column = llvm.StructType.get_literal([i32] * _WORDS)
        found = asm(text, "=r,=r,=r,=r,r,~{memory}", [own_address(self.staging)], of_column)
        found = [llvm.extractvalue(i32, found, [n]) for n in range(_WORDS)]
        column = arith.addi(self.first_columns[0], thread_index())
        place = arith.addi(
            bytes_to(column, 4 * sizes.column_words), bytes_to(self.row_tile, 4 * _WORDS)
        )
        there = _is(column, "slt", int32(sizes.columns))
        _store_if(there, arith.addi(self.by_column, place), found)

    def store_block(self, number: int, of_row, of_columns) -> None:
        """What is known of a block of the warp's rows."""
        sizes, firsts = self.sizes, self.first_columns[2 * number : 2 * number + 2]
        all_set = _is(self.row, "sge", int32(sizes.rows))
        are_whole = [
            _is(word, "eq", _kept(int32(-1), arith.subi(int32(sizes.columns), first), -1))
            for first, word in zip(firsts, of_row, strict=True)
        ]
        all_set = arith.ori(all_set, arith.andi(*are_whole))
        entries = [_vote("any", arith.ori(*of_row)), _vote("all", _word(all_set))]
        entries += [_vote("ballot", word) for word in of_columns]
        row_block = arith.shrui(self.first_row, int32(5))
        column_block = arith.shrui(firsts[0], int32(6))
        block = arith.addi(arith.muli(row_block, int32(sizes.column_blocks)), column_block)
        there = arith.andi(
            _is(row_block, "slt", int32(sizes.row_blocks)),
            _is(column_block, "slt", int32(sizes.column_blocks)),
        )
        there = arith.andi(there, _is(self.lane, "eq", int32(0)))
        _store_if(there, arith.addi(self.blocks, bytes_to(block, 4 * ENTRIES)), entries)


def _store_if(there, address, words) -> None:
    """Four words."""
    text = "{ .reg .pred p; setp.ne.s32 p, $1, 0; @p st.global.v4.b32 [$0], {$2, $3, $4, $5}; }"
    asm(text, "l,r,r,r,r,r,~{memory}", [address, _word(there), *words])


def _is(a, how: str, b):
    return arith.cmpi(getattr(arith.CmpIPredicate, how), a, b)


def _word(flag):
    return arith.extui(ir.IntegerType.get_signless(32), flag)


def _load(address, offset: int, limit, number: int):
    """A byte; 0 unless number < limit."""
    i32 = ir.IntegerType.get_signless(32)
    load = f"ld.global.nc.u8 $0, [$1+{offset}];"
    if limit is None:
        return asm(load, "=r,l", [address], i32)
    text = f"{{ .reg .pred p; setp.gt.s32 p, $2, {number}; mov.b32 $0, 0; @p {load} }}"
    return asm(text, "=&r,l,r", [address, limit], i32)


def _vote(how: str, x):
    """Of the lanes of a warp whether x is not 0: a bit of each, or 1 if any, or all."""
    i32 = ir.IntegerType.get_signless(32)
    begin = "{ .reg .pred p; setp.ne.s32 p, $1, 0;"
    if how == "ballot":
        return asm(f"{begin} vote.sync.ballot.b32 $0, p, -1; }}", "=r,r", [x], i32)
    text = f"{begin} vote.sync.{how}.pred p, p, -1; selp.b32 $0, 1, 0, p; }}"
    return asm(text, "=r,r", [x], i32)


def _kept(word, bound, flip: int):
    """Bits of a word from the bound on, or with flip = -1 those before it."""
    bound = arith.maxsi(bound, int32(0))
    i32 = ir.IntegerType.get_signless(32)
    # The shift by PTX, as 32 and more shift all out there.
    kept = asm("shl.b32 $0, -1, $1;", "=r,r", [bound], i32)
    return arith.andi(word, arith.xori(kept, int32(flip)) if flip else kept)


def words(bits: jax.Array) -> jax.Array:
    """int32 `(..., words)` of bool `(..., 32 * words)`: bit j of a word is element j."""
    of_words = bits.reshape(*bits.shape[:-1], -1, WORD).astype(jnp.uint32)
    places = lax.broadcast_to_rank(jnp.arange(WORD, dtype=jnp.uint32), of_words.ndim)
    return lax.bitcast_convert_type((of_words << places).sum(-1, dtype=jnp.uint32), jnp.int32)


def _store_bits_in_jax(
    ref, by_row_ref, by_column_ref, blocks_ref, row_tile, column_tile, bounds
) -> None:
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
