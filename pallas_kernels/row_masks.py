"""Which keys the 64 query rows of a warpgroup see, as a mask of a tile of logits."""

import dataclasses
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.config import Problem
from pallas_kernels.primitives import (
    keep_columns_from,
    keep_columns_to,
    keep_equal_columns,
    load_intervals,
    load_rows,
)

ROWS = 64  # query rows of a consumer: the M of a wgmma
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
      intervals_ref: `[B, 2, T]` int32 in global memory, of a problem that is dynamic.
      ids_refs: segment ids of queries `[B, T]` and keys, of a problem that is segmented.
    """

    problem: Problem
    block_kv: int
    padded_rows: int
    intervals_ref: Any = None
    ids_refs: Any = None

    def load_bounds(self, batch, first_row) -> tuple[jax.Array, jax.Array] | None:
        """The interval of each row, `(64,)` first and end; None where it is static."""
        if not self.problem.dynamic:
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

    def masked(self, logits, first_row, first_key, bounds, ids, *, near: bool = True) -> jax.Array:
        """Logits with -inf where a row may not see the key, or there is none.

        Where not `near`, every key is before the end of each row's interval.
        """
        problem = self.problem
        is_ragged = problem.key_length % self.block_kv != 0
        last = None
        if near and (problem.dynamic or problem.highest is not None or is_ragged):
            last = self._last_columns(first_row, first_key, bounds)
        if last is not None and (ids is None or problem.dropout):  # with it registers are short
            logits, last = keep_columns_to(logits, last, -jnp.inf), None
        if problem.dynamic or problem.lowest is not None:
            logits = self._masked_far(logits, first_row, first_key, bounds)
        if ids is not None:
            row_ids, key_ids, first_id = ids
            logits = keep_equal_columns(logits, row_ids, key_ids, first_id, -jnp.inf, last)
        return logits

    def _last_columns(self, first_row, first_key, bounds):
        """The last key that there is of those each row sees, from the first of the tile on."""
        last = jnp.int32(self.problem.key_length - 1)
        if bounds is not None:
            last = bounds[1] - 1
        elif self.problem.highest is not None:
            last = jnp.minimum(_numbers() + (first_row + self.problem.highest), last)
        else:
            last = in_each_row(last)
        return last - first_key

    def _masked_far(self, logits, first_row, first_key, bounds):
        """Logits with -inf where a key is before the first of its row."""
        if bounds is not None:
            return keep_columns_from(logits, bounds[0] - first_key, -jnp.inf)
        row = _numbers() + first_row
        first = row + self.problem.lowest
        if self.padded_rows > self.problem.query_length:
            # Rows beyond the last query need a key in their first block like any other.
            first = jnp.where(row < self.problem.query_length, first, 0)
        return keep_columns_from(logits, first - first_key, -jnp.inf)


def _numbers() -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=PER_ROW)
