"""Selects a kernel's code by the platform of a program and, on GPUs, by the GPU's generation.

`jax.lax.platform_dependent` traces the code of all platforms and compiles one. A caller that knows the platform names
it by `traced_for`; the Pallas kernels of other platforms, slow to trace, are then skipped.

On GPUs Mosaic GPU runs on Hopper; on other GPUs Triton runs attention and XLA the rest. The wgmma instruction exists
only on Hopper: Blackwell replaced it, and takes the same code as Ampere. A tuned choice names its code; without one the
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

_KNOWN: Any = jax.make_user_context(None)  # part of the key of jit's caches, so traces are not shared between platforms
_AS_STORED: Any = jax.make_user_context(False)
_NAMES = {"gpu": "cuda"}  # device platform -> platform of a lowering rule


# The major compute capability by NVIDIA's names, as "NVIDIA H100 80GB HBM3".
_GENERATIONS = {
    r"\bA(10|16|2|30|40|100|800)\b": 8,
    r"\bL(4|20|40S?)\b": 8,
    r"\bG?H(20|100|200|800)\b": 9,
    r"\bG?B\d+\b": 10,
}


def gpu_generation() -> int | None:
    """Returns the major compute capability of the GPU that is compiled for; None if there is none or it is unknown."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    kind = device.device_kind if device is not None else jax.devices()[0].device_kind
    return next((major for name, major in _GENERATIONS.items() if re.search(name, kind)), None)


def traced_for(platform: str | None) -> AbstractContextManager[None]:
    """Compiles code traced in this context for devices of this `platform`, "cpu", "gpu" or "tpu"; None: for any."""
    return _KNOWN(_NAMES.get(platform, platform) if platform else None)


def traced_platform() -> str | None:
    """Returns the platform of `traced_for`, "cpu", "gpu" or "tpu"; None outside of it."""
    return next((name for name, rule in _NAMES.items() if rule == _KNOWN.value), _KNOWN.value)


def moved_as_stored(holds: bool) -> AbstractContextManager[None]:
    """Compiles code traced in this context so that bf16 and fp8 are moved without conversion, on a CPU too. XLA's
    passes that widen them (`float-normalization-bf16`, `float-normalization-f8e4m3fn`) are left out."""
    return _AS_STORED(holds)


def widens() -> bool:
    """Returns True if XLA's CPU backend may convert all of a bf16 or fp8 array for a write of part of it."""
    return not _AS_STORED.value


def on_platform(*arguments: Any, default: Callable[..., Any], **platforms: Callable[..., Any]) -> Any:
    """Returns `jax.lax.platform_dependent`, or the code of the one platform that `traced_for` named."""
    if _KNOWN.value is None:
        return jax.lax.platform_dependent(*arguments, default=default, **platforms)
    return platforms.get(_KNOWN.value, default)(*arguments)


Args = TypeVar("Args", PagedAttentionArgs, PrefillAttentionArgs)
HOPPER = 9
DECODE, PREFILL = "paged_attention", "prefill_attention"
ABLE: dict[str, Callable[..., bool]] = {  # tests of rows and pages: True if Mosaic's code supports them
    DECODE: mosaic.fits_widened,
    PREFILL: mosaic.fits_widened,
    "write_kv_pages": mosaic.copies,
    "pack_kv_pages": mosaic.carries,
    "unpack_kv_pages": mosaic.carries,
}

LATENTS: dict[str, Callable[..., bool]] = {DECODE: mosaic.fits_latents, PREFILL: mosaic.fits_latent_chunks}


def takes_mosaic(operation: str, rows: Array, kv_pages: Array | QuantizedPages, value_size: int | None = None) -> bool:
    """Returns True if the GPU compiled for runs Mosaic's code of `operation` on these arguments. rows: the queries, the
    rows to write, or the pages to pack. value_size: of attention over latents."""
    if gpu_generation() != HOPPER:
        return False
    if not (ABLE if value_size is None else LATENTS)[operation](rows, kv_pages, *([value_size] if value_size else [])):
        return False
    found = tuned(operation, rows, kv_pages)
    return bool(found.get(MOSAIC)) if found else True


def by_generation(
    operation: str, hopper: Callable[[Args], Array], triton: Callable[[Args], Array]
) -> Callable[[Args], Array]:
    """Returns `operation` in the code for the GPU generation that is compiled for."""

    def attend(args: Args) -> Array:
        rows = a_row_each(args.q, args.page_table) if operation == DECODE else args.q
        return (hopper if takes_mosaic(operation, rows, args.kv_pages, args.value_size) else triton)(args)

    return attend


def a_row_each(q: Array, page_table: Array) -> Any:
    """Returns the shape of decode's queries with one row per slot. A choice is by slots: otherwise a draft would change
    the code that computes a token."""
    return jax.ShapeDtypeStruct((page_table.shape[0], *q.shape[1:]), q.dtype)


def rows_of(pool: Array, page_ids: Array, dtype: Any) -> Any:
    """Returns the shape of packed pages by which a choice is looked up."""
    return jax.ShapeDtypeStruct((page_ids.shape[0], pool.shape[1], pool.shape[4]), dtype)


def multiplies_by_mosaic(x: Array, matrices: Array, out_first: bool) -> bool:
    """Returns `takes_mosaic` for the grouped product."""
    if gpu_generation() != HOPPER or not mosaic.multiplies(x, matrices):
        return False
    found = tuned_product(matrices, out_first)
    return bool(found.get(MOSAIC)) if found else True
