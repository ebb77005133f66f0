"""What can be set of a kernel: tile sizes, stages, registers. `defaults.py` sets it."""

import dataclasses
from typing import NamedTuple

from pallas_kernels.problem import need

SM_COUNT = 132  # H100 SXM and H200
ROWS = 64  # query rows of a consumer: the M of a wgmma
BACKWARD_CONSUMERS = 2  # how they share a tile is in the backward*.py
DQ_TILE = 64  # dQ is accumulated in tiles of 64 rows by up to 64 columns
# What the heads in work at a time may take of the 50 MB of L2: K and V where a thread block owns
# queries, and Q, dO and dQ where it owns keys.
FORWARD_SECTION_BYTES = 12 << 20
BACKWARD_SECTION_BYTES = 12 << 20


def _check_multiple_of_64(name: str, got: int) -> None:
    need(got > 0 and got % 64 == 0, name, got, "a multiple of 64")


def _check_stages(stages: tuple[int, int]) -> None:
    two = len(stages) == 2 and min(stages) >= 1
    need(two, "stages", stages, "two numbers, at least 1 each")


def _check_thread_blocks(most: int | None) -> None:
    need(most is None or most >= 1, "thread_blocks", most, "None, or at least 1")


def _check_shares(shares: "int | Shares | None") -> None:
    least = min(shares.heads, shares.parts) if isinstance(shares, Shares) else shares
    need(least is None or least >= 1, "shares", shares, "at least 1, or None")


def _check_registers(registers: tuple[int, int], consumers: int) -> None:
    """The warpgroups of a block share what it was launched with: asking for more waits forever."""
    need(len(registers) == 2, "registers", registers, "two numbers, of consumers and producer")
    for count in registers:
        need(
            24 <= count <= 256 and count % 8 == 0, "registers", count, "a multiple of 8, 24 to 256"
        )
    warpgroups = consumers + 1
    launched = 65536 // (128 * warpgroups) // 8 * 8 * warpgroups
    wanted = consumers * registers[0] + registers[1]
    need(wanted <= launched, "registers", f"{wanted} for all warpgroups", f"at most {launched}")


@dataclasses.dataclass(frozen=True)
class ForwardConfig:
    """Settings of `forward.py`.

    Attributes:
      consumers: warpgroups that compute, each on 64 query rows; several take turns.
      block_kv: keys a step; a multiple of 64, as the second product needs.
      stages: slots of the circular buffers of K and of V.
      query_buffers: 2 to start the next tile under the end of this one, 1 where memory is short.
      registers: registers a thread of a consumer and of the producer.
      staged_columns: of the output at a time, at most; a multiple of 32.
      section_bytes: heads whose K and V take about this much are worked on together.
      thread_blocks: how many to launch at most; as many as there are SMs.
      elements_early: load mask and bias under the product that makes the logits, for which there
        must be registers, not after it and the product that is open beside it.
      brings_bias: TMA brings tiles of a bias beside K, if it can, for which there must be room.
      early_values: wait for V of a step before the output of the step before is there, not after.
        ptxas moves nothing over such a wait, so that exponentials are computed under that product.
      products_first: a consumer's turn lasts until both of its products have ended, and only then
        does it compute weights; else until they are issued, and it computes under the second.
      shares: in how many shares the keys of a tile are dealt out, or fewer where there are not so
        many. None for what keeps all SMs at work (`forward_shares.dealt_out`).
    """

    consumers: int
    block_kv: int
    stages: int
    query_buffers: int
    registers: tuple[int, int]
    staged_columns: int = 128
    section_bytes: int = FORWARD_SECTION_BYTES
    thread_blocks: int = SM_COUNT
    elements_early: bool = False
    brings_bias: bool = False
    early_values: bool = False
    products_first: bool = False
    shares: int | None = None

    def __post_init__(self):
        need(self.shares is None or self.shares >= 1, "shares", self.shares, "at least 1, or None")
        need(self.consumers >= 1, "consumers", self.consumers, "at least 1")
        _check_multiple_of_64("block_kv", self.block_kv)
        need(self.stages >= 2, "stages", self.stages, "at least 2")
        need(self.query_buffers in (1, 2), "query_buffers", self.query_buffers, "1 or 2")
        holds = self.staged_columns > 0 and self.staged_columns % 32 == 0
        need(holds, "staged_columns", self.staged_columns, "a multiple of 32")
        need(self.section_bytes >= 0, "section_bytes", self.section_bytes, "at least 0")
        need(self.thread_blocks >= 1, "thread_blocks", self.thread_blocks, "at least 1")
        _check_registers(self.registers, self.consumers)

    @property
    def block_q(self) -> int:
        return ROWS * self.consumers

    def whole_tiles(self, query_length: int) -> int:
        """Rows of the tiles that hold so many queries."""
        return -(-query_length // self.block_q) * self.block_q


@dataclasses.dataclass(frozen=True)
class ForwardFP8Config(ForwardConfig):
    """Settings of `forward_fp8.py`.

    Attributes:
      value_stages: slots of the circular buffer of turned V.
      promotes: add up the output in float32, not with the 14 bits of Hopper's FP8 products.
      keeps_row_scales: in registers for all steps of a tile, instead of loading them in each.
    """

    value_stages: int = 2
    promotes: bool = False
    keeps_row_scales: bool = False

    def __post_init__(self):
        super().__post_init__()
        need(self.shares in (None, 1), "shares", self.shares, "None, as FP8 has none")
        need(self.block_kv <= 256, "block_kv", self.block_kv, "at most 256, what TMA loads")
        need(self.value_stages >= 2, "value_stages", self.value_stages, "at least 2")


class Last(NamedTuple):
    """The last tiles of keys of the last key heads, of all batch entries; how many of each."""

    kv_heads: int
    tiles: int


class Shares(NamedTuple):
    """In how many shares the queries of a tile are dealt out, each with dK and dV of its own.

    Attributes:
      heads: of the query heads of a group.
      parts: of the steps that the longest tile takes for these; others are cut into as long ones.
      last: None for all tiles, or those that are in parts. Others have one share, and give dK and
        dV as users get them.
    """

    heads: int = 1
    parts: int = 1
    last: Last | None = None

    @property
    def total(self) -> int:
        return self.heads * self.parts


@dataclasses.dataclass(frozen=True)
class BackwardConfig:
    """Settings of `backward.py`, for widths up to 128.

    Attributes:
      block_q: query rows a step.
      stages: slots of the circular buffers of Q and of dO.
      registers: registers a thread of a consumer and of the producer.
      thread_blocks: how many to launch at most; None for as many as there are SMs, or one a tile
        where tiles are long and are not drawn (`scheduler.thread_blocks`).
      shares: in how many shares the queries of a tile of keys are dealt out, or fewer where so many
        do not come out even; or which. None for what keeps all SMs at work
        (`key_tiles_shares.dealt_out`).
    """

    block_q: int
    stages: int
    registers: tuple[int, int] = (240, 24)
    thread_blocks: int | None = None
    shares: int | Shares | None = None

    def __post_init__(self):
        _check_shares(self.shares)
        _check_multiple_of_64("block_q", self.block_q)
        # Named barriers, and shared memory, are used up with 2.
        need(self.stages in (1, 2), "stages", self.stages, "1 or 2")
        _check_thread_blocks(self.thread_blocks)
        _check_registers(self.registers, BACKWARD_CONSUMERS)


@dataclasses.dataclass(frozen=True)
class BackwardKeyConfig:
    """Settings of `backward_key.py`, which makes dK and dV at widths above 128.

    Attributes:
      registers: registers a thread of a consumer and of the producer.
      thread_blocks: how many to launch at most; None for as many as there are SMs, or one a tile
        where tiles are long (`scheduler.thread_blocks`).
      d_logits_bytes: of global memory, for the gradients of the logits of some heads at a time,
        from which `backward_query_product.py` makes dQ. Where a key head needs more, and where
        what is visible is known at run time only, `backward_query.py` does it without. Two heads
        may take a quarter more. The default holds two causal heads of 16,384 rows.
      shares: as for `BackwardConfig`.
    """

    registers: tuple[int, int] = (240, 24)
    thread_blocks: int | None = None
    d_logits_bytes: int = 528 << 20
    shares: int | Shares | None = None

    def __post_init__(self):
        _check_shares(self.shares)
        _check_thread_blocks(self.thread_blocks)
        _check_registers(self.registers, BACKWARD_CONSUMERS)
        need(self.d_logits_bytes >= 0, "d_logits_bytes", self.d_logits_bytes, "at least 0")

    @property
    def block_q(self) -> int:
        return 64

    @property
    def block_kv(self) -> int:
        return 64


@dataclasses.dataclass(frozen=True)
class BackwardQueryConfig:
    """Settings of `backward_query.py`.

    Attributes:
      block_kv: keys a step; a multiple of 64, as the third product needs.
      stages: slots of the circular buffers of K and of V.
      registers: registers a thread of a consumer and of the producer.
    """

    block_kv: int
    stages: tuple[int, int]
    registers: tuple[int, int] = (240, 24)

    def __post_init__(self):
        _check_multiple_of_64("block_kv", self.block_kv)
        _check_stages(self.stages)
        _check_registers(self.registers, BACKWARD_CONSUMERS)

    @property
    def block_q(self) -> int:
        return 64 * BACKWARD_CONSUMERS


@dataclasses.dataclass(frozen=True)
class BiasGradientConfig:
    """Settings of `bias_gradient.py`.

    Attributes:
      block_kv: keys a step; a multiple of 64.
      stages: slots of the circular buffers.
      thread_blocks: how many to launch at most; as many as there are SMs.
    """

    block_kv: int
    stages: int
    thread_blocks: int = SM_COUNT

    def __post_init__(self):
        _check_multiple_of_64("block_kv", self.block_kv)
        need(self.stages >= 1, "stages", self.stages, "at least 1")
        need(self.thread_blocks >= 1, "thread_blocks", self.thread_blocks, "at least 1")


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of all kernels of one attention call.

    Attributes:
      backward: where key or value is wider than 128 a `BackwardKeyConfig`.
      backward_query: for deterministic gradients, and such widths; None for those of
        `defaults.BACKWARD_QUERY`.
      forward_fp8: for FP8; None for what `defaults.default_fp8` gives.
    """

    forward: ForwardConfig
    backward: BackwardConfig | BackwardKeyConfig
    backward_query: BackwardQueryConfig | None = None
    forward_fp8: ForwardFP8Config | None = None


def check_backward(config: BackwardConfig | BackwardKeyConfig, widest: int) -> None:
    """Raises an error where these settings are of other widths.

    Args:
      config: settings of the backward.
      widest: `Problem.widest`.
    """
    if isinstance(config, BackwardKeyConfig) != (widest > 128):
        raise TypeError(
            f"config: got a {type(config).__name__} at width {widest}, needs a"
            " BackwardKeyConfig at widths above 128, a BackwardConfig at others"
        )
    if isinstance(config, BackwardConfig):
        # A tile of dQ for each consumer.
        block_q = BACKWARD_CONSUMERS * DQ_TILE**2 // widest
        name, needs = "block_q", f"{block_q} at width {widest}"
        need(config.block_q == block_q, name, f"{config.block_q} at width {widest}", needs)
