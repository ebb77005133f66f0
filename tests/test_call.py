"""Every field of a call counts everywhere: none that is new can be forgotten in silence."""

import dataclasses
import re
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash import autodiff, cudnn, kernel_fp8, kernel_operands, xla
from jax_flash.call import AXES, Call
from jax_flash.functions import traced
from jax_flash.masks import Visibility
from pallas_kernels import defaults

B, N, T, S, H = 2, 2, 128, 256, 64


def ones(shape, dtype):
    return jnp.asarray(np.ones(shape, dtype))  # nothing to compile for each shape


# Something else than the default for each field; a new field needs a value here.
VISIBILITY: dict[str, Any] = {
    "is_causal": True,
    "window": (100, 20),
    "query_offset": jnp.array([30, 100], jnp.int32),
    "query_seq_lengths": jnp.array([100, 128], jnp.int32),
    "key_value_seq_lengths": jnp.array([90, 200], jnp.int32),
    "query_segment_ids": jnp.asarray([np.arange(T) >= 50] * B, jnp.int32),
    "key_value_segment_ids": jnp.asarray([np.arange(S) >= 70] * B, jnp.int32),
    "mask": jnp.asarray(np.broadcast_to(np.arange(S) % 3 > 0, (B, 1, T, S))),
}
CALL: dict[str, Any] = {
    "query": ones((B, T, N, H), jnp.bfloat16),
    "key": ones((B, S, N, H), jnp.bfloat16),
    "value": ones((B, S, N, H), jnp.bfloat16),
    "visibility": Visibility(**VISIBILITY),
    "scale": 0.1,
    "bias": ones((1, N, T, S), jnp.float32),
    "logits_soft_cap": 30.0,
    "sinks": ones(N, jnp.float32),
    "dropout_rate": 0.25,
    "dropout_key": jnp.array([1, 2], jnp.uint32),
    "return_residual": True,
    "deterministic": True,
    "config": defaults.default(H),
    "first_batch_entry": jnp.int32(3),
    "first_query_head": jnp.int32(5),
}
# Of float8 calls alone.
CALL_FP8: dict[str, Any] = {
    "scales": tuple(ones((B, 1, N), jnp.float32) for _ in range(3)),
    "block_sizes": (128, 128, 128),
    "largest": (22.0, 22.0),
}
FUNCTIONS: dict[str, Any] = {
    "mask_mod": traced("mask_mod", lambda b, h, i, j: jnp.arange(T)[i] >= j),
    "score_mod": traced("score_mod", lambda s, b, h, i, j: s + jnp.ones(N)[h], jnp.float32),
}
PLAIN = Call(CALL["query"], CALL["key"], CALL["value"], Visibility(), 0.1)


def with_field(name: str) -> Call:
    """A plain call with another value in one field, and in what goes with it."""
    if name not in VISIBILITY:
        return dataclasses.replace(PLAIN, **{name: (CALL | CALL_FP8 | FUNCTIONS)[name]})
    needs = {
        "query_offset": ("is_causal", "query_offset"),
        "query_segment_ids": ("query_segment_ids", "key_value_segment_ids"),
        "key_value_segment_ids": ("query_segment_ids", "key_value_segment_ids"),
    }.get(name, (name,))
    visibility = Visibility(**{own: VISIBILITY[own] for own in needs})
    return dataclasses.replace(PLAIN, visibility=visibility)


def test_every_field_has_a_value_here():
    assert set(VISIBILITY) == {field.name for field in dataclasses.fields(Visibility)}
    assert set(CALL | CALL_FP8 | FUNCTIONS) == {field.name for field in dataclasses.fields(Call)}


def test_every_field_of_arrays_has_letters():
    fields = [field for kind in (Call, Visibility) for field in dataclasses.fields(kind)]
    assert set(AXES) == {
        field.name for field in fields if re.search("jax.Array|Function", str(field.type))
    }


@pytest.mark.parametrize("name", VISIBILITY)
def test_kernels_are_told_all_that_hides(name):
    call = with_field(name)
    seen = call.visibility.tile(0, T, 0, S)
    lowest, highest, intervals = kernel_operands.intervals_of(call)
    rows, keys = np.arange(T)[:, None], np.arange(S)
    told = np.ones((B, 1, T, S), bool)
    if lowest is not None:
        told &= rows + lowest <= keys
    if highest is not None:
        told &= keys <= rows + highest
    for lo, hi in (np.moveaxis(np.asarray(x), 1, 0)[:, :, None, :, None] for x in intervals):
        told &= (lo <= keys) & (keys < hi)
    if ids := kernel_operands.segment_ids_of(call):
        told &= (np.asarray(ids[0])[:, :, None] == np.asarray(ids[1])[:, None])[:, None]
    if (mask := kernel_operands.elements_of(call).mask) is not None:
        told &= np.asarray(mask)
    assert not told.all()
    np.testing.assert_array_equal(told, np.broadcast_to(seen, told.shape))


@pytest.mark.parametrize("name", VISIBILITY)
def test_what_is_static_is_known_in_numpy(name):
    see = with_field(name).visibility
    lo, hi = see.row_intervals(T, S)
    assert see.are_bounds_static == (isinstance(lo, np.ndarray) and isinstance(hi, np.ndarray))


@pytest.mark.parametrize("name", [*VISIBILITY, *CALL, *CALL_FP8, *FUNCTIONS])
def test_cudnn_takes_or_refuses_it(name):
    is_even = name in ("query", "key", "value", "visibility", "scale", "config", "is_causal")
    is_even |= name.startswith("first_")  # for dropout, which it refuses
    call = with_field(name) if name != "visibility" else PLAIN
    gpu = mock.Mock(compute_capability=(9, 0))
    with (
        mock.patch.object(cudnn.device, "device_of", lambda _: gpu),
        mock.patch.object(cudnn, "_installation_reason", lambda: None),
    ):
        assert (cudnn.unsupported(call) is None) == is_even


def test_cudnn_refuses_a_field_that_it_does_not_know():
    @dataclasses.dataclass(frozen=True)
    class Newer(Visibility):
        hides: int | None = None

    gpu = mock.Mock(compute_capability=(9, 0))
    call = dataclasses.replace(PLAIN, visibility=Newer(hides=3))
    with mock.patch.object(cudnn.device, "device_of", lambda _: gpu):
        assert cudnn.unsupported(call) == "it has no hides"


@pytest.mark.parametrize("module", [xla, autodiff])
def test_every_array_is_read(module):
    call = Call(**CALL)
    assert set(call.arrays) == {
        name for name, x in (CALL | VISIBILITY).items() if isinstance(x, jax.Array)
    }
    run = lambda arrays: module.attention(call.static.with_arrays(arrays))
    with jax.disable_jit():  # else all are operands of one equation
        jaxpr = jax.make_jaxpr(run)(call.arrays).jaxpr
    read = {id(x) for equation in jaxpr.eqns for x in equation.invars}
    names = sorted(call.arrays)  # as a dict's leaves are
    assert [name for name, x in zip(names, jaxpr.invars, strict=True) if id(x) not in read] == []


@pytest.mark.parametrize("module", [autodiff, kernel_fp8])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_kernels_refuse_functions(name, module):
    assert name in module.unsupported(with_field(name))


def test_is_a_tree_of_its_arrays():
    call = Call(**CALL, **FUNCTIONS)
    leaves, tree = jax.tree.flatten(call)
    assert {id(x) for x in leaves} == {id(x) for x in jax.tree.leaves(call.arrays)}
    again = jax.tree.unflatten(tree, leaves)
    assert hash(tree) == hash(jax.tree.structure(again))
    assert vars(again) | vars(again.visibility) == (
        vars(call) | vars(call.visibility) | {"visibility": again.visibility}
    )


def test_ids_that_are_one_array_stay_one():
    ids = jnp.zeros((B, T), jnp.int32)
    see = Visibility(query_segment_ids=ids, key_value_segment_ids=ids)
    call = dataclasses.replace(PLAIN, key=PLAIN.query, value=PLAIN.query, visibility=see)
    for same in (jax.tree.map(jnp.add, call, call), call.with_arrays(call.arrays)):
        see = same.visibility
        assert see.query_segment_ids is see.key_value_segment_ids
    apart = dataclasses.replace(see, key_value_segment_ids=ids + 0)
    see = jax.tree.map(lambda x: x, dataclasses.replace(call, visibility=apart)).visibility
    assert see.query_segment_ids is not see.key_value_segment_ids
