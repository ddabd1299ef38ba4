"""Whether the next decode step verifies drafts, and of how many tokens, or draws one token a row, or several in turns:
whatever is faster.

A step that verifies takes longer, whether or not its drafts are any good. How much longer is learnt from steps that
ended (`program_times.py`); how many tokens it draws, from what drafts of each sequence came to, and those of earlier
requests like it (`draft_records.py`), which of n-grams is seen without verifying one. Where nothing says that drafts
pay they are tried only as far as they might, seldom, and seldomer each time. All may be wrong, and what drafts lose is
booked (`draft_account.py`): so a worker that chooses is never slower than one without drafts by more than a small
share, and the little that it starts with, whatever the texts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jdisagg.core.steps import StepPlan
from jdisagg.policy.decode_sequence import DecodeSequence
from jdisagg.policy.draft_account import OWED, DraftAccount, Trials
from jdisagg.policy.draft_records import DraftRecords, expected_tokens
from jdisagg.policy.program_times import ProgramTimes

SPARE = 1.0  # plain steps that a trial leaves in the account for drafts that are thought to pay
REFRESH = 64  # drafts in a row, after which it is seen what a plain step takes now
REFRESH_OF_FEW = 4  # so, for each plain step that is known; turns count as so many of both
REST = 4  # tokens of a row for which nothing is weighed after nothing was found to pay; a fifth meets all microbatches
LOOKED_AT = 16  # sequences whose drafts are weighed for one step: some of many, in turns
GUESSED, MEASURED = 0.25, 0.5  # of how much longer drafts are thought to take, or took: it may be as little by now
MARGIN = 0.03  # of a step with drafts, that it must gain: as much may be lost by what is not known
TICK_S = 1e-9  # that a step takes at least: a clock may stand still meanwhile, as an explored one does
HOPE = 0.5  # of a model's tokens that were not right lately: so many may be by now


@dataclass(slots=True)
class Dispatched:
    """A step in flight."""

    began_s: float
    drafts: int  # tokens of each
    turns: int  # of one that verifies none: tokens of each row
    beside_turns: bool  # whether without drafts it takes, or would take, several of them
    table_pages: int
    stake: float  # plain steps, taken from the account for it
    alone: bool  # its end says how long its rows take
    more: float  # tokens beyond the first that its rows were thought to draw of drafts, in the mean


class Asked(NamedTuple):
    """What is weighed for a step."""

    table_pages: int = 0
    turns: int = 1
    more: float = 0.0  # see `Dispatched`
    trial: bool = False  # whether nothing says that what is chosen pays


class DraftChoice:
    """Of one worker. `sizes`: tokens of the drafts that it has programs for. by_ngrams, late: see `DraftRecords`."""

    def __init__(self, sizes: Sequence[int], *, by_ngrams: bool, most_turns: int = 1, late: int = 0) -> None:
        self.sizes, self.records = tuple(sizes), DraftRecords(max(sizes), by_ngrams=by_ngrams, late=late)
        self.times = ProgramTimes()  # beside plain steps of one token
        self.times_of_turns = ProgramTimes(most_turns)  # so, where plain ones take several turns: a turn of theirs
        self.account, self.trials = DraftAccount(OWED) if by_ngrams else DraftAccount(), Trials()
        self.steps = StepsInFlight()
        self._rest, self._since_plain, self._look = 0, 0, 0
        self._asked = Asked()

    # ------------------------------------------------------------ what is chosen

    def _times(self, turns: bool) -> ProgramTimes:
        return self.times_of_turns if turns else self.times

    def rests(self) -> bool:
        """Whether the next step verifies no drafts, as nothing was found to pay a moment ago: to weigh them takes the
        host as long as to form a step."""
        self._rest -= 1
        return self._rest >= 0

    def drafts(self, sequences: Sequence[DecodeSequence], table_pages: int, turns: int = 1) -> int:
        """Tokens of the drafts that the next step of these verifies; 0 where it takes so many turns of one token."""
        self._asked, times = Asked(table_pages, turns), self._times(turns > 1)
        plain_s = times.plain_s(table_pages)
        if plain_s is None or not sequences:
            return 0
        if self._since_plain >= turns * min(REFRESH, REFRESH_OF_FEW * turns * times.plain_times(table_pages)):
            return 0
        self._rest = REST // turns
        least_s = min(stake_s(times, size, table_pages) for size in self.sizes)
        if not self.records.by_ngrams and not self.account.affords(least_s / plain_s):
            return 0  # whatever they promise
        rows = [self._row(sequence) for sequence in self._looked_at(sequences)]
        if not any(row.rate for row in rows):
            return 0  # nobody has a guess
        best, gained_s = self._best(times, rows, table_pages)
        tried = self._trial(times, rows, table_pages, gained_s) if self.trials.due else 0
        if tried:
            best = tried
        elif gained_s <= 0:
            return 0
        elif not self.account.affords(stake_s(times, best, table_pages) / plain_s):
            if self.records.by_ngrams:
                self.account.missed(gained_s / plain_s)
                self._rest = 0
            return 0
        self._rest = 0
        more = mean_tokens([Row(row.rate, 1.0) for row in rows], best) - 1
        self._asked = Asked(table_pages, turns, more, trial=tried > 0)
        return best

    def _row(self, sequence: DecodeSequence) -> Row:
        return Row(self.records.rate(sequence), self.records.weight(sequence))

    def _looked_at(self, sequences: Sequence[DecodeSequence]) -> Sequence[DecodeSequence]:
        step = -(-len(sequences) // LOOKED_AT)
        self._look += 1
        return sequences[self._look % step :: step] if step > 1 else sequences

    def _best(self, times: ProgramTimes, rows: Sequence[Row], table_pages: int) -> tuple[int, float]:
        """The size that gains most, and seconds."""
        gains = {size: gain_s(times, rows, size, table_pages, self.records.thought.right) for size in self.sizes}
        best = max(self.sizes, key=gains.__getitem__)
        return best, gains[best]

    def _trial(self, times: ProgramTimes, rows: Sequence[Row], table_pages: int, gained_s: float) -> int:
        """The size that gains most if what is thought of all is as wrong as may be, first of those that nothing is
        known of, and that is afforded; 0: none gains more than what is done without a trial."""
        if not self.records.by_ngrams:  # what they come to is seen by trials alone
            rows = [Row(row.rate + HOPE * (1 - row.rate), row.weight) if row.rate else row for row in rows]
        might = {size: might_gain_s(times, rows, size, table_pages) for size in self.sizes}
        plain_s = times.plain_s(table_pages) or math.inf
        afforded = [size for size in might if self.account.affords(SPARE + stake_s(times, size, table_pages) / plain_s)]
        better = [size for size in afforded if might[size] > max(0.0, gained_s)]
        new = [size for size in better if not times.knows(size, table_pages)]
        return max(new or (better if gained_s <= 0 else ()), key=might.__getitem__, default=0)

    def width(self, sequence: DecodeSequence, most: int) -> int:
        """See `DraftRecords.width`."""
        return self.records.width(sequence, most)

    def expected(self, sequence: DecodeSequence, size: int) -> float:
        """Tokens that its row draws."""
        return expected_tokens(self.records.rate(sequence), size)

    def forget(self, sequence: DecodeSequence) -> None:
        """It is over."""
        self.records.forget(sequence)

    # ------------------------------------------------------------ what is learnt

    def dispatched(self, plan: StepPlan, now_s: float) -> None:
        """A step with chunks, or the one behind them, or one that waits for KV, says nothing of how long rows take."""
        alone = self.steps.alone(plan)
        rows = plan.decode
        if rows is None:
            return
        widest = 1 if rows.turns or not rows.widths else max(rows.widths)
        drafts = min((size for size in self.sizes if size >= widest - 1), default=0) if widest > 1 else 0
        turns, beside_turns = rows.num_turns, rows.turns or (drafts > 0 and self._asked.turns > 1)
        pages = self._asked.table_pages if plan.mixed else rows.table_pages  # drafts cost no more beside chunks
        stake = self._stake(beside_turns, drafts, pages)
        self.account.stake(stake)
        step = Dispatched(now_s, drafts, turns, beside_turns, pages, stake, alone, self._asked.more)
        self.steps.began(plan.step_id, step)
        self._since_plain = self._since_plain + 1 if drafts else 0
        self.trials.step(turns)
        if drafts and self._asked.trial:
            self.trials.begun(stake)
        elif drafts:
            self.trials.found()

    def _stake(self, beside_turns: bool, drafts: int, pages: int) -> float:
        """Plain steps that are lost where none of its drafts is taken."""
        times = self._times(beside_turns)
        plain_s = times.plain_s(pages)
        return stake_s(times, drafts, pages) / plain_s if drafts and plain_s else 0.0

    def failed(self, step_id: int) -> None:
        self.steps.failed(step_id)

    def read(self, sequence: DecodeSequence, width: int, drawn: int) -> None:
        """A row of a sequence that goes on drew `drawn` tokens of `width`, in the step that is `done`."""
        if width > 1:
            self.records.learn(sequence, width - 1, drawn - 1)
        if self.steps.took:
            self.records.delay(sequence, self.steps.took - drawn)

    def done(self, step_id: int, drawn: Sequence[int], now_s: float) -> None:
        """A step has ended, whose rows drew so many tokens each."""
        step, seconds = self.steps.ended(step_id, now_s)
        times = self._times(step.beside_turns)
        if step.alone:
            for each in (self.times, self.times_of_turns) if step.drafts else (times,):
                each.learn(step.drafts, step.table_pages, seconds / step.turns)
        plain_s = times.plain_s(step.table_pages)
        if plain_s is None:
            return
        if step.drafts:
            tokens = sum(drawn) / len(drawn) if drawn else 1.0
            took = self.steps.took = times.draft_s(step.drafts, step.table_pages) / plain_s
            self.records.thought.learn(step.more, tokens - 1)
            self.account.verified(step.stake, tokens - took)
        else:
            self.account.plain(step.turns if step.alone else 0)


class StepsInFlight:
    """Steps that were dispatched, and how long they take: each runs behind the one before it."""

    def __init__(self) -> None:
        self._running: dict[int, Dispatched] = {}
        self._last_done_s, self._disturbed = 0.0, False
        self.took = 0.0  # plain steps, of the one that ended last; 0: it verified no drafts

    def alone(self, plan: StepPlan) -> bool:
        """Whether the next one's end says how long rows take."""
        before, self._disturbed = self._disturbed, plan.prefill is not None
        return not (before or self._disturbed or (plan.decode is not None and plan.decode.gates))

    def began(self, step_id: int, step: Dispatched) -> None:
        self._running[step_id] = step

    def failed(self, step_id: int) -> None:
        del self._running[step_id]

    def ended(self, step_id: int, now_s: float) -> tuple[Dispatched, float]:
        """And its seconds."""
        step = self._running.pop(step_id)
        seconds = max(TICK_S, now_s - max(step.began_s, self._last_done_s))
        self._last_done_s, self.took = now_s, 0.0
        return step, seconds


class Row(NamedTuple):
    """Of a step that is weighed."""

    rate: float  # how often a token of its draft is thought to be taken; 0: it has none
    weight: float  # what its tokens count for


def gain_s(times: ProgramTimes, rows: Sequence[Row], size: int, table_pages: int, right: float = 1.0) -> float:
    """Seconds that plain steps would take longer for what rows draw of drafts, less a margin. right: what has come of
    what was thought to."""
    tokens = 1 + right * (mean_tokens(rows, size) - 1)
    return tokens * (times.plain_s(table_pages) or 0.0) - (1 + MARGIN) * times.draft_s(size, table_pages)


def might_gain_s(times: ProgramTimes, rows: Sequence[Row], size: int, table_pages: int) -> float:
    """So, where drafts take as little longer as may be."""
    plain_s = times.plain_s(table_pages) or 0.0
    longer_s = stake_s(times, size, table_pages) * (MEASURED if times.knows(size, table_pages) else GUESSED)
    return (mean_tokens(rows, size) - 1) * plain_s - longer_s


def mean_tokens(rows: Sequence[Row], size: int) -> float:
    """That they draw."""
    tokens = sum([row.weight * (expected_tokens(row.rate, size) if row.rate else 1.0) for row in rows])
    return tokens / sum([row.weight for row in rows])


def stake_s(times: ProgramTimes, size: int, table_pages: int) -> float:
    """Seconds that are lost where not one token of a draft is taken, as far as anything is known."""
    plain_s = times.plain_s(table_pages)
    return 0.0 if plain_s is None else max(0.0, times.draft_s(size, table_pages) - plain_s)
