"""decode_attention and update_cache beside float64 attention over each sequence."""

import functools
import inspect

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from jax_flash import decode
from tests import oracle
from tests.support.decoding import exact, float8, inputs, paged, written


def check(arrays, lengths, *, rtol=1e-5, atol=1e-5, **options):
    lengths = np.asarray(lengths, np.int32)
    out, lse = jax.jit(
        functools.partial(jax_flash.decode_attention, return_residual=True, **options)
    )(*arrays, lengths)
    options.pop("implementation", None)
    exact_out, exact_lse = exact(*arrays, lengths, **options)
    assert out.dtype == arrays[0].dtype and lse.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(out, np.float64), exact_out, rtol=rtol, atol=atol)
    np.testing.assert_allclose(lse, exact_lse, rtol=1e-5, atol=1e-5)


LENGTHS = [0, 1, 3, 40, 64]

OPTIONS = {
    "plain": {},
    "window": {"local_window_size": 9},
    "no window at all": {"local_window_size": 10**12},
    "soft cap": {"logits_soft_cap": 2.0, "scale": 0.7},
    "sinks": {"sinks": np.array([0.5, 30.0, np.inf, -np.inf], np.float32)},
}


@pytest.fixture
def small_chunks(monkeypatch):
    """Several chunks for plain JAX, the last one ragged."""
    monkeypatch.setattr(decode, "_CHUNK", 48)
    decode._attend_part.clear_cache()  # of programs with larger ones
    yield
    decode._attend_part.clear_cache()


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("T", [1, 5])
def test_plain_jax(T, options):
    """Also sequences without a token, and ones shorter than T."""
    check(inputs(5, T, 64, 4, 2, 16, h=24), LENGTHS, **options)


@pytest.mark.parametrize(("dtype", "atol"), [("bfloat16", 2e-2), ("float16", 2e-3)])
def test_short_floats(dtype, atol):
    check(inputs(5, 2, 64, 4, 4, 16, dtype), LENGTHS, atol=atol, implementation="xla")


def test_lengths_beyond_the_cache():
    """Positions count on, and there are no keys at them."""
    arrays = inputs(2, 3, 32, 2, 1, 8)
    out = jax_flash.decode_attention(*arrays, jnp.array([40, 33]), local_window_size=9)
    query, *caches = arrays
    longer = [jnp.pad(x, ((0, 0), (0, 16), (0, 0), (0, 0))) for x in caches]
    exact_out, _ = oracle.attention(
        query,
        *longer,
        is_causal=True,
        local_window_size=(9, 0),
        query_offset=np.array([37, 30]),
        key_value_seq_lengths=np.array([32, 32]),
    )
    np.testing.assert_allclose(out, exact_out, atol=1e-5)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("options", [{}, {"local_window_size": 9}], ids=["plain", "window"])
def test_a_length_below_zero_is_as_zero_and_of_no_concern_to_others(options):
    arrays = inputs(4, 2, 64, 2, 1, 8)
    attention = functools.partial(jax_flash.decode_attention, return_residual=True, **options)
    got = attention(*arrays, jnp.array([-(2**31), -(2**31) + 5, -1, 50]))
    chex.assert_trees_all_equal(got, attention(*arrays, jnp.array([0, 0, 0, 50])))
    assert not np.asarray(got[0][:3]).any() and (np.asarray(got[1][:3]) == -np.inf).all()


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("page_size", [16, 64])
def test_pages_are_the_contiguous_cache(page_size):
    query, key_cache, value_cache = inputs(5, 3, 192, 4, 2, 16)
    lengths = np.array([0, 1, 97, 100, 192], np.int32)
    key_pages, table = paged(key_cache, page_size)
    value_pages, _ = paged(value_cache, page_size)
    used = np.arange(table.shape[1]) * page_size < lengths[:, None]
    attention = functools.partial(jax_flash.decode_attention, local_window_size=80)
    expected = attention(query, key_cache, value_cache, lengths)
    for beyond in (-1, 10**6):
        page_table = np.where(used, table, beyond)
        out = attention(query, key_pages, value_pages, lengths, page_table=page_table)
        np.testing.assert_allclose(out, expected, atol=1e-6)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_what_stands_beyond_the_lengths_does_not_count(poison):
    query, *caches = inputs(5, 3, 64, 4, 2, 16)
    lengths = np.array(LENGTHS, np.int32)
    beyond = (np.arange(64) >= lengths[:, None])[..., None, None]
    expected = jax_flash.decode_attention(query, *caches, lengths, return_residual=True)
    poisoned = [jnp.where(beyond, poison, x) for x in caches]
    got = jax_flash.decode_attention(query, *poisoned, lengths, return_residual=True)
    chex.assert_trees_all_equal(got, expected)


def test_one_program_serves_all_lengths():
    arrays = inputs(3, 1, 64, 2, 2, 16)
    attention = jax.jit(jax_flash.decode_attention)
    for lengths in ([1, 2, 3], [64, 0, 30]):
        out = attention(*arrays, jnp.array(lengths))
        np.testing.assert_allclose(out, exact(*arrays, lengths)[0], atol=1e-5)
    assert attention._cache_size() == 1


@pytest.mark.usefixtures("small_chunks")
def test_others_in_the_batch_change_nothing():
    query, *caches = inputs(3, 2, 64, 4, 2, 16)
    attention = functools.partial(jax_flash.decode_attention, num_splits=2, return_residual=True)
    first = attention(query, *caches, jnp.array([30, 64, 5]))
    poisoned = [x.at[1].set(jnp.nan) for x in caches]
    second = attention(query.at[2].set(9.0), *poisoned, jnp.array([30, 1, 64]))
    chex.assert_trees_all_equal(
        jax.tree.map(lambda x: x[0], first), jax.tree.map(lambda x: x[0], second)
    )


def test_float8_caches_with_scales():
    scales = jnp.array([[0.5, 0.01], [3.0, 0.1]])
    arrays, exact_arrays = float8(inputs(4, 2, 64, 4, 2, 16), scales)
    lengths = np.array([0, 5, 33, 64])
    out = jax_flash.decode_attention(
        *arrays, lengths, key_scale=scales[0], value_scale=scales[1], sinks=jnp.ones(4)
    )
    exact_out, _ = exact(*exact_arrays, lengths, sinks=np.ones(4))
    np.testing.assert_allclose(out, exact_out, atol=1e-5)


@pytest.mark.parametrize("implementation", ["xla", "mosaic_gpu"])
@pytest.mark.parametrize("shape", [(0, 1, 16), (2, 0, 16), (2, 1, 0)])
def test_empty_axes(shape, implementation):
    """No kernel runs, so that this runs anywhere."""
    B, T, S = shape
    query, *caches = inputs(B, T, S, 2, 1, 64, "bfloat16")
    run = functools.partial(
        jax_flash.decode_attention, return_residual=True, implementation=implementation
    )
    lengths = jnp.full(B, 16)
    pages, table = [x.reshape(-1, 16, 1, 64) for x in caches], np.zeros((B, S // 16), np.int32)
    for results in (run(query, *caches, lengths), run(query, *pages, lengths, page_table=table)):
        out, lse = results
        assert out.shape == (B, T, 2, 64) and not np.asarray(out).any()
        assert lse.shape == (B, T, 2) and (np.asarray(lse) == -np.inf).all()
    new = [jnp.ones((B, T, 1, 64), jnp.bfloat16)] * 2
    got = jax_flash.update_cache(*caches, *new, lengths)
    chex.assert_trees_all_equal(got, tuple(caches))
    got = jax_flash.update_cache(*pages, *new, lengths, table)
    chex.assert_trees_all_equal(got, tuple(pages))


@pytest.mark.parametrize("implementation", ["xla", "mosaic_gpu"])
@pytest.mark.parametrize("of_sinks", [False, True])
def test_vmap_over_nothing(implementation, of_sinks):
    query, *caches = inputs(0, 3, 16, 2, 1, 64, "bfloat16")
    sinks = jnp.zeros((0, 2)) if of_sinks else jnp.zeros(2)

    def one(query, key_cache, value_cache, lengths, sinks):
        arrays = [x[None] for x in (query, key_cache, value_cache, lengths)]
        return jax_flash.decode_attention(*arrays, sinks=sinks, implementation=implementation)

    run = jax.vmap(one, in_axes=(0, 0, 0, 0, 0 if of_sinks else None))
    # Lowered for CUDA, as where sinks are mapped too the kernel is in a loop of no step.
    lengths = jnp.zeros(0, jnp.int32)
    traced = jax.jit(run).trace(query, *caches, lengths, sinks)
    assert traced.out_info.shape == (0, 1, 3, 2, 64)
    traced.lower(lowering_platforms=("cuda",))


class Compilations:
    """How many programs JAX has compiled."""

    def __init__(self):
        self.count = 0

    def __call__(self, event: str, *_, **__):
        self.count += event == "/jax/core/compile/backend_compile_duration"


@pytest.fixture
def compilations():
    count = Compilations()
    jax.monitoring.register_event_duration_secs_listener(count)
    yield count
    jax.monitoring.unregister_event_duration_listener(count)


@pytest.mark.parametrize("options", [{}, {"local_window_size": 3, "sinks": np.ones(2)}], ids=str)
def test_equal_calls_outside_of_jit_compile_once(options, compilations):
    query, *caches = inputs(2, 1, 40, 2, 1, 24)
    before = compilations.count
    for lengths in ([3, 4], [40, 0]):
        before, first = compilations.count, compilations.count - before
        jax_flash.decode_attention(query, *caches, np.array(lengths), **options)
    assert first > 0 and compilations.count == before


def test_equal_updates_outside_of_jit_compile_once(compilations):
    _, *caches = inputs(2, 1, 40, 2, 1, 24)
    new = [x[:, :1] for x in caches]
    (key_pages, table), (value_pages, _) = (paged(x[:, :32], 16) for x in caches)
    for arguments in (caches, ()), ((key_pages, value_pages), (table,)):
        held, tables = arguments
        before = compilations.count
        for lengths in ([3, 4], [32, 0]):
            before, first = compilations.count, compilations.count - before
            jax_flash.update_cache(*held, *new, np.array(lengths), *tables)
        assert first > 0 and compilations.count == before


@pytest.mark.parametrize("implementation", ["xla", "mosaic_gpu"])
def test_there_is_no_derivative(implementation):
    query, *caches = inputs(1, 1, 16, 2, 1, 64, "bfloat16")

    def total(query):
        out = jax_flash.decode_attention(
            query, *caches, jnp.array([3]), implementation=implementation
        )
        return out.sum()

    with pytest.raises(NotImplementedError, match="decode_attention has no derivative"):
        jax.make_jaxpr(jax.grad(total))(query)


def test_explain_decode():
    """Of shapes too, and whether a Hopper GPU would run a call."""
    arrays = (*inputs(2, 1, 32, 2, 1, 64, "bfloat16"), jnp.array([3, 4]))
    shapes = jax.eval_shape(lambda *x: x, *arrays)
    explanation = jax_flash.explain_decode(*shapes, sinks=jnp.zeros(2))
    assert explanation == jax_flash.explain_decode(*arrays)
    if jax.default_backend() == "cpu":
        assert explanation.implementation == "xla" and "Hopper" in str(explanation)
    on_kernel = functools.partial(jax_flash.explain_decode, implementation="mosaic_gpu")
    assert on_kernel(*shapes).implementation == "mosaic_gpu"
    with pytest.raises(NotImplementedError, match="is not in"):
        on_kernel(*shapes, scale=0.0)
    with pytest.raises(ValueError, match=r"^lengths: got"):
        on_kernel(*shapes[:3], jax.ShapeDtypeStruct((3,), jnp.int32))
    signatures = map(inspect.signature, (jax_flash.explain_decode, jax_flash.decode_attention))
    assert len(set(map(str, signatures))) == 1


UPDATED = np.array([0, 2, 3, 31, 32, 34], np.int32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("T", [1, 4])
def test_update_cache(T, dtype):
    """Tokens at negative positions, and beyond the end, are left out."""
    _, *caches = inputs(6, T, 32, 2, 2, 8, dtype, h=16)
    new = [x[:, :T] for x in inputs(6, T, 8, 2, 2, 8, dtype, h=16, seed=1)[1:]]
    got = jax_flash.update_cache(*caches, *new, UPDATED)
    for actual, cache, x in zip(got, caches, new, strict=True):
        np.testing.assert_array_equal(actual, written(cache, np.asarray(x), UPDATED))


def test_update_cache_in_pages():
    _, *caches = inputs(6, 4, 32, 2, 2, 8)
    new = [x[:, :4] for x in inputs(6, 4, 8, 2, 2, 8, seed=1)[1:]]
    expected = jax_flash.update_cache(*caches, *new, UPDATED)
    (key_pages, table), (value_pages, _) = (paged(x, 16) for x in caches)
    page_table = np.where(np.arange(2) * 16 < UPDATED[:, None], table, -1)
    got = jax_flash.update_cache(key_pages, value_pages, *new, UPDATED, page_table)
    for actual, before, truth in zip(got, (key_pages, value_pages), expected, strict=True):
        np.testing.assert_array_equal(actual[table.ravel()], truth.reshape(12, 16, 2, 8))
        unused = np.setdiff1d(np.arange(len(before)), table)
        np.testing.assert_array_equal(actual[unused], before[unused])


def test_update_cache_writes_no_padding():
    """The rows that are new come first; pages of entries that none of them needs stay as is."""
    _, *caches = inputs(8, 4, 32, 2, 2, 8)
    new = [x[:, :4] for x in inputs(8, 4, 8, 2, 2, 8, seed=1)[1:]]
    lengths = np.array([3, 3, 4, 20, 34, 17, -(2**31), 2**31 - 1], np.int32)
    num_new = np.array([0, 3, 4, 1, 3, 2**31 - 1, 2, -1], np.int32)
    expected = [
        written(cache, np.asarray(x), lengths, num_new)
        for cache, x in zip(caches, new, strict=True)
    ]
    got = jax_flash.update_cache(*caches, *new, lengths, num_new=num_new)
    chex.assert_trees_all_equal(got, tuple(expected))

    (key_pages, table), (value_pages, _) = (paged(x, 16) for x in caches)
    used = np.arange(2) * 16 < np.maximum(lengths, 0)[:, None]
    page_table = np.where(used, table, table[2, 0])  # unused entries name another's page
    got = jax_flash.update_cache(key_pages, value_pages, *new, lengths, page_table, num_new=num_new)
    for actual, truth in zip(got, expected, strict=True):
        is_used = used.ravel()
        np.testing.assert_array_equal(
            actual[table.ravel()[is_used]], truth.reshape(16, 16, 2, 8)[is_used]
        )


def test_a_padded_prefill_stands_where_it_was_written():
    """decode_attention with lengths + T - num_new gives rows of tokens what they get alone."""
    _, *caches = inputs(2, 6, 64, 2, 2, 16)
    query, *new = (x[:, :6] for x in inputs(2, 6, 64, 2, 2, 16, seed=1))
    lengths, num_new = np.array([6, 30]), np.array([6, 4])
    caches = jax_flash.update_cache(*caches, *new, lengths, num_new=num_new)
    out = jax_flash.decode_attention(query, *caches, lengths + 6 - num_new)
    for b, count in enumerate(num_new):
        one = slice(b, b + 1)
        alone = jax_flash.decode_attention(
            query[one, :count], *(x[one] for x in caches), lengths[one]
        )
        np.testing.assert_allclose(out[one, :count], alone, atol=1e-6)


@pytest.mark.parametrize("page_size", [None, 16])
def test_update_cache_is_in_place(page_size):
    """Compiled, with donated caches, nothing of a cache's size is copied."""
    _, *caches = inputs(4, 1, 64, 2, 2, 8)
    tables = ()
    if page_size is not None:
        pages = [paged(x, page_size) for x in caches]
        caches, tables = [x for x, _ in pages], (pages[0][1],)
    new = [x[:, :1] for x in inputs(4, 1, 8, 2, 2, 8, seed=1)[1:]]
    update = jax.jit(jax_flash.update_cache, donate_argnums=(0, 1))
    compiled = update.lower(*caches, *new, jnp.ones(4, jnp.int32), *tables).compile()
    text = compiled.as_text()
    assert "input_output_alias={ {0}: (0" in text and "{1}: (1" in text
    shape = ",".join(map(str, caches[0].shape))
    copies = [line for line in text.splitlines() if f"f32[{shape}]" in line and " copy(" in line]
    assert copies == []


def call(**changes):
    """Arguments of decode_attention that are right but for the changes."""
    query, key_cache, value_cache = inputs(2, 1, 32, 4, 2, 8)
    arguments = dict(
        query=query, key_cache=key_cache, value_cache=value_cache, lengths=jnp.array([3, 4])
    )
    return jax_flash.decode_attention(**arguments | changes)


@pytest.mark.parametrize(
    ("changes", "error", "name"),
    [
        (dict(implementation="cudnn"), ValueError, "implementation"),
        (dict(return_residual=1), TypeError, "return_residual"),
        (dict(query=np.zeros((2, 1, 4, 8), jnp.float8_e4m3fn)), TypeError, "query"),
        (dict(query=np.zeros((2, 4, 8), np.float32)), ValueError, "query"),
        (dict(query=np.zeros((2, 1, 3, 8), np.float32)), ValueError, "query"),
        (dict(query=np.zeros((3, 1, 4, 8), np.float32)), ValueError, "key_cache"),
        (dict(query=np.zeros((2, 1, 4, 16), np.float32)), ValueError, "key_cache"),
        (dict(query=np.zeros((2, 1, 4, 8), jnp.bfloat16)), TypeError, "key_cache"),
        (dict(key_cache=np.zeros((2, 32, 2), np.float32)), ValueError, "key_cache"),
        (dict(value_cache=np.zeros((2, 16, 2, 8), np.float32)), ValueError, "value_cache"),
        (dict(value_cache=np.zeros((2, 32, 2, 8), jnp.bfloat16)), TypeError, "value_cache"),
        (dict(lengths=jnp.array([1, 2, 3])), ValueError, "lengths"),
        (dict(lengths=jnp.array([1.0, 2.0])), TypeError, "lengths"),
        (dict(page_table=np.zeros((3, 1), jnp.int32)), ValueError, "page_table"),
        (dict(page_table=np.zeros((2, 1), np.float32)), TypeError, "page_table"),
        (dict(scale="a"), TypeError, "scale"),
        (dict(scale=float("nan")), ValueError, "scale"),
        (dict(scale=10**400), ValueError, "scale"),
        (dict(implementation=["xla"]), ValueError, "implementation"),
        (dict(implementation=np.array(["xla", "xla"])), ValueError, "implementation"),
        (dict(local_window_size=-1), ValueError, "local_window_size"),
        (dict(logits_soft_cap=0.0), ValueError, "logits_soft_cap"),
        (dict(logits_soft_cap="a"), TypeError, "logits_soft_cap"),
        (dict(sinks=np.zeros(3, np.float32)), ValueError, "sinks"),
        (dict(sinks=np.zeros(4, np.int32)), TypeError, "sinks"),
        (dict(key_scale=np.zeros(4, np.float32)), ValueError, "key_scale"),
        (dict(value_scale=np.zeros(2, np.int32)), TypeError, "value_scale"),
        (dict(num_splits=0), ValueError, "num_splits"),
        (dict(num_splits=1.0), TypeError, "num_splits"),
    ],
)
def test_bad_arguments(changes, error, name):
    with pytest.raises(error, match=f"^{name}: got"):
        call(**changes)


@pytest.mark.parametrize("page_size", [8, 24])
def test_page_sizes_that_cannot_be(page_size):
    pages = jnp.zeros((4, page_size, 2, 8))
    with pytest.raises(ValueError, match=f"^key_cache: got pages of {page_size}"):
        call(key_cache=pages, value_cache=pages, page_table=jnp.zeros((2, 2), jnp.int32))


@pytest.mark.parametrize(
    ("key", "error", "name"),
    [
        (jnp.zeros((2, 1, 2)), ValueError, "key"),
        (jnp.zeros((2, 1, 1, 8)), ValueError, "key"),
        (jnp.zeros((2, 1, 2, 8), jnp.bfloat16), TypeError, "key"),
        (jnp.zeros((3, 1, 2, 8)), ValueError, "key_cache"),
    ],
)
def test_bad_arguments_of_update_cache(key, error, name):
    _, *caches = inputs(2, 1, 32, 4, 2, 8)
    with pytest.raises(error, match=f"^{name}: got"):
        jax_flash.update_cache(*caches, key, jnp.zeros((2, 1, 2, 8)), jnp.array([1, 2]))


@pytest.mark.parametrize(
    ("num_new", "error"), [(jnp.ones(3, jnp.int32), ValueError), (jnp.ones(2), TypeError)]
)
def test_bad_num_new(num_new, error):
    _, *caches = inputs(2, 1, 32, 4, 2, 8)
    new = [x[:, :1] for x in caches]
    with pytest.raises(error, match=r"^num_new: got"):
        jax_flash.update_cache(*caches, *new, jnp.array([1, 2]), num_new=num_new)


def test_flags_of_numpy():
    assert len(call(return_residual=np.True_)) == 2
