"""The worker's side of a change of its role: it says when it is empty, asks its driver for another machine, and joins.

While its machine is being changed it holds nothing and takes nothing. A router that took over meanwhile does not know:
it is refused, and told what the worker is as soon as it is that.
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

# How a worker changes its role: it leaves, is drained, is made anew, and joins again. A literal table, of both
# sides.
#
# The router says LEAVE and sends nothing more; what runs ends, or is recalled at a deadline and goes on
# elsewhere. The worker says EMPTY when nothing is left, is changed by its driver, and says what it is now: JOIN.
# Each change has a number (`life`), so that a word of an earlier one is void.


class WorkerStatus(StrEnum):
    """Where a worker stands."""

    SERVING = "serving"
    LEAVING = "leaving"  # it ends what it has, and is given nothing more
    DRAINED = "drained"  # it holds nothing, and is given nothing until it is asked to become something
    CHANGING = "changing"  # its weights are cut anew and its programs made ready


class DrainSignal(StrEnum):
    LEAVE = "leave"
    EMPTY = "empty"
    CHANGE = "change"
    JOIN = "join"


DRAIN_TABLE: Mapping[tuple[WorkerStatus, DrainSignal], WorkerStatus] = MappingProxyType(
    {
        (WorkerStatus.SERVING, DrainSignal.LEAVE): WorkerStatus.LEAVING,
        (WorkerStatus.LEAVING, DrainSignal.EMPTY): WorkerStatus.DRAINED,
        (
            WorkerStatus.DRAINED,
            DrainSignal.LEAVE,
        ): WorkerStatus.LEAVING,  # it was drained, and is to become something after all
        (WorkerStatus.DRAINED, DrainSignal.CHANGE): WorkerStatus.CHANGING,
        (WorkerStatus.CHANGING, DrainSignal.JOIN): WorkerStatus.SERVING,
    }
)


def next_status(standing: WorkerStatus, signal: DrainSignal) -> WorkerStatus:
    """The standing that follows, or IllegalTransition."""
    try:
        return DRAIN_TABLE[standing, signal]
    except KeyError:
        raise IllegalTransition(f"a worker that is {standing} cannot take {signal}") from None


@dataclass(slots=True)
class RoleTransition:
    """The router's side of one change. `target` None: it is only drained. Times are of the driver's clock, seconds."""

    number: int  # of whoever asked for it
    life: int
    target: WorkerConfig | None
    recall_s: float  # when what it still has is taken elsewhere
    standing: WorkerStatus = WorkerStatus.SERVING

    def take(self, signal: DrainSignal) -> None:
        self.standing = next_status(self.standing, signal)


PHASES = MappingProxyType({Role.PREFILL: ("prefill",), Role.DECODE: ("decode",), Role.COLOCATED: ("prefill", "decode")})


def phases_of(roles: Iterable[Role]) -> set[str]:
    """Those that workers of these roles serve."""
    return {phase for role in roles for phase in PHASES[role]}


def why_not(worker: WorkerId, standings: dict[WorkerId, tuple[Role, WorkerStatus]]) -> str:
    """Why this worker cannot leave now; empty where it can. `standings` are of all workers that are there."""
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
    """Where one worker stands, by the table of `role_change.py`."""

    def __init__(self) -> None:
        self.standing = WorkerStatus.SERVING
        self._asked = Leave(0)

    def asked(self, out: EffectBuffer, message: Leave, config: WorkerConfig) -> None:
        """Asked again, it says again what it has said, lest that was lost. `config`: what the worker is."""
        if message.life != self._asked.life:
            if self.standing is not WorkerStatus.CHANGING:
                self.standing, self._asked = WorkerStatus.LEAVING, message
        elif self.standing is WorkerStatus.DRAINED:
            out.tell_router(Left(message.life))
        elif self.standing is WorkerStatus.SERVING:
            out.tell_router(Joined(message.life, config))

    def look(self, out: EffectBuffer, *, idle: bool) -> None:
        """After every event: whether it is empty now."""
        if self.standing is not WorkerStatus.LEAVING or not idle:
            return
        self._take(DrainSignal.EMPTY)
        out.tell_router(Left(self._asked.life))
        if self._asked.config is not None:
            self._take(DrainSignal.CHANGE)
            out.put(Reshape(self._asked.config))

    def reshaped(self, out: EffectBuffer, config: WorkerConfig, why: str) -> None:
        self._take(DrainSignal.JOIN)
        out.tell_router(Joined(self._asked.life, config, why))

    def refuses(self, out: EffectBuffer, message: Message) -> bool:
        """Whether the message asks for something of a worker that is being changed."""
        if self.standing is not WorkerStatus.CHANGING:
            return False
        detail = "the worker's role is being changed"
        if isinstance(message, Reserve):
            out.tell_router(Refused(message.attempt, detail))
        elif isinstance(message, StartPrefill):
            out.abort(message.attempt, detail)
        return isinstance(message, Reserve | StartPrefill)

    @property
    def lends(self) -> bool:
        """Whether its pages can be read now."""
        return self.standing is not WorkerStatus.CHANGING

    def router_lost(self) -> None:
        """The next router asks again, if it wants anything. A change that is under way ends."""
        if self.standing is not WorkerStatus.CHANGING:
            self.standing = WorkerStatus.SERVING

    def _take(self, signal: DrainSignal) -> None:
        self.standing = next_status(self.standing, signal)
