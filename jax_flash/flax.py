"""Attention for Flax: `attention_fn=` of NNX's MultiHeadAttention and of Linen's.

    nnx.MultiHeadAttention(..., attention_fn=jax_flash.flax.attention_fn)

Linen has no `is_causal`: `functools.partial(attention_fn, is_causal=True)` stands for a mask there.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from jax_flash.api import attention


def attention_fn(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: DTypeLike | None = None,
    precision: Any = None,
    module: Any = None,
    promote_dtype: Any = None,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Any = None,
    qk_attn_weights_einsum: Any = None,
    attn_weights_value_einsum: Any = None,
    **options: Any,
) -> jax.Array:
    """`jax_flash.attention` with the arguments of Flax's `dot_product_attention`.

    A row whose mask hides all keys gives 0, and dropout is of every weight by itself, whether it is
    to be broadcast or not. Softmax and sums are in float32, whatever `precision` says. A mask has
    any dtype; what is not 0 is visible. `**options` are `is_causal` and others of `attention`.

    Raises:
      NotImplementedError: weights are to be sown (`module`), or products to be other einsums'.
    """
    del broadcast_dropout, precision, promote_dtype, force_fp32_for_softmax
    if module is not None:
        raise NotImplementedError("module: attention keeps no weights; needs sow_weights=False")
    if einsum_dot_general or qk_attn_weights_einsum or attn_weights_value_einsum:
        raise NotImplementedError("attention has products of its own: leave the einsums None")
    dtype = dtype or jnp.result_type(query, key, value)
    query, key, value = (jnp.asarray(x, dtype) for x in (query, key, value))
    mask = None if mask is None else jnp.asarray(mask) != 0
    if dropout_rate > 0.0 and not deterministic:
        options |= dict(dropout_rate=dropout_rate, dropout_key=dropout_rng)
    return attention(query, key, value, bias, mask, **options)
