"""Causal attention for Hopper GPUs, the forward pass and nothing else: the way up to forward.py.

FlashAttention-3 (Shah et al. 2024, Algorithm 2). A tile is `BLOCK` queries of one head, 64 for each
consumer. Its keys come in blocks of as many, from the last that it sees to the first:

    producer   Q K0 K1 V0 K2 V1 ...         TMA into rings of slots
    consumer   S = Q K0                     softmax, with a mask, which no other block needs
               S = Q K1 | O += P V0         softmax of S while O += P V0 still runs
               ...
               O += P V(n-1)                divided by the sums of weights, and stored

Consumers take turns to issue two products, so that the softmax of one runs under another's.
"""

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import online_softmax, scheduler
from pallas_kernels.config import FORWARD_SECTION_BYTES, SM_COUNT
from pallas_kernels.hopper import Ring, Turns, kernel, walk, warp_specialised
from pallas_kernels.interpret import interpreting
from pallas_kernels.online_softmax import NOTHING_SEEN, partial_sums, spread
from pallas_kernels.problem import LOG2E
from pallas_kernels.ptx import arithmetic, barriers, compiler, masks, mlir, operands

CONSUMERS, ROWS, WIDTH = 2, 64, 128
BLOCK = CONSUMERS * ROWS  # queries of a tile, and keys of a step
_FACTOR = LOG2E / WIDTH**0.5  # weights are powers of 2
_TURNS = barriers.NamedBarriers(first=CONSUMERS + 2, count=CONSUMERS, arrivers=1)
_RINGS = "queries", "keys", "values"
_FREE = {name: barriers.NamedBarriers(6 + 2 * n, 2, CONSUMERS) for n, name in enumerate(_RINGS)}


def attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """softmax(Q K' / sqrt(128)) V, where query i sees the keys up to i.

    All are `[B, T, N, 128]`, bfloat16 or float16; T a multiple of 128.
    """
    shapes = query.shape, key.shape, value.shape
    if len({*shapes}) > 1 or query.shape[1] % BLOCK or query.shape[3] != WIDTH:
        raise ValueError(f"got {shapes}; needs [B, T, N, {WIDTH}] alike, T a multiple of {BLOCK}")
    return _build(query.shape, np.dtype(query.dtype), interpreting())(query, key, value)


@functools.lru_cache
def _build(shape: tuple[int, ...], dtype: np.dtype, interpret: bool):
    batch, length, heads, _ = shape
    tiles, all_heads = length // BLOCK, batch * heads
    cost = np.arange(tiles) + 2.0  # steps, and one for the beginning and the end of a tile
    bytes_of = FORWARD_SECTION_BYTES, 4 * length * WIDTH  # what L2 is to hold, and one head
    together = scheduler.heads_per_section(*bytes_of, tiles, SM_COUNT, all_heads, group=1)
    tile, head = scheduler.tile_order(cost, all_heads, together)
    schedule = scheduler.deal(head * tiles + tile, cost[tile], min(len(tile), SM_COUNT))

    def causal_attention(schedule, q, k, v, o, *, o_smem, turns, **rings):
        own = lax.axis_index("warpgroup")
        queries, keys, values = (Ring.of(free, **rings[name]) for name, free in _FREE.items())

        def locate(number):
            head_of_all, tile = arithmetic.div_rem(number, tiles)
            batch, head = arithmetic.div_rem(head_of_all, heads)
            return tile, lambda first, size: (batch, pl.ds(first, size), head)

        def load_tile(index, step, number):
            tile, rows_of = locate(number)
            rows = lambda j: rows_of((tile - j) * BLOCK, BLOCK)
            queries.fill(index, q.at[rows(0)])
            keys.fill(step, k.at[rows(0)])

            @pl.loop(1, tile + 1)
            def _(j):
                keys.fill(step + j, k.at[rows(j)])
                values.fill(step + j - 1, v.at[rows(j - 1)])

            values.fill(step + tile, v.at[rows(tile)])
            return step + tile + 1

        def attend(turn, o_acc, s_acc, index, step, number):
            tile, rows_of = locate(number)
            (q_tile,) = queries.read(index)

            def issue_logits(j):
                (k_block,) = keys.read(step + j)
                s_acc[...] = mlir.zero_tile(ROWS, BLOCK)
                plgpu.wgmma(s_acc, q_tile.at[pl.ds(own * ROWS, ROWS)], k_block.transpose((1, 0)))

            def issue_output(weights, j):
                plgpu.wgmma(o_acc, weights, *values.read(step + j))

            def softmax(logits, maximum, sums):
                risen = jnp.maximum(maximum, logits.max(axis=1) * _FACTOR)
                correction = jnp.exp2(maximum - risen)
                weights = jnp.exp2(logits * _FACTOR - spread(risen, logits.shape))
                sums = sums * spread(correction, sums.shape) + partial_sums(weights)
                return weights, correction, risen, sums

            def key_step(j, carry):
                weights, *state = carry
                turn.take()
                issue_logits(j)
                issue_output(weights, j - 1)
                turn.pass_on()
                logits = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
                keys.give_back(keys.slot(step + j))
                # A cast of the weights before the wait makes ptxas serialise every wgmma.
                weights, correction, *state = lax.optimization_barrier(softmax(logits, *state))
                output = plgpu.wgmma_accumulator_load(o_acc, wait_n=0)
                values.give_back(values.slot(step + j - 1))
                o_acc[...] = output * spread(correction, output.shape)
                return weights.astype(dtype), *state

            issue_logits(0)
            logits = plgpu.wgmma_accumulator_load(s_acc, wait_n=0)
            keys.give_back(keys.slot(step))
            own_keys = compiler.fresh_rows() + own * ROWS
            logits = masks.keep_columns_to(logits, own_keys, -jnp.inf)
            weights, _, *state = softmax(logits, *online_softmax.begin(ROWS, NOTHING_SEEN))
            carry = weights.astype(dtype), *state
            weights, _, sums = lax.fori_loop(1, tile + 1, key_step, carry)
            queries.give_back(queries.slot(index))
            issue_output(weights, tile)
            inverse = 1.0 / sums.sum(axis=1)
            output = plgpu.wgmma_accumulator_load(o_acc, wait_n=0)
            values.give_back(values.slot(step + tile))
            o_acc[...] = mlir.zero_tile(ROWS, WIDTH)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the tile before has left
            o_smem[own] = (output * spread(inverse, output.shape)).astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(o_smem.at[own], o.at[rows_of(tile * BLOCK + own * ROWS, ROWS)])
            return step + tile + 1

        def consume():
            run_tile = functools.partial(attend, Turns.of(_TURNS, own, **turns))
            run = lambda *accumulators: walk(schedule, functools.partial(run_tile, *accumulators))
            pl.run_scoped(run, *(plgpu.ACC((ROWS, n), jnp.float32) for n in (WIDTH, BLOCK)))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        warp_specialised(own, CONSUMERS, (240, 24), consume, lambda: walk(schedule, load_tile))

    rings = {name: Ring.types(free, (BLOCK, WIDTH), dtype=dtype) for name, free in _FREE.items()}
    o_smem = plgpu.SMEM((CONSUMERS, ROWS, WIDTH), dtype, transforms=operands.OPERAND)
    scratch = dict(o_smem=o_smem, turns=Turns.types(_TURNS), **rings)
    out, sizes = jax.ShapeDtypeStruct(shape, dtype), (len(schedule), CONSUMERS)
    return functools.partial(kernel(causal_attention, out, *sizes, scratch), schedule)
