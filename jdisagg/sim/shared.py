"""A cluster whose devices share one machine's cores and memory: each running device slows the others.

A part of a plan that would take s seconds alone takes s x (1 + the sum of slowdown[its phase][theirs] over all other
running devices), updated whenever one starts or ends. This is the simplest rule that agrees with the measurements,
which are of one device beside one other; that several slowdowns add up is assumed. Every pipeline stage is a device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from jdisagg.core.errors import ConfigError
from jdisagg.core.events import RunStep, ShipKV
from jdisagg.core.profile import PHASES
from jdisagg.core.request import WorkerId
from jdisagg.core.steps import KVTransfer, StepPlan, last_layer
from jdisagg.core.worker_config import WorkerConfig
from jdisagg.sim.cluster import PATIENT, Cluster
from jdisagg.sim.cluster_spec import ONE_TOKEN, ClusterSpec
from jdisagg.sim.cost_models import CostModel, MixedCostModel
from jdisagg.sim.device import TimeSpan
from jdisagg.sim.links import NETWORK, PartPackedEvent
from jdisagg.sim.tiers import SimulatedTiers

PREFILL, DECODE = PHASES
Slowdown = Mapping[str, Mapping[str, float]]  # by phase, and the phase of another running device
Stage = tuple[WorkerId, int]


@dataclass(frozen=True, slots=True)
class PartDueEvent:
    """An event: a device may have finished its part; it is ignored if the cores' state has changed since."""

    version: int


@dataclass(slots=True, eq=False)
class RunningPlan:
    """A plan's way through stages: `parts` are (stage, seconds alone); `on_progress` is called at each end."""

    phase: str
    parts: Sequence[tuple[Stage, float]]
    on_progress: Callable[[RunningPlan], None]
    after: RunningPlan | None = None  # job that must end before this one starts
    done: int = 0
    began_s: float = 0.0
    left_s: float = 0.0  # of the current part, if alone
    rate: float = 1.0  # seconds of the part per second
    end_s: float = 0.0  # of the current part, if nothing changes

    @property
    def is_ended(self) -> bool:
        return self.done == len(self.parts)


class CoreScheduler:
    """Devices that run their parts in order, and the rates of all running parts."""

    def __init__(self, slowdown: Slowdown) -> None:
        self.slowdown = slowdown
        self.running: dict[Stage, RunningPlan] = {}
        self._queues: dict[Stage, deque[RunningPlan]] = {}
        self._since_s = 0.0

    def add(self, job: RunningPlan, now_s: float) -> None:
        self._queue(job)
        self._share(now_s)

    def finish(self, now_s: float) -> None:
        """Ends the parts that are due and starts those that waited for them."""
        self._pass(now_s)
        for stage, job in [*self.running.items()]:
            if job.end_s <= now_s:
                del self.running[stage]
                job.done += 1
                if not job.is_ended:
                    self._queue(job, at_head=job.parts[job.done][0] == stage)
                job.on_progress(job)
        self._share(now_s)

    @property
    def next_end_s(self) -> float | None:
        return min((job.end_s for job in self.running.values()), default=None)

    def _queue(self, job: RunningPlan, at_head: bool = False) -> None:
        queue = self._queues.setdefault(job.parts[job.done][0], deque())
        (queue.appendleft if at_head else queue.append)(job)

    def _pass(self, now_s: float) -> None:
        for job in self.running.values():
            job.left_s = max(0.0, job.left_s - (now_s - self._since_s) * job.rate)
        self._since_s = now_s

    def _share(self, now_s: float) -> None:
        self._pass(now_s)
        for stage, queue in self._queues.items():
            if queue and stage not in self.running and (queue[0].after is None or queue[0].after.is_ended):
                job = self.running[stage] = queue.popleft()
                job.left_s, job.after = job.parts[job.done][1], None
                job.began_s = now_s if job.done == 0 else job.began_s
        for job in self.running.values():
            job.rate = 1.0 / (1.0 + sum(self._slowdown_by(job, other) for other in self.running.values()))
            job.end_s = now_s + job.left_s / job.rate

    def _slowdown_by(self, job: RunningPlan, other: RunningPlan) -> float:
        return 0.0 if job is other else self.slowdown.get(job.phase, {}).get(other.phase, 0.0)


class SharedCluster(Cluster):
    """A `Cluster` with all workers' stages on one machine."""

    def __init__(
        self, workers: Sequence[WorkerConfig], costs: Mapping[WorkerId, CostModel], *rest: Any, slowdown: Slowdown,
        **named: Any,
    ) -> None:  # fmt: skip
        super().__init__(workers, costs, *rest, **named)
        self.cores = CoreScheduler(slowdown)
        self._last_step: dict[tuple[WorkerId, int], RunningPlan] = {}
        self._versions = count(1)
        self._due_version = 0

    def _stages(self, actor: WorkerId, seconds: float) -> list[tuple[Stage, float]]:
        stages = self.workers[actor].config.pipeline_stages
        return [((actor, stage), seconds / stages) for stage in range(stages)]

    def _start(self, job: RunningPlan) -> None:
        self.cores.add(job, self.now_s)
        self._next_due()

    def _next_due(self) -> None:
        self._due_version = next(self._versions)
        due_s = self.cores.next_end_s
        if due_s is not None:
            self._at(due_s, NETWORK, PartDueEvent(self._due_version))

    def _network(self, event: Any) -> None:
        if not isinstance(event, PartDueEvent):
            super()._network(event)
        elif event.version == self._due_version:
            self.cores.finish(self.now_s)
            self._next_due()

    def _begin_step(self, actor: WorkerId, effect: RunStep) -> None:
        """Starts a step. A prefill worker without stages runs its layer groups one by one and sends each group's KV at
        its end."""
        plan, config = effect.plan, self.workers[actor].config
        seconds, unsent = (
            self.devices[actor].step_s(plan, self.costs[actor]),
            sorted(effect.ships, key=last_layer),
        )
        parts, ends = self._stages(actor, seconds), [stop for _, stop in config.layer_groups]
        if unsent and len(ends) > 1 and config.pipeline_stages == 1:
            parts = [((actor, 0), seconds / len(ends)) for _ in ends]

        def on_progress(job: RunningPlan) -> None:
            while unsent and (job.is_ended or last_layer(unsent[0]) <= ends[job.done - 1]):
                self._send_part(unsent.pop(0))
            if job.is_ended:
                self._ended(actor, plan, job)
                self._at(self.now_s, actor, self._stops.done(actor, plan))

        if plan.decode is None:
            self._start(RunningPlan(PREFILL, parts, on_progress))
            return
        previous = self._last_step.get((actor, plan.decode.microbatch))
        job = self._last_step[actor, plan.decode.microbatch] = RunningPlan(DECODE, parts, on_progress, previous)
        self._start(job)

    def ship(self, actor: WorkerId, effect: ShipKV) -> None:
        """Sends KV in program order, after the plans that the device already has."""
        stage, _ = self._stages(actor, 0.0)[-1]
        self._start(RunningPlan(PREFILL, [(stage, 0.0)], lambda _: self._send_part(effect.transfer)))

    def _send_part(self, transfer: KVTransfer) -> None:
        self._at(self.now_s, NETWORK, PartPackedEvent(transfer))

    def _ended(self, actor: WorkerId, plan: StepPlan, job: RunningPlan) -> None:
        self.devices[actor].pipeline.busy_s += (self.now_s - job.began_s) / len({stage for stage, _ in job.parts})
        self._note_step(actor, plan, TimeSpan(job.began_s, self.now_s))


def simulated(given: ClusterSpec, **named: Any) -> Cluster:
    """Returns the cluster of a spec; `named` are further arguments of `Cluster`. Raises ConfigError if a
    worker mixes steps and its costs do not know mixed steps."""
    for config in given.workers:
        cost = given.costs[config.worker]
        if config.mixed_steps and not isinstance(cost, MixedCostModel):
            raise ConfigError(f"{config.worker}: {type(cost).__name__} has no price for a mixed step")
    if given.tiers is not None:
        token_bytes = {worker: cost.transfer_bytes(ONE_TOKEN) for worker, cost in given.costs.items()}
        named["tiers"] = SimulatedTiers(given.tiers, given.workers, token_bytes)
    routed = {} if given.routing is None else {"router": replace(PATIENT, routing=given.routing)}
    named = {"message_s": given.message_s, "latency_s": given.latency_s, **routed, **named}
    if given.slowdown:
        return SharedCluster(given.workers, given.costs, given.links, slowdown=given.slowdown, **named)
    return Cluster(given.workers, given.costs, given.links, **named)
