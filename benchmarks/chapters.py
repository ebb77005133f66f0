"""The chapters on the way to the kernels: `python -m benchmarks.chapters`.

matmul.py beside jax's own product, and beside itself without split-K; plain.py beside forward.py.
Each result is checked against jax's; in turns with the others. It needs a GPU.
"""

import concurrent.futures
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jax_flash
from benchmarks import attention, reporting, timing
from pallas_kernels import matmul, plain

PRODUCTS = [(8192, 8192, 8192), (4096, 4096, 4096), (64, 4096, 4096), (1000, 3000, 2008)]
SEQUENCES = [(4, 4096, 16), (1, 16384, 16)]  # batch, length, heads


def rows() -> dict[str, tuple[list[tuple[int, ...]], dict[str, Callable]]]:
    """Shapes of operands, and candidates, of which the first is what others are beside."""
    whole = functools.partial(matmul.matmul, splits=1)
    of_products: dict[str, Callable] = {
        "jax": jnp.matmul,
        "matmul.py": matmul.matmul,
        "matmul.py, no splits": whole,
    }
    causal = functools.partial(jax_flash.attention, is_causal=True, implementation="mosaic_gpu")
    found: dict[str, tuple[list[tuple[int, ...]], dict[str, Callable]]] = {
        f"M {m} N {n} K {k}": ([(m, k), (k, n)], of_products) for m, n, k in PRODUCTS
    }
    for batch, length, heads in SEQUENCES:
        shapes: list[tuple[int, ...]] = [(batch, length, heads, plain.WIDTH)] * 3
        candidates: dict[str, Callable] = {"forward.py": causal, "plain.py": plain.attention}
        found[f"b{batch} s{length} {heads} heads H{plain.WIDTH} causal"] = shapes, candidates
    return found


def measure(row: str, shapes, programs: dict[str, Any], rounds: int) -> list[dict[str, Any]]:
    """For each candidate its error beside the first, microseconds, and speed over the first."""
    keys = jax.random.split(jax.random.key(0), len(shapes))
    inputs = tuple(
        jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)
    )
    bound = {name: timing.Bound(run.result(), inputs) for name, run in programs.items()}
    outputs = {name: run() for name, run in bound.items()}
    first, *_ = outputs.values()
    errors = {x: float(attention.relative_error([y], [first])) for x, y in outputs.items()}
    right = {x: bound[x] for x, error in errors.items() if error <= attention.TOLERANCE}
    times = {x: 1e3 * time.mean for x, time in timing.interleaved(right, (), rounds, 10).items()}
    base, *_ = times.values()
    return [
        {"row": row, "candidate": x, "error": errors[x]}
        | ({"microseconds": times[x], "speedup": base / times[x]} if x in times else {})
        for x in outputs
    ]


def table(results: list[dict[str, Any]]) -> str:
    lines = [["shape", "candidate", "us", "speedup", "error"]]
    for result in results:
        time, speedup = result.get("microseconds"), result.get("speedup")
        figures = reporting.figure(time, ".1f"), reporting.figure(speedup, ".2f")
        lines.append([result["row"], result["candidate"], *figures, f"{result['error']:.1e}"])
    return reporting.markdown(lines)


def main(argv: list[str] | None = None) -> int:
    parser = reporting.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=timing.ROUNDS, help="turns of each")
    reporting.add_results(parser)
    options = parser.parse_args(argv)
    if not timing.on_gpu():
        raise SystemExit("the chapters run on Hopper GPUs")
    with concurrent.futures.ThreadPoolExecutor() as pool:
        found = rows()
        built = {
            row: {
                name: pool.submit(
                    jax.jit(run)
                    .lower(*(jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in shapes))
                    .compile
                )
                for name, run in candidates.items()
            }
            for row, (shapes, candidates) in found.items()
        }
    results: list[dict[str, Any]] = []
    for row, (shapes, _) in timing.progress(found.items(), "chapters"):
        results += measure(row, shapes, built[row], options.rounds)
    record = reporting.provenance() | {"results": results}
    path = reporting.write(options.results, "chapters", record)
    print(f"\n{reporting.where(record)}, bf16; speedup over the first of a shape")
    print(f"{table(results)}\n\nwritten: {path}")
    return 1 if any("speedup" not in result for result in results) else 0


if __name__ == "__main__":
    raise SystemExit(main())
