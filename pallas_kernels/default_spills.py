"""Settings with which the forward would spill registers, so that others stand in (`spills.py`).

Rows are of problems, which `defaults.py` asks about. `python -m tests.support.spills default`
compiles the case of each without it.
"""

from pallas_kernels.problem import Problem
from pallas_kernels.spills import Spill


def is_broad(problem: Problem) -> bool:
    """Whether keys or values have more than 48 columns."""
    return max(problem.width, problem.value_width) > 48


# Three consumers, or steps of 64 keys: there are two, of 128.
THREE_CONSUMERS: tuple[Spill, ...] = (
    Spill("H64-causal-segments", lambda problem: problem.segmented, is_needed=False),
    Spill("H64-causal-even-cap", lambda problem: problem.has_cap),
)

# Four consumers have two buffers of queries: there is one.
FOUR_BUFFERS: tuple[Spill, ...] = (
    Spill("H64-key-mask-even", lambda problem: problem.has_key_mask and not problem.has_bias),
    Spill("H64-s512-pairs-bias", lambda problem: problem.has_bias and is_broad(problem)),
)

# Four consumers beside a bias in tiles: there are up to three.
FOUR_BESIDE_BIAS: tuple[Spill, ...] = (
    Spill(
        "H64-s504-pairs-bias-key-mask",
        lambda problem: problem.has_key_mask and is_broad(problem),
    ),
)
