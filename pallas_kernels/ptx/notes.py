"""What threads note for themselves in shared memory, and else would carry in registers."""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_kernels.interpret import interpreting
from pallas_kernels.ptx.mlir import (
    ROWS,
    WARPGROUP_THREADS,
    asm,
    result_type,
    rows_like,
    scalar,
    shared_address,
    thread_index,
)


def smem(warpgroups: int) -> Any:
    """Shared memory for the notes of so many warpgroups, `(warpgroups, threads)`."""
    return plgpu.SMEM((warpgroups, WARPGROUP_THREADS), jnp.int32)


def clear(notes) -> None:
    """Nothing is noted in `(threads,)` of a warpgroup. No one but its threads may read it."""
    if interpreting():
        notes[...] = jnp.zeros((WARPGROUP_THREADS,), jnp.int32)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def clear(_, notes):
        asm("st.shared.u32 [$0], 0;", "r,~{memory}", [_own(notes)])

    clear(notes)


def note(notes, flags: jax.Array) -> None:
    """Notes if any of `(64,)` bool is true."""
    if interpreting():
        noted = notes[pl.ds(0, 64)]
        notes[pl.ds(0, 64)] = noted | flags.astype(jnp.int32)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), ROWS))
    def store(_, notes, flags):
        low, high = (scalar(register) for register in flags.registers.flat)
        text = "{ .reg .pred p; setp.ne.s32 p, $1, 0; @p st.shared.u32 [$0], 1; }"
        asm(text, "r,r,~{memory}", [_own(notes), arith.ori(low, high)])

    store(notes, flags.astype(jnp.int32))


def noted(notes) -> jax.Array:
    """`(64,)` int32: not 0 in rows of a thread that has noted something."""
    if interpreting():
        return notes[pl.ds(0, 64)]

    zeros = plgpu.layout_cast(jnp.zeros((64,), jnp.int32), ROWS)
    shape = result_type((64,), jnp.int32, layout=ROWS)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), ROWS), return_type=shape)
    def load(_, notes, like):
        i32 = ir.IntegerType.get_signless(32)
        word = asm("ld.shared.u32 $0, [$1];", "=r,r,~{memory}", [_own(notes)], i32)
        return rows_like(like, [word, word])

    return load(notes, zeros)


def _own(notes):
    return shared_address(notes, (thread_index(), 4))
