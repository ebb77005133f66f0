"""Exact attention for JAX: Pallas kernels for Hopper GPUs, cuDNN or plain XLA elsewhere."""

from jax_flash.api import attention, explain
from jax_flash.decode import decode_attention, update_cache
from jax_flash.ring import (
    all_gather_attention,
    from_zigzag,
    ring_attention,
    to_zigzag,
    ulysses_attention,
)

__all__ = [
    "all_gather_attention",
    "attention",
    "decode_attention",
    "explain",
    "from_zigzag",
    "ring_attention",
    "to_zigzag",
    "ulysses_attention",
    "update_cache",
]
