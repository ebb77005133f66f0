"""Which keys the 64 query rows of a warpgroup see, as a mask of a tile of logits."""

import dataclasses
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.config import ROWS
from pallas_kernels.problem import Problem
from pallas_kernels.ptx.loads import load_intervals, load_rows
from pallas_kernels.ptx.masks import (
    bits_from,
    bits_to,
    keep_columns_from,
    keep_columns_to,
    keep_equal_columns,
)

PER_ROW = plgpu.Layout.WGMMA.reduce(1)


def in_each_row(scalar) -> jax.Array:
    """`(64,)` of one value."""
    return plgpu.layout_cast(jnp.broadcast_to(scalar, (ROWS,)), PER_ROW)


@dataclasses.dataclass(frozen=True)
class RowMasks:
    """Masks of tiles of 64 query rows by `block_kv` keys.

    Attributes:
      problem: what is static.
      block_kv: keys of a tile.
      padded_rows: rows of all tiles of a head, of which the last may be beyond the last query.
      intervals_ref: None, or `[B, 2, T]` int32 in global memory, of a problem that is dynamic in
        the place of its bounds, of one that is segmented beside them.
      ids_refs: segment ids of queries `[B, T]` and keys, of a problem that is segmented.
    """

    problem: Problem
    block_kv: int
    padded_rows: int
    intervals_ref: Any = None
    ids_refs: Any = None

    def load_bounds(self, batch, first_row) -> tuple[jax.Array, jax.Array] | None:
        """The interval of each row, `(64,)` first and end; None where it is static."""
        if self.intervals_ref is None:
            return None
        return load_intervals(
            self.intervals_ref.at[batch], first_row, self.problem.query_length - 1
        )

    def load_ids(self, batch, first_row, first_key):
        """Ids of rows, `(64,)`, and where those of the keys are, for `masked`; None without ids."""
        if not self.problem.segmented:
            return None
        query_ids_ref, key_ids_ref = self.ids_refs
        ids = load_rows(query_ids_ref.at[batch], first_row, self.problem.query_length - 1)
        return ids, key_ids_ref.at[batch], first_key

    def masked(
        self, tile, first_row, first_key, bounds, ids, *, near: bool = True, fill: float = -jnp.inf
    ) -> jax.Array:
        """Logits, or weights, with `fill` where a row may not see the key, or there is none.

        Where not `near`, every key is before the end of each row's interval.
        """
        last = self._last_columns(first_row, first_key, bounds) if near else None
        if last is not None and (ids is None or self.problem.has_dropout):  # registers are short
            tile, last = keep_columns_to(tile, last, fill), None
        if (first := self._first_columns(first_row, first_key, bounds)) is not None:
            tile = keep_columns_from(tile, first, fill)
        if ids is not None:
            row_ids, key_ids, first_id = ids
            tile = keep_equal_columns(tile, row_ids, key_ids, first_id, fill, last)
        return tile

    def visible(self, bits, first_row, first_key, bounds, *, near: bool = True) -> jax.Array:
        """The same of bits of `all_columns`, for `keep_bits`, in the place of comparing ids.

        So there is one select an element, and few registers are taken once bits are made.
        """
        if near and (last := self._last_columns(first_row, first_key, bounds)) is not None:
            bits = bits_to(bits, last)
        if (first := self._first_columns(first_row, first_key, bounds)) is not None:
            bits = bits_from(bits, first)
        return bits

    def _last_columns(self, first_row, first_key, bounds):
        """The last key that there is of those each row sees, from the first of the tile on."""
        problem = self.problem
        last: jax.Array | None = None
        if problem.highest is not None and not problem.dynamic:
            last = _numbers() + (first_row + problem.highest)
        if bounds is not None:  # none ends behind the last key
            end = bounds[1] - 1
            last = end if last is None else jnp.minimum(last, end)
        elif last is not None:
            last = jnp.minimum(last, problem.key_length - 1)
        elif problem.key_length % self.block_kv != 0:
            last = in_each_row(jnp.int32(problem.key_length - 1))
        return None if last is None else last - first_key

    def _first_columns(self, first_row, first_key, bounds):
        """The first key that each row sees, from the first of the tile on; None for all."""
        problem = self.problem
        first: jax.Array | None = None
        if problem.lowest is not None and not problem.dynamic:
            row = _numbers() + first_row
            first = row + problem.lowest
            if self.padded_rows > problem.query_length:
                # Rows beyond the last query need a key in their first block like any other.
                first = jnp.where(row < problem.query_length, first, 0)
        if bounds is not None and bounds[0] is not None:
            first = bounds[0] if first is None else jnp.maximum(first, bounds[0])
        return None if first is None else first - first_key


def _numbers() -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=PER_ROW)
