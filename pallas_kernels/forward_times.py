"""Which settings of the forward end earliest, where tiles of one size or another fill SMs better.

A model: a thread block takes as long as its tiles, a tile so long beside its steps, and a launch so
long beside its thread blocks. Times are fitted to 44 shapes of width 64 (notes/forward-tile-sizes.md).
"""

import dataclasses
import functools
from collections.abc import Sequence

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

    def time(self, queries: tuple[int, int], keys: int, causal: bool) -> float:
        """How long a forward takes; arguments are those of `defaults.default`."""
        length, heads = queries
        ends = np.minimum(np.arange(0, length, self.config.block_q) + self.config.block_q, length)
        seen = np.minimum(keys, ends + max(0, keys - length)) if causal else np.full(len(ends), keys)
        steps = -(-seen // self.config.block_kv)
        of_tiles = self.step * steps + self.tile + (self.causal_tile if causal else 0.0)
        if heads * len(of_tiles) > _MANY_TILES * SM_COUNT:
            return self.launch + heads * of_tiles.sum() / SM_COUNT
        longest_first = np.repeat(-np.sort(-of_tiles), heads)
        return self.launch + scheduler.time_of_deal(longest_first, SM_COUNT)


@functools.lru_cache
def fastest(
    timed: Sequence[Timed], queries: tuple[int, int], keys: int, causal: bool
) -> ForwardConfig:
    """The settings that end earliest."""
    return min(timed, key=lambda x: x.time(queries, keys, causal)).config
