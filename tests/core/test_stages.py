import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdisagg.core.errors import MeshError
from jdisagg.core.layout.stages import head_cost, split_layers, split_prefill
from jdisagg.core.model_config import ModelConfig


def model(num_layers: int, vocab_size: int = 4096) -> ModelConfig:
    return ModelConfig("llama", vocab_size, 256, 640, num_layers, 8, 4, 32, 2048)


@given(st.integers(1, 40), st.integers(1, 8), st.integers(64, 200_000))
def test_every_layer_lies_in_exactly_one_stage_and_no_stage_is_empty(layers, stages, vocab):
    if stages > layers:
        with pytest.raises(MeshError, match=f"{stages} stages .* {layers} layers"):
            split_layers(model(layers, vocab), stages)
        return
    split = split_layers(model(layers, vocab), stages)
    assert [layer for stage in split for layer in stage] == list(range(layers))
    assert len(split) == stages and all(len(stage) > 0 for stage in split)


@given(st.integers(1, 40), st.integers(1, 8))
def test_prefill_stages_hold_all_layers_and_differ_by_one_at_most(layers, stages):
    if stages > layers:
        with pytest.raises(MeshError, match=f"{stages} prefill stages .* {layers} layers"):
            split_prefill(layers, stages)
        return
    split = split_prefill(layers, stages)
    assert [layer for stage in split for layer in stage] == list(range(layers))
    assert len(split) == stages and max(map(len, split)) - min(map(len, split)) <= 1


@given(st.integers(2, 24), st.integers(2, 4), st.integers(64, 100_000))
def test_no_other_cut_has_a_cheaper_slowest_stage(layers, stages, vocab):
    config = model(layers, vocab)
    if stages > layers:
        return

    def slowest(sizes):
        return max(*sizes[:-1], sizes[-1] + head_cost(config))

    def cuts(left, parts):
        if parts == 1:
            yield (left,)
            return
        for first in range(1, left - parts + 2):
            for rest in cuts(left - first, parts - 1):
                yield (first, *rest)

    ours = tuple(len(stage) for stage in split_layers(config, stages))
    assert slowest(ours) == pytest.approx(min(slowest(cut) for cut in cuts(layers, stages)))


def test_a_large_vocabulary_takes_layers_off_the_last_stage():
    assert [len(stage) for stage in split_layers(model(8, 20_000), 2)][1] < 4
