"""Head slices, layer runs and page moves between two cuts, and the proof that whole plans move everything once."""

from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdisagg.core.layout.reshard import (
    MOVE_PAGES,
    TRANSFER_BUCKETS,
    BrokenPlan,
    HeadPlan,
    HeadSlice,
    PageGroup,
    Reshard,
    Route,
    StageShape,
    group_pages,
    padded_slices,
    plan_heads,
    plan_layers,
    plan_moves,
    plan_reshard,
    plan_transfer,
    prove,
)
from jdisagg.core.layout.tensor_cut import heads_per_shard, kv_heads_of_shard

TPS = range(1, 9)


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 5, 6, 7, 8])
def test_every_destination_shard_gets_just_its_heads_in_order(heads: int):
    for source in TPS:
        for destination in TPS:
            plan = plan_heads(heads, source, destination)
            assert plan.slices_per_source * plan.slice_heads == heads_per_shard(heads, source)
            for shard, row in enumerate(plan.slices):
                assert len(row) * plan.slice_heads == heads_per_shard(heads, destination)
                got = [head for each in row if each is not None for head in heads_in(each, plan, heads, source)]
                assert got == list(kv_heads_of_shard(heads, destination, shard))


def heads_in(each: HeadSlice, plan: HeadPlan, heads: int, tp: int) -> range:
    size = plan.slice_heads
    return kv_heads_of_shard(heads, tp, each.shard)[each.index * size : (each.index + 1) * size]


def test_padding_is_not_sent():
    """3 heads: 2 and 1 on two shards, one each on the first three of four."""
    assert plan_heads(3, 2, 4).slices == ((HeadSlice(0, 0),), (HeadSlice(0, 1),), (HeadSlice(1, 0),), (None,))
    assert plan_heads(3, 4, 2).slices == ((HeadSlice(0, 0), HeadSlice(1, 0)), (HeadSlice(2, 0), None))
    assert plan_heads(7, 4, 2).slices[1] == (HeadSlice(2, 0), HeadSlice(3, 0)), "the last with its padding behind it"
    assert [plan_heads(3, 2, tp).num_sent for tp in (1, 2, 3, 4, 6, 8)] == [3, 2, 3, 3, 6, 6]


@pytest.mark.parametrize("heads", [1, 3, 5, 8])
def test_both_ends_know_the_same_padding(heads: int):
    for source in TPS:
        for destination in TPS:
            plan = plan_heads(heads, source, destination)
            found = [[each is None for each in row] for row in plan.slices]
            assert padded_slices(heads, destination, plan.slices_per_destination) == found


def test_replicated_heads_are_sent_by_different_shards():
    plan = plan_heads(1, 4, 4)
    assert [each.shard for (each,) in plan.slices if each is not None] == [0, 1, 2, 3]


def test_equal_cuts_send_whole_shards():
    plan = plan_heads(8, 4, 4)
    assert plan.slice_heads == 2 and plan.slices_per_source == plan.slices_per_destination == 1


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


@pytest.mark.parametrize("sizes", [(16, 16), (8, 16), (16, 8), (24, 16)])
@pytest.mark.parametrize("tokens", [1, 16, 17, 90, 1100])
def test_a_plan_of_page_lists_takes_all_their_pages(sizes: tuple[int, int], tokens: int):
    source, destination = (stages([1, 4], 1, size) for size in sizes)
    number = -(-tokens // sizes[0]), -(-tokens // sizes[1])
    plan = plan_transfer(source, destination, 2, number)
    prove(plan)
    spans = [move.span for move in plan.moves if 0 in move.route.layers]
    assert (spans[-1].source[1], spans[-1].destination[1]) == number


def test_page_lists_that_do_not_hold_the_same_tokens_are_not_planned():
    with pytest.raises(AssertionError, match="3, 1"):
        plan_transfer(stages([1], 1, 8), stages([1], 1, 16), 2, (3, 1))


@cache
def least_cost(pages: int) -> int:
    """By trying every list of declared sizes."""
    if pages <= 0:
        return 0
    return min(size + MOVE_PAGES + least_cost(pages - size) for size in TRANSFER_BUCKETS)


def test_no_other_list_of_moves_is_cheaper():
    for pages in range(300):
        assert sum(size + MOVE_PAGES for _, _, size in plan_moves(pages)) == least_cost(pages)
    assert [size for _, _, size in plan_moves(70)] == [64, 16]
    assert [size for _, _, size in plan_moves(17)] == [16, 4], "47 null pages cost more than a second move"


def test_groups_hold_the_same_tokens_and_no_fewer_would_do():
    assert group_pages(16, 16) == PageGroup(1, 1)
    assert group_pages(16, 32) == PageGroup(2, 1)
    assert group_pages(64, 16) == PageGroup(1, 4)
    assert group_pages(24, 16) == PageGroup(2, 3)
    assert PageGroup(1, 1).buckets() == TRANSFER_BUCKETS
    assert PageGroup(1, 4).buckets() == (1, 4, 16)
    assert PageGroup(100, 1).buckets() == (1,)


# ------------------------------------------------------------------ whole plans


def stages(cuts: list[int], tp: int, page_size: int, dtype: str = "float32") -> tuple[StageShape, ...]:
    """Stages that begin at 0 and at each of the cuts but the last, where the last one ends."""
    return tuple(StageShape(range(*pair), tp, page_size, dtype) for pair in pairwise([0, *cuts]))


def cuts_of(layers: int) -> st.SearchStrategy[list[int]]:
    inner = st.sets(st.integers(1, max(1, layers - 1)), max_size=7)
    return inner.map(lambda found: sorted({each for each in found if each < layers} | {layers}))


@st.composite
def reshards(draw: st.DrawFn) -> Reshard:
    layers, heads, tps = draw(st.integers(1, 9)), draw(st.integers(1, 12)), st.integers(1, 16)
    sizes, dtypes = st.sampled_from([8, 16, 24, 32, 64]), st.sampled_from(["float32", "bfloat16"])
    source, destination = (
        stages(draw(cuts_of(layers)), draw(tps), draw(sizes), draw(dtypes)) for _ in range(2)
    )  # fmt: skip
    first = draw(st.integers(0, layers - 1))
    wanted = draw(st.sampled_from([None, range(first, draw(st.integers(first + 1, layers)))]))
    return plan_reshard(source, destination, heads, draw(st.integers(1, 5000)), wanted)


@st.composite
def reshards_with_drafts(draw: st.DrawFn) -> Reshard:
    """Both ends keep the same draft's pages, whose heads are other than the model's."""
    layers, heads, tps = draw(st.integers(1, 5)), draw(st.integers(1, 6)), st.integers(1, 8)
    own = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    ends = []
    for _ in range(2):
        tp, size = draw(tps), draw(st.sampled_from([8, 16, 24]))
        of_draft = StageShape(range(layers, layers + own[0]), tp, size, "float32", "small", own[1])
        ends.append((*stages(draw(cuts_of(layers)), tp, size), of_draft))
    wanted = draw(st.sampled_from([None, range(layers), range(layers - 1, layers + own[0])]))
    return plan_reshard(ends[0], ends[1], heads, draw(st.integers(1, 2000)), wanted)


@settings(max_examples=200, deadline=None)
@given(reshards_with_drafts())
def test_a_drafts_layers_move_once_with_heads_of_their_own(plan: Reshard):
    prove(plan)
    assert all(move.route.layers.start >= 0 for move in plan.moves)
    of_draft = [move for move in plan.moves if plan.source[move.route.source_stage].draft]
    assert bool(of_draft) == (plan.layers.stop > plan.source[-1].layers.start)


def test_a_drafts_pages_go_to_no_other_draft_and_to_none_that_keeps_none():
    model = stages([2], 1, 16)
    small, other = (StageShape(range(2, 3), 1, 16, "float32", name, 2) for name in ("small", "other"))
    for there in (model, (*model, other)):
        plan = plan_reshard((*model, small), there, 4, 40)
        assert {move.route.layers for move in plan.moves} == {range(2)}
    with pytest.raises(BrokenPlan, match="small"):
        wrong = plan_reshard((*model, small), (*model, small), 4, 40)
        prove(replace(wrong, destination=(*model, other)))


@settings(max_examples=500, deadline=None)
@given(reshards())
def test_every_layer_head_and_token_moves_once_whatever_the_two_ends(plan: Reshard):
    prove(plan)
    for move in plan.moves:
        assert move.route.dtype in (plan.source[0].dtype, plan.destination[0].dtype)


@pytest.mark.parametrize("heads", [3, 8])
def test_all_tensor_and_pipeline_cuts_of_a_model_are_proven(heads: int):
    for a in TPS:
        for b in range(1, 9):
            for c in TPS:
                destination = stages([(stage + 1) * 8 // b for stage in range(b)], c, 16)
                prove(plan_reshard(stages([8], a, 16), destination, heads, 100))


@settings(max_examples=300, deadline=None)
@given(reshards(), st.data())
def test_a_plan_with_one_thing_wrong_is_not_proven(plan: Reshard, data: st.DataObject):
    """Each fault is one that would lose bytes, move them twice, or mix them up."""
    at = data.draw(st.integers(0, len(plan.moves) - 1))
    broken = data.draw(st.sampled_from(faults(plan, at)))
    with pytest.raises(BrokenPlan):
        prove(replace(plan, moves=(*plan.moves[:at], *broken, *plan.moves[at + 1 :])))


def faults(plan: Reshard, at: int) -> list[tuple]:
    """What could stand in the place of move `at`."""
    move = plan.moves[at]
    route, span, rows = move.route, move.span, move.route.heads.slices
    first = rows[0][0]
    assert first is not None

    def with_heads(*slices: tuple[HeadSlice | None, ...]):
        return replace(move, route=replace(route, heads=replace(route.heads, slices=slices)))

    def shifted(pages: tuple[int, int]) -> tuple[int, int]:
        return pages[0] + 1, pages[1] + 1

    found = [
        (),  # forgotten
        (move, move),  # twice
        (replace(move, span=replace(span, source=shifted(span.source))),),
        (replace(move, span=replace(span, destination=shifted(span.destination))),),
        (replace(move, span=replace(span, groups=TRANSFER_BUCKETS[-1] + 1)),),  # no program was made for that
        (replace(move, route=replace(route, layers=range(route.layers.start + 1, route.layers.stop + 1))),),
        (with_heads((HeadSlice(first.shard, first.index + 1), *rows[0][1:]), *rows[1:]),),
        (with_heads((None, *rows[0][1:]), *rows[1:]),),
        (with_heads(*rows, rows[0]),),
    ]
    if rows[-1][0] is not None:
        found.append((with_heads(*rows[:-1]),))
    if rows[-1][-1] is None:  # a head is sent where none is to be
        found.append((with_heads(*rows[:-1], (*rows[-1][:-1], first)),))
    found += [(with_heads((each, *rows[0][1:]), *rows[1:]),) for each in padding_of(plan, route)]
    if len(set(rows[0])) > 1:
        found.append((with_heads(rows[0][::-1], *rows[1:]),))
    if span.source[1] - span.source[0] > 1:
        found.append((replace(move, span=replace(span, source=(span.source[0], span.source[1] - 1))),))
    return found


def padding_of(plan: Reshard, route: Route) -> list[HeadSlice]:
    """The slices of the source that hold no head."""
    tp, heads = plan.source[route.source_stage].tp, route.heads
    rows = padded_slices(plan.num_kv_heads, tp, heads.slices_per_source)
    return [HeadSlice(shard, index) for shard, row in enumerate(rows) for index, empty in enumerate(row) if empty]


def test_padding_that_is_shipped_in_place_of_a_head_is_named():
    """3 heads on two shards, 2 and 1: the fourth place is padding."""
    plan = plan_reshard(stages([1], 2, 16), stages([1], 1, 16), 3, 16)
    assert plan.moves[0].route.heads.slices == ((HeadSlice(0, 0), HeadSlice(0, 1), HeadSlice(1, 0)),)
    with pytest.raises(BrokenPlan, match=r"padding is to land in the place of head 2 on shard 0"):
        prove(with_row(plan, (HeadSlice(0, 0), HeadSlice(0, 1), HeadSlice(1, 1))))
    back = plan_reshard(stages([1], 1, 16), stages([1], 2, 16), 3, 16)
    filled = ((HeadSlice(0, 0), HeadSlice(0, 1)), (HeadSlice(0, 2), HeadSlice(0, 0)))
    with pytest.raises(BrokenPlan, match=r"is to land in place 1 of shard 1, which is padding"):
        prove(with_row(back, *filled))


def with_row(plan: Reshard, *slices: tuple[HeadSlice | None, ...]) -> Reshard:
    (move,) = plan.moves
    route = replace(move.route, heads=replace(move.route.heads, slices=slices))
    return replace(plan, moves=(replace(move, route=route),))


def test_a_culprit_is_named():
    plan = plan_reshard(stages([2], 2, 16), stages([1, 2], 1, 16), 4, 40)
    with pytest.raises(BrokenPlan, match=r"layer 1, head 0 of shard 0 of stage 1: token 0 never moves"):
        prove(replace(plan, moves=plan.moves[:1]))
    with pytest.raises(BrokenPlan, match=r"layer 0, head 0 of shard 0 of stage 0: token 0 moves twice"):
        prove(replace(plan, moves=(*plan.moves, plan.moves[0])))


def test_one_replica_that_sends_everything_is_not_proven():
    plan = plan_reshard(stages([1], 4, 16), stages([1], 4, 16), 1, 16)
    move = plan.moves[0]
    lazy = replace(move.route, heads=replace(move.route.heads, slices=((HeadSlice(0, 0),),) * 4))
    with pytest.raises(BrokenPlan, match=r"send it \[4, 0, 0, 0\] times"):
        prove(replace(plan, moves=(replace(move, route=lazy),)))


def test_cost_counts_bytes_programs_and_puts():
    source, destination = stages([4], 2, 16), stages([3, 4], 1, 32, "bfloat16")
    plan = plan_reshard(source, destination, 4, 100)  # 7 pages, 4 of the destination: 2 moves of 8 groups
    cost = plan.cost(row_size=16)
    assert [move.span.groups for move in plan.moves] == [8, 8]
    assert cost.wire_bytes == 4 * (8 * 32) * 4 * 2 * 8 * 2, "in bf16, and with the null pages"
    assert (cost.programs, cost.puts) == (4, 4)


def test_cost_counts_padding_that_travels_behind_a_head_and_none_that_does_not():
    def cost(heads: int, source_tp: int, destination_tp: int) -> tuple[int, int]:
        found = plan_reshard(stages([1], source_tp, 16), stages([1], destination_tp, 16), heads, 16).cost(row_size=16)
        return found.wire_bytes // (4 * 16 * 2 * 8 * 4), found.puts  # 4 pages are the smallest move

    assert cost(3, 2, 4) == (3, 3)
    assert cost(7, 4, 2) == (8, 4)
    assert cost(7, 4, 3) == (7, 7)


@settings(max_examples=200, deadline=None)
@given(reshards())
def test_no_number_of_tokens_asks_for_a_size_that_was_not_declared(plan: Reshard):
    for move in plan.moves:
        assert move.span.groups in move.route.group.buckets()
        assert move.span.groups * max(move.route.group.source, move.route.group.destination) <= max(
            TRANSFER_BUCKETS[-1], move.route.group.source, move.route.group.destination
        )
