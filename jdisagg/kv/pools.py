"""KV pages on the devices: one pool a layer, head-major, sharded on heads; page 0 is the null page.

Of a stage whose programs go round their layers (`engine/looped_layers.py`) all layers lie in one pool, one behind the
other: page p of its i-th layer is page i * (num_pages + 1) + p.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
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
    """What shipments need of one stage: layers `layers` of the model on `submesh`; pools[i] holds layer layers[i], or
    the only one all of them."""

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
    """The KV pages of one stage, as `PagesOfStage`.

    A pool is [num_pages + 1, heads of all shards, parts, page_size, D]: a head is there once for every shard that
    holds it, and where the shards do not share the heads evenly, some places are padding (see `core/tensor_cut.py`).
    Programs take `pools` donated and hand back the list that replaces it.
    """

    def __init__(
        self, layout: KVLayout, layers: range, num_pages: int, submesh: Submesh, *, joined: bool = False
    ) -> None:
        """joined: all layers in one pool."""
        self.layout, self.layers, self.submesh = layout, layers, submesh
        pool, *_ = pools = abstract_pools(layout, len(layers), num_pages, submesh, joined=joined)
        make = jax.jit(lambda: jnp.zeros(pool.shape, pool.dtype), out_shardings=pool_format(submesh))
        # Each by its own call, so that no two pools share a buffer; awaited, so that the calls never pile up.
        self.pools: list[Array] = [jax.block_until_ready(make()) for _ in pools]

    @property
    def num_bytes(self) -> int:
        """Bytes of all shards together."""
        return sum(pool.nbytes for pool in self.pools)


def abstract_pool(layout: KVLayout, num_pages: int, submesh: Submesh, layers: int = 1) -> jax.ShapeDtypeStruct:
    """The shape and sharding of a pool of so many layers; nothing is allocated."""
    heads, *page = layout.page_shape(submesh.tp)
    shape = (layers * (num_pages + 1), heads * submesh.tp, *page)
    return jax.ShapeDtypeStruct(shape, layout.dtype, sharding=pool_format(submesh))


def abstract_pools(
    layout: KVLayout, num_layers: int, num_pages: int, submesh: Submesh, *, joined: bool
) -> list[jax.ShapeDtypeStruct]:
    """Of a whole stage."""
    if joined:
        return [abstract_pool(layout, num_pages, submesh, num_layers)]
    return [abstract_pool(layout, num_pages, submesh)] * num_layers


def pools_of(stage: PagesOfStage, layers: range) -> slice:
    """Those of the stage's pools that hold these layers of the model."""
    if is_joined(stage):
        return slice(0, 1)
    return slice(layers.start - stage.layers.start, layers.stop - stage.layers.start)


def places_in(stage: PagesOfStage, layers: range, pages: Sequence[int] | np.ndarray) -> np.ndarray:
    """Where `pages` are in those pools: i32[n], of layers in one pool i32[layers, n]. The null page is the first."""
    pages = np.asarray(pages, np.int32)
    if not is_joined(stage):
        return pages
    places = np.arange(layers.start - stage.layers.start, layers.stop - stage.layers.start, dtype=np.int32)
    each = stage.pools[0].shape[0] // len(stage.layers)
    return np.where(pages == 0, 0, pages + places[:, None] * np.int32(each))


def is_joined(stage: PagesOfStage) -> bool:
    return len(stage.layers) > 1 == len(stage.pools)
