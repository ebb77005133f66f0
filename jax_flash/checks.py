"""What arguments must be, and the errors that say so."""

import numbers

import jax
import jax.numpy as jnp
import numpy as np


def need(holds: bool, name: str, got: object, needs: str, error: type = ValueError) -> None:
    """Raises an error that names an argument, what it got and what it needs, unless it holds."""
    if not holds:
        raise error(f"{name}: got {got}; needs {needs}.")


def need_static(name: str, x) -> None:
    """Raises an error where x, which decides what is traced, is traced itself."""
    is_traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(x))
    needs = (
        "a static value: name it in static_argnames of jax.jit, or close over it; where layers of a"
        " scan differ in it, choose by lax.cond"
    )
    need(not is_traced, name, "a traced value", needs, TypeError)


def is_number(x, kind: type) -> bool:
    return isinstance(x, kind) and not isinstance(x, bool)


def is_name(x, names) -> bool:
    return isinstance(x, str) and x in names


def kind_of(x) -> str:
    return "jax.Array" if isinstance(x, jax.Array) else type(x).__name__


def need_flag(name: str, x) -> None:
    need_static(name, x)
    need(isinstance(x, bool | np.bool_), name, kind_of(x), "True or False", TypeError)


def need_count(name: str, x, least: int) -> None:
    need_static(name, x)
    need(is_number(x, numbers.Integral), name, kind_of(x), "an integer", TypeError)
    need(x >= least, name, x, f"{least} or more")


def need_number_or_none(name: str, x) -> None:
    need_static(name, x)
    number = x is None or is_number(x, numbers.Real)
    need(number, name, kind_of(x), "None or a number", TypeError)


def finite(name: str, x, dtype) -> float:
    """The number as a float that is finite in this dtype too."""
    value = as_float(name, x)
    most = float(jnp.finfo(dtype).max)
    need(abs(value) <= most, name, x, f"a finite number, in {dtype} too")
    return value


def as_float(name: str, x) -> float:
    try:
        return float(x)
    except OverflowError as error:
        raise ValueError(f"{name}: got an integer beyond all floats; needs a number.") from error


def as_array(name: str, x) -> jax.Array:
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name}: got {type(x).__name__}; needs an array.") from error
    except OverflowError as error:
        raise ValueError(f"{name}: got {x}; needs numbers within int32.") from error


def as_int32(name: str, x, *, saturated: bool = True) -> jax.Array:
    """`x` as int32, refused where that would change a value, as far as values can be seen.

    Args:
      saturated: whether traced integers of other dtypes, as JAX makes them with jax_enable_x64, are
        brought within int32 by its bounds; else they wrap round.
    """
    bounds = np.iinfo(np.int32)
    leaves = jax.tree.leaves(x)
    if leaves and all(isinstance(leaf, numbers.Integral) for leaf in leaves):
        x = np.asarray(x)  # not JAX's own, which is int64 or, for what that cannot hold, an error
    if type(x) is not np.ndarray:  # nor one that is masked
        x = as_array(name, x)
    is_integer = jnp.issubdtype(x.dtype, jnp.integer)
    if x.dtype == object and x.size:
        is_integer = all(isinstance(entry, numbers.Integral) for entry in x.flat)
    need(is_integer, name, x.dtype, "int32, or integers that it holds", TypeError)
    if x.dtype != object and np.can_cast(x.dtype, np.int32):
        return jnp.asarray(x, np.int32)
    if isinstance(x, np.ndarray) or _is_readable(x):
        values = np.asarray(x)
        if values.size:
            least, most = values.min(), values.max()
            fits = bounds.min <= least and most <= bounds.max
            need(fits, name, f"{least} to {most}", "integers within int32")
        return jnp.asarray(x.astype(np.int32))
    if saturated:
        x = jnp.minimum(x, jnp.asarray(bounds.max, x.dtype))
        if jnp.issubdtype(x.dtype, jnp.signedinteger):
            x = jnp.maximum(x, jnp.asarray(bounds.min, x.dtype))
    return x.astype(np.int32)


def _is_readable(x: jax.Array) -> bool:
    return not isinstance(x, jax.core.Tracer) and x.is_fully_addressable


def per_batch(
    name: str, x, shape: tuple[int, ...], has_batch: bool, *, saturated: bool = True
) -> jax.Array:
    """Integers of a shape `[B, ...]`, where without a batch the first axis may be left out."""
    x = as_int32(name, x, saturated=saturated)
    if not has_batch and x.ndim == len(shape) - 1:
        x = x[None]
    need(x.shape == shape, name, f"shape {x.shape}", f"{shape}")
    return x


def broadcastable(name: str, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """`x` with 4 axes, each whole or 1."""
    need(x.ndim <= 4, name, f"{x.ndim} axes", "at most 4: [B, N, T, S]")
    fits = all(a in (1, b) for a, b in zip(x.shape[::-1], shape[::-1], strict=False))
    needs = f"one that broadcasts to [B, N, T, S] = {shape}"
    if x.shape == (shape[0], shape[3]):
        needs += f"; {name}[:, None, None, :], if it has one entry a key"
    need(fits, name, f"shape {x.shape}", needs)
    return x.reshape((1,) * (4 - x.ndim) + x.shape)
