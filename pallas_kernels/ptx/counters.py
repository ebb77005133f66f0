"""Counters in global memory: tickets that are drawn, and what thread blocks tell each other."""

from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxlib.mlir import ir

from pallas_kernels.interpret import interpreting
from pallas_kernels.ptx.mlir import asm, base_address, result_type, shared_address, thread_index


def draw_ticket(counter, in_turn) -> jax.Array:
    """Adds 1 to an int32 in global memory; its value before that, in a warpgroup's first thread.

    All of the warpgroup call it, `share_first` tells them. Nothing waits for the memory until then.
    In interpret mode tickets are not drawn: they go in turn.
    """
    if interpreting():
        return in_turn

    shape = result_type((), jnp.int32, layout=plgpu.Layout.WG_SPLAT)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=shape)
    def draw(_, counter):
        # An addition ptxas makes one for the warp, and waits for it to share it out.
        text = (
            "{ .reg .pred p; setp.eq.u32 p, $2, 0; mov.u32 $0, 0;"
            " @p atom.relaxed.gpu.global.inc.u32 $0, [$1], 0x7fffffff; }"
        )
        i32 = ir.IntegerType.get_signless(32)
        value = asm(text, "=r,l,r,~{memory}", [base_address(counter), thread_index()], i32)
        return mgpu.FragmentedArray.splat(value, (), is_signed=True)

    return draw(counter)


def share_first(*pairs: tuple[Any, Any]) -> None:
    """Stores int32 of a warpgroup's first thread in shared memory, where all its threads see them.

    Args:
      pairs: a ref to 4 bytes, and the value.
    """
    if interpreting():
        for ref, value in pairs:
            ref[...] = lax.bitcast_convert_type(value, ref.dtype)
        return

    refs, values = zip(*pairs, strict=True)
    arg_types = (plgpu.RefType(),) * len(refs) + (plgpu.Layout.WG_SPLAT,) * len(values)

    @plgpu.inline_mgpu(arg_types=arg_types)
    def share(_, *args):
        for ref, value in zip(args[: len(refs)], args[len(refs) :], strict=True):
            asm(
                "{ .reg .pred p; setp.eq.u32 p, $2, 0; @p st.shared.u32 [$0], $1; }",
                "r,r,r,~{memory}",
                [shared_address(ref), value.registers[()], thread_index()],
            )
        mgpu.warpgroup_barrier()

    share(*refs, *values)


def add_to(counter) -> None:
    """Adds something to an int32 in global memory, so that it is more than 0."""
    if interpreting():
        plgpu.atomic_add(counter, jnp.int32(1))
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def add(_, counter):
        asm("red.global.add.s32 [$0], 1;", "l,~{memory}", [base_address(counter)])

    add(counter)


def add_when_stored(counter) -> None:
    """Adds 1 to an int32 in global memory once all that the warpgroup stored there can be seen.

    By whoever `await_count` lets go on, and by what it has TMA add. In interpret mode nothing is
    counted.
    """
    if interpreting():
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def add(_, counter):
        asm("fence.proxy.async.global;", "~{memory}")
        mgpu.warpgroup_barrier()
        asm(
            "{ .reg .pred p; setp.eq.u32 p, $1, 0;"
            " @p fence.acq_rel.gpu; @p red.relaxed.gpu.global.add.u32 [$0], 1; }",
            "l,r,~{memory}",
            [base_address(counter), thread_index()],
        )

    add(counter)


def await_count(counter, count) -> None:
    """Waits until an int32 in global memory, of `add_when_stored`, is `count` or more."""
    if interpreting():
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT))
    def wait(_, counter, count):
        asm(
            "{ .reg .pred p; .reg .b32 now; again: ld.acquire.gpu.global.u32 now, [$0];"
            " setp.lt.s32 p, now, $1; @p bra again; fence.proxy.async.global; }",
            "l,r,~{memory}",
            [base_address(counter), count.registers[()]],
        )

    wait(counter, jnp.int32(count))
