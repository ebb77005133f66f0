"""Kernels are lowered once for each call that differs, and found again by another process."""

import collections
import dataclasses
import functools
import hashlib
import logging
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_flash
from jax_flash import launch
from pallas_kernels import canonicalize

X = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.bfloat16)
on_kernels = functools.partial(jax_flash.attention, implementation="mosaic_gpu")


def lowered(fn=None, x=X, **options) -> str:
    fn = fn or functools.partial(on_kernels, **options)
    return (
        jax.jit(lambda *qkv: fn(*qkv)).trace(x, x, x).lower(lowering_platforms=("cuda",)).as_text()
    )


@pytest.fixture
def lowerings(monkeypatch):
    """Launches that are lowered from now on, none of which is known."""
    found = []
    lower = launch._lowered
    monkeypatch.setattr(launch, "_lowered", lambda this, at: found.append(this) or lower(this, at))
    monkeypatch.setattr(launch, "_traced", collections.OrderedDict())
    launch._module.cache_clear()
    yield found
    launch._module.cache_clear()


@pytest.fixture
def cache(tmp_path):
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    yield tmp_path / "jax_flash"
    jax.config.update("jax_compilation_cache_dir", before)


def test_programs_of_one_process_share_kernels(lowerings):
    first = lowered(is_causal=True)
    again = lowered(lambda *qkv: 2 * on_kernels(*qkv, is_causal=True))
    assert len(lowerings) == 1
    hashes = [text.split("kernel_hash = ")[1].split(",")[0] for text in (first, again)]
    assert hashes[0] == hashes[1]
    lowered(is_causal=False)
    lowered(x=jax.ShapeDtypeStruct((1, 264, 2, 64), jnp.bfloat16), is_causal=True)
    assert len(lowerings) == 3


def test_a_batch_and_what_vmap_maps_share_kernels(lowerings):
    attend = functools.partial(on_kernels, is_causal=True)
    lowered(attend, jax.ShapeDtypeStruct((6, 256, 2, 64), jnp.bfloat16))
    for shape in ((3, 2, 256, 2, 64), (2, 3, 256, 2, 64)):
        lowered(jax.vmap(attend), jax.ShapeDtypeStruct(shape, jnp.bfloat16))
    assert len(lowerings) == 1


def test_nothing_is_lowered_to_trace(lowerings):
    jax.eval_shape(jax.grad(lambda x: on_kernels(x, x, x).astype(jnp.float32).sum()), X)
    assert not lowerings


@pytest.mark.long
def test_what_takes_longest_to_compile_is_lowered_first(lowerings):
    loss = lambda *qkv: on_kernels(*qkv, is_causal=True).astype(jnp.float32).sum()
    lowered(jax.grad(loss, (0, 1, 2)))
    assert [this.name for this in lowerings] == ["jax_flash_backward", "jax_flash_forward"]
    assert not launch._traced


def test_what_was_traced_is_forgotten_in_time(monkeypatch):
    monkeypatch.setattr(launch, "_traced", launch._traced.copy())
    for length in range(8, 8 * launch._REMEMBERED + 17, 8):
        x = jax.ShapeDtypeStruct((1, length, 1, 64), jnp.bfloat16)
        jax.eval_shape(on_kernels, x, x, x)
    assert len(launch._traced) == launch._REMEMBERED


def test_a_layer_that_is_called_often_is_there_once(lowerings):
    text = lowered(lambda q, k, v: on_kernels(on_kernels(q, k, v), k, v))
    assert [this.name for this in lowerings] == ["jax_flash_forward"]
    assert text.count("custom_call @mosaic_gpu") == 1


def test_another_process_finds_them_on_disk(lowerings, cache):
    first = lowered(is_causal=True)
    (path,) = cache.iterdir()
    launch._module.cache_clear()
    assert lowered(is_causal=True) == first
    assert len(lowerings) == 1
    code = f"""
import jax, jax.numpy as jnp, tests.test_launch as tests
from jax_flash import launch
jax.config.update("jax_compilation_cache_dir", {str(cache.parent)!r})
launch._lowered = None
print(__import__("hashlib").sha256(tests.lowered(is_causal=True).encode()).hexdigest())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == hashlib.sha256(first.encode()).hexdigest(), done.stderr
    assert list(cache.iterdir()) == [path]


_COMPILE = """
import jax, jax.numpy as jnp
from jax_flash import attention, launch
from tests.support import compile
if {is_second}: launch._lowered = None
jax.config.update("jax_compilation_cache_dir", {directory!r})
jax.config.update("jax_persistent_cache_min_compile_time_secs", 1e9)
(device,) = compile.compile_only_devices(1)
sharding = jax.sharding.SingleDeviceSharding(device)
x = jax.ShapeDtypeStruct((1, 136, 2, 64), jnp.bfloat16, sharding=sharding)
run = lambda *qkv: attention(*qkv, is_causal=True, implementation="mosaic_gpu")
print("mosaic_gpu" in jax.jit(run).lower(x, x, x).compile().as_text())
"""


@pytest.mark.compiler
def test_another_process_compiles_what_it_finds_on_disk(cache):
    for is_second in (False, True):
        code = _COMPILE.format(is_second=is_second, directory=str(cache.parent))
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.stdout.strip() == "True", done.stderr
    assert len(list(cache.iterdir())) == 1


def gradients(query, key, value):
    return jax.vjp(functools.partial(on_kernels, is_causal=True), query, key, value)[1](query)


@pytest.mark.compiler
def test_kernels_compile_by_themselves_and_are_known_in_any_program():
    from tests.support import compile as support

    shapes = [jax.ShapeDtypeStruct((1, 384, 64, 64), jnp.bfloat16)] * 3  # of this test alone
    program = jax.jit(gradients).trace(*shapes).lower(lowering_platforms=("cuda",))
    kernels = launch._kernels(program.compiler_ir("stablehlo"))
    assert len(kernels) == 4
    # Counters and dQ, of one that draws.
    assert {2: 2, 10: 3} in [kernel.aliases for kernel in kernels]
    for kernel in kernels:
        (report,) = support.compile_kernels(kernel, kernel.operands, sass=False)
        assert not report.faults()
    assert support.compile_kernels(gradients, shapes, sass=False) == []  # none once more


def test_a_kernel_whose_only_result_is_in_the_place_of_an_operand_is_known():
    call = jax.ffi.ffi_call("mosaic_gpu", X, input_output_aliases={1: 0})
    program = jax.jit(lambda *xs: call(*xs, module=b"")).trace(X, X)
    program = program.lower(lowering_platforms=("cuda",))
    (kernel,) = launch._kernels(program.compiler_ir("stablehlo"))
    assert kernel.aliases == {1: 0}


@pytest.fixture
def begun(monkeypatch):
    """What is to compile meanwhile: functions, none of which runs."""
    functions = []
    executor = types.SimpleNamespace(submit=functions.append)
    monkeypatch.setattr(launch, "_compiling", lambda: executor)
    return functions


@pytest.mark.long
def test_the_longest_kernel_begins_to_compile_first(begun):
    program = jax.jit(gradients).trace(X, X, X).lower(lowering_platforms=("cuda",))
    launch._begin_to_compile(program)
    sizes = [len(function.__self__.attributes["module"]) for function in begun]
    assert len(sizes) == 4 and sizes == sorted(sizes, reverse=True)


def test_kernels_of_an_unknown_form_compile_together(begun, monkeypatch, caplog):
    def refuse(attribute):
        raise TypeError("not known")

    program = jax.jit(gradients).trace(X, X, X).lower(lowering_platforms=("cuda",))
    monkeypatch.setattr(launch, "_python_value", refuse)
    with caplog.at_level(logging.INFO, "jax_flash"):
        launch._begin_to_compile(program)
    assert begun == [program.compile] and "one after the other" in caplog.text


@pytest.mark.parametrize("now", [None, "of other sources"])
def test_what_may_be_of_other_sources_is_not_kept(lowerings, cache, now, monkeypatch):
    """None: no sources are there to tell; else they have changed since they were imported."""
    if now is None:
        monkeypatch.setattr(launch, "_VERSIONS", None)
    monkeypatch.setattr(launch, "_versions", lambda: now)
    lowered(is_causal=True)
    assert len(lowerings) == 1
    assert not cache.exists()


def test_sources_that_are_not_there_are_noticed(monkeypatch, tmp_path):
    assert launch._versions() == launch._VERSIONS
    monkeypatch.setattr(launch, "__file__", str(tmp_path / "launch.py"))
    assert launch._versions() is None


def test_all_sources_count(monkeypatch, tmp_path):
    here, kernel = tmp_path / "jax_flash/launch.py", tmp_path / "pallas_kernels/ptx/masks.py"
    for path in here, kernel:
        path.parent.mkdir(parents=True)
        path.touch()
    monkeypatch.setattr(launch, "__file__", str(here))
    before = launch._versions()
    kernel.write_text("a = 1")
    assert launch._versions() != before


def test_a_thread_that_outlives_the_program_lowers():
    code = """
import threading, time
import tests.test_launch as tests
def late():
    threading.main_thread().join()
    time.sleep(0.1)
    print("custom_call @mosaic_gpu" in tests.lowered(is_causal=True), flush=True)
threading.Thread(target=late).start()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "True", done.stderr


@pytest.mark.parametrize("damage", [lambda x: x[:-1], lambda x: b"", lambda x: x[:40] + x[41:]])
def test_a_damaged_file_is_replaced(lowerings, cache, damage, caplog):
    first = lowered(is_causal=True)
    (path,) = cache.iterdir()
    right = path.read_bytes()
    path.write_bytes(damage(right))
    launch._module.cache_clear()
    with caplog.at_level(logging.WARNING, "jax_flash"):
        assert lowered(is_causal=True) == first
    assert "damaged" in caplog.text
    assert len(lowerings) == 2 and path.read_bytes() == right


def test_where_nothing_can_be_kept_it_is_said(lowerings, cache, caplog):
    cache.write_text("no directory")
    with caplog.at_level(logging.WARNING, "jax_flash"):
        lowered(is_causal=True)
        launch._module.cache_clear()
        lowered(is_causal=True)
    assert len(lowerings) == 2 and "cannot be kept on disk" in caplog.text


@pytest.mark.parametrize(("option", "setting"), [
    ("jax_compilation_cache_dir", "gs://bucket/cache"),
    ("jax_compilation_cache_dir", None),
    ("jax_enable_compilation_cache", False),
])  # fmt: skip
def test_where_jax_keeps_nothing_on_disk_neither_do_kernels(cache, option, setting, request):
    before = getattr(jax.config, option)
    request.addfinalizer(lambda: jax.config.update(option, before))
    jax.config.update(option, setting)
    launch._module.cache_clear()
    lowered(is_causal=True)
    assert not cache.exists()


def test_everything_that_kernels_depend_on_is_in_their_key(monkeypatch):
    def run(*_):
        raise AssertionError("is not run")

    tree = jax.tree.structure((1,))
    this = launch._Launch(run, (1, 2.5), tree, (((3,), "float32"),), (((3,), "float32"),))
    others = [
        dataclasses.replace(this, static=(1, np.nextafter(2.5, 3))),
        dataclasses.replace(this, tree=jax.tree.structure(((1,),))),
        dataclasses.replace(this, types=(((3,), "bfloat16"),)),
        dataclasses.replace(this, out_types=(((4,), "float32"),)),
        dataclasses.replace(this, function=lambda *_: None),
    ]
    keys = {launch.key((9, 0)) for launch in (this, *others)} | {this.key((10, 0))}
    monkeypatch.setattr(launch, "_VERSIONS", "others")
    assert len(keys | {this.key((9, 0))}) == len(others) + 3


@pytest.mark.long
def test_what_is_in_force_where_a_program_is_lowered_does_not_count(lowerings):
    launch._module.cache_clear()
    modules = []
    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,))
    for settings in ([], [jax.set_mesh(mesh)], [jax.enable_x64(True)], [jax.disable_jit()]):
        launch._module.cache_clear()
        for setting in settings:
            setting.__enter__()
        try:
            sharding = NamedSharding(mesh, PartitionSpec()) if len(modules) == 1 else None
            lowered(x=jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=sharding), is_causal=True)
        finally:
            for setting in settings:
                setting.__exit__(None, None, None)
        modules.append(launch._module(lowerings[-1], (9, 0)))
    assert len(lowerings) == 4
    assert len(set(modules)) == 1


@pytest.mark.parametrize("missing", ["_SERIALIZE", "_VERSION"])
def test_lowers_where_jax_has_other_functions(lowerings, missing, monkeypatch):
    monkeypatch.setattr(canonicalize, missing, "of another jax")
    assert "custom_call @mosaic_gpu" in lowered(is_causal=True)


def test_lowers_where_mlir_has_other_passes(lowerings, monkeypatch, caplog):
    def parse(*_):
        raise ValueError("no such pass")

    monkeypatch.setattr(canonicalize.passmanager, "PassManager", type("", (), {"parse": parse}))
    with caplog.at_level(logging.INFO, "jax_flash"):
        canonicalize._canonicalize(types.SimpleNamespace(context=None))
    assert "no such pass" in caplog.text


def test_jax_is_as_before_when_kernels_are_lowered(lowerings):
    from jax.experimental.mosaic.gpu import core

    serialize = core._run_serde_pass
    lowered(is_causal=True)
    with canonicalize.lowering_faster(), canonicalize.lowering_faster():
        assert core._run_serde_pass is not serialize
    assert core._run_serde_pass is serialize


def test_importing_the_library_imports_nothing_of_a_gpu():
    code = """
import sys
import jax, jax.numpy as jnp
before = set(sys.modules)
import jax_flash
x = jnp.ones((1, 8, 2, 8))
jax.grad(lambda x: jax_flash.attention(x, x, x, is_causal=True).sum())(x)
new = set(sys.modules) - before
print(sorted(name for name in new if any(part in name for part in ("mosaic", "pallas.", "triton"))))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
