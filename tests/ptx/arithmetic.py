import math

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np

from pallas_kernels.ptx.arithmetic import column_maxima, column_sums, div_rem, rsqrt
from tests.support.ptx import (
    MOST,
    Case,
    case,
    integers,
    load,
    numbers,
    show,
    some,
)


@case(div_rem, divisor=(1, 3, 64, 1000003))
def quotients(divisor):
    x = some([0, 1, 2, 3, divisor - 1, divisor, divisor + 1, MOST, 123456789], 16)

    def body(x_ref, out_ref):
        for n in range(len(x)):
            for place, part in enumerate(div_rem(x_ref[n], divisor)):
                out_ref[n, place] = part

    expected = np.stack([x // divisor, x % divisor], axis=1)
    return Case(body, (x,), (expected,))


@case(column_maxima, column_sums, columns=(8, 16, 32, 64))
def over_the_rows_of_columns(columns):
    """Twice, as what the first left in the scratch must not be read."""
    summed = integers(2, 64, columns)
    tiles = numbers(2, 64, columns, special=(math.inf, -math.inf))
    tiles[0, :, 0], tiles[1, 63, -1], tiles[1, 0, 1] = -math.inf, math.nan, math.inf

    def body(summed_ref, tiles_ref, sums_ref, maxima_ref, *, scratch):
        for n in range(2):
            show(sums_ref.at[n], column_sums(load(summed_ref.at[n]), scratch), "columns")
            show(maxima_ref.at[n], column_maxima(load(tiles_ref.at[n]), scratch), "columns")

    expected = tuple(
        np.broadcast_to(x[:, None], tiles.shape) for x in (summed.sum(1), tiles.max(1))
    )
    scratch = dict(scratch=plgpu.SMEM((4 * columns,), jnp.float32))
    return Case(body, (summed, tiles), expected, scratch=scratch)


@case(rsqrt, columns=(8, 64))
def reciprocal_roots(columns):
    random = np.random.default_rng(0)
    tile = random.uniform(1, 4, (64, columns)) * 4.0 ** random.integers(-60, 60, columns)
    tile = tile.astype(np.float32)
    tile[0, :7] = 1.0, 2.0**-126, 3.4e38, math.inf, math.nan, 0.0, 4.0

    def body(tile_ref, out_ref):
        show(out_ref, rsqrt(load(tile_ref)))

    with np.errstate(divide="ignore"):
        expected = (1 / np.sqrt(tile.astype(np.float64))).astype(np.float32)
    # and what rounding the definition to float32 takes
    return Case(body, (tile,), (expected,), within=(2.0**-22 + 2.0**-24, 0))
