"""Turns, gaps and bytes, counted from events whose times are set by hand."""

import pytest

from benchmarks.counters import Counters
from jdisagg.core.events import RunStep, ShipKV, StepDone
from jdisagg.core.request import Attempt, RequestId, Sampled, SamplingParams, WorkerId
from jdisagg.core.steps import Admission, KVTransfer
from tests.steps import decode_plan, prefill_plan


class Told:
    """Counters told of one worker's turns at chosen seconds."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.counters = Counters(bytes_per_page=1024, clock=lambda: self.now_s)

    def run(
        self, at_s: float, plan: int, active: tuple[int, ...] = (0,), microbatch: int = 0, admit: tuple[int, ...] = ()
    ) -> None:
        admitted = tuple(Admission(slot, RequestId(f"r{plan}"), 5, 8, (1,), SamplingParams(), 1) for slot in admit)
        self.tell(at_s, RunStep(decode_plan(plan, microbatch, active, table_pages=4, admit=admitted)))

    def read(self, at_s: float, plan: int, tokens: int = 1) -> None:
        self.tell(at_s, StepDone(plan, tuple((slot, (Sampled(7),)) for slot in range(tokens))))

    def tell(self, at_s: float, item: object) -> None:
        self.now_s = at_s
        self.counters("decode-0", item, 0.0)


def test_a_turn_dispatched_after_the_last_one_was_read_is_a_gap() -> None:
    told = Told()
    told.run(0.0, 1)
    told.read(1.0, 1)
    told.run(1.25, 2)
    figures = told.counters.figures()
    assert (figures["decode_turns"], figures["unqueued_turns"]) == (2, 1)
    assert figures["host_gap_ms_per_turn"] == pytest.approx(125)
    assert figures["gap_ms_p99"] == pytest.approx(250)


def test_a_turn_that_was_queued_ahead_leaves_no_gap() -> None:
    told = Told()
    told.run(0.0, 1)
    told.run(0.0, 2)
    told.read(1.0, 1)
    told.run(1.25, 3)
    figures = told.counters.figures()
    assert (figures["unqueued_turns"], figures["host_gap_ms_per_turn"]) == (0, 0)
    assert figures["turnaround_ms_p50"] == pytest.approx(250)


def test_microbatches_wait_for_nobody_but_themselves() -> None:
    told = Told()
    told.run(0.0, 1, microbatch=0)
    told.run(0.0, 2, microbatch=1)
    told.read(1.0, 1)
    told.run(1.5, 3, microbatch=0)
    assert told.counters.figures()["unqueued_turns"] == 1


@pytest.mark.parametrize("slot", [0, 3])
def test_a_worker_with_new_work_only_was_idle_not_late(slot: int) -> None:
    told = Told()
    told.run(0.0, 1, active=(0,))
    told.read(1.0, 1)
    told.run(9.0, 2, active=(slot,), admit=(slot,))
    assert told.counters.figures()["turnaround_ms_p50"] is None


def test_a_prefill_in_flight_keeps_the_device_busy() -> None:
    told = Told()
    told.run(0.0, 1)
    told.tell(0.5, RunStep(prefill_plan(9, (), 64, 4)))
    told.read(1.0, 1)
    told.run(1.5, 2)
    told.tell(2.0, StepDone(9))
    told.read(2.5, 2)
    told.run(3.0, 3)
    figures = told.counters.figures()
    assert (figures["prefill_steps"], figures["unqueued_turns"]) == (1, 1)


def test_shipped_bytes_are_pages_times_their_bytes() -> None:
    told = Told()
    transfer = KVTransfer(Attempt(RequestId("r"), 0), WorkerId("a"), WorkerId("b"), (1, 2, 3), (4, 5, 6), 40)
    told.tell(0.0, ShipKV(transfer))
    told.tell(0.0, ShipKV(transfer))
    figures = told.counters.figures()
    assert (figures["transfers"], figures["shipped_bytes"]) == (2, 6 * 1024)


def test_tokens_a_turn_and_a_reset() -> None:
    told = Told()
    told.run(0.0, 1, active=(0, 1, 2))
    told.read(1.0, 1, tokens=3)
    assert told.counters.figures()["tokens_per_turn"] == 3
    told.run(1.0, 2)
    told.counters.reset()
    told.read(2.0, 2)  # dispatched before the reset
    assert told.counters.figures()["decode_turns"] == 0
