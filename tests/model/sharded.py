"""Meshes and whole-stage programs for the tests of the model: one shard_map over a stage's leaves."""

from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from jdisagg.core.model_config import ModelConfig
from jdisagg.model.network import Stage, attending, dense_attend
from jdisagg.model.params import StageParams


def mesh_of(tp: int, first: int = 0) -> Mesh:
    """`tp` of the virtual devices, from `first`."""
    return Mesh(np.array(jax.devices()[first : first + tp]), ("tp",), axis_types=(AxisType.Auto,))


def split_layers(config: ModelConfig, pp: int) -> list[range]:
    size = config.num_layers // pp
    return [range(start, start + size) for start in range(0, config.num_layers, size)]


def run_stage(
    params: StageParams, mesh: Mesh, call: Callable[[Stage, jax.Array], jax.Array], x: np.ndarray
) -> np.ndarray:
    """`call(stage, x)` with the stage's shards where they lie; x and the result are whole on every shard."""

    def program(leaves: list[jax.Array], x: jax.Array) -> jax.Array:
        return call(params.merge(leaves), x)

    whole = PartitionSpec()
    if mesh.size > 1:
        program = jax.shard_map(program, mesh=mesh, in_specs=(params.specs, whole), out_specs=whole, check_vma=False)
    return np.asarray(jax.jit(program)(params.leaves, x))


def stage_output(stage: Stage, x: jax.Array) -> jax.Array:
    """Tokens i32[T] (first stage) or activations f32[T, hidden] -> activations, or logits f32[T, V] (last stage)."""
    x = x if stage.embed is None else stage.embed_tokens(x)
    x = stage.run_layers(x, jax.numpy.arange(x.shape[0]), attending(dense_attend(stage.attention)))
    return x if stage.norm is None else stage.logits(x)
