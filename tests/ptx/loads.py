import jax.numpy as jnp
import numpy as np

from pallas_kernels.ptx.loads import (
    count_sorted,
    load_at,
    load_intervals,
    load_rows,
    prefetch,
    row_products,
)
from tests.support.ptx import (
    LEAST,
    MOST,
    SHORT_DTYPES,
    Case,
    case,
    integers,
    load,
    numbers,
    show,
    shown,
    some,
)


@case(load_rows, load_intervals, dtype=(jnp.float32, jnp.int32), count=(1, 47, 64, 150))
def loaded_rows(dtype, count):
    """From a place that is aligned to nothing; rows beyond the end are the last."""
    x = numbers(2, count).view(dtype)
    firsts = np.array([0, min(37, count - 1), count - 1], np.int32)

    def body(x_ref, firsts_ref, out_ref):
        for n in range(len(firsts)):
            first = firsts_ref[n]
            intervals = load_intervals(x_ref, first, count - 1)
            for place, rows in enumerate([*intervals, load_rows(x_ref.at[1], first, count - 1)]):
                show(out_ref.at[n, place], rows, "rows")

    rows = np.minimum(firsts[:, None] + np.arange(64), count - 1)
    expected = x[[0, 1, 1]][:, rows].swapaxes(0, 1)[..., None]
    return Case(body, (x, firsts), (np.broadcast_to(expected, (3, 3, 64, 8)),))


@case(prefetch)
def asked_for():
    """Changes nothing."""
    x = numbers(3, 16, 256)

    def body(x_ref, out_ref):
        for n in range(2):
            prefetch(x_ref.at[n], jnp.bool_(n))
        show(out_ref, load(x_ref.at[1, 0], "columns"), "columns")

    return Case(body, (x,), (np.broadcast_to(x[1, 0], (64, 256)),))


@case(count_sorted, count=(1, 2, 63, 64, 100))
def counted(count):
    values = np.sort(some([LEAST, -3, 0, 0, 7, 7, 8, MOST, *range(20, 90)], count))
    rows = some([LEAST, LEAST + 1, -3, -1, 0, 7, 9, 44, MOST - 1, MOST])

    def body(values_ref, rows_ref, less_ref, or_equal_ref):
        rows = load(rows_ref, "rows")
        show(less_ref, count_sorted(values_ref, rows, or_equal=False), "rows")
        show(or_equal_ref, count_sorted(values_ref, rows, or_equal=True), "rows")

    less, or_equal = values < rows[:, None], values <= rows[:, None]
    expected = (shown(x.sum(axis=1, dtype=np.int32), "rows") for x in (less, or_equal))
    return Case(body, (values, rows), tuple(expected))


@case(row_products, dtype=SHORT_DTYPES, columns=(8, 24, 64, 80, 128, 256))
def products_of_rows(dtype, columns):
    """Of one head of three, with rows beyond the end."""
    count = 90
    a, b = (integers(count, 3, columns, least=low, end=9, dtype=dtype) for low in (-8, -7))
    firsts = np.array([0, 1, 64, count - 1], np.int32)

    def body(a_ref, b_ref, firsts_ref, out_ref):
        of_head = [ref.at[:, 1] for ref in (a_ref, b_ref)]
        for n in range(len(firsts)):
            show(out_ref.at[n], row_products(*of_head, firsts_ref[n], count - 1), "rows")

    sums = (a[:, 1].astype(np.float32) * b[:, 1].astype(np.float32)).sum(axis=1)
    expected = sums[np.minimum(firsts[:, None] + np.arange(64), count - 1)]
    return Case(body, (a, b, firsts), (np.broadcast_to(expected[..., None], (4, 64, 8)),))


@case(row_products, dtype=SHORT_DTYPES, columns=(8, 24, 64, 256))
def copies_of_rows(dtype, columns):
    """Of one head of three, with zeros where a row is marked, for what is NaN there."""
    count = 90
    a, b = (integers(count, 3, columns, least=low, end=9, dtype=dtype) for low in (-8, -7))
    marks = np.where(np.arange(count) % 7 == 3, -np.inf, np.arange(count) - 40.0)
    marks = marks.astype(np.float32)
    b[marks == -np.inf] = np.nan

    def body(a_ref, b_ref, marks_ref, copy_ref):
        of_a, of_b, copy = (ref.at[:, 1] for ref in (a_ref, b_ref, copy_ref))
        for first in (0, 64):
            row_products(of_a, of_b, first, count - 1, (copy, marks_ref))

    expected = np.zeros_like(b)
    expected[:, 1] = np.where((marks == -np.inf)[:, None], 0, b[:, 1])
    return Case(
        body,
        (a, b, marks),
        (expected,),
        of=lambda copy: (np.where(np.arange(3)[:, None] == 1, copy, 0),),
    )


@case(load_at, dtype=(jnp.float32, jnp.int32), columns=(8, 16, 64))
def elements_at_places(dtype, columns):
    x = numbers(1, 300)[0].view(dtype)
    of_tile = np.arange(64 * columns, dtype=np.int32).reshape(64, columns) * 7 % 300
    of_rows, of_columns = some([0, 299, 5, 17], 64), some([299, 3, 0, 44], columns)

    def body(x_ref, tile_ref, rows_ref, columns_ref, *out_refs):
        show(out_refs[0], load_at(x_ref, load(tile_ref), by_row=True, by_column=True))
        show(out_refs[1], load_at(x_ref, load(rows_ref, "rows"), by_row=True), "rows")
        places = load(columns_ref, "columns")
        show(out_refs[2], load_at(x_ref, places, by_column=True), "columns")
        show(out_refs[3], load_at(x_ref, rows_ref[1]), "scalar")

    shape = 64, columns
    expected = (
        x[of_tile],
        shown(x[of_rows], "rows", shape),
        shown(x[of_columns], "columns", shape),
        np.broadcast_to(x[of_rows[1]], shape),
    )
    return Case(body, (x, of_tile, of_rows, of_columns), expected)
