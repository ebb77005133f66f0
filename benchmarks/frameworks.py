"""Training steps of other libraries' models, before and after: `python -m benchmarks.frameworks`.

    vit   Equimo's vision transformer, in the sizes of SigLIP 2's ViT-L/16 at 384 pixels
    dit   FlaxDiff's diffusion transformer, in the sizes of DiT-XL/2 at latents of 64 x 64

Candidates, all in bfloat16 with float32 weights and AdamW:

    before     the library's own attention, which XLA compiles
    cuDNN      jax.nn.dot_product_attention with implementation="cudnn"; on a GPU only
    jax_flash  with `jax_flash.install()`

All train a few steps from the same weights on the same data, and fail if their losses, or the
gradients of the first step, differ by more than bf16 rounding makes. Then steps are timed in turns,
by the clock. Without a GPU the sizes are small.
"""

import contextlib
import dataclasses
import functools
import importlib.metadata
import importlib.util
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import jax_flash
from benchmarks import reporting, timing

CANDIDATES = ("before", "cuDNN", "jax_flash")
NEEDS = {"vit": "equimo", "dit": "flaxdiff"}
PACKAGES = (*NEEDS.values(), "equinox", "flax", "optax")
STEPS = 5  # whose losses are compared

# Relative. bf16 keeps 8 bits, and a loss is a mean of much that was rounded. A wrong mask or scale
# changes it little, but gradients of some weights by a third and more: the worst of them counts.
TOLERANCES = {"losses": 2.0**-8, "gradients": 2.0**-2}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of a transformer: `side` is that of an image or a latent, in pixels."""

    layers: int
    heads: int
    width: int
    side: int
    patch: int
    batch: int

    @property
    def tokens(self) -> int:
        return (self.side // self.patch) ** 2


LARGE = {"vit": Sizes(24, 16, 1024, 384, 16, 32), "dit": Sizes(28, 16, 1152, 64, 2, 8)}
SMALL = {"vit": Sizes(1, 2, 64, 32, 8, 2), "dit": Sizes(1, 2, 64, 16, 2, 2)}

# Weights, and a loss of weights and of a candidate's name.
Task = tuple[Any, Callable[[Any, str], jax.Array]]


def noisy(weights: Any) -> Any:
    """Gates and last layers begin as zeros, which would hide attention.

    With more noise than this the logits of the diffusion transformer differ by 60 in a row, unlike
    those of any trained model.
    """
    leaves, tree = jax.tree.flatten(weights)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    noise = (jax.random.normal(key, x.shape) for key, x in zip(keys, leaves, strict=True))
    spread = (0.25 * max(x.shape[-2:]) ** -0.5 if x.ndim > 1 else 0.005 for x in leaves)
    return jax.tree.unflatten(
        tree, [x + n * s for x, n, s in zip(leaves, noise, spread, strict=True)]
    )


def vit(sizes: Sizes) -> Task:
    """Classifies images of noise, 1000 classes, from the mean over all patches."""
    import equinox as eqx
    from equimo.core.layers.attention import with_attention_implementation
    from equimo.vision.models.vit import VisionTransformer

    model = VisionTransformer(
        img_size=sizes.side,
        in_channels=3,
        dim=sizes.width,
        patch_size=sizes.patch,
        num_heads=sizes.heads,
        depths=[sizes.layers],
        class_token=False,
        reg_tokens=0,
        global_pos_embed_cls=False,
        num_classes=1000,
        key=jax.random.key(0),
    )
    arrays, rest = eqx.partition(model, eqx.is_inexact_array)
    weights, tree = jax.tree.flatten(arrays)
    keys = jax.random.split(jax.random.key(2))
    shape = (sizes.batch, 3, sizes.side, sizes.side)
    images = jax.random.normal(keys[0], shape, jnp.bfloat16)
    labels = jax.random.randint(keys[1], (sizes.batch,), 0, 1000)

    def loss(weights: Any, candidate: str) -> jax.Array:
        weights = [w.astype(jnp.bfloat16) for w in weights]
        model = eqx.combine(jax.tree.unflatten(tree, weights), rest)
        if candidate != "before":  # what is jax.nn's, and so what install() replaces
            model = with_attention_implementation(model, "cudnn")
        logits = jax.vmap(functools.partial(model, inference=True))(images)
        likelihood = jax.nn.log_softmax(logits.astype(jnp.float32))
        return -jnp.take_along_axis(likelihood, labels[:, None], axis=1).mean()

    return noisy(weights), loss


def dit(sizes: Sizes) -> Task:
    """Finds the direction from latents to noise, as in rectified flow."""
    from flaxdiff.models.simple_dit import SimpleDiT

    model = SimpleDiT(
        output_channels=4,
        patch_size=sizes.patch,
        emb_features=sizes.width,
        num_layers=sizes.layers,
        num_heads=sizes.heads,
        dtype=jnp.bfloat16,
    )
    keys = jax.random.split(jax.random.key(2), 3)
    shape = (sizes.batch, sizes.side, sizes.side, 4)
    latents, noise = (jax.random.normal(key, shape, jnp.bfloat16) for key in keys[:2])
    times = jax.random.uniform(keys[2], (sizes.batch,))
    t = times[:, None, None, None]
    mixed = ((1 - t) * latents + t * noise).astype(jnp.bfloat16)

    def loss(weights: Any, candidate: str) -> jax.Array:
        del candidate  # Linen's attention is what is replaced
        out = model.apply(weights, mixed, times)
        return ((out.astype(jnp.float32) - (noise - latents).astype(jnp.float32)) ** 2).mean()

    return noisy(model.init(jax.random.key(0), mixed, times)), loss


MODELS = {"vit": vit, "dit": dit}


@contextlib.contextmanager
def in_force(candidate: str):
    """Puts a candidate in the place of what the models call."""
    if candidate == "jax_flash":
        with jax_flash.install():
            yield
    elif candidate == "cuDNN":
        with mock.patch("flax.linen.dot_product_attention", cudnn_for_linen):
            yield
    else:
        yield


def cudnn_for_linen(query, key, value, *, dtype=None, **_):
    query, key, value = (x.astype(dtype) for x in (query, key, value))
    return jax.nn.dot_product_attention(query, key, value, implementation="cudnn")


def optimizer() -> Any:
    import optax

    return optax.adamw(1e-4)


def compiled_step(loss: Callable, weights: Any, candidate: str) -> Callable:
    """One step of training, compiled: weights and state, which it takes over, and the loss.

    Raises:
      RuntimeError: jax_flash is not what the model calls, or is where it should not be.
    """
    import optax

    adamw = optimizer()

    def step(weights, state):
        value, gradients = jax.value_and_grad(loss)(weights, candidate)
        updates, state = adamw.update(gradients, state, weights)
        return optax.apply_updates(weights, updates), state, value

    with in_force(candidate):
        state = jax.eval_shape(adamw.init, weights)
        traced = jax.jit(step, donate_argnums=(0, 1)).trace(weights, state)
        is_ours = jax_flash.CHECKPOINT_NAMES[0] in str(traced.jaxpr)
        if is_ours != (candidate == "jax_flash"):
            raise RuntimeError(
                f"{candidate}: the model {'calls' if is_ours else 'misses'} jax_flash"
            )
        return traced.lower().compile()


def started(weights: Any) -> tuple[Any, Any]:
    """Copies of weights, and the state of their optimiser: a step takes both over."""
    return jax.tree.map(jnp.copy, weights), jax.jit(optimizer().init)(weights)


def train(step: Callable, weights: Any, steps: int) -> tuple[list[float], list[np.ndarray]]:
    """The loss of every step, before its update, and the gradients of the first."""
    weights, state = started(weights)
    losses, gradients = [], []
    for i in range(steps):
        weights, state, value = step(weights, state)
        losses.append(float(value))
        if i == 0:  # Adam's mean began at 0, so it is a tenth of them
            gradients = jax.device_get(jax.tree.leaves(state[0].mu))
    return losses, gradients


def timed(steps: dict[str, Callable], weights: Any, rounds: int, count: int) -> dict[str, Any]:
    """Milliseconds a step of each candidate, in turns of `count` steps that go on from each other.

    Two rounds in a row are in opposite orders, and each turn begins with a step that is not timed.
    """
    weights, state = started(weights)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds):
        for name in list(steps)[:: -1 if turn % 2 else 1]:
            weights, state, value = steps[name](weights, state)
            jax.block_until_ready(value)
            start = time.perf_counter()
            for _ in range(count):
                weights, state, value = steps[name](weights, state)
            jax.block_until_ready(weights)
            times[name].append(1e3 * (time.perf_counter() - start) / count)
    return {name: timing.Time(statistics.fmean(x), min(x), max(x)) for name, x in times.items()}


def apart(found: Sequence[Any], expected: Sequence[Any]) -> list[float]:
    """Relative distance of each number or array from another.

    Of an array that is 0 but for rounding, as the gradient of a bias of all keys, it is relative to
    a hundredth of what elements of all arrays are like.
    """
    norm = np.linalg.norm
    of_all = norm([norm(y) for y in expected]) / sum(map(np.size, expected)) ** 0.5
    least = [0.01 * of_all * np.size(y) ** 0.5 for y in expected]
    return [
        float(norm(x - y) / max(norm(y), low))
        for x, y, low in zip(found, expected, least, strict=True)
    ]


def disagreement(entries: dict[str, dict[str, Any]]) -> str | None:
    """Why the candidates that ran are not of one function to within rounding, None if they are."""
    if "failed" in entries["jax_flash"]:
        return "jax_flash failed"
    ran = {name: entry for name, entry in entries.items() if "failed" not in entry}
    if len(ran) < 2:
        return "there is nothing to compare jax_flash with"
    first = next(iter(ran))
    for name, entry in ran.items():
        for what, allowed in TOLERANCES.items():
            if not entry[f"{what} apart"] <= allowed:  # NaN too
                distance = entry[f"{what} apart"]
                return f"{what} of {name} and {first}: {distance:.1e} apart, {allowed:.1e} allowed"
    return None


def ran(sizes: Sizes) -> str:
    """The implementation that jax_flash chooses for these sizes."""
    shape = (sizes.batch, sizes.tokens, sizes.heads, sizes.width // sizes.heads)
    array = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    return jax_flash.explain(array, array, array).implementation


def measure(name: str, sizes: Sizes, rounds: int, count: int) -> dict[str, Any]:
    """Sizes, losses and times of one model, by candidate; why one failed, where it did."""
    weights, loss = MODELS[name](sizes)
    entries: dict[str, dict[str, Any]] = {}
    steps: dict[str, Callable] = {}
    first: tuple[Any, Any] | None = None  # losses and gradients of the first that ran
    for candidate in timing.progress(CANDIDATES if timing.on_gpu() else CANDIDATES[::2], name):
        try:
            step = compiled_step(loss, weights, candidate)
            losses, gradients = train(step, weights, STEPS)
        except Exception as e:  # as of memory: the others go on
            entries[candidate] = {"failed": timing.reason(e)}
            continue
        steps[candidate] = step
        first = first or (losses, gradients)
        entries[candidate] = {
            "losses": losses,
            "losses apart": reporting.worst(apart(losses, first[0])),
            "gradients apart": reporting.worst(apart(gradients, first[1])),
        }
    for candidate, taken in timed(steps, weights, rounds, count).items():
        entries[candidate]["milliseconds"] = dataclasses.asdict(taken)
    of = {"model": name, "sizes": dataclasses.asdict(sizes), "jax_flash runs on": ran(sizes)}
    return of | {"candidates": entries}


def table(results: list[dict[str, Any]]) -> list[list[str]]:
    """Milliseconds, and how many times as fast jax_flash is."""
    columns = [*(f"{name}, ms a step" for name in CANDIDATES), "speedup", "speedup over cuDNN"]
    lines = [["model", *columns]]
    for result in results:
        entries = result["candidates"]
        times = [entries.get(x, {}).get("milliseconds", {}).get("mean") for x in CANDIDATES]
        ours = times[-1]
        speedups = [x / ours if x and ours else None for x in times[:-1]]
        cells = [reporting.figure(x, ".1f") for x in times]
        lines.append([result["model"], *cells, *(reporting.figure(x, ".2f") for x in speedups)])
    return lines


def main(argv: list[str] | None = None) -> int:
    gpu = timing.on_gpu()
    default = LARGE if gpu else SMALL
    parser = reporting.parser(__doc__)
    parser.add_argument("--models", default=",".join(MODELS), help="separated by commas")
    for name, sizes in default.items():
        parser.add_argument(f"--{name}-batch", type=int, default=sizes.batch, help=f"of {name}")
    parser.add_argument("--rounds", type=int, default=timing.ROUNDS, help="turns of each")
    parser.add_argument("--steps", type=int, default=10 if gpu else 3, help="in a turn")
    reporting.add_results(parser)
    options = parser.parse_args(argv)
    names = options.models.split(",")
    if unknown := {*names} - {*MODELS}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    if missing := [NEEDS[name] for name in names if importlib.util.find_spec(NEEDS[name]) is None]:
        raise SystemExit(f"{', '.join(missing)} not found: needs the extra models")

    measured = reporting.provenance()
    installed = {x.name.lower(): x.version for x in importlib.metadata.distributions()}
    measured["packages"] = {name: installed.get(name) for name in PACKAGES}
    print(reporting.where(measured))
    results, wrong = [], []
    for name in names:
        batch = getattr(options, f"{name}_batch")
        sizes = dataclasses.replace(default[name], batch=batch)
        result = measure(name, sizes, options.rounds, options.steps)
        results.append(result)
        print(f"\n{name}: {sizes}, {sizes.tokens} tokens; jax_flash runs on {ran(sizes)}")
        for candidate, entry in result["candidates"].items():
            losses = " ".join(f"{x:.4f}" for x in entry.get("losses", ()))
            print(f"{candidate}: {entry.get('failed') or 'losses ' + losses}")
        reason = disagreement(result["candidates"])
        print(reason or "Losses and gradients agree to within rounding.")
        wrong += [reason] if reason else []
    print(f"\n{reporting.markdown(table(results))}")
    record = measured | {"results": results}
    print(f"written: {reporting.write(options.results, 'frameworks', record)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
