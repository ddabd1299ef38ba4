"""The choice of the code that a GPU runs: Mosaic GPU on Hopper; elsewhere Triton for attention and XLA for the rest.

The wgmma instruction exists on Hopper alone: Blackwell replaced it, and takes the same code as Ampere. A tuned choice
names its code; without one the GPU's generation decides.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax import Array

from pallas_kernels import mosaic
from pallas_kernels.arguments import PagedAttentionArgs, PrefillAttentionArgs
from pallas_kernels.platforms import gpu_generation
from pallas_kernels.quantized import QuantizedPages
from pallas_kernels.tuning import MOSAIC, tuned, tuned_product

Args = TypeVar("Args", PagedAttentionArgs, PrefillAttentionArgs)
HOPPER = 9
DECODE, PREFILL = "paged_attention", "prefill_attention"
ABLE: dict[str, Callable[..., bool]] = {  # whether Mosaic's code can, of rows and pages
    DECODE: mosaic.fits_widened,
    PREFILL: mosaic.fits_widened,
    "write_kv_pages": mosaic.copies,
    "pack_kv_pages": mosaic.carries,
    "unpack_kv_pages": mosaic.carries,
}

LATENTS: dict[str, Callable[..., bool]] = {DECODE: mosaic.fits_latents, PREFILL: mosaic.fits_latent_chunks}


def takes_mosaic(operation: str, rows: Array, kv_pages: Array | QuantizedPages, value_size: int | None = None) -> bool:
    """Whether the GPU compiled for runs Mosaic's code of `operation` on these arguments. rows: of queries, of what is
    written, or of what is packed. value_size: of attention to latents."""
    if gpu_generation() != HOPPER:
        return False
    if not (ABLE if value_size is None else LATENTS)[operation](rows, kv_pages, *([value_size] if value_size else [])):
        return False
    found = tuned(operation, rows, kv_pages)
    return bool(found.get(MOSAIC)) if found else True


def by_generation(
    operation: str, hopper: Callable[[Args], Array], triton: Callable[[Args], Array]
) -> Callable[[Args], Array]:
    """`operation`, by the code for the generation that is compiled for."""

    def attend(args: Args) -> Array:
        rows = a_row_each(args.q, args.page_table) if operation == DECODE else args.q
        return (hopper if takes_mosaic(operation, rows, args.kv_pages, args.value_size) else triton)(args)

    return attend


def a_row_each(q: Array, page_table: Array) -> Any:
    """The shape of decode's queries were each slot one row: a choice is by slots, or a token would be another code's
    as soon as a draft stands behind it."""
    return jax.ShapeDtypeStruct((page_table.shape[0], *q.shape[1:]), q.dtype)


def rows_of(pool: Array, page_ids: Array, dtype: Any) -> Any:
    """The shape of packed pages, as a choice is looked up by it."""
    return jax.ShapeDtypeStruct((page_ids.shape[0], pool.shape[1], pool.shape[4]), dtype)


def multiplies_by_mosaic(x: Array, matrices: Array, out_first: bool) -> bool:
    """`takes_mosaic`, of the grouped product."""
    if gpu_generation() != HOPPER or not mosaic.multiplies(x, matrices):
        return False
    found = tuned_product(matrices, out_first)
    return bool(found.get(MOSAIC)) if found else True
