"""Bools as bits of int32 words, in plain JAX."""

import jax
import jax.numpy as jnp
from jax import lax

WORD = 32


def words(bits: jax.Array) -> jax.Array:
    """int32 `(..., words)` of bool `(..., 32 * words)`: bit j of a word is element j."""
    in_words = bits.reshape(*bits.shape[:-1], -1, WORD).astype(jnp.uint32)
    places = lax.broadcast_to_rank(jnp.arange(WORD, dtype=jnp.uint32), in_words.ndim)
    return lax.bitcast_convert_type((in_words << places).sum(-1, dtype=jnp.uint32), jnp.int32)
