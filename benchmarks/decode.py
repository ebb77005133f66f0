"""Decoding side by side with its peers: `python -m benchmarks.decode`.

Every candidate is checked against float32 before it is timed. To decode is to read the cache once,
so a row also says what part of this GPU's read rate a candidate reaches.

Peers, where they can do a row: cuDNN through jax.nn, and FlashAttention-3 where the package
dew_flash_attn is importable (see `benchmarks.attention`).
"""

import argparse
import dataclasses
import functools
import importlib.util
import math
import pathlib
import re
import statistics
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

import jax_flash
from benchmarks import reporting, timing
from benchmarks.attention import TOLERANCE, is_ours, relative_error
from benchmarks.reporting import figure, markdown


@dataclasses.dataclass(frozen=True)
class Row:
    """One shape: query `[batch, tokens, heads, width]`, caches of key_heads.

    Attributes:
      capacity: of the cache, in tokens.
      page_size: None, or tokens of a page; pages stand in no order.
      float8: the cache is float8_e4m3fn, else bfloat16.
      mixed: lengths are spread evenly from 1/8 of the capacity to all of it, else all are full.
    """

    batch: int
    tokens: int
    capacity: int
    heads: int
    key_heads: int
    width: int
    page_size: int | None = None
    float8: bool = False
    mixed: bool = False

    @property
    def name(self) -> str:
        parts = [
            f"b{self.batch} q{self.tokens} s{self.capacity}",
            f"{self.heads}/{self.key_heads} heads H{self.width}",
            "" if self.page_size is None else f"pages of {self.page_size}",
            "float8" if self.float8 else "",
            "mixed lengths" if self.mixed else "",
        ]
        return " ".join(filter(None, parts))

    @property
    def lengths(self) -> np.ndarray:
        first = self.capacity // 8 if self.mixed else self.capacity
        # In no order, as requests come.
        lengths = np.linspace(first, self.capacity, self.batch).astype(np.int32)
        return np.random.default_rng(0).permutation(lengths)

    @property
    def bytes(self) -> int:
        """Of keys and values that must be read."""
        tokens = int(self.lengths.sum())
        return 2 * tokens * self.key_heads * self.width * (1 if self.float8 else 2)

    def inputs(self) -> dict[str, jax.Array]:
        """Arguments of `jax_flash.decode_attention`, random."""
        names = jax.random.split(jax.random.key(0), 3)
        query = (self.batch, self.tokens, self.heads, self.width)
        pages = (self.batch, self.capacity)
        arrays: dict[str, jax.Array] = {"lengths": jnp.asarray(self.lengths)}
        if self.page_size is not None:
            pages = (self.batch * self.capacity // self.page_size, self.page_size)
            order = np.random.default_rng(1).permutation(pages[0]).astype(np.int32)
            arrays["page_table"] = jnp.asarray(order.reshape(self.batch, -1))
        cache = (*pages, self.key_heads, self.width)
        dtype = jnp.float8_e4m3fn if self.float8 else jnp.bfloat16
        if self.float8:
            arrays["key_scale"] = arrays["value_scale"] = jnp.full(self.key_heads, 0.5)
        return arrays | {
            "query": jax.random.normal(names[0], query, jnp.bfloat16),
            "key_cache": jax.random.normal(names[1], cache, jnp.bfloat16).astype(dtype),
            "value_cache": jax.random.normal(names[2], cache, jnp.bfloat16).astype(dtype),
        }


SUITES = {
    "decode": [
        Row(1, 1, 8192, 32, 8, 128),
        Row(1, 1, 131072, 32, 8, 128),
        Row(1, 1, 2**20, 32, 8, 128),
        Row(16, 1, 8192, 32, 8, 128),
        Row(64, 1, 8192, 32, 8, 128),
        Row(128, 1, 2048, 64, 8, 128),
        Row(16, 1, 8192, 32, 32, 128),
        Row(32, 1, 8192, 32, 4, 64),
        Row(16, 1, 8192, 16, 4, 256),
        Row(16, 2, 8192, 32, 8, 128),
        Row(16, 4, 8192, 32, 8, 128),
        Row(16, 8, 8192, 32, 8, 128),
        Row(16, 16, 8192, 32, 8, 128),
        Row(16, 1, 8192, 32, 8, 128, page_size=16),
        Row(16, 1, 8192, 32, 8, 128, page_size=64),
        Row(16, 1, 8192, 32, 8, 128, float8=True),
        Row(16, 1, 8192, 32, 8, 128, mixed=True),
        Row(64, 1, 8192, 32, 8, 128, mixed=True),
    ],
    # Small enough for a CPU.
    "small": [
        Row(2, 1, 256, 4, 2, 64),
        Row(2, 3, 256, 4, 2, 64, page_size=16, mixed=True),
        Row(2, 1, 256, 4, 2, 64, float8=True),
    ],
}


def jax_flash_with(implementation: str, **options) -> Callable:
    """A candidate of ours; options are those of `jax_flash.decode_attention`."""

    def attention(row: Row, arrays):
        return jax_flash.decode_attention(**arrays, implementation=implementation, **options)

    return attention


def _jax_nn(implementation: Literal["cudnn", "xla"]) -> Callable:
    def attention(row: Row, arrays):
        _refuse(row, pages=True, float8=True)
        options: dict[str, Any] = {}
        if row.tokens > 1:
            first = arrays["lengths"] - row.tokens
            position = first[:, None] + jnp.arange(row.tokens)
            options["mask"] = jnp.arange(row.capacity) <= position[:, None, :, None]
        elif row.mixed:
            options["key_value_seq_lengths"] = arrays["lengths"]
        caches = arrays["key_cache"], arrays["value_cache"]
        return jax.nn.dot_product_attention(
            arrays["query"], *caches, implementation=implementation, **options
        )

    return attention


def _fa3(row: Row, arrays):
    from dew_flash_attn import flash_mha

    _refuse(row, pages=True, float8=True, mixed=True)
    # Its causal mask is aligned bottom-right, as ours is here.
    caches = arrays["key_cache"], arrays["value_cache"]
    scale, is_causal = row.width**-0.5, row.tokens > 1
    return flash_mha(arrays["query"], *caches, scale, is_causal, (-1, -1))


def _refuse(row: Row, pages: bool = False, float8: bool = False, mixed: bool = False) -> None:
    """Raises NotImplementedError where a peer has not what a row asks for."""
    wanted = {
        "pages": pages and row.page_size is not None,
        "float8 caches": float8 and row.float8,
        "lengths": mixed and row.mixed,
    }
    for what, is_wanted in wanted.items():
        if is_wanted:
            raise NotImplementedError(f"it has no {what}")


CANDIDATES: dict[str, Callable] = {
    "jax_flash": jax_flash_with("mosaic_gpu"),
    "jax_flash xla": jax_flash_with("xla"),
    "cuDNN": _jax_nn("cudnn"),
    "FA3": _fa3,
    "jax.nn xla": _jax_nn("xla"),
}


def default_candidates() -> list[str]:
    if not timing.on_gpu():
        return ["jax_flash xla", "jax.nn xla"]
    fa3 = ["FA3"] if importlib.util.find_spec("dew_flash_attn") else []
    return ["jax_flash", "cuDNN", *fa3]


@functools.partial(jax.jit, static_argnums=0)
def reference(row: Row, arrays) -> jax.Array:
    """The output in float32, one sequence and key head at a time."""

    def whole(cache, scale):
        if row.page_size is not None:
            cache = cache[arrays["page_table"]].reshape(row.batch, -1, *cache.shape[2:])
        scale = jnp.ones(row.key_heads) if scale is None else scale
        return cache, jnp.broadcast_to(scale, (row.batch, row.key_heads))

    def one_key_head(x):
        query, key, key_scale, value, value_scale, length = x
        dot = functools.partial(jnp.einsum, precision="highest")
        key, value, query = (x.astype(jnp.float32) for x in (key, value, query))
        logits = dot("tgh,sh->gts", query, key) * key_scale * row.width**-0.5
        position = length - row.tokens + jnp.arange(row.tokens)
        seen = jnp.arange(row.capacity) <= position[:, None]
        weights = jax.nn.softmax(jnp.where(seen, logits, -jnp.inf))
        return dot("gts,sh->tgh", weights, value) * value_scale

    def one_sequence(x):
        *arrays, length = x
        lengths = jnp.broadcast_to(length, (row.key_heads,))
        return jax.lax.map(one_key_head, (*arrays, lengths))

    def heads_first(x):
        return x.swapaxes(1, 2)

    grouped = (row.batch, row.tokens, row.key_heads, -1, row.width)
    key, key_scale = whole(arrays["key_cache"], arrays.get("key_scale"))
    value, value_scale = whole(arrays["value_cache"], arrays.get("value_scale"))
    query = heads_first(arrays["query"].reshape(grouped))
    caches = (heads_first(key), key_scale, heads_first(value), value_scale)
    out = jax.lax.map(one_sequence, (query, *caches, arrays["lengths"]))
    return heads_first(out).reshape(arrays["query"].shape)


def read_terabytes_per_second(rounds: int = timing.ROUNDS, iterations: int = 10) -> float:
    """How fast this machine reads memory, in a sum over more than its caches hold."""
    size = 2**31 if timing.on_gpu() else 2**24  # bytes
    x = jax.random.normal(jax.random.key(0), (size // 2**14, 2**13), jnp.bfloat16)
    total = jax.jit(lambda x: jnp.sum(x, axis=1, dtype=jnp.float32))
    timed = timing.interleaved({"sum": total}, (x,), rounds, iterations)
    return x.nbytes / timed["sum"].mean / 1e9


def candidate(name: str) -> Callable:
    """One of CANDIDATES, or ours with a number of splits, as in "jax_flash 4 splits"."""
    if found := re.fullmatch(r"jax_flash (\d+) splits", name):
        return jax_flash_with("mosaic_gpu", num_splits=int(found[1]))
    return CANDIDATES[name]


def measure(row: Row, candidates: list[str], rounds: int, iterations: int) -> dict:
    """Checks a row, and times the candidates that are right.

    Returns:
      The row's name, its bytes and, for each candidate, its error, times and TB/s, or why it
      failed.
    """
    arrays = row.inputs()
    expected = reference(row, arrays)
    entries: dict[str, dict] = {}
    programs = {}
    for name in candidates:
        try:
            run = functools.partial(candidate(name), row)
            program = jax.jit(run).lower(arrays).compile()
            out = jax.block_until_ready(program(arrays))
        except Exception as e:  # a peer may not do this shape: say so, go on with the others
            entries[name] = {"failed": timing.reason(e)}
            continue
        error = float(relative_error((out,), (expected,)))
        entries[name] = {"error": error}
        if error <= TOLERANCE:
            programs[name] = timing.Bound(program, (arrays,))
    del expected
    for name, time in timing.interleaved(programs, (), rounds, iterations).items():
        entries[name] |= {
            "milliseconds": dataclasses.asdict(time),
            "terabytes_per_second": row.bytes / time.mean / 1e9,
        }
    return {"row": row.name, "bytes": row.bytes, "candidates": entries}


def problems(results: list[dict]) -> list[str]:
    """Where one of ours failed or is wrong."""
    found = []
    for result in results:
        for name, entry in result["candidates"].items():
            if is_ours(name) and "failed" in entry:
                found.append(f"{result['row']}: {name} failed: {entry['failed']}")
            elif is_ours(name) and not entry["error"] <= TOLERANCE:  # NaN too
                found.append(f"{result['row']}: {name} is off by {entry['error']:.1e}")
    return found


def best(result: dict) -> tuple[float, float]:
    """Milliseconds of the fastest of ours and of the fastest peer, NaN where there is none."""
    times = {
        name: entry["milliseconds"]["mean"]
        for name, entry in result["candidates"].items()
        if "milliseconds" in entry
    }
    ours = (time for name, time in times.items() if is_ours(name) and name in CANDIDATES)
    peers = (time for name, time in times.items() if not is_ours(name))
    return min(ours, default=math.nan), min(peers, default=math.nan)


def table(record: dict, candidates: list[str]) -> str:
    """Microseconds of every candidate; of ours, the rate of reading and the speedup."""
    lines = [["shape", *candidates, "TB/s", "of the read rate", "speedup over best peer", "error"]]
    for result in record["results"]:
        entries = result["candidates"]
        ours, peer = best(result)
        rate = result["bytes"] / ours / 1e9
        errors = [entry["error"] for entry in entries.values() if "error" in entry]
        times = [entries.get(name, {}).get("milliseconds") for name in candidates]
        lines.append(
            [
                result["row"],
                *(figure(1e3 * time["mean"] if time else None, ".1f") for time in times),
                figure(rate, ".2f"),
                figure(rate / record["read_terabytes_per_second"], ".2f"),
                figure(peer / ours, ".2f"),
                figure(reporting.worst(errors), ".1e"),
            ]
        )
    return markdown(lines)


def summarize(results: list[dict]) -> str:
    """The speedup over the best peer in the rows that have both."""
    ratios = {result["row"]: best(result)[1] / best(result)[0] for result in results}
    ratios = {row: ratio for row, ratio in ratios.items() if not math.isnan(ratio)}
    if not ratios:
        return "no row has both ours and a peer"
    lowest = min(ratios, key=lambda row: ratios[row])
    return (
        f"speedup over best peer {statistics.geometric_mean(ratios.values()):.3f}, the geometric"
        f" mean of {len(ratios)} of {len(results)} rows; smallest {ratios[lowest]:.3f}, {lowest}"
    )


def plot(record: dict, path: pathlib.Path) -> None:
    """Bars of the part of the read rate that each candidate reaches in every row."""
    results = record["results"]
    candidates = reporting.in_order(name for result in results for name in result["candidates"])
    heights = {
        name: [
            result["candidates"].get(name, {}).get("terabytes_per_second", 0)
            / record["read_terabytes_per_second"]
            for result in results
        ]
        for name in candidates
    }
    title = f"Decoding beside its peers: longer is faster\n{reporting.where(record)}"
    label = f"of the rate of reading memory, {record['read_terabytes_per_second']:.2f} TB/s"
    reporting.bars({label: heights}, [result["row"] for result in results], title, path)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line, with candidates and rows as lists of what there is."""
    parser = reporting.parser(__doc__)
    suite, names = "decode" if timing.on_gpu() else "small", ",".join(default_candidates())
    parser.add_argument("--suite", choices=SUITES, default=suite, help="which rows")
    parser.add_argument(
        "--candidates", default=names, help=f"of {', '.join(CANDIDATES)}, separated by commas"
    )
    parser.add_argument("--splits", default="", help="numbers, separated by commas, to try too")
    parser.add_argument("--rows", default="", help="regular expression that names of rows match")
    parser.add_argument("--rounds", type=int, default=timing.ROUNDS, help="turns of each")
    parser.add_argument("--iterations", type=int, default=10, help="calls in a round")
    reporting.add_results(parser)
    options = parser.parse_args(argv)
    options.candidates = options.candidates.split(",")
    if unknown := {*options.candidates} - {*CANDIDATES}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    if not re.fullmatch(r"(\d+(,\d+)*)?", options.splits):
        parser.error(f"splits: got {options.splits}, needs numbers separated by commas")
    options.candidates += [f"jax_flash {n} splits" for n in options.splits.split(",") if n]
    options.rows = [row for row in SUITES[options.suite] if re.search(options.rows, row.name)]
    if not options.rows:
        names = ", ".join(row.name for row in SUITES[options.suite])
        parser.error(f"rows: no row of {options.suite} has that: {names}")
    return options


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    read_rate = read_terabytes_per_second()
    results: list[dict] = []
    for row in timing.progress(options.rows, "decode"):
        results.append(measure(row, options.candidates, options.rounds, options.iterations))
        record = reporting.provenance() | {
            "read_terabytes_per_second": read_rate,
            "results": results,
        }
        # After each row, so that a run that is cut short leaves what it found.
        path = reporting.write(options.results, f"decode {options.suite}", record)
    calls = f"{options.rounds} x {options.iterations}"
    print(
        f"\n{reporting.where(record)}; microseconds, means of {calls} calls; reads"
        f" {read_rate:.2f} TB/s\n\n{table(record, options.candidates)}\n\n{summarize(results)}"
    )
    print(*problems(results), sep="\n")
    print(f"\nwritten: {path}")
    if importlib.util.find_spec("matplotlib"):
        plot(record, path.with_suffix(".png"))
        print(f"plotted: {path.with_suffix('.png')}")
    return 1 if problems(results) else 0


if __name__ == "__main__":
    raise SystemExit(main())
