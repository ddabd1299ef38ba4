"""KV pages on the devices: one pool a layer, head-major, sharded on heads; page 0 is the null page."""

from __future__ import annotations

from typing import Protocol

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.layout import Format
from jax.sharding import PartitionSpec

from jdisagg.core.kv_layout import KVLayout
from jdisagg.parallel.submesh import AXIS, Submesh

POOL_SPEC = PartitionSpec(None, AXIS)


def pool_format(submesh: Submesh) -> Format:
    """A page is one run of memory: kernels take pools so, and would get a copy of one that is laid out otherwise."""
    return submesh.row_major(POOL_SPEC, 5)


class PagesOfStage(Protocol):
    """What shipments need of one stage: layers `layers` of the model on `submesh`; pools[i] holds layer layers[i]."""

    @property
    def layout(self) -> KVLayout: ...
    @property
    def layers(self) -> range: ...
    @property
    def submesh(self) -> Submesh: ...
    @property
    def pools(self) -> list[Array]: ...
    @property
    def num_bytes(self) -> int: ...


class StagePages:
    """The KV pages of one stage: layers `layers` of the model on `submesh`; pools[i] holds layer layers[i].

    A pool is [num_pages + 1, heads of all shards, parts, page_size, D]: a head is there once for every shard that
    holds it, and where the shards do not share the heads evenly, some places are padding (see `core/tensor_cut.py`).
    Programs take `pools` donated and hand back the list that replaces it.
    """

    def __init__(self, layout: KVLayout, layers: range, num_pages: int, submesh: Submesh) -> None:
        self.layout, self.layers, self.submesh = layout, layers, submesh
        pool = abstract_pool(layout, num_pages, submesh)
        make = jax.jit(lambda: jnp.zeros(pool.shape, pool.dtype), out_shardings=pool_format(submesh))
        # Each by its own call, so that no two pools share a buffer; awaited, so that the calls never pile up.
        self.pools: list[Array] = [jax.block_until_ready(make()) for _ in layers]

    @property
    def num_bytes(self) -> int:
        """Bytes of all shards together."""
        return sum(pool.nbytes for pool in self.pools)


def abstract_pool(layout: KVLayout, num_pages: int, submesh: Submesh) -> jax.ShapeDtypeStruct:
    """The shape and sharding of one layer's pool; nothing is allocated."""
    heads, *page = layout.page_shape(submesh.tp)
    shape = (num_pages + 1, heads * submesh.tp, *page)
    return jax.ShapeDtypeStruct(shape, layout.dtype, sharding=pool_format(submesh))
