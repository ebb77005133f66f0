"""What is asked of kernels: shapes, widths, dtype, what is visible; nothing about registers."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

LOG2E = math.log2(math.e)
SUPPORTED_WIDTHS = range(8, 257, 8)  # TMA takes strides that are multiples of 16 bytes
DROPOUT_STEPS = 1 << 15  # rates are multiples of one over this
_LEAST_SCALE_OF_BEGINNINGS = 2.0**-10


@dataclasses.dataclass(frozen=True)
class Problem:
    """The static part of one attention call: what a kernel is built for.

    Query is `[batch, query_length, heads, width]`, key `[batch, key_length, kv_heads, width]`,
    and value `[batch, key_length, kv_heads, value_width]`. Query i sees keys i + lowest <= j <=
    i + highest, where None is no bound: causal attention has a highest alone, a sliding window
    has both. If it `has_lengths`, the keys of each batch entry end at a length that kernels get
    in an array; if it `has_key_mask`, those that bits say count (`key_masks.py`). Or, if it is
    `dynamic`, it sees an interval of keys that they get so (`intervals.py`). If it is
    `segmented`, it sees only those of them that have its segment id (`segments.py`). Kernels of
    one that `has_mask` or `has_bias` get these as arrays too (`element_arrays.py`). With a soft
    cap, logits with their bias become soft_cap * tanh(logits / soft_cap) before all that hides
    keys. With dropout, kernels get words that say which weights are dropped after the softmax
    (`dropout_words.py`).

    Attributes:
      value_width: as width if it is 0.
      dropout: how many of `DROPOUT_STEPS` weights are dropped.
      mask_function: None, or what hides keys beside the bounds (`mask_functions.MaskFunction`).
        Then tiles have lists of blocks in the place of intervals.
      score_function: None, or what makes logits of scaled products and indices
        (`score_functions.ScoreFunction`); beside it there is neither bias nor soft cap.
    """

    batch: int
    query_length: int
    key_length: int
    heads: int
    kv_heads: int
    width: int
    dtype: np.dtype
    scale: float
    lowest: int | None = None
    highest: int | None = None
    dynamic: bool = False
    has_lengths: bool = False
    has_key_mask: bool = False
    segmented: bool = False
    value_width: int = 0
    has_mask: bool = False
    has_bias: bool = False
    soft_cap: float | None = None
    dropout: int = 0
    mask_function: Any = None
    score_function: Any = None

    def __post_init__(self):
        object.__setattr__(self, "value_width", self.value_width or self.width)
        for name in ("width", "value_width"):
            got = getattr(self, name)
            need(got in SUPPORTED_WIDTHS, name, got, "a multiple of 8, up to 256")
        if self.dynamic:
            bounds = (self.lowest, self.highest)
            need(bounds == (None, None), "lowest, highest", bounds, "None where dynamic")
        if self.picks_keys:
            plain = dataclasses.replace(self, has_lengths=False, has_key_mask=False, has_bias=False)
            may_be = plain.is_plain and not (self.has_bias and self.has_lengths)
            alone = may_be and not self.dynamic and self.lowest is None
            needs = "nothing beside but highest, or has_key_mask a bias"
            need(alone, "has_lengths, has_key_mask", True, needs)
        if self.has_key_mask:
            alone = not self.has_lengths and self.highest is None
            need(alone, "has_key_mask", True, "neither lengths nor highest")
        if self.lowest is not None and self.highest is not None:
            # Then the queries that see any key are an interval, and so are the keys that are seen.
            needs = f"at most highest, {self.highest}"
            need(self.lowest <= self.highest, "lowest", self.lowest, needs)
        needs = f"at least 0 and less than {DROPOUT_STEPS}"
        need(0 <= self.dropout < DROPOUT_STEPS, "dropout", self.dropout, needs)

    @classmethod
    def of(cls, query: jax.Array, key: jax.Array, value: jax.Array, **static: Any) -> "Problem":
        """That of arrays, with all that is not in their shapes."""
        batch, query_length, heads, width = query.shape
        return cls(
            batch=batch,
            query_length=query_length,
            key_length=key.shape[1],
            heads=heads,
            kv_heads=key.shape[2],
            width=width,
            dtype=np.dtype(query.dtype),
            value_width=value.shape[-1],
            **static,
        )

    def with_sizes_of(self, query: jax.Array, key: jax.Array) -> "Problem":
        """The same of arrays of another batch and other heads."""
        (batch, _, heads, _), kv_heads = query.shape, key.shape[2]
        return dataclasses.replace(self, batch=batch, heads=heads, kv_heads=kv_heads)

    @property
    def logit_unit(self) -> float:
        """What kernels count logits in: products of query and key, or tanh with a soft cap."""
        if self.has_score:
            return 1.0
        return self.scale if self.soft_cap is None else self.soft_cap

    @property
    def has_cap(self) -> bool:
        return self.soft_cap is not None

    @property
    def has_score(self) -> bool:
        return self.score_function is not None

    @property
    def has_slope(self) -> bool:
        """Whether products must come alone, as logits are what a cap or a function makes of them.

        Gradients are multiplied with its derivative, unless that is 1.
        """
        return self.has_cap or self.has_score

    @property
    def has_dropout(self) -> bool:
        return self.dropout > 0

    @property
    def beyond_products(self) -> bool:
        """Whether logits are more than products: with a bias, or made by a function."""
        return self.has_bias or self.has_score

    @property
    def unbounded(self) -> bool:
        """Whether logits may be as far from 0 as float32 goes: of these a cap bounds all."""
        return self.beyond_products and not self.has_cap

    @property
    def has_shares(self) -> bool:
        """Whether rows far from 0 have a share in the backward (`far_rows.py`)."""
        return not (self.has_cap or self.has_marks)

    @property
    def has_marks(self) -> bool:
        """Whether they have marks there."""
        return not self.has_cap and (self.beyond_products or self.has_dropout or self.segmented)

    @property
    def bias_shift(self) -> int:
        """By how many powers of 2 a bias far from 0 comes nearer (`element_arrays.compressed`)."""
        lowest = 2  # in log2 units it stays within float32
        if self.scale < _LEAST_SCALE_OF_BEGINNINGS:
            return lowest
        return max(lowest, math.ceil(math.log2(1.0 / self.scale) + 0.6))

    @property
    def may_begin_with_bias(self) -> bool:
        """Whether the bias can be what the products of query and key are added to, over scale."""
        return self.has_bias and self.scale >= _LEAST_SCALE_OF_BEGINNINGS

    @property
    def kept_share(self) -> float:
        """Of weights, by dropout; those that are kept are divided by it."""
        return 1.0 - self.dropout / DROPOUT_STEPS

    @property
    def delta_unit(self) -> float:
        """What backward kernels have delta multiplied with (`dropout.py`)."""
        return 2.0 * self.kept_share if self.dropout else 1.0

    @property
    def d_logit_unit(self) -> float:
        """What the gradients of logits that backward kernels compute must be multiplied with."""
        return 1.0 / self.delta_unit

    @property
    def gradient_factor(self) -> float:
        """What sums of such times keys or queries must be multiplied with, for dQ and dK."""
        return self.scale * self.d_logit_unit

    def kv_head_of(self, head: jax.Array) -> jax.Array:
        """The key head of a query head."""
        return lax.div(head, jnp.int32(self.group))

    @property
    def has_lists(self) -> bool:
        """Whether tiles have lists of blocks (`mask_functions.lists`)."""
        return self.mask_function is not None

    @property
    def has_dense_lists(self) -> bool:
        """Whether lists are those of a dense mask.

        V may be NaN in `forward.py` then, where no query sees it.
        """
        return self.mask_function is not None and self.mask_function.is_dense

    @property
    def has_given_lists(self) -> bool:
        """Whether lists come at run time, for each batch entry and head where these differ."""
        return self.mask_function is not None and self.mask_function.kinds is None

    @property
    def has_intervals(self) -> bool:
        """Whether kernels get intervals as an array."""
        return self.dynamic or self.segmented

    @property
    def has_far_edge(self) -> bool:
        """Whether a query may be without the first keys of those between the first and the last."""
        return (self.by_batch or self.lowest is not None) and not self.has_lists

    @property
    def by_batch(self) -> bool:
        """Whether what a tile needs is known at run time only, for each batch entry."""
        return self.has_intervals or self.has_given_lists

    @property
    def forward_ignores_unseen(self) -> bool:
        """Whether queries that see no key, and keys that none sees, may be NaN in `forward.py`."""
        spills = self.has_dropout and self.widest <= 64
        is_beside = self.segmented or self.has_elements or spills
        return self.picks_keys or (self.dynamic and not is_beside)

    @property
    def backward_ignores_unseen(self) -> bool:
        """Whether they may be NaN in `backward.py` too, of all three gradients."""
        spills = self.has_dropout
        return self.forward_ignores_unseen and self.widest <= 128 and not spills

    @property
    def has_odd_rows(self) -> bool:
        """Whether operands end within the 8 rows that tiles in memory have (`columns.py`)."""
        return self.query_length % 8 > 0 or self.key_length % 8 > 0

    @property
    def is_plain(self) -> bool:
        """Whether there are neither elements, ids, lists, dropout nor a soft cap."""
        beside = self.has_elements, self.segmented, self.has_lists, self.has_dropout, self.has_cap
        return not any(beside)

    @property
    def picks_keys(self) -> bool:
        """Whether which keys of a batch entry count is known at run time only, for all queries."""
        return self.has_lengths or self.has_key_mask

    @property
    def in_intervals(self) -> "Problem":
        """The same where what queries see comes as intervals, for kernels that know no lengths."""
        if not self.has_lengths:
            return self
        return dataclasses.replace(self, has_lengths=False, dynamic=True, highest=None)

    @property
    def has_elements(self) -> bool:
        """Whether anything is known of single pairs of query and key alone."""
        return self.has_mask or self.beyond_products

    @property
    def hides_rows(self) -> bool:
        """Whether it is known at run time only, and of single pairs, that a row sees nothing."""
        return self.has_elements or self.has_given_lists

    @property
    def seeing_queries(self) -> slice:
        """The queries that see any key, as far as is static."""
        first = 0 if self.highest is None else max(0, -self.highest)
        end = self.query_length
        if self.lowest is not None:
            end = min(end, self.key_length - self.lowest)
        return slice(first, max(first, end))

    @property
    def seen_keys(self) -> slice:
        """The keys that any query sees, as far as is static."""
        first = 0 if self.lowest is None else max(0, self.lowest)
        end = self.key_length
        if self.highest is not None:
            end = min(end, self.query_length + self.highest)
        return slice(first, max(first, end))

    @property
    def group(self) -> int:
        """Query heads that share one key head."""
        return self.heads // self.kv_heads

    @property
    def widest(self) -> int:
        """The width of the wider of key and value, in whole tiles."""
        return whole_tiles(max(self.width, self.value_width))

    @property
    def pair_bytes(self) -> int:
        """Of a row of a head's key and value, or of its query and dO."""
        return (self.width + self.value_width) * self.dtype.itemsize

    def query(self) -> jax.ShapeDtypeStruct:
        shape = (self.batch, self.query_length, self.heads, self.width)
        return jax.ShapeDtypeStruct(shape, self.dtype)

    def key(self) -> jax.ShapeDtypeStruct:
        shape = (self.batch, self.key_length, self.kv_heads, self.width)
        return jax.ShapeDtypeStruct(shape, self.dtype)


def sees_itself(lowest: int | None, highest: int | None) -> bool:
    """Whether by `Problem`'s bounds every query sees the key of its own number."""
    return (lowest is None or lowest <= 0) and (highest is None or highest >= 0)


def whole_tiles(width: int) -> int:
    """Columns rounded up to a multiple of 64, by which settings are chosen."""
    return -(-width // 64) * 64


# Columns that are swizzled together, where they are not the 64 that TMA and wgmma like best but do
# without columns of zeros. TFLOP/s* of the forward, b4 s4096 16 heads full, so and with 64: H80 627
# and 504, H96 718 and 600, H160 776 and 670. With 32 H144 604 and 631, H72 336 and 430, where they
# do not divide the width; with 16 H112 540 and 668, as TMA is slow with rows of 32 bytes.
_BOX_WIDTHS = {32: 32, 80: 16, 96: 32, 160: 32, 224: 32}


def box_width(width: int) -> int:
    """Columns of a box of an operand of 16 bits (`columns.py`)."""
    return _BOX_WIDTHS.get(width, 64)


def need(holds: bool, name: str, got, needs: str) -> None:
    if not holds:
        raise ValueError(f"{name}: got {got}, needs {needs}")
