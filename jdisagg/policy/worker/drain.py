"""Draining and role changes: a worker leaves, becomes empty, is rebuilt with a new configuration, and joins again.

The transition table holds for both sides. The router sends LEAVE and no new work. Running requests end, or are recalled
at a deadline and resume elsewhere. The worker reports when it holds nothing (EMPTY); its driver rebuilds it; then it
reports its new configuration (JOIN). Each change has a number (`life`), so that messages of an earlier change are void.

A worker that is being rebuilt holds nothing and refuses all requests. A router that took over in the meantime does not
know of the change: it is refused, and receives the new configuration as soon as the worker has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from jdisagg.core.errors import IllegalTransition
from jdisagg.core.events import Reshape
from jdisagg.core.messages import Joined, Leave, Left, Message, Refused, Reserve, StartPrefill
from jdisagg.core.request import WorkerId
from jdisagg.core.worker_config import Role, WorkerConfig
from jdisagg.policy.effect_buffer import EffectBuffer


class WorkerStatus(StrEnum):
    """The phase of a worker's life in the cluster."""

    SERVING = "serving"
    LEAVING = "leaving"  # it finishes what it has and gets no new work
    DRAINED = "drained"  # it holds nothing and gets no work until it receives a new configuration
    CHANGING = "changing"  # its weights are resharded and its programs compiled


class DrainSignal(StrEnum):
    LEAVE = "leave"
    EMPTY = "empty"
    CHANGE = "change"
    JOIN = "join"


DRAIN_TABLE: Mapping[tuple[WorkerStatus, DrainSignal], WorkerStatus] = MappingProxyType(
    {
        (WorkerStatus.SERVING, DrainSignal.LEAVE): WorkerStatus.LEAVING,
        (WorkerStatus.LEAVING, DrainSignal.EMPTY): WorkerStatus.DRAINED,
        (WorkerStatus.DRAINED, DrainSignal.LEAVE): WorkerStatus.LEAVING,  # a drained worker gets a new configuration
        (WorkerStatus.DRAINED, DrainSignal.CHANGE): WorkerStatus.CHANGING,
        (WorkerStatus.CHANGING, DrainSignal.JOIN): WorkerStatus.SERVING,
    }
)


def next_status(status: WorkerStatus, signal: DrainSignal) -> WorkerStatus:
    """Returns the status that follows, or raises IllegalTransition."""
    try:
        return DRAIN_TABLE[status, signal]
    except KeyError:
        raise IllegalTransition(f"a worker that is {status} cannot take {signal}") from None


@dataclass(slots=True)
class RoleTransition:
    """The router's side of one change. `target` None: the worker is only drained. Times are in driver seconds."""

    number: int  # of the request for it
    life: int
    target: WorkerConfig | None
    recall_s: float  # when requests that still run are moved elsewhere
    standing: WorkerStatus = WorkerStatus.SERVING

    def take(self, signal: DrainSignal) -> None:
        self.standing = next_status(self.standing, signal)


PHASES = MappingProxyType({Role.PREFILL: ("prefill",), Role.DECODE: ("decode",), Role.COLOCATED: ("prefill", "decode")})


def phases_of(roles: Iterable[Role]) -> set[str]:
    """Returns the phases that workers of these roles serve."""
    return {phase for role in roles for phase in PHASES[role]}


def why_not(worker: WorkerId, standings: dict[WorkerId, tuple[Role, WorkerStatus]]) -> str:
    """Returns why this worker cannot leave now; empty if it can. `standings`: those of all workers."""
    if worker not in standings:
        return f"there is no worker {worker}; there are {', '.join(sorted(standings))}"
    role, standing = standings[worker]
    if standing in (WorkerStatus.LEAVING, WorkerStatus.CHANGING):
        return f"{worker} is {standing} already"
    if standing is WorkerStatus.DRAINED:
        return ""
    serving = [each for name, (each, other) in standings.items() if name != worker and other is WorkerStatus.SERVING]
    missing = sorted(phases_of([role]) - phases_of(serving))
    return f"{worker} is the last worker for {' and '.join(missing)}" if missing else ""


class DrainState:
    """The status of one worker, and the change that it was last asked for."""

    def __init__(self) -> None:
        self.status = WorkerStatus.SERVING
        self._request = Leave(0)

    def on_leave(self, out: EffectBuffer, message: Leave, config: WorkerConfig) -> None:
        """Starts to drain. A repeated message is answered again, because the answer may have been lost."""
        if message.life != self._request.life:
            if self.status is not WorkerStatus.CHANGING:
                self.status, self._request = WorkerStatus.LEAVING, message
        elif self.status is WorkerStatus.DRAINED:
            out.tell_router(Left(message.life))
        elif self.status is WorkerStatus.SERVING:
            out.tell_router(Joined(message.life, config))

    def after_event(self, out: EffectBuffer, *, idle: bool) -> None:
        """Reports to the router and the driver once the leaving worker is idle."""
        if self.status is not WorkerStatus.LEAVING or not idle:
            return
        self._take(DrainSignal.EMPTY)
        out.tell_router(Left(self._request.life))
        if self._request.config is not None:
            self._take(DrainSignal.CHANGE)
            out.put(Reshape(self._request.config))

    def on_reshaped(self, out: EffectBuffer, config: WorkerConfig, why: str) -> None:
        self._take(DrainSignal.JOIN)
        out.tell_router(Joined(self._request.life, config, why))

    def refuse(self, out: EffectBuffer, message: Message) -> bool:
        """Refuses a request that reaches the worker while it is rebuilt; returns True if it did."""
        if self.status is not WorkerStatus.CHANGING:
            return False
        detail = "the worker's role is being changed"
        if isinstance(message, Reserve):
            out.tell_router(Refused(message.attempt, detail))
        elif isinstance(message, StartPrefill):
            out.abort(message.attempt, detail)
        return isinstance(message, Reserve | StartPrefill)

    @property
    def can_lend(self) -> bool:
        """True if other workers can read pages of this one now."""
        return self.status is not WorkerStatus.CHANGING

    def on_router_lost(self) -> None:
        """Stops draining: the next router sends LEAVE again if it wants to. A change under way goes on."""
        if self.status is not WorkerStatus.CHANGING:
            self.status = WorkerStatus.SERVING

    def _take(self, signal: DrainSignal) -> None:
        self.status = next_status(self.status, signal)
