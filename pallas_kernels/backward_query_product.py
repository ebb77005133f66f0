"""The gradient of the query as one product, dQ = dS K, of dS' that another kernel has left.

`backward_key.py` has dS' in registers anyway. It writes it to global memory, of so many heads at a
time as `BackwardKeyConfig.d_logits_bytes` hold, and dQ is one product of what is there, where
`backward_query.py` takes three, as it makes S and dP once more.

    producer   K0 dS0' | K1 dS1' | ...      TMA into a circular buffer, on through all tiles
    consumer   dQ += dS K                   dS' turned by wgmma; dQ leaves by TMA

A thread block walks a list of tiles of 64 query rows for each of two or three consumers, of one
head: three where tiles fill the SMs in fewer rounds so. dS' stands in tiles of 64 keys by 64
queries, with queries in the order of `ptx.stores.store_by_quads`, which rows of dQ leave when they
are stored. Tiles that `backward_key.py` has not visited are not there, so that a consumer takes
those that it has, by the same table.

Barriers. Full: an mbarrier a slot, completed by TMA. Free: a named barrier a slot, the consumers
arrive and the producer waits.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import hopper, scheduler
from pallas_kernels.columns import Columns
from pallas_kernels.config import FORWARD_SECTION_BYTES, SM_COUNT
from pallas_kernels.interpret import interpreting
from pallas_kernels.key_tiles import KeyTiles, Section
from pallas_kernels.ptx.arithmetic import div_rem
from pallas_kernels.ptx.barriers import HAND_ORDERED, NamedBarriers
from pallas_kernels.ptx.mlir import zero_tile
from pallas_kernels.ptx.operands import operand_form, store_operand

_TILE = 64  # keys and queries of a tile of dS'
_STAGES = 3
_REGISTERS = {2: (240, 24), 3: (160, 32)}  # by consumers
_WIDEST_OF_THREE = 192  # columns of dQ that 160 registers hold
_MUCH_EARLIER = 0.95  # than two, where three shall be taken
_TILE_OVERHEAD = 1.0  # what a tile costs beside its steps, in steps


def _free(consumers: int) -> NamedBarriers:
    return NamedBarriers(first=consumers + 2, count=_STAGES, arrivers=consumers)


def query_gradient(
    d_logits: Any,
    key: jax.Array,
    d_query: Any = None,
    *,
    tiles: KeyTiles,
    section: Section,
) -> jax.Array | None:
    """Gradient of the query, of the heads of a section.

    Args:
      d_logits: dS' as `backward_key.py` leaves it, or a ref of it.
      key: `[B, S, K, H]`.
      d_query: None, or a ref of the result, which the kernel writes to then.
      tiles: what `backward_key.py` has visited, of a problem that is not one by batch entry.
      section: whose dS' is there.

    Returns:
      `[B, T, N, H]` in the input dtype, of which other heads are arbitrary. Rows that see
      no key are 0.
    """
    # The dS' of parts of a tile stands as that of the tile.
    tiles = tiles.in_one_part
    consumers = _consumers(tiles, section.kv_heads)
    schedule, *_ = tables = _tables(tiles, section.kv_heads, consumers)
    more = () if d_query is None else (d_query,)
    settings = tiles, consumers, len(schedule), section.size, not more, interpreting()
    return _build(*settings)(*map(jnp.asarray, tables), d_logits, key, *more)


def _consumers(tiles: KeyTiles, kv_heads: range) -> int:
    """Of which tiles end early. A step of three takes 1.5 times as long as one of two."""
    if Columns.of_keys(tiles.problem).size > _WIDEST_OF_THREE:
        return 2
    ends = {}
    for consumers in (2, 3):
        _, costs = _order(tiles, kv_heads, consumers)
        ends[consumers] = consumers * scheduler.time_of_deal(costs, SM_COUNT)
    return 3 if ends[3] < _MUCH_EARLIER * ends[2] else 2


def _tables(tiles: KeyTiles, kv_heads: range, consumers: int):
    """What there is to know of thread blocks, of query tiles and of key tiles.

    Returns:
      The schedule, as `scheduler.deal` gives it; `[query tiles, 2 + 2 * consumers]`, first and end
      of the key tiles of each, and of each consumer, whose first is its end where it has none;
      `[2, key tiles]`, where dS' of query block 0 of the first head would stand, from where others
      stand backwards, and how many each head has.
    """
    bounds = _bounds(tiles, consumers)
    number, costs = _order(tiles, kv_heads, consumers)
    schedule = scheduler.deal(number, costs, min(len(number), SM_COUNT))
    first, end = tiles.seeing_blocks()
    places = np.stack([tiles.first_steps() + end - 1, end - first])
    return schedule, bounds.astype(np.int32), places.astype(np.int32)


def _bounds(tiles: KeyTiles, consumers: int) -> np.ndarray:
    """The second of the tables."""
    first, end = tiles.seeing_blocks()
    query_blocks = tiles.query_blocks
    query_tiles = -(-query_blocks // consumers)
    blocks = np.arange(query_tiles * consumers)
    own_first = np.searchsorted(end, blocks, side="right")
    own_end = np.searchsorted(first, blocks, side="right")
    own_end = np.where(blocks < query_blocks, np.maximum(own_end, own_first), own_first)
    own = np.stack([own_first, own_end], axis=1).reshape(query_tiles, consumers, 2)
    tile_end = own[..., 1].max(1)
    seen = own[..., 0] < own[..., 1]
    tile_first = np.where(seen, own[..., 0], tile_end[:, None]).min(1)
    of_tile = np.stack([tile_first, tile_end], axis=1)
    return np.concatenate([of_tile, own.reshape(query_tiles, -1)], axis=1)


@functools.lru_cache
def _order(tiles: KeyTiles, kv_heads: range, consumers: int) -> tuple[np.ndarray, np.ndarray]:
    """The order of starting: the number of each tile of these heads, and its cost."""
    problem = tiles.problem
    tile_first, tile_end, *_ = _bounds(tiles, consumers).T
    group, steps = problem.group, tile_end - tile_first
    heads = len(kv_heads) * group
    section = scheduler.heads_per_section(
        FORWARD_SECTION_BYTES,
        bytes_per_kv_head=2 * problem.key_length * problem.width,
        tiles_per_kv_head=len(steps) * group,
        slots=SM_COUNT,
        kv_heads=len(kv_heads),
        group=group,
        cost=steps,
    )
    tile, head = scheduler.tile_order(steps, heads, section)
    number = (head + kv_heads.start * group) * len(steps) + tile
    return number, steps[tile] + _TILE_OVERHEAD


@functools.lru_cache
def _build(
    tiles: KeyTiles,
    consumers: int,
    thread_blocks: int,
    stored_heads: int,
    with_result: bool,
    interpret: bool,
):
    """The kernel: its result, or if not with_result in a ref."""
    problem = tiles.problem
    columns, dtype = Columns.of_keys(problem), problem.dtype
    scratch: dict[str, Any] = dict(
        k_smem=columns.smem(_STAGES, _TILE, dtype=dtype),
        ds_smem=plgpu.SMEM(
            (_STAGES, consumers, _TILE, _TILE),
            dtype,
            transforms=operand_form(columns.box_width),  # as wgmma wants both operands
        ),
        dq_smem=columns.smem(consumers, _TILE, dtype=dtype),
        full=plgpu.Barrier(num_arrivals=columns.tiles + consumers, num_barriers=_STAGES),
    )
    if interpret:
        scratch["twins"] = _free(consumers).scratch()

    def attention_backward_query_product(*refs, **scratch):
        block = _ThreadBlock(tiles, consumers, stored_heads, refs, **scratch)
        roles = functools.partial(_consume, block), functools.partial(_produce, block)
        hopper.warp_specialised(block.warpgroup, consumers, _REGISTERS[consumers], *roles)

    body, out_type = attention_backward_query_product, problem.query() if with_result else ()
    kernel = hopper.kernel(body, out_type, thread_blocks, consumers, scratch, HAND_ORDERED)
    return jax.jit(kernel)  # lowered once for all sections


class _ThreadBlock:
    """What producer and consumers share.

    Attributes:
      tiles, consumers, stored_heads: as for `_build`; problem: of the tiles.
      columns: of K and dQ.
      bounds, places: refs of what `_tables` gives.
      ds, k, dq: refs of operands and result, in global memory.
      keys: ring that TMA fills, with ds_smem beside its slots; dq_smem: what leaves.
      warpgroup: index of this one; the consumers come first.
    """

    def __init__(
        self, tiles: KeyTiles, consumers: int, stored_heads: int, refs,
        *, k_smem, ds_smem, dq_smem, full, twins=None,
    ):  # fmt: skip
        self.problem, self.tiles, self.stored_heads = tiles.problem, tiles, stored_heads
        self.columns, self.consumers = Columns.of_keys(tiles.problem), consumers
        self.ds_smem, self.dq_smem = ds_smem, dq_smem
        load = (self.columns.load,)
        self.keys = hopper.Ring.of(
            _free(consumers), slots=(k_smem,), full=full, copies=load, twins=twins
        )
        self._schedule, self.bounds, self.places, self.ds, self.k, self.dq = refs
        self.warpgroup, self._number = lax.axis_index("warpgroup"), lax.axis_index("block")

    def locate(self, index):
        """Query tile and head, of every batch entry, of a tile of the list."""
        query_tiles = -(-self.tiles.query_blocks // self.consumers)
        head_of_all, tile = div_rem(self._schedule[self._number, 1 + index], query_tiles)
        return tile, head_of_all

    def over_tiles(self, whole_tile: Callable) -> None:
        """Runs `whole_tile(index, j)` for each; of steps done before, returns those by then."""
        zero = jnp.int32(0)
        lax.fori_loop(zero, self._schedule[self._number, 0], whole_tile, zero)


def _consume(block: _ThreadBlock) -> None:

    def compute(dq_acc):
        block.over_tiles(functools.partial(_consume_tile, block, dq_acc))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    pl.run_scoped(compute, plgpu.ACC((_TILE, block.columns.size), jnp.float32))


def _consume_tile(block: _ThreadBlock, dq_acc, index, j):
    """Adds up what keys give to 64 rows of dQ, and sends it."""
    columns, slot_of, bounds = block.columns, block.keys.slot, block.bounds

    def skip(j):
        block.keys.await_full(slot_of(j))
        block.keys.give_back(slot_of(j))

    def step(j, *, first):
        slot = slot_of(j)
        block.keys.await_full(slot)
        ds = block.ds_smem.at[slot, block.warpgroup].transpose((1, 0))
        columns.expand(dq_acc, ds, *block.keys.at(slot))
        plgpu.wgmma_wait(columns.products)
        pl.when(j > first)(lambda: block.keys.give_back(slot_of(j - 1)))

    tile, head_of_all = block.locate(index)
    first, end = bounds[tile, 0], bounds[tile, 1]
    own_first = jnp.clip(bounds[tile, 2 + 2 * block.warpgroup], first, end)
    own_end = jnp.clip(bounds[tile, 3 + 2 * block.warpgroup], own_first, end)
    begin, end = j + (own_first - first), j + (end - first)
    own_end = begin + (own_end - own_first)
    pl.loop(j, begin)(skip)
    pl.loop(begin, own_end)(functools.partial(step, first=begin))
    dq = plgpu.wgmma_accumulator_load(dq_acc, wait_n=0)
    pl.when(own_end > begin)(lambda: block.keys.give_back(slot_of(own_end - 1)))
    pl.loop(own_end, end)(skip)

    # The last tile of this consumer has left shared memory.
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    dq = (dq * block.problem.gradient_factor).astype(block.problem.dtype)
    own_smem = block.dq_smem.at[block.warpgroup]
    for n, tile_columns in enumerate(columns.tile_slices):
        part = dq[:, tile_columns]
        store_operand(own_smem.at[n], part, columns.box_width, by_quads=True)
    dq_acc[...] = zero_tile(_TILE, columns.size)
    plgpu.commit_smem()
    batch, head = div_rem(head_of_all, block.problem.heads)
    rows = pl.ds((tile * block.consumers + block.warpgroup) * _TILE, _TILE)
    columns.store(own_smem, block.dq.at[batch, rows, head])
    return end


def _produce(block: _ThreadBlock) -> None:
    block.over_tiles(functools.partial(_load_tile, block))


def _load_tile(block: _ThreadBlock, index, j):
    """K and dS' of the steps of a tile, each as its slot gets free."""
    problem, steps_per_head = block.problem, block.tiles.steps_per_head
    group = problem.group
    tile, head_of_all = block.locate(index)
    batch, head = div_rem(head_of_all, problem.heads)
    kv_head = lax.div(head, jnp.int32(group * block.tiles.shares.heads))
    kv_head_of_all = lax.div(head_of_all, jnp.int32(group))
    own_kv_head = lax.rem(kv_head_of_all, jnp.int32(block.stored_heads))
    member = lax.rem(head, jnp.int32(group))
    first, end = block.bounds[tile, 0], block.bounds[tile, 1]

    def load(j):
        slot, key_tile = block.keys.slot(j), first + (j - begin)
        block.keys.await_free(j, slot)
        keys, full = pl.ds(key_tile * _TILE, _TILE), block.keys.full.at[slot]
        block.keys.load(slot, block.k.at[batch, keys, kv_head])
        last_place = own_kv_head * steps_per_head + block.places[0, key_tile]
        if group > 1:
            last_place += member * block.places[1, key_tile]
        for consumer in range(block.consumers):
            # Of blocks that are not there something is loaded, and not used.
            place = last_place - (tile * block.consumers + consumer)
            place = jnp.clip(place, 0, block.stored_heads * steps_per_head - 1)
            plgpu.copy_gmem_to_smem(block.ds.at[place], block.ds_smem.at[slot, consumer], full)

    begin = j
    pl.loop(j, j + (end - first))(load)
    return j + (end - first)
