"""What a user waits for before the first result: `python -m benchmarks.first_call`.

Every line is a process of its own: import, trace, lower, compile, and the first run, in seconds.

    cold             the first call in a process
    one core         the same on one core
    another length, ...   the next call in the same process, of another shape
    second process   the first call, where JAX's compilation cache has it from another process
    another program  the same, where it has another program of the same calls
    four variants    four calls in one program: all keys, causal, a window, packed documents

Candidates: "jax_flash", and on a GPU "cuDNN", as jax.nn.dot_product_attention calls it. Without a
GPU jax_flash runs in plain JAX, at a small size.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from benchmarks import reporting  # no jax, which a child imports

CANDIDATES = ("jax_flash", "cuDNN")
PASSES = ("forward", "both")
STAGES = ("import", "trace", "lower", "compile", "run")

# Steps of one process: batch, and the length of that of the first, which is cold.
SHAPES: dict[str, tuple[int, Callable[[int], int]]] = {
    "": (1, lambda length: length),
    "another length": (1, lambda length: length * 3 // 4),
    "a length of no whole tiles": (1, lambda length: length - 93),
    "another batch": (3, lambda length: length),
}

# What of a task differs from that of one cold call. Those of the second kind are run twice, first
# as a cold call, with one directory for JAX's compilation cache.
SCENARIOS: dict[str, dict[str, Any]] = {
    "cold": {"steps": list(SHAPES)},
    "one core": {"one_core": True},
    "second process": {},
    "another program": {"factor": 2.0},
    "four variants": {"variants": True},
}
CACHED = ("second process", "another program")


def child(task: dict[str, Any]) -> list[dict[str, Any]]:
    """Times the stages of each step of a task in this process, which has imported nothing yet."""
    if task["one_core"]:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    clock = time.perf_counter
    import jax
    import jax.numpy as jnp

    gpu = jax.devices()[0].platform == "gpu"
    length, heads, kv_heads, width = (4096, 32, 8, 128) if gpu else (256, 4, 2, 64)

    def inputs(step: str):
        batch, of_first = SHAPES[step]
        keys = jax.random.split(jax.random.key(0), 3)
        sizes = (heads, kv_heads, kv_heads)
        return tuple(
            jax.random.normal(key, (batch, of_first(length), n, width), jnp.bfloat16)
            for key, n in zip(keys, sizes, strict=True)
        )

    data = {name: jax.block_until_ready(inputs(name)) for name in task["steps"]}
    begin = clock()
    attention = _attention(task["candidate"], gpu)
    import_library = clock() - begin

    def variants(query, key, value):
        if not task["variants"]:
            return attention(task["factor"] * query, key, value, is_causal=True)
        ids = jnp.arange(query.shape[1])[None] // 100 + jnp.zeros((query.shape[0], 1), jnp.int32)
        calls: list[dict[str, Any]] = [
            {},
            {"is_causal": True},
            {"is_causal": True, "local_window_size": (query.shape[1] // 4, 0)},
            {"is_causal": True, "query_segment_ids": ids, "key_value_segment_ids": ids},
        ]
        return sum(attention(query, key, value, **options) for options in calls)

    loss = lambda *arrays: variants(*arrays).astype(jnp.float32).sum()
    function = variants if task["passes"] == "forward" else jax.grad(loss, (0, 1, 2))
    steps: list[dict[str, Any]] = []
    for name, arrays in data.items():
        times = [clock()]
        traced = jax.jit(function).trace(*arrays)
        times.append(clock())
        lowered = traced.lower()
        times.append(clock())
        compiled = lowered.compile()
        times.append(clock())
        result = jax.block_until_ready(compiled(*arrays))
        times.append(clock())
        stages = [b - a for a, b in itertools.pairwise(times)]
        step = {"step": name, "import": import_library if not steps else 0.0}
        step |= dict(zip(STAGES[1:], stages, strict=True))
        steps.append(step | {"error": _error(task, result, arrays)})
    return steps


def _attention(candidate: str, gpu: bool):
    if candidate == "jax_flash":
        import jax_flash

        return lambda *args, **options: jax_flash.attention(
            *args, **options, implementation="mosaic_gpu" if gpu else "xla"
        )
    import jax

    return lambda *args, **options: jax.nn.dot_product_attention(
        *args, **options, implementation="cudnn" if gpu else "xla"
    )


def _error(task: dict[str, Any], result, arrays) -> float | None:
    """Of a causal call the error beside jax.nn in float32."""
    if task["variants"]:
        return None
    import jax

    from benchmarks import attention

    def attend(query, key, value):
        return jax.nn.dot_product_attention(task["factor"] * query, key, value, is_causal=True)

    loss = lambda *arrays: attend(*arrays).sum()
    right = attend if task["passes"] == "forward" else jax.grad(loss, (0, 1, 2))
    expected = jax.jit(right)(*(x.astype("float32") for x in arrays))
    leaves = jax.tree.leaves
    return float(attention.relative_error(leaves(result), leaves(expected)))


def run(candidate: str, passes: str, **options: Any) -> list[dict[str, Any]]:
    """The same in a new process.

    Args:
      candidate, passes: of `CANDIDATES` and `PASSES`.
      **options: of the task: "steps", "variants", "one_core", "factor", which the query is times;
        and "cache", a directory for JAX's compilation cache, None for none.
    """
    task: dict[str, Any] = {"candidate": candidate, "passes": passes, "steps": [""]}
    task |= {"variants": False, "one_core": False, "factor": 1.0} | options
    environment = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    if cache := task.pop("cache", None):
        environment["JAX_COMPILATION_CACHE_DIR"] = cache
    command = [sys.executable, "-m", "benchmarks.first_call", "--task", json.dumps(task)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    return json.loads(done.stdout.splitlines()[-1])


def measure(candidate: str, passes: str, scenario: str) -> list[dict[str, Any]]:
    """Steps of one scenario, each with its name and that of what was run."""
    with tempfile.TemporaryDirectory() as directory:
        cache = directory if scenario in CACHED else None
        if cache:
            run(candidate, passes, cache=cache)
        steps = run(candidate, passes, cache=cache, **SCENARIOS[scenario])
    of_all = {"candidate": candidate, "passes": passes}
    return [of_all | step | {"step": step["step"] or scenario} for step in steps]


def table(results: list[dict[str, Any]]) -> list[list[str]]:
    lines = [["pass", "call", "candidate", *STAGES, "all"]]
    for result in results:
        names = [result["passes"], result["step"], result["candidate"]]
        if "failed" in result:
            lines.append([*names, *[""] * len(STAGES), result["failed"]])
            continue
        times = [result[stage] for stage in STAGES]
        lines.append([*names, *(f"{t:.2f}" for t in times), f"{sum(times):.2f}"])
    return lines


def main(argv: list[str] | None = None) -> int:
    parser = reporting.parser(__doc__)
    parser.add_argument(
        "--candidates", help=f"of {','.join(CANDIDATES)} (default: all that this machine has)"
    )
    parser.add_argument("--passes", default=",".join(PASSES), help="separated by commas")
    parser.add_argument("--scenarios", default=",".join(SCENARIOS), help="the same")
    reporting.add_results(parser)
    parser.add_argument("--task", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.task:
        print(json.dumps(child(json.loads(arguments.task))))
        return 0

    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # processes share the GPU
    from benchmarks import attention, timing

    gpu = timing.on_gpu()
    names = (arguments.candidates or ",".join(CANDIDATES if gpu else CANDIDATES[:1])).split(",")
    passes, scenarios = arguments.passes.split(","), arguments.scenarios.split(",")
    for given, known in ((names, CANDIDATES), (passes, PASSES), (scenarios, SCENARIOS)):
        if unknown := {*given} - {*known}:
            parser.error(f"unknown: {', '.join(sorted(unknown))}")
    results: list[dict[str, Any]] = []
    tasks = [(kind, scenario, name) for kind in passes for scenario in scenarios for name in names]
    for kind, scenario, name in timing.progress(tasks, "first call"):
        if scenario == "four variants" and name != "jax_flash":
            continue  # cuDNN has no packed documents
        try:
            results += measure(name, kind, scenario)
        except RuntimeError as error:  # a peer may lack something: the others go on
            of = {"candidate": name, "passes": kind, "step": scenario}
            results.append(of | {"failed": str(error)})
    record = reporting.provenance() | {"cores": os.cpu_count(), "results": results}
    path = reporting.write(arguments.results, "first call", record)
    where = f"{reporting.where(record)}, {os.cpu_count()} cores"
    print(f"\nseconds before the first result; {where}")
    print(f"{reporting.markdown(table(results))}\nwritten: {path}")
    return 1 if any(_is_bad(result, attention.TOLERANCE) for result in results) else 0


def _is_bad(result: dict[str, Any], tolerance: float) -> bool:
    error = result.get("error")
    return "failed" in result or (error is not None and not error <= tolerance)


if __name__ == "__main__":
    raise SystemExit(main())
