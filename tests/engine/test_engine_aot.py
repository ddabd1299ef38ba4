"""The engine's real programs, compiled to the end for TPUs and GPUs that are not there: decode and shipments."""

import pytest

from jdisagg.core.worker_config import Role
from jdisagg.engine.compile_check import check
from tests.engine.chips import assert_sound, checked_kinds, few_layers

# Two stages of two layers: one has the embedding, the other the head. Each kind of chip and each model once; what
# both have been seen with elsewhere is for -m hostile.
DECODE = [
    ("v5e:2x2", "8B", 1),
    pytest.param("v6e:2x2", "8B", 2, marks=pytest.mark.hostile),
    ("v5p:2x2x2", "70B", 2),
    ("v7x:1x1x1", "8B", 1),  # both devices of one chip
    ("h100:8", "70B", 2),
    ("v6e:2x2", "Gemma 2 9B", 2),  # heads of 256, windows on every other layer, soft caps
    pytest.param("h100:8", "Gemma 2 9B", 1, marks=pytest.mark.hostile),
    pytest.param("v6e:2x2", "Qwen3-30B-A3B", 2, marks=pytest.mark.hostile),
    ("h100:8", "Qwen3-30B-A3B", 2),
    pytest.param("h100:8", "gpt-oss-20b", 2, marks=pytest.mark.hostile),
    ("v6e:2x2", "gpt-oss-20b", 2),  # rows of the embedding are no whole number of lanes
]


@pytest.mark.slow
@pytest.mark.usefixtures("no_kept_programs")
@pytest.mark.parametrize(("target", "model", "tp"), DECODE)
def test_a_decode_pipeline_compiles_in_place_and_fits(target, model, tp):
    table = few_layers(model, Role.DECODE, target, tp, stages=2, layers=2, num_pages=8192)
    assert_sound(table, target, "decode")


@pytest.mark.slow
@pytest.mark.usefixtures("no_kept_programs")
@pytest.mark.parametrize("target", ["v6e:2x4", "h100:8"])
def test_pages_are_packed_and_inserted_in_place_and_tokens_drawn(target):
    """Prefill TP 2 to decode PP 2: shards are joined on the way."""
    source = few_layers("8B", Role.PREFILL, target, 2, stages=2, layers=2, num_pages=4096)
    destination = few_layers("8B", Role.DECODE, target, 1, stages=2, layers=2, num_pages=4096)
    checked_kinds(source, source.departures(destination.shapes), "pack")
    checked_kinds(destination, destination.arrivals(source.shapes), "insert")
    checked_kinds(destination, destination.steps(), "draw", "draw count", "draw steer")


@pytest.mark.usefixtures("no_kept_programs")
def test_a_program_that_is_too_large_for_its_chip_is_refused_with_the_numbers():
    table = few_layers("8B", Role.DECODE, "v5e:2x2", 1, stages=2, layers=2, num_pages=200_000)
    declared = next(each for each in table.steps() if each.kind == "decode")
    (checked,) = check([(table.config.worker, declared)], every=True)
    assert checked.complaints and "exceeds available HBM (15.75G)" in checked.complaints[0]
