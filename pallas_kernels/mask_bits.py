"""A dense mask as kernels take it: bits of pairs, kinds of blocks, and which keys are seen.

A mask of a byte a pair is read once, by a kernel of its own, which XLA would read once for each of
these. A thread block makes bits of 128 queries by 128 keys, along both axes.
"""

import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.bit_words import WORD
from pallas_kernels.element_arrays import Blocks, Elements, MaskBits, is_of_pairs
from pallas_kernels.interpret import interpreting
from pallas_kernels.problem import Problem
from pallas_kernels.ptx.arithmetic import div_rem
from pallas_kernels.ptx.barriers import HAND_ORDERED
from pallas_kernels.ptx.bits import ALL, COLUMNS, ENTRIES, ROWS, SOME, TILE, store_bits

BLOCK = COLUMNS  # queries, and keys, of a block, as in `mask_functions.py`


def with_mask_bits(elements: Elements, problem: Problem) -> Elements:
    """The same with bits of a mask that has a value a pair, for all kernels of a pass."""
    mask = elements.mask
    if mask is None or isinstance(mask, MaskBits) or not is_of_pairs(mask):
        return elements
    bounds = (problem.lowest, problem.highest) if problem.has_lists else (None, None)
    return elements._replace(mask=mask_bits(mask, *bounds))


def blocks_of(elements: Elements) -> Blocks:
    """Those of a dense mask that has lists."""
    assert isinstance(elements.mask, MaskBits)
    return Blocks(elements.mask.kinds, elements.mask.seen)


def mask_bits(mask: jax.Array, lowest: int | None = None, highest: int | None = None) -> MaskBits:
    """Those of bool `[b, n, T, S]`, in which what the bounds hide is hidden too."""
    *leading, query_length, key_length = mask.shape
    entries = leading[0] * leading[1]
    kernel = _build(entries, query_length, key_length, (lowest, highest), interpreting())
    by_query, by_key, blocks = kernel(mask.reshape(entries, query_length, key_length))
    # Blocks of the kernel have half as many queries.
    first, second = (blocks[:, half :: BLOCK // ROWS] for half in range(BLOCK // ROWS))
    some, whole = first[..., SOME] | second[..., SOME], first[..., ALL] & second[..., ALL]
    seen = lax.reduce(blocks[..., ALL + 1 :], jnp.int32(0), lax.bitwise_or, (1,))
    seen = seen.reshape(entries, -1) | _bits_beyond(key_length, seen[0].size)
    shaped = lambda x: x.reshape(*leading, *x.shape[1:])
    return MaskBits(
        shaped(by_query),
        shaped(by_key),
        shaped((some + (some & whole)).astype(jnp.int8)),
        shaped(seen),
    )


def _bits_beyond(length: int, count: int) -> np.ndarray:
    """Of so many words those bits that are set which are beyond the end."""
    is_beyond = np.arange(count * WORD) >= length
    return np.packbits(is_beyond, bitorder="little").view(np.int32)


def are_seen(words: jax.Array, length: int) -> jax.Array:
    """bool `[..., length]` of `Blocks.seen`."""
    bits = (words[..., None] >> jnp.arange(WORD, dtype=jnp.int32)) & 1
    return bits.reshape(*words.shape[:-1], -1)[..., :length].astype(jnp.bool_)


@functools.lru_cache
def _build(
    entries: int,
    query_length: int,
    key_length: int,
    bounds: tuple[int | None, int | None],
    interpret: bool,
):
    rows, columns = (-(-length // TILE) for length in (query_length, key_length))

    def pack_mask(mask_ref, by_query_ref, by_key_ref, blocks_ref, staging):
        of_all, column = div_rem(lax.axis_index("block"), columns)
        entry, row = div_rem(of_all, rows)
        is_inside = ((row + 1) * TILE <= query_length) & ((column + 1) * TILE <= key_length)
        results = tuple(ref.at[entry] for ref in (by_query_ref, by_key_ref, blocks_ref))
        store = functools.partial(
            store_bits, mask_ref, results, staging, (entry, row, column), bounds
        )
        lax.cond(is_inside, lambda: store(inside=True), lambda: store(inside=False))

    blocks = [-(-length // BLOCK) for length in (query_length, key_length)]
    shapes = (
        (entries, query_length, columns * TILE // WORD),
        (entries, key_length, rows * TILE // WORD),
        (entries, blocks[0] * (BLOCK // ROWS), blocks[1], ENTRIES),
    )
    return plgpu.kernel(
        pack_mask,
        out_type=tuple(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes),
        scratch_types=(plgpu.SMEM((TILE // ROWS, TILE), jnp.int32),),
        grid=(entries * rows * columns,),
        grid_names=("block",),
        compiler_params=HAND_ORDERED,
    )
