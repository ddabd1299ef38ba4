"""The scheduler: which decode rows and which prompt chunks the next step of a worker holds. Here batches are formed.

A worker's devices run steps in the order of their dispatch. One that decodes takes one microbatch's rows a step; one
that computes prompts takes chunks of those that wait, first in order first; one that does both mixes them into one
step, which reads each weight once (Agrawal et al., Sarathi-Serve, OSDI 2024), or lets steps and chunks take turns
where `config.mixed_steps` is off. The budget of a step is `config.step_tokens`, rows and chunk tokens together: every
slot has its row in it, taken or not, so that a prompt is cut at the same tokens in any company.
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
from jdisagg.policy.cache.page_pool import PageState
from jdisagg.policy.effect_buffer import EffectBuffer
from jdisagg.policy.request_size import choose_victim
from jdisagg.policy.worker.decode import DecodePhase
from jdisagg.policy.worker.prefill import PrefillPhase
from jdisagg.policy.worker.sequence import DecodeSequence, Step, admission, admitted
from jdisagg.policy.worker.slots import most_turns

# Rows that repeat: steps of one microbatch that hold the same sequences and tell the device nothing new.
#
# What such a step holds was found when the first of them was formed, and for how many it stays so: until somebody
# needs a page, a wider table or has its last token to draw. What may change besides is asked at each step. A step
# that repeats is formed without a look at its sequences, which at hundreds of slots is most of what a host does
# between two steps.


class BatchSnapshot(NamedTuple):
    """What rows depend on besides their sequences: the same follow only where it is the same."""

    seatings: int
    retires: bool
    turns: int = 1  # that end within the gap
    ready: int = 0
    expects: bool = False
    prompts: bool = False


@dataclass(frozen=True, slots=True)
class SteadyRows:
    """Of one microbatch."""

    rows: DecodeRows
    step: Step
    moment: BatchSnapshot
    tokens: int  # of each row
    until: int  # tokens of the first sequence that may be dispatched by them

    def goes_on(self, moment: BatchSnapshot) -> bool:
        """Whether the next step may be another of them."""
        first = next(iter(self.step.sequences.values()))
        return moment == self.moment and first.dispatched + self.tokens <= self.until

    def book(self) -> None:
        """Another is dispatched, in which every row draws its tokens unless one of them is its last."""
        for sequence in self.step.sequences.values():
            sequence.in_flight += self.tokens
            sequence.dispatched += self.tokens


def steady_rows(rows: DecodeRows, step: Step, moment: BatchSnapshot, config: WorkerConfig) -> SteadyRows | None:
    """What may follow these rows, which are booked; None where the next ones have to be looked at."""
    tokens = max(step.widths.values())
    held_to_one = tokens == 1 < moment.turns  # by somebody's next token, or for want of pages
    drafts = tokens > 1 and not rows.turns
    if rows.gates or drafts or held_to_one:
        return None
    left = min(_left(sequence, config) for sequence in step.sequences.values())
    longest = max(sequence.num_tokens + sequence.dispatched for sequence in step.sequences.values())
    left = min(left, rows.table_pages * config.page_size - longest + 1) // tokens
    if left <= 0:
        return None
    widths = (tokens,) * len(rows.widths)
    again = DecodeRows(rows.microbatch, rows.active, rows.table_pages, widths=widths, turns=rows.turns)
    first = next(iter(step.sequences.values()))
    bare = Step(step.microbatch, step.sequences, (), dict.fromkeys(step.sequences, tokens), rows.turns)
    return SteadyRows(again, bare, moment, tokens, first.dispatched + left * tokens)


def _left(sequence: DecodeSequence, config: WorkerConfig) -> int:
    """Tokens that it may draw in its own pages, the last one not among them; none while drafts are in flight, which
    may come to less than was booked for them."""
    certain = sequence.dispatched == len(sequence.output) + sequence.in_flight
    if sequence.sampling.synchronous or not (certain and sequence.on_device and admitted(sequence)):
        return 0
    room = len(sequence.pages) * config.page_size - sequence.num_tokens - sequence.dispatched + 1
    return min(room, sequence.sampling.max_tokens - sequence.dispatched - 1)


def moment_of(decode_side: DecodePhase, microbatch: int, *, prompts: bool) -> BatchSnapshot:
    """prompts: whether any wait to be computed between its steps."""
    slots, config = decode_side.slots, decode_side.config
    seats = slots.seatings, slots.retires(microbatch)
    if config.decode.steps_per_dispatch == 1:
        return BatchSnapshot(*seats)
    turns = max(1, int(min(config.decode.steps_per_dispatch, decode_side.turn_times.within_gap)))
    return BatchSnapshot(*seats, turns, decode_side.num_ready, decode_side.expects, prompts)


Row = tuple[int, DecodeSequence]  # its slot, and who sits there


def left_of(sequence: DecodeSequence) -> int:
    """Returns the most tokens that the next step may draw: 0 if those in flight may already be the last ones."""
    return sequence.sampling.max_tokens - sequence.dispatched


def may_have_drafts(sequence: DecodeSequence, config: WorkerConfig) -> bool:
    """Returns whether rows of the sequence may verify draft tokens or forced ones."""
    guesses = config.guesses and config.draft_tokens > 0
    return sequence.sampling.speculative and (guesses or bool(sequence.sampling.grammar))


def draft_widths(sequences: Sequence[DecodeSequence], most: int, decode_side: DecodePhase) -> tuple[int, ...]:
    """Returns the tokens that each row of a verification step may draw, by the acceptance rate of its sequence."""
    controller, config = decode_side.draft_controller, decode_side.config
    wanted = [controller.width(sequence, most) if controller else most for sequence in sequences]
    rows = zip(sequences, wanted, strict=True)
    widths = tuple(
        min(width, left_of(sequence)) if may_have_drafts(sequence, config) else 1 for sequence, width in rows
    )
    if controller is not None:
        controller.on_formed(sequences, widths)
    return widths


class Scheduler:
    """Forms one worker's steps, from those that sit in its slots and the prompts that wait."""

    def __init__(
        self,
        config: WorkerConfig,
        decode_side: DecodePhase,
        prefill_side: PrefillPhase,
        out: EffectBuffer,
        new_step_id: Callable[[], int],
    ) -> None:
        self.config, self.decode_side, self.prefill_side = config, decode_side, prefill_side
        self.slots, self.shared, self.out, self.new_step_id = decode_side.slots, decode_side.shared, out, new_step_id
        self.steps_since_chunk = 0
        self._steady: dict[int, SteadyRows] = {}  # by microbatch
        self._moment = BatchSnapshot(0, retires=False)  # of the rows that were formed last
        self.repeats = False  # whether steps were dispatched last, and all of them only repeat those before
        self._looked = False

    def dispatch_all(self, now_s: float) -> None:
        """Dispatches every step that may be dispatched now."""
        self._looked, before = False, self.steps_since_chunk
        while self._dispatch_one(now_s):
            continue
        self.repeats = self.steps_since_chunk > before and not self._looked

    def _dispatch_one(self, now_s: float) -> bool:
        self.decode_side.seat_ready()
        due = self._chunk_is_due()
        if due and not (self.config.mixed_steps and self.slots.busy_microbatches) and self._run(None, now_s):
            return True
        rows = self._next_rows()
        if isinstance(rows, SteadyRows):
            return self._repeat(rows, now_s)
        if rows is not None:
            return self._run(rows, now_s, mix=due and self.config.mixed_steps and not rows.gates)
        nothing_else = not self.decode_side.steps  # every sequence waits for pages that only prompts can free
        return nothing_else and self._run(None, now_s)

    def _chunk_is_due(self) -> bool:
        return self.steps_since_chunk >= self.config.decode_steps_per_chunk * self.slots.busy_microbatches

    def _run(self, rows: DecodeRows | None, now_s: float, *, mix: bool = True) -> bool:
        """Dispatches these rows, and the chunks that go with them (`mix`); False where there is nothing to run."""
        prompts = self.prefill_side.next_chunks(now_s) if mix else None
        if rows is None and prompts is None:
            return False
        self._looked = True
        step_id, chunks, ships = self.new_step_id(), None, ()
        if rows is not None and prompts is not None:
            widths = rows.widths if self.config.tokens_ahead else ()
            rows = replace(rows, table_pages=self.config.table_buckets[-1], widths=widths)  # one program a chunk size
        if prompts is not None:
            chunks, ships = self.prefill_side.dispatch(step_id, prompts, now_s)
            self.steps_since_chunk = 0
        plan = StepPlan(step_id, rows, chunks)
        assert plan.num_rows <= self.config.step_tokens, f"{plan.num_rows} rows are over the budget of a step"
        self.out.put(RunStep(plan, ships))
        if self.decode_side.draft_controller is not None:
            self.decode_side.draft_controller.on_dispatched(plan, now_s)
        if rows is not None:
            self.decode_side.turn_times.dispatched(step_id, rows, now_s)
            self._book(step_id, rows, chunks)
            self.steps_since_chunk += 1
        return True

    def _book(self, step_id: int, rows: DecodeRows, chunks: PrefillChunks | None) -> None:
        """The rows are dispatched: who has nothing more to feed leaves its slot, for the steps behind this one."""
        seats = dict(self.slots.seated(rows.microbatch))
        sequences = {slot: seats[slot] for slot in rows.active}
        widths = dict(zip(rows.active, rows.widths, strict=True)) if rows.widths else dict.fromkeys(rows.active, 1)
        step = self.decode_side.steps[step_id] = Step(rows.microbatch, sequences, rows.retire, widths, rows.turns)
        for slot, sequence in sequences.items():
            sequence.dispatch(widths[slot], step.least(slot))
            if sequence.drained:
                self.decode_side.drain(sequence)
        self._steady.pop(rows.microbatch, None)
        whole = chunks is None and len(sequences) == len(seats)
        if whole and (steady := steady_rows(rows, step, self._moment, self.config)):
            self._steady[rows.microbatch] = steady

    def _repeat(self, steady: SteadyRows, now_s: float) -> bool:
        """Dispatches another of these."""
        plan = StepPlan(step_id := self.new_step_id(), steady.rows)
        self.out.put(RunStep(plan))
        if self.decode_side.draft_controller is not None:
            self.decode_side.draft_controller.on_dispatched(plan, now_s)
        self.slots.begin_step(steady.rows.microbatch)
        self.decode_side.turn_times.dispatched(step_id, steady.rows, now_s)
        self.decode_side.steps[step_id] = steady.step
        steady.book()
        self.steps_since_chunk += 1
        return True

    # ------------------------------------------------------------ decode rows

    def _next_rows(self) -> DecodeRows | SteadyRows | None:
        """Those of the next microbatch that has any."""
        due = self.slots.due(self.decode_side.ahead.under_way)
        return next((rows for microbatch in due if (rows := self._rows_of(microbatch)) is not None), None)

    def _rows_of(self, microbatch: int) -> DecodeRows | SteadyRows | None:
        steady, prompts = self._steady.get(microbatch), self.prefill_side.waiting.tokens > 0
        self._moment = moment_of(self.decode_side, microbatch, prompts=prompts)
        if steady is None or (prompts and self.config.mixed_steps) or not steady.goes_on(self._moment):
            return self._rows(microbatch)
        if self.decode_side.draft_controller and self._drafts(steady.step.sequences.values(), steady.rows.num_turns):
            return self._rows(microbatch)
        return steady

    def _rows(self, microbatch: int) -> DecodeRows | None:
        seated = [(slot, sequence) for slot, sequence in self.slots.seated(microbatch) if self._may_draw(sequence)]
        drafts, most = self._most([sequence for _, sequence in seated])
        if self.shared.available < len(seated) * self.config.pages_for(most):
            seated.sort(key=lambda each: each[1].order)  # the best takes pages first: it is never its inferiors' victim
        grants: list[PageGrant] = []
        active = sorted((row for row in seated if self._has_room(row, most, grants)), key=lambda each: each[0])
        if not active:
            return None
        return DecodeRows(
            microbatch=microbatch,
            active=tuple(slot for slot, _ in active),
            table_pages=self._table_pages([sequence for _, sequence in active], most),
            admit=tuple(admission(slot, each, self.config.draft_tokens) for slot, each in active if not each.on_device),
            grants=tuple(grants),
            retire=self.slots.begin_step(microbatch),
            gates=self.decode_side.ahead.gates(microbatch),
            widths=self._widths([sequence for _, sequence in active], most, drafts=drafts),
            turns=most > 1 and not drafts,
            read=tuple(
                Read(slot, tuple(each.output[each.recalled :]))
                for slot, each in active
                if each.on_device and each.sampling.grammar
            ),
        )

    def _widths(self, sequences: Sequence[DecodeSequence], most: int, *, drafts: bool) -> tuple[int, ...]:
        if drafts:
            return draft_widths(sequences, most, self.decode_side)
        if self.config.draft_tokens == 0 and self.config.decode.steps_per_dispatch == 1:
            return ()  # each draws one
        return tuple(min(most, left_of(sequence)) for sequence in sequences)

    def _may_draw(self, sequence: DecodeSequence) -> bool:
        """One whose next token depends on how its last one is read is held back until it has been."""
        return left_of(sequence) > 0 and not (sequence.sampling.synchronous and sequence.in_flight)

    def _most(self, seated: Sequence[DecodeSequence]) -> tuple[bool, int]:
        """Returns whether the next step verifies drafts, and the most tokens that one of its rows may draw."""
        turns = self._turns(seated) if self.config.decode.steps_per_dispatch > 1 else 1
        drafts = self._drafts(seated, turns)
        return drafts > 0, 1 + drafts if drafts else turns

    def _turns(self, seated: Sequence[DecodeSequence]) -> int:
        """As many as nothing else is wanted for, and as no pages would have to be had of others for."""
        turns = most_turns(
            self.config,
            seated,
            [left_of(sequence) for sequence in seated],
            self.decode_side.turn_times,
            ready=self.decode_side.num_ready > 0,
            expects=self.decode_side.expects,
            prompts=self.prefill_side.waiting.tokens > 0,
        )
        if turns == 1:
            return 1
        ends = [(sequence, self.config.pages_for(self._end_of(sequence, turns))) for sequence in seated]
        wanted = sum(max(0, pages - len(sequence.pages)) for sequence, pages in ends)
        return turns if wanted <= self.shared.available else 1

    def _drafts(self, seated: Collection[DecodeSequence], turns: int) -> int:
        """Returns the draft length of the next step, 0 for a plain dispatch of `turns` steps."""
        controller, most = self.decode_side.draft_controller, self.config.tokens_ahead
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
        """KV tokens when its next step is over, at most."""
        return sequence.num_tokens + sequence.dispatched + min(most, left_of(sequence)) - 1

    # ------------------------------------------------------------ pages

    def _has_room(self, row: Row, most: int, grants: list[PageGrant]) -> bool:
        """Whether the sequence may take this step: it has, or gets, pages for the tokens that the step feeds."""
        slot, sequence = row
        while sequence.slot == slot and self.config.pages_for(self._end_of(sequence, most)) > len(sequence.pages):
            page = page_for(self.decode_side, sequence)
            if page is None:
                return False
            if sequence.on_device:
                grants.append(PageGrant(slot, len(sequence.pages), page))
            sequence.pages.append(page)
        return sequence.slot == slot  # or it was a victim a moment ago


def page_for(decode_side: DecodePhase, sequence: DecodeSequence) -> int | None:
    """A page, if need be of whoever ranks lowest; None where nobody gives way, or that is the sequence itself."""
    while (page := decode_side.shared.take(1, sequence.owner, PageState.HELD)) is None:
        if decode_side.take_from_drained():
            continue
        if not admitted(sequence):
            return None  # nobody gives way to who waits for KV
        holding = [each for each in decode_side.sequences.values() if each.pages and admitted(each)]
        victim = choose_victim(holding)
        assert victim is not None, "whoever grows is admitted"
        if victim is sequence and len(holding) == 1:
            return None  # alone among sequences that are still to be filled: those will end, or run out
        decode_side.preempt(victim)
        if victim is sequence:
            return None
    return page[0]


# Decode steps that only repeat: how many are certain to, and what so many of their ends make of the decode side,
# at once.
#
# A step's end is quiet where it gives each of its sequences a token and the same step follows it: nobody comes,
# goes, ends, grows a page or may draw a stop token. What `repeat` leaves behind is what as many `StepDone`s
# would, one by one, and so is what it says, but in one word. A driver that knows when steps end may ask for it;
# no other ever does.


def repeatable_steps(decode_side: DecodePhase) -> int:
    """Steps that end quietly from now on, whatever their tokens, for as long as nothing else happens to the worker.

    0 unless the steps in flight are what they will go on to be: as many of each busy microbatch as may be, in strict
    rounds, of all its sequences.
    """
    slots, flight = decode_side.slots, tuple(decode_side.steps.values())
    busy = slots.busy_microbatches
    full = len(flight) == busy * slots.steps_in_flight
    config = decode_side.config
    if not busy or not full or config.draft_tokens or config.decode.steps_per_dispatch > 1 or _seats_next(decode_side):
        return 0
    cycle = flight[:busy]
    if len({step.microbatch for step in cycle}) < busy or not all(_goes_on(decode_side, step) for step in cycle):
        return 0
    if not all(_same(step, cycle[place % busy]) for place, step in enumerate(flight)):
        return 0
    return min(place + busy * _alike(decode_side, step) for place, step in enumerate(cycle))


def _seats_next(decode_side: DecodePhase) -> bool:
    """Whether somebody may be seated whatever comes next: a slot came free when nobody was looking for one."""
    ahead = decode_side.ahead.used and decode_side.slots.busy_microbatches < decode_side.config.num_microbatches
    return ahead or (decode_side.num_ready > 0 and decode_side.slots.num_taken < decode_side.config.num_slots)


def _goes_on(decode_side: DecodePhase, step: Step) -> bool:
    """Whether the microbatch's next step has the sequences of this one, and nothing to tell the device."""
    return step.sequences == dict(decode_side.slots.seated(step.microbatch)) and not decode_side.slots.retires(
        step.microbatch
    )


def _same(step: Step, other: Step) -> bool:
    return step.microbatch == other.microbatch and step.sequences == other.sequences


def _alike(decode_side: DecodePhase, step: Step) -> int:
    """Further steps of these sequences that need no page, are nobody's last and have the same size on the device."""
    config, longest = decode_side.config, _longest(step)
    table_tokens = bucket(config.pages_for(longest), config.table_buckets) * config.page_size
    steps = table_tokens - longest + 1
    for sequence in step.sequences.values():
        sampling = sequence.sampling
        if not sequence.stepped or not admitted(sequence) or sampling.stop_token_ids or sampling.synchronous:
            return 0
        room = len(sequence.pages) * config.page_size - sequence.num_tokens - sequence.dispatched + 1
        steps = min(steps, room, sampling.max_tokens - sequence.dispatched - 1)
    return max(0, steps)


def _longest(step: Step) -> int:
    return max(sequence.num_tokens + sequence.dispatched for sequence in step.sequences.values())


def next_rows(decode_side: DecodePhase) -> tuple[DecodeRows, ...]:
    """The next round of quiet steps, in their order: so that they can be priced."""
    return tuple(
        _rows(decode_side, step) for step in islice(decode_side.steps.values(), decode_side.slots.busy_microbatches)
    )


def _rows(decode_side: DecodePhase, step: Step) -> DecodeRows:
    table_pages = bucket(decode_side.config.pages_for(_longest(step)), decode_side.config.table_buckets)
    return DecodeRows(step.microbatch, tuple(step.sequences), table_pages)


def repeat(decode_side: DecodePhase, steps: int, sampled: Sampled, new_step_id: Callable[[], int]) -> None:
    """Ends `steps` quiet steps in which everybody drew `sampled`; puts one `Drawn`, and the steps dispatched last."""
    flight, busy = list(decode_side.steps.items()), decode_side.slots.busy_microbatches
    rows = [_rows(decode_side, step) for _, step in flight[:busy]]
    draws: list[TokenDelta] = []
    for place, (_, step) in enumerate(flight[:busy]):
        count = len(range(place, steps, busy))
        draws += [_take(sequence, count, sampled) for sequence in step.sequences.values() if count]
    decode_side.out.draw(draws)
    decode_side.slots.go_round([each.microbatch for each in rows], steps)
    for step_id, _ in flight[:steps]:
        del decode_side.steps[step_id]
    for index in range(max(0, steps - len(flight)), steps):
        _, step = flight[index % busy]
        step_id = new_step_id()
        decode_side.steps[step_id] = Step(step.microbatch, dict(step.sequences), (), step.widths)
        decode_side.out.put(RunStep(StepPlan(step_id, rows[index % busy])))


def _take(sequence: DecodeSequence, count: int, sampled: Sampled) -> TokenDelta:
    index = sequence.num_output + len(sequence.output)
    sequence.output.extend([sampled.token] * count)
    sequence.dispatched += count
    return TokenDelta(sequence.owner, index, (sampled,) * count)
