"""What a live driver does with the effects of its actors; all on the driver thread, which nothing here holds up."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Container
from typing import Protocol

from jdisagg.core.events import (
    DropKV,
    EmitTokens,
    Event,
    Finish,
    InsertKV,
    OpenGates,
    Outcome,
    Received,
    Reject,
    Reshape,
    Reshaped,
    RunStep,
    Send,
    SetTimer,
    ShipKV,
    WorkerStands,
)
from jdisagg.core.request import RequestId, WorkerId
from jdisagg.core.tiers import DropPages, InsertPages, MovePages
from jdisagg.core.worker_config import WorkerConfig
from jdisagg.serve.executors import Executors, RemoteWorkers
from jdisagg.serve.health_monitor import HealthMonitor
from jdisagg.serve.reshaping import Reshaper
from jdisagg.serve.timers import Timers

log = logging.getLogger("jdisagg.driver")


class ReshapingDriver(Protocol):
    """What changes of machines need of a driver."""

    executors: Executors

    def post(self, actor: WorkerId, item: Reshaped) -> None: ...

    def call(self, act: Callable[[], None]) -> None: ...

    def give_up(self, worker: WorkerId) -> None: ...


class Reshaping:
    """Machines that are made anew, each on a thread of its own."""

    def __init__(
        self, driver: ReshapingDriver, reshaper: Reshaper | None, stood: Callable[[WorkerStands], None]
    ) -> None:
        self._driver, self._reshaper, self.stood = driver, reshaper, stood

    def begin(self, worker: WorkerId, config: WorkerConfig) -> None:
        if self._reshaper is None:
            machine = self._driver.executors.by_worker[worker]
            why = "" if config == machine.config else "machines cannot be made anew here"
            self._driver.post(worker, Reshaped(machine.config, why))
            return
        args = (self._reshaper, worker, config)
        threading.Thread(target=self._run, args=args, name=f"reshape-{worker}", daemon=True).start()

    def _run(self, reshaper: Reshaper, worker: WorkerId, config: WorkerConfig) -> None:
        """A machine that can neither become another nor be what it was is lost."""
        try:
            config, why = reshaper.reshape(worker, config, self._driver.call)
            self._driver.post(worker, Reshaped(config, why))
        except Exception:
            log.exception("%s is lost: its machine could not be made anew", worker)
            self._driver.give_up(worker)


class LiveEffects:
    """Messages for actors of this process and tokens for clients are kept until the driver comes for them."""

    def __init__(
        self,
        here: Container[WorkerId],
        executors: Executors,
        health: HealthMonitor,
        remote: RemoteWorkers | None,
        reshaping: Reshaping,
    ) -> None:
        """here: the actors of this process; what is for another goes by way of `remote`."""
        self.mail: deque[tuple[WorkerId, Event]] = deque()
        self.told: list[tuple[RequestId, Outcome]] = []
        self.timers = Timers()
        self._here, self._executors, self._health, self._remote = here, executors, health, remote
        self._reshaping = reshaping

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

    def move_pages(self, actor: WorkerId, effect: MovePages) -> None:
        self._executors.tiers.begin(actor, effect.move)

    def insert_pages(self, actor: WorkerId, effect: InsertPages) -> None:
        self._executors.insert_pages(actor, effect.move)

    def drop_pages(self, actor: WorkerId, effect: DropPages) -> None:
        self._executors.tiers.drop(actor, effect.move)

    def emit(self, actor: WorkerId, effect: EmitTokens) -> None:
        self.told.append((effect.request_id, effect))

    def finish(self, actor: WorkerId, effect: Finish) -> None:
        self.told.append((effect.request_id, effect))

    def reject(self, actor: WorkerId, effect: Reject) -> None:
        self.told.append((effect.request_id, effect))

    def reshape(self, actor: WorkerId, effect: Reshape) -> None:
        self._reshaping.begin(actor, effect.config)

    def stands(self, actor: WorkerId, effect: WorkerStands) -> None:
        self._reshaping.stood(effect)
