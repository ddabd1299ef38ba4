"""Sizes that nobody said."""

import pytest

from jdisagg.core.worker_config import Role
from jdisagg.serve.chosen_sizes import one_stage_turns


@pytest.mark.parametrize(
    ("platform", "role", "most"),
    [("cpu", Role.DECODE, 1), ("tpu", Role.DECODE, 32), ("gpu", Role.DECODE, 32), ("gpu", Role.COLOCATED, 8)],
)
def test_only_who_hears_of_sequences_before_they_come_takes_many_turns(platform: str, role: Role, most: int):
    assert one_stage_turns(platform, role) == most
