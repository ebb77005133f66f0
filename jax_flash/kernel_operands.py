"""What the kernels take in the place of a call's arrays: intervals, zeros, words."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_flash.call import Call
from jax_flash.masks import Visibility
from jax_flash.sharding import mapped_zero_times, vary_alike
from pallas_kernels import dropout_words
from pallas_kernels import intervals as run_time_intervals
from pallas_kernels.config import SM_COUNT
from pallas_kernels.element_arrays import BIAS_DTYPES, Blocks, Elements
from pallas_kernels.problem import Problem

SCALES = (1e-30, 1e4)  # of logits, that kernels take
SOFT_CAPS = (1e-3, 1e6)  # likewise
_ROWS = 128  # of a tile of the forward, where there are many


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Operands:
    """The arrays that the kernels take of a call, or what stands for each of them.

    Attributes:
      query, key, value: `[B, T, N, H]`, `[B, S, K, H]` and `[B, S, K, h]`.
      sinks: one `[B, N]` float32, or none.
      intervals: one `[B, 2, T]` int32, or none where they are static.
      ids: segment ids of queries, `[B, T]`, and of keys, `[B, S]`, or none.
      query_words, key_words: of dropout, one `[B, N, T]`, T rounded up, and one `[B, S]`; or none.
      blocks: one `Blocks`, or none.
      elements: what is known of single pairs.
    """

    query: Any
    key: Any
    value: Any
    sinks: Any
    intervals: Any
    ids: Any
    query_words: Any
    key_words: Any
    blocks: Any
    elements: Any

    @property
    def words(self) -> tuple[jax.Array, ...] | None:
        """Those of queries and keys, if there are any."""
        return (*self.query_words, *self.key_words) or None

    def with_keys(self, changed: Callable) -> "Operands":
        """With what `changed` makes of key and of value."""
        return dataclasses.replace(self, key=changed(self.key), value=changed(self.value))

    def with_zeros(self, problem: Problem) -> "Operands":
        """With zeros in queries that see no key, and in keys that no query sees.

        By bounds, intervals and ids alone.
        """
        arrays = self.query, self.key, self.value
        query, key, value = zero_all_unseen(*arrays, problem, self.intervals, self.ids)
        return dataclasses.replace(self, query=query, key=key, value=value)


def segment_ids_of(call: Call) -> tuple[jax.Array, ...]:
    """Those of queries `[B, T]` and of keys `[B, S]`, or none."""
    query_ids, key_ids = call.visibility.query_segment_ids, call.visibility.key_value_segment_ids
    if query_ids is None or key_ids is None:
        return ()
    return vary_alike((query_ids, key_ids), (call.query, call.key))


def words_of(call: Call) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Words of dropout of queries and of keys (`dropout.Words`), one array each, or none."""
    if call.dropout_key is None:
        return (), ()
    (batch, query_length, _, _), key_length = call.query.shape, call.key.shape[1]
    query_words = dropout_words.query_words(
        call.dropout_key,
        call.batch_entries[:, None, None],
        call.query_heads[None, :, None],
        query_length,
        dropout_words.steps_of(call.dropout_rate),
    )
    # For each batch entry, as vmap makes the batch longer.
    key_words = dropout_words.columns_of_keys(
        call.dropout_key, jnp.arange(key_length, dtype=jnp.int32)
    )
    key_words = jnp.broadcast_to(key_words, (batch, key_length))
    # Of their own dtype, for which kernels have loads.
    as_int = lambda x: lax.bitcast_convert_type(x, jnp.int32)
    return (as_int(query_words),), (as_int(key_words),)


def intervals_of(call: Call) -> tuple[int | None, int | None, tuple[jax.Array, ...]]:
    """Lowest and highest of `Problem`; and `[B, 2, T]` keys of each query, if not static."""
    see, (batch, query_length), key_length = (
        call.visibility,
        call.query.shape[:2],
        call.key.shape[1],
    )
    if see.are_bounds_static:
        assert isinstance(see.query_offset, int)
        return *_bounds(see, see.query_offset, query_length, key_length), ()
    bounds = see.row_intervals(query_length, key_length)
    whole = [jnp.broadcast_to(x, (batch, query_length)).astype(jnp.int32) for x in bounds]
    return None, None, (jnp.stack(whole, axis=1),)


def bounds_beside_lengths(call: Call) -> tuple[bool, int | None]:
    """Whether lengths of keys alone are known at run time only, and `Problem.highest` then.

    It must let each query see a key, if there is any.
    """
    see, query_length, key_length = call.visibility, call.query.shape[1], call.key.shape[1]
    if see.key_value_seq_lengths is None or see.query_seq_lengths is not None:
        return False, None
    if see.window is not None or not isinstance(see.query_offset, int):
        return False, None
    _, highest = _bounds(see, see.query_offset, query_length, key_length)
    return highest is None or highest >= 0, highest


def has_key_mask(call: Call) -> bool:
    """Whether all that hides anything is a mask of keys, the same for all queries and heads.

    And kernels take it as such, forward and backward, or beside a bias forward alone
    (`hides_keys`), and have so many tiles that shares of keys, which they do not have beside it,
    would bring little.
    """
    mask, (batch, query_length, heads, width) = call.visibility.mask, call.query.shape
    if mask is None or mask.shape[1:3] != (1, 1) or mask.shape[3] == 1:
        return False
    if call.deterministic or max(width, call.value.shape[-1]) > 128:
        return False
    block_kv = None if call.config is None else call.config.forward.block_kv
    tiles = batch * heads * -(-query_length // _ROWS)
    if 2 * tiles <= SM_COUNT or block_kv not in (None, 64, 128):
        return False
    return intervals_of(call) == (None, None, ())


def hides_keys(call: Call, elements: Elements) -> bool:
    """Whether a mask of keys stands beside nothing but a bias that TMA brings the forward."""
    comes_by_tma = elements.has_bias_of_keys or elements.tiled_bias_dtype is not None
    beside = (
        call.config, call.mask_mod, call.score_mod, call.logits_soft_cap, call.dropout_key,
        call.visibility.query_segment_ids,
    )  # fmt: skip
    return comes_by_tma and all(x is None for x in beside) and has_key_mask(call)


def elements_of(call: Call) -> Elements:
    """Mask and bias, a bias of a dtype that the kernels do not read as float32."""
    bias = call.bias
    if bias is not None and bias.dtype not in BIAS_DTYPES:
        bias = bias.astype(jnp.float32)
    return Elements(call.visibility.mask, bias)


def zero_masked(x: jax.Array, see: Visibility, problem: Problem) -> jax.Array:
    """x `[B, S, K, ...]` with zeros where no query sees the key, masked or not."""
    visible = see.tile(0, problem.query_length, 0, problem.key_length)
    assert visible is not None  # as there is a mask
    heads = (problem.kv_heads, problem.group) if visible.shape[1] > 1 else (1, 1)
    visible = visible.reshape(visible.shape[0], *heads, *visible.shape[2:])
    seen = visible.any((2, 3)).swapaxes(1, 2)  # [B, S, K], axes whole or 1
    return jnp.where(seen[..., None], x, 0)


def zero_unseen_by_heads(x: jax.Array, seen: jax.Array) -> jax.Array:
    """x `[B, S, K, ...]` with zeros where no query head of a key head sees the key.

    Args:
      seen: bool `[b, n, S]`, of query heads, each axis whole or 1, or for b what divides it.
    """
    if 1 < seen.shape[0] < x.shape[0]:
        seen = jnp.repeat(seen, x.shape[0] // seen.shape[0], axis=0)
    if seen.shape[1] > 1:
        seen = seen.reshape(seen.shape[0], x.shape[2], -1, seen.shape[2]).any(2)
    return jnp.where(seen.swapaxes(1, 2)[..., None], x, 0)


def _bounds(
    see: Visibility, query_offset: int, query_length: int, key_length: int
) -> tuple[int | None, int | None]:
    """lowest and highest of `Problem`, None where they hide nothing, and int32 in any case."""
    lowest = highest = None
    if see.window is not None:
        left, right = see.window
        lowest, highest = query_offset - left, query_offset + right
    if see.is_causal:
        highest = query_offset if highest is None else min(highest, query_offset)
    # What hides everything is as good as any other such.
    if lowest is not None:
        lowest = min(lowest, key_length) if lowest > 1 - query_length else None
    if highest is not None:
        highest = max(highest, -query_length) if highest < key_length - 1 else None
    return lowest, highest


def zero_all_unseen(query, key, value, problem: Problem, intervals: tuple, ids: tuple):
    """The three, or their gradients, with zeros in queries that see no key and keys not seen."""
    key, value = (zero_unseen(x, problem, intervals, ids) for x in (key, value))
    return zero_unseeing(query, problem, intervals, ids), key, value


def zero_unseeing(
    x: jax.Array,
    problem: Problem,
    intervals: tuple[jax.Array, ...],
    ids: tuple[jax.Array, ...],
) -> jax.Array:
    """x `[B, T, ...]` with zeros where a query sees no key: 0 * NaN would be NaN."""
    if problem.has_lists and not problem.has_given_lists:
        return _zero_unless(problem.mask_function.seeing[None], x)
    others: tuple[Any, ...] = intervals
    if ids and not others:
        others = (run_time_intervals.of_bounds_of_queries(problem),)
    return _zero_alone(x, others, ids, problem.seeing_queries)


def zero_unseen(
    x: jax.Array,
    problem: Problem,
    intervals: tuple[jax.Array, ...],
    ids: tuple[jax.Array, ...],
) -> jax.Array:
    """x `[B, S, ...]` with zeros where no query sees the key."""
    if problem.has_lists and not problem.has_given_lists:
        return _zero_unless(problem.mask_function.seen[None], x)
    others: tuple[Any, ...] = tuple(
        run_time_intervals.of_keys(seen, problem.key_length) for seen in intervals
    )
    if ids and not others:
        others = (run_time_intervals.of_bounds_of_keys(problem),)
    return _zero_alone(x, others, ids[::-1], problem.seen_keys)


def _zero_alone(x: jax.Array, others: tuple, ids: tuple[jax.Array, ...], kept: slice) -> jax.Array:
    """x `[B, R, ...]` with zeros in the rows that have none of the others.

    Args:
      others: one `[B or 1, 2, R]`, the interval of the others that each row has, but for ids; or
        none, where there are no ids and `kept` says it.
      ids: segment ids of rows and of the others, or none.
      kept: the rows that are not zero by what is static.
    """
    if ids:
        from pallas_kernels import segments  # of Pallas, which is slow to import

        return _zero_unless(segments.has_partner(*ids, *others), x)
    for interval in others:
        x = _zero_unless(interval[:, 0] < interval[:, 1], x)
    return _zero_outside(x, kept)


def _zero_unless(counts: jax.Array, x: jax.Array) -> jax.Array:
    """x `[B, R, ...]` with zeros where `[B, R]` counts is false."""
    return jnp.where(counts.reshape(counts.shape + (1,) * (x.ndim - 2)), x, 0)


def _zero_outside(x: jax.Array, kept: slice) -> jax.Array:
    for outside in (slice(0, kept.start), slice(kept.stop, x.shape[1])):
        if outside.start < outside.stop:
            x = x.at[:, outside].set(0)
    return x


def zero_empty(query, lse, problem: Problem):
    """Query with zeros in rows that see nothing by a mask, where 0 * NaN is NaN."""
    if not (problem.has_mask or problem.has_given_lists):
        return query
    seeing = jnp.logical_not(jnp.isneginf(of_rows(lse, query))).transpose(0, 2, 1)[..., None]
    return jnp.where(seeing, query, 0)


def folding_vmap(run, leading: int = 0):
    """`run(leading, *arrays)` of arrays `[B, ...]`, where vmap gives all one more leading axis.

    Each device makes the leading axes part of its batch (`over_devices`): done here, that would
    gather a batch that is sharded. Its arguments may be trees of such arrays, with `Elements` and
    `Blocks` among them, whose arrays may have an axis of 1 for the batch, or of what divides it.
    """
    has_ones = lambda part: isinstance(part, (Elements, Blocks))
    function = jax.custom_batching.custom_vmap(functools.partial(run, leading))

    @function.def_vmap
    def _(axis_size, in_batched, *args):
        def spread(x, batched):
            return x if batched else jnp.broadcast_to(x, (axis_size, *x.shape))

        def spread_element(x, batched):
            is_one = not batched and set(x.shape[: leading + 1]) == {1}
            return x[None] if is_one else spread(x, batched)

        def spread_part(part, batched):
            return jax.tree.map(spread_element if has_ones(part) else spread, part, batched)

        spread_args = jax.tree.map(spread_part, args, tuple(in_batched), is_leaf=has_ones)
        if axis_size == 0:  # no device has a batch to run a kernel on
            out = mapped_zero_times(functools.partial(run, leading), in_batched, args)
        else:
            out = folding_vmap(run, leading + 1)(*spread_args)
        return out, jax.tree.map(lambda _: True, out)

    return function


def result_types(problem: Problem, dtype, rows: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Of output `[B, T, N, h]`, LSE `[B, N, rows]`, and references."""
    heads = problem.batch, problem.heads
    out_shape = (problem.batch, problem.query_length, problem.heads, problem.value_width)
    of_rows = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    return (
        jax.ShapeDtypeStruct(out_shape, dtype),
        of_rows((*heads, rows)),
        of_rows((*heads, 2, rows)),
    )


def resized(x, rows: int):
    """`[..., R]` as `[..., rows]`: of what fills the last tile, less or more."""
    more = max(0, rows - x.shape[-1])
    x = x[..., :rows]
    return jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, more),)) if more else x


def of_rows(lse, out):
    """LSE `[B, N, T]` of output `[B, T, N, h]`, without the rows that fill the last tile.

    Here and not beside the kernel, so that nothing is copied where only the backward takes it.
    """
    return lse[:, :, : out.shape[1]]
