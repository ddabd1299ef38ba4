"""Unpacks received pages into the pools of a layer group, in place. Checks the arguments, picks the platform's code."""

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.platforms import on_platform, rows_of, takes_mosaic
from pallas_kernels.quantized import QuantizedPages
from pallas_kernels.unpack_kv_pages import hopper, reference, tpu, xla
from pallas_kernels.wire_format import PackedPages, bits_of, check_packed, fold_scales

Pool = TypeVar("Pool", Array, QuantizedPages)


def on_gpu(
    pools: Sequence[Array], packed: PackedPages, page_ids: Array, *, wire: str, digests: bool = True
) -> tuple[list[Array], Array | None]:
    """Unpacks by Mosaic GPU's kernel if the GPU and the arguments allow it, else by the definition under XLA.
    `xla.unpack_kv_pages` is a loop over pages, for a CPU's cache: on a GPU each step would be several launches."""
    rows = rows_of(pools[0], page_ids, packed.values.dtype)
    if packed.scales is None and takes_mosaic("unpack_kv_pages", rows, pools[0]):
        return hopper.unpack_kv_pages(pools, packed, page_ids, wire=wire, digests=digests)
    written, folded = reference.unpack_kv_pages(pools, packed, page_ids, wire=wire)
    return written, folded if digests else None


def unpack_kv_pages(
    pools: Sequence[Pool], packed: PackedPages, page_ids: Array, *, digests: bool = True
) -> tuple[list[Pool], Array | None]:
    """Returns the pools with the n-th packed page in page `page_ids[n]`, and digests of the received pages, u32 [L, N,
    Hkv].

    pools: as for `pack_kv_pages`, updated in place if the caller's jit donates them. Float pools of either dtype take
    raw floats of either, every quantised wire, and sent `QuantizedPages`; `QuantizedPages` take their own kind, and the
    wire of the same numbers, unchanged. packed: its `digests` are not read: the caller compares them with the result.
    page_ids: i32[N], 0 for padding: the null page may hold anything afterwards. Other pages are named once. Raises
    KernelError for arguments that do not fit.
    """
    layers: Any = list(pools)  # either all float pools or all quantised ones
    wire = check_packed(pools, packed, page_ids)
    if isinstance(layers[0], QuantizedPages):
        written: Any = unpack_quantized(layers, packed, page_ids, digests)
    else:
        values = bits_of(packed.values) if packed.values.dtype == jnp.float8_e4m3fn else packed.values
        written = unpack_numbers(layers, packed._replace(values=values, digests=None), page_ids, wire, digests)
    return written


def unpack_numbers(
    pools: Sequence[Array], packed: PackedPages, page_ids: Array, wire: str, digests: bool
) -> tuple[list[Array], Array | None]:
    """Unpacks pools of one dtype: floats, or for wire "raw" the values of quantised ones."""
    options = {"wire": wire, "digests": digests}
    return on_platform(
        list(pools),
        packed,
        jnp.asarray(page_ids),
        cuda=partial(on_gpu, **options),
        tpu=partial(tpu.unpack_kv_pages, **options),
        default=partial(xla.unpack_kv_pages, **options),
    )


def unpack_quantized(
    pools: Sequence[QuantizedPages], packed: PackedPages, page_ids: Array, digests: bool
) -> tuple[list[QuantizedPages], Array | None]:
    """Unpacks values by the platform's code; scales, a small part, by XLA's scatter."""
    values, scales = jax.lax.bitcast_convert_type(packed.values, pools[0].values.dtype), packed.scales
    assert scales is not None
    arrived = PackedPages(values, None, None)
    written, folded = unpack_numbers([pool.values for pool in pools], arrived, page_ids, "raw", digests)
    found = [
        QuantizedPages(numbers, pool.scales.at[page_ids].set(part))
        for pool, numbers, part in zip(pools, written, scales, strict=True)
    ]
    return found, None if folded is None else folded + fold_scales(scales, values.shape[-1])
