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

delta = rowsum(dO * O) - dLSE comes from `row_statistics.py`. What is left of dQ, the factor scale
and the cast, is a small kernel of its own. For deterministic gradients dQ comes from
`backward_query.py`, and this kernel gives dK and dV alone, as `backward_key.py` does at widths
above 128.

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

dQ is accumulated in fragment order (`primitives.store_fragment`): the order in which the threads of
a warpgroup hold an accumulator, so that storing it takes neither a swizzle nor address registers.

Barriers. Full: an mbarrier for V, and for each slot of K, of Q and of dO, completed by TMA. First
full: an mbarrier for the number of the first tile that is drawn. The others are named barriers.
Free: for V, and for each slot of Q and dO, the consumers arrive and the producer waits. Stored: for
each consumer and buffer of dS', it arrives and the other one waits; for the first step of a tile,
the producer arrives; at its end, they meet there. Staged, for dQ of each consumer and for dK and dV
of both: they arrive, the producer waits and sends. Sent: it has, and each consumer may stage again.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import (
    backward_key,
    backward_query,
    backward_query_product,
    bias_gradient,
    row_statistics,
    soft_cap,
)
from pallas_kernels.columns import Columns, put_tile
from pallas_kernels.config import (
    BACKWARD_CONSUMERS,
    BACKWARD_QUERY,
    DQ_TILE,
    BackwardConfig,
    BackwardKeyConfig,
    BackwardQueryConfig,
    Problem,
    check_backward,
    whole_tiles,
)
from pallas_kernels.dropout import Words, as_operand, d_logits, negated_transposed
from pallas_kernels.element_arrays import NO_ELEMENTS, Elements
from pallas_kernels.elements import biased
from pallas_kernels.elements import masked as masked_by_element
from pallas_kernels.far_rows import shared_by_key, weights_by_key
from pallas_kernels.interpret import interpreting
from pallas_kernels.key_tiles import QUERIES, KeyTiles, Section, Walk, per_query, with_words
from pallas_kernels.online_softmax import spread
from pallas_kernels.primitives import (
    HAND_ORDERED,
    NamedBarriers,
    SharedZeros,
    add_when_stored,
    await_count,
    code_fence,
    div_rem,
    fence_async_shared,
    fragment_shape,
    fresh_rows,
    fresh_zero,
    load_fragment,
    load_rows,
    operand_form,
    own_warpgroup,
    prefetch,
    store_fragment,
    zero_fragment,
    zero_tile,
)

_CONSUMERS = BACKWARD_CONSUMERS
_KEYS = 64  # of a consumer: the M of a wgmma
_BLOCK_KV = _CONSUMERS * _KEYS
_K_SLOTS = 2


def attention_gradients(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    d_lse: jax.Array | None,
    references: jax.Array | None = None,
    *,
    problem: Problem,
    config: BackwardConfig | BackwardKeyConfig,
    deterministic: bool = False,
    query_config: BackwardQueryConfig | None = None,
    intervals: jax.Array | None = None,
    ids: tuple[jax.Array, jax.Array] | None = None,
    elements: Elements = NO_ELEMENTS,
    dropout_words: Words | None = None,
    with_bias_gradient: bool = False,
) -> tuple[jax.Array, ...]:
    """Gradients of attention.

    Args:
      query: `[B, T, N, H]`; T a multiple of 8, rows from problem.query_length on zero. Rows that
        see no key are finite, unless problem.backward_ignores_unseen and not deterministic.
      key, value: `[B, S, K, H]` and `[B, S, K, h]`; S a multiple of 8. Rows that no query sees are
        finite, unless as above.
      out, d_out: `[B, T, N, h]`, as query; out need not be finite in rows that see no key.
      lse: `[B, N, >= query_length]` float32, natural log; -inf for a row that sees no key.
      d_lse: `[B, N, query_length]` float32; None for zeros.
      references: `[B, N, 2, >= query_length]` float32, what `forward.attention` gave beside lse;
        None where lse is not of these keys alone.
      problem: static description; its lengths may be up to 7 below T and S.
      config: tile sizes; a `BackwardKeyConfig` where query or value is wider than 128.
      deterministic: gradients are the same bit by bit from run to run: dQ is made by a kernel of
        its own (`backward_query.py`), not summed in the order in which thread blocks end. At widths
        above 128 they always are.
      query_config: that kernel's tile sizes; None for those of `BACKWARD_QUERY`.
      intervals: None, or the keys that each query sees, `[B, 2, problem.query_length]` int32, for a
        problem that is dynamic (`intervals.py`).
      ids: None, or for a problem that is segmented the segment ids of queries and keys, int32
        `[B, problem.query_length]` and `[B, problem.key_length]` (`segments.py`).
      elements: mask and bias of a problem that has them (`element_arrays.py`).
      dropout_words: None, or for a problem with dropout the words of queries and keys, as
        `dropout.Words` has them.
      with_bias_gradient: the bias has a gradient too, which takes a kernel of its own.

    Returns:
      Gradients of query, key and value, in their shapes and dtype, and of the bias if wanted. Rows
      from key_length on are arbitrary.
    """
    check_backward(config, problem.widest)
    query_config = query_config or BACKWARD_QUERY[problem.widest]
    is_wide = isinstance(config, BackwardKeyConfig)
    adds = not (deterministic or is_wide)  # to dQ, in the order in which thread blocks end
    zeroed_later = range(0)
    if adds and isinstance(config, BackwardConfig):
        zeroed_later = _zeroed_later(problem, config)
    block_q = config.block_q if adds else max(config.block_q, query_config.block_q)
    in_whole = lambda block: -(-problem.query_length // block) * block
    padded_rows = rows_of_statistics = in_whole(block_q)
    if with_bias_gradient:  # with more, dQ has tiles at its end that nothing uses
        rows_of_statistics = max(padded_rows, in_whole(bias_gradient.BLOCK_Q))
    any_far_ref = jax.new_ref(jnp.zeros(1, jnp.int32))
    start, minus_delta, far, *zeros = row_statistics.row_statistics(
        out,
        lse,
        d_out,
        d_lse,
        references,
        any_far_ref,
        problem=problem,
        padded_rows=rows_of_statistics,
        dq_columns=_columns_of_dq_tiles(problem) if adds else (),
        zeroed_later=zeroed_later,
    )
    masks = intervals, ids, elements, dropout_words
    operands = query, key, value, d_out, start, minus_delta, far
    d_bias: tuple[jax.Array, ...] = ()
    if with_bias_gradient:
        d_bias = (bias_gradient.bias_gradient(*operands, *masks, problem=problem),)
    statistics = (start,) if is_wide else (start, minus_delta)
    start = with_words(dropout_words, *statistics)
    any_far = jax.freeze(any_far_ref)
    operands_of_keys = any_far, query, key, value, d_out, start, minus_delta, far
    of_query_alone = functools.partial(
        backward_query.query_gradient, *operands, *masks, problem=problem, config=query_config
    )
    if isinstance(config, BackwardKeyConfig):
        of_keys = functools.partial(
            backward_key.key_value_gradients,
            *operands_of_keys,
            *masks,
            problem=problem,
            config=config,
        )
        sections = backward_key.d_logits_sections(problem, config)
        if not sections:
            return of_query_alone(), *of_keys(), *d_bias
        of_query = functools.partial(
            backward_query_product.query_gradient,
            key=key,
            problem=problem,
            tiles=backward_key.key_tiles(problem, config),
            query_rows=query.shape[1],
        )
        return *_by_sections(sections, of_keys, of_query), *d_bias
    main = _build_main(problem, config, key.shape[1], interpreting(), adds)
    elements_of_keys = elements.operands(transposed=True)
    main = functools.partial(
        main, intervals, ids, dropout_words, *elements_of_keys, *operands_of_keys
    )
    if deterministic:
        return of_query_alone(), *main(), *d_bias
    dq_ref = jax.new_ref(*zeros)
    gradients = main(dq_ref)
    cast = _build_cast(problem, padded_rows, query.shape[1], interpreting())
    starts = (start,) if problem.backward_ignores_unseen else ()  # then there is no dropout
    return cast(jax.freeze(dq_ref), *starts), *gradients, *d_bias


def _by_sections(
    sections: list[Section], of_keys: Callable, of_query: Callable
) -> tuple[jax.Array, ...]:
    """Gradients of query, key and value, with dS' of one section at a time in memory."""
    first, *others = sections
    d_key, d_value, d_logits = of_keys(section=first)
    if not others:
        return of_query(d_logits, section=first), d_key, d_value
    # All in one place: refs, so that no kernel begins before the one before it has ended.
    results = d_key, d_value, d_logits = tuple(map(jax.new_ref, (d_key, d_value, d_logits)))
    d_query = jax.new_ref(of_query(d_logits, section=first))
    for section in others:
        of_keys(section=section, results=results)
        of_query(d_logits, d_query=d_query, section=section)
    return tuple(map(jax.freeze, (d_query, d_key, d_value)))


def _columns(problem: Problem) -> tuple[Columns, Columns]:
    """Columns of query and key, and of value."""
    key, value = Columns.whole(problem.width), Columns.whole(problem.value_width)
    # dQ is made of dS' and K, and dV leaves from where dS' was: all in boxes of one width. Where
    # dQ has two tiles of columns, zeros fill what is missing.
    if key.box_width == value.box_width and (key.size > DQ_TILE) == (problem.widest > DQ_TILE):
        return key, value
    return (
        Columns(problem.width, problem.widest),
        Columns(problem.value_width, whole_tiles(problem.value_width)),
    )


def _dq_tiles(columns: Columns) -> list[slice]:
    """The columns of dQ in one tile, or in two as much alike as whole boxes allow."""
    if columns.size <= DQ_TILE:
        return [slice(0, columns.size)]
    middle = -(-columns.size // columns.box_width // 2) * columns.box_width
    return [slice(0, middle), slice(middle, columns.size)]


def _columns_of_dq_tiles(problem: Problem) -> tuple[int, ...]:
    return tuple(map(_size, _dq_tiles(_columns(problem)[0])))


def _key_tiles(problem: Problem, config: BackwardConfig, with_query_gradient: bool) -> KeyTiles:
    # Tiles read Q and dO, and add to dQ in float32.
    columns, _ = _columns(problem)
    row_bytes = problem.pair_bytes + (4 * columns.size if with_query_gradient else 0)
    return KeyTiles(problem, _BLOCK_KV, config.block_q, row_bytes=row_bytes)


def _draws(problem: Problem, with_query_gradient: bool) -> bool:
    """Whether thread blocks draw their tiles, and if they make dQ, zero it for those to come."""
    if problem.soft_cap is not None or problem.dropout:  # registers are too short
        return False
    if problem.by_batch and problem.widest > 64:
        return True
    # At width 64 tiles of documents are so short that what a draw takes counts. A draw would spill
    # beside elements, and lists where there are both. Without dQ lists are as fast.
    return with_query_gradient and problem.segmented == problem.has_elements


def _zeroed_ahead(problem: Problem, config: BackwardConfig, tiles: KeyTiles) -> tuple[int, range]:
    """Key heads of a section, and those whose dQ is zeroed by tiles of the section before.

    In interpret mode, where thread blocks run one after the other, there are none of these.
    """
    if interpreting() or not _draws(problem, with_query_gradient=True):
        return 1, range(0)
    return tiles.prepared(tiles.thread_blocks(config.thread_blocks, draws=True))


def _zeroed_later(problem: Problem, config: BackwardConfig) -> range:
    """The tiles of dQ that the main kernel zeros."""
    tiles = _key_tiles(problem, config, with_query_gradient=True)
    _, kv_heads = _zeroed_ahead(problem, config, tiles)
    of_kv_head = _dq_tiles_of_kv_head(tiles)
    return range(kv_heads.start * of_kv_head, kv_heads.stop * of_kv_head)


def _dq_tiles_of_kv_head(tiles: KeyTiles) -> int:
    """Tiles of dQ of all query heads of a key head: one for each consumer in a step."""
    return tiles.problem.group * tiles.query_blocks * _CONSUMERS


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
    group, width, dtype = problem.group, problem.widest, problem.dtype
    key_columns, value_columns = _columns(problem)
    dq_tiles = _dq_tiles(key_columns)
    # dV leaves from where dS' was, if it is made of tiles of that shape.
    dv_apart = value_columns.size % DQ_TILE > 0
    staged_values = [value_columns] if dv_apart else value_columns.in_parts(DQ_TILE)
    has_cap, has_dropout = problem.soft_cap is not None, bool(problem.dropout)
    draws = _draws(problem, with_query_gradient)
    # At width 64 causal tiles of few steps would take 5% longer, with dropout the producer spills.
    keeps_numbers = (width > 64 or problem.by_batch) and not has_dropout
    # Start and share, and with dropout words of queries and delta, are one array, as copies take
    # registers.
    words_row = 1 + int(problem.has_shares)
    together = words_row + (2 if has_dropout else 0)
    tiles = _key_tiles(problem, config, with_query_gradient)
    query_blocks = tiles.query_blocks
    dq_tiles_of_kv_head = _dq_tiles_of_kv_head(tiles)
    section, zeroed = 1, range(0)
    if with_query_gradient:
        section, zeroed = _zeroed_ahead(problem, config, tiles)
    thread_blocks = tiles.thread_blocks(config.thread_blocks, draws=draws)
    # There are registers for weights and dQ at a time only where all else is simple.
    simple = not (tiles.any_mask or group > 1) and key_columns.tiles == value_columns.tiles == 1
    early_weights = (simple and not has_dropout) or (
        width <= 64 and not (problem.segmented and group > 1)
    )
    early_weights = early_weights and not problem.has_elements
    # Where there are no registers for dP' at a time.
    weights_first = problem.has_elements or has_cap
    # Then addresses are made anew in each step.
    crowded = has_cap or has_dropout or problem.segmented or problem.has_bias
    if width <= 64 and tiles.any_mask:  # H64-full-ragged would spill 40 bytes
        crowded |= problem.lowest is None and problem.highest is None and not problem.by_batch
    # Beside ids at width 128 the branches of the cap would spill 8 to 16 bytes.
    cap_branches = width <= 64 or not problem.segmented
    # Beside dropout one loop more would spill; in H64-causal-ragged-dropout one less would.
    far_in_masked = has_dropout and with_query_gradient and (width > 64 or problem.has_mask)
    ignores_unseen = problem.backward_ignores_unseen and with_query_gradient
    # Where query heads share keys times vary by more than it gains.
    prefetches = with_query_gradient and width > 64 and group == 1
    registers = config.registers
    if has_cap and problem.by_batch and with_query_gradient and width == 128:
        registers = (232, 40)  # the producer spills with fewer

    ds_stored = NamedBarriers(first=_CONSUMERS + 2, count=2 * _CONSUMERS, arrivers=1)
    free = NamedBarriers(ds_stored.first + ds_stored.count, stages, arrivers=_CONSUMERS)
    v_free = NamedBarriers(free.first + stages, 1, arrivers=_CONSUMERS)
    dq_staged = NamedBarriers(v_free.first + 1, _CONSUMERS, arrivers=1)
    gradients_staged = NamedBarriers(dq_staged.first + _CONSUMERS, 1, arrivers=_CONSUMERS)
    sent = NamedBarriers(gradients_staged.first + 1, _CONSUMERS, arrivers=1)
    unseen_rows = SharedZeros(_CONSUMERS)
    named: dict[str, Any] = dict(
        ds_stored=ds_stored,
        free=free,
        v_free=v_free,
        dq_staged=dq_staged,
        gradients_staged=gradients_staged,
        sent=sent,
        unseen_rows=unseen_rows,
    )

    scratch: dict[str, Any] = dict(
        k_smem=key_columns.smem(_K_SLOTS, _BLOCK_KV, dtype=dtype),
        v_smem=value_columns.smem(1, _BLOCK_KV, dtype=dtype),
        q_smem=key_columns.smem(stages, block_q, dtype=dtype),
        o_smem=value_columns.smem(stages, block_q, dtype=dtype),
        ds_smem=plgpu.SMEM(
            (2, block_q // DQ_TILE, _BLOCK_KV, DQ_TILE),
            dtype,
            transforms=operand_form(key_columns.box_width),
        ),
        start_smem=plgpu.SMEM((stages, together, block_q), jnp.float32),
        k_full=plgpu.Barrier(num_arrivals=key_columns.tiles, num_barriers=_K_SLOTS),
        v_full=plgpu.Barrier(num_arrivals=value_columns.tiles),
        q_full=plgpu.Barrier(num_arrivals=key_columns.tiles + 1, num_barriers=stages),
        o_full=plgpu.Barrier(
            num_arrivals=value_columns.tiles + int(not has_dropout), num_barriers=stages
        ),
    )
    # What thread blocks draw stands behind delta: there is no room for more, as each ref takes
    # whole KB.
    if not has_dropout:
        scratch["delta_smem"] = plgpu.SMEM((stages + int(draws), block_q), jnp.float32)
    if draws:
        scratch["first_full"] = plgpu.Barrier(num_arrivals=1)
    if dv_apart:
        scratch["dv_smem"] = value_columns.smem(1, _BLOCK_KV, dtype=dtype)
    if with_query_gradient:
        scratch["dq_smem"] = plgpu.SMEM((_CONSUMERS, *fragment_shape(DQ_TILE)), jnp.float32)
    if interpret:
        scratch["twins"] = {name: barriers.scratch() for name, barriers in named.items()}

    def attention_backward(
        *all_refs,
        k_smem, v_smem, q_smem, o_smem, ds_smem, start_smem,
        k_full, v_full, q_full, o_full, first_full=None, delta_smem=None, dv_smem=None,
        dq_smem=None, twins=None,
    ):  # fmt: skip
        block = lax.axis_index("block")
        entries = delta_smem.at[stages] if draws else None
        walk, refs = Walk.of_refs(tiles, block, all_refs, thread_blocks, entries, first_full)
        drawn = walk.drawn
        q_ref, k_ref, v_ref, do_ref, start_ref, delta_ref, far_ref, *dq_refs, dk_ref, dv_ref = refs
        ds_stored, free, v_free, dq_staged, gradients_staged, sent, unseen_rows = (
            dataclasses.replace(barriers, twins=twins and twins[name])
            for name, barriers in named.items()
        )
        zero = jnp.int32(0)
        # Nor, beside S', for dQ of the step before, which is done first then.
        is_wide, has_bias = width > 64, problem.has_bias
        dq_first = has_cap or (
            walk.has_elements_of_queries
            and (
                (has_dropout and (is_wide or (has_bias and problem.has_mask)))
                or (has_bias and (problem.segmented or (problem.dynamic and is_wide)))
            )
        )

        def dq_place(consumer: int):
            """Which 64 rows of a step's dQ a consumer has, and which columns."""
            row, column = divmod(consumer, len(dq_tiles))
            return row, dq_tiles[column]

        def value_staging(n, consumer: int):
            """Where part n of a consumer's dV is staged, as `Columns` take it."""
            own = pl.ds(consumer * _KEYS, _KEYS)
            return ds_smem.at[n, :, own] if dv_smem is None else dv_smem.at[n, :, own]

        def first_index():
            """Lists are walked from their end, since comparing with 0 takes no register."""
            return zero if drawn else walk.count() - 1

        def after(index):
            return index + 1 if drawn else index - 1

        def is_tile(index):
            return drawn.number(index) < tiles.count if drawn else index >= 0

        def over_tiles(whole_tile, carry):
            """Runs `whole_tile(index, carry)` for each tile."""

            def one_tile(state):
                index, carry, _ = state
                carry = whole_tile(index, carry)
                return index + 1, carry, is_tile(index + 1)

            if drawn:  # entries are not to be read in the loop's condition, as they are written
                lax.while_loop(lambda state: state[2], one_tile, (zero, carry, is_tile(zero)))
                return
            lax.while_loop(
                lambda state: state[0] >= 0,
                lambda state: (state[0] - 1, whole_tile(*state)),
                (first_index(), carry),
            )

        def k_slot(index):
            return index & (_K_SLOTS - 1)

        # One copy of the code a consumer: addresses become constants, which saves registers.
        def _consumer(consumer: int):
            plgpu.set_max_registers(registers[0], action="increase")
            own_first_key = _KEYS * consumer
            own = pl.ds(own_first_key, _KEYS)
            dq_row, dq_columns = dq_place(consumer)

            def compute(dk_acc, dv_acc, s_acc, dp_acc, dq_acc=None):
                def load_start(slot):
                    start = plgpu.load(start_smem.at[slot, 0], layout=QUERIES)
                    return per_query(start, _KEYS)

                def load_query_words(slot):
                    words = plgpu.load(start_smem.at[slot, words_row], layout=QUERIES)
                    return lax.bitcast_convert_type(words, jnp.int32)

                def issue_logits(slot, index):
                    # What a cap is for must come alone.
                    s_acc[...] = zero_tile(_KEYS, block_q) if has_cap else load_start(slot)
                    k = k_smem.at[k_slot(index) + fresh_zero(), :, own]
                    key_columns.contract(s_acc, k, q_smem.at[slot])

                def issue_d_weights(slot):
                    dp_acc[...] = zero_tile(_KEYS, block_q)
                    v = v_smem.at[fresh_zero(), :, own]
                    value_columns.contract(dp_acc, v, o_smem.at[slot])

                def load_weights(loaded, j, *, far, wait_n):
                    """Weights, of rows far from 0 what `shared` makes weights of if it is due."""
                    products = plgpu.wgmma_accumulator_load(s_acc, wait_n=wait_n)
                    if far and problem.has_marks:
                        start = start_smem.at[slot_anew(j), 0]
                        return weights_by_key(products, loaded, problem, start, far_ref)
                    logits, to_log2 = biased(products, problem, loaded)
                    return jnp.exp2(logits * to_log2)

                def shared(weights, j, *, far):
                    """Late, where a wait for an mbarrier ends a block of code anyway."""
                    if not (far and problem.has_shares):
                        return weights
                    return shared_by_key(weights, start_smem.at[slot_anew(j)], problem)

                def slot_anew(j):
                    return lax.rem(j + fresh_zero(), jnp.int32(stages))

                def masked(weights, mask, j, equal_ids, loaded, fill=0.0):
                    if mask is not None:
                        weights = mask(weights, j, equal_ids, fill)
                    return masked_by_element(weights, loaded, fill)

                def dropped(weights, key_words, slot):
                    """The weights, negative where they are dropped."""
                    if not has_dropout:
                        return weights
                    query_words = load_query_words(slot)
                    return negated_transposed(weights, key_words, query_words, problem)

                def load_capped_weights(loaded, mask, j, equal_ids, slot, key_words, *, wait_n):
                    """Weights, the operand of dV, and times the derivative of the cap, for dS'."""
                    products = plgpu.wgmma_accumulator_load(s_acc, wait_n=wait_n)
                    logits, _ = soft_cap.capped(products, loaded, problem, branches=cap_branches)
                    logits = masked(logits, mask, j, equal_ids, loaded, soft_cap.UNSEEN)
                    words = None
                    if has_dropout:
                        query_words = load_query_words(slot)
                        words = spread(key_words, logits.shape), per_query(query_words, _KEYS)
                    return soft_cap.capped_weights(logits, load_start(slot), problem, words)

                def load_ds(weights, slot):
                    d_weights = plgpu.wgmma_accumulator_load(dp_acc, wait_n=value_columns.tiles)
                    minus_delta = (
                        start_smem.at[slot, words_row + 1] if has_dropout else delta_smem.at[slot]
                    )
                    minus_delta = plgpu.load(minus_delta, layout=QUERIES)
                    minus_delta = per_query(minus_delta, _KEYS)
                    return d_logits(weights, d_weights, minus_delta, problem).astype(dtype)

                def slots(j):
                    # Addresses made anew each step: registers are short.
                    slot = lax.rem(j, jnp.int32(stages))
                    return slot, slot + fresh_zero(), lax.rem(j, jnp.int32(2))

                def keep_rows(ref, columns, first, end):
                    """Zeroes other rows of a tile: 0 times what they hold may be NaN."""
                    unseen_rows.keep_rows(ref, first, end, consumer, columns.box_width)

                def await_keys(index):
                    slot = k_slot(index)
                    plgpu.barrier_wait(k_full.at[slot])
                    plgpu.barrier_wait(v_full)
                    if not ignores_unseen:
                        return
                    first, end = walk.counting_keys(walk.locate(index))

                    @pl.when((first > 0) | (end < _BLOCK_KV))
                    def _():
                        keep_rows(k_smem.at[slot], key_columns, first, end)
                        keep_rows(v_smem.at[0], value_columns, first, end)

                def await_query(slot, mask, j):
                    plgpu.barrier_wait(q_full.at[slot])
                    if mask is None or not ignores_unseen:
                        return
                    plgpu.barrier_wait(o_full.at[slot])  # while no product is open
                    first, end, is_cut = mask.counting_queries(j)

                    @pl.when(is_cut)
                    def _():
                        keep_rows(q_smem.at[slot], key_columns, first, end)
                        keep_rows(o_smem.at[slot], value_columns, first, end)

                def await_d_out(slot, mask, j):
                    if mask is None or not ignores_unseen:
                        plgpu.barrier_wait(o_full.at[slot])
                    else:  # as it has been waited for; the code stays where it is all the same
                        code_fence(j)

                def issue_late_dq(parity, index):
                    """dQ of a step before, once the other's dS' of that step is there too."""
                    ds_stored.wait(2 * parity + (1 - consumer))
                    dq_acc[...] = zero_tile(DQ_TILE, _size(dq_columns))
                    plgpu.wgmma(
                        dq_acc,
                        ds_smem.at[parity, dq_row].transpose((1, 0)),
                        key_columns.part(k_smem.at[k_slot(index) + fresh_zero()], dq_columns),
                    )

                def hand_over_dq():
                    dq = plgpu.wgmma_accumulator_load(dq_acc, wait_n=0)
                    sent.wait(consumer)
                    store_fragment(_fragment(dq_smem.at[consumer], dq_columns), dq)
                    fence_async_shared()
                    dq_staged.arrive(consumer)

                def hand_over_gradients(parity, index):
                    """Stages dK where K was, and dV where dS' was, once the other has read them."""
                    dk_factor = problem.scale * problem.d_logit_unit
                    dk = plgpu.wgmma_accumulator_load(dk_acc, wait_n=0) * dk_factor
                    dv = plgpu.wgmma_accumulator_load(dv_acc, wait_n=0)
                    if ignores_unseen:  # 0 times NaN of a query that counts is none of theirs
                        first, end = walk.counting_keys(walk.locate(index))
                        row = fresh_rows() + own_first_key
                        seen = (row >= first) & (row < end)
                        dk, dv = (jnp.where(spread(seen, x.shape), x, 0.0) for x in (dk, dv))
                    if has_dropout:
                        dv *= 1.0 / problem.kept_share
                    dk_acc[...] = zero_tile(_KEYS, key_columns.size)
                    dv_acc[...] = zero_tile(_KEYS, value_columns.size)
                    ds_stored.arrive(2 * parity + consumer)
                    ds_stored.wait(2 * parity + (1 - consumer))
                    dk = dk.astype(dtype)
                    k = k_smem.at[k_slot(index) + fresh_zero(), :, own]
                    key_columns.put(k, dk, anew=True)  # or addresses are kept over all steps
                    for n, columns in enumerate(staged_values):
                        staged = slice(columns.first, columns.first + columns.size)
                        d_value = dv[:, staged].astype(dtype)
                        staging = value_staging(n + fresh_zero(), consumer)
                        columns.put(staging, d_value, anew=True)
                    fence_async_shared()
                    gradients_staged.arrive(0)

                def hand_over_ds(parity, ds):
                    # Two buffers: the other may still read what was stored one step ago.
                    for n, columns in enumerate(_tiles_of(block_q)):
                        stored, box_width = ds_smem.at[parity, n, own], key_columns.box_width
                        put_tile(stored, ds[:, columns], box_width, anew=crowded)
                    fence_async_shared()
                    ds_stored.arrive(2 * parity + consumer)

                def step_with_dq(j, mask, far, load_elements, index, key_words):
                    slot, o_slot, parity = slots(j)
                    await_query(slot, mask, j)
                    issue_logits(slot, index)
                    issue_late_dq(1 - parity, index)
                    equal_ids = None
                    if mask is not None and not has_dropout:  # while S' is made
                        equal_ids = mask.equal_ids(j)
                    loaded = load_elements(j)
                    weights = load_weights(loaded, j, far=far, wait_n=1)
                    if width <= 64:  # there are registers for it beside dQ
                        weights = dropped(weights, key_words, slot)
                    if early_weights:
                        # A wait here keeps ptxas from computing the weights after dQ.
                        await_d_out(o_slot, mask, j)
                        weights = shared(weights, j, far=far)
                        hand_over_dq()
                    else:
                        hand_over_dq()
                        await_d_out(o_slot, mask, j)
                        weights = shared(weights, j, far=far)
                    if width > 64:
                        weights = dropped(weights, key_words, slot)
                    if mask is not None and has_dropout:  # only now are there registers for it
                        equal_ids = mask.equal_ids(j)
                    issue_d_weights(o_slot)
                    weights = masked(weights, mask, j, equal_ids, loaded)
                    operand = as_operand(weights, problem)
                    value_columns.expand(dv_acc, operand, o_smem.at[o_slot])
                    ds = load_ds(weights, o_slot)
                    key_columns.expand(dk_acc, ds, q_smem.at[slot])
                    hand_over_ds(parity, ds)
                    plgpu.wgmma_wait(0)
                    free.arrive(slot)

                def step_without_dq(j, mask, far, load_elements, index, key_words):
                    slot, o_slot, parity = slots(j)
                    equal_ids = mask.equal_ids(j) if mask is not None else None
                    await_query(slot, mask, j)
                    issue_logits(slot, index)
                    loaded = load_elements(j)
                    wait_n = 0 if weights_first else value_columns.tiles
                    if not weights_first:
                        await_d_out(o_slot, mask, j)
                        issue_d_weights(o_slot)
                    if has_cap:
                        operand, weights = load_capped_weights(
                            loaded, mask, j, equal_ids, o_slot, key_words, wait_n=wait_n
                        )
                    else:
                        weights = load_weights(loaded, j, far=far, wait_n=wait_n)
                        weights = shared(weights, j, far=far)
                    if weights_first:
                        await_d_out(o_slot, mask, j)
                        issue_d_weights(o_slot)
                    if not has_cap:
                        weights = masked(weights, mask, j, equal_ids, loaded)
                        weights = dropped(weights, key_words, slot)
                        operand = as_operand(weights, problem)
                    value_columns.expand(dv_acc, operand, o_smem.at[o_slot])
                    ds = load_ds(weights, o_slot)
                    key_columns.expand(dk_acc, ds, q_smem.at[slot])
                    if with_query_gradient:
                        hand_over_ds(parity, ds)
                    else:
                        fence_async_shared()  # TMA will overwrite row statistics that were read
                    plgpu.wgmma_wait(0)
                    free.arrive(slot)

                def blank_step(j, mask, index):
                    """Of queries that see none of the consumer's keys: it makes its part of dQ."""
                    slot, o_slot, parity = slots(j)
                    await_query(slot, mask, j)
                    if with_query_gradient:
                        issue_late_dq(1 - parity, index)
                    await_d_out(o_slot, mask, j)
                    if with_query_gradient:
                        hand_over_dq()
                        hand_over_ds(parity, zero_tile(_KEYS, block_q).astype(dtype))
                    free.arrive(slot)

                def step_after_dq(j, mask, far, load_elements, index, key_words):
                    """Where registers are short: dQ of the step before is done first."""
                    issue_late_dq(1 - lax.rem(j, jnp.int32(2)), index)
                    hand_over_dq()
                    step_without_dq(j, mask, far, load_elements, index, key_words)

                def step_with_dq_or_after(j, mask, far, load_elements, index, key_words):
                    """What rows far from 0 take is too much beside a bias and dropout."""
                    is_after = far and problem.has_bias and has_dropout
                    step = step_after_dq if is_after else step_with_dq
                    step(j, mask, far, load_elements, index, key_words)

                def whole_tile(index, j):
                    await_keys(index)
                    step = step_without_dq
                    if with_query_gradient:
                        step = step_after_dq if dq_first else step_with_dq_or_after
                    key_words = walk.key_words(index, own_first_key)
                    step = functools.partial(step, index=index, key_words=key_words)
                    blank = None
                    if not problem.has_elements:  # beside a mask, a bias and ids it would spill
                        blank = functools.partial(blank_step, index=index)
                    j = walk.loop_over_steps(
                        step,
                        index,
                        j,
                        own_first_key,
                        blank_step=blank,
                        far_in_masked=far_in_masked,
                    )
                    v_free.arrive(0)
                    parity = lax.rem(j + 1, jnp.int32(2))  # of the last step
                    if with_query_gradient:
                        issue_late_dq(parity, index)
                        hand_over_dq()
                    else:
                        sent.wait(consumer)
                    hand_over_gradients(1 - parity, index)
                    return j

                dk_acc[...] = zero_tile(_KEYS, key_columns.size)
                dv_acc[...] = zero_tile(_KEYS, value_columns.size)
                if drawn:
                    drawn.wait_for_first()
                over_tiles(whole_tile, zero)

            accumulator = lambda rows, columns: plgpu.ACC((rows, columns), jnp.float32)
            accumulators = [
                accumulator(_KEYS, key_columns.size),
                accumulator(_KEYS, value_columns.size),
                accumulator(_KEYS, block_q),
                accumulator(_KEYS, block_q),
            ]
            if with_query_gradient:
                accumulators.append(accumulator(DQ_TILE, _size(dq_columns)))
            pl.run_scoped(compute, *accumulators)

        def _producer():
            plgpu.set_max_registers(registers[1], action="decrease")

            def place_of(index, number):
                """What `walk.locate` gives, of the number at hand or read anew."""
                if keeps_numbers:
                    return tiles.locate(number)
                return walk.locate(index + fresh_zero() if has_dropout else index)

            def dq_parts(place, query_block, member):
                """Where dQ of each consumer is staged in a step, and what it is added to."""
                _, kv_head_of_all = place
                head_of_all = kv_head_of_all * group + member
                first = (head_of_all * query_blocks + query_block) * _CONSUMERS
                (dq_ref,) = dq_refs
                for consumer in range(_CONSUMERS):
                    _, columns = dq_place(consumer)
                    source = _fragment(dq_smem.at[consumer], columns)
                    yield source, _fragment(dq_ref.at[first + consumer], columns)

            def load_step(carry, in_work):
                """Loads a block of Q and one of dO, and their row statistics; returns the next.

                After the last step what the index locates is no tile, and not loaded.

                Args:
                  in_work: index of the tile that consumers work on.
                """
                j, index, number, t = carry
                place = _, kv_head_of_all = place_of(index, number)
                there = number < tiles.count if drawn else index >= 0
                batch, kv_head = div_rem(kv_head_of_all, problem.kv_heads)
                query_block, member = walk.step_of(place, t)
                rows = pl.ds(query_block * block_q, block_q)
                head = kv_head * group + member
                slot = lax.rem(j, jnp.int32(stages))

                def is_last():  # made anew: kept it would take a register
                    return (t + 1 == walk.steps_of(place_of(index, number))) & there

                if drawn:
                    # Late, as who is free first should have the next tile, but before the last step
                    # of this one is loaded, which tells consumers that the entry is there.
                    @pl.when(is_last())
                    def _draw_next():
                        drawn.draw(index + 1)
                        # Else it is loaded where the tile in work ends.
                        pl.when(index == in_work)(lambda: load_key(index + 1))

                @pl.when(there)
                def _():
                    pl.when(j >= stages)(lambda: free.wait(slot))
                    for ref, buffer, columns, row_ref, row_buffer, full in (
                        (q_ref, q_smem, key_columns, start_ref, start_smem, q_full),
                        (do_ref, o_smem, value_columns, delta_ref, delta_smem, o_full),
                    ):
                        source = ref.at[batch, rows, head]
                        columns.load(source, buffer.at[slot], full.at[slot])
                        if row_buffer is None:  # delta comes with start
                            continue
                        part = (pl.ds(0, together), rows) if row_ref is start_ref else (rows,)
                        row_source = row_ref.at[batch, head, *part]
                        plgpu.copy_gmem_to_smem(row_source, row_buffer.at[slot], full.at[slot])
                    if prefetches:  # or the first to add waits for zeros from beyond L2
                        is_first = walk.is_first_to_see(place, query_block)
                        for _, target in dq_parts(place, query_block, member):
                            prefetch(target, is_first)

                following = lax.cond(
                    is_last(),
                    lambda: (after(index), walk.number(after(index)), zero),
                    lambda: (index, number, t + 1),
                )
                return j + 1, *following

            def await_zeros(index):
                """Waits until what a tile adds to is zero."""
                if not zeroed:
                    return
                _, kv_head_of_all = walk.locate(index)

                @pl.when((kv_head_of_all >= zeroed.start) & (kv_head_of_all < zeroed.stop))
                def _():
                    counter = walk.prepared_tiles(lax.div(kv_head_of_all, jnp.int32(section)))
                    await_count(counter, section * tiles.per_head)

            def zero_ahead(index):
                """Zeros a tile's part of dQ of a head of the section after its own."""
                if not zeroed:
                    return
                number = walk.number(index) + section * tiles.per_head
                kv_head_of_all, part = div_rem(number, tiles.per_head)

                @pl.when(kv_head_of_all < zeroed.stop)
                def _():
                    (dq_ref,) = dq_refs
                    size = -(-dq_tiles_of_kv_head // tiles.per_head)
                    rows = pl.ds(0, fragment_shape(max(map(_size, dq_tiles)))[0])

                    @pl.loop(part * size, jnp.minimum((part + 1) * size, dq_tiles_of_kv_head))
                    def _zero(n):
                        first = kv_head_of_all * dq_tiles_of_kv_head
                        zero_fragment(dq_ref.at[first + n, rows])

                    of_section = lax.div(kv_head_of_all, jnp.int32(section))
                    add_when_stored(walk.prepared_tiles(of_section))

            def load_keys(ref, buffer, columns, full, index):
                tile, kv_head_of_all = walk.locate(index)
                batch, kv_head = div_rem(kv_head_of_all, problem.kv_heads)
                source = ref.at[batch, pl.ds(tile * _BLOCK_KV, _BLOCK_KV), kv_head]
                columns.load(source, buffer, full)

            def load_key(index):
                slot = k_slot(index)
                pl.when(is_tile(index))(
                    lambda: load_keys(k_ref, k_smem.at[slot], key_columns, k_full.at[slot], index)
                )

            def load_value(index):
                pl.when(is_tile(index))(
                    lambda: load_keys(v_ref, v_smem.at[0], value_columns, v_full, index)
                )

            def let_stage():
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                for consumer in range(_CONSUMERS):
                    sent.arrive(consumer)

            def let_start(j):
                """The first step of a tile finds dS' of a step before, which is none."""
                for consumer in range(_CONSUMERS):
                    ds_stored.arrive(2 * lax.rem(j + 1, jnp.int32(2)) + consumer)

            def add_dq(index, number, t):
                """Adds dQ of step t of a tile, staged in the next one; none for t = -1."""
                place = place_of(index, number)
                parts = dq_parts(place, *walk.step_of(place, t))
                for consumer, (source, target) in enumerate(parts):
                    dq_staged.wait(consumer)
                    add = functools.partial(plgpu.copy_smem_to_gmem, source, target)
                    pl.when(t >= 0)(functools.partial(add, reduction_op="add"))

            def send_gradients(index):
                tile, kv_head_of_all = walk.locate(index)
                batch, kv_head = div_rem(kv_head_of_all, problem.kv_heads)
                gradients_staged.wait(0)
                for consumer in range(_CONSUMERS):
                    own = pl.ds(consumer * _KEYS, _KEYS)
                    rows = pl.ds(tile * _BLOCK_KV + consumer * _KEYS, _KEYS)
                    source = k_smem.at[k_slot(index), :, own]
                    key_columns.store(source, dk_ref.at[batch, rows, kv_head])
                    for n, columns in enumerate(staged_values):
                        columns.store(value_staging(n, consumer), dv_ref.at[batch, rows, kv_head])

            def whole_tile(index, following):
                await_zeros(index)
                zero_ahead(index)

                def one_step(t, following):
                    if with_query_gradient:
                        add_dq(index, number, t - 1)
                        let_stage()
                    return load_step(following, index)

                number = walk.number(index)
                steps = walk.steps(index)
                following = lax.fori_loop(zero, steps, one_step, following)
                v_free.wait(0)
                load_value(after(index))
                if with_query_gradient:
                    if has_dropout:  # read anew, or the producer spills
                        steps = walk.steps(index + fresh_zero())
                    add_dq(index, walk.number(index), steps - 1)
                send_gradients(index)
                let_stage()
                if drawn:  # if it is drawn by now, else when it is
                    next_but_one = index + _K_SLOTS
                    pl.when(following[1] >= next_but_one)(lambda: load_key(next_but_one))
                else:
                    load_key(index - _K_SLOTS)
                if with_query_gradient:
                    let_start(following[0] - stages)
                return following

            if drawn:
                drawn.draw_first()
                load_key(first_index())
            else:
                for n in range(_K_SLOTS):
                    load_key(first_index() - n)
            load_value(first_index())
            # Step, index and number of its tile, and step in the tile.
            following = zero, first_index(), walk.number(first_index()), zero
            following = lax.fori_loop(
                zero, stages, lambda _, carry: load_step(carry, first_index()), following
            )
            let_stage()
            if with_query_gradient:
                let_start(zero)
            over_tiles(whole_tile, following)
            plgpu.wait_smem_to_gmem(0)

        consumers = [functools.partial(_consumer, consumer) for consumer in range(_CONSUMERS)]
        roles: list[Callable[[], None]] = [*consumers, _producer]
        if drawn:  # else its number would be spilled in a consumer, for the comparisons after it
            lax.switch(lax.axis_index("warpgroup"), roles)
        else:  # but here a switch would spill, in consumers with a cap or dropout
            for number, role in enumerate(roles):
                pl.when(own_warpgroup() == number)(role)

    return tiles.gradient_kernel(
        attention_backward,
        key_rows,
        config.thread_blocks,
        scratch,
        from_end=True,
        draws=draws,
    )


@functools.lru_cache
def _build_cast(problem: Problem, padded_rows: int, query_rows: int, interpret: bool):
    """dQ from fragment order to `[B, T, N, H]`, times scale, in the input dtype.

    If the problem has `backward_ignores_unseen` it takes the start of rows too: dQ of those that
    see no key is 0, and not 0 times NaN of a key that counts.
    """
    dtype = problem.dtype
    columns, _ = _columns(problem)
    column_tiles = _dq_tiles(columns)
    row_tiles = -(-query_rows // DQ_TILE)
    thread_blocks = problem.batch * problem.heads * row_tiles

    def cast_dq(fragments_ref, *refs, dq_smem):
        *start_refs, dq_ref = refs
        # From the end: what the main kernel added to last may still be in L2.
        number = thread_blocks - 1 - lax.axis_index("block")
        head_of_all, row_tile = div_rem(number, row_tiles)
        batch, head = div_rem(head_of_all, problem.heads)
        first = (head_of_all * (padded_rows // DQ_TILE) + row_tile) * len(column_tiles)
        tiles = [
            load_fragment(_fragment(fragments_ref.at[first + n], of_tile), _size(of_tile))
            for n, of_tile in enumerate(column_tiles)
        ]
        for start_ref in start_refs:
            rows_of_head = start_ref.at[batch, head, 0]
            seeing = load_rows(rows_of_head, row_tile * DQ_TILE, padded_rows - 1) != -jnp.inf
            tiles = [jnp.where(spread(seeing, tile.shape), tile, 0.0) for tile in tiles]
        for of_tile, tile in zip(column_tiles, tiles, strict=True):
            part = columns.part(dq_smem, of_tile)
            part[...] = (tile * (problem.scale * problem.d_logit_unit)).astype(dtype)
        plgpu.commit_smem()
        rows = pl.ds(row_tile * DQ_TILE, DQ_TILE)
        columns.store(dq_smem, dq_ref.at[batch, rows, head])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    return plgpu.kernel(
        cast_dq,
        out_type=jax.ShapeDtypeStruct(
            (problem.batch, query_rows, problem.heads, problem.width), dtype
        ),
        grid=(thread_blocks,),
        grid_names=("block",),
        scratch_types=dict(dq_smem=columns.smem(DQ_TILE, dtype=dtype)),
        compiler_params=HAND_ORDERED,
    )


def _size(columns: slice) -> int:
    return columns.stop - columns.start


def _fragment(ref, columns: slice):
    """The part of a tile of dQ in fragment order that a tile of fewer columns takes."""
    return ref.at[pl.ds(0, fragment_shape(_size(columns))[0])]


def _tiles_of(columns: int) -> list[slice]:
    return [slice(first, first + DQ_TILE) for first in range(0, columns, DQ_TILE)]
