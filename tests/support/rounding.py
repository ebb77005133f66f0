"""How far a result in a short float type may be from the exact one."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np


def assert_as_accurate_as_plain(actual, plain, exact, name: str, more: float = 0.0) -> None:
    """Checks max|actual - exact| <= 2 * max|plain - exact| + a rounding.

    The rule of FlashAttention's own tests: `plain` is textbook attention computed in the dtype of
    `actual`. The rounding is what storing the largest value costs, for results that plain attention
    happens to get exactly; `more` is what else plain attention does not round.
    """
    actual, plain, exact = (np.asarray(x, np.float64) for x in (actual, plain, exact))
    assert actual.shape == exact.shape, f"{name}: {actual.shape} is not {exact.shape}"
    assert np.isfinite(actual).all(), f"{name}: not finite"
    if not exact.size:
        return
    error, plain_error = np.abs(actual - exact).max(), np.abs(plain - exact).max()
    rounding = 2.0**-9 * np.abs(exact).max() + 2.0**-16 + more
    assert error <= 2 * plain_error + rounding, f"{name}: {error} beside {plain_error} of plain"


def plain_attention(
    query,
    key,
    value,
    seen,
    sinks: jax.Array | None = None,
    bias: jax.Array | None = None,
    logits_soft_cap: float | None = None,
    dropout: np.ndarray | float = 1.0,
    score_mod: Callable | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Textbook attention with every product and the weights in the dtype of the inputs.

    Args:
      query, key, value: `[B, T, N, H]`, `[B, S, K, H]` and `[B, S, K, h]`.
      seen: bool, broadcastable to `[B, N, T, S]`.
      sinks: None or `[N]`.
      bias: None, or broadcastable to `[B, N, T, S]`.
      logits_soft_cap: None, or what limits logits with their bias.
      dropout: what weights are multiplied with, `[B, N, T, S]` or 1.
      score_mod: None, or what is made of logits with their bias and of indices.

    Returns:
      Output `[B, T, N, h]` and LSE `[B, T, N]` float32, finite where nothing is seen.
    """
    group = query.shape[2] // key.shape[2]
    key, value = jnp.repeat(key, group, axis=2), jnp.repeat(value, group, axis=2)
    logits = jnp.einsum("btnh,bsnh->bnts", query, key) / np.sqrt(query.shape[-1])
    logits = logits.astype(jnp.float32)
    if bias is not None:
        logits = logits + bias.astype(jnp.float32)
    if score_mod is not None:
        indices = (jnp.asarray(x, jnp.int32) for x in np.ix_(*map(range, logits.shape)))
        logits = jnp.broadcast_to(score_mod(logits, *indices), logits.shape)
        logits = jnp.maximum(logits, -1e30)  # where all are hidden too
    if logits_soft_cap is not None:
        logits = logits_soft_cap * jnp.tanh(logits / logits_soft_cap)
    logits = jnp.where(seen, logits, -1e30)
    if sinks is not None:
        sinks = jnp.broadcast_to(sinks[:, None, None], (*logits.shape[:-1], 1))
        logits = jnp.concatenate([logits, sinks], axis=-1)
    weights = jax.nn.softmax(logits, axis=-1)[..., : key.shape[1]]
    weights = jnp.where(seen, weights * dropout, 0.0).astype(query.dtype)
    lse = jax.nn.logsumexp(logits, axis=-1).transpose(0, 2, 1)
    return jnp.einsum("bnts,bsnh->btnh", weights, value), lse
