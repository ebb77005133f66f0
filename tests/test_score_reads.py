"""Gradients of what a score_mod captures: which sums they are made of, and by the kernels."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_flash
from jax_flash import autodiff, kernel_scores
from jax_flash.functions import traced
from jax_flash.score_reads import reads_of
from tests.support.cases import long, slow
from tests.support.interpret import interpret_mode
from tests.support.kernel_calls import inputs
from tests.support.sharded import mesh_of

random = np.random.default_rng(0)
SLOPES = random.uniform(0.01, 0.1, 2)
TABLE = random.normal(size=(2, 65))
ENTRIES = random.normal(size=(2, 200))
BUCKETS = random.normal(size=(8, 2))
PLACES = np.arange(200) // 30


def alibi(x, s, b, h, q, k):
    return s - x[h] * jnp.abs(q - k)


def gate(x, s, b, h, q, k):
    return s * jax.nn.sigmoid(x)


def relative(x, s, b, h, q, k):
    return s + x[h, jnp.clip(k - q + 32, 0, 64)]


def t5(x, s, b, h, q, k):
    distance = jnp.abs(q - k).astype(jnp.float32)
    far = 4 + jnp.log(jnp.maximum(distance, 4.0) / 4.0) * 1.2
    bucket = jnp.where(distance < 4, distance, jnp.minimum(far, 7.0))
    return s + jnp.where(q < k, 0.0, x[0, h]) + bucket * x[1, h]


def tokens(x, s, b, h, q, k):
    return s * jax.nn.sigmoid(x[b, k]) + x[h, q]


def places(x, s, b, h, q, k):
    return s + x[jnp.asarray(PLACES)[k], h] * jnp.cos(0.1 * (q - k))


def of_positions(x, s, b, h, q, k):
    return s + x[h, jnp.abs(q - k)]


FUNCTIONS = {
    "alibi": (alibi, SLOPES, "heads"),
    "gate": (gate, np.float32(0.3), "heads"),
    "relative": (relative, TABLE, "diagonals"),
    "t5": (t5, BUCKETS, "heads heads"),
    "tokens": (tokens, ENTRIES, "columns rows"),
    "places": (places, BUCKETS, "columns"),
    "distance": (of_positions, ENTRIES, "diagonals"),
}
# Of reads that have no sums: what the array is read at.
OTHERS = {
    "pairs": lambda x, s, b, h, q, k: s + x[q % 2, k],
    "sums": lambda x, s, b, h, q, k: s + x[0, jnp.minimum(q + k, 199)],
    "scores": lambda x, s, b, h, q, k: s + x[(s > 0.0).astype(jnp.int32), 0],
    "rounded": lambda x, s, b, h, q, k: s + x[0, ((q + 0.5) - k > 0.0).astype(jnp.int32)],
}


def captured(array, dtype=jnp.float32):
    return jnp.asarray(array, dtype)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_kinds_of_reads(name):
    function, array, kinds = FUNCTIONS[name]
    program = traced("score_mod", functools.partial(function, captured(array)), jnp.float32).program
    assert " ".join(read.kind for read in reads_of(program)) == kinds


@pytest.mark.parametrize("name", OTHERS)
def test_what_has_no_sums(name):
    function = functools.partial(OTHERS[name], captured(ENTRIES))
    assert reads_of(traced("score_mod", function, jnp.float32).program) == ()


def gradients(function, array, arrays, implementation, **options):
    query, key, value, d_out, d_lse = arrays

    def loss(array, query):
        out, lse = jax_flash.attention(
            query,
            key,
            value,
            score_mod=functools.partial(function, array),
            implementation=implementation,
            return_residual=True,
            **options,
        )
        return (out * d_out).astype(jnp.float32).sum() + jnp.where(lse > -1e9, lse * d_lse, 0).sum()

    return jax.grad(loss, (0, 1))(array, query)


def check(function, array, arrays, monkeypatch, **options):
    """The kernels' gradients are those of XLA, which they do without."""
    theirs = gradients(function, array, arrays, "xla", **options)

    def refuse(call):
        raise AssertionError("asked XLA")

    monkeypatch.setattr(kernel_scores.xla, "attention", refuse)
    with interpret_mode():
        ours = gradients(function, array, arrays, "mosaic_gpu", **options)
    assert ours[0].dtype == array.dtype
    for got, expected in zip(ours, theirs, strict=True):
        got, expected = (x.astype(jnp.float32) for x in (got, expected))
        largest = float(jnp.abs(expected).max())
        assert largest > 0.01
        chex.assert_trees_all_close(got, expected, rtol=2e-2, atol=2e-2 * largest)


# A number a head; in CI what a difference looks up, sums over keys and queries, and below of
# diagonals.
WHEN = {"alibi": lambda x: x, "t5": long, "tokens": long}


@pytest.mark.parametrize("name", [WHEN.get(x, slow)(x) for x in FUNCTIONS])
def test_gradients_of_what_it_captures(name, monkeypatch):
    function, array, _ = FUNCTIONS[name]
    # Positions of two entries where they read those of their own.
    arrays = inputs(2 if name == "tokens" else 1, 150, 190, 2, 1, 64, jnp.float16)
    check(function, captured(array), arrays, monkeypatch, is_causal=name == "relative")


@pytest.mark.parametrize("kind", [slow(AxisType.Auto), AxisType.Explicit])
def test_where_a_mesh_is_set(kind):
    arrays = inputs(1, 70, 90, 2, 2, 64, jnp.float16)
    alone = gradients(relative, captured(TABLE), arrays, "xla")
    sharding = NamedSharding(mesh_of((1,), kind), PartitionSpec())
    table, *placed = jax.device_put((captured(TABLE), *arrays), sharding)
    with jax.set_mesh(sharding.mesh), interpret_mode(detect_races=False):
        of = functools.partial(gradients, relative, implementation="mosaic_gpu")
        ours = jax.jit(of)(table, placed)
    for got, expected in zip(ours, alone, strict=True):
        largest = float(jnp.abs(expected).max())
        chex.assert_trees_all_close(*map(jax.device_get, (got, expected)), atol=2e-2 * largest)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("axis", [0, 2])
def test_each_device_looks_up_its_own(axis, kind, monkeypatch):
    """Of a kernel whose sums are as many as the head, and a result that is 1 for each."""
    query, key, value, d_out, _ = inputs(2, 70, 90, 2, 2, 64, jnp.float32)
    monkeypatch.setattr(autodiff, "_attention", sums_alone)
    monkeypatch.setattr(autodiff, "unsupported", lambda call: None)
    spec = PartitionSpec(*[None] * axis, "x")
    mesh = mesh_of((2,), kind)
    function = lambda x, s, b, h, q, k: s + x[b, k] + x[h, 100 + q]

    def loss(array, query, key, value, d_out):
        score_mod = functools.partial(function, array)
        out = jax_flash.attention(
            query, key, value, score_mod=score_mod, implementation="mosaic_gpu"
        )
        return (out * d_out).sum()

    with jax.set_mesh(mesh):
        placed = jax.device_put((query, key, value, d_out), NamedSharding(mesh, spec))
        array = jax.device_put(captured(ENTRIES), NamedSharding(mesh, PartitionSpec()))
        ours = jax.device_get(jax.jit(jax.grad(loss))(array, *placed))
    weights = np.asarray(d_out.sum((1, 3)))
    expected = np.zeros_like(ENTRIES)
    expected[:, :90] += weights.sum(1)[:, None]
    expected[:, 100:170] += weights.sum(0)[:, None]
    np.testing.assert_allclose(ours, expected, atol=1e-3)


def sums_alone(settings, operands, sums):
    """In the place of `autodiff._attention`."""
    del settings
    total = sum(x.sum(-1) for x in sums)
    out = jnp.zeros_like(operands.query) + total[:, None, :, None]
    return out, jnp.zeros_like(out[..., 0]).transpose(0, 2, 1)


OPTIONS = {
    "soft cap": dict(logits_soft_cap=2.0),
    "window": dict(local_window_size=(60, 20)),
    "lengths": dict(key_value_seq_lengths=jnp.array([0, 77])),
    "mask": dict(mask=jnp.asarray(random.random((1, 1, 130, 190)) < 0.5)),
    "ids": dict(
        query_segment_ids=jnp.arange(260).reshape(2, 130) // 50,
        key_value_segment_ids=jnp.arange(380).reshape(2, 190) // 50,
    ),
    "dropout": dict(dropout_rate=0.25, dropout_key=jax.random.key(1)),
    "sinks": dict(sinks=jnp.ones(2)),
    "deterministic": dict(deterministic=True),
    "static mask_mod": dict(mask_mod=lambda b, h, q, k: (k <= q) & (q - k < 90)),
    "documents": dict(
        mask_mod=lambda b, h, q, k: jnp.asarray(PLACES)[q] == jnp.asarray(PLACES)[k] + b
    ),
}


# What is beside it in the sums alone, or in no other test of a score_mod; others are also beside a
# bias, whose gradient is of the same kernel.
IN_CI = ("dropout", "deterministic", "documents")


@pytest.mark.parametrize("beside", [long(x) if x in IN_CI else slow(x) for x in OPTIONS])
def test_beside_others(beside, monkeypatch):
    options = OPTIONS[beside]
    of_each_entry = beside in ("lengths", "ids", "documents")
    arrays = inputs(2 if of_each_entry else 1, 130, 190, 2, 2, 64, jnp.bfloat16)
    # Kernels have no room for an array that pairs read beside ids.
    function = (relative, captured(TABLE, jnp.bfloat16))
    if beside == "ids":
        function = (alibi, captured(SLOPES))
    check(*function, arrays, monkeypatch, **options)


@pytest.mark.parametrize("index", ["k", slow("h"), slow("k - q + 15")])
def test_what_is_mapped_has_gradients_of_its_own(index):
    """Where the gradient is taken of what `jax.vmap` gives, too."""
    query, key, value, *_ = inputs(1, 16, 16, 2, 1, 64, jnp.bfloat16)
    tables = jnp.asarray(np.random.default_rng(0).standard_normal((2, 31)), jnp.float32)
    read = {"h": lambda t, h, q, k: t[h], "k": lambda t, h, q, k: t[k]}.get(
        index, lambda t, h, q, k: t[k - q + 15]
    )

    def total(tables, implementation):
        def one(table):
            score_mod = lambda s, b, h, q, k: s + read(table, h, q, k) * (1 + k % 2)
            out = jax_flash.attention(
                query, key, value, score_mod=score_mod, implementation=implementation
            )
            return (out.astype(jnp.float32) ** 2).sum()

        return jax.vmap(one)(tables).sum()

    expected = jax.grad(total)(tables, "xla")
    with interpret_mode():
        found = jax.grad(total)(tables, "mosaic_gpu")
    chex.assert_trees_all_close(found, expected, atol=0.02 * float(jnp.abs(expected).max()))
