"""Weights on the devices are cut anew for another mesh: to the last bit what would be read for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jdisagg.core.model_config import Experts, ModelConfig, WeightFormat
from jdisagg.model.params import StageParams, StageSpec, load_stage
from jdisagg.model.reshard import HeldWeights
from jdisagg.model.sources import RandomSource

UNEVEN = ModelConfig("llama", 97, 36, 50, num_layers=4, num_heads=6, num_kv_heads=3, head_dim=6, max_position=64)
EVEN = ModelConfig(
    "qwen3", 96, 32, 64, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=8, max_position=64, tie_embeddings=True
)
SPARSE = replace(EVEN, family="qwen3_moe", experts=Experts(5, 2, 16, normalised=True))
MODELS = {"uneven": UNEVEN, "even and tied": EVEN, "experts": SPARSE}
Stages = Sequence[tuple[range, int]]  # layers, and the first of `tp` devices
WAYS = {
    "tp2 to pp2": ([(range(4), 0)], 2, [(range(0, 2), 0), (range(2, 4), 1)], 1),
    "tp2 in two groups to pp2": ([(range(0, 2), 0), (range(2, 4), 0)], 2, [(range(0, 3), 0), (range(3, 4), 1)], 1),
    "pp2 to tp2": ([(range(0, 1), 0), (range(1, 4), 1)], 1, [(range(4), 0)], 2),
    "pp2 x tp2 to tp4": ([(range(0, 2), 0), (range(2, 4), 2)], 2, [(range(4), 0)], 4),
    "tp4 to pp4": ([(range(4), 0)], 4, [(range(i, i + 1), i) for i in range(4)], 1),
    "tp4 to itself": ([(range(4), 0)], 4, [(range(4), 0)], 4),
    "pp2 to other cuts": ([(range(0, 1), 0), (range(1, 4), 1)], 1, [(range(0, 3), 0), (range(3, 4), 1)], 1),
}
FORMATS = {"float32": WeightFormat(), "int8": WeightFormat("int8"), "bfloat16": WeightFormat("bfloat16")}


def mesh_at(first: int, tp: int) -> Mesh:
    return Mesh(np.array(jax.devices()[first : first + tp]), ("tp",))


def load_all(load, source, config: ModelConfig, stages: Stages, tp: int, weights: WeightFormat) -> list[StageParams]:
    specs = [StageSpec(config, layers, mesh_at(first, tp), jnp.float32, weights) for layers, first in stages]
    return [load(source, each) for each in specs]


QUICK = [("uneven", "float32", "tp2 to pp2"), ("experts", "int8", "pp2 x tp2 to tp4")]
ALL = [(model, form, way) for model in MODELS for form in FORMATS for way in WAYS]


def mark_of(case: tuple[str, str, str]) -> list[pytest.MarkDecorator]:
    """Of model, form and way every two values meet in what is not hostile."""
    places = [[*values].index(value) for values, value in zip((MODELS, FORMATS, WAYS), case, strict=True)]
    if case in QUICK:
        return []
    return [pytest.mark.slow if sum(places) % 3 == 0 else pytest.mark.hostile]


CASES = [pytest.param(*case, marks=mark_of(case), id=", ".join(case)) for case in ALL]


@pytest.mark.parametrize(("model", "form", "way"), CASES)
def test_every_leaf_is_what_would_be_read_and_nothing_is_read(model, form, way):
    config, weights, (old, old_tp, new, new_tp) = MODELS[model], FORMATS[form], WAYS[way]
    source, held = RandomSource(config, seed=5), HeldWeights()
    for params, (layers, first) in zip(load_all(load_stage, source, config, old, old_tp, weights), old, strict=True):
        held.add(params, StageSpec(config, layers, mesh_at(first, old_tp), jnp.float32, weights))
    made = load_all(held.load, None, config, new, new_tp, weights)
    for one, other in zip(made, load_all(load_stage, source, config, new, new_tp, weights), strict=True):
        assert one.specs == other.specs
        for mine, theirs in zip(one.leaves, other.leaves, strict=True):
            assert (mine.dtype, mine.sharding) == (theirs.dtype, theirs.sharding)
            pairs = zip(mine.addressable_shards, theirs.addressable_shards, strict=True)
            for shard, expected in pairs:
                assert np.asarray(shard.data).tobytes() == np.asarray(expected.data).tobytes()
    assert not held.read_again and not held.leaves


def test_what_is_held_in_another_dtype_is_read_again_and_said():
    source, held, mesh = RandomSource(EVEN, seed=5), HeldWeights(), mesh_at(0, 1)
    params = load_stage(source, StageSpec(EVEN, range(4), mesh, jnp.bfloat16))
    held.add(params, StageSpec(EVEN, range(4), mesh, jnp.bfloat16))
    made = held.load(source, StageSpec(EVEN, range(4), mesh, jnp.float32))
    assert made.leaves[0].dtype == jnp.float32 and "layers.3.mlp.down.kernel" in held.read_again


def test_a_leaf_is_given_up_as_soon_as_its_successor_is_there():
    source, held, mesh = RandomSource(EVEN, seed=5), HeldWeights(), mesh_at(0, 1)
    params = load_stage(source, StageSpec(EVEN, range(4), mesh, jnp.float32))
    held.add(params, StageSpec(EVEN, range(4), mesh, jnp.float32))
    made = held.load(source, StageSpec(EVEN, range(0, 2), mesh, jnp.float32))
    given = sum(leaf is None for leaf in params.leaves)
    assert given == len(made.leaves) and held.moved_bytes == 0
