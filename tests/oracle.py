"""Attention and its gradients in float64 numpy, dense and obvious: what every test compares to.

Nothing of the library is used here. Dropout takes its keep mask as an argument for that reason.
"""

from typing import Any, NamedTuple

import numpy as np


class Gradients(NamedTuple):
    """Float64 gradients in the shapes of the arguments; None where there was no argument."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    bias: np.ndarray | None
    sinks: np.ndarray | None


def attention(query, key, value, bias=None, mask=None, **options):
    """Attention with the arguments of `jax_flash.attention`.

    Args:
      query: `[B, T, N, H]`, any dtype; 3D without B.
      key: `[B, S, K, H]`.
      value: `[B, S, K, h]`.
      bias: None or broadcastable to `[B, N, T, S]`.
      mask: None or bool, broadcastable to `[B, N, T, S]`.
      **options: scale, is_causal, query_seq_lengths, key_value_seq_lengths, local_window_size,
        query_segment_ids, key_value_segment_ids, query_offset, logits_soft_cap, sinks,
        dropout_rate, and dropout_keep: bool `[B, N, T, S]`, True where a weight is kept.

    Returns:
      out `[B, T, N, h]` and LSE `[B, T, N]`, float64; without B if query has none.
    """
    parts = _forward(query, key, value, bias, mask, **options)
    if np.ndim(query) == 3:
        return parts["out"][0], parts["lse"][0]
    return parts["out"], parts["lse"]


def gradients(query, key, value, bias=None, mask=None, *, dout, dlse=None, **options) -> Gradients:
    """Closed-form gradients of sum(out * dout) + sum(lse * dlse), empty rows left out.

    Args:
      query, key, value, bias, mask, **options: as for `attention`.
      dout: cotangent of out.
      dlse: cotangent of LSE, None for zero.
    """
    p = _forward(query, key, value, bias, mask, **options)
    dout = np.reshape(_f64(dout), p["out"].shape).transpose(0, 2, 1, 3)  # [B, N, T, h]
    dlse = np.zeros_like(p["lse"]) if dlse is None else np.reshape(_f64(dlse), p["lse"].shape)
    dlse = np.where(p["empty"][..., 0], 0.0, dlse.transpose(0, 2, 1))[..., None]  # [B, N, T, 1]

    dvalue = _transposed(p["weights"] * p["kept"]) @ dout
    dweights = dout @ _transposed(p["value"]) * p["kept"]
    delta = (p["weights"] * dweights).sum(-1, keepdims=True)
    dcapped = p["weights"] * (dweights - delta + dlse)
    dlogits = dcapped * p["slope"]
    dquery = p["scale"] * (dlogits @ p["key"])
    dkey = p["scale"] * (_transposed(dlogits) @ p["query"])
    dsinks = None
    if options.get("sinks") is not None:
        dsinks = (p["sink_weight"] * (dlse - delta)).sum((0, 2, 3))

    def ungrouped(x):  # [B, N, S, h] -> [B, S, K, h], summed over the query heads of a key head
        B, N, S, h = x.shape
        K = np.shape(key)[-2]
        return x.reshape(B, K, N // K, S, h).sum(2).transpose(0, 2, 1, 3)

    return Gradients(
        query=dquery.transpose(0, 2, 1, 3).reshape(np.shape(query)),
        key=ungrouped(dkey).reshape(np.shape(key)),
        value=ungrouped(dvalue).reshape(np.shape(value)),
        bias=None if bias is None else _sum_to(dlogits, np.shape(bias)),
        sinks=dsinks,
    )


def visibility(
    B,
    T,
    S,
    mask=None,
    *,
    is_causal=False,
    query_seq_lengths=None,
    key_value_seq_lengths=None,
    local_window_size=None,
    query_segment_ids=None,
    key_value_segment_ids=None,
    query_offset=0,
) -> np.ndarray:
    """What is visible, element by element: bool, broadcastable to `[B, N, T, S]`."""
    i = np.arange(T)[:, None]
    j = np.arange(S)[None, :]
    position = i + np.broadcast_to(np.asarray(query_offset, np.int64), (B,)).reshape(B, 1, 1, 1)
    visible = np.ones((B, 1, T, S), bool)
    if is_causal:
        visible &= j <= position
    if local_window_size is not None:
        window = local_window_size
        left, right = (window, window) if isinstance(window, int) else window
        visible &= (position - left <= j) & (j <= position + right)
    if query_seq_lengths is not None:
        visible &= i < np.reshape(query_seq_lengths, (B, 1, 1, 1))
    if key_value_seq_lengths is not None:
        visible &= j < np.reshape(key_value_seq_lengths, (B, 1, 1, 1))
    if query_segment_ids is not None:
        query_ids = np.reshape(query_segment_ids, (B, 1, T, 1))
        visible &= query_ids == np.reshape(key_value_segment_ids, (B, 1, 1, S))
    if mask is not None:
        visible = visible & np.asarray(mask)
    return visible


def _forward(
    query,
    key,
    value,
    bias,
    mask,
    *,
    scale=None,
    logits_soft_cap=None,
    sinks=None,
    dropout_rate=0.0,
    dropout_keep=None,
    score=None,
    **visibility_options,
) -> dict[str, Any]:
    query, key, value = (np.reshape(_f64(x), (-1, *np.shape(x)[-3:])) for x in (query, key, value))
    B, T, N, H = query.shape
    S, K = key.shape[1:3]
    query = query.transpose(0, 2, 1, 3)
    key, value = (x.transpose(0, 2, 1, 3).repeat(N // K, axis=1) for x in (key, value))
    scale = H**-0.5 if scale is None else float(scale)

    logits = scale * (query @ _transposed(key))
    if bias is not None:
        logits = logits + _f64(bias)
    slope = np.ones_like(logits)
    if score is not None:
        logits, slope = score(logits)
    if logits_soft_cap is not None:
        capped = np.tanh(logits / logits_soft_cap)
        logits, slope = logits_soft_cap * capped, slope * (1 - capped**2)
    logits = np.where(visibility(B, T, S, mask, **visibility_options), logits, -np.inf)

    top = logits.max(-1, keepdims=True, initial=-np.inf)
    empty = np.isneginf(top)
    if sinks is not None:
        top = np.maximum(top, _f64(sinks).reshape(N, 1, 1))
    top = np.where(empty, 0.0, top)
    exponentials = np.exp(logits - top)
    total = exponentials.sum(-1, keepdims=True)
    sink = 0.0
    if sinks is not None:
        logit = np.broadcast_to(_f64(sinks).reshape(N, 1, 1), top.shape)
        below = np.subtract(logit, top, out=np.zeros_like(top), where=logit < top)  # else infinite
        sink = np.where(empty, 0.0, np.exp(below))
        total = total + sink
    total = np.where(empty, 1.0, total)
    weights = exponentials / total
    lse = np.where(empty, -np.inf, top + np.log(total))
    kept = np.ones_like(weights)
    if dropout_rate > 0:
        kept = np.where(dropout_keep, 1 / (1 - dropout_rate), 0.0)
    out = (weights * kept) @ value
    return {
        "query": query,
        "key": key,
        "value": value,
        "scale": scale,
        "slope": slope,
        "empty": empty,
        "weights": weights,
        "sink_weight": sink / total,
        "kept": kept,
        "out": out.transpose(0, 2, 1, 3),
        "lse": lse[..., 0].transpose(0, 2, 1),
    }


def _f64(x) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def _transposed(x: np.ndarray) -> np.ndarray:
    return x.swapaxes(-1, -2)


def _sum_to(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Sums x over the axes along which `shape` was broadcast to x.shape."""
    x = x.sum(axis=tuple(range(x.ndim - len(shape))))
    axes = tuple(a for a, n in enumerate(shape) if n == 1)
    return x.sum(axis=axes, keepdims=True)
