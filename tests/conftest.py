"""Chooses the devices that tests run on, before jax is imported."""

import gc
import itertools
import os
import pathlib
import shutil
from collections.abc import Iterator

import pytest

pytest.register_assert_rewrite("tests.support")

HAS_NVIDIA_GPU = pathlib.Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi") is not None

if not HAS_NVIDIA_GPU:
    # With the CUDA plugin installed to compile kernels, jax would look for a GPU and warn.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

# Processes of `pytest -n` share a GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

# And cores, of which the threads of numpy would want all, spinning while they wait.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Where there are several GPUs, each process begins with another; it sees all, to shard over.
_GPUS = [str(n) for n, _ in enumerate(pathlib.Path("/dev").glob("nvidia[0-9]*"))]
if len(_GPUS) > 1:
    _first = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % len(_GPUS)
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", ",".join(_GPUS[_first:] + _GPUS[:_first]))

# Interpret mode runs each warpgroup as a program of its own that waits for the others; XLA's pool
# has as many threads as there are cores, and a kernel with more warpgroups would hang.
os.environ.setdefault("NPROC", "16")

# A kernel in interpret mode dispatches operations of its own. They wait forever where the test has
# dispatched as many as JAX lets wait for the kernel's results, which is 32.
os.environ.setdefault("JAX_CPU_ENABLE_ASYNC_DISPATCH", "false")

# Programs need not know the lines that they come from: a tenth of the time that lowering takes.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")

# Tests of what is lowered and compiled are to do so, and what they patch is not to be kept.
os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)

# A machine of eight devices, to shard over.
_XLA_FLAGS = {"--xla_force_host_platform_device_count": 8}
if HAS_NVIDIA_GPU:
    # Programs beside the kernels run once: a tenth of the time would go into timing their products.
    _XLA_FLAGS["--xla_gpu_autotune_level"] = 0
else:
    # Programs here are large and run once: a third of the time would go into making them faster.
    _XLA_FLAGS["--xla_backend_optimization_level"] = 0
    _XLA_FLAGS["--xla_cpu_parallel_codegen_split_count"] = 1  # a tenth less
    # Those make an MLIR context for each fusion, of which programs here have hundreds: two fifths.
    _XLA_FLAGS["--xla_backend_extra_options"] = "xla_cpu_disable_new_fusion_emitters"
    # One looks for mistakes of XLA, one makes loops carry all that is constant in them: a fifth.
    _XLA_FLAGS["--xla_disable_hlo_passes"] = "hlo-verifier,while-loop-invariant-code-motion"
for flag, setting in _XLA_FLAGS.items():
    if flag not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}={setting}"


# Python looks for garbage among all that JAX traced, for a tenth of the time, and finds little.
gc.set_threshold(50_000, 20, 100)


_tests_run = itertools.count(1)


@pytest.fixture(autouse=True)
def _forget_programs() -> Iterator[None]:
    """Drops the programs that JAX keeps before their maps of memory are too many.

    A kernel in interpret mode takes 500, and Linux lets a process have 65530.
    """
    yield
    maps = pathlib.Path("/proc/self/maps")
    if next(_tests_run) % 8 == 0 and maps.exists() and maps.read_text().count("\n") > 20000:
        import jax  # after JAX_PLATFORMS is set

        jax.clear_caches()
        gc.collect()


def _no_hopper_gpu() -> str | None:
    """Why gpu tests cannot run here, None if they can."""
    import jax  # after JAX_PLATFORMS is set

    device = jax.devices()[0]
    if device.platform != "gpu":
        return f"needs a Hopper GPU, this machine has {device.platform} only"
    if device.compute_capability != "9.0":
        return f"needs a Hopper GPU, this is {device.device_kind}"
    return None


def _no_compiler() -> str | None:
    """Why kernels cannot be compiled here, None if they can."""
    from tests.support import compile  # imports jax

    return compile.missing()


def _mark_cases(items: list[pytest.Item], all_collected: bool) -> None:
    """Of a test with `fast_cases` or `long_cases` those that it names, and the others as slow."""
    named: set[str] = set()
    for item in items:
        cases: dict[str, set[str]] = {}
        test, _, case = item.nodeid.partition("[")
        for kind in ("fast_cases", "long_cases"):
            if marker := item.get_closest_marker(kind):
                cases[kind] = set(marker.args)
                named.update(f"{test}[{case}]" for case in marker.args)
        if case.removesuffix("]") in cases.get("long_cases", ()):
            item.add_marker(pytest.mark.long)
        elif "fast_cases" in cases and case.removesuffix("]") not in cases["fast_cases"]:
            item.add_marker(pytest.mark.slow)
    if all_collected and (unknown := named - {item.nodeid for item in items}):
        raise pytest.UsageError(f"cases that are none: {', '.join(sorted(unknown))}")


def pytest_collection_finish() -> None:
    gc.freeze()  # nor is there any in what was imported


@pytest.hookimpl(tryfirst=True)  # before what -m leaves out is left out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _mark_cases(items, all_collected=not any("::" in each for each in config.args))
    for marker, why_not in (("gpu", _no_hopper_gpu), ("compiler", _no_compiler)):
        marked = [item for item in items if item.get_closest_marker(marker)]
        if marked and (reason := why_not()):
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=reason))
