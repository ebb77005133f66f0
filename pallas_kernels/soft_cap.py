"""The soft cap of logits, and its derivative.

A logit is problem.scale * q.k + bias. With a soft cap it becomes cap * tanh(logit / cap), before
what hides keys. Kernels then hold the tanh alone: `Problem.logit_unit`, which exponents are
multiplied with, is the cap in the place of the scale.

The tanh. The hardware's (`tanh.approx`) is off by up to 2^-11, with a cap of 50 by 0.02 in a logit,
and exp2 with a division would take two more instructions of the unit that is short at width 64.
tanh = sinh / sqrt(1 + sinh^2) takes one, a reciprocal square root. An odd polynomial does for sinh,
however wrong where it is large, since 1 - tanh is 1 / (2 sinh^2) there: of degree 9, fitted to the
least largest error of the quotient, 8e-7 of the tanh, it has eight multiplications and additions.

Most logits are far below the cap, where an odd polynomial of degree 7 is the tanh itself, with less
than half of the instructions. A warp looks at many columns at a time whether all logits are.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.dropout import as_operand, negated_transposed
from pallas_kernels.elements import Loaded, biased
from pallas_kernels.online_softmax import spread
from pallas_kernels.problem import LOG2E, Problem
from pallas_kernels.ptx.votes import any_beyond
from pallas_kernels.tanh import TANH_IS_ONE, polynomial, tanh_by_sinh

# Of x, x y, x y^2 and x y^3 in tanh(x), y = x^2 - _NEAR^2, below _NEAR: so fitted, to 2.2e-6.
_NEAR = 0.6
_NEAR_TANH = (
    0.8950806904199016,
    -0.2550371428060724,
    0.08637503667520906,
    -0.04092902018919724,
)
# Up to a width of query and key: columns that a warp looks at together, and of these the columns
# that are worked out at a time where all are below _NEAR. Others spill or take longer (notes/).
_COLUMNS = {64: (128, 32), 128: (64, 32), 256: (64, 8)}
# What is in the coefficients of _NEAR_TANH to the 7th power must stay within float32.
_FACTORS = 1e-4, 1e4
# In log2 units, of rows whose maxima are not looked for.
_HIGHEST_REFERENCE = 25.0
# A capped logit that is none: its weight is 0, its square finite.
UNSEEN = -1e9


def tanh(x: jax.Array, factor: float, width: int) -> jax.Array:
    """tanh of factor * x for a float32 tile, to 2.2e-6 of its value and float32's rounding.

    Each element has the same whatever stands beside it; abs(factor * x) < 1e17. Width is that of
    the kernel's problem.
    """
    return _in_branches(lambda x: x, x, factor, width)


def _in_branches(
    function: Callable,
    x: jax.Array,
    factor: float,
    width: int,
    unit: float = 1.0,
    reference: jax.Array | None = None,
) -> jax.Array:
    """A function of unit * tanh(factor * x) - reference, of `(64,)` rows; `tanh` says how right."""
    columns, near_columns = next(value for key, value in _COLUMNS.items() if width <= key)
    if not _FACTORS[0] < factor < _FACTORS[1]:
        x, factor = x * factor, 1.0

    def excess(x):
        return x * x - (_NEAR / factor) ** 2

    def less_reference(x):
        return x if reference is None else x - spread(reference, x.shape)

    def near(x):
        coefficients = [unit * c * factor ** (2 * n + 1) for n, c in enumerate(_NEAR_TANH)]
        return less_reference(x * polynomial(excess(x), coefficients))

    def far(x):
        return less_reference(tanh_by_sinh(x * factor) * unit)

    def all_near(x):
        return by_columns(lambda x: function(near(x)), x, columns=near_columns)

    def some_far(x):
        return by_columns(lambda x: function(jnp.where(excess(x) < 0.0, near(x), far(x))), x)

    def some_columns(x):
        limit = 0.999999 * _NEAR / factor  # where `excess` is negative however it is rounded
        return lax.cond(any_beyond(x, limit), some_far, all_near, x)

    return by_columns(some_columns, x, columns=columns)


def capped(
    products: jax.Array,
    loaded: Loaded,
    problem: Problem,
    *,
    branches: bool = True,
    exact: bool = False,
) -> tuple[jax.Array, float]:
    """Logits with bias and cap, if any, and what to multiply them with to have them in log2 units.

    Args:
      products: of query and key, in float32.
      loaded: what gives the bias, where products do not begin with it.
      problem: with a soft cap, logits are in units of `problem.logit_unit`.
      branches: there are registers for `tanh`; not so beside a bias.
      exact: as `biased` has it, without a cap.
    """
    if problem.soft_cap is None:
        return biased(products, problem, loaded, exact=exact)
    factor, bias_factor = problem.scale / problem.soft_cap, 1.0 / problem.soft_cap
    unit = problem.soft_cap * LOG2E
    if branches and not problem.has_bias:
        return tanh(products, factor, problem.widest), unit

    def compute(products, *bias):
        logits = products * factor
        for x in bias:
            logits = logits + x.astype(jnp.float32) * bias_factor
        if problem.has_bias:
            logits = jnp.clip(logits, -TANH_IS_ONE, TANH_IS_ONE)
        return tanh_by_sinh(logits)

    bias = () if loaded.bias is None else (loaded.bias(),)
    return by_columns(compute, products, *bias), unit


def known_reference(problem: Problem) -> float | None:
    """What may stand for the maximum of every row, in log2 units, as none exceeds the cap.

    None where weights of rows with logits far below would leave the range of their dtype.
    """
    if problem.soft_cap is None or problem.dtype != jnp.bfloat16:
        return None
    highest = problem.soft_cap * LOG2E
    # Weights are at most 2^48 and at least 2^-98: values have the rest of the range of float32.
    return min(highest, _HIGHEST_REFERENCE) if highest <= _HIGHEST_REFERENCE + 48.0 else None


def weights_of(
    products: jax.Array, reference: jax.Array, loaded: Loaded, problem: Problem
) -> jax.Array:
    """2^(capped logits in log2 units - the reference of their row, `(64,)`).

    In the branches, as ptxas keeps exponentials behind them otherwise, when their unit is what all
    wait for.
    """
    if problem.has_bias:
        logits, unit = capped(products, loaded, problem)
        return jnp.exp2(logits * unit - spread(reference, logits.shape))
    assert problem.soft_cap is not None
    factor, unit = problem.scale / problem.soft_cap, problem.soft_cap * LOG2E
    return _in_branches(jnp.exp2, products, factor, problem.widest, unit, reference)


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
