"""The benchmark of several devices runs, checks what it times, and notices what is wrong."""

import functools
import json

import pytest

import jax_flash
from benchmarks import distributed

SMALL = "--length 64 --heads 4 --key-heads 2 --width 8 --iterations 1 --implementation xla"


@pytest.fixture(autouse=True)
def short_checks(monkeypatch):
    monkeypatch.setattr(distributed, "_CHECKED_LENGTH", 32)


def run(tmp_path, *arguments):
    """Exit status and record of a small run over two devices."""
    options = [*SMALL.split(), "--devices", "2", "--results", str(tmp_path)]
    status = distributed.main([*options, *arguments])
    (path,) = tmp_path.glob("distributed-2-*.json")
    return status, json.loads(path.read_text())


def test_all_methods(tmp_path, capsys):
    status, record = run(tmp_path)
    assert status == 0
    found = [(result["method"], result["devices"]) for result in record["results"]]
    assert found == [("one GPU", 1), *((name, 2) for name in distributed.METHODS)]
    for result in record["results"]:
        assert result["error"] < distributed.TOLERANCE
        assert result["milliseconds"] > 0 and result["teraflops_a_device"] > 0
    assert "b1 s128 4/2 heads H8 causal" in capsys.readouterr().out


def test_wrong_results_are_noticed(tmp_path, monkeypatch, capsys):
    wrong = functools.partial(jax_flash.ring_attention, scale=0.5)
    monkeypatch.setitem(distributed.METHODS, "ring", wrong)
    status, _ = run(tmp_path, "--methods", "ring")
    assert status == 1
    assert "ring on 2 is off by" in capsys.readouterr().out


def test_kernels(tmp_path, monkeypatch, capsys):
    """Profiled, the launches of all devices are one list."""
    launches = [("hop", 2000.0), ("send", 500.0), ("hop", 3000.0)]
    monkeypatch.setattr(distributed.timing, "on_gpu", lambda: True)
    monkeypatch.setattr(distributed.timing, "kernels", lambda program, iterations: launches)
    _, record = run(tmp_path, "--methods", "ring", "--kernels")
    assert record["results"][1]["kernels"] == {"hop": [2.0, 3.0], "send": [0.5]}
    printed = capsys.readouterr().out
    assert "ring on 2: hop, 2 launches of 2.000 to 3.000 ms, 5.0 in all" in printed


def test_longest(tmp_path, capsys):
    """What fits is planned to, the longest of its kind, and as much of it runs as may."""
    memory = 0.02
    arguments = "--methods", "ring zigzag", "--longest", "--memory", str(memory)
    _, record = run(tmp_path, *arguments)
    (found,) = record["longest"]
    assert found["bytes_a_device"] <= 1e9 * memory
    assert found["fits"] > 128 and found["finite"]
    assert found["fits"] // 2 < found["ran"] <= found["fits"]
    assert f"{found['fits']} positions fit in 0.0 GB" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "star"], "unknown: star"),
        (["--devices", "100"], "--devices: got 100"),
        (["--kernels"], "--kernels needs NVIDIA GPUs"),
    ],
)
def test_bad_options_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit):
        distributed.main(arguments)
    assert message in capsys.readouterr().err
