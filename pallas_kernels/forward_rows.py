"""From products to weights: the 64 query rows of a consumer of the forward, and what they see."""

import functools
from collections.abc import Callable

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp

from pallas_kernels import online_softmax
from pallas_kernels.config import ROWS
from pallas_kernels.dropout import kept
from pallas_kernels.element_arrays import expanded
from pallas_kernels.elements import NOTHING_LOADED, Loaded
from pallas_kernels.elements import masked as masked_by_element
from pallas_kernels.forward_block import ThreadBlock
from pallas_kernels.online_softmax import RowState
from pallas_kernels.problem import LOG2E
from pallas_kernels.ptx import notes
from pallas_kernels.ptx.elements import load_bits
from pallas_kernels.ptx.masks import all_columns, keep_bits
from pallas_kernels.ptx.stores import store_rows
from pallas_kernels.row_masks import in_each_row
from pallas_kernels.soft_cap import capped, weights_of


class Rows:
    """The rows of this warpgroup in any tile.

    Attributes:
      block: the thread block.
      bounded: whether exponents are bounded, as in a second round; a bool, or traced.
    """

    def __init__(self, block: ThreadBlock, begin):
        self.block, self.plan = block, block.plan
        plan = self.plan
        # A cap bounds all logits.
        self.bounded = not plan.problem.has_cap and (plan.always_bounded or begin > 0)
        # Elements that come late take the registers of weights that no product reads any more.
        self._elements_early = plan.config.elements_early and not block.elements.wide
        self.elements_late = plan.loads_elements and not self._elements_early

    def first(self, tile):
        """The number of the first one."""
        return self.plan.tiles.first_row(tile, self.block.warpgroup)

    def stored(self, tile):
        """Where their results are."""
        return pl.ds(self.plan.tiles.first_stored(tile, self.block.warpgroup), ROWS)

    def first_key(self, place, j):
        """Of step j."""
        return self.block.key_blocks.number(place, j) * self.plan.config.block_kv

    # --- what they see ---

    def bounds(self, tile, batch) -> Callable[[], tuple[jax.Array | None, jax.Array] | None]:
        """What gives the bounds of rows but for ids, or None where these are static.

        With lengths alone the first is None.

        It loads them only then where registers are short.
        """
        plan, load, lengths = self.plan, self.block.masks.load_bounds, self.block.lengths
        if lengths is not None:
            return lambda: (None, in_each_row(lengths[batch]))
        if not plan.problem.dynamic:
            return lambda: None
        if plan.registers_are_scarce or plan.problem.segmented:
            return lambda: load(batch, self.first(tile))
        bounds = load(batch, self.first(tile))
        return lambda: bounds

    def ids(self, place, j):
        """Ids of rows, and where those of the keys of step j are."""
        (tile, batch, _), first_key = place, self.first_key(place, j)
        return self.block.masks.load_ids(batch, self.first(tile), first_key)

    def bits(self, place, j, *, near: bool = True, is_first: bool = False):
        """Which keys of step j rows see whose ids are in an interval, or by a mask function.

        None without either. A first step that is of one more block sees none.
        """
        if self.block.lists is not None:
            return self._function_bits(place, j)
        tile, batch, _ = place
        if not self.plan.problem.segmented:
            return None
        there = self.block.key_blocks.comparing(place) == 0 if is_first else True
        first_row, first_key = self.first(tile), self.first_key(place, j)
        bounds = self.block.masks.load_bounds(batch, first_row)
        bits = all_columns(ROWS, self.plan.config.block_kv, there)
        return self.block.masks.visible(bits, first_row, first_key, bounds, near=near)

    def _function_bits(self, place, j):
        """Which keys of step j rows see by a mask function and static bounds; None without one."""
        block, block_kv = self.block, self.plan.config.block_kv
        assert block.lists is not None
        tile, batch, head = place
        first_row, first_key = self.first(tile), self.first_key(place, j)
        bits = block.lists.bits(batch, head, first_row, first_key, block_kv)
        return None if bits is None else block.masks.visible(bits, first_row, first_key, None)

    def masked(self, values, tile, key_block, bounds, bits, *, ids=None, near=True):
        """Logits, or weights if their reference is known, without those of unseen keys."""
        if bits is not None:
            return keep_bits(values, bits, self.plan.unseen)
        first_row, first_key = self.first(tile), key_block * self.plan.config.block_kv
        return self.block.masks.masked(
            values, first_row, first_key, bounds, ids, near=near, fill=self.plan.unseen
        )

    def there_is(self, key_block):
        """The number of a block that there is: a first step may be of one more."""
        problem = self.plan.problem
        if not problem.segmented:
            return key_block
        return jnp.minimum(key_block, -(-problem.key_length // self.plan.config.block_kv) - 1)

    # --- what belongs to pairs of rows and keys ---

    def load_elements(self, number: Callable, j, *, is_first: bool = False) -> Loaded:
        """Mask and bias of step j of a tile, asked for before the product is there.

        Args:
          number: gives that of the tile.
        """
        if not (self.plan.loads_elements or self.plan.problem.has_key_mask):
            return NOTHING_LOADED
        tile, batch, head = place = self.plan.tiles.locate(number())
        first_row = self.first(tile)
        key_block = self.block.key_blocks.number(place, j)
        if self.plan.problem.has_key_mask:
            assert not self.plan.loads_elements  # a bias beside it comes by TMA
            return self.load_key_mask(batch, key_block)
        if is_first:
            key_block = self.there_is(key_block)
        block_kv = self.plan.config.block_kv
        return self.block.elements.load(
            batch, head, first_row, key_block * block_kv, block_kv, early=self._elements_early
        )

    def load_key_mask(self, batch, key_block) -> Loaded:
        """The same bits for all rows."""
        block_kv, words = self.plan.config.block_kv, self.block.key_words
        assert words is not None
        of_entry = words.at[pl.ds(batch, 1)]
        load = functools.partial(load_bits, of_entry, jnp.int32(0), key_block * block_kv, block_kv)
        return Loaded(bits=load)

    def words(self, tile, batch, head) -> jax.Array | None:
        """Words of dropout of the rows; None if there is no dropout."""
        return self.block.dropout.of_rows(batch, head, self.first(tile))

    # --- weights ---

    def _values(self, products, loaded: Loaded, state: RowState | None, *, exact: bool = True):
        """Logits and their factor, or weights and None if their reference is known."""
        if loaded.score is not None:
            products, _ = loaded.score(products)
        if state is None or self.plan.reference is None:
            return capped(products, loaded, self.plan.problem, exact=exact)
        return weights_of(products, state.reference, loaded, self.plan.problem), None

    def first_weights(self, products, tile, key_block, bounds, bits, loaded: Loaded):
        """Weights of a tile's first step, and the state of its rows."""
        plan, state = self.plan, None
        if plan.reference is not None:
            state = online_softmax.begin(ROWS, plan.reference)
        values, factor = self._values(products, loaded, state)
        bounds = bounds()
        if plan.tiles.any_mask:
            values = self.masked(values, tile, key_block, bounds, bits)
        values = masked_by_element(values, loaded, plan.unseen)
        if state is None:
            weights, state = online_softmax.start(values, factor, plan.allowed, self.bounded)
        else:
            weights, state = values, online_softmax.add(values, state)
        if bounds is not None and bounds[0] is not None:
            state = online_softmax.close(state, seeing=bounds[0] < bounds[1])
        return weights, state

    def first_operand(self, weights, place, key_block):
        """The weights of a tile's first step as its first output product reads them."""
        tile, batch, head = place
        block_kv, dropout = self.plan.config.block_kv, self.block.dropout
        words, first_key = self.words(tile, batch, head), self.there_is(key_block) * block_kv
        dropped = dropout.dropped(words, batch, first_key, block_kv)
        return kept(weights, dropped, self.plan.problem.dtype)

    def weights(self, products, loaded: Loaded, state: RowState, mask: Callable, *, looks: bool):
        """Weights of a later step, what corrects the output, None without, and the next state.

        Args:
          mask: of logits or weights, replaces those of unseen keys.
          looks: for new maxima.
        """
        plan = self.plan
        if loaded.score is not None and not looks:
            exponents, _ = loaded.score(products, less=state.reference)
            exponents = masked_by_element(mask(exponents), loaded, plan.unseen)
            weights = jnp.exp2(exponents)
            return weights, None, online_softmax.add(weights, state)
        values, factor = self._values(products, loaded, state, exact=looks)
        values = masked_by_element(mask(values), loaded, plan.unseen)
        if plan.reference is not None:
            return values, None, online_softmax.add(values, state)
        if looks:
            return online_softmax.advance(values, factor, plan.allowed, state, self.bounded)
        weights, state = online_softmax.go_on(values, factor, state)
        return weights, None, state

    # --- the end of a tile ---

    def finish(self, state: RowState, tile, batch, head):
        """Stores LSE and more, notes if a reference was too low; returns 1 / sum.

        It is negative where a row that sees nothing may have seen NaN.
        """
        plan, problem, block = self.plan, self.plan.problem, self.block
        if plan.closes_rows:
            state, closed = online_softmax.cleared(state)
        sink = None if block.sinks is None else in_each_row(block.sinks[batch, head])
        in_nats = None
        if problem.unbounded:
            in_nats = lambda x: expanded(x * (1.0 / LOG2E), problem)
        (inverse, lse, log_sum), too_low = online_softmax.finish(
            state, plan.allowed.limit, sink, in_nats
        )
        store_rows(block.lse.at[batch, head, self.stored(tile)], lse)
        for n, of_rows in enumerate((state.reference, log_sum)):
            store_rows(block.references.at[batch, head, n, self.stored(tile)], of_rows)
        if plan.problem.has_dropout:
            inverse *= 1.0 / problem.kept_share
        if plan.closes_rows:
            inverse = jnp.where(closed, -1.0, inverse)
        if not plan.one_round_does:
            notes.note(block.own_notes(), too_low)
        return inverse
