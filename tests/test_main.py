"""python -m jax_flash: right answers pass, wrong ones do not, and the table can be read."""

import dataclasses
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from jax_flash import __main__ as main_module
from jax_flash import xla
from jax_flash.__main__ import Case, large_cases, main, small_cases
from tests import oracle

LENGTHS = np.array([9, 33], np.int32)
CAUSAL = Case("causal GQA", 2, 24, 24, 4, 2, 8, options={"is_causal": True})
TINY = [
    CAUSAL,
    Case("packed documents", 2, 24, 24, 2, 2, 8, options=main_module._packed(2, 24, 3)),
    Case("float32 window", 1, 21, 21, 2, 1, 8, "float32", main_module._window(5)),
    Case("decode", 2, 2, 40, 4, 2, 8, options=main_module._continued(LENGTHS, 2)),
]


def test_right_answers_give_exit_code_0_and_a_readable_table(capsys):
    assert main(TINY) == 0
    text = capsys.readouterr().out
    assert jax.__version__ in text
    assert jax.devices()[0].device_kind in text
    assert "Everything agrees." in text
    assert max(map(len, text.splitlines())) <= 120
    for number, case in enumerate(TINY, 1):
        assert f"{number}. {case}\n" in text
    assert text.count("runs on") == text.count(main_module._PLAIN + "   ") == len(TINY)
    assert len([line for line in text.splitlines() if line.startswith("   xla ")]) == len(TINY)
    if jax.default_backend() == "cpu":
        assert text.count("mosaic_gpu passed over: it needs a Hopper GPU") == 1
        assert "here it checks the library, which is in general not faster" in text


def wrong_gradient(call, out, lse):
    return jax.lax.stop_gradient(out) * 0.5 + out * 0.5, lse


def nan_in_one_place(call, out, lse):
    return out.at[0, 3, 1, 2].set(jnp.nan), lse


def wrong_at_the_last_position_only(call, out, lse):
    return out.at[:, -1].set(out[:, -2]), lse


@pytest.mark.parametrize(
    "spoil", [wrong_gradient, nan_in_one_place, wrong_at_the_last_position_only]
)
def test_a_mismatch_gives_exit_code_1(monkeypatch, capsys, spoil):
    right = xla.attention
    monkeypatch.setattr(xla, "attention", lambda call: spoil(call, *right(call)))
    assert main([CAUSAL]) == 1
    text = capsys.readouterr().out
    assert "WRONG" in text
    assert "1 of " in text and "FAILED" in text
    assert "agrees" not in text


def test_a_missing_window_gives_exit_code_1(monkeypatch, capsys):
    right = xla.attention

    def attention(call):
        visibility = dataclasses.replace(call.visibility, window=None)
        return right(dataclasses.replace(call, visibility=visibility))

    monkeypatch.setattr(xla, "attention", attention)
    assert main([TINY[2]]) == 1
    assert "WRONG" in capsys.readouterr().out


def test_what_a_named_implementation_cannot_do_is_said(monkeypatch, capsys):
    monkeypatch.setitem(main_module.dispatch.IMPLEMENTATIONS, "slower", "xla")
    explain = jax_flash.explain

    def refusing(*args, implementation=None, **kwargs):
        if implementation == "slower":
            raise NotImplementedError("implementation='slower': not today")
        return explain(*args, implementation=implementation, **kwargs)

    monkeypatch.setattr(jax_flash, "explain", refusing)
    assert main([CAUSAL, TINY[1]]) == 0
    said = "not available: implementation='slower': not today"
    assert capsys.readouterr().out.count(said) == 1


@pytest.mark.parametrize("case", TINY + small_cases(), ids=str)
def test_visible_is_what_the_options_say(case):
    expected = oracle.visibility(case.batch, case.queries, case.keys, **case.options)
    np.testing.assert_array_equal(main_module._visible(case), expected[:, 0])


def test_visible_refuses_what_it_does_not_know_and_queries_that_see_nothing():
    with pytest.raises(ValueError, match="sinks"):
        main_module._visible(dataclasses.replace(CAUSAL, options={"sinks": 0}))
    nothing = {"key_value_seq_lengths": np.array([3, 0])}
    with pytest.raises(ValueError, match="sees no key"):
        main_module._visible(dataclasses.replace(CAUSAL, options=nothing))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exact_is_the_oracle(dtype):
    case = dataclasses.replace(CAUSAL, dtype=dtype, keys=17)
    query, key, value, dout = main_module._inputs(case)
    exact = main_module._exact(query, key, value, dout, main_module._visible(case))
    gradients = oracle.gradients(query, key, value, dout=dout, is_causal=True)
    expected = [oracle.attention(query, key, value, is_causal=True)[0], *gradients[:3]]
    for array, expected_array in zip(exact, expected, strict=True):
        assert array.dtype == (jnp.float64 if dtype == "float32" else jnp.float32)
        tolerance = 1e-13 if dtype == "float32" else 1e-5
        np.testing.assert_allclose(array, expected_array, rtol=tolerance, atol=tolerance)


def test_packed_documents():
    ids = main_module._packed(3, 50, 7)["query_segment_ids"]
    assert ids.shape == (3, 50)
    for row in ids:
        assert np.all(np.diff(row) >= 0)
        assert list(np.unique(row)) == list(range(7))
    assert not np.array_equal(ids[0], ids[1])


def test_large_cases_are_calls_that_the_library_takes():
    titles = {case.title for case in large_cases()}
    assert titles < {case.title for case in small_cases()}
    for case in large_cases():
        query = jax.ShapeDtypeStruct((case.batch, case.queries, case.heads, case.width), case.dtype)
        key = jax.ShapeDtypeStruct((case.batch, case.keys, case.key_heads, case.width), case.dtype)
        assert jax_flash.explain(query, key, key, **case.options).implementation


def test_command_line():
    def run(*arguments):
        command = [sys.executable, "-m", "jax_flash", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    assert "attention on this machine" in run("--help").stdout
    refused = run("--fast")
    assert refused.returncode == 2
    assert "--fast" in refused.stderr
