"""Attention of one sequence that is sharded over devices: three ways, all inside `jax.shard_map`.

ring_attention         keys travel round the ring of devices, a part of them at a time
ulysses_attention      devices exchange sequence for heads, and each has some heads of all
all_gather_attention   every device gets all keys
"""

import dataclasses
import functools
import inspect
import itertools
import math
import numbers
from typing import Any, Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jax_flash import api, dispatch, xla
from jax_flash.arguments import as_window, checked
from jax_flash.call import Call, named
from jax_flash.checks import as_array, is_number, need, need_flag, need_number_or_none
from jax_flash.quantization import accumulator
from jax_flash.sharding import vary_alike
from pallas_kernels.config import Config

AxisName = str | tuple[str, ...]


class RingOptions(TypedDict, total=False):
    """What `ring_attention` takes by name, but for return_residual: for type checkers alone."""

    zigzag: bool
    scale: float | None
    is_causal: bool
    local_window_size: int | tuple[int, int] | None
    query_segment_ids: ArrayLike | None
    key_value_segment_ids: ArrayLike | None
    logits_soft_cap: float | None
    sinks: ArrayLike | None
    deterministic: bool
    implementation: str | None


class AllGatherOptions(TypedDict, total=False):
    """The same for `all_gather_attention`."""

    scale: ArrayLike | None
    is_causal: bool
    local_window_size: int | tuple[int, int] | None
    query_segment_ids: ArrayLike | None
    key_value_segment_ids: ArrayLike | None
    logits_soft_cap: float | None
    sinks: ArrayLike | None
    deterministic: bool
    implementation: str | None
    config: Config | None


class UlyssesOptions(AllGatherOptions, total=False):
    """The same for `ulysses_attention`."""

    query_offset: ArrayLike


@overload
def ring_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    axis_name: AxisName,
    return_residual: Literal[False] = False,
    **options: Unpack[RingOptions],
) -> jax.Array: ...


@overload
def ring_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    axis_name: AxisName,
    return_residual: Literal[True],
    **options: Unpack[RingOptions],
) -> tuple[jax.Array, jax.Array]: ...


@overload
def ring_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    axis_name: AxisName,
    return_residual: bool,
    **options: Unpack[RingOptions],
) -> jax.Array | tuple[jax.Array, jax.Array]: ...


def ring_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    axis_name: AxisName,
    zigzag: bool = False,
    scale: float | None = None,
    is_causal: bool = False,
    local_window_size: int | tuple[int, int] | None = None,
    query_segment_ids: ArrayLike | None = None,
    key_value_segment_ids: ArrayLike | None = None,
    logits_soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
    return_residual: bool = False,
    deterministic: bool = False,
    implementation: str | None = None,
) -> Any:
    """`jax_flash.attention` of sequences whose positions are sharded over a mesh axis.

    Called inside `jax.shard_map` with what one device holds. Keys and values go round the ring of
    devices, to the next one while attention to those that are there runs; the parts are merged by
    their LSE in float32. In the backward pass the gradients of keys and values go round too. What a
    device holds is linear in its own part of the sequence, whatever the number of devices, so this
    is the one for the longest contexts. Keys that a window hides from all devices are not sent, and
    the kernels do not compute what is hidden.

    Use it when the attention of T x T positions takes longer than to send T keys and values: by the
    rates of an H100 with NVLink, from a few thousand positions a device on. For shorter sequences,
    see `ulysses_attention` and `all_gather_attention`.

    A causal mask gives the last device the most to do. `zigzag` says that the sequence is in an
    order that gives all the same, in which device i of n has the chunks i and 2n - 1 - i of 2n: see
    `to_zigzag`.

    Args:
      query: `[B, T, N, H]`: this device's T positions of all; see `jax_flash.attention`.
      key: `[B, S, K, H]`: this device's S positions.
      value: `[B, S, K, h]`.
      axis_name: the mesh axis that positions are sharded over, or several.
      zigzag: positions are in zigzag order, else in their own. T and S are even.
      scale: a number; None is 1 / sqrt(H).
      is_causal, local_window_size: as in `jax_flash.attention`, of positions in the whole sequence.
      query_segment_ids: integers `[B, T]`.
      key_value_segment_ids: integers `[B, S]`.
      logits_soft_cap: as in `jax_flash.attention`.
      sinks: floating `[N]`.
      return_residual: also return the LSE.
      deterministic: gradients are the same bit by bit from run to run.
      implementation: as in `jax_flash.attention`: "mosaic_gpu" or "xla".

    Returns:
      The output `[B, T, N, h]` of this device's positions; with `return_residual`, (output, LSE).
      Both have gradients, reverse mode.

    Raises:
      TypeError, ValueError, NotImplementedError: as `jax_flash.attention`; and where axis_name is
        no mesh axis of a surrounding `jax.shard_map`.

    Sources: Liu et al. 2023 (ring attention); Brandon et al. 2023 (striped), and the zigzag order
    of ring-flash-attention.
    """
    for name, flag in (("zigzag", zigzag), ("is_causal", is_causal)):
        need_flag(name, flag)
    need_number_or_none("scale", scale)
    query, key, value = _arrays(query, key, value)
    count = _axis_size(axis_name)
    call = _call(
        query,
        key,
        value,
        scale=scale,
        query_segment_ids=query_segment_ids,
        key_value_segment_ids=key_value_segment_ids,
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
        return_residual=return_residual,
        deterministic=deterministic,
        implementation=implementation,
    )
    T, S = call.query.shape[1], call.key.shape[1]
    need(not zigzag or T % 2 == S % 2 == 0, "zigzag", f"lengths {T} and {S}", "even ones")
    see = call.visibility
    ids: tuple[jax.Array, ...] = ()
    if see.query_segment_ids is not None and see.key_value_segment_ids is not None:
        ids = see.query_segment_ids, see.key_value_segment_ids
    ring = _Ring(
        axis_name=axis_name,
        devices=count,
        zigzag=bool(zigzag),
        is_causal=bool(is_causal),
        window=None if local_window_size is None else as_window(local_window_size),
        scale=float(call.scale),
        logits_soft_cap=call.logits_soft_cap,
        deterministic=call.deterministic,
        implementation=implementation,
    )
    operands = vary_alike((call.query, call.key, call.value, ids), lax.axis_index(axis_name))
    if call.is_empty:  # on this device as on all
        out, lse = xla.nothing_visible(operands[0], value.shape[-1], call.out_dtype, operands)
    else:
        out, lse = _attend(ring, *operands)
    if call.sinks is not None:
        out, lse = xla.with_sinks(out, lse, call.sinks)
    return (out, lse) if return_residual else out


@overload
def ulysses_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    axis_name: AxisName,
    return_residual: Literal[False] = False,
    **options: Unpack[UlyssesOptions],
) -> jax.Array: ...


@overload
def ulysses_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    axis_name: AxisName,
    return_residual: Literal[True],
    **options: Unpack[UlyssesOptions],
) -> tuple[jax.Array, jax.Array]: ...


@overload
def ulysses_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    axis_name: AxisName,
    return_residual: bool,
    **options: Unpack[UlyssesOptions],
) -> jax.Array | tuple[jax.Array, jax.Array]: ...


def ulysses_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    axis_name: AxisName,
    query_segment_ids: ArrayLike | None = None,
    key_value_segment_ids: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    return_residual: bool = False,
    **options: Any,
) -> Any:
    """`jax_flash.attention` of a sharded sequence, in which devices exchange positions for heads.

    Called inside `jax.shard_map` with the positions that one device holds, in their own order. Two
    all-to-alls bring each device some heads of the whole sequence, and one brings back its
    positions. What is sent shrinks with the number of devices, and the work is even for every mask,
    so this is the one for devices that are no more than the heads. Where there are fewer key heads
    than devices, they are sent more than once.

    Args:
      query: `[B, T, N, H]`, this device's T positions; the number of devices divides N.
      key: `[B, S, K, H]`; the number of devices divides K, or K divides it.
      value: `[B, S, K, h]`.
      axis_name: the mesh axis that positions are sharded over, or several.
      query_segment_ids: integers `[B, T]`.
      key_value_segment_ids: integers `[B, S]`.
      sinks: floating `[N]`.
      return_residual: also return the LSE.
      **options: `scale`, `is_causal`, `local_window_size`, `query_offset`, `logits_soft_cap`,
        `deterministic`, `implementation` and `config` of `jax_flash.attention`, where positions are
        those of the whole sequence.

    Returns:
      As `ring_attention`.

    Raises:
      TypeError, ValueError, NotImplementedError: as `ring_attention`.

    Source: Jacobs et al. 2023 (DeepSpeed-Ulysses).
    """
    _check_options(options, _ULYSSES_OPTIONS)
    count = _axis_size(axis_name)
    query, key, value = _arrays(query, key, value)
    call = _call(
        query,
        key,
        value,
        query_segment_ids=query_segment_ids,
        key_value_segment_ids=key_value_segment_ids,
        sinks=sinks,
        return_residual=return_residual,
        **options,
    )
    N, K = query.shape[2], key.shape[2]
    need(N % count == 0, "query", f"{N} heads", f"a multiple of the devices, {count}")
    divides = K % count == 0 or count % K == 0
    need(divides, "key", f"{K} heads", f"a multiple or a divisor of the devices, {count}")
    if K % count:
        key, value = (jnp.repeat(x, count // K, axis=2) for x in (key, value))

    exchange = functools.partial(lax.all_to_all, axis_name=axis_name, tiled=True)
    heads = functools.partial(exchange, split_axis=2, concat_axis=1)
    gathered = _gathered(axis_name)
    sinks = call.sinks
    if sinks is not None:
        sinks = lax.dynamic_slice_in_dim(
            sinks, lax.axis_index(axis_name) * (N // count), N // count
        )
    out, lse = api.attention(
        heads(query),
        heads(key),
        heads(value),
        query_segment_ids=gathered(call.visibility.query_segment_ids),
        key_value_segment_ids=gathered(call.visibility.key_value_segment_ids),
        sinks=sinks,
        return_residual=True,
        **options,
    )
    out, lse = (exchange(x, split_axis=1, concat_axis=2) for x in (out, lse))
    return (out, lse) if return_residual else out


@overload
def all_gather_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    axis_name: AxisName,
    return_residual: Literal[False] = False,
    **options: Unpack[AllGatherOptions],
) -> jax.Array: ...


@overload
def all_gather_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    axis_name: AxisName,
    return_residual: Literal[True],
    **options: Unpack[AllGatherOptions],
) -> tuple[jax.Array, jax.Array]: ...


@overload
def all_gather_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    axis_name: AxisName,
    return_residual: bool,
    **options: Unpack[AllGatherOptions],
) -> jax.Array | tuple[jax.Array, jax.Array]: ...


def all_gather_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    axis_name: AxisName,
    key_value_segment_ids: ArrayLike | None = None,
    **options: Any,
) -> Any:
    """`jax_flash.attention` of a sharded sequence, for which every device gathers all keys.

    Called inside `jax.shard_map` with the positions that one device holds, in their own order. The
    simplest, and the one for sequences so short, or key heads so few, that all keys and values fit
    on each device and are sent in less time than attention takes. With a causal mask the last
    device has the most to do.

    Args:
      query: `[B, T, N, H]`, this device's T positions.
      key: `[B, S, K, H]`, this device's S.
      value: `[B, S, K, h]`.
      axis_name: the mesh axis that positions are sharded over, or several.
      key_value_segment_ids: integers `[B, S]`.
      **options: `scale`, `is_causal`, `local_window_size`, `query_segment_ids`, `logits_soft_cap`,
        `sinks`, `return_residual`, `deterministic`, `implementation` and `config` of
        `jax_flash.attention`.

    Returns:
      As `ring_attention`.

    Raises:
      TypeError, ValueError, NotImplementedError: as `ring_attention`.
    """
    _check_options(options, _ALL_GATHER_OPTIONS)
    _axis_size(axis_name)
    query, key, value = _arrays(query, key, value)
    call = _call(query, key, value, key_value_segment_ids=key_value_segment_ids, **options)
    gathered = _gathered(axis_name)
    offset = lax.axis_index(axis_name) * query.shape[1]
    return api.attention(
        query,
        gathered(key),
        gathered(value),
        key_value_segment_ids=gathered(call.visibility.key_value_segment_ids),
        query_offset=jnp.full(query.shape[0], offset),
        **options,
    )


_ALL_GATHER_OPTIONS = (
    "scale",
    "is_causal",
    "local_window_size",
    "query_segment_ids",
    "logits_soft_cap",
    "sinks",
    "return_residual",
    "deterministic",
    "implementation",
    "config",
)
_ULYSSES_OPTIONS = (
    "scale",
    "is_causal",
    "local_window_size",
    "query_offset",
    "logits_soft_cap",
    "deterministic",
    "implementation",
    "config",
)


def _check_options(options: dict[str, Any], known: tuple[str, ...]) -> None:
    for name in options:
        need(name in known, "options", name, f"one of {', '.join(known)}", TypeError)


def _arrays(query, key, value) -> tuple[jax.Array, jax.Array, jax.Array]:
    query, key, value = (
        as_array(name, x) for name, x in (("query", query), ("key", key), ("value", value))
    )
    need(query.ndim == 4, "query", query.shape, "[B, T, N, H]")
    return query, key, value


def _gathered(axis_name: AxisName):
    """A function that gathers `[B, T, ...]` of all devices along positions; None stays None."""
    gather = functools.partial(lax.all_gather, axis_name=axis_name, axis=1, tiled=True)
    return lambda x: None if x is None else gather(x)


def to_zigzag(x: jax.Array, devices: int, axis: int = 1) -> jax.Array:
    """Positions along an axis in zigzag order, in which equal parts have equal work when causal.

    Of 2n chunks, part i of n has the chunks i and 2n - 1 - i. Put the tokens (with their positions,
    targets and segment ids) in this order once, before they are sharded, and all layers of a model
    can stay in it.

    Args:
      x: any array, not yet sharded along the axis: there it would have to travel.
      devices: n, into which the axis will be sharded; 2n divides its length.
      axis: of positions.

    Returns:
      The same, reordered; `from_zigzag` gives x back.
    """
    x, axis, size = _checked_order(x, devices, axis)
    first, last = _halves(_split(x, axis, (2, devices, size)), axis)
    return jnp.stack([first, jnp.flip(last, axis)], axis + 1).reshape(x.shape)


def from_zigzag(x: jax.Array, devices: int, axis: int = 1) -> jax.Array:
    """Positions in their own order again, of an array that is not sharded; see `to_zigzag`."""
    x, axis, size = _checked_order(x, devices, axis)
    first, last = _halves(_split(x, axis, (devices, 2, size)), axis + 1)
    return jnp.concatenate([first, jnp.flip(last, axis)], axis).reshape(x.shape)


def _checked_order(x, devices: int, axis: int) -> tuple[jax.Array, int, int]:
    """Arguments of `to_zigzag`: x, which of its axes, and how many positions a chunk has."""
    x = as_array("x", x)
    for name, number in (("devices", devices), ("axis", axis)):
        is_integer = is_number(number, numbers.Integral)
        need(is_integer, name, repr(number), "an integer", TypeError)
    devices, axis = int(devices), int(axis)  # numpy's may be too short to be doubled
    need(devices >= 1, "devices", devices, "at least 1")
    need(-x.ndim <= axis < x.ndim, "axis", axis, f"one of the {x.ndim} axes of x")
    length = x.shape[axis]
    need(length % (2 * devices) == 0, "x", f"{length} positions", f"a multiple of {2 * devices}")
    return x, axis % x.ndim, length // (2 * devices)


def _split(x: jax.Array, axis: int, sizes: tuple[int, ...]) -> jax.Array:
    """x with an axis made into several."""
    return x.reshape(*x.shape[:axis], *sizes, *x.shape[axis + 1 :])


def _halves(x: jax.Array, axis: int) -> list[jax.Array]:
    """Both of an axis of 2."""
    return [lax.index_in_dim(x, index, axis, keepdims=False) for index in (0, 1)]


# --- one hop: the queries of a device and the keys of one -----------------------------------------


@dataclasses.dataclass(frozen=True)
class _Hop:
    """Attention of some parts of the queries to parts of the keys, all pairs of parts at once.

    Attributes:
      rows: queries of a part.
      cols: keys of a part.
      row_starts: first query of each pair.
      col_starts: first key of each pair.
      offset: `query_offset` of every pair, or a traced one for each, `[pairs]`.
      is_causal, window: whether the positions of a pair hide anything.
    """

    rows: int
    cols: int
    row_starts: tuple[int, ...]
    col_starts: tuple[int, ...]
    offset: Any = 0
    is_causal: bool = False
    window: tuple[int, int] | None = None

    def of_rows(self, x):
        """Rows of `[B, T, ...]` of all pairs: `[pairs * B, rows, ...]`."""
        return _parts(x, self.row_starts, self.rows)

    def of_cols(self, x):
        return _parts(x, self.col_starts, self.cols)


def _parts(x, starts: tuple[int, ...], size: int):
    return jnp.concatenate([lax.slice_in_dim(x, i, i + size, axis=1) for i in starts])


def _by_kind(arrays) -> list[list[int]]:
    """Indices of arrays `[count, ...]` which can be one along that axis but for their dtypes."""
    kinds: dict[Any, list[int]] = {}
    for index, x in enumerate(arrays):
        kind = x.shape[1:], jax.typeof(x).sharding, jnp.issubdtype(x.dtype, jnp.floating)
        kinds.setdefault(kind, []).append(index)
    return list(kinds.values())


def _stacked(key, value) -> tuple[jax.Array, ...]:
    """Both as one array `[2, B, S, K, H]`, or each as `[1, ...]` where they are of two kinds."""
    both = key[None], value[None]
    return (jnp.concatenate(both),) if len(_by_kind(both)) == 1 else both


def _unstacked(stacks) -> list[jax.Array]:
    return [x[index] for x in stacks for index in range(len(x))]


@dataclasses.dataclass(frozen=True)
class _Ring:
    """What of a ring attention is no array; see `ring_attention`."""

    axis_name: AxisName
    devices: int
    zigzag: bool
    is_causal: bool
    window: tuple[int, int] | None
    scale: float
    logits_soft_cap: float | None
    deterministic: bool
    implementation: str | None

    def shifts(self, T: int, S: int) -> list[int]:
        """How many devices before its own each hop's keys come from, hops of no use left out."""
        left, right = self._reach()
        here = np.arange(self.devices)
        needed = []
        for shift in range(self.devices):
            first_row = self._chunk_starts(here, T)[:, :, None]
            first_col = self._chunk_starts((here - shift) % self.devices, S)[:, None, :]
            last_row, last_col = first_row + self._chunk(T) - 1, first_col + self._chunk(S) - 1
            if ((first_col <= last_row + right) & (first_row - left <= last_col)).any():
                needed.append(shift)
        return needed or [0]

    def hops(self, shift: int, T: int, S: int) -> tuple[Any, list[_Hop]]:
        """Hops whose keys come from the device `shift` before; and the index of this device's own.

        Devices that have different ones have as much to do in each.
        """
        here = lax.axis_index(self.axis_name)
        whole = _Hop(T, S, (0,), (0,))
        if not self.is_causal and self.window is None:
            return 0, [whole]
        if shift == 0 and T == S and not (self.zigzag and self.window is not None):
            # Also in zigzag order: a device's own positions only ever increase.
            return 0, [dataclasses.replace(whole, is_causal=self.is_causal, window=self.window)]
        if self.zigzag and self.window is None and T == S:
            # Of a device before this one, both chunks see the earlier chunk. Of one behind, the
            # later chunk sees both.
            half = T // 2
            before, behind = _Hop(T, half, (0,), (0,)), _Hop(half, T, (half,), (0,))
            return jnp.where(here >= shift, 0, 1), [before, behind]
        rows, cols = self._chunk(T), self._chunk(S)
        first_rows = self._chunk_starts(here, T)
        first_cols = self._chunk_starts((here - shift) % self.devices, S)
        pairs = list(itertools.product(range(T // rows), range(S // cols)))
        of_pairs = _Hop(
            rows,
            cols,
            tuple(i * rows for i, _ in pairs),
            tuple(j * cols for _, j in pairs),
            offset=jnp.stack([first_rows[..., i] - first_cols[..., j] for i, j in pairs]),
            is_causal=self.is_causal,
            window=self.window,
        )
        return 0, [of_pairs]

    def call(self, hop: _Hop, query, query_ids, there) -> Call:
        """The attention of a hop, its pairs in the batch.

        Args:
          query_ids: a tuple of segment ids of queries, or of none.
          there: keys, values and, where queries have ids, ids of keys.
        """
        offset = hop.offset
        if not isinstance(offset, int):
            offset = jnp.repeat(offset, query.shape[0])
        key, value, *key_ids = there
        return _call(
            hop.of_rows(query),
            hop.of_cols(key),
            hop.of_cols(value),
            scale=self.scale,
            is_causal=hop.is_causal,
            local_window_size=hop.window,
            query_offset=offset,
            query_segment_ids=next(map(hop.of_rows, query_ids), None),
            key_value_segment_ids=next(map(hop.of_cols, key_ids), None),
            logits_soft_cap=self.logits_soft_cap,
            return_residual=True,
            deterministic=self.deterministic,
            implementation=self.implementation,
        )

    def sent(self, arrays, distance: int):
        """What the device `distance` before this one has of a tree of arrays `[count, ...]`.

        XLA lets one transfer be under way beside kernels. So arrays that differ in count and dtype
        alone travel as one, in the widest of the dtypes.
        """
        if distance % self.devices == 0:
            return arrays
        axis_name, place = _in_order_of_mesh(self.axis_name)
        pairs = list(zip(place, np.roll(place, -distance), strict=True))
        leaves, tree = jax.tree.flatten(arrays)
        for alike in _by_kind(leaves):
            parts = [leaves[index] for index in alike]
            dtype = max((x.dtype for x in parts), key=lambda dtype: dtype.itemsize)
            arrived = lax.ppermute(
                jnp.concatenate([x.astype(dtype) for x in parts]), axis_name, pairs
            )
            ends = itertools.accumulate(len(x) for x in parts[:-1])
            for index, x in zip(alike, jnp.split(arrived, list(ends)), strict=True):
                leaves[index] = x.astype(leaves[index].dtype)
        return jax.tree.unflatten(tree, leaves)

    def steps(self, T: int, S: int) -> list[tuple[int, int]]:
        """The shift of each hop, and how much further the keys of the next come from, 0 if none."""
        shifts = self.shifts(T, S)
        return list(zip(shifts, [*np.diff(shifts).tolist(), 0], strict=True))

    def of_hop(self, function, shift: int, query, there, *operands):
        """`function(hop, query, there, *operands)` of the hop that this device has."""
        which, hops = self.hops(shift, query.shape[1], there[0].shape[1])
        branches = [functools.partial(function, hop) for hop in hops]
        return lax.switch(which, branches, query, there, *operands)

    def _reach(self) -> tuple[float, float]:
        # Beyond any position, and within what numpy counts to.
        left, right = (min(side, 2**40) for side in self.window or (math.inf, math.inf))
        return left, min(right, 0) if self.is_causal else right

    def _chunk(self, length: int) -> int:
        return length // 2 if self.zigzag else length

    def _chunk_starts(self, device, length: int):
        """Position of the first row of each chunk of devices `[...]`: `[..., chunks]`."""
        if not self.zigzag:
            return (device * length)[..., None]
        first = device * (length // 2)
        last = (2 * self.devices - 1) * (length // 2) - first
        return (np if isinstance(device, np.ndarray) else jnp).stack([first, last], axis=-1)


# --- the ring -------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(ring: _Ring, query, key, value, ids):
    """Output `[B, T, N, h]` and LSE `[B, T, N]`; ids are those of queries and of keys, or none."""
    return _attend_forward(ring, query, key, value, ids)[0]


def _attend_forward(ring: _Ring, query, key, value, ids):
    steps = ring.steps(query.shape[1], key.shape[1])
    there = ring.sent(_own(key, value, ids), steps[0][0])
    results: Any = None
    for shift, further in steps:
        coming = ring.sent(there, further)
        forward = functools.partial(_forward_hop, ring, further == 0)
        results = ring.of_hop(forward, shift, query, _taken(there), ids[:1], results)
        # What arrives is sent on once this hop is done: one is here and one on its way.
        there, results = lax.optimization_barrier((coming, results))
    out, lse = named(*results)
    return (out, lse), (query, key, value, ids, out, lse)


def _own(key, value, ids):
    """This device's keys, values and ids of keys, as they travel."""
    return lax.optimization_barrier((*_stacked(key, value), *(x[None] for x in ids[1:])))


def _taken(there) -> list[jax.Array]:
    """Keys, values and ids that have travelled, in copies.

    They give the next transfer the time to begin. Attention takes all SMs: a transfer that begins
    after it waits for its end, and keeps SMs of the device that waits for the transfer.
    """
    return lax.optimization_barrier(_unstacked(there))


def _forward_hop(ring: _Ring, is_last: bool, hop: _Hop, query, there, query_ids, results):
    """Output and LSE over the keys of a hop and of those before it.

    Args:
      is_last: to round the output here spares a pass over it.
      results: over the keys of hops before, or None.
    """
    T = query.shape[1]
    call = ring.call(hop, query, query_ids, there)
    part_out, part_lse = dispatch.attention(call, ring.implementation)
    assert part_lse is not None  # as the call asks for it
    outs = _spread(part_out, hop.row_starts, T)
    lses = _spread(part_lse, hop.row_starts, T, elsewhere=-jnp.inf)
    out, lse = _merged(xla.joined, results, *zip(outs, lses, strict=True))
    return out.astype(query.dtype) if is_last else out, lse


def _attend_backward(ring: _Ring, residuals, cotangents):
    query, key, value, ids, out, lse = residuals
    # Else XLA may take the hops for those of the forward pass, and keep all keys from there on; or
    # send keys while that pass sends its own.
    key, value, *_ = lax.optimization_barrier((key, value, out, cotangents))
    steps = ring.steps(query.shape[1], key.shape[1])
    there = ring.sent(_own(key, value, ids), steps[0][0])
    before = steps[0][0]
    d_query: Any = None
    d_there: Any = None
    for shift, further in steps:
        # Gradients of a hop go after their keys while those of the next hop are made.
        if further == shift - before:
            coming, d_there = ring.sent((there, d_there), further)
        else:
            coming, d_there = ring.sent(there, further), ring.sent(d_there, shift - before)
        backward = functools.partial(_backward_hop, ring, further == 0)
        of_rows = out, lse, *cotangents
        d_query, d_part = ring.of_hop(
            backward, shift, query, _taken(there), ids[:1], of_rows, d_query
        )
        # Not in the hop, which would wait for what is on its way.
        d_part = _stacked(*d_part)
        d_there = [_sum(*both) for both in zip(d_there, d_part, strict=True)] if d_there else d_part
        if further == 0:
            d_there = [d.astype(query.dtype) for d in d_there]
        there, d_there, d_query = lax.optimization_barrier((coming, d_there, d_query))
        before = shift
    return d_query, *_unstacked(ring.sent(d_there, ring.devices - before)), None


def _backward_hop(ring: _Ring, is_last: bool, hop: _Hop, query, there, query_ids, of_rows, d_query):
    """Gradients: of the query by a hop and those before it; of keys and values by this hop.

    Args:
      is_last: as for `_forward_hop`.
      of_rows: output, LSE and their cotangents.
      d_query: by hops before, or None.
    """
    T, S = query.shape[1], there[0].shape[1]
    call = ring.call(hop, query, query_ids, there)
    d_rows, *d_cols = _part_gradients(call, ring.implementation, *map(hop.of_rows, of_rows))
    d_query = _merged(_sum, d_query, *_spread(d_rows, hop.row_starts, T))
    d_there = [_merged(_sum, None, *_spread(d, hop.col_starts, S)) for d in d_cols]
    return d_query.astype(query.dtype) if is_last else d_query, d_there


_attend.defvjp(_attend_forward, _attend_backward)


def _spread(parts, starts: tuple[int, ...], length: int, elsewhere: float = 0.0):
    """Of `[pairs * B, size, ...]` the part of each pair in `[B, length, ...]`, where it starts."""
    after = length - parts.shape[1]
    widths = [(0, 0)] * parts.ndim
    return [
        jnp.pad(part, [(0, 0), (start, after - start), *widths[2:]], constant_values=elsewhere)
        for start, part in zip(starts, jnp.split(parts, len(starts)), strict=True)
    ]


def _merged(merge, before, *parts):
    """`merge(before, *parts)`; without `before` where it is None, and one part alone as it is."""
    if before is not None:
        return merge(before, *parts)
    return merge(*parts) if len(parts) > 1 else parts[0]


def _sum(*parts):
    """In float32 at least."""
    dtype = accumulator(parts[0].dtype)
    return functools.reduce(jnp.add, [part.astype(dtype) for part in parts])


def _part_gradients(call: Call, implementation: str | None, out, lse, d_out, d_lse):
    """Gradients of query, key and value where the call has a part of the keys.

    Args:
      call: attention to the part.
      implementation: as for `jax_flash.attention`.
      out, lse, d_out, d_lse: results over all keys, and their cotangents.
    """
    chosen = dispatch.choose(call, implementation).implementation
    if chosen == "mosaic_gpu" and not call.is_empty:
        from jax_flash import autodiff  # where there is a kernel

        return autodiff.gradients(call, out, lse, d_out, d_lse)

    def attention(query, key, value):
        part = dataclasses.replace(call, query=query, key=key, value=value)
        return dispatch.attention(part, implementation)

    # out is the sum over parts of weight * part_out, and lse the logaddexp of their LSEs.
    (part_out, part_lse), vjp = jax.vjp(attention, call.query, call.key, call.value)
    weight = jnp.where(part_lse == -jnp.inf, 0.0, jnp.exp(part_lse - lse))
    d_part = weight[..., None] * d_out.astype(jnp.float32)
    d_part_lse = (d_part * (part_out.astype(jnp.float32) - out.astype(jnp.float32))).sum(-1)
    return vjp((d_part.astype(part_out.dtype), d_part_lse + weight * d_lse))


def _call(*args, **options) -> Call:
    """The checked form of a call of `jax_flash.attention`."""
    bound = inspect.signature(api.attention).bind(*args, **options)
    bound.apply_defaults()
    return checked(**bound.arguments)


def _in_order_of_mesh(axis_name: AxisName) -> tuple[AxisName, np.ndarray]:
    """The axes in the mesh's order, which ppermute needs, and the place there of each device."""
    if isinstance(axis_name, str):
        return axis_name, np.arange(lax.axis_size(axis_name))
    names = sorted(axis_name, key=jax.sharding.get_abstract_mesh().axis_names.index)
    places = np.arange(lax.axis_size(axis_name)).reshape([lax.axis_size(x) for x in names])
    return tuple(names), places.transpose([names.index(x) for x in axis_name]).ravel()


def _axis_size(axis_name: AxisName) -> int:
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    need(
        len(names) > 0 and all(isinstance(name, str) for name in names),
        "axis_name",
        repr(axis_name),
        "the name of a mesh axis, or a tuple of names",
        TypeError,
    )
    need(len(set(names)) == len(names), "axis_name", repr(axis_name), "each mesh axis once")
    try:
        return lax.axis_size(axis_name)
    except NameError as error:
        raise ValueError(
            f"axis_name: got {axis_name!r}; needs a mesh axis of a surrounding jax.shard_map."
        ) from error
