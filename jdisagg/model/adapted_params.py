"""Stage parameters with slots for LoRA adapters. The adapters' factors follow the weights in the same list of leaves,
so every program of the stage receives them and code without adapters passes them through."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec

from jdisagg.core.layout.stages import RingCut
from jdisagg.core.model_config import ModelConfig
from jdisagg.model.lora import SHARED, AdapterCapacity, AdapterWeights, FactorSpec, attached, factors_of
from jdisagg.model.network import Stage
from jdisagg.model.params import StageParams, dotted
from jdisagg.model.ring_params import RingParams
from jdisagg.parallel.submesh import AXIS, RING, RingMesh, StageMesh

Mesh = StageMesh | RingMesh


@dataclass(frozen=True, slots=True)
class FactorTensor:
    """One LoRA factor as an array on a mesh. `layers` holds one model layer per ring stage, or a single layer without a
    ring."""

    factor: FactorSpec
    layers: tuple[int | None, ...]  # None: padding
    mesh: Mesh

    @property
    def is_ring(self) -> bool:
        return isinstance(self.mesh, RingMesh)

    @property
    def slot_axis(self) -> int:
        return self.factor.slot_axis + self.is_ring

    def spec(self, *, new: bool = False) -> PartitionSpec:
        """Returns the partition spec. With `new`: of one adapter's factor, which has no slot dimension."""
        axis = self._cut_axis(new)
        names: list[str | None] = [RING] if self.is_ring else []
        if axis is not None and self.mesh.tp > 1:
            names += [None] * (axis - len(names)) + [AXIS]
        return PartitionSpec(*names)

    def struct(self, *, new: bool = False) -> jax.ShapeDtypeStruct:
        tp, axis = self.mesh.tp, self._cut_axis(new)
        local = self.factor.new_shape(tp) if new else self.factor.shape(tp)
        stacked = (len(self.layers), *local) if self.is_ring else local
        shape = tuple(size * tp if at == axis else size for at, size in enumerate(stacked))
        return jax.ShapeDtypeStruct(shape, self.factor.room.dtype, sharding=self.mesh.sharding(self.spec(new=new)))

    def zeros(self) -> Array:
        whole = self.struct()
        assert whole.sharding is not None
        local = np.zeros(whole.sharding.shard_shape(whole.shape), self.factor.room.dtype)
        return jax.make_array_from_callback(whole.shape, whole.sharding, lambda _: local.copy())

    def new(self, weights: AdapterWeights) -> Array:
        """Returns one adapter's factor as a global array, cut for each shard."""
        whole, axis, tp = self.struct(new=True), self._cut_axis(new=True), self.mesh.tp

        def shard_at(index: Any) -> np.ndarray:
            stage = index[0].start or 0 if self.is_ring else 0
            shard = 0 if axis is None or tp == 1 else (index[axis].start or 0) * tp // whole.shape[axis]
            found = self.factor.of(weights, self.layers[stage], shard, tp).astype(self.factor.room.dtype)
            return found[None] if self.is_ring else found

        assert whole.sharding is not None
        return jax.make_array_from_callback(whole.shape, whole.sharding, shard_at)

    def _cut_axis(self, new: bool) -> int | None:
        axis = self.factor.cut_axis
        return None if axis is None else axis + self.is_ring - new


@dataclass(frozen=True)
class AdaptedParams(StageParams):
    """Stage parameters whose last leaves are adapter factors."""

    bare: StageParams = field(kw_only=True)  # the stage without adapters; its list of leaves is empty
    factors: tuple[FactorTensor, ...] = field(kw_only=True)

    def merge(self, leaves: list[Array]) -> Stage:
        stage = self.bare.merge(leaves[: self.first])
        mine = [leaf.reshape(leaf.shape[1:]) if each.is_ring else leaf for each, leaf in self._with(leaves)]
        return attached(stage, [each.factor for each in self.factors], mine)

    @property
    def first(self) -> int:
        """Index of the first factor among the leaves."""
        return len(self.specs) - len(self.factors)

    def _with(self, leaves: Sequence[Array]) -> list[tuple[FactorTensor, Array]]:
        return list(zip(self.factors, leaves[self.first :], strict=True))


def with_room(
    params: StageParams, model: ModelConfig, layers: range, room: AdapterCapacity, mesh: StageMesh
) -> AdaptedParams:
    """Returns the stage (or its abstract shapes) with empty adapter slots."""
    factors = factors_of(model, layers, room)
    return _joined(params, [FactorTensor(each, (layers[each.place],), mesh) for each in factors])


def ring_with_room(
    params: RingParams, model: ModelConfig, cut: RingCut, room: AdapterCapacity, mesh: RingMesh
) -> AdaptedParams:
    """Returns a ring's parameters with empty adapter slots; see `with_room`."""
    factors = factors_of(model, cut.numbers, room)
    return _joined(params, [FactorTensor(each, tuple(row[each.place] for row in cut.places), mesh) for each in factors])


def _joined(params: StageParams, factors: list[FactorTensor]) -> AdaptedParams:
    abstract = any(isinstance(each, jax.ShapeDtypeStruct) for each in params.leaves)
    return AdaptedParams(
        params.graphdef,
        params.treedef,
        [*params.leaves, *(each.struct() if abstract else each.zeros() for each in factors)],
        [*params.specs, *(each.spec() for each in factors)],
        params.num_reductions + _own_sums(params, factors),
        bare=replace(params, leaves=[]),
        factors=tuple(factors),
    )


def _own_sums(params: StageParams, factors: Sequence[FactorTensor]) -> int:
    """Returns the number of extra reductions that adapters of quantized row-parallel matrices need. The integer
    products are reduced before the adapters' contributions are added, so each contribution has its own sum."""
    tree = jax.tree.unflatten(params.treedef, params.leaves)
    scaled = {dotted(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]}
    return sum(
        f"layers.{each.place}.{each.path}.scale" in scaled and not each.path.startswith(SHARED)
        for each in (leaf.factor for leaf in factors)
        if each.is_a and each.cut_axis is not None
    )
