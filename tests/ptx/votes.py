import math

import jax.numpy as jnp
import numpy as np

from pallas_kernels.ptx.votes import any_beyond, any_from, any_positive, any_row, vote_any
from tests.support.ptx import (
    LEAST,
    MOST,
    Case,
    any_of_each,
    case,
    load,
    show,
)


@case(any_positive)
def a_count_that_is_positive():
    counts = np.array([LEAST, -1, 0, 1, MOST], np.int32)

    def body(counts_ref, out_ref):
        for n in range(len(counts)):
            is_any = any_positive(counts_ref.at[n])
            show(out_ref.at[n], is_any.astype(jnp.int32), "scalar")

    expected = np.broadcast_to((counts > 0)[:, None, None], (5, 64, 8)).astype(np.int32)
    return Case(body, (counts,), (expected,))


@case(vote_any, columns=(8, 16, 64, 128))
def vote_of_columns(columns):
    flags = np.zeros((5, columns), np.int32)
    flags[1, 0] = flags[2, -1] = 1
    flags[3, columns // 2], flags[4, 3] = -1, LEAST

    def body(flags_ref, out_ref):
        for n in range(len(flags)):
            is_any = vote_any(load(flags_ref.at[n], "columns"))
            show(out_ref.at[n], is_any.astype(jnp.int32), "scalar")

    expected = np.broadcast_to(flags.any(axis=1)[:, None, None], (5, 64, 8)).astype(np.int32)
    return Case(body, (flags,), (expected,))


@case(any_row)
def vote_of_rows():
    flags = np.zeros((6, 64), np.int32)
    flags[1, 0] = flags[2, 63] = flags[3, [15, 16]] = flags[4, 40] = 1
    flags[5] = 1

    def body(flags_ref, out_ref):
        for n in range(len(flags)):
            is_any = any_row(load(flags_ref.at[n], "rows") != 0)
            show(out_ref.at[n], is_any.astype(jnp.int32), "scalar")

    expected, on_gpu = any_of_each(flags != 0)
    return Case(body, (flags,), expected, on_gpu=on_gpu)


def _tiles_below(limit: float, columns: int, *changes) -> np.ndarray:
    """Tiles below a limit, each but the first with one change: row, column, value."""
    tiles = np.random.default_rng(0).uniform(-limit, limit, (len(changes) + 1, 64, columns))
    tiles = 0.49 * tiles.astype(np.float32)
    for tile, (row, column, value) in zip(tiles[1:], changes, strict=True):
        tile[row, column - column % 2 : column - column % 2 + 2] = 0.0
        tile[row, column] = value
    return tiles


@case(any_beyond, columns=(8, 64, 128))
def neighbours_beyond_a_limit(columns):
    limit, last = 3.0, columns - 1
    below = np.nextafter(np.float32(limit), np.float32(0))
    tiles = _tiles_below(
        limit, columns, (0, 0, 3.0), (63, last, -3.0), (17, 5, math.nan), (40, 2, -math.inf),
        (5, 1, below), (9, 4, 3e38), (20, 6, 2.0),
    )  # fmt: skip
    tiles[-1, 20, 7] = -1.0  # 3 together

    def body(tiles_ref, out_ref):
        for n in range(len(tiles)):
            is_any = any_beyond(load(tiles_ref.at[n]), limit)
            show(out_ref.at[n], is_any.astype(jnp.int32), "scalar")

    together = np.abs(tiles).reshape(*tiles.shape[:2], -1, 2).sum(-1)
    expected, on_gpu = any_of_each(~(together < limit).all(axis=2))
    return Case(body, (tiles,), expected, on_gpu=on_gpu)


@case(any_from, columns=(8, 64, 128))
def elements_from_a_limit_on(columns):
    limit, last = 448.0, columns - 1
    below = np.nextafter(np.float32(limit), np.float32(0))
    tiles = _tiles_below(
        limit, columns, (0, 0, 448.0), (63, last, 3e38), (17, 5, math.nan), (40, 2, math.inf),
        (5, 1, below), (9, 4, -3e38), (9, 4, -math.inf),
    )  # fmt: skip

    def body(tiles_ref, out_ref):
        for n in range(len(tiles)):
            is_any = any_from(limit, load(tiles_ref.at[n]))
            show(out_ref.at[n], is_any.astype(jnp.int32), "scalar")

    expected, on_gpu = any_of_each(~(tiles < limit).all(axis=2))
    return Case(body, (tiles,), expected, on_gpu=on_gpu)
