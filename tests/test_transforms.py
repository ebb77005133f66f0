"""JAX's transformations of attention(), on the implementation that every machine has."""

import functools

import chex
import jax
import jax.export
import jax.numpy as jnp
import jax.test_util
import numpy as np
import pytest
from absl.testing import parameterized

import jax_flash
from jax_flash import xla
from tests import oracle

B, T, S, N, K, H = 2, 5, 6, 4, 2, 8

attention = functools.partial(jax_flash.attention, implementation="xla")


def draw(seed, *shape):
    rng = np.random.default_rng(seed)  # nothing to compile for each shape
    return jnp.asarray(rng.standard_normal(shape, np.float32))


def qkv():
    return draw(0, B, T, N, H), draw(1, B, S, K, H), draw(2, B, S, K, H)


OPTIONS = {
    "bias": draw(3, 1, N, T, S),
    "mask": np.random.default_rng(0).random((B, 1, T, S)) < 0.8,
    "is_causal": True,
    "query_offset": np.array([1, 3]),
    "local_window_size": (4, 0),
    "query_seq_lengths": np.array([5, 3]),
    "key_value_seq_lengths": np.array([6, 4]),
    "query_segment_ids": np.array([[0, 0, 0, 1, 1], [0, 0, 1, 1, 1]]),
    "key_value_segment_ids": np.array([[0, 0, 1, 1, 0, 1], [0, 1, 0, 1, 1, 1]]),
    "logits_soft_cap": 3.0,
    "sinks": draw(4, N),
}


class Variants(chex.TestCase):
    """With and without jit, against float64."""

    @chex.variants(with_jit=True, without_jit=True)
    @parameterized.named_parameters(("plain", {}), ("options", OPTIONS))
    def test_output_and_gradients(self, options):
        dout, dlse = draw(8, B, T, N, H), draw(9, B, T, N)
        expected = oracle.attention(*qkv(), **options)
        expected_gradients = oracle.gradients(*qkv(), dout=dout, dlse=dlse, **options)
        static = {k: v for k, v in options.items() if k not in ("bias", "sinks")}

        @self.variant
        def forward_and_backward(query, key, value, bias, sinks):
            def function(query, key, value, bias, sinks):
                return attention(
                    query, key, value, bias, sinks=sinks, return_residual=True, **static
                )

            outputs, vjp = jax.vjp(function, query, key, value, bias, sinks)
            return outputs, vjp((dout, dlse))

        arguments = (*qkv(), options.get("bias"), options.get("sinks"))
        (out, lse), gradients = forward_and_backward(*arguments)
        chex.assert_trees_all_close(out, np.float32(expected[0]), atol=1e-5)
        chex.assert_trees_all_close(lse, np.float32(expected[1]), atol=1e-5)
        for ours, theirs in zip(gradients, expected_gradients, strict=True):
            if theirs is not None:
                chex.assert_trees_all_close(ours, np.float32(theirs), atol=2e-5, rtol=1e-5)

    @chex.variants(with_jit=True, without_jit=True)
    def test_traced_scale_offset_and_key(self):
        @self.variant
        def function(scale, offset, key):
            return attention(
                *qkv(),
                scale=scale,
                is_causal=True,
                query_offset=offset,
                dropout_rate=0.3,
                dropout_key=key,
            )

        expected = attention(
            *qkv(),
            scale=0.3,
            is_causal=True,
            query_offset=2,
            dropout_rate=0.3,
            dropout_key=jax.random.key(5),
        )
        out = function(jnp.float32(0.3), jnp.int32(2), jax.random.key(5))
        chex.assert_trees_all_close(out, expected, atol=1e-6)


# --- vmap ---------------------------------------------------------------------------------------

M = 3  # mapped size

# Arguments beside query, key and value: without the mapped axis, and what they need beside them.
MAPPED = {
    "bias": (draw(3, M, 1, N, T, S), {}),
    "bias of rows": (draw(3, M, 1, 1, T, 1), {}),
    "mask": (np.random.default_rng(0).random((M, B, 1, T, S)) < 0.7, {}),
    "sinks": (draw(4, M, N), {}),
    "scale": (jnp.array([0.1, 0.5, 1.0]), {}),
    "query_offset": (np.array([0, 2, -1]), {"is_causal": True}),
    "query_seq_lengths": (np.array([[5, 2], [0, 3], [4, 1]]), {}),
    "key_value_seq_lengths": (np.array([[6, 2], [0, 3], [4, 1]]), {}),
    "query_segment_ids": (
        np.random.default_rng(0).integers(0, 2, (M, B, T)),
        {"key_value_segment_ids": OPTIONS["key_value_segment_ids"]},
    ),
    "dropout_key": (jax.random.split(jax.random.key(0), M), {"dropout_rate": 0.4}),
}


@pytest.mark.parametrize("name", MAPPED)
def test_vmap_of_one_argument(name):
    values, others = MAPPED[name]
    name = name.split()[0]

    def function(x):
        return attention(*qkv(), return_residual=True, **others, **{name: x})

    mapped = jax.vmap(function)(jnp.asarray(values))
    looped = jax.tree.map(lambda *x: jnp.stack(x), *[function(x) for x in values])
    chex.assert_trees_all_close(mapped, looped, atol=1e-5)


@pytest.mark.parametrize(
    ("in_axes", "out_axes"),
    [
        ((0, 0, 0), 0),
        ((1, 1, 1), 1),
        ((2, 2, 2), 2),
        ((3, 3, 3), 3),
        ((4, 4, 4), -1),
        ((0, None, None), 0),
        ((None, 3, None), 2),
        ((None, None, -1), 1),
        ((1, 4, None), 0),
    ],
)
def test_vmap_over_any_axis(in_axes, out_axes):
    arguments = [
        x if axis is None else jnp.stack([x, -x, 2 * x], axis)
        for x, axis in zip(qkv(), in_axes, strict=True)
    ]

    def function(query, key, value):
        return attention(query, key, value, is_causal=True)

    def gradients(query, key, value):
        return jax.grad(lambda *x: (function(*x) ** 2).sum(), argnums=(0, 1, 2))(query, key, value)

    def at(i):
        return [
            x if axis is None else jnp.take(x, i, axis)
            for x, axis in zip(arguments, in_axes, strict=True)
        ]

    mapped = jax.vmap(function, in_axes, out_axes)(*arguments)
    looped = jnp.stack([function(*at(i)) for i in range(M)], out_axes)
    chex.assert_trees_all_close(mapped, looped, atol=1e-5)
    mapped = jax.vmap(gradients, in_axes)(*arguments)
    looped = jax.tree.map(lambda *x: jnp.stack(x), *[gradients(*at(i)) for i in range(M)])
    chex.assert_trees_all_close(mapped, looped, atol=1e-4)


def test_vmap_takes_the_place_of_the_batch():
    query, key, value = qkv()
    lengths = jnp.array([4, 6])

    def one(query, key, value, length):
        return attention(
            query, key, value, is_causal=True, key_value_seq_lengths=length, return_residual=True
        )

    mapped = jax.vmap(one)(query, key, value, lengths)
    batched = attention(
        query, key, value, is_causal=True, key_value_seq_lengths=lengths, return_residual=True
    )
    chex.assert_trees_all_close(mapped, batched, atol=1e-6)


def test_vmap_over_heads():
    query, key, value = qkv()
    grouped = query.reshape(B, T, K, N // K, H)

    def one_key_head(query, key, value):
        return attention(query, key[:, :, None], value[:, :, None])

    mapped = jax.vmap(one_key_head, in_axes=2, out_axes=2)(grouped, key, value)
    chex.assert_trees_all_close(mapped.reshape(B, T, N, H), attention(query, key, value), atol=1e-6)


def test_nested_vmap():
    query, key, value = qkv()
    queries, keys = jnp.stack([query, 2 * query]), jnp.stack([key, -key, 3 * key], 1)
    inner = jax.vmap(attention, in_axes=(None, 1, None))
    out = jax.vmap(inner, in_axes=(0, None, None))(queries, keys, value)
    chex.assert_shape(out, (2, 3, B, T, N, H))
    chex.assert_trees_all_close(out[1, 2], attention(queries[1], keys[:, 2], value), atol=1e-6)


def test_gradient_of_vmap_sums_over_what_is_not_mapped():
    query, key, value = qkv()
    queries = jnp.stack([query, -query, 2 * query])

    def loss(key):
        return (jax.vmap(attention, in_axes=(0, None, None))(queries, key, value) ** 2).sum()

    def looped(key):
        return sum((attention(q, key, value) ** 2).sum() for q in queries)

    chex.assert_trees_all_close(jax.grad(loss)(key), jax.grad(looped)(key), atol=1e-4)


# --- derivatives --------------------------------------------------------------------------------


def small(*names):
    """Query, key and value of one head, and a function of the named arguments."""
    arguments = {"query": draw(0, 3, 1, 2), "key": draw(1, 4, 1, 2), "value": draw(2, 4, 1, 2)}
    arguments |= {"bias": draw(3, 1, 3, 4), "sinks": draw(4, 1)}

    def function(*given):
        return attention(
            **arguments | dict(zip(names, given, strict=True)),
            is_causal=True,
            query_offset=1,
            return_residual=True,
        )

    return function, [arguments[name] for name in names]


@pytest.mark.parametrize("name", ["query", "key", "value", "bias", "sinks"])
def test_jacobians_agree(name):
    function, (x,) = small(name)
    reverse, forward = jax.jit(jax.jacrev(function))(x), jax.jit(jax.jacfwd(function))(x)
    chex.assert_shape(reverse, [(3, 1, 2, *x.shape), (3, 1, *x.shape)])
    chex.assert_trees_all_close(reverse, forward, atol=1e-5)


def test_numerical_derivatives_to_second_order():
    function, arguments = small("query", "key", "bias", "sinks")
    jax.test_util.check_grads(
        jax.jit(function), arguments, order=2, modes=("fwd", "rev"), atol=5e-2, rtol=5e-2, eps=1e-2
    )


def test_linearize():
    function, arguments = small("query", "key")
    outputs, linear = jax.linearize(function, *arguments)
    chex.assert_trees_all_close(outputs, function(*arguments), atol=1e-6)
    tangents = [jnp.ones_like(x) for x in arguments]
    expected = jax.jvp(function, arguments, tangents)[1]
    chex.assert_trees_all_close(linear(*tangents), expected, atol=1e-5)


def test_no_nan_from_empty_rows_under_debug_nans():
    mask = np.ones((B, 1, T, S), bool)
    mask[0, 0, 2] = False
    with jax.debug_nans(True):
        gradients = jax.grad(lambda *x: (attention(*x, mask=mask) ** 2).sum(), argnums=(0, 1, 2))(
            *qkv()
        )
    assert not gradients[0][0, 2].any()


# --- checkpoint and scan ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy",
    [None, jax.checkpoint_policies.everything_saveable, jax.checkpoint_policies.dots_saveable],
    ids=["nothing", "everything", "dots"],
)
def test_checkpoint(policy):
    def loss(function, *arguments):
        out, lse = function(*arguments)
        return (out**2).sum() + lse.sum()

    function = functools.partial(attention, is_causal=True, return_residual=True)
    kept = jax.grad(functools.partial(loss, function), argnums=(0, 1, 2))(*qkv())
    remade = jax.checkpoint(function, policy=policy)
    again = jax.jit(jax.grad(functools.partial(loss, remade), argnums=(0, 1, 2)))(*qkv())
    chex.assert_trees_all_close(kept, again, atol=1e-5)


def products_in(jaxpr) -> int:
    """Of a jaxpr and those within, one that stands there twice too, which its text has once."""
    count = 0
    for equation in jaxpr.eqns:
        count += equation.primitive.name == "dot_general"
        for x in jax.tree.leaves(equation.params):
            within = getattr(x, "jaxpr", x)
            if hasattr(within, "eqns"):
                count += products_in(within)
    return count


@pytest.mark.parametrize("name", ["attention", "attention in chunks", "attention_fp8"])
@pytest.mark.parametrize("options", [{}, {"return_residual": True}], ids=str)
def test_checkpoint_names_save_the_forward_pass(name, options, monkeypatch):
    """With them a checkpoint computes no more products than without a checkpoint."""
    if name == "attention in chunks":
        monkeypatch.setattr(xla, "LOGITS_BYTES", 1)
        monkeypatch.setattr(xla, "MIN_ROWS", 2)
    function = getattr(jax_flash, name.split()[0])

    def loss(*arrays):
        results = jax.tree.leaves(function(*arrays, implementation="xla", **options))
        return sum((x**2).sum() for x in results)

    def products(loss):
        return products_in(jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(*qkv()).jaxpr)

    save = jax.checkpoint_policies.save_only_these_names(*jax_flash.CHECKPOINT_NAMES)
    assert products(jax.checkpoint(loss, policy=save)) == products(loss)
    assert products(jax.checkpoint(loss)) == products(loss) + 2


def test_dropout_under_checkpoint_drops_the_same():
    def loss(function, query, key, value):
        return (function(query, key, value) ** 2).sum()

    function = functools.partial(attention, dropout_rate=0.5, dropout_key=jax.random.key(3))
    kept = jax.grad(functools.partial(loss, function))(*qkv())
    again = jax.grad(functools.partial(loss, jax.checkpoint(function)))(*qkv())
    chex.assert_trees_all_close(kept, again, atol=1e-5)


def test_scan_over_layers():
    x, layers = draw(0, B, T, K, H), draw(1, 2, 3, H, H) / H**0.5

    def layer(x, weights):
        query, key, value = (x @ w for w in weights)
        return x + attention(query, key, value, is_causal=True), None

    def scanned(layers):
        return (jax.lax.scan(jax.checkpoint(layer), x, layers)[0] ** 2).sum()

    def unrolled(layers):
        y = x
        for weights in layers:
            y, _ = layer(y, weights)
        return (y**2).sum()

    ours, expected = (jax.jit(jax.value_and_grad(f))(layers) for f in (scanned, unrolled))
    chex.assert_trees_all_close(ours, expected, rtol=1e-4, atol=1e-3)


def test_decoding_in_a_while_loop():
    query, key, value = qkv()
    expected = attention(query, key[:, :T], value[:, :T], is_causal=True)

    def step(t, out):
        one = jax.lax.dynamic_slice_in_dim(query, t, 1, axis=1)
        one = attention(one, key, value, is_causal=True, query_offset=t)
        return jax.lax.dynamic_update_slice_in_dim(out, one, t, axis=1)

    out = jax.lax.fori_loop(0, T, step, jnp.zeros_like(query))
    chex.assert_trees_all_close(out, expected, atol=1e-6)


# --- compilation --------------------------------------------------------------------------------


def test_jit_traces_once_for_one_shape():
    @jax.jit
    @chex.assert_max_traces(n=1)
    def function(query, key, value):
        return attention(query, key, value, is_causal=True)

    query, key, value = qkv()
    chex.assert_trees_all_close(function(query, key, value), function(query, key, value))
    function(-query, key, value)


def test_jit_with_donated_query():
    query, key, value = qkv()
    expected = attention(query, key, value)
    out = jax.jit(attention, donate_argnums=0)(query, key, value)
    assert query.is_deleted()
    assert not key.is_deleted()
    chex.assert_trees_all_close(out, expected, atol=1e-6)


def test_jit_with_static_options():
    function = jax.jit(
        attention, static_argnames=("is_causal", "local_window_size", "return_residual")
    )
    ours = function(*qkv(), is_causal=True, local_window_size=(2, 0), return_residual=True)
    expected = attention(*qkv(), is_causal=True, local_window_size=(2, 0), return_residual=True)
    chex.assert_trees_all_close(ours, expected, atol=1e-6)


def test_eval_shape():
    shapes = [jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in qkv()]
    out, lse = jax.eval_shape(functools.partial(attention, return_residual=True), *shapes)
    assert (out.shape, out.dtype) == ((B, T, N, H), jnp.bfloat16)
    assert (lse.shape, lse.dtype) == ((B, T, N), jnp.float32)


def exported():
    """A function, the same exported, and a loss of either."""

    def function(query, key, value, lengths):
        return attention(query, key, value, is_causal=True, key_value_seq_lengths=lengths)

    def loss_and_gradients(function):
        def loss(*arguments):
            return (function(*arguments, lengths) ** 2).sum()

        return jax.value_and_grad(loss, argnums=(0, 1, 2))(*qkv())

    lengths = jnp.array([6, 3])
    return function, jax.export.export(jax.jit(function))(*qkv(), lengths), loss_and_gradients


def test_export():
    function, export, loss_and_gradients = exported()
    chex.assert_trees_all_close(
        loss_and_gradients(export.call), loss_and_gradients(function), atol=1e-4, rtol=1e-5
    )


def test_export_round_trip():
    pytest.importorskip("flatbuffers", reason="jax.export needs flatbuffers to serialise")
    function, export, loss_and_gradients = exported()
    again = jax.export.deserialize(export.serialize(vjp_order=1))
    chex.assert_trees_all_close(
        loss_and_gradients(again.call), loss_and_gradients(function), atol=1e-4, rtol=1e-5
    )


@pytest.mark.parametrize("platform", ["cuda", "tpu", "rocm"])
def test_export_for_another_platform(platform):
    exported = jax.export.export(
        jax.jit(functools.partial(attention, is_causal=True)), platforms=[platform]
    )(*qkv())
    assert exported.platforms == (platform,)
