"""The engine's prefill programs, compiled to the end for TPUs and GPUs that are not there."""

import pytest

from jdisagg.core.worker_config import Role
from tests.engine.chips import assert_sound, few_layers

pytestmark = pytest.mark.usefixtures("no_kept_programs")
# One layer that is the first and the last: a chunk, its head, and for one of them the scores of all its rows.
# Each kind of chip and each model once, with experts on TPUs and on GPUs; the rest is for -m hostile.
PREFILL = [
    ("v5e:2x2", "8B", 4, ("prefill", "head", "score")),
    pytest.param("v6e:2x4", "70B", 8, ("prefill", "head"), marks=pytest.mark.hostile),
    ("v5p:2x2x2", "70B", 8, ("prefill", "head")),
    ("v6e:2x4", "DeepSeek-V3", 8, ("prefill",)),
    ("h100:4", "8B", 4, ("prefill", "head", "score")),
    pytest.param("v6e:2x4", "Qwen3-30B-A3B", 4, ("prefill",), marks=pytest.mark.hostile),
    ("h100:8", "Qwen3-30B-A3B", 1, ("prefill",)),
    pytest.param("h100:8", "gpt-oss-20b", 1, ("prefill",), marks=pytest.mark.hostile),
    ("v5e:2x4", "gpt-oss-20b", 1, ("prefill",)),  # heads of 64: K and V share rows of 128
]


@pytest.mark.slow
@pytest.mark.parametrize(("target", "model", "tp", "kinds"), PREFILL)
def test_a_prefill_mesh_compiles_in_place_and_fits(target, model, tp, kinds):
    table = few_layers(model, Role.PREFILL, target, tp, stages=1, layers=1, num_pages=8192)
    assert_sound(table, target, *kinds)
