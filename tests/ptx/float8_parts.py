import math

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np

from pallas_kernels.ptx.float8_parts import (
    join_parts,
    store_queries_float8,
    store_weights_float8,
)
from pallas_kernels.ptx.operands import (
    float8_operand,
)
from pallas_kernels.ptx.queries import load_queries
from tests.ptx.float8 import in_float8, in_order_of_threads
from tests.support.ptx import (
    SHORT_DTYPES,
    Case,
    case,
    cast,
    integers,
    load,
    show,
    to_global,
)


def _two_parts(x: np.ndarray) -> np.ndarray:
    first = in_float8(x)
    return np.concatenate([first, in_float8((x - first.astype(x.dtype)) * 16)])


@case(join_parts, columns=(8, 64, 128))
def joined_parts(columns):
    x = integers(64, 2 * columns)

    def body(x_ref, out_ref):
        show(out_ref, join_parts(load(x_ref)))

    return Case(body, (x,), (x[:, :columns] + x[:, columns:] / np.float32(16),))


@case(store_queries_float8, dtype=SHORT_DTYPES, rows=(8, 64), columns=(64, 128, 256))
def queries_in_two_parts(dtype, rows, columns):
    tokens, heads, first = 9, 8, 9
    # As far as both parts of bfloat16 are exact, and float16 has it.
    x = np.random.default_rng(0).standard_normal((tokens * heads, columns))
    x *= 2.0 ** np.linspace(-10, 4, tokens * heads)[:, None]
    x[9], x[10, 1:], x[13, ::2] = 0.0, 0.0, -0.0
    x[11, 3], x[12, -1], x[14, 0] = math.inf, -math.inf, math.nan
    if dtype == jnp.bfloat16:
        x[15], x[16] = x[15] * 1e36, x[16] * 2.0**-95
    x = cast(x, dtype)

    def body(x_ref, units_ref, out_ref, *, smem, units):
        loaded = load_queries(x_ref, first, rows)
        store_queries_float8(smem, units, loaded, dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(units, units_ref)
        to_global(smem, out_ref)

    wide = x[np.minimum(first + np.arange(rows), len(x) - 1)].astype(np.float32)
    largest = np.abs(wide).max(axis=1)
    with np.errstate(all="ignore"):
        units = np.exp2(np.floor(np.log2(largest.astype(np.float64))) - 7)
        units = np.where(np.isfinite(largest), np.maximum(units, 2.0**-107), math.inf)
        expected = _two_parts((wide / units[:, None]).astype(np.float32))
    return Case(
        body,
        (x.reshape(tokens, heads, columns),),
        (units.astype(np.float32), expected),
        scratch=dict(
            smem=plgpu.SMEM(expected.shape, expected.dtype, transforms=float8_operand(columns)),
            units=plgpu.SMEM((rows,), jnp.float32),
        ),
    )


def _stored_weights(weights: np.ndarray, expected: np.ndarray, on_gpu: np.ndarray, **more) -> Case:
    shape = 2 * weights.shape[1], 64

    def body(weights_ref, out_ref, *, smem):
        store_weights_float8(smem, load(weights_ref))
        to_global(smem, out_ref)

    smem = plgpu.SMEM(shape, jnp.float8_e4m3fn, transforms=float8_operand(64))
    outputs = (jax.ShapeDtypeStruct(shape, jnp.float8_e4m3fn),)
    return Case(
        body, (weights,), (expected,), on_gpu=(on_gpu,), outputs=outputs,
        scratch=dict(smem=smem), **more,
    )  # fmt: skip


@case(store_weights_float8, rows=(8, 16, 64))
def weights_of_16_bits_in_two_parts(rows):
    """Those that float16 has, to the bit."""
    random = np.random.default_rng(0)
    weights = np.exp2(random.uniform(-20, 8.5, (64, rows))).astype(np.float16).astype(np.float32)
    weights[:, 0] = np.resize(np.float32([0.0, 448.0, 1.0625, 1.1875, 362.0, math.nan]), 64)
    expected = _two_parts(weights.T)
    return _stored_weights(weights, expected, in_order_of_threads(expected))


@case(store_weights_float8, rows=(8, 64))
def weights_in_two_parts(rows):
    """Any, as far as both parts together have them."""
    random = np.random.default_rng(0)
    weights = np.exp2(random.uniform(-20, 8.5, (64, rows))).astype(np.float32)

    def joined(parts):
        first, second = np.split(parts.astype(np.float32), 2)
        return (first + second / 16,)

    # A part is off by 2^-4 of itself at most, the PTX by half a unit of float16 besides.
    return _stored_weights(
        weights,
        weights.T,
        in_order_of_threads(weights.T),
        of=joined,
        within=(2.0**-8 + 2.0**-11, 2.0**-14),
    )
