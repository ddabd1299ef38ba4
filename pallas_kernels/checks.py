"""Checks of the operations' arguments: shapes and dtypes always, contents of integer arrays with `debug=True`."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from pallas_kernels.quantized import LARGEST, QuantizedPages, stored

FLOATS = ("float32", "bfloat16")


class KernelError(ValueError):
    """An argument's shape, dtype or value does not fit the others; the message gives both values."""


def require(holds: bool, message: str) -> None:
    if not holds:
        raise KernelError(message)


def check_pool(kv_pages: Array | QuantizedPages) -> None:
    """Raises unless `kv_pages` is a float pool [P, Hkv, C, page_size, D], C 2 or 1, or a quantised one with its
    scales."""
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
    """Raises unless `q` is float [rows, Hq, D], Hq is a multiple of the pool's heads, and `sinks` has one logit per
    query head."""
    check_pool(kv_pages)
    require(q.ndim == 3, f"q must be [rows, Hq, D], got {q.shape}")
    require(q.dtype.name in FLOATS, f"q must be one of {FLOATS}, got {q.dtype.name}")
    heads, kv_heads, size = q.shape[1], *stored(kv_pages).shape[1::3]
    require(heads % kv_heads == 0, f"{heads} query heads are not a multiple of {kv_heads} KV heads")
    require(q.shape[2] == size, f"q has head size {q.shape[2]}, kv_pages {size}")
    if sinks is not None:
        require(sinks.shape == (heads,), f"sinks must be [{heads}], one a query head, got {sinks.shape}")


def check_value_size(kv_pages: Array | QuantizedPages, value_size: int | None) -> None:
    """Raises unless `value_size` is 1 to D for pages of one part, and None for pages of two parts."""
    *_, parts, _, size = stored(kv_pages).shape
    if parts == 2:
        require(value_size is None, f"value_size is for kv_pages of one part, got {value_size} and 2 parts")
    else:
        fits = value_size is not None and 0 < value_size <= size
        require(fits, f"value_size of kv_pages of one part must be in [1, {size}], got {value_size}")


def check_ints(name: str, array: Array, shape: tuple[int, ...]) -> None:
    """Raises unless `array` is i32 of exactly this shape."""
    require(array.dtype == jnp.int32, f"{name} must be int32, got {array.dtype.name}")
    require(array.shape == shape, f"{name} must have shape {shape}, got {array.shape}")


def check_table(page_table: Array, rows: int) -> None:
    """Raises unless `page_table` is i32[rows, W] with W at least 1."""
    require(page_table.ndim == 2 and page_table.shape[1] > 0, f"page_table must be [rows, W], got {page_table.shape}")
    check_ints("page_table", page_table, (rows, page_table.shape[1]))


def check_options(window: int | None, soft_cap: float | None) -> None:
    """Raises unless the window has at least one token and the cap is positive."""
    require(window is None or window > 0, f"window must be at least 1 token, got {window}")
    require(soft_cap is None or soft_cap > 0, f"soft_cap must be over 0, got {soft_cap}")


NAMED = f"{KernelError.__name__}: "


def check_contents(rule: Callable[..., None], *arrays: Array) -> tuple[Array, ...]:
    """Returns the arrays after `rule` has raised no error on them as numpy arrays. Concrete arrays are checked at once.
    Under jit the program calls back to the host and reads the arrays that the callback returns: nothing runs on arrays
    that were refused."""
    if not any(isinstance(array, Tracer) for array in arrays):
        rule(*map(np.asarray, arrays))
        return arrays

    def on_host(*values: Array) -> tuple[Array, ...]:
        rule(*map(np.asarray, values))
        return values

    shapes = tuple(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays)
    return jax.pure_callback(on_host, shapes, *arrays)


def check_call(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `function` to wait for its results and to raise KernelError if an operation with `debug=True` refused its
    arguments. Without it a jitted program raises jax.errors.JaxRuntimeError or ValueError, depending on jax, with the
    KernelError's text at the end of the message."""

    @wraps(function)
    def checked(*arguments: Any, **named: Any) -> Any:
        try:
            return jax.block_until_ready(function(*arguments, **named))
        except KernelError:
            raise
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            _, found, message = str(error).rpartition(NAMED)
            if not found:
                raise
            raise KernelError(message.splitlines()[0]) from error

    return checked


def refuse_first(bad: np.ndarray, describe: Callable[..., str]) -> None:
    """Raises KernelError for the first index, in order, at which `bad` is True."""
    if bad.any():
        raise KernelError(describe(*(int(index) for index in np.argwhere(bad)[0])))


def within(name: str, array: np.ndarray, stop: int, what: str) -> None:
    """Raises unless every number of `array` is in [0, stop), the bounds of `what`."""
    refuse_first(
        (array < 0) | (array >= stop),
        lambda *at: f"{name}[{', '.join(map(str, at))}] is {array[at]}, outside the {what} [0, {stop})",
    )


def check_held(name: str, lengths: np.ndarray, page_table: np.ndarray, pages: int, page_size: int) -> None:
    """Raises unless table entries name pages of the pool and no row holds more tokens than its pages."""
    within("page_table", page_table, pages, "pages of the pool")
    width = page_table.shape[1]
    refuse_first(
        (lengths < 0) | (lengths > width * page_size),
        lambda at: (
            f"{name}[{at}] is {lengths[at]} tokens, outside [0, {width * page_size}]: "
            f"the table holds {width} pages of {page_size}"
        ),
    )


def check_decode(page_table: np.ndarray, lengths: np.ndarray, *, pages: int, page_size: int) -> None:
    """Checks the contents of the arguments of `paged_attention`."""
    check_held("lengths", lengths, page_table, pages, page_size)


def check_packed(
    page_table: np.ndarray, kv_lens: np.ndarray, cu_q_lens: np.ndarray, *, pages: int, page_size: int, tokens: int
) -> None:
    """Checks the contents of the arguments of `prefill_attention`."""
    check_held("kv_lens", kv_lens, page_table, pages, page_size)
    require(cu_q_lens[0] == 0, f"cu_q_lens[0] is {cu_q_lens[0]}, not 0")
    rows = np.diff(cu_q_lens)
    refuse_first(rows < 0, lambda at: f"cu_q_lens falls from {cu_q_lens[at]} at {at} to {cu_q_lens[at + 1]}")
    require(cu_q_lens[-1] <= tokens, f"cu_q_lens ends at {cu_q_lens[-1]}, q has {tokens} rows")
    refuse_first(
        rows > kv_lens, lambda at: f"sequence {at} owns {rows[at]} rows of q, and kv_lens[{at}] is {kv_lens[at]} tokens"
    )


def check_places(page_ids: np.ndarray, offsets: np.ndarray, *, pages: int, page_size: int) -> None:
    """Checks the contents of the arguments of `write_kv_pages`."""
    within("page_ids", page_ids, pages, "pages of the pool")
    within("offsets", offsets, page_size, "tokens of a page")
