"""How heads and channels are cut for any number of shards: everything once, in order, nothing between."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdisagg.core.layout.tensor_cut import (
    Channels,
    KVHeads,
    QueryHeads,
    heads_per_shard,
    kv_heads_of_shard,
    replicas_of,
)

kv_heads, tps, groups = st.integers(1, 16), st.integers(1, 40), st.integers(1, 9)


@given(kv_heads, tps)
def test_every_kv_head_is_held_in_order_by_as_many_shards_as_share_it(heads: int, tp: int):
    runs = [kv_heads_of_shard(heads, tp, shard) for shard in range(tp)]
    assert [head for run in runs for head in run] == [h for h in range(heads) for _ in range(replicas_of(heads, tp))]
    assert max(map(len, runs)) == len(runs[0]) == heads_per_shard(heads, tp), "the first shard has no padding"
    assert heads_per_shard(heads, tp) * tp < heads + tp or heads_per_shard(heads, tp) == 1


@given(kv_heads, groups, tps)
def test_every_query_head_is_once_on_a_shard_that_holds_its_kv_head(heads: int, group: int, tp: int):
    queries = QueryHeads(heads * group, heads)
    runs = [queries.held(tp, shard) for shard in range(tp)]
    assert [head for run in runs for head in run] == list(range(heads * group))
    for shard, run in enumerate(runs):
        assert len(run) <= queries.width(tp)
        assert {head // group for head in run} <= set(kv_heads_of_shard(heads, tp, shard))


@given(kv_heads, groups, tps)
def test_query_heads_lie_where_attention_looks_for_their_kv_head(heads: int, group: int, tp: int):
    """Attention takes the query heads of a shard as equal groups, one for each KV head in turn."""
    queries, places = QueryHeads(heads * group, heads), heads_per_shard(heads, tp)
    size, rest = divmod(queries.width(tp), places)
    assert rest == 0
    for shard in range(tp):
        kv = kv_heads_of_shard(heads, tp, shard)
        assert [head // group for head in queries.held(tp, shard)] == [
            kv[place // size] for place in range(len(queries.held(tp, shard)))
        ]


@given(st.integers(1, 200), tps)
def test_every_channel_is_on_one_shard(size: int, tp: int):
    runs = [Channels(size).held(tp, shard) for shard in range(tp)]
    assert [row for run in runs for row in run] == list(range(size))
    assert all(len(run) <= Channels(size).width(tp) for run in runs) and Channels(size).width(tp) * tp < size + tp


@pytest.mark.parametrize(
    ("tp", "queries", "held"),
    [
        (1, 9, [3]),
        (2, 6, [2, 1]),
        (3, 3, [1, 1, 1]),
        (4, 3, [1, 1, 1, 0]),
        (6, 2, [1] * 6),
        (8, 2, [1] * 6 + [0, 0]),
        (9, 1, [1] * 9),
    ],
)
def test_nine_query_heads_of_three_kv_heads(tp: int, queries: int, held: list[int]):
    assert QueryHeads(9, 3).width(tp) == queries
    assert [len(kv_heads_of_shard(3, tp, shard)) for shard in range(tp)] == held


def test_rows_are_counted_by_the_width_of_a_head():
    assert (KVHeads(3, 64).width(2), KVHeads(3, 64).held(2, 1)) == (128, range(128, 192))
    assert (QueryHeads(9, 3, 64).width(2), QueryHeads(9, 3, 64).held(2, 1)) == (384, range(384, 576))
    assert QueryHeads(9, 3, 64).held(8, 0) == range(0, 64) and QueryHeads(9, 3, 64).held(8, 1) == range(64, 192)
