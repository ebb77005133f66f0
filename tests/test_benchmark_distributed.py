"""The benchmark of several devices runs, checks what it times, and notices what is wrong."""

import functools
import json

import jax
import jax.numpy as jnp
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


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "methods", "masks"),
    [
        ([], distributed.METHODS, ["causal"]),
        (
            ["--masks", "window,documents", "--methods", "ring zigzag"],
            ["ring zigzag"],
            ["causal window 20", "causal 6 documents"],
        ),
    ],
    ids=["methods", "masks"],
)
def test_all_methods_and_masks(arguments, methods, masks, tmp_path, capsys):
    status, record = run(tmp_path, "--window", "20", "--documents", "3", *arguments)
    assert status == 0
    found = [(result["method"], result["devices"]) for result in record["results"]]
    assert found == len(masks) * [("one GPU", 1), *((name, 2) for name in methods)]
    for result in record["results"]:
        assert result["error"] < distributed.TOLERANCE
        assert result["ran"] == "xla"
        assert result["milliseconds"] > 0 and result["teraflops_a_device"] > 0
    printed = capsys.readouterr().out
    for mask in masks:
        assert f"b1 s128 4/2 heads H8 {mask} " in printed


@pytest.mark.parametrize("implementation", ["xla", "mosaic_gpu"])
def test_what_runs_attention_is_named(implementation):
    def attend(x):
        return jax_flash.attention(x, x, x, implementation=implementation)

    array = jax.ShapeDtypeStruct((1, 64, 1, 64), jnp.bfloat16)
    program = jax.jit(attend).trace(array).lower(lowering_platforms=("cuda",))
    assert distributed.implementations(program) == implementation


@pytest.mark.long
def test_wrong_results_are_noticed(tmp_path, monkeypatch, capsys):
    wrong = functools.partial(jax_flash.ring_attention, scale=0.5)
    monkeypatch.setitem(distributed.METHODS, "ring", wrong)
    status, _ = run(tmp_path, "--methods", "ring")
    assert status == 1
    assert "ring on 2 is off by" in capsys.readouterr().out


@pytest.mark.long
def test_kernels(tmp_path, monkeypatch, capsys):
    """Profiled, the launches of all devices are one list."""
    launches = [("hop", 2000.0), ("send", 500.0), ("hop", 3000.0)]
    monkeypatch.setattr(distributed.timing, "on_gpu", lambda: True)
    monkeypatch.setattr(distributed.timing, "kernels", lambda program, iterations: launches)
    _, record = run(tmp_path, "--methods", "ring", "--kernels")
    assert record["results"][1]["kernels"] == {"hop": [2.0, 3.0], "send": [0.5]}
    printed = capsys.readouterr().out
    assert "ring on 2: hop, 2 launches of 2.000 to 3.000 ms, 5.0 in all" in printed


def test_profile():
    """Of each transfer, what no kernel runs beside; kernels may overlap, and so may transfers."""
    events = [
        ("ncclDevKernel_SendRecv", 104.0, 112.0),
        ("hop", 101.0, 105.0),
        ("hop", 110.0, 115.0),
        ("add", 103.0, 106.0),
        ("MemcpyP2P", 102.0, 103.0),
    ]
    found = distributed.exposed(events)
    assert (found["milliseconds"], found["of_kernels"]) == (14.0, 10.0)
    assert found["transfers"] == [
        ("MemcpyP2P", 1.0, 1.0, 0.0),
        ("ncclDevKernel_SendRecv", 3.0, 8.0, 4.0),
    ]
    result = {"method": "ring", "row": "a row", "devices": 2, "profile": [found]}
    assert distributed.profile_lines(result) == [
        "ring, a row, GPU 0 of 2: 14.0 ms, kernels 10.0, 2 transfers 9.0, not hidden 4.0, "
        "most of ncclDevKernel_SendRecv at 3.0: 4.0 of 8.0"
    ]
    assert distributed.exposed([])["transfers"] == []


@pytest.mark.slow
def test_longest(tmp_path, capsys):
    """What fits is planned to, the longest of its kind, and as much of it runs as may."""
    memory = 0.02
    arguments = "--methods", "ring zigzag", "--longest", "--memory", str(memory)
    status, record = run(tmp_path, *arguments)
    (found,) = record["longest"]
    assert status == 0
    assert found["bytes_a_device"] <= 1e9 * memory
    assert found["fits"] > 128 and found["finite"]
    assert found["ran"] == found["fits"]
    assert found["error"] < distributed.TOLERANCE
    assert f"{found['fits']} positions fit in 0.0 GB" in capsys.readouterr().out


@pytest.mark.parametrize(
    "plan", [lambda n: 100 * n, lambda n: 300 + 70 * n, lambda n: int(60 * n**1.1)]
)
def test_longest_that_fits(plan):
    """Also where the plan of a longer one has less, or more, for each position."""
    plans = []

    def counted(length):
        plans.append(length)
        return plan(length)

    fits, planned = distributed.fitting(counted, 8, plan(8), 100_000)
    assert fits % 8 == 0 and planned == plan(fits) <= 100_000 < plan(fits + 8)
    assert len(plans) == len(set(plans)) < 10


def test_longest_is_as_long_as_seconds_allow():
    assert distributed.times_as_long(milliseconds=100, seconds=1) == 3
    assert distributed.times_as_long(milliseconds=100, seconds=0) == 1


@pytest.mark.parametrize("name", ["ring", "ring zigzag"])
def test_error_of_the_last_positions(name):
    """It is small, unless the last positions of any result are wrong."""
    row = distributed.Row(1, 128, 4, 2, 8, True)
    inputs = row.inputs()
    right = distributed.lowered("", row, 1, "xla").compile()(*inputs)

    def error(outputs):
        arrays = ([distributed.sharded(x, name, 2) for x in xs] for xs in (inputs, outputs))
        return distributed.error_of_last(*arrays, zigzag=name == "ring zigzag")

    assert error(right) < distributed.TOLERANCE
    for i, x in enumerate(right):
        wrong = x.at[:, -distributed._LAST].multiply(1.5)
        assert error([*right[:i], wrong, *right[i + 1 :]]) > distributed.TOLERANCE


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "star"], "unknown: star"),
        (["--masks", "stripes"], "unknown: stripes"),
        (["--devices", "2,100"], "--devices: got 2,100"),
        (["--longest", "ulysses", "--methods", "ring"], "--longest: not in --methods: ulysses"),
        (["--longest", "--masks", "window"], "--longest: needs the mask causal"),
        (["--kernels"], "--kernels needs NVIDIA GPUs"),
        (["--profile"], "--profile needs NVIDIA GPUs"),
    ],
)
def test_bad_options_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit):
        distributed.main(arguments)
    assert message in capsys.readouterr().err
