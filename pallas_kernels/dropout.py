"""How kernels leave out the weights that dropout drops (`dropout_words.py` says which).

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

from pallas_kernels.online_softmax import spread
from pallas_kernels.problem import DROPOUT_STEPS, Problem
from pallas_kernels.ptx.dropout import (
    dropped_bytes,
    kept_operand,
    negate_dropped,
    negate_dropped_transposed,
    positive_operand,
)
from pallas_kernels.ptx.loads import load_rows

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
        count = 2 * int(problem.has_dropout)
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
    if problem.has_dropout:
        return positive_operand(weights, problem.dtype)
    return weights.astype(problem.dtype)


def d_logits(weights, d_weights, minus_delta, problem: Problem) -> jax.Array:
    """dS / `Problem.d_logit_unit` of a tile, in float32.

    Args:
      weights: negative where they are dropped.
      d_weights: of the products.
      minus_delta: times `Problem.delta_unit`, in the shape of weights.
    """
    if not problem.has_dropout:
        return weights * (d_weights + minus_delta)
    return weights * d_weights + jnp.abs(weights) * (d_weights + minus_delta)
