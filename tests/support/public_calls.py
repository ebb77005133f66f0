"""One small call, or several, of every public function: what tests of JAX's settings run.

A new function, or an option that takes other paths, joins by one line of `CALLS`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

import jax_flash
from tests.support.sharded import mesh_of

# Batch, query and key heads, positions of queries and keys, columns; devices of a ring.
B, N, K, T, S, H = 4, 4, 2, 16, 24, 64
PAGES, PAGE_SIZE = 8, 16
DEVICES = 2

# Of `jax_flash.__all__`, what runs nothing on arrays.
NOT_CALLED: dict[str, str] = {
    "BlockMask": "what block_mask gives",
    "Config": "settings of the kernels, where they have been: tests/test_api.py",
    "Quantized": "a container: attention-quantized has three",
    "block_mask": "it takes no array: tests/test_block_mask.py",
    "install": "it takes no array: tests/test_drop_in.py",
}


@dataclasses.dataclass(frozen=True)
class Operand:
    """An array of a call.

    Attributes:
      axes: a letter for each axis: "b" batch, "n" query heads, "k" key heads, "t" positions of
        queries and "s" of keys, and "." for others. All but "." may be sharded by name.
      shape: its shape.
      dtype: None for that of query, key and value.
      draw: makes it of a numpy generator and the shape.
    """

    axes: str
    shape: tuple[int, ...]
    dtype: Any = None
    draw: Callable[[np.random.Generator, tuple[int, ...]], np.ndarray] = lambda rng, shape: (
        rng.standard_normal(shape)
    )


@dataclasses.dataclass(frozen=True)
class PublicCall:
    """A call of a public function.

    Attributes:
      name: of the function, in `jax_flash`, and what is special about the call, after a dash.
      run: takes the operands by name, and `implementation` where `has_implementation`.
      operands: of each argument.
      differentiated: operands that have gradients; none where the function has no derivative.
      has_implementation: whether it takes one.
      on_kernels: whether the kernels do this call.
      is_collective: whether it is a `jax.shard_map` over devices of its own.
    """

    name: str
    run: Callable[..., Any]
    operands: dict[str, Operand]
    differentiated: tuple[str, ...] = ()
    has_implementation: bool = True
    on_kernels: bool = True
    is_collective: bool = False

    @property
    def function(self) -> str:
        return self.name.partition("-")[0]

    def arrays(self, dtype: Any = jnp.bfloat16) -> dict[str, jax.Array]:
        """Operands, the same whenever they are drawn."""
        rng = np.random.default_rng(0)
        return {
            name: jnp.asarray(x.draw(rng, x.shape)).astype(dtype if x.dtype is None else x.dtype)
            for name, x in self.operands.items()
        }

    def forward(self, implementation: str | None) -> Callable[[dict[str, jax.Array]], Any]:
        """The call as a function of `arrays()`."""
        options = dict(implementation=implementation) if self.has_implementation else {}
        return lambda arrays: self.run(**arrays, **options)

    def gradient(self, implementation: str | None) -> Callable[[dict[str, jax.Array]], Any]:
        """The gradients of what is differentiated, as a function of `arrays()`."""
        forward = self.forward(implementation)

        def gradient(arrays):
            own = {name: arrays[name] for name in self.differentiated}
            return jax.grad(lambda own: _total(forward(arrays | own)))(own)

        return gradient


def _total(results) -> jax.Array:
    """A number that all results count in; an LSE of -inf does not."""
    finite = (
        jnp.where(jnp.isneginf(x), 0, x).astype(jnp.float32) for x in jax.tree.leaves(results)
    )
    return sum((jnp.cos(x).sum() for x in finite), jnp.float32(0))


# --- operands ------------------------------------------------------------------------------------

_QUERY = Operand("btn.", (B, T, N, H))
_KEY = Operand("bsk.", (B, S, K, H))
_INPUTS = dict(query=_QUERY, key=_KEY, value=_KEY)
_SQUARE = dict(query=_QUERY, **dict.fromkeys(("key", "value"), Operand("btk.", (B, T, K, H))))
_TWO_AXES = {
    name: Operand(f"b.{x.axes[1:]}", (B, 3, *x.shape[1:]), x.dtype) for name, x in _INPUTS.items()
}
_DIFFERENTIATED = ("query", "key", "value")


def _integers(axes: str, shape: tuple[int, ...], low: int, high: int) -> Operand:
    return Operand(axes, shape, jnp.int32, lambda rng, shape: rng.integers(low, high, shape))


_LENGTHS = _integers("b", (B,), 1, S)
_SINKS = Operand("n", (N,), jnp.float32)
_IDS = Operand("bt", (B, T), jnp.int32, lambda rng, shape: np.sort(rng.integers(0, 3, shape)))
_KEY_IDS = dataclasses.replace(_IDS, axes="bs", shape=(B, S))
_RANDOM_KEY = Operand(".", (2,), jnp.uint32, lambda rng, shape: rng.integers(0, 2**31, shape))
_CACHE = Operand("bsk.", (B, S, K, H))
_PAGED_CACHE = Operand("..k.", (PAGES, PAGE_SIZE, K, H))
_PAGE_TABLE = Operand(
    "b.", (B, 2), jnp.int32, lambda rng, shape: rng.permutation(PAGES).reshape(shape)
)
_NEW = Operand("b.k.", (B, 1, K, H))
_DECODE = dict(query=Operand("b.n.", (B, 1, N, H)), key_cache=_CACHE, value_cache=_CACHE)
_DECODE |= dict(lengths=_LENGTHS)
_PAGED = _DECODE | dict(key_cache=_PAGED_CACHE, value_cache=_PAGED_CACHE, page_table=_PAGE_TABLE)
_UPDATE = dict(key_cache=_CACHE, value_cache=_CACHE, key=_NEW, value=_NEW, lengths=_LENGTHS)
_PADDED = _UPDATE | dict.fromkeys(("key", "value"), Operand("b.k.", (B, 3, K, H)))
_PADDED |= dict(num_new=_integers("b", (B,), 0, 4))


def _attention(name: str, more: dict[str, Operand] | None = None, *, inputs=_INPUTS, **options):
    """A line of attention(): its special operands, and options."""
    more = more or {}
    floating = [x for x in ("bias", "sinks") if x in more]
    run = functools.partial(jax_flash.attention, return_residual=True, **options)
    return PublicCall(name, run, inputs | more, (*_DIFFERENTIATED, *floating))


def _quantized(query, key, value, **options):
    return jax_flash.attention(*jax_flash.quantize_fp8(query, key, value), **options)


def _dropped(query, key, value, dropout_key, **options):
    return jax_flash.attention(
        query, key, value, dropout_rate=0.25, dropout_key=dropout_key, **options
    )


def _functions(query, key, value, slopes, ids, **options):
    """What a function captures is an operand, be it traced or not."""
    mask_mod = lambda b, h, q_idx, kv_idx: ids[b, q_idx] == ids[b, kv_idx]
    distance = lambda q_idx, kv_idx: (q_idx - kv_idx).astype(slopes.dtype)
    score_mod = lambda score, b, h, q_idx, kv_idx: score - slopes[h] * distance(q_idx, kv_idx)
    return jax_flash.attention(
        query, key, value, mask_mod=mask_mod, score_mod=score_mod, return_residual=True, **options
    )


def _one_id_array(query, key, value, ids, **options):
    own = dict(query_segment_ids=ids, key_value_segment_ids=ids)
    return jax_flash.attention(query, key, value, **own, **options)


def _explain_decode(query, key_cache, value_cache, lengths, implementation):
    jax_flash.explain_decode(query, key_cache, value_cache, lengths, implementation=implementation)
    return query


def _explain(query, key, value, implementation):
    jax_flash.explain(query, key, value, implementation=implementation)
    return query


def _collective(method: Callable, **options) -> Callable:
    """A method of `jax_flash.ring`, over a mesh of its own."""

    def run(query, key, value, **own):
        local = functools.partial(method, axis_name="x", return_residual=True, **own, **options)
        rows = PartitionSpec(None, "x")
        return jax.shard_map(
            local, mesh=mesh_of((DEVICES,)), in_specs=(rows,) * 3, out_specs=(rows,) * 2
        )(query, key, value)

    return run


def _ring_call(name: str, method: Callable, **options) -> PublicCall:
    run = _collective(method, **options)
    return PublicCall(name, run, _SQUARE, _DIFFERENTIATED, is_collective=True)


def _zigzag(name: str, function: Callable) -> PublicCall:
    run = lambda x: function(x, DEVICES)
    return PublicCall(name, run, dict(x=_QUERY), ("x",), has_implementation=False)


CALLS: tuple[PublicCall, ...] = (
    _attention("attention"),
    _attention("attention-causal", is_causal=True),
    _attention("attention-two_batch_axes", inputs=_TWO_AXES),
    _attention("attention-window", local_window_size=(5, 3), query_offset=4),
    _attention("attention-soft_cap", logits_soft_cap=20.0),
    _attention("attention-sinks", dict(sinks=_SINKS)),
    _attention("attention-bias", dict(bias=Operand("bn..", (B, N, T, S)))),
    _attention("attention-mask", dict(mask=Operand("b...", (B, 1, T, S), bool)), is_causal=True),
    _attention("attention-ids", dict(query_segment_ids=_IDS, key_value_segment_ids=_KEY_IDS)),
    _attention(
        "attention-lengths",
        dict(
            query_seq_lengths=_integers("b", (B,), 1, T),
            key_value_seq_lengths=_LENGTHS,
            query_offset=_integers("b", (B,), -3, 9),
        ),
        is_causal=True,
        local_window_size=(9, 0),
    ),
    PublicCall(
        "attention-dropout", _dropped, _INPUTS | dict(dropout_key=_RANDOM_KEY), _DIFFERENTIATED
    ),
    PublicCall("attention-one_id_array", _one_id_array, _SQUARE | dict(ids=_IDS), _DIFFERENTIATED),
    PublicCall(
        "attention-functions",
        _functions,
        _SQUARE | dict(slopes=_SINKS, ids=_IDS),
        (*_DIFFERENTIATED, "slopes"),
        on_kernels=False,
    ),
    PublicCall("attention-quantized", _quantized, _INPUTS),
    PublicCall("attention_fp8", jax_flash.attention_fp8, _INPUTS, _DIFFERENTIATED),
    PublicCall(
        "attention_fp8-lengths",
        functools.partial(jax_flash.attention_fp8, is_causal=True, return_residual=True),
        _INPUTS | dict(key_value_seq_lengths=_LENGTHS),
        _DIFFERENTIATED,
    ),
    PublicCall(
        "quantize_fp8",
        functools.partial(jax_flash.quantize_fp8, block_size=8),
        _INPUTS | dict(incoherent_key=_RANDOM_KEY),
        has_implementation=False,
    ),
    PublicCall("decode_attention", jax_flash.decode_attention, _DECODE),
    PublicCall(
        "decode_attention-options",
        functools.partial(
            jax_flash.decode_attention,
            local_window_size=7,
            logits_soft_cap=20.0,
            num_splits=2,
            return_residual=True,
        ),
        _PAGED | dict(sinks=_SINKS),
    ),
    PublicCall("update_cache", jax_flash.update_cache, _UPDATE, has_implementation=False),
    PublicCall(
        "update_cache-paged",
        jax_flash.update_cache,
        _UPDATE | dict(key_cache=_PAGED_CACHE, value_cache=_PAGED_CACHE, page_table=_PAGE_TABLE),
        has_implementation=False,
    ),
    PublicCall("update_cache-padded", jax_flash.update_cache, _PADDED, has_implementation=False),
    PublicCall(
        "segment_ids",
        functools.partial(jax_flash.segment_ids, length=T),
        dict(starts=_integers("b.", (B, 3), 0, T)),
        has_implementation=False,
    ),
    PublicCall("explain", _explain, _INPUTS),
    PublicCall("explain_decode", _explain_decode, _DECODE),
    _ring_call("ring_attention", jax_flash.ring_attention, is_causal=True),
    _ring_call("ulysses_attention", jax_flash.ulysses_attention, is_causal=True),
    _ring_call("all_gather_attention", jax_flash.all_gather_attention, is_causal=True),
    _zigzag("to_zigzag", jax_flash.to_zigzag),
    _zigzag("from_zigzag", jax_flash.from_zigzag),
)
