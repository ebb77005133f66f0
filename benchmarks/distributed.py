"""One causal sequence over several GPUs, forward + backward: `python -m benchmarks.distributed`.

Weak scaling: every GPU has `--length` positions, so that n of them attend over n times as many. As
work grows with the square, what compares is TFLOP/s a GPU, beside those of one GPU with `--length`
positions. Methods are checked against one GPU that holds the whole sequence, and one GPU, on a
short sequence, against plain attention in float32. With `--longest`, then, the longest sequence
that memory holds by XLA's plan, and a run of what of it `--seconds` allow.
"""

import argparse
import concurrent.futures
import dataclasses
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
_CHECKED_LENGTH = 512  # positions, beside plain attention
_SEQUENCE = P(None, "x")


def mesh_of(devices: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:devices]), ("x",))


def lowered(name: str, row: Row, devices: int, implementation: str | None) -> Any:
    """What gives the output and the gradients of a row's inputs, sharded over devices.

    Args:
      name: one of METHODS, which one device does without.
    """
    options: dict[str, Any] = {"is_causal": True, "implementation": implementation}
    mesh = mesh_of(devices)
    if devices == 1:
        attend = functools.partial(jax_flash.attention, **options)
    else:
        attend = jax.shard_map(
            functools.partial(METHODS[name], axis_name="x", **options),
            mesh=mesh,
            in_specs=_SEQUENCE,
            out_specs=_SEQUENCE,
        )
    sharding = NamedSharding(mesh, _SEQUENCE)
    shapes = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        for x in jax.eval_shape(row.inputs)
    ]
    return jax.jit(functools.partial(with_gradients, attend)).lower(*shapes)


def with_gradients(attend: Callable, query, key, value, d_out):
    out, vjp = jax.vjp(attend, query, key, value)
    return out, *vjp(d_out)


def sharded(x: jax.Array, name: str, devices: int) -> jax.Array:
    """An array in the order that a method takes, sharded over devices."""
    if "zigzag" in name and devices > 1:
        x = jax_flash.to_zigzag(x, devices)
    return jax.device_put(x, NamedSharding(mesh_of(devices), _SEQUENCE))


def error_of_one(row: Row, implementation: str | None) -> float:
    """That of one GPU on a short sequence, beside plain attention in float32."""
    short = dataclasses.replace(row, length=_CHECKED_LENGTH)
    inputs = short.inputs()
    results = lowered("", short, 1, implementation).compile()(*inputs)
    plain = functools.partial(jax_flash.attention, is_causal=True, implementation="xla")
    inputs = tuple(x.astype(jnp.float32) for x in inputs)
    expected = jax.jit(functools.partial(with_gradients, plain))(*inputs)
    return float(attention.relative_error(results, expected))


def milliseconds(run: Callable, inputs: tuple, iterations: int) -> float:
    """Median time until the results are there on all devices, after one call to warm up."""
    jax.block_until_ready(run(*inputs))
    times = []
    for _ in range(iterations):
        start = time.perf_counter()
        jax.block_until_ready(run(*inputs))
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def measure(
    name: str,
    row: Row,
    devices: int,
    run: concurrent.futures.Future,
    whole: concurrent.futures.Future,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """One method on some devices: its error, time and TFLOP/s a device; or how it failed.

    Args:
      run, whole: will give the compiled program, and that of one device.
    """
    result: dict[str, Any] = {"method": name, "row": row.name, "devices": devices}
    try:
        inputs = row.inputs()
        if devices == 1:
            result["error"] = error_of_one(row, options.implementation)
        else:
            expected = tuple(sharded(x, name, devices) for x in whole.result()(*inputs))
            inputs = tuple(sharded(x, name, devices) for x in inputs)
            result["error"] = float(attention.relative_error(run.result()(*inputs), expected))
            del expected
        result["milliseconds"] = milliseconds(run.result(), inputs, options.iterations)
        result["bytes_a_device"] = bytes_of(run.result())
        if options.kernels:
            launched = timing.kernels(timing.Bound(run.result(), inputs), iterations=1)
            result["kernels"] = by_name(launched)
    except (jax.errors.JaxRuntimeError, ValueError) as failure:
        return result | {"failed": str(failure).splitlines()[0]}
    flops = row.flops("both") / devices
    return result | {"teraflops_a_device": flops / result["milliseconds"] / 1e9}


def by_name(kernels: list[tuple[str, float]]) -> dict[str, list[float]]:
    """Milliseconds of each launch on any device by kernel, that with the largest sum first."""
    times: dict[str, list[float]] = {}
    for name, microseconds in kernels:
        times.setdefault(name, []).append(microseconds / 1e3)
    return dict(sorted(times.items(), key=lambda item: -sum(item[1])))


def bytes_of(compiled: jax.stages.Compiled) -> int:
    """Of one device: arguments, results and what XLA plans between them."""
    plan = compiled.memory_analysis()
    if plan is None:
        raise ValueError("this device has no plan of its memory")
    sizes = plan.argument_size_in_bytes, plan.output_size_in_bytes, plan.temp_size_in_bytes
    return sum(sizes) - plan.alias_size_in_bytes


def longest(result: dict[str, Any], options: argparse.Namespace, memory: int) -> dict[str, Any]:
    """The longest sequence in memory, and one that ran, from what `measure` found of a method.

    Args:
      memory: bytes that a device has.
    """
    name, devices = result["method"], result["devices"]
    measured = options.length * devices
    fits, planned = measured, result["bytes_a_device"]
    wanted = int(fits * memory / planned) // measured * measured
    while wanted != fits and wanted >= measured:  # planned memory may grow faster than the length
        fits = wanted
        plan = lowered(name, row_of(options, fits), devices, options.implementation).compile()
        planned = bytes_of(plan)
        if planned > memory:
            wanted = min(fits - measured, int(fits * memory / planned) // measured * measured)
    found = {"method": name, "devices": devices, "fits": fits, "bytes_a_device": planned}
    ran = measured
    while 2 * ran <= fits and result["milliseconds"] * (2 * ran / measured) ** 2 < (
        1e3 * options.seconds
    ):
        ran *= 2
    row = row_of(options, ran)
    run = lowered(name, row, devices, options.implementation).compile()
    inputs = sharded_inputs(row, devices)
    start = time.perf_counter()
    outputs = jax.block_until_ready(run(*inputs))
    seconds = time.perf_counter() - start
    finite = all(bool(jnp.isfinite(x).all()) for x in outputs)
    return found | {"ran": ran, "seconds": seconds, "finite": finite}


def sharded_inputs(row: Row, devices: int) -> tuple[jax.Array, ...]:
    """The inputs of a row, each part made on its device."""
    sharding = NamedSharding(mesh_of(devices), _SEQUENCE)
    return jax.block_until_ready(jax.jit(row.inputs, out_shardings=sharding)())


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


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--length", type=int, default=32768, help="positions of a device")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--key-heads", type=int, default=8)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--devices", type=int, default=len(jax.devices()), help="at most so many")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--implementation", help="as in jax_flash.attention")
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--kernels", action="store_true", help="also the times of kernels (CUPTI)")
    parser.add_argument("--longest", action="store_true", help="also the longest that fits")
    parser.add_argument("--seconds", type=float, default=30, help="that its run may take")
    parser.add_argument("--memory", type=float, help="GB of a device, if not all that JAX has")
    parser.add_argument("--results", type=pathlib.Path, default=attention.RESULTS)
    options = parser.parse_args(argv)
    if options.kernels and not timing.on_gpu():
        parser.error("--kernels needs NVIDIA GPUs")
    options.methods = options.methods.split(",")
    if unknown := {*options.methods} - {*METHODS}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    if not 1 <= options.devices <= len(jax.devices()):
        parser.error(f"--devices: got {options.devices}; there are {len(jax.devices())}")
    if options.longest and not options.memory:
        stats = jax.devices()[0].memory_stats()
        if not stats:
            parser.error("--memory: this device does not say how much it has")
        options.memory = stats["bytes_limit"] / 1e9
    return options


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    counts = [2**i for i in range(1, options.devices.bit_length())]
    todo = [("one GPU", 1), *((name, count) for count in counts for name in options.methods)]
    rows = {count: row_of(options, options.length * count) for count in (1, *counts)}
    with concurrent.futures.ThreadPoolExecutor() as pool:

        def compiled(name: str, row: Row, devices: int) -> concurrent.futures.Future:
            return pool.submit(lowered(name, row, devices, options.implementation).compile)

        whole = {count: compiled("", row, 1) for count, row in rows.items()}
        runs = [
            whole[1] if count == 1 else compiled(name, rows[count], count)
            for name, count in timing.progress(todo, "lower")
        ]
        concurrent.futures.wait([*whole.values(), *runs])
    results = [
        measure(name, rows[count], count, run, whole[count], options)
        for (name, count), run in timing.progress(zip(todo, runs, strict=True), "distributed")
    ]
    record = attention.provenance() | {"devices": options.devices, "results": results}
    title = f"distributed {options.devices}"
    path = attention.write(options.results, title, record)
    print(f"\n{table(results)}", flush=True)
    for result in results:
        for name, times in result.get("kernels", {}).items():
            who = f"{result['method']} on {result['devices']}: {name}"
            each = f"{len(times)} launches of {min(times):.3f} to {max(times):.3f} ms"
            print(f"{who}, {each}, {sum(times):.1f} in all")
    wrong = [result for result in results if result.get("error", 0) > TOLERANCE]
    for result in wrong:
        print(f"{result['method']} on {result['devices']} is off by {result['error']:.1e}")
    if options.longest:
        memory = int(1e9 * options.memory)
        found = [
            longest(result, options, memory)
            for result in results
            if result["devices"] == options.devices and "failed" not in result
        ]
        path = attention.write(options.results, title, record | {"longest": found})
        for result in found:
            print(
                f"{result['method']}: {result['fits']} positions fit in {options.memory:.1f} GB a "
                f"device; {result['ran']} ran in {result['seconds']:.1f} s"
            )
        wrong += [result for result in found if not result["finite"]]
    print(f"written: {path}")
    return 1 if wrong or any("failed" in result for result in results) else 0


if __name__ == "__main__":
    raise SystemExit(main())
