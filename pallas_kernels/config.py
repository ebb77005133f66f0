"""Tile sizes, stages and warpgroups of each kernel, as data with the reason beside each row."""

import dataclasses
import math
from typing import Any

import jax
import numpy as np

LOG2E = math.log2(math.e)
SM_COUNT = 132  # H100 SXM and H200
BACKWARD_CONSUMERS = 2  # how they share a tile is in the backward*.py
DQ_TILE = 64  # dQ is accumulated in tiles of 64 rows by up to 64 columns
# What the heads in work at a time may take of the 50 MB of L2: K and V where a thread block owns
# queries, and Q, dO and dQ where it owns keys.
FORWARD_SECTION_BYTES = 12 << 20
BACKWARD_SECTION_BYTES = 12 << 20
SUPPORTED_WIDTHS = range(8, 257, 8)  # TMA takes strides that are multiples of 16 bytes
DROPOUT_STEPS = 1 << 15  # rates are multiples of one over this
_LEAST_SCALE_OF_BEGINNINGS = 2.0**-10


@dataclasses.dataclass(frozen=True)
class Problem:
    """The static part of one attention call: what a kernel is built for.

    Query is `[batch, query_length, heads, width]`, key `[batch, key_length, kv_heads, width]`, and
    value `[batch, key_length, kv_heads, value_width]`. Query i sees keys i + lowest <= j <= i +
    highest, where None is no bound: causal attention has a highest alone, a sliding window has
    both. Or, if it is `dynamic`, it sees an interval of keys that kernels get as an array
    (`intervals.py`). If it is `segmented`, it sees only those of them that have its segment id
    (`segments.py`). Kernels of one that `has_mask` or `has_bias` get these as arrays too
    (`element_arrays.py`). With a soft cap, logits with their bias become soft_cap * tanh(logits /
    soft_cap) before all that hides keys. With dropout, kernels get words that say which weights are
    dropped after the softmax (`dropout_words.py`).

    Attributes:
      value_width: as width if it is 0.
      dropout: how many of `DROPOUT_STEPS` weights are dropped.
    """

    batch: int
    query_length: int
    key_length: int
    heads: int
    kv_heads: int
    width: int
    dtype: np.dtype
    scale: float
    lowest: int | None = None
    highest: int | None = None
    dynamic: bool = False
    segmented: bool = False
    value_width: int = 0
    has_mask: bool = False
    has_bias: bool = False
    soft_cap: float | None = None
    dropout: int = 0

    def __post_init__(self):
        object.__setattr__(self, "value_width", self.value_width or self.width)
        for name in ("width", "value_width"):
            got = getattr(self, name)
            _need(got in SUPPORTED_WIDTHS, name, got, "a multiple of 8, up to 256")
        if self.dynamic:
            bounds = (self.lowest, self.highest)
            _need(bounds == (None, None), "lowest, highest", bounds, "None where dynamic")
        if self.lowest is not None and self.highest is not None:
            # Then the queries that see any key are an interval, and so are the keys that are seen.
            needs = f"at most highest, {self.highest}"
            _need(self.lowest <= self.highest, "lowest", self.lowest, needs)
        needs = f"at least 0 and less than {DROPOUT_STEPS}"
        _need(0 <= self.dropout < DROPOUT_STEPS, "dropout", self.dropout, needs)

    @classmethod
    def of(cls, query: jax.Array, key: jax.Array, value: jax.Array, **static: Any) -> "Problem":
        """That of arrays, with all that is not in their shapes."""
        batch, query_length, heads, width = query.shape
        return cls(
            batch=batch,
            query_length=query_length,
            key_length=key.shape[1],
            heads=heads,
            kv_heads=key.shape[2],
            width=width,
            dtype=np.dtype(query.dtype),
            value_width=value.shape[-1],
            **static,
        )

    @property
    def logit_unit(self) -> float:
        """What kernels count logits in: products of query and key, or tanh with a soft cap."""
        return self.scale if self.soft_cap is None else self.soft_cap

    @property
    def has_cap(self) -> bool:
        return self.soft_cap is not None

    @property
    def has_dropout(self) -> bool:
        return self.dropout > 0

    @property
    def adds_bias(self) -> bool:
        """Whether logits are no more than what a bias is added to: the cap bounds all others."""
        return self.has_bias and self.soft_cap is None

    @property
    def has_shares(self) -> bool:
        """Whether rows far from 0 have a share in the backward (`far_rows.py`)."""
        return self.soft_cap is None and not self.has_marks

    @property
    def has_marks(self) -> bool:
        """Whether they have marks there."""
        return self.soft_cap is None and (self.has_bias or self.dropout > 0 or self.segmented)

    @property
    def bias_shift(self) -> int:
        """By how many powers of 2 a bias far from 0 comes nearer (`element_arrays.compressed`)."""
        lowest = 2  # in log2 units it stays within float32
        if self.scale < _LEAST_SCALE_OF_BEGINNINGS:
            return lowest
        return max(lowest, math.ceil(math.log2(1.0 / self.scale) + 0.6))

    @property
    def may_begin_with_bias(self) -> bool:
        """Whether the bias can be what the products of query and key are added to, over scale."""
        return self.has_bias and self.scale >= _LEAST_SCALE_OF_BEGINNINGS

    @property
    def kept_share(self) -> float:
        """Of weights, by dropout; those that are kept are divided by it."""
        return 1.0 - self.dropout / DROPOUT_STEPS

    @property
    def delta_unit(self) -> float:
        """What backward kernels have delta multiplied with (`dropout.py`)."""
        return 2.0 * self.kept_share if self.dropout else 1.0

    @property
    def d_logit_unit(self) -> float:
        """What the gradients of logits that backward kernels compute must be multiplied with."""
        return 1.0 / self.delta_unit

    @property
    def has_far_edge(self) -> bool:
        """Whether a query may be without the first keys."""
        return self.by_batch or self.lowest is not None

    @property
    def by_batch(self) -> bool:
        """Whether what a tile needs is known at run time only, for each batch entry."""
        return self.dynamic or self.segmented

    @property
    def forward_ignores_unseen(self) -> bool:
        """Whether queries that see no key, and keys that none sees, may be NaN in `forward.py`."""
        spills = self.dropout > 0 and self.widest <= 64
        return self.dynamic and not (self.segmented or self.has_elements or spills)

    @property
    def backward_ignores_unseen(self) -> bool:
        """Whether they may be NaN in `backward.py` too, of all three gradients."""
        spills = self.dropout > 0
        return self.forward_ignores_unseen and self.widest <= 128 and not spills

    @property
    def has_elements(self) -> bool:
        """Whether anything is known of single pairs of query and key alone."""
        return self.has_mask or self.has_bias

    @property
    def seeing_queries(self) -> slice:
        """The queries that see any key, as far as is static."""
        first = 0 if self.highest is None else max(0, -self.highest)
        end = self.query_length
        if self.lowest is not None:
            end = min(end, self.key_length - self.lowest)
        return slice(first, max(first, end))

    @property
    def seen_keys(self) -> slice:
        """The keys that any query sees, as far as is static."""
        first = 0 if self.lowest is None else max(0, self.lowest)
        end = self.key_length
        if self.highest is not None:
            end = min(end, self.query_length + self.highest)
        return slice(first, max(first, end))

    @property
    def group(self) -> int:
        """Query heads that share one key head."""
        return self.heads // self.kv_heads

    @property
    def widest(self) -> int:
        """The width of the wider of key and value, in whole tiles."""
        return whole_tiles(max(self.width, self.value_width))

    @property
    def pair_bytes(self) -> int:
        """Of a row of a head's key and value, or of its query and dO."""
        return (self.width + self.value_width) * self.dtype.itemsize

    def query(self) -> jax.ShapeDtypeStruct:
        shape = (self.batch, self.query_length, self.heads, self.width)
        return jax.ShapeDtypeStruct(shape, self.dtype)

    def key(self) -> jax.ShapeDtypeStruct:
        shape = (self.batch, self.key_length, self.kv_heads, self.width)
        return jax.ShapeDtypeStruct(shape, self.dtype)


def sees_itself(lowest: int | None, highest: int | None) -> bool:
    """Whether by `Problem`'s bounds every query sees the key of its own number."""
    return (lowest is None or lowest <= 0) and (highest is None or highest >= 0)


def whole_tiles(width: int) -> int:
    """Columns rounded up to a multiple of 64, by which settings are chosen."""
    return -(-width // 64) * 64


# Columns that are swizzled together, where they are not the 64 that TMA and wgmma like best but do
# without columns of zeros. TFLOP/s* of the forward, b4 s4096 16 heads full, so and with 64: H80 627
# and 504, H96 718 and 600, H160 776 and 670. With 32 H144 604 and 631, H72 336 and 430, where they
# do not divide the width; with 16 H112 540 and 668, as TMA is slow with rows of 32 bytes.
_BOX_WIDTHS = {32: 32, 80: 16, 96: 32, 160: 32, 224: 32}


def box_width(width: int) -> int:
    """Columns of a box of an operand of 16 bits (`columns.py`)."""
    return _BOX_WIDTHS.get(width, 64)


def _need(holds: bool, name: str, got, needs: str) -> None:
    if not holds:
        raise ValueError(f"{name}: got {got}, needs {needs}")


def _check_multiple_of_64(name: str, got: int) -> None:
    _need(got > 0 and got % 64 == 0, name, got, "a multiple of 64")


def _check_stages(stages: tuple[int, int]) -> None:
    two = len(stages) == 2 and min(stages) >= 1
    _need(two, "stages", stages, "two numbers, at least 1 each")


def _check_thread_blocks(most: int | None) -> None:
    _need(most is None or most >= 1, "thread_blocks", most, "None, or at least 1")


def _check_registers(registers: tuple[int, int], consumers: int) -> None:
    """The warpgroups of a block share what it was launched with: asking for more waits forever."""
    _need(len(registers) == 2, "registers", registers, "two numbers, of consumers and producer")
    for count in registers:
        _need(
            24 <= count <= 256 and count % 8 == 0, "registers", count, "a multiple of 8, 24 to 256"
        )
    warpgroups = consumers + 1
    launched = 65536 // (128 * warpgroups) // 8 * 8 * warpgroups
    wanted = consumers * registers[0] + registers[1]
    _need(wanted <= launched, "registers", f"{wanted} for all warpgroups", f"at most {launched}")


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
        _need(self.consumers >= 2, "consumers", self.consumers, "at least 2, to take turns")
        _check_multiple_of_64("block_kv", self.block_kv)
        _need(self.stages >= 2, "stages", self.stages, "at least 2")
        _need(self.query_buffers in (1, 2), "query_buffers", self.query_buffers, "1 or 2")
        holds = self.staged_columns > 0 and self.staged_columns % 32 == 0
        _need(holds, "staged_columns", self.staged_columns, "a multiple of 32")
        _need(self.section_bytes >= 0, "section_bytes", self.section_bytes, "at least 0")
        _need(self.thread_blocks >= 1, "thread_blocks", self.thread_blocks, "at least 1")
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
        _need(self.block_kv <= 256, "block_kv", self.block_kv, "at most 256, what TMA loads")
        _need(self.value_stages >= 2, "value_stages", self.value_stages, "at least 2")


@dataclasses.dataclass(frozen=True)
class BackwardConfig:
    """Settings of `backward.py`, for widths up to 128.

    Attributes:
      block_q: query rows a step.
      stages: slots of the circular buffers of Q and of dO.
      registers: registers a thread of a consumer and of the producer.
      thread_blocks: how many to launch at most; None for as many as there are SMs, or one a tile
        where tiles are long and are not drawn (`scheduler.thread_blocks`).
      shares: in how many shares a group of query heads is dealt out, each a tile of keys of its
        own, of which the nearest divisor of the group below is taken; None for what keeps all SMs
        at work (`backward_plan.shares_of`).
    """

    block_q: int
    stages: int
    registers: tuple[int, int] = (240, 24)
    thread_blocks: int | None = None
    shares: int | None = 1

    def __post_init__(self):
        _need(self.shares is None or self.shares >= 1, "shares", self.shares, "at least 1, or None")
        _check_multiple_of_64("block_q", self.block_q)
        # Named barriers, and shared memory, are used up with 2.
        _need(self.stages in (1, 2), "stages", self.stages, "1 or 2")
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
    """

    registers: tuple[int, int] = (240, 24)
    thread_blocks: int | None = None
    d_logits_bytes: int = 528 << 20

    def __post_init__(self):
        _check_thread_blocks(self.thread_blocks)
        _check_registers(self.registers, BACKWARD_CONSUMERS)
        _need(self.d_logits_bytes >= 0, "d_logits_bytes", self.d_logits_bytes, "at least 0")

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
        _need(self.stages >= 1, "stages", self.stages, "at least 1")
        _need(self.thread_blocks >= 1, "thread_blocks", self.thread_blocks, "at least 1")


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
        _need(config.block_q == block_q, name, f"{config.block_q} at width {widest}", needs)


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


def default(
    width: int,
    value_width: int = 0,
    *,
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
