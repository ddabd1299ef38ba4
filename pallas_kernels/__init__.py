"""Attention over paged KV and grouped products for JAX: one definition per operation, one implementation per platform.

Needs only jax and numpy. The KV of one layer on one shard is `kv_pages [P, Hkv, 2, page_size, D]`, K at `[:, :, 0]` and
V at `[:, :, 1]`, all of it finite. Pages of one part, `[P, Hkv, 1, page_size, D]`, hold K alone, and V is the first
`value_size` numbers of each row: latents are stored this way (DeepSeek-V2, section 2.1.2), with one head. Page 0 is the
null page: rows that must not be kept are written there, and no valid token is ever read from it. Letters: B slots, T
query tokens, S sequences of a packed chunk, P pages, W pages of a table row, Hq and Hkv heads, D head size, C the parts
of a page, 2 or 1.

Each operation is a folder: `__init__` checks the arguments and picks the implementation for the platform that the
program is lowered for, `reference` is the definition in plain `jnp`, and `xla` runs on platforms without a kernel.
"""

from pallas_kernels.checks import KernelError, check_call
from pallas_kernels.grouped_product import grouped_product
from pallas_kernels.pack_kv_pages import digest_pages, pack_kv_pages
from pallas_kernels.pack_kv_pages.wire_error import wire_error
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.prefill_attention import prefill_attention
from pallas_kernels.quantized import QuantizedPages, dequantize, quantize_pages
from pallas_kernels.unpack_kv_pages import unpack_kv_pages
from pallas_kernels.wire_format import PackedPages
from pallas_kernels.write_kv_pages import write_kv_pages

__all__ = [
    "KernelError",
    "PackedPages",
    "QuantizedPages",
    "check_call",
    "dequantize",
    "digest_pages",
    "grouped_product",
    "pack_kv_pages",
    "paged_attention",
    "prefill_attention",
    "quantize_pages",
    "unpack_kv_pages",
    "wire_error",
    "write_kv_pages",
]
