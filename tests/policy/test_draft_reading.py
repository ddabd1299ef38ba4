"""What a draft model has still to read is known before it is asked to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdisagg.core.worker_config import DRAFT_READS_LATELY
from jdisagg.policy.decode_sequence import DecodeSequence
from jdisagg.policy.draft_account import FIRST_WAIT, MOST, ROUND, START, DraftAccount, Trials
from jdisagg.policy.draft_gains import Row, gain_s, one_to_read, without_unread
from jdisagg.policy.draft_reading import NOTHING_READ, ReadingTimes, UnreadTokens
from jdisagg.policy.program_times import ProgramTimes
from tests.policy.test_draft_choice import PLAIN_S, TABLE, seat

ROOM = 32


def sequence(prompt: int = 40, **sampling: object) -> DecodeSequence:
    return seat((), prompt, **sampling)


def step(unread: UnreadTokens, row: DecodeSequence, width: int, drawn: int) -> None:
    """One is formed, dispatched, and ends."""
    unread.form([row], [width])
    unread.unguessed = unread.formed().unguessed
    row.dispatched += width
    unread.took(row, width - drawn)
    row.dispatched -= width - drawn


def test_a_prompt_is_unread_until_a_step_asks_for_a_guess_and_then_as_many_tokens_as_one_reads():
    unread, row = UnreadTokens(ROOM), sequence(70)
    step(unread, row, 1, 1)
    assert unread.of_sequence(row) == 71 and unread.chunks([row]) == 3
    for left in (71 - ROOM + 1, 71 - 2 * ROOM + 2):
        unread.form([row], [4])
        assert unread.formed() == (True, {row.owner}), "nothing is guessed of what was not read"
        row.dispatched += 1
        assert unread.of_sequence(row) == (left if left >= DRAFT_READS_LATELY else 0)
    unread.form([row], [4])
    assert unread.formed().unguessed == frozenset()


def test_what_guesses_without_reading_has_nothing_unread():
    unread, row = UnreadTokens(), sequence()
    unread.form([row], [4])
    assert unread.formed() == NOTHING_READ and unread.of_sequence(row) == 0 == unread.chunks([row])


def test_pages_that_came_with_the_models_are_not_read_again():
    unread, row = UnreadTokens(ROOM, kept=True), sequence()
    assert unread.of_sequence(row) == 0
    row.dispatched += DRAFT_READS_LATELY
    assert unread.of_sequence(row) == DRAFT_READS_LATELY, "but what was drawn since then is"


@given(st.integers(0, 200), st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), max_size=60))
def test_no_more_is_thought_unread_than_is_and_few_less(prompt: int, steps: list[tuple[int, int]]):
    """Beside an engine's own count of tokens that lie there."""
    unread, row, fed = UnreadTokens(ROOM), sequence(prompt), 0
    for width, drawn in steps:
        position = prompt + row.dispatched - 1
        lacking = position - fed
        assert unread.of_sequence(row) == (lacking if lacking >= DRAFT_READS_LATELY else 0)
        if width > 1:
            fed += min(lacking, ROOM) if lacking >= DRAFT_READS_LATELY else 0
        if width > 1 and position - fed < DRAFT_READS_LATELY:
            fed = position + min(drawn, width) - 1
        step(unread, row, width, min(drawn, width))


def test_who_is_over_is_forgotten_and_how_long_it_was_is_what_others_are_thought_to_be():
    unread, first, row = UnreadTokens(ROOM), sequence(), sequence(max_tokens=1000)
    assert unread.tokens_left(row) == 999
    step(unread, first, 4, 4)
    first.output += range(40)
    unread.forget(first)
    assert unread.of_sequence(first) > 0 and unread.tokens_left(row) == 39
    row.dispatched = 400
    assert unread.tokens_left(row) == 10
    row.dispatched = 1000
    assert unread.tokens_left(row) == 1


def test_an_only_time_of_a_chunk_is_believed_less_and_less_and_several_are_believed():
    times = ReadingTimes()
    assert times.seconds(PLAIN_S) == PLAIN_S
    times.learn(9 * PLAIN_S)
    first = times.seconds(PLAIN_S)
    for _ in range(100):
        times.step()
    assert first == pytest.approx(9 * PLAIN_S) and times.seconds(PLAIN_S) < 2 * PLAIN_S
    for seconds in (4.0, -1.0, 4.0, 4.0, 4.0):
        times.learn(seconds * PLAIN_S)
    assert times.seconds(PLAIN_S) == pytest.approx(4 * PLAIN_S)


def test_a_row_whose_reading_takes_more_than_it_gains_is_left_and_a_trial_reads_one():
    rows = [Row(0.9, 1.0, 9 * PLAIN_S), Row(0.9, 1.0, 0.01 * PLAIN_S), Row(0.9, 1.0), Row(0.0, 1.0)]
    assert [row.rate for row in without_unread(rows, 3, PLAIN_S)] == [0.0, 0.9, 0.9, 0.0]
    assert [row.rate for row in one_to_read(rows)] == [0.0, 0.0, 0.9, 0.0], "of those that are read none is"
    unread = [Row(0.9, 1.0, 0.5), Row(0.9, 1.0, 0.2), Row(0.9, 1.0, 0.2)]
    assert [row.rate for row in one_to_read(unread)] == [0.0, 0.9, 0.0]


def test_what_is_to_be_read_first_is_taken_off_what_drafts_gain():
    times = ProgramTimes()
    for drafts, steps in ((0, 1.0), (3, 1.5)) * 2:
        times.learn(drafts, TABLE, steps * PLAIN_S)
    read, due = (gain_s(times, [Row(1.0, 1.0, due_s)], 3, TABLE) for due_s in (0.0, 0.25 * PLAIN_S))
    assert read - due == pytest.approx(PLAIN_S), "four tokens bear a quarter each"


def test_a_trial_that_had_to_read_goes_on_for_some_steps_before_it_is_over():
    trials = Trials()
    for number in range(ROUND - 1):
        trials.begun(0.5, reads=number == 0)
        assert trials.due
    trials.begun(0.5)
    assert not trials.due
    trials.step(int(FIRST_WAIT * 0.5 * ROUND))
    assert trials.due


def test_an_account_holds_more_where_a_trial_takes_more():
    account = DraftAccount()
    account.plain(100)
    assert account.steps == START + 1
    account.plain(100_000)
    assert account.steps == MOST
    account.save_for(20.0)
    account.plain(100_000)
    assert account.steps == 20.0 and account.affords(20.0)
