"""Writes the tables of benchmarks/README.md from what was measured: `python -m benchmarks.tables`.

A table stands between `<!-- table NAME -->` and `<!-- end -->`, and is of the records in
benchmarks/results that TABLES names. For new figures put their record there, and its name here.
With `--figures` it also draws the figures of all records again.
"""

import functools
import json
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from benchmarks import accuracy_fp8, attention, decode, reporting
from benchmarks.reporting import figure

README = pathlib.Path(__file__).parent / "README.md"
RECORDS = pathlib.Path(__file__).parent / "results"
PEERS = ("jax_flash", "cuDNN", "FA3")
TITLES = {"forward": "forward", "both": "forward + backward"}
# What is fastest by less than this is level with the next, and not in bold.
LEAD = 1.01

# By the beginnings of the names of records.
PLOTS: dict[str, Callable[[dict, pathlib.Path], None]] = {
    "accuracy-fp8": accuracy_fp8.plot,
    "attention": attention.plot,
    "decode": decode.plot,
}


def read(name: str) -> dict[str, Any]:
    return json.loads((RECORDS / f"{name}.json").read_text())


def page(what: str, names: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    """A table with what its figures are above it, and where and when each was measured."""
    header, *others = (list(line) for line in lines)
    rule = ["---"] * len(header)
    rows = "\n".join(f"| {' | '.join(line)} |" for line in (header, rule, *others))
    sources = [f"[{reporting.where(read(n))}](results/{n}.json)" for n in dict.fromkeys(names)]
    return "\n".join([f"{what}, measured on", ",\n".join(sources) + ":", "", rows])


def leading(rates: Mapping[str, float | None]) -> str | None:
    """Which of some rates is the highest, None if the next one is level or there is no other."""
    known = {name: rate for name, rate in rates.items() if rate is not None}
    first, *others = sorted(known, key=lambda name: -known[name]) or [""]
    return first if others and known[first] >= LEAD * known[others[0]] else None


def cells(rates: Mapping[str, float | None], shown: Mapping[str, str]) -> list[str]:
    """What is shown of each candidate, that which leads in bold."""
    best = leading(rates)
    return [f"**{text}**" if name == best else text for name, text in shown.items()]


def speeds(passes: Mapping[str, str], candidates: Iterable[str] = PEERS, rows: str = "") -> str:
    """TFLOP/s of `benchmarks.attention`.

    Args:
      passes: the name of the record that each of TITLES is of.
      rows: regular expression that names of rows match.
    """
    names = list(candidates)
    header = ["shape"]
    for kind in passes:
        header += [f"{TITLES[kind]}: {names[0]}", *names[1:]]
    lines: dict[str, list[str]] = {}
    for kind, record in passes.items():
        for result in read(record)["results"]:
            if result["passes"] == kind and re.search(rows, result["row"]):
                entries = result["candidates"]
                rates = {name: entries.get(name, {}).get("teraflops") for name in names}
                shown = {name: figure(rate, ".0f") for name, rate in rates.items()}
                lines.setdefault(result["row"], [result["row"]]).extend(cells(rates, shown))
    return page("TFLOP/s", passes.values(), [header, *lines.values()])


def costs(name: str) -> str:
    """Of `benchmarks.options`: times what the plain call takes."""
    results = [r for r in read(name)["results"] if r["candidate"] == "mosaic_gpu"]
    columns = list(dict.fromkeys((r["passes"], r["row"]) for r in results))
    columns.sort(key=lambda column: list(TITLES).index(column[0]))
    of_option: dict[str, dict[tuple[str, str], float]] = {}
    for result in results:
        key = result["passes"], result["row"]
        of_option.setdefault(result["option"], {})[key] = result["over_plain"]
    header = ["option", *(f"{TITLES[kind]}, {row}" for kind, row in columns)]
    lines = [
        [f"`{option}`", *(figure(found.get(column), ".2f") for column in columns)]
        for option, found in of_option.items()
        if option != "plain"
    ]
    return page("Times what the plain call takes", [name], [header, *lines])


def decoding(name: str) -> str:
    """Microseconds of `benchmarks.decode`."""
    record = read(name)
    lines = [["shape", *PEERS, "jax_flash, of the rate of reading memory"]]
    for result in record["results"]:
        entries = {peer: result["candidates"].get(peer, {}) for peer in PEERS}
        rates = {peer: entry.get("terabytes_per_second") for peer, entry in entries.items()}
        shown = {
            peer: figure(None if rate is None else result["bytes"] / rate / 1e6, ".1f")
            for peer, rate in rates.items()
        }
        ours = (rates["jax_flash"] or 0) / record["read_terabytes_per_second"]
        lines.append([result["row"], *cells(rates, shown), figure(ours, ".2f")])
    return page("Microseconds a call", [name], lines)


def generating(name: str) -> str:
    """Tokens a second of `benchmarks.generate --speed`."""
    results = read(name)["results"]
    names = reporting.in_order(candidate for r in results for candidate in r["candidates"])
    lines = [["batch", "pass", *names]]
    for result in results:
        entries = result["candidates"]
        rates = {name: entries.get(name, {}).get("tokens_per_second") for name in names}
        shown = {name: figure(rate, ",.0f") for name, rate in rates.items()}
        lines.append([str(result["batch"]), result["pass"], *cells(rates, shown)])
    return page("Tokens a second", [name], lines)


def scaling(names: Iterable[str]) -> str:
    """TFLOP/s a GPU of `benchmarks.distributed`, in brackets of what one GPU reaches."""
    found: dict[tuple[int, str], dict[str, str]] = {}
    for name in names:
        alone: dict[str, float] = {}
        for result in read(name)["results"]:
            mask = re.sub(r"^.* causal ?|\d+ (?=documents)", "", result["row"]) or "causal"
            rate, devices = result["teraflops_a_device"], result["devices"]
            text = f"{rate:.0f}"
            if devices == 1:
                alone[mask] = rate
            else:
                text += f" ({rate / alone[mask]:.2f})"
            found.setdefault((devices, result["method"]), {}).setdefault(mask, text)
    masks = list(dict.fromkeys(mask for of_method in found.values() for mask in of_method))
    header = ["GPUs", "method", *masks]
    lines = [
        [str(devices), method, *(of_method.get(mask, "-") for mask in masks)]
        for (devices, method), of_method in sorted(found.items(), key=lambda item: item[0][0])
    ]
    return page("TFLOP/s a GPU", names, [header, *lines])


def chapters(name: str) -> str:
    """Microseconds of `benchmarks.chapters`."""
    lines = [["shape", "candidate", "us", "speedup over the first"]]
    for result in read(name)["results"]:
        names, speedup = [result["row"], result["candidate"]], figure(result["speedup"], ".2f")
        lines.append([*names, figure(result["microseconds"], ".1f"), speedup])
    return page("Microseconds a call", [name], lines)


def both(name: str, rows: str = "") -> Callable[[], str]:
    """Forward, and forward and backward, of one record."""
    return functools.partial(speeds, dict.fromkeys(TITLES, name), rows=rows)


_MASKS = "attention-masks-nvidia-h200-2026-12-01"
TABLES: dict[str, Callable[[], str]] = {
    "train": both("attention-train-nvidia-h200-2026-11-30"),
    "windows": both(_MASKS, "window"),
    "documents": both(_MASKS, "documents"),
    "widths": both("attention-widths-nvidia-h200-2026-11-26"),
    "options": functools.partial(costs, "options-nvidia-h100-80gb-hbm3-2026-11-27"),
    "fp8": functools.partial(
        speeds,
        {"forward": "attention-fp8-nvidia-h200-2026-12-01"},
        ("jax_flash fp8", "cuDNN fp8", "jax_flash"),
    ),
    "decode": functools.partial(decoding, "decode-decode-nvidia-h200-2026-12-01"),
    "generate": functools.partial(generating, "generate-nvidia-h200-2026-11-23"),
    "distributed": functools.partial(
        scaling,
        (
            "distributed-4-nvidia-h200-2026-11-28",
            "distributed-4-window-documents-nvidia-h200-2026-11-28",
            "distributed-4-causal-window-documents-nvidia-h200-2026-11-28",
            "distributed-2-nvidia-h200-2026-11-22",
            "distributed-2-all-gather-nvidia-h200-2026-11-22",
        ),
    ),
    "chapters": functools.partial(chapters, "chapters-nvidia-h200-2026-11-28"),
}


def written(text: str) -> str:
    """A page with its tables as the records have them.

    Raises:
      KeyError: a table of the page is not in TABLES.
    """
    return re.sub(
        r"(<!-- table (\w+) -->\n).*?(<!-- end -->)",
        lambda found: f"{found[1]}{TABLES[found[2]]()}\n{found[3]}",
        text,
        flags=re.DOTALL,
    )


def draw() -> list[pathlib.Path]:
    """Draws again each figure that stands beside its record."""
    drawn = []
    for path in sorted(RECORDS.glob("*.json")):
        for beginning, plot in PLOTS.items():
            picture = path.with_suffix(".png")
            if path.name.startswith(beginning) and picture.exists():
                plot(json.loads(path.read_text()), picture)
                drawn.append(picture)
    return drawn


def main(argv: list[str] | None = None) -> int:
    parser = reporting.parser(__doc__)
    parser.add_argument("--figures", action="store_true", help="also draw all figures again")
    options = parser.parse_args(argv)
    README.write_text(written(README.read_text()))
    print(f"written: {README}")
    for path in draw() if options.figures else []:
        print(f"plotted: {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
