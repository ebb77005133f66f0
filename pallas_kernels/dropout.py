"""Dropout of attention weights: which are dropped, and how kernels leave them out.

What is dropped is a function of the dropout key and of (batch entry, query head, query, key), the
same whatever the tiles, forward and backward, and on any implementation. All arithmetic is uint32
and wraps:

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

The forward's sums are of all weights, and its output is of those that are kept, divided by 1 - rate
at the end. The backward negates what is dropped, which costs no register, and casts it to 0:

    with W = P, or -P where dropped, and Z = 1 / (1 - rate), or 0 where dropped,
    dS = P * (dP * Z - delta)
       = (W * dP + |W| * (dP - 2 * (1 - rate) * delta)) / (2 * (1 - rate))

of which what is in brackets is computed, with `Problem.delta_unit` in delta and
`Problem.d_logit_unit` in the gradients' last factor.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.config import DROPOUT_STEPS, Problem
from pallas_kernels.online_softmax import spread
from pallas_kernels.primitives import (
    dropped_bytes,
    four_values,
    kept_operand,
    load_rows,
    negate_dropped,
    negate_dropped_transposed,
    positive_operand,
    reaches_limit,
)

_ODD = 0x9E3779B9  # 2**32 over the golden ratio
_OTHER = 0x85EBCA6B  # where columns begin
_PAIR = 8  # i and i + 8, and j and j + 8, share a value


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


# Of `query_words`, `[B, N, T]` with T rounded up, and of `columns_of_keys`, `[B, S]`; int32.
Words = tuple[jax.Array, jax.Array]


def operands(words: Words | None, keys: int) -> tuple[jax.Array, ...]:
    """Words for a kernel that reads those of `keys` keys at a time."""
    if words is None:
        return ()
    query_words, key_words = words
    return query_words, jnp.pad(key_words, ((0, 0), (0, -key_words.shape[1] % keys)))


@dataclasses.dataclass(frozen=True)
class DropoutRefs:
    """The words of a problem with dropout inside a kernel; none without dropout.

    Attributes:
      refs: of `operands`, in global memory.
    """

    problem: Problem
    refs: tuple[Any, ...]

    @classmethod
    def split(cls, problem: Problem, refs) -> "tuple[DropoutRefs, list]":
        """The words that a kernel's refs begin with, and the other refs."""
        count = 2 * bool(problem.dropout)
        return cls(problem, tuple(refs[:count])), list(refs[count:])

    def of_rows(self, batch, head, first) -> jax.Array | None:
        """Words of 64 queries from `first` on, the rows of a tile, `(64,)` int32."""
        if not self.refs:
            return None
        ref = self.refs[0].at[batch, head]
        return load_rows(ref, first, ref.shape[0] - 1)

    def dropped(self, rows, batch, first_key, keys: int) -> jax.Array | None:
        """Which elements of a tile are dropped (`dropped_bytes`); None without dropout.

        Args:
          rows: what `of_rows` gives.
          first_key: of the tile's columns, a multiple of 16.
          keys: how many.
        """
        if not self.refs:
            return None
        return dropped_bytes(rows, self.refs[1].at[batch], first_key, keys)

    def negated(self, weights: jax.Array, rows, batch, first_key) -> jax.Array:
        """The weights of a tile, `(64, n)` float32 and not negative, negative where dropped."""
        ref = self.refs[1].at[batch]
        return negate_dropped(weights, rows, ref, first_key, few=_are_few(self.problem))


def kept(weights: jax.Array, dropped: jax.Array | None, dtype) -> jax.Array:
    """Weights as products read them, with 0 for what `DropoutRefs.dropped` says."""
    return weights.astype(dtype) if dropped is None else kept_operand(weights, dropped, dtype)


def negated_transposed(weights: jax.Array, key_words, query_words, problem: Problem) -> jax.Array:
    """The same of transposed tiles, whose rows are keys, of a problem with dropout.

    Args:
      weights: `(64, n)` float32, not negative; first key and query are multiples of 16, and so is
        n.
      key_words, query_words: of rows `(64,)` and of columns `(n,)`, or of the shape of weights.
    """
    if query_words.ndim == 1:
        key_words = spread(key_words, weights.shape)
        query_words = lax.broadcast_in_dim(query_words, weights.shape, [1])
    return negate_dropped_transposed(weights, key_words, query_words, few=_are_few(problem))


def _are_few(problem: Problem) -> bool:
    """Whether limits are at most half of 2^7, else at least that; give or take 1, as they round."""
    return problem.dropout <= DROPOUT_STEPS // 2


def as_operand(weights: jax.Array, problem: Problem) -> jax.Array:
    """Weights as products read them: in the dtype of the inputs, 0 where they are negative."""
    if problem.dropout:
        return positive_operand(weights, problem.dtype)
    return weights.astype(problem.dtype)


def d_logits(weights, d_weights, minus_delta, problem: Problem) -> jax.Array:
    """dS / `Problem.d_logit_unit` of a tile, in float32.

    Args:
      weights: negative where they are dropped.
      d_weights: of the products.
      minus_delta: times `Problem.delta_unit`, in the shape of weights.
    """
    if not problem.dropout:
        return weights * (d_weights + minus_delta)
    return weights * d_weights + jnp.abs(weights) * (d_weights + minus_delta)
