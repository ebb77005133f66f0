"""Where the forward would spill registers, and does something else (`spills.py`).

`python -m tests.support.spills` compiles the case of each row without it.
"""

from typing import TYPE_CHECKING

from pallas_kernels.spills import Spill

if TYPE_CHECKING:
    from pallas_kernels.forward_plan import Plan


def _is_wide(plan: "Plan") -> bool:
    return plan.problem.widest > 192


# Addresses and entries of lists are made anew where they are used, and bounds loaded there.
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
    Spill(
        "H72-key-lengths-causal-even",  # more than one product makes logits
        lambda plan: plan.key_columns.products > 1 and plan.problem.picks_keys,
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
    Spill("H128-causal-dense-bias", lambda plan: plan.loads_bias, is_needed=False),
    Spill(
        "H256-image-function-ragged",
        lambda plan: plan.problem.has_lists and plan.problem.widest > 64,
    ),
)

# The number of a tile is made anew at its end.
NUMBERS: tuple[Spill, ...] = (
    Spill("H256-lengths-even", lambda plan: plan.problem.by_batch),
    Spill("H64-key-lengths-full-whole", lambda plan: plan.tiles.by_number),
)

# A tile ends before the first logits of the next one, not under them.
ENDS: tuple[Spill, ...] = (
    Spill(
        "H128-causal-differences-reads-ragged",
        lambda plan: plan.problem.has_score and plan.problem.widest > 64,
        is_needed=False,
    ),
)
