"""Page arithmetic: the layout of KV in pages.

A page holds `page_size` tokens of K and V of every head of one layer: `[Hkv, 2, page_size, D]`, K at index 0 of the
second axis and V at 1. A layer's pool on a device is `[P, Hkv, 2, page_size, D]`, so that a page of one head shard is
one contiguous copy and the last two dimensions are a kernel's tiles. A model with latent attention has pages of one
part, `[1, 1, page_size, D]`: V is the beginning of K, and every shard holds the row whole. Page 0 is the null page:
masked rows write there, it is never read, and no pool ever allocates it.

A TPU stores arrays in tiles of 8 rows by 128 numbers. If K and V of a head fit into one row of a tile together they
share it: pages of one part, `[Hkv, 1, page_size, 2 * D]`, V first. Other arrays that do not fill their tiles are
padded, and the padding counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from jdisagg.core.layout.tensor_cut import heads_per_shard
from jdisagg.core.model_config import ModelConfig

NULL_PAGE = 0
LANES, SUBLANES = 128, 8  # of a TPU's tile: numbers per row, rows
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "float8_e4m3fn": 1}
SCALED = (
    "int8",
    "float8_e4m3fn",
)  # dtypes of pages with one scale per row, stored separately: f32 [Hkv, parts * page_size]
SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The layout of one model's KV in pages."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int  # tokens per page
    dtype: str = "float32"
    parts: int = 2  # rows of a token and head: K and V, or one of both
    tiled: bool = False  # True: stored in whole tiles, as on TPUs

    @staticmethod
    def of(model: ModelConfig, page_size: int, dtype: str = "float32", tiled: bool = False) -> KVLayout:
        """Returns the layout of a model's KV in pages of `page_size` tokens."""
        heads, size = model.num_kv_heads, model.head_dim
        if tiled and not model.latent and 2 * size <= LANES:
            return KVLayout(model.num_layers, heads, 2 * size, page_size, dtype, 1, tiled)
        return KVLayout(model.num_layers, heads, size, page_size, dtype, 1 if model.latent else 2, tiled)

    @property
    def scaled(self) -> bool:
        """Returns True if the numbers are quantised."""
        return self.dtype in SCALED

    @property
    def row_bytes(self) -> int:
        """Returns the bytes of K or V of one token and head, its scale included."""
        return self.head_dim * DTYPE_BYTES[self.dtype] + (SCALE_BYTES if self.scaled else 0)

    @property
    def bytes_per_token(self) -> int:
        """Returns the bytes of one token's K and V, all layers and heads."""
        return self.parts * self.num_layers * self.num_kv_heads * self.row_bytes

    @property
    def bytes_per_page(self) -> int:
        return self.bytes_per_token * self.page_size

    def pages_for(self, tokens: int) -> int:
        """Returns the pages that hold `tokens` tokens."""
        return -(-tokens // self.page_size)

    def page_shape(self, tp: int = 1) -> tuple[int, int, int, int]:
        """Returns the shape of one page of one layer on one of `tp` shards: [Hkv, parts, page_size, D], padding
        included."""
        return (heads_per_shard(self.num_kv_heads, tp), self.parts, self.page_size, self.head_dim)

    def layer_page_bytes(self, tp: int) -> int:
        """Returns the bytes of a page of one layer on one device of `tp`, padding included."""
        return self._held(self.page_shape(tp), DTYPE_BYTES[self.dtype]) + self.layer_scale_bytes(tp)

    def layer_scale_bytes(self, tp: int) -> int:
        """Returns the bytes of the scales within `layer_page_bytes`."""
        return self._held(self.scales_shape(tp), SCALE_BYTES) if self.scaled else 0

    def scales_shape(self, tp: int = 1) -> tuple[int, int]:
        """Returns the shape of the scales of one page of one layer on one of `tp` shards: K's of a head and then
        V's."""
        heads, parts, tokens, _ = self.page_shape(tp)
        return heads, parts * tokens

    def _held(self, shape: tuple[int, ...], number_bytes: int) -> int:
        *outer, rows, numbers = shape
        if self.tiled:
            tile = max(min(SUBLANES, 1 << (rows - 1).bit_length()), 4 // number_bytes)
            rows, numbers = -(-rows // tile) * tile, -(-numbers // LANES) * LANES
        return prod(outer) * rows * numbers * number_bytes

    def held_page_bytes(self, tp: int) -> int:
        """Returns the bytes of one page of all layers on `tp` shards together, with padded and replicated heads."""
        return tp * self.num_layers * self.layer_page_bytes(tp)


@dataclass(frozen=True, slots=True)
class DraftPages:
    """The KV of a draft model: pages with the page numbers of the model's, layers numbered behind the model's."""

    name: str  # distinguishes draft models and their weights
    layout: KVLayout
    first_layer: int

    @property
    def layers(self) -> range:
        return range(self.first_layer, self.first_layer + self.layout.num_layers)
