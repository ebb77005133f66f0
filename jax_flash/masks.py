"""What may attend to what: the one place where visibility is defined."""

import dataclasses

import jax


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
