"""A thread block of decoding: its walk over its part of the keys."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import online_softmax
from pallas_kernels.decode_config import BLOCK_KV
from pallas_kernels.decode_plan import Plan
from pallas_kernels.decode_products import Float8Products, Products, spread
from pallas_kernels.problem import LOG2E
from pallas_kernels.ptx.arithmetic import column_maxima, column_sums, div_rem
from pallas_kernels.ptx.compiler import fresh_zero
from pallas_kernels.ptx.float8_parts import store_queries_float8
from pallas_kernels.ptx.mlir import zero_tile
from pallas_kernels.ptx.operands import keep_operand_rows
from pallas_kernels.ptx.queries import load_queries, store_grouped, store_queries
from pallas_kernels.ptx.stores import store_columns
from pallas_kernels.ptx.votes import vote_any
from pallas_kernels.transposed import QUERIES


class _Cache(NamedTuple):
    """Keys or values: in global memory; buffers for copies, and for products; full barriers."""

    ref: Any
    copies: Any
    buffers: Any
    full: Any


class ThreadBlock:
    """A tile of rows of one key head, and a part of its keys.

    Attributes:
      plan: of the kernel.
      q, out, lse: refs in global memory; given, those of optional operands by name.
      keys, values: of the cache.
      batch, split, head, head_of_all, tile: which tile and part of keys it has.
      steps: key blocks of the part, from block `begin` on.
      first_key, end_key: what rows of the sequence see at most.
      first_position: of its first token; position, of each row's token.
    """

    def __init__(
        self, plan: Plan, refs, *, q_smem, k_smem, v_smem, p_smem, reduced_smem, k_full, v_full,
        turned_smem=None, units_smem=None,
    ):  # fmt: skip
        p = plan.problem
        self.plan = plan
        self.q_smem, self.p_smem, self.reduced_smem = q_smem, p_smem, reduced_smem
        self.turned_smem, self.units_smem = turned_smem, units_smem
        self.lengths, self.q, k, v, *optional, self.out, self.lse = refs
        self.given = dict(zip(plan.optional, optional, strict=True))
        k_copies, k_smem = k_smem if plan.in_boxes else (k_smem, k_smem)
        v_copies, v_smem = v_smem if plan.in_boxes else (v_smem, v_smem)
        self.keys = _Cache(k, k_copies, k_smem, k_full)
        self.values = _Cache(v, v_copies, v_smem, v_full)
        rest, self.tile = div_rem(lax.axis_index("block"), p.row_tiles)
        rest, self.head = div_rem(rest, p.kv_heads)
        self.batch, self.split = div_rem(rest, plan.splits)
        self.head_of_all = self.batch * p.kv_heads + self.head
        self.heads = pl.ds(self.head * p.group, p.group)

    def run(self) -> None:
        plan, p = self.plan, self.plan.problem
        # Before TMA fills the memory's queues.
        queries = load_queries(self.q.at[self.batch, :, self.heads], self.first_row, plan.rows)
        length = self.lengths[self.batch]
        self.begin: Any = jnp.int32(0)
        if plan.early:
            self.first_loads(plan.blocks_of_cache, lambda step: ())
        self.find_keys(length)
        if not plan.early:
            self.first_loads(self.steps, self.pages_of)
        if plan.is_float8:
            store_queries_float8(self.q_smem, self.units_smem, queries, p.dtype)
        else:
            store_queries(self.q_smem, queries)
        plgpu.commit_smem()
        self.position = self.positions()
        scale = self.given.get("key_scale")
        self.key_scale = None if scale is None else scale[self.head]
        pl.run_scoped(
            self.attend,
            [plgpu.ACC((plan.part, plan.columns), jnp.float32)]
            * (1 if plan.is_float8 else plan.boxes),
            plgpu.ACC((BLOCK_KV, plan.columns), jnp.float32),
        )

    @property
    def first_row(self):
        """Of the tile."""
        return self.tile * self.plan.rows

    def find_keys(self, length) -> None:
        """Which keys count, and which of them are this thread block's."""
        p, splits = self.plan.problem, self.plan.splits
        self.end_key = jnp.clip(length, 0, p.capacity)
        self.first_position = length - p.tokens
        self.first_key: Any = jnp.int32(0)
        if p.window is not None:
            self.first_key = jnp.clip(self.first_position - p.window, 0, self.end_key)
        first_block = lax.div(self.first_key, jnp.int32(BLOCK_KV))
        end_block = lax.div(self.end_key + (BLOCK_KV - 1), jnp.int32(BLOCK_KV))
        share = lax.div(end_block - first_block + (splits - 1), jnp.int32(splits))
        self.begin = first_block + self.split * share
        self.steps = jnp.clip(end_block - self.begin, 0, share)

    def positions(self):
        """Of each row's token."""
        p, rows = self.plan.problem, self.plan.rows
        if p.tokens == 1:
            return self.first_position
        row = plgpu.broadcasted_iota(jnp.int32, (rows,), 0, layout=QUERIES) + self.first_row
        group = plgpu.layout_cast(jnp.full((rows,), p.group, jnp.int32), QUERIES)
        # Rows that are none are of the last token: they see nothing that does not count.
        return jnp.minimum(lax.div(row, group), p.tokens - 1) + self.first_position

    # --- loads ---

    def slot(self, step):
        return lax.rem(step, jnp.int32(self.plan.stages))

    def load(self, step, end, pages, cache: _Cache) -> None:
        """Loads the key block of a step, if it comes before the end."""
        plan, page_size = self.plan, self.plan.problem.page_size

        @pl.when(step < end)
        def _():
            first, buffer = (self.begin + step) * BLOCK_KV, cache.copies.at[self.slot(step)]
            full = lambda: cache.full.at[self.slot(step)]
            if plan.in_boxes:
                for n in range(plan.boxes):
                    rows, columns = pl.ds(first, BLOCK_KV), pl.ds(n * plan.box, plan.box)
                    source = cache.ref.at[self.batch, rows, self.head, columns]
                    plgpu.copy_gmem_to_smem(source, buffer.at[n], full())
                return
            for n in range(plan.copies):
                if page_size is None:
                    source = cache.ref.at[self.batch, pl.ds(first, BLOCK_KV), self.head]
                else:
                    row = lax.rem(first + n * plan.rows_of_copy, jnp.int32(page_size))
                    source = cache.ref.at[pages[n], pl.ds(row, plan.rows_of_copy), self.head]
                target = buffer.at[pl.ds(n * plan.rows_of_copy, plan.rows_of_copy)]
                plgpu.copy_gmem_to_smem(source, target, full())

    def first_loads(self, end, pages_of: Callable) -> None:
        for step in map(jnp.int32, range(self.plan.stages)):
            pages = pages_of(step)
            self.load(step, end, pages, self.keys)
            self.load(step, end, pages, self.values)

    def pages_of(self, step) -> tuple:
        """The page of each copy of a key block; looked up a step before they are needed."""
        plan, page_size = self.plan, self.plan.problem.page_size
        if page_size is None:
            return ()
        first = lambda n: (self.begin + step) * BLOCK_KV + n * plan.rows_of_copy
        firsts = [first(n) for n in range(plan.copies)]
        # A page that holds nothing that counts may have any number.
        keys = [jnp.maximum(jnp.clip(x, self.first_key, self.end_key - 1), 0) for x in firsts]
        table = self.given["page_table"]
        pages = [table[self.batch, div_rem(key, page_size)[0]] for key in keys]
        return tuple(jnp.clip(page, 0, self.keys.ref.shape[0] - 1) for page in pages)

    def boxes_of(self, cache: _Cache, slot) -> list:
        """What a slot has for products."""
        if not self.plan.in_boxes:
            return [cache.buffers.at[slot]]
        return [cache.buffers.at[slot, n] for n in range(self.plan.boxes)]

    # --- logits ---

    def capped(self, logits):
        """What `factor` brings to log2 units."""
        p = self.plan.problem
        if p.soft_cap is None:
            return logits
        # tanh(x) = 1 - 2 / (1 + exp(2x)), as the tanh of the hardware is right to 2^-11.
        powers = jnp.exp2(logits * (2 * LOG2E * p.scale / p.soft_cap))
        return p.soft_cap * LOG2E * (1.0 - 2.0 / (1.0 + powers))

    def masked(self, logits, first):
        """Hides keys from the rows that do not see them."""
        p = self.plan.problem

        def hidden():
            key = plgpu.broadcasted_iota(jnp.int32, logits.shape, 0, layout=plgpu.Layout.WGMMA)
            # Not kept in registers from step to step, of which float8 has none to spare.
            own = self.position + fresh_zero() if self.plan.is_float8 else self.position
            last = jnp.minimum(own, p.capacity - 1) - first
            seen = key <= spread(last, logits.shape)
            if p.window is not None:
                seen &= key >= spread(own - p.window - first, logits.shape)
            return jnp.where(seen, logits, -jnp.inf)

        is_edge = first + BLOCK_KV > jnp.minimum(self.first_position + 1, p.capacity)
        if p.window is not None:
            is_edge |= first < self.first_position + p.tokens - 1 - p.window
        return lax.cond(is_edge, hidden, lambda: logits)

    # --- steps ---

    def attend(self, o_accs, s_acc) -> None:
        plan = self.plan
        operands = self.q_smem, self.p_smem, s_acc, o_accs
        self.products = Products(*operands)
        if plan.is_float8:
            self.products = Float8Products(*operands, self.units_smem, self.turned_smem)
        start = *nothing_seen(plan.rows), self.products.no_output()
        reference, sums, output = self.walk(self.steps, start, plan.in_doubt)
        if plan.early:
            self.await_loads_of_no_use()
        total = column_sums(sums, self.reduced_smem)
        if not plan.in_doubt:
            again = vote_any(jnp.where(total < 2.0**plan.allowed.limit, 0, 1))
            pl.when(again)(lambda: self.first_loads(self.steps, self.pages_of))
            end = jnp.where(again, self.steps, 0)
            risen, sums, _ = self.walk(end, (*nothing_seen(plan.rows), []), True)
            reference, total = lax.cond(
                again,
                lambda: (risen, column_sums(sums, self.reduced_smem)),
                lambda: (reference, total),
            )
        self.store(reference, total, output)

    def walk(self, end, state, in_doubt: bool):
        """All steps before the end.

        Args:
          state: reference, sums and output.
          in_doubt: the reference may have to rise.
        """
        step = functools.partial(self.key_step, end=end, in_doubt=in_doubt)
        carry = *state, self.pages_of(jnp.int32(self.plan.stages))
        return lax.fori_loop(jnp.int32(0), end, step, carry)[:3]

    def key_step(self, step, carry, *, end, in_doubt: bool):
        plan, allowed, products = self.plan, self.plan.allowed, self.products
        reference, sums, output, pages = carry
        first = (self.begin + step) * BLOCK_KV
        slot = self.slot(step)
        plgpu.barrier_wait(self.keys.full.at[slot])
        load_next = lambda cache: self.load(step + plan.stages, end, pages, cache)
        logits = products.logits(self.boxes_of(self.keys, slot), lambda: load_next(self.keys))
        if self.key_scale is not None:
            logits *= spread(self.key_scale, logits.shape)
        logits = self.masked(self.capped(logits), first)

        def risen():
            maximum = column_maxima(logits, self.reduced_smem) * plan.factor
            return online_softmax.risen(reference, maximum, allowed)

        if in_doubt:
            before, reference = reference, risen()
            correction = jnp.exp2(before - reference)
            sums *= spread(correction, sums.shape)
            output = products.scaled(output, correction, step == 0)
        else:
            reference = lax.cond(step == 0, risen, lambda: reference)
        exponents = logits * plan.factor - spread(reference, logits.shape)
        if in_doubt:
            bounds = online_softmax.bounds_of(reference, allowed)
            exponents = jnp.minimum(exponents, spread(bounds, logits.shape))
        weights = jnp.exp2(exponents)
        sums += weights
        products.put_weights(weights)
        plgpu.barrier_wait(self.values.full.at[slot])
        block = self.boxes_of(self.values, slot)
        self.zero_rows_of_no_key(block, first)
        output = products.add(output, block, lambda: load_next(self.values))
        return reference, sums, output, self.pages_of(step + 1 + plan.stages)

    def zero_rows_of_no_key(self, block: list, first) -> None:
        """Of values: 0 times what stands there may be NaN."""

        @pl.when((first < self.first_key) | (first + BLOCK_KV > self.end_key))
        def _():
            for part in block:
                keep_operand_rows(part, self.first_key - first, self.end_key - first)
            if self.plan.is_float8:
                plgpu.commit_smem()  # before other threads turn it

    def await_loads_of_no_use(self) -> None:
        """Nothing may be on its way at the end."""
        for step in range(min(self.plan.stages, self.plan.blocks_of_cache)):

            @pl.when(step >= self.steps)
            def _(step=step):
                plgpu.barrier_wait(self.keys.full.at[step])
                plgpu.barrier_wait(self.values.full.at[step])

    def store(self, reference, total, output) -> None:
        plan, given = self.plan, self.given
        sink = None
        if "sinks" in given:
            of_rows = given["sinks"].at[self.head, pl.ds(self.first_row, plan.rows)]
            sink = plgpu.load(of_rows, layout=QUERIES, optimized=False)
        row_end = online_softmax.normalised(reference, total, sink)
        inverse, lse = row_end.inverse, row_end.lse
        if "value_scale" in given:
            inverse *= given["value_scale"][self.head]
        rows = pl.ds(self.first_row, plan.rows)
        store_columns(self.lse.at[self.split, self.head_of_all, rows], lse)
        for n, x in enumerate(self.products.result(output)):
            columns = pl.ds(n * plan.part, plan.part)
            target = self.out.at[self.split, self.batch, :, self.heads, columns]
            store_grouped(target, x * spread(inverse, x.shape), self.first_row)


def nothing_seen(rows: int) -> tuple[jax.Array, jax.Array]:
    """Reference and sums of rows before their first key block."""
    reference = jnp.full((rows,), online_softmax.NOTHING_SEEN, jnp.float32)
    return plgpu.layout_cast(reference, QUERIES), zero_tile(BLOCK_KV, rows)
