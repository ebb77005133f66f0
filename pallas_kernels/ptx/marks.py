"""Rows and columns far from 0: which of them are, and what their weights are."""

import itertools

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_kernels.interpret import interpreting
from pallas_kernels.ptx.mlir import (
    TILE,
    asm,
    base_address,
    extract,
    fragments,
    insert,
    like_array,
    result_type,
    shared_address,
)


def any_marked(ref) -> jax.Array:
    """Whether any of `(64,)` or `(128,)` float32 in shared memory is marked, in each warp alike.

    What `bounded_columns` calls so: a number too small to be one, other than 0.
    """
    if interpreting():
        return is_mark(ref[...]).any()
    return _any_in_shared(ref, "sub.s32 {0}, {0}, 1;", _MARKS)


def any_far(ref, least: float) -> jax.Array:
    """Whether any of `(64,)` or `(128,)` float32 in shared memory is finite and at least so far
    from 0, in each warp alike."""
    if interpreting():
        distance = jnp.abs(ref[...])
        return ((distance >= least) & (distance < jnp.inf)).any()

    first = int(np.float32(least).view(np.int32))
    infinite = int(np.float32(np.inf).view(np.int32))
    test = f"and.b32 {{0}}, {{0}}, 0x7fffffff; sub.s32 {{0}}, {{0}}, {first};"
    return _any_in_shared(ref, test, infinite - first)


def _any_in_shared(ref, text: str, limit: int) -> jax.Array:
    """Whether any word of `(64,)` or `(128,)` shared memory is below a limit after some PTX."""
    shape = result_type((), jnp.int32, layout=plgpu.Layout.WG_SPLAT)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=shape)
    def vote(_, ref):
        (size,) = ir.MemRefType(ref.type).shape
        own = size // 32
        words = [f"w{n}" for n in range(own)]
        tests = "".join(
            f" {text.format(word)} setp.lt.or.u32 p, {word}, {limit}, p;" for word in words
        )
        whole = (
            f"{{ .reg .pred p; .reg .b32 a, {', '.join(words)};"
            f" mov.u32 a, %laneid; mad.lo.u32 a, a, {4 * own}, $1;"  # else kept over loops
            f" ld.volatile.shared.v{own}.b32 {{{', '.join(words)}}}, [a]; setp.ne.u32 p, 0, 0;"
            f"{tests} vote.sync.any.pred p, p, 0xffffffff; selp.s32 $0, 1, 0, p; }}"
        )
        i32 = ir.IntegerType.get_signless(32)
        value = asm(whole, "=r,r,~{memory}", [shared_address(ref)], i32)
        return mgpu.FragmentedArray.splat(value, (), is_signed=True)

    return vote(ref) > 0


def mark(number: jax.Array) -> jax.Array:
    """A float32 that is a mark, of a number of 0 up to 2^23 - 2."""
    return lax.bitcast_convert_type(number.astype(jnp.int32) + 1, jnp.float32)


def is_mark(rows: jax.Array) -> jax.Array:
    """Which of float32 values are marks."""
    bits = lax.bitcast_convert_type(rows, jnp.int32)
    return (bits > 0) & (bits <= _MARKS)


_MARKS = 2**23 - 1


def bounded_columns(
    tile: jax.Array, marks_ref, values_ref, *, far: float, bound_far: float, bound: float
) -> jax.Array:
    """min(x - reference, bound) - log_sum in marked columns of a `(64, n)` float32 tile.

    One column after the other: registers are short.

    Args:
      marks_ref: `(n,)` in shared memory; a `mark` is the number of the 64 columns that it is in.
      values_ref: `(numbers, 2, 64)` float32 in global memory: reference and log_sum of columns.
      far: the bound of a column is `bound_far` if its reference is so far from 0, else `bound`.
    """
    if interpreting():
        marks = marks_ref[...]
        number = lax.bitcast_convert_type(marks, jnp.int32) - 1
        number = jnp.where(is_mark(marks), number, 0)
        column = jnp.arange(tile.shape[1]) % 64
        reference, log_sum = (values_ref[...][number, n, column] for n in range(2))
        bounds = jnp.where(jnp.abs(reference) >= far, bound_far, bound)
        return jnp.where(is_mark(marks), jnp.minimum(tile - reference, bounds) - log_sum, tile)

    shape = result_type(tile.shape, jnp.float32, layout=plgpu.Layout.WGMMA)
    literal = lambda x: f"0f{np.float32(x).view(np.uint32):08x}"

    @plgpu.inline_mgpu(arg_types=(TILE, plgpu.RefType(), plgpu.RefType()), return_type=shape)
    def bounded(_, tile, marks, values):
        text = (
            " sub.s32 m, m, 1; setp.lt.u32 p, m, " + str(_MARKS) + ";"
            " vote.sync.any.pred any, p, 0xffffffff; @!any bra DONE_${:uid};"
            " mad.wide.u32 a, m, 512, $5; mad.wide.u32 a, c, 8, a;"
            " mov.f32 r, 0f00000000; @p ld.global.f32 r, [a+VALUE];"
            " sub.f32 $0, $0, r; sub.f32 $1, $1, r;"
            f" abs.f32 r, r; setp.ge.f32 q, r, {literal(far)};"
            f" selp.f32 r, {literal(bound_far)}, {literal(bound)}, q;"
            " @!p mov.f32 r, 0f7f800000; min.f32 $0, $0, r; min.f32 $1, $1, r;"
            " mov.f32 r, 0f00000000; @p ld.global.f32 r, [a+VALUE+256];"
            " sub.f32 $0, $0, r; sub.f32 $1, $1, r;"
        )
        return _by_column(tile, marks, text, base_address(values))

    return bounded(tile, marks_ref, values_ref)


def shared_columns(tile: jax.Array, shares_ref) -> jax.Array:
    """min(x, 1) * share of a `(64, n)` float32 tile, where the share of a column is not 1.

    One column after the other: registers are short.

    Args:
      shares_ref: `(n,)` float32 in shared memory.
    """
    if interpreting():
        share = shares_ref[...]
        return jnp.where(share == 1.0, tile, jnp.minimum(tile, 1.0) * share)

    shape = result_type(tile.shape, jnp.float32, plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(TILE, plgpu.RefType()), return_type=shape)
    def shared(_, tile, shares):
        text = (
            " mov.b32 r, m; setp.neu.f32 p, r, 0f3f800000;"
            " vote.sync.any.pred any, p, 0xffffffff; @!any bra DONE_${:uid};"
            " @p min.f32 $0, $0, 0f3f800000; @p min.f32 $1, $1, 0f3f800000;"
            " mul.f32 $0, $0, r; mul.f32 $1, $1, r;"
        )
        return _by_column(tile, shares, text)

    return shared(tile, shares_ref)


def _by_column(tile, words, text: str, base=None):
    """What PTX makes of a float32 tile, one column after the other.

    Little is kept, and all is found anew. ptxas would load what all columns need first, but for a
    branch around what is made of each.

    Args:
      words: ref to a word of each column in shared memory.
      text: of $0 and $1, elements of a column in two rows, m, its word, c, half of its number among
        8, and $5, the base; VALUE is the bytes of 4 a column before its 8 among 64. It may branch
        to DONE_${:uid}, and has registers any, p, q, a and r to use.
      base: address in global memory.
    """
    f32 = ir.F32Type.get()
    whole = (
        "{ .reg .pred p, q, any; .reg .b32 c, m; .reg .b64 a; .reg .f32 r;"
        " mov.u32 c, %laneid; and.b32 c, c, 3; mad.lo.u32 m, c, 8, $4; ld.shared.b32 m, [m+WORD];"
        f"{text} DONE_${{:uid}}: }}"
    )
    out = tile.registers.copy()
    index_of = {(group, half): index for index, group, half, _ in fragments(out)}
    more = [] if base is None else [base]
    for group, e in itertools.product(range(tile.shape[1] // 8), range(2)):
        indices = [index_of[group, half] for half in range(2)]
        results = llvm.inline_asm(
            llvm.StructType.get_literal([f32] * 2),
            [*(extract(out[index], e) for index in indices), shared_address(words), *more],
            whole.replace("VALUE", str(32 * (group % 8) + 4 * e)).replace(
                "WORD", str(32 * group + 4 * e)
            ),
            "=f,=f,0,1,r" + ",l" * len(more) + ",~{memory}",
            has_side_effects=True,
        )
        for n, index in enumerate(indices):
            out[index] = insert(out[index], llvm.extractvalue(f32, results, [n]), e)
    return like_array(tile, out)
