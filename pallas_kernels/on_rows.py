"""Programs of users on tiles: each value as often as it varies.

That is once, once a row, once a column, or once a pair; and what does not depend on the columns is
computed once for all tiles of the same rows.
"""

from collections.abc import Callable, Collection, Sequence
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
    ):
        """
        Args:
          given: the arguments, where they do not vary by column.
          varying: positions of those that do.
          rows: of a tile.
          load: reads captured arrays, in one axis and as `as_captured` makes them, by their number
            and by places.
        """
        self._operations, self._rows, self._load = operations, rows, load
        self._rest: list[Operation] = []
        known = {n: Part(x) for n, x in operations.constants.items()}
        by_column = {operations.arguments[position] for position in varying}
        for position, number in enumerate(operations.arguments):
            if number not in by_column:
                known[number] = given[position]
        for number, floating in operations.floats.items():
            if number in by_column:
                by_column.add(floating)
            else:
                known[floating] = _in_float32(known[number])
        for operation in operations.operations:
            if by_column.intersection(operation.operands):
                by_column.update(operation.results)
                self._rest.append(operation)
            else:
                self._apply(operation, known, 0)
        self._known = known

    def evaluate(
        self, varying: dict[int, Part], width: int, floats: dict[int, Part] | None = None
    ) -> list[jax.Array]:
        """The results on a tile `(rows, width)`.

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
                known[floating] = _in_float32(x) if given is None else given
        for operation in self._rest:
            self._apply(operation, known, width)
        results = self._operations.results
        return [_spread(known[number], _WHOLE, self._rows, width) for number in results]

    def _apply(self, operation: Operation, known: dict[int, Part], width: int) -> None:
        equation = operation.equation
        parts = [known[n] for n in operation.operands]
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
        for number, x in zip(operation.results, out, strict=True):
            known[number] = like._replace(x=x)


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
