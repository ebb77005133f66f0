"""Finds the fastest settings of the forward kernel on a Hopper GPU: `python -m benchmarks.tune`.

Tries settings that fit in an SM on rows of `benchmarks.attention`, then sizes of sections with
the best of them. Each is checked against float32 before it is timed. Prints every figure, and the
best settings of each width beside the default as lines for pallas_kernels/defaults.py.
"""

import concurrent.futures
import dataclasses
import itertools
import math
import statistics
import sys
from collections.abc import Callable, Iterable

import jax.numpy as jnp

from benchmarks import attention, reporting, timing
from jax_flash.device import device_of
from pallas_kernels.config import Config, ForwardConfig
from pallas_kernels.defaults import BACKWARD, FORWARD, WIDTHS

REGISTERS = {2: (240, 24), 3: (160, 32)}  # the most that so many consumers can have
KEYS = (64, 128, 192)  # a step; 256 need more registers than a thread has, at every width
# Most of all settings fit at width 64: fewer stages there keep its search short.
STAGES = {64: (2, 3), 128: (2, 3, 4), 256: (2, 3, 4)}
SECTION_BYTES = tuple(megabytes << 20 for megabytes in (6, 12, 24, 48))

# What a thread needs beside its tiles. With 16 left (width 64, 256 keys) 144 bytes spill and every
# wgmma is serialised; with 32 left (3 consumers, 128 keys) 8 bytes spill, or none.
_ADDRESS_REGISTERS = 24
_SHARED_MEMORY = 232448  # bytes that a thread block may have
_NAMED_BARRIERS = 16
_ALIGNMENT = 1024  # bytes of what TMA fills
_NOTES = 512  # bytes of a consumer's threads (`pallas_kernels/ptx/notes.py`)


def registers_needed(width: int, config: ForwardConfig) -> int:
    """Registers of a consumer's thread: output, logits, weights, and a margin for addresses."""
    tiles = width // 2 + config.block_kv // 2 + config.block_kv // 4
    return tiles + _ADDRESS_REGISTERS


def shared_memory_bytes(width: int, config: ForwardConfig) -> int:
    """Bytes of a thread block of several tiles: their operands, output and notes, and mbarriers."""
    rows = config.query_buffers * config.block_q + 2 * config.stages * config.block_kv
    staged = config.block_q * min(width, config.staged_columns)
    mbarriers = config.query_buffers + 2 * config.stages
    notes = -(-_NOTES * config.consumers // _ALIGNMENT) * _ALIGNMENT
    return 2 * (rows * width + staged) + notes + 8 * mbarriers


def named_barriers(config: ForwardConfig) -> int:
    """Those of Mosaic GPU, of turns, and of free slots of K, V and the queries."""
    mosaic = config.consumers + 2
    return mosaic + config.consumers + 2 * config.stages + config.query_buffers


def fits(width: int, config: ForwardConfig) -> bool:
    return (
        registers_needed(width, config) <= config.registers[0]
        and shared_memory_bytes(width, config) <= _SHARED_MEMORY
        and named_barriers(config) <= _NAMED_BARRIERS
    )


def candidates(width: int) -> list[ForwardConfig]:
    """The settings to try: those of KEYS and STAGES that fit, with the default size of sections."""
    grid = itertools.product(REGISTERS, KEYS, STAGES[width], (1, 2))
    every = [
        dataclasses.replace(
            FORWARD[width],
            consumers=consumers,
            block_kv=block_kv,
            stages=stages,
            query_buffers=query_buffers,
            registers=REGISTERS[consumers],
        )
        for consumers, block_kv, stages, query_buffers in grid
    ]
    return [config for config in every if fits(width, config)]


def source(config: ForwardConfig) -> str:
    """The Python expression of some settings, without what is the class's default."""

    def literal(value) -> str:
        whole_mb = isinstance(value, int) and value > 0 and value % (1 << 20) == 0
        return f"{value >> 20} << 20" if whole_mb else repr(value)

    given = [
        f"{field.name}={literal(getattr(config, field.name))}"
        for field in dataclasses.fields(config)
        if getattr(config, field.name) != field.default
    ]
    return f"ForwardConfig({', '.join(given)})"


def candidate(width: int, config: ForwardConfig) -> Callable:
    """The kernel with these settings, as in `benchmarks.attention.CANDIDATES`."""
    return attention.jax_flash_with("mosaic_gpu", config=Config(config, BACKWARD[width]))


def benchmark(
    row: attention.Row, configs: Iterable[ForwardConfig], rounds: int, iterations: int
) -> dict:
    """Compiles, checks and times settings on one row: as `benchmarks.attention.measure`.

    The candidates of the result are named by their `source`.
    """
    inputs = row.inputs()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        built = {
            source(config): pool.submit(
                attention.build, candidate(row.width, config), row, "forward"
            )
            for config in configs
        }
        out, *_ = attention.expected(row, inputs)
        for future in timing.progress(built.values(), f"compile {row.name}"):
            concurrent.futures.wait([future])
    return attention.measure(row, "forward", built, inputs, (out,), rounds, iterations)


def search(
    width: int, rows: list[attention.Row], rounds: int, iterations: int
) -> tuple[list[dict], list[dict]]:
    """A result for each row of all settings, and one of sizes of sections with the best of them.

    The default settings are in both, since only what is timed together can be compared. The
    second list is empty if no settings were right in every row.
    """

    def run(what: str, configs: Iterable[ForwardConfig]) -> list[dict]:
        return [benchmark(row, configs, rounds, iterations) | {"search": what} for row in rows]

    default = FORWARD[width]
    configs = {source(config): config for config in [default, *candidates(width)]}
    results = run("settings", configs.values())
    means = mean_teraflops(results)
    if not means:
        return results, []
    best = configs[next(iter(means))]
    sizes = [dataclasses.replace(best, section_bytes=size) for size in SECTION_BYTES]
    return results, run("section_bytes", dict.fromkeys([default, best, *sizes]))


def speeds(result: dict) -> dict[str, float]:
    """TFLOP/s of the settings that were right in a row, fastest first."""
    timed = {n: e["teraflops"] for n, e in result["candidates"].items() if "teraflops" in e}
    return dict(sorted(timed.items(), key=lambda item: -item[1]))


def mean_teraflops(results: list[dict]) -> dict[str, float]:
    """Geometric means over rows, fastest first, of the settings that were right in all of them."""
    of_rows = [speeds(result) for result in results]
    everywhere = set.intersection(*map(set, of_rows)) if of_rows else set()
    means = {name: statistics.geometric_mean(row[name] for row in of_rows) for name in everywhere}
    return dict(sorted(means.items(), key=lambda item: -item[1]))


def table(results: list[dict], default: ForwardConfig) -> str:
    """TFLOP/s of each row's settings and the speedup over the default, fastest first."""
    lines = [["shape", "settings", "TFLOP/s", "speedup over default"]]
    for result in results:
        timed = speeds(result)
        reference = timed.get(source(default), math.nan)
        for name, speed in timed.items():
            ratio = reporting.figure(speed / reference, ".3f")
            lines.append([result["row"], name, f"{speed:.1f}", ratio])
    return reporting.markdown(lines)


def conclusion(width: int, results: list[dict]) -> str:
    """The best settings of a width and the default, as lines of pallas_kernels/defaults.py."""
    means = mean_teraflops(results)
    if not means:
        return f"Width {width}: no settings are right in every row."
    default = source(FORWARD[width])
    reference = means.get(default, math.nan)  # not there if it is wrong somewhere
    best, mean = next(iter(means.items()))
    return "\n".join(
        [
            f"Width {width}, geometric means of {len(results)} rows in TFLOP/s",
            f"best {mean:.1f}, speedup over default {reporting.figure(mean / reference, '.3f')}:",
            f"    {width}: {best},",
            f"default {reporting.figure(reference, '.1f')}:",
            f"    {width}: {default},",
        ]
    )


def main(argv: list[str] | None = None) -> int:
    parser = reporting.parser(__doc__)
    parser.add_argument("--widths", default=",".join(map(str, WIDTHS)), help="separated by commas")
    parser.add_argument("--suite", choices=attention.SUITES, default="train", help="which rows")
    parser.add_argument("--list", action="store_true", help="print what would be tried, and stop")
    attention.add_arguments(parser)
    options = parser.parse_args(argv)
    if unknown := {*options.widths.split(",")} - {*map(str, WIDTHS)}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    widths = list(map(int, options.widths.split(",")))

    if options.list:
        lines = [["width", "settings", "registers", "shared memory", "named barriers"]]
        for width in widths:
            for c in candidates(width):
                needs = registers_needed(width, c), shared_memory_bytes(width, c), named_barriers(c)
                lines.append([str(width), source(c), *map(str, needs)])
        print(reporting.markdown(lines))
        return 0

    rows = [row for row in attention.select(options.suite, options) if row.width in widths]
    if not rows:
        parser.error(f"rows: none of widths {widths} has {options.rows!r}")
    device = device_of(jnp.zeros(()))
    if not device.is_hopper:
        print(f"benchmarks.tune needs a Hopper GPU; this is {device}", file=sys.stderr)
        return 1

    record = reporting.provenance() | {"results": []}
    calls = f"{options.rounds} x {options.iterations}"
    conclusions = []
    for width in dict.fromkeys(row.width for row in rows):
        rows_of_width = [row for row in rows if row.width == width]
        settings, sections = search(width, rows_of_width, options.rounds, options.iterations)
        print(f"\n{attention.heading(record, calls)}\n")
        print(table(settings, FORWARD[width]))
        print()
        print(table(sections, FORWARD[width]))
        conclusions.append(conclusion(width, sections))
        # After each width, so that a search that is cut short leaves what it found.
        record["results"] += settings + sections
        path = reporting.write(options.results, f"tune {options.suite} forward", record)

    print("", *conclusions, sep="\n")
    found = attention.problems(record["results"])
    print(*itertools.chain(*found.values()), sep="\n")
    print(f"\nwritten: {path}")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
