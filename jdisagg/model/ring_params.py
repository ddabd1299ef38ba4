"""Weights of a decode ring: each leaf stacks the corresponding leaves of all stages and is cut over "pp".

A layer's leaf is [stages, ...] of one stage's leaf in `params.py`; padding layers are zeros. Embedding and head are cut
by rows over all shards of the ring, padded to a multiple.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jdisagg.core.layout.stages import RingCut
from jdisagg.core.model_config import AS_MADE, ModelConfig, WeightFormat
from jdisagg.model.names import Index, LeafSpec, ring_leaves
from jdisagg.model.network import Stage, VocabularyLayout
from jdisagg.model.params import SUMMED, StageParams, StageTree, abstract_stage, check_depth, check_leaves, shards_of
from jdisagg.model.products import layout_of
from jdisagg.model.sources import TensorSource
from jdisagg.parallel.submesh import BOTH, RING, RingMesh

ENDS = ("embed", "head", "head_scale")  # leaves cut over the whole ring


@dataclass(frozen=True)
class RingParams(StageParams):
    """Parameters of all stages of a ring; under `shard_map` a layer's leaves have a first dimension of one."""

    stacked: tuple[bool, ...] = ()  # per leaf: has a dimension of stages

    def merge(self, leaves: list[jax.Array]) -> Stage:
        mine = [
            leaf.reshape(leaf.shape[1:]) if stacked else leaf
            for leaf, stacked in zip(leaves, self.stacked, strict=True)
        ]
        return super().merge(mine)


@dataclass(frozen=True)
class RingPlan:
    """The shapes of a ring's leaves and the recipe of each."""

    params: RingParams
    abstract: StageTree
    rules: list[list[LeafSpec | None]]  # [leaf][stage]; None: padding


def ring_outline(
    config: ModelConfig, cut: RingCut, ring: RingMesh, dtype: DTypeLike, weights: WeightFormat = AS_MADE
) -> RingPlan:
    """Returns the shapes of a ring's weights; nothing is read or allocated."""
    out_first, spread = layout_of(ring.devices[0].platform), VocabularyLayout(BOTH, len(ring.devices))
    weights = alike(weights, cut)
    abstract = abstract_stage(config, cut.numbers, ring.tp, ring.axis, dtype, weights, out_first, spread)
    table = abstract.rules(ring_leaves(config, cut.numbers))
    own = [abstract.rules(ring_leaves(config, _filled(cut, stage))) for stage in range(cut.num_stages)]
    rules = [
        [own[stage][leaf] if _has_own_leaf(cut, stage, path) else None for stage in range(cut.num_stages)]
        for leaf, path in enumerate(abstract.paths)
    ]
    specs = [_spec(rule, path, ring.tp) for rule, path in zip(table, abstract.paths, strict=True)]
    leaves = [
        _whole(rule, path, local, ring.sharding(spec), ring)
        for rule, path, local, spec in zip(table, abstract.paths, abstract.leaves, specs, strict=True)
    ]
    summed = [abstract.forms[path] for path in abstract.paths if path.endswith(SUMMED)]
    reductions = sum(2 if form.is_scaled else 1 for form in summed)
    stacked = tuple(path.startswith("layers.") for path in abstract.paths)
    params = RingParams(abstract.graphdef, abstract.treedef, leaves, specs, reductions, stacked)
    return RingPlan(params, abstract, rules)


def load_ring(
    source: TensorSource,
    config: ModelConfig,
    cut: RingCut,
    ring: RingMesh,
    dtype: DTypeLike,
    weights: WeightFormat = AS_MADE,
) -> RingParams:
    """Loads the shards of this process's devices, each on its own. Raises what `load_stage` raises."""
    check_depth(source, config, range(config.num_layers))
    outline = ring_outline(config, cut, ring, dtype, weights)
    check_leaves(source, [rule for rules in outline.rules for rule in rules if rule is not None])
    leaves = [_loaded(source, outline, index, ring) for index in range(len(outline.params.leaves))]
    return replace(outline.params, leaves=leaves)


def alike(weights: WeightFormat, cut: RingCut) -> WeightFormat:
    """Returns a format in which a layer index is at full precision in all stages if it is in one, because stages share
    a program."""
    full = set(weights.full)
    for index, number in enumerate(cut.numbers):
        for layer in (row[index] for row in cut.places):
            names = [path.split(".", 1) for path in weights.full if path.startswith(f"{layer}.")]
            full.update(f"{number}.{name}" for _, name in names)
    return replace(weights, full=frozenset(full))


def _filled(cut: RingCut, stage: int) -> list[int]:
    """Returns the stage's layers, with another stage's layer where it has padding."""
    pairs = zip(cut.places[stage], cut.numbers, strict=True)
    return [number if layer is None else layer for layer, number in pairs]


def _has_own_leaf(cut: RingCut, stage: int, path: str) -> bool:
    """Returns True if the stage has weights of its own for the leaf."""
    return not path.startswith("layers.") or cut.places[stage][int(path.split(".")[1])] is not None


def _spec(rule: LeafSpec, path: str, tp: int) -> PartitionSpec:
    if path in ENDS:
        return PartitionSpec(BOTH)
    if not path.startswith("layers."):
        return PartitionSpec()
    if tp == 1 or rule.axis is None:
        return PartitionSpec(RING)
    return PartitionSpec(RING, *[None] * rule.axis, BOTH[1])


def _whole(
    rule: LeafSpec, path: str, local: jax.ShapeDtypeStruct, sharding: NamedSharding, ring: RingMesh
) -> jax.ShapeDtypeStruct:
    """Returns the ring's global leaf from one shard's."""
    if path in ENDS:
        return jax.ShapeDtypeStruct(
            (local.shape[0] * len(ring.devices), *local.shape[1:]), local.dtype, sharding=sharding
        )
    shape = tuple(size * ring.tp if axis == rule.axis else size for axis, size in enumerate(local.shape))
    whole = (ring.pp, *shape) if path.startswith("layers.") else shape
    return jax.ShapeDtypeStruct(whole, local.dtype, sharding=sharding)


def _loaded(source: TensorSource, outline: RingPlan, index: int, ring: RingMesh) -> jax.Array:
    leaf, path = outline.params.leaves[index], outline.abstract.paths[index]
    stacked, rules = outline.params.stacked[index], outline.rules[index]

    def shards(rule: LeafSpec, number: int) -> Callable[[int], np.ndarray]:
        return shards_of(source, outline.abstract, path, rule, number, leaf)

    def shard_at(found: Index | None) -> np.ndarray:
        slices = found or (slice(None),) * len(leaf.shape)
        if not stacked:
            rule, number = rules[0], len(ring.devices) if path in ENDS else 1
            assert rule is not None, path
            return shards(rule, number)(_shard(slices[0], leaf.shape[0], number) if path in ENDS else 0)
        rule = rules[slices[0].start or 0]
        if rule is None:
            return np.zeros(leaf.sharding.shard_shape(leaf.shape), leaf.dtype)
        axis = None if rule.axis is None else rule.axis + 1
        shard = 0 if axis is None else _shard(slices[axis], leaf.shape[axis], ring.tp)
        return shards(rule, ring.tp)(shard)[None]

    return jax.block_until_ready(jax.make_array_from_callback(leaf.shape, leaf.sharding, shard_at))


def _shard(bounds: slice, size: int, shards: int) -> int:
    return (bounds.start or 0) * shards // size
