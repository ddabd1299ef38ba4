"""A simulated cluster that loses workers and gets them back: the cost of a failure for its requests.

As in serving, a lost worker is gone with its state and sends nothing more. Until the loss is noticed, messages to it
are lost. Then its requests continue elsewhere from the prompt and the tokens generated so far. Later an empty worker
of the same name joins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jdisagg.core.errors import ConfigError
from jdisagg.core.events import ROUTER, Event, TimerFired, WorkerJoined, WorkerLost
from jdisagg.core.request import WorkerId
from jdisagg.core.router_config import RouterConfig
from jdisagg.core.worker_config import WorkerConfig
from jdisagg.policy.worker.worker import Worker
from jdisagg.sim.cluster import PATIENT, Cluster
from jdisagg.sim.cluster_spec import ClusterSpec
from jdisagg.sim.device import Device
from jdisagg.sim.links import NETWORK, PartPackedEvent
from jdisagg.sim.traces import Trace

REPAIR = WorkerId("repair")


@dataclass(frozen=True, slots=True)
class LossSchedule:
    """The times and workers of losses, the seconds until a loss is noticed, and from then until the worker returns."""

    losses: Sequence[tuple[float, WorkerId]]
    noticed_s: float = 5.0
    back_s: float = 300.0


def drawn_losses(
    workers: Sequence[WorkerConfig], mean_s: float, span_s: float, seed: int
) -> list[tuple[float, WorkerId]]:
    """Draws independent loss times, about one per worker in `mean_s`, in order of time."""
    random = np.random.default_rng(seed)
    losses = list[tuple[float, WorkerId]]()
    for config in workers:
        count = int(random.poisson(span_s / mean_s))
        losses += [(float(at_s), config.worker) for at_s in random.uniform(0.0, span_s, count)]
    return sorted(losses)


class FailingCluster(Cluster):
    """A cluster with losses. `lost`: times and names of lost workers. A worker that is away is not lost again."""

    def __init__(
        self,
        workers: Sequence[WorkerConfig],
        *rest: Any,
        failures: LossSchedule,
        router: RouterConfig = PATIENT,
        **named: Any,
    ) -> None:
        super().__init__(workers, *rest, router=replace(router, workers_return=True), **named)
        self.failures, self.configs = failures, {config.worker: config for config in workers}
        self.lost: list[tuple[float, WorkerId]] = []

    def _run(self, trace: Trace, *args: Any, **named: Any) -> None:
        for index, (at_s, _) in enumerate(self.failures.losses):
            self._queue.set_timer(at_s, REPAIR, f"lose/{index}")
        super()._run(trace, *args, **named)

    def _deliver(self, actor: WorkerId, event: Event) -> None:
        if actor == REPAIR:
            assert isinstance(event, TimerFired), event
            self._repair(*event.key.split("/"))
        elif actor == ROUTER or actor in self.workers:
            super()._deliver(actor, event)

    def _repair(self, what: str, name: str) -> None:
        if what == "lose":
            self._lose(self.failures.losses[int(name)][1])
        elif what == "notice":
            self._deliver(ROUTER, WorkerLost(WorkerId(name)))
            self._queue.set_timer(self.now_s + self.failures.back_s, REPAIR, f"join/{name}")
        else:
            config = self.configs[WorkerId(name)]
            self.workers[config.worker] = Worker(config)
            self._deliver(ROUTER, WorkerJoined(config))

    def _lose(self, name: WorkerId) -> None:
        if name not in self.workers:
            return
        if name in self._steps.foreseen:
            self._catch_up(name, self.now_s)  # earlier step ends have been delivered
        del self.workers[name]
        self._steps.forget(name)
        self._held.forget(name)
        busy_s = self.devices[name].pipeline.busy_s
        self.devices[name] = Device(self.configs[name])
        self.devices[name].pipeline.busy_s = busy_s
        self._queue.forget(lambda actor, event: actor == name or (actor == NETWORK and _is_from(event, name)))
        due = self.network.lose(name, self.now_s)
        if due is not None:
            self._at(due[0], NETWORK, due[1])
        self.lost.append((self.now_s, name))
        self._queue.set_timer(self.now_s + self.failures.noticed_s, REPAIR, f"notice/{name}")


def _is_from(event: Any, worker: WorkerId) -> bool:
    return isinstance(event, PartPackedEvent) and event.transfer.source == worker


def failing(given: ClusterSpec, failures: LossSchedule, **named: Any) -> FailingCluster:
    """Returns the cluster of a spec with losses. Raises ConfigError for shared cores or tiers, which are not
    simulated.
    """
    if given.slowdown or given.tiers is not None:
        raise ConfigError("--lost_every_s: neither shared cores nor tiers are simulated beside it: leave out one")
    named = {"message_s": given.message_s, "latency_s": given.latency_s, **named}
    return FailingCluster(given.workers, given.costs, given.links, failures=failures, **named)


def describe_losses(cluster: FailingCluster) -> str:
    """Returns a sentence about the lost workers with their times."""
    names = ", ".join(f"{name} at {at_s:,.0f} s" for at_s, name in cluster.lost[:8])
    more = f" and {len(cluster.lost) - 8} more" * (len(cluster.lost) > 8)
    return f"failures: {len(cluster.lost)} workers were lost" + (f" ({names}{more})" if names else "")
