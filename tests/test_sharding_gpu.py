"""Attention over several GPUs, beside the same on one. They need 2 or 4 Hopper GPUs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_flash
from tests.support.sharded import collectives, mesh_of, put

pytestmark = pytest.mark.gpu

B, T, N, K, H = 4, 1024, 16, 8, 128


@pytest.fixture(params=[2, 4])
def mesh(request):
    devices = jax.devices()
    if len(devices) < request.param:
        pytest.skip(f"needs {request.param} GPUs, this machine has {len(devices)}")
    return mesh_of((request.param,), devices=devices)


def operands():
    """Query, key, value and the cotangent of the output."""
    shapes = (B, T, N, H), (B, T, K, H), (B, T, K, H), (B, T, N, H)
    return tuple(
        jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i, shape in enumerate(shapes)
    )


def with_gradients(attention, query, key, value, d_out):
    out, vjp = jax.vjp(attention, query, key, value)
    return out, *vjp(d_out)


def assert_alike(results, expected):
    """In norm, as bf16 results differ in their last bits where sums are in another order."""
    for actual, other in zip(results, expected, strict=True):
        actual, other = (np.asarray(x, np.float32) for x in (actual, other))
        assert np.linalg.norm(actual - other) < 1e-2 * np.linalg.norm(other)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("spec", [P("x"), P(None, None, "x")], ids=str)
def test_sharded_under_jit(mesh, spec, axis_type):
    """Outside of set_mesh."""
    mesh = mesh_of((mesh.size,), axis_type, list(mesh.devices.flat))
    run = functools.partial(jax_flash.attention, is_causal=True, implementation="mosaic_gpu")
    run = jax.jit(functools.partial(with_gradients, run))
    arrays = operands()
    sharded = put(mesh, *((x, spec) for x in arrays))
    assert collectives(run.lower(*sharded).compile()) == {}
    assert_alike(run(*sharded), run(*arrays))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_shared_key_heads(mesh, axis_type):
    """One key head, which all devices hold: its gradient is added up over them."""
    mesh = mesh_of((mesh.size,), axis_type, list(mesh.devices.flat))
    query, key, value, d_out = operands()
    key, value = key[:, :, :1], value[:, :, :1]
    run = functools.partial(jax_flash.attention, implementation="mosaic_gpu")
    run = jax.jit(functools.partial(with_gradients, run))
    heads = P(None, None, "x")
    sharded = put(mesh, (query, heads), (key, P()), (value, P()), (d_out, heads))
    assert_alike(run(*sharded), run(query, key, value, d_out))


def with_ids(method):
    """The method of arrays, and of segment ids that queries and keys share, or of none."""
    return lambda query, key, value, ids: method(
        query, key, value, query_segment_ids=ids, key_value_segment_ids=ids
    )


@pytest.mark.parametrize(
    ("method", "options", "documents"),
    [
        (jax_flash.ring_attention, dict(is_causal=True), None),
        (jax_flash.ring_attention, dict(is_causal=True, zigzag=True), None),
        (
            jax_flash.ring_attention,
            dict(is_causal=True, zigzag=True, local_window_size=(300, 0)),
            None,
        ),
        (jax_flash.ring_attention, dict(local_window_size=(200, 100)), None),
        (jax_flash.ring_attention, dict(is_causal=True, zigzag=True), 3),
        (jax_flash.ring_attention, {}, 3),
        (jax_flash.ulysses_attention, dict(is_causal=True), None),
        (jax_flash.all_gather_attention, dict(is_causal=True), None),
    ],
)
def test_sharded_sequence(mesh, method, options, documents):
    """Packed documents end inside what a device holds."""
    ids = None
    if documents is not None:
        ids = jnp.broadcast_to(jnp.arange(T) * documents // T, (B, T))
    spec = P(None, "x")
    local = functools.partial(method, axis_name="x", implementation="mosaic_gpu", **options)
    shards = jax.shard_map(with_ids(local), mesh=mesh, in_specs=spec, out_specs=spec)
    mask = {name: option for name, option in options.items() if name != "zigzag"}
    whole = functools.partial(jax_flash.attention, implementation="mosaic_gpu", **mask)
    arrays = operands()
    order = back = lambda x: x
    if "zigzag" in options:
        order = functools.partial(jax_flash.to_zigzag, devices=mesh.size)
        back = functools.partial(jax_flash.from_zigzag, devices=mesh.size)
    own_ids = jax.tree.map(order, ids)
    attend = functools.partial(with_gradients, lambda *x: shards(*x, own_ids))
    attend_whole = functools.partial(with_gradients, lambda *x: with_ids(whole)(*x, ids))
    sharded = put(mesh, *((order(x), spec) for x in arrays))
    results = jax.jit(attend)(*sharded)
    expected = jax.jit(attend_whole)(*arrays)
    assert_alike([back(jax.device_get(x)) for x in results], expected)


def test_decode(mesh):
    query, key, value, _ = operands()
    lengths = jnp.array([T, 3, 700, 256])
    run = jax.jit(functools.partial(jax_flash.decode_attention, implementation="mosaic_gpu"))
    heads = P(None, None, "x")
    arrays = query[:, :1], key, value, lengths
    sharded = put(mesh, *zip(arrays, (heads, heads, heads, P()), strict=True))
    assert collectives(run.lower(*sharded).compile()) == {}
    assert_alike([run(*sharded)], [run(*arrays)])
