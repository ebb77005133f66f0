"""Without an effect but on what the compiler keeps in registers, and on what it moves where."""

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_kernels.interpret import interpreting
from pallas_kernels.ptx.mlir import (
    ROWS,
    asm,
    int32,
    result_type,
    row_of_thread,
    rows_like,
    shared_address,
)


def load_shared(ref) -> jax.Array:
    """The int32 of a ref to 4 bytes in shared memory, read where this stands, each time anew.

    Registers are short: what a plain read gives the compiler keeps over loops.
    """
    if interpreting():
        return lax.bitcast_convert_type(ref[...], jnp.int32)

    shape = result_type((), jnp.int32, layout=plgpu.Layout.WG_SPLAT)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=shape)
    def load(_, ref):
        i32 = ir.IntegerType.get_signless(32)
        value = asm("ld.volatile.shared.u32 $0, [$1];", "=r,r", [shared_address(ref)], i32)
        return mgpu.FragmentedArray.splat(value, (), is_signed=True)

    return load(ref)


def own_warpgroup() -> jax.Array:
    """Number of the warpgroup, found out where it stands, so that it is kept nowhere."""
    if interpreting():
        return lax.axis_index("warpgroup")

    shape = result_type((), jnp.int32, plgpu.Layout.WG_SPLAT)

    @plgpu.inline_mgpu(return_type=shape)
    def number(_):
        text = (
            "{ .reg .b32 t; mov.u32 t, %tid.x; shr.u32 t, t, 7;"
            " shfl.sync.idx.b32 $0, t, 0, 0x1f, 0xffffffff; }"
        )
        value = asm(text, "=r", result=ir.IntegerType.get_signless(32))
        return mgpu.FragmentedArray.splat(value, (), is_signed=True)

    return number()


def fresh_zero() -> jax.Array:
    """A scalar 0 that the compiler cannot see through.

    An address made with it inside a loop is computed there. Otherwise what is the same in every
    step, such as wgmma descriptors of a resident tile, is kept in registers across the loop, and
    other registers are spilled for it.
    """
    if interpreting():
        return jnp.int32(0)

    shape = result_type((), jnp.int32, layout=plgpu.Layout.WG_SPLAT)

    @plgpu.inline_mgpu(return_type=shape)
    def zero(_):
        value = asm("mov.u32 $0, 0;", "=r", result=ir.IntegerType.get_signless(32))
        return mgpu.FragmentedArray.splat(value, (), is_signed=True)

    return zero()


def code_fence(count) -> None:
    """A branch over which ptxas moves nothing; never taken, as `count`, a scalar, is not negative.

    Without it arrivals at named barriers, on which nothing in the warp depends, come after whatever
    can be computed before the next wait, and what is computed before a wait is ptxas's choice.
    """
    if interpreting():
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT,))
    def branch(_, count):
        # A loop without an effect would be removed.
        text = (
            "{ .reg .pred p; setp.ge.s32 p, $0, 0; @p bra past;"
            " asleep: nanosleep.u32 64; bra asleep; past: }"
        )
        asm(text, "r,~{memory}", [count.registers[()]])

    branch(count)


def fresh_rows() -> jax.Array:
    """`(64,)` int32, the numbers of the rows of a tile, made anew like `fresh_zero`."""
    if interpreting():
        return lax.iota(jnp.int32, 64)

    zeros = plgpu.layout_cast(jnp.zeros((64,), jnp.int32), ROWS)
    shape = result_type((64,), jnp.int32, layout=ROWS)

    @plgpu.inline_mgpu(arg_types=(ROWS,), return_type=shape)
    def rows(_, like):
        row = row_of_thread()
        return rows_like(like, [row, arith.addi(row, int32(8))])

    return rows(zeros)
