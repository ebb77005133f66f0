"""Operands sharded over batch and heads: every device works on its own, results are the same."""

import contextlib
import functools
import logging
from typing import Any
from unittest import mock

import chex
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_flash
from jax_flash import device, xla
from pallas_kernels import defaults, forward
from pallas_kernels.problem import Problem
from tests.support import compile as support
from tests.support.cases import long, slow
from tests.support.interpret import interpret_mode
from tests.support.pages import sections
from tests.support.sharded import collectives, mesh_of, plain_kernels, put

B, T, S = 8, 16, 24
AXIS_TYPES = (AxisType.Auto, AxisType.Explicit)

# Mesh; mesh axes of batch, query heads and key heads; query heads and key heads.
LAYOUTS = {
    "batch": ((8,), ("x", None, None), (4, 2)),
    "heads": ((8,), (None, "x", "x"), (16, 8)),
    "batch and heads": ((2, 4), ("x", "y", "y"), (8, 4)),
    "heads over two": ((4, 2), (None, ("x", "y"), ("x", "y")), (8, 8)),
}
SHARED_KEYS = {
    "one key head": ((8,), (None, "x", None), (8, 1)),
    "two, replicated": ((8,), (None, "x", None), (16, 2)),
    "six over eight": ((4, 2), (None, ("y", "x"), "y"), (24, 6)),
    "heads of two groups": ((4, 2), (None, "x", None), (12, 6)),
}


def draw(seed, *shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def results_and_gradients(implementation, **options):
    """A function of query, key, value and sinks: output, LSE and the gradients of all four."""

    def run(query, key, value, sinks):
        def attention(query, key, value, sinks):
            return jax_flash.attention(
                query,
                key,
                value,
                sinks=sinks,
                return_residual=True,
                implementation=implementation,
                **options,
            )

        (out, lse), vjp = jax.vjp(attention, query, key, value, sinks)
        return out, lse, *vjp((jnp.cos(out), jnp.sin(lse)))

    return run


def operands(heads, dtype=jnp.float32, width=8):
    N, K = heads
    return (
        draw(0, B, T, N, width, dtype=dtype),
        draw(1, B, S, K, width, dtype=dtype),
        draw(2, B, S, K, width, dtype=dtype),
        draw(3, N),
    )


def placed(mesh, arrays, axes):
    batch, heads, kv_heads = axes
    specs = P(batch, None, heads), P(batch, None, kv_heads), P(batch, None, kv_heads), P(heads)
    return put(mesh, *zip(arrays, specs, strict=True))


def in_mesh(mesh, inside: bool):
    return jax.set_mesh(mesh) if inside else contextlib.nullcontext()


def compiled(mesh, function, arrays, inside=None):
    """A program; made inside of set_mesh, or where its axes are Explicit if that is not said."""
    with in_mesh(mesh, AxisType.Explicit in mesh.axis_types if inside is None else inside):
        return jax.jit(function).lower(*arrays).compile()


INSIDE = pytest.mark.parametrize("inside", [False, True], ids=["outside", "in set_mesh"])


@pytest.mark.long
@pytest.mark.fast_cases(
    "batch-AxisType.Auto-outside",
    "batch-AxisType.Auto-in set_mesh",
    "batch-AxisType.Explicit-in set_mesh",
    "heads-AxisType.Auto-in set_mesh",
    "heads-AxisType.Explicit-in set_mesh",
    "batch and heads-AxisType.Auto-outside",
    "batch and heads-AxisType.Explicit-outside",
    "heads over two-AxisType.Auto-outside",
    "heads over two-AxisType.Explicit-outside",
)
@INSIDE
@pytest.mark.parametrize("axis_type", AXIS_TYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_xla_partitions_by_itself(layout, axis_type, inside):
    shape, axes, heads = layout
    run = results_and_gradients("xla", is_causal=True)
    arrays = operands(heads)
    sharded = placed(mesh_of(shape, axis_type), arrays, axes)
    program = compiled(mesh_of(shape, axis_type), run, sharded, inside)
    assert set(collectives(program)) <= {"all-reduce"}  # of the gradient of sinks
    chex.assert_trees_all_close(program(*sharded), jax.jit(run)(*arrays), atol=1e-4)


OPTIONS: dict[str, dict[str, Any]] = {
    "lengths": dict(is_causal=True, query_offset=S - T, key_value_seq_lengths=np.arange(B) * 3),
    "documents": dict(
        query_segment_ids=np.arange(B * T).reshape(B, T) // 5 % 3,
        key_value_segment_ids=np.arange(B * S).reshape(B, S) // 2 % 3,
        logits_soft_cap=2.0,
    ),
}


@pytest.mark.long
@pytest.mark.fast_cases(
    "batch-lengths-AxisType.Auto-outside",
    "batch-lengths-AxisType.Explicit-in set_mesh",
    "heads-lengths-AxisType.Explicit-in set_mesh",
    "batch and heads-lengths-AxisType.Explicit-outside",
    "heads over two-lengths-AxisType.Explicit-outside",
    "one key head-lengths-AxisType.Explicit-outside",
    "two, replicated-lengths-AxisType.Auto-in set_mesh",
    "six over eight-lengths-AxisType.Auto-in set_mesh",
    "heads of two groups-lengths-AxisType.Auto-in set_mesh",
    "batch and heads-documents-AxisType.Auto-outside",
    "two, replicated-documents-AxisType.Auto-outside",
)
@INSIDE
@pytest.mark.parametrize("axis_type", AXIS_TYPES, ids=str)
@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        *((layout, "lengths") for layout in [*LAYOUTS, *SHARED_KEYS]),
        *((layout, "documents") for layout in ["batch and heads", "two, replicated"]),
    ],
)
def test_kernels_run_on_what_a_device_holds(layout, kind, axis_type, inside):
    options = OPTIONS[kind]
    shape, axes, heads = (LAYOUTS | SHARED_KEYS)[layout]
    arrays = operands(heads, jnp.bfloat16)
    mesh = mesh_of(shape, axis_type)
    sharded = placed(mesh, arrays, axes)
    with plain_kernels():
        run = results_and_gradients("mosaic_gpu", **options)
        program = compiled(mesh, run, sharded, inside)
    # Gradients of sinks, and of keys that several devices hold, are sums.
    assert set(collectives(program)) <= {"all-reduce"}
    results = program(*sharded)
    for x, array in zip(results[2:], sharded, strict=True):
        assert x.sharding.is_equivalent_to(array.sharding, x.ndim)
    exact = jax.jit(results_and_gradients("xla", **options))(
        *(x.astype(jnp.float32) for x in arrays)
    )
    for actual, expected in zip(results, exact, strict=True):
        np.testing.assert_allclose(
            actual.astype(jnp.float32),
            expected,
            atol=0.02 * np.abs(expected[expected > -np.inf]).max(),
        )


@pytest.mark.parametrize("axis_type", AXIS_TYPES, ids=str)
@pytest.mark.parametrize("is_one", [False, True])
def test_segment_ids_are_split_like_the_batch(is_one, axis_type):
    """Be they one array for both sides, so that every query sees a key, or not."""
    mesh = mesh_of((2, 4), axis_type)
    arrays = [draw(i, B, S, heads, 8, dtype=jnp.bfloat16) for i, heads in enumerate((8, 4, 4))]
    query_ids = jnp.arange(B * S).reshape(B, S) // 5 % 3
    ids = (query_ids,) if is_one else (query_ids, jnp.arange(B * S).reshape(B, S) // 9 % 4)

    def run(implementation, query, key, value, *ids):
        def attention(query, key, value):
            return jax_flash.attention(
                query,
                key,
                value,
                query_segment_ids=ids[0],
                key_value_segment_ids=ids[-1],
                implementation=implementation,
            )

        out, vjp = jax.vjp(attention, query, key, value)
        return out, *vjp(jnp.cos(out))

    heads = P("x", None, "y")
    sharded = put(mesh, *((x, heads) for x in arrays), *((x, P("x")) for x in ids))
    with plain_kernels():
        program = compiled(mesh, functools.partial(run, "mosaic_gpu"), sharded)
    assert collectives(program) == {}
    exact = run("xla", *(x.astype(jnp.float32) for x in arrays), *ids)
    for actual, expected in zip(program(*sharded), exact, strict=True):
        np.testing.assert_allclose(
            actual.astype(jnp.float32), expected, atol=0.02 * np.abs(expected).max()
        )


def unlike_by_device(mesh):
    """Query, key and value of which a device's part would have tiles of another size."""
    q = draw(0, B, 130, 16, 64, dtype=jnp.bfloat16)
    rows = lambda x: defaults.for_problem(Problem.of(x, x, x, scale=1.0)).forward.block_q
    assert rows(q) != rows(q[:1])
    return put(mesh, *((x, P("x")) for x in (q, q[::-1], jnp.sin(q))))


@pytest.mark.parametrize("axis_type", AXIS_TYPES, ids=str)
def test_rows_of_an_lse_are_those_of_the_call_as_a_whole(axis_type):
    """They fill tiles, and all devices have to have as many as JAX was told."""
    mesh = mesh_of((8,), axis_type)
    sharded, sinks = unlike_by_device(mesh), jnp.zeros(16)
    with plain_kernels():
        program = compiled(mesh, results_and_gradients("mosaic_gpu"), (*sharded, sinks))
        results = program(*sharded, sinks)
    expected = results_and_gradients("xla")(*(x.astype(jnp.float32) for x in sharded), sinks)
    for x, y in zip(results, expected, strict=True):
        np.testing.assert_allclose(x.astype(jnp.float32), y, atol=0.02 * np.abs(y).max())


def test_settings_are_those_of_all_that_vmap_maps():
    """An example has tiles for an SM each, all of them have far more."""
    x = jax.ShapeDtypeStruct((64, 1, 130, 8, 64), jnp.bfloat16)
    seen = []

    with plain_kernels():
        real = forward.attention

        def attention(*args, config, **options):
            seen.append(config)
            return real(*args, config=config, **options)

        of_one = functools.partial(
            jax_flash.attention, implementation="mosaic_gpu", return_residual=True
        )
        with mock.patch.object(forward, "attention", attention):
            _, lse = jax.eval_shape(jax.vmap(of_one), x, x, x)
    assert lse.shape == (64, 1, 130, 8)
    problem = Problem(64, 130, 130, 8, 8, 64, np.dtype(jnp.bfloat16), 1.0)
    assert seen[0].consumers == 1  # JAX traces an example first
    assert seen[-1] == defaults.for_problem(problem).forward
    assert seen[-1].consumers > 1


def test_branches_under_vmap_have_the_same_residuals():
    """One branch is mapped and the other is not."""
    query, *_ = unlike_by_device(mesh_of((1,)))

    def loss(query, takes):
        attention = functools.partial(jax_flash.attention, implementation="mosaic_gpu")
        of = lambda scale: lambda x: attention(x * scale, x, x).astype(jnp.float32).sum()
        return jax.lax.cond(takes, of(1.0), of(2.0), query)

    with plain_kernels():
        mapped = jax.vmap(jax.jit(jax.grad(loss)), in_axes=(0, None))
        d_query = mapped(query[:, None], jnp.array(True))
        expected = jax.grad(loss)(query, jnp.array(True))
    np.testing.assert_allclose(d_query[:, 0].astype(jnp.float32), expected, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("spec", [P("x"), P(None, "x"), P("x", "y")], ids=str)
def test_vmap_keeps_what_is_sharded(spec):
    """Be it the mapped axis or the batch."""
    mesh = mesh_of((2, 4))
    mapped = jax.vmap(results_and_gradients("mosaic_gpu"), in_axes=(0, 0, 0, None))
    *arrays, sinks = operands((4, 2), jnp.bfloat16)
    more = [jnp.stack([x, x[::-1]]) for x in arrays]
    sharded = put(mesh, *((x, spec) for x in more), (sinks, P()))
    with plain_kernels():
        program = compiled(mesh, mapped, sharded)
        expected = jax.jit(mapped)(*more, sinks)
    assert set(collectives(program)) <= {"all-reduce"}  # of the gradient of sinks
    chex.assert_trees_all_close(
        *(jax.tree.map(lambda x: x.astype(jnp.float32), y) for y in (program(*sharded), expected)),
        atol=0.02,
        rtol=0.02,
    )


def test_shard_map_over_some_axes_alone_is_refused():
    mesh = mesh_of((2, 4))
    run = functools.partial(jax_flash.attention, implementation="mosaic_gpu")
    part = jax.shard_map(run, mesh=mesh, in_specs=P("x"), out_specs=P("x"), axis_names={"x"})
    with pytest.raises(NotImplementedError, match="over x alone, XLA cannot split kernels over y"):
        jax.jit(part)(*operands((4, 2), jnp.bfloat16)[:3])


@pytest.mark.parametrize("logits_bytes", [xla.LOGITS_BYTES, 4 * B * 4 * S * 16])
def test_xla_partitions_with_every_array(monkeypatch, logits_bytes):
    """Also where it goes over the queries in chunks."""
    monkeypatch.setattr(xla, "LOGITS_BYTES", logits_bytes)
    mesh, rows = mesh_of((2, 4)), T * 3
    query, key, value = draw(0, B, rows, 8, 8), draw(1, B, S, 4, 8), draw(2, B, S, 4, 8)
    heads, batch = P("x", None, "y"), P("x")
    specs = {"bias": P("x", "y"), "mask": batch, "sinks": P("y"), "query_seq_lengths": batch}
    specs |= {"query_segment_ids": batch, "key_value_segment_ids": batch}
    options = {
        "bias": draw(3, B, 8, rows, S),
        "mask": draw(4, B, 1, rows, S) < 1,
        "sinks": draw(5, 8),
        "query_seq_lengths": jnp.arange(B) * 5 + 1,
        "query_segment_ids": jnp.arange(B * rows).reshape(B, rows) // 20 % 2,
        "key_value_segment_ids": jnp.arange(B * S).reshape(B, S) // 7 % 2,
    }

    def run(query, key, value, options):
        def attention(query, key, value, bias, sinks):
            return jax_flash.attention(
                query,
                key,
                value,
                **options | {"bias": bias, "sinks": sinks},
                logits_soft_cap=20.0,
                implementation="xla",
            )

        out, vjp = jax.vjp(attention, query, key, value, options["bias"], options["sinks"])
        return out, vjp(jnp.cos(out))

    sharded = put(mesh, (query, heads), (key, heads), (value, heads))
    placed_options = {name: put(mesh, (x, specs[name]))[0] for name, x in options.items()}
    program = compiled(mesh, run, (*sharded, placed_options))
    assert set(collectives(program)) <= {"all-reduce"}  # of the gradient of sinks
    expected = jax.jit(run)(query, key, value, options)
    chex.assert_trees_all_close(program(*sharded, placed_options), expected, atol=1e-4)


def test_heads_that_the_mesh_does_not_divide_are_gathered_and_said_to_be(caplog):
    mesh = mesh_of((8,))
    query = jax.device_put(draw(0, 2, T, 12 * 64), NamedSharding(mesh, P(None, None, "x")))

    def run(x):
        x = x.reshape(2, T, 12, 64).astype(jnp.bfloat16)
        return jax_flash.attention(x, x, x, implementation="mosaic_gpu")

    with plain_kernels(), caplog.at_level(logging.WARNING, "jax_flash"):
        result = jax.jit(run)(query)
    assert "attention gathers an operand" in caplog.text
    chex.assert_shape(result, (2, T, 12, 64))


def test_a_sharded_sequence_is_said_to_be_gathered(caplog):
    mesh = mesh_of((8,))
    arrays = operands((2, 1), jnp.bfloat16)[:3]
    sharded = put(mesh, *((x, P(None, "x")) for x in arrays))
    run = functools.partial(jax_flash.attention, implementation="mosaic_gpu")
    with plain_kernels(), caplog.at_level(logging.WARNING, "jax_flash"):
        result = jax.jit(run)(*sharded)
    assert "whose axis of 24 is sharded over x" in caplog.text
    assert "ring_attention" in caplog.text
    chex.assert_trees_all_close(
        result.astype(jnp.float32),
        jax_flash.attention(*arrays, implementation="xla").astype(jnp.float32),
        atol=0.02,
    )


def test_a_sharded_sequence_of_explicit_type_is_refused():
    mesh = mesh_of((8,), AxisType.Explicit)
    sharded = put(mesh, *((x, P(None, "x")) for x in operands((2, 1), jnp.bfloat16)[:3]))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"axis of 16 is sharded over x.*ring"):
        jax_flash.attention(*sharded, implementation="mosaic_gpu")


def test_axes_of_both_types_are_refused(monkeypatch):
    types = AxisType.Auto, AxisType.Explicit
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=types, devices=jax.devices("cpu")[:8])
    sharded = put(mesh, *((x, P(None, None, "y")) for x in operands((8, 4), jnp.bfloat16)[:3]))
    run = functools.partial(jax_flash.attention, implementation="mosaic_gpu")
    with jax.set_mesh(mesh), pytest.raises(NotImplementedError, match="the Auto ones, x"):
        run(*sharded)
    # Unless asked for, kernels are passed over.
    on_hopper = device.Device("gpu", "NVIDIA H100", (9, 0))
    monkeypatch.setattr(device, "device_of", lambda array: on_hopper)
    with jax.set_mesh(mesh):
        chosen = jax_flash.explain(*sharded)
    assert chosen.implementation == "xla"
    assert "the Auto ones, x" in chosen.reasons["mosaic_gpu"]


@INSIDE
@pytest.mark.parametrize("axis_type", AXIS_TYPES, ids=str)
def test_without_jit(axis_type, inside):
    mesh = mesh_of((2, 4), axis_type)
    arrays = operands((8, 4), jnp.bfloat16)[:3]
    spec = P("x", None, "y")
    sharded = put(mesh, *((x, spec) for x in arrays))
    with in_mesh(mesh, inside), plain_kernels():
        result = jax_flash.attention(*sharded, implementation="mosaic_gpu")
    assert result.sharding.is_equivalent_to(NamedSharding(mesh, spec), 4)
    expected = jax_flash.attention(*arrays, implementation="xla")
    chex.assert_trees_all_close(result.astype(jnp.float32), expected.astype(jnp.float32), atol=0.02)


@pytest.mark.parametrize("implementation", ["mosaic_gpu", "xla"])
def test_inside_shard_map(implementation):
    """Each array varies over its own mesh axes; what does not vary has gradients that are sums."""
    mesh = mesh_of((2, 4))
    arrays = operands((8, 1), jnp.bfloat16)
    specs = P("x", None, "y"), P("x"), P("x"), P("y")

    def attention(query, key, value, sinks):
        return jax_flash.attention(
            query,
            key,
            value,
            sinks=sinks,
            is_causal=True,
            return_residual=True,
            implementation=implementation,
        )

    def run(attention, *arrays):
        (out, lse), vjp = jax.vjp(attention, *arrays)
        return out, lse, *vjp((jnp.cos(out), jnp.sin(lse)))

    sharded = jax.shard_map(
        attention, mesh=mesh, in_specs=specs, out_specs=(P("x", None, "y"),) * 2
    )
    with plain_kernels() if implementation == "mosaic_gpu" else contextlib.nullcontext():
        results = jax.jit(functools.partial(run, sharded))(*arrays)
    exact = jax.jit(results_and_gradients("xla", is_causal=True))(
        *(x.astype(jnp.float32) for x in arrays)
    )
    for actual, expected in zip(results, exact, strict=True):
        np.testing.assert_allclose(
            actual.astype(jnp.float32), expected, atol=0.02 * np.abs(expected).max()
        )


# With lengths enough for dQ of 256 columns to be made in two parts.
IN_PARTS = {"logits_soft_cap": 2.0, "bias": jnp.ones((2, 1, 24))}


@pytest.mark.parametrize(("H", "options"), [(64, {}), slow(128, {}), long(256, IN_PARTS)])
def test_kernels_inside_shard_map_in_interpret_mode(H, options):
    """Types that vary pass through every kernel; a mesh of one device has them too."""
    mesh = mesh_of((1,))
    query, key, value = (
        draw(i, 1, 24, heads, H, dtype=jnp.bfloat16) for i, heads in enumerate((2, 1, 1))
    )
    lengths, sinks = jnp.array([20]), jnp.zeros(2)

    def attention(query, key, value, sinks, lengths, implementation="mosaic_gpu"):
        return jax_flash.attention(
            query,
            key,
            value,
            sinks=sinks,
            key_value_seq_lengths=lengths,
            **options,
            implementation=implementation,
        )

    def gradients(attention):
        def loss(query, key, value, sinks):
            return jnp.sin(attention(query, key, value, sinks, lengths).astype(jnp.float32)).sum()

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(query, key, value, sinks)

    sharded = jax.shard_map(
        attention, mesh=mesh, in_specs=(P("x"), P("x"), P("x"), P(), P("x")), out_specs=P("x")
    )
    with interpret_mode():
        got = gradients(sharded)
    # As without shard_map, which would compile every kernel once more.
    expected = gradients(functools.partial(attention, implementation="xla"))
    for actual, exact in zip(got, expected, strict=True):
        actual, exact = (np.asarray(x, np.float32) for x in (actual, exact))
        np.testing.assert_allclose(actual, exact, atol=0.02 * np.abs(exact).max())


@pytest.mark.parametrize("axis_type", AXIS_TYPES, ids=str)
def test_decode_partitions(axis_type):
    mesh = mesh_of((2, 4), axis_type)
    query, cache = draw(0, 2, 1, 8, 16), draw(1, 2, 32, 4, 16)
    lengths, sinks = jnp.array([20, 7]), draw(2, 8)
    spec = P("x", None, "y")
    arrays = put(
        mesh, (query, spec), (cache, spec), (cache + 1, spec), (lengths, P("x")), (sinks, P("y"))
    )

    def run(query, keys, values, lengths, sinks):
        return jax_flash.decode_attention(
            query, keys, values, lengths, sinks=sinks, implementation="xla"
        )

    program = compiled(mesh, run, arrays)
    assert set(collectives(program)) <= {"all-reduce"}  # the greatest length
    chex.assert_trees_all_close(
        program(*arrays), run(query, cache, cache + 1, lengths, sinks), atol=1e-5
    )


def test_decode_inside_shard_map():
    mesh = mesh_of((2, 4))
    query, cache, lengths = draw(0, 2, 1, 8, 16), draw(1, 2, 32, 4, 16), jnp.array([20, 7])
    run = functools.partial(jax_flash.decode_attention, implementation="xla")
    spec = P("x", None, "y")
    sharded = jax.shard_map(run, mesh=mesh, in_specs=(spec, spec, spec, P("x")), out_specs=spec)
    chex.assert_trees_all_close(
        sharded(query, cache, cache, lengths), run(query, cache, cache, lengths), atol=1e-5
    )


def test_export_with_shardings():
    mesh = mesh_of((2, 4))
    spec = P("x", None, "y")
    arrays = put(mesh, *((x, spec) for x in operands((8, 4))[:3]))
    run = jax.jit(functools.partial(jax_flash.attention, implementation="xla"))
    exported = jax.export.export(run)(*arrays)
    assert exported.nr_devices == 8
    chex.assert_trees_all_close(exported.call(*arrays), run(*arrays), atol=1e-6)


@pytest.mark.parametrize("kind", ["Explicit", "shard_map"])
def test_export_of_kernels_for_gpus(kind):
    mesh = mesh_of((2, 2), AxisType.Explicit if kind == "Explicit" else AxisType.Auto)
    spec = P("x", None, "y")
    run = functools.partial(jax_flash.attention, implementation="mosaic_gpu")
    if kind == "shard_map":
        run = jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec)
    shapes = [
        jax.ShapeDtypeStruct((2, 64, heads, 64), jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for heads in (4, 2, 2)
    ]
    kernels = jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")
    with jax.set_mesh(mesh) if kind == "Explicit" else contextlib.nullcontext():
        exported = jax.export.export(jax.jit(run), platforms=("cuda",), disabled_checks=[kernels])(
            *shapes
        )
    assert exported.nr_devices == 4 and "mosaic_gpu_v2" in exported.mlir_module()


def test_examples_of_the_guide():
    """They run as they stand, with what they take for granted, and give what they say."""
    parallel, context = sections()["Over several devices"]
    names = {"jax": jax, "jnp": jnp, "jax_flash": jax_flash}
    parallel.run(names)
    whole = [np.asarray(x, np.float32) for x in (names["w_qkv"], names["w_out"], names["tokens"])]

    def loss(weights, tokens):
        query, key, value = jnp.einsum("btd,xdnh->xbtnh", tokens, weights[0])
        out = jax_flash.attention(query, key, value, is_causal=True)
        return (jnp.einsum("btnh,nhd->btd", out, weights[1]) ** 2).sum()

    expected = jax.grad(loss)(tuple(whole[:2]), whole[2])
    for actual, right in zip(names["gradients"], expected, strict=True):
        np.testing.assert_allclose(
            np.asarray(actual, np.float32), right, rtol=0, atol=0.02 * np.abs(right).max()
        )

    context.run(names)
    query, key, value = jax.random.normal(jax.random.key(6), (3, 1, 1024, 4, 64), jnp.bfloat16)
    ids = jnp.arange(1024)[None] // 300
    expected = jax_flash.attention(
        query, key, value, is_causal=True, query_segment_ids=ids, key_value_segment_ids=ids
    )
    chex.assert_trees_all_close(names["out"], expected, atol=0.02)


# --- compiled for GPUs ----------------------------------------------------------------------------

# Each device has a batch of 4, so that kernels that were compiled for one layout serve another.
GPU_LAYOUTS = {
    "batch": ((4,), P("x"), P("x"), 16, (2, 1)),
    "heads": ((2,), P(None, None, "x"), P(None, None, "x"), 4, (4, 2)),
    "shared keys": ((4,), P(None, None, "x"), P(), 4, (4, 2)),
}


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("layout", "axis_type"),
    [
        ("heads", AxisType.Explicit),
        ("heads", AxisType.Auto),
        ("shared keys", AxisType.Explicit),
        slow("batch", AxisType.Explicit),
        slow("batch", AxisType.Auto),
        slow("shared keys", AxisType.Auto),
    ],
)
def test_compiled_for_gpus_nothing_is_gathered(layout, axis_type):
    shape, query_spec, key_spec, B, (N, K) = GPU_LAYOUTS[layout]
    mesh = mesh_of(shape, axis_type, support.compile_only_devices(*shape))

    def run(query, key, value, d_out):
        attention = functools.partial(
            jax_flash.attention, is_causal=True, implementation="mosaic_gpu"
        )
        out, vjp = jax.vjp(attention, query, key, value)
        return out, vjp(d_out)

    def shape_of(heads, spec):
        return jax.ShapeDtypeStruct(
            (B, 128, heads, 64), jnp.bfloat16, sharding=NamedSharding(mesh, spec)
        )

    query, key = shape_of(N, query_spec), shape_of(K, key_spec)
    found = collectives(compiled(mesh, run, (query, key, key, query)))
    assert set(found) == ({"all-reduce"} if key_spec != query_spec else set())


@pytest.mark.compiler
@pytest.mark.parametrize("axis_type", AXIS_TYPES, ids=str)
@pytest.mark.parametrize("is_paged", [False, True])
def test_decode_compiled_for_gpus_gathers_nothing(is_paged, axis_type):
    mesh = mesh_of((2, 2), axis_type, support.compile_only_devices(4))
    spec = P("x", None, "y")

    def shape_of(spec, *shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    query, lengths = shape_of(spec, 4, 1, 8, 64), shape_of(P("x"), 4, dtype=jnp.int32)
    cache = shape_of(spec, 4, 128, 2, 64)
    pages = ()
    if is_paged:
        cache = shape_of(P(None, None, "y"), 32, 16, 2, 64)
        pages = (shape_of(P("x"), 4, 8, dtype=jnp.int32),)

    def run(query, cache, lengths, *pages):
        return jax_flash.decode_attention(
            query,
            cache,
            cache,
            lengths,
            page_table=next(iter(pages), None),
            implementation="mosaic_gpu",
        )

    assert collectives(compiled(mesh, run, (query, cache, lengths, *pages))) == {}
