"""Loops compiled for TPUs that are not there: no turn copies its matrices out of the stacks, nor the pool it writes."""

import pytest

from jdisagg.core.worker_config import Role
from tests.engine.chips import checked_kinds, few_layers


@pytest.mark.slow
@pytest.mark.usefixtures("no_kept_programs")
@pytest.mark.parametrize(
    ("target", "model", "tp", "turns"),
    [("v5p:2x2x2", "70B", 8, 8), ("v6e:2x2", "Gemma 2 9B", 2, 4)],
)
def test_a_loop_copies_no_weights_and_writes_its_pages_in_place(target: str, model: str, tp: int, turns: int):
    table = few_layers(model, Role.DECODE, target, tp, stages=1, layers=8, num_pages=4096)
    assert table.layer_groups[0].turns == turns
    matrix = max(leaf.size * leaf.dtype.itemsize for leaf in table.layer_groups[0].params.leaves) // tp // turns
    (checked,) = checked_kinds(table, [each for each in table.steps() if each.kind == "decode"], "decode")
    assert checked.facts.temp_bytes < matrix
