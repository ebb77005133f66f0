"""The kernel variants that tests compile: every one that the library may launch."""

from collections.abc import Callable
from typing import Any


def kernel_cases() -> list[tuple[str, Callable, Any]]:
    """`(id, fn, args)`: fn calls kernels, args are pytrees of `jax.ShapeDtypeStruct`."""
    return []
