"""Segment ids: a query sees a key only where the ids of both are equal.

Ids are int32, `[B, T]` of queries and `[B, S]` of keys, any values in any order. Where equal ids
lie side by side, a row sees an interval (`intervals`); elsewhere steps with a mask compare ids,
element by element. What is here also finds, before the kernels, the blocks that a tile needs, and
those of them that need no mask for its ids: those in which all ids are equal, and equal to all of
the tile's. Of each tile and block it looks at no more than the least, the greatest and the first
id, and at marks that its ids leave in a few words. Documents that lie packed one after the other
are told apart exactly by that where their ids rise or fall, or are 32 numbers in a row in any
order, and almost always where tiles hold few of them; where it fails, more blocks are visited than
need be, and results are the same.
"""

import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.interpret import interpreting
from pallas_kernels.intervals import FAR, hulls
from pallas_kernels.ptx.arithmetic import div_rem
from pallas_kernels.ptx.barriers import HAND_ORDERED
from pallas_kernels.ptx.loads import count_sorted, load_rows
from pallas_kernels.ptx.stores import store_rows

_ROWS = 64  # of a thread block, and those whose ids are looked at together
# Each id sets one bit in each of eight words, that of the first five of its product with a number:
# that is its last five, and then any. Two tiles of three documents each that have none in common
# meet in all words once in 50,000.
_MARKS = np.array([1 << 27, *(pow(747796405, n, 1 << 32) for n in range(1, 8))], np.uint32)


class Blocks(NamedTuple):
    """The blocks of columns that tiles of rows need, and those of them that need no mask.

    Arrays `[B or 1, tiles]` int32, in blocks. An interval without a block may begin anywhere behind
    its end.
    """

    first: Any
    end: Any
    first_unmasked: Any
    end_unmasked: Any


class Sharing(NamedTuple):
    """What tiles of rows have in common with blocks of columns, bool `[B, tiles, blocks]` each.

    Attributes:
      some: false only if no id of the block is in the tile; seldom true without.
      all: all ids of both are equal.
      first: the first ids of both are equal.
    """

    some: jax.Array
    all: jax.Array
    first: jax.Array


class _Held(NamedTuple):
    """Which ids tiles hold: the least, the greatest, the first, and the marks of all."""

    least: jax.Array
    greatest: jax.Array
    first: jax.Array
    marks: tuple[jax.Array, ...]


def padded(ids: jax.Array, multiple: int) -> jax.Array:
    """Ids of a round number of rows: the last one goes on."""
    return jnp.pad(ids, ((0, 0), (0, -ids.shape[1] % multiple)), mode="edge")


def intervals(
    row_ids: jax.Array, column_ids: jax.Array, within: jax.Array | np.ndarray | None = None
) -> tuple[jax.Array, jax.Array]:
    """The columns whose id is equal to a row's, where those of each id lie side by side.

    They do where the ids of columns rise, also if they begin anew with ids less than the first of
    all, as zeros for padding are. This looks for no more than that.

    Args:
      row_ids, column_ids: `[B, R]` and `[B, C]`.
      within: None for all columns, or `[B or 1, 2, R]`, intervals of them.

    Returns:
      `[B, 2, >= R]` int32: where each row's interval begins and where it ends, of those `within`.
      And for each batch entry whether they are these, bool `[B]`; else they are the intervals
      `within`, and without these have no meaning.
    """
    # From the first of all on, as unsigned numbers, those that begin anew go on rising.
    order = lambda ids: (ids - column_ids[:, :1]) ^ jnp.int32(np.iinfo(np.int32).min)
    columns = order(column_ids)
    before = jnp.pad(columns, ((0, 0), (1, 0)), mode="edge")[:, :-1]
    are_sorted = (before <= columns).all(1)
    # Behind a barrier: what asks for it would look at all ids anew.
    are_sorted = lax.optimization_barrier(are_sorted)
    kernel = _build_search(*row_ids.shape, columns.shape[1], interpreting())
    found = kernel(columns, order(row_ids))
    if within is None:
        return found, are_sorted
    begin, end = found[:, 0, : row_ids.shape[1]], found[:, 1, : row_ids.shape[1]]
    known = are_sorted[:, None]
    begin = jnp.where(known, jnp.maximum(begin, within[:, 0]), within[:, 0])
    end = jnp.where(known, jnp.minimum(end, within[:, 1]), within[:, 1])
    return jnp.stack([begin, end], axis=1), are_sorted


@functools.lru_cache
def _build_search(batch: int, rows: int, columns: int, interpret: bool):
    """How many of `[batch, columns]` int32 are less, and how many not greater, than of `rows`.

    By a kernel of its own, as XLA makes six of such a search. A thread block is one warpgroup.
    """
    tiles = -(-rows // _ROWS)

    def search(sorted_ref, rows_ref, counts_ref):
        entry, tile = div_rem(lax.axis_index("block"), tiles)
        values = load_rows(rows_ref.at[entry], tile * _ROWS, rows - 1)
        for n, or_equal in enumerate((False, True)):
            counts = count_sorted(sorted_ref.at[entry], values, or_equal=or_equal)
            store_rows(counts_ref.at[entry, n, pl.ds(tile * _ROWS, _ROWS)], counts)

    return plgpu.kernel(
        search,
        out_type=jax.ShapeDtypeStruct((batch, 2, tiles * _ROWS), jnp.int32),
        grid=(batch * tiles,),
        grid_names=("block",),
        compiler_params=HAND_ORDERED,
    )


def sharing(row_ids: jax.Array, column_ids: jax.Array, rows: int, columns: int) -> Sharing:
    """What tiles of `rows` rows have in common with blocks of `columns` columns.

    Args:
      row_ids, column_ids: `[B, R]` and `[B, C]`; the last tile, and block, may have fewer.
      rows, columns: of a tile, and of a block.
    """
    tile = jax.tree.map(lambda x: x[:, :, None], _held(row_ids, rows))
    block = jax.tree.map(lambda x: x[:, None, :], _held(column_ids, columns))
    some = (tile.least <= block.greatest) & (block.least <= tile.greatest)
    for marks in zip(tile.marks, block.marks, strict=True):
        some &= (marks[0] & marks[1]) != 0
    uniform = (tile.least == tile.greatest) & (block.least == block.greatest)
    first = tile.first == block.first
    return Sharing(some=some, all=uniform & first, first=first)


def _held(ids: jax.Array, rows: int) -> _Held:
    """What tiles of `rows` rows hold, a multiple of 64; the last one may have fewer."""

    def together(a, b):
        return (jnp.minimum(a[0], b[0]), jnp.maximum(a[1], b[1]), *map(operator.or_, a[2:], b[2:]))

    # Of 64 rows first, in one reduction, which is one kernel for tiles and blocks of all sizes.
    ids = padded(ids, _ROWS).reshape(ids.shape[0], -1, _ROWS)
    shift = lambda x: lax.shift_right_logical(x, jnp.int32(27))
    marks = [jnp.int32(1) << shift(ids * factor) for factor in _MARKS.astype(np.int32)]
    limits = np.iinfo(np.int32)
    starts = limits.max, limits.min, *(0 for _ in marks)
    held = lax.reduce((ids, ids, *marks), tuple(map(jnp.int32, starts)), together, (2,))
    by_tile = [padded(x, rows // _ROWS).reshape(ids.shape[0], -1, rows // _ROWS) for x in held]
    parts = [[x[..., n] for x in by_tile] for n in range(rows // _ROWS)]
    least, greatest, *marks = functools.reduce(together, parts)
    return _Held(least, greatest, ids[:, :: rows // _ROWS, 0], tuple(marks))


def restricted(blocks: Blocks, sharing: Sharing) -> Blocks:
    """Of the blocks that tiles need but for their ids, those that they need.

    Where several stretches of blocks need no mask, none is taken to be without.
    """
    number = jnp.arange(sharing.some.shape[-1], dtype=jnp.int32)
    number = lax.broadcast_to_rank(number, sharing.some.ndim)
    between = lambda first, end: (first[..., None] <= number) & (number < end[..., None])
    needed = sharing.some & between(blocks.first, blocks.end)
    unmasked = needed & sharing.all & between(blocks.first_unmasked, blocks.end_unmasked)

    def both(a, b):
        least, greatest = jnp.minimum, jnp.maximum
        combine = least, greatest, least, greatest, jnp.add
        return tuple(f(x, y) for f, x, y in zip(combine, a, b, strict=True))

    # All in one reduction, which is one kernel.
    far, zero = jnp.int32(FAR), jnp.int32(0)
    operands = *hulls(needed), *hulls(unmasked), unmasked.astype(jnp.int32)
    *bounds, count = lax.reduce(operands, (far, zero, far, zero, zero), both, (2,))
    first, end, first_unmasked, end_unmasked = bounds
    in_one = count == end_unmasked - first_unmasked
    return Blocks(first, end, first_unmasked, jnp.where(in_one, end_unmasked, 0))


def has_partner(
    ids: jax.Array, other_ids: jax.Array, intervals: jax.Array | np.ndarray
) -> jax.Array:
    """Whether each row's interval of the others holds its id, bool `[B, R]`; exact for any ids.

    Args:
      ids, other_ids: `[B, R]` and `[B, C]`.
      intervals: `[B or 1, 2, R]`, within 0 and C.
    """
    # Sharded as the ids are, which a sort needs.
    places = jnp.arange(other_ids.shape[1], dtype=jnp.int32)[None] + jnp.zeros_like(other_ids)
    by_id, place = lax.sort((other_ids, places), num_keys=2)
    first, end = (jnp.broadcast_to(intervals[:, n], ids.shape) for n in range(2))

    # Binary search for the first that is not before (id, first).
    count = other_ids.shape[1]
    found = jnp.zeros_like(ids)
    for bit in reversed(range(count.bit_length())):
        last = found + ((1 << bit) - 1)
        here = jnp.minimum(last, count - 1)
        an_id, a_place = (jnp.take_along_axis(x, here, axis=1) for x in (by_id, place))
        is_before = (an_id < ids) | ((an_id == ids) & (a_place < first))
        found = jnp.where((last < count) & is_before, last + 1, found)
    here = jnp.minimum(found, count - 1)
    an_id, a_place = (jnp.take_along_axis(x, here, axis=1) for x in (by_id, place))
    return (found < count) & (an_id == ids) & (a_place < end)
