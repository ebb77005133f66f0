import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np

from pallas_kernels.ptx.bits import COLUMNS, ENTRIES, ROWS, TILE, WORD, store_bits
from tests.support.ptx import Case, case


def _words(bits: np.ndarray) -> np.ndarray:
    return np.packbits(bits, axis=-1, bitorder="little").view(np.int32)


def _entries(bits: np.ndarray, is_there: np.ndarray) -> np.ndarray:
    """`(row blocks, column blocks, ENTRIES)` of whole tiles."""
    rows, columns = (n // size for n, size in zip(bits.shape, (ROWS, COLUMNS), strict=True))
    in_blocks = lambda x: x.reshape(rows, ROWS, columns, COLUMNS).swapaxes(1, 2)
    bits, is_there = in_blocks(bits), in_blocks(is_there)
    some_and_all = np.stack([bits.any((2, 3)), (bits | ~is_there).all((2, 3))], axis=-1)
    return np.concatenate([some_and_all.astype(np.int32), _words(bits.any(2))], axis=-1)


@case(
    store_bits,
    # Whole tiles, columns that are no multiple of 4, of 128, and rows that end within a block.
    shape=((256, 128), (128, 256), (70, 133), (129, 252), (1, 1)),
    bounds=((None, None), (-40, 20)),
)
def bits_of_a_matrix(shape, bounds):
    entries, (rows, columns), (least, greatest) = 2, shape, bounds
    matrices = np.random.default_rng(shape).random((entries, *shape)) < 0.5
    matrices[:, :32, :64] = True  # all of a block, and none of others
    matrices[:, 32:64] = False
    tiles = [-(-size // TILE) for size in shape]

    def body(matrices_ref, *results, staging):
        for row in range(tiles[0]):
            for column in range(tiles[1]):
                is_inside = (row + 1) * TILE <= rows and (column + 1) * TILE <= columns
                place = 1, row, column
                store_bits(matrices_ref, results, staging, place, bounds, inside=is_inside)
                plgpu.commit_smem()  # all have read what is staged

    padded = np.zeros((tiles[0] * TILE, tiles[1] * TILE), bool)
    padded[:rows, :columns] = matrices[1]
    is_there = np.zeros_like(padded)
    is_there[:rows, :columns] = True
    difference = np.arange(padded.shape[1]) - np.arange(padded.shape[0])[:, None]
    padded &= (difference >= (-np.inf if least is None else least)) & (
        difference <= (np.inf if greatest is None else greatest)
    )
    by_row, by_column = _words(padded)[:rows], _words(padded.T.copy())[:columns]
    blocks = 2 * -(-rows // (2 * ROWS)), -(-columns // COLUMNS)
    of_blocks = _entries(padded, is_there)[: blocks[0], : blocks[1]]
    assert by_row.shape[1] == tiles[1] * TILE // WORD and of_blocks.shape[2] == ENTRIES
    return Case(
        body,
        (matrices,),
        (by_row, by_column, of_blocks),
        scratch=dict(staging=plgpu.SMEM((TILE // ROWS, TILE), jnp.int32)),
    )
