"""The scheduler: which decode rows and which prompt chunks the next step of a worker holds. Batches are formed here.

A worker's devices run steps in the order of their dispatch. A step of a decode worker takes the rows of one
microbatch; a step of a prefill worker takes chunks of the waiting prompts, in order. A colocated worker mixes them into
one step, which reads each weight once (Agrawal et al., Sarathi-Serve, OSDI 2024), or alternates steps and chunks if
`config.mixed_steps` is off. The budget of a step is `config.step_tokens`, rows and chunk tokens together: every slot
has its row in it, taken or not, so that a prompt is cut at the same tokens whatever else is in the batch.

Steady rows: once rows are formed, the same rows can follow until a sequence needs a page, a wider table or draws its
last token. Only what may change otherwise (`BatchSnapshot`) is checked at each step. A repeated step is dispatched
without looking at its sequences, which with hundreds of slots is most of the host's time between two steps.

Fast forward: the simulator may end many quiet steps at once. A step's end is quiet if it gives each of its sequences a
token and the same step follows it: no sequence arrives, leaves, ends, needs a page or may draw a stop token.
`repeat` leaves the same state behind as that many `StepDone` events would, and sends the tokens in one message.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

from jdisagg.core.events import RunStep
from jdisagg.core.messages import TokenDelta
from jdisagg.core.request import Sampled
from jdisagg.core.steps import DecodeRows, PageGrant, PrefillChunks, Read, StepPlan
from jdisagg.core.worker_config import WorkerConfig, bucket
from jdisagg.policy.worker.decode import DecodePhase
from jdisagg.policy.worker.prefill import PrefillPhase
from jdisagg.policy.worker.sequence import DecodeSequence, Step
from jdisagg.policy.worker.slots import most_turns


class BatchSnapshot(NamedTuple):
    """The inputs of rows besides their sequences: rows repeat only while these are the same."""

    seatings: int
    retires: bool
    turns: int = 1  # decode steps that end within the largest gap
    ready: int = 0
    expects: bool = False
    prompts: bool = False


@dataclass(frozen=True, slots=True)
class SteadyRows:
    """The rows of one microbatch that may be dispatched again without looking at its sequences."""

    rows: DecodeRows
    step: Step
    snapshot: BatchSnapshot
    tokens: int  # of each row
    until: int  # tokens of the first sequence that these rows may dispatch

    def can_repeat(self, snapshot: BatchSnapshot) -> bool:
        first = next(iter(self.step.sequences.values()))
        return snapshot == self.snapshot and first.dispatched + self.tokens <= self.until

    def book(self) -> None:
        """Records another dispatch, in which every row draws its tokens unless one of them is its last."""
        for sequence in self.step.sequences.values():
            sequence.in_flight += self.tokens
            sequence.dispatched += self.tokens


def steady_rows(rows: DecodeRows, step: Step, snapshot: BatchSnapshot, config: WorkerConfig) -> SteadyRows | None:
    """Returns the rows that may follow these dispatched ones; None if the next rows have to be formed anew."""
    tokens = max(step.widths.values())
    held_to_one = tokens == 1 < snapshot.turns  # by one sequence's next token, or for want of pages
    drafts = tokens > 1 and not rows.turns
    if rows.gates or drafts or held_to_one:
        return None
    left = min(_certain_tokens(sequence, config) for sequence in step.sequences.values())
    longest = max(sequence.num_tokens + sequence.dispatched for sequence in step.sequences.values())
    left = min(left, rows.table_pages * config.page_size - longest + 1) // tokens
    if left <= 0:
        return None
    widths = (tokens,) * len(rows.widths)
    again = DecodeRows(rows.microbatch, rows.active, rows.table_pages, widths=widths, turns=rows.turns)
    first = next(iter(step.sequences.values()))
    bare = Step(step.microbatch, step.sequences, (), dict.fromkeys(step.sequences, tokens), rows.turns)
    return SteadyRows(again, bare, snapshot, tokens, first.dispatched + left * tokens)


def _certain_tokens(sequence: DecodeSequence, config: WorkerConfig) -> int:
    """Returns how many tokens it may draw in its own pages before its last one; 0 while drafts are in flight, which
    may yield fewer tokens than were recorded for them."""
    certain = sequence.dispatched == len(sequence.output) + sequence.in_flight
    if sequence.sampling.synchronous or not (certain and sequence.is_on_device and sequence.is_admitted):
        return 0
    return min(_page_room(sequence, config), sequence.sampling.max_tokens - sequence.dispatched - 1)


def _page_room(sequence: DecodeSequence, config: WorkerConfig) -> int:
    """Returns how many more tokens fit its pages."""
    return len(sequence.pages) * config.page_size - sequence.num_tokens - sequence.dispatched + 1


def left_of(sequence: DecodeSequence) -> int:
    """Returns the most tokens that the next step may draw: 0 if those in flight may already be the last ones."""
    return sequence.sampling.max_tokens - sequence.dispatched


def may_have_drafts(sequence: DecodeSequence, config: WorkerConfig) -> bool:
    """Returns whether rows of the sequence may verify draft tokens or forced ones."""
    guesses = config.guesses and config.draft_tokens > 0
    return sequence.sampling.speculative and (guesses or bool(sequence.sampling.grammar))


Row = tuple[int, DecodeSequence]  # a slot and its sequence


class Scheduler:
    """Forms the steps of one worker from the sequences in its slots and the prompts that wait."""

    def __init__(
        self, config: WorkerConfig, decode: DecodePhase, prefill: PrefillPhase, new_step_id: Callable[[], int]
    ) -> None:
        self.config, self.decode, self.prefill, self.new_step_id = config, decode, prefill, new_step_id
        self.slots, self.out = decode.slots, decode.out
        self.steps_since_chunk = 0
        self.is_repeating = False  # steps were dispatched last, and all of them repeat those before
        self._steady: dict[int, SteadyRows] = {}  # by microbatch
        self._snapshot = BatchSnapshot(0, retires=False)  # of the rows that were formed last
        self._has_formed = False  # a step was formed anew during this event

    def dispatch_all(self, now_s: float) -> None:
        """Dispatches every step that may be dispatched now."""
        self._has_formed, before = False, self.steps_since_chunk
        while self._dispatch_one(now_s):
            continue
        self.is_repeating = self.steps_since_chunk > before and not self._has_formed

    def _dispatch_one(self, now_s: float) -> bool:
        self.decode.seat_ready()
        due = self._is_chunk_due()
        if due and not (self.config.mixed_steps and self.slots.busy_microbatches) and self._run(None, now_s):
            return True
        rows = self._next_rows()
        if isinstance(rows, SteadyRows):
            return self._repeat(rows, now_s)
        if rows is not None:
            return self._run(rows, now_s, mix=due and self.config.mixed_steps and not rows.gates)
        nothing_else = not self.decode.steps  # every sequence waits for pages that only prompts can free
        return nothing_else and self._run(None, now_s)

    def _is_chunk_due(self) -> bool:
        return self.steps_since_chunk >= self.config.decode_steps_per_chunk * self.slots.busy_microbatches

    def _run(self, rows: DecodeRows | None, now_s: float, *, mix: bool = True) -> bool:
        """Dispatches these rows, with chunks if `mix`; returns False if there is nothing to run."""
        prompts = self.prefill.next_chunks(now_s) if mix else None
        if rows is None and prompts is None:
            return False
        self._has_formed = True
        step_id, chunks, ships = self.new_step_id(), None, ()
        if rows is not None and prompts is not None:
            widths = rows.widths if self.config.tokens_ahead else ()
            rows = replace(rows, table_pages=self.config.table_buckets[-1], widths=widths)  # one program a chunk size
        if prompts is not None:
            chunks, ships = self.prefill.dispatch(step_id, prompts, now_s)
            self.steps_since_chunk = 0
        plan = StepPlan(step_id, rows, chunks)
        assert plan.num_rows <= self.config.step_tokens, f"{plan.num_rows} rows are over the budget of a step"
        self.out.put(RunStep(plan, ships))
        if self.decode.draft_controller is not None:
            self.decode.draft_controller.on_dispatched(plan, now_s)
        if rows is not None:
            self.decode.turn_times.dispatched(step_id, rows, now_s)
            self._book(step_id, rows, chunks)
            self.steps_since_chunk += 1
        return True

    def _book(self, step_id: int, rows: DecodeRows, chunks: PrefillChunks | None) -> None:
        """Records the dispatched rows; sequences with no more tokens to feed leave their slots to the next steps."""
        seats = dict(self.slots.seated(rows.microbatch))
        sequences = {slot: seats[slot] for slot in rows.active}
        widths = dict(zip(rows.active, rows.widths, strict=True)) if rows.widths else dict.fromkeys(rows.active, 1)
        step = self.decode.steps[step_id] = Step(rows.microbatch, sequences, rows.retire, widths, rows.turns)
        for slot, sequence in sequences.items():
            sequence.dispatch(widths[slot], step.least(slot))
            if sequence.is_drained:
                self.decode.drain(sequence)
        self._steady.pop(rows.microbatch, None)
        whole = chunks is None and len(sequences) == len(seats)
        if whole and (steady := steady_rows(rows, step, self._snapshot, self.config)):
            self._steady[rows.microbatch] = steady

    def _repeat(self, steady: SteadyRows, now_s: float) -> bool:
        """Dispatches the same rows again."""
        plan = StepPlan(step_id := self.new_step_id(), steady.rows)
        self.out.put(RunStep(plan))
        if self.decode.draft_controller is not None:
            self.decode.draft_controller.on_dispatched(plan, now_s)
        self.slots.begin_step(steady.rows.microbatch)
        self.decode.turn_times.dispatched(step_id, steady.rows, now_s)
        self.decode.steps[step_id] = steady.step
        steady.book()
        self.steps_since_chunk += 1
        return True

    # ------------------------------------------------------------ decode rows

    def _next_rows(self) -> DecodeRows | SteadyRows | None:
        """Returns the rows of the next microbatch that has any."""
        due = self.slots.due(self.decode.gated_microbatches)
        return next((rows for microbatch in due if (rows := self._rows_of(microbatch)) is not None), None)

    def _rows_of(self, microbatch: int) -> DecodeRows | SteadyRows | None:
        steady, prompts = self._steady.get(microbatch), self.prefill.waiting_tokens > 0
        self._snapshot = self._take_snapshot(microbatch, prompts=prompts)
        if steady is None or (prompts and self.config.mixed_steps) or not steady.can_repeat(self._snapshot):
            return self._rows(microbatch)
        if self.decode.draft_controller and self._drafts(steady.step.sequences.values(), steady.rows.num_turns):
            return self._rows(microbatch)
        return steady

    def _take_snapshot(self, microbatch: int, *, prompts: bool) -> BatchSnapshot:
        """prompts: some wait to be computed between the microbatch's steps."""
        seatings, retires = self.slots.seatings, self.slots.retires(microbatch)
        most = self.config.decode.steps_per_dispatch
        if most == 1:
            return BatchSnapshot(seatings, retires)
        turns = max(1, int(min(most, self.decode.turn_times.within_gap)))
        return BatchSnapshot(seatings, retires, turns, self.decode.num_ready, self.decode.expects, prompts)

    def _rows(self, microbatch: int) -> DecodeRows | None:
        seated = [(slot, sequence) for slot, sequence in self.slots.seated(microbatch) if self._may_draw(sequence)]
        drafts, most = self._most([sequence for _, sequence in seated])
        if self.decode.shared.available < len(seated) * self.config.pages_for(most):
            seated.sort(key=lambda each: each[1].order)  # the best takes pages first: a worse one cannot preempt it
        grants: list[PageGrant] = []
        active = sorted((row for row in seated if self._has_room(row, most, grants)), key=lambda each: each[0])
        if not active:
            return None
        return DecodeRows(
            microbatch=microbatch,
            active=tuple(slot for slot, _ in active),
            table_pages=self._table_pages([sequence for _, sequence in active], most),
            admit=tuple(
                each.admission(slot, self.config.draft_tokens) for slot, each in active if not each.is_on_device
            ),
            grants=tuple(grants),
            retire=self.slots.begin_step(microbatch),
            gates=self.decode.gates(microbatch),
            widths=self._widths([sequence for _, sequence in active], most, drafts=drafts),
            turns=most > 1 and not drafts,
            read=tuple(
                Read(slot, tuple(each.output[each.recalled :]))
                for slot, each in active
                if each.is_on_device and each.sampling.grammar
            ),
        )

    def _widths(self, sequences: Sequence[DecodeSequence], most: int, *, drafts: bool) -> tuple[int, ...]:
        if drafts:
            return self._draft_widths(sequences, most)
        if self.config.draft_tokens == 0 and self.config.decode.steps_per_dispatch == 1:
            return ()  # each draws one
        return tuple(min(most, left_of(sequence)) for sequence in sequences)

    def _draft_widths(self, sequences: Sequence[DecodeSequence], most: int) -> tuple[int, ...]:
        """Returns the tokens that each row of a verification step may draw, by the acceptance rate of its sequence."""
        controller = self.decode.draft_controller
        wanted = [controller.width(sequence, most) if controller else most for sequence in sequences]
        rows = zip(sequences, wanted, strict=True)
        widths = tuple(
            min(width, left_of(sequence)) if may_have_drafts(sequence, self.config) else 1 for sequence, width in rows
        )
        if controller is not None:
            controller.on_formed(sequences, widths)
        return widths

    def _may_draw(self, sequence: DecodeSequence) -> bool:
        """Returns False for a sequence whose next token depends on how its last one, in flight, is read."""
        return left_of(sequence) > 0 and not (sequence.sampling.synchronous and sequence.in_flight)

    def _most(self, seated: Sequence[DecodeSequence]) -> tuple[bool, int]:
        """Returns whether the next step verifies drafts, and the most tokens that one of its rows may draw."""
        turns = self._turns(seated) if self.config.decode.steps_per_dispatch > 1 else 1
        drafts = self._drafts(seated, turns)
        return drafts > 0, 1 + drafts if drafts else turns

    def _turns(self, seated: Sequence[DecodeSequence]) -> int:
        """Returns the decode steps of the next dispatch: as many as delay nothing else and preempt no sequence."""
        turns = most_turns(
            self.config,
            seated,
            [left_of(sequence) for sequence in seated],
            self.decode.turn_times,
            ready=self.decode.num_ready > 0,
            expects=self.decode.expects,
            prompts=self.prefill.waiting_tokens > 0,
        )
        if turns == 1:
            return 1
        ends = [(sequence, self.config.pages_for(self._end_of(sequence, turns))) for sequence in seated]
        wanted = sum(max(0, pages - len(sequence.pages)) for sequence, pages in ends)
        return turns if wanted <= self.decode.shared.available else 1

    def _drafts(self, seated: Collection[DecodeSequence], turns: int) -> int:
        """Returns the draft length of the next step, 0 for a plain dispatch of `turns` steps."""
        controller, most = self.decode.draft_controller, self.config.tokens_ahead
        if not most or (controller and controller.is_resting()):
            return 0
        if not any(may_have_drafts(sequence, self.config) for sequence in seated):
            return 0
        if controller is None:
            return most
        return controller.choose_length([*seated], self._table_pages(seated, 1 + most), turns)

    def _table_pages(self, sequences: Iterable[DecodeSequence], most: int) -> int:
        longest = max(self._end_of(sequence, most) for sequence in sequences)
        return bucket(self.config.pages_for(longest), self.config.table_buckets)

    def _end_of(self, sequence: DecodeSequence, most: int) -> int:
        """Returns the most KV tokens of the sequence after its next step."""
        return sequence.num_tokens + sequence.dispatched + min(most, left_of(sequence)) - 1

    def _has_room(self, row: Row, most: int, grants: list[PageGrant]) -> bool:
        """Returns True if the sequence has, or gets, pages for the tokens that its next step feeds."""
        slot, sequence = row
        while sequence.slot == slot and self.config.pages_for(self._end_of(sequence, most)) > len(sequence.pages):
            page = self.decode.take_page(sequence)
            if page is None:
                return False
            if sequence.is_on_device:
                grants.append(PageGrant(slot, len(sequence.pages), page))
            sequence.pages.append(page)
        return sequence.slot == slot  # or it was preempted for another sequence of these rows

    # ------------------------------------------------------------ fast forward

    @property
    def repeatable_steps(self) -> int:
        """Number of steps that will end quietly, whatever their tokens, while nothing else happens to the worker.

        0 unless the steps in flight are as those that follow: the most of each busy microbatch, in strict rounds, with
        all of its sequences.
        """
        flight, busy = tuple(self.decode.steps.values()), self.slots.busy_microbatches
        full = len(flight) == busy * self.slots.steps_in_flight
        several = self.config.draft_tokens or self.config.decode.steps_per_dispatch > 1
        if self.prefill.waiting_tokens or self.prefill.steps or not busy or not full or several or self._seats_next():
            return 0
        cycle = flight[:busy]
        if len({step.microbatch for step in cycle}) < busy or not all(self._is_followed(step) for step in cycle):
            return 0
        if not all(_is_same(step, cycle[index % busy]) for index, step in enumerate(flight)):
            return 0
        return min(index + busy * self._repeats(step) for index, step in enumerate(cycle))

    def _seats_next(self) -> bool:
        """Returns True if the next event may seat a sequence whatever it is: a slot is free and one waits for it."""
        decode = self.decode
        early = decode.has_early_admission and self.slots.busy_microbatches < self.config.num_microbatches
        return early or (decode.num_ready > 0 and self.slots.num_taken < self.config.num_slots)

    def _is_followed(self, step: Step) -> bool:
        """Returns True if the microbatch's next step has the same sequences and retires no slot."""
        seated = dict(self.slots.seated(step.microbatch))
        return step.sequences == seated and not self.slots.retires(step.microbatch)

    def _repeats(self, step: Step) -> int:
        """Returns how many further steps of these sequences need no page, draw no last token and use one program."""
        config, longest = self.config, _longest(step)
        table_tokens = bucket(config.pages_for(longest), config.table_buckets) * config.page_size
        steps = table_tokens - longest + 1
        for sequence in step.sequences.values():
            sampling = sequence.sampling
            if not sequence.has_stepped or not sequence.is_admitted or sampling.stop_token_ids or sampling.synchronous:
                return 0
            steps = min(steps, _page_room(sequence, config), sampling.max_tokens - sequence.dispatched - 1)
        return max(0, steps)

    def next_round(self) -> tuple[DecodeRows, ...]:
        """Returns the rows of the next round of quiet steps, in order."""
        return tuple(
            self._rows_again(step) for step in islice(self.decode.steps.values(), self.slots.busy_microbatches)
        )

    def _rows_again(self, step: Step) -> DecodeRows:
        table_pages = bucket(self.config.pages_for(_longest(step)), self.config.table_buckets)
        return DecodeRows(step.microbatch, tuple(step.sequences), table_pages)

    def repeat(self, steps: int, sampled: Sampled) -> None:
        """Ends `steps` quiet steps in which every row drew `sampled`; puts one `Drawn` and the steps then in flight."""
        decode, busy = self.decode, self.slots.busy_microbatches
        flight = list(decode.steps.items())
        rows = [self._rows_again(step) for _, step in flight[:busy]]
        draws: list[TokenDelta] = []
        for index, (_, step) in enumerate(flight[:busy]):
            count = len(range(index, steps, busy))
            draws += [_draw(sequence, count, sampled) for sequence in step.sequences.values() if count]
        self.out.draw(draws)
        self.slots.go_round([each.microbatch for each in rows], steps)
        for step_id, _ in flight[:steps]:
            del decode.steps[step_id]
        for index in range(max(0, steps - len(flight)), steps):
            _, step = flight[index % busy]
            step_id = self.new_step_id()
            decode.steps[step_id] = Step(step.microbatch, dict(step.sequences), (), step.widths)
            self.out.put(RunStep(StepPlan(step_id, rows[index % busy])))
        self.steps_since_chunk += steps


def _is_same(step: Step, other: Step) -> bool:
    return step.microbatch == other.microbatch and step.sequences == other.sequences


def _longest(step: Step) -> int:
    return max(sequence.num_tokens + sequence.dispatched for sequence in step.sequences.values())


def _draw(sequence: DecodeSequence, count: int, sampled: Sampled) -> TokenDelta:
    index = sequence.num_output + len(sequence.output)
    sequence.output.extend([sampled.token] * count)
    sequence.dispatched += count
    return TokenDelta(sequence.owner, index, (sampled,) * count)
