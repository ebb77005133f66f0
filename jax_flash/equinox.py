"""Attention for Equinox: `equinox.nn.MultiheadAttention`, with a cache to decode from."""

import equinox
import jax
import jax.numpy as jnp

from jax_flash.api import attention
from jax_flash.checks import need
from jax_flash.decode import decode_attention, update_cache


class MultiheadAttention(equinox.nn.MultiheadAttention):
    """Equinox's, with its fields, arguments and errors, on `jax_flash.attention`.

    `**rest` are `is_causal` and others of `attention`, in `decode` of `decode_attention`, but for
    `return_residual`. A row that sees no key gives 0; a key drops other weights than in Equinox.
    """

    def __call__(
        self, query, key_, value, mask=None, *, key=None, inference=None, process_heads=None, **rest
    ) -> jax.Array:
        old = rest.pop("deterministic", None)  # Equinox's name of inference before
        given = [x for x in (old, inference, self.dropout.inference) if x is not None]
        if not given[0] and self.dropout.p > 0:
            need(key is not None, "key", None, "a key for dropout, or inference=True", RuntimeError)
            rest |= dict(dropout_rate=self.dropout.p, dropout_key=key)
        if mask is not None:
            T, S, N = len(query), len(key_), self.num_heads
            need(mask.shape in ((T, S), (N, T, S)), "mask", mask.shape, f"{(T, S)} or {(N, T, S)}")
        q, k, v = self._heads((query, key_, value), process_heads)
        out = attention(q, k, v, mask=mask, **rest).reshape(len(q), -1)
        return jax.vmap(self.output_proj)(out)

    def init_cache(self, length: int, dtype=None) -> tuple[jax.Array, ...]:
        """Keys and values of `length` tokens, in the weights' dtype if None; how many have come."""
        dtype = self.key_proj.weight.dtype if dtype is None else dtype
        rows = [jnp.zeros((length, self.num_heads, x), dtype) for x in (self.qk_size, self.vo_size)]
        return *rows, jnp.int32(0)

    def decode(self, x, cache, *, process_heads=None, **rest) -> tuple[jax.Array, tuple]:
        """Output of the next tokens `[T, size]`, query, key and value alike, and the new cache.

        They see the cache and, causally, each other; T may be a whole prompt. There is no dropout,
        and no derivative (NotImplementedError). Tokens that the cache has no room for are lost.
        """
        keys, values, count = cache
        q, k, v = (h.astype(keys.dtype)[None] for h in self._heads((x, x, x), process_heads))
        lengths = count[None] + len(x)
        keys, values = update_cache(keys[None], values[None], k, v, lengths)
        out = decode_attention(q, keys, values, lengths, **rest).reshape(len(x), -1)
        return jax.vmap(self.output_proj)(out), (keys[0], values[0], lengths[0])

    def _heads(self, inputs, process_heads):
        projections = zip((self.query_proj, self.key_proj, self.value_proj), inputs, strict=True)
        heads = [jax.vmap(f)(x).reshape(len(x), self.num_heads, -1) for f, x in projections]
        shapes = [x.shape for x in heads]
        heads = heads if process_heads is None else process_heads(*heads)
        got = [x.shape for x in heads]
        need(got == shapes, "process_heads", got, f"the shapes that it got, {shapes}")
        return [x.astype(jnp.result_type(*heads)) for x in heads]
