"""Where the FP8 forward kernel for Hopper belongs: "mosaic_gpu" of calls with `Call.scales`."""

import jax

from jax_flash.call import Call


def unsupported(call: Call) -> str | None:
    """Why the kernel cannot do this call, or None if it can; devices are dispatch's business."""
    return f"dtype {call.query.dtype}: there is no FP8 kernel yet"


def attention(call: Call) -> tuple[jax.Array, jax.Array]:
    """Output `[B, T, N, h]` in `call.out_dtype`, and LSE `[B, T, N]` float32."""
    raise NotImplementedError(unsupported(call))
