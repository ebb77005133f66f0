"""Rows of benchmarks.attention whose mask or score is a function, and who takes part in them.

Beside the peers stand two yardsticks, both ours. "plain" is the same call without the function: a
mask should cost its time by the share of blocks that are not empty. "built-in" says the same by
arguments, where there are some. `Variant` says how near to them a row should come.
"""

import dataclasses
import functools
import importlib.util
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

import jax_flash
from benchmarks import flex, reporting, timing
from benchmarks.rows import XLA_LOGITS, Row

PLAIN, BUILT_IN, FLEX = "plain", "built-in", "FlexAttention"
YARDSTICKS = (PLAIN, BUILT_IN)


@dataclasses.dataclass(frozen=True)
class Variant:
    """Attention with functions, and what it should cost.

    Attributes:
      functions: mask_mod and score_mod, of `jax.numpy` or `torch`, of the length, and of what they
        capture. Both libraries have their operators and methods.
      captured: arrays by name, of a row.
      gradients: those of them whose gradient is taken too.
      built_in: of the length and these arrays, arguments of `jax_flash.attention` that say the
        same.
      is_dense: whether "jax_flash" is given the mask as an array `[B, 1, T, S]`.
      over_plain: what it may take, of the time of "plain" by the share of blocks: forward, and
        forward and backward.
      over_built_in: of the time of "built-in".
      flex_over_ours: what FlexAttention should take at least, of our time.
    """

    functions: Callable[..., dict[str, Callable]]
    captured: Callable[[Row], dict[str, np.ndarray]] = lambda row: {}
    gradients: tuple[str, ...] = ()
    built_in: Callable[..., dict[str, Any]] | None = None
    is_dense: bool = False
    over_plain: tuple[float, float] | None = None
    over_built_in: float | None = None
    flex_over_ours: float | None = None


# --- the functions -------------------------------------------------------------------------------


def _causal(xp, length):
    return dict(mask_mod=lambda b, h, q, k: k <= q)


def _prefix_lm(xp, length):
    return dict(mask_mod=lambda b, h, q, k: (k < length // 4) | (k <= q))


def _block_diffusion(xp, length):
    """Noisy tokens in blocks, before the same ones clean."""
    half, size = length // 2, min(32, length // 8)

    def mask_mod(b, h, q, k):
        q_block, k_block = q % half // size, k % half // size
        is_own = ((q < half) == (k < half)) & (q_block == k_block)
        return is_own | ((k >= half) & (k_block < q_block))

    return dict(mask_mod=mask_mod)


def _dilated(xp, length):
    return dict(mask_mod=lambda b, h, q, k: (k <= q) & ((q - k) % 4 == 0))


def _image(xp, length):
    """Pixels of a square, row by row, see 13 by 13 around them."""
    side = int(length**0.5)

    def mask_mod(b, h, q, k):
        return (abs(q // side - k // side) <= 6) & (abs(q % side - k % side) <= 6)

    return dict(mask_mod=mask_mod)


def _documents(xp, length, ids):
    return dict(mask_mod=lambda b, h, q, k: (k <= q) & (ids[b, q] == ids[b, k]))


def _documents_and_window(xp, length, ids):
    def mask_mod(b, h, q, k):
        return (k <= q) & (q - k < length // WINDOWS) & (ids[b, q] == ids[b, k])

    return dict(mask_mod=mask_mod)


def _alibi(xp, length, slopes):
    return dict(score_mod=lambda score, b, h, q, k: score - slopes[h] * (q - k))


def _t5(xp, length, table):
    def score_mod(score, b, h, q, k):
        return score + table[(k - q).clip(-FARTHEST, FARTHEST) + FARTHEST, h]

    return dict(score_mod=score_mod)


def _soft_cap(xp, length):
    return dict(score_mod=lambda score, b, h, q, k: CAP * xp.tanh(score / CAP))


def _tanh_gate(xp, length, gate):
    return dict(score_mod=lambda score, b, h, q, k: score * xp.tanh(gate[h]))


CAP = 30.0
WINDOWS = 16  # in the length
FARTHEST = 128  # T5 has one bias for all that is farther


def _ids(row: Row) -> dict[str, np.ndarray]:
    lengths = row.document_lengths
    assert lengths is not None
    return dict(ids=np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)[None])


def _normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def _packed(length: int, ids, windows: int | None = None) -> dict[str, Any]:
    reach = None if windows is None else (length // windows - 1, 0)
    ids = dict(query_segment_ids=ids, key_value_segment_ids=ids)
    return dict(is_causal=True, local_window_size=reach, **ids)


_BY_BLOCKS: dict[str, Any] = dict(over_plain=(1.15, 1.15), flex_over_ours=1.3)

VARIANTS: dict[str, Variant] = {
    "causal": Variant(_causal, built_in=lambda length: dict(is_causal=True), over_built_in=1.03),
    "causal as an array": Variant(
        _causal, built_in=lambda length: dict(is_causal=True), is_dense=True, over_built_in=1.15
    ),
    "prefix LM": Variant(_prefix_lm, **_BY_BLOCKS),
    "block diffusion": Variant(_block_diffusion, **_BY_BLOCKS),
    "dilated": Variant(_dilated, **_BY_BLOCKS),
    "image": Variant(_image, **_BY_BLOCKS),
    "documents": Variant(_documents, _ids, built_in=_packed, **_BY_BLOCKS),
    "documents and window": Variant(
        _documents_and_window,
        _ids,
        built_in=functools.partial(_packed, windows=WINDOWS),
        **_BY_BLOCKS,
    ),
    "ALiBi": Variant(
        _alibi,
        lambda row: dict(slopes=np.exp2(-8 / row.heads * np.arange(1, row.heads + 1, dtype="f"))),
        over_plain=(1.08, 1.08),
    ),
    "T5": Variant(
        _t5,
        lambda row: dict(table=_normal(2 * FARTHEST + 1, row.heads)),
        gradients=("table",),
        over_plain=(1.25, 1.6),
    ),
    "soft cap": Variant(
        _soft_cap, built_in=lambda length: dict(logits_soft_cap=CAP), over_built_in=1.0
    ),
    "tanh gate": Variant(
        _tanh_gate, lambda row: dict(gate=_normal(row.heads)), gradients=("gate",)
    ),
}

# --- rows ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class FunctionRow(Row):
    """A row with functions.

    Attributes:
      variant: which of VARIANTS.
      causal: whether `is_causal` says so beside the function; without it all pairs are visible.
    """

    variant: str = ""

    @property
    def of(self) -> Variant:
        return VARIANTS[self.variant]

    @property
    def name(self) -> str:
        mask = " is_causal" if self.causal else ""
        sizes = f"b{self.batch} s{self.length} {self.heads} heads H{self.width}"
        return f"{self.variant}: {sizes}{mask}"

    @property
    def mask(self) -> dict[str, Any]:
        return {"row": self}

    @property
    def plain(self) -> Row:
        """Without the functions."""
        return Row(self.batch, self.length, self.heads, self.key_heads, self.width, self.causal)

    @property
    def has_mask(self) -> bool:
        return "mask_mod" in self.functions(jnp, self.of.captured(self))

    @property
    def arrays(self) -> list[str]:
        """What is captured, and "dense", the mask as an array, for those that have no mask_mod."""
        return [*self.of.captured(self), *(["dense"] if self.has_mask else [])]

    @property
    def gradients(self) -> tuple[str, ...]:
        return self.of.gradients

    def functions(self, xp: Any, captured: dict[str, Any]) -> dict[str, Callable]:
        """mask_mod and score_mod, where there are such, of `jax.numpy` or `torch`."""
        return self.of.functions(xp, self.length, **captured)

    def captured(self) -> dict[str, jax.Array]:
        return {name: jnp.asarray(x) for name, x in self.of.captured(self).items()}

    def inputs(self) -> tuple[jax.Array, ...]:
        dense = [_dense(self)] if self.has_mask else []
        return (*self.plain.inputs(), *self.captured().values(), *dense)

    def _pairs(self) -> float:
        return _visible_pairs(self) if self.has_mask else super()._pairs()


@functools.partial(jax.jit, static_argnums=0)
def _dense(row: FunctionRow) -> jax.Array:
    """The mask, bool `[B, 1, T, S]`; 1 for B where it is the same for all and need not be whole."""
    mask_mod = row.functions(jnp, row.captured())["mask_mod"]
    entry = jnp.arange(row.batch).reshape(-1, 1, 1, 1)
    place = jnp.arange(row.length, dtype=jnp.int32)
    visible = mask_mod(entry, 0, place[:, None], place)
    return jnp.broadcast_to(visible, (row.batch if row.of.is_dense else 1, 1, *visible.shape[-2:]))


@functools.lru_cache(64)
def _visible_pairs(row: FunctionRow) -> float:
    dense = _dense(row)
    return row.batch / dense.shape[0] * float(dense.sum())


@functools.lru_cache(64)
def blocks(row: FunctionRow) -> jax_flash.BlockMask:
    """Of its mask_mod, which is the same for all heads, and batch entries where there are more."""
    with jax.ensure_compile_time_eval():  # also where a call is traced that takes them
        mask_mod = row.functions(jnp, row.captured())["mask_mod"]
    return jax_flash.block_mask(mask_mod, 1, 1, row.length, row.length)


def share(row: FunctionRow) -> float:
    """Of blocks that are not empty, of those of "plain"."""
    return blocks(row).share if row.has_mask else 1.0


def _suite(width: int) -> list[Row]:
    """16 heads: short rows, of which "plain" is causal too where a score alone is a function."""
    short = functools.partial(FunctionRow, 4, 4096, 16, 16, width)
    long = functools.partial(FunctionRow, 1, 16384, 16, 16, width, False)
    return [
        short(False, variant="causal"),
        short(False, variant="causal as an array"),
        *(long(variant=name) for name in ("prefix LM", "block diffusion", "dilated", "image")),
        *(long(variant=name, documents=16) for name in ("documents", "documents and window")),
        *(short(True, variant=name) for name in ("ALiBi", "soft cap", "tanh gate")),
        short(False, variant="T5"),
    ]


SUITES: dict[str, list[Row]] = {
    "functions": _suite(128),
    "functions-64": _suite(64),
    # Small enough for a CPU.
    "functions-small": [
        dataclasses.replace(
            row, batch=2 if row.batch > 1 else 1, length=256, heads=2, key_heads=2, width=16
        )
        for row in _suite(16)
    ],
}

# --- candidates ----------------------------------------------------------------------------------


def _ours(implementation: str) -> Callable:
    """With a `BlockMask`, made beforehand."""

    def attention(query, key, value, row: FunctionRow, dense=None, **captured):
        options: dict[str, Any] = row.functions(jnp, captured)
        if row.of.is_dense:
            options = dict(mask=dense)
        elif "mask_mod" in options:
            options["mask_mod"] = blocks(row)
        return _attention(implementation, query, key, value, row, **options)

    return attention


def _attention(implementation: str | None, query, key, value, row: FunctionRow, **options):
    if implementation is None:
        implementation = "mosaic_gpu" if timing.on_gpu() else "xla"
    named: dict[str, Any] = dict(is_causal=row.causal, implementation=implementation)
    return jax_flash.attention(query, key, value, **(named | options))


def _plain(query, key, value, row: FunctionRow, **arrays):
    return _attention(None, query, key, value, row)


def _built_in(query, key, value, row: FunctionRow, dense=None, **captured):
    assert row.of.built_in is not None
    return _attention(None, query, key, value, row, **row.of.built_in(row.length, **captured))


def _jax_nn(implementation: Literal["cudnn", "xla"]) -> Callable:
    def attention(query, key, value, row: FunctionRow, dense=None, **captured):
        if dense is None:
            raise NotImplementedError("jax.nn has no function of a score")
        if implementation == "xla" and row.batch * row.heads * row.length**2 > XLA_LOGITS:
            raise NotImplementedError("logits [B, N, T, S] take too much memory")
        return jax.nn.dot_product_attention(
            query, key, value, mask=dense, implementation=implementation
        )

    return attention


def _in_torch(row: Row, torch: Any, arrays: dict[str, Any]) -> dict[str, Callable]:
    assert isinstance(row, FunctionRow)
    captured = dict(arrays)
    dense = captured.pop("dense", None)
    functions = row.functions(torch, captured)
    if row.of.is_dense:
        functions["mask_mod"] = lambda b, h, q, k: dense[b, 0, q, k]
    if row.causal:
        functions |= _causal(torch, row.length)
    return functions


CANDIDATES: dict[str, Callable | flex.FlexAttention] = {
    "jax_flash": _ours("mosaic_gpu"),
    "jax_flash xla": _ours("xla"),
    PLAIN: _plain,
    BUILT_IN: _built_in,
    FLEX: flex.FlexAttention(_in_torch),
    f"{FLEX} tuned": flex.FlexAttention(_in_torch, mode="max-autotune-no-cudagraphs"),
    "cuDNN": _jax_nn("cudnn"),
    "jax.nn xla": _jax_nn("xla"),
}


def default_candidates() -> list[str]:
    if not timing.on_gpu():
        return ["jax_flash xla", *YARDSTICKS, "jax.nn xla"]
    torch = [FLEX] if importlib.util.find_spec("torch") else []
    return ["jax_flash", *YARDSTICKS, *torch, "cuDNN"]


def takes_part(candidate: str, row: Row) -> bool:
    """False for "built-in" where no argument says the same."""
    return candidate != BUILT_IN or not isinstance(row, FunctionRow) or bool(row.of.built_in)


# --- results -------------------------------------------------------------------------------------


# To find the fastest matmul for each shape would take longer than these are used.
@functools.partial(jax.jit, static_argnums=0, compiler_options={"xla_gpu_autotune_level": 0})
@jax.default_matmul_precision("highest")
def expected(row: FunctionRow, inputs: tuple) -> tuple[jax.Array, ...]:
    """Output and gradients in float32: dense, head by head, by the functions of whole arrays."""
    query, key, value, dout, *more = inputs
    captured = row.named(more)
    captured.pop("dense", None)
    wanted = {name: captured.pop(name) for name in row.gradients}
    place = jnp.arange(row.length, dtype=jnp.int32)

    def attend(entry, head, query, key, value, wanted):
        indices = entry, head, place[:, None], place
        functions = row.functions(jnp, captured | wanted)
        logits = row.width**-0.5 * query @ key.T
        if "score_mod" in functions:
            logits = functions["score_mod"](logits, *indices)
        visible = jnp.bool_(True)
        if "mask_mod" in functions:
            visible = functions["mask_mod"](*indices)
        if row.causal:
            visible &= place <= place[:, None]
        return jax.nn.softmax(jnp.where(visible, logits, -jnp.inf)) @ value

    def of_head(arrays):
        entry, head, *arrays, dout = arrays
        out, vjp = jax.vjp(functools.partial(attend, entry, head), *arrays, wanted)
        return out, *vjp(dout)

    def heads_first(x):
        return x.astype(jnp.float32).transpose(0, 2, 1, 3).reshape(-1, row.length, row.width)

    def heads_third(x):
        return x.reshape(row.batch, row.heads, row.length, -1).transpose(0, 2, 1, 3)

    entries, heads = jnp.divmod(jnp.arange(row.batch * row.heads, dtype=jnp.int32), row.heads)
    arrays = entries, heads, *map(heads_first, (query, key, value, dout))
    *of_rows, of_captured = jax.lax.map(of_head, arrays)
    return *map(heads_third, of_rows), *(x.sum(0) for x in of_captured.values())


@dataclasses.dataclass(frozen=True)
class Bar:
    """A ratio of two times, and what it should be; None where nothing is asked of it."""

    ratio: float
    at_most: float | None = None
    at_least: float | None = None

    def __str__(self) -> str:
        sign, bar = ("<=", self.at_most) if self.at_least is None else (">=", self.at_least)
        wanted = "" if bar is None else f" ({sign} {bar:g})"
        return f"{self.ratio:.2f}{wanted}{'' if self.is_met else ' missed'}"

    @property
    def is_met(self) -> bool:
        """To two decimals, as it is printed."""
        ratio = round(self.ratio, 2)
        return ratio <= (self.at_most or math.inf) and ratio >= (self.at_least or 0)


def bars(result: dict, row: FunctionRow) -> dict[str, Bar]:
    """How near ours comes to what it should take, in a result of `attention.measure`."""
    entries, variant = result["candidates"], row.of
    times = {n: e["milliseconds"]["mean"] for n, e in entries.items() if "milliseconds" in e}
    ours = times.get("jax_flash") or times.get("jax_flash xla")
    if not ours:
        return {}
    passes = ("forward", "both")
    over_plain = dict(zip(passes, variant.over_plain or (None, None), strict=True))
    found = {}
    if plain := times.get(PLAIN):
        at_most = over_plain.get(result["passes"])
        found[f"over {PLAIN} x share"] = Bar(ours / (plain * share(row)), at_most)
    if built_in := times.get(BUILT_IN):
        found[f"over {BUILT_IN}"] = Bar(ours / built_in, variant.over_built_in)
    if flex_time := times.get(FLEX):
        found[f"{FLEX} over ours"] = Bar(flex_time / ours, at_least=variant.flex_over_ours)
    return found


def summarize(results: Sequence[dict], rows: Sequence[Row]) -> list[dict]:
    """Of each result its row, passes, the share of blocks, and `bars`, as a record has them."""
    by_name = {row.name: row for row in rows if isinstance(row, FunctionRow)}
    found = []
    for result in results:
        row = by_name[result["row"]]
        summary = {"row": row.name, "passes": result["passes"], "share": share(row)}
        each = {name: dataclasses.asdict(bar) for name, bar in bars(result, row).items()}
        found.append(summary | {"bars": each})
    return found


def table(summary: Sequence[dict]) -> str:
    """What `summarize` finds."""
    names = list(dict.fromkeys(name for line in summary for name in line["bars"]))
    lines = [["shape", "passes", "share of blocks", *names]]
    for line in summary:
        found = {name: str(Bar(**bar)) for name, bar in line["bars"].items()}
        cells = [found.get(name, "-") for name in names]
        lines.append([line["row"], line["passes"], f"{line['share']:.3f}", *cells])
    return reporting.markdown(lines)
