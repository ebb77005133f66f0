"""Dropout of attention weights: which are dropped, and how kernels leave them out.

What is dropped is a function of the dropout key and of (batch entry, query head, query, key), the
same whatever the tiles, forward and backward, and on any implementation. All arithmetic is uint32
and wraps:

    row     finaliser of key, b, n, i, an odd word a query of a head          once a query
    column  finaliser of key and j, with 8 set to 0 in j, an odd word         once a key
    value   upper ^ lower half of the 64-bit product row * column             for j and j + 8
    dropped where 15 bits of the value, the lower if j has no 8, the upper if it has, plus
            rate * 2^15 reach 2^15

Rates are multiples of 2^-15. One product and one xor serve two elements, which are in one thread in
tiles of queries by keys and in transposed ones alike. That a product mixes enough is for the tests
to show: any two rows, and any two columns, agree as often as independent ones. (With a constant for
a factor, row ^ column for the other, pairs of rows were off by 25 standard deviations.)

Kernels negate dropped weights, which costs no register, and cast with negative ones as 0:

    forward    sums are of weights before; O is of the others, divided by 1 - rate at its end
    backward   with W = P, or -P where dropped, and Z = 1 / (1 - rate), or 0 where dropped,
               dS = P * (dP * Z - delta)
                  = (W * dP + |W| * (dP - 2 * (1 - rate) * delta)) / (2 * (1 - rate))
               of which what is in brackets is computed, with `Problem.delta_unit` in delta and
               `Problem.d_logit_unit` in the gradients' last factor
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.config import DROPOUT_STEPS, Problem
from pallas_kernels.online_softmax import spread
from pallas_kernels.primitives import (
    load_rows,
    negate_dropped,
    negate_dropped_transposed,
    paired_values,
    positive_operand,
)

_ODD = 0x9E3779B9  # 2**32 over the golden ratio
_OTHER = 0x85EBCA6B  # where columns begin
_PAIR = 8  # keys j and j + 8 share a value


def steps_of(rate: float) -> int:
    """How many of `DROPOUT_STEPS` a rate in [0, 1) is: none if it is 0, else at least one."""
    return min(max(round(rate * DROPOUT_STEPS), 1), DROPOUT_STEPS - 1) if rate > 0 else 0


def query_words(key_words, batch, head, rows) -> jax.Array:
    """uint32 of the queries' shape, which is that of batch, head and rows, broadcast.

    Args:
      key_words: two uint32 words of the dropout key, `[2]` or a pair of scalars.
      batch, head, rows: integers b, n, i.
    """
    # The key words stand at both ends: two keys that collide in one row do not in the next.
    return _hashed(_ODD, key_words[0], rows, head, batch, key_words[1])


def columns_of_keys(key_words, cols) -> jax.Array:
    """uint32 of the shape of cols, integers j."""
    return _hashed(_OTHER, key_words[1], _as_words(cols) & ~jnp.uint32(_PAIR), key_words[0])


def is_kept(row_words, column_words, cols, steps: int) -> jax.Array:
    """Which weights survive, of the shape of rows, columns and cols, broadcast.

    Args:
      row_words: of `query_words`.
      column_words: of `columns_of_keys`, for cols.
      cols: integers j.
      steps: rate * `DROPOUT_STEPS`.
    """
    value = paired_values(row_words, column_words)
    own = jnp.where(_as_words(cols) & _PAIR, value >> 16, value & 0xFFFF)
    return own + steps < DROPOUT_STEPS


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


# Words of queries `[B, N, T]` and of keys `[B, S]`, int32.
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

    def negated(self, weights: jax.Array, rows, batch, first_key) -> jax.Array:
        """The weights of a tile, negative where they are dropped.

        Args:
          weights: `(64, n)` float32, not negative.
          rows: what `of_rows` gives.
          first_key: of the tile's columns, a multiple of 16.
        """
        if not self.refs:
            return weights
        ref = self.refs[1].at[batch]
        return negate_dropped(weights, rows, ref, first_key, self.problem.dropout)


def negated_transposed(weights: jax.Array, key_words, query_words, problem: Problem) -> jax.Array:
    """The same of transposed tiles, whose rows are keys, of a problem with dropout.

    Args:
      weights: `(64, n)` float32, not negative; the first key is a multiple of 16.
      key_words, query_words: of rows `(64,)` and of columns `(n,)`, or of the shape of weights.
    """
    if query_words.ndim == 1:
        key_words = spread(key_words, weights.shape)
        query_words = lax.broadcast_in_dim(query_words, weights.shape, [1])
    return negate_dropped_transposed(weights, key_words, query_words, problem.dropout)


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
