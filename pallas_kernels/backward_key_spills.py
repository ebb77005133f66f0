"""Where `backward_key.py` would spill registers, and does something else (`spills.py`)."""

from typing import TYPE_CHECKING

from pallas_kernels.spills import Spill

if TYPE_CHECKING:
    pass

# Addresses of what is handed over are made anew.
ADDRESSES: tuple[Spill, ...] = (
    Spill("H256-causal-dense-bias", lambda plan: plan.problem.has_elements, is_needed=False),
    Spill(
        "H256-h256-lengths-segments-cap-dropout",
        lambda plan: plan.problem.has_cap and (plan.problem.has_dropout or plan.problem.segmented),
    ),
)
