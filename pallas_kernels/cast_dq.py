"""dQ in float32 and in fragment order, a sum or its parts, to what users get."""

import functools

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backward_dq import QueryGradient, fragment_of, size_of
from pallas_kernels.config import DQ_TILE
from pallas_kernels.online_softmax import spread
from pallas_kernels.problem import Problem
from pallas_kernels.ptx.arithmetic import div_rem
from pallas_kernels.ptx.barriers import HAND_ORDERED
from pallas_kernels.ptx.fragments import load_fragment
from pallas_kernels.ptx.loads import load_rows


@functools.lru_cache
def build(
    problem: Problem, padded_rows: int, rows_of_parts: tuple[tuple[int, int], ...], interpret: bool
):
    """dQ from fragment order to `[B, T, N, H]`, times scale, in the input dtype.

    If there are rows of parts, dQ is the sum of so many, one after the other in memory, each of
    rows from the first to the end, in tiles of 64, and anything elsewhere.
    If the problem has `backward_ignores_unseen` it takes the start of rows too: dQ of those that
    see no key is 0, and not 0 times NaN of a key that counts.
    """
    dtype = problem.dtype
    dq = QueryGradient(problem)
    (columns, _), column_tiles = dq.operand_columns, dq.tiles
    row_tiles = -(-problem.query_length // DQ_TILE)
    thread_blocks = problem.batch * problem.heads * row_tiles
    all_tiles = problem.batch * problem.heads * (padded_rows // DQ_TILE) * len(column_tiles)

    def cast_dq(fragments_ref, *refs, dq_smem):
        *start_refs, dq_ref = refs
        # From the end: what the main kernel added to last may still be in L2.
        number = thread_blocks - 1 - lax.axis_index("block")
        head_of_all, row_tile = div_rem(number, row_tiles)
        batch, head = div_rem(head_of_all, problem.heads)
        first = (head_of_all * (padded_rows // DQ_TILE) + row_tile) * len(column_tiles)

        def load(first):
            return [
                load_fragment(fragment_of(fragments_ref.at[first + n], of_tile), size_of(of_tile))
                for n, of_tile in enumerate(column_tiles)
            ]

        tiles = load(first)
        if rows_of_parts:
            parts = [tiles, *(load(first + n * all_tiles) for n in range(1, len(rows_of_parts)))]
            seen = [(row_tile >= rows[0]) & (row_tile < rows[1]) for rows in rows_of_parts]
            tiles = [
                sum(jnp.where(s, x, 0.0) for s, x in zip(seen, of_parts, strict=True))
                for of_parts in zip(*parts, strict=True)
            ]
        for start_ref in start_refs:
            rows_of_head = start_ref.at[batch, head, 0]
            seeing = load_rows(rows_of_head, row_tile * DQ_TILE, padded_rows - 1) != -jnp.inf
            tiles = [jnp.where(spread(seeing, tile.shape), tile, 0.0) for tile in tiles]
        for of_tile, tile in zip(column_tiles, tiles, strict=True):
            tile = (tile * problem.gradient_factor).astype(dtype)
            columns.put_part(dq_smem, of_tile, tile)
        plgpu.commit_smem()
        rows = pl.ds(row_tile * DQ_TILE, DQ_TILE)
        columns.store(dq_smem, dq_ref.at[batch, rows, head])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    return plgpu.kernel(
        cast_dq,
        out_type=problem.query(),
        grid=(thread_blocks,),
        grid_names=("block",),
        scratch_types=dict(dq_smem=columns.smem(DQ_TILE, dtype=dtype)),
        compiler_params=HAND_ORDERED,
    )
