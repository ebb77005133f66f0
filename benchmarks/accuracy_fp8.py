"""What FP8 costs in accuracy: `python -m benchmarks.accuracy_fp8`.

Two tables, of errors against float64. The first is of data with outliers, as section 4.3 of the
FlashAttention-3 paper has them, for each way of quantising. The second is of error against the
number of keys, for values around 0 and around 1, where an accumulator of few bits would lose what
is small beside the sum; "quantised, in float64" has no error but that of quantisation.
"""

import importlib.util
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_flash
from benchmarks import attention, reporting, timing
from jax_flash import Quantized
from jax_flash.quantization import rotate

KEY = jax.random.key(5)
METHODS = ("a scale per tensor", "blocks", "incoherent", "both")
MEANS = (0.0, 1.0)  # of values


def with_outliers(seed: int, shape: tuple[int, ...]) -> jax.Array:
    """N(0, 1) + N(0, 100) * Bernoulli(0.001), in bf16."""
    rng = np.random.default_rng(seed)
    outliers = 10 * rng.standard_normal(shape) * (rng.random(shape) < 0.001)
    return jnp.asarray(rng.standard_normal(shape) + outliers, jnp.bfloat16)


def per_tensor(*arrays: jax.Array) -> list[Quantized]:
    """Quantised with one scale for each whole array."""
    quantized = []
    for x in arrays:
        scale = jnp.abs(x).max().astype(jnp.float32).reshape(1, 1, 1) / 448
        values = jnp.clip(x.astype(jnp.float32) / scale[..., None], -448, 448)
        # Blocks as long as the array.
        block_size = max(1, x.shape[-3])
        quantized.append(Quantized(values.astype(jnp.float8_e4m3fn), scale, block_size))
    return quantized


def quantize(method: str, query, key, value) -> Any:
    """Three Quantized, by one of METHODS."""
    if method == "a scale per tensor":
        return per_tensor(query, key, value)
    if method == "incoherent":
        return per_tensor(rotate(query, KEY), rotate(key, KEY), value)
    rotation = KEY if method == "both" else None
    return jax_flash.quantize_fp8(query, key, value, incoherent_key=rotation)


def in_float64(query, key, value) -> np.ndarray:
    """Full attention of `[1, T, N, H]` arrays in numpy, one head at a time."""
    query, key, value = (np.asarray(x[0]).astype(np.float64) for x in (query, key, value))
    out = np.empty((*query.shape[:2], value.shape[-1]))
    for n in range(query.shape[1]):
        logits = query[:, n] @ key[:, n].T / query.shape[-1] ** 0.5
        weights = np.exp(logits - logits.max(1, keepdims=True))
        out[:, n] = weights @ value[:, n] / weights.sum(1, keepdims=True)
    return out[None]


def rms(x) -> float:
    return float(np.sqrt(np.mean(np.asarray(x).astype(np.float64) ** 2)))


def outlier_errors(
    implementation: str, rows: int, keys: int, heads: int, width: int
) -> dict[str, float]:
    """RMSE of the output by method of quantisation, and of bf16."""
    shapes = (rows, keys, keys)
    inputs = [with_outliers(i, (1, length, heads, width)) for i, length in enumerate(shapes)]
    exact = in_float64(*inputs)
    errors = {"bf16": rms(jax_flash.attention(*inputs, implementation="xla") - exact)}
    for method in METHODS:
        out = jax_flash.attention(*quantize(method, *inputs), implementation=implementation)
        errors[method] = rms(out - exact)
    return errors


def length_errors(
    names: list[str], rows: int, keys: int, heads: int, width: int, mean: float
) -> dict[str, float]:
    """Error of the output over its size, rms, of candidates of benchmarks.attention."""
    draws = jax.random.split(jax.random.key(keys), 3)
    shapes = (rows, keys, keys)
    query, key, value = (
        jax.random.normal(draw, (1, length, heads, width))  # in bf16 it has 128 values
        for draw, length in zip(draws, shapes, strict=True)
    )
    query, key, value = (x.astype(jnp.bfloat16) for x in (query, key, value + mean))
    exact = in_float64(query, key, value)
    arrays = jax_flash.quantize_fp8(query, key, value)
    quantized = in_float64(*(x.dequantize(jnp.float32) for x in arrays))
    errors = {"quantised, in float64": rms(quantized - exact) / rms(exact)}
    for name in names:
        candidate = attention.CANDIDATES[name]
        if isinstance(candidate, attention.FP8):
            result = candidate.attend(*candidate.quantize(query, key, value), causal=False)
            out = candidate.result(result)
        else:
            out = candidate(query, key, value, causal=False)
        errors[name] = rms(np.asarray(out).astype(np.float64) - exact) / rms(exact)
        if name.startswith("jax_flash fp8"):
            own = rms(np.asarray(out).astype(np.float64) - quantized) / rms(exact)
            errors[f"{name} beside it"] = own
    return errors


def plot(record: dict[str, Any], path: pathlib.Path) -> None:
    """Error against the number of keys, a panel for each mean of the values."""
    results = record["lengths"]
    panels = {}
    for mean in dict.fromkeys(result["mean"] for result in results):
        of_mean = [result["errors"] for result in results if result["mean"] == mean]
        panels[f"values around {mean:g}"] = {
            name: [errors[name] for errors in of_mean] for name in of_mean[0]
        }
    keys = list(dict.fromkeys(result["keys"] for result in results))
    title = "FP8: error of the output, lower is better; dashed, beside quantised in float64"
    title += f"\n{reporting.where(record)}"
    reporting.curves(panels, keys, ("keys", "relative error, rms"), title, path)


def main(argv: list[str] | None = None) -> int:
    gpu = timing.on_gpu()
    names = (
        ["jax_flash fp8", "jax_flash fp8 promoting", "cuDNN fp8", "jax_flash"]
        if gpu
        else ["jax_flash fp8 xla", "jax_flash xla"]
    )
    chosen = "mosaic_gpu" if gpu else "xla"
    parser = reporting.parser(__doc__)
    parser.add_argument("--candidates", default=",".join(names), help="of the second table")
    parser.add_argument("--implementation", default=chosen, help="of the first table")
    parser.add_argument("--rows", type=int, default=1024 if gpu else 128, help="queries")
    parser.add_argument("--heads", type=int, default=8 if gpu else 2, help="N = K")
    parser.add_argument("--width", type=int, default=128, help="H = h")
    parser.add_argument("--keys", type=int, default=16384 if gpu else 4096, help="with outliers")
    parser.add_argument(
        "--longest", type=int, default=2**18 if gpu else 4096, help="most keys, without"
    )
    reporting.add_results(parser)
    options = parser.parse_args(argv)
    names = options.candidates.split(",")
    if unknown := {*names} - {*attention.CANDIDATES}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")

    of_outliers = outlier_errors(
        options.implementation, options.rows, options.keys, options.heads, options.width
    )
    lengths = [2**i for i in range(10, 64, 2) if 2**i <= options.longest]
    cases = [(keys, mean) for mean in MEANS for keys in lengths]
    results: list[dict[str, Any]] = []
    for keys, mean in timing.progress(cases, "accuracy"):
        # Fewer rows and heads than above, as float64 takes its time.
        errors = length_errors(names, min(options.rows, 128), keys, 2, options.width, mean)
        results.append({"keys": keys, "mean": mean, "errors": errors})

    record = reporting.provenance() | {
        "implementation": options.implementation,
        "outliers": {
            "rows": options.rows,
            "keys": options.keys,
            "heads": options.heads,
            "width": options.width,
            "rmse": of_outliers,
        },
        "lengths": results,
    }
    path = reporting.write(options.results, "accuracy fp8", record)
    whole = of_outliers["a scale per tensor"]
    print(f"\n{reporting.where(record)}")
    header = ["RMSE with outliers", options.implementation, "a scale per tensor over it"]
    cells = [
        [name, reporting.figure(x, ".2e"), reporting.figure(whole / x, ".2f")]
        for name, x in of_outliers.items()
    ]
    print(reporting.markdown([header, *cells]))
    lines = [["keys", "mean of values", *results[0]["errors"]]]
    for result in results:
        figures = (reporting.figure(x, ".2e") for x in result["errors"].values())
        lines.append([f"{result['keys']}", f"{result['mean']:g}", *figures])
    print(f"\nrelative error, rms\n{reporting.markdown(lines)}\n\nwritten: {path}")
    if importlib.util.find_spec("matplotlib"):
        plot(record, path.with_suffix(".png"))
        print(f"plotted: {path.with_suffix('.png')}")
    # Hopper's sums of FP8 products lose values with a mean.
    losing = {"jax_flash fp8", "cuDNN fp8"}
    judged = (r["errors"][x] for r in results for x in names if r["mean"] == 0 or x not in losing)
    return 0 if all(error <= attention.FP8_TOLERANCE for error in judged) else 1


if __name__ == "__main__":
    raise SystemExit(main())
