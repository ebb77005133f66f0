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
    producer   adds dQ to global memory in float32, or stores   TMA reduction

delta = rowsum(dO * O) - dLSE comes from `row_statistics.py`. `cast_dq.py` does what is left of dQ.
For deterministic gradients of many keys dQ comes from `backward_query.py`, and this kernel gives
dK and dV alone, as `backward_key.py` does at widths above 128.

Where one tile has all keys of its head, dQ of a step is whole. It leaves in the input dtype, as
dK does, and there is nothing to add to or to cast. Where a head has two, each stores dQ of
its own, in float32, and the cast adds the two.

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
-LSE / scale, so that their weights are 0. Keys beyond the end are masked, be it one that is known
at run time only (`Problem.has_lengths`): a tile without keys takes one query block of each head, or
all if the head has no other tile. With such lengths, or intervals, alone
(`Problem.backward_ignores_unseen`) what does not count may be NaN: consumers zero, in shared
memory, the rows of K and V that no query sees, and with intervals in steps with a mask those of Q
and dO that see no key of the tile. What they get for such rows is 0, whatever is NaN in others. Of
a dense mask's lists they zero rows of K and V alone.

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

from pallas_kernels import backward_zeros as zeros
from pallas_kernels.backward_block import ThreadBlock
from pallas_kernels.backward_consumer import consume
from pallas_kernels.backward_dq import fragment_of
from pallas_kernels.backward_plan import BLOCK_KV, CONSUMERS, K_SLOTS, KEYS, Plan
from pallas_kernels.columns import Columns
from pallas_kernels.config import DQ_TILE
from pallas_kernels.hopper import Ring
from pallas_kernels.key_tiles_kernel import gradient_kernel
from pallas_kernels.ptx.arithmetic import div_rem
from pallas_kernels.ptx.compiler import code_fence, fresh_zero, own_warpgroup
from pallas_kernels.ptx.loads import prefetch


@functools.lru_cache
def build(plan: Plan, interpret: bool):
    """The main kernel, or without dQ one that gives dK and dV alone.

    Where the queries of tiles are dealt out, all or the last, it gives dK and dV of each share,
    in float32, as `key_tiles_shares.gradients_of_tiles` has them.
    """

    def attention_backward(*refs, **scratch):
        block = ThreadBlock(plan, refs, **scratch)
        # One copy of the code a consumer: addresses become constants, which saves registers.
        consumers = [functools.partial(consume, block, number) for number in range(CONSUMERS)]
        roles: list[Callable[[], None]] = [*consumers, functools.partial(_produce, block)]
        if plan.switches_roles:
            lax.switch(lax.axis_index("warpgroup"), roles)
        else:
            for number, role in enumerate(roles):
                pl.when(own_warpgroup() == number)(role)

    return gradient_kernel(
        plan.tiles,
        attention_backward,
        plan.results(),
        plan.config.thread_blocks,
        plan.scratch(interpret),
        from_end=True,
        dealing=plan.dealing,
    )


# --- the producer ---------------------------------------------------------------------------------


def _produce(block: ThreadBlock) -> None:
    plgpu.set_max_registers(block.plan.registers[1], action="decrease")
    _Producer(block).walk()


class _Producer:
    """Loads what each step needs, and sends what consumers stage."""

    def __init__(self, block: ThreadBlock):
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
        # Step, index and number of its tile, and step in the tile, as the whole tile counts them.
        first = block.first_index(), block.walk.number(block.first_index())
        following = zero, *first, self.first_step(*first)
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
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def whole_tile(self, index, following):
        """Loads a step ahead for each of the tile, and sends its gradients."""
        block, plan, walk = self.block, self.plan, self.block.walk
        zeros.zero_ahead(block, index)  # first, or sections would wait for one another in a row
        zeros.await_own(block, index)

        def one_step(t, following):
            if plan.with_query_gradient:
                self.send_dq(index, number, t - 1, first)
                self.let_stage()
            return self.load_step(following, index)

        number = walk.number(index)
        first = self.first_step(index, number)
        end = walk.end_step(walk.locate(index))
        following = lax.fori_loop(first, end, one_step, following)
        block.v_free.wait(0)
        self.load_value(block.after(index))
        if plan.with_query_gradient:
            if plan.keeps_nothing:
                end = walk.end_step(walk.locate(index + fresh_zero()))
            self.send_dq(index, walk.number(index), end - 1, first)
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

    def first_step(self, index, number):
        """Of a tile, as the whole tile counts them."""
        if not self.block.tiles.has_parts:
            return jnp.int32(0)
        return self.block.walk.seeing(self.place_of(index, number), 3)

    def place_of(self, index, number):
        """What `walk.locate` gives, of the number at hand or read anew."""
        if self.plan.keeps_numbers:
            return self.block.tiles.locate(number)
        return self.block.walk.locate(index + fresh_zero() if self.plan.keeps_nothing else index)

    # --- loads ---

    def load_step(self, carry, in_work):
        """Loads a block of Q and one of dO, and their row statistics; returns the next.

        After the last step what the index locates is no tile, and not loaded.

        Args:
          in_work: index of the tile that consumers work on.
        """
        block, plan, walk, drawn = self.block, self.plan, self.block.walk, self.block.drawn
        problem, block_q = plan.problem, plan.config.block_q
        j, index, number, t = carry
        place = _, kv_head_of_all = self.place_of(index, number)
        there = number < block.tiles.numbers if drawn else index >= 0
        batch, kv_head = div_rem(kv_head_of_all, problem.kv_heads)
        query_block, member = walk.step_of_tile(place, t)
        rows = pl.ds(query_block * block_q, block_q)
        head = kv_head * problem.group + member
        slot = block.queries.slot(j)

        def is_last():  # made anew: kept it would take a register
            return (t + 1 == walk.end_step(self.place_of(index, number))) & there

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
            block.queries.await_free(j, slot)
            if plan.fences_loads:
                code_fence(j)
            self.load_rows((batch, rows, head), slot)
            if plan.prefetches:  # or the first to add waits for zeros from beyond L2
                is_first = walk.is_first_to_see(place, query_block)
                for _, target in self.dq_parts(place, query_block, member):
                    prefetch(target, is_first)

        after = block.after

        def first_of_next():
            of_next = after(index), walk.number(after(index))
            return *of_next, self.first_step(*of_next)

        following = lax.cond(is_last(), first_of_next, lambda: (index, number, t + 1))
        return j + 1, *following

    def load_rows(self, place, slot) -> None:
        """Rows of Q and dO of a batch entry and head, and their statistics."""
        block, (batch, rows, head) = self.block, place

        def load(ring: Ring, ref, statistics, buffer):
            ring.load(slot, ref.at[batch, rows, head])
            if buffer is not None:  # else delta comes with start
                plgpu.copy_gmem_to_smem(statistics, buffer.at[slot], ring.full.at[slot])

        start = block.start.at[batch, head, pl.ds(0, self.plan.together), rows]
        load(block.queries, block.q, start, block.start_smem)
        load(block.d_outs, block.d_out, block.delta.at[batch, head, rows], block.delta_smem)

    def load_keys(self, ref, buffer, columns: Columns, full, index) -> None:
        batch, tile, kv_head = self.block.walk.keys_of(self.block.walk.locate(index))
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

    # --- what is sent ---

    def dq_parts(self, place, query_block, member) -> Iterator[tuple[Any, Any]]:
        """Where dQ of each consumer is staged in a step, and what it is added to, or stored to."""
        block, tiles = self.block, self.block.tiles
        _, kv_head_of_all = place
        head_of_all = kv_head_of_all * self.plan.problem.group + member
        first = (head_of_all * tiles.query_blocks + query_block) * CONSUMERS
        if self.plan.dq_is_apart:
            _, tile, _ = block.walk.keys_of(place)
            first = first + tile * self.plan.dq_tiles
        for consumer in range(CONSUMERS):
            _, columns = self.plan.dq.place(consumer)
            source = fragment_of(block.dq_smem.at[consumer], columns)
            yield source, fragment_of(block.dq.at[first + consumer], columns)

    def send_dq(self, index, number, t, first) -> None:
        """Adds dQ of step t of a tile, staged in the next one, or stores it; none before first."""
        place = self.place_of(index, number)
        query_block, member = self.block.walk.step_of_tile(place, t)
        if self.plan.dq_is_whole:
            self.store_dq(place, query_block, member, t >= first)
            return
        for consumer, (source, target) in enumerate(self.dq_parts(place, query_block, member)):
            self.block.dq_staged.wait(consumer)
            reduction_op = "add" if self.plan.sums_dq else None
            send = functools.partial(plgpu.copy_smem_to_gmem, source, target)
            pl.when(t >= first)(functools.partial(send, reduction_op=reduction_op))

    def store_dq(self, place, query_block, member, there) -> None:
        block, problem = self.block, self.plan.problem
        _, kv_head_of_all = place
        batch, kv_head = div_rem(kv_head_of_all, problem.kv_heads)
        head = member + kv_head * problem.group
        for consumer in range(CONSUMERS):
            row, _ = self.plan.dq.place(consumer)
            rows = pl.ds(query_block * self.plan.config.block_q + row * DQ_TILE, DQ_TILE)
            block.dq_staged.wait(consumer)
            store = functools.partial(
                self.plan.dq.whole_part(consumer).store, block.dq_smem[consumer]
            )
            pl.when(there)(functools.partial(store, block.dq.at[batch, rows, head]))

    def send_gradients(self, index) -> None:
        block, plan = self.block, self.plan
        tile, kv_head_of_all = block.walk.locate(index)
        batch, kv_head = div_rem(kv_head_of_all, plan.problem.kv_heads)
        block.gradients_staged.wait(0)
        if plan.tiles.all_are_shares:  # consumers have stored them
            return

        @pl.when(tile < plan.tiles.whole_per_head if plan.tiles.are_shared else True)
        def _():
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
