"""The gradient of the query alone, for gradients that are the same bit by bit from run to run.

In `backward.py` a thread block owns keys, so that many of them add to one row of dQ, in the order
in which they get to it. Here it owns `block_q` query rows of one head, 64 for each consumer
warpgroup, and adds up what each key block gives in a fixed order. Logits and their gradients are
computed once more for it: seven products a tile pair in all, where `backward.py` with dQ has five.
Above width 128 it serves where `backward_query_product.py` does not.

    producer   Q | K0 dO V0 | K1 V1 | ...                TMA, K and V into circular buffers
    consumer   S = Q K';  dP = dO V'
               P = exp2(S * scale * log2(e) - LSE * log2(e))      while dP is computed
               dS = P * (dP - delta)
               dQ += dS K                                         dS from registers

A consumer has no product in flight from one step to the next; the other's fill the gap, as the two
meet only where the producer waits for both. Where registers are too few for 256 columns of dQ,
two kernels make half of them each. Key blocks run from the first to the last: under a causal mask
tiles differ in the last, so that those that begin at the same time read the same keys, which is
easy on L2. First come those that need no mask, then those that do, then those that this consumer
cannot see at all; with a sliding window, before them those it cannot see, and more that need a
mask. As in `backward.py`, -LSE and -delta come from `row_statistics.py`, and rows that do not count
have a start of -inf.

Barriers. Full: an mbarrier for Q, for dO, and for each slot of K and of V, completed by TMA. Free:
a named barrier a slot, the consumers arrive and the producer waits.
"""

import functools

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp

from pallas_kernels import hopper, segments
from pallas_kernels.backward_query_block import CONSUMERS, Plan, ThreadBlock, key_parts
from pallas_kernels.backward_query_consumer import consume
from pallas_kernels.config import ROWS, BackwardQueryConfig
from pallas_kernels.dropout import Words
from pallas_kernels.dropout import operands as dropout_operands
from pallas_kernels.element_arrays import NO_ELEMENTS, Elements
from pallas_kernels.interpret import interpreting
from pallas_kernels.problem import Problem
from pallas_kernels.ptx.barriers import HAND_ORDERED


def query_gradient(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    d_out: jax.Array,
    start: jax.Array,
    minus_delta: jax.Array,
    far: jax.Array,
    intervals: jax.Array | None = None,
    ids: tuple[jax.Array, jax.Array] | None = None,
    elements: Elements = NO_ELEMENTS,
    dropout_words: Words | None = None,
    *,
    problem: Problem,
    config: BackwardQueryConfig,
) -> jax.Array:
    """Gradient of the query, the same bit by bit from run to run.

    Args:
      query, d_out: `[B, T, N, H]` and `[B, T, N, h]`. d_out is finite in rows that see no key.
      key, value: `[B, S, K, H]` and `[B, S, K, h]`, finite in rows that no query sees.
      start: of `row_statistics`, of T up to a multiple of config.block_q: -LSE / unit; -inf for
        rows that see no key or are beyond the end.
      minus_delta: `[B, N, as start]` float32, dLSE - rowsum(d_out * out), times
        problem.delta_unit; 0 where start is -inf.
      far: of rows far from 0, as `far_rows.far_shape` has it.
      intervals: None, or the keys that each query sees, `[B, 2, problem.query_length]` int32, for a
        problem that is dynamic.
      ids: None, or for a problem that is segmented the segment ids of queries and keys, int32
        `[B, problem.query_length]` and `[B, problem.key_length]` (`segments.py`).
      elements: mask and bias of a problem that has them (`element_arrays.py`).
      dropout_words: None, or for a problem with dropout the words of queries and keys, as
        `dropout.Words` has them.
      problem: static description.
      config: tile sizes.

    Returns:
      `[B, T, N, H]` in the input dtype. Rows that see no key are 0.
    """
    words = dropout_operands(dropout_words, keys=config.block_kv)
    operands = *words, *elements.operands(), query, key, value, d_out, start, minus_delta, far
    build = functools.partial(_build, problem, config, interpreting())
    parts = range(len(key_parts(problem)))
    if len(parts) == 1:
        return build(0)(intervals, ids, *operands)
    d_query = jax.new_ref(jnp.zeros(query.shape, query.dtype))
    for part in parts:
        build(part)(intervals, ids, *operands, d_query)
    return jax.freeze(d_query)


@functools.lru_cache
def _build(problem: Problem, config: BackwardQueryConfig, interpret: bool, part: int):
    """The kernel for one of `key_parts` of dQ: its result, or in a ref if there are more."""
    plan = Plan(problem, config, part)

    def attention_backward_query(*refs, **scratch):
        block = ThreadBlock(plan, refs, **scratch)
        roles = functools.partial(consume, block), functools.partial(_produce, block)
        hopper.warp_specialised(block.warpgroup, CONSUMERS, plan.config.registers, *roles)

    out_type = problem.query() if len(plan.key_parts) == 1 else ()
    sizes, scratch = (len(plan.order), CONSUMERS), plan.scratch(interpret)
    kernel = hopper.kernel(attention_backward_query, out_type, *sizes, scratch, HAND_ORDERED)

    def run(intervals, ids, *operands):
        if problem.has_lists:
            return kernel(jnp.asarray(plan.order), jnp.asarray(plan.lists), *operands)
        if not problem.by_batch:
            return kernel(jnp.asarray(plan.order), *operands)
        masks: tuple[jax.Array, ...] = () if intervals is None else (intervals,)
        if ids is not None:
            query_ids, key_ids = ids
            masks = (*masks, query_ids, segments.padded(key_ids, config.block_kv))
        return kernel(plan.order_of(intervals, ids), *masks, *operands)

    return run


# --- the producer ---------------------------------------------------------------------------------


def _produce(block: ThreadBlock) -> None:
    """Loads Q and dO, and fills the buffers of K and V, each as it gets free."""
    plan, block_kv = block.plan, block.plan.config.block_kv
    batch, head = block.batch_and_head()
    kv_head = plan.problem.kv_head_of(head)

    def load_rows(ref, buffer, columns, full):
        for consumer in range(CONSUMERS):
            source = ref.at[batch, pl.ds(block.first_row_of(consumer), ROWS), head]
            columns.load(source, buffer.at[consumer], full)

    def load(ring: hopper.Ring, ref, j):
        slot = ring.slot(j)
        ring.await_free(j, slot)
        source = ref.at[batch, pl.ds(block.first_key_of(j), block_kv), kv_head]
        ring.load(slot, *[source] * len(ring.slots))

    def load_d_out():
        load_rows(block.d_out, block.o_smem, plan.value_columns, block.o_full)

    for columns, buffer in zip(plan.key_parts, block.q_smem, strict=True):
        load_rows(block.q, buffer, columns, block.q_full)

    @pl.loop(jnp.int32(0), block.blocks)
    def _(j):
        load(block.keys, block.k, j)
        pl.when(j == 0)(load_d_out)
        load(block.values, block.v, j)

    pl.when(block.blocks == 0)(load_d_out)
