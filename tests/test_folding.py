"""mask_mod beside what else hides keys: folded, and on the kernels in interpret mode."""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_flash
from jax_flash import folding
from jax_flash.arguments import checked
from jax_flash.call import Call
from pallas_kernels.programs import Operations
from tests.support.cases import long, slow
from tests.support.elements import random_bias, random_mask
from tests.support.interpret import interpret_mode
from tests.support.kernel_calls import (
    check,
    check_that_rows_alone_do_not_count,
    check_vmap_over_options,
    inputs,
)
from tests.support.sharded import collectives, mesh_of, plain_kernels, put

B, T, S, N, K = 2, 70, 100, 4, 2
attention = functools.partial(jax_flash.attention, implementation="mosaic_gpu")


def dilated(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx) % 3 != 0


def by_head(b, h, q_idx, kv_idx):
    return (q_idx + kv_idx) % (h + b + 2) != 0


def far(b, h, q_idx, kv_idx):
    """Whole blocks of keys, and nothing for one query."""
    return (kv_idx // 64 != 1) & (q_idx != 5)


def ids(seed: int, *shape) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(0, 3, shape), jnp.int32)


IDS = dict(query_segment_ids=ids(0, B, T), key_value_segment_ids=ids(1, B, S))
LENGTHS = dict(
    query_seq_lengths=jnp.array([T, 40]), key_value_seq_lengths=jnp.array([70, S], jnp.int32)
)
WINDOW = dict(is_causal=True, local_window_size=(30, 0))
FAR = jnp.array([2**31 - 1, -(2**31)], jnp.int32)

# What becomes part of the function.
INTO_FUNCTIONS = {
    "lengths": LENGTHS,
    "lengths, causal": LENGTHS | dict(is_causal=True, query_offset=20),
    "no keys": dict(key_value_seq_lengths=jnp.array([0, S + 9])),
    "offset": dict(query_offset=jnp.array([40, -20])) | WINDOW,
    "far offset": dict(query_offset=FAR, is_causal=True),
    "far window": dict(query_offset=FAR, local_window_size=(2**31 - 1, 9)),
    "ids": IDS,
    "keys": dict(mask=random_mask((B, 1, 1, S))),
    "keys of all": dict(mask=random_mask((1, 1, 1, S))),
    "queries of heads": dict(mask=random_mask((1, N, T, 1))),
    "heads": dict(mask=jnp.arange(B * N).reshape(B, N, 1, 1) % 3 > 0),
    "nothing": dict(mask=jnp.zeros((1, 1, 1, 1), bool)),
    "all": LENGTHS | IDS | WINDOW | dict(query_offset=jnp.array([30, -20])),
}
# What a function becomes a mask beside.
INTO_MASKS = {
    "mask": dict(mask=random_mask((1, 1, T, S))),
    "mask of all": dict(mask=random_mask((B, N, T, S))),
    "mask, lengths and ids": LENGTHS | IDS | dict(mask=random_mask((B, 1, T, S))),
    "bias": dict(bias=random_bias((1, N, T, S))),
    "bias of keys": dict(bias=random_bias((1, 1, 1, S)), mask=random_mask((B, 1, T, S))),
    "bias, mask of keys": dict(bias=random_bias((1, 1, T, S)), mask=random_mask((B, 1, 1, S))),
}


def call_of(mask_mod, **options) -> Call:
    query, key, value, *_ = inputs(B, T, S, N, K, 64, jnp.bfloat16)
    bound = inspect.signature(jax_flash.attention).bind(
        query, key, value, mask_mod=mask_mod, **options
    )
    bound.apply_defaults()
    return checked(**bound.arguments)


def shown(call: Call) -> np.ndarray:
    """Which pairs of a call are visible, bool `[B, N, T, S]`."""
    (batch, rows, heads, _), keys = call.query.shape, call.key.shape[1]
    visible = np.ones((batch, heads, rows, keys), bool)
    if (by_arguments := call.visibility.tile(0, rows, 0, keys)) is not None:
        visible = visible & by_arguments
    if call.mask_mod is not None:
        places = np.ix_(call.batch_entries, call.query_heads, np.arange(rows), np.arange(keys))
        visible = visible & call.mask_mod.at(*(jnp.asarray(x, jnp.int32) for x in places))
    return np.asarray(visible)


@pytest.mark.parametrize("function", [dilated, by_head])
@pytest.mark.parametrize("beside", INTO_FUNCTIONS | INTO_MASKS)
def test_what_is_folded_shows_the_same(beside, function):
    call = call_of(function, **(INTO_FUNCTIONS | INTO_MASKS)[beside])
    folded = folding.folded(call)
    see = folded.visibility
    if beside in INTO_FUNCTIONS:
        assert see.are_bounds_static and see.query_segment_ids is None and see.mask is None
        assert Operations(folded.mask_mod.program.steps).unsupported() is None
    else:
        assert folded.mask_mod is None
    visible = shown(call)
    np.testing.assert_array_equal(shown(folded), visible)
    if beside not in ("nothing", "far offset", "far window"):
        assert 0 < visible.mean() < 1


@pytest.mark.parametrize("beside", ["all", "queries of heads", "keys", "mask of all"])
def test_a_part_of_a_call_reads_its_own_entries_and_heads(beside):
    call = call_of(by_head, **(INTO_FUNCTIONS | INTO_MASKS)[beside])
    see = call.visibility
    own = {
        name: x[1:] if x.shape[0] > 1 else x
        for name, x in vars(see).items()
        if isinstance(x, jax.Array)
    }
    if see.mask is not None and see.mask.shape[1] > 1:
        own["mask"] = own["mask"][:, 2:]
    part = dataclasses.replace(
        call,
        query=call.query[1:, :, 2:],
        key=call.key[1:, :, 1:],
        value=call.value[1:, :, 1:],
        visibility=dataclasses.replace(see, **own),
        first_batch_entry=jnp.int32(1),
        first_query_head=2,
    )
    np.testing.assert_array_equal(shown(folding.folded(part)), shown(call)[1:, 2:])


def test_what_stands_alone_stays_as_it_is():
    block_mask = jax_flash.block_mask(dilated, 1, 1, T, S)
    bias = random_bias((1, 1, 1, S))
    alone = [{}, dict(is_causal=True), dict(local_window_size=9, query_offset=7), dict(bias=bias)]
    for options in alone:
        call = call_of(block_mask, **options)
        assert folding.folded(call) is call
    without = call_of(None, **LENGTHS)
    assert folding.folded(without) is without


def test_known_blocks_are_of_the_function_alone():
    call = folding.folded(call_of(jax_flash.block_mask(dilated, 1, 1, T, S), **LENGTHS))
    assert call.mask_mod.known is None
    np.testing.assert_array_equal(shown(call), shown(call_of(dilated, **LENGTHS)))


def test_equal_calls_are_one_program():
    """And divisions stay those that kernels know."""
    ours, others = (
        folding.folded(call_of(dilated, key_value_seq_lengths=jnp.array(x))).mask_mod.program
        for x in ([3, 4], [7, 9])
    )
    assert ours == others
    names = [x.equation.primitive.name for x in Operations(ours.steps).operations if not x.instead]
    assert names == ["sub", "ne", "lt", "and"]


def test_explained_without_arrays():
    """Nothing as large as a mask of pairs is made to say what runs."""
    length = 1 << 20
    x = jax.ShapeDtypeStruct((1, length, 4, 128), jnp.bfloat16)
    lengths = jax.ShapeDtypeStruct((1,), jnp.int32)
    bias = jax.ShapeDtypeStruct((1, 1, length, length), jnp.bfloat16)
    explain = functools.partial(jax_flash.explain, x, x, x, implementation="mosaic_gpu")
    for beside in (dict(key_value_seq_lengths=lengths), dict(bias=bias)):
        assert explain(mask_mod=dilated, **beside).implementation == "mosaic_gpu"


def test_64_bits_beside():
    with jax.enable_x64(True):
        near = lambda b, h, q_idx, kv_idx: abs(q_idx - kv_idx) < 30
        call = call_of(near, **INTO_FUNCTIONS["all"])
        folded = folding.folded(call)
        assert Operations(folded.mask_mod.program.steps).unsupported() is None
        np.testing.assert_array_equal(shown(folded), shown(call))


# --- on the kernels -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("N", "K", "H", "function", "options"),
    [
        slow(2, 1, 64, dilated, LENGTHS),
        slow(2, 1, 128, dilated, dict(query_offset=jnp.array([40, -20])) | WINDOW),
        slow(1, 1, 64, far, IDS),
        slow(2, 2, 64, by_head, dict(mask=random_mask((B, 1, 1, S)))),
        long(2, 1, 64, by_head, LENGTHS | IDS | WINDOW | dict(query_offset=jnp.array([30, -20]))),
        slow(2, 1, 128, by_head, dict(mask=random_mask((1, 1, T, S)))),
        slow(2, 1, 64, far, dict(bias=random_bias((1, 2, T, S)), mask=random_mask((B, 1, 1, S)))),
        slow(2, 1, 256, far, LENGTHS | dict(bias=random_bias((1, 1, T, S)))),
        slow(2, 1, 64, dilated, LENGTHS | dict(logits_soft_cap=2.0, dropout_rate=0.25)),
        slow(2, 1, 64, dilated, dict(mask=random_mask((1, 2, T, S)), deterministic=True)),
        slow(1, 1, 64, dilated, LENGTHS | dict(score_mod=lambda s, b, h, q, k: s - 0.01 * (q - k))),
    ],
)
def test_in_interpret_mode(N, K, H, function, options):
    with interpret_mode():
        check(inputs(B, T, S, N, K, H, jnp.bfloat16), mask_mod=function, **options)


def test_what_lengths_hide_may_be_nan():
    """Beside a function that hides one query and a block of keys."""
    lengths = dict(query_seq_lengths=[T, 40], key_value_seq_lengths=[64, S])
    no_query = (np.arange(T) >= np.array([[T], [40]])) | (np.arange(T) == 5)
    no_key = np.arange(S) >= np.array([[64], [64]])
    run = functools.partial(
        attention,
        mask_mod=far,
        return_residual=True,
        **{name: jnp.array(x) for name, x in lengths.items()},
    )
    arrays = inputs(B, T, S, 2, 1, 64, jnp.bfloat16)
    check_that_rows_alone_do_not_count(run, arrays, no_query, no_key, jnp.nan)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        long("key_value_seq_lengths", jnp.array([[9], [30]])),
        slow("mask", random_mask((2, 1, 1, 1, 48))),
    ],
)
def test_vmap(name, values):
    losses = check_vmap_over_options(
        functools.partial(attention, mask_mod=dilated), **{name: values}
    )
    assert len(np.unique(losses)) == len(values)


# --- on several devices ---------------------------------------------------------------------------


def sharded_call(seed: int, batch: int):
    """Query, key and value; and lengths, ids and a mask, sharded like these."""
    shapes = (batch, T, 4, 8), (batch, S, 2, 8), (batch, S, 2, 8)
    arrays = [jax.random.normal(jax.random.key(i), x, jnp.bfloat16) for i, x in enumerate(shapes)]
    beside = {
        "key_value_seq_lengths": jnp.array([S, 70, 0, 35]),
        "query_segment_ids": ids(seed, batch, T),
        "key_value_segment_ids": ids(seed + 1, batch, S),
        "mask": random_mask((batch, 4, T, 1)),
    }
    return arrays, beside


def with_gradients(implementation, arrays, beside):
    def of_arrays(*arrays):
        options = beside | dict(mask_mod=by_head, implementation=implementation)
        return jax_flash.attention(*arrays, **options)

    out, vjp = jax.vjp(of_arrays, *arrays)
    return out, *vjp(jnp.cos(out))


def assert_close(results, exact):
    for actual, expected in zip(results, exact, strict=True):
        actual = actual.astype(jnp.float32)
        np.testing.assert_allclose(actual, expected, atol=0.02 * np.abs(expected).max())


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_each_device_reads_its_own_entries_and_heads(axis_type, caplog):
    """Of a function of both, beside lengths, ids and a mask that are sharded like the query."""
    mesh = mesh_of((2, 2), axis_type)
    arrays, beside = sharded_call(2, batch=4)
    heads, own = P("x", None, "y"), {name: P("x") for name in beside} | {"mask": P("x", "y")}
    sharded = put(mesh, *((x, heads) for x in arrays))
    others = put(mesh, *((x, own[name]) for name, x in beside.items()))
    others = dict(zip(beside, others, strict=True))
    run = functools.partial(with_gradients, "mosaic_gpu")
    with plain_kernels(), jax.set_mesh(mesh):
        program = jax.jit(run).lower(sharded, others).compile()
    assert not caplog.records  # of gathered operands
    if axis_type == AxisType.Explicit:
        assert collectives(program) == {}
    exact = with_gradients("xla", [x.astype(jnp.float32) for x in arrays], beside)
    assert_close(program(sharded, others), exact)


def test_inside_shard_map():
    """There a function counts the entries of a device."""
    arrays, beside = sharded_call(2, batch=4)

    def run(implementation, arrays):
        local = functools.partial(with_gradients, implementation)
        return jax.jit(
            jax.shard_map(local, mesh=mesh_of((2,)), in_specs=(P("x"), P("x")), out_specs=P("x"))
        )(arrays, beside)

    with plain_kernels():
        results = run("mosaic_gpu", arrays)
    assert_close(results, run("xla", [x.astype(jnp.float32) for x in arrays]))


@pytest.mark.parametrize("beside", ["mask", "bias", "lengths"])
def test_lowers_where_captured_arrays_are_sharded(beside):
    """By batch entries: no operation on whole arrays could bring them together with others."""
    mesh = mesh_of((2,), AxisType.Explicit)

    def shape(spec, dtype, *sizes):
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, spec))

    option, given = {
        "mask": ("mask", shape(P(), jnp.bool_, 1, 1, T, S)),
        "bias": ("bias", shape(P(), jnp.bfloat16, 1, 1, T, S)),
        "lengths": ("key_value_seq_lengths", shape(P("x"), jnp.int32, B)),
    }[beside]

    def run(captured, query, key, given):
        function = lambda b, h, q_idx, kv_idx: captured[b] + q_idx >= kv_idx
        return attention(query, key, key, mask_mod=function, **{option: given})

    query, key = (shape(P("x"), jnp.bfloat16, B, *x, 64) for x in ((T, N), (S, K)))
    with jax.set_mesh(mesh):
        traced = jax.jit(run).trace(shape(P("x"), jnp.int32, B), query, key, given)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text or "CustomSPMDPartitioning" in text


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((0, 4, 4), dict(key_value_seq_lengths=jnp.zeros(0, jnp.int32))),
        ((1, 0, 4), dict(is_causal=True, query_offset=jnp.array([1]))),
        ((1, 4, 0), dict(mask=jnp.ones((1, 1, 1, 0), bool))),
        (
            (1, 4, 0),
            dict(
                query_segment_ids=jnp.zeros((1, 4), jnp.int32),
                key_value_segment_ids=jnp.zeros((1, 0), jnp.int32),
            ),
        ),
    ],
)
def test_of_nothing(sizes, options):
    batch, rows, keys = sizes
    query, key = (jnp.ones((batch, n, 2, 64), jnp.bfloat16) for n in (rows, keys))
    out = attention(query, key, key, mask_mod=dilated, **options)
    np.testing.assert_array_equal(out, jnp.zeros_like(query))
