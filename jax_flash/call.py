"""The canonical form of one attention call, which every implementation takes.

`arguments.checked` makes a `Call` of arguments; an implementation is a module with

    unsupported(call) -> str | None     why it cannot do the call, None if it can
    attention(call) -> (out, lse)       out `[B, T, N, h]`, LSE `[B, T, N]` float32, or None where
                                        an implementation without one refuses return_residual

and is run of what is not empty (`dispatch`), on mesh axes of type Explicit by each device of its
own part (`by_device`).
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jax_flash import sharding
from jax_flash.functions import Function
from jax_flash.masks import Visibility
from pallas_kernels.config import Config

# Names of output and LSE under jax.checkpoint: a policy that saves both spares the forward pass.
OUT_NAME = "jax_flash_out"
LSE_NAME = "jax_flash_lse"
CHECKPOINT_NAMES = (OUT_NAME, LSE_NAME)


def named(out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Output and LSE under their names."""
    return checkpoint_name(out, OUT_NAME), checkpoint_name(lse, LSE_NAME)


def without_derivative(reason: str, static_argnums: tuple[int, ...]) -> Callable:
    """A decorator: the same function, which says so where it is differentiated.

    Args:
      reason: what has no derivative, and what has one instead.
      static_argnums: which arguments are no arrays. A function that holds arrays of its own would
        leak tracers, and be compiled for each call.
    """

    def decorate(function: Callable) -> Callable:
        refusing = jax.custom_jvp(function, nondiff_argnums=static_argnums)

        @refusing.defjvp
        def _(*_):
            raise NotImplementedError(reason)

        return refusing

    return decorate


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
      mask_mod: None, or what says of each (b, n, i, j) whether it is visible, beside visibility.
      score_mod: None, or what is made of the logits, bias included, before the soft cap.
      scales: None, or those of a query, key and value that are float8_e4m3fn: float32, `[B, blocks,
        N]`, `[B, blocks, K]` and `[B, blocks, K]`; see `quantization.Quantized`.
      block_sizes: rows of query, key and value that share a scale, where there are scales.
      largest: magnitudes that no entry of query and key exceeds, where there are scales.
      first_batch_entry, first_query_head: which are the first here, of those that dropout and
        functions count: not 0 where a device has a part of the call (`by_device`).
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
    mask_mod: Function | None = None
    score_mod: Function | None = None
    scales: tuple[jax.Array, jax.Array, jax.Array] | None = None
    block_sizes: tuple[int, int, int] = (1, 1, 1)
    largest: tuple[float, float] = (math.inf, math.inf)
    first_batch_entry: int | jax.Array = 0
    first_query_head: int | jax.Array = 0

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
        read = [x for x in (self.mask_mod, self.score_mod) if x is not None]
        arrays = self.query, self.value, *(x for function in read for x in function.captured)
        return not all(isinstance(size, int) for x in arrays for size in x.shape)

    @property
    def arrays(self) -> dict[str, Any]:
        """Every field, of the visibility too, that holds arrays; `with_arrays` puts them back.

        Segment ids that are one array for queries and keys are there once, as those of queries.
        """
        fields = vars(self) | vars(self.visibility)
        is_array = lambda x: x is not None and not isinstance(x, (int, float))
        found = {name: x for name, x in fields.items() if name in AXES and is_array(x)}
        if found.get("key_value_segment_ids", self) is found.get("query_segment_ids"):
            del found["key_value_segment_ids"]
        return found

    @property
    def static(self) -> "Call":
        """The same call without arrays, which can be hashed: `with_arrays` makes it whole."""
        return self.with_arrays(dict.fromkeys(self.arrays))

    @property
    def batch_entries(self) -> jax.Array:
        """The index of each among those of the whole call."""
        return _count_from(self.first_batch_entry, self.query.shape[0])

    @property
    def query_heads(self) -> jax.Array:
        return _count_from(self.first_query_head, self.query.shape[2])

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


def _count_from(first: int | jax.Array, count: int) -> jax.Array:
    numbers = jnp.arange(count, dtype=jnp.int32)
    return numbers if isinstance(first, int) and first == 0 else first + numbers


def _flatten(call: Call):
    return tuple(call.arrays.values()), (tuple(call.arrays), call.static)


def _unflatten(structure: tuple[tuple[str, ...], Call], arrays) -> Call:
    names, static = structure
    return static.with_arrays(dict(zip(names, arrays, strict=True)))


# Of two calls with one structure the arrays alone differ, so that a program of one does for both.
jax.tree_util.register_pytree_node(Call, _flatten, _unflatten)


# Fields that hold arrays, or may: numbers among them are static. Letters of their axes are those of
# `sharding.by_device`; "*" alone is for arrays of any rank, which are whole.
AXES: dict[str, Any] = {
    "query": "b.n.",
    "key": "b.k.",
    "value": "b.k.",
    "scale": "",
    "bias": "bn..",
    "sinks": "n",
    "dropout_key": ".",
    "scales": ("b.n", "b.k", "b.k"),
    "mask_mod": "*",
    "score_mod": "*",
    "first_batch_entry": "",
    "first_query_head": "",
    "query_offset": "b",
    "query_seq_lengths": "b",
    "key_value_seq_lengths": "b",
    "query_segment_ids": "b.",
    "key_value_segment_ids": "b.",
    "mask": "bn..",
}


def by_device(run: Callable, call: Call, *more: Any, plain: bool, statics: tuple = ()) -> Any:
    """`run(*statics, call, *more)`; with Explicit axes each device runs it of its part of the call.

    Args:
      run: gives an output and an LSE, or None for it.
      call: the whole.
      more: arrays, or None, which each device has whole.
      plain: as in `sharding.by_device`, which wants to hash run and statics.
      statics: what is no array.
    """
    arrays, structure = _flatten(call)
    whole = jax.tree.map(lambda x: "." * jnp.ndim(x), more)
    letters = tuple(_letters(AXES[name], x) for name, x in call.arrays.items()), whole
    static = run, statics, structure
    results = "b.n.", "b.n"
    return sharding.by_device(
        _run_part,
        static,
        (arrays, more),
        letters,
        results,
        plain=plain,
        check_vma=call.mask_mod is None and call.score_mod is None,
    )


def _letters(axes: Any, x: Any) -> Any:
    return jax.tree.map(lambda own: axes * jnp.ndim(own), x) if axes == "*" else axes


def _run_part(static, arrays, origin):
    run, statics, structure = static
    arrays, more = arrays
    part = _unflatten(structure, arrays)
    if origin is not None:
        entry, head = origin
        part = dataclasses.replace(part, first_batch_entry=entry, first_query_head=head)
    return run(*statics, part, *more)
