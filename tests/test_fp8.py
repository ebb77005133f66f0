"""attention() of Quantized arrays and attention_fp8(), against float64.

What Quantized arrays stand for is known exactly, so that what an implementation adds to the error
of quantisation is measured apart from it.
"""

import contextlib
import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_flash
from benchmarks import accuracy_fp8
from jax_flash import Quantized, cudnn, dispatch, kernel_fp8, xla
from jax_flash.masks import dropout_keep
from pallas_kernels import defaults
from tests import oracle
from tests.support.interpret import interpret_mode
from tests.support.nonzero import assert_none_is_zero
from tests.support.pages import sections
from tests.support.sharded import collectives, mesh_of, plain_kernels, put

B, T, S, N, K, H, h = 2, 21, 50, 4, 2, 16, 24
KEY = jax.random.key(5)

IMPLEMENTATIONS = ["xla", pytest.param("mosaic_gpu", marks=pytest.mark.gpu)]


def draw(seed, *shape, dtype=jnp.bfloat16):
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def qkv(dtype=jnp.bfloat16):
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, h)
    return tuple(draw(i, *shape, dtype=dtype) for i, shape in enumerate(shapes))


def quantized(block_size=8, **options):
    return jax_flash.quantize_fp8(*qkv(), block_size=block_size, **options)


def dequantized(arrays):
    return [x.dequantize(jnp.float32) for x in arrays]


def ids(length, count):
    return np.random.default_rng(length).integers(0, count, (B, length))


def relative(x, y):
    x, y = np.float64(x), np.float64(y)
    return np.linalg.norm(x - y) / max(np.linalg.norm(y), 1e-30)


OPTIONS = {
    "full": {},
    "scale": {"scale": 0.3},
    "causal": {"is_causal": True},
    "causal, last aligned": {"is_causal": True, "query_offset": S - T},
    "causal, offsets": {"is_causal": True, "query_offset": np.array([-5, 20])},
    "window": {"local_window_size": (6, 3), "query_offset": 11},
    "window, causal": {"local_window_size": (9, 0), "query_offset": S - T},
    "lengths": {"query_seq_lengths": np.array([21, 9]), "key_value_seq_lengths": np.array([7, 50])},
    "lengths of 0": {"query_seq_lengths": np.array([0, 4]), "key_value_seq_lengths": [50, 0]},
    "segments": {"query_segment_ids": ids(T, 3), "key_value_segment_ids": ids(S, 2)},
    "mask": {"mask": np.random.default_rng(0).random((B, 1, T, S)) < 0.4},
    "bias": {"bias": draw(7, 1, N, T, S, dtype=jnp.float32)},
    "soft cap": {"logits_soft_cap": 1.5},
    "sinks": {"sinks": draw(8, N, dtype=jnp.float32), "is_causal": True, "query_offset": -3},
    "dropout": {"dropout_rate": 0.3, "dropout_key": jnp.array([3, 4], jnp.uint32)},
}


def expected(arrays, **options):
    if "dropout_key" in options:
        places = np.ix_(range(B), range(N), range(T), range(S))
        keep = dropout_keep(options.pop("dropout_key"), options["dropout_rate"], *places)
        options["dropout_keep"] = np.asarray(keep)
    return oracle.attention(*dequantized(arrays), **options)


def check(arrays, **options):
    out, lse = jax_flash.attention(*arrays, implementation="xla", return_residual=True, **options)
    exact_out, exact_lse = expected(arrays, **options)
    chex.assert_type([out, lse], [jnp.bfloat16, jnp.float32])
    np.testing.assert_allclose(lse, exact_lse, atol=1e-5)
    np.testing.assert_allclose(np.float32(out), exact_out, atol=2e-2, rtol=1e-2)
    assert relative(out, exact_out) < 5e-3


@pytest.mark.parametrize("name", OPTIONS)
def test_options_on_xla(name):
    check(quantized(), **OPTIONS[name])


@pytest.mark.parametrize("name", OPTIONS)
def test_options_on_xla_in_parts(name, monkeypatch):
    """Several chunks of rows, and of keys, the last ones overlapping those before."""
    monkeypatch.setattr(xla, "LOGITS_BYTES", 0)
    monkeypatch.setattr(xla, "MIN_ROWS", 4)
    monkeypatch.setattr(xla, "MAX_KEYS", 12)
    check(quantized(), **OPTIONS[name])


def test_blocks_of_any_size_each():
    arrays = [
        jax_flash.quantize_fp8(*qkv(), block_size=size)[i] for i, size in enumerate((3, 1000, 1))
    ]
    check(arrays, is_causal=True, query_offset=S - T)


@pytest.mark.parametrize("shape", [(1, 1), (B, 1), (1, None)])
def test_scales_that_batch_or_heads_share(shape):
    batch, heads = shape
    arrays = [
        Quantized(x.values, jnp.full((batch, 1, heads or x.shape[2]), 0.01 * (i + 1)), 1000)
        for i, x in enumerate(quantized())
    ]
    check(arrays)


def test_without_a_batch():
    arrays = quantized()
    alone = [Quantized(x.values[1], x.scales[1], x.block_size) for x in arrays]
    out, lse = jax_flash.attention(*alone, return_residual=True)
    expected_out, expected_lse = jax_flash.attention(*arrays, return_residual=True)
    chex.assert_trees_all_close((out, lse), (expected_out[1], expected_lse[1]), atol=1e-2)


@pytest.mark.parametrize("sizes", [(0, 5), (5, 0)])
def test_empty_lengths(sizes):
    query, key = jnp.zeros((1, sizes[0], 2, 8)), jnp.zeros((1, sizes[1], 2, 8))
    out, lse = jax_flash.attention(*jax_flash.quantize_fp8(query, key, key), return_residual=True)
    assert out.shape == query.shape and out.dtype == jnp.bfloat16 and not out.any()
    assert (lse == -jnp.inf).all()


def test_nan_comes_out_where_it_is_seen():
    query, key, value = qkv()
    key = key.at[0, 30, 0, 3].set(jnp.nan)
    value = value.at[1, 40, 1, 5].set(jnp.nan)
    arrays = jax_flash.quantize_fp8(query, key, value, block_size=8)
    out = jax_flash.attention(*arrays, is_causal=True, query_offset=S - T)
    exact = jax_flash.attention(query, key, value, is_causal=True, query_offset=S - T)
    assert jnp.isnan(exact).any()
    np.testing.assert_array_equal(jnp.isnan(out), jnp.isnan(exact))


def test_what_is_not_seen_may_be_nan():
    query, key, value = (x.at[1, 7:].set(jnp.nan) for x in qkv())
    arrays = jax_flash.quantize_fp8(query, key, value, block_size=8)
    arrays = [Quantized(x.values, x.scales.at[1, 1:].set(jnp.nan), x.block_size) for x in arrays]
    lengths = dict(query_seq_lengths=[T, 7], key_value_seq_lengths=[S, 7])
    out, lse = jax_flash.attention(*arrays, return_residual=True, **lengths)
    zeros = jax_flash.quantize_fp8(*(x.at[1, 7:].set(0) for x in qkv()), block_size=8)
    plain = jax_flash.attention(*zeros, return_residual=True, **lengths)
    chex.assert_trees_all_close((out, lse), plain, atol=1e-6)


def test_keys_are_widened_chunk_by_chunk(monkeypatch):
    monkeypatch.setattr(xla, "MAX_KEYS", 256)
    rows = jax.ShapeDtypeStruct((1, 16, 4, 64), jnp.bfloat16)
    keys = jax.ShapeDtypeStruct((1, 2**14, 4, 64), jnp.bfloat16)
    arrays = jax.eval_shape(jax_flash.quantize_fp8, rows, keys, keys)
    program = jax.jit(jax_flash.attention).lower(*arrays).compile()
    # Keys and values in bfloat16 are 4 * keys.size bytes; the CPU copies them as they are, 2.
    assert program.memory_analysis().temp_size_in_bytes < 2.5 * keys.size


# --- accuracy -----------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_blocks_and_rotation_are_2_6_times_as_accurate_as_a_scale_per_tensor(implementation):
    """A part of the queries of a long sequence, where an outlier of some key meets each of them."""
    errors = accuracy_fp8.outlier_errors(implementation, rows=512, keys=16384, heads=2, width=128)
    whole = errors["a scale per tensor"]
    assert errors["bf16"] < errors["both"] / 10
    assert errors["blocks"] < whole
    assert errors["incoherent"] < whole / 2.6
    assert errors["both"] < whole / 2.6
    assert 5e-3 < errors["both"] < 1.2e-2


def attention_in_key_order(query, key, value, block=128):
    """Online softmax from the first key to the last with weights in e4m3, in float64 otherwise."""
    logits = query @ key.T / key.shape[1] ** 0.5
    top, total, out = -np.inf, 0.0, 0.0
    for start in range(0, len(key), block):
        part = logits[:, start : start + block]
        new_top = np.maximum(top, part.max(1, keepdims=True))
        weights = np.exp(part - new_top)
        in_fp8 = np.float64(weights.astype(jnp.float8_e4m3fn))
        decay = np.exp(top - new_top)
        out = out * decay + in_fp8 @ value[start : start + block]
        total = total * decay + weights.sum(1, keepdims=True)
        top = new_top
    return out / total


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("lead", [6.0, 9.0, 12.0])
def test_attention_sinks_leave_the_other_keys_their_weight(lead, implementation):
    """The first keys take most weight, and their values are small, as in trained models.

    What the others add to the output is lost where their weights, relative to those of the sinks,
    are below what e4m3 has: it is arXiv 2606.06521 that shows it for key blocks in order.
    """
    rows, keys, width, sinks = 64, 1024, 64, 2
    rng = np.random.default_rng(0)
    query, key = rng.normal(size=(rows, width)), rng.normal(size=(keys, width))
    query[:, 0], key[:, 0] = 8, 0
    key[:sinks, 0] = lead * width**0.5 / 8
    value = rng.normal(size=(keys, width)) + 1
    value[:sinks] = 0
    arrays = jax_flash.quantize_fp8(
        *(jnp.asarray(x[:, None], jnp.bfloat16) for x in (query, key, value))
    )
    plain = [np.float64(x[:, 0]) for x in dequantized(arrays)]
    exact = oracle.attention(*(x[:, None] for x in plain))[0][:, 0]
    out = jax_flash.attention(*arrays, implementation=implementation)[:, 0]
    assert relative(attention_in_key_order(*plain), exact) > (0.02 if lead == 6 else 0.5)
    # In the sinks' own block e4m3 has little for the others.
    in_kernel = {6.0: 2e-2, 9.0: 4e-2, 12.0: 0.15}[lead]
    assert relative(out, exact) < (5e-3 if implementation == "xla" else in_kernel)


# --- transformations ----------------------------------------------------------------------------


def test_jit_and_vmap():
    arrays = quantized()
    plain = jax_flash.attention(*arrays, is_causal=True)
    attention = functools.partial(jax_flash.attention, is_causal=True)
    np.testing.assert_allclose(jax.jit(attention)(*arrays), plain, atol=1e-2)

    turned = jax.tree.map(lambda x: jnp.stack([x, jnp.flip(x, axis=0)]), arrays)
    both = jnp.stack([plain, jnp.flip(plain, axis=0)])
    np.testing.assert_allclose(jax.vmap(attention)(*turned), both, atol=1e-2)
    _, key, value = arrays
    of_query = jax.vmap(attention, in_axes=(0, None, None))(turned[0], key, value)
    np.testing.assert_allclose(of_query[0], plain, atol=1e-2)


SPEC = P("x", None, "y")


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_sharded_operands(axis_type, monkeypatch):
    monkeypatch.setattr(xla, "MAX_KEYS", 12)
    mesh = mesh_of((2, 2), axis_type)
    arrays = quantized()
    plain = jax_flash.attention(*arrays, is_causal=True, return_residual=True)
    leaves, tree = jax.tree.flatten(arrays)
    sharded = jax.tree.unflatten(tree, put(mesh, *((x, SPEC) for x in leaves)))
    explicit = axis_type == AxisType.Explicit
    with jax.set_mesh(mesh) if explicit else contextlib.nullcontext():
        run = functools.partial(jax_flash.attention, is_causal=True, return_residual=True)
        program = jax.jit(run).lower(*sharded).compile()
    assert not collectives(program)
    results = program(*sharded)
    chex.assert_trees_all_close(jax.device_get(results), plain, atol=1e-2)
    assert all(x.sharding.is_equivalent_to(NamedSharding(mesh, SPEC), x.ndim) for x in results)


def test_inside_shard_map(monkeypatch):
    monkeypatch.setattr(xla, "MAX_KEYS", 12)
    arrays = quantized()
    sinks = draw(8, N, dtype=jnp.float32)
    run = lambda *x: jax_flash.attention(*x[:3], sinks=x[3], is_causal=True)
    in_specs = (SPEC, SPEC, SPEC, P("y"))
    mapped = jax.shard_map(run, mesh=mesh_of((2, 2)), in_specs=in_specs, out_specs=SPEC)
    np.testing.assert_allclose(jax.jit(mapped)(*arrays, sinks), run(*arrays, sinks), atol=1e-2)


def test_quantised_on_each_device():
    """Blocks are of rows of one head and batch entry, so that nothing is gathered for them."""
    mesh = mesh_of((2, 2))
    arrays = put(mesh, *((x, SPEC) for x in qkv()))
    run = functools.partial(jax_flash.quantize_fp8, block_size=8, incoherent_key=KEY)
    program = jax.jit(run).lower(*arrays).compile()
    assert not collectives(program)
    chex.assert_trees_all_close(
        jax.device_get(program(*arrays)[0].scales), run(*qkv())[0].scales, rtol=1e-6
    )


@pytest.mark.parametrize("transform", ["grad", "jit", "checkpoint", "vmap", "scan"])
@pytest.mark.parametrize("of", ["scales", "sinks"])
def test_quantized_arrays_have_no_derivative(of, transform):
    query, key, value = quantized()
    sinks = jnp.zeros(N)

    def loss(scales, sinks):
        attended = Quantized(query.values, scales, query.block_size)
        return jax_flash.attention(attended, key, value, sinks=sinks).astype(jnp.float32).sum()

    if transform == "jit":
        loss = jax.jit(loss)
    elif transform == "checkpoint":
        loss = jax.checkpoint(loss)
    elif transform == "vmap":
        loss = lambda *x, f=loss: jax.vmap(f)(*(y[None] for y in x)).sum()
    elif transform == "scan":
        loss = lambda *x, f=loss: jax.lax.scan(lambda c, _: (c + f(*x), None), 0.0, None, 2)[0]
    argument = ("scales", "sinks").index(of)
    with pytest.raises(
        NotImplementedError, match=r"no derivative: jax_flash\.attention_fp8 is FP8"
    ):
        jax.grad(loss, argnums=argument)(query.scales, sinks)


def test_example_of_the_guide():
    example, _ = sections()["FP8"]
    query, key, value = draw(0, 2, 64, 4, 32), draw(1, 2, 64, 2, 32), draw(2, 2, 64, 2, 32)
    names = dict(jax=jax, jax_flash=jax_flash, query=query, key=key, value=value)
    example.run(names)
    exact, _ = oracle.attention(query, key, value, is_causal=True)
    assert names["out"].dtype == jnp.bfloat16 and relative(names["out"], exact) < 0.1


# --- what is refused ----------------------------------------------------------------------------


NO_KERNEL = f"value width {h}: the FP8 kernel takes multiples of 16 up to 256"


def test_named_implementations_that_cannot():
    with pytest.raises(NotImplementedError, match=f"'mosaic_gpu': {NO_KERNEL}"):
        jax_flash.attention(*quantized(), implementation="mosaic_gpu")
    with pytest.raises(NotImplementedError, match="'cudnn': "):
        jax_flash.attention(*quantized(), implementation="cudnn")


def test_explain(monkeypatch):
    for_kernels = lambda: jax_flash.quantize_fp8(*wide(2, 1, 1))
    for arrays in (quantized, for_kernels):
        assert jax_flash.explain(*jax.eval_shape(arrays)).implementation == "xla"
        assert jax_flash.explain(*arrays()).implementation == "xla"
    # On a GPU that has the FP8 kernel alone.
    monkeypatch.setattr(dispatch, "_device_reason", lambda name, here: None)
    monkeypatch.setattr(cudnn, "unsupported", lambda call: "not here")
    assert jax_flash.explain(*for_kernels()).implementation == "mosaic_gpu"
    explanation = jax_flash.explain(*quantized())
    assert explanation.implementation == "xla"
    assert explanation.reasons["mosaic_gpu"] == NO_KERNEL


def changed(index=0, **fields):
    """Arrays of which one has other fields."""
    arrays = list(quantized())
    arrays[index] = dataclasses.replace(arrays[index], **fields)
    return arrays


REFUSED = {
    "query, key and value: got Quantized for key and value alone": (
        lambda: [qkv()[0], *quantized()[1:]],
        TypeError,
    ),
    "query: got values in bfloat16; needs float8_e4m3fn": (
        lambda: changed(values=qkv()[0]),
        TypeError,
    ),
    "key: got bfloat16; needs the dtype of query": (
        lambda: changed(1, values=qkv()[1]),
        TypeError,
    ),
    "query: got scales in bfloat16; needs float32": (
        lambda: changed(scales=jnp.ones((B, 3, N), jnp.bfloat16)),
        TypeError,
    ),
    r"value: got scales of shape \(2, 3, 2\); needs \(2, 7, 2\), where batch and heads may be 1,": (
        lambda: changed(2, scales=jnp.ones((B, 3, K))),
        ValueError,
    ),
    r"key: got scales of shape \(7, 2\); needs": (
        lambda: changed(1, scales=jnp.ones((7, K))),
        ValueError,
    ),
    r"query: got scales of shape \(1,\); needs": (lambda: changed(scales=[1.0]), ValueError),
    "query, scales: got NoneType; needs an array": (lambda: changed(scales=None), TypeError),
    "query: got a block_size of 0; needs an integer": (lambda: changed(block_size=0), ValueError),
    "key: got a block_size of 8.0": (lambda: changed(1, block_size=8.0), ValueError),
    "key: got largest of 449; needs a number above 0, and 448.0 at most": (
        lambda: changed(1, largest=449),
        ValueError,
    ),
    "query: got largest of nan": (lambda: changed(largest=float("nan")), ValueError),
    "query: got a string": (lambda: changed(values="a string"), TypeError),
}


@pytest.mark.parametrize("message", REFUSED)
def test_bad_quantized_arrays(message):
    arrays, error = REFUSED[message]
    if "a string" in message:
        message = "query: got str; needs an array"
    with pytest.raises(error, match=message):
        jax_flash.attention(*arrays())


def test_config_has_settings_of_the_fp8_kernel():
    with pytest.raises(ValueError, match="config: got one without forward_fp8 for Quantized"):
        jax_flash.attention(*quantized(), config=defaults.default(64))


def test_others_take_no_quantized_arrays():
    query, key, value = quantized()
    with pytest.raises(TypeError, match="query: got Quantized; needs an array"):
        jax_flash.decode_attention(query, key, value, jnp.array([3, 4]))
    for attention in (
        jax_flash.ring_attention,
        jax_flash.ulysses_attention,
        jax_flash.all_gather_attention,
    ):
        run = functools.partial(attention, axis_name="x")
        mapped = jax.shard_map(
            run, mesh=mesh_of((2,)), in_specs=P("x"), out_specs=P("x"), check_vma=False
        )
        with pytest.raises(TypeError, match="query: got Quantized; needs an array"):
            mapped(query, key, value)


# --- attention_fp8 ------------------------------------------------------------------------------


def run_fp8(**options):
    """Output, LSE and a function of their cotangents for the gradients of query, key and value."""
    attention = functools.partial(jax_flash.attention_fp8, return_residual=True, **options)
    return jax.vjp(attention, *qkv())


def test_output_is_that_of_quantized_arrays():
    options = dict(is_causal=True, query_offset=S - T)
    (out, lse), _ = run_fp8(block_size=8, incoherent_key=KEY, **options)
    query, key, value = qkv()
    mean = value.astype(jnp.float32).mean(1, keepdims=True)  # which is added to the output
    arrays = jax_flash.quantize_fp8(query, key, value - mean, block_size=8, incoherent_key=KEY)
    exact, exact_lse = jax_flash.attention(*arrays, return_residual=True, **options)
    exact = exact + jnp.repeat(mean, query.shape[2] // key.shape[2], axis=2)
    chex.assert_trees_all_close((out, lse), (exact, exact_lse), atol=1e-2)
    alone = jax_flash.attention_fp8(
        *(x[0] for x in qkv()), block_size=8, incoherent_key=KEY, **options
    )
    np.testing.assert_allclose(alone, out[0], atol=1e-2)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
def test_output_has_the_dtype_of_the_inputs(dtype):
    out, lse = jax_flash.attention_fp8(*qkv(dtype), return_residual=True)
    assert out.dtype == dtype and lse.dtype == jnp.float32
    assert relative(out, oracle.attention(*qkv(dtype))[0]) < 0.1


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "dropout"])
def test_gradients_are_those_of_attention_at_the_inputs(name):
    options = OPTIONS[name]
    d_out, d_lse = draw(9, B, T, N, h), draw(10, B, T, N, dtype=jnp.float32)
    floats = {k: options[k] for k in ("bias", "sinks") if k in options}
    others = {k: x for k, x in options.items() if k not in floats}

    def gradients(attention):
        run = lambda arrays, floats: attention(*arrays, return_residual=True, **floats, **others)
        _, vjp = jax.vjp(run, qkv(), floats)
        return vjp((d_out, d_lse))

    in_fp8 = functools.partial(jax_flash.attention_fp8, implementation="xla")
    (ours, ours_of_floats), exact = gradients(in_fp8), gradients(attention_xla)
    chex.assert_trees_all_close((ours, ours_of_floats), exact, atol=1e-2)
    of_query, *_ = oracle.gradients(*qkv(), dout=d_out, dlse=d_lse, **options)
    assert relative(ours[0], of_query) < 2e-2


attention_xla = functools.partial(jax_flash.attention, implementation="xla")


@pytest.mark.parametrize("incoherent", [False, True])
def test_gradients_of_a_loss_are_near(incoherent):
    """The cotangent too is of what FP8 gives."""
    key = KEY if incoherent else None

    def gradients(attention):
        loss = lambda *x: (attention(*x, is_causal=True).astype(jnp.float32) ** 2).sum()
        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*qkv())

    ours = gradients(functools.partial(jax_flash.attention_fp8, incoherent_key=key))
    for x, exact in zip(ours, gradients(attention_xla), strict=True):
        assert 5e-3 < relative(x, exact) < 0.1


def test_padding_does_not_count():
    lengths = dict(query_seq_lengths=np.array([9, 21]), key_value_seq_lengths=np.array([7, 50]))
    query, key, value = qkv()
    padded = query.at[0, 9:].set(1e30), key.at[0, 7:].set(jnp.nan), value.at[0, 7:].set(-1e30)
    in_fp8 = functools.partial(jax_flash.attention_fp8, implementation="xla")
    run = lambda *x: in_fp8(*x, return_residual=True, **lengths)
    results, vjp = jax.vjp(run, *padded)
    plain, plain_vjp = jax.vjp(run, query, key, value)
    np.testing.assert_array_equal(results[0][0, 9:], 0)
    # The same but for the block that the padding is in.
    for x, y in zip(results, plain, strict=True):
        assert relative(x[0, :9], y[0, :9]) < 5e-2
        np.testing.assert_array_equal(x[1], y[1])
    cotangents = draw(9, B, T, N, h), draw(10, B, T, N, dtype=jnp.float32)
    chex.assert_trees_all_close(vjp(cotangents), plain_vjp(cotangents), atol=1e-6)


def test_dropout_drops_the_same_in_both_directions():
    """With a cotangent of ones and values of ones, the gradient of a value adds up its weights."""
    query, key, value = qkv()
    ones = jnp.ones_like(value)
    options = dict(dropout_rate=0.5, dropout_key=jax.random.key(1), is_causal=True)
    out, vjp = jax.vjp(lambda v: jax_flash.attention_fp8(query, key, v, **options), ones)
    (d_value,) = vjp(jnp.ones_like(out))
    np.testing.assert_allclose(
        out.sum(dtype=jnp.float32), d_value.sum(dtype=jnp.float32), rtol=3e-2
    )
    assert relative(out, 1) > 0.1


def test_fp8_under_vmap_checkpoint_and_scan():
    arrays = qkv()
    attention = functools.partial(jax_flash.attention_fp8, is_causal=True)

    def gradient(function):
        loss = lambda *x: (function(*x).astype(jnp.float32) ** 2).sum()
        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*arrays)

    plain = gradient(attention)
    each = jax.vmap(attention)
    chex.assert_trees_all_close(gradient(each), plain, atol=3e-2)
    chex.assert_trees_all_close(gradient(jax.checkpoint(attention)), plain, atol=3e-2)
    chex.assert_trees_all_close(
        gradient(lambda *x: jax.lax.scan(lambda c, _: (c, attention(*x)), 0.0, None, 1)[1][0]),
        plain,
        atol=3e-2,
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True, "query_offset": -3},  # rows that see nothing
        {"key_value_seq_lengths": jnp.array([3, 0])},
    ],
    ids=str,
)
def test_the_mean_of_values_is_not_quantised(options):
    query, key, value = qkv()
    value = value + jnp.bfloat16(100)
    exact = attention_xla(query, key, value, **options).astype(jnp.float32)
    out = jax_flash.attention_fp8(query, key, value, **options).astype(jnp.float32)
    # bfloat16 rounds what is near 100 to 0.25; e4m3 would to 4.
    np.testing.assert_allclose(out, exact, atol=0.6)


def test_fp8_refuses_what_attention_does():
    query, key, value = qkv()
    with pytest.raises(TypeError, match="unexpected keyword argument 'causal'"):
        jax_flash.attention_fp8(query, key, value, causal=True)
    with pytest.raises(TypeError, match="query: got Quantized; needs an array"):
        jax_flash.attention_fp8(*quantized())
    with pytest.raises(ValueError, match="value: got length 7"):
        jax_flash.attention_fp8(query, key, value[:, :7])
    with pytest.raises(ValueError, match="block_size: got -1"):
        jax_flash.attention_fp8(query, key, value, block_size=-1)
    with pytest.raises(NotImplementedError, match=NO_KERNEL):
        jax_flash.attention_fp8(query, key, value, implementation="mosaic_gpu")


# --- with the backward kernels -------------------------------------------------------------------


@pytest.fixture
def forward_in_xla(monkeypatch):
    """A forward in FP8 that takes what the kernel does not, and less time."""
    monkeypatch.setattr(kernel_fp8, "unsupported", lambda call: None)
    monkeypatch.setattr(kernel_fp8, "attention", xla.attention)


def wide(*heads):
    """Of a width that all kernels take."""
    return tuple(draw(i, 2, 64, n, 64) for i, n in enumerate(heads))


def results_and_gradients(attention, arrays, sinks):
    """Output and LSE, and what they give of fixed cotangents."""
    run = lambda arrays, sinks: attention(
        *arrays, sinks=sinks, is_causal=True, return_residual=True, implementation="mosaic_gpu"
    )
    results, vjp = jax.vjp(run, arrays, sinks)
    # Zeros have the sharding of the results.
    random = (draw(9 + n, *x.shape, dtype=x.dtype) for n, x in enumerate(results))
    return results, vjp(tuple(map(jnp.add, map(jnp.zeros_like, results), random)))


@pytest.mark.long
@pytest.mark.usefixtures("forward_in_xla")
def test_gradients_of_the_kernels_where_logits_are_large():
    """Logits up to 150 nats: those in FP8 are off by many, but gradients are not made with them."""
    query, key, value = wide(2, 1, 1)
    arrays, sinks = (query * 6, key * 6, value), draw(8, 2, dtype=jnp.float32)
    with interpret_mode():
        (_, lse), ours = results_and_gradients(jax_flash.attention_fp8, arrays, sinks)
        (_, exact_lse), exact = results_and_gradients(jax_flash.attention, arrays, sinks)
    assert abs(lse - exact_lse).max() > 1
    assert_none_is_zero(exact)
    chex.assert_trees_all_equal(ours, exact)


@pytest.mark.usefixtures("forward_in_xla")
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_sharded_operands_with_gradients(axis_type):
    arrays, sinks = wide(4, 2, 2), draw(8, 4, dtype=jnp.float32)
    mesh = mesh_of((2, 2), axis_type)
    run = functools.partial(results_and_gradients, jax_flash.attention_fp8)
    explicit = axis_type == AxisType.Explicit
    with plain_kernels():
        plain = jax.jit(lambda *x: run(*x))(arrays, sinks)
        sharded = put(mesh, *((x, SPEC) for x in arrays), (sinks, P("y")))
        with jax.set_mesh(mesh) if explicit else contextlib.nullcontext():
            results = jax.jit(lambda *x: run(*x))(sharded[:3], sharded[3])
    chex.assert_trees_all_close(jax.device_get(results), plain, atol=3e-2, rtol=1e-2)


@pytest.mark.usefixtures("forward_in_xla")
@pytest.mark.parametrize("remat", [False, True])
def test_the_forward_in_fp8_runs_once(monkeypatch, remat):
    """Also under `jax.checkpoint`, as the backward pass takes nothing of it."""

    def attention(call):
        out, lse = xla.attention(call)
        return jax.pure_callback(lambda x: x, jax.typeof(out), out), lse

    monkeypatch.setattr(kernel_fp8, "attention", attention)
    attend = functools.partial(jax_flash.attention_fp8, implementation="mosaic_gpu")
    attend = jax.checkpoint(attend) if remat else attend
    loss = lambda *x: attend(*x).astype(jnp.float32).sum()
    assert str(jax.make_jaxpr(jax.grad(loss))(*wide(2, 1, 1))).count("= pure_callback[") == 1


@pytest.mark.parametrize("implementation", ["xla", "mosaic_gpu"])
def test_choice_of_the_backward_pass(monkeypatch, implementation):
    """It is made anew for the inputs' dtype: kernels go back from a forward pass on xla too."""
    made = []

    def attention(call, implementation):
        made.append((call.query.dtype, implementation))
        return xla.attention(call)

    monkeypatch.setattr(dispatch, "attention", attention)
    attend = functools.partial(jax_flash.attention_fp8, implementation=implementation)
    jax.vjp(attend, *qkv())[1](draw(9, B, T, N, h))
    assert made == [(jnp.float8_e4m3fn, implementation), (jnp.bfloat16, implementation)]
