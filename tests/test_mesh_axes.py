"""Every public function with batch and heads on mesh axes, Explicit or Auto, in set_mesh or not."""

import contextlib
import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import jax_flash
from jax_flash import sharding
from tests.support import public_calls
from tests.support.public_calls import CALLS, PublicCall
from tests.support.sharded import mesh_of, plain_kernels, put

AXIS_TYPES = (AxisType.Explicit, AxisType.Auto)

# Mesh axes of the letters of `public_calls.Operand`.
BATCH_AND_HEADS = {"b": "x", "n": "y", "k": "y"}
LAYOUTS = {
    "batch and heads": BATCH_AND_HEADS,
    "batch": {"b": ("x", "y")},
    "heads beyond key heads": {"n": ("x", "y"), "k": "x"},
    "replicated keys": {"n": ("x", "y")},
}

SHARDED = [call for call in CALLS if not call.is_collective]
ON_KERNELS = [call for call in SHARDED if call.has_implementation and call.on_kernels]
ON_KERNELS = [call for call in ON_KERNELS if not call.function.startswith("explain")]


def in_mesh(mesh, inside: bool):
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


def assert_sharded_as(x: jax.Array | jax.ShapeDtypeStruct, spec: PartitionSpec):
    """By its type, which names Explicit axes."""
    whole = lambda spec: (*spec, *[None] * (len(x.shape) - len(spec)))
    assert whole(x.sharding.spec) == whole(spec), x.sharding


def assert_nothing_is_gathered(call: PublicCall, results, gradients, layout):
    """All that the calls give has batch and heads, but for pages, which are of no sequence."""
    for x in jax.tree.leaves(results):
        batch = "b" if x.shape[0] == public_calls.B else "."
        heads = "n" if public_calls.N in x.shape[2:] else "k"
        axes = f"{batch}.{heads}."
        if call.name == "attention-two_batch_axes":
            axes = f"{batch}..{heads}."
        assert_sharded_as(x, spec_of(axes[: x.ndim], layout))
    for name, x in gradients.items():
        assert_sharded_as(x, spec_of(call.operands[name].axes, layout))


# Of these the sharding is that of others, with other masks.
ALIKE = (
    "attention",
    "attention-causal",
    "attention-soft_cap",
    "attention-one_id_array",
    "attention_fp8",
    "from_zigzag",
)


def cases(calls, implementation: str):
    """A call, the type of mesh axes, and whether it is inside of set_mesh; many are slow.

    Traced, the types of arrays on Explicit axes say all but values; so few are compiled.
    """
    found = []
    for call, axis_type, inside in itertools.product(calls, AXIS_TYPES, (False, True)):
        alone = axis_type == AxisType.Explicit and not inside
        if implementation == "xla":
            is_fast = alone and call.name not in ALIKE
        else:
            is_fast = alone and call.name in ("attention-lengths", "decode_attention-options")
        name = f"{call.name}-{axis_type.name}-{'in set_mesh' if inside else 'outside'}"
        marks = () if is_fast else pytest.mark.slow
        found.append(pytest.param(call, axis_type, inside, id=name, marks=marks))
    return found


@pytest.mark.parametrize(("call", "axis_type", "inside"), cases(SHARDED, "xla"))
def test_on_xla(call, axis_type, inside):
    mesh = mesh_of((2, 2), axis_type)
    arrays = placed(call, mesh, BATCH_AND_HEADS, jnp.float32)
    with in_mesh(mesh, inside):
        program = jax.jit(results_and_gradients(call, "xla")).lower(arrays).compile()
    results, gradients = program(arrays)
    is_fp8 = "fp8" in call.name or "quantized" in call.name
    for actual, expected in zip(
        jax.tree.leaves((results, gradients)), jax.tree.leaves(unsharded(call.name)), strict=True
    ):
        np.testing.assert_allclose(
            np.asarray(actual, np.float32),
            np.asarray(expected, np.float32),
            atol=0.05 if is_fp8 else 1e-4,
        )
    if axis_type == AxisType.Explicit:  # else XLA decides
        assert_nothing_is_gathered(call, results, gradients, BATCH_AND_HEADS)


@pytest.mark.long
@pytest.mark.parametrize(("call", "axis_type", "inside"), cases(ON_KERNELS, "mosaic_gpu"))
def test_lowers_for_cuda(call, axis_type, inside):
    mesh = mesh_of((2, 2), axis_type)
    arrays = placed(call, mesh, BATCH_AND_HEADS, jnp.bfloat16)
    with in_mesh(mesh, inside):
        traced = jax.jit(results_and_gradients(call, "mosaic_gpu")).trace(arrays)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    # What XLA is to split is lowered where it does, while it compiles.
    kernel = "mosaic_gpu" if axis_type == AxisType.Explicit else "CustomSPMDPartitioning"
    assert kernel in text


def layouts():
    """A call, a layout, an implementation, and whether it is inside of set_mesh; many are slow."""
    found = []
    for implementation, calls in {"xla": SHARDED, "mosaic_gpu": ON_KERNELS}.items():
        for call, layout, inside in itertools.product(calls, LAYOUTS, (False, True)):
            if implementation == "xla":
                is_fast = not inside or layout == "batch and heads"
            else:
                is_fast = not inside and layout == "heads beyond key heads"
            where = "in set_mesh" if inside else "outside"
            name = f"{call.name}-{layout}-{implementation}-{where}"
            marks = () if is_fast else pytest.mark.slow
            case = call, LAYOUTS[layout], implementation, inside
            found.append(pytest.param(*case, id=name, marks=marks))
    return found


@pytest.mark.parametrize(("call", "layout", "implementation", "inside"), layouts())
def test_explicit_types(call, layout, implementation, inside):
    """Whatever the layout, results are sharded as the query is, gradients as operands are."""
    mesh = mesh_of((2, 2), AxisType.Explicit)
    dtype = jnp.float32 if implementation == "xla" else jnp.bfloat16
    arrays = placed(call, mesh, layout, dtype)
    with in_mesh(mesh, inside):
        out = jax.eval_shape(results_and_gradients(call, implementation), arrays)
    assert_nothing_is_gathered(call, *out, layout)


@pytest.mark.parametrize("implementation", ["xla", "mosaic_gpu"])
def test_a_sharded_sequence_is_said_to_be_one(implementation):
    query = jnp.ones((2, 16, 4, 8), jnp.bfloat16)
    (query,) = put(mesh_of((2, 2), AxisType.Explicit), (query, PartitionSpec(None, "x")))
    said = "attention: got .* whose axis of 16 is sharded over x.* jax_flash.ring_attention"
    with pytest.raises(ValueError, match=said):
        jax_flash.attention(query, query, query, implementation=implementation)


@pytest.mark.parametrize("inside", [True, False], ids=["in set_mesh", "outside"])
@pytest.mark.parametrize(
    "method",
    [jax_flash.ring_attention, jax_flash.ulysses_attention, jax_flash.all_gather_attention],
)
def test_explicit_types_of_a_sharded_sequence(method, inside):
    mesh = mesh_of((2, 2), AxisType.Explicit)
    spec = PartitionSpec("y", "x")
    local = functools.partial(method, axis_name="x", is_causal=True, implementation="xla")
    attend = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)

    def run(*arrays):
        out, vjp = jax.vjp(attend, *arrays)
        return out, *vjp(out)

    arrays = put(mesh, *((jnp.ones((4, 16, heads, 8)), spec) for heads in (4, 2, 2)))
    with in_mesh(mesh, inside):
        for x in jax.eval_shape(run, *arrays):
            assert_sharded_as(x, spec)


@pytest.mark.parametrize("implementation", ["xla", "mosaic_gpu"])
@pytest.mark.parametrize("inside", [True, False], ids=["in set_mesh", "outside"])
@pytest.mark.parametrize("spec", [("x", None), (None, "x")], ids=str)
def test_explicit_types_under_vmap(spec, inside, implementation):
    """Be it the mapped axis that is sharded, which JAX leaves to XLA, or the batch."""
    refusal = lambda: pytest.raises(NotImplementedError, match="vmap maps no axis that is sharded")
    mesh = mesh_of((2, 2), AxisType.Explicit)
    whole = PartitionSpec(*spec, None, "y")
    attention = functools.partial(jax_flash.attention, implementation=implementation)

    def run(*arrays):
        out, vjp = jax.vjp(jax.vmap(attention), *arrays)
        return out, *vjp(out)

    ones = lambda heads: jnp.ones((4, 2, 16, heads, 64), jnp.bfloat16)
    arrays = put(mesh, *((ones(heads), whole) for heads in (4, 2, 2)))
    refused = implementation == "mosaic_gpu" and spec[0] is not None
    with in_mesh(mesh, inside), refusal() if refused else contextlib.nullcontext():
        for x in jax.eval_shape(run, *arrays):
            assert_sharded_as(x, whole)


# --- sums over what is sharded -------------------------------------------------------------------


BIAS_SHAPES = [(1, 8, 16, 24), (4, 1, 16, 24), (1, 1, 1, 24)]


@pytest.mark.parametrize("shape", BIAS_SHAPES)
def test_a_result_that_lacks_a_split_axis_is_a_sum(shape):
    """As the gradient of a bias is, over batch, heads, or both; of devices and on each."""
    mesh = mesh_of((2, 2))
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    query, key, bias = draw(4, 16, 8, 2), draw(4, 24, 4, 2), draw(*shape)

    def gradient(query, key, bias):
        key = jnp.repeat(key, query.shape[2] // key.shape[2], axis=2)
        d_logits = jnp.sin(jnp.einsum("btnh,bsnh->bnts", query, key))
        ones = tuple(axis for axis, size in enumerate(shape) if size == 1)
        return (d_logits.sum(ones, keepdims=True) * bias,)

    spec = PartitionSpec("x", None, "y")
    arrays = put(mesh, (query, spec), (key, spec), (bias, PartitionSpec()))
    run = sharding.over_devices(gradient, ("b.n.", "b.k.", "bn.."), ("bn..",))
    chex.assert_trees_all_close(
        jax.jit(run)(*arrays), gradient(query, key, bias), atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("axis_type", AXIS_TYPES, ids=str)
@pytest.mark.parametrize("shape", [x for x in BIAS_SHAPES if x[2] > 1])
def test_gradient_of_a_bias(shape, axis_type):
    """Through the kernels' own pipeline, but for the kernels."""
    mesh = mesh_of((2, 2), axis_type)
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    query, key, bias = draw(4, 16, 8, 8), draw(4, 24, 4, 8), draw(*shape)

    def gradient(implementation, query, key, bias):
        attention = functools.partial(jax_flash.attention, implementation=implementation)
        out, vjp = jax.vjp(lambda bias: attention(query, key, key, bias), bias)
        return vjp(jnp.cos(out))

    spec = PartitionSpec("x", None, "y")
    half = lambda x: x.astype(jnp.bfloat16)
    arrays = put(mesh, (half(query), spec), (half(key), spec), (bias, PartitionSpec()))
    with plain_kernels():
        actual = jax.jit(functools.partial(gradient, "mosaic_gpu"))(*arrays)
    expected = gradient("xla", query, key, bias)
    chex.assert_trees_all_close(actual, expected, atol=0.02 * np.abs(expected[0]).max())


def dilated(b, h, q_idx, kv_idx):
    """A remainder, whose program brings a number onto the mesh."""
    return (q_idx - kv_idx) % (h % 3 + 1) == 0


@pytest.mark.parametrize("kind", ["mask_mod", "score_mod", "beside a mask"])
def test_functions_with_a_remainder(kind):
    mesh = mesh_of((2,), AxisType.Explicit)
    query = jax.random.normal(jax.random.key(0), (2, 16, 4, 8))
    options = {
        "mask_mod": dict(mask_mod=dilated),
        "score_mod": dict(score_mod=lambda s, *x: jnp.where(dilated(*x), s, -1.0)),
        "beside a mask": dict(mask_mod=dilated, mask=jnp.tri(16, dtype=bool)[None, None]),
    }[kind]
    run = functools.partial(jax_flash.attention, implementation="xla", **options)
    expected = run(query, query, query)
    (sharded,) = put(mesh, (query, PartitionSpec("x")))
    with jax.set_mesh(mesh):
        out = run(sharded, sharded, sharded)
    chex.assert_trees_all_close(out, expected, atol=1e-5)


def test_blocks_of_a_function_with_a_remainder():
    expected = jax_flash.block_mask(dilated, 1, 4, 64, 64)
    with jax.set_mesh(mesh_of((2,), AxisType.Explicit)):
        found = jax_flash.block_mask(dilated, 1, 4, 64, 64)
    assert str(found) == str(expected)
