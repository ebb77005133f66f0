"""Where a score_mod reads the arrays that it captures, for their gradients.

Let x be one number that a score_mod reads. What the kernels give for it is dS * dscore/dx of all
pairs, summed over those for which x is the same whatever the array: over queries, keys, or pairs
of one distance. Which of these it is follows from the index of x. From the sums JAX goes on to the
array, as it differentiates the look-up itself (`looked_up`).
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_flash import functions
from jax_flash.sharding import vary_alike

_VIEWS = {
    *("dynamic_slice", "gather", "squeeze", "slice", "reshape", "broadcast_in_dim"),
    *("expand_dims", "transpose", "rev", "copy", *functions.OF_MESHES),
}
_CALLS = {"jit": "jaxpr", "closed_call": "call_jaxpr"}
_INDICES = 4


class Read(NamedTuple):
    """A number that a program reads, for each pair.

    Attributes:
      array: of which captured array.
      number: of the read among all of the program.
      kind: of which pairs it is the same but for batch entry and head: "heads", all of them;
        "columns", those of one key; "rows", of one query; "diagonals", of one kv_idx - q_idx.
      of_batch: whether it is not the same for all batch entries.
    """

    array: int
    number: int
    kind: str
    of_batch: bool


class _Form(NamedTuple):
    """How a value depends on q_idx and kv_idx.

    Attributes:
      steps: it is a function of steps[0] * q_idx + steps[1] * kv_idx; None: of more than one such.
      is_sum: it is that sum, and something constant.
      of_batch: it depends on b.
    """

    steps: tuple[int, int] | None = (0, 0)
    is_sum: bool = True
    of_batch: bool = False


class _Value(NamedTuple):
    x: Any
    form: _Form
    array: int | None = None  # of which captured array it is a view


class _Walk:
    """A program, operation by operation.

    Attributes:
      reads: `(array, form, value)` of each number that is read.
      lost: captured arrays of which something else is made.
    """

    def __init__(self, change: Callable[[int, Any], Any] = lambda number, x: x):
        """change: what stands in the place of a read of that number."""
        self.reads: list[tuple[int, _Form, Any]] = []
        self.lost: set[int] = set()
        self._change = change

    def result(self, program: functions.Program, captured: Sequence[Any], *others: Any) -> Any:
        """Of captured arrays, a score and four indices."""
        forms = [
            _Form(steps=None, is_sum=False),
            _Form(of_batch=True),
            _Form(),
            _Form(steps=(1, 0)),
            _Form(steps=(0, 1)),
        ]
        values = [self._viewed(_Value(x, _Form(), n)) for n, x in enumerate(captured)]
        values += list(map(_Value, others, forms))
        (found,) = self._results(program.steps, values)
        return found.x

    def _viewed(self, value: _Value) -> _Value:
        """A view, or where it is one element, that."""
        if value.array is None or jnp.shape(value.x) != ():
            return value
        self.reads.append((value.array, value.form, value.x))
        return _Value(self._change(len(self.reads) - 1, value.x), value.form)

    def _results(self, steps: Any, values: list[_Value]) -> list[_Value]:
        known = dict(zip(steps.arguments, values, strict=True))
        literal = functions.extended_core().Literal
        read = lambda v: _Value(v.val, _Form()) if isinstance(v, literal) else known[v]
        for equation in steps.equations:
            operands = list(map(read, equation.invars))
            name = equation.primitive.name
            inner = equation.params.get(_CALLS.get(name, ""))
            if inner is not None:
                consts = [_Value(x, _Form()) for x in inner.consts]
                found = self._results(functions.Steps.of(inner.jaxpr), consts + operands)
            else:
                out = functions.bound(equation, [value.x for value in operands])
                form = _form_of(equation, [value.form for value in operands])
                views = [value.array for value in operands if value.array is not None]
                array = views[0] if views and name in _VIEWS else None
                if array is None:
                    self.lost.update(views)
                found = [self._viewed(_Value(x, form, array)) for x in out]
            known.update(zip(equation.outvars, found, strict=True))
        return list(map(read, steps.results))


def _form_of(equation: Any, forms: list[_Form]) -> _Form:
    """That of what an operation gives."""
    of_batch = any(form.of_batch for form in forms)
    moving = [form for form in forms if form.steps != (0, 0)]
    if not moving:
        return _Form(of_batch=of_batch)
    name, out = equation.primitive.name, equation.outvars[0].aval
    if name in functions.OF_MESHES:
        return forms[0]
    are_sums = all(form.is_sum for form in forms) and out.shape == ()
    # Of float32 only where it is a difference of positions, which is exact.
    is_exact = out.dtype == jnp.int32 or (out.dtype == jnp.float32 and moving == forms)
    if are_sums and is_exact:
        rows, columns = zip(*(form.steps for form in forms if form.steps), strict=True)
        if name in ("add", "sub") and len(rows) == 2:
            sign = 1 if name == "add" else -1
            total = rows[0] + sign * rows[1], columns[0] + sign * columns[1]
            return _Form(steps=total, of_batch=of_batch)
        if name == "convert_element_type" and len(rows) == 1:
            return _Form(steps=(rows[0], columns[0]), of_batch=of_batch)
    directions = {_direction(form.steps) for form in moving}
    steps = directions.pop() if len(directions) == 1 else None
    return _Form(steps=steps, is_sum=False, of_batch=of_batch)


def _direction(steps: tuple[int, int] | None) -> tuple[int, int] | None:
    """The same for steps of which one is a function of the other."""
    if steps is None:
        return None
    divisor = math.gcd(steps[0], steps[1]) * (1 if steps > (0, 0) else -1)
    return steps[0] // divisor, steps[1] // divisor


_KINDS = {(0, 0): "heads", (0, 1): "columns", (1, 0): "rows", (1, -1): "diagonals"}


def reads_of(program: functions.Program) -> tuple[Read, ...]:
    """Those of all floating arrays that have no read of another kind."""
    walk, found = _Walk(), []
    jax.eval_shape(functools.partial(walk.result, program), *shapes_of(program))
    lost = set(walk.lost)
    for number, (array, form, value) in enumerate(walk.reads):
        steps = form.steps if form.steps in (None, (0, 0)) else _direction(form.steps)
        kind = None if steps is None else _KINDS.get(steps)
        if kind is None or not jnp.issubdtype(value.dtype, jnp.floating):
            lost.add(array)
        else:
            found.append(Read(array, number, kind, form.of_batch))
    return tuple(read for read in found if read.array not in lost)


def seeded(
    program: functions.Program, read: Read, seed: jax.Array, captured: Sequence[Any], *others: Any
) -> jax.Array:
    """A program's result, whose derivative by the seed is that by a read."""
    change = lambda number, x: _seeded(x, seed) if number == read.number else x
    return _Walk(change).result(program, captured, *others)


def looked_up(
    program: functions.Program,
    read: Read,
    lengths: tuple[int, int],
    captured: Sequence[jax.Array],
    batch_entries: jax.Array,
    heads: jax.Array,
) -> jax.Array:
    """`[B or 1, N, n]` float32: the numbers of a read, in the order of its sums.

    Args:
      lengths: of queries and keys.
      captured: floating ones in float32 at least, in which gradients are added up.
      batch_entries, heads: `[B]` and `[N]`, as the function counts them.
    """
    query_length, key_length = lengths
    if read.kind == "diagonals":
        distance = jnp.arange(1 - query_length, key_length, dtype=jnp.int32)
        rows, columns = jnp.maximum(-distance, 0), jnp.maximum(distance, 0)
    else:
        length = {"heads": 1, "columns": key_length, "rows": query_length}[read.kind]
        rows, columns = jnp.zeros(length, jnp.int32), jnp.arange(length, dtype=jnp.int32)
        if read.kind == "rows":
            rows, columns = columns, rows

    entries = batch_entries if read.of_batch else batch_entries[:1]
    entries, heads = (x.astype(jnp.int32) for x in (entries, heads))
    arguments = captured, jnp.float32(0.0), entries, heads, rows, columns
    captured, score, entries, heads, rows, columns = vary_alike(arguments)

    def one(batch, head, row, column):
        walk = _Walk()
        walk.result(program, captured, score, batch, head, row, column)
        return walk.reads[read.number][2].astype(jnp.float32)

    of_places = jax.vmap(one, (None, None, 0, 0))
    of_heads = jax.vmap(of_places, (None, 0, None, None))
    return jax.vmap(of_heads, (0, None, None, None))(entries, heads, rows, columns)


def shapes_of(program: functions.Program, *, as_they_are: bool = False) -> list[Any]:
    """Of captured arrays, then of a score and four indices.

    Narrow arrays as the float32 that kernels read, unless they are wanted as they are.
    """
    shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in program.steps.arguments]
    captured, others = shapes[: -_INDICES - 1], shapes[-_INDICES - 1 :]
    if not as_they_are:
        is_narrow = lambda x: jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
        captured = [x.update(dtype=jnp.float32) if is_narrow(x) else x for x in captured]
    return [captured, *others]


@jax.custom_jvp
def _seeded(x, seed):
    """x, whose derivative by the seed is 1."""
    del seed
    return x


@_seeded.defjvp
def _seeded_jvp(primals, tangents):
    x, _ = primals
    return x, tangents[1].astype(x.dtype)
