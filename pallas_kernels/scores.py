"""From products to weights in the backward: one chain of links, of which its callers know none.

Two do without: `step_with_dq` of `backward_consumer.py`, which has dQ between the links and so
neither a cap nor a function, and `backward_key_consumer.py`, where weights go by mail amid them.

A logit is problem.scale * q.k, with a bias, or what a function makes of it, or its soft cap. Then
comes what hides keys, an exponential, and dropout. A backward kernel wants two things of a tile:
the weights, which dV is made of, and the weights times the slopes of all links, which with dP make
dS. It brings what a link may ask for (`Tile`), and may do other work between the two calls.

Where logits have a cap, what hides keys comes before the exponentials, as there is no register for
weights beside slopes. Else it comes behind them.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax

from pallas_kernels import soft_cap
from pallas_kernels.dropout import as_operand
from pallas_kernels.elements import Loaded
from pallas_kernels.problem import Problem
from pallas_kernels.score_functions import sloped


class Tile(NamedTuple):
    """What links ask for of a tile of a step.

    Attributes:
      loaded: mask, bias and score function.
      weights: gives those of products, or of what a score function makes of them.
      hidden: gives a tile with a number in the place of what a query does not see.
      dropped: gives weights, negative where they are dropped; as they are without dropout.
      minus_lse: gives it for each pair, in units of `Problem.logit_unit`; asked for by a cap alone.
      words: None, or gives those of dropout for each pair, if there is dropout: then a cap drops
        weights, while it makes them.
    """

    loaded: Loaded
    weights: Callable[[jax.Array], jax.Array]
    hidden: Callable[[jax.Array, float], jax.Array]
    dropped: Callable[[jax.Array], jax.Array]
    minus_lse: Callable[[], jax.Array]
    words: Callable[[], tuple[jax.Array, jax.Array] | None] | None = None


class Weights(NamedTuple):
    """Of a tile.

    Attributes:
      values: of a cap, times its slope.
      slope: that they are yet to be multiplied with, or None.
      operand: of dV, if a cap has made it.
      are_dropped: whether a cap has seen to dropout.
    """

    values: jax.Array
    slope: jax.Array | None = None
    operand: jax.Array | None = None
    are_dropped: bool = False

    def of_values(self, problem: Problem) -> jax.Array:
        """As the product that makes dV reads them."""
        return as_operand(self.values, problem) if self.operand is None else self.operand

    def of_logits(self) -> jax.Array:
        """Times the slopes of all links."""
        return self.values if self.slope is None else sloped(self.values, self.slope)


def begun(products: jax.Array, tile: Tile, problem: Problem) -> Weights:
    """Weights of products, before `ended`."""
    if problem.has_cap:
        logits, _ = soft_cap.capped(products, tile.loaded, problem)
        logits = tile.hidden(logits, soft_cap.UNSEEN)
        words = tile.words() if tile.words else None
        operand, values = soft_cap.capped_weights(logits, tile.minus_lse(), problem, words)
        return Weights(values, operand=operand, are_dropped=words is not None)
    slope = None
    if tile.loaded.score is not None:
        products, slope = tile.loaded.score(products, slope=True)
    return Weights(tile.weights(products), slope)


def ended(weights: Weights, tile: Tile, problem: Problem) -> Weights:
    """The same without what is hidden or dropped."""
    values = weights.values
    if not problem.has_cap:
        values = tile.hidden(values, 0.0)
    if not weights.are_dropped:
        values = tile.dropped(values)
    return weights._replace(values=values)
