"""How a worker changes its role: it leaves, is drained, is made anew, and joins again. A literal table, of both sides.

The router says LEAVE and sends nothing more; what runs ends, or is recalled at a deadline and goes on elsewhere. The
worker says EMPTY when nothing is left, is changed by its driver, and says what it is now: JOIN. Each change has a
number (`life`), so that a word of an earlier one is void.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from jdisagg.core.errors import IllegalTransition
from jdisagg.core.request import WorkerId
from jdisagg.core.worker_config import Role, WorkerConfig


class Standing(StrEnum):
    """Where a worker stands."""

    SERVING = "serving"
    LEAVING = "leaving"  # it ends what it has, and is given nothing more
    DRAINED = "drained"  # it holds nothing, and is given nothing until it is asked to become something
    CHANGING = "changing"  # its weights are cut anew and its programs made ready


class Signal(StrEnum):
    LEAVE = "leave"
    EMPTY = "empty"
    CHANGE = "change"
    JOIN = "join"


TABLE: Mapping[tuple[Standing, Signal], Standing] = MappingProxyType(
    {
        (Standing.SERVING, Signal.LEAVE): Standing.LEAVING,
        (Standing.LEAVING, Signal.EMPTY): Standing.DRAINED,
        (Standing.DRAINED, Signal.LEAVE): Standing.LEAVING,  # it was drained, and is to become something after all
        (Standing.DRAINED, Signal.CHANGE): Standing.CHANGING,
        (Standing.CHANGING, Signal.JOIN): Standing.SERVING,
    }
)


def next_standing(standing: Standing, signal: Signal) -> Standing:
    """The standing that follows, or IllegalTransition."""
    try:
        return TABLE[standing, signal]
    except KeyError:
        raise IllegalTransition(f"a worker that is {standing} cannot take {signal}") from None


@dataclass(slots=True)
class RoleChange:
    """The router's side of one change. `target` None: it is only drained. Times are of the driver's clock, seconds."""

    number: int  # of whoever asked for it
    life: int
    target: WorkerConfig | None
    recall_s: float  # when what it still has is taken elsewhere
    standing: Standing = Standing.SERVING

    def take(self, signal: Signal) -> None:
        self.standing = next_standing(self.standing, signal)


PHASES = MappingProxyType({Role.PREFILL: ("prefill",), Role.DECODE: ("decode",), Role.COLOCATED: ("prefill", "decode")})


def phases_of(roles: Iterable[Role]) -> set[str]:
    """Those that workers of these roles serve."""
    return {phase for role in roles for phase in PHASES[role]}


def why_not(worker: WorkerId, standings: dict[WorkerId, tuple[Role, Standing]]) -> str:
    """Why this worker cannot leave now; empty where it can. `standings` are of all workers that are there."""
    if worker not in standings:
        return f"there is no worker {worker}; there are {', '.join(sorted(standings))}"
    role, standing = standings[worker]
    if standing in (Standing.LEAVING, Standing.CHANGING):
        return f"{worker} is {standing} already"
    if standing is Standing.DRAINED:
        return ""
    serving = [each for name, (each, other) in standings.items() if name != worker and other is Standing.SERVING]
    missing = sorted(phases_of([role]) - phases_of(serving))
    return f"{worker} is the last worker for {' and '.join(missing)}" if missing else ""
