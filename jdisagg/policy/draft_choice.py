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
from typing import NamedTuple

from jdisagg.core.request import Attempt
from jdisagg.core.steps import StepPlan
from jdisagg.policy.decode_sequence import DecodeSequence
from jdisagg.policy.draft_account import OWED, DraftAccount, Trials
from jdisagg.policy.draft_gains import Row, gain_s, mean_tokens, might_gain_s, one_to_read, stake_s, without_unread
from jdisagg.policy.draft_reading import NOTHING_READ, UnreadTokens
from jdisagg.policy.draft_records import DraftRecords, expected_tokens
from jdisagg.policy.draft_steps import Dispatched, StepsInFlight
from jdisagg.policy.program_times import ProgramTimes

SPARE = 1.0  # plain steps that a trial leaves in the account for drafts that are thought to pay
REFRESH = 64  # drafts in a row, after which it is seen what a plain step takes now
REFRESH_OF_FEW = 4  # so, for each plain step that is known; turns count as so many of both
REST = 4  # tokens of a row for which nothing is weighed after nothing was found to pay; a fifth meets all microbatches
LOOKED_AT = 16  # sequences whose drafts are weighed for one step: some of many, in turns
HOPE = 0.5  # of a model's tokens that were not right lately: so many may be by now


class Asked(NamedTuple):
    """What is weighed for a step."""

    table_pages: int = 0
    turns: int = 1
    more: float = 0.0  # see `Dispatched`
    trial: bool = False  # whether nothing says that what is chosen pays
    read: frozenset[Attempt] = frozenset()  # of those that a model has to read first, who is


class DraftChoice:
    """Of one worker. `sizes`: tokens of the drafts that it has programs for. by_ngrams, late: see `DraftRecords`."""

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        by_ngrams: bool,
        most_turns: int = 1,
        late: int = 0,
        unread: UnreadTokens | None = None,
    ) -> None:
        self.sizes, self.records = tuple(sizes), DraftRecords(max(sizes), by_ngrams=by_ngrams, late=late)
        self.times = ProgramTimes()  # beside plain steps of one token
        self.times_of_turns = ProgramTimes(most_turns)  # so, where plain ones take several turns: a turn of theirs
        self.account, self.trials = DraftAccount(OWED) if by_ngrams else DraftAccount(), Trials()
        self.steps = StepsInFlight()
        self._rest, self._since_plain, self._look = 0, 0, 0
        self._asked = Asked()
        self.unread = unread or UnreadTokens()

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
        looked = self._looked_at(sequences)
        rows = self._rows(looked, plain_s)
        if not any(row.rate for row in rows):
            return 0  # nobody has a guess
        best, gained_s, chosen = self._best(times, rows, table_pages)
        chunks = self.unread.chunks(each for each, row in zip(looked, one_to_read(rows), strict=True) if row.due_s)
        tried = self._trial(times, rows, chunks, table_pages, gained_s) if self.trials.due else 0
        if tried:
            best, chosen = tried, one_to_read(rows)
        elif gained_s <= 0:
            return 0
        read = frozenset(each.owner for each, row in zip(looked, chosen, strict=True) if row.due_s)
        stake = stake_s(times, best, table_pages) + (self.unread.times.seconds(plain_s) if read else 0.0)
        if not tried and not self.account.affords(stake / plain_s):
            if self.records.by_ngrams:
                self.account.missed(gained_s / plain_s)
                self._rest = 0
            return 0
        self._rest = 0
        more = mean_tokens([Row(row.rate, 1.0) for row in chosen], best) - 1
        self._asked = Asked(table_pages, turns, more, tried > 0, read)
        return best

    def _rows(self, sequences: Sequence[DecodeSequence], plain_s: float) -> list[Row]:
        """What is to be read of each is spread over what it has left."""
        unread = [self.unread.of_sequence(sequence) for sequence in sequences]
        token_s = self.unread.chunks(sequences) * self.unread.times.seconds(plain_s) / max(1, sum(unread))
        known = [(self.records.rate(each), self.records.weight(each)) for each in sequences]
        due = [
            number and number * token_s / self.unread.tokens_left(each)
            for each, number in zip(sequences, unread, strict=True)
        ]
        return [Row(rate, weight, due_s) for (rate, weight), due_s in zip(known, due, strict=True)]

    def _looked_at(self, sequences: Sequence[DecodeSequence]) -> Sequence[DecodeSequence]:
        step = -(-len(sequences) // LOOKED_AT)
        self._look += 1
        return sequences[self._look % step :: step] if step > 1 else sequences

    def _best(self, times: ProgramTimes, rows: Sequence[Row], table_pages: int) -> tuple[int, float, Sequence[Row]]:
        """The size that gains most, seconds, and the rows that have drafts then."""
        plain_s, right = times.plain_s(table_pages) or 0.0, self.records.thought.right
        chosen = {size: without_unread(rows, size, plain_s) for size in self.sizes}
        gains = {size: gain_s(times, each, size, table_pages, right) for size, each in chosen.items()}
        best = max(self.sizes, key=gains.__getitem__)
        return best, gains[best], chosen[best]

    def _trial(self, times: ProgramTimes, rows: Sequence[Row], chunks: int, table_pages: int, gained_s: float) -> int:
        """The size that gains most if what is thought of all is as wrong as may be, first of those that nothing is
        known of, and that is afforded. chunks: to be read first. 0: none gains more than what is done without one."""
        if not self.records.by_ngrams:  # what they come to is seen by trials alone
            rows = [row._replace(rate=row.rate + HOPE * (1 - row.rate)) if row.rate else row for row in rows]
        might = {size: might_gain_s(times, rows, size, table_pages) for size in self.sizes}
        plain_s = times.plain_s(table_pages) or math.inf
        chunk = self.unread.times.seconds(plain_s) / plain_s
        stakes = {size: stake_s(times, size, table_pages) / plain_s for size in might}
        wanted = {size: SPARE + chunks * chunk + max(1, chunks) * stake for size, stake in stakes.items()}
        better = [size for size in might if might[size] > max(0.0, gained_s)]
        if chunks and better:
            self.account.save_for(min(wanted[size] for size in better))
        better = [size for size in better if self.account.affords(wanted[size])]
        new = [size for size in better if not times.knows(size, table_pages)]
        return max(new or (better if gained_s <= 0 else ()), key=might.__getitem__, default=0)

    def width(self, sequence: DecodeSequence, most: int) -> int:
        """See `DraftRecords.width`; one of whom a model would have to read too much."""
        if self.unread.of_sequence(sequence) and sequence.owner not in self._asked.read:
            return 1
        return self.records.width(sequence, most)

    def formed(self, sequences: Sequence[DecodeSequence], widths: Sequence[int]) -> None:
        """These are the rows of a step with drafts, which is dispatched next."""
        self.unread.form(sequences, widths)

    def expected(self, sequence: DecodeSequence, size: int) -> float:
        """Tokens that its row draws."""
        return expected_tokens(self.records.rate(sequence), size)

    def forget(self, sequence: DecodeSequence) -> None:
        """It is over."""
        self.records.forget(sequence)
        self.unread.forget(sequence)

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
        reads, unguessed = self.unread.formed() if drafts else NOTHING_READ
        stake = self._stake(beside_turns, drafts, pages, reads=reads)
        self.account.stake(stake)
        step = Dispatched(now_s, drafts, turns, beside_turns, pages, stake, alone, self._asked.more, reads, unguessed)
        self.steps.began(plan.step_id, step)
        self._since_plain = self._since_plain + 1 if drafts else 0
        self.trials.step(turns)
        if drafts and self._asked.trial:
            self.trials.begun(stake, reads=reads)
        elif drafts:
            self.trials.found()

    def _stake(self, beside_turns: bool, drafts: int, pages: int, *, reads: bool) -> float:
        """Plain steps that are lost where none of its drafts is taken."""
        times = self._times(beside_turns)
        plain_s = times.plain_s(pages)
        if not (drafts and plain_s):
            return 0.0
        return (stake_s(times, drafts, pages) + (self.unread.times.seconds(plain_s) if reads else 0.0)) / plain_s

    def failed(self, step_id: int) -> None:
        self.steps.failed(step_id)

    def read(self, sequence: DecodeSequence, width: int, drawn: int) -> None:
        """A row of a sequence that goes on drew `drawn` tokens of `width`, in the step that is `done`."""
        if width > 1:
            self.unread.took(sequence, width - drawn)
        if width > 1 and sequence.owner not in self.unread.unguessed:
            self.records.learn(sequence, width - 1, drawn - 1)
        if self.steps.took:
            self.records.delay(sequence, self.steps.took - drawn)

    def done(self, step_id: int, drawn: Sequence[int], now_s: float) -> None:
        """A step has ended, whose rows drew so many tokens each."""
        step, seconds = self.steps.ended(step_id, now_s)
        self.unread.unguessed = step.unguessed
        times = self._times(step.beside_turns)
        if step.alone and not step.reads:
            for each in (self.times, self.times_of_turns) if step.drafts else (times,):
                each.learn(step.drafts, step.table_pages, seconds / step.turns)
            self.unread.times.step()
        plain_s = times.plain_s(step.table_pages)
        if plain_s is None:
            return
        if not step.drafts:
            self.account.plain(step.turns if step.alone else 0)
            return
        tokens = sum(drawn) / len(drawn) if drawn else 1.0
        took_s = times.draft_s(step.drafts, step.table_pages)
        if step.reads:
            if step.alone:
                self.unread.times.learn(seconds - took_s)
            took_s += self.unread.times.seconds(plain_s)
        took = self.steps.took = took_s / plain_s
        self.records.thought.learn(step.more, tokens - 1)
        self.account.verified(step.stake, tokens - took)
