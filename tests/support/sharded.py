"""For tests of sharding: the kernels in plain JAX, and the collectives of compiled programs."""

import collections
import contextlib
import functools
import re
from collections.abc import Iterator
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from jax_flash import autodiff, mask_blocks, sharding, xla
from jax_flash.call import Call
from jax_flash.masks import Visibility
from pallas_kernels import forward, gradients, segments

_COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")


def mesh_of(shape: tuple[int, ...], axis_type: AxisType = AxisType.Auto, devices=None) -> Mesh:
    """A mesh with axes "x", or "x" and "y", over the first CPU devices, or the given ones."""
    devices = jax.devices("cpu") if devices is None else devices
    axes = ("x", "y")[: len(shape)]
    grid = np.array(devices[: np.prod(shape)]).reshape(shape)
    return Mesh(grid, axes, axis_types=(axis_type,) * len(shape))


def put(mesh: Mesh, *arrays_and_specs):
    """Arrays, of each a pair with its PartitionSpec, on the devices of a mesh."""
    return tuple(jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in arrays_and_specs)


def collectives(compiled) -> dict[str, int]:
    """How many collectives of each kind a compiled program has."""
    found = re.findall(rf"\b({'|'.join(_COLLECTIVES)})(?:-start)?\(", compiled.as_text())
    return dict(collections.Counter(found))


@contextlib.contextmanager
def plain_kernels() -> Iterator[None]:
    """The kernels of `attention` in plain JAX: interpret mode runs on one device at a time."""
    # Programs must not outlive the kernels that they were traced with.
    fresh = lambda run, statics: jax.jit(
        lambda *args: run.__wrapped__(*args), static_argnums=range(statics)
    )
    by_device = jax.jit(sharding._by_device.__wrapped__, static_argnums=range(6))
    with (
        mock.patch.object(sharding, "_by_device", by_device),
        mock.patch.object(autodiff, "_run_forward", fresh(autodiff._run_forward, 2)),
        mock.patch.object(autodiff, "_run_backward", fresh(autodiff._run_backward, 3)),
        mock.patch.object(autodiff, "launch", lambda run, static, _, *args: run(*static, *args)),
        mock.patch.object(forward, "attention", _attention),
        mock.patch.object(gradients, "attention_gradients", _gradients),
    ):
        yield


def _visible(problem, T: int, S: int, intervals, ids):
    """`[B or 1, T, S]`."""
    rows, keys = jnp.arange(T)[:, None], jnp.arange(S)
    visible = ((keys < problem.key_length) & (rows >= 0))[None]
    if intervals is not None:
        lo, hi = (x[..., None] for x in jnp.moveaxis(intervals, 1, 0))
        visible &= (lo <= keys) & (keys < hi)
    if problem.lowest is not None:
        visible &= rows + problem.lowest <= keys
    if problem.highest is not None:
        visible &= keys <= rows + problem.highest
    if ids is not None:
        query_ids, key_ids = ids
        visible &= query_ids[:, :, None] == segments.padded(key_ids, S)[:, None]
    return visible


def _shown(problem, T: int, S: int, blocks):
    """`[B or 1, N or 1, T, S]`: a function is asked in those blocks that it cuts."""
    if blocks is None:
        return jnp.ones((1, 1, T, S), bool)
    heads = problem.batch, problem.heads
    rows = mask_blocks.BLOCK * blocks.kinds.shape[2]
    sizes, bounds = (problem.query_length, problem.key_length), (problem.lowest, problem.highest)
    numbers = jnp.zeros((*heads, 2), jnp.int32) if blocks.numbers is None else blocks.numbers

    def of_head(captured, numbers, kinds):
        program = problem.mask_function.program
        cut = mask_blocks._visible(program, captured, numbers, 0, rows, sizes, bounds)
        kinds = kinds.repeat(mask_blocks.BLOCK, 0).repeat(mask_blocks.BLOCK, 1)
        return jnp.where(kinds == 1, cut, kinds == 2)[:T, :S]

    of_all = lambda x: jnp.repeat(x, problem.batch // x.shape[0], axis=0)
    captured, numbers, kinds = jax.tree.map(of_all, (blocks.captured, numbers, blocks.kinds))
    kinds = jnp.broadcast_to(kinds, (*heads, *kinds.shape[2:]))
    return jax.vmap(jax.vmap(of_head, (None, 0, 0)))(captured, numbers, kinds)


def _attention(
    query, key, value, sinks, intervals, ids, elements, words, blocks, *, problem, config
):
    assert elements.mask is None and words is None
    assert (problem.batch, problem.heads) == (query.shape[0], query.shape[2])
    assert problem.kv_heads == key.shape[2]
    query = query[:, : problem.query_length]
    lengths = query.shape[1], key.shape[1]
    visible = _visible(problem, *lengths, intervals, ids)[:, None]
    visibility = Visibility(mask=visible & _shown(problem, *lengths, blocks))
    options = dict(bias=elements.bias, logits_soft_cap=problem.soft_cap)
    call = Call(query, key, value, visibility, problem.scale, **options)
    out, lse = xla.attention(call)
    lse = lse.transpose(0, 2, 1)
    to_whole_tiles = ((0, 0), (0, 0), (0, -lse.shape[2] % config.block_q))
    filled = functools.partial(jnp.pad, pad_width=to_whole_tiles, constant_values=jnp.nan)
    references = jnp.full((*lse.shape[:2], 2, filled(lse).shape[2]), jnp.nan)  # of kernels alone
    if sinks is None:
        return out, filled(lse), references
    with_sinks = jnp.where(lse == -jnp.inf, lse, jnp.logaddexp(lse, sinks[..., None]))
    weight = jnp.where(lse == -jnp.inf, 0, jnp.exp(lse - with_sinks))
    out = (out * weight.transpose(0, 2, 1)[..., None]).astype(out.dtype)
    return out, filled(with_sinks), references


def _gradients(
    query,
    key,
    value,
    out,
    lse,
    d_out,
    d_lse,
    _,
    *,
    problem,
    intervals,
    ids,
    elements,
    blocks,
    **_options,
):
    """By the formula, from the LSE that is given, which may be of more keys than these."""
    T = problem.query_length
    lse = lse[:, :, :T]
    query, out, d_out = (x[:, :T].astype(jnp.float32) for x in (query, out, d_out))
    key, value = key.astype(jnp.float32), value.astype(jnp.float32)
    every = lambda x: jnp.repeat(x, problem.group, axis=2)
    summed = lambda x: x.reshape(*x.shape[:2], -1, problem.group, x.shape[3]).sum(3)
    visible = _visible(problem, T, key.shape[1], intervals, ids)[:, None]
    visible = visible & _shown(problem, T, key.shape[1], blocks)
    seeing = jnp.isfinite(lse)[..., None]
    logits = jnp.einsum("btnh,bsnh->bnts", query, every(key)) * problem.scale
    if elements.bias is not None:
        logits += elements.bias
    slope: jax.Array | float = 1.0
    if problem.soft_cap is not None:
        capped = jnp.tanh(logits / problem.soft_cap)
        logits, slope = problem.soft_cap * capped, 1 - capped**2
    weights = jnp.exp(logits - jnp.where(seeing, lse[..., None], 0))
    weights = jnp.where(visible & seeing, weights, 0)
    delta = (d_out * out).sum(-1).transpose(0, 2, 1) - (0.0 if d_lse is None else d_lse)
    delta = jnp.where(seeing[..., 0], delta, 0)  # the cotangent of an LSE of -inf may be NaN
    d_weights = jnp.einsum("btnh,bsnh->bnts", d_out, every(value))
    d_logits = weights * slope * (d_weights - delta[..., None])
    d_bias = ()
    if elements.bias is not None:
        shape = elements.bias.shape
        ones = tuple(axis for axis, size in enumerate(shape) if size < d_logits.shape[axis])
        d_bias = (d_logits.sum(ones, keepdims=True),)
    d_logits *= problem.scale
    gradients = (
        jnp.einsum("bnts,bsnh->btnh", d_logits, every(key)),
        summed(jnp.einsum("bnts,btnh->bsnh", d_logits, query)),
        summed(jnp.einsum("bnts,btnh->bsnh", weights, d_out)),
    )
    return *(x.astype(problem.dtype) for x in gradients), *d_bias
