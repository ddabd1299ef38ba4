"""What an actor's effects come to in a world of the explorer: mail, timers, words to clients, and what devices do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jdisagg.core import events as ev
from jdisagg.core.interpreter import interpret
from jdisagg.core.request import FinishReason, RequestId, WorkerId
from jdisagg.core.tiers import DropPages, InsertPages, MovePages
from tests.explore.actors import Gave, Handed, Took
from tests.explore.device import Content


class Timer(NamedTuple):
    actor: int
    key: str
    at_s: float


@dataclass(frozen=True, slots=True)
class Post:
    queue: tuple[str, int, int]
    item: int


@dataclass(frozen=True, slots=True)
class Told:
    """A client is given tokens."""

    request_id: RequestId
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Over:
    """A client is told the end; no reason: it was turned away."""

    request_id: RequestId
    reason: FinishReason | None


class Moves:
    """Of the actor `number`, in the order of its effects. What a device is to do is a tuple: the method, and the rest.

    `item` numbers an event for an actor; `shipment` is what the event that led here has brought.
    """

    def __init__(
        self,
        number: int,
        names: Sequence[str],
        item: Callable[[int, ev.Event], int],
        shipment: tuple[Content, ...],
    ) -> None:
        self.number, self.names, self.item, self.shipment = number, names, item, shipment
        self.found: list[Any] = []

    def take(self, effects: Sequence[Any]) -> tuple[Any, ...]:
        """Those of pages are the noted pool's own, beside those of actors."""
        name = WorkerId(self.names[self.number])
        for effect in effects:
            match effect:
                case Took(owner, pages):
                    self.found.append(("take", owner, pages))
                case Handed(owner, to, pages):
                    self.found.append(("hand_over", owner, to, pages))
                case Gave(owner, pages):
                    self.found.append(("give_back", owner, pages))
                case _:
                    interpret(name, effect, self)
        return tuple(self.found)

    def send(self, actor: WorkerId, effect: ev.Send) -> None:
        to = self.names.index(effect.to)
        self.found.append(Post(("mail", self.number, to), self.item(to, ev.Received(actor, effect.message))))

    def set_timer(self, actor: WorkerId, effect: ev.SetTimer) -> None:
        self.found.append(Timer(self.number, effect.key, effect.at_s))

    def run_step(self, actor: WorkerId, effect: ev.RunStep) -> None:
        self.found.append(("step", effect.plan, effect.ships))

    def ship(self, actor: WorkerId, effect: ev.ShipKV) -> None:
        self.found.append(("ship", effect.transfer))

    def insert(self, actor: WorkerId, effect: ev.InsertKV) -> None:
        self.found.append(("insert", effect.transfer, self.shipment))

    def drop(self, actor: WorkerId, effect: ev.DropKV) -> None:
        """It was held nowhere."""

    def open_gates(self, actor: WorkerId, effect: ev.OpenGates) -> None:
        self.found.append(("open_gates", effect.attempt))

    def move_pages(self, actor: WorkerId, effect: MovePages) -> None:
        self.found.append(("move_pages", effect.move))

    def insert_pages(self, actor: WorkerId, effect: InsertPages) -> None:
        self.found.append(("insert_pages", effect.move, effect.good, self.shipment))

    def drop_pages(self, actor: WorkerId, effect: DropPages) -> None:
        self.found.append(("drop_pages", effect.move))

    def emit(self, actor: WorkerId, effect: ev.EmitTokens) -> None:
        self.found.append(Told(effect.request_id, tuple(each.token for each in effect.delta.sampled)))

    def finish(self, actor: WorkerId, effect: ev.Finish) -> None:
        self.found.append(Over(effect.request_id, effect.reason))

    def reject(self, actor: WorkerId, effect: ev.Reject) -> None:
        self.found.append(Over(effect.request_id, None))

    def reshape(self, actor: WorkerId, effect: ev.Reshape) -> None:
        self.found.append(("reshape", effect.config))

    def stands(self, actor: WorkerId, effect: ev.WorkerStands) -> None:
        """It is for people."""
