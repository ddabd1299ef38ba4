"""A cluster that loses workers, and gets them back: what a failure costs those who ask.

As live: a worker is gone with all that it held and said no more; until that is noticed it is sent what it would have
been; then what ran there goes on elsewhere, from the prompt and what is drawn so far; and after some time a worker of
its name, empty, joins in its place.
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
from jdisagg.sim.links import NETWORK, PartPacked
from jdisagg.sim.traces import Trace

REPAIR = WorkerId("repair")


@dataclass(frozen=True, slots=True)
class Failures:
    """When who is lost, and the seconds until that is noticed, and from then until another takes its place."""

    losses: Sequence[tuple[float, WorkerId]]
    noticed_s: float = 5.0
    back_s: float = 300.0


def drawn_losses(
    workers: Sequence[WorkerConfig], mean_s: float, span_s: float, seed: int
) -> list[tuple[float, WorkerId]]:
    """Each worker is lost about once in `mean_s`, at times that are independent of each other, in order."""
    random = np.random.default_rng(seed)
    found = list[tuple[float, WorkerId]]()
    for config in workers:
        count = int(random.poisson(span_s / mean_s))
        found += [(float(at_s), config.worker) for at_s in random.uniform(0.0, span_s, count)]
    return sorted(found)


class FailingCluster(Cluster):
    """`lost`: who was, and when. A worker that is away already is not lost again."""

    def __init__(
        self,
        workers: Sequence[WorkerConfig],
        *rest: Any,
        failures: Failures,
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
            self._catch_up(name, self.now_s)  # what ended before has been told
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
    return isinstance(event, PartPacked) and event.transfer.source == worker


def failing(given: ClusterSpec, failures: Failures, **named: Any) -> FailingCluster:
    """The cluster of a spec, with losses. Raises ConfigError where what is lost with a worker is not simulated."""
    if given.slowdown or given.tiers is not None:
        raise ConfigError("--lost_every_s: neither shared cores nor tiers are simulated beside it: leave out one")
    named = {"message_s": given.message_s, "latency_s": given.latency_s, **named}
    return FailingCluster(given.workers, given.costs, given.links, failures=failures, **named)


def losses_told(cluster: FailingCluster) -> str:
    """Who was lost, and when."""
    told = ", ".join(f"{name} at {at_s:,.0f} s" for at_s, name in cluster.lost[:8])
    more = f" and {len(cluster.lost) - 8} more" * (len(cluster.lost) > 8)
    return f"failures: {len(cluster.lost)} workers were lost" + (f" ({told}{more})" if told else "")
