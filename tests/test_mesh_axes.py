"""Every public function with batch and heads on mesh axes, Explicit or Auto, in set_mesh or not."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tests.support import public_calls
from tests.support.public_calls import CALLS, PublicCall
from tests.support.sharded import collectives, mesh_of, put

AXIS_TYPES = (AxisType.Explicit, AxisType.Auto)

# Mesh axes of the letters of `public_calls.Operand`.
BATCH_AND_HEADS = {"b": "x", "n": "y", "k": "y"}
# Two of four devices share a key head: their gradients of it are added up.
SHARED_KEYS = {"n": ("x", "y"), "k": "x"}
REPLICATED_KEYS = {"n": ("x", "y")}

SHARDED = [call for call in CALLS if not call.is_collective]
EVERY_CALL = pytest.mark.parametrize("call", SHARDED, ids=lambda call: call.name)


def of_mesh(mesh, inside: bool):
    return jax.set_mesh(mesh) if inside else contextlib.nullcontext()


def spec_of(axes: str, layout) -> PartitionSpec:
    return PartitionSpec(*map(layout.get, axes))


def placed(call: PublicCall, mesh, layout, dtype) -> dict[str, jax.Array]:
    arrays = call.arrays(dtype)
    pairs = ((x, spec_of(call.operands[name].axes, layout)) for name, x in arrays.items())
    return dict(zip(arrays, put(mesh, *pairs), strict=True))


def results_and_gradients(call: PublicCall, implementation: str):
    """A function of arrays: what the call gives, and gradients, or none."""
    forward = call.forward(implementation)

    def run(arrays):
        own = {name: arrays[name] for name in call.differentiated}
        if not own:
            return forward(arrays), own
        out, vjp = jax.vjp(lambda own: forward(arrays | own), own)
        return out, *vjp(jax.tree.map(lambda x: jnp.cos(x).astype(x.dtype), out))

    return run


@functools.cache
def unsharded(name: str):
    (call,) = (call for call in CALLS if call.name == name)
    return jax.device_get(jax.jit(results_and_gradients(call, "xla"))(call.arrays(jnp.float32)))


def assert_sharded_as(x: jax.Array, mesh, spec: PartitionSpec):
    assert x.sharding.is_equivalent_to(NamedSharding(mesh, spec), x.ndim), x.sharding


def assert_nothing_is_gathered(call: PublicCall, results, gradients, mesh, layout):
    """All that the calls give has the axes of queries, but for pages, which are of no sequence."""
    for x in jax.tree.leaves(results):
        axes = ("b" if x.shape[0] == public_calls.B else ".") + ".n."
        assert_sharded_as(x, mesh, spec_of(axes[: x.ndim], layout))
    for name, x in gradients.items():
        assert_sharded_as(x, mesh, spec_of(call.operands[name].axes, layout))


@EVERY_CALL
@pytest.mark.parametrize("inside", [True, False], ids=["in set_mesh", "outside"])
@pytest.mark.parametrize("axis_type", AXIS_TYPES, ids=str)
def test_on_xla(call, axis_type, inside):
    mesh = mesh_of((2, 2), axis_type)
    arrays = placed(call, mesh, BATCH_AND_HEADS, jnp.float32)
    with of_mesh(mesh, inside):
        program = jax.jit(results_and_gradients(call, "xla")).lower(arrays).compile()
    results, gradients = program(arrays)
    tolerance = 0.05 if "fp8" in call.name or "quantized" in call.name else 1e-4
    for actual, expected in zip(
        jax.tree.leaves((results, gradients)), jax.tree.leaves(unsharded(call.name)), strict=True
    ):
        np.testing.assert_allclose(
            np.asarray(actual, np.float32), np.asarray(expected, np.float32), atol=tolerance
        )
    if axis_type == AxisType.Explicit:  # else XLA decides
        assert_nothing_is_gathered(call, results, gradients, mesh, BATCH_AND_HEADS)


@pytest.mark.parametrize("inside", [True, False], ids=["in set_mesh", "outside"])
@pytest.mark.parametrize("axis_type", AXIS_TYPES, ids=str)
@pytest.mark.parametrize(
    "call", [x for x in SHARDED if x.has_implementation and x.on_kernels], ids=lambda x: x.name
)
def test_lowers_for_cuda(call, axis_type, inside):
    mesh = mesh_of((2, 2), axis_type)
    arrays = placed(call, mesh, BATCH_AND_HEADS, jnp.bfloat16)
    with of_mesh(mesh, inside):
        traced = jax.jit(results_and_gradients(call, "mosaic_gpu")).trace(arrays)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text or call.function == "explain"
