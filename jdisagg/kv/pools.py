"""KV page pools on the devices: head-major, sharded on heads; page 0 is the null page.

All layers of a stage are consecutive in one pool: page p of its i-th layer is page i * (num_pages + 1) + p. The
layers of a ring and of a draft model have a pool each, and so have layers that are kept apart (`PagePoolLayout`). A
quantised pool is a `QuantizedPages`.
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
from jdisagg.parallel.submesh import AXIS, BOTH, RingMesh, StageMesh, shards_here
from pallas_kernels.quantized import QuantizedPages, stored
from pallas_kernels.triton_attention import offsets_reach

POOL_SPEC = PartitionSpec(None, AXIS)


def pool_format(submesh: StageMesh, *, scaled: bool = False) -> Format | Sharding:
    """Returns the row-major format of a pool: kernels read a page as one run of memory. Scaled pages, numbers and
    scales, are only used in sizes that every platform lays out row-major by default."""
    return submesh.sharding(POOL_SPEC) if scaled else submesh.row_major(POOL_SPEC, 5)


class PagePoolLayout(NamedTuple):
    """How the pages of a layer group are stored."""

    format: Format | Sharding
    apart: bool = False  # True: each layer in a pool of its own

    @staticmethod
    def of(layout: KVLayout, num_layers: int, num_pages: int, submesh: StageMesh) -> PagePoolLayout:
        """Keeps layers apart if a GPU's kernels could not address all of one pool. See
        `pallas_kernels.triton_attention`."""
        numbers = num_layers * (num_pages + 1) * math.prod(layout.page_shape(submesh.tp))
        apart = submesh.devices[0].platform == "gpu" and not offsets_reach(numbers, layout.dtype)
        return PagePoolLayout(pool_format(submesh, scaled=layout.scaled), apart)


class PagesOfStage(Protocol):
    """The pages of one stage: layers `layers` of the model on `submesh`. pools[i] holds layer layers[i], or the only
    pool holds all of them."""

    @property
    def layout(self) -> KVLayout: ...
    @property
    def layers(self) -> range: ...
    @property
    def submesh(self) -> StageMesh: ...
    @property
    def draft(self) -> str: ...  # see `StageShape`
    @property
    def pools(self) -> list[Any]: ...
    @property
    def num_bytes(self) -> int: ...


class StagePages:
    """The KV pages of one stage, as `PagesOfStage`.

    A pool is [num_pages + 1, heads of all shards, parts, page_size, D]. A head is there once for every shard that
    holds it. If heads do not divide evenly among the shards, some head entries are padding
    (`core/layout/tensor_cut.py`). Programs take `pools` donated and return the list that replaces it.
    """

    def __init__(
        self,
        layout: KVLayout,
        layers: range,
        num_pages: int,
        submesh: StageMesh,
        *,
        joined: bool = False,
        draft: str = "",
    ) -> None:
        """Allocates the pools. `joined`: all layers in one pool. `draft`: see `StageShape`."""
        self.layout, self.layers, self.submesh, self.draft = layout, layers, submesh, draft
        pool, *_ = pools = abstract_pools(layout, len(layers), num_pages, submesh, joined=joined)
        zeros = partial(jax.tree.map, lambda part: jnp.zeros(part.shape, part.dtype), pool)
        make = jax.jit(zeros, out_shardings=pool_format(submesh, scaled=layout.scaled))
        # One call per pool, so that no two pools share a buffer; awaited, so that the calls never queue up.
        self.pools: list[Any] = [jax.block_until_ready(make()) for _ in pools]

    @property
    def num_bytes(self) -> int:
        """Returns the bytes of all shards together."""
        return sum(part.nbytes for part in jax.tree.leaves(self.pools))


def abstract_pool(layout: KVLayout, num_pages: int, submesh: StageMesh, layers: int = 1) -> Any:
    """Returns the shape and sharding of a pool of `layers` layers; nothing is allocated."""
    number, cut = layers * (num_pages + 1), pool_format(submesh, scaled=layout.scaled)
    heads, *page = layout.page_shape(submesh.tp)
    shape, scales = (number, heads * submesh.tp, *page), (number, heads * submesh.tp, layout.scales_shape()[1])
    return pool_of(layout, shape, scales, cut)


def pool_of(layout: KVLayout, shape: tuple[int, ...], scales: tuple[int, ...], cut: Any = None) -> Any:
    """Returns the numbers of a pool as the layout's dtype is stored: alone, or with scales."""
    numbers: Any = jax.ShapeDtypeStruct(shape, layout.dtype, sharding=cut)
    if not layout.scaled:
        return numbers
    scale_shape: Any = jax.ShapeDtypeStruct(scales, jnp.float32, sharding=cut)
    return QuantizedPages(numbers, scale_shape)


def abstract_pools(layout: KVLayout, num_layers: int, num_pages: int, submesh: StageMesh, *, joined: bool) -> list[Any]:
    """Returns the pools of a whole stage; nothing is allocated."""
    if joined:
        return [abstract_pool(layout, num_pages, submesh, num_layers)]
    return [abstract_pool(layout, num_pages, submesh)] * num_layers


def pools_of(stage: PagesOfStage, layers: range) -> slice:
    """Returns the slice of the stage's pools that hold these layers of the model."""
    if is_joined(stage):
        return slice(0, 1)
    return slice(layers.start - stage.layers.start, layers.stop - stage.layers.start)


def places_in(stage: PagesOfStage, layers: range, pages: Sequence[int] | np.ndarray) -> np.ndarray:
    """Returns the indices of `pages` in those pools: i32[n], or i32[layers, n] if all layers share one pool. The null
    page is page 0 of each pool."""
    pages = np.asarray(pages, np.int32)
    if not is_joined(stage):
        return pages
    places = np.arange(layers.start - stage.layers.start, layers.stop - stage.layers.start, dtype=np.int32)
    pages_per_layer = stored(stage.pools[0]).shape[0] // len(stage.layers)
    return np.where(pages == 0, 0, pages + places[:, None] * np.int32(pages_per_layer))


def is_joined(stage: PagesOfStage) -> bool:
    return len(stage.layers) > 1 == len(stage.pools)


# The KV pages of a ring, seen two ways: one pool per layer position, cut over the stages, and for each stage the pools
# of its layers as in any other stage.
#
# Both views share the same memory. A caller that is about to write asks for its view and stores the results in it; the
# other view is rebuilt when it is requested. If only decode steps write, nothing is rebuilt.

RING_POOL_SPEC = PartitionSpec(*BOTH)


def ring_pool_format(ring: RingMesh) -> Format:
    """Returns the row-major format of a ring's pool; see `pool_format`."""
    return ring.row_major(RING_POOL_SPEC, 5)


def abstract_ring_pool(layout: KVLayout, num_pages: int, ring: RingMesh) -> jax.ShapeDtypeStruct:
    """Returns the shape and sharding of one layer position's pool, with equally many pages per stage. Allocates
    nothing."""
    heads, *page = layout.page_shape(ring.tp)
    shape = (ring.pp * (num_pages + 1), heads * ring.tp, *page)
    return jax.ShapeDtypeStruct(shape, layout.dtype, sharding=ring_pool_format(ring))


class RingPages:
    """The KV pages of all stages of a ring."""

    def __init__(self, layout: KVLayout, cut: RingCut, num_pages: int, ring: RingMesh) -> None:
        self.layout, self.cut, self.ring = layout, cut, ring
        pool = abstract_ring_pool(layout, num_pages, ring)
        make = jax.jit(lambda: jnp.zeros(pool.shape, pool.dtype), out_shardings=ring_pool_format(ring))
        self._places: list[Array] = [jax.block_until_ready(make()) for _ in cut.numbers]
        self._views: list[list[Array]] = []  # of each stage, if that is the current view
        # shards by stage and position, kept beside the views
        self._padding: dict[tuple[int, int], dict[int, Array]] = {}
        self._shape = pool.shape
        self.stages = [RingStagePages(self, stage) for stage in range(cut.num_stages)]

    @property
    def pools(self) -> list[Array]:
        """Returns the pools by layer position for a program of the whole ring, whose results must replace them."""
        if self._views:
            self._places[:] = [self._joined(place) for place in range(len(self._places))]
            self._views, self._padding = [], {}
        return self._places

    def _joined(self, place: int) -> Array:
        shards = list[Array]()
        for stage, submesh in enumerate(self.ring.stages):
            layer = self.cut.places[stage][place]
            if layer is None:
                shards += self._padding[stage, place].values()
            elif submesh.local_devices:
                held = shards_here(self._views[stage][layer - self.cut.runs[stage].start])
                shards += [held[shard] for shard in sorted(held)]
        return self.ring.joined(shards, self._shape, RING_POOL_SPEC)

    def of_stage(self, stage: int) -> list[Array]:
        """Returns the pools of one stage, layer by layer, for writing. None if all its devices belong to other
        processes."""
        if not self._views:  # all stages at once: donating one shard of an array makes its other shards inaccessible
            shards = [shards_here(pool) for pool in self._places]
            self._views = [self._view(each, shards) for each in range(self.cut.num_stages)]
        return self._views[stage]

    def _view(self, stage: int, shards: list[dict[int, Array]]) -> list[Array]:
        stage_shards = [{shard: held[shard] for shard in self.ring.shards_of(stage)} for held in shards]
        for place, layer in enumerate(self.cut.places[stage]):
            if layer is None:
                self._padding[stage, place] = stage_shards[place]
        if not self.ring.shards_of(stage):
            return []
        run, submesh = self.cut.runs[stage], self.ring.stages[stage]
        layer_shards = [list(stage_shards[self.cut.place_of(stage, layer)].values()) for layer in run]
        return [submesh.join(each, POOL_SPEC, axis=1) for each in layer_shards]

    @property
    def num_bytes(self) -> int:
        """Returns the bytes of all devices together, padding included."""
        return len(self._places) * prod(self._shape) * jnp.dtype(self.layout.dtype).itemsize


class RingStagePages:
    """The pages of one stage of a ring; implements `PagesOfStage`."""

    draft = ""

    def __init__(self, pages: RingPages, stage: int) -> None:
        self._pages, self._stage = pages, stage
        self.layout, self.layers = pages.layout, pages.cut.runs[stage]
        self.submesh: StageMesh = pages.ring.stages[stage]

    @property
    def pools(self) -> list[Array]:
        return self._pages.of_stage(self._stage)

    @property
    def num_bytes(self) -> int:
        return self._pages.num_bytes // self._pages.cut.num_stages
