"""Trains a small language model with jax_flash: `python -m benchmarks.train_lm`.

A byte-level decoder (RMSNorm, RoPE, grouped queries, SwiGLU) learns the Python standard library's
own sources, which every machine has. `--compare` trains it once for each implementation from the
same seed and on the same data, and fails if their losses differ by more than bf16 rounding makes.
"""

import dataclasses
import functools
import os
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_flash
from benchmarks import reporting, timing

VOCABULARY = 256  # bytes
IMPLEMENTATIONS = ("auto", "mosaic_gpu", "cudnn", "xla", "jax.nn", "fp8")

# Rounding to bf16 changes a step's gradients by about 1%, and training amplifies the change: how
# far two right runs drift apart is measured, as bf16 attention against float32 attention, both on
# xla. An implementation may be twice as far from float32 as that, and by DRIFT more: the difference
# of two runs is itself random. FP8 keeps 4 significant bits where bf16 keeps 8.
DRIFT = 0.01
FP8_DRIFT = 0.04


@dataclasses.dataclass(frozen=True)
class Model:
    """Sizes of the decoder. The width of its residual stream is heads * head_width."""

    layers: int = 4
    heads: int = 8
    key_heads: int = 2
    head_width: int = 64

    @property
    def width(self) -> int:
        return self.heads * self.head_width


def read_text() -> np.ndarray:
    """The standard library's modules as one array of bytes, in the order of their names."""
    sources = sorted(pathlib.Path(os.__file__).parent.glob("*.py"))
    return np.frombuffer(b"\0".join(path.read_bytes() for path in sources), np.uint8)


def batches(text: np.ndarray, batch: int, length: int) -> Iterator[np.ndarray]:
    """Endless `[batch, length + 1]` int32: all of the text in shuffled pieces, again and again."""
    pieces = text[: len(text) // (length + 1) * (length + 1)].reshape(-1, length + 1)
    random = np.random.default_rng(0)
    while True:
        order = random.permutation(len(pieces))
        for start in range(0, len(order) - batch + 1, batch):
            yield pieces[order[start : start + batch]].astype(np.int32)


def init(model: Model, key: jax.Array) -> dict[str, Any]:
    """Float32 parameters; the weights of all layers are stacked along the first axis."""
    w, kv = model.width, model.key_heads * model.head_width
    keys = iter(jax.random.split(key, 8))

    def dense(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) * shape[-2] ** -0.5

    layers = model.layers
    return {
        "embedding": dense(w, VOCABULARY).T,
        "layers": {
            "attention_norm": jnp.ones((layers, w)),
            "query": dense(layers, w, w),
            "key": dense(layers, w, kv),
            "value": dense(layers, w, kv),
            "out": dense(layers, w, w) * (2 * layers) ** -0.5,
            "mlp_norm": jnp.ones((layers, w)),
            "gate": dense(layers, w, 3 * w),
            "up": dense(layers, w, 3 * w),
            "down": dense(layers, 3 * w, w) * (2 * layers) ** -0.5,
        },
        "norm": jnp.ones(w),
    }


def rms_norm(x: jax.Array, gain: jax.Array) -> jax.Array:
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x32**2, axis=-1, keepdims=True) + 1e-6)
    return (x32 * scale * gain).astype(x.dtype)


def rope(x: jax.Array) -> jax.Array:
    """Rotates pairs of columns of `[B, T, N, H]` by angles that grow with the position."""
    half = x.shape[-1] // 2
    angles = jnp.outer(jnp.arange(x.shape[1]), 10000.0 ** (-jnp.arange(half) / half))[:, None]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x.dtype)


def attention_of(implementation: str) -> Callable:
    """Causal attention of `[B, T, N, H]` arrays.

    "float32" is xla's without rounding to bf16, "fp8" that of a forward pass in FP8.
    """
    if implementation == "jax.nn":
        return functools.partial(jax.nn.dot_product_attention, is_causal=True)
    if implementation == "float32":

        def in_float32(query, key, value):
            arrays = (x.astype(jnp.float32) for x in (query, key, value))
            out = jax_flash.attention(*arrays, is_causal=True, implementation="xla")
            return out.astype(query.dtype)

        return in_float32
    if implementation == "fp8":
        key = jax.random.key(1)
        return functools.partial(jax_flash.attention_fp8, is_causal=True, incoherent_key=key)
    name = None if implementation == "auto" else implementation
    return functools.partial(jax_flash.attention, is_causal=True, implementation=name)


def ran(model: Model, batch: int, length: int) -> str:
    """The implementation that "auto" is for these sizes."""

    def array(heads: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((batch, length, heads, model.head_width), jnp.bfloat16)

    key = array(model.key_heads)
    return jax_flash.explain(array(model.heads), key, key, is_causal=True).implementation


def loss(params: dict, tokens: jax.Array, model: Model, attention: Callable) -> jax.Array:
    """Mean cross-entropy in nats of each byte but the first of `[B, T + 1]`, given those before."""
    batch, length = tokens.shape[0], tokens.shape[1] - 1

    def heads(x: jax.Array) -> jax.Array:
        return x.reshape(batch, length, -1, model.head_width)

    def layer(x: jax.Array, p: dict) -> tuple[jax.Array, None]:
        p = jax.tree.map(lambda w: w.astype(jnp.bfloat16), p)
        y = rms_norm(x, p["attention_norm"])
        out = attention(
            rope(heads(y @ p["query"])), rope(heads(y @ p["key"])), heads(y @ p["value"])
        )
        x = x + out.reshape(x.shape) @ p["out"]
        y = rms_norm(x, p["mlp_norm"])
        return x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"], None

    # A product, since the gradient of a gather would add up 256 rows with colliding atomics.
    embedding = params["embedding"].astype(jnp.bfloat16)
    x = jax.nn.one_hot(tokens[:, :-1], VOCABULARY, dtype=jnp.bfloat16) @ embedding
    x, _ = jax.lax.scan(layer, x, params["layers"])
    logits = jnp.matmul(
        rms_norm(x, params["norm"]),
        embedding.T,
        preferred_element_type=jnp.float32,
    )
    log_likelihood = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=-1)
    return -jnp.mean(log_likelihood)


def optimizer(rate: Callable) -> tuple[Callable, Callable]:
    """Adam of optax where it is installed, else the same written out: (init, update)."""
    try:
        import optax
    except ImportError:
        return plain_adam(rate)
    adam = optax.adam(rate, b2=0.95)

    def update(grads, state, params):
        updates, state = adam.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return adam.init, update


def plain_adam(
    rate: Callable, b1: float = 0.9, b2: float = 0.95, epsilon: float = 1e-8
) -> tuple[Callable, Callable]:
    """Adam (Kingma and Ba 2014): (init, update), update(grads, state, params) -> params, state."""

    def start(params):
        mean, square = (jax.tree.map(jnp.zeros_like, params) for _ in range(2))
        return jnp.zeros((), jnp.int32), mean, square

    def update(grads, state, params):
        step, mean, square = state
        mean = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, mean, grads)
        square = jax.tree.map(lambda s, g: b2 * s + (1 - b2) * g**2, square, grads)
        t = step + 1

        def move(p, m, s):
            return p - rate(step) * (m / (1 - b1**t)) / (jnp.sqrt(s / (1 - b2**t)) + epsilon)

        return jax.tree.map(move, params, mean, square), (t, mean, square)

    return start, update


def train(
    implementation: str, model: Model, steps: int, batch: int, length: int
) -> tuple[np.ndarray, float]:
    """Trains from a fixed seed.

    Returns:
      The loss of every step, before its update, and the median seconds of a step.
    """
    # The losses of a run are those of any other of the same sizes: nothing else is random.
    params = init(model, jax.random.key(0))
    start, update = optimizer(lambda step: 1e-3 * jnp.minimum(1.0, (step + 1) / 20))
    attention = attention_of(implementation)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, tokens):
        value, grads = jax.value_and_grad(loss)(params, tokens, model, attention)
        params, state = update(grads, state, params)
        return params, state, value

    state = start(params)
    data = batches(read_text(), batch, length)
    losses: list[jax.Array] = []
    seconds = []
    every = max(1, steps // 10)
    for _ in timing.progress(range(0, steps, every), implementation):
        now = time.perf_counter()
        count = min(every, steps - len(losses))
        for _ in range(count):
            params, state, value = step(params, state, next(data))
            losses.append(value)
        jax.block_until_ready(value)
        seconds.append((time.perf_counter() - now) / count)
    # The first of them compiled.
    return np.array(losses), statistics.median(seconds[1:] or seconds)


def disagreement(curves: dict[str, np.ndarray]) -> str | None:
    """Why the curves are not of one function to within rounding, None if they are.

    Args:
      curves: the losses of every step by implementation, "float32" and "xla" among them.
    """
    exact = curves["float32"]
    noise = np.max(np.abs(curves["xla"] - exact))
    for name, losses in curves.items():
        distance = np.max(np.abs(losses - exact))
        drift = FP8_DRIFT if name == "fp8" else DRIFT
        if not distance <= 2 * noise + drift:  # NaN too
            return (
                f"{name} is {distance:.4f} nats from float32 attention, "
                f"of 2 * {noise:.4f} + {drift} allowed"
            )
    return None


def main(argv: list[str] | None = None) -> int:
    gpu = timing.on_gpu()
    parser = reporting.parser(__doc__)
    parser.add_argument("--steps", type=int, default=300 if gpu else 60, help="of training")
    parser.add_argument("--batch", type=int, default=16 if gpu else 8, help="sequences a step")
    parser.add_argument("--length", type=int, default=1024 if gpu else 128, help="bytes of each")
    parser.add_argument("--layers", type=int, default=4 if gpu else 2, help="of the decoder")
    parser.add_argument("--heads", type=int, default=8 if gpu else 2, help="of queries")
    parser.add_argument("--key-heads", type=int, default=2 if gpu else 1, help="of keys")
    parser.add_argument("--head-width", type=int, choices=(64, 128), default=64, help="H = h")
    parser.add_argument(
        "--implementation", choices=IMPLEMENTATIONS, default="auto", help="auto: the fastest here"
    )
    parser.add_argument(
        "--compare",
        nargs="?",
        const="mosaic_gpu" if gpu else "jax.nn",
        help="implementations, separated by commas, to train beside xla",
    )
    reporting.add_results(parser)
    options = parser.parse_args(argv)
    model = Model(options.layers, options.heads, options.key_heads, options.head_width)
    names = [options.implementation]
    if options.compare:
        names = ["float32", "xla", *options.compare.split(",")]
        if unknown := {*names[1:]} - {*IMPLEMENTATIONS}:
            parser.error(f"unknown: {', '.join(sorted(unknown))}")

    shape = f"{model.layers} layers, {model.heads}/{model.key_heads} heads of {model.head_width}"
    measured = reporting.provenance()
    print(f"{reporting.where(measured)}: {shape}, {options.batch} x {options.length} bytes a step")
    auto = ran(model, options.batch, options.length)
    if "auto" in names:
        print(f"auto runs on {auto}")
    curves, seconds = {}, {}
    for name in names:
        curves[name], seconds[name] = train(
            name, model, options.steps, options.batch, options.length
        )

    print("\nloss, nats a byte\n" + "step".rjust(8) + "".join(name.rjust(12) for name in names))
    for step in sorted({*range(0, options.steps, max(1, options.steps // 10)), options.steps - 1}):
        print(f"{step:8}" + "".join(f"{curves[name][step]:12.4f}" for name in names))
    for name in names:
        rate = options.batch * options.length / seconds[name]
        print(f"{name}: {1e3 * seconds[name]:.1f} ms a step, {rate:,.0f} bytes a second")
    if not options.compare:
        return 0
    for name in names[2:]:
        apart = np.max(np.abs(curves[name] - curves["xla"]))
        print(f"largest difference of {name} and xla: {apart:.4f} nats")
    wrong = disagreement(curves)
    print(wrong or "The curves agree to within rounding.")
    record = measured | {
        "auto": auto,
        "model": dataclasses.asdict(model),
        "batch": options.batch,
        "length": options.length,
        "seconds": seconds,
        "losses": {name: losses.tolist() for name, losses in curves.items()},
    }
    title = " ".join(["train lm", *names[2:]])
    print(f"written: {reporting.write(options.results, title, record)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
