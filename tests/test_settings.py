"""Every public function under the settings of JAX that users turn on, and outside of jit.

What settings refuse, they refuse while a function is traced, kernels for CUDA like all else, so
that few of them need to be lowered. Only NaN has to be computed.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import pytest
from jax import monitoring
from jax.sharding import AxisType, PartitionSpec

import jax_flash
from jax_flash import xla
from tests.support.public_calls import CALLS, NOT_CALLED, PublicCall
from tests.support.sharded import mesh_of, put


@contextlib.contextmanager
def no_promotion() -> Iterator[None]:
    """Of ranks and of dtypes, at once, as tracing takes time; an error names the one it is of."""
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


TRACED: dict[str, Callable[[], contextlib.AbstractContextManager]] = {
    "no_promotion": no_promotion,
    "enable_x64": lambda: jax.enable_x64(True),
}
RUN: dict[str, Callable[[], contextlib.AbstractContextManager]] = {
    "debug_nans": lambda: jax.debug_nans(True),
    "disable_jit": jax.disable_jit,
}


def cases(implementations=("xla", "mosaic_gpu"), collective=True, long_forward=False):
    """Calls, and functions of their arrays: forward, and gradient where there is one.

    Args:
      implementations: those to ask for.
      collective: whether calls over several devices are among them.
      long_forward: leaves forward to CI where there is a gradient, which runs it too.
    """
    found = []
    for call in CALLS:
        if call.is_collective and not collective:
            continue
        own = implementations if call.has_implementation else (None,)
        for implementation in own if call.on_kernels else (x for x in own if x != "mosaic_gpu"):
            for kind in ("forward", "gradient") if call.differentiated else ("forward",):
                name = "-".join([call.name, implementation or "any", kind])
                is_long = long_forward and call.differentiated and kind == "forward"
                marks = [pytest.mark.long] if is_long else []
                function = getattr(call, kind)(implementation)
                found.append(pytest.param(call, function, id=name, marks=marks))
    return found


@pytest.mark.parametrize(("call", "function"), cases())
@pytest.mark.parametrize("setting", TRACED)
def test_traces_under(setting: str, call: PublicCall, function: Callable):
    arrays = call.arrays()
    with TRACED[setting]():
        jax.jit(function).trace(arrays)


@pytest.fixture(scope="module")
def _unfrozen() -> Iterator[None]:
    yield
    gc.unfreeze()


@pytest.fixture
def _little_garbage(_unfrozen) -> None:
    """JAX looks for what holds a tracer among all that Python has, but for what is frozen.

    What was frozen for one test is so for the next, which looks through what is new alone.
    """
    gc.collect()
    gc.freeze()


@pytest.mark.long
@pytest.mark.usefixtures("_little_garbage")
@pytest.mark.parametrize(
    ("call", "function"), [x for x in cases(("xla",), long_forward=True) if not x.marks]
)
def test_leaks_no_tracer(call: PublicCall, function: Callable, request):
    """Not so kernels: in jax 0.11.2 any `pl.run_scoped` in a loop leaks what it reads of it."""
    if request.node.callspec.id == "ulysses_attention-xla-gradient":
        pytest.skip("jax.checkpoint of what lax.all_to_all gives leaks in jax 0.11.2")
    arrays = call.arrays()
    with jax.checking_leaks():
        jax.jit(function).trace(arrays)


def runs() -> Iterator:
    """Settings and what runs under them: without jit in CI, and forward alone not even there."""
    for case in cases(("xla",), collective=False, long_forward=True):
        without_jit = pytest.mark.slow if case.marks else pytest.mark.long
        for setting, marks in (("debug_nans", case.marks), ("disable_jit", without_jit)):
            yield pytest.param(setting, *case.values, id=f"{setting}-{case.id}", marks=marks)


@pytest.mark.parametrize(("setting", "call", "function"), [*runs()])
def test_runs_under(setting: str, call: PublicCall, function: Callable):
    arrays = call.arrays()
    with RUN[setting]():
        results = function(arrays)
    for x in jax.tree.leaves(results):
        assert not jnp.isnan(x.astype(jnp.float32)).any()


@pytest.mark.parametrize("function", [jax_flash.quantize_fp8, jax_flash.attention_fp8])
def test_uses_no_random_key_twice(function):
    x = jnp.ones((1, 8, 2, 16))
    key = jax.random.key(0)  # of words JAX does not know whether they were used
    with jax.debug_key_reuse(True):
        function(x, x, x, incoherent_key=key)


LOWERED = ("attention-lengths-mosaic_gpu-gradient", "decode_attention-options-mosaic_gpu-forward")


@pytest.mark.long
@pytest.mark.parametrize("setting", TRACED)
@pytest.mark.parametrize(
    ("call", "function"), [case for case in cases(("mosaic_gpu",)) if case.id in LOWERED]
)
def test_lowers_under(setting: str, call: PublicCall, function: Callable):
    arrays = call.arrays()
    with TRACED[setting]():
        lowered = jax.jit(function).trace(arrays).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


@pytest.fixture
def compilations() -> Iterator[list[str]]:
    """A list that grows by one for each program that XLA compiles."""
    found: list[str] = []

    def listen(event: str, duration: float, **_) -> None:
        del duration
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(event)

    monitoring.register_event_duration_secs_listener(listen)
    jax.jit(lambda: jnp.zeros(3) + 1)()
    assert found  # or this counts nothing
    yield found
    monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize("chunked", [False, True], ids=["whole", "chunked"])
@pytest.mark.parametrize(("call", "function"), cases(("xla",), collective=False, long_forward=True))
def test_compiles_once_outside_of_jit(call, function, chunked, compilations, monkeypatch):
    """Also where plain JAX works chunk by chunk."""
    if chunked:
        if call.name not in ("attention-window", "attention-quantized", "attention_fp8-lengths"):
            pytest.skip("takes time, and is like one of these")
        monkeypatch.setattr(xla, "LOGITS_BYTES", 0)
        monkeypatch.setattr(xla, "MIN_ROWS", 5)
    arrays = call.arrays()
    function(arrays)
    once = len(compilations)
    function(arrays)
    assert len(compilations) == once


@pytest.mark.parametrize("name", ["attention", "decode_attention", "update_cache"])
def test_compiles_once_outside_of_jit_on_several_devices(name, compilations):
    """On axes of type Explicit, of which each device has its part."""
    (call,) = (call for call in CALLS if call.name == name)
    mesh = mesh_of((2,), AxisType.Explicit)
    of_batch = lambda axes: PartitionSpec(*("x" if axis == "b" else None for axis in axes))
    given = [(x, of_batch(call.operands[name].axes)) for name, x in call.arrays().items()]
    arrays = dict(zip(call.operands, put(mesh, *given), strict=True))
    run = call.forward("xla")
    run(arrays)
    once = len(compilations)
    run(arrays)
    assert len(compilations) == once


def test_every_public_function_is_called():
    called = {call.function for call in CALLS}
    functions = {name for name in jax_flash.__all__ if callable(getattr(jax_flash, name))}
    assert called | set(NOT_CALLED) == functions
    assert not called & set(NOT_CALLED)
