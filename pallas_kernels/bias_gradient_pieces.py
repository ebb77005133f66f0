"""The pieces of a bias's gradient: which steps each takes, and how they make the whole."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.config import BACKWARD_CONSUMERS, BiasGradientConfig
from pallas_kernels.problem import Problem
from pallas_kernels.ptx.arithmetic import div_rem

CONSUMERS = BACKWARD_CONSUMERS
ROWS = 64  # query rows of a consumer: the M of a wgmma
BLOCK_Q = CONSUMERS * ROWS
WARPS = 4  # of a consumer


@dataclasses.dataclass(frozen=True)
class Pieces:
    """What the thread blocks own, of a bias of that shape and dtype."""

    problem: Problem
    config: BiasGradientConfig
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def kind(self) -> str:
        if self.shape[2] == 1:
            return "columns"
        return "rows" if self.shape[3] == 1 else "whole"

    @property
    def row_blocks(self) -> int:
        return -(-self.problem.query_length // BLOCK_Q)

    @property
    def key_blocks(self) -> int:
        return -(-self.problem.key_length // self.config.block_kv)

    @property
    def entries(self) -> int:
        """How many of batch and head have pieces of their own."""
        if self.kind == "whole":
            return self.shape[0] * self.shape[1]
        return self.problem.batch * self.problem.heads

    @property
    def per_entry(self) -> int:
        rows, keys = self.row_blocks, self.key_blocks
        return {"whole": rows * keys, "columns": keys, "rows": rows}[self.kind]

    @property
    def count(self) -> int:
        return self.entries * self.per_entry

    def steps(self) -> np.ndarray:
        """`[per_entry, 3]` int32: number of each piece of an entry, its first step, and its steps.

        Those with most come first, those with none last.
        """
        p, block_kv = self.problem, self.config.block_kv
        first_row = np.arange(self.row_blocks)[:, None] * BLOCK_Q
        first_key = np.arange(self.key_blocks)[None] * block_kv
        last_row = np.minimum(first_row + BLOCK_Q, p.query_length) - 1
        last_key = np.minimum(first_key + block_kv, p.key_length) - 1
        seen = np.ones((self.row_blocks, self.key_blocks), bool)
        if p.highest is not None:
            seen &= first_key <= last_row + p.highest
        if p.lowest is not None:
            seen &= last_key >= first_row + p.lowest
        if self.kind == "whole":
            sharing = p.batch * p.heads // self.entries
            count = np.where(seen, sharing, 0).ravel()
            first = np.zeros_like(count)
        else:
            seen = seen.T if self.kind == "columns" else seen
            first, count = seen.argmax(1), seen.sum(1)  # what is seen is an interval
        number = np.argsort(-count, kind="stable")
        return np.stack([number, first[number], count[number]], axis=1).astype(np.int32)

    def place(self, entry, number, step):
        """Batch entry, head, row block and key block of a step of a piece of an entry."""
        p = self.problem
        if self.kind != "whole":
            batch, head = div_rem(entry, p.heads)
            return (batch, head, *((step, number) if self.kind == "columns" else (number, step)))
        row_block, key_block = div_rem(number, self.key_blocks)
        own_batch, head = div_rem(entry, self.shape[1])
        sharing = p.batch // self.shape[0]
        if self.shape[1] == 1:
            batch, head = div_rem(step, p.heads)
        else:
            batch = step
        return own_batch * sharing + batch, head, row_block, key_block

    @property
    def fill_whole_tiles(self) -> bool:
        p = self.problem
        return p.query_length % BLOCK_Q == 0 and p.key_length % self.config.block_kv == 0

    def gradient(self) -> jax.ShapeDtypeStruct:
        """What the kernel makes: the gradient, or what is to be summed, in whole tiles."""
        p = self.problem
        rows, keys = self.row_blocks * BLOCK_Q, self.key_blocks * self.config.block_kv
        shape = {
            "whole": self.shape,
            "columns": (p.batch, p.heads, CONSUMERS * WARPS, keys),
            "rows": (p.batch, p.heads, rows),
        }[self.kind]
        return jax.ShapeDtypeStruct(shape, self.dtype if self.kind == "whole" else jnp.float32)

    def summed(self, gradient: jax.Array) -> jax.Array:
        """The gradient in the shape of the bias, from what the kernel makes."""
        p = self.problem
        if self.kind == "whole":
            return gradient
        if self.kind == "columns":
            gradient = gradient[..., : p.key_length].sum(2)[:, :, None]
        else:
            gradient = gradient[..., : p.query_length][..., None]
        gradient = gradient.reshape(self.shape[0], -1, *gradient.shape[1:]).sum(1)
        axes = tuple(axis for axis, size in enumerate(self.shape) if size == 1)
        return gradient.sum(axes, keepdims=True)
