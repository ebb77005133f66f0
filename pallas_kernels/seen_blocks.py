"""Which key blocks tiles of queries need, where bounds are static: arithmetic without a kernel."""

import numpy as np

from pallas_kernels.config import ROWS
from pallas_kernels.problem import Problem


def unused_rows(query_length: int, block_q: int) -> int:
    """Rows of a head's tiles that are those of warpgroups without a query."""
    whole = lambda block: -(-query_length // block) * block
    return whole(block_q) - whole(ROWS)


def shift(problem: Problem, block_q: int, block_kv: int) -> int:
    """Rows by which the first tile of a head starts before the first query.

    Where tiles do not divide the rows, some warpgroups of one tile have none. Under a causal mask
    that is the first tile, which sees the fewest keys, unless beside a window tiles would see more
    blocks so.
    """
    unused = unused_rows(problem.query_length, block_q)
    if problem.highest is None or unused == 0:
        return 0
    if problem.lowest is None:
        return unused
    blocks = lambda shift: key_blocks(problem, block_q, block_kv, shift)[:, 0].sum()
    return unused if blocks(unused) <= blocks(0) else 0


def key_blocks(problem: Problem, block_q: int, block_kv: int, shift: int) -> np.ndarray:
    """What `forward_tiles.Tiles.key_blocks` says of tiles in one share, by static bounds alone.

    Args:
      shift: rows by which the first tile starts before the first query.
    """
    p = problem
    first_row = np.arange(-(-p.query_length // block_q)) * block_q - shift
    last_row = np.minimum(first_row + block_q, p.query_length) - 1
    first_row = np.maximum(first_row, 0)
    seen_by_last = seen_by_first = np.full(len(first_row), p.key_length)
    if p.highest is not None:
        seen_by_first = np.minimum(p.key_length, first_row + 1 + p.highest)
        seen_by_last = np.minimum(p.key_length, last_row + 1 + p.highest)
    end = np.maximum(1, -(-seen_by_last // block_kv))
    # Causal tiles: one more block where none of the masked ones holds a key of the first row.
    unmasked = np.clip((seen_by_first - (p.highest is not None)) // block_kv, 0, end)
    if p.lowest is None:
        return np.stack([end, end - unmasked], axis=1).astype(np.int32)
    first = np.clip((first_row + p.lowest) // block_kv, 0, end - 1)
    first_unmasked = np.maximum(0, -(-(last_row + p.lowest) // block_kv))
    blocks, any_unmasked = end - first, first_unmasked < unmasked
    # Then steps at the far edge may trust the maximum, as each row has seen its last key.
    all_see = last_row + p.lowest < p.key_length
    if p.highest is not None:
        all_see &= first_row + p.highest >= 0
    exact = np.where(all_see, end - unmasked, blocks)
    near = np.where(any_unmasked, end - np.maximum(first_unmasked, first), exact)
    return np.stack([blocks, exact, near, end], axis=1).astype(np.int32)
