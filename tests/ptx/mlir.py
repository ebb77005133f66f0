import math

from pallas_kernels.ptx.mlir import zero_tile
from tests.support.ptx import (
    DTYPES,
    Case,
    case,
    load,
    numbers,
    show,
)


@case(zero_tile, dtype=DTYPES, columns=(8, 128))
def tile_of_zeros(dtype, columns):
    x = numbers(64, columns, special=(1.0, math.inf, math.nan), dtype=dtype)

    def body(x_ref, out_ref):
        show(out_ref, load(x_ref) + zero_tile(64, columns, dtype))

    return Case(body, (x,), (x,))
