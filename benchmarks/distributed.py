"""One causal sequence over several GPUs, forward + backward: `python -m benchmarks.distributed`.

Weak scaling: every GPU has `--length` positions, so that n of them attend over n times as many. As
work grows with the square, what compares is TFLOP/s a GPU, beside those of one GPU with `--length`
positions. Every method is checked first, on short sequences, against plain attention in float32.
With `--longest`, then, the longest sequence whose forward + backward fits, by doubling.
"""

import argparse
import functools
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_flash
from benchmarks import attention, timing
from benchmarks.attention import Row

METHODS: dict[str, Callable] = {
    "ring zigzag": functools.partial(jax_flash.ring_attention, zigzag=True),
    "ring": jax_flash.ring_attention,
    "ulysses": jax_flash.ulysses_attention,
    "all-gather": jax_flash.all_gather_attention,
}
TOLERANCE = 1e-2  # of the norm of what it should be
_CHECKED_LENGTH = 256  # positions of a device
_SEQUENCE = P(None, "x")


def mesh_of(devices: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:devices]), ("x",))


def with_gradients(name: str, mesh: Mesh, implementation: str | None) -> Callable:
    """A function of a row's inputs, sharded over the mesh: output and gradients."""
    options: dict[str, Any] = {"is_causal": True, "implementation": implementation}
    if mesh.size == 1:
        attend = functools.partial(jax_flash.attention, **options)
    else:
        attend = jax.shard_map(
            functools.partial(METHODS[name], axis_name="x", **options),
            mesh=mesh,
            in_specs=_SEQUENCE,
            out_specs=_SEQUENCE,
        )

    def run(query, key, value, d_out):
        out, vjp = jax.vjp(attend, query, key, value)
        return out, *vjp(d_out)

    return jax.jit(run)


def sharded_inputs(row: Row, mesh: Mesh) -> tuple[jax.Array, ...]:
    """Random inputs of a row's shapes, each part made on its device."""
    shapes = [(x.shape, x.dtype) for x in jax.eval_shape(row.inputs)]
    make = jax.jit(
        lambda: tuple(
            jax.random.normal(jax.random.key(i), shape, dtype)
            for i, (shape, dtype) in enumerate(shapes)
        ),
        out_shardings=NamedSharding(mesh, _SEQUENCE),
    )
    return jax.block_until_ready(make())


def error(name: str, row: Row, mesh: Mesh, implementation: str | None) -> float:
    """The greatest relative error of output and gradients on a short sequence."""
    is_zigzag = "zigzag" in name and mesh.size > 1
    order, back = (
        (lambda x, f=f: f(x, mesh.size) if is_zigzag else x)
        for f in (jax_flash.to_zigzag, jax_flash.from_zigzag)
    )
    inputs = row.inputs()
    put = lambda x: jax.device_put(order(x), NamedSharding(mesh, _SEQUENCE))
    results = with_gradients(name, mesh, implementation)(*map(put, inputs))
    exact = with_gradients(name, mesh_of(1), "xla")(*(x.astype(jnp.float32) for x in inputs))
    errors = [
        np.linalg.norm(np.asarray(back(x), np.float32) - y) / np.linalg.norm(y)
        for x, y in zip(results, map(np.asarray, exact), strict=True)
    ]
    return float(max(errors))


def milliseconds(run: Callable, inputs: tuple, iterations: int) -> float:
    """Median time until the results are there on all devices, after one call to warm up."""
    jax.block_until_ready(run(*inputs))
    times = []
    for _ in range(iterations):
        start = time.perf_counter()
        jax.block_until_ready(run(*inputs))
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def measure(name: str, row: Row, devices: int, options: argparse.Namespace) -> dict[str, Any]:
    """One method on some devices: its error, time and TFLOP/s a device; or how it failed."""
    mesh = mesh_of(devices)
    short = Row(1, _CHECKED_LENGTH * devices, row.heads, row.key_heads, row.width, True)
    result: dict[str, Any] = {"method": name, "row": row.name, "devices": devices}
    try:
        result["error"] = error(name, short, mesh, options.implementation)
        run = with_gradients(name, mesh, options.implementation)
        result["milliseconds"] = milliseconds(run, sharded_inputs(row, mesh), options.iterations)
    except (jax.errors.JaxRuntimeError, ValueError) as failure:
        return result | {"failed": str(failure).splitlines()[0]}
    flops = row.flops("both") / devices
    return result | {"teraflops_a_device": flops / result["milliseconds"] / 1e9}


def longest(name: str, options: argparse.Namespace, devices: int) -> dict[str, Any]:
    """The longest sequence that a method runs, forward + backward, and what the next one met."""
    result: dict[str, Any] = {"method": name, "devices": devices, "length": 0}
    length = options.length
    while "failed" not in result:
        row, mesh = row_of(options, length * devices), mesh_of(devices)
        try:
            run = with_gradients(name, mesh, options.implementation)
            jax.block_until_ready(run(*sharded_inputs(row, mesh)))
        except jax.errors.JaxRuntimeError as failure:
            if "RESOURCE_EXHAUSTED" not in str(failure):
                raise
            result["failed"] = f"{length * devices}: {str(failure).splitlines()[0]}"
        else:
            result["length"] = length * devices
            length *= 2
    return result


def row_of(options: argparse.Namespace, length: int) -> Row:
    return Row(1, length, options.heads, options.key_heads, options.width, True)


def table(results: list[dict[str, Any]]) -> str:
    lines = [["method", "GPUs", "positions", "ms", "TFLOP/s a GPU", "of one GPU", "error"]]
    alone = results[0].get("teraflops_a_device")
    for result in results:
        if "failed" in result:
            figures = [result["failed"], "", "", ""]
        else:
            rate = result["teraflops_a_device"]
            figures = [
                f"{result['milliseconds']:.1f}",
                f"{rate:.0f}",
                f"{rate / alone:.2f}" if alone else "",
                f"{result['error']:.1e}",
            ]
        lines.append([result["method"], str(result["devices"]), result["row"], *figures])
    return attention.markdown(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--length", type=int, default=32768, help="positions of a device")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--key-heads", type=int, default=8)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--devices", type=int, default=len(jax.devices()), help="at most so many")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--implementation", help="as in jax_flash.attention")
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--longest", action="store_true", help="also the longest that fits")
    parser.add_argument("--results", type=pathlib.Path, default=attention.RESULTS)
    options = parser.parse_args(argv)
    names = options.methods.split(",")
    if unknown := {*names} - {*METHODS}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    if not 1 <= options.devices <= len(jax.devices()):
        parser.error(f"--devices: got {options.devices}; there are {len(jax.devices())}")

    counts = [2**i for i in range(1, options.devices.bit_length())]
    todo = [("one GPU", 1), *((name, count) for count in counts for name in names)]
    results = [
        measure(name, row_of(options, options.length * count), count, options)
        for name, count in timing.progress(todo, "distributed")
    ]
    record = attention.provenance() | {"devices": options.devices, "results": results}
    if options.longest:
        record["longest"] = [longest(name, options, options.devices) for name in names]
    path = attention.write(options.results, f"distributed {options.devices}", record)
    print(f"\n{table(results)}")
    for result in record.get("longest", ()):
        print(f"{result['method']}: {result['length']} positions fit; {result['failed']}")
    wrong = [result for result in results if result.get("error", 0) > TOLERANCE]
    for result in wrong:
        print(f"{result['method']} on {result['devices']} is off by {result['error']:.1e}")
    print(f"written: {path}")
    return 1 if wrong or any("failed" in result for result in results) else 0


if __name__ == "__main__":
    raise SystemExit(main())
