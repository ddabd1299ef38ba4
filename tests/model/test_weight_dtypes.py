"""Matrices rounded when they are loaded: exact where they must be, told where they lose, the same in every cut."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdisagg.core.model_config import ROUTERS, Experts, ModelConfig, WeightFormat
from jdisagg.model.calibration import measure_loss
from jdisagg.model.experts import ExpertLayer
from jdisagg.model.hf_config import read_config
from jdisagg.model.params import StageSpec, load_stage
from jdisagg.model.products import MatrixFormat, product
from jdisagg.model.sources import HFSource, RandomSource
from tests.fixtures.conformance import load
from tests.model.sharded import mesh_of, run_stage, stage_output

FIXTURE = load("qwen2")
CONFIG, SOURCE = read_config(FIXTURE.folder), HFSource(FIXTURE.folder)
TOKENS = np.array((FIXTURE.prompts[-1] * 4)[:24], np.int32)
SPARSE = ["mixtral", "gpt_oss", "deepseek3"]  # the last has a dense layer and a shared MLP
UNSHARED = ["mixtral", "gpt_oss", "qwen3_moe"]


def logits(weights: WeightFormat, tp: int = 1, out_first: bool = True, family: str = "qwen2") -> np.ndarray:
    mesh, (config, source) = mesh_of(tp), model_of(family)
    params = load_stage(source, StageSpec(config, range(config.num_layers), mesh, jnp.float32, weights, out_first))
    return run_stage(params, mesh, stage_output, TOKENS)


def model_of(family: str) -> tuple[ModelConfig, HFSource]:
    folder = load(family).folder
    return read_config(folder), HFSource(folder)


def rounded(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int8 with a scale a row, by numpy."""
    scale = np.maximum(np.abs(rows).max(axis=1, keepdims=True) * np.float32(1 / 127), np.float32(1e-12))
    return np.rint(rows / scale).astype(np.int32), scale


@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize("out_first", [False, True])
def test_int8_products_equal_those_of_numpy_to_the_last_bit(out_first: bool, rows: int):
    random = np.random.default_rng(rows)
    x, w = (random.standard_normal((size, 96), np.float32) for size in (rows, 160))
    (xq, x_scale), (wq, w_scale) = rounded(x), rounded(w)
    kernel = wq.astype(np.int8) if out_first else wq.T.astype(np.int8)
    call = jax.jit(lambda x, kernel, scale: product(x, kernel, scale, MatrixFormat(out_first, "int8")))
    expected = (xq @ wq.T).astype(np.float32) * x_scale * w_scale[:, 0]
    np.testing.assert_array_equal(call(x, jnp.asarray(kernel), jnp.asarray(w_scale[:, 0])), expected)


@pytest.mark.parametrize(("tp", "out_first"), [(2, True), (1, False)])
def test_int8_logits_of_every_cut_and_layout_differ_in_the_last_bit_at_most(tp: int, out_first: bool):
    one, other = logits(WeightFormat("int8")), logits(WeightFormat("int8"), tp, out_first)
    np.testing.assert_allclose(other, one, atol=2e-5)  # integer sums are exact; the scales' order is the compiler's


@pytest.mark.parametrize(("dtype", "most"), [("bfloat16", 0.02), ("int8", 0.1), ("fp8", 0.3)])
def test_coarser_matrices_change_logits_but_little(dtype: str, most: float):
    full, found = logits(WeightFormat()), logits(WeightFormat(dtype))
    change = np.linalg.norm(found - full) / np.linalg.norm(full)
    assert 0 < change < most


def test_all_matrices_that_stay_full_make_the_full_model_again():
    params = load_stage(SOURCE, StageSpec(CONFIG, range(CONFIG.num_layers), mesh_of(1), jnp.float32))
    every = frozenset({"head", *params.merge(params.leaves).matrices()})
    np.testing.assert_array_equal(logits(WeightFormat("int8", every)), logits(WeightFormat()))


def test_calibration_tells_the_loss_that_serving_has():
    """With the head alone rounded: numbers halfway between two integers make more of the last bit elsewhere."""
    loss = measure_loss(SOURCE, CONFIG, "int8", TOKENS.tolist(), worst_error=-1.0)
    full, other = (jax.nn.log_softmax(logits(each)) for each in (WeightFormat(), loss.weights))
    kl = float(jnp.mean(jnp.sum(jnp.exp(full) * (full - other), axis=-1)))
    assert loss.kl == pytest.approx(kl, rel=0.02) and loss.kl > 0
    assert loss.agreement == pytest.approx(float(jnp.mean(full.argmax(-1) == other.argmax(-1))))


def test_matrices_over_the_bound_stay_full():
    loss = measure_loss(SOURCE, CONFIG, "int8", TOKENS.tolist())
    worst = max(loss.errors, key=lambda path: loss.errors[path])
    bound = sorted(loss.errors.values())[-2]
    assert measure_loss(SOURCE, CONFIG, "int8", TOKENS.tolist(), bound).weights.full == {worst}


@pytest.mark.parametrize("dtype", [pytest.param("bfloat16", marks=pytest.mark.hostile), "int8"])
@pytest.mark.parametrize("family", SPARSE)
def test_layers_with_experts_are_calibrated_as_they_are_served(family: str, dtype: str):
    config, source = model_of(family)
    loss = measure_loss(source, config, dtype, TOKENS.tolist(), worst_error=1.0)
    full, other = (jax.nn.log_softmax(logits(each, family=family)) for each in (WeightFormat(), loss.weights))
    kl = float(jnp.mean(jnp.sum(jnp.exp(full) * (full - other), axis=-1)))
    assert loss.kl == pytest.approx(kl, rel=0.1) and loss.kl > 0


@pytest.mark.parametrize(("dtype", "stored"), [("bfloat16", jnp.bfloat16), ("int8", jnp.float32)])
def test_experts_are_rounded_to_bf16_but_never_scaled(dtype: str, stored: Any):
    config, source = model_of("mixtral")
    params = load_stage(source, StageSpec(config, range(1), mesh_of(1), jnp.float32, WeightFormat(dtype)))
    experts = params.merge(params.leaves).layers[0].mlp
    assert isinstance(experts, ExpertLayer)
    assert experts.gate_up[...].dtype == experts.down[...].dtype == stored
    assert experts.router[...].dtype == jnp.float32


@pytest.mark.parametrize("family", [pytest.param(each, marks=pytest.mark.slow) for each in UNSHARED] + ["deepseek3"])
def test_int8_logits_of_models_with_experts_are_the_same_on_shards_that_do_not_divide_them(family: str):
    """A choice of experts that rounding turned would show as another row of logits."""
    config, source = model_of(family)
    weights = measure_loss(source, config, "int8", TOKENS.tolist()).weights
    one, three = logits(weights, 1, family=family), logits(weights, 3, family=family)
    np.testing.assert_allclose(three, one, atol=5e-5)
    assert np.abs(one - logits(WeightFormat(), family=family)).max() > 1e-4


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_the_expert_that_all_tokens_share_is_not_scaled_as_its_shards_would_round_differently(dtype: str):
    experts = Experts(4, 2, 8, ROUTERS[0], normalised=True, shared_width=24)
    config = ModelConfig("qwen3_moe", 50, 48, 50, 2, 9, 3, 8, 64, experts=experts)
    kept = {f"{layer}.attention.{matrix}" for layer in range(2) for matrix in ("qkv", "out")} | {"head"}
    weights, source = WeightFormat(dtype, frozenset(kept)), RandomSource(config, seed=3)
    found = []
    for mesh in (mesh_of(1), mesh_of(2)):
        params = load_stage(source, StageSpec(config, range(2), mesh, jnp.float32, weights))
        assert params.num_reductions == 4  # of attention and of all experts together, in both layers
        found.append(run_stage(params, mesh, stage_output, TOKENS % 50))
    np.testing.assert_allclose(*found, atol=5e-5)
    assert [WeightFormat(each).of("1.mlp.shared.down") for each in ("bfloat16", dtype)] == ["bfloat16", "dtype"]
