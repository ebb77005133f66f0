"""Exact attention for JAX: Pallas kernels for Hopper GPUs, cuDNN or plain XLA elsewhere."""

from jax_flash.api import attention, explain
from jax_flash.decode import decode_attention, update_cache

__all__ = ["attention", "decode_attention", "explain", "update_cache"]
