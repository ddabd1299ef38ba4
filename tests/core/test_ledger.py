from hypothesis import given
from hypothesis import strategies as st

from jdisagg.core.ledger import PART_BEGINNING_AT, PARTS, Ledger, Mark

walks = st.lists(st.tuples(st.sampled_from([mark for mark in Mark if mark is not Mark.ENDED]), st.floats(0, 1e6)))


def ledger_of(*marks: tuple[Mark, float]) -> Ledger:
    ledger = Ledger()
    for mark, at_s in marks:
        ledger.mark(mark, at_s)
    return ledger


@given(walks)
def test_the_parts_sum_exactly_to_the_whole_whatever_clocks_say(walk):
    ledger = ledger_of(*walk)
    assert sum(ledger.parts_ns().values()) == ledger.total_ns >= 0
    assert tuple(ledger.parts_ns()) == PARTS


def test_every_mark_but_the_end_begins_a_part():
    assert set(PART_BEGINNING_AT) == set(Mark) - {Mark.ENDED} and set(PART_BEGINNING_AT.values()) == set(PARTS)


def test_a_request_cut_short_in_the_queue_is_charged_for_the_queue():
    ledger = ledger_of((Mark.ARRIVED, 1.0), (Mark.ENDED, 3.0))
    assert ledger.parts_ns()["queue"] == 2_000_000_000 == ledger.total_ns


def test_a_second_attempt_is_added_to_the_first():
    first = ((Mark.ARRIVED, 0.0), (Mark.RESERVE_SENT, 1.0), (Mark.RESERVED, 1.5), (Mark.PREFILL_STARTED, 2.0))
    second = ((Mark.RESERVE_SENT, 6.0), (Mark.RESERVED, 6.5), (Mark.PREFILL_STARTED, 7.0), (Mark.ENDED, 9.0))
    parts = ledger_of(*first, (Mark.REQUEUED, 5.0), *second).parts_ns()
    assert {part: ns / 1e9 for part, ns in parts.items() if ns} == {"queue": 3.0, "reserve_wait": 1.0, "prefill": 5.0}
