"""Runs the autoscaler beside the router's driver: it observes events and posts role changes every few seconds.

With --autoscale=watch it changes no role. The metrics show the replicas that it asks for, to external scalers.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from itertools import count
from typing import Protocol

from jdisagg.core.errors import ConfigError
from jdisagg.core.events import ROUTER, ChangeRole
from jdisagg.core.request import WorkerId
from jdisagg.core.worker_config import Role, WorkerConfig
from jdisagg.policy.scaling import LOOK_S, Flip, RoleScaler, Scaling
from jdisagg.serve.deploy.deployment import WorkerShapes

log = logging.getLogger("jdisagg.autoscaler")

OFF, WATCH, FLIP = "off", "watch", "flip"


class ScaledDriver(Protocol):
    """The part of a driver that autoscaling uses."""

    def now_s(self) -> float: ...

    def post(self, actor: WorkerId, item: ChangeRole) -> None: ...

    def call(self, act: Callable[[], None]) -> None: ...


class Autoscaling:
    """Changes roles of workers at intervals of `look_s` seconds, as `RoleScaler` decides.

    `shapes` returns the roles and shapes that each worker can have; if empty, no role changes. `drain_s` is the time
    that running sequences have to finish before their worker changes its role.
    """

    def __init__(
        self,
        scaling: Scaling,
        workers: Iterable[WorkerConfig],
        shapes: Callable[[], Mapping[WorkerId, WorkerShapes]] = dict,
        drain_s: float = 30.0,
        look_s: float = LOOK_S,
    ) -> None:
        self.scaler = RoleScaler(scaling, workers, self._can_be)
        self._shapes, self._drain_s, self._look_s = shapes, drain_s, look_s
        self._numbers = count(-1, -1)  # below 0; numbers of an operator's changes are above 0
        self._stopped = threading.Event()

    def start(self, driver: ScaledDriver) -> None:
        threading.Thread(target=self._run, args=(driver,), name="autoscaler", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def _run(self, driver: ScaledDriver) -> None:
        while not self._stopped.wait(self._look_s):
            try:
                driver.call(lambda: self.look(driver))
            except RuntimeError:
                return  # the driver has stopped

    def look(self, driver: ScaledDriver) -> None:
        """Posts the role changes that are due. Called on the driver's thread."""
        for flip in self.scaler.look(driver.now_s()):
            config = self._config(flip)
            assert config is not None, f"{flip} is no shape of the worker"
            log.warning("%s is to become %s: %s", flip.worker, flip.role, flip.why)
            driver.post(ROUTER, ChangeRole(flip.worker, next(self._numbers), config, self._drain_s))

    def _can_be(self, worker: WorkerId) -> frozenset[Role]:
        return frozenset(role for role in Role if self._config(Flip(worker, role)) is not None)

    def _config(self, flip: Flip) -> WorkerConfig | None:
        shapes = self._shapes().get(flip.worker)
        try:
            return None if shapes is None else shapes.find(flip.role, "").config
        except (ConfigError, KeyError):
            return None
