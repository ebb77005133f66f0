"""Which attention weights dropout drops.

It is a function of the dropout key and of (batch entry, query head, query, key), the same whatever
the tiles, forward and backward, and on any implementation. All arithmetic is uint32 and wraps:

    row     finaliser of key, b, n and i, with 8 set to 0 in i, an odd word
    column  finaliser of key and j, with 8 set to 0 in j, an odd word
    value   upper ^ lower half of the 64-bit product row * column, a word for i, i + 8, j and j + 8
    limits  of i, i + 8, for j and for j + 8: 2^7 times the rate, rounded at random (`_limits`)
    dropped where the limit of i and j and 7 bits of the value reach 2^7 together: those of byte
            1 for i and j, 0 for i + 8 and j, 3 for i and j + 8, 2 for i + 8 and j + 8

A rate is a multiple of 2^-15. In a row it is one of the two multiples of 2^-8 next to it, which
one differs from row to row, so that it is right on average.

One product and one xor serve four elements, which are in one thread in tiles of queries by keys and
in transposed ones alike. That a product mixes enough is for the tests to show: any two rows, and
any two columns, agree as often as independent ones. (With a constant for a factor, row ^ column for
the other, pairs of rows were off by 25 standard deviations.)
"""

import jax
import jax.numpy as jnp

from pallas_kernels.problem import DROPOUT_STEPS

_ODD = 0x9E3779B9  # 2**32 over the golden ratio
_OTHER = 0x85EBCA6B  # where columns begin
_PAIR = 8  # i and i + 8, and j and j + 8, share a value
SEVEN_BITS = 0x7F7F7F7F  # of a word, 7 bits of each byte


def steps_of(rate: float) -> int:
    """How many of `DROPOUT_STEPS` a rate in [0, 1) is: none if it is 0, else at least one."""
    return min(max(round(rate * DROPOUT_STEPS), 1), DROPOUT_STEPS - 1) if rate > 0 else 0


def rows_of_queries(key_words, batch, head, rows) -> jax.Array:
    """uint32 of the queries' shape, which is that of batch, head and rows, broadcast.

    Args:
      key_words: two uint32 words of the dropout key, `[2]` or a pair of scalars.
      batch, head, rows: integers b, n, i.
    """
    # The key words stand at both ends: two keys that collide in one row do not in the next.
    return _hashed(_ODD, key_words[0], _without_pair(rows), head, batch, key_words[1])


def columns_of_keys(key_words, cols) -> jax.Array:
    """uint32 of the shape of cols, integers j."""
    return _hashed(_OTHER, key_words[1], _without_pair(cols), key_words[0])


def is_kept(key_words, batch, head, rows, cols, steps: int) -> jax.Array:
    """Which weights survive, of the shape of all integers, broadcast.

    Args:
      key_words, batch, head, rows: as for `rows_of_queries`.
      cols: integers j.
      steps: rate * `DROPOUT_STEPS`.
    """
    own_rows = rows_of_queries(key_words, batch, head, rows)
    values = four_values(own_rows, columns_of_keys(key_words, cols))
    limits = _limits(own_rows, steps)
    later_query, later_key = ((_as_words(x) & _PAIR) > 0 for x in (rows, cols))
    return jnp.logical_not(reaches_limit(values, limits, later_query, later_key))


def query_words(key_words, batch, head, query_length: int, steps: int) -> jax.Array:
    """What kernels take for queries, uint32 `[..., query_length]`, rounded up to a multiple of 16.

    Of 16 queries 8 words of rows, and then their limits.

    Args:
      key_words, batch, head: as for `rows_of_queries`, the last two with a last axis of 1.
      steps: rate * `DROPOUT_STEPS`.
    """
    rows = jnp.arange(-(-query_length // (2 * _PAIR)) * 2 * _PAIR, dtype=jnp.int32)
    rows = rows.reshape((1,) * (jnp.ndim(head) - 1) + rows.shape)
    words = rows_of_queries(key_words, batch, head, rows)
    return jnp.where(rows & _PAIR, _limits(words, steps), words)


def _limits(rows: jax.Array, steps: int) -> jax.Array:
    """Of `rows_of_queries`, as `reaches_limit` takes them: 0 to 2^7 each."""
    random = _finalised(rows + jnp.uint32(_ODD))
    both = (steps + (random & 0x7F)) >> 7
    first = (both + ((random >> 7) & 1)) >> 1
    return (first << 8) | ((both - first) << 24)


def four_values(rows: jax.Array, columns: jax.Array) -> jax.Array:
    """Upper xor lower half of the 64-bit products of uint32, less the highest bit of each byte."""
    low = jnp.uint32(0xFFFF)
    (row_high, row_low), (column_high, column_low) = ((x >> 16, x & low) for x in (rows, columns))
    right, left = row_low * column_high, row_high * column_low
    middle = ((row_low * column_low) >> 16) + (right & low) + (left & low)
    upper = row_high * column_high + (right >> 16) + (left >> 16) + (middle >> 16)
    return (upper ^ (rows * columns)) & jnp.uint32(SEVEN_BITS)


def reaches_limit(values, limits, later_query, later_key) -> jax.Array:
    """Whether 7 bits of `four_values` and a limit reach 2^7 together.

    Args:
      values: uint32, for queries i and i + 8 and keys j and j + 8: bytes 1 and 0 for those of j,
        bytes 3 and 2 for those of j + 8.
      limits: uint32, for j in byte 1, for j + 8 in byte 3, each at most 2^7.
      later_query, later_key: whether it is i + 8, and whether it is j + 8.
    """
    byte = jnp.where(later_key, 24, 8)
    own = (values >> (byte - jnp.where(later_query, 8, 0)).astype(jnp.uint32)) & 0x7F
    return own + ((limits >> byte.astype(jnp.uint32)) & 0xFF) >= 1 << 7


def _without_pair(x) -> jax.Array:
    return _as_words(x) & ~jnp.uint32(_PAIR)


def _hashed(word: int, *parts) -> jax.Array:
    hashed = jnp.uint32(word)
    for part in parts:
        hashed = _finalised((hashed + jnp.uint32(_ODD)) ^ _as_words(part))
    return hashed | 1


def _as_words(x) -> jax.Array:
    return jnp.asarray(x).astype(jnp.uint32)


def _finalised(x):
    """Mixes every bit of a uint32 into every other (Ettinger's two-round hash, hash-prospector)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x21F0AAAD)
    x = (x ^ (x >> 15)) * jnp.uint32(0xD35A2D97)
    return x ^ (x >> 15)
