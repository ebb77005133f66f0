"""Says what is needed of what kernels do for registers: `python -m tests.support.spills`.

Tables `*_spills.py` in pallas_kernels say where a kernel would spill. Each row names a case of
kernel_cases.py that would without it, which is compiled so. A row is named by its table and its
place there.

    python -m tests.support.spills                  compiles the case of every row
    python -m tests.support.spills forward H256     of those with both in name or case
    python -m tests.support.spills --find 'forward.ENDS[0]'

The last compiles other cases that a row decides, one after another, until one has a fault.
"""

import argparse
import concurrent.futures
import contextlib
import importlib
import multiprocessing
import os
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax

import pallas_kernels
from pallas_kernels.spills import Spill
from tests.support import fingerprint, launches

_FOLDER = pathlib.Path(pallas_kernels.__file__).parent


def tables() -> dict[str, tuple[Any, str]]:
    """Each one's module and name there, by what it is called here."""
    found = {}
    for path in sorted(_FOLDER.glob("*_spills.py")):
        module = importlib.import_module(f"pallas_kernels.{path.stem}")
        for name, value in vars(module).items():
            if isinstance(value, tuple) and value and isinstance(value[0], Spill):
                found[f"{path.stem.removesuffix('_spills')}.{name}"] = module, name
    return found


def rows() -> dict[str, tuple[str, int, str]]:
    """Table, place and case of each row, by its name."""
    return {
        f"{table}[{n}]": (table, n, row.case)
        for table, (module, name) in tables().items()
        for n, row in enumerate(getattr(module, name))
    }


@contextlib.contextmanager
def _patched(changed: dict[str, tuple[Spill, ...]]) -> Iterator[None]:
    """With other tables, and without what was made with those before."""
    with contextlib.ExitStack() as stack:
        for table, of_table in changed.items():
            stack.enter_context(mock.patch.object(*tables()[table], of_table))
        stack.callback(_forget)
        _forget()
        yield


def _forget() -> None:
    jax.clear_caches()
    modules = [module for name, module in sys.modules.items() if name.startswith("pallas_kernels")]
    for value in [value for module in modules for value in vars(module).values()]:
        if hasattr(value, "cache_clear"):
            value.cache_clear()


def without(row: str) -> contextlib.AbstractContextManager[None]:
    table, n, _ = rows()[row]
    of_table = getattr(*tables()[table])
    return _patched({table: (*of_table[:n], *of_table[n + 1 :])})


def decided(launch: Callable) -> set[str]:
    """The rows without which a table would say no of some plan of a launch, as it is traced."""
    found = set()

    def watched(table: str) -> tuple[Spill, ...]:
        of_table = getattr(*tables()[table])

        def when(plan) -> bool:
            fitting = [n for n, row in enumerate(of_table) if row.when(plan)]
            if len(fitting) == 1:
                found.add(f"{table}[{fitting[0]}]")
            return bool(fitting)

        return (Spill("any", when),)

    with _patched({table: watched(table) for table in tables()}), jax.enable_x64(False):
        jax.make_jaxpr(launch)(*launches.types(launch))
    return found


def launches_of(case: str) -> list[Callable]:
    fn, args = fingerprint.cases()[case]
    return launches.launches(fn, *args)


def faults(case: str, row: str) -> list[str] | None:
    """Of the launches of a case that a row decides, without it; None if it decides none."""
    from tests.support import compile  # of the extra `compile`

    found = None
    for launch in (x for x in launches_of(case) if row in decided(x)):
        with without(row):
            reports = compile.compile_kernels(launch, launches.types(launch), sass=False)
        new = [f"{report.name}: {fault}" for report in reports for fault in report.faults()]
        found = (found or []) + new
    return found


def _check(row: str, compiled: Callable) -> bool:
    case = rows()[row][2]
    found = compiled(faults, case, row).result()
    said = "NOT NEEDED" if found == [] else "decides nothing" if found is None else str(found)
    print(f"{row} {case}: {said}", flush=True)
    return bool(found)


def _find(wanted: list[str], compiled: Callable, most: int) -> bool:
    """Looks for a case that needs each row."""
    tried = dict.fromkeys(wanted, 0)
    left = set(wanted)
    for case in fingerprint.cases():
        if not left:
            break
        decided_here = set().union(*map(decided, launches_of(case)))
        for row in sorted(left & decided_here):
            found = compiled(faults, case, row).result()
            tried[row] += 1
            print(f"{row} {case}: {found or 'NOT NEEDED'}", flush=True)
            if found or tried[row] == most:
                left.remove(row)
    for row in sorted(left):
        print(f"{row}: no fault in {tried[row]} cases that it decides", flush=True)
    return not left


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("words", nargs="*", help="which a row's name or case has; all without")
    parser.add_argument("--find", action="store_true", help="look for other cases that need them")
    parser.add_argument("--most", type=int, default=15, help="cases to compile for each of these")
    options = parser.parse_args(argv)
    wanted = [
        name
        for name, (*_, case) in rows().items()
        if all(word in f"{name} {case}" for word in options.words)
    ]
    if not wanted:
        parser.error(f"no row has {options.words} in its name or case: {', '.join(rows())}")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # of the processes below; none looks for a GPU
    # Each in a process of its own, as the plugin compiles a kernel once in a process.
    with concurrent.futures.ProcessPoolExecutor(
        1, mp_context=multiprocessing.get_context("spawn"), max_tasks_per_child=1
    ) as process:
        if options.find:
            return 0 if _find(wanted, process.submit, options.most) else 1
        needed = [_check(row, process.submit) for row in wanted]
        return 0 if all(needed) else 1


if __name__ == "__main__":
    raise SystemExit(main())
