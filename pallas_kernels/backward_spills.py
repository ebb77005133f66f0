"""Where `backward.py` would spill registers, and does something else (`spills.py`).

`python -m tests.support.spills` compiles the case of each row without it.
"""

from typing import TYPE_CHECKING

from pallas_kernels.key_tiles_dealing import Dealing
from pallas_kernels.spills import Spill

if TYPE_CHECKING:
    from pallas_kernels.backward_plan import Plan


def _is_masked_narrow(plan: "Plan") -> bool:
    return plan.tiles.any_mask and not plan.is_wide


# dQ of a step, though whole, is added to global memory like that of tiles that have a part.
WHOLE_DQ_ADDED: tuple[Spill, ...] = (
    Spill(
        "H64-causal-one-bias-dropout",
        lambda plan: plan.problem.has_dropout and plan.problem.has_elements,
    ),
    Spill(
        "H128-causal-one-dropout",
        lambda plan: plan.problem.has_dropout and plan.key_columns.tiles > 1,
    ),
    Spill(
        "H128-full-one-bias",
        lambda plan: plan.problem.has_elements and plan.key_columns.tiles > 1,
    ),
)

# So is dQ of a head's two tiles, which could store it apart.
DQ_APART_ADDED: tuple[Spill, ...] = (
    Spill("H64-causal-few-dropout", lambda plan: plan.problem.has_dropout, is_needed=False),
    Spill("H64-causal-few-bias", lambda plan: plan.problem.has_elements, is_needed=False),
)

# Tiles come from lists, which nobody draws.
LISTED: tuple[Spill, ...] = (
    Spill("H64-causal-even-cap", lambda plan: plan.problem.has_slope, is_needed=False),
    # Beside ids too it is lists that would.
    Spill(
        "H64-full-mask-bias",
        lambda plan: (
            plan.problem.has_elements
            and not plan.problem.segmented
            and not (plan.problem.by_batch and plan.is_wide)
        ),
        is_needed=False,
    ),
)

# Warpgroups compare their number with those of the roles: a switch would spill there.
ROLES_COMPARED: tuple[Spill, ...] = (
    Spill(
        "H128-lengths-ragged-dropout",
        lambda plan: plan.dealing is Dealing.LISTED and not plan.is_plain,
    ),
)

# The producer reads the number of a tile anew in each step.
NUMBERS_READ: tuple[Spill, ...] = (
    Spill("H128-causal-ragged-dropout", lambda plan: plan.problem.has_dropout),
    Spill(
        "H64-causal-ragged",
        lambda plan: not (plan.is_wide or plan.problem.by_batch) and plan.problem.group > 1,
    ),
)

# And all else that it needs to know of it.
ALL_READ: tuple[Spill, ...] = (
    Spill("H128-lengths-ragged-dropout", lambda plan: plan.problem.has_dropout),
)

# Addresses for copies of boxes are not made ahead.
LOADS_FENCED: tuple[Spill, ...] = (
    Spill(
        "H128-causal-ragged-dropout",
        lambda plan: (
            plan.key_columns.tiles > 1
            and plan.key_columns.odd_rows
            and plan.problem.has_dropout
            and plan.with_query_gradient
        ),
    ),
)

# Weights are computed after dQ of the step before, not under it.
LATE_WEIGHTS: tuple[Spill, ...] = (
    Spill("H64-full-mask-bias", lambda plan: plan.problem.has_elements),
    Spill(
        "H128-full-even-dropout",
        lambda plan: plan.is_wide and plan.problem.has_dropout,
        is_needed=False,
    ),
    Spill("H128-causal-even", lambda plan: plan.is_wide and plan.tiles.any_mask),
    Spill(
        "H128-full-grouped", lambda plan: plan.is_wide and plan.problem.group > 1, is_needed=False
    ),
    Spill(
        "H72-full-waves",
        lambda plan: (
            plan.is_wide and max(plan.key_columns.products, plan.value_columns.products) > 1
        ),
    ),
    Spill(
        "H64-causal-segments",
        lambda plan: plan.problem.segmented and plan.problem.group > 1,
        is_needed=False,
    ),
)

# dP' is issued after the weights, not beside S'.
WEIGHTS_FIRST: tuple[Spill, ...] = (
    Spill("H64-full-ragged-own-bias", lambda plan: plan.problem.has_elements),
    Spill("H64-causal-even-cap", lambda plan: plan.problem.has_slope),
)

# dQ of the step before is done first, not beside S'.
DQ_FIRST: tuple[Spill, ...] = (
    Spill("H64-causal-even-cap", lambda plan: plan.problem.has_slope),
    Spill(
        "H64-full-ragged-own-bias",
        lambda plan: plan.with_bias_gradient and _is_masked_narrow(plan),
        is_needed=False,
    ),
    Spill(
        "H64-full-even-own-bias-dense-mask",
        lambda plan: plan.with_bias_gradient and plan.problem.has_mask and not plan.is_wide,
        is_needed=False,
    ),
)

# The same beside elements that differ by query.
DQ_BEFORE_ELEMENTS: tuple[Spill, ...] = (
    Spill(
        "H96-h96-window-dense-mask-dropout",
        lambda plan: plan.problem.has_dropout and plan.is_wide,
        is_needed=False,
    ),
    Spill(
        "H64-h64-window-dense-mask-bias-dropout",
        lambda plan: plan.problem.has_dropout and plan.problem.has_bias and plan.problem.has_mask,
        is_needed=False,
    ),
    Spill("H64-full-bias-segments", lambda plan: plan.problem.has_bias and plan.problem.segmented),
    Spill(
        "H128-lengths-bias",
        lambda plan: plan.problem.has_bias and plan.problem.dynamic and plan.is_wide,
        is_needed=False,
    ),
)

# The same in steps that rows far from 0 may be in.
DQ_BEFORE_FAR: tuple[Spill, ...] = (
    Spill(
        "H64-h64-causal-bias-dropout",
        lambda plan: plan.problem.has_bias and plan.problem.has_dropout,
        is_needed=False,
    ),
    Spill(
        "H64-full-many",
        lambda plan: (
            plan.dq_is_whole
            and plan.dealing is not Dealing.ONE_EACH
            and not (plan.is_wide or plan.tiles.any_mask)
        ),
    ),
)

# Ids are compared before S' is made, as a function may take many registers.
IDS_FIRST: tuple[Spill, ...] = (
    Spill("H128-documents-function-ragged", lambda plan: plan.problem.has_lists),
)

# Weights are dropped after dQ of the step before, not under it.
LATE_DROPS: tuple[Spill, ...] = (
    Spill("H64-causal-even-dropout", lambda plan: plan.tiles.any_mask and plan.problem.group == 1),
)

# Addresses are made anew in each step.
ADDRESSES: tuple[Spill, ...] = (
    Spill(
        "H64-full-alibi-score-ragged-segments",
        lambda plan: (
            plan.problem.has_score
            and (plan.problem.segmented or plan.problem.has_lists)
            and not plan.is_wide
        ),
    ),
    Spill("H64-causal-even-dropout", lambda plan: plan.problem.has_dropout),
    Spill("H128-full-mask-bias", lambda plan: plan.problem.has_bias),
    Spill(
        "H64-causal-twos",
        lambda plan: plan.is_plain and plan.dealing is Dealing.LISTED and not plan.is_wide,
    ),
    Spill(
        "H128-key-lengths-causal-one",
        lambda plan: plan.problem.picks_keys and plan.dq_is_whole,
    ),
    Spill(
        "H64-key-lengths-causal-ragged",
        lambda plan: plan.problem.picks_keys and not plan.is_wide,
    ),
    Spill("H64-causal-few", lambda plan: _is_masked_narrow(plan) and plan.tiles.has_parts),
    Spill(
        "H64-full-ragged",
        lambda plan: (
            _is_masked_narrow(plan)
            and plan.problem.lowest is None
            and plan.problem.highest is None
            and not plan.problem.by_batch
        ),
    ),
)

# Where rows are far from 0 all steps are in the loops with a mask: one loop more would spill. In
# H64-causal-ragged-dropout one less would.
FAR_IN_MASKED: tuple[Spill, ...] = (
    Spill(
        "H128-causal-ragged-dropout",
        lambda plan: plan.problem.has_dropout and plan.with_query_gradient and plan.is_wide,
    ),
    Spill(
        "H64-h64-full-dense-mask-dropout",
        lambda plan: (
            plan.problem.has_dropout and plan.with_query_gradient and plan.problem.has_mask
        ),
    ),
)

# Nothing prefetches what is added to.
NO_PREFETCHES: tuple[Spill, ...] = (
    Spill(
        "H128-causal-even-dropout",
        lambda plan: plan.problem.has_dropout and plan.tiles.any_mask,
    ),
)

# The producer has 40 registers.
PRODUCER: tuple[Spill, ...] = (
    Spill(
        "H128-full-one",
        lambda plan: plan.problem.widest == 128 and plan.problem.has_odd_rows and plan.dq_is_whole,
    ),
)
