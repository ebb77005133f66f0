"""Settings of every kernel, with the reason beside each; of those for a call the first that fits.

What else was tried is in notes/. A figure with a star comes of no script in the repository.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

from pallas_kernels.config import (
    SM_COUNT,
    BackwardConfig,
    BackwardKeyConfig,
    BackwardQueryConfig,
    BiasGradientConfig,
    Config,
    ForwardConfig,
    ForwardFP8Config,
)
from pallas_kernels.forward_times import Timed, fastest
from pallas_kernels.problem import SUPPORTED_WIDTHS, box_width, need, whole_tiles

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
FORWARD_PARTIAL = {128: _TWO_CONSUMERS}

# The same, of up to 96 columns that are whole boxes, and of columns in boxes, which TMA is slow to
# load where rows do not begin with a sector of 32 bytes. TFLOP/s*, b4 s4096 16 heads full and
# causal, and with two consumers: H80 627 and 578 (558 and 519), H96 711 and 654 (677 and 652); H72
# 460 and 431 (432 and 394), H88 542 and 508 (441 and 420), H112 697 and 625 (668 and 632).
_THREE_OF_64_KEYS = ForwardConfig(
    consumers=3, block_kv=64, stages=3, query_buffers=2, registers=(160, 32)
)
FORWARD_96 = {128: _THREE_OF_64_KEYS}
FORWARD_BOXES = {128: dataclasses.replace(_THREE_OF_64_KEYS, stages=2)}

# Few keys, where steps of 128 would hold many that there are not. us*, with 128 and with 64, and
# what 3 of 64 give at width 64: t2821 s157 321 and 290, s257 35.3 and 32.4, s320 causal 40.6 and
# 39.2, s384 36.7 and 37.9. Width 128: s64 16.0 and 11.3, s176 38.7 and 33.1, s256 26.7 and 25.4,
# s512 61.6 and 60.3, s576 87.2 and 80.6, s640 88.3 and 88.5, s1024 causal 65.3 and 68.7.
_TWO_OF_64_KEYS = dataclasses.replace(_TWO_CONSUMERS, block_kv=64, stages=3)
FORWARD_SHORT = {64: _THREE_OF_64_KEYS, 128: _TWO_OF_64_KEYS}
_WASTE = 1.1  # keys of steps of 128 by those of steps of 64
_FEW_KEYS = 512  # up to which at width 128 steps of 64 are faster even where they hold as many

# Width 64, windows so narrow that most of what 192 rows by 128 keys visit is not seen. TFLOP/s*
# with these, and with the above: 148 and 123 at 128 keys, 257 and 186 at 256, 351 and 330 at 512,
# 424 and 436 at 1024. And segment ids, whose comparison would spill 16 bytes of the third consumer,
# and a soft cap, which would 8 and more.
NARROW_WINDOW = 768
FORWARD_NARROW = {64: _TWO_CONSUMERS}

# Three consumers are so many times as fast as two where they have rows enough. Of width 64, where
# plain calls have FORWARD_TIMED since; those of 65 to 96 columns go by it. us*, two and three, by
# how many times the rows tiles of three have: b64 s197 52.6 and 62.9 (1.5), b16 s640 causal 47.0
# and 51.7 (1.2), b32 s577 125 and 124 (1.2), b32 s1024 289 and 264 (1.125).
_THREE_BY_TWO = 1.2

# Width 64 where all but the shape is as simple as can be: what ends earliest. Four consumers have
# tiles of 256 rows that read keys once. us*, with these and with the fastest of the others: b8 s256
# 7.7 and 9.4, b4 s512 11.3 and 14.1, b2 s1024 18.1 and 22.3, b1 s1500 24.9 and 30.5, b32 s512
# 74.2 and 78.4, b64 s197 43.7 and 52.2; b4 s4096 454 and 438. With one buffer of queries b32 s512
# takes 79.9, b64 s197 51.0.
FOUR_CONSUMERS = ForwardConfig(
    consumers=4, block_kv=64, stages=2, query_buffers=2, registers=(112, 24)
)
FORWARD_TIMED = (
    Timed(FORWARD[64], launch=4.0, tile=1.37, causal_tile=0.92, step=1.21),
    Timed(FORWARD_SHORT[64], launch=2.7, tile=1.13, causal_tile=0.92, step=0.72),
    Timed(_TWO_CONSUMERS, launch=2.5, tile=1.24, causal_tile=0.63, step=1.01),
    Timed(_TWO_OF_64_KEYS, launch=2.1, tile=1.03, causal_tile=0.75, step=0.58),
    Timed(FOUR_CONSUMERS, launch=3.0, tile=1.50, causal_tile=2.10, step=0.90),
)

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


@dataclasses.dataclass(frozen=True)
class _Call:
    """What settings depend on; see `default`."""

    width: int
    value_width: int
    keys: int | None
    highest: int | None
    window: int | None
    dynamic: bool
    segmented: bool
    has_elements: bool
    loads_elements: bool
    tiled_bias: bool
    soft_cap: bool
    dropout: bool
    key_mask: bool

    @property
    def widths(self) -> tuple[int, int]:
        return self.width, self.value_width

    @property
    def widest(self) -> int:
        return whole_tiles(max(self.widths))

    @property
    def is_plain(self) -> bool:
        """Whether there is nothing but bounds."""
        return not (self.segmented or self.has_elements or self.soft_cap or self.dropout)

    @property
    def is_timed(self) -> bool:
        """Whether `forward_times.py` knows how long it takes, where there are so many keys."""
        is_static = self.window is None and not self.dynamic
        return self.widest == 64 and self.is_plain and is_static

    @property
    def is_partial(self) -> bool:
        """Whether columns do not fill whole tiles."""
        return self.width < self.value_width or any(w % 64 for w in self.widths)

    @property
    def in_boxes(self) -> bool:
        return any(w % box_width(w) for w in self.widths)

    @property
    def is_short(self) -> bool:
        """Whether keys are so few that steps of 64 are faster."""
        if self.keys is None:
            return False
        of_128, of_64 = (-(-self.keys // block) * block for block in (128, 64))
        return of_128 >= _WASTE * of_64 or (self.widest == 128 and self.keys <= _FEW_KEYS)


class _Row(NamedTuple):
    """Settings by the width of the wider of key and value, in whole tiles, for calls that fit."""

    fits: Callable[[_Call], bool]
    settings: dict[int, ForwardConfig]


# The first that fits and has the width. Reasons stand with the settings.
_FORWARD_ROWS = [
    _Row(lambda c: c.tiled_bias, FORWARD_TILED_BIAS),
    _Row(lambda c: c.soft_cap and c.segmented and c.loads_elements, FORWARD_CROWDED),
    _Row(lambda c: c.dropout and (c.soft_cap or c.loads_elements), FORWARD_ELEMENTS_DROPOUT),
    _Row(lambda c: c.loads_elements, FORWARD_ELEMENTS),
    _Row(lambda c: c.segmented or c.soft_cap, FORWARD_NARROW),
    _Row(
        lambda c: c.window is not None and c.window <= NARROW_WINDOW and not c.has_elements,
        FORWARD_NARROW,
    ),
    _Row(lambda c: c.is_partial and c.is_plain and c.in_boxes, FORWARD_BOXES),
    _Row(lambda c: c.is_partial and c.is_plain and max(c.widths) <= 96, FORWARD_96),
    _Row(lambda c: c.is_plain and c.is_short, FORWARD_SHORT),
    _Row(lambda c: c.is_partial, FORWARD_PARTIAL),
    _Row(lambda c: True, FORWARD),
]


def _forward(call: _Call, queries: tuple[int, int] | None) -> ForwardConfig:
    if queries is not None and call.keys is not None and call.is_timed:
        timed = fastest(FORWARD_TIMED, queries, call.keys, call.highest)
        if call.key_mask and timed.consumers == 4:  # else up to 24 bytes would spill
            return dataclasses.replace(timed, query_buffers=1)
        return timed
    found = next(x.settings for x in _FORWARD_ROWS if x.fits(call) and call.widest in x.settings)
    forward = found[call.widest]
    if queries is not None and forward.consumers == 3:
        are_few = call.widest == 64 and forward.block_kv == 64
        of_two = _TWO_OF_64_KEYS if are_few else _TWO_CONSUMERS
        is_causal = call.highest is not None
        three, two = (_rows_an_sm(x, *queries, is_causal) for x in (forward, of_two))
        forward = of_two if three >= _THREE_BY_TWO * two else forward
    if call.widest > 128 and all(box_width(w) == 32 for w in call.widths):
        # As one: in parts of 32, H160 718 TFLOP/s* for 729 at b4 s4096 causal, H224 725 for 739.
        forward = dataclasses.replace(forward, staged_columns=call.value_width)
    if call.soft_cap:  # at width 64, 20 to 32 bytes would spill; 128 with early values: 2% longer*
        forward = dataclasses.replace(forward, products_first=False, early_values=False)
    return forward


def _backward(call: _Call) -> BackwardConfig | BackwardKeyConfig:
    # Where boxes of both are not as wide, those of 64 are taken.
    are_unlike = call.width < call.value_width or len(set(map(box_width, call.widths))) > 1
    if call.widest == 128 and (call.in_boxes or are_unlike):
        return BACKWARD_BOXES
    return BACKWARD[call.widest]


def default(
    width: int,
    value_width: int = 0,
    *,
    queries: tuple[int, int] | None = None,
    keys: int | None = None,
    highest: int | None = None,
    window: int | None = None,
    dynamic: bool = False,
    segmented: bool = False,
    has_elements: bool = False,
    forward_loads_elements: bool = False,
    tiled_bias: bool = False,
    soft_cap: bool = False,
    dropout: bool = False,
    key_mask: bool = False,
) -> Config:
    """Settings of one call.

    Args:
      width: of query and key.
      value_width: as width if it is 0.
      queries: how many rows, and of how many heads of all batch entries; None for many.
      keys: how many; None for many, and beside a mask function.
      highest: None, or where it is static how far above its own number a query sees keys.
      window: how many keys a query sees at most, where both bounds are static.
      dynamic: what a query sees is known at run time only, apart from segment ids.
      segmented: there are segment ids.
      has_elements: there is a bias or a dense mask.
      forward_loads_elements: and it is not just a bias of one value a key.
      tiled_bias: and TMA takes tiles of the bias (`element_arrays.Elements.tiled_bias_dtype`).
      soft_cap: there is a soft cap.
      dropout: there is dropout.
      key_mask: a mask says which keys of a batch entry count, for all queries and heads.
    """
    value_width = value_width or width
    for name, got in (("width", width), ("value_width", value_width)):
        need(got in SUPPORTED_WIDTHS, name, got, "a multiple of 8 up to 256")
    call = _Call(
        width, value_width, keys, highest, window, dynamic, segmented, has_elements,
        forward_loads_elements, tiled_bias, soft_cap, dropout, key_mask,
    )  # fmt: skip
    backward_query = BACKWARD_QUERY_ELEMENTS if has_elements else BACKWARD_QUERY
    return Config(_forward(call, queries), _backward(call), backward_query[call.widest])
