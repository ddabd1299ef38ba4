"""A step whose sums are made in blocks of columns computes what it does without, and a row the same in any company."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jdisagg.core.model_config import AS_ACTIVATIONS, Experts, ModelConfig, WeightFormat
from jdisagg.model import network
from jdisagg.model.network import Stage
from jdisagg.model.params import StageParams, StageSpec, load_stage
from jdisagg.model.sources import RandomSource
from tests.model.sharded import mesh_of, run_stage, stage_output
from tests.model.test_tensor_parallel import CONFIGS

TOKENS = np.array([3, 41, 7, 0, 19, 22, 49, 8, 11, 30, 2, 5], np.int32)
CUT = [name for name, config in CONFIGS.items() if config.norms == "before" and not config.experts]


def stage_of(config: ModelConfig, weights: str = AS_ACTIVATIONS) -> StageParams:
    """Of two shards, its matrices as those of accelerators lie."""
    spec = StageSpec(config, range(config.num_layers), mesh_of(2), jnp.float32, WeightFormat(weights), out_first=False)
    return load_stage(RandomSource(config, seed=3), spec)


def looped(stage: Stage) -> Stage:
    """Its layers as they are in a loop."""
    for layer in stage.layers:
        layer.attention.looped = True
    return stage


def in_blocks(stage: Stage, tokens: jax.Array) -> jax.Array:
    assert all(layer.parts(tokens.shape[0]) == 2 for layer in looped(stage).layers)
    return stage_output(stage, tokens)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch):
    """Models of the tests are narrower than a tile, and their sums smaller than any that is cut."""
    monkeypatch.setattr(network, "LANES", 1)
    monkeypatch.setattr(network, "SENT_BESIDE_BYTES", 0)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", CUT)
def test_sums_in_blocks_of_columns_are_what_they_are_whole(name: str):
    params = stage_of(CONFIGS[name])
    whole = run_stage(params, mesh_of(2), stage_output, TOKENS)
    assert np.abs(run_stage(params, mesh_of(2), in_blocks, TOKENS) - whole).max() <= 1e-4


@pytest.mark.usefixtures("small")
def test_a_row_has_the_same_bits_whatever_the_others_are():
    params = stage_of(CONFIGS["biased"])
    rows = [run_stage(params, mesh_of(2), in_blocks, np.array([3, *others], np.int32)) for others in ([5] * 7, [9] * 7)]
    assert rows[0][0].tobytes() == rows[1][0].tobytes() and (rows[0][1] != rows[1][1]).any()


@pytest.mark.usefixtures("small")
def test_each_sum_is_sent_in_two_blocks_and_the_compiler_is_told_their_order():
    params, mesh = stage_of(CONFIGS["biased"]), mesh_of(2)
    specs = params.specs, PartitionSpec()

    def program(leaves: list[jax.Array], tokens: jax.Array) -> jax.Array:
        return in_blocks(params.merge(leaves), tokens)

    shards = jax.shard_map(program, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False)
    text = jax.jit(shards).lower(params.leaves, TOKENS).as_text()
    assert text.count("stablehlo.all_reduce") == 2 * params.num_reductions
    assert text.count("optimization_barrier") >= 4 * params.num_reductions


@pytest.mark.usefixtures("small")
def test_only_dense_layers_in_a_loop_with_whole_numbers_and_norms_before_are_cut():
    stages = [(stage_of(CONFIGS["biased"]), True), (stage_of(CONFIGS["biased"], "int8"), False)]
    stages += [(stage_of(CONFIGS[name]), False) for name in ("gemma", "a norm over all heads")]
    for params, cut in stages:
        stage = params.merge(params.leaves)
        assert not any(layer.cuts_columns for layer in stage.layers), "layers that are written out"
        assert [layer.cuts_columns for layer in looped(stage).layers] == [cut] * len(stage.layers)
    assert not network.cuts(replace(CONFIGS["biased"], experts=Experts(4, 2, 8)), 2)
    assert not network.cuts(CONFIGS["biased"], 1), "nothing is summed"


def test_a_block_that_is_sent_before_a_product_has_begun_is_not_made():
    assert network.pays(8192, 16) and not network.pays(8192, 4)
