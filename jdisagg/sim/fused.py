"""A cluster whose engines fuse: the prompts' chunk and the decode step that are both due run as one step.

This is a property of the engine that is modelled (vLLM with chunked prefill, Sarathi-Serve), not of ours, which runs a
chunk and a step one after the other. A plan waits until its device is free and everything that happens at that instant
has happened; then what waits there, one chunk plan and one step at most, starts together and ends together.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jdisagg.core.errors import ConfigError
from jdisagg.core.events import DecodeDone, PrefillDone, RunDecode, RunPrefill
from jdisagg.core.plans import DecodePlan
from jdisagg.core.request import WorkerId
from jdisagg.core.worker_config import WorkerConfig
from jdisagg.sim.cluster import NETWORK, TOKEN, Cluster
from jdisagg.sim.cluster_spec import ClusterSpec
from jdisagg.sim.cost_models import CostModel, FusedCostModel
from jdisagg.sim.shared import SharedCluster

LAST = 1 << 60  # in the order of one instant: after all that is counted


@dataclass(frozen=True, slots=True)
class StepDue:
    """The worker's device is free: what waits may start."""

    worker: WorkerId


class FusedCluster(Cluster):
    """As `Cluster`; every worker's costs know a fused step, and workers dispatch nothing ahead."""

    def __init__(self, workers: Sequence[WorkerConfig], costs: Mapping[WorkerId, CostModel], *rest: Any, **named: Any):
        """Raises ConfigError for costs without fused steps, for pipelines, and for plans dispatched ahead."""
        super().__init__(workers, costs, *rest, **named)
        self._chunks: dict[WorkerId, RunPrefill] = {}
        self._steps: dict[WorkerId, DecodePlan] = {}
        self._busy_until_s = dict.fromkeys(self.workers, 0.0)
        for config in workers:
            _check(config, costs[config.worker])

    def _run_prefill(self, actor: WorkerId, effect: RunPrefill) -> None:
        assert actor not in self._chunks, f"{actor} has a chunk plan that waits"
        self._chunks[actor] = effect
        self._due(actor)

    def _run_decode(self, actor: WorkerId, effect: RunDecode) -> None:
        assert actor not in self._steps, f"{actor} has a step that waits"
        self._steps[actor] = effect.plan
        self._due(actor)

    def _due(self, actor: WorkerId) -> None:
        at_s = max(self.now_s, self._busy_until_s[actor])
        heapq.heappush(self._heap, (at_s, LAST + next(self._ties), NETWORK, StepDue(actor)))

    def _network(self, event: Any) -> None:
        if isinstance(event, StepDue):
            self._start(event.worker)
        else:
            super()._network(event)

    def _start(self, actor: WorkerId) -> None:
        chunk, step = self._chunks.pop(actor, None), self._steps.pop(actor, None)
        cost, device = self.costs[actor], self.devices[actor]
        assert isinstance(cost, FusedCostModel), "checked when the cluster was made"
        context_tokens = device.read_tokens(step) if step else 0
        if chunk and step:
            seconds = cost.fused_s(chunk.plan, step, context_tokens)
        elif chunk:
            seconds = cost.prefill_s(chunk.plan)
        elif step:
            seconds = cost.decode_s(step, context_tokens)
        else:
            return  # it started with what came at the same instant
        span = device.run(self.now_s, seconds)
        self._busy_until_s[actor] = span.done_s
        if chunk:  # first: what it finishes takes part in the next step
            self._at_layers(actor, chunk.ships, span)
            sampled = tuple((each.request_id, TOKEN) for each in chunk.plan.chunks if each.last)
            self._at(span.done_s, actor, PrefillDone(chunk.plan.plan_id, sampled))
        if step:
            self._at(span.done_s, actor, DecodeDone(step.plan_id, tuple((slot, TOKEN) for slot in step.active)))


def _check(config: WorkerConfig, cost: CostModel) -> None:
    if not isinstance(cost, FusedCostModel):
        raise ConfigError(f"{config.worker}: {type(cost).__name__} has no price for a fused step")
    ahead = config.num_microbatches, config.steps_in_flight, config.chunks_in_flight
    if ahead != (1, 1, 1):
        raise ConfigError(f"{config.worker}: fused steps take one stage, step and chunk plan at a time, not {ahead}")


def simulated(given: ClusterSpec, **named: Any) -> Cluster:
    """The cluster of a spec, of the kind that its engines and devices are; `named` is what `Cluster` takes
    besides.
    """
    named = {"message_s": given.message_s, "latency_s": given.latency_s, **named}
    if given.slowdown:
        return SharedCluster(given.workers, given.costs, given.links, slowdown=given.slowdown, **named)
    kind = FusedCluster if given.fused_steps else Cluster
    return kind(given.workers, given.costs, given.links, **named)
