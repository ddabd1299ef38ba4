"""Whether a decode worker may promise a place for a prompt that is still to be computed, by what is predicted.

`--reserve=late` promises without looking: pages are seen to when they are claimed, as peers do. `--reserve=calendar`
puts down when each prompt that is on its way will be there (the best prefill worker's line at its pace) and when each
sequence leaves (a quantile of the lengths of answers like it, at its worker's pace), and promises a place only where
all find room at every moment. Where nothing was measured, all come now and nobody leaves: that is the early way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from jdisagg.core.request import Phase, RequestId, WorkerId
from jdisagg.core.router_config import Reserving
from jdisagg.policy.calendar import Stay, fits
from jdisagg.policy.router.estimates import Forecasts, Lengths, crowd, key_of
from jdisagg.policy.router.request_state import RequestState
from jdisagg.policy.router.worker_view import MayPromise, WorkerState

SHARE = 0.9  # of answers like it, that are no longer than is reckoned with
GENERATIONS = 2  # of slots: as many sequences are on one worker, or on their way there, at most


@dataclass(slots=True)
class Promises:
    """The router's. `rows` are its own."""

    reserve: Reserving
    peers: Mapping[WorkerId, WorkerState]
    rows: Mapping[RequestId, RequestState]
    forecasts: Forecasts
    lengths: Lengths = field(default_factory=Lengths)
    expected: dict[RequestId, float] = field(default_factory=dict[RequestId, float])  # when KV of a promise is there
    sent_back: set[RequestId] = field(default_factory=set[RequestId])  # found no room once: they ask for pages first

    def ahead(self, row: RequestState) -> bool:
        """Whether the row takes its pages only when they are claimed, where another worker computes its prompt."""
        return self.reserve is not Reserving.EARLY and row.request_id not in self.sent_back

    def of(self, row: RequestState, now_s: float) -> MayPromise | None:
        """Which workers may promise a place; None where the row takes pages before anything else."""
        return (lambda peer: self.has_room(peer, row, now_s)) if self.ahead(row) else None

    def has_room(self, peer: WorkerState, row: RequestState, now_s: float) -> bool:
        """Whether this worker may promise a place for the request."""
        slots = peer.config.num_slots
        if peer.full or len(peer.decode_work) >= GENERATIONS * slots + peer.config.reservations_ahead:
            return False
        return self.reserve is Reserving.LATE or self._fits(peer, row, now_s)

    def promised(self, row: RequestState, prefill: WorkerState, now_s: float) -> None:
        """The row is to be prefilled there, and its place is asked for."""
        seen = self.reserve is Reserving.CALENDAR
        self.expected[row.request_id] = (
            now_s + self._prefill_s(prefill, len(row.request.prompt) + len(row.output), now_s) if seen else 0.0
        )

    def over(self, row: RequestState, *, found_no_room: bool = False) -> None:
        """Its attempt is."""
        if self.expected.pop(row.request_id, None) is not None and found_no_room:
            self.sent_back.add(row.request_id)

    def ended(self, row: RequestState) -> None:
        self.sent_back.discard(row.request_id)
        if self.reserve is Reserving.CALENDAR and row.phase is Phase.FINISHED and row.output:
            self.lengths.learn(key_of(row.request), len(row.output))

    # ------------------------------------------------------------ what is predicted

    def _fits(self, peer: WorkerState, row: RequestState, now_s: float) -> bool:
        gap_s = self._gap_s(peer, now_s)
        new = self._stay(peer, row, self._comes_s(len(row.request.prompt) + len(row.output), now_s), gap_s, here=False)
        others = list(self._stays(peer, gap_s, now_s))
        if not fits(peer.view.free_pages, others, new, now_s):
            return False
        *others, new = (stay._replace(first=1.0, last=1.0) for stay in (*others, new))
        return fits(peer.view.free_slots, others, new, now_s)

    def _stays(self, peer: WorkerState, gap_s: float, now_s: float) -> Iterator[Stay]:
        """Of all that the worker has, or has promised."""
        for row in [self.rows[each] for each in peer.decode_work if each in self.rows]:
            here = row.phase is Phase.DECODING or row.request_id not in self.expected
            yield self._stay(peer, row, now_s if here else self._expected_s(row, now_s), gap_s, here=here)

    def _stay(self, peer: WorkerState, row: RequestState, comes_s: float, gap_s: float, *, here: bool) -> Stay:
        """Pages when it comes, and when it leaves, as long after as answers like it take for what is left of them."""
        config, told, prompt_tokens = peer.config, len(row.output), len(row.request.prompt)
        left = max(1, self.lengths.quantile(key_of(row.request), SHARE, told) - told)
        first = config.pages_for(prompt_tokens + told)
        last = config.pages_for(prompt_tokens + told + left - 1)
        return Stay(comes_s, comes_s + gap_s * left, first, max(first, last), here)

    def _expected_s(self, row: RequestState, now_s: float) -> float:
        """When its KV is there: as was predicted when it was promised; who is late comes any moment."""
        return now_s if row.phase is Phase.SHIPPING else max(now_s, self.expected[row.request_id])

    def _gap_s(self, peer: WorkerState, now_s: float) -> float:
        """Between two tokens there, of one sequence; for ever, where nobody knows."""
        alone_s = self.forecasts.steps.guess(peer.config.worker, now_s)
        return math.inf if alone_s is None else alone_s * crowd(len(peer.decode_work), peer.config.num_slots)

    def _comes_s(self, tokens: int, now_s: float) -> float:
        """The soonest that its prompt can be computed: now, where nobody's pace is known."""
        prefills = [peer for peer in self.peers.values() if peer.config.role.prefills and not peer.leaving]
        return now_s + min((self._prefill_s(peer, tokens, now_s) for peer in prefills), default=0.0)

    def _prefill_s(self, peer: WorkerState, tokens: int, now_s: float) -> float:
        token_s = self.forecasts.drain.of(peer.config.worker, now_s) or 0.0
        return token_s * (peer.prompt_tokens + tokens)
