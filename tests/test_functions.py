"""mask_mod and score_mod against dense attention in float64, which calls them with whole arrays."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import jax_flash
from jax_flash import device, masks, xla
from tests import oracle
from tests.support.cases import long, slow
from tests.support.sharded import mesh_of, put

B, T, N, K, H = 2, 16, 4, 2, 8
RNG = np.random.default_rng(0)

attention = functools.partial(jax_flash.attention, implementation="xla")


def normal(*shape) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape)


INPUTS = normal(B, T, N, H), normal(B, T, K, H), normal(B, T, K, H + 4)


# --- a gallery ------------------------------------------------------------------------------------


class Variant(NamedTuple):
    """Functions of attention, made of the floating arrays that they capture."""

    make: Callable[..., dict[str, Callable]]
    captured: dict[str, np.ndarray] = {}  # noqa: RUF012, nothing writes it


DOCUMENTS = np.sort(RNG.integers(0, 4, (B, T)))
PREFIXES = np.array([5, 11])
PARENTS = [-1, 0, 0, 1, 1, 2, 3, 3, 4, 5, 6, 6, 9, 10, 12, 12]  # of speculated tokens


def ancestors() -> np.ndarray:
    found = np.eye(T, dtype=bool)
    for token, parent in enumerate(PARENTS):
        if parent >= 0:
            found[token] |= found[parent]
    return found


ANCESTORS = ancestors()


def causal(b, h, q_idx, kv_idx):
    return kv_idx <= q_idx


def window(b, h, q_idx, kv_idx):
    return jnp.abs(q_idx - kv_idx) <= 3


def prefix(b, h, q_idx, kv_idx):
    return (kv_idx < jnp.asarray(PREFIXES)[b]) | (kv_idx <= q_idx)


def documents(b, h, q_idx, kv_idx):
    ids = jnp.asarray(DOCUMENTS)
    return ids[b, q_idx] == ids[b, kv_idx]


def dilated(b, h, q_idx, kv_idx):
    return (kv_idx <= q_idx) & ((q_idx - kv_idx) % (h + 1) == 0)


def block_diffusion(b, h, q_idx, kv_idx):
    """Noisy tokens, in blocks of two, before the same ones clean."""
    half = T // 2
    q_block, kv_block = q_idx % half // 2, kv_idx % half // 2
    q_clean, kv_clean = q_idx >= half, kv_idx >= half
    own = (q_clean == kv_clean) & (q_block == kv_block)
    return own | (kv_clean & (kv_block < q_block))


def tree(b, h, q_idx, kv_idx):
    return jnp.asarray(ANCESTORS)[q_idx, kv_idx]


def image(b, h, q_idx, kv_idx):
    side = 4
    near = lambda x, y: jnp.abs(x - y) <= 1
    return near(q_idx // side, kv_idx // side) & near(q_idx % side, kv_idx % side)


def alibi(slopes):
    return lambda score, b, h, q_idx, kv_idx: score - slopes[h] * (q_idx - kv_idx)


def t5(table):
    def score_mod(score, b, h, q_idx, kv_idx):
        return score + table[jnp.clip(kv_idx - q_idx, -5, 5) + 5, h]

    return score_mod


GALLERY = {
    "causal": Variant(lambda: dict(mask_mod=causal)),
    "window": Variant(lambda: dict(mask_mod=window)),
    "prefix": Variant(lambda: dict(mask_mod=prefix)),
    "documents": Variant(lambda: dict(mask_mod=documents)),
    "dilated": Variant(lambda: dict(mask_mod=dilated)),
    "block_diffusion": Variant(lambda: dict(mask_mod=block_diffusion)),
    "tree": Variant(lambda: dict(mask_mod=tree)),
    "image": Variant(lambda: dict(mask_mod=image)),
    "document_and_window": Variant(
        lambda: dict(mask_mod=lambda *indices: documents(*indices) & window(*indices))
    ),
    "alibi": Variant(
        lambda slopes: dict(mask_mod=causal, score_mod=alibi(slopes)), dict(slopes=normal(N))
    ),
    "t5": Variant(lambda table: dict(score_mod=t5(table)), dict(table=normal(11, N))),
    "soft_cap": Variant(
        lambda cap: dict(score_mod=lambda score, *_: cap * jnp.tanh(score / cap)),
        dict(cap=np.float64(2.0)),
    ),
    "tanh_gate": Variant(
        lambda gate: dict(score_mod=lambda score, b, h, *_: score * jnp.tanh(gate[b, h])),
        dict(gate=normal(B, N)),
    ),
    "pair_bias": Variant(
        lambda bias: dict(score_mod=lambda score, *indices: score + bias[indices]),
        dict(bias=normal(B, N, T, T)),
    ),
    "features": Variant(
        lambda left, right: dict(
            score_mod=lambda score, b, h, q_idx, kv_idx: (
                score + (left[q_idx] * right[kv_idx]).sum(-1)
            )
        ),
        dict(left=normal(T, 3), right=normal(T, 3) / 2),
    ),
    "minus_infinity": Variant(
        lambda sharpness: dict(
            score_mod=lambda score, b, h, q_idx, kv_idx: jnp.where(
                kv_idx <= q_idx, sharpness * score, -jnp.inf
            )
        ),
        dict(sharpness=np.float64(1.5)),
    ),
    "relu": Variant(
        lambda shift: dict(mask_mod=tree, score_mod=lambda score, *_: jax.nn.relu(score - shift)),
        dict(shift=np.float64(0.3)),
    ),
}


def dense(query, key, value, captured, make, *, keep=None, **options):
    """Output and LSE, by whole arrays of logits; keep is what dropout keeps."""
    given = dict(options)
    scale, bias, cap, sinks, rate = (
        given.pop(name, None)
        for name in ("scale", "bias", "logits_soft_cap", "sinks", "dropout_rate")
    )
    functions = make(**captured)
    S, heads = key.shape[1], query.shape[2]
    key, value = (jnp.repeat(x, heads // x.shape[2], axis=2) for x in (key, value))
    indices = [
        jnp.arange(size, dtype=jnp.int32).reshape([-1 if i == axis else 1 for i in range(4)])
        for axis, size in enumerate((query.shape[0], heads, query.shape[1], S))
    ]
    logits = jnp.einsum("btnh,bsnh->bnts", query, key, precision="highest")
    logits = logits * (query.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        logits += bias
    if "score_mod" in functions:
        logits = functions["score_mod"](logits, *indices)
    if cap is not None:
        logits = cap * jnp.tanh(logits / cap)
    visible = oracle.visibility(query.shape[0], query.shape[1], S, **given)
    if "mask_mod" in functions:
        visible = visible & functions["mask_mod"](*indices)
    logits = jnp.where(visible, logits, -jnp.inf)
    empty = jnp.isneginf(logits).all(-1, keepdims=True)
    logits = jnp.where(empty, 0.0, logits)
    if sinks is not None:
        column = jnp.broadcast_to(sinks[:, None, None], (*logits.shape[:-1], 1))
        logits = jnp.concatenate([logits, column], -1)
    lse = jax.scipy.special.logsumexp(logits, axis=-1, keepdims=True)
    weights = jnp.where(empty, 0.0, jnp.exp(logits - lse))[..., :S]
    if keep is not None:
        weights = jnp.where(keep, weights / (1 - rate), 0.0)
    out = jnp.einsum("bnts,bsnh->btnh", weights, value, precision="highest")
    return out, jnp.where(empty, -jnp.inf, lse)[..., 0].transpose(0, 2, 1)


def results_and_gradients(run, dtype, inputs, captured):
    """Output, LSE and gradients of all floating arrays, by a loss that all of them count in."""

    def loss(inputs, captured):
        out, lse = run(*inputs, captured)
        seen = jnp.where(jnp.isneginf(lse), 0.0, lse)
        return jnp.sin(out).sum() + jnp.cos(seen).sum(), (out, lse)

    cast = lambda x: jnp.asarray(x, dtype)
    of_both = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    (_, results), gradients = jax.jit(of_both)(*jax.tree.map(cast, (inputs, captured)))
    return results, gradients


def check(variant: Variant, inputs=INPUTS, keep=None, dtype=jnp.float32, atol=2e-5, **options):
    """Against dense attention in float64."""
    run = lambda q, k, v, own: attention(
        q, k, v, return_residual=True, **variant.make(**own), **options
    )
    got = results_and_gradients(run, dtype, inputs, variant.captured)
    options.pop("dropout_key", None)
    reference = functools.partial(dense, make=variant.make, keep=keep, **options)
    with jax.enable_x64(True):
        want = results_and_gradients(reference, jnp.float64, inputs, variant.captured)
    for x, expected in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        size = max(1.0, np.abs(expected, where=np.isfinite(expected), out=np.zeros(x.shape)).max())
        np.testing.assert_allclose(x, expected, rtol=0, atol=atol * size)


@pytest.fixture
def chunked(monkeypatch):
    """Plain JAX works on a few rows at a time, the last of them twice."""
    monkeypatch.setattr(xla, "LOGITS_BYTES", 0)
    monkeypatch.setattr(xla, "MIN_ROWS", 5)
    jax.clear_caches()
    yield
    jax.clear_caches()


LIKE_OTHERS = ("causal", "window", "document_and_window", "pair_bias", "minus_infinity")


@pytest.mark.parametrize("name", [long(x) if x in LIKE_OTHERS else x for x in GALLERY])
def test_gallery(name, chunked):
    check(GALLERY[name])


@pytest.mark.parametrize("name", [long(x) if x != "alibi" else x for x in GALLERY])
def test_gallery_as_a_whole(name):
    check(GALLERY[name])


# --- beside arguments -----------------------------------------------------------------------------

# A function, and the arguments that mean the same.
BUILT_IN = {
    "is_causal": (dict(mask_mod=causal), dict(is_causal=True)),
    "local_window_size": (dict(mask_mod=window), dict(local_window_size=3)),
    "segment_ids": (
        dict(mask_mod=documents),
        dict(query_segment_ids=DOCUMENTS, key_value_segment_ids=DOCUMENTS),
    ),
    "mask": (dict(mask_mod=tree), dict(mask=ANCESTORS)),
    "logits_soft_cap": (
        dict(score_mod=lambda score, *_: 2 * jnp.tanh(score / 2)),
        dict(logits_soft_cap=2.0),
    ),
    "bias": (
        GALLERY["pair_bias"].make(normal(B, N, T, T)),
        dict(bias=normal(B, N, T, T).astype(np.float32)),
    ),
    "scale": (dict(score_mod=lambda score, *_: 2 * score), dict(scale=2 * H**-0.5)),
}


@pytest.mark.parametrize("name", BUILT_IN)
def test_means_what_the_argument_means(name):
    functions, arguments = BUILT_IN[name]
    run = lambda options: results_and_gradients(
        lambda q, k, v, _: attention(q, k, v, return_residual=True, **options),
        jnp.float32,
        INPUTS,
        {},
    )
    if name == "bias":
        functions = GALLERY["pair_bias"].make(jnp.asarray(arguments["bias"]))
    for x, expected in zip(*map(jax.tree.leaves, (run(functions), run(arguments))), strict=True):
        np.testing.assert_allclose(x, expected, atol=2e-6, rtol=1e-5)


BOTH = Variant(
    lambda slopes: dict(
        mask_mod=lambda *indices: tree(*indices) | documents(*indices), score_mod=alibi(slopes)
    ),
    dict(slopes=normal(N)),
)
DROPOUT_KEY = jnp.array([17, 42], jnp.uint32)
ARGUMENTS = {
    "is_causal": dict(is_causal=True),
    "query_offset": dict(is_causal=True, query_offset=np.array([-3, 2])),
    "window": dict(local_window_size=(5, 2)),
    "ids": dict(query_segment_ids=DOCUMENTS, key_value_segment_ids=DOCUMENTS[::-1]),
    "lengths": dict(query_seq_lengths=np.array([16, 9]), key_value_seq_lengths=np.array([0, 12])),
    "mask": dict(mask=RNG.random((B, 1, T, T)) < 0.7),
    "bias": dict(bias=normal(1, N, T, T).astype(np.float32)),
    "soft_cap": dict(logits_soft_cap=1.5),
    "sinks": dict(sinks=normal(N).astype(np.float32)),
    "scale": dict(scale=0.7),
    "dropout": dict(dropout_rate=0.25, dropout_key=DROPOUT_KEY),
}
EVERY: dict[str, Any] = functools.reduce(lambda a, b: a | b, ARGUMENTS.values())
EVERY["query_offset"] = np.array([4, 9])
# Alone those come before or after all that the function does; the others are like one of these.
ALONE = "is_causal", "mask", "soft_cap", "dropout"


@pytest.mark.parametrize(
    "name", [*(long(x) if x in ALONE else slow(x) for x in ARGUMENTS), "every"]
)
def test_goes_with(name, chunked):
    options = EVERY if name == "every" else ARGUMENTS[name]
    keep = None
    if "dropout_rate" in options:
        positions = np.ix_(*map(range, (B, N, T, T)))
        keep = np.asarray(masks.dropout_keep(DROPOUT_KEY, options["dropout_rate"], *positions))
    check(BOTH, keep=keep, **options)


def test_other_lengths_and_float64():
    """Queries and keys of other numbers; all else in float64, where the errors are smaller."""
    query, key, value = INPUTS
    inputs = query[:, :5], key, value
    with jax.enable_x64(True):
        check(GALLERY["alibi"], inputs, dtype=jnp.float64, atol=1e-6)


def test_score_has_the_dtype_of_sums():
    seen = []

    def score_mod(score, b, h, q_idx, kv_idx):
        seen.append([x.dtype.name for x in (score, b, h, q_idx, kv_idx)])
        return score.astype(jnp.bfloat16)  # any float will do

    for dtype, of_score in ((jnp.bfloat16, "float32"), (jnp.float64, "float64")):
        with jax.enable_x64(dtype == jnp.float64):
            out = attention(*(jnp.asarray(x, dtype) for x in INPUTS), score_mod=score_mod)
        assert out.dtype == dtype
        assert seen.pop() == [of_score, "int32", "int32", "int32", "int32"]


def test_b_is_the_flat_index_of_several_batch_axes():
    inputs = [jnp.asarray(x, jnp.float32) for x in INPUTS]
    several = [jnp.stack([x, x + 1], 1) for x in inputs]  # [2, 2, T, N, H]
    flat = [x.reshape(4, *x.shape[2:]) for x in several]
    gate = jnp.arange(4.0)
    score_mod = lambda score, b, h, q_idx, kv_idx: score * gate[b]
    out = attention(*several, score_mod=score_mod)
    expected = attention(*flat, score_mod=score_mod)
    np.testing.assert_allclose(out.reshape(expected.shape), expected, atol=1e-6)
    alone = attention(*(x[3] for x in flat), score_mod=lambda score, b, *_: score * gate[b + 3])
    np.testing.assert_allclose(alone, expected[3], atol=1e-6)


@pytest.mark.long
def test_in_fp8(chunked):
    quantized = jax_flash.quantize_fp8(*(jnp.asarray(x, jnp.bfloat16)[..., :H] for x in INPUTS))
    bias = jnp.asarray(normal(B, N, T, T), jnp.float32)
    got = attention(*quantized, mask_mod=tree, **GALLERY["pair_bias"].make(bias))
    expected = attention(*quantized, mask=ANCESTORS, bias=bias)
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(expected, np.float32))


def test_symbolic_sizes():
    def run(x):
        return attention(x, x, x, mask_mod=causal, score_mod=alibi(SLOPES[0]))

    sizes = jax.export.symbolic_shape("b, t")
    exported = jax.export.export(jax.jit(run))(jax.ShapeDtypeStruct((*sizes, N, H), jnp.float32))
    np.testing.assert_allclose(exported.call(F32[0][:, :9]), run(F32[0][:, :9]), atol=1e-6)


def test_empty_axes():
    query = jnp.zeros((B, 0, N, H))
    loss = lambda slopes: attention(query, query, query, score_mod=alibi(slopes)).sum()
    np.testing.assert_array_equal(jax.grad(loss)(jnp.ones(N)), jnp.zeros(N))


# --- what is hidden -------------------------------------------------------------------------------

HIDDEN_NAN = {
    "of indices": lambda score, x, q, k: score + x * jnp.log((q - k).astype(jnp.float32)),
    "of captured": lambda score, x, q, k: score * jnp.exp(x * jnp.sqrt(0.5 - x - (k > q))),
    "in jit": jax.jit(lambda score, x, q, k: score / jnp.where(k < q, x, 0) ** 2),
    "vectors": lambda score, x, q, k: (
        score + (jnp.stack([x, x]) * jnp.where(k < q, k - q, jnp.nan)).sum()
    ),
    "acosh": lambda score, x, q, k: score + x * jnp.acosh(1.0 + q - k),
    "custom_jvp": lambda score, x, q, k: score + jax.nn.softplus(x * (q - k) / (k < q)),
}


@pytest.mark.parametrize("name", [long(x) if n else x for n, x in enumerate(HIDDEN_NAN)])
def test_nan_where_hidden_does_not_count(name, request):
    if name == "of indices":
        request.getfixturevalue("chunked")
    own, inputs = HIDDEN_NAN[name], [jnp.asarray(x, jnp.float32) for x in INPUTS]

    def score_mod(x, safe):
        def function(score, b, h, q_idx, kv_idx):
            # Row 0 sees nothing.
            kv = jnp.where(kv_idx < q_idx, kv_idx, q_idx - 1) if safe else kv_idx
            return own(score, x[h], q_idx, kv)

        return function

    def loss(inputs, x, safe):
        mask_mod = lambda b, h, q_idx, kv_idx: kv_idx < q_idx
        out = attention(*inputs, mask_mod=mask_mod, score_mod=score_mod(x, safe))
        return (out**2).sum()

    x = jnp.linspace(0.1, 0.4, N)
    got, expected = (
        jax.value_and_grad(loss, argnums=(0, 1))(inputs, x, safe) for safe in (False, True)
    )
    for a, b in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
        assert np.isfinite(b).all()
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    _, tangent = jax.jvp(lambda x: loss(inputs, x, False), (x,), (jnp.ones(N),))
    np.testing.assert_allclose(tangent, expected[1][1].sum(), rtol=1e-4)
    if name in ("of indices", "custom_jvp"):
        hessian = jax.hessian(loss, argnums=1)(inputs, x, False)
        assert np.isfinite(hessian).all()


def test_rows_that_see_nothing():
    inputs = [jnp.asarray(x, jnp.float32) for x in INPUTS]
    sees = lambda q_idx: q_idx % 3 != 0
    for functions in (
        dict(mask_mod=lambda b, h, q_idx, kv_idx: sees(q_idx)),
        dict(score_mod=lambda score, b, h, q_idx, kv_idx: jnp.where(sees(q_idx), score, -jnp.inf)),
    ):
        run = lambda *inputs, own=functions: attention(*inputs, return_residual=True, **own)
        (out, lse), pull = jax.vjp(run, *inputs)
        assert (out[:, ::3] == 0).all() and (lse[:, ::3] == -jnp.inf).all()
        assert np.isfinite(out).all() and np.isfinite(lse[:, 1::3]).all()
        d_query, *_ = gradients = pull((jnp.ones_like(out), jnp.ones_like(lse)))
        assert (d_query[:, ::3] == 0).all()
        assert all(np.isfinite(x).all() for x in gradients)


def test_what_no_one_sees_may_be_nan():
    query, key, value = (jnp.asarray(x, jnp.float32) for x in INPUTS)
    poisoned = lambda x: x.at[:, 9:].set(jnp.nan)
    run = lambda *inputs: attention(*inputs, mask_mod=lambda b, h, q_idx, kv_idx: kv_idx < 9).sum()
    got = jax.grad(run, argnums=(0, 1, 2))(query, poisoned(key), poisoned(value))
    expected = jax.grad(run, argnums=(0, 1, 2))(query, key, value)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(a, b)


# --- what functions capture -----------------------------------------------------------------------

F32 = [jnp.asarray(x, jnp.float32) for x in INPUTS]


@pytest.mark.long
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_gradients_have_shape_and_dtype_of_the_captured(dtype, monkeypatch):
    """And are summed in float32, over the pairs of a chunk and over chunks."""
    monkeypatch.setattr(xla, "LOGITS_BYTES", 0)
    monkeypatch.setattr(xla, "MIN_ROWS", 150)
    inputs = [jnp.asarray(normal(1, 400, heads, H), jnp.float32) for heads in (N, K, K)]
    table = jnp.asarray(normal(11, N), dtype)
    loss = lambda table: (attention(*inputs, score_mod=t5(table)) ** 2).sum()
    got, expected = jax.grad(loss)(table), jax.grad(loss)(table.astype(jnp.float32))
    assert got.dtype == dtype
    error = np.abs(got.astype(jnp.float32) - expected).max() / np.abs(expected).max()
    assert error < 2 * jnp.finfo(dtype).eps


def test_of_what_only_a_mask_reads_the_gradient_is_zero():
    def loss(threshold, count):
        mask_mod = lambda b, h, q_idx, kv_idx: (threshold[kv_idx] > 0) | (kv_idx < count)
        return attention(*F32, mask_mod=mask_mod).sum()

    threshold, count = jnp.asarray(normal(T), jnp.float32), jnp.int32(3)
    np.testing.assert_array_equal(jax.jit(jax.grad(loss))(threshold, count), jnp.zeros(T))
    of_both = jax.grad(loss, argnums=(0, 1), allow_int=True)(threshold, count)
    assert of_both[1].dtype == jax.dtypes.float0


def of_slopes(slopes, thresholds=None):
    """A loss of arrays that both functions capture."""
    thresholds = jnp.full(T, 0.5) if thresholds is None else thresholds
    mask_mod = lambda b, h, q_idx, kv_idx: thresholds[kv_idx] > q_idx / 20
    return (attention(*F32, mask_mod=mask_mod, score_mod=alibi(slopes)) ** 2).sum()


SLOPES = jnp.asarray(normal(3, N), jnp.float32)
THRESHOLDS = jnp.asarray(RNG.random((3, T)), jnp.float32)


@pytest.mark.long
def test_vmap_over_captured_arrays():
    each = zip(SLOPES, THRESHOLDS, strict=True)
    expected = jnp.stack([jax.grad(of_slopes)(*both) for both in each])
    got = jax.vmap(jax.grad(of_slopes))(SLOPES, THRESHOLDS)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    summed = jax.grad(lambda x: jax.vmap(of_slopes, (0, None))(x, THRESHOLDS[0]).sum())(SLOPES)
    expected = jnp.stack([jax.grad(of_slopes)(x, THRESHOLDS[0]) for x in SLOPES])
    np.testing.assert_allclose(summed, expected, rtol=1e-5, atol=1e-5)


def test_under_vmap_b_counts_within_one_mapped_call():
    gate = jnp.array([0.5, 2.0])
    score_mod = lambda score, b, *_: score * gate[b]
    stacked = [jnp.stack([x, 2 * x]) for x in F32]
    got = jax.vmap(lambda *inputs: attention(*inputs, score_mod=score_mod))(*stacked)
    for out, factor in zip(got, (1, 2), strict=True):
        expected = attention(*(factor * x for x in F32), score_mod=score_mod)
        np.testing.assert_allclose(out, expected, atol=1e-6)


TRANSFORMED = {
    "jit of grad": lambda f: jax.jit(jax.grad(f)),
    "grad of jit": lambda f: jax.grad(jax.jit(f)),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f)),
    "checkpoint by names": lambda f: jax.grad(
        jax.checkpoint(
            f, policy=jax.checkpoint_policies.save_only_these_names(*jax_flash.CHECKPOINT_NAMES)
        )
    ),
    "jvp": jax.jacfwd,
    "scan": lambda f: (
        lambda x: jax.lax.scan(lambda total, x: (total + jax.grad(f)(x), None), 0 * x, x[None])[0]
    ),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_transformed(name):
    expected = jax.grad(of_slopes)(SLOPES[0])
    got = TRANSFORMED[name](of_slopes)(SLOPES[0])
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.long
def test_second_derivative(chunked):
    distance = jnp.arange(T) - jnp.arange(T)[:, None]
    as_bias = lambda slopes: (attention(*F32, bias=slopes[:, None, None] * distance) ** 2).sum()
    mine = lambda slopes: (attention(*F32, score_mod=alibi(slopes)) ** 2).sum()
    got, expected = (jax.hessian(f)(SLOPES[0] / 9) for f in (mine, as_bias))
    np.testing.assert_allclose(got, expected, atol=1e-4 * np.abs(expected).max())


def test_a_function_may_change_between_calls():
    state = dict(factor=1.0)
    score_mod = lambda score, *_: score * state["factor"]
    for factor in (1.0, 3.0):
        state["factor"] = factor
        np.testing.assert_allclose(
            attention(*F32, score_mod=score_mod),
            attention(*F32, scale=factor * H**-0.5),
            atol=1e-6,
        )


def test_values_that_are_not_traced_may_differ():
    """Programs are told apart by the numbers in them."""
    for factor in (np.float32(0.5), np.float32(0.25), 0.5, jnp.float32(3.0)):
        np.testing.assert_allclose(
            attention(*F32, score_mod=lambda score, *_, factor=factor: score * factor),
            attention(*F32, scale=float(factor) * H**-0.5),
            atol=1e-6,
        )


# --- over devices ---------------------------------------------------------------------------------


def of_devices(query, key, value, gate):
    """Both functions count batch entries and heads; a number for each head and entry."""
    mask_mod = lambda b, h, q_idx, kv_idx: (kv_idx + b + h) % 3 != 0
    score_mod = lambda score, b, h, q_idx, kv_idx: score * gate[b, h]
    return attention(query, key, value, mask_mod=mask_mod, score_mod=score_mod)


@pytest.mark.long
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_indices_are_those_of_the_whole(axis_type):
    if jax.default_backend() != "cpu":
        pytest.skip("needs four devices, which conftest.py makes of a CPU alone")
    gate = jnp.asarray(normal(B, N), jnp.float32)
    gradients = jax.grad(lambda *x: (of_devices(*x) ** 2).sum(), argnums=(0, 1, 2, 3))
    expected = gradients(*F32, gate)
    split = PartitionSpec("x", None, "y")
    arrays = put(mesh_of((2, 2), axis_type), *((x, split) for x in F32), (gate, PartitionSpec()))
    for x, own in zip(jax.jit(gradients)(*arrays), expected, strict=True):
        np.testing.assert_allclose(x, own, atol=1e-4)


@pytest.mark.long
def test_inside_shard_map_indices_are_of_what_the_call_gets():
    gate = jnp.asarray(normal(1, N), jnp.float32)
    gradients = jax.grad(lambda *x: (of_devices(*x) ** 2).sum(), argnums=(0, 1, 2, 3))
    parts = [gradients(*(x[i : i + 1] for x in F32), gate) for i in range(B)]
    expected = [jnp.concatenate(x) for x in zip(*parts, strict=True)][:3]
    batch, whole = PartitionSpec("x"), PartitionSpec()
    got = jax.jit(
        jax.shard_map(
            gradients,
            mesh=mesh_of((B,)),
            in_specs=(batch, batch, batch, whole),
            out_specs=(batch, batch, batch, whole),
        )
    )(*F32, gate)
    for x, own in zip(got, [*expected, sum(x[3] for x in parts)], strict=True):
        np.testing.assert_allclose(x, own, atol=1e-4)


# --- memory and programs --------------------------------------------------------------------------


def test_memory_is_linear_in_length():
    """By chunk, as all else: scores of all pairs would take 2 GiB here."""
    length, heads = 16384, 2
    x = jax.ShapeDtypeStruct((1, length, heads, 64), jnp.bfloat16)
    numbers = jax.ShapeDtypeStruct((length,), jnp.float32)

    def loss(query, key, value, slopes, ids):
        mask_mod = lambda b, h, q_idx, kv_idx: ids[q_idx] == ids[kv_idx]
        out = attention(query, key, value, mask_mod=mask_mod, score_mod=alibi(slopes))
        return out.astype(jnp.float32).sum()

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))
    compiled = gradients.lower(x, x, x, numbers, numbers).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2**30


def test_one_program_for_new_arrays():
    run = lambda slopes: attention(*F32, mask_mod=causal, score_mod=alibi(slopes))
    run(SLOPES[0])
    once = xla._attention._cache_size()
    run(SLOPES[1])
    assert xla._attention._cache_size() == once


# --- errors ---------------------------------------------------------------------------------------


def printing(b, h, q_idx, kv_idx):
    jax.debug.print("{}", q_idx)
    return kv_idx <= q_idx


def calling(score, b, h, q_idx, kv_idx):
    return jax.pure_callback(np.sin, jax.ShapeDtypeStruct((), jnp.float32), score)


ERRORS = [
    (dict(mask_mod=3), TypeError, r"mask_mod: got int; needs a function \(b, h, q_idx, kv_idx\)"),
    (dict(score_mod=ANCESTORS), TypeError, r"score_mod: got ndarray; needs .* \(score, b, h, q_i"),
    (dict(mask_mod=lambda *_: 1), TypeError, "mask_mod: got .* that gives int32; needs .* bool"),
    (dict(mask_mod=lambda *_: None), TypeError, "mask_mod: got a function that gives NoneType"),
    (dict(mask_mod=lambda b, h, *x: x), TypeError, "mask_mod: got a function that gives tuple"),
    (dict(score_mod=lambda *x: x[1]), TypeError, "score_mod: got .* gives int32; needs .* a float"),
    (dict(score_mod=lambda s, *_: s > 0), TypeError, "score_mod: got a function that gives bool"),
    (dict(mask_mod=lambda *_: ANCESTORS), ValueError, r"mask_mod: got .* shape \(16, 16\)"),
    (dict(mask_mod=printing), ValueError, "mask_mod: got a function with debug_.*; needs .* callb"),
    (dict(mask_mod=jax.jit(printing)), ValueError, "mask_mod: got a function with debug_"),
    (
        dict(mask_mod=lambda i, j: i > j),
        TypeError,
        r"mask_mod: got a function \(i, j\); needs a fu",
    ),
    (dict(score_mod=lambda s, b, h: s), TypeError, r"score_mod: got a function \(s, b, h\); needs"),
    (dict(score_mod=calling), ValueError, "score_mod: got a function with pure_callback; needs"),
]


@pytest.mark.parametrize(("functions", "error", "message"), ERRORS)
def test_errors(functions, error, message):
    for run in (jax_flash.attention, jax_flash.explain):
        with pytest.raises(error, match=message):
            run(*F32, **functions)


@pytest.mark.parametrize("name", ["mask_mod", "score_mod"])
def test_what_a_function_raises_says_of_which_argument(name):
    with pytest.raises(KeyError) as caught:
        jax_flash.attention(*F32, **{name: lambda *_: {}[3]})
    assert f"{name}: got a function that raises this" in "".join(caught.value.__notes__)


def test_a_numpy_array_is_named():
    with pytest.raises(TypeError) as caught:
        jax_flash.attention(*F32, mask_mod=lambda b, h, q_idx, kv_idx: ANCESTORS[q_idx, kv_idx])
    assert "mask_mod: got a list or a NumPy array" in "".join(caught.value.__notes__)


@pytest.mark.parametrize(
    "mask_mod",
    [
        lambda b, h, q_idx, kv_idx: q_idx >= kv_idx and kv_idx > 3,
        lambda b, h, q_idx, kv_idx: 0 <= q_idx - kv_idx < 5,
        lambda b, h, q_idx, kv_idx: kv_idx if q_idx > 3 else kv_idx > 3,
    ],
)
def test_python_conditions_are_named(mask_mod):
    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        jax_flash.attention(*F32, mask_mod=mask_mod)
    assert "mask_mod: got a function with `if`" in "".join(caught.value.__notes__)


@pytest.mark.parametrize("name", ["mosaic_gpu", "cudnn"])
def test_refused_with_the_reason(name, monkeypatch):
    on_hopper = device.Device("gpu", "NVIDIA H100", (9, 0))
    monkeypatch.setattr(device, "device_of", lambda array: on_hopper)
    inputs = [jnp.zeros((B, 128, N, 64), jnp.bfloat16)] * 3
    mask = lambda b, h, q_idx, kv_idx: jnp.floor(q_idx / 3) >= kv_idx
    score = lambda score, b, h, q_idx, kv_idx: score + jnp.floor(q_idx / 3)
    for argument, function in dict(mask_mod=mask, score_mod=score).items():
        with pytest.raises(NotImplementedError, match=f"implementation='{name}': .*{argument}"):
            jax_flash.attention(*inputs, implementation=name, **{argument: function})
        explanation = jax_flash.explain(*inputs, **{argument: function})
        assert explanation.implementation == "xla"
        assert argument in explanation.reasons[name]


def test_attention_fp8_refuses():
    with pytest.raises(NotImplementedError, match="attention_fp8 takes no mask_mod"):
        jax_flash.attention_fp8(*F32, mask_mod=causal)


@pytest.mark.parametrize("argument", ["mask_mod", "score_mod"])
@pytest.mark.parametrize(
    "function",
    [
        functools.partial(jax_flash.ring_attention, axis_name="x"),
        functools.partial(jax_flash.ulysses_attention, axis_name="x"),
        functools.partial(jax_flash.all_gather_attention, axis_name="x"),
        functools.partial(jax_flash.decode_attention, lengths=np.array([1, 2])),
    ],
)
def test_others_do_not_take_them(function, argument):
    with pytest.raises(TypeError, match=argument):
        function(*F32, **{argument: causal})
