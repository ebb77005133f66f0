"""How tiles of keys come to thread blocks, and which a thread block has where it draws none."""

import dataclasses
import enum
from typing import Any

from pallas_kernels.ptx.compiler import fresh_zero


class Dealing(enum.Enum):
    """Who says which tile a thread block works on next."""

    ONE_EACH = "nobody: it has one, that of its number (`OneEach`)"
    LISTED = "a list, dealt before the kernel by what tiles cost (`Listed`, `scheduler.deal`)"
    DRAWN = "itself: it draws the next one as it gets free (`tickets.Tickets`)"


@dataclasses.dataclass(frozen=True)
class OneEach:
    """The only tile of a thread block.

    Attributes:
      block: number of the thread block.
    """

    block: Any

    def count(self):
        # A loop all the same: without, registers are laid out worse, and spill.
        return 1 + fresh_zero()

    def number(self, index):
        """Of the tile, made anew: kept it would take a register."""
        return self.block + fresh_zero()


@dataclasses.dataclass(frozen=True)
class Listed:
    """The tiles in the list of a thread block.

    Attributes:
      schedule_ref: `key_tiles_order.schedule`, in global memory.
      block: number of the thread block.
    """

    schedule_ref: Any
    block: Any

    def count(self):
        """At least 1; the list goes on with others, or one, of no meaning."""
        return self.schedule_ref[self.block, 0]

    def number(self, index):
        """Of the tile of that index."""
        return self.schedule_ref[self.block, 1 + index]
