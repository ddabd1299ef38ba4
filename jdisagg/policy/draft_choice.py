"""Whether the next decode step verifies drafts, and of how many tokens, or draws one token a row, or several in turns:
whatever is faster.

A step that verifies takes longer, whether or not its drafts are any good. How much longer is learnt from steps that
ended, and how many tokens it draws from what each sequence's drafts came to, those of earlier requests like it, and
whether its end stood in it before. All may be wrong, and are when a text changes, so what drafts cost is booked: the
seconds that they lost against steps of one token may never be more than a small share of all seconds, and what was
gained long ago pays for nothing. So a worker that chooses is never slower than one without drafts by more than that
share and the little that it starts with, whatever the texts. What is left over of the share pays for steps that try
drafts again where they did not do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jdisagg.core.request import Attempt
from jdisagg.core.steps import StepPlan
from jdisagg.policy.decode_sequence import DecodeSequence
from jdisagg.policy.draft_records import DraftRecords, expected_tokens
from jdisagg.policy.program_times import ProgramTimes

SHARE = 0.015  # of seconds of plain steps, that drafts may lose
START = 3.0  # plain steps that may be lost before anything is known
MOST = 6.0  # plain steps that may be in the account
SPARE = 1.0  # plain steps that are left in it for drafts that are thought to pay
REFRESH = 64  # drafts in a row, after which it is seen what a plain step takes now
REFRESH_OF_FEW = 4  # so, for each plain step that is known; turns count as so many of both
REST = 4  # steps for which nothing is weighed after nothing was found to pay; every fifth meets all microbatches
LOOKED_AT = 16  # sequences whose drafts are weighed for one step: some of many, in turns


@dataclass(frozen=True, slots=True)
class Dispatched:
    """A step in flight."""

    began_s: float
    drafts: int  # tokens of each
    turns: int  # of one that verifies none: tokens of each row
    beside_turns: bool  # whether without drafts it takes, or would take, several of them
    table_pages: int
    stake_s: float  # taken from the account for it
    alone: bool  # its end says how long its rows take


class DraftChoice:
    """Of one worker. `sizes`: tokens of the drafts that it has programs for. by_ngrams: drafts are an end that stood
    in the sequence before, so that where none did, there is none."""

    def __init__(self, sizes: Sequence[int], *, by_ngrams: bool, most_turns: int = 1) -> None:
        self.sizes, self.records = tuple(sizes), DraftRecords(by_ngrams=by_ngrams)
        self.times = ProgramTimes()  # beside plain steps of one token
        self.times_of_turns = ProgramTimes(most_turns)  # so, where plain ones take several turns: a turn of theirs
        self.seconds: float | None = None  # in the account; None before the first plain step has ended
        self.steps: dict[int, Dispatched] = {}  # in flight
        self._last_done_s, self._rest = 0.0, 0
        self._disturbed, self._since_plain, self._look = False, 0, 0
        self._asked = 0, 1  # table_pages and turns of the last `drafts`

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
        self._asked, times = (table_pages, turns), self._times(turns > 1)
        plain_s = times.plain_s(table_pages)
        if plain_s is None or self.seconds is None or not sequences:
            return 0
        if self._since_plain >= turns * min(REFRESH, REFRESH_OF_FEW * turns * times.plain_times(table_pages)):
            return 0
        self._rest = REST
        if self.seconds < min(stake_s(times, size, table_pages) for size in self.sizes):
            return 0  # whatever they promise
        rates = [self.records.rate(sequence) for sequence in self._looked_at(sequences)]
        gains = {size: gain_s(times, rates, size, table_pages) for size in self.sizes}
        best = max(self.sizes, key=gains.__getitem__)
        trial = gains[best] <= 0
        if trial and self.records.knows_none and not any(rates):
            return 0  # nobody has a guess
        needed = stake_s(times, best, table_pages) + (SPARE * plain_s if trial else 0.0)
        if self.seconds < needed:
            return 0
        self._rest = 0
        return best

    def _looked_at(self, sequences: Sequence[DecodeSequence]) -> Sequence[DecodeSequence]:
        step = -(-len(sequences) // LOOKED_AT)
        self._look += 1
        return sequences[self._look % step :: step] if step > 1 else sequences

    def width(self, sequence: DecodeSequence, most: int) -> int:
        """See `DraftRecords.width`."""
        return self.records.width(sequence, most)

    def expected(self, sequence: DecodeSequence, size: int) -> float:
        """Tokens that its row draws."""
        return expected_tokens(self.records.rate(sequence), size)

    def forget(self, owner: Attempt) -> None:
        """Its sequence is over."""
        self.records.forget(owner)

    # ------------------------------------------------------------ what is learnt

    def dispatched(self, plan: StepPlan, now_s: float) -> None:
        """A step with chunks, or the one behind them, or one that waits for KV, says nothing of how long rows take."""
        alone, self._disturbed = not self._disturbed, plan.prefill is not None
        rows = plan.decode
        if rows is None:
            return
        widest = 1 if rows.turns else max(rows.widths)
        drafts = min((size for size in self.sizes if size >= widest - 1 > 0), default=0)
        turns, beside_turns = rows.num_turns, rows.turns or (drafts > 0 and self._asked[1] > 1)
        pages = self._asked[0] if plan.mixed else rows.table_pages  # drafts cost no more beside chunks than alone
        staked_s = stake_s(self._times(beside_turns), drafts, pages) if drafts else 0.0
        if self.seconds is not None:
            self.seconds -= staked_s
        alone = alone and plan.prefill is None and not rows.gates
        self.steps[plan.step_id] = Dispatched(now_s, drafts, turns, beside_turns, pages, staked_s, alone)
        self._since_plain = self._since_plain + 1 if drafts else 0

    def failed(self, step_id: int) -> None:
        del self.steps[step_id]

    def read(self, sequence: DecodeSequence, width: int, drawn: int) -> None:
        """A row of a sequence that goes on drew `drawn` tokens of `width`."""
        if width > 1:
            self.records.learn(sequence, width - 1, drawn - 1)

    def done(self, step_id: int, drawn: Sequence[int], now_s: float) -> None:
        """A step has ended, whose rows drew so many tokens each."""
        step = self.steps.pop(step_id)
        seconds, self._last_done_s = now_s - max(step.began_s, self._last_done_s), now_s
        times = self._times(step.beside_turns)
        if step.alone:
            for each in (self.times, self.times_of_turns) if step.drafts else (times,):
                each.learn(step.drafts, step.table_pages, seconds / step.turns)
        plain_s = times.plain_s(step.table_pages)
        if plain_s is None:
            return
        if self.seconds is None:
            self.seconds = START * plain_s
        if step.drafts:
            tokens = sum(drawn) / len(drawn) if drawn else 1.0
            usual_s = times.draft_s(step.drafts, step.table_pages)
            took_s = min(seconds, 2 * usual_s) if step.alone else usual_s  # the rest is the machine's
            self.seconds += step.stake_s + tokens * plain_s - took_s
        elif step.alone:
            self.seconds += SHARE * min(seconds, 2 * plain_s * step.turns)
        self.seconds = min(self.seconds, MOST * plain_s)


def gain_s(times: ProgramTimes, rates: Sequence[float], size: int, table_pages: int) -> float:
    """Seconds that plain steps would take longer for what rows draw of drafts that are taken so often."""
    tokens = sum(expected_tokens(rate, size) if rate else 1.0 for rate in rates) / len(rates)
    return tokens * (times.plain_s(table_pages) or 0.0) - times.draft_s(size, table_pages)


def stake_s(times: ProgramTimes, size: int, table_pages: int) -> float:
    """Seconds that are lost where not one token of a draft is taken, as far as anything is known."""
    plain_s = times.plain_s(table_pages)
    return 0.0 if plain_s is None else max(0.0, times.draft_s(size, table_pages) - plain_s)
