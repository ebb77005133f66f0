"""What the table of query blocks says of a tile of keys, beside which queries see them."""

import numpy as np

from pallas_kernels.key_tiles_blocks import ConsumerBlocks
from pallas_kernels.key_tiles_walk import Walk


def check_query_blocks(walk: Walk, index, tile: int, keys: np.ndarray, *, exact: bool) -> None:
    """Blocks left out see no key, of the tile or a consumer; those without a mask all of its keys.

    Args:
      index: of the tile in the list of the thread block.
      tile: its number in its head.
      keys: `[T, keys of the tile]`, whether a query sees a key.
      exact: the first and the last block of a consumer see some of its keys, if any does.
    """
    tiles = walk.tiles
    block_q, place = tiles.block_q, walk.locate(index)
    first, end = int(walk.first_block(place)), int(walk.end_block(place))
    assert 0 <= first < end <= tiles.query_blocks
    assert walk.steps(index) == (end - first) * tiles.problem.group
    assert not keys[: first * block_q].any()
    assert not keys[end * block_q :].any()
    for own in range(0, tiles.block_kv, 64):
        own_blocks = ConsumerBlocks(walk, index, own)
        own_first, own_end = int(own_blocks.first()), int(own_blocks.end())
        own_keys = keys[:, own : own + 64]
        assert first <= own_first <= own_end <= end
        assert not own_keys[: own_first * block_q].any()
        assert not own_keys[own_end * block_q :].any()
        if exact and own_keys.any():
            assert own_keys[own_first * block_q :][:block_q].any()
            assert own_keys[(own_end - 1) * block_q : own_end * block_q].any()
        if exact and not own_keys.size and tiles.problem.highest is None:  # beyond the last key
            assert own_first == own_end
        unmasked = int(own_blocks.first_unmasked())
        until = int(own_blocks.end_unmasked(unmasked))
        assert first <= unmasked <= until <= end
        if unmasked < until:
            assert own_first <= unmasked <= until <= own_end
            assert own_keys[unmasked * block_q : until * block_q].all()
            assert tile * tiles.block_kv + own + 64 <= tiles.problem.key_length
