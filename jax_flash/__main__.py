"""python -m jax_flash: checks and shows attention on this machine.

Runs attention forward and backward on a few real shapes with every implementation that this machine
has, checks output and gradients, and prints what was chosen and why, the errors, and the times
beside those of plain XLA attention. Exits with 1 if anything is wrong. On a CPU it says that
it checks there, and is not faster there.
"""

import argparse
import collections
import dataclasses
import functools
import logging
import math
import statistics
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_flash
from jax_flash import dispatch, reference

_WIDTH = 110
_SAMPLE_SECONDS = 0.01  # calls are repeated so that a sample is longer than the clock's noise
_ROUNDING = 16 * float(jnp.finfo(jnp.float32).eps)  # of float32 sums in another order
_LARGE_MEMORY = 40e9  # bytes: plain XLA attention holds several [B, N, T, S] arrays
_PLAIN = "plain XLA"
_PLAIN_OPTIONS = {"is_causal", "local_window_size", "key_value_seq_lengths"}
_RESULTS = "out", "dq", "dk", "dv"


@dataclasses.dataclass(frozen=True)
class Case:
    """One shape to run.

    Attributes:
      title: what it stands for.
      batch: B.
      queries: T.
      keys: S.
      heads: N.
      key_heads: K.
      width: H = h.
      dtype: of query, key and value.
      options: keyword arguments of `jax_flash.attention` that decide what is visible; every
        query must see a key, since plain attention is not defined where one does not.
    """

    title: str
    batch: int
    queries: int
    keys: int
    heads: int
    key_heads: int
    width: int
    dtype: str = "bfloat16"
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        heads = f"{self.heads}/{self.key_heads}"
        lengths = f"{self.queries}" + (f" x {self.keys}" if self.queries != self.keys else "")
        return f"{self.title}: b{self.batch} s{lengths}, {heads} heads, H{self.width}, {self.dtype}"


def small_cases() -> list[Case]:
    """What two CPU cores do in seconds."""
    lengths = np.array([1500, 2048, 77, 1001], np.int32)
    return [
        Case("causal GQA", 2, 512, 512, 8, 2, 64, options={"is_causal": True}),
        Case("packed documents", 2, 512, 512, 4, 4, 64, options=_packed(2, 512, 7)),
        Case("sliding window", 1, 1000, 1000, 4, 2, 64, options=_window(127)),
        Case("float32, T != S", 1, 333, 517, 4, 4, 40, "float32"),
        Case("decode", 4, 1, 2048, 8, 2, 64, options={"key_value_seq_lengths": lengths}),
        Case("decode 4 tokens", 4, 4, 2048, 8, 2, 64, options=_continued(lengths, 4)),
    ]


def large_cases() -> list[Case]:
    """What a data-centre GPU is bought for."""
    lengths = np.linspace(1000, 8192, 16).astype(np.int32)
    return [
        Case("causal GQA", 2, 4096, 4096, 32, 8, 128, options={"is_causal": True}),
        Case("packed documents", 1, 8192, 8192, 16, 16, 128, options=_packed(1, 8192, 16)),
        Case("sliding window", 1, 8192, 8192, 16, 4, 128, "float16", _window(1023)),
        Case("decode 4 tokens", 16, 4, 8192, 32, 8, 128, options=_continued(lengths, 4)),
    ]


def main(cases: Sequence[Case] | None = None) -> int:
    """Runs the cases, the ones that suit the device unless given, and prints the table.

    Returns:
      The exit code: 0 if every implementation is right about every case, else 1.
    """
    device = jax.devices()[0]
    if cases is None:
        memory = (device.memory_stats() or {}).get("bytes_limit", 0)
        is_large = device.platform == "gpu" and memory > _LARGE_MEMORY
        cases = large_cases() if is_large else small_cases()
    print(_heading())
    said: set[str] = set()
    verdicts = [right for number, case in enumerate(cases, 1) for right in _run(number, case, said)]
    wrong = verdicts.count(False)
    print(f"\n{wrong} of {len(verdicts)} checks FAILED" if wrong else "\nEverything agrees.")
    return 1 if wrong else 0


def _run(number: int, case: Case, said: set[str]) -> list[bool]:
    """Runs and prints one case; whether each implementation was right.

    Args:
      said: reasons that were printed; those of this case are added, and not printed again.
    """
    query, key, value, dout = _inputs(case)
    visible = _visible(case)
    print(f"\n{number}. {case}")
    explanation = jax_flash.explain(query, key, value, **case.options)
    about, runnable = list(explanation.passed_over), []
    for name in dispatch.IMPLEMENTATIONS:
        # Where something faster runs, plain XLA is beside it already, and compiling takes the time.
        if name in explanation.reasons or (name == "xla" and explanation.implementation != "xla"):
            continue
        try:
            jax_flash.explain(query, key, value, implementation=name, **case.options)
            runnable.append(name)
        except NotImplementedError as error:
            about.append(f"not available: {error}")
    print(f"   runs on {explanation.implementation}")
    for line in (line for line in about if line not in said):
        print(textwrap.fill(line, _WIDTH, initial_indent=" " * 5, subsequent_indent=" " * 7))
    said.update(about)

    exact = _exact(query, key, value, dout, visible)
    plain_options = dict(case.options)
    if not plain_options.keys() <= _PLAIN_OPTIONS:
        plain_options = {"mask": visible[:, None]}
    plain = functools.partial(jax.nn.dot_product_attention, implementation="xla")
    # The library computes float32 in float32; left to itself a GPU would take TF32 here.
    with jax.default_matmul_precision("highest" if case.dtype == "float32" else None):
        results, plain_seconds = _measure(plain, plain_options, query, key, value, dout)
    plain_errors = _errors(results, exact)
    rounding = _ROUNDING + float(jnp.finfo(case.dtype).eps) / 2
    limits = [
        2 * error + rounding * _largest(array)
        for error, array in zip(plain_errors, exact, strict=True)
    ]

    work = 4 * case.width * case.heads * int(visible.sum()) / 1e12  # TFLOP of the forward pass
    verdicts = []
    for name in runnable:
        attention = functools.partial(jax_flash.attention, implementation=name)
        results, seconds = _measure(attention, case.options, query, key, value, dout)
        errors = _errors(results, exact)
        # Written so that NaN is wrong.
        verdicts.append(all(e <= limit for e, limit in zip(errors, limits, strict=True)))
        verdict = "ok" if verdicts[-1] else "WRONG"
        print(_row(name, verdict, errors, limits, seconds, plain_seconds, work), flush=True)
    print(_row(_PLAIN, "", plain_errors, limits, plain_seconds, plain_seconds, work), flush=True)
    return verdicts


def _inputs(case: Case) -> tuple[jax.Array, ...]:
    """Query, key, value and the output's cotangent, standard normal."""
    shapes = [
        (case.batch, case.queries, case.heads, case.width),
        (case.batch, case.keys, case.key_heads, case.width),
        (case.batch, case.keys, case.key_heads, case.width),
        (case.batch, case.queries, case.heads, case.width),
    ]
    rng = np.random.default_rng(0)  # of NumPy, which has nothing to compile for every shape
    return tuple(
        jnp.asarray(rng.standard_normal(shape, np.float32).astype(jnp.dtype(case.dtype)))
        for shape in shapes
    )


def _visible(case: Case) -> np.ndarray:
    """What the options make visible, bool `[B, T, S]`, without the library's own masks."""
    options = dict(case.options)
    offset = np.broadcast_to(options.pop("query_offset", 0), case.batch)[:, None, None]
    i = offset + np.arange(case.queries)[:, None]
    j = np.arange(case.keys)
    visible = np.ones((case.batch, case.queries, case.keys), bool)
    if options.pop("is_causal", False):
        visible &= j <= i
    if "local_window_size" in options:
        left, right = options.pop("local_window_size")
        visible &= (i - left <= j) & (j <= i + right)
    if "key_value_seq_lengths" in options:
        visible &= j < options.pop("key_value_seq_lengths")[:, None, None]
    if "query_segment_ids" in options:
        ids = options.pop("query_segment_ids")[:, :, None]
        visible &= ids == options.pop("key_value_segment_ids")[:, None, :]
    if options or not visible.any(axis=2).all():
        raise ValueError(f"{case.title}: options {options} unknown, or a query that sees no key")
    return visible


def _exact(query, key, value, dout, visible) -> list[jax.Array]:
    """Output and gradients by naive attention in a wider type: float64 for float32 inputs."""
    dtype = jnp.float64 if query.dtype == jnp.float32 else jnp.float32

    @jax.jit
    def run(query, key, value, dout, visible):
        B, T, N, H = query.shape
        K = key.shape[2]
        query, dout = (x.reshape(B, T, K, N // K, H) for x in (query, dout))

        # One key head at a time: the weights of all would not fit in memory.
        def key_head(b, k):
            def group(query, key, value):
                naive = functools.partial(reference.naive, visible=lambda i, j: visible[b])
                return jax.vmap(naive, (1, None, None), 1)(query, key, value)[0]

            *inputs, cotangent = (x[b, :, k].astype(dtype) for x in (query, key, value, dout))
            out, pullback = jax.vjp(group, *inputs)
            return [out, *pullback(cotangent)]

        results = jax.lax.map(
            lambda b: jax.lax.map(functools.partial(key_head, b), jnp.arange(K)), jnp.arange(B)
        )
        out, dquery, dkey, dvalue = (jnp.swapaxes(x, 1, 2) for x in results)  # [B, T or S, K, ...]
        return [out.reshape(B, T, N, H), dquery.reshape(B, T, N, H), dkey, dvalue]

    with jax.enable_x64(dtype == jnp.float64):
        return run(query, key, value, dout, visible)


def _measure(
    attention: Callable[..., jax.Array], options: Mapping[str, Any], query, key, value, dout
) -> tuple[list[jax.Array], tuple[float, float]]:
    """Output and gradients, and the seconds of the forward pass and of forward and backward."""
    # Arrays are arguments of the compiled function, not constants in it.
    arrays = {name: jnp.asarray(x) for name, x in options.items() if isinstance(x, np.ndarray)}
    others = {name: x for name, x in options.items() if name not in arrays}

    @jax.jit
    def forward(query, key, value, arrays):
        return attention(query, key, value, **arrays, **others)

    @jax.jit
    def forward_and_backward(query, key, value, dout, arrays):
        out, pullback = jax.vjp(lambda *qkv: forward(*qkv, arrays), query, key, value)
        return [out, *pullback(dout)]

    results = forward_and_backward(query, key, value, dout, arrays)
    forward_seconds = _seconds(lambda: forward(query, key, value, arrays))
    both_seconds = _seconds(lambda: forward_and_backward(query, key, value, dout, arrays))
    return results, (forward_seconds, both_seconds)


def _seconds(function: Callable[[], Any]) -> float:
    """Median wall-clock seconds of a call, compilation and first calls left out."""

    def sample(calls: int) -> float:
        result = None
        start = time.perf_counter()
        for _ in range(calls):
            result = function()
        jax.block_until_ready(result)
        return (time.perf_counter() - start) / calls

    sample(1)
    once = sample(1)
    calls = max(1, math.ceil(_SAMPLE_SECONDS / once))
    return statistics.median(sample(calls) for _ in range(3 if once > 0.05 else 7))


def _errors(results: Sequence[jax.Array], exact: Sequence[jax.Array]) -> list[float]:
    """Largest absolute difference of each result."""
    with jax.enable_x64(exact[0].dtype == jnp.float64):
        differences = [
            result.astype(expected.dtype) - expected
            for result, expected in zip(results, exact, strict=True)
        ]
    return [_largest(difference) for difference in differences]


def _largest(array: jax.Array) -> float:
    with jax.enable_x64(array.dtype == jnp.float64):
        return float(jnp.max(jnp.abs(array)))


def _packed(batch: int, length: int, documents: int) -> dict[str, Any]:
    """Causal documents of random lengths, packed one after another."""
    rng = np.random.default_rng(0)
    starts = rng.permuted(np.arange(1, length)[None].repeat(batch, 0), axis=1)[:, : documents - 1]
    ids = (np.arange(length)[:, None] >= starts[:, None, :]).sum(axis=2).astype(np.int32)
    return {"is_causal": True, "query_segment_ids": ids, "key_value_segment_ids": ids}


def _window(left: int) -> dict[str, Any]:
    return {"is_causal": True, "local_window_size": (left, 0)}


def _continued(lengths: np.ndarray, queries: int) -> dict[str, Any]:
    """The queries are the last positions of sequences of these lengths."""
    offset = lengths - queries
    return {"is_causal": True, "query_offset": offset, "key_value_seq_lengths": lengths}


def _heading() -> str:
    kinds = collections.Counter(device.device_kind for device in jax.devices())
    devices = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    about = """Errors are the largest differences from naive attention in a wider type, with what is
        allowed in brackets: twice the error of plain XLA attention (jax.nn), and the rounding of
        the largest value. Times are medians by the wall clock; TFLOP/s count visible pairs only;
        speedup is over plain XLA. What was passed over, and why, is said once."""
    if jax.default_backend() == "cpu":
        about += """ This is a CPU: here it checks the library, which is in general not faster than
        plain XLA. Its kernels need a GPU."""
    titles = ["", "error of output", "of the worst gradient", "forward", "forward and backward"]
    units = f"{'ms':>9} {'TFLOP/s':>8} {'speedup':>7}"
    return "\n".join(
        [
            f"jax {jax.__version__} on {jax.default_backend()}: {devices}",
            *textwrap.wrap(" ".join(about.split()), _WIDTH),
            "",
            "{:20} {:18} {:21} {:>26} {:>26}".format(*titles),
            f"{'':61} {units} {units}",
        ]
    )


def _row(
    name: str,
    verdict: str,
    errors: Sequence[float],
    limits: Sequence[float],
    seconds: tuple[float, float],
    plain_seconds: tuple[float, float],
    work: float,
) -> str:
    """One line of the table."""
    ratios = [error / limit for error, limit in zip(errors, limits, strict=True)]
    worst = 1 + int(np.argmax(ratios[1:]))  # NaN counts as the largest
    cells = [
        f"   {name:<11}{verdict:<6}",
        f"{errors[0]:.1e} ({limits[0]:.1e}) ",
        f"{_RESULTS[worst]} {errors[worst]:.1e} ({limits[worst]:.1e}) ",
    ]
    # The backward pass has two and a half times the products of the forward pass.
    for time_, plain_time, factor in zip(seconds, plain_seconds, (1, 3.5), strict=True):
        rate = factor * work / time_
        cells.append(f"{time_ * 1e3:9.3f} {rate:8.3g} {plain_time / time_:7.1f}")
    return " ".join(cells)


if __name__ == "__main__":
    # The table says what was passed over and why; the log need not.
    logging.getLogger("jax_flash").setLevel(logging.ERROR)
    argparse.ArgumentParser(
        "python -m jax_flash", description="Check and show attention on this machine."
    ).parse_args()
    sys.exit(main())
