"""Two routers, of which one leads (`policy/lease.py`): what they say to each other, and to members that ask either."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, cast

from jdisagg.core.codec import shown
from jdisagg.core.errors import ConfigError, PeerMismatch, SenselessWord
from jdisagg.core.settings import Settings
from jdisagg.kv.transport.config import TransportConfig
from jdisagg.policy.lease import Contender, Lease, Rank
from jdisagg.policy.roll_call import clock_off
from jdisagg.serve.cluster.certificates import channel_credentials
from jdisagg.serve.cluster.control_client import ClientCallbacks, ControlClient
from jdisagg.serve.cluster.control_server import ServerCallbacks
from jdisagg.serve.cluster.link import Heartbeat, Link
from jdisagg.serve.cluster.periodic import PeriodicTask

log = logging.getLogger("jdisagg.cluster")

LOOK_S = 0.25
MOST_MEMBERS = 4096
LONGEST_NAME = 200
MOST_TERM = 1 << 53


def pair_of(settings: Settings) -> tuple[bool, str] | None:
    """Of a router's process: whether it is the first of the two that --router names, and the other's address.

    None where there is no other. Raises ConfigError.
    """
    addresses = [each for each in settings.router.split(",") if each]
    if not addresses:
        return None
    own = [f"{settings.host}:{settings.control_port}"]
    mine = [each for each in addresses if each in own] or [
        each for each in addresses if each.rpartition(":")[2] == str(settings.control_port)
    ]
    if len(addresses) != 2 or len(mine) != 1:
        raise ConfigError(
            f"--router={settings.router} of a router names both routers as HOST:PORT,HOST:PORT, and one of the two is"
            f" this process's {own[0]}: give it the --host and --control_port of one of them"
        )
    return addresses[0] == mine[0], addresses[1 - addresses.index(mine[0])]


def read_names(record: Any) -> tuple[str, ...]:
    """Raises SenselessWord."""
    names = cast(list[Any], record) if isinstance(record, list) else [None]
    if len(names) > MOST_MEMBERS or not all(isinstance(each, str) and len(each) <= LONGEST_NAME for each in names):
        raise SenselessWord(f"members are {shown(record)}")
    return tuple(map(str, names))


def read_term(record: Any) -> int:
    """Raises SenselessWord."""
    if type(record) is not int or not 0 <= record < MOST_TERM:
        raise SenselessWord(f"a term is {shown(record)}")
    return record


def read_lease(record: Any) -> Lease:
    """Raises SenselessWord."""
    said = cast(dict[str, Any], record) if isinstance(record, dict) else {}
    return Lease(read_term(said.get("term")), said.get("leading") is True, read_names(said.get("members")))


def check_clock(theirs_s: Any, ours_s: float) -> None:
    """A router numbers its attempts by its clock, above those of any before it. Raises PeerMismatch, SenselessWord."""
    if type(theirs_s) is not float:
        raise SenselessWord(f"a clock that says {shown(theirs_s)}")
    why = clock_off("the other router", theirs_s, ours_s, "this one's")
    if why is not None:
        raise PeerMismatch(why)


class Leadership:
    """A router's side: a `ServerCallbacks` around all others, who hear only of members while this router leads; and the
    `ClientCallbacks` of its link to the other router."""

    deposed: Callable[[str], None]

    def __init__(self, node: ServerCallbacks, contender: Contender) -> None:
        """`deposed`, which is set before anything starts, is told why this router leads no longer."""
        self._node, self.contender = node, contender
        self._lock = threading.RLock()
        self._others: set[Link] = set()  # of the other router
        self._turned_away: set[Link] = set()
        self._members: dict[Link, tuple[str, ...]] = {}
        self._task = PeriodicTask(LOOK_S, self._look)

    def start(self) -> None:
        self._task.start()

    def stop(self) -> None:
        self._task.stop()

    @property
    def leads(self) -> bool:
        return self.contender.rank is Rank.LEADING

    def _look(self) -> None:
        with self._lock:
            before, contender = self.contender.rank, self.contender
            contender.look([name for names in self._members.values() for name in names], time.monotonic())
            lease = self._lease()
            for link in self._others:
                link.send({"lease": lease})
        self.tell_change(before)

    def tell_change(self, before: Rank) -> None:
        if self.contender.rank is before:
            return
        log.warning("this router is %s: %s", self.contender.rank, self.contender.why)
        if self.contender.rank is Rank.DEPOSED:
            self.deposed(f"this router stepped down: {self.contender.why}")

    def _lease(self) -> dict[str, Any]:
        lease = self.contender.lease
        return {"term": lease.term, "leading": lease.leading, "members": list(lease.members)}

    # ------------------------------------------------------------ `control_server.ServerCallbacks`

    def admit(self, link: Link, hello: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            if "router" in hello:
                check_clock(hello.get("clock_s", time.time()), time.time())
                self._others.add(link)
                return {"lease": self._lease()}
            before, names = self.contender.rank, self._asks(hello)
            self.tell_change(before)
            if not self.leads:
                self._turned_away.add(link)
                return {"standing_by": self.contender.next_term if self.contender.wants_promises else 0}
            answer = self._node.admit(link, hello) | {"term": self.contender.term}
            self._members[link] = names
            return answer

    def _asks(self, hello: dict[str, Any]) -> tuple[str, ...]:
        """The workers that ask by it, none where a front does."""
        term, known = read_term(hello.get("term", 0)), read_names(hello.get("known", []))
        names = read_names(hello.get("named", []))
        for name in names if hello.get("asks", True) is not False else ():
            self.contender.asked(name, term, known, time.monotonic())
        return names

    def on_joined(self, link: Link) -> None:
        if link in self._turned_away:
            link.hang_up("this router stands by")
        elif link not in self._others:
            self._node.on_joined(link)

    def on_message(self, link: Link, body: dict[str, Any]) -> None:
        if link not in self._others and link not in self._turned_away:
            self._node.on_message(link, body)

    def on_lost(self, link: Link, why: str) -> None:
        with self._lock:
            ours = link in self._others or link in self._turned_away
            self._others.discard(link)
            self._turned_away.discard(link)
            self._members.pop(link, None)
        if not ours:
            self._node.on_lost(link, why)


class OtherRouter:
    """What the other router says: the `ClientCallbacks` of the link to it."""

    def __init__(self, leadership: Leadership) -> None:
        self._leadership = leadership

    def hello(self) -> dict[str, Any]:
        return {"router": True, "now_s": time.monotonic(), "clock_s": time.time()}

    def on_joined(self, link: Link, welcome: dict[str, Any]) -> None:
        log.warning("the other router is there")
        self.on_message(welcome)

    def on_message(self, body: dict[str, Any]) -> None:
        lease, leadership = read_lease(body.get("lease")), self._leadership
        before = leadership.contender.rank
        leadership.contender.heard(lease, time.monotonic())
        leadership.tell_change(before)

    def on_lost(self, why: str) -> None:
        log.warning("the other router is silent: %s", why)
        self._leadership.contender.silent()


class KnownMembers:
    """A worker process's side: a `ClientCallbacks` around the node's, which says who its last router's members were."""

    def __init__(self, node: ClientCallbacks, own: tuple[str, ...]) -> None:
        self._node, self._own = node, own
        self._known: set[str] = set()

    def hello(self) -> dict[str, Any]:
        return self._node.hello() | {"named": list(self._own), "known": sorted({*self._own, *self._known})}

    def on_joined(self, link: Link, welcome: dict[str, Any]) -> None:
        self._known.clear()
        self._node.on_joined(link, welcome)

    def on_message(self, body: dict[str, Any]) -> None:
        self._node.on_message(body)
        if "peers" in body:
            self._known |= {str(record["config"]["worker"]) for record in body["peers"]}
        elif "gone" in body:
            self._known -= set(body["gone"])

    def on_lost(self, why: str) -> None:
        self._node.on_lost(why)


class RouterPair:
    """This router's leadership and its link to the other one."""

    def __init__(self, leadership: Leadership, client: ControlClient) -> None:
        self.leadership, self._client = leadership, client

    def start(self) -> None:
        self._client.start()
        self.leadership.start()

    def stop(self) -> None:
        self.leadership.stop()
        self._client.stop()


def leadership_of(settings: Settings, node: ServerCallbacks) -> Leadership | None:
    """Of a router that is one of two."""
    found = pair_of(settings)
    return None if found is None else Leadership(node, Contender(found[0], settings.peer_silence_s, time.monotonic()))


def pair_with(
    leadership: Leadership,
    settings: Settings,
    transport: TransportConfig,
    heartbeat: Heartbeat,
    deposed: Callable[[str], None],
) -> RouterPair:
    """With its link to the other router. `deposed` is told why this router leads no longer: its process is to end."""
    found = pair_of(settings)
    assert found is not None, "it is one of two"
    leadership.deposed = deposed
    credentials = channel_credentials(settings)
    other = OtherRouter(leadership)
    client = ControlClient(found[1], transport.secret, transport.identity, other, heartbeat, credentials)
    return RouterPair(leadership, client)
