"""The real actors, held as states: pickled once, stepped from any state, and every step remembered.

An actor's pool notes each page that it takes or gives back among its effects, so that the order of the program says
who owned a page when a plan used it. Its free list is kept sorted: worlds that differ only in the order in which pages
came back are one.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

from jdisagg.core.events import Effect, Event, Send
from jdisagg.core.messages import AbortAck
from jdisagg.core.request import WorkerId
from jdisagg.core.router_config import RouterConfig
from jdisagg.core.worker_config import WorkerConfig
from jdisagg.policy.outbox import Outbox
from jdisagg.policy.page_pool import Owner, PagePool, PageState
from jdisagg.policy.router import Router
from jdisagg.policy.worker import Worker
from tests.explore.device import Violation, need
from tests.explore.shapes import Shape, shape_of

Actor = Router | Worker
EPOCHS_A_LIFE = 1000  # a router that starts again takes epochs that no earlier one gave


@dataclass(frozen=True, slots=True)
class Took:
    owner: Owner
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Gave:
    owner: Owner
    pages: tuple[int, ...]


class NotedPool(PagePool):
    """Says what it does; the lowest free page is taken first."""

    out: Outbox

    def take(self, count: int, owner: Owner, state: PageState) -> tuple[int, ...] | None:
        pages = super().take(count, owner, state)
        if pages:
            self.out.put(Took(owner, pages))  # type: ignore[arg-type]
        return pages

    def give_back(self, pages: Any, owner: Owner) -> None:
        given = tuple(pages)
        super().give_back(given, owner)
        self._free.sort(reverse=True)
        if given:
            self.out.put(Gave(owner, given))  # type: ignore[arg-type]


def new_worker(config: WorkerConfig) -> Worker:
    worker = Worker(config)
    worker.pool.__class__ = NotedPool
    worker.pool.out = worker.out  # type: ignore[attr-defined]
    return worker


def new_router(config: RouterConfig, workers: Sequence[WorkerConfig], life: int) -> Router:
    router = Router(config, workers)
    router._epochs = count(life * EPOCHS_A_LIFE + 1)
    return router


class Part(NamedTuple):
    """One thing's share of a state's key: its form by number, and what may be renamed in it."""

    form: int
    epochs: tuple[int, ...]
    plans: tuple[int, ...]
    times: tuple[float, ...]


Alter = Callable[[Actor, Event, list[Effect]], list[Effect]]
PLAN_SPACE = 1_000_000  # plan ids of different workers never meet


class Cast:
    """All states of all actors seen so far, by number."""

    def __init__(self, alter: Alter | None = None) -> None:
        self.parts: list[Part] = []
        self.holds: list[str] = []  # what each still has to do, in words; empty where it is at rest
        self.steps = 0  # events that an actor really took
        self._frozen: list[bytes] = []
        self._known: dict[Shape, int] = {}
        self._forms: dict[Any, int] = {}
        self._alter = alter

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
            self.holds.append(holds_of(actor))
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
            effects = actor.handle(event, now_s)
            if isinstance(actor, Worker):
                actor.check_invariants()
        except Exception as error:
            raise Violation(f"{type(error).__name__}: {error}") from error
        if isinstance(actor, Worker):
            check_acknowledged(actor, effects)
        if self._alter is not None:
            effects = self._alter(actor, event, effects)
        return self.add(who, actor), effects


def check_acknowledged(worker: Worker, effects: Sequence[Effect]) -> None:
    """Who acknowledges an abort holds nothing of it."""
    for effect in effects:
        if isinstance(effect, Send) and isinstance(effect.message, AbortAck):
            owner = Owner(effect.message.handoff, effect.message.epoch)
            held = owner in worker.prompts.prompts or owner in worker.beds.beds
            need(not held, f"{worker.config.worker} acknowledges the abort of {owner} and still holds it")


def holds_of(actor: Actor) -> str:
    """What is left to do, in words."""
    if isinstance(actor, Router):
        rows = [f"{row.request_id} waits for {row.waiting}" for row in actor.rows.values()]
        return "; ".join(rows + [f"{len(actor.aborts)} aborts unanswered"] * bool(len(actor.aborts)))
    held: list[WorkerId | str] = [
        f"{owner.handoff}#{owner.epoch} {bed.handoff.state}" for owner, bed in actor.beds.beds.items()
    ]
    held += [f"{owner.handoff}#{owner.epoch} {prompt.handoff.state}" for owner, prompt in actor.prompts.prompts.items()]
    pages = actor.config.num_pages - actor.pool.free_pages
    if not actor.idle or pages:
        return f"{', '.join(held) or 'no sequence'}, {pages} pages"
    return ""
