"""What a decoding kernel is built for, and its settings."""

import dataclasses

import numpy as np

from pallas_kernels.config import SM_COUNT

BLOCK_KV = 64  # keys a step
MOST_SPLITS = 128  # all of them are written out in the code of `combine.py`
_SPLIT_STEPS = 2  # at least, of a split where the heuristic decides
_SHARED_MEMORY = 233472  # bytes of an SM, of which a thread block leaves 1 KB to the system
_BESIDE_OPERANDS = 1024 + 1024 + 512  # bytes: that, what maxima and sums go through, and barriers
_MOST_STAGES = 8  # slots of the circular buffers of K and V


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """Settings of one width and one size of the cache's elements.

    Attributes:
      width: of a head.
      itemsize: bytes of an element of the cache.
      most_rows: of a tile.
      blocks_per_sm: how many thread blocks an SM has room for.
      busy_blocks: how many it needs to read its share of the memory's rate.
      lone_stages: slots of K and of V, at most, of thread blocks that have an SM each.
    """

    width: int
    itemsize: int
    most_rows: int
    blocks_per_sm: int
    busy_blocks: int
    lone_stages: int = _MOST_STAGES

    def stages(self, rows: int, thread_blocks: int) -> int:
        """Slots that shared memory holds beside `rows` rows."""
        block = BLOCK_KV * self.width * self.itemsize
        # Queries and weights of 16 bits, or in two parts of 8.
        others = 2 * rows * (self.width + BLOCK_KV)
        if self.itemsize == 1:
            others += block + 4 * rows  # V turned, and the units of rows
        room = _SHARED_MEMORY // self.blocks_per_sm - _BESIDE_OPERANDS - others
        most = self.lone_stages if thread_blocks <= SM_COUNT else _MOST_STAGES
        return min(most, room // (2 * block))


CONFIG = {
    (config.width, config.itemsize): config
    for config in (
        DecodeConfig(width=64, itemsize=2, most_rows=64, blocks_per_sm=2, busy_blocks=1),
        DecodeConfig(
            width=128, itemsize=2, most_rows=64, blocks_per_sm=2, busy_blocks=1, lone_stages=2
        ),
        DecodeConfig(
            width=256, itemsize=2, most_rows=32, blocks_per_sm=1, busy_blocks=1, lone_stages=2
        ),
        DecodeConfig(width=64, itemsize=1, most_rows=32, blocks_per_sm=3, busy_blocks=3),
        DecodeConfig(width=128, itemsize=1, most_rows=32, blocks_per_sm=2, busy_blocks=2),
        DecodeConfig(width=256, itemsize=1, most_rows=32, blocks_per_sm=2, busy_blocks=2),
    )
}
WIDTHS = tuple(width for width, itemsize in CONFIG if itemsize == 2)


@dataclasses.dataclass(frozen=True)
class DecodeProblem:
    """The static part of one call: what a kernel is built for.

    Attributes:
      batch: sequences.
      tokens: new tokens of each sequence, its last ones.
      heads, kv_heads: of queries and of keys.
      width: of a head.
      dtype: of queries.
      cache_dtype: of keys and values: dtype, or float8_e4m3fn.
      capacity: tokens of a sequence that the cache has room for.
      page_size: tokens of a page, a power of two from 16 on; None where the cache is contiguous.
      scale: multiplies query.key.
      window: None, or how many keys before its own position a token sees.
      soft_cap: None, or logits become soft_cap * tanh(logits / soft_cap).
    """

    batch: int
    tokens: int
    heads: int
    kv_heads: int
    width: int
    dtype: np.dtype
    cache_dtype: np.dtype
    capacity: int
    page_size: int | None
    scale: float
    window: int | None = None
    soft_cap: float | None = None

    @property
    def config(self) -> DecodeConfig:
        return CONFIG[self.width, self.cache_dtype.itemsize]

    @property
    def group(self) -> int:
        """Query heads that share one key head."""
        return self.heads // self.kv_heads

    @property
    def rows(self) -> int:
        """Of a key head of a sequence: token by token, each with the heads of the group."""
        return self.tokens * self.group

    @property
    def tile_rows(self) -> int:
        """Rows of a tile: the N of its products."""
        return min(self.config.most_rows, max(8, 1 << (self.rows - 1).bit_length()))

    @property
    def row_tiles(self) -> int:
        return -(-self.rows // self.tile_rows)

    @property
    def key_heads_of_all(self) -> int:
        return self.batch * self.kv_heads


def splits_for(problem: DecodeProblem) -> int:
    """Into how many parts to split the keys of each sequence, so that the GPU is full."""
    config = problem.config
    tiles = problem.key_heads_of_all * problem.row_tiles
    # Copies of pages smaller than a block take longer: one thread block an SM is not enough.
    small_pages = problem.page_size is not None and problem.page_size < BLOCK_KV
    busy_blocks = config.blocks_per_sm if small_pages else config.busy_blocks
    if tiles >= 0.8 * SM_COUNT * busy_blocks:
        return 1
    blocks = -(-problem.capacity // BLOCK_KV)
    most = max(1, SM_COUNT * busy_blocks // tiles)
    too_few = most * tiles < 0.8 * SM_COUNT * busy_blocks
    if too_few and (most + 1) * tiles <= SM_COUNT * config.blocks_per_sm:
        most += 1
    most = min(most, MOST_SPLITS)
    share = max(_SPLIT_STEPS, -(-blocks // most))
    return -(-blocks // share)
