"""Products of matrices on Hopper GPUs: the pipeline of every kernel here, with nothing inside.

    producer   A0 B0 | A1 B1 | ...          TMA into a ring of slots
    consumer   C += A B                     of half a tile each, which leaves by TMA

A tile of C is `Plan.block_m` by 256. A thread block stays on its SM and walks over tiles, so that
the producer is ahead by a ring when the next tile begins. Where there are fewer tiles than SMs,
thread blocks share one (split-K): each has a range of its steps, and leaves a partial sum in
float32, which are added up in a fixed order.
"""

import dataclasses
import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.config import SM_COUNT
from pallas_kernels.hopper import Ring, kernel, warp_specialised
from pallas_kernels.interpret import interpreting
from pallas_kernels.ptx.arithmetic import div_rem
from pallas_kernels.ptx.barriers import NamedBarriers
from pallas_kernels.ptx.mlir import zero_tile
from pallas_kernels.ptx.operands import operand_form

CONSUMERS, ROWS = 2, 64
BLOCK_N, BLOCK_K = 256, 64
_BOX = 64  # columns of what TMA moves
_TOGETHER = 8  # tiles of rows that tiles of columns go through at a time: their A stays in L2
_LEAST_STEPS = 4  # of a share of a tile
_FREE = NamedBarriers(first=CONSUMERS + 2, count=4, arrivers=CONSUMERS)


def matmul(a: jax.Array, b: jax.Array, *, splits: int | None = None) -> jax.Array:
    """A B, summed in float32.

    Args:
      a: `[M, K]`, bfloat16 or float16; M and K multiples of 8.
      b: `[K, N]`, as a; N a multiple of 8.
      splits: how many thread blocks share a tile; as many as there are SMs for, if None.

    Returns:
      `[M, N]`, as a.
    """
    (m, k), (rows_of_b, n) = a.shape, b.shape
    if k != rows_of_b or m % 8 or n % 8 or k % 8 or a.dtype != b.dtype:
        raise ValueError(
            f"got {a.dtype} {a.shape} and {b.dtype} {b.shape}; needs [M, K] and [K, N] of one"
            " dtype, of multiples of 8"
        )
    # TMA takes whole boxes of 64 columns here; columns.py has how to do without. Two at least: in
    # an array of one Mosaic drops the index of boxes, and stores those beyond it there too.
    columns = max(2 * _BOX, -(-n // _BOX) * _BOX)
    a = jnp.pad(a, ((0, 0), (0, -k % BLOCK_K)))
    b = jnp.pad(b, ((0, -k % BLOCK_K), (0, columns - n)))
    plan = Plan(a.shape[0], b.shape[1], a.shape[1], np.dtype(a.dtype), splits or 0)
    c = _build(plan, interpreting())(a, b)
    if plan.splits > 1:
        c = c.sum(0).astype(a.dtype)
    return c[:, :n]


@dataclasses.dataclass(frozen=True)
class Plan:
    """Tiles of a product, and who makes them.

    Attributes:
      m, n, k: sizes; n and k multiples of 64.
      dtype: of the operands.
      wanted_splits: 0 for as many as there are SMs for.
    """

    m: int
    n: int
    k: int
    dtype: np.dtype
    wanted_splits: int

    @property
    def by_rows(self) -> bool:
        """Whether consumers have the rows of a tile apart, not its columns."""
        return self.m > ROWS

    @property
    def block_m(self) -> int:
        return CONSUMERS * ROWS if self.by_rows else ROWS

    @property
    def own_columns(self) -> int:
        return BLOCK_N if self.by_rows else BLOCK_N // CONSUMERS

    @property
    def row_tiles(self) -> int:
        return -(-self.m // self.block_m)

    @property
    def column_tiles(self) -> int:
        return -(-self.n // BLOCK_N)

    @property
    def steps(self) -> int:
        return self.k // BLOCK_K

    @functools.cached_property
    def splits(self) -> int:
        fitting = SM_COUNT // (self.row_tiles * self.column_tiles)
        return max(1, self.wanted_splits or min(fitting, self.steps // _LEAST_STEPS))

    @property
    def staged(self) -> int:
        """Columns of C that leave at a time: a box of 128 bytes."""
        return 128 // self.out_dtype.itemsize

    @property
    def out_dtype(self) -> np.dtype:
        return self.dtype if self.splits == 1 else np.dtype(np.float32)


@functools.lru_cache
def _build(plan: Plan, interpret: bool):
    together = next(n for n in range(_TOGETHER, 0, -1) if plan.row_tiles % n == 0)
    shares = plan.row_tiles * plan.column_tiles * plan.splits
    thread_blocks = min(shares, SM_COUNT)
    share = -(-plan.steps // plan.splits)

    def over_tiles(run_tile) -> None:
        """`run_tile(step, first, end, split, rows, columns)` for each, of steps along K."""
        own = lax.axis_index("block")

        def run(index, step):
            rest, split = div_rem(own + index * thread_blocks, plan.splits)
            section, rest = div_rem(rest, plan.column_tiles * together)
            column_tile, row = div_rem(rest, together)
            row_tile = section * together + row
            first = split * share
            end = jnp.minimum(first + share, plan.steps)
            run_tile(step, first, end, split, row_tile * plan.block_m, column_tile * BLOCK_N)
            return step + jnp.maximum(end - first, 0)

        count = lax.div(shares - 1 - own, jnp.int32(thread_blocks)) + 1
        lax.fori_loop(jnp.int32(0), count, run, jnp.int32(0))

    def matmul(a, b, c, *, c_smem, operands):
        ring, own = Ring.of(_FREE, **operands), lax.axis_index("warpgroup")

        def load_tile(step, first, end, split, row, column):
            @pl.loop(first, end)
            def _(j):
                of_k = pl.ds(j * BLOCK_K, BLOCK_K)
                sources = a.at[pl.ds(row, plan.block_m), of_k], b.at[of_k, pl.ds(column, BLOCK_N)]
                ring.fill(step + j - first, *sources)

        def multiply(acc, step, first, end, split, row, column):
            row_part, column_part = (own, 0) if plan.by_rows else (0, own)
            rows = pl.ds(row_part * ROWS, ROWS)
            columns = pl.ds(column_part * plan.own_columns, plan.own_columns)

            @pl.loop(first, end)
            def _(j):
                a_block, b_block = ring.read(step + j - first)
                plgpu.wgmma(acc, a_block.at[rows], b_block.at[:, columns])
                plgpu.wgmma_wait(1)
                pl.when(j > first)(lambda: ring.give_back(ring.slot(step + j - first - 1)))

            total = plgpu.wgmma_accumulator_load(acc, wait_n=0)
            pl.when(end > first)(lambda: ring.give_back(ring.slot(step + end - first - 1)))
            acc[...] = zero_tile(ROWS, plan.own_columns)
            target = c if plan.splits == 1 else c.at[split]
            row, column = row + row_part * ROWS, column + column_part * plan.own_columns
            for n, start in enumerate(range(0, plan.own_columns, plan.staged)):
                staged = c_smem.at[own, n % 2]
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                staged[...] = total[:, start : start + plan.staged].astype(plan.out_dtype)
                plgpu.commit_smem()
                part = pl.ds(row, ROWS), pl.ds(column + start, plan.staged)
                plgpu.copy_smem_to_gmem(staged, target.at[part])

        def consume():
            run = lambda acc: over_tiles(functools.partial(multiply, acc))
            pl.run_scoped(run, plgpu.ACC((ROWS, plan.own_columns), jnp.float32))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        warp_specialised(own, CONSUMERS, (240, 24), consume, lambda: over_tiles(load_tile))

    scratch = dict(
        c_smem=plgpu.SMEM(
            (CONSUMERS, 2, ROWS, plan.staged),
            plan.out_dtype,
            transforms=operand_form(plan.staged, plan.out_dtype.itemsize),
        ),
        operands=Ring.types(_FREE, (plan.block_m, BLOCK_K), (BLOCK_K, BLOCK_N), dtype=plan.dtype),
    )
    shape = (plan.m, plan.n) if plan.splits == 1 else (plan.splits, plan.m, plan.n)
    out = jax.ShapeDtypeStruct(shape, plan.out_dtype)
    return kernel(matmul, out, thread_blocks, CONSUMERS, scratch)
