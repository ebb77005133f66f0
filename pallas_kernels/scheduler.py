"""Which tile a thread block works on next.

Longest tiles first, so that the last ones to end are short; heads in sections whose keys and values
stay in L2 together; query heads of one key head side by side.
"""

import heapq
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_GREEDY_LIMIT = 1 << 15  # above it a plain deal is as even, and the simulation takes seconds
# In steps. A thread block's launch, first loads and last stores take 1.3 steps: half a percent of
# the first, 1.4% of the second, which is for tiles whose costs a deal could only guess.
_LONG_TILE, _LONG_UNKNOWN_TILE = 256, 96
_COUNTED = 1024  # tiles of a head, to find whose places each is compared with each
# Guesses of how costs fall: from 1 to 0.05, to these powers.
_POWERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0)
# As many times the bytes of a section, where its tiles end earlier so, by more than this; and how
# many sections are compared.
_LONGEST_SECTION, _AS_EARLY, _COMPARED = 3, 1.03, 8
# From how much of the longest on a section is taken that leaves none longer. us*, sections of 8 and
# of 10 of 32 heads: backward of b1 s16384 H64 with 32 documents 514 and 534; of 4 and of 5 of 64:
# forward of b4 s4096 H128 causal 366 and 369.
_EVEN = 0.6
# Bytes of the heads in work at a time that L2 would not keep: of 50 MB, three quarters. Who reads
# them at the same time reads them once. And up to how many times the shortest tile of a head the
# longest takes where tiles count as alike, and need not begin longest first.
_BEYOND_L2, _ALIKE = 36 << 20, 1.25


def heads_per_section(
    section_bytes: int,
    bytes_per_kv_head: int,
    tiles_per_kv_head: int,
    slots: int,
    kv_heads: int,
    group: int,
    cost: np.ndarray | None = None,
) -> int:
    """Query heads that are worked on together: what L2 holds, or what is in work at a time anyway.

    What is in work does not count where tiles are alike, and it is more than L2 has: then those of
    a head begin together, and the next head's after them.

    Args:
      section_bytes: what the heads of a section may take of L2.
      bytes_per_kv_head: what the tiles of one key head share.
      tiles_per_kv_head: tiles of all query heads of a key head.
      slots: tiles that are in work at a time.
      kv_heads: key heads, of every batch entry.
      group: query heads a key head.
      cost: `[tiles]`, the work of each tile of one head; None if known at run time only.

    Returns:
      A whole number of groups, which divides all heads if nearly as many do. Else the last section
      is longer, by less than as much again.
    """
    in_work = min(slots // tiles_per_kv_head, kv_heads)
    are_alike = cost is not None and cost.max() <= _ALIKE * cost.min()
    if are_alike and in_work * bytes_per_kv_head > _BEYOND_L2:
        in_work = 1
    most = min(max(1, section_bytes // bytes_per_kv_head, in_work), kv_heads)
    divisor = max(n for n in range(1, most + 1) if kv_heads % n == 0)
    if divisor >= _EVEN * most:
        return divisor * group
    sections = -(-kv_heads // most)
    return kv_heads // sections * group


def section_that_ends_early(cost: np.ndarray, section_bytes: int, **sizes: int) -> int:
    """The shortest section whose tiles end about as early as those of any other.

    Args:
      cost: `[tiles]`, the work of each tile of one head.
      section_bytes: what the shortest may take of L2.
      **sizes: as for `heads_per_section`.
    """
    least = heads_per_section(section_bytes, **sizes, cost=cost)
    if cost.min() == cost.max():
        return least  # in any order they end as early
    longest = heads_per_section(_LONGEST_SECTION * section_bytes, **sizes, cost=None)
    heads, blocks = sizes["kv_heads"] * sizes["group"], sizes["slots"]
    if least == longest or heads * len(cost) > _GREEDY_LIMIT:
        return least
    groups = np.linspace(least, longest, _COMPARED).astype(int) // sizes["group"]
    possible = [n * sizes["group"] for n in np.unique(groups).tolist()]
    ends = [time_of_deal(cost[tile_order(cost, heads, n)[0]], blocks) for n in possible]
    early = _AS_EARLY * min(ends)
    return next(n for n, end in zip(possible, ends, strict=True) if end <= early)


def tile_order(
    cost: np.ndarray, heads: int, section: int, last_section: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Order in which to start tiles.

    Args:
      cost: `[tiles]`, the work of each tile of one head.
      heads: heads in all, of every batch entry.
      section: heads that are worked on together, and in the last one up to twice as many.
      last_section: tiles; so many last ones, or a few more, are in one section.

    Returns:
      Tile and head of each piece of work, first to start first.
    """
    longest_first = np.argsort(-cost, kind="stable")
    starts = section_starts(len(cost), heads, section, last_section)
    sections = [np.arange(*ends) for ends in itertools.pairwise(starts)]
    tile = np.concatenate([np.repeat(longest_first, len(x)) for x in sections])
    return tile, np.concatenate([np.tile(x, len(cost)) for x in sections])


def section_starts(tiles: int, heads: int, section: int, last_section: int = 0) -> list[int]:
    """The first head of each section, and the number of heads; arguments as for `tile_order`.

    Args:
      tiles: of a head.
    """
    last = max(1, -(-last_section // (tiles * section))) * section
    return [*range(0, max(0, heads - last) + 1, section), heads]


def thread_blocks(pieces: int, steps: np.ndarray, most: int, is_known: bool) -> int:
    """How many thread blocks to launch: few that walk lists, or one for each piece of work.

    With lists no tile waits for a launch. With one each the hardware starts the next piece where an
    SM is free, whatever made it so: costs that were not foreseen, or other kernels on some SMs.

    Args:
      pieces: tiles of all heads, of every batch entry.
      steps: `[tiles]`, steps of each tile of one head. Where they are known at run time only, the
        most that they can be: tiles count as long then though documents may be short.
      most: thread blocks that find room at a time.
      is_known: whether they are known before run time.

    Returns:
      pieces if tiles are long in the mean, at most `most` otherwise.
    """
    long = _LONG_TILE if is_known else _LONG_UNKNOWN_TILE
    return pieces if steps.mean() > long else min(pieces, most)


def deal(pieces: np.ndarray, costs: np.ndarray, blocks: int, reverse: bool = False) -> np.ndarray:
    """Deals work to thread blocks that never stop, each next piece to the block that is free first.

    Where there are as many thread blocks as pieces, each has one, in the order of starting.

    Args:
      pieces: `[n]` number of each piece of work, in the order of starting.
      costs: `[n]` cost of each.
      blocks: thread blocks.
      reverse: the piece that a thread block begins with is the last of its list.

    Returns:
      `[blocks, 2 + most]` int32: how many pieces a block has, their numbers, and at least one 0.
    """
    n = len(pieces)
    if n <= _GREEDY_LIMIT:
        owner = np.empty(n, np.int64)
        free = [(0.0, block) for block in range(blocks)]
        for index, cost in enumerate(costs.tolist()):
            time, block = free[0]
            owner[index] = block
            heapq.heapreplace(free, (time + cost, block))
    else:
        turn, seat = np.divmod(np.arange(n), blocks)
        owner = np.where(turn % 2, blocks - 1 - seat, seat)
    count = np.bincount(owner, minlength=blocks)
    by_owner = np.argsort(owner, kind="stable")
    first = np.cumsum(count) - count
    table = np.zeros((blocks, int(count.max(initial=0)) + 2), np.int32)
    table[:, 0] = count
    place = np.arange(n) - first[owner[by_owner]]
    if reverse:
        place = count[owner[by_owner]] - 1 - place
    table[owner[by_owner], 1 + place] = pieces[by_owner]
    return table


def time_of_deal(costs: np.ndarray, blocks: int) -> float:
    """When the last of the thread blocks ends to which `deal` gives pieces of these costs."""
    free = [0.0] * blocks
    for cost in costs.tolist():
        heapq.heapreplace(free, free[0] + cost)
    return max(free)


def deals_by_rank(
    pieces: np.ndarray, ranks: np.ndarray, tiles: int, blocks: int, reverse: bool = False
) -> np.ndarray:
    """What `deal` gives where costs are known at run time only, for each of several guesses.

    A guess is how costs fall with the rank of a tile among those of its head, the most costly
    first: not at all, as without a causal mask, linearly, as with one, or like those of causal
    documents of unlike lengths. `longest_first` takes the one that comes closest.

    Args:
      pieces, blocks, reverse: as for `deal`.
      ranks: `[n]` of each piece.
      tiles: of a head.

    Returns:
      `[guesses, blocks, 2 + most]` int32; one guess alone where all would be the same.
    """
    guesses = _guesses(tiles)
    if blocks == len(pieces) or len(pieces) > _GREEDY_LIMIT:  # then `deal` looks at no cost
        guesses = guesses[:1]
    tables = [deal(pieces, costs[ranks], blocks, reverse) for costs in guesses]
    widest = max(table.shape[1] for table in tables)
    return np.stack([np.pad(x, ((0, 0), (0, widest - x.shape[1]))) for x in tables])


def _guesses(tiles: int) -> list[np.ndarray]:
    return [np.linspace(1.0, 0.05, tiles) ** power + 0.03 for power in _POWERS]


def order_by_rank(pieces: np.ndarray | jax.Array, cost: jax.Array, heads: int) -> jax.Array:
    """Pieces of work with the tiles of each head ranked by their costs.

    Args:
      pieces: the numbers head * tiles + rank, heads of every batch entry, in any shape.
      cost: `[B, tiles]`, the same for all heads of a batch entry.
      heads: of a batch entry.

    Returns:
      The numbers head * tiles + tile in their places, rank 0 the tile that costs most.
    """
    tiles = cost.shape[1]
    head, rank = pieces // tiles, pieces % tiles
    return _by_rank(cost)[head // heads, rank] + (head * tiles).astype(np.int32)


def _by_rank(cost: jax.Array) -> jax.Array:
    """The tile of each rank, `[B, tiles]`: a sort, but by counting where that takes less time.

    Costs differ by whole numbers; ranks of what differs by less may be any.
    """
    if cost.shape[1] > _COUNTED:
        return jnp.argsort(-cost, axis=1).astype(jnp.int32)
    number = jnp.arange(cost.shape[1], dtype=jnp.int32)[None]
    key = cost.astype(jnp.int32) * cost.shape[1] - number
    is_before = key[:, None, :] > key[:, :, None]
    rank = is_before.sum(-1, dtype=jnp.int32)
    is_it = rank[:, None, :] == number[:, :, None]
    return jnp.where(is_it, number[:, None], 0).sum(-1, dtype=jnp.int32)


def longest_first(schedules: np.ndarray, cost: jax.Array, heads: int) -> jax.Array:
    """The schedule whose guess comes closest, with the tiles of each head ranked by their costs.

    Args:
      schedules: what `deals_by_rank` gives, of the numbers head * tiles + rank, heads of every
        batch entry.
      cost: `[B, tiles]`, the same for all heads of a batch entry.
      heads: of a batch entry.

    Returns:
      A schedule of the numbers head * tiles + tile, rank 0 the tile that costs most.
    """
    tiles = cost.shape[1]
    schedule = jnp.asarray(schedules[0])
    if len(schedules) > 1:
        # How large the mean is beside the largest tells the guesses apart.
        # Behind a barrier: XLA would add up all costs anew for each number.
        total, largest = lax.optimization_barrier((cost.sum(), cost.max(1).sum()))
        share = total / (tiles * largest)
        shares = [guess.mean() / guess.max() for guess in _guesses(tiles)]
        middles = [(above + below) / 2 for above, below in itertools.pairwise(shares)]
        schedule = jnp.asarray(schedules)[sum((share < x).astype(jnp.int32) for x in middles)]
    numbers = order_by_rank(schedule[:, 1:], cost, heads)
    return jnp.concatenate([schedule[:, :1], numbers], axis=1)


def as_constant(table: np.ndarray) -> np.ndarray:
    """The table, with a row of no tile if all is alike: XLA makes such constants in a kernel."""
    is_alike = (table == table.flat[0]).all()
    return np.append(table, table[:1] + 1, axis=0) if is_alike else table
