"""Named barriers, and what orders accesses to shared memory."""

import dataclasses
from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_kernels.interpret import interpreting
from pallas_kernels.ptx.mlir import ROWS, WARPGROUP_THREADS, asm, result_type, scalar

# For kernels that order every hand-over through shared memory themselves: Mosaic's own barriers
# round each store would stop their warpgroups.
HAND_ORDERED = plgpu.CompilerParams(
    approx_math=True,
    unsafe_no_auto_barriers=True,
    lowering_semantics=plgpu.LoweringSemantics.Lane,
)


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
            asm(text, constraints, [value.registers[()] for value in values])

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
            flags[warpgroup] = (seen != 0).any().astype(jnp.int32)
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
        return (seen != 0).any()
    return _vote(seen, warpgroup + 1, WARPGROUP_THREADS)


def _vote(seen: jax.Array, barrier: jax.Array, threads: int) -> jax.Array:
    shape = result_type((), jnp.int32, layout=plgpu.Layout.WG_SPLAT)

    @plgpu.inline_mgpu(arg_types=(ROWS, plgpu.Layout.WG_SPLAT), return_type=shape)
    def vote(_, seen, barrier):
        i32 = ir.IntegerType.get_signless(32)
        low, high = (scalar(r) for r in seen.registers.flat)
        text = (
            "{ .reg .pred p; setp.ne.s32 p, $1, 0;"
            f" barrier.cta.red.or.pred p, $2, {threads}, p;"
            " vote.sync.any.pred p, p, 0xffffffff; selp.s32 $0, 1, 0, p; }"
        )
        operands = [arith.ori(low, high), barrier.registers[()]]
        value = asm(text, "=r,r,r,~{memory}", operands, i32)
        return mgpu.FragmentedArray.splat(value, (), is_signed=True)

    return vote(seen, barrier) > 0


def fence_async_shared() -> None:
    """Orders this thread's accesses to shared memory before later ones by wgmma and TMA.

    Stores before they are read, and loads before TMA overwrites what was read.
    """
    if interpreting():
        plgpu.commit_smem()
        return

    @plgpu.inline_mgpu()
    def fence(_):
        asm("fence.proxy.async.shared::cta;", "~{memory}")

    fence()


def commit_smem(*, anew: bool) -> None:
    """`plgpu.commit_smem`; anew: with the number of its barrier in no register till then."""
    if interpreting() or not anew:
        plgpu.commit_smem()
        return

    @plgpu.inline_mgpu()
    def commit(_):
        # The barrier that Mosaic GPU has for this warpgroup.
        asm(
            "{ .reg .b32 own; fence.proxy.async.shared::cta;"
            f" mov.u32 own, %tid.x; shr.u32 own, own, {WARPGROUP_THREADS.bit_length() - 1};"
            f" add.u32 own, own, 1; bar.sync own, {WARPGROUP_THREADS}; }}",
            "~{memory}",
        )

    commit()
