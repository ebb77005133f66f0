"""attention(): what users call. It checks the arguments and brings them into one form, a `Call`."""

import functools
import inspect
import math
import numbers
from typing import Any, Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_flash import dispatch
from jax_flash.call import Call
from jax_flash.masks import Visibility
from jax_flash.quantization import FLOAT8, LARGEST, Quantized, accumulator, key_words
from pallas_kernels.config import DROPOUT_STEPS, Config
from pallas_kernels.dropout_words import steps_of

DTYPES = ("bfloat16", "float16", "float32", "float64")

# Beyond these float32 loses what logits and caps are divided by each other to.
_SOFT_CAPS = (1e-30, 1e30)


class Options(TypedDict, total=False):
    """What `attention` takes by name, but for return_residual: for type checkers alone."""

    scale: ArrayLike | None
    is_causal: bool
    query_seq_lengths: ArrayLike | None
    key_value_seq_lengths: ArrayLike | None
    local_window_size: int | tuple[int, int] | None
    implementation: str | None
    query_segment_ids: ArrayLike | None
    key_value_segment_ids: ArrayLike | None
    query_offset: ArrayLike
    logits_soft_cap: float | None
    sinks: ArrayLike | None
    dropout_rate: float
    dropout_key: jax.Array | None
    deterministic: bool
    config: Config | None


@overload
def attention(
    query: ArrayLike | Quantized,
    key: ArrayLike | Quantized,
    value: ArrayLike | Quantized,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    return_residual: Literal[False] = False,
    **options: Unpack[Options],
) -> jax.Array: ...


@overload
def attention(
    query: ArrayLike | Quantized,
    key: ArrayLike | Quantized,
    value: ArrayLike | Quantized,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    return_residual: Literal[True],
    **options: Unpack[Options],
) -> tuple[jax.Array, jax.Array]: ...


@overload
def attention(
    query: ArrayLike | Quantized,
    key: ArrayLike | Quantized,
    value: ArrayLike | Quantized,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    return_residual: bool,
    **options: Unpack[Options],
) -> jax.Array | tuple[jax.Array, jax.Array]: ...


def attention(
    query: ArrayLike | Quantized,
    key: ArrayLike | Quantized,
    value: ArrayLike | Quantized,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: ArrayLike | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
    query_segment_ids: ArrayLike | None = None,
    key_value_segment_ids: ArrayLike | None = None,
    query_offset: ArrayLike = 0,
    logits_soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    deterministic: bool = False,
    config: Config | None = None,
) -> Any:
    """Exact multi-head attention, in memory linear in the sequence lengths.

    For each batch element b and query head n, which reads key head n // (N // K):

        logits[i, j]  = soft_cap(scale * query[i] . key[j] + bias[i, j])     where j is visible to i
        weights[i, :] = dropout(softmax(logits[i, :], with one more logit, the head's sink))
        out[i]        = sum over j of weights[i, j] * value[j]

    Key j is visible to query i if every condition that is given holds: `is_causal`,
    `local_window_size`, the lengths, equal segment ids, and `mask`. A query that sees no key has
    output 0, LSE -inf and gradients 0.

    Products are of the input dtype and accumulate in float32; softmax is float32. float32 inputs
    are computed in float32, float64 inputs (jax_enable_x64) in float64. Query, key and value in FP8
    (`jax_flash.quantize_fp8`) have all options, an output in bfloat16 and no derivative;
    `jax_flash.attention_fp8` quantises inputs, has gradients, and gives the inputs' dtype.

    The first arguments are those of `jax.nn.dot_product_attention`, and this function can take its
    place. It differs from it where a query sees no key (there the output is the mean of the
    values), in the LSE (there rounded to the input dtype, and not differentiable), and in refusing
    what makes no sense (an integer bias, a negative window, inputs of unlike ranks).

    It can be transformed by jit, grad, vmap over any axes, checkpoint, scan, shard_map and export,
    on "xla" also with symbolic sizes, of which all rows are computed at once, as by jax.nn's.
    Under jit, operands may be sharded over batch and heads; for a sharded sequence there is
    `jax_flash.ring_attention`.
    `implementation="xla"` also has forward-mode and higher derivatives.
    Under `jax.checkpoint`, the policy
    `jax.checkpoint_policies.save_only_these_names(*jax_flash.CHECKPOINT_NAMES)` keeps output and
    LSE, so that the forward pass is not run again; on "cudnn" it is, whatever the policy.

    What decides what is computed is static, no traced value: the flags, `local_window_size`,
    `logits_soft_cap`, `dropout_rate`, `implementation` and `config`.
    Integers may be of any dtype if int32 holds them; where values are traced, larger lengths and
    offsets count as the largest that int32 holds, and ids modulo 2^32.

    Args:
      query: `[B, T, N, H]`, or `[T, N, H]` without a batch; bfloat16, float16, float32 or float64.
        Or all three are `jax_flash.Quantized`, of these shapes.
      key: `[B, S, K, H]`, N a multiple of K, of the query's rank and dtype.
      value: `[B, S, K, h]`, as key; h need not be H.
      bias: added to the scaled logits; floating, broadcastable to `[B, N, T, S]` (fewer axes are
        the last ones). Its gradient has its own shape.
      mask: bool, broadcastable to `[B, N, T, S]` (fewer axes are the last ones); True is visible.
      scale: a number or a scalar array; None is 1 / sqrt(H).
      is_causal: j <= i + query_offset.
      query_seq_lengths: integers `[B]`: i < length. Without a batch, `[1]` or a scalar.
      key_value_seq_lengths: integers `[B]`: j < length. Without a batch, `[1]` or a scalar.
      local_window_size: (left, right), or one number for both:
        i + query_offset - left <= j <= i + query_offset + right.
      implementation: None for the fastest that can do the call on this device (`explain` says
        which, and why not a faster one), or one of
          "mosaic_gpu", Pallas kernels for Hopper GPUs (H100, H200); they can also be lowered, not
            run, on a machine without a GPU,
          "cudnn", jax.nn's, for what cuDNN computes right on NVIDIA GPUs from Ampere on,
          "xla", plain JAX, on any device.
        The device is the query's, or JAX's default device where the query is being traced.
      return_residual: also return the LSE.
      query_segment_ids: integers `[B, T]` (`[T]` without a batch): equal ids see each other.
      key_value_segment_ids: integers `[B, S]` (`[S]` without a batch). Where they are those of the
        queries, one array for both saves the kernels a pass over the inputs.
      query_offset: position of query 0 among the keys: a static integer, or integers `[B]` or one
        for all. S - T aligns the last query with the last key. Causal and window alone use it.
      logits_soft_cap: cap from 1e-30 to 1e30: logits, bias included, become
        cap * tanh(logits / cap).
      sinks: floating `[N]`: a logit per query head that takes weight but has no value.
      dropout_rate: probability in [0, 1) of dropping a weight; the others grow by 1 / (1 - rate). A
        multiple of 2^-15, or as good as the next such between 0 and 1. Of the weights of one query
        the share is one of the two multiples of 2^-8 next to it, so chosen that the mean is right.
      dropout_key: a JAX random key, needed where dropout_rate > 0. What is dropped depends on
        (key, b, n, i, j) alone, so it is the same on every implementation. Under vmap b counts
        within one mapped call: map the key too. Keys of four words (rbg) are folded to two.
      deterministic: gradients are the same bit by bit from run to run. On "mosaic_gpu" the backward
        pass then takes seven products of work for five; at widths above 128 they always are.
      config: settings of the kernels (`pallas_kernels.config`), read by "mosaic_gpu" alone; None
        for the tuned ones.

    Returns:
      The output `[B, T, N, h]` (`[T, N, h]` without a batch) in the query's dtype, bfloat16 where
      that is Quantized; with `return_residual`, (output, LSE): LSE `[B, T, N]` (`[T, N]`) is the
      natural log of the softmax denominator, sinks included, float32 and differentiable.

    Raises:
      TypeError: an argument is of the wrong type or dtype.
      ValueError: an argument has the wrong shape or value, or does not go with another.
      NotImplementedError: the implementation that was asked for cannot do the call.

    Sources: Milakov and Gimelshein 2018 (online softmax); Dao et al. 2022, Dao 2023, Shah et al.
    2024 (FlashAttention 1 to 3); Ainslie et al. 2023 (grouped queries); Gemma 2 2024 (soft cap);
    Xiao et al. 2023 and gpt-oss 2025 (sinks).
    """
    call = _checked(**locals())
    out, lse = dispatch.attention(call, implementation)
    if jnp.ndim(query) == 3:
        out, lse = out[0], None if lse is None else lse[0]
    return (out, lse) if return_residual else out


@functools.wraps(attention, assigned=(), updated=())  # the signature alone
def explain(*args, **kwargs) -> dispatch.Explanation:
    """Says which implementation `attention` would run with the same arguments, and why.

    With `implementation="mosaic_gpu"` it says whether a Hopper GPU would run the call, also on a
    machine without a GPU: where not, it raises NotImplementedError with the reason.

    `attention` says the same in the log "jax_flash", once, where it passes an implementation over:
    a warning on a Hopper GPU, else for information.

    Args:
      *args, **kwargs: as for `attention`; any array may be a `jax.ShapeDtypeStruct`.

    Returns:
      An `Explanation`: its `implementation`, and `reasons`, a dict that says for each faster
      implementation why it was passed over. It prints as text.

    Raises:
      Whatever `attention` raises before it computes anything.
    """

    def choose(**arguments):
        return dispatch.choose(_checked(**arguments), arguments["implementation"])

    return _explained(inspect.signature(attention), choose, args, kwargs)


def _explained(signature: inspect.Signature, choose, args, kwargs) -> dispatch.Explanation:
    """What `choose` says of the arguments by name, of which any array may be a ShapeDtypeStruct."""
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    arguments = bound.arguments
    is_shape = lambda x: isinstance(x, jax.ShapeDtypeStruct)
    shapes = {k: x for k, x in arguments.items() if any(map(is_shape, jax.tree.leaves(x)))}
    if not shapes:  # untraced, so that the query's own device counts
        return choose(**arguments)
    explanations = []
    jax.eval_shape(lambda arrays: explanations.append(choose(**arguments | arrays)), shapes)
    return explanations[0]


def _checked(
    *,
    query,
    key,
    value,
    bias,
    mask,
    scale,
    is_causal,
    query_seq_lengths,
    key_value_seq_lengths,
    local_window_size,
    implementation,
    return_residual,
    query_segment_ids,
    key_value_segment_ids,
    query_offset,
    logits_soft_cap,
    sinks,
    dropout_rate,
    dropout_key,
    deterministic,
    config,
) -> Call:
    """Checks the arguments of `attention`, described there, and returns their canonical form."""
    for name, flag in (
        ("is_causal", is_causal),
        ("return_residual", return_residual),
        ("deterministic", deterministic),
    ):
        _need_static(name, flag)
        _need(isinstance(flag, bool | np.bool_), name, flag, "True or False", TypeError)
    _need(
        implementation is None or _is_name(implementation, dispatch.IMPLEMENTATIONS),
        "implementation",
        repr(implementation),
        f"None or one of {', '.join(dispatch.IMPLEMENTATIONS)}",
    )
    _need(
        config is None or isinstance(config, Config),
        "config",
        type(config).__name__,
        "None or a pallas_kernels.config.Config",
        TypeError,
    )
    _need(
        config is None or implementation in (None, "mosaic_gpu"),
        "config",
        f"one with implementation={implementation!r}",
        "None there: it is a setting of the mosaic_gpu kernels",
    )

    named = {"query": query, "key": key, "value": value}
    quantized = {name: x for name, x in named.items() if isinstance(x, Quantized)}
    _need(
        len(quantized) in (0, len(named)),
        "query, key and value",
        f"Quantized for {' and '.join(quantized)} alone",
        "Quantized for all of them, or for none",
        TypeError,
    )
    _need(
        config is None or not quantized or config.forward_fp8 is not None,
        "config",
        "one without forward_fp8 for Quantized arrays",
        "None there, or settings of the FP8 kernel",
    )
    query, key, value = (
        _array(name, x.values if isinstance(x, Quantized) else x) for name, x in named.items()
    )
    dtype = query.dtype
    if quantized:
        _need(dtype == FLOAT8, "query", f"values in {dtype}", FLOAT8.dtype.name, TypeError)
    else:
        _need(dtype.name in DTYPES, "query", dtype, f"one of {', '.join(DTYPES)}", TypeError)
    _need(key.dtype == dtype, "key", key.dtype, f"the dtype of query, {dtype}", TypeError)
    _need(value.dtype == dtype, "value", value.dtype, f"the dtype of query, {dtype}", TypeError)
    _need(query.ndim in (3, 4), "query", query.shape, "[B, T, N, H] or [T, N, H]")
    has_batch = query.ndim == 4
    needs = "[B, S, K, {}], as query has a batch" if has_batch else "[S, K, {}], as query has none"
    _need(key.ndim == query.ndim, "key", key.shape, needs.format("H"))
    _need(value.ndim == query.ndim, "value", value.shape, needs.format("h"))
    if not has_batch:
        query, key, value = query[None], key[None], value[None]
    B, T, N, H = query.shape
    _, S, K, h = value.shape
    _need(H > 0, "query", f"head width {H}", "at least 1")
    _need(h > 0, "value", f"head width {h}", "at least 1")
    _need(key.shape[0] == B, "key", f"batch {key.shape[0]}", f"that of query, {B}")
    _need(value.shape[0] == B, "value", f"batch {value.shape[0]}", f"that of query, {B}")
    _need(key.shape[3] == H, "key", f"head width {key.shape[3]}", f"that of query, {H}")
    _need(key.shape[1] == S, "value", f"length {S}", f"that of key, {key.shape[1]}")
    _need(key.shape[2] == K, "value", f"{K} heads", f"as many as key, {key.shape[2]}")
    _need_heads_that_fit(query, key)

    in_float8: dict[str, Any] = {}
    if quantized:
        arrays = query, key, value
        query_scales, key_scales, value_scales = (
            _scales(name, x, values.shape, has_batch)
            for (name, x), values in zip(quantized.items(), arrays, strict=True)
        )
        in_float8 = {
            "scales": (query_scales, key_scales, value_scales),
            "block_sizes": tuple(x.block_size for x in quantized.values()),
            "largest": (quantized["query"].largest, quantized["key"].largest),
        }

    if bias is not None:
        bias = _array("bias", bias)
        _need(jnp.issubdtype(bias.dtype, jnp.floating), "bias", bias.dtype, "floating", TypeError)
        bias = _broadcastable("bias", bias, (B, N, T, S))
    if mask is not None:
        mask = _array("mask", mask)
        needs = "bool: mask.astype(bool), if it is 0 where a key is hidden"
        if jnp.issubdtype(mask.dtype, jnp.floating):
            needs += ", or bias=mask, if it is to be added to logits"
        _need(mask.dtype == jnp.bool_, "mask", mask.dtype, needs, TypeError)
        mask = _broadcastable("mask", mask, (B, N, T, S))
    if sinks is not None:
        sinks = _array("sinks", sinks)
        _need(
            jnp.issubdtype(sinks.dtype, jnp.floating), "sinks", sinks.dtype, "floating", TypeError
        )
        _need(sinks.shape == (N,), "sinks", sinks.shape, f"one per query head, {(N,)}")

    if scale is None and not isinstance(H, int):  # a symbol of jax.export
        scale = jax.lax.rsqrt(jnp.asarray(H, accumulator(dtype)))
    elif scale is None:
        scale = 1 / math.sqrt(H)
    elif _is_number(scale, numbers.Real):
        scale = _finite("scale", scale, accumulator(dtype))
    else:
        scale = _array("scale", scale)
        _need(
            jnp.issubdtype(scale.dtype, jnp.floating) or jnp.issubdtype(scale.dtype, jnp.integer),
            "scale",
            scale.dtype,
            "a real number",
            TypeError,
        )
        _need(scale.shape == (), "scale", f"shape {scale.shape}", "a number or a scalar array")
    logits_soft_cap = _soft_cap(logits_soft_cap)

    if query_seq_lengths is not None:
        query_seq_lengths = _per_batch("query_seq_lengths", query_seq_lengths, (B,), has_batch)
    if key_value_seq_lengths is not None:
        key_value_seq_lengths = _per_batch(
            "key_value_seq_lengths", key_value_seq_lengths, (B,), has_batch
        )
    _need(
        (query_segment_ids is None) == (key_value_segment_ids is None),
        "query_segment_ids and key_value_segment_ids",
        "one without the other",
        "both or neither",
    )
    if query_segment_ids is not None:
        given_query_segment_ids = query_segment_ids
        of_ids = functools.partial(_per_batch, has_batch=has_batch, saturated=False)
        query_segment_ids = of_ids("query_segment_ids", query_segment_ids, (B, T))
        # One array for both stays one: then every position has its own id on the other side.
        is_one = key_value_segment_ids is given_query_segment_ids and T == S
        key_value_segment_ids = (
            query_segment_ids
            if is_one
            else of_ids("key_value_segment_ids", key_value_segment_ids, (B, S))
        )
    if _is_number(query_offset, numbers.Integral):
        query_offset = int(query_offset)
        _need(abs(query_offset) < 2**31, "query_offset", query_offset, "an integer within int32")
    else:
        query_offset = _int32("query_offset", query_offset)
        _need(
            query_offset.shape in ((), (B,)),
            "query_offset",
            f"shape {query_offset.shape}",
            f"an integer or shape {(B,)}",
        )
        query_offset = jnp.broadcast_to(query_offset, (B,))
    window = None if local_window_size is None else _window(local_window_size)
    is_causal, window, query_offset = _simplest(bool(is_causal), window, query_offset, T, S)

    _need_static("dropout_rate", dropout_rate)
    _need(
        _is_number(dropout_rate, numbers.Real),
        "dropout_rate",
        type(dropout_rate).__name__,
        "a number",
        TypeError,
    )
    _need(0 <= dropout_rate < 1, "dropout_rate", dropout_rate, "at least 0 and less than 1")
    if dropout_rate > 0:
        _need(dropout_key is not None, "dropout_key", None, f"a key, for a rate of {dropout_rate}")
        dropout_key = _key_words(dropout_key)
    else:
        dropout_key = None

    return Call(
        query=query,
        key=key,
        value=value,
        visibility=Visibility(
            is_causal=is_causal,
            window=window,
            query_offset=query_offset,
            query_seq_lengths=query_seq_lengths,
            key_value_seq_lengths=key_value_seq_lengths,
            query_segment_ids=query_segment_ids,
            key_value_segment_ids=key_value_segment_ids,
            mask=mask,
        ),
        scale=scale,
        bias=bias,
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
        dropout_rate=steps_of(float(dropout_rate)) / DROPOUT_STEPS,
        dropout_key=dropout_key,
        return_residual=bool(return_residual),
        deterministic=bool(deterministic),
        config=config,
        **in_float8,
    )


def _scales(name: str, x: Quantized, shape: tuple[int, ...], has_batch: bool) -> jax.Array:
    """The scales of an array of shape `[B, T, N, H]`, as float32 `[B, blocks, N]`."""
    block_size, scales = x.block_size, _array(f"{name}, scales", x.scales)
    given_shape = scales.shape
    _need(
        _is_number(block_size, numbers.Integral) and block_size > 0,
        name,
        f"a block_size of {block_size!r}",
        "an integer of 1 or more",
    )
    _need(
        _is_number(x.largest, numbers.Real) and 0 < x.largest <= LARGEST,
        name,
        f"largest of {x.largest!r}",
        f"a number above 0, and {LARGEST} at most",
    )
    _need(scales.dtype == jnp.float32, name, f"scales in {scales.dtype}", "float32", TypeError)
    if not has_batch:
        scales = scales[None]
    B, T, N, _ = shape
    whole = B, -(-T // block_size), N
    _need(
        scales.ndim == 3
        and scales.shape[1] == whole[1]
        and scales.shape[0] in (1, B)
        and scales.shape[2] in (1, N),
        name,
        f"scales of shape {given_shape}",
        f"{whole if has_batch else whole[1:]}, where batch and heads may be 1,"
        f" for blocks of {block_size} rows",
    )
    return jnp.broadcast_to(scales, whole)


def _need(holds: bool, name: str, got: object, needs: str, error: type = ValueError) -> None:
    """Raises an error that names an argument, what it got and what it needs, unless it holds."""
    if not holds:
        raise error(f"{name}: got {got}; needs {needs}.")


def _need_static(name: str, x) -> None:
    """Raises an error where x, which decides what is traced, is traced itself."""
    is_traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(x))
    needs = "a static value: name it in static_argnames of jax.jit, or close over it"
    _need(not is_traced, name, "a traced value", needs, TypeError)


def _need_heads_that_fit(query: jax.Array, key: jax.Array) -> None:
    """Raises an error unless the heads of `[B, T, N, H]` are a multiple of those of the keys."""
    fit = lambda N, K: N > 0 and K > 0 and N % K == 0
    needs = f"a positive multiple of the key heads, {key.shape[2]}"
    if fit(query.shape[1], key.shape[1]):
        needs += "; axes are [B, T, N, H], and if these are [B, N, T, H], swap axes 1 and 2 of all"
    _need(fit(query.shape[2], key.shape[2]), "query", f"{query.shape[2]} heads", needs)


def _is_number(x, kind: type) -> bool:
    return isinstance(x, kind) and not isinstance(x, bool)


def _is_name(x, names) -> bool:
    return isinstance(x, str) and x in names


def _need_number_or_none(name: str, x) -> None:
    _need_static(name, x)
    number = x is None or _is_number(x, numbers.Real)
    _need(number, name, type(x).__name__, "None or a number", TypeError)


def _soft_cap(logits_soft_cap) -> float | None:
    _need_number_or_none("logits_soft_cap", logits_soft_cap)
    if logits_soft_cap is None:
        return None
    cap = _float("logits_soft_cap", logits_soft_cap)
    least, most = _SOFT_CAPS
    _need(
        least <= cap <= most,
        "logits_soft_cap",
        logits_soft_cap,
        f"a finite number above 0, {least} to {most}, or None for no cap",
    )
    return cap


def _finite(name: str, x, dtype) -> float:
    """The number as a float that is finite in this dtype too."""
    value = _float(name, x)
    most = float(jnp.finfo(dtype).max)
    _need(abs(value) <= most, name, x, f"a finite number, in {dtype} too")
    return value


def _float(name: str, x) -> float:
    try:
        return float(x)
    except OverflowError as error:
        raise ValueError(f"{name}: got an integer beyond all floats; needs a number.") from error


def _array(name: str, x) -> jax.Array:
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name}: got {type(x).__name__}; needs an array.") from error
    except OverflowError as error:
        raise ValueError(f"{name}: got {x}; needs numbers within int32.") from error


def _int32(name: str, x, *, saturated: bool = True) -> jax.Array:
    """`x` as int32, refused where that would change a value, as far as values can be seen.

    Args:
      saturated: whether traced integers of other dtypes, as JAX makes them with jax_enable_x64, are
        brought within int32 by its bounds; else they wrap round.
    """
    bounds = np.iinfo(np.int32)
    leaves = jax.tree.leaves(x)
    if leaves and all(isinstance(leaf, numbers.Integral) for leaf in leaves):
        x = np.asarray(x)  # not JAX's own, which is int64 or, for what that cannot hold, an error
    if not isinstance(x, np.ndarray):
        x = _array(name, x)
    is_integer = jnp.issubdtype(x.dtype, jnp.integer)
    if x.dtype == object and x.size:
        is_integer = all(isinstance(entry, numbers.Integral) for entry in x.flat)
    _need(is_integer, name, x.dtype, "int32, or integers that it holds", TypeError)
    if x.dtype != object and np.can_cast(x.dtype, np.int32):
        return jnp.asarray(x, np.int32)
    if isinstance(x, np.ndarray) or _is_readable(x):
        values = np.asarray(x)
        if values.size:
            least, most = values.min(), values.max()
            fits = bounds.min <= least and most <= bounds.max
            _need(fits, name, f"{least} to {most}", "integers within int32")
        return jnp.asarray(x.astype(np.int32))
    if saturated:
        x = jnp.minimum(x, jnp.asarray(bounds.max, x.dtype))
        if jnp.issubdtype(x.dtype, jnp.signedinteger):
            x = jnp.maximum(x, jnp.asarray(bounds.min, x.dtype))
    return x.astype(np.int32)


def _is_readable(x: jax.Array) -> bool:
    return not isinstance(x, jax.core.Tracer) and x.is_fully_addressable


def _per_batch(
    name: str, x, shape: tuple[int, ...], has_batch: bool, *, saturated: bool = True
) -> jax.Array:
    """Integers of a shape `[B, ...]`, where without a batch the first axis may be left out."""
    x = _int32(name, x, saturated=saturated)
    if not has_batch and x.ndim == len(shape) - 1:
        x = x[None]
    _need(x.shape == shape, name, f"shape {x.shape}", f"{shape}")
    return x


def _broadcastable(name: str, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """`x` with 4 axes, each whole or 1."""
    _need(x.ndim <= 4, name, f"{x.ndim} axes", "at most 4: [B, N, T, S]")
    fits = all(a in (1, b) for a, b in zip(x.shape[::-1], shape[::-1], strict=False))
    _need(fits, name, f"shape {x.shape}", f"one that broadcasts to [B, N, T, S] = {shape}")
    return x.reshape((1,) * (4 - x.ndim) + x.shape)


def _window(local_window_size) -> tuple[int, int]:
    _need_static("local_window_size", local_window_size)
    sides = local_window_size
    if _is_number(sides, numbers.Integral):
        sides = (sides, sides)
    _need(
        isinstance(sides, tuple | list)
        and len(sides) == 2
        and all(_is_number(side, numbers.Integral) for side in sides),
        "local_window_size",
        repr(local_window_size),
        "None, an integer or two, (left, right)",
        TypeError,
    )
    left, right = sides
    _need(left >= 0 and right >= 0, "local_window_size", local_window_size, "no negative side")
    return int(left), int(right)


def _simplest(
    is_causal: bool, window: tuple[int, int] | None, query_offset: int | jax.Array, T: int, S: int
) -> tuple[bool, tuple[int, int] | None, int | jax.Array]:
    """Drops positional conditions that always hold, so that more calls are plain ones.

    A window of right 0 is causal; one longer than the sequences restricts nothing; nor does
    causal where the only query is the last position, as in decoding.
    """
    left, right = window or (math.inf, math.inf)
    if is_causal:
        right = 0
    if all(isinstance(x, int) for x in (query_offset, T, S)):  # not a symbol of jax.export
        if left >= T - 1 + query_offset:
            left = math.inf
        if right >= S - 1 - query_offset:
            right = math.inf
    is_causal = right == 0
    if left == math.inf and right in (0, math.inf):
        window = None
    elif window is not None:
        window = (window[0], 0 if is_causal else window[1])
    if not is_causal and window is None:
        query_offset = 0
    return is_causal, window, query_offset


def _key_words(key) -> jax.Array:
    """The two uint32 words of a JAX random key, typed or not."""
    words = key_words("dropout_key", key)
    _need(
        words.shape in ((2,), (4,)),
        "dropout_key",
        f"words of shape {words.shape}",
        "one key, of 2 or 4 words",
    )
    if words.shape == (4,):
        # The halves of an rbg key are equal, so a sum or an exclusive or would lose all or a bit.
        words = words[:2] + 2 * words[2:]
    return words
