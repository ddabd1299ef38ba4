"""The real actors, held as states: pickled once, stepped from any state, and every step remembered.

An actor's pool notes each page that it takes or gives back among its effects, so that the order of the program says
who owned a page when a plan used it. Its free list is kept sorted: worlds that differ only in the order in which pages
came back are one.
"""

from __future__ import annotations

import math
import pickle
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from jdisagg.core.events import Effect, Event, Send
from jdisagg.core.messages import AbortAck
from jdisagg.core.request import Attempt, Phase, WorkerId
from jdisagg.core.router_config import RouterConfig
from jdisagg.core.worker_config import Stages, WorkerConfig
from jdisagg.policy.cache.page_pool import PagePool, PageState
from jdisagg.policy.effect_buffer import EffectBuffer
from jdisagg.policy.router.membership import LEAVE_TIMER
from jdisagg.policy.router.router import CAPACITY_TIMER, Router
from jdisagg.policy.worker.handoff import WAITS, State, Timer, timer_of
from jdisagg.policy.worker.slots import TurnTimes
from jdisagg.policy.worker.worker import Worker
from tests.explore.device import Violation, need
from tests.explore.shapes import Shape, shape_of

Actor = Router | Worker
EPOCHS_A_LIFE = 1000  # a router that starts again takes epochs that no earlier one gave


@dataclass(frozen=True, slots=True)
class Took:
    owner: Attempt
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Gave:
    owner: Attempt
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Handed:
    owner: Attempt
    to: Attempt
    pages: tuple[int, ...]


class NotedPool(PagePool):
    """Says what it does; the lowest free page is taken first."""

    out: EffectBuffer

    def take(self, count: int, owner: Attempt, state: PageState) -> tuple[int, ...] | None:
        pages = super().take(count, owner, state)
        if pages:
            self.out.put(Took(owner, pages))  # type: ignore[arg-type]
        return pages

    def hand_over(self, pages: Any, owner: Attempt, to: Attempt, state: PageState) -> None:
        super().hand_over(pages, owner, to, state)
        if pages:
            self.out.put(Handed(owner, to, tuple(pages)))  # type: ignore[arg-type]

    def give_back(self, pages: Any, owner: Attempt) -> None:
        given = tuple(pages)
        super().give_back(given, owner)
        self._free.sort(reverse=True)
        while self._free and self._free[0] == self._first_new - 1:  # as if it had never been taken
            self._first_new = self._free.pop(0)
        if given:
            self.out.put(Gave(owner, given))  # type: ignore[arg-type]


def new_worker(config: WorkerConfig) -> Worker:
    worker = Worker(config)
    worker.decode.turn_times = TurnTimes(replace(config, decode=Stages(1, 1)))  # all turns are within the gap
    worker.shared.pool.__class__ = NotedPool
    worker.shared.pool.out = worker.out  # type: ignore[attr-defined]
    worker.tiers.steps = None  # what computing costs is never learnt: whatever can be fetched is
    return worker


def new_router(config: RouterConfig, workers: Sequence[WorkerConfig], life: int) -> Router:
    return Router(replace(config, first_epoch=life * EPOCHS_A_LIFE + 1), workers)


class Part(NamedTuple):
    """One thing's share of a state's key: its form by number, and what may be renamed in it."""

    form: int
    epochs: tuple[int, ...]
    plans: tuple[int, ...]
    times: tuple[float, ...]


class Notes(NamedTuple):
    """What laws need to know of an actor's state, in words and numbers."""

    holds: str  # what it still has to do; empty where it is at rest
    waits: tuple[tuple[str, float], ...]  # timers that must be armed, and until when at the latest
    unfilled: frozenset[Attempt]  # reservations that are not admitted yet
    prompts: frozenset[Attempt]  # that this worker computes or ships
    decoding: tuple[tuple[WorkerId, Attempt], ...]  # what the router believes is admitted, and where


class ActorPatch(NamedTuple):
    """A change of the protocol, for tests that want to see it fail: what actors hear, and what comes of it."""

    amend: Callable[[Actor, Event], Event] = lambda actor, event: event
    alter: Callable[[Actor, Event, list[Effect]], list[Effect]] = lambda actor, event, effects: effects
    fresh_epochs: bool = True  # of a router that starts again


PLAN_SPACE = 1_000_000  # plan ids of different workers never meet


class StateTable:
    """All states of all actors seen so far, by number."""

    def __init__(self, patch: ActorPatch | None = None) -> None:
        self.parts: list[Part] = []
        self.notes: list[Notes] = []
        self.steps = 0  # events that an actor really took
        self._frozen: list[bytes] = []
        self._known: dict[Shape, int] = {}
        self._forms: dict[Any, int] = {}
        self.patch = patch or ActorPatch()

    def form(self, form: Any) -> int:
        return self._forms.setdefault(form, len(self._forms))

    def part(self, shape: Shape, owner: int) -> Part:
        plans = tuple(owner * PLAN_SPACE + plan for plan in shape.plans)
        return Part(self.form(shape.form), shape.epochs, plans, shape.times)

    def add(self, who: int, actor: Actor) -> int:
        """The number of a state of actor `who`."""
        shape = shape_of(actor)
        number = self._known.get(shape)
        if number is None:
            number = self._known[shape] = len(self.parts)
            self.parts.append(self.part(shape, who))
            self.notes.append(notes_of(actor))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of pickled counters, from Python 3.12 on
                self._frozen.append(pickle.dumps(actor, pickle.HIGHEST_PROTOCOL))
        return number

    def thaw(self, number: int) -> Any:
        """The actor itself, a copy."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return pickle.loads(self._frozen[number])

    def step(self, who: int, number: int, event: Event, now_s: float) -> tuple[int, list[Effect]]:
        """The state that follows and the effects; whatever an actor raises is a violation."""
        self.steps += 1
        actor: Actor = self.thaw(number)
        try:
            event = self.patch.amend(actor, event)
            effects = actor.handle(event, now_s)
            if isinstance(actor, Worker):
                actor.check_invariants()
        except Exception as error:
            raise Violation(f"{type(error).__name__}: {error}") from error
        if isinstance(actor, Worker):
            check_acknowledged(actor, effects)
        return self.add(who, actor), self.patch.alter(actor, event, effects)


def check_acknowledged(worker: Worker, effects: Sequence[Effect]) -> None:
    """Who acknowledges an abort holds nothing of it."""
    for effect in effects:
        if isinstance(effect, Send) and isinstance(effect.message, AbortAck):
            owner = effect.message.attempt
            held = owner in worker.prefill.sequences or owner in worker.decode.sequences
            need(not held, f"{worker.config.worker} acknowledges the abort of {owner} and still holds it")


def notes_of(actor: Actor) -> Notes:
    if isinstance(actor, Router):
        decoding = [
            (row.decode, row.attempt) for row in actor.rows.values() if row.phase is Phase.DECODING and row.decode
        ]
        return Notes(_router_holds(actor), tuple(_router_waits(actor)), frozenset(), frozenset(), tuple(decoding))
    unfilled = [
        owner
        for owner, reservation in actor.decode.sequences.items()
        if reservation.handoff.state is not State.ADMITTED
    ]
    prompts = frozenset(actor.prefill.sequences)
    return Notes(_worker_holds(actor), tuple(_worker_waits(actor)), frozenset(unfilled), prompts, ())


def _router_holds(router: Router) -> str:
    rows = [f"{row.request_id} waits for {row.waiting}" for row in router.rows.values()]
    rows += [f"{worker} is {each.standing}" for worker, each in router.members.changes.items() if each.target]
    return "; ".join(rows + [f"{len(router.aborts)} aborts unanswered"] * bool(len(router.aborts)))


def _router_waits(router: Router) -> Iterator[tuple[str, float]]:
    yield from ((f"row/{row.request_id}", row.deadline_s) for row in router.rows.values() if row.deadline_s < math.inf)
    yield from ((key, math.inf) for key in router.aborts._open)
    yield from ((f"{LEAVE_TIMER}/{each}", math.inf) for each in router.members.changes)
    if router.queue:
        yield CAPACITY_TIMER, math.inf


def _worker_holds(worker: Worker) -> str:
    held = [
        f"{owner.request_id}#{owner.epoch} {reservation.handoff.state}"
        for owner, reservation in worker.decode.sequences.items()
    ]
    prompts = worker.prefill.sequences.items()
    held += [f"{owner.request_id}#{owner.epoch} {prompt.handoff.state}" for owner, prompt in prompts]
    pages = worker.config.num_pages - worker.shared.available
    return "" if worker.idle and not pages else f"{', '.join(held) or 'no sequence'}, {pages} pages"


def _worker_waits(worker: Worker) -> Iterator[tuple[str, float]]:
    for each in (*worker.decode.sequences.values(), *worker.prefill.sequences.values()):
        wait = WAITS.get((each.handoff.end, each.handoff.state))
        if wait is not None and wait.owner != "router":
            yield each.handoff.timer, each.handoff.deadline_s
    for owner, reservation in worker.decode.sequences.items():
        if reservation.handoff.state is State.COMMITTED:
            yield timer_of(Timer.PARTS, owner), math.inf
    for fetch in worker.tiers.fetches.under_way.values():
        yield timer_of(Timer.FETCH, fetch.owner), fetch.deadline_s
    for owner, prompt in worker.prefill.sequences.items():
        if prompt.decode_worker != worker.config.worker:
            yield timer_of(Timer.RENEW, owner), math.inf
