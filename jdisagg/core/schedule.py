"""The schedule of one program on a device, as its compiler ordered it: products, and collectives that start and end.

A collective runs in the background between its start and its end; only its remaining time at the end is waited for. The
caller passes functions for the time of a product and of a collective; `waited` returns the waiting time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jdisagg.core.hardware import Collective, Work


@dataclass(frozen=True, slots=True)
class Start:
    """The start of a collective, which has a name within its program."""

    name: str
    collective: Collective


@dataclass(frozen=True, slots=True)
class End:
    """The point that waits for a collective."""

    name: str


@dataclass(frozen=True, slots=True)
class Turns:
    """The body of a loop."""

    events: Events


Events = tuple[Work | Start | End | Turns, ...]


@dataclass(frozen=True, slots=True)
class Waited:
    """The seconds of all collectives, and those in which the device is idle."""

    total_s: float
    exposed_s: float

    @property
    def hidden(self) -> float:
        """Returns the share of collective time that is hidden; 1 without collectives."""
        return max(1 - self.exposed_s / self.total_s, 0.0) if self.total_s else 1.0


@dataclass
class _Clock:
    now_s: float = 0.0
    links_s: float = 0.0  # time at which the links are free again
    total_s: float = 0.0
    exposed_s: float = 0.0


def waited(
    events: Sequence[Work | Start | End | Turns],
    work_s: Callable[[Work], float],
    collective_s: Callable[[Collective], float],
    loops: Sequence[int] = (),
) -> Waited:
    """Computes the waiting time. Collectives use the links one after another; one without an end in its loop's body is
    waited for there. loops: iterations of nested loops, outermost first; a deeper loop counts once (the bisections of
    sampling)."""
    clock = _Clock()
    _run(events, work_s, collective_s, loops, clock)
    return Waited(clock.total_s, clock.exposed_s)


def _run(
    events: Sequence[Work | Start | End | Turns],
    work_s: Callable[[Work], float],
    collective_s: Callable[[Collective], float],
    loops: Sequence[int],
    clock: _Clock,
) -> None:
    ends: dict[str, float] = {}
    for event in events:
        match event:
            case Work():
                clock.now_s += work_s(event)
            case Start(name, collective):
                seconds = collective_s(collective)
                clock.links_s = ends[name] = max(clock.now_s, clock.links_s) + seconds
                clock.total_s += seconds
            case End(name):
                _wait(clock, ends.pop(name, clock.now_s))
            case Turns(body):
                for _ in range(loops[0] if loops else 1):
                    _run(body, work_s, collective_s, loops[1:], clock)
    _wait(clock, max(ends.values(), default=clock.now_s))


def _wait(clock: _Clock, until_s: float) -> None:
    clock.exposed_s += max(until_s - clock.now_s, 0.0)
    clock.now_s = max(clock.now_s, until_s)
