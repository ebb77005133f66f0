"""Attention side by side with its peers: `python -m benchmarks.attention --suite train`.

Every candidate is checked against float32 before it is timed, in each of three passes: forward,
backward (from what the candidate kept of its forward), and both in one program. TFLOP/s count
4*B*N*T*S*H for the forward pass, half of that if causal, with a window or packed documents 4*B*N*H
for each pair of a query and a key that it sees, 2.5 times that for the backward and 3.5 times that
for both. A bias has a gradient too, which is not counted.

The suite "fp8" is of the forward pass alone. Its inputs are quantised before, which is timed
apart. Errors are those of quantisation, for cuDNN also of its output, which is float8.

The suites "models" (benchmarks/models.py) and "random" (benchmarks/rows.py) are of shapes that
nobody chose for the kernels. What a candidate cannot do is left out, and the record says why.

The suites "functions" and "functions-64" (benchmarks/functions.py) are of heads of 128 and 64 whose
mask or score is a function. They say how near the time comes to what it should be.

Peers: cuDNN through jax.nn, and FlashAttention-3 where the package dew_flash_attn is importable
(PyPI dew-flash-attn-cu13: Dao-AILab's kernels bound to JAX). For "models" and "random" also XLA,
and the Mosaic GPU kernels of tokamax where that is importable (PyPI tokamax 0.0.17). For functions
PyTorch's FlexAttention where torch is.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import importlib.util
import itertools
import math
import pathlib
import re
import statistics
import threading
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.cudnn import fused_attention_stablehlo

import jax_flash
from benchmarks import flex, functions, models, reporting, timing
from benchmarks.reporting import figure, markdown
from benchmarks.rows import PASSES, XLA_LOGITS, Row, drawn
from pallas_kernels import config, defaults

# Relative error of a right result: bf16 output and weights give 2e-3 to 3e-3.
TOLERANCE = 1e-2
# float8 has 4 significant bits: query, key, value and weights, and the output of cuDNN, give 6e-2.
FP8_TOLERANCE = 1e-1
REFERENCE_LOGITS = 2**28  # of some rows of a head: 1 GiB

RANDOM = "random"
# Their rows were not chosen for the kernels: another set of passes and candidates by default.
BROAD = ("models", RANDOM)
TWO_PASSES = (*BROAD, *functions.SUITES)  # forward and both

# Rows that are compiled before the first of them is timed, and what a run that is cut short loses.
BATCH = 16

WORST = 5  # rows that the summary names


def _row(batch: int, length: int, width: int, causal: bool, **more: Any) -> Row:
    """A row of 2048 columns of heads."""
    return Row(batch, length, 2048 // width, 2048 // width, width, causal, **more)


SUITES: dict[str, list[Row]] = {
    "train": [
        *(
            _row(16384 // length, length, width, causal)
            for length in (1024, 4096, 16384)
            for width in (64, 128, 256)
            for causal in (False, True)
        ),
        Row(4, 4096, 32, 8, 128, True),
    ],
    "masks": [
        Row(1, 16384, 32, 8, 128, True, window=1024),
        Row(1, 16384, 32, 8, 128, True, window=4096),
        Row(4, 8192, 64, 8, 64, True, window=128),
        Row(1, 16384, 16, 16, 128, True, documents=16),
        Row(1, 32768, 32, 8, 128, True, documents=8),
        Row(1, 16384, 32, 32, 64, True, documents=32),
    ],
    # 192 and 128 are those of multi-head latent attention.
    "widths": [
        *(Row(4, 4096, 16, 16, 192, causal, value_width=128) for causal in (False, True)),
        *(Row(4, 4096, 16, 16, width, True) for width in (80, 96, 160, 192)),
    ],
    "fp8": [
        *(
            _row(16384 // length, length, width, causal, drawn_in="float32")
            for length in (4096, 16384)
            for width in (64, 128, 256)
            for causal in (False, True)
        ),
        *(Row(4, 4096, 32, 8, 128, causal, drawn_in="float32") for causal in (False, True)),
    ],
    "models": models.rows(),
    RANDOM: [],  # what its options say: `select`
    **functions.SUITES,
    # Small enough for a CPU.
    "fp8-small": [Row(1, 256, 4, 2, 64, c, drawn_in="float32") for c in (False, True)],
    "small": [
        *(Row(1, 256, 4, 2, 64, causal) for causal in (False, True)),
        Row(1, 256, 4, 2, 64, True, window=40),
        Row(1, 256, 4, 2, 64, True, documents=3),
    ],
}


def segment_ids(documents: tuple[int, ...]) -> jax.Array:
    """The document of each token, `[1, T]` int32, which XLA takes for an input of the program."""
    ids = np.repeat(np.arange(len(documents), dtype=np.int32), documents)
    return jax.lax.optimization_barrier(jnp.asarray(ids[None]))


def _window(causal: bool, window: int | None) -> tuple[int, int] | None:
    """Keys before and after its own that a query sees."""
    return None if window is None else (window, 0 if causal else window)


def jax_flash_with(implementation: str, **options) -> Callable:
    """A candidate of ours; options are those of `jax_flash.attention`."""

    def attention(query, key, value, causal, window=None, documents=None, **more):
        if window is not None:
            more["local_window_size"] = _window(causal, window)
        if documents is not None:
            ids = segment_ids(documents)
            more |= {"query_segment_ids": ids, "key_value_segment_ids": ids}
        return jax_flash.attention(
            query,
            key,
            value,
            is_causal=causal,
            implementation=implementation,
            **options,
            **more,
        )

    return attention


def _jax_nn(implementation: Literal["cudnn", "xla"]) -> Callable:
    def attention(query, key, value, causal, window=None, documents=None, **more):
        batch, length, heads, _ = query.shape
        if implementation == "xla" and batch * heads * length * key.shape[1] > XLA_LOGITS:
            raise NotImplementedError("logits [B, N, T, S] take too much memory")
        if documents is not None:
            if implementation == "cudnn":
                raise NotImplementedError("jax.nn has packed documents as a dense mask only")
            ids = segment_ids(documents)
            more["mask"] = (ids[:, :, None] == ids[:, None, :])[:, None]
        return jax.nn.dot_product_attention(
            query,
            key,
            value,
            is_causal=causal,
            local_window_size=_window(causal, window),
            implementation=implementation,
            **more,
        )

    return attention


def _fa3(query, key, value, causal, window=None, documents=None, **more):
    from dew_flash_attn import flash_mha, flash_mha_varlen

    if more:
        raise NotImplementedError(f"flash_mha has no {', '.join(more)}")
    scale = query.shape[-1] ** -0.5
    if documents is not None:
        starts = jnp.asarray(np.cumsum([0, *documents]), jnp.int32)
        starts = jax.lax.optimization_barrier(starts)
        packed = (x[0] for x in (query, key, value))
        return flash_mha_varlen(*packed, starts, max(documents), scale, causal)[None]
    # Its causal mask is aligned bottom-right, which is top-left where T == S.
    return flash_mha(query, key, value, scale, causal, _window(causal, window) or (-1, -1))


def _tokamax(query, key, value, causal, window=None, documents=None, **more):
    import tokamax

    if documents is not None:
        raise NotImplementedError("tokamax has packed documents as a dense mask only")
    return tokamax.dot_product_attention(
        query,
        key,
        value,
        is_causal=causal,
        local_window_size=_window(causal, window),
        implementation="mosaic",
        **more,
    )


@dataclasses.dataclass(frozen=True)
class FP8:
    """A candidate whose inputs are quantised before it is timed; it has a forward pass alone.

    Attributes:
      quantize: of query, key and value.
      attend: of all that `quantize` gives, and `row.mask`.
      result: of what `attend` gives, the output that it stands for.
    """

    quantize: Callable
    attend: Callable
    result: Callable = lambda out: out


def _fp8_with(implementation: str, settings: dict[int, config.ForwardFP8Config] | None = None):
    """A candidate of ours; settings are those of the FP8 kernel by width, if not the default."""

    def attend(query, key, value, causal):
        width, own = query.shape[-1], None
        if settings is not None:
            own = dataclasses.replace(defaults.default(width), forward_fp8=settings[width])
        return jax_flash.attention(
            query, key, value, is_causal=causal, implementation=implementation, config=own
        )

    return FP8(jax_flash.quantize_fp8, attend)


def _quantize_for_cudnn(query, key, value):
    """A scale for each whole array, as cuDNN takes them: float8 arrays and its parameters."""
    largest = [
        jnp.abs(x).max().astype(jnp.float32).reshape(1, 1, 1, 1) for x in (query, key, value)
    ]
    arrays = [
        (x.astype(jnp.float32) * (448 / top)).astype(jnp.float8_e4m3fn)
        for x, top in zip((query, key, value), largest, strict=True)
    ]
    unused = jnp.ones((1, 1, 1, 1), jnp.float32)
    parameters = dict.fromkeys(fused_attention_stablehlo.fp8_params_keys, unused)
    parameters |= {f"descale_{x}": top / 448 for x, top in zip("qkv", largest, strict=True)}
    # Weights are up to 1, and outputs up to the largest value.
    parameters |= {"scale_s": 256 * unused, "descale_s": unused / 256}
    parameters["scale_o"] = 448 / largest[2]
    return *arrays, parameters


def _cudnn_fp8(query, key, value, parameters, causal):
    kinds = fused_attention_stablehlo.MaskType
    out, _, _ = fused_attention_stablehlo.dot_product_attention(
        query,
        key,
        value,
        fp8_params=parameters,
        scale=query.shape[-1] ** -0.5,
        mask_type=kinds.CAUSAL if causal else kinds.NO_MASK,
        use_fp8=True,
    )
    return out, parameters["scale_o"]


# Its gradients are the same bit by bit from run to run. The peers' are not, so that it stands
# apart from the comparison, and its forward is that of jax_flash.
DETERMINISTIC = "jax_flash deterministic"

CANDIDATES: dict[str, Callable | FP8] = {
    "jax_flash": jax_flash_with("mosaic_gpu", deterministic=False),
    DETERMINISTIC: jax_flash_with("mosaic_gpu", deterministic=True),
    "jax_flash xla": jax_flash_with("xla"),
    "cuDNN": _jax_nn("cudnn"),
    "FA3": _fa3,
    "tokamax": _tokamax,
    "jax.nn xla": _jax_nn("xla"),  # holds [B, N, T, S]: short rows only
    "jax_flash fp8": _fp8_with("mosaic_gpu"),
    # Sums in float32, not in the products' own precision.
    "jax_flash fp8 promoting": _fp8_with("mosaic_gpu", defaults.FORWARD_FP8_PROMOTING),
    "jax_flash fp8 xla": _fp8_with("xla"),
    "cuDNN fp8": FP8(_quantize_for_cudnn, _cudnn_fp8, lambda x: x[0].astype(jnp.float32) / x[1]),
}

# Their kernels allocate more as they run (FA3 its float32 query gradient), unseen by `temp_bytes`.
ALLOCATING = ("FA3",)

NOTES = {
    "temp_bytes": "of one call, beside its arguments and results, as XLA plans it; more for"
    f" {', '.join(ALLOCATING)}, which allocates as it runs",
}


def candidates_of(row: Row) -> Mapping[str, Callable | FP8 | flex.FlexAttention]:
    return functions.CANDIDATES if isinstance(row, functions.FunctionRow) else CANDIDATES


def is_ours(candidate: str) -> bool:
    return candidate.startswith("jax_flash")


def is_fp8(candidate: str) -> bool:
    return isinstance(CANDIDATES.get(candidate), FP8)


def tolerance(candidate: str) -> float:
    return FP8_TOLERANCE if is_fp8(candidate) else TOLERANCE


def default_candidates(suite: str = "train") -> list[str]:
    if suite.startswith("fp8"):
        on_gpu = ["jax_flash fp8", "jax_flash", "cuDNN fp8"]
        return on_gpu if timing.on_gpu() else ["jax_flash fp8 xla", "jax_flash xla"]
    if suite in functions.SUITES:
        return functions.default_candidates()
    if not timing.on_gpu():
        return ["jax_flash xla", "jax.nn xla"]
    fa3 = ["FA3"] if importlib.util.find_spec("dew_flash_attn") else []
    if suite in BROAD:
        tokamax = ["tokamax"] if importlib.util.find_spec("tokamax") else []
        return ["jax_flash", "cuDNN", *fa3, *tokamax, "jax.nn xla"]
    return ["jax_flash", DETERMINISTIC, "cuDNN", *fa3]


def default_passes(suite: str) -> list[str]:
    if suite.startswith("fp8"):
        return ["forward"]
    return ["forward", "both"] if suite in TWO_PASSES else list(PASSES)


def taking_part(candidates: list[str], passes: str) -> list[str]:
    """The candidates that differ in this pass."""
    return [name for name in candidates if (name, passes) != (DETERMINISTIC, "forward")]


_TRACING = threading.Lock()  # tracing is Python: threads would only take turns at it


def build(
    candidate: Callable | FP8 | flex.FlexAttention, row: Row, passes: str
) -> list[jax.stages.Compiled] | flex.Program:
    """Compiles a pass of a candidate; threads may compile at the same time.

    Args:
      candidate: the output of query, key, value, `row.mask` and `row.named`, as in CANDIDATES.
      row: the shape.
      passes: one of PASSES.

    Returns:
      Programs, the first of `row.inputs()` and each next one of what the one before returns. The
      last is the pass. It returns the output and dquery, dkey, dvalue, and those of
      `row.gradients`, or its part of them.
    """
    if isinstance(candidate, FP8):
        return _build_fp8(candidate, row, passes)
    if isinstance(candidate, flex.FlexAttention):
        return candidate.build(row, passes)
    inputs = jax.eval_shape(row.inputs)

    def split(query, key, value, dout, *more):
        """Attention, what it takes that has a gradient, and the cotangent of its output."""
        named = row.named(more)
        wanted = {name: named.pop(name) for name in row.gradients}

        def attention(query, key, value, wanted):
            return candidate(query, key, value, **row.mask, **named, **wanted)

        return attention, (query, key, value, wanted), dout

    def forward(*inputs):
        attention, arrays, _ = split(*inputs)
        return (attention(*arrays),)

    def residuals(*inputs):
        attention, arrays, dout = split(*inputs)
        _, vjp = jax.vjp(attention, *arrays)
        return vjp, dout

    def backward(vjp, dout):
        return tuple(jax.tree.leaves(vjp(dout)))

    def both(*inputs):
        attention, arrays, dout = split(*inputs)
        out, vjp = jax.vjp(attention, *arrays)
        return (out, *backward(vjp, dout))

    with _TRACING:
        if passes == "backward":
            kept = jax.jit(residuals).trace(*inputs)
            lowered = [kept.lower(), jax.jit(backward).lower(*kept.out_info)]
        else:
            lowered = [jax.jit({"forward": forward, "both": both}[passes]).lower(*inputs)]
    return [program.compile() for program in lowered]


def _build_fp8(candidate: FP8, row: Row, passes: str) -> list[jax.stages.Compiled]:
    """What `build` gives: the program that quantises, and the forward pass."""
    if passes != "forward":
        raise NotImplementedError("FP8 has a forward pass alone")
    query, key, value, dout = jax.eval_shape(row.inputs)
    attend = functools.partial(candidate.attend, **row.mask)
    with _TRACING:
        quantize = jax.jit(lambda query, key, value, dout: candidate.quantize(query, key, value))
        traced = quantize.trace(query, key, value, dout)
        forward = jax.jit(lambda *quantized: (attend(*quantized),))
        lowered = [traced.lower(), forward.lower(*traced.out_info)]
    return [program.compile() for program in lowered]


# To find the fastest matmul for each shape would take longer than these are used.
@functools.partial(
    jax.jit,
    static_argnames=("causal", "window", "documents", "logits_soft_cap"),
    compiler_options={"xla_gpu_autotune_level": 0},
)
@jax.default_matmul_precision("highest")
def reference(
    query,
    key,
    value,
    dout,
    bias=None,
    mask=None,
    key_value_seq_lengths=None,
    *,
    causal: bool,
    window: int | None = None,
    documents: tuple[int, ...] | None = None,
    logits_soft_cap: float | None = None,
):
    """The output, dquery, dkey, dvalue and any dbias in float32, some rows of a head at a time."""
    batch, length, heads, width = query.shape
    key_length, key_heads = key.shape[1:3]
    chunks = -(-length // max(1, REFERENCE_LOGITS // key_length))
    chunk = -(-length // chunks)
    positions = jnp.arange(key_length)
    before, after = _window(causal, window) or (length, key_length)

    def attend(row, is_real, query, key, value, bias):
        logits = width**-0.5 * query @ key.T + bias
        if logits_soft_cap is not None:
            logits = logits_soft_cap * jnp.tanh(logits / logits_soft_cap)
        behind = row[:, None] - positions
        seen = is_real & (behind <= before) & (behind >= (0 if causal else -after))
        if documents is not None:
            ids = segment_ids(documents)[0]
            seen &= ids[row][:, None] == ids
        return jax.nn.softmax(jnp.where(seen, logits, -jnp.inf)) @ value

    def one_head(arrays):
        is_real, key, value, *of_rows = arrays
        key, value = key.astype(jnp.float32), value.astype(jnp.float32)

        def some_rows(sums, part):
            row, *part = part
            query, dout, bias = (x.astype(jnp.float32) for x in part)
            out, vjp = jax.vjp(functools.partial(attend, row, is_real), query, key, value, bias)
            d_query, *of_keys, d_bias = vjp(dout)
            return jax.tree.map(jnp.add, sums, of_keys), (out, d_query, d_bias)

        # Rows that fill the last chunk are again the last row, with a cotangent of 0.
        def chunked(x):
            return jnp.pad(x, ((0, chunks * chunk - length), (0, 0))).reshape(chunks, chunk, -1)

        row = jnp.minimum(jnp.arange(chunks * chunk), length - 1).reshape(chunks, chunk)
        sums, of_rows = jax.lax.scan(
            some_rows, [jnp.zeros_like(key), jnp.zeros_like(value)], (row, *map(chunked, of_rows))
        )
        out, d_query, d_bias = (x.reshape(chunks * chunk, -1)[:length] for x in of_rows)
        return out, d_query, *sums, d_bias

    def heads_first(x):
        x = jnp.repeat(x, heads // x.shape[2], axis=2)
        return x.transpose(0, 2, 1, 3).reshape(batch * heads, x.shape[1], -1)

    def heads_third(x):
        return x.reshape(batch, heads, x.shape[1], -1).transpose(0, 2, 1, 3)

    def sum_groups(x):
        return x.reshape(batch, key_length, key_heads, heads // key_heads, -1).sum(axis=3)

    is_real = jnp.ones((batch, key_length), bool) if mask is None else mask[:, 0, 0]
    if key_value_seq_lengths is not None:
        is_real &= positions < key_value_seq_lengths[:, None]
    # A column of zeros stands for no bias, so that every head has the same arrays.
    biases = jnp.zeros((1, heads, length, 1)) if bias is None else bias
    biases = jnp.broadcast_to(biases, (batch, *biases.shape[1:]))
    out, dq, dk, dv, d_bias = jax.lax.map(
        one_head,
        (
            jnp.repeat(is_real, heads, axis=0),
            *map(heads_first, (key, value, query, dout)),
            biases.reshape(batch * heads, length, -1),
        ),
    )
    out, dq, dk, dv = map(heads_third, (out, dq, dk, dv))
    gradients = (dq, sum_groups(dk), sum_groups(dv))
    if bias is None:
        return out, *gradients
    d_bias = d_bias.reshape(batch, heads, length, key_length).sum(axis=0, keepdims=True)
    return out, *gradients, d_bias


def expected(row: Row, inputs: tuple) -> tuple[jax.Array, ...]:
    """What "both" of a row returns, in float32."""
    if isinstance(row, functions.FunctionRow):
        return functions.expected(row, inputs)
    return reference(*inputs[:4], **row.named(inputs[4:]), **row.mask)


@jax.jit
def relative_error(results, expected) -> jax.Array:
    """The largest of |result - expected| / |expected| (Frobenius)."""

    def error(x, y):
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
        return jnp.linalg.norm((x - y).ravel()) / jnp.linalg.norm(y.ravel())

    return jnp.max(jnp.array([error(x, y) for x, y in zip(results, expected, strict=True)]))


def bind(
    programs: list[jax.stages.Compiled] | flex.Program, inputs: tuple
) -> timing.Bound | flex.Program:
    """The last of what `build` returns, with its arguments."""
    if isinstance(programs, flex.Program):
        return programs
    for program in programs[:-1]:
        inputs = program(*inputs)
    return timing.Bound(programs[-1], inputs)


def measure(
    row: Row,
    passes: str,
    built: dict[str, concurrent.futures.Future],
    inputs: tuple,
    expected: tuple,
    rounds: int,
    iterations: int,
    of_plain: tuple = (),
) -> dict:
    """Checks one pass of a row, and times the candidates that are right.

    Args:
      row: the shape.
      passes: one of PASSES.
      built: for each candidate, what `build` gives.
      inputs: `row.inputs()`.
      expected: what the pass returns, in float32.
      rounds: how often each candidate has its turn.
      iterations: calls in a turn.
      of_plain: what the yardstick "plain" of `benchmarks.functions` returns.

    Returns:
      The row's name, the passes and, for each candidate, its error, times and TFLOP/s, or why it
      failed. For "both" also temp_bytes: memory of one call beside its arguments and results, as
      XLA plans it, where the backend says. For FP8 also the milliseconds of quantisation.
    """
    entries: dict[str, dict] = {}
    programs: dict[str, timing.Bound | flex.Program] = {}
    quantising = {}
    for name, future in built.items():
        try:
            compiled = future.result()
            program = bind(compiled, inputs)
            results, right = jax.block_until_ready(program()), expected
            if isinstance(candidate := CANDIDATES.get(name), FP8):
                results = (candidate.result(results[0]),)
            if name == functions.PLAIN:
                results, right = results[: len(of_plain)], of_plain
        except Exception as e:  # a peer may not do this shape: say so, go on with the others
            entries[name] = {"failed": timing.reason(e)}
            continue
        error = float(relative_error(results, right))
        entries[name] = {"error": error}
        if not isinstance(compiled, flex.Program):
            if passes == "both" and (memory := compiled[-1].memory_analysis()):
                entries[name]["temp_bytes"] = memory.temp_size_in_bytes
            if is_fp8(name) and error <= tolerance(name):
                quantising[name] = timing.Bound(compiled[0], inputs)
        if error <= tolerance(name):
            programs[name] = program
    for name, time in timing.interleaved(programs, (), rounds, iterations).items():
        entries[name] |= {
            "milliseconds": dataclasses.asdict(time),
            "teraflops": row.flops(passes) / time.mean / 1e9,
        }
    if quantising:
        for name, time in timing.interleaved(quantising, (), rounds, iterations).items():
            entries[name]["quantisation_milliseconds"] = dataclasses.asdict(time)
    return {"row": row.name, "passes": passes, "candidates": entries}


def compile_all(
    rows: list[Row], passes: list[str], candidates: list[str]
) -> list[dict[str, dict[str, concurrent.futures.Future]]]:
    """What `build` gives, for each of the rows, passes and candidates.

    All have ended when this returns: compiling launches kernels, which a time would count. PyTorch
    compiles in one thread.
    """
    with (
        concurrent.futures.ThreadPoolExecutor() as pool,
        concurrent.futures.ThreadPoolExecutor(1) as one_by_one,
    ):

        def start(candidate, row, kind):
            is_torch = isinstance(candidate, flex.FlexAttention)
            return (one_by_one if is_torch else pool).submit(build, candidate, row, kind)

        built = [
            {
                kind: {
                    name: start(candidates_of(row)[name], row, kind)
                    for name in taking_part(candidates, kind)
                    if functions.takes_part(name, row)
                }
                for kind in passes
            }
            for row in rows
        ]
        for programs in timing.progress(built, "compile"):
            for of_pass in programs.values():
                concurrent.futures.wait(of_pass.values())
    return built


def benchmark(row: Row, built: dict[str, dict], rounds: int, iterations: int) -> list[dict]:
    """Checks and times one row that `compile_all` compiles: a result of `measure` for each pass."""
    inputs = row.inputs()
    of_passes = lambda out, *gradients: {
        "forward": (out,),
        "backward": gradients,
        "both": (out, *gradients),
    }
    right = of_passes(*expected(row, inputs))
    of_plain: dict[str, tuple] = {}
    if isinstance(row, functions.FunctionRow):
        of_plain = of_passes(*expected(row.plain, inputs[:4]))
    return [
        measure(
            row, kind, programs, inputs, right[kind], rounds, iterations, of_plain.get(kind, ())
        )
        for kind, programs in built.items()
    ]


def problems(results: list[dict]) -> dict[str, list[str]]:
    """For each candidate, where it failed or is wrong."""
    found: dict[str, list[str]] = {}
    for result in results:
        for name, entry in result["candidates"].items():
            where = f"{result['row']}, {result['passes']}: {name}"
            if "failed" in entry:
                found.setdefault(name, []).append(f"{where} failed: {entry['failed']}")
            elif not entry["error"] <= tolerance(name):  # NaN too
                found.setdefault(name, []).append(f"{where} is off by {entry['error']:.1e}")
    return found


def best(result: dict) -> tuple[float, float]:
    """TFLOP/s of the faster of ours, not the deterministic one, and of the fastest peer, or NaN.

    Where there are candidates in FP8, they alone count.
    """
    entries = result["candidates"]
    of_fp8 = {name: entry for name, entry in entries.items() if is_fp8(name)}
    speed = {n: e["teraflops"] for n, e in (of_fp8 or entries).items() if "teraflops" in e}
    ours = (s for n, s in speed.items() if is_ours(n) and n != DETERMINISTIC)
    peers = (s for n, s in speed.items() if not is_ours(n) and n not in functions.YARDSTICKS)
    return max(ours, default=math.nan), max(peers, default=math.nan)


def summarize(results: list[dict]) -> dict[str, dict]:
    """For each pass, the speedup over the best peer in the rows that have both.

    Of the rows it says how many there are, in how many ours is ahead, the geometric mean, the
    smallest, and the WORST rows with the smallest first.
    """
    summary = {}
    for kind in dict.fromkeys(result["passes"] for result in results):
        speeds = {r["row"]: best(r) for r in results if r["passes"] == kind}
        ratios = {row: ours / peer for row, (ours, peer) in speeds.items()}
        ratios = {row: ratio for row, ratio in ratios.items() if not math.isnan(ratio)}
        if ratios:
            rising = sorted(ratios, key=lambda row: ratios[row])
            summary[kind] = {
                "rows": len(ratios),
                "ahead": sum(ratio > 1 for ratio in ratios.values()),
                "geometric_mean": statistics.geometric_mean(ratios.values()),
                "smallest": ratios[rising[0]],
                "smallest_row": rising[0],
                "worst": {row: ratios[row] for row in rising[:WORST]},
            }
    return summary


def conclusion(kind: str, summary: dict, rows: int) -> str:
    """What `summarize` finds of a pass, in words; rows are those that there are."""
    ahead = summary["ahead"] / summary["rows"]
    lines = [
        f"{kind}: speedup over best peer {summary['geometric_mean']:.3f}, the geometric mean of"
        f" {summary['rows']} of {rows} rows; ahead in {summary['ahead']} ({ahead:.0%}); the"
        f" smallest are"
    ]
    lines += [f"  {ratio:.3f}  {row}" for row, ratio in summary["worst"].items()]
    return "\n".join(lines)


def over_16_bits(result: dict) -> float:
    """TFLOP/s of ours in FP8 over those of ours in 16 bits, NaN without either."""
    of_16_bits = {n: e for n, e in result["candidates"].items() if not is_fp8(n)}
    return best(result)[0] / best(result | {"candidates": of_16_bits})[0]


def fp8_table(results: list[dict]) -> str:
    """For rows with candidates in FP8: errors, microseconds of quantisation, speedup."""
    names = list(dict.fromkeys(n for r in results for n in r["candidates"] if is_fp8(n)))
    headers = [[f"{name}: error", "quantisation, us"] for name in names]
    lines = [["shape", *itertools.chain(*headers), "speedup over 16 bits"]]
    for result in results:
        cells = []
        for entry in (result["candidates"].get(name, {}) for name in names):
            time = entry.get("quantisation_milliseconds")
            cells.append(figure(entry.get("error"), ".1e"))
            cells.append(figure(1e3 * time["mean"] if time else None, ".1f"))
        lines.append([result["row"], *cells, figure(over_16_bits(result), ".2f")])
    return markdown(lines)


def table(results: list[dict], candidates: list[str], matmul: float) -> str:
    """TFLOP/s of every candidate; of ours, the speedup, and the part of the matmul's rate."""
    lines = [
        ["shape", "passes", *candidates, "speedup over best peer", "of the matmul", "error"],
    ]
    for result in results:
        entries = result["candidates"]
        speed = {n: e["teraflops"] for n, e in entries.items() if "teraflops" in e}
        ours, peer = best(result)
        errors = [e["error"] for e in entries.values() if "error" in e]
        lines.append(
            [
                result["row"],
                result["passes"],
                *(figure(speed.get(name), ".3g") for name in candidates),
                figure(ours / peer, ".2f"),
                figure(ours / matmul, ".2f"),
                figure(reporting.worst(errors), ".1e"),
            ]
        )
    return markdown(lines)


def memory_table(results: list[dict], candidates: list[str]) -> str:
    """MiB of `temp_bytes` of every candidate, for the rows that have any."""

    def mebibytes(name: str, entry: dict) -> str:
        more = "> " if name in ALLOCATING else ""
        return f"{more}{entry['temp_bytes'] / 2**20:.1f}" if "temp_bytes" in entry else "-"

    lines = [["shape", *candidates]]
    for result in results:
        entries = result["candidates"]
        if any("temp_bytes" in entry for entry in entries.values()):
            lines.append([result["row"], *(mebibytes(n, entries.get(n, {})) for n in candidates)])
    return markdown(lines)


def dtypes(rows: list[Row], candidates: list[str]) -> str:
    """What inputs are in, in words."""
    names = {"bf16" if row.dtype == "bfloat16" else "fp16" for row in rows}
    return " and ".join([*(["fp8"] if any(map(is_fp8, candidates)) else []), *sorted(names)])


def heading(record: dict[str, Any], calls: str) -> str:
    """What stands above a table: where and when it was measured, and what its figures are."""
    dtype = record.get("dtype", "bf16")
    return f"{reporting.where(record)}, {dtype}; TFLOP/s, means of\n{calls} calls"


def report(record: dict, candidates: list[str], calls: str) -> str:
    """What the benchmark prints: tables, ratios, and what failed or is wrong."""
    results = record["results"]
    parts = [
        f"\n{heading(record, calls)}; bf16 matmul: {record['matmul_teraflops']:.3g} TFLOP/s",
        table(results, candidates, record["matmul_teraflops"]),
    ]
    if any("temp_bytes" in e for result in results for e in result["candidates"].values()):
        parts += [
            f"MiB of temporaries, forward + backward: {NOTES['temp_bytes']}",
            memory_table(results, candidates),
        ]
    if any(map(is_fp8, candidates)):
        parts.append(fp8_table(results))
    if "bars" in record:
        parts.append(functions.table(record["bars"]))
    passes = [result["passes"] for result in results]
    parts += [
        conclusion(kind, summary, passes.count(kind)) for kind, summary in record["summary"].items()
    ]
    parts.append("\n".join(itertools.chain(*problems(results).values())))
    return "\n\n".join(filter(None, parts))


def plot(record: dict, path: pathlib.Path) -> None:
    """Bars of TFLOP/s for every row, a panel for each kind of pass."""
    labels = {"forward": "forward", "backward": "backward", "both": "forward + backward"}
    results = record["results"]
    candidates = reporting.in_order(name for result in results for name in result["candidates"])
    rows = list(dict.fromkeys(result["row"] for result in results))
    panels = {}
    for kind in dict.fromkeys(result["passes"] for result in results):
        of_kind = {r["row"]: r["candidates"] for r in results if r["passes"] == kind}
        label = f"TFLOP/s, {labels[kind]}"
        if kind in record["summary"]:
            speedup = record["summary"][kind]["geometric_mean"]
            label += f"\nspeedup over best peer {speedup:.2f}"
        panels[label] = {
            name: [of_kind.get(row, {}).get(name, {}).get("teraflops", 0) for row in rows]
            for name in candidates
        }
    title = f"Attention beside its peers: longer is faster\n{reporting.where(record)}"
    reporting.bars(panels, rows, f"{title}, {record.get('dtype', 'bf16')}", path)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that say which rows to time, how often, and where results go."""
    parser.add_argument("--quick", action="store_true", help="the rows of length 4096 alone")
    parser.add_argument("--rows", default="", help="regular expression that names of rows match")
    parser.add_argument("--seed", type=int, default=0, help=f"of --suite {RANDOM}")
    parser.add_argument("--count", type=int, default=48, help=f"rows of --suite {RANDOM}")
    parser.add_argument("--rounds", type=int, default=timing.ROUNDS, help="turns of each")
    parser.add_argument("--iterations", type=int, default=10, help="calls in a round")
    reporting.add_results(parser)


def select(suite: str, options: argparse.Namespace) -> list[Row]:
    """The rows of a suite that the options of `add_arguments` ask for."""
    rows = drawn(options.seed, options.count) if suite == RANDOM else SUITES[suite]
    rows = [row for row in rows if re.search(options.rows, row.name)]
    if options.quick and suite == "train":
        rows = [row for row in rows if row.length == 4096]
    return rows


def parse(argv: list[str] | None, doc: str | None) -> argparse.Namespace:
    """The command line: its candidates, passes and rows as lists of what there is."""
    parser = reporting.parser(doc)
    suite = "train" if timing.on_gpu() else "small"
    parser.add_argument("--suite", choices=SUITES, default=suite, help="which rows")
    parser.add_argument(
        "--passes",
        help=f"of {','.join(PASSES)} (default: all; forward,both for {', '.join(TWO_PASSES)};"
        " forward for suites of FP8)",
    )
    parser.add_argument(
        "--candidates",
        help=f"of {', '.join(CANDIDATES)}, separated by commas (default:"
        f" {','.join(default_candidates())}; for {' and '.join(BROAD)}"
        f" {','.join(default_candidates(RANDOM))}; for suites of FP8"
        f" {','.join(default_candidates('fp8'))}). For {', '.join(functions.SUITES)} of"
        f" {', '.join(functions.CANDIDATES)} (default:"
        f" {','.join(functions.default_candidates())}). FA3 needs dew_flash_attn, FlexAttention"
        ' torch, tokamax itself, 0.0.17 of it, whose implementation is "mosaic": where they cannot'
        " be imported they are not among the defaults. What a candidate cannot do is left out, and"
        " the record says why.",
    )
    add_arguments(parser)
    options = parser.parse_args(argv)

    names = options.candidates
    options.candidates = names.split(",") if names else default_candidates(options.suite)
    passes = options.passes
    options.passes = passes.split(",") if passes else default_passes(options.suite)
    known = functions.CANDIDATES if options.suite in functions.SUITES else CANDIDATES
    if unknown := {*options.candidates} - {*known} | {*options.passes} - {*PASSES}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    for kind in options.passes:
        if not taking_part(options.candidates, kind):
            parser.error(f"no candidate for {kind}: {DETERMINISTIC} has the forward of jax_flash")
    wanted, options.rows = options.rows, select(options.suite, options)
    if not options.rows:
        options.rows = ""
        there_are = ", ".join(row.name for row in select(options.suite, options))
        parser.error(f"rows: no row of {options.suite} has {wanted!r}: {there_are}")
    return options


def main(argv: list[str] | None = None) -> int:
    options = parse(argv, __doc__)
    matmul = timing.matmul_teraflops(8192 if timing.on_gpu() else 512)
    results: list[dict] = []
    for rows in itertools.batched(options.rows, BATCH):
        built = compile_all([*rows], options.passes, options.candidates)
        for row, programs in timing.progress(zip(rows, built, strict=True), "attention"):
            results += benchmark(row, programs, options.rounds, options.iterations)
            programs.clear()
            results.sort(key=lambda result: options.passes.index(result["passes"]))
            record = reporting.provenance() | {
                "dtype": dtypes(options.rows, options.candidates),
                "matmul_teraflops": matmul,
                "notes": NOTES,
                "summary": summarize(results),
                "results": results,
            }
            if options.suite in functions.SUITES:
                record["bars"] = functions.summarize(results, options.rows)
            # After each row, so that a run that is cut short leaves what it found.
            path = reporting.write(options.results, f"attention {options.suite}", record)

    print(report(record, options.candidates, f"{options.rounds} x {options.iterations}"))

    print(f"\nwritten: {path}")
    if importlib.util.find_spec("matplotlib"):
        plot(record, path.with_suffix(".png"))
        print(f"plotted: {path.with_suffix('.png')}")

    ran = any("teraflops" in entry for r in results for entry in r["candidates"].values())
    return 1 if any(map(is_ours, problems(results))) or not ran else 0


if __name__ == "__main__":
    raise SystemExit(main())
