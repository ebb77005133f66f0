"""Exact attention for JAX: Pallas kernels for Hopper GPUs, cuDNN or plain XLA elsewhere."""

from jax_flash.api import attention as attention
from jax_flash.api import explain as explain
