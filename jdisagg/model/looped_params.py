"""Stage parameters for programs that loop over layers: the leaves of one period of layers, stacked by iteration.

`loops_on` decides per platform whether layers are looped. Loading from a checkpoint and resharding are those of
`params.py` and `reshard.py`; stacking is the last step for each leaf.
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
from jdisagg.model.params import StageParams, StageSpec, StageTree, count_reductions, load_leaves, outline_of
from jdisagg.model.reshard import HeldWeights
from jdisagg.model.sources import TensorSource
from jdisagg.parallel.submesh import Device

# Compile time in CPU seconds for 80 layers of Llama 3 70B on 8 devices (decode + a prefill of 2,048 tokens), and MiB of
# temporaries of the decode step, which include copies of weights:
#               unrolled      as a loop
#   v5p     about 30 + 92      3 + 12     7 -> 2
#   h100           9 + 7     1.5 + 1.5   12 -> 177: each iteration's matrices are copied out of their stacks
# On a CPU a loop with page pools as scanned inputs takes 17 times as long, and small models compile quickly unrolled.
# Kernels take expert matrices whole, so a loop would copy each iteration's (512 MiB per layer of gpt-oss, tp2, on v6e).
LOOPED = frozenset({("tpu", False)})  # (platform, whether the model has experts)
# v7x's products need tiles of 16 rows and arguments have tiles of 8 (libtpu 0.0.42): a loop copies its stacks at every
# step, 1,766 MiB for four layers on four devices. Unrolled, each matrix is read without a copy.
COPIES_STACKS = "TPU7x"


def loops_on(device: Device, config: ModelConfig) -> bool:
    """Returns True if programs of such devices loop over the model's layers."""
    return (device.platform, config.experts is not None) in LOOPED and device.device_kind != COPIES_STACKS


@dataclass(frozen=True)
class LoopedParams(StageParams):
    """Parameters of a compact stage, whose leaves in the loop are stacked by iteration in a first dimension."""

    repeat: Repeat | None = None
    parts: tuple[tuple[int, ...], ...] = ()  # for each leaf, the indices of the full stage's leaves in it


def load_for_platform(source: TensorSource, spec: StageSpec) -> StageParams:
    """Loads a stage as `load_stage` does, stacked if the mesh's platform loops over layers."""
    outline, _, leaves = load_leaves(source, spec)
    if loops_on(spec.device, spec.config):
        return looped(outline, leaves, spec)
    return replace(outline, leaves=list(leaves))


def abstract_for_platform(spec: StageSpec) -> StageParams:
    """Returns abstract parameters as `abstract_stage_params` does, stacked if the platform loops."""
    outline = outline_of(spec)[0]
    return looped_outline(outline, spec) if loops_on(spec.device, spec.config) else outline


def looped(outline: StageParams, leaves: Iterable[Array], spec: StageSpec) -> StageParams:
    """Stacks a stage's leaves, given one by one in the order of `outline`; each is freed once it is copied. Layers
    without a period are returned unstacked."""
    found = looped_outline(outline, spec)
    if not isinstance(found, LoopedParams):
        return replace(outline, leaves=list(leaves))
    position = {
        part: (leaf, iteration) for leaf, parts in enumerate(found.parts) for iteration, part in enumerate(parts)
    }
    made: list[Any] = [None] * len(found.leaves)
    for index, each in enumerate(leaves):
        leaf, iteration = position[index]
        if len(found.parts[leaf]) == 1:
            made[leaf] = each
        else:
            stack = _empty(found.leaves[leaf]) if made[leaf] is None else made[leaf]
            made[leaf] = jax.block_until_ready(_put(stack, each, jnp.int32(iteration)))
    return replace(found, leaves=made)


def whole_stage(params: StageParams, spec: StageSpec) -> StageParams:
    """Unstacks a stage to the form of `load_stage`; the leaves of `params` are freed one by one."""
    if not isinstance(params, LoopedParams):
        return params
    outline = outline_of(spec)[0]
    found: list[Any] = [None] * len(outline.leaves)
    for leaf, parts in enumerate(params.parts):
        stacked, params.leaves[leaf] = params.leaves[leaf], None
        for iteration, part in enumerate(parts):
            found[part] = stacked if len(parts) == 1 else jax.block_until_ready(_take(stacked, jnp.int32(iteration)))
    params.leaves.clear()
    return replace(outline, leaves=found)


def load_held(held: HeldWeights, source: TensorSource, spec: StageSpec) -> StageParams:
    """Loads a stage as `HeldWeights.load` does, stacked if the mesh's platform loops over layers."""
    params = held.load(source, spec)
    if not loops_on(spec.device, spec.config):
        return params
    leaves = (params.leaves.pop(0) for _ in range(len(params.leaves)))
    return looped(params, leaves, spec)


def looped_outline(outline: StageParams, spec: StageSpec) -> StageParams:
    """Returns the shapes of the stacked stage; `outline` unchanged if its layers have no period."""
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
    """Returns a key that is equal for layers that one loop body can run: same leaf shapes and same attention
    options."""
    full = frozenset(rest for number, _, rest in (name.partition(".") for name in weights.full) if number == str(layer))
    return config.is_sparse(layer), config.attention(layer), full


def parts_of(whole: StageTree, compact: StageTree, repeat: Repeat) -> tuple[tuple[int, ...], ...]:
    """Returns for each leaf of the compact stage the indices of the full stage's leaves, by iteration."""
    index_of = {path: index for index, path in enumerate(whole.paths)}

    def parts(path: str) -> tuple[int, ...]:
        kind, _, rest = path.partition(".")
        if kind != "layers":
            return (index_of[path],)
        place, _, name = rest.partition(".")
        return tuple(index_of[f"layers.{each}.{name}"] for each in repeat.places(int(place)))

    return tuple(parts(path) for path in compact.paths)


def _stacked_spec(spec: PartitionSpec, iterations: int) -> PartitionSpec:
    return spec if iterations == 1 else PartitionSpec(None, *spec)


def _stacked(leaf: jax.ShapeDtypeStruct, cut: PartitionSpec, iterations: int, spec: StageSpec) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((iterations, *leaf.shape), leaf.dtype, sharding=spec.sharding(cut))


def _empty(stack: jax.ShapeDtypeStruct) -> Array:
    return jax.jit(partial(jnp.zeros, stack.shape, stack.dtype), out_shardings=stack.sharding)()


@partial(jax.jit, donate_argnums=0)
def _put(stack: Array, leaf: Array, iteration: Array) -> Array:
    return jax.lax.dynamic_update_index_in_dim(stack, leaf, iteration, 0)


@jax.jit
def _take(stack: Array, iteration: Array) -> Array:
    return jax.lax.dynamic_index_in_dim(stack, iteration, 0, keepdims=False)
