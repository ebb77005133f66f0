"""The Hopper kernels as a differentiable JAX function: implementation "mosaic_gpu".

The gradient is written by hand (`jax.custom_vjp`): the backward kernel recomputes the weights from
query, key and the LSE, so that what is kept between forward and backward is linear in the sequence
(Dao 2023, "FlashAttention-2", section 3.1). Reverse mode only.

Output and LSE carry names (`call.named`) inside the forward rule, whose residuals they are, so that
under `jax.checkpoint` a policy that saves them keeps the forward kernel from running again.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from jax_flash.call import LSE_NAME, Call, named
from jax_flash.launch import launch
from jax_flash.masks import Visibility
from jax_flash.sharding import mapped_zero_times, over_devices, vary_alike
from pallas_kernels import dropout_words
from pallas_kernels import intervals as run_time_intervals
from pallas_kernels.config import (
    SUPPORTED_WIDTHS,
    Config,
    ForwardConfig,
    Problem,
    check_backward,
    default,
    sees_itself,
)
from pallas_kernels.element_arrays import BIAS_DTYPES, Elements

_DTYPES = (np.dtype(jnp.bfloat16), np.dtype(jnp.float16))
_SCALES = (1e-30, 1e4)
_SOFT_CAPS = (1e-3, 1e6)
_ROW_MULTIPLE = 8  # TMA tiles are 8 rows high: other lengths are padded here


def unsupported(call: Call) -> str | None:
    """Why the kernels cannot do this call, or None if they can; devices are dispatch's business."""
    width, value_width = call.query.shape[-1], call.value.shape[-1]
    reasons = {
        f"dtype {call.query.dtype}: the kernels take bfloat16 and float16": (
            call.query.dtype not in _DTYPES
        ),
        f"head width {width}: the kernels take multiples of 8 up to 256": (
            width not in SUPPORTED_WIDTHS
        ),
        f"value width {value_width}: the kernels take multiples of 8 up to 256": (
            value_width not in SUPPORTED_WIDTHS
        ),
        "symbolic sizes: kernels are made for sizes that are known": call.is_symbolic,
        "scale as an array": not isinstance(call.scale, (int, float)),
        # The exponent's multiplier is a float32, and -LSE / scale is added up in one.
        f"scale {call.scale} is not in {_SCALES}": isinstance(call.scale, (int, float))
        and not (_SCALES[0] <= call.scale <= _SCALES[1]),
        f"logits_soft_cap {call.logits_soft_cap} is not in {_SOFT_CAPS}": (
            call.logits_soft_cap is not None
            and not _SOFT_CAPS[0] <= call.logits_soft_cap <= _SOFT_CAPS[1]
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def attention(call: Call) -> tuple[jax.Array, jax.Array]:
    """Attention on the kernels; call must be one that `unsupported` has no reason against."""
    settings, operands = _prepared(call)
    out, lse = _attention(settings, *operands)
    return out, lse.transpose(0, 2, 1)


def gradients(
    call: Call, out: jax.Array, lse: jax.Array, d_out: jax.Array, d_lse: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of query, key and value where the keys of the call are a part of all keys.

    Args:
      call: as for `attention`, without sinks.
      out, lse: results over all keys, `[B, T, N, h]` and `[B, T, N]`.
      d_out, d_lse: their cotangents.
    """
    settings, operands = _prepared(call)
    # A row that sees nothing of these keys has no weights here, whatever it has elsewhere.
    query, key, value, _, intervals, ids, *_ = operands
    problem = settings.problem(query, key, value)
    seeing = _zero_unseeing(jnp.ones(lse.shape, jnp.int8), problem, intervals, ids) > 0
    lse, d_lse = jnp.where(seeing, lse, -jnp.inf), jnp.where(seeing, d_lse, 0.0)
    lse, d_lse = (x.transpose(0, 2, 1) for x in (lse, d_lse))
    residuals = _Static(False), *operands, out, lse, None
    return _attention_backward(settings, residuals, (d_out, d_lse))[:3]


def _prepared(call: Call):
    """The arguments of `_attention`: settings and operands."""
    assert isinstance(call.scale, (int, float))  # else unsupported
    lowest, highest, intervals = _intervals(call)
    ids = _segment_ids(call)
    are_one = call.visibility.query_segment_ids is call.visibility.key_value_segment_ids
    width, value_width = call.query.shape[-1], call.value.shape[-1]
    window = None if lowest is None or highest is None else highest - lowest + 1
    elements = _elements(call)
    has_mask, has_bias = elements.mask is not None, elements.bias is not None
    settings = _Settings(
        scale=float(call.scale),
        lowest=lowest,
        highest=highest,
        dynamic=bool(intervals),
        segmented=bool(ids),
        all_count=bool(ids) and are_one and not intervals and sees_itself(lowest, highest),
        has_mask=has_mask,
        has_bias=has_bias,
        soft_cap=call.logits_soft_cap,
        dropout=dropout_words.steps_of(call.dropout_rate),
        deterministic=call.deterministic,
        config=call.config
        or default(
            width,
            value_width,
            window=window,
            segmented=bool(ids),
            has_elements=has_mask or has_bias,
            forward_loads_elements=has_mask or (has_bias and not elements.has_bias_of_keys),
            tiled_bias=elements.tiled_bias_dtype is not None,
            soft_cap=call.logits_soft_cap is not None,
            dropout=call.dropout_rate > 0,
        ),
    )
    sinks: tuple[jax.Array, ...] = ()
    if call.sinks is not None:
        # For each batch entry, as vmap makes the batch longer, and sharded as the query is.
        batch_and_heads = jnp.zeros_like(call.query[:, 0, :, 0], jnp.float32)
        sinks = (batch_and_heads + call.sinks.astype(jnp.float32)[None],)
    query, key, value = call.query, call.key, call.value
    problem = settings.problem(query, key, value)
    if has_mask:
        key, value = (_zero_masked(x, call.visibility, problem) for x in (key, value))
    if not (settings.all_count or problem.forward_ignores_unseen):
        query, key, value = _zero_all_unseen(query, key, value, problem, intervals, ids)
    operands = query, key, value, sinks, intervals, ids, *_words(call), elements
    return settings, vary_alike(operands)


def _segment_ids(call: Call) -> tuple[jax.Array, ...]:
    """Those of queries `[B, T]` and of keys `[B, S]`, or none."""
    query_ids, key_ids = call.visibility.query_segment_ids, call.visibility.key_value_segment_ids
    if query_ids is None or key_ids is None:
        return ()
    return vary_alike((query_ids, key_ids), (call.query, call.key))


def _words(call: Call) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Words of dropout of queries and of keys (`dropout.Words`), one array each, or none."""
    if call.dropout_key is None:
        return (), ()
    (batch, query_length, _, _), key_length = call.query.shape, call.key.shape[1]
    query_words = dropout_words.query_words(
        call.dropout_key,
        call.batch_entries[:, None, None],
        call.query_heads[None, :, None],
        query_length,
        dropout_words.steps_of(call.dropout_rate),
    )
    # For each batch entry, as vmap makes the batch longer.
    key_words = dropout_words.columns_of_keys(
        call.dropout_key, jnp.arange(key_length, dtype=jnp.int32)
    )
    key_words = jnp.broadcast_to(key_words, (batch, key_length))
    # Of their own dtype, for which kernels have loads.
    as_int = lambda x: lax.bitcast_convert_type(x, jnp.int32)
    return (as_int(query_words),), (as_int(key_words),)


def _intervals(call: Call) -> tuple[int | None, int | None, tuple[jax.Array, ...]]:
    """Lowest and highest of `Problem`; and `[B, 2, T]` keys of each query, if not static."""
    see, (batch, query_length), key_length = (
        call.visibility,
        call.query.shape[:2],
        call.key.shape[1],
    )
    if see.are_bounds_static:
        assert isinstance(see.query_offset, int)
        return *_bounds(see, see.query_offset, query_length, key_length), ()
    bounds = see.row_intervals(query_length, key_length)
    whole = [jnp.broadcast_to(x, (batch, query_length)).astype(jnp.int32) for x in bounds]
    return None, None, (jnp.stack(whole, axis=1),)


def _elements(call: Call) -> Elements:
    """Mask and bias, a bias of a dtype that the kernels do not read as float32."""
    bias = call.bias
    if bias is not None and bias.dtype not in BIAS_DTYPES:
        bias = bias.astype(jnp.float32)
    return Elements(call.visibility.mask, bias)


def _zero_masked(x: jax.Array, see: Visibility, problem: Problem) -> jax.Array:
    """x `[B, S, K, ...]` with zeros where no query sees the key, masked or not."""
    visible = see.tile(0, problem.query_length, 0, problem.key_length)
    assert visible is not None  # as there is a mask
    heads = (problem.kv_heads, problem.group) if visible.shape[1] > 1 else (1, 1)
    visible = visible.reshape(visible.shape[0], *heads, *visible.shape[2:])
    seen = visible.any((2, 3)).swapaxes(1, 2)  # [B, S, K], axes whole or 1
    return jnp.where(seen[..., None], x, 0)


def _bounds(
    see: Visibility, query_offset: int, query_length: int, key_length: int
) -> tuple[int | None, int | None]:
    """lowest and highest of `Problem`, None where they hide nothing, and int32 in any case."""
    lowest = highest = None
    if see.window is not None:
        left, right = see.window
        lowest, highest = query_offset - left, query_offset + right
    if see.is_causal:
        highest = query_offset if highest is None else min(highest, query_offset)
    # What hides everything is as good as any other such.
    if lowest is not None:
        lowest = min(lowest, key_length) if lowest > 1 - query_length else None
    if highest is not None:
        highest = max(highest, -query_length) if highest < key_length - 1 else None
    return lowest, highest


def _zero_all_unseen(query, key, value, problem: Problem, intervals: tuple, ids: tuple):
    """The three, or their gradients, with zeros in queries that see no key and keys not seen."""
    key, value = (_zero_unseen(x, problem, intervals, ids) for x in (key, value))
    return _zero_unseeing(query, problem, intervals, ids), key, value


def _zero_unseeing(
    x: jax.Array,
    problem: Problem,
    intervals: tuple[jax.Array, ...],
    ids: tuple[jax.Array, ...],
) -> jax.Array:
    """x `[B, T, ...]` with zeros where a query sees no key: 0 * NaN would be NaN."""
    others: tuple[Any, ...] = intervals
    if ids and not others:
        others = (run_time_intervals.of_bounds_of_queries(problem),)
    return _zero_alone(x, others, ids, problem.seeing_queries)


def _zero_unseen(
    x: jax.Array,
    problem: Problem,
    intervals: tuple[jax.Array, ...],
    ids: tuple[jax.Array, ...],
) -> jax.Array:
    """x `[B, S, ...]` with zeros where no query sees the key."""
    others: tuple[Any, ...] = tuple(
        run_time_intervals.of_keys(seen, problem.key_length) for seen in intervals
    )
    if ids and not others:
        others = (run_time_intervals.of_bounds_of_keys(problem),)
    return _zero_alone(x, others, ids[::-1], problem.seen_keys)


def _zero_alone(x: jax.Array, others: tuple, ids: tuple[jax.Array, ...], kept: slice) -> jax.Array:
    """x `[B, R, ...]` with zeros in the rows that have none of the others.

    Args:
      others: one `[B or 1, 2, R]`, the interval of the others that each row has, but for ids; or
        none, where there are no ids and `kept` says it.
      ids: segment ids of rows and of the others, or none.
      kept: the rows that are not zero by what is static.
    """
    if ids:
        from pallas_kernels import segments  # of Pallas, which is slow to import

        return _zero_unless(segments.has_partner(*ids, *others), x)
    for interval in others:
        x = _zero_unless(interval[:, 0] < interval[:, 1], x)
    return _zero_outside(x, kept)


def _zero_unless(counts: jax.Array, x: jax.Array) -> jax.Array:
    """x `[B, R, ...]` with zeros where `[B, R]` counts is false."""
    return jnp.where(counts.reshape(counts.shape + (1,) * (x.ndim - 2)), x, 0)


def _zero_outside(x: jax.Array, kept: slice) -> jax.Array:
    for outside in (slice(0, kept.start), slice(kept.stop, x.shape[1])):
        if outside.start < outside.stop:
            x = x.at[:, outside].set(0)
    return x


@dataclasses.dataclass(frozen=True)
class _Settings:
    """What of a call is no array and no shape."""

    scale: float
    lowest: int | None
    highest: int | None
    dynamic: bool
    segmented: bool
    all_count: bool  # whether, but for a mask, each query is known to see a key, and each key seen
    has_mask: bool
    has_bias: bool
    soft_cap: float | None
    dropout: int
    deterministic: bool
    config: Config

    def problem(self, query: jax.Array, key: jax.Array, value: jax.Array) -> Problem:
        return Problem.of(
            query,
            key,
            value,
            scale=self.scale,
            lowest=self.lowest,
            highest=self.highest,
            dynamic=self.dynamic,
            segmented=self.segmented,
            has_mask=self.has_mask,
            has_bias=self.has_bias,
            soft_cap=self.soft_cap,
            dropout=self.dropout,
        )

    def backward_ignores_unseen(self, problem: Problem) -> bool:
        """Whether what does not count may be NaN in the backward kernels."""
        return problem.backward_ignores_unseen and not self.deterministic


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(
    settings, query, key, value, sinks, intervals, ids, query_words, key_words, elements
):
    """Output `[B, T, N, h]` and LSE `[B, N, T]`; sinks are one `[B, N]` or none.

    Intervals are one `[B, 2, T]`, or none where they are static. Ids are `[B, T]` of queries and
    `[B, S]` of keys, or none. Words of dropout are one `[B, N, T]` of queries, T rounded up, and
    one `[B, S]` of keys, or none.
    """
    operands = query, key, value, sinks, intervals, ids, query_words, key_words, elements
    return _attention_forward(settings, *operands)[0]


def _attention_with_residuals(settings, *args):
    """What `_attention_forward` gives, and whether anything asks for the gradient of the bias.

    Args:
      settings, *args: as for `_attention`, with leaves that are `CustomVJPPrimal`.
    """
    results, residuals = _attention_forward(settings, *jax.tree.map(lambda x: x.value, args))
    return results, (_Static(_is_bias_wanted(args[-1])), *residuals)


def _is_bias_wanted(elements: Any) -> bool:
    """Whether anything asks for the gradient of the bias; leaves are `CustomVJPPrimal`."""
    return elements.bias is not None and elements.bias.perturbed


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Static:
    """A truth that is part of a tree's structure."""

    holds: bool


def _attention_forward(settings, *operands):
    run = _folding_vmap(functools.partial(_run_forward, settings))
    out, lse, references = run(*operands)
    out, lse = named(out, lse)
    references = checkpoint_name(references, LSE_NAME)
    return (out, _of_rows(lse, out)), (*operands, out, lse, references)


def _of_rows(lse, out):
    """LSE `[B, N, T]` of output `[B, T, N, h]`, without the rows that fill the last tile.

    Here and not beside the kernel, so that nothing is copied where only the backward takes it.
    """
    return lse[:, :, : out.shape[1]]


def _attention_backward(settings, residuals, cotangents):
    bias_wanted, query, key, value, sinks, intervals, ids, *more = residuals
    problem = settings.problem(query, key, value)
    if not problem.forward_ignores_unseen or settings.backward_ignores_unseen(problem):
        return _operand_gradients(settings, residuals, cotangents)
    # As if they had been set to zero before the forward pass, as others are.
    zeroed = functools.partial(_zero_all_unseen, problem=problem, intervals=intervals, ids=ids)
    operands = *zeroed(query, key, value), sinks, intervals, ids
    results = _operand_gradients(settings, (bias_wanted, *operands, *more), cotangents)
    return *zeroed(*results[:3]), *results[3:]


def _operand_gradients(settings, residuals, cotangents):
    """Of the operands of `_attention`, which are zero where they do not count."""
    bias_wanted, *operands, out, lse, references = residuals
    query, key, value, sinks, *masks, elements = operands
    d_out, d_lse = cotangents
    if isinstance(d_out, SymbolicZero):
        d_out = jnp.zeros(d_out.shape, d_out.dtype)
    d_lse = () if isinstance(d_lse, SymbolicZero) else (d_lse,)  # as most often
    results_and_cotangents = out, lse, d_out, d_lse
    # A bias whose gradient is wanted is folded like all others, as under vmap each has its own.
    differentiated: tuple[jax.Array, ...] = ()
    if bias_wanted.holds:
        differentiated, elements = (elements.bias,), elements._replace(bias=None)
    run = _folding_vmap(functools.partial(_run_backward, settings))
    # A sink is in the LSE: to the gradients of the others it is no more than that.
    of_rows = () if references is None else (references,)
    d_query, d_key, d_value, *d_bias = run(
        query, key, value, *masks, elements, differentiated, of_rows, *results_and_cotangents
    )
    d_sinks = tuple(_sink_gradient(sink, *results_and_cotangents) for sink in sinks)
    d_elements = Elements(None, *d_bias) if d_bias else None
    return d_query, d_key, d_value, d_sinks, *(None for _ in masks), d_elements


def _sink_gradient(sink, out, lse, d_out, d_lse):
    """`[B, N]`: a sink's weight in each row times dLSE - rowsum(dO * O), as its value is 0."""
    lse = _of_rows(lse, out)
    products = d_out.astype(jnp.float32) * out.astype(jnp.float32)
    d_logits = sum(d_lse, -products.sum(-1).transpose(0, 2, 1))
    weights = jnp.exp(sink[:, :, None] - lse)
    return jnp.where(jnp.isinf(lse), 0.0, weights * d_logits).sum(-1)


_attention.defvjp(_attention_with_residuals, _attention_backward, symbolic_zeros=True)


# Letters of `sharding.over_devices`: of several arrays, and of the operands of `_attention`.
_QUERY, _KEY, _ROWS, _INTERVALS, _IDS, _ELEMENTS = "b.n.", "b.k.", "bn.", "b..", "b.", "bn.."
_REFERENCES = "bn.."
_MASKS = _INTERVALS, _IDS, _ROWS, _IDS  # words of dropout too
_OPERANDS = _QUERY, _KEY, _KEY, "bn", *_MASKS, _ELEMENTS


@functools.partial(jax.jit, static_argnums=(0, 1))  # so that calls outside of jit compile once
def _run_forward(settings, leading, *args):
    run = functools.partial(_local_forward, settings)
    return over_devices(run, _OPERANDS, (_QUERY, _ROWS, _REFERENCES), leading)(*args)


def _local_forward(settings, query, key, value, *operands):
    problem = settings.problem(query, key, value)
    out_types = _result_types(problem, query.dtype, settings.config.forward)
    return launch(_forward, (settings,), out_types, query, key, value, *operands)


def _forward(settings, query, key, value, sinks, intervals, ids, query_words, key_words, elements):
    from pallas_kernels import forward  # of Pallas, which is slow to import

    problem = settings.problem(query, key, value)
    out, lse, references = forward.attention(
        _pad_rows(query),
        _pad_rows(key),
        _pad_rows(value),
        next(iter(sinks), None),
        next(iter(intervals), None),
        ids or None,
        elements,
        (*query_words, *key_words) or None,
        problem=problem,
        config=settings.config.forward,
    )
    return out[:, : problem.query_length], lse, references


def _result_types(
    problem: Problem, dtype, config: ForwardConfig
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Of output `[B, T, N, h]`, LSE `[B, N, T]` with rows that fill the last tile, references."""
    heads, rows = (problem.batch, problem.heads), config.whole_tiles(problem.query_length)
    out_shape = (problem.batch, problem.query_length, problem.heads, problem.value_width)
    of_rows = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    return (
        jax.ShapeDtypeStruct(out_shape, dtype),
        of_rows((*heads, rows)),
        of_rows((*heads, 2, rows)),
    )


@functools.partial(jax.jit, static_argnums=(0, 1))
def _run_backward(settings, leading, *args):
    results_and_cotangents = _QUERY, _ROWS, _QUERY, _ROWS
    of_operands = _QUERY, _KEY, _KEY, *_MASKS, _ELEMENTS, _ELEMENTS, _REFERENCES
    operands = *of_operands, *results_and_cotangents
    differentiated = args[-6]
    results = _QUERY, _KEY, _KEY, *(_ELEMENTS for _ in differentiated)
    run = functools.partial(_local_backward, settings)
    return over_devices(run, operands, results, leading)(*args)


def _local_backward(settings, query, key, value, *args):
    """Gradients of query, key, value, and of the bias where `differentiated` has one."""
    *_, differentiated, _, _, _, _, _ = args
    check_backward(settings.config.backward, settings.problem(query, key, value).widest)
    out_types = query, key, value, *differentiated
    return launch(_backward, (settings,), out_types, query, key, value, *args)


def _backward(
    settings, query, key, value, intervals, ids, query_words, key_words, elements,
    differentiated, references, out, lse, d_out, d_lse,
):  # fmt: skip
    from pallas_kernels.gradients import attention_gradients  # of Pallas, slow to import

    problem = settings.problem(query, key, value)
    query, d_out = _zero_empty(query, d_out, lse, problem)
    if not (settings.all_count or settings.backward_ignores_unseen(problem)):
        d_out = _zero_unseeing(d_out, problem, intervals, ids)
    if differentiated:
        elements = elements._replace(bias=differentiated[0])
    d_query, d_key, d_value, *d_bias = attention_gradients(
        _pad_rows(query),
        _pad_rows(key),
        _pad_rows(value),
        _pad_rows(out),
        lse,
        _pad_rows(d_out),
        next(iter(d_lse), None),
        next(iter(references), None),
        problem=problem,
        config=settings.config.backward,
        deterministic=settings.deterministic,
        query_config=settings.config.backward_query,
        intervals=next(iter(intervals), None),
        ids=ids or None,
        elements=elements,
        dropout_words=(*query_words, *key_words) or None,
        with_bias_gradient=bool(differentiated),
    )
    rows, keys = problem.query_length, problem.key_length
    return d_query[:, :rows], d_key[:, :keys], d_value[:, :keys], *d_bias


def _zero_empty(query, d_out, lse, problem: Problem):
    """Query and d_out with zeros in rows that see nothing by mask or bias, where 0 * NaN is NaN."""
    if not problem.has_elements:
        return query, d_out
    seeing = jnp.logical_not(jnp.isneginf(_of_rows(lse, d_out))).transpose(0, 2, 1)[..., None]
    d_out = jnp.where(seeing, d_out, 0)
    return jnp.where(seeing, query, 0) if problem.has_mask else query, d_out


def _pad_rows(x):
    """`[B, T, ...]` with T rounded up by rows of zeros; the array itself if T is round."""
    missing = -x.shape[1] % _ROW_MULTIPLE
    if not missing:
        return x
    return jnp.pad(x, ((0, 0), (0, missing)) + ((0, 0),) * (x.ndim - 2))


def _folding_vmap(run, leading: int = 0):
    """`run(leading, *arrays)` of arrays `[B, ...]`, where vmap gives all one more leading axis.

    Each device makes the leading axes part of its batch (`over_devices`): done here, that would
    gather a batch that is sharded. Its arguments may be tuples of such arrays, or `Elements`, whose
    arrays may have an axis of 1 for the batch, or of what divides it.
    """
    function = jax.custom_batching.custom_vmap(functools.partial(run, leading))

    @function.def_vmap
    def _(axis_size, in_batched, *args):
        def spread(x, batched):
            return x if batched else jnp.broadcast_to(x, (axis_size, *x.shape))

        def spread_element(x, batched):
            is_one = not batched and set(x.shape[: leading + 1]) == {1}
            return x[None] if is_one else spread(x, batched)

        spread_args = (
            jax.tree.map(spread_element if isinstance(arg, Elements) else spread, arg, batched)
            for arg, batched in zip(args, in_batched, strict=True)
        )
        if axis_size == 0:  # no device has a batch to run a kernel on
            out = mapped_zero_times(functools.partial(run, leading), in_batched, args)
        else:
            out = _folding_vmap(run, leading + 1)(*spread_args)
        return out, jax.tree.map(lambda _: True, out)

    return function
