"""Options and shapes at random, together, on the kernels: every result beside float64.

A case is drawn from its number alone, so that one that fails can be run again by its name.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.cases import long, slow
from tests.support.elements import random_bias, random_mask, shape_of
from tests.support.interpret import interpret_mode
from tests.support.kernel_calls import check, few_thread_blocks, inputs

AXES = ["bnts", "nts", "bts", "bs", "ns", "s", "bnt", ""]  # of a mask or a bias


def draw(number: int, longest: int, most: int) -> tuple[tuple, dict[str, Any]]:
    """Arguments of `check`: arrays and options.

    Args:
      number: of the case.
      longest: what T and S may be.
      most: what the batch, the key heads and the query heads of each may be.
    """
    rng = np.random.default_rng([number, longest])
    some = lambda share: rng.random() < share
    B, K, group = (int(rng.integers(1, most + 1)) for _ in range(3))
    T, S = (int(rng.integers(1, longest + 1)) for _ in range(2))
    # Of options that came later, so that the others stay what they were.
    more = np.random.default_rng([number, longest, 1])
    if more.random() < 0.2:
        S = T
    if np.random.default_rng([number, longest, 4]).random() < 0.5:  # a bias in tiles needs it
        S = -(-S // 8) * 8
    H = int(rng.choice([64, 128, 256, *(8 * rng.integers(1, 33, 2))]))
    h = H if some(0.7) else int(8 * rng.integers(1, 33))
    dtype = [jnp.bfloat16, jnp.float16][int(some(0.3))]
    arrays = inputs(B, T, S, K * group, K, H, dtype, seed=number, h=h)

    options: dict[str, Any] = dict(is_causal=some(0.5), deterministic=some(0.3))
    if some(0.4):
        options["local_window_size"] = tuple(int(x) for x in rng.integers(0, S + 1, 2))
    if some(0.5):
        options["query_offset"] = int(rng.integers(-T, S + 1))
    elif some(0.3):
        options["query_offset"] = jnp.array(rng.integers(-T, S + 1, B))
    for name, length in (("query_seq_lengths", T), ("key_value_seq_lengths", S)):
        if some(0.25):
            options[name] = jnp.array(rng.integers(0, length + 1, B))
    if some(0.3):
        options["sinks"] = jnp.array(rng.normal(0, 3, K * group), jnp.float32)
    shape = lambda: shape_of(str(rng.choice(AXES)), B, K * group, T, S)
    if some(0.3):
        options["mask"] = random_mask(shape(), seed=number)
    if some(0.3):
        dtype = [jnp.float32, jnp.bfloat16, jnp.float16][int(rng.integers(3))]
        options["bias"] = random_bias(shape(), dtype, seed=number)
    if more.random() < 0.3:
        options["logits_soft_cap"] = float(more.choice([0.5, 2.0, 50.0]))
    if more.random() < 0.6 and not {"mask", "bias"} & set(options):
        options |= random_pair_of_ids(more, B, T, S)
    later = np.random.default_rng([number, longest, 2])
    if later.random() < 0.3:
        options["dropout_rate"] = float(later.choice([0.125, 0.5, 0.875]))
    latest = np.random.default_rng([number, longest, 3])
    if latest.random() < 0.4 and "query_segment_ids" not in options:
        options |= random_pair_of_ids(latest, B, T, S)
    own = np.random.default_rng([number, longest, 5])
    if own.random() < 0.5:  # else there is most often one tile for each
        options["config"] = few_thread_blocks(H, int(own.integers(1, 4)), h)
    return arrays, options


def random_pair_of_ids(rng: np.random.Generator, batch: int, T: int, S: int) -> dict[str, Any]:
    """Options of segment ids, those of keys often the same array."""
    query_ids, key_ids = (random_ids(rng, batch, length) for length in (T, S))
    if S == T and rng.random() < 0.7:
        key_ids = query_ids
    return dict(query_segment_ids=query_ids, key_value_segment_ids=key_ids)


def random_ids(rng: np.random.Generator, batch: int, length: int) -> jax.Array:
    """Segment ids of a few documents: one after the other, some of them empty, or in turns."""
    documents = int(rng.integers(1, 6))
    places = np.arange(length)
    if rng.random() < 0.3:
        return jnp.tile(places % documents, (batch, 1))
    ends = np.sort(rng.integers(0, length + 1, (batch, documents)))
    return jnp.array((places[None, :, None] >= ends[:, None]).sum(-1))


# The one in CI has many options, at a width that compiles soon.
@pytest.mark.parametrize("number", [long(x) if x == 23 else slow(x) for x in range(24)])
def test_combinations_in_interpret_mode(number):
    arrays, options = draw(number, 70, 2)
    with interpret_mode():
        check(arrays, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("number", [*range(24), *map(slow, range(24, 200))])
def test_combinations(number):
    arrays, options = draw(number, 700, 3)
    check(arrays, **options)
