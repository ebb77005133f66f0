import math

import numpy as np
from jax import lax

from pallas_kernels.online_softmax import spread
from pallas_kernels.ptx.dropout import (
    dropped_bytes,
    kept_operand,
    negate_dropped,
    negate_dropped_transposed,
    positive_operand,
)
from tests.support.ptx import (
    SHORT_DTYPES,
    SPECIAL,
    WIDTHS,
    Case,
    case,
    cast,
    load,
    numbers,
    show,
    without_sign_of_zero,
)


def _words(queries: int, keys: int, limits: tuple[int, int]) -> tuple:
    """int32 words of queries, in their order and with limits, and of keys, and what is dropped."""
    random = np.random.default_rng((queries, keys, *limits))
    words = random.integers(0, 2**32, (queries // 16, 8), np.uint32) | np.uint32(1)
    both = random.integers(limits[0], limits[1] + 1, (2, queries // 16, 8)).astype(np.uint32)
    key_words = random.integers(0, 2**32, (keys // 16, 8), np.uint32) | np.uint32(1)
    words[0, 0], key_words[0, :2] = 2**32 - 1, (2**32 - 1, 1)
    query_words = np.stack([words, both[0] << 8 | both[1] << 24], axis=1).reshape(-1)
    is_dropped = np.zeros((queries, keys), bool)
    for i, j in np.ndindex(queries, keys):
        of_query, of_key = (i // 16, i % 8), (j // 16, j % 8)
        product = int(words[of_query]) * int(key_words[of_key])
        value = (product >> 32) ^ product
        later_query, later_key = i % 16 >= 8, j % 16 >= 8
        seven_bits = value >> 8 * (2 * later_key + (not later_query)) & 0x7F
        is_dropped[i, j] = seven_bits + int(both[int(later_key)][of_query]) >= 128
    key_words = np.tile(key_words[:, None], (1, 2, 1)).reshape(-1)
    return query_words.view(np.int32), key_words.view(np.int32), is_dropped


@case(dropped_bytes, kept_operand, dtype=SHORT_DTYPES, columns=(32, 64, 128))
def what_is_not_dropped(dtype, columns):
    first = 16
    tile = numbers(64, columns)
    queries, keys, is_dropped = _words(64, first + columns, (0, 128))

    def body(tile_ref, queries_ref, keys_ref, out_ref):
        dropped = dropped_bytes(load(queries_ref, "rows"), keys_ref, first, columns)
        show(out_ref, kept_operand(load(tile_ref), dropped, dtype))

    expected = cast(np.where(is_dropped[:, first:], np.float32(0), tile), dtype)
    return Case(body, (tile, queries, keys), (expected,))


_FEW = {True: (0, 65), False: (63, 128)}  # limits
_WEIGHTS = (0.0, 1.0, math.inf, 3e38, 2.0**-126)


@case(negate_dropped, few=(True, False), columns=(16, 64, 128))
def negative_where_dropped(few, columns):
    first = 16
    tile = np.abs(numbers(64, columns, special=_WEIGHTS))
    queries, keys, is_dropped = _words(64, first + columns, _FEW[few])

    def body(tile_ref, queries_ref, keys_ref, out_ref):
        rows = load(queries_ref, "rows")
        show(out_ref, negate_dropped(load(tile_ref), rows, keys_ref, first, few=few))

    expected = np.where(is_dropped[:, first:], -tile, tile)
    # The PTX makes 0 of 0, the twin -0. Who reads it asks whether it is below 0, or for its size.
    return Case(
        body,
        (tile, queries, keys),
        without_sign_of_zero(expected),
        of=without_sign_of_zero,
    )


@case(negate_dropped_transposed, few=(True, False), columns=(16, 64, 128))
def negative_where_dropped_transposed(few, columns):
    tile = np.abs(numbers(64, columns, special=_WEIGHTS))
    queries, keys, is_dropped = _words(columns, 64, _FEW[few])

    def body(tile_ref, queries_ref, keys_ref, out_ref):
        rows = spread(load(keys_ref, "rows"), tile.shape)
        in_columns = lax.broadcast_in_dim(load(queries_ref, "columns"), tile.shape, [1])
        show(out_ref, negate_dropped_transposed(load(tile_ref), rows, in_columns, few=few))

    return Case(body, (tile, queries, keys), (np.where(is_dropped.T, -tile, tile),))


@case(positive_operand, dtype=SHORT_DTYPES, columns=WIDTHS)
def positive_weights(dtype, columns):
    tile = numbers(64, columns, special=tuple(x for x in SPECIAL if x))

    def body(tile_ref, out_ref):
        show(out_ref, positive_operand(load(tile_ref), dtype))

    return Case(body, (tile,), (cast(np.where(tile < 0, np.float32(0), tile), dtype),))
