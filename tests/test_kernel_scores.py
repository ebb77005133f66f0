"""score_mod on the kernels in interpret mode, with race detection, beside float64."""


import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.cases import long, slow
from tests.support.interpret import interpret_mode
from tests.support.kernel_calls import check, inputs

SLOPES = jnp.array([0.5, 0.25, 0.125, 0.0625])
TABLE = jnp.asarray(np.random.default_rng(0).normal(size=(4, 65)), jnp.float32)
NARROW_TABLE = TABLE.astype(jnp.bfloat16)
ENTRIES = jnp.asarray(np.random.default_rng(1).normal(size=(2, 300)), jnp.float32)


def alibi(score, b, h, q_idx, kv_idx):
    return score - SLOPES[h] * jnp.abs(q_idx - kv_idx)


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


@pytest.mark.parametrize(
    ("T", "S", "N", "K", "H", "function", "options"),
    [
        (200, 264, 2, 1, 64, alibi, dict(is_causal=True)),
        (150, 200, 1, 1, 128, cap, {}),
        long(150, 200, 2, 2, 64, relative, {}),
        long(150, 200, 2, 1, 128, relative_narrow, dict(is_causal=True)),
        long(130, 290, 4, 2, 80, gate, {}),
        long(170, 200, 1, 1, 64, hiding, {}),
        long(170, 200, 1, 1, 128, hiding, dict(is_causal=True)),
        long(170, 200, 1, 1, 64, far, {}),
        slow(170, 200, 1, 1, 128, far, {}),
        long(100, 150, 2, 1, 64, constant, {}),
        # Beside others.
        long(200, 300, 1, 1, 64, cap, dict(is_causal=True, local_window_size=(90, 0))),
        long(150, 200, 2, 1, 128, alibi, dict(logits_soft_cap=2.0)),
        long(
            150, 200, 2, 1, 64, cap, dict(key_value_seq_lengths=jnp.array([130])),
        ),
        slow(
            150, 200, 2, 1, 128, alibi,
            dict(query_seq_lengths=jnp.array([70]), key_value_seq_lengths=jnp.array([130])),
        ),
        long(
            200, 200, 2, 1, 64, cap,
            dict(
                query_segment_ids=jnp.arange(200)[None] // 70,
                key_value_segment_ids=jnp.arange(200)[None] // 70,
            ),
        ),
        slow(150, 384, 1, 1, 128, alibi, dict(sinks=jnp.array([0.7]))),
        long(150, 200, 2, 1, 64, cap, dict(deterministic=True)),
        slow(150, 200, 2, 1, 128, relative, dict(deterministic=True)),
    ],
)  # fmt: skip
def test_in_interpret_mode(T, S, N, K, H, function, options):
    with interpret_mode():
        check(inputs(1, T, S, N, K, H, jnp.bfloat16), score_mod=function, **options)
