"""What sizes become where nobody said them."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdisagg.core.default_sizes import (
    LARGEST_CHUNK,
    LARGEST_PAGE,
    LARGEST_SLOTS,
    LEAST_PAGE,
    PAGE_BYTES,
    Buckets,
    Size,
    beside_chunks,
    buckets_of,
    chunk_sequences,
    critical_rows,
    decode_slots,
    one_stage_multi_step,
    page_size,
    step_tokens,
)
from jdisagg.core.hardware import CHIPS, chip_called
from jdisagg.core.layout.kv_layout import KVLayout
from jdisagg.core.worker_config import Role
from jdisagg.sim.hardware import model_of

LLAMA = model_of("llama3-8b")
EXPERTS = model_of("deepseek-v3")
H100, V5E, V5P, V6E = (CHIPS[name] for name in ("h100", "v5e", "v5p", "v6e"))
MANY = 10**9  # tokens of KV


def slots(chip, room=MANY, stages=1, longest=8192, model=LLAMA) -> int:
    return decode_slots(model, 1, stages, chip.platform, chip, room, longest).value


def tokens(chip, memory=None, model=LLAMA) -> int:
    return step_tokens(model, 1, chip.platform, chip, memory).value


def pages(layout: KVLayout, tp=1, longest=8192, platform="tpu") -> int:
    return page_size(platform, layout, tp, longest).value


def test_on_the_cpu_all_sizes_are_a_laptops():
    assert decode_slots(LLAMA, 1, 2, "cpu", None, MANY, 8192).value == 8
    assert step_tokens(LLAMA, 1, "cpu", None, None).value == 512
    assert chunk_sequences("cpu", 4096).value == 8
    assert pages(KVLayout.of(LLAMA, 1), platform="cpu") == 32
    assert buckets_of("cpu", 512) == Buckets(64, 256)


@pytest.mark.parametrize(("chip", "rows"), [("v5e", 241), ("v5p", 167), ("v6e", 560), ("h100", 296), ("a100", 154)])
def test_dense_weights_of_two_bytes_take_as_long_to_read_as_to_multiply_at_flops_over_bandwidth(chip: str, rows: int):
    sheet = CHIPS[chip]
    assert critical_rows(LLAMA, 1, sheet) == rows == -(-sheet.flops_per_s // sheet.memory_bytes_per_s)


def test_experts_share_a_step_so_that_it_takes_more_rows_to_feed_them():
    assert critical_rows(EXPERTS, 1, H100) > 10 * critical_rows(LLAMA, 1, H100)


def test_slots_meet_the_critical_batch_in_every_stage():
    assert (slots(H100), slots(V5E), slots(V6E), slots(V5P)) == (256, 256, 512, 128)
    assert slots(V5P, stages=4) == 512
    assert slots(H100, model=EXPERTS) == LARGEST_SLOTS


def test_slots_are_as_many_as_sequences_that_the_memory_holds_where_these_are_fewer():
    assert slots(H100, room=100 * 1024) == 128 and slots(H100, room=50 * 1024) == 64
    assert slots(H100, room=1) == 1
    assert slots(H100, room=100 * 64, longest=64) == 128, "short sequences take less"
    assert slots(H100, room=64 * 1024, stages=2) == 64, "which is 32 in each stage"


def test_a_reason_says_what_was_weighed():
    found = decode_slots(LLAMA, 1, 2, "gpu", H100, 64 * 1024, 8192).reason
    assert found == (
        "64 slots: 65,536 tokens of KV are 64 sequences of 1,024; h100 is compute-bound from 296 rows,"
        " in each of 2 stages"
    )
    assert "assumed for" in decode_slots(LLAMA, 1, 1, "gpu", None, MANY, 8192).reason
    assert "8 times the 296 rows" in step_tokens(LLAMA, 1, "gpu", H100, None).reason


def test_a_chunk_is_several_critical_batches():
    assert (tokens(H100), tokens(V5E), tokens(V6E), tokens(V5P)) == (2048, 2048, 4096, 1024)
    assert tokens(H100, model=EXPERTS) == LARGEST_CHUNK


def test_a_chunks_activations_take_a_sixteenth_of_the_memory():
    assert tokens(H100, memory=1 << 30) < tokens(H100)
    assert "activations fill" in step_tokens(LLAMA, 1, "gpu", H100, 1 << 30).reason


def test_a_page_is_copied_longer_than_it_takes_to_ask_for_it():
    layout = KVLayout.of(LLAMA, 1, "bfloat16", tiled=True)
    for tp in (1, 2, 4):
        held = replace(layout, page_size=pages(layout, tp))
        assert held.layer_page_bytes(tp) == PAGE_BYTES
    assert pages(layout, 8) == LARGEST_PAGE, "prefixes and the last page of each sequence bound it"
    assert pages(layout, 4, longest=256) == LEAST_PAGE
    assert pages(layout, platform="gpu") == 32


@given(
    st.sampled_from(sorted(CHIPS)),
    st.integers(1, 8),
    st.integers(1, 1 << 24),
    st.integers(64, 1 << 20),
    st.sampled_from((LLAMA, EXPERTS)),
)
def test_every_choice_is_a_power_of_two_in_each_stage_and_leaves_room_for_prompts(name, stages, room, longest, model):
    chip = CHIPS[name]
    rows = decode_slots(model, 1, stages, chip.platform, chip, room, longest).value // stages
    chunk = tokens(chip, model=model)
    page = pages(KVLayout.of(model, 1, "bfloat16", chip.platform == "tpu"), longest=longest, platform=chip.platform)
    assert all(number & (number - 1) == 0 for number in (rows, chunk, page))
    assert chunk >= rows + page, "a mixed step has room for both"
    smallest = buckets_of(chip.platform, chunk)
    assert smallest.smallest_chunk >= 64 and chunk // smallest.smallest_chunk <= 16


def test_jax_names_of_devices_find_their_sheets():
    found = {name: chip_called(name) for name in ("TPU v5 lite", "TPU v5", "TPU v5p", "TPU v6 lite", "TPU7x")}
    assert [chip.name if chip else "" for chip in found.values()] == ["v5e", "v5p", "v5p", "v6e", "v7x"]
    assert chip_called("NVIDIA H100 80GB HBM3") is H100
    assert chip_called("NVIDIA H100 PCIe") is None and chip_called("cpu") is None


def test_rows_of_a_stage_take_half_of_the_tokens_that_somebody_said_at_most():
    assert beside_chunks(Size(256, "chosen"), 1, 2048) == Size(256, "chosen")
    assert beside_chunks(Size(256, "chosen"), 1, 100).value == 32
    assert beside_chunks(Size(512, "chosen"), 2, 100).value == 2 * 32


@pytest.mark.parametrize(
    ("platform", "role", "most"),
    [("cpu", Role.DECODE, 1), ("tpu", Role.DECODE, 32), ("gpu", Role.DECODE, 32), ("gpu", Role.COLOCATED, 8)],
)
def test_only_who_hears_of_sequences_before_they_come_takes_many_turns(platform: str, role: Role, most: int):
    assert one_stage_multi_step(platform, role) == most
