"""Kernels lower for a GPU with the jax that is installed, without a GPU or the CUDA plugin.

What Pallas takes differs from one jax to the next; interpret mode takes all of it. On a jax that
kernels are compiled for, tests/test_compile.py lowers all of them; on another, `-m "not slow or
lowering"` does.
"""

import jax
import pytest

from tests.support.kernel_cases import decode_cases, kernel_cases

WITH_64_BITS = (
    "H128-full-ragged",
    "H128-causal-segments",
    "H128-lengths-ragged-dropout",
    "H256-lengths-ragged",
    "fp8-H128-causal-ragged-segments",
)


# One of each kernel, with most of the options.
ALWAYS = (
    "H128-causal-ragged",
    "H128-window-ragged-deterministic",
    "H128-lengths-ragged-sinks",
    "H256-full-even",
    "H128-full-mask-bias",
    "H128-lengths-segments-cap-deterministic",
    "H128-h128-causal-bias-segments-dropout",
    "H128-window-tiled-bias-dense-mask-segments-cap-dropout",
    "fp8-H128-lengths-ragged",
    "fp8-H128-causal-ragged-segments",
    "decode-H128-splits",
    "decode-H64-all",
    "decode-H256-float8-all",
)


def _of_each_word(names: list[str]) -> set[str]:
    """So many of them, those of most words first, that each word is in one that is lowered."""
    known = {word for name in ALWAYS for word in name.split("-")}
    chosen = set()
    for name in sorted(names, key=lambda name: -name.count("-")):
        words = set(name.split("-"))
        if not words <= known:
            chosen.add(name)
            known |= words
    return chosen


_CASES = kernel_cases() + decode_cases()
# Other widths take the same operations.
_ONE_WIDTH = ("decode-H128-", "H128-", "fp8-H128-")
_OF_EACH_WORD = _of_each_word([name for name, *_ in _CASES if name.startswith(_ONE_WIDTH)])


def _marks(name: str) -> list:
    is_chosen = name in ALWAYS or name in _OF_EACH_WORD
    return [pytest.mark.slow] + [pytest.mark.lowering] * is_chosen


@pytest.mark.parametrize(
    ("fn", "args"),
    [pytest.param(fn, args, id=name, marks=_marks(name)) for name, fn, args in _CASES],
)
def test_lowers_for_cuda(fn, args):
    lowered = jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


@pytest.mark.long
@pytest.mark.parametrize(
    ("fn", "args"),
    [
        pytest.param(fn, args, id=name, marks=[pytest.mark.slow] * (name == WITH_64_BITS[0]))
        for name, fn, args in kernel_cases()
        if name in WITH_64_BITS
    ],
)
def test_lowers_for_cuda_where_numbers_have_64_bits(fn, args):
    """Numbers of Python and numpy are int64 then, where those of kernels are int32."""
    with jax.enable_x64(True):
        test_lowers_for_cuda(fn, args)
