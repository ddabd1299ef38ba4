"""The proof of a plan between two meshes: every (layer, head, token) moves exactly once, from where it is.

It knows nothing of how plans are made: all it uses is which heads a shard holds, which layers a stage, which tokens a
page. A plan that is wrong is named with its first culprit.
"""

from __future__ import annotations

from jdisagg.core.reshard import HeadSlice, Move, Reshard, Route, StageShape, layers_within, shards_with
from jdisagg.core.tensor_cut import heads_per_shard, kv_heads_of_shard


class BrokenPlan(AssertionError):
    """A plan that loses something, moves it twice, or takes it from where it is not; says what and where."""


def prove(plan: Reshard) -> None:
    """Raises BrokenPlan unless each destination shard gets each (layer, head, token) it wants once, from a holder.

    It knows nothing of how plans are made: all it uses is which heads a shard holds and which tokens a page.
    """
    landed: dict[tuple[int, int, int, int], list[tuple[int, int]]] = {}
    sent: dict[tuple[int, int, int], dict[int, int]] = {}
    for move in plan.moves:
        tokens = _tokens(plan, move)
        for shard, row in enumerate(move.route.heads.slices):
            for place, head_slice in enumerate(row):
                if head_slice is None:
                    continue
                for head in _heads(plan, move.route, shard, place, head_slice):
                    for layer in _layers(plan, move.route):
                        landed.setdefault((move.route.destination_stage, shard, layer, head), []).append(tokens)
                        by = sent.setdefault((move.route.destination_stage, layer, head), {})
                        by[head_slice.shard] = by.get(head_slice.shard, 0) + 1
    _prove_whole(plan, landed)
    _prove_shared(plan, sent)


def _tokens(plan: Reshard, move: Move) -> tuple[int, int]:
    """First and one past the last token of a move, the same at both ends."""
    stages = plan.source[move.route.source_stage], plan.destination[move.route.destination_stage]
    spans = move.span.source, move.span.destination
    here, there = (
        (start * stage.page_size, min(stop * stage.page_size, plan.num_tokens))
        for stage, (start, stop) in zip(stages, spans, strict=True)
    )
    if here != there:
        raise BrokenPlan(f"pages of tokens {here[0]} to {here[1]} are to land in pages of {there[0]} to {there[1]}")
    group, size = move.route.group, move.span.groups
    if group.source * stages[0].page_size != group.destination * stages[1].page_size:
        raise BrokenPlan(f"{group} does not hold the same tokens of {stages[0].page_size} and {stages[1].page_size}")
    for (start, stop), pages in zip(spans, (group.source, group.destination), strict=True):
        if stop - start > size * pages or size not in group.buckets():
            raise BrokenPlan(f"{stop - start} pages do not fit a move of {size} groups, declared: {group.buckets()}")
    return here


def _layers(plan: Reshard, route: Route) -> range:
    for stage in (plan.source[route.source_stage], plan.destination[route.destination_stage]):
        for layer in route.layers:
            if layer not in stage.layers:
                raise BrokenPlan(f"layer {layer} moves by a stage that holds {stage.layers}")
    return route.layers


def _heads(plan: Reshard, route: Route, shard: int, place: int, head_slice: HeadSlice) -> range:
    """The heads of a slice that exist, numbered over the model, which are those that belong where it goes."""
    drafts = plan.source[route.source_stage].draft, plan.destination[route.destination_stage].draft
    if len(set(drafts)) > 1:
        raise BrokenPlan(f"pages of {drafts[0] or 'the model'} are to land in those of {drafts[1] or 'the model'}")
    number, size = heads_of(plan, plan.destination[route.destination_stage]), route.heads.slice_heads
    source_tp = plan.source[route.source_stage].tp
    destination_tp = plan.destination[route.destination_stage].tp
    held = heads_per_shard(number, source_tp)
    if not (0 <= head_slice.shard < source_tp and head_slice.index >= 0 and (head_slice.index + 1) * size <= held):
        raise BrokenPlan(f"{head_slice} of {size} heads is to come from {source_tp} shards of {held} heads")
    there, here = (
        kv_heads_of_shard(number, tp, index)[at * size : (at + 1) * size]
        for tp, index, at in ((source_tp, head_slice.shard, head_slice.index), (destination_tp, shard, place))
    )
    if not here:
        raise BrokenPlan(f"{head_slice} is to land in place {place * size} of shard {shard}, which is padding")
    if list(there) != list(here):
        found = f"head {there[0]}" if there else "padding"
        raise BrokenPlan(f"{found} is to land in the place of head {here[0]} on shard {shard}")
    return here


def heads_of(plan: Reshard, stage: StageShape) -> int:
    """KV heads of the model whose pages a stage has."""
    return stage.draft_heads or plan.num_kv_heads


def _prove_whole(plan: Reshard, landed: dict[tuple[int, int, int, int], list[tuple[int, int]]]) -> None:
    """Every place is filled from the first token to the last, none twice, and nothing goes elsewhere."""
    for index, stage in enumerate(plan.destination):
        for shard in range(stage.tp):
            for layer in layers_within(stage.layers, plan.layers):
                for head in kv_heads_of_shard(heads_of(plan, stage), stage.tp, shard):
                    where = f"layer {layer}, head {head} of shard {shard} of stage {index}"
                    _prove_row(where, landed.pop((index, shard, layer, head), []), plan.num_tokens)
    for index, shard, layer, head in landed:
        raise BrokenPlan(f"layer {layer}, head {head} has no place on shard {shard} of stage {index}")


def _prove_row(where: str, spans: list[tuple[int, int]], num_tokens: int) -> None:
    reached = 0
    for start, stop in sorted(spans):
        if start != reached:
            what = "never moves" if start > reached else "moves twice"
            raise BrokenPlan(f"{where}: token {min(start, reached)} {what}")
        reached = stop
    if reached != num_tokens:
        raise BrokenPlan(f"{where}: token {reached} never moves")


def _prove_shared(plan: Reshard, sent: dict[tuple[int, int, int], dict[int, int]]) -> None:
    """Shards that hold the same head send it equally often, but for one move's slices."""
    for (stage, layer, head), by in sent.items():
        source = next(each for each in plan.source if layer in each.layers)
        holders = shards_with(head, heads_of(plan, source), source.tp)
        counts = [by.get(shard, 0) for shard in holders]
        moves = sum(move.route.destination_stage == stage and layer in move.route.layers for move in plan.moves)
        if max(counts) - min(counts) > moves:
            raise BrokenPlan(f"layer {layer}, head {head}: shards {holders} send it {counts} times")
