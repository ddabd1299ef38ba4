"""Page arithmetic, once.

A page holds `page_size` tokens of K and V of every head of one layer: `[Hkv, 2, page_size, D]`, K at index 0 of the
second axis and V at 1. A layer's pool on a device is `[P, Hkv, 2, page_size, D]`, so that a page of one head shard is
one contiguous copy and the tiles of a kernel lie in the last two dimensions. Page 0 is the *null page*: masked rows
write there, nobody reads it, and no pool ever hands it out.
"""

from __future__ import annotations

from dataclasses import dataclass

NULL_PAGE = 0
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "float8_e4m3fn": 1}


@dataclass(frozen=True, slots=True)
class KVLayout:
    """How one model's KV is cut into pages."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int  # tokens a page
    dtype: str = "float32"

    @property
    def bytes_per_token(self) -> int:
        """K and V of all layers and heads, one token."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def bytes_per_page(self) -> int:
        return self.bytes_per_token * self.page_size

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens."""
        return -(-tokens // self.page_size)

    def page_shape(self, tp: int = 1) -> tuple[int, int, int, int]:
        """One page of one layer on one of `tp` shards: [Hkv, 2, page_size, D]."""
        return (heads_per_shard(self.num_kv_heads, tp), 2, self.page_size, self.head_dim)


def heads_per_shard(num_kv_heads: int, tp: int) -> int:
    """KV heads a shard holds: an even share, or one replicated head where there are more shards than heads."""
    return max(1, num_kv_heads // tp)


def kv_head_of_shard(num_kv_heads: int, tp: int, shard: int) -> int:
    """First KV head that `shard` of `tp` holds."""
    return shard * num_kv_heads // tp
