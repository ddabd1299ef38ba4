"""A chunk cut in halves computes what it does whole, and its collectives are as many as declared."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdisagg.core.model_config import AS_ACTIVATIONS, Experts, Latent, ModelConfig, WeightFormat
from jdisagg.model import norms
from jdisagg.model.params import StageSpec, load_stage
from jdisagg.model.sources import RandomSource
from tests.model.sharded import mesh_of, run_stage, stage_output
from tests.model.test_tensor_parallel import CONFIGS, NINE

TOKENS = np.array([3, 41, 7, 0, 19, 22, 49, 8, 11, 30, 2, 5], np.int32)


def logits(config: ModelConfig, weights: str) -> np.ndarray:
    """By matrices that lie as those of accelerators do."""
    mesh, layers = mesh_of(2), range(config.num_layers)
    spec = StageSpec(config, layers, mesh, jnp.float32, WeightFormat(weights), out_first=False)
    params = load_stage(RandomSource(config, seed=3), spec)
    return run_stage(params, mesh, stage_output, TOKENS)


@pytest.mark.parametrize(
    ("name", "weights"), [*((name, AS_ACTIVATIONS) for name in CONFIGS), ("biased", "int8"), ("gemma", "fp8")]
)
def test_a_chunk_in_halves_computes_what_it_does_whole(name: str, weights: str, monkeypatch: pytest.MonkeyPatch):
    whole = logits(CONFIGS[name], weights)
    cuts, cut = [], norms.cut
    monkeypatch.setattr(norms, "FEWEST_ROWS", 4)
    monkeypatch.setattr(norms, "TILE", 4)
    monkeypatch.setattr("jdisagg.model.network.cut", lambda rows: cuts.append(rows.shape[0]) or cut(rows))
    assert np.abs(logits(CONFIGS[name], weights) - whole).max() <= 1e-4
    assert cuts == [12] * 2 * CONFIGS[name].num_layers, "rows of attention's input and of its output"


def test_only_rows_enough_of_dense_layers_on_accelerators_that_share_them_are_cut():
    asked = {"out_first": False, "adapted": False}
    latent = replace(NINE, num_kv_heads=1, head_dim=20, rotary_dim=4, latent=Latent(16, 8, 4, 4, 8))
    assert norms.halves(NINE, 1024, 2, **asked) == 2
    assert norms.halves(NINE, 1023, 2, **asked) == norms.halves(NINE, 4096, 1, **asked) == 1
    assert norms.halves(NINE, 4096, 8, out_first=True, adapted=False) == 1, "a CPU's rows keep their bits"
    assert norms.halves(NINE, 4096, 8, out_first=False, adapted=True) == 1
    assert norms.halves(replace(NINE, experts=Experts(4, 2, 8)), 4096, 8, **asked) == 1
    assert norms.halves(latent, 4096, 8, **asked) == 1


def test_the_first_half_ends_at_a_tile_and_is_no_shorter():
    for rows in (1024, 1032, 2040, 2048):
        first, second = (part.shape[0] for part in norms.cut(jnp.zeros((rows, 1))))
        assert first % norms.TILE == 0 and 0 <= first - second < 2 * norms.TILE and first + second == rows


def test_what_comes_after_waits_for_what_was_before():
    text = jax.jit(norms.after).lower(jnp.ones(2), jnp.ones(3)).as_text()
    assert "optimization_barrier" in text
