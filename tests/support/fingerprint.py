"""Says which kernels a change touched: `python -m tests.support.fingerprint`.

A fingerprint is of what Mosaic makes of a kernel before it compiles it, its PTX included, without
lines of the sources. Equal fingerprints compile to equal machine code. `fingerprints.json` has
those of every case of `kernel_cases.py` as it was last compiled, without a spill and without a
serialised wgmma; tests/test_compile.py compiles the others. After a change of a kernel,

    python -m tests.support.fingerprint            lists the cases that it touched, in five minutes
    python -m tests.support.fingerprint --update   compiles those, and writes down what passed
    python -m tests.support.fingerprint --update --all   compiles all of them, in an hour

What was compiled by other versions of jax, or by another ptxas, counts as not compiled.
"""

import argparse
import concurrent.futures
import hashlib
import importlib.metadata
import json
import multiprocessing
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax

from jax_flash import launch
from pallas_kernels.canonicalize import lowering_faster
from tests.support.kernel_cases import decode_cases, kernel_cases

GOLDEN = pathlib.Path(__file__).parent / "fingerprints.json"
_PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "nvidia-cuda-nvcc")


def fingerprint(fn: Callable, args: Any) -> str:
    """Of every kernel of `fn(*args)`, lowered for CUDA."""
    from jax.experimental.mosaic.gpu import core

    serialize, texts = core._run_serde_pass, []

    def read_and_serialize(module, *args, **options):
        texts.append(module.operation.get_asm(enable_debug_info=False))
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
    # Which is lowered first depends on what else was traced.
    return hashlib.sha256("\n".join(sorted(texts)).encode()).hexdigest()[:16]


def versions() -> dict[str, str]:
    """Of what compiles."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "none"
    return found


def golden() -> dict[str, str]:
    """Fingerprints by case of what was compiled without a fault, by what is installed here."""
    record = json.loads(GOLDEN.read_text())
    return record["fingerprints"] if record["versions"] == versions() else {}


def cases() -> dict[str, tuple[Callable, Any]]:
    return {name: (fn, args) for name, fn, args in kernel_cases() + decode_cases()}


def _of(name: str) -> str:
    return fingerprint(*cases()[name])


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


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--update", action="store_true", help="compile what is not known to pass")
    parser.add_argument("--all", action="store_true", help="compile what is known to pass too")
    options = parser.parse_args(argv)

    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # of the processes below; none looks for a GPU
    known, names = golden(), list(cases())
    found = _for_all(_of, names, "lowered")
    touched = [name for name in names if options.all or known.get(name) != found[name]]
    gone = sorted(known.keys() - found.keys())
    print("\n".join([*touched, *(f"{name} is gone" for name in gone)] or ["no kernel has changed"]))
    if not options.update:
        return 1 if touched or gone else 0
    faults = _for_all(_faults, touched, "compiled") if touched else {}
    bad = {name: lines for name, lines in faults.items() if lines}
    for name, lines in bad.items():
        print("\n  ".join([name, *lines]))
    kept = {name: found[name] for name in sorted(found) if name not in bad}
    record = {"versions": versions(), "fingerprints": kept}
    GOLDEN.write_text(json.dumps(record, indent=1) + "\n")
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
