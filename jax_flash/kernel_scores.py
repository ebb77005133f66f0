"""score_mod on the kernels: the program that they run, and gradients of what it captures.

The kernels give gradients of query, key and value, and sums of which those of captured arrays are
made (`score_reads.py`), each by a kernel of its own where anything asks for it. Of arrays that are
read otherwise they come from plain JAX (`xla.py`), which runs forward and backward once more.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from jax_flash import functions, score_reads, xla
from jax_flash.call import Call
from jax_flash.kernel_operands import SOFT_CAPS
from jax_flash.mask_blocks import elsewhere
from jax_flash.sharding import vary_alike

_KEPT = 64  # functions


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


def kernel_function(program: functions.Program, soft_cap: float | None):
    """The `ScoreFunction` of a program, and of a soft cap behind it if there is one."""
    return _function_and_reads(program, soft_cap)[0]


@functools.lru_cache(_KEPT)
def _function_and_reads(program: functions.Program, soft_cap: float | None):
    """It, and those reads of the program whose sums the kernels make."""
    from pallas_kernels.score_functions import ScoreFunction, ScoreRead  # brings Pallas

    def finished(result):
        result = result.astype(jnp.float32)
        return result if soft_cap is None else soft_cap * jnp.tanh(result / soft_cap)

    def by_score(captured, score, *indices):
        value = lambda score: finished(
            functions.applied(program.steps, (*captured, score, *indices))
        )
        return jax.jvp(value, (score,), (jnp.float32(1.0),))

    def by_read(read, *arguments):
        value = lambda seed: finished(score_reads.seeded(program, read, seed, *arguments))
        return jax.jvp(value, (jnp.float32(0.0),), (jnp.float32(1.0),))

    def traced(value_and_slope, arguments):
        closed = jax.make_jaxpr(value_and_slope)(*arguments)
        assert not closed.consts  # what a program captures are its arguments
        return ScoreFunction(functions.Program(closed.jaxpr))

    @jax.enable_x64(True)  # or arrays of 64 bits would pass for others
    def trace():
        own = traced(by_score, score_reads.shapes_of(program, as_they_are=True))
        if own.value_and_slope.unsupported() is not None:
            return own, ()
        arguments, found, others = score_reads.shapes_of(program), {}, set()
        for read in score_reads.reads_of(program):
            found[read] = traced(functools.partial(by_read, read), arguments)
            if found[read].value_and_slope.unsupported() is not None:
                others.add(read.array)
        reads = tuple(read for read in found if read.array not in others)
        of_reads = tuple(ScoreRead(read.kind, found[read].program) for read in reads)
        return dataclasses.replace(own, reads=of_reads), reads

    return elsewhere(trace)


# --- gradients of what is captured ----------------------------------------------------------------


def sums_of(call: Call) -> tuple[jax.Array, ...]:
    """`[B, N, n]` zeros, one array a read, in whose place the kernels give gradients.

    They go on from there to what is captured.
    """
    function, reads = call.score_mod, _reads_with_sums(call)
    if function is None or not reads:
        return ()
    lengths = call.query.shape[1], call.key.shape[1]
    arrays = function.held_in(jnp.float32).captured, call.batch_entries, call.query_heads
    arrays = vary_alike(arrays, call.query)  # each device looks up its own
    like = jnp.zeros_like(call.query[:, 0, :, :1], jnp.float32)  # sharded as the query is
    return tuple(like + _zeros((function.program, read, lengths), *arrays) for read in reads)


def _reads_with_sums(call: Call) -> tuple[score_reads.Read, ...]:
    """Those of a call's score_mod whose sums the kernels make; none without one."""
    if call.score_mod is None:
        return ()
    return _function_and_reads(call.score_mod.program, call.logits_soft_cap)[1]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _zeros(static, *arrays):
    """As many as `score_reads.looked_up` gives, and with its derivative.

    Under `jax.vmap` each has zeros of its own where the arrays are mapped: else gradients of all
    would be summed before they come here.
    """
    found = score_reads.looked_up(*static, *arrays)
    return vary_alike(jnp.where(jnp.zeros((), jnp.bool_), found, 0.0), arrays)


def _zeros_forward(static, *arrays):
    return _zeros(static, *arrays), arrays


def _zeros_backward(static, arrays, cotangent):
    captured, batch_entries, heads = arrays
    look_up = functools.partial(score_reads.looked_up, *static)
    look_up = functools.partial(look_up, batch_entries=batch_entries, heads=heads)
    _, pull = jax.vjp(look_up, captured)
    return *pull(cotangent), None, None


_zeros.defvjp(_zeros_forward, _zeros_backward)


def with_gradients_of_captured(
    call: Call, out: jax.Array, lse: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Output and LSE of a call, from which gradients go on to what its score_mod captures.

    To all but those arrays that have them of `sums_of`.
    """
    if call.score_mod is None or not call.score_mod.captured:
        return out, lse
    have_sums = {read.array for read in _reads_with_sums(call)}
    captured = tuple(
        jax.lax.stop_gradient(x) if number in have_sums else x
        for number, x in enumerate(call.score_mod.captured)
    )
    score_mod = dataclasses.replace(call.score_mod, captured=captured)
    others = dataclasses.replace(call, score_mod=None)
    return _linked(others.static, score_mod, others.arrays, out, lse)


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
    cotangents = vary_alike(cotangents)  # zeros too
    if residuals is None:
        return None, None, *cotangents
    function, arrays = residuals
    call = static.with_arrays(arrays)
    run = lambda function: xla.attention(dataclasses.replace(call, score_mod=function))
    _, pull = jax.vjp(run, function)
    return *pull(cotangents), None, *cotangents


_linked.defvjp(_linked_forward, _linked_backward, symbolic_zeros=True)
