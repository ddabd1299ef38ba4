"""The choice of a kernel's code: by the platform that a program is for and, on GPUs, by their generation.

`jax.lax.platform_dependent` traces the code of all platforms and compiles one. A caller that knows the platform names
it by `traced_for`, and the others' Pallas kernels, slow to trace, are left alone.

On GPUs Mosaic GPU runs on Hopper; elsewhere Triton runs attention and XLA the rest. The wgmma instruction exists on
Hopper alone: Blackwell replaced it, and takes the same code as Ampere. A tuned choice names its code; without one the
GPU's generation decides.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import jax
from jax import Array

from pallas_kernels import mosaic
from pallas_kernels.arguments import PagedAttentionArgs, PrefillAttentionArgs
from pallas_kernels.quantized import QuantizedPages
from pallas_kernels.tuning import MOSAIC, tuned, tuned_product

_KNOWN: Any = jax.make_user_context(None)  # part of the key of jit's caches: what was traced for one is no other's
_AS_STORED: Any = jax.make_user_context(False)
_NAMES = {"gpu": "cuda"}  # of a device -> of a lowering rule


# Of NVIDIA's names, as "NVIDIA H100 80GB HBM3": the major compute capability.
_GENERATIONS = {
    r"\bA(10|16|2|30|40|100|800)\b": 8,
    r"\bL(4|20|40S?)\b": 8,
    r"\bG?H(20|100|200|800)\b": 9,
    r"\bG?B\d+\b": 10,
}


def gpu_generation() -> int | None:
    """Major compute capability of the GPU that is compiled for; None where there is none, or it is not known."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    kind = device.device_kind if device is not None else jax.devices()[0].device_kind
    return next((major for name, major in _GENERATIONS.items() if re.search(name, kind)), None)


def traced_for(platform: str | None) -> AbstractContextManager[None]:
    """What is traced inside is compiled for devices whose `platform` this is, "cpu", "gpu" or "tpu"; None: for any."""
    return _KNOWN(_NAMES.get(platform, platform) if platform else None)


def traced_platform() -> str | None:
    """As `traced_for` was told: "cpu", "gpu" or "tpu"; None where nobody said."""
    return next((name for name, rule in _NAMES.items() if rule == _KNOWN.value), _KNOWN.value)


def moved_as_stored(holds: bool) -> AbstractContextManager[None]:
    """What is traced inside is compiled so that bf16 and fp8 are moved as they are, on a CPU too: XLA's passes that
    widen them (`float-normalization-bf16`, `float-normalization-f8e4m3fn`) are left out."""
    return _AS_STORED(holds)


def widens() -> bool:
    """Whether XLA's CPU backend may convert all of a bf16 or fp8 array for a write of some of it."""
    return not _AS_STORED.value


def on_platform(*arguments: Any, default: Callable[..., Any], **platforms: Callable[..., Any]) -> Any:
    """`jax.lax.platform_dependent`, of the one platform that `traced_for` named."""
    if _KNOWN.value is None:
        return jax.lax.platform_dependent(*arguments, default=default, **platforms)
    return platforms.get(_KNOWN.value, default)(*arguments)


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
