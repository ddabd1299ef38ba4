"""Selects the workers that are weighed for a request in a large cluster.

They are the next few in turn, their neighbours, and some that hold the beginning of the prompt. The least loaded of a
few is nearly the least loaded of all (Mitzenmacher), and the workers that hold a prefix are looked up by its pages: a
decision among a thousand workers costs as much as among a hundred.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jdisagg.core.labels import SHARED_BY
from jdisagg.core.request import WorkerId
from jdisagg.core.router_config import Routing
from jdisagg.core.worker_config import Role, WorkerConfig
from jdisagg.policy.prefix_index import PrefixIndex
from jdisagg.policy.request_state import RequestState
from jdisagg.policy.worker_state import WorkerState

MANY = 64  # workers of one role from which on not all are weighed for each request
WEIGHED = 4  # workers of such a role that are weighed: the next in turn
KEEPERS = 8  # workers that hold the prompt's beginning, weighed besides
SAMPLED = (Routing.LEAST_LOADED, Routing.RANDOM, Routing.CACHE_AWARE)  # the routings for which a few stand for all

Place = tuple[str, str]  # a label's name and its value


class WorkerSample:
    """The workers of one router, and whose turn it is to be weighed."""

    def __init__(self, routing: Routing, peers: Mapping[WorkerId, WorkerState], index: PrefixIndex) -> None:
        self.routing, self.peers, self.index = routing, peers, index
        self.by_role: dict[Role, list[WorkerState]] = {}
        self._page_sizes = list[int]()
        self._decoders_at: dict[Place, list[WorkerState]] = {}
        self._next = 0

    def joined(self, by_role: dict[Role, list[WorkerState]]) -> None:
        """Takes the changed set of workers."""
        self.by_role, self._decoders_at = by_role, {}
        self._page_sizes = sorted({peer.config.page_size for peer in self.peers.values() if peer.config.prefix_caching})
        decoders = by_role[Role.DECODE]
        if self.routing is Routing.CACHE_AWARE and len(decoders) >= MANY:
            for peer in decoders:
                for place in _places(peer.config):
                    self._decoders_at.setdefault(place, []).append(peer)

    def of(self, row: RequestState) -> list[WorkerState] | None:
        """Returns the workers that are weighed for the request; None if all are."""
        few = self.next_few()
        if few is None or self.routing is not Routing.CACHE_AWARE:
            return few
        if self._decoders_at:
            few += self._neighbours(few)
        return few + self._keepers(row, {peer.config.worker for peer in few})

    def next_few(self) -> list[WorkerState] | None:
        """Returns the next workers in turn, whatever they hold; None if all are weighed."""
        if self.routing not in SAMPLED or max(map(len, self.by_role.values())) < MANY:
            return None
        self._next += WEIGHED
        return [peer for some in self.by_role.values() for peer in _in_turn(some, self._next)]

    def _neighbours(self, few: Sequence[WorkerState]) -> list[WorkerState]:
        """Returns a decode worker in the nearest place of each prefill worker of the sample."""
        known = {peer.config.worker for peer in few}
        found = dict[WorkerId, WorkerState]()
        for prefill in few:
            if prefill.config.role is Role.PREFILL:
                named = [self._decoders_at.get(place) for place in _places(prefill.config)]
                near = next(filter(None, named), list[WorkerState]())
                peer = near[self._next // WEIGHED % len(near)] if near else None
                if peer is not None and peer.config.worker not in known:
                    found[peer.config.worker] = peer
        return list(found.values())

    def _keepers(self, row: RequestState, others: set[WorkerId]) -> list[WorkerState]:
        """Returns workers besides `others` that hold most of the prompt, by pages of each size in use."""
        found = [self.index.nearest(row.page_names(size), KEEPERS, self._next) for size in self._page_sizes]
        return [self.peers[worker] for some in found for worker in some if worker not in others]


def _places(config: WorkerConfig) -> list[Place]:
    """Returns the worker's labels, the nearest place first."""
    named = [(name, getattr(config.labels, name)) for names in SHARED_BY.values() for name in names]
    return [place for place in named if place[1]]


def _in_turn(some: Sequence[WorkerState], number: int) -> Sequence[WorkerState]:
    """Returns `WEIGHED` workers from index `number` on, cyclically; all if there are few."""
    if len(some) < MANY:
        return some
    first = number % len(some)
    return [*some[first : first + WEIGHED], *some[: max(0, first + WEIGHED - len(some))]]
