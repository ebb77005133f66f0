"""Kernels lower for a GPU with the jax that is installed, without a GPU or the CUDA plugin.

What Pallas takes differs from one jax to the next; interpret mode takes all of it.
"""

import jax
import pytest

from tests.support.kernel_cases import decode_cases, has_fewer_masks, kernel_cases

WITH_64_BITS = (
    "H128-full-ragged",
    "H128-causal-segments",
    "H128-lengths-ragged-dropout",
    "H256-lengths-ragged",
    "fp8-H128-causal-ragged-segments",
)


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


@pytest.mark.parametrize(
    ("fn", "args"),
    [pytest.param(fn, args, id=name) for name, fn, args in kernel_cases() if name in WITH_64_BITS],
)
def test_lowers_for_cuda_where_numbers_have_64_bits(fn, args):
    """Numbers of Python and numpy are int64 then, where those of kernels are int32."""
    with jax.enable_x64(True):
        test_lowers_for_cuda(fn, args)
