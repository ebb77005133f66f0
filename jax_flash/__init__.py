"""Exact attention for JAX: Pallas kernels for Hopper GPUs, cuDNN or plain XLA elsewhere."""

from jax_flash.api import attention, explain

__all__ = ["attention", "explain"]
