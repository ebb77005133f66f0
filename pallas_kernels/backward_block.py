"""What the producer and the consumers of a thread block of the backward share."""

import functools
from collections.abc import Callable
from typing import Any

import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backward_plan import K_SLOTS, KEYS, Plan
from pallas_kernels.hopper import Ring
from pallas_kernels.key_tiles_dealing import Dealing, Listed, OneEach
from pallas_kernels.key_tiles_shares import split_gradients
from pallas_kernels.key_tiles_walk import Walk
from pallas_kernels.ptx.barriers import with_twins
from pallas_kernels.tickets import Tickets


class ThreadBlock:
    """What producer and consumers share: operands, results, buffers, barriers, and the walk.

    Attributes:
      plan: of the kernel.
      walk: over tiles of keys; `drawn`, its tickets, None where there is nothing to draw.
      q, k, v, d_out, start, delta, far, dq, dk, dv, dk_shares, dv_shares, d_bias: refs of operands
        and results, in global memory; None for results that there are not.
      queries, d_outs: rings of Q and dO, whose slots are given back together, those of queries.
      start_smem, delta_smem: statistics of their rows, a buffer a slot.
      k_smem, v_smem: buffers that TMA fills; k_full, v_full: an mbarrier each.
      ds_smem, dv_smem, dq_smem: what is staged.
      ds_stored, v_free, dq_staged, gradients_staged, sent, unseen_rows: `Plan.barriers`.
      dq_first: whether dQ of the step before is done first.
    """

    def __init__(
        self, plan: Plan, refs, *, k_smem, v_smem, q_smem, o_smem, ds_smem, start_smem,
        k_full, v_full, q_full, o_full, first_full=None, delta_smem=None, dv_smem=None,
        dq_smem=None, twins=None,
    ):  # fmt: skip
        self.plan, self.tiles = plan, plan.tiles
        self.k_smem, self.v_smem, self.k_full, self.v_full = k_smem, v_smem, k_full, v_full
        self.ds_smem, self.dv_smem, self.dq_smem = ds_smem, dv_smem, dq_smem
        self.start_smem, self.delta_smem = start_smem, delta_smem
        number = lax.axis_index("block")

        def deal(table, counters):
            if plan.dealing is Dealing.ONE_EACH:
                return OneEach(number)
            if plan.dealing is Dealing.LISTED:
                return Listed(table, number)
            return Tickets(
                table,
                counters.at[1:],
                delta_smem.at[plan.config.stages],
                plan.tiles.count,
                plan.thread_blocks,
                functools.partial(lax.axis_index, "block"),
                first_full,
            )

        self.walk, refs = Walk.of_refs(self.tiles, refs, deal)
        self.drawn = self.walk.deal if isinstance(self.walk.deal, Tickets) else None
        self.q, self.k, self.v, self.d_out, self.start, self.delta, self.far, *results = refs
        self.dq: Any = results.pop(0) if plan.with_query_gradient else None
        whole, shares, others = split_gradients(plan.tiles, results)
        none: tuple[Any, Any] = (None, None)
        self.dk, self.dv = whole or none
        self.dk_shares, self.dv_shares = shares or none
        self.d_bias: Any = others[0] if plan.with_bias_gradient else None
        (
            self.ds_stored, free, self.v_free, self.dq_staged, self.gradients_staged, self.sent,
            self.unseen_rows,
        ) = with_twins(plan.barriers, twins)  # fmt: skip
        self.queries = Ring((q_smem,), q_full, free, (plan.key_columns.load,))
        self.d_outs = Ring((o_smem,), o_full, free, (plan.value_columns.load,))
        self.dq_first = plan.dq_first(self.walk.has_elements_of_queries)

    def value_staging(self, n, consumer: int):
        """Where part n of a consumer's dV is staged, as `Columns` take it."""
        own = pl.ds(consumer * KEYS, KEYS)
        return (self.ds_smem if self.dv_smem is None else self.dv_smem).at[n, :, own]

    def k_slot(self, index):
        return index & (K_SLOTS - 1)

    # --- the walk ---

    def first_index(self):
        """Lists are walked from their end, since comparing with 0 takes no register."""
        return jnp.int32(0) if self.drawn else self.walk.count() - 1

    def after(self, index):
        return index + 1 if self.drawn else index - 1

    def is_tile(self, index):
        return self.drawn.number(index) < self.tiles.numbers if self.drawn else index >= 0

    def over_tiles(self, whole_tile: Callable, carry: Any) -> None:
        """Runs `whole_tile(index, carry)` for each tile."""
        zero = jnp.int32(0)

        def one_tile(state):
            index, carry, _ = state
            carry = whole_tile(index, carry)
            return index + 1, carry, self.is_tile(index + 1)

        if self.drawn:  # entries are not to be read in the loop's condition, as they are written
            lax.while_loop(lambda state: state[2], one_tile, (zero, carry, self.is_tile(zero)))
            return
        lax.while_loop(
            lambda state: state[0] >= 0,
            lambda state: (state[0] - 1, whole_tile(*state)),
            (self.first_index(), carry),
        )
