"""Head atoms, layer runs and page moves between two cuts."""

import pytest

from jdisagg.core.kv_layout import heads_per_shard, kv_head_of_shard
from jdisagg.policy.reshard import plan_heads, plan_layers, plan_moves


def fits(heads: int, tp: int) -> bool:
    return heads % tp == 0 or tp % heads == 0


@pytest.mark.parametrize("heads", [1, 2, 4, 6, 8])
def test_every_destination_shard_gets_just_its_heads_in_order(heads: int):
    for source in filter(lambda tp: fits(heads, tp), range(1, 9)):
        for destination in filter(lambda tp: fits(heads, tp), range(1, 9)):
            plan = plan_heads(heads, source, destination)
            assert plan.atoms_per_source * plan.atom_heads == heads_per_shard(heads, source)
            for shard, row in enumerate(plan.pieces):
                got = [
                    kv_head_of_shard(heads, source, atom.shard) + atom.index * plan.atom_heads + head
                    for atom in row
                    for head in range(plan.atom_heads)
                ]
                first = kv_head_of_shard(heads, destination, shard)
                assert got == list(range(first, first + heads_per_shard(heads, destination)))


def test_replicated_heads_are_sent_by_different_shards():
    plan = plan_heads(1, 4, 4)
    assert [row[0].shard for row in plan.pieces] == [0, 1, 2, 3]


def test_equal_cuts_send_whole_shards():
    plan = plan_heads(8, 4, 4)
    assert plan.atom_heads == 2 and plan.atoms_per_source == plan.atoms_per_destination == 1


def test_layer_runs_cover_every_layer_once_whatever_the_cuts():
    source, destination = (range(0, 3), range(3, 7), range(7, 8)), (range(0, 5), range(5, 8))
    runs = plan_layers(source, destination)
    assert [layer for run in runs for layer in run.layers] == list(range(8))
    for run in runs:
        assert set(run.layers) <= set(source[run.source_stage]) & set(destination[run.destination_stage])


@pytest.mark.parametrize("pages", [1, 4, 5, 16, 17, 64, 65, 200])
def test_moves_cover_every_page_once_in_declared_sizes(pages: int):
    moves = plan_moves(pages, (4, 16, 64))
    assert [page for start, stop, _ in moves for page in range(start, stop)] == list(range(pages))
    assert all(stop - start <= bucket and bucket in (4, 16, 64) for start, stop, bucket in moves)


def test_no_pages_are_no_moves():
    assert plan_moves(0) == ()
