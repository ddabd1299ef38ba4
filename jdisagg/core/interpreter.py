"""The one interpreter of effects: says to whoever carries them out which kind each is.

Live serving, the simulator, the explorer of tests and a journal's replay are four implementations of `Effects`. A new
kind of effect is a case here, a method there, and an implementation in each: the type checker names those that lack it.
"""

from __future__ import annotations

from typing import Any, Protocol, assert_never

from jdisagg.core.events import (
    DropKV,
    Effect,
    EmitTokens,
    Finish,
    InsertKV,
    OpenGates,
    Reject,
    Reshape,
    RunStep,
    Send,
    SetTimer,
    ShipKV,
    WorkerStands,
)
from jdisagg.core.request import WorkerId
from jdisagg.core.tiers import DropPages, InsertPages, MovePages


class Effects(Protocol):
    """What actors may ask of a driver, kind by kind; `actor` is who asks. What each means is said where it is defined,
    in `events.py`."""

    def send(self, actor: WorkerId, effect: Send, /) -> None: ...

    def set_timer(self, actor: WorkerId, effect: SetTimer, /) -> None: ...

    def run_step(self, actor: WorkerId, effect: RunStep, /) -> None: ...

    def ship(self, actor: WorkerId, effect: ShipKV, /) -> None: ...

    def insert(self, actor: WorkerId, effect: InsertKV, /) -> None: ...

    def drop(self, actor: WorkerId, effect: DropKV, /) -> None: ...

    def open_gates(self, actor: WorkerId, effect: OpenGates, /) -> None: ...

    def move_pages(self, actor: WorkerId, effect: MovePages, /) -> None: ...

    def insert_pages(self, actor: WorkerId, effect: InsertPages, /) -> None: ...

    def drop_pages(self, actor: WorkerId, effect: DropPages, /) -> None: ...

    def emit(self, actor: WorkerId, effect: EmitTokens, /) -> None: ...

    def finish(self, actor: WorkerId, effect: Finish, /) -> None: ...

    def reject(self, actor: WorkerId, effect: Reject, /) -> None: ...

    def reshape(self, actor: WorkerId, effect: Reshape, /) -> None: ...

    def stands(self, actor: WorkerId, effect: WorkerStands, /) -> None: ...


class Unheeded:
    """Effects that are not carried out, for who cares for some kinds only and says what these are to it. No driver is
    one: it would not learn of a new kind."""

    def _nothing(self, actor: WorkerId, effect: Any, /) -> None:
        return

    send = set_timer = run_step = ship = insert = drop = open_gates = emit = finish = reject = _nothing
    reshape = stands = _nothing
    move_pages = insert_pages = drop_pages = _nothing


def interpret(actor: WorkerId, effect: Effect, effects: Effects) -> None:
    """Has `effects` carry out what `actor` asks for. The most frequent kinds come first."""
    match effect:
        case Send():
            effects.send(actor, effect)
        case SetTimer():
            effects.set_timer(actor, effect)
        case RunStep():
            effects.run_step(actor, effect)
        case EmitTokens():
            effects.emit(actor, effect)
        case ShipKV():
            effects.ship(actor, effect)
        case InsertKV():
            effects.insert(actor, effect)
        case DropKV():
            effects.drop(actor, effect)
        case OpenGates():
            effects.open_gates(actor, effect)
        case MovePages():
            effects.move_pages(actor, effect)
        case InsertPages():
            effects.insert_pages(actor, effect)
        case DropPages():
            effects.drop_pages(actor, effect)
        case Finish():
            effects.finish(actor, effect)
        case Reject():
            effects.reject(actor, effect)
        case Reshape():
            effects.reshape(actor, effect)
        case WorkerStands():
            effects.stands(actor, effect)
        case _:
            assert_never(effect)
