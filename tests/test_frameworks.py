"""benchmarks.frameworks at its small sizes: it runs, and notices what is wrong."""

import json

import pytest

from benchmarks import frameworks
from tests.support.cases import slow


def test_disagreement():
    right = {"losses apart": 1e-3, "gradients apart": 0.02}
    of = lambda **entry: {"before": right, "jax_flash": right | entry}
    assert frameworks.disagreement(of()) is None
    assert "losses of jax_flash" in frameworks.disagreement(of(**{"losses apart": 0.01}))
    wrong = frameworks.disagreement(of(**{"gradients apart": float("nan")}))
    assert "gradients of jax_flash and before: nan apart" in wrong
    assert frameworks.disagreement(of(failed="memory")) == "jax_flash failed"
    alone = {"before": {"failed": "memory"}, "jax_flash": right}
    assert "nothing to compare" in frameworks.disagreement(alone)


def test_table():
    times = {"before": 6.0, "jax_flash": 4.0}
    entries = {name: {"milliseconds": {"mean": x}} for name, x in times.items()}
    failed = {"before": {"failed": "memory"}, "jax_flash": entries["jax_flash"]}
    results = [{"model": "vit", "candidates": entries}, {"model": "dit", "candidates": failed}]
    _, *lines = frameworks.table(results)
    assert lines == [["vit", "6.0", "-", "4.0", "1.50", "-"], ["dit", "-", "-", "4.0", "-", "-"]]


@pytest.mark.long
@pytest.mark.parametrize(("model", "needs"), [("vit", "equimo"), slow("dit", "flaxdiff")])
def test_training_alike_and_times(model, needs, tmp_path, capsys):
    pytest.importorskip(needs, reason="needs the extra models")
    arguments = ["--models", model, "--rounds", "2", "--steps", "1", "--results", str(tmp_path)]
    assert frameworks.main(arguments) == 0
    assert "speedup" in capsys.readouterr().out
    (written,) = tmp_path.iterdir()
    (result,) = json.loads(written.read_text())["results"]
    for name in ("before", "jax_flash"):
        entry = result["candidates"][name]
        assert entry["losses"][-1] < entry["losses"][0]
        assert entry["milliseconds"]["mean"] > 0


@pytest.mark.long
def test_wrong_attention_is_noticed(monkeypatch):
    pytest.importorskip("flaxdiff", reason="needs the extra models")
    attend = frameworks.jax_flash.drop_in.attention_fn
    causal = lambda *args, **options: attend(*args, **options | {"is_causal": True})
    monkeypatch.setattr(frameworks.jax_flash.drop_in, "attention_fn", causal)
    result = frameworks.measure("dit", frameworks.SMALL["dit"], rounds=1, count=1)
    assert "apart" in frameworks.disagreement(result["candidates"])
