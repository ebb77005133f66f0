"""Arithmetic of float32 tiles."""

import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.interpret import interpreting
from pallas_kernels.ptx.mlir import (
    COLUMNS,
    TILE,
    asm,
    columns_like,
    extract,
    fragments,
    insert,
    int32,
    like_array,
    result_type,
    shared_address,
    thread_index,
)


def div_rem(x, divisor: int):
    """Quotient and remainder of a traced int32 that is not negative."""
    by = jnp.int32(divisor)
    return lax.div(x, by), lax.rem(x, by)


def column_maxima(tile: jax.Array, scratch) -> jax.Array:
    """`(columns,)` maxima of a `(64, columns)` float32 tile, NaN of a column that has one.

    The scratch is `(4 * columns,)` float32 in shared memory, for both this and `column_sums`.
    """
    if interpreting():
        # XLA loses NaN in maxima over 64 and more on a CPU.
        return jnp.where(jnp.isnan(tile).any(axis=0), jnp.nan, tile.max(axis=0))
    return _over_rows(tile, scratch, arith.maximumf)


def column_sums(tile: jax.Array, scratch) -> jax.Array:
    """`(columns,)` sums of a `(64, columns)` float32 tile; see `column_maxima`."""
    return tile.sum(axis=0) if interpreting() else _over_rows(tile, scratch, arith.addf)


def _over_rows(tile: jax.Array, scratch, combine) -> jax.Array:
    """Combines the rows of a tile, of up to 8 groups of columns, a power of two of them."""
    columns = tile.shape[1]
    like = plgpu.layout_cast(jnp.zeros((columns,), jnp.float32), COLUMNS)
    shape = result_type((columns,), jnp.float32, layout=COLUMNS)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), TILE, COLUMNS), return_type=shape)
    def over_rows(_, scratch, tile, like):
        thread = thread_index()
        halves = {(group, half): pair for _, group, half, pair in fragments(tile.registers)}
        values = [
            combine(*(extract(halves[group, half], e) for half in range(2)))
            for group in range(columns // 8)
            for e in range(2)
        ]
        # 8 threads have the same columns. Each goes on with half of them and gives the others away.
        first_group = int32(0)
        for distance in (16, 8, 4):
            kept = given = values
            if len(values) > 2:
                middle = len(values) // 2
                bit = arith.andi(thread, int32(distance))
                is_upper = arith.cmpi(arith.CmpIPredicate.ne, bit, int32(0))
                pairs = list(zip(values[:middle], values[middle:], strict=True))
                kept = [arith.select(is_upper, high, low) for low, high in pairs]
                given = [arith.select(is_upper, low, high) for low, high in pairs]
                half_groups = arith.select(is_upper, int32(middle // 2), int32(0))
                first_group = arith.addi(first_group, half_groups)
            values = [
                combine(a, mgpu_utils.shfl_bfly(b, distance))
                for a, b in zip(kept, given, strict=True)
            ]

        own_columns = shared_address(scratch, (arith.andi(thread, int32(3)), 8))
        warp = arith.shrui(thread, int32(5))
        place = arith.addi(arith.muli(warp, int32(columns // 8)), first_group)
        mgpu_utils.warpgroup_barrier()  # all have read what the last call left
        asm(
            "st.shared.v2.f32 [$0], {$1, $2};",
            "r,f,f,~{memory}",
            [arith.addi(own_columns, arith.muli(place, int32(32))), *values],
        )
        mgpu_utils.warpgroup_barrier()
        f32 = ir.F32Type.get()
        two = llvm.StructType.get_literal([f32] * 2)
        parts = 4
        if columns >= 32:  # fewer instructions, but one more exchange: a thread a column
            column = arith.remui(thread, int32(columns))
            place = shared_address(scratch, (column, 4))
            text = "ld.shared.f32 $0, [$1+{}];"
            of_warps = [
                asm(text.format(4 * columns * n), "=f,r,~{memory}", [place], f32) for n in range(4)
            ]
            asm(
                f"{{ .reg .pred p; setp.lt.u32 p, $1, {columns}; @p st.shared.f32 [$0], $2; }}",
                "r,r,f,~{memory}",
                [place, thread, functools.reduce(combine, of_warps)],
            )
            mgpu_utils.warpgroup_barrier()
            parts = 1
        totals = []
        for group in range(columns // 8):
            loaded = []
            for n in range(parts):
                text = f"ld.shared.v2.f32 {{$0, $1}}, [$2+{4 * columns * n + 32 * group}];"
                loaded.append(asm(text, "=f,=f,r,~{memory}", [own_columns], two))
            for e in range(2):
                values = [llvm.extractvalue(f32, pair, [e]) for pair in loaded]
                totals.append(functools.reduce(combine, values))
        return columns_like(like, totals)

    return over_rows(scratch, tile, like)


def rsqrt(tile: jax.Array) -> jax.Array:
    """Reciprocal square root of a float32 tile without denormals, to 2^-22 of it.

    Mosaic GPU's own spends two more instructions on denormals.
    """
    if interpreting():
        return lax.rsqrt(tile)

    shape = result_type(tile.shape, jnp.float32, layout=TILE)

    @plgpu.inline_mgpu(arg_types=(TILE,), return_type=shape)
    def compute(_, tile):
        f32 = ir.F32Type.get()
        out = tile.registers.copy()
        for index, pair in np.ndenumerate(tile.registers):
            for e in range(2):
                root = llvm.inline_asm(
                    f32, [extract(pair, e)], "rsqrt.approx.ftz.f32 $0, $1;", "=f,f"
                )
                pair = insert(pair, root, e)
            out[index] = pair
        return like_array(tile, out)

    return compute(tile)
