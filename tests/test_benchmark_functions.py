"""benchmarks.functions: its rows are checked, timed and compared with what they should take."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import attention, flex, functions

ROWS = {row.variant: row for row in functions.SUITES["functions-small"]}
ARGUMENTS = ["--suite", "functions-small", "--rounds", "1", "--iterations", "1"]


@pytest.fixture(autouse=True)
def no_figure(monkeypatch):
    """Drawing would take half of the time."""
    monkeypatch.setattr(attention, "plot", lambda record, path: None)


def run(tmp_path, *more: str) -> tuple[int, dict]:
    status = attention.main([*ARGUMENTS, *more, "--results", str(tmp_path)])
    (path,) = tmp_path.glob("attention-functions-small-*.json")
    return status, json.loads(path.read_text())


def test_a_row_is_checked_timed_and_compared(tmp_path, capsys):
    names = ["--candidates", "jax_flash xla,plain,built-in"]
    status, record = run(tmp_path, *names, "--rows", "^documents:", "--passes", "forward")
    assert status == 0
    (result,), (summary,) = record["results"], record["bars"]
    entries = result["candidates"]
    assert [*entries] == ["jax_flash xla", "plain", "built-in"]
    assert all(0 < entry["error"] < attention.TOLERANCE for entry in entries.values())
    ours, plain, built_in = (e["milliseconds"]["mean"] for e in entries.values())
    ids = ROWS["documents"].of.captured(ROWS["documents"])["ids"][0]
    visible = np.tril(ids[:, None] == ids)
    share = visible.reshape(4, 64, 4, 64).any((1, 3)).mean()
    assert summary["share"] == share
    assert entries["plain"]["teraflops"] == pytest.approx(4 * 2 * 16 * visible.sum() / plain / 1e9)
    over_plain, over_built_in = (bar["ratio"] for bar in summary["bars"].values())
    assert over_plain == pytest.approx(ours / plain / share)
    assert over_built_in == pytest.approx(ours / built_in)
    assert f"| {share:.3f} " in capsys.readouterr().out


@pytest.mark.long
def test_all_rows_are_right(tmp_path):
    """Output and gradients, of one pass."""
    status, record = run(tmp_path, "--passes", "both")
    assert status == 0
    assert len(record["results"]) == len(ROWS)
    for result in record["results"]:
        for entry in result["candidates"].values():
            assert "jax.nn has no function" in entry.get("failed", "") or entry["teraflops"] > 0


@pytest.mark.long
@pytest.mark.parametrize("of_captured", [False, True])
def test_a_wrong_function_fails(of_captured, tmp_path, monkeypatch, capsys):
    """In what it gives, or in the gradient of what it captures."""

    def attend(query, key, value, row, table):
        table = table * 1.5 - jax.lax.stop_gradient(table * 0.5) if of_captured else -table
        return ours(query, key, value, row, table=table)

    ours = functions.CANDIDATES["jax_flash xla"]
    monkeypatch.setitem(functions.CANDIDATES, "jax_flash xla", attend)
    kind = "both" if of_captured else "forward"
    more = ["--candidates", "jax_flash xla", "--rows", "T5", "--passes", kind]
    assert run(tmp_path, *more)[0] == 1
    assert f"{ROWS['T5'].name}, {kind}: jax_flash xla is off by" in capsys.readouterr().out


def test_what_cannot_be_done_is_recorded(tmp_path, monkeypatch, capsys):
    """PyTorch that fails, as where it is not installed, and a score where there is none."""

    def fails():
        raise ModuleNotFoundError("No module named 'torch'")

    monkeypatch.setattr(flex, "_torch", fails)
    names = ["--candidates", "FlexAttention,jax.nn xla", "--passes", "forward"]
    status, record = run(tmp_path, *names, "--rows", "ALiBi")
    assert status == 1  # nothing ran
    (result,) = record["results"]
    assert result["candidates"]["FlexAttention"] == {
        "failed": "RuntimeError: ModuleNotFoundError: No module named 'torch'"
    }
    assert "NotImplementedError" in result["candidates"]["jax.nn xla"]["failed"]
    assert record["bars"][0]["bars"] == {}


def test_bars():
    times = {"jax_flash": 1.12, "plain": 2.0, "FlexAttention": 1.3}
    result = {
        "row": ROWS["prefix LM"].name,
        "passes": "both",
        "candidates": {n: {"milliseconds": {"mean": x}} for n, x in times.items()},
    }
    row = ROWS["prefix LM"]
    share = functions.share(row)
    found = functions.bars(result, row)
    assert found["over plain x share"].ratio == pytest.approx(1.12 / (2 * share))
    assert str(functions.Bar(1.154, at_most=1.15)) == "1.15 (<= 1.15)"
    assert str(functions.Bar(1.156, at_most=1.15)) == "1.16 (<= 1.15) missed"
    assert str(found["FlexAttention over ours"]) == "1.16 (>= 1.3) missed"
    assert str(functions.Bar(2.0)) == "2.00"
    assert functions.bars(result | {"candidates": {}}, row) == {}


@pytest.mark.long
def test_reference_has_the_gradients_of_attention():
    """Beside jax.nn, which takes masks and biases as arrays."""
    row = dataclasses.replace(ROWS["T5"], causal=True)
    *arrays, dout, table = (x.astype(jnp.float32) for x in row.inputs())

    def attend(query, key, value, table):
        place = jnp.arange(row.length)
        distance = (place - place[:, None]).clip(-functions.FARTHEST, functions.FARTHEST)
        bias = table[distance + functions.FARTHEST].transpose(2, 0, 1)[None]
        return jax.nn.dot_product_attention(query, key, value, bias, is_causal=True)

    with jax.default_matmul_precision("highest"):
        out, vjp = jax.vjp(attend, *arrays, table)
        right = out, *vjp(dout)
    for x, y in zip(functions.expected(row, row.inputs()), right, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=2e-4)
