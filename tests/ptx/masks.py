import math

import numpy as np
from jax import lax

from pallas_kernels.interpret import interpreting
from pallas_kernels.ptx.masks import (
    all_columns,
    bits_from,
    bits_to,
    column_numbers,
    equal_columns,
    keep_bits,
    keep_columns_from,
    keep_columns_to,
    keep_equal_columns,
    no_columns,
    with_columns,
)
from tests.support.ptx import (
    LEAST,
    MOST,
    WIDTHS,
    Case,
    case,
    load,
    numbers,
    show,
    some,
)


@case(keep_columns_to, keep_columns_from, columns=WIDTHS)
def columns_to_and_from_a_bound(columns):
    tile = numbers(64, columns)
    bounds = [-(2**30), -1, 0, 1, 2, 7, 8, columns - 2, columns - 1, columns, 2**30]
    bounds = some([*bounds, *range(0, columns, 5)])

    def body(tile_ref, bounds_ref, to_ref, from_ref):
        show(to_ref, keep_columns_to(load(tile_ref), load(bounds_ref, "rows"), -math.inf))
        show(from_ref, keep_columns_from(load(tile_ref), load(bounds_ref, "rows"), 0.5))

    column, bound = np.arange(columns), bounds[:, None]
    expected = np.where(column <= bound, tile, -math.inf), np.where(column >= bound, tile, 0.5)
    return Case(body, (tile, bounds), tuple(x.astype(np.float32) for x in expected))


_IDS = (0, 1, -1, 5, LEAST, MOST)


@case(keep_equal_columns, columns=WIDTHS)
def equal_ids(columns):
    tile, first = numbers(64, columns), 10
    rows, ids = some(_IDS), some(_IDS, columns + 20)
    last = some([-(2**30), -1, 0, columns // 2, columns - 2, columns - 1, 2**30])

    def body(tile_ref, rows_ref, ids_ref, last_ref, first_ref, out_ref, to_last_ref):
        tile, rows, last = load(tile_ref), load(rows_ref, "rows"), load(last_ref, "rows")
        show(out_ref, keep_equal_columns(tile, rows, ids_ref, first_ref[0], -math.inf))
        show(to_last_ref, keep_equal_columns(tile, rows, ids_ref, first, -math.inf, last))

    is_equal = rows[:, None] == ids[first : first + columns]
    kept = np.where(is_equal, tile, np.float32(-math.inf))
    kept_to = np.where(np.arange(columns) <= last[:, None], kept, np.float32(-math.inf))
    inputs = tile, rows, ids, last, np.array([first], np.int32)
    return Case(body, inputs, (kept, kept_to))


@case(equal_columns, all_columns, bits_from, bits_to, keep_bits, columns=(8, 64, 128))
def bits_of_equal_ids(columns):
    tile, first = numbers(64, columns), 6
    rows, ids = some(_IDS), some(_IDS, columns + 20)
    bounds = [-(2**30), -1, 0, 1, 2, 7, 8, 9, columns - 2, columns - 1, columns, 2**30]
    bounds = some([*bounds, *range(0, columns, 3)])
    is_there = np.array([0, 1], np.int32)

    def body(tile_ref, rows_ref, ids_ref, bounds_ref, there_ref, out_ref):
        tile, bounds = load(tile_ref), load(bounds_ref, "rows")
        bits = equal_columns(load(rows_ref, "rows"), ids_ref, first, columns)
        every = all_columns(64, columns)
        given = [all_columns(64, columns, there_ref[n] > 0) for n in range(2)]
        later, earlier = bits_from(every, bounds), bits_to(every, bounds)
        all_bits = [
            bits, bits_from(bits, bounds), bits_to(bits, bounds), every, *given,
            later, earlier, bits_from(earlier, bounds),
        ]  # fmt: skip
        for n, some_bits in enumerate(all_bits):
            show(out_ref.at[n], keep_bits(tile, some_bits, -math.inf))

    is_equal = rows[:, None] == ids[first : first + columns]
    column, bound = np.arange(columns), bounds[:, None]
    later, earlier, every = column >= bound, column <= bound, np.ones_like(is_equal)
    kept = [
        is_equal, is_equal & later, is_equal & earlier, every, ~every, every,
        later, earlier, later & earlier,
    ]  # fmt: skip
    expected = np.where(np.stack(kept), tile, np.float32(-math.inf))
    return Case(body, (tile, rows, ids, bounds, is_there), (expected,))


@case(no_columns, column_numbers, with_columns, columns=(8, 64, 128))
def bits_of_groups_of_columns(columns):
    tile, rows = numbers(64, columns), some([*range(-3, columns + 3)])

    def body(tile_ref, rows_ref, out_ref, none_ref):
        rows, bits = load(rows_ref, "rows"), no_columns(columns)
        width = columns if interpreting() else min(columns, 16)
        own = column_numbers(width)
        for first in range(0, columns, width):
            column = lax.broadcast_in_dim(own + first, (64, width), [1])
            row = lax.broadcast_in_dim(rows, (64, width), [0])
            bits = with_columns(bits, (column < row) | (column == row + 2), first)
        show(out_ref, keep_bits(load(tile_ref), bits, 0.5))
        show(none_ref, keep_bits(load(tile_ref), no_columns(columns), 0.5))

    column, row = np.arange(columns), rows[:, None]
    kept = np.where((column < row) | (column == row + 2), tile, np.float32(0.5))
    return Case(body, (tile, rows), (kept, np.full_like(tile, 0.5)))
