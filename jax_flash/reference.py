"""The algorithms that this library descends from, written to be read, not to be fast.

Each function is one head of attention in the order of its source: loops over tiles are Python
loops, arrays that a source keeps in the GPU's main memory (HBM) are updated with `.at[].set`.
They are checked against each other and against NumPy by tests/test_reference.py.

Shapes: query `[T, H]`, key `[S, H]`, value `[S, h]`; `jax.vmap` adds heads and batch. Products and
statistics are float32, or float64 where the inputs are; so are the results. `scale` is
1 / sqrt(H) unless given.

Masking and dropout are functions of positions, as a tiled algorithm needs them: called with rows
`[R, 1]` and columns `[1, C]` they return a boolean `[R, C]`. `visible` says which key a query may
see; `keep` says which attention weights survive dropout. A dense mask is `lambda i, j: mask[i, j]`,
a causal one `lambda i, j: j <= i`.

A row that sees no key has output 0 and log-sum-exp (LSE) -inf.

Sources:
  Milakov & Gimelshein 2018: Online normalizer calculation for softmax, arXiv:1805.02867.
  Dao et al. 2022: FlashAttention: Fast and memory-efficient exact attention with IO-awareness,
    arXiv:2205.14135.
  Dao 2023: FlashAttention-2: Faster attention with better parallelism and work partitioning,
    arXiv:2307.08691.
  Dao, Haziza, Massa & Sizov 2023: Flash-Decoding for long-context inference,
    https://crfm.stanford.edu/2023/10/12/flashdecoding.html
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

Pairs = Callable[[jax.Array, jax.Array], jax.Array]

# A GPU's default for float32 products is TF32, too coarse to be a reference.
_matmul = functools.partial(jnp.matmul, precision="highest")


def naive(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    scale: float | None = None,
    visible: Pairs | None = None,
    keep: Pairs | None = None,
    dropout_rate: float = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """O = dropout(softmax(scale * Q K')) V, with all of the `[T, S]` weights in memory.

    Dao et al. 2022, Algorithm 0 (Section 2.2) with the scale, mask and dropout of Appendix B.3.

    Args:
      query: `[T, H]`.
      key: `[S, H]`.
      value: `[S, h]`.
      scale: multiplies the logits.
      visible: which pairs take part.
      keep: which weights dropout keeps.
      dropout_rate: the probability of being dropped that `keep` was drawn with.

    Returns:
      Output `[T, h]` and LSE `[T]`.
    """
    query, key, value = _promote(query, key, value)
    logits = _logits(query, key, _scale(scale, query), visible)
    # The maximum cancels in the result, so it is a constant to differentiation.
    m = jax.lax.stop_gradient(_row_max(logits))
    weights = _exp(logits, m[:, None])
    l = jnp.sum(weights, axis=-1)
    weights = _dropout(weights / _nonzero(l)[:, None], keep, dropout_rate)
    return _matmul(weights, value), _lse(m, l)


def online_softmax(logits: jax.Array) -> jax.Array:
    """Softmax whose maximum and normaliser come from a single pass.

    Milakov & Gimelshein 2018, Algorithm 3 (safe softmax with online normaliser calculation).

    Args:
      logits: `[V]`, -inf allowed.

    Returns:
      `[V]`: exp(logits) / sum(exp(logits)), or 0 if every logit is -inf.
    """
    (logits,) = _promote(logits)

    def step(carry, x):
        m, d = carry
        m_new = jnp.maximum(m, x)
        return (m_new, d * _exp(m, m_new) + _exp(x, m_new)), None

    start = jnp.array(-jnp.inf, logits.dtype), jnp.array(0, logits.dtype)
    (m, d), _ = jax.lax.scan(step, start, logits)
    return _exp(logits, m) / _nonzero(d)


def online_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    scale: float | None = None,
    visible: Pairs | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention in one pass over the keys, one key at a time.

    The recurrence of Milakov & Gimelshein 2018, Algorithm 3, with the weighted sum of values
    carried along with the normaliser: both shrink by exp(m_old - m_new) when the maximum grows.

    Args:
      query: `[T, H]`.
      key: `[S, H]`.
      value: `[S, h]`.
      scale: multiplies the logits.
      visible: which pairs take part.

    Returns:
      Output `[T, h]` and LSE `[T]`.
    """
    query, key, value = _promote(query, key, value)
    scale = _scale(scale, query)
    rows, width = query.shape[0], value.shape[1]

    def step(carry, item):
        m, d, acc = carry
        j, key_j, value_j = item
        x = _logits(query, key_j[None], scale, visible, col=j)[:, 0]
        m_new = jnp.maximum(m, x)
        decay, weight = _exp(m, m_new), _exp(x, m_new)
        acc = acc * decay[:, None] + weight[:, None] * value_j
        return (m_new, d * decay + weight, acc), None

    start = (
        jnp.full(rows, -jnp.inf, query.dtype),
        jnp.zeros(rows, query.dtype),
        jnp.zeros((rows, width), query.dtype),
    )
    (m, d, acc), _ = jax.lax.scan(step, start, (jnp.arange(key.shape[0]), key, value))
    return acc / _nonzero(d)[:, None], _lse(m, d)


def flash_block_sizes(memory: int, width: int) -> tuple[int, int]:
    """Rows and keys of a tile such that the tiles of Q, K, V and O fill the on-chip memory.

    Dao et al. 2022, Algorithm 1, line 1: Bc = ceil(M / 4d), Br = min(Bc, d). Keeping Br at most d
    also makes the `[Br, Bc]` logits fit.

    Args:
      memory: M, how many numbers (not bytes) the on-chip memory holds.
      width: d, the head width.

    Returns:
      (Br, Bc): query rows and keys of a tile.
    """
    block_kv = math.ceil(memory / (4 * width))
    return min(block_kv, width), block_kv


def flash_algorithm_1(
    query: jax.Array, key: jax.Array, value: jax.Array, *, memory: int
) -> jax.Array:
    """FlashAttention: key tiles outside, query tiles inside, O rewritten normalised every time.

    Dao et al. 2022, Algorithm 1 (Section 3.1): no scale, no mask.

    Args:
      query: `[T, H]`.
      key: `[S, H]`.
      value: `[S, h]`.
      memory: M, how many numbers the on-chip memory holds.

    Returns:
      Output `[T, h]` = softmax(Q K') V.
    """
    query, key, value = _promote(query, key, value)
    block_q, block_kv = flash_block_sizes(memory, query.shape[1])
    out = jnp.zeros((query.shape[0], value.shape[1]), query.dtype)
    l = jnp.zeros(query.shape[0], query.dtype)
    m = jnp.full(query.shape[0], -jnp.inf, query.dtype)

    for kv in _tiles(key.shape[0], block_kv):
        for q in _tiles(query.shape[0], block_q):
            logits = _matmul(query[q], key[kv].T)
            m_tile = _row_max(logits)
            weights = _exp(logits, m_tile[:, None])
            l_tile = jnp.sum(weights, axis=-1)

            m_new = jnp.maximum(m[q], m_tile)
            old, new = _exp(m[q], m_new), _exp(m_tile, m_new)
            l_new = old * l[q] + new * l_tile
            product = _matmul(weights, value[kv])
            rescaled = (l[q] * old)[:, None] * out[q] + new[:, None] * product
            out = out.at[q].set(rescaled / _nonzero(l_new)[:, None])
            l = l.at[q].set(l_new)
            m = m.at[q].set(m_new)
    return out


def flash_algorithm_2(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    memory: int,
    scale: float | None = None,
    visible: Pairs | None = None,
    keep: Pairs | None = None,
    dropout_rate: float = 0.0,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """FlashAttention's full forward pass: Algorithm 1 with scale, mask and dropout.

    Dao et al. 2022, Algorithm 2 (Appendix B.3). Its tau is `scale`, its MASK is `visible`; its
    generator state R, from which the backward draws the same dropout again, is `keep`. Dropout
    changes O but not the statistics.

    Args:
      query: `[T, H]`.
      key: `[S, H]`.
      value: `[S, h]`.
      memory: M, how many numbers the on-chip memory holds.
      scale: multiplies the logits.
      visible: which pairs take part.
      keep: which weights dropout keeps.
      dropout_rate: the probability of being dropped that `keep` was drawn with.

    Returns:
      Output `[T, h]`, row sums l `[T]` and row maxima m `[T]`: LSE = m + log l.
    """
    query, key, value = _promote(query, key, value)
    scale = _scale(scale, query)
    block_q, block_kv = flash_block_sizes(memory, query.shape[1])
    out = jnp.zeros((query.shape[0], value.shape[1]), query.dtype)
    l = jnp.zeros(query.shape[0], query.dtype)
    m = jnp.full(query.shape[0], -jnp.inf, query.dtype)

    for kv in _tiles(key.shape[0], block_kv):
        for q in _tiles(query.shape[0], block_q):
            logits = _logits(query[q], key[kv], scale, visible, row=q.start, col=kv.start)
            m_tile = _row_max(logits)
            weights = _exp(logits, m_tile[:, None])
            l_tile = jnp.sum(weights, axis=-1)

            m_new = jnp.maximum(m[q], m_tile)
            old, new = _exp(m[q], m_new), _exp(m_tile, m_new)
            l_new = old * l[q] + new * l_tile
            weights = _dropout(weights, keep, dropout_rate, row=q.start, col=kv.start)
            product = _matmul(weights, value[kv])
            rescaled = (l[q] * old)[:, None] * out[q] + new[:, None] * product
            out = out.at[q].set(rescaled / _nonzero(l_new)[:, None])
            l = l.at[q].set(l_new)
            m = m.at[q].set(m_new)
    return out, l, m


def flash_algorithm_4(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    out: jax.Array,
    out_grad: jax.Array,
    l: jax.Array,
    m: jax.Array,
    *,
    memory: int,
    scale: float | None = None,
    visible: Pairs | None = None,
    keep: Pairs | None = None,
    dropout_rate: float = 0.0,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """FlashAttention's backward pass, which computes the weights again from l and m.

    Dao et al. 2022, Algorithm 4 (Appendix B.4).

    Args:
      query: `[T, H]`.
      key: `[S, H]`.
      value: `[S, h]`.
      out: `[T, h]`, with l and m as `flash_algorithm_2` returned them for the same options.
      out_grad: `[T, h]`, the gradient with respect to out.
      l: `[T]` row sums.
      m: `[T]` row maxima.
      memory: M, how many numbers the on-chip memory holds.
      scale: multiplies the logits.
      visible: which pairs take part.
      keep: which weights dropout keeps.
      dropout_rate: the probability of being dropped that `keep` was drawn with.

    Returns:
      Gradients with respect to query `[T, H]`, key `[S, H]` and value `[S, h]`.
    """
    query, key, value, out, out_grad = _promote(query, key, value, out, out_grad)
    scale = _scale(scale, query)
    block_q, block_kv = flash_block_sizes(memory, query.shape[1])
    query_grad, key_grad, value_grad = map(jnp.zeros_like, (query, key, value))

    for kv in _tiles(key.shape[0], block_kv):
        for q in _tiles(query.shape[0], block_q):
            logits = _logits(query[q], key[kv], scale, visible, row=q.start, col=kv.start)
            weights = _exp(logits, m[q][:, None]) / _nonzero(l[q])[:, None]
            drop = functools.partial(
                _dropout, keep=keep, rate=dropout_rate, row=q.start, col=kv.start
            )
            value_grad = value_grad.at[kv].add(_matmul(drop(weights).T, out_grad[q]))
            weights_grad = drop(_matmul(out_grad[q], value[kv].T))
            delta = jnp.sum(out_grad[q] * out[q], axis=-1)
            logits_grad = weights * (weights_grad - delta[:, None])
            query_grad = query_grad.at[q].add(scale * _matmul(logits_grad, key[kv]))
            key_grad = key_grad.at[kv].add(scale * _matmul(logits_grad.T, query[q]))
    return query_grad, key_grad, value_grad


def flash_attention_2(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    block_q: int,
    block_kv: int,
    scale: float | None = None,
    visible: Pairs | None = None,
) -> tuple[jax.Array, jax.Array]:
    """FlashAttention-2: query tiles outside, so that each is finished once and in parallel.

    Dao 2023, Algorithm 1 (Section 3.1.1). The accumulator stays unnormalised until the last key
    tile, and one number per row, the LSE m + log l, replaces l and m.

    Args:
      query: `[T, H]`.
      key: `[S, H]`.
      value: `[S, h]`.
      block_q: Br, query rows of a tile.
      block_kv: Bc, keys of a tile.
      scale: multiplies the logits.
      visible: which pairs take part.

    Returns:
      Output `[T, h]` and LSE `[T]`.
    """
    query, key, value = _promote(query, key, value)
    scale = _scale(scale, query)
    out = jnp.zeros((query.shape[0], value.shape[1]), query.dtype)
    lse = jnp.zeros(query.shape[0], query.dtype)

    for q in _tiles(query.shape[0], block_q):
        acc = jnp.zeros_like(out[q])
        l = jnp.zeros_like(lse[q])
        m = jnp.full_like(lse[q], -jnp.inf)
        for kv in _tiles(key.shape[0], block_kv):
            logits = _logits(query[q], key[kv], scale, visible, row=q.start, col=kv.start)
            m_new = jnp.maximum(m, _row_max(logits))
            weights = _exp(logits, m_new[:, None])
            decay = _exp(m, m_new)
            l = decay * l + jnp.sum(weights, axis=-1)
            acc = decay[:, None] * acc + _matmul(weights, value[kv])
            m = m_new
        out = out.at[q].set(acc / _nonzero(l)[:, None])
        lse = lse.at[q].set(_lse(m, l))
    return out, lse


def combine(outs: jax.Array, lses: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Attention over a set of keys from attention over its parts.

    Dao, Haziza, Massa & Sizov 2023, step 3: LSE = log sum_p exp(LSE_p),
    O = sum_p exp(LSE_p - LSE) O_p. A part that sees nothing (LSE -inf) has no weight.

    Args:
      outs: `[P, T, h]`, the output over each of P disjoint sets of keys.
      lses: `[P, T]`.

    Returns:
      Output `[T, h]` and LSE `[T]` over all keys.
    """
    m = jnp.max(lses, axis=0, initial=-jnp.inf)
    weights = _exp(lses, m)
    l = jnp.sum(weights, axis=0)
    out = jnp.sum((weights / _nonzero(l))[..., None] * outs, axis=0)
    return out, _lse(m, l)


def flash_decoding(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    splits: int,
    scale: float | None = None,
    visible: Pairs | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Keys split into parts that run in parallel, because one query alone cannot fill a GPU.

    Dao, Haziza, Massa & Sizov 2023: attention over each part with its LSE, then `combine`.

    Args:
      query: `[T, H]`, T usually 1.
      key: `[S, H]`, the cache.
      value: `[S, h]`.
      splits: how many parts, at least 1; the last ones may be shorter or empty.
      scale: multiplies the logits.
      visible: which pairs take part.

    Returns:
      Output `[T, h]` and LSE `[T]`.
    """
    size = math.ceil(key.shape[0] / splits)
    outs, lses = [], []
    for start in [part * size for part in range(splits)]:
        part = slice(start, start + size)
        in_part = None if visible is None else _shifted(visible, start)
        out, lse = naive(query, key[part], value[part], scale=scale, visible=in_part)
        outs.append(out)
        lses.append(lse)
    return combine(jnp.stack(outs), jnp.stack(lses))


def _promote(*arrays: jax.Array) -> list[jax.Array]:
    """The arrays in one dtype, float32 or wider."""
    dtype = jnp.result_type(jnp.float32, *arrays)
    return [jnp.asarray(array, dtype) for array in arrays]


def _scale(scale: float | None, query: jax.Array) -> float:
    return 1 / math.sqrt(query.shape[-1]) if scale is None else scale


def _tiles(length: int, size: int) -> list[slice]:
    """Consecutive slices of `size` that cover `length`; the last one may be shorter."""
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def _positions(shape: tuple[int, ...], row, col) -> tuple[jax.Array, jax.Array]:
    """Positions of the rows `[R, 1]` and columns `[1, C]` of a tile with its corner at row, col."""
    return row + jnp.arange(shape[0])[:, None], col + jnp.arange(shape[1])[None, :]


def _shifted(pairs: Pairs, start: int) -> Pairs:
    """`pairs` for an array of keys whose first one is key `start`."""
    return lambda i, j: pairs(i, j + start)


def _logits(query, key, scale, visible: Pairs | None, row=0, col=0) -> jax.Array:
    """MASK(scale * Q K') of one tile: -inf where a pair is not visible."""
    logits = scale * _matmul(query, key.T)
    if visible is None:
        return logits
    return jnp.where(visible(*_positions(logits.shape, row, col)), logits, -jnp.inf)


def _dropout(weights, keep: Pairs | None, rate: float, row=0, col=0) -> jax.Array:
    """What dropout leaves of one tile of weights, scaled up so that the mean stays the same."""
    if keep is None:
        return weights
    return jnp.where(keep(*_positions(weights.shape, row, col)), weights / (1 - rate), 0)


def _row_max(logits: jax.Array) -> jax.Array:
    """Maximum of each row `[R, C]` -> `[R]`, -inf where there are no columns."""
    return jnp.max(logits, axis=-1, initial=-jnp.inf)


def _exp(x: jax.Array, m: jax.Array) -> jax.Array:
    """exp(x - m) for x <= m, and 0, not NaN, where both are -inf: nothing seen so far."""
    return jnp.exp(x - jnp.where(m == -jnp.inf, 0, m))


def _nonzero(l: jax.Array) -> jax.Array:
    """A normaliser to divide by: 1 for rows that saw nothing, whose numerator is 0."""
    return jnp.where(l == 0, 1, l)


def _lse(m: jax.Array, l: jax.Array) -> jax.Array:
    return jnp.where(l == 0, -jnp.inf, m + jnp.log(_nonzero(l)))
