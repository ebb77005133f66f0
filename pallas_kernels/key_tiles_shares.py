"""How tiles of keys are dealt out: in shares of their queries, and in sections of key heads.

A tile of keys takes the queries of all heads of its group. Where there are few tiles, most SMs
would have none. So its steps are dealt out: in shares of some query heads each, and where these do
not come out even, in parts of that, steps in a row. Each share gives dK and dV of its own in
float32, of whole tiles, which are added up in a fixed order. Where there are some more than the SMs
take in whole rounds, the last ones alone are in parts.

Sections are for dS', which is in memory for so many key heads at a time.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import key_tiles_order as order
from pallas_kernels import scheduler
from pallas_kernels.config import BACKWARD_SECTION_BYTES, SM_COUNT, Last, Shares
from pallas_kernels.key_tiles import KeyTiles, Section
from pallas_kernels.key_tiles_kernel import key_gradients
from pallas_kernels.problem import Problem, need, whole_tiles

_MOST_BYTES = 768 << 20  # of dK and dV of all shares
_FOR_TWO = 1.25  # as many bytes, where one head would be in memory else
_SIZES = 8  # of sections that are compared
# Where the last tiles alone are cut: how many numbers of heads are tried, and which of parts; by
# how much tiles are to end earlier; of how many rounds the last counts for little.
_TRIED_HEADS, _TRIED_PARTS = 6, (2, 3, 4, 6, 8, 12, 16, 24, 32)
_WORTH, _MOST_ROUNDS = 1.05, 12
_WIDEST_CUT_LAST = 128  # above it there are no registers for both ways out of a tile
_EVEN = 64  # parts that are shorter than what an SM has in all by this even out no more
# Microseconds: of what adds shares up, and of a megabyte that is stored and added up; of 1e6
# multiplications and additions, and of 1000 logits, of which a step takes the longer.
_SUM, _MEGABYTE, _PRODUCTS, _LOGITS = 2.5, 0.5, 0.4, 0.12
# How much longer tiles take that are at several query heads of a group at a time, where L2 does not
# have the rows of all heads: up to width 128, parts of these, tiles of unlike length of many heads,
# and above.
_APART, _PARTS_APART, _MANY_APART, _WIDE_APART = 1.06, 1.08, 1.2, 1.15
_MANY_HEADS = 4  # of a tile or a part


@functools.lru_cache
def dealt_out(whole: KeyTiles, wanted: int | Shares | None, d_logits_bytes: int = 0) -> KeyTiles:
    """The tiles in the shares that end earliest, as few as may be: where there are many, in one.

    At most in so many that dK and dV of all take `_MOST_BYTES`.

    Args:
      whole: the tiles in one share.
      wanted: None, or which shares, or how many; fewer where so many do not come out even.
      d_logits_bytes: as for `d_logits_sections`, one after the other; 0 for all heads together.
    """
    if isinstance(wanted, Shares):
        return in_shares(whole, wanted)
    if wanted is not None:
        few = [tiles for tiles in _possible(whole) if tiles.shares.total <= wanted]
        return max(few, key=lambda tiles: tiles.shares.total)
    earliest, end = whole, _end(whole, d_logits_bytes)
    least = whole.steps_per_head * len(whole.kv_heads) / SM_COUNT
    for tiles in itertools.chain(_possible(whole)[1:], _last_in_parts(whole)):
        worth = _WORTH if tiles.shares.last else 1.0
        if _stored_bytes(tiles) > _MOST_BYTES or worth * least + _time_of_sum(tiles) >= end:
            continue
        own_end = worth * _end(tiles, d_logits_bytes)
        if own_end < end:
            earliest, end = tiles, own_end
    return earliest


def _may_have_parts(problem: Problem) -> bool:
    """Else blocks are known at run time only, or not in a row, or registers are too short."""
    return problem.is_plain and not (problem.by_batch or problem.picks_keys)


def in_shares(whole: KeyTiles, shares: Shares) -> KeyTiles:
    """The tiles in these shares.

    Raises:
      ValueError: if they do not come out even, or kernels cannot take them.
    """
    p, last = whole.problem, shares.last
    need(p.group % shares.heads == 0, "shares", shares, f"heads that divide {p.group}")
    need(shares.parts == 1 or _may_have_parts(p), "shares", shares, "one part")
    if last:
        need(p.widest <= _WIDEST_CUT_LAST, "shares", shares, f"no last above {_WIDEST_CUT_LAST}")
        have = shares.heads == 1 < shares.parts and last.kv_heads in _last_heads(whole)
        have &= 1 <= last.tiles <= whole.whole_per_head
        need(have, "shares", shares, f"parts of 1 head; last heads of {_last_heads(whole)}")
    problem = dataclasses.replace(p, kv_heads=p.kv_heads * shares.heads)
    return dataclasses.replace(whole, problem=problem, shares=shares)


@functools.lru_cache
def _last_heads(whole: KeyTiles) -> list[int]:
    """Of how many last key heads tiles may be cut where others are not: what is one rectangle."""
    kv_heads = whole.problem.kv_heads
    most = range(1, order.last_heads(whole) + 1)
    return [n for n in most if n <= kv_heads or n % kv_heads == 0]


def _last_in_parts(whole: KeyTiles) -> Iterator[KeyTiles]:
    """The last tiles of all in parts, for SMs that the last round would leave idle.

    As Stream-K does it where it is a hybrid (Osama et al. 2023).
    """
    p, tiles = whole.problem, whole.whole_per_head
    if not _may_have_parts(p) or p.widest > _WIDEST_CUT_LAST:
        return
    if not SM_COUNT < whole.count < _MOST_ROUNDS * SM_COUNT:
        return
    over = whole.count % SM_COUNT  # tiles of the last round, if all are alike
    enough = [n for n in _last_heads(whole) if n * tiles >= over] or _last_heads(whole)[-1:]
    tried = np.unique(np.geomspace(1, len(enough), _TRIED_HEADS).astype(int)) - 1
    for heads in (enough[n] for n in tried.tolist()):
        fewest = max(1, min(tiles, -(-over // heads)))
        for cut in dict.fromkeys((fewest, tiles)):
            if heads * cut < whole.count:
                for parts in _TRIED_PARTS:
                    yield in_shares(whole, Shares(1, parts, Last(heads, cut)))


def _possible(whole: KeyTiles) -> list[KeyTiles]:
    """The tiles in any number of shares, the fewest first, of as many those of the most heads."""
    p = whole.problem
    may_have_parts = _may_have_parts(p)
    all_steps = whole.steps_per_head * len(whole.kv_heads)
    shortest = max(1, all_steps // (_EVEN * SM_COUNT))
    possible = [whole]
    for heads in range(1, p.group + 1):
        if p.group % heads:
            continue
        steps = int(whole.steps().max()) // heads
        lengths = range(min(shortest, steps), steps + 1) if may_have_parts else ()
        for parts in {1, *(-(-steps // length) for length in lengths)}:
            if heads * parts > 1:
                possible.append(in_shares(whole, Shares(heads, parts)))
    return sorted(possible, key=lambda x: (x.shares.total, -x.shares.heads))


def _end(tiles: KeyTiles, d_logits_bytes: int) -> float:
    """When the last SM ends, and dK and dV are added up, in steps."""
    sections = d_logits_sections(tiles, d_logits_bytes)
    end = _end_of_sections(tiles, [x.kv_heads for x in sections] or [tiles.kv_heads])
    return end * _apart(tiles) + _time_of_sum(tiles)


def _time_of_sum(tiles: KeyTiles) -> float:
    """Of what adds up dK and dV of shares, in steps."""
    if not tiles.are_shared:
        return 0.0
    logits = tiles.block_q * tiles.block_kv
    products = 5 * logits * tiles.problem.widest
    step = max(_PRODUCTS * products / 1e6, _LOGITS * logits / 1e3)
    sums = 2 if tiles.shares.last else 1  # they go into two arrays then
    return (sums * _SUM + _MEGABYTE * _stored_bytes(tiles) / 1e6) / step


def _apart(tiles: KeyTiles) -> float:
    """How much longer they take because they are at several query heads at a time."""
    p, steps = tiles.problem, tiles.in_one_part.steps()
    row_bytes = p.batch * p.kv_heads * p.group * p.query_length * tiles.row_bytes
    if p.group == 1 or row_bytes <= BACKWARD_SECTION_BYTES:
        return 1.0
    if p.widest <= 128:
        parts = tiles.shares.parts if tiles.all_are_shares else 1
        is_unlike = p.widest > 64 and steps.min() < steps.max()
        if is_unlike and p.group > _MANY_HEADS * parts:
            return _MANY_APART
        return _PARTS_APART if parts > 1 else _APART
    return _WIDE_APART if tiles.has_parts or steps.min() < steps.max() else 1.0


def _end_of_sections(tiles: KeyTiles, sections: Iterable[range]) -> float:
    """When the last SM ends that works on them one after the other, in steps."""
    return sum(scheduler.time_of_deal(order.costs_in_order(tiles, x), SM_COUNT) for x in sections)


def _stored_bytes(tiles: KeyTiles) -> int:
    """Of dK and dV of all shares, in float32."""
    rows = math.prod(tiles.shares_in_place) * tiles.block_kv
    return rows * 2 * whole_tiles(tiles.problem.widest) * 4


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
    most = most_bytes // head_bytes
    if most == 1:  # with a quarter more two heads, whose tiles fill SMs better
        most = max(1, min(2, int(_FOR_TWO * most_bytes) // head_bytes))
    most = min(count, most)
    even = -(-count // -(-count // most))
    sizes = np.unique(np.linspace(even, most, _SIZES).astype(int)).tolist()
    heads = lambda size: [tiles.kv_heads[n : n + size] for n in range(0, count, size)]
    size = min(sizes, key=lambda size: _end_of_sections(tiles, heads(size)))
    return [Section(of_section, size) for of_section in heads(size)]


def gradients_of_tiles(tiles: KeyTiles, *columns: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes of dK and dV, if any tile is whole, and of one array of those of shares, if any is.

    Args:
      columns: of shares of dK and dV; what one of them has more is anything in the other.
    """
    of_whole = () if tiles.all_are_shares else key_gradients(tiles.problem)
    if not tiles.are_shared:
        return of_whole
    batch, count, kv_heads = tiles.shares_in_place
    shape = (2, batch, count * tiles.block_kv, kv_heads, max(columns))
    return *of_whole, jax.ShapeDtypeStruct(shape, jnp.float32)


def split_gradients(tiles: KeyTiles, refs: Sequence[Any]) -> tuple[list, list, list]:
    """Refs of dK and dV, those of shares, and refs of more results that come behind them.

    Shares are one array, first dK, so that XLA adds up both in one kernel.
    """
    whole, more = ([], refs) if tiles.all_are_shares else (refs[:2], refs[2:])
    if not tiles.are_shared:
        return list(whole), [], list(more)
    both, *more = more
    return list(whole), [both.at[0], both.at[1]], list(more)


def summed(
    key: jax.Array, value: jax.Array, gradients: Sequence[jax.Array], tiles: KeyTiles
) -> tuple[jax.Array, ...]:
    """dK and dV, like key and value, of what a kernel gives as `gradients_of_tiles` has it."""
    if not tiles.are_shared:
        return tuple(gradients)
    *of_whole, both = gradients
    _, batch, rows, _, columns = both.shape
    both = both.reshape(2, batch, rows, -1, tiles.shares.heads, columns).sum(4)
    if tiles.has_parts:
        of_tiles = both.reshape(2, batch, -1, tiles.block_kv, *both.shape[3:])
        both = _summed_parts(of_tiles, tiles).reshape(2, batch, -1, *both.shape[3:])
    last, rows = tiles.shares.last, key.shape[1]
    if last:
        rows -= (tiles.whole_per_head - last.tiles) * tiles.block_kv
    of_each = zip((key, value), both, strict=True)
    cut = [x[:, :rows, :, : like.shape[3]].astype(like.dtype) for like, x in of_each]
    if not last:
        return tuple(cut)
    return tuple(_put_last(x, of_cut) for x, of_cut in zip(of_whole, cut, strict=True))


def _put_last(gradient: jax.Array, of_last: jax.Array) -> jax.Array:
    """Puts `[1, rows, heads, H]` of the last rows of the last heads, of all batch entries."""
    *_, kv_heads, width = gradient.shape
    if of_last.shape[2] > kv_heads:  # of whole batch entries
        of_last = of_last.reshape(of_last.shape[1], -1, kv_heads, width).swapaxes(0, 1)
    first = (a - b for a, b in zip(gradient.shape, of_last.shape, strict=True))
    return lax.dynamic_update_slice(gradient, of_last, tuple(first))


def _summed_parts(gradient: jax.Array, tiles: KeyTiles) -> jax.Array:
    """`[2, B, tiles that are cut, ...]` of what their parts gave, `[2, B, parts, ...]`."""
    tile = tiles.seeing_blocks()[2]
    if tiles.shares.last:
        tile = tile[tiles.whole_per_head :] - (tiles.whole_per_head - tiles.shares.last.tiles)
    count = np.bincount(tile)
    _, batch, _, *tile = gradient.shape
    if (count == count[0]).all():
        return gradient.reshape(2, batch, len(count), count[0], *tile).sum(3)
    number = np.arange(count.max())
    place = (count.cumsum() - count)[:, None] + np.minimum(number, count[:, None] - 1)
    is_there = (number < count[:, None]).reshape(*place.shape, *(1 for _ in tile))
    return jnp.where(is_there, gradient[:, :, place], 0.0).sum(3)
