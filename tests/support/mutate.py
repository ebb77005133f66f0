"""Puts small mistakes into a copy, one at a time, and says which test caught each, and how soon.

    python -m tests.support.mutate             all of them, in hours on two cores
    python -m tests.support.mutate dropout     those whose name has it
    python -m tests.support.mutate --list      their names
    python -m tests.support.mutate --gpu       those in PTX, on a Hopper GPU

Each runs the tests of the files that are named beside it, those that CI runs, up to the first that
fails. A mistake that hangs is caught by pytest's timeout.
"""

import argparse
import dataclasses
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).parents[2]
ENOUGH = 0.95  # share of mistakes that tests must catch


@dataclasses.dataclass(frozen=True)
class Mistake:
    """One change of one file.

    Attributes:
      name: what goes wrong.
      path: of the file, from the root.
      right, wrong: text that is there once, and what takes its place.
      tests: files of tests, without "tests/test_" and ".py", to run in that order.
    """

    name: str
    path: str
    right: str
    wrong: str
    tests: str

    def applied(self) -> str:
        """The text of the file with the mistake."""
        text = (ROOT / self.path).read_text()
        if text.count(self.right) != 1:
            raise ValueError(
                f"{self.name}: {self.path} has {self.right!r} {text.count(self.right)}"
                " times; needs it once"
            )
        return text.replace(self.right, self.wrong)


def _in(folder: str, file: str, tests: str, *changes: tuple[str, str, str]) -> list[Mistake]:
    """Mistakes in one file, by name, right and wrong."""
    return [Mistake(name, f"{folder}/{file}.py", *change, tests) for name, *change in changes]


MISTAKES = [
    *_in(
        "pallas_kernels",
        "hopper",
        "chapters kernels kernel_windows",
        (
            "rings: the producer does not wait for a free slot",
            "pl.when(step >= self.free.count)(is_free)",
            "pl.when(step >= self.free.count + 1)(is_free)",
        ),
    ),
    *_in(
        "pallas_kernels",
        "forward_products",
        "kernel_intervals",
        (
            "forward: rows of V that no query sees, one too many",
            "rows = first - first_key, end - first_key",
            "rows = first - first_key, end - first_key + 1",
        ),
    ),
    *_in(
        "pallas_kernels",
        "forward_products",
        "kernels",
        (
            "forward: steps of rows that are there are blank",
            "is_blank = self.rows.first(tile) >= plan.problem.query_length",
            "is_blank = self.rows.first(tile) + 64 >= plan.problem.query_length",
        ),
    ),
    *_in(
        "pallas_kernels",
        "forward_consumer",
        "kernels kernel_windows kernel_elements tickets",
        (
            "forward: a slot of V a step too late",
            "block.keys.slot(steps + j), block.values.slot(steps + j - 1)",
            "block.keys.slot(steps + j), block.values.slot(steps + j)",
        ),
        (
            "forward: the output is not corrected",
            "output *= spread(correction, output.shape)",
            "output *= 1.0",
        ),
        (
            "forward: the far edge is without a mask",
            "carry = masked_steps(near, blocks, carry, exact=False, far=True)",
            "carry = lax.fori_loop(near, blocks, functools.partial(step, exact=False), carry)",
        ),
    ),
    *_in(
        "pallas_kernels",
        "forward",
        "kernels kernel_windows kernel_elements tickets",
        (
            "forward: another head of keys",
            "kv_head = plan.problem.kv_head_of(head)",
            "kv_head = lax.rem(head, jnp.int32(plan.problem.kv_heads))",
        ),
    ),
    *_in(
        "pallas_kernels",
        "forward_rows",
        "kernels",
        (
            "forward: a reference that is too low is noted nowhere",
            "notes.note(block.own_notes(), too_low)",
            "notes.note(block.own_notes(), too_low & False)",
        ),
    ),
    *_in(
        "pallas_kernels",
        "forward_block",
        "kernels",
        (
            "forward: queries are loaded before their buffer is free",
            "self.queries.await_free(index, buffer)",
            "self.queries.await_free(index - 1, buffer)",
        ),
    ),
    *_in(
        "pallas_kernels",
        "scores",
        "kernels kernel_scores",
        (
            "scores: what a cap dropped is dropped again",
            "if not weights.are_dropped:",
            "if True:",
        ),
        (
            "scores: the slope of a score function does not count",
            "return self.values if self.slope is None else sloped(self.values, self.slope)",
            "return self.values",
        ),
    ),
    *_in(
        "pallas_kernels",
        "forward_deals",
        "kernels tickets",
        (
            "forward: no second round",
            "is_last = jnp.logical_not(wants_another()) | (begin > 0)",
            "is_last = jnp.logical_not(wants_another()) | (begin >= 0)",
        ),
        (
            "forward: by number, tiles of the next thread block",
            "return self.thread_block + position * self.thread_blocks",
            "return self.thread_block + position * (self.thread_blocks - 1)",
        ),
    ),
    *_in(
        "pallas_kernels",
        "forward_key_blocks",
        "kernel_intervals key_masks kernel_functions",
        (
            "lengths: the block that keys end in is left out",
            "lax.div(jnp.maximum(length, 1) + (block_kv - 1), block_kv)",
            "lax.div(jnp.maximum(length, 1), block_kv)",
        ),
        (
            "masks of keys: the first step of a tile has no mask",
            "return self.of_entries.unmasked(place[1], self.blocks)",
            "return self.of_entries.unmasked(place[1], self.blocks) + 1",
        ),
        (
            "lists: each block is the one that comes after it",
            "return self.entry(place, LISTED + j)",
            "return self.entry(place, LISTED + j + 1)",
        ),
    ),
    *_in(
        "pallas_kernels",
        "forward_products",
        "kernel_intervals",
        (
            "lengths: values behind the last key count, times 0",
            "first, end = jnp.int32(0), block.lengths[batch + fresh_zero()]",
            "first, end = jnp.int32(0), jnp.int32(key_length)",
        ),
    ),
    *_in(
        "pallas_kernels",
        "forward_rows",
        "kernels kernel_dropout kernel_elements kernel_segments",
        (
            "dropout: the output is not divided by the share",
            "inverse *= 1.0 / problem.kept_share",
            "inverse *= 1.0",
        ),
        (
            "bias: loaded a step too late",
            "key_block = self.block.key_blocks.number(place, j)",
            "key_block = self.block.key_blocks.number(place, j) + 1",
        ),
        (
            "sinks: those of another batch entry's head",
            "block.sinks[batch, head]",
            "block.sinks[batch, 0]",
        ),
    ),
    *_in(
        "pallas_kernels",
        "seen_blocks",
        "kernels kernel_windows kernel_intervals kernel_segments",
        (
            "causal: the last key that a tile sees",
            "seen_by_last = np.minimum(p.key_length, last_row + 1 + p.highest)",
            "seen_by_last = np.minimum(p.key_length, last_row + p.highest)",
        ),
        (
            "causal: a block too many without a mask",
            "(seen_by_first - (p.highest is not None)) // block_kv",
            "(seen_by_first + block_kv - 1) // block_kv",
        ),
        (
            "window: the first key block of a tile",
            "first = np.clip((first_row + p.lowest) // block_kv, 0, end - 1)",
            "first = np.clip((last_row + p.lowest) // block_kv, 0, end - 1)",
        ),
        (
            "window: tiles are shifted where they see more blocks so",
            "return unused if blocks(unused) <= blocks(0) else 0",
            "return unused",
        ),
    ),
    *_in(
        "pallas_kernels",
        "forward_shares",
        "forward_shares",
        (
            "shares: thread blocks end with their longest share",
            "step * (scheduler.time_of_deal(steps_of_all, tiles.thread_blocks) - TILE_OVERHEAD)",
            "step * (steps_of_all.max() - TILE_OVERHEAD)",
        ),
    ),
    *_in(
        "pallas_kernels",
        "forward_tiles",
        "kernels kernel_windows kernel_intervals kernel_segments",
        (
            "intervals: the first block without a mask",
            "first_unmasked=-(-reach.common_first // block_kv),",
            "first_unmasked=reach.common_first // block_kv,",
        ),
    ),
    *_in(
        "pallas_kernels",
        "online_softmax",
        "online_softmax kernels",
        (
            "LSE: without its sum",
            "return RowEnd(inverse, nats + log, log_sum)",
            "return RowEnd(inverse, nats, log_sum)",
        ),
        (
            "softmax: sums are not corrected",
            "sums = state.sums * spread(correction, state.sums.shape)",
            "sums = state.sums",
        ),
        ("sinks: take no weight", "total * correction + of_sink)", "total * correction)"),
    ),
    *_in(
        "pallas_kernels",
        "online_softmax",
        "far_rows",
        (
            "softmax: a reference far from 0 falls",
            "raised = jnp.maximum(reference, _reference_of(new, allowed))",
            "raised = _reference_of(new, allowed)",
        ),
    ),
    *_in(
        "pallas_kernels",
        "forward",
        "far_rows",
        (
            "sinks: not compressed beside a bias",
            "(compressed(sinks, problem) if problem.unbounded else sinks)",
            "sinks",
        ),
    ),
    *_in(
        "pallas_kernels",
        "forward_times",
        "kernels",
        (
            "times: no tile is longer under a mask",
            "self.tile + self.edge * edges",
            "self.tile",
        ),
    ),
    *_in(
        "pallas_kernels",
        "key_tiles_shares",
        "kernel_shares",
        (
            "shares: dV of dK",
            "[both.at[0], both.at[1]]",
            "[both.at[0], both.at[0]]",
        ),
        (
            "shares: those of the last tiles come first",
            "first = (a - b for a, b",
            "first = (0 * a for a, b",
        ),
    ),
    *_in(
        "pallas_kernels",
        "scheduler",
        "kernels",
        (
            "sections: of too many heads",
            "sections = -(-kv_heads // most)",
            "sections = max(1, kv_heads // most)",
        ),
        (
            "sections: of a round of tiles though L2 does not have them",
            "in_work * bytes_per_kv_head > _BEYOND_L2",
            "in_work * bytes_per_kv_head > 1000 * _BEYOND_L2",
        ),
        (
            "sections: the last one longer though a divisor of all heads would do",
            "if divisor >= _EVEN * most:",
            "if divisor == most:",
        ),
    ),
    *_in(
        "jax_flash",
        "autodiff",
        "key_masks",
        (
            "mask of keys beside a bias: the forward has none",
            "replace(self.problem, has_mask=False, has_key_mask=True)",
            "replace(self.problem, has_mask=False)",
        ),
        (
            "mask of keys beside a bias: what it hides reaches the backward",
            "key, value = _without_hidden(settings, operands, key, value)",
            "pass",
        ),
        (
            "mask of keys beside a bias: NaN of a query reaches gradients of what it hides",
            "return d_query, *_without_hidden(settings, operands, d_key, d_value), *others",
            "return d_query, d_key, d_value, *others",
        ),
    ),
    *_in(
        "pallas_kernels",
        "forward_consumer",
        "kernels",
        (
            "many tiles: logits of the next one are taken before they are there",
            "if_there(lambda: block.keys.await_full(k_slot))",
            "pass",
        ),
    ),
    *_in(
        "pallas_kernels",
        "row_masks",
        "kernels kernel_windows kernel_segments",
        (
            "lengths: one key too many",
            "last = in_each_row(jnp.int32(problem.key_length - 1))",
            "last = in_each_row(jnp.int32(problem.key_length))",
        ),
        (
            "window: one key too few",
            "first = row + problem.lowest",
            "first = row + problem.lowest + 1",
        ),
    ),
    *_in(
        "pallas_kernels",
        "segments",
        "kernel_segments",
        (
            "ids: two stretches without a mask taken for one",
            "jnp.where(in_one, end_unmasked, 0)",
            "end_unmasked",
        ),
        (
            "ids: blocks that share no id are left out too soon",
            "some = (tile.least <= block.greatest)",
            "some = (tile.least < block.greatest)",
        ),
        (
            "ids: rising ids that begin anew",
            "are_sorted = (before <= columns).all(1)",
            "are_sorted = (before <= columns).any(1)",
        ),
    ),
    *_in(
        "pallas_kernels",
        "backward_products",
        "kernels",
        (
            "backward: dS' of the consumer itself",
            "block.ds_stored.wait(2 * parity + (1 - self.number))\n        self.dq_acc",
            "block.ds_stored.wait(2 * parity + self.number)\n        self.dq_acc",
        ),
    ),
    *_in(
        "pallas_kernels",
        "backward_consumer",
        "kernels kernel_dropout kernel_segments",
        ("dropout: dV is not divided by the share", "dv *= 1.0 / problem.kept_share", "dv *= 1.0"),
        (
            "backward: dK without its scale",
            "wait_n=0) * problem.gradient_factor",
            "wait_n=0) * problem.d_logit_unit",
        ),
    ),
    *_in(
        "pallas_kernels",
        "backward_consumer",
        "kernel_intervals",
        (
            "backward: keys of the other consumer",
            "row = fresh_rows() + KEYS * self.number",
            "row = fresh_rows()",
        ),
    ),
    *_in(
        "pallas_kernels",
        "backward",
        "kernel_shares kernels kernel_dropout kernel_segments",
        (
            "backward: dQ of the step after",
            "self.send_dq(index, number, t - 1, first)",
            "self.send_dq(index, number, t, first)",
        ),
        (
            "backward: each part loads from the first step of its tile on",
            "return self.block.walk.seeing(self.place_of(index, number), 3)",
            "return jnp.int32(0)",
        ),
        (
            "backward: queries of the group's first head",
            "head = kv_head * problem.group + member",
            "head = kv_head * problem.group",
        ),
        (
            "backward: dQ of the group's first head",
            "head_of_all = kv_head_of_all * self.plan.problem.group + member",
            "head_of_all = kv_head_of_all * self.plan.problem.group",
        ),
    ),
    *_in(
        "pallas_kernels",
        "backward",
        "whole_dq",
        (
            "whole dQ: of the group's first head",
            "head = member + kv_head * problem.group",
            "head = kv_head * problem.group",
        ),
        (
            "whole dQ: rows of the other consumer",
            "rows = pl.ds(query_block * self.plan.config.block_q + row * DQ_TILE, DQ_TILE)",
            "rows = pl.ds(query_block * self.plan.config.block_q + (1 - row) * DQ_TILE, DQ_TILE)",
        ),
    ),
    *_in(
        "pallas_kernels",
        "backward_consumer",
        "whole_dq",
        (
            "whole dQ: without its scale",
            "dq = (dq * problem.gradient_factor).astype(problem.dtype)",
            "dq = dq.astype(problem.dtype)",
        ),
    ),
    *_in(
        "pallas_kernels",
        "cast_dq",
        "whole_dq",
        (
            "dQ apart: a tile of rows that none of the keys has made",
            "(row_tile >= rows[0])",
            "(row_tile >= rows[0] - 1)",
        ),
    ),
    *_in(
        "pallas_kernels",
        "backward_plan",
        "whole_dq",
        (
            "whole dQ: a last block of queries is left out",
            "return self._seeing_blocks == [[0, self._whole_tiles.query_blocks]]",
            "return len(self._seeing_blocks) == 1",
        ),
    ),
    *_in(
        "pallas_kernels",
        "forward_tiles",
        "forward_shares",
        (
            "shares: an edge of keys belongs to two",
            "near - first, end - first",
            "near - first, end - np.maximum(first - 1, 0)",
        ),
        (
            "shares: results in the place of the first",
            "return row + lax.div(tile, jnp.int32(self.whole_per_head)) * self.rows",
            "return row",
        ),
    ),
    *_in(
        "pallas_kernels",
        "forward_shares",
        "forward_shares",
        (
            "shares: one without a block counts",
            "reference = jnp.where(counts, references[:, :, 0], NOTHING_SEEN)",
            "reference, counts = references[:, :, 0], True",
        ),
        (
            "shares: the backward does not know their sums",
            "jnp.stack([highest, end.log_sum], axis=2)",
            "jnp.stack([highest, log_sum[:, :, 0]], axis=2)",
        ),
        (
            "shares: their sums do not count",
            "weights = jnp.exp2(reference - highest[:, :, None] + log_sum)",
            "weights = jnp.exp2(reference - highest[:, :, None])",
        ),
    ),
    *_in(
        "pallas_kernels",
        "key_tiles",
        "kernels kernel_windows kernel_intervals",
        (
            "backward: the first query block of a tile, one too far",
            "first = (first_key - p.highest) // self.block_q",
            "first = -(-(first_key - p.highest) // self.block_q)",
        ),
        (
            "backward: the last query block of a tile, one too few",
            "end = (last_key - p.lowest) // self.block_q + 1",
            "end = -(-(last_key - p.lowest) // self.block_q)",
        ),
        (
            "intervals: the last query is not masked",
            "to_end = reach.common_end >= self.problem.query_length",
            "to_end = reach.common_end >= self.problem.query_length - 1",
        ),
        (
            "backward: a part of a tile without its last step",
            "end_step = np.minimum(first_step + most, steps[tile])",
            "end_step = np.minimum(first_step + most, steps[tile] - 1)",
        ),
    ),
    *_in(
        "pallas_kernels",
        "key_tiles_order",
        "kernel_shares",
        (
            "backward: last tiles are cut in all heads",
            "stays = (kv_head < first_head) | (tile <",
            "stays = (kv_head < 0) | (tile <",
        ),
        (
            "backward: parts of tiles zero dQ of the section after theirs",
            "last = min(last, (heads - tiles.shares.last.kv_heads) // section * section)",
            "pass",
        ),
    ),
    *_in(
        "pallas_kernels",
        "key_tiles",
        "kernel_shares",
        (
            "backward: shares of the last tiles stand behind others",
            "return 0, tile - self.whole_per_head, kv_head_of_all - first_head",
            "return 0, tile - self.whole_per_head, kv_head_of_all",
        ),
    ),
    *_in(
        "pallas_kernels",
        "backward_consumer",
        "kernel_shares",
        (
            "backward: the first part of the last tiles goes nowhere",
            "is_share = block.walk.locate(index)[0] >= plan",
            "is_share = block.walk.locate(index)[0] > plan",
        ),
    ),
    *_in(
        "pallas_kernels",
        "key_tiles_blocks",
        "kernel_shares kernel_windows kernel_elements kernel_intervals",
        (
            "backward: a consumer's keys taken for beyond the end in any tile",
            "is_last = walk.tile_of(place) == tiles.whole_per_head - 1\n            return",
            "is_last = walk.tile_of(place) >= 0\n            return",
        ),
        (
            "lengths: no step is blank for a consumer without keys",
            "first_block = jnp.where(are_there, first_block, walk.end_block(place))",
            "first_block = jnp.where(are_there, first_block, first_block)",
        ),
    ),
    *_in(
        "pallas_kernels",
        "key_tiles_walk",
        "kernel_shares kernel_windows kernel_elements kernel_intervals",
        (
            "backward: keys of another head for a share of a group",
            "lax.div(kv_head, jnp.int32(self.tiles.shares.heads))",
            "lax.rem(kv_head, jnp.int32(self.tiles.shares.heads))",
        ),
        (
            "backward: keys of another tile for a part of one",
            "return self.seeing(place, 2) if self.tiles.has_parts else place[0]",
            "return place[0]",
        ),
        (
            "backward: each part begins with the first step of its tile",
            "t + self.seeing(place, 3) if self.tiles.has_parts else t",
            "t",
        ),
        (
            "lengths: keys of the tile's first consumer for both",
            "return length - (self.tile_of(place) * self.tiles.block_kv + own_first_key)",
            "return length - self.tile_of(place) * self.tiles.block_kv",
        ),
        (
            "lengths: keys behind the last one are not zeroed",
            "return jnp.int32(0), self.keys_from(place, 0)",
            "return jnp.int32(0), jnp.int32(self.tiles.block_kv)",
        ),
        (
            "width 256: the first step of a part is taken for the tile's",
            "return self.step_of(place, 0)[0]",
            "return self.end_block(place) - 1",
        ),
        (
            "dense mask: keys of the first tile are zeroed in any",
            "words = seen.at[entry, head, pl.ds(tile * count, count)]",
            "words = seen.at[entry, head, pl.ds(0, count)]",
        ),
    ),
    *_in(
        "pallas_kernels",
        "key_tiles_loops",
        "kernel_shares",
        (
            "backward: a part goes on to the end of its last head",
            "jnp.minimum(end_of_loop, end) if walk.tiles.has_parts else end_of_loop",
            "end_of_loop",
        ),
    ),
    *_in(
        "pallas_kernels",
        "backward_query_product",
        "kernel_shares",
        (
            "width 256: dQ of keys of another head for a share of a group",
            "jnp.int32(group * block.tiles.shares.heads)",
            "jnp.int32(group)",
        ),
    ),
    *_in(
        "pallas_kernels",
        "row_statistics",
        "kernels row_statistics",
        (
            "delta: the gradient of the LSE with the wrong sign",
            "jnp.where(counts, d_lse - products, 0.0)",
            "jnp.where(counts, -d_lse - products, 0.0)",
        ),
        (
            "delta: rows beyond the last query count",
            "counts = (row <= last) & (lse != -jnp.inf)",
            "counts = lse != -jnp.inf",
        ),
    ),
    *_in(
        "pallas_kernels",
        "cast_dq",
        "kernels",
        (
            "dQ without its scale",
            "(tile * problem.gradient_factor)",
            "(tile * problem.d_logit_unit)",
        ),
    ),
    *_in(
        "pallas_kernels",
        "backward_key_consumer",
        "kernels kernel_dropout",
        (
            "width 256: dK of a step too late",
            "*block.late.at(block.late_slot_of(j - 1)))\n\n    def hand_over_dv",
            "*block.late.at(block.late_slot_of(j)))\n\n    def hand_over_dv",
        ),
        (
            "width 256: dS' of another head",
            "return own_head * self.plan.tiles.steps_per_head + walk.first_step(place)",
            "return walk.first_step(place)",
        ),
    ),
    *_in(
        "pallas_kernels",
        "backward_query_masks",
        "kernels kernel_windows",
        (
            "deterministic dQ: the last key block",
            "end = (seen_by_last + (block_kv - 1)) // block_kv",
            "end = seen_by_last // block_kv",
        ),
        (
            "deterministic dQ: a mask too late",
            "end_unmasked = xp.minimum(seen_by_first // block_kv, end)",
            "end_unmasked = xp.minimum(-(-seen_by_first // block_kv), end)",
        ),
    ),
    *_in(
        "pallas_kernels",
        "backward_query_consumer",
        "kernels kernel_windows",
        (
            "deterministic dQ: delta of no row",
            "minus_deltas = spread(self.minus_delta, weights.shape)",
            "minus_deltas = jnp.zeros(weights.shape)",
        ),
    ),
    *_in(
        "pallas_kernels",
        "backward_query_product",
        "kernels",
        (
            "dQ as one product: of the query block before",
            "place = last_place - (tile * block.consumers + consumer)",
            "place = last_place - (tile * block.consumers + consumer) - 1",
        ),
    ),
    *_in(
        "pallas_kernels",
        "bias_gradient_pieces",
        "kernel_elements",
        (
            "bias gradient: not summed over the batch",
            "gradient = gradient.reshape(self.shape[0], -1, *gradient.shape[1:]).sum(1)",
            "gradient = gradient.reshape(self.shape[0], -1, *gradient.shape[1:])[:, 0]",
        ),
    ),
    *_in(
        "pallas_kernels",
        "bias_gradient_pieces",
        "score_reads",
        (
            "diagonals: warps of a piece the other way round",
            "before = [rows * (warps - 1 - warp) for warp in range(warps)]",
            "before = [rows * warp for warp in range(warps)]",
        ),
        (
            "diagonals: another key block",
            "return number + (row_block - (self.row_blocks - 1)) * self.key_blocks_a_row_block",
            "return number + (row_block - self.row_blocks) * self.key_blocks_a_row_block",
        ),
    ),
    *_in(
        "pallas_kernels",
        "score_functions",
        "kernel_scores",
        (
            "scores: no derivative",
            "jnp.where(weights == 0.0, 0.0, weights * slope)",
            "jnp.where(weights == 0.0, 0.0, weights)",
        ),
        (
            "scores: positions in another unit",
            "_finite(factor * LOG2E)",
            "_finite(factor)",
        ),
    ),
    *_in(
        "pallas_kernels",
        "on_rows",
        "kernel_scores",
        (
            "scores: the last factor of positions alone",
            "factor=factor.x if one.factor is None else one.factor * factor.x",
            "factor=factor.x",
        ),
    ),
    *_in(
        "pallas_kernels",
        "mask_functions",
        "kernel_elements",
        (
            "dense mask: keys are seen that the first head of a group sees",
            "(seen[:, :, n] for n in range(heads[1]))",
            "(seen[:, :, n] for n in range(1))",
        ),
    ),
    *_in(
        "pallas_kernels",
        "mask_bits",
        "kernel_elements",
        (
            "dense mask: a block is full where half of it is",
            "first[..., ALL] & second[..., ALL]",
            "first[..., ALL] | second[..., ALL]",
        ),
        (
            "dense mask: keys count that all blocks of queries see",
            "lax.bitwise_or, (1,)",
            "lax.bitwise_and, (1,)",
        ),
    ),
    *_in(
        "jax_flash",
        "folding",
        "folding",
        ("folding: a key too many", "k < key_lengths[b]", "k <= key_lengths[b]"),
        ("folding: a key too few", "begin[b, q] <= k", "begin[b, q] < k"),
        (
            "folding: what either of function and mask shows",
            "return shown if mask is None else shown & mask",
            "return shown if mask is None else shown | mask",
        ),
    ),
    *_in(
        "pallas_kernels",
        "bias_gradient_consumer",
        "kernel_dropout",
        ("bias gradient: dropout's unit", "total *= self.problem.d_logit_unit", "total *= 1.0"),
    ),
    *_in(
        "pallas_kernels",
        "forward_fp8_consumer",
        "forward_fp8",
        (
            "FP8: the value scale of the first block",
            "return inverse * block.value_scales[batch, block.kv_head_of(head), last_block]",
            "return inverse * block.value_scales[batch, block.kv_head_of(head), 0]",
        ),
        (
            "FP8: values of blocks are not brought to one scale",
            "return output * ratio, weights, state",
            "return output, weights, state",
        ),
        (
            "FP8: the key scale of another head",
            "key_scale = block.key_scales[batch, block.kv_head_of(head), key_block]\n        ratio",
            "key_scale = block.key_scales[batch, 0, key_block]\n        ratio",
        ),
    ),
    *_in(
        "pallas_kernels",
        "decode_block",
        "decode_kernel",
        (
            "decode: the last split has too few keys",
            "end_block - first_block + (splits - 1)",
            "end_block - first_block",
        ),
        (
            "decode: slots refilled one block off",
            "self.load(step + plan.stages, end, pages, cache)",
            "self.load(step + plan.stages + 1, end, pages, cache)",
        ),
        (
            "decode: a window one key short",
            "key >= spread(own - p.window - first, logits.shape)",
            "key > spread(own - p.window - first, logits.shape)",
        ),
        (
            "decode: the page of another copy",
            "table[self.batch, div_rem(key, page_size)[0]]",
            "table[0, div_rem(key, page_size)[0]]",
        ),
        (
            "decode: all tokens are at the first one's position",
            "jnp.minimum(lax.div(row, group), p.tokens - 1) + self.first_position",
            "jnp.minimum(lax.div(row, group), 0) + self.first_position",
        ),
        (
            "decode: values that no key has",
            "(first < self.first_key) | (first + BLOCK_KV > self.end_key)",
            "first < self.first_key",
        ),
    ),
    *_in(
        "pallas_kernels",
        "combine",
        "decode_kernel",
        (
            "decode: splits are weighed in another base",
            "weights = [jnp.exp2((x - top) * LOG2E) for x in logits]",
            "weights = [jnp.exp2(x - top) for x in logits]",
        ),
    ),
    *_in(
        "pallas_kernels",
        "dropout_words",
        "xla kernel_dropout",
        (
            "dropout: twice the rate",
            "both = (steps + (random & 0x7F)) >> 7",
            "both = (2 * steps + (random & 0x7F)) >> 7",
        ),
    ),
    *_in(
        "pallas_kernels/ptx",
        "masks",
        "ptx",
        (
            "twins: a column too few",
            "arith.CmpIPredicate.sge, lax.ge)",
            "arith.CmpIPredicate.sge, lax.gt)",
        ),
        (
            "twins: bits of a column too many",
            "1) <= last[:, None])\n    return _bits_masked",
            "1) <= last[:, None] + 1)\n    return _bits_masked",
        ),
    ),
    *_in(
        "pallas_kernels/ptx",
        "dropout",
        "ptx",
        (
            "twins: another key of four",
            "later_key = (jnp.arange(key_words.size) & 8) > 0",
            "later_key = (jnp.arange(key_words.size) & 4) > 0",
        ),
    ),
    *_in(
        "pallas_kernels/ptx",
        "marks",
        "ptx",
        ("twins: what is just far", "(distance >= least)", "(distance > least)"),
    ),
    *_in(
        "pallas_kernels/ptx",
        "votes",
        "ptx",
        ("twins: what is just beyond a limit", "together < limit", "together <= limit"),
    ),
    *_in(
        "pallas_kernels/ptx",
        "loads",
        "ptx",
        (
            "twins: rows beyond the last",
            "return ref[...][jnp.minimum(first + jnp.arange(64), last)]",
            "return ref[...][jnp.minimum(first + jnp.arange(64), last - 1)]",
        ),
        (
            "twins: what is copied is what is marked",
            "kept = jnp.where(jnp.isneginf(",
            "kept = jnp.where(~jnp.isneginf(",
        ),
    ),
    *_in(
        "pallas_kernels",
        "key_masks",
        "key_masks",
        (
            "key masks: no step has a mask",
            "jnp.where(self.cuts[batch] > at_ends, 1,",
            "jnp.where(False, 1,",
        ),
        ("key masks: the first block is whole", "1 - (first & 1)", "0 * first"),
        (
            "key masks: keys count if any does",
            "first & second == ALL_COUNT",
            "first | second == ALL_COUNT",
        ),
    ),
    *_in(
        "pallas_kernels",
        "key_tiles_walk",
        "key_masks",
        (
            "key masks: words in each other's place",
            "return words[batch, first], words[batch, first + 1]",
            "return words[batch, first + 1], words[batch, first]",
        ),
    ),
    *_in(
        "pallas_kernels",
        "forward_products",
        "key_masks",
        (
            "key masks: values that do not count are left",
            "functools.reduce(jnp.bitwise_and, words) != ALL_COUNT",
            "functools.reduce(jnp.bitwise_or, words) == 0",
        ),
    ),
    *_in(
        "pallas_kernels",
        "bias_gradient_pieces",
        "kernel_elements",
        (
            "shares of a bias's gradient: all from the first step on",
            "first = np.repeat(starts[:-1], seen.size)",
            "first = np.repeat(0 * starts[:-1], seen.size)",
        ),
    ),
    *_in(
        "pallas_kernels",
        "gradients",
        "kernel_elements",
        (
            "a bias's gradient is dS: of one batch entry that others share",
            "bias.shape == (p.batch, p.heads, p.query_length, p.key_length)",
            "bias.shape[1:] == (p.heads, p.query_length, p.key_length)",
        ),
    ),
    *_in(
        "pallas_kernels/ptx",
        "elements",
        "ptx",
        (
            "twins: the column after the last",
            "tile = jnp.where(column < column_count, tile, 0)",
            "tile = jnp.where(column <= column_count, tile, 0)",
        ),
    ),
    *_in(
        "pallas_kernels/ptx",
        "fragments",
        "ptx",
        (
            "twins: another order of fragments",
            "x.transpose(3, 1, 0, 2, 5, 4, 6)",
            "x.transpose(3, 1, 0, 2, 4, 5, 6)",
        ),
    ),
    *_in(
        "pallas_kernels/ptx",
        "float8",
        "ptx",
        ("twins: the largest float8", "jnp.clip(tile, -448, 448)", "jnp.clip(tile, -240, 240)"),
    ),
    *_in(
        "pallas_kernels/ptx",
        "float8_parts",
        "ptx",
        (
            "twins: a second part of what is not left over",
            "to_float8((rows - first.astype(jnp.float32)) * _SECOND_PART)",
            "to_float8(rows * _SECOND_PART)",
        ),
    ),
    *_in(
        "jax_flash",
        "masks",
        "masks xla",
        (
            "visible: a window one key short",
            "lo = rows + _shifted(self.query_offset, -left)",
            "lo = rows + _shifted(self.query_offset, 1 - left)",
        ),
        (
            "visible: the offset of no query",
            "hi = xp.minimum(hi, rows + _shifted(self.query_offset, 1))",
            "hi = xp.minimum(hi, rows + 1)",
        ),
    ),
    *_in(
        "jax_flash",
        "xla",
        "xla ring decode",
        (
            "parts are joined by their own LSE",
            "weight = jnp.exp(part_lse - jnp.where(lse == -jnp.inf, 0.0, lse))",
            "weight = jnp.exp(jnp.where(lse == -jnp.inf, 0.0, lse) - part_lse)",
        ),
        (
            "sinks take no weight on xla",
            "share = jnp.where(takes_all, 0.0, jnp.exp(own - total))",
            "share = jnp.where(takes_all, 0.0, 1.0)",
        ),
    ),
    *_in(
        "jax_flash",
        "ring",
        "ring sharding",
        ("ring: keys go the other way", "np.roll(place, -distance)", "np.roll(place, distance)"),
        (
            "ring: a hop too few",
            "for shift in range(self.devices):",
            "for shift in range(self.devices - 1):",
        ),
        (
            "ring: what travels as one arrives in another order",
            "zip(alike, jnp.split(arrived, list(ends)), strict=True)",
            "zip(alike[::-1], jnp.split(arrived, list(ends)), strict=True)",
        ),
        (
            "zigzag: what the later chunk sees",
            "jnp.where(here >= shift, 0, 1)",
            "jnp.where(here > shift, 0, 1)",
        ),
        (
            "ring: gradients stay where they were made",
            "*_unstacked(ring.sent(d_there, ring.devices - before)), None",
            "*_unstacked(d_there), None",
        ),
        (
            "all-gather: every device at position 0",
            "offset = lax.axis_index(axis_name) * query.shape[1]",
            "offset = 0 * lax.axis_index(axis_name) * query.shape[1]",
        ),
        (
            "ulysses: the sinks of the first heads",
            "sinks, lax.axis_index(axis_name) * (N // count), N // count",
            "sinks, 0 * lax.axis_index(axis_name) * (N // count), N // count",
        ),
    ),
    *_in(
        "jax_flash",
        "sharding",
        "mesh_axes sharding",
        (
            "sharding: sums over devices are left out",
            "return lax.psum(total, tuple(sorted(missing))).astype(x.dtype)",
            "return total.astype(x.dtype)",
        ),
    ),
    *_in(
        "jax_flash",
        "decode",
        "decode",
        (
            "cache: new tokens one row off",
            "position = jnp.maximum(lengths, 0)[:, None] - count + token",
            "position = jnp.maximum(lengths, 0)[:, None] - count + token + 1",
        ),
        ("cache: padding is written too", "exists &= token < count", "exists &= token <= count"),
        (
            "decode on xla: the last chunk counts twice",
            ">= wanted\n        part",
            ">= start\n        part",
        ),
    ),
    *_in(
        "jax_flash",
        "quantization",
        "quantization",
        (
            "FP8: no room for the largest",
            "scales = jnp.maximum(found / largest, _SMALLEST_SCALE)",
            "scales = jnp.maximum(found / (2 * largest), _SMALLEST_SCALE)",
        ),
    ),
]


# In PTX, which no CPU runs.
GPU_MISTAKES = [
    *_in(
        "pallas_kernels/ptx",
        "arithmetic",
        "ptx",
        (
            "maxima of columns: two in each other's place",
            '"st.shared.v2.f32 [$0], {$1, $2};"',
            '"st.shared.v2.f32 [$0], {$2, $1};"',
        ),
    ),
    *_in(
        "pallas_kernels/ptx",
        "barriers",
        "ptx",
        ("BlockVote: all for any", "barrier.cta.red.or.pred", "barrier.cta.red.and.pred"),
    ),
    *_in(
        "pallas_kernels/ptx",
        "compiler",
        "ptx",
        ("own_warpgroup: of 256 threads", "shr.u32 t, t, 7;", "shr.u32 t, t, 8;"),
    ),
    *_in(
        "pallas_kernels/ptx",
        "counters",
        "ptx",
        (
            "draw_ticket: a counter that wraps",
            "inc.u32 $0, [$1], 0x7fffffff;",
            "inc.u32 $0, [$1], 1;",
        ),
        ("add_to: nothing", "red.global.add.s32 [$0], 1;", "red.global.add.s32 [$0], 0;"),
    ),
    *_in(
        "pallas_kernels/ptx",
        "dropout",
        "ptx",
        (
            "kept_operand: words in each other's place",
            "prmt.b32 dropped, $3, $4, {selector};",
            "prmt.b32 dropped, $4, $3, {selector};",
        ),
        ("the hash: with a sign", "mul.wide.u32 $0, $1, $2;", "mul.wide.s32 $0, $1, $2;"),
        (
            "positive_operand: columns in each other's place",
            "cvt.rn.relu.{element}x2.f32 $0, $2, $1;",
            "cvt.rn.relu.{element}x2.f32 $0, $1, $2;",
        ),
    ),
    *_in(
        "pallas_kernels/ptx",
        "elements",
        "ptx",
        (
            "load_elements: a column too few",
            "setp.gt.s32 p, ${wide + 1}, {number};",
            "setp.gt.s32 p, ${wide + 1}, {number + 1};",
        ),
    ),
    *_in(
        "pallas_kernels/ptx",
        "float8",
        "ptx",
        (
            "half_weights: halves in each other's place",
            "prmt.b32 $0, first, second, 0x5410; }",
            "prmt.b32 $0, first, second, 0x1054; }",
        ),
        ("half_maxima: minima", "max.NaN.f16 low, low, high;", "min.NaN.f16 low, low, high;"),
        (
            "to_float8: columns in each other's place",
            '" cvt.rn.satfinite.e4m3x2.f16x2 low, $1;"',
            '" cvt.rn.satfinite.e4m3x2.f16x2 low, $2;"',
        ),
    ),
    *_in(
        "pallas_kernels/ptx",
        "float8_parts",
        "ptx",
        (
            "store_weights_float8: of another row",
            "shfl.sync.bfly.b32 got, give, 4, 31",
            "shfl.sync.bfly.b32 got, give, 8, 31",
        ),
    ),
    *_in(
        "pallas_kernels/ptx",
        "fragments",
        "ptx",
        (
            "store_fragment: rows in each other's place",
            '"st.shared.v4.f32 [$0+{offset}], {{$1, $2, $3, $4}};"',
            '"st.shared.v4.f32 [$0+{offset}], {{$1, $2, $4, $3}};"',
        ),
    ),
    *_in(
        "pallas_kernels/ptx",
        "loads",
        "ptx",
        (
            "load_rows: the first row for the last",
            "clamped(row, half, last)",
            "clamped(row, half, first)",
        ),
    ),
    *_in(
        "pallas_kernels/ptx",
        "mail",
        "ptx",
        (
            "send_tile: registers in each other's place",
            "* WARPGROUP_THREADS}], {{$1, $2, $3, $4}};",
            "* WARPGROUP_THREADS}], {{$2, $1, $3, $4}};",
        ),
    ),
    *_in(
        "pallas_kernels/ptx",
        "marks",
        "ptx",
        (
            "shared_columns: the next factor",
            "setp.neu.f32 p, r, 0f3f800000;",
            "setp.eq.f32 p, r, 0f3f800000;",
        ),
    ),
    *_in(
        "pallas_kernels/ptx",
        "masks",
        "ptx",
        (
            "keep_equal_columns: a column too few",
            "setp.ge.s32 p, $1, $2;",
            "setp.gt.s32 p, $1, $2;",
        ),
        ("bits_from: a bit too far", "shl.b32 $0, -1, $1;", "shl.b32 $0, -2, $1;"),
    ),
    *_in(
        "pallas_kernels/ptx",
        "mlir",
        "ptx",
        ("pairs of columns: the next ones", "[$2+{32 * group}];", "[$2+{32 * group + 8}];"),
    ),
]


def copied(folder: pathlib.Path) -> None:
    """The project in another folder, without environments, caches and results of a build."""
    others = shutil.ignore_patterns(".*", "__pycache__", "build", "*.egg-info")
    shutil.copytree(ROOT, folder, ignore=others, dirs_exist_ok=True)


def caught(mistake: Mistake, folder: pathlib.Path, limit: float) -> str | None:
    """The first test that fails in the copy with the mistake, None where none does."""
    path = folder / mistake.path
    right = path.read_text()
    path.write_text(mistake.applied())
    tests = [f"tests/test_{name}.py" for name in mistake.tests.split()]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-n",
        "auto",
        "--max-worker-restart=0",
        "--timeout=60",
        "-p",
        "no:cacheprovider",
        "-m",
        "gpu and not slow" if mistake in GPU_MISTAKES else "not slow",
        "--durations=0",
        "--durations-min=1000",
        *tests,
    ]
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        run = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=limit
        )
    except subprocess.TimeoutExpired:
        return "a test that hangs"
    finally:
        path.write_text(right)
    if run.returncode == 0:
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (tests/\S+)", run.stdout, re.MULTILINE)
    if failed:
        return failed[1]
    if "node down" not in run.stdout:
        raise RuntimeError(f"tests of {mistake.name} did not run:\n{run.stdout}{run.stderr}")
    return "a test that hangs"  # which ends a worker


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="of which a mistake's name has one; all without")
    parser.add_argument("--gpu", action="store_true", help="those that only a GPU can see")
    parser.add_argument("--list", action="store_true", help="print their names, and stop")
    parser.add_argument("--limit", type=float, default=1800, help="seconds of a mistake's tests")
    options = parser.parse_args(argv)
    words = options.words or [""]
    those = GPU_MISTAKES if options.gpu else MISTAKES
    mistakes = [x for x in those if any(word in x.name for word in words)]
    if not mistakes:
        parser.error(f"no mistake has one of {words} in its name; --list gives the names")
    if options.list:
        print(*(x.name for x in mistakes), sep="\n")
        return 0
    missed = []
    with tempfile.TemporaryDirectory() as folder:
        copied(pathlib.Path(folder))
        for number, mistake in enumerate(mistakes, 1):
            start = time.monotonic()
            by = caught(mistake, pathlib.Path(folder), options.limit)
            if by is None:
                missed.append(mistake.name)
            seconds = time.monotonic() - start
            found = by or "MISSED"
            print(f"{number}/{len(mistakes)} {seconds:4.0f} s  {mistake.name}: {found}", flush=True)
    share = 1 - len(missed) / max(1, len(mistakes))
    print(f"caught {share:.0%}, wanted {ENOUGH:.0%}", *missed, sep="\n  missed: ")
    return int(share < ENOUGH)


if __name__ == "__main__":
    raise SystemExit(main())
