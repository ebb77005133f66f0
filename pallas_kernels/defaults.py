"""Settings of every kernel, with the reason beside each, and which of them a call has.

What else was tried is in notes/. A figure with a star comes of no script in the repository.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np

from pallas_kernels import default_spills
from pallas_kernels.config import (
    ROWS,
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
from pallas_kernels.problem import Problem, box_width
from pallas_kernels.spills import would_spill

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

_TWO_OF_64_KEYS = dataclasses.replace(_TWO_CONSUMERS, block_kv=64, stages=3)
_THREE_OF_64_KEYS = ForwardConfig(
    consumers=3, block_kv=64, stages=3, query_buffers=2, registers=(160, 32)
)
# Of columns in boxes, which TMA is slow to load where rows do not begin with a sector of 32 bytes,
# so that 192 rows share what is loaded, but a third stage finds no room.
_THREE_OF_BOXES = dataclasses.replace(_THREE_OF_64_KEYS, stages=2)
# Tiles of 256 rows that read keys once. us*, with one buffer of queries and with two: b32 s512 79.9
# and 74.2, b64 s197 51.0 and 43.7.
FOUR_CONSUMERS = ForwardConfig(
    consumers=4, block_kv=64, stages=2, query_buffers=2, registers=(112, 24)
)

# Settings up to 128 columns, of which a call has those that end earliest, by the time of a launch,
# a tile, an edge and a step. Fitted* for each of these kinds of widths; ratios alone count.
TIMED_64: tuple[Timed, ...] = (
    Timed(FORWARD[64], launch=4.14, tile=1.25, edge=1.15, step=1.22),
    Timed(_THREE_OF_64_KEYS, launch=3.0, tile=1.23, edge=1.0, step=0.70),
    Timed(_TWO_CONSUMERS, launch=3.74, tile=1.10, edge=0.38, step=1.0),
    Timed(_TWO_OF_64_KEYS, launch=3.02, tile=0.95, edge=0.47, step=0.57),
    Timed(FOUR_CONSUMERS, launch=2.57, tile=1.73, edge=1.5, step=0.87),
)
TIMED_72: tuple[Timed, ...] = (  # in boxes, up to 80 columns
    Timed(_THREE_OF_BOXES, launch=3.07, tile=1.79, edge=1.26, step=0.92),
    Timed(_TWO_CONSUMERS, launch=2.83, tile=2.19, edge=0.16, step=1.30),
    Timed(_TWO_OF_64_KEYS, launch=3.06, tile=2.06, edge=0.29, step=0.67),
)
TIMED_80: tuple[Timed, ...] = (  # in whole boxes, up to 80 columns
    Timed(_THREE_OF_64_KEYS, launch=3.6, tile=1.74, edge=0.72, step=0.80),
    Timed(_TWO_CONSUMERS, launch=4.25, tile=1.45, edge=0.22, step=1.15),
    Timed(_TWO_OF_64_KEYS, launch=3.61, tile=1.50, edge=0.21, step=0.62),
)
TIMED_96: tuple[Timed, ...] = (  # in whole boxes, up to 96 columns
    Timed(_THREE_OF_64_KEYS, launch=4.0, tile=1.79, edge=0.30, step=0.86),
    Timed(_TWO_CONSUMERS, launch=4.0, tile=1.41, edge=0.09, step=1.20),
    Timed(_TWO_OF_64_KEYS, launch=4.0, tile=1.34, edge=0.0, step=0.65),
)
TIMED_BOXES: tuple[Timed, ...] = (  # others in boxes
    Timed(_THREE_OF_BOXES, launch=4.0, tile=1.81, edge=1.06, step=0.94),
    Timed(_TWO_CONSUMERS, launch=4.0, tile=1.60, edge=0.44, step=1.46),
    Timed(_TWO_OF_64_KEYS, launch=4.0, tile=1.58, edge=0.47, step=0.74),
)
TIMED_128: tuple[Timed, ...] = (
    Timed(FORWARD[128], launch=2.54, tile=1.74, edge=0.26, step=1.29),
    Timed(_TWO_CONSUMERS, launch=2.95, tile=1.28, edge=0.35, step=1.33),
    Timed(_TWO_OF_64_KEYS, launch=2.43, tile=1.30, edge=0.40, step=0.69),
)

# And where an SM has a tile of 64 rows alone (`_have_an_sm_each`): one consumer, whose products and
# exponentials wait for no other's. Times* of widths up to 64, and of others.
_ALONE = dataclasses.replace(_TWO_CONSUMERS, consumers=1)
_ALONE_OF_64_KEYS = dataclasses.replace(_TWO_OF_64_KEYS, consumers=1)
TIMED_ALONE_64: tuple[Timed, ...] = (
    Timed(_ALONE, launch=1.0, tile=1.25, edge=0.0, step=0.75),
    Timed(_ALONE_OF_64_KEYS, launch=1.0, tile=1.3, edge=0.0, step=0.43),
)
TIMED_ALONE_128: tuple[Timed, ...] = (
    Timed(_ALONE, launch=1.0, tile=1.9, edge=0.0, step=1.0),
    Timed(_ALONE_OF_64_KEYS, launch=1.0, tile=1.7, edge=0.0, step=0.53),
)
_TILES_ALONE = SM_COUNT  # so many tiles of 64 rows find an SM each
# Of keys for each SM, up to which they are alone: of more, shares of keys fill all SMs anyway, and
# two consumers have more products a second.
_KEYS_ALONE = 1024

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
FORWARD_TILED_BIAS = FORWARD | {
    64: dataclasses.replace(_TWO_CONSUMERS, elements_early=True, brings_bias=True),
    128: dataclasses.replace(_TWO_CONSUMERS, block_kv=64, elements_early=True, brings_bias=True),
}

# The same up to 64 columns, beside nothing but a mask of keys, by what ends earliest.
TIMED_TILED_BIAS_64: tuple[Timed, ...] = (
    Timed(FORWARD_TILED_BIAS[64], launch=3.0, tile=1.6, edge=0.0, step=1.2),
    Timed(
        dataclasses.replace(_THREE_OF_64_KEYS, elements_early=True, brings_bias=True),
        launch=3.0, tile=1.2, edge=0.0, step=0.91,
    ),
    Timed(
        dataclasses.replace(FOUR_CONSUMERS, elements_early=True, brings_bias=True),
        launch=3.0, tile=1.4, edge=0.0, step=1.19,
    ),
)  # fmt: skip

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


def _in_boxes(problem: Problem) -> bool:
    """Whether columns of key or value do not fill their boxes (`columns.py`)."""
    return any(width % box_width(width) for width in (problem.width, problem.value_width))


def _have_an_sm_each(problem: Problem) -> bool:
    """Whether tiles of 64 rows find an SM each, and have few keys in all.

    Beside some options two consumers do not spill, and one does.
    """
    tiles = problem.batch * problem.heads * -(-problem.query_length // ROWS)
    few = tiles <= _TILES_ALONE and tiles * problem.key_length <= _KEYS_ALONE * _TILES_ALONE
    is_crowded = problem.segmented and problem.has_cap and problem.has_dropout
    return few and not (is_crowded or (problem.has_score and problem.has_mask))


def _timed(problem: Problem) -> tuple[Timed, ...]:
    """The settings of up to 128 columns that fit a call without elements."""
    widths = problem.width, problem.value_width
    is_partial = problem.width < problem.value_width or any(width % 64 for width in widths)
    widest = max(widths)
    if _have_an_sm_each(problem):
        timed = TIMED_ALONE_64 if problem.widest <= 64 else TIMED_ALONE_128
    elif widest <= 64:
        timed = TIMED_64
    elif _in_boxes(problem):
        timed = TIMED_72 if widest <= 80 else TIMED_BOXES
    elif widest <= 96:
        timed = TIMED_80 if widest <= 80 else TIMED_96
    else:  # with early values H96 causal s4096 has 634 TFLOP/s* for 652
        timed = TIMED_128[1:] if is_partial else TIMED_128
    if would_spill(default_spills.THREE_CONSUMERS, problem):
        return tuple(x for x in timed if x.config.consumers <= 2 and x.config.block_kv == 128)[:1]
    if problem.has_bias or problem.has_dropout:
        return tuple(x for x in timed if x.config.block_kv == 128)
    hides = problem.dynamic or problem.has_lists
    if hides or (problem.lowest, problem.highest) != (None, None):  # four were no faster
        return tuple(x for x in timed if x.config.consumers < 4)
    return timed


def _beside_elements(problem: Problem, tiled_bias: bool) -> dict[int, ForwardConfig]:
    if tiled_bias:
        return FORWARD_TILED_BIAS
    if problem.has_cap and problem.segmented:
        return FORWARD_CROWDED
    return FORWARD_ELEMENTS_DROPOUT if problem.has_dropout else FORWARD_ELEMENTS


def _is_biased_alone(problem: Problem) -> bool:
    """Whether there is nothing beside a bias that TMA may bring but a mask of keys."""
    if problem.dynamic or (problem.lowest, problem.highest) != (None, None):
        return False
    is_plain = dataclasses.replace(problem, has_bias=False).is_plain
    return problem.may_begin_with_bias and is_plain


def _timed_beside_bias(problem: Problem) -> tuple[Timed, ...]:
    if would_spill(default_spills.FOUR_BESIDE_BIAS, problem):
        return TIMED_TILED_BIAS_64[:2]
    return TIMED_TILED_BIAS_64


def _forward(p: Problem, loads_elements: bool, tiled_bias: bool) -> ForwardConfig:
    is_narrow = p.widest == 64 and not _have_an_sm_each(p)
    if tiled_bias and is_narrow and _is_biased_alone(p):
        forward = fastest(_timed_beside_bias(p), p)
    elif loads_elements:
        forward = _beside_elements(p, tiled_bias)[p.widest]
    elif p.widest > 128:
        forward = FORWARD[p.widest]
    else:  # what is known at run time only hides no block that is known before
        known = dataclasses.replace(p, dynamic=False, segmented=False, mask_function=None)
        forward = fastest(_timed(p), known)
    if _have_an_sm_each(p):
        forward = dataclasses.replace(forward, consumers=1)
    if forward.consumers == 4 and would_spill(default_spills.FOUR_BUFFERS, p):
        forward = dataclasses.replace(forward, query_buffers=1)
    if p.widest > 128 and all(box_width(w) == 32 for w in (p.width, p.value_width)):
        # As one: in parts of 32, H160 718 TFLOP/s* for 729 at b4 s4096 causal, H224 725 for 739.
        forward = dataclasses.replace(forward, staged_columns=p.value_width)
    if p.has_cap:  # 128 with early values: 2% longer*
        forward = dataclasses.replace(forward, early_values=False)
    return forward


def _backward(problem: Problem) -> BackwardConfig | BackwardKeyConfig:
    # Where boxes of both are not as wide, those of 64 are taken.
    widths = problem.width, problem.value_width
    are_unlike = widths[0] < widths[1] or len(set(map(box_width, widths))) > 1
    if problem.widest == 128 and (_in_boxes(problem) or are_unlike):
        return BACKWARD_BOXES
    return BACKWARD[problem.widest]


def for_problem(
    problem: Problem, *, bias_of_keys: bool = False, tiled_bias: bool = False
) -> Config:
    """Settings of one call.

    Args:
      problem: static description.
      bias_of_keys: the bias of one that has a bias is one value a key.
      tiled_bias: TMA takes tiles of it (`element_arrays.Elements.tiled_bias_dtype`).
    """
    backward_query = BACKWARD_QUERY_ELEMENTS if problem.has_elements else BACKWARD_QUERY
    loads_bias = problem.has_bias and not bias_of_keys
    loads_elements = problem.has_mask or problem.has_score or loads_bias
    forward = _forward(problem, loads_elements, tiled_bias)
    return Config(forward, _backward(problem), backward_query[problem.widest])


def default(width: int, value_width: int = 0) -> Config:
    """Settings of calls that fill a GPU and have nothing beside queries, keys and values.

    value_width is as width if it is 0.
    """
    heads, length = SM_COUNT, 4096
    dtype = np.dtype(jnp.bfloat16)
    return for_problem(
        Problem(1, length, length, heads, heads, width, dtype, 1.0, value_width=value_width)
    )
