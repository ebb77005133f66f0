"""Tile sizes, stages and warpgroups of each kernel, as data with the reason beside each row."""

import dataclasses
import math

from pallas_kernels.problem import (
    box_width,
    need,
    whole_tiles,
)

SM_COUNT = 132  # H100 SXM and H200
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


def _check_shares(shares: int | None) -> None:
    need(shares is None or shares >= 1, "shares", shares, "at least 1, or None")


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
      consumers: warpgroups that compute, each on 64 query rows.
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

    def __post_init__(self):
        need(self.consumers >= 2, "consumers", self.consumers, "at least 2, to take turns")
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
        return 64 * self.consumers

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
        need(self.block_kv <= 256, "block_kv", self.block_kv, "at most 256, what TMA loads")
        need(self.value_stages >= 2, "value_stages", self.value_stages, "at least 2")


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
        do not come out even: of the query heads of a group, then of the queries of each. None for
        what keeps all SMs at work (`key_tiles_shares.dealt_out`).
    """

    block_q: int
    stages: int
    registers: tuple[int, int] = (240, 24)
    thread_blocks: int | None = None
    shares: int | None = None

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
        what is visible is known at run time only, `backward_query.py` does it without. The default
        holds two causal heads of 16,384 rows.
      shares: as for `BackwardConfig`.
    """

    registers: tuple[int, int] = (240, 24)
    thread_blocks: int | None = None
    d_logits_bytes: int = 528 << 20
    shares: int | None = None

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
      backward_query: for deterministic gradients, and such widths; None for `BACKWARD_QUERY`'s.
      forward_fp8: for FP8; None for `FORWARD_FP8`'s.
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


_TWO_CONSUMERS = ForwardConfig(
    consumers=2, block_kv=128, stages=2, query_buffers=2, registers=(240, 24)
)

# Width of the wider of key and value, in whole tiles -> settings. What others gave is in notes.
FORWARD = {
    # Three consumers, as a third softmax under two others' products keeps the exponentials going.
    64: ForwardConfig(
        consumers=3,
        block_kv=128,
        stages=3,
        query_buffers=2,
        registers=(160, 32),
        products_first=True,
    ),
    128: dataclasses.replace(_TWO_CONSUMERS, early_values=True),
    # 128 keys and two stages would take 288 KB of shared memory.
    192: ForwardConfig(consumers=2, block_kv=64, stages=2, query_buffers=2, registers=(240, 24)),
    # Two query tiles of 64 KB do not fit beside K and V, nor 128 keys in registers.
    256: ForwardConfig(consumers=2, block_kv=64, stages=2, query_buffers=1, registers=(240, 24)),
}

# Up to 128 columns, but neither 64 nor 128. TFLOP/s*, H96 causal s4096: 652, with early values 634.
FORWARD_PARTIAL = _TWO_CONSUMERS

# The same, of up to 96 columns that are whole boxes, and of columns in boxes, which TMA is slow to
# load where rows do not begin with a sector of 32 bytes. TFLOP/s*, b4 s4096 16 heads full and
# causal, and with two consumers: H80 627 and 578 (558 and 519), H96 711 and 654 (677 and 652); H72
# 460 and 431 (432 and 394), H88 542 and 508 (441 and 420), H112 697 and 625 (668 and 632).
FORWARD_96 = ForwardConfig(consumers=3, block_kv=64, stages=3, query_buffers=2, registers=(160, 32))
FORWARD_BOXES = dataclasses.replace(FORWARD_96, stages=2)

# Width 64, windows so narrow that most of what 192 rows by 128 keys visit is not seen. TFLOP/s*
# with these, and with the above: 148 and 123 at 128 keys, 257 and 186 at 256, 351 and 330 at 512,
# 424 and 436 at 1024. And segment ids, whose comparison would spill 16 bytes of the third consumer,
# and a soft cap, which would 8 and more.
NARROW_WINDOW = 768
FORWARD_NARROW = _TWO_CONSUMERS

# Three consumers are so many times as fast as two where they have rows enough. us*, two and three,
# by how many times the rows tiles of three have: b64 s197 52.6 and 62.9 (1.5), b16 s640 causal 47.0
# and 51.7 (1.2), b32 s577 125 and 124 (1.2), b32 s1024 289 and 264 (1.125).
_THREE_BY_TWO = 1.2

# The same in FP8, whose operands have 64, 128 or 256 columns.
FORWARD_FP8 = {
    64: ForwardFP8Config(
        consumers=3,
        block_kv=128,
        stages=2,
        query_buffers=2,
        registers=(160, 32),
        products_first=True,
        keeps_row_scales=True,
    ),
    128: ForwardFP8Config(
        consumers=3, block_kv=128, stages=2, query_buffers=2, registers=(160, 32)
    ),
    256: ForwardFP8Config(
        consumers=2,
        block_kv=128,
        stages=2,
        query_buffers=1,
        registers=(232, 40),
        staged_columns=128,
        keeps_row_scales=True,
    ),
}

# With segment ids, without which 4 bytes spill at width 256 and 100 at 128, or where fewer than 128
# rows of keys or values share a scale.
FORWARD_FP8_SEGMENTED = FORWARD_FP8 | {
    128: dataclasses.replace(FORWARD_FP8[128], consumers=2, registers=(224, 56)),
    256: dataclasses.replace(FORWARD_FP8[256], block_kv=64),
}

# With sums in float32. At width 256 they do not fit beside the output.
FORWARD_FP8_PROMOTING = {
    64: dataclasses.replace(
        FORWARD_FP8[64], consumers=2, registers=(224, 56), products_first=False, promotes=True
    ),
    128: dataclasses.replace(FORWARD_FP8_SEGMENTED[128], block_kv=64, promotes=True),
}

# Keys of 129 to 192 columns, values of up to 128 (multi-head latent attention: 192 and 128): with
# 64 keys a step, reading the operands of Q K' would take all of shared memory's bandwidth.
FORWARD_LATENT = ForwardConfig(
    consumers=2,
    block_kv=128,
    stages=2,
    query_buffers=1,
    registers=(240, 24),
    staged_columns=64,
)

BACKWARD: dict[int, BackwardConfig | BackwardKeyConfig] = {
    64: BackwardConfig(block_q=128, stages=2),
    128: BackwardConfig(block_q=64, stages=2),
    192: BackwardKeyConfig(),
    256: BackwardKeyConfig(),
}

# Up to 128 columns in boxes of 64 (`columns.py`): a producer that issues more copies spills 8 bytes
# with 24 registers.
BACKWARD_BOXES = BackwardConfig(block_q=64, stages=2, registers=(232, 40))

# Registers: width / 2 for dQ, block_kv for S and dP, block_kv / 4 for dS. Width 256: Q and dO take
# 128 KB of shared memory, each stage of K or V 32 KB of the 99 KB left.
BACKWARD_QUERY = {
    64: BackwardQueryConfig(block_kv=128, stages=(3, 3)),
    128: BackwardQueryConfig(block_kv=64, stages=(3, 3)),
    192: BackwardQueryConfig(block_kv=64, stages=(3, 2)),
    256: BackwardQueryConfig(block_kv=64, stages=(2, 1)),
}

# Where logits have a bias or a dense mask, which take registers too.
FORWARD_ELEMENTS = FORWARD | {
    64: dataclasses.replace(_TWO_CONSUMERS, stages=3, elements_early=True),
    128: dataclasses.replace(_TWO_CONSUMERS, elements_early=True),
}

# Dropout beside these or a soft cap. us*, b4 s4096 causal, H128 with a mask of keys: 607, with
# elements early 613, with 64 keys a step 713; with a cap 698 and 797.
FORWARD_ELEMENTS_DROPOUT = FORWARD_ELEMENTS | {128: _TWO_CONSUMERS}

# A soft cap beside these and segment ids: 128 keys a step would spill.
FORWARD_CROWDED = FORWARD_ELEMENTS | {
    128: dataclasses.replace(_TWO_CONSUMERS, block_kv=64, stages=3),
}

# And where TMA brings the bias in tiles beside K, which take the room of a third stage, or of 128
# keys. us*, b4 s4096 causal, bias [1, N, T, S]: H64 750, as above 1220, with three consumers of 64
# keys 803; H128 554 and 728, cuDNN 1207 and 900.
FORWARD_TILED_BIAS = {
    64: dataclasses.replace(_TWO_CONSUMERS, elements_early=True, brings_bias=True),
    128: dataclasses.replace(_TWO_CONSUMERS, block_kv=64, elements_early=True, brings_bias=True),
}

BACKWARD_QUERY_ELEMENTS = BACKWARD_QUERY | {
    64: BackwardQueryConfig(block_kv=64, stages=(3, 3)),
}

# Each stage takes 192 rows each of keys' width and of values' width of shared memory.
BIAS_GRADIENT = {
    64: BiasGradientConfig(block_kv=64, stages=4),
    128: BiasGradientConfig(block_kv=64, stages=2),
    192: BiasGradientConfig(block_kv=64, stages=1),
    256: BiasGradientConfig(block_kv=64, stages=1),
}

WIDTHS = (64, 128, 256)  # of which every variant is compiled, and which are tuned


def default_fp8(
    width: int, value_width: int = 0, *, block_rows: int = 128, segmented: bool = False
) -> ForwardFP8Config:
    """Settings of one call in FP8; value_width as width if it is 0.

    block_rows divides the rows of keys and of values that share a scale.
    """
    widest = max(width, value_width)
    table = FORWARD_FP8_SEGMENTED if segmented or block_rows % 128 > 0 else FORWARD_FP8
    return table[64 if widest <= 64 else 128 if widest <= 128 else 256]


def _rows_an_sm(config: ForwardConfig, length: int, heads: int, causal: bool) -> float:
    """Rows, of tiles, that the SM has which has most."""
    tiles = heads * config.whole_tiles(length) // config.block_q / SM_COUNT
    # Few tiles of one size take as long as one more; of many, or of all sizes, the deal is even.
    return config.block_q * max(1.0, tiles if causal or tiles > 4 else math.ceil(tiles))


def default(
    width: int,
    value_width: int = 0,
    *,
    queries: tuple[int, int] | None = None,
    causal: bool = False,
    window: int | None = None,
    segmented: bool = False,
    has_elements: bool = False,
    forward_loads_elements: bool = False,
    tiled_bias: bool = False,
    soft_cap: bool = False,
    dropout: bool = False,
) -> Config:
    """Settings of one call.

    Args:
      width: of query and key.
      value_width: as width if it is 0.
      queries: how many rows, and of how many heads of all batch entries; None for many.
      causal: whether tiles see the fewer keys the earlier they are.
      window: how many keys a query sees at most, where both bounds are static.
      segmented: there are segment ids.
      has_elements: there is a bias or a dense mask.
      forward_loads_elements: and it is not just a bias of one value a key.
      tiled_bias: and TMA takes tiles of the bias (`elements.Elements.tiled_bias_dtype`).
      soft_cap: there is a soft cap.
      dropout: there is dropout.
    """
    widest = whole_tiles(max(width, value_width))
    widths = width, value_width or width
    in_boxes = any(w % box_width(w) for w in widths)
    forward = FORWARD[widest]
    if widest == 128 and (width < value_width or any(w % 64 for w in widths)):
        forward = FORWARD_PARTIAL
        if not (segmented or has_elements or soft_cap or dropout):
            if in_boxes:
                forward = FORWARD_BOXES
            elif max(widths) <= 96:
                forward = FORWARD_96
    if tiled_bias and widest in FORWARD_TILED_BIAS:
        forward = FORWARD_TILED_BIAS[widest]
    elif soft_cap and segmented and forward_loads_elements:
        forward = FORWARD_CROWDED[widest]
    elif dropout and (soft_cap or forward_loads_elements):
        forward = FORWARD_ELEMENTS_DROPOUT[widest]
    elif forward_loads_elements:
        forward = FORWARD_ELEMENTS[widest]
    elif widest == 64 and (segmented or soft_cap):
        forward = FORWARD_NARROW
    elif not has_elements:  # a bias of keys would not fit into shared memory beside these
        if whole_tiles(width) == 192 and 0 < value_width <= 128:
            forward = FORWARD_LATENT
        elif widest == 64 and window is not None and window <= NARROW_WINDOW:
            forward = FORWARD_NARROW
    if queries is not None and forward.consumers == 3:
        three, two = (_rows_an_sm(x, *queries, causal) for x in (forward, _TWO_CONSUMERS))
        forward = _TWO_CONSUMERS if three >= _THREE_BY_TWO * two else forward
    if widest > 128 and all(box_width(w) == 32 for w in widths):
        # As one: in parts of 32, H160 718 TFLOP/s* for 729 at b4 s4096 causal, H224 725 for 739.
        forward = dataclasses.replace(forward, staged_columns=widths[1])
    if soft_cap:  # at width 64, 20 to 32 bytes would spill; 128 with early values takes 2% longer*
        forward = dataclasses.replace(forward, products_first=False, early_values=False)
    # Where boxes of both are not as wide, those of 64 are taken.
    in_boxes = in_boxes or width < value_width or len(set(map(box_width, widths))) > 1
    backward = BACKWARD_BOXES if widest == 128 and in_boxes else BACKWARD[widest]
    backward_query = (BACKWARD_QUERY_ELEMENTS if has_elements else BACKWARD_QUERY)[widest]
    return Config(forward, backward, backward_query)
