"""A stage's weights for programs that go round its layers: what they hold at each place of a period, stacked by turn.

Where that is done is one choice a platform (`loops_on`); how a leaf is made from a checkpoint, and how a stage is cut
anew, is as everywhere (`params.py`, `reshard.py`): stacking is the last thing that happens to a leaf.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from jdisagg.core.model_config import ModelConfig, WeightFormat
from jdisagg.core.steps import Repeat, repeating
from jdisagg.model.params import (
    AbstractStage,
    StageParams,
    StageSpec,
    count_reductions,
    load_leaves,
    outline_of,
)
from jdisagg.model.reshard import HeldWeights
from jdisagg.model.sources import Source
from jdisagg.parallel.submesh import Device

# Compiled here for 80 layers of Llama 3 70B on 8 devices, seconds of processor time for decode + a prefill of 2,048
# tokens, and MiB of temporaries of the decode step (what it copies of weights among them):
#             written out    as a loop
#   v5p     about 30 + 92      3 + 12     7 -> 2
#   h100           9 + 7     1.5 + 1.5   12 -> 177: each turn's matrices are copied out of their stacks
# A CPU takes a loop's pools as scanned inputs 17 times as long, and its small models compile at once. Kernels take the
# matrices of experts whole: a loop copies each turn's out of the stacks (512 MiB a layer of gpt-oss, tp2, on v6e).
LOOPED = frozenset({("tpu", False)})  # (platform, whether the model has experts)
# v7x's products want tiles of 16 rows where arguments have 8 (libtpu 0.0.42): a loop copies its stacks at every step,
# 1,766 MiB of four layers on four devices. Written out each matrix is read as it lies.
COPIES_STACKS = "TPU7x"


def loops_on(device: Device, config: ModelConfig) -> bool:
    """Whether programs of devices like this one go round the model's layers."""
    return (device.platform, config.experts is not None) in LOOPED and device.device_kind != COPIES_STACKS


@dataclass(frozen=True)
class LoopedParams(StageParams):
    """As `StageParams`, of a compact stage; the leaves of its period are stacked by turn, in a first dimension."""

    repeat: Repeat | None = None
    parts: tuple[tuple[int, ...], ...] = ()  # of each leaf, which of the whole stage's leaves it is made of


def load_for_platform(source: Source, spec: StageSpec) -> StageParams:
    """As `load_stage`, in the form that programs of the mesh's platform take."""
    outline, _, leaves = load_leaves(source, spec)
    if loops_on(spec.device, spec.config):
        return looped(outline, leaves, spec)
    return replace(outline, leaves=list(leaves))


def abstract_for_platform(spec: StageSpec) -> StageParams:
    """As `abstract_stage_params`, likewise."""
    outline = outline_of(spec)[0]
    return looped_outline(outline, spec) if loops_on(spec.device, spec.config) else outline


def looped(outline: StageParams, leaves: Iterable[Array], spec: StageSpec) -> StageParams:
    """A stage's leaves, one by one in the order of `outline` -> the same stacked; each is let go as it is taken.

    Layers without a period stay as they are.
    """
    found = looped_outline(outline, spec)
    if not isinstance(found, LoopedParams):
        return replace(outline, leaves=list(leaves))
    place = {part: (leaf, turn) for leaf, parts in enumerate(found.parts) for turn, part in enumerate(parts)}
    made: list[Any] = [None] * len(found.leaves)
    for index, each in enumerate(leaves):
        leaf, turn = place[index]
        if len(found.parts[leaf]) == 1:
            made[leaf] = each
        else:
            stack = _empty(found.leaves[leaf]) if made[leaf] is None else made[leaf]
            made[leaf] = jax.block_until_ready(_put(stack, each, jnp.int32(turn)))
    return replace(found, leaves=made)


def whole_stage(params: StageParams, spec: StageSpec) -> StageParams:
    """The stage as `load_stage` gives it, cut out of the stacks; `params` gives its leaves up one by one."""
    if not isinstance(params, LoopedParams):
        return params
    outline = outline_of(spec)[0]
    found: list[Any] = [None] * len(outline.leaves)
    for leaf, parts in enumerate(params.parts):
        held, params.leaves[leaf] = params.leaves[leaf], None
        for turn, part in enumerate(parts):
            found[part] = held if len(parts) == 1 else jax.block_until_ready(_take(held, jnp.int32(turn)))
    params.leaves.clear()
    return replace(outline, leaves=found)


def load_held(held: HeldWeights, source: Source, spec: StageSpec) -> StageParams:
    """As `HeldWeights.load`, in the form that programs of the mesh's platform take."""
    params = held.load(source, spec)
    if not loops_on(spec.device, spec.config):
        return params
    given = (params.leaves.pop(0) for _ in range(len(params.leaves)))
    return looped(params, given, spec)


def looped_outline(outline: StageParams, spec: StageSpec) -> StageParams:
    """The shapes of the stage whose layers' are `outline`; that itself where they have no period."""
    repeat = repeating([kind_of(spec.config, layer, spec.weights) for layer in spec.layers])
    if repeat is None:
        return outline
    whole, compact = (spec.abstract(repeat=each) for each in (None, repeat))
    parts = parts_of(whole, compact, repeat)
    specs = [_stacked_spec(outline.specs[index[0]], len(index)) for index in parts]
    leaves = [
        outline.leaves[index[0]] if len(index) == 1 else _stacked(outline.leaves[index[0]], each, len(index), spec)
        for index, each in zip(parts, specs, strict=True)
    ]
    named = compact.graphdef, compact.treedef, leaves, specs, count_reductions(compact)
    return LoopedParams(*named, repeat=repeat, parts=parts)


def kind_of(config: ModelConfig, layer: int, weights: WeightFormat) -> tuple[Any, ...]:
    """Equal for layers that one program can run in turn: their leaves have the same shapes and mean the same."""
    full = frozenset(rest for number, _, rest in (name.partition(".") for name in weights.full) if number == str(layer))
    return config.is_sparse(layer), config.attention(layer), full


def parts_of(whole: AbstractStage, compact: AbstractStage, repeat: Repeat) -> tuple[tuple[int, ...], ...]:
    """Of each leaf of the compact stage, the whole one's that it stands for, turn by turn."""
    index_of = {path: index for index, path in enumerate(whole.paths)}

    def parts(path: str) -> tuple[int, ...]:
        kind, _, rest = path.partition(".")
        if kind != "layers":
            return (index_of[path],)
        place, _, name = rest.partition(".")
        return tuple(index_of[f"layers.{each}.{name}"] for each in repeat.places(int(place)))

    return tuple(parts(path) for path in compact.paths)


def _stacked_spec(spec: PartitionSpec, turns: int) -> PartitionSpec:
    return spec if turns == 1 else PartitionSpec(None, *spec)


def _stacked(leaf: jax.ShapeDtypeStruct, cut: PartitionSpec, turns: int, spec: StageSpec) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((turns, *leaf.shape), leaf.dtype, sharding=spec.sharding(cut))


def _empty(stack: jax.ShapeDtypeStruct) -> Array:
    return jax.jit(partial(jnp.zeros, stack.shape, stack.dtype), out_shardings=stack.sharding)()


@partial(jax.jit, donate_argnums=0)
def _put(stack: Array, leaf: Array, turn: Array) -> Array:
    return jax.lax.dynamic_update_index_in_dim(stack, leaf, turn, 0)


@jax.jit
def _take(stack: Array, turn: Array) -> Array:
    return jax.lax.dynamic_index_in_dim(stack, turn, 0, keepdims=False)
