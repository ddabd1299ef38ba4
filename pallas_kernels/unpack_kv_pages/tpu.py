"""Unpacks KV on a TPU (Mosaic): blocks of packed pages are loaded by the grid's pipeline, pages are stored by one DMA
each.

The pools are written in place. Two blocks are being stored while the next is computed; pages for the null page are
padding and are never written.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.pack_kv_pages.tpu import (
    BlockSchedule,
    as_digests,
    compiler_params,
    cut_pages,
    digest,
    weights_of,
    whole_spec,
)
from pallas_kernels.wire_format import PackedPages, dequantise, words_of


@partial(jax.jit, static_argnames=("wire", "digests", "block_pages", "cores", "interpret"))
def unpack_kv_pages(
    pools: Sequence[Array],
    packed: PackedPages,
    page_ids: Array,
    *,
    wire: str,
    digests: bool = True,
    block_pages: int | None = None,
    cores: int | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[list[Array], Array | None]:
    """Computes `pallas_kernels.unpack_kv_pages`; page 0 is not changed. For wire "raw" also pools of 8-bit numbers."""
    pool, layers = pools[0], len(pools)
    cut = cut_pages(pool, layers, page_ids.shape[0], block_pages, cores)
    arrived = [part for part in packed[:2] if part is not None]
    weights = weights_of(pool.shape[2] * pool.shape[3], packed.values.shape[-1])
    shape = partial(jax.ShapeDtypeStruct, manual_axis_type=jax.typeof(pool).manual_axis_type)
    in_hbm = [pl.BlockSpec(memory_space=pltpu.HBM)] * layers
    sums = (1, pool.shape[1])
    room: Any = pltpu.VMEM((2, cut.block, *pool.shape[1:]), pool.dtype)
    found = pl.pallas_call(
        partial(unpack_item, cut=cut, wire=wire, digests=digests),
        out_shape=[
            *[shape(pool.shape, pool.dtype)] * layers,
            *[shape((layers, cut.count, *sums), jnp.int32)] * digests,
        ],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(cut.cores, cut.steps),
            in_specs=[*map(whole_spec, weights), *[cut.spec(part.shape[2:]) for part in arrived], *in_hbm],
            out_specs=[*in_hbm, *[cut.spec(sums)] * digests],
            scratch_shapes=[room, pltpu.SemaphoreType.DMA((2,))],
        ),
        input_output_aliases={1 + len(weights) + len(arrived) + layer: layer for layer in range(layers)},
        compiler_params=compiler_params(pool),
        interpret=interpret,
        name="unpack_kv_pages",
    )(page_ids, *weights, *arrived, *pools)
    return list(found[:layers]), as_digests(found[layers]) if digests else None


def unpack_item(ids_ref, page_weights_ref, scale_weights_ref, *refs, cut: BlockSchedule, wire: str, digests: bool):
    """Unpacks one block of one layer. `refs` are the packed pages, the pools as input and as output (the same), the
    digests, the buffers of two blocks and their semaphores."""
    parts = 1 if wire == "raw" else 2
    arrived, pools = refs[:parts], refs[parts + cut.layers : parts + 2 * cut.layers]
    digests_ref, room_ref, semaphores = refs[-3:]
    item, step = cut.here(), pl.program_id(1)

    def of_each_page(item, act):
        """Calls `act` on every page of the item that is to be kept, and on its id."""

        @pl.loop(0, cut.pages(item))
        def _(page):
            page_id = ids_ref[cut.first(item) + page]
            pl.when(page_id != 0)(lambda: act(page, page_id))

    def copy(pool, page_id, item, page):
        return pltpu.make_async_copy(room_ref.at[item % 2, page], pool.at[page_id], semaphores.at[item % 2])

    def settle(item):
        of_each_page(item, lambda page, page_id: copy(pools[0], page_id, item, page).wait())

    pl.when((step >= 2) & (item - 2 < cut.items))(lambda: settle(item - 2))

    @pl.when(item < cut.items)
    def _():
        @pl.loop(0, cut.pages(item))
        def _(page):
            values, scales = arrived[0][0, page], None
            kv_heads, halves, page_size, size = values.shape
            rows = values.reshape(kv_heads, halves * page_size, size)
            if wire == "raw":
                words = words_of(rows) if digests else None
            else:
                words, scales = rows.astype(jnp.int32), arrived[1][0, page]
                values = dequantise(words, scales, wire).reshape(kv_heads, halves, page_size, -1)
            room_ref[item % 2, page] = values.astype(room_ref.dtype)
            if digests:
                digests_ref[0, page] = digest(words, scales, page_weights_ref[...], scale_weights_ref[...])

        for layer, pool in enumerate(pools):

            @pl.when(item // cut.blocks == layer)
            def _(pool=pool):
                of_each_page(item, lambda page, page_id: copy(pool, page_id, item, page).start())

    @pl.when(step == cut.steps - 1)
    def _():
        pl.when((step >= 1) & (item - 1 < cut.items))(lambda: settle(item - 1))
        pl.when(item < cut.items)(lambda: settle(item))
