"""Where the time of a pass goes, kernel by kernel: `python -m benchmarks.kernels --suite masks`.

Takes the rows, passes and candidates of benchmarks.attention, which checks their results, and needs
a GPU. XLA's own kernels are among them.
"""

import concurrent.futures
from collections.abc import Iterator

from benchmarks import attention, reporting, timing
from benchmarks.attention import Row


def measure(
    row: Row,
    passes: str,
    built: dict[str, concurrent.futures.Future],
    inputs: tuple,
    iterations: int,
) -> Iterator[dict]:
    """Times one pass of one row; arguments are those of `attention.measure`.

    Yields:
      The row, pass and candidate, with its kernels' names and microseconds in the order they ran,
      or with why it failed.
    """
    for name, programs in built.items():
        result: dict = {"row": row.name, "passes": passes, "candidate": name}
        try:
            program = attention.bind(programs.result(), inputs)
            if not isinstance(program, timing.Bound):
                raise NotImplementedError("kernels of programs of JAX alone")
            result["kernels"] = timing.kernels(program, iterations)
        except Exception as error:  # a peer may lack a shape: the others go on, the table says so
            result["failed"] = timing.reason(error)
        yield result


def line(result: dict) -> list[str]:
    """A row of the table."""
    names = [result["row"], result["passes"], result["candidate"]]
    if "failed" in result:
        return [*names, "", result["failed"]]
    each = ", ".join(f"{kernel} {us:.1f}" for kernel, us in result["kernels"])
    return [*names, f"{sum(us for _, us in result['kernels']):.1f}", each]


def main(argv: list[str] | None = None) -> int:
    options = attention.parse(argv, __doc__)
    if not timing.on_gpu():
        raise SystemExit("times of single kernels need an NVIDIA GPU")
    results: list[dict] = []
    built = attention.compile_all(options.rows, options.passes, options.candidates)
    for row, programs in timing.progress(zip(options.rows, built, strict=True), "kernels"):
        inputs = row.inputs()
        for passes, of_pass in programs.items():
            results += measure(row, passes, of_pass, inputs, options.iterations)
        programs.clear()
    record = reporting.provenance() | {"results": results}
    path = reporting.write(options.results, f"kernels {options.suite}", record)
    header = ["shape", "pass", "candidate", "us", "kernels, us"]
    print(f"\n{reporting.where(record)}")
    print(reporting.markdown([header, *map(line, results)]))
    print(f"\nwritten: {path}")
    return 1 if any("failed" in r and attention.is_ours(r["candidate"]) for r in results) else 0


if __name__ == "__main__":
    raise SystemExit(main())
