"""Unpacking KV on a GPU (Pallas Triton): one program for each head of each packed page of each layer, pools in place.

The way back of `pack_kv_pages.gpu`, tile by tile; pages for the null page are padding and are never written.
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.pack_kv_pages.gpu import (
    LAYERS,
    PARAMS,
    as_bytes,
    as_words,
    fold_tile,
    of_tiles,
    weights_of,
    within_reach,
)
from pallas_kernels.unpack_kv_pages import xla
from pallas_kernels.wire_format import PackedPages, cut_nibbles, decode_e4m3


@partial(jax.jit, static_argnames=("wire", "digests", "layers_of_call", "interpret"))
def unpack_kv_pages(
    pools: Sequence[Array],
    packed: PackedPages,
    page_ids: Array,
    *,
    wire: str,
    digests: bool = True,
    layers_of_call: int = LAYERS,
    interpret: bool = False,
) -> tuple[list[Array], Array | None]:
    """As `pallas_kernels.unpack_kv_pages`; page 0 stays as it is. For wire "raw" any pools of 8 bits too."""
    if not all(within_reach(array.size, array.dtype) for array in (pools[0], packed.values)):
        return xla.unpack_kv_pages(pools, packed, page_ids, wire=wire, digests=digests)
    dtype, pools = pools[0].dtype, [as_bytes(pool) for pool in pools]
    layers, count, kv_heads, halves, page_size, packed_size = packed.values.shape
    rows, size = halves * page_size, pools[0].shape[4]
    values = packed.values if wire != "raw" else as_bytes(packed.values)
    values = values.reshape(layers, count, kv_heads, rows, packed_size)
    arrived = [values] if packed.scales is None else [values, packed.scales]
    given = [page_ids, *weights_of(rows, packed_size), *arrived]
    shape = partial(jax.ShapeDtypeStruct, manual_axis_type=jax.typeof(pools[0]).manual_axis_type)
    written, sums = [], []
    for start in range(0, layers, layers_of_call):
        group = [pool.reshape(-1, kv_heads, rows, size) for pool in pools[start : start + layers_of_call]]
        folded = [shape((len(group), count, kv_heads), jnp.int32)] * digests
        found = pl.pallas_call(
            partial(unpack_page, start=start, layers=len(group), parts=len(arrived), wire=wire, digests=digests),
            out_shape=[*[shape(pool.shape, pool.dtype) for pool in group], *folded],
            grid=(count * kv_heads, len(group)),
            input_output_aliases={len(given) + at: at for at in range(len(group))},
            compiler_params=PARAMS,
            interpret=interpret,
            name="unpack_kv_pages",
        )(*given, *group)
        written += [lax.bitcast_convert_type(pool.reshape(pools[0].shape), dtype) for pool in found[: len(group)]]
        sums += found[len(group) :]
    return written, lax.bitcast_convert_type(jnp.concatenate(sums), jnp.uint32) if digests else None


def unpack_page(ids_ref, row_weights_ref, column_weights_ref, *refs, start, layers, parts, wire, digests):
    """One head of one packed page. `refs` are what arrived, the pools as they came and as they are written (the same),
    and the digests."""
    arrived, pools, digests_ref = refs[:parts], refs[parts + layers : parts + 2 * layers], refs[-1]
    kv_heads, rows, size = pools[0].shape[1:]
    packed_size = arrived[0].shape[-1]
    page, head, layer = pl.program_id(0) // kv_heads, pl.program_id(0) % kv_heads, pl.program_id(1)
    page_id, at = ids_ref[page], (start + layer, page, head)

    def unpack_tile(row, column):
        inside = row < rows
        own = inside[:, None] & (column < packed_size)[None, :]
        values = pltriton.load(arrived[0].at[*at, row[:, None], column[None, :]], mask=own, other=0)
        scale = None
        if wire == "raw":
            numbers, words = [values], as_words(values) if digests else None
        else:
            scale = pltriton.load(arrived[1].at[*at, row], mask=inside, other=0.0)
            words = values.astype(jnp.int32)
            numbers = [number * scale[:, None] for number in decode(words, wire)]

        for index, pool in enumerate(pools):

            @pl.when((layer == index) & (page_id != 0))
            def _(pool=pool):
                for first, number in zip(range(0, size, packed_size), numbers, strict=True):
                    place = pool.at[page_id, head, row[:, None], first + column[None, :]]
                    pltriton.store(place, number.astype(pool.dtype), mask=own)

        if not digests:
            return jnp.int32(0)
        return fold_tile(words, scale, row, column, row_weights_ref, column_weights_ref)

    total = of_tiles(rows, packed_size, unpack_tile)
    if digests:
        digests_ref[layer, page, head] = total


def decode(codes, wire: str) -> list:
    """i32 codes -> f32 numbers before their scale: one array, or for int4 the two halves of the rows."""
    if wire == "int4":
        return [half.astype(jnp.float32) for half in cut_nibbles(codes)]
    return [decode_e4m3(codes) if wire == "fp8" else codes.astype(jnp.float32)]
