"""The implementation "cudnn": jax.nn's cuDNN attention, where it means exactly the same.

cuDNN is the fastest attention on an NVIDIA GPU that the kernels do not run on, but it covers less
than `jax_flash.attention`, and some of what it accepts it computes differently or wrongly. Whatever
is not known to be right is refused here, with the reason. What it takes was read from
jax/_src/cudnn/fused_attention_stablehlo.py of jax 0.11.2 and 0.12.0.
"""

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo

# Bound now: a user may later assign `jax.nn.dot_product_attention = jax_flash.attention`.
from jax.nn import dot_product_attention

from jax_flash import device
from jax_flash.call import Call

_MAX_ELEMENTS = 2**31  # indices are int32: beyond it gradients are silently wrong


def unsupported(call: Call) -> str | None:
    """Why cuDNN cannot do the call, None if it can."""
    if call.is_symbolic:
        return "it takes no symbolic sizes"
    T, _, H = call.query.shape[1:]
    S, _, h = call.value.shape[1:]
    seen = call.visibility
    capability = device.device_of(call.query).compute_capability or (0, 0)
    refusals = [
        (
            call.query.dtype not in (jnp.bfloat16, jnp.float16),
            f"it takes bfloat16 and float16, not {call.query.dtype}",
        ),
        (h != H, f"it takes values as wide as the keys, not {h} and {H}"),
        (H % 8 != 0, f"it takes head widths that are multiples of 8, not {H}"),
        (H > 256, f"it takes head widths up to 256, not {H}"),
        (
            H > 128 and capability[0] != 9,
            f"it takes head widths up to 128 on GPUs other than Hopper, not {H}",
        ),
        (capability < (8, 0), f"it needs compute capability 8.0, not {capability}"),
        # cuDNN 9.18 release notes (S = 1; T = 1, causal, with fewer key heads) and
        # NVIDIA/cudnn-frontend#1072 (T = 1: dK and dV are NaN where a row's LSE is below -88).
        (1 in (T, S), f"its gradients are wrong for a length of 1; T, S are {T}, {S}"),
        # Its gradient raises "Unsupported sequence length" (jax 0.11.2 on an H200).
        (T % 2 != 0 or S % 2 != 0, f"it takes even lengths; T, S are {T}, {S}"),
        # NVIDIA/cudnn-frontend#628: the second half of the last tile of 128 keys is not masked.
        (S % 128 == 64, f"its dQ is NaN for rows of low LSE where S % 128 is 64, as in S = {S}"),
        (
            max(call.query.size, call.key.size) >= _MAX_ELEMENTS,
            "its gradients are wrong beyond 2**31 elements",
        ),
        # jax-ml/jax#39576: a window (L, 0) would see the future, and others are refused.
        (seen.window is not None and not seen.is_causal, "it has windows only with is_causal"),
        (
            seen.window is not None and T != S,
            f"with a window some row may see no key where T != S, as in {T} != {S}",
        ),
        (not isinstance(call.scale, float), "it takes a scale known at compile time"),
    ]
    for refused, reason in refusals:
        if refused:
            return reason
    for name in _given(call):
        if name not in _TAKEN:
            return _REASONS.get(name, f"it has no {name}")
    return _installation_reason()


# Fields of `Call` and `Visibility` that it takes, within what `unsupported` asks. Any other, also a
# new one that nobody has thought of here, is refused where a call has it.
_TAKEN = {"query", "key", "value", "visibility", "is_causal", "window", "scale", "config"}
_TAKEN |= {"first_batch_entry", "first_query_head"}  # of dropout alone
_LENGTHS = "with lengths some row may see no key, and what it gives such rows is not defined"
_REASONS = {
    "query_seq_lengths": _LENGTHS,
    "key_value_seq_lengths": _LENGTHS,
    "query_segment_ids": "it has no segment ids",
    "mask": "it has no mask, only a bias made of one, as large as the mask",
    # It subtracts very negative numbers as NaN: see get_large_negative_number in jax's file.
    "bias": "a bias that masks with very negative numbers may give NaN",
    "dropout_rate": "it would drop other weights than the dropout key decides",
    "return_residual": "its LSE is not differentiable",
    "deterministic": "its gradients are not reproducible bit by bit",
}


def _given(call: Call) -> Iterator[str]:
    """Names of the fields in which a call is not as by default."""
    for part in (call.visibility, call):
        for field in dataclasses.fields(part):
            x = getattr(part, field.name)
            is_static = x is None or isinstance(x, (bool, int, float, tuple))
            if not is_static or x != field.default:
                yield field.name


def attention(call: Call) -> tuple[jax.Array, None]:
    """Runs the call on cuDNN, where `unsupported(call)` is None.

    Returns:
      The output `[B, T, N, H]` in the query's dtype, and no LSE, which `unsupported` refuses.
    """
    window = call.visibility.window
    out = dot_product_attention(
        _batch_axis_first(call.query),
        _batch_axis_first(call.key),
        _batch_axis_first(call.value),
        scale=float(call.scale),
        is_causal=call.visibility.is_causal,
        local_window_size=None if window is None else (window[0], 0),
        implementation="cudnn",
    )
    return _batch_axis_first(out), None


def _batch_axis_first(array: jax.Array) -> jax.Array:
    """The same array, such that under vmap its batch axis is the first.

    jax.nn's cuDNN call refuses any other. JAX's rule for a broadcast puts the batch axis first, and
    so does the transpose of this, which is why the output, and with it its cotangent, goes through
    here too. XLA removes the unit axis.
    """
    return jnp.squeeze(jax.lax.broadcast_in_dim(array, (1, *array.shape), (1, 2, 3, 4)), axis=0)


def _installation_reason() -> str | None:
    """Why no cuDNN can be called from this jax, None if one can."""
    try:
        fused_attention_stablehlo.check_cudnn_version()
    except RuntimeError as error:
        return f"jax found no usable cuDNN: {error}"
    return None
