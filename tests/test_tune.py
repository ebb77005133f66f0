"""The tuner tries what the kernel can have, all of it, and chooses by what was right and fast."""

import dataclasses
import functools
import json
import re
from collections.abc import Callable

import jax
import numpy as np
import pytest

import jax_flash
from benchmarks import attention, tune
from jax_flash.device import Device
from pallas_kernels import defaults
from pallas_kernels.config import ForwardConfig
from tests.support import compile as compiler
from tests.support.cases import slow

HOPPER = Device("gpu", "NVIDIA H100 80GB HBM3", (9, 0))


def settings(
    width: int, consumers: int, block_kv: int, stages: int, query_buffers: int
) -> ForwardConfig:
    return dataclasses.replace(
        defaults.FORWARD[width],
        consumers=consumers,
        block_kv=block_kv,
        stages=stages,
        query_buffers=query_buffers,
        registers=tune.REGISTERS[consumers],
    )


def causal_attention(forward: ForwardConfig, row: attention.Row) -> tuple[Callable, tuple]:
    """The kernel with these settings, and shapes of its query, key and value."""
    inputs = jax.eval_shape(row.inputs)[:3]
    return functools.partial(tune.candidate(row.width, forward), causal=True), inputs


def lower(width: int, forward: ForwardConfig) -> None:
    attend, inputs = causal_attention(forward, attention.Row(70, 256, 2, 1, width, True))
    jax.jit(attend).trace(*inputs).lower(lowering_platforms=("cuda",))


def result(row: str, **speeds: float | None) -> dict:
    """What a benchmark says of made-up speeds; None is wrong."""
    entries: dict[str, dict] = {
        name: {"error": 0.5} if speed is None else {"error": 2e-3, "teraflops": speed}
        for name, speed in speeds.items()
    }
    return {"row": row, "passes": "forward", "candidates": entries}


@pytest.mark.parametrize("width", defaults.WIDTHS)
def test_candidates_hold_the_default_and_nothing_twice(width):
    found = tune.candidates(width)
    assert defaults.FORWARD[width] in found
    assert len(set(found)) == len(found)


@pytest.mark.long
@pytest.mark.parametrize("width", defaults.WIDTHS)
@pytest.mark.parametrize("need", ["shared_memory_bytes", "registers_needed", "named_barriers"])
def test_candidates_that_need_most_lower(width, need):
    measure = getattr(tune, need)
    arguments = (lambda c: (c,)) if need == "named_barriers" else (lambda c: (width, c))
    lower(width, max(tune.candidates(width), key=lambda c: measure(*arguments(c))))


# Each is one step from what fits: a stage, a query buffer or 64 keys less.
@pytest.mark.parametrize(
    ("width", "forward", "smaller"),
    [
        (64, (2, 192, 4, 2), (2, 192, 4, 1)),
        (128, (2, 128, 3, 1), (2, 128, 2, 1)),
        (128, (2, 192, 2, 1), (2, 128, 2, 1)),
        (128, (3, 64, 3, 2), (3, 64, 3, 1)),
        (256, (2, 64, 2, 2), (2, 64, 2, 1)),
    ],
)
def test_too_much_shared_memory_is_refused_as_by_the_compiler(width, forward, smaller):
    forward = settings(width, *forward)
    assert tune.fits(width, settings(width, *smaller))
    assert not tune.fits(width, forward)
    assert forward not in tune.candidates(width)
    said = f"smem_bytes={tune.shared_memory_bytes(width, forward)} > max_smem_bytes=232448"
    with pytest.raises(ValueError, match=said):
        lower(width, forward)


def test_too_many_named_barriers_are_refused_as_by_the_kernel():
    too_many = settings(64, 3, 64, 4, 1)
    assert tune.fits(64, settings(64, 3, 64, 3, 2))
    assert not tune.fits(64, too_many)
    with pytest.raises(ValueError, match="named barriers"):
        lower(64, too_many)


@pytest.mark.compiler
@pytest.mark.parametrize(("consumers", "fitting", "spilling"), [slow(2, 192, 256), (3, 128, 192)])
def test_registers_end_where_the_compiler_spills(consumers, fitting, spilling):
    most, too_many = (settings(64, consumers, keys, 2, 1) for keys in (fitting, spilling))
    assert tune.fits(64, most)
    assert not tune.fits(64, too_many)
    row = attention.Row(1, 512, 2, 1, 64, True)
    faults = [
        compiler.compile_kernels(*causal_attention(forward, row), sass=False)[0].faults()
        for forward in (most, too_many)
    ]
    assert faults[0] == []
    assert any("spills" in fault for fault in faults[1])


@pytest.mark.parametrize("consumers", tune.REGISTERS)
def test_no_consumer_or_producer_could_have_more_registers(consumers):
    most = settings(64, consumers, 64, 2, 1)
    for more in ((8, 0), (0, 8)):
        registers = tuple(np.add(most.registers, more).tolist())
        with pytest.raises(ValueError, match="for all warpgroups"):
            dataclasses.replace(most, registers=registers)


@pytest.mark.parametrize("section_bytes", [0, 1000, 12 << 20, 24 << 20])
def test_source_gives_the_settings(section_bytes):
    forward = dataclasses.replace(settings(64, 3, 128, 2, 1), section_bytes=section_bytes)
    assert eval(tune.source(forward)) == forward
    assert len({tune.source(c) for c in tune.candidates(64)}) == len(tune.candidates(64))


def test_table_is_fastest_first_with_the_ratio_to_the_default():
    default = tune.source(defaults.FORWARD[64])
    results = [result("a", slow=400, **{default: 500}, fast=600.04), result("b", slow=1, fast=2)]
    lines = tune.table(results, defaults.FORWARD[64]).splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells == [
        ["a", "fast", "600.0", "1.200"],
        ["a", default, "500.0", "1.000"],
        ["a", "slow", "400.0", "0.800"],
        ["b", "fast", "2.0", "-"],
        ["b", "slow", "1.0", "-"],
    ]


def test_means_are_geometric_and_of_what_is_right_everywhere():
    results = [
        result("a", even=400, uneven=100, wrong_once=900),
        result("b", even=400, uneven=900, wrong_once=None),
    ]
    means = tune.mean_teraflops(results)
    assert list(means) == ["even", "uneven"]  # arithmetic means have the other order
    np.testing.assert_allclose(list(means.values()), [400, 300])
    assert tune.mean_teraflops([result("a", wrong=None)]) == {}


@pytest.mark.parametrize("is_right", [True, False])
def test_sections_are_searched_with_the_best_settings(is_right, monkeypatch):
    best = settings(64, 2, 192, 3, 1)
    fastest = dataclasses.replace(best, section_bytes=48 << 20)
    tried = []

    def benchmark(row, configs, rounds, iterations):
        tried.append(list(configs))
        speeds = dict.fromkeys(map(tune.source, tried[-1]), 500)
        speeds[tune.source(best)] = 600
        if fastest in tried[-1]:
            speeds[tune.source(fastest)] = 601
        return result(row.name, **(speeds if is_right else dict.fromkeys(speeds)))

    monkeypatch.setattr(tune, "benchmark", benchmark)
    rows = attention.SUITES["train"][:2]
    first, second = tune.search(64, rows, 5, 10)
    assert set(tried[0]) == set(tried[1]) == set(tune.candidates(64))
    said = tune.conclusion(64, second)
    if not is_right:
        assert (len(first), second, len(tried)) == (2, [], 2)
        assert "no settings are right" in said
        return
    sizes = {dataclasses.replace(best, section_bytes=mb << 20) for mb in (6, 12, 24, 48)}
    assert set(tried[2]) == set(tried[3]) == sizes | {best, defaults.FORWARD[64]}
    assert "best 601.0, speedup over default 1.202:" in said
    lines = [eval(f"dict({{{line}}})") for line in said.splitlines() if "ForwardConfig" in line]
    assert lines == [{64: fastest}, {64: defaults.FORWARD[64]}]


@pytest.fixture
def small(monkeypatch):
    """A Hopper GPU played by XLA on this device: three settings on a small row."""
    monkeypatch.setattr(tune, "device_of", lambda _: HOPPER)
    tried = [defaults.FORWARD[64], settings(64, 2, 64, 2, 1), settings(64, 2, 64, 2, 2)]
    monkeypatch.setattr(tune, "candidates", lambda width: tried)
    row = attention.Row(1, 128, 2, 1, 64, True)
    monkeypatch.setitem(attention.SUITES, "train", [row])
    real, faults = jax_flash.attention, {}

    def attend(query, key, value, *, is_causal, implementation, config):
        fault = faults.get(config.forward)
        if fault == "failing":
            raise RuntimeError("ptxas has no more registers\nand more")
        out = real(query, key, value, is_causal=is_causal, implementation="xla")
        return out * 1.1 if fault == "wrong" else out

    monkeypatch.setattr(jax_flash, "attention", attend)
    return tried, faults


COMMAND = ["--widths", "64", "--rounds", "1", "--iterations", "1"]


def test_command_line_checks_times_and_writes(small, tmp_path, capsys):
    tried, _ = small
    assert tune.main([*COMMAND, "--results", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert all(tune.source(c) in text for c in tried)
    assert "Width 64, geometric means of 1 rows" in text
    (path,) = tmp_path.glob("tune-train-forward-*.json")
    record = json.loads(path.read_text())
    assert record["jax"] == jax.__version__
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", record["date"])
    assert [r["search"] for r in record["results"]] == ["settings", "section_bytes"]
    assert set(record["results"][0]["candidates"]) == {tune.source(c) for c in tried}
    for entry in record["results"][0]["candidates"].values():
        assert entry["error"] < attention.TOLERANCE
        assert entry["teraflops"] > 0


@pytest.mark.parametrize(
    ("fault", "said"),
    [("wrong", "is off by 1.0e-01"), ("failing", "failed: RuntimeError: ptxas has no more")],
)
def test_faulty_settings_are_listed_and_not_timed(fault, said, small, tmp_path, capsys):
    tried, faults = small
    faults[tried[1]] = fault
    assert tune.main([*COMMAND, "--results", str(tmp_path)]) == 1
    text = capsys.readouterr().out
    name = tune.source(tried[1])
    assert f"forward: {name} {said}" in text
    assert f"| {name}" not in text
    assert f"| {tune.source(tried[2])}" in text


def test_without_a_hopper_gpu_it_says_so(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(tune, "device_of", lambda _: Device("cpu", "cpu"))
    monkeypatch.setattr(tune, "search", None)  # not to be called: it would take hours
    assert tune.main(["--results", str(tmp_path)]) == 1
    assert "needs a Hopper GPU; this is cpu" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_list_needs_no_gpu(monkeypatch, capsys):
    monkeypatch.setattr(tune, "device_of", lambda _: Device("cpu", "cpu"))
    assert tune.main(["--list", "--widths", "128,256"]) == 0
    text = capsys.readouterr().out
    assert text.count("ForwardConfig(") == sum(len(tune.candidates(w)) for w in (128, 256))
    name = tune.source(settings(128, 2, 128, 2, 2))
    (line,) = (line for line in text.splitlines() if name in line)
    assert [cell.strip() for cell in line.strip("|").split("|")][2:] == ["184", "230448", "12"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--widths", "64,96"], "unknown: 96"), (["--rows", "H96"], "none of widths")],
)
def test_what_does_not_exist_is_refused(arguments, said, capsys):
    with pytest.raises(SystemExit) as stop:
        tune.main(arguments)
    assert stop.value.code == 2
    assert said in capsys.readouterr().err
