"""The pieces of a gradient of logits: which steps each takes, and how they make the whole."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.config import BACKWARD_CONSUMERS, ROWS, BiasGradientConfig
from pallas_kernels.defaults import BIAS_GRADIENT
from pallas_kernels.element_arrays import Blocks
from pallas_kernels.mask_functions import BLOCK, coarse
from pallas_kernels.problem import Problem
from pallas_kernels.ptx.arithmetic import div_rem

CONSUMERS = BACKWARD_CONSUMERS
BLOCK_Q = CONSUMERS * ROWS
WARPS = 4  # of a consumer
# In steps: what a piece takes beside its own; what adds shares up, and for a megabyte of them.
_PIECE, _SUM, _MEGABYTE = 2.0, 2.5, 0.4
_MOST_BYTES = 256 << 20  # of all shares


@dataclasses.dataclass(frozen=True)
class Pieces:
    """What the thread blocks own.

    Attributes:
      kind: of what they have sums: "whole", pairs; "columns", keys; "rows", queries; "diagonals",
        differences of a key's and a query's place.
      shape: of the gradient, which may have fewer values; but for diagonals.
      dtype: of the gradient of pairs.
      shares: of pairs, in how many the steps of a piece are dealt out. Each is a piece of its own,
        those of the first share first, and has sums of its own, in float32.
    """

    problem: Problem
    config: BiasGradientConfig
    kind: str
    shape: tuple[int, ...]
    dtype: np.dtype
    shares: int = 1

    @classmethod
    def of_bias(cls, problem: Problem, bias: jax.Array) -> "Pieces":
        """With the default settings."""
        kind = "columns" if bias.shape[2] == 1 else "rows" if bias.shape[3] == 1 else "whole"
        pieces = cls(problem, BIAS_GRADIENT[problem.widest], kind, bias.shape, bias.dtype)
        return pieces._dealt_out() if kind == "whole" else pieces

    def _dealt_out(self) -> "Pieces":
        """The same in as many shares as end earliest, as few as may be."""
        with_steps = self.entries * np.count_nonzero(self.steps()[:, 2])
        share_bytes = 4 * math.prod(self.shape)

        def end(shares: int) -> float:
            """When the last SM ends, and shares are added up, in steps."""
            rounds = -(-with_steps * shares // self.config.thread_blocks)
            end = rounds * (-(-self.sharing // shares) + _PIECE)
            return end if shares == 1 else end + _SUM + _MEGABYTE * shares * share_bytes / 1e6

        most = min(self.sharing, self.config.thread_blocks, _MOST_BYTES // share_bytes)
        return dataclasses.replace(self, shares=min(range(1, max(1, most) + 1), key=end))

    @classmethod
    def of_heads(cls, problem: Problem, config: BiasGradientConfig, kind: str) -> "Pieces":
        """Of what has a value for each batch entry and head ("heads"), or for each there."""
        p = problem
        pairs = {"columns": (1, p.key_length), "rows": (p.query_length, 1)}.get(kind, (1, 1))
        kind = "columns" if kind == "heads" else kind
        return cls(problem, config, kind, (p.batch, p.heads, *pairs), np.dtype(np.float32))

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
    def sharing(self) -> int:
        """Batch entries and heads that share a value of pairs."""
        return self.problem.batch * self.problem.heads // self.entries

    @property
    def has_one_step(self) -> bool:
        """Whether no piece has more."""
        return self.kind == "whole" and self.sharing == 1

    @property
    def per_entry(self) -> int:
        rows, keys = self.row_blocks, self.key_blocks
        if self.kind == "diagonals":
            return (rows - 1) * self.key_blocks_a_row_block + keys
        return {"whole": self.shares * rows * keys, "rows": rows}.get(self.kind, keys)

    @property
    def key_blocks_a_row_block(self) -> int:
        return BLOCK_Q // self.config.block_kv

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
            starts = np.arange(self.shares + 1) * self.sharing // self.shares
            count = np.where(seen.ravel(), np.diff(starts)[:, None], 0).ravel()
            first = np.repeat(starts[:-1], seen.size)
        else:
            if self.kind == "diagonals":
                seen = self._by_diagonal(seen)
            elif self.kind != "rows":
                seen = seen.T
            first, count = seen.argmax(1), seen.sum(1)  # what is seen is an interval
        number = np.argsort(-count, kind="stable")
        return np.stack([number, first[number], count[number]], axis=1).astype(np.int32)

    def _by_diagonal(self, seen: np.ndarray) -> np.ndarray:
        """`[pieces, row blocks]`: what is seen of the key block that each piece has there."""
        rows = np.arange(self.row_blocks)[None]
        keys = self._key_block_of(np.arange(self.per_entry)[:, None], rows)
        inside = (keys >= 0) & (keys < self.key_blocks)
        return inside & seen[rows, np.clip(keys, 0, self.key_blocks - 1)]

    def _key_block_of(self, number, row_block):
        """Of a piece that is a band of diagonals."""
        return number + (row_block - (self.row_blocks - 1)) * self.key_blocks_a_row_block

    def seen(self, blocks: Blocks | None) -> jax.Array:
        """`[b, n, row blocks, key blocks]` int32, 0 where a mask function hides all."""
        kinds = self.problem.mask_function.kinds[None, None] if blocks is None else blocks.kinds
        rows, keys = BLOCK_Q // BLOCK, self.config.block_kv // BLOCK
        some, _ = coarse(jnp, jnp.asarray(kinds), rows, keys, 0)
        return some.astype(jnp.int32)

    def place(self, entry, number, step):
        """Batch entry, head, row block and key block of a step of a piece of an entry."""
        p = self.problem
        if self.kind != "whole":
            batch, head = div_rem(entry, p.heads)
            if self.kind == "diagonals":
                return batch, head, step, self._key_block_of(number, step)
            return (batch, head, *((number, step) if self.kind == "rows" else (step, number)))
        _, number = self.share_of(number)
        row_block, key_block = div_rem(number, self.key_blocks)
        own_batch, head = div_rem(entry, self.shape[1])
        sharing = p.batch // self.shape[0]
        if self.shape[1] == 1:
            batch, head = div_rem(step, p.heads)
        else:
            batch = step
        return own_batch * sharing + batch, head, row_block, key_block

    def share_of(self, number):
        """Of pairs, the share of a piece of an entry, and its number there."""
        return (
            div_rem(number, self.row_blocks * self.key_blocks) if self.shares > 1 else (0, number)
        )

    @property
    def fill_whole_tiles(self) -> bool:
        p = self.problem
        return p.query_length % BLOCK_Q == 0 and p.key_length % self.config.block_kv == 0

    def gradient(self) -> jax.ShapeDtypeStruct:
        """What the kernel makes: the gradient, or what is to be summed, in whole tiles."""
        p, warps = self.problem, CONSUMERS * WARPS
        rows, keys = self.row_blocks * BLOCK_Q, self.key_blocks * self.config.block_kv
        of_warps = p.batch, p.heads, warps, keys
        if self.shares > 1:
            return jax.ShapeDtypeStruct((self.shares, *self.shape), jnp.float32)
        shape = {
            "whole": self.shape,
            "rows": (p.batch, p.heads, rows),
            "diagonals": (p.batch, p.heads, self.per_entry, warps, self.diagonals),
        }.get(self.kind, of_warps)
        return jax.ShapeDtypeStruct(shape, self.dtype if self.kind == "whole" else jnp.float32)

    @property
    def diagonals(self) -> int:
        """Of the part of a tile that a warp has; the first is one that it has not."""
        return self.config.block_kv + ROWS // WARPS

    def summed(self, gradient: jax.Array) -> jax.Array:
        """The gradient in its shape, from what the kernel makes.

        Of diagonals `[B, N, 1, T + S - 1]`: differences begin at 1 - T.
        """
        p = self.problem
        if self.kind == "whole":
            return gradient.sum(0) if self.shares > 1 else gradient
        if self.kind == "diagonals":
            return self._added_up(gradient)[:, :, None]
        if self.kind == "columns":
            gradient = gradient[..., : p.key_length].sum(2)[:, :, None]
        else:
            gradient = gradient[..., : p.query_length][..., None]
        gradient = gradient.reshape(self.shape[0], -1, *gradient.shape[1:]).sum(1)
        axes = tuple(axis for axis, size in enumerate(self.shape) if size == 1)
        return gradient.sum(axes, keepdims=True)

    def _added_up(self, gradient: jax.Array) -> jax.Array:
        """The sums of diagonals, of what each warp had of each piece."""
        p, block_kv, rows = self.problem, self.config.block_kv, ROWS // WARPS
        warps = CONSUMERS * WARPS
        # The warps of a piece begin 16 diagonals apart, and pieces block_kv.
        before = [rows * (warps - 1 - warp) for warp in range(warps)]
        moved = [
            jnp.pad(gradient[..., warp, :], ((0, 0),) * 3 + ((n, before[0] - n),))
            for warp, n in enumerate(before)
        ]
        own = functools.reduce(jnp.add, moved)
        parts = -(-own.shape[-1] // block_kv)
        own = jnp.pad(own, ((0, 0),) * 3 + ((0, parts * block_kv - own.shape[-1]),))
        own = own.reshape(*own.shape[:3], parts, block_kv)
        moved = [
            jnp.pad(own[..., n, :], ((0, 0),) * 2 + ((n, parts - 1 - n), (0, 0)))
            for n in range(parts)
        ]
        total = functools.reduce(jnp.add, moved).reshape(p.batch, p.heads, -1)
        # The first diagonal is 16 below that of the last warp's first row, at its first key.
        first = -BLOCK_Q - (self.row_blocks - 1) * self.key_blocks_a_row_block * block_kv
        return total[..., 1 - p.query_length - first :][..., : p.query_length + p.key_length - 1]
