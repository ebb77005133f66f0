"""mask_mod on the kernels in interpret mode, with race detection, beside float64."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_flash
from jax_flash import mask_blocks
from jax_flash.functions import traced
from pallas_kernels import mask_functions
from pallas_kernels.mask_functions import BEYOND, BLOCK, COUNT, EMPTY, FULL, LISTED, MASKED, PARTIAL
from pallas_kernels.on_rows import OnRows, Part
from pallas_kernels.programs import Operations
from tests.support.cases import long, slow
from tests.support.interpret import interpret_mode
from tests.support.kernel_calls import (
    check,
    check_that_keys_do_not_count,
    dense_mask,
    few_thread_blocks,
    inputs,
    with_a_jump,
)
from tests.support.sharded import mesh_of


def causal(b, h, q_idx, kv_idx):
    return kv_idx <= q_idx


def prefix(b, h, q_idx, kv_idx):
    return (kv_idx < 70) | (kv_idx <= q_idx)


def dilated(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx) % 3 == 0


def diagonal(b, h, q_idx, kv_idx):
    """Blocks of 100 on a diagonal, but for one query and one key that see nothing."""
    return (q_idx // 100 == kv_idx // 100) & (q_idx != 130) & (kv_idx != 140)


def image(b, h, q_idx, kv_idx):
    near = lambda x, y: jnp.abs(x - y) <= 2
    return near(q_idx // 16, kv_idx // 16) & near(q_idx % 16, kv_idx % 16)


def far_blocks(b, h, q_idx, kv_idx):
    """The first and the last keys, whole blocks of them, and nothing for the last queries."""
    return ((kv_idx < 128) | (kv_idx >= 256)) & (q_idx < 140)


def nothing(b, h, q_idx, kv_idx):
    return q_idx < 0


ENTRIES = jnp.array([[0] * 40 + [1] * 110 + [2] * 100, [0] * 180 + [1] * 70])
SHOWN = jnp.asarray(np.random.default_rng(1).random((250, 250)) < 0.3)


def documents(b, h, q_idx, kv_idx):
    return (ENTRIES[b, q_idx] == ENTRIES[b, kv_idx]) & (kv_idx <= q_idx)


def by_head(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx) % (h + 2) == 0


def pairs(b, h, q_idx, kv_idx):
    return SHOWN[q_idx][kv_idx]


def scalars(b, h, q_idx, kv_idx):
    window = jnp.array([30, 150])
    return (q_idx - kv_idx < window[h]) & (kv_idx <= q_idx + jnp.int32(5) * b)


FUNCTIONS = {f.__name__: f for f in (causal, prefix, dilated, diagonal, image, far_blocks, nothing)}


@pytest.mark.parametrize(
    ("T", "S", "N", "K", "H", "function", "options"),
    [
        (200, 264, 2, 1, 64, causal, {}),
        slow(200, 200, 1, 1, 128, dilated, {}),
        slow(150, 384, 1, 1, 64, far_blocks, {}),  # in CI with logits that jump, below
        slow(256, 256, 1, 1, 128, image, {}),
        slow(250, 290, 1, 1, 128, diagonal, {}),
        long(130, 70, 2, 1, 64, nothing, {}),
        slow(170, 200, 4, 2, 80, prefix, {}),
        # Beside others.
        slow(200, 300, 1, 1, 64, dilated, dict(is_causal=True, local_window_size=(90, 0))),
        slow(150, 200, 1, 1, 128, diagonal, dict(local_window_size=(60, 200), query_offset=20)),
        slow(150, 200, 2, 1, 128, dilated, dict(logits_soft_cap=2.0)),
        slow(150, 200, 2, 1, 64, diagonal, dict(dropout_rate=0.25)),
        slow(150, 200, 2, 1, 128, dilated, dict(logits_soft_cap=2.0, dropout_rate=0.25)),
        slow(150, 384, 1, 1, 128, far_blocks, dict(sinks=jnp.array([0.7]))),
        # Of widths above 128, and deterministic.
        long(140, 150, 2, 1, 256, diagonal, {}),
        slow(150, 200, 2, 1, 192, dilated, {}),
        long(200, 200, 2, 1, 64, diagonal, dict(deterministic=True)),
        slow(150, 384, 1, 1, 128, far_blocks, dict(deterministic=True)),
    ],
)
def test_in_interpret_mode(T, S, N, K, H, function, options):
    with interpret_mode():
        check(inputs(1, T, S, N, K, H, jnp.bfloat16), mask_mod=function, **options)


@pytest.mark.parametrize(
    ("T", "S", "N", "K", "H", "function", "options"),
    [
        (200, 200, 2, 1, 64, documents, {}),
        slow(150, 200, 4, 2, 128, by_head, {}),
        long(130, 200, 2, 2, 64, scalars, dict(logits_soft_cap=2.0)),
        slow(130, 250, 2, 1, 128, pairs, {}),
        slow(250, 250, 2, 1, 128, documents, dict(local_window_size=(100, 0))),
        slow(150, 200, 2, 1, 64, documents, dict(dropout_rate=0.25)),
    ],
)
def test_what_reads_arrays_batch_entries_and_heads(T, S, N, K, H, function, options):
    with interpret_mode():
        check(inputs(2, T, S, N, K, H, jnp.bfloat16), mask_mod=function, **options)


@pytest.mark.long
@pytest.mark.parametrize(
    ("H", "function"), [(64, diagonal), slow(128, far_blocks), slow(256, diagonal)]
)
def test_a_thread_block_walks_many_tiles(H, function):
    arrays = inputs(2, 250, 300, 2, 1, H, jnp.float16)
    with interpret_mode():
        check(arrays, mask_mod=function, config=few_thread_blocks(H, 2))


@pytest.mark.long
@pytest.mark.parametrize("function", [far_blocks, slow(dilated)])
def test_logits_far_above_those_that_were_looked_at(function):
    arrays = with_a_jump(inputs(1, 150, 384, 1, 1, 64, jnp.bfloat16), 0, 20)
    with interpret_mode():
        check(arrays, mask_mod=function)


@pytest.mark.slow
def test_keys_that_no_query_sees_do_not_count():
    unseen = np.r_[128:256, 290]

    def mask_mod(b, h, q_idx, kv_idx):
        return ((kv_idx < 128) | (kv_idx >= 256)) & (kv_idx != 290)

    check_that_keys_do_not_count(300, 64, unseen, mask_mod=mask_mod)


# --- blocks ---------------------------------------------------------------------------------------


def made(function, T, S, lowest=None, highest=None):
    program = traced("mask_mod", function).program
    return mask_blocks.static_mask(program, T, S, lowest, highest)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(("T", "S", "bounds"), [(256, 256, (None, None)), (250, 290, (-60, 9))])
def test_kinds_of_blocks(name, T, S, bounds):
    found = made(FUNCTIONS[name], T, S, *bounds)
    shown = dense_mask(FUNCTIONS[name], 1, 1, T, S)[0, 0]
    distance = np.arange(S) - np.arange(T)[:, None]
    if bounds != (None, None):
        shown = shown & (distance >= bounds[0]) & (distance <= bounds[1])
    for row, column in np.ndindex(*found.kinds.shape):
        block = shown[row * BLOCK :, column * BLOCK :][:BLOCK, :BLOCK]
        kind = FULL if block.all() else PARTIAL if block.any() else EMPTY
        assert found.kinds[row, column] == kind
    np.testing.assert_array_equal(found.seeing, shown.any(1))
    np.testing.assert_array_equal(found.seen, shown.any(0))


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(("T", "S"), [(256, 256), (330, 290)])
@pytest.mark.parametrize(("rows", "columns", "shift"), [(128, 128, 0), (192, 64, 128)])
def test_lists(name, T, S, rows, columns, shift):
    function = FUNCTIONS[name]
    found, shown = made(function, T, S), dense_mask(function, 1, 1, T, S)[0, 0]
    for by_key in (False, True):
        if by_key:
            table, shift, shown = found.query_lists(rows, columns, S, 1)[0, 0], 0, shown.T
        else:
            table = found.key_lists(rows, columns, shift, S)[0, 0]
        for tile, (count, masked, *listed) in enumerate(table):
            own = slice(max(tile * rows - shift, 0), (tile + 1) * rows - shift)
            blocks = {}
            for n, first in enumerate(range(0, shown.shape[1], columns)):
                block = shown[own, first : first + columns]
                is_cut = (own.stop if by_key else first + columns) > S
                if block.any():
                    blocks[n] = not block.all() or is_cut
            blocks = blocks or {0: True}
            assert count == len(blocks)
            assert {*listed[:masked]} == {n for n, needs_mask in blocks.items() if needs_mask}
            assert {*listed[masked:count]} == {n for n, needs in blocks.items() if not needs}


def test_equal_functions_are_one_program():
    of = lambda window: lambda b, h, q_idx, kv_idx: kv_idx > q_idx - window
    same = [made(of(30), 256, 256) for _ in range(2)]
    others = [made(of(31), 256, 256), made(of(30), 257, 256), made(of(30), 256, 256, 0)]
    assert same[0] == same[1] and hash(same[0]) == hash(same[1]) and repr(same[0]) == repr(same[1])
    for other in others:
        assert other != same[0] and repr(other) != repr(same[0])


@pytest.mark.parametrize(("heads", "group"), [(1, 1), (1, 3), (6, 3)])
def test_lists_of_numpy_and_of_arrays(heads, group):
    kinds = np.random.default_rng(0).integers(0, 3, (2, heads, 5, 7)).astype(np.int8)
    kinds[0, 0, 2] = kinds[0, 0, :, 3] = EMPTY
    kv_heads = 6 // group
    by_key = lambda xp: mask_functions.query_lists(xp, kinds, 128, 64, 400, (kv_heads, group))
    by_query = lambda xp: mask_functions.key_lists(xp, kinds, 192, 128, 64, 448)
    for make in (by_key, by_query):
        table, given = make(np), np.asarray(make(jnp))
        assert (COUNT, MASKED, LISTED) == (0, 1, 2)
        columns = table.shape[-1] - BEYOND
        np.testing.assert_array_equal(given[..., :columns], table[..., :columns])
    # Of a group all blocks stand in one list, with numbers that say whose they are.
    table = by_key(np)
    assert table.shape[1] == (1 if heads == 1 else kv_heads)
    padded = np.pad(kinds, ((0, 0), (0, 0), (0, 0), (0, 1)))
    for entry, kv_head, tile in np.ndindex(*table.shape[:3]):
        count, _, *listed = table[entry, kv_head, tile]
        needed = set()
        for member in range(group):
            own = padded[entry, 0 if heads == 1 else kv_head * group + member]
            seeing = (own[:, 2 * tile : 2 * tile + 2] > 0).any(1)
            needed |= {member * 5 + n for n in np.flatnonzero(seeing)}
        assert {*listed[:count]} == (needed or {0})


# --- programs -------------------------------------------------------------------------------------


def random_function(seed: int):
    """A function of a grammar of comparisons and arithmetic."""
    rng = np.random.default_rng(seed)

    def number(depth: int):
        if depth == 0 or rng.random() < 0.2:
            constant = int(rng.integers(-5, 40))
            return [lambda q, k: q, lambda q, k: k, lambda q, k: constant][rng.integers(3)]
        a, b, c = number(depth - 1), number(depth - 1), int(rng.integers(1, 9))
        return [
            lambda q, k: a(q, k) + b(q, k),
            lambda q, k: a(q, k) - b(q, k),
            lambda q, k: a(q, k) * c,
            lambda q, k: a(q, k) // c,
            lambda q, k: a(q, k) % c,
            lambda q, k: jnp.abs(a(q, k)),
            lambda q, k: jnp.minimum(a(q, k), b(q, k)),
            lambda q, k: jnp.where(a(q, k) < b(q, k), a(q, k), c),
            lambda q, k: jnp.clip(a(q, k), 0, c),
        ][rng.integers(9)]

    def truth(depth: int):
        if depth == 0:
            a, b = number(2), number(2)
            return [
                lambda q, k: a(q, k) <= b(q, k),
                lambda q, k: a(q, k) > b(q, k),
                lambda q, k: a(q, k) == b(q, k),
                lambda q, k: a(q, k) != b(q, k),
            ][rng.integers(4)]
        a, b = truth(depth - 1), truth(depth - 1)
        return [
            lambda q, k: a(q, k) & b(q, k),
            lambda q, k: a(q, k) | b(q, k),
            lambda q, k: a(q, k) ^ b(q, k),
            lambda q, k: ~a(q, k),
            lambda q, k: jnp.where(a(q, k), b(q, k), a(k, q)),
        ][rng.integers(5)]

    shown = truth(2)
    return lambda b, h, q_idx, kv_idx: jnp.logical_and(shown(q_idx, kv_idx), True)


@pytest.mark.parametrize("seed", range(12))
def test_programs_on_tiles(seed):
    function = random_function(seed)
    operations = Operations(traced("mask_mod", function).program.steps)
    assert operations.unsupported() is None
    rows, width = 24, 8
    row, column = (jnp.arange(n, dtype=jnp.int32) for n in (rows, width))
    zero = Part(jnp.int32(0))
    given = zero, zero, Part(row + 30, by_row=True), zero
    on_rows = OnRows(operations, given, {3}, rows, lambda *_: None)
    for first in (0, 40, 48):
        (got,) = on_rows.evaluate({3: Part(column + first, by_column=True)}, width)
        expected = function(0, 0, row[:, None] + 30, column + first)
        chex.assert_trees_all_equal(got, jnp.broadcast_to(expected, (rows, width)))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_random_functions_in_interpret_mode(seed):
    arrays = inputs(1, 150, 200, 1, 1, 64, jnp.bfloat16, seed=seed)
    with interpret_mode():
        check(arrays, mask_mod=random_function(seed))


# --- what is refused, and what is not -------------------------------------------------------------


ALLOWED = jnp.arange(200, dtype=jnp.int8)
LENGTHS = dict(key_value_seq_lengths=jnp.array([7, 8]))
REFUSED = [
    (lambda b, h, q, k: ALLOWED[k] > 7, {}, r"mask_mod: gt of a captured array \[200\] of int8"),
    (lambda b, h, q, k: jnp.take(ALLOWED, k) > 0, {}, "mask_mod: "),
    (lambda b, h, q, k: ALLOWED[k] > jnp.floor(q / 3), {}, "mask_mod: "),
    (lambda b, h, q, k: k > b, dict(deterministic=True), "mask_mod with deterministic gradients"),
    (lambda b, h, q, k: jnp.cumsum(jnp.arange(3) + q)[2] > k, {}, "mask_mod: "),
    (lambda b, h, q, k: jnp.floor(q / 3) > k, {}, "mask_mod: floor is none of the operations"),
    (causal, dict(bias=jnp.ones((1, 1, 1, 200))), "mask_mod with a bias of keys or of queries"),
    (lambda b, h, q, k: jnp.floor(q / 3) > k, LENGTHS, "mask_mod: floor is none of the operations"),
    (causal, LENGTHS | dict(deterministic=True), "mask_mod with deterministic .* no array beside"),
]


@pytest.mark.parametrize(("function", "options", "reason"), REFUSED)
def test_refused_with_the_reason(function, options, reason):
    query, key, value, *_ = inputs(2, 128, 200, 2, 1, 64, jnp.bfloat16)
    with pytest.raises(NotImplementedError, match=reason):
        jax_flash.attention(
            query, key, value, mask_mod=function, implementation="mosaic_gpu", **options
        )


def test_explained_without_a_gpu():
    query = jax.ShapeDtypeStruct((1, 1 << 20, 4, 128), jnp.bfloat16)
    explain = functools.partial(jax_flash.explain, query, query, query, mask_mod=causal)
    assert explain(implementation="mosaic_gpu").implementation == "mosaic_gpu"


@pytest.mark.slow
def test_under_vmap_and_jit():
    arrays = inputs(3, 100, 140, 2, 1, 64, jnp.bfloat16)[:3]

    def loss(query, key, value):
        run = functools.partial(jax_flash.attention, mask_mod=diagonal, implementation="mosaic_gpu")
        return (run(query, key, value).astype(jnp.float32) ** 2).sum()

    gradients = jax.grad(loss, (0, 1, 2))
    with interpret_mode():
        whole = gradients(*arrays)
        mapped = jax.jit(jax.vmap(gradients))(*(x[:, None] for x in arrays))
    chex.assert_trees_all_equal(whole, jax.tree.map(lambda x: x[:, 0], mapped))


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (documents, AxisType.Auto),
        slow(documents, AxisType.Explicit),
        long(diagonal, AxisType.Auto),
        slow(diagonal, AxisType.Explicit),
    ],
)
def test_lowers_where_operands_are_sharded(function, kind):
    mesh = mesh_of((2,), kind)
    sharding = NamedSharding(mesh, PartitionSpec(None, None, "x"))
    x = jax.ShapeDtypeStruct((2, 200, 2, 64), jnp.bfloat16, sharding=sharding)

    def loss(query, key, value):
        run = functools.partial(jax_flash.attention, mask_mod=function, implementation="mosaic_gpu")
        return run(query, key, value).astype(jnp.float32).sum()

    with jax.set_mesh(mesh):
        traced_gradients = jax.jit(jax.grad(loss, (0, 1, 2))).trace(x, x, x)
        text = traced_gradients.lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text or "CustomSPMDPartitioning" in text


@pytest.mark.long
@pytest.mark.parametrize("axes", [0, slow(None)])
def test_lowers_where_captured_arrays_are_mapped(axes):
    def gradient(ids, x):
        def loss(x):
            mask_mod = lambda b, h, q_idx, kv_idx: ids[b, q_idx] == ids[b, kv_idx]
            out = jax_flash.attention(x, x, x, mask_mod=mask_mod, implementation="mosaic_gpu")
            return out.astype(jnp.float32).sum()

        return jax.grad(loss)(x)

    ids = jax.ShapeDtypeStruct((3, 2, 200)[axes is None :], jnp.int32)
    x = jax.ShapeDtypeStruct((3, 2, 200, 2, 64), jnp.bfloat16)
    mapped = jax.jit(jax.vmap(gradient, (axes, 0)))
    assert "mosaic_gpu" in mapped.trace(ids, x).lower(lowering_platforms=("cuda",)).as_text()
