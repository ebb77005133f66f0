"""Forward attention for Hopper GPUs: warp-specialised, persistent, pipelined across tiles.

The structure is FlashAttention-3's (Shah et al. 2024, Algorithm 2), in one thread block per SM that
walks over tiles. A tile is `block_q` query rows of one head, 64 for each consumer warpgroup:

    producer   K0  Q'  K1 V0  K2 V1  ...  V(n-1)      TMA into circular buffers of K and of V
    consumer   S=Q K0   softmax
               S=Q K1 | O+=P V0   softmax of S while O+=P V0 still runs
               ...
               S=Q' K0' | O+=P V(n-1)   the next tile's first logits; then O is divided and stored

Key blocks run from the last that any row sees to the first, so that the blocks that causality cuts
come first, and the steps that need a mask are over before the loop that needs none. These first
steps look for the maximum of each row; the others trust it (`online_softmax.py`). Where that went
wrong, the thread block walks over its tiles a second time and looks in every step. No step looks
where a soft cap bounds all maxima (`soft_cap.known_reference`). With a sliding window, the blocks
that its far edge cuts come last, in a loop of their own.

Where intervals are known only at run time, the table of key blocks is made from them before the
kernel, for each batch entry, and steps with a mask read the bounds of their rows. So it is with
segment ids, of which rows see an interval too where equal ids lie side by side; where they do not,
steps compare the ids of their rows and of their keys. What a tile costs is not known before
either, so thread blocks have no lists, but draw tiles as they get free (`tickets.py`).

A mask function and a dense mask show blocks that are no interval: then each tile has a list of its
key blocks in the place of one, those that need a mask first (`mask_functions.py`).

Where tiles of 64 rows find an SM each, one consumer has each, and no one to take turns with. Their
output leaves from where the queries were, as no others come.

Where tiles are few, their keys are dealt out in shares, which are tiles of their own, and whose
results are put together behind the kernel (`forward_shares.py`).

A warpgroup that has no rows in the last tile, which lie beyond the last query, takes blank steps:
it passes its turns on, so that the others have its time.

A bias of one value a key, or of 16 bits in tiles, comes with K, and the logits begin with it.
Threads load other biases, and the bits of masks, themselves (`elements.py`).

Where lengths of keys alone are known at run time only (`Problem.has_lengths`), tiles are dealt out
as if there were none. What a tile needs is cut where they end, by a number of each batch entry.

With lengths, a mask of keys or such intervals (`Problem.forward_ignores_unseen`) what does not
count may be NaN. Masks replace logits, steps with one zero those rows of V in shared memory that no
row of the tile sees, and at the end zeros replace the output of a row that sees nothing.

Barriers. Full: an mbarrier a slot of Q, K and V, completed by TMA. Free: a named barrier a slot,
the consumers arrive and the producer waits. Turn: a named barrier a consumer; who has the turn
issues its two products, so one warpgroup's softmax runs under another's products (ping-pong).
"""

import functools
import itertools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np

from pallas_kernels import key_masks, segments
from pallas_kernels.columns import as_rows
from pallas_kernels.config import ForwardConfig
from pallas_kernels.dropout import Words
from pallas_kernels.dropout import operands as dropout_operands
from pallas_kernels.element_arrays import NO_ELEMENTS, Blocks, Elements, compressed
from pallas_kernels.forward_block import ThreadBlock
from pallas_kernels.forward_consumer import consume
from pallas_kernels.forward_plan import BIAS_BOX, Plan
from pallas_kernels.forward_shares import combined, dealt_out
from pallas_kernels.forward_tiles import Tiles
from pallas_kernels.hopper import Ring, warp_specialised
from pallas_kernels.interpret import interpreting
from pallas_kernels.intervals import lengths_of
from pallas_kernels.mask_functions import seen_keys
from pallas_kernels.problem import LOG2E, Problem


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    sinks: jax.Array | None = None,
    intervals: jax.Array | None = None,
    ids: tuple[jax.Array, jax.Array] | None = None,
    elements: Elements = NO_ELEMENTS,
    dropout_words: Words | None = None,
    blocks: Blocks | None = None,
    *,
    problem: Problem,
    config: ForwardConfig,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Exact attention.

    Args:
      query: `[B, T, N, H]`. Rows that see no key by intervals are finite, or
        hold anything where `problem.forward_ignores_unseen`.
      key: `[B, S, K, H]`.
      value: `[B, S, K, h]`. Where `problem.forward_ignores_unseen`, rows hold anything that no
        query sees, if no bound rises by more than one between queries that see a key. So they do
        where `problem.has_dense_lists`.
      sinks: None, or `[B, N]` float32: one more logit of each row, without a value.
      intervals: None, or the keys that each query sees, `[B, 2, problem.query_length]` int32, for a
        problem that is dynamic (`intervals.py`), or has lengths.
      ids: None, or for a problem that is segmented the segment ids of queries and keys, int32
        `[B, problem.query_length]` and `[B, problem.key_length]` (`segments.py`).
      elements: mask and bias of a problem that has them (`element_arrays.py`).
      dropout_words: None, or for a problem with dropout the words of queries and keys, as
        `dropout.Words` has them.
      blocks: None, or for a problem that has given lists what they are made of.
      problem: static description.
      config: tile sizes.

    Returns:
      Output `[B, T, N, h]`, natural-log LSE `[B, N, R]` float32, R = ceil(T / block_q) * block_q,
      and references of rows with their log_sum, `[B, N, 2, R]` float32 (`online_softmax.py`), for
      the backward. Of both, rows from T on are arbitrary. A row that sees no key: output 0 and LSE
      -inf.
    """
    batch_inside = elements.shares_bias and not problem.by_batch
    tiles = dealt_out(Tiles(problem, config, batch_inside), config.shares)
    kernel = _build(
        tiles,
        sinks is not None and not tiles.are_shared,
        elements.has_bias_of_keys and problem.may_begin_with_bias,
        elements.tiled_bias_dtype if config.brings_bias and problem.may_begin_with_bias else None,
        interpreting(),
    )
    key_words, elements = key_masks.taken_from(elements, problem)
    words = dropout_operands(dropout_words, keys=config.block_kv)
    optional = *words, *elements.forward_operands(problem)
    if sinks is not None:
        sinks = (compressed(sinks, problem) if problem.unbounded else sinks) * LOG2E
    if tiles.are_shared:
        return combined(kernel(query, key, value, *optional), sinks, tiles)
    if sinks is not None:
        optional = (*optional, sinks)
    if blocks is not None:
        lists = tiles.given_lists(blocks.kinds)
        if problem.has_dense_lists:
            assert blocks.seen is not None
            optional = (*seen_keys(blocks.seen, config.block_kv), *optional)
        return kernel(lists, *blocks.operands, query, key, value, *optional)
    if key_words is not None:
        of_entries = key_masks.KeyBlocks.of_words(key_words, config.block_kv)
        return kernel(query, key, value, key_words, *of_entries, *optional)
    if problem.has_lengths:
        assert intervals is not None
        return kernel(query, key, value, lengths_of(intervals), *optional)
    if not problem.by_batch:
        return kernel(query, key, value, *optional)
    bounds, ids_are_sorted = intervals, None
    if ids is not None:
        query_ids, key_ids = ids
        bounds, ids_are_sorted = segments.intervals(query_ids, key_ids, intervals)
        optional = (query_ids, segments.padded(key_ids, config.block_kv), *optional)
    key_blocks = tiles.key_blocks_of(intervals, ids, ids_are_sorted)
    if problem.forward_ignores_unseen:
        reach = tiles.reach(intervals)
        optional = (reach.first, reach.end, *optional)
    return kernel(key_blocks, query, key, value, bounds, *optional)


@functools.lru_cache
def _build(
    tiles: Tiles,
    with_sinks: bool,
    has_bias_of_keys: bool,
    bias_dtype: np.dtype | None,
    interpret: bool,
):
    plan = Plan(tiles, with_sinks, has_bias_of_keys, bias_dtype)
    problem, config = plan.problem, plan.config

    def attention_forward(*refs, **scratch):
        block = ThreadBlock(plan, refs, **scratch)
        roles = functools.partial(consume, block), functools.partial(_produce, block)
        warp_specialised(block.warpgroup, config.consumers, config.registers, *roles)

    scratch = plan.scratch(interpret)
    kernel = tiles.kernel(attention_forward, scratch, problem.dtype, references=True)
    return tiles.with_tickets(kernel) if problem.by_batch else tiles.with_lists(kernel)


# --- the producer ---------------------------------------------------------------------------------


def _produce(block: ThreadBlock) -> None:
    walk = lambda begin, steps: _Producer(block, begin).walk(steps)
    block.rounds(walk, is_consumer=False)


class _Producer:
    """Fills the buffers of all tiles of a round, each as it gets free."""

    def __init__(self, block: ThreadBlock, begin):
        self.block, self.plan = block, block.plan
        self.round = block.deal.round(begin)

    def walk(self, first_step):
        """The round. Returns the index after its last tile, and the steps by then."""
        self.round.start()
        self.round.load_first_queries(self.load_queries, self.plan.config.query_buffers)
        return self.round.each(self.load_tile, first_step)

    def load_queries(self, index):
        self.block.load_queries(index, self.plan.tiles.locate(self.round.number(index)))

    def load_tile(self, index, steps):
        """Keys and values of a tile, and queries, of the next tile where that is known."""
        block, plan = self.block, self.plan
        _, batch, head = place = plan.tiles.locate(self.round.number(index))
        kv_head = plan.problem.kv_head_of(head)
        blocks = block.key_blocks.count(place)
        key_block = block.key_blocks.numbers(place, blocks)

        def load(ring: Ring, ref, j):
            step = steps + j
            listed = key_block(j) if block.key_blocks.are_listed else None  # read under the wait
            ring.await_free(step)
            number = key_block(j) if listed is None else listed
            rows = pl.ds(number * plan.config.block_kv, plan.config.block_kv)
            ring.load(lambda: ring.slot(step), ref.at[batch, rows, kv_head])

        def load_key(j):
            load(block.keys, block.k, j)
            if plan.comes_by_tma:
                first_key = key_block(j) * plan.config.block_kv
                self.load_bias(place, first_key, block.keys.slot(steps + j))

        def load_value(j):
            load(block.values, block.v, j)

        def load_pair(j):
            load_key(j)
            load_value(j - 1)

        load_key(jnp.int32(0))
        self.round.load_queries(self.load_queries, index, plan.config.query_buffers)
        load_last = lambda: load_value(blocks - 1)
        self.round.load_steps(index, blocks, load_pair, load_last)
        return steps + blocks

    def load_bias(self, place, first_key, slot) -> None:
        """A bias that comes by TMA: of keys, or in tiles of each consumer's rows."""
        block, plan = self.block, self.plan
        tile, batch, head = place
        full = block.keys.full.at[slot]
        if plan.has_bias_of_keys:
            source = block.elements.bias_of_keys(batch, head, first_key, plan.config.block_kv)
            plgpu.copy_gmem_to_smem(source, block.bias_smem.at[slot], full)
        for w, n in itertools.product(range(plan.config.consumers), range(plan.bias_boxes)):
            row, key = plan.tiles.first_row(tile, w), first_key + n * BIAS_BOX
            source = block.elements.bias_tile(batch, head, row, key)
            plgpu.copy_gmem_to_smem(source, as_rows(block.bias_smem.at[slot, w]).at[n], full)
