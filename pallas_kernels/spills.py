"""Where a kernel would spill registers, and does something else for it.

Kernels ask their plan what to do: read a number anew, or take a product first. Plans ask tables of
rows like these when.
"""

from collections.abc import Callable
from typing import Any, NamedTuple


class Spill(NamedTuple):
    """A kind of kernels that would, or did once.

    Attributes:
      case: one that is compiled (tests/support/kernel_cases.py).
      when: says of a plan, or of a problem, whether it is of this kind.
      is_needed: whether the case spills otherwise. Of other rows no case is known that does, and
        nobody has timed yet what it would be like without them.
    """

    case: str
    when: Callable[[Any], bool]
    is_needed: bool = True


def would_spill(kinds: tuple[Spill, ...], plan: Any) -> bool:
    """Whether a plan is of any of these kinds."""
    return any(kind.when(plan) for kind in kinds)
