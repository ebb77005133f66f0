"""The pipeline of a Hopper kernel: warpgroups, each with a role, and what they hand to one another.

producer   waits until a slot is free, and has TMA fill it
consumer   waits until a slot is full, issues the product that reads it, gives it back
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.interpret import interpreting
from pallas_kernels.ptx.barriers import NamedBarriers
from pallas_kernels.ptx.operands import OPERAND


@dataclasses.dataclass(frozen=True)
class Ring:
    """Slots of shared memory that a producer fills and consumers empty, round and round.

    Both count steps, or of queries tiles, from 0 on, through all tiles of a thread block. By these
    `fill` and `read` go; others by slots, which some keep, and some make anew where registers are
    short.

    Attributes:
      slots: buffers of one or more operands, `(count, ...)` each.
      full: an mbarrier a slot, completed by TMA.
      free: a named barrier a slot: the consumers arrive, the producer waits.
      copies: of each operand what has TMA fill a slot, called with source, slot and mbarrier; none
        for one tile of each.
    """

    slots: tuple[Any, ...]
    full: Any
    free: NamedBarriers
    copies: tuple[Callable, ...] = ()

    @staticmethod
    def types(free: NamedBarriers, *tiles: tuple[int, int], dtype: np.dtype) -> dict[str, Any]:
        """Of shared memory and barriers, for a ring of such tiles: arguments of `of`."""
        slots = tuple(plgpu.SMEM((free.count, *x), dtype, transforms=OPERAND) for x in tiles)
        full = plgpu.Barrier(num_arrivals=len(tiles), num_barriers=free.count)
        return dict(slots=slots, full=full, **_twins(free))

    @classmethod
    def of(cls, free: NamedBarriers, *, slots, full, copies=(), twins=None) -> "Ring":
        return cls(slots, full, dataclasses.replace(free, twins=twins), copies)

    def slot(self, step):
        return lax.rem(step, jnp.int32(self.free.count))

    # --- the producer ---

    def fill(self, step, *sources) -> None:
        """Has TMA fill the slot of a step with tiles of global memory, when it is free."""
        slot = self.slot(step)
        self.await_free(step, slot)
        self.load(slot, *sources)

    def await_free(self, step, slot=None) -> None:
        """Waits for the slot of a step, made anew if it is not given."""
        is_free = lambda: self.free.wait(self.slot(step) if slot is None else slot)
        pl.when(step >= self.free.count)(is_free)

    def load(self, slot, *sources) -> None:
        """Has TMA fill a slot that is free: its number, or a function that makes that anew."""
        number = slot if callable(slot) else lambda: slot
        copies = self.copies or (plgpu.copy_gmem_to_smem,) * len(self.slots)
        for copy, source, buffer in zip(copies, sources, self.slots, strict=True):
            copy(source, buffer.at[number()], self.full.at[number()])

    # --- the consumers ---

    def read(self, step) -> list[Any]:
        """What is in the slot of a step, once it is full."""
        slot = self.slot(step)
        self.await_full(slot)
        return self.at(slot)

    def await_full(self, slot) -> None:
        plgpu.barrier_wait(self.full.at[slot])

    def at(self, slot, *part) -> list[Any]:
        """What is in a slot, or a part of it."""
        return [buffer.at[slot, *part] for buffer in self.slots]

    def give_back(self, slot) -> None:
        """By each consumer, after the wait for the product that read the slot."""
        self.free.arrive(slot)


@dataclasses.dataclass(frozen=True)
class Turns:
    """Consumers issue their products one after the other, the softmax of one under another's.

    Attributes:
      barriers: a named barrier a consumer.
      own: number of this one.
    """

    barriers: NamedBarriers
    own: Any

    @staticmethod
    def types(barriers: NamedBarriers) -> dict[str, Any]:
        """Arguments of `of`."""
        return _twins(barriers)

    @classmethod
    def of(cls, barriers: NamedBarriers, own, *, twins=None) -> "Turns":
        """With the first turn at warpgroup 0."""
        turns = cls(dataclasses.replace(barriers, twins=twins), own)
        turns.begin()
        return turns

    def begin(self) -> None:
        """Warpgroup 0 has the first turn; one that is alone has them all."""
        pl.when(self.own == self.barriers.count - 1)(self.pass_on)

    def take(self) -> None:
        if self.barriers.count > 1:
            self.barriers.wait(self.own)

    def pass_on(self) -> None:
        if self.barriers.count > 1:
            self.barriers.arrive(lax.rem(self.own + 1, jnp.int32(self.barriers.count)))


def _twins(barriers: NamedBarriers) -> dict[str, Any]:
    return dict(twins=barriers.scratch()) if interpreting() else {}


def warp_specialised(
    warpgroup: Any,
    consumers: int,
    registers: tuple[int, int],
    consume: Callable[[], None],
    produce: Callable[[], None],
) -> None:
    """Runs `consume` in the first warpgroups, `produce` in the one behind them.

    Args:
      warpgroup: number of this one.
      consumers: how many warpgroups consume.
      registers: of a thread of a consumer, and of the producer: multiples of 8.
      consume, produce: the roles.
    """

    @pl.when(warpgroup < consumers)
    def _():
        plgpu.set_max_registers(registers[0], action="increase")
        consume()

    @pl.when(warpgroup == consumers)
    def _():
        plgpu.set_max_registers(registers[1], action="decrease")
        produce()


def walk(schedule, run_tile: Callable[[Any, Any, Any], Any]) -> None:
    """Runs `run_tile(index, step, number)` for each tile of this thread block's list.

    Args:
      schedule: a ref of what `scheduler.deal` gives.
      run_tile: of the index in the list, the steps before, and the number of the tile, returns the
        steps by its end.
    """
    own = lax.axis_index("block")
    run = lambda index, step: run_tile(index, step, schedule[own, 1 + index])
    lax.fori_loop(jnp.int32(0), schedule[own, 0], run, jnp.int32(0))


_PARAMS = plgpu.CompilerParams(
    approx_math=True,
    lowering_semantics=plgpu.LoweringSemantics.Lane,
    reduction_scratch_bytes=0,  # reductions here are of rows, which a quad of threads has
)


def kernel(
    body: Callable,
    out_type: Any,
    thread_blocks: int,
    consumers: int,
    scratch: dict[str, Any],
    params: plgpu.CompilerParams = _PARAMS,
) -> Callable:
    """A function that runs `body(*operands, result, **scratch)` in each thread block.

    Args:
      body: asks `lax.axis_index` for "block" and "warpgroup".
      out_type: shape and dtype of the result, or of results; () where refs take them.
      thread_blocks, consumers: how many; and a producer.
      scratch: types of shared memory and barriers, by name.
      params: of Mosaic GPU; `HAND_ORDERED` where it is to add no barriers.
    """
    return plgpu.kernel(
        body,
        out_type=out_type,
        grid=(thread_blocks,),
        grid_names=("block",),
        num_threads=consumers + 1,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=params,
    )
