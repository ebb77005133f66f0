"""Several batch axes, and segment ids of packed documents."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from tests.support.interpret import interpret_mode

AXES, T, S, N, K, H = (2, 3), 20, 24, 4, 2, 8
attention = functools.partial(jax_flash.attention, implementation="xla")


def operands(axes=AXES, dtype=jnp.float32, h=H):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (*axes, T, N, H), (*axes, S, K, H), (*axes, S, K, h)
    return [jax.random.normal(key, x, dtype) for key, x in zip(keys, shapes, strict=True)]


def flat(x, axes=AXES):
    return x.reshape(-1, *x.shape[len(axes) :])


COUNTS = np.arange(6).reshape(AXES)
BY_ENTRY = {
    "none": {},
    "lengths": dict(query_seq_lengths=COUNTS * 3, key_value_seq_lengths=COUNTS + 10),
    "offsets": dict(is_causal=True, query_offset=COUNTS - 2),
    "an offset of all": dict(is_causal=True, query_offset=4),
    "ids": dict(
        query_segment_ids=(np.arange(T) + COUNTS[..., None]) // 9,
        key_value_segment_ids=(np.arange(S) + COUNTS[..., None]) // 7,
    ),
    "dropout": dict(dropout_rate=0.5, dropout_key=jax.random.key(1)),
    "sinks": dict(sinks=jnp.arange(N) / 4),
}


@pytest.mark.parametrize("kind", BY_ENTRY)
@pytest.mark.parametrize("axes", [AXES, (1, 2, 3), (6, 1)], ids=str)
def test_several_axes_are_as_one(axes, kind):
    """Output, LSE and gradients; dropout differs between all entries."""
    arrays = operands(axes, h=16)
    own = {
        name: x.reshape(*axes, *x.shape[2:]) if np.shape(x)[:2] == AXES else x
        for name, x in BY_ENTRY[kind].items()
    }
    of_one = {
        name: x.reshape(6, *x.shape[2:]) if np.shape(x)[:2] == AXES else x
        for name, x in BY_ENTRY[kind].items()
    }

    def run(options, *arrays):
        call = functools.partial(attention, **options, return_residual=True)
        (out, lse), vjp = jax.vjp(call, *arrays)
        return out, lse, *vjp((jnp.cos(out), jnp.where(lse > -jnp.inf, lse, 0.0)))

    results = run(own, *arrays)
    expected = run(of_one, *(flat(x, axes) for x in arrays))
    assert results[0].shape == (*axes, T, N, 16)
    chex.assert_trees_all_equal([flat(x, axes) for x in results], list(expected))


@pytest.mark.parametrize(
    "shape",
    [(S,), (N, T, S), (1, 1, 1, S), (3, 1, T, S), (1, 3, N, 1, S), (2, 1, 1, T, 1)],
    ids=str,
)
def test_a_bias_and_a_mask_broadcast_to_all_axes(shape):
    arrays = operands()
    bias = jax.random.normal(jax.random.key(2), shape)
    whole = jnp.broadcast_to(bias, (*AXES, N, T, S))
    for options, of_one in (
        (dict(bias=bias), dict(bias=flat(whole))),
        (dict(mask=bias > 0), dict(mask=flat(whole) > 0)),
    ):
        expected = attention(*map(flat, arrays), **of_one)
        chex.assert_trees_all_close(flat(attention(*arrays, **options)), expected, atol=1e-6)


def test_the_gradient_of_a_bias_has_its_shape():
    arrays, bias = operands(), jnp.zeros((3, N, 1, S))
    gradient = jax.grad(lambda x: (attention(*arrays, bias=x) ** 2).sum())(bias)
    whole = jnp.zeros((*AXES, N, T, S))
    expected = jax.grad(lambda x: (attention(*arrays, bias=x) ** 2).sum())(whole)
    chex.assert_trees_all_close(gradient, expected.sum((0, 3), keepdims=True)[0], atol=1e-5)


def test_on_the_kernels():
    arrays = operands(dtype=jnp.bfloat16)
    with interpret_mode():
        out = jax_flash.attention(*arrays, is_causal=True, implementation="mosaic_gpu")
    chex.assert_trees_all_close(
        out.astype(jnp.float32),
        attention(*(x.astype(jnp.float32) for x in arrays), is_causal=True),
        atol=0.03,
    )


def test_in_fp8():
    arrays = operands(h=H)
    run = functools.partial(jax_flash.attention_fp8, return_residual=True, implementation="xla")
    out, lse = run(*arrays)
    expected = run(*map(flat, arrays))
    chex.assert_trees_all_equal([flat(out), flat(lse)], list(expected))


def test_under_vmap_jit_and_explain():
    arrays = operands((2, 2, 3))
    out = jax.jit(jax.vmap(attention))(*arrays)
    expected = attention(*(flat(x, (2, 2, 3)) for x in arrays))
    chex.assert_trees_all_close(out.reshape(expected.shape), expected, atol=1e-6)
    assert jax_flash.explain(*arrays, implementation="xla").implementation == "xla"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            dict(key=np.zeros((6, S, K, H), np.float32)),
            r"key: got .*the batch axes of query, \(2, 3\)",
        ),
        (
            dict(value=np.zeros((3, 2, S, K, H), np.float32)),
            r"value: got .*the batch axes of query",
        ),
        (dict(query_seq_lengths=np.zeros(6, np.int32)), r"query_seq_lengths: got .*\(2, 3\)"),
        (dict(query_segment_ids=np.zeros((6, T), np.int32)), r"query_segment_ids: got .*a length"),
        (dict(bias=np.zeros((4, 1, 1, S), np.float32)), r"bias: got .*batch axes \(2, 3\)"),
        (dict(mask=np.ones((2, 2, 3, 1, 1, S), bool)), r"mask: got .*batch axes \(2, 3\)"),
    ],
)
def test_what_does_not_fit_is_named(change, message):
    arrays = dict(zip(("query", "key", "value"), operands(), strict=True))
    ids = dict(key_value_segment_ids=jnp.zeros((*AXES, S), int))
    more = ids if "query_segment_ids" in change else {}
    with pytest.raises(ValueError, match=message):
        attention(**arrays | change | more)


@pytest.mark.parametrize(
    ("starts", "expected"),
    [
        ([0, 3, 5], [1, 1, 1, 2, 2, 3, 3]),
        ([0, 3, 3, 5, 9], [1, 1, 1, 3, 3, 4, 4]),  # an empty one, and an end
        ([5, 2], [0, 0, 1, 1, 1, 2, 2]),
        ([], [0] * 7),
        ([[0, 4], [1, 7]], [[1, 1, 1, 1, 2, 2, 2], [0, 1, 1, 1, 1, 1, 1]]),
    ],
)
def test_segment_ids(starts, expected):
    starts = jnp.array(starts, jnp.int32)
    for run in (jax_flash.segment_ids, jax.jit(jax_flash.segment_ids, static_argnums=1)):
        ids = run(starts, 7)
        assert ids.dtype == jnp.int32
        np.testing.assert_array_equal(ids, expected)


@pytest.mark.parametrize(
    ("starts", "length", "error"),
    [(jnp.array([0.0]), 4, TypeError), (3, 4, ValueError), (jnp.array([0]), -1, ValueError)],
)
def test_segment_ids_of_nonsense(starts, length, error):
    with pytest.raises(error, match=r"starts|length"):
        jax_flash.segment_ids(starts, length)


def test_packed_documents_are_attended_to_alone():
    (query, key, value) = operands((1,))
    starts = [0, 7, 15]
    ids = jax_flash.segment_ids(jnp.array([starts]), S)
    options = dict(query_segment_ids=ids[:, :T], key_value_segment_ids=ids)
    out = attention(query, key, value, **options)
    for first, end in zip(starts, [*starts[1:], S], strict=True):
        alone = attention(query[:, first:end], key[:, first:end], value[:, first:end])
        chex.assert_trees_all_close(out[:, first:end], alone, atol=1e-6)
