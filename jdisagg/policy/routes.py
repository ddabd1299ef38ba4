"""The router's way from a row to a pair: what it knows of its workers, put before the routing it was given."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from jdisagg.core.request import RequestId, WorkerId
from jdisagg.core.router_config import RouterConfig, Routing
from jdisagg.policy.decisions import Decision, Verdict
from jdisagg.policy.peers import Peer
from jdisagg.policy.prefix_directory import PrefixDirectory
from jdisagg.policy.routing import Choice, Errand, Pair, WorkerLook, choose_pair
from jdisagg.policy.rows import Row


class Routes:
    """Chooses, notes every decision, and remembers what went where as far as the routing asks for it."""

    def __init__(self, config: RouterConfig, peers: Mapping[WorkerId, Peer], note: Callable[[Decision], None]) -> None:
        self.config, self.peers, self.note = config, peers, note
        self.directory = PrefixDirectory()
        self._turn = 0  # of round robin

    def choose(self, row: Row, now_s: float, *, ask_anyway: bool) -> Pair | None:
        """The pair for the row's next attempt, None where none has room."""
        request = row.to_prefill()
        looks = [self._look(peer, row, ask_anyway) for peer in self.peers.values()]
        errand = Errand(row.request_id, len(request.prompt), self._turn, self.config.routing_seed)
        choice = choose_pair(looks, errand, self.config.routing)
        self._decided(row, choice, now_s)
        return choice.taken

    def _look(self, peer: Peer, row: Row, ask_anyway: bool) -> WorkerLook:
        cached_tokens = 0
        if self._remembers(peer):
            cached_tokens = self.directory.cached_tokens(peer.config, row.page_names(peer.config.page_size))
        avoided = peer.config.worker in row.avoid
        return peer.look(row.to_prefill(), avoided=avoided, ask_anyway=ask_anyway, cached_tokens=cached_tokens)

    def _remembers(self, peer: Peer) -> bool:
        return self.config.routing is Routing.CACHE_AWARE and peer.config.role.prefills

    def _decided(self, row: Row, choice: Choice, now_s: float) -> None:
        if choice.taken is None:
            if not row.wait_told:
                row.wait_told = True
                self.note(Decision(now_s, row.request_id, Verdict.WAITS, choice))
            return
        row.wait_told = False
        self.note(Decision(now_s, row.request_id, Verdict.TAKEN, choice))
        if self.config.routing is Routing.ROUND_ROBIN:
            self._turn += 1
        peer = self.peers[choice.taken.prefill]
        if self._remembers(peer):
            self.directory.sent(peer.config, row.page_names(peer.config.page_size))

    def refuse(self, request_id: RequestId, verdict: Verdict, detail: str, now_s: float) -> None:
        """Nobody was weighed: the house is full, or too small."""
        self.note(Decision(now_s, request_id, verdict, detail=detail))
