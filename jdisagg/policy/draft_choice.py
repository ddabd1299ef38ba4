"""Whether the next decode step verifies drafts, and of how many tokens, or draws one token a row: whatever is faster.

A step that verifies takes longer, whether or not its drafts are any good. How much longer is learnt from steps that
ended, and how many tokens it draws from what each sequence's drafts came to. Both may be wrong, and are when a text
changes, so what drafts cost is booked: the seconds that they lost against steps of one token may never be more than
a small share of all seconds, and what was gained long ago pays for nothing. So a worker that chooses is never slower
than one without drafts by more than that share and the little that it starts with, whatever the texts. What is left
over of the share pays for steps that try drafts again where they did not do.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from jdisagg.core.request import Attempt
from jdisagg.core.steps import StepPlan
from jdisagg.policy.decode_sequence import DecodeSequence
from jdisagg.policy.draft_records import Acceptance, DraftRecord, expected_tokens

SHARE = 0.02  # of seconds of plain steps, that drafts may lose
START = 3.0  # plain steps that may be lost before anything is known
MOST = 8.0  # plain steps that may be in the account
SPARE = 1.0  # plain steps that are left in it for drafts that are thought to pay
KEPT = 17  # last times of a program; their lower quartile counts, for what else a machine does only adds
ENOUGH = 2  # times of plain steps, before anything is compared to them
STALE = 200  # times of all programs, after which one is forgotten when a new one of its own comes
REFRESH = 64  # drafts in a row, after which it is seen what a plain step takes now


def usual(times: Collection[float]) -> float:
    """The lower quartile."""
    return sorted(times)[len(times) // 4]


class ProgramTimes:
    """Seconds of steps, by the tokens of their drafts and the width of their tables: what is usual of the last ones."""

    def __init__(self) -> None:
        self._last: dict[tuple[int, int], list[float]] = {}
        self._learnt: dict[tuple[int, int], list[int]] = {}  # when: how many times had been learnt by then
        self._count = 0

    def learn(self, drafts: int, table_pages: int, seconds: float) -> None:
        """What is told of other times, busier or idler ones, is forgotten."""
        self._count += 1
        program = drafts, table_pages
        last, learnt = self._last.setdefault(program, []), self._learnt.setdefault(program, [])
        last.append(seconds)
        learnt.append(self._count)
        old = max(len(last) - KEPT, sum(count <= self._count - STALE for count in learnt))
        del last[:old], learnt[:old]

    def plain_s(self, table_pages: int) -> float | None:
        """Of a step of one token a row; None where too few have ended."""
        found = self._last.get((0, table_pages), ())
        return usual(found) if len(found) >= ENOUGH else None

    def draft_s(self, drafts: int, table_pages: int) -> float:
        """Of one that verifies drafts, where plain ones are known: as measured; else as much longer as another width's
        was; else as if every second token took a step."""
        plain_s = self.plain_s(table_pages)
        assert plain_s is not None, "plain steps come first"
        found = self._last.get((drafts, table_pages))
        if found is not None:
            return usual(found)
        ratios = [
            usual(times) / other_s
            for (size, width), times in self._last.items()
            if size == drafts and (other_s := self.plain_s(width))
        ]
        return plain_s * (max(ratios) if ratios else 1 + drafts / 2)


@dataclass(frozen=True, slots=True)
class Dispatched:
    """A step in flight."""

    began_s: float
    drafts: int  # tokens of each
    table_pages: int
    stake_s: float  # taken from the account for it
    alone: bool  # its end says how long its rows take


class DraftChoice:
    """Of one worker. `sizes`: tokens of the drafts that it has programs for. by_ngrams: drafts are an end that stood
    in the sequence before, so that where none did, there is none."""

    def __init__(self, sizes: Sequence[int], *, by_ngrams: bool) -> None:
        self.sizes, self.by_ngrams = tuple(sizes), by_ngrams
        self.times = ProgramTimes()
        self.seconds: float | None = None  # in the account; None before the first plain step has ended
        self._likely, self._unlikely = Acceptance(), Acceptance()  # of all sequences
        self.steps: dict[int, Dispatched] = {}  # in flight
        self.records: dict[Attempt, DraftRecord] = {}
        self._last_done_s = 0.0
        self._disturbed, self._since_plain = False, 0

    # ------------------------------------------------------------ what is chosen

    def drafts(self, sequences: Sequence[DecodeSequence], table_pages: int) -> int:
        """Tokens of the drafts that the next step of these verifies; 0 where it draws one token a row."""
        plain_s = self.times.plain_s(table_pages)
        if plain_s is None or self.seconds is None or self._since_plain >= REFRESH or not sequences:
            return 0
        gains = {size: self._gain_s(sequences, size, table_pages, plain_s) for size in self.sizes}
        best = max(self.sizes, key=gains.__getitem__)
        needed = self._stake_s(best, table_pages) + (0.0 if gains[best] > 0 else SPARE * plain_s)
        return best if self.seconds >= needed else 0

    def _gain_s(self, sequences: Sequence[DecodeSequence], size: int, table_pages: int, plain_s: float) -> float:
        """Seconds that plain steps would take longer for what the rows draw."""
        tokens = sum(self.expected(sequence, size) for sequence in sequences) / len(sequences)
        return tokens * plain_s - self.times.draft_s(size, table_pages)

    def _stake_s(self, size: int, table_pages: int) -> float:
        """Seconds that are lost where not one token of a draft is taken, as far as anything is known."""
        plain_s = self.times.plain_s(table_pages)
        return 0.0 if plain_s is None else max(0.0, self.times.draft_s(size, table_pages) - plain_s)

    def expected(self, sequence: DecodeSequence, size: int) -> float:
        """Tokens that its row draws."""
        if not sequence.sampling.speculative:
            return 1.0
        likely = self._is_likely(sequence)
        others = self._likely if likely else self._unlikely
        rate = self._record(sequence).of(likely=likely).rate(others.rate(0.5 if likely else 0.0))
        return expected_tokens(rate, size)

    def _is_likely(self, sequence: DecodeSequence) -> bool:
        """Whether there is a draft for it at all, as far as its tokens have been read."""
        if not self.by_ngrams or sequence.sampling.grammar:
            return True  # only the engine knows what a grammar forces
        record = self._record(sequence)
        record.repeats.note(sequence.output[record.read :])
        record.read = len(sequence.output)
        return record.repeats.known

    def _record(self, sequence: DecodeSequence) -> DraftRecord:
        record = self.records.get(sequence.owner)
        if record is None:
            record = self.records[sequence.owner] = DraftRecord()
            if self.by_ngrams:
                record.repeats.note(sequence.tail)
        return record

    def forget(self, owner: Attempt) -> None:
        """Its sequence is over."""
        self.records.pop(owner, None)

    # ------------------------------------------------------------ what is learnt

    def dispatched(self, plan: StepPlan, now_s: float) -> None:
        """A step with chunks, or the one behind them, or one that waits for KV, says nothing of how long rows take."""
        alone, self._disturbed = not self._disturbed, plan.prefill is not None
        rows = plan.decode
        if rows is None:
            return
        drafts = min((size for size in self.sizes if size >= max(rows.widths) - 1 > 0), default=0)
        stake_s = self._stake_s(drafts, rows.table_pages) if drafts else 0.0
        if self.seconds is not None:
            self.seconds -= stake_s
        alone = alone and plan.prefill is None and not rows.gates
        self.steps[plan.step_id] = Dispatched(now_s, drafts, rows.table_pages, stake_s, alone)
        self._since_plain = self._since_plain + 1 if drafts else 0

    def failed(self, step_id: int) -> None:
        del self.steps[step_id]

    def read(self, sequence: DecodeSequence, width: int, drawn: int) -> None:
        """A row of a sequence that goes on drew `drawn` tokens of `width`."""
        if width > 1:
            likely = self._is_likely(sequence)
            for acceptance in (self._likely if likely else self._unlikely, self._record(sequence).of(likely=likely)):
                acceptance.learn(width - 1, drawn - 1)

    def done(self, step_id: int, drawn: Sequence[int], now_s: float) -> None:
        """A step has ended, whose rows drew so many tokens each."""
        step = self.steps.pop(step_id)
        seconds, self._last_done_s = now_s - max(step.began_s, self._last_done_s), now_s
        if step.alone:
            self.times.learn(step.drafts, step.table_pages, seconds)
        plain_s = self.times.plain_s(step.table_pages)
        if plain_s is None:
            return
        if self.seconds is None:
            self.seconds = START * plain_s
        if step.drafts:
            tokens = sum(drawn) / len(drawn) if drawn else 1.0
            usual_s = self.times.draft_s(step.drafts, step.table_pages)
            took_s = min(seconds, 2 * usual_s) if step.alone else usual_s  # the rest is the machine's
            self.seconds += step.stake_s + tokens * plain_s - took_s
        elif step.alone:
            self.seconds += SHARE * min(seconds, 2 * plain_s)
        self.seconds = min(self.seconds, MOST * plain_s)
