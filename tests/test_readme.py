"""The Python of what users read runs as written, on a CPU, and on the kernels on a Hopper GPU."""

import collections
import contextlib
import functools
from collections.abc import Iterator

import jax
import pytest

import jax_flash
from jax_flash import device
from pallas_kernels.interpret import interpreting
from tests.support.pages import PAGES, block_that_imports, sections

H100 = device.Device("gpu", "NVIDIA H100", (9, 0))
ATTENTION = [name for name in jax_flash.__all__ if name.endswith("attention") or "fp8" in name]


def is_traced(*arguments) -> bool:
    return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(arguments))


class OnHopper:
    """Traces, as a process with a Hopper GPU would, whatever the README runs on a CPU.

    What is traced is lowered for CUDA too if `lowers`, as in the section that one reads first: it
    takes most of the time, and tests/test_lowering.py does so with kernels of all kinds.
    """

    def __init__(self, monkeypatch, lowers: bool):
        self.lowers = lowers
        self.jit = jax.jit
        self.monkeypatch = monkeypatch
        self.traced: list[str] = []
        self.attended = False

    @contextlib.contextmanager
    def pretending(self) -> Iterator[None]:
        with self.monkeypatch.context() as patch:
            patch.setattr(device, "device_of", lambda array: H100)
            yield

    def trace(self, name, function, *args, **kwargs):
        """Traces the call; where it has attention, that runs on the kernels."""
        leaves, tree = jax.tree.flatten((args, kwargs))
        arrays = {i: x for i, x in enumerate(leaves) if isinstance(x, jax.Array)}

        def call(arrays):
            args, kwargs = tree.unflatten([arrays.get(i, x) for i, x in enumerate(leaves)])
            return function(*args, **kwargs)

        self.attended = False
        with self.pretending():
            traced = self.jit(call).trace(arrays)
            assert not self.attended or "jax_flash_launch" in str(traced.jaxpr), name
            if self.lowers:
                text = traced.lower(lowering_platforms=("cuda",)).as_text()
                assert not self.attended or "mosaic_gpu" in text, name
        self.traced += [name] * self.attended

    def public(self, name, function):
        """The function, whose calls with arrays are traced first."""

        @functools.wraps(function)
        def called(*args, **kwargs):
            if is_traced(args, kwargs) or interpreting():
                self.attended |= "attention" in name
            else:
                self.trace(name, called, *args, **kwargs)
            return function(*args, **kwargs)

        return called

    def recording_jit(self, function, **options):
        """jax.jit, likewise; what is traced is not the jitted function, which traces once."""
        jitted = self.jit(function, **options)

        @functools.wraps(function)
        def called(*args, **kwargs):
            if not is_traced(args, kwargs):
                self.trace("jax.jit", function, *args, **kwargs)
            return jitted(*args, **kwargs)

        called.trace = jitted.trace
        return called


# Calls of each section that a Hopper GPU would run on the kernels. Those of jax.jit are gradients
# under a policy; two batches that are decoded; gradients of a sharded layer, and a ring.
CALLS = {
    "Use it": {"attention": 3},
    "Contribute": {},
    "Will it run on an H100?": {},
    "Drop-in": {},
    "Masks and biases": {"attention": 3},
    "Packed and padded documents": {"attention": 1},
    "Keep output and LSE": {"jax.jit": 1},
    "Decoding and serving": {"decode_attention": 1},
    "Batch invariance": {"jax.jit": 2},
    "Over several devices": {"jax.jit": 2},
    "FP8": {"attention": 2, "attention_fp8": 1},
}

ALONE = "Use it", "Contribute"  # others go on from query, key and value of the front page

# By tests/test_guide.py, which looks at results too.
CHECKED = "Calls of MaxText and TransformerEngine", "A serving loop"

ON_XLA = ("Masks and scores as functions",)  # what no kernel does, with those names too

# Each block is run by the test of the framework that it imports.
ELSEWHERE = {
    "In Flax": ("nnx",),
    "In Equinox, Haiku and Keras": ("equinox", "haiku", "keras"),
}


def test_every_section_is_run():
    assert {*CALLS, *CHECKED, *ON_XLA, *ELSEWHERE} == set(sections())
    for section, modules in ELSEWHERE.items():
        assert [block_that_imports(x) for x in modules] == sections()[section]
    blocks = sum(page.read_text().count("```python") for page in PAGES)
    assert blocks == sum(map(len, sections().values()))


# In the README's command test_drop_in.py and test_sharding.py stand for these.
@pytest.mark.long_cases("Drop-in", "Over several devices")
@pytest.mark.parametrize("section", CALLS)
def test_blocks_run_on_a_cpu_and_on_kernels(section, monkeypatch, capsys):
    if jax.default_backend() != "cpu":
        pytest.skip("needs eight devices, which conftest.py makes of a CPU alone")
    on_hopper = OnHopper(monkeypatch, lowers=section == "Use it")
    for name in ATTENTION:
        monkeypatch.setattr(jax_flash, name, on_hopper.public(name, getattr(jax_flash, name)))
    monkeypatch.setattr(jax, "jit", on_hopper.recording_jit)
    names: dict = {}
    if section not in ALONE:
        block = sections()["Use it"][0]
        block._replace(code=block.code.partition("out = ")[0]).run(names)
    for block in sections()[section]:
        if "compile_kernels" not in block.code:
            block.run(names)
    assert collections.Counter(on_hopper.traced) == CALLS[section]
    if section == "Use it":
        assert capsys.readouterr().out.startswith("xla\n  mosaic_gpu passed over: it needs a Hop")
    if section == "Will it run on an H100?":
        first, second = capsys.readouterr().out.splitlines()
        assert first == "mosaic_gpu" and "head width 96: the kernel takes 64, 128, 256" in second


@pytest.mark.parametrize("section", ON_XLA)
def test_blocks_run_on_xla(section):
    names: dict = {}
    for block in [sections()["Use it"][0], *sections()[section]]:
        block.run(names)


@pytest.mark.compiler
def test_blocks_that_compile(capsys):
    before, block = sections()["Contribute"]
    names: dict = {}
    before._replace(code=before.code.partition("with interpret_mode")[0]).run(names)
    block.run(names)
    assert "attention_forward" in capsys.readouterr().out
