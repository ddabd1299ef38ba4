"""Which process of a group holds which shard, and what it sends to whom."""

from __future__ import annotations

from itertools import product

import pytest

from jdisagg.core.layout.reshard import holders_of, of_one_process, plan_heads, senders, shards_held


def test_layer_groups_that_share_a_mesh_are_cut_alike_and_stages_follow_each_other() -> None:
    assert holders_of([4, 4], 4, 2, stages_share=True) == ((0, 0, 1, 1), (0, 0, 1, 1))
    assert holders_of([2, 2], 4, 2, stages_share=False) == ((0, 0), (1, 1))
    assert holders_of([2, 2], 4, 4, stages_share=False) == ((0, 1), (2, 3))
    assert of_one_process([2, 1]) == ((0, 0), (0,))


@pytest.mark.parametrize("source_tp, tp, heads", [*product([1, 2, 4], [1, 2, 4], [1, 2, 3, 4, 8])])
def test_pieces_of_all_pairs_of_processes_together_are_every_array_once(source_tp: int, tp: int, heads: int) -> None:
    plan = plan_heads(heads, source_tp, tp)
    for here, there in product([n for n in (1, 2, 4) if n <= source_tp], [n for n in (1, 2, 4) if n <= tp]):
        source = holders_of([source_tp], source_tp, here, stages_share=True)[0]
        destination = holders_of([tp], tp, there, stages_share=True)[0]
        rows = senders(plan, source)
        sent = [
            (shard, index)
            for giver, taker in product(range(here), range(there))
            for shard in shards_held(destination, taker)
            for index, rank in enumerate(rows[shard])
            if rank == giver
        ]
        assert sorted(sent) == [(shard, index) for shard, row in enumerate(rows) for index in range(len(row))]
        assert len(sent) == plan.num_sent
