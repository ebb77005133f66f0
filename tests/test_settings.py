"""Every public function under the settings of JAX that users turn on.

What they refuse, they refuse while a function is traced; only NaN has to be computed.
"""

import contextlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

import jax_flash
from tests.support.public_calls import CALLS, NOT_CALLED, PublicCall

TRACED: dict[str, Callable[[], contextlib.AbstractContextManager]] = {
    "rank_promotion": lambda: jax.numpy_rank_promotion("raise"),
    "dtype_promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "enable_x64": lambda: jax.enable_x64(True),
    "checking_leaks": jax.checking_leaks,
}
RUN: dict[str, Callable[[], contextlib.AbstractContextManager]] = {
    "debug_nans": lambda: jax.debug_nans(True),
    "disable_jit": jax.disable_jit,
}


def cases(implementations=("xla", "mosaic_gpu")):
    """Calls, implementations, and functions of arrays: forward, and gradient where there is one."""
    found = []
    for call in CALLS:
        own = implementations if call.has_implementation else (None,)
        for implementation in own:
            for kind in ("forward", "gradient") if call.differentiated else ("forward",):
                name = "-".join([call.name, implementation or "any", kind])
                found.append(pytest.param(call, getattr(call, kind)(implementation), id=name))
    return found


@pytest.mark.parametrize("setting", TRACED)
@pytest.mark.parametrize(("call", "function"), cases())
def test_traces_under(setting: str, call: PublicCall, function: Callable):
    arrays = call.arrays()
    with TRACED[setting]():
        jax.jit(function).trace(arrays)


@pytest.mark.parametrize("setting", RUN)
@pytest.mark.parametrize(("call", "function"), cases(("xla",)))
def test_runs_under(setting: str, call: PublicCall, function: Callable):
    arrays = call.arrays()
    with RUN[setting]():
        results = function(arrays)
    for x in jax.tree.leaves(results):
        assert not jnp.isnan(x.astype(jnp.float32)).any()


def test_every_public_function_is_called():
    called = {call.function for call in CALLS}
    functions = {name for name in jax_flash.__all__ if callable(getattr(jax_flash, name))}
    assert called | set(NOT_CALLED) == functions
    assert not called & set(NOT_CALLED)
