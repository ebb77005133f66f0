"""What the producer and the consumers of a thread block of `bias_gradient.py` share."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax

from pallas_kernels.bias_gradient_pieces import Pieces
from pallas_kernels.columns import Columns
from pallas_kernels.dropout import DropoutRefs
from pallas_kernels.elements import ElementRefs
from pallas_kernels.hopper import Ring
from pallas_kernels.mask_functions import MaskRefs
from pallas_kernels.ptx.arithmetic import div_rem
from pallas_kernels.ptx.barriers import NamedBarriers
from pallas_kernels.ptx.masks import keep_bits

_MANY_BOXES = 5


class ThreadBlock:
    """What producer and consumers share: operands, the gradient, buffers, barriers, and pieces.

    Attributes:
      pieces: of the gradient.
      with_steps: of an entry, how many pieces have steps.
      thread_blocks: how many there are.
      intervals, ids: refs of them; None, and an empty list, without.
      dropout, elements: of rows and keys.
      q, k, v, d_out, start, delta, far, gradient: refs of operands and result, in global memory.
      pairs: ring of K and V that TMA fills, with Q and dO beside its slots in q_smem and o_smem.
      warpgroup: index of this one; the consumers come first.
    """

    def __init__(
        self, pieces: Pieces, with_steps: int, thread_blocks: int, free: NamedBarriers, refs,
        *, q_smem, o_smem, k_smem, v_smem, full, twins=None,
    ):  # fmt: skip
        self.pieces, self.problem = pieces, pieces.problem
        self.with_steps, self.thread_blocks = with_steps, thread_blocks
        self.key_columns = Columns.of_keys(self.problem)
        self.value_columns = Columns.of_values(self.problem)
        self.q_smem, self.o_smem = q_smem, o_smem
        loads = self.key_columns.load, self.value_columns.load
        slots = k_smem, v_smem
        self.pairs = Ring.of(free, slots=slots, full=full, copies=loads, twins=twins)
        self._steps, *refs = refs
        self._lists: MaskRefs | None = None
        if self.problem.has_lists:
            self._lists, refs = MaskRefs.split(self.problem, refs)
        self.intervals, *refs = refs if self.problem.dynamic else (None, *refs)
        count = 2 * int(self.problem.segmented)
        self.ids, refs = refs[:count], refs[count:]
        self.dropout, refs = DropoutRefs.split(self.problem, refs)
        self.elements, refs = ElementRefs.split(self.problem, refs)
        self.q, self.k, self.v, self.d_out, self.start, self.delta, self.far, self.gradient = refs
        self.warpgroup = lax.axis_index("warpgroup")
        self._number = lax.axis_index("block")

    @property
    def has_many_boxes(self) -> bool:
        """Of an operand: kept over a step, their addresses would spill 8 to 28 bytes."""
        return self.key_columns.odd_rows and self.key_columns.tiles >= _MANY_BOXES

    def over_pieces(self, whole_piece: Callable) -> None:
        """Runs `j = whole_piece(entry, number, place, count, j)` for all: so many steps are done.

        `place(step)` is what `pieces.place` gives. A list of all pieces, as others walk, would grow
        with the square of the lengths.
        """
        pieces, with_steps = self.pieces, self.with_steps

        def one(n, j):
            nth = self._number + n * self.thread_blocks
            entry, rank = div_rem(nth, with_steps)
            if with_steps < pieces.per_entry:  # pieces without come after those of all entries
                first_without = pieces.entries * with_steps
                other = div_rem(nth - first_without, pieces.per_entry - with_steps)
                entry = jnp.where(nth < first_without, entry, other[0])
                rank = jnp.where(nth < first_without, rank, with_steps + other[1])
            number, first_step, count = (self._steps[rank, column] for column in range(3))
            place = lambda step: pieces.place(entry, number, first_step + step)
            return whole_piece(entry, number, place, count, j)

        last = pieces.count - 1 - self._number
        count = lax.div(last, jnp.int32(self.thread_blocks)) + 1
        lax.fori_loop(jnp.int32(0), count, one, jnp.int32(0))

    def over_steps(self, place, count, j, one: Callable, carry=()):
        """`carry = one(step, j, carry)` for the steps of a piece; also j behind them.

        Without those that a mask function hides whole.
        """
        first = jnp.int32(0)
        lists = self._lists
        if lists is None:
            add = lambda step, carry: one(step, j + step, carry)
            return lax.fori_loop(first, count, add, carry), j + count

        def add_if_seen(step, state):
            carry, j = state
            is_seen = lists.entry(*place(step)) > 0
            return lax.cond(is_seen, lambda: (one(step, j, carry), j + 1), lambda: state)

        return lax.fori_loop(first, count, add_if_seen, (carry, j))

    def shown(self, weights, fill, batch, head, first_row, first_key):
        """Weights with `fill` where a mask function hides a key."""
        if self._lists is None:
            return weights
        columns = weights.shape[1]
        bits = self._lists.bits(batch, head, first_row, first_key, columns)
        return weights if bits is None else keep_bits(weights, bits, fill)
