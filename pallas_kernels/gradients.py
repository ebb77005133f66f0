"""Gradients of attention on Hopper GPUs: which kernels make them, in the order in which they run.

row_statistics.py          delta, the starts of rows and the zeros of dQ
backward.py                dK and dV, and to dQ adds what each tile of keys gives, or makes one
cast_dq.py                 what is left of dQ, the factor scale and the cast
backward_query.py          dQ alone, the same bit by bit from run to run
backward_key.py            dK, dV and dS' above width 128, of which
backward_query_product.py  makes dQ
bias_gradient.py           the gradient of a bias, and of what a score function reads
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from pallas_kernels import (
    backward,
    backward_key,
    backward_query,
    backward_query_product,
    backward_zeros,
    bias_gradient,
    cast_dq,
    key_masks,
    row_statistics,
)
from pallas_kernels.backward_dq import QueryGradient
from pallas_kernels.backward_key_plan import key_tiles
from pallas_kernels.backward_plan import Plan
from pallas_kernels.config import (
    BackwardConfig,
    BackwardKeyConfig,
    BackwardQueryConfig,
    check_backward,
)
from pallas_kernels.defaults import BACKWARD_QUERY
from pallas_kernels.dropout import Words
from pallas_kernels.element_arrays import NO_ELEMENTS, Blocks, Elements
from pallas_kernels.interpret import interpreting
from pallas_kernels.key_tiles import Section
from pallas_kernels.key_tiles_kernel import with_words
from pallas_kernels.key_tiles_shares import d_logits_sections, summed
from pallas_kernels.problem import Problem


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
    blocks: Blocks | None = None,
    with_bias_gradient: bool = False,
    reads: Sequence[int] = (),
) -> tuple[jax.Array, ...]:
    """Gradients of attention.

    Args:
      query: `[B, T, N, H]`. Rows that see no key are finite, unless
        problem.backward_ignores_unseen and not deterministic.
      key, value: `[B, S, K, H]` and `[B, S, K, h]`. Rows that no query sees are finite, unless as
        above, or by a dense mask's lists and without reads.
      out, d_out: `[B, T, N, h]`, as query; out need not be finite in rows that see no key.
      lse: `[B, N, >= query_length]` float32, natural log; -inf for a row that sees no key.
      d_lse: `[B, N, query_length]` float32; None for zeros.
      references: `[B, N, 2, >= query_length]` float32, what `forward.attention` gave beside lse;
        None where lse is not of these keys alone.
      problem: static description.
      config: tile sizes; a `BackwardKeyConfig` where query or value is wider than 128.
      deterministic: gradients are the same bit by bit from run to run: dQ is made by a kernel of
        its own (`backward_query.py`), not summed in the order in which thread blocks end. At widths
        above 128, and where plan.sums_dq is not, they always are.
      query_config: that kernel's tile sizes; None for those of `BACKWARD_QUERY`.
      intervals: None, or the keys that each query sees, `[B, 2, problem.query_length]` int32, for a
        problem that is dynamic (`intervals.py`), or has lengths.
      ids: None, or for a problem that is segmented the segment ids of queries and keys, int32
        `[B, problem.query_length]` and `[B, problem.key_length]` (`segments.py`).
      elements: mask and bias of a problem that has them (`element_arrays.py`).
      dropout_words: None, or for a problem with dropout the words of queries and keys, as
        `dropout.Words` has them.
      blocks: None, or for a problem that has given lists what they are made of.
      with_bias_gradient: the bias has a gradient too: a kernel of its own makes it, or the main one
        has it at hand.
      reads: numbers of those reads of the score function that have one, likewise.

    Returns:
      Gradients of query, key and value, in their shapes and dtype; of the bias, then of reads.
    """
    check_backward(config, problem.widest)
    query_config = query_config or BACKWARD_QUERY[problem.widest]
    plan = _planned(problem, config, elements.bias if with_bias_gradient else None, deterministic)
    problem = problem.in_intervals if plan is None else plan.whole
    key_words, elements = key_masks.taken_from(elements, problem)
    intervals = intervals if key_words is None else key_words
    block_q = config.block_q
    if plan is None or not plan.with_query_gradient:
        block_q = max(block_q, query_config.block_q)
    in_whole = lambda block: -(-problem.query_length // block) * block
    padded_rows = rows_of_statistics = in_whole(block_q)
    bias_alone = with_bias_gradient and not (plan is not None and plan.with_bias_gradient)
    if bias_alone or reads:  # with more, dQ has tiles at its end that nothing uses
        rows_of_statistics = max(padded_rows, in_whole(bias_gradient.BLOCK_Q))
    adds = plan is not None and plan.sums_dq
    counters = jax.new_ref(jnp.zeros(1 if plan is None else plan.counters, jnp.int32))
    start, minus_delta, far, d_out, *zeros = row_statistics.row_statistics(
        out,
        lse,
        d_out,
        d_lse,
        references,
        counters,
        problem=problem,
        padded_rows=rows_of_statistics,
        dq_columns=QueryGradient(problem).columns_of_tiles if adds else (),
        zeroed_later=backward_zeros.dq_tiles_made(plan) if plan is not None else range(0),
    )
    masks = intervals, ids, elements, dropout_words
    operands = query, key, value, d_out, start, minus_delta, far
    others = _of_reads(reads, operands, masks, blocks, problem)
    if bias_alone:
        others = [bias_gradient.bias_gradient(operands, masks, problem=problem), *others]
    start = with_words(dropout_words, *((start,) if plan is None else (start, minus_delta)))
    operands_of_keys = query, key, value, d_out, start, minus_delta, far
    of_query_alone = functools.partial(
        backward_query.query_gradient, *operands, *masks, problem=problem, config=query_config
    )
    if isinstance(config, BackwardKeyConfig):
        of_main = jax.freeze(counters), *operands_of_keys, *masks
        d_query, *of_both = _by_key_kernel(of_main, of_query_alone, problem, config)
        return d_query, *summed(key, value, of_both, key_tiles(problem, config)), *others
    assert plan is not None
    main = functools.partial(
        backward.build(plan, interpreting()),
        intervals,
        ids,
        dropout_words,
        *elements.operands(transposed=True),
        counters,
        *operands_of_keys,
    )
    if blocks is not None:
        main = functools.partial(main, blocks=blocks)
    if plan.with_query_gradient:
        d_query, *of_both = _by_main_kernel(plan, main, zeros, start, padded_rows)
    else:
        d_query, of_both = of_query_alone(), list(main())
    if plan.with_bias_gradient:
        others = [of_both.pop()]
    return d_query, *summed(key, value, of_both, plan.tiles), *others


def _planned(
    problem: Problem,
    config: BackwardConfig | BackwardKeyConfig,
    bias: jax.Array | None,
    deterministic: bool,
) -> Plan | None:
    """That of `backward.py`, if it is the main kernel; bias is one whose gradient is asked for."""
    if isinstance(config, BackwardKeyConfig):
        return None
    plan = Plan(problem, config)
    if bias is not None and _is_d_logits(bias, plan):
        plan = dataclasses.replace(plan, with_bias_gradient=True)
    # Where its tiles add to dQ in global memory, it is in the order in which thread blocks end.
    if deterministic and plan.sums_dq:
        plan = dataclasses.replace(plan, with_query_gradient=False, whole=problem.in_intervals)
    return plan


def _is_d_logits(bias: jax.Array, plan: Plan) -> bool:
    """Whether the gradient of a bias is dS of the main kernel, with nothing to add up or to cast.

    With dropout dS has another unit.
    """
    p = plan.whole
    has_all_pairs = bias.shape == (p.batch, p.heads, p.query_length, p.key_length)
    is_as_computed = bias.dtype == p.dtype and not p.has_dropout
    return has_all_pairs and is_as_computed and plan.sees_all_pairs


def _by_main_kernel(
    plan: Plan, main: Callable, zeros: list[jax.Array], start: jax.Array, padded_rows: int
) -> tuple[jax.Array, ...]:
    """Gradient of query, and what of key and value the main kernel gives."""
    if plan.dq_is_whole:
        return main()
    rows_of_parts = tuple(plan.rows_of_dq()) if plan.dq_is_apart else ()
    cast = cast_dq.build(plan.whole, padded_rows, rows_of_parts, interpreting())
    if plan.dq_is_apart:
        of_tiles, *of_keys = main()
        return cast(of_tiles), *of_keys
    dq_ref = jax.new_ref(*zeros)
    of_keys = main(dq_ref)
    starts = (start,) if plan.zeroes_queries else ()  # then there is no dropout
    return cast(jax.freeze(dq_ref), *starts), *of_keys


def _by_key_kernel(
    operands: tuple, of_query_alone: Callable, problem: Problem, config: BackwardKeyConfig
) -> tuple[jax.Array, ...]:
    """Gradient of query, and what of key and value `backward_key.py` gives of its operands."""
    of_keys = functools.partial(
        backward_key.key_value_gradients, *operands, problem=problem, config=config
    )
    tiles = key_tiles(problem, config)
    sections = d_logits_sections(tiles, config.d_logits_bytes)
    if not sections:
        return of_query_alone(), *of_keys()
    _, _, key, *_ = operands
    of_query = functools.partial(backward_query_product.query_gradient, key=key, tiles=tiles)
    return _by_sections(sections, of_keys, of_query)


def _of_reads(
    reads: Sequence[int], operands: tuple, masks: tuple, blocks: Blocks | None, problem: Problem
) -> list[jax.Array]:
    """Gradients of those reads of the score function, each by a kernel of its own."""
    gradient = functools.partial(
        bias_gradient.score_gradient, operands, masks, blocks, problem=problem
    )
    return [gradient(read=problem.score_function.reads[number]) for number in reads]


def _by_sections(
    sections: list[Section], of_keys: Callable, of_query: Callable
) -> tuple[jax.Array, ...]:
    """Gradients of query, key and value, with dS' of one section at a time in memory."""
    first, *others = sections
    *gradients, d_logits = of_keys(section=first)
    if not others:
        return of_query(d_logits, section=first), *gradients
    # All in one place: refs, so that no kernel begins before the one before it has ended.
    results = *gradients, d_logits = tuple(map(jax.new_ref, (*gradients, d_logits)))
    d_query = jax.new_ref(of_query(d_logits, section=first))
    for section in others:
        of_keys(section=section, results=results)
        of_query(d_logits, d_query=d_query, section=section)
    return tuple(map(jax.freeze, (d_query, *gradients)))
