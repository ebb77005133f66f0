"""What Pallas Mosaic GPU does not offer: a few instructions of PTX each.

`inline_mgpu` has no interpret mode, so every function here asks `interpreting()` and then does the
same with what Pallas has. Register layouts are those of the wgmma accumulator (PTX ISA, "register
fragments for wgmma.mma_async.m64nNk16"): the 128 threads of a warpgroup hold a (64, n) tile as
`[column group of 8][row half][2 columns]`, thread t owning rows 16 * (t // 32) + (t % 32) // 4 and
8 more, columns 2 * (t % 4) and the next of each group.
"""

import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.dropout_words import SEVEN_BITS, four_values, reaches_limit
from pallas_kernels.interpret import interpreting

WARPGROUP_THREADS = 128


def operand_form(box_width: int, itemsize: int = 2) -> tuple[Any, Any]:
    """How TMA and wgmma have operands in shared memory: boxes of 8 rows, swizzled in themselves."""
    swizzle = plgpu.SwizzleTransform(box_width * itemsize)
    return plgpu.TilingTransform((8, box_width)), swizzle


OPERAND = operand_form(64)

# For kernels that order every hand-over through shared memory themselves: Mosaic's own barriers
# round each store would stop their warpgroups.
HAND_ORDERED = plgpu.CompilerParams(
    approx_math=True,
    unsafe_no_auto_barriers=True,
    lowering_semantics=plgpu.LoweringSemantics.Lane,
)
_PIECE_BYTES = 16 * WARPGROUP_THREADS  # 16 columns by one row half of a (64, n) float32 tile

_TILE = plgpu.Layout.WGMMA
_ROWS = plgpu.Layout.WGMMA.reduce(1)
_COLUMNS = plgpu.Layout.WGMMA.reduce(0)


def _result_type(shape: tuple[int, ...], dtype: Any, layout: Any) -> plgpu.ShapeDtypeStruct:
    """What `inline_mgpu` returns. To a type checker jnp.int32 is not the np.dtype that it asks."""
    return plgpu.ShapeDtypeStruct(shape, dtype, layout)


def zero_tile(rows: int, columns: int, dtype=jnp.float32) -> jax.Array:
    """A tile of zeros in the layout of a wgmma accumulator."""
    return plgpu.layout_cast(jnp.zeros((rows, columns), dtype), _TILE)


def div_rem(x, divisor: int):
    """Quotient and remainder of a traced int32 that is not negative."""
    by = jnp.int32(divisor)
    return lax.div(x, by), lax.rem(x, by)


# --- named barriers ------------------------------------------------------------------------------


def twins_of(barriers: dict[str, Any]) -> dict[str, Any]:
    """Types of what stands for barriers in interpret mode, by name."""
    return {name: x.scratch() for name, x in barriers.items()}


def with_twins(barriers: dict[str, Any], twins: dict[str, Any] | None) -> list[Any]:
    """The barriers, with what stands for them in interpret mode, None elsewhere."""
    return [dataclasses.replace(x, twins=twins and twins[name]) for name, x in barriers.items()]


@dataclasses.dataclass(frozen=True)
class NamedBarriers:
    """Hardware barriers for one hand-over each: `arrivers` warpgroups arrive, one waits.

    An arrival is one instruction of each warp, where an mbarrier needs the warpgroup to meet first.
    The hardware has 16; Mosaic GPU uses the first `warpgroups + 1`. In interpret mode the mbarriers
    of `scratch()` stand in.
    """

    first: int
    count: int
    arrivers: int
    twins: Any = None

    def __post_init__(self):
        if self.first + self.count > 16:
            raise ValueError(f"named barriers {self.first}..{self.first + self.count - 1} of 16")

    def scratch(self) -> plgpu.Barrier:
        return plgpu.Barrier(num_arrivals=self.arrivers, num_barriers=self.count)

    def arrive(self, index, when=True) -> None:
        """Arrives if `when`; an instruction that depends on it, not a branch."""
        if self.twins is None:
            self._bar("arrive", index, when)
        elif when is True:
            plgpu.barrier_arrive(self.twins.at[index])
        else:
            pl.when(when)(lambda: plgpu.barrier_arrive(self.twins.at[index]))

    def wait(self, index) -> None:
        if self.twins is not None:
            plgpu.barrier_wait(self.twins.at[index])
        else:
            self._bar("sync", index)

    def _bar(self, action: str, index, when=True) -> None:
        threads = (self.arrivers + 1) * WARPGROUP_THREADS
        text = f"bar.{action} $0, {threads};"
        values = [jnp.asarray(self.first + index, jnp.int32)]
        if when is not True:
            text = f"{{ .reg .pred p; setp.ne.s32 p, $1, 0; @p {text} }}"
            values.append(jnp.asarray(when, jnp.int32))

        @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT,) * len(values))
        def bar(_, *values):
            constraints = "r," * len(values) + "~{memory}"
            _asm(text, constraints, [value.registers[()] for value in values])

        bar(*values)


@dataclasses.dataclass(frozen=True)
class BlockVote:
    """Lets all warpgroups of a thread block meet and learn whether one of them has seen something.

    One `barrier.red` on barrier 0, which Mosaic GPU uses alike, for all threads. In interpret mode,
    flags in shared memory and an mbarrier, from `scratch()`, stand in.
    """

    warpgroups: int
    twins: Any = None

    def scratch(self) -> tuple:
        return (
            plgpu.SMEM((self.warpgroups,), jnp.int32),
            plgpu.Barrier(num_arrivals=self.warpgroups),
        )

    def any(self, seen: jax.Array, warpgroup) -> jax.Array:
        """Whether an element of `(64,)` int32 is not 0 in any warpgroup; all must call it."""
        if self.twins is not None:
            flags, barrier = self.twins
            flags[warpgroup] = seen.max()
            plgpu.barrier_arrive(barrier)
            plgpu.barrier_wait(barrier)
            votes = sum(flags[w] for w in range(self.warpgroups))
            plgpu.barrier_arrive(barrier)  # before the next vote overwrites the flags
            plgpu.barrier_wait(barrier)
            return votes > 0

        return _vote(seen, jnp.int32(0), self.warpgroups * WARPGROUP_THREADS)


def warpgroup_any(seen: jax.Array, warpgroup) -> jax.Array:
    """Whether an element of `(64,)` int32 is not 0; on the barrier that Mosaic GPU uses for it."""
    if interpreting():
        return seen.max() > 0
    return _vote(seen, warpgroup + 1, WARPGROUP_THREADS)


def _vote(seen: jax.Array, barrier: jax.Array, threads: int) -> jax.Array:
    shape = _result_type((), jnp.int32, layout=plgpu.Layout.WG_SPLAT)

    @plgpu.inline_mgpu(arg_types=(_ROWS, plgpu.Layout.WG_SPLAT), return_type=shape)
    def vote(_, seen, barrier):
        i32 = ir.IntegerType.get_signless(32)
        low, high = (_scalar(r) for r in seen.registers.flat)
        text = (
            "{ .reg .pred p; setp.ne.s32 p, $1, 0;"
            f" barrier.cta.red.or.pred p, $2, {threads}, p;"
            " vote.sync.any.pred p, p, 0xffffffff; selp.s32 $0, 1, 0, p; }"
        )
        operands = [arith.ori(low, high), barrier.registers[()]]
        value = _asm(text, "=r,r,r,~{memory}", operands, i32)
        return mgpu.FragmentedArray.splat(value, (), is_signed=True)

    return vote(seen, barrier) > 0


def draw_ticket(counter, in_turn) -> jax.Array:
    """Adds 1 to an int32 in global memory; its value before that, in a warpgroup's first thread.

    All of the warpgroup call it, `share_first` tells them. Nothing waits for the memory until then.
    In interpret mode tickets are not drawn: they go in turn.
    """
    if interpreting():
        return in_turn

    shape = _result_type((), jnp.int32, layout=plgpu.Layout.WG_SPLAT)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=shape)
    def draw(_, counter):
        # An addition ptxas makes one for the warp, and waits for it to share it out.
        text = (
            "{ .reg .pred p; setp.eq.u32 p, $2, 0; mov.u32 $0, 0;"
            " @p atom.relaxed.gpu.global.inc.u32 $0, [$1], 0x7fffffff; }"
        )
        i32 = ir.IntegerType.get_signless(32)
        value = _asm(text, "=r,l,r,~{memory}", [_base_address(counter), _thread()], i32)
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
            _asm(
                "{ .reg .pred p; setp.eq.u32 p, $2, 0; @p st.shared.u32 [$0], $1; }",
                "r,r,r,~{memory}",
                [_shared_address(ref), value.registers[()], _thread()],
            )
        mgpu.warpgroup_barrier()

    share(*refs, *values)


def any_positive(ref) -> jax.Array:
    """Whether an int32 in global memory is above 0, as threads of a warp agree."""
    if interpreting():
        return ref[...] > 0

    shape = _result_type((), jnp.int32, plgpu.Layout.WG_SPLAT)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=shape)
    def vote(_, ref):
        i32 = ir.IntegerType.get_signless(32)
        return _vote_of_warp(
            "gt", _asm("ld.global.nc.b32 $0, [$1];", "=r,l", [_base_address(ref)], i32)
        )

    return vote(ref) > 0


def add_to(counter) -> None:
    """Adds something to an int32 in global memory, so that it is more than 0."""
    if interpreting():
        plgpu.atomic_add(counter, jnp.int32(1))
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def add(_, counter):
        _asm("red.global.add.s32 [$0], 1;", "l,~{memory}", [_base_address(counter)])

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
        _asm("fence.proxy.async.global;", "~{memory}")
        mgpu.warpgroup_barrier()
        _asm(
            "{ .reg .pred p; setp.eq.u32 p, $1, 0;"
            " @p fence.acq_rel.gpu; @p red.relaxed.gpu.global.add.u32 [$0], 1; }",
            "l,r,~{memory}",
            [_base_address(counter), _thread()],
        )

    add(counter)


def await_count(counter, count) -> None:
    """Waits until an int32 in global memory, of `add_when_stored`, is `count` or more."""
    if interpreting():
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT))
    def wait(_, counter, count):
        _asm(
            "{ .reg .pred p; .reg .b32 now; again: ld.acquire.gpu.global.u32 now, [$0];"
            " setp.lt.s32 p, now, $1; @p bra again; fence.proxy.async.global; }",
            "l,r,~{memory}",
            [_base_address(counter), count.registers[()]],
        )

    wait(counter, jnp.int32(count))


def load_shared(ref) -> jax.Array:
    """The int32 of a ref to 4 bytes in shared memory, read where this stands, each time anew.

    Registers are short: what a plain read gives the compiler keeps over loops.
    """
    if interpreting():
        return lax.bitcast_convert_type(ref[...], jnp.int32)

    shape = _result_type((), jnp.int32, layout=plgpu.Layout.WG_SPLAT)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=shape)
    def load(_, ref):
        i32 = ir.IntegerType.get_signless(32)
        value = _asm("ld.volatile.shared.u32 $0, [$1];", "=r,r", [_shared_address(ref)], i32)
        return mgpu.FragmentedArray.splat(value, (), is_signed=True)

    return load(ref)


def vote_any(flags: jax.Array) -> jax.Array:
    """Whether any of `(columns,)` int32 is not 0, in each warp alike, as the compiler knows."""
    if interpreting():
        return flags.max() > 0

    shape = _result_type((), jnp.int32, layout=plgpu.Layout.WG_SPLAT)

    @plgpu.inline_mgpu(arg_types=(_COLUMNS,), return_type=shape)
    def vote(_, flags):
        # The threads of a warp have all columns.
        own = [_extract(pair, e) for pair in flags.registers.flat for e in range(2)]
        return _vote_of_warp("ne", functools.reduce(arith.ori, own))

    return vote(flags) > 0


def any_row(flags: jax.Array) -> jax.Array:
    """Whether any of `(64,)` bool is true in the warp, which has 16 of these rows."""
    if interpreting():
        return flags.any()

    shape = _result_type((), jnp.int32, layout=plgpu.Layout.WG_SPLAT)

    @plgpu.inline_mgpu(arg_types=(_ROWS,), return_type=shape)
    def vote(_, flags):
        return _vote_of_warp("ne", functools.reduce(arith.ori, list(flags.registers.flat)))

    return vote(flags.astype(jnp.int32)) > 0


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
    shape = _result_type((), jnp.int32, layout=plgpu.Layout.WG_SPLAT)

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
        value = _asm(whole, "=r,r,~{memory}", [_shared_address(ref)], i32)
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

    shape = _result_type(tile.shape, jnp.float32, layout=plgpu.Layout.WGMMA)
    literal = lambda x: f"0f{np.float32(x).view(np.uint32):08x}"

    @plgpu.inline_mgpu(arg_types=(_TILE, plgpu.RefType(), plgpu.RefType()), return_type=shape)
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
        return _by_column(tile, marks, text, _base_address(values))

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

    shape = _result_type(tile.shape, jnp.float32, plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(_TILE, plgpu.RefType()), return_type=shape)
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
    index_of = {(group, half): index for index, group, half, _ in _fragments(out)}
    more = [] if base is None else [base]
    for group, e in itertools.product(range(tile.shape[1] // 8), range(2)):
        indices = [index_of[group, half] for half in range(2)]
        results = llvm.inline_asm(
            llvm.StructType.get_literal([f32] * 2),
            [*(_extract(out[index], e) for index in indices), _shared_address(words), *more],
            whole.replace("VALUE", str(32 * (group % 8) + 4 * e)).replace(
                "WORD", str(32 * group + 4 * e)
            ),
            "=f,=f,0,1,r" + ",l" * len(more) + ",~{memory}",
            has_side_effects=True,
        )
        for n, index in enumerate(indices):
            out[index] = _insert(out[index], llvm.extractvalue(f32, results, [n]), e)
    return _like(tile, out)


def _vote_of_warp(comparison: str, word):
    """1 where an int32 of a thread of the warp compares so with 0, else 0; all threads have it."""
    text = (
        f"{{ .reg .pred p; setp.{comparison}.s32 p, $1, 0; vote.sync.any.pred p, p, 0xffffffff;"
        " selp.s32 $0, 1, 0, p; }"
    )
    value = _asm(text, "=r,r", [word], ir.IntegerType.get_signless(32))
    return mgpu.FragmentedArray.splat(value, (), is_signed=True)


def fence_async_shared() -> None:
    """Orders this thread's accesses to shared memory before later ones by wgmma and TMA.

    Stores before they are read, and loads before TMA overwrites what was read.
    """
    if interpreting():
        plgpu.commit_smem()
        return

    @plgpu.inline_mgpu()
    def fence(_):
        _asm("fence.proxy.async.shared::cta;", "~{memory}")

    fence()


def commit_smem(*, anew: bool) -> None:
    """`plgpu.commit_smem`; anew: with the number of its barrier in no register till then."""
    if interpreting() or not anew:
        plgpu.commit_smem()
        return

    @plgpu.inline_mgpu()
    def commit(_):
        # The barrier that Mosaic GPU has for this warpgroup.
        _asm(
            "{ .reg .b32 own; fence.proxy.async.shared::cta;"
            f" mov.u32 own, %tid.x; shr.u32 own, own, {WARPGROUP_THREADS.bit_length() - 1};"
            f" add.u32 own, own, 1; bar.sync own, {WARPGROUP_THREADS}; }}",
            "~{memory}",
        )

    commit()


def own_warpgroup() -> jax.Array:
    """Number of the warpgroup, found out where it stands, so that it is kept nowhere."""
    if interpreting():
        return lax.axis_index("warpgroup")

    shape = _result_type((), jnp.int32, plgpu.Layout.WG_SPLAT)

    @plgpu.inline_mgpu(return_type=shape)
    def number(_):
        text = (
            "{ .reg .b32 t; mov.u32 t, %tid.x; shr.u32 t, t, 7;"
            " shfl.sync.idx.b32 $0, t, 0, 0x1f, 0xffffffff; }"
        )
        value = _asm(text, "=r", result=ir.IntegerType.get_signless(32))
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

    shape = _result_type((), jnp.int32, layout=plgpu.Layout.WG_SPLAT)

    @plgpu.inline_mgpu(return_type=shape)
    def zero(_):
        value = _asm("mov.u32 $0, 0;", "=r", result=ir.IntegerType.get_signless(32))
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
        _asm(text, "r,~{memory}", [count.registers[()]])

    branch(count)


def fresh_rows() -> jax.Array:
    """`(64,)` int32, the numbers of the rows of a tile, made anew like `fresh_zero`."""
    if interpreting():
        return lax.iota(jnp.int32, 64)

    zeros = plgpu.layout_cast(jnp.zeros((64,), jnp.int32), _ROWS)
    shape = _result_type((64,), jnp.int32, layout=_ROWS)

    @plgpu.inline_mgpu(arg_types=(_ROWS,), return_type=shape)
    def rows(_, like):
        row = _own_row()
        return _rows_like(like, [row, arith.addi(row, _i32(8))])

    return rows(zeros)


# --- arithmetic ----------------------------------------------------------------------------------


def column_maxima(tile: jax.Array, scratch) -> jax.Array:
    """`(columns,)` maxima of a `(64, columns)` float32 tile, NaN of a column that has one.

    The scratch is `(4 * columns,)` float32 in shared memory, for both this and `column_sums`.
    """
    return tile.max(axis=0) if interpreting() else _over_rows(tile, scratch, arith.maximumf)


def column_sums(tile: jax.Array, scratch) -> jax.Array:
    """`(columns,)` sums of a `(64, columns)` float32 tile; see `column_maxima`."""
    return tile.sum(axis=0) if interpreting() else _over_rows(tile, scratch, arith.addf)


def _over_rows(tile: jax.Array, scratch, combine) -> jax.Array:
    """Combines the rows of a tile, of up to 8 groups of columns, a power of two of them."""
    columns = tile.shape[1]
    like = plgpu.layout_cast(jnp.zeros((columns,), jnp.float32), _COLUMNS)
    shape = _result_type((columns,), jnp.float32, layout=_COLUMNS)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _TILE, _COLUMNS), return_type=shape)
    def over_rows(_, scratch, tile, like):
        thread = _thread()
        halves = {(group, half): pair for _, group, half, pair in _fragments(tile.registers)}
        values = [
            combine(*(_extract(halves[group, half], e) for half in range(2)))
            for group in range(columns // 8)
            for e in range(2)
        ]
        # 8 threads have the same columns. Each goes on with half of them and gives the others away.
        first_group = _i32(0)
        for distance in (16, 8, 4):
            kept = given = values
            if len(values) > 2:
                middle = len(values) // 2
                bit = arith.andi(thread, _i32(distance))
                is_upper = arith.cmpi(arith.CmpIPredicate.ne, bit, _i32(0))
                pairs = list(zip(values[:middle], values[middle:], strict=True))
                kept = [arith.select(is_upper, high, low) for low, high in pairs]
                given = [arith.select(is_upper, low, high) for low, high in pairs]
                half_groups = arith.select(is_upper, _i32(middle // 2), _i32(0))
                first_group = arith.addi(first_group, half_groups)
            values = [
                combine(a, mgpu_utils.shfl_bfly(b, distance))
                for a, b in zip(kept, given, strict=True)
            ]

        own_columns = _shared_address(scratch, (arith.andi(thread, _i32(3)), 8))
        warp = arith.shrui(thread, _i32(5))
        place = arith.addi(arith.muli(warp, _i32(columns // 8)), first_group)
        mgpu_utils.warpgroup_barrier()  # all have read what the last call left
        _asm(
            "st.shared.v2.f32 [$0], {$1, $2};",
            "r,f,f,~{memory}",
            [arith.addi(own_columns, arith.muli(place, _i32(32))), *values],
        )
        mgpu_utils.warpgroup_barrier()
        f32 = ir.F32Type.get()
        two = llvm.StructType.get_literal([f32] * 2)
        parts = 4
        if columns >= 32:  # fewer instructions, but one more exchange: a thread a column
            column = arith.remui(thread, _i32(columns))
            place = _shared_address(scratch, (column, 4))
            text = "ld.shared.f32 $0, [$1+{}];"
            of_warps = [
                _asm(text.format(4 * columns * n), "=f,r,~{memory}", [place], f32) for n in range(4)
            ]
            _asm(
                f"{{ .reg .pred p; setp.lt.u32 p, $1, {columns}; @p st.shared.f32 [$0], $2; }}",
                "r,r,f,~{memory}",
                [place, thread, functools.reduce(combine, of_warps)],
            )
            mgpu_utils.warpgroup_barrier()
            parts = 1
        totals = []
        for group in range(columns // 8):
            loaded = []
            for n in range(parts):
                text = f"ld.shared.v2.f32 {{$0, $1}}, [$2+{4 * columns * n + 32 * group}];"
                loaded.append(_asm(text, "=f,=f,r,~{memory}", [own_columns], two))
            for e in range(2):
                values = [llvm.extractvalue(f32, pair, [e]) for pair in loaded]
                totals.append(functools.reduce(combine, values))
        return _columns_like(like, totals)

    return over_rows(scratch, tile, like)


def rsqrt(tile: jax.Array) -> jax.Array:
    """Reciprocal square root of a float32 tile without denormals, to 2^-22 of it.

    Mosaic GPU's own spends two more instructions on denormals.
    """
    if interpreting():
        return lax.rsqrt(tile)

    shape = _result_type(tile.shape, jnp.float32, layout=_TILE)

    @plgpu.inline_mgpu(arg_types=(_TILE,), return_type=shape)
    def compute(_, tile):
        f32 = ir.F32Type.get()
        out = tile.registers.copy()
        for index, pair in np.ndenumerate(tile.registers):
            for e in range(2):
                root = llvm.inline_asm(
                    f32, [_extract(pair, e)], "rsqrt.approx.ftz.f32 $0, $1;", "=f,f"
                )
                pair = _insert(pair, root, e)
            out[index] = pair
        return _like(tile, out)

    return compute(tile)


def any_beyond(tile: jax.Array, limit: float) -> jax.Array:
    """Whether an element of a `(64, n)` float32 tile may be `limit` or more, or NaN, in the warp.

    Of either sign. It is so where two neighbours are together, which takes three quarters of an
    instruction an element; a test of each would take one. As of `any_from`, warps differ in the
    result.
    """
    if interpreting():
        together = jnp.abs(tile).reshape(*tile.shape[:-1], -1, 2).sum(axis=-1)
        return jnp.logical_not(together < limit).any()

    shape = _result_type((), jnp.int32, layout=plgpu.Layout.WG_SPLAT)

    @plgpu.inline_mgpu(arg_types=(_TILE,), return_type=shape)
    def vote(_, tile):
        i32 = ir.IntegerType.get_signless(32)
        text = "{ .reg .f32 a, b; abs.f32 a, $1; abs.f32 b, $2; add.f32 a, a, b; mov.b32 $0, a; }"
        sums = [
            _asm(text, "=r,f,f", [_extract(pair, 0), _extract(pair, 1)], i32)
            for pair in tile.registers.flat
        ]
        # Floats that are not negative are in the order of their bits, as are integers, of which the
        # hardware has a maximum of three.
        largest = functools.reduce(arith.maxsi, sums)
        bits = np.float32(limit).view(np.int32)
        return _vote_of_warp("ge", arith.subi(largest, _i32(int(bits))))

    return vote(tile) > 0


# --- masks ---------------------------------------------------------------------------------------


def keep_columns_to(tile: jax.Array, last: jax.Array, fill: float) -> jax.Array:
    """`(64, n)` float32 tile where column <= last[row], else `fill`; last is `(64,)` int32."""
    return _keep_columns(tile, last, fill, arith.CmpIPredicate.sge, lax.ge)


def keep_columns_from(tile: jax.Array, first: jax.Array, fill: float) -> jax.Array:
    """`(64, n)` float32 tile where column >= first[row], else `fill`; first is `(64,)` int32."""
    return _keep_columns(tile, first, fill, arith.CmpIPredicate.sle, lax.le)


def _keep_columns(tile, bound, fill, predicate, compare):
    """Compares a bound per row with column numbers that are immediates.

    A two-dimensional iota in registers costs a register and several instructions an element.
    """
    if interpreting():
        bounds = lax.broadcast_in_dim(bound, tile.shape, [0])
        keep = compare(bounds, lax.broadcasted_iota(jnp.int32, tile.shape, 1))
        return jnp.where(keep, tile, fill)

    shape = _result_type(tile.shape, jnp.float32, layout=_TILE)

    @plgpu.inline_mgpu(arg_types=(_TILE, _ROWS), return_type=shape)
    def keep(_, tile, bound):
        own_column = _own_column()
        bounds = [arith.subi(_scalar(r), own_column) for r in bound.registers.flat]
        filler = arith.constant(ir.F32Type.get(), ir.FloatAttr.get(ir.F32Type.get(), fill))
        out = tile.registers.copy()
        for index, group, half, pair in _fragments(tile.registers):
            for e in range(2):
                ok = arith.cmpi(predicate, bounds[half], _i32(8 * group + e))
                pair = _insert(pair, arith.select(ok, _extract(pair, e), filler), e)
            out[index] = pair
        return _like(tile, out)

    return keep(tile, bound)


def keep_equal_columns(
    tile: jax.Array, rows: jax.Array, ref, first, fill: float, last: jax.Array | None = None
) -> jax.Array:
    """`(64, n)` float32 tile where a row's value is equal to a column's, else `fill`.

    Args:
      tile: n a multiple of 8.
      rows: `(64,)` int32.
      ref: a one-dimensional int32 view of global memory, of the columns' values from `first` on;
        that place is aligned to 8 bytes.
      last: None, or `(64,)` int32, where a row's columns behind last[row] are `fill` too.
    """
    if interpreting():
        keep = rows[:, None] == ref[pl.ds(first, tile.shape[1])][None, :]
        if last is not None:
            keep &= lax.broadcasted_iota(jnp.int32, tile.shape, 1) <= last[:, None]
        return jnp.where(keep, tile, fill)

    shape = _result_type(tile.shape, jnp.float32, layout=_TILE)
    splat = plgpu.Layout.WG_SPLAT
    bounds = () if last is None else (last,)
    layouts = _TILE, _ROWS, plgpu.RefType(), splat, *[_ROWS] * len(bounds)
    keep_both = (
        "{ .reg .pred p; setp.ge.s32 p, $1, $2;"
        " setp.eq.and.s32 p, $3, $4, p; selp.f32 $0, $5, $6, p; }"
    )

    @plgpu.inline_mgpu(arg_types=layouts, return_type=shape)
    def keep(_, tile, rows, ref, first, *bounds):
        read_pair = _pair_reader(ref, first)
        own = [_scalar(r) for r in rows.registers.flat]
        own_column = _own_column()
        limits = [arith.subi(_scalar(r), own_column) for x in bounds for r in x.registers.flat]
        filler = arith.constant(ir.F32Type.get(), ir.FloatAttr.get(ir.F32Type.get(), fill))
        out = tile.registers.copy()
        columns: dict[int, list] = {}
        for index, group, half, pair in _fragments(tile.registers):
            if group not in columns:
                columns[group] = read_pair(group)
            for e, value in enumerate(columns[group]):
                x = _extract(pair, e)
                if last is None:
                    is_equal = arith.cmpi(arith.CmpIPredicate.eq, own[half], value)
                    kept = arith.select(is_equal, x, filler)
                else:  # LLVM would make two selects of a conjunction
                    operands = [limits[half], _i32(8 * group + e), own[half], value, x, filler]
                    kept = _asm(keep_both, "=f,r,n,r,r,f,f", operands, ir.F32Type.get())
                pair = _insert(pair, kept, e)
            out[index] = pair
        return _like(tile, out)

    return keep(tile, rows, ref, jnp.int32(first), *bounds)


def equal_columns(rows: jax.Array, ref, first, columns: int) -> jax.Array:
    """Where a row's value is equal to a column's, for `bits_from`, `bits_to` and `keep_bits` alone.

    Every thread has a bit for each of its elements, two registers in all. The result passes for one
    of a value a row, which it is not: each thread of a quad has bits of its own.

    Args:
      rows: `(64,)` int32.
      ref: a one-dimensional int32 view of global memory, of the columns' values from `first` on;
        that place is aligned to 8 bytes.
      columns: how many, a multiple of 8 and at most 128.
    """
    if interpreting():
        return rows[:, None] == ref[pl.ds(first, columns)][None, :]

    shape = _result_type((64,), jnp.int32, layout=_ROWS)
    splat = plgpu.Layout.WG_SPLAT

    @plgpu.inline_mgpu(arg_types=(_ROWS, plgpu.RefType(), splat), return_type=shape)
    def equal(_, rows, ref, first):
        i32 = ir.IntegerType.get_signless(32)
        read_pair = _pair_reader(ref, first)
        own = [_scalar(r) for r in rows.registers.flat]
        bits = [_i32(0)] * 2
        for group in range(columns // 8):
            for e, value in enumerate(read_pair(group)):
                for half in range(2):
                    is_equal = arith.cmpi(arith.CmpIPredicate.eq, own[half], value)
                    bit = arith.select(is_equal, _bit(2 * group + e), _i32(0))
                    bits[half] = arith.ori(bits[half], bit)
        # The compiler must not see through them, and keep all comparisons in their stead.
        opaque = [_asm("mov.b32 $0, $1;", "=r,r", [x], i32) for x in bits]
        return _rows_like(rows, opaque)

    return equal(rows, ref, jnp.int32(first))


def all_columns(rows: int, columns: int, there=True) -> jax.Array:
    """What `equal_columns` gives where all are equal; or none, unless the bool `there` is true."""
    if interpreting():
        return jnp.broadcast_to(there, (rows, columns))
    bits = jnp.where(there, jnp.int32(-1), jnp.int32(0))
    return plgpu.layout_cast(jnp.broadcast_to(bits, (rows,)), _ROWS)


def bits_from(bits: jax.Array, first: jax.Array) -> jax.Array:
    """What `equal_columns` gave, without columns < first[row]; first is `(64,)` int32."""
    if interpreting():
        return bits & (lax.broadcasted_iota(jnp.int32, bits.shape, 1) >= first[:, None])
    return _bits_masked(bits, first, 0)


def bits_to(bits: jax.Array, last: jax.Array) -> jax.Array:
    """What `equal_columns` gave, without columns > last[row]; last is `(64,)` int32."""
    if interpreting():
        return bits & (lax.broadcasted_iota(jnp.int32, bits.shape, 1) <= last[:, None])
    return _bits_masked(bits, last + 1, -1)


def _bits_masked(bits, bound, flip: int):
    """Bits from bound[row] on, or with flip = -1 those before it."""
    shape = _result_type((64,), jnp.int32, layout=_ROWS)

    @plgpu.inline_mgpu(arg_types=(_ROWS, _ROWS), return_type=shape)
    def mask(_, bits, bound):
        i32 = ir.IntegerType.get_signless(32)
        own_column, masked = _own_column(), []
        for word, row_bound in zip(bits.registers.flat, bound.registers.flat, strict=True):
            # A thread has two of 8 columns: of those before the bound there are so many its own.
            before = arith.maxsi(arith.subi(_scalar(row_bound), own_column), _i32(0))
            groups, rest = arith.shrui(before, _i32(3)), arith.andi(before, _i32(7))
            count = arith.addi(arith.addi(groups, groups), arith.minsi(rest, _i32(2)))
            # The shift by PTX, as 32 and more shift all out there.
            kept = _asm("shl.b32 $0, -1, $1;", "=r,r", [count], i32)
            kept = arith.xori(kept, _i32(flip)) if flip else kept
            masked.append(arith.andi(_scalar(word), kept))
        return _rows_like(bits, masked)

    return mask(bits, bound)


def keep_bits(tile: jax.Array, bits: jax.Array, fill: float) -> jax.Array:
    """`(64, n)` float32 tile where the bit of `equal_columns` is set, else `fill`."""
    if interpreting():
        return jnp.where(bits, tile, fill)

    shape = _result_type(tile.shape, jnp.float32, layout=_TILE)

    @plgpu.inline_mgpu(arg_types=(_TILE, _ROWS), return_type=shape)
    def keep(_, tile, bits):
        filler = arith.constant(ir.F32Type.get(), ir.FloatAttr.get(ir.F32Type.get(), fill))
        words = [_scalar(r) for r in bits.registers.flat]
        out = tile.registers.copy()
        for index, group, half, pair in _fragments(tile.registers):
            for e in range(2):
                bit = arith.andi(words[half], _bit(2 * group + e))
                ok = arith.cmpi(arith.CmpIPredicate.ne, bit, _i32(0))
                pair = _insert(pair, arith.select(ok, _extract(pair, e), filler), e)
            out[index] = pair
        return _like(tile, out)

    return keep(tile, bits)


# --- dropout -------------------------------------------------------------------------------------


def dropped_bytes(rows: jax.Array, ref, first, columns: int) -> jax.Array:
    """Which elements of a tile are dropped, as their `four_values` reach their limits.

    Args:
      rows: `(64,)` int32; of each 16, 8 words of rows, and 8 words of limits.
      ref: a one-dimensional int32 view of global memory, of the columns' words from `first` on,
        equal in the first and last 8 of 16; that place is aligned to 8 bytes.
      columns: how many, a multiple of 16.

    Returns:
      On a GPU `(64, columns / 4)` int32, of which each thread has its own elements', one to each
      byte's highest bit. In interpret mode `(64, columns)` bool.
    """
    if interpreting():
        return _dropped_in_numbers(rows, ref[pl.ds(first, columns)])

    zeros = plgpu.layout_cast(jnp.zeros((64, columns // 4), jnp.int32), _TILE)
    shape = _result_type(zeros.shape, jnp.int32, layout=_TILE)
    splat = plgpu.Layout.WG_SPLAT

    @plgpu.inline_mgpu(arg_types=(_ROWS, plgpu.RefType(), splat, _TILE), return_type=shape)
    def add_limits(_, rows, ref, first, like):
        read_pair = _pair_reader(ref, first)
        row, limits = (_scalar(r) for r in rows.registers.flat)
        limits = arith.ori(limits, arith.shrui(limits, _i32(8)))
        out = like.registers.copy()
        for index, group, half, pair in _fragments(like.registers):
            for e, column in enumerate(read_pair(2 * (2 * group + half))):
                word = arith.addi(_four_values(row, column), limits)
                pair = _insert(pair, word, e)
            out[index] = pair
        return _like(like, out)

    return add_limits(rows, ref, jnp.int32(first), zeros)


def kept_operand(tile: jax.Array, dropped: jax.Array, dtype) -> jax.Array:
    """A `(64, n)` float32 tile as an operand, bfloat16 or float16, with 0 where it is dropped.

    dropped is what `dropped_bytes` gives.
    """
    if interpreting():
        return jnp.where(dropped, 0.0, tile).astype(dtype)

    shape = _result_type(tile.shape, dtype, layout=_TILE)

    @plgpu.inline_mgpu(arg_types=(_TILE, _TILE), return_type=shape)
    def cast(_, tile, dropped):
        i32 = ir.IntegerType.get_signless(32)
        element = mgpu_utils.dtype_to_ir_type(dtype)
        pair_type = ir.VectorType.get((2,), element)
        words = {2 * group + half: pair for _, group, half, pair in _fragments(dropped.registers)}
        out = np.empty_like(tile.registers)
        for index, group, half, pair in _fragments(tile.registers):
            # The sign of a byte of either word becomes 16 bits.
            byte = (9, 8)[half] + 2 * (group % 2)
            selector = 0x11 * byte + 0x1100 * (byte + 4)
            word = llvm.inline_asm(
                i32,
                [_extract(x, e) for x in (pair, words[group // 2]) for e in range(2)],
                "{ .reg .b32 kept, dropped;"
                f" cvt.rn.{element}x2.f32 kept, $2, $1;"
                f" prmt.b32 dropped, $3, $4, {selector};"
                " not.b32 dropped, dropped; and.b32 $0, kept, dropped; }",
                "=r,f,f,r,r",
            )
            out[index] = llvm.bitcast(pair_type, word)
        return mgpu.FragmentedArray(_registers=out, _layout=tile.layout, _is_signed=None)

    return cast(tile, dropped)


def negate_dropped(tile: jax.Array, rows: jax.Array, ref, first, *, few: bool) -> jax.Array:
    """`(64, n)` float32 tile that is not negative, negated where `dropped_bytes` has it dropped.

    Args:
      tile: n a multiple of 16.
      rows, ref, first: as for `dropped_bytes`.
      few: whether limits are 2^6 or about that at most. They, or else 2^7 less them, are compared.
    """
    if interpreting():
        dropped = _dropped_in_numbers(rows, ref[pl.ds(first, tile.shape[1])])
        return jnp.where(dropped, -tile, tile)

    shape = _result_type(tile.shape, jnp.float32, layout=_TILE)
    splat = plgpu.Layout.WG_SPLAT

    @plgpu.inline_mgpu(arg_types=(_TILE, _ROWS, plgpu.RefType(), splat), return_type=shape)
    def negate(_, tile, rows, ref, first):
        read_pair = functools.cache(_pair_reader(ref, first))
        row, limits = (_scalar(r) for r in rows.registers.flat)
        words_of = lambda group, _, e: (row, limits, read_pair(group)[e])
        fours = [
            [((group, half, e), (group + 1, half, e)) for half in range(2)]
            for group, e in itertools.product(range(0, tile.shape[1] // 8, 2), range(2))
        ]
        # An addition, of which the units have most; the compiler makes a select of `neg`.
        return _negated_fours(tile, fours, words_of, few, "sub.f32 {0}, 0f00000000, {0};")

    return negate(tile, rows, ref, jnp.int32(first))


def negate_dropped_transposed(
    tile: jax.Array, rows: jax.Array, columns: jax.Array, *, few: bool
) -> jax.Array:
    """The same of a `(64, n)` tile of keys by queries.

    Args:
      tile: n a multiple of 16.
      rows: int32 words in the shape of tile, one value a row; equal in the first and last 8 of 16.
      columns: the same, one value a column; of each 16, 8 words of columns, and 8 words of limits.
      few: as for `negate_dropped`.
    """
    if interpreting():
        return jnp.where(_dropped_in_numbers(columns[0], rows[:, 0]).T, -tile, tile)

    shape = _result_type(tile.shape, jnp.float32, layout=_TILE)

    @plgpu.inline_mgpu(arg_types=(_TILE, _TILE, _TILE), return_type=shape)
    def negate(_, tile, *words):
        rows, columns = (
            {(group, half): pair for _, group, half, pair in _fragments(x.registers)} for x in words
        )

        def words_of(group, _, e):
            return [
                _extract(pair, e)
                for pair in (columns[group, 0], columns[group + 1, 0], rows[group, 0])
            ]

        fours = [
            [((g, 0, e), (g, 1, e)) for g in (group, group + 1)]
            for group, e in itertools.product(range(0, tile.shape[1] // 8, 2), range(2))
        ]
        # The compiler makes a select of this; with an `xor` it would spill registers.
        return _negated_fours(tile, fours, words_of, few, "neg.f32 {0}, {0};")

    return negate(tile, rows, columns)


def _dropped_in_numbers(query_words, key_words) -> jax.Array:
    """Which of `(queries, keys)` are dropped, of words in the order that kernels have them in."""
    query_words, key_words = (x.astype(jnp.uint32) for x in (query_words, key_words))
    words, limits = jnp.moveaxis(query_words.reshape(-1, 2, 8), 1, 0)[..., None]
    values = four_values(words, key_words)
    later_key = (jnp.arange(key_words.size) & 8) > 0
    halves = [reaches_limit(values, limits, later, later_key) for later in (False, True)]
    return jnp.stack(halves, 1).reshape(query_words.size, key_words.size)


def _four_values(row, column):
    """`four_values` of two words."""
    i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
    # As LLVM has it, the upper words of factors, all 0, would be added up too.
    product = llvm.inline_asm(i64, [row, column], "mul.wide.u32 $0, $1, $2;", "=l,r,r")
    upper = arith.shrui(product, arith.constant(i64, ir.IntegerAttr.get(i64, 32)))
    value = arith.xori(arith.trunci(i32, upper), arith.trunci(i32, product))
    return arith.andi(value, _i32(SEVEN_BITS))


def _negated_fours(tile, fours, words_of, few: bool, negation: str):
    """A float32 tile, negated where bytes of values reach their limits.

    Args:
      fours: four places of elements (column group, row half, place in the register pair) that share
        a value: those of a query's two keys, and of the query's 8 farther.
      words_of: the words of query, limits and key, of the first place of four.
      few: as for `negate_dropped`.
      negation: PTX that negates {0}.
    """
    f32 = ir.F32Type.get()
    # One instruction compares both halves of a word, as float16, the order of which is that of
    # their bits. Values beyond infinity are NaN, and limits are not: NaN is not `lt` them, but
    # `geu`. The lower byte of a half, that of another element, makes no difference to it.
    compare = "lt" if few else "geu"
    text = (
        f"{{ .reg .pred p, q; setp.{compare}.f16x2 p|q, $2, $5;"
        f" @p {negation.format('$0')} @q {negation.format('$1')} }}"
    )
    out = tile.registers.copy()
    index_of = {(group, half): index for index, group, half, _ in _fragments(tile.registers)}
    for pairs in fours:
        query, limits, key = words_of(*pairs[0][0])
        value = _four_values(query, key)
        if few:  # 2^7 - 1 less the bytes
            value = arith.xori(value, _i32(SEVEN_BITS))
        else:
            limits = arith.subi(_i32(-0x7FFF8000), limits)  # 2^7 less each
        for pair, shift in zip(pairs, (0, 8), strict=True):
            halves = arith.shli(value, _i32(shift))
            numbers = [_extract(out[index_of[group, half]], e) for group, half, e in pair]
            results = llvm.inline_asm(
                llvm.StructType.get_literal([f32] * 2),
                [halves, *numbers, limits],
                text,
                "=f,=f,r,0,1,r",
            )
            for n, (group, half, e) in enumerate(pair):
                index = index_of[group, half]
                out[index] = _insert(out[index], llvm.extractvalue(f32, results, [n]), e)
    return _like(tile, out)


def positive_operand(tile: jax.Array, dtype) -> jax.Array:
    """A float32 tile as an operand, bfloat16 or float16, with 0 where it is negative."""
    if interpreting():
        return jnp.maximum(tile, 0.0).astype(dtype)

    shape = _result_type(tile.shape, dtype, layout=_TILE)

    @plgpu.inline_mgpu(arg_types=(_TILE,), return_type=shape)
    def cast(_, tile):
        i32 = ir.IntegerType.get_signless(32)
        element = mgpu_utils.dtype_to_ir_type(dtype)
        pair_type = ir.VectorType.get((2,), element)
        text = f"cvt.rn.relu.{element}x2.f32 $0, $2, $1;"
        out = np.empty_like(tile.registers)
        for index, pair in np.ndenumerate(tile.registers):
            word = llvm.inline_asm(i32, [_extract(pair, e) for e in range(2)], text, "=r,f,f")
            out[index] = llvm.bitcast(pair_type, word)
        return mgpu.FragmentedArray(_registers=out, _layout=tile.layout, _is_signed=None)

    return cast(tile)


# --- memory --------------------------------------------------------------------------------------


def store_rows(ref, rows: jax.Array) -> None:
    """Stores `(64,)` float32 or int32, one value a row, to a `(64,)` view of global memory."""
    if interpreting():
        ref[...] = rows
        return

    kind = "f" if ref.dtype == jnp.float32 else "r"
    store_one = "st.global.f32" if kind == "f" else "st.global.b32"

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _ROWS))
    def store(_, ref, rows):
        thread = _thread()
        lane = arith.andi(thread, _i32(31))
        address = _global_address(ref, arith.muli(_own_row(), _i32(4)))
        first_of_quad = arith.extui(
            ir.IntegerType.get_signless(32),
            arith.cmpi(arith.CmpIPredicate.eq, arith.andi(lane, _i32(3)), _i32(0)),
        )
        low, high = (_scalar(r) for r in rows.registers.flat)
        _asm(
            "{ .reg .pred p; setp.ne.u32 p, $1, 0;"
            f" @p {store_one} [$0], $2; @p {store_one} [$0+32], $3; }}",
            f"l,r,{kind},{kind},~{{memory}}",
            [address, first_of_quad, low, high],
        )

    store(ref, rows)


def store_columns(ref, columns: jax.Array) -> None:
    """Stores one float32 value a column to global memory, as `store_rows` does of rows."""
    if interpreting():
        ref[...] = columns
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _COLUMNS))
    def store(_, ref, columns):
        thread = _thread()  # of the first warp, four have all columns
        address = _global_address(ref, arith.muli(thread, _i32(8)))
        for group, pair in enumerate(columns.registers.flat):
            _asm(
                "{ .reg .pred p; setp.lt.u32 p, $1, 4;"
                f" @p st.global.v2.f32 [$0+{32 * group}], {{$2, $3}}; }}",
                "l,r,f,f,~{memory}",
                [address, thread, *(_extract(pair, e) for e in range(2))],
            )

    store(ref, columns)


def store_tile(ref, tile: jax.Array) -> None:
    """Stores a `(64, n)` tile to a `(64, n)` view of global memory, in float32 or 16 bits."""
    if interpreting():
        ref[...] = tile
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _TILE))
    def store(_, ref, tile):
        row_stride = ir.MemRefType(ref.type).get_strides_and_offset()[0][0]
        size = tile.mlir_dtype.width // 8
        column = arith.muli(_own_column(), _i32(size))
        first = _global_address(ref, column)
        own_row = _own_row()
        addresses = [
            arith.addi(first, _bytes_to(row, size * row_stride))
            for row in (own_row, arith.addi(own_row, _i32(8)))
        ]
        for _, group, half, pair in _fragments(tile.registers):
            offset = 8 * size * group
            if size == 2:
                text = f"st.global.b32 [$0+{offset}], $1;"
                word = llvm.bitcast(ir.IntegerType.get_signless(32), pair)
                _asm(text, "l,r,~{memory}", [addresses[half], word])
                continue
            text = f"st.global.v2.f32 [$0+{offset}], {{$1, $2}};"
            values = [_extract(pair, e) for e in range(2)]
            _asm(text, "l,f,f,~{memory}", [addresses[half], *values])

    store(ref, tile)


def store_by_quads(ref, tile: jax.Array) -> None:
    """Stores a `(64, 64)` 16-bit tile to a view of global memory, columns in an order of its own.

    A thread's columns of a row stand side by side, so that it stores 16 bytes at a time and a quad
    of threads a whole row of 128. `store_operand` puts rows in that order back in their places.
    """
    if interpreting():
        ref[...] = tile.reshape(64, 8, 4, 2).swapaxes(1, 2).reshape(64, 64)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _TILE))
    def store(_, ref, tile):
        i32 = ir.IntegerType.get_signless(32)
        words = {(g, half): llvm.bitcast(i32, x) for _, g, half, x in _fragments(tile.registers)}
        own_columns = arith.muli(arith.andi(_thread(), _i32(3)), _i32(32))
        offset = arith.addi(arith.muli(_own_row(), _i32(128)), own_columns)
        address = _global_address(ref, offset)
        for half, first in itertools.product(range(2), (0, 4)):
            _asm(
                f"st.global.v4.b32 [$0+{1024 * half + 4 * first}], {{$1, $2, $3, $4}};",
                "l,r,r,r,r,~{memory}",
                [address, *(words[group, half] for group in range(first, first + 4))],
            )

    store(ref, tile)


def store_column_sums(ref, tile: jax.Array) -> None:
    """Stores what each warp's 16 rows of a `(64, n)` float32 tile add up to, in a `(4, n)` view."""
    if interpreting():
        ref[...] = tile.reshape(4, 16, -1).sum(1)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _TILE))
    def store(_, ref, tile):
        row_stride = ir.MemRefType(ref.type).get_strides_and_offset()[0][0]
        thread = _thread()
        lane = arith.andi(thread, _i32(31))
        column = arith.muli(arith.andi(thread, _i32(3)), _i32(8))
        warp = arith.shrui(thread, _i32(5))
        address = arith.addi(_global_address(ref, column), _bytes_to(warp, 4 * row_stride))
        pairs = {(group, half): pair for _, group, half, pair in _fragments(tile.registers)}
        for group in range(len(pairs) // 2):
            sums = []
            for e in range(2):
                total = arith.addf(*(_extract(pairs[group, half], e) for half in range(2)))
                for distance in (4, 8, 16):
                    total = arith.addf(total, mgpu_utils.shfl_bfly(total, distance))
                sums.append(total)
            _asm(
                "{ .reg .pred p; setp.lt.u32 p, $1, 4;"
                f" @p st.global.v2.f32 [$0+{32 * group}], {{$2, $3}}; }}",
                "l,r,f,f,~{memory}",
                [address, lane, *sums],
            )

    store(ref, tile)


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
    layout = _words_layout(words_of_all)
    shape = _result_type((words_of_all,), jnp.int32, layout=layout)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT), return_type=shape)
    def load(_, source, first):
        strides, _ = ir.MemRefType(source.type).get_strides_and_offset()
        i32 = ir.IntegerType.get_signless(32)
        four = llvm.StructType.get_literal([i32] * 4)
        registers = np.empty((passes,), dtype=object)
        for n, (row, chunk) in enumerate(_own_chunks(passes, columns)):
            own = arith.minsi(arith.addi(first.registers[()], row), _i32(tokens * heads - 1))
            token, head = arith.divui(own, _i32(heads)), arith.remui(own, _i32(heads))
            offset = arith.addi(
                arith.muli(token, _i32(2 * strides[0])), arith.muli(head, _i32(2 * strides[1]))
            )
            address = _global_address(source, arith.addi(offset, arith.muli(chunk, _i32(16))))
            text = "ld.global.nc.v4.b32 {$0, $1, $2, $3}, [$4];"
            loaded = _asm(text, "=r,=r,=r,=r,l", [address], four)
            words = llvm.mlir_undef(ir.VectorType.get((4,), i32))
            for e in range(4):
                words = _insert(words, llvm.extractvalue(i32, loaded, [e]), e)
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

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(OPERAND), _words_layout(loaded.size)))
    def store(_, target, loaded):
        for row, chunk, words in _loaded_chunks(loaded, columns):
            # The swizzle exchanges the 16 bytes that a thread moves with others of 128.
            row_in_tile = arith.andi(row, _i32(7))
            swizzled = arith.xori(arith.andi(chunk, _i32(7)), row_in_tile)
            there = _shared_address(
                target,
                (arith.shrui(row, _i32(3)), 16 * columns),
                (arith.shrui(chunk, _i32(3)), 1024),
                (row_in_tile, 128),
                (swizzled, 16),
            )
            _asm(
                "{ .reg .pred p; setp.lt.s32 p, $1, " + str(rows) + ";"
                " @p st.shared.v4.b32 [$0], {$2, $3, $4, $5}; }",
                "r,r,r,r,r,r,~{memory}",
                [there, row, *words],
            )

    store(target, loaded)


def _words_layout(count: int):
    """Of int32 that a thread has four of, side by side, in each pass."""
    return plgpu.Layout.WG_STRIDED((count,), vec_size=4)


def _own_chunks(passes: int, columns: int):
    """Yields row and chunk of what this thread moves in each pass.

    A chunk is 8 columns; neighbouring threads have those of one row. Threads that are too many have
    rows that are.
    """
    for n in range(passes):
        place = arith.addi(_thread(), _i32(n * WARPGROUP_THREADS))
        yield arith.divui(place, _i32(columns // 8)), arith.remui(place, _i32(columns // 8))


def _loaded_chunks(loaded, columns: int):
    """Yields (row, chunk, 4 words) of what this thread has loaded."""
    chunks = _own_chunks(loaded.registers.size, columns)
    for (row, chunk), words in zip(chunks, loaded.registers, strict=True):
        yield row, chunk, [_extract(words, e) for e in range(4)]


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

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _TILE, plgpu.Layout.WG_SPLAT))
    def store(_, ref, tile, first):
        i32 = ir.IntegerType.get_signless(32)
        strides, _ = ir.MemRefType(ref.type).get_strides_and_offset()
        size = mgpu_utils.bytewidth(ir.MemRefType(ref.type).element_type)
        registers = tile.registers.reshape(-1, tile.shape[1] // 8, 2)  # boxes, groups, row halves
        thread = _thread()
        quad = arith.andi(arith.shrui(thread, _i32(2)), _i32(7))
        in_quad = arith.andi(thread, _i32(3))

        def put(group, column, element, word_of) -> None:
            """What word_of makes of each register of a group; of a column, from an element on."""
            row = arith.addi(first.registers[()], arith.addi(column, _i32(8 * group)))
            token, head = arith.divui(row, _i32(heads)), arith.remui(row, _i32(heads))
            terms = ((token, strides[0]), (head, strides[1]), (element, 1))
            offset = functools.reduce(arith.addi, (arith.muli(n, _i32(s)) for n, s in terms))
            address = _global_address(ref, arith.muli(offset, _i32(size)))
            for (box, half), pair in np.ndenumerate(registers[:, group]):
                _asm(
                    f"{{ .reg .pred p; setp.le.s32 p, $1, {last};"
                    f" @p st.global.b32 [$0+{size * (64 * box + 8 * half)}], $2; }}",
                    "l,r,r,~{memory}",
                    [address, row, word_of(pair)],
                )

        def transposed(pair):
            """Two elements of one column, from 8 rows by 8 columns of 16 bits in a warp."""
            text = "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;"
            return _asm(text, "=r,r", [llvm.bitcast(i32, pair)], i32)

        first_in_quad = arith.muli(in_quad, _i32(2))
        for group in range(registers.shape[1]):
            if size == 2:
                warp = arith.shrui(thread, _i32(5))
                element = arith.addi(arith.muli(warp, _i32(16)), first_in_quad)
                put(group, quad, element, transposed)
                continue
            for e in range(2):
                column = arith.addi(first_in_quad, _i32(e))
                word = lambda pair, e=e: arith.bitcast(i32, _extract(pair, e))
                put(group, column, _own_row(), word)

    store(ref, tile, jnp.int32(first))


def keep_operand_rows(ref, first, end) -> None:
    """Zeroes the rows outside of [first, end) of a `(rows, n)` tile that TMA has brought.

    In shared memory in the form of `OPERAND`, or if float8 of `float8_operand`, up to 128 rows.
    `commit_smem` must follow.
    """
    if interpreting():
        row = lax.broadcasted_iota(jnp.int32, ref.shape, 0)
        ref[...] = jnp.where((row >= first) & (row < end), ref[...], 0)
        return

    splat = plgpu.Layout.WG_SPLAT
    transforms = OPERAND if ref.dtype.itemsize == 2 else float8_operand(ref.shape[1])

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(transforms), splat, splat))
    def zero(_, ref, first, end):
        # 8 rows of 64 or 128 bytes are a tile. The swizzle moves nothing from one row to another.
        view = ir.MemRefType(ref.type)
        _, column_tiles, _, columns = view.shape
        row_bytes = columns * mgpu_utils.bytewidth(view.element_type)
        row = _thread()
        tile, row_in_tile = arith.shrui(row, _i32(3)), arith.andi(row, _i32(7))
        address = _shared_address(
            ref, (tile, 8 * row_bytes * column_tiles), (row_in_tile, row_bytes)
        )
        places = [
            8 * row_bytes * tile + chunk
            for tile in range(column_tiles)
            for chunk in range(0, row_bytes, 16)
        ]
        stores = " ".join(
            f"@p st.shared.v4.b32 [$0+{place}], {{zero, zero, zero, zero}};" for place in places
        )
        rows = ir.MemRefType(ref.type).shape[0] * 8
        _asm(
            "{ .reg .pred p; .reg .b32 zero; mov.b32 zero, 0; setp.lt.s32 p, $1, $2;"
            f" setp.ge.or.s32 p, $1, $3, p; setp.lt.and.s32 p, $1, {rows}, p; {stores} }}",
            "r,r,r,r,~{memory}",
            [address, row, first.registers[()], end.registers[()]],
        )

    zero(ref, jnp.int32(first), jnp.int32(end))


@dataclasses.dataclass(frozen=True)
class SharedZeros:
    """Lets `warpgroups` zero the same rows of a tile, each before a product of its own reads them.

    All write the same zeros, so none waits for another. In interpret mode, which would call that a
    race, the first does it for all, who then meet at the mbarrier of `scratch()`.
    """

    warpgroups: int
    twins: Any = None

    def scratch(self) -> plgpu.Barrier:
        return plgpu.Barrier(num_arrivals=self.warpgroups)

    def keep_rows(self, ref, first, end, warpgroup, box_width: int) -> None:
        """Zeroes the rows outside of [first, end) of `(tiles, rows, n)`, of `operand_form` each.

        For products that follow; rows are a multiple of 64.
        """

        def keep():
            for n in range(ref.shape[0]):
                _keep_any_operand_rows(ref.at[n], first, end, box_width)
            plgpu.commit_smem()

        if self.twins is None:
            keep()
            return
        for action in (lambda: None, lambda: pl.when(warpgroup == 0)(keep)):
            action()
            plgpu.barrier_arrive(self.twins)
            plgpu.barrier_wait(self.twins)


def _keep_any_operand_rows(ref, first, end, box_width: int) -> None:
    """As `keep_operand_rows`, of any multiple of 64 rows, and without bank conflicts."""
    if interpreting():
        keep_operand_rows(ref, first, end)
        return

    splat = plgpu.Layout.WG_SPLAT

    threads_a_row = box_width // 8
    threads_a_box, box_bytes = 8 * threads_a_row, 16 * box_width
    boxes_at_a_time = WARPGROUP_THREADS // threads_a_box
    shift = lambda x, by: arith.shrui(x, _i32(by.bit_length() - 1))

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(operand_form(box_width)), splat, splat))
    def zero(_, ref, first, end):
        # Threads side by side write 16 bytes side by side. A box is 8 rows, of which the swizzle
        # moves nothing from one row to another.
        row_tiles, column_tiles, _, _ = ir.MemRefType(ref.type).shape
        thread = _thread()
        address = _shared_address(
            ref,
            (shift(thread, threads_a_box), box_bytes * column_tiles),
            (arith.andi(thread, _i32(threads_a_box - 1)), 16),
        )
        text = "{ .reg .pred p; .reg .b32 zero, row; mov.b32 zero, 0; mov.b32 row, $1;"
        for row_tile in range(0, row_tiles, boxes_at_a_time):
            text += (
                " setp.lt.s32 p, row, $2; setp.ge.or.s32 p, row, $3, p;"
                f" add.s32 row, row, {8 * boxes_at_a_time};"
            )
            for tile in range(column_tiles):
                place = box_bytes * (row_tile * column_tiles + tile)
                text += f" @p st.shared.v4.b32 [$0+{place}], {{zero, zero, zero, zero}};"
        row = shift(thread, threads_a_row)
        _asm(
            text + " }",
            "r,r,r,r,~{memory}",
            [address, row, first.registers[()], end.registers[()]],
        )

    zero(ref, jnp.int32(first), jnp.int32(end))


def load_rows(ref, first, last) -> jax.Array:
    """`(64,)` float32 or int32, one value a row, from row `first` of a view of global memory on.

    Rows after `last` read as `last`: nothing is read out of bounds, at any alignment.
    """
    if interpreting():
        return ref[...][jnp.minimum(first + jnp.arange(64), last)]

    is_float = ref.dtype == jnp.float32
    zeros = plgpu.layout_cast(jnp.zeros((64,), ref.dtype), _ROWS)
    shape = _result_type((64,), ref.dtype, layout=_ROWS)
    splat = plgpu.Layout.WG_SPLAT

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), splat, splat, _ROWS), return_type=shape)
    def load(_, ref, first, last, like):
        first, last = first.registers[()], last.registers[()]
        row = arith.addi(first, _own_row())
        value_type = ir.F32Type.get() if is_float else ir.IntegerType.get_signless(32)
        values = [
            _asm(
                f"ld.global.nc.{'f' if is_float else 'b'}32 $0, [$1];",
                "=f,l" if is_float else "=r,l",
                [_global_address(ref, arith.muli(_clamped(row, half, last), _i32(4)))],
                value_type,
            )
            for half in range(2)
        ]
        return _rows_like(like, values)

    return load(ref, jnp.int32(first), jnp.int32(last), zeros)


def prefetch(ref, wanted) -> None:
    """Has what a ref to contiguous float32 in global memory holds come to L2, if `wanted`.

    All of a warpgroup call it; nothing waits for it.
    """
    if interpreting():
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT))
    def start(_, ref, wanted):
        size = 4 * math.prod(ref.type.shape)
        _asm(
            "{ .reg .pred p; setp.lt.u32 p, $1, $2;"
            f" @p cp.async.bulk.prefetch.L2.global [$0], {size}; }}",
            "l,r,r,~{memory}",
            [_base_address(ref), _thread(), wanted.registers[()]],
        )

    start(ref, wanted.astype(jnp.int32))


def load_intervals(ref, first, last) -> tuple[jax.Array, jax.Array]:
    """Where the intervals of 64 rows begin and end, as `load_rows`, from a `(2, rows)` view."""
    begin, end = (load_rows(ref.at[n], first, last) for n in range(2))
    return begin, end


def count_sorted(ref, rows: jax.Array, *, or_equal: bool) -> jax.Array:
    """How many values of a one-dimensional int32 view of global memory, which rise, are less.

    Args:
      rows: `(64,)` int32: less than each row's value.
      or_equal: or equal to it.
    """
    (count,) = ref.shape
    if interpreting():
        side = "right" if or_equal else "left"
        return jnp.searchsorted(ref[...], rows, side=side).astype(jnp.int32)

    shape = _result_type((64,), jnp.int32, layout=_ROWS)

    @plgpu.inline_mgpu(arg_types=(_ROWS, plgpu.RefType()), return_type=shape)
    def search(_, rows, ref):
        i32 = ir.IntegerType.get_signless(32)
        predicate = arith.CmpIPredicate.sle if or_equal else arith.CmpIPredicate.slt
        found = []
        for value in map(_scalar, rows.registers.flat):
            place = _i32(0)  # so many are known to be
            for bit in reversed(range(count.bit_length())):
                further = arith.addi(place, _i32(1 << bit))
                last = arith.subi(arith.minsi(further, _i32(count)), _i32(1))
                address = _global_address(ref, arith.muli(last, _i32(4)))
                other = _asm("ld.global.nc.b32 $0, [$1];", "=r,l", [address], i32)
                there = arith.cmpi(arith.CmpIPredicate.sle, further, _i32(count))
                there = arith.andi(there, arith.cmpi(predicate, other, value))
                place = arith.select(there, further, place)
            found.append(place)
        return _rows_like(rows, found)

    return search(rows, ref)


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

    zeros = plgpu.layout_cast(jnp.zeros((64, columns), ref.dtype), _TILE)
    shape = _result_type((64, columns), ref.dtype, layout=_TILE)
    splat = plgpu.Layout.WG_SPLAT

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), splat, splat, _TILE), return_type=shape)
    def load(_, ref, first_row, first_column, like):
        view = ir.MemRefType(ref.type)
        sizes, strides = list(view.shape), view.get_strides_and_offset()[0]
        if transposed:
            sizes, strides = sizes[::-1], strides[::-1]
        (row_count, column_count), (row_stride, column_stride) = sizes, strides
        bits = like.mlir_dtype.width
        by_pair = column_count > 1 and column_stride == 1 and column_count % 2 == 0
        own_column = _own_column()
        column = arith.addi(first_column.registers[()], own_column)
        limit = None
        if _needs_limit(column_count, columns):
            limit = arith.subi(_i32(column_count), column)

        base = _base_address(ref)
        if column_count > 1:
            base = arith.addi(base, _bytes_to(column, column_stride * bits // 8))
        addresses = [base]
        if row_count > 1:
            row = arith.addi(first_row.registers[()], _own_row())
            rows = [_clamped(row, half, _i32(row_count - 1)) for half in range(2)]
            addresses = [arith.addi(base, _bytes_to(row, row_stride * bits // 8)) for row in rows]

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
            value = _asm(text, f"{outputs},{inputs}", operands, result)
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
                like = _insert(like, value, e)
            return like

        out, pairs = like.registers.copy(), {}
        for index, group, half, pair in _fragments(like.registers):
            place = (group if column_count > 1 else 0, half if row_count > 1 else 0)
            if place not in pairs:
                pairs[place] = read_pair(addresses[place[1]], group, pair)
            out[index] = pairs[place]
        return _like(like, out)

    return load(ref, jnp.int32(first_row), jnp.int32(first_column), zeros)


def _needs_limit(column_count: int, columns: int) -> bool:
    """Whether tiles may reach beyond the last column, of an array that has more than one."""
    return column_count > 1 and column_count % columns > 0


def load_bits(ref, first_row, first_column, columns: int) -> jax.Array:
    """What `keep_where` takes, from a view of global memory with a bit an element.

    Args:
      ref: `(rows or 1, words or 1)` int32; bit j of word i of a row is that of column 32 * i + j.
        An axis of 1 is broadcast; otherwise there are as many words as whole tiles take.
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
    zeros = plgpu.layout_cast(jnp.zeros((64, 16), jnp.int32), _TILE)
    shape = _result_type((64, 16), jnp.int32, layout=_TILE)
    splat = plgpu.Layout.WG_SPLAT

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), splat, splat, _TILE), return_type=shape)
    def load(_, ref, first_row, first_column, like):
        i32 = ir.IntegerType.get_signless(32)
        row_count, word_count = ir.MemRefType(ref.type).shape
        base = _base_address(ref)
        if word_count > 1:
            base = _global_address(ref, arith.shrui(first_column.registers[()], _i32(3)))
        addresses = [base]
        if row_count > 1:
            row = arith.addi(first_row.registers[()], _own_row())
            rows = [_clamped(row, half, _i32(row_count - 1)) for half in range(2)]
            addresses = [arith.addi(base, _bytes_to(row, 4 * word_count)) for row in rows]

        own_shift = _own_column()

        def read(address):
            """The words of a row, whose lowest bit is that of this thread's first column."""
            if word_count == 1:
                return [_asm("ld.global.nc.b32 $0, [$1];", "=r,l", [address], i32)] * words
            results = ", ".join(f"${n}" for n in range(words))
            text = f"ld.global.nc.v{words}.b32 {{{results}}}, [${words}];"
            four = llvm.StructType.get_literal([i32] * words)
            loaded = _asm(text, "=r," * words + "l", [address], four)
            loaded = [llvm.extractvalue(i32, loaded, [n]) for n in range(words)]
            return [arith.shrui(word, own_shift) for word in loaded]

        halves = [read(address) for address in addresses]
        halves = halves * 2 if row_count == 1 else halves
        out = like.registers.copy()
        for index, group, half, pair in _fragments(like.registers):
            for e in range(2):
                pair = _insert(pair, halves[half][(2 * group + e) % words], e)
            out[index] = pair
        return _like(like, out)

    return load(ref, jnp.int32(first_row), jnp.int32(first_column), zeros)


def keep_where(tile: jax.Array, bits: jax.Array, fill: float) -> jax.Array:
    """`(64, n)` float32 tile where the bit that `load_bits` gave is set, else `fill`."""
    if interpreting():
        return jnp.where(bits != 0, tile, fill)

    shape = _result_type(tile.shape, jnp.float32, layout=_TILE)

    @plgpu.inline_mgpu(arg_types=(_TILE, _TILE), return_type=shape)
    def keep(_, tile, bits):
        words = {
            (2 * group + e, half): _extract(pair, e)
            for _, group, half, pair in _fragments(bits.registers)
            for e in range(2)
        }
        filler = arith.constant(ir.F32Type.get(), ir.FloatAttr.get(ir.F32Type.get(), fill))
        out = tile.registers.copy()
        for index, group, half, pair in _fragments(tile.registers):
            word, first_bit = divmod(8 * group, 32)
            for e in range(2):
                bit = arith.andi(words[word, half], _i32(1 << (first_bit + e)))
                is_set = arith.cmpi(arith.CmpIPredicate.ne, bit, _i32(0))
                pair = _insert(pair, arith.select(is_set, _extract(pair, e), filler), e)
            out[index] = pair
        return _like(tile, out)

    return keep(tile, bits)


def row_products(a_ref, b_ref, first, last) -> jax.Array:
    """`(64,)` float32 rowsum(a * b) of rows of two 16-bit views `(rows, n)` of global memory.

    From row `first` on; rows after `last` read as `last`. n / 8 lanes read a row together, 16 bytes
    each, so that a warp reads whole rows. Each quad of them then gets the sum of one row. Where
    n / 8 is no power of two, or below 4, lanes that read the last bytes again fill up.
    """
    if interpreting():
        rows = jnp.minimum(first + jnp.arange(64), last)
        a, b = (ref[...][rows].astype(jnp.float32) for ref in (a_ref, b_ref))
        return (a * b).sum(1)

    zeros = plgpu.layout_cast(jnp.zeros((64,), jnp.float32), _ROWS)
    shape = _result_type((64,), jnp.float32, layout=_ROWS)
    refs, splats = (plgpu.RefType(),) * 2, (plgpu.Layout.WG_SPLAT,) * 2

    @plgpu.inline_mgpu(arg_types=(*refs, *splats, _ROWS), return_type=shape)
    def products(_, a_ref, b_ref, first, last, like):
        i32 = ir.IntegerType.get_signless(32)
        first, last = first.registers[()], last.registers[()]
        row_type = ir.MemRefType(a_ref.type)
        strides, _ = row_type.get_strides_and_offset()
        pieces = row_type.shape[1] // 8  # of a row, of 16 bytes
        lanes = max(4, 1 << (pieces - 1).bit_length())  # that read a row together
        rows = lanes // 4  # that they read one after the other
        lane = arith.andi(_thread(), _i32(31))
        quad = arith.andi(arith.shrui(lane, _i32(2)), _i32(rows - 1))  # among those lanes
        first_row = arith.subi(arith.addi(first, _own_row()), quad)
        piece = arith.andi(lane, _i32(lanes - 1))
        if pieces < lanes:
            has_piece = arith.cmpi(arith.CmpIPredicate.slt, piece, _i32(pieces))
            piece = arith.minsi(piece, _i32(pieces - 1))
        column = arith.muli(piece, _i32(16))
        bases = [_global_address(ref, column) for ref in (a_ref, b_ref)]

        def load(row):
            offset = _bytes_to(row, 2 * strides[0])
            return [
                _asm(
                    "ld.global.nc.L1::no_allocate.v4.b32 {$0, $1, $2, $3}, [$4];",
                    "=r,=r,=r,=r,l",
                    [arith.addi(base, offset)],
                    llvm.StructType.get_literal([i32] * 4),
                )
                for base in bases
            ]

        def multiply(a, b):
            """Sum of 8 products."""
            f32, total = ir.F32Type.get(), None
            pair_type = ir.VectorType.get((2,), row_type.element_type)
            for word in range(4):
                pairs = [llvm.bitcast(pair_type, llvm.extractvalue(i32, x, [word])) for x in (a, b)]
                for e in range(2):
                    x, y = (arith.extf(f32, _extract(pair, e)) for pair in pairs)
                    total = arith.mulf(x, y) if total is None else llvm.intr_fma(x, y, total)
            if pieces < lanes:
                zero = arith.constant(f32, ir.FloatAttr.get(f32, 0.0))
                total = arith.select(has_piece, total, zero)
            return total

        def one_row_a_quad(sums):
            """Of one sum a row in each lane, that of its quad's row over all lanes."""
            while len(sums) > 1:
                half = len(sums) // 2
                upper = arith.cmpi(arith.CmpIPredicate.ne, arith.andi(quad, _i32(half)), _i32(0))
                pairs = list(zip(sums[:half], sums[half:], strict=True))
                kept = [arith.select(upper, high, low) for low, high in pairs]
                sent = [arith.select(upper, low, high) for low, high in pairs]
                sums = [
                    arith.addf(x, mgpu_utils.shfl_bfly(y, 4 * half))
                    for x, y in zip(kept, sent, strict=True)
                ]
            (total,) = sums
            for distance in (2, 1):
                total = arith.addf(total, mgpu_utils.shfl_bfly(total, distance))
            return total

        loaded = [
            [load(_clamped(arith.addi(first_row, _i32(n)), half, last)) for n in range(rows)]
            for half in range(2)
        ]
        return _rows_like(like, [one_row_a_quad([multiply(*x) for x in row]) for row in loaded])

    return products(a_ref, b_ref, jnp.int32(first), jnp.int32(last), zeros)


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

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _TILE))
    def store(_, ref, tile):
        address = _own_address(ref)
        pairs = {(group, half): pair for _, group, half, pair in _fragments(tile.registers)}
        for group, half in pairs:
            if group % 2 == 0:
                values = [_extract(pairs[g, half], e) for g in (group, group + 1) for e in range(2)]
                offset = (group + half) * _PIECE_BYTES
                _asm(
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
        address = _global_address(ref, arith.muli(_thread(), _i32(16)))
        zero = arith.constant(ir.F32Type.get(), ir.FloatAttr.get(ir.F32Type.get(), 0.0))
        pieces = 4 * math.prod(ir.MemRefType(ref.type).shape) // _PIECE_BYTES
        for piece in range(pieces):
            text = f"st.global.v4.f32 [$0+{piece * _PIECE_BYTES}], {{$1, $1, $1, $1}};"
            _asm(text, "l,f,~{memory}", [address, zero])

    store(ref)


def load_fragment(ref, columns: int) -> jax.Array:
    """The `(64, columns)` float32 tile that stands in global memory in fragment order."""
    if interpreting():
        return _from_fragment_order(ref[...], columns)

    zeros = zero_tile(64, columns)
    shape = _result_type((64, columns), jnp.float32, layout=_TILE)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _TILE), return_type=shape)
    def load(_, ref, like):
        address = _global_address(ref, arith.muli(_thread(), _i32(16)))
        f32 = ir.F32Type.get()
        four = llvm.StructType.get_literal([f32] * 4)
        loaded = {}
        for group in range(0, columns // 8, 2):
            for half in range(2):
                offset = (group + half) * _PIECE_BYTES
                loaded[group, half] = _asm(
                    f"ld.global.nc.L1::no_allocate.v4.f32 {{$0, $1, $2, $3}}, [$4+{offset}];",
                    "=f,=f,=f,=f,l",
                    [address],
                    four,
                )
        out = like.registers.copy()
        for index, group, half, pair in _fragments(like.registers):
            for e in range(2):
                value = llvm.extractvalue(
                    f32, loaded[group - group % 2, half], [2 * (group % 2) + e]
                )
                pair = _insert(pair, value, e)
            out[index] = pair
        return _like(like, out)

    return load(ref, zeros)


def store_operand(ref, tile: jax.Array, box_width: int = 64, *, by_quads: bool = False) -> None:
    """Stores a `(64, n)` 16-bit tile to shared memory of `operand_form`.

    `ref[...] = tile` does the same, but the compiler keeps the addresses of all such stores of a
    kernel in registers across its loops.

    Args:
      by_quads: rows of the tile are in the order of `store_by_quads`, and leave it here.
    """
    if interpreting():
        if by_quads:
            tile = tile.reshape(4, 8, 2, -1).swapaxes(0, 1).reshape(tile.shape)
        ref[...] = tile
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(operand_form(box_width)), _TILE))
    def store(_, ref, tile):
        i32 = ir.IntegerType.get_signless(32)
        words = {(g, half): llvm.bitcast(i32, x) for _, g, half, x in _fragments(tile.registers)}
        for four, address, offset in _matrices(ref, len(words) // 2, box_width, by_quads):
            _asm(
                f"stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0+{offset}], {{$1, $2, $3, $4}};",
                "r,r,r,r,r,~{memory}",
                [address, *(words[place] for place in four)],
            )

    store(ref, tile)


def load_operand(ref, columns: int, dtype, box_width: int = 64) -> jax.Array:
    """The `(64, columns)` 16-bit tile that is in shared memory of `operand_form`, as a tile."""
    if interpreting():
        return ref[...]

    zeros = plgpu.layout_cast(jnp.zeros((64, columns), dtype), _TILE)
    shape = _result_type((64, columns), dtype, layout=_TILE)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(operand_form(box_width)), _TILE), return_type=shape)
    def load(_, ref, like):
        i32 = ir.IntegerType.get_signless(32)
        words: dict[tuple[int, int], Any] = {}
        for four, address, offset in _matrices(ref, columns // 8, box_width):
            loaded = _asm(
                f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{$0, $1, $2, $3}}, [$4+{offset}];",
                "=r,=r,=r,=r,r,~{memory}",
                [address],
                llvm.StructType.get_literal([i32] * 4),
            )
            words |= {place: llvm.extractvalue(i32, loaded, [n]) for n, place in enumerate(four)}
        out = like.registers.copy()
        for index, group, half, pair in _fragments(like.registers):
            out[index] = llvm.bitcast(pair.type, words[group, half])
        return _like(like, out)

    return load(ref, zeros)


def _matrices(ref, groups: int, box_width: int, by_quads: bool = False):
    """Yields what each ldmatrix or stmatrix of a tile of 8 * groups columns moves, and where.

    Which (column group, row half) are its four 8 by 8 matrices; the address of this thread's row,
    and an offset to it in bytes.
    """
    chunks = box_width // 8  # of 16 bytes, in a row of a box
    # 8 lanes each give the addresses of a matrix's rows: matrix 0 and 1 are the row halves of a
    # column group, 2 and 3 those of the next.
    thread = _thread()
    matrix = arith.andi(arith.shrui(thread, _i32(3)), _i32(3))
    row = arith.andi(thread, _i32(7))
    warp, row_half = arith.shrui(thread, _i32(5)), arith.andi(matrix, _i32(1))
    row_tile = arith.addi(arith.muli(warp, _i32(2)), row_half)
    if by_quads:
        row_tile = arith.addi(arith.muli(row_half, _i32(4)), arith.shrui(row, _i32(1)))
        row = arith.addi(arith.muli(warp, _i32(2)), arith.andi(row, _i32(1)))
    # A box is swizzled by the bits of the address 128 bytes and more apart.
    swizzle = arith.shrui(row, _i32((8 // chunks).bit_length() - 1))
    chunk = arith.xori(arith.shrui(matrix, _i32(1)), swizzle)
    row_tile_bytes = 128 * groups  # 8 rows
    address = _shared_address(ref, (row_tile, row_tile_bytes), (row, 16 * chunks), (chunk, 16))
    for first in range(0, groups, 2):
        column_tile, chunk_of_box = divmod(first, chunks)
        four = [(group, half) for group in (first, first + 1) for half in range(2)]
        yield four, arith.xori(address, _i32(16 * chunk_of_box)), column_tile * 128 * chunks


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

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _TILE))
    def send(_, ref, tile):
        i32 = ir.IntegerType.get_signless(32)
        as_words = ir.VectorType.get((tile.mlir_dtype.width // 16,), i32)
        pairs = [llvm.bitcast(as_words, pair) for pair in tile.registers.flat]
        words = [_extract(pair, e) for pair in pairs for e in range(as_words.shape[0])]
        address = _own_address(ref)
        for n in range(0, len(words), 4):
            text = f"st.shared.v4.b32 [$0+{n * 4 * WARPGROUP_THREADS}], {{$1, $2, $3, $4}};"
            _asm(text, "r,r,r,r,r,~{memory}", [address, *words[n : n + 4]])

    send(ref, tile)


def receive_tile(ref, columns: int, dtype) -> jax.Array:
    """The `(64, columns)` tile that another warpgroup left with `send_tile`."""
    if interpreting():
        return lax.bitcast_convert_type(ref[...], dtype).reshape(64, columns)

    zeros = plgpu.layout_cast(jnp.zeros((64, columns), dtype), _TILE)
    shape = _result_type((64, columns), dtype, layout=_TILE)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _TILE), return_type=shape)
    def receive(_, ref, like):
        i32 = ir.IntegerType.get_signless(32)
        as_words = ir.VectorType.get((like.mlir_dtype.width // 16,), i32)
        four = llvm.StructType.get_literal([i32] * 4)
        address = _own_address(ref)
        loaded_words = []
        for n in range(0, like.registers.size * as_words.shape[0], 4):
            text = f"ld.shared.v4.b32 {{$0, $1, $2, $3}}, [$4+{n * 4 * WARPGROUP_THREADS}];"
            loaded = _asm(text, "=r,=r,=r,=r,r,~{memory}", [address], four)
            loaded_words += [llvm.extractvalue(i32, loaded, [e]) for e in range(4)]
        words = iter(loaded_words)
        out = like.registers.copy()
        for index, pair in np.ndenumerate(like.registers):
            pair_words = llvm.mlir_undef(as_words)
            for e in range(as_words.shape[0]):
                pair_words = _insert(pair_words, next(words), e)
            out[index] = llvm.bitcast(pair.type, pair_words)
        return _like(like, out)

    return receive(ref, zeros)


def _to_fragment_order(tile):
    n = tile.shape[1]
    x = tile.reshape(4, 2, 8, n // 16, 2, 4, 2)  # warp, half, quad, 16 columns, group, lane, pair
    return x.transpose(3, 1, 0, 2, 5, 4, 6).reshape(fragment_shape(n))


def _from_fragment_order(fragment, columns):
    x = fragment.reshape(columns // 16, 2, 4, 8, 4, 2, 2)
    return x.transpose(2, 1, 3, 0, 5, 4, 6).reshape(64, columns)


# --- float8 --------------------------------------------------------------------------------------

# Of each 16 columns, as a thread has them: two side by side, and two that are 8 columns behind. The
# product that takes them has 4 side by side. Both of its operands have their 16 in this order.


def half_weights(logits: jax.Array, factor: jax.Array, reference: jax.Array) -> jax.Array:
    """2^(factor * logits - reference), float16 as logits, `(64, n)`.

    factor and reference are `(64,)` float32, one value a row, cast to float16. All weights of a row
    are NaN where the reference is 2048 or more from 0, or the factor beyond float16's range.
    """
    if interpreting():
        factor, start = (x.astype(jnp.float16) for x in (factor, -reference))
        wrong = (start * 32 + factor * 0) * 0  # NaN of what is infinite
        exponents = logits.astype(jnp.float32) * factor.astype(jnp.float32)[:, None]
        exponents += (wrong + start).astype(jnp.float32)[:, None]
        return jnp.exp2(exponents.astype(jnp.float16))

    shape = _result_type(logits.shape, jnp.float16, layout=_TILE)

    @plgpu.inline_mgpu(arg_types=(_TILE, _ROWS, _ROWS), return_type=shape)
    def compute(_, tile, factor, reference):
        i32 = ir.IntegerType.get_signless(32)
        factors, starts = [], []  # of the two row halves, each twice in a word
        for own in zip(factor.registers.flat, reference.registers.flat, strict=True):
            own_factor, own_reference = map(_scalar, own)
            factors.append(
                llvm.inline_asm(i32, [own_factor], "cvt.rn.f16x2.f32 $0, $1, $1;", "=r,f")
            )
            starts.append(
                llvm.inline_asm(
                    i32,
                    [own_reference, factors[-1], _i32(0x50005000), _i32(0)],  # 32 and 0, twice
                    "{ .reg .f32 start; .reg .b32 wrong; neg.f32 start, $1;"
                    " cvt.rn.f16x2.f32 $0, start, start;"
                    " mul.rn.f16x2 wrong, $2, $4; fma.rn.f16x2 wrong, $0, $3, wrong;"
                    " fma.rn.f16x2 $0, wrong, $4, $0; }",
                    "=&r,f,r,r,r",
                )
            )
        # The compiler puts both halves of an ex2.f16x2 together anew for each use; not so a `prmt`.
        text = (
            "{ .reg .b16 low, high; .reg .b32 first, second; fma.rn.f16x2 $0, $1, $2, $3;"
            " mov.b32 {low, high}, $0; ex2.approx.f16 low, low; ex2.approx.f16 high, high;"
            " cvt.u32.u16 first, low; cvt.u32.u16 second, high;"
            " prmt.b32 $0, first, second, 0x5410; }"
        )
        out = np.empty_like(tile.registers)
        for index, _, half, pair in _fragments(tile.registers):
            operands = [mgpu_utils.bitcast(pair, i32), factors[half], starts[half]]
            word = llvm.inline_asm(i32, operands, text, "=r,r,r,r")
            out[index] = mgpu_utils.bitcast(word, pair.type)
        return _like(tile, out)

    return compute(logits, factor, reference)


def half_maxima(tile: jax.Array) -> jax.Array:
    """`(64,)` float32: the maximum of each row of a float16 tile; NaN where one is."""
    if interpreting():
        return tile.astype(jnp.float32).max(axis=1)

    zeros = plgpu.layout_cast(jnp.zeros((64,), jnp.float32), _ROWS)
    shape = _result_type((64,), jnp.float32, layout=_ROWS)

    @plgpu.inline_mgpu(arg_types=(_TILE, _ROWS), return_type=shape)
    def compute(_, tile, like):
        maxima = []
        for word in _folded_halves(tile, "max.NaN.f16x2 $0, $1, $2;"):
            for distance in (1, 2):
                text = (
                    "{ .reg .b32 other;"
                    f" shfl.sync.bfly.b32 other, $1, {distance}, 31, 0xffffffff;"
                    " max.NaN.f16x2 $0, $1, other; }"
                )
                word = _asm(text, "=r,r", [word], word.type)
            text = (
                "{ .reg .b16 low, high; mov.b32 {low, high}, $1;"
                " max.NaN.f16 low, low, high; cvt.f32.f16 $0, low; }"
            )
            maxima.append(llvm.inline_asm(ir.F32Type.get(), [word], text, "=f,r"))
        return _rows_like(like, maxima)

    return compute(tile, zeros)


def half_sums(tile: jax.Array) -> jax.Array:
    """`(64, 8)` float32: of a `(64, n)` float16 tile the sums of each 8th column, in float16."""
    if interpreting():
        return tile.reshape(tile.shape[0], -1, 8).sum(axis=1).astype(jnp.float32)

    shape = _result_type((64, 8), jnp.float32, layout=_TILE)

    @plgpu.inline_mgpu(arg_types=(_TILE, _TILE), return_type=shape)
    def compute(_, tile, like):
        sums = _folded_halves(tile, "add.rn.f16x2 $0, $1, $2;")
        out = like.registers.copy()
        for index, _, half, pair in _fragments(like.registers):
            for e, name in enumerate(("low", "high")):
                text = (
                    f"{{ .reg .b16 low, high; mov.b32 {{low, high}}, $1; cvt.f32.f16 $0, {name}; }}"
                )
                value = llvm.inline_asm(ir.F32Type.get(), [sums[half]], text, "=f,r")
                pair = _insert(pair, value, e)
            out[index] = pair
        return _like(like, out)

    return compute(tile, zero_tile(64, 8))


def _folded_halves(tile, text: str) -> list:
    """Of each row half of a float16 tile all words of this thread, put together two by two."""
    i32 = ir.IntegerType.get_signless(32)
    words: tuple[list, list] = [], []
    for _, _, half, pair in _fragments(tile.registers):
        words[half].append(mgpu_utils.bitcast(pair, i32))
    folded = []
    for terms in words:
        while len(terms) > 1:  # a sum one by one would lose what is far below it
            two_by_two = zip(terms[0::2], terms[1::2], strict=True)
            terms = [llvm.inline_asm(i32, list(two), text, "=r,r,r") for two in two_by_two]
        folded += terms
    return folded


def to_float8(tile: jax.Array) -> jax.Array:
    """A `(64, n)` float16 tile in e4m3, as the left operand of a product from registers.

    Magnitudes above 448 become 448. On a GPU columns are in another order, that of the columns of
    what `transpose_float8` stores.
    """
    if interpreting():
        return jnp.clip(tile, -448, 448).astype(jnp.float8_e4m3fn)

    layout = plgpu.Layout.WGMMA_8BIT
    zeros = plgpu.layout_cast(jnp.zeros(tile.shape, jnp.float8_e4m3fn), layout)
    shape = _result_type(tile.shape, jnp.float8_e4m3fn, layout=layout)

    @plgpu.inline_mgpu(arg_types=(_TILE, layout), return_type=shape)
    def cast(_, tile, like):
        i32 = ir.IntegerType.get_signless(32)
        pairs = {(group, half): pair for _, group, half, pair in _fragments(tile.registers)}
        out = like.registers.copy()
        for index, group, half, quad in _fragments(like.registers):  # groups of 16
            word = llvm.inline_asm(
                i32,
                [mgpu_utils.bitcast(pairs[2 * group + n, half], i32) for n in range(2)],
                "{ .reg .b16 low, high;"
                " cvt.rn.satfinite.e4m3x2.f16x2 low, $1;"
                " cvt.rn.satfinite.e4m3x2.f16x2 high, $2;"
                " mov.b32 $0, {low, high}; }",
                "=r,r,r",
            )
            out[index] = mgpu_utils.bitcast(word, quad.type)
        return _like(like, out)

    return cast(tile, zeros)


def any_from(limit: float, tile: jax.Array) -> jax.Array:
    """Whether an element of a `(64, n)` float32 tile is `limit` or more, or NaN, in the warp.

    Warps differ in the result, a scalar: what depends on it must be of the warp's rows alone.
    """
    if interpreting():
        return jnp.logical_not(tile < limit).any()

    shape = _result_type((), jnp.int32, layout=plgpu.Layout.WG_SPLAT)

    @plgpu.inline_mgpu(arg_types=(_TILE,), return_type=shape)
    def vote(_, tile):
        own = [_extract(pair, e) for pair in tile.registers.flat for e in range(2)]
        bound = f"0f{np.float32(limit).view(np.uint32):08x}"
        tests = "".join(f" setp.geu.or.f32 p, ${n + 1}, {bound}, p;" for n in range(len(own)))
        text = (
            f"{{ .reg .pred p; setp.ne.u32 p, 0, 0;{tests}"
            " vote.sync.any.pred p, p, 0xffffffff; selp.s32 $0, 1, 0, p; }"
        )
        i32 = ir.IntegerType.get_signless(32)
        value = _asm(text, "=r" + ",f" * len(own), own, i32)
        return mgpu.FragmentedArray.splat(value, (), is_signed=True)

    return vote(tile) > 0


def transpose_float8(target, source) -> None:
    """Stores `(keys, n)` source to `(n, keys)` target, in shared memory, by one warpgroup.

    Both are e4m3, in boxes of 128 columns, or 64 where that does not divide them, that are swizzled
    as wide. n and keys are multiples of 64. On a GPU the columns of the target are in the order of
    `to_float8`.
    """
    if interpreting():
        target[...] = source[...].T
        return

    keys, columns = source.shape
    target_box, source_box = _float8_box(keys), _float8_box(columns)
    transforms = float8_operand(keys), float8_operand(columns)

    def swizzled(chunk, row, box: int):
        """The place of 16 bytes in a row of a box."""
        return arith.xori(chunk, row if box == 128 else arith.shrui(row, _i32(1)))

    @plgpu.inline_mgpu(arg_types=tuple(plgpu.RefType(x) for x in transforms))
    def transpose(_, target, source):
        i32 = ir.IntegerType.get_signless(32)
        four = llvm.StructType.get_literal([i32] * 4)
        thread = _thread()
        warp, lane = arith.shrui(thread, _i32(5)), arith.andi(thread, _i32(31))
        # A warp takes every fourth 16 columns of the source, 32 rows at a time: 4 matrices of 8
        # rows by 8 pairs. 8 lanes each give the addresses of a matrix's rows.
        matrix, row = arith.shrui(lane, _i32(3)), arith.andi(lane, _i32(7))
        # A lane then has the bytes of two columns, the pair of its number / 4, of 4 rows in two
        # words. It puts those of a column into one word. The first word has the even column in
        # lanes of the pairs 0 to 3 and the odd one in the others, so that the 8 rows that an
        # instruction stores differ in their place among 8, by which they are swizzled.
        is_late = arith.cmpi(arith.CmpIPredicate.sge, lane, _i32(16))
        even, odd = _i32(0x6420), _i32(0x7531)
        selectors = [arith.select(is_late, odd, even), arith.select(is_late, even, odd)]
        read = _shared_address(
            source,
            (matrix, 8 * columns),
            (row, source_box),
            (swizzled(warp, row, source_box), 16),
        )
        # Of matrices 0 and 2 the first word of 16 columns each, of 1 and 3 the second.
        is_second = arith.andi(matrix, _i32(1))
        later = arith.extui(i32, arith.cmpi(arith.CmpIPredicate.sge, row, _i32(4)))
        column = arith.addi(arith.muli(row, _i32(2)), arith.xori(is_second, later))
        place = arith.andi(column, _i32(7))
        write = _shared_address(
            target,
            (warp, 16 * keys),
            (arith.shrui(column, _i32(3)), 8 * keys),
            (place, target_box),
            (swizzled(arith.shrui(matrix, _i32(1)), place, target_box), 16),
        )

        def load(first_row: int, first_column: int) -> list:
            box, column = divmod(first_column, source_box)
            loaded = _asm(
                "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16"
                f" {{$0, $1, $2, $3}}, [$4+{first_row * columns + 8 * source_box * box}];",
                "=r,=r,=r,=r,r,~{memory}",
                [arith.xori(read, _i32(column))],
                four,
            )
            return [llvm.extractvalue(i32, loaded, [e]) for e in range(4)]

        def store(first_row: int, first_column: int, words: list) -> None:
            values = [
                _asm("prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [*words[e : e + 2], selector], i32)
                for e in (0, 2)
                for selector in selectors
            ]
            box, key = divmod(first_row, target_box)
            _asm(
                "stmatrix.sync.aligned.m8n8.x4.shared.b16"
                f" [$0+{first_column * keys + 8 * target_box * box}], {{$1, $2, $3, $4}};",
                "r,r,r,r,r,~{memory}",
                [arith.xori(write, _i32(key)), *values],
            )

        units = list(itertools.product(range(0, keys, 32), range(0, columns, 64)))
        for some in itertools.batched(units, _LOADS):
            for unit, words in zip(some, [load(*unit) for unit in some], strict=True):
                store(*unit, words)

    transpose(target, source)


_LOADS = 2  # on their way at a time, of 4 registers each


def float8_operand(columns: int) -> tuple:
    """How TMA and wgmma have a float8 operand of so many columns in shared memory."""
    box = _float8_box(columns)
    return plgpu.TilingTransform((8, box)), plgpu.SwizzleTransform(box)


def _float8_box(columns: int) -> int:
    """Columns of a box: as wide as TMA swizzles, if that divides them."""
    return 128 if columns % 128 == 0 else 64


# --- float8 in two parts --------------------------------------------------------------------------

# A number in e4m3 has 4 bits; what they leave over, 16 times, is another one: together 8 bits and a
# sign, as many as bfloat16 has. An operand in two parts has the first parts of its rows, and behind
# them the second parts, as rows of their own.

_SECOND_PART = 16.0


def join_parts(product: jax.Array) -> jax.Array:
    """`(m, n)` product of which `(m, 2n)` is that with an operand of n rows in two parts."""
    columns = product.shape[1] // 2
    return product[:, :columns] + product[:, columns:] * (1 / _SECOND_PART)


def _in_two_parts(rows):
    first = to_float8(rows)
    second = to_float8((rows - first.astype(jnp.float32)) * _SECOND_PART)
    return jnp.concatenate([first, second])


def store_queries_float8(target, units_ref, loaded: jax.Array, dtype) -> None:
    """As `store_queries`, to an operand in two parts, with the unit of each row.

    bfloat16 is exact down to 2^-13 of a row's largest element; float16 loses two bits.

    Args:
      target: `(2 * rows, n)` e4m3, in the form of `float8_operand(n)`.
      units_ref: `(rows,)` float32 in shared memory, powers of 2 to multiply logits with. Infinite
        for a row with an element that is not finite, whose parts are NaN then.
      loaded: rows from `load_queries`.
      dtype: of what they were loaded from.
    """
    rows, columns = units_ref.shape[0], target.shape[1]
    # The largest is from 2^7 on, and below 2^8.
    smallest = 2.0**-107
    if interpreting():
        wide = loaded.astype(jnp.float32)
        bits = lax.bitcast_convert_type(wide, jnp.int32) & 0x7FFFFFFF
        power = lax.bitcast_convert_type(bits.max(axis=1) & 0x7F800000, jnp.float32)
        units = jnp.maximum(power * 2.0**-7, smallest)
        units_ref[...] = units
        target[...] = _in_two_parts(wide * (1.0 / units)[:, None])
        return

    box = _float8_box(columns)
    is_bfloat16 = dtype == jnp.bfloat16
    types = plgpu.RefType(float8_operand(columns)), plgpu.RefType(), _words_layout(loaded.size)

    @plgpu.inline_mgpu(arg_types=types)
    def store(_, target, units_ref, loaded):
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        element = ir.BF16Type.get() if is_bfloat16 else ir.F16Type.get()
        pair_type = ir.VectorType.get((2,), element)
        for row, chunk, words in _loaded_chunks(loaded, columns):
            pairs = [llvm.bitcast(pair_type, word) for word in words]
            wide = [arith.extf(f32, _extract(pair, e)) for pair in pairs for e in range(2)]
            magnitudes = [arith.andi(arith.bitcast(i32, x), _i32(0x7FFFFFFF)) for x in wide]
            largest = functools.reduce(arith.maxsi, magnitudes)
            distance = columns // 16
            while distance:  # over the threads that have the row
                text = f"shfl.sync.bfly.b32 $0, $1, {distance}, 31, 0xffffffff;"
                largest = arith.maxsi(largest, _asm(text, "=r,r", [largest], i32))
                distance //= 2
            power = arith.bitcast(f32, arith.andi(largest, _i32(0x7F800000)))
            scale = arith.constant(f32, ir.FloatAttr.get(f32, 2.0**-7))
            floor = arith.constant(f32, ir.FloatAttr.get(f32, smallest))
            unit = arith.maximumf(arith.mulf(power, scale), floor)
            # 1 / unit, which for infinity is 0.
            exponent = arith.subi(_i32(254 << 23), arith.bitcast(i32, unit))
            inverse = arith.bitcast(f32, arith.maxsi(exponent, _i32(0)))
            scaled = [arith.mulf(x, inverse) for x in wide]
            quads = [_split_float8(scaled[n : n + 4]) for n in (0, 4)]
            row_in_tile, of_16 = arith.andi(row, _i32(7)), arith.shrui(chunk, _i32(1))
            swizzle = row_in_tile if box == 128 else arith.shrui(row_in_tile, _i32(1))
            there = _shared_address(
                target,
                (arith.shrui(row, _i32(3)), 8 * columns),
                (arith.divui(of_16, _i32(box // 16)), 8 * box),
                (row_in_tile, box),
                (arith.xori(arith.andi(of_16, _i32(box // 16 - 1)), swizzle), 16),
                (arith.andi(chunk, _i32(1)), 8),
            )
            _asm(
                "{ .reg .pred p; setp.lt.s32 p, $1, " + str(rows) + ";"
                " @p st.shared.v2.b32 [$0], {$2, $3};"
                f" @p st.shared.v2.b32 [$0+{rows * columns}], {{$4, $5}};"
                " setp.eq.and.s32 p, $6, 0, p; @p st.shared.f32 [$7], $8; }",
                "r,r,r,r,r,r,r,r,f,~{memory}",
                [
                    there,
                    row,
                    *(quad[part] for part in range(2) for quad in quads),
                    chunk,
                    _shared_address(units_ref, (row, 4)),
                    unit,
                ],
            )

    store(target, units_ref, loaded)


def store_weights_float8(target, weights: jax.Array) -> None:
    """Stores `(64, rows)` float32 weights, transposed, to an operand in two parts.

    The target is `(2 * rows, 64)` e4m3 in shared memory, in the form of `float8_operand(64)`. On a
    GPU its columns are in the order of those that `transpose_float8` stores. `commit_smem` must
    follow.
    """
    if interpreting():
        target[...] = _in_two_parts(weights.T)
        return

    keys, rows = weights.shape

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(float8_operand(keys)), _TILE))
    def store(_, target, weights):
        # Of 16 keys a thread has key g = lane / 4 and g + 8, of two columns. Their places are
        # 4 (g / 2) + g % 2 and 2 behind: the threads of g and g ^ 1 have the 4 bytes of a word,
        # that of one column for each of them.
        lane = arith.andi(_thread(), _i32(31))
        key = arith.shrui(lane, _i32(2))
        is_odd = arith.cmpi(arith.CmpIPredicate.ne, arith.andi(key, _i32(1)), _i32(0))
        # Bytes of a word of both columns: column 0 of g and g + 8, then column 1.
        give = arith.select(is_odd, _i32(0x5410), _i32(0x7632))
        first, second = (
            arith.select(is_odd, _i32(odd), _i32(even))
            for even, odd in ((0x5140, 0x3524), (0x7160, 0x3726))
        )
        row = arith.addi(arith.muli(arith.andi(lane, _i32(3)), _i32(2)), arith.andi(key, _i32(1)))
        warp = arith.shrui(_thread(), _i32(5))
        there = _shared_address(
            target,
            (row, keys),
            (arith.xori(warp, arith.shrui(row, _i32(1))), 16),
            (arith.shrui(key, _i32(1)), 4),
        )
        pairs = {(group, half): pair for _, group, half, pair in _fragments(weights.registers)}
        for group in range(rows // 8):
            values = [_extract(pairs[group, half], e) for e in range(2) for half in range(2)]
            parts = _split_float8(values)
            text = (
                "{ .reg .b32 give, got, word;"
                " prmt.b32 give, $1, $2, $3;"
                " shfl.sync.bfly.b32 got, give, 4, 31, 0xffffffff;"
                " prmt.b32 word, $1, got, $4;"
                f" st.shared.b32 [$0+{8 * keys * group}], word;"
                " prmt.b32 word, $2, got, $5;"
                f" st.shared.b32 [$0+{8 * keys * group + keys * rows}], word; }}"
            )
            _asm(text, "r,r,r,r,r,r,~{memory}", [there, *parts, give, first, second])

    store(target, weights)


def _split_float8(values: list) -> list:
    """Two words of 4 e4m3 each, the first parts and the second, of 4 float32."""
    i32 = ir.IntegerType.get_signless(32)
    # float16 has all the bits of both parts.
    parts = llvm.inline_asm(
        llvm.StructType.get_literal([i32] * 2),
        values,
        "{ .reg .b16 low, high; .reg .b32 x<2>, first<2>, sixteen;"
        " mov.b32 sixteen, 0x4c004c00;"
        " cvt.rn.f16x2.f32 x0, $3, $2;"
        " cvt.rn.f16x2.f32 x1, $5, $4;"
        " cvt.rn.satfinite.e4m3x2.f16x2 low, x0;"
        " cvt.rn.satfinite.e4m3x2.f16x2 high, x1;"
        " cvt.rn.f16x2.e4m3x2 first0, low;"
        " cvt.rn.f16x2.e4m3x2 first1, high;"
        " mov.b32 $0, {low, high};"
        " sub.rn.f16x2 x0, x0, first0;"
        " sub.rn.f16x2 x1, x1, first1;"
        " mul.rn.f16x2 x0, x0, sixteen;"
        " mul.rn.f16x2 x1, x1, sixteen;"
        " cvt.rn.satfinite.e4m3x2.f16x2 low, x0;"
        " cvt.rn.satfinite.e4m3x2.f16x2 high, x1;"
        " mov.b32 $1, {low, high}; }",
        "=&r,=&r,f,f,f,f",
    )
    return [llvm.extractvalue(i32, parts, [part]) for part in range(2)]


# --- MLIR in few words ---------------------------------------------------------------------------


def _asm(text: str, constraints: str = "", operands=(), result=None):
    result = ir.Type.parse("!llvm.void") if result is None else result
    return llvm.inline_asm(result, list(operands), text, constraints, has_side_effects=True)


def _i32(value: int):
    i32 = ir.IntegerType.get_signless(32)
    return arith.constant(i32, ir.IntegerAttr.get(i32, value))


def _bit(number: int):
    """A word in which that bit alone is set."""
    return _i32(1 << number if number < 31 else -(1 << 31))


def _thread():
    """Index of this thread in its warpgroup.

    Read anew at each use: the compiler must not keep addresses made from it alive across the loop.
    """
    thread = _asm("mov.u32 $0, %tid.x;", "=r", result=ir.IntegerType.get_signless(32))
    return arith.andi(thread, _i32(WARPGROUP_THREADS - 1))


def _own_row():
    """The first of this thread's two rows of a (64, n) tile; the other is 8 below."""
    thread = _thread()
    row_of_warp = arith.shrui(arith.andi(thread, _i32(31)), _i32(2))
    return arith.addi(arith.muli(arith.shrui(thread, _i32(5)), _i32(16)), row_of_warp)


def _own_column():
    """The first of this thread's columns of a (64, n) tile; it has two of each 8."""
    return arith.muli(arith.andi(_thread(), _i32(3)), _i32(2))


def _clamped(row, half: int, last):
    """`row` of the upper or the lower half of the thread's rows, or `last` if that comes before."""
    return arith.minsi(arith.addi(row, _i32(8 * half)), last)


def _shared_address(ref, *terms):
    """Address in shared memory, index * unit bytes behind the ref's for each (index, unit)."""
    address = llvm.ptrtoint(ir.IntegerType.get_signless(32), mgpu_utils.memref_ptr(ref))
    for index, unit in terms:
        address = arith.addi(address, arith.muli(index, _i32(unit)))
    return address


def _own_address(ref):
    """Address in shared memory of the first 16 bytes that are this thread's."""
    return _shared_address(ref, (_thread(), 16))


def _base_address(ref):
    """Address in global memory."""
    return llvm.ptrtoint(ir.IntegerType.get_signless(64), mgpu_utils.memref_ptr(ref))


def _global_address(ref, offset):
    return arith.addi(_base_address(ref), arith.extui(ir.IntegerType.get_signless(64), offset))


def _bytes_to(index, unit: int):
    """index * unit, which need not fit into 32 bits."""
    i64 = ir.IntegerType.get_signless(64)
    return arith.muli(arith.extui(i64, index), arith.constant(i64, ir.IntegerAttr.get(i64, unit)))


def _pair_reader(ref, first):
    """What reads, of 8 columns from `first` + 8 * group on, the int32 of this thread's two."""
    i32 = ir.IntegerType.get_signless(32)
    own_column = _own_column()
    offset = arith.muli(arith.addi(first.registers[()], own_column), _i32(4))
    address = _global_address(ref, offset)

    def read(group: int) -> list:
        text = f"ld.global.nc.v2.b32 {{$0, $1}}, [$2+{32 * group}];"
        pair = _asm(text, "=r,=r,l", [address], llvm.StructType.get_literal([i32] * 2))
        return [llvm.extractvalue(i32, pair, [e]) for e in range(2)]

    return read


def _extract(pair, e: int):
    return vector.extract(pair, dynamic_position=[], static_position=[e])


def _insert(pair, value, e: int):
    return vector.insert(value, pair, dynamic_position=[], static_position=[e])


def _scalar(register):
    return _extract(register, 0) if isinstance(register.type, ir.VectorType) else register


def _like(array, registers):
    return type(array)(_registers=registers, _layout=array.layout, _is_signed=array.is_signed)


def _columns_like(columns, values):
    """One value a column in the layout of `columns`; values are of this thread's pairs."""
    registers = columns.registers.copy()
    pairs = zip(values[0::2], values[1::2], strict=True)
    for (index, register), (first, second) in zip(np.ndenumerate(registers), pairs, strict=True):
        registers[index] = _insert(_insert(register, first, 0), second, 1)
    return _like(columns, registers)


def _rows_like(rows, values):
    """One value a row in the layout of `rows`; values are of this thread's two rows."""
    registers = rows.registers.copy()
    for (index, register), value in zip(np.ndenumerate(registers), values, strict=True):
        is_vector = isinstance(register.type, ir.VectorType)
        registers[index] = _insert(register, value, 0) if is_vector else value
    return _like(rows, registers)


def _fragments(registers: np.ndarray):
    """Yields (index, column group, row half, register pair) of a (64, n) tile's registers."""
    *group_axes, half_axis = (axis for axis, size in enumerate(registers.shape) if size > 1)
    for index, pair in np.ndenumerate(registers):
        yield index, index[group_axes[0]] if group_axes else 0, index[half_axis], pair
