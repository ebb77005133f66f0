"""Fair times: candidates interleaved in one process, kernel time on a GPU."""

import dataclasses
import statistics
import sys
import time
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import profiler

ROUNDS = 6  # in which `interleaved` has three candidates in every order


@dataclasses.dataclass(frozen=True)
class Time:
    """Milliseconds of one call, over all rounds."""

    mean: float
    fastest: float
    slowest: float


@dataclasses.dataclass(frozen=True)
class Bound:
    """A jitted or compiled function with arguments of its own, which are not compiled into it."""

    fn: Callable
    args: tuple

    def __call__(self, *args):
        return self.fn(*self.args, *args)


@typing.runtime_checkable
class TimesItself(typing.Protocol):
    """What is no program of JAX."""

    def milliseconds(self, iterations: int) -> list[float]:
        """Of each of at most so many calls."""


def on_gpu() -> bool:
    return jax.devices()[0].platform == "gpu"


def milliseconds(fn: Callable, args: tuple, iterations: int) -> list[float]:
    """Times `iterations` calls of a jitted, compiled or Bound function after one to warm up.

    What times itself is asked.

    On a GPU it is the time its kernels ran (CUPTI), elsewhere the time until the result is there.

    Raises:
      RuntimeError: `fn` launched no kernel.
    """
    own: Any = fn
    if isinstance(own, TimesItself):
        return own.milliseconds(iterations)
    if isinstance(fn, Bound):  # else the profiler would jit it, its arguments as constants
        args, fn = (*fn.args, *args), fn.fn
    if on_gpu():
        _, times = profiler.measure(fn, iterations=iterations)(*args)
        if times is None:
            raise RuntimeError("no kernel was launched")
        return times if isinstance(times, list) else [times]
    jax.block_until_ready(fn(*args))
    times = []
    for _ in range(iterations):
        start = time.perf_counter()
        jax.block_until_ready(fn(*args))
        times.append(1e3 * (time.perf_counter() - start))
    return times


def kernels(program: Bound, iterations: int) -> list[tuple[str, float]]:
    """Every kernel of one call in the order they ran, with its median in microseconds (CUPTI).

    Raises:
      RuntimeError: `program` launched no kernel, or not the same ones in every call.
    """
    _, calls = profiler.measure(program.fn, aggregate=False, iterations=iterations)(*program.args)
    if calls is None:
        raise RuntimeError("no kernel was launched")
    calls = calls if isinstance(calls[0], list) else [calls]  # one iteration is not in a list
    return [
        (times[0][0], 1e3 * statistics.median(milliseconds for _, milliseconds in times))
        for times in zip(*calls, strict=True)
    ]


def interleaved(
    candidates: Mapping[str, Callable], args: tuple, rounds: int, iterations: int
) -> dict[str, Time]:
    """Times functions of the same arguments against each other.

    Every round runs every candidate, two rounds in a row in opposite orders, the next two with
    another one first, so that a change of clocks or of temperature falls on all alike. Means, as a
    GPU that has idled begins a turn at clocks that its power limit does not let it keep: a median
    is of calls at one clock or at the other.

    Args:
      candidates: jitted, compiled or Bound functions by name.
      args: what all are called with. Not zeros: they run faster than data do.
      rounds: how often each has its turn.
      iterations: calls in a turn.
    """
    times: dict[str, list[float]] = {name: [] for name in candidates}
    names = list(candidates)
    for turn in range(rounds):
        first = turn // 2 % len(names) if names else 0
        order = names[first:] + names[:first]
        for name in reversed(order) if turn % 2 else order:
            times[name] += milliseconds(candidates[name], args, iterations)
    return {name: Time(statistics.fmean(ts), min(ts), max(ts)) for name, ts in times.items()}


def matmul_teraflops(size: int, rounds: int = ROUNDS, iterations: int = 10) -> float:
    """What this machine's own bf16 matmul of `size` cubed reaches: the ceiling for attention."""
    a, b = jax.random.normal(jax.random.key(0), (2, size, size), jnp.bfloat16)
    timed = interleaved({"matmul": jax.jit(jnp.matmul)}, (a, b), rounds, iterations)
    return 2 * size**3 / timed["matmul"].mean / 1e9


def reason(error: Exception) -> str:
    """Why a candidate failed, in a line."""
    return f"{type(error).__name__}: {error}".split("\n")[0]


def progress(items: Iterable, what: str) -> Iterator[Any]:
    """Shows on a terminal how far a loop is: with tqdm, or without it a line for each item."""
    items = list(items)
    is_shown = sys.stderr.isatty()
    try:
        from tqdm import tqdm
    except ImportError:
        for i, item in enumerate(items):
            if is_shown:
                print(f"{what} {i + 1}/{len(items)}", file=sys.stderr, flush=True)
            yield item
    else:
        yield from tqdm(items, desc=what, dynamic_ncols=True, disable=not is_shown)
