"""The canonical form of one attention call, which every implementation takes.

`api.attention` checks its arguments and makes a `Call`; an implementation is a module with

    unsupported(call) -> str | None     why it cannot do the call, None if it can
    attention(call) -> (out, lse)       out `[B, T, N, h]`, LSE `[B, T, N]` float32, or None where
                                        an implementation without one refuses return_residual
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash.masks import Visibility
from pallas_kernels.config import Config


@dataclasses.dataclass(frozen=True)
class Call:
    """Checked arguments of one attention, always with a batch axis.

    Attributes:
      query: `[B, T, N, H]`.
      key: `[B, S, K, H]`, N a multiple of K; query head n reads key head n // (N // K).
      value: `[B, S, K, h]`.
      visibility: which key may be seen by which query.
      scale: multiplies query.key; a Python float, or a scalar array where the caller traced it.
      bias: None or 4D, each axis of `[B, N, T, S]` whole or 1; added to the scaled logits.
      logits_soft_cap: None or a positive float; logits become cap * tanh(logits / cap).
      sinks: None or `[N]`, one more logit per query head in the softmax denominator.
      dropout_rate: probability of dropping an attention weight, in [0, 1), a multiple of 2^-15.
      dropout_key: None, or `[2]` uint32 words that with (b, n, i, j) decide what is dropped.
      return_residual: the caller wants the LSE.
      deterministic: gradients must be bitwise reproducible.
      config: None, or the kernels' settings (`pallas_kernels.config`).
      scales: None, or those of a query, key and value that are float8_e4m3fn: float32, `[B, blocks,
        N]`, `[B, blocks, K]` and `[B, blocks, K]`; see `quantization.Quantized`.
      block_sizes: rows of query, key and value that share a scale, where there are scales.
      largest: magnitudes that no entry of query and key exceeds, where there are scales.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    visibility: Visibility
    scale: float | jax.Array
    bias: jax.Array | None = None
    logits_soft_cap: float | None = None
    sinks: jax.Array | None = None
    dropout_rate: float = 0.0
    dropout_key: jax.Array | None = None
    return_residual: bool = False
    deterministic: bool = False
    config: Config | None = None
    scales: tuple[jax.Array, jax.Array, jax.Array] | None = None
    block_sizes: tuple[int, int, int] = (1, 1, 1)
    largest: tuple[float, float] = (math.inf, math.inf)

    @property
    def out_dtype(self) -> np.dtype:
        """Of the output: the query's, and bfloat16 where that is float8."""
        return np.dtype(self.query.dtype if self.scales is None else jnp.bfloat16)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute: no row, or no key that one could see."""
        return 0 in (*self.query.shape[:3], self.key.shape[1])

    @property
    def is_symbolic(self) -> bool:
        """Whether a size is a symbol of `jax.export.symbolic_shape`."""
        return not all(isinstance(size, int) for size in (*self.query.shape, *self.value.shape))

    @property
    def arrays(self) -> dict[str, Any]:
        """Every field, of the visibility too, that holds arrays; `with_arrays` puts them back.

        Segment ids that are one array for queries and keys are there once, as those of queries.
        """
        fields = vars(self) | vars(self.visibility)
        is_array = lambda x: x is not None and (x is self.scales or not _is_number(x))
        found = {name: x for name, x in fields.items() if name in ARRAYS and is_array(x)}
        if found.get("key_value_segment_ids", self) is found.get("query_segment_ids"):
            del found["key_value_segment_ids"]
        return found

    @property
    def static(self) -> "Call":
        """The same call without arrays, which can be hashed: `with_arrays` makes it whole."""
        return self.with_arrays(dict.fromkeys(self.arrays))

    def with_arrays(self, arrays: dict[str, Any]) -> "Call":
        """The same call with other arrays in fields of these names."""
        if "query_segment_ids" in arrays and self.visibility.key_value_segment_ids is (
            self.visibility.query_segment_ids
        ):
            arrays = {"key_value_segment_ids": arrays["query_segment_ids"]} | arrays
        seen = {name: x for name, x in arrays.items() if name in vars(self.visibility)}
        own = {name: x for name, x in arrays.items() if name not in seen}
        return dataclasses.replace(
            self, visibility=dataclasses.replace(self.visibility, **seen), **own
        )


def _is_number(x) -> bool:
    return isinstance(x, (int, float))


# Fields that hold arrays, or may: numbers among them are static.
ARRAYS = frozenset(
    field.name
    for kind in (Call, Visibility)
    for field in dataclasses.fields(kind)
    if "jax.Array" in str(field.type)
)


def _flatten(call: Call):
    return tuple(call.arrays.values()), (tuple(call.arrays), call.static)


def _unflatten(structure: tuple[tuple[str, ...], Call], arrays) -> Call:
    names, static = structure
    return static.with_arrays(dict(zip(names, arrays, strict=True)))


# Of two calls with one structure the arrays alone differ, so that a program of one does for both.
jax.tree_util.register_pytree_node(Call, _flatten, _unflatten)
