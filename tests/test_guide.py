"""What the user's guide says of results, and its blocks that tests/test_readme.py does not run."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from jax_flash import device
from tests import oracle
from tests.support.pages import sections

H100 = device.Device("gpu", "NVIDIA H100", (9, 0))
B, T, N, K, H = 2, 24, 4, 2, 8
QUERY = jax.random.normal(jax.random.key(0), (B, T, N, H))
KEY, VALUE = jax.random.normal(jax.random.key(1), (2, B, T, K, H))
LENGTHS = np.array([17, 24])
# Two and three documents, and padding behind them.
IDS = np.array([[1] * 9 + [2] * 8 + [0] * 7, [1] * 5 + [2] * 6 + [3] * 11 + [0] * 2], np.int32)


def names_of(section: str, **before) -> dict:
    for block in sections()[section]:
        block.run(before)
    return before


def positions(ids) -> np.ndarray:
    """In each document, `[B, T]`."""
    return np.arange(T) - np.array([[row.tolist().index(x) for x in row] for row in ids])


@pytest.fixture(scope="module")
def others() -> dict:
    return names_of("Calls of MaxText and TransformerEngine")


def check(function, query, key, value, counts, **options):
    """Output and gradients of the rows that count, beside float64 with options of `attention`."""
    weights = np.where(
        counts[..., None, None], np.random.default_rng(2).normal(size=query.shape), 0
    )
    loss = lambda *x: (function(*x) * weights).sum()
    out = jnp.where(counts[..., None, None], function(query, key, value), 0)
    found = out, jax.grad(loss, (0, 1, 2))(query, key, value)
    expected, _ = oracle.attention(query, key, value, **options)
    expected = np.where(counts[..., None, None], expected, 0)
    slopes = oracle.gradients(query, key, value, dout=weights, **options)
    chex.assert_trees_all_close(found, (expected, tuple(slopes[:3])), atol=1e-4)


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("ids", [None, IDS], ids=["whole", "packed"])
def test_calls_of_maxtext(others, ids, window):
    """Rows of padding, which MaxText leaves out of its loss, are finite."""
    run = functools.partial(others["attention_op"], window=window)
    attend = lambda query, key, value: run(query, key, value, ids, positions(IDS))
    place = np.arange(T)
    mask = place[:, None] >= place
    if window is not None:
        mask &= place[:, None] - place < window
    mask = np.broadcast_to(mask, (B, T, T)).copy()
    counts = np.ones((B, T), bool) if ids is None else ids > 0
    if ids is not None:
        mask &= ids[:, :, None] == ids[:, None]
    check(attend, QUERY, KEY, VALUE, counts, mask=mask[:, None], scale=1.0)
    assert jnp.isfinite(attend(QUERY, KEY, VALUE)).all()


@pytest.mark.parametrize("causal", [False, True])
def test_lengths_of_transformer_engine(others, causal):
    """Of queries and of keys."""
    lengths = LENGTHS, LENGTHS - 3
    attend = lambda *qkv: others["fused_attn"](qkv, None, seqlens=lengths, causal=causal)
    place = np.arange(T)
    mask = (place < lengths[0][:, None])[:, :, None] & (place < lengths[1][:, None])[:, None]
    mask &= (place[:, None] >= place) | (not causal)
    counts = np.ones((B, T), bool)  # where all are padding they are 0, as in the reference
    check(attend, QUERY, KEY, VALUE, counts, mask=mask[:, None])
    assert not attend(QUERY, KEY, VALUE)[0, 17:].any()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("order", ["as they come", "by positions", "turned"])
def test_documents_of_transformer_engine(others, order, causal):
    """Positions in any order need segment_pos: here the sequence backwards."""
    ids, at = IDS, positions(IDS)
    if order == "turned":
        ids, at = ids[:, ::-1], at[:, ::-1]
    pairs = dict(segment_ids=(ids, ids), segment_pos=None if order == "as they come" else (at, at))
    attend = lambda *qkv: others["fused_attn"](qkv, None, causal=causal, **pairs)
    mask = (ids[:, :, None] == ids[:, None]) & (ids[:, :, None] > 0)
    if causal:
        mask &= at[:, :, None] >= at[:, None]
    check(attend, QUERY, KEY, VALUE, np.ones((B, T), bool), mask=mask[:, None])
    assert not np.asarray(attend(QUERY, KEY, VALUE))[ids == 0].any()


def test_a_serving_loop(monkeypatch):
    """Each token that it gives is the likeliest by attention over the whole text, to rounding."""
    names = names_of("A serving loop")
    query, key, value, scores = np.asarray(names["weights"], np.float64)
    texts = names["texts"]
    assert [text[:2] for text in texts] == [[3, 1], [1, 2], [2, 7], [5, texts[3][1]]]
    for text, given in zip(texts, (3, 19, 2, 1), strict=True):
        assert len(text) == 24
        rows = [x[np.array(text)][None] for x in (query, key, value)]
        out, _ = oracle.attention(*rows, is_causal=True)
        logits = np.einsum("tnh,vnh->tv", out[0], scores)[given - 1 : -1]
        chosen = np.take_along_axis(logits, np.array(text)[given:, None], axis=1)[:, 0]
        assert (logits.max(-1) - chosen).max() < 0.1 < logits.std()

    step = names["step"].__wrapped__
    pool = jax.ShapeDtypeStruct((4, 16, 2, 64), jnp.bfloat16)
    counts = jax.ShapeDtypeStruct((2,), jnp.int32)
    table = jax.ShapeDtypeStruct((2, 2), jnp.int32)
    monkeypatch.setattr(device, "device_of", lambda array: H100)
    for tokens in (1, names["CHUNK"]):
        new = jax.ShapeDtypeStruct((2, tokens), jnp.int32)
        # A function of its own: JAX keeps what it traced of this one for a CPU.
        traced = jax.jit(lambda *x: step(*x)).trace((pool, pool), new, counts, counts, table)
        assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


# What the guide's table says of padding behind documents, in `IDS`: ids of queries and of keys.
RISING = IDS + np.where(IDS == 0, np.arange(T) + 4, 0)
PADDING = {
    "0": (IDS, IDS),
    "-1": (np.where(IDS == 0, -1, IDS),) * 2,
    "rising": (RISING, RISING),
    "two arrays": (np.where(IDS == 0, -1, IDS), np.where(IDS == 0, -2, IDS)),
}


@pytest.mark.parametrize("kind", [*PADDING, "lengths"])
def test_padding_behind_documents(kind):
    names = "query_segment_ids", "key_value_segment_ids"
    options = dict(zip(names, PADDING.get(kind, PADDING["0"]), strict=True))
    if kind == "lengths":
        options |= dict.fromkeys(("query_seq_lengths", "key_value_seq_lengths"), (IDS > 0).sum(1))
    run = lambda *x: jax_flash.attention(*x, is_causal=True, **options)
    mask = (IDS[:, :, None] == IDS[:, None])[:, None]
    check(run, QUERY, KEY, VALUE, IDS > 0, mask=mask, is_causal=True)
    rows = np.asarray(run(QUERY, KEY, VALUE))[IDS == 0]
    if kind in ("two arrays", "lengths"):
        assert not rows.any()
    elif kind == "rising":
        own = np.repeat(np.asarray(VALUE), N // K, axis=2)[IDS == 0]
        chex.assert_trees_all_close(rows, own, atol=1e-6)
    else:
        assert np.isfinite(rows).all()


def test_what_other_entries_hold_changes_nothing():
    """On xla in a batch of one shape, to the bit."""
    grown = lambda x: x.at[1:].multiply(50.0)

    @jax.jit
    def results(query, key, value, lengths):
        run = functools.partial(jax_flash.attention, return_residual=True, implementation="xla")
        options = dict(is_causal=True, key_value_seq_lengths=lengths)
        loss = lambda *x: sum((y[0] ** 2).sum() for y in run(*x, **options))
        return run(query, key, value, **options), jax.grad(loss, (0, 1, 2))(query, key, value)

    arrays = QUERY, KEY, VALUE
    first = results(*arrays, jnp.array([20, 24]))
    second = results(*map(grown, arrays), jnp.array([20, 3]))
    of_entry = lambda tree: jax.tree.map(lambda x: x[0], tree)
    chex.assert_trees_all_equal(of_entry(first), of_entry(second))


def test_what_other_sequences_hold_changes_nothing_in_decoding():
    """Nor how long they are: here the loop over the cache has one chunk of keys, and three."""
    keys, values = jax.random.normal(jax.random.key(3), (2, 2, 9000, K, H))
    decode = jax.jit(
        functools.partial(jax_flash.decode_attention, return_residual=True, implementation="xla")
    )
    first = decode(QUERY[:, :2], keys, values, jnp.array([700, 9000]))
    for length in (0, 3000, 5000):
        second = decode(QUERY[:, :2], keys, values * 2, jnp.array([700, length]))
        assert not jnp.array_equal(first[0][1], second[0][1])
        third = decode(QUERY[:, :2], keys, values.at[1].multiply(2), jnp.array([700, length]))
        chex.assert_trees_all_equal([x[0] for x in first], [x[0] for x in third])
