"""Where `backward_query.py` would spill registers, and does something else (`spills.py`)."""

from typing import TYPE_CHECKING

from pallas_kernels.spills import Spill

if TYPE_CHECKING:
    from pallas_kernels.backward_query_block import Plan


def _is_wide(plan: "Plan") -> bool:
    return plan.dq_columns.size > 192


# Bounds, ids and the place of a tile are read where they are used.
ALL_READ: tuple[Spill, ...] = (
    Spill(
        "H256-lengths-ragged-dropout",
        lambda plan: (
            _is_wide(plan)
            and plan.problem.has_dropout
            and (plan.problem.has_elements or plan.problem.by_batch)
        ),
        is_needed=False,
    ),
)

# dP is issued after the weights, not beside S.
WEIGHTS_FIRST: tuple[Spill, ...] = (
    Spill("H256-image-function-ragged-cap", lambda plan: plan.problem.has_slope),
    Spill("H256-lengths-key-bias", lambda plan: _is_wide(plan) and plan.problem.has_elements),
    Spill(
        "H256-lengths-ragged-dropout",
        lambda plan: _is_wide(plan) and plan.problem.has_dropout and plan.problem.by_batch,
        is_needed=False,
    ),
)
