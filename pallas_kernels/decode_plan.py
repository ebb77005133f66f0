"""What a decoding kernel does, and with what buffers, decided before it is traced."""

import dataclasses
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import online_softmax
from pallas_kernels.decode_config import BLOCK_KV, DecodeProblem
from pallas_kernels.problem import LOG2E
from pallas_kernels.ptx.operands import OPERAND, float8_operand

_MOST_PART = 4096  # elements of an output of float8 that are one product, of 64 registers


def box_columns(width: int, itemsize: int) -> int:
    """Columns of a box of a cache's rows, which is as wide as TMA swizzles."""
    tiling, _ = OPERAND if itemsize == 2 else float8_operand(width)
    return tiling.tiling[1]


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the kernel does, and with what buffers.

    Attributes:
      problem: static description.
      splits: parts of the keys.
      optional: names of the operands beside queries, caches and lengths.
    """

    problem: DecodeProblem
    splits: int
    optional: tuple[str, ...]

    @property
    def rows(self) -> int:
        """Of a tile."""
        return self.problem.tile_rows

    @property
    def thread_blocks(self) -> int:
        return self.problem.key_heads_of_all * self.problem.row_tiles * self.splits

    @property
    def stages(self) -> int:
        return self.problem.config.stages(self.rows, self.thread_blocks)

    @property
    def factor(self) -> float:
        """What logits are multiplied with; capped ones are in log2 units already."""
        return self.problem.scale * LOG2E if self.problem.soft_cap is None else 1.0

    @property
    def is_float8(self) -> bool:
        return self.problem.cache_dtype.itemsize == 1

    @property
    def _is_narrow(self) -> bool:
        return self.problem.cache_dtype != jnp.bfloat16

    @property
    def in_doubt(self) -> bool:
        """Whether the reference may have to rise in every step.

        With a window, the first keys of a later token may come after the first step. And what is
        far below a sink, which may be the first key, must not vanish in a narrow dtype.
        """
        return self._is_narrow or (self.problem.window is not None and self.problem.tokens > 1)

    @property
    def allowed(self) -> online_softmax.Range:
        return online_softmax.weight_range(self.problem.cache_dtype, searched=self._is_narrow)

    @property
    def early(self) -> bool:
        """Whether the first key blocks can be loaded before a length is known."""
        return self.splits == 1 and self.problem.window is None and self.problem.page_size is None

    @property
    def blocks_of_cache(self) -> int:
        return -(-self.problem.capacity // BLOCK_KV)

    # --- copies and boxes ---

    @property
    def copies(self) -> int:
        """Of a key block, one a page."""
        page_size = self.problem.page_size
        return 1 if page_size is None else max(1, BLOCK_KV // page_size)

    @property
    def rows_of_copy(self) -> int:
        return BLOCK_KV // self.copies

    @property
    def in_boxes(self) -> bool:
        """A key block comes in one box where its rows can be tiles."""
        return self.problem.page_size is None and self.problem.capacity % 8 != 0

    @property
    def box(self) -> int:
        """Columns of one."""
        p = self.problem
        return box_columns(p.width, p.cache_dtype.itemsize) if self.in_boxes else p.width

    @property
    def boxes(self) -> int:
        return self.problem.width // self.box

    @property
    def columns(self) -> int:
        """Of a product: queries in two parts where they are float8."""
        return 2 * self.rows if self.is_float8 else self.rows

    @property
    def part(self) -> int:
        """Columns of the output that one product adds to."""
        most = min(self.problem.width, _MOST_PART // self.rows)
        return most if self.is_float8 else self.box

    def scratch(self) -> dict[str, Any]:
        """Types of shared memory and barriers, by name."""
        p = self.problem
        barrier = plgpu.Barrier(num_arrivals=self.copies * self.boxes, num_barriers=self.stages)
        found: dict[str, Any] = dict(
            q_smem=self._smem(self.columns, p.width),
            k_smem=self._slots(),
            v_smem=self._slots(),
            p_smem=self._smem(self.columns, BLOCK_KV),
            reduced_smem=plgpu.SMEM((4 * self.rows,), jnp.float32),
            k_full=barrier,
            v_full=barrier,
        )
        if self.is_float8:
            found["turned_smem"] = self._smem(p.width, BLOCK_KV)
            found["units_smem"] = plgpu.SMEM((self.rows,), jnp.float32)
        return found

    def _smem(self, *shape: int) -> Any:
        transforms = float8_operand(shape[-1]) if self.is_float8 else OPERAND
        return plgpu.SMEM(shape, self.problem.cache_dtype, transforms=transforms)

    def _slots(self) -> Any:
        """The circular buffer of K or of V; in boxes, for copies and for products."""
        if not self.in_boxes:
            return self._smem(self.stages, BLOCK_KV, self.problem.width)
        for_products = self._smem(self.stages, self.boxes, BLOCK_KV, self.box)
        _, swizzle = for_products.transforms
        for_copies = dataclasses.replace(for_products, transforms=(swizzle,))
        return plgpu.RefUnion(for_copies, for_products)
