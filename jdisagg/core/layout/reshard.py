"""Resharding of KV between two meshes: which heads of which shard are sent where, which layers, in what page counts.

Heads: source shards hold runs of `heads_per_shard` heads, destination shards hold other runs. Both are multiples of
their greatest common divisor, the head slice: the source splits its shard into slices, each is sent whole, and a
destination shard is a row of slices. No slice is split in transfer. A slice of padding alone is not sent: the
destination writes zeros there.

Pages: if the page sizes differ, a page group is the fewest pages of each end that hold the same tokens. Pages are sent
in the source's layout, in whole groups (the null page fills them up), and the destination splits them anew. Numbers are
sent in the narrower of the two dtypes.

Layers: those of a draft model are numbered behind the model's, in a stage of their own. They have heads of their own,
and are sent only to the same draft model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import gcd, lcm

from jdisagg.core.layout.kv_layout import DTYPE_BYTES, SCALE_BYTES, SCALED, DraftPages
from jdisagg.core.layout.tensor_cut import heads_per_shard, kv_heads_of_shard

TRANSFER_BUCKETS = (4, 16, 64)  # page counts of one pack and one insert
MOVE_PAGES = 8  # fixed cost of a move, in pages: two programs and the copies of its head slices


@dataclass(frozen=True, slots=True)
class StageShape:
    """The description of a stage for the other end: its layers, the shards of its heads, its pages."""

    layers: range
    tp: int
    page_size: int
    dtype: str = "float32"
    draft: str = ""  # the draft model of these pages, which are sent to no other model; "": the served model
    draft_heads: int = 0  # its KV heads


def draft_shape(draft: DraftPages, tp: int) -> StageShape:
    """Returns a draft model's pages as a stage."""
    layout = draft.layout
    return StageShape(draft.layers, tp, layout.page_size, layout.dtype, draft.name, layout.num_kv_heads)


# ------------------------------------------------------------------ heads


@dataclass(frozen=True, slots=True)
class HeadSlice:
    """Consecutive heads of a shard: slice `index` of source shard `shard`."""

    shard: int
    index: int


@dataclass(frozen=True, slots=True)
class HeadPlan:
    """The head slices of each destination shard: `slices[d]` are those of shard d in order, `slice_heads` heads each.
    None stands for a slice of padding alone: it is not sent. A slice with some heads may end with padding, which is
    sent as it is."""

    slice_heads: int
    slices_per_source: int
    slices: tuple[tuple[HeadSlice | None, ...], ...]

    @property
    def slices_per_destination(self) -> int:
        return len(self.slices[0])

    @property
    def num_sent(self) -> int:
        return sum(each is not None for row in self.slices for each in row)


def plan_heads(num_kv_heads: int, source_tp: int, destination_tp: int) -> HeadPlan:
    """Plans the heads from TP `source_tp` to TP `destination_tp`; with more shards than heads, replicas share the
    sending."""
    held, wanted = heads_per_shard(num_kv_heads, source_tp), heads_per_shard(num_kv_heads, destination_tp)
    size = gcd(held, wanted)
    slices = list[tuple[HeadSlice | None, ...]]()
    for destination in range(destination_tp):
        heads = kv_heads_of_shard(num_kv_heads, destination_tp, destination)
        sent = [_slice_of_head(head, num_kv_heads, source_tp, destination, size) for head in heads[::size]]
        slices.append((*sent, *[None] * (wanted // size - len(sent))))
    return HeadPlan(size, held // size, tuple(slices))


def padded_slices(num_kv_heads: int, tp: int, slices: int) -> list[list[bool]]:
    """Returns [shard][slice]: True for padding alone, if each of `tp` shards is split into `slices` slices."""
    size = heads_per_shard(num_kv_heads, tp) // slices
    held = [len(kv_heads_of_shard(num_kv_heads, tp, shard)) for shard in range(tp)]
    return [[index * size >= heads for index in range(slices)] for heads in held]


def _slice_of_head(head: int, num_kv_heads: int, source_tp: int, destination: int, size: int) -> HeadSlice:
    holders = shards_with(head, num_kv_heads, source_tp)
    shard = holders[destination % len(holders)]
    return HeadSlice(shard, (head - kv_heads_of_shard(num_kv_heads, source_tp, shard).start) // size)


def shards_with(head: int, num_kv_heads: int, tp: int) -> list[int]:
    """Returns the shards that hold this head."""
    return [shard for shard in range(tp) if head in kv_heads_of_shard(num_kv_heads, tp, shard)]


# ------------------------------------------------------------------ layers


@dataclass(frozen=True, slots=True)
class LayerRun:
    """Layers that one source stage and one destination stage both hold, numbered over the model."""

    source_stage: int
    destination_stage: int
    layers: range


def plan_layers(source: tuple[range, ...], destination: tuple[range, ...]) -> tuple[LayerRun, ...]:
    """Returns every non-empty intersection of the two splits, in layer order."""
    runs = list[LayerRun]()
    for s, held in enumerate(source):
        for d, wanted in enumerate(destination):
            shared = range(max(held.start, wanted.start), min(held.stop, wanted.stop))
            if shared:
                runs.append(LayerRun(s, d, shared))
    return tuple(runs)


# ------------------------------------------------------------------ pages


@dataclass(frozen=True, slots=True)
class PageGroup:
    """The fewest tokens that fill whole pages at both ends: `source` pages at one, `destination` pages at the other."""

    source: int
    destination: int

    def buckets(self, pages: tuple[int, ...] = TRANSFER_BUCKETS) -> tuple[int, ...]:
        """Returns the declared sizes in groups: at the end with the smaller pages, at most `pages` pages (one group at
        least)."""
        return tuple(sorted({max(1, each // max(self.source, self.destination)) for each in pages}))


def group_pages(source_page_size: int, destination_page_size: int) -> PageGroup:
    tokens = lcm(source_page_size, destination_page_size)
    return PageGroup(tokens // source_page_size, tokens // destination_page_size)


def pages_elsewhere(start: int, stop: int, num_tokens: int, page_size: int, group: PageGroup) -> tuple[int, int]:
    """Returns the indices in the other end's page list of pages `start` to `stop`, of a sequence of `num_tokens`
    tokens. `start` begins a group; `stop` ends one, or the sequence. page_size: of this end."""
    assert start % group.source == 0, (start, group)
    there = page_size * group.source // group.destination
    return start // group.source * group.destination, -(-min(stop * page_size, num_tokens) // there)


@dataclass(frozen=True, slots=True)
class Span:
    """The indices in the two page lists that one move covers, and its declared size in groups."""

    source: tuple[int, int]
    destination: tuple[int, int]
    groups: int


def plan_spans(source_pages: int, destination_pages: int, group: PageGroup) -> tuple[Span, ...]:
    """Returns the moves of a transfer whose two page lists hold the same tokens; the last group may be partial at
    either end."""
    groups = -(-source_pages // group.source)
    assert groups == -(-destination_pages // group.destination), (source_pages, destination_pages, group)
    spans = list[Span]()
    for start, stop, size in plan_moves(groups, group.buckets(), max(group.source, group.destination)):
        from_, to = (
            (start * each, min(stop * each, held))
            for each, held in ((group.source, source_pages), (group.destination, destination_pages))
        )
        spans.append(Span(from_, to, size))
    return tuple(spans)


def plan_moves(
    pages: int, buckets: tuple[int, ...] = TRANSFER_BUCKETS, weight: int = 1
) -> tuple[tuple[int, int, int], ...]:
    """Returns (start, stop, bucket) of each move of a transfer of `pages` pages: the cheapest list of declared sizes. A
    move costs `weight` for each page of its bucket, filled or not, and MOVE_PAGES; largest moves come first."""
    whole, rest = divmod(pages, buckets[-1])
    sizes, start, moves = (buckets[-1],) * whole + _cheapest(rest, buckets, weight)[2], 0, list[tuple[int, int, int]]()
    for size in sizes:
        moves.append((start, min(start + size, pages), size))
        start += size
    return tuple(moves)


@cache
def _cheapest(pages: int, buckets: tuple[int, ...], weight: int) -> tuple[int, int, tuple[int, ...]]:
    """Returns the cost of the cheapest moves of `pages` pages, their number, and their sizes, descending."""
    if pages <= 0:
        return 0, 0, ()
    found = list[tuple[int, int, tuple[int, ...]]]()
    for size in buckets:
        cost, number, sizes = _cheapest(pages - size, buckets, weight)
        found.append((cost + size * weight + MOVE_PAGES, number + 1, tuple(sorted((size, *sizes), reverse=True))))
    return min(found)


# ------------------------------------------------------------------ the whole plan


@dataclass(frozen=True, slots=True)
class Route:
    """The transfer of some layers from one stage to another, for any number of pages."""

    source_stage: int
    destination_stage: int
    layers: range
    heads: HeadPlan
    group: PageGroup
    dtype: str  # dtype of the numbers in transfer


@dataclass(frozen=True, slots=True)
class Move:
    """One pack, one copy and one insert, of fixed shapes."""

    route: Route
    span: Span


@dataclass(frozen=True, slots=True)
class Cost:
    wire_bytes: int  # bytes of values, padding included
    programs: int
    puts: int  # copied single-device arrays


@dataclass(frozen=True, slots=True)
class Reshard:
    """All moves of one transfer of `num_tokens` tokens of `layers`."""

    source: tuple[StageShape, ...]
    destination: tuple[StageShape, ...]
    num_kv_heads: int
    num_tokens: int
    layers: range
    moves: tuple[Move, ...]

    def cost(self, row_size: int) -> Cost:
        """Returns the cost; row_size: numbers of a token and head, K and V together."""
        total, puts = 0, 0
        for move in self.moves:
            route, held = move.route, self.source[move.route.source_stage]
            heads = route.heads.num_sent * route.heads.slice_heads
            tokens = move.span.groups * route.group.source * held.page_size
            scales = 2 * SCALE_BYTES if route.dtype in SCALED else 0  # scales of K and of V
            total += len(route.layers) * tokens * heads * (row_size * DTYPE_BYTES[route.dtype] + scales)
            puts += route.heads.num_sent
        return Cost(total, 2 * len(self.moves), puts)


@cache
def plan_routes(
    source: tuple[StageShape, ...],
    destination: tuple[StageShape, ...],
    num_kv_heads: int,
    layers: range | None = None,
) -> tuple[Route, ...]:
    """Returns the routes of `layers` (None: all) between two splits of one model, in layer order; cached."""
    wanted = range(0, destination[-1].layers.stop) if layers is None else layers
    cut = tuple(layers_within(stage.layers, wanted) for stage in source)
    routes = list[Route]()
    for run in plan_layers(cut, tuple(stage.layers for stage in destination)):
        here, there = source[run.source_stage], destination[run.destination_stage]
        if here.draft != there.draft:
            continue
        heads = plan_heads(here.draft_heads or num_kv_heads, here.tp, there.tp)
        group = group_pages(here.page_size, there.page_size)
        dtype = narrower(here.dtype, there.dtype)
        routes.append(Route(run.source_stage, run.destination_stage, run.layers, heads, group, dtype))
    return tuple(routes)


def plan_reshard(
    source: tuple[StageShape, ...],
    destination: tuple[StageShape, ...],
    num_kv_heads: int,
    num_tokens: int,
    layers: range | None = None,
) -> Reshard:
    """Returns the cheapest moves of declared sizes that transfer the KV of `num_tokens` tokens between the two
    splits."""
    moves = list[Move]()
    for route in plan_routes(source, destination, num_kv_heads, layers):
        stages = source[route.source_stage], destination[route.destination_stage]
        held, wanted = (-(-num_tokens // stage.page_size) for stage in stages)
        moves += [Move(route, span) for span in plan_spans(held, wanted, route.group)]
    wanted_layers = range(0, destination[-1].layers.stop) if layers is None else layers
    return Reshard(source, destination, num_kv_heads, num_tokens, wanted_layers, tuple(moves))


def plan_transfer(
    source: tuple[StageShape, ...],
    destination: tuple[StageShape, ...],
    num_kv_heads: int,
    num_pages: tuple[int, int],
    layers: range | None = None,
) -> Reshard:
    """Returns `plan_reshard` for the tokens in these numbers of pages, the source's and the destination's."""
    sizes = source[0].page_size, destination[0].page_size
    num_tokens = min(pages * size for pages, size in zip(num_pages, sizes, strict=True))
    assert num_pages == tuple(-(-num_tokens // size) for size in sizes), (num_pages, sizes)
    return plan_reshard(source, destination, num_kv_heads, num_tokens, layers)


def narrower(one: str, other: str) -> str:
    """Returns the dtype of the transfer: the destination loses no precision it could keep, and no byte is wasted."""
    return min(one, other, key=lambda dtype: DTYPE_BYTES[dtype])


def layers_within(layers: range, wanted: range) -> range:
    """Returns the intersection of two ranges of layers."""
    return range(max(layers.start, wanted.start), min(layers.stop, wanted.stop))


# Verification of a plan: every (layer, head, token) is sent exactly once, from a shard that holds it.
#
# It is independent of the planner: it uses only which heads a shard holds, which layers a stage, which tokens a page.
# The error for a wrong plan names the first fault.


class BrokenPlan(AssertionError):
    """A plan that loses KV, sends it twice, or takes it from a shard that does not hold it; the message says what and
    where."""


def prove(plan: Reshard) -> None:
    """Raises BrokenPlan unless each destination shard gets each (layer, head, token) it wants once, from a holder."""
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
    """Returns the first token and one past the last token of a move, the same at both ends."""
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
    """Returns the existing heads of a slice, numbered over the model, which must be those of the destination."""
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
    """Returns the KV heads of the model whose pages a stage has."""
    return stage.draft_heads or plan.num_kv_heads


def _prove_whole(plan: Reshard, landed: dict[tuple[int, int, int, int], list[tuple[int, int]]]) -> None:
    """Raises unless every destination is filled from the first token to the last, none twice, and no other is
    written."""
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
    """Raises unless shards that hold the same head send it equally often, up to one move's slices."""
    for (stage, layer, head), by in sent.items():
        source = next(each for each in plan.source if layer in each.layers)
        holders = shards_with(head, heads_of(plan, source), source.tp)
        counts = [by.get(shard, 0) for shard in holders]
        moves = sum(move.route.destination_stage == stage and layer in move.route.layers for move in plan.moves)
        if max(counts) - min(counts) > moves:
            raise BrokenPlan(f"layer {layer}, head {head}: shards {holders} send it {counts} times")


# Which process of a worker group holds which shard, and so which pieces of a transfer each process sends to which.
#
# A worker's devices are numbered stage by stage, and its processes hold equal runs of them, rank 0 the first. A holder
# is the rank of the process that has a shard; a worker in one process has one holder, 0, for all shards.

Holders = tuple[tuple[int, ...], ...]  # [stage][shard]: the rank


def holders_of(shards: Sequence[int], num_devices: int, num_processes: int, stages_share: bool) -> Holders:
    """Returns the holders of stages with these shards, on devices of their own or all on the same ones."""
    per = num_devices // num_processes
    assert per * num_processes == num_devices, (num_devices, num_processes)
    first, found = 0, list[tuple[int, ...]]()
    for number in shards:
        found.append(tuple((first + shard) // per for shard in range(number)))
        first += 0 if stages_share else number
    return tuple(found)


def of_one_process(shards: Sequence[int]) -> Holders:
    return tuple((0,) * number for number in shards)


def senders(heads: HeadPlan, source: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Returns [destination shard][sent head slice]: the rank that sends it; source: a stage's holders."""
    return tuple(tuple(source[each.shard] for each in row if each is not None) for row in heads.slices)


def shards_held(holders: Sequence[int], rank: int) -> list[int]:
    """Returns the shards of a stage that this process holds."""
    return [shard for shard, holder in enumerate(holders) if holder == rank]
