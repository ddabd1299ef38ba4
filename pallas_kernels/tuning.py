"""Block sizes that were measured, looked up by what decides them; each kernel has a rule for all that is not listed.

`python -m pallas_kernels.tune` measures on the device it runs on and writes `tuned.py`. A choice changes the order of
sums at most, never their terms.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.quantized import QuantizedPages, stored
from pallas_kernels.tuned import TUNED

MOSAIC = "mosaic"  # in a tuned choice: it is of the Mosaic code (`hopper.py`)


class Key(NamedTuple):
    """What a choice was measured for. It holds no table width: a result's bits must not depend on one."""

    operation: str  # paged_attention, prefill_attention
    device: str  # jax's device_kind: "TPU v5 lite", "NVIDIA H100 80GB HBM3"
    head_dim: int
    kv_heads: int  # of a shard
    groups: int  # query heads of a KV head
    parts: int  # of a page
    page_size: int
    q_dtype: str
    pool_dtype: str
    rows: int  # of queries, slots or tokens, rounded up to a power of two


def key_of(operation: str, q: Array, kv_pages: Array | QuantizedPages) -> Key:
    """q [rows, Hq, D] over kv_pages, on the device that programs go to by default."""
    _, kv_heads, parts, page_size, size = stored(kv_pages).shape
    dtypes = jnp.dtype(q.dtype).name, jnp.dtype(stored(kv_pages).dtype).name
    rows = 1 << max(q.shape[0] - 1, 0).bit_length()
    groups, device = q.shape[1] // kv_heads, jax.devices()[0].device_kind
    return Key(operation, device, size, kv_heads, groups, parts, page_size, *dtypes, rows)


def tuned(operation: str, q: Array, kv_pages: Array | QuantizedPages) -> dict[str, int]:
    """The measured choice, by the names that the kernel gives its parts; empty where nothing was measured."""
    return TUNED.get(tuple(key_of(operation, q, kv_pages)), {})


class ProductKey(NamedTuple):
    """What a choice was measured for. It holds no number of rows: a row's bits must not depend on its company."""

    operation: str
    device: str
    groups: int
    inputs: int
    outputs: int
    out_first: int
    dtype: str


def product_key(matrices: Array, out_first: bool) -> ProductKey:
    groups, *sides = matrices.shape
    inputs, outputs = reversed(sides) if out_first else sides
    device, dtype = jax.devices()[0].device_kind, jnp.dtype(matrices.dtype).name
    return ProductKey("grouped_product", device, groups, inputs, outputs, int(out_first), dtype)


def tuned_product(matrices: Array, out_first: bool) -> dict[str, int]:
    """As `tuned`, of the grouped product."""
    return TUNED.get(tuple(product_key(matrices, out_first)), {})
