"""What a live driver does with the effects of its actors; all on the driver thread, which nothing here holds up."""

from __future__ import annotations

from collections import deque
from collections.abc import Container

from jdisagg.core.events import (
    DropKV,
    EmitTokens,
    Event,
    Finish,
    InsertKV,
    OpenGates,
    Received,
    Reject,
    RunStep,
    Send,
    SetTimer,
    ShipKV,
)
from jdisagg.core.request import RequestId, WorkerId
from jdisagg.serve.executors import Executors, RemoteWorkers
from jdisagg.serve.health_monitor import HealthMonitor
from jdisagg.serve.timers import Timers

Outcome = EmitTokens | Finish | Reject


class LiveEffects:
    """Messages for actors of this process and tokens for clients are kept until the driver comes for them."""

    def __init__(
        self, here: Container[WorkerId], executors: Executors, health: HealthMonitor, remote: RemoteWorkers | None
    ) -> None:
        """here: the actors of this process; what is for another goes by way of `remote`."""
        self.mail: deque[tuple[WorkerId, Event]] = deque()
        self.told: list[tuple[RequestId, Outcome]] = []
        self.timers = Timers()
        self._here, self._executors, self._health, self._remote = here, executors, health, remote

    def send(self, actor: WorkerId, effect: Send) -> None:
        if effect.to in self._here:
            self.mail.append((effect.to, Received(actor, effect.message)))
            return
        assert self._remote is not None, f"{effect.to} is not here"
        self._remote.send(actor, effect.to, effect.message)

    def set_timer(self, actor: WorkerId, effect: SetTimer) -> None:
        self.timers.set(effect.at_s, actor, effect.key)

    def run_step(self, actor: WorkerId, effect: RunStep) -> None:
        self._health.dispatched(actor, effect.plan)
        self._executors.run(actor, effect)

    def ship(self, actor: WorkerId, effect: ShipKV) -> None:
        self._executors.ship(actor, effect.transfer)

    def insert(self, actor: WorkerId, effect: InsertKV) -> None:
        self._executors.insert(actor, effect.transfer)

    def drop(self, actor: WorkerId, effect: DropKV) -> None:
        self._executors.drop(actor, effect.transfer)

    def open_gates(self, actor: WorkerId, effect: OpenGates) -> None:
        self._executors.by_worker[actor].open_gates(effect.attempt)

    def emit(self, actor: WorkerId, effect: EmitTokens) -> None:
        self.told.append((effect.request_id, effect))

    def finish(self, actor: WorkerId, effect: Finish) -> None:
        self.told.append((effect.request_id, effect))

    def reject(self, actor: WorkerId, effect: Reject) -> None:
        self.told.append((effect.request_id, effect))
