"""What parts travel as: asked for, or chosen by what packing costs and the link takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdisagg.core.events import Received, ShipKV, WireCost, WiresTimed
from jdisagg.core.messages import Resend, StartPrefill
from jdisagg.core.request import Attempt, Request, RequestId, SamplingParams, WorkerId
from jdisagg.core.steps import KVTransfer
from jdisagg.core.worker_config import RAW, Compress, Role, TransferMode, WorkerConfig
from jdisagg.policy.worker.kv_sender import (
    GAIN,
    CodecPolicy,
    KVChunk,
    StreamingPolicy,
    TransferFit,
    choose_wire,
    cut_chunks,
)
from jdisagg.policy.worker.worker import Worker
from tests.sim.cases import worker
from tests.steps import runs_prefill

A1 = Attempt(RequestId("a"), 1)

COSTS = (WireCost(RAW, 1e-5, 65536), WireCost("int8", 5e-5, 17408))
THERE = WorkerId("decode-0")


def prefill(compress: Compress, **sizes):
    return worker("prefill-0", Role.PREFILL, compress=compress, **sizes)


def part(wire: str = RAW, pages: int = 10, layers: tuple[int, int] | None = None) -> KVTransfer:
    ids = tuple(range(1, pages + 1))
    return KVTransfer(A1, WorkerId("p"), THERE, ids, ids, 4 * pages, layers=layers, wire=wire)


def test_a_slow_link_is_spared_bytes_and_a_fast_one_the_quantising():
    assert choose_wire(COSTS, link_page_s=1e-3) == "int8"
    assert choose_wire(COSTS, link_page_s=1e-5) == RAW


@given(st.floats(1e-9, 1), st.floats(1e-9, 1), st.floats(1e-9, 1))
def test_the_choice_is_never_slower_than_raw_and_raw_never_by_much_slower(link_page_s, raw_s, small_s):
    costs = (WireCost(RAW, raw_s, 100), WireCost("int8", small_s, 27))
    seconds = {cost.wire: cost.pack_s + link_page_s * cost.page_bytes / 100 for cost in costs}
    chosen = choose_wire(costs, link_page_s)
    assert seconds[chosen] <= min(seconds.values()) * GAIN
    assert chosen == RAW or seconds[chosen] < seconds[RAW]


def test_what_is_asked_for_is_taken_and_auto_waits_for_figures():
    assert CodecPolicy(prefill(Compress.NONE)).choose() == RAW
    assert CodecPolicy(prefill(Compress.FP8)).choose() == "fp8"
    assert CodecPolicy(prefill(Compress.AUTO)).choose() == RAW


def test_auto_follows_the_link_as_it_is_learnt():
    wires = CodecPolicy(prefill(Compress.AUTO))
    wires.measured(COSTS)
    for _ in range(40):
        wires.shipped([part()], 10 * 5e-3)
    assert wires.choose() == "int8"
    for _ in range(40):  # the bytes of compressed parts are counted as they are: the link seems no faster by them
        wires.shipped([part("int8")], 10 * 5e-3 * 17408 / 65536)
    assert wires.link.page_s * 10 + wires.link.part_s == pytest.approx(10 * 5e-3, rel=0.2)
    for _ in range(60):
        wires.shipped([part()], 10 * 1e-6)
    assert wires.choose() == RAW


def test_a_layer_group_counts_for_its_share():
    wires = CodecPolicy(prefill(Compress.INT8, layer_groups=((0, 1), (1, 4))))
    assert [wires._raw_pages(part(layers=layers)) for layers in (None, (0, 1), (1, 4))] == [10, 2.5, 7.5]


def test_a_part_that_is_asked_for_again_comes_raw():
    actor = Worker(prefill(Compress.INT8, transfer=TransferMode.CHUNK))
    request = Request(RequestId("a"), tuple(range(12)), SamplingParams(max_tokens=4))
    start = StartPrefill(A1, request, 0, THERE, (1, 2, 3, 4), 100.0, 100.0)
    effects = actor.handle(Received(WorkerId("router"), start), 0.0)
    (left,) = [each.ships for each in effects if runs_prefill(each)]
    assert [each.wire for each in left] == ["int8"]
    effects = actor.handle(Received(THERE, Resend(A1, 0)), 0.1)
    assert [each.transfer for each in effects if isinstance(each, ShipKV)] == [replace(left[0], resends=1, wire=RAW)]


def test_a_worker_takes_the_figures():
    actor = Worker(prefill(Compress.AUTO))
    actor.handle(WiresTimed(COSTS), 0.0)
    assert actor.prefill.sender.codecs.costs == COSTS
    assert "raw 0.01 ms, int8 0.05 ms" in actor.prefill.sender.codecs.describe()


# What may leave after a chunk: every (page, layer) once, and none that is still to be written.

GROUPS = ((0, 3), (3, 7), (7, 8))


def config(**sizes) -> WorkerConfig:
    return worker("prefill-0", Role.PREFILL, page_size=4, layer_groups=GROUPS, **sizes)


def test_a_whole_transfer_waits_for_the_last_chunk():
    assert cut_chunks(TransferMode.WHOLE, config(), 0, 8, 10) == ()
    assert cut_chunks(TransferMode.WHOLE, config(), 0, 10, 10) == (KVChunk(0, 3, None),)


def test_a_chunk_sends_the_pages_it_completed_and_the_last_one_the_rest():
    assert cut_chunks(TransferMode.CHUNK, config(), 0, 7, 18) == (KVChunk(0, 1, None),)
    assert cut_chunks(TransferMode.CHUNK, config(), 1, 7, 18) == ()
    assert cut_chunks(TransferMode.CHUNK, config(), 1, 18, 18) == (KVChunk(1, 5, None),)


def test_layer_groups_leave_one_by_one_in_their_order():
    assert cut_chunks(TransferMode.LAYER, config(), 0, 8, 10) == tuple(KVChunk(0, 2, run) for run in GROUPS)


def test_a_single_group_is_all_layers():
    alone = worker("prefill-0", Role.PREFILL, layer_groups=((0, 8),))
    assert cut_chunks(TransferMode.LAYER, alone, 0, 8, 10) == (KVChunk(0, 2, None),)


def test_the_tokens_of_a_piece_end_with_the_prompt():
    assert [KVChunk(start, start + 2, None).num_tokens(10, 4) for start in (0, 1)] == [8, 6]


@given(st.sampled_from(TransferMode), st.integers(1, 40), st.lists(st.integers(1, 16), max_size=6), st.integers(0, 3))
def test_every_page_and_layer_leaves_once_and_only_when_it_is_whole(mode, total, chunks, cached):
    sizes, sent, computed, left = config(), min(cached, total // 4), 0, []
    first = sent
    for tokens in [*chunks, total]:
        computed = min(total, computed + tokens)
        cut = cut_chunks(mode, sizes, sent, computed, total)
        assert all(piece.stop * 4 <= computed or computed == total for piece in cut)
        left += [
            (page, layers) for piece in cut for page in range(piece.start, piece.stop) for layers in [piece.layers]
        ]
        sent = cut[-1].stop if cut else sent
    pages = range(first, sizes.pages_for(total))
    runs = GROUPS if mode is TransferMode.LAYER else (None,)
    assert sorted(left, key=str) == sorted(((page, run) for page in pages for run in runs), key=str)


# What `auto` learns from measured costs, and that it keeps still when nothing changes.


def learnt(part_s: float, page_s: float, token_s: float, **sizes) -> StreamingPolicy:
    """After transfers and plans that cost just that."""
    config = worker("p", Role.PREFILL, page_size=16, max_model_len=4096, prefill_buckets=(256,), **sizes)
    streaming = StreamingPolicy(config)
    for n in range(60):
        streaming.computed(256, 256 * token_s)
        parts, pages = 1 + n % 4, 5 + 7 * n % 90
        streaming.shipped(parts, pages, part_s * parts + page_s * pages)
    return streaming


def test_costs_are_found_again_from_what_was_measured():
    streaming = learnt(2e-3, 3e-4, 5e-5)
    assert streaming.wire.part_s == pytest.approx(2e-3, rel=0.02)
    assert streaming.wire.page_s == pytest.approx(3e-4, rel=0.02)
    assert streaming.token_s == pytest.approx(5e-5, rel=0.02)


def test_what_was_assumed_is_forgotten_and_never_negative():
    fit = TransferFit(1.0, 1.0)
    for _ in range(150):
        fit.learn(1, 10, 1e-3)
    assert fit.part_s >= 0 and fit.page_s >= 0 and fit.part_s + 10 * fit.page_s == pytest.approx(1e-3, rel=0.1)


def test_a_slow_link_streams_early_and_a_costly_part_late():
    cheap, dear = learnt(1e-5, 2e-3, 1e-4), learnt(2e-2, 1e-4, 1e-4)
    assert cheap.stream_tokens < 512 < dear.stream_tokens
    assert cheap.mode(4096) is not TransferMode.WHOLE
    assert cheap.mode(cheap.stream_tokens - 1) is TransferMode.WHOLE


def test_where_a_part_costs_more_than_everything_nothing_streams():
    streaming = learnt(10.0, 1e-6, 1e-5)
    assert streaming.stream_tokens > 4096 and streaming.mode(4096) is TransferMode.WHOLE


def test_layer_groups_are_shipped_one_by_one_where_a_part_is_cheap():
    groups = {"layer_groups": tuple((2 * n, 2 * n + 2) for n in range(4))}
    assert learnt(1e-6, 1e-3, 1e-4, **groups).mode(1024) is TransferMode.LAYER
    assert learnt(3e-3, 1e-3, 1e-4, **groups).mode(1024) is TransferMode.CHUNK


def test_exposed_time_is_that_of_the_last_chunk_where_the_link_keeps_up():
    streaming = learnt(1e-4, 1e-4, 1e-3)
    whole, _ = streaming.exposed_s(TransferMode.WHOLE, 1024)
    chunk, parts = streaming.exposed_s(TransferMode.CHUNK, 1024)
    assert parts == 4
    assert whole == pytest.approx(1e-4 + 64 * 1e-4, rel=0.05) and chunk == pytest.approx(1e-4 + 16 * 1e-4, rel=0.05)


def test_a_link_that_cannot_keep_up_exposes_what_it_is_behind():
    streaming = learnt(0.0, 1e-2, 1e-5)
    chunk, _ = streaming.exposed_s(TransferMode.CHUNK, 1024)
    assert chunk == pytest.approx(64 * 1e-2 - 768 * 1e-5, rel=0.05)


@pytest.mark.parametrize("wobble", [lambda n: 1 + 0.1 * (-1) ** n, lambda n: 1 + 0.05 * (n % 3)])
def test_the_threshold_does_not_flutter(wobble: Callable[[int], float]):
    streaming = learnt(2e-4, 5e-4, 1e-4)
    seen = set()
    for n in range(100):
        streaming.shipped(2, 40, (4e-4 + 2e-2) * wobble(n))
        seen.add(streaming.stream_tokens)
    assert len(seen) <= 2


def test_the_same_observations_give_the_same_choices():
    first, second = learnt(3e-4, 2e-4, 1e-4), learnt(3e-4, 2e-4, 1e-4)
    assert [first.mode(n) for n in range(1, 4000, 97)] == [second.mode(n) for n in range(1, 4000, 97)]
