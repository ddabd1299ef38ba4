"""Which code a GPU gets: Mosaic's for Hopper, Triton's for what came before and after.

A wgmma is Hopper's alone: Blackwell has another, and gets Triton's. A tuned choice says whose it is; where nothing was
measured the generation decides.
"""

from typing import Any

from jax import Array

from pallas_kernels.paged_attention import gpu, hopper
from pallas_kernels.platforms import gpu_generation
from pallas_kernels.quantized import QuantizedPages
from pallas_kernels.tuning import tuned

HOPPER = 9


def takes_mosaic(q: Array, kv_pages: Array | QuantizedPages) -> bool:
    """Whether the GPU compiled for runs `hopper.py` on these arguments."""
    if gpu_generation() != HOPPER or not hopper.fits(q, kv_pages):
        return False
    found = tuned("paged_attention", q, kv_pages)
    return bool(found.get(gpu.MOSAIC)) if found else True


def paged_attention(q: Array, kv_pages: Array | QuantizedPages, *rest: Any, **options: Any) -> Array:
    """As `pallas_kernels.paged_attention`, by the code for this generation."""
    attend: Any = hopper.paged_attention if takes_mosaic(q, kv_pages) else gpu.paged_attention
    return attend(q, kv_pages, *rest, **options)
