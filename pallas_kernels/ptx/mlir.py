"""MLIR in few words, and the layouts of registers that functions here speak of."""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

WARPGROUP_THREADS = 128


TILE = plgpu.Layout.WGMMA
ROWS = plgpu.Layout.WGMMA.reduce(1)
COLUMNS = plgpu.Layout.WGMMA.reduce(0)


def result_type(shape: tuple[int, ...], dtype: Any, layout: Any) -> plgpu.ShapeDtypeStruct:
    """What `inline_mgpu` returns. To a type checker jnp.int32 is not the np.dtype that it asks."""
    return plgpu.ShapeDtypeStruct(shape, dtype, layout)


def zero_tile(rows: int, columns: int, dtype=jnp.float32) -> jax.Array:
    """A tile of zeros in the layout of a wgmma accumulator."""
    return plgpu.layout_cast(jnp.zeros((rows, columns), dtype), TILE)


def asm(text: str, constraints: str = "", operands=(), result=None):
    result = ir.Type.parse("!llvm.void") if result is None else result
    return llvm.inline_asm(result, list(operands), text, constraints, has_side_effects=True)


def int32(value: int):
    i32 = ir.IntegerType.get_signless(32)
    return arith.constant(i32, ir.IntegerAttr.get(i32, value))


def bit_mask(number: int):
    """A word in which that bit alone is set."""
    return int32(1 << number if number < 31 else -(1 << 31))


def thread_index():
    """Index of this thread in its warpgroup.

    Read anew at each use: the compiler must not keep addresses made from it alive across the loop.
    """
    thread = asm("mov.u32 $0, %tid.x;", "=r", result=ir.IntegerType.get_signless(32))
    return arith.andi(thread, int32(WARPGROUP_THREADS - 1))


def row_of_thread():
    """The first of this thread's two rows of a (64, n) tile; the other is 8 below."""
    thread = thread_index()
    row_of_warp = arith.shrui(arith.andi(thread, int32(31)), int32(2))
    return arith.addi(arith.muli(arith.shrui(thread, int32(5)), int32(16)), row_of_warp)


def column_of_thread():
    """The first of this thread's columns of a (64, n) tile; it has two of each 8."""
    return arith.muli(arith.andi(thread_index(), int32(3)), int32(2))


def warp_of_thread():
    """Index of this thread's warp in its warpgroup."""
    return arith.shrui(thread_index(), int32(5))


def quad_of_thread():
    """Index of this thread's four in its warp."""
    return arith.andi(arith.shrui(thread_index(), int32(2)), int32(7))


def turned(word):
    """The transpose of 8 rows by 8 columns of 16 bits in a warp; a thread has two side by side."""
    text = "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;"
    return asm(text, "=r,r", [word], ir.IntegerType.get_signless(32))


def clamped(row, half: int, last):
    """`row` of the upper or the lower half of the thread's rows, or `last` if that comes before."""
    return arith.minsi(arith.addi(row, int32(8 * half)), last)


def shared_address(ref, *terms):
    """Address in shared memory, index * unit bytes behind the ref's for each (index, unit)."""
    address = llvm.ptrtoint(ir.IntegerType.get_signless(32), mgpu_utils.memref_ptr(ref))
    for index, unit in terms:
        address = arith.addi(address, arith.muli(index, int32(unit)))
    return address


def own_address(ref):
    """Address in shared memory of the first 16 bytes that are this thread's."""
    return shared_address(ref, (thread_index(), 16))


def base_address(ref):
    """Address in global memory."""
    return llvm.ptrtoint(ir.IntegerType.get_signless(64), mgpu_utils.memref_ptr(ref))


def global_address(ref, offset):
    return arith.addi(base_address(ref), arith.extui(ir.IntegerType.get_signless(64), offset))


def bytes_to(index, unit: int):
    """index * unit, which need not fit into 32 bits."""
    i64 = ir.IntegerType.get_signless(64)
    return arith.muli(arith.extui(i64, index), arith.constant(i64, ir.IntegerAttr.get(i64, unit)))


def pair_reader(ref, first):
    """What reads, of 8 columns from `first` + 8 * group on, the int32 of this thread's two."""
    i32 = ir.IntegerType.get_signless(32)
    own_column = column_of_thread()
    offset = arith.muli(arith.addi(first.registers[()], own_column), int32(4))
    address = global_address(ref, offset)

    def read(group: int) -> list:
        text = f"ld.global.nc.v2.b32 {{$0, $1}}, [$2+{32 * group}];"
        pair = asm(text, "=r,=r,l", [address], llvm.StructType.get_literal([i32] * 2))
        return [llvm.extractvalue(i32, pair, [e]) for e in range(2)]

    return read


def extract(pair, e: int):
    return vector.extract(pair, dynamic_position=[], static_position=[e])


def insert(pair, value, e: int):
    return vector.insert(value, pair, dynamic_position=[], static_position=[e])


def scalar(register):
    return extract(register, 0) if isinstance(register.type, ir.VectorType) else register


def like_array(array, registers):
    return type(array)(_registers=registers, _layout=array.layout, _is_signed=array.is_signed)


def columns_like(columns, values):
    """One value a column in the layout of `columns`; values are of this thread's pairs."""
    registers = columns.registers.copy()
    pairs = zip(values[0::2], values[1::2], strict=True)
    for (index, register), (first, second) in zip(np.ndenumerate(registers), pairs, strict=True):
        registers[index] = insert(insert(register, first, 0), second, 1)
    return like_array(columns, registers)


def rows_like(rows, values):
    """One value a row in the layout of `rows`; values are of this thread's two rows."""
    registers = rows.registers.copy()
    for (index, register), value in zip(np.ndenumerate(registers), values, strict=True):
        is_vector = isinstance(register.type, ir.VectorType)
        registers[index] = insert(register, value, 0) if is_vector else value
    return like_array(rows, registers)


def fragments(registers: np.ndarray):
    """Yields (index, column group, row half, register pair) of a (64, n) tile's registers."""
    *group_axes, half_axis = (axis for axis, size in enumerate(registers.shape) if size > 1)
    for index, pair in np.ndenumerate(registers):
        yield index, index[group_axes[0]] if group_axes else 0, index[half_axis], pair
