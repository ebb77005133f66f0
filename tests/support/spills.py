"""Says which rows of tables of spills are needed: `python -m tests.support.spills`.

`pallas_kernels/*_spills.py` say what kernels do where they would spill. Each row names a case of
kernel_cases.py, which is compiled without it: if the row is needed, that has a fault. A row is
named by its table and its place there: forward.ENDS[0].

    python -m tests.support.spills                  every row, 10 seconds each
    python -m tests.support.spills forward H256     those with both in their name or their case's
    python -m tests.support.spills --find ENDS[0] --among 'H128.*score'

The last looks for a case that needs a row, among those of such names, or all in 20 minutes: it
traces one after another, and compiles those that the row decides, until one has a fault.
"""

import argparse
import concurrent.futures
import contextlib
import importlib
import multiprocessing
import os
import pathlib
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax

import pallas_kernels
from pallas_kernels.spills import Spill
from tests.support import fingerprint, launches

Table = tuple[Spill, ...]


def places() -> dict[str, tuple[Any, str]]:
    """Of each table its module, and its name there."""
    found = {}
    for path in sorted(pathlib.Path(pallas_kernels.__file__).parent.glob("*_spills.py")):
        module = importlib.import_module(f"pallas_kernels.{path.stem}")
        for name, value in vars(module).items():
            if isinstance(value, tuple) and value and isinstance(value[0], Spill):
                found[f"{path.stem.removesuffix('_spills')}.{name}"] = module, name
    return found


def tables() -> dict[str, Table]:
    return {table: getattr(*place) for table, place in places().items()}


def rows() -> dict[str, Spill]:
    return {f"{name}[{n}]": row for name, x in tables().items() for n, row in enumerate(x)}


@contextlib.contextmanager
def replaced(others: dict[str, Table]) -> Iterator[None]:
    """Other tables in the place of those of these names, and nothing known of earlier ones."""
    with contextlib.ExitStack() as stack:
        stack.callback(_forget)
        for name, table in others.items():
            stack.enter_context(mock.patch.object(*places()[name], table))
        _forget()
        yield


def _forget() -> None:
    jax.clear_caches()
    modules = [module for name, module in sys.modules.items() if name.startswith("pallas_kernels")]
    for value in [value for module in modules for value in vars(module).values()]:
        if hasattr(value, "cache_clear"):
            value.cache_clear()


def without(*rows: str) -> contextlib.AbstractContextManager[None]:
    """All tables without these rows."""
    return replaced(
        {
            name: tuple(row for n, row in enumerate(table) if f"{name}[{n}]" not in rows)
            for name, table in tables().items()
        }
    )


def decided(launch: Any) -> set[str]:
    """The rows without which a table would say no where it says yes, while a launch is traced."""
    found = set()

    def watched(name: str, table: Table) -> Table:
        def when(plan) -> bool:
            fitting = [n for n, row in enumerate(table) if row.when(plan)]
            if len(fitting) == 1:
                found.add(f"{name}[{fitting[0]}]")
            return bool(fitting)

        return (Spill("any", when),)

    with replaced({name: watched(name, table) for name, table in tables().items()}):
        jax.make_jaxpr(launch)(*launches.types(launch))
    return found


def launches_of(case: str) -> list[Any]:
    fn, args = fingerprint.cases()[case]
    return launches.launches(fn, *args)


def faults(case: str, row: str) -> list[str] | None:
    """Of the launches of a case that a row decides, without it; None if it decides none."""
    from tests.support import compile  # of the extra `compile`

    found = None
    for launch in [launch for launch in launches_of(case) if row in decided(launch)]:
        with without(row):
            reports = compile.compile_kernels(launch, launches.types(launch), sass=False)
        of_launch = [f"{report.name}: {fault}" for report in reports for fault in report.faults()]
        found = [*(found or []), *of_launch]
    return found


def _is_needed(case: str, row: str, compiling: Callable) -> bool:
    found = compiling(faults, case, row).result()
    not_found = "decides nothing here" if found is None else "not needed"
    print(f"{row} {case}: {', '.join(found or [not_found])}", flush=True)
    return bool(found)


def _find(wanted: list[str], among: str, compiling: Callable, most: int) -> bool:
    """Whether a case is found for each row."""
    tried, needed = dict.fromkeys(wanted, 0), set()
    for case in [case for case in fingerprint.cases() if re.search(among, case)]:
        left = {row for row in wanted if row not in needed and tried[row] < most}
        if not left:
            break
        here = {row for launch in launches_of(case) for row in decided(launch)}
        for row in sorted(left & here):
            tried[row] += 1
            if _is_needed(case, row, compiling):
                needed.add(row)
    for row in [row for row in wanted if row not in needed]:
        print(f"{row}: no fault in {tried[row]} cases", flush=True)
    return needed == set(wanted)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("words", nargs="*", help="which a row's name or case has; all without")
    parser.add_argument("--find", action="store_true", help="look for cases that need them")
    parser.add_argument("--among", default="", help="what their names have, a regular expression")
    parser.add_argument("--most", type=int, default=15, help="cases to compile for a row")
    options = parser.parse_args(argv)
    known = rows()
    fits = lambda row: all(word in f"{row} {known[row].case}" for word in options.words)
    wanted = list(filter(fits, known))
    if not wanted:
        parser.error(f"no row has {options.words} in its name or case; rows are {[*known]}")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # of the processes below; none looks for a GPU
    # Each in a process of its own, as the plugin compiles a kernel once in a process.
    with concurrent.futures.ProcessPoolExecutor(
        1, mp_context=multiprocessing.get_context("spawn"), max_tasks_per_child=1
    ) as process:
        if options.find:
            return 0 if _find(wanted, options.among, process.submit, options.most) else 1
        needed = {row: _is_needed(known[row].case, row, process.submit) for row in wanted}
    others = [row for row in wanted if needed[row] != known[row].is_needed]
    print("\n".join(f"{row} says otherwise" for row in others) or "as the rows say")
    return 1 if others else 0


if __name__ == "__main__":
    raise SystemExit(main())
