"""The benchmarks run, check what they time, and notice what is wrong. Tiny sizes, on any device."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import attention, timing, train_lm

TINY = train_lm.Model(layers=1, heads=2, key_heads=1, head_width=64)


@pytest.fixture(scope="module")
def curves():
    """Losses of float32, xla and plain jax attention over a few steps."""
    return {
        name: train_lm.train(name, TINY, steps=25, batch=4, length=64)[0]
        for name in ("float32", "xla", "jax.nn")
    }


def test_training_lowers_the_loss(curves):
    for losses in curves.values():
        assert abs(losses[0] - np.log(256)) < 0.5  # at first every byte is about as likely
        assert np.mean(losses[-5:]) < losses[0] - 1.5


def test_implementations_train_alike(curves):
    assert train_lm.disagreement(curves) is None


@pytest.mark.parametrize("broken", ["acausal", "wrong scale"])
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


def test_plain_adam_is_that_of_optax():
    pytest.importorskip("optax")  # optimizer() takes optax's where it is installed
    params = {"a": jnp.array([1.0, -2.0]), "b": jnp.array([[0.5]])}
    start, update = train_lm.plain_adam(lambda step: 0.1 / (step + 1))
    other_start, other_update = train_lm.optimizer(lambda step: 0.1 / (step + 1))
    state, other_state, others = start(params), other_start(params), params
    for i in range(5):
        grads = jax.tree.map(lambda p, i=i: jnp.sin(p + i), params)
        params, state = update(grads, state, params)
        others, other_state = other_update(grads, other_state, others)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), params, others)


@pytest.mark.parametrize(("off_by", "status"), [(0.0, 0), (0.5, 1), (np.nan, 1)])
def test_comparison_on_the_command_line(curves, off_by, status, monkeypatch, capsys):
    def train(name, *sizes):
        return curves[name] + (off_by if name == "jax.nn" else 0.0), 1.0

    monkeypatch.setattr(train_lm, "train", train)
    assert train_lm.main(["--compare", "jax.nn", "--steps", "25"]) == status
    assert "largest difference of jax.nn and xla" in capsys.readouterr().out


def small_row(causal: bool) -> attention.Row:
    return attention.Row(1, 64, 4, 2, 64, causal)


@pytest.mark.parametrize("causal", [False, True])
def test_reference_has_the_gradients_of_attention(causal):
    inputs = [x.astype(jnp.float32) for x in small_row(causal).inputs()]

    def attend(query, key, value):
        return jax.nn.dot_product_attention(query, key, value, is_causal=causal)

    with jax.default_matmul_precision("highest"):
        out, backward = jax.vjp(attend, *inputs[:3])
        expected = (out, *backward(inputs[3]))
    for x, y in zip(attention.reference(*inputs, causal), expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def test_suite_is_checked_timed_and_written(tmp_path, capsys):
    sizes = ["--suite", "small", "--rows", "causal", "--rounds", "2", "--iterations", "1"]
    names = ["--candidates", "jax_flash xla,jax.nn xla"]
    assert attention.main([*sizes, *names, "--results", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*.json")
    record = json.loads(path.read_text())
    assert [r["passes"] for r in record["results"]] == ["forward", "both"]
    for result in record["results"]:
        for entry in result["candidates"].values():
            assert 0 < entry["error"] < attention.TOLERANCE
            times = entry["milliseconds"]
            assert 0 < times["fastest"] <= times["median"] <= times["slowest"]
    assert "b1 s256 4/2 heads H64 causal" in capsys.readouterr().out


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
    results = [{"row": "b4 s4096 H128 causal", "passes": "forward", "candidates": entries}]
    line = attention.table(results, list(entries), matmul=800.0).splitlines()[2]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[2:] == ["600", "500", "400", "-", "1.20", "0.75", "2.0e-03"]


def test_flops_of_a_row():
    row = attention.Row(4, 4096, 32, 8, 128, True)
    assert row.flops("forward") == 2 * 4 * 32 * 4096**2 * 128
    assert row.flops("both") == 3.5 * row.flops("forward")


@pytest.mark.skipif(timing.on_gpu(), reason="a GPU times kernels, and these have none")
def test_candidates_take_turns():
    calls = []
    candidates = {
        name: lambda name=name: jnp.asarray(calls.append(name) or 1.0) for name in ("a", "b")
    }
    times = timing.interleaved(candidates, (), rounds=2, iterations=2)
    assert "".join(calls) == "aaabbb" + "bbbaaa"  # a call to warm up, then two
    assert times.keys() == {"a", "b"}
