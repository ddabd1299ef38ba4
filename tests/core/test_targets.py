"""Targets as text, and the least time of a step on them."""

from dataclasses import replace

import pytest

from jdisagg.core.errors import MeshError
from jdisagg.core.hardware import CHIPS, Shard, Target, Work
from jdisagg.core.model_config import ModelConfig

LLAMA_3_70B = ModelConfig("llama", 128256, 8192, 28672, 80, 64, 8, 128, 8192)
STAGES = (range(0, 21), range(21, 41), range(41, 61), range(61, 80))


@pytest.mark.parametrize(
    ("text", "devices", "shown"),
    [
        ("v5e:2x4", 8, "v5e:2x4"),
        ("V5P:2x2x4", 16, "v5p:2x2x4"),
        ("h100:8", 8, "h100:8"),
        ("v7x:2x2x1", 8, "v7x:2x2x1"),
        ("h200:2x8", 16, "h200:2x8"),
    ],
)
def test_a_target_is_a_chip_and_its_sides(text, devices, shown):
    target = Target.parse(text)
    assert target.num_devices == devices and str(target) == shown


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("v5p", "cannot read target 'v5p'"),
        ("v5p:0x2x2", "cannot read target"),
        ("v9:2x2", "unknown chip 'v9' in target 'v9:2x2'; chips are v5e, v5p"),
        ("v5p:2x2", "has 2 sides, v5p has 3"),
        ("h100:1x2x8", "has 3 sides, h100 has 2"),
    ],
)
def test_a_target_that_cannot_be_says_what_could(text, says):
    with pytest.raises(MeshError, match=says):
        Target.parse(text)


def test_the_stages_of_a_step_read_every_weight_but_the_embedding_once():
    shards = [Shard(LLAMA_3_70B, run, 2, 2, 2) for run in STAGES]
    read = sum(2 * shard.decode(16, 4096).weight_bytes for shard in shards)
    embedding = LLAMA_3_70B.vocab_size * LLAMA_3_70B.hidden_size
    assert read == 2 * (LLAMA_3_70B.num_params() - embedding)
    held = sum(2 * shard.held_bytes for shard in shards)
    assert held == read + 2 * 2 * embedding, "the embedding is whole on both shards of the first stage"


def test_a_step_reads_the_keys_and_values_that_its_sequences_hold_within_the_window():
    shard = Shard(LLAMA_3_70B, STAGES[1], 8, 2, 2)
    assert shard.decode(16, 4096).kv_bytes == 20 * 16 * 4096 * 2 * 1 * 128 * 2
    assert replace(shard, tp=16).decode(16, 4096).kv_bytes == shard.decode(16, 4096).kv_bytes, "heads are replicated"
    windows = replace(LLAMA_3_70B, layer_windows=(1024,) * 40 + (None,) * 40)
    seen = replace(shard, model=windows, layers=range(38, 42)).decode(1, 4096).kv_bytes
    assert seen == (2 * 1024 + 2 * 4096) * 2 * 128 * 2


def test_the_floor_is_the_slower_of_memory_and_products():
    chip = CHIPS["v5e"]
    assert Work(weight_bytes=819e9).floor_s(chip) == 1.0
    assert Work(819e8, 819e8, 197e12).bound(chip) == "compute"
    assert Work(819e9, 819e9, 197e12).bound(chip) == "memory"
    prompt = Shard(LLAMA_3_70B, range(80), 8, 2, 2).prefill(2048)
    products = 2 * 2048 * LLAMA_3_70B.num_layers * LLAMA_3_70B.layer_params() / 8
    assert prompt.bound(CHIPS["v5p"]) == "compute" and products < prompt.flops < 1.1 * products
