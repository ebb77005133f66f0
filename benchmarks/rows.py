"""Shapes of attention that `benchmarks.attention` times: one row each, and rows drawn at random."""

import dataclasses
import itertools
import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# How many products of a pass have the query's width, and how many the value's.
PASSES = {"forward": (1, 1), "backward": (3, 2), "both": (4, 3)}

# What XLA is asked to hold at most: 8 GiB in float32, some of them at a time.
XLA_LOGITS = 2**31


@dataclasses.dataclass(frozen=True)
class Row:
    """One shape: query `[batch, length, heads, width]`, key and value with key_heads.

    Attributes:
      window: None, or how many keys before its own a query sees, and after it if not causal.
      documents: None, or how many the batch entry is packed of; needs causal, a batch of 1 and no
        window. Their lengths are random.
      value_width: of values and output; as width if it is 0.
      drawn_in: dtype that inputs are drawn in, before they are rounded to dtype. A bf16 normal
        distribution has 128 values, which are not symmetric, and rounding them to FP8 not either.
      key_length: of keys and values; as length if it is 0, and so under a causal mask or a window.
      soft_cap: None, or that of the logits.
      padding: "", or how candidates are told that batch entries end before key_length: by "lengths"
        or by a "mask" `[B, 1, 1, S]`. Not causal and no window.
      biased: whether there is a bias `[1, N, T, S]`; it has a gradient like the others.
      dtype: of all inputs.
      title: "", or what the row is; without it, heads go unsaid where there are 2048 columns.
    """

    batch: int
    length: int
    heads: int
    key_heads: int
    width: int
    causal: bool
    window: int | None = None
    documents: int | None = None
    value_width: int = 0
    drawn_in: str = "bfloat16"
    key_length: int = 0
    soft_cap: float | None = None
    padding: str = ""
    biased: bool = False
    dtype: str = "bfloat16"
    title: str = ""

    @property
    def name(self) -> str:
        lengths = f"s{self.length}"
        if self.key_length:
            lengths = f"t{self.length} s{self.key_length}"
        grouped = "" if self.heads == self.key_heads else f" {self.heads}/{self.key_heads} heads"
        if self.title and not grouped:
            grouped = f" {self.heads} heads"
        mask = "causal" if self.causal else "full"
        if self.window is not None:
            mask += f" window {self.window}"
        if self.documents is not None:
            mask += f" {self.documents} documents"
        if self.soft_cap is not None:
            mask += f" cap {self.soft_cap:g}"
        mask += {"": "", "lengths": " key lengths", "mask": " mask [B, 1, 1, S]"}[self.padding]
        if self.biased:
            mask += " bias [1, N, T, S]"
        if self.dtype != "bfloat16":
            mask += f" {self.dtype}"
        widths = f"H{self.width}" + (f"/{self.value_width}" if self.value_width else "")
        title = f"{self.title}: " if self.title else ""
        return f"{title}b{self.batch} {lengths}{grouped} {widths} {mask}"

    @property
    def document_lengths(self) -> tuple[int, ...] | None:
        if self.documents is None:
            return None
        positions = np.random.default_rng(0).permutation(self.length - 1) + 1
        ends = [0, *sorted(positions[: self.documents - 1].tolist()), self.length]
        return tuple(end - start for start, end in itertools.pairwise(ends))

    @property
    def key_lengths(self) -> list[int]:
        """The keys of each batch entry that are no padding."""
        keys = self.key_length or self.length
        if not self.padding:
            return [keys] * self.batch
        drawn = np.random.default_rng(0).integers(keys // 2, keys, self.batch, endpoint=True)
        return drawn.tolist()

    @property
    def mask(self) -> dict[str, Any]:
        """What candidates are told of the mask and the soft cap, beside `arrays`."""
        more: dict[str, Any] = {
            "window": self.window,
            "documents": self.document_lengths,
            "logits_soft_cap": self.soft_cap,
        }
        return {"causal": self.causal} | {k: v for k, v in more.items() if v is not None}

    @property
    def arrays(self) -> list[str]:
        """What candidates are told in arrays: names of those that follow the first four inputs.

        They are those of `jax_flash.attention`, as `jax.nn.dot_product_attention` has them too.
        """
        padding = {"": [], "lengths": ["key_value_seq_lengths"], "mask": ["mask"]}[self.padding]
        return [*padding, *(["bias"] if self.biased else [])]

    @property
    def gradients(self) -> tuple[str, ...]:
        """Those of `arrays` that have a gradient."""
        return ("bias",) if self.biased else ()

    def named(self, more: Sequence[jax.Array]) -> dict[str, jax.Array]:
        """The inputs from the fifth on, by the names of `arrays`."""
        return dict(zip(self.arrays, more, strict=True))

    def flops(self, passes: str) -> float:
        of_width, of_value_width = PASSES[passes]
        columns = of_width * self.width + of_value_width * (self.value_width or self.width)
        return 2 * self.heads * columns * self._pairs()

    def _pairs(self) -> float:
        """Pairs of a query and a key that it sees, for each head; half of all if causal."""
        if self.window is not None:
            seen = min(self.window, self.length - 1) + 1
            before = seen * (self.length - seen) + seen * (seen + 1) / 2
            return self.batch * (before if self.causal else 2 * before - self.length)
        if self.document_lengths is not None:
            return sum(length * (length + 1) for length in self.document_lengths) / 2
        return self.length * sum(self.key_lengths) * (0.5 if self.causal else 1)

    def inputs(self) -> tuple[jax.Array, ...]:
        """Query, key, value and the cotangent of the output, random, and then `arrays`."""
        value_width = self.value_width or self.width
        key_length = self.key_length or self.length
        queries = (self.batch, self.length, self.heads)
        keys = (self.batch, key_length, self.key_heads)
        names = jax.random.split(jax.random.key(0), 4)
        shapes = (
            (*queries, self.width),
            (*keys, self.width),
            (*keys, value_width),
            (*queries, value_width),
        )
        first = tuple(
            jax.random.normal(name, shape, self.drawn_in).astype(self.dtype)
            for name, shape in zip(names, shapes, strict=True)
        )
        lengths = jnp.asarray(self.key_lengths, jnp.int32)
        make = {
            "key_value_seq_lengths": lambda: lengths,
            "mask": lambda: (jnp.arange(key_length) < lengths[:, None])[:, None, None],
            "bias": lambda: jax.random.normal(
                jax.random.key(1), (1, self.heads, self.length, key_length), self.dtype
            ),
        }
        return (*first, *(make[name]() for name in self.arrays))


# --- rows drawn at random ------------------------------------------------------------------------

# What a row may have at most: some 8 ms of an H200, forward and backward, at 500 TFLOP/s, and some
# 0.2 ms of reading query, key, value and output.
_FLOPS = 4e12
_BYTES = 2**30
# 64 and 128 are what most models have.
_WIDTHS = (24, 32, 40, 64, 64, 64, 72, 80, 96, 128, 128, 128, 192, 256)


def drawn(seed: int, count: int) -> list[Row]:
    """Rows of shapes that models may have; those of a smaller count are the first of a larger."""
    fitting = filter(None, _draws(random.Random(seed)))
    return [
        dataclasses.replace(row, title=f"random {seed}/{i}")
        for i, row in enumerate(itertools.islice(fitting, count))
    ]


def _draws(rng: random.Random) -> Iterator[Row | None]:
    """Rows as they are drawn, None for one that is too large even with a batch of 1."""
    while True:
        length, key_length = _length(rng), _length(rng)
        is_self = rng.random() < 2 / 3
        causal = is_self and rng.random() < 0.5
        group = 1 if rng.random() < 0.5 else rng.randint(2, 8)
        key_heads = round(_log_uniform(rng, 1, 64 // group))
        row = Row(
            round(_log_uniform(rng, 1, 64)),
            length,
            key_heads * group,
            key_heads,
            rng.choice(_WIDTHS),
            causal,
            key_length=0 if is_self else key_length,
            dtype="float16" if rng.random() < 0.25 else "bfloat16",
        )
        yield _fitting(row)


def _fitting(row: Row) -> Row | None:
    """The row with as much of its batch as the limits leave."""
    one = dataclasses.replace(row, batch=1)
    keys = 2 * row.key_heads * (row.key_length or row.length)
    of_one = 2 * row.width * (2 * row.heads * row.length + keys)
    batch = min(row.batch, int(_FLOPS / one.flops("both")), _BYTES // of_one)
    return dataclasses.replace(row, batch=batch) if batch else None


def _length(rng: random.Random) -> int:
    """64 to 18,000; a third of them any number, the others multiples of 8 or 128."""
    multiple = rng.choice((1, 8, 128))
    return max(64, int(_log_uniform(rng, 64, 18000)) // multiple * multiple)


def _log_uniform(rng: random.Random, low: float, high: float) -> float:
    return math.exp(rng.uniform(math.log(low), math.log(high)))
