"""The benchmarks run, check what they time, and notice what is wrong. Tiny sizes, on any device."""

import dataclasses
import functools
import json
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo

from benchmarks import (
    accuracy_fp8,
    attention,
    first_call,
    kernels,
    memory,
    options,
    timing,
    train_lm,
)
from tests.support.cases import slow

TINY = train_lm.Model(layers=1, heads=2, key_heads=1, head_width=64)


@pytest.fixture(scope="module")
def curves():
    """Losses of float32, xla and plain jax attention over a few steps."""
    return {
        name: train_lm.train(name, TINY, steps=25, batch=4, length=64)[0]
        for name in ("float32", "xla", "jax.nn", "fp8")
    }


@pytest.mark.long
def test_training_lowers_the_loss(curves):
    for losses in curves.values():
        assert abs(losses[0] - np.log(256)) < 0.5  # at first every byte is about as likely
        assert np.mean(losses[-5:]) < losses[0] - 1.5


@pytest.mark.long
def test_implementations_train_alike(curves):
    assert train_lm.disagreement(curves) is None


@pytest.mark.long
@pytest.mark.parametrize("broken", ["acausal", slow("wrong scale")])
def test_broken_attention_is_noticed_in_training(curves, broken, monkeypatch):
    def attend(query, key, value):
        scale = 0.5 if broken == "wrong scale" else None
        causal = broken != "acausal"
        return jax.nn.dot_product_attention(query, key, value, scale=scale, is_causal=causal)

    monkeypatch.setattr(train_lm, "attention_of", lambda _: attend)
    losses, _ = train_lm.train(broken, TINY, steps=25, batch=4, length=64)
    assert broken in train_lm.disagreement(curves | {broken: losses})


def test_batches_hold_the_text_once_before_repeating():
    text = np.arange(103, dtype=np.uint8)
    data = train_lm.batches(text, batch=2, length=9)
    epoch = np.concatenate([next(data) for _ in range(5)])
    assert epoch.shape == (10, 10)
    np.testing.assert_array_equal(np.sort(epoch[:, 0]), np.arange(0, 100, 10))
    np.testing.assert_array_equal(np.diff(epoch), 1)
    np.testing.assert_array_equal(epoch[:2], next(train_lm.batches(text, 2, 9)))


@pytest.mark.extras
def test_plain_adam_is_that_of_optax():
    pytest.importorskip("optax", reason="needs the extra benchmarks")
    params = {"a": jnp.array([1.0, -2.0]), "b": jnp.array([[0.5]])}
    start, update = train_lm.plain_adam(lambda step: 0.1 / (step + 1))
    other_start, other_update = train_lm.optimizer(lambda step: 0.1 / (step + 1))
    state, other_state, others = start(params), other_start(params), params
    for i in range(5):
        grads = jax.tree.map(lambda p, i=i: jnp.sin(p + i), params)
        params, state = update(grads, state, params)
        others, other_state = other_update(grads, other_state, others)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), params, others)


@pytest.mark.long
@pytest.mark.parametrize(("off_by", "status"), [(0.0, 0), (0.5, 1), (np.nan, 1)])
def test_comparison_on_the_command_line(curves, off_by, status, monkeypatch, capsys, tmp_path):
    def train(name, *sizes):
        return curves[name] + (off_by if name == "jax.nn" else 0.0), 1.0

    monkeypatch.setattr(train_lm, "train", train)
    arguments = ["--compare", "jax.nn", "--steps", "25", "--results", str(tmp_path)]
    assert train_lm.main(arguments) == status
    assert "largest difference of jax.nn and xla" in capsys.readouterr().out
    (written,) = tmp_path.iterdir()
    losses = json.loads(written.read_text())["losses"]
    np.testing.assert_array_equal(losses["jax.nn"], curves["jax.nn"] + off_by)


def small_row(causal: bool) -> attention.Row:
    return attention.Row(1, 64, 4, 2, 64, causal)


@pytest.mark.parametrize(
    ("row", "candidate"),
    [
        (small_row(False), "jax.nn xla"),
        (small_row(True), "jax.nn xla"),
        (dataclasses.replace(small_row(True), window=5), "jax.nn xla"),
        (dataclasses.replace(small_row(True), window=99), "jax.nn xla"),
        (dataclasses.replace(small_row(True), documents=5), "jax.nn xla"),
        (dataclasses.replace(small_row(True), value_width=40), "jax_flash xla"),
    ],
    ids=lambda x: getattr(x, "name", x),
)
def test_reference_has_the_gradients_of_attention(row, candidate):
    inputs = [x.astype(jnp.float32) for x in row.inputs()]
    attend = functools.partial(attention.CANDIDATES[candidate], **row.mask)

    with jax.default_matmul_precision("highest"):
        out, backward = jax.vjp(attend, *inputs[:3])
        expected = (out, *backward(inputs[3]))
    for x, y in zip(attention.reference(*inputs, **row.mask), expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [0, 5, 63, 99])
def test_flops_count_the_pairs_that_a_window_leaves(window):
    row = dataclasses.replace(small_row(True), window=window)
    query, key = np.arange(row.length)[:, None], np.arange(row.length)
    pairs = ((key <= query) & (key >= query - window)).sum()
    assert row.flops("forward") == 4 * row.batch * row.heads * row.width * pairs


@pytest.mark.parametrize("documents", [1, 5, 64])
def test_flops_count_the_pairs_within_documents(documents):
    row = dataclasses.replace(small_row(True), documents=documents)
    lengths = row.document_lengths
    assert len(lengths) == documents and sum(lengths) == row.length and min(lengths) > 0
    ids = np.repeat(np.arange(documents), lengths)
    pairs = np.tril(ids[:, None] == ids).sum()
    assert row.flops("forward") == 4 * row.batch * row.heads * row.width * pairs


def test_flops_count_the_columns_of_each_product():
    row = dataclasses.replace(small_row(False), width=192, value_width=128)
    of_a_column = 2 * row.batch * row.heads * row.length**2
    assert row.flops("forward") == of_a_column * (192 + 128)
    assert row.flops("backward") == of_a_column * (3 * 192 + 2 * 128)
    assert row.flops("both") == row.flops("forward") + row.flops("backward")


def test_suite_is_checked_timed_and_written(tmp_path, capsys):
    sizes = ["--suite", "small", "--rows", "causal$", "--rounds", "2", "--iterations", "1"]
    names = ["--candidates", "jax_flash xla,jax.nn xla"]
    assert attention.main([*sizes, *names, "--results", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*.json")
    record = json.loads(path.read_text())
    assert [r["passes"] for r in record["results"]] == ["forward", "backward", "both"]
    for result in record["results"]:
        assert [*result["candidates"]] == ["jax_flash xla", "jax.nn xla"]
        for entry in result["candidates"].values():
            assert 0 < entry["error"] < attention.TOLERANCE
            assert (entry.get("temp_bytes", 0) > 0) == (result["passes"] == "both")
            times = entry["milliseconds"]
            assert 0 < times["fastest"] <= times["mean"] <= times["slowest"]
        ours, peer = (entry["teraflops"] for entry in result["candidates"].values())
        summary = record["summary"][result["passes"]]
        assert summary["smallest"] == pytest.approx(ours / peer)
    printed = capsys.readouterr().out
    assert printed.count("| b1 s256 4/2 heads H64 causal") == 4  # three passes, and memory
    assert "the geometric mean of 1 of 1 rows" in printed


def test_rows_are_written_pass_by_pass(tmp_path):
    sizes = ["--suite", "small", "--rounds", "1", "--iterations", "1", "--results", str(tmp_path)]
    names = ["--candidates", "jax.nn xla", "--passes", "both,forward"]
    assert attention.main([*sizes, *names]) == 0
    (path,) = tmp_path.glob("attention-small-*.json")
    record = json.loads(path.read_text())
    rows = [row.name for row in attention.SUITES["small"]]
    order = [(result["passes"], result["row"]) for result in record["results"]]
    assert order == [(kind, row) for kind in ("both", "forward") for row in rows]
    assert record["summary"] == {}  # nothing of ours to compare


def test_all_is_compiled_before_anything_is_timed(tmp_path, monkeypatch):
    """Compiling launches kernels, which CUPTI would count as those of what is timed."""
    build, interleaved = attention.build, timing.interleaved
    order = []

    def slow_build(*args):
        time.sleep(0.3)
        order.append("built")
        return build(*args)

    def timed(*args):
        order.append("timed")
        return interleaved(*args)

    monkeypatch.setattr(attention, "build", slow_build)
    monkeypatch.setattr(timing, "interleaved", timed)
    sizes = ["--suite", "small", "--rounds", "1", "--iterations", "1", "--results", str(tmp_path)]
    assert attention.main([*sizes, "--candidates", "jax.nn xla", "--passes", "forward"]) == 0
    rows = len(attention.SUITES["small"])
    matmul = order.index("timed")
    assert order[matmul + 1 :] == ["built"] * rows + ["timed"] * rows


def plain(query, key, value, causal):
    return jax.nn.dot_product_attention(query, key, value, is_causal=causal)


def test_backward_alone_has_no_forward():
    @jax.custom_vjp
    def marked(query, key, value):
        return jnp.sin(query)

    marked.defvjp(
        lambda query, key, value: (jnp.sin(query), (key, value)),
        lambda kept, dout: (jnp.tanh(dout), *kept),
    )
    candidate = lambda query, key, value, causal: marked(query, key, value)
    row = small_row(causal=True)
    kept, backward = attention.build(candidate, row, "backward")
    (both,) = attention.build(candidate, row, "both")
    has = lambda program: [op in program.as_text() for op in ("sine(", "tanh(")]
    # The output is not among the residuals, so that nothing of the forward is left.
    assert [has(kept), has(backward), has(both)] == [[False, False], [False, True], [True, True]]
    _, key, value, dout = row.inputs()
    d_query, d_key, d_value = attention.bind([kept, backward], row.inputs())()
    np.testing.assert_array_equal(d_key, key)
    np.testing.assert_array_equal(d_value, value)
    assert attention.relative_error((d_query,), (jnp.tanh(dout.astype(jnp.float32)),)) < 1e-2


@pytest.mark.parametrize("broken", ["query", "key", "value"])
def test_wrong_gradient_fails_the_passes_that_have_it(broken, tmp_path, monkeypatch, capsys):
    def attend(query, key, value, causal):
        arrays = {"query": query, "key": key, "value": value}
        x = arrays[broken]
        arrays[broken] = x * 1.5 - jax.lax.stop_gradient(x * 0.5)  # its gradient is 1.5 times that
        return plain(**arrays, causal=causal)

    monkeypatch.setitem(attention.CANDIDATES, "jax_flash xla", attend)
    sizes = ["--suite", "small", "--rows", "full", "--rounds", "1", "--iterations", "1"]
    names = ["--candidates", "jax_flash xla", "--results", str(tmp_path)]
    assert attention.main([*sizes, *names]) == 1
    printed = capsys.readouterr().out
    assert "H64 full, forward: " not in printed
    assert "H64 full, backward: jax_flash xla is off by 5.0e-01" in printed
    assert "H64 full, both: jax_flash xla is off by 5.0e-01" in printed


def test_deterministic_candidate_stands_apart(tmp_path, monkeypatch):
    name = attention.DETERMINISTIC
    monkeypatch.setitem(attention.CANDIDATES, name, plain)
    sizes = ["--suite", "small", "--rows", "full", "--rounds", "1", "--iterations", "1"]
    names = ["--candidates", f"{name},jax.nn xla", "--results", str(tmp_path)]
    assert attention.main([*sizes, *names]) == 0
    (path,) = tmp_path.glob("*.json")
    record = json.loads(path.read_text())
    timed = {r["passes"]: "teraflops" in r["candidates"].get(name, {}) for r in record["results"]}
    assert timed == {"forward": False, "backward": True, "both": True}
    assert record["summary"] == {}
    with pytest.raises(SystemExit):
        attention.main(["--suite", "small", "--candidates", name, "--passes", "forward"])


def test_deterministic_candidate_is_asked_for(monkeypatch):
    asked = []
    monkeypatch.setattr(attention.jax_flash, "attention", lambda *_, **named: asked.append(named))
    for name in ("jax_flash", attention.DETERMINISTIC):
        attention.CANDIDATES[name](None, None, None, causal=True)
    assert [named["implementation"] for named in asked] == ["mosaic_gpu"] * 2
    assert [named["deterministic"] for named in asked] == [False, True]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("wrong", "is off by 1.0e-01"),
        ("failing", "failed: NotImplementedError: not this shape"),
        ("nan", "is off by nan"),
    ],
)
def test_faulty_candidate_fails_the_benchmark(fault, said, tmp_path, monkeypatch, capsys):
    def attend(query, key, value, causal):
        if fault == "failing":
            raise NotImplementedError("not this shape")
        out = jax.nn.dot_product_attention(query, key, value, is_causal=causal)
        return out * (jnp.nan if fault == "nan" else 1.1)

    monkeypatch.setitem(attention.CANDIDATES, "jax_flash xla", attend)
    sizes = ["--suite", "small", "--rows", "full", "--rounds", "1", "--iterations", "1"]
    names = ["--candidates", "jax_flash xla,jax.nn xla", "--passes", "forward"]
    assert attention.main([*sizes, *names, "--results", str(tmp_path)]) == 1
    assert f"H64 full, forward: jax_flash xla {said}" in capsys.readouterr().out
    (path,) = tmp_path.glob("*.json")
    (result,) = json.loads(path.read_text())["results"]
    assert "teraflops" not in result["candidates"]["jax_flash xla"]
    assert result["candidates"]["jax.nn xla"]["teraflops"] > 0


def test_table_names_the_best_peer():
    speeds = {"jax_flash": 600.0, "cuDNN": 500.0, "FA3": 400.0}
    entries = {name: {"error": 2e-3, "teraflops": speed} for name, speed in speeds.items()}
    entries["jax.nn xla"] = {"failed": "out of memory"}
    entries[attention.DETERMINISTIC] = {"error": 1e-3, "teraflops": 700.0}  # never the best of ours
    results = [{"row": "b4 s4096 H128 causal", "passes": "forward", "candidates": entries}]
    line = attention.table(results, list(entries), matmul=800.0).splitlines()[2]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[2:] == ["600", "500", "400", "-", "700", "1.20", "0.75", "2.0e-03"]


def result_of(row: str, passes: str, **speeds: float) -> dict:
    entries = {name: {"error": 2e-3, "teraflops": speed} for name, speed in speeds.items()}
    return {"row": row, "passes": passes, "candidates": entries}


def test_summary_is_of_the_rows_that_can_be_compared():
    results = [
        result_of("a", "forward", jax_flash=200.0, cuDNN=100.0, FA3=50.0),
        result_of("b", "forward", jax_flash=50.0, cuDNN=80.0, FA3=100.0),
        result_of("c", "forward", cuDNN=100.0),
        result_of("a", "both", jax_flash=30.0, FA3=20.0),
        result_of("a", "backward", FA3=20.0),
    ]
    summary = attention.summarize(results)
    assert summary["forward"] == {
        "rows": 2,
        "ahead": 1,
        "geometric_mean": pytest.approx(1.0),
        "smallest": 0.5,
        "smallest_row": "b",
        "worst": {"b": 0.5, "a": 2.0},
    }
    assert summary["both"]["geometric_mean"] == pytest.approx(1.5)
    assert summary.keys() == {"forward", "both"}


# --- FP8 ----------------------------------------------------------------------------------------


def test_fp8_suite_is_checked_timed_and_written(tmp_path, capsys):
    sizes = ["--suite", "fp8-small", "--rows", "causal", "--rounds", "1", "--iterations", "1"]
    assert attention.main([*sizes, "--results", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("attention-fp8-small-*.json")
    record = json.loads(path.read_text())
    (result,) = record["results"]
    assert (record["dtype"], result["passes"]) == ("fp8 and bf16", "forward")
    ours, of_16_bits = (result["candidates"][n] for n in ("jax_flash fp8 xla", "jax_flash xla"))
    assert of_16_bits["error"] < attention.TOLERANCE < ours["error"] < attention.FP8_TOLERANCE
    assert ours["teraflops"] > 0 and ours["quantisation_milliseconds"]["mean"] > 0
    assert "quantisation_milliseconds" not in of_16_bits
    ratio = ours["teraflops"] / of_16_bits["teraflops"]
    assert f"| {ratio:.2f} " in capsys.readouterr().out


def test_wrong_fp8_fails(tmp_path, monkeypatch, capsys):
    ours = attention.CANDIDATES["jax_flash fp8 xla"]
    wrong = dataclasses.replace(ours, result=lambda out: 0 * out)
    monkeypatch.setitem(attention.CANDIDATES, "jax_flash fp8 xla", wrong)
    sizes = ["--suite", "fp8-small", "--rows", "causal", "--rounds", "1", "--iterations", "1"]
    assert attention.main([*sizes, "--results", str(tmp_path)]) == 1
    assert "jax_flash fp8 xla is off by 1.0e+00" in capsys.readouterr().out


def test_fp8_has_no_backward():
    candidate = attention.CANDIDATES["jax_flash fp8 xla"]
    with pytest.raises(NotImplementedError, match="FP8 has a forward pass alone"):
        attention.build(candidate, small_row(True), "both")


def test_fp8_is_compared_with_fp8():
    result = result_of("a", "forward", jax_flash=600.0, cuDNN=500.0)
    for name, speed in (("jax_flash fp8", 900.0), ("cuDNN fp8", 1000.0)):
        result["candidates"][name] = {"error": 5e-2, "teraflops": speed}
    assert attention.best(result) == (900.0, 1000.0)
    assert attention.over_16_bits(result) == 1.5
    result["candidates"]["jax_flash fp8"] = {"failed": "no kernel"}
    assert np.isnan(attention.best(result)[0]) and np.isnan(attention.over_16_bits(result))


def test_cudnn_is_given_what_its_fp8_takes(monkeypatch):
    """It runs on a GPU alone, but can be lowered here; its arithmetic is written out."""
    row = dataclasses.replace(small_row(True), length=128, drawn_in="float32")
    query, key, value, _ = row.inputs()
    candidate = attention.CANDIDATES["cuDNN fp8"]
    *arrays, parameters = candidate.quantize(query, key, value)
    assert {x.dtype.name for x in arrays} == {"float8_e4m3fn"}
    scales = [parameters[f"descale_{name}"] for name in "qkv"]
    plain = [x.astype(jnp.float32) * scale for x, scale in zip(arrays, scales, strict=True)]
    for x, y in zip(plain, (query, key, value), strict=True):
        assert jnp.abs(x).max() == pytest.approx(float(jnp.abs(y).max()), rel=1e-5)
        np.testing.assert_allclose(x, y.astype(jnp.float32), rtol=2**-4, atol=1e-2)
    out = jax.nn.dot_product_attention(*plain, is_causal=True)
    in_fp8 = (out * parameters["scale_o"]).astype(jnp.float8_e4m3fn)
    assert (parameters["scale_s"] * parameters["descale_s"]).item() == 1
    expected, *_ = attention.reference(query, key, value, query, causal=True)
    result = candidate.result((in_fp8, parameters["scale_o"]))
    assert attention.relative_error((result,), (expected,)) < attention.FP8_TOLERANCE

    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91900)
    attend = jax.jit(functools.partial(candidate.attend, causal=True))
    lowered = attend.trace(*arrays, parameters).lower(lowering_platforms=("cuda",))
    assert "__cudnn$fmhaSoftmaxF8" in lowered.as_text()


def test_accuracy_of_fp8_is_measured_and_written(tmp_path, capsys):
    sizes = ["--rows", "64", "--keys", "512", "--longest", "1024", "--width", "64"]
    assert accuracy_fp8.main([*sizes, "--results", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("accuracy-fp8-*.json")
    record = json.loads(path.read_text())
    assert [*record["outliers"]["rmse"]] == ["bf16", *accuracy_fp8.METHODS]
    assert [(r["keys"], r["mean"]) for r in record["lengths"]] == [(1024, 0.0), (1024, 1.0)]
    for result in record["lengths"]:
        errors = result["errors"]
        floor, ours = errors["quantised, in float64"], errors["jax_flash fp8 xla"]
        beside = errors["jax_flash fp8 xla beside it"]
        assert 0 < beside < 5e-3
        assert ours == pytest.approx((floor**2 + beside**2) ** 0.5, rel=0.1)
    assert "| both " in capsys.readouterr().out


def test_inaccurate_fp8_fails(tmp_path, monkeypatch):
    ours = attention.CANDIDATES["jax_flash fp8 xla"]
    wrong = dataclasses.replace(ours, result=lambda out: 0 * out)
    monkeypatch.setitem(attention.CANDIDATES, "jax_flash fp8 xla", wrong)
    sizes = ["--rows", "64", "--keys", "256", "--longest", "1024", "--width", "64"]
    assert accuracy_fp8.main([*sizes, "--results", str(tmp_path)]) == 1


def test_memory_table_says_where_there_is_more():
    result = result_of("a", "both", jax_flash=1.0, FA3=1.0, cuDNN=1.0)
    result["candidates"]["jax_flash"]["temp_bytes"] = 3 << 19
    result["candidates"]["FA3"]["temp_bytes"] = 8 << 20
    without = result_of("a", "forward", jax_flash=1.0)
    lines = attention.memory_table([without, result], ["jax_flash", "FA3", "cuDNN"]).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0] == ["shape", "jax_flash", "FA3", "cuDNN"]
    assert cells[2:] == [["a", "1.5", "> 8.0", "-"]]


def test_flops_of_a_row():
    row = attention.Row(4, 4096, 32, 8, 128, True)
    assert row.flops("forward") == 2 * 4 * 32 * 4096**2 * 128
    assert row.flops("backward") == 2.5 * row.flops("forward")
    assert row.flops("both") == 3.5 * row.flops("forward")


@pytest.mark.skipif(timing.on_gpu(), reason="a GPU times kernels, and these have none")
def test_candidates_take_turns():
    calls = []
    candidates = {
        name: lambda name=name: jnp.asarray(calls.append(name) or 1.0) for name in ("a", "b", "c")
    }
    times = timing.interleaved(candidates, (), timing.ROUNDS, iterations=2)
    turns = "abc" + "cba" + "bca" + "acb" + "cab" + "bac"
    assert "".join(calls) == "".join(3 * name for name in turns)  # a call to warm up, then two
    assert times.keys() == {"a", "b", "c"}


def test_a_time_is_a_mean_over_all_rounds(monkeypatch):
    times = iter([[1.0, 1.0], [4.0, 2.0]])
    monkeypatch.setattr(timing, "milliseconds", lambda *args: next(times))
    assert timing.interleaved({"a": print}, (), 2, 2) == {"a": timing.Time(2.0, 1.0, 4.0)}


def test_profiler_sees_the_program_and_its_arguments(monkeypatch):
    seen = []

    def measure(fn, iterations):
        return lambda *args: (seen.append((fn, args)), [1.0] * iterations)

    monkeypatch.setattr(timing, "on_gpu", lambda: True)
    monkeypatch.setattr(timing.profiler, "measure", measure)
    program = jax.jit(lambda x, y, z: x + y + z)
    bound = timing.Bound(program, (1, 2))
    assert timing.interleaved({"bound": bound}, (3,), 1, 2) == {"bound": timing.Time(1.0, 1.0, 1.0)}
    assert seen == [(program, (1, 2, 3))]
    assert bound(3) == 6


def test_times_of_single_kernels(tmp_path, monkeypatch, capsys):
    def measure(fn, aggregate, iterations):
        assert not aggregate
        calls = [[("first", call / 1000), ("second", 0.25)] for call in range(iterations)]
        return lambda *args: (fn(*args), calls if iterations > 1 else calls[0])

    monkeypatch.setitem(attention.SUITES, "small", [small_row(causal=True)])
    arguments = ["--suite", "small", "--candidates", "jax_flash xla,FA3", "--passes", "backward"]
    arguments += ["--iterations", "5", "--results", str(tmp_path)]
    with pytest.raises(SystemExit, match="need an NVIDIA GPU"):
        kernels.main(arguments)
    monkeypatch.setattr(timing, "on_gpu", lambda: True)
    monkeypatch.setattr(timing.profiler, "measure", measure)
    assert kernels.main(arguments) == 0
    (path,) = tmp_path.glob("*.json")
    ours, peer = json.loads(path.read_text())["results"]
    assert ours["kernels"] == [["first", 2.0], ["second", 250.0]]
    assert "failed" in peer
    assert "| 252.0 | first 2.0, second 250.0" in capsys.readouterr().out

    once = timing.Bound(jax.jit(jnp.sin), (1.0,))
    assert timing.kernels(once, iterations=1) == [("first", 0.0), ("second", 250.0)]
    monkeypatch.setattr(timing.profiler, "measure", lambda *_, **__: lambda *_: (None, None))
    with pytest.raises(RuntimeError, match="no kernel was launched"):
        timing.kernels(once, iterations=1)


def test_options_are_checked_and_timed_beside_the_plain_call(tmp_path, monkeypatch, capsys):
    names = ["sinks", "bias [1, N, 1, S], its gradient"]
    arguments = ["--options", ",,".join(names), "--rounds", "1", "--results", str(tmp_path)]
    monkeypatch.setattr(options, "SMALL_ROWS", [small_row(causal=True)])
    assert options.main(arguments) == 0
    (path,) = tmp_path.glob("*.json")
    results = json.loads(path.read_text())["results"]
    expected = [(name, kind) for name in [options.PLAIN, *names] for kind in options.PASSES]
    assert [(r["option"], r["passes"]) for r in results] == expected
    assert all(0 < r["error"] < attention.TOLERANCE and r["over_plain"] > 0 for r in results)
    assert capsys.readouterr().out.count("| sinks ") == 2


@pytest.mark.parametrize("wrong", ["sinks", "bias"])
def test_a_wrong_gradient_of_an_option_fails(wrong, tmp_path, monkeypatch, capsys):
    attend = options.attend

    def broken(implementation, option, arrays, row, *inputs):
        if inputs[0].dtype != jnp.float32:  # what it is compared with is right
            arrays = {k: x * 1.5 - jax.lax.stop_gradient(x * 0.5) for k, x in arrays.items()}
        return attend(implementation, option, arrays, row, *inputs)

    name = {"sinks": "sinks", "bias": "bias [1, N, T, S], its gradient"}[wrong]
    arguments = ["--options", name, "--rounds", "1", "--results", str(tmp_path)]
    monkeypatch.setattr(options, "SMALL_ROWS", [small_row(causal=True)])
    monkeypatch.setattr(options, "attend", broken)
    assert options.main(arguments) == 1
    printed = capsys.readouterr().out
    assert f"{name}, both: xla is off by 5.0e-01" in printed
    assert f"{name}, forward: " not in printed


def test_memory_is_of_the_arrays_that_live_at_the_peak(tmp_path, monkeypatch, capsys):
    """The allocator's own counter is a GPU's; here it stands at what a call must hold."""
    row = small_row(causal=True)
    inputs = row.inputs()
    stats = {"peak_bytes_in_use": sum(x.nbytes for x in inputs) + 4096}
    device = types.SimpleNamespace(memory_stats=lambda: stats, device_kind="some", platform="cpu")
    monkeypatch.setattr(jax, "devices", lambda: [device])
    _, peak = memory.peak_bytes("jax_flash xla", row)
    assert peak == 4096
    stats.clear()
    with pytest.raises(RuntimeError, match="some does not count its memory"):
        memory.peak_bytes("jax_flash xla", row)


@pytest.mark.gpu
def test_memory_at_the_peak_of_a_gpu(tmp_path, monkeypatch, capsys):
    row = attention.Row(1, 1024, 8, 8, 64, True)
    monkeypatch.setattr(memory, "ROWS", [row])
    assert memory.main(["--candidates", "jax_flash", "--results", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*.json")
    (result,) = json.loads(path.read_text())["results"]
    results = 4 * row.length * row.heads * row.width * 2
    # Output, gradients, dQ in float32; not a matrix of all weights.
    assert results <= result["peak_bytes"] < 4 * results


@pytest.mark.long
def test_a_first_call_is_timed_in_a_process_that_has_imported_nothing(tmp_path):
    arguments = ["--passes", "forward", "--scenarios", "second process", "--results", str(tmp_path)]
    assert first_call.main(arguments) == 0
    (path,) = tmp_path.glob("first-call-*.json")
    (result,) = json.loads(path.read_text())["results"]
    assert result["step"] == "second process" and result["error"] < attention.TOLERANCE
    assert all(result[stage] > 0 for stage in first_call.STAGES)


def test_a_first_call_that_fails_or_is_wrong_is_noticed(tmp_path, monkeypatch, capsys):
    def run(candidate, passes, **options):
        if options.get("variants"):
            raise RuntimeError("no memory")
        stages = dict.fromkeys(first_call.STAGES, 1.0)
        return [{"step": step, "error": 1.0, **stages} for step in options["steps"]]

    monkeypatch.setattr(first_call, "run", run)
    arguments = ["--passes", "both", "--results", str(tmp_path), "--scenarios"]
    assert first_call.main([*arguments, "cold"]) == 1
    assert first_call.main([*arguments, "four variants"]) == 1
    assert "no memory" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        first_call.main(["--scenarios", "warm"])
