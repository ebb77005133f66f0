"""Programs of users on tiles: each value as often as it varies.

That is once, once a row, once a column, or once a pair; and what does not depend on the columns is
computed once for all tiles of the same rows.
"""

import functools
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
    """A float32 value on a tile as a sum of what varies in different ways, None of what it has not.

    Most of what depends on two positions adds and scales what depends on each of them: so it is one
    addition a pair.

    Attributes:
      scalar, row, column, pair: in the shapes of `Part`.
      exactly: gives the value as the program has it, for what may jump where it changes by little.
        None where to add up is exact, as it is of positions.
      has_score: the score is one more summand.
    """

    scalar: Any = None
    row: Any = None
    column: Any = None
    pair: Any = None
    exactly: Callable[[], Part] | None = None
    has_score: bool = False

    @property
    def is_nothing(self) -> bool:
        return all(x is None for x in self[:4])

    def times(self, factor: float) -> "Sum":
        """The summands but for a score, times a number."""
        parts: list = [x if x is None or factor == 1.0 else x * factor for x in self[:4]]
        return Sum(*parts)

    def with_row(self, row: jax.Array) -> "Sum":
        return self._replace(row=row if self.row is None else self.row + row)

    def in_part(self, rows: int, width: int) -> Part:
        """Added up, but for a score."""
        of_rows = [x for x in (self.scalar, self.row) if x is not None]
        parts = [
            Part(sum(of_rows[1:], of_rows[0]) if of_rows else None, by_row=self.row is not None),
            Part(self.column, by_column=True),
            Part(self.pair, by_row=True, by_column=True),
        ]
        first, *others = parts = [x for x in parts if x.x is not None]
        like = Part(None, any(x.by_row for x in parts), any(x.by_column for x in parts))
        total = _spread(first, like, rows, width)
        for part in others:
            total += _spread(part, like, rows, width)
        return like._replace(x=total)


def _is_exact(name: str, operands: list[Part | Sum]) -> bool:
    """Whether an operation gives a sum of positions."""
    are_exact = all(isinstance(x, Sum) and x.exactly is None for x in operands)
    return are_exact and name in ("neg", "sub", "add")


def _as_sum(value: Part | Sum) -> Sum:
    if isinstance(value, Sum):
        return value
    name = ("scalar", "column", "row", "pair")[2 * value.by_row + value.by_column]
    return Sum(**{name: value.x})


def _in_sum(name: str, operands: list[Part | Sum]) -> Sum | None:
    """What an operation gives of float32 values; None where it does not add or scale."""
    sums: list[tuple] = [_as_sum(x)[:4] for x in operands]
    scores = [isinstance(x, Sum) and x.has_score for x in operands]
    if all(scores) or (any(scores) and not (name == "add" or (name == "sub" and scores[0]))):
        return None
    if name in ("neg", "sub"):
        sums[-1] = tuple(x if x is None else -x for x in sums[-1])
    if name in ("neg", "sub", "add", "add_any"):
        together = ([x for x in both if x is not None] for both in zip(*sums, strict=True))
        parts: list = [sum(both[1:], both[0]) if both else None for both in together]
        return Sum(*parts)._replace(has_score=any(scores))
    if name == "mul":
        (factor, *others), one = sorted(sums, key=lambda x: any(y is not None for y in x[1:]))
        if all(x is None for x in others):
            scaled: list = [x if x is None else x * factor for x in one]
            return Sum(*scaled)
    return None


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

    def evaluate(self, varying: dict[int, Part], width: int, **options) -> list[jax.Array]:
        """The results on a tile `(rows, width)`; arguments as for `parts_of`."""
        return [self.whole(x, width) for x in self.parts_of(varying, width, **options)]

    def whole(self, value: Part | Sum, width: int) -> jax.Array:
        """A value, or a sum without a score, on a tile."""
        part = value.in_part(self._rows, width) if isinstance(value, Sum) else value
        return _spread(part, _WHOLE, self._rows, width)

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
            name = operation.equation.primitive.name
            found = _in_sum(name, operands)
            is_sum = found is not None and sum(x is not None for x in found[:4]) > 1
            if found is not None and (is_sum or found.has_score):
                if not _is_exact(name, operands):
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
        return value.in_part(self._rows, width) if value.exactly is None else value.exactly()

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
