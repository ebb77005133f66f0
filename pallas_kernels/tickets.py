"""Tiles that thread blocks draw as they get free.

For where costs are known at run time only, and where tiles wait for what others have done.

All tiles stand in one order of starting. A ticket is a place in it, and a counter in global memory
gives out the next one. The producer draws one when it has few more steps of a tile to load, and
makes the entry of the next tile: its number, in shared memory, where consumers find it.

    order     [number of each ticket's tile]
    drawn     [next ticket | in rounds, for each the one before it in the same thread block]
    entries   [number of each of four tiles in turn, none at the end | in rounds, their tickets]

A round is a walk over the tiles of a thread block, by the index of their turn. The first begins at
0. What it drew, the links of tickets tell to a second one, from the last tile to the first. That
round's indices begin where those of the first end.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ptx.compiler import fresh_zero, load_shared
from pallas_kernels.ptx.counters import draw_ticket, share_first

# Of the tile in work, up to two after it (the backward has two stages), and one that is written; a
# power of 2.
_ENTRIES = 4
_NONE = -1
# So many tiles for each thread block are drawn from one section at the end: from a section with one
# or two for each, some thread blocks would draw a last one that is long.
LAST_TILES = 4
# Steps whose keys are yet to be loaded when the next tile is drawn. With more of them the thread
# block is less often the one that is free first, with fewer the answer comes late (notes/).
_DRAWN_BEFORE = 2


def none_drawn(thread_blocks: int, tiles: int) -> jax.Array:
    """`[1 + tiles]` int32 before a kernel with `TicketsInRounds`: the first of each is not drawn.

    Args:
      thread_blocks: how many draw.
      tiles: of all of them.
    """
    return jnp.full(1 + tiles, thread_blocks, jnp.int32)  # links before they are made: anything


@dataclasses.dataclass(frozen=True)
class _Drawing:
    """What both kinds of tickets have.

    Attributes:
      order_ref: the order, int32 in global memory.
      drawn_ref: the next ticket, and what else is counted or kept, int32 in global memory.
      entries: ref in shared memory.
      tiles: of all thread blocks.
      thread_blocks: how many there are; at most as many as tiles.
      block: a function that says which this is, where it is needed: kept it costs a register.
    """

    order_ref: Any
    drawn_ref: Any
    entries: Any
    tiles: int
    thread_blocks: int
    block: Callable[[], Any]

    def _draw(self, index) -> jax.Array:
        """The ticket of the tile of that index, in the warpgroup's first thread."""
        return draw_ticket(self.drawn_ref.at[0], index * self.thread_blocks + self.block())


@dataclasses.dataclass(frozen=True)
class Tickets(_Drawing):
    """What a thread block draws, for one walk over its tiles, by the index of their turn.

    The order is `[tiles + 1]`, the last of them the number tiles, for the end. Of entries the first
    `_ENTRIES` times 4 bytes are taken. All tickets are drawn, the first ones too, so that who has
    one may wait for those before it: thread blocks that run have them. `drawn_ref` is 0 before.

    Attributes:
      first_full: an mbarrier of one arrival.
    """

    first_full: Any

    def number(self, index) -> jax.Array:
        """Of the tile whose turn it is; that of the end, `tiles`, where there is none.

        Consumers know that the entry is there from what the producer does after it, and of the
        first from `wait_for_first`.
        """
        return load_shared(self.entries.at[_slot(index + fresh_zero())])

    def wait_for_first(self) -> None:
        """Waits for the entry of the first tile."""
        plgpu.barrier_wait(self.first_full)

    # For the producer alone.

    def draw_first(self) -> None:
        """Draws the first tile, and makes its entry."""
        self.draw(jnp.int32(0))
        plgpu.barrier_arrive(self.first_full)

    def draw(self, index) -> None:
        """Draws the tile of that index, the next one, and makes its entry."""
        number = self.order_ref[jnp.minimum(self._draw(index), self.tiles)]
        share_first((self.entries.at[_slot(index)], number))


@dataclasses.dataclass(frozen=True)
class TicketsInRounds(_Drawing):
    """What a thread block draws and walks over a second time, if need be; its first one is given.

    The order is `[tiles]`. Of the words of entries the second half is for tickets.

    Attributes:
      full: an mbarrier for every second entry.
    """

    full: Any

    @staticmethod
    def scratch() -> tuple:
        """Types of entries and full."""
        entries = plgpu.SMEM((2 * _ENTRIES,), jnp.int32)
        return entries, plgpu.Barrier(num_arrivals=1, num_barriers=2)

    def number(self, index) -> jax.Array:
        """Of the tile whose turn it is; below 0 where there is none."""
        return self.entries[_slot(index)]

    def wait(self, index) -> None:
        """Waits for an entry that is not the first of its round."""
        plgpu.barrier_wait(self._full(index))

    def rounds(self, one_round: Callable, wants_another: Callable) -> None:
        """Runs a round, and another one if `wants_another` says so after the first.

        Args:
          one_round: of the index it begins at and the steps before it, returns the index after its
            last tile, and the steps by then.
          wants_another: returns a bool.
        """

        def run(carry):
            begin, steps, _ = carry
            end, steps = one_round(begin, steps)
            return end, steps, wants_another() & (begin == 0)

        carry = jnp.int32(0), jnp.int32(0), jnp.bool_(True)
        lax.while_loop(lambda carry: carry[2], run, carry)

    def each(self, begin, whole_tile: Callable, carry: Any) -> tuple[jax.Array, Any]:
        """Runs `whole_tile(index, carry)` for the tiles of a round; returns the end and the last.

        The entry of the first one must be there.
        """
        return lax.while_loop(
            lambda now: self.number(now[0]) >= 0,
            lambda now: (now[0] + 1, whole_tile(*now)),
            (begin, carry),
        )

    def first_number(self, begin) -> jax.Array:
        """The same of a round's first, before its entry, which is there when its keys are."""
        last = self.entries[_slot(begin - 1 + _ENTRIES)]
        return jnp.where(begin > 0, last, self.order_ref[self.block()])

    # For the producer alone.

    def begin(self, begin) -> None:
        """Makes the entry of the first tile of a round."""
        ticket = jnp.where(begin > 0, self._ticket(begin - 1 + _ENTRIES), self.block())
        self._write(begin, ticket, self._look_up(ticket))
        pl.when(begin == 0)(lambda: self._link(begin, _NONE))

    def load_and_draw(self, index, again, steps, load_step: Callable, load_last: Callable) -> None:
        """Loads what a tile needs, and meanwhile makes the entry of the next one.

        Args:
          index: of the tile.
          again: whether this is the second round.
          steps: of the tile.
          load_step: loads for a step, from 1 on.
          load_last: loads what is left after the last one.
        """
        draw_at = jnp.maximum(steps - _DRAWN_BEFORE, 1)
        pl.loop(jnp.int32(1), draw_at)(load_step)
        ticket = self._draw(index + 1)
        pl.loop(draw_at, steps)(load_step)
        number = self._look_up(ticket)
        load_last()

        @pl.when(jnp.logical_not(again))
        def _():
            self._write(index + 1, ticket, number)
            self._link(index + 1, self._ticket(index))

        @pl.when(again)
        def _():
            after = self._ticket(index)
            before = self.drawn_ref[1 + self._place(after)]
            self._write(index + 1, before, self._look_up(before))

        plgpu.barrier_arrive(self._full(index + 1))

    def _full(self, index):
        return self.full.at[lax.rem(index, jnp.int32(2))]

    def _look_up(self, ticket) -> jax.Array:
        """Number of a ticket's tile, of any if there is none; nothing waits for the memory yet."""
        return self.order_ref[self._place(ticket)]

    def _is_tile(self, ticket):
        return (ticket >= 0) & (ticket < self.tiles)

    def _place(self, ticket):
        return jnp.clip(ticket, 0, self.tiles - 1)

    def _write(self, index, ticket, number) -> None:
        """Makes an entry of what the warpgroup's first thread has."""
        slot = _slot(index)
        number_ref, ticket_ref = (self.entries.at[n * _ENTRIES + slot] for n in range(2))
        number = jnp.where(self._is_tile(ticket), number, _NONE)
        share_first((number_ref, number), (ticket_ref, ticket))

    def _link(self, index, before) -> None:
        """Keeps the ticket that came before a tile's."""
        ticket = self._ticket(index)

        @pl.when(self._is_tile(ticket))
        def _():
            self.drawn_ref[1 + self._place(ticket)] = before

    def _ticket(self, index):
        return self.entries[_ENTRIES + _slot(index)]


def _slot(index):
    return jnp.int32(index) & (_ENTRIES - 1)
