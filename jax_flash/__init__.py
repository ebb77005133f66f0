"""Exact attention for JAX: Pallas kernels for Hopper GPUs, cuDNN or plain XLA elsewhere."""

from jax_flash.api import attention, explain
from jax_flash.batches import segment_ids
from jax_flash.block_mask import BlockMask, block_mask
from jax_flash.call import CHECKPOINT_NAMES
from jax_flash.decode import decode_attention, explain_decode, update_cache
from jax_flash.drop_in import install
from jax_flash.fp8 import attention_fp8
from jax_flash.quantization import Quantized, quantize_fp8
from jax_flash.ring import (
    all_gather_attention,
    from_zigzag,
    ring_attention,
    to_zigzag,
    ulysses_attention,
)
from pallas_kernels.config import Config

__version__ = "0.1.0"

__all__ = [
    "CHECKPOINT_NAMES",
    "BlockMask",
    "Config",
    "Quantized",
    "all_gather_attention",
    "attention",
    "attention_fp8",
    "block_mask",
    "decode_attention",
    "explain",
    "explain_decode",
    "from_zigzag",
    "install",
    "quantize_fp8",
    "ring_attention",
    "segment_ids",
    "to_zigzag",
    "ulysses_attention",
    "update_cache",
]
