import math

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.ptx.operands import (
    OPERAND,
    SharedZeros,
    float8_operand,
    keep_operand_rows,
    load_operand,
    operand_form,
    store_operand,
)
from tests.ptx.stores import place_by_quads
from tests.support.ptx import (
    LEAST,
    MOST,
    SHORT_DTYPES,
    Case,
    case,
    load,
    numbers,
    show,
    to_global,
    to_shared,
)

_BOXES = ((64, 64), (64, 256), (32, 96), (32, 256), (16, 48), (16, 208))  # width, and columns


@case(store_operand, operand_form, form=_BOXES)
def stored_operand(form):
    box, columns = form
    x = numbers(64, columns, dtype=jnp.bfloat16)

    def body(x_ref, out_ref, *, smem):
        store_operand(smem, load(x_ref), box)
        to_global(smem, out_ref)

    scratch = dict(smem=plgpu.SMEM(x.shape, x.dtype, transforms=operand_form(box)))
    return Case(body, (x,), (x,), scratch=scratch)


@case(store_operand, dtype=SHORT_DTYPES, columns=(64, 128))
def stored_operand_by_quads(dtype, columns):
    x = numbers(64, columns, dtype=dtype)

    def body(x_ref, out_ref, *, smem):
        store_operand(smem, load(x_ref), by_quads=True)
        to_global(smem, out_ref)

    expected = x[[place_by_quads(n) for n in range(64)]]
    scratch = dict(smem=plgpu.SMEM((64, columns), dtype, transforms=OPERAND))
    return Case(body, (x,), (expected,), scratch=scratch)


@case(load_operand, form=_BOXES)
def loaded_operand(form):
    box, columns = form
    x = numbers(64, columns, dtype=jnp.float16)

    def body(x_ref, out_ref, *, smem, full):
        to_shared(x_ref, smem, full)
        show(out_ref, load_operand(smem, columns, x.dtype, box))

    smem = plgpu.SMEM(x.shape, x.dtype, transforms=operand_form(box))
    return Case(body, (x,), (x,), scratch=dict(smem=smem, full=plgpu.Barrier()))


_RANGES = ((0, 0), (0, 1), (5, 23), (63, 64), (-3, 9), (40, 500), (LEAST, MOST), (MOST, LEAST))


def _rows_kept(x: np.ndarray, first: int, end: int) -> np.ndarray:
    row = np.arange(x.shape[-2])[:, None]
    return np.where((row >= first) & (row < end), x, np.zeros((), x.dtype))


@case(
    keep_operand_rows,
    float8_operand,
    dtype=(jnp.bfloat16, jnp.float8_e4m3fn),
    rows=(64, 128),
    columns=(64, 256),
)
def rows_of_an_operand_that_are_kept(dtype, rows, columns):
    x = numbers(rows, columns, special=(1.0, math.nan), dtype=dtype)
    ranges = np.array(_RANGES, np.int32)
    form = OPERAND if dtype == jnp.bfloat16 else float8_operand(columns)

    def body(x_ref, ranges_ref, out_ref, *, smem, full):
        for n in range(len(ranges)):
            to_shared(x_ref, smem, full)
            keep_operand_rows(smem, ranges_ref[n, 0], ranges_ref[n, 1])
            to_global(smem, out_ref.at[n])
            plgpu.commit_smem()  # all have waited before the next load

    expected = np.stack([_rows_kept(x, *kept) for kept in _RANGES])
    smem = plgpu.SMEM(x.shape, dtype, transforms=form)
    return Case(body, (x, ranges), (expected,), scratch=dict(smem=smem, full=plgpu.Barrier()))


@case(SharedZeros, box=(64, 32, 16), rows=(64, 128))
def zeros_that_two_warpgroups_write(box, rows):
    tiles, columns = 2, 2 * box
    x = numbers(tiles, rows, columns, special=(1.0, math.nan), dtype=jnp.bfloat16)
    ranges = np.array(_RANGES, np.int32)
    keep = lambda zeros, ref, chosen, *own: zeros.keep_rows(ref, chosen[0], chosen[1], *own)
    return _by_two_warpgroups(x, ranges, keep, np.stack([_rows_kept(x, *r) for r in _RANGES]), box)


@case(SharedZeros, box=(64, 32, 16), rows=(64, 128))
def zeros_of_marked_rows_that_two_warpgroups_write(box, rows):
    x = numbers(2, rows, 2 * box, special=(1.0, math.nan), dtype=jnp.bfloat16)
    words = np.array([[-1] * 4, [0] * 4, [1, LEAST, -2, 0x0F0F0F0F], [5, 1 << 7, 3, -5]], np.int32)
    words = words[:, : rows // 32]
    is_kept = ((words[..., None] >> np.arange(32)) & 1).reshape(len(words), 1, rows, 1)
    keep = lambda zeros, ref, marks, *own: zeros.keep_marked_rows(ref, marks, *own)
    return _by_two_warpgroups(x, words, keep, np.where(is_kept == 1, x, 0).astype(x.dtype), box)


def _by_two_warpgroups(x, choices, keep, expected, box) -> Case:
    """Each keeps rows of `(tiles, rows, columns)` by each of some choices."""
    (tiles, _, _), count = x.shape, len(choices)

    def body(x_ref, choices_ref, out_ref, *, smem, full, done, zeros):
        warpgroup = lax.axis_index("warpgroup")
        for n in range(count):

            @pl.when(warpgroup == 0)
            def _(n=n):
                for tile in range(tiles):
                    plgpu.copy_gmem_to_smem(x_ref.at[tile], smem.at[tile], full)

            plgpu.barrier_wait(full)
            keep(zeros, smem, choices_ref.at[n], warpgroup, box)
            plgpu.copy_smem_to_gmem(smem.at[warpgroup], out_ref.at[n, warpgroup])
            plgpu.wait_smem_to_gmem(0)
            plgpu.barrier_arrive(done)
            plgpu.barrier_wait(done)

    return Case(
        body,
        (x, choices),
        (expected,),
        warpgroups=2,
        scratch=dict(
            smem=plgpu.SMEM(x.shape, x.dtype, transforms=operand_form(box)),
            full=plgpu.Barrier(num_arrivals=tiles),
            done=plgpu.Barrier(num_arrivals=2),
        ),
        barriers=dict(zeros=SharedZeros(2)),
    )
