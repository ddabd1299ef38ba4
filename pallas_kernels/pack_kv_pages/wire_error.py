"""Measures the error that a wire would cause on the pages themselves, so that a layer may be sent raw instead."""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array

from pallas_kernels.pack_kv_pages.xla import gather, quantise_pages
from pallas_kernels.unpack_kv_pages.xla import dequantise_pages
from pallas_kernels.wire_format import check_pools


def wire_error(pools: Sequence[Array], page_ids: Array, wire: str) -> Array:
    """Returns f32[L]: each layer's relative error of its pages, sqrt(sum |x - received|^2 / sum |x|^2); 0 if all are 0.
    pools: float pools as `pack_kv_pages` takes them. page_ids: i32[N]; page 0, padding, does not count. Raises
    KernelError for arguments that do not fit."""
    check_pools(pools, page_ids, wire)
    return jnp.stack([layer_error(pool, page_ids, wire) for pool in pools])


def layer_error(pool: Array, page_ids: Array, wire: str) -> Array:
    pages = gather(pool, page_ids).astype(jnp.float32)
    pages = jnp.where((page_ids != 0).reshape(-1, *[1] * 4), pages, 0.0)
    received = pages if wire == "raw" else dequantise_pages(*quantise_pages(pages, wire), wire)
    lost, total = jnp.sum((pages - received) ** 2), jnp.sum(pages**2)
    return jnp.sqrt(lost / jnp.where(total > 0, total, 1.0))
