"""Runs functions of `pallas_kernels.ptx` in a kernel of their own: their twins, or the PTX."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np

from pallas_kernels.interpret import interpreting
from pallas_kernels.ptx.barriers import HAND_ORDERED, twins_of, with_twins
from pallas_kernels.ptx.mlir import COLUMNS, ROWS, TILE

WIDTHS = (8, 64, 128, 256)
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
SHORT_DTYPES = DTYPES[1:]
LEAST, MOST = -(2**31), 2**31 - 1  # of int32

_LAYOUTS = {"tile": TILE, "rows": ROWS, "columns": COLUMNS}


@dataclasses.dataclass(frozen=True)
class Case:
    """A kernel of one thread block, and what is to come out of it.

    Attributes:
      body: gets refs in global memory to inputs, states and outputs, in this order, and what
        scratch has, by name. Nothing is ordered for it: see `HAND_ORDERED`.
      inputs: arrays.
      expected: of each output; then what becomes of each state.
      states: arrays that the kernel changes.
      on_gpu: what is expected of the PTX, where that is not what the twin gives.
      within: how far results may be off: relative to what is expected, and besides.
      of: what is compared, of results.
      outputs: their types, where they are not those of what is expected.
      scratch: as for `plgpu.kernel`.
      barriers: named barriers, or what else has a twin in shared memory; the body gets them too.
      warpgroups: how many run the body.
    """

    body: Callable[..., None]
    inputs: tuple = ()
    expected: tuple = ()
    states: tuple = ()
    on_gpu: tuple | None = None
    within: tuple[float, float] | None = None
    of: Callable[..., tuple] = lambda *results: results
    outputs: tuple | None = None
    scratch: dict[str, Any] = dataclasses.field(default_factory=dict)
    barriers: dict[str, Any] = dataclasses.field(default_factory=dict)
    warpgroups: int = 1

    @property
    def arguments(self) -> tuple:
        """What `run` takes."""
        return (*self.inputs, *self.states)

    def run(self, *arguments) -> list[jax.Array]:
        """Outputs, then states. To be jitted, or in interpret mode."""
        outputs, scratch = self.outputs, dict(self.scratch)
        if outputs is None:
            outputs = self.expected[: len(self.expected) - len(self.states)]
        if interpreting():
            scratch["twins"] = twins_of(self.barriers)

        def body(*refs, twins=None, **scratch):
            barriers = zip(self.barriers, with_twins(self.barriers, twins), strict=True)
            self.body(*refs, **scratch, **dict(barriers))

        kernel = plgpu.kernel(
            body,
            out_type=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outputs),
            scratch_types=scratch,
            num_threads=self.warpgroups,
            thread_name="warpgroup",
            compiler_params=HAND_ORDERED,
        )
        inputs, states = arguments[: len(self.inputs)], arguments[len(self.inputs) :]
        states = [jax.new_ref(jnp.asarray(x)) for x in states]
        results = kernel(*inputs, *states)
        return [*results, *(state[...] for state in states)]

    def check(self, results, expected: tuple) -> None:
        """That they are the same to the bit, or within the bound; any NaN is like any other."""
        results = self.of(*map(np.asarray, results))
        for n, (got, wanted) in enumerate(zip(results, expected, strict=True)):
            wanted = np.asarray(wanted)
            assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
            if self.within is not None:
                wide, (rtol, atol) = (x.astype(np.float64) for x in (got, wanted)), self.within
                np.testing.assert_allclose(*wide, rtol=rtol, atol=atol, err_msg=f"result {n}")
            else:
                np.testing.assert_array_equal(*map(_bits, (got, wanted)), err_msg=f"result {n}")


def _bits(x: np.ndarray) -> np.ndarray:
    """Numbers that tell all values apart, -0 from 0 too, but not one NaN from another."""
    if x.dtype.kind in "biu":
        return x
    words = x.view(f"i{x.dtype.itemsize}").astype(np.int64)
    return np.where(np.isnan(x.astype(np.float32)), np.iinfo(np.int64).max, words)


def load(ref, per: str = "tile") -> jax.Array:
    """A tile, or one value a row or a column of a tile, from a ref without tiles."""
    return plgpu.load(ref, layout=_LAYOUTS[per], optimized=False)


def show(ref, value: jax.Array, per: str = "tile") -> None:
    """Stores what each thread has: a tile, a scalar, or one value a row or a column of a tile."""
    if per != "tile":
        axes = {"rows": [0], "columns": [1], "scalar": []}[per]
        value = plgpu.layout_cast(jax.lax.broadcast_in_dim(value, ref.shape, axes), TILE)
    if hasattr(plgpu, "store") and not interpreting():  # from jax 0.12 on, which asks for it
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


def shown(value, per: str, shape: tuple[int, int] = (64, 8)) -> np.ndarray:
    """What `show` leaves of one value."""
    value = np.asarray(value)
    return np.broadcast_to(value[:, None] if per == "rows" else value, shape)


def to_shared(source, target, barrier) -> None:
    """Copies global memory to shared memory, and waits for it."""
    plgpu.copy_gmem_to_smem(source, target, barrier)
    plgpu.barrier_wait(barrier)


def to_global(source, target) -> None:
    """Copies what this warpgroup has stored to shared memory to global memory, and waits for it."""
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(source, target)
    plgpu.wait_smem_to_gmem(0)


CASES: dict[str, Callable[[], Case]] = {}
COVERED: dict[Callable, Callable] = {}  # functions, and what makes a case of each
# Names of cases that have each value of each parameter, from the first of all to the last of all.
EVERY_VALUE: set[str] = set()


def _name(value) -> str:
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    return getattr(value, "__name__", str(value))


def case(*functions: Callable, **parameters: tuple) -> Callable:
    """Adds a case of these functions for each combination of parameters."""

    def add(make):
        named = lambda values: "-".join([make.__name__, *map(_name, values)])
        for values in itertools.product(*parameters.values()):
            name = named(values)
            assert name not in CASES
            chosen = dict(zip(parameters, values, strict=True))
            CASES[name] = functools.partial(make, **chosen)
        for n in range(max(map(len, parameters.values()), default=1)):
            EVERY_VALUE.add(named(x[min(n, len(x) - 1)] for x in parameters.values()))
        COVERED.update(dict.fromkeys(functions, make))
        return make

    return add


SPECIAL = (0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1.0, 3e38, -3e38, 2.0**-126)


def numbers(*shape: int, special: tuple = SPECIAL, dtype=np.float32) -> np.ndarray:
    """Random ones of many sizes, a fifth of them special."""
    random = np.random.default_rng(shape)
    x = random.standard_normal(shape) * 2.0 ** random.integers(-8, 8, shape)
    if special:
        is_special = random.random(shape) < 0.2
        x[is_special] = random.choice(special, is_special.sum())
    return cast(x, dtype)


def integers(*shape: int, least: int = -8, end: int = 8, dtype=np.float32) -> np.ndarray:
    """Random ones, whose sums are exact in any order."""
    return np.random.default_rng(shape).integers(least, end, shape).astype(dtype)


def some(values, count: int = 64) -> np.ndarray:
    """So many of these int32, all of them if there is room, in any order."""
    values = np.resize(np.asarray(values, np.int64), count).astype(np.int32)
    return np.random.default_rng(count).permutation(values)


def cast(x: np.ndarray, dtype) -> np.ndarray:
    with np.errstate(all="ignore"):
        return np.asarray(x).astype(dtype)


def without_sign_of_zero(*results) -> tuple:
    return tuple(x + np.zeros((), x.dtype) for x in results)


def any_of_each(flags: np.ndarray) -> tuple:
    """What a vote on `(n, 64)` shows in a twin, and of a warp on a GPU."""
    everywhere = flags.any(axis=1, keepdims=True).repeat(64, axis=1)
    warps = flags.reshape(-1, 4, 16).any(axis=2).repeat(16, axis=1)
    return tuple((_of_all_threads(x),) for x in (everywhere, warps))


def _of_all_threads(flags: np.ndarray) -> np.ndarray:
    """What the threads of rows show of their flags."""
    return np.broadcast_to(flags[..., None], (*flags.shape, 8)).astype(np.int32)
