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

A bias of one value a key, or of 16 bits in tiles, comes with K, and the logits begin with it.
Threads load other biases, and the bits of masks, themselves (`elements.py`).

With such intervals alone (`Problem.forward_ignores_unseen`) what does not count may be NaN. Masks
replace logits, steps with one zero those rows of V in shared memory that no row of the tile sees,
and at the end zeros replace the output of a row that sees nothing.

Barriers. Full: an mbarrier a slot of Q, K and V, completed by TMA. Free: a named barrier a slot,
the consumers arrive and the producer waits. Turn: a named barrier a consumer; who has the turn
issues its two products, so one warpgroup's softmax runs under another's products (ping-pong).
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import intervals as run_time_intervals
from pallas_kernels import online_softmax, scheduler, segments, tickets
from pallas_kernels.columns import Columns, as_rows
from pallas_kernels.config import LOG2E, ForwardConfig, Problem, sees_itself
from pallas_kernels.dropout import DropoutRefs, Words, kept
from pallas_kernels.dropout import operands as dropout_operands
from pallas_kernels.element_arrays import NO_ELEMENTS, Elements, compressed, expanded
from pallas_kernels.elements import NOTHING_LOADED, ElementRefs
from pallas_kernels.elements import masked as masked_by_element
from pallas_kernels.interpret import interpreting
from pallas_kernels.online_softmax import RowState, spread
from pallas_kernels.primitives import (
    BlockVote,
    NamedBarriers,
    SharedZeros,
    all_columns,
    code_fence,
    div_rem,
    fence_async_shared,
    fresh_zero,
    keep_bits,
    load_operand,
    operand_form,
    store_rows,
    warpgroup_any,
    zero_tile,
)
from pallas_kernels.row_masks import ROWS, RowMasks, in_each_row
from pallas_kernels.soft_cap import capped, known_reference, weights_of

_PER_KEY = plgpu.Layout.WGMMA.reduce(0)
_BIAS_BOX = 64  # keys: of 16 bits, as wide as TMA swizzles
_TILE_OVERHEAD = 1.2  # what a tile costs beside its key blocks, in key blocks


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Which tiles there are, and which key blocks each one needs."""

    problem: Problem
    config: ForwardConfig
    batch_inside: bool = False  # number batch entries within a head, as they share its bias

    @property
    def per_head(self) -> int:
        return -(-self.problem.query_length // self.config.block_q)

    @property
    def rows(self) -> int:
        return self.config.whole_tiles(self.problem.query_length)

    @property
    def shift(self) -> int:
        """Rows by which the first tile starts before the first query.

        Where tiles do not divide the rows, some warpgroups of one tile have none. Under a causal
        mask that is the first tile, which sees the fewest keys.
        """
        rows_of_warpgroups = -(-self.problem.query_length // ROWS) * ROWS
        is_causal = self.problem.highest is not None and not self.problem.segmented
        return self.rows - rows_of_warpgroups if is_causal else 0

    def first_row(self, tile, warpgroup):
        """First query row of a warpgroup: beyond the last query for one that has none."""
        row = tile * self.config.block_q + warpgroup * ROWS
        return lax.rem(row + (self.rows - self.shift), jnp.int32(self.rows)) if self.shift else row

    @property
    def count(self) -> int:
        """Of all heads of all batch entries."""
        return self.problem.batch * self.problem.heads * self.per_head

    @property
    def thread_blocks(self) -> int:
        return min(self.config.thread_blocks, self.count)

    def key_blocks(self) -> np.ndarray:
        """What each tile of a head needs: `[tiles, 2]` int32, or `[tiles, 4]` with a lower bound.

        Of its key blocks, which run from the last that a row sees to the first: how many they are;
        how many steps must be exact, those with a mask at the near edge; with a lower bound, how
        many come before those with a mask at the far edge, and the end of the first one, in blocks.
        Where some row sees no key, all steps are exact. A tile that sees nothing takes one block,
        fully masked, so that every tile has a first one.
        """
        p, block_q, block_kv = self.problem, self.config.block_q, self.config.block_kv
        if p.by_batch:
            raise ValueError("problem: got one that is dynamic or segmented, needs key_blocks_of")
        first_row = np.arange(self.per_head) * block_q - self.shift
        last_row = np.minimum(first_row + block_q, p.query_length) - 1
        first_row = np.maximum(first_row, 0)
        seen_by_last = seen_by_first = np.full(self.per_head, p.key_length)
        if p.highest is not None:
            seen_by_first = np.minimum(p.key_length, first_row + 1 + p.highest)
            seen_by_last = np.minimum(p.key_length, last_row + 1 + p.highest)
        end = np.maximum(1, -(-seen_by_last // block_kv))
        # Causal tiles: one more block where none of the masked ones holds a key of the first row.
        unmasked = np.clip((seen_by_first - (p.highest is not None)) // block_kv, 0, end)
        if p.lowest is None:
            return np.stack([end, end - unmasked], axis=1).astype(np.int32)
        first = np.clip((first_row + p.lowest) // block_kv, 0, end - 1)
        first_unmasked = np.maximum(0, -(-(last_row + p.lowest) // block_kv))
        blocks, any_unmasked = end - first, first_unmasked < unmasked
        # Then steps at the far edge may trust the maximum, as each row has seen its last key.
        all_see = last_row + p.lowest < p.key_length
        if p.highest is not None:
            all_see &= first_row + p.highest >= 0
        exact = np.where(all_see, end - unmasked, blocks)
        near = np.where(any_unmasked, end - np.maximum(first_unmasked, first), exact)
        return np.stack([blocks, exact, near, end], axis=1).astype(np.int32)

    def reach(self, intervals: jax.Array | None) -> run_time_intervals.Reach:
        """What each tile sees, but for ids; intervals are those of `key_blocks_of`."""
        p = self.problem
        rows = np.minimum(np.arange(self.rows), p.query_length - 1)
        bounds = run_time_intervals.of_bounds(p.lowest, p.highest, rows, p.key_length)
        seen = bounds if intervals is None else intervals
        return run_time_intervals.reach(seen, self.config.block_q, empty_rows_count=not p.dynamic)

    def key_blocks_of(
        self,
        intervals: jax.Array | None,
        ids: tuple[jax.Array, jax.Array] | None = None,
        ids_are_sorted: jax.Array | None = None,
    ) -> jax.Array:
        """The same for each batch entry, `[B, tiles, 4 or 5]`.

        Args:
          intervals: the keys `[B, 2, T]` of each query, if the problem is dynamic. A row that sees
            nothing then lets its tile go without masks.
          ids: segment ids of queries and keys, if the problem is segmented.
          ids_are_sorted: None, or of each batch entry what `segments.intervals` says, for a fifth
            column: whether steps with a mask compare ids, but for the first. That is of one more
            block then, of which no row sees a key.
        """
        block_q, block_kv, reach = self.config.block_q, self.config.block_kv, self.reach(intervals)
        # One more block where none of the masked ones holds a key of some row.
        blocks = segments.Blocks(
            first=reach.first // block_kv,
            end=-(-reach.end // block_kv),
            first_unmasked=-(-reach.common_first // block_kv),
            end_unmasked=(reach.common_end - 1) // block_kv,
        )
        one_more: jax.Array | int = 0
        if ids is not None:
            sharing = segments.sharing(*ids, block_q, block_kv)
            blocks = segments.restricted(blocks, sharing)
            one_more = 1 - self._first_key_is_seen(sharing, blocks.end_unmasked)
        end = jnp.maximum(1, blocks.end)
        first = jnp.clip(blocks.first, 0, end - 1)
        unmasked, first_unmasked = jnp.clip(blocks.end_unmasked, 0, end), blocks.first_unmasked
        count, any_unmasked = end - first, first_unmasked < unmasked
        all_masked = count  # how many are exact where none is without a mask
        if ids is not None and not self.problem.dynamic:
            # Of the tile's first row.
            own_block = np.arange(self.per_head, dtype=np.int32)[None] * block_q // block_kv
            all_masked = jnp.where(self._see_themselves(*ids), end - own_block, count)
            all_masked = jnp.clip(all_masked, 1, count)
        exact = jnp.where(any_unmasked, end - unmasked + one_more, all_masked)
        near = jnp.where(any_unmasked, end - jnp.maximum(first_unmasked, first), all_masked)
        if ids_are_sorted is None:
            return jnp.stack([count, exact, near, end], axis=-1)
        comparing = jnp.broadcast_to(~ids_are_sorted[:, None], count.shape).astype(jnp.int32)
        exact = jnp.maximum(exact, 1)  # with the first step, which looks for maxima anyway
        entries = (x + comparing for x in (count, exact, near, end))
        return jnp.stack([*entries, comparing], axis=-1)

    def _see_themselves(self, query_ids: jax.Array, key_ids: jax.Array) -> jax.Array | np.ndarray:
        """Whether each row of a tile sees the key of its own number, `[B, tiles]`.

        Then every row has a key in the blocks from that of the tile's first row on, and those
        before them, even with a mask, need not be exact.
        """
        p = self.problem
        if not sees_itself(p.lowest, p.highest) or p.query_length > p.key_length:
            return np.zeros((1, self.per_head), bool)
        equal = query_ids == key_ids[:, : p.query_length]
        equal = jnp.pad(equal, ((0, 0), (0, self.rows - p.query_length)), constant_values=True)
        return equal.reshape(equal.shape[0], self.per_head, -1).all(-1)

    def _first_key_is_seen(self, sharing: segments.Sharing, block: jax.Array) -> jax.Array:
        """Whether ids let all rows of a tile see the first key of a block, `[B, tiles]` int32.

        Args:
          block: `[B, tiles]`; where its rows have one id.
        """
        block = jnp.clip(block, 0, sharing.first.shape[-1] - 1)
        seen = jnp.take_along_axis(sharing.first, block[:, :, None], axis=-1)
        return seen[..., 0].astype(jnp.int32)

    def schedule(self, thread_blocks: int) -> np.ndarray:
        """The tiles of each thread block, as `scheduler.deal` gives them; see `locate`.

        If costs are known at run time only, as `scheduler.deals_by_rank` does, with ranks in the
        place of tiles.
        """
        number, tile, cost = self.order()
        if self.problem.by_batch:
            return scheduler.deals_by_rank(number, tile, self.per_head, thread_blocks)
        return scheduler.deal(number, cost, thread_blocks)

    def order(self, last_section: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The order of starting: number of each tile, its number in its head, and its cost.

        If costs are known at run time only, with ranks in the place of tiles.

        Args:
          last_section: as for `scheduler.tile_order`.
        """
        p = self.problem
        cost = np.zeros(self.per_head)
        if not p.by_batch:
            cost = self.key_blocks()[:, 0] + _TILE_OVERHEAD
        bytes_per_kv_head = p.key_length * p.pair_bytes
        section = scheduler.heads_per_section(
            self.config.section_bytes,
            bytes_per_kv_head,
            tiles_per_kv_head=self.per_head * p.group,
            slots=self.config.thread_blocks,
            kv_heads=p.batch * p.kv_heads,
            group=p.group,
        )
        tile, head = scheduler.tile_order(cost, p.batch * p.heads, section, last_section)
        return head * self.per_head + tile, tile, cost[tile]

    def kernel(
        self,
        body: Callable,
        scratch: dict[str, Any],
        padded_query_length: int,
        out_dtype: np.dtype,
        references: bool = False,
    ) -> Callable:
        """A forward kernel over all tiles, for `with_lists` or `with_tickets`.

        Args:
          body: of refs of the schedule, or the order and what is drawn, of the key blocks, of the
            operands, of the results, and of scratch by name.
          scratch: types of shared memory and barriers.
          padded_query_length: of the output.
          out_dtype: of the output.
          references: results are three.

        Returns:
          A function of what stands for these before the output, that returns the output, the LSE
          `[B, N, rows]`, and if wanted references of rows and their log_sum, `[B, N, 2, rows]`.
        """
        p = self.problem
        out_shape = (p.batch, padded_query_length, p.heads, p.value_width)
        of_rows = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
        results = (
            jax.ShapeDtypeStruct(out_shape, out_dtype),
            of_rows((p.batch, p.heads, self.rows)),
            of_rows((p.batch, p.heads, 2, self.rows)),
        )
        return plgpu.kernel(
            body,
            out_type=results if references else results[:2],
            grid=(self.thread_blocks,),
            grid_names=("block",),
            num_threads=self.config.consumers + 1,
            thread_name="warpgroup",
            scratch_types=scratch,
            compiler_params=plgpu.CompilerParams(
                approx_math=True,
                lowering_semantics=plgpu.LoweringSemantics.Lane,
                reduction_scratch_bytes=0,  # those here are of rows, which a quad of threads has
            ),
        )

    def with_lists(self, kernel: Callable) -> Callable:
        """A function of the operands that runs a kernel whose schedule has lists of tiles.

        Operands begin with `key_blocks_of` where these depend on the batch entry.
        """
        schedule = self.schedule(self.thread_blocks)
        if not self.problem.by_batch:
            tables = schedule, self.key_blocks()
            return lambda *operands: kernel(*map(jnp.asarray, tables), *operands)

        def run(key_blocks, *operands):
            order = scheduler.longest_first(schedule, _cost(key_blocks), self.problem.heads)
            return kernel(order, key_blocks, *operands)

        return run

    def with_tickets(self, kernel: Callable) -> Callable:
        """The same, for a kernel whose thread blocks draw their tiles."""
        numbers, _, _ = self.order(tickets.LAST_TILES * self.thread_blocks)

        def run(key_blocks, *operands):
            order = scheduler.order_by_rank(numbers, _cost(key_blocks), self.problem.heads)
            drawn = jax.new_ref(tickets.none_drawn(self.thread_blocks, self.count))
            return kernel(order, drawn, key_blocks, *operands)

        return run

    def locate(self, number):
        """Tile, batch entry and head of a tile's number; of any if it is below 0."""
        if self.problem.by_batch:
            number = jnp.maximum(number, 0)
        head_of_all, tile = div_rem(number, self.per_head)
        if self.batch_inside:
            head, batch = div_rem(head_of_all, self.problem.batch)
        else:
            batch, head = div_rem(head_of_all, self.problem.heads)
        return tile, batch, head


def _cost(key_blocks: jax.Array) -> jax.Array:
    """Of each tile of a head, `[B, tiles]`, from `Tiles.key_blocks_of`."""
    return key_blocks[:, :, 0].astype(jnp.float32) + _TILE_OVERHEAD


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    sinks: jax.Array | None = None,
    intervals: jax.Array | None = None,
    ids: tuple[jax.Array, jax.Array] | None = None,
    elements: Elements = NO_ELEMENTS,
    dropout_words: Words | None = None,
    *,
    problem: Problem,
    config: ForwardConfig,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Exact attention.

    Args:
      query: `[B, T, N, H]`; T a multiple of 8. Rows that see no key by intervals are finite, or
        hold anything where `problem.forward_ignores_unseen`.
      key: `[B, S, K, H]`; S a multiple of 8, of which problem.key_length are attended.
      value: `[B, S, K, h]`. Where `problem.forward_ignores_unseen`, rows hold anything that no
        query sees, if no bound rises by more than one between queries that see a key.
      sinks: None, or `[B, N]` float32: one more logit of each row, without a value.
      intervals: None, or the keys that each query sees, `[B, 2, problem.query_length]` int32, for a
        problem that is dynamic (`intervals.py`).
      ids: None, or for a problem that is segmented the segment ids of queries and keys, int32
        `[B, problem.query_length]` and `[B, problem.key_length]` (`segments.py`).
      elements: mask and bias of a problem that has them (`element_arrays.py`).
      dropout_words: None, or for a problem with dropout the words of queries and keys, as
        `dropout.Words` has them.
      problem: static description; its lengths may be up to 7 below T and S.
      config: tile sizes.

    Returns:
      Output `[B, T, N, h]`, natural-log LSE `[B, N, R]` float32, R = ceil(T / block_q) * block_q,
      and references of rows with their log_sum, `[B, N, 2, R]` float32 (`online_softmax.py`), for
      the backward. Rows from problem.query_length on are arbitrary. A row that sees no key: output
      0 and LSE -inf.
    """
    kernel = _build(
        problem,
        config,
        query.shape[1],
        sinks is not None,
        elements.has_bias_of_keys and problem.may_begin_with_bias,
        elements.tiled_bias_dtype if config.brings_bias and problem.may_begin_with_bias else None,
        elements.shares_bias and not problem.by_batch,
        interpreting(),
    )
    words = dropout_operands(dropout_words, keys=config.block_kv)
    optional = *words, *elements.forward_operands(problem)
    if sinks is not None:
        optional = (*optional, sinks * LOG2E)
    if not problem.by_batch:
        return kernel(query, key, value, *optional)
    tiles = Tiles(problem, config)
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
    problem: Problem,
    config: ForwardConfig,
    padded_query_length: int,
    with_sinks: bool,
    has_bias_of_keys: bool,
    bias_dtype: np.dtype | None,
    batch_inside: bool,
    interpret: bool,
):
    tiles = Tiles(problem, config, batch_inside)
    brings_bias = bias_dtype is not None  # in tiles
    comes_by_tma = has_bias_of_keys or brings_bias  # beside K
    dynamic, by_batch, has_far_edge = problem.dynamic, problem.by_batch, problem.has_far_edge
    key_blocks = None if by_batch else tiles.key_blocks()
    any_mask = has_far_edge or (key_blocks is not None and bool(key_blocks[:, 1].any()))
    # The bias of rows that see nothing may be NaN, which `online_softmax.close` does not stop. And
    # with a window, loops of their own for other steps take registers that a bias needs.
    loads_bias = problem.has_bias and not comes_by_tma
    loads_elements = problem.has_mask or loads_bias
    mask_throughout = problem.has_bias and has_far_edge
    # With a bias or a mask a row's first keys may be hidden, or as good as that. Steps look for
    # maxima until each row has seen another: all steps, and no second round is needed, where loops
    # of both kinds take registers that there are not. None looks where the reference is known.
    reference = known_reference(problem)
    searches = problem.has_elements and reference is None
    settles = searches and not (problem.segmented or mask_throughout)
    exact_throughout = searches and not settles
    one_round_does = exact_throughout or reference is not None
    # What has no second round, or so far a bias that its rows never settle, is bounded at once.
    always_bounded = exact_throughout or (settles and problem.adds_bias)
    unseen = -jnp.inf if reference is None else 0.0
    ignores_unseen = problem.forward_ignores_unseen
    # Each step waits for V of its own keys: those with a mask zero rows of it.
    own_values = config.early_values or ignores_unseen

    consumers, stages, query_buffers = config.consumers, config.stages, config.query_buffers
    block_kv, dtype = config.block_kv, problem.dtype
    key_columns = Columns.whole(problem.width)
    value_columns = Columns.whole(problem.value_width)
    has_cap = problem.soft_cap is not None
    # Then addresses and bounds too are made anew where they are used.
    has_dropout, in_boxes = problem.dropout > 0, key_columns.tiles > 1
    beside_wide_output = problem.segmented or has_dropout or (in_boxes and dynamic)
    registers_are_scarce = (
        has_cap
        or loads_bias
        or (problem.widest > 192 and beside_wide_output)
        or (problem.segmented and has_dropout and problem.widest > 64)
    )
    # Then entries of lists are.
    registers_are_short = registers_are_scarce or (
        query_buffers == 1 and (config.block_kv > 64 or problem.segmented)
    )
    # Then the number of a tile that was drawn is: 8 bytes would spill at width 64.
    cap_beside_lengths = has_cap and dynamic and not problem.segmented
    # The output is staged some columns at a time. A bias of keys is where half of it would be.
    staged_columns = value_columns.in_parts(64 if has_bias_of_keys else config.staged_columns)
    allowed = online_softmax.weight_range(dtype)

    turn = NamedBarriers(first=consumers + 2, count=consumers, arrivers=1)
    k_free = NamedBarriers(turn.first + consumers, stages, arrivers=consumers)
    v_free = NamedBarriers(k_free.first + stages, stages, arrivers=consumers)
    q_free = NamedBarriers(v_free.first + stages, query_buffers, arrivers=consumers)
    block_vote = BlockVote(consumers + 1)
    unseen_values = SharedZeros(consumers)
    named: dict[str, Any] = dict(
        turn=turn,
        k_free=k_free,
        v_free=v_free,
        q_free=q_free,
        block_vote=block_vote,
        unseen_values=unseen_values,
    )

    bias_boxes = block_kv // _BIAS_BOX if brings_bias else 0  # a consumer

    scratch: dict[str, Any] = dict(
        q_smem=key_columns.smem(query_buffers, consumers, ROWS, dtype=dtype),
        k_smem=key_columns.smem(stages, block_kv, dtype=dtype),
        v_smem=value_columns.smem(stages, block_kv, dtype=dtype),
        o_smem=staged_columns[0].smem(consumers, ROWS, dtype=dtype),
        q_full=plgpu.Barrier(
            num_arrivals=consumers * key_columns.tiles, num_barriers=query_buffers
        ),
        k_full=plgpu.Barrier(
            num_arrivals=key_columns.tiles + consumers * bias_boxes + int(has_bias_of_keys),
            num_barriers=stages,
        ),
        v_full=plgpu.Barrier(num_arrivals=value_columns.tiles, num_barriers=stages),
    )
    if has_bias_of_keys:
        scratch["bias_smem"] = plgpu.SMEM((stages, block_kv), jnp.float32)
    if bias_dtype is not None:
        scratch["bias_smem"] = plgpu.SMEM(
            (stages, consumers, bias_boxes, ROWS, _BIAS_BOX),
            bias_dtype,
            transforms=operand_form(_BIAS_BOX),
        )
    if by_batch:
        scratch["entries"] = tickets.TicketsInRounds.scratch()
    if interpret:
        scratch["twins"] = {name: barriers.scratch() for name, barriers in named.items()}

    def attention_forward(
        schedule_ref, *more_refs,
        q_smem, k_smem, v_smem, o_smem, q_full, k_full, v_full, bias_smem=None,
        entries=None, twins=None,
    ):  # fmt: skip
        drawn_refs, more_refs = more_refs[: int(by_batch)], more_refs[int(by_batch) :]
        key_blocks_ref, q_ref, k_ref, v_ref, *optional_refs, o_ref, lse_ref, reference_ref = (
            more_refs
        )
        # Intervals come first, then the reach of tiles, ids, words, elements and sinks.
        intervals_refs = optional_refs[: int(by_batch) + 2 * int(ignores_unseen)]
        ids_refs = optional_refs[len(intervals_refs) :][: 2 * int(problem.segmented)]
        rest = optional_refs[len(intervals_refs) + len(ids_refs) :]
        dropout, rest = DropoutRefs.split(problem, rest)
        elements, _ = ElementRefs.split(problem, rest, comes_by_tma=comes_by_tma)
        # Elements that come late take the registers of weights that no product reads any more.
        elements_early = config.elements_early and not elements.wide
        late = loads_elements and not elements_early
        open_products = 0 if late or config.products_first else value_columns.tiles
        turn, k_free, v_free, q_free, block_vote, unseen_values = (
            dataclasses.replace(barriers, twins=twins and twins[name])
            for name, barriers in named.items()
        )
        masks = RowMasks(
            problem,
            block_kv,
            tiles.rows,
            intervals_ref=intervals_refs[0] if by_batch else None,
            ids_refs=ids_refs,
        )
        warpgroup = lax.axis_index("warpgroup")
        block = lax.axis_index("block")
        zero = jnp.int32(0)
        no_rows = in_each_row(zero)

        def listed(column, anew=registers_are_scarce):
            """An entry of this thread block's list."""
            return schedule_ref[block + fresh_zero() if anew else block, column]

        drawn = None
        if by_batch:
            (drawn_ref,) = drawn_refs
            entries_ref, entries_full = entries
            drawn = tickets.TicketsInRounds(
                schedule_ref,
                drawn_ref,
                entries_ref,
                tiles.count,
                tiles.thread_blocks,
                lambda: block,
                entries_full,
            )
        else:
            tiles_listed = listed(0)

        def tile_count():
            return listed(0) if registers_are_scarce else tiles_listed

        slot = lambda step: lax.rem(step, jnp.int32(stages))

        def query_buffer(index):
            buffer = lax.rem(index, jnp.int32(query_buffers))
            return buffer + fresh_zero() if registers_are_scarce else buffer

        def needs(tile, batch, column):
            """An entry of `Tiles.key_blocks`."""
            entry = (batch, tile, column) if by_batch else (tile, column)
            return key_blocks_ref[entry]

        def end_of(tile, batch):
            """The end of the first key block of a tile, in blocks."""
            return needs(tile, batch, 3 if has_far_edge else 0)

        def rounds(one_round):
            """Runs `one_round(begin, steps)` once, and again if a reference was too low."""
            if one_round_does:
                one_round(zero, zero)
                return

            if drawn:
                drawn.rounds(one_round, lambda too_low: block_vote.any(too_low, warpgroup))
                return

            def run(carry):
                begin, steps = carry
                _, steps, too_low = one_round(begin, steps)
                is_last = jnp.logical_not(block_vote.any(too_low, warpgroup)) | (begin > 0)
                return jnp.where(is_last, 2 * tile_count(), tile_count()), steps

            lax.while_loop(lambda carry: carry[0] < 2 * tile_count(), run, (zero, zero))

        @pl.when(warpgroup < consumers)
        def _consumer():
            plgpu.set_max_registers(config.registers[0], action="increase")
            take_turn = lambda: turn.wait(warpgroup)
            pass_turn = lambda: turn.arrive(lax.rem(warpgroup + 1, jnp.int32(consumers)))
            pl.when(warpgroup == consumers - 1)(pass_turn)  # warpgroup 0 begins

            first_row_of = lambda tile: tiles.first_row(tile, warpgroup)
            rows_of = lambda tile: pl.ds(first_row_of(tile), ROWS)

            def bounds_of(tile, batch):
                """What gives the bounds of rows but for ids, or None where these are static.

                It loads them only then where registers are short.
                """
                if not dynamic:
                    return lambda: None
                if registers_are_scarce or problem.segmented:
                    return lambda: masks.load_bounds(batch, first_row_of(tile))
                bounds = masks.load_bounds(batch, first_row_of(tile))
                return lambda: bounds

            def ids_of(tile, batch, j):
                """Ids of rows, and where those of the keys of step j are."""
                first_key = (end_of(tile, batch) - 1 - j) * block_kv
                return masks.load_ids(batch, first_row_of(tile), first_key)

            def bits_of(tile, batch, j, *, near=True, is_first=False):
                """Which keys of step j rows see whose ids are in an interval; None without ids.

                A first step that is of one more block sees none.
                """
                if not problem.segmented:
                    return None
                there = needs(tile, batch, 4) == 0 if is_first else True
                first_row, first_key = first_row_of(tile), (end_of(tile, batch) - 1 - j) * block_kv
                bounds = masks.load_bounds(batch, first_row)
                bits = all_columns(ROWS, block_kv, there)
                return masks.visible(bits, first_row, first_key, bounds, near=near)

            def masked(tile_values, tile, key_block, bounds, bits, *, ids=None, near=True):
                """Logits, or weights if their reference is known, without those of unseen keys."""
                if bits is not None:
                    return keep_bits(tile_values, bits, unseen)
                first_row, first_key = first_row_of(tile), key_block * block_kv
                return masks.masked(
                    tile_values, first_row, first_key, bounds, ids, near=near, fill=unseen
                )

            def there_is(key_block):
                """The number of a block that there is: a first step may be of one more."""
                if not problem.segmented:
                    return key_block
                return jnp.minimum(key_block, -(-problem.key_length // block_kv) - 1)

            def load_elements(number, j, *, is_first=False):
                """Mask and bias of step j of a tile, asked for before the product is there."""
                if not loads_elements:
                    return NOTHING_LOADED
                tile, batch, head = tiles.locate(number())
                first_row = tiles.first_row(tile, warpgroup)
                key_block = end_of(tile, batch) - 1 - j
                if is_first:
                    key_block = there_is(key_block)
                first_key = key_block * block_kv
                return elements.load(
                    batch, head, first_row, first_key, block_kv, early=elements_early
                )

            def words_of(tile, batch, head):
                """Words of dropout of the rows; None if there is no dropout."""
                return dropout.of_rows(batch, head, tiles.first_row(tile, warpgroup))

            def values_of(products, loaded, state, *, exact=True):
                """Logits and their factor, or weights and None if their reference is known."""
                if reference is None:
                    return capped(products, loaded, problem, exact=exact)
                return weights_of(products, state.reference, loaded, problem), None

            def first_softmax(products, tile, key_block, bounds, bits, loaded, bounded):
                state = None if reference is None else online_softmax.begin(ROWS, reference)
                tile_values, factor = values_of(products, loaded, state)
                bounds = bounds()
                if any_mask:
                    tile_values = masked(tile_values, tile, key_block, bounds, bits)
                tile_values = masked_by_element(tile_values, loaded, unseen)
                if state is None:
                    weights, state = online_softmax.start(tile_values, factor, allowed, bounded)
                else:
                    weights, state = tile_values, online_softmax.add(tile_values, state)
                if bounds is not None:
                    state = online_softmax.close(state, seeing=bounds[0] < bounds[1])
                return weights, state

            def first_operand(weights, place, key_block):
                """The weights of `first_softmax` as the first product of a tile reads them."""
                tile, batch, head = place
                words, first_key = words_of(tile, batch, head), there_is(key_block) * block_kv
                return kept(weights, dropout.dropped(words, batch, first_key, block_kv), dtype)

            def compute(o_acc, s_acc, begin, first_step):
                # A cap bounds all logits.
                bounded = not has_cap and (always_bounded or begin > 0)
                if drawn:
                    number_of = drawn.number
                else:
                    end = begin + tile_count()
                    number_of = lambda index: listed(1 + index - begin, anew=registers_are_short)

                def put_bias(k_slot, *, exact=True):
                    """Tiles of a bias where the product is added to them, outside of the turn."""
                    if not bias_boxes:
                        return
                    boxes = [bias_smem.at[k_slot, warpgroup, n] for n in range(bias_boxes)]
                    parts = [load_operand(box, _BIAS_BOX, bias_dtype) for box in boxes]
                    bias = jnp.concatenate(parts, axis=1).astype(jnp.float32)
                    if exact and problem.adds_bias and bias_dtype != jnp.float16:
                        bias = compressed(bias, problem)
                    s_acc[...] = bias * (1.0 / problem.scale)
                    fence_async_shared()  # TMA will overwrite the bias that was read

                def issue_logits(buffer, k_slot):
                    if has_bias_of_keys:
                        bias = plgpu.load(bias_smem.at[k_slot], layout=_PER_KEY)
                        s_acc[...] = lax.broadcast_in_dim(bias, (ROWS, block_kv), [1])
                        fence_async_shared()  # TMA will overwrite the bias that was read
                    elif not bias_boxes:
                        s_acc[...] = zero_tile(ROWS, block_kv)
                    key_columns.contract(s_acc, q_smem.at[buffer, warpgroup], k_smem.at[k_slot])

                def zero_unseen_values(v_slot, tile, batch, key_block):
                    """Rows of V that no query of a tile sees: 0 times what they hold may be NaN."""
                    # Addresses are made anew: registers are short.
                    first, end = (ref[batch + fresh_zero(), tile] for ref in intervals_refs[1:])
                    first_key = key_block * block_kv
                    is_cut = (first_key < first) | (first_key + block_kv > end)
                    if problem.key_length % block_kv:  # zeros stand behind the last key
                        is_cut &= (first_key < first) | (end < problem.key_length)

                    @pl.when(is_cut)
                    def _():
                        rows = first - first_key, end - first_key
                        box_width = value_columns.box_width
                        unseen_values.keep_rows(v_smem.at[v_slot], *rows, warpgroup, box_width)

                def await_first_value(there, v_slot):
                    """V of a tile's first key block, if there is such a tile."""
                    if own_values:
                        pl.when(there())(lambda: plgpu.barrier_wait(v_full.at[v_slot]))

                def issue_output(weights, v_slot):
                    if not own_values:
                        plgpu.barrier_wait(v_full.at[v_slot])
                    value_columns.expand(o_acc, weights, v_smem.at[v_slot])

                def load_logits():
                    """While the output product that was issued behind them goes on, if any may."""
                    return plgpu.wgmma_accumulator_load(s_acc, wait_n=open_products)

                def start_tile(index, steps, place, number, there):
                    """The first key block of a tile, if it is there, with no other product open."""
                    tile, batch, _ = place
                    end_block, bounds = end_of(tile, batch), bounds_of(tile, batch)
                    bits = bits_of(tile, batch, zero, is_first=True)
                    loaded = load_elements(number, zero, is_first=True)

                    @pl.when(there())
                    def _():
                        plgpu.barrier_wait(q_full.at[query_buffer(index)])
                        plgpu.barrier_wait(k_full.at[slot(steps)])

                    put_bias(slot(steps))
                    issue_logits(query_buffer(index), slot(steps))
                    logits = plgpu.wgmma_accumulator_load(s_acc, wait_n=0)
                    pl.when(there())(lambda: k_free.arrive(slot(steps)))
                    weights, state = first_softmax(
                        logits, tile, end_block - 1, bounds, bits, loaded, bounded
                    )
                    await_first_value(there, slot(steps))
                    # LLVM would carry float32 into the loop and cast there.
                    operand = first_operand(weights, place, end_block - 1)
                    operand = lax.optimization_barrier(operand)
                    if ignores_unseen:
                        pl.when(there())(
                            lambda: zero_unseen_values(slot(steps), tile, batch, end_block - 1)
                        )
                    return operand, state

                def key_step(
                    j, carry, *, steps, index, place, words, end_block, exact, far=False,
                    comparing=False,
                ):  # fmt: skip
                    """Logits of step j's key block together with the output of the step before."""
                    weights, state = carry
                    tile, batch, _ = place
                    needs_mask = exact or far
                    has_ids = needs_mask and problem.segmented and registers_are_short
                    if loads_elements or has_ids or cap_beside_lengths:  # registers are short
                        number = number_of(index + fresh_zero())
                        tile, batch, _ = tiles.locate(number)
                        end_block = end_of(tile, batch)
                    if needs_mask:
                        bounds = bounds_of(tile, batch)
                        ids = ids_of(tile, batch, j) if comparing else None
                        bits = None if comparing else bits_of(tile, batch, j, near=exact)
                    k_slot, v_slot = slot(steps + j), slot(steps + j - 1)
                    looks = exact or exact_throughout  # for maxima
                    plgpu.barrier_wait(k_full.at[k_slot])
                    put_bias(k_slot, exact=looks)
                    take_turn()
                    issue_logits(query_buffer(index), k_slot)
                    issue_output(weights, v_slot)
                    if not config.products_first:
                        pass_turn()
                    loaded = load_elements(lambda: number, j)
                    products = load_logits()
                    if config.products_first:
                        output = plgpu.wgmma_accumulator_load(o_acc, wait_n=0)
                        pass_turn()
                        k_free.arrive(k_slot)
                        v_free.arrive(v_slot)
                        code_fence(end_block)
                    else:
                        k_free.arrive(k_slot)
                    correction = None
                    tile_values, factor = values_of(products, loaded, state, exact=looks)
                    if needs_mask and any_mask:
                        key_block = end_block - 1 - j
                        tile_values = masked(
                            tile_values, tile, key_block, bounds(), bits, ids=ids, near=exact
                        )
                    tile_values = masked_by_element(tile_values, loaded, unseen)
                    if reference is not None:
                        weights, state = tile_values, online_softmax.add(tile_values, state)
                    elif looks:
                        weights, correction, state = online_softmax.advance(
                            tile_values, factor, allowed, state, bounded
                        )
                    else:
                        weights, state = online_softmax.go_on(tile_values, factor, state)
                    first_key = (end_block - 1 - j) * block_kv
                    if cap_beside_lengths and has_dropout:  # only now: registers are short
                        words = words_of(*tiles.locate(number_of(index + fresh_zero())))
                    dropped = dropout.dropped(words, batch, first_key, block_kv)
                    if not config.products_first:
                        # A cast of the weights before the wait makes ptxas serialise every wgmma.
                        weights, dropped, correction, state = lax.optimization_barrier(
                            (weights, dropped, correction, state)
                        )
                        # A wait here keeps ptxas from computing the weights after the product.
                        if config.early_values:
                            plgpu.barrier_wait(v_full.at[k_slot])
                        output = plgpu.wgmma_accumulator_load(o_acc, wait_n=0)
                        v_free.arrive(v_slot)
                    if correction is not None:
                        output *= spread(correction, output.shape)
                    o_acc[...] = output
                    operand = kept(weights, dropped, dtype)
                    if own_values and not config.early_values:
                        plgpu.barrier_wait(v_full.at[k_slot])
                    if ignores_unseen and needs_mask:
                        if registers_are_scarce:  # read anew: registers are short
                            tile, batch, _ = tiles.locate(number_of(index + fresh_zero()))
                            end_block = end_of(tile, batch)
                        zero_unseen_values(k_slot, tile, batch, end_block - 1 - j)
                    return operand, state

                def end_rows(state, any_too_low, tile, batch, head):
                    """Stores LSE and more; returns 1 / sum, and if a reference was too low so far.

                    1 / sum is negative where a row that sees nothing may have seen NaN.
                    """
                    if ignores_unseen:
                        state, closed = online_softmax.cleared(state)
                    sink = in_each_row(optional_refs[-1][batch, head]) if with_sinks else None
                    in_nats = None
                    if problem.adds_bias:
                        in_nats = lambda x: expanded(x * (1.0 / LOG2E), problem)
                    (inverse, lse, log_sum), too_low = online_softmax.finish(
                        state, allowed.limit, sink, in_nats
                    )
                    store_rows(lse_ref.at[batch, head, rows_of(tile)], lse)
                    for n, of_rows in enumerate((state.reference, log_sum)):
                        store_rows(reference_ref.at[batch, head, n, rows_of(tile)], of_rows)
                    if dropout.refs:
                        inverse *= 1.0 / problem.kept_share
                    if ignores_unseen:
                        inverse = jnp.where(closed, -1.0, inverse)
                    if one_round_does:  # no reference is
                        return inverse, any_too_low
                    return inverse, any_too_low | too_low.astype(jnp.int32)

                def store_output(output, inverse, tile, batch, head):
                    """Divides by the row sums and sends output to global memory."""
                    staging = o_smem.at[warpgroup]
                    factor = spread(inverse, output.shape)
                    output *= factor
                    if ignores_unseen:
                        output = jnp.where(factor < 0.0, 0.0, output)
                    o_acc[...] = zero_tile(ROWS, value_columns.size)
                    for columns in staged_columns:
                        if columns.first > 0:
                            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                        staged = slice(columns.first, columns.first + columns.size)
                        columns.put(
                            staging, output[:, staged].astype(dtype), anew=registers_are_scarce
                        )
                        plgpu.commit_smem()
                        columns.store(staging, o_ref.at[batch, rows_of(tile), head])

                def end_tile_under_next(index, steps, number, carry, following):
                    """The next tile's first logits run with this tile's last output product."""
                    weights, state, too_low = carry
                    tile, batch, head = tiles.locate(number)
                    next_tile, next_batch, _ = next_place = tiles.locate(following)
                    buffer, k_slot, v_slot = query_buffer(index + 1), slot(steps), slot(steps - 1)
                    there = lambda: following >= 0 if drawn else index + 1 < end
                    q_free.arrive(query_buffer(index))
                    inverse, too_low = end_rows(state, too_low, tile, batch, head)
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    bounds = bounds_of(next_tile, next_batch)
                    bits = bits_of(next_tile, next_batch, zero, is_first=True)

                    # After the last tile the logits are of no tile, and go nowhere.
                    @pl.when(there())
                    def _():
                        plgpu.barrier_wait(q_full.at[buffer])
                        plgpu.barrier_wait(k_full.at[k_slot])

                    put_bias(k_slot)
                    take_turn()
                    issue_logits(buffer, k_slot)
                    issue_output(weights, v_slot)
                    pass_turn()
                    loaded = load_elements(lambda: following, zero, is_first=True)
                    logits = load_logits()
                    pl.when(there())(lambda: k_free.arrive(k_slot))
                    end_block = end_of(next_tile, next_batch)
                    weights, next_state = first_softmax(
                        logits, next_tile, end_block - 1, bounds, bits, loaded, bounded
                    )
                    weights, next_state = lax.optimization_barrier((weights, next_state))
                    output = plgpu.wgmma_accumulator_load(o_acc, wait_n=0)
                    v_free.arrive(v_slot)
                    await_first_value(there, k_slot)
                    # Only now are there registers for what dropout takes.
                    weights = first_operand(weights, next_place, end_block - 1)
                    store_output(output, inverse, tile, batch, head)
                    if ignores_unseen:
                        pl.when(there())(
                            lambda: zero_unseen_values(k_slot, next_tile, next_batch, end_block - 1)
                        )
                    return weights, next_state, too_low

                def end_tile_before_next(index, steps, number, carry, following):
                    """The next queries arrive where this tile's were while it ends."""
                    weights, state, too_low = carry
                    tile, batch, head = tiles.locate(number)
                    next_place = tiles.locate(following)
                    q_free.arrive(0)
                    inverse, too_low = end_rows(state, too_low, tile, batch, head)
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    take_turn()
                    issue_output(weights, slot(steps - 1))
                    pass_turn()
                    output = plgpu.wgmma_accumulator_load(o_acc, wait_n=0)
                    v_free.arrive(slot(steps - 1))
                    store_output(output, inverse, tile, batch, head)
                    number = lambda: number_of(index + 1)
                    there = lambda: number() >= 0 if drawn else index + 1 < end
                    return *start_tile(index + 1, steps, next_place, number, there), too_low

                end_tile = end_tile_under_next if query_buffers > 1 else end_tile_before_next

                def whole_tile(index, carry):
                    steps, weights, state, too_low = carry
                    number = number_of(index)
                    following = None if drawn else number_of(index + 1)
                    tile, batch, head = place = tiles.locate(number)
                    blocks, needing_mask = needs(tile, batch, 0), needs(tile, batch, 1)
                    exact = jnp.where(begin > 0, blocks, jnp.maximum(needing_mask, 1))
                    if mask_throughout:
                        exact = blocks
                    end_block = end_of(tile, batch) if has_far_edge else blocks
                    step = functools.partial(
                        key_step,
                        steps=steps,
                        index=index,
                        place=place,
                        words=words_of(tile, batch, head),
                        end_block=end_block,
                    )

                    def masked_steps(first, end, carry, **options):
                        """Steps with a mask: all compare segment ids, or none does."""
                        if problem.segmented:
                            compared = jnp.where(needs(tile, batch, 4) > 0, end, first)
                            comparing = functools.partial(step, comparing=True, **options)
                            carry = lax.fori_loop(first, compared, comparing, carry)
                            first = compared
                        return lax.fori_loop(first, end, functools.partial(step, **options), carry)

                    carry = weights, state
                    if settles:

                        def unsettled(state):
                            rows = online_softmax.unsettled(state, allowed)
                            return warpgroup_any(rows.astype(jnp.int32), warpgroup)

                        def exact_step(carry):
                            j, carry, _ = carry
                            weights, state = step(j, carry, exact=True)
                            return j + 1, (weights, state), unsettled(state)

                        exact, carry, _ = lax.while_loop(
                            lambda carry: (carry[0] < exact) | ((carry[0] < blocks) & carry[2]),
                            exact_step,
                            (jnp.int32(1), carry, unsettled(state)),
                        )
                    else:
                        carry = masked_steps(jnp.int32(1), exact, carry, exact=True)
                    near = blocks
                    if has_far_edge and not mask_throughout:
                        near = jnp.maximum(exact, needs(tile, batch, 2))
                    if not mask_throughout:
                        rest = functools.partial(step, exact=False)
                        carry = lax.fori_loop(exact, near, rest, carry)
                    if has_far_edge and not mask_throughout:
                        carry = masked_steps(near, blocks, carry, exact=False, far=True)
                    if loads_elements or cap_beside_lengths:
                        number = number_of(index + fresh_zero())  # read anew: registers are short
                    if drawn:  # by now
                        drawn.wait(index + 1)
                    if drawn or loads_elements:
                        following = number_of(index + 1 + fresh_zero())
                    weights, state, too_low = end_tile(
                        index, steps + blocks, number, (*carry, too_low), following
                    )
                    return steps + blocks, weights, RowState(*state), too_low

                first_number, there = lambda: number_of(begin), lambda: begin < end
                if drawn:
                    first_number, there = lambda: drawn.first_number(begin), lambda: jnp.bool_(True)
                place = tiles.locate(first_number())
                first = start_tile(begin, first_step, place, first_number, there)
                carry = first_step, *first, no_rows
                if drawn:
                    end, carry = drawn.each(begin, whole_tile, carry)
                else:
                    carry = lax.fori_loop(begin, end, whole_tile, carry)
                steps, _, _, too_low = carry
                plgpu.wait_smem_to_gmem(0)
                return end, steps, too_low

            accumulators = (
                plgpu.ACC((ROWS, value_columns.size), jnp.float32),
                plgpu.ACC((ROWS, block_kv), jnp.float32),
            )
            rounds(lambda *args: pl.run_scoped(lambda *refs: compute(*refs, *args), *accumulators))

        @pl.when(warpgroup == consumers)
        def _producer():
            plgpu.set_max_registers(config.registers[1], action="decrease")

            def load_tiles(begin, first_step):
                if drawn:
                    drawn.begin(begin)
                    locate = lambda index: tiles.locate(drawn.number(index))
                else:
                    end = begin + tile_count()
                    locate = lambda index: tiles.locate(listed(1 + index - begin))

                def load_queries(index):
                    tile, batch, head = locate(index)
                    buffer = query_buffer(index)
                    pl.when(index >= query_buffers)(lambda: q_free.wait(buffer))
                    for w in range(consumers):
                        rows = pl.ds(tiles.first_row(tile, w), ROWS)
                        source = q_ref.at[batch, rows, head]
                        key_columns.load(source, q_smem.at[buffer, w], q_full.at[buffer])

                def load_bias(tile, batch, head, first_key, k_slot):
                    for w, n in itertools.product(range(consumers), range(bias_boxes)):
                        place = tiles.first_row(tile, w), first_key + n * _BIAS_BOX
                        target = as_rows(bias_smem.at[k_slot, w]).at[n]
                        source = elements.bias_tile(batch, head, *place)
                        plgpu.copy_gmem_to_smem(source, target, k_full.at[k_slot])

                def whole_tile(index, steps):
                    tile, batch, head = locate(index)
                    kv_head = lax.div(head, jnp.int32(problem.group))
                    blocks = needs(tile, batch, 0)
                    end_block = end_of(tile, batch) if has_far_edge else blocks

                    def load(ref, buffers, columns, full, free, j):
                        step = steps + j
                        pl.when(step >= stages)(lambda: free.wait(slot(step)))
                        rows = pl.ds((end_block - 1 - j) * block_kv, block_kv)
                        source = ref.at[batch, rows, kv_head]
                        columns.load(source, buffers.at[slot(step)], full.at[slot(step)])

                    def load_key(j):
                        load(k_ref, k_smem, key_columns, k_full, k_free, j)
                        if has_bias_of_keys:
                            first_key, buffer = (end_block - 1 - j) * block_kv, slot(steps + j)
                            source = elements.bias_of_keys(batch, head, first_key, block_kv)
                            full = k_full.at[buffer]
                            plgpu.copy_gmem_to_smem(source, bias_smem.at[buffer], full)
                        if brings_bias:
                            load_bias(
                                tile, batch, head, (end_block - 1 - j) * block_kv, slot(steps + j)
                            )

                    load_value = functools.partial(
                        load, v_ref, v_smem, value_columns, v_full, v_free
                    )

                    load_key(zero)
                    if drawn:  # the next tile is drawn too late for queries ahead
                        load_queries(index)
                    else:
                        wanted = index + (query_buffers - 1)
                        pl.when(wanted < end)(lambda: load_queries(wanted))

                    def load_pair(j):
                        load_key(j)
                        load_value(j - 1)

                    load_last = lambda: load_value(blocks - 1)
                    if drawn:
                        drawn.load_and_draw(index, begin > 0, blocks, load_pair, load_last)
                    else:
                        pl.loop(jnp.int32(1), blocks)(load_pair)
                        load_last()
                    return steps + blocks

                if drawn:
                    return *drawn.each(begin, whole_tile, first_step), no_rows
                if query_buffers > 1:
                    load_queries(begin)
                return end, lax.fori_loop(begin, end, whole_tile, first_step), no_rows

            rounds(load_tiles)

    kernel = tiles.kernel(attention_forward, scratch, padded_query_length, dtype, references=True)
    return tiles.with_tickets(kernel) if by_batch else tiles.with_lists(kernel)
