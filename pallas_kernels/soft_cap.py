"""The soft cap of logits, and its derivative.

A logit is problem.scale * q.k + bias. With a soft cap it becomes cap * tanh(logit / cap), before
what hides keys. Kernels then hold the tanh alone: `Problem.logit_unit`, which exponents are
multiplied with, is the cap in the place of the scale.

The tanh. The hardware's (`tanh.approx`) is off by up to 2^-11, with a cap of 50 by 0.02 in a logit,
and exp2 with a division would take two more instructions of the unit that is short at width 64.
tanh = sinh / sqrt(1 + sinh^2) takes one, a reciprocal square root. An odd polynomial does for sinh,
however wrong where it is large, since 1 - tanh is 1 / (2 sinh^2) there: of degree 9, fitted to the
least largest error of the quotient, 8e-7 of the tanh, it has eight multiplications and additions.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.config import Problem
from pallas_kernels.dropout import as_operand, negated_transposed
from pallas_kernels.elements import Loaded, biased
from pallas_kernels.online_softmax import LOG2E
from pallas_kernels.primitives import rsqrt

# Of x, x^3, ... x^9 in sinh(x): by least squares, weighted until all maxima of the error of tanh
# are the same.
_SINH = (
    1.000000834184593,
    0.16665571619557273,
    0.008349997864132637,
    0.00019178718082572813,
    3.569496009475779e-06,
)
# Of x^2, in what x is multiplied with: from there on tanh is 1 in float32. Without it the square of
# sinh would be infinite from x = 550 on, and tanh 0.
_FAR = 64.0
# From there on tanh is 1 for a logit whose bias may be infinite, which `tanh` does not take.
_INFINITE = 16.0
# A capped logit that is none: its weight is 0, its square finite.
UNSEEN = -1e9


def tanh(x: jax.Array) -> jax.Array:
    """tanh of a float32 tile, to 8e-7 of its value and float32's rounding, for abs(x) < 1e17."""
    square = jnp.minimum(x * x, _FAR)
    quotient: jax.Array | float = _SINH[-1]
    for coefficient in reversed(_SINH[:-1]):
        quotient = quotient * square + coefficient
    sinh = x * quotient
    return sinh * rsqrt(sinh * sinh + 1.0)


def capped(products: jax.Array, loaded: Loaded, problem: Problem) -> tuple[jax.Array, float]:
    """Logits with bias and cap, if any, and what to multiply them with to have them in log2 units.

    Args:
      products: of query and key, in float32.
      loaded: what gives the bias, where products do not begin with it.
      problem: with a soft cap, logits are in units of `problem.logit_unit`.
    """
    if problem.soft_cap is None:
        return biased(products, problem.scale * LOG2E, loaded)
    factor, bias_factor = problem.scale / problem.soft_cap, 1.0 / problem.soft_cap

    def compute(products, *bias):
        logits = products * factor
        for x in bias:
            logits = logits + x.astype(jnp.float32) * bias_factor
        if problem.has_bias:
            logits = jnp.clip(logits, -_INFINITE, _INFINITE)
        return tanh(logits)

    bias = () if loaded.bias is None else (loaded.bias(),)
    return by_columns(compute, products, *bias), problem.soft_cap * LOG2E


def capped_weights(
    logits: jax.Array,
    minus_lse: jax.Array,
    problem: Problem,
    words: tuple[jax.Array, jax.Array] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Weights of capped logits: as an operand, and times the derivative of the cap.

    Both at once, so that there never are two float32 tiles.

    Args:
      logits: what `capped` gives, `UNSEEN` where there is no weight.
      minus_lse: in units of `problem.logit_unit`, in the shape of logits.
      problem: one with a soft cap.
      words: of dropout, of the keys that are rows and of the queries that are columns, in the shape
        of logits; the weights are then negative where they are dropped.
    """
    factor = problem.logit_unit * LOG2E

    def compute(logits, minus_lse, *words):
        weights = jnp.exp2(logits * factor + minus_lse * factor)
        if words:
            key_words, query_words = words
            weights = negated_transposed(weights, key_words, query_words, problem)
        return as_operand(weights, problem), weights * cap_slope(logits)

    columns = 16 if words else 8  # queries i and i + 8 share words
    return by_columns(compute, logits, minus_lse, *(words or ()), columns=columns)


def cap_slope(logits: jax.Array) -> jax.Array:
    """Derivative of a capped logit by the logit, from what `capped` gives with a cap."""
    return 1.0 - logits * logits


def by_columns(function: Callable, *tiles: jax.Array, columns: int = 8) -> Any:
    """What an elementwise function gives for `(64, n)` tiles, worked out a few columns at a time.

    Otherwise every operation is done on all columns before the next one, and what lies between
    them fills the registers.
    """
    parts = [
        function(*(tile[:, first : first + columns] for tile in tiles))
        for first in range(0, tiles[0].shape[1], columns)
    ]
    return jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *parts)
