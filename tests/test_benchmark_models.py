"""The suites "models" and "random" of `benchmarks.attention`, and what their rows may have."""

import dataclasses
import functools
import json
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from benchmarks import attention, models
from benchmarks.rows import Row, drawn
from tests.support.cases import long, slow

TINY = Row(2, 40, 4, 2, 16, False)
OPTIONS = [
    {"key_length": 24},
    {"window": 5},
    {"window": 5, "causal": True, "soft_cap": 2.0},
    {"soft_cap": 2.0},
    {"padding": "lengths"},
    {"padding": "mask", "key_length": 50},
    {"biased": True},
    {"padding": "mask", "biased": True, "value_width": 24},
    {"dtype": "float16"},
]


def tiny(options: dict) -> Row:
    return dataclasses.replace(TINY, **options)


def name_of(options: dict) -> str:
    return ", ".join(map(str, options))


def call(row: Row, inputs: tuple, **more):
    """Ours, as the suites call it."""
    options = row.mask | row.named(inputs[4:]) | more
    return attention.CANDIDATES["jax_flash xla"](*inputs[:3], **options)


# --- what a row may have -------------------------------------------------------------------------


@pytest.mark.parametrize("logits", [2**28, long(7 * 24)])
@pytest.mark.parametrize("options", OPTIONS, ids=name_of)
def test_reference_has_the_gradients_of_every_option(options, logits, monkeypatch):
    """Also where the rows of a head come in chunks, which do not divide them."""
    monkeypatch.setattr(attention, "REFERENCE_LOGITS", logits)
    row = tiny(options)
    exact = lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x
    inputs = jax.tree.map(exact, row.inputs())

    def attend(query, key, value, bias):
        return call(row, (query, key, value, *inputs[3:]), **bias)

    bias = {"bias": inputs[-1]} if row.biased else {}
    with jax.default_matmul_precision("highest"):
        out, vjp = jax.vjp(attend, *inputs[:3], bias)
        right = [out, *jax.tree.leaves(vjp(inputs[3]))]
    attention.reference.clear_cache()  # REFERENCE_LOGITS is none of its arguments
    for x, y in zip(attention.expected(row, inputs), right, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", OPTIONS, ids=name_of)
def test_flops_count_the_pairs_that_are_seen(options):
    row = tiny(options)
    keys = row.key_length or row.length
    behind = np.arange(row.length)[:, None] - np.arange(keys)
    seen = np.ones((row.batch, row.length, keys), bool)
    if row.window is not None:
        seen &= (behind <= row.window) & (behind >= (0 if row.causal else -row.window))
    seen &= np.arange(keys) < np.array(row.key_lengths)[:, None, None]
    columns = row.width + (row.value_width or row.width)
    assert row.flops("forward") == 2 * row.heads * columns * seen.sum()


def test_padding_is_the_same_as_lengths_and_as_a_mask():
    of_lengths, of_mask = (tiny({"padding": padding}) for padding in ("lengths", "mask"))
    out, other = (call(row, row.inputs()) for row in (of_lengths, of_mask))
    np.testing.assert_array_equal(out, other)
    assert min(of_lengths.key_lengths) < TINY.length


def test_names_say_what_a_row_has():
    row = tiny({"padding": "mask", "biased": True, "key_length": 24, "title": "Some model"})
    name = "Some model: b2 t40 s24 4/2 heads H16 full mask [B, 1, 1, S] bias [1, N, T, S]"
    assert row.name == name
    row = tiny({"key_heads": 4, "window": 5, "soft_cap": 2.0, "dtype": "float16"})
    assert row.name == "b2 s40 H16 full window 5 cap 2 float16"
    assert dataclasses.replace(row, title="x").name.startswith("x: b2 s40 4 heads H16")


def test_a_wrong_gradient_of_a_bias_fails(tmp_path, monkeypatch, capsys):
    right = attention.CANDIDATES["jax_flash xla"]

    def attend(query, key, value, bias, **more):
        return right(query, key, value, bias=1.5 * bias - jax.lax.stop_gradient(0.5 * bias), **more)

    monkeypatch.setitem(attention.CANDIDATES, "jax_flash xla", attend)
    monkeypatch.setitem(attention.SUITES, "models", [tiny({"biased": True, "padding": "lengths"})])
    names = ["--suite", "models", "--rounds", "1", "--iterations", "1", "--results", str(tmp_path)]
    assert attention.main(names) == 1
    printed = capsys.readouterr().out
    assert "both: jax_flash xla is off by 5.0e-01" in printed and "forward: jax" not in printed


def test_peers_refuse_what_they_lack(monkeypatch):
    def reason(name: str, row: Row) -> str:
        with pytest.raises((NotImplementedError, TypeError)) as raised:
            attention.build(attention.CANDIDATES[name], row, "forward")
        return str(raised.value)

    assert "logits_soft_cap" in reason("jax.nn xla", tiny({"soft_cap": 2.0}))
    monkeypatch.setattr(attention, "XLA_LOGITS", 100)
    assert "too much memory" in reason("jax.nn xla", TINY)
    package = types.SimpleNamespace(flash_mha=None, flash_mha_varlen=None)
    monkeypatch.setitem(sys.modules, "dew_flash_attn", package)
    assert "flash_mha has no mask, bias" in reason("FA3", tiny({"padding": "mask", "biased": True}))


def test_tokamax_is_given_what_it_takes(monkeypatch):
    """It runs on a GPU alone; its arguments are those of jax.nn, and the soft cap."""
    asked = []

    def attend(query, key, value, **more):
        asked.append(more)
        return query

    monkeypatch.setitem(sys.modules, "tokamax", types.SimpleNamespace(dot_product_attention=attend))
    row = tiny({"window": 5, "soft_cap": 2.0, "biased": True})
    attention.build(attention.CANDIDATES["tokamax"], row, "forward")
    (more,) = asked
    assert more.pop("bias").shape == (1, 4, 40, 40)
    assert more == {
        "is_causal": False,
        "local_window_size": (5, 5),
        "logits_soft_cap": 2.0,
        "implementation": "mosaic",
    }


# --- the table -----------------------------------------------------------------------------------


def test_the_table_is_of_many_models_that_each_say_what_they_are():
    names = [row.name for row in models.rows()]
    assert len({*names}) == len(names)
    assert len({layer.model for layer in models.LAYERS if layer.model}) >= 40
    for layer in models.LAYERS:
        assert layer.kind in models.KINDS and layer.use in models.USES and layer.source
        assert bool(layer.model) == (layer.kind != "drawn")
        assert not layer.row.causal or not layer.row.key_length
    assert {layer.kind for layer in models.LAYERS} == {*models.KINDS}


@pytest.mark.long
@pytest.mark.parametrize("rows", [models.rows(), drawn(0, 10)], ids=["models", "random"])
def test_rows_are_what_attention_takes(rows):
    """By its checks, and by those of the kernels on a Hopper GPU."""
    for row in rows:
        inputs = jax.eval_shape(row.inputs)
        out = jax.eval_shape(functools.partial(call, row), inputs)
        assert (out.shape, out.dtype) == (inputs[3].shape, inputs[3].dtype), row.name
        options = row.mask | row.named(inputs[4:])
        window = attention._window(options.pop("causal"), options.pop("window", None))
        options |= {"is_causal": row.causal, "local_window_size": window}
        jax_flash.explain(*inputs[:3], **options, implementation="mosaic_gpu")


# --- rows drawn at random ------------------------------------------------------------------------


def test_a_seed_draws_the_same_rows():
    assert drawn(0, 20) == drawn(0, 30)[:20]
    assert len({row.name for row in drawn(0, 30)}) == 30
    shapes = [[dataclasses.replace(row, title="") for row in drawn(seed, 20)] for seed in (0, 1)]
    assert shapes[0] != shapes[1]


def test_drawn_rows_are_of_every_sort_and_bounded():
    rows = drawn(3, 400)
    lengths = [x for row in rows for x in (row.length, row.key_length or row.length)]
    assert min(lengths) >= 64 and 8000 < max(lengths) <= 18000
    assert any(x % 2 for x in lengths) and any(x % 128 == 0 for x in lengths)
    assert 64 >= max(row.heads for row in rows) > 32
    assert {row.heads // row.key_heads for row in rows} == {*range(1, 9)}
    assert {row.width for row in rows} == {24, 32, 40, 64, 72, 80, 96, 128, 192, 256}
    assert {row.dtype for row in rows} == {"bfloat16", "float16"}
    for part in (
        [row for row in rows if row.key_length],
        [row for row in rows if row.causal],
        [row for row in rows if not row.causal and not row.key_length],
    ):
        assert len(part) > len(rows) / 5
    assert not any(row.causal and row.key_length for row in rows)  # peers differ there
    for row in rows:
        assert row.flops("both") <= 4e12
        queries, keys = row.heads * row.length, row.key_heads * (row.key_length or row.length)
        assert 2 * 2 * row.batch * row.width * (queries + keys) <= 2**30


# --- runs ----------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    ("suite", "rows", "count"),
    [("models", "DETR, decoder|one short sequence", 2), slow("random", "/(2|3):", 2)],
)
def test_suites_are_checked_timed_and_summed_up(suite, rows, count, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(attention, "BATCH", 1)  # a batch after another
    arguments = ["--suite", suite, "--rows", rows, "--count", "4", "--seed", "0"]
    arguments += ["--rounds", "1", "--iterations", "1", "--results", str(tmp_path)]
    assert attention.main(arguments) == 0
    (path,) = tmp_path.glob(f"attention-{suite}-*.json")
    record = json.loads(path.read_text())
    assert [r["passes"] for r in record["results"]] == ["forward"] * count + ["both"] * count
    for result in record["results"]:
        assert [*result["candidates"]] == ["jax_flash xla", "jax.nn xla"]
        assert all(entry["teraflops"] > 0 for entry in result["candidates"].values())
    printed = capsys.readouterr().out
    for kind in ("forward", "both"):
        summary = record["summary"][kind]
        assert summary["rows"] == len(summary["worst"]) == count
        assert f"{kind}: speedup over best peer {summary['geometric_mean']:.3f}" in printed
        assert f"  {summary['smallest']:.3f}  {summary['smallest_row']}" in printed
    assert f"geometric mean of {count} of {count} rows; ahead in " in printed


def test_a_summary_names_the_worst_rows():
    ratios = [2.0, 0.5, 1.0, 4.0, 0.25, 1.0, 8.0]
    results = [
        {
            "row": f"row {i}",
            "passes": "both",
            "candidates": {"jax_flash": {"teraflops": x * 100}, "cuDNN": {"teraflops": 100.0}},
        }
        for i, x in enumerate(ratios)
    ]
    summary = attention.summarize(results)["both"]
    assert (summary["rows"], summary["ahead"]) == (7, 3)
    assert summary["geometric_mean"] == pytest.approx(8 ** (1 / 7))
    assert [*summary["worst"]] == ["row 4", "row 1", "row 2", "row 5", "row 0"]
    lines = attention.conclusion("both", summary, rows=9).splitlines()
    assert "of 7 of 9 rows; ahead in 3 (43%)" in lines[0]
    assert lines[1] == "  0.250  row 4" and len(lines) == 6


def test_rows_that_there_are_not_are_refused(capsys):
    with pytest.raises(SystemExit):
        attention.main(["--suite", "random", "--count", "2", "--rows", "/2:"])
    assert "no row of random has '/2:': random 0/0: " in capsys.readouterr().err
