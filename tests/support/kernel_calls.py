"""Calls of the kernels, and what they are checked against."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np

import jax_flash
from jax_flash.masks import dropout_keep
from pallas_kernels import config, defaults
from pallas_kernels.problem import Problem
from tests import oracle
from tests.support.interpret import interpret_mode
from tests.support.nonzero import assert_none_is_zero
from tests.support.rounding import assert_as_accurate_as_plain, plain_attention

DROPOUT_KEY = jax.random.key(31)


def inputs(B, T, S, N, K, H, dtype, seed=0, h=None):
    """Query, key, value and the cotangents of output and LSE; values have h columns, or H."""
    h = h or H
    rng = np.random.default_rng(seed)  # nothing to compile for each shape
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, h), (B, T, N, h)
    arrays = [jnp.array(rng.standard_normal(shape, np.float32).astype(dtype)) for shape in shapes]
    return (*arrays, jnp.array(rng.standard_normal((B, T, N), np.float32)))


def with_shares(H: int, shares: int | config.Shares | None) -> config.Config:
    """Default settings, but for the shares of tiles in the backward."""
    default = defaults.default(H)
    return dataclasses.replace(
        default, backward=dataclasses.replace(default.backward, shares=shares)
    )


def check(
    arrays,
    *,
    sinks=None,
    bias=None,
    logits_soft_cap=None,
    config=None,
    deterministic=False,
    dropout_rate=0.0,
    mask_mod=None,
    score_mod=None,
    **options,
):
    """Runs forward and backward and compares every result with float64.

    Args:
      arrays: what `inputs` gives.
      sinks, bias, logits_soft_cap, config, deterministic, dropout_rate, mask_mod, score_mod: as
        for `jax_flash.attention`; the rate is a multiple of 2^-15.
      **options: what of its other arguments decides what is visible.
    """
    query, key, value, dout, dlse = arrays

    def attention(query, key, value, bias, sinks):
        return jax_flash.attention(
            query,
            key,
            value,
            bias,
            **options,
            sinks=sinks,
            logits_soft_cap=logits_soft_cap,
            return_residual=True,
            implementation="mosaic_gpu",
            config=config,
            deterministic=deterministic,
            dropout_rate=dropout_rate,
            dropout_key=DROPOUT_KEY,
            mask_mod=mask_mod,
            score_mod=score_mod,
        )

    (out, lse), vjp = jax.vjp(attention, query, key, value, bias, sinks)
    *gradients, d_sinks = vjp((dout, dlse))

    (B, T, N, _), S = query.shape, key.shape[1]
    if mask_mod is not None:
        given = options.get("mask")
        options["mask"] = dense_mask(mask_mod, B, N, T, S) & (True if given is None else given)
    keep = np.ones((B, N, T, S), bool)
    if dropout_rate:
        places = np.ix_(range(B), range(N), range(T), range(S))
        keep = np.asarray(dropout_keep(jax.random.key_data(DROPOUT_KEY), dropout_rate, *places))
    exact_options = dict(
        sinks=sinks,
        logits_soft_cap=logits_soft_cap,
        dropout_rate=dropout_rate,
        dropout_keep=keep,
        score=None if score_mod is None else exact_score(score_mod, B, N, T, S),
        **options,
    )
    exact_out, exact_lse = oracle.attention(query, key, value, bias, **exact_options)
    exact = oracle.gradients(query, key, value, bias, dout=dout, dlse=dlse, **exact_options)
    visible = oracle.visibility(query.shape[0], query.shape[1], key.shape[1], **options)
    plain, rough_gradients = _plain_with_gradients(
        logits_soft_cap,
        score_mod,
        (query, key, value, bias),
        (visible, sinks, keep / (1 - dropout_rate)),
        (dout, dlse),
    )
    assert_as_accurate_as_plain(out, plain, exact_out, "out")
    seen = np.isfinite(exact_lse)
    chex.assert_trees_all_equal(np.isfinite(lse), seen)
    np.testing.assert_allclose(np.asarray(lse)[seen], exact_lse[seen], atol=1e-4, rtol=1e-5)
    np.testing.assert_array_equal(np.asarray(lse)[~seen], -np.inf)
    for name, actual, rough, truth in zip(
        ("d_query", "d_key", "d_value", "d_bias"), gradients, rough_gradients, exact, strict=False
    ):
        if name == "d_bias" and bias is None:
            continue
        if name == "d_bias" and bias.shape[-1] == 1:
            # A row's terms cancel but for dLSE, up to what the output in delta is rounded to.
            delta = np.abs(exact_out * np.asarray(dout, np.float64)).sum(-1).max()
            rows = exact_lse.size / bias.size  # that share a value
            np.testing.assert_allclose(actual, truth, atol=2**-8 * delta * np.sqrt(rows))
            continue
        # Delta is made of the rounded output: where a row sees few keys, all of its error.
        delta = np.sqrt(((exact_out * np.asarray(dout, np.float64)) ** 2).sum(-1).max())
        more = 0.0
        if name == "d_bias":
            rows = exact_lse.size * bias.shape[-1] / bias.size  # that share a value
            more = 2.0**-9 * delta * np.sqrt(rows)
        elif name != "d_value":
            other = key if name == "d_query" else query
            more = 2.0**-8 * delta * float(np.abs(other).max()) / np.sqrt(query.shape[-1])
        assert_as_accurate_as_plain(actual, rough, truth, name, more)
    if sinks is not None:
        # What the largest terms of its sum round to.
        terms = np.sqrt(query.shape[1]) * np.abs(exact.sinks).max()
        np.testing.assert_allclose(d_sinks, exact.sinks, atol=1e-2 * terms + 1e-6)
    for empty in (np.asarray(out)[~seen], np.asarray(gradients[0])[~seen]):
        assert not empty.any()


def dense_mask(mask_mod, *sizes) -> np.ndarray:
    """What a mask_mod shows, bool `[B, N, T, S]`."""
    indices = (jnp.asarray(x, jnp.int32) for x in np.ix_(*map(range, sizes)))
    return np.broadcast_to(mask_mod(*indices), sizes)


def exact_score(score_mod, *sizes):
    """What a score_mod makes of float64 scores `[B, N, T, S]`, and its derivative by them."""
    indices = np.ix_(*map(range, sizes))

    def value_and_slope(scores):
        with jax.enable_x64(True):
            places = [jnp.asarray(x, jnp.int32) for x in indices]
            scores = jnp.asarray(scores, jnp.float64)
            of_scores = lambda scores: jnp.broadcast_to(score_mod(scores, *places), sizes)
            found = jax.jvp(of_scores, (scores,), (jnp.ones_like(scores),))
            return tuple(np.asarray(x, np.float64) for x in found)

    return value_and_slope


# Compiled as a whole, as that of single operations takes longer; rounded like these.
@functools.partial(
    jax.jit, static_argnums=(0, 1), compiler_options={"xla_allow_excess_precision": False}
)
def _plain_with_gradients(logits_soft_cap, score_mod, operands, others, cotangents):
    """Output of `plain_attention`, and the gradients of query, key, value and bias."""
    seen, sinks, dropout = others

    def attention(query, key, value, bias):
        return plain_attention(
            query, key, value, seen, sinks, bias, logits_soft_cap, dropout, score_mod
        )

    (out, _), vjp = jax.vjp(attention, *operands)
    return out, vjp(cotangents)


def with_a_jump(arrays, head: int, first_keys: int):
    """The same inputs with keys of one head, the ones worked on last, that outweigh all others."""
    query, key, *rest = arrays
    return query, key.at[:, :first_keys, head].multiply(60), *rest


def few_thread_blocks(width: int, count: int, value_width: int = 0, **own: int) -> config.Config:
    """The default settings, with so few thread blocks that each walks several tiles.

    Args:
      **own: other settings of the forward.
    """
    settings = defaults.default(width, value_width)
    forward = dataclasses.replace(settings.forward, thread_blocks=count, **own)
    backward = dataclasses.replace(settings.backward, thread_blocks=count)
    return dataclasses.replace(settings, forward=forward, backward=backward)


def check_that_rows_alone_do_not_count(attention, arrays, no_query, no_key, poison):
    """What sees nothing, and what nothing sees, has zeros in its results whatever stands there.

    Args:
      attention: of query, key and value; gives output and LSE.
      arrays: what `inputs` gives.
      no_query, no_key: `[B, T]` and `[B, S]` bool.
      poison: what stands there.
    """

    def results(query, key, value, dout, dlse):
        results, vjp = jax.vjp(attention, query, key, value)
        return *results, *vjp((dout, dlse))

    def poisoned(x, where):
        return jnp.where(where.reshape(where.shape + (1,) * (x.ndim - 2)), poison, x)

    where = no_query, no_key, no_key, no_query, no_query
    with interpret_mode(detect_races=False):  # which `check` does
        clean = results(*arrays)
        got = results(*map(poisoned, arrays, where))
    out, lse, d_query, d_key, d_value = clean
    chex.assert_trees_all_equal(np.isneginf(lse[:, :, 0]), np.asarray(no_query))
    for x, nothing in ((out, no_query), (d_query, no_query), (d_key, no_key), (d_value, no_key)):
        assert not np.asarray(x)[nothing].any()
        assert np.asarray(x)[~nothing].any()
    chex.assert_tree_all_finite((out, d_query, d_key, d_value))
    chex.assert_trees_all_equal(got, clean)


def check_vmap_over_options(attention, width=64, **options):
    """Losses and gradients of all at once are those of one after the other; returns the losses.

    Args:
      attention: the output of query `[1, 40, 1, width]`, key and value `[1, 48, 1, width]`, and
        options.
      options: what each takes, along the first axis.
    """
    arrays = inputs(1, 40, 48, 1, 1, width, jnp.bfloat16)[:3]

    @jax.jit  # one program for each of them alone
    def gradients(options):
        def loss(*arrays):
            return (attention(*arrays, **options).astype(jnp.float32) ** 2).sum()

        return jax.value_and_grad(loss, (0, 1, 2))(*arrays)

    each = [dict(zip(options, own, strict=True)) for own in zip(*options.values(), strict=True)]
    with interpret_mode(detect_races=False):  # which `check` does
        together = jax.vmap(gradients)(options)
        one_by_one = [gradients(own) for own in each]
    # XLA on a CPU adds up in one order or another.
    losses, gradients_of_all = jax.tree.map(lambda *x: jnp.stack(x), *one_by_one)
    chex.assert_trees_all_close(together[0], losses, rtol=1e-5)
    chex.assert_trees_all_close(together[1], gradients_of_all, rtol=2**-7, atol=1e-3)
    return losses


def check_that_keys_do_not_count(S, H, unseen, **options):
    """Forward and backward of 70 queries, with NaN in keys or values that none of them sees."""
    query, key, value, dout, _ = inputs(1, 70, S, 1, 1, H, jnp.bfloat16)
    attention = functools.partial(jax_flash.attention, **options, implementation="mosaic_gpu")

    def results(arrays):
        out, vjp = jax.vjp(attention, query, arrays["key"], arrays["value"])
        return out, *vjp(dout)

    calm = {"key": key, "value": value}
    with interpret_mode(detect_races=False):  # which `check` does
        expected = results(calm)
        poisoned = [calm | {name: x.at[:, unseen].set(jnp.nan)} for name, x in calm.items()]
        found = [results(arrays) for arrays in poisoned]
    for got in found:
        chex.assert_trees_all_equal(got, expected)
    assert_none_is_zero(expected)
    assert not expected[2][:, unseen].any() and not expected[3][:, unseen].any()


def problem(T, S, N=4, K=2, B=2, lowest=None, highest=None):
    return Problem(B, T, S, N, K, 128, np.dtype(jnp.bfloat16), 1.0, lowest, highest)


def as_arrays(options):
    return {k: jnp.array(v) if isinstance(v, list) else v for k, v in options.items()}
