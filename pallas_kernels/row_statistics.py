"""What the backward needs before its main kernel: one pass over O and dO.

    start        -LSE / unit (`Problem.logit_unit`): -LSE / scale, where the accumulator of the
                 logits starts, or with a soft cap -LSE / cap, which is added later
    minus_delta  dLSE - rowsum(dO * O), times `Problem.delta_unit`
    d_out        dO with zeros in rows that see no key, where it may be NaN (`Problem.hides_rows`)
    far          if the problem `has_marks`, reference and log_sum of rows far from 0, whose start
                 marks them (`far_rows.py`); anything in 64 rows of which none is
    dQ           zeros, where thread blocks of the main kernel add to it and none of them zeros it

Rows that see no key, and rows beyond the end, have a start of -inf and a minus_delta of 0, whatever
stands there in the inputs.

A thread block is one warpgroup that takes 64 rows of one head. It does nothing but wait for memory:
every thread asks for all that it adds up, 16 bytes at a time, before it adds, and many thread
blocks share an SM. Those of neighbouring heads run side by side, as their rows lie side by side.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import far_rows
from pallas_kernels.interpret import interpreting
from pallas_kernels.problem import Problem
from pallas_kernels.ptx.arithmetic import div_rem
from pallas_kernels.ptx.barriers import HAND_ORDERED
from pallas_kernels.ptx.counters import add_to
from pallas_kernels.ptx.fragments import fragment_shape, zero_fragment
from pallas_kernels.ptx.loads import load_rows, row_products
from pallas_kernels.ptx.stores import store_rows
from pallas_kernels.ptx.votes import any_row
from pallas_kernels.row_masks import in_each_row

_ROWS = 64  # of a thread block
_PER_ROW = plgpu.Layout.WGMMA.reduce(1)


def row_statistics(
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    d_lse: jax.Array | None,
    references: jax.Array | None,
    counters: Any,
    *,
    problem: Problem,
    padded_rows: int,
    dq_columns: tuple[int, ...] = (),
    zeroed_later: range = range(0),
) -> tuple[jax.Array, ...]:
    """Start, minus_delta and far of every row, dO, and zeros for dQ.

    XLA may skip the rounding of a cotangent that it computes in float32 (excess precision), and a
    delta of its own would not be of the d_out that another kernel reads. This one is: both read the
    same array in memory.

    Args:
      out, d_out: `[B, >= query_length, N, h]`.
      lse: `[B, N, >= query_length]` float32, natural log; -inf for a row that sees no key.
      d_lse: `[B, N, >= query_length]` float32; None for zeros.
      references: `[B, N, 2, >= query_length]` float32 of `forward.py`; None where lse is of more
        keys than these.
      counters: a ref to int32, of which the first is more than 0 then if any row is far from 0,
        and as it is else.
      problem: static description.
      padded_rows: rows of the results.
      dq_columns: of each tile of 64 rows of dQ, up to 64, for a main kernel that adds to it.
      zeroed_later: tiles of dQ, by their number, that are not zeroed, and may be anything.

    Returns:
      Start, `[B, N, 1 or 2, padded_rows]` float32, with the share of each row if the problem
      `has_shares`, minus_delta, `[B, N, padded_rows]` float32, far as `far_rows.far_shape` has it,
      d_out, and if there are dq_columns zeros for B * N * padded_rows rows of dQ: `[row tiles *
      column tiles, *fragment_shape(64)]` float32, in fragment order. A tile of fewer columns is its
      first part.

    Raises:
      ValueError: padded_rows is no multiple of 64, or less than problem.query_length.
    """
    if padded_rows % _ROWS or padded_rows < problem.query_length:
        raise ValueError(
            f"padded_rows: got {padded_rows}, needs a multiple of {_ROWS}, at least"
            f" {problem.query_length}"
        )
    has = d_lse is not None, references is not None
    kernel = _build(problem, padded_rows, dq_columns, zeroed_later, *has, interpreting())
    optional = [x for x in (d_lse, references) if x is not None]
    statistics = kernel(out, lse, d_out, *optional, counters)
    if not problem.hides_rows:
        statistics = (*statistics[:3], d_out, *statistics[3:])
    return statistics


@functools.lru_cache
def _build(
    problem: Problem,
    padded_rows: int,
    dq_columns: tuple[int, ...],
    zeroed_later: range,
    has_d_lse: bool,
    has_references: bool,
    interpret: bool,
):
    tiles, column_tiles = padded_rows // _ROWS, len(dq_columns)
    last = problem.query_length - 1

    def row_statistics(out_ref, lse_ref, do_ref, *refs):
        d_lse_refs, refs = refs[: int(has_d_lse)], refs[int(has_d_lse) :]
        reference_refs, refs = refs[: int(has_references)], refs[int(has_references) :]
        counters_ref, start_ref, minus_delta_ref, far_ref, *more_refs = refs
        count = int(problem.hides_rows)
        copy_refs, dq_refs = more_refs[:count], more_refs[count:]
        # From the end on, as the forward may have left O there in L2.
        tile_of_all, head = div_rem(thread_blocks - 1 - lax.axis_index("block"), problem.heads)
        batch, tile = div_rem(tile_of_all, tiles)
        first = tile * _ROWS
        out_rows, do_rows = (r.at[batch, :, head] for r in (out_ref, do_ref))
        copies = [(r.at[batch, :, head], lse_ref.at[batch, head]) for r in copy_refs]
        products = row_products(out_rows, do_rows, first, last, *copies)
        rows_of = lambda ref: load_rows(ref.at[batch, head], first, last)
        lse, d_lse = rows_of(lse_ref), sum(map(rows_of, d_lse_refs))

        row = plgpu.broadcasted_iota(jnp.int32, (_ROWS,), 0, layout=_PER_ROW) + first
        counts = (row <= last) & (lse != -jnp.inf)
        rows = pl.ds(first, _ROWS)
        number = (batch * problem.heads + head) * tiles + tile
        start = lse * (-1.0 / problem.logit_unit)
        is_far = counts & far_rows.is_far_in_backward(lse)
        if not problem.has_cap:  # which bounds logits
            pl.when(any_row(is_far))(lambda: add_to(counters_ref.at[0]))

        def reference_and_log_sum():
            given = [
                load_rows(ref.at[batch, head, n], first, last)
                for ref in reference_refs
                for n in range(2)
            ]
            return far_rows.reference_of(lse, given, problem)

        if problem.has_marks:

            @pl.when(any_row(is_far))
            def _():
                for n, of_rows in enumerate(reference_and_log_sum()):
                    store_rows(far_ref.at[number, n], of_rows)

            start = far_rows.marked(start, is_far, number)
        elif problem.has_shares:

            def of_far_rows():
                reference, log_sum = reference_and_log_sum()
                own_start, share = far_rows.start_and_share(reference, log_sum, problem)
                return jnp.where(is_far, own_start, start), jnp.where(is_far, share, one)

            one = in_each_row(jnp.float32(1))
            start, share = lax.cond(any_row(is_far), of_far_rows, lambda: (start, one))
            store_rows(start_ref.at[batch, head, 1, rows], share)
        store_rows(start_ref.at[batch, head, 0, rows], jnp.where(counts, start, -jnp.inf))
        minus_delta = jnp.where(counts, d_lse - products, 0.0)
        if problem.has_dropout:
            minus_delta *= problem.delta_unit
        store_rows(minus_delta_ref.at[batch, head, rows], minus_delta)
        for column_tile, columns in enumerate(dq_columns):
            (dq_ref,) = dq_refs
            dq_tile = number * column_tiles + column_tile
            part = dq_ref.at[dq_tile, pl.ds(0, fragment_shape(columns)[0])]
            is_due = (dq_tile < zeroed_later.start) | (dq_tile >= zeroed_later.stop)
            pl.when(is_due)(functools.partial(zero_fragment, part))

    statistics = jax.ShapeDtypeStruct((problem.batch, problem.heads, padded_rows), jnp.float32)
    of_start = 1 + int(problem.has_shares)
    starts = jax.ShapeDtypeStruct(
        (problem.batch, problem.heads, of_start, padded_rows), jnp.float32
    )
    far = far_rows.far_shape(problem, padded_rows)
    thread_blocks = problem.batch * problem.heads * tiles
    d_out_shape = (problem.batch, problem.query_length, problem.heads, problem.value_width)
    copies = (jax.ShapeDtypeStruct(d_out_shape, problem.dtype),) if problem.hides_rows else ()
    dq_tiles = (thread_blocks * column_tiles, *fragment_shape(64))
    dq = (jax.ShapeDtypeStruct(dq_tiles, jnp.float32),) if dq_columns else ()
    return plgpu.kernel(
        row_statistics,
        out_type=(starts, statistics, far, *copies, *dq),
        grid=(thread_blocks,),
        grid_names=("block",),
        compiler_params=HAND_ORDERED,
    )
