"""What --weight_dtype asks for, what it refuses, and what "auto" may choose."""

from dataclasses import replace

import pytest

from jdisagg.core.errors import ConfigError, FlagError
from jdisagg.core.model_config import Experts, ModelConfig, WeightFormat
from jdisagg.core.settings import Settings
from jdisagg.model.calibration import AccuracyReport
from jdisagg.model.checkpoint import open_source
from jdisagg.model.products import ProductTimes
from jdisagg.serve.cluster.router_process import identity_of
from jdisagg.serve.deploy.assemble import choose_weights, chosen, kept_experts
from jdisagg.serve.deploy.deployment import resolve_deployment, weight_dtype_of
from tests.fixtures.conformance import ROOT

SPARSE = ModelConfig("mixtral", 64, 32, 24, 3, 4, 2, 8, 256, experts=Experts(8, 2, 24))
KLS = {"bfloat16": 2e-4, "int8": 0.04}


def loss_of(dtype: str) -> AccuracyReport:
    return AccuracyReport(WeightFormat(dtype), KLS[dtype], 0.99, {})


def times(**total_s: float) -> dict[str, ProductTimes]:
    return {dtype: ProductTimes({8: seconds / 4, 128: seconds * 3 / 4}) for dtype, seconds in total_s.items()}


def test_an_unknown_weight_dtype_is_refused_in_one_line():
    with pytest.raises(
        FlagError, match="--weight_dtype is 'int4', must be one of dtype, auto, float32, bfloat16, int8"
    ):
        Settings(weight_dtype="int4").check()


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_fp8_is_refused_where_no_product_takes_it(platform: str):
    with pytest.raises(ConfigError, match=f"--weight_dtype=fp8 needs a GPU's products, and this is a {platform}"):
        weight_dtype_of("fp8", platform)
    assert weight_dtype_of("fp8", "gpu") == "fp8"


def test_auto_is_measured_on_the_cpu_alone():
    assert [weight_dtype_of("auto", platform) for platform in ("cpu", "tpu", "gpu")] == ["auto", "dtype", "dtype"]


def test_auto_takes_the_fastest_dtype_that_loses_little_and_says_what_was_measured():
    weights, why = chosen("float32", times(dtype=1.0, bfloat16=0.5, int8=0.3), loss_of)
    assert weights == WeightFormat("bfloat16")
    assert "\n" not in why and why.startswith(
        "auto: bfloat16 (processor time of a layer's products: float32 250.00 ms for 8 rows and 750.00 ms for 128, bf"
    )
    assert "int8: KL 0.04 nats a token, 99% of greedy tokens as the full model's; bfloat16: KL 0.0002" in why


@pytest.mark.parametrize("bfloat16", [0.9, 1.0, 2.0])
def test_auto_stays_full_where_nothing_coarser_is_clearly_faster(bfloat16: float):
    assert chosen("float32", times(dtype=1.0, bfloat16=bfloat16, int8=0.9), loss_of)[0] == WeightFormat()


@pytest.mark.parametrize(("dtype", "mib"), [("float32", "0.16"), ("bfloat16", "0.08")])
def test_experts_that_stay_full_are_told_with_their_bytes(dtype: str, mib: str):
    """Two of three layers have 8 experts of 3 matrices 32 x 24, and one more that all tokens share."""
    config = replace(SPARSE, experts=Experts(8, 2, 24, shared_width=24, dense_layers=(2,)))
    words = f"; experts stay {dtype}: {mib} MiB, 72% of all weights, in each worker"
    assert kept_experts(config, WeightFormat("int8"), dtype) == words


@pytest.mark.parametrize("weights", ["dtype", "bfloat16"])
def test_nothing_is_told_of_experts_that_hold_what_was_asked_for(weights: str):
    assert kept_experts(SPARSE, WeightFormat(weights), "float32") == ""
    assert kept_experts(replace(SPARSE, experts=None), WeightFormat("int8"), "float32") == ""


def test_a_run_with_scaled_matrices_says_that_its_experts_are_not():
    """As `jdisagg.launch` shows it, of a folder that users have."""
    folder = ROOT / "mixtral"
    settings = Settings(model=str(folder), weight_dtype="int8", tokenizer=str(ROOT / "qwen2"))
    deployment = resolve_deployment(settings, "cpu", None)
    told: list[str] = []
    choose_weights(deployment, settings, open_source(folder, "hf", deployment.model), told.append, None)
    (line,) = told
    assert line.startswith("int8: KL ") and "; experts stay float32: 0." in line and line.endswith("in each worker")


def test_processes_that_ask_for_other_weights_are_of_another_kind():
    here = Settings(mesh="prefill:tp2,decode:pp2")
    there = replace(here, weight_dtype="int8")
    kinds = [identity_of(resolve_deployment(each, "cpu", None), each) for each in (here, there)]
    assert [kind.weights for kind in kinds] == ["dtype", "int8"]
    assert kinds[0].fingerprint != kinds[1].fingerprint
