"""Backward attention for Hopper GPUs: five products a tile pair in one warp-specialised kernel.

FlashAttention-2's loop (Dao 2023, Algorithm 2) in FlashAttention-3's arrangement. A thread block
owns `block_kv` keys of one key head and loops over the query blocks, of every query head of the
group, that see any of them. Logits and their gradients are computed transposed, so that the weights
P and dS are in the registers that the products for dV and dK read them from:

    producer   K V | Q0 dO0 | Q1 dO1 | ...                      TMA into circular buffers
    consumer   S' = K Q' - LSE / scale;  dQ = dS K of the step before
               P' = exp2(S' * scale * log2(e))                  while dQ is computed
               dP' = V dO';  dV += P' dO
               dS' = P' * (dP' - delta)                         while dV is computed
               dK += dS' Q;  dS' to shared memory
    producer   adds dQ to global memory in float32              TMA reduction

delta = rowsum(dO * O) - dLSE is computed before. What is left of dQ, the factor scale and the cast,
is a small kernel of its own.

Two consumers share the work in one of two ways (`_Split`). Up to width 128 each has 64 keys of its
own, and dQ needs the dS' of both; as it is a step late, neither waits for the other. At width 256
the accumulators of dK and dV for 64 keys fill both register files, so each has half of the columns,
and both compute S' and dP'. Then dQ comes from a kernel of its own, `backward_query.py`, as it does
at every width for deterministic gradients.

Query rows beyond the end, and rows that see no key, have a start of -inf where others have
-LSE / scale, so that their weights are 0. Keys beyond the end are masked.

dQ is accumulated in fragment order (`primitives.store_fragment`): the order in which the threads of
a warpgroup hold an accumulator, so that storing it takes neither a swizzle nor address registers.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import backward_query, scheduler
from pallas_kernels.config import (
    BACKWARD_CONSUMERS,
    BACKWARD_QUERY,
    BACKWARD_SECTION_BYTES,
    SM_COUNT,
    BackwardConfig,
    BackwardQueryConfig,
    Problem,
)
from pallas_kernels.online_softmax import LOG2E
from pallas_kernels.primitives import (
    HAND_ORDERED,
    NamedBarriers,
    div_rem,
    fence_async_shared,
    fragment_shape,
    fresh_zero,
    interpreting,
    keep_columns_from,
    load_fragment,
    store_fragment,
    zero_tile,
)

_CONSUMERS = BACKWARD_CONSUMERS
_DQ_TILE = 64  # dQ is accumulated in tiles of 64 rows by 64 columns
_TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
_QUERIES = plgpu.Layout.WGMMA.reduce(0)  # one value a column of a transposed tile
_KEYS = plgpu.Layout.WGMMA.reduce(1)  # one value a row of a transposed tile


@dataclasses.dataclass(frozen=True)
class _Split:
    """How two consumers share a tile of `block_kv` keys by `block_q` queries.

    Attributes:
      by_columns: each has half of the columns of dK and dV, else half of the keys.
    """

    width: int
    block_q: int

    @property
    def by_columns(self) -> bool:
        return self.width > 128

    @property
    def parts(self) -> int:
        """Column parts in which Q, K, V and dO stand in shared memory, each contiguous."""
        return 2 if self.by_columns else 1

    @property
    def part_width(self) -> int:
        return self.width // self.parts

    @property
    def block_kv(self) -> int:
        return 64 if self.by_columns else 64 * _CONSUMERS

    def keys(self, consumer: int) -> tuple[int, int]:
        """First and count of the keys whose logits a consumer computes, within the tile."""
        return (0, 64) if self.by_columns else (64 * consumer, 64)

    def part(self, consumer: int) -> int:
        """The column part of dK and dV that a consumer computes."""
        return consumer if self.by_columns else 0

    def dq_tile(self, consumer: int) -> tuple[int, int]:
        """First row and first column of the dQ tile that a consumer computes each step."""
        tiles = [
            (row, column)
            for row in range(0, self.block_q, _DQ_TILE)
            for column in range(0, self.width, _DQ_TILE)
        ]
        if len(tiles) != _CONSUMERS:
            raise ValueError(
                f"block_q: got {self.block_q} at width {self.width}, needs"
                f" {_CONSUMERS * _DQ_TILE**2 // self.width}, a {_DQ_TILE} x {_DQ_TILE} tile of dQ"
                " for each consumer"
            )
        return tiles[consumer]


def attention_gradients(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    d_lse: jax.Array,
    *,
    problem: Problem,
    config: BackwardConfig,
    deterministic: bool = False,
    query_config: BackwardQueryConfig | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of attention.

    Args:
      query, out, d_out: `[B, T, N, H]`; T a multiple of 8, rows from problem.query_length on zero.
      key, value: `[B, S, K, H]`; S a multiple of 8.
      lse: `[B, N, >= query_length]` float32, natural log; -inf for a row that sees no key.
      d_lse: `[B, N, query_length]` float32.
      problem: static description; its lengths may be up to 7 below T and S.
      config: tile sizes.
      deterministic: gradients are the same bit by bit from run to run: dQ is made by a kernel of
        its own (`backward_query.py`), not summed in the order in which thread blocks end. At width
        256 they always are.
      query_config: that kernel's tile sizes; None for those of `BACKWARD_QUERY`.

    Returns:
      Gradients of query, key and value, in their shapes and dtype. Rows from key_length on are
      arbitrary.
    """
    padded_rows = -(-problem.query_length // config.block_q) * config.block_q
    lse = lse[:, :, : problem.query_length]
    if problem.is_causal and problem.query_offset < 0:
        # These rows see no key. Their weights are 0, and 0 * NaN would be NaN.
        d_out = d_out.at[:, : -problem.query_offset].set(0)
    # XLA may skip the rounding of a cotangent that it computes in float32 (excess precision), and
    # then delta would not be of the d_out that the kernel reads.
    d_out, out = lax.optimization_barrier((d_out, out))
    delta = (d_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1).transpose(0, 2, 1)
    delta = delta[:, :, : problem.query_length] - d_lse
    unseen = jnp.isneginf(lse)
    start = jnp.where(unseen, -jnp.inf, lse * (-1.0 / problem.scale))
    minus_delta = jnp.where(unseen, 0.0, -delta)
    more_rows = ((0, 0), (0, 0), (0, padded_rows - problem.query_length))
    start = jnp.pad(start, more_rows, constant_values=-jnp.inf)
    minus_delta = jnp.pad(minus_delta, more_rows)

    with_own_kernel = deterministic or _Split(problem.width, config.block_q).by_columns
    main = _build_main(problem, config, key.shape[1], interpreting(), not with_own_kernel)
    if with_own_kernel:
        dq = backward_query.query_gradient(
            query,
            key,
            value,
            lse,
            delta,
            d_out,
            problem=problem,
            config=query_config or BACKWARD_QUERY[problem.width],
        )
        return dq, *main(query, key, value, d_out, start, minus_delta)
    dq_shape = (
        problem.batch,
        problem.heads,
        padded_rows // _DQ_TILE,
        problem.width // _DQ_TILE,
        *fragment_shape(_DQ_TILE),
    )
    d_query = jax.new_ref(jnp.zeros(dq_shape, jnp.float32))
    d_key, d_value = main(query, key, value, d_out, start, minus_delta, d_query)
    cast = _build_cast(problem, query.shape[1], interpreting())
    return cast(jax.freeze(d_query)), d_key, d_value


@functools.lru_cache
def _build_main(
    problem: Problem,
    config: BackwardConfig,
    key_rows: int,
    interpret: bool,
    with_query_gradient: bool,
):
    """The main kernel, or without dQ one that gives dK and dV alone."""
    block_q, (q_stages, o_stages) = config.block_q, config.stages
    split = _Split(problem.width, block_q)
    block_kv, parts, part_width = split.block_kv, split.parts, split.part_width
    group, width, dtype = problem.group, problem.width, problem.dtype
    factor = problem.scale * LOG2E

    query_blocks = -(-problem.query_length // block_q)
    key_tiles = -(-problem.key_length // block_kv)
    first_key = np.arange(key_tiles) * block_kv
    first_query_block = np.zeros(key_tiles, np.int64)
    if problem.is_causal:
        first_query_block = (first_key - problem.query_offset) // block_q
        first_query_block = np.clip(first_query_block, 0, query_blocks)
    ragged = problem.key_length % block_kv != 0

    # Longest first. What heads in work at a time read and add to per query head: Q, dO, dQ.
    bytes_per_kv_head = group * problem.query_length * width * (2 * dtype.itemsize + 4)
    section = scheduler.heads_per_section(
        BACKWARD_SECTION_BYTES,
        bytes_per_kv_head,
        tiles_per_kv_head=key_tiles,
        slots=SM_COUNT,
        kv_heads=problem.batch * problem.kv_heads,
        group=1,
    )
    tile, head = scheduler.tile_order(
        query_blocks - first_query_block, problem.batch * problem.kv_heads, section
    )
    order = np.stack([tile, head, first_query_block[tile]], axis=1).astype(np.int32)

    meet = NamedBarriers(first=_CONSUMERS + 2, count=2 * _CONSUMERS, arrivers=1)
    q_free = NamedBarriers(meet.first + meet.count, q_stages, arrivers=_CONSUMERS)
    o_free = NamedBarriers(q_free.first + q_stages, o_stages, arrivers=_CONSUMERS)
    dq_full = NamedBarriers(o_free.first + o_stages, _CONSUMERS, arrivers=1)
    dq_free = NamedBarriers(dq_full.first + _CONSUMERS, _CONSUMERS, arrivers=1)
    named = dict(meet=meet, q_free=q_free, o_free=o_free, dq_full=dq_full, dq_free=dq_free)

    smem = functools.partial(plgpu.SMEM, dtype=dtype, transforms=_TILED)
    scratch: dict[str, Any] = dict(
        k_smem=smem((1, parts, block_kv, part_width)),
        v_smem=smem((1, parts, block_kv, part_width)),
        q_smem=smem((q_stages, parts, block_q, part_width)),
        o_smem=smem((o_stages, parts, block_q, part_width)),
        start_smem=plgpu.SMEM((q_stages, block_q), jnp.float32),
        delta_smem=plgpu.SMEM((o_stages, block_q), jnp.float32),
        kv_full=plgpu.Barrier(num_arrivals=2 * parts),
        q_full=plgpu.Barrier(num_arrivals=parts + 1, num_barriers=q_stages),
        o_full=plgpu.Barrier(num_arrivals=parts + 1, num_barriers=o_stages),
    )
    if with_query_gradient:
        scratch["ds_smem"] = smem((2, block_kv, block_q))
        scratch["dq_smem"] = plgpu.SMEM((_CONSUMERS, *fragment_shape(_DQ_TILE)), jnp.float32)
    if interpret:
        scratch["twins"] = {name: barriers.scratch() for name, barriers in named.items()}

    def attention_backward(
        order_ref, q_ref, k_ref, v_ref, do_ref, start_ref, delta_ref, *gradient_refs,
        k_smem, v_smem, q_smem, o_smem, start_smem, delta_smem, kv_full, q_full, o_full,
        ds_smem=None, dq_smem=None, twins=None,
    ):  # fmt: skip
        *dq_refs, dk_ref, dv_ref = gradient_refs
        meet, q_free, o_free, dq_full, dq_free = (
            dataclasses.replace(barriers, twins=twins and twins[name])
            for name, barriers in named.items()
        )
        warpgroup = lax.axis_index("warpgroup")
        block = lax.axis_index("block")
        tile, first_block = order_ref[block, 0], order_ref[block, 2]
        first_key = tile * block_kv
        per_head = query_blocks - first_block
        steps = per_head * group

        def batch_and_kv_head():
            """Read where needed: kept over the loop, they cost registers."""
            return div_rem(order_ref[block, 1], problem.kv_heads)

        def locate(j):
            """Query block of step j, and the query head's number in its group."""
            if group == 1:
                return first_block + j, 0
            member = lax.div(j, per_head)
            return first_block + j - member * per_head, member

        # One copy of the code a consumer: addresses become constants, which saves registers.
        def _consumer(consumer: int):
            plgpu.set_max_registers(config.registers[0], action="increase")
            own_first_key, own_keys = split.keys(consumer)
            own = pl.ds(own_first_key, own_keys)
            part = split.part(consumer)

            def meet_other(parity):
                meet.arrive(2 * parity + consumer)
                meet.wait(2 * parity + (1 - consumer))

            def masked(weights, query_block):
                """Weights with 0 where the query may not see the key, or there is no such key."""
                key = plgpu.broadcasted_iota(jnp.int32, (own_keys,), 0, layout=_KEYS)
                key = key + (first_key + own_first_key)
                first_row = query_block * block_q
                first_seeing = jnp.zeros_like(key)
                if problem.is_causal:
                    first_seeing = key - (first_row + problem.query_offset)
                if ragged:
                    first_seeing = jnp.where(key < problem.key_length, first_seeing, block_q)
                return keep_columns_from(weights, first_seeing, 0.0)

            def masked_steps():
                """How many steps of a query head need a mask, its first ones."""
                blocks = jnp.int32(0)
                if problem.is_causal:
                    end_key = first_key + (own_first_key + own_keys) - 1 - problem.query_offset
                    blocks = lax.div(jnp.maximum(end_key, 0) + (block_q - 1), jnp.int32(block_q))
                    blocks = jnp.maximum(blocks - first_block, 0)
                if ragged:
                    blocks = jnp.where(tile == key_tiles - 1, per_head, blocks)
                return jnp.minimum(blocks, per_head)

            def loop_over_steps(step):
                """Runs `step(j, mask)` for the query blocks of each query head of the group."""

                def one_head(member):
                    begin = member * per_head
                    end = begin + per_head
                    if problem.is_causal or ragged:
                        unmasked = begin + masked_steps()
                        pl.loop(begin, unmasked)(lambda j: step(j, True))
                        begin = unmasked
                    pl.loop(begin, end)(lambda j: step(j, False))

                if group == 1:
                    one_head(jnp.int32(0))
                else:
                    pl.loop(jnp.int32(0), jnp.int32(group))(one_head)

            def compute(dk_acc, dv_acc, s_acc, dp_acc, dq_acc=None):
                def issue_logits(qs):
                    s_acc[...] = _per_query(
                        plgpu.load(start_smem.at[qs], layout=_QUERIES), own_keys
                    )
                    for p in range(parts):
                        k = k_smem.at[fresh_zero(), p, own]
                        plgpu.wgmma(s_acc, k, q_smem.at[qs, p].transpose((1, 0)))

                def issue_d_weights(os):
                    dp_acc[...] = zero_tile(own_keys, block_q)
                    for p in range(parts):
                        v = v_smem.at[fresh_zero(), p, own]
                        plgpu.wgmma(dp_acc, v, o_smem.at[os, p].transpose((1, 0)))

                def load_weights(wait_n):
                    return jnp.exp2(plgpu.wgmma_accumulator_load(s_acc, wait_n=wait_n) * factor)

                def load_ds(weights, os):
                    d_weights = plgpu.wgmma_accumulator_load(dp_acc, wait_n=1)
                    minus_delta = plgpu.load(delta_smem.at[os], layout=_QUERIES)
                    return (weights * (d_weights + _per_query(minus_delta, own_keys))).astype(dtype)

                def slots(j):
                    # Addresses made anew each step: registers are short.
                    os = lax.rem(j, jnp.int32(o_stages)) + fresh_zero()
                    return lax.rem(j, jnp.int32(q_stages)), os, lax.rem(j, jnp.int32(2))

                def issue_late_dq(parity):
                    """dQ of a step before, once the other's dS' of that step is there too."""
                    meet.wait(2 * parity + (1 - consumer))
                    row, column = split.dq_tile(consumer)
                    dq_acc[...] = zero_tile(_DQ_TILE, _DQ_TILE)
                    plgpu.wgmma(
                        dq_acc,
                        ds_smem.at[parity, :, pl.ds(row, _DQ_TILE)].transpose((1, 0)),
                        k_smem.at[fresh_zero(), 0, :, pl.ds(column, _DQ_TILE)],
                    )

                def hand_over_dq():
                    dq = plgpu.wgmma_accumulator_load(dq_acc, wait_n=0)
                    dq_free.wait(consumer)
                    store_fragment(dq_smem.at[consumer], dq)
                    fence_async_shared()
                    dq_full.arrive(consumer)

                def hand_over_ds(parity, ds):
                    # Two buffers: the other may still read what was stored one step ago.
                    ds_smem[parity, own] = ds
                    fence_async_shared()
                    meet.arrive(2 * parity + consumer)

                def free_inputs(j):
                    qs, os, _ = slots(j)
                    o_free.arrive(os)
                    q_free.arrive(qs)

                def step_with_dq(j, mask):
                    qs, os, parity = slots(j)
                    plgpu.barrier_wait(q_full.at[qs])
                    issue_logits(qs)
                    issue_late_dq(1 - parity)
                    weights = load_weights(wait_n=1)
                    if width <= 64:
                        # A wait here keeps ptxas from computing the weights after dQ. At width 128
                        # there are no registers for both.
                        plgpu.barrier_wait(o_full.at[os])
                        hand_over_dq()
                    else:
                        hand_over_dq()
                        plgpu.barrier_wait(o_full.at[os])
                    issue_d_weights(os)
                    if mask:
                        weights = masked(weights, locate(j)[0])
                    plgpu.wgmma(dv_acc, weights.astype(dtype), o_smem.at[os, part])
                    ds = load_ds(weights, os)
                    plgpu.wgmma(dk_acc, ds, q_smem.at[qs, part])
                    hand_over_ds(parity, ds)
                    plgpu.wgmma_wait(0)
                    free_inputs(j)

                def all_steps_with_dq():
                    no_ds = jnp.zeros((own_keys, block_q), dtype)  # dQ of no step, added nowhere
                    hand_over_ds(1, plgpu.layout_cast(no_ds, plgpu.Layout.WGMMA))
                    loop_over_steps(step_with_dq)
                    issue_late_dq(lax.rem(steps + 1, jnp.int32(2)))
                    hand_over_dq()

                def step_without_dq(j, mask):
                    qs, os, _ = slots(j)
                    plgpu.barrier_wait(q_full.at[qs])
                    issue_logits(qs)
                    plgpu.barrier_wait(o_full.at[os])
                    issue_d_weights(os)
                    weights = load_weights(wait_n=parts)
                    if mask:
                        weights = masked(weights, locate(j)[0])
                    plgpu.wgmma(dv_acc, weights.astype(dtype), o_smem.at[os, part])
                    plgpu.wgmma(dk_acc, load_ds(weights, os), q_smem.at[qs, part])
                    fence_async_shared()  # TMA will overwrite row statistics that were read
                    plgpu.wgmma_wait(0)
                    free_inputs(j)

                plgpu.barrier_wait(kv_full)
                if with_query_gradient:
                    all_steps_with_dq()
                else:
                    loop_over_steps(step_without_dq)
                dk = plgpu.wgmma_accumulator_load(dk_acc, wait_n=0)
                dv = plgpu.wgmma_accumulator_load(dv_acc, wait_n=0)
                # The gradients leave from where K and V were, once the other has read them.
                meet_other(lax.rem(steps, jnp.int32(2)))
                batch, kv_head = batch_and_kv_head()
                rows = pl.ds(order_ref[block, 0] * block_kv + own_first_key, own_keys)
                columns = pl.ds(part * part_width, part_width)
                k_smem[0, part, own] = (dk * problem.scale).astype(dtype)
                v_smem[0, part, own] = dv.astype(dtype)
                plgpu.commit_smem()
                for staging, gradient in ((k_smem, dk_ref), (v_smem, dv_ref)):
                    target = gradient.at[batch, rows, kv_head, columns]
                    plgpu.copy_smem_to_gmem(staging.at[0, part, own], target)
                plgpu.wait_smem_to_gmem(0)

            accumulator = lambda rows, columns: plgpu.ACC((rows, columns), jnp.float32)
            accumulators = [
                accumulator(own_keys, part_width),
                accumulator(own_keys, part_width),
                accumulator(own_keys, block_q),
                accumulator(own_keys, block_q),
            ]
            if with_query_gradient:
                accumulators.append(accumulator(_DQ_TILE, _DQ_TILE))
            pl.run_scoped(compute, *accumulators)

        for consumer in range(_CONSUMERS):
            pl.when(warpgroup == consumer)(functools.partial(_consumer, consumer))

        @pl.when(warpgroup == _CONSUMERS)
        def _producer():
            plgpu.set_max_registers(config.registers[1], action="decrease")
            batch, kv_head = batch_and_kv_head()
            part_columns = [pl.ds(p * part_width, part_width) for p in range(parts)]
            keys = pl.ds(first_key, block_kv)
            for ref, buffer in ((k_ref, k_smem), (v_ref, v_smem)):
                for p, columns in enumerate(part_columns):
                    source = ref.at[batch, keys, kv_head, columns]
                    plgpu.copy_gmem_to_smem(source, buffer.at[0, p], kv_full)

            def load(j, stages, free, full, ref, buffer, row_ref, row_buffer):
                """Loads a block of step j and its row statistics once their slot is free."""
                slot = lax.rem(j, jnp.int32(stages))
                query_block, member = locate(j)
                head = kv_head * group + member
                pl.when(j >= stages)(lambda: free.wait(slot))
                rows = pl.ds(query_block * block_q, block_q)
                for p, columns in enumerate(part_columns):
                    source = ref.at[batch, rows, head, columns]
                    plgpu.copy_gmem_to_smem(source, buffer.at[slot, p], full.at[slot])
                row_source = row_ref.at[batch, head, rows]
                plgpu.copy_gmem_to_smem(row_source, row_buffer.at[slot], full.at[slot])

            def load_query(j):
                load(j, q_stages, q_free, q_full, q_ref, q_smem, start_ref, start_smem)

            def load_d_out(j):
                load(j, o_stages, o_free, o_full, do_ref, o_smem, delta_ref, delta_smem)

            @pl.loop(jnp.int32(0), jnp.minimum(steps, max(q_stages, o_stages)))
            def _(j):
                pl.when(j < q_stages)(lambda: load_query(j))
                pl.when(j < o_stages)(lambda: load_d_out(j))

            def load_after(j):
                """In the order in which the consumers get done with things: dO before Q."""
                pl.when(j + o_stages < steps)(lambda: load_d_out(j + o_stages))
                pl.when(j + q_stages < steps)(lambda: load_query(j + q_stages))

            def add_dq(j):
                (dq_ref,) = dq_refs
                query_block, member = locate(j)
                for consumer in range(_CONSUMERS):
                    dq_full.wait(consumer)
                    row, column = split.dq_tile(consumer)
                    batch, kv_head = batch_and_kv_head()
                    row_tile = (query_block * block_q + row) // _DQ_TILE
                    target = dq_ref.at[
                        batch, kv_head * group + member, row_tile, column // _DQ_TILE
                    ]
                    plgpu.copy_smem_to_gmem(dq_smem.at[consumer], target, reduction_op="add")
                free_dq()

            def free_dq():
                for consumer in range(_CONSUMERS):
                    plgpu.wait_smem_to_gmem(_CONSUMERS - 1 - consumer, wait_read_only=True)
                    dq_free.arrive(consumer)

            if dq_smem is None:
                pl.loop(jnp.int32(0), steps)(load_after)
            else:
                free_dq()
                for consumer in range(_CONSUMERS):
                    dq_full.wait(consumer)  # the one of no step
                free_dq()

                @pl.loop(jnp.int32(0), steps)
                def _(j):
                    load_after(j)
                    add_dq(j)

            plgpu.wait_smem_to_gmem(0)

    gradient = jax.ShapeDtypeStruct((problem.batch, key_rows, problem.kv_heads, width), dtype)
    kernel = plgpu.kernel(
        attention_backward,
        out_type=(gradient, gradient),
        grid=(len(order),),
        grid_names=("block",),
        num_threads=_CONSUMERS + 1,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=HAND_ORDERED,
    )
    return lambda *operands: kernel(jnp.asarray(order), *operands)


@functools.lru_cache
def _build_cast(problem: Problem, query_rows: int, interpret: bool):
    """dQ from fragment order to `[B, T, N, H]`, times scale, in the input dtype."""
    width, dtype = problem.width, problem.dtype
    row_tiles = -(-query_rows // _DQ_TILE)

    def cast_dq(fragments_ref, dq_ref, *, dq_smem):
        head_of_all, row_tile = div_rem(lax.axis_index("block"), row_tiles)
        batch, head = div_rem(head_of_all, problem.heads)
        tiles = [
            load_fragment(fragments_ref.at[batch, head, row_tile, column_tile], _DQ_TILE)
            for column_tile in range(width // _DQ_TILE)
        ]
        for column_tile, tile in enumerate(tiles):
            columns = pl.ds(column_tile * _DQ_TILE, _DQ_TILE)
            dq_smem[:, columns] = (tile * problem.scale).astype(dtype)
        plgpu.commit_smem()
        rows = pl.ds(row_tile * _DQ_TILE, _DQ_TILE)
        plgpu.copy_smem_to_gmem(dq_smem, dq_ref.at[batch, rows, head])
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        cast_dq,
        out_type=jax.ShapeDtypeStruct((problem.batch, query_rows, problem.heads, width), dtype),
        grid=(problem.batch * problem.heads * row_tiles,),
        grid_names=("block",),
        scratch_types=dict(dq_smem=plgpu.SMEM((_DQ_TILE, width), dtype, transforms=_TILED)),
        compiler_params=HAND_ORDERED,
    )


def _per_query(values: jax.Array, keys: int) -> jax.Array:
    """Broadcasts one value a query over a transposed tile."""
    return lax.broadcast_in_dim(values, (keys, values.shape[0]), [1])
