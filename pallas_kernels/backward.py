"""Backward attention for Hopper GPUs: five products a tile pair in one warp-specialised kernel.

FlashAttention-2's loop (Dao 2023, Algorithm 2) in FlashAttention-3's arrangement, in one thread
block per SM that walks a list of tiles. A tile is `block_kv` keys of one key head, 64 for each of
two consumers, which loop over the query blocks, of every query head of the group, that see any of
them. Logits and their gradients are computed transposed, so that the weights P and dS are in the
registers that the products for dV and dK read them from:

    producer   K V | Q0 dO0 | Q1 dO1 | ...                      TMA into circular buffers
    consumer   S' = K Q' - LSE / scale;  dQ = dS K of the step before
               P' = exp2(S' * scale * log2(e))                  while dQ is computed
               dP' = V dO';  dV += P' dO
               dS' = P' * (dP' - delta)                         while dV is computed
               dK += dS' Q;  dS' to shared memory
    producer   adds dQ to global memory in float32              TMA reduction

delta = rowsum(dO * O) - dLSE, and the zeros that dQ begins with, come from `row_statistics.py`.
What is left of dQ, the factor scale and the cast, is a small kernel of its own. For deterministic
gradients dQ comes from `backward_query.py`, and this kernel gives dK and dV alone, as
`backward_key.py` does at width 256.

dQ of a step is 64 rows by 64 columns for each consumer, and needs the dS' of both. As it is a step
late, neither waits for the other. In the first step of a tile there is none to compute: the product
runs all the same, on what is there, and goes nowhere.

The next tile's first steps, its K and its V arrive under this one's last: what is staged for the
producer to send stands where nothing is loaded, dK where K was, beside which there is another K,
and dV where dS' was.

Query rows beyond the end, and rows that see no key, have a start of -inf where others have
-LSE / scale, so that their weights are 0. Keys beyond the end are masked.

dQ is accumulated in fragment order (`primitives.store_fragment`): the order in which the threads of
a warpgroup hold an accumulator, so that storing it takes neither a swizzle nor address registers.

Barriers. Full: an mbarrier for V, and for each slot of K, of Q and of dO, completed by TMA. The
others are named barriers. Free: for V, and for each slot of Q and dO, the consumers arrive and the
producer waits. Stored: for each consumer and buffer of dS', it arrives and the other one waits; for
the first step of a tile, the producer arrives; at its end, they meet there. Staged, for dQ of each
consumer and for dK and dV of both: they arrive, the producer waits and sends. Sent: it has, and
each consumer may stage again.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import backward_key, backward_query, row_statistics
from pallas_kernels.config import (
    BACKWARD_CONSUMERS,
    BACKWARD_QUERY,
    BackwardConfig,
    BackwardKeyConfig,
    BackwardQueryConfig,
    Problem,
)
from pallas_kernels.key_tiles import QUERIES, KeyTiles, Walk, per_query
from pallas_kernels.online_softmax import LOG2E
from pallas_kernels.primitives import (
    HAND_ORDERED,
    OPERAND,
    NamedBarriers,
    ZeroAhead,
    div_rem,
    fence_async_shared,
    fragment_shape,
    fresh_zero,
    interpreting,
    load_fragment,
    store_fragment,
    zero_tile,
)

_CONSUMERS = BACKWARD_CONSUMERS
_KEYS = 64  # of a consumer: the M of a wgmma
_BLOCK_KV = _CONSUMERS * _KEYS
_DQ_TILE = 64  # dQ is accumulated in tiles of 64 rows by 64 columns
_K_SLOTS = 2


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
    config: BackwardConfig | BackwardKeyConfig,
    deterministic: bool = False,
    query_config: BackwardQueryConfig | None = None,
    intervals: jax.Array | None = None,
    ids: tuple[jax.Array, jax.Array] | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of attention.

    Args:
      query, out, d_out: `[B, T, N, H]`; T a multiple of 8, rows from problem.query_length on zero.
        query and d_out are finite in rows that see no key.
      key, value: `[B, S, K, H]`; S a multiple of 8, finite in rows that no query sees.
      lse: `[B, N, >= query_length]` float32, natural log; -inf for a row that sees no key.
      d_lse: `[B, N, query_length]` float32.
      problem: static description; its lengths may be up to 7 below T and S.
      config: tile sizes; a `BackwardKeyConfig` at width 256.
      deterministic: gradients are the same bit by bit from run to run: dQ is made by a kernel of
        its own (`backward_query.py`), not summed in the order in which thread blocks end. At width
        256 they always are.
      query_config: that kernel's tile sizes; None for those of `BACKWARD_QUERY`.
      intervals: None, or the keys that each query sees, `[B, 2, problem.query_length]` int32, for a
        problem that is dynamic (`intervals.py`).
      ids: None, or for a problem that is segmented the segment ids of queries and keys, int32
        `[B, problem.query_length]` and `[B, problem.key_length]` (`segments.py`).

    Returns:
      Gradients of query, key and value, in their shapes and dtype. Rows from key_length on are
      arbitrary.
    """
    if isinstance(config, BackwardKeyConfig) != (problem.width == 256):
        raise TypeError(
            f"config: got a {type(config).__name__} at width {problem.width}, needs a"
            " BackwardKeyConfig at width 256, a BackwardConfig at others"
        )
    deterministic = deterministic or isinstance(config, BackwardKeyConfig)
    query_config = query_config or BACKWARD_QUERY[problem.width]
    block_q = max(config.block_q, query_config.block_q) if deterministic else config.block_q
    padded_rows = -(-problem.query_length // block_q) * block_q
    start, minus_delta = row_statistics.row_statistics(
        out, lse, d_out, d_lse, problem=problem, padded_rows=padded_rows
    )
    operands = query, key, value, d_out, start, minus_delta
    if deterministic:
        dq = backward_query.query_gradient(
            *operands, intervals, ids, problem=problem, config=query_config
        )
        if isinstance(config, BackwardKeyConfig):
            gradients = backward_key.key_value_gradients(
                *operands, intervals, ids, problem=problem, config=config
            )
        else:
            main = _build_main(problem, config, key.shape[1], interpreting(), False)
            gradients = main(intervals, ids, *operands)
        return dq, *gradients
    # The kernel zeroes it. On a CPU, in interpret mode, `lax.empty` is of zeros.
    dq_tiles = problem.batch * problem.heads * padded_rows // _DQ_TILE * problem.width // _DQ_TILE
    d_query = jax.new_ref(lax.empty((dq_tiles, *fragment_shape(_DQ_TILE)), jnp.float32))
    progress = jax.new_ref(_zero_ahead(_key_tiles(problem, config.block_q, True)).progress())
    main = _build_main(problem, config, key.shape[1], interpreting(), True)
    d_key, d_value = main(intervals, ids, *operands, d_query, progress)
    cast = _build_cast(problem, padded_rows, query.shape[1], interpreting())
    return cast(jax.freeze(d_query)), d_key, d_value


def _key_tiles(problem: Problem, block_q: int, with_query_gradient: bool) -> KeyTiles:
    # Tiles read Q and dO, and add to dQ in float32.
    element_bytes = 2 * problem.dtype.itemsize + (4 if with_query_gradient else 0)
    return KeyTiles(problem, _BLOCK_KV, block_q, row_bytes=problem.width * element_bytes)


def _zero_ahead(tiles: KeyTiles) -> ZeroAhead:
    """How dQ is zeroed: in half of the tiles, by the four warps of the producer."""
    head_bytes = 4 * tiles.problem.group * tiles.query_blocks * tiles.block_q * tiles.problem.width
    chunk_bytes = -(-head_bytes // (2 * tiles.per_head) // 512) * 512
    return ZeroAhead(tiles.kv_heads // tiles.section, head_bytes * tiles.section, chunk_bytes)


@functools.lru_cache
def _build_main(
    problem: Problem,
    config: BackwardConfig,
    key_rows: int,
    interpret: bool,
    with_query_gradient: bool,
):
    """The main kernel, or without dQ one that gives dK and dV alone."""
    block_q, stages = config.block_q, config.stages
    group, width, dtype = problem.group, problem.width, problem.dtype
    factor = problem.scale * LOG2E
    if block_q * width != _CONSUMERS * _DQ_TILE**2:
        raise ValueError(
            f"block_q: got {block_q} at width {width}, needs {_CONSUMERS * _DQ_TILE**2 // width},"
            f" a {_DQ_TILE} x {_DQ_TILE} tile of dQ for each consumer"
        )

    tiles = _key_tiles(problem, block_q, with_query_gradient)
    query_blocks = tiles.query_blocks
    zero_ahead = _zero_ahead(tiles)
    # There are registers for weights and dQ at a time only where all else is simple.
    is_simple = not (tiles.any_mask or group > 1)
    early_weights = is_simple or (width <= 64 and not (problem.segmented and group > 1))

    ds_stored = NamedBarriers(first=_CONSUMERS + 2, count=2 * _CONSUMERS, arrivers=1)
    free = NamedBarriers(ds_stored.first + ds_stored.count, stages, arrivers=_CONSUMERS)
    v_free = NamedBarriers(free.first + stages, 1, arrivers=_CONSUMERS)
    dq_staged = NamedBarriers(v_free.first + 1, _CONSUMERS, arrivers=1)
    gradients_staged = NamedBarriers(dq_staged.first + _CONSUMERS, 1, arrivers=_CONSUMERS)
    sent = NamedBarriers(gradients_staged.first + 1, _CONSUMERS, arrivers=1)
    named = dict(
        ds_stored=ds_stored,
        free=free,
        v_free=v_free,
        dq_staged=dq_staged,
        gradients_staged=gradients_staged,
        sent=sent,
    )

    smem = functools.partial(plgpu.SMEM, dtype=dtype, transforms=OPERAND)
    scratch: dict[str, Any] = dict(
        k_smem=smem((_K_SLOTS, _BLOCK_KV, width)),
        v_smem=smem((1, _BLOCK_KV, width)),
        q_smem=smem((stages, block_q, width)),
        o_smem=smem((stages, block_q, width)),
        ds_smem=smem((2, block_q // _DQ_TILE, _BLOCK_KV, _DQ_TILE)),
        start_smem=plgpu.SMEM((stages, block_q), jnp.float32),
        delta_smem=plgpu.SMEM((stages, block_q), jnp.float32),
        k_full=plgpu.Barrier(num_barriers=_K_SLOTS),
        v_full=plgpu.Barrier(),
        q_full=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        o_full=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
    )
    if with_query_gradient:
        scratch["dq_smem"] = plgpu.SMEM((_CONSUMERS, *fragment_shape(_DQ_TILE)), jnp.float32)
    if interpret:
        scratch["twins"] = {name: barriers.scratch() for name, barriers in named.items()}

    def attention_backward(
        *all_refs,
        k_smem, v_smem, q_smem, o_smem, ds_smem, start_smem, delta_smem,
        k_full, v_full, q_full, o_full, dq_smem=None, twins=None,
    ):  # fmt: skip
        warpgroup = lax.axis_index("warpgroup")
        walk, refs = Walk.of_refs(tiles, lax.axis_index("block"), all_refs)
        q_ref, k_ref, v_ref, do_ref, start_ref, delta_ref, *dq_refs, dk_ref, dv_ref = refs
        ds_stored, free, v_free, dq_staged, gradients_staged, sent = (
            dataclasses.replace(barriers, twins=twins and twins[name])
            for name, barriers in named.items()
        )
        zero = jnp.int32(0)

        def first_index():
            """A list is walked from its end, since comparing with 0 takes no register."""
            return walk.count() - 1

        def k_slot(index):
            return lax.rem(index, jnp.int32(_K_SLOTS))

        # One copy of the code a consumer: addresses become constants, which saves registers.
        def _consumer(consumer: int):
            plgpu.set_max_registers(config.registers[0], action="increase")
            own_first_key = _KEYS * consumer
            own = pl.ds(own_first_key, _KEYS)

            def compute(dk_acc, dv_acc, s_acc, dp_acc, dq_acc=None):
                def issue_logits(slot, index):
                    s_acc[...] = per_query(plgpu.load(start_smem.at[slot], layout=QUERIES), _KEYS)
                    k = k_smem.at[k_slot(index) + fresh_zero(), own]
                    plgpu.wgmma(s_acc, k, q_smem.at[slot].transpose((1, 0)))

                def issue_d_weights(slot):
                    dp_acc[...] = zero_tile(_KEYS, block_q)
                    v = v_smem.at[fresh_zero(), own]
                    plgpu.wgmma(dp_acc, v, o_smem.at[slot].transpose((1, 0)))

                def load_weights():
                    return jnp.exp2(plgpu.wgmma_accumulator_load(s_acc, wait_n=1) * factor)

                def load_ds(weights, slot):
                    d_weights = plgpu.wgmma_accumulator_load(dp_acc, wait_n=1)
                    minus_delta = plgpu.load(delta_smem.at[slot], layout=QUERIES)
                    return (weights * (d_weights + per_query(minus_delta, _KEYS))).astype(dtype)

                def slots(j):
                    # Addresses made anew each step: registers are short.
                    slot = lax.rem(j, jnp.int32(stages))
                    return slot, slot + fresh_zero(), lax.rem(j, jnp.int32(2))

                def issue_late_dq(parity, index):
                    """dQ of a step before, once the other's dS' of that step is there too."""
                    ds_stored.wait(2 * parity + (1 - consumer))
                    row, column = divmod(_DQ_TILE * consumer, width)
                    dq_acc[...] = zero_tile(_DQ_TILE, _DQ_TILE)
                    plgpu.wgmma(
                        dq_acc,
                        ds_smem.at[parity, row].transpose((1, 0)),
                        k_smem.at[k_slot(index) + fresh_zero(), :, pl.ds(column, _DQ_TILE)],
                    )

                def hand_over_dq():
                    dq = plgpu.wgmma_accumulator_load(dq_acc, wait_n=0)
                    sent.wait(consumer)
                    store_fragment(dq_smem.at[consumer], dq)
                    fence_async_shared()
                    dq_staged.arrive(consumer)

                def hand_over_gradients(parity, index):
                    """Stages dK where K was, and dV where dS' was, once the other has read them."""
                    dk = plgpu.wgmma_accumulator_load(dk_acc, wait_n=0) * problem.scale
                    dv = plgpu.wgmma_accumulator_load(dv_acc, wait_n=0)
                    dk_acc[...] = zero_tile(_KEYS, width)
                    dv_acc[...] = zero_tile(_KEYS, width)
                    ds_stored.arrive(2 * parity + consumer)
                    ds_stored.wait(2 * parity + (1 - consumer))
                    k_smem[k_slot(index) + fresh_zero(), own] = dk.astype(dtype)
                    for n, columns in enumerate(_tiles_of(width)):
                        ds_smem[n + fresh_zero(), 0, own] = dv[:, columns].astype(dtype)
                    fence_async_shared()
                    gradients_staged.arrive(0)

                def hand_over_ds(parity, ds):
                    # Two buffers: the other may still read what was stored one step ago.
                    for n, columns in enumerate(_tiles_of(block_q)):
                        ds_smem[parity, n, own] = ds[:, columns]
                    fence_async_shared()
                    ds_stored.arrive(2 * parity + consumer)

                def step_with_dq(j, mask, index):
                    slot, o_slot, parity = slots(j)
                    plgpu.barrier_wait(q_full.at[slot])
                    issue_logits(slot, index)
                    issue_late_dq(1 - parity, index)
                    weights = load_weights()
                    if early_weights:
                        # A wait here keeps ptxas from computing the weights after dQ.
                        plgpu.barrier_wait(o_full.at[o_slot])
                        hand_over_dq()
                    else:
                        hand_over_dq()
                        plgpu.barrier_wait(o_full.at[o_slot])
                    # Between dQ and dP' there are registers for it.
                    equal_ids = mask.equal_ids(j) if mask is not None else None
                    issue_d_weights(o_slot)
                    if mask is not None:
                        weights = mask(weights, j, equal_ids)
                    plgpu.wgmma(dv_acc, weights.astype(dtype), o_smem.at[o_slot])
                    ds = load_ds(weights, o_slot)
                    plgpu.wgmma(dk_acc, ds, q_smem.at[slot])
                    hand_over_ds(parity, ds)
                    plgpu.wgmma_wait(0)
                    free.arrive(slot)

                def step_without_dq(j, mask, index):
                    slot, o_slot, _ = slots(j)
                    equal_ids = mask.equal_ids(j) if mask is not None else None
                    plgpu.barrier_wait(q_full.at[slot])
                    issue_logits(slot, index)
                    plgpu.barrier_wait(o_full.at[o_slot])
                    issue_d_weights(o_slot)
                    weights = load_weights()
                    if mask is not None:
                        weights = mask(weights, j, equal_ids)
                    plgpu.wgmma(dv_acc, weights.astype(dtype), o_smem.at[o_slot])
                    plgpu.wgmma(dk_acc, load_ds(weights, o_slot), q_smem.at[slot])
                    fence_async_shared()  # TMA will overwrite row statistics that were read
                    plgpu.wgmma_wait(0)
                    free.arrive(slot)

                def whole_tile(carry):
                    index, j = carry
                    plgpu.barrier_wait(k_full.at[k_slot(index)])
                    plgpu.barrier_wait(v_full)
                    step = step_with_dq if with_query_gradient else step_without_dq
                    step = functools.partial(step, index=index)
                    j = walk.loop_over_steps(step, index, j, own_first_key)
                    v_free.arrive(0)
                    parity = lax.rem(j + 1, jnp.int32(2))  # of the last step
                    if with_query_gradient:
                        issue_late_dq(parity, index)
                        hand_over_dq()
                    else:
                        sent.wait(consumer)
                    hand_over_gradients(1 - parity, index)
                    return index - 1, j

                dk_acc[...] = zero_tile(_KEYS, width)
                dv_acc[...] = zero_tile(_KEYS, width)
                lax.while_loop(lambda carry: carry[0] >= 0, whole_tile, (first_index(), zero))

            accumulator = lambda rows, columns: plgpu.ACC((rows, columns), jnp.float32)
            accumulators = [
                accumulator(_KEYS, width),
                accumulator(_KEYS, width),
                accumulator(_KEYS, block_q),
                accumulator(_KEYS, block_q),
            ]
            if with_query_gradient:
                accumulators.append(accumulator(_DQ_TILE, _DQ_TILE))
            pl.run_scoped(compute, *accumulators)

        for consumer in range(_CONSUMERS):
            pl.when(warpgroup == consumer)(functools.partial(_consumer, consumer))

        @pl.when(warpgroup == _CONSUMERS)
        def _producer():
            plgpu.set_max_registers(config.registers[1], action="decrease")

            def load_step(carry):
                """Loads a block of Q and one of dO, and their row statistics; returns the next.

                After the last step the index is -1, and what it locates is not loaded.
                """
                j, index, t = carry
                place = _, kv_head_of_all = walk.locate(index)
                batch, kv_head = div_rem(kv_head_of_all, problem.kv_heads)
                query_block, member = walk.step_of(place, t)
                rows = pl.ds(query_block * block_q, block_q)
                head = kv_head * group + member
                slot = lax.rem(j, jnp.int32(stages))

                @pl.when(index >= 0)
                def _():
                    pl.when(j >= stages)(lambda: free.wait(slot))
                    for ref, buffer, row_ref, row_buffer, full in (
                        (q_ref, q_smem, start_ref, start_smem, q_full),
                        (do_ref, o_smem, delta_ref, delta_smem, o_full),
                    ):
                        source = ref.at[batch, rows, head]
                        plgpu.copy_gmem_to_smem(source, buffer.at[slot], full.at[slot])
                        row_source = row_ref.at[batch, head, rows]
                        plgpu.copy_gmem_to_smem(row_source, row_buffer.at[slot], full.at[slot])

                is_last = (t + 1 == walk.steps(index)) & (index >= 0)
                return j + 1, index - is_last, jnp.where(is_last, 0, t + 1)

            def load_keys(ref, buffer, full, index):
                tile, kv_head_of_all = walk.locate(index)
                batch, kv_head = div_rem(kv_head_of_all, problem.kv_heads)
                source = ref.at[batch, pl.ds(tile * _BLOCK_KV, _BLOCK_KV), kv_head]
                plgpu.copy_gmem_to_smem(source, buffer, full)

            def load_key(index):
                slot = k_slot(index)
                pl.when(index >= 0)(
                    lambda: load_keys(k_ref, k_smem.at[slot], k_full.at[slot], index)
                )

            def load_value(index):
                pl.when(index >= 0)(lambda: load_keys(v_ref, v_smem.at[0], v_full, index))

            def let_stage():
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                for consumer in range(_CONSUMERS):
                    sent.arrive(consumer)

            def let_start(j):
                """The first step of a tile finds dS' of a step before, which is none."""
                for consumer in range(_CONSUMERS):
                    ds_stored.arrive(2 * lax.rem(j + 1, jnp.int32(2)) + consumer)

            def add_dq(index, t):
                """Adds dQ of step t of a tile, staged in the next one; none for t = -1."""
                place = _, kv_head_of_all = walk.locate(index)
                query_block, member = walk.step_of(place, t)
                head_of_all = kv_head_of_all * group + member
                first = (head_of_all * query_blocks + query_block) * _CONSUMERS

                def add(consumer):
                    source, target = dq_smem.at[consumer], dq_refs[0].at[first + consumer]
                    plgpu.copy_smem_to_gmem(source, target, reduction_op="add")

                for consumer in range(_CONSUMERS):
                    dq_staged.wait(consumer)
                    pl.when(t >= 0)(functools.partial(add, consumer))

            def send_gradients(index):
                tile, kv_head_of_all = walk.locate(index)
                batch, kv_head = div_rem(kv_head_of_all, problem.kv_heads)
                gradients_staged.wait(0)
                for consumer in range(_CONSUMERS):
                    own = pl.ds(consumer * _KEYS, _KEYS)
                    rows = pl.ds(tile * _BLOCK_KV + consumer * _KEYS, _KEYS)
                    source = k_smem.at[k_slot(index), own]
                    plgpu.copy_smem_to_gmem(source, dk_ref.at[batch, rows, kv_head])
                    for n, columns in enumerate(_tiles_of(width)):
                        target = dv_ref.at[batch, rows, kv_head, columns]
                        plgpu.copy_smem_to_gmem(ds_smem.at[n, 0, own], target)

            def whole_tile(index, following):
                if with_query_gradient:
                    _, kv_head_of_all = walk.locate(index)
                    section, _ = div_rem(kv_head_of_all, tiles.section)
                    dq_ref, progress_ref = dq_refs
                    zero_ahead.advance(dq_ref, progress_ref, section)

                def one_step(t, following):
                    if with_query_gradient:
                        add_dq(index, t - 1)
                        let_stage()
                    return load_step(following)

                steps = walk.steps(index)
                following = lax.fori_loop(zero, steps, one_step, following)
                v_free.wait(0)
                load_value(index - 1)
                if with_query_gradient:
                    add_dq(index, steps - 1)
                send_gradients(index)
                let_stage()
                load_key(index - _K_SLOTS)
                if with_query_gradient:
                    let_start(following[0] - stages)
                return following

            for n in range(_K_SLOTS):
                load_key(first_index() - n)
            load_value(first_index())
            # Step, tile of this thread block, and step in the tile.
            following = zero, first_index(), zero
            following = lax.fori_loop(zero, stages, lambda _, carry: load_step(carry), following)
            let_stage()
            if with_query_gradient:
                let_start(zero)
            lax.while_loop(
                lambda carry: carry[0] >= 0,
                lambda carry: (carry[0] - 1, whole_tile(*carry)),
                (first_index(), following),
            )
            plgpu.wait_smem_to_gmem(0)

    return tiles.gradient_kernel(
        attention_backward, key_rows, config.thread_blocks, scratch, from_end=True
    )


@functools.lru_cache
def _build_cast(problem: Problem, padded_rows: int, query_rows: int, interpret: bool):
    """dQ from fragment order to `[B, T, N, H]`, times scale, in the input dtype."""
    width, dtype = problem.width, problem.dtype
    row_tiles, column_tiles = -(-query_rows // _DQ_TILE), width // _DQ_TILE
    thread_blocks = problem.batch * problem.heads * row_tiles

    def cast_dq(fragments_ref, dq_ref, *, dq_smem):
        # From the end: what the main kernel added to last may still be in L2.
        number = thread_blocks - 1 - lax.axis_index("block")
        head_of_all, row_tile = div_rem(number, row_tiles)
        batch, head = div_rem(head_of_all, problem.heads)
        first = (head_of_all * (padded_rows // _DQ_TILE) + row_tile) * column_tiles
        tiles = [
            load_fragment(fragments_ref.at[first + column_tile], _DQ_TILE)
            for column_tile in range(column_tiles)
        ]
        for column_tile, tile in enumerate(tiles):
            columns = pl.ds(column_tile * _DQ_TILE, _DQ_TILE)
            dq_smem[:, columns] = (tile * problem.scale).astype(dtype)
        plgpu.commit_smem()
        rows = pl.ds(row_tile * _DQ_TILE, _DQ_TILE)
        plgpu.copy_smem_to_gmem(dq_smem, dq_ref.at[batch, rows, head])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    return plgpu.kernel(
        cast_dq,
        out_type=jax.ShapeDtypeStruct((problem.batch, query_rows, problem.heads, width), dtype),
        grid=(thread_blocks,),
        grid_names=("block",),
        scratch_types=dict(dq_smem=plgpu.SMEM((_DQ_TILE, width), dtype, transforms=OPERAND)),
        compiler_params=HAND_ORDERED,
    )


def _tiles_of(columns: int) -> list[slice]:
    return [slice(first, first + _DQ_TILE) for first in range(0, columns, _DQ_TILE)]
