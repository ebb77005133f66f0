import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ptx.barriers import (
    NamedBarriers,
)
from pallas_kernels.ptx.mail import mail_shape, receive_tile, send_tile
from tests.support.ptx import (
    Case,
    case,
    load,
    numbers,
    show,
)


@case(send_tile, receive_tile, mail_shape, dtype=(jnp.float32, jnp.bfloat16), columns=(16, 64, 128))
def tiles_sent_to_and_fro(dtype, columns):
    """Through one ref: what the second warpgroup gets, it answers with a tile of its own."""
    x = numbers(2, 64, columns, dtype=dtype)

    def body(x_ref, out_ref, *, mail, sent):
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == 0)
        def _():
            send_tile(mail, load(x_ref.at[0]))
            sent.arrive(0)
            sent.wait(1)
            show(out_ref.at[0], receive_tile(mail, columns, dtype))

        @pl.when(warpgroup == 1)
        def _():
            sent.wait(0)
            show(out_ref.at[1], receive_tile(mail, columns, dtype))
            send_tile(mail, load(x_ref.at[1]))
            sent.arrive(1)

    return Case(
        body,
        (x,),
        (x[::-1],),
        warpgroups=2,
        scratch=dict(mail=plgpu.SMEM(mail_shape(columns, dtype), jnp.int32)),
        barriers=dict(sent=NamedBarriers(first=3, count=2, arrivers=1)),
    )
