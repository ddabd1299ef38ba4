"""The autoscaler with what it looks at: an observer of the router's driver that says, when asked, who is to flip.

Live serving and the simulator give it every event and effect, ask it every `LOOK_S`, and bring its flips to the router
as an operator's changes of role. It knows who serves by what the router says of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from jdisagg.core.events import ROUTER, WorkerJoined, WorkerLost, WorkerStands
from jdisagg.core.request import WorkerId
from jdisagg.core.worker_config import Role, WorkerConfig
from jdisagg.policy.autoscaler import Autoscaler, Flip, Load, Scaling, Standby
from jdisagg.policy.demand import Demand
from jdisagg.policy.role_change import Standing

LOOK_S = 5.0
ALL_ROLES = frozenset(Role)

RolesOf = Callable[[WorkerId], frozenset[Role]]


class RoleScaler:
    """`can_be` says which roles a worker can take; it is asked at each look."""

    def __init__(
        self, scaling: Scaling, workers: Iterable[WorkerConfig], can_be: RolesOf = lambda worker: ALL_ROLES
    ) -> None:
        scaling.check()
        self.scaling, self.autoscaler, self.demand = scaling, Autoscaler(scaling), Demand(workers)
        self.load: Load | None = None  # of the last look
        self._away: dict[WorkerId, float] = {}  # since when
        self._can_be = can_be

    @property
    def configs(self) -> Mapping[WorkerId, WorkerConfig]:
        """The workers that there are, as they are."""
        return self.demand.configs

    def observe(self, actor: WorkerId, item: Any, now_s: float) -> None:
        """Of the driver: an event or an effect."""
        if actor != ROUTER:
            return
        self.demand.observe(actor, item, now_s)
        match item:
            case WorkerStands():
                self._stands(item, now_s)
            case WorkerJoined(config):
                self._away.pop(config.worker, None)
            case WorkerLost(worker):
                self._away.pop(worker, None)
                self.autoscaler.ended(worker, well=True)
            case _:
                pass

    def _stands(self, told: WorkerStands, now_s: float) -> None:
        """Each change that ends well tells what one costs: from being asked for to serving again."""
        if told.standing and told.standing != Standing.SERVING:
            self._away.setdefault(told.worker, now_s)
            return
        left_s = self._away.pop(told.worker, None)
        self.autoscaler.ended(told.worker, well=not told.refused)
        if left_s is not None and not told.refused:
            self._learn_price(now_s - left_s)

    def _learn_price(self, seconds: float) -> None:
        """Half of what is known is the latest."""
        self.scaling = replace(self.scaling, price_s=(self.scaling.price_s + seconds) / 2)
        self.autoscaler.scaling = self.scaling

    def look(self, now_s: float) -> list[Flip]:
        """Flips to be asked for now; none before anything is known."""
        self.load = self.demand.load(now_s, self.scaling.price_s + self.scaling.steady_s)
        if self.load is None:
            return []
        work = self.demand.work()
        workers = {
            name: Standby(config.role, work[name], self._can_be(name))
            for name, config in self.configs.items()
            if name not in self._away
        }
        return self.autoscaler.look(self.load, workers, now_s)
