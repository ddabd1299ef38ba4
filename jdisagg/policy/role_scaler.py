"""The autoscaler with what it looks at: an observer of the router's driver that says, when asked, who is to flip.

Live serving and the simulator give it every event and effect, ask it every `LOOK_S`, and bring its flips to the router
as an operator's changes of role. It knows who serves by what the router says of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jdisagg.core.events import ROUTER, Received, WorkerJoined, WorkerLost, WorkerStands
from jdisagg.core.messages import Joined
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
        self._away: set[WorkerId] = set()
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
                self._stands(item)
            case WorkerJoined(config) | Received(_, Joined(config=config)):
                self._away.discard(config.worker)
            case WorkerLost(worker):
                self._away.discard(worker)
                self.autoscaler.ended(worker, well=True)
            case _:
                pass

    def _stands(self, told: WorkerStands) -> None:
        if told.standing and told.standing != Standing.SERVING:
            self._away.add(told.worker)
            return
        self._away.discard(told.worker)
        self.autoscaler.ended(told.worker, well=not told.refused)

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
