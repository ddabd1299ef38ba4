"""Which of very many workers are weighed for a request: the next few in turn, and some that keep its beginning.

The least loaded of a few is nearly the least loaded of all (Mitzenmacher), and who keeps a prompt's beginning is known
by its pages: a decision costs as much among a thousand workers as among a hundred.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jdisagg.core.request import WorkerId
from jdisagg.core.router_config import Routing
from jdisagg.core.worker_config import Role
from jdisagg.policy.prefix_index import PrefixIndex
from jdisagg.policy.request_state import RequestState
from jdisagg.policy.worker_state import WorkerState

MANY = 64  # workers of one role from which on not all are weighed for each request
WEIGHED = 4  # of those: the next in turn
KEEPERS = 8  # of those that keep the prompt's beginning, besides
SAMPLED = (Routing.LEAST_LOADED, Routing.RANDOM, Routing.CACHE_AWARE)  # whose few workers stand for all


class Sample:
    """Of the workers of one router."""

    def __init__(self, routing: Routing, peers: Mapping[WorkerId, WorkerState], index: PrefixIndex) -> None:
        self.routing, self.peers, self.index = routing, peers, index
        self.by_role: dict[Role, list[WorkerState]] = {}
        self._page_sizes = list[int]()
        self._next = 0

    def joined(self, by_role: dict[Role, list[WorkerState]]) -> None:
        """The workers are others now."""
        self.by_role = by_role
        self._page_sizes = sorted({peer.config.page_size for peer in self.peers.values() if peer.config.prefix_caching})

    def of(self, row: RequestState) -> list[WorkerState] | None:
        """Workers that are weighed for it in place of all, None where all are."""
        few = self.next_few()
        if few is None or self.routing is not Routing.CACHE_AWARE:
            return few
        return few + self._keepers(row, {peer.config.worker for peer in few})

    def next_few(self) -> list[WorkerState] | None:
        """Whoever's turn it is, whatever they keep."""
        if self.routing not in SAMPLED or max(map(len, self.by_role.values())) < MANY:
            return None
        self._next += WEIGHED
        return [peer for some in self.by_role.values() for peer in _in_turn(some, self._next)]

    def _keepers(self, row: RequestState, others: set[WorkerId]) -> list[WorkerState]:
        """Some besides others that hold most of the row's prompt, by pages of each size that there is."""
        found = [self.index.nearest(row.page_names(size), KEEPERS, self._next) for size in self._page_sizes]
        return [self.peers[worker] for some in found for worker in some if worker not in others]


def _in_turn(some: Sequence[WorkerState], number: int) -> Sequence[WorkerState]:
    """`WEIGHED` of them from the place of `number` on, round and round; all where there are few."""
    if len(some) < MANY:
        return some
    first = number % len(some)
    return [*some[first : first + WEIGHED], *some[: max(0, first + WEIGHED - len(some))]]
