"""Says which kernels a change touched: `python -m tests.support.fingerprint`.

A fingerprint is of what Mosaic makes of a kernel before it compiles it, its PTX included, without
lines of the sources. Equal fingerprints compile to equal machine code. `fingerprints.json` has
those of every case of `kernel_cases.py` as it was last compiled, without a spill and without a
serialised wgmma; tests/test_compile.py compiles the others. It has outlines too, of what is traced:
a case whose outline is known is not lowered. And one hash of all sources that outlines are made by:
while it is the same, no case is traced. After a change of a kernel, or of what calls it,

    python -m tests.support.fingerprint                 lists what it touched, in two minutes and
                                                        what lowering that takes
    python -m tests.support.fingerprint H128-causal     the same of cases with that in their name
    python -m tests.support.fingerprint --update        compiles those, and writes down what passed
    python -m tests.support.fingerprint --update --all  compiles all of them, in an hour

What other versions of jax compiled, or another ptxas, cannot be compared. The versions of the file
are what CI installs: PIP_CONSTRAINT=.ci/constraints.txt pip install -e '.[dev]'.
"""

import argparse
import ast
import collections
import concurrent.futures
import functools
import hashlib
import importlib.metadata
import json
import multiprocessing
import os
import pathlib
import re
import sys
import types
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax

from jax_flash import launch
from pallas_kernels.canonicalize import lowering_faster
from tests.support import launches
from tests.support.kernel_cases import decode_cases, kernel_cases

GOLDEN = pathlib.Path(__file__).parent / "fingerprints.json"
# All that writes PTX, and what is done to modules before they are compiled.
_KERNELS = pathlib.Path(__file__).parents[2] / "pallas_kernels"
_OTHERS = ("bit_words.py", "dropout_words.py", "canonicalize.py", "joined.py")
SOURCES = [*_KERNELS.glob("ptx/*.py"), *(_KERNELS / name for name in _OTHERS)]
# All that decides what is traced of a case, but for the packages below.
_ROOT = _KERNELS.parent
_HERE = pathlib.Path(__file__)
TRACED = [
    *_KERNELS.rglob("*.py"),
    *(_ROOT / "jax_flash").rglob("*.py"),
    *(_HERE.with_name(f"{name}.py") for name in ("kernel_cases", "launches", _HERE.stem)),
]
_PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "nvidia-cuda-nvcc")


def fingerprint(fn: Callable, args: Any) -> dict[str, str]:
    """Of every kernel of `fn(*args)`, lowered for CUDA, by its name."""
    from jax.experimental.mosaic.gpu import core

    serialize, texts = core._run_serde_pass, collections.defaultdict(list)

    def read_and_serialize(module, *args, **options):
        text = module.operation.get_asm(enable_debug_info=False)
        texts[re.search(r"@(\w+)_mosaic_gpu\b", text)[1]].append(text)
        return serialize(module, *args, **options)

    launch._module.cache_clear()  # as those that are known are not lowered again
    with (
        mock.patch.object(launch, "_path", lambda *_: None),
        mock.patch.object(core, "_run_serde_pass", read_and_serialize),
        lowering_faster(),
    ):
        jax.jit(lambda *args: fn(*args)).trace(*args).lower(lowering_platforms=("cuda",))
    if not texts:
        raise ValueError("the function has no Mosaic GPU kernel")
    # Of several launches of a kernel, which is lowered first depends on what else was traced.
    return {
        name: hashlib.sha256("\n".join(sorted(of_name)).encode()).hexdigest()[:16]
        for name, of_name in sorted(texts.items())
    }


def outline(fn: Callable, args: Any) -> str:
    """Of what is traced of `fn(*args)`'s kernels: where it is the same, so is the fingerprint.

    It takes a fifth of the time. Of functions that write PTX a jaxpr has the name alone: what they
    close over is added, and their sources.
    """
    with jax.enable_x64(False), launch._keeping_garbage():
        traced = launches.traced(fn, *args)
    inline = [
        _described(eqn.params["mgpu_fn"])
        for jaxpr in traced
        for eqn in launches.equations(jaxpr)
        if "mgpu_fn" in eqn.params
    ]
    text = "\n".join([_sources_of_ptx(), *map(str, traced), *inline])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _described(x: Any) -> str:
    """A value that says all that it is, a function by its name and by what it closes over."""
    if isinstance(x, list | tuple):
        return f"{type(x).__name__}({', '.join(map(_described, x))})"
    if not isinstance(x, types.FunctionType):
        text = repr(x)
        if " at 0x" in text:
            raise TypeError(f"nobody knows what this is: {text}")
        return text
    path = pathlib.Path(x.__code__.co_filename)
    if path.is_relative_to(_KERNELS) and path not in SOURCES:
        raise TypeError(f"a function of a file that is none of SOURCES: {x}")
    cells = [_described(cell.cell_contents) for cell in x.__closure__ or ()]
    cells += map(_described, x.__defaults__ or ())
    return f"{x.__module__}.{x.__qualname__}({', '.join(cells)})"


@functools.cache
def _sources_of_ptx() -> str:
    """Without comments and lines."""
    return "\n".join(ast.dump(ast.parse(path.read_text())) for path in sorted(SOURCES))


@functools.cache
def sources() -> str:
    """A hash of TRACED, without comments, docstrings and lines."""
    digest = hashlib.sha256()
    for path in sorted(TRACED):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                first = node.body[0] if node.body else None
                if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                    del node.body[0]
        digest.update(f"{path.relative_to(_ROOT)} {ast.dump(tree)}\n".encode())
    return digest.hexdigest()[:16]


def versions() -> dict[str, str]:
    """Of what compiles."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "none"
    return found


def golden(of: str = "fingerprints") -> dict[str, Any]:
    """Fingerprints by case of what was compiled without a fault, by what is installed here.

    Args:
      of: or "outlines", of the same cases.
    """
    record = json.loads(GOLDEN.read_text())
    return record[of] if record["versions"] == versions() else {}


def outlines_of_these_sources() -> dict[str, str]:
    """Outlines by case, none where sources have changed since all were traced."""
    return golden("outlines") if _sources_of_file() == sources() else {}


def _sources_of_file() -> str | None:
    """None where some cases were traced later than others."""
    return json.loads(GOLDEN.read_text()).get("sources")


def cases() -> dict[str, tuple[Callable, Any]]:
    return {name: (fn, args) for name, fn, args in kernel_cases() + decode_cases()}


def found(name: str, fn: Callable, args: Any) -> tuple[str, dict[str, str]]:
    """Outline and fingerprint of a case, which is lowered where the outline is not known.

    Nor is it traced where the sources are those that it was traced of.
    """
    of_case = outlines_of_these_sources().get(name) or outline(fn, args)
    if of_case == golden("outlines").get(name):
        return of_case, golden()[name]
    return of_case, fingerprint(fn, args)


def _found(name: str) -> tuple[str, dict[str, str]]:
    return found(name, *cases()[name])


def _faults(name: str) -> list[str]:
    from tests.support import compile  # of the extra `compile`

    return [
        f"{report.name}: {fault}"
        for report in compile.compile_kernels(*cases()[name], sass=False)
        for fault in report.faults()
    ]


def _for_all(function: Callable, names: list[str], what: str) -> dict[str, Any]:
    """`function` of every name, on all cores."""
    results = {}
    with concurrent.futures.ProcessPoolExecutor(
        os.cpu_count(), mp_context=multiprocessing.get_context("spawn")
    ) as processes:
        futures = {processes.submit(function, name): name for name in names}
        for n, future in enumerate(concurrent.futures.as_completed(futures), 1):
            results[futures[future]] = future.result()
            if n % 20 == 0 or n == len(names):
                print(f"{what} {n}/{len(names)}", file=sys.stderr, flush=True)
    return results


def _changed(known: dict[str, str], found: dict[str, str]) -> list[str]:
    """Names of the kernels of a case that are other ones, new, or gone."""
    return [name for name in sorted({*known, *found}) if known.get(name) != found.get(name)]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("words", nargs="*", help="of which a case's name has one; all without")
    parser.add_argument("--list", action="store_true", help="print names of cases, and stop")
    parser.add_argument("--update", action="store_true", help="compile what is not known to pass")
    parser.add_argument("--all", action="store_true", help="compile what is known to pass too")
    options = parser.parse_args(argv)
    words = options.words or [""]
    names = [name for name in cases() if any(word in name for word in words)]
    if not names:
        parser.error(f"no case has one of {words} in its name; --list gives the names")
    if options.list:
        print("\n".join(names))
        return 0

    here, of_file = versions(), json.loads(GOLDEN.read_text())["versions"]
    if here != of_file and not (options.update and options.all):
        print(
            f"{GOLDEN.name} is of {of_file}, here is {here}: nothing can be compared. Install the"
        )
        print(
            "versions of CI, PIP_CONSTRAINT=.ci/constraints.txt pip install -e '.[dev]', or compile"
        )
        print("all with --update --all.")
        return 2
    if options.words and here != of_file:
        parser.error("words: nothing is known of the other cases")

    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # of the processes below; none looks for a GPU
    known = golden()
    both = _for_all(_found, names, "traced or lowered")
    outlines = {name: of_case for name, (of_case, _) in both.items()}
    now = {name: of_case for name, (_, of_case) in both.items()}
    touched = [name for name in names if options.all or known.get(name) != now[name]]
    gone = [] if options.words else sorted(known.keys() - now.keys())
    lines = [f"{name}: {', '.join(_changed(known.get(name, {}), now[name]))}" for name in touched]
    lines += [f"{name} is gone" for name in gone]
    print("\n".join(lines or [f"no kernel has changed, of {len(names)} cases"]))
    if not options.update:
        return 1 if touched or gone else 0
    faults = _for_all(_faults, touched, "compiled") if touched else {}
    bad = {name: lines for name, lines in faults.items() if lines}
    for name, lines in bad.items():
        print("\n  ".join([name, *lines]))
    record: dict[str, Any] = {"versions": here}
    if not options.words or _sources_of_file() == sources():
        record["sources"] = sources()
    of_cases = {"fingerprints": known | now, "outlines": golden("outlines") | outlines}
    for of, each in of_cases.items():
        record[of] = {name: each[name] for name in sorted(each) if name not in {*bad, *gone}}
    GOLDEN.write_text(json.dumps(record, indent=1) + "\n")
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
