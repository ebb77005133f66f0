"""The README's Python runs as written, on a CPU, and lowers for a Hopper GPU."""

import contextlib
import functools
import pathlib
import re
from collections.abc import Iterator

import jax
import pytest

import jax_flash
from jax_flash import device
from pallas_kernels.primitives import interpreting

ROOT = pathlib.Path(__file__).parents[1]
H100 = device.Device("gpu", "NVIDIA H100", (9, 0))
ATTENTION = [name for name in jax_flash.__all__ if name.endswith("attention") or "fp8" in name]


def blocks() -> list[str]:
    """The README's blocks of Python, each with lines before it so that errors name its lines."""
    text = (ROOT / "README.md").read_text()
    found = re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return ["\n" * text.count("\n", 0, x.start(1)) + x[1] for x in found]


def run(block: str, names: dict) -> None:
    exec(compile(block, ROOT / "README.md", "exec"), names)


def needs_the_compiler(block: str) -> bool:
    return "compile_kernels" in block


def is_traced(*arguments) -> bool:
    return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(arguments))


class OnHopper:
    """Lowers for CUDA, as a process with a Hopper GPU would, whatever the README runs on a CPU."""

    def __init__(self, monkeypatch):
        self.jit = jax.jit
        self.monkeypatch = monkeypatch
        self.lowered: list[str] = []
        self.attended = False

    @contextlib.contextmanager
    def pretending(self) -> Iterator[None]:
        with self.monkeypatch.context() as patch:
            patch.setattr(device, "device_of", lambda array: H100)
            yield

    def lower(self, name, function, *args, **kwargs):
        """Lowers the call; where it has attention, that runs on the kernels."""
        leaves, tree = jax.tree.flatten((args, kwargs))
        arrays = {i: x for i, x in enumerate(leaves) if isinstance(x, jax.Array)}

        def call(arrays):
            args, kwargs = tree.unflatten([arrays.get(i, x) for i, x in enumerate(leaves)])
            return function(*args, **kwargs)

        self.attended = False
        with self.pretending():
            text = self.jit(call).trace(arrays).lower(lowering_platforms=("cuda",)).as_text()
        assert not self.attended or "mosaic_gpu" in text, name
        self.lowered += [name] * self.attended

    def public(self, name, function):
        """The function, whose calls with arrays are lowered first."""

        @functools.wraps(function)
        def called(*args, **kwargs):
            if is_traced(args, kwargs) or interpreting():
                self.attended |= "attention" in name
            else:
                self.lower(name, called, *args, **kwargs)
            return function(*args, **kwargs)

        return called

    def recording_jit(self, function, **options):
        """jax.jit, likewise; what is lowered is not the jitted function, which traces once."""
        jitted = self.jit(function, **options)

        @functools.wraps(function)
        def called(*args, **kwargs):
            if not is_traced(args, kwargs):
                self.lower("jax.jit", function, *args, **kwargs)
            return jitted(*args, **kwargs)

        called.trace = jitted.trace
        return called


def test_blocks_run_and_lower_for_a_gpu(monkeypatch, capsys):
    on_hopper = OnHopper(monkeypatch)
    for name in ATTENTION:
        monkeypatch.setattr(jax_flash, name, on_hopper.public(name, getattr(jax_flash, name)))
    monkeypatch.setattr(jax, "jit", on_hopper.recording_jit)
    names: dict = {}
    for block in blocks():
        if not needs_the_compiler(block):
            run(block, names)
    assert capsys.readouterr().out.startswith("xla\n  mosaic_gpu passed over: it needs a Hopper")
    lowered = {name: on_hopper.lowered.count(name) for name in on_hopper.lowered}
    # Every call that a GPU would run; jax.jit is that of batch and heads sharded, gradients, a ring.
    assert lowered == {"attention": 5, "attention_fp8": 1, "decode_attention": 1, "jax.jit": 3}


@pytest.mark.compiler
def test_blocks_that_compile(capsys):
    """With the blocks of the same section before them, but for interpret mode."""
    *_, before, block = blocks()
    assert needs_the_compiler(block)
    names: dict = {}
    before, _ = before.split("with interpret_mode")
    run(before, names)
    run(block, names)
    assert "attention_forward" in capsys.readouterr().out
