"""score_mod on the kernels in interpret mode, with race detection, beside float64."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_flash
from jax_flash.functions import soft_cap_of, traced
from jax_flash.kernel_scores import kernel_function
from pallas_kernels.on_rows import OnRows, Part, as_captured
from tests.support.cases import long, slow
from tests.support.interpret import interpret_mode
from tests.support.kernel_calls import check, few_thread_blocks, inputs
from tests.support.sharded import mesh_of

SLOPES = jnp.array([0.5, 0.25, 0.125, 0.0625])
TABLE = jnp.asarray(np.random.default_rng(0).normal(size=(4, 65)), jnp.float32)
BUCKETS = TABLE.T
NARROW_TABLE = TABLE.astype(jnp.bfloat16)
ENTRIES = jnp.asarray(np.random.default_rng(1).normal(size=(2, 300)), jnp.float32)

SHOWN = jnp.asarray(np.random.default_rng(2).random((1, 1, 150, 200)) < 0.5)
IDS = jnp.arange(200)[None] // 70


def alibi(score, b, h, q_idx, kv_idx):
    return score - SLOPES[h] * jnp.abs(q_idx - kv_idx)


def linear(score, b, h, q_idx, kv_idx):
    """Positions with two factors, which tiles multiply with one another first."""
    return score + 0.5 * (SLOPES[h] * (kv_idx - q_idx))


def relative(score, b, h, q_idx, kv_idx):
    return score + TABLE[h, jnp.clip(kv_idx - q_idx + 32, 0, 64)]


def relative_narrow(score, b, h, q_idx, kv_idx):
    return score + NARROW_TABLE[h, jnp.clip(kv_idx - q_idx + 32, 0, 64)]


def cap(score, b, h, q_idx, kv_idx):
    return 2.0 * jnp.tanh(score / 2.0)


def gate(score, b, h, q_idx, kv_idx):
    return score * jax.nn.sigmoid(ENTRIES[b, kv_idx]) + ENTRIES[b, q_idx]


def hiding(score, b, h, q_idx, kv_idx):
    """Every third key, and all keys of some queries."""
    return jnp.where(((kv_idx + q_idx) % 3 == 0) | (q_idx % 50 == 7), -jnp.inf, score)


def far(score, b, h, q_idx, kv_idx):
    """Rows far from 0, and some whose keys are as good as hidden."""
    return jnp.where(q_idx % 40 == 3, -1e30, score + jnp.where(q_idx % 40 == 5, 1e6, 0.0))


def constant(score, b, h, q_idx, kv_idx):
    return 0.25 * h


def of_the_past(score, b, h, q_idx, kv_idx):
    """NaN, with its slope, where causality hides the key."""
    return score * jnp.sqrt((q_idx - kv_idx).astype(jnp.float32))


def of_what_is_there(score, b, h, q_idx, kv_idx):
    """NaN and infinite from query 100 and key 130 on, with slopes."""
    return score * jnp.log(130.0 - kv_idx) + jnp.log(99.5 - q_idx)


@pytest.mark.parametrize(
    ("T", "S", "N", "K", "H", "function", "options"),
    [
        (100, 130, 2, 1, 64, linear, dict(is_causal=True)),
        long(150, 400, 1, 1, 64, linear, {}),
        slow(100, 130, 2, 1, 64, alibi, dict(is_causal=True)),
        slow(150, 200, 1, 1, 128, cap, {}),
        slow(150, 200, 2, 2, 64, relative, {}),
        slow(150, 200, 2, 1, 128, relative_narrow, dict(is_causal=True)),
        long(130, 290, 2, 1, 80, gate, {}),
        long(170, 200, 1, 1, 64, hiding, {}),
        slow(170, 200, 1, 1, 128, hiding, dict(is_causal=True)),
        slow(170, 200, 1, 1, 64, far, {}),
        long(170, 200, 1, 1, 128, far, {}),
        slow(100, 150, 2, 1, 64, constant, {}),
        # Beside others.
        slow(200, 300, 1, 1, 64, cap, dict(is_causal=True, local_window_size=(90, 0))),
        long(150, 200, 2, 1, 128, alibi, dict(logits_soft_cap=2.0)),
        slow(
            150, 200, 2, 1, 64, cap, dict(key_value_seq_lengths=jnp.array([130])),
        ),
        slow(
            150, 200, 2, 1, 128, alibi,
            dict(query_seq_lengths=jnp.array([70]), key_value_seq_lengths=jnp.array([130])),
        ),
        slow(150, 200, 2, 1, 64, alibi, dict(dropout_rate=0.25)),
        slow(150, 200, 2, 1, 128, relative, dict(mask_mod=lambda b, h, q, k: (q - k) % 3 == 0)),
        long(150, 200, 1, 1, 64, relative, dict(mask=SHOWN)),
        long(200, 200, 2, 1, 64, alibi, dict(query_segment_ids=IDS, key_value_segment_ids=IDS)),
        slow(150, 384, 1, 1, 128, alibi, dict(sinks=jnp.array([0.7]))),
        slow(150, 200, 2, 1, 64, cap, dict(deterministic=True)),
        slow(150, 200, 2, 1, 128, relative, dict(deterministic=True)),
    ],
)  # fmt: skip
def test_in_interpret_mode(T, S, N, K, H, function, options):
    with interpret_mode():
        check(inputs(1, T, S, N, K, H, jnp.bfloat16), score_mod=function, **options)


@pytest.mark.parametrize(
    ("H", "function", "options"),
    [
        (64, of_the_past, dict(is_causal=True)),
        slow(64, of_the_past, dict(is_causal=True, deterministic=True)),
        slow(128, of_what_is_there, {}),
        long(64, of_what_is_there, dict(deterministic=True)),
    ],
)
def test_nan_of_pairs_that_are_hidden_or_none(H, function, options):
    """Beside XLA, as derivatives of plain attention would be NaN."""
    query, key, value, d_out, _ = inputs(1, 100, 130, 2, 1, H, jnp.bfloat16)

    def results(implementation):
        attention = functools.partial(
            jax_flash.attention, score_mod=function, implementation=implementation, **options
        )
        out, vjp = jax.vjp(attention, query, key, value)
        return out, *vjp(d_out)

    with interpret_mode(detect_races=False):
        ours = results("mosaic_gpu")
    theirs = results("xla")
    chex.assert_tree_all_finite(theirs)
    for got, expected in zip(ours, theirs, strict=True):
        largest = float(jnp.abs(expected).max())
        chex.assert_trees_all_close(got, expected, rtol=2e-2, atol=2e-2 * largest)


def test_gradients_of_what_it_captures():
    """They come from XLA, also where each of a batch of calls has arrays of its own."""
    query, key, value, d_out, _ = inputs(1, 100, 130, 2, 1, 64, jnp.bfloat16)

    def loss(table, query, implementation):
        score_mod = lambda s, b, h, q_idx, kv_idx: (
            s + table[h, jnp.clip(kv_idx - q_idx + 32, 0, 64)]
        )
        out = jax_flash.attention(
            query, key, value, score_mod=score_mod, implementation=implementation
        )
        return (out * d_out).astype(jnp.float32).sum()

    def gradients(implementation):
        of_one = jax.grad(functools.partial(loss, implementation=implementation), (0, 1))
        of_many = jax.jit(jax.vmap(of_one, (0, None)))
        return of_many(jnp.stack([TABLE[:2], 2 * TABLE[:2]]), query)

    with interpret_mode(detect_races=False):
        ours = gradients("mosaic_gpu")
    theirs = gradients("xla")
    assert jnp.abs(theirs[0]).max() > 0.1
    chex.assert_trees_all_close(ours, theirs, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("kind", [AxisType.Auto, slow(AxisType.Explicit)])
def test_lowers_where_operands_are_sharded(kind):
    mesh = mesh_of((2,), kind)
    sharding = NamedSharding(mesh, PartitionSpec("x"))
    x = jax.ShapeDtypeStruct((2, 200, 2, 64), jnp.bfloat16, sharding=sharding)
    entries = jax.ShapeDtypeStruct(ENTRIES.shape, jnp.float32)

    def loss(x, entries):
        score_mod = lambda s, b, h, q_idx, kv_idx: s * entries[b, kv_idx] + entries[h, q_idx]
        out = jax_flash.attention(x, x, x, score_mod=score_mod, implementation="mosaic_gpu")
        return out.astype(jnp.float32).sum()

    with jax.set_mesh(mesh):
        traced_gradients = jax.jit(jax.grad(loss, (0, 1))).trace(x, entries)
        text = traced_gradients.lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text or "CustomSPMDPartitioning" in text


@pytest.mark.long
def test_a_thread_block_walks_many_tiles():
    with interpret_mode():
        arrays = inputs(1, 200, 200, 2, 1, 64, jnp.float16)
        check(arrays, score_mod=relative, config=few_thread_blocks(64, 2))


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (
            lambda s, b, h, q, k: s + jax.lax.erf_inv(jnp.tanh(s)),
            "erf_inv is none of the operations",
        ),
        (lambda s, b, h, q, k: s + TABLE[h].sum(), "of a captured array .* not of one element"),
        (lambda s, b, h, q, k: s + jax.lax.rem(q * 0.1, 3.0), "a remainder of floats"),
        (
            lambda s, b, h, q, k: jnp.where((q - k).astype(bool), s, 0.0),
            "it takes a number for a bool",
        ),
    ],
)
def test_what_kernels_cannot_do_is_said(function, reason):
    query, key, value, *_ = inputs(1, 16, 16, 2, 1, 64, jnp.bfloat16)
    assert jnp.isfinite(jax_flash.attention(query, key, value, score_mod=function)).all()
    with pytest.raises(NotImplementedError, match=reason):
        jax_flash.attention(query, key, value, score_mod=function, implementation="mosaic_gpu")


def _of_kernels(function):
    program = traced("score_mod", function, jnp.float32).program
    return kernel_function(program, None)


def test_what_adds_has_no_slope():
    assert _of_kernels(alibi).adds and _of_kernels(relative).adds
    assert (
        not _of_kernels(cap).adds
        and not _of_kernels(hiding).adds
        and not _of_kernels(constant).adds
    )


def test_positions_are_converted_once_a_row_and_column():
    """Not their difference, which is there for each pair."""
    operations = _of_kernels(alibi).value
    names = [x.equation.primitive.name for x in operations.operations if x.array is None]
    assert "convert_element_type" not in names
    assert set(operations.floats) == set(operations.arguments[-2:])


def test_what_varies_most_is_last_in_memory():
    """So that neighbours read neighbours, whatever the order of axes."""
    buckets_first = lambda s, b, h, q, k: s + BUCKETS[jnp.clip(k - q, 0, 64), h]
    assert _of_kernels(buckets_first).value.orders == {0: (1, 0)}
    assert _of_kernels(relative).value.orders == {0: (0, 1)}


@pytest.mark.parametrize(
    "function",
    [
        alibi,
        relative,
        relative_narrow,
        cap,
        gate,
        hiding,
        constant,
        lambda s, b, h, q, k: s + BUCKETS[jnp.clip(k - q, 0, 64), h] + TABLE[h, k % 65],
        lambda s, b, h, q, k: s * s + jnp.maximum(q, k).astype(jnp.float32) / 3 - jnp.exp(-abs(s)),
        lambda s, b, h, q, k: jnp.minimum(s, 0.5) * (k + q) + jnp.where(q - k > 3, s, 0.0),
        lambda s, b, h, q, k: jnp.where(q / 49 >= 1, s / 49, ENTRIES[0, k] + s),
    ],
)
def test_values_and_slopes_on_tiles(function):
    traced_function = traced("score_mod", function, jnp.float32)
    operations = kernel_function(traced_function.program, None).value_and_slope
    assert operations.unsupported() is None
    arrays = as_captured(operations, traced_function.captured)
    head, first_row, rows, width = 1, 30, 24, 16
    row, column = (jnp.arange(n, dtype=jnp.int32) for n in (rows, width))
    zero, count = Part(jnp.int32(0)), operations.captured
    given = *[zero] * (count + 1), zero, Part(jnp.int32(head)), Part(row + first_row, by_row=True)
    load = lambda array, place: arrays[array][place.x]
    on_rows = OnRows(operations, (*given, zero), {count, count + 4}, rows, load)
    scores = jnp.asarray(np.random.default_rng(3).normal(size=(rows, width)), jnp.float32)
    for first in (0, 40):
        keys = Part(column + first, by_column=True)
        with interpret_mode(detect_races=False):
            got = on_rows.evaluate({count: Part(scores, True, True), count + 4: keys}, width)
        indices = 0, head, row[:, None] + first_row, column + first
        of_scores = functools.partial(lambda indices, x: function(x, *indices), indices)
        expected = jax.jvp(of_scores, (scores,), (jnp.ones_like(scores),))
        expected = [jnp.broadcast_to(x, scores.shape) for x in expected]
        chex.assert_trees_all_close(list(got), expected, rtol=1e-5, atol=1e-5)


def test_a_soft_cap_is_known_as_one():
    score = lambda function: traced("score_mod", function, jnp.float32).program
    assert soft_cap_of(score(cap)) == 2.0
    assert soft_cap_of(score(lambda s, *_: jnp.tanh(s / 50) * 50)) == 50.0
    for function in (
        alibi,
        lambda s, *_: 3.0 * jnp.tanh(s / 2.0),
        lambda s, *_: -2.0 * jnp.tanh(s / -2.0),
        lambda s, *_: 2.0 * jnp.tanh(s / 2.0) + 1.0,
        lambda s, b, h, q, k: 2.0 * jnp.tanh(q / 2.0),
        lambda s, b, h, q, k: s,
    ):
        assert soft_cap_of(score(function)) is None


def test_a_mask_may_use_a_tanh():
    """Of it kinds of blocks are asked for outside of a kernel."""
    mask_mod = lambda b, h, q_idx, kv_idx: jnp.tanh((q_idx - kv_idx) / 64) >= 0
    assert jax_flash.block_mask(mask_mod, 1, 1, 128, 128).share == 0.75


ONE, NESTED = jnp.asarray([0.7]), jax.jit(lambda h: TABLE[h])


@pytest.mark.parametrize(
    "function",
    [
        lambda s, b, h, q, k: 0.5,
        lambda s, b, h, q, k: s * ONE[0],
        lambda s, b, h, q, k: s + ONE.squeeze(),
        lambda s, b, h, q, k: s + NESTED(h)[k],
        lambda s, b, h, q, k: 1e30 * jnp.tanh(s / 1e30),
        lambda s, b, h, q, k: s + jax.lax.stop_gradient(TABLE)[h, k],
    ],
)
def test_functions_that_are_written_in_other_ways(function):
    query, key, value, *_ = inputs(1, 16, 24, 2, 1, 64, jnp.bfloat16)
    run = functools.partial(jax_flash.attention, score_mod=function)
    lowered = jax.jit(functools.partial(run, implementation="mosaic_gpu")).trace(query, key, value)
    assert "mosaic_gpu" in lowered.lower(lowering_platforms=("cuda",)).as_text()
    assert jnp.isfinite(run(query, key, value)).all()


@pytest.mark.long
def test_what_is_held_constant_has_no_derivative():
    """The score in a gate, and an array that the function captures."""
    arrays = inputs(1, 40, 60, 1, 1, 64, jnp.bfloat16)[:3]
    table = jnp.linspace(-1.0, 1.0, 60)

    def gradients(implementation, arrays):
        def loss(table, *arrays):
            def function(score, b, h, q_idx, kv_idx):
                held = jax.lax.stop_gradient((table[kv_idx], jax.nn.sigmoid(score)))
                return score * held[1] + held[0]

            run = functools.partial(jax_flash.attention, score_mod=function)
            return (run(*arrays, implementation=implementation).astype(jnp.float32) ** 2).sum()

        return jax.grad(loss, (0, 1, 2, 3))(table, *arrays)

    with interpret_mode():
        ours = gradients("mosaic_gpu", arrays)
    theirs = gradients("xla", [x.astype(jnp.float32) for x in arrays])
    assert not ours[0].any() and not theirs[0].any()
    for x, own in zip(ours[1:], theirs[1:], strict=True):
        atol = 0.02 * float(jnp.abs(own).max())
        chex.assert_trees_all_close(x.astype(jnp.float32), own, atol=atol)


FLAT = jnp.full((300,), 1e9, jnp.float32)
GROUPS = jnp.arange(300, dtype=jnp.float32) // 50
CANCELLING = {
    "rows less columns": lambda s, b, h, q, k: s + (FLAT[q] - FLAT[k]),
    "timestamps": lambda s, b, h, q, k: s - 0.3 * ((FLAT[q] + 64 * q) - (FLAT[k] + 64 * k)),
    "steep": lambda s, b, h, q, k: s - 12345.678 * (q.astype(jnp.float32) - k),
    "groups": lambda s, b, h, q, k: s - 1e9 * (GROUPS[q] - GROUPS[k]) + 0.01 * k,
    "least": lambda s, b, h, q, k: s + jnp.finfo(jnp.float32).min * (GROUPS[q] - GROUPS[k]),
    "least of positions": lambda s, b, h, q, k: s + jnp.finfo(jnp.float32).min * (q - k),
}


# When they run.
WHEN = {"least of positions": long, "rows less columns": long}


@pytest.mark.parametrize("name", [WHEN.get(x, slow)(x) for x in CANCELLING])
def test_what_cancels_in_a_function_cancels_in_kernels(name):
    query, key, value, *_ = inputs(1, 130, 300, 1, 1, 64, jnp.bfloat16)

    def gradients(implementation):
        run = functools.partial(jax_flash.attention, is_causal=True, implementation=implementation)
        run = functools.partial(run, score_mod=CANCELLING[name], return_residual=True)

        def loss(query, key, value):
            out, lse = run(query, key, value)
            return (out.astype(jnp.float32) ** 2).sum(), (out, lse)

        return jax.grad(loss, (0, 1, 2), has_aux=True)(query, key, value)

    expected = gradients("xla")
    with interpret_mode():
        found = gradients("mosaic_gpu")
    for x, own in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        x, own = x.astype(jnp.float32), own.astype(jnp.float32)
        chex.assert_trees_all_close(x, own, atol=0.02 * float(jnp.abs(own).max()) + 1e-3)


@pytest.mark.parametrize("implementation", [long("xla"), "mosaic_gpu"])
def test_inside_shard_map(implementation):
    """Numbers and what is captured are said to vary there."""
    query, key, value, *_ = inputs(2, 70, 80, 2, 1, 64, jnp.bfloat16)
    slopes = jnp.array([0.25, 0.5], jnp.float32)

    def loss(query, key, value, slopes, implementation):
        score_mod = lambda s, b, h, q, k: s - 0.5 * slopes[h] * (q - k)
        run = functools.partial(jax_flash.attention, score_mod=score_mod)
        out = run(query, key, value, implementation=implementation)
        return (out.astype(jnp.float32) ** 2).sum()

    gradients = jax.grad(loss, argnums=(0, 1, 2, 3))
    expected = gradients(query, key, value, slopes, "xla")
    split, whole = PartitionSpec("x"), PartitionSpec()
    inside = jax.shard_map(
        functools.partial(gradients, implementation=implementation),
        mesh=mesh_of((1,)),
        in_specs=(split, split, split, whole),
        out_specs=(split, split, split, whole),
    )
    with interpret_mode():
        found = inside(query, key, value, slopes)
    chex.assert_trees_all_close(found, expected, atol=0.05, rtol=0.05)


def test_arrays_of_64_bits_are_refused():
    query, key, value, *_ = inputs(1, 16, 24, 2, 1, 64, jnp.bfloat16)
    with jax.enable_x64(True):
        wide = jnp.arange(24.0)
        score_mod = lambda s, b, h, q, k: s + wide[k].astype(jnp.float32)
        with pytest.raises(NotImplementedError, match="float64"):
            jax_flash.attention(query, key, value, score_mod=score_mod, implementation="mosaic_gpu")
