"""What the producer and the consumers of a thread block of `backward_key.py` share."""

import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backward_key_plan import STAGES, Plan
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
      k_smem, v_smem, o_smem: lists of the buffers of `Parts`.
      late_smem, q_smem: buffers of the left and right columns of Q.
      start_smem, delta_smem: of statistics of rows.
      weights_mail, ds_mail: where a consumer finds what the other sent.
      k_full, v_full, late_full, q_full, o_full: mbarriers a buffer, completed by TMA.
      weights_sent, ds_sent, late_free, q_free, o_free, k_free, v_free: `Plan.barriers`.
    """

    def __init__(
        self, plan: Plan, refs, *, k_smem, v_smem, late_smem, q_smem, o_smem, start_smem,
        delta_smem, mail, k_full, v_full, late_full, q_full, o_full, twins=None,
    ):  # fmt: skip
        self.plan = plan
        self.k_smem, self.v_smem, self.o_smem = k_smem, v_smem, o_smem
        self.late_smem, self.q_smem = late_smem, q_smem
        self.start_smem, self.delta_smem = start_smem, delta_smem
        self.k_full, self.v_full, self.late_full = k_full, v_full, late_full
        self.q_full, self.o_full = q_full, o_full
        (
            self.weights_sent, self.ds_sent, self.late_free, self.q_free, self.o_free, self.k_free,
            self.v_free,
        ) = with_twins(plan.barriers, twins)  # fmt: skip
        self.walk, refs = Walk.of_refs(plan.tiles, lax.axis_index("block"), refs)
        self.q, self.k, self.v, self.d_out, self.start, self.delta, self.far, *results = refs
        self.dk, self.dv, *self.ds = results
        self.weights_mail = mail
        self.ds_mail = mail.at[pl.ds(0, mail_shape(plan.config.block_q, plan.problem.dtype)[0])]

    def slot_of(self, j):
        """Of step j, and as well of step j - STAGES."""
        return lax.rem(j + STAGES, jnp.int32(STAGES))

    def late_slot_of(self, j):
        return lax.rem(j + (STAGES + 1), jnp.int32(STAGES + 1))
