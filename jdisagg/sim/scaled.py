"""A cluster whose workers change their roles: by an autoscaler, or when they are told; each flip costs what it costs.

A worker leaves as live: it ends what it has, or what is left goes elsewhere after `drain_s`; then its weights are cut
anew and programs are made ready, which takes `reshape_s`, and it joins.
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
    """Seconds: until what runs there is taken elsewhere, and of the machine's change."""

    drain_s: float = 10.0
    reshape_s: float = 5.0


@dataclass(frozen=True, slots=True)
class Look:
    """What the autoscaler saw at one look, and what it asked for."""

    at_s: float
    load: Load | None
    prefills: int
    decodes: int
    flips: tuple[Flip, ...]


def same_sizes(config: WorkerConfig, role: Role) -> WorkerConfig:
    """The worker in another role, on the same devices with as many pages."""
    return replace(config, role=role)


def nothing_else(worker: WorkerId) -> frozenset[Role]:
    """Of workers that keep their roles: what the load asks for is told all the same."""
    return frozenset()


class ScaledCluster(Cluster):
    """`scaling` None: roles change only by `flip`. `becomes`: a worker's sizes in another role; `can_be`: which those
    are."""

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
        self.looks: list[Look] = []
        self.away_s: dict[WorkerId, list[float]] = {}  # of each change: when it was asked for, and when it joined
        self._numbers = count(1)

    def _run(self, trace: Trace, *args: Any, **named: Any) -> None:
        if self.scaler is not None:
            self._queue.set_timer(LOOK_S, AUTOSCALER, "look")
        super()._run(trace, *args, **named)

    def flip(self, worker: WorkerId, role: Role) -> None:
        """Now, as an operator would."""
        config = self.becomes(self.workers[worker].config, role)
        self._at(self.now_s, ROUTER, ChangeRole(worker, next(self._numbers), config, self.flip_costs.drain_s))

    # ------------------------------------------------------------ what the autoscaler observes

    def _deliver(self, actor: WorkerId, event: Event) -> None:
        if actor == AUTOSCALER:
            self._look(event)
            return
        self._observed(actor, event)
        super()._deliver(actor, event)

    def _observed(self, actor: WorkerId, item: Any) -> None:
        if self.scaler is not None:
            self.scaler.observe(actor, item, self.now_s)

    def send(self, actor: WorkerId, effect: Send) -> None:
        self._observed(actor, effect)
        super().send(actor, effect)

    def emit(self, actor: WorkerId, effect: EmitTokens) -> None:
        self._observed(actor, effect)
        super().emit(actor, effect)

    def finish(self, actor: WorkerId, effect: Finish) -> None:
        self._observed(actor, effect)
        super().finish(actor, effect)

    def reject(self, actor: WorkerId, effect: Reject) -> None:
        self._observed(actor, effect)
        super().reject(actor, effect)

    def _look(self, event: Event) -> None:
        assert self.scaler is not None and isinstance(event, TimerFired), event
        flips = self.scaler.look(self.now_s)
        roles = [each.role for each in self.scaler.configs.values()]
        counts = sum(role.prefills for role in roles), sum(role.decodes for role in roles)
        self.looks.append(Look(self.now_s, self.scaler.load, *counts, tuple(flips)))
        for flip in flips:
            self.flip(flip.worker, flip.role)
        self._queue.set_timer(self.now_s + LOOK_S, AUTOSCALER, "look")

    # ------------------------------------------------------------ what a flip costs

    def stands(self, actor: WorkerId, effect: WorkerStands) -> None:
        self._observed(actor, effect)
        if effect.standing in ENDS and not effect.refused:
            self.away_s.setdefault(effect.worker, []).append(self.now_s)

    def reshape(self, actor: WorkerId, effect: Reshape) -> None:
        """Its devices are others from now on; programs that it had are of no use."""
        self.devices[actor] = Device(effect.config)
        self._steps.foreseen.pop(actor, None)
        self._at(self.now_s + self.flip_costs.reshape_s, actor, Reshaped(effect.config))


def scaled(given: ClusterSpec, scaling: Scaling, costs: FlipCosts, *, flips: bool, **named: Any) -> ScaledCluster:
    """The cluster of a spec with an autoscaler, which flips workers or only tells. Raises ConfigError for workers whose
    prices in another role nobody knows."""
    if given.slowdown or given.tiers is not None:
        raise ConfigError("--autoscale: neither shared cores nor tiers are simulated beside it: leave out one")
    cuts = {config.worker: (config.num_microbatches, config.num_pages) for config in given.workers}
    if flips and len(set(cuts.values())) > 1:
        (one, mine), (other, theirs) = sorted(cuts.items(), key=lambda each: each[1])[:: len(cuts) - 1]
        sizes = f"{one} has {mine[0]} stages and {mine[1]} pages, {other} {theirs[0]} and {theirs[1]}"
        raise ConfigError(f"--autoscale=flip: {sizes}; give all workers of --mesh as many devices, without pp")
    told: dict[str, Any] = {"can_be": (lambda worker: ALL_ROLES) if flips else nothing_else}
    if given.in_role is not None:
        told["becomes"] = given.in_role
    named = {"message_s": given.message_s, "latency_s": given.latency_s, **told, **named}
    return ScaledCluster(given.workers, given.costs, given.links, scaling=scaling, flip_costs=costs, **named)


def flips_of(cluster: ScaledCluster) -> list[tuple[float, Flip]]:
    """What was asked for, and when."""
    return [(look.at_s, flip) for look in cluster.looks for flip in look.flips]


def scaling_told(cluster: ScaledCluster) -> str:
    """What the autoscaler did, and what it would have at the end."""
    assert cluster.scaler is not None
    asked, wanted = flips_of(cluster), cluster.scaler.autoscaler.desired()
    flips = ", ".join(f"{flip.worker} to {flip.role} at {at_s:,.0f} s" for at_s, flip in asked[:8])
    more = f" and {len(asked) - 8} more" * (len(asked) > 8)
    total = "" if wanted is None else f"; the load asks for {wanted.prefill} prefill and {wanted.decode} decode workers"
    return f"autoscaler: {len(asked)} flips" + (f" ({flips}{more})" if asked else "") + total
