"""Tunes the operations that move pages on a GPU: writes, packing and unpacking, by Mosaic GPU's kernel or by XLA.

These kernels have no block sizes: the choice is which of the two codes runs.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels import mosaic
from pallas_kernels.pack_kv_pages import hopper as pack_hopper
from pallas_kernels.pack_kv_pages import on_gpu as pack_on_gpu
from pallas_kernels.pack_kv_pages import reference as pack_xla
from pallas_kernels.quantized import LARGEST, QuantizedPages
from pallas_kernels.tuning import MOSAIC
from pallas_kernels.unpack_kv_pages import hopper as unpack_hopper
from pallas_kernels.unpack_kv_pages import on_gpu as unpack_on_gpu
from pallas_kernels.unpack_kv_pages import reference as unpack_xla
from pallas_kernels.wire_format import PackedPages
from pallas_kernels.write_kv_pages import hopper as write_hopper
from pallas_kernels.write_kv_pages import on_gpu as write_on_gpu
from pallas_kernels.write_kv_pages import xla as write_xla

WRITE, PACK, UNPACK = "write_kv_pages", "pack_kv_pages", "unpack_kv_pages"
MOVES = WRITE, PACK, UNPACK
CODES = {  # choices: the rule's own, Mosaic GPU's, XLA's
    WRITE: (write_on_gpu, write_hopper.write_kv_pages, write_xla.write_kv_pages),
    PACK: (pack_on_gpu, pack_hopper.pack_kv_pages, pack_xla.pack_kv_pages),
    UNPACK: (unpack_on_gpu, unpack_hopper.unpack_kv_pages, unpack_xla.unpack_kv_pages),
}
SPARE = 2  # pages in the pool per moved page


def choices(operation: str, rows: Array, pool: Array | QuantizedPages) -> Iterator[dict[str, int]]:
    """Yields the choices of code that may run."""
    yield {}
    able = mosaic.copies(rows, pool) if operation == WRITE else mosaic.carries(rows, numbers_of(pool))
    if able:
        yield from ({MOSAIC: 1}, {MOSAIC: 0})


def numbers_of(pool: Array | QuantizedPages) -> Array:
    """Returns the numbers of a pool; scales are moved by XLA."""
    return pool.values if isinstance(pool, QuantizedPages) else pool


def arrays_of(operation: str, rows: int, heads: int, page_size: int, size: int, dtype: str) -> tuple[Any, ...]:
    """Returns rows by which a choice is looked up, the pool, and the page ids, of `rows` rows or of `rows` pages."""
    rng = np.random.default_rng(0)
    pages = rows if operation != WRITE else -(-rows // page_size)
    shape = SPARE * pages + 1, heads, 2, page_size, size
    quantised = dtype in LARGEST
    pool: Any = jnp.zeros(shape, dtype)
    if quantised and operation == WRITE:
        pool = QuantizedPages(pool, jnp.ones((*shape[:2], 2 * page_size), jnp.float32))
    held = jnp.zeros((rows, heads, size), "bfloat16" if quantised and operation == WRITE else dtype)
    if operation != WRITE:
        return held, pool, jnp.asarray(1 + rng.permutation(SPARE * pages)[:pages], jnp.int32)
    place = page_size + rng.permutation(SPARE * pages * page_size)[:rows]
    return held, pool, jnp.asarray(place // page_size, jnp.int32), jnp.asarray(place % page_size, jnp.int32)


def mover(operation: str, choice: dict[str, int], interpret: bool) -> Callable[..., Any]:
    """Returns the operation on `arrays_of`, which updates the pool in place call after call."""
    code = CODES[operation][0 if not choice else 1 if choice[MOSAIC] else 2]
    options: dict[str, Any] = {"interpret": True} if interpret and choice.get(MOSAIC) else {}
    if operation == PACK:
        program = jax.jit(partial(code, wire="raw", **options))
        return lambda rows, pool, page_ids: program([pool], page_ids)
    state: dict[str, Any] = {}
    if operation == WRITE:
        write = jax.jit(partial(code, **options), donate_argnums=0)

        def written(rows: Array, pool: Any, page_ids: Array, offsets: Array) -> Any:
            state["pool"] = write(state.get("pool", jax.tree.map(jnp.copy, pool)), rows, rows, page_ids, offsets)
            return state["pool"]

        return written
    unpack = jax.jit(partial(code, wire="raw", **options), donate_argnums=0)

    def unpacked(rows: Array, pool: Array, page_ids: Array) -> Any:
        packed = state.setdefault("packed", PackedPages(pool[page_ids][None], None, None))
        state["pools"], digests = unpack(state.get("pools", [jnp.copy(pool)]), packed, page_ids)
        return state["pools"], digests

    return unpacked
