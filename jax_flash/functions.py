"""Masks and scores as functions: `mask_mod` and `score_mod` of `attention`, traced once for a call.

    mask_mod(b, h, q_idx, kv_idx) -> bool        score_mod(score, b, h, q_idx, kv_idx) -> float

A function is traced with scalars, and becomes a program for one pair of a query and a key. What it
captured, tracers too, are operands of the program: so they can be differentiated, mapped and
sharded, and a program is the same for other values. `at` maps a program over any tile of pairs.

A score where something hides the key does not count, be it NaN. That is not enough for derivatives,
as 0 * NaN is NaN: there, what enters an operation that is not linear is replaced by a number at
which it has a derivative.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash.checks import kind_of, need
from jax_flash.sharding import varied_over, vary_alike, vary_over

if TYPE_CHECKING:
    from jax.extend.core import Jaxpr

_INDICES = "b, h, q_idx, kv_idx"


def extended_core() -> Any:
    """JAX's, asked for where there is a function: its import brings Pallas."""
    from jax.extend import core

    return core


@dataclasses.dataclass(frozen=True, eq=False)
class KnownBlocks:
    """What is known of a mask_mod of some sizes (`block_mask`); equal if it says the same.

    Attributes:
      kinds: int8 `[b, n, query blocks, key blocks]`, of the batch entries and heads, or of all.
      seen: bool `[b, n, S]`, which keys any query sees.
    """

    kinds: np.ndarray
    seen: np.ndarray

    @functools.cached_property
    def _bytes(self) -> tuple:
        return self.kinds.shape, self.kinds.tobytes(), self.seen.shape, self.seen.tobytes()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KnownBlocks) and self._bytes == other._bytes

    def __hash__(self) -> int:
        return hash(self._bytes)


@dataclasses.dataclass(frozen=True)
class Function:
    """A traced function.

    Attributes:
      program: what it computes, of one pair.
      captured: the arrays that it read beside its arguments.
      known: None, or what is known of a mask_mod beforehand.
    """

    program: "Program"
    captured: tuple[jax.Array, ...]
    known: KnownBlocks | None = None

    def held_in(self, dtype) -> "Function":
        """The same, whose captured floating arrays are of a dtype at least as wide.

        In it their gradients are added up.
        """

        def wider(x):
            is_floating = jnp.issubdtype(x.dtype, jnp.floating)
            return x.astype(jnp.promote_types(x.dtype, dtype)) if is_floating else x

        return Function(self.program, tuple(map(wider, self.captured)))

    def at(self, *inputs: jax.Array, visible: jax.Array | None = None) -> jax.Array:
        """Its results over a tile.

        Args:
          inputs: of the function, arrays of one rank, each axis whole or 1.
          visible: None or bool, likewise: where the result counts.

        Returns:
          An array, each axis of which is 1 if nothing that the function reads is whole there.
        """
        captured = [
            x if x.dtype == dtype else x.astype(dtype)
            for x, dtype in zip(self.captured, self.program.dtypes, strict=True)
        ]
        rank, axes = inputs[0].ndim, self.program.varies_over
        inputs = tuple(
            vary_over(axes, x if is_read else jnp.zeros((1,) * rank, x.dtype))
            for x, is_read in zip(inputs, self.program.reads, strict=True)
        )

        def of_pair(*inputs):
            seen, inputs = (None, inputs) if visible is None else (inputs[0], inputs[1:])
            values = [_Value(x, False) for x in captured] + [_Value(x, True) for x in inputs]
            pair = _Pair(seen, inputs[0] if len(inputs) == 5 else None)
            (result,) = _results(self.program.steps, values, pair)
            return result.x

        return _over_axes(of_pair, inputs if visible is None else (visible, *inputs))


jax.tree_util.register_dataclass(
    Function, data_fields=["captured"], meta_fields=["program", "known"]
)


class Steps(NamedTuple):
    """A jaxpr without the values of its constants, which may be tracers."""

    arguments: list[Any]  # constants first
    equations: list[Any]
    results: list[Any]

    @staticmethod
    def of(jaxpr: "Jaxpr") -> "Steps":
        return Steps([*jaxpr.constvars, *jaxpr.invars], jaxpr.eqns, jaxpr.outvars)


class Program:
    """Operations on scalars and on captured arrays, which come first. Equal if it does the same."""

    def __init__(self, jaxpr: "Jaxpr", varies_over: frozenset[str] = frozenset()):
        self.varies_over = varies_over  # mesh axes, as the operations of a jaxpr are strict in them
        self.steps = Steps.of(jaxpr)
        self._text = str(jaxpr)
        self.dtypes = [v.aval.dtype for v in self.steps.arguments[: len(jaxpr.constvars)]]
        used = {id(v) for eqn in jaxpr.eqns for v in eqn.invars} | set(map(id, jaxpr.outvars))
        self.reads = [id(v) in used for v in jaxpr.invars]
        self._form = _form(self.steps)
        self._hash = hash(self._form)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Program) and self._form == other._form

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        """All that it does, where it captures nothing."""
        return self._text


def traced(
    name: str, function: Callable | None, score_dtype=None, operands: Any = ()
) -> Function | None:
    """A function that is an argument of `attention`.

    Args:
      name: of the argument.
      function: None, or what was given.
      score_dtype: of a score_mod's first argument; None for a mask_mod, which has none.
      operands: all arrays of the call, over whose mesh axes scores vary inside `jax.shard_map`.

    Raises:
      TypeError: it is no function, or gives something else than it should.
      ValueError: it gives more than one element for one pair, or has effects.
    """
    if function is None:
        return None
    scores = [] if score_dtype is None else [jnp.zeros((), score_dtype)]
    signature = f"({_INDICES})" if score_dtype is None else f"(score, {_INDICES})"
    kind = "bool" if score_dtype is None else "a float"
    needs = f"a function {signature} that gives {kind}"
    need(callable(function), name, kind_of(function), needs, TypeError)
    _check_signature(name, function, len(scores) + 4, needs)
    inputs = vary_alike([*scores, *[jnp.int32(0)] * 4], operands)
    # JAX keeps what it traced of a function, whose state may have changed: this one is new.
    trace = jax.make_jaxpr(lambda *x: function(*x), return_shape=True)
    try:
        closed, out = trace(*inputs)
    except Exception as error:  # of the function itself, which is the caller's
        error.add_note(f"{name}: got {_of_error(error, needs)}.")
        raise
    is_array = isinstance(out, jax.ShapeDtypeStruct)
    need(is_array, name, f"a function that gives {type(out).__name__}", needs, TypeError)
    wanted = jnp.bool_ if score_dtype is None else jnp.floating
    fits = jnp.issubdtype(out.dtype, wanted)
    need(fits, name, f"a function that gives {out.dtype}", needs, TypeError)
    need(
        out.shape == (),
        name,
        f"a function that gives shape {out.shape} for one pair of a query and a key",
        "one element: read an array that it captures by indices, such as array[h, q_idx, kv_idx]",
    )
    effects = sorted(set(_effects(closed.jaxpr)))
    need(
        not effects,
        name,
        f"a function with {', '.join(effects)}",
        "one without callbacks and side effects, as it runs part by part, and again for gradients",
    )
    if any(_inner_consts(closed.jaxpr)):
        steps, consts = Steps.of(closed.jaxpr), closed.consts
        inlined = lambda *x: applied(steps, (*consts, *x))
        closed = jax.make_jaxpr(inlined)(*inputs)
    return Function(
        Program(closed.jaxpr, varied_over(inputs)), tuple(map(jnp.asarray, closed.consts))
    )


def _of_error(error: Exception, needs: str) -> str:
    """What a function is that raises this, and what it needs to be."""
    if isinstance(
        error, jax.errors.TracerArrayConversionError | jax.errors.TracerIntegerConversionError
    ):
        return "a list or a NumPy array to index; needs jnp.asarray(array)"
    if isinstance(error, jax.errors.TracerBoolConversionError):
        words = "`if`, `and`, `or`, `not` or a < b < c"
        return f"a function with {words}; needs jnp.where, `&`, `|` and `~`"
    return f"a function that raises this, asked for one pair; needs {needs}"


def _check_signature(name: str, function: Callable, count: int, needs: str) -> None:
    """Raises a TypeError if the function is known not to take so many arguments."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # one of C may have none
        return
    try:
        signature.bind(*range(count))
    except TypeError as error:
        raise TypeError(f"{name}: got a function {signature}; needs {needs}") from error


def _effects(jaxpr: "Jaxpr") -> Iterator[str]:
    """Names of operations with effects on something outside; also of pure callbacks."""
    for eqn in jaxpr.eqns:
        inner = list(extended_core().jaxprs_in_params(eqn.params))
        for each in inner:
            yield from _effects(each)
        if "callback" in eqn.primitive.name or (eqn.effects and not inner):
            yield eqn.primitive.name


def _inner_consts(jaxpr: "Jaxpr") -> Iterator[bool]:
    """Of each call in a jaxpr whether it captured arrays of its own, as a nested jit does."""
    for eqn in jaxpr.eqns:
        inner = eqn.params.get("jaxpr") if eqn.primitive.name == "jit" else None
        if inner is not None:
            yield bool(inner.consts)
            yield from _inner_consts(inner.jaxpr)


# --- a program over a tile ------------------------------------------------------------------------


def _over_axes(function: Callable, arrays: tuple[jax.Array, ...]) -> jax.Array:
    """`function` of scalars, of each element of arrays that broadcast."""
    rank = arrays[0].ndim
    whole = [any(x.shape[axis] != 1 for x in arrays) for axis in range(rank)]
    for axis in reversed(range(rank)):
        if whole[axis]:
            function = jax.vmap(function, [0 if x.shape[axis] != 1 else None for x in arrays])
    ones = [[axis for axis, size in enumerate(x.shape) if size == 1] for x in arrays]
    result = function(*(jnp.squeeze(x, axis) for x, axis in zip(arrays, ones, strict=True)))
    return jnp.expand_dims(result, [axis for axis in range(rank) if not whole[axis]])


class _Value(NamedTuple):
    """A value of a program, and whether it varies from pair to pair."""

    x: Any
    varies: bool

    @property
    def is_floating(self) -> bool:
        return jnp.issubdtype(jnp.result_type(self.x), jnp.floating)


class _Pair(NamedTuple):
    """Of one pair, whether its result counts, or None, and its score, or None of a mask_mod."""

    visible: jax.Array | None
    score: jax.Array | None


def _results(steps: Steps, values: list[_Value], pair: _Pair) -> list[_Value]:
    """What they give of arguments, all of one pair."""
    known = dict(zip(steps.arguments, values, strict=True))
    literal = extended_core().Literal
    read = lambda v: _Value(v.val, False) if isinstance(v, literal) else known[v]
    for eqn in steps.equations:
        operands = list(map(read, eqn.invars))
        if eqn.primitive.name == "jit":
            inner = eqn.params["jaxpr"]
            consts = [_Value(x, False) for x in inner.consts]
            found = _results(Steps.of(inner.jaxpr), consts + operands, pair)
        else:
            varies = any(x.varies for x in operands)
            if varies and pair.visible is not None and eqn.primitive.name not in _SAFE:
                operands = [_replaced(eqn.primitive.name, x, pair.visible) for x in operands]
            if varies and pair.score is not None:
                out = _summed_wide(eqn, operands, pair.score)
            else:
                out = bound(eqn, [x.x for x in operands])
            found = [_Value(x, varies) for x in out]
        known.update(zip(eqn.outvars, found, strict=True))
    return list(map(read, steps.results))


def applied(steps: Steps, arguments: tuple[Any, ...]) -> jax.Array:
    """The result of the steps of a program of one pair: captured arrays, and what else it takes."""
    (result,) = _results(steps, [_Value(x, False) for x in arguments], _Pair(None, None))
    return jnp.asarray(result.x)


def replayed(function: Function, *inputs: jax.Array) -> jax.Array:
    """Its result of one pair, for a function that is traced around it.

    Calls stay calls, as kernels know some of them by name, such as divisions.
    """
    (result,) = _replayed(function.program.steps, (*function.captured, *inputs))
    return jnp.asarray(result)


def _replayed(steps: Steps, arguments: tuple[Any, ...]) -> list[Any]:
    known = dict(zip(steps.arguments, arguments, strict=True))
    literal = extended_core().Literal
    read = lambda v: v.val if isinstance(v, literal) else known[v]
    for eqn in steps.equations:
        operands = list(map(read, eqn.invars))
        is_call = eqn.primitive.name == "jit"
        found = _called_again(eqn, operands) if is_call else bound(eqn, operands)
        known.update(zip(eqn.outvars, found, strict=True))
    return list(map(read, steps.results))


def _called_again(eqn, operands: list[Any]) -> list[Any]:
    """What a call gives; a new one of the same name, as it may be traced for another mesh here."""
    inner = eqn.params["jaxpr"]

    def run(*operands):
        return _replayed(Steps.of(inner.jaxpr), (*inner.consts, *operands))

    run.__name__ = eqn.params["name"]
    return jax.jit(run)(*operands)


def soft_cap_of(program: Program) -> float | None:
    """c of a score_mod that is c * tanh(score / c); None of another."""
    if len(program.steps.arguments) != len(("score", *_INDICES.split(", "))):
        return None
    literal = extended_core().Literal
    (result,) = program.steps.results
    if isinstance(result, literal):
        return None
    made_of: dict[Any, Any] = {program.steps.arguments[0]: "score"}
    for eqn in program.steps.equations:
        operands = [float(v.val) if isinstance(v, literal) else made_of.get(v) for v in eqn.invars]
        name, (out, *_) = eqn.primitive.name, eqn.outvars
        if name == "convert_element_type" and eqn.invars[0].aval.dtype == out.aval.dtype:
            made_of[out] = operands[0]
        else:
            made_of[out] = name, *operands
    match made_of.get(result):
        case ("mul", float(cap), ("tanh", ("div", "score", float(other)))) | (
            "mul",
            ("tanh", ("div", "score", float(other))),
            float(cap),
        ):
            return cap if cap == other > 0 else None
    return None


OF_MESHES = ("reshard", "pvary", "pcast")  # operations that change no number


def bound(eqn, operands: list[Any]) -> list[Any]:
    """What an operation gives.

    A program that was traced inside `jax.shard_map` says where numbers vary. Where it is applied
    they may vary already; outside it that means nothing. So it is with the mesh that is set, onto
    which operations bring their scalars.
    """
    if eqn.primitive.name == "reshard":
        return operands
    if eqn.primitive.name in OF_MESHES and "axes" in eqn.params:
        manual = frozenset(jax.sharding.get_abstract_mesh().manual_axes)
        return list(vary_over(manual.intersection(eqn.params["axes"]), operands))
    out = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
    return out if eqn.primitive.multiple_results else [out]


# Linear operations, and those without a derivative: no product with 0 comes of them. dot_general is
# not one, but there a replacement would be as large as all its products.
_SAFE = {
    *("add", "add_any", "sub", "neg", "reduce_sum", "dot_general", "convert_element_type", "copy"),
    *("select_n", "max", "min", "floor", "ceil", "round", "sign", "is_finite"),
    *("eq", "ne", "lt", "le", "gt", "ge"),
    *("broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose", "concatenate"),
    *("slice", "dynamic_slice", "gather"),
}


def _replaced(name: str, value: _Value, visible: jax.Array) -> _Value:
    """A value that has a derivative where nothing is visible."""
    if not (value.varies and value.is_floating):
        return value
    # One half is inside of the domain of all elementwise functions but one.
    instead = jnp.asarray(2.0 if name == "acosh" else 0.5, value.x.dtype)
    return value._replace(x=jnp.where(visible, value.x, instead))


def _summed_wide(eqn, operands: list[_Value], score: jax.Array) -> list[Any]:
    """What an operation gives; gradients of what is the same for all pairs are sums in float32.

    They are sums over the pairs that read a number, which in bfloat16 would soon grow no more.
    """

    def of_pair(x, dtype):
        # To narrow before it is that of a pair would be to sum what is narrow.
        return (jnp.where(jnp.isnan(score), x, x) if x.size == 1 else x).astype(dtype)

    is_narrow = [
        x.is_floating and not x.varies and jnp.result_type(x.x).itemsize < 4 for x in operands
    ]
    values = [x.x for x in operands]
    if not any(is_narrow):
        return bound(eqn, values)
    dtypes = [jnp.result_type(x) for x in values]
    wide = [
        jnp.asarray(x, jnp.float32) if narrow else x
        for x, narrow in zip(values, is_narrow, strict=True)
    ]
    if eqn.primitive.name in ("gather", "dynamic_slice"):
        (out,) = bound(eqn, wide)
        return [of_pair(out, dtypes[0])]
    return bound(
        eqn,
        [
            of_pair(x, dtype) if narrow else x
            for x, dtype, narrow in zip(wide, dtypes, is_narrow, strict=True)
        ],
    )


# --- equality of programs -------------------------------------------------------------------------


def _form(x: Any) -> Any:
    """What can be hashed, and is equal for two jaxprs, or parameters, that mean the same."""
    core = extended_core()
    if isinstance(x, core.Jaxpr):
        return _form(Steps.of(x)), tuple(map(_Itself, x.consts))
    if isinstance(x, Steps):
        defined = x.arguments + [v for eqn in x.equations for v in eqn.outvars]
        numbers = {id(v): index for index, v in enumerate(defined)}
        name = lambda v: _form(v.val) if isinstance(v, core.Literal) else numbers[id(v)]
        equations = tuple(
            (
                eqn.primitive,
                tuple((name(v), v.aval) for v in eqn.invars),
                tuple(v.aval for v in eqn.outvars),
                _form(eqn.params),
            )
            for eqn in x.equations
        )
        return tuple(v.aval for v in x.arguments), equations, tuple(map(name, x.results))
    if isinstance(x, dict):
        return tuple((name, _form(x[name])) for name in sorted(x))
    if isinstance(x, tuple | list):
        return tuple(map(_form, x))
    if isinstance(x, np.ndarray | np.generic):
        return x.dtype, x.shape, x.tobytes()
    if isinstance(x, float):
        return repr(x)  # of NaN and -0.0 too
    try:
        hash(x)
    except TypeError:
        return _Itself(x)
    return type(x), x


class _Itself:
    """An object that is equal to itself alone."""

    def __init__(self, x: Any):
        self._x = x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self._x is other._x

    def __hash__(self) -> int:
        return id(self._x)
