"""Which blocks of queries and keys a mask function shows: asked of all pairs, before the kernels.

A function that reads positions alone says the same wherever it is called with these lengths. So
this is done once for a function and lengths, when a program is traced, and is a constant of it.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_flash.functions import Function

BLOCK = 64  # queries, and keys, of a block, as in the kernels
_PAIRS_AT_ONCE = 1 << 24  # how many are in memory, a byte each
_KEPT = 64  # functions with lengths


def unsupported(function: Function) -> str | None:
    """Why the kernels cannot take a mask_mod, None if they can."""
    if function.captured:
        shapes = ", ".join(str(list(x.shape)) for x in function.captured)
        return f"mask_mod reads arrays {shapes}: the kernels take functions of positions alone"
    batch, head, *_ = function.program.reads
    if batch or head:
        names = " and ".join(name for name, is_read in (("b", batch), ("h", head)) if is_read)
        return f"mask_mod reads {names}: the kernels take functions of positions alone"
    if (reason := _operations(function.program).unsupported()) is not None:
        return f"mask_mod: {reason}"
    return None


@functools.lru_cache(_KEPT)
def _operations(program: Any):
    from pallas_kernels.programs import Operations  # its import brings Pallas

    return Operations(program.steps)


@functools.lru_cache(_KEPT)
def mask_function(
    program: Any, query_length: int, key_length: int, lowest: int | None, highest: int | None
):
    """A mask function that `unsupported` has no reason against, as the kernels take it.

    Args:
      program: of the function.
      lowest, highest: as in `Problem`; what they hide is hidden too.

    Returns:
      A `pallas_kernels.mask_functions.MaskFunction`.
    """
    from pallas_kernels.mask_functions import MaskFunction  # brings Pallas

    rows = max(1, _PAIRS_AT_ONCE // (BLOCK * key_length))
    rows = BLOCK * min(rows, -(-query_length // BLOCK))
    sizes = query_length, key_length, rows, BLOCK
    with jax.ensure_compile_time_eval():
        found = _ask(program, *sizes, lowest, highest)
        kinds, seeing, seen = map(np.asarray, jax.device_get(found))
    kinds = kinds.reshape(-1, kinds.shape[-1])[: -(-query_length // BLOCK)]
    seeing, seen = seeing.reshape(-1)[:query_length], seen.any(0)[:key_length]
    return MaskFunction(program, kinds, seeing, seen)


@functools.partial(jax.jit, static_argnums=range(7))
def _ask(program, query_length, key_length, rows, block, lowest, highest):
    """For each chunk of rows kinds of blocks, which queries see a key, and which keys are seen."""
    from pallas_kernels.mask_functions import EMPTY, FULL, PARTIAL
    from pallas_kernels.programs import OnRows, Part

    blocks = -(-key_length // block)
    width = blocks * block
    key = jnp.arange(width, dtype=jnp.int32)
    # As they are in the kernels: those beyond the end are the last.
    keys = jnp.minimum(key, key_length - 1)
    zero = Part(jnp.int32(0))

    def of_chunk(first):
        query = first + jnp.arange(rows, dtype=jnp.int32)
        queries = Part(jnp.minimum(query, query_length - 1), by_row=True)
        given = zero, zero, queries, zero
        on_rows = OnRows(_operations(program), given, {3}, rows)
        visible = on_rows.evaluate({3: keys}, width)
        query = query[:, None]
        if lowest is not None:
            visible &= key >= query + lowest
        if highest is not None:
            visible &= key <= query + highest
        there = (query < query_length) & (key < key_length)
        some, whole = visible & there, visible | ~there
        by_block = lambda x: x.reshape(rows // block, block, blocks, block)
        kinds = jnp.where(
            by_block(whole).all((1, 3)),
            FULL,
            jnp.where(by_block(some).any((1, 3)), PARTIAL, EMPTY),
        )
        return kinds.astype(jnp.int8), some.any(1), some.any(0)

    return lax.map(of_chunk, jnp.arange(0, query_length, rows, dtype=jnp.int32))
