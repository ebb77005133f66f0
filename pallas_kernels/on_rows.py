"""Programs of users on tiles: each value as often as it varies.

That is once, once a row, once a column, or once a pair; and what does not depend on the columns is
computed once for all tiles of the same rows.
"""

import functools
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.problem import Problem
from pallas_kernels.programs import NARROW, Operation, Operations


class Part(NamedTuple):
    """A value on a tile: a scalar, `(rows,)`, `(columns,)` or `(rows, columns)`."""

    x: Any
    by_row: bool = False
    by_column: bool = False


class Sum(NamedTuple):
    """A float32 value on a tile: the score, if any, a factor times positions, and another part.

    Positions are whole numbers, so that it is exact to add up in any order what is made of them
    once a row and once a column: one addition a pair. All else stays as the program has it, as what
    cancels there is to cancel here.

    Attributes:
      scalar, row, column: of positions, in the shapes of `Part`; None of what they have not.
      factor: of positions, a scalar; None for 1.
      other: None, or what is added to the score beside them.
      has_score: whether the score is added.
      exactly: gives the value as the program has it; None of positions with a factor of 1.
    """

    scalar: Any = None
    row: Any = None
    column: Any = None
    factor: Any = None
    other: Part | None = None
    has_score: bool = False
    exactly: Callable[[], Part] | None = None

    @property
    def has_positions(self) -> bool:
        return any(x is not None for x in self[:3])

    def positions(self, rows: int, width: int) -> Part:
        """Added up."""
        like = Part(None, by_row=self.row is not None, by_column=self.column is not None)
        of_row = self.row
        if self.scalar is not None:
            of_row = self.scalar if of_row is None else of_row + self.scalar
        parts = Part(of_row, by_row=like.by_row), Part(self.column, by_column=True)
        there = [_spread(x, like, rows, width) for x in parts if x.x is not None]
        return like._replace(x=functools.reduce(operator.add, there))

    def negative(self) -> "Sum":
        """Of positions."""
        if self.factor is not None:
            return self._replace(factor=-self.factor)
        scalar, row, column = (x if x is None else -x for x in self[:3])
        return self._replace(scalar=scalar, row=row, column=column)


def _in_sum(name: str, operands: list[Part | Sum]) -> Sum | None:
    """What an operation gives of float32 values; None where that is not kept as a sum."""
    first, *others = operands
    if name == "neg":
        return first.negative() if isinstance(first, Sum) and not first.has_score else None
    if name == "mul":
        one, factor = operands if isinstance(first, Sum) else operands[::-1]
        if not isinstance(one, Sum) or one.has_score:
            return None
        if isinstance(factor, Sum) or factor.by_row or factor.by_column:
            return None
        return one._replace(factor=factor.x if one.factor is None else one.factor * factor.x)
    if name not in ("add", "sub"):
        return None
    (second,) = others
    if isinstance(second, Sum) and second.has_score:
        if name == "sub":
            return None
        first, second = second, first
    if not isinstance(first, Sum):
        return None
    if name == "sub":
        second = second.negative() if isinstance(second, Sum) else second._replace(x=-second.x)
    if first.has_score:
        return _beside_score(first, second)
    if not isinstance(second, Sum) or any(x.factor is not None for x in (first, second)):
        return None
    pairs = ([x for x in both if x is not None] for both in zip(first[:3], second[:3], strict=True))
    scalar, row, column = (functools.reduce(operator.add, both) if both else None for both in pairs)
    return Sum(scalar, row, column)


def _beside_score(first: Sum, second: Part | Sum) -> Sum | None:
    """The sum of one with a score and something else; None where it has such a thing already."""
    if isinstance(second, Part):
        return None if first.other is not None else first._replace(other=second)
    if first.has_positions or second.has_score:
        return None
    scalar, row, column, factor, *_ = second
    return first._replace(scalar=scalar, row=row, column=column, factor=factor)


def _is_float32(value: Part | Sum) -> bool:
    return isinstance(value, Sum) or jnp.result_type(value.x) == jnp.float32


class OnRows:
    """A program on tiles of the same rows and of different columns.

    What does not depend on the columns is computed once.
    """

    def __init__(
        self,
        operations: Operations,
        given: Sequence[Part],
        varying: Collection[int],
        rows: int,
        load: Callable[[int, Part], jax.Array],
        floats: dict[int, Sum] | None = None,
    ):
        """
        Args:
          given: the arguments, where they do not vary by column.
          varying: positions of those that do.
          rows: of a tile.
          load: reads captured arrays, in one axis and as `as_captured` makes them, by their number
            and by places.
          floats: indices in float32, by their position, where sums are to be kept; None for none.
        """
        self._operations, self._rows, self._load = operations, rows, load
        self._keeps_sums = floats is not None
        self._rest: list[Operation] = []
        known: dict[int, Part | Sum] = {n: Part(x) for n, x in operations.constants.items()}
        by_column = {operations.arguments[position] for position in varying}
        for position, number in enumerate(operations.arguments):
            if number not in by_column:
                known[number] = given[position]
        for number, floating in operations.floats.items():
            if number in by_column:
                by_column.add(floating)
            else:
                in_sum = (floats or {}).get(operations.arguments.index(number))
                known[floating] = in_sum or _in_float32(self.exact(known[number], 0))
        for operation in operations.operations:
            if by_column.intersection(operation.operands):
                by_column.update(operation.results)
                self._rest.append(operation)
            else:
                self._apply(operation, known, 0)
        self._known = known

    def evaluate(self, varying: dict[int, Part], width: int) -> list[jax.Array]:
        """The results on a tile `(rows, width)`; arguments as for `parts_of`."""
        return [self.whole(x, width) for x in self.parts_of(varying, width)]

    def whole(self, value: Part | Sum, width: int) -> jax.Array:
        """A value on a tile, as the program has it."""
        return _spread(self.exact(value, width), _WHOLE, self._rows, width)

    def parts_of(
        self,
        varying: Mapping[int, Part | Sum],
        width: int,
        *,
        floats: Mapping[int, Sum] | None = None,
    ) -> list[Part | Sum]:
        """The results, each as it varies.

        Args:
          varying: the arguments that vary by column, by their position.
          floats: indices among them in float32, where that has been made before.
        """
        known = dict(self._known)
        for position, x in varying.items():
            number = self._operations.arguments[position]
            known[number] = x
            if (floating := self._operations.floats.get(number)) is not None:
                given = (floats or {}).get(position)
                known[floating] = given or _in_float32(self.exact(x, width))
        for operation in self._rest:
            self._apply(operation, known, width)
        return [known[number] for number in self._operations.results]

    def _apply(self, operation: Operation, known: dict[int, Part | Sum], width: int) -> None:
        operands = [known[n] for n in operation.operands]
        is_plain = operation.instead is None and operation.array is None
        if self._keeps_sums and is_plain and all(map(_is_float32, operands)):
            found = _in_sum(operation.equation.primitive.name, operands)
            if found is not None:
                if found.has_score or found.factor is not None:
                    exactly = functools.cache(lambda: self._computed(operation, operands, width)[0])
                    found = found._replace(exactly=exactly)
                known[operation.results[0]] = found
                return
        computed = self._computed(operation, operands, width)
        known.update(zip(operation.results, computed, strict=True))

    def exact(self, value: Part | Sum, width: int) -> Part:
        """A value as the program has it."""
        if not isinstance(value, Sum):
            return value
        return self.positions(value, width) if value.exactly is None else value.exactly()

    def positions(self, value: Sum, width: int) -> Part:
        """Those of a sum."""
        return value.positions(self._rows, width)

    def _computed(self, operation: Operation, operands: list[Part | Sum], width: int) -> list[Part]:
        """The results, as the program has them."""
        equation, parts = operation.equation, [self.exact(x, width) for x in operands]
        like = Part(None, any(x.by_row for x in parts), any(x.by_column for x in parts))
        values = _varied_alike([_spread(x, like, self._rows, width) for x in parts])
        if operation.instead is not None:
            out = [operation.instead(*values)]
        else:
            params = equation.primitive.get_bind_params(equation.params)
            out = equation.primitive.bind(*values, **params)
            out = out if equation.primitive.multiple_results else [out]
        if operation.array is not None:
            (place,) = out
            x = self._load(operation.array, like._replace(x=place))
            out = [x != 0 if equation.dtype == jnp.bool_ else x]
        return [like._replace(x=x) for x in out]


def _varied_alike(values: list[jax.Array]) -> list[jax.Array]:
    """The same, said to vary over the same mesh axes: else no operation inside `jax.shard_map`.

    In kernels nothing is said to.
    """
    own = [jax.typeof(x).manual_axis_type.varying for x in values]
    axes = frozenset().union(*own)
    if not axes:
        return values
    pairs = zip(values, own, strict=True)
    return [lax.pcast(x, tuple(sorted(axes - has)), to="varying") for x, has in pairs]


def _in_float32(part: Part) -> Part:
    return part._replace(x=jnp.asarray(part.x).astype(jnp.float32))


_WHOLE = Part(None, by_row=True, by_column=True)


def as_captured(operations: Operations, captured: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """What a program captures as kernels read it: in one axis, of int32 or float32."""
    wider = {jnp.dtype(jnp.bool_): jnp.int32} | {jnp.dtype(x): jnp.float32 for x in NARROW}

    def as_read(number: int, x: jax.Array) -> jax.Array:
        x = x.transpose(operations.orders.get(number, range(x.ndim)))
        return x.astype(wider.get(x.dtype, x.dtype)).reshape(-1)

    return tuple(as_read(*numbered) for numbered in enumerate(captured))


def entry_of(ref: Any, batch: jax.Array, problem: Problem) -> Any:
    """The place of a batch entry along the first axis, which may be shorter, as of `Elements`."""
    entries = ref.shape[0]
    return 0 if entries == 1 else lax.div(batch, jnp.int32(problem.batch // entries))


def _spread(part: Part, like: Part, rows: int, width: int) -> jax.Array:
    """A value as often as another one varies."""
    if (part.by_row, part.by_column) == (like.by_row, like.by_column):
        return jnp.asarray(part.x)
    if like.by_row and like.by_column:
        shape: tuple[int, ...] = (rows, width)
        axes = [0] if part.by_row else [1] if part.by_column else []
    else:
        shape, axes = ((rows,) if like.by_row else (width,)), []
    return lax.broadcast_in_dim(jnp.asarray(part.x), shape, axes)
