"""Attention side by side with its peers: `python -m benchmarks.attention --suite train`.

Every candidate is checked against float32 before it is timed. TFLOP/s count 4*B*N*T*S*H for the
forward pass, half of that if causal, and 3.5 times that for forward and backward together.

Peers: cuDNN through jax.nn, and FlashAttention-3 where the package dew_flash_attn is importable
(PyPI dew-flash-attn-cu13: Dao-AILab's kernels bound to JAX).
"""

import argparse
import dataclasses
import datetime
import functools
import importlib.util
import itertools
import json
import math
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp

import jax_flash
from benchmarks import timing

RESULTS = pathlib.Path(__file__).parent / "results"

# Relative error of a right result: bf16 output and weights give 2e-3 to 3e-3.
TOLERANCE = 1e-2


@dataclasses.dataclass(frozen=True)
class Row:
    """One shape: query `[batch, length, heads, width]`, key and value with key_heads."""

    batch: int
    length: int
    heads: int
    key_heads: int
    width: int
    causal: bool

    @property
    def name(self) -> str:
        grouped = "" if self.heads == self.key_heads else f" {self.heads}/{self.key_heads} heads"
        mask = "causal" if self.causal else "full"
        return f"b{self.batch} s{self.length}{grouped} H{self.width} {mask}"

    def flops(self, passes: str) -> float:
        forward = 4 * self.batch * self.heads * self.length**2 * self.width
        return forward * (0.5 if self.causal else 1) * (3.5 if passes == "both" else 1)

    def inputs(self) -> tuple[jax.Array, ...]:
        """Query, key, value and the cotangent of the output, random in bf16."""
        queries = (self.batch, self.length, self.heads, self.width)
        keys = (self.batch, self.length, self.key_heads, self.width)
        names = jax.random.split(jax.random.key(0), 4)
        shapes = (queries, keys, keys, queries)
        return tuple(
            jax.random.normal(name, shape, jnp.bfloat16)
            for name, shape in zip(names, shapes, strict=True)
        )


def _row(batch: int, length: int, width: int, causal: bool) -> Row:
    """A row of 2048 columns of heads."""
    return Row(batch, length, 2048 // width, 2048 // width, width, causal)


SUITES = {
    "train": [
        *(
            _row(16384 // length, length, width, causal)
            for length in (1024, 4096, 16384)
            for width in (64, 128, 256)
            for causal in (False, True)
        ),
        Row(4, 4096, 32, 8, 128, True),
    ],
    # Small enough for a CPU.
    "small": [Row(1, 256, 4, 2, 64, causal) for causal in (False, True)],
}


def _jax_flash(implementation: str) -> Callable:
    def attention(query, key, value, causal):
        return jax_flash.attention(
            query, key, value, is_causal=causal, implementation=implementation
        )

    return attention


def _jax_nn(implementation: Literal["cudnn", "xla"]) -> Callable:
    def attention(query, key, value, causal):
        return jax.nn.dot_product_attention(
            query, key, value, is_causal=causal, implementation=implementation
        )

    return attention


def _fa3(query, key, value, causal):
    from dew_flash_attn import flash_mha

    # Its causal mask is aligned bottom-right, which is top-left where T == S.
    return flash_mha(query, key, value, query.shape[-1] ** -0.5, causal)


CANDIDATES: dict[str, Callable] = {
    "jax_flash": _jax_flash("mosaic_gpu"),
    "jax_flash xla": _jax_flash("xla"),
    "cuDNN": _jax_nn("cudnn"),
    "FA3": _fa3,
    "jax.nn xla": _jax_nn("xla"),  # holds [B, N, T, S]: short rows only
}


def is_ours(candidate: str) -> bool:
    return candidate.startswith("jax_flash")


def default_candidates() -> list[str]:
    if not timing.on_gpu():
        return ["jax_flash xla", "jax.nn xla"]
    fa3 = ["FA3"] if importlib.util.find_spec("dew_flash_attn") else []
    return ["jax_flash", "cuDNN", *fa3]


def program(candidate: str, row: Row, passes: str) -> Callable:
    """A jitted function of `row.inputs()`: the output, and for "both" dquery, dkey, dvalue too."""
    attention = functools.partial(CANDIDATES[candidate], causal=row.causal)

    def forward(query, key, value, dout):
        return (attention(query, key, value),)

    def both(query, key, value, dout):
        out, backward = jax.vjp(attention, query, key, value)
        return (out, *backward(dout))

    return jax.jit({"forward": forward, "both": both}[passes])


@functools.partial(jax.jit, static_argnames=("causal",))
def reference(query, key, value, dout, causal: bool):
    """The output and dquery, dkey, dvalue in float32, one head at a time."""
    batch, length, heads, width = query.shape
    key_heads = key.shape[2]

    def one_head(arrays):
        q, k, v, do = (x.astype(jnp.float32) for x in arrays)
        dot = functools.partial(jnp.matmul, precision="highest")
        scale = width**-0.5
        logits = scale * dot(q, k.T)
        if causal:
            logits = jnp.where(jnp.tri(length, dtype=bool), logits, -jnp.inf)
        p = jax.nn.softmax(logits)
        out = dot(p, v)
        dp = dot(do, v.T)
        ds = scale * p * (dp - jnp.sum(do * out, axis=-1, keepdims=True))
        return out, dot(ds, k), dot(ds.T, q), dot(p.T, do)

    def heads_first(x):
        x = jnp.repeat(x, heads // x.shape[2], axis=2)
        return x.transpose(0, 2, 1, 3).reshape(batch * heads, length, width)

    def heads_third(x):
        return x.reshape(batch, heads, length, width).transpose(0, 2, 1, 3)

    out, dq, dk, dv = map(
        heads_third, jax.lax.map(one_head, tuple(map(heads_first, (query, key, value, dout))))
    )

    def sum_groups(x):
        return x.reshape(batch, length, key_heads, heads // key_heads, width).sum(axis=3)

    return out, dq, sum_groups(dk), sum_groups(dv)


@jax.jit
def relative_error(results, expected) -> jax.Array:
    """The largest of |result - expected| / |expected| (Frobenius)."""

    def error(x, y):
        return jnp.linalg.norm((x.astype(jnp.float32) - y).ravel()) / jnp.linalg.norm(y.ravel())

    return jnp.max(jnp.array([error(x, y) for x, y in zip(results, expected, strict=True)]))


def failure(error: Exception) -> dict[str, str]:
    """What `benchmark` says of a candidate that raised."""
    return {"failed": f"{type(error).__name__}: {error}".split("\n")[0]}


def benchmark(
    row: Row, passes: str, programs: Mapping[str, Callable], rounds: int, iterations: int
) -> dict:
    """Checks candidates on one row, and times those that are right.

    Args:
      row: the shape.
      passes: "forward" or "both".
      programs: for each candidate, what `program` gives, or that compiled.
      rounds: how often each has its turn.
      iterations: calls in a turn.

    Returns:
      The row's name, passes and, for each candidate, its error, times and TFLOP/s, or why it
      failed.
    """
    inputs = row.inputs()
    expected = reference(*inputs, row.causal)
    entries: dict[str, dict] = {}
    right = {}
    for name, run in programs.items():
        try:
            results = run(*inputs)
        except Exception as e:  # a peer may not do this shape: say so, go on with the others
            entries[name] = failure(e)
            continue
        error = float(relative_error(results, expected[: len(results)]))
        entries[name] = {"error": error}
        if error <= TOLERANCE:
            right[name] = run
    del expected
    for name, time in timing.interleaved(right, inputs, rounds, iterations).items():
        entries[name] |= {
            "milliseconds": dataclasses.asdict(time),
            "teraflops": row.flops(passes) / time.median / 1e9,
        }
    return {"row": row.name, "passes": passes, "candidates": entries}


def problems(results: list[dict]) -> dict[str, list[str]]:
    """For each candidate, where it failed or is wrong."""
    found: dict[str, list[str]] = {}
    for result in results:
        for name, entry in result["candidates"].items():
            where = f"{result['row']}, {result['passes']}: {name}"
            if "failed" in entry:
                found.setdefault(name, []).append(f"{where} failed: {entry['failed']}")
            elif not entry["error"] <= TOLERANCE:  # NaN too
                found.setdefault(name, []).append(f"{where} is off by {entry['error']:.1e}")
    return found


def table(results: list[dict], candidates: list[str], matmul: float) -> str:
    """TFLOP/s of every candidate; for ours, the ratio to the best peer and to the matmul."""
    header = ["shape", "passes", *candidates, "ours / best peer", "ours / matmul", "error"]
    lines = [header]
    for result in results:
        entries = result["candidates"]
        speed = {n: e["teraflops"] for n, e in entries.items() if "teraflops" in e}
        ours = max((s for n, s in speed.items() if is_ours(n)), default=math.nan)
        peer = max((s for n, s in speed.items() if not is_ours(n)), default=math.nan)
        errors = [e["error"] for e in entries.values() if "error" in e]
        lines.append(
            [
                result["row"],
                result["passes"],
                *(f"{speed[n]:.3g}" if n in speed else "-" for n in candidates),
                f"{ours / peer:.2f}",
                f"{ours / matmul:.2f}",
                f"{max(errors, default=math.nan):.1e}",
            ]
        )
    return markdown(lines)


def markdown(lines: list[list[str]]) -> str:
    """A table of cells, the first line its header."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = ["| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([rows[0], rule, *rows[1:]])


def plot(results: list[dict], candidates: list[str], title: str, path: pathlib.Path) -> None:
    """Bars of TFLOP/s for every row, a panel for each kind of pass."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    kinds = list(dict.fromkeys(result["passes"] for result in results))
    rows = list(dict.fromkeys(result["row"] for result in results))
    figure, panels = plt.subplots(
        len(kinds), figsize=(2 + 0.6 * len(rows), 3.5 * len(kinds)), squeeze=False, sharex=True
    )
    for panel, kind in zip(panels[:, 0], kinds, strict=True):
        of_kind = {r["row"]: r["candidates"] for r in results if r["passes"] == kind}
        for i, name in enumerate(candidates):
            panel.bar(
                [
                    x + (i - (len(candidates) - 1) / 2) * 0.8 / len(candidates)
                    for x in range(len(rows))
                ],
                [of_kind[row][name].get("teraflops", 0) for row in rows],
                0.8 / len(candidates),
                label=name,
            )
        panel.set_ylabel("TFLOP/s, " + {"forward": "forward", "both": "forward + backward"}[kind])
        panel.grid(axis="y", alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
        panel.margins(x=0.01)
    panels[0, 0].set_title(title, loc="left", pad=28)  # above the legend
    panels[0, 0].legend(
        loc="lower right", bbox_to_anchor=(1, 1), frameon=False, ncols=len(candidates)
    )
    panels[-1, 0].set_xticks(range(len(rows)), rows, rotation=60, ha="right")
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that say which rows to time, how often, and where results go."""
    parser.add_argument("--quick", action="store_true", help="the rows of length 4096 alone")
    parser.add_argument("--rows", default="", help="regular expression that names of rows match")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=10, help="calls in a round")
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS, help="where to write")


def select(suite: str, options: argparse.Namespace) -> list[Row]:
    """The rows of a suite that `add_arguments`'s options ask for."""
    rows = [row for row in SUITES[suite] if re.search(options.rows, row.name)]
    if options.quick and suite == "train":
        rows = [row for row in rows if row.length == 4096]
    return rows


def provenance() -> dict[str, Any]:
    """Where and when something was measured: device, jax, date."""
    return {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC",
    }


def heading(record: dict[str, Any], options: argparse.Namespace) -> str:
    """What stands above a table: `provenance`, and what its figures are."""
    where = f"{record['device']}, jax {record['jax']}, {record['date'][:10]}"
    return f"{where}, bf16; TFLOP/s, medians of\n{options.rounds} x {options.iterations} calls"


def write(directory: pathlib.Path, title: str, record: dict[str, Any]) -> pathlib.Path:
    """Writes a record with `provenance` as JSON, named after its title, device and date."""
    directory.mkdir(parents=True, exist_ok=True)
    stem = re.sub(r"\W+", "-", f"{title} {record['device']} {record['date'][:10]}".lower())
    path = directory / f"{stem}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--suite", choices=SUITES, default="train" if timing.on_gpu() else "small")
    parser.add_argument("--passes", default="forward,both", help="forward, both, or both of them")
    parser.add_argument("--candidates", help=f"of {', '.join(CANDIDATES)}, separated by commas")
    add_arguments(parser)
    options = parser.parse_args(argv)

    candidates = options.candidates.split(",") if options.candidates else default_candidates()
    passes = options.passes.split(",")
    if unknown := {*candidates} - {*CANDIDATES} | {*passes} - {"forward", "both"}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    rows = select(options.suite, options)
    if not rows:
        parser.error("no such row")

    matmul = timing.matmul_teraflops(8192 if timing.on_gpu() else 512)
    work = [(row, kind) for kind in passes for row in rows]
    results = [
        benchmark(
            row,
            kind,
            {name: program(name, row, kind) for name in candidates},
            options.rounds,
            options.iterations,
        )
        for row, kind in timing.progress(work, "attention")
    ]

    record = provenance() | {"matmul_teraflops": matmul, "results": results}
    print(f"\n{heading(record, options)}; bf16 matmul: {matmul:.3g} TFLOP/s\n")
    print(table(results, candidates, matmul))
    found = problems(results)
    print(*itertools.chain(*found.values()), sep="\n")

    path = write(options.results, f"attention {options.suite}", record)
    print(f"\nwritten: {path}")
    if importlib.util.find_spec("matplotlib"):
        plot(results, candidates, f"{record['device']}, bf16", path.with_suffix(".png"))
        print(f"plotted: {path.with_suffix('.png')}")

    return 1 if any(map(is_ours, found)) else 0


if __name__ == "__main__":
    raise SystemExit(main())
