"""Which code of an operation a GPU gets: Mosaic's for Hopper, Triton's for what came before and after.

A wgmma is Hopper's alone: Blackwell has another, and gets Triton's. A tuned choice says whose it is; where nothing was
measured the generation decides.
"""

from collections.abc import Callable
from typing import Any

from jax import Array

from pallas_kernels import mosaic
from pallas_kernels.paged_attention.gpu import MOSAIC
from pallas_kernels.platforms import gpu_generation
from pallas_kernels.quantized import QuantizedPages
from pallas_kernels.tuning import tuned

HOPPER = 9


def takes_mosaic(operation: str, rows: Array, kv_pages: Array | QuantizedPages) -> bool:
    """Whether the GPU compiled for runs Mosaic's code of `operation` on these arguments. rows: of queries, or of what
    is written."""
    able = mosaic.copies(kv_pages) if operation == "write_kv_pages" else mosaic.fits(rows, kv_pages)
    if gpu_generation() != HOPPER or not able:
        return False
    found = tuned(operation, rows, kv_pages)
    return bool(found.get(MOSAIC)) if found else True


def by_generation(operation: str, hopper: Callable[..., Array], triton: Callable[..., Array]) -> Callable[..., Array]:
    """`operation`, by the code for the generation that is compiled for."""

    def attend(q: Array, kv_pages: Array | QuantizedPages, *rest: Any, **options: Any) -> Array:
        return (hopper if takes_mosaic(operation, q, kv_pages) else triton)(q, kv_pages, *rest, **options)

    return attend


def writes_by_generation(hopper: Callable[..., Any], triton: Callable[..., Any]) -> Callable[..., Any]:
    """The same for what writes rows into pages, whose arguments come the other way round."""

    def write(kv_pages: Array | QuantizedPages, k: Array, *rest: Any, **options: Any) -> Any:
        return (hopper if takes_mosaic("write_kv_pages", k, kv_pages) else triton)(kv_pages, k, *rest, **options)

    return write
