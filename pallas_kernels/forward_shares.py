"""Tiles of the forward whose keys are dealt out in shares, where they do not fill the SMs evenly.

Flash-Decoding's split of the keys (Dao et al. 2023), for tiles of many queries. Each share of a
tile is a tile of its own, whose output is in float32 and divided by its own sum. They are put
together in a fixed order:

    out = sum of w_s O_s / sum of w_s,    w_s = 2^(reference_s + log_sum_s)
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import scheduler
from pallas_kernels.element_arrays import expanded
from pallas_kernels.forward_tiles import BLOCKS, TILE_OVERHEAD, Tiles
from pallas_kernels.online_softmax import NOTHING_SEEN, normalised
from pallas_kernels.problem import LOG2E

_AS_EARLY = 1.03  # how much later fewer shares may end
_MOST_ROUNDS = 12  # shares for each thread block, which bounds what is stored in float32
_ALL_TRIED = 16  # shares; of more those that fill rounds, or of which thread blocks have one each
_FEWEST_ROWS = 96  # that a step takes as long as: one consumer's, three quarters of that of two
# Microseconds: of what puts shares together, and of a megabyte that is stored and read for it; of
# 1e6 multiplications and additions, and of 1000 logits, of which a step takes the longer.
_TOGETHER, _MEGABYTE, _PRODUCTS, _LOGITS = 5.0, 0.5, 0.3, 0.06


@functools.lru_cache
def dealt_out(whole: Tiles, wanted: int | None) -> Tiles:
    """The tiles in as few shares as end early, of all thread blocks together.

    Args:
      whole: the tiles in one share.
      wanted: None, or how many shares there are to be, or fewer if there are not so many.
    """
    if not whole.are_plain or whole.problem.picks_keys:
        return whole
    blocks = int(whole.key_blocks()[:, BLOCKS].max())
    of_rounds = [n * whole.config.thread_blocks // whole.count for n in range(1, _MOST_ROUNDS + 1)]
    most = min(blocks, of_rounds[-1])
    if most == 0:
        return whole
    if wanted is not None:
        return dataclasses.replace(whole, shares=min(wanted, most))
    tried = {*range(1, max(_ALL_TRIED, of_rounds[0]) + 1), *of_rounds}
    possible = [dataclasses.replace(whole, shares=x) for x in sorted(tried) if 0 < x <= most]
    ends = [_end(tiles) for tiles in possible]
    return next(x for x, end in zip(possible, ends, strict=True) if end <= _AS_EARLY * min(ends))


def _end(tiles: Tiles) -> float:
    """When the last thread block ends, and shares are put together, in microseconds."""
    p, config = tiles.problem, tiles.config
    logits = max(config.block_q, _FEWEST_ROWS) * config.block_kv
    step = max(_PRODUCTS * logits * (p.width + p.value_width) / 1e6, _LOGITS * logits / 1e3)
    steps = np.sort(tiles.key_blocks()[:, BLOCKS])[::-1] + TILE_OVERHEAD
    steps_of_all = np.repeat(steps, p.batch * p.heads)
    # Of one tile alone it is in what the step takes.
    end = step * (scheduler.time_of_deal(steps_of_all, tiles.thread_blocks) - TILE_OVERHEAD)
    if not tiles.are_shared:
        return end
    stored_bytes = tiles.count * config.block_q * p.value_width * 4
    return end + _TOGETHER + _MEGABYTE * stored_bytes / 1e6


def combined(
    results: tuple[jax.Array, jax.Array, jax.Array], sinks: jax.Array | None, tiles: Tiles
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What `forward.attention` gives, from the results of all shares (`Tiles.kernel`).

    Args:
      results: output, LSE, and references with their log_sum.
      sinks: None, or `[B, N]`, in log2 units.
      tiles: of all shares.
    """
    p = tiles.problem
    parts, _, references = results
    parts = parts.reshape(p.batch, tiles.shares, tiles.rows, *parts.shape[2:])
    parts = parts[:, :, : p.query_length, :, : p.value_width]
    references = references.reshape(p.batch, p.heads, 2, tiles.shares, tiles.rows)
    counts = tiles.rows_that_count()
    reference = jnp.where(counts, references[:, :, 0], NOTHING_SEEN)
    log_sum = jnp.where(counts, references[:, :, 1], -jnp.inf)
    highest = reference.max(2)
    weights = jnp.exp2(reference - highest[:, :, None] + log_sum)
    sink = None if sinks is None else sinks[:, :, None]
    in_nats = (lambda x: expanded(x * (1.0 / LOG2E), p)) if p.unbounded else None
    end = normalised(highest, weights.sum(2), sink, in_nats)
    weights = (weights * end.inverse[:, :, None])[..., : p.query_length]
    weights = weights.transpose(0, 2, 3, 1)[..., None]  # as the output is
    output = (weights * parts).sum(1).astype(p.dtype)
    return output, end.lse, jnp.stack([highest, end.log_sum], axis=2)
