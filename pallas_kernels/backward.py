"""Backward attention for Hopper GPUs: five products a tile pair in one warp-specialised kernel.

FlashAttention-2's loop (Dao 2023, Algorithm 2) in FlashAttention-3's arrangement, in one thread
block per SM that draws its tiles (`tickets.py`), or walks a list of them, or one per tile where
tiles are long. A tile is `block_kv` keys of one key head, 64 for each of two consumers, which loop
over the query blocks, of every query head of the group, that see any of them. Logits and their
gradients are computed transposed, so that the weights P and dS are in the registers that the
products for dV and dK read them from:

    producer   K V | Q0 dO0 | Q1 dO1 | ...                      TMA into circular buffers
    consumer   S' = K Q' - LSE / scale;  dQ = dS K of the step before
               P' = exp2(S' * scale * log2(e))                  while dQ is computed
               dP' = V dO';  dV += P' dO
               dS' = P' * (dP' - delta)                         while dV is computed
               dK += dS' Q;  dS' to shared memory
    producer   adds dQ to global memory in float32              TMA reduction

delta = rowsum(dO * O) - dLSE comes from `row_statistics.py`. `cast_dq.py` does what is left of dQ.
For deterministic gradients dQ comes from `backward_query.py`, and this kernel gives dK and dV
alone, as `backward_key.py` does at widths above 128.

The zeros that dQ begins with come from `row_statistics.py` too, but where thread blocks draw their
tiles those of the first heads alone: each tile zeros a part of dQ of the section of heads after its
own, and a tile waits until all of the section before have. These have been drawn, by thread blocks
that wait for none but sections before theirs.

With a soft cap, the logits must come alone: S' starts at 0, and P' times the derivative of the cap
takes the place of P' in dS'. Registers are shorter then, so that dQ of the step before is done
before S' is begun.

dQ of a step is 64 rows by up to 64 columns for each consumer, and needs the dS' of both. As it is a
step late, neither waits for the other. In the first step of a tile there is none to compute: the
product runs all the same, on what is there, and goes nowhere.

Where the queries of a step see keys of one consumer alone, the other one stores zeros for dS', and
makes its part of dQ.

The next tile's first steps, its K and its V arrive under this one's last: what is staged for the
producer to send stands where nothing is loaded, dK where K was, beside which there is another K,
and dV where dS' was.

Query rows beyond the end, and rows that see no key, have a start of -inf where others have
-LSE / scale, so that their weights are 0. Keys beyond the end are masked. With intervals known at
run time alone (`Problem.backward_ignores_unseen`) what does not count may be NaN: consumers zero,
in shared memory, the rows of K and V that no query sees, and in steps with a mask those of Q and dO
that see no key of the tile. What they get for such rows is 0, whatever is NaN in others.

dQ is accumulated in fragment order (`ptx.fragments.store_fragment`): the order in which the threads
of a warpgroup hold an accumulator. So to store it takes neither a swizzle nor address registers.

Barriers. Full: an mbarrier for V, and for each slot of K, of Q and of dO, completed by TMA. First
full: an mbarrier for the number of the first tile that is drawn. The others are named barriers.
Free: for V, and for each slot of Q and dO, the consumers arrive and the producer waits. Stored: for
each consumer and buffer of dS', it arrives and the other one waits; for the first step of a tile,
the producer arrives; at its end, they meet there. Staged, for dQ of each consumer and for dK and dV
of both: they arrive, the producer waits and sends. Sent: it has, and each consumer may stage again.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import soft_cap
from pallas_kernels.backward_plan import (
    BLOCK_KV,
    CONSUMERS,
    K_SLOTS,
    KEYS,
    Plan,
    fragment_of,
    size_of,
)
from pallas_kernels.columns import Columns, put_tile
from pallas_kernels.config import DQ_TILE, BackwardConfig, Problem
from pallas_kernels.dropout import as_operand, d_logits, negated_transposed
from pallas_kernels.elements import biased
from pallas_kernels.far_rows import shared_by_key, weights_by_key
from pallas_kernels.key_tiles import Walk, load_per_query, load_words, masked, per_query
from pallas_kernels.online_softmax import spread
from pallas_kernels.ptx.arithmetic import div_rem
from pallas_kernels.ptx.barriers import fence_async_shared, with_twins
from pallas_kernels.ptx.compiler import code_fence, fresh_rows, fresh_zero, own_warpgroup
from pallas_kernels.ptx.counters import add_when_stored, await_count
from pallas_kernels.ptx.fragments import fragment_shape, store_fragment, zero_fragment
from pallas_kernels.ptx.loads import prefetch
from pallas_kernels.ptx.mlir import zero_tile


@functools.lru_cache
def build(
    problem: Problem,
    config: BackwardConfig,
    key_rows: int,
    with_query_gradient: bool,
    interpret: bool,
):
    """The main kernel, or without dQ one that gives dK and dV alone."""
    plan = Plan(problem, config, with_query_gradient)

    def attention_backward(*refs, **scratch):
        block = _ThreadBlock(plan, refs, **scratch)
        # One copy of the code a consumer: addresses become constants, which saves registers.
        consumers = [functools.partial(_consume, block, number) for number in range(CONSUMERS)]
        roles: list[Callable[[], None]] = [*consumers, functools.partial(_produce, block)]
        if plan.draws:  # else its number would be spilled in a consumer, for comparisons after it
            lax.switch(lax.axis_index("warpgroup"), roles)
        else:  # but here a switch would spill, in consumers with a cap or dropout
            for number, role in enumerate(roles):
                pl.when(own_warpgroup() == number)(role)

    return plan.tiles.gradient_kernel(
        attention_backward,
        key_rows,
        config.thread_blocks,
        plan.scratch(interpret),
        from_end=True,
        draws=plan.draws,
    )


class _ThreadBlock:
    """What producer and consumers share: operands, results, buffers, barriers, and the walk.

    Attributes:
      plan: of the kernel.
      walk: over tiles of keys; `drawn`, its tickets, None where it goes over a list.
      q, k, v, d_out, start, delta, far, dq, dk, dv: refs of operands and results, in global
        memory; dq is None without.
      k_smem, v_smem, q_smem, o_smem, start_smem, delta_smem: buffers that TMA fills.
      ds_smem, dv_smem, dq_smem: what is staged.
      k_full, v_full, q_full, o_full: mbarriers a buffer, completed by TMA.
      ds_stored, free, v_free, dq_staged, gradients_staged, sent, unseen_rows: `Plan.barriers`.
      dq_first: whether dQ of the step before is done first.
    """

    def __init__(
        self, plan: Plan, refs, *, k_smem, v_smem, q_smem, o_smem, ds_smem, start_smem,
        k_full, v_full, q_full, o_full, first_full=None, delta_smem=None, dv_smem=None,
        dq_smem=None, twins=None,
    ):  # fmt: skip
        self.plan, self.tiles = plan, plan.tiles
        self.k_smem, self.v_smem, self.q_smem, self.o_smem = k_smem, v_smem, q_smem, o_smem
        self.ds_smem, self.dv_smem, self.dq_smem = ds_smem, dv_smem, dq_smem
        self.start_smem, self.delta_smem = start_smem, delta_smem
        self.k_full, self.v_full, self.q_full, self.o_full = k_full, v_full, q_full, o_full
        number = lax.axis_index("block")
        entries = delta_smem.at[plan.config.stages] if plan.draws else None
        self.walk, refs = Walk.of_refs(
            self.tiles, number, refs, plan.thread_blocks, entries, first_full
        )
        self.drawn = self.walk.drawn
        self.q, self.k, self.v, self.d_out, self.start, self.delta, self.far, *results = refs
        *dq, self.dk, self.dv = results
        self.dq: Any = dq[0] if dq else None
        (
            self.ds_stored, self.free, self.v_free, self.dq_staged, self.gradients_staged,
            self.sent, self.unseen_rows,
        ) = with_twins(plan.barriers, twins)  # fmt: skip
        self.dq_first = plan.dq_first(self.walk.has_elements_of_queries)

    def dq_place(self, consumer: int) -> tuple[int, slice]:
        """Which 64 rows of a step's dQ a consumer has, and which columns."""
        row, column = divmod(consumer, len(self.plan.dq.tiles))
        return row, self.plan.dq.tiles[column]

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
        return self.drawn.number(index) < self.tiles.count if self.drawn else index >= 0

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


# --- the consumers --------------------------------------------------------------------------------


def _consume(block: _ThreadBlock, number: int) -> None:
    plan, block_q = block.plan, block.plan.config.block_q
    plgpu.set_max_registers(plan.registers[0], action="increase")
    accumulator = lambda rows, columns: plgpu.ACC((rows, columns), jnp.float32)
    accumulators = [
        accumulator(KEYS, plan.key_columns.size),
        accumulator(KEYS, plan.value_columns.size),
        accumulator(KEYS, block_q),
        accumulator(KEYS, block_q),
    ]
    if plan.with_query_gradient:
        _, dq_columns = block.dq_place(number)
        accumulators.append(accumulator(DQ_TILE, size_of(dq_columns)))
    pl.run_scoped(lambda *refs: _Consumer(block, number, *refs).walk(), *accumulators)


class _Consumer:
    """dK and dV of 64 keys of each tile, and part of its dQ.

    Attributes:
      number: 0 or 1.
      own: its keys in a tile.
      dq_row, dq_columns: which rows and columns of a step's dQ it makes.
      dk_acc, dv_acc, s_acc, dp_acc, dq_acc: accumulators.
    """

    def __init__(
        self, block: _ThreadBlock, number: int, dk_acc, dv_acc, s_acc, dp_acc, dq_acc=None
    ):
        self.block, self.plan, self.number = block, block.plan, number
        self.own = pl.ds(KEYS * number, KEYS)
        self.dq_row, self.dq_columns = block.dq_place(number)
        self.dk_acc, self.dv_acc, self.s_acc, self.dp_acc = dk_acc, dv_acc, s_acc, dp_acc
        self.dq_acc = dq_acc

    def walk(self) -> None:
        self.dk_acc[...] = zero_tile(KEYS, self.plan.key_columns.size)
        self.dv_acc[...] = zero_tile(KEYS, self.plan.value_columns.size)
        if self.block.drawn:
            self.block.drawn.wait_for_first()
        self.block.over_tiles(self.whole_tile, jnp.int32(0))

    def whole_tile(self, index, j):
        """A tile of keys. Returns the number of the step after its last."""
        block, plan, walk = self.block, self.plan, self.block.walk
        self.await_keys(index)
        step = self.step_without_dq
        if plan.with_query_gradient:
            step = self.step_after_dq if block.dq_first else self.step_with_dq_or_after
        first_key = KEYS * self.number
        key_words = walk.key_words(index, first_key)
        step = functools.partial(step, index=index, key_words=key_words)
        blank = None
        if not plan.problem.has_elements:  # beside a mask, a bias and ids it would spill
            blank = functools.partial(self.blank_step, index=index)
        j = walk.loop_over_steps(
            step, index, j, first_key, blank_step=blank, far_in_masked=plan.far_in_masked
        )
        block.v_free.arrive(0)
        parity = lax.rem(j + 1, jnp.int32(2))  # of the last step
        if plan.with_query_gradient:
            self.issue_late_dq(parity, index)
            self.hand_over_dq()
        else:
            block.sent.wait(self.number)
        self.hand_over_gradients(1 - parity, index)
        return j

    # --- steps ---

    def step_with_dq(self, j, mask, far, load_elements, index, key_words) -> None:
        """The queries of a step, under dQ of the step before.

        Args:
          mask: of the step, None without.
          far: whether rows may be far from 0.
          load_elements: of a step, gives mask and bias.
          key_words: of dropout.
        """
        block, plan = self.block, self.plan
        slot, o_slot, parity = self.slots(j)
        self.await_query(slot, mask, j)
        self.issue_logits(slot, index)
        self.issue_late_dq(1 - parity, index)
        equal_ids = None
        if mask is not None and not plan.problem.has_dropout:  # while S' is made
            equal_ids = mask.equal_ids(j)
        loaded = load_elements(j)
        weights = self.load_weights(loaded, j, far=far, wait_n=1)
        if not plan.is_wide:  # there are registers for it beside dQ
            weights = self.dropped(weights, key_words, slot)
        if plan.early_weights:
            # A wait here keeps ptxas from computing the weights after dQ.
            self.await_d_out(o_slot, mask, j)
            weights = self.shared(weights, j, far=far)
            self.hand_over_dq()
        else:
            self.hand_over_dq()
            self.await_d_out(o_slot, mask, j)
            weights = self.shared(weights, j, far=far)
        if plan.is_wide:
            weights = self.dropped(weights, key_words, slot)
        if mask is not None and plan.problem.has_dropout:  # only now are there registers for it
            equal_ids = mask.equal_ids(j)
        self.issue_d_weights(o_slot)
        weights = masked(weights, mask, j, equal_ids, loaded)
        operand = as_operand(weights, plan.problem)
        plan.value_columns.expand(self.dv_acc, operand, block.o_smem.at[o_slot])
        ds = self.load_ds(weights, o_slot)
        plan.key_columns.expand(self.dk_acc, ds, block.q_smem.at[slot])
        self.hand_over_ds(parity, ds)
        plgpu.wgmma_wait(0)
        block.free.arrive(slot)

    def step_without_dq(self, j, mask, far, load_elements, index, key_words) -> None:
        """The same, and no product of dQ beside it."""
        block, plan = self.block, self.plan
        slot, o_slot, parity = self.slots(j)
        equal_ids = mask.equal_ids(j) if mask is not None else None
        self.await_query(slot, mask, j)
        self.issue_logits(slot, index)
        loaded = load_elements(j)
        wait_n = 0 if plan.weights_first else plan.value_columns.tiles
        if not plan.weights_first:
            self.await_d_out(o_slot, mask, j)
            self.issue_d_weights(o_slot)
        if plan.problem.has_cap:
            operand, weights = self.load_capped_weights(
                loaded, mask, j, equal_ids, o_slot, key_words, wait_n=wait_n
            )
        else:
            weights = self.load_weights(loaded, j, far=far, wait_n=wait_n)
            weights = self.shared(weights, j, far=far)
        if plan.weights_first:
            self.await_d_out(o_slot, mask, j)
            self.issue_d_weights(o_slot)
        if not plan.problem.has_cap:
            weights = masked(weights, mask, j, equal_ids, loaded)
            weights = self.dropped(weights, key_words, slot)
            operand = as_operand(weights, plan.problem)
        plan.value_columns.expand(self.dv_acc, operand, block.o_smem.at[o_slot])
        ds = self.load_ds(weights, o_slot)
        plan.key_columns.expand(self.dk_acc, ds, block.q_smem.at[slot])
        if plan.with_query_gradient:
            self.hand_over_ds(parity, ds)
        else:
            fence_async_shared()  # TMA will overwrite row statistics that were read
        plgpu.wgmma_wait(0)
        block.free.arrive(slot)

    def step_after_dq(self, j, mask, far, load_elements, index, key_words) -> None:
        """Where registers are short: dQ of the step before is done first."""
        self.issue_late_dq(1 - lax.rem(j, jnp.int32(2)), index)
        self.hand_over_dq()
        self.step_without_dq(j, mask, far, load_elements, index, key_words)

    def step_with_dq_or_after(self, j, mask, far, load_elements, index, key_words) -> None:
        """What rows far from 0 take is too much beside a bias and dropout."""
        is_after = far and self.plan.problem.has_bias and self.plan.problem.has_dropout
        step = self.step_after_dq if is_after else self.step_with_dq
        step(j, mask, far, load_elements, index, key_words)

    def blank_step(self, j, mask, index) -> None:
        """Of queries that see none of the consumer's keys: it makes its part of dQ."""
        slot, o_slot, parity = self.slots(j)
        self.await_query(slot, mask, j)
        if self.plan.with_query_gradient:
            self.issue_late_dq(1 - parity, index)
        self.await_d_out(o_slot, mask, j)
        if self.plan.with_query_gradient:
            self.hand_over_dq()
            none = zero_tile(KEYS, self.plan.config.block_q).astype(self.plan.problem.dtype)
            self.hand_over_ds(parity, none)
        self.block.free.arrive(slot)

    def slots(self, j):
        """Of Q, the same made anew for dO, and of dS'."""
        slot = lax.rem(j, jnp.int32(self.plan.config.stages))
        return slot, slot + fresh_zero(), lax.rem(j, jnp.int32(2))

    def slot_anew(self, j):
        return lax.rem(j + fresh_zero(), jnp.int32(self.plan.config.stages))

    # --- what arrives ---

    def keep_rows(self, ref, columns: Columns, first, end) -> None:
        """Zeroes other rows of a tile: 0 times what they hold may be NaN."""
        self.block.unseen_rows.keep_rows(ref, first, end, self.number, columns.box_width)

    def await_keys(self, index) -> None:
        block, plan = self.block, self.plan
        slot = block.k_slot(index)
        plgpu.barrier_wait(block.k_full.at[slot])
        plgpu.barrier_wait(block.v_full)
        if not plan.ignores_unseen:
            return
        first, end = block.walk.counting_keys(block.walk.locate(index))

        @pl.when((first > 0) | (end < BLOCK_KV))
        def _():
            self.keep_rows(block.k_smem.at[slot], plan.key_columns, first, end)
            self.keep_rows(block.v_smem.at[0], plan.value_columns, first, end)

    def await_query(self, slot, mask, j) -> None:
        block, plan = self.block, self.plan
        plgpu.barrier_wait(block.q_full.at[slot])
        if mask is None or not plan.ignores_unseen:
            return
        plgpu.barrier_wait(block.o_full.at[slot])  # while no product is open
        first, end, is_cut = mask.counting_queries(j)

        @pl.when(is_cut)
        def _():
            self.keep_rows(block.q_smem.at[slot], plan.key_columns, first, end)
            self.keep_rows(block.o_smem.at[slot], plan.value_columns, first, end)

    def await_d_out(self, slot, mask, j) -> None:
        if mask is None or not self.plan.ignores_unseen:
            plgpu.barrier_wait(self.block.o_full.at[slot])
        else:  # as it has been waited for; the code stays where it is all the same
            code_fence(j)

    def load_start(self, slot):
        return load_per_query(self.block.start_smem.at[slot, 0], KEYS)

    def load_query_words(self, slot):
        return load_words(self.block.start_smem.at[slot, self.plan.words_row])

    # --- products and weights ---

    def issue_logits(self, slot, index) -> None:
        block, plan = self.block, self.plan
        # What a cap is for must come alone.
        alone = plan.problem.has_cap
        self.s_acc[...] = zero_tile(KEYS, plan.config.block_q) if alone else self.load_start(slot)
        k = block.k_smem.at[block.k_slot(index) + fresh_zero(), :, self.own]
        plan.key_columns.contract(self.s_acc, k, block.q_smem.at[slot])

    def issue_d_weights(self, slot) -> None:
        block, plan = self.block, self.plan
        self.dp_acc[...] = zero_tile(KEYS, plan.config.block_q)
        v = block.v_smem.at[fresh_zero(), :, self.own]
        plan.value_columns.contract(self.dp_acc, v, block.o_smem.at[slot])

    def load_weights(self, loaded, j, *, far, wait_n):
        """Weights, of rows far from 0 what `shared` makes weights of if it is due."""
        block, problem = self.block, self.plan.problem
        products = plgpu.wgmma_accumulator_load(self.s_acc, wait_n=wait_n)
        if far and problem.has_marks:
            start = block.start_smem.at[self.slot_anew(j), 0]
            return weights_by_key(products, loaded, problem, start, block.far)
        logits, to_log2 = biased(products, problem, loaded)
        return jnp.exp2(logits * to_log2)

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

    def load_capped_weights(self, loaded, mask, j, equal_ids, slot, key_words, *, wait_n):
        """Weights, the operand of dV, and times the derivative of the cap, for dS'."""
        plan = self.plan
        products = plgpu.wgmma_accumulator_load(self.s_acc, wait_n=wait_n)
        logits, _ = soft_cap.capped(products, loaded, plan.problem, branches=plan.cap_branches)
        logits = masked(logits, mask, j, equal_ids, loaded, soft_cap.UNSEEN)
        words = None
        if plan.problem.has_dropout:
            query_words = self.load_query_words(slot)
            words = spread(key_words, logits.shape), per_query(query_words, KEYS)
        return soft_cap.capped_weights(logits, self.load_start(slot), plan.problem, words)

    def load_ds(self, weights, slot):
        block, plan = self.block, self.plan
        d_weights = plgpu.wgmma_accumulator_load(self.dp_acc, wait_n=plan.value_columns.tiles)
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
        plgpu.wgmma(
            self.dq_acc,
            block.ds_smem.at[parity, self.dq_row].transpose((1, 0)),
            self.plan.key_columns.part(k, self.dq_columns),
        )

    # --- what is handed over ---

    def hand_over_dq(self) -> None:
        block = self.block
        dq = plgpu.wgmma_accumulator_load(self.dq_acc, wait_n=0)
        block.sent.wait(self.number)
        store_fragment(fragment_of(block.dq_smem.at[self.number], self.dq_columns), dq)
        fence_async_shared()
        block.dq_staged.arrive(self.number)

    def hand_over_ds(self, parity, ds) -> None:
        # Two buffers: the other may still read what was stored one step ago.
        block, plan, box_width = self.block, self.plan, self.plan.key_columns.box_width
        for n, first in enumerate(range(0, plan.config.block_q, DQ_TILE)):
            stored = block.ds_smem.at[parity, n, self.own]
            put_tile(stored, ds[:, first : first + DQ_TILE], box_width, anew=plan.crowded)
        fence_async_shared()
        block.ds_stored.arrive(2 * parity + self.number)

    def hand_over_gradients(self, parity, index) -> None:
        """Stages dK where K was, and dV where dS' was, once the other has read them."""
        block, plan, problem = self.block, self.plan, self.plan.problem
        dk_factor = problem.scale * problem.d_logit_unit
        dk = plgpu.wgmma_accumulator_load(self.dk_acc, wait_n=0) * dk_factor
        dv = plgpu.wgmma_accumulator_load(self.dv_acc, wait_n=0)
        if plan.ignores_unseen:  # 0 times NaN of a query that counts is none of theirs
            first, end = block.walk.counting_keys(block.walk.locate(index))
            row = fresh_rows() + KEYS * self.number
            seen = (row >= first) & (row < end)
            dk, dv = (jnp.where(spread(seen, x.shape), x, 0.0) for x in (dk, dv))
        if plan.problem.has_dropout:
            dv *= 1.0 / problem.kept_share
        self.dk_acc[...] = zero_tile(KEYS, plan.key_columns.size)
        self.dv_acc[...] = zero_tile(KEYS, plan.value_columns.size)
        block.ds_stored.arrive(2 * parity + self.number)
        block.ds_stored.wait(2 * parity + (1 - self.number))
        dk = dk.astype(problem.dtype)
        k = block.k_smem.at[block.k_slot(index) + fresh_zero(), :, self.own]
        plan.key_columns.put(k, dk, anew=True)  # or addresses are kept over all steps
        for n, columns in enumerate(plan.staged_values):
            d_value = dv[:, columns.first : columns.first + columns.size].astype(problem.dtype)
            staging = block.value_staging(n + fresh_zero(), self.number)
            columns.put(staging, d_value, anew=True)
        fence_async_shared()
        block.gradients_staged.arrive(0)


# --- the producer ---------------------------------------------------------------------------------


def _produce(block: _ThreadBlock) -> None:
    plgpu.set_max_registers(block.plan.registers[1], action="decrease")
    _Producer(block).walk()


class _Producer:
    """Loads what each step needs, and sends what consumers stage."""

    def __init__(self, block: _ThreadBlock):
        self.block, self.plan = block, block.plan

    def walk(self) -> None:
        block, zero = self.block, jnp.int32(0)
        if block.drawn:
            block.drawn.draw_first()
            self.load_key(block.first_index())
        else:
            for n in range(K_SLOTS):
                self.load_key(block.first_index() - n)
        self.load_value(block.first_index())
        # Step, index and number of its tile, and step in the tile.
        following = zero, block.first_index(), block.walk.number(block.first_index()), zero
        following = lax.fori_loop(
            zero,
            self.plan.config.stages,
            lambda _, carry: self.load_step(carry, block.first_index()),
            following,
        )
        self.let_stage()
        if self.plan.with_query_gradient:
            self.let_start(zero)
        block.over_tiles(self.whole_tile, following)
        plgpu.wait_smem_to_gmem(0)

    def whole_tile(self, index, following):
        """Loads a step ahead for each of the tile, and sends its gradients."""
        block, plan, walk = self.block, self.plan, self.block.walk
        self.await_zeros(index)
        self.zero_ahead(index)

        def one_step(t, following):
            if plan.with_query_gradient:
                self.add_dq(index, number, t - 1)
                self.let_stage()
            return self.load_step(following, index)

        number = walk.number(index)
        steps = walk.steps(index)
        following = lax.fori_loop(jnp.int32(0), steps, one_step, following)
        block.v_free.wait(0)
        self.load_value(block.after(index))
        if plan.with_query_gradient:
            if plan.problem.has_dropout:  # read anew, or the producer spills
                steps = walk.steps(index + fresh_zero())
            self.add_dq(index, walk.number(index), steps - 1)
        self.send_gradients(index)
        self.let_stage()
        if block.drawn:  # if it is drawn by now, else when it is
            next_but_one = index + K_SLOTS
            pl.when(following[1] >= next_but_one)(lambda: self.load_key(next_but_one))
        else:
            self.load_key(index - K_SLOTS)
        if plan.with_query_gradient:
            self.let_start(following[0] - plan.config.stages)
        return following

    def place_of(self, index, number):
        """What `walk.locate` gives, of the number at hand or read anew."""
        if self.plan.keeps_numbers:
            return self.block.tiles.locate(number)
        return self.block.walk.locate(
            index + fresh_zero() if self.plan.problem.has_dropout else index
        )

    # --- loads ---

    def load_step(self, carry, in_work):
        """Loads a block of Q and one of dO, and their row statistics; returns the next.

        After the last step what the index locates is no tile, and not loaded.

        Args:
          in_work: index of the tile that consumers work on.
        """
        block, plan, walk, drawn = self.block, self.plan, self.block.walk, self.block.drawn
        problem, block_q, stages = plan.problem, plan.config.block_q, plan.config.stages
        j, index, number, t = carry
        place = _, kv_head_of_all = self.place_of(index, number)
        there = number < block.tiles.count if drawn else index >= 0
        batch, kv_head = div_rem(kv_head_of_all, problem.kv_heads)
        query_block, member = walk.step_of(place, t)
        rows = pl.ds(query_block * block_q, block_q)
        head = kv_head * problem.group + member
        slot = lax.rem(j, jnp.int32(stages))

        def is_last():  # made anew: kept it would take a register
            return (t + 1 == walk.steps_of(self.place_of(index, number))) & there

        if drawn:
            # Late, as who is free first should have the next tile, but before the last step of this
            # one is loaded, which tells consumers that the entry is there.
            @pl.when(is_last())
            def _draw_next():
                drawn.draw(index + 1)
                # Else it is loaded where the tile in work ends.
                pl.when(index == in_work)(lambda: self.load_key(index + 1))

        @pl.when(there)
        def _():
            pl.when(j >= stages)(lambda: block.free.wait(slot))
            self.load_rows((batch, rows, head), slot)
            if plan.prefetches:  # or the first to add waits for zeros from beyond L2
                is_first = walk.is_first_to_see(place, query_block)
                for _, target in self.dq_parts(place, query_block, member):
                    prefetch(target, is_first)

        zero, after = jnp.int32(0), block.after
        following = lax.cond(
            is_last(),
            lambda: (after(index), walk.number(after(index)), zero),
            lambda: (index, number, t + 1),
        )
        return j + 1, *following

    def load_rows(self, place, slot) -> None:
        """Rows of Q and dO of a batch entry and head, and their statistics."""
        block, plan = self.block, self.plan
        batch, rows, head = place
        for ref, buffer, columns, row_ref, row_buffer, full in (
            (block.q, block.q_smem, plan.key_columns, block.start, block.start_smem, block.q_full),
            (
                block.d_out, block.o_smem, plan.value_columns, block.delta, block.delta_smem,
                block.o_full,
            ),
        ):  # fmt: skip
            columns.load(ref.at[batch, rows, head], buffer.at[slot], full.at[slot])
            if row_buffer is None:  # delta comes with start
                continue
            part = (pl.ds(0, plan.together), rows) if row_ref is block.start else (rows,)
            row_source = row_ref.at[batch, head, *part]
            plgpu.copy_gmem_to_smem(row_source, row_buffer.at[slot], full.at[slot])

    def load_keys(self, ref, buffer, columns: Columns, full, index) -> None:
        tile, kv_head_of_all = self.block.walk.locate(index)
        batch, kv_head = div_rem(kv_head_of_all, self.plan.problem.kv_heads)
        source = ref.at[batch, pl.ds(tile * BLOCK_KV, BLOCK_KV), kv_head]
        columns.load(source, buffer, full)

    def load_key(self, index) -> None:
        block, slot = self.block, self.block.k_slot(index)
        to = block.k_smem.at[slot], self.plan.key_columns, block.k_full.at[slot]
        pl.when(block.is_tile(index))(lambda: self.load_keys(block.k, *to, index))

    def load_value(self, index) -> None:
        block = self.block
        to = block.v_smem.at[0], self.plan.value_columns, block.v_full
        pl.when(block.is_tile(index))(lambda: self.load_keys(block.v, *to, index))

    # --- zeros of dQ ---

    def await_zeros(self, index) -> None:
        """Waits until what a tile adds to is zero."""
        section, zeroed = self.plan.zeroed_ahead
        if not zeroed:
            return
        walk, tiles = self.block.walk, self.block.tiles
        _, kv_head_of_all = walk.locate(index)

        @pl.when((kv_head_of_all >= zeroed.start) & (kv_head_of_all < zeroed.stop))
        def _():
            counter = walk.prepared_tiles(lax.div(kv_head_of_all, jnp.int32(section)))
            await_count(counter, section * tiles.per_head)

    def zero_ahead(self, index) -> None:
        """Zeros a tile's part of dQ of a head of the section after its own."""
        section, zeroed = self.plan.zeroed_ahead
        if not zeroed:
            return
        block, plan, tiles = self.block, self.plan, self.block.tiles
        number = block.walk.number(index) + section * tiles.per_head
        kv_head_of_all, part = div_rem(number, tiles.per_head)

        @pl.when(kv_head_of_all < zeroed.stop)
        def _():
            of_kv_head = plan.dq_tiles_of_kv_head
            size = -(-of_kv_head // tiles.per_head)
            rows = pl.ds(0, fragment_shape(max(plan.dq.columns_of_tiles))[0])

            @pl.loop(part * size, jnp.minimum((part + 1) * size, of_kv_head))
            def _zero(n):
                first = kv_head_of_all * of_kv_head
                zero_fragment(block.dq.at[first + n, rows])

            of_section = lax.div(kv_head_of_all, jnp.int32(section))
            add_when_stored(block.walk.prepared_tiles(of_section))

    # --- what is sent ---

    def dq_parts(self, place, query_block, member) -> Iterator[tuple[Any, Any]]:
        """Where dQ of each consumer is staged in a step, and what it is added to."""
        block, tiles = self.block, self.block.tiles
        _, kv_head_of_all = place
        head_of_all = kv_head_of_all * self.plan.problem.group + member
        first = (head_of_all * tiles.query_blocks + query_block) * CONSUMERS
        for consumer in range(CONSUMERS):
            _, columns = block.dq_place(consumer)
            source = fragment_of(block.dq_smem.at[consumer], columns)
            yield source, fragment_of(block.dq.at[first + consumer], columns)

    def add_dq(self, index, number, t) -> None:
        """Adds dQ of step t of a tile, staged in the next one; none for t = -1."""
        place = self.place_of(index, number)
        parts = self.dq_parts(place, *self.block.walk.step_of(place, t))
        for consumer, (source, target) in enumerate(parts):
            self.block.dq_staged.wait(consumer)
            add = functools.partial(plgpu.copy_smem_to_gmem, source, target)
            pl.when(t >= 0)(functools.partial(add, reduction_op="add"))

    def send_gradients(self, index) -> None:
        block, plan = self.block, self.plan
        tile, kv_head_of_all = block.walk.locate(index)
        batch, kv_head = div_rem(kv_head_of_all, plan.problem.kv_heads)
        block.gradients_staged.wait(0)
        for consumer in range(CONSUMERS):
            own = pl.ds(consumer * KEYS, KEYS)
            rows = pl.ds(tile * BLOCK_KV + consumer * KEYS, KEYS)
            source = block.k_smem.at[block.k_slot(index), :, own]
            plan.key_columns.store(source, block.dk.at[batch, rows, kv_head])
            for n, columns in enumerate(plan.staged_values):
                staging = block.value_staging(n, consumer)
                columns.store(staging, block.dv.at[batch, rows, kv_head])

    def let_stage(self) -> None:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for consumer in range(CONSUMERS):
            self.block.sent.arrive(consumer)

    def let_start(self, j) -> None:
        """The first step of a tile finds dS' of a step before, which is none."""
        for consumer in range(CONSUMERS):
            self.block.ds_stored.arrive(2 * lax.rem(j + 1, jnp.int32(2)) + consumer)
