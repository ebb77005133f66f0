"""Elements of a bias or a dense mask, from global memory."""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.interpret import interpreting
from pallas_kernels.ptx.mlir import (
    TILE,
    asm,
    base_address,
    bytes_to,
    clamped,
    column_of_thread,
    extract,
    fragments,
    global_address,
    insert,
    int32,
    like_array,
    result_type,
    row_of_thread,
)


def load_elements(ref, first_row, first_column, columns: int, *, transposed: bool = False):
    """A `(64, columns)` tile of a view of global memory, of which axes of 1 are broadcast.

    Rows beyond the last one read as the last, columns beyond the last one as 0: nothing is read out
    of bounds, at any alignment.

    Args:
      ref: `(rows or 1, columns or 1)`, or if transposed the other way round; bfloat16, float16 or
        float32.
      first_row, first_column: where the tile begins; not negative.
    """
    if interpreting():
        array = ref[...].T if transposed else ref[...]
        row_count, column_count = array.shape
        row = jnp.minimum(first_row + jnp.arange(64), row_count - 1)
        column = jnp.arange(columns) + first_column
        # What no test keeps from being read out of bounds is NaN.
        place = row[:, None], column if column_count > 1 else 0
        tile = array.at[place].get(mode="fill", fill_value=jnp.nan)
        if _needs_limit(column_count, columns):
            tile = jnp.where(column < column_count, tile, 0)
        return jnp.broadcast_to(tile, (64, columns))

    zeros = plgpu.layout_cast(jnp.zeros((64, columns), ref.dtype), TILE)
    shape = result_type((64, columns), ref.dtype, layout=TILE)
    splat = plgpu.Layout.WG_SPLAT

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), splat, splat, TILE), return_type=shape)
    def load(_, ref, first_row, first_column, like):
        view = ir.MemRefType(ref.type)
        sizes, strides = list(view.shape), view.get_strides_and_offset()[0]
        if transposed:
            sizes, strides = sizes[::-1], strides[::-1]
        (row_count, column_count), (row_stride, column_stride) = sizes, strides
        bits = like.mlir_dtype.width
        by_pair = column_count > 1 and column_stride == 1 and column_count % 2 == 0
        own_column = column_of_thread()
        column = arith.addi(first_column.registers[()], own_column)
        limit = None
        if _needs_limit(column_count, columns):
            limit = arith.subi(int32(column_count), column)

        base = base_address(ref)
        if column_count > 1:
            base = arith.addi(base, bytes_to(column, column_stride * bits // 8))
        addresses = [base]
        if row_count > 1:
            row = arith.addi(first_row.registers[()], row_of_thread())
            rows = [clamped(row, half, int32(row_count - 1)) for half in range(2)]
            addresses = [arith.addi(base, bytes_to(row, row_stride * bits // 8)) for row in rows]

        def read(address, number: int, count: int):
            """Words of `count` neighbouring elements, the first of them in column `number`."""
            offset = number * column_stride * bits // 8
            vector, wide = ("v2.", 2) if count * bits == 64 else ("", 1)
            size = min(count * bits, 32)
            kind = "h" if size == 16 else "r"
            results = ", ".join(f"${n}" for n in range(wide))
            results = f"{{{results}}}" if wide > 1 else results
            text = f"ld.global.nc.{vector}b{size} {results}, [${wide}+{offset}];"
            operands = [address]
            if limit is not None:
                zeros = " ".join(f"mov.b{size} ${n}, 0;" for n in range(wide))
                within = f"setp.gt.s32 p, ${wide + 1}, {number};"
                text = f"{{ .reg .pred p; {within} {zeros} @p {text} }}"
                operands.append(limit)
            word = ir.IntegerType.get_signless(size)
            result = word if wide == 1 else llvm.StructType.get_literal([word] * wide)
            outputs = ",".join([f"=&{kind}"] * wide)
            inputs = "l" if limit is None else "l,r"
            value = asm(text, f"{outputs},{inputs}", operands, result)
            return [value] if wide == 1 else [llvm.extractvalue(word, value, [n]) for n in range(2)]

        def read_pair(address, group: int, like):
            element = like.type.element_type
            if column_count == 1:
                values = [llvm.bitcast(element, read(address, 0, 1)[0])] * 2
            elif by_pair and bits == 16:
                return llvm.bitcast(like.type, read(address, 8 * group, 2)[0])
            elif by_pair:
                values = [llvm.bitcast(element, word) for word in read(address, 8 * group, 2)]
            else:
                words = [read(address, 8 * group + e, 1)[0] for e in range(2)]
                values = [llvm.bitcast(element, word) for word in words]
            for e, value in enumerate(values):
                like = insert(like, value, e)
            return like

        out, pairs = like.registers.copy(), {}
        for index, group, half, pair in fragments(like.registers):
            place = (group if column_count > 1 else 0, half if row_count > 1 else 0)
            if place not in pairs:
                pairs[place] = read_pair(addresses[place[1]], group, pair)
            out[index] = pairs[place]
        return like_array(like, out)

    return load(ref, jnp.int32(first_row), jnp.int32(first_column), zeros)


def _needs_limit(column_count: int, columns: int) -> bool:
    """Whether tiles may reach beyond the last column, of an array that has more than one."""
    return column_count > 1 and column_count % columns > 0


def load_bits(ref, first_row, first_column, columns: int) -> jax.Array:
    """What `keep_where` takes, from a view of global memory with a bit an element.

    Args:
      ref: `(rows or 1, words or 1)` int32; bit j of word i of a row is that of column 32 * i + j.
        An axis of 1 is broadcast, and its word has all bits alike; otherwise there are as many
        words as whole tiles take.
      first_row: of 64, of which those beyond the last one read as the last.
      first_column: a multiple of columns, which are 64 or 128.
    """
    if interpreting():
        rows = jnp.minimum(first_row + jnp.arange(64), ref.shape[0] - 1)
        column = first_column + jnp.arange(columns)
        words = ref[...][rows][:, jnp.minimum(column // 32, ref.shape[1] - 1)]
        return (words >> (column % 32)) & 1

    words = columns // 32
    # Four words of each of a thread's rows, in pairs; of two, each stands there twice.
    zeros = plgpu.layout_cast(jnp.zeros((64, 16), jnp.int32), TILE)
    shape = result_type((64, 16), jnp.int32, layout=TILE)
    splat = plgpu.Layout.WG_SPLAT

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), splat, splat, TILE), return_type=shape)
    def load(_, ref, first_row, first_column, like):
        i32 = ir.IntegerType.get_signless(32)
        row_count, word_count = ir.MemRefType(ref.type).shape
        base = base_address(ref)
        if word_count > 1:
            base = global_address(ref, arith.shrui(first_column.registers[()], int32(3)))
        addresses = [base]
        if row_count > 1:
            row = arith.addi(first_row.registers[()], row_of_thread())
            rows = [clamped(row, half, int32(row_count - 1)) for half in range(2)]
            addresses = [arith.addi(base, bytes_to(row, 4 * word_count)) for row in rows]

        own_shift = column_of_thread()

        def read(address):
            """The words of a row, whose lowest bit is that of this thread's first column."""
            if word_count == 1:
                return [asm("ld.global.nc.b32 $0, [$1];", "=r,l", [address], i32)] * words
            results = ", ".join(f"${n}" for n in range(words))
            text = f"ld.global.nc.v{words}.b32 {{{results}}}, [${words}];"
            four = llvm.StructType.get_literal([i32] * words)
            loaded = asm(text, "=r," * words + "l", [address], four)
            loaded = [llvm.extractvalue(i32, loaded, [n]) for n in range(words)]
            return [arith.shrui(word, own_shift) for word in loaded]

        halves = [read(address) for address in addresses]
        halves = halves * 2 if row_count == 1 else halves
        out = like.registers.copy()
        for index, group, half, pair in fragments(like.registers):
            for e in range(2):
                pair = insert(pair, halves[half][(2 * group + e) % words], e)
            out[index] = pair
        return like_array(like, out)

    return load(ref, jnp.int32(first_row), jnp.int32(first_column), zeros)


def keep_where(tile: jax.Array, bits: jax.Array, fill: float) -> jax.Array:
    """`(64, n)` float32 tile where the bit that `load_bits` gave is set, else `fill`."""
    if interpreting():
        return jnp.where(bits != 0, tile, fill)

    shape = result_type(tile.shape, jnp.float32, layout=TILE)

    @plgpu.inline_mgpu(arg_types=(TILE, TILE), return_type=shape)
    def keep(_, tile, bits):
        words = {
            (2 * group + e, half): extract(pair, e)
            for _, group, half, pair in fragments(bits.registers)
            for e in range(2)
        }
        filler = arith.constant(ir.F32Type.get(), ir.FloatAttr.get(ir.F32Type.get(), fill))
        out = tile.registers.copy()
        for index, group, half, pair in fragments(tile.registers):
            word, first_bit = divmod(8 * group, 32)
            for e in range(2):
                bit = arith.andi(words[word, half], int32(1 << (first_bit + e)))
                is_set = arith.cmpi(arith.CmpIPredicate.ne, bit, int32(0))
                pair = insert(pair, arith.select(is_set, extract(pair, e), filler), e)
            out[index] = pair
        return like_array(tile, out)

    return keep(tile, bits)
