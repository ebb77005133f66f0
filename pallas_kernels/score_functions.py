"""Scores that are functions: `score_mod` inside a kernel, and its derivative by the score.

A logit is what the function makes of problem.scale * q.k and of indices, before what hides keys.
Each thread evaluates it for its own elements (`on_rows.py`), some columns at a time. The backward
evaluates it again, together with its slope, the derivative by the score: both are results of one
program, which JAX has differentiated. A function that adds to the score has a slope of 1, and no
code for it.

Accumulators of logits begin at 0, since LSE / scale would be part of the score.
"""

import dataclasses
import functools
import operator
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np

from pallas_kernels.interpret import interpreting
from pallas_kernels.on_rows import OnRows, Part, Sum, entry_of
from pallas_kernels.problem import LOG2E
from pallas_kernels.programs import Operations
from pallas_kernels.ptx.compiler import fresh_rows
from pallas_kernels.ptx.loads import load_at
from pallas_kernels.ptx.masks import column_numbers

_ROWS = 64  # of a tile
_GROUP, _SHORT_GROUP = 16, 8  # columns that are evaluated together; where registers are short


@dataclasses.dataclass(frozen=True)
class ScoreRead:
    """A number that a score function reads of an array, for the gradient of that.

    Attributes:
      kind: for which pairs it is the same, of `bias_gradient_pieces.Pieces`.
      program: as of a `ScoreFunction`, with the derivative by that number.
    """

    kind: str
    program: Any


@dataclasses.dataclass(frozen=True)
class ScoreFunction:
    """A score function as kernels know it.

    Attributes:
      program: what it computes of captured arrays, a score and indices, and the derivative of that
        by the score. It can be hashed, and is equal for functions that do the same.
      reads: whatever of captured arrays may have a gradient.
    """

    program: Any
    reads: tuple[ScoreRead, ...] = ()

    @functools.cached_property
    def value(self) -> Operations:
        """What it computes."""
        return Operations(self.program.steps, has_score=True, results=slice(1))

    @functools.cached_property
    def value_and_slope(self) -> Operations:
        return Operations(self.program.steps, has_score=True)

    @functools.cached_property
    def adds(self) -> bool:
        """Whether the slope is 1 everywhere."""
        constant = self.value_and_slope.constants.get(self.value_and_slope.results[1])
        return constant is not None and bool(np.all(constant == 1.0))

    @property
    def reads_numbers(self) -> bool:
        """Whether it reads the batch entry or the head."""
        return any(self.program.reads[-4:-2])

    @property
    def operand_count(self) -> int:
        """How many operands of kernels it has."""
        return int(self.reads_numbers) + self.value.captured


def sloped(weights: jax.Array, slope: jax.Array) -> jax.Array:
    """Weights times slopes, 0 where there is no weight: a slope may be NaN there."""
    return jnp.where(weights == 0.0, 0.0, weights * slope)


@dataclasses.dataclass(frozen=True)
class ScoreRefs:
    """The function of a problem that has one, inside a kernel.

    Attributes:
      problem: static description.
      refs: of `Elements.scores`, in global memory.
      transposed: tiles are of keys by queries.
    """

    problem: Any
    refs: tuple[Any, ...]
    transposed: bool = False

    @classmethod
    def split(cls, problem: Any, refs, *, transposed: bool = False) -> "tuple[ScoreRefs, list]":
        """Those that a kernel's refs begin with, and the other refs."""
        count = problem.score_function.operand_count if problem.has_score else 0
        return cls(problem, tuple(refs[:count]), transposed), list(refs[count:])

    def of(
        self,
        place: tuple,
        products: jax.Array,
        *,
        slope: bool = False,
        less: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Logits of a tile of 64 rows, and slopes of a function that does more than add.

        Or these logits in log2 units, less what there is for each row.

        Args:
          place: batch entry and head of the kernel, and where the tile begins, row and column.
          products: of query and key, alone.
          slope: whether these are wanted.
          less: None, or `(64,)`.
        """
        batch, head, first_row, first_column = place
        function, columns = self.problem.score_function, products.shape[1]
        slope = slope and not function.adds
        operations = function.value_and_slope if slope else function.value
        refs, zero = list(self.refs), Part(jnp.int32(0))
        numbers = [zero, zero]
        if function.reads_numbers:
            ref = refs.pop(0)
            numbers = [Part(ref[entry_of(ref, batch, self.problem), head, 0, n]) for n in range(2)]
        # Beyond the end they are as the last, as a function may be NaN where there is none.
        last = [self.problem.query_length - 1, self.problem.key_length - 1]
        last_row, last_column = last[::-1] if self.transposed else last
        own_rows = fresh_rows()
        rows = Part(jnp.minimum(own_rows + first_row, last_row), by_row=True)
        captured = len(refs)
        indices = [rows, zero][:: -1 if self.transposed else 1]
        row_at, column_at = (captured + n for n in ((4, 3) if self.transposed else (3, 4)))
        views = [ref.at[entry_of(ref, batch, self.problem), 0, 0] for ref in refs]

        def load(array: int, index: Part):
            return load_at(views[array], index.x, by_row=index.by_row, by_column=index.by_column)

        given = [*[zero] * captured, zero, *numbers, *indices]
        # Converted once a tile: a conversion is as slow as an exponential. From the tile's first
        # on, so that all groups of columns have the same numbers, and a scalar of their own.
        to_float = lambda x: jnp.asarray(x).astype(jnp.float32)
        own_row = to_float(jnp.minimum(own_rows, last_row - first_row))
        floats = {row_at: Sum(to_float(first_row), row=own_row)}
        on_rows = OnRows(operations, given, {captured, column_at}, _ROWS, load, floats)
        group = _SHORT_GROUP if self.problem.has_lists else _GROUP
        width = columns if interpreting() else min(columns, group)
        own, parts = column_numbers(width), []
        own_float, has_more = to_float(own), (last_column + 1) % columns > 0
        for first in range(0, columns, width):
            some = products[:, first : first + width]
            number, own_number = own + (first_column + first), own_float
            if has_more:
                number = jnp.minimum(number, last_column)
                own_number = jnp.minimum(own_float, to_float(last_column - first - first_column))
            scores = Part(some * self.problem.scale, by_row=True, by_column=True)
            varying: dict[int, Part | Sum] = {
                captured: Sum(exactly=functools.partial(_itself, scores), has_score=True),
                column_at: Part(number, by_column=True),
            }
            # What is the same for all pairs is not in the layout of a tile.
            from_first = Sum(to_float(first_column) + float(first), column=own_number)
            value, *others = on_rows.parts_of(varying, width, floats={column_at: from_first})
            found = [self._logits(on_rows, value, some, less)]
            found += [on_rows.whole(x, width) for x in others]
            parts.append([plgpu.layout_cast(x, plgpu.Layout.WGMMA) for x in found])
        results = [jnp.concatenate(x, axis=1) for x in zip(*parts, strict=True)]
        return results[0], results[1] if slope else None

    def _logits(self, on_rows: OnRows, value: Part | Sum, products, less) -> jax.Array:
        """What `of` gives of some columns, from the function's result."""
        width = products.shape[1]
        whole = functools.partial(on_rows.whole, width=width)
        in_unit = (lambda x: x) if less is None else (lambda x: x * LOG2E)
        terms = [] if less is None else [whole(Part(-less, by_row=True))]
        if not (isinstance(value, Sum) and value.has_score):
            return functools.reduce(operator.add, terms, in_unit(whole(value)))
        if value.other is not None:
            terms.append(in_unit(whole(value.other)))
        if value.has_positions:
            part = whole(on_rows.positions(value, width))
            factor = jnp.asarray(1.0 if value.factor is None else value.factor, jnp.float32)
            terms.append(part * (factor if less is None else _finite(factor * LOG2E)))
        scores = products * in_unit(self.problem.scale)
        return functools.reduce(operator.add, [*terms, scores])


def _finite(factor: jax.Array) -> jax.Array:
    """A factor near float32's largest number: infinity times 0 would be NaN."""
    largest = float(jnp.finfo(jnp.float32).max)
    return jnp.clip(factor, -largest, largest)


def _itself(x: Part) -> Part:
    return x
