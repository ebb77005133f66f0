"""Each function of jax_flash/GALLERY.md beside what NumPy says of it, and its attention too."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from jax_flash import device
from tests import oracle
from tests.support.cases import long
from tests.support.pages import GALLERY, sections

H100 = device.Device("gpu", "NVIDIA H100", (9, 0))
B, T, N = 2, 256, 8
T5 = "Relative bias of T5"
BLOCKS = sections((GALLERY,))

# --- what they should be --------------------------------------------------------------------------


class Expected(NamedTuple):
    """Options of `oracle.attention`, and what it multiplies query by, of each head."""

    options: dict[str, Any]
    factor: np.ndarray = np.ones(N)


def masked(mask) -> Expected:
    return Expected(dict(mask=np.broadcast_to(mask, (B, N, T, T))))


def pairs(sees) -> np.ndarray:
    """`[T, T]`, of a function of Python's own numbers."""
    return np.array([[sees(i, j) for j in range(T)] for i in range(T)])


CAUSAL = np.tri(T, dtype=bool)
NEAR = CAUSAL & ~np.tri(T, k=-32, dtype=bool)
IDS = np.array([[0] * 90 + [1] * 110 + [2] * 56, [0] * 40 + [1] * 216])
DOCUMENTS = np.stack([CAUSAL & (ids[:, None] == ids) for ids in IDS])[:, None]


def streaming() -> np.ndarray:
    mask = NEAR.copy()
    mask[:, :4] |= CAUSAL[:, :4]
    return mask


def prefix_lm() -> np.ndarray:
    mask = np.stack([CAUSAL, CAUSAL])[:, None]
    mask[0, ..., :100] = mask[1, ..., :30] = True
    return mask


def dilated() -> np.ndarray:
    mask = np.zeros((N, T, T), bool)
    for head in range(N):
        for row in range(T):
            mask[head, row, row :: -(head % 3 + 1)] = True
    return mask


def block_diffusion() -> np.ndarray:
    """By its four quarters: noisy or clean tokens see noisy or clean ones."""
    blocks = np.kron(np.eye(8, dtype=bool), np.ones((16, 16), bool))
    before = np.kron(np.tri(8, k=-1, dtype=bool), np.ones((16, 16), bool))
    return np.block([[blocks, before], [np.zeros_like(blocks), blocks | before]])


def tree() -> np.ndarray:
    ancestors = {0: [0], 1: [0, 1], 2: [0, 2], 3: [0, 1, 3], 4: [0, 1, 4], 5: [0, 2, 5]}
    ancestors |= {6: [0, 1, 3, 6], 7: [0, 1, 3, 6, 7]}
    mask = CAUSAL.copy()
    mask[T - 8 :, T - 8 :] = False
    for token, seen in ancestors.items():
        mask[T - 8 + token, [T - 8 + x for x in seen]] = True
    return mask


def image() -> np.ndarray:
    near = lambda x, y: max(abs(a - b) for a, b in zip(x, y, strict=True)) <= 3
    return pairs(lambda i, j: near(divmod(i, 16), divmod(j, 16)))


def tiles() -> np.ndarray:
    places = np.stack(np.unravel_index(np.arange(T), (8, 8, 4)), -1) // 2
    return (np.abs(places[:, None] - places) < 2).all(-1)


def t5_buckets() -> np.ndarray:
    """`[T, T]`, as they are in T5: 32 of them, for distances up to 128."""

    def bucket(query: int, key: int) -> int:
        distance = abs(key - query)
        if distance >= 8:
            steps = math.log(distance / 8) / math.log(128 / 8) * 8
            distance = min(8 + int(steps + 1e-9), 15)
        return distance + 16 * (key > query)

    return pairs(bucket)


def expected(section: str, names: dict) -> Expected:
    """Of a section, and what its block has defined: parameters alone are taken from there."""
    if section == "ALiBi":
        slopes = np.array([2.0**-n for n in range(1, N + 1)])
        behind = np.arange(T)[:, None] - np.arange(T)
        return Expected(dict(bias=-slopes[:, None, None] * behind, is_causal=True))
    if section == T5:
        table = np.asarray(names["table"], np.float64)
        return Expected(dict(bias=table[t5_buckets()].transpose(2, 0, 1)))
    if section == "Soft cap":
        return Expected(dict(logits_soft_cap=20.0))
    if section == "Tanh gate":
        return Expected({}, np.tanh(np.asarray(names["gate"], np.float64)))
    return MASKS[section]


MASKS = {
    "Causal": masked(CAUSAL),
    "Sliding window": masked(NEAR),
    "First tokens and a window": masked(streaming()),
    "Prefix LM": masked(prefix_lm()),
    "Packed documents": masked(DOCUMENTS),
    "Documents and a window": masked(DOCUMENTS & NEAR),
    "Dilated": masked(dilated()),
    "Block diffusion": masked(block_diffusion()),
    "Tree of speculative tokens": masked(tree()),
    "Neighbourhood in an image": masked(image()),
    "Sliding tiles of a video": masked(tiles()),
}
SCORES = "ALiBi", T5, "Soft cap", "Tanh gate"

# --- what they are --------------------------------------------------------------------------------


def before() -> dict:
    names: dict = {}
    (block,) = BLOCKS[""]
    block.run(names)
    return names


def test_every_section_is_checked():
    assert set(BLOCKS) == {"", *MASKS, *SCORES}
    assert all(len(blocks) == 1 for blocks in BLOCKS.values())


LIKE_OTHERS = (
    "Causal",
    "Sliding window",
    "First tokens and a window",
    "Documents and a window",
    "ALiBi",
)


@pytest.mark.parametrize("section", [long(x) if x in LIKE_OTHERS else x for x in (*MASKS, *SCORES)])
def test_functions_are_what_numpy_says(section, monkeypatch):
    """Of all pairs; masks are such as the kernels take."""
    given: dict[str, Any] = {}

    def attention(query, key, value, **options):
        given.update(options)
        return query

    names = before()
    monkeypatch.setattr(jax_flash, "attention", attention)
    BLOCKS[section][0].run(names)
    want = expected(section, names)
    shape = {axis: [-1 if axis == i else 1 for i in range(4)] for axis in range(4)}
    indices = [
        np.arange(size, dtype=np.int32).reshape(shape[axis])
        for axis, size in enumerate((B, N, T, T))
    ]
    visible = CAUSAL if given.get("is_causal") else np.ones((T, T), bool)
    if section in MASKS:
        mask_mod = given["mask_mod"]
        if isinstance(mask_mod, jax_flash.BlockMask):
            mask_mod = names["block_diffusion"]
        visible = visible & np.asarray(jax.jit(mask_mod)(*indices))
        np.testing.assert_array_equal(np.broadcast_to(visible, (B, N, T, T)), want.options["mask"])
        monkeypatch.setattr(device, "device_of", lambda array: H100)
        arrays = (names[name] for name in ("query", "key", "value"))
        assert jax_flash.explain(*arrays, **given).implementation == "mosaic_gpu"
    else:
        logits = np.random.default_rng(0).normal(size=(1, N, T, T)).astype(np.float32)
        if section == T5:  # what its block has given belongs to a trace that has ended
            names["t5_attention"](*(names[x] for x in ("table", "query", "key", "value")))
        got = jax.jit(given["score_mod"])(logits, *indices)
        right = logits * want.factor[:, None, None] + want.options.get("bias", 0)
        if cap := want.options.get("logits_soft_cap"):
            right = cap * np.tanh(right / cap)
        np.testing.assert_allclose(np.broadcast_to(got, right.shape), right, atol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("section", [*MASKS, *SCORES])
def test_attention_is_dense_attention(section):
    """Of float32, to rounding; of T5 also the gradient of the table."""
    names = before()
    arrays = {x: names[x].astype(jnp.float32) for x in ("query", "key", "value")}
    names |= arrays
    BLOCKS[section][0].run(names)
    want = expected(section, names)
    arrays["query"] = np.asarray(arrays["query"], np.float64) * want.factor[:, None]
    right, _ = oracle.attention(**arrays, **want.options)
    np.testing.assert_allclose(names["out"], right, atol=1e-5)
    if section == T5:
        d_bias = oracle.gradients(**arrays, **want.options, dout=right).bias
        d_table = np.zeros((32, N))
        np.add.at(d_table, t5_buckets(), d_bias.transpose(1, 2, 0))
        assert np.flatnonzero(~d_table.any(1)) == [16]  # for a later key at a distance of 0: none
        np.testing.assert_allclose(names["d_table"], d_table, rtol=1e-4, atol=1e-3)
