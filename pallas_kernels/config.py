"""Tile sizes, stages and warpgroups of each kernel, as data with the reason beside each row."""

import dataclasses

import jax
import numpy as np

SM_COUNT = 132  # H100 SXM and H200
L2_SECTION_BYTES = 24 << 20  # what K and V of the heads in work at a time may take of the 50 MB


@dataclasses.dataclass(frozen=True)
class Problem:
    """The static part of one attention call: what a kernel is built for.

    Query is `[batch, query_length, heads, width]`, key and value are
    `[batch, key_length, kv_heads, width]`. Query i sees keys j <= i + query_offset if causal, else
    all.
    """

    batch: int
    query_length: int
    key_length: int
    heads: int
    kv_heads: int
    width: int
    dtype: np.dtype
    scale: float
    is_causal: bool
    query_offset: int = 0

    @property
    def group(self) -> int:
        """Query heads that share one key head."""
        return self.heads // self.kv_heads

    def query(self) -> jax.ShapeDtypeStruct:
        shape = (self.batch, self.query_length, self.heads, self.width)
        return jax.ShapeDtypeStruct(shape, self.dtype)

    def key(self) -> jax.ShapeDtypeStruct:
        shape = (self.batch, self.key_length, self.kv_heads, self.width)
        return jax.ShapeDtypeStruct(shape, self.dtype)


@dataclasses.dataclass(frozen=True)
class ForwardConfig:
    """Settings of `forward.py`.

    Attributes:
      consumers: warpgroups that compute, each on 64 query rows.
      block_kv: keys a step; a multiple of 64, as the second product needs.
      stages: slots of the circular buffers of K and of V.
      query_buffers: 2 to start the next tile under the end of this one, 1 where memory is short.
      registers: registers a thread of a consumer and of the producer.
      section_bytes: heads whose K and V take about this much are worked on together.
    """

    consumers: int
    block_kv: int
    stages: int
    query_buffers: int
    registers: tuple[int, int]
    section_bytes: int = L2_SECTION_BYTES

    def __post_init__(self):
        if self.consumers < 1:
            raise ValueError(f"consumers: got {self.consumers}, needs at least 1")
        if self.block_kv < 64 or self.block_kv % 64:
            raise ValueError(f"block_kv: got {self.block_kv}, needs a multiple of 64")
        if self.stages < 2:
            raise ValueError(f"stages: got {self.stages}, needs at least 2")
        if self.query_buffers not in (1, 2):
            raise ValueError(f"query_buffers: got {self.query_buffers}, needs 1 or 2")

    @property
    def block_q(self) -> int:
        return 64 * self.consumers


@dataclasses.dataclass(frozen=True)
class BackwardConfig:
    """Settings of `backward.py`.

    Attributes:
      block_q: query rows a step.
      stages: slots of the circular buffers of Q and of dO.
      registers: registers a thread of a consumer and of the producer.
    """

    block_q: int
    stages: tuple[int, int]
    registers: tuple[int, int] = (240, 24)

    def __post_init__(self):
        if self.block_q < 64 or self.block_q % 64:
            raise ValueError(f"block_q: got {self.block_q}, needs a multiple of 64")
        if min(self.stages) < 1:
            raise ValueError(f"stages: got {self.stages}, needs at least 1 of each")


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of all kernels of one attention call."""

    forward: ForwardConfig
    backward: BackwardConfig


# Width -> settings.
FORWARD = {
    # Three consumers: the exponentials need the third warpgroup to hide behind products.
    64: ForwardConfig(consumers=3, block_kv=128, stages=2, query_buffers=2, registers=(160, 32)),
    128: ForwardConfig(consumers=2, block_kv=128, stages=2, query_buffers=2, registers=(240, 24)),
    # Two query tiles of 64 KB do not fit beside K and V.
    256: ForwardConfig(consumers=2, block_kv=64, stages=2, query_buffers=1, registers=(240, 24)),
}

BACKWARD = {
    64: BackwardConfig(block_q=128, stages=(2, 2)),
    128: BackwardConfig(block_q=64, stages=(2, 2)),
    256: BackwardConfig(block_q=64, stages=(2, 1)),
}

WIDTHS = tuple(FORWARD)


def default(width: int) -> Config:
    return Config(FORWARD[width], BACKWARD[width])
