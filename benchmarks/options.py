"""What each option of `jax_flash.attention` costs: `python -m benchmarks.options`.

Every option is checked against xla in float32, then timed in turns with the plain call of the same
shape, and with cuDNN where jax.nn has the option, or with xla for dropout beside another. The cost
is the time over that of the plain call.
"""

import concurrent.futures
import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jax_flash
from benchmarks import attention, reporting, timing
from benchmarks.attention import Row

ROWS = [Row(4, 4096, 16, 16, 128, True), Row(4, 4096, 32, 32, 64, True)]
SMALL_ROWS = [Row(2, 256, 4, 2, 64, True)]
PASSES = ("forward", "both")
PLAIN = "plain"
# Of the options, those that jax.nn gives to cuDNN.
CUDNN_OPTIONS = ("mask", "bias")


@dataclasses.dataclass(frozen=True)
class Option:
    """One way to call attention.

    Attributes:
      arrays: of a row and a key, arguments of `jax_flash.attention` that are arrays; `segment_ids`
        stands for those of queries and keys, if they are one array.
      static: its other arguments.
      gradients: names of those of `arrays` whose gradient is taken too.
    """

    arrays: Callable[[Row, jax.Array], dict[str, jax.Array]] = lambda row, key: {}
    static: dict[str, Any] = dataclasses.field(default_factory=dict)
    gradients: tuple[str, ...] = ()


def _sinks(row: Row, key: jax.Array) -> dict[str, jax.Array]:
    return {"sinks": jax.random.normal(key, (row.heads,))}


def _lengths(row: Row, key: jax.Array) -> dict[str, jax.Array]:
    return {"key_value_seq_lengths": jnp.full((row.batch,), row.length, jnp.int32)}


def _one_document(*names: str) -> Callable[[Row, jax.Array], dict]:
    def arrays(row: Row, key: jax.Array) -> dict[str, jax.Array]:
        return {name: jnp.zeros((row.batch, row.length), jnp.int32) for name in names}

    return arrays


def _mask(shape: Callable[[Row], tuple[int, ...]]) -> Callable[[Row, jax.Array], dict]:
    def arrays(row: Row, key: jax.Array) -> dict[str, jax.Array]:
        # Every row sees the first key: on a row that sees none, peers differ.
        return {"mask": jax.random.bernoulli(key, 0.9, shape(row)).at[..., 0].set(True)}

    return arrays


def _bias(shape: Callable[[Row], tuple[int, ...]]) -> Callable[[Row, jax.Array], dict]:
    def arrays(row: Row, key: jax.Array) -> dict[str, jax.Array]:
        return {"bias": jax.random.normal(key, shape(row), jnp.bfloat16)}

    return arrays


_of_keys = lambda row: (row.batch, 1, 1, row.length)
_of_heads_and_keys = lambda row: (1, row.heads, 1, row.length)
_of_batch_and_rows = lambda row: (row.batch, 1, row.length, row.length)
_of_heads_and_rows = lambda row: (1, row.heads, row.length, row.length)

_DROPOUT: dict[str, Any] = {"dropout_rate": 0.1, "dropout_key": 0}
OPTIONS = {
    PLAIN: Option(),
    "sinks": Option(_sinks, gradients=("sinks",)),
    "soft cap": Option(static={"logits_soft_cap": 30.0}),
    "dropout 0.1": Option(static=_DROPOUT),
    "lengths of all keys": Option(_lengths),
    "one document": Option(_one_document("segment_ids")),
    "one document, ids of two arrays": Option(
        _one_document("query_segment_ids", "key_value_segment_ids")
    ),
    "mask [B, 1, 1, S]": Option(_mask(_of_keys)),
    "mask [B, 1, T, S]": Option(_mask(_of_batch_and_rows)),
    "bias [1, N, 1, S]": Option(_bias(_of_heads_and_keys)),
    "bias [1, N, T, S]": Option(_bias(_of_heads_and_rows)),
    "bias [1, N, 1, S], its gradient": Option(_bias(_of_heads_and_keys), gradients=("bias",)),
    "bias [1, N, T, S], its gradient": Option(_bias(_of_heads_and_rows), gradients=("bias",)),
    "dropout 0.1, mask [B, 1, 1, S]": Option(_mask(_of_keys), _DROPOUT),
    "dropout 0.1, bias [1, N, T, S]": Option(_bias(_of_heads_and_rows), _DROPOUT),
    "dropout 0.1, soft cap": Option(static=_DROPOUT | {"logits_soft_cap": 30.0}),
}


def attend(implementation: str, option: Option, arrays: dict, row: Row, query, key, value):
    """Attention with an option, by jax.nn if the implementation is cudnn, else by jax_flash."""
    peer = implementation == "cudnn"
    function: Callable = jax.nn.dot_product_attention if peer else jax_flash.attention
    more = arrays | option.static
    if "dropout_key" in more:
        more["dropout_key"] = jax.random.key(more["dropout_key"])
    if "segment_ids" in more:
        ids = more.pop("segment_ids")
        more |= {"query_segment_ids": ids, "key_value_segment_ids": ids}
    return function(query, key, value, is_causal=row.causal, implementation=implementation, **more)


def programs(implementation: str, option: Option, row: Row) -> dict[str, Callable]:
    """For each of the passes, a function of `(query, key, value, dout), arrays`."""

    def forward(inputs, arrays):
        return (attend(implementation, option, arrays, row, *inputs[:3]),)

    def both(inputs, arrays):
        *inputs, dout = inputs
        wanted = {name: arrays[name] for name in option.gradients}

        def function(query, key, value, wanted):
            return attend(implementation, option, arrays | wanted, row, query, key, value)

        out, vjp = jax.vjp(function, *inputs, wanted)
        *gradients, of_arrays = vjp(dout)
        return (out, *gradients, *of_arrays.values())

    return {"forward": forward, "both": both}


@functools.partial(jax.jit, static_argnums=(0, 1), compiler_options={"xla_gpu_autotune_level": 0})
def expected(name: str, row: Row, inputs: tuple, arrays: dict) -> tuple:
    """The output and gradients of an option by xla, in float32, batch entry by batch entry."""
    inputs, arrays = jax.tree.map(
        lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x,
        (inputs, arrays),
    )
    with jax.default_matmul_precision("highest"):
        return programs("xla", OPTIONS[name], row)["both"](inputs, arrays)


def candidates(name: str, implementation: str) -> list[str]:
    """The implementations that an option is timed with."""
    peers = ["cudnn"] if name.startswith((PLAIN, *CUDNN_OPTIONS)) else []
    if name.startswith("dropout 0.1,"):  # what else has dropout beside these
        peers = ["xla"]
    return [implementation, *(peers if timing.on_gpu() else [])]


def measure(row: Row, names: list[str], implementation: str, rounds: int) -> list[dict]:
    """Checks and times options of one row: for each and each of the passes, a result."""
    inputs = row.inputs()
    arrays = {
        name: OPTIONS[name].arrays(row, jax.random.key(n + 1)) for n, name in enumerate(names)
    }
    with concurrent.futures.ThreadPoolExecutor() as pool:
        compiled = {
            (name, candidate, kind): pool.submit(
                lambda function, name: jax.jit(function).lower(inputs, arrays[name]).compile(),
                function,
                name,
            )
            for name in names
            for candidate in candidates(name, implementation)
            for kind, function in programs(candidate, OPTIONS[name], row).items()
        }
        concurrent.futures.wait(compiled.values())
    results: list[dict[str, Any]] = []
    bound: dict[str, dict[str, timing.Bound]] = {kind: {} for kind in PASSES}
    for name in names:
        right = expected(name, row, inputs, arrays[name])
        for candidate, kind in itertools.product(candidates(name, implementation), PASSES):
            result: dict[str, Any] = {"row": row.name, "option": name}
            result |= {"candidate": candidate, "passes": kind}
            results.append(result)
            try:
                program = timing.Bound(
                    compiled[name, candidate, kind].result(), (inputs, arrays[name])
                )
                outputs = jax.block_until_ready(program())
            except Exception as e:  # a peer may not do this option: say so, go on with the others
                result["failed"] = timing.reason(e)
                continue
            error = float(attention.relative_error(outputs, right[: len(outputs)]))
            result["error"] = error
            if error <= attention.TOLERANCE:
                bound[kind][_label(name, candidate)] = program
    for kind, of_pass in bound.items():
        times = timing.interleaved(of_pass, (), rounds, 5)
        for result in results:
            time = times.get(_label(result["option"], result["candidate"]))
            if result["passes"] == kind and time:
                result["milliseconds"] = dataclasses.asdict(time)
                if plain := times.get(_label(PLAIN, result["candidate"])):
                    result["over_plain"] = time.mean / plain.mean
    return results


def _label(name: str, candidate: str) -> str:
    return f"{name}, {candidate}"


def table(results: list[dict], passes: str) -> str:
    """Milliseconds of every option, over those of the plain call in brackets."""
    names = list(dict.fromkeys(result["candidate"] for result in results))
    lines = [["shape", "option", *names]]
    cells: dict[tuple, dict[str, str]] = {}
    for result in results:
        if result["passes"] == passes:
            cell = "-"
            if "milliseconds" in result:
                cell = f"{result['milliseconds']['mean']:.3g}"
                if "over_plain" in result:
                    cell += f" ({result['over_plain']:.2f})"
            of_row = cells.setdefault((result["row"], result["option"]), {})
            of_row[result["candidate"]] = cell
    lines += [[*index, *(of_row.get(n, "-") for n in names)] for index, of_row in cells.items()]
    return reporting.markdown(lines)


def problems(results: list[dict]) -> list[str]:
    """What failed or is wrong."""
    found = []
    for result in results:
        where = "{row}, {option}, {passes}: {candidate}".format(**result)
        if "failed" in result:
            found.append(f"{where} failed: {result['failed']}")
        elif not result["error"] <= attention.TOLERANCE:  # NaN too
            found.append(f"{where} is off by {result['error']:.1e}")
    return found


def main(argv: list[str] | None = None) -> int:
    gpu = timing.on_gpu()
    chosen = "mosaic_gpu" if gpu else "xla"
    parser = reporting.parser(__doc__)
    parser.add_argument("--implementation", default=chosen, help="of ours")
    parser.add_argument("--options", default=",,".join(OPTIONS), help="separated by two commas")
    parser.add_argument("--rounds", type=int, default=timing.ROUNDS, help="turns of each")
    reporting.add_results(parser)
    arguments = parser.parse_args(argv)
    names = arguments.options.split(",,")
    if unknown := {*names} - {*OPTIONS}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    names = list(dict.fromkeys([PLAIN, *names]))

    results: list[dict] = []
    for row in timing.progress(ROWS if gpu else SMALL_ROWS, "options"):
        results += measure(row, names, arguments.implementation, arguments.rounds)
    record = reporting.provenance() | {"results": results}
    path = reporting.write(arguments.results, "options", record)
    print(f"\n{reporting.where(record)}, bf16; milliseconds, in brackets")
    print("times what the plain call takes")
    for kind in PASSES:
        print(f"\n{kind}\n{table(results, kind)}")
    wrong = problems(results)
    print("\n".join(["", *wrong, f"written: {path}"]))
    ours = [r for r in results if r["candidate"] == arguments.implementation]
    return 1 if problems(ours) else 0


if __name__ == "__main__":
    raise SystemExit(main())
