"""decode_attention() and update_cache(): a few new tokens of each sequence against its cache.

The call and its checks, which implementation runs it, and the implementation in plain JAX. Splits
of the keys are combined by their LSE (flash decoding, `reference.py`).
"""

import dataclasses
import functools
import inspect
import logging
import math
from typing import Any, Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jax_flash import device, dispatch, xla
from jax_flash.arguments import as_soft_cap, as_window, explained, need_heads_that_fit
from jax_flash.call import Call, without_derivative
from jax_flash.checks import (
    as_array,
    as_int32,
    finite,
    is_name,
    need,
    need_count,
    need_flag,
    need_number_or_none,
)
from jax_flash.masks import Visibility
from jax_flash.sharding import by_device, mapped_zero_times, over_devices
from pallas_kernels.decode_config import MOST_SPLITS, WIDTHS, DecodeProblem, splits_for

QUERY_DTYPES = ("bfloat16", "float16", "float32")
FLOAT8 = "float8_e4m3fn"
IMPLEMENTATIONS = ("mosaic_gpu", "xla")  # fastest first

_SCALES = (1e-30, 1e4)
_SOFT_CAPS = (1e-3, 1e3)  # 1 - 2 / (1 + exp(2x)) is right to 1e-7 of the cap
_CHUNK = 4096  # keys that plain JAX reads at a time

# Of `sharding`: letters of the axes of each array of a call.
_LETTERS: dict[str, Any] = {
    "query": "b.n.",
    "key_cache": "b.k.",
    "value_cache": "b.k.",
    "lengths": "b",
    "page_table": "b.",
    "sinks": "n",
    "key_scale": "k",
    "value_scale": "k",
}


def _letters(page_table) -> dict[str, Any]:
    of_caches = {"key_cache": "..k.", "value_cache": "..k."}  # a page may be of any sequence
    return _LETTERS if page_table is None else _LETTERS | of_caches


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=list(_LETTERS),
    meta_fields=["scale", "window", "logits_soft_cap", "num_splits"],
)
@dataclasses.dataclass(frozen=True)
class DecodeCall:
    """Checked arguments of one decode_attention: a pytree, whose leaves are the arrays.

    Attributes:
      query: `[B, T, N, H]`, the last T tokens of each sequence.
      key_cache: `[B, S, K, H]`, or `[pages, page_size, K, H]` with a page_table.
      value_cache: `[B, S, K, h]`, or `[pages, page_size, K, h]`.
      lengths: `[B]` int32, tokens of each sequence, the new ones included.
      page_table: None or `[B, max_pages]` int32.
      scale: multiplies query.key.
      window: None, or how many keys before its own position a query sees.
      logits_soft_cap: None or a positive float.
      sinks: None or `[N]`.
      key_scale, value_scale: None or `[K]` float32, which keys and values are multiplied with.
      num_splits: None, or the parts that the kernel splits the keys of a sequence into.
    """

    query: jax.Array
    key_cache: jax.Array
    value_cache: jax.Array
    lengths: jax.Array
    page_table: jax.Array | None
    scale: float
    window: int | None
    logits_soft_cap: float | None
    sinks: jax.Array | None
    key_scale: jax.Array | None
    value_scale: jax.Array | None
    num_splits: int | None

    @property
    def is_empty(self) -> bool:
        """Whether there is no token, or no room for any key."""
        return 0 in (*self.query.shape, self.capacity)

    @property
    def is_symbolic(self) -> bool:
        """Whether a size is a symbol of `jax.export.symbolic_shape`."""
        return not all(isinstance(x, int) for x in (*self.query.shape, *self.value_cache.shape))

    @property
    def capacity(self) -> int:
        """S: tokens of a sequence that the cache has room for."""
        if self.page_table is None:
            return self.key_cache.shape[1]
        return self.page_table.shape[1] * self.key_cache.shape[1]


class DecodeOptions(TypedDict, total=False):
    """What `decode_attention` takes by name, but for return_residual: for type checkers alone."""

    page_table: ArrayLike | None
    scale: float | None
    local_window_size: int | tuple[int, int] | None
    logits_soft_cap: float | None
    sinks: ArrayLike | None
    num_splits: int | None
    key_scale: ArrayLike | None
    value_scale: ArrayLike | None
    implementation: str | None


@overload
def decode_attention(
    query: ArrayLike,
    key_cache: ArrayLike,
    value_cache: ArrayLike,
    lengths: ArrayLike,
    *,
    return_residual: Literal[False] = False,
    **options: Unpack[DecodeOptions],
) -> jax.Array: ...


@overload
def decode_attention(
    query: ArrayLike,
    key_cache: ArrayLike,
    value_cache: ArrayLike,
    lengths: ArrayLike,
    *,
    return_residual: Literal[True],
    **options: Unpack[DecodeOptions],
) -> tuple[jax.Array, jax.Array]: ...


@overload
def decode_attention(
    query: ArrayLike,
    key_cache: ArrayLike,
    value_cache: ArrayLike,
    lengths: ArrayLike,
    *,
    return_residual: bool,
    **options: Unpack[DecodeOptions],
) -> jax.Array | tuple[jax.Array, jax.Array]: ...


def decode_attention(
    query: ArrayLike,
    key_cache: ArrayLike,
    value_cache: ArrayLike,
    lengths: ArrayLike,
    *,
    page_table: ArrayLike | None = None,
    scale: float | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
    num_splits: int | None = None,
    key_scale: ArrayLike | None = None,
    value_scale: ArrayLike | None = None,
    return_residual: bool = False,
    implementation: str | None = None,
) -> Any:
    """Attention of the last T tokens of each sequence to all tokens in its cache.

    Token t of T stands at position p = lengths[b] - T + t, and sees the keys at positions j <= p,
    with a window those from p - left on, as far as the cache reaches. So the T tokens are causal
    among themselves; T is 1 in plain decoding, more in speculative decoding and chunked prefill.
    Where lengths[b] < T, the first tokens have negative positions: they do not exist. Such a token,
    and each of a sequence of length 0, has output 0 and LSE -inf.

    With `num_splits` set, what a sequence gets does not depend on the others in the batch, nor on
    how many they are, bit for bit: decoding is batch invariant.

    The cache holds the keys and values of the T tokens already: call `update_cache` before. What it
    holds from lengths[b] on, or before a window, does not matter, be it NaN. Lengths and page table
    may change from call to call of a compiled program. There is jit, vmap and export, but no
    derivative: NotImplementedError says so.

    Where tokens are padded on the right, num_new[b] of T being tokens, call with
    lengths + T - num_new: then row t stands where `update_cache(..., num_new=num_new)` puts it.
    Rows of padding get what means nothing, and what the cache holds at their positions must be
    finite, as zeros or an older token are.

    Products, soft cap, sinks and LSE are as in `jax_flash.attention`.

    Args:
      query: `[B, T, N, H]`; bfloat16, float16 or float32.
      key_cache: `[B, S, K, H]`, N a multiple of K; or, with a page table,
        `[pages, page_size, K, H]`, page_size a power of two from 16 on. Of the query's dtype, or
        float8_e4m3fn.
      value_cache: as key_cache, of the same dtype; its width h need not be H.
      lengths: integers `[B]`, tokens of each sequence, the T new ones included; 0 for none, which
        is what a negative one counts as.
      page_table: integers `[B, max_pages]`: token j of sequence b stands in page
        page_table[b, j // page_size] at j % page_size. Entries of pages that no token stands in may
        be anything.
      scale: a number; None is 1 / sqrt(H).
      local_window_size: how many keys before its own position a token sees, or (left, right), of
        which right, 0 or more, does not matter.
      logits_soft_cap: cap > 0: logits become cap * tanh(logits / cap).
      sinks: floating `[N]`: a logit per query head that takes weight but has no value.
      num_splits: parts that the kernel splits the keys of each sequence into, to be worked on at
        the same time; None for as many as fill the GPU, which depends on the batch. "xla" does
        without.
      key_scale: floating `[K]`: keys are key_cache * key_scale; None for 1.
      value_scale: floating `[K]`, likewise.
      return_residual: also return the LSE.
      implementation: None for the fastest that can do the call on this device (`explain_decode`
        says which, and why not the kernel; so does the log "jax_flash" on a Hopper GPU), or
          "mosaic_gpu", a Pallas kernel for Hopper GPUs (H100, H200), or
          "xla", plain JAX, on any device.

    Returns:
      The output `[B, T, N, h]` in the query's dtype; with `return_residual`, (output, LSE): LSE
      `[B, T, N]` float32 is the natural log of the softmax denominator, sinks included.

    Raises:
      TypeError: an argument is of the wrong type or dtype.
      ValueError: an argument has the wrong shape or value, or does not go with another.
      NotImplementedError: the implementation that was asked for cannot do the call.

    Sources: Dao et al. 2023 (flash decoding); Kwon et al. 2023 (paged caches).
    """
    call = _checked(**locals())
    out, lse = _attend(_choose(call, implementation).implementation, call)
    return (out, lse) if return_residual else out


@functools.wraps(decode_attention, assigned=(), updated=())  # the signature alone
def explain_decode(*args, **kwargs) -> dispatch.Explanation:
    """Says which implementation `decode_attention` would run with the same arguments, and why.

    With a `jax.ShapeDtypeStruct` for each array and implementation="mosaic_gpu" it answers on any
    machine whether the kernel can do the call on a Hopper GPU: it raises what `decode_attention`
    would raise there.

    Args:
      *args, **kwargs: as for `decode_attention`; any array may be a `jax.ShapeDtypeStruct`.

    Returns:
      An `Explanation`: its `implementation`, and `reasons`, which say why the kernel was passed
      over, if it was. It prints as text. On a Hopper GPU the log "jax_flash" has it too.

    Raises:
      Whatever `decode_attention` raises before it computes anything.
    """

    def choose(**arguments):
        return _choose(_checked(**arguments), arguments["implementation"])

    return explained(inspect.signature(decode_attention), choose, args, kwargs)


@without_derivative(
    "decode_attention has no derivative: jax_flash.attention has one.", static_argnums=(0,)
)
def _attend(implementation: str, call: DecodeCall) -> tuple[jax.Array, jax.Array]:
    """Output and LSE, by the implementation of that name."""
    if call.is_empty:
        return _nothing(call, call.query.dtype)
    letters = dataclasses.replace(call, **_letters(call.page_table))
    results = "b.n.", "b.n"
    is_plain = implementation == "xla"
    return by_device(_attend_part, implementation, call, letters, results, plain=is_plain)


@functools.partial(jax.jit, static_argnums=0)  # so that calls outside of jit compile once
def _attend_part(implementation: str, call: DecodeCall, origin) -> tuple[jax.Array, jax.Array]:
    """What `_attend` gives, of what one device has."""
    del origin
    return _on_kernel(call) if implementation == "mosaic_gpu" else _plain(call)


def _checked(
    *,
    query,
    key_cache,
    value_cache,
    lengths,
    page_table,
    scale,
    local_window_size,
    logits_soft_cap,
    sinks,
    num_splits,
    key_scale,
    value_scale,
    return_residual,
    implementation,
) -> DecodeCall:
    """Checks the arguments of `decode_attention`, described there."""
    need(
        implementation is None or is_name(implementation, IMPLEMENTATIONS),
        "implementation",
        repr(implementation),
        f"None or one of {', '.join(IMPLEMENTATIONS)}",
    )
    need_flag("return_residual", return_residual)
    query = as_array("query", query)
    dtype = query.dtype
    need(dtype.name in QUERY_DTYPES, "query", dtype, f"one of {', '.join(QUERY_DTYPES)}", TypeError)
    need(query.ndim == 4, "query", query.shape, "[B, T, N, H]")
    B, _, N, H = query.shape
    need(H > 0, "query", f"head width {H}", "at least 1")
    key_cache, value_cache, page_table = _checked_cache(key_cache, value_cache, page_table, B)
    dtypes = (dtype.name, FLOAT8)
    needs = f"query's, {dtype}, or {FLOAT8}"
    need(key_cache.dtype.name in dtypes, "key_cache", key_cache.dtype, needs, TypeError)
    K = key_cache.shape[2]
    need(key_cache.shape[3] == H, "key_cache", f"width {key_cache.shape[3]}", f"query's, {H}")
    need_heads_that_fit(query, key_cache)
    need_number_or_none("scale", scale)
    is_known = isinstance(H, int) or scale is not None
    need(is_known, "scale", f"None for a symbolic head width, {H}", "a number there")
    if num_splits is not None:
        need_count("num_splits", num_splits, least=1)
    return DecodeCall(
        query=query,
        key_cache=key_cache,
        value_cache=value_cache,
        lengths=_per_sequence("lengths", lengths, B),
        page_table=page_table,
        scale=1 / math.sqrt(H) if scale is None else finite("scale", scale, np.float32),
        window=None if local_window_size is None else as_window(local_window_size)[0],
        logits_soft_cap=as_soft_cap(logits_soft_cap),
        sinks=_per_head("sinks", sinks, N),
        key_scale=_per_head("key_scale", key_scale, K),
        value_scale=_per_head("value_scale", value_scale, K),
        num_splits=None if num_splits is None else int(num_splits),
    )


def update_cache(
    key_cache: ArrayLike,
    value_cache: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    lengths: ArrayLike,
    page_table: ArrayLike | None = None,
    *,
    num_new: ArrayLike | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Writes the new tokens of each sequence, its last ones, into its cache.

    Token t goes to position lengths[b] - T + t. Where fewer than T are new, `num_new` says how
    many: they are the first rows of key and value, padded on the right, and token t goes to
    position lengths[b] - num_new[b] + t. A token whose position is negative, or beyond the cache,
    or in a page that is none, is not written, nor is a row of padding; nothing else changes. Under
    jit with the caches donated (`donate_argnums=(0, 1)`) it happens in place.

    Args:
      key_cache: `[B, S, K, H]`, or `[pages, page_size, K, H]` with a page table; see
        `decode_attention`.
      value_cache: `[B, S, K, h]`, or `[pages, page_size, K, h]`.
      key: `[B, T, K, H]`, in the dtype of the caches: float8 keys come divided by their scale.
      value: `[B, T, K, h]`.
      lengths: integers `[B]`, tokens of each sequence, the new ones included and padding not; 0 for
        none, which is what a negative one counts as.
      page_table: integers `[B, max_pages]`. Two sequences may share pages that none of the new
        tokens goes to. A token whose entry is negative, or no page of the cache, is not written.
      num_new: integers `[B]`: rows 0 to num_new[b] - 1 of key and value are tokens, the others
        padding. None for T, which is what more counts as; 0 for none, as a negative one.

    Returns:
      Both caches.

    Raises:
      TypeError: an argument is of the wrong type or dtype.
      ValueError: an argument has the wrong shape, or does not go with another.
    """
    key, value = as_array("key", key), as_array("value", value)
    need(key.ndim == 4, "key", key.shape, "[B, T, K, H]")
    B, T = key.shape[:2]
    key_cache, value_cache, page_table = _checked_cache(key_cache, value_cache, page_table, B)
    for name, new, cache in (("key", key, key_cache), ("value", value, value_cache)):
        needs = (B, T, *cache.shape[2:])
        need(new.shape == needs, name, f"shape {new.shape}", f"{needs}")
        need(new.dtype == cache.dtype, name, new.dtype, f"the caches' {cache.dtype}", TypeError)
    lengths = _per_sequence("lengths", lengths, B)
    if num_new is not None:
        num_new = _per_sequence("num_new", num_new, B)
    if 0 in (*key.shape, *key_cache.shape) or (page_table is not None and page_table.size == 0):
        return key_cache, value_cache
    arrays = (key_cache, value_cache), (key, value), lengths, page_table, num_new
    # Heads of caches and of tokens go together. Every device has all pages: it needs all tokens.
    caches, tokens, entries = ("b.n.", "b.n.", "b") if page_table is None else ("..n.", "*.n.", "*")
    letters = caches, tokens, entries, "*.", entries
    return by_device(_updated, None, arrays, letters, (caches, caches), plain=True)


@functools.partial(jax.jit, static_argnums=0)  # so that calls outside of jit compile once
def _updated(_, arrays, origin) -> tuple[jax.Array, jax.Array]:
    """What `update_cache` gives, of what one device has."""
    del origin
    (key_cache, value_cache), (key, value), lengths, page_table, num_new = arrays
    B, T = key.shape[:2]
    token = jnp.arange(T, dtype=jnp.int32)[None]
    count = T if num_new is None else jnp.clip(num_new, 0, T)[:, None]
    position = jnp.maximum(lengths, 0)[:, None] - count + token
    rows = key_cache.shape[1]
    exists = position >= 0
    if num_new is not None:
        exists &= token < count
    if page_table is None:
        entry, row = jnp.arange(B, dtype=jnp.int32)[:, None], position
    else:
        column = position // rows
        entry = jnp.take_along_axis(page_table, column, axis=1, mode="clip")
        row = position % rows
        exists &= (column < page_table.shape[1]) & (entry >= 0)
    # What is out of bounds is dropped, where a negative index would count from the end.
    row = jnp.where(exists, row, rows)
    return (
        key_cache.at[entry, row].set(key, mode="drop", unique_indices=True),
        value_cache.at[entry, row].set(value, mode="drop", unique_indices=True),
    )


def _checked_cache(
    key_cache, value_cache, page_table, B: int
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Caches and page table, of shapes that go together and with a batch of B."""
    key_cache, value_cache = as_array("key_cache", key_cache), as_array("value_cache", value_cache)
    needs = "[B, S, K, H]" if page_table is None else "[pages, page_size, K, H]"
    need(key_cache.ndim == 4, "key_cache", key_cache.shape, needs)
    need(
        value_cache.ndim == 4 and value_cache.shape[:3] == key_cache.shape[:3],
        "value_cache",
        value_cache.shape,
        f"({', '.join(map(str, key_cache.shape[:3]))}, h), as key_cache",
    )
    need(value_cache.shape[3] > 0, "value_cache", "head width 0", "at least 1")
    need(
        value_cache.dtype == key_cache.dtype,
        "value_cache",
        value_cache.dtype,
        f"that of key_cache, {key_cache.dtype}",
        TypeError,
    )
    if page_table is None:
        needs = f"{B}, that of the new tokens"
        need(key_cache.shape[0] == B, "key_cache", f"batch {key_cache.shape[0]}", needs)
        return key_cache, value_cache, None
    page_table = as_int32("page_table", page_table)
    need(
        page_table.ndim == 2 and page_table.shape[0] == B,
        "page_table",
        f"shape {page_table.shape}",
        f"({B}, max_pages)",
    )
    page_size = key_cache.shape[1]
    need(
        isinstance(page_size, int) and page_size >= 16 and page_size.bit_count() == 1,
        "key_cache",
        f"pages of {page_size} tokens",
        "a power of two from 16 on",
    )
    has_page = key_cache.shape[0] > 0 or page_table.size == 0
    need(has_page, "key_cache", "no page", "at least one, as page_table has entries")
    return key_cache, value_cache, page_table


def _per_sequence(name: str, x, B: int) -> jax.Array:
    x = as_int32(name, x)
    need(x.shape == (B,), name, f"shape {x.shape}", f"{(B,)}")
    return x


def _per_head(name: str, x, heads: int) -> jax.Array | None:
    """None, or `[heads]` float32."""
    if x is None:
        return None
    x = as_array(name, x)
    need(jnp.issubdtype(x.dtype, jnp.floating), name, x.dtype, "floating", TypeError)
    need(x.shape == (heads,), name, f"shape {x.shape}", f"{(heads,)}")
    return x.astype(jnp.float32)


def _choose(call: DecodeCall, implementation: str | None) -> dispatch.Explanation:
    """The implementation that runs the call, as in `dispatch.choose`."""
    here = device.device_of(call.query)
    unsupported = {"mosaic_gpu": _unsupported(call), "xla": None}
    if implementation is not None:
        return dispatch._named(implementation, here, unsupported[implementation])
    reason = dispatch._device_reason("mosaic_gpu", here) or unsupported["mosaic_gpu"]
    if reason is None:
        return dispatch.Explanation("mosaic_gpu", {})
    explanation = dispatch.Explanation("xla", {"mosaic_gpu": reason})
    if here.is_hopper:
        dispatch.log_choice(logging.WARNING, explanation)
    return explanation


# --- the kernel ----------------------------------------------------------------------------------


def _unsupported(call: DecodeCall) -> str | None:
    """Why the kernel cannot do this call, or None if it can; devices are dispatch's business."""
    if call.is_symbolic:
        return "symbolic sizes: the kernel is made for sizes that are known"
    width, value_width = call.query.shape[-1], call.value_cache.shape[-1]
    reasons = {
        f"dtype {call.query.dtype}: the kernel takes bfloat16 and float16": (
            call.query.dtype.name not in ("bfloat16", "float16")
        ),
        f"head width {width}: the kernel takes {', '.join(map(str, WIDTHS))}": (
            width not in WIDTHS
        ),
        f"value width {value_width} differs from query width {width}": value_width != width,
        # The exponent's multiplier is a float32, and tells which logit is the greatest.
        f"scale {call.scale} is not in {_SCALES}": not _SCALES[0] <= call.scale <= _SCALES[1],
        f"logits_soft_cap {call.logits_soft_cap} is not in {_SOFT_CAPS}": (
            call.logits_soft_cap is not None
            and not _SOFT_CAPS[0] <= call.logits_soft_cap <= _SOFT_CAPS[1]
        ),
        # The bytes between them are counted in 32 bits.
        "2^30 or more elements in the queries of a sequence": (
            math.prod(call.query.shape[1:]) >= 2**30
        ),
        f"num_splits {call.num_splits}: the kernel takes up to {MOST_SPLITS}": (
            (call.num_splits or 1) > MOST_SPLITS
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _on_kernel(call: DecodeCall) -> tuple[jax.Array, jax.Array]:
    """Runs a call that `_unsupported` has no reason against."""
    B, T, N, H = call.query.shape
    K = call.key_cache.shape[2]
    problem = DecodeProblem(
        batch=B,
        tokens=T,
        heads=N,
        kv_heads=K,
        width=H,
        dtype=np.dtype(call.query.dtype),
        cache_dtype=np.dtype(call.key_cache.dtype),
        capacity=call.capacity,
        page_size=None if call.page_table is None else call.key_cache.shape[1],
        scale=call.scale,
        window=None if call.window is None else min(call.window, 2**30),  # int32 takes no more
        soft_cap=call.logits_soft_cap,
    )
    caches = {"key_cache": call.key_cache, "value_cache": call.value_cache}
    of_entries = {"query": call.query, "lengths": call.lengths}
    shared: dict[str, Any] = {
        "sinks": call.sinks,
        "key_scale": call.key_scale,
        "value_scale": call.value_scale,
    }
    if call.page_table is None:
        of_entries |= caches
    else:
        of_entries["page_table"], shared = call.page_table, shared | caches
    run = _folding_vmap(functools.partial(_run, problem, call.num_splits))
    return run(of_entries, {name: x for name, x in shared.items() if x is not None})


def _run(problem: DecodeProblem, num_splits: int | None, of_entries, shared):
    """Output and LSE.

    Args:
      problem: of this call, but for batch and heads.
      num_splits: None for what fills the GPU.
      of_entries: arrays of `kernel.attention` that have a batch axis.
      shared: those that have none, None left out.
    """
    local = functools.partial(_local, problem, num_splits)
    known = _letters(of_entries.get("page_table"))
    letters = [{name: known[name] for name in arrays} for arrays in (of_entries, shared)]
    return over_devices(local, tuple(letters), ("b.n.", "b.n"))(of_entries, shared)


def _local(problem: DecodeProblem, num_splits: int | None, of_entries, shared):
    """What `_run` gives, of the batch entries and heads that one device has."""
    B, T, N, _ = of_entries["query"].shape
    K = (of_entries | shared)["key_cache"].shape[2]
    problem = dataclasses.replace(problem, batch=B, heads=N, kv_heads=K)
    splits = num_splits or splits_for(problem)

    from jax_flash.launch import launch  # where there is a kernel, as it imports much of JAX

    lse = jax.ShapeDtypeStruct((B, T, N), jnp.float32)
    return launch(_decode, (problem, splits), (of_entries["query"], lse), of_entries, shared)


def _decode(problem: DecodeProblem, splits: int, of_entries, shared):
    from pallas_kernels import decode as kernel  # of Pallas, which is slow to import

    return kernel.attention(**of_entries, **shared, problem=problem, splits=splits)


def _folding_vmap(run):
    """`run(of_entries, shared)` with a rule for vmap: the mapped axis becomes part of the batch.

    Where it maps what the batch shares, the calls run one after the other.
    """
    run = jax.custom_batching.custom_vmap(run)

    @run.def_vmap
    def _(axis_size, in_batched, of_entries, shared):
        mapped_entries, mapped_shared = in_batched
        mapped_out = (True, True)
        if axis_size == 0:  # no device has a batch to run a kernel on
            return mapped_zero_times(run, in_batched, (of_entries, shared)), mapped_out
        if any(mapped_shared.values()):
            leaves, tree = jax.tree.flatten((of_entries, shared))
            mapped = jax.tree.leaves(in_batched)

            def one(index):
                picked = [x[index] if m else x for x, m in zip(leaves, mapped, strict=True)]
                return run(*jax.tree.unflatten(tree, picked))

            return lax.map(one, jnp.arange(axis_size)), mapped_out

        def fold(x, is_mapped):
            x = x if is_mapped else jnp.broadcast_to(x, (axis_size, *x.shape))
            return x.reshape(axis_size * x.shape[1], *x.shape[2:])

        B = of_entries["lengths"].shape[-1]
        results = run(jax.tree.map(fold, of_entries, mapped_entries), shared)
        return tuple(x.reshape(axis_size, B, *x.shape[1:]) for x in results), mapped_out

    return run


# --- plain JAX -----------------------------------------------------------------------------------


def _plain(call: DecodeCall) -> tuple[jax.Array, jax.Array]:
    """Decode attention in plain JAX: a loop over the chunks of the cache that any token sees.

    Each chunk is attention of its own, in float32, and joins the others by its LSE.
    """
    T, S = call.query.shape[1], call.capacity
    lengths = jnp.maximum(call.lengths, 0)  # of which positions can be subtracted
    chunk = max(_CHUNK, 0 if call.page_table is None else call.key_cache.shape[1])
    chunk = min(S, chunk) if isinstance(S, int) else S  # not a symbol of jax.export

    def step(index, carry):
        wanted = index * chunk
        start = jnp.minimum(wanted, S - chunk)  # the last chunk begins early rather than be ragged
        fresh = start + jnp.arange(chunk, dtype=jnp.int32) >= wanted
        part = xla.attention(
            Call(
                query=call.query.astype(jnp.float32),
                key=_read(call, call.key_cache, call.key_scale, start, chunk),
                value=_read(call, call.value_cache, call.value_scale, start, chunk),
                visibility=Visibility(
                    is_causal=True,
                    window=None if call.window is None else (call.window, 0),
                    query_offset=lengths - T - start,
                    key_value_seq_lengths=lengths - start,
                    mask=fresh.reshape(1, 1, 1, chunk),
                ),
                scale=call.scale,
                logits_soft_cap=call.logits_soft_cap,
            )
        )
        return xla.joined(carry, part)

    first, end = jnp.int32(0), jnp.minimum(lengths.max(), S)
    if call.window is not None:
        first = jnp.clip(lengths.min() - T - min(call.window, 2**30), 0, S) // chunk
    nothing = _nothing(call, jnp.float32)
    out, lse = lax.fori_loop(first, (end + chunk - 1) // chunk, step, nothing)
    if call.sinks is not None:
        out, lse = xla.with_sinks(out, lse, call.sinks)
    return out.astype(call.query.dtype), lse


def _nothing(call: DecodeCall, dtype) -> tuple[jax.Array, jax.Array]:
    """Output and LSE where no token sees a key."""
    return xla.nothing_visible(call.query, call.value_cache.shape[3], dtype, call)


def _read(call: DecodeCall, cache, scale, start, size: int) -> jax.Array:
    """Tokens start to start + size of each sequence, `[B, size, K, H]` float32."""
    if call.page_table is None:
        rows = lax.dynamic_slice_in_dim(cache, start, size, axis=1)
    else:
        page_size = cache.shape[1]
        pages = lax.dynamic_slice_in_dim(
            call.page_table, start // page_size, size // page_size, axis=1
        )
        rows = jnp.take(cache, pages, axis=0, mode="clip")
        rows = rows.reshape(pages.shape[0], size, *cache.shape[2:])
    rows = rows.astype(jnp.float32)
    return rows if scale is None else rows * scale.reshape(1, 1, -1, 1)
