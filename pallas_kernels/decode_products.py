"""The two products of a step of decoding, of 16-bit operands and of float8."""

import dataclasses
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.ptx.float8 import transpose_float8
from pallas_kernels.ptx.float8_parts import join_parts, store_weights_float8
from pallas_kernels.ptx.mlir import zero_tile
from pallas_kernels.transposed import QUERIES, per_query


@dataclasses.dataclass(frozen=True)
class Products:
    """The two products of a step, of 16-bit operands, each waited for.

    Attributes:
      q_smem: `(rows, width)`.
      p_smem: `(rows, BLOCK_KV)`, the weights.
      s_acc: `(BLOCK_KV, rows)`.
      o_accs: for each box of values `(columns, rows)`, which have the output.
    """

    q_smem: Any
    p_smem: Any
    s_acc: Any
    o_accs: Any

    def logits(self, keys, free) -> jax.Array:
        """`(BLOCK_KV, rows)`, of keys in boxes; calls `free` when they have been read."""
        self.s_acc[...] = zero_tile(*self.s_acc.shape)
        for queries, box in zip(self.query_boxes(len(keys)), keys, strict=True):
            plgpu.wgmma(self.s_acc, box, queries.transpose((1, 0)))
        logits = plgpu.wgmma_accumulator_load(self.s_acc, wait_n=0)
        free()
        return logits

    def query_boxes(self, count: int) -> list:
        """The columns of queries that go with each box of keys."""
        if count == 1:
            return [self.q_smem]
        columns = self.q_smem.shape[1] // count
        return [self.q_smem.at[:, pl.ds(n * columns, columns)] for n in range(count)]

    def no_output(self) -> list[jax.Array]:
        """The output before the first step, but for what the accumulators have."""
        for acc in self.o_accs:
            acc[...] = zero_tile(*acc.shape)
        return []

    def scaled(self, output, factors, is_first) -> list[jax.Array]:
        """The output with each row multiplied by its factor; 0 in the first step of a round."""
        for acc in self.o_accs:
            so_far = plgpu.wgmma_accumulator_load(acc, wait_n=0)
            # The round before may have left what overflowed.
            acc[...] = jnp.where(is_first, 0.0, so_far * spread(factors, so_far.shape))
        return output

    def put_weights(self, weights) -> None:
        self.p_smem.transpose((1, 0))[...] = weights.astype(self.p_smem.dtype)

    def add(self, output, values, free) -> list[jax.Array]:
        """The output and weights values, in boxes; calls `free` when values have been read."""
        plgpu.commit_smem()
        for acc, box in zip(self.o_accs, values, strict=True):
            plgpu.wgmma(acc, box.transpose((1, 0)), self.p_smem.transpose((1, 0)))
        plgpu.wgmma_wait(0)
        free()
        return output

    def result(self, output) -> list[jax.Array]:
        """The output, as tiles of columns of it, `(columns, rows)`."""
        return [plgpu.wgmma_accumulator_load(acc, wait_n=0) for acc in self.o_accs]


@dataclasses.dataclass(frozen=True)
class Float8Products(Products):
    """The same of float8 operands, with queries and weights in two parts.

    Of rows there are twice as many in q_smem, p_smem, s_acc and the one of o_accs, which takes n
    columns of the output at a time: `(n, 2 * rows)`.

    Attributes:
      units_smem: `(rows,)`, which logits are multiplied with.
      turned_smem: `(width, BLOCK_KV)`, values.
    """

    units_smem: Any
    turned_smem: Any

    def logits(self, keys, free) -> jax.Array:
        logits = join_parts(super().logits(keys, free))
        # Loaded in each step: registers are few where rows are many.
        units = plgpu.load(self.units_smem, layout=QUERIES, optimized=False)
        return logits * spread(units, logits.shape)

    def no_output(self) -> list[jax.Array]:
        part, columns = self.o_accs[0].shape
        return [zero_tile(part, columns // 2)] * (self.turned_smem.shape[0] // part)

    def scaled(self, output, factors, is_first) -> list[jax.Array]:
        return [x * spread(factors, x.shape) for x in output]  # there is one round alone

    def put_weights(self, weights) -> None:
        # All warps have done with those of the last step, as they have met for maxima.
        store_weights_float8(self.p_smem, weights)

    def add(self, output, values, free) -> list[jax.Array]:
        for turned, box in zip(self.turned_boxes(len(values)), values, strict=True):
            transpose_float8(turned, box)
        plgpu.commit_smem()
        (acc,) = self.o_accs
        part, columns = acc.shape
        for n in range(len(output)):
            if n == len(output) - 1:
                free()  # its branch keeps the compiler from zeroing the accumulators of both parts
            acc[...] = zero_tile(part, columns)
            turned = self.turned_smem.at[pl.ds(n * part, part)]
            plgpu.wgmma(acc, turned, self.p_smem.transpose((1, 0)))
            output[n] += join_parts(plgpu.wgmma_accumulator_load(acc, wait_n=0))
        return output

    def turned_boxes(self, count: int) -> list:
        """Where the columns of each box of values go as rows."""
        if count == 1:
            return [self.turned_smem]
        rows = self.turned_smem.shape[0] // count
        return [self.turned_smem.at[pl.ds(n * rows, rows)] for n in range(count)]

    def result(self, output) -> list[jax.Array]:
        return output


def spread(columns: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Broadcasts a scalar, or one value a column, over `shape`."""
    return columns if jnp.ndim(columns) == 0 else per_query(columns, shape[0])
