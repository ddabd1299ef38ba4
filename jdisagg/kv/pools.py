"""KV pages on the devices: pools of pages, head-major, sharded on heads; page 0 is the null page.

All layers of a stage lie in one pool, one behind the other: page p of its i-th layer is page i * (num_pages + 1) + p.
A ring's layers and a draft model's have a pool each, and so have those that are kept apart (`PoolForm`). Quantised, a
pool is `QuantizedPages`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.layout import Format
from jax.sharding import PartitionSpec, Sharding

from jdisagg.core.layout.kv_layout import KVLayout
from jdisagg.core.layout.stages import RingCut
from jdisagg.parallel.submesh import AXIS, BOTH, RingMesh, Submesh, shards_here
from pallas_kernels.quantized import QuantizedPages, stored
from pallas_kernels.triton_attention import offsets_reach

POOL_SPEC = PartitionSpec(None, AXIS)


def pool_format(submesh: Submesh, *, scaled: bool = False) -> Format | Sharding:
    """A page is one run of memory: kernels take pools so, and would get a copy of one that is laid out otherwise.

    Scaled pages, numbers and scales, are only taken of sizes that every platform lays out so by itself.
    """
    return submesh.sharding(POOL_SPEC) if scaled else submesh.row_major(POOL_SPEC, 5)


class PoolForm(NamedTuple):
    """How a layer group's pages are kept."""

    format: Format | Sharding
    apart: bool = False  # each layer's in a pool of its own

    @staticmethod
    def of(layout: KVLayout, num_layers: int, num_pages: int, submesh: Submesh) -> PoolForm:
        """Apart where a GPU's kernels would not reach all of one pool: see `pallas_kernels.triton_attention`."""
        numbers = num_layers * (num_pages + 1) * math.prod(layout.page_shape(submesh.tp))
        apart = submesh.devices[0].platform == "gpu" and not offsets_reach(numbers, layout.dtype)
        return PoolForm(pool_format(submesh, scaled=layout.scaled), apart)


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
    def draft(self) -> str: ...  # see `StageShape`
    @property
    def pools(self) -> list[Any]: ...
    @property
    def num_bytes(self) -> int: ...


class StagePages:
    """The KV pages of one stage, as `PagesOfStage`.

    A pool is [num_pages + 1, heads of all shards, parts, page_size, D]: a head is there once for every shard that
    holds it; where the shards do not share the heads evenly, some places are padding (`core/layout/tensor_cut.py`).
    Programs take `pools` donated and hand back the list that replaces it.
    """

    def __init__(
        self,
        layout: KVLayout,
        layers: range,
        num_pages: int,
        submesh: Submesh,
        *,
        joined: bool = False,
        draft: str = "",
    ) -> None:
        """joined: all layers in one pool. draft: see `StageShape`."""
        self.layout, self.layers, self.submesh, self.draft = layout, layers, submesh, draft
        pool, *_ = pools = abstract_pools(layout, len(layers), num_pages, submesh, joined=joined)
        zeros = partial(jax.tree.map, lambda part: jnp.zeros(part.shape, part.dtype), pool)
        make = jax.jit(zeros, out_shardings=pool_format(submesh, scaled=layout.scaled))
        # Each by its own call, so that no two pools share a buffer; awaited, so that the calls never pile up.
        self.pools: list[Any] = [jax.block_until_ready(make()) for _ in pools]

    @property
    def num_bytes(self) -> int:
        """Bytes of all shards together."""
        return sum(part.nbytes for part in jax.tree.leaves(self.pools))


def abstract_pool(layout: KVLayout, num_pages: int, submesh: Submesh, layers: int = 1) -> Any:
    """The shape and sharding of a pool of so many layers; nothing is allocated."""
    number, cut = layers * (num_pages + 1), pool_format(submesh, scaled=layout.scaled)
    heads, *page = layout.page_shape(submesh.tp)
    shape, scales = (number, heads * submesh.tp, *page), (number, heads * submesh.tp, layout.scales_shape()[1])
    return pool_of(layout, shape, scales, cut)


def pool_of(layout: KVLayout, shape: tuple[int, ...], scales: tuple[int, ...], cut: Any = None) -> Any:
    """Numbers of such a shape as the layout's dtype is kept: alone, or with scales."""
    numbers: Any = jax.ShapeDtypeStruct(shape, layout.dtype, sharding=cut)
    if not layout.scaled:
        return numbers
    held: Any = jax.ShapeDtypeStruct(scales, jnp.float32, sharding=cut)
    return QuantizedPages(numbers, held)


def abstract_pools(layout: KVLayout, num_layers: int, num_pages: int, submesh: Submesh, *, joined: bool) -> list[Any]:
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
    each = stored(stage.pools[0]).shape[0] // len(stage.layers)
    return np.where(pages == 0, 0, pages + places[:, None] * np.int32(each))


def is_joined(stage: PagesOfStage) -> bool:
    return len(stage.layers) > 1 == len(stage.pools)


# The KV pages of a ring, seen two ways: a pool for each place, cut over the stages, and of each stage the pools
# of its layers, as any other stage's.
#
# Both hold the same memory. Whoever is about to write asks for its view and hands back what it made; the other
# view is made anew when it is asked for. Where nothing but decode steps write, nothing is made anew.

RING_POOL_SPEC = PartitionSpec(*BOTH)


def ring_pool_format(ring: RingMesh) -> Format:
    """See `pools.pool_format`."""
    return ring.row_major(RING_POOL_SPEC, 5)


def abstract_ring_pool(layout: KVLayout, num_pages: int, ring: RingMesh) -> jax.ShapeDtypeStruct:
    """The shape and sharding of one place's pool: as many pages for each stage. Nothing is allocated."""
    heads, *page = layout.page_shape(ring.tp)
    shape = (ring.pp * (num_pages + 1), heads * ring.tp, *page)
    return jax.ShapeDtypeStruct(shape, layout.dtype, sharding=ring_pool_format(ring))


class RingPages:
    """All stages' pages."""

    def __init__(self, layout: KVLayout, cut: RingCut, num_pages: int, ring: RingMesh) -> None:
        self.layout, self.cut, self.ring = layout, cut, ring
        pool = abstract_ring_pool(layout, num_pages, ring)
        make = jax.jit(lambda: jnp.zeros(pool.shape, pool.dtype), out_shardings=ring_pool_format(ring))
        self._places: list[Array] = [jax.block_until_ready(make()) for _ in cut.numbers]
        self._views: list[list[Array]] = []  # of each stage, where that is how they lie now
        self._padding: dict[tuple[int, int], dict[int, Array]] = {}  # shards by stage and place, beside the views
        self._shape = pool.shape
        self.stages = [RingStagePages(self, stage) for stage in range(cut.num_stages)]

    @property
    def pools(self) -> list[Array]:
        """By place, about to be written by a program of the whole ring, whose results are to take their places."""
        if self._views:
            self._places[:] = [self._joined(place) for place in range(len(self._places))]
            self._views, self._padding = [], {}
        return self._places

    def _joined(self, place: int) -> Array:
        found = list[Array]()
        for stage, submesh in enumerate(self.ring.stages):
            layer = self.cut.places[stage][place]
            if layer is None:
                found += self._padding[stage, place].values()
            elif submesh.local_devices:
                held = shards_here(self._views[stage][layer - self.cut.runs[stage].start])
                found += [held[shard] for shard in sorted(held)]
        return self.ring.joined(found, self._shape, RING_POOL_SPEC)

    def of_stage(self, stage: int) -> list[Array]:
        """The stage's, layer by layer, about to be written; none where all its devices are other processes'."""
        if not self._views:  # all stages at once: an array of which one shard is donated gives no other any more
            shards = [shards_here(pool) for pool in self._places]
            self._views = [self._view(each, shards) for each in range(self.cut.num_stages)]
        return self._views[stage]

    def _view(self, stage: int, shards: list[dict[int, Array]]) -> list[Array]:
        mine = [{shard: held[shard] for shard in self.ring.shards_of(stage)} for held in shards]
        for place, layer in enumerate(self.cut.places[stage]):
            if layer is None:
                self._padding[stage, place] = mine[place]
        if not self.ring.shards_of(stage):
            return []
        run, submesh = self.cut.runs[stage], self.ring.stages[stage]
        found = [list(mine[self.cut.place_of(stage, layer)].values()) for layer in run]
        return [submesh.join(each, POOL_SPEC, axis=1) for each in found]

    @property
    def num_bytes(self) -> int:
        """Bytes of all devices together, those of padding among them."""
        return len(self._places) * prod(self._shape) * jnp.dtype(self.layout.dtype).itemsize


class RingStagePages:
    """One stage's pages; see `pools.PagesOfStage`."""

    draft = ""

    def __init__(self, pages: RingPages, stage: int) -> None:
        self._pages, self._stage = pages, stage
        self.layout, self.layers = pages.layout, pages.cut.runs[stage]
        self.submesh: Submesh = pages.ring.stages[stage]

    @property
    def pools(self) -> list[Array]:
        return self._pages.of_stage(self._stage)

    @property
    def num_bytes(self) -> int:
        return self._pages.num_bytes // self._pages.cut.num_stages
