"""What a function launches, as it is traced."""

from collections.abc import Callable, Iterator
from typing import Any

import jax


def launches(fn: Callable, *args: Any) -> list[Callable]:
    """Launches of kernels (`jax_flash/launch.py`) of `fn(*args)`, each as often as it is there."""
    found = equations(jax.make_jaxpr(fn)(*args))
    return [eqn.params["launch"] for eqn in found if eqn.primitive.name == "jax_flash_launch"]


def names(fn: Callable, *args: Any) -> list[str]:
    """Their functions' names."""
    return [launch.function.__name__ for launch in launches(fn, *args)]


def types(launch: Any) -> list[jax.ShapeDtypeStruct]:
    """Of the arrays that one takes."""
    return [jax.ShapeDtypeStruct(*of_one) for of_one in launch.types]


def traced(fn: Callable, *args: Any) -> list[Any]:
    """The jaxpr of each of them."""
    return [jax.make_jaxpr(x)(*types(x)) for x in launches(fn, *args)]


def kernels(fn: Callable, *args: Any) -> str:
    """What is traced for all of them, as text."""
    return "\n".join(map(str, traced(fn, *args)))


def equations(jaxpr) -> Iterator[Any]:
    """All of a jaxpr, with those inside of others."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(inner):
                yield from equations(inner)


def _is_jaxpr(x) -> bool:
    return hasattr(x, "eqns") or hasattr(x, "jaxpr")
