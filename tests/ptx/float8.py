import math

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np

from pallas_kernels.ptx.float8 import (
    half_maxima,
    half_sums,
    half_weights,
    to_float8,
    transpose_float8,
)
from pallas_kernels.ptx.operands import (
    float8_operand,
)
from tests.support.ptx import (
    WIDTHS,
    Case,
    case,
    cast,
    integers,
    load,
    numbers,
    show,
    shown,
    to_global,
    to_shared,
)

# Of 16 columns as threads have them: two side by side, and two that are 8 behind.
_OF_THREADS = [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]


def in_order_of_threads(x: np.ndarray) -> np.ndarray:
    return x.reshape(*x.shape[:-1], -1, 16)[..., _OF_THREADS].reshape(x.shape)


def in_float8(x: np.ndarray) -> np.ndarray:
    return cast(np.clip(x, -448, 448), jnp.float8_e4m3fn)


@case(half_weights, columns=WIDTHS)
def weights_in_float16(columns):
    random = np.random.default_rng(0)
    logits = random.uniform(-30, 30, (64, columns)).astype(np.float16)
    logits[:, -3:] = -math.inf, math.inf, math.nan
    factor, reference = random.uniform(0.1, 2, 64), random.uniform(-20, 20, 64)
    reference[[1, 9, 20, 33, 47]] = 2047.4, -2047.4, 2047.6, -2048.0, 1e9
    factor[[2, 40, 41]] = 65519.0, 65520.0, math.inf
    factor, reference = factor.astype(np.float32), reference.astype(np.float32)

    def body(logits_ref, factor_ref, reference_ref, out_ref):
        of_rows = load(factor_ref, "rows"), load(reference_ref, "rows")
        show(out_ref, half_weights(load(logits_ref), *of_rows))

    start, half_factor = (cast(x, np.float16).astype(np.float64) for x in (-reference, factor))
    is_wrong = (np.abs(start) >= 2048) | np.isinf(half_factor)
    with np.errstate(all="ignore"):
        exponents = logits.astype(np.float64) * half_factor[:, None] + start[:, None]
        expected = np.exp2(cast(exponents, np.float16).astype(np.float64))
    expected[is_wrong] = math.nan
    # The error of `ex2.approx.f16`, rounded once more; 2^-24 is the smallest number.
    within = (2.0**-9.9 + 2.0**-11, 2.0**-24)
    return Case(body, (logits, factor, reference), (cast(expected, np.float16),), within=within)


@case(half_maxima, half_sums, columns=WIDTHS)
def over_the_columns_of_rows(columns):
    tile = numbers(64, columns, special=(math.inf, -math.inf, 65504.0, -65504.0), dtype=np.float16)
    tile[[0, 9, 63], [0, 5, -1]] = math.nan
    tile[1], tile[2, -1] = -math.inf, math.inf
    summed = integers(64, columns, dtype=np.float16)

    def body(tile_ref, summed_ref, maxima_ref, sums_ref):
        show(maxima_ref, half_maxima(load(tile_ref)), "rows")
        show(sums_ref, half_sums(load(summed_ref)))

    maxima = shown(tile.max(axis=1).astype(np.float32), "rows")
    sums = summed.reshape(64, -1, 8).sum(axis=1).astype(np.float32)
    return Case(body, (tile, summed), (maxima, sums))


@case(to_float8, columns=(16, 64, 128, 256))
def tile_in_float8(columns):
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16)  # all of them
    tiles = halves.reshape(-1, 64, columns)

    def body(tiles_ref, out_ref):
        for n in range(len(tiles)):
            show(out_ref.at[n], to_float8(load(tiles_ref.at[n])))

    expected = in_float8(tiles)
    return Case(body, (tiles,), (expected,), on_gpu=(in_order_of_threads(expected),))


@case(transpose_float8, keys=(64, 128, 192), columns=(64, 192, 256))
def transposed_float8(keys, columns):
    x = np.random.default_rng(0).integers(0, 256, (keys, columns), np.uint8)
    x = x.view(jnp.float8_e4m3fn)

    def body(x_ref, out_ref, *, source, target, full):
        to_shared(x_ref, source, full)
        transpose_float8(target, source)
        to_global(target, out_ref)

    source, target = (
        plgpu.SMEM(shape, x.dtype, transforms=float8_operand(shape[1]))
        for shape in (x.shape, x.shape[::-1])
    )
    expected = np.ascontiguousarray(x.T)
    return Case(
        body,
        (x,),
        (expected,),
        on_gpu=(in_order_of_threads(expected),),
        scratch=dict(source=source, target=target, full=plgpu.Barrier()),
    )
