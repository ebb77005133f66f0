"""Tiles that thread blocks draw, in an order that is not the one of interpret mode."""

import jax.numpy as jnp
import pytest

from pallas_kernels import backward, forward, tickets
from pallas_kernels.ptx.arithmetic import div_rem
from tests.support.interpret import interpret_mode
from tests.support.kernel_calls import as_arrays, check, few_thread_blocks, inputs, with_a_jump

THREAD_BLOCKS = 2


@pytest.fixture
def one_draws_all(monkeypatch):
    """All tiles but the first one of each thread block go to thread block 0."""

    def draw(_, in_turn):
        index, block = div_rem(in_turn, THREAD_BLOCKS)
        return jnp.where(index == 0, block, jnp.where(block == 0, THREAD_BLOCKS + index - 1, 1000))

    monkeypatch.setattr(tickets, "draw_ticket", draw)
    built = forward._build, backward.build
    for kernels in built:
        kernels.cache_clear()
    yield
    for kernels in built:
        kernels.cache_clear()


@pytest.mark.long
@pytest.mark.fast_cases("64-True")
@pytest.mark.parametrize("jumps", [True, False])
@pytest.mark.parametrize("H", [64, 128, 256])
def test_a_thread_block_that_draws_more_than_others(one_draws_all, H, jumps):
    """Where maxima jump it walks them all again, from the last to the first."""
    arrays = inputs(2, 270, 210, 1, 1, H, jnp.bfloat16)
    # Of queries too: the forward draws no tiles where lengths of keys alone are known late.
    lengths = dict(query_seq_lengths=[270, 250], key_value_seq_lengths=[180, 210])
    options = as_arrays(dict(is_causal=True) | lengths)
    arrays = with_a_jump(arrays, 0, 70) if jumps else arrays
    with interpret_mode():
        check(arrays, **options, config=few_thread_blocks(H, THREAD_BLOCKS))


def test_the_first_ticket_of_each_thread_block_is_not_drawn():
    drawn = tickets.none_drawn(3, tiles=5)
    assert drawn.shape == (1 + 5,) and drawn[0] == 3
