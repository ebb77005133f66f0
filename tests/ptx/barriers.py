import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.ptx.barriers import (
    BlockVote,
    NamedBarriers,
    commit_smem,
    fence_async_shared,
    warpgroup_any,
)
from tests.support.ptx import LEAST, MOST, Case, case, load, numbers, show


@case(NamedBarriers, fence_async_shared)
def hand_over():
    """Two warpgroups fill two slots in turns, a third has TMA store them."""
    steps, slots = 7, 2
    x = numbers(steps, 2, 128)

    def body(x_ref, out_ref, *, smem, full, free):
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup < 2)
        def _():
            @pl.loop(0, steps)
            def _(step):
                slot = lax.rem(step, jnp.int32(slots))
                pl.when(step >= slots)(lambda: free.wait(2 * slot + warpgroup))
                smem[slot, warpgroup] = x_ref[step, warpgroup]
                fence_async_shared()
                full.arrive(slot)

        @pl.when(warpgroup == 2)
        def _():
            @pl.loop(0, steps)
            def _(step):
                slot = lax.rem(step, jnp.int32(slots))
                full.wait(slot)
                plgpu.copy_smem_to_gmem(smem.at[slot], out_ref.at[step])
                plgpu.wait_smem_to_gmem(0)
                for other in range(2):
                    free.arrive(2 * slot + other, when=step + slots < steps)

    return Case(
        body,
        (x,),
        (x,),
        warpgroups=3,
        scratch=dict(smem=plgpu.SMEM((slots, 2, 128), jnp.float32)),
        barriers=dict(
            full=NamedBarriers(first=4, count=slots, arrivers=2),
            free=NamedBarriers(first=4 + slots, count=2 * slots, arrivers=1),
        ),
    )


def _votes() -> np.ndarray:
    """`(votes, 2, 64)` of two warpgroups."""
    flags = np.zeros((6, 2, 64), np.int32)
    flags[1, 0, 0] = flags[2, 1, 63] = flags[4, 1, 9] = 1
    flags[3] = MOST
    flags[5, 0, 17], flags[5, 0, 18] = -1, LEAST
    return flags


@case(BlockVote)
def block_vote():
    flags = _votes()

    def body(flags_ref, out_ref, *, vote):
        warpgroup = lax.axis_index("warpgroup")
        for n in range(len(flags)):
            is_any = vote.any(load(flags_ref.at[n, warpgroup], "rows"), warpgroup)
            show(out_ref.at[n, warpgroup], is_any.astype(jnp.int32), "scalar")

    expected = flags.any(axis=(1, 2))[:, None, None, None]
    expected = np.broadcast_to(expected, (len(flags), 2, 64, 8)).astype(np.int32)
    return Case(body, (flags,), (expected,), warpgroups=2, barriers=dict(vote=BlockVote(2)))


@case(warpgroup_any)
def vote_of_a_warpgroup():
    flags = _votes()

    def body(flags_ref, out_ref):
        warpgroup = lax.axis_index("warpgroup")
        for n in range(len(flags)):
            is_any = warpgroup_any(load(flags_ref.at[n, warpgroup], "rows"), warpgroup)
            show(out_ref.at[n, warpgroup], is_any.astype(jnp.int32), "scalar")

    expected = flags.any(axis=2)[..., None, None]
    expected = np.broadcast_to(expected, (len(flags), 2, 64, 8)).astype(np.int32)
    return Case(body, (flags,), (expected,), warpgroups=2)


@case(commit_smem, anew=(False, True))
def what_tma_stores_is_there(anew):
    x = numbers(4, 2, 128)

    def body(x_ref, out_ref, *, smem):
        warpgroup = lax.axis_index("warpgroup")
        for n in range(len(x)):
            smem[warpgroup] = x_ref[n, warpgroup]
            commit_smem(anew=anew)
            plgpu.copy_smem_to_gmem(smem.at[warpgroup], out_ref.at[n, warpgroup])
            plgpu.wait_smem_to_gmem(0)
            plgpu.commit_smem()  # all have waited before the next store

    scratch = dict(smem=plgpu.SMEM((2, 128), jnp.float32))
    return Case(body, (x,), (x,), warpgroups=2, scratch=scratch)
