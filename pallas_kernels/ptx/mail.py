"""Tiles that one warpgroup leaves for another."""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_kernels.interpret import interpreting
from pallas_kernels.ptx.mlir import (
    TILE,
    WARPGROUP_THREADS,
    asm,
    extract,
    insert,
    like_array,
    own_address,
    result_type,
)


def mail_shape(columns: int, dtype) -> tuple[int, int]:
    """Shape of the int32 shared memory in which `send_tile` leaves a `(64, columns)` tile."""
    words = 4 * WARPGROUP_THREADS  # 16 bytes a thread
    return (64 * columns * np.dtype(dtype).itemsize // 4 // words, words)


def send_tile(ref, tile: jax.Array) -> None:
    """Leaves a `(64, n)` tile in shared memory of `mail_shape` for `receive_tile`.

    A thread of one warpgroup leaves its registers for the same thread of another, 16 bytes at a
    time: no two threads meet in a bank, nor in a place, so that two warpgroups may write to each
    other in turns through one ref.
    """
    if interpreting():
        pairs = () if tile.dtype.itemsize == 4 else (2,)
        ref[...] = lax.bitcast_convert_type(tile.reshape(*ref.shape, *pairs), jnp.int32)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), TILE))
    def send(_, ref, tile):
        i32 = ir.IntegerType.get_signless(32)
        as_words = ir.VectorType.get((tile.mlir_dtype.width // 16,), i32)
        pairs = [llvm.bitcast(as_words, pair) for pair in tile.registers.flat]
        words = [extract(pair, e) for pair in pairs for e in range(as_words.shape[0])]
        address = own_address(ref)
        for n in range(0, len(words), 4):
            text = f"st.shared.v4.b32 [$0+{n * 4 * WARPGROUP_THREADS}], {{$1, $2, $3, $4}};"
            asm(text, "r,r,r,r,r,~{memory}", [address, *words[n : n + 4]])

    send(ref, tile)


def receive_tile(ref, columns: int, dtype) -> jax.Array:
    """The `(64, columns)` tile that another warpgroup left with `send_tile`."""
    if interpreting():
        return lax.bitcast_convert_type(ref[...], dtype).reshape(64, columns)

    zeros = plgpu.layout_cast(jnp.zeros((64, columns), dtype), TILE)
    shape = result_type((64, columns), dtype, layout=TILE)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), TILE), return_type=shape)
    def receive(_, ref, like):
        i32 = ir.IntegerType.get_signless(32)
        as_words = ir.VectorType.get((like.mlir_dtype.width // 16,), i32)
        four = llvm.StructType.get_literal([i32] * 4)
        address = own_address(ref)
        loaded_words = []
        for n in range(0, like.registers.size * as_words.shape[0], 4):
            text = f"ld.shared.v4.b32 {{$0, $1, $2, $3}}, [$4+{n * 4 * WARPGROUP_THREADS}];"
            loaded = asm(text, "=r,=r,=r,=r,r,~{memory}", [address], four)
            loaded_words += [llvm.extractvalue(i32, loaded, [e]) for e in range(4)]
        words = iter(loaded_words)
        out = like.registers.copy()
        for index, pair in np.ndenumerate(like.registers):
            pair_words = llvm.mlir_undef(as_words)
            for e in range(as_words.shape[0]):
                pair_words = insert(pair_words, next(words), e)
            out[index] = llvm.bitcast(pair.type, pair_words)
        return like_array(like, out)

    return receive(ref, zeros)
