"""Packing KV on a GPU (Pallas Triton): one program for each head of each page of each layer.

A program reads its head's page `TILE` numbers at a time, whole rows, and writes them where they travel; digests add up
in registers. A call takes a few layers, told apart by the program's number, and the next call writes into the same
buffers. Triton's arrays are powers of two: other head and page sizes are padded by masks, in registers alone. The two
halves of an int4 row are read apart, for arrays in registers cannot be cut.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.offsets import within_reach
from pallas_kernels.pack_kv_pages import xla
from pallas_kernels.wire_format import (
    STORED,
    PackedPages,
    bits_of,
    column_weights,
    encode,
    join_nibbles,
    packed_size,
    row_weights,
    scale_of,
    words_of,
)

LAYERS = 8  # of a call: each is a branch in the kernel
TILE = 4096  # numbers in a program's registers, 32 for each thread of four warps
PARAMS = pltriton.CompilerParams(num_warps=4, num_stages=2)


@partial(jax.jit, static_argnames=("wire", "digests", "layers_of_call", "interpret"))
def pack_kv_pages(
    pools: Sequence[Array],
    page_ids: Array,
    *,
    wire: str,
    digests: bool = True,
    layers_of_call: int = LAYERS,
    interpret: bool = False,
) -> PackedPages:
    """As `pallas_kernels.pack_kv_pages`; for wire "raw" any pools of 8 bits too. Those of 2 to 4 GiB go to XLA."""
    _, kv_heads, parts, page_size, size = pools[0].shape
    dtype, width = pools[0].dtype if wire == "raw" else STORED[wire], packed_size(size, wire)
    numbers = len(pools) * page_ids.shape[0] * kv_heads * parts * page_size * width
    if not (within_reach(pools[0].size, pools[0].dtype) and within_reach(numbers, dtype)):
        return xla.pack_kv_pages(pools, page_ids, wire=wire, digests=digests)
    count, rows = page_ids.shape[0], parts * page_size
    pools = [as_bytes(pool) for pool in pools]
    outs: list[Any] = [((rows, width), pools[0].dtype if wire == "raw" else dtype)]
    outs += [((rows,), jnp.float32)] if wire != "raw" else []
    outs += [((), jnp.int32)] if digests else []
    shape = partial(jax.ShapeDtypeStruct, manual_axis_type=jax.typeof(pools[0]).manual_axis_type)
    shapes = [shape((len(pools), count, kv_heads, *each), kind) for each, kind in outs]
    weights = weights_of(rows, width)
    found: Sequence[Array] = []
    for start in range(0, len(pools), layers_of_call):
        group = [pool.reshape(-1, kv_heads, rows, size) for pool in pools[start : start + layers_of_call]]
        given = [page_ids, *weights, *group]
        found = pl.pallas_call(
            partial(pack_page, start=start, layers=len(group), outs=len(outs), wire=wire, digests=digests),
            out_shape=shapes,
            grid=(count * kv_heads, len(group)),
            input_output_aliases={len(given) + at: at for at in range(len(found))},
            compiler_params=PARAMS,
            interpret=interpret,
            name="pack_kv_pages",
        )(*given, *found)
    values = found[0].reshape(len(pools), count, kv_heads, parts, page_size, width)
    values = lax.bitcast_convert_type(values, dtype) if wire == "raw" else values
    folded = lax.bitcast_convert_type(found[-1], jnp.uint32) if digests else None
    return PackedPages(values, None if wire == "raw" else found[1], folded)


def as_bytes(array: Array) -> Array:
    """Numbers of 8 bits as those bits: Triton has not all of their kinds on every chip."""
    return bits_of(array) if array.dtype.itemsize == 1 else array


def weights_of(rows: int, size: int) -> tuple[Array, Array]:
    """i32 [rows] of rows and [size + 1] of columns, the scale's last."""
    weights = row_weights(rows), column_weights(size)
    return jnp.asarray(weights[0].view(np.int32)), jnp.asarray(weights[1].view(np.int32))


def of_tiles(rows: int, size: int, act: Callable[[Any, Any], Any]) -> Any:
    """The sum of `act(row, column)` over the tiles of a page: i32[tile rows] and i32[columns], past the end too."""
    columns = pl.next_power_of_2(size)
    tile = max(1, min(TILE // columns, pl.next_power_of_2(rows)))
    column = jnp.arange(columns)
    return lax.fori_loop(
        0, pl.cdiv(rows, tile), lambda i, total: total + act(i * tile + jnp.arange(tile), column), jnp.int32(0)
    )


def pack_page(ids_ref, row_weights_ref, column_weights_ref, *refs, start, layers, outs, wire, digests):
    """One head of one page of one layer. `refs` are the pools, what earlier calls wrote, and what leaves."""
    pools, out_refs = refs[:layers], refs[-outs:]
    kv_heads, rows, size = pools[0].shape[1:]
    width = out_refs[0].shape[-1]
    page, head, layer = pl.program_id(0) // kv_heads, pl.program_id(0) % kv_heads, pl.program_id(1)
    page_id, at = ids_ref[page], (start + layer, page, head)

    def pack_tile(row, column):
        inside = row < rows
        own = inside[:, None] & (column < width)[None, :]

        def read(first):
            def read_layer(pool):
                place = pool.at[page_id, head, row[:, None], first + column[None, :]]
                return pltriton.load(place, mask=own, other=0)

            return lax.switch(layer, [partial(read_layer, pool) for pool in pools])

        halves = [read(first) for first in range(0, size, width)]
        scale = None
        if wire == "raw":
            (values,) = halves
            words = as_words(values) if digests else None
        else:
            halves = [half.astype(jnp.float32) for half in halves]
            tops = [jnp.max(jnp.abs(half), axis=1) for half in halves]
            scale, factor = scale_of(tops[0] if len(tops) == 1 else jnp.maximum(*tops), wire)
            codes = [encode(half, factor[:, None], wire) for half in halves]
            words = codes[0] if len(codes) == 1 else join_nibbles(*codes)
            values = words.astype(out_refs[0].dtype)
            pltriton.store(out_refs[1].at[*at, row], scale, mask=inside)
        pltriton.store(out_refs[0].at[*at, row[:, None], column[None, :]], values, mask=own)
        if not digests:
            return jnp.int32(0)
        return fold_tile(words, scale, row, column, row_weights_ref, column_weights_ref)

    total = of_tiles(rows, width, pack_tile)
    if digests:
        out_refs[-1][at] = total


def as_words(values: Any) -> Any:
    """Raw numbers -> i32, the bits of `words_of`."""
    return words_of(values).astype(jnp.int32)


def fold_tile(words, scale, row, column, row_weights_ref, column_weights_ref):
    """What a tile adds to a digest, i32: words [rows, D'] (codes count for their low 8 bits), scales f32[rows]."""
    rows, size = row_weights_ref.shape[0], column_weights_ref.shape[0] - 1
    words = words if scale is None else words & 0xFF
    weights = pltriton.load(column_weights_ref.at[column], mask=column < size, other=0)
    sums = jnp.sum(words * weights[None, :], axis=1)
    if scale is not None:
        sums += as_words(scale) * column_weights_ref[size]
    return jnp.sum(sums * pltriton.load(row_weights_ref.at[row], mask=row < rows, other=0))
