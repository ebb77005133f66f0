"""What is done to each logit besides the softmax, forward and backward: the soft cap.

A logit is problem.scale * q.k. With a soft cap it becomes cap * tanh(logit / cap), before masks.
Kernels then hold the tanh alone: `Problem.logit_unit`, which exponents are multiplied with, is the
cap in the place of the scale.

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


def capped(products: jax.Array, problem: Problem) -> jax.Array:
    """Logits in units of `problem.logit_unit`, from products of query and key in float32."""
    if problem.soft_cap is None:
        return products
    factor = problem.scale / problem.soft_cap
    return by_columns(lambda x: tanh(x * factor), products)


def capped_weights(
    logits: jax.Array, minus_lse: jax.Array, problem: Problem
) -> tuple[jax.Array, jax.Array]:
    """Weights of capped logits: in the dtype of the inputs, and times the derivative of the cap.

    Both at once, so that there never are two float32 tiles.

    Args:
      logits: what `capped` gives, `UNSEEN` where there is no weight.
      minus_lse: in units of `problem.logit_unit`, in the shape of logits.
      problem: one with a soft cap.
    """
    factor = problem.logit_unit * LOG2E

    def compute(logits, minus_lse):
        weights = jnp.exp2(logits * factor + minus_lse * factor)
        return weights.astype(problem.dtype), weights * cap_slope(logits)

    return by_columns(compute, logits, minus_lse)


def cap_slope(logits: jax.Array) -> jax.Array:
    """Derivative of a capped logit by the logit, from what `capped` gives with a cap."""
    return 1.0 - logits * logits


def by_columns(function: Callable, *tiles: jax.Array) -> Any:
    """What an elementwise function gives for `(64, n)` tiles, worked out in 8 columns at a time.

    Otherwise every operation is done on all columns before the next one, and what lies between
    them fills the registers.
    """
    parts = [
        function(*(tile[:, first : first + 8] for tile in tiles))
        for first in range(0, tiles[0].shape[1], 8)
    ]
    return jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *parts)
