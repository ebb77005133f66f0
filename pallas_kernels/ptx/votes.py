"""Whether something holds for any value that a warp has."""

import functools

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_kernels.interpret import interpreting
from pallas_kernels.ptx.mlir import (
    COLUMNS,
    ROWS,
    TILE,
    asm,
    base_address,
    extract,
    int32,
    result_type,
)


def any_positive(ref) -> jax.Array:
    """Whether an int32 in global memory is above 0, as threads of a warp agree."""
    if interpreting():
        return ref[...] > 0

    shape = result_type((), jnp.int32, plgpu.Layout.WG_SPLAT)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=shape)
    def vote(_, ref):
        i32 = ir.IntegerType.get_signless(32)
        return _vote_of_warp(
            "gt", asm("ld.global.nc.b32 $0, [$1];", "=r,l", [base_address(ref)], i32)
        )

    return vote(ref) > 0


def vote_any(flags: jax.Array) -> jax.Array:
    """Whether any of `(columns,)` int32 is not 0, in each warp alike, as the compiler knows."""
    if interpreting():
        return (flags != 0).any()

    shape = result_type((), jnp.int32, layout=plgpu.Layout.WG_SPLAT)

    @plgpu.inline_mgpu(arg_types=(COLUMNS,), return_type=shape)
    def vote(_, flags):
        # The threads of a warp have all columns.
        own = [extract(pair, e) for pair in flags.registers.flat for e in range(2)]
        return _vote_of_warp("ne", functools.reduce(arith.ori, own))

    return vote(flags) > 0


def any_row(flags: jax.Array) -> jax.Array:
    """Whether any of `(64,)` bool is true in the warp, which has 16 of these rows."""
    if interpreting():
        return flags.any()

    shape = result_type((), jnp.int32, layout=plgpu.Layout.WG_SPLAT)

    @plgpu.inline_mgpu(arg_types=(ROWS,), return_type=shape)
    def vote(_, flags):
        return _vote_of_warp("ne", functools.reduce(arith.ori, list(flags.registers.flat)))

    return vote(flags.astype(jnp.int32)) > 0


def any_beyond(tile: jax.Array, limit: float) -> jax.Array:
    """Whether an element of a `(64, n)` float32 tile may be `limit` or more, or NaN, in the warp.

    Of either sign. It is so where two neighbours are together, which takes three quarters of an
    instruction an element; a test of each would take one. As of `any_from`, warps differ in the
    result.
    """
    if interpreting():
        together = jnp.abs(tile).reshape(*tile.shape[:-1], -1, 2).sum(axis=-1)
        return jnp.logical_not(together < limit).any()

    shape = result_type((), jnp.int32, layout=plgpu.Layout.WG_SPLAT)

    @plgpu.inline_mgpu(arg_types=(TILE,), return_type=shape)
    def vote(_, tile):
        i32 = ir.IntegerType.get_signless(32)
        text = "{ .reg .f32 a, b; abs.f32 a, $1; abs.f32 b, $2; add.f32 a, a, b; mov.b32 $0, a; }"
        sums = [
            asm(text, "=r,f,f", [extract(pair, 0), extract(pair, 1)], i32)
            for pair in tile.registers.flat
        ]
        # Floats that are not negative are in the order of their bits, as are integers, of which the
        # hardware has a maximum of three.
        largest = functools.reduce(arith.maxsi, sums)
        bits = np.float32(limit).view(np.int32)
        return _vote_of_warp("ge", arith.subi(largest, int32(int(bits))))

    return vote(tile) > 0


def any_from(limit: float, tile: jax.Array) -> jax.Array:
    """Whether an element of a `(64, n)` float32 tile is `limit` or more, or NaN, in the warp.

    Warps differ in the result, a scalar: what depends on it must be of the warp's rows alone.
    """
    if interpreting():
        return jnp.logical_not(tile < limit).any()

    shape = result_type((), jnp.int32, layout=plgpu.Layout.WG_SPLAT)

    @plgpu.inline_mgpu(arg_types=(TILE,), return_type=shape)
    def vote(_, tile):
        own = [extract(pair, e) for pair in tile.registers.flat for e in range(2)]
        bound = f"0f{np.float32(limit).view(np.uint32):08x}"
        tests = "".join(f" setp.geu.or.f32 p, ${n + 1}, {bound}, p;" for n in range(len(own)))
        text = (
            f"{{ .reg .pred p; setp.ne.u32 p, 0, 0;{tests}"
            " vote.sync.any.pred p, p, 0xffffffff; selp.s32 $0, 1, 0, p; }"
        )
        i32 = ir.IntegerType.get_signless(32)
        value = asm(text, "=r" + ",f" * len(own), own, i32)
        return mgpu.FragmentedArray.splat(value, (), is_signed=True)

    return vote(tile) > 0


def _vote_of_warp(comparison: str, word):
    """1 where an int32 of a thread of the warp compares so with 0, else 0; all threads have it."""
    text = (
        f"{{ .reg .pred p; setp.{comparison}.s32 p, $1, 0; vote.sync.any.pred p, p, 0xffffffff;"
        " selp.s32 $0, 1, 0, p; }"
    )
    value = asm(text, "=r,r", [word], ir.IntegerType.get_signless(32))
    return mgpu.FragmentedArray.splat(value, (), is_signed=True)
