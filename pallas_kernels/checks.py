"""What every operation asks of its arguments. Shapes and dtypes only: nothing here reads an array's contents."""

import jax.numpy as jnp
from jax import Array

from pallas_kernels.errors import KernelError

FLOATS = ("float32", "bfloat16")


def require(holds: bool, message: str) -> None:
    if not holds:
        raise KernelError(message)


def check_pool(kv_pages: Array) -> None:
    """`kv_pages` is a float pool [P, Hkv, 2, page_size, D]."""
    shape = kv_pages.shape
    require(len(shape) == 5 and shape[2] == 2, f"kv_pages must be [P, Hkv, 2, page_size, D], got {shape}")
    require(kv_pages.dtype.name in FLOATS, f"kv_pages must be one of {FLOATS}, got {kv_pages.dtype.name}")


def check_queries(q: Array, kv_pages: Array, sinks: Array | None) -> None:
    """`q` is float [rows, Hq, D], its heads a multiple of the pool's; `sinks` is one logit a query head."""
    check_pool(kv_pages)
    require(q.ndim == 3, f"q must be [rows, Hq, D], got {q.shape}")
    require(q.dtype.name in FLOATS, f"q must be one of {FLOATS}, got {q.dtype.name}")
    heads, kv_heads = q.shape[1], kv_pages.shape[1]
    require(heads % kv_heads == 0, f"{heads} query heads are not a multiple of {kv_heads} KV heads")
    require(q.shape[2] == kv_pages.shape[4], f"q has head size {q.shape[2]}, kv_pages {kv_pages.shape[4]}")
    if sinks is not None:
        require(sinks.shape == (heads,), f"sinks must be [{heads}], one a query head, got {sinks.shape}")


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
