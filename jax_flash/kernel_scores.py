"""score_mod on the kernels: the program that they run, and gradients of what it captures.

The kernels give gradients of query, key and value. Those of captured arrays, where anything asks
for them, come from plain JAX (`xla.py`), which runs forward and backward once more for them.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from jax_flash import functions, xla
from jax_flash.call import Call
from jax_flash.kernel_operands import SOFT_CAPS
from jax_flash.mask_blocks import elsewhere

_KEPT = 64  # functions
_SCORE_AND_INDICES = 5


def without_caps(call: Call) -> Call:
    """The same call, with a score_mod that is a soft cap as `logits_soft_cap`, which is faster."""
    if call.score_mod is None or call.logits_soft_cap is not None:
        return call
    cap = functions.soft_cap_of(call.score_mod.program)
    if cap is None or not SOFT_CAPS[0] <= cap <= SOFT_CAPS[1]:
        return call
    return dataclasses.replace(call, score_mod=None, logits_soft_cap=cap)


def unsupported(call: Call) -> str | None:
    """Why the kernels cannot do a call with a score_mod, None if they can."""
    function = call.score_mod
    assert function is not None
    widest = max(call.query.shape[-1], call.value.shape[-1])
    if widest > 128:
        return f"score_mod with width {widest}: the kernels take it up to 128"
    if call.bias is not None:
        return "score_mod with a bias: the kernels take one or the other"
    own = kernel_function(function.program, call.logits_soft_cap)
    if (reason := own.value_and_slope.unsupported()) is not None:
        return f"score_mod: {reason}"
    see = call.visibility
    others = {
        "a mask_mod": call.mask_mod is not None,
        "a dense mask": see.mask is not None,
        "dropout": call.dropout_rate > 0,
        "segment ids": see.query_segment_ids is not None,
    }
    name = next((name for name, holds in others.items() if holds), None)
    if name is not None and not own.adds:  # it would spill
        return f"score_mod with {name}: the kernels take one that adds to the score alone"
    crowded = {
        "segment ids": see.query_segment_ids is not None and widest <= 64,
        "a dense mask": see.mask is not None and widest > 64,
    }
    name = next((name for name, holds in crowded.items() if holds), None)
    if name is not None and own.value.reads_pairs:  # likewise
        return f"score_mod with {name} at width {widest}, of an array that pairs read"
    return None


def score_of(call: Call) -> tuple[Any, tuple[jax.Array, ...]]:
    """A `ScoreFunction`, the soft cap in it, and `Elements.scores`; None and none without one."""
    if call.score_mod is None:
        return None, ()
    from pallas_kernels.on_rows import as_captured  # brings Pallas

    function = kernel_function(call.score_mod.program, call.logits_soft_cap)
    captured = jax.lax.stop_gradient(call.score_mod.captured)
    arrays = tuple(x[None, None, None] for x in as_captured(function.value_and_slope, captured))
    if function.reads_numbers:
        both = jnp.broadcast_arrays(call.batch_entries[:, None], call.query_heads[None, :])
        numbers = jnp.stack(both, axis=-1).astype(jnp.int32)
        arrays = (numbers[:, :, None], *arrays)
    return function, arrays


@functools.lru_cache(_KEPT)
def kernel_function(program: Any, soft_cap: float | None):
    """The `ScoreFunction` of a program, and of a soft cap behind it if there is one."""
    from pallas_kernels.score_functions import ScoreFunction  # brings Pallas

    def value(captured, score, *indices):
        result = functions.applied(program.steps, (*captured, score, *indices)).astype(jnp.float32)
        return result if soft_cap is None else soft_cap * jnp.tanh(result / soft_cap)

    def value_and_slope(captured, score, *indices):
        of_score = lambda score: value(captured, score, *indices)
        return jax.jvp(of_score, (score,), (jnp.float32(1.0),))

    @jax.enable_x64(True)  # or arrays of 64 bits would pass for others
    def trace():
        shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in program.steps.arguments]
        captured, others = shapes[:-_SCORE_AND_INDICES], shapes[-_SCORE_AND_INDICES:]
        closed = jax.make_jaxpr(value_and_slope)(captured, *others)
        assert not closed.consts  # what a program captures are its arguments
        return functions.Program(closed.jaxpr)

    return ScoreFunction(elsewhere(trace))


def with_gradients_of_captured(
    call: Call, out: jax.Array, lse: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Output and LSE of a call, from which gradients go on to what its score_mod captures."""
    if call.score_mod is None or not call.score_mod.captured:
        return out, lse
    others = dataclasses.replace(call, score_mod=None)
    return _linked(others.static, call.score_mod, others.arrays, out, lse)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _linked(static, function, arrays, out, lse):
    del static, function, arrays
    return out, lse


def _linked_forward(static, function, arrays, out, lse):
    del static
    wanted = any(x.perturbed for x in jax.tree.leaves(function))
    values = jax.tree.map(lambda x: x.value, (function, arrays))
    return (out.value, lse.value), values if wanted else None


def _linked_backward(static, residuals, cotangents):
    cotangents = tuple(
        jnp.zeros(x.shape, x.dtype) if isinstance(x, SymbolicZero) else x for x in cotangents
    )
    if residuals is None:
        return None, None, *cotangents
    function, arrays = residuals
    call = static.with_arrays(arrays)
    run = lambda function: xla.attention(dataclasses.replace(call, score_mod=function))
    _, pull = jax.vjp(run, function)
    return *pull(cotangents), None, *cotangents


_linked.defvjp(_linked_forward, _linked_backward, symbolic_zeros=True)
