"""Batches: calls with several axes, `[..., T, N, H]`, as calls with one; and packed documents."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_flash.checks import as_array, as_int32, need, need_count
from jax_flash.quantization import Quantized

# How many axes stand behind those of the batch, and in words.
_BEHIND = {
    **dict.fromkeys(("query", "key", "value"), (3, "length, heads and width behind ")),
    **dict.fromkeys(("query_segment_ids", "key_value_segment_ids"), (1, "a length behind ")),
    **dict.fromkeys(("query_seq_lengths", "key_value_seq_lengths", "query_offset"), (0, "")),
}
_OF_PAIRS = "bias", "mask"


def with_one_axis(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `attention` whose query has more than four axes, as they are for four.

    Raises:
      ValueError: an array has not the query's batch axes.
    """
    axes = np.shape(arguments["query"])[:-3]
    found = dict(arguments)
    for name in _BEHIND:
        x = arguments[name]
        if x is not None and np.ndim(x) > 0:  # an offset may be one of all
            found[name] = _flat(name, x, axes)
    for name in _OF_PAIRS:
        if arguments[name] is not None:
            found[name] = _flat_pairs(name, as_array(name, arguments[name]), axes)
    return found


def as_given(query: ArrayLike | Quantized, result: jax.Array | None) -> jax.Array | None:
    """A result with the batch axes that the query came with."""
    axes = np.shape(query)[:-3]
    if result is None or len(axes) == 1:
        return result
    return result.reshape(*axes, *result.shape[1:]) if axes else result[0]


def segment_ids(starts: ArrayLike, length: int) -> jax.Array:
    """Segment ids of documents that are packed one after the other, from where they begin.

        documents = jax_flash.segment_ids(cu_seqlens, 4096)
        jax_flash.attention(..., query_segment_ids=documents, key_value_segment_ids=documents)

    Args:
      starts: integers `[..., documents]`, the position where each begins, in any order. The end of
        the last one may be among them, as in the `cu_seqlens` of other libraries: what lies behind
        it is a document of its own. So is what lies before the first. A position may stand
        more than once, where batch entries have unlike numbers of documents.
      length: of the sequence.

    Returns:
      int32 `[..., length]`: at each position how many documents have begun.
    """
    starts = as_int32("starts", starts)
    need(starts.ndim > 0, "starts", starts.shape, "[..., documents]")
    need_count("length", length, least=0)
    places = jnp.arange(length, dtype=jnp.int32).reshape((1,) * starts.ndim + (-1,))
    begun = starts[..., None] <= places
    return begun.sum(-2, dtype=jnp.int32)


def _flat(name: str, x: Any, axes: tuple[int, ...]) -> jax.Array:
    need(not isinstance(x, Quantized), name, f"Quantized of {x.ndim} axes", "four at most")
    x = as_array(name, x)
    behind, in_words = _BEHIND[name]
    fits = x.ndim == len(axes) + behind and x.shape[: len(axes)] == axes
    need(fits, name, x.shape, f"{in_words}the batch axes of query, {axes}")
    return x.reshape(math.prod(axes), *x.shape[len(axes) :])


def _flat_pairs(name: str, x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """A bias or a mask `[..., N, T, S]`, of which any axes may be 1, or left out in front."""
    own = x.shape[:-3]
    if all(size == 1 for size in own):
        return x.reshape(-1, *x.shape[-3:]) if own else x
    fits = len(own) <= len(axes) and all(
        a in (1, b) for a, b in zip(own[::-1], axes[::-1], strict=False)
    )
    need(fits, name, x.shape, f"one that broadcasts to [..., N, T, S] of batch axes {axes}")
    whole = jnp.broadcast_to(x, (*axes, *x.shape[-3:]))
    return whole.reshape(math.prod(axes), *x.shape[-3:])
