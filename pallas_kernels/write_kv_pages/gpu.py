"""Writing KV on a GPU (Pallas Triton): one program a token stores the row of all its heads, in place.

Rows for the null page are passed over. Two programs that name one place race: each number is then of either row.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.paged_attention.gpu import within_reach
from pallas_kernels.quantized import QuantizedPages, quantize_rows, stored
from pallas_kernels.write_kv_pages import xla


@partial(jax.jit, static_argnames=("interpret",))
def write_kv_pages(
    kv_pages: Array | QuantizedPages,
    k: Array,
    v: Array | None,
    page_ids: Array,
    offsets: Array,
    *,
    interpret: bool = False,
) -> Array | QuantizedPages:
    """As `pallas_kernels.write_kv_pages`; page 0 stays as it is. Pools of bytes of 2 to 4 GiB go to XLA."""
    if not within_reach(kv_pages):
        return xla.write_kv_pages(kv_pages, k, v, page_ids, offsets)
    rows: Array | QuantizedPages
    if isinstance(kv_pages, QuantizedPages):
        rows = QuantizedPages(*quantize_rows(xla.joined(k, v), kv_pages.values.dtype))
    else:
        rows = xla.joined(k, v).astype(kv_pages.dtype)
    pools, places = jax.tree.leaves(kv_pages), jax.tree.leaves((rows, page_ids, offsets))
    return pl.pallas_call(
        write_token,
        out_shape=jax.tree.map(
            lambda part: jax.ShapeDtypeStruct(
                part.shape, part.dtype, manual_axis_type=jax.typeof(part).manual_axis_type
            ),
            kv_pages,
        ),
        grid=k.shape[:1],
        input_output_aliases={len(places) + part: part for part in range(len(pools))},
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="write_kv_pages",
    )(rows, page_ids, offsets, kv_pages)


def write_token(rows: Any, page_ids_ref, offsets_ref, _, pool_ref, *scales_ref):
    """One token. `pool_ref` is the pool, read and written; quantised pages have scales as well."""
    token = pl.program_id(0)
    page, offset = page_ids_ref[token], offsets_ref[token]
    _, kv_heads, parts, page_size, size = pool_ref.shape
    line, dims = jnp.arange(pl.next_power_of_2(parts * kv_heads)), jnp.arange(pl.next_power_of_2(size))
    head, which = line // parts, line % parts  # K and V of a head are neighbours in `rows`
    real = line < parts * kv_heads
    rows_ref: Any = stored(rows)
    own = real[:, None] & (dims < size)[None, :]

    @pl.when(page != 0)
    def _():
        numbers = pltriton.load(rows_ref.at[token, head[:, None], which[:, None], dims[None, :]], mask=own)
        pltriton.store(pool_ref.at[page, head[:, None], which[:, None], offset, dims[None, :]], numbers, mask=own)
        if scales_ref:
            scales = pltriton.load(rows.scales.at[token, head, which], mask=real)
            pltriton.store(scales_ref[0].at[page, head, which * page_size + offset], scales, mask=real)
