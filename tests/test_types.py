"""What a type checker knows of the public functions: an array from a pair, and every option."""

import importlib.util
import inspect
import pathlib
import subprocess
import sys
import typing

import pytest

import jax_flash
from jax_flash import api, decode, ring

ROOT = pathlib.Path(__file__).parents[1]


@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="needs mypy, of the extra dev")
def test_mypy_on_calls():
    command = [sys.executable, "-m", "mypy", "-m", "tests.support.typed_calls"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr


def arguments(function) -> dict[str, object]:
    """The types of a function's own arguments, but for return_residual."""
    parameters = inspect.signature(function).parameters
    named = {name: x.annotation for name, x in parameters.items() if x.kind is not x.VAR_KEYWORD}
    return {name: x for name, x in named.items() if name != "return_residual"}


OF_ATTENTION = arguments(jax_flash.attention)


@pytest.mark.parametrize(
    ("function", "options", "passed_on"),
    [
        (jax_flash.attention, api.Options, ()),
        (jax_flash.attention_fp8, api.Options, OF_ATTENTION),
        (jax_flash.decode_attention, decode.DecodeOptions, ()),
        (jax_flash.ring_attention, ring.RingOptions, ()),
        (jax_flash.ulysses_attention, ring.UlyssesOptions, ring._ULYSSES_OPTIONS),
        (jax_flash.all_gather_attention, ring.AllGatherOptions, ring._ALL_GATHER_OPTIONS),
    ],
)
def test_overloads_take_what_the_function_takes(function, options, passed_on):
    """Its own arguments, and those that it passes on to `attention`."""
    of_attention = {name: OF_ATTENTION[name] for name in passed_on if name != "return_residual"}
    expected = of_attention | arguments(function)
    overloads = typing.get_overloads(function)
    assert len(overloads) == 3
    for overload in overloads:
        parameters = inspect.signature(overload).parameters
        assert parameters["options"].annotation == typing.Unpack[options]
        assert arguments(overload) | typing.get_type_hints(options) == expected
