"""What may attend to what: the one place where visibility is defined.

Causal, window, offset and lengths all say the same thing: query row i sees one interval of keys.
Segment ids and dense masks add to it, element by element. Dropout is beside them because it too
is a function of positions alone.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import dropout_words

# Beyond every position, which are below it. No bound of an interval need be further away, so that
# position + bound fits int32.
_FAR = 2**30


@dataclasses.dataclass(frozen=True)
class Visibility:
    """Which of S keys each of T queries may see: every condition that is given must hold.

    Attributes:
      is_causal: key j is visible to query i if j <= i + query_offset.
      window: None or (left, right): i + query_offset - left <= j <= i + query_offset + right.
      query_offset: position of query 0 among the keys, an int (static) or `[B]` int32.
      query_seq_lengths: None or `[B]` int32: query i exists if i < length.
      key_value_seq_lengths: None or `[B]` int32: key j exists if j < length.
      query_segment_ids: None or `[B, T]` int32; with key_value_segment_ids, ids must be equal.
      key_value_segment_ids: None or `[B, S]` int32.
      mask: None or bool, 4D, each axis of `[B, N, T, S]` whole or 1; True is visible.
    """

    is_causal: bool = False
    window: tuple[int, int] | None = None
    query_offset: int | jax.Array = 0
    query_seq_lengths: jax.Array | None = None
    key_value_seq_lengths: jax.Array | None = None
    query_segment_ids: jax.Array | None = None
    key_value_segment_ids: jax.Array | None = None
    mask: jax.Array | None = None

    @property
    def are_bounds_static(self) -> bool:
        """Whether the keys of each query, but for ids and mask, are known before run time."""
        bounds = self.query_offset, self.query_seq_lengths, self.key_value_seq_lengths
        return all(x is None or isinstance(x, int) for x in bounds)

    def row_intervals(self, num_rows: int, num_keys: int):
        """The keys each query may see by causal, window, offset and lengths alone.

        Segment ids and the dense mask are left out: they can only take keys away.

        Args:
          num_rows: T.
          num_keys: S.

        Returns:
          lo, hi: int32 `[1, T]` or `[B, T]`, within [0, S]: query i may see keys lo_i <= j < hi_i,
          none if hi_i <= lo_i. Both never decrease with i, also over empty rows, so the queries
          that see one key are an interval too. numpy arrays where they are static (int offset,
          no lengths), JAX arrays otherwise.
        """
        lo, hi = self._bounds(np.arange(num_rows, dtype=np.int32))
        xp = np if isinstance(hi, np.ndarray) else jnp
        return xp.clip(lo, 0, num_keys), xp.clip(hi, 0, num_keys)

    def tile(
        self,
        row_start: int | jax.Array,
        num_rows: int,
        col_start: int | jax.Array,
        num_cols: int,
    ) -> jax.Array | None:
        """What is visible in the tile of queries and keys that starts at (row_start, col_start).

        Args:
          row_start: first query, static or traced; row_start + num_rows <= T.
          num_rows: queries in the tile.
          col_start: first key, static or traced; col_start + num_cols <= S.
          num_cols: keys in the tile.

        Returns:
          bool, 4D, broadcastable to `[B, N, num_rows, num_cols]`, or None if all is visible.
        """
        conditions = []
        if (
            self.is_causal
            or self.window is not None
            or self.query_seq_lengths is not None
            or self.key_value_seq_lengths is not None
        ):
            lo, hi = self._bounds(row_start + jnp.arange(num_rows, dtype=jnp.int32))
            cols = (col_start + jnp.arange(num_cols, dtype=jnp.int32))[None, None]
            seen = (lo[:, :, None] <= cols) & (cols < hi[:, :, None])
            conditions.append(seen[:, None])
        if self.query_segment_ids is not None and self.key_value_segment_ids is not None:
            query_ids = slice_axis(self.query_segment_ids, 1, row_start, num_rows)
            key_ids = slice_axis(self.key_value_segment_ids, 1, col_start, num_cols)
            conditions.append(query_ids[:, None, :, None] == key_ids[:, None, None, :])
        if self.mask is not None:
            mask = slice_axis(self.mask, 2, row_start, num_rows)
            conditions.append(slice_axis(mask, 3, col_start, num_cols))
        visible = None
        for condition in conditions:
            visible = condition if visible is None else visible & condition
        return visible

    def _bounds(self, rows):
        """Interval of keys of `rows` int32 `[r]`, not clipped to [0, S]: lo, hi `[1 or B, r]`."""
        xp = np if self.are_bounds_static and isinstance(rows, np.ndarray) else jnp
        rows = xp.asarray(rows)[None]
        lo = xp.zeros_like(rows)
        hi = xp.full_like(rows, _FAR)
        if self.window is not None:
            left, right = self.window
            lo = rows + _shifted(self.query_offset, -left)
            hi = rows + _shifted(self.query_offset, right + 1)
        if self.is_causal:
            hi = xp.minimum(hi, rows + _shifted(self.query_offset, 1))
        if self.key_value_seq_lengths is not None:
            hi = xp.minimum(hi, self.key_value_seq_lengths[:, None])
        if self.query_seq_lengths is not None:
            # Raising lo rather than lowering hi keeps both monotone.
            exists = rows < self.query_seq_lengths[:, None]
            lo = xp.where(exists, lo, np.iinfo(np.int32).max)
        return lo, hi


def _shifted(offset: int | jax.Array, distance: int):
    """offset + distance, or _FAR beyond it: int32 `[1, 1]` or `[B, 1]`, to add a position to."""
    if isinstance(offset, int):
        return np.full((1, 1), min(max(offset + distance, -_FAR), _FAR), np.int32)
    bounds = np.iinfo(np.int32)
    distance = min(max(distance, -_FAR - bounds.max), _FAR - bounds.min)
    # Offsets whose sum is within _FAR, as far as there are such; it may wrap round on the way.
    lowest, highest = max(-_FAR - distance, bounds.min), min(_FAR - distance, bounds.max)
    wrapped = (distance - bounds.min) % 2**32 + bounds.min
    near = jnp.clip(offset, np.int32(lowest), np.int32(highest))
    return (near + np.int32(wrapped)).reshape(-1, 1)


def slice_axis(x: jax.Array, axis: int, start: int | jax.Array, size: int) -> jax.Array:
    """x[start : start + size] along an axis; an axis of length 1 is a broadcast one and stays."""
    if x.shape[axis] in (1, size):
        return x
    return lax.dynamic_slice_in_dim(x, start, size, axis)


def dropout_keep(key_words, rate: float, batch, head, rows, cols) -> jax.Array:
    """Which attention weights survive dropout: a pure function of the key and of (b, n, i, j).

    A hash rather than a random stream, so that every implementation, tiling and sharding, forward
    and backward, drops the same set without storing it: that of `pallas_kernels/dropout_words.py`.

    Args:
      key_words: two uint32 words, `[2]` or a pair of scalars.
      rate: probability of dropping, in [0, 1): a multiple of 2^-15, or the next such.
      batch, head, rows, cols: integers b, n, i, j, global indices, mutually broadcastable.

    Returns:
      bool, of the broadcast shape: True where the weight is kept.
    """
    return dropout_words.is_kept(key_words, batch, head, rows, cols, dropout_words.steps_of(rate))
