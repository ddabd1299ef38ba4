"""Looks up measured block sizes; each kernel has a rule for sizes that are not listed.

`python -m pallas_kernels.tune` measures on the local device and writes `tuned.py`. A choice changes at most the order
of sums, never their terms.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.quantized import QuantizedPages, stored
from pallas_kernels.tuned import TUNED

MOSAIC = "mosaic"  # marks a tuned choice of the Mosaic code (`hopper.py`)


class Key(NamedTuple):
    """The key of a measured attention choice. It holds no table width: a result's bits must not depend on one."""

    operation: str  # paged_attention, prefill_attention
    device: str  # jax's device_kind: "TPU v5 lite", "NVIDIA H100 80GB HBM3"
    head_dim: int
    kv_heads: int  # heads of a shard
    groups: int  # query heads per KV head
    parts: int  # parts of a page
    page_size: int
    q_dtype: str
    pool_dtype: str
    rows: int  # query rows, slots or tokens, rounded up to a power of two


def key_of(operation: str, q: Array, kv_pages: Array | QuantizedPages) -> Key:
    """Returns the key of q [rows, Hq, D] over kv_pages, on the default device."""
    _, kv_heads, parts, page_size, size = stored(kv_pages).shape
    dtypes = jnp.dtype(q.dtype).name, jnp.dtype(stored(kv_pages).dtype).name
    rows = 1 << max(q.shape[0] - 1, 0).bit_length()
    groups, device = q.shape[1] // kv_heads, jax.devices()[0].device_kind
    return Key(operation, device, size, kv_heads, groups, parts, page_size, *dtypes, rows)


def tuned(operation: str, q: Array, kv_pages: Array | QuantizedPages) -> dict[str, int]:
    """Returns the measured choice, by the names that the kernel gives its parts; {} without a measurement."""
    return TUNED.get(tuple(key_of(operation, q, kv_pages)), {})


class ProductKey(NamedTuple):
    """The key of a measured product choice. It holds no number of rows: a row's bits must not depend on other rows."""

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
    """Returns the measured choice of a grouped product, as `tuned`."""
    return TUNED.get(tuple(product_key(matrices, out_first)), {})
