"""What benchmarks print, draw and write can be read; the tables of their page are the records'."""

import copy
import importlib
import io
import itertools
import json
import math
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from benchmarks import (
    attention,
    chapters,
    decode,
    kernels,
    memory,
    reporting,
    special_cases,
    tables,
    timing,
    train_lm,
)
from pallas_kernels import defaults
from pallas_kernels.problem import Problem

COMMANDS = sorted(
    path.stem
    for path in pathlib.Path(attention.__file__).parent.glob("*.py")
    if "reporting.parser(" in path.read_text() or path.stem == "kernels"
)


def test_tables_are_those_of_the_records():
    page = tables.README.read_text()
    assert tables.written(page) == page
    assert all(page.count(f"<!-- table {name} -->") == 1 for name in tables.TABLES)
    assert page.count("<!-- end -->") == len(tables.TABLES)


def test_what_leads_is_bold_unless_the_next_is_level():
    assert tables.leading({"a": 100.0, "b": 102.0, "c": None}) == "b"
    assert tables.leading({"a": 100.0, "b": 100.9}) is None
    assert tables.leading({"a": 100.0, "b": None}) is None
    assert tables.cells({"a": 3.0, "b": 2.0}, {"a": "3", "b": "2"}) == ["**3**", "2"]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_says_every_default(command, monkeypatch, capsys):
    """And results go where git does not see them."""
    shown = []
    show = reporting.argparse.ArgumentParser.parse_args
    monkeypatch.setattr(
        reporting.argparse.ArgumentParser,
        "parse_args",
        lambda self, argv=None: (shown.append(self), show(self, argv))[1],
    )
    with pytest.raises(SystemExit):
        importlib.import_module(f"benchmarks.{command}").main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    (parser,) = shown
    for action in parser._actions:
        assert action.help, action.dest
        if action.default not in (None, False, "", [], reporting.argparse.SUPPRESS):
            default = " ".join(str(action.default).split())
            assert f"(default: {default})".replace(" ", "") in text.replace(" ", ""), action.dest
    assert "default: None" not in text and "default: False" not in text
    if command != "tables":
        assert parser.get_default("results") == pathlib.Path("build/benchmarks")


def constants():
    """Of the settings, as they are now."""
    return {name: copy.copy(x) for name, x in vars(defaults).items() if name.isupper()}


@pytest.mark.parametrize("name", special_cases.SPECIAL)
def test_what_a_special_case_is_without_is_there(name):
    """To be replaced: names of settings and plans."""
    before = constants()
    with special_cases.SPECIAL[name].without():
        pass
    assert constants() == before


@pytest.mark.parametrize("name", special_cases.SPECIAL)
def test_a_special_case_of_settings_changes_those_of_its_row(name):
    special = special_cases.SPECIAL[name]
    row = special.row
    problem = Problem(
        row.batch,
        row.length,
        row.key_length or row.length,
        row.heads,
        row.key_heads,
        row.width,
        np.dtype(row.dtype),
        scale=1.0,
        lowest=None if row.window is None else -row.window,
        highest=0 if row.causal else row.window,
        has_bias=row.biased,
        soft_cap=row.soft_cap,
        dropout=int(bool(special.options())),
    )

    def settings():
        return defaults.for_problem(problem, tiled_bias=row.biased)

    own, own_constants = settings(), constants()
    with special.without():
        assert (settings() != own) == (constants() != own_constants)


def test_special_cases_need_a_gpu():
    with pytest.raises(SystemExit, match="NVIDIA GPU"):
        special_cases.main(["shares"])


def test_git_ignores_results():
    root = pathlib.Path(attention.__file__).parents[1]
    assert "build/" in (root / ".gitignore").read_text().splitlines()
    assert reporting.RESULTS.parts[0] == "build"


def test_a_table_has_no_nan():
    entries = {"jax_flash": {"error": math.nan}, "cuDNN": {"failed": "no such shape"}}
    result = {"row": "a", "passes": "forward", "bytes": 8, "candidates": entries}
    lines = [
        attention.table([result], [*entries], matmul=800.0),
        attention.fp8_table([{**result, "candidates": {"jax_flash fp8": {"error": math.nan}}}]),
        decode.table({"read_terabytes_per_second": 2.0, "results": [result]}, [*entries]),
    ]
    assert "nan" not in "".join(lines)
    assert reporting.figure(None, ".1f") == reporting.figure(math.nan, ".1f") == "-"
    assert math.isnan(reporting.worst([1.0, math.nan])) and math.isnan(reporting.worst([]))
    assert reporting.worst([1.0, 2.0]) == 2.0


def test_a_candidate_has_a_colour_of_its_own_in_every_figure():
    names = {*attention.CANDIDATES, *decode.CANDIDATES}
    assert names <= {*reporting.COLORS}
    assert len({*reporting.COLORS.values()}) == len(reporting.COLORS)
    assert reporting.color("FA3 beside it") == reporting.color("FA3")
    splits = [reporting.color(f"jax_flash {n} splits") for n in (1, 2, 4, 8)]
    assert all(a != b for a, b in itertools.combinations(splits, 2))


@pytest.mark.parametrize("name", ["attention-masks", "attention-fp8", "decode", "accuracy-fp8"])
def test_figures_say_what_where_and_when(name, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="needs the extra benchmarks")
    titles, finish = [], reporting._finish

    def noted(figure, title, *more):
        titles.append(title)
        finish(figure, title, *more)

    monkeypatch.setattr(reporting, "_finish", noted)
    path = next(tables.RECORDS.glob(f"{name}-*nvidia*.json"))
    record = json.loads(path.read_text())
    (plot,) = (plot for beginning, plot in tables.PLOTS.items() if name.startswith(beginning))
    plot(record, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes()[1:4] == b"PNG"
    (title,) = titles
    assert all(record[key] in title for key in ("device", "jax", "date"))
    assert "faster" in title or "better" in title


@pytest.mark.parametrize("has_tqdm", [True, False])
@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_is_shown_on_a_terminal_only(has_tqdm, is_terminal, monkeypatch):
    if has_tqdm:
        pytest.importorskip("tqdm", reason="needs the extra benchmarks")
    else:
        monkeypatch.setitem(sys.modules, "tqdm", None)
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: is_terminal, raising=False)
    monkeypatch.setattr(sys, "stderr", stream)
    assert list(timing.progress(range(3), "rows")) == [0, 1, 2]
    assert ("rows" in stream.getvalue()) == is_terminal


def test_training_says_what_auto_ran(monkeypatch, capsys):
    monkeypatch.setattr(train_lm, "train", lambda *_: ([1.0] * 5, 1.0))
    monkeypatch.setattr(train_lm, "ran", lambda *_: "some kernel")
    assert train_lm.main(["--steps", "5"]) == 0
    assert "auto runs on some kernel" in capsys.readouterr().out


def test_reporting_imports_no_jax():
    """A child of benchmarks.first_call imports it before it measures."""
    code = "import sys; import benchmarks.first_call; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_the_record_of_another_run_is_kept(tmp_path, monkeypatch):
    record = {"device": "H", "date": "2026-11-28 12:00 UTC"}
    names = []
    for results in ([1], [1, 2]):  # a run that writes as it goes
        names.append(reporting.write(tmp_path, "some rows", record | {"results": results}).name)
    monkeypatch.setattr(reporting, "_written", {})  # another run
    names += [reporting.write(tmp_path, "some rows", record | {"results": [3]}).name]
    assert names == ["some-rows-h-2026-11-28.json"] * 2 + ["some-rows-h-2026-11-28-2.json"]
    results = [json.loads((tmp_path / name).read_text())["results"] for name in names[1:]]
    assert results == [[1, 2], [3]]


def test_a_record_says_its_command(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/x/benchmarks/attention.py", "--rows", "H64 causal"])
    command = "python -m benchmarks.attention --rows 'H64 causal'"
    assert reporting.provenance()["command"] == command


def test_what_only_a_gpu_can_measure_is_said(monkeypatch):
    monkeypatch.setattr(timing, "on_gpu", lambda: False)
    for module in (chapters, kernels, memory):
        with pytest.raises(SystemExit, match="GPU"):
            module.main([])


def test_a_run_in_which_nothing_ran_fails(monkeypatch, tmp_path):
    failing = {"row": "r", "passes": "forward", "candidates": {"cuDNN": {"failed": "no GPU"}}}
    monkeypatch.setattr(attention, "compile_all", lambda rows, *_: [{} for _ in rows])
    monkeypatch.setattr(attention, "benchmark", lambda *_: [failing])
    arguments = ["--suite", "small", "--passes", "forward", "--candidates", "cuDNN"]
    assert attention.main([*arguments, "--results", str(tmp_path)]) == 1
