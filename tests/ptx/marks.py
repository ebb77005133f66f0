import math
from collections.abc import Callable

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np

from pallas_kernels.ptx.marks import (
    any_far,
    any_marked,
    bounded_columns,
    is_mark,
    mark,
    shared_columns,
)
from tests.support.ptx import (
    SPECIAL,
    Case,
    case,
    load,
    show,
    shown,
    some,
    to_shared,
)

_LAST_MARK = 2**23 - 2
_MARKS = np.array([1, 2, 77, _LAST_MARK + 1], np.int32).view(np.float32)
_NO_MARKS = (*(x for x in SPECIAL if not math.isnan(x)), math.nan, -(2.0**-140))


@case(mark, is_mark)
def marks():
    values = some([0, 1, 76, _LAST_MARK])
    floats = np.random.default_rng(0).choice(np.float32([*_MARKS, *_NO_MARKS]), 64)

    def body(values_ref, floats_ref, marks_ref, are_ref):
        show(marks_ref, mark(load(values_ref, "rows")), "rows")
        show(are_ref, is_mark(load(floats_ref, "rows")).astype(jnp.int32), "rows")

    are = np.isin(floats.view(np.int32), _MARKS.view(np.int32)).astype(np.int32)
    made = shown((values + 1).view(np.float32), "rows")
    return Case(body, (values, floats), (made, shown(are, "rows")))


def _vote_of_shared(rows: np.ndarray, vote: Callable, expected: np.ndarray) -> Case:
    def body(rows_ref, out_ref, *, smem, full):
        to_shared(rows_ref, smem, full)
        for n in range(len(rows)):
            show(out_ref.at[n], vote(smem.at[n]).astype(jnp.int32), "scalar")

    expected = np.broadcast_to(expected[:, None, None], (len(rows), 64, 8)).astype(np.int32)
    scratch = dict(smem=plgpu.SMEM(rows.shape, jnp.float32), full=plgpu.Barrier())
    return Case(body, (rows,), (expected,), scratch=scratch)


@case(any_marked, rows=(64, 128))
def marked_rows(rows):
    x = np.random.default_rng(0).choice(np.float32(_NO_MARKS), (5, rows))
    x[1, 0], x[2, -1], x[3, rows // 2 + 1], x[4, 31] = _MARKS
    return _vote_of_shared(x, any_marked, np.array([False, True, True, True, True]))


@case(any_far, rows=(64, 128))
def far_rows(rows):
    least = 1e4
    x = np.random.default_rng(0).uniform(-least, least, (7, rows)).astype(np.float32)
    x[:, 1::9] = np.resize([math.inf, -math.inf, math.nan, 0.0], x[:, 1::9].shape)
    x[1, 0], x[2, -1], x[3, rows // 2], x[4, 31] = least, -least, 3e38, -3e38
    x[5, 3], x[6, -2] = np.nextafter(np.float32(least), [np.float32(0), np.float32(1e9)])
    are_far = np.array([False, True, True, True, True, False, True])
    return _vote_of_shared(x, lambda ref: any_far(ref, least), are_far)


@case(bounded_columns, columns=(64, 128))
def columns_that_are_marked(columns):
    far, bound_far, bound = 100.0, -8.0, 14.0
    random = np.random.default_rng(0)
    tile = random.uniform(-200, 200, (64, columns)).astype(np.float32)
    tile[:, 3] = np.resize(np.float32([math.inf, -math.inf, 0.0, -0.0, 3e38]), 64)
    number = random.integers(0, 3, columns)
    is_marked = random.random(columns) < 0.3
    is_marked[16:32], is_marked[columns - 1], is_marked[3] = False, True, True
    words = np.where(is_marked, (number + 1).astype(np.int32).view(np.float32), 5.0)
    values = random.uniform(-150, 150, (3, 2, 64)).astype(np.float32)
    values[:, 0, :4] = [far, -far, 99.99, -3e4]

    def body(tile_ref, words_ref, values_ref, out_ref, *, smem, full):
        to_shared(words_ref, smem, full)
        bounds = dict(far=far, bound_far=bound_far, bound=bound)
        show(out_ref, bounded_columns(load(tile_ref), smem, values_ref, **bounds))

    reference, log_sum = values[number, :, np.arange(columns) % 64].T
    most = np.where(np.abs(reference) >= far, bound_far, bound).astype(np.float32)
    expected = np.where(is_marked, np.minimum(tile - reference, most) - log_sum, tile)
    scratch = dict(smem=plgpu.SMEM((columns,), jnp.float32), full=plgpu.Barrier())
    return Case(body, (tile, words.astype(np.float32), values), (expected,), scratch=scratch)


@case(shared_columns, columns=(64, 128))
def columns_with_a_share(columns):
    random = np.random.default_rng(0)
    tile = random.uniform(0, 3, (64, columns)).astype(np.float32)
    tile[:, 3] = np.resize(np.float32([math.inf, 1.0, 0.0, 3e38]), 64)
    shares = np.where(random.random(columns) < 0.3, random.uniform(0, 9, columns), 1.0)
    shares[16:32], shares[[3, columns - 1]] = 1.0, (0.5, 2.0**-90)
    shares = shares.astype(np.float32)

    def body(tile_ref, shares_ref, out_ref, *, smem, full):
        to_shared(shares_ref, smem, full)
        show(out_ref, shared_columns(load(tile_ref), smem))

    expected = np.where(shares == 1, tile, np.minimum(tile, np.float32(1)) * shares)
    scratch = dict(smem=plgpu.SMEM((columns,), jnp.float32), full=plgpu.Barrier())
    return Case(body, (tile, shares), (expected,), scratch=scratch)
