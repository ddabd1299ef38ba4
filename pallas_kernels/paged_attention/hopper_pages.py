"""How a warpgroup brings tiles of K and V, or of latents, to those that multiply (attention on Hopper GPUs).

Pages come as they are, or as codes that it widens to bf16, which holds them exactly, in the buffer that the others
read. Scales multiply logits and weights.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels import mosaic
from pallas_kernels.mosaic import BOX, Chip, per_token, plgpu
from pallas_kernels.paged_attention.hopper_tiles import Held
from pallas_kernels.wire_format import decode_e4m3


class Room(NamedTuple):
    """A ring of tiles of K, of V, or of what is both, in shared memory, and who waits for what. The last three are of
    codes alone."""

    numbers: Any  # bf16 [stages, tile, D]
    arrived: Any  # a barrier a stage, for those that multiply
    done: Any  # for the one that brings
    scales: Any = None  # f32 [stages, tile]
    codes: Any = None  # [stages, tile, D]
    came: Any = None  # for the one that widens

    def scaled(self, array: Array, stage: Array, chip: type[Chip]) -> Array:
        """[rows, tokens] times the tokens' scales."""
        if self.scales is None:
            return array
        return array * per_token(chip.load(self.scales.at[stage], plgpu.Layout.WGMMA.reduce(0)), array.shape)

    def widen(self, stage: Array, chip: type[Chip], *, e4m3: bool) -> None:
        codes = chip.codes(self.codes.at[stage])
        numbers = decode_e4m3(codes.astype(jnp.int32) & 0xFF) if e4m3 else codes
        self.numbers.at[stage][...] = chip.lay(numbers.astype(jnp.bfloat16), plgpu.Layout.WGMMA)
        plgpu.commit_smem()


def scratch_of_rooms(stages: int, tile: int, page_size: int, size: int, *, readers: int, codes: bool) -> list[Any]:
    """What `rooms_of` makes K's and V's of."""
    copies = max(1, tile // page_size)
    came = plgpu.Barrier(num_arrivals=copies, num_barriers=stages)
    done = plgpu.Barrier(num_arrivals=readers, num_barriers=stages)
    if not codes:
        return [mosaic.swizzled(stages, tile, size), came, done] * 2
    arrived = plgpu.Barrier(num_arrivals=copies + 1, num_barriers=stages)  # scales, and what is widened
    scales = plgpu.SMEM((stages, tile), jnp.float32)
    return [
        mosaic.swizzled(stages, tile, size),
        arrived,
        done,
        scales,
        mosaic.swizzled_bytes(stages, tile, size),
        came,
    ] * 2


def rooms_of(refs: Sequence[Any]) -> tuple[Room, Room]:
    half = len(refs) // 2
    return Room(*refs[:half]), Room(*refs[half:])


class Pages(NamedTuple):
    """Where a sequence's K and V of one head lie, or its latents."""

    pool: Held
    table: Any
    sequence: Array
    head: Array
    visible: Array  # tokens that the block's last row sees
    page_size: int
    kv_heads: int
    parts: int = 2  # of a page

    def fetch(self, which: int, first: Array, count: int, room: Any, barrier: Any, *, scales: bool = False) -> None:
        """`count` tokens of K (0) or V (1), or their scales; of pages that nobody sees, those of the null page."""
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
    rooms: Sequence[Room],
    chip: type[Chip],
    *,
    e4m3: bool,
) -> None:
    """A tile's K and V after another's, each into the buffer that was free the longest. Codes are a ring of their own,
    fetched anew as soon as they are widened. tile_at: of a step."""
    stages, tile, _ = rooms[0].numbers.shape
    widened = rooms[0].codes is not None

    def fetch(step, which, room, arrived):
        pages.fetch(
            which, tile_at(step) * tile, tile, room.at[lax.rem(step, stages)], arrived.at[lax.rem(step, stages)]
        )

    def freed(step):
        """Waits until the tile that lay in this step's buffer was read."""
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
