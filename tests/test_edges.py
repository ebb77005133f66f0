"""Sizes of 0 or unknown, integers of 64 bits and at the ends of int32, and infinite sinks."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import jax_flash
from jax_flash import xla
from tests import oracle

N, K, H = 4, 2, 64
DTYPE = jnp.bfloat16


def draw(B, T, S, dtype=jnp.float32, width=16):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (B, T, N, width), (B, S, K, width), (B, S, K, width)
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]


def quantized(query, key, value, **options):
    return jax_flash.attention(*jax_flash.quantize_fp8(query, key, value), **options)


# --- sizes of 0 ----------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", [None, "xla", "mosaic_gpu"])
@pytest.mark.parametrize("function", [jax_flash.attention, jax_flash.attention_fp8, quantized])
@pytest.mark.parametrize("shape", [(0, 5, 7), (2, 0, 7), (2, 5, 0)], ids=["B", "T", "S"])
def test_empty_axes(function, shape, implementation):
    arrays = draw(*shape, DTYPE)
    run = functools.partial(function, is_causal=True, implementation=implementation)
    out, lse = run(*arrays, return_residual=True)
    assert (out.shape, out.dtype) == (arrays[0].shape, DTYPE)
    assert lse.shape == arrays[0].shape[:3]
    assert not out.any() and jnp.isneginf(lse).all()
    if function is quantized:
        return
    gradients = jax.grad(lambda *x: run(*x).astype(jnp.float32).sum(), argnums=(0, 1, 2))(*arrays)
    chex.assert_trees_all_equal(gradients, tuple(map(jnp.zeros_like, arrays)))


@pytest.mark.parametrize("implementation", [None, "xla", "mosaic_gpu"])
@pytest.mark.parametrize(("B", "T", "S"), [(0, 1, 16), (2, 0, 16), (2, 1, 0)])
def test_empty_axes_in_decoding(B, T, S, implementation):
    query, cache, _ = draw(B, T, S, DTYPE, H)
    lengths = jnp.zeros(B, jnp.int32)
    out = jax_flash.decode_attention(query, cache, cache, lengths, implementation=implementation)
    chex.assert_trees_all_equal(out, jnp.zeros_like(query))
    new = jnp.ones((B, T, K, H), DTYPE)
    chex.assert_trees_all_equal(
        jax_flash.update_cache(cache, cache, new, new, lengths + 1)[0].shape, cache.shape
    )


@pytest.mark.parametrize("implementation", ["xla", "mosaic_gpu"])
def test_mapped_zero_times(implementation):
    arrays = [jnp.zeros((0, *x.shape), x.dtype) for x in draw(2, 16, 24, DTYPE, H)]
    run = functools.partial(jax_flash.attention, is_causal=True, implementation=implementation)
    out, vjp = jax.vjp(jax.vmap(run), *arrays)
    assert out.shape == arrays[0].shape
    chex.assert_trees_all_equal(vjp(out), tuple(arrays))
    one = jax.vmap(run, in_axes=(0, None, None))(
        arrays[0], *(x for x in draw(2, 16, 24, DTYPE, H)[1:])
    )
    assert one.shape == out.shape
    fp8 = functools.partial(quantized, implementation=implementation)
    assert jax.vmap(fp8)(*arrays).shape == out.shape


@pytest.mark.parametrize("implementation", ["xla", "mosaic_gpu"])
def test_decoding_mapped_zero_times(implementation):
    query, cache, _ = (jnp.zeros((0, *x.shape), x.dtype) for x in draw(2, 1, 16, DTYPE, H))
    run = functools.partial(jax_flash.decode_attention, implementation=implementation)
    assert jax.vmap(run)(query, cache, cache, jnp.zeros((0, 2), int)).shape == query.shape


# --- sizes that are not known --------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, dict(is_causal=True), dict(local_window_size=(3, 2), query_offset=2)],
    ids=["full", "causal", "window"],
)
def test_export_with_symbolic_sizes(options):
    B, T, S = export.symbolic_shape("b, t, s")
    shapes = (B, T, N, 16), (B, S, K, 16), (B, S, K, 16), (B,)
    dtypes = *[jnp.float32] * 3, jnp.int32
    types = [jax.ShapeDtypeStruct(*x) for x in zip(shapes, dtypes, strict=True)]

    def run(query, key, value, lengths):
        attend = functools.partial(
            jax_flash.attention, key_value_seq_lengths=lengths, return_residual=True, **options
        )
        results, vjp = jax.vjp(attend, query, key, value)
        return results, vjp(results)

    exported = export.export(jax.jit(run), platforms=["cpu"])(*types)
    args = *draw(3, 5, 7), jnp.array([1, 7, 4], jnp.int32)
    chex.assert_trees_all_close(exported.call(*args), run(*args), rtol=1e-4, atol=1e-4)


def test_export_of_other_functions_with_symbolic_sizes():
    B, S = export.symbolic_shape("b, s")
    query, cache, lengths = (
        jax.ShapeDtypeStruct(*x)
        for x in (((B, 1, N, H), DTYPE), ((B, S, K, H), DTYPE), ((B,), jnp.int32))
    )
    exported = export.export(jax.jit(jax_flash.decode_attention), platforms=["cpu"])
    args = *(draw(2, 1, 24, DTYPE, H)[i] for i in (0, 1, 2)), jnp.array([3, 20], jnp.int32)
    chex.assert_trees_all_close(
        exported(query, cache, cache, lengths).call(*args), jax_flash.decode_attention(*args)
    )
    exported = export.export(jax.jit(jax_flash.attention_fp8), platforms=["cpu"])
    args = args[:3]
    chex.assert_trees_all_close(
        exported(query, cache, cache).call(*args), jax_flash.attention_fp8(*args), rtol=1e-2
    )


def test_export_with_symbolic_widths():
    (H,) = export.symbolic_shape("h")
    shapes = [jax.ShapeDtypeStruct((3, 5, heads, H), jnp.float32) for heads in (N, K, K)]
    exported = export.export(jax.jit(jax_flash.attention), platforms=["cpu"])(*shapes)
    args = draw(3, 5, 5)
    chex.assert_trees_all_close(exported.call(*args), jax_flash.attention(*args), rtol=1e-5)


@pytest.mark.parametrize(
    ("page_size", "width", "message"),
    [("s", "8", "^key_cache: got pages of s"), ("16", "h", "^scale: got None for a symbolic")],
)
def test_decoding_says_what_sizes_it_needs(page_size, width, message):
    B, size, H = export.symbolic_shape(f"b, {page_size}, {width}")
    query, pages = (jax.ShapeDtypeStruct((*x, H), jnp.float32) for x in ((B, 1, N), (9, size, K)))
    lengths, table = (jax.ShapeDtypeStruct(x, jnp.int32) for x in ((B,), (B, 2)))
    decode = lambda *args: jax_flash.decode_attention(*args[:-1], page_table=args[-1])
    with pytest.raises(ValueError, match=message):
        export.export(jax.jit(decode), platforms=["cpu"])(query, pages, pages, lengths, table)


def test_kernels_say_that_they_need_sizes():
    B, T = export.symbolic_shape("b, t")
    query, key = (jax.ShapeDtypeStruct((B, T, heads, H), DTYPE) for heads in (N, K))
    lengths = jax.ShapeDtypeStruct((B,), jnp.int32)
    for function, args in (
        (jax_flash.attention, (query, key, key)),
        (quantized, (query, key, key)),
        (jax_flash.decode_attention, (query, key, key, lengths)),
    ):
        run = functools.partial(function, implementation="mosaic_gpu")
        with pytest.raises(NotImplementedError, match="symbolic sizes"):
            export.export(jax.jit(run), platforms=["cuda"])(*args)


# --- integers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 3, 2**31 - 1, 2**33, (2**31 + 5, 2)])
def test_offsets_at_the_ends_of_int32(window):
    """An array is as good as a number."""
    query, key, value = draw(8, 5, 7)
    offsets = [2**31 - 1, -(2**31), 2**31 - 3, 2**30, -(2**30), 5, 2**29, -(2**29) - 1]
    options = dict(is_causal=True, local_window_size=window)
    found = jax_flash.attention(
        query, key, value, query_offset=jnp.array(offsets), return_residual=True, **options
    )
    right = oracle.attention(query, key, value, query_offset=np.array(offsets), **options)
    chex.assert_trees_all_close(found, right, rtol=1e-4, atol=1e-4)


INTEGERS = {
    "lists": list,
    "numpy int64": lambda x: np.array(x, np.int64),
    "int64": lambda x: jnp.array(x, jnp.int64),
    "uint32": lambda x: jnp.array(x, jnp.uint32),
}


@pytest.mark.parametrize("is_traced", [False, True], ids=["concrete", "traced"])
@pytest.mark.parametrize("kind", INTEGERS)
def test_integers_that_jax_widened_are_taken(kind, is_traced):
    def run(lengths, offset, ids, key_ids):
        return jax_flash.attention(
            *arrays,
            is_causal=True,
            key_value_seq_lengths=lengths,
            query_offset=offset,
            query_segment_ids=ids,
            key_value_segment_ids=key_ids,
        )

    arrays = draw(2, 3, 4)
    integers = [4, 3], [1, 0], [[0, 0, 1], [1, 1, 1]], [[0, 1, 1, 2], [1, 1, 2, 2]]
    right = run(*(jnp.array(x, jnp.int32) for x in integers))
    with jax.enable_x64(True):
        own = [INTEGERS[kind](x) for x in integers]
        if is_traced:
            run = jax.jit(run)
            own = [jnp.asarray(x) for x in own]
        found = run(*own)
    chex.assert_trees_all_close(found, right, rtol=1e-5, atol=1e-5)


def test_traced_lengths_beyond_int32_are_all_keys():
    arrays = draw(2, 3, 4)
    run = lambda x: jax_flash.attention(*arrays, key_value_seq_lengths=x)
    with jax.enable_x64(True):
        found = jax.jit(run)(jnp.array([2**40, -(2**40)]))
    chex.assert_trees_all_close(found, run(jnp.array([4, 0])), rtol=1e-5, atol=1e-5)


def test_a_number_for_a_length():
    with jax.enable_x64(True):
        query, key, value = (x[0] for x in draw(1, 3, 4))
        found = jax_flash.attention(query, key, value, key_value_seq_lengths=3)
        decoded = jax_flash.decode_attention(*draw(2, 1, 4), [3, 4])
    chex.assert_trees_all_close(
        found, jax_flash.attention(query, key[:3], value[:3]), rtol=1e-5, atol=1e-5
    )
    assert decoded.shape == (2, 1, N, 16)


# --- sinks ---------------------------------------------------------------------------------------


def test_an_infinite_sink_takes_all():
    """Output 0, LSE inf, gradients 0; of other heads nothing changes."""
    arrays = draw(2, 5, 7)
    sinks = jnp.array([0.0, jnp.inf, 1.0, -jnp.inf])

    def run(query, key, value, sinks):
        return jax_flash.attention(
            query, key, value, sinks=sinks, key_value_seq_lengths=jnp.array([7, 0]),
            return_residual=True, implementation="xla",
        )  # fmt: skip

    (out, lse), vjp = jax.vjp(run, *arrays, sinks)
    assert jnp.isposinf(lse[0, :, 1]).all() and jnp.isneginf(lse[1]).all()
    d_query, *others, d_sinks = vjp((jnp.ones_like(out), jnp.ones_like(lse)))
    assert not (out[:, :, 1].any() or d_query[:, :, 1].any() or d_sinks[jnp.array([1, 3])].any())
    assert all(jnp.isfinite(x).all() for x in (d_query, *others, d_sinks))
    heads = np.array([0, 2, 3])
    right, right_lse = run(*arrays, sinks.at[1].set(0))
    chex.assert_trees_all_close(out[:, :, heads], right[:, :, heads], rtol=1e-5, atol=1e-5)
    chex.assert_trees_all_close(lse[0][:, heads], right_lse[0][:, heads], rtol=1e-5)


def test_an_infinite_sink_added_afterwards():
    out, lse = jnp.ones((1, 2, 3, 4)), jnp.array([[[1.0, 2.0, -jnp.inf], [1.0, 2.0, 3.0]]])
    sinks = jnp.array([0.5, jnp.inf, jnp.inf])
    (found, found_lse), vjp = jax.vjp(xla.with_sinks, out, lse, sinks)
    assert not found[:, :, 1].any() and jnp.isneginf(found_lse[0, 0, 2])
    assert jnp.isposinf(found_lse[0, :, 1]).all()
    d_out, d_lse, d_sinks = vjp((jnp.ones_like(found), jnp.ones_like(found_lse)))
    assert not (d_out[:, :, 1].any() or d_lse[:, :, 1].any() or d_sinks[1:].any())
    assert all(jnp.isfinite(x).all() for x in (d_out, d_lse, d_sinks))


def test_lengths_that_are_masked_are_refused():
    arrays = draw(2, 5, 7)
    with pytest.raises(TypeError, match="key_value_seq_lengths: got MaskedArray; needs an array"):
        jax_flash.attention(*arrays, key_value_seq_lengths=np.ma.array([1, 2]))


def test_decoding_of_no_key_has_no_nan_on_the_way():
    query, cache, _ = draw(2, 1, 16)
    with jax.disable_jit(), jax.debug_nans(True):
        out, lse = jax_flash.decode_attention(
            query, cache, cache, [3, -2], implementation="xla", return_residual=True
        )
    assert jnp.isfinite(lse[0]).all() and jnp.isneginf(lse[1]).all() and not out[1].any()
