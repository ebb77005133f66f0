"""Caches, pages and the exact result of decoding."""

import jax.numpy as jnp
import numpy as np

from tests import oracle


def inputs(B, T, S, N, K, H, dtype="float32", h=None, seed=0):
    """Query and caches, `[B, T, N, H]`, `[B, S, K, H]` and `[B, S, K, h]`."""
    rng = np.random.default_rng(seed)
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, h or H)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def paged(cache, page_size, seed=0, spare=3):
    """The same cache in shuffled pages, and its page table; pages in no use hold NaN."""
    B, S = cache.shape[:2]
    per_sequence = S // page_size
    order = np.random.default_rng(seed).permutation(B * per_sequence + spare)
    pages = jnp.full((len(order), page_size, *cache.shape[2:]), jnp.nan, cache.dtype)
    table = order[: B * per_sequence].reshape(B, per_sequence).astype(np.int32)
    whole = cache.reshape(B * per_sequence, page_size, *cache.shape[2:])
    return pages.at[table.ravel()].set(whole), table


def exact(query, key_cache, value_cache, lengths, *, local_window_size=None, **options):
    """Float64 output and LSE; what the caches hold beyond the lengths is not read."""
    lengths, T = np.asarray(lengths), query.shape[1]
    beyond = np.arange(key_cache.shape[1]) >= lengths[:, None]
    key, value = (
        np.where(beyond[..., None, None], 0.0, np.asarray(x, np.float64))
        for x in (key_cache, value_cache)
    )
    if local_window_size is not None:
        options["local_window_size"] = (local_window_size, 0)
    return oracle.attention(
        query,
        key,
        value,
        is_causal=True,
        query_offset=lengths - T,
        key_value_seq_lengths=lengths,
        **options,
    )


def float8(arrays, scales):
    """Caches divided by their scales, as float8, and what they stand for in float32."""
    query, *caches = arrays
    short = [
        (x / scale[:, None]).astype(jnp.float8_e4m3fn)
        for x, scale in zip(caches, scales, strict=True)
    ]
    long = [x.astype(jnp.float32) * s[:, None] for x, s in zip(short, scales, strict=True)]
    return [query, *short], [query, *long]


def written(cache, new, lengths, num_new=None):
    """What update_cache makes of a contiguous cache, token by token."""
    cache, T = np.array(cache), new.shape[1]
    for b in range(len(new)):
        count = T if num_new is None else min(max(num_new[b], 0), T)
        for t in range(count):
            position = max(lengths[b], 0) - count + t
            if 0 <= position < cache.shape[1]:
                cache[b, position] = new[b, t]
    return cache
