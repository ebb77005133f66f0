import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np

from pallas_kernels.ptx.fragments import (
    fragment_shape,
    load_fragment,
    store_fragment,
    zero_fragment,
)
from tests.support.ptx import Case, case, load, numbers, show, to_global


def _fragments(tile: np.ndarray) -> np.ndarray:
    """`[16 columns][row half][thread][4]`, what threads have of a tile, in the shape of it."""
    group, half, thread, n = np.indices((tile.shape[1] // 16, 2, 128, 4))
    row = thread // 32 * 16 + 8 * half + thread % 32 // 4
    column = 16 * group + 8 * (n // 2) + 2 * (thread % 4) + n % 2
    return tile[row, column].reshape(fragment_shape(tile.shape[1]))


@case(store_fragment, load_fragment, zero_fragment, fragment_shape, columns=(16, 64, 128, 256))
def tiles_in_fragment_order(columns):
    x = numbers(64, columns)
    in_order = _fragments(x)

    def body(x_ref, in_order_ref, zeroed_ref, stored_ref, loaded_ref, *, smem):
        store_fragment(smem, load(x_ref))
        to_global(smem, stored_ref)
        show(loaded_ref, load_fragment(in_order_ref, columns))
        zero_fragment(zeroed_ref.at[1])

    before = np.stack([in_order] * 3)
    zeroed = np.stack([in_order, np.zeros_like(in_order), in_order])
    smem = plgpu.SMEM(fragment_shape(columns), jnp.float32)
    expected = in_order, x, zeroed
    return Case(body, (x, in_order), expected, states=(before,), scratch=dict(smem=smem))
