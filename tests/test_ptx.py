"""Functions of `pallas_kernels.ptx`, each against a definition in numpy: their twins, and the PTX.

The files of tests/ptx have a kernel of one thread block for each function, or for some that belong
together. What is expected of it is of the twins, which run on any CPU, and of the PTX, which runs
on a Hopper GPU alone. Without one it is lowered and compiled.
"""

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest

import tests.ptx
from pallas_kernels import ptx
from tests.support.cases import long, slow
from tests.support.interpret import interpret_mode
from tests.support.ptx import CASES, COVERED, EVERY_VALUE, Case

for _module in pkgutil.iter_modules(tests.ptx.__path__):
    importlib.import_module(f"{tests.ptx.__name__}.{_module.name}")

# Functions without a case of their own, and why.
ELSEWHERE = {
    "twins_of": "tests.support.ptx takes it for every case with barriers",
    "with_twins": "as twins_of",
    "float8_box": "columns of a box of float8_operand",
    "in_two_parts": "of the twins of store_queries_float8 and store_weights_float8",
    "words_layout": "registers of load_queries",
    "loaded_chunks": "what store_queries and store_queries_float8 do of each register",
}
ELSEWHERE_MODULES = {"mlir": "what functions make their PTX of, but for zero_tile"}


@pytest.fixture(params=CASES)
def each(request) -> Case:
    return CASES[request.param]()


def _twins() -> Iterator[Any]:
    """Cases by name: of a kernel the first, in CI those that have every value, and the others."""
    known = set()
    for name in CASES:
        kernel = name.partition("-")[0]
        left_to_ci = long if name in EVERY_VALUE else slow
        yield name if kernel not in known else left_to_ci(name)
        known.add(kernel)


@pytest.mark.parametrize("name", list(_twins()))
def test_twin(name):
    each = CASES[name]()
    with interpret_mode():
        results = each.run(*each.arguments)
        each.check(results, each.expected)


@pytest.mark.slow  # as on a jax that they are compiled for test_compiles lowers them too
@pytest.mark.lowering
def test_lowers_for_cuda(each):
    lowered = jax.jit(each.run).trace(*each.arguments).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


@pytest.mark.compiler
@pytest.mark.parametrize("name", [x if x in EVERY_VALUE else slow(x) for x in CASES])
def test_compiles(name):
    from tests.support import compile

    each = CASES[name]()
    for report in compile.compile_kernels(each.run, each.arguments, sass=False):
        assert not report.faults()


@pytest.mark.gpu
def test_ptx_on_a_gpu(each):
    results = jax.jit(each.run)(*each.arguments)
    each.check(results, each.expected if each.on_gpu is None else each.on_gpu)


def _public_functions() -> dict[str, Callable]:
    """Of all modules of ptx, by name."""
    found = {}
    for info in pkgutil.iter_modules(ptx.__path__):
        module = importlib.import_module(f"{ptx.__name__}.{info.name}")
        own = {
            name: value
            for name, value in vars(module).items()
            if callable(value) and getattr(value, "__module__", None) == module.__name__
        }
        found |= {name: value for name, value in own.items() if not name.startswith("_")}
    return found


def test_every_function_has_a_case():
    modules = {f"{ptx.__name__}.{name}" for name in ELSEWHERE_MODULES}
    without = {
        name
        for name, function in _public_functions().items()
        if function not in COVERED and function.__module__ not in modules
    }
    assert without == set(ELSEWHERE)


def _names(code, module: dict) -> set[str]:
    """Those that code has, with what is inside of it, and with private helpers of its module."""
    helpers = [module.get(name) for name in code.co_names if name.startswith("_")]
    inner = [x.__code__ for x in helpers if inspect.isfunction(x)]
    inner += [x for x in code.co_consts if inspect.iscode(x)]
    return set(code.co_names).union(*(_names(x, module) for x in inner))


@pytest.mark.parametrize("function", COVERED, ids=lambda function: function.__name__)
def test_cases_call_their_functions(function):
    make = COVERED[function]
    assert function.__name__ in _names(make.__code__, make.__globals__)
