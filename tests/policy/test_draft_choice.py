"""A worker that chooses when to verify drafts does where they pay, and never loses more by them than a few percent."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdisagg.core.request import Attempt, RequestId, SamplingParams
from jdisagg.core.steps import DecodeRows, PrefillChunks, StepPlan
from jdisagg.policy.decode_sequence import DecodeSequence
from jdisagg.policy.draft_account import SHARE, START
from jdisagg.policy.draft_choice import REFRESH, REST, DraftChoice
from jdisagg.policy.draft_records import Acceptance, DraftRecords, expected_tokens
from jdisagg.policy.program_times import ProgramTimes

TABLE = 4
PLAIN_S = 0.01
NUMBERS = itertools.count()


@dataclass
class Seat:
    """As much of a `DecodeSequence` as is looked at."""

    sampling: SamplingParams
    tail: tuple[int, ...] = ()
    output: list[int] | None = None
    num_tokens: int = 0
    dispatched: int = 1
    owner: Attempt = field(default_factory=lambda: Attempt(RequestId(f"r{next(NUMBERS)}"), 0))


def seat(tail: tuple[int, ...] = (), num_tokens: int = 0, **sampling: object) -> DecodeSequence:
    made: object = Seat(SamplingParams(**{"max_tokens": 10_000, **sampling}), tail, [], num_tokens)  # pyright: ignore[reportArgumentType]
    return made  # pyright: ignore[reportReturnType]


def run(
    choice: DraftChoice,
    rows: int,
    steps: int,
    draft_s: float,
    taken: Callable[[int], int],
    *,
    flight: int = 2,
    turns: int = 1,
    noise: Callable[[], float] = lambda: 1.0,
) -> tuple[float, float, int]:
    """(seconds, seconds of as many tokens by plain steps of so many turns, steps with drafts) of so many steps;
    `taken(step)`: tokens of each row's draft that are taken."""
    sequences, pending = [seat() for _ in range(rows)], deque[tuple[int, int]]()
    now_s, off_s, drafted = 0.0, 0.0, 0
    for step in range(steps + flight):
        if step < steps:
            size = choice.drafts(sequences, TABLE, turns)
            width, turned = 1 + size if size else turns, turns > 1 and not size
            plan = DecodeRows(0, tuple(range(rows)), TABLE, widths=(width,) * rows, turns=turned)
            choice.dispatched(StepPlan(step, plan), now_s)
            pending.append((step, size))
        if pending and (len(pending) == flight or step >= steps):
            number, size = pending.popleft()
            now_s += (draft_s if size else PLAIN_S * turns) * noise()
            drawn = [1 + min(size, taken(number)) if size else turns for _ in range(rows)]
            for sequence, each in zip(sequences, drawn, strict=True) if size else ():
                choice.read(sequence, 1 + size, each)
            choice.done(number, drawn, now_s)
            off_s, drafted = off_s + drawn[0] * PLAIN_S, drafted + bool(size)
    return now_s, off_s, drafted


def test_drafts_that_are_always_taken_are_verified_nearly_always():
    took_s, off_s, drafted = run(DraftChoice((3,), by_ngrams=False), 4, 400, 1.6 * PLAIN_S, lambda _: 3)
    assert drafted > 370 and off_s / took_s > 2.2


@pytest.mark.parametrize("draft_s", [1.01, 1.6, 4.0, 50.0])
def test_drafts_that_are_never_taken_cost_no_more_than_a_few_percent(draft_s: float):
    took_s, off_s, drafted = run(DraftChoice((3,), by_ngrams=False), 4, 2000, draft_s * PLAIN_S, lambda _: 0)
    assert took_s <= 1.03 * off_s + 4 * PLAIN_S and (drafted > 0 or draft_s > 2)


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(0, 3)), min_size=1, max_size=30),
    st.floats(1.0, 8.0),
    st.integers(1, 3),
)
def test_whatever_is_taken_when_what_is_lost_to_drafts_stays_within_its_share(
    runs: list[tuple[int, int]], ratio: float, flight: int
):
    """Also where texts change so that what was learnt is wrong each time."""
    takes = [taken for count, taken in runs for _ in range(count)]
    choice = DraftChoice((3,), by_ngrams=False)
    took_s, off_s, _ = run(choice, 2, len(takes), ratio * PLAIN_S, takes.__getitem__, flight=flight)
    first = (1 + flight) * max(0.0, ratio - 1)  # estimates before any has ended may be low: what is in flight then
    assert took_s <= (1 + SHARE) * off_s + (START + first) * PLAIN_S + 1e-9


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(0, 3)), min_size=1, max_size=20), st.floats(1.0, 8.0))
def test_beside_turns_what_is_lost_to_drafts_stays_within_its_share_too(runs: list[tuple[int, int]], ratio: float):
    takes = [taken for count, taken in runs for _ in range(count)]
    choice = DraftChoice((3,), by_ngrams=False)
    took_s, off_s, _ = run(choice, 2, len(takes), ratio * PLAIN_S, takes.__getitem__, turns=8)
    first = 3 * max(0.0, ratio - 1)
    assert took_s <= (1 + SHARE) * off_s + (START + first) * PLAIN_S + 1e-9


@pytest.mark.parametrize(("turns", "drafts"), [(1, 3), (8, 0)])
def test_drafts_are_weighed_against_the_turns_that_would_be_taken_in_their_place(turns: int, drafts: int):
    """A step with drafts draws 2.4 tokens in the time of two plain steps, or of four turns."""
    choice, each = DraftChoice((3,), by_ngrams=False), seat()
    plans = [DecodeRows(0, (0,), TABLE, widths=(width,), turns=width == 8) for width in (1, 8, 4)]
    for number, (plan, seconds) in enumerate(zip(plans * 2, (1.0, 4.0, 2.0) * 2, strict=True)):
        choice.dispatched(StepPlan(number, plan), 10.0 * number)
        choice.done(number, plan.widths, 10.0 * number + seconds)
    for _ in range(100):
        choice.read(each, 4, 1 + 2)
    assert (choice.times.plain_s(TABLE), choice.times_of_turns.plain_s(TABLE)) == (1.0, 0.5)
    choice.account.steps = 1.7  # enough for a draft, and not for one to be tried
    assert choice.drafts([each], TABLE, turns) == drafts


def test_plain_turns_are_measured_again_as_seldom_as_plain_steps():
    choice = DraftChoice((3,), by_ngrams=False, most_turns=8)
    _, _, drafted = run(choice, 1, 5000, 1.1 * PLAIN_S, lambda _: 3, turns=8)
    assert 5000 // (8 * REFRESH + 2) <= 5000 - drafted <= 2 * 5000 // (8 * REFRESH) + 20


def test_a_machine_whose_times_scatter_tries_drafts_no_more_often():
    random, choice = Random(1), DraftChoice((3,), by_ngrams=False)
    scatter = partial(random.choice, (0.9, 1.0, 1.0, 1.1, 3.0))
    _, _, drafted = run(choice, 2, 3000, 1.5 * PLAIN_S, lambda _: 0, noise=scatter)
    assert 0 < 0.5 * drafted <= 0.03 * 3000


@pytest.mark.parametrize(("taken", "best"), [(0, 0), (1, 1), (3, 3), (7, 7)])
def test_the_size_is_chosen_that_draws_most_tokens_a_second(taken: int, best: int):
    each, choice = seat(), DraftChoice((1, 3, 7), by_ngrams=False)
    for size, ratio in ((0, 1.0), (1, 1.05), (3, 1.6), (7, 3.0)):
        for _ in range(3):
            choice.times.learn(size, TABLE, ratio * PLAIN_S)
    choice.account.steps = 2.0 if best else 0.1  # the first draft that may be lost, or too little for a trial
    for _ in range(200):
        choice.read(each, 8, 1 + taken)
    assert choice.drafts([each], TABLE) == best


def test_a_row_that_may_draw_no_draft_counts_as_one_token():
    choice = DraftChoice((3,), by_ngrams=False)
    assert choice.expected(seat(speculative=False), 3) == 1.0 < choice.expected(seat(repetition_penalty=1.5), 3)
    assert choice.expected(seat(), 3) == pytest.approx(expected_tokens(0.5, 3))


def test_an_end_that_never_stood_in_a_sequence_promises_nothing_and_one_that_did_as_much_as_was_taken():
    choice, each = DraftChoice((3,), by_ngrams=True), seat()
    each.tail, each.output = (5, 6, 7, 8), [1]
    assert choice.expected(each, 3) == 1.0
    each.output += [5, 6]
    assert choice.expected(each, 3) > 1.5
    each.output.append(9)
    assert choice.expected(each, 3) == 1.0


def test_plain_steps_are_measured_again_now_and_then():
    choice = DraftChoice((3,), by_ngrams=False)
    _, _, drafted = run(choice, 1, 1000, 1.1 * PLAIN_S, lambda _: 3)
    assert 1000 // (REFRESH + 2) <= 1000 - drafted <= 2 * 1000 // REFRESH + 10


def test_what_was_measured_on_a_busy_machine_is_forgotten_when_it_is_idle_again():
    """Plain steps, hardly ever run, were slow then; drafts are seen to be quicker than before, and are slower now."""
    choice = DraftChoice((3,), by_ngrams=False)
    for _ in range(20):
        choice.times.learn(0, TABLE, 5 * PLAIN_S)
    _, _, drafted = run(choice, 1, 600, 2 * PLAIN_S, lambda _: 0)
    assert drafted < REFRESH and choice.times.plain_s(TABLE) == pytest.approx(PLAIN_S)


def test_a_step_beside_chunks_or_behind_them_is_not_measured():
    choice, chunks = DraftChoice((3,), by_ngrams=False), PrefillChunks((), 8, 4)
    rows = DecodeRows(0, (0,), TABLE, widths=(1,))
    plans = [StepPlan(1, rows, chunks), StepPlan(2, rows), StepPlan(3, None, chunks), StepPlan(4, rows)]
    for plan in plans:
        choice.dispatched(plan, 0.0)
    for number in (1, 2, 4):
        choice.done(number, [1], 1.0 * number)
    assert choice.times.plain_s(TABLE) is None and choice.account.steps is None
    for number in (5, 6):
        choice.dispatched(StepPlan(number, rows), 10.0 * number)
        choice.done(number, [1], 10.0 * number + 2)
    assert choice.times.plain_s(TABLE) == pytest.approx(2.0)


def test_a_step_that_failed_is_forgotten():
    choice = DraftChoice((3,), by_ngrams=False)
    choice.dispatched(StepPlan(1, DecodeRows(0, (0,), TABLE, widths=(4,))), 0.0)
    choice.failed(1)
    with pytest.raises(KeyError):
        choice.done(1, [1], 1.0)


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5)), max_size=60), st.floats(0, 1))
def test_a_rate_lies_between_none_and_all(steps: list[tuple[int, int]], others: float):
    acceptance = Acceptance()
    for drafts, taken in steps:
        acceptance.learn(drafts, min(drafts, taken))
    assert 0 <= acceptance.rate(others) <= 1 + 1e-9


@pytest.mark.parametrize(("rate", "drafts", "tokens"), [(0.0, 3, 1.0), (1.0, 3, 4.0), (0.5, 2, 1.75), (0.9, 0, 1.0)])
def test_expected_tokens_are_a_geometric_sum(rate: float, drafts: int, tokens: float):
    assert expected_tokens(rate, drafts) == tokens


def test_a_stream_is_known_to_repeat_itself_by_what_earlier_ones_like_it_came_to():
    """The first step that may draw a draft does, though nothing of this sequence was tried yet."""
    choice, early = DraftChoice((3,), by_ngrams=True), seat(temperature=0.0)
    for _ in range(3):
        for size, ratio in ((0, 1.0), (3, 2.4)):
            choice.times.learn(size, TABLE, ratio * PLAIN_S)
    early.tail, early.output = (5, 6) * 4, [5, 6] * 20
    assert choice.expected(early, 3) > 3.5
    choice.forget(early)
    choice.account.steps = 2  # more than what a draft may lose, less than what a trial asks for
    late, other = seat(temperature=0.0), seat(temperature=0.0)
    late.tail, other.tail = (7, 8) * 4, (1, 2, 3, 4, 5, 6)
    assert choice.drafts([late], TABLE) == 3 and choice.drafts([other], TABLE) == 0


def test_requests_for_another_model_or_drawn_otherwise_are_thought_of_apart():
    choice, greedy, warm = DraftChoice((3,), by_ngrams=False), seat(temperature=0.0), seat(temperature=0.9)
    for _ in range(60):
        choice.read(greedy, 4, 4)
        choice.read(warm, 4, 1)
    fresh = [choice.expected(seat(temperature=each), 3) for each in (0.0, 0.9)]
    assert fresh[0] > 3.2 and fresh[1] < 1.5


def test_nothing_is_tried_where_no_end_ever_stood_there_before():
    choice, each = DraftChoice((1, 3), by_ngrams=True), seat()
    each.output = [0]
    for step in range(2000):
        assert choice.drafts([each], TABLE) == 0
        choice.dispatched(StepPlan(step, DecodeRows(0, (0,), TABLE, widths=(1,))), step * PLAIN_S)
        each.output.append(1000 + step)
        choice.done(step, [1], (step + 1) * PLAIN_S)


@pytest.mark.parametrize(("taken", "width"), [(0, 2), (1, 6), (7, 8)])
def test_a_row_takes_as_many_guesses_as_its_own_drafts_go_far(taken: int, width: int):
    choice, each = DraftChoice((1, 3, 7), by_ngrams=False), seat()
    assert choice.width(each, 8) == 8, "before anything is known of it"
    for _ in range(40):
        choice.read(each, 8, 1 + taken)
    assert choice.width(each, 8) == width
    assert choice.width(each, 2) == 2


def test_plain_steps_are_no_longer_than_steps_that_do_more_whatever_the_machine_did_just_then():
    times = ProgramTimes()
    for seconds in (9 * PLAIN_S, 9 * PLAIN_S):
        times.learn(0, TABLE, seconds)
    assert times.plain_s(TABLE) == pytest.approx(9 * PLAIN_S)
    for _ in range(2):
        times.learn(3, TABLE, 1.5 * PLAIN_S)
    assert times.plain_s(TABLE) == pytest.approx(1.5 * PLAIN_S) and times.plain_s(2 * TABLE) is None


def test_a_machine_that_was_busy_while_the_first_plain_steps_ran_is_not_believed_for_long():
    """They took fifteen times as long; drafts, of which nothing is taken, are a fifth slower than plain steps."""
    choice = DraftChoice((3,), by_ngrams=False)
    for _ in range(2):
        choice.times.learn(0, TABLE, 15 * PLAIN_S)
    took_s, off_s, drafted = run(choice, 1, 400, 1.2 * PLAIN_S, lambda _: 0)
    assert took_s <= 1.03 * off_s + 8 * PLAIN_S and drafted < 40


@pytest.mark.parametrize("noises", [(0.0,), (0.0, 1e6)])
def test_a_clock_that_stands_still_or_leaps_ends_no_worker(noises: tuple[float, ...]):
    """What takes no time may be drafted or not; it is the next step that must be chosen."""
    leaps = itertools.cycle(noises)
    for by_ngrams in (False, True):
        _, _, drafted = run(
            DraftChoice((1, 3), by_ngrams=by_ngrams), 3, 400, 1.6 * PLAIN_S, lambda _: 0, noise=lambda: next(leaps)
        )
        assert drafted < 400


def test_a_stream_that_drafts_made_later_for_hours_still_has_a_weight():
    records, late = DraftRecords(3, by_ngrams=False), seat()
    records.rate(late)
    for _ in range(10_000):
        records.delay(late, 1.0)
    assert 1.0 < records.weight(late) < math.inf


def test_one_time_of_a_program_that_was_the_machines_doing_is_believed_less_and_less():
    times = ProgramTimes()
    for _ in range(5):
        times.learn(0, TABLE, PLAIN_S)
    times.learn(3, TABLE, 9 * PLAIN_S)
    first = times.draft_s(3, TABLE)
    for _ in range(100):
        times.learn(0, TABLE, PLAIN_S)
    assert first == pytest.approx(9 * PLAIN_S) and times.draft_s(3, TABLE) < 3 * PLAIN_S
    for _ in range(2):
        times.learn(3, TABLE, 9 * PLAIN_S)
    assert times.draft_s(3, TABLE) == pytest.approx(9 * PLAIN_S)


def test_how_long_longer_drafts_take_is_thought_of_by_the_rows_of_shorter_ones():
    times = ProgramTimes()
    for seconds in (1.0, 1.0):
        times.learn(0, TABLE, seconds)
    assert times.draft_s(3, TABLE) == pytest.approx(2.5)
    for _ in range(2):
        times.learn(1, TABLE, 1.1)
    assert times.draft_s(3, TABLE) == pytest.approx(1.3)


@pytest.mark.parametrize("ratio", [1.1, 2.0])
def test_rows_beside_chunks_take_drafts_where_they_pay_alone(ratio: float):
    choice, chunks, each = DraftChoice((3,), by_ngrams=False), PrefillChunks((), 8, 4), [seat()]
    for _ in range(17):
        choice.times.learn(0, TABLE, PLAIN_S)
        choice.times.learn(3, TABLE, ratio * PLAIN_S)
    choice.account.steps, held = 3, []
    for step in range(REFRESH):
        assert choice.drafts(each, TABLE) == 3
        choice.dispatched(StepPlan(step, DecodeRows(0, (0,), 9 * TABLE, widths=(4,)), chunks), 1.0 * step)
        choice.done(step, [4], step + 0.9)
        choice.read(each[0], 4, 4)
        held.append(choice.account.steps)
    assert choice.times.plain_s(9 * TABLE) is None and held[-1] >= held[0]


def test_drafts_are_weighed_seldom_where_nothing_was_found_to_pay_and_at_once_where_it_does():
    choice, each = DraftChoice((3,), by_ngrams=False), seat()
    for size, ratio in ((0, 1.0), (3, 2.0)) * 2:
        choice.times.learn(size, TABLE, ratio * PLAIN_S)
    for accepted in (3, 0):
        for _ in range(100):
            choice.read(each, 4, 1 + accepted)
        choice.account.steps = 1.5
        assert choice.drafts([each], TABLE) == accepted
        rests = [choice.rests() for _ in range(6)]
        assert rests == ([False] * 6 if accepted else [*[True] * REST, False, False])


def test_what_is_usual_of_many_times_is_found_though_not_with_each_of_them():
    times = ProgramTimes()
    for _ in range(40):
        times.learn(0, TABLE, PLAIN_S)
    for _ in range(4 * 17):
        times.learn(0, TABLE, 2 * PLAIN_S)
    assert times.plain_s(TABLE) == 2 * PLAIN_S and times.plain_times(TABLE) == 17
