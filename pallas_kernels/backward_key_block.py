"""What the producer and the consumers of a thread block of `backward_key.py` share."""

import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backward_key_plan import STAGES, Plan
from pallas_kernels.hopper import Ring
from pallas_kernels.key_tiles_dealing import Listed
from pallas_kernels.key_tiles_shares import split_gradients
from pallas_kernels.key_tiles_walk import Walk
from pallas_kernels.ptx.barriers import with_twins
from pallas_kernels.ptx.mail import mail_shape


class ThreadBlock:
    """What producer and consumers share: operands, results, buffers, barriers, and the walk.

    Attributes:
      plan: of the kernel.
      walk: over tiles of keys.
      q, k, v, d_out, start, delta, far, dk, dv, ds: refs of operands and results, in global
        memory; ds is a list of none or one.
      late, queries: rings of the left and right columns of Q; d_outs, of `Parts` of dO.
      start_smem, delta_smem: statistics of the rows of queries and d_outs, a buffer a slot.
      k_smem, v_smem: lists of the buffers of `Parts`; k_full, v_full: an mbarrier each.
      weights_mail, ds_mail: where a consumer finds what the other sent.
      weights_sent, ds_sent, k_free, v_free: `Plan.barriers`.
    """

    def __init__(
        self, plan: Plan, refs, *, k_smem, v_smem, late_smem, q_smem, o_smem, start_smem,
        delta_smem, mail, k_full, v_full, late_full, q_full, o_full, twins=None,
    ):  # fmt: skip
        self.plan = plan
        self.k_smem, self.v_smem, self.k_full, self.v_full = k_smem, v_smem, k_full, v_full
        self.start_smem, self.delta_smem = start_smem, delta_smem
        (
            self.weights_sent, self.ds_sent, late_free, q_free, o_free, self.k_free, self.v_free
        ) = with_twins(plan.barriers, twins)  # fmt: skip
        self.late = Ring((late_smem,), late_full, late_free, (plan.keys.left.load,))
        self.queries = Ring((q_smem,), q_full, q_free, (plan.keys.right.load,))
        self.d_outs = Ring(tuple(o_smem), o_full, o_free)
        number = lax.axis_index("block")
        self.walk, refs = Walk.of_refs(plan.tiles, refs, lambda table, _: Listed(table, number))
        self.q, self.k, self.v, self.d_out, self.start, self.delta, self.far, *results = refs
        whole, shares, self.ds = split_gradients(plan.tiles, results)
        self.dk, self.dv = whole or shares
        self.weights_mail = mail
        self.ds_mail = mail.at[pl.ds(0, mail_shape(plan.config.block_q, plan.problem.dtype)[0])]

    def slot_of(self, j):
        """Of step j, and as well of step j - STAGES."""
        return lax.rem(j + STAGES, jnp.int32(STAGES))

    def late_slot_of(self, j):
        return lax.rem(j + (STAGES + 1), jnp.int32(STAGES + 1))
