"""Mosaic GPU attention on Hopper: one warpgroup loads tiles of K and V for the warpgroups that multiply.

Pages hold floats, or codes that the loading warpgroup widens to bf16, which represents them exactly, in the buffer that
the others read. Scales multiply logits and weights, so products multiply only numbers that are exact in bf16.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels import mosaic
from pallas_kernels.mosaic import BOX, ROWS, Chip, per_row, per_token, places, plgpu
from pallas_kernels.quantized import QuantizedPages
from pallas_kernels.triton_attention import LOG2_E, NEVER, AttentionParams
from pallas_kernels.wire_format import bits_of, decode_e4m3

HALVES = 2  # halves of V, one per multiplying warpgroup
REGISTERS, FEW_REGISTERS = 232, 40  # per thread: of multiplying and of loading warpgroups
STAGES = 2  # tiles in flight


class PoolTensors(NamedTuple):
    """The HBM references of a pool."""

    numbers: Any  # [P * Hkv * 2 * page_size, D], codes as integers with a sign
    scales: Any  # f32 [P, Hkv, 2 * page_size], None for float pages

    @staticmethod
    def of(kv_pages: Array | QuantizedPages) -> "PoolTensors":
        if not isinstance(kv_pages, QuantizedPages):
            return PoolTensors(kv_pages.reshape(-1, kv_pages.shape[-1]), None)
        codes = lax.bitcast_convert_type(bits_of(kv_pages.values), jnp.int8)
        return PoolTensors(codes.reshape(-1, codes.shape[-1]), kv_pages.scales)

    @property
    def refs(self) -> list[Any]:
        return [each for each in self if each is not None]


class TileRing(NamedTuple):
    """A ring of tiles of K, of V, or of latents in shared memory, with its barriers. The last three fields are for
    codes only."""

    numbers: Any  # bf16 [stages, tile, D]
    arrived: Any  # one barrier per stage, awaited by multiplying warpgroups
    done: Any  # awaited by the loading warpgroup
    scales: Any = None  # f32 [stages, tile]
    codes: Any = None  # [stages, tile, D]
    came: Any = None  # awaited by the widening warpgroup

    def scaled(self, array: Array, stage: Array, chip: type[Chip]) -> Array:
        """Returns [rows, tokens] times the tokens' scales."""
        if self.scales is None:
            return array
        return array * per_token(chip.load(self.scales.at[stage], plgpu.Layout.WGMMA.reduce(0)), array.shape)

    def widen(self, stage: Array, chip: type[Chip], *, e4m3: bool) -> None:
        codes = chip.codes(self.codes.at[stage])
        numbers = decode_e4m3(codes.astype(jnp.int32) & 0xFF) if e4m3 else codes
        self.numbers.at[stage][...] = chip.lay(numbers.astype(jnp.bfloat16), plgpu.Layout.WGMMA)
        plgpu.commit_smem()


def scratch_of_rooms(stages: int, tile: int, page_size: int, size: int, *, readers: int, codes: bool) -> list[Any]:
    """Returns the scratch shapes from which `rooms_of` makes the rings of K and V."""
    copies = max(1, tile // page_size)
    came = plgpu.Barrier(num_arrivals=copies, num_barriers=stages)
    done = plgpu.Barrier(num_arrivals=readers, num_barriers=stages)
    if not codes:
        return [mosaic.swizzled(stages, tile, size), came, done] * 2
    arrived = plgpu.Barrier(num_arrivals=copies + 1, num_barriers=stages)  # copies of scales, and the widened tile
    scales = plgpu.SMEM((stages, tile), jnp.float32)
    return [
        mosaic.swizzled(stages, tile, size),
        arrived,
        done,
        scales,
        mosaic.swizzled_bytes(stages, tile, size),
        came,
    ] * 2


def rooms_of(refs: Sequence[Any]) -> tuple[TileRing, TileRing]:
    half = len(refs) // 2
    return TileRing(*refs[:half]), TileRing(*refs[half:])


class Pages(NamedTuple):
    """The pages of one sequence and one head: K and V, or latents."""

    pool: PoolTensors
    table: Any
    sequence: Array
    head: Array
    visible: Array  # tokens that the block's last row sees
    page_size: int
    kv_heads: int
    parts: int = 2  # parts of a page

    def fetch(self, which: int, first: Array, count: int, room: Any, barrier: Any, *, scales: bool = False) -> None:
        """Starts the copy of `count` tokens of K (0) or V (1), or of their scales; unseen pages are read as the null
        page."""
        size = min(self.page_size, count)
        for at in range(0, count, self.page_size):
            token = first + at
            column = lax.div(jnp.minimum(token, self.visible - 1), self.page_size)
            page = jnp.where(token < self.visible, self.table[self.sequence, column], 0)
            offset = which * self.page_size + lax.rem(token, self.page_size)
            if scales:
                held = self.pool.scales.at[page, self.head, pl.ds(pl.multiple_of(offset, BOX), size)]
            else:
                row = (page * self.kv_heads + self.head) * self.parts * self.page_size + offset
                held = self.pool.numbers.at[pl.ds(pl.multiple_of(row, BOX), size)]
            plgpu.copy_gmem_to_smem(held, room.at[pl.ds(at, size)], barrier)


def bring(
    pages: Pages,
    steps: Array,
    tile_at: Callable[[Array], Array],
    rooms: Sequence[TileRing],
    chip: type[Chip],
    *,
    e4m3: bool,
) -> None:
    """Loads the tiles of K and V in order, each into the buffer that was free the longest. Codes use a ring of their
    own, refilled as soon as they are widened. tile_at: maps a step to its tile."""
    stages, tile, _ = rooms[0].numbers.shape
    widened = rooms[0].codes is not None

    def fetch(step, which, room, arrived):
        pages.fetch(
            which, tile_at(step) * tile, tile, room.at[lax.rem(step, stages)], arrived.at[lax.rem(step, stages)]
        )

    def freed(step):
        """Waits until the tile that was in this step's buffer has been read."""
        for room in rooms:
            plgpu.barrier_wait(room.done.at[lax.rem(step, stages)])

    for ahead in range(stages) if widened else ():
        for which, room in enumerate(rooms):
            pl.when(ahead < steps)(partial(fetch, jnp.int32(ahead), which, room.codes, room.came))

    @pl.loop(0, steps)
    def _(step):
        buffer = lax.rem(step, stages)
        for which, room in enumerate(rooms):
            pl.when(step >= stages)(partial(plgpu.barrier_wait, room.done.at[buffer]))
            if not widened:
                fetch(step, which, room.numbers, room.arrived)
                continue
            at = tile_at(step) * tile
            pages.fetch(which, at, tile, room.scales.at[buffer], room.arrived.at[buffer], scales=True)
            plgpu.barrier_wait(room.came.at[buffer])
            room.widen(buffer, chip, e4m3=e4m3)
            plgpu.barrier_arrive(room.arrived.at[buffer])
            pl.when(step + stages < steps)(partial(fetch, step + stages, which, room.codes, room.came))

    pl.loop(jnp.maximum(steps - stages, 0), steps)(freed)


def mix_half(queries, room: TileRing, rows, mine, rule: AttentionParams, chip: type[Chip]):
    """Returns the greatest logit and the total of the rows after all tiles, and this warpgroup's half of their
    mixture."""
    (walk, told), (warpgroup, half) = rows, mine
    stages, tile, _ = room.numbers.shape

    def step(at, carry):
        top, total, mixed = carry
        (index, run), buffer = walk.at(at), lax.rem(at, stages)
        plgpu.barrier_wait(room.arrived.at[buffer])
        logits = chip.logits(queries, room.numbers.at[buffer])
        if rule.soft_cap is None:
            logits = logits * (rule.scale * LOG2_E)
        else:
            logits = jnp.tanh(logits * (rule.scale / rule.soft_cap)) * (rule.soft_cap * LOG2_E)
        token = places(chip, logits.shape, 1) + index * tile
        logits = jnp.where(walk.seen(token, run, told, rule.window, chip), logits, NEVER)
        higher = jnp.maximum(top, logits.max(axis=1))
        share = jnp.exp2(top - higher)
        weights = jnp.exp2(logits - per_row(higher, logits.shape))
        total = total * share + weights.sum(axis=1)
        values = room.numbers.at[buffer, :, pl.ds(pl.multiple_of(warpgroup * half, half), half)]
        mixed = chip.mixture(mixed * per_row(share, mixed.shape), weights.astype(jnp.bfloat16), values)
        plgpu.barrier_arrive(room.done.at[buffer])
        return higher, total, mixed

    reduced = plgpu.Layout.WGMMA.reduce(1)
    top = chip.lay(jnp.full((ROWS,), NEVER, jnp.float32), reduced)
    total = chip.lay(jnp.zeros((ROWS,), jnp.float32), reduced)
    mixed = chip.lay(jnp.zeros((ROWS, half), jnp.float32), plgpu.Layout.WGMMA)
    return lax.fori_loop(0, walk.steps, step, (top, total, mixed))
