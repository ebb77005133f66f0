"""The decode benchmark runs, checks what it times, and notices what is wrong. Tiny sizes."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import decode

SMALL = decode.SUITES["small"]


def run(tmp_path, *arguments):
    """Exit status and record of one round over the small suite."""
    options = ["--suite", "small", "--rounds", "1", "--iterations", "1", "--results", str(tmp_path)]
    status = decode.main([*options, *arguments])
    (path,) = tmp_path.glob("decode-small-*.json")
    return status, json.loads(path.read_text())


@pytest.fixture(autouse=True)
def known_read_rate(monkeypatch):
    monkeypatch.setattr(decode, "read_terabytes_per_second", lambda: 2.0)


def test_small_suite(tmp_path, capsys):
    status, record = run(tmp_path, "--candidates", "jax_flash xla,jax.nn xla")
    assert status == 0
    assert [result["row"] for result in record["results"]] == [row.name for row in SMALL]
    first, paged, float8 = (result["candidates"] for result in record["results"])
    for entry in (*first.values(), paged["jax_flash xla"], float8["jax_flash xla"]):
        assert entry["error"] <= decode.TOLERANCE and entry["milliseconds"]["mean"] > 0
    assert "no pages" in paged["jax.nn xla"]["failed"]
    assert "no float8" in float8["jax.nn xla"]["failed"]
    printed = capsys.readouterr().out
    assert "1 of 3 rows" in printed and "b2 q3 s256 4/2 heads H64 pages of 16 mixed" in printed


def test_wrong_results_are_noticed_and_not_timed(tmp_path, monkeypatch, capsys):
    wrong = decode.jax_flash_with("xla", scale=0.5)
    monkeypatch.setitem(decode.CANDIDATES, "jax_flash xla", wrong)
    status, record = run(tmp_path, "--candidates", "jax_flash xla", "--rows", "float8")
    (result,) = record["results"]
    assert status == 1 and "milliseconds" not in result["candidates"]["jax_flash xla"]
    assert "jax_flash xla is off by" in capsys.readouterr().out


def test_failures_of_ours_are_noticed(tmp_path, monkeypatch, capsys):
    def broken(row, arrays):
        raise RuntimeError("out of order")

    monkeypatch.setitem(decode.CANDIDATES, "jax_flash", broken)
    status, _ = run(tmp_path, "--candidates", "jax_flash", "--rows", "float8")
    assert status == 1 and "jax_flash failed: RuntimeError: out of order" in capsys.readouterr().out


def test_ratio_and_rate_of_a_row():
    times = {
        "jax_flash 2 splits": 0.05,
        "jax_flash": 0.1,
        "jax_flash xla": 0.4,
        "cuDNN": 0.15,
        "FA3": 0.2,
    }
    entries = {name: {"milliseconds": {"mean": x}, "error": 0.0} for name, x in times.items()}
    record = {
        "read_terabytes_per_second": 2.0,
        "results": [{"row": "a", "bytes": 10**8, "candidates": entries}],
    }
    assert decode.best(record["results"][0]) == (0.1, 0.15)
    line = decode.table(record, ["jax_flash", "FA3", "cuDNN"]).splitlines()[-1]
    assert [cell.strip() for cell in line.strip("|").split("|")] == (
        ["a", "100.0", "200.0", "150.0", "1.00", "0.50", "1.50", "0.0e+00"]
    )
    assert decode.summarize(record["results"]).startswith("speedup over best peer 1.500")


def test_numbers_of_splits_to_try():
    options = decode.parse(["--suite", "small", "--candidates", "FA3", "--splits", "2,16"])
    assert options.candidates == ["FA3", "jax_flash 2 splits", "jax_flash 16 splits"]
    arrays = decode.Row(1, 1, 64, 1, 1, 64).inputs()
    with pytest.raises(NotImplementedError, match="num_splits 999"):
        decode.candidate("jax_flash 999 splits")(SMALL[0], arrays)


def test_bytes_and_lengths_of_mixed_rows():
    row = decode.Row(8, 1, 1024, 8, 2, 64, mixed=True)
    assert row.lengths.min() == 128 and row.lengths.max() == 1024
    assert row.bytes == 2 * row.lengths.sum() * 2 * 64 * 2
    assert not np.array_equal(np.sort(row.lengths), row.lengths)
    short = decode.Row(1, 1, 1024, 8, 2, 64, float8=True)
    assert short.bytes == 2 * 1024 * 2 * 64
    assert short.inputs()["key_cache"].dtype == jnp.float8_e4m3fn


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--candidates", "none"], "unknown: none"),
        (["--rows", "none"], "no row of"),
        (["--splits", "none"], "splits: got none"),
        (["--suite", "none"], "invalid choice: 'none'"),
    ],
)
def test_unknown_names_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit):
        decode.parse(arguments)
    assert message in capsys.readouterr().err
