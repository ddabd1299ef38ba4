"""What every operation asks of its arguments. Shapes and dtypes only: nothing here reads an array's contents."""

import jax.numpy as jnp
from jax import Array

from pallas_kernels.errors import KernelError
from pallas_kernels.quantized import LARGEST, QuantizedPages, stored

FLOATS = ("float32", "bfloat16")


def require(holds: bool, message: str) -> None:
    if not holds:
        raise KernelError(message)


def check_pool(kv_pages: Array | QuantizedPages) -> None:
    """`kv_pages` is a float pool [P, Hkv, C, page_size, D], C 2 or 1, or a quantised one with its scales."""
    shape, dtype = stored(kv_pages).shape, stored(kv_pages).dtype.name
    require(len(shape) == 5 and shape[2] in (1, 2), f"kv_pages must be [P, Hkv, 2 or 1, page_size, D], got {shape}")
    if isinstance(kv_pages, QuantizedPages):
        require(dtype in LARGEST, f"quantised kv_pages must be one of {tuple(LARGEST)}, got {dtype}")
        scales, wanted = kv_pages.scales, (*shape[:2], shape[2] * shape[3])
        require(scales.shape == wanted, f"scales of kv_pages {shape} must be {wanted}, got {scales.shape}")
        require(scales.dtype == jnp.float32, f"scales of kv_pages must be float32, got {scales.dtype.name}")
    else:
        require(dtype in FLOATS, f"kv_pages must be QuantizedPages or one of {FLOATS}, got {dtype}")


def check_queries(q: Array, kv_pages: Array | QuantizedPages, sinks: Array | None) -> None:
    """`q` is float [rows, Hq, D], its heads a multiple of the pool's; `sinks` is one logit a query head."""
    check_pool(kv_pages)
    require(q.ndim == 3, f"q must be [rows, Hq, D], got {q.shape}")
    require(q.dtype.name in FLOATS, f"q must be one of {FLOATS}, got {q.dtype.name}")
    heads, kv_heads, size = q.shape[1], *stored(kv_pages).shape[1::3]
    require(heads % kv_heads == 0, f"{heads} query heads are not a multiple of {kv_heads} KV heads")
    require(q.shape[2] == size, f"q has head size {q.shape[2]}, kv_pages {size}")
    if sinks is not None:
        require(sinks.shape == (heads,), f"sinks must be [{heads}], one a query head, got {sinks.shape}")


def check_value_size(kv_pages: Array | QuantizedPages, value_size: int | None) -> None:
    """Pages of one part say how much of a row is V, at least a number and at most all; pages of two parts do not."""
    *_, parts, _, size = stored(kv_pages).shape
    if parts == 2:
        require(value_size is None, f"value_size is for kv_pages of one part, got {value_size} and 2 parts")
    else:
        fits = value_size is not None and 0 < value_size <= size
        require(fits, f"value_size of kv_pages of one part must be in [1, {size}], got {value_size}")


def check_ints(name: str, array: Array, shape: tuple[int, ...]) -> None:
    """`array` is i32 of just this shape."""
    require(array.dtype == jnp.int32, f"{name} must be int32, got {array.dtype.name}")
    require(array.shape == shape, f"{name} must have shape {shape}, got {array.shape}")


def check_table(page_table: Array, rows: int) -> None:
    """`page_table` is i32[rows, W] with W at least 1."""
    require(page_table.ndim == 2 and page_table.shape[1] > 0, f"page_table must be [rows, W], got {page_table.shape}")
    check_ints("page_table", page_table, (rows, page_table.shape[1]))


def check_options(window: int | None, soft_cap: float | None) -> None:
    """A window of at least one token, a positive cap."""
    require(window is None or window > 0, f"window must be at least 1 token, got {window}")
    require(soft_cap is None or soft_cap > 0, f"soft_cap must be over 0, got {soft_cap}")
