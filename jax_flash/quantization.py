"""FP8 in blocks: arrays of e4m3 values that share a float32 scale, and how they are made.

    scale  = max |x| / largest            over the finite entries of a block: rows of one head
                                          (of values, rounded up to a power of two)
    values = saturate(x / scale)          so that x is nearly values * scale

e4m3 has 4 significant bits and 2^-9 to 448 for magnitudes. Of that values take all, and queries and
keys what keeps every product of two rows within float16, as which the kernel has it: up to 22 with
128 columns. So entries of 2^-10 of the largest have 4 bits still, and those of 2^-13 one.

A row with an outlier loses little by itself, as the format is floating, but the logits that the
outlier takes part in have an error as large as it is. Incoherent processing turns query and key by
the same random orthogonal matrix, which leaves query.key as it is, and spreads an outlier over all
columns, so that its error is one of many small ones that cancel (Shah et al. 2024,
"FlashAttention-3", section 3.3; Chee et al. 2023, "QuIP").
"""

import dataclasses
import functools
import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jax_flash.call import without_derivative

FLOAT8 = jnp.float8_e4m3fn
DTYPES = ("bfloat16", "float16", "float32", "float64")

# Rows that share a scale: a multiple of the 64 rows that a warpgroup works on.
BLOCK_SIZE = 128

LARGEST = float(jnp.finfo(FLOAT8).max)
_LARGEST_PRODUCT = float(jnp.finfo(jnp.float16).max)
_SMALLEST_SCALE = float(jnp.finfo(jnp.float32).tiny)
# Columns that one matrix product transforms. A product of this size takes less time on matrix
# units than reading its operand from memory, so that more and smaller ones would be slower.
_LARGEST_FACTOR = 256


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["values", "scales"],
    meta_fields=["block_size", "largest"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class Quantized:
    """Query, key or value in FP8, which `jax_flash.attention` takes: `quantize_fp8` makes them.

    Entry [b, t, n, h] stands for values[b, t, n, h] * scales[b, t // block_size, n]. A pytree, of
    which block_size and largest are a part of the structure.

    Attributes:
      values: float8_e4m3fn `[B, T, N, H]`, or `[T, N, H]` without a batch.
      scales: positive float32 `[B, ceil(T / block_size), N]`, or without B; B and N may be 1 for a
        scale that all batch entries or heads share. With a block_size of T or more there is one
        block, so that a scale for a whole tensor is `[1, 1, 1]`.
      block_size: rows that share a scale.
      largest: a magnitude that no value exceeds, but for NaN. Of query and key the kernel wants
        both, multiplied with each other and the head width, to be at most 65504, and else halves
        values as often as it takes, which is a pass over them, and leaves those below 2^-6 then
        fewer bits.
    """

    values: jax.Array
    scales: jax.Array
    block_size: int
    largest: float = LARGEST

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the values."""
        return self.values.shape

    @property
    def ndim(self) -> int:
        return self.values.ndim

    @property
    def dtype(self) -> np.dtype:
        """That of the values: float8_e4m3fn."""
        return self.values.dtype

    def dequantize(self, dtype=jnp.bfloat16) -> jax.Array:
        """What it stands for, as one array of its shape, in a floating dtype."""
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(f"dtype: got {dtype}; needs a floating one.")
        scales = scales_of_rows(self.scales, self.block_size, self.shape[-3])
        return (self.values.astype(jnp.float32) * scales[..., None]).astype(dtype)


def accumulator(dtype) -> np.dtype:
    """What sums of this floating dtype are held in: float32 at least."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def largest_of_rows(width: int) -> float:
    """The largest e4m3 number with which a product of two rows is still within float16."""
    numbers = np.arange(127, dtype=np.uint8).view(FLOAT8).astype(np.float64)
    return float(numbers[numbers**2 * max(1, width) <= _LARGEST_PRODUCT].max())


def halvings(query_largest: float, key_largest: float, width: int) -> tuple[int, int]:
    """How often values of query and key are to be halved for a product of two rows in float16."""
    excess = query_largest * key_largest * width / _LARGEST_PRODUCT
    count = max(0, math.ceil(math.log2(excess)))
    return count - count // 2, count // 2


def scales_of_rows(scales: jax.Array, block_size: int, num_rows: int) -> jax.Array:
    """The scale of each row: `[..., blocks, N]` to `[..., num_rows, N]`."""
    size = _rows_of_block(block_size, num_rows)
    return jnp.repeat(scales, size, axis=-2)[..., :num_rows, :]


def _rows_of_block(block_size: int, num_rows: int) -> int:
    """block_size, or what there is: where num_rows is a symbol of jax.export, that is not known."""
    return max(1, min(block_size, num_rows)) if isinstance(num_rows, int) else block_size


def quantize_fp8(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    block_size: int | None = None,
    incoherent_key: jax.Array | None = None,
) -> tuple[Quantized, Quantized, Quantized]:
    """Query, key and value in FP8, with a scale for each block of rows of each head.

    A block's scale makes its largest finite magnitude that of e4m3, 448, or of query and key what
    keeps products of two rows below 65504: 30, 22 and 15 for widths of 64, 128 and 256. Of values
    it is the next power of two, so that neighbouring blocks mostly share one, which spares the
    kernel work and costs no significant bit. A block of zeros has scale 1. Infinities become the
    largest magnitude, with their sign; NaN stays NaN. All rows of a block count, also those that a
    mask hides: fill padding with zeros, not with huge numbers.

    It has no derivative: `jax_flash.attention_fp8` quantises too, and has one.

    Args:
      query: `[B, T, N, H]`, or `[T, N, H]` without a batch; floating.
      key: `[B, S, K, H]`, or without B.
      value: `[B, S, K, h]`, or without B.
      block_size: rows that share a scale; None for 128, which goes with the kernels' tiles. With T
        and S or more there is one scale for each head and batch entry.
      incoherent_key: None, or a JAX random key: query and key are multiplied by the same random
        orthogonal matrix first, random signs and then a Walsh-Hadamard transform, so that outliers
        are spread over all columns. Where H is not a power of two, its odd factor has a Hartley
        transform instead. An infinity makes NaN of its row then.

    Returns:
      Three Quantized, of the shapes of query, key and value.

    Raises:
      TypeError: an argument is of the wrong type or dtype.
      ValueError: an argument has the wrong shape or value.
    """
    size = BLOCK_SIZE if block_size is None else _positive("block_size", block_size)
    arrays = [_floating(name, x) for name, x in (("query", query), ("key", key), ("value", value))]
    query, key, value = arrays
    if incoherent_key is not None:
        incoherent_key = _one_key("incoherent_key", incoherent_key)
        if query.shape[-1] != key.shape[-1]:
            raise ValueError(
                f"key: got head width {key.shape[-1]}; needs that of query, {query.shape[-1]}, as"
                " both are multiplied by the same matrix."
            )

    return _quantize(size, query, key, value, incoherent_key)


@without_derivative(
    "quantize_fp8 has no derivative: jax_flash.attention_fp8 is FP8 with gradients.",
    static_argnums=(0,),
)
@functools.partial(jax.jit, static_argnums=0)  # so that calls outside of jit are fused too
def _quantize(block_size: int, query, key, value, incoherent_key):
    if incoherent_key is not None:
        signs = _signs(incoherent_key, query.shape[-1])  # once: no key is to be used twice
        query, key = (_rotated(x, signs) for x in (query, key))
    query, key = (_quantized(x, block_size, largest_of_rows(x.shape[-1])) for x in (query, key))
    return query, key, _quantized(value, block_size, LARGEST, power_of_two=True)


def rotate(x: jax.Array, key: jax.Array) -> jax.Array:
    """x `[..., H]` times an orthogonal `[H, H]` that a random key decides, in float32.

    Signs, and then for each factor of H a product with a matrix of its size: O(H log H) operations
    for growing H, and a single product for a power of two up to 256. 16-bit inputs times 1 and -1
    are exact there, and are added up in float32.
    """
    return _rotated(x, _signs(key, x.shape[-1]))


def _signs(key: jax.Array, width: int) -> jax.Array:
    return jax.random.rademacher(key, (width,), jnp.int8)


def _rotated(x: jax.Array, signs: jax.Array) -> jax.Array:
    width = x.shape[-1]
    accum = accumulator(x.dtype)
    x = x * lax.broadcast_to_rank(signs.astype(x.dtype), x.ndim)
    for matrix in _factors(width):
        if x.dtype.itemsize == 2 and np.abs(matrix).max() > 1:
            x = x.astype(accum)
        product = jnp.matmul(
            x.reshape(*x.shape[:-1], width // len(matrix), len(matrix)),
            jnp.asarray(matrix, x.dtype),
            precision=None if x.dtype.itemsize == 2 else lax.Precision.HIGHEST,
            preferred_element_type=accum,
        )
        x = product.swapaxes(-1, -2).reshape(x.shape)  # the columns of the next factor come last
    return x.astype(accum) * width**-0.5


def _factors(width: int) -> list[np.ndarray]:
    """Matrices M with M M' = n, whose sizes n have the product `width`."""
    power = width & -width
    odd = width // power
    factors = []
    while power > 1:
        size = min(power, _LARGEST_FACTOR)
        bits = np.arange(size)
        parity = np.bitwise_count(bits[:, None] & bits) % 2
        factors.append(1.0 - 2.0 * parity)  # Sylvester's Hadamard matrix
        power //= size
    if odd > 1:
        angles = 2 * np.pi / odd * (np.outer(np.arange(odd), np.arange(odd)) % odd)
        factors.append(np.cos(angles) + np.sin(angles))  # discrete Hartley transform
    return factors


def _quantized(
    x: jax.Array, block_size: int, largest: float, power_of_two: bool = False
) -> Quantized:
    *lead, num_rows, heads, width = x.shape
    x = x.astype(jnp.float32)
    size = _rows_of_block(block_size, num_rows)
    num_blocks = -(-num_rows // size)
    missing = num_blocks * size - num_rows
    magnitudes = jnp.where(jnp.isfinite(x), jnp.abs(x), 0)
    magnitudes = jnp.pad(magnitudes, [(0, 0)] * len(lead) + [(0, missing), (0, 0), (0, 0)])
    found = magnitudes.reshape(*lead, num_blocks, size, heads, width).max((-3, -1))
    scales = jnp.maximum(found / largest, _SMALLEST_SCALE)
    if power_of_two:
        fraction, exponent = jnp.frexp(scales)
        scales = jnp.ldexp(jnp.float32(1), exponent - (fraction == 0.5).astype(exponent.dtype))
    scales = jnp.where(found > 0, scales, 1)
    of_rows = scales_of_rows(scales, size, num_rows)[..., None]
    # The largest scale of values is 2^120, and 256 times that is beyond float32.
    most = jnp.where(of_rows == 2.0**120, min(largest, 240.0), largest)
    # The cast itself would make NaN of what is too large.
    values = jnp.clip(x / of_rows, -most, most).astype(FLOAT8)
    return Quantized(values, scales, block_size, largest)


def _positive(name: str, x: Any) -> int:
    if isinstance(x, jax.core.Tracer):
        raise TypeError(f"{name}: got a traced value; needs a static integer, or None.")
    if isinstance(x, bool) or not isinstance(x, numbers.Integral):
        raise TypeError(f"{name}: got {type(x).__name__}; needs None or an integer.")
    if x < 1:
        raise ValueError(f"{name}: got {x}; needs at least 1.")
    return int(x)


def is_typed_key(key) -> bool:
    return isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)


def key_words(name: str, key) -> jax.Array:
    """The uint32 words of a JAX random key, or of several, typed or not."""
    if is_typed_key(key):
        return jax.random.key_data(key)
    try:
        words = jnp.asarray(key)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name}: got {type(key).__name__}; needs a JAX random key.") from error
    if words.dtype != jnp.uint32:
        raise TypeError(f"{name}: got {words.dtype}; needs a JAX random key.")
    return words


def _one_key(name: str, key) -> jax.Array:
    """A JAX random key that jax.random takes, and no batch of them."""
    words = key_words(name, key)
    if is_typed_key(key):
        if key.shape:
            raise ValueError(f"{name}: got keys of shape {key.shape}; needs one key.")
        return key
    # Words do not say of which implementation they are: jax.random takes the default one's.
    needs = jax.eval_shape(jax.random.PRNGKey, 0).shape
    if words.shape != needs:
        raise ValueError(f"{name}: got words of shape {words.shape}; needs one key, {needs}.")
    return words


def _floating(name: str, x) -> jax.Array:
    try:
        x = jnp.asarray(x)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name}: got {type(x).__name__}; needs an array.") from error
    if x.dtype.name not in DTYPES:
        raise TypeError(f"{name}: got {x.dtype}; needs one of {', '.join(DTYPES)}.")
    if x.ndim not in (3, 4):
        raise ValueError(f"{name}: got {x.shape}; needs [B, T, N, H] or [T, N, H].")
    if x.shape[-1] == 0:
        raise ValueError(f"{name}: got head width 0; needs at least 1.")
    return x
