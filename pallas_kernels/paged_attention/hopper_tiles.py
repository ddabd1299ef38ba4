"""How tiles of K and V come to shared memory on Hopper GPUs, and what a wgmma reads of them: pages as they are, and
codes with scales.

Codes of 8 bits are widened to bf16, which holds them exactly, in a second room; K's scales multiply logits, V's the
weights, so no number is multiplied that a product would not have anyway.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels import mosaic
from pallas_kernels.mosaic import BOX, Chip, per_token, plgpu
from pallas_kernels.quantized import QuantizedPages
from pallas_kernels.wire_format import bits_of, decode_e4m3


class Held(NamedTuple):
    """Where a pool lies."""

    numbers: Any  # [P * Hkv * 2 * page_size, D], codes as integers with a sign
    scales: Any  # f32 [P, Hkv, 2 * page_size], None where pages are as they are

    @staticmethod
    def of(kv_pages: Array | QuantizedPages) -> "Held":
        if not isinstance(kv_pages, QuantizedPages):
            return Held(kv_pages.reshape(-1, kv_pages.shape[-1]), None)
        codes = lax.bitcast_convert_type(bits_of(kv_pages.values), jnp.int8)
        return Held(codes.reshape(-1, codes.shape[-1]), kv_pages.scales)

    @property
    def refs(self) -> list[Any]:
        return [each for each in self if each is not None]


class Rooms(NamedTuple):
    """A ring of tiles in shared memory. The last three are of codes alone."""

    k: Any  # [stages, tile, D]
    v: Any
    arrived: Any  # a barrier a stage
    scales: Any = None  # f32 [stages, 2, tile]
    wide_k: Any = None  # bf16 [tile, D], of the tile at hand
    wide_v: Any = None

    @staticmethod
    def scratch(stages: int, tile: int, page_size: int, size: int, *, codes: bool) -> list[Any]:
        pages = max(1, tile // page_size)
        arrived = plgpu.Barrier(num_arrivals=(4 if codes else 2) * pages, num_barriers=stages)
        if not codes:
            tiles = mosaic.swizzled(stages, tile, size)
            return [tiles, tiles, arrived]
        tiles, wide = mosaic.swizzled_bytes(stages, tile, size), mosaic.swizzled(tile, size)
        return [tiles, tiles, arrived, plgpu.SMEM((stages, 2, tile), jnp.float32), wide, wide]

    def fetch(self, pool: Held, page: Array, head: Array, offset: Array, seat: Any, page_size: int) -> None:
        """Starts the tokens from `offset` of a page on their way: seat is (stage, first token in the tile, tokens)."""
        stage, at, size = seat
        kv_heads = lax.axis_size("heads")
        row = (page * kv_heads + head) * 2 * page_size + offset
        for which, room in enumerate((self.k, self.v)):
            held = pool.numbers.at[pl.ds(pl.multiple_of(row + which * page_size, BOX), size)]
            plgpu.copy_gmem_to_smem(held, room.at[stage, pl.ds(at, size)], self.arrived.at[stage])
            if pool.scales is not None:
                scales = pool.scales.at[page, head, pl.ds(pl.multiple_of(which * page_size + offset, BOX), size)]
                place = self.scales.at[stage, which, pl.ds(at, size)]
                plgpu.copy_gmem_to_smem(scales, place, self.arrived.at[stage])

    def widen(self, stage: Array, chip: type[Chip], *, e4m3: bool) -> tuple[Any, Any]:
        """K and V of a tile that arrived, as a wgmma reads them."""
        if self.scales is None:
            return self.k.at[stage], self.v.at[stage]
        for room, wide in ((self.k, self.wide_k), (self.v, self.wide_v)):
            codes = chip.codes(room.at[stage])
            numbers = decode_e4m3(codes.astype(jnp.int32) & 0xFF) if e4m3 else codes
            wide[...] = chip.lay(numbers.astype(jnp.bfloat16), plgpu.Layout.WGMMA)
        plgpu.commit_smem()
        return self.wide_k, self.wide_v

    def scaled(self, array: Array, stage: Array, which: int, chip: type[Chip]) -> Array:
        """[rows, tokens] times the scales of K (0) or V (1)."""
        if self.scales is None:
            return array
        factors = chip.load(self.scales.at[stage, which], plgpu.Layout.WGMMA.reduce(0))
        return array * per_token(factors, array.shape)
