"""What each special case of the kernels brings: `python -m benchmarks.special_cases`, on a GPU.

A special case is a setting, or a branch of a plan, that a more general one could stand in for. Each
is timed in turns with that one, on a row of its own. One that brings less than 1% is to go.
"""

import contextlib
import dataclasses
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax

from benchmarks import attention, reporting, timing
from benchmarks.rows import Row
from jax_flash import autodiff, launch
from pallas_kernels import (
    backward,
    backward_key,
    backward_plan,
    backward_query_product,
    bias_gradient,
    defaults,
    forward,
    forward_plan,
    forward_tiles,
    gradients,
    key_tiles_order,
    key_tiles_shares,
    scheduler,
    soft_cap,
)
from pallas_kernels.bias_gradient_pieces import Pieces
from pallas_kernels.config import ForwardConfig
from pallas_kernels.key_tiles_dealing import Dealing

Without = Callable[[], contextlib.AbstractContextManager]


def _other(owner: Any, **values: Any) -> Without:
    """With other attributes of a class or a module."""
    return lambda: mock.patch.multiple(owner, **values)


def _changed(table: dict, width: int, **changes: Any) -> Without:
    """With other settings of a width."""
    return lambda: mock.patch.dict(table, {width: dataclasses.replace(table[width], **changes)})


def _as_in(other: dict, table: dict, width: int) -> Without:
    """With the settings of a width that another table has."""
    return lambda: mock.patch.dict(table, {width: other[width]})


def _with_timed(fits: Callable[[ForwardConfig], bool], table: str = "TIMED_64") -> Without:
    """With those settings alone that fit."""
    return _other(defaults, **{table: tuple(x for x in vars(defaults)[table] if fits(x.config))})


def _timed_as(table: str = "TIMED_64", *, consumers: int | None = None, **changes: Any) -> Without:
    """With settings changed: all, or those of so many consumers."""

    def changed(timed):
        if consumers not in (None, timed.config.consumers):
            return timed
        return dataclasses.replace(timed, config=dataclasses.replace(timed.config, **changes))

    return _other(defaults, **{table: tuple(map(changed, vars(defaults)[table]))})


def _has_two(config: ForwardConfig) -> bool:
    return config.consumers == 2


def _has_three(config: ForwardConfig) -> bool:
    return config.consumers == 3


def _takes_128_keys(config: ForwardConfig) -> bool:
    return config.block_kv == 128


@dataclasses.dataclass(frozen=True)
class Special:
    """A special case.

    Attributes:
      passes: "forward" or "both".
      row: that it is for.
      without: what takes it away.
      options: more of `jax_flash.attention`.
    """

    passes: str
    row: Row
    without: Without
    options: Callable[[], dict[str, Any]] = dict


_PLAN = backward_plan.Plan
_DROPOUT = lambda: {"dropout_rate": 0.1, "dropout_key": jax.random.key(0)}
_without_four = _with_timed(lambda config: config.consumers < 4)
_without_one = _other(defaults, _TILES_ALONE=0)
_64, _128 = Row(4, 4096, 32, 32, 64, True), Row(4, 4096, 16, 16, 128, True)

SPECIAL = {
    "early values": Special(
        "forward",
        dataclasses.replace(_128, causal=False),
        _with_timed(lambda config: not config.early_values, "TIMED_128"),
    ),
    "products first": Special("forward", _64, _timed_as(products_first=False)),
    "three consumers": Special("forward", _64, _with_timed(_has_two)),
    "two of few rows": Special(
        "forward", Row(64, 197, 12, 12, 80, False), _with_timed(_has_three, "TIMED_80")
    ),
    "four consumers": Special("forward", Row(8, 256, 16, 16, 64, False), _without_four),
    "four consumers, long rows": Special("forward", Row(2, 1024, 16, 16, 64, False), _without_four),
    "two buffers of four consumers": Special(
        "forward",
        Row(64, 197, 16, 16, 64, False),
        _timed_as(consumers=4, query_buffers=1),
    ),
    "one consumer": Special("forward", Row(8, 128, 8, 8, 128, False), _without_one),
    "one consumer, width 192": Special("forward", Row(7, 72, 1, 1, 192, True), _without_one),
    "one consumer, shares of keys": Special(
        "forward", Row(1, 64, 8, 8, 128, False, key_length=8192), _without_one
    ),
    "tiles by number": Special(
        "forward",
        Row(4, 128, 48, 6, 128, True),
        _other(forward_tiles.Tiles, by_number=False),
    ),
    "output staged where queries were": Special(
        "forward",
        Row(7, 72, 1, 1, 192, True),
        _other(forward_plan.Plan, stages_in_queries=False),
    ),
    "narrow windows": Special(
        "forward",
        Row(1, 16384, 16, 16, 64, True, 256),
        _with_timed(_has_three),
    ),
    "64 keys of narrow windows": Special(
        "forward",
        Row(2, 8192, 12, 12, 64, False, 64),
        _with_timed(_takes_128_keys),
    ),
    "64 keys of narrow windows, width 128": Special(
        "forward",
        Row(2, 8192, 16, 16, 128, False, 64),
        _with_timed(_takes_128_keys, "TIMED_128"),
    ),
    "few tiles of a window": Special(
        "forward",
        Row(1, 3000, 8, 8, 64, True, 255),
        _with_timed(lambda config: config == defaults.TIMED_64[2].config),
    ),
    "64 keys up to 96 columns": Special(
        "forward",
        Row(4, 4096, 16, 16, 96, False),
        _with_timed(_has_two, "TIMED_96"),
    ),
    "64 keys up to 96 columns, 80": Special(
        "forward",
        Row(4, 4096, 16, 16, 80, True),
        _with_timed(_has_two, "TIMED_80"),
    ),
    "64 keys of boxes": Special(
        "forward",
        Row(4, 4096, 16, 16, 72, True),
        _with_timed(_has_two, "TIMED_72"),
    ),
    "few keys": Special(
        "forward",
        Row(32, 257, 12, 12, 64, False),
        _with_timed(_takes_128_keys),
    ),
    "few keys, width 128": Special(
        "forward",
        Row(32, 176, 16, 16, 128, False),
        _with_timed(_takes_128_keys, "TIMED_128"),
    ),
    "bias in tiles, width 64": Special(
        "forward",
        Row(4, 4096, 16, 16, 64, True, biased=True),
        _as_in(defaults.FORWARD_ELEMENTS, defaults.FORWARD_TILED_BIAS, 64),
    ),
    "bias in tiles, width 128": Special(
        "forward",
        Row(4, 4096, 16, 16, 128, True, biased=True),
        _as_in(defaults.FORWARD_ELEMENTS, defaults.FORWARD_TILED_BIAS, 128),
    ),
    "sections that end early": Special(
        "forward",
        Row(15, 1688, 1, 1, 128, True),
        _other(
            scheduler,
            section_that_ends_early=lambda cost, section_bytes, **sizes: (
                scheduler.heads_per_section(section_bytes, **sizes)
            ),
        ),
    ),
    "prefetches": Special(
        "both", Row(16, 1024, 16, 16, 128, False), _other(_PLAN, prefetches=False)
    ),
    "a tile for each block": Special(
        "both", Row(2, 512, 16, 16, 64, False), _other(_PLAN, dealing=Dealing.DRAWN)
    ),
    "lists of few short tiles": Special(
        "both", Row(5, 256, 26, 26, 64, True), _other(_PLAN, dealing=Dealing.DRAWN)
    ),
    "tickets": Special("both", _128, _other(_PLAN, dealing=Dealing.LISTED)),
    "blank steps": Special(
        "both", Row(1, 16384, 16, 16, 128, True, 1024), _other(_PLAN, has_blank_steps=False)
    ),
    "blank steps beyond the end": Special(
        "both", Row(8, 300, 12, 12, 64, False), _other(_PLAN, has_blank_steps=False)
    ),
    "numbers kept": Special(
        "both", Row(4, 4096, 32, 8, 128, True), _other(_PLAN, keeps_numbers=False)
    ),
    "early weights": Special("both", _64, _other(_PLAN, early_weights=False)),
    "early weights, width 128": Special(
        "both", dataclasses.replace(_128, causal=False), _other(_PLAN, early_weights=False)
    ),
    "addresses kept": Special("both", _128, _other(_PLAN, crowded=True)),
    "addresses kept, full": Special(
        "both", dataclasses.replace(_64, causal=False), _other(_PLAN, crowded=True)
    ),
    "early drops": Special(
        "both", dataclasses.replace(_64, causal=False), _other(_PLAN, drops_early=False), _DROPOUT
    ),
    "branches of a cap": Special(
        "both",
        dataclasses.replace(_128, soft_cap=30.0),
        _other(soft_cap, capped=functools.partial(soft_cap.capped, branches=False)),
    ),
    "blank steps of the forward": Special(
        "forward", Row(32, 577, 16, 16, 64, False), _other(forward_plan.Plan, has_blank_steps=False)
    ),
    "shares": Special(
        "both",
        Row(1, 8192, 8, 1, 128, True),
        _changed(defaults.BACKWARD, 128, shares=1),
    ),
    "shares of many heads": Special(
        "both", Row(2, 4096, 64, 8, 128, True), _other(key_tiles_shares, _MANY_APART=1.06)
    ),
    "shares amid a head": Special(
        "both",
        Row(3, 264, 32, 4, 24, False, key_length=200),
        _changed(defaults.BACKWARD, 64, shares=4),
    ),
    "last tiles alone in parts": Special(
        "both", Row(13, 1024, 12, 4, 24, False), _other(key_tiles_shares, _TRIED_PARTS=())
    ),
    "shares of several heads": Special(
        "both", Row(3, 3456, 24, 3, 128, False), _other(key_tiles_shares, _APART=1.0)
    ),
    "shares amid several heads": Special(
        "both", Row(2, 1500, 12, 4, 96, True), _other(key_tiles_shares, _PARTS_APART=1.0)
    ),
    "shares of unlike tiles, width 192": Special(
        "both", Row(2, 6656, 6, 2, 192, True), _other(key_tiles_shares, _WIDE_APART=1.0)
    ),
    "shares of more than 256 MB": Special(
        "both",
        Row(1, 4828, 35, 7, 256, False),
        _other(key_tiles_shares, _MOST_BYTES=256 << 20),
    ),
    "shares of keys": Special(
        "forward",
        Row(1, 64, 8, 8, 128, False, key_length=8192),
        _timed_as("TIMED_ALONE_128", shares=1),
    ),
    "shares of keys, more than SMs": Special(
        "forward",
        Row(1, 4856, 2, 1, 40, True),
        _timed_as(shares=1),
    ),
    "shares of keys, the last round": Special(
        "forward",
        Row(2, 264, 55, 55, 128, False, key_length=12544),
        _timed_as("TIMED_128", shares=1),
    ),
    "shares of keys, width 256": Special(
        "both",
        Row(3, 120, 1, 1, 256, False, key_length=994),
        _changed(defaults.FORWARD, 256, shares=1),
    ),
    "sections of dS' of the best size": Special(
        "both", Row(9, 5376, 11, 11, 192, True), _other(key_tiles_shares, _SIZES=1)
    ),
    "dQ as a product of 192 rows": Special(
        "both",
        Row(4, 12288, 2, 2, 192, False),
        _other(backward_query_product, _consumers=lambda *_: 2),
    ),
    "dS' of two heads rather than one": Special(
        "both",
        Row(4, 12288, 2, 2, 192, False),
        _other(key_tiles_shares, _FOR_TWO=1.0),
    ),
    "whole dQ": Special(
        "both",
        Row(22, 9713, 3, 3, 64, False, key_length=67),
        _other(_PLAN, dq_is_whole=False),
    ),
    "whole dQ, width 128": Special(
        "both", Row(19, 76, 48, 8, 128, False), _other(_PLAN, dq_is_whole=False)
    ),
    "whole dQ of a small call": Special(
        "both", Row(2, 64, 2, 2, 128, False), _other(_PLAN, dq_is_whole=False)
    ),
    "dQ of each tile apart": Special(
        "both",
        Row(31, 2821, 26, 26, 64, False, key_length=157),
        _other(backward_plan, MOST_APART=0),
    ),
    "dQ of each tile apart, width 128": Special(
        "both", Row(32, 200, 16, 16, 128, True), _other(backward_plan, MOST_APART=0)
    ),
    "dQ of each tile apart, a small call": Special(
        "both", Row(2, 150, 2, 2, 64, False), _other(backward_plan, MOST_APART=0)
    ),
    "masks of keys": Special(
        "both",
        Row(32, 512, 16, 16, 64, False, padding="mask"),
        _other(autodiff, has_key_mask=lambda call: False),
    ),
    "a mask of keys beside a bias": Special(
        "forward",
        Row(256, 256, 4, 4, 32, False, padding="mask", biased=True),
        _other(autodiff, hides_keys=lambda call, elements: False),
    ),
    "four consumers beside a bias": Special(
        "forward",
        Row(256, 256, 4, 4, 32, False, padding="mask", biased=True),
        _with_timed(_has_two, "TIMED_TILED_BIAS_64"),
    ),
    "three consumers beside a bias": Special(
        "forward",
        Row(48, 384, 16, 16, 48, False, biased=True),
        _with_timed(_has_two, "TIMED_TILED_BIAS_64"),
    ),
    "many tiles end without a branch": Special(
        "forward", Row(4, 8192, 64, 8, 64, True, 128), _other(forward_plan, _FEW_TILES=1 << 20)
    ),
    "sections of one size": Special(
        "both", Row(1, 16384, 32, 32, 64, True, documents=32), _other(scheduler, _EVEN=2.0)
    ),
    "heads beyond L2 one by one": Special(
        "both",
        Row(7, 8440, 28, 28, 128, False, key_length=816),
        _other(scheduler, _BEYOND_L2=1 << 40),
    ),
    "a bias's gradient by the main kernel": Special(
        "both",
        Row(1, 768, 16, 16, 24, False, biased=True),
        _other(gradients, _is_d_logits=lambda bias, plan: False),
    ),
    "a bias's gradient in shares": Special(
        "both",
        Row(256, 256, 4, 4, 32, False, padding="mask", biased=True),
        _other(Pieces, _dealt_out=lambda pieces: pieces),
    ),
    "dQ as a product": Special(
        "both",
        Row(4, 4096, 8, 8, 256, True),
        _changed(defaults.BACKWARD, 256, d_logits_bytes=0),
    ),
}


def _program(special: Special) -> jax.stages.Compiled:
    jax.clear_caches()
    for cached in (
        launch._module,
        forward._build,
        backward.build,
        key_tiles_shares.dealt_out,
        key_tiles_shares.d_logits_sections,
        key_tiles_order._section,
        backward_key._build,
        backward_query_product._build,
        bias_gradient._build,
    ):
        cached.cache_clear()
    candidate = attention.jax_flash_with("mosaic_gpu", **special.options())
    programs = attention.build(candidate, special.row, special.passes)
    assert isinstance(programs, list)
    return programs[-1]


def _time(name: str) -> dict[str, Any]:
    """Compiles both, says so, waits for a line, and times them."""
    special = SPECIAL[name]
    own = _program(special)
    with special.without():
        general = _program(special)
    print("compiled", flush=True)
    sys.stdin.readline()
    if own.as_text() == general.as_text():
        raise RuntimeError(f"{name}: nothing was taken away")
    inputs = special.row.inputs()
    error = float(attention.relative_error(own(*inputs), general(*inputs)))
    if not error < attention.tolerance("jax_flash"):
        raise RuntimeError(f"{name}: the results differ by {error:.1e}")
    programs = {"own": timing.Bound(own, inputs), "general": timing.Bound(general, inputs)}
    times = timing.interleaved(programs, (), timing.ROUNDS, 10)
    return {
        "name": name,
        "row": special.row.name,
        "passes": special.passes,
        "error": error,
        **{kind: time.mean for kind, time in times.items()},
    }


def _processes(names: list[str]) -> Iterator[dict[str, Any]]:
    """Results by name: all compile at a time, and are timed one after the other."""
    # What is patched is not in the key of a module on disk.
    environment = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    command = [sys.executable, "-m", "benchmarks.special_cases", "--one"]
    pipes: Any = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    started = [subprocess.Popen([*command, name], **pipes) for name in names]
    for process in started:
        assert process.stdout is not None
        process.stdout.readline()
    for name, process in zip(names, started, strict=True):
        out, _ = process.communicate("go\n")
        if process.returncode:
            yield {"name": name, "failed": f"exit code {process.returncode}"}
        else:
            yield json.loads(out.splitlines()[-1])


def line(result: dict[str, Any]) -> list[str]:
    """A row of the table."""
    if "failed" in result:
        return [result["name"], "", "", "", "", result["failed"]]
    own, general = result["own"], result["general"]
    shown = [result["name"], result["row"], result["passes"], f"{1e3 * own:.1f}"]
    return [*shown, f"{1e3 * general:.1f}", f"{general / own - 1:+.1%}"]


def main(argv: list[str] | None = None) -> int:
    parser = reporting.parser(__doc__)
    parser.add_argument("words", nargs="*", help="of which a name has one; all without")
    parser.add_argument("--one", help="times one, for the process that asks")
    reporting.add_results(parser)
    options = parser.parse_args(argv)
    if options.one:
        print(json.dumps(_time(options.one)))
        return 0
    if not timing.on_gpu():
        raise SystemExit("times of kernels need an NVIDIA GPU")
    words = options.words or [""]
    names = [name for name in SPECIAL if any(word in name for word in words)]
    results = list(_processes(names))
    record = reporting.provenance() | {"results": results}
    path = reporting.write(options.results, "special cases", record)
    header = ["special case", "row", "pass", "us", "without, us", "brings"]
    print(f"\n{reporting.where(record)}")
    print(reporting.markdown([header, *map(line, results)]))
    print(f"\nwritten: {path}")
    return int(any("failed" in x for x in results))


if __name__ == "__main__":
    raise SystemExit(main())
