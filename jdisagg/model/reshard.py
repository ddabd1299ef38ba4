"""A stage's weights from those that lie on the devices already, cut otherwise: nothing is read from the checkpoint.

The plan comes from `core/layout/tensor_cut.py`. Every leaf of a worker's last life is one of its next: the same rows,
cut for other shards, on other devices of the same worker. Numbers are moved as they are, so that the weights are to the
last bit what `load_stage` reads. A leaf is given up as soon as its successor is there: never are all held twice.
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
from jdisagg.model.names import Leaf, Part
from jdisagg.model.params import AbstractStage, StageParams, StageSpec, load_leaf, outline_of
from jdisagg.model.products import TINY
from jdisagg.model.sources import Source

WHOLE = 1 << 40  # rows of a leaf that no cut divides


@dataclass(frozen=True)
class HeldLeaf:
    """A leaf that lies on a mesh of `tp` shards. `leaves[index]` is taken from there, and given up."""

    rule: Leaf
    tp: int
    leaves: list[jax.Array | None]
    index: int

    def take(self) -> jax.Array:
        leaf, self.leaves[self.index] = self.leaves[self.index], None
        assert leaf is not None, "each leaf is taken once"
        return leaf


@dataclass
class HeldWeights:
    """All that a worker holds, by the leaf's name in the whole model: a `LoadStage` of other cuts of it.

    What it holds in another dtype, or not at all, is read again from the source: `read_again` says what.
    """

    leaves: dict[str, HeldLeaf] = field(default_factory=dict[str, HeldLeaf])
    moved_bytes: int = 0  # from device to device
    read_again: list[str] = field(default_factory=list[str])

    def add(self, params: StageParams, spec: StageSpec) -> None:
        """A stage of the last life, as `load_stage` made it."""
        _, abstract, rules = outline_of(spec)
        for index, (path, rule) in enumerate(zip(abstract.paths, rules, strict=True)):
            self.leaves[whole_name(path, spec.layers)] = HeldLeaf(rule, spec.tp, params.leaves, index)

    def load(self, source: Source, spec: StageSpec) -> StageParams:
        """As `load_stage`, of what is held."""
        outline, abstract, rules = outline_of(spec)
        leaves = [
            self._leaf(whole_name(path, spec.layers), path, rule, leaf, abstract, spec.mesh, source)
            for path, rule, leaf in zip(abstract.paths, rules, outline.leaves, strict=True)
        ]
        return replace(outline, leaves=leaves)

    def _leaf(
        self, name: str, path: str, rule: Leaf, leaf: jax.ShapeDtypeStruct, abstract: AbstractStage, mesh: Mesh,
        source: Source,
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
    """ "layers.0.mlp.down.kernel" of a stage that begins at layer 4 is "layers.4.mlp.down.kernel" of the model."""
    kind, _, rest = path.partition(".")
    if kind != "layers":
        return path
    index, _, rest = rest.partition(".")
    return f"layers.{layers.start + int(index)}.{rest}"


def recut(
    held: jax.Array, old: Leaf, old_tp: int, new: Leaf, leaf: jax.ShapeDtypeStruct, mesh: Mesh, padding: float = 0.0
) -> tuple[jax.Array, int]:
    """The leaf for `mesh`, and the bytes that came from another device. `padding`: what places for nothing hold."""
    axis = (old.axis if new.axis is None else new.axis) or 0
    shards = sorted(held.addressable_shards, key=lambda shard: shard.index[axis].start or 0)
    cuts = [cut_of(old, new, shard, old_tp) for shard in range(old_tp)]
    if old.axis is None:
        cuts = cuts[:1] * len(shards)  # every device holds all of it
    made, moved = list[jax.Array](), 0
    for number, device in enumerate(mesh.devices.flat):
        near = next((index for index, shard in enumerate(shards) if shard.device == device), None)
        wanted = cut_of(new, old, number, mesh.size)
        moves = plan_weight_moves(cuts, wanted, near)
        pieces = [_piece(shards[move.shard].data, move, axis, device) for move in moves]
        moved += sum(piece.nbytes for piece, move in zip(pieces, moves, strict=True) if move.shard != near)
        made.append(_filled(pieces, moves, wanted.length, axis, (leaf, device, padding)))
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, made), moved


def cut_of(rule: Leaf, other: Leaf, shard: int, tp: int) -> ShardCut:
    """One shard of the leaf. Where this cut of it is none, it is whole along the dimension that `other` cuts."""
    if rule.experts:
        held = experts_held(rule.experts, tp)
        there = range(min(shard * held, rule.experts), min((shard + 1) * held, rule.experts))
        return shard_cut([(there, held)])
    if rule.axis is None and other.axis is None:
        return shard_cut([(range(WHOLE), WHOLE)])
    parts = zip(rule.parts, other.parts, strict=True)
    return shard_cut([_held(part, theirs, shard, tp) for part, theirs in parts])


def _held(part: Part, other: Part, shard: int, tp: int) -> tuple[range, int]:
    if part.cut is not None:
        return part.cut.held(tp, shard), part.cut.width(tp)
    size = len(part.rows) if part.rows is not None else part.shape[other.axis]
    return range(size), size


def _piece(data: jax.Array, move: WeightMove, axis: int, device: Any) -> jax.Array:
    """What moves, on its new device; a shard that goes whole is not copied where it stays."""
    if move.length not in (WHOLE, data.shape[axis]):
        data = jax.lax.slice_in_dim(data, move.start, move.start + move.length, axis=axis)
    return jax.device_put(data, device)


def _filled(
    pieces: Sequence[jax.Array], moves: Sequence[WeightMove], length: int, axis: int, place: tuple[Any, Any, float]
) -> jax.Array:
    """The shard: its pieces one behind the other, and padding where there is none."""
    if len(pieces) == 1 and moves[0].length == length:
        return pieces[0]
    done, row = 0, list[jax.Array]()
    for piece, move in zip(pieces, moves, strict=True):
        row += [_padding(axis, move.offset - done, place), piece]
        done = move.offset + move.length
    row.append(_padding(axis, length - done, place))
    return jnp.concatenate([each for each in row if each.shape[axis]], axis=axis)


def _padding(axis: int, length: int, place: tuple[Any, Any, float]) -> jax.Array:
    leaf, device, padding = place
    sizes = list(leaf.sharding.shard_shape(leaf.shape))
    sizes[axis] = length
    return jax.device_put(np.full(sizes, padding, leaf.dtype), device)
