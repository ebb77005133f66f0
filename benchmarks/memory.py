"""Peak memory of forward + backward, beside the peers': `python -m benchmarks.memory`.

Each candidate runs in a process of its own, since an allocator keeps one peak for its lifetime. It
counts all that jax allocates, also what a peer's kernels ask for as they run, which `temp_bytes` of
benchmarks.attention does not.
"""

import concurrent.futures
import multiprocessing
import os
from typing import Any

import jax

from benchmarks import attention, reporting, timing
from benchmarks.attention import Row

ROWS = [Row(4, 4096, 16, 16, 128, True), Row(1, 16384, 32, 32, 64, True)]


def peak_bytes(name: str, row: Row) -> tuple[dict[str, Any], int]:
    """`reporting.provenance`, and bytes that one call needs at its peak beside its arguments.

    Results are among them. To be called once a process.

    Raises:
      RuntimeError: the device does not count its memory.
    """
    inputs = jax.block_until_ready(row.inputs())
    arguments = sum(x.nbytes for x in inputs)
    programs = attention.build(attention.CANDIDATES[name], row, "both")
    jax.block_until_ready(attention.bind(programs, inputs)())
    stats = jax.devices()[0].memory_stats()
    if not stats:
        raise RuntimeError(f"{jax.devices()[0].device_kind} does not count its memory")
    return reporting.provenance(), stats["peak_bytes_in_use"] - arguments


def main(argv: list[str] | None = None) -> int:
    parser = reporting.parser(__doc__)
    every = "jax_flash,jax_flash deterministic,cuDNN,FA3"
    parser.add_argument("--candidates", default=every, help="separated by commas")
    reporting.add_results(parser)
    arguments = parser.parse_args(argv)
    names = arguments.candidates.split(",")
    if unknown := {*names} - {*attention.CANDIDATES}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")

    if not timing.on_gpu():
        raise SystemExit("peaks of memory need an NVIDIA GPU")

    # Trying out algorithms would allocate too. What is set here is for the processes to come.
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_autotune_level=0"
    results: list[dict[str, Any]] = []
    record: dict[str, Any] = {}
    for row, name in timing.progress([(row, name) for row in ROWS for name in names], "memory"):
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as process:
            record, peak = process.submit(peak_bytes, name, row).result()
        results.append({"row": row.name, "candidate": name, "peak_bytes": peak})
    path = reporting.write(arguments.results, "memory", record | {"results": results})
    lines = [["shape", *names]]
    for row in ROWS:
        peaks = [r["peak_bytes"] for r in results if r["row"] == row.name]
        lines.append([row.name, *(f"{peak / 2**20:.0f}" for peak in peaks)])
    print(f"\n{reporting.where(record)}")
    print("MiB at the peak of forward + backward, beside the arguments")
    print(f"{reporting.markdown(lines)}\nwritten: {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
