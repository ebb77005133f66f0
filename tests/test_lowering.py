"""Kernels lower for a GPU with the jax that is installed, without a GPU or the CUDA plugin.

What Pallas takes differs from one jax to the next; interpret mode takes all of it.
"""

import jax
import pytest

from tests.support.kernel_cases import decode_cases, has_fewer_masks, kernel_cases


def _marks(name: str) -> list:
    # Other widths take the same operations.
    is_one_width = name.startswith(("decode", "H128-", "fp8-H128-", "H256-full-even"))
    return [pytest.mark.slow] * (has_fewer_masks(name) or not is_one_width)


@pytest.mark.parametrize(
    ("fn", "args"),
    [
        pytest.param(fn, args, id=name, marks=_marks(name))
        for name, fn, args in kernel_cases() + decode_cases()
    ],
)
def test_lowers_for_cuda(fn, args):
    lowered = jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()
