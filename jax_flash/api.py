"""attention(): what users call. It checks the arguments and brings them into one form, a `Call`."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, Literal, TypedDict, Unpack, overload

import jax
from jax.typing import ArrayLike

from jax_flash import dispatch
from jax_flash.arguments import checked, explained
from jax_flash.batches import as_given
from jax_flash.block_mask import BlockMask
from jax_flash.quantization import Quantized
from pallas_kernels.config import Config


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
    mask_mod: BlockMask | Callable[..., ArrayLike] | None
    score_mod: Callable[..., ArrayLike] | None


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
    mask_mod: BlockMask | Callable[..., ArrayLike] | None = None,
    score_mod: Callable[..., ArrayLike] | None = None,
) -> Any:
    """Exact multi-head attention, in memory linear in the sequence lengths.

    For each batch element b and query head n, which reads key head n // (N // K):

        logits[i, j]  = soft_cap(score_mod(scale * query[i] . key[j] + bias[i, j], b, n, i, j))
                        where j is visible to i
        weights[i, :] = dropout(softmax(logits[i, :], with one more logit, the head's sink))
        out[i]        = sum over j of weights[i, j] * value[j]

    Key j is visible to query i if every condition that is given holds: `is_causal`,
    `local_window_size`, the lengths, equal segment ids, `mask` and `mask_mod`. A query that sees no
    key has output 0, LSE -inf and gradients 0.

    Products are of the input dtype and accumulate in float32; softmax is float32. float32 inputs
    are computed in float32, float64 inputs (jax_enable_x64) in float64. Query, key and value in FP8
    (`jax_flash.quantize_fp8`) have all options, an output in bfloat16 and no derivative;
    `jax_flash.attention_fp8` quantises inputs, has gradients, and gives the inputs' dtype.

    The first arguments are those of `jax.nn.dot_product_attention`, and this function can take its
    place. It differs from it where a query sees no key (there the output is the mean of the
    values, but beyond `query_seq_lengths`), in the LSE (there rounded to the input dtype, without
    gradient), and in refusing a traced window and what makes no sense (an integer bias).

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
        Or all three are `jax_flash.Quantized`, of these shapes. Others may have more batch axes:
        lengths and offsets are `[...]` then, segment ids `[..., T]` and `[..., S]`, and bias and
        mask broadcast to `[..., N, T, S]`.
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
        i + query_offset - left <= j <= i + query_offset + right. A large number is no limit.
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
        pass then takes seven products of work for five, if there are more than 256 keys or more
        than bounds that are static; at widths above 128 they always are.
      config: settings of the kernels (`pallas_kernels.config`), read by "mosaic_gpu" alone; None
        for the tuned ones.
      mask_mod: a function (b, h, q_idx, kv_idx) that gives bool, True is visible. It is traced with
        int32 scalars: the batch entry, of several axes the flat index, the query head, and
        positions, which `query_offset` does not shift. Under sharded jit they count in the whole
        arrays, under vmap and inside `jax.shard_map` in those that this call gets. No callbacks.
        Or what `jax_flash.block_mask` made of one. The kernels skip blocks that it hides whole.
      score_mod: a function (score, b, h, q_idx, kv_idx) that gives a float, the new score: of the
        scaled logit, with bias, float32 (float64 of such inputs), before soft cap and masks. Both
        functions may capture arrays and read them by index, such as slopes[h]; those of score_mod
        have gradients. What it gives where a key is hidden does not count; -inf is as in a bias.

    Returns:
      The output `[B, T, N, h]` (`[T, N, h]` without a batch) in the query's dtype, bfloat16 where
      that is Quantized; with `return_residual`, (output, LSE): LSE `[B, T, N]` (`[T, N]`) is the
      natural log of the softmax denominator, sinks included, float32 and differentiable; -inf of a
      query that sees no key, with sinks too.

    Raises:
      TypeError: an argument is of the wrong type or dtype.
      ValueError: an argument has the wrong shape or value, or does not go with another.
      NotImplementedError: the implementation that was asked for cannot do the call.

    Sources: Milakov and Gimelshein 2018 (online softmax); Dao et al. 2022, Dao 2023, Shah et al.
    2024 (FlashAttention 1 to 3); Ainslie et al. 2023 (grouped queries); Gemma 2 2024 (soft cap);
    Xiao et al. 2023 and gpt-oss 2025 (sinks).
    """
    call = checked(**locals())
    out, lse = (as_given(query, x) for x in dispatch.attention(call, implementation))
    return (out, lse) if return_residual else out


@functools.wraps(attention, assigned=(), updated=())  # the signature alone
def explain(*args, **kwargs) -> dispatch.Explanation:
    """Says which implementation `attention` would run with the same arguments, and why.

    With `implementation="mosaic_gpu"` it says whether a Hopper GPU would run the call, also on a
    machine without a GPU: where not, it raises NotImplementedError with the reason. Settings in
    `config` that do not fit are found when the call is lowered.

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
        return dispatch.choose(checked(**arguments), arguments["implementation"])

    return explained(inspect.signature(attention), choose, args, kwargs)
