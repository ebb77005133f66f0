"""What programs of users evaluate in the place of some operations, to be quicker, or at all."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.tanh import TANH_IS_ONE, tanh_by_sinh


def names_of(jaxpr) -> tuple[str, ...]:
    """Of the operations of a jaxpr, those of calls in their place."""
    found: list[str] = []
    for equation in jaxpr.eqns:
        inner = equation.params.get("jaxpr") if equation.primitive.name == "jit" else None
        found += [equation.primitive.name] if inner is None else names_of(inner.jaxpr)
    return tuple(found)


@functools.cache
def divisions_of_jax() -> dict[str, tuple[str, ...]]:
    """What JAX's own divisions of int32 are made of, by the names of their calls."""
    found = {}
    for function in (jnp.floor_divide, jnp.remainder):
        jaxpr = jax.make_jaxpr(lambda x, f=function: f(x, 3))(np.int32(0)).jaxpr
        (equation,) = jaxpr.eqns
        found[equation.params["name"]] = names_of(equation.params["jaxpr"].jaxpr)
    return found


def _unsigned(operation: Callable) -> Callable[..., jax.Array]:
    def of_integers(x, divisor):
        x, divisor = (lax.convert_element_type(y, jnp.uint32) for y in (x, divisor))
        return lax.convert_element_type(operation(x, divisor), jnp.int32)

    return of_integers


def _floored(x, divisor):
    rest = lax.rem(x, divisor)
    return lax.div(x, divisor) - jnp.where(rest < 0, jnp.int32(1), jnp.int32(0))


def _remainder(x, divisor):
    rest = lax.rem(x, divisor)
    return jnp.where(rest < 0, rest + divisor, rest)


def tanh(x):
    """Inside a kernel."""
    if x.ndim < 2:  # not once a pair
        return jnp.tanh(x)
    return tanh_by_sinh(jnp.clip(x, -TANH_IS_ONE, TANH_IS_ONE))


# Of float32, where Mosaic GPU has none.
OTHERS: dict[str, Callable] = {
    "logistic": lambda x: 1.0 / (1.0 + jnp.exp(-x)),
    "add_any": lambda x, y: x + y,
}

# By name, and whether the dividend is never negative.
DIVISIONS = {
    ("floor_divide", True): _unsigned(lax.div),
    ("remainder", True): _unsigned(lax.rem),
    ("floor_divide", False): _floored,
    ("remainder", False): _remainder,
}
