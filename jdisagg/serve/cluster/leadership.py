"""A router's leadership: it admits workers and fronts, and sends to them, only while it holds the leader lease."""

from __future__ import annotations

import logging
import math
import secrets
import threading
from collections.abc import Callable
from typing import Any

from jdisagg.core.codec import shown
from jdisagg.core.errors import ConfigError, PeerDead, SenselessWord
from jdisagg.serve.cluster.control_server import ServerCallbacks
from jdisagg.serve.cluster.coordination import MAX_TERM, CoordinationError, Lease, RouterAddress, lease_clock_s
from jdisagg.serve.cluster.link import Link, PeriodicTask
from jdisagg.serve.driver.service import NotLeader

log = logging.getLogger("jdisagg.cluster")

RENEWALS = 5  # in one TTL
MARGIN = 0.2  # share of the TTL by which a leader stops before another may lead
IN_PROCESS_INTERVAL_S = 1.0


def read_term(record: Any) -> int:
    """Returns the term that a peer reports. Raises SenselessWord."""
    if type(record) is not int or not 0 <= record < MAX_TERM:
        raise SenselessWord(f"a term is {shown(record)}, must be a number from 0 to {MAX_TERM - 1}")
    return record


class Leadership:
    """Holds the lease, and passes members' messages to the router only while it does; a `ServerCallbacks`."""

    def __init__(
        self,
        node: ServerCallbacks,
        lease: Lease,
        ttl_s: float,
        begin_term: Callable[[int], None],
        step_down: Callable[[str], None],
        clock: Callable[[], float] = lease_clock_s,
    ) -> None:
        """`begin_term` is called with every term that this router leads with, before it admits a worker.

        `step_down` is called once with the reason when this router may not lead any more; its process must then exit.
        `ttl_s` is infinite if no other router can lead.
        """
        self._node, self._lease, self._ttl_s, self._clock = node, lease, ttl_s, clock
        self._begin_term, self._step_down = begin_term, step_down
        self.identity = secrets.token_hex(8)  # distinguishes this router's term from the same term of another router
        self.term = 0
        self._floor = 0  # the highest term that a worker has accepted
        self._until_s = -math.inf
        self._has_stepped_down = False
        self._leader: tuple[str, int] | None = None
        self._last_error = ""
        self._members: set[Link] = set()
        self._turned_away: set[Link] = set()
        self._lock = threading.RLock()
        interval_s = IN_PROCESS_INTERVAL_S if math.isinf(ttl_s) else ttl_s / RENEWALS
        self._task = PeriodicTask(interval_s, self.renew)

    @property
    def is_leader(self) -> bool:
        """True while this router leads by its own clock."""
        return not self._has_stepped_down and self._clock() < self._until_s

    def standby_error(self) -> NotLeader | None:
        """Returns a standby's error for clients, with the leader's address; None while this router leads."""
        if self.is_leader:
            return None
        try:
            found = None if self._leader is None else RouterAddress.parse(self._leader[0])
        except CoordinationError:
            found = None
        if found is None:
            return NotLeader()
        ports = found.http_port, found.grpc_port
        return NotLeader(*(f"{found.host}:{port}" if port > 0 else "" for port in ports))

    def start(self) -> None:
        self.renew()
        self._task.start()

    def stop(self) -> None:
        """Releases the lease, so that a standby leads at once."""
        self._task.stop()
        with self._lock:
            is_ours, self._until_s = self.is_leader, -math.inf
            self._has_stepped_down = True
            if is_ours:
                self._attempt(self._lease.release)

    # ------------------------------------------------------------ the lease

    def renew(self) -> None:
        """Takes or renews the lease; steps down if it is lost."""
        with self._lock:
            if self._has_stepped_down:
                return
            if self._is_overdue():
                return
            began_s = self._clock()
            found = self._attempt(lambda: (self._lease.hold(self._floor),))
            if self._is_overdue():
                return
            if found is not None and found[0] is not None:
                self._lead(found[0], began_s)
            elif found is not None and self.term:
                self._end(f"the coordination service no longer names it the leader of term {self.term}")
            elif found is not None:
                self._leader = self._attempt(self._lease.leader)

    def _is_overdue(self) -> bool:
        """Steps down if this router led and its lease has expired; checked before and after each request."""
        if self.term and not self.is_leader:
            self._end(f"its lease of term {self.term} was not renewed for {self._ttl_s * (1 - MARGIN):g} s")
        return self._has_stepped_down

    def _attempt(self, call: Callable[[], Any]) -> Any:
        """Returns the service's answer; None if it cannot be reached."""
        try:
            found = call()
            self._last_error = ""
            return found
        except ConfigError as error:
            self._end(str(error))
        except CoordinationError as error:
            if not self._last_error:
                log.warning("the coordination service does not answer: %s", error)
            self._last_error = str(error)
        return None

    def _lead(self, term: int, began_s: float) -> None:
        until_s = began_s + self._ttl_s * (1 - MARGIN)
        if self._clock() >= until_s:
            return  # the answer took too long: the next renewal decides
        if term != self.term:
            log.warning("this router leads with term %d", term)
            self._begin_term(term)
            for link in self._members:
                link.send({"term": term})
        self.term, self._until_s = term, until_s

    def _end(self, why: str) -> None:
        self._has_stepped_down, self._until_s = True, -math.inf
        log.warning("this router stepped down: %s", why)
        self._step_down(f"this router stepped down: {why}")

    # ------------------------------------------------------------ `control_server.ServerCallbacks`

    def admit(self, link: Link, hello: dict[str, Any]) -> dict[str, Any]:
        """Admits a member if this router leads with a term above every other router's that the member has accepted."""
        term = read_term(hello.get("term", 0))
        with self._lock:
            if term > self.term or (term == self.term and hello.get("router") != self.identity):
                self._floor = max(self._floor, term)
                if self.is_leader and self.term <= self._floor:
                    self.renew()
            if not self.is_leader:
                self._turned_away.add(link)
                return {"standby": True}
            if self.term <= self._floor:
                raise PeerDead(
                    f"a peer has obeyed term {term}, and no service gives a higher one now: {self._last_error}"
                )
            answer = self._node.admit(link, hello) | {"term": self.term, "router": self.identity}
            link.may_send = lambda: self.is_leader
            self._members.add(link)
            return answer

    def on_joined(self, link: Link) -> None:
        if link in self._turned_away:
            link.hang_up("this router is a standby")
        else:
            self._node.on_joined(link)

    def on_message(self, link: Link, body: dict[str, Any]) -> None:
        if link not in self._turned_away and self.is_leader:
            self._node.on_message(link, body)

    def on_lost(self, link: Link, why: str) -> None:
        with self._lock:
            was_turned_away = link in self._turned_away
            self._turned_away.discard(link)
            self._members.discard(link)
        if not was_turned_away:
            self._node.on_lost(link, why)
