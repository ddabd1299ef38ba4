"""Programs over int8 and fp8 weights, compiled to the end for TPUs and GPUs that are not there."""

import pytest

from jdisagg.core.model_config import WeightFormat
from jdisagg.core.worker_config import Role
from tests.engine.chips import checked_kinds, few_layers

CASES = [("v5e:2x2", "int8"), ("v6e:2x2", "int8"), ("h100:2", "fp8")]
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_kept_programs")]


@pytest.mark.parametrize(
    ("target", "dtype", "role", "kind"),
    [
        (*CASES[0], Role.DECODE, "decode"),
        (*CASES[1], Role.PREFILL, "prefill"),
        (*CASES[2], Role.DECODE, "decode"),
        (*CASES[2], Role.PREFILL, "prefill"),
        pytest.param(*CASES[0], Role.PREFILL, "prefill", marks=pytest.mark.hostile),
        pytest.param(*CASES[1], Role.DECODE, "decode", marks=pytest.mark.hostile),
    ],
)
def test_scaled_weights_are_half_of_full_ones_and_compile_in_place(target: str, dtype: str, role: Role, kind: str):
    """Of one layer of Llama 3 8B on two shards; a product that made wide copies of its matrix would show in temp."""
    full, scaled = (
        few_layers("8B", role, target, tp=2, stages=1, layers=1, num_pages=1024, weights=weights)
        for weights in (WeightFormat(), WeightFormat(dtype, frozenset({"head"})))
    )
    narrower = full.weight_bytes(0) - scaled.weight_bytes(0)
    matrices = full.model.layer_params(2)
    assert 0.99 * matrices < narrower < matrices, "a byte of two, less scales"
    (checked,) = checked_kinds(scaled, scaled.steps(), kind)
    assert checked.facts.temp_bytes < matrices, checked.facts
