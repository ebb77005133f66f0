"""Lengths that are no multiple of 8: nothing of the size of an operand is copied for them."""

import dataclasses
import functools
import math
import re
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from pallas_kernels import defaults, joined
from tests.support import compile as support
from tests.support.cases import long, slow
from tests.support.interpret import interpret_mode
from tests.support.kernel_calls import check, inputs
from tests.support.nonzero import assert_none_is_zero

attention = functools.partial(jax_flash.attention, implementation="mosaic_gpu")

B, N, K = 2, 4, 4  # where heads of a group are dealt out, their gradients are added up
NO_PASS = ("parameter", "custom-call", "tuple", "get-tuple-element", "bitcast", "opt-barrier")


def forward_and_backward(T: int, S: int, H: int, h: int, **options: Any):
    """A function of query, key, value, cotangent and more arrays by name, and their types."""
    more = {name: x for name, x in options.items() if isinstance(x, jax.ShapeDtypeStruct)}
    settings = {name: x for name, x in options.items() if name not in more}

    def run(query, key, value, d_out, more):
        others = {name: x for name, x in more.items() if name != "bias"}
        function = functools.partial(attention, **settings, **others)
        operands = (query, key, value, *([more["bias"]] if "bias" in more else []))
        out, backward = jax.vjp(function, *operands)
        return out, backward(d_out)

    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, h), (B, T, N, h)
    return run, (*(jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in shapes), more)


def passes(text: str, least: int) -> list[str]:
    """Of compiled HLO, what is no kernel and has results of `least` elements and more."""
    found = []
    for dtype, sizes, name in re.findall(r"= \(?(\w+)\[([\d,]*)\]\S* (?:.*\) )?([\w-]+)\(", text):
        if name not in NO_PASS and math.prod(map(int, filter(None, sizes.split(",")))) >= least:
            found.append(f"{name} {dtype}[{sizes}]")
    return found


LENGTHS = jax.ShapeDtypeStruct((B,), jnp.int32)
# As dK and dV of shares of few keys are added up, which is a pass over them.
_DEFAULT = defaults.default(80, 40)
ONE_SHARE = dataclasses.replace(_DEFAULT, backward=dataclasses.replace(_DEFAULT.backward, shares=1))


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("T", "S", "H", "h", "options"),
    [
        slow(197, 197, 64, 64, dict(is_causal=True)),
        long(83, 1013, 128, 128, dict(key_value_seq_lengths=LENGTHS)),
        long(83, 1013, 128, 128, dict(query_seq_lengths=LENGTHS)),
        long(1001, 77, 80, 40, dict(deterministic=True, config=ONE_SHARE)),
        slow(257, 259, 256, 256, dict(local_window_size=(100, 100))),
        slow(333, 333, 96, 96, dict(dropout_rate=0.1, dropout_key=jax.random.key(0))),
    ],
)
def test_nothing_is_copied(T, S, H, h, options):
    text = support.compiled_program(*forward_and_backward(T, S, H, h, **options))
    assert "custom-call" in text
    assert passes(text, min(B * T * N * min(H, h), B * S * K * min(H, h))) == []


@pytest.mark.compiler
def test_a_copy_would_be_found():
    rows = jax.ShapeDtypeStruct((B, 197, N, 64), jnp.bfloat16)
    padded = lambda x: jnp.pad(x, ((0, 0), (0, 3), (0, 0), (0, 0)))
    assert passes(support.compiled_program(padded, (rows,)), B * 197 * N * 64)


@pytest.mark.slow
@pytest.mark.compiler
def test_products_are_those_of_whole_tiles():
    """Though at width 96 each operand stands in three boxes."""

    def products(length):
        reports = support.compile_kernels(*forward_and_backward(length, length, 96, 96))
        return {report.name: report.sass and report.sass.wgmma_shapes for report in reports}

    assert products(1001) == products(1000)


@pytest.mark.long
@pytest.mark.parametrize(
    "bias_dtype",
    [
        pytest.param(jnp.bfloat16, id="bfloat16"),
        pytest.param(jnp.float32, id="float32", marks=pytest.mark.slow),
    ],
)
def test_a_bias_and_its_gradient_are_not_copied(bias_dtype):
    """The gradient of a bias that has a value a pair, in the program before it is compiled."""
    bias = jax.ShapeDtypeStruct((1, N, 197, 203), bias_dtype)
    fn, args = forward_and_backward(197, 203, 64, 64, bias=bias)
    text = jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    for line in text.splitlines():
        if re.search(r"stablehlo\.(pad|slice|concatenate|transpose)\b", line):
            assert "197x203x" not in line and "256x256x" not in line, line


def check_that_neighbours_do_not_count(T, S, H, h, **options):
    """NaN in the batch entries on both sides: what lies behind the last row is the next's first."""
    arrays = [jnp.concatenate([x, x[:1]]) for x in inputs(2, T, S, 2, 1, H, jnp.bfloat16, h=h)[:4]]
    poisoned = [x.at[jnp.array([0, 2])].set(jnp.nan) for x in arrays]

    @jax.jit
    def results(query, key, value, d_out):
        out, vjp = jax.vjp(functools.partial(attention, **options), query, key, value)
        return [x[1] for x in (out, *vjp(d_out))]

    clean, got = results(*arrays), results(*poisoned)
    assert_none_is_zero(clean)
    chex.assert_tree_all_finite(got)
    (out, d_query, *d_keys), (clean_out, clean_d_query, *clean_d_keys) = got, clean
    chex.assert_trees_all_equal((out, d_keys), (clean_out, clean_d_keys))
    chex.assert_trees_all_close(d_query, clean_d_query, atol=2e-2)


@pytest.mark.long
@pytest.mark.parametrize(
    ("T", "S", "H", "h"),
    [(13, 19, 64, 64), slow(67, 70, 128, 80), slow(5, 131, 96, 256)],
)
def test_neighbours_do_not_count(T, S, H, h):
    with interpret_mode():
        check_that_neighbours_do_not_count(T, S, H, h)


@pytest.mark.long
@pytest.mark.parametrize(
    ("T", "S", "H", "h", "options"),
    [
        (13, 9, 96, 96, dict(is_causal=True)),
        (8, 15, 160, 80, dict(deterministic=True)),
        slow(33, 8, 256, 256, dict(is_causal=False)),
    ],
)
def test_odd_lengths(T, S, H, h, options):
    """One length of both, of widths that stand in several boxes."""
    with interpret_mode():
        check(inputs(1, T, S, 2, 1, H, jnp.bfloat16, h=h), **options)


GPU_LENGTHS = [(1, 1), (3, 239), (83, 83), (113, 203), (197, 200), (200, 197), (1023, 1025)]
GPU_LENGTHS += [(77, 64), (64, 77), (129, 128), (128, 1)]  # beside as many rows as a box has
GPU_WIDTHS = [(64, 64), (128, 128), (80, 80), (96, 96), (256, 256), (72, 40), (192, 128), (32, 160)]
GPU_OPTIONS: list[dict[str, Any]] = [
    dict(is_causal=True),
    dict(),
    dict(deterministic=True),
    dict(local_window_size=(50, 20)),
    dict(is_causal=True, deterministic=True),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("T", "S"), GPU_LENGTHS)
@pytest.mark.parametrize(("H", "h"), GPU_WIDTHS)
def test_odd_lengths_on_a_gpu(T, S, H, h):
    case = GPU_LENGTHS.index((T, S)) + GPU_WIDTHS.index((H, h))
    dtype, heads = [jnp.bfloat16, jnp.float16][case % 2], [(4, 2), (3, 3)][case % 2]
    check(inputs(2, T, S, *heads, H, dtype, h=h), **GPU_OPTIONS[case % len(GPU_OPTIONS)])


@pytest.mark.gpu
@pytest.mark.parametrize("options", [dict(), dict(is_causal=True), dict(deterministic=True)])
@pytest.mark.parametrize(("T", "S"), [(13, 19), (197, 203), (1001, 1013)])
@pytest.mark.parametrize(("H", "h"), GPU_WIDTHS)
def test_neighbours_do_not_count_on_a_gpu(T, S, H, h, options):
    check_that_neighbours_do_not_count(T, S, H, h, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("bias_dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize(("T", "S"), [(77, 131), (130, 129), (257, 254)])
def test_the_gradient_of_a_bias_ends_with_it_on_a_gpu(T, S, bias_dtype):
    """Of heads side by side: what one stored too far would be in the next one's rows."""
    query, key, value, d_out, d_lse = inputs(2, T, S, 3, 3, 64, jnp.bfloat16)
    bias = jnp.asarray(np.random.default_rng(1).standard_normal((1, 3, T, S)), bias_dtype)
    for _ in range(3):
        check((query, key, value, d_out, d_lse), bias=bias)


@pytest.mark.gpu
@pytest.mark.parametrize(("H", "h"), GPU_WIDTHS)
def test_repeats_are_bit_equal_on_a_gpu(H, h):
    """Output, dK and dV, with what else is in memory changing around them."""
    query, key, value, d_out, _ = inputs(3, 197, 1013, 4, 2, H, jnp.bfloat16, h=h)

    @jax.jit
    def results(query, key, value, d_out):
        out, vjp = jax.vjp(attention, query, key, value)
        _, d_key, d_value = vjp(d_out)
        return out, d_key, d_value

    first = results(query, key, value, d_out)
    for n in range(200):
        poison = jnp.full((1 + n % 7, 100_003), jnp.nan, jnp.bfloat16)
        got = results(query, key, value, d_out)
        chex.assert_trees_all_equal(got, first)
        del poison


@pytest.mark.long
@pytest.mark.compiler
def test_products_of_boxes_where_jax_is_another(monkeypatch):
    """Slower, but right, where JAX's rule of lowering for wgmma is none that `joined.py` knows."""
    monkeypatch.setattr(joined, "IS_KNOWN", False)
    reports = support.compile_kernels(*forward_and_backward(181, 181, 128, 128))
    assert not any(report.faults() for report in reports)
