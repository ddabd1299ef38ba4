"""A simulated cluster whose workers change roles, by an autoscaler or on command, with the costs of each change.

A worker leaves its role as in serving: it finishes its requests, or what is left moves to other workers after
`drain_s`. Then its weights are resharded and its programs prepared, which takes `reshape_s`, and it joins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from jdisagg.core.errors import ConfigError
from jdisagg.core.events import (
    ROUTER,
    ChangeRole,
    EmitTokens,
    Event,
    Finish,
    Reject,
    Reshape,
    Reshaped,
    Send,
    TimerFired,
    WorkerStands,
)
from jdisagg.core.request import WorkerId
from jdisagg.core.worker_config import Role, WorkerConfig
from jdisagg.policy.scaling import ALL_ROLES, LOOK_S, Flip, Load, RoleScaler, RolesOf, Scaling
from jdisagg.policy.worker.drain import WorkerStatus
from jdisagg.sim.cluster import Cluster
from jdisagg.sim.cluster_spec import ClusterSpec
from jdisagg.sim.device import Device
from jdisagg.sim.traces import Trace

AUTOSCALER = WorkerId("autoscaler")
ENDS = (WorkerStatus.LEAVING.value, WorkerStatus.SERVING.value)


@dataclass(frozen=True, slots=True)
class FlipCosts:
    """The seconds of a role change: the drain until requests are moved away, and the reshard of the worker."""

    drain_s: float = 10.0
    reshape_s: float = 5.0


@dataclass(frozen=True, slots=True)
class ScalingSnapshot:
    """The autoscaler's observation and decisions at one evaluation."""

    at_s: float
    load: Load | None
    prefills: int
    decodes: int
    flips: tuple[Flip, ...]


def same_sizes(config: WorkerConfig, role: Role) -> WorkerConfig:
    """Returns the worker's configuration in another role, with the same devices and number of pages."""
    return replace(config, role=role)


def keeps_role(worker: WorkerId) -> frozenset[Role]:
    """Returns no other role: the autoscaler still computes the roles that the load asks for."""
    return frozenset()


class ScaledCluster(Cluster):
    """A cluster with role changes. `scaling` None: roles change only by `flip`. `becomes`: a worker's configuration in
    another role. `can_be`: the roles that a worker may take."""

    def __init__(
        self,
        workers: Sequence[WorkerConfig],
        *rest: Any,
        scaling: Scaling | None,
        flip_costs: FlipCosts,
        becomes: Callable[[WorkerConfig, Role], WorkerConfig] = same_sizes,
        can_be: RolesOf = lambda worker: ALL_ROLES,
        **named: Any,
    ) -> None:
        super().__init__(workers, *rest, **named)
        self.flip_costs, self.becomes = flip_costs, becomes
        self.scaler = None if scaling is None else RoleScaler(scaling, workers, can_be)
        self.looks: list[ScalingSnapshot] = []
        self.away_s: dict[WorkerId, list[float]] = {}  # times of each change: requested, returned
        self._numbers = count(1)

    def _run(self, trace: Trace, *args: Any, **named: Any) -> None:
        if self.scaler is not None:
            self._queue.set_timer(LOOK_S, AUTOSCALER, "look")
        super()._run(trace, *args, **named)

    def flip(self, worker: WorkerId, role: Role) -> None:
        """Changes the worker's role now, as an operator would."""
        config = self.becomes(self.workers[worker].config, role)
        self._at(self.now_s, ROUTER, ChangeRole(worker, next(self._numbers), config, self.flip_costs.drain_s))

    def _deliver(self, actor: WorkerId, event: Event) -> None:
        if actor == AUTOSCALER:
            self._look(event)
            return
        self._observe(actor, event)
        super()._deliver(actor, event)

    def _observe(self, actor: WorkerId, item: Any) -> None:
        if self.scaler is not None:
            self.scaler.observe(actor, item, self.now_s)

    def send(self, actor: WorkerId, effect: Send) -> None:
        self._observe(actor, effect)
        super().send(actor, effect)

    def emit(self, actor: WorkerId, effect: EmitTokens) -> None:
        self._observe(actor, effect)
        super().emit(actor, effect)

    def finish(self, actor: WorkerId, effect: Finish) -> None:
        self._observe(actor, effect)
        super().finish(actor, effect)

    def reject(self, actor: WorkerId, effect: Reject) -> None:
        self._observe(actor, effect)
        super().reject(actor, effect)

    def _look(self, event: Event) -> None:
        assert self.scaler is not None and isinstance(event, TimerFired), event
        flips = self.scaler.look(self.now_s)
        roles = [each.role for each in self.scaler.configs.values()]
        counts = sum(role.prefills for role in roles), sum(role.decodes for role in roles)
        self.looks.append(ScalingSnapshot(self.now_s, self.scaler.load, *counts, tuple(flips)))
        for flip in flips:
            self.flip(flip.worker, flip.role)
        self._queue.set_timer(self.now_s + LOOK_S, AUTOSCALER, "look")

    def stands(self, actor: WorkerId, effect: WorkerStands) -> None:
        self._observe(actor, effect)
        if effect.standing in ENDS and not effect.refused:
            self.away_s.setdefault(effect.worker, []).append(self.now_s)

    def reshape(self, actor: WorkerId, effect: Reshape) -> None:
        """Starts the worker's new devices; its old programs are dropped."""
        self.devices[actor] = Device(effect.config)
        self._steps.foreseen.pop(actor, None)
        self._at(self.now_s + self.flip_costs.reshape_s, actor, Reshaped(effect.config))


def scaled(given: ClusterSpec, scaling: Scaling, costs: FlipCosts, *, flips: bool, **named: Any) -> ScaledCluster:
    """Returns the cluster of a spec with an autoscaler, which changes roles or only reports. Raises ConfigError for
    workers whose costs in another role are unknown."""
    if given.slowdown or given.tiers is not None:
        raise ConfigError("--autoscale: neither shared cores nor tiers are simulated beside it: leave out one")
    cuts = {config.worker: (config.num_microbatches, config.num_pages) for config in given.workers}
    if flips and len(set(cuts.values())) > 1:
        (first, first_size), (second, second_size) = sorted(cuts.items(), key=lambda each: each[1])[:: len(cuts) - 1]
        sizes = f"{first} has {first_size[0]} stages and {first_size[1]} pages"
        sizes += f", {second} {second_size[0]} and {second_size[1]}"
        raise ConfigError(f"--autoscale=flip: {sizes}; give all workers of --mesh as many devices, without pp")
    options: dict[str, Any] = {"can_be": (lambda worker: ALL_ROLES) if flips else keeps_role}
    if given.in_role is not None:
        options["becomes"] = given.in_role
    named = {"message_s": given.message_s, "latency_s": given.latency_s, **options, **named}
    return ScaledCluster(given.workers, given.costs, given.links, scaling=scaling, flip_costs=costs, **named)


def flips_of(cluster: ScaledCluster) -> list[tuple[float, Flip]]:
    """Returns the requested role changes with their times."""
    return [(look.at_s, flip) for look in cluster.looks for flip in look.flips]


def describe_scaling(cluster: ScaledCluster) -> str:
    """Returns a sentence about the autoscaler's role changes and the workers it asks for at the end."""
    assert cluster.scaler is not None
    flips_made, wanted = flips_of(cluster), cluster.scaler.autoscaler.desired()
    flips = ", ".join(f"{flip.worker} to {flip.role} at {at_s:,.0f} s" for at_s, flip in flips_made[:8])
    more = f" and {len(flips_made) - 8} more" * (len(flips_made) > 8)
    total = "" if wanted is None else f"; the load asks for {wanted.prefill} prefill and {wanted.decode} decode workers"
    return f"autoscaler: {len(flips_made)} flips" + (f" ({flips}{more})" if flips_made else "") + total
