"""The bytes that pages are budgeted beside are those of the leaves that are loaded, in every format."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import jax
import jax.numpy as jnp
import pytest

from jdisagg.core.model_config import ModelConfig, WeightFormat
from jdisagg.core.settings import Settings
from jdisagg.model.adapted_params import with_room
from jdisagg.model.checkpoint import read_model
from jdisagg.model.lora import room_for
from jdisagg.model.params import StageSpec, abstract_stage_params, load_stage
from jdisagg.model.sources import RandomSource
from jdisagg.model.weight_bytes import adapter_bytes, number_bytes, shard_bytes
from jdisagg.parallel.submesh import StageMesh
from tests.fixtures.conformance import load
from tests.model.sharded import mesh_of

QWEN = read_model(load("qwen2").folder)
CONFIGS = {
    "tied": replace(QWEN, tie_embeddings=True),
    "untied": replace(QWEN, tie_embeddings=False),
    "odd": replace(QWEN, tie_embeddings=True, vocab_size=287),
    "gpt_oss": read_model(load("gpt_oss").folder),
    "deepseek3": read_model(load("deepseek3").folder),
}
FORMATS = {
    "full": WeightFormat(),
    "float32": WeightFormat("float32"),
    "bfloat16": WeightFormat("bfloat16"),
    "int8": WeightFormat("int8"),
    "fp8": WeightFormat("fp8"),
    "mixed": WeightFormat("int8", frozenset({"head", "1.mlp.down", "1.attention.out"})),
}


@pytest.mark.parametrize("weights", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_shard_is_counted_as_what_lies_on_its_device(config: ModelConfig, weights: WeightFormat):
    for layers in (range(config.num_layers), range(1), range(1, config.num_layers)):
        for tp in (1, 2):
            leaves = abstract_stage_params(StageSpec(config, layers, mesh_of(tp), jnp.bfloat16, weights)).leaves
            held = sum(leaf.dtype.itemsize * prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in leaves)
            assert shard_bytes(config, layers, tp, "bfloat16", weights) == held, (layers, tp)


@pytest.mark.parametrize("dtype", ["dtype", "bfloat16", "int8"])
@pytest.mark.parametrize("tp", [1, 2])
def test_a_loaded_stage_has_as_many_bytes_on_each_device(tp: int, dtype: str):
    config, weights = CONFIGS["tied"], WeightFormat(dtype)
    layers = range(config.num_layers)
    leaves = load_stage(RandomSource(config), StageSpec(config, layers, mesh_of(tp), jnp.float32, weights)).leaves
    for device in mesh_of(tp).devices:
        shards = (shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards if shard.device == device)
        assert sum(shards) == shard_bytes(config, layers, tp, "float32", weights)


def test_the_mean_number_is_of_what_is_multiplied_by():
    """Scales and norms are some more than a number's own bytes."""
    config = CONFIGS["untied"]
    found = {
        dtype: number_bytes(config, range(config.num_layers), 1, "bfloat16", WeightFormat(dtype))
        for dtype in ("dtype", "float32", "int8")
    }
    assert 2 < found["dtype"] < 2.1 and 4 < found["float32"] < 4.1 and 1 < found["int8"] < 1.2


@pytest.mark.parametrize("tp", [1, 2])
def test_slots_for_adapters_are_counted_as_they_lie(tp: int):
    config = ModelConfig("llama", 97, 32, 64, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, max_position=128)
    submesh, layers = StageMesh(jax.devices()[:tp]), range(3)
    bare = abstract_stage_params(StageSpec(config, layers, submesh.mesh, jnp.float32))
    able = with_room(bare, config, layers, room_for(2, 4, jnp.dtype("float32")), submesh)
    held = sum(4 * prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in able.leaves[len(bare.leaves) :])
    asked = Settings(max_loras=2, max_lora_rank=4)
    assert adapter_bytes(asked, config, layers, tp, jnp.float32) == held > 0
    assert adapter_bytes(Settings(), config, layers, tp, jnp.float32) == 0
