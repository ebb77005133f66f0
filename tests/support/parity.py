"""Calls of jax.nn.dot_product_attention that attention takes as well, by what is special."""

import jax.numpy as jnp
import numpy as np

B, T, S, N, K, H = 2, 5, 7, 4, 2, 8


def draw(seed, shape, dtype=jnp.float32):
    """As jax.random would, but with nothing to compile for each shape."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32), dtype)


def qkv(dtype=jnp.float32):
    return draw(0, (B, T, N, H), dtype), draw(1, (B, S, K, H), dtype), draw(2, (B, S, K, H), dtype)


def random_mask(*shape):
    """A mask with no empty row along the last axis."""
    return np.random.default_rng(0).random(shape) < 0.6


PARITY = {
    "plain": {},
    "scale": {"scale": 0.3},
    "numpy scale": {"scale": np.float32(0.3)},
    "array scale": {"scale": jnp.float32(0.3)},
    "causal": {"is_causal": True},
    "bias 4D": {"bias": draw(3, (B, N, T, S))},
    "bias of one batch": {"bias": draw(3, (1, N, T, S))},
    "bias of one head": {"bias": draw(3, (B, 1, T, S))},
    "bias of one row": {"bias": draw(3, (B, N, 1, S))},
    "bias of one key": {"bias": draw(3, (1, 1, T, 1))},
    "bias 3D": {"bias": draw(3, (N, T, S))},
    "bias 2D": {"bias": draw(3, (T, S))},
    "bias bfloat16": {"bias": draw(3, (B, N, T, S), jnp.bfloat16)},
    "bias numpy float64": {"bias": np.random.default_rng(0).normal(size=(N, T, S))},
    "mask 4D": {"mask": random_mask(B, N, T, S) | np.eye(T, S, dtype=bool)},
    "mask of keys": {"mask": random_mask(B, 1, 1, S)},
    "mask 3D": {"mask": random_mask(N, T, S) | np.eye(T, S, dtype=bool)},
    "mask and bias": {"mask": random_mask(B, 1, 1, S), "bias": draw(3, (1, N, T, S))},
    "window int": {"local_window_size": 1},
    "window pair": {"local_window_size": (2, 1)},
    "window past": {"local_window_size": (2, 0)},
    "window future": {"local_window_size": (0, 3)},
    "window wide": {"local_window_size": (100, 100)},
    "window and causal": {"local_window_size": (2, 3), "is_causal": True},
    "key lengths": {"key_value_seq_lengths": jnp.array([3, 7])},
    "key lengths numpy int64": {"key_value_seq_lengths": np.array([3, 7], np.int64)},
    "key lengths list": {"key_value_seq_lengths": [3, 7]},
    "query lengths": {"query_seq_lengths": jnp.array([2, 5])},
    "empty query": {"query_seq_lengths": jnp.array([0, 5])},
    "lengths and causal": {
        "query_seq_lengths": jnp.array([2, 5]),
        "key_value_seq_lengths": jnp.array([6, 1]),
        "is_causal": True,
    },
    "all": {
        "bias": draw(3, (1, N, T, S)),
        "mask": random_mask(B, 1, T, S) | np.eye(T, S, dtype=bool),
        "scale": 0.7,
        "is_causal": True,
        "query_seq_lengths": jnp.array([2, 5]),
        "key_value_seq_lengths": jnp.array([6, 7]),
        "local_window_size": (3, 2),
    },
}
