"""The products of a consumer of the backward: logits, weights, their gradients, and dQ."""

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backward_block import ThreadBlock
from pallas_kernels.backward_dq import size_of
from pallas_kernels.backward_plan import KEYS
from pallas_kernels.config import DQ_TILE
from pallas_kernels.dropout import d_logits, negated_transposed
from pallas_kernels.elements import biased
from pallas_kernels.far_rows import shared_by_key, weights_by_key
from pallas_kernels.online_softmax import spread
from pallas_kernels.ptx.compiler import fresh_zero
from pallas_kernels.ptx.mlir import zero_tile
from pallas_kernels.transposed import load_per_query, load_words, per_query


class Products:
    """Those of 64 keys of any tile, in a step.

    Attributes:
      number: of the consumer, 0 or 1.
      own: its keys in a tile.
      dq_row, dq_columns: which rows and columns of a step's dQ it makes.
      dk_acc, dv_acc, s_acc, dp_acc, dq_acc: accumulators.
    """

    def __init__(self, block: ThreadBlock, number: int, dk_acc, dv_acc, s_acc, dp_acc, dq_acc=None):
        self.block, self.plan, self.number = block, block.plan, number
        self.own = pl.ds(KEYS * number, KEYS)
        self.dq_row, self.dq_columns = block.plan.dq.place(number)
        self.dk_acc, self.dv_acc, self.s_acc, self.dp_acc = dk_acc, dv_acc, s_acc, dp_acc
        self.dq_acc = dq_acc

    def slots(self, j):
        """Of Q, the same made anew for dO, and of dS'."""
        slot = self.block.queries.slot(j)
        return slot, slot + fresh_zero(), lax.rem(j, jnp.int32(2))

    def slot_anew(self, j):
        return self.block.queries.slot(j + fresh_zero())

    def load_start(self, slot):
        return load_per_query(self.block.start_smem.at[slot, 0], KEYS)

    def load_query_words(self, slot):
        return load_words(self.block.start_smem.at[slot, self.plan.words_row])

    def issue_logits(self, slot, index) -> None:
        block, plan = self.block, self.plan
        alone = plan.problem.has_slope  # with a cap or a function they must be
        self.s_acc[...] = zero_tile(KEYS, plan.config.block_q) if alone else self.load_start(slot)
        k = block.k_smem.at[block.k_slot(index) + fresh_zero(), :, self.own]
        plan.key_columns.contract(self.s_acc, k, *block.queries.at(slot))

    def issue_d_weights(self, slot) -> None:
        block, plan = self.block, self.plan
        self.dp_acc[...] = zero_tile(KEYS, plan.config.block_q)
        v = block.v_smem.at[fresh_zero(), :, self.own]
        plan.value_columns.contract(self.dp_acc, v, *block.d_outs.at(slot))

    def unshared_weights(self, products, loaded, j, *, far):
        """Weights, of rows far from 0 what `shared` makes weights of if it is due."""
        block, problem = self.block, self.plan.problem
        if far and problem.has_marks:
            start = block.start_smem.at[self.slot_anew(j), 0]
            return weights_by_key(products, loaded, problem, start, block.far)
        logits, to_log2 = biased(products, problem, loaded)
        return jnp.exp2(logits * to_log2)

    def weights_of(self, products, loaded, j, *, far):
        """Weights of products that began with their start, or of what a function made of others."""
        if self.plan.problem.has_score:
            products = products + self.load_start(self.slot_anew(j))
        return self.shared(self.unshared_weights(products, loaded, j, far=far), j, far=far)

    def shared(self, weights, j, *, far):
        """Late, where a wait for an mbarrier ends a block of code anyway."""
        if not (far and self.plan.problem.has_shares):
            return weights
        statistics = self.block.start_smem.at[self.slot_anew(j)]
        return shared_by_key(weights, statistics, self.plan.problem)

    def dropped(self, weights, key_words, slot):
        """The weights, negative where they are dropped."""
        if not self.plan.problem.has_dropout:
            return weights
        query_words = self.load_query_words(slot)
        return negated_transposed(weights, key_words, query_words, self.plan.problem)

    def words_of_pairs(self, key_words, slot):
        """Words of dropout of a tile's keys and queries; None without dropout."""
        if not self.plan.problem.has_dropout:
            return None
        query_words = self.load_query_words(slot)
        own = spread(key_words, (KEYS, *query_words.shape))
        return own, per_query(query_words, KEYS)

    def load_ds(self, weights, slot):
        block, plan = self.block, self.plan
        d_weights = plgpu.wgmma_accumulator_load(self.dp_acc, wait_n=plan.value_columns.products)
        minus_delta = (
            block.start_smem.at[slot, plan.words_row + 1]
            if plan.problem.has_dropout
            else block.delta_smem.at[slot]
        )
        ds = d_logits(weights, d_weights, load_per_query(minus_delta, KEYS), plan.problem)
        return ds.astype(plan.problem.dtype)

    def issue_late_dq(self, parity, index) -> None:
        """dQ of a step before, once the other's dS' of that step is there too."""
        block = self.block
        block.ds_stored.wait(2 * parity + (1 - self.number))
        self.dq_acc[...] = zero_tile(DQ_TILE, size_of(self.dq_columns))
        k = block.k_smem.at[block.k_slot(index) + fresh_zero()]
        ds = block.ds_smem.at[parity, self.dq_row].transpose((1, 0))
        self.plan.key_columns.expand_part(self.dq_acc, ds, k, self.dq_columns)
