"""Attention of a sequence that is sharded over devices, beside attention of the whole."""

import contextlib
import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_flash
from jax_flash import ring
from tests.support import compile as support
from tests.support.cases import long, slow
from tests.support.interpret import interpret_mode
from tests.support.sharded import collectives, mesh_of, plain_kernels, put

B, N, K, H = 2, 4, 2, 8


def draw(seed, *shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def operands(T=32, S=32, heads=(N, K), dtype=jnp.float32):
    N, K = heads
    return (
        draw(0, B, T, N, H, dtype=dtype),
        draw(1, B, S, K, H, dtype=dtype),
        draw(2, B, S, K, H, dtype=dtype),
    )


def with_gradients(attention, *arrays):
    """Output and LSE, and the gradients of all arrays; rows that see nothing take no part."""
    (out, lse), vjp = jax.vjp(attention, *arrays)
    return out, lse, *vjp((jnp.cos(out), jnp.where(lse == -jnp.inf, 0, jnp.sin(lse))))


def sharded(method, mesh, *, zigzag=False, ids=None, **options):
    """A function of whole query, key, value (and sinks), positions sharded over axis "x".

    Args:
      method: one of the functions of `ring`.
      mesh: with an axis "y", heads are sharded over it.
      zigzag: arrays are brought into that order, and results back.
      ids: segment ids `[B, T]` of queries and keys.
      **options: of the method.
    """
    heads = "y" if "y" in mesh.axis_names else None
    devices = mesh.shape["x"]
    order = functools.partial(jax_flash.to_zigzag, devices=devices) if zigzag else lambda x: x
    back = functools.partial(jax_flash.from_zigzag, devices=devices) if zigzag else lambda x: x
    if zigzag:
        options["zigzag"] = True

    def local(query, key, value, query_ids, key_ids, sinks):
        own = options
        if sinks is not None:
            own = own | dict(sinks=sinks)
        if query_ids is not None:
            own = own | dict(query_segment_ids=query_ids, key_value_segment_ids=key_ids)
        return method(query, key, value, axis_name="x", return_residual=True, **own)

    def run(query, key, value, sinks=None):
        of_heads, of_rows = P(None, "x", heads), P(None, "x")
        query_ids, key_ids = (None, None) if ids is None else map(order, ids)
        out, lse = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(of_heads, of_heads, of_heads, of_rows, of_rows, P(heads)),
            out_specs=(of_heads, of_heads),
        )(order(query), order(key), order(value), query_ids, key_ids, sinks)
        return back(out), back(lse)

    return run


def whole(*, ids=None, **options):
    own = {} if ids is None else dict(query_segment_ids=ids[0], key_value_segment_ids=ids[1])

    def run(query, key, value, sinks=None):
        return jax_flash.attention(
            query,
            key,
            value,
            sinks=sinks,
            return_residual=True,
            implementation="xla",
            **own,
            **options,
        )

    return run


def packed(T):
    """Documents of 1 to T positions, across the borders of devices."""
    lengths = np.array([[T // 3 + 1, 2], [5, T // 2]])
    ends = np.cumsum(lengths, axis=1)
    return jnp.asarray((np.arange(T)[None, :, None] >= ends[:, None]).sum(-1))


MASKS = {
    "full": {},
    "causal": dict(is_causal=True),
    "causal window": dict(is_causal=True, local_window_size=(5, 0)),
    "window": dict(local_window_size=(6, 3)),
    "soft cap": dict(is_causal=True, logits_soft_cap=2.0),
    "documents": dict(is_causal=True, ids=(packed(32),) * 2),
    "documents in a window": dict(local_window_size=(6, 3), ids=(packed(32),) * 2),
}


@pytest.mark.fast_cases(
    "full-mosaic_gpu-False",
    "causal window-xla-False",
    "causal window-mosaic_gpu-True",
    "documents in a window-xla-True",
)
@pytest.mark.long_cases(
    "causal-xla-True",
    "window-mosaic_gpu-False",
    "soft cap-xla-False",
    "soft cap-mosaic_gpu-True",
    "documents-mosaic_gpu-False",
)
@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.parametrize("implementation", ["xla", "mosaic_gpu"])
@pytest.mark.parametrize("mask", MASKS)
def test_ring(mask, zigzag, implementation):
    mask = MASKS[mask]
    on_kernels = implementation == "mosaic_gpu"
    dtype = jnp.bfloat16 if on_kernels else jnp.float32
    arrays = operands(dtype=dtype)
    run = sharded(
        jax_flash.ring_attention,
        mesh_of((4,)),
        zigzag=zigzag,
        implementation=implementation,
        **mask,
    )
    with plain_kernels() if on_kernels else contextlib.nullcontext():
        results = jax.jit(functools.partial(with_gradients, run))(*arrays)
    exact = with_gradients(whole(**mask), *(x.astype(jnp.float32) for x in arrays))
    for actual, expected in zip(results, exact, strict=True):
        tolerance = 0.03 if on_kernels else 1e-5
        np.testing.assert_allclose(
            actual.astype(jnp.float32), expected, atol=tolerance * np.abs(expected).max()
        )


@pytest.mark.long
def test_ring_on_the_kernels_in_interpret_mode():
    """One device, where zigzag order and a window make it four pairs of parts all the same."""
    arrays = [draw(i, 1, 48, 1, 64, dtype=jnp.bfloat16) for i in range(3)]
    mask = dict(is_causal=True, local_window_size=(30, 0))
    run = sharded(
        jax_flash.ring_attention, mesh_of((1,)), zigzag=True, implementation="mosaic_gpu", **mask
    )
    with interpret_mode():
        results = jax.jit(functools.partial(with_gradients, run))(*arrays)
    exact = with_gradients(whole(**mask), *(x.astype(jnp.float32) for x in arrays))
    for actual, expected in zip(results, exact, strict=True):
        np.testing.assert_allclose(
            actual.astype(jnp.float32), expected, atol=0.03 * np.abs(expected).max()
        )


@pytest.mark.long
@pytest.mark.parametrize(
    ("mask", "width"),
    [
        ("documents", 128),
        pytest.param("full", 64, marks=pytest.mark.slow),
        pytest.param("causal window", 128, marks=pytest.mark.slow),
        pytest.param("soft cap", 64, marks=pytest.mark.slow),
        pytest.param("documents", 64, marks=pytest.mark.slow),
        pytest.param("documents", 256, marks=pytest.mark.slow),
    ],
)
def test_hops_lower_for_cuda(mask, width):
    """Of a hop the LSE is of more keys than its own, and nothing else of its rows is known."""
    mask = MASKS[mask]
    if "ids" in mask:
        mask = mask | dict(ids=(packed(512),) * 2)
    run = sharded(jax_flash.ring_attention, mesh_of((4,)), implementation="mosaic_gpu", **mask)
    arrays = [jax.ShapeDtypeStruct((B, 512, n, width), jnp.bfloat16) for n in (N, K, K)]
    traced = jax.jit(functools.partial(with_gradients, run)).trace(*arrays)
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.long
@pytest.mark.parametrize(
    ("devices", "dtype"),
    [
        (2, jnp.float32),
        slow(2, jnp.bfloat16),
        (4, jnp.bfloat16),
        slow(4, jnp.float32),
        (8, jnp.float32),
        slow(8, jnp.bfloat16),
    ],
)
def test_causal_in_zigzag_order(devices, dtype):
    """Devices before the one that keys are from have another hop than those behind it."""
    arrays = operands(heads=(2, 1), dtype=dtype)
    run = sharded(
        jax_flash.ring_attention,
        mesh_of((devices,)),
        zigzag=True,
        is_causal=True,
        implementation="xla",
    )
    results = jax.jit(functools.partial(with_gradients, run))(*arrays)
    exact = with_gradients(whole(is_causal=True), *(x.astype(jnp.float32) for x in arrays))
    assert [x.dtype for x in results] == [dtype, jnp.float32, dtype, dtype, dtype]
    for actual, expected in zip(results, exact, strict=True):
        tolerance = 0.03 if dtype == jnp.bfloat16 else 1e-5
        np.testing.assert_allclose(
            actual.astype(jnp.float32), expected, atol=tolerance * np.abs(expected).max()
        )


@pytest.mark.long
@pytest.mark.fast_cases("shape0-False", "shape1-False", "shape2-False")
@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.parametrize("shape", [(8,), (2, 4), (4, 2)])
def test_ring_with_documents_and_sinks(shape, zigzag):
    """Also with heads sharded over another axis, of key heads as many or more than devices."""
    arrays = (*operands(heads=(8, 4)), draw(3, 8))
    options = dict(ids=(packed(32),) * 2, is_causal=True)
    run = sharded(
        jax_flash.ring_attention, mesh_of(shape), zigzag=zigzag, implementation="xla", **options
    )
    chex.assert_trees_all_close(
        jax.jit(functools.partial(with_gradients, run))(*arrays),
        with_gradients(whole(**options), *arrays),
        atol=1e-4,
    )


@pytest.mark.parametrize("devices", [long(1), 2])
def test_second_derivatives(devices):
    """As xla has them: what is sent has tangents too."""
    arrays = operands(8, 8, heads=(2, 1))

    def second(attention):
        first = jax.grad(lambda *x: jnp.cos(attention(*x)[0]).sum(), (0, 1, 2))
        return jax.grad(lambda *x: sum(jnp.sin(d).sum() for d in first(*x)), (0, 1, 2))

    run = sharded(jax_flash.ring_attention, mesh_of((devices,)), implementation="xla")
    chex.assert_trees_all_close(
        jax.jit(second(run))(*arrays), second(whole())(*arrays), atol=1e-4, rtol=1e-4
    )


def test_heads_sharded_by_an_axis_that_shard_map_leaves():
    """Explicit, over which nothing is gathered."""
    mesh = mesh_of((2, 2), AxisType.Explicit)
    spec = P(None, "x")
    ring_of = functools.partial(jax_flash.ring_attention, axis_name="x", implementation="xla")
    with jax.set_mesh(mesh):
        attend = jax.shard_map(ring_of, in_specs=spec, out_specs=spec, axis_names={"x"})
        arrays = put(mesh, *((x, P(None, "x", "y")) for x in operands()))
        compiled = jax.jit(attend).lower(*arrays).compile()
        out = compiled(*arrays)
    assert set(collectives(compiled)) == {"collective-permute"}
    expected, _ = whole()(*operands())
    np.testing.assert_allclose(jax.device_get(out), expected, atol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize(("T", "S", "is_causal"), [(16, 48, False), (48, 32, True)])
def test_ring_of_unlike_lengths(T, S, is_causal):
    """With a causal mask, queries beyond the last key see all, and key 0 is at query 0."""
    arrays = operands(T, S)
    run = sharded(
        jax_flash.ring_attention, mesh_of((8,)), is_causal=is_causal, implementation="xla"
    )
    chex.assert_trees_all_close(
        jax.jit(functools.partial(with_gradients, run))(*arrays),
        with_gradients(whole(is_causal=is_causal), *arrays),
        atol=1e-4,
    )


@pytest.mark.parametrize("order", [{}, dict(zigzag=True, is_causal=True)], ids=str)
def test_rows_that_see_nothing(order):
    ids = jnp.zeros((B, 32), int).at[:, 3:9].set(7), jnp.zeros((B, 32), int)
    arrays = operands()
    run = sharded(jax_flash.ring_attention, mesh_of((4,)), ids=ids, implementation="xla", **order)
    results = jax.jit(functools.partial(with_gradients, run))(*arrays)
    chex.assert_tree_all_finite(results[2:])
    assert (results[1][:, 3:9] == -jnp.inf).all() and not results[0][:, 3:9].any()
    mask = whole(ids=ids, is_causal="is_causal" in order)
    chex.assert_trees_all_close(results, with_gradients(mask, *arrays), atol=1e-4)


@pytest.mark.parametrize("implementation", [None, "xla", "mosaic_gpu"])
@pytest.mark.parametrize(("T", "S"), [(0, 8), (8, 0), (0, 0)])
@pytest.mark.parametrize(
    "method",
    [
        jax_flash.ring_attention,
        functools.partial(jax_flash.ring_attention, zigzag=True),
        jax_flash.ulysses_attention,
        jax_flash.all_gather_attention,
    ],
    ids=["ring", "zigzag", "ulysses", "all-gather"],
)
def test_empty_axes(method, T, S, implementation):
    arrays = *operands(T, S, (4, 4), jnp.bfloat16), draw(3, 4)
    run = sharded(method, mesh_of((4,)), is_causal=True, implementation=implementation)
    out, lse, *gradients = jax.jit(functools.partial(with_gradients, run))(*arrays)
    chex.assert_trees_all_equal(out, jnp.zeros_like(arrays[0]))
    assert lse.shape == out.shape[:3] and jnp.isneginf(lse).all()
    chex.assert_trees_all_equal(gradients, [*map(jnp.zeros_like, arrays)])


@pytest.mark.long
@pytest.mark.parametrize("axes", [("y", "x"), ("x", "y"), ("y",)])
@pytest.mark.parametrize(
    "method",
    [jax_flash.ring_attention, jax_flash.ulysses_attention, jax_flash.all_gather_attention],
)
def test_axes_in_any_order(method, axes):
    """The first of several is the one that varies least, as in a PartitionSpec."""
    of_rows = P(None, axes)
    attend = functools.partial(method, axis_name=axes, is_causal=True, return_residual=True)
    run = jax.shard_map(attend, mesh=mesh_of((2, 4)), in_specs=of_rows, out_specs=of_rows)
    arrays = operands(heads=(8, 8))
    chex.assert_trees_all_close(
        jax.jit(functools.partial(with_gradients, run))(*arrays),
        with_gradients(whole(is_causal=True), *arrays),
        atol=1e-4,
    )


def program(run, *arrays):
    return jax.jit(functools.partial(with_gradients, run)).lower(*arrays).compile()


@pytest.mark.long
def test_a_window_is_sent_no_further_than_it_reaches():
    """Of 8 devices with 8 positions, a window of 9 needs keys of two before: two hops."""
    arrays = operands(64, 64)
    attend = functools.partial(sharded, jax_flash.ring_attention, mesh_of((8,)), is_causal=True)
    of_all = program(attend(implementation="xla"), *arrays)
    of_window = program(attend(implementation="xla", local_window_size=(9, 0)), *arrays)
    # Forward and backward, which share none: keys and values as one; then gradients with them, one
    # hop behind, and to the end.
    assert collectives(of_all) == {"collective-permute": 7 + 7 + 2}
    assert collectives(of_window) == {"collective-permute": 2 + 2 + 2}


def test_what_travels_as_one_has_dtypes_of_its_own():
    """Keys in bfloat16 with gradients in float32, where JAX is to promote nothing."""
    attend = functools.partial(sharded, jax_flash.ring_attention, mesh_of((4,)), is_causal=True)
    run = functools.partial(with_gradients, attend(implementation="xla"))
    with jax.numpy_dtype_promotion("strict"):
        results = jax.eval_shape(run, *operands(64, 64, dtype=jnp.bfloat16))
    assert [x.dtype for x in results] == [jnp.bfloat16, jnp.float32, *3 * [jnp.bfloat16]]


@pytest.mark.compiler
@pytest.mark.slow  # a minute
def test_compiled_for_gpus_hops_run_while_arrays_travel():
    """One transfer a hop; behind the last gradients nothing is left to run."""
    mesh = mesh_of((3,), devices=support.compile_only_devices(3))
    run = functools.partial(
        jax_flash.ring_attention,
        axis_name="x",
        zigzag=True,
        is_causal=True,
        implementation="mosaic_gpu",
    )
    run = jax.shard_map(run, mesh=mesh, in_specs=P(None, "x"), out_specs=P(None, "x"))

    def with_gradients(query, key, value, d_out):
        out, vjp = jax.vjp(run, query, key, value)
        return out, vjp(d_out)

    sharding = jax.NamedSharding(mesh, P(None, "x"))
    query, key = (
        jax.ShapeDtypeStruct((1, 3 * 1040, heads, 64), jnp.bfloat16, sharding=sharding)
        for heads in (4, 2)
    )
    text = jax.jit(with_gradients).lower(query, key, key, query).compile().as_text()
    on_their_way, of_hops = 0, []
    for found in re.findall(
        r" (collective-permute-start|collective-permute-done|conditional)\(", text
    ):
        if found == "conditional":
            of_hops.append(on_their_way > 0)
        on_their_way += {"collective-permute-start": 1, "collective-permute-done": -1}.get(found, 0)
    # The second and the third hop, forward and backward.
    assert of_hops == [True, False, True, True]
    assert len(re.findall(r" collective-permute-start\(", text)) == 5
    assert len(re.findall(r" collective-permute\(", text)) == 1
    # But for one counter of the backward's, which begins as a constant.
    assert set(re.findall(r"= (\S+) copy\(", text)) <= {"s32[1]{0}"}


@pytest.mark.parametrize(
    ("zigzag", "causal", "window", "shifts"),
    [
        (False, False, None, [0, 1, 2, 3]),
        (False, True, (4, 0), [0, 1]),
        (False, False, (4, 4), [0, 1, 3]),
        (True, True, (2, 0), [0, 1, 3]),
    ],
)
def test_hops_of_use(zigzag, causal, window, shifts):
    here = ring._Ring("x", 4, zigzag, causal, window, 1.0, None, False, None)
    assert here.shifts(8, 8) == shifts


def test_hops_of_a_window_beyond_all_positions():
    here = ring._Ring("x", 4, False, False, (2**70, 2**63 - 1), 1.0, None, False, None)
    assert here.shifts(8, 8) == [0, 1, 2, 3]


def test_zigzag_order():
    x = jnp.arange(16)[None]
    there = jax_flash.to_zigzag(x, 4)
    np.testing.assert_array_equal(there[0], [0, 1, 14, 15, 2, 3, 12, 13, 4, 5, 10, 11, 6, 7, 8, 9])
    chex.assert_trees_all_equal(jax_flash.from_zigzag(there, 4), x)
    with pytest.raises(ValueError, match="15 positions; needs a multiple of 8"):
        jax_flash.to_zigzag(x[:, 1:], 4)


def test_zigzag_order_of_as_many_devices_as_a_byte_counts():
    x = np.arange(512)[None]
    there = jax_flash.to_zigzag(x, np.uint8(128))
    chex.assert_trees_all_equal(there, jax_flash.to_zigzag(x, 128))
    chex.assert_trees_all_equal(jax_flash.from_zigzag(there, np.uint8(128)), jnp.asarray(x))


@pytest.mark.parametrize("heads", [(8, 4), (8, 2), (8, 1), (8, 8)])
def test_ulysses(heads):
    arrays = (*operands(heads=heads), draw(3, 8))
    options = dict(ids=(packed(32),) * 2, is_causal=True, local_window_size=(9, 0))
    run = sharded(jax_flash.ulysses_attention, mesh_of((4,)), implementation="xla", **options)
    chex.assert_trees_all_close(
        jax.jit(functools.partial(with_gradients, run))(*arrays),
        with_gradients(whole(**options), *arrays),
        atol=1e-4,
    )


@pytest.mark.parametrize("shape", [(8,), (4, 2)])
def test_all_gather(shape):
    arrays = (*operands(16, 32), draw(3, N))
    options = dict(ids=(packed(16), packed(32)), local_window_size=(9, 2))
    run = sharded(jax_flash.all_gather_attention, mesh_of(shape), implementation="xla", **options)
    chex.assert_trees_all_close(
        jax.jit(functools.partial(with_gradients, run))(*arrays),
        with_gradients(whole(**options), *arrays),
        atol=1e-4,
    )


@pytest.mark.long
@pytest.mark.parametrize("zigzag", [False, True])
def test_vmap_and_checkpoint(zigzag):
    arrays = operands()
    run = sharded(
        jax_flash.ring_attention, mesh_of((4,)), zigzag=zigzag, is_causal=True, implementation="xla"
    )
    more = jax.tree.map(lambda x: jnp.stack([x, x[::-1] * 2]), arrays)
    mapped = jax.vmap(functools.partial(with_gradients, jax.checkpoint(run)))
    expected = jax.vmap(functools.partial(with_gradients, whole(is_causal=True)))
    chex.assert_trees_all_close(jax.jit(mapped)(*more), expected(*more), atol=1e-4)


@pytest.mark.parametrize(
    "method",
    [jax_flash.ring_attention, jax_flash.ulysses_attention, jax_flash.all_gather_attention],
)
def test_refusals(method):
    arrays = operands()
    with pytest.raises(ValueError, match=r"axis_name: got 'z'; needs a mesh axis"):
        method(*arrays, axis_name="z")
    with pytest.raises(ValueError, match="query"):
        sharded(method, mesh_of((4,)), implementation="xla")(arrays[0][:, :, :3], *arrays[1:])


def test_refusals_of_ring():
    query, key, value = operands(36, 36)
    with pytest.raises(ValueError, match="zigzag: got lengths 9 and 9; needs even ones"):
        jax.shard_map(
            functools.partial(jax_flash.ring_attention, axis_name="x", zigzag=True),
            mesh=mesh_of((4,)),
            in_specs=P(None, "x"),
            out_specs=P(None, "x"),
        )(query, key, value)


def test_refusals_of_ulysses():
    with pytest.raises(ValueError, match="key: got 3 heads; needs a multiple or a divisor"):
        sharded(jax_flash.ulysses_attention, mesh_of((4,)))(*operands(heads=(12, 3)))
    run = sharded(jax_flash.ulysses_attention, mesh_of((4,)))
    with pytest.raises(ValueError, match=r"sinks: got \(16,\); needs one per query head, \(8,\)"):
        run(*operands(heads=(8, 8)), jnp.zeros(16))
    with pytest.raises(TypeError, match="options: got dropout_rate"):
        sharded(jax_flash.ulysses_attention, mesh_of((4,)), dropout_rate=0.5)(*operands())


METHODS = jax_flash.ring_attention, jax_flash.ulysses_attention, jax_flash.all_gather_attention


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("axis_name", "got"), [(["x"], r"\['x'\]"), (0, "0"), ((), r"\(\)"), (("x", 0), r"\('x', 0\)")]
)
def test_refusals_of_an_axis_name(method, axis_name, got):
    with pytest.raises(TypeError, match=f"axis_name: got {got}; needs the name of a mesh axis"):
        method(*operands(), axis_name=axis_name)


@pytest.mark.parametrize("method", METHODS)
def test_a_mesh_axis_counts_once(method):
    with pytest.raises(ValueError, match=r"\('x', 'x'\); needs each mesh axis once"):
        method(*operands(), axis_name=("x", "x"))


def of_one_device(method, **options):
    run = functools.partial(method, axis_name="x", implementation="xla", **options)
    rows = P(None, "x")
    attend = jax.shard_map(run, mesh=mesh_of((1,)), in_specs=rows, out_specs=rows)
    return attend(*operands(8, 8))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("error", "match", "options"),
    [
        (TypeError, "return_residual: got str; needs True or False", dict(return_residual="no")),
        (TypeError, "query_segment_ids: got str", dict(query_segment_ids="documents")),
        (TypeError, "query_segment_ids: got float32", dict(query_segment_ids=jnp.ones((B, 8)))),
        (ValueError, r"key_value_segment_ids: got shape \(8,\)", {}),
    ],
)
def test_refusals_name_the_argument(method, error, match, options):
    ids = jnp.zeros((B, 8), jnp.int32)
    own = dict(query_segment_ids=ids, key_value_segment_ids=ids if options else ids[0])
    with pytest.raises(error, match=match):
        of_one_device(method, **own | options)


@pytest.mark.parametrize("method", METHODS)
def test_flags_of_numpy(method):
    options = dict(is_causal=np.True_) | (
        dict(zigzag=np.False_) if method == jax_flash.ring_attention else {}
    )
    plain = {name: bool(x) for name, x in options.items()}
    chex.assert_trees_all_equal(of_one_device(method, **options), of_one_device(method, **plain))


@pytest.mark.parametrize("order", [jax_flash.to_zigzag, jax_flash.from_zigzag])
@pytest.mark.parametrize(
    ("error", "match", "args"),
    [
        (ValueError, "devices: got 0; needs at least 1", (0,)),
        (ValueError, "devices: got -1; needs at least 1", (-1,)),
        (TypeError, r"devices: got 1.5; needs an integer", (1.5,)),
        (TypeError, "devices: got True; needs an integer", (True,)),
        (ValueError, "axis: got 7; needs one of the 2 axes of x", (4, 7)),
        (ValueError, "axis: got -3; needs one of the 2 axes of x", (4, -3)),
        (TypeError, "axis: got None; needs an integer", (4, None)),
    ],
)
def test_refusals_of_an_order(order, error, match, args):
    with pytest.raises(error, match=match):
        order(jnp.zeros((1, 16)), *args)


@pytest.mark.parametrize("axis", [0, 2, -1])
def test_zigzag_order_of_other_axes(axis):
    x = jnp.arange(3 * 16).reshape(3, 16)[:, None] + jnp.zeros((3, 1, 16), int)
    x = jnp.moveaxis(x, -1, axis)
    there = jax_flash.to_zigzag(x, 4, axis)
    of_rows = jax_flash.to_zigzag(jnp.moveaxis(x, axis, 1), 4)
    chex.assert_trees_all_equal(jnp.moveaxis(there, axis, 1), of_rows)
    chex.assert_trees_all_equal(jax_flash.from_zigzag(there, 4, axis), x)
