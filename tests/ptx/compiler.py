import numpy as np
from jax import lax

from pallas_kernels.ptx.compiler import (
    code_fence,
    fresh_rows,
    fresh_zero,
    own_warpgroup,
)
from tests.support.ptx import (
    MOST,
    Case,
    case,
    show,
    shown,
)


@case(own_warpgroup, fresh_zero, fresh_rows, code_fence)
def made_anew():
    def body(counts_ref, out_ref):
        warpgroup = lax.axis_index("warpgroup")
        show(out_ref.at[warpgroup, 0], own_warpgroup(), "scalar")
        code_fence(counts_ref[0])
        show(out_ref.at[warpgroup, 1], fresh_zero(), "scalar")
        code_fence(counts_ref[1])
        show(out_ref.at[warpgroup, 2], fresh_rows(), "rows")

    zero, row = shown(np.int32(0), "scalar"), shown(np.arange(64, dtype=np.int32), "rows")
    expected = np.stack([[zero + number, zero, row] for number in range(3)])
    return Case(body, (np.array([0, MOST], np.int32),), (expected,), warpgroups=3)
