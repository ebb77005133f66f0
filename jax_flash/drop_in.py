"""install(): attention in the place of the functions of JAX and Flax that models call."""

import dataclasses
import functools
import inspect
import logging
import numbers
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

# Bound now: it runs what attention does not take, whatever stands in its place.
from jax.nn import dot_product_attention as of_jax_nn

from jax_flash.api import attention
from jax_flash.checks import is_number, need_flag
from jax_flash.flax import attention_fn
from jax_flash.quantization import DTYPES

_logger = logging.getLogger("jax_flash")
_SIGNATURE = inspect.signature(of_jax_nn)
# The module of each package whose `attention_fn` is its function by default.
_MODULES = {"flax.nnx": "MultiHeadAttention", "flax.linen": "MultiHeadDotProductAttention"}
# Arguments that attention_fn does not take, or ignores.
_OF_FLAX_ALONE = {"module", "promote_dtype", "einsum_dot_general"}
_OF_FLAX_ALONE |= {"qk_attn_weights_einsum", "attn_weights_value_einsum"}

_ABSENT = object()
_installed: list["Installed"] = []
_before: list[tuple[Any, str, Any]] = []  # what each name of each holder was
_replaced: list[str] = []


def install(*, honour_implementation: bool = False) -> "Installed":
    """Puts attention in the place of the functions of JAX and Flax that models call.

        with jax_flash.install():
            ...  # jax.nn.dot_product_attention is attention here, and Flax's modules run it

    `jax.nn.dot_product_attention` runs `jax_flash.attention`. `dot_product_attention` of
    `flax.nnx` and of `flax.linen`, as far as these are imported, runs
    `jax_flash.flax.attention_fn`, also as the `attention_fn` of their modules, whether made before
    or after. Not reached is a function that was bound elsewhere before, as by
    `from jax.nn import dot_product_attention` or in a functools.partial.

    A call means what it meant, but that
      a query that sees no key has output 0 and LSE -inf (before, the mean of the values),
      the LSE is float32 and differentiable (before, of the key's dtype and without gradient),
      dropout in Flax drops other weights, and each by itself, whatever `broadcast_dropout` says,
      `precision` and `force_fp32_for_softmax` of Flax count for nothing: softmax is float32,
      forward-mode and second derivatives raise an error where a GPU implementation is chosen.
    The function that was replaced runs where
      query, key and value are not of one dtype of bfloat16, float16, float32 and float64,
      the width or the number of query heads is 0,
      the bias is not floating, or bias or mask does not broadcast to the logits,
      jax.nn's mask is not bool, which is an error there; Flax's may be of any dtype,
      jax.nn's scale is no finite scalar, or its window traced, negative or not of integers,
      Flax's weights are sown, its `promote_dtype` or einsums are given, or all weights dropped.

    All threads of the process are affected, and none should trace or call this meanwhile. What was
    traced before is traced anew: `jax.clear_caches()` is called here and by `undo`. After
    several calls the last one's argument counts, and all of them have to be undone. Pickle Flax's
    modules outside of it: they hold a function by a name that is another's here. The log
    "jax_flash" has, for information, what was replaced.

    Args:
      honour_implementation: run jax.nn's function where the caller names an implementation of it,
        "xla" or "cudnn". By default the name is ignored.

    Returns:
      A context manager that undoes this at its end. Its `undo()` does so too.

    Raises:
      TypeError: honour_implementation is no bool.
    """
    need_flag("honour_implementation", honour_implementation)
    known = len(_replaced)
    for package in ("jax.nn", *_MODULES):
        module = sys.modules.get(package)
        if module is not None and all(holder is not module for holder, _, _ in _before):
            for holder, name, ours in _places(package, module):
                _before.append((holder, name, vars(holder).get(name, _ABSENT)))
                setattr(holder, name, ours)
            _replaced.append(f"{package}.dot_product_attention")
    if _replaced[known:]:
        _logger.info("install: attention in the place of %s", ", ".join(_replaced[known:]))
    _installed.append(Installed(honour_implementation, tuple(_replaced)))
    jax.clear_caches()
    return _installed[-1]


@dataclasses.dataclass(frozen=True, eq=False)
class Installed:
    """What `install` returns: a context manager, in force from the start.

    Attributes:
      honour_implementation: as it was given.
      replaced: the functions in whose place attention was by then.
    """

    honour_implementation: bool
    replaced: tuple[str, ...]

    def undo(self) -> None:
        """Undoes the call of `install`, in any order with others; once undone, nothing."""
        if self not in _installed:
            return
        _installed.remove(self)
        if not _installed:
            _replaced.clear()
            while _before:
                holder, name, value = _before.pop()
                if value is _ABSENT:
                    delattr(holder, name)
                else:
                    setattr(holder, name, value)
            _logger.info("undo: the functions that were replaced are back")
        jax.clear_caches()

    def __enter__(self) -> "Installed":
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()


def _places(package: str, module: Any) -> Iterator[tuple[Any, str, Any]]:
    """Holder, name and new value of what reaches the function of a package."""
    replaced = of_jax_nn if package == "jax.nn" else module.dot_product_attention
    ours = _in_place_of_jax_nn if package == "jax.nn" else _in_place_of_flax(replaced)
    for holder in (module, sys.modules[replaced.__module__]):
        yield holder, "dot_product_attention", ours
    if package in _MODULES:
        yield getattr(module, _MODULES[package]), "attention_fn", _AttentionFn(replaced, ours)


class _AttentionFn:
    """`attention_fn` of Flax's modules: they keep the function that was replaced, and read ours.

    It is a default that was bound where their class was defined, and a module made earlier holds
    it: so it changes where it is read. What a module keeps is as it was, also after the undoing.
    """

    def __init__(self, replaced: Callable, ours: Callable):
        self.replaced = replaced
        self.ours = ours

    def __get__(self, module: Any, owner: type) -> Callable:
        held = {} if module is None else vars(module)
        kept = held.get("attention_fn", self.replaced)
        return self.ours if kept is self.replaced else kept

    def __set__(self, module: Any, value: Callable) -> None:
        vars(module)["attention_fn"] = self.replaced if value is self.ours else value


@functools.wraps(of_jax_nn)
def _in_place_of_jax_nn(*args, **kwargs):
    given = _bound(_SIGNATURE, args, kwargs)
    implementation = given.pop("implementation")
    is_named = implementation is not None and _installed and _installed[-1].honour_implementation
    query, key, value = (jnp.asarray(given.pop(name)) for name in ("query", "key", "value"))
    shape = query.shape[:-1]
    query, key, value = (x.reshape((1,) * (4 - x.ndim) + x.shape) for x in (query, key, value))
    if (
        not _installed  # somebody kept this function
        or is_named
        or implementation not in (None, "xla", "cudnn")
        or not _takes(query, key, value, given["bias"], given["mask"])
        or (given["mask"] is not None and jnp.asarray(given["mask"]).dtype != bool)
        or not _takes_scale(given["scale"])
        or not _takes_window(given["local_window_size"])
    ):
        return of_jax_nn(*args, **kwargs)
    given |= {name: bool(given[name]) for name in ("is_causal", "return_residual")}
    results = attention(query, key, value, **given)
    return jax.tree.map(lambda x: x.reshape(shape + x.shape[query.ndim - 1 :]), results)


def _in_place_of_flax(replaced: Callable) -> Callable:
    signature = inspect.signature(replaced)
    defaults = {name: x.default for name, x in signature.parameters.items()}

    @functools.wraps(replaced)  # Linen passes what is in the signature
    def dot_product_attention(*args, **kwargs):
        given = _bound(signature, args, kwargs)
        arrays = [given[name] for name in ("query", "key", "value")]
        dtype = given["dtype"] or jnp.result_type(*arrays)
        query, key, value = (jnp.asarray(x, dtype) for x in arrays)
        if (
            not _installed
            or any(given[name] is not defaults[name] for name in _OF_FLAX_ALONE & given.keys())
            or not _takes(query, key, value, given["bias"], given["mask"])
            or not 0 <= given["dropout_rate"] < 1
        ):
            return replaced(*args, **kwargs)
        given["dropout_rate"] = float(given["dropout_rate"])
        return attention_fn(**given | dict(is_causal=bool(given.get("is_causal", False))))

    return dot_product_attention


def _bound(signature: inspect.Signature, args: tuple, kwargs: dict) -> dict[str, Any]:
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def _takes(query: jax.Array, key: jax.Array, value: jax.Array, bias: Any, mask: Any) -> bool:
    """Whether attention takes these arrays, or nothing does."""
    if query.ndim < 3 or key.ndim < 3:
        return False
    logits = (*query.shape[:-3], query.shape[-2], query.shape[-3], key.shape[-3])
    bias, mask = (None if x is None else jnp.asarray(x) for x in (bias, mask))

    def fits(x: jax.Array | None) -> bool:
        if x is None:
            return True
        sizes = zip(x.shape[::-1], logits[::-1], strict=False)
        return x.ndim <= len(logits) and all(a in (1, b) for a, b in sizes)

    return (
        query.dtype == key.dtype == value.dtype
        and query.dtype.name in DTYPES
        and 0 not in (*query.shape[-2:], value.shape[-1])
        and (bias is None or jnp.issubdtype(bias.dtype, jnp.floating))
        and fits(bias)
        and fits(mask)
    )


def _takes_scale(scale: Any) -> bool:
    if scale is None:
        return True
    if is_number(scale, numbers.Real):
        return abs(scale) <= float(jnp.finfo(jnp.float32).max)
    scale = jnp.asarray(scale)
    return scale.shape == () and jnp.isdtype(scale.dtype, ("integral", "real floating"))


def _takes_window(window: Any) -> bool:
    if window is None:
        return True
    sides = (window, window) if is_number(window, numbers.Integral) else window
    return (
        isinstance(sides, tuple | list)
        and len(sides) == 2
        and all(is_number(side, numbers.Integral) and side >= 0 for side in sides)
    )
