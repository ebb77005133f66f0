"""How a thread block of the forward comes to its tiles: four deals, which are walked over alike.

It has one, that of its number; or each so many by number; or those of a list; or it draws them. A
round is a walk over all of them, by an index that goes on from one round to the next.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.forward_tiles import Tiles
from pallas_kernels.ptx.compiler import fresh_zero
from pallas_kernels.tickets import TicketsInRounds


def deal_of(tiles: Tiles, schedule, drawn, entries, *, anew: bool) -> "Deal":
    """That of this thread block.

    Args:
      schedule, drawn: refs, as `Tiles.kernel` has them.
      entries: shared memory and barrier of what is drawn.
      anew: whether registers are so few that addresses are made anew.
    """
    number = lax.axis_index("block")
    if tiles.problem.by_batch:
        (counter,), (numbers, full) = drawn, entries
        sizes = tiles.count, tiles.thread_blocks
        return Drawn(TicketsInRounds(schedule, counter, numbers, *sizes, lambda: number, full))
    if tiles.one_each:
        return OneTile(number)
    if tiles.by_number:
        return ByNumber(number, tiles.count, tiles.thread_blocks)
    return FromList(number, schedule, anew=anew, keeps_count=not anew)


class Round:
    """A walk over the tiles of a thread block.

    Attributes:
      begin: index of its first tile.
    """

    begin: Any

    def number(self, index):
        """Of a tile."""
        raise NotImplementedError

    def first_number(self):
        """Of the first tile, as soon as there is one."""
        raise NotImplementedError

    def following(self, index, *, late: bool) -> Callable[[], Any]:
        """What gives the number of the tile behind one, when that has made its steps.

        Args:
          late: it reads the number only then, in any case.
        """
        raise NotImplementedError

    def goes_on(self, index, following):
        """Whether there is a tile behind one.

        Args:
          following: what `following` gives of it.
        """
        raise NotImplementedError

    def each(self, whole_tile: Callable, carry) -> tuple:
        """Runs `whole_tile(index, carry)` for all; returns the index after the last, and carry."""
        raise NotImplementedError

    # For the producer alone.

    def start(self) -> None:
        """Before anything is asked of the round."""

    def load_queries(self, load: Callable, index, buffers: int) -> None:
        """Calls `load(index)` for the tile whose queries are wanted once this one has begun."""
        raise NotImplementedError

    def load_first_queries(self, load: Callable, buffers: int) -> None:
        """The same for those that are wanted before."""

    def load_steps(self, index, steps, load_step: Callable, load_last: Callable) -> None:
        """Loads for the steps of a tile, from 1 on, and what is left after the last one."""
        raise NotImplementedError


class Deal:
    """The tiles of a thread block."""

    def round(self, begin) -> Round:
        """That begins at an index."""
        raise NotImplementedError

    def rounds(self, one_round: Callable, wants_another: Callable) -> None:
        """Runs a round, and another one if `wants_another()` after the first.

        Args:
          one_round: of the index it begins at and the steps before it, returns the index after its
            last tile, and the steps by then.
        """
        raise NotImplementedError


# --- tiles that are known from the beginning ------------------------------------------------------


class Given(Deal):
    """Tiles that are known from the beginning."""

    def count(self):
        raise NotImplementedError

    def number(self, position):
        """Of a tile, by its place among them."""
        raise NotImplementedError

    def round(self, begin) -> "GivenRound":
        return GivenRound(self, begin, begin + self.count())

    def rounds(self, one_round: Callable, wants_another: Callable) -> None:
        def run(carry):
            begin, steps = carry
            _, steps = one_round(begin, steps)
            is_last = jnp.logical_not(wants_another()) | (begin > 0)
            return jnp.where(is_last, 2 * self.count(), self.count()), steps

        begun = jnp.int32(0), jnp.int32(0)
        lax.while_loop(lambda carry: carry[0] < 2 * self.count(), run, begun)


@dataclasses.dataclass(frozen=True)
class OneTile(Given):
    """One tile, that of the thread block's number."""

    thread_block: Any

    def count(self):
        return jnp.int32(1)

    def number(self, position):
        return self.thread_block


@dataclasses.dataclass(frozen=True)
class ByNumber(Given):
    """The tile of the thread block's number, and each `thread_blocks` on."""

    thread_block: Any
    tiles: int
    thread_blocks: int

    def count(self):
        return lax.div(self.tiles - 1 - self.thread_block, jnp.int32(self.thread_blocks)) + 1

    def number(self, position):
        return self.thread_block + position * self.thread_blocks


class FromList(Given):
    """Those of a list that `scheduler.deal` gives.

    Attributes:
      schedule: ref of lists.
      anew: whether addresses of entries are made anew.
      keeps_count: whether that is loaded once.
    """

    def __init__(self, thread_block, schedule, *, anew: bool, keeps_count: bool):
        self.thread_block, self.schedule, self.anew = thread_block, schedule, anew
        self._count = self._entry(0) if keeps_count else None

    def _entry(self, column):
        row = self.thread_block + fresh_zero() if self.anew else self.thread_block
        return self.schedule[row, column]

    def count(self):
        return self._entry(0) if self._count is None else self._count

    def number(self, position):
        return self._entry(1 + position)


@dataclasses.dataclass(frozen=True)
class GivenRound(Round):
    """A walk over tiles that are known.

    Attributes:
      deal: of the thread block.
      end: index after the last tile.
    """

    deal: Given
    begin: Any
    end: Any

    def number(self, index):
        return self.deal.number(index - self.begin)

    def first_number(self):
        return self.number(self.begin)

    def following(self, index, *, late):
        number = self.number(index + 1)
        return (lambda: self.number(index + 1 + fresh_zero())) if late else lambda: number

    def goes_on(self, index, following):
        return index + 1 < self.end

    def each(self, whole_tile, carry):
        return self.end, lax.fori_loop(self.begin, self.end, whole_tile, carry)

    def load_first_queries(self, load, buffers):
        if buffers > 1:
            load(self.begin)

    def load_queries(self, load, index, buffers):
        wanted = index + (buffers - 1)
        pl.when(wanted < self.end)(lambda: load(wanted))

    def load_steps(self, index, steps, load_step, load_last):
        pl.loop(jnp.int32(1), steps)(load_step)
        load_last()


# --- tiles that are drawn -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Drawn(Deal):
    """Tiles that the producer draws while it loads for those before them."""

    tickets: TicketsInRounds

    def round(self, begin):
        return DrawnRound(self.tickets, begin)

    def rounds(self, one_round, wants_another):
        self.tickets.rounds(one_round, wants_another)


@dataclasses.dataclass(frozen=True)
class DrawnRound(Round):
    """A walk over tiles that are drawn.

    Attributes:
      tickets: of the thread block.
    """

    tickets: TicketsInRounds
    begin: Any

    def number(self, index):
        return self.tickets.number(index)

    def first_number(self):
        return self.tickets.first_number(self.begin)

    def following(self, index, *, late):
        def read():
            self.tickets.wait(index + 1)
            return self.number(index + 1 + fresh_zero())

        return read

    def goes_on(self, index, following):
        return following >= 0

    def each(self, whole_tile, carry):
        return self.tickets.each(self.begin, whole_tile, carry)

    def start(self):
        self.tickets.begin(self.begin)

    def load_queries(self, load, index, buffers):
        load(index)  # the next tile is drawn too late for queries ahead

    def load_steps(self, index, steps, load_step, load_last):
        self.tickets.load_and_draw(index, self.begin > 0, steps, load_step, load_last)
