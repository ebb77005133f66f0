import math

import jax.numpy as jnp
import numpy as np

from pallas_kernels.ptx.elements import keep_where, load_bits, load_elements
from tests.support.ptx import (
    LEAST,
    MOST,
    Case,
    case,
    load,
    numbers,
    show,
)


@case(
    load_elements,
    dtype=(jnp.float32, jnp.bfloat16),
    shape=((150, 200), (150, 131), (100, 128), (1, 200), (1, 75), (150, 1), (1, 1)),
    transposed=(False, True),
)
def elements(dtype, shape, transposed):
    rows, columns = shape
    x = numbers(*(shape[::-1] if transposed else shape), dtype=dtype)
    places, width = np.array([[0, 0], [3, 64], [rows - 1, 128]], np.int32), 64

    def body(x_ref, places_ref, out_ref):
        for n in range(len(places)):
            first_row, first_column = (places_ref[n, axis] for axis in range(2))
            tile = load_elements(x_ref, first_row, first_column, width, transposed=transposed)
            show(out_ref.at[n], tile)

    expected = []
    array = x.T if transposed else x
    if columns == 128:
        places[2, 1] = 64  # with whole tiles nothing is beyond the end
    for row, column in places:
        own = np.broadcast_to(array[np.minimum(row + np.arange(64), rows - 1)], (64, columns))
        padded = np.pad(own, ((0, 0), (0, 256)))
        padded = np.broadcast_to(own, (64, 256)) if columns == 1 else padded
        expected.append(padded[:, column : column + width])
    return Case(body, (x, places), (np.stack(expected),))


@case(load_bits, keep_where, columns=(64, 128), rows=(1, 130), is_broadcast=(False, True))
def elements_of_a_bit_each(columns, rows, is_broadcast):
    words = 1 if is_broadcast else 8
    tile = numbers(64, columns)
    bits = np.random.default_rng(0).integers(LEAST, MOST, (rows, words), np.int32, endpoint=True)
    bits[0, 0] = LEAST + 1  # the first and the last of a word
    if is_broadcast:
        bits = -(bits & 1)
    places = np.array([[0, 0], [64, 128], [100, 256 - columns]], np.int32)

    def body(tile_ref, bits_ref, places_ref, out_ref):
        for n in range(len(places)):
            loaded = load_bits(bits_ref, *(places_ref[n, axis] for axis in range(2)), columns)
            show(out_ref.at[n], keep_where(load(tile_ref), loaded, -math.inf))

    expected = []
    for row, first in places:
        own = bits[np.minimum(row + np.arange(64), rows - 1)]
        column = first + np.arange(columns)
        own = own[:, np.minimum(column // 32, words - 1)] >> column % 32 & 1
        expected.append(np.where(own > 0, tile, np.float32(-math.inf)))
    return Case(body, (tile, bits, places), (np.stack(expected),))
