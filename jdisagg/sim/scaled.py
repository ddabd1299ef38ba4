"""A cluster whose workers change their roles: by an autoscaler, or when they are told; each flip costs what it costs.

A worker leaves as live: it ends what it has, or what is left goes elsewhere after `drain_s`; then its weights are cut
anew and programs are made ready, which takes `reshape_s`, and it joins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

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
from jdisagg.policy.autoscaler import Flip, Load, Scaling
from jdisagg.policy.role_change import Standing
from jdisagg.policy.role_scaler import LOOK_S, RoleScaler
from jdisagg.sim.cluster import Cluster
from jdisagg.sim.device import Device
from jdisagg.sim.traces import Trace

AUTOSCALER = WorkerId("autoscaler")
ENDS = (Standing.LEAVING.value, Standing.SERVING.value)


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


class ScaledCluster(Cluster):
    """`scaling` None: roles change only by `flip`. `becomes`: a worker's sizes in another role."""

    def __init__(
        self,
        workers: Sequence[WorkerConfig],
        *rest: Any,
        scaling: Scaling | None,
        flip_costs: FlipCosts,
        becomes: Callable[[WorkerConfig, Role], WorkerConfig] = same_sizes,
        **named: Any,
    ) -> None:
        super().__init__(workers, *rest, **named)
        self.flip_costs, self.becomes = flip_costs, becomes
        self.scaler = None if scaling is None else RoleScaler(scaling, workers)
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
