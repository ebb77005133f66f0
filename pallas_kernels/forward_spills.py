"""Where the forward would spill registers, and does something else (`spills.py`).

`python -m tests.support.spills` compiles the case of each row without it.
"""

from typing import TYPE_CHECKING

from pallas_kernels.spills import Spill

if TYPE_CHECKING:
    from pallas_kernels.forward_plan import Plan


def _is_wide(plan: "Plan") -> bool:
    return plan.problem.widest > 192


def _in_parts(plan: "Plan") -> bool:
    """Whether more than one product makes logits, each of some columns."""
    return plan.key_columns.products > 1


def _has_cap_beside_lengths(plan: "Plan") -> bool:
    p = plan.problem
    return p.has_cap and p.dynamic and not p.segmented


# Addresses are made anew where they are used, and bounds loaded there.
ADDRESSES: tuple[Spill, ...] = (
    Spill("H256-causal-cut", lambda plan: _is_wide(plan) and plan.tiles.one_each),
    Spill("H256-sides-even", lambda plan: _is_wide(plan) and plan.problem.lowest is not None),
    Spill(
        "H256-key-lengths-causal-ragged",
        lambda plan: _is_wide(plan) and plan.problem.has_lengths,
    ),
    Spill(
        "H208-h208-lengths-ragged",
        lambda plan: _is_wide(plan) and plan.problem.dynamic and plan.key_columns.tiles > 1,
    ),
    Spill("H256-causal-segments", lambda plan: _is_wide(plan) and plan.problem.segmented),
    Spill("H256-window-dense-mask", lambda plan: _is_wide(plan) and plan.problem.has_mask),
    Spill("H256-full-even-dropout", lambda plan: _is_wide(plan) and plan.problem.has_dropout),
    Spill("H72-window-even", lambda plan: _in_parts(plan) and plan.problem.lowest is not None),
    Spill(
        "H72-key-lengths-causal-even",
        lambda plan: _in_parts(plan) and plan.problem.picks_keys,
    ),
    Spill(
        "H128-key-mask-even",
        lambda plan: plan.problem.has_key_mask and plan.problem.widest > 64,
    ),
    Spill(
        "H64-key-lengths-full-even",
        lambda plan: plan.config.consumers == 4 and plan.tiles.any_mask,
    ),
    Spill("H128-causal-even-cap", lambda plan: plan.problem.has_slope),
    Spill("H128-causal-dense-bias", lambda plan: plan.loads_bias),
    Spill(
        "H256-image-function-ragged",
        lambda plan: plan.problem.has_lists and plan.problem.widest > 64,
    ),
    Spill(
        "H192-h128-lengths-segments-dropout",
        lambda plan: (
            plan.problem.segmented and plan.problem.has_dropout and plan.problem.widest > 64
        ),
    ),
)

# And entries of lists, where these are not: with one buffer of queries.
ENTRIES: tuple[Spill, ...] = (
    Spill(
        "H256-lengths-segments",
        lambda plan: plan.config.query_buffers == 1 and plan.problem.segmented,
    ),
    Spill(
        "H64-key-mask-even",
        lambda plan: plan.config.query_buffers == 1 and plan.config.block_kv > 64,
    ),
)

# A step finds the place of its tile anew.
PLACES: tuple[Spill, ...] = (Spill("H64-h64-lengths-cap-deterministic", _has_cap_beside_lengths),)

# A step with a mask does.
PLACES_OF_MASKS: tuple[Spill, ...] = (
    Spill(
        "H256-lengths-segments",
        lambda plan: plan.problem.segmented and plan.registers_are_short,
    ),
)

# The number of a tile is made anew at its end.
NUMBERS: tuple[Spill, ...] = (
    Spill("H256-lengths-even", lambda plan: plan.problem.by_batch),
    Spill("H64-key-lengths-full-whole", lambda plan: plan.tiles.by_number),
)

# Words of dropout are loaded after the weights are made, not once a tile.
WORDS: tuple[Spill, ...] = (
    Spill(
        "H128-lengths-ragged-dropout-cap-deterministic",
        lambda plan: _has_cap_beside_lengths(plan) and plan.problem.has_dropout,
    ),
)

# A tile ends before the first logits of the next one, not under them.
ENDS: tuple[Spill, ...] = (
    Spill(
        "H128-causal-differences-reads-ragged",
        lambda plan: plan.problem.has_score and plan.problem.widest > 64,
    ),
)

# Tiles are listed: none is its thread block's only one, by number, or in shares.
LISTED: tuple[Spill, ...] = (
    Spill(
        "H256-window-alone",
        lambda tiles: tiles.problem.has_far_edge and tiles.problem.widest > 192,
    ),
    Spill("H64-full-mask-bias", lambda tiles: tiles.problem.has_cap and tiles.problem.has_elements),
)
