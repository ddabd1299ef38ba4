"""Speculative decoding by measurement: how many draft tokens the next decode step verifies, and where a draft model's
KV comes from.

`--speculative=auto` verifies drafts only where that draws more tokens per second. The controller measures two things:
the acceptance rate of each sequence (a moving mean, which starts from the worker's mean), and the times of a plain step
and of a verification step of each draft length. It takes the length with the most expected tokens per second, and plain
steps unless that length is faster by `THRESHOLD`. What drafts have lost is paid from a budget that grows with plain
steps: an exhausted budget is the back-off, and a full one pays for a probe where drafts are not expected to pay.
The choice depends on finished steps alone, so a replay of the same events makes the same choices.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jdisagg.core.hardware import Chip
from jdisagg.core.layout.kv_layout import KVLayout
from jdisagg.core.model_config import ModelConfig
from jdisagg.core.request import Attempt
from jdisagg.core.steps import StepPlan
from jdisagg.core.worker_config import DRAFT_READS_LATELY, WorkerConfig
from jdisagg.policy.worker.sequence import DecodeSequence

THRESHOLD = 1.03  # tokens per second with drafts over those without, from which drafts are verified
ALLOWED_LOSS = 0.015  # share of the time of plain steps that drafts may lose
FIRST_BUDGET, MAX_BUDGET = 5.0, 6.0  # plain steps that may be lost at the start, and that may be saved up
MAX_READ_BUDGET = 64.0  # plain steps that may be saved up for a probe that has to read a prompt first
MAX_DEBT = 16.0  # plain steps that are paid back after a loss: a longer one was a pause of the host
PROBE_RESERVE = 1.0  # plain steps that a probe leaves in the budget, for the drafts that follow a good one
REMEASURE_STEPS = 64  # verification steps in a row, after which a plain step is measured again
REST_TOKENS = 4  # tokens per sequence for which drafts are not considered after they did not pay
FIRST_RATE = 0.5  # acceptance rate that is assumed before any draft was verified
SEQUENCE_MEMORY, WORKER_MEMORY = 0.92, 0.97  # of a moving mean, weight of the past with each draft that is verified
PRIOR_WEIGHT = 4.0  # draft tokens of its own that weigh as much as the worker's mean
MIN_CHANCE = 0.02  # chance of being accepted below which a sequence's draft ends
KEPT_TIMES = 9  # last times of each kind of step; their lower quartile counts: other load on the host only adds
STALE_STEPS = 100  # measured steps after which a draft length is measured anew if it might be the fastest
MIN_STEP_S = 1e-9  # a simulated clock may stand still during a step


def expected_tokens(rate: float, drafts: int) -> float:
    """Returns the tokens that a step draws of a sequence with `drafts` draft tokens, each accepted with the chance
    `rate` if those before it were (Leviathan et al. 2023, equation 1)."""
    return 1.0 + drafts if rate >= 1.0 else (1.0 - rate ** (drafts + 1)) / (1.0 - rate)


@dataclass(slots=True)
class AcceptanceRate:
    """A moving mean of how often a draft token is accepted."""

    memory: float
    tested: float = 0.0
    accepted: float = 0.0

    def learn(self, drafts: int, accepted: int) -> None:
        """Adds a draft of which the first `accepted` tokens were drawn; those behind a rejected one were not tested."""
        self.tested = self.memory * self.tested + min(accepted + 1, drafts)
        self.accepted = self.memory * self.accepted + accepted

    def mean(self, prior: float) -> float:
        """Returns the mean, in which `prior` weighs as much as a few tokens."""
        return (self.accepted + PRIOR_WEIGHT * prior) / (self.tested + PRIOR_WEIGHT)


class StepKind(NamedTuple):
    """The properties on which the time of a decode step depends."""

    drafts: int  # draft tokens per row, 0 for a plain step
    table_pages: int
    is_multi_step: bool = False  # a plain dispatch of several steps, timed per step


class StepClock:
    """Measured times of plain steps, verification steps and chunks of a prompt that a draft model reads."""

    def __init__(self) -> None:
        self._times: dict[StepKind, deque[float]] = {}
        self._measured_at: dict[StepKind, int] = {}  # how many steps had been measured by its last time
        self._count = 0
        self._read_times = deque[float](maxlen=KEPT_TIMES)

    def learn(self, kind: StepKind, seconds: float) -> None:
        if self._is_stale(kind):
            self._times.pop(kind, None)
        self._count += 1
        self._measured_at[kind] = self._count
        self._times.setdefault(kind, deque(maxlen=KEPT_TIMES)).append(seconds)

    def learn_read(self, seconds: float) -> None:
        """Adds the time by which reading a chunk made a verification step longer."""
        self._read_times.append(max(0.0, seconds))

    def count(self, kind: StepKind) -> int:
        return len(self._times.get(kind, ()))

    def plain_s(self, table_pages: int, *, is_multi_step: bool) -> float | None:
        """Returns the seconds of a plain step; None before two were measured. It is at most that of a verification
        step: plain steps are rare where drafts pay, and the host may have been busy during the last ones."""
        own_s = self._measured(StepKind(0, table_pages, is_multi_step))
        if own_s is None:
            return None
        verifying = (kind for kind in self._times if kind.drafts and kind.table_pages == table_pages)
        return min([own_s, *(found for kind in verifying if (found := self._measured(kind)) is not None)])

    def verify_s(self, drafts: int, table_pages: int, plain_s: float) -> float:
        """Returns the seconds of a step that verifies so many draft tokens per row, beside a plain step of `plain_s`.
        Before two were measured: by the ratio at another table width, else by the next shorter length, else as if
        each two draft tokens took a plain step; the only time measured counts where it is shorter. A step is never
        assumed to take more than a plain step for each row and for each draft token: more is other load on the host."""
        found = self._measured(StepKind(drafts, table_pages))
        if found is None:
            guess_s = self._estimated(drafts, table_pages, plain_s)
            found = min([guess_s, *self._times.get(StepKind(drafts, table_pages), ())])
        return min(found, (1 + 2 * drafts) * plain_s)

    def knows(self, drafts: int) -> bool:
        """Returns whether steps of this draft length were measured not long ago, at whatever table width."""
        kinds = (kind for kind in self._times if kind.drafts == drafts)
        return any(self._measured(kind) is not None and not self._is_stale(kind) for kind in kinds)

    def least_s(self, drafts: int, table_pages: int, plain_s: float) -> float:
        """Returns a lower bound of `verify_s`: a length that is not known takes no less than a shorter one."""
        if self.knows(drafts):
            return self.verify_s(drafts, table_pages, plain_s)
        shorter = [kind.drafts for kind in self._times if 0 < kind.drafts < drafts and self.knows(kind.drafts)]
        return self.verify_s(max(shorter), table_pages, plain_s) if shorter else plain_s

    def read_s(self, plain_s: float) -> float:
        """Returns the seconds of reading a chunk, those of a plain step before one was measured."""
        return _usual(self._read_times) if self._read_times else plain_s

    def _estimated(self, drafts: int, table_pages: int, plain_s: float) -> float:
        ratios = self._ratios(drafts)
        if ratios:
            return plain_s * min(ratios)
        for kind in sorted(self._times, reverse=True):
            found = self._measured(kind)
            if 0 < kind.drafts < drafts and kind.table_pages == table_pages and found is not None:
                return plain_s + max(0.0, found - plain_s) * (1 + drafts / kind.drafts) / 2
        return plain_s * (1 + drafts / 2)

    def _ratios(self, drafts: int) -> list[float]:
        """Returns how many plain steps this draft length took, by table width."""
        ratios: list[float] = []
        for kind in self._times:
            found = self._measured(kind) if kind.drafts == drafts else None
            plain = [self.plain_s(kind.table_pages, is_multi_step=each) for each in (False, True)]
            ratios += [found / each for each in plain if found is not None and each]
        return ratios

    def _is_stale(self, kind: StepKind) -> bool:
        return bool(kind.drafts) and self._count - self._measured_at.get(kind, self._count) > STALE_STEPS

    def _measured(self, kind: StepKind) -> float | None:
        found = self._times.get(kind, ())
        return _usual(found) if len(found) > 1 else None


def _usual(times: Iterable[float]) -> float:
    """Returns the lower quartile."""
    ordered = sorted(times)
    return ordered[len(ordered) // 4]


@dataclass(slots=True)
class LossBudget:
    """The loss that drafts may still make against plain steps, in plain steps. A verification step reserves its worst
    case at dispatch, and settles what it gained or lost when it has ended."""

    steps: float = FIRST_BUDGET
    limit: float = MAX_BUDGET

    def save_for(self, steps: float) -> None:
        """Raises the limit so that a probe of so many plain steps can be paid one day."""
        self.limit = max(MAX_BUDGET, min(steps, MAX_READ_BUDGET))

    def reserve(self, stake: float) -> None:
        self.steps -= stake

    def settle(self, stake: float, gained: float) -> None:
        self._add(stake + gained)

    def on_plain(self, steps: int) -> None:
        self._add(ALLOWED_LOSS * steps)

    def _add(self, steps: float) -> None:
        self.steps = max(-MAX_DEBT, min(self.steps + steps, self.limit))


@dataclass(slots=True, frozen=True)
class ReadPlan:
    """The reads of a draft model in one step: if there are any, and the sequences that get no draft from it yet."""

    reads: bool = False
    unguessed: frozenset[Attempt] = frozenset()


NOTHING_READ = ReadPlan()
ANSWER_MEMORY = 0.9  # weight of earlier answers in the mean length of an answer
LEFT_SHARE = 0.25  # of that mean, tokens expected of an answer that is longer already


class UnreadTokens:
    """Counts the tokens of each sequence that a draft model has still to read before it can draft.

    The engine (`engine/spec/drafting.py`) reads a sequence when a step first wants a draft for it. The controller must
    know the cost beforehand, so this class repeats the engine's count for the steps that were dispatched.
    """

    def __init__(self, step_tokens: int = 0, *, is_shipped: bool = False) -> None:
        """step_tokens: tokens that one step reads, 0 for drafts that need no reading. is_shipped: the draft model's KV
        of a prompt comes with the model's."""
        self.step_tokens, self.is_shipped = step_tokens, is_shipped
        self._fed: dict[Attempt, int] = {}
        self._mean_answer: float | None = None
        self._plan = NOTHING_READ

    def count(self, sequence: DecodeSequence) -> int:
        """Returns the tokens to read before a draft, 0 where they are few enough to be read with it."""
        if not self.step_tokens:
            return 0
        fed = self._fed.get(sequence.owner, sequence.num_tokens if self.is_shipped else 0)
        unread = _next_position(sequence) - fed
        return unread if unread >= DRAFT_READS_LATELY else 0

    def chunks(self, sequence: DecodeSequence) -> int:
        """Returns the steps that reading them takes."""
        return -(-self.count(sequence) // self.step_tokens) if self.step_tokens else 0

    def tokens_left(self, sequence: DecodeSequence) -> float:
        """Returns the tokens that the sequence is expected to draw, at least one."""
        left = float(sequence.sampling.max_tokens - sequence.dispatched)
        if self._mean_answer is not None:
            left = min(left, max(self._mean_answer - sequence.dispatched, LEFT_SHARE * self._mean_answer))
        return max(1.0, left)

    def on_formed(self, sequences: Sequence[DecodeSequence], widths: Sequence[int]) -> None:
        """Counts what a verification step of these rows reads."""
        room, reads, unguessed = self.step_tokens, False, set[Attempt]()
        for sequence, width in zip(sequences, widths, strict=True):
            if width == 1 or not self.step_tokens:
                continue
            unread, position = self.count(sequence), _next_position(sequence)
            number = min(unread, room)
            room, reads = room - number, reads or number > 0
            if unread - number >= DRAFT_READS_LATELY:
                self._fed[sequence.owner] = position - unread + number
                unguessed.add(sequence.owner)
            else:
                self._fed[sequence.owner] = position + width - 1
        self._plan = ReadPlan(reads, frozenset(unguessed))

    def take_plan(self) -> ReadPlan:
        """Returns what the step that was formed last reads, once."""
        plan, self._plan = self._plan, NOTHING_READ
        return plan

    def on_rejected(self, sequence: DecodeSequence, tokens: int) -> None:
        """Takes back so many draft tokens that the draft model was fed and that were not drawn."""
        if sequence.owner in self._fed:
            self._fed[sequence.owner] -= tokens

    def forget(self, sequence: DecodeSequence) -> None:
        self._fed.pop(sequence.owner, None)
        if self.step_tokens and sequence.output:
            length = float(len(sequence.output))
            before = length if self._mean_answer is None else self._mean_answer
            self._mean_answer = ANSWER_MEMORY * before + (1 - ANSWER_MEMORY) * length


def _next_position(sequence: DecodeSequence) -> int:
    """Returns the highest position that the sequence's next step may feed."""
    return sequence.num_tokens + sequence.dispatched - 1


class DraftRow(NamedTuple):
    """A sequence of the step that is being chosen."""

    owner: Attempt
    rate: float  # expected acceptance rate, 0 where the request wants no drafts
    read_s: float  # time of what a draft model reads of it first
    tokens_left: float


class DraftPlan(NamedTuple):
    """A draft length, and what a step with it is expected to do."""

    drafts: int
    tokens: float  # per row
    seconds: float
    readers: frozenset[Attempt]  # sequences that a draft model reads for it

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


class DraftRequest(NamedTuple):
    """The step that a draft length was chosen for last."""

    table_pages: int = 0
    steps: int = 1  # plain steps per dispatch that it takes the place of
    readers: frozenset[Attempt] = frozenset()


class RunningStep(NamedTuple):
    """A decode step in flight."""

    began_s: float
    kind: StepKind
    steps: int
    is_multi_step: bool  # of the plain dispatch that it is, or takes the place of
    stake: float  # plain steps, reserved from the budget
    is_alone: bool  # its time is that of its rows
    read: ReadPlan


class DraftController:
    """Chooses the draft lengths of one worker's decode steps."""

    def __init__(self, sizes: Sequence[int], unread: UnreadTokens | None = None) -> None:
        """sizes: the draft lengths that the worker has programs for, ascending."""
        self.sizes, self.unread = tuple(sizes), unread or UnreadTokens()
        self.clock, self.budget, self.worker_rate = StepClock(), LossBudget(), AcceptanceRate(WORKER_MEMORY)
        self._rates: dict[Attempt, AcceptanceRate] = {}
        self._running: dict[int, RunningStep] = {}
        self._request, self._done = DraftRequest(), NOTHING_READ  # of the next step, and of the one that ended last
        self._last_done_s, self._is_disturbed = 0.0, False  # disturbed: the step dispatched last held chunks
        self._rest, self._since_plain = 0, 0

    # ------------------------------------------------------------ choice

    def is_resting(self) -> bool:
        """Returns whether the next step takes no drafts because they did not pay a moment ago: weighing them takes the
        host about as long as forming a step."""
        self._rest -= 1
        return self._rest >= 0

    def choose_length(self, sequences: Sequence[DecodeSequence], table_pages: int, steps: int = 1) -> int:
        """Returns the draft length of the next step of these sequences, 0 for a plain dispatch of `steps` steps."""
        self._request = DraftRequest(table_pages, steps)
        plain = StepKind(0, table_pages, steps > 1)
        plain_s = self.clock.plain_s(table_pages, is_multi_step=steps > 1)
        if plain_s is None or not sequences:
            return 0
        if self._since_plain >= steps * min(REMEASURE_STEPS, 4 * steps * self.clock.count(plain)):
            return 0
        self._rest = REST_TOKENS // steps
        rows = self._rows(sequences, plain_s)
        if not any(row.rate for row in rows):
            return 0
        best = max((self._plan(rows, size, table_pages, plain_s) for size in self.sizes), key=lambda plan: plan.speed)
        pays = best.speed * plain_s >= THRESHOLD
        chosen = self._probe(rows, best if pays else None, table_pages, plain_s)
        if chosen is None:
            if not pays:
                return 0
            self._rest = 0
            if self.budget.steps < self._stake(best.drafts, table_pages, plain_s, reads=bool(best.readers)):
                return 0
            chosen = best
        self._rest = 0
        self._request = DraftRequest(table_pages, steps, chosen.readers)
        return chosen.drafts

    def _rows(self, sequences: Sequence[DecodeSequence], plain_s: float) -> list[DraftRow]:
        read_s = self.clock.read_s(plain_s)
        return [
            DraftRow(each.owner, self.rate(each), self.unread.chunks(each) * read_s, self.unread.tokens_left(each))
            for each in sequences
        ]

    def _plan(self, rows: Sequence[DraftRow], drafts: int, table_pages: int, plain_s: float) -> DraftPlan:
        """Returns the step with so many draft tokens, in which a sequence is read if its drafts gain more than that
        takes; the time of reading counts in parts over the tokens that the sequence has left."""
        tokens, read_s, readers = 0.0, 0.0, set[Attempt]()
        for row in rows:
            own = expected_tokens(row.rate, drafts)
            if row.read_s:
                own_read_s = row.read_s * own / row.tokens_left
                if (own - 1) * plain_s / len(rows) <= own_read_s:
                    own = 1.0
                else:
                    readers.add(row.owner)
                    read_s += own_read_s
            tokens += own
        seconds = self.clock.verify_s(drafts, table_pages, plain_s) + read_s
        return DraftPlan(drafts, tokens / len(rows), seconds, frozenset(readers))

    def _probe(
        self, rows: Sequence[DraftRow], best: DraftPlan | None, table_pages: int, plain_s: float
    ) -> DraftPlan | None:
        """Returns a step that measures, where the budget has room for one: of the shortest length that was never
        measured and might be faster than `best`, else, where no length pays, of the cheapest. It reads at most one
        sequence."""
        drafted = [row for row in rows if row.rate]
        reader = min(drafted, key=lambda row: row.read_s)
        tokens = {size: sum(expected_tokens(row.rate, size) for row in rows) / len(rows) for size in self.sizes}
        least = best.speed if best else THRESHOLD / plain_s
        unmeasured = (
            size
            for size in self.sizes
            if not self.clock.knows(size) and tokens[size] > least * self.clock.least_s(size, table_pages, plain_s)
        )
        size = next(unmeasured, 0)
        if not size and best:
            return None
        size = size or self._cheapest_probe(table_pages, plain_s)
        stake = self._stake(size, table_pages, plain_s, reads=False)
        chunks = reader.read_s / self.clock.read_s(plain_s)
        needed = PROBE_RESERVE + stake + (chunks + 1) * stake * (chunks > 0) + reader.read_s / plain_s
        self.budget.save_for(needed)
        if self.budget.steps < min(needed, self.budget.limit):
            return None
        readers = frozenset({reader.owner}) if reader.read_s else frozenset[Attempt]()
        return DraftPlan(size, tokens[size], self.clock.verify_s(size, table_pages, plain_s), readers)

    def _cheapest_probe(self, table_pages: int, plain_s: float) -> int:
        """Returns the measured length that risks least per draft token; the shortest before any was measured."""
        known = [size for size in self.sizes if self.clock.knows(size)]
        stakes = {size: self._stake(size, table_pages, plain_s, reads=False) / size for size in known}
        return min(known, key=stakes.__getitem__, default=self.sizes[0])

    def _stake(self, drafts: int, table_pages: int, plain_s: float, *, reads: bool) -> float:
        """Returns the plain steps that are lost if no draft token is accepted."""
        lost_s = max(0.0, self.clock.verify_s(drafts, table_pages, plain_s) - plain_s)
        return (lost_s + (self.clock.read_s(plain_s) if reads else 0.0)) / plain_s

    def rate(self, sequence: DecodeSequence) -> float:
        """Returns how often a draft token of the sequence is expected to be accepted, 0 for requests without drafts."""
        if not sequence.sampling.speculative:
            return 0.0
        of_worker = self.worker_rate.mean(FIRST_RATE)
        own = self._rates.get(sequence.owner)
        return own.mean(of_worker) if own else of_worker

    def width(self, sequence: DecodeSequence, most: int) -> int:
        """Returns the tokens, of at most `most`, that the sequence's row of a verification step may draw: its draft
        ends where its own acceptance rate makes a further token improbable."""
        if self.unread.count(sequence) and sequence.owner not in self._request.readers:
            return 1
        own = self._rates.get(sequence.owner)
        rate = self.rate(sequence)
        if own is None or own.tested < 2 * PRIOR_WEIGHT or rate >= 1.0:
            return most
        longest = int(math.log(MIN_CHANCE) / math.log(rate)) if rate > 0 else 1
        return min(most, 1 + max(1, longest))

    def on_formed(self, sequences: Sequence[DecodeSequence], widths: Sequence[int]) -> None:
        """Notes the rows of a verification step, which is dispatched next."""
        self.unread.on_formed(sequences, widths)

    def forget(self, sequence: DecodeSequence) -> None:
        self._rates.pop(sequence.owner, None)
        self.unread.forget(sequence)

    # ------------------------------------------------------------ measurement

    def on_dispatched(self, plan: StepPlan, now_s: float) -> None:
        """Notes a step. One with chunks, the one behind it, and one that waits for KV are not timed."""
        was_disturbed, self._is_disturbed = self._is_disturbed, plan.prefill is not None
        rows = plan.decode
        if rows is None:
            return
        widest = 1 if rows.turns else max(rows.widths, default=1)
        drafts = next((size for size in self.sizes if size >= widest - 1), 0) if widest > 1 else 0
        is_multi_step = rows.turns or (drafts > 0 and self._request.steps > 1)
        pages = self._request.table_pages if plan.mixed else rows.table_pages  # mixed steps have the widest table
        plain_s = self.clock.plain_s(pages, is_multi_step=is_multi_step)
        read = self.unread.take_plan() if drafts else NOTHING_READ
        stake = self._stake(drafts, pages, plain_s, reads=read.reads) if drafts and plain_s else 0.0
        self.budget.reserve(stake)
        is_alone = not (was_disturbed or self._is_disturbed or rows.gates)
        kind = StepKind(drafts, pages, rows.turns)
        self._running[plan.step_id] = RunningStep(now_s, kind, rows.num_turns, is_multi_step, stake, is_alone, read)
        self._since_plain = self._since_plain + 1 if drafts else 0

    def on_failed(self, step_id: int) -> None:
        del self._running[step_id]

    def on_done(self, step_id: int, drawn: Sequence[int], now_s: float) -> None:
        """Learns from a step that has ended, whose rows drew so many tokens each."""
        step = self._running.pop(step_id)
        seconds = max(MIN_STEP_S, now_s - max(step.began_s, self._last_done_s))
        self._last_done_s, self._done = now_s, step.read
        pages, drafts = step.kind.table_pages, step.kind.drafts
        if step.is_alone and not step.read.reads:
            self.clock.learn(step.kind, seconds / step.steps)
        plain_s = self.clock.plain_s(pages, is_multi_step=step.is_multi_step)
        if plain_s is None:
            return
        if not drafts:
            self.budget.on_plain(step.steps)
            return
        took_s = self.clock.verify_s(drafts, pages, plain_s)
        if step.read.reads:
            if step.is_alone:
                self.clock.learn_read(seconds - took_s)
            took_s += self.clock.read_s(plain_s)
        tokens = sum(drawn) / len(drawn) if drawn else 1.0
        self.budget.settle(step.stake, tokens - took_s / plain_s)

    def on_row_read(self, sequence: DecodeSequence, width: int, drawn: int) -> None:
        """Learns from a row of the step that ended last, which drew `drawn` of at most `width` tokens."""
        if width == 1 or sequence.owner in self._done.unguessed:
            return
        self.unread.on_rejected(sequence, width - drawn)
        self.worker_rate.learn(width - 1, drawn - 1)
        self._rates.setdefault(sequence.owner, AcceptanceRate(SEQUENCE_MEMORY)).learn(width - 1, drawn - 1)


def make_draft_controller(config: WorkerConfig) -> DraftController | None:
    """Returns the worker's controller; None where every step that may have drafts verifies them."""
    if not (config.draft_auto and config.draft_sizes):
        return None
    return DraftController(config.draft_sizes, UnreadTokens(config.draft_reads, is_shipped=config.draft_layers > 0))


# ------------------------------------------------------------ a draft model's KV

REPEATED_SHARE = 1 / 3  # of prompts' tokens: Mooncake's conversations with room for ten million tokens (figure 9)
# Estimates: nothing here measures what this load repeats, what these chunks reach, or what this link carries.
REACHED_SHARE = 0.4  # of a data sheet's FLOP/s
LINK_BYTES_PER_S = 25e9  # a NIC of 200 Gbit/s
CPU_FLOPS_PER_S, CPU_BYTES_PER_S = 5e10, 2e9  # two cores, and loopback TCP


@dataclass(frozen=True, slots=True)
class DraftKVCost:
    """Mean seconds per prompt token of sending the draft model's KV, and of computing it again where it was not sent.

    The draft model reads each prompt once either way. KV that is shipped with the model's is found again with prefixes,
    whose tokens are then not read again, but its bytes cross the link each time (Mooncake: Qin et al., FAST 2025,
    equation 2). Under `auto` drafts may never be taken, so their KV is computed only where they are wanted.
    """

    send_s: float
    reread_s: float

    @property
    def should_ship(self) -> bool:
        return self.send_s < self.reread_s


def draft_kv_cost(
    draft: ModelConfig, pages: KVLayout, chip: Chip | None, *, has_prefix_cache: bool, is_always_drafting: bool
) -> DraftKVCost:
    """Returns the cost by the chip's data sheet, None for CPUs. is_always_drafting: not only where drafts pay."""
    flops_per_s, link = CPU_FLOPS_PER_S, CPU_BYTES_PER_S
    if chip is not None:
        flops_per_s, link = REACHED_SHARE * chip.flops_per_s, LINK_BYTES_PER_S
    read_s = draft.prefill_flops(1.0) / flops_per_s
    reread_s = REPEATED_SHARE * read_s if has_prefix_cache and is_always_drafting else 0.0
    return DraftKVCost(pages.bytes_per_token / link, reread_s)
