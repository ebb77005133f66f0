"""One causal sequence over several GPUs, forward + backward: `python -m benchmarks.distributed`.

Weak scaling: every GPU has `--length` positions, so that n of them attend over n times as many. As
work grows with the square, what compares is TFLOP/s a GPU, beside those of one GPU with `--length`
positions under the same mask. Methods are checked against one GPU that holds the whole sequence,
and one GPU, on a short sequence, against plain attention in float32. With `--longest`, then, the
longest causal sequence that memory holds by XLA's plan, and a run of what of it `--seconds` allow,
whose last positions are checked against float32.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import math
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_flash
from benchmarks import attention, reporting, timing
from benchmarks.attention import Row

METHODS: dict[str, Callable] = {
    "ring zigzag": functools.partial(jax_flash.ring_attention, zigzag=True),
    "ring": jax_flash.ring_attention,
    "ulysses": jax_flash.ulysses_attention,
    "all-gather": jax_flash.all_gather_attention,
}
MASKS = ("causal", "window", "documents")  # the latter two are causal too
TOLERANCE = 1e-2  # of the norm of what it should be
_CHECKED_LENGTH = 512  # positions, beside plain attention
_LAST = 16  # positions of the longest sequence that are checked
_SEQUENCE = P(None, "x")


def mesh_of(devices: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:devices]), ("x",))


def lowered(name: str, row: Row, devices: int, implementation: str | None) -> Any:
    """What gives the output and the gradients of `inputs_of(row)`, sharded over devices.

    Args:
      name: one of METHODS, which one device does without.
    """
    options: dict[str, Any] = {"is_causal": True, "implementation": implementation}
    if row.window is not None:
        options["local_window_size"] = (row.window, 0)
    method: Callable = jax_flash.attention
    if devices > 1:
        method = functools.partial(METHODS[name], axis_name="x")

    def attend(query, key, value, ids=None):
        both = {"query_segment_ids": ids, "key_value_segment_ids": ids}
        return method(query, key, value, **both, **options)

    mesh = mesh_of(devices)
    if devices > 1:
        attend = jax.shard_map(attend, mesh=mesh, in_specs=_SEQUENCE, out_specs=_SEQUENCE)
    sharding = NamedSharding(mesh, _SEQUENCE)
    shapes = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        for x in jax.eval_shape(functools.partial(inputs_of, row))
    ]
    return jax.jit(functools.partial(with_gradients, attend)).lower(*shapes)


def implementations(program: jax.stages.Lowered) -> str:
    """What computes attention in a program, in all hops of a ring."""
    text = program.as_text()
    calls = {"mosaic_gpu": "@mosaic_gpu", "cudnn": "@__cudnn$"}
    return ", ".join(name for name, call in calls.items() if call in text) or "xla"


def inputs_of(row: Row) -> tuple[jax.Array, ...]:
    """Those of `Row.inputs`, and the document of each position where there are some."""
    documents = row.document_lengths
    return row.inputs() + (() if documents is None else (attention.segment_ids(documents),))


def with_gradients(attend: Callable, query, key, value, d_out, *ids):
    out, vjp = jax.vjp(lambda *operands: attend(*operands, *ids), query, key, value)
    return out, *vjp(d_out)


def sharded(x: jax.Array, name: str, devices: int) -> jax.Array:
    """An array in the order that a method takes, sharded over devices."""
    if "zigzag" in name and devices > 1:
        x = jax_flash.to_zigzag(x, devices)
    return jax.device_put(x, NamedSharding(mesh_of(devices), _SEQUENCE))


def error_of_one(row: Row, implementation: str | None) -> float:
    """That of one GPU on a short sequence, beside plain attention in float32."""
    window = None if row.window is None else min(row.window, _CHECKED_LENGTH // 4)
    short = dataclasses.replace(row, length=_CHECKED_LENGTH, window=window)
    inputs = inputs_of(short)
    results = lowered("", short, 1, implementation).compile()(*inputs)
    inputs = tuple(x.astype(jnp.float32) for x in inputs[:4]) + inputs[4:]
    plain = attention.jax_flash_with("xla")
    attend = functools.partial(plain, **short.mask)
    expected = jax.jit(functools.partial(with_gradients, attend))(*inputs[:4])
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
    ran: str,
    run: concurrent.futures.Future,
    whole: concurrent.futures.Future,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """One method on some devices: its error, time and TFLOP/s a device; or how it failed.

    Args:
      ran: the implementations that it runs.
      run, whole: will give the compiled program, and that of one device.
    """
    result: dict[str, Any] = {"method": name, "row": row.name, "devices": devices, "ran": ran}
    try:
        inputs = inputs_of(row)
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
        if options.profile:
            result["profile"] = [
                exposed(events) for events in events_of_devices(run.result(), inputs)
            ]
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


def events_of_devices(run: Callable, inputs: tuple) -> list[list[tuple[str, float, float]]]:
    """What one call runs on each GPU: names, and milliseconds of beginnings and ends."""
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory):
            jax.block_until_ready(run(*inputs))
        (path,) = pathlib.Path(directory).rglob("*.xplane.pb")
        planes = jax.profiler.ProfileData.from_file(str(path)).planes
        return [
            [
                (event.name, event.start_ns / 1e6, (event.start_ns + event.duration_ns) / 1e6)
                for line in plane.lines
                if line.name.startswith("Stream")
                for event in line.events
            ]
            for plane in planes
            if plane.name.startswith("/device:GPU")
        ]


def exposed(events: list[tuple[str, float, float]]) -> dict[str, Any]:
    """Which transfers of one GPU no kernel hides.

    Returns:
      Milliseconds of the whole call and of its kernels, and for each transfer its name, when it
      begins, how long it takes, and for how much of that no kernel runs.
    """
    events = sorted(events, key=lambda event: event[1])
    kernels: list[list[float]] = []  # intervals without overlap
    for _, start, end in (event for event in events if not _is_transfer(event[0])):
        if kernels and start <= kernels[-1][1]:
            kernels[-1][1] = max(end, kernels[-1][1])
        else:
            kernels.append([start, end])
    begin = events[0][1] if events else 0.0

    def hidden(start: float, end: float) -> float:
        return sum(max(0.0, min(end, last) - max(start, first)) for first, last in kernels)

    return {
        "milliseconds": max((end for _, _, end in events), default=0.0) - begin,
        "of_kernels": sum(end - start for start, end in kernels),
        "transfers": [
            (name, start - begin, end - start, end - start - hidden(start, end))
            for name, start, end in events
            if _is_transfer(name)
        ],
    }


def _is_transfer(name: str) -> bool:
    return any(part in name.lower() for part in ("nccl", "memcpy"))


def profile_lines(result: dict[str, Any]) -> list[str]:
    """What `exposed` found for each GPU of a result, the longest that is not hidden by itself."""
    lines = []
    for i, found in enumerate(result.get("profile", [])):
        transfers = found["transfers"]
        line = (
            f"{result['method']}, {result['row']}, GPU {i} of {result['devices']}: "
            f"{found['milliseconds']:.1f} ms, kernels {found['of_kernels']:.1f}, {len(transfers)} "
            f"transfers {sum(x[2] for x in transfers):.1f}, not hidden "
            f"{sum(x[3] for x in transfers):.1f}"
        )
        if transfers:
            name, start, length, alone = max(transfers, key=lambda x: x[3])
            line += f", most of {name} at {start:.1f}: {alone:.1f} of {length:.1f}"
        lines.append(line)
    return lines


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

    @functools.lru_cache(1)
    def compiled(length: int) -> jax.stages.Compiled:
        row = row_of(options, "causal", length)
        return lowered(name, row, devices, options.implementation).compile()

    measured = options.length * devices
    plan = lambda length: bytes_of(compiled(length))
    fits, planned = fitting(plan, measured, result["bytes_a_device"], memory)
    found = {"method": name, "devices": devices, "fits": fits, "bytes_a_device": planned}
    ran = min(fits, measured * times_as_long(result["milliseconds"], options.seconds))
    run = compiled(ran)
    inputs = sharded_inputs(row_of(options, "causal", ran), devices)
    start = time.perf_counter()
    outputs = jax.block_until_ready(run(*inputs))
    seconds = time.perf_counter() - start
    finite = all(bool(jnp.isfinite(x).all()) for x in outputs)
    error = error_of_last(inputs, outputs, "zigzag" in name)
    return found | {"ran": ran, "seconds": seconds, "finite": finite, "error": error}


def fitting(plan: Callable[[int], int], unit: int, planned: int, memory: int) -> tuple[int, int]:
    """The longest multiple of a length whose planned bytes memory has, and these.

    Args:
      plan: of a length, which need not be proportional to it.
      unit: the length.
      planned: bytes for `unit`, which has a place in memory.
      memory: bytes.
    """
    fits, too_long, estimate = unit, math.inf, unit * memory / planned
    while too_long - fits > unit:
        length = int(min(max(estimate, fits + unit), too_long - unit)) // unit * unit
        needed = plan(length)
        if needed > memory:
            too_long = length
        else:
            fits, planned = length, needed
        estimate = length * memory / needed
    return fits, planned


def times_as_long(milliseconds: float, seconds: float) -> int:
    """A causal sequence that takes so many seconds, beside one that took so many milliseconds."""
    return max(1, math.isqrt(int(1e3 * seconds / milliseconds)))


def error_of_last(inputs: tuple, outputs: tuple, zigzag: bool) -> float:
    """That of the last positions under a causal mask, for one key head, beside float32.

    They see all keys, and nothing else sees them.

    Args:
      inputs: query, key, value and d_out of one sequence, sharded over devices.
      outputs: the output, and the gradients of query, key and value.
      zigzag: the last positions are the first device's.
    """
    heads = inputs[0].shape[2] // inputs[1].shape[2]
    owner = 0 if zigzag else -1

    def last(x, heads: int) -> jax.Array:
        return jnp.asarray(jax.device_get(_shards(x)[owner][0, -_LAST:, :heads]), jnp.float32)

    query, d_out = last(inputs[0], heads), last(inputs[3], heads)
    key, value = (_shards(x) for x in inputs[1:3])
    parts = []
    for i in range(len(key)):
        of_rows = jax.device_put((query, d_out), key[i].device)
        is_last = i == owner % len(key)
        parts.append(
            jax.device_get(_over_keys(*of_rows, key[i][0, :, 0], value[i][0, :, 0], is_last))
        )
    lse, *means = (jnp.stack(x) for x in zip(*parts, strict=True))
    expected = _of_last(query, d_out, *(last(x, 1)[:, 0] for x in inputs[1:3]), lse, *means)
    actual = [last(x, n) for x, n in zip(outputs, (heads, heads, 1, 1), strict=True)]
    return float(attention.relative_error(actual, expected))


def _shards(x: jax.Array) -> list[jax.Array]:
    """What each device has of an array that is sharded along positions, in their order."""
    return [s.data for s in sorted(x.addressable_shards, key=lambda s: s.index[1].start or 0)]


@functools.partial(jax.jit, static_argnames="is_last")
@jax.default_matmul_precision("highest")
def _over_keys(query, d_out, key, value, is_last: bool):
    """Of rows `[T, N, H]` over keys `[S, H]`, of which the last T are their own if `is_last`.

    Returns:
      LSE, and means by weight: of values, of dP * K, of keys.
    """
    key, value = key.astype(jnp.float32), value.astype(jnp.float32)
    logits = _scaled_logits(query, key)
    if is_last:
        seen = jnp.tri(query.shape[0], key.shape[0], key.shape[0] - query.shape[0], bool)
        logits = jnp.where(seen[:, None], logits, -jnp.inf)
    weights = jax.nn.softmax(logits)
    d_weights = jnp.einsum("tnh,sh->tns", d_out, value)
    mean = functools.partial(jnp.einsum, "tns,sh->tnh")
    return (
        jax.nn.logsumexp(logits, axis=-1),
        mean(weights, value),
        mean(weights * d_weights, key),
        mean(weights, key),
    )


@jax.jit
@jax.default_matmul_precision("highest")
def _of_last(query, d_out, key, value, lses, outs, of_d_weights, keys):
    """Output and gradients of the last positions, from what `_over_keys` gives for all keys.

    Args:
      key, value: of the last positions, `[T, H]`.
    """
    lse = jax.nn.logsumexp(lses, axis=0)
    shares = jnp.exp(lses - lse)[..., None]
    out, of_d_weight, mean_key = ((shares * x).sum(axis=0) for x in (outs, of_d_weights, keys))
    scale = query.shape[-1] ** -0.5
    delta = (d_out * out).sum(axis=-1, keepdims=True)
    d_query = scale * (of_d_weight - delta * mean_key)
    seen = jnp.tri(query.shape[0], dtype=bool)[:, None]
    weights = jnp.where(seen, jnp.exp(_scaled_logits(query, key) - lse[..., None]), 0)
    d_logits = weights * (jnp.einsum("tnh,sh->tns", d_out, value) - delta)
    d_key = scale * jnp.einsum("tns,tnh->sh", d_logits, query)
    d_value = jnp.einsum("tns,tnh->sh", weights, d_out)
    return out, d_query, d_key[:, None], d_value[:, None]


def _scaled_logits(query, key):
    return query.shape[-1] ** -0.5 * jnp.einsum("tnh,sh->tns", query, key)


def sharded_inputs(row: Row, devices: int) -> tuple[jax.Array, ...]:
    """The inputs of a row, each part made on its device."""
    sharding = NamedSharding(mesh_of(devices), _SEQUENCE)
    return jax.block_until_ready(jax.jit(row.inputs, out_shardings=sharding)())


def row_of(options: argparse.Namespace, mask: str, length: int) -> Row:
    """That of a mask; with documents every device has as many, whatever the length."""
    more: dict[str, Any] = {}
    if mask == "window":
        more["window"] = options.window
    if mask == "documents":
        more["documents"] = options.documents * (length // options.length)
    return Row(1, length, options.heads, options.key_heads, options.width, True, **more)


def table(results: list[dict[str, Any]]) -> str:
    lines = [["method", "devices", "positions", "ran", "ms", "TFLOP/s each", "of one", "error"]]
    alone = None
    for result in results:
        if result["devices"] == 1:
            alone = result.get("teraflops_a_device")
        if "failed" in result:
            figures = [result["failed"], "", "", ""]
        else:
            rate = result["teraflops_a_device"]
            figures = [
                f"{result['milliseconds']:.1f}",
                f"{rate:.0f}",
                reporting.figure(rate / alone if alone else None, ".2f"),
                reporting.figure(result["error"], ".1e"),
            ]
        names = [result["method"], str(result["devices"]), result["row"], result["ran"]]
        lines.append([*names, *figures])
    return reporting.markdown(lines)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = reporting.parser(__doc__)
    length, heads, key_heads, width = (32768, 32, 8, 128) if timing.on_gpu() else (256, 8, 8, 64)
    parser.add_argument("--length", type=int, default=length, help="positions of a device")
    parser.add_argument("--heads", type=int, default=heads, help="N")
    parser.add_argument("--key-heads", type=int, default=key_heads, help="K")
    parser.add_argument("--width", type=int, default=width, help="H = h")
    powers = [2**i for i in range(len(jax.devices()).bit_length())]
    parser.add_argument("--devices", default=",".join(map(str, powers)), help="beside one")
    parser.add_argument("--methods", default=",".join(METHODS), help="separated by commas")
    parser.add_argument("--masks", default="causal", help=f"of {','.join(MASKS)}")
    parser.add_argument("--window", type=int, default=4096, help="keys before its own")
    parser.add_argument("--documents", type=int, default=8, help="packed, of a device")
    parser.add_argument("--implementation", help="default: the fastest here")
    parser.add_argument("--iterations", type=int, default=10, help="calls of each")
    parser.add_argument("--kernels", action="store_true", help="also the times of kernels (CUPTI)")
    parser.add_argument(
        "--profile", action="store_true", help="also which transfers no kernel hides"
    )
    parser.add_argument(
        "--longest", const="", nargs="?", help="also the longest that fits, of these methods or all"
    )
    parser.add_argument("--seconds", type=float, default=30, help="that its run may take")
    parser.add_argument("--memory", type=float, help="GB of a device, if not all that JAX has")
    reporting.add_results(parser)
    options = parser.parse_args(argv)
    for name in ("kernels", "profile"):
        if getattr(options, name) and not timing.on_gpu():
            parser.error(f"--{name} needs NVIDIA GPUs")
    options.methods = options.methods.split(",")
    options.masks = options.masks.split(",")
    if unknown := {*options.methods} - {*METHODS} | {*options.masks} - {*MASKS}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    counts = options.devices.split(",")
    if not all(count.isdecimal() and 1 <= int(count) <= len(jax.devices()) for count in counts):
        parser.error(f"--devices: got {options.devices}; there are {len(jax.devices())}")
    options.devices = sorted({1, *map(int, counts)})
    if options.longest is not None:
        options.longest = options.longest.split(",") if options.longest else options.methods
        if missing := {*options.longest} - {*options.methods}:
            parser.error(f"--longest: not in --methods: {', '.join(sorted(missing))}")
        if "causal" not in options.masks:
            parser.error("--longest: needs the mask causal")
    if options.longest and not options.memory:
        stats = jax.devices()[0].memory_stats()
        if not stats:
            parser.error("--memory: this device does not say how much it has")
        options.memory = stats["bytes_limit"] / 1e9
    return options


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    counts = options.devices
    rows = {
        (mask, count): row_of(options, mask, options.length * count)
        for mask in options.masks
        for count in counts
    }
    todo = [
        (name, mask, count)
        for mask, count in rows
        for name in (["one GPU"] if count == 1 else options.methods)
    ]
    with concurrent.futures.ThreadPoolExecutor() as pool:

        def compiled(name: str, row: Row, devices: int) -> tuple[str, concurrent.futures.Future]:
            program = lowered(name, row, devices, options.implementation)
            return implementations(program), pool.submit(program.compile)

        whole = {key: compiled("", row, 1) for key, row in rows.items()}
        runs = [
            whole[mask, 1] if count == 1 else compiled(name, rows[mask, count], count)
            for name, mask, count in timing.progress(todo, "lower")
        ]
        concurrent.futures.wait([run for _, run in [*whole.values(), *runs]])
    title = f"distributed {counts[-1]}"
    if options.masks != ["causal"]:
        title += f" {' '.join(options.masks)}"
    results: list[dict[str, Any]] = []
    compiled_todo = zip(todo, runs, strict=True)
    for (name, mask, count), (ran, run) in timing.progress(compiled_todo, "distributed"):
        of_one = whole[mask, count][1]
        results.append(measure(name, rows[mask, count], count, ran, run, of_one, options))
        record = reporting.provenance() | {"devices": counts[-1], "results": results}
        # After each, so that a run that is cut short leaves what it found.
        path = reporting.write(options.results, title, record)
    print(
        f"\n{reporting.where(record)}; errors of one device are beside float32, of several beside"
    )
    print(f"one device\n{table(results)}", flush=True)
    for result in results:
        for name, times in result.get("kernels", {}).items():
            who = f"{result['method']} on {result['devices']}: {name}"
            each = f"{len(times)} launches of {min(times):.3f} to {max(times):.3f} ms"
            print(f"{who}, {each}, {sum(times):.1f} in all")
        print("\n".join(profile_lines(result)), end="\n" * ("profile" in result))
    wrong = [result for result in results if not result.get("error", 0) <= TOLERANCE]
    for result in wrong:
        print(f"{result['method']} on {result['devices']} is off by {result['error']:.1e}")
    if options.longest:
        memory = int(1e9 * options.memory)
        found = [
            longest(result, options, memory)
            for (name, mask, count), result in zip(todo, results, strict=True)
            if (mask, count) == ("causal", counts[-1])
            and name in options.longest
            and "failed" not in result
        ]
        path = reporting.write(options.results, title, record | {"longest": found})
        for result in found:
            print(
                f"{result['method']}: {result['fits']} positions fit in {options.memory:.1f} GB a "
                f"device; {result['ran']} ran in {result['seconds']:.1f} s, off by "
                f"{result['error']:.1e}"
            )
        wrong += [
            result for result in found if not (result["finite"] and result["error"] <= TOLERANCE)
        ]
    print(f"written: {path}")
    return 1 if wrong or any("failed" in result for result in results) else 0


if __name__ == "__main__":
    raise SystemExit(main())
