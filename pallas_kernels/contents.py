"""What `debug=True` asks of the numbers in an operation's integer arrays, which no shape can tell."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.core import Tracer

from pallas_kernels.checks import require
from pallas_kernels.errors import KernelError

NAMED = f"{KernelError.__name__}: "


def check_contents(rule: Callable[..., None], *arrays: Array) -> tuple[Array, ...]:
    """The arrays, once `rule` of them as numpy arrays has raised nothing.

    Concrete arrays are checked at once. Under jit the program calls back to the host, and reads the arrays that come
    back from there: nothing runs on arrays that were refused.
    """
    if not any(isinstance(array, Tracer) for array in arrays):
        rule(*map(np.asarray, arrays))
        return arrays

    def on_host(*values: Array) -> tuple[Array, ...]:
        rule(*map(np.asarray, values))
        return values

    shapes = tuple(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays)
    return jax.pure_callback(on_host, shapes, *arrays)


def check_call(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` that waits for its results and raises KernelError where an operation with `debug=True` refused.

    Without it a jitted program raises jax.errors.JaxRuntimeError or ValueError, as jax will have it, the KernelError's
    text at the end of its message.
    """

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
    """KernelError of the first place, in order, where `bad` holds."""
    if bad.any():
        raise KernelError(describe(*(int(index) for index in np.argwhere(bad)[0])))


def within(name: str, array: np.ndarray, stop: int, what: str) -> None:
    """Every number of `array` is in [0, stop), the bounds of `what`."""
    refuse_first(
        (array < 0) | (array >= stop),
        lambda *at: f"{name}[{', '.join(map(str, at))}] is {array[at]}, outside the {what} [0, {stop})",
    )


def check_held(name: str, lengths: np.ndarray, page_table: np.ndarray, pages: int, page_size: int) -> None:
    """Table entries name pages of the pool, and no row holds more tokens than its pages."""
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
    """The contents that `paged_attention` takes."""
    check_held("lengths", lengths, page_table, pages, page_size)


def check_packed(
    page_table: np.ndarray, kv_lens: np.ndarray, cu_q_lens: np.ndarray, *, pages: int, page_size: int, tokens: int
) -> None:
    """The contents that `prefill_attention` takes."""
    check_held("kv_lens", kv_lens, page_table, pages, page_size)
    require(cu_q_lens[0] == 0, f"cu_q_lens[0] is {cu_q_lens[0]}, not 0")
    rows = np.diff(cu_q_lens)
    refuse_first(rows < 0, lambda at: f"cu_q_lens falls from {cu_q_lens[at]} at {at} to {cu_q_lens[at + 1]}")
    require(cu_q_lens[-1] <= tokens, f"cu_q_lens ends at {cu_q_lens[-1]}, q has {tokens} rows")
    refuse_first(
        rows > kv_lens, lambda at: f"sequence {at} owns {rows[at]} rows of q, and kv_lens[{at}] is {kv_lens[at]} tokens"
    )


def check_places(page_ids: np.ndarray, offsets: np.ndarray, *, pages: int, page_size: int) -> None:
    """The contents that `write_kv_pages` takes."""
    within("page_ids", page_ids, pages, "pages of the pool")
    within("offsets", offsets, page_size, "tokens of a page")
