"""What the benchmarks share to be read: command lines, records, tables and figures.

It imports neither jax nor matplotlib before it needs them: `benchmarks.first_call` times imports.
"""

import argparse
import colorsys
import datetime
import itertools
import json
import math
import pathlib
import re
import shlex
import sys
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

RESULTS = pathlib.Path("build/benchmarks")  # git ignores it

# Of candidates, in the order of legends. Those in one colour family are ours.
COLORS = {
    "jax_flash": "#1f77b4",
    "jax_flash deterministic": "#9ecae1",
    "jax_flash xla": "#17becf",
    "jax_flash fp8": "#6a3d9a",
    "jax_flash fp8 promoting": "#c77cff",
    "jax_flash fp8 xla": "#b3a2d0",
    "plain": "#c6dbef",
    "built-in": "#6baed6",
    "cuDNN": "#2ca02c",
    "cuDNN fp8": "#98b954",
    "FA3": "#d62728",
    "tokamax": "#ff7f0e",
    "FlexAttention": "#e377c2",
    "jax.nn xla": "#7f7f7f",
    "quantised, in float64": "#000000",
}
_BESIDE = " beside it"  # a second curve of a candidate


# --- command lines -------------------------------------------------------------------------------


class _WithDefaults(argparse.ArgumentDefaultsHelpFormatter):
    """Says each default in the help, but for those that only mean that nothing was given."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False or action.default == "":
            return action.help
        return super()._get_help_string(action)


def parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser that a benchmark describes by the first line of its docstring.

    Its help says defaults. It can do so for arguments with a `help` of their own only.
    """
    description = (doc or "").split("\n")[0]
    return argparse.ArgumentParser(description=description, formatter_class=_WithDefaults)


def add_results(to: argparse._ActionsContainer) -> None:
    """The argument that says where results go."""
    where = "directory to write to; benchmarks/results for what is to be kept"
    to.add_argument("--results", type=pathlib.Path, default=RESULTS, help=where)


# --- records -------------------------------------------------------------------------------------


def provenance() -> dict[str, Any]:
    """Where, when and how something was measured: device, jax, date, and the command."""
    import jax

    module = pathlib.Path(sys.argv[0]).stem
    return {
        "command": shlex.join(["python", "-m", f"benchmarks.{module}", *sys.argv[1:]]),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC",
    }


def where(record: Mapping[str, Any]) -> str:
    """The provenance of a record in words."""
    return f"{record['device']}, jax {record['jax']}, {record['date']}"


_written: dict[pathlib.Path, pathlib.Path] = {}  # what this process may write again, by its name


def write(directory: pathlib.Path, title: str, record: dict[str, Any]) -> pathlib.Path:
    """Writes a record with `provenance` as JSON, named after its title, device and date.

    The record of another run has its name for good: this one gets a number.
    """
    directory.mkdir(parents=True, exist_ok=True)
    stem = re.sub(r"\W+", "-", f"{title} {record['device']} {record['date'][:10]}".lower())
    wanted = directory / f"{stem}.json"
    names = (wanted.with_stem(f"{stem}-{n}") for n in itertools.count(2))
    free = (path for path in itertools.chain([wanted], names) if not path.exists())
    path = _written.setdefault(wanted, next(free))
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


# --- tables --------------------------------------------------------------------------------------


def figure(x: float | None, spec: str) -> str:
    """A number as a table has it, "-" where there is none."""
    return "-" if x is None or math.isnan(x) else format(x, spec)


def worst(errors: Iterable[float]) -> float:
    """The largest of errors; NaN if one is NaN, or there is none."""
    errors = list(errors)
    return math.nan if not errors or any(map(math.isnan, errors)) else max(errors)


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """A table whose first line is the header."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = ["| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([rows[0], rule, *rows[1:]])


# --- figures -------------------------------------------------------------------------------------


def color(candidate: str) -> Any:
    """What a candidate has in every figure; of one without a colour, a hue from its name."""
    name = candidate.removesuffix(_BESIDE)
    return COLORS.get(name) or colorsys.hsv_to_rgb(zlib.crc32(name.encode()) % 360 / 360, 0.5, 0.8)


def in_order(candidates: Iterable[str]) -> list[str]:
    """Each candidate once, in the order of COLORS; what has none there comes last."""
    order = list(COLORS)
    last = len(order)
    key = lambda name: order.index(name) if name in order else last
    return sorted(dict.fromkeys(candidates), key=key)


def bars(
    panels: Mapping[str, Mapping[str, Sequence[float]]],
    rows: Sequence[str],
    title: str,
    path: pathlib.Path,
) -> None:
    """Draws a panel for each title, in which each candidate has a bar for every row, or none.

    Bars lie, so that names of rows can be read. Where a height is 0 a candidate has none.
    """
    plt = _pyplot()
    names = in_order(name for heights in panels.values() for name in heights)
    figure, axes = plt.subplots(
        1,
        len(panels),
        figsize=(3 + 3.6 * len(panels), 1.6 + 0.45 * len(rows)),
        squeeze=False,
        sharey=True,
        layout="constrained",
    )
    drawn = {}
    for axis, (label, heights) in zip(axes[0], panels.items(), strict=True):
        shown = [name for name in names if any(heights.get(name, ()))]
        thickness = 0.8 / max(1, len(shown))
        for i, name in enumerate(shown):
            offset = (i - (len(shown) - 1) / 2) * thickness
            drawn[name] = axis.barh(
                [row + offset for row in range(len(rows))],
                heights[name],
                thickness,
                color=color(name),
            )
        axis.set_title(label, loc="left", fontsize=10)
        axis.grid(axis="x", alpha=0.3)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(y=0.01)
    axes[0, 0].set_yticks(range(len(rows)), rows)
    axes[0, 0].invert_yaxis()  # the first row on top
    _finish(figure, title, {name: drawn[name] for name in names if name in drawn}, path)


def curves(
    panels: Mapping[str, Mapping[str, Sequence[float]]],
    x: Sequence[int],
    labels: tuple[str, str],
    title: str,
    path: pathlib.Path,
) -> None:
    """Draws a panel for each title, in which each candidate has a curve; both axes are logarithmic.

    Args:
      panels: what each candidate has at every one of `x`.
      labels: of both axes.
    """
    plt = _pyplot()
    names = in_order(name for of_panel in panels.values() for name in of_panel)
    figure, axes = plt.subplots(
        1, len(panels), figsize=(4.5 * len(panels), 4.2), sharey=True, squeeze=False,
        layout="constrained",
    )  # fmt: skip
    drawn = {}
    for axis, (label, of_panel) in zip(axes[0], panels.items(), strict=True):
        for name in (name for name in names if name in of_panel):
            style = "--" if name.endswith(_BESIDE) else "-"
            (drawn[name],) = axis.plot(x, of_panel[name], style, marker="o", color=color(name))
        axis.set_title(label, loc="left", fontsize=10)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(x, [f"{i:,}" for i in x])
        axis.set_xlabel(labels[0])
        axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel(labels[1])
    _finish(figure, title, drawn, path)


def _pyplot():
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    return plt


def _finish(figure, title: str, drawn: Mapping[str, Any], path: pathlib.Path) -> None:
    """Title above, legend below, where neither hides anything."""
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    figure.legend(drawn.values(), drawn.keys(), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=120)
    _pyplot().close(figure)
