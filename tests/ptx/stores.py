import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np

from pallas_kernels.ptx.stores import (
    store_by_quads,
    store_column_sums,
    store_columns,
    store_diagonal_sums,
    store_rows,
    store_tile,
    store_tile_inside,
    store_turned_inside,
)
from tests.support.ptx import SHORT_DTYPES, WIDTHS, Case, case, integers, load, numbers


@case(store_rows, dtype=(jnp.float32, jnp.int32))
def stored_rows(dtype):
    x = numbers(64).view(dtype)
    before = numbers(3, 64).view(dtype)

    def body(x_ref, out_ref):
        store_rows(out_ref.at[1], load(x_ref, "rows"))

    return Case(body, (x,), (np.stack([before[0], x, before[2]]),), states=(before,))


@case(store_columns, columns=WIDTHS)
def stored_columns(columns):
    x, before = numbers(columns), numbers(3, columns)

    def body(x_ref, out_ref):
        store_columns(out_ref.at[1], load(x_ref, "columns"))

    return Case(body, (x,), (np.stack([before[0], x, before[2]]),), states=(before,))


@case(store_tile, dtype=(jnp.float32, jnp.bfloat16), columns=WIDTHS)
def stored_tile(dtype, columns):
    """Into some columns of many."""
    x, before = numbers(64, columns, dtype=dtype), numbers(64, columns + 24, dtype=dtype)

    def body(x_ref, out_ref):
        store_tile(out_ref.at[:, pl.ds(16, columns)], load(x_ref))

    expected = np.concatenate([before[:, :16], x, before[:, -8:]], axis=1)
    return Case(body, (x,), (expected,), states=(before,))


@case(
    store_tile_inside,
    dtype=(jnp.float32, jnp.bfloat16),
    columns=WIDTHS,
    rows_beyond=(0, 7),
    columns_beyond=(0, 2, 5),
)
def stored_tile_inside(dtype, columns, rows_beyond, columns_beyond):
    """At the end of a matrix, behind which there is another."""
    x = numbers(64, columns, dtype=dtype)
    before = numbers(3, 128 - rows_beyond, 2 * columns - columns_beyond, dtype=dtype)

    def body(x_ref, out_ref):
        store_tile_inside(out_ref.at[1], load(x_ref), jnp.int32(64), jnp.int32(columns))

    expected = before.copy()
    expected[1, 64:, columns:] = x[: 64 - rows_beyond, : columns - columns_beyond]
    return Case(body, (x,), (expected,), states=(before,))


@case(
    store_turned_inside,
    dtype=SHORT_DTYPES,
    columns=(64, 128),
    rows_beyond=(0, 7),
    columns_beyond=(0, 2, 5),
)
def stored_turned(dtype, columns, rows_beyond, columns_beyond):
    """At the end of a matrix, behind which there is another."""
    x = numbers(64, columns, dtype=dtype)
    before = numbers(3, 2 * columns - rows_beyond, 128 - columns_beyond, dtype=dtype)

    def body(x_ref, out_ref):
        store_turned_inside(out_ref.at[1], load(x_ref), jnp.int32(columns), jnp.int32(64))

    expected = before.copy()
    expected[1, columns:, 64:] = x.T[: columns - rows_beyond, : 64 - columns_beyond]
    return Case(body, (x,), (expected,), states=(before,))


def place_by_quads(n: int) -> int:
    """The place of a column in the order of `store_by_quads`."""
    eight, pair, one = n // 8, n % 8 // 2, n % 2
    return 16 * pair + 2 * eight + one


@case(store_by_quads, dtype=SHORT_DTYPES)
def stored_by_quads(dtype):
    x, before = numbers(64, 64, dtype=dtype), numbers(3, 64, 64, dtype=dtype)

    def body(x_ref, out_ref):
        store_by_quads(out_ref.at[1], load(x_ref))

    expected = before.copy()
    expected[1][:, [place_by_quads(n) for n in range(64)]] = x
    return Case(body, (x,), (expected,), states=(before,))


@case(store_column_sums, columns=WIDTHS)
def stored_column_sums(columns):
    x, before = integers(64, columns), numbers(4, columns + 16)

    def body(x_ref, out_ref):
        store_column_sums(out_ref.at[:, pl.ds(8, columns)], load(x_ref))

    sums = x.reshape(4, 16, columns).sum(axis=1)
    expected = np.concatenate([before[:, :8], sums, before[:, -8:]], axis=1)
    return Case(body, (x,), (expected,), states=(before,))


@case(store_diagonal_sums, columns=WIDTHS)
def stored_diagonal_sums(columns):
    x, before = integers(64, columns), numbers(4, columns + 16)

    def body(x_ref, out_ref):
        store_diagonal_sums(out_ref, load(x_ref))

    expected = np.zeros_like(before)
    for warp, row, column in np.ndindex(4, 16, columns):
        expected[warp, column - row + 16] += x[16 * warp + row, column]
    return Case(body, (x,), (expected,), states=(before,))
