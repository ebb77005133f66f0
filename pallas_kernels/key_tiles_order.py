"""In which order tiles of keys are started, and which a thread block has.

Longest first, key heads in sections whose Q, dO and dQ stay in L2 together. Where costs are known
at run time only, ranks by cost stand in the place of tiles.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import scheduler, tickets
from pallas_kernels.config import BACKWARD_SECTION_BYTES, SM_COUNT
from pallas_kernels.key_tiles import KeyTiles
from pallas_kernels.key_tiles_dealing import Dealing

TILE_OVERHEAD = 1.0  # what a tile costs beside its steps, in steps
# Sections are longer by this where costs are known at run time only, as what thread blocks get is
# even over many tiles alone; yet not all heads, whose dQ would leave L2.
_LONGER_SECTIONS = 8
# The same where tiles are drawn, which is even over fewer. Tiles of documents are even enough
# without, and what evicts dQ from L2 costs them more.
_LONGER_DRAWN_SECTIONS = 3


def thread_blocks(
    tiles: KeyTiles,
    most: int | None,
    kv_heads: range | None = None,
    dealing: Dealing = Dealing.LISTED,
) -> int:
    """How many to launch: at most so many, or if None as `scheduler.thread_blocks` decides.

    Args:
      kv_heads: those that have tiles; None for all.
      dealing: where tiles are drawn, None stands for one on each SM.
    """
    count = len(kv_heads) * tiles.per_head if kv_heads else tiles.count
    if most is None and dealing is not Dealing.DRAWN:
        is_known = not tiles.problem.by_batch
        return scheduler.thread_blocks(count, tiles.steps(), SM_COUNT, is_known)
    return min(count, most or SM_COUNT)


def schedule(
    tiles: KeyTiles, thread_blocks: int, reverse: bool = False, kv_heads: range | None = None
) -> np.ndarray:
    """The tiles of each thread block, as `scheduler.deal` gives them; see `locate`.

    If costs are known at run time only, as `scheduler.deals_by_rank` does, with ranks in the
    place of tiles.
    """
    kv_heads = kv_heads or tiles.kv_heads
    section = _section(tiles, kv_heads, _LONGER_SECTIONS if tiles.problem.by_batch else 1)
    number, tile, cost = _order(tiles, kv_heads, section)
    if tiles.problem.by_batch:
        return scheduler.deals_by_rank(number, tile, tiles.per_head, thread_blocks, reverse)
    return scheduler.deal(number, cost, thread_blocks, reverse)


def order_to_draw(tiles: KeyTiles, thread_blocks: int) -> np.ndarray:
    """The numbers of all tiles in the order to draw them.

    If costs are known at run time only, with ranks in the place of tiles.
    """
    number, _, _ = _order(tiles, tiles.kv_heads, *_sections_to_draw(tiles, thread_blocks))
    return number.astype(np.int32)


def prepared(tiles: KeyTiles, thread_blocks: int) -> tuple[int, range]:
    """Key heads of a section, and those for which the section before can prepare something.

    Where thread blocks draw tiles. The tile of that number in each of these heads has one of
    its own in the section before: the one whose head is a section before.
    """
    section, last_section = _sections_to_draw(tiles, thread_blocks)
    heads = len(tiles.kv_heads)
    *_, last, _ = scheduler.section_starts(tiles.per_uncut_head, heads, section, last_section)
    if tiles.shares.last:  # parts of tiles prepare nothing
        last = min(last, (heads - tiles.shares.last.kv_heads) // section * section)
    return section, range(section, last + section)


def last_heads(tiles: KeyTiles) -> int:
    """How many key heads are last: of the last section, or of the tiles that SMs take at a time."""
    heads = len(tiles.kv_heads)
    *_, last, end = scheduler.section_starts(1, heads, _section(tiles, tiles.kv_heads, 1))
    return min(heads, max(end - last, SM_COUNT // tiles.whole_per_head))


def _sections_to_draw(tiles: KeyTiles, thread_blocks: int) -> tuple[int, int]:
    """Key heads of a section, and tiles of the last one."""
    p = tiles.problem
    longer = _LONGER_DRAWN_SECTIONS if p.by_batch and not p.segmented else 1
    last_section = tickets.LAST_TILES * thread_blocks if p.by_batch else 0
    return _section(tiles, tiles.kv_heads, longer), last_section


@functools.lru_cache
def _section(tiles: KeyTiles, kv_heads: range, longer: int) -> int:
    """Key heads of a section, of so many times `BACKWARD_SECTION_BYTES`.

    Of more where their tiles end earlier so, if costs are known.
    """
    p = tiles.problem
    sizes = dict(
        bytes_per_kv_head=p.group * p.query_length * tiles.row_bytes,
        tiles_per_kv_head=tiles.per_uncut_head,
        slots=SM_COUNT,
        kv_heads=len(kv_heads),
        group=1,
    )
    section_bytes = longer * BACKWARD_SECTION_BYTES
    if p.by_batch:
        return scheduler.heads_per_section(section_bytes, **sizes, cost=None)
    cost = tiles.steps()[: tiles.per_uncut_head] + TILE_OVERHEAD
    return scheduler.section_that_ends_early(cost, section_bytes, **sizes)


def costs_in_order(tiles: KeyTiles, kv_heads: range) -> np.ndarray:
    """Of tiles in the order of starting, in steps."""
    if tiles.problem.by_batch:  # the most that they can be
        return -np.sort(-np.tile(tiles.steps() + TILE_OVERHEAD, len(kv_heads)))
    *_, cost = _order(tiles, kv_heads, _section(tiles, kv_heads, 1))
    return cost


def _order(
    tiles: KeyTiles, kv_heads: range, section: int, last_section: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The order of starting: number of each tile, its number in its head, and its cost.

    If costs are known at run time only, with ranks in the place of tiles.

    Args:
      kv_heads: those that have tiles.
      section, last_section: as for `scheduler.tile_order`.
    """
    cost = np.zeros(tiles.per_head)
    if not tiles.problem.by_batch:
        cost = tiles.steps() + TILE_OVERHEAD
    uncut = cost[: tiles.per_uncut_head]
    tile, kv_head = scheduler.tile_order(uncut, len(kv_heads), section, last_section)
    if tiles.shares.last:
        tile, kv_head = _last_cut(tiles, tile, kv_head, section)
    return (kv_heads.start + kv_head) * tiles.per_head + tile, tile, cost[tile]


def _last_cut(
    tiles: KeyTiles, tile: np.ndarray, kv_head: np.ndarray, section: int
) -> tuple[np.ndarray, np.ndarray]:
    """An order of whole tiles, with the last ones in parts behind all others."""
    assert tiles.shares.last is not None
    cut_heads, last_tiles = tiles.shares.last
    first_head = len(tiles.kv_heads) - cut_heads
    stays = (kv_head < first_head) | (tile < tiles.whole_per_head - last_tiles)
    part, of_head = scheduler.tile_order(
        tiles.steps()[tiles.whole_per_head :], cut_heads, min(section, cut_heads)
    )
    tile = np.append(tile[stays], tiles.whole_per_head + part)
    return tile, np.append(kv_head[stays], first_head + of_head)


def table_to_draw(tiles: KeyTiles, thread_blocks: int, cost: jax.Array | None = None) -> jax.Array:
    """The numbers of tiles in the order to draw them, as `tickets.Tickets` takes them.

    Args:
      cost: `[B, tiles]`, or `[B * key heads, tiles]`, where costs are known at run time only.
    """
    order: jax.Array | np.ndarray = order_to_draw(tiles, thread_blocks)
    if cost is not None:
        order = scheduler.order_by_rank(order, cost, len(tiles.kv_heads) // cost.shape[0])
    # Behind the last stands what is no tile. Static numbers that go up by one to the end would
    # be made by XLA in a kernel of its own.
    none = tiles.numbers if cost is not None else tiles.numbers + 1
    return jnp.pad(jnp.asarray(order), (0, 1), constant_values=none)


def counters_to_draw(tiles: KeyTiles, thread_blocks: int) -> int:
    """How many counters a kernel that draws has: of tickets, then of each section's tiles."""
    section, _ = prepared(tiles, thread_blocks)
    return 1 + len(tiles.kv_heads) // section
