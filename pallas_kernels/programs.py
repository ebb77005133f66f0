"""Functions of users as kernels know them: operations, one after the other.

A program is a jaxpr of scalars: what a function makes of the indices of one pair of a query and a
key, and of its score. A kernel evaluates it for a tile (`on_rows.py`). What would take it long is
replaced here by what gives the same in less time.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from pallas_kernels.replacements import DIVISIONS, OTHERS, divisions_of_jax, names_of, tanh

# What Mosaic GPU lowers of arrays in registers, and gives the same results as XLA.
_ELEMENTWISE = {
    *("add", "sub", "mul", "div", "rem", "max", "min", "clamp", "neg", "sign", "abs", "square"),
    *("and", "or", "xor", "not", "eq", "ne", "lt", "le", "gt", "ge", "select_n"),
    *("convert_element_type", "integer_pow", "exp", "exp2", "log", "log2", "sqrt", "rsqrt"),
    *("tanh", "logistic", "sin", "cos", "erf", "one_minus_square", "add_any"),
}
_CALLS = {"jit": "jaxpr", "closed_call": "call_jaxpr", "custom_jvp_call": "call_jaxpr"}
_DTYPES = (jnp.bool_, jnp.int32, jnp.uint32, jnp.float32)
NARROW = (jnp.bfloat16, jnp.float16)  # read as float32, and of no use but to become that
CAPTURED = (jnp.bool_, jnp.int32, jnp.float32, *NARROW)  # dtypes of captured arrays
_INDICES = 4  # of a program, its last arguments
_EXACT = 2**23  # integers below, and their sums and differences, are in float32 what they are


class Operation(NamedTuple):
    """One equation; operands and results are numbers of values.

    Attributes:
      instead: what gives the result of values of one shape, where it is not the equation.
      array: number of the captured array that is read at the place that this gives, or None.
    """

    equation: Any
    operands: tuple[int, ...]
    results: tuple[int, ...]
    instead: Callable[..., jax.Array] | None = None
    array: int | None = None


class _View(NamedTuple):
    """A captured array of which some axes are read at an index.

    Attributes:
      array: its number.
      shape: of all axes.
      dtype: of its elements.
      indices: number of the value, or None for an axis that is whole, of each axis of the array.
      axes: of the view, which of the array they are.
    """

    array: int
    shape: tuple[int, ...]
    dtype: Any
    indices: tuple[int | None, ...]
    axes: tuple[int, ...]


class Operations:
    """The operations of a program, those of calls in their place.

    Attributes:
      captured: how many arrays it reads, the first of its arguments. Then may come a score, and
        then indices.
      arguments: numbers of the values that it is given; those of arrays mean nothing.
      constants: numbers of values that are known, and these.
      floats: numbers of indices that are wanted in float32 too, and of what they are there.
      orders: of captured arrays, their axes in the order in which they are to be in memory.
      operations: in order, without those on which no result depends.
      results: numbers of the values that it gives.
    """

    def __init__(self, steps: Any, *, has_score: bool = False, results: slice = slice(None)):
        """
        Args:
          has_score: a score comes before the indices.
          results: which of the program's are wanted.
        """
        self.constants: dict[int, Any] = {}
        self.floats: dict[int, int] = {}
        self.orders: dict[int, tuple[int, ...]] = {}
        self._count = 0
        operations: list[Operation] = []
        self.arguments = [self._new() for _ in steps.arguments]
        self.captured = len(steps.arguments) - _INDICES - has_score
        self._counting = set(self.arguments[-_INDICES:])  # numbers that are never negative
        # Where numbers come from that float32 holds exactly: none, or an operation of such.
        self._exact: dict[int, Operation | None] = dict.fromkeys(self.arguments[-_INDICES:])
        self._never: set[int] = set()  # numbers of bools that are false
        self._views: dict[int, _View] = {}
        self._narrow: set[int] = set()  # numbers that are float32 in the place of a narrow dtype
        self._most: dict[int, int] = {}  # numbers that are never above what stands there
        # Numbers that depend on the query, and on the key; and those that do on the score.
        self._varying = tuple({number} for number in self.arguments[-2:])
        self._of_score = {self.arguments[self.captured]} if has_score else set()
        for n, v in enumerate(steps.arguments[: self.captured]):
            shape, axes = v.aval.shape, tuple(range(len(v.aval.shape)))
            view = _View(n, shape, v.aval.dtype, (None,) * len(shape), axes)
            self._views[self.arguments[n]] = view
        given = dict(zip(steps.arguments, self.arguments, strict=True))
        found = self._append(operations, steps.equations, steps.results[results], given)
        self.results = tuple(self._loaded(operations, number) for number in found)
        needed, kept = set(self.results), []
        for operation in reversed(operations):
            if needed.intersection(operation.results):
                needed.update(operation.operands)
                kept.append(operation)
        self.operations = kept[::-1]

    def _new(self) -> int:
        self._count += 1
        return self._count - 1

    def _append(self, operations, equations, results, known) -> list[int]:
        def number(v: Any) -> int:
            if not isinstance(v, Literal):
                return known[v]
            dtype: Any = v.aval.dtype  # type: ignore[attr-defined]
            self.constants[constant := self._new()] = np.asarray(v.val, dtype)
            if v.val >= 0:
                self._counting.add(constant)
            if dtype == jnp.int32 and abs(v.val) < _EXACT:
                self._exact[constant] = None
            return constant

        for equation in equations:
            operands = tuple(map(number, equation.invars))
            if (same := self._same(equation, operands)) is not None:
                known = known | {equation.outvars[0]: same}
                continue
            if _CALLS.get(equation.primitive.name) is None:  # a view ends where it is one element
                operands = tuple(self._loaded(operations, n) for n in operands)
            if (instead := self._division(equation, operands)) is not None:
                found = [self._new()]
                operands = tuple(self._loaded(operations, n) for n in operands)
                operations.append(Operation(equation, operands, tuple(found), instead))
                self._note_varying(operations[-1])
                if operands[0] in self._counting:
                    self._counting.update(found)
                known = known | dict(zip(equation.outvars, found, strict=True))
                continue
            if operands and operands[0] in self._narrow and _to_float32(equation, *NARROW):
                known = known | {equation.outvars[0]: operands[0]}
                continue
            if operands and operands[0] in self._exact and _to_float32(equation, jnp.int32):
                floating = self._as_float(operations, equation, operands[0])
                known = known | {equation.outvars[0]: floating}
                continue
            name = _CALLS.get(equation.primitive.name)
            inner = equation.params.get(name) if name else None
            if inner is None or not hasattr(inner, "jaxpr"):
                found = [self._new() for _ in equation.outvars]
                operands, instead = self._faster(equation, operands)
                operations.append(Operation(equation, operands, tuple(found), instead))
                self._note(operations[-1])
            else:
                consts = []
                for x in inner.consts:
                    self.constants[constant := self._new()] = x
                    consts.append(constant)
                jaxpr = inner.jaxpr
                given = dict(
                    zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *operands], strict=True)
                )
                found = self._append(operations, jaxpr.eqns, jaxpr.outvars, given)
            known = known | dict(zip(equation.outvars, found, strict=True))
        return [number(v) for v in results]

    def _note(self, operation: Operation) -> None:
        """What there is to know of a result before run time."""
        self._note_varying(operation)
        name, operands = operation.equation.primitive.name, operation.operands
        for constant in (self.constants.get(n) for n in operands if name == "min"):
            if constant is not None and constant.dtype == jnp.int32:
                self._most[operation.results[0]] = int(constant)
        counting = [n in self._counting for n in operands]
        if (name == "max" and any(counting)) or (name in ("add", "min") and all(counting)):
            self._counting.update(operation.results)
        if not all(n in self._exact for n in operands):
            return
        is_sum = name in ("add", "sub") and all(self._exact[n] is None for n in operands)
        if is_sum or name in ("abs", "max", "min"):
            self._exact[operation.results[0]] = operation

    def _note_varying(self, operation: Operation) -> None:
        for some in (*self._varying, self._of_score):
            if not some.isdisjoint(operation.operands):
                some.update(operation.results)

    def _as_float(self, operations: list[Operation], equation, number: int) -> int:
        """A number that float32 holds exactly, in float32: made of what it is made of.

        A conversion is as slow as an exponential. Indices are converted once a row or a column,
        their difference would be once a pair.
        """
        operation = self._exact[number]
        if operation is None and number in self.arguments:
            return self.floats.setdefault(number, self._new())
        found = self._new()
        if operation is None:
            operations.append(Operation(equation, (number,), (found,)))
        else:
            operands = (self._as_float(operations, equation, n) for n in operation.operands)
            operations.append(operation._replace(operands=tuple(operands), results=(found,)))
        self._note_varying(operations[-1])
        return found

    def _faster(self, equation, operands) -> tuple[tuple[int, ...], Callable | None]:
        """Operands of an equation, and what gives its result in less time, None if nothing does."""
        name = equation.primitive.name
        if equation.outvars[0].aval.dtype != jnp.float32:
            return operands, None
        # Of positions a quotient is to be exact, as they may be compared with it.
        if name == "div" and operands[0] in self._of_score and operands[1] in self.constants:
            divisor = self.constants[operands[1]]
            if _has_reciprocal(divisor):
                reciprocal = float(np.float32(1.0) / np.float32(divisor))
                return operands[:1], lambda x: x * reciprocal
        if name == "tanh" and operands[0] in self._of_score:
            return operands, tanh
        return operands, OTHERS.get(name)

    def _same(self, equation, operands) -> int | None:
        """The number of the value that an equation gives, where that is known without it.

        Of a view, and of what JAX makes of an index: below 0 it would count from the end.
        """
        name, first = equation.primitive.name, operands[0] if operands else -1
        # Of scalars: derivatives have it where a mesh is set, and numbers inside `jax.shard_map`.
        # What has no derivative is left out of the program that is the derivative.
        if name in ("reshard", "pvary", "pcast", "stop_gradient"):
            return first
        if name == "select_n" and first in self._never:
            return operands[1]
        if name == "lt" and first in self._counting and not np.any(self._constant(operands[1])):
            self._never.add(found := self._new())
            self.constants[found] = np.asarray(False)
            return found
        if first not in self._views:
            return None
        if name == "squeeze":
            return self._squeezed(first, equation.params["dimensions"])
        if name == "dynamic_slice":
            return self._sliced(first, operands[1:], equation.params["slice_sizes"])
        if name == "slice" and equation.params["strides"] is None:
            starts = list(map(self._counted, equation.params["start_indices"]))
            return self._sliced(first, starts, equation.outvars[0].aval.shape)
        return None

    def _constant(self, number: int) -> np.ndarray:
        """Of a value, 1 of one that is not known."""
        return np.asarray(self.constants.get(number, 1))

    def _squeezed(self, number: int, dimensions) -> int:
        view = self._views[number]
        axes = tuple(axis for n, axis in enumerate(view.axes) if n not in dimensions)
        indices = list(view.indices)
        for dropped in {*view.axes} - {*axes}:
            if indices[dropped] is None:  # an axis of 1
                indices[dropped] = self._counted(0)
        self._views[found := self._new()] = view._replace(axes=axes, indices=tuple(indices))
        return found

    def _counted(self, index: int) -> int:
        """The number of an index that is known."""
        self.constants[number := self._new()] = np.asarray(index, np.int32)
        self._counting.add(number)
        return number

    def _sliced(self, number: int, starts, sizes) -> int | None:
        view, indices = self._views[number], list(self._views[number].indices)
        for axis, start, size in zip(view.axes, starts, sizes, strict=True):
            if indices[axis] is None and size == 1:
                indices[axis] = start
            elif size != (1 if indices[axis] is not None else view.shape[axis]):
                return None
        self._views[found := self._new()] = view._replace(indices=tuple(indices))
        return found

    def _loaded(self, operations: list[Operation], number: int) -> int:
        """A value, or where it is a view of one element, that element."""
        view = self._views.get(number)
        if view is None or view.axes or view.dtype not in CAPTURED:
            return number
        operands = tuple(n for n in view.indices if n is not None)
        counting = tuple(n in self._counting for n in operands)
        is_within = tuple(
            self._most.get(n, size) < size for n, size in zip(operands, view.shape, strict=True)
        )
        # What varies the most stands side by side: lanes of a warp then read few lines.
        varying = [sum(n in some for some in self._varying) for n in operands]
        by_variation = sorted(range(len(operands)), key=lambda axis: varying[axis])
        order = self.orders.setdefault(view.array, tuple(by_variation))

        def place(*indices):
            """Of the array in one axis; an index is one within, as in XLA."""
            found = jnp.int32(0)
            for axis in order:
                index, size = indices[axis], view.shape[axis]
                if not is_within[axis]:
                    index = jnp.minimum(index, size - 1)
                if not counting[axis]:
                    index = jnp.maximum(index, 0)
                found = found * size + index
            return found

        found = self._new()
        operations.append(Operation(view, operands, (found,), place, view.array))
        self._note_varying(operations[-1])
        if view.dtype in NARROW:
            self._narrow.add(found)
        return found

    def _division(self, equation, operands) -> Callable[..., jax.Array] | None:
        """What does a division of integers by a number above 0 in fewer steps than JAX's own.

        JAX's floor_divide and remainder are a dozen, as a divisor may be negative.
        """
        if equation.primitive.name != "jit" or equation.params["name"] not in divisions_of_jax():
            return None
        name, (operand, divisor) = equation.params["name"], (*operands, -1)[:2]
        number = self.constants.get(divisor)
        is_of_integers = number is not None and number.dtype == np.int32 and number > 0
        if (
            not is_of_integers
            or names_of(equation.params["jaxpr"].jaxpr) != divisions_of_jax()[name]
        ):
            return None
        return DIVISIONS[name, operand in self._counting]

    @property
    def reads_pairs(self) -> bool:
        """Whether it reads an array at a place of its own for each pair."""
        return any(
            operation.array is not None
            and not any(some.isdisjoint(operation.operands) for some in self._varying)
            for operation in self.operations
        )

    def unsupported(self) -> str | None:
        """Why no kernel can compute them, None if one can."""
        for operation in self.operations:
            if operation.instead is not None:
                continue
            equation = operation.equation
            name = equation.primitive.name
            views = [self._views[n] for n in operation.operands if n in self._views]
            for view in views:
                shape = list(view.shape)
                return f"{name} of a captured array {shape} of {view.dtype}, not of one element"
            if name not in _ELEMENTWISE:
                return f"{name} is none of the operations that kernels know"
            avals: list[Any] = [v.aval for v in (*equation.invars, *equation.outvars)]
            for aval in avals:
                if aval.dtype not in _DTYPES:
                    return f"{name} of {aval.dtype}, of which kernels know no operations"
                if aval.shape != ():
                    return f"{name} of an array {list(aval.shape)} for each pair"
            kinds = [aval.dtype.kind for aval in (avals[0], avals[-1])]
            if name == "convert_element_type" and kinds[0] == "f" and kinds[1] != "f":
                return "it rounds a float to an integer, or to bool, which kernels do not"
            if name == "convert_element_type" and kinds[0] != "b" and kinds[1] == "b":
                return "it takes a number for a bool, which kernels do not: compare it with 0"
            if name == "rem" and kinds[1] == "f":
                return "it takes a remainder of floats, which kernels do not"
            if name == "integer_pow" and equation.params["y"] < 2:
                return f"a power {equation.params['y']}"
            if name == "select_n" and (len(equation.invars) != 3 or kinds[0] != "b"):
                return f"a choice of {len(equation.invars) - 1} by {avals[0].dtype}"
        return None


def _to_float32(equation, *dtypes) -> bool:
    """Whether it converts one of these dtypes to float32."""
    if equation.primitive.name != "convert_element_type":
        return False
    return equation.invars[0].aval.dtype in dtypes and equation.outvars[0].aval.dtype == jnp.float32


def _has_reciprocal(divisor) -> bool:
    """Whether it is one of the float32 numbers whose reciprocal is one."""
    return 2.0**-126 <= abs(float(divisor)) <= 2.0**126
