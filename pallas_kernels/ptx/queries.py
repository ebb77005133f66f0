"""Rows of the queries of a group, whose heads are together, in decoding."""

import functools

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.interpret import interpreting
from pallas_kernels.ptx.arithmetic import div_rem
from pallas_kernels.ptx.mlir import (
    TILE,
    WARPGROUP_THREADS,
    asm,
    extract,
    global_address,
    insert,
    int32,
    result_type,
    row_of_thread,
    shared_address,
    thread_index,
    turned,
)
from pallas_kernels.ptx.operands import OPERAND


def load_queries(source, first, rows: int) -> jax.Array:
    """Asks for rows of a `(tokens, heads, n)` 16-bit view of global memory, to be stored later.

    Row r is head (first + r) % heads of token (first + r) // heads; rows after the last are the
    last. The form is one for `store_queries` and `store_queries_float8`.
    """
    tokens, heads, columns = source.shape
    if interpreting():
        places = [div_rem(jnp.minimum(first + n, tokens * heads - 1), heads) for n in range(rows)]
        return jnp.stack([source[place] for place in places])

    passes = -(-rows * columns // (8 * WARPGROUP_THREADS))  # of 8 columns a thread
    words_of_all = 4 * passes * WARPGROUP_THREADS
    layout = words_layout(words_of_all)
    shape = result_type((words_of_all,), jnp.int32, layout=layout)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT), return_type=shape)
    def load(_, source, first):
        strides, _ = ir.MemRefType(source.type).get_strides_and_offset()
        i32 = ir.IntegerType.get_signless(32)
        four = llvm.StructType.get_literal([i32] * 4)
        registers = np.empty((passes,), dtype=object)
        for n, (row, chunk) in enumerate(_own_chunks(passes, columns)):
            own = arith.minsi(arith.addi(first.registers[()], row), int32(tokens * heads - 1))
            token, head = arith.divui(own, int32(heads)), arith.remui(own, int32(heads))
            offset = arith.addi(
                arith.muli(token, int32(2 * strides[0])), arith.muli(head, int32(2 * strides[1]))
            )
            address = global_address(source, arith.addi(offset, arith.muli(chunk, int32(16))))
            text = "ld.global.nc.v4.b32 {$0, $1, $2, $3}, [$4];"
            loaded = asm(text, "=r,=r,=r,=r,l", [address], four)
            words = llvm.mlir_undef(ir.VectorType.get((4,), i32))
            for e in range(4):
                words = insert(words, llvm.extractvalue(i32, loaded, [e]), e)
            registers[n] = words
        return mgpu.FragmentedArray(_registers=registers, _layout=layout.to_mgpu(), _is_signed=True)

    return load(source, jnp.int32(first))


def store_queries(target, loaded: jax.Array) -> None:
    """Stores rows from `load_queries` to shared memory, `(rows, n)` in the form of `OPERAND`.

    `commit_smem` must follow.
    """
    rows, columns = target.shape
    if interpreting():
        target[...] = loaded
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(OPERAND), words_layout(loaded.size)))
    def store(_, target, loaded):
        for row, chunk, words in loaded_chunks(loaded, columns):
            # The swizzle exchanges the 16 bytes that a thread moves with others of 128.
            row_in_tile = arith.andi(row, int32(7))
            swizzled = arith.xori(arith.andi(chunk, int32(7)), row_in_tile)
            there = shared_address(
                target,
                (arith.shrui(row, int32(3)), 16 * columns),
                (arith.shrui(chunk, int32(3)), 1024),
                (row_in_tile, 128),
                (swizzled, 16),
            )
            asm(
                "{ .reg .pred p; setp.lt.s32 p, $1, " + str(rows) + ";"
                " @p st.shared.v4.b32 [$0], {$2, $3, $4, $5}; }",
                "r,r,r,r,r,r,~{memory}",
                [there, row, *words],
            )

    store(target, loaded)


def words_layout(count: int):
    """Of int32 that a thread has four of, side by side, in each pass."""
    return plgpu.Layout.WG_STRIDED((count,), vec_size=4)


def _own_chunks(passes: int, columns: int):
    """Yields row and chunk of what this thread moves in each pass.

    A chunk is 8 columns; neighbouring threads have those of one row. Threads that are too many have
    rows that are.
    """
    for n in range(passes):
        place = arith.addi(thread_index(), int32(n * WARPGROUP_THREADS))
        yield arith.divui(place, int32(columns // 8)), arith.remui(place, int32(columns // 8))


def loaded_chunks(loaded, columns: int):
    """Yields (row, chunk, 4 words) of what this thread has loaded."""
    chunks = _own_chunks(loaded.registers.size, columns)
    for (row, chunk), words in zip(chunks, loaded.registers, strict=True):
        yield row, chunk, [extract(words, e) for e in range(4)]


def store_grouped(ref, tile: jax.Array, first) -> None:
    """Stores a `(n, rows)` float32 tile to a `(tokens, heads, n)` view of global memory.

    Its column r goes to head (first + r) % heads of token (first + r) // heads, but for those after
    the last, in the dtype of the view.
    """
    tokens, heads, _ = ref.shape
    last = tokens * heads - 1
    if interpreting():
        for n in range(tile.shape[1]):

            @pl.when(first + n <= last)
            def _(n=n):
                token, head = div_rem(first + n, heads)
                ref[token, head] = tile[:, n].astype(ref.dtype)

        return

    tile = tile.astype(ref.dtype)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), TILE, plgpu.Layout.WG_SPLAT))
    def store(_, ref, tile, first):
        i32 = ir.IntegerType.get_signless(32)
        strides, _ = ir.MemRefType(ref.type).get_strides_and_offset()
        size = mgpu_utils.bytewidth(ir.MemRefType(ref.type).element_type)
        registers = tile.registers.reshape(-1, tile.shape[1] // 8, 2)  # boxes, groups, row halves
        thread = thread_index()
        quad = arith.andi(arith.shrui(thread, int32(2)), int32(7))
        in_quad = arith.andi(thread, int32(3))

        def put(group, column, element, word_of) -> None:
            """What word_of makes of each register of a group; of a column, from an element on."""
            row = arith.addi(first.registers[()], arith.addi(column, int32(8 * group)))
            token, head = arith.divui(row, int32(heads)), arith.remui(row, int32(heads))
            terms = ((token, strides[0]), (head, strides[1]), (element, 1))
            offset = functools.reduce(arith.addi, (arith.muli(n, int32(s)) for n, s in terms))
            address = global_address(ref, arith.muli(offset, int32(size)))
            for (box, half), pair in np.ndenumerate(registers[:, group]):
                asm(
                    f"{{ .reg .pred p; setp.le.s32 p, $1, {last};"
                    f" @p st.global.b32 [$0+{size * (64 * box + 8 * half)}], $2; }}",
                    "l,r,r,~{memory}",
                    [address, row, word_of(pair)],
                )

        def transposed(pair):
            """Two elements of one column."""
            return turned(llvm.bitcast(i32, pair))

        first_in_quad = arith.muli(in_quad, int32(2))
        for group in range(registers.shape[1]):
            if size == 2:
                warp = arith.shrui(thread, int32(5))
                element = arith.addi(arith.muli(warp, int32(16)), first_in_quad)
                put(group, quad, element, transposed)
                continue
            for e in range(2):
                column = arith.addi(first_in_quad, int32(e))
                word = lambda pair, e=e: arith.bitcast(i32, extract(pair, e))
                put(group, column, row_of_thread(), word)

    store(ref, tile, jnp.int32(first))
