"""The handoff, as a literal transition table that both of its ends use.

RESERVE makes a reservation at the destination before the source starts. Parts of KV and COMMIT, which counts them,
reach the reservation in any order. ACK releases the pages of the source. ABORT and EXPIRE (a deadline is over) end the
handoff from any state, and an ABORT is acknowledged even if nothing is left to abort. A signal without a row raises
IllegalTransition and changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from jdisagg.core.errors import IllegalTransition
from jdisagg.core.request import Attempt, RequestId


class HandoffRole(StrEnum):
    SOURCE = "source"  # the worker that prefills
    DESTINATION = "destination"  # the worker that decodes


class State(StrEnum):
    IDLE = "idle"
    COMPUTING = "computing"  # source: the prompt waits or is being computed
    STREAMING = "streaming"  # source: computed further, while some parts are on their way already
    SHIPPED = "shipped"  # source: all parts and COMMIT are on their way
    RESERVED = "reserved"  # destination: the reservation is held
    FILLING = "filling"  # destination: some parts are in the reservation's pages, which no step may read yet
    COMMITTED = "committed"  # destination: COMMIT came, some of the parts that it counts did not
    ADMITTED = "admitted"  # destination: all came, ACK is sent, the sequence decodes
    RELEASED = "released"
    ABORTED = "aborted"


class Signal(StrEnum):
    START = "start"
    SHIP = "ship"  # a part leaves
    ACK = "ack"
    RESERVE = "reserve"
    ARRIVE = "arrive"  # a part is inserted
    COMMIT = "commit"  # sent by the source, received by the destination
    COMPLETE = "complete"  # the reservation has COMMIT and every part that it counts
    RELEASE = "release"  # the sequence ended here: nothing is left to hand over, or to decode
    ABORT = "abort"
    EXPIRE = "expire"


TABLE: Mapping[tuple[HandoffRole, State, Signal], State] = MappingProxyType(
    {
        (HandoffRole.SOURCE, State.IDLE, Signal.START): State.COMPUTING,
        (HandoffRole.SOURCE, State.COMPUTING, Signal.SHIP): State.STREAMING,
        (HandoffRole.SOURCE, State.STREAMING, Signal.SHIP): State.STREAMING,
        (HandoffRole.SOURCE, State.COMPUTING, Signal.COMMIT): State.SHIPPED,  # nothing had to travel
        (HandoffRole.SOURCE, State.STREAMING, Signal.COMMIT): State.SHIPPED,
        (HandoffRole.SOURCE, State.COMPUTING, Signal.RELEASE): State.RELEASED,
        (HandoffRole.SOURCE, State.STREAMING, Signal.RELEASE): State.RELEASED,
        (HandoffRole.SOURCE, State.SHIPPED, Signal.ACK): State.RELEASED,
        (HandoffRole.SOURCE, State.COMPUTING, Signal.ABORT): State.ABORTED,
        (HandoffRole.SOURCE, State.STREAMING, Signal.ABORT): State.ABORTED,
        (HandoffRole.SOURCE, State.SHIPPED, Signal.ABORT): State.ABORTED,
        (HandoffRole.SOURCE, State.COMPUTING, Signal.EXPIRE): State.ABORTED,
        (HandoffRole.SOURCE, State.STREAMING, Signal.EXPIRE): State.ABORTED,
        (HandoffRole.SOURCE, State.SHIPPED, Signal.EXPIRE): State.ABORTED,
        (HandoffRole.DESTINATION, State.IDLE, Signal.RESERVE): State.RESERVED,
        (HandoffRole.DESTINATION, State.RESERVED, Signal.ARRIVE): State.FILLING,
        (HandoffRole.DESTINATION, State.FILLING, Signal.ARRIVE): State.FILLING,
        (HandoffRole.DESTINATION, State.COMMITTED, Signal.ARRIVE): State.COMMITTED,
        (HandoffRole.DESTINATION, State.RESERVED, Signal.COMMIT): State.COMMITTED,
        (HandoffRole.DESTINATION, State.FILLING, Signal.COMMIT): State.COMMITTED,
        (HandoffRole.DESTINATION, State.COMMITTED, Signal.COMPLETE): State.ADMITTED,
        (HandoffRole.DESTINATION, State.ADMITTED, Signal.RELEASE): State.RELEASED,
        (HandoffRole.DESTINATION, State.RESERVED, Signal.RELEASE): State.RELEASED,
        (HandoffRole.DESTINATION, State.RESERVED, Signal.ABORT): State.ABORTED,
        (HandoffRole.DESTINATION, State.FILLING, Signal.ABORT): State.ABORTED,
        (HandoffRole.DESTINATION, State.COMMITTED, Signal.ABORT): State.ABORTED,
        (HandoffRole.DESTINATION, State.ADMITTED, Signal.ABORT): State.ABORTED,
        (HandoffRole.DESTINATION, State.RESERVED, Signal.EXPIRE): State.ABORTED,
        (HandoffRole.DESTINATION, State.FILLING, Signal.EXPIRE): State.ABORTED,
        (HandoffRole.DESTINATION, State.COMMITTED, Signal.EXPIRE): State.ABORTED,
    }
)

OVER = frozenset({State.RELEASED, State.ABORTED})


@dataclass(frozen=True, slots=True)
class WaitDeadline:
    """The wait of a state: the message, the owner of the timer that ends it, and the setting of its deadline."""

    for_what: str
    owner: str
    deadline: str


WAITS: Mapping[tuple[HandoffRole, State], WaitDeadline] = MappingProxyType(
    {
        (HandoffRole.SOURCE, State.COMPUTING): WaitDeadline(
            "its turn and its tokens", "prefill worker", "StartPrefill.timeout_s"
        ),
        (HandoffRole.SOURCE, State.STREAMING): WaitDeadline(
            "its turn and its tokens", "prefill worker", "StartPrefill.timeout_s"
        ),
        (HandoffRole.SOURCE, State.SHIPPED): WaitDeadline("ACK", "prefill worker", "WorkerConfig.ack_timeout_s"),
        # Every part and every Renew renews the lease: it lasts as long as the source lives.
        (HandoffRole.DESTINATION, State.RESERVED): WaitDeadline("parts and COMMIT", "decode worker", "Reserve.lease_s"),
        (HandoffRole.DESTINATION, State.FILLING): WaitDeadline("parts and COMMIT", "decode worker", "Reserve.lease_s"),
        (HandoffRole.DESTINATION, State.COMMITTED): WaitDeadline("missing parts", "decode worker", "Reserve.lease_s"),
        (HandoffRole.DESTINATION, State.ADMITTED): WaitDeadline(
            "the next token", "router", "RouterConfig.stall_timeout_s"
        ),
    }
)


def next_state(end: HandoffRole, state: State, signal: Signal) -> State:
    """Returns the state that follows, or raises IllegalTransition."""
    try:
        return TABLE[end, state, signal]
    except KeyError:
        raise IllegalTransition(f"a handoff's {end} that is {state} cannot take {signal}") from None


@dataclass(slots=True)
class Handoff:
    """One end of one handoff. `deadline_s` ends the wait it is in (seconds of the driver's clock)."""

    owner: Attempt
    end: HandoffRole
    deadline_s: float
    state: State = State.IDLE

    def take(self, signal: Signal) -> None:
        self.state = next_state(self.end, self.state, signal)

    def can_take(self, signal: Signal) -> bool:
        return (self.end, self.state, signal) in TABLE

    @property
    def over(self) -> bool:
        return self.state in OVER

    @property
    def timer(self) -> str:
        return timer_of(Timer(self.end.value), self.owner)


class Timer(StrEnum):
    """A worker's timers; each handoff has its own of each kind."""

    SOURCE = "source"  # the deadline of a source's wait
    DESTINATION = "destination"  # the end of a reservation's lease
    RENEW = "renew"  # the source renews the reservation's lease
    PARTS = "parts"  # a reservation asks for the parts that have not come
    FETCH = "fetch"  # the deadline of a fetch


def timer_of(kind: Timer, owner: Attempt) -> str:
    return f"{kind}/{owner.epoch}/{owner.request_id}"


def owner_of_timer(key: str) -> tuple[Timer, Attempt]:
    """Returns the kind and the attempt that a timer's key names."""
    kind, epoch, request_id = key.split("/", 2)
    return Timer(kind), Attempt(RequestId(request_id), int(epoch))


def mermaid(end: HandoffRole) -> str:
    """Returns the table of one end as a Mermaid state diagram."""
    rows = [(state, signal, then) for (side, state, signal), then in TABLE.items() if side is end]
    lines = [f"    {state} --> {then}: {signal}" for state, signal, then in rows]
    return "\n".join(["stateDiagram-v2", f"    [*] --> {State.IDLE}", *lines])
