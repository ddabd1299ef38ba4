"""Logits that are multiplied and gathered in blocks of the vocabulary are those of the whole."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdisagg.core.model_config import AS_ACTIVATIONS, WeightFormat
from jdisagg.model import network
from jdisagg.model.network import VocabularyLayout, blocks_of, slices
from jdisagg.model.params import StageSpec, load_stage
from jdisagg.model.sources import RandomSource
from pallas_kernels.platforms import traced_for
from tests.model.sharded import mesh_of, run_stage
from tests.model.test_tensor_parallel import CONFIGS

CONFIG = CONFIGS["gemma"]  # with a soft cap, and tied
STATES = np.random.default_rng(0).standard_normal((5, CONFIG.hidden_size), np.float32)


def scores(weights: str) -> np.ndarray:
    mesh = mesh_of(2)
    spec = StageSpec(CONFIG, range(CONFIG.num_layers), mesh, jnp.float32, WeightFormat(weights), out_first=False)
    return run_stage(load_stage(RandomSource(CONFIG, seed=3), spec), mesh, lambda stage, x: stage.scores(x), STATES)


@pytest.mark.parametrize("weights", [AS_ACTIVATIONS, "int8"])
def test_logits_gathered_in_blocks_are_those_gathered_at_once(weights: str, monkeypatch: pytest.MonkeyPatch):
    whole, blocks, cut = scores(weights), [], network.slices
    monkeypatch.setattr(network, "HEAD_BLOCKS", {"cpu": 3})
    monkeypatch.setattr(network, "LEAST_OUTPUTS", 1)
    monkeypatch.setattr(network, "LANES", 4)
    monkeypatch.setattr(network, "slices", lambda *asked: blocks.extend(cut(*asked)) or cut(*asked))
    # Blocks of a few outputs are padded (`products.LEAST_OUTPUTS`), the whole is not: bits are those of larger ones.
    np.testing.assert_allclose(scores(weights), whole, rtol=1e-5, atol=1e-6)
    assert len(blocks) == 3 and blocks[-1].stop == CONFIG.vocab_size // 2
    assert len({part.stop - part.start for part in blocks}) == 2, "the last one is shorter"


@given(outputs=st.integers(1, 300_000), blocks=st.sampled_from([2, 4]))
def test_blocks_are_all_of_a_shards_outputs_in_order_and_begin_at_tiles(outputs: int, blocks: int):
    found = slices(outputs, blocks)
    assert (found[0].start, found[-1].stop) == (0, outputs)
    assert all(part.stop == following.start for part, following in pairwise(found))
    assert all(part.start % network.LANES == 0 and part.stop > part.start for part in found) and len(found) <= blocks


def test_only_accelerators_gather_large_vocabularies_in_blocks_whatever_the_rows():
    assert [blocks_of(16_032, platform) for platform in ("tpu", "gpu", "cpu", None)] == [4, 2, 1, 1]
    assert blocks_of(network.LEAST_OUTPUTS, "tpu") == 1


@pytest.mark.parametrize(("platform", "gathers"), [("tpu", 4), ("gpu", 2), ("cpu", 1)])
def test_a_head_has_as_many_gathers_as_its_platforms_blocks(platform: str, gathers: int):
    whole, spec = VocabularyLayout(("tp",), 2), jax.sharding.PartitionSpec()

    def logits(x: jax.Array, table: jax.Array) -> jax.Array:
        return whole.whole(x, table.shape[0], lambda x, part: network.scored(x, table[part]))

    mapped = jax.shard_map(
        logits, mesh=mesh_of(2), in_specs=(spec, jax.sharding.PartitionSpec("tp")), out_specs=spec, check_vma=False
    )
    with traced_for(platform):
        text = jax.jit(mapped).lower(jnp.zeros((8, 16)), jnp.zeros((16_384, 16))).as_text()
    assert text.count('"stablehlo.all_gather"') == gathers
