"""The KV pages of a ring, seen two ways: a pool for each place, cut over the stages, and of each stage the pools of its
layers, as any other stage's.

Both hold the same memory. Whoever is about to write asks for its view and hands back what it made; the other view is
made anew when it is asked for. Where nothing but decode steps write, nothing is made anew.
"""

from __future__ import annotations

from math import prod

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.layout import Format
from jax.sharding import PartitionSpec

from jdisagg.core.kv_layout import KVLayout
from jdisagg.core.stages import RingCut
from jdisagg.kv.pools import POOL_SPEC
from jdisagg.parallel.ring import BOTH, RingMesh
from jdisagg.parallel.submesh import Submesh, shards_here

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
