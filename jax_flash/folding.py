"""Calls with a mask_mod in the forms that kernels take: what stands beside it is folded with it.

Kernels evaluate a function beside bounds that are static, and nothing else that hides keys. Beside
a dense mask they take everything, but no function. So a call with both becomes one of these:

    a function   lengths, an offset of each batch entry, segment ids and masks of keys or of queries
                 alone become arrays that it reads. Blocks that any of these hides are skipped too.
    a mask       beside a mask or a bias of pairs, the function becomes a mask of pairs: an array of
                 that size is there anyway.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_flash.call import Call
from jax_flash.functions import Function, replayed, traced
from jax_flash.masks import Visibility
from jax_flash.sharding import vary_over

# Of batch entry and head, counted from the first ones here, query and key.
_Condition = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]


def folded(call: Call) -> Call:
    """The same call, with a mask_mod that stands beside static bounds alone, or with none.

    A call stays as it is without a mask_mod, where nothing stands beside it, and beside a bias of
    keys or of queries alone.
    """
    if call.mask_mod is None:
        return call
    if _has_pairs(call):
        return _with_a_mask(call, call.mask_mod)
    return call if call.bias is not None else _with_a_function(call, call.mask_mod)


def folded_shapes(call: Call) -> Call:
    """`folded` as far as a program tells what kernels take: without a mask that is computed.

    That is for each device, where operands are sharded.
    """
    if call.mask_mod is None:
        return call
    if _has_pairs(call):
        shape = call.query.shape[0], call.query.shape[2], call.query.shape[1], call.key.shape[1]
        return _masked(call, jax.ShapeDtypeStruct(shape, jnp.bool_))
    return jax.eval_shape(folded, call)


def _has_pairs(call: Call) -> bool:
    """Whether there is an array of pairs anyway."""
    lengths = call.query.shape[1], call.key.shape[1]
    return any(x is not None and x.shape[2:] == lengths for x in (call.visibility.mask, call.bias))


def _with_a_mask(call: Call, function: Function) -> Call:
    """Along batch and heads the mask is whole where the function or the given mask is."""
    lengths = call.query.shape[1], call.key.shape[1]
    given = call.visibility.mask
    return _masked(call, _mask_of(lengths, function, call.batch_entries, call.query_heads, given))


def _masked(call: Call, mask: Any) -> Call:
    visibility = dataclasses.replace(call.visibility, mask=mask)
    return dataclasses.replace(call, mask_mod=None, visibility=visibility)


@functools.partial(jax.jit, static_argnums=0)  # one after the other operations would hold all pairs
def _mask_of(lengths, function: Function, entries, heads, mask: jax.Array | None) -> jax.Array:
    query, key = (jnp.arange(length, dtype=jnp.int32) for length in lengths)
    shown = function.at(
        entries.reshape(-1, 1, 1, 1),
        heads.reshape(1, -1, 1, 1),
        query.reshape(1, 1, -1, 1),
        key.reshape(1, 1, 1, -1),
    )
    return shown if mask is None else shown & mask


def _with_a_function(call: Call, function: Function) -> Call:
    # Inside `jax.shard_map` a function is of values that vary over the same mesh axes.
    axes = function.program.varies_over
    see = call.with_arrays(vary_over(axes, call.arrays)).visibility
    conditions = _conditions(see, call.query.shape[1], call.key.shape[1])
    if not conditions:
        return call

    def narrowed(b, h, q_idx, kv_idx):
        shown = replayed(function, b, h, q_idx, kv_idx)
        own = _from(call.first_batch_entry, b), _from(call.first_query_head, h)
        for condition in conditions:
            shown = shown & condition(*own, q_idx, kv_idx)
        return shown

    # What was known of its blocks is not known of these.
    mask_mod = traced("mask_mod", narrowed, operands=vary_over(axes, jnp.int32(0)))
    visibility = Visibility()
    if isinstance(see.query_offset, int):
        visibility = Visibility(see.is_causal, see.window, see.query_offset)
    return dataclasses.replace(call, mask_mod=mask_mod, visibility=visibility)


def _from(first: int | jax.Array, index: jax.Array) -> jax.Array:
    """A batch entry or head of the whole call, counted from the first one here."""
    if isinstance(first, int) and first == 0:
        return index
    return jnp.maximum(index - first, 0)  # known not to count from the end


def _conditions(see: Visibility, query_length: int, key_length: int) -> list[_Condition]:
    """All but static bounds and masks of pairs."""
    found: list[_Condition] = []
    if not isinstance(see.query_offset, int):
        # Offsets may be so far away that a sum with one is no int32: intervals are within [0, S].
        bounds = Visibility(see.is_causal, see.window, see.query_offset)
        begin, end = bounds.row_intervals(query_length, key_length)
        found.append(lambda b, h, q, k: (begin[b, q] <= k) & (k < end[b, q]))
    if (query_lengths := see.query_seq_lengths) is not None:
        found.append(lambda b, h, q, k: q < query_lengths[b])
    if (key_lengths := see.key_value_seq_lengths) is not None:
        found.append(lambda b, h, q, k: k < key_lengths[b])
    query_ids, key_ids = see.query_segment_ids, see.key_value_segment_ids
    if query_ids is not None and key_ids is not None:
        found.append(lambda b, h, q, k: query_ids[b, q] == key_ids[b, k])
    if (mask := see.mask) is not None:
        whole = [axis for axis, size in enumerate(mask.shape) if size > 1]
        values = mask.reshape([mask.shape[axis] for axis in whole])
        found.append(lambda *indices: values[tuple(indices[axis] for axis in whole)])
    return found
