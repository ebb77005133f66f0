"""Float32 tiles in fragment order, in which what a thread holds is contiguous."""

import math

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.interpret import interpreting
from pallas_kernels.ptx.mlir import (
    TILE,
    WARPGROUP_THREADS,
    asm,
    extract,
    fragments,
    global_address,
    insert,
    int32,
    like_array,
    own_address,
    result_type,
    thread_index,
    zero_tile,
)

_PIECE_BYTES = 16 * WARPGROUP_THREADS  # 16 columns by one row half of a (64, n) float32 tile


def fragment_shape(columns: int) -> tuple[int, int]:
    """Shape of a `(64, columns)` float32 tile in fragment order; TMA takes up to 256 an axis."""
    return (columns // 4, 256)


def store_fragment(ref, tile: jax.Array) -> None:
    """Stores a `(64, n)` float32 tile to shared memory in fragment order, 16 bytes at a time.

    Fragment order is `[16 columns][row half][thread][4]`: what a thread holds is contiguous, so one
    address register serves all stores, and no two threads meet in a bank.
    """
    if interpreting():
        ref[...] = _to_fragment_order(tile)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), TILE))
    def store(_, ref, tile):
        address = own_address(ref)
        pairs = {(group, half): pair for _, group, half, pair in fragments(tile.registers)}
        for group, half in pairs:
            if group % 2 == 0:
                values = [extract(pairs[g, half], e) for g in (group, group + 1) for e in range(2)]
                offset = (group + half) * _PIECE_BYTES
                asm(
                    f"st.shared.v4.f32 [$0+{offset}], {{$1, $2, $3, $4}};",
                    "r,f,f,f,f,~{memory}",
                    [address, *values],
                )

    store(ref, tile)


def zero_fragment(ref) -> None:
    """Stores zeros to a float32 tile in fragment order in global memory."""
    if interpreting():
        ref[...] = jnp.zeros(ref.shape, ref.dtype)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def store(_, ref):
        address = global_address(ref, arith.muli(thread_index(), int32(16)))
        zero = arith.constant(ir.F32Type.get(), ir.FloatAttr.get(ir.F32Type.get(), 0.0))
        pieces = 4 * math.prod(ir.MemRefType(ref.type).shape) // _PIECE_BYTES
        for piece in range(pieces):
            text = f"st.global.v4.f32 [$0+{piece * _PIECE_BYTES}], {{$1, $1, $1, $1}};"
            asm(text, "l,f,~{memory}", [address, zero])

    store(ref)


def load_fragment(ref, columns: int) -> jax.Array:
    """The `(64, columns)` float32 tile that stands in global memory in fragment order."""
    if interpreting():
        return _from_fragment_order(ref[...], columns)

    zeros = zero_tile(64, columns)
    shape = result_type((64, columns), jnp.float32, layout=TILE)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), TILE), return_type=shape)
    def load(_, ref, like):
        address = global_address(ref, arith.muli(thread_index(), int32(16)))
        f32 = ir.F32Type.get()
        four = llvm.StructType.get_literal([f32] * 4)
        loaded = {}
        for group in range(0, columns // 8, 2):
            for half in range(2):
                offset = (group + half) * _PIECE_BYTES
                loaded[group, half] = asm(
                    f"ld.global.nc.L1::no_allocate.v4.f32 {{$0, $1, $2, $3}}, [$4+{offset}];",
                    "=f,=f,=f,=f,l",
                    [address],
                    four,
                )
        out = like.registers.copy()
        for index, group, half, pair in fragments(like.registers):
            for e in range(2):
                value = llvm.extractvalue(
                    f32, loaded[group - group % 2, half], [2 * (group % 2) + e]
                )
                pair = insert(pair, value, e)
            out[index] = pair
        return like_array(like, out)

    return load(ref, zeros)


def _to_fragment_order(tile):
    n = tile.shape[1]
    x = tile.reshape(4, 2, 8, n // 16, 2, 4, 2)  # warp, half, quad, 16 columns, group, lane, pair
    return x.transpose(3, 1, 0, 2, 5, 4, 6).reshape(fragment_shape(n))


def _from_fragment_order(fragment, columns):
    x = fragment.reshape(columns // 16, 2, 4, 8, 4, 2, 2)
    return x.transpose(2, 1, 3, 0, 5, 4, 6).reshape(64, columns)
