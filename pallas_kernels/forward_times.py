"""Which settings of the forward end earliest, where tiles of one size or another fill SMs better.

A model: a thread block takes as long as its tiles, a tile so long beside its steps, and a launch so
long beside its thread blocks. Times are fitted to 41 shapes (notes/forward-tile-sizes.md).
"""

import dataclasses
import functools

import numpy as np

from pallas_kernels import scheduler
from pallas_kernels.config import SM_COUNT, ForwardConfig

_MANY_TILES = 16  # of an SM, from which on the deal is even


@dataclasses.dataclass(frozen=True)
class Timed:
    """Settings, and how long they take, in microseconds.

    Attributes:
      launch: once.
      tile: each, beside its steps.
      causal_tile: and under a causal mask.
      step: of one key block.
    """

    config: ForwardConfig
    launch: float
    tile: float
    causal_tile: float
    step: float

    def time(self, queries: tuple[int, int], keys: int, highest: int | None) -> float:
        """How long a forward takes; arguments are those of `defaults.default`."""
        length, heads = queries
        block_q, block_kv = self.config.block_q, self.config.block_kv
        tiles = -(-length // block_q)
        if highest is None:
            rounds = -(-tiles * heads // SM_COUNT)
            return self.launch + rounds * (self.tile + self.step * -(-keys // block_kv))
        seen = np.clip(np.arange(tiles, 0, -1) * block_q + highest, 1, keys)
        longest_first = self.tile + self.causal_tile + self.step * -(-seen // block_kv)
        if heads * tiles > _MANY_TILES * SM_COUNT:
            return self.launch + heads * float(longest_first.sum()) / SM_COUNT
        return self.launch + scheduler.time_of_deal(np.repeat(longest_first, heads), SM_COUNT)


@functools.lru_cache
def fastest(
    timed: tuple[Timed, ...], queries: tuple[int, int], keys: int, highest: int | None
) -> ForwardConfig:
    """The settings that end earliest."""
    return min(timed, key=lambda x: x.time(queries, keys, highest)).config
