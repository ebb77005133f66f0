"""Segment ids of packed documents, and at random."""

import numpy as np

BATCH = 2


def packed(*documents, first_id=0) -> np.ndarray:
    """`[B, T]` ids of documents of these lengths, one after the other, for each batch entry."""
    rows = [np.repeat(np.arange(len(d)) + first_id, d) for d in documents]
    return np.stack(rows).astype(np.int32)


def at_random(length, ids, seed=0) -> np.ndarray:
    return np.random.default_rng(seed).integers(*ids, (BATCH, length)).astype(np.int32)
