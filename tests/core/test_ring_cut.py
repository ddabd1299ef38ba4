"""Layers over the stages of a ring: each stage's at places of their kind, in order, and as few places as will do."""

from dataclasses import replace

import pytest

from jdisagg.core.errors import MeshError
from jdisagg.core.layout.stages import ring_cut
from jdisagg.core.model_config import Experts, ModelConfig

MODEL = ModelConfig("llama", 97, 32, 64, num_layers=12, num_heads=4, num_kv_heads=2, head_dim=8, max_position=128)
EXPERTS = Experts(4, 2, 16, dense_layers=(0,))
CASES = [
    (MODEL, 2, 6),
    (MODEL, 5, 3),
    (replace(MODEL, layer_windows=(16, 16, None) * 4), 2, 6),
    (replace(MODEL, num_layers=10, layer_windows=(16, None) * 5), 2, 6),
    (replace(MODEL, family="qwen3_moe", experts=EXPERTS), 2, 7),
]


@pytest.mark.parametrize(("model", "stages", "places"), CASES)
def test_every_layer_stands_at_a_place_of_its_kind(model: ModelConfig, stages: int, places: int):
    cut = ring_cut(model, stages)
    assert [layer for row in cut.places for layer in row if layer is not None] == list(range(model.num_layers))
    assert [tuple(layer for layer in row if layer is not None) for row in cut.places] == [
        tuple(run) for run in cut.runs
    ]
    for place, number in enumerate(cut.numbers):
        for layer in (row[place] for row in cut.places):
            kinds = [(model.is_sparse(each), model.attention(each)) for each in (number, layer) if each is not None]
            assert len(set(kinds)) == 1
    assert len(cut.numbers) == places


def test_more_stages_than_layers_are_refused_with_both_numbers():
    with pytest.raises(MeshError, match="13 stages for 12 layers"):
        ring_cut(MODEL, 13)
