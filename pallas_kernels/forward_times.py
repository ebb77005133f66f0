"""Which settings of the forward end earliest, where tiles of one size or another fill SMs better.

A model: a thread block takes as long as its tiles, a tile so long beside its steps, and a launch so
long beside its thread blocks. Times are fitted to shapes of notes/forward-tile-sizes.md and others.
"""

import dataclasses
import functools

import numpy as np

from pallas_kernels import scheduler, seen_blocks
from pallas_kernels.config import SM_COUNT, ForwardConfig
from pallas_kernels.problem import Problem

_MANY_TILES = 16  # of an SM, from which on the deal is even


@dataclasses.dataclass(frozen=True)
class Timed:
    """Settings, and how long they take, in microseconds.

    Attributes:
      launch: once.
      tile: each, beside its steps.
      edge: and for each edge of what it sees, of a causal mask or a window.
      step: of one key block.
    """

    config: ForwardConfig
    launch: float
    tile: float
    edge: float
    step: float

    def time(self, problem: Problem) -> float:
        """How long a forward takes whose bounds are static."""
        block_q, block_kv = self.config.block_q, self.config.block_kv
        shift = seen_blocks.shift(problem, block_q, block_kv)
        steps = seen_blocks.key_blocks(problem, block_q, block_kv, shift)[:, 0]
        edges = (problem.lowest is not None) + (problem.highest is not None)
        times = self.tile + self.edge * edges + self.step * np.sort(steps)[::-1]
        heads = problem.batch * problem.heads
        if heads * len(times) > _MANY_TILES * SM_COUNT:
            return self.launch + heads * float(times.sum()) / SM_COUNT
        return self.launch + scheduler.time_of_deal(np.repeat(times, heads), SM_COUNT)


@functools.lru_cache
def fastest(timed: tuple[Timed, ...], problem: Problem) -> ForwardConfig:
    """The settings that end earliest."""
    return min(timed, key=lambda x: x.time(problem)).config
