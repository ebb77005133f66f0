import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.ptx import notes
from pallas_kernels.ptx.barriers import warpgroup_any
from tests.support.ptx import Case, case, load, show


@case(notes.smem, notes.clear, notes.note, notes.noted)
def own_notes():
    """Of two warpgroups: what was true in any row so far."""
    flags = np.zeros((4, 2, 64), np.int32)
    flags[1, 0, 5] = flags[2, 0, 63] = flags[3, 1, 0] = 1

    def body(flags_ref, out_ref, *, noted):
        warpgroup = lax.axis_index("warpgroup")
        own = noted.at[warpgroup]
        notes.clear(own)
        for n in range(len(flags)):
            notes.note(own, load(flags_ref.at[n, warpgroup], "rows") > 0)
            is_any = warpgroup_any(notes.noted(own), warpgroup)
            show(out_ref.at[n, warpgroup], is_any.astype(jnp.int32), "scalar")

    expected = np.maximum.accumulate(flags.any(axis=2))[:, :, None, None]
    expected = np.broadcast_to(expected, (len(flags), 2, 64, 8)).astype(np.int32)
    return Case(body, (flags,), (expected,), warpgroups=2, scratch=dict(noted=notes.smem(2)))
