"""KV pages on the devices: pools of pages, head-major, sharded on heads; page 0 is the null page.

All layers of a stage lie in one pool, one behind the other: page p of its i-th layer is page i * (num_pages + 1) + p.
A ring's layers and a draft model's have a pool each, and so have those that are kept apart (`PoolForm`). Quantised, a
pool is `QuantizedPages`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import PartitionSpec, Sharding

from jdisagg.core.kv_layout import KVLayout
from jdisagg.parallel.submesh import AXIS, Submesh
from pallas_kernels.offsets import within_reach
from pallas_kernels.quantized import QuantizedPages, stored

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
        """Apart where a GPU's kernels would not reach all of one pool: see `pallas_kernels.offsets`."""
        numbers = num_layers * (num_pages + 1) * math.prod(layout.page_shape(submesh.tp))
        apart = submesh.devices[0].platform == "gpu" and not within_reach(numbers, layout.dtype)
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
    holds it, and where the shards do not share the heads evenly, some places are padding (see `core/tensor_cut.py`).
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
