"""Which blocks of queries and keys a mask shows: asked of all pairs, before the kernels.

A function that reads positions alone says the same wherever it is called with these lengths. So
this is done once for a function and lengths, when a program is traced, and is a constant of it.
Other functions are asked in the program itself; of dense masks `pallas_kernels/mask_bits.py` finds
blocks. What is kept of the pairs is how many of 64 queries see each key, from which follow the
blocks, and the keys that no query sees.
"""

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash.call import Call
from jax_flash.functions import Function, KnownBlocks
from pallas_kernels.element_arrays import Blocks

BLOCK = 64  # queries, and keys, of a block, as in the kernels
_PAIRS_AT_ONCE = 1 << 24  # how many are in memory, a byte each, before run time
_KEPT = 64  # functions with lengths


def unsupported(function: Function) -> str | None:
    """Why the kernels cannot take a mask_mod, None if they can."""
    reason = _operations(function.program).unsupported()
    return None if reason is None else f"mask_mod: {reason}"


def is_static(function: Function) -> bool:
    """Whether it says the same for all batch entries and heads, and reads no array."""
    return not (function.captured or any(function.program.reads[:2]))


@functools.lru_cache(_KEPT)
def _operations(program: Any):
    from pallas_kernels.programs import Operations  # its import brings Pallas

    return Operations(program.steps)


class Shown(NamedTuple):
    """What a mask shows by blocks.

    Attributes:
      kinds: int8 `[..., query blocks, key blocks]`, as the kernels take them.
      seen: bool `[..., S]`, which keys a query sees.
    """

    kinds: Any
    seen: Any


def by_blocks(counts, query_length: int, key_length: int) -> Shown:
    """From how many queries of each block of them see each key, `[..., query blocks, keys]`.

    Args:
      counts: of keys up to whole blocks; 0 of those beyond the end.
    """
    blocks = counts.shape[-1] // BLOCK
    in_blocks = counts.reshape(*counts.shape[:-1], blocks, BLOCK).sum(-1, dtype=jnp.int32)
    rows, keys = (
        np.minimum(BLOCK, length - BLOCK * np.arange(-(-length // BLOCK)))
        for length in (query_length, key_length)
    )
    pairs = np.asarray(rows[:, None] * keys, np.int32)
    whole = in_blocks == np.broadcast_to(pairs, in_blocks.shape)
    kinds = jnp.where(whole, 2, jnp.where(in_blocks > 0, 1, 0)).astype(jnp.int8)
    return Shown(kinds, (counts > 0).any(-2)[..., :key_length])


def _visible(program: Any, captured, numbers, first, rows: int, sizes, bounds) -> jax.Array:
    """What some rows see, bool `[rows, keys up to whole blocks]`.

    Args:
      captured: the arrays that it reads, as kernels do.
      numbers: batch entry and head.
      first: of the rows.
      sizes: T and S.
      bounds: lowest and highest of `Problem`.
    """
    from pallas_kernels.on_rows import OnRows, Part  # brings Pallas

    (query_length, key_length), (lowest, highest) = sizes, bounds
    key = jnp.arange(-(-key_length // BLOCK) * BLOCK, dtype=jnp.int32)
    query = first + jnp.arange(rows, dtype=jnp.int32)
    # As they are in the kernels: those beyond the end are the last.
    keys, queries = jnp.minimum(key, key_length - 1), jnp.minimum(query, query_length - 1)
    zero, count = Part(jnp.int32(0)), len(captured)
    given = [*[zero] * count, *map(Part, numbers), Part(queries, by_row=True), zero]
    load = lambda array, place: captured[array][place.x]
    on_rows = OnRows(_operations(program), given, {count + 3}, rows, load)
    (visible,) = on_rows.evaluate({count + 3: Part(keys, by_column=True)}, len(key))
    query, key = query[:, None], key[None]
    if lowest is not None:
        visible &= key >= query + lowest
    if highest is not None:
        visible &= key <= query + highest
    return visible & (query < query_length) & (key < key_length)


def _counts(visible: jax.Array) -> jax.Array:
    """How many of each 64 queries see each key: uint8 `[..., query blocks, keys]`."""
    *batch, rows, keys = visible.shape
    return visible.reshape(*batch, rows // BLOCK, BLOCK, keys).sum(-2, dtype=jnp.uint8)


@functools.lru_cache(_KEPT)
def static_mask(
    program: Any, query_length: int, key_length: int, lowest: int | None, highest: int | None
):
    """A function that `is_static`, as the kernels take it.

    Args:
      program: of the function.
      lowest, highest: as in `Problem`; what they hide is hidden too.

    Returns:
      A `pallas_kernels.mask_functions.MaskFunction`.
    """
    from pallas_kernels.mask_functions import MaskFunction  # brings Pallas

    sizes, bounds = (query_length, key_length), (lowest, highest)
    kinds, seen, seeing = computed_now(_ask, program, sizes, bounds)
    return MaskFunction(program, kinds, seeing, seen)


def computed_now(function: Callable, *args: Any) -> Any:
    """`function(*args)` in numpy, whatever is being traced, mapped or sharded here."""
    return elsewhere(lambda: jax.tree.map(np.asarray, jax.device_get(function(*args))))


def elsewhere(function: Callable) -> Any:
    """`function()` in a thread of its own, which knows nothing of what is going on here."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(function).result()


@functools.partial(jax.jit, static_argnums=range(3))
def _ask(program: Any, sizes: tuple[int, int], bounds):
    """Kinds, which keys are seen, and which queries see a key."""
    query_length, key_length = sizes
    rows = max(1, _PAIRS_AT_ONCE // (BLOCK * key_length))
    rows = BLOCK * min(rows, -(-query_length // BLOCK))
    zeros = jnp.int32(0), jnp.int32(0)

    def of_chunk(first):
        visible = _visible(program, (), zeros, first, rows, sizes, bounds)
        return _counts(visible), visible.any(1)

    firsts = jnp.arange(0, query_length, rows, dtype=jnp.int32)
    counts, seeing = jax.lax.map(of_chunk, firsts)
    counts = counts.reshape(-1, counts.shape[-1])[: -(-query_length // BLOCK)]
    return *by_blocks(counts, *sizes), seeing.reshape(-1)[:query_length]


def given_blocks(call: Call, lowest: int | None, highest: int | None):
    """`pallas_kernels.element_arrays.Blocks` of any function, and which keys are seen.

    Args:
      call: one with a mask_mod.
      lowest, highest: as for `static_mask`.

    Returns:
      Blocks, and bool `[b, n, S]`, each axis whole or 1, or None where all keys are seen.
    """
    from pallas_kernels.on_rows import as_captured

    function = call.mask_mod
    assert function is not None
    program, captured = (
        function.program,
        as_captured(_operations(function.program), function.captured),
    )
    entries, heads = call.batch_entries, call.query_heads
    sizes = call.query.shape[1], call.key.shape[1]
    reads_entry, reads_head, *_ = program.reads
    if function.known is not None and lowest is None and highest is None:
        shown = _known(function.known, entries, heads)
    else:
        shown = _shown_by_each(function, entries, heads, sizes, (lowest, highest))
    numbers = None
    if reads_entry or reads_head:
        both = jnp.broadcast_arrays(entries[:, None], heads[None, :])
        numbers = jnp.stack(both, axis=-1).astype(jnp.int32)
    return Blocks(shown.kinds, None, numbers, tuple(x[None] for x in captured)), shown.seen


def _known(known: KnownBlocks, entries, heads) -> Shown:
    """Of these batch entries and heads."""

    def own(x):
        if x.shape[0] > 1:
            x = jnp.asarray(x)[entries]
        return jnp.asarray(x)[:, heads] if x.shape[1] > 1 else jnp.asarray(x)

    return Shown(own(known.kinds), None if known.seen.all() else own(known.seen))


# One after the other, outside of jit, operations would hold all pairs.
@functools.partial(jax.jit, static_argnums=(3, 4))
def _shown_by_each(function: Function, entries, heads, sizes, bounds) -> Shown:
    """Of each batch entry and head, one for all where the function does not read which."""
    from pallas_kernels.on_rows import as_captured

    program, captured = (
        function.program,
        as_captured(_operations(function.program), function.captured),
    )
    rows = -(-sizes[0] // BLOCK) * BLOCK
    reads_entry, reads_head, *_ = program.reads

    def counts(entry, head):
        return _counts(_visible(program, captured, (entry, head), 0, rows, sizes, bounds))

    counts = jax.vmap(jax.vmap(counts, (None, 0)), (0, None))
    of_all = counts(entries[: None if reads_entry else 1], heads[: None if reads_head else 1])
    return by_blocks(of_all, *sizes)
