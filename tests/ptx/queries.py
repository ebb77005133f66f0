import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np

from pallas_kernels.ptx.operands import (
    OPERAND,
)
from pallas_kernels.ptx.queries import load_queries, store_grouped, store_queries
from tests.support.ptx import DTYPES, Case, case, cast, numbers, to_global


@case(load_queries, store_queries, rows=(8, 64), columns=(64, 128, 256))
def queries_as_an_operand(rows, columns):
    """Rows of 3 of 7 heads, some beyond the last."""
    tokens, heads, first = 9, 3, 13
    x = numbers(tokens, 7, columns, dtype=jnp.bfloat16)

    def body(x_ref, out_ref, *, smem):
        loaded = load_queries(x_ref.at[:, pl.ds(2, heads)], first, rows)
        store_queries(smem, loaded)
        to_global(smem, out_ref)

    place = np.minimum(first + np.arange(rows), tokens * heads - 1)
    expected = x[:, 2 : 2 + heads][place // heads, place % heads]
    scratch = dict(smem=plgpu.SMEM((rows, columns), x.dtype, transforms=OPERAND))
    return Case(body, (x,), (expected,), scratch=scratch)


@case(store_grouped, dtype=DTYPES, width=(64, 128), rows=(8, 64))
def rows_of_a_group(dtype, width, rows):
    """The last of them are beyond the last token."""
    tokens, heads = 9, 3
    first = tokens * heads - rows + 5 if rows < 20 else 1
    tile, before = numbers(width, rows), numbers(tokens, 7, width, dtype=dtype)

    def body(tile_ref, out_ref):
        tile = plgpu.load(tile_ref, layout=plgpu.Layout.WGMMA, optimized=False)
        store_grouped(out_ref.at[:, pl.ds(2, heads)], tile, first)

    expected = before.copy()
    for n in range(min(rows, tokens * heads - first)):
        token, head = divmod(first + n, heads)
        expected[token, 2 + head] = cast(tile[:, n], dtype)
    return Case(body, (tile,), (expected,), states=(before,))
