"""Replays a serving run's journal in the simulator, which must make the same decisions, event for event.

`measure` takes from a journal only what its actors did not decide: external events, how long each step, KV part and
message took, how late each timer was, and the sampled tokens. `RerunCluster` is the simulator's cluster with these
durations: new actors, its own queue, and every event made from the effects of its own actors. Each actor must decide
as in the serving run, in the same order, field by field: plans, pages, placements, messages, timers.

A rerun does not show that a cost model's durations match the serving run. Calibration measures that separately.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import NamedTuple, Protocol

import numpy as np

from jdisagg.core.codec import encode, shown
from jdisagg.core.errors import JournalError
from jdisagg.core.events import (
    ROUTER,
    Effect,
    EngineFailed,
    Event,
    KVArrived,
    Received,
    Reshape,
    RunStep,
    Send,
    SetTimer,
    ShipKV,
    StepDone,
    Submit,
    TimerFired,
)
from jdisagg.core.interpreter import Unheeded, interpret
from jdisagg.core.journal import Entry, Header, Recorded, digest
from jdisagg.core.messages import Message
from jdisagg.core.request import WorkerId
from jdisagg.core.steps import KVTransfer
from jdisagg.core.tiers import MovePages, PageMove, PagesMoved
from jdisagg.policy.router.router import Router
from jdisagg.policy.worker.worker import Worker
from jdisagg.sim.simulation import SimulationDriver
from jdisagg.sim.traces import Trace

# Runs new actors through a journal, event by event, as a driver would.


class ReplayedNode(Protocol):
    def handle(self, event: Event, now_s: float) -> list[Effect]: ...


def actors_of(header: Header) -> dict[WorkerId, ReplayedNode]:
    """Returns new actors for the router and workers of a journal. Raises JournalError if they cannot be made."""
    try:
        return {ROUTER: Router(header.router, header.workers), **{each.worker: Worker(each) for each in header.workers}}
    except Exception as error:
        raise JournalError(f"line 1: no such actors can be: {_error_text(error)}") from error


def decide(actors: Mapping[WorkerId, ReplayedNode], recorded: Recorded, number: int) -> list[Effect]:
    """Returns the effects of the journal's event `number` now. Raises JournalError with the line."""
    if recorded.actor not in actors:
        raise JournalError(
            f"line {recorded.line}: event {number} is for {shown(recorded.actor)}, which the header does not have"
        )
    try:
        return actors[recorded.actor].handle(recorded.event, recorded.at_s)
    except Exception as error:
        if isinstance(recorded.event, Received) and recorded.event.sender not in actors:
            return []  # in serving it ended the connection of the sender
        what = f"event {number}, {type(recorded.event).__name__} to {recorded.actor}"
        raise JournalError(
            f"line {recorded.line}: {what}, cannot follow on those before: {_error_text(error)}"
        ) from error


def _error_text(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


NEVER = math.inf  # delay of a timer that was overdue and rearmed before it fired


class TimedEvent(NamedTuple):
    """The event that ended a step or part, and the time from its dispatch."""

    took_s: float
    event: Event


@dataclass
class MeasuredRun:
    """The inputs of a serving run. Messages and timers are numbered in the order of their effects."""

    entries: list[Entry] = field(default_factory=list)  # the serving run's events with their effects, to compare with
    given: list[tuple[float, WorkerId, Event]] = field(default_factory=list)  # external events with their times
    steps: dict[tuple[WorkerId, int], TimedEvent] = field(default_factory=dict)
    parts: dict[KVTransfer, TimedEvent] = field(default_factory=dict)
    moves: dict[tuple[WorkerId, PageMove], TimedEvent] = field(default_factory=dict)
    messages_s: dict[tuple[WorkerId, WorkerId, int], float] = field(default_factory=dict)
    lateness_s: dict[tuple[WorkerId, str, int], float] = field(default_factory=dict)

    @property
    def end_s(self) -> float:
        return self.entries[-1].at_s if self.entries else 0.0


def between(began_s: float, ended_s: float) -> float:
    """Returns the seconds for which began_s + seconds == ended_s exactly, bit for bit."""
    took_s = ended_s - began_s
    while began_s + took_s != ended_s:
        took_s = math.nextafter(took_s, math.inf if began_s + took_s < ended_s else -math.inf)
    return took_s


def measure(header: Header, entries: Iterable[Recorded]) -> MeasuredRun:
    """Returns the durations of a journal that has all of its actors. Raises JournalError if its events do not lead to
    the recorded effects."""
    actors, stopwatch = actors_of(header), DurationCollector()
    for number, recorded in enumerate(entries, 1):
        effects = decide(actors, recorded, number)
        if digest(effects) != recorded.decided:
            what = f"event {number}, {recorded.actor}: its effects are not those on record; see the replay"
            raise JournalError(f"line {recorded.line}: {what}")
        stopwatch.see(Entry(recorded.at_s, recorded.actor, recorded.event, effects))
    return stopwatch.stop()


class DurationCollector(Unheeded):
    """Pairs every effect with the event that answers it."""

    def __init__(self) -> None:
        self.measured, self._now_s = MeasuredRun(), 0.0
        self._steps: dict[tuple[WorkerId, int], float] = {}
        self._parts: dict[KVTransfer, float] = {}
        self._moves: dict[tuple[WorkerId, PageMove], float] = {}
        self._sent: dict[tuple[WorkerId, WorkerId], deque[tuple[int, float, Message]]] = defaultdict(deque)
        self._armed: dict[tuple[WorkerId, str], tuple[int, float]] = {}
        self._numbers = PairCounter()

    def see(self, entry: Entry) -> None:
        self.measured.entries.append(entry)
        self._now_s = entry.at_s
        if not self._record_answer(entry):
            self.measured.given.append((entry.at_s, entry.actor, entry.event))
        for effect in entry.effects:
            interpret(entry.actor, effect, self)

    def stop(self) -> MeasuredRun:
        """Returns the measurements. Timers that were due and had not fired at the end of the journal never fire."""
        for (actor, key), (number, due_s) in self._armed.items():
            if due_s <= self.measured.end_s:
                self.measured.lateness_s[actor, key, number] = NEVER
        return self.measured

    def _record_answer(self, entry: Entry) -> bool:
        """Records the duration if the event follows from a recorded effect; returns False for an external event."""
        match entry.event:
            case StepDone(step_id) | EngineFailed(int() as step_id):
                began_s = self._steps.pop((entry.actor, step_id), None)
                if began_s is not None:
                    answer = TimedEvent(between(began_s, entry.at_s), entry.event)
                    self.measured.steps[entry.actor, step_id] = answer
                return began_s is not None
            case KVArrived(transfer):
                began_s = self._parts.pop(transfer, None)
                if began_s is not None:
                    self.measured.parts[transfer] = TimedEvent(between(began_s, entry.at_s), entry.event)
                return began_s is not None
            case PagesMoved(move):
                began_s = self._moves.pop((entry.actor, move))
                self.measured.moves[entry.actor, move] = TimedEvent(between(began_s, entry.at_s), entry.event)
                return True
            case Received(sender, message):
                return self._message_received(sender, message, entry)
            case TimerFired(key):
                number, due_s = self._armed.pop((entry.actor, key))
                self.measured.lateness_s[entry.actor, key, number] = between(due_s, entry.at_s)
                return True
        return False

    def _message_received(self, sender: WorkerId, message: Message, entry: Entry) -> bool:
        """Pairs a message with its sending, in order per pair of actors; others came from another process."""
        waiting = self._sent[sender, entry.actor]
        if not waiting or waiting[0][2] != message:
            return False
        number, sent_s, _ = waiting.popleft()
        self.measured.messages_s[sender, entry.actor, number] = between(sent_s, entry.at_s)
        return True

    def run_step(self, actor: WorkerId, effect: RunStep) -> None:
        self._steps[actor, effect.plan.step_id] = self._now_s
        self._parts |= dict.fromkeys(effect.ships, self._now_s)

    def ship(self, actor: WorkerId, effect: ShipKV) -> None:
        self._parts[effect.transfer] = self._now_s

    def move_pages(self, actor: WorkerId, effect: MovePages) -> None:
        self._moves[actor, effect.move] = self._now_s

    def send(self, actor: WorkerId, effect: Send) -> None:
        number = self._numbers.next(actor, effect.to)
        self._sent[actor, effect.to].append((number, self._now_s, effect.message))

    def set_timer(self, actor: WorkerId, effect: SetTimer) -> None:
        before = self._armed.get((actor, effect.key))
        if before is not None and before[1] <= self._now_s:
            self.measured.lateness_s[actor, effect.key, before[0]] = NEVER
        self._armed[actor, effect.key] = self._numbers.next(actor, effect.key), effect.at_s


class PairCounter:
    """Counts from 0 for every pair of names."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], count] = defaultdict(count)

    def next(self, one: str, other: str) -> int:
        return next(self._counts[one, other])


class RerunCluster(SimulationDriver):
    """A simulated cluster with the durations and tokens of a serving run, compared event by event."""

    def __init__(self, header: Header, measured: MeasuredRun) -> None:
        super().__init__(header.workers, header.router, message_s=0.0)
        self.measured = measured
        self._numbers = PairCounter()
        for at_s, actor, event in measured.given:
            self._at(at_s, actor, event)

    def compare(self) -> int:
        """Returns the number of events, all with the recorded effects. Raises JournalError at the first difference."""
        no_requests = Trace(np.zeros(0), np.zeros(0, np.int64), np.zeros(0, np.int64))
        self._run(no_requests, until_s=self.measured.end_s)
        live = self.measured.entries
        if self.events < len(live):
            raise JournalError(
                f"event {self.events + 1} does not happen here; live it was {describe_entry(live[self.events])}"
            )
        return self.events

    def _deliver(self, actor: WorkerId, event: Event) -> None:
        if isinstance(event, Submit):
            self.requests.book(event.request, self.now_s)
        effects = (self.router if actor == ROUTER else self.workers[actor]).handle(event, self.now_s)
        self._compare_entry(Entry(self.now_s, actor, event, effects))
        self.events += 1
        for effect in effects:
            interpret(actor, effect, self)

    def _compare_entry(self, here: Entry) -> None:
        number, live = self.events + 1, self.measured.entries
        if number > len(live):
            raise JournalError(f"event {number} happens here alone: {describe_entry(here)}")
        there = live[number - 1]
        if (here.at_s, here.actor, here.event) != (there.at_s, there.actor, there.event):
            raise JournalError(f"event {number}\nlive {describe_entry(there)}\nhere {describe_entry(here)}")
        if here.effects != there.effects:
            raise JournalError(
                f"event {number}, {describe_entry(here)}\n{first_difference(there.effects, here.effects)}"
            )

    def reshape(self, actor: WorkerId, effect: Reshape) -> None:
        """Does nothing: the end of a role change is an external event."""

    def send(self, actor: WorkerId, effect: Send) -> None:
        took_s = self.measured.messages_s.get((actor, effect.to, self._numbers.next(actor, effect.to)))
        if took_s is not None:  # otherwise it was not received before the journal ended, or went to another process
            self._at(self.now_s + took_s, effect.to, Received(actor, effect.message))

    def set_timer(self, actor: WorkerId, effect: SetTimer) -> None:
        number = self._numbers.next(actor, effect.key)
        at_s = effect.at_s + self.measured.lateness_s.get((actor, effect.key, number), 0.0)
        self._queue.arm(at_s, actor, effect.key)
        if at_s < NEVER:
            self._at(at_s, actor, TimerFired(effect.key))

    def run_step(self, actor: WorkerId, effect: RunStep) -> None:
        plan = effect.plan
        for transfer in effect.ships:
            self._send_part(transfer)
        answer = self.measured.steps.get((actor, plan.step_id))
        if answer is None:
            return  # still running when the journal ended
        event = answer.event
        if isinstance(event, StepDone) and plan.decode is not None:
            sampled = dict(event.decode)
            event = replace(event, decode=tuple((slot, sampled[slot]) for slot in plan.decode.active))
        self._at(self.now_s + answer.took_s, actor, event)

    def ship(self, actor: WorkerId, effect: ShipKV) -> None:
        self._send_part(effect.transfer)

    def move_pages(self, actor: WorkerId, effect: MovePages) -> None:
        answer = self.measured.moves.get((actor, effect.move))
        if answer is not None:
            self._at(self.now_s + answer.took_s, actor, answer.event)

    def _send_part(self, transfer: KVTransfer) -> None:
        answer = self.measured.parts.get(transfer)
        if answer is not None:
            self._at(self.now_s + answer.took_s, transfer.destination, answer.event)


def rerun(header: Header, entries: Iterable[Recorded]) -> MeasuredRun:
    """Reruns a journal in virtual time and returns its measurements. Raises JournalError at a difference."""
    measured = measure(header, entries)
    RerunCluster(header, measured).compare()
    return measured


def describe_entry(entry: Entry) -> str:
    return f"at {entry.at_s} s, {entry.actor}: {encode(entry.event)}"


def first_difference(live: Sequence[Effect], here: Sequence[Effect]) -> str:
    """Returns the first unequal pair of effects; "nothing" if one side has no more."""
    size = max(len(live), len(here))
    rows = [[*map(encode, effects), *["nothing"] * (size - len(effects))] for effects in (live, here)]
    index = next(index for index in range(size) if rows[0][index] != rows[1][index])
    return f"effect {index + 1} live {rows[0][index]}\neffect {index + 1} here {rows[1][index]}"
