"""Calls of the decoding kernel, and what they are checked against."""

import functools

import jax.numpy as jnp
import numpy as np

import jax_flash
from tests.support.decoding import exact, float8, inputs, paged

attention = functools.partial(jax_flash.decode_attention, implementation="mosaic_gpu")


# Relative to attention of |values|: rounding of the weights, and of the result.
ROUNDING = {"bfloat16": 2.0**-7, "float16": 2.0**-10}


SCALES = np.array([[0.02, 0.015], [0.1, 3.0]], np.float32)  # of keys and of values


def check(arrays, lengths, *, page_size=None, num_splits=None, scales=None, **options):
    """Compares with float64; what the caches hold out of sight is NaN.

    Args:
      arrays: query and caches, contiguous.
      lengths: of the sequences.
      page_size: None, or of the pages that the caches are cut into.
      num_splits: as for `jax_flash.decode_attention`.
      scales: None, or `[2, K]` of keys and values, for float8 caches.
      **options: likewise.
    """
    query, *caches = arrays
    (B, T), S = query.shape[:2], caches[0].shape[1]
    lengths = np.asarray(lengths)
    key, value = caches
    if scales is not None:
        (_, *caches), (_, key, value) = float8(arrays, scales)
    exact_out, exact_lse = exact(query, key, value, lengths, **options)
    bound, _ = exact(query, key, abs(value), lengths, **options)
    if scales is not None:
        options |= {"key_scale": scales[0], "value_scale": scales[1]}

    first = np.maximum(lengths - T - options.get("local_window_size", S), 0)
    key = np.arange(S)
    unseen = (key < first[:, None]) | (key >= lengths[:, None])
    caches = [jnp.where(unseen[..., None, None], jnp.nan, x) for x in caches]
    if page_size is not None:
        (key_cache, table), (value_cache, _) = (paged(x, page_size) for x in caches)
        caches = key_cache, value_cache
        in_use = ~unseen.reshape(B, -1, page_size).all(2)
        options["page_table"] = np.where(in_use, table, 10**6)
    out, lse = attention(
        query,
        *caches,
        lengths.astype(np.int32),
        num_splits=num_splits,
        return_residual=True,
        **options,
    )
    assert out.dtype == query.dtype
    error = np.abs(np.asarray(out, np.float64) - exact_out)
    allowed = ROUNDING[query.dtype.name] * bound + 1e-30
    assert (error <= allowed).all(), (error / allowed).max()
    # Float8 products add up 14 bits on a GPU, and queries in float16 lose two.
    np.testing.assert_allclose(lse, exact_lse, atol=1e-4 if scales is None else 2e-3, rtol=1e-5)


def check_float8_queries_of_any_size(H):
    """Which e4m3 could not hold: they take part in products of e4m3."""
    query, key, value = inputs(2, 2, 256, 4, 4, H, "bfloat16")
    sizes = np.array([2.0**-60, 2.0**103, 1.0, 2.0**-20], np.float32)
    query = (query * sizes[:, None]).astype(query.dtype)
    key = (key / sizes[:, None]).astype(key.dtype)
    scales = np.stack([SCALES[0, 0] / sizes, np.full(4, SCALES[1, 0])]).astype(np.float32)
    check((query, key, value), [70, 231], scales=scales)


def relative_error_of_float8(H, S, lengths, outlier=1.0, favourite=0.0, mean=0.0):
    """Root mean square of the error over that of the output, with float8 caches.

    Args:
      H: width.
      S: length of the caches.
      lengths: of the sequences.
      outlier: what one element in 16 of a query is multiplied with, and divided by for keys.
      favourite: by how much the logit of the first key is above the others; its value is the mean.
      mean: of values.
    """
    query, key, value = (np.array(x) for x in inputs(len(lengths), 3, S, 4, 2, H))
    sizes = np.where(np.arange(H) % 16 == 5, outlier, 1.0)
    first = np.where(np.arange(H) % 3 == 1, 1.0, -1.0)
    query += favourite / np.sqrt(H) * first
    key[:, 0], value[:, 0] = first, 0.0
    arrays = [jnp.asarray(x, jnp.bfloat16) for x in (query * sizes, key / sizes, value + mean)]
    scales = np.array([[0.03, 0.02], [0.1, 0.15]], np.float32)
    (_, *caches), (_, key, value) = float8(arrays, scales)
    expected, _ = exact(arrays[0], key, value, lengths)
    out = attention(
        arrays[0], *caches, jnp.asarray(lengths), key_scale=scales[0], value_scale=scales[1]
    )
    error = np.asarray(out, np.float64) - expected
    return np.sqrt((error**2).mean() / (expected**2).mean())
