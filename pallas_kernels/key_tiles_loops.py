"""The loops of a tile of keys over the queries that see any: with a mask, without, and blank."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.elements import NOTHING_LOADED
from pallas_kernels.key_tiles_blocks import ConsumerBlocks
from pallas_kernels.key_tiles_masks import ListedMask, StepMask
from pallas_kernels.key_tiles_walk import Walk
from pallas_kernels.mask_functions import MASKED


def loop_over_steps(
    walk: Walk,
    step: Callable,
    index,
    j,
    own_first_key: int = 0,
    first_step: Callable | None = None,
    blank_step: Callable | None = None,
    far_in_masked: bool = False,
):
    """Runs `step(j, mask, far, load_elements)` for the query blocks of each head of the group.

    Query blocks run from the last to the first: under a causal mask tiles differ in the first,
    so that those that begin at the same time read the same blocks, which is easy on L2. Masked
    steps have a loop of their own, and code of their own, after those that need no mask; with a
    lower bound another before them. Each is two with segment ids, which are compared in one.
    Blank steps, if there are any, come first and last. Where tiles have lists (`mask_functions.py`)
    masked steps come first, of all heads of the group. Where there are rows far from 0 anywhere all
    steps are in a loop of their own, which alone knows of them.

    Args:
      step: mask is None, or a `StepMask` for the weights of that step; far says whether rows
        may be far from 0; load_elements gives, for a step, what `elements.py` does with logits
        and weights.
      j: number of the first step, of all that the thread block does.
      own_first_key: the first of 64 keys in the tile that weights are of.
      first_step: what to run in the place of the first step, which is then always masked.
      far_in_masked: where rows are far from 0 all steps are in the loops with a mask instead,
        as there are no registers for one more loop.
      blank_step: None, or `blank_step(j, mask)`, to run in the place of steps whose queries see
        none of these keys.

    Returns:
      The number after the last.
    """
    may_be_far = not walk.tiles.problem.has_cap
    end = j + walk.steps(index)
    load_elements = functools.partial(
        walk.load_elements, index=index, end=end, own_first_key=own_first_key
    )
    loops = _Loops(
        walk,
        index,
        own_first_key,
        functools.partial(step, load_elements=load_elements),
        blank_step,
        0 if first_step is None else 1,
        far_in_masked and may_be_far and walk.tiles.any_mask,
    )
    if first_step is not None:
        first = 0 if walk.tiles.problem.has_lists else walk.block_of_first_step(walk.locate(index))
        mask = loops.mask_of(first, j, comparing=True)
        first_step(j, mask=mask, far=may_be_far, load_elements=load_elements)
        j = j + 1
    if walk.tiles.problem.has_lists:
        return loops.listed(end, j)
    one_head = functools.partial(loops.one_head, end)
    if walk.tiles.problem.group > 1:
        return lax.while_loop(lambda j: j < end, one_head, j)
    return one_head(j)


@dataclasses.dataclass(frozen=True)
class _Loops:
    """The loops of `loop_over_steps` over the query blocks of one head.

    Attributes:
      walk, index, own_first_key, step, blank_step, far_in_masked: see there.
      done: steps of the tile that came before.
    """

    walk: Walk
    index: Any
    own_first_key: int
    step: Callable
    blank_step: Callable | None
    done: int
    far_in_masked: bool

    def first_block(self):
        return self.walk.first_block(self.walk.locate(self.index))

    def end_block(self):
        return self.walk.end_block(self.walk.locate(self.index))

    def block_of(self, end, j):
        """Of step j of a tile without a list, whose steps end before `end`."""
        walk = self.walk
        if walk.tiles.has_parts:
            place = walk.locate(self.index)
            return walk.step_of(place, walk.steps(self.index) - (end - j))[0]
        block = self.end_block() - 1 - self.done
        if walk.tiles.problem.group > 1:
            first_block = self.first_block()
            block = first_block + lax.rem(end - j - 1, self.end_block() - self.first_block())
        return block

    @property
    def own_blocks(self) -> ConsumerBlocks:
        return ConsumerBlocks(self.walk, self.index, self.own_first_key)

    def mask_of(self, block, j, comparing: bool = False) -> StepMask | None:
        """Of steps from j on, whose blocks run from one on, or from a place of the tile's list."""
        if not self.walk.tiles.any_mask:
            return None
        if self.walk.tiles.problem.has_lists:
            return ListedMask(self.walk, self.index, block - j, self.own_first_key, comparing)
        return StepMask(self.walk, self.index, block + j, self.own_first_key, comparing)

    def masked(self, block, j, end) -> None:
        """Steps j to end, from a block on; after others those that compare segment ids."""
        others, segmented = end, self.walk.tiles.problem.segmented
        if segmented:
            compares = self.walk.is_comparing(self.index)
            if self.far_in_masked:
                compares |= self.walk.are_any_far()()
            others = jnp.where(compares, j, end)
        far = self.far_in_masked and not segmented
        pl.loop(j, others)(functools.partial(self.step, mask=self.mask_of(block, j), far=far))
        if segmented:
            mask = self.mask_of(block, j, comparing=True)
            step = functools.partial(self.step, mask=mask, far=self.far_in_masked)
            pl.loop(others, end)(step)

    def far(self, block, j, end) -> None:
        """Steps j to end, from a block on, where rows may be far from 0, with any mask."""
        mask = self.mask_of(block, j, comparing=True)
        pl.loop(j, end)(functools.partial(self.step, mask=mask, far=True))

    def blank(self, block, j, end) -> None:
        """Steps j to end, from a block on, of queries that see none of these keys."""
        assert self.blank_step is not None
        pl.loop(j, end)(functools.partial(self.blank_step, mask=self.mask_of(block, j)))

    def listed(self, end, j):
        """All steps of a tile that has a list: first those that need a mask, then the others."""
        walk, done = self.walk, jnp.int32(self.done)
        place = walk.locate(self.index)
        masked = j + jnp.maximum(walk.of_list(place, MASKED) - done, 0)
        may_be_far = not walk.tiles.problem.has_cap
        if may_be_far and self.far_in_masked:
            masked = jnp.where(walk.are_any_far()(), end, masked)
        elif may_be_far:
            far = jnp.where(walk.are_any_far()(), end, j)
            self.far(done, j, far)
            j, done = far, done + (far - j)
            masked = jnp.maximum(masked, j)
        self.masked(done, j, masked)
        rest = self.step
        if not walk.tiles.problem.has_score:  # else there is a dense mask alone, not needed here
            rest = functools.partial(self.step, load_elements=lambda j: NOTHING_LOADED)
        pl.loop(masked, end)(functools.partial(rest, mask=None, far=False))
        return end

    def one_head(self, end, j):
        """From step j on, which need not be the head's first; returns the number after its last.

        Args:
          end: the number after the tile's last.
        """
        walk, tiles, own_blocks = self.walk, self.walk.tiles, self.own_blocks
        may_be_far, far_in_masked = not tiles.problem.has_cap, self.far_in_masked
        blank_before, blank_behind = False, False
        if self.blank_step:
            blank_before, blank_behind = tiles.blank_steps(self.own_first_key)
        is_far = walk.are_any_far()
        # A part may end before the head does.
        until = lambda end_of_loop: (
            jnp.minimum(end_of_loop, end) if walk.tiles.has_parts else end_of_loop
        )
        block = self.block_of(end, j)
        if blank_behind:
            own = until(j + jnp.maximum(block + 1 - own_blocks.end(), 0))
            self.blank(block, j, own)
            j, block = own, block - (own - j)
        if tiles.problem.has_far_edge:
            end_unmasked = own_blocks.end_unmasked(own_blocks.first_unmasked())
            unmasked = until(j + jnp.maximum(block + 1 - end_unmasked, 0))
            if may_be_far and not far_in_masked:
                unmasked = jnp.where(is_far(), j, unmasked)
            self.masked(block, j, unmasked)
            j, block = unmasked, block - (unmasked - j)
        masked = until(j + jnp.maximum(block + 1 - own_blocks.first_unmasked(), 0))
        masked = jnp.where(is_far(), j, masked) if may_be_far else masked
        pl.loop(j, masked)(functools.partial(self.step, mask=None, far=False))
        if not (tiles.any_mask or may_be_far):
            return masked
        j, block = masked, block - (masked - j)
        end_of_head = own_end = until(j + block + 1 - self.first_block())
        if blank_before:
            own_first = own_blocks.first()
            own_end = until(j + jnp.maximum(block + 1 - own_first, 0))
        if may_be_far and not far_in_masked:
            others = jnp.where(is_far(), own_end, j)
            self.far(block, j, others)
            j, block = others, block - (others - j)
        if tiles.any_mask:
            self.masked(block, j, own_end)
        if blank_before:
            self.blank(block - (own_end - j), own_end, end_of_head)
        return end_of_head
