"""Where a kernel would spill registers, and does something else for it.

Kernels ask their plan what to do: read a number anew, wait earlier, or take fewer columns at a
time. Plans ask tables of rows like these when.
"""

from collections.abc import Callable
from typing import Any, NamedTuple


class Spill(NamedTuple):
    """A kind of kernels that would.

    Attributes:
      case: one that is compiled, and would (tests/support/kernel_cases.py; notes/limits-spills.md
        has the rows that no case has been found for).
      when: says of a plan whether it is of this kind.
    """

    case: str
    when: Callable[[Any], bool]


def would_spill(kinds: tuple[Spill, ...], plan: Any) -> bool:
    """Whether a plan is of any of these kinds."""
    return any(kind.when(plan) for kind in kinds)
