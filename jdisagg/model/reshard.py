"""Builds a stage's weights from weights already on the devices with another cut, without reading the checkpoint.

The plan comes from `core/layout/tensor_cut.py`. Every leaf of a worker's previous configuration becomes one of its
next: the same rows, cut for other shards, on other devices of the same worker. Numbers are copied unchanged, so the
weights equal those of `load_stage` bit for bit. A leaf is freed as soon as its successor exists, so the weights are
never held twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jdisagg.core.layout.tensor_cut import ShardCut, WeightMove, plan_weight_moves, shard_cut
from jdisagg.core.model_config import experts_held
from jdisagg.model.names import LeafSpec, TensorSlice
from jdisagg.model.params import StageParams, StageSpec, StageTree, load_leaf, outline_of
from jdisagg.model.products import TINY
from jdisagg.model.sources import TensorSource

WHOLE = 1 << 40  # stands for the length of a leaf that neither cut divides


@dataclass(frozen=True)
class HeldTensor:
    """A leaf on a mesh of `tp` shards; `take` removes it from `leaves[index]`."""

    rule: LeafSpec
    tp: int
    leaves: list[jax.Array | None]
    index: int

    def take(self) -> jax.Array:
        leaf, self.leaves[self.index] = self.leaves[self.index], None
        assert leaf is not None, "each leaf is taken once"
        return leaf


@dataclass
class HeldWeights:
    """All weights that a worker holds, by leaf name in the whole model, as the source of a stage with other cuts.
    Leaves with another dtype and missing leaves are read from the source; `read_again` lists them."""

    leaves: dict[str, HeldTensor] = field(default_factory=dict[str, HeldTensor])
    moved_bytes: int = 0  # bytes copied between devices
    read_again: list[str] = field(default_factory=list[str])

    def add(self, params: StageParams, spec: StageSpec) -> None:
        """Adds a stage of the previous configuration, as loaded by `load_stage`."""
        _, abstract, rules = outline_of(spec)
        for index, (path, rule) in enumerate(zip(abstract.paths, rules, strict=True)):
            self.leaves[whole_name(path, spec.layers)] = HeldTensor(rule, spec.tp, params.leaves, index)

    def load(self, source: TensorSource, spec: StageSpec) -> StageParams:
        """Loads a stage as `load_stage` does, from the held leaves."""
        outline, abstract, rules = outline_of(spec)
        leaves = [
            self._leaf(whole_name(path, spec.layers), path, rule, leaf, abstract, spec.mesh, source)
            for path, rule, leaf in zip(abstract.paths, rules, outline.leaves, strict=True)
        ]
        return replace(outline, leaves=leaves)

    def _leaf(
        self, name: str, path: str, rule: LeafSpec, leaf: jax.ShapeDtypeStruct, abstract: StageTree, mesh: Mesh,
        source: TensorSource,
    ) -> jax.Array:  # fmt: skip
        held = self.leaves.pop(name, None)
        found = None if held is None else held.take()
        if held is None or found is None or found.dtype != leaf.dtype or held.rule.transposed != rule.transposed:
            self.read_again.append(name)
            return load_leaf(source, abstract, path, rule, leaf, mesh.size)
        padding = TINY if abstract.scaled_by(path) is not None else 0.0
        made, moved = recut(found, held.rule, held.tp, rule, leaf, mesh, padding)
        self.moved_bytes += moved
        return jax.block_until_ready(made)


def whole_name(path: str, layers: range) -> str:
    """Returns a leaf's name in the whole model: "layers.0.x" of a stage from layer 4 is "layers.4.x"."""
    kind, _, rest = path.partition(".")
    if kind != "layers":
        return path
    index, _, rest = rest.partition(".")
    return f"layers.{layers.start + int(index)}.{rest}"


def recut(
    held: jax.Array,
    old: LeafSpec,
    old_tp: int,
    new: LeafSpec,
    leaf: jax.ShapeDtypeStruct,
    mesh: Mesh,
    padding: float = 0.0,
) -> tuple[jax.Array, int]:
    """Returns the leaf for `mesh` and the bytes copied between devices. `padding` is the value of padded elements."""
    axis = (old.axis if new.axis is None else new.axis) or 0
    shards = sorted(held.addressable_shards, key=lambda shard: shard.index[axis].start or 0)
    cuts = [cut_of(old, new, shard, old_tp) for shard in range(old_tp)]
    if old.axis is None:
        cuts = cuts[:1] * len(shards)  # every device holds all of it
    made, moved = list[jax.Array](), 0
    for number, device in enumerate(mesh.devices.flat):
        own_index = next((index for index, shard in enumerate(shards) if shard.device == device), None)
        wanted = cut_of(new, old, number, mesh.size)
        moves = plan_weight_moves(cuts, wanted, own_index)
        pieces = [_piece(shards[move.shard].data, move, axis, device) for move in moves]
        moved += sum(piece.nbytes for piece, move in zip(pieces, moves, strict=True) if move.shard != own_index)
        made.append(_filled(pieces, moves, wanted.length, axis, (leaf, device, padding)))
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, made), moved


def cut_of(rule: LeafSpec, other: LeafSpec, shard: int, tp: int) -> ShardCut:
    """Returns one shard's rows of the leaf. A leaf that is not cut is whole along the dimension that `other` cuts."""
    if rule.experts:
        held = experts_held(rule.experts, tp)
        experts = range(min(shard * held, rule.experts), min((shard + 1) * held, rule.experts))
        return shard_cut([(experts, held)])
    if rule.axis is None and other.axis is None:
        return shard_cut([(range(WHOLE), WHOLE)])
    parts = zip(rule.parts, other.parts, strict=True)
    return shard_cut([_held(part, theirs, shard, tp) for part, theirs in parts])


def _held(part: TensorSlice, other: TensorSlice, shard: int, tp: int) -> tuple[range, int]:
    if part.cut is not None:
        return part.cut.held(tp, shard), part.cut.width(tp)
    size = len(part.rows) if part.rows is not None else part.shape[other.axis]
    return range(size), size


def _piece(data: jax.Array, move: WeightMove, axis: int, device: Any) -> jax.Array:
    """Returns the rows to move on their new device; a whole shard that stays is not copied."""
    if move.length not in (WHOLE, data.shape[axis]):
        data = jax.lax.slice_in_dim(data, move.start, move.start + move.length, axis=axis)
    return jax.device_put(data, device)


def _filled(
    pieces: Sequence[jax.Array], moves: Sequence[WeightMove], length: int, axis: int, target: tuple[Any, Any, float]
) -> jax.Array:
    """Returns the shard: its pieces concatenated, with padding in the gaps."""
    if len(pieces) == 1 and moves[0].length == length:
        return pieces[0]
    done, segments = 0, list[jax.Array]()
    for piece, move in zip(pieces, moves, strict=True):
        segments += [_padding(axis, move.offset - done, target), piece]
        done = move.offset + move.length
    segments.append(_padding(axis, length - done, target))
    return jnp.concatenate([each for each in segments if each.shape[axis]], axis=axis)


def _padding(axis: int, length: int, target: tuple[Any, Any, float]) -> jax.Array:
    leaf, device, padding = target
    sizes = list(leaf.sharding.shard_shape(leaf.shape))
    sizes[axis] = length
    return jax.device_put(np.full(sizes, padding, leaf.dtype), device)
