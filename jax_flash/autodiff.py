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
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from jax_flash import folding, kernel_scores, mask_blocks
from jax_flash.call import LSE_NAME, Call, named
from jax_flash.kernel_operands import (
    SCALES,
    SOFT_CAPS,
    Operands,
    bounds_beside_lengths,
    elements_of,
    folding_vmap,
    has_key_mask,
    hides_keys,
    intervals_of,
    of_rows,
    resized,
    result_types,
    segment_ids_of,
    words_of,
    zero_all_unseen,
    zero_empty,
    zero_masked,
    zero_unseeing,
    zero_unseen_by_heads,
)
from jax_flash.launch import launch
from jax_flash.sharding import over_devices, vary_alike
from pallas_kernels import dropout_words
from pallas_kernels.config import Config, check_backward
from pallas_kernels.defaults import for_problem
from pallas_kernels.element_arrays import Blocks, Elements, is_of_pairs
from pallas_kernels.problem import SUPPORTED_WIDTHS, Problem, sees_itself

_DTYPES = (np.dtype(jnp.bfloat16), np.dtype(jnp.float16))


def unsupported(call: Call) -> str | None:
    """Why the kernels cannot do this call, or None if they can; devices are dispatch's business."""
    call = kernel_scores.without_caps(call)
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
        f"scale {call.scale} is not in {SCALES}": isinstance(call.scale, (int, float))
        and not (SCALES[0] <= call.scale <= SCALES[1]),
        f"logits_soft_cap {call.logits_soft_cap} is not in {SOFT_CAPS}": (
            call.logits_soft_cap is not None
            and not SOFT_CAPS[0] <= call.logits_soft_cap <= SOFT_CAPS[1]
        ),
    }
    found = next((reason for reason, holds in reasons.items() if holds), None)
    if found is not None or call.is_empty:  # such a call reaches no kernel
        return found
    call = folding.folded_shapes(call)
    if call.score_mod is not None:
        found = kernel_scores.unsupported(call)
    return found or (None if call.mask_mod is None else _unsupported_beside_mask_mod(call))


def _unsupported_beside_mask_mod(call: Call) -> str | None:
    """Why they cannot do one with a mask_mod, which is folded."""
    function = call.mask_mod
    assert function is not None
    widest = max(call.query.shape[-1], call.value.shape[-1])
    alone = "there the kernels take one of positions alone, and no array beside it, or a mask"
    others = {
        "a bias of keys or of queries alone: the kernels take one or the other": (
            call.bias is not None
        ),
        # The kernels of dQ alone have lists of static blocks.
        f"deterministic gradients: {alone}": (
            call.deterministic and not mask_blocks.is_static(function)
        ),
        # It would spill.
        f"a soft cap and dropout at width {widest}, above 128: the kernels take one or the other": (
            widest > 128 and call.logits_soft_cap is not None and call.dropout_rate > 0
        ),
        f"width {widest}: {alone}": widest > 128 and not mask_blocks.is_static(function),
    }
    for name, holds in others.items():
        if holds:
            return f"mask_mod with {name}"
    return mask_blocks.unsupported(function)


def attention(call: Call) -> tuple[jax.Array, jax.Array]:
    """Attention on the kernels; call must be one that `unsupported` has no reason against."""
    call = folding.folded(kernel_scores.without_caps(call))
    settings, operands = _prepared(call)
    out, lse = _attention(settings, operands, vary_alike(kernel_scores.sums_of(call), operands))
    return kernel_scores.with_gradients_of_captured(call, out, lse.transpose(0, 2, 1))


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
    ones = jnp.ones(lse.shape, jnp.int8)
    seeing = zero_unseeing(ones, settings.problem, operands.intervals, operands.ids) > 0
    lse, d_lse = jnp.where(seeing, lse, -jnp.inf), jnp.where(seeing, d_lse, 0.0)
    lse, d_lse = (x.transpose(0, 2, 1) for x in (lse, d_lse))
    residuals = _Wanted(), operands, out, lse, None
    d_operands, _ = _attention_backward(settings, residuals, (d_out, d_lse))
    return d_operands.query, d_operands.key, d_operands.value


def _prepared(call: Call):
    """The arguments of `_attention`: settings and operands."""
    assert isinstance(call.scale, (int, float))  # else unsupported
    lowest, highest, intervals = intervals_of(call)
    ids = segment_ids_of(call)
    are_one = call.visibility.query_segment_ids is call.visibility.key_value_segment_ids
    mask_function, blocks, seen = _mask_of_blocks(call, lowest, highest)
    score_function, scores = kernel_scores.score_of(call)
    soft_cap = call.logits_soft_cap if score_function is None else None  # else it is in there
    elements = elements_of(call)._replace(scores=scores)
    has_mask, has_bias = elements.mask is not None, elements.bias is not None
    has_score = score_function is not None
    are_beside = bool(ids) or has_bias or has_score or mask_function is not None
    are_beside |= soft_cap is not None or call.dropout_rate > 0
    masks_keys = has_key_mask(call) and not are_beside
    has_mask &= not masks_keys
    all_count = bool(ids) and are_one and not intervals and sees_itself(lowest, highest)
    if mask_function is not None:
        all_count = mask_function.all_count
    has_lengths, highest_beside = bounds_beside_lengths(call)
    has_lengths &= not (are_beside or elements.mask is not None)
    if has_lengths:
        highest = highest_beside
    problem = Problem.of(
        call.query,
        call.key,
        call.value,
        scale=float(call.scale),
        lowest=lowest,
        highest=highest,
        dynamic=bool(intervals) and not has_lengths,
        has_lengths=has_lengths,
        has_key_mask=masks_keys,
        segmented=bool(ids),
        has_mask=has_mask,
        has_bias=has_bias,
        soft_cap=soft_cap,
        dropout=dropout_words.steps_of(call.dropout_rate),
        mask_function=mask_function,
        score_function=score_function,
    )
    hides = problem.may_begin_with_bias and hides_keys(call, elements)
    settings = _Settings(problem, all_count, call.deterministic, call.config, hides)
    settings = settings.with_rows(elements)
    sinks: tuple[jax.Array, ...] = ()
    if call.sinks is not None:
        # For each batch entry, as vmap makes the batch longer, and sharded as the query is.
        batch_and_heads = jnp.zeros_like(call.query[:, 0, :, 0], jnp.float32)
        sinks = (batch_and_heads + call.sinks.astype(jnp.float32)[None],)
    given = call.query, call.key, call.value, sinks, intervals, ids, *words_of(call)
    operands = Operands(*given, blocks, elements)
    if has_mask and mask_function is None and not settings.hides_keys:
        operands = operands.with_keys(lambda x: zero_masked(x, call.visibility, problem))
    if seen is not None:
        operands = operands.with_keys(lambda x: zero_unseen_by_heads(x, seen))
    if not (settings.all_count or problem.forward_ignores_unseen):
        operands = operands.with_zeros(problem)
    return settings, vary_alike(operands)


def _has_dense_blocks(call: Call) -> bool:
    """Whether a dense mask hides blocks that the kernels skip: beside what they have lists of."""
    see = call.visibility
    if not is_of_pairs(see.mask):
        return False
    widest = max(call.query.shape[-1], call.value.shape[-1])
    beside_others = call.bias is not None or see.query_segment_ids is not None
    return see.are_bounds_static and widest <= 128 and not (beside_others or call.deterministic)


def _mask_of_blocks(call: Call, lowest: int | None, highest: int | None):
    """A `MaskFunction` or None, `Blocks` or none, and None or which keys each head sees."""
    if call.mask_mod is None and not _has_dense_blocks(call):
        return None, (), None
    from pallas_kernels.mask_functions import MaskFunction  # brings Pallas

    lengths = call.query.shape[1], call.key.shape[1]
    if call.mask_mod is None:
        return MaskFunction(None), (), None  # blocks come of the mask's bits
    if mask_blocks.is_static(call.mask_mod):
        program = call.mask_mod.program
        return mask_blocks.static_mask(program, *lengths, lowest, highest), (), None
    blocks, seen = mask_blocks.given_blocks(call, lowest, highest)
    return MaskFunction(call.mask_mod.program), (blocks,), seen


@dataclasses.dataclass(frozen=True)
class _Settings:
    """What of a call is no array.

    Attributes:
      problem: of the arrays of the call, or of others of another batch and other heads (`at`).
      all_count: whether, but for a mask, each query is known to see a key, and each key to be seen.
      deterministic: whether all gradients are to be the same every time.
      config: given, or None.
      hides_keys: whether the forward takes a mask as one of keys (`forward_problem`).
      rows: of an LSE, which fill tiles by the settings of the call. So many they are on each device
        and under `vmap`, whose own settings may be others.
    """

    problem: Problem
    all_count: bool
    deterministic: bool
    config: Config | None
    hides_keys: bool = False
    rows: int = 0

    @property
    def forward_problem(self) -> Problem:
        """That of the forward, which zeroes rows of V where they are read, not in memory."""
        if not self.hides_keys:
            return self.problem
        return dataclasses.replace(self.problem, has_mask=False, has_key_mask=True)

    def at(self, operands: Operands) -> "_Settings":
        """The same of what a device has of the call's arrays, or of all that `vmap` maps."""
        problem = self.problem.with_sizes_of(operands.query, operands.key)
        return dataclasses.replace(self, problem=problem)

    def config_of(self, elements: Elements) -> Config:
        """Settings of the kernels: those that are given, or the best of what a device has."""
        if self.config is not None:
            return self.config
        return for_problem(
            self.forward_problem,
            bias_of_keys=elements.has_bias_of_keys,
            tiled_bias=elements.tiled_bias_dtype is not None,
        )

    def with_rows(self, elements: Elements) -> "_Settings":
        forward = self.config_of(elements).forward
        return dataclasses.replace(self, rows=forward.whole_tiles(self.problem.query_length))

    @property
    def backward_ignores_unseen(self) -> bool:
        """Whether what does not count may be NaN in the backward kernels."""
        return self.problem.backward_ignores_unseen and not self.deterministic


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(settings, operands, sums):
    """Output `[B, T, N, h]` and LSE `[B, N, T]`.

    Sums are zeros, in whose place reads of a score function get their gradients
    (`kernel_scores.sums_of`).
    """
    del sums
    return _attention_forward(settings, operands)[0]


def _attention_with_residuals(settings, operands, sums):
    """What `_attention_forward` gives, and which other gradients are asked for.

    Args:
      settings, operands, sums: as for `_attention`, with leaves that are `CustomVJPPrimal`.
    """
    results, residuals = _attention_forward(settings, jax.tree.map(lambda x: x.value, operands))
    bias = operands.elements.bias
    reads = tuple((number, x.value.shape[-1]) for number, x in enumerate(sums) if x.perturbed)
    return results, (_Wanted(bias is not None and bias.perturbed, reads, len(sums)), *residuals)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Wanted:
    """Which gradients are asked for beside those of query, key and value.

    Attributes:
      bias: whether that of the bias is.
      reads: numbers of reads of a score function, of the count that there are, and how many sums
        each has.
    """

    bias: bool = False
    reads: tuple[tuple[int, int], ...] = ()
    count: int = 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _OfResults:
    """What the backward takes beside the operands, or what stands for each.

    Attributes:
      bias: one whose gradient is asked for, or none. It is folded like all others, as under vmap
        each has its own.
      references: of the kernel, one `[B, N, 2, T]`, or none where the LSE is of other keys too.
      out, lse: results, `[B, T, N, h]` and `[B, N, T]`.
      d_out, d_lse: their cotangents; of the LSE one or none.
    """

    bias: Any
    references: Any
    out: Any
    lse: Any
    d_out: Any
    d_lse: Any


def _attention_forward(settings, operands):
    out, lse, references = folding_vmap(functools.partial(_run_forward, settings))(operands)
    out, lse = named(out, lse)
    references = checkpoint_name(references, LSE_NAME)
    return (out, of_rows(lse, out)), (operands, out, lse, references)


def _attention_backward(settings, residuals, cotangents):
    wanted, operands, *results = residuals
    problem = settings.problem
    if not problem.forward_ignores_unseen or settings.backward_ignores_unseen:
        return _operand_gradients(settings, residuals, cotangents)
    # As if they had been set to zero before the forward pass, as others are.
    residuals = wanted, operands.with_zeros(problem), *results
    d_operands, d_sums = _operand_gradients(settings, residuals, cotangents)
    d_query, d_key, d_value = zero_all_unseen(
        d_operands.query,
        d_operands.key,
        d_operands.value,
        problem,
        operands.intervals,
        operands.ids,
    )
    return dataclasses.replace(d_operands, query=d_query, key=d_key, value=d_value), d_sums


def _operand_gradients(settings, residuals, cotangents):
    """Of the operands of `_attention`, which are zero where they do not count; and of its sums."""
    wanted, operands, out, lse, references = residuals
    sinks, elements = operands.sinks, operands.elements
    d_out, d_lse = cotangents
    if isinstance(d_out, SymbolicZero):
        d_out = jnp.zeros(d_out.shape, d_out.dtype)
    d_lse = () if isinstance(d_lse, SymbolicZero) else (d_lse,)  # as most often
    bias: tuple[jax.Array, ...] = ()
    if wanted.bias:
        bias, elements = (elements.bias,), elements._replace(bias=None)
    run = folding_vmap(functools.partial(_run_backward, settings, wanted.reads))
    # A sink is in the LSE: to the gradients of the others it is no more than that.
    d_query, d_key, d_value, *others = run(
        dataclasses.replace(operands, sinks=(), elements=elements),
        _OfResults(bias, () if references is None else (references,), out, lse, d_out, d_lse),
    )
    d_sinks = tuple(_sink_gradient(sink, out, lse, d_out, d_lse) for sink in sinks)
    d_elements = Elements(None, others.pop(0)) if wanted.bias else None
    d_reads = dict(zip((number for number, _ in wanted.reads), others, strict=True))
    none = dict.fromkeys(field.name for field in dataclasses.fields(Operands))
    d_operands = dict(query=d_query, key=d_key, value=d_value, sinks=d_sinks, elements=d_elements)
    return Operands(**none | d_operands), tuple(map(d_reads.get, range(wanted.count)))


def _sink_gradient(sink, out, lse, d_out, d_lse):
    """`[B, N]`: a sink's weight in each row times dLSE - rowsum(dO * O), as its value is 0."""
    lse = of_rows(lse, out)
    products = d_out.astype(jnp.float32) * out.astype(jnp.float32)
    d_logits = sum(d_lse, -products.sum(-1).transpose(0, 2, 1))
    sink = sink[:, :, None]
    below = jnp.minimum(sink - lse, 0.0)
    below = jnp.where(below < -(2.0**-21) * jnp.abs(sink), below, 0.0)  # else an LSE is rounded so
    weights = jnp.exp(below)
    return jnp.where(jnp.isinf(lse), 0.0, weights * d_logits).sum(-1)


_attention.defvjp(_attention_with_residuals, _attention_backward, symbolic_zeros=True)


# Letters of `sharding.over_devices`.
_QUERY, _KEY, _ROWS, _ELEMENTS, _REFERENCES = "b.n.", "b.k.", "bn.", "bn..", "bn.."
_BLOCKS: Any = "bn..", "bn.", "bn.", "b*"  # of the fields of `element_arrays.Blocks`
_OF_RESULTS = _OfResults(_ELEMENTS, _REFERENCES, _QUERY, _ROWS, _QUERY, _ROWS)


def _letters_of(operands: Operands) -> Operands:
    return Operands(
        query=_QUERY,
        key=_KEY,
        value=_KEY,
        sinks="bn",
        intervals="b..",
        ids="b.",
        query_words=_ROWS,
        key_words="b.",
        blocks=tuple(Blocks(*_BLOCKS) for _ in operands.blocks),
        elements=_ELEMENTS,
    )


@functools.partial(jax.jit, static_argnums=(0, 1))  # so that calls outside of jit compile once
def _run_forward(settings, leading, operands):
    run = functools.partial(_local_forward, settings)
    letters = (_letters_of(operands),)
    return over_devices(run, letters, (_QUERY, _ROWS, _REFERENCES), leading)(operands)


def _local_forward(settings, operands):
    settings = settings.at(operands)
    out_types = result_types(settings.problem, operands.query.dtype, settings.rows)
    return launch(_forward, (settings,), out_types, operands)


def _forward(settings, operands):
    from pallas_kernels import forward  # of Pallas, which is slow to import
    from pallas_kernels.mask_bits import blocks_of, with_mask_bits

    problem = settings.forward_problem
    elements, blocks = with_mask_bits(operands.elements, problem), operands.blocks
    if problem.has_dense_lists:
        blocks = (blocks_of(elements),)
    out, lse, references = forward.attention(
        operands.query,
        operands.key,
        operands.value,
        next(iter(operands.sinks), None),
        next(iter(operands.intervals), None),
        operands.ids or None,
        elements,
        operands.words,
        next(iter(blocks), None),
        problem=problem,
        config=settings.config_of(operands.elements).forward,
    )
    lse, references = (resized(x, settings.rows) for x in (lse, references))
    if operands.sinks and problem.unbounded:  # then what the kernel says of an LSE is finite
        is_infinite = jnp.isposinf(operands.sinks[0])[:, :, None] & (lse > -jnp.inf)
        lse = jnp.where(is_infinite, jnp.inf, lse)
    return out, lse, references


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _run_backward(settings, reads, leading, operands, results):
    run = functools.partial(_local_backward, settings, reads)
    given = _letters_of(operands), _OF_RESULTS
    of_others = *(_ELEMENTS for _ in results.bias), *(_ROWS for _ in reads)
    gradients = _QUERY, _KEY, _KEY, *of_others
    return over_devices(run, given, gradients, leading)(operands, results)


def _local_backward(settings, reads, operands, results):
    """Gradients of query, key, value, of the bias that is asked for, and of reads."""
    settings = settings.at(operands)
    problem, config = settings.problem, settings.config_of(operands.elements)
    check_backward(config.backward, problem.widest)
    heads = problem.batch, problem.heads
    of_reads = (jax.ShapeDtypeStruct((*heads, n), jnp.float32) for _, n in reads)
    out_types = operands.query, operands.key, operands.value, *results.bias, *of_reads
    numbers = tuple(number for number, _ in reads)
    return launch(_backward, (settings, numbers), out_types, operands, results)


def _without_hidden(settings, operands, *of_keys):
    """Arrays of keys with zeros for those that a mask hides, where `_Settings.hides_keys`."""
    if not settings.hides_keys:
        return of_keys
    seen = operands.elements.mask[:, :, 0]
    return tuple(zero_unseen_by_heads(x, seen) for x in of_keys)


def _backward(settings, reads, operands, results):
    from pallas_kernels.gradients import attention_gradients  # of Pallas, slow to import
    from pallas_kernels.mask_bits import are_seen, blocks_of, with_mask_bits

    problem = settings.problem
    key, value, d_out = operands.key, operands.value, results.d_out
    query = zero_empty(operands.query, results.lse, problem)
    if not (settings.all_count or settings.backward_ignores_unseen):
        d_out = zero_unseeing(d_out, problem, operands.intervals, operands.ids)
    elements, blocks = operands.elements, operands.blocks
    key, value = _without_hidden(settings, operands, key, value)
    if results.bias:
        elements = elements._replace(bias=results.bias[0])
    elements = with_mask_bits(elements, problem)
    if problem.has_dense_lists:
        blocks = (blocks_of(elements),)
    if problem.has_dense_lists and reads:
        seen = are_seen(blocks[0].seen, problem.key_length)
        key, value = (zero_unseen_by_heads(x, seen) for x in (key, value))
    config = settings.config_of(operands.elements)
    d_query, d_key, d_value, *others = attention_gradients(
        query,
        key,
        value,
        results.out,
        results.lse,
        d_out,
        next(iter(results.d_lse), None),
        next(iter(results.references), None),
        problem=problem,
        config=config.backward,
        deterministic=settings.deterministic,
        query_config=config.backward_query,
        intervals=next(iter(operands.intervals), None),
        ids=operands.ids or None,
        elements=elements,
        dropout_words=operands.words,
        blocks=next(iter(blocks), None),
        with_bias_gradient=bool(results.bias),
        reads=reads,
    )
    # 0 times NaN of a query that counts is none of theirs.
    return d_query, *_without_hidden(settings, operands, d_key, d_value), *others
