"""What parts travel as: asked for, or chosen by what packing costs and the link takes."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdisagg.core.events import Received, ShipKV, WireCost, WiresTimed
from jdisagg.core.messages import Resend, StartPrefill
from jdisagg.core.request import Attempt, Request, RequestId, SamplingParams, WorkerId
from jdisagg.core.steps import KVTransfer
from jdisagg.core.worker_config import RAW, Compress, Role, TransferMode
from jdisagg.policy.compression import GAIN, Wires, choose_wire
from jdisagg.policy.worker import Worker
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
    assert Wires(prefill(Compress.NONE)).choose() == RAW
    assert Wires(prefill(Compress.FP8)).choose() == "fp8"
    assert Wires(prefill(Compress.AUTO)).choose() == RAW


def test_auto_follows_the_link_as_it_is_learnt():
    wires = Wires(prefill(Compress.AUTO))
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
    wires = Wires(prefill(Compress.INT8, layer_groups=((0, 1), (1, 4))))
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
    assert actor.prefill_side.shipping.wires.costs == COSTS
    assert "raw 0.01 ms, int8 0.05 ms" in actor.prefill_side.shipping.wires.describe()
