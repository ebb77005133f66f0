"""What `backward_key.py` does, and with what buffers and barriers, decided before it is traced."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np

from pallas_kernels import backward_key_spills
from pallas_kernels.columns import Columns
from pallas_kernels.config import BACKWARD_CONSUMERS, BackwardKeyConfig
from pallas_kernels.key_tiles import KeyTiles
from pallas_kernels.key_tiles_shares import dealt_out, gradients_of_tiles
from pallas_kernels.problem import Problem, box_width, whole_tiles
from pallas_kernels.ptx.barriers import NamedBarriers, twins_of
from pallas_kernels.ptx.compiler import fresh_zero
from pallas_kernels.ptx.mail import mail_shape
from pallas_kernels.spills import would_spill

CONSUMERS = BACKWARD_CONSUMERS
STAGES = 2  # slots of Q and of dO, as many as fit; see `_Producer.loads_of_step` for why not 1
# Columns of a part of Q and K, and of V and dO, by their number; where it is not here by that of
# whole tiles, at least two.
# What the two consumers' products take is level: S' and dP', then dK and dV of their parts.
_KEY_PARTS = {128: (64, 64), 160: (64, 96), 192: (64, 128), 224: (96, 128), 256: (128, 128)}
_VALUE_PARTS = {128: (64, 64), 160: (96, 64), 192: (128, 64), 224: (128, 96), 256: (128, 128)}


def key_tiles(problem: Problem, config: BackwardKeyConfig) -> KeyTiles:
    """Tiles of keys, and the blocks of queries that read Q and dO for them."""
    whole = KeyTiles(problem, config.block_kv, config.block_q, row_bytes=problem.pair_bytes)
    return dealt_out(whole, config.shares, config.d_logits_bytes)


class Parts(NamedTuple):
    """The left and the right columns of an operand, each contiguous in shared memory."""

    left: Columns
    right: Columns

    @classmethod
    def of(cls, width: int, parts: dict[int, tuple[int, int]], *, odd_rows: bool) -> "Parts":
        size, box = width, box_width(width)
        if width not in parts:
            size, box = max(whole_tiles(width), min(parts)), 64
        left, right = parts[size]
        starts = (left, 0), (right, left)
        return cls(*(Columns(width, *each, box, odd_rows) for each in starts))

    @property
    def tiles(self) -> int:
        return self.left.tiles + self.right.tiles

    def smem(self, *shape: int, dtype: np.dtype) -> list[Any]:
        """Shared memory of both for `(..., rows)`: one array if they are alike, or one each."""
        *leading, rows = shape
        if self.left.size == self.right.size:
            return [self.left.smem(*leading, 2, rows, dtype=dtype)]
        return [columns.smem(*leading, 1, rows, dtype=dtype) for columns in self]

    def at(self, arrays: Sequence, part: int, *slot):
        """What `Columns` take of one part: all of it, or a slot of it."""
        return arrays[part % len(arrays)].at[*slot, part // len(arrays)]

    def resident(self, arrays: Sequence, part: int):
        """The same of one that has no slots, at an address that is made anew."""
        return arrays[part % len(arrays)].at[part // len(arrays) + fresh_zero()]


@dataclasses.dataclass(frozen=True)
class Plan:
    """The kernel.

    Attributes:
      whole: static description.
      config: registers, thread blocks and shares.
      stored_heads: it stores dS' too, of sections of so many heads, or if 0 does not.
    """

    whole: Problem
    config: BackwardKeyConfig
    stored_heads: int

    @functools.cached_property
    def tiles(self) -> KeyTiles:
        return key_tiles(self.whole, self.config)

    @property
    def problem(self) -> Problem:
        """The same with a key head for each share of a group."""
        return self.tiles.problem

    def key_gradients(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes of dK and dV; of shares, of whole tiles."""
        sizes = (sum(part.size for part in parts) for parts in (self.keys, self.values))
        return gradients_of_tiles(self.tiles, *sizes)

    @functools.cached_property
    def keys(self) -> Parts:
        return self._parts(self.problem.width, _KEY_PARTS)

    @functools.cached_property
    def values(self) -> Parts:
        return self._parts(self.problem.value_width, _VALUE_PARTS)

    def _parts(self, width: int, parts: dict[int, tuple[int, int]]) -> Parts:
        return Parts.of(width, parts, odd_rows=self.problem.has_odd_rows)

    @property
    def dv_factor(self) -> float:
        return 1.0 / self.problem.kept_share

    @property
    def crowded(self) -> bool:
        """Whether addresses of what is handed over are made anew."""
        return would_spill(backward_key_spills.ADDRESSES, self)

    @property
    def words_row(self) -> int:
        """Where the words of queries come, with their start, as does their share."""
        return 1 + int(self.problem.has_shares)

    @property
    def together(self) -> int:
        """Rows of what comes together."""
        return self.words_row + int(self.problem.has_dropout)

    @functools.cached_property
    def barriers(self) -> dict[str, NamedBarriers]:
        """Those with a number, by name."""
        weights_sent = NamedBarriers(first=CONSUMERS + 2, count=1, arrivers=1)
        ds_sent = NamedBarriers(weights_sent.first + 1, count=1, arrivers=1)
        late_free = NamedBarriers(ds_sent.first + 1, STAGES + 1, arrivers=1)
        q_free = NamedBarriers(late_free.first + late_free.count, STAGES, arrivers=CONSUMERS)
        o_free = NamedBarriers(q_free.first + q_free.count, STAGES, arrivers=CONSUMERS)
        k_free = NamedBarriers(o_free.first + o_free.count, 1, arrivers=1)
        v_free = NamedBarriers(k_free.first + 1, 1, arrivers=1)
        return dict(
            weights_sent=weights_sent,
            ds_sent=ds_sent,
            late_free=late_free,
            q_free=q_free,
            o_free=o_free,
            k_free=k_free,
            v_free=v_free,
        )

    def scratch(self, interpret: bool) -> dict[str, Any]:
        """Types of shared memory and barriers, by name."""
        block_q, block_kv, dtype = self.config.block_q, self.config.block_kv, self.problem.dtype
        left, right = self.keys
        found: dict[str, Any] = dict(
            k_smem=self.keys.smem(block_kv, dtype=dtype),
            v_smem=self.values.smem(block_kv, dtype=dtype),
            late_smem=left.smem(STAGES + 1, block_q, dtype=dtype),  # left columns of Q
            q_smem=right.smem(STAGES, block_q, dtype=dtype),  # right columns of Q
            o_smem=self.values.smem(STAGES, block_q, dtype=dtype),
            start_smem=plgpu.SMEM((STAGES, self.together, block_q), jnp.float32),
            delta_smem=plgpu.SMEM((STAGES, block_q), jnp.float32),
            mail=plgpu.SMEM(mail_shape(block_q, jnp.float32), jnp.int32),
            k_full=plgpu.Barrier(num_arrivals=self.keys.tiles),
            v_full=plgpu.Barrier(num_arrivals=self.values.tiles),
            late_full=plgpu.Barrier(num_arrivals=left.tiles, num_barriers=STAGES + 1),
            q_full=plgpu.Barrier(num_arrivals=right.tiles + 1, num_barriers=STAGES),
            o_full=plgpu.Barrier(num_arrivals=self.values.tiles + 1, num_barriers=STAGES),
        )
        if interpret:
            found["twins"] = twins_of(self.barriers)
        return found
