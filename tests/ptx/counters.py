import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.interpret import interpreting
from pallas_kernels.ptx.compiler import (
    load_shared,
)
from pallas_kernels.ptx.counters import (
    add_to,
    add_when_stored,
    await_count,
    draw_ticket,
    share_first,
)
from pallas_kernels.ptx.stores import (
    store_rows,
)
from tests.support.ptx import LEAST, MOST, Case, case, load, numbers, show, to_shared


@case(draw_ticket, share_first, load_shared)
def tickets():
    first, other = 5, [LEAST, MOST, -1]

    def body(counter_ref, out_ref, *, smem, as_float):
        for n in range(3):
            ticket = draw_ticket(counter_ref.at[0], jnp.int32(first + n))
            share_first((smem.at[n], ticket), (as_float.at[n], jnp.int32(other[n])))
            for place, ref in enumerate((smem, as_float)):
                show(out_ref.at[n, place], load_shared(ref.at[n]), "scalar")

    expected = np.array([[first + n, other[n]] for n in range(3)], np.int32)[..., None, None]
    expected = np.broadcast_to(expected, (3, 2, 64, 8))
    before, after = (np.array([n], np.int32) for n in (first, first + 3))
    return Case(
        body,
        expected=(expected, before),
        on_gpu=(expected, after),
        states=(before,),
        scratch=dict(smem=plgpu.SMEM((4,), jnp.int32), as_float=plgpu.SMEM((4,), jnp.float32)),
    )


@case(add_to)
def an_addition_of_something():
    def body(counter_ref):
        add_to(counter_ref.at[0])

    return Case(
        body,
        expected=(np.array([True]),),
        states=(np.zeros(1, np.int32),),
        of=lambda count: (count > 0,),
    )


@case(add_when_stored, await_count)
def stores_that_others_wait_for():
    """Each of two warpgroups reads what the other stored; twins do not wait, and read their own."""
    x = numbers(2, 64)

    def body(x_ref, counter_ref, stored_ref, out_ref, *, smem, full):
        warpgroup = lax.axis_index("warpgroup")
        store_rows(stored_ref.at[warpgroup], load(x_ref.at[warpgroup], "rows"))
        add_when_stored(counter_ref.at[0])
        await_count(counter_ref.at[0], 2)
        other = warpgroup if interpreting() else 1 - warpgroup
        to_shared(stored_ref.at[other], smem.at[warpgroup], full.at[warpgroup])
        show(out_ref.at[warpgroup], load(smem.at[warpgroup], "rows"), "rows")

    of_each = np.broadcast_to(x[..., None], (2, 64, 8))
    return Case(
        body,
        (x,),
        (of_each, np.zeros(1, np.int32), x),
        on_gpu=(of_each[::-1], np.full(1, 2, np.int32), x),
        states=(np.zeros(1, np.int32), np.zeros_like(x)),
        warpgroups=2,
        scratch=dict(smem=plgpu.SMEM((2, 64), jnp.float32), full=plgpu.Barrier(num_barriers=2)),
    )
