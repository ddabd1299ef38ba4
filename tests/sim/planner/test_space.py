"""What may be built of so many devices: each once, none too large, none with room for another worker."""

import pytest

from jdisagg.core.errors import ConfigError
from jdisagg.core.worker_config import TransferMode
from jdisagg.sim.planner.space import CandidateSource, Kind, devices_of
from tests.sim.planner.cases import candidate


def test_no_configuration_takes_more_than_there_is_or_comes_twice():
    for fill in (True, False):
        found = list(CandidateSource(12, chunks=(512,), fill=fill))
        assert len(found) == len(set(found))
        assert all(2 <= each.devices <= 12 or each.kind is Kind.SINGLE for each in found)
        assert all(pool.pp == 1 for each in found for pool in each.mesh.pools if pool.role == "prefill")


def test_a_full_configuration_has_no_room_for_another_of_its_workers():
    for each in CandidateSource(12, chunks=(512,)):
        assert all(12 - each.devices < devices_of(pool) // pool.count for pool in each.mesh.pools), each


def test_all_three_architectures_are_there_from_two_devices_on():
    assert {each.kind for each in CandidateSource(1, chunks=(512,))} == {Kind.SINGLE}
    assert {each.kind for each in CandidateSource(2, chunks=(512,))} == set(Kind)


def test_a_part_keeps_proportions_and_the_least_of_devices():
    whole = candidate("prefill:8xtp2,decode:4xpp2tp2")
    assert [(str(part.mesh), parts) for part, parts in (whole.part(), whole.part(10), whole.part(99))] == [
        ("prefill:2xtp2,decode:pp2tp2", 4),
        ("prefill:4xtp2,decode:2xpp2tp2", 2),
        ("prefill:8xtp2,decode:4xpp2tp2", 1),
    ]
    odd = candidate("prefill:3xtp1,decode:2xtp1")
    assert odd.part() == (odd, 1)


def test_neighbours_differ_in_one_thing():
    space = CandidateSource(4, chunks=(256, 512, 1024))
    split = list(space.neighbours(candidate("prefill:tp1,decode:tp1", 1024)))
    assert [(each.chunk_tokens, each.transfer) for each in split] == [
        (512, TransferMode.CHUNK),
        (1024, TransferMode.LAYER),
        (1024, TransferMode.WHOLE),
    ]
    assert {each.chunk_tokens for each in space.neighbours(candidate("colocated:tp1", 512))} == {256, 1024}


def test_prefill_stages_are_tried_where_they_are_asked_for():
    found = {str(pool) for each in CandidateSource(4, chunks=(512,), prefill_pps=(1, 2)) for pool in each.mesh.pools}
    assert {"prefill:tp2", "prefill:pp2"} <= found


def test_an_empty_space_is_refused():
    with pytest.raises(ConfigError, match="0 devices"):
        CandidateSource(0)
    with pytest.raises(ConfigError, match="no tps"):
        CandidateSource(8, tps=())
