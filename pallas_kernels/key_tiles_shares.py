"""How tiles of keys are dealt out: in shares of their queries, and in sections of key heads.

A tile of keys takes the queries of all heads of its group. Where there are few tiles, most SMs
would have none. So the query heads of a group are dealt out first, and where each has a share of
its own, the query blocks that see a tile. Each share gives dK and dV of its own in float32, of
whole tiles, which are added up in a fixed order.

Sections are for dS', which is in memory for so many key heads at a time.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import scheduler
from pallas_kernels.config import SM_COUNT
from pallas_kernels.key_tiles import KeyTiles, Section, Shares
from pallas_kernels.key_tiles_kernel import key_gradients
from pallas_kernels.problem import whole_tiles

_MOST_BYTES = 768 << 20  # of dK and dV of all shares
_SIZES = 8  # of sections that are compared
_AS_EARLY = 1.03  # how much later fewer shares may end
# Microseconds: of what adds shares up, and of a megabyte that is stored and added up; of 1e6
# multiplications and additions, and of 1000 logits, of which a step takes the longer.
_SUM, _MEGABYTE, _PRODUCTS, _LOGITS = 2.5, 0.5, 0.4, 0.12
# How much longer tiles of unlike length take above width 128 that go through several query heads:
# they are at other heads at a time, whose rows do not all stay in L2.
_APART = 1.08


@functools.lru_cache
def dealt_out(whole: KeyTiles, wanted: int | None, d_logits_bytes: int = 0) -> KeyTiles:
    """The tiles in as few shares as end early: where there are many, in one.

    At most in so many that dK and dV of all take `_MOST_BYTES`.

    Args:
      whole: the tiles in one share.
      wanted: None, or how many shares there are to be; fewer where so many do not come out even.
      d_logits_bytes: as for `d_logits_sections`, one after the other; 0 for all heads together.
    """
    if wanted is None:
        is_few = lambda tiles: _stored_bytes(tiles) <= _MOST_BYTES
    else:
        is_few = lambda tiles: tiles.shares.total <= wanted
    possible = [whole, *itertools.takewhile(is_few, _possible(whole))]
    if wanted is not None or len(possible) == 1:
        return possible[-1]
    ends = [_end(tiles, d_logits_bytes) for tiles in possible]
    return next(x for x, end in zip(possible, ends, strict=True) if end <= _AS_EARLY * min(ends))


def _possible(whole: KeyTiles) -> Iterator[KeyTiles]:
    """The tiles in 2 shares or more, the fewest first."""
    p = whole.problem
    for shares in _possible_shares(whole):
        of_heads = dataclasses.replace(p, kv_heads=p.kv_heads * shares.heads)
        yield dataclasses.replace(whole, problem=of_heads, shares=shares)


def _possible_shares(tiles: KeyTiles) -> Iterator[Shares]:
    p = tiles.problem
    yield from (Shares(heads) for heads in range(2, p.group + 1) if p.group % heads == 0)
    # Else blocks are known at run time only, or not in a row, or registers are too short.
    if not (p.by_batch or p.has_lists or p.has_elements or p.has_cap or p.has_dropout):
        most = int(tiles.steps().max()) // p.group
        yield from (Shares(p.group, parts) for parts in range(2, most + 1))


def _end(tiles: KeyTiles, d_logits_bytes: int) -> float:
    """When the last SM ends, and dK and dV are added up, in steps."""
    sections = d_logits_sections(tiles, d_logits_bytes)
    end = _end_of_sections(tiles, [x.kv_heads for x in sections] or [tiles.kv_heads])
    steps = tiles.steps()
    is_wide = tiles.problem.widest > 128
    if is_wide and tiles.problem.group > 1 and steps.min() < steps.max():
        end *= _APART
    if not tiles.are_shared:
        return end
    logits = tiles.block_q * tiles.block_kv
    products = 5 * logits * tiles.problem.widest
    step = max(_PRODUCTS * products / 1e6, _LOGITS * logits / 1e3)
    return end + (_SUM + _MEGABYTE * _stored_bytes(tiles) / 1e6) / step


def _end_of_sections(tiles: KeyTiles, sections: Iterable[range]) -> float:
    """When the last SM ends that works on them one after the other, in steps."""
    return sum(scheduler.time_of_deal(tiles.costs_in_order(x), SM_COUNT) for x in sections)


def _stored_bytes(tiles: KeyTiles) -> int:
    """Of dK and dV of all shares, in float32."""
    return tiles.count * tiles.block_kv * 2 * whole_tiles(tiles.problem.widest) * 4


@functools.lru_cache
def d_logits_sections(tiles: KeyTiles, most_bytes: int) -> list[Section]:
    """The key heads whose dS' is in memory at a time, in as few sections as may be.

    All but the last are of one size, with which SMs end earliest. There are none where so many
    bytes are too few for a head, or what is visited is known at run time only:
    `backward_query_product.py` takes no step that was not. Nor where tiles have lists, of whose
    steps it does not know where they stand.
    """
    p = tiles.problem
    if p.by_batch or p.has_lists:
        return []
    head_bytes = tiles.steps_per_head * tiles.block_kv * tiles.block_q * p.dtype.itemsize
    count = len(tiles.kv_heads)
    if head_bytes > most_bytes:
        return []
    most = min(count, most_bytes // head_bytes)
    even = -(-count // -(-count // most))
    sizes = np.unique(np.linspace(even, most, _SIZES).astype(int)).tolist()
    heads = lambda size: [tiles.kv_heads[n : n + size] for n in range(0, count, size)]
    size = min(sizes, key=lambda size: _end_of_sections(tiles, heads(size)))
    return [Section(of_section, size) for of_section in heads(size)]


def gradients_of_tiles(tiles: KeyTiles, *columns: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes of dK and dV, or of what `split_gradients` takes for those of shares.

    Args:
      columns: of shares of dK and dV; what one of them has more is anything in the other.
    """
    if not tiles.are_shared:
        return key_gradients(tiles.problem)
    batch, kv_heads = tiles.problem.batch, tiles.problem.kv_heads
    shape = (2, batch, tiles.per_head * tiles.block_kv, kv_heads, max(columns))
    return (jax.ShapeDtypeStruct(shape, jnp.float32),)


def split_gradients(tiles: KeyTiles, refs: Sequence[Any]) -> tuple[Any, ...]:
    """Refs of dK and dV, and of more results that come behind them.

    Those of shares are one array, first dK, so that XLA adds up both in one kernel.
    """
    if not tiles.are_shared:
        return tuple(refs)
    both, *more = refs
    return both.at[0], both.at[1], *more


def summed(
    key: jax.Array, value: jax.Array, gradients: Sequence[jax.Array], tiles: KeyTiles
) -> tuple[jax.Array, ...]:
    """dK and dV, like key and value, of those of shares where there are more than one."""
    if not tiles.are_shared:
        return tuple(gradients)
    (both,) = gradients
    _, batch, _, _, columns = both.shape
    _, rows, kv_heads, _ = key.shape
    both = both.reshape(2, batch, -1, kv_heads, tiles.problem.kv_heads // kv_heads, columns).sum(4)
    if tiles.shares.parts > 1:
        of_tiles = both.reshape(2, batch, tiles.per_head, tiles.block_kv, kv_heads, columns)
        both = _summed_parts(of_tiles, tiles).reshape(2, batch, -1, kv_heads, columns)
    of_each = zip((key, value), both, strict=True)
    return tuple(x[:, :rows, :, : like.shape[3]].astype(like.dtype) for like, x in of_each)


def _summed_parts(gradient: jax.Array, tiles: KeyTiles) -> jax.Array:
    """`[2, B, whole tiles, ...]` of what the parts of tiles gave, `[2, B, tiles, ...]`."""
    count = np.bincount(tiles.seeing_blocks()[2])
    _, batch, _, *tile = gradient.shape
    if (count == count[0]).all():
        return gradient.reshape(2, batch, len(count), count[0], *tile).sum(3)
    number = np.arange(count.max())
    place = (count.cumsum() - count)[:, None] + np.minimum(number, count[:, None] - 1)
    is_there = (number < count[:, None]).reshape(*place.shape, *(1 for _ in tile))
    return jnp.where(is_there, gradient[:, :, place], 0.0).sum(3)
