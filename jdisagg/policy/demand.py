"""What the coming minutes ask of each phase, in workers kept busy, from what the router heard and said of late.

Prompts are predicted from a level and a trend of what arrived; a prompt token costs the seconds that prefill workers
were busy, over the tokens they began to answer (so KV that is found makes them cheaper, and packing too). A request
costs a decode worker the share of its pages or slots that it holds, times the seconds that those of late held it.
What waits already is to be worked off within `DRAIN_S`. Nothing is predicted before both costs were measured once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from jdisagg.core.events import ROUTER, EmitTokens, Finish, Received, Reject, Send, Submit, WorkerJoined, WorkerLost
from jdisagg.core.messages import Joined, StartPrefill
from jdisagg.core.request import Request, RequestId, WorkerId
from jdisagg.core.worker_config import WorkerConfig
from jdisagg.policy.autoscaler import Load

BUCKET_S = 10.0  # of arrivals
LEVEL, SLOPE = 0.2, 0.05  # of what is known, that each bucket renews
DAMPED = 0.9  # of a trend, that is left of it with each bucket ahead
DRAIN_S = 60.0  # in which what waits is to be worked off
KEEP = 0.98  # of what was measured, with each request


@dataclass(slots=True)
class Trend:
    """A rate, smoothed twice (Holt), its slope dying away ahead (Gardner). `add` and `ahead` take times that rise."""

    level: float = 0.0  # a second
    slope: float = 0.0  # a second, by bucket
    _sum: float = 0.0
    _ends_s: float | None = None  # of the present bucket
    _buckets: int = 0

    def add(self, amount: float, now_s: float) -> None:
        self._pass(now_s)
        self._sum += amount

    def ahead(self, now_s: float, seconds: float) -> float:
        """A second, so far ahead. Before a bucket is full: what came in it."""
        self._pass(now_s)
        if not self._buckets:
            return self._sum / BUCKET_S
        steps = round(seconds / BUCKET_S)
        return max(0.0, self.level + self.slope * DAMPED * (1 - DAMPED**steps) / (1 - DAMPED))

    def _pass(self, now_s: float) -> None:
        """Buckets that have ended are taken in; after a long silence, as many as matter."""
        if self._ends_s is None:
            self._ends_s = now_s + BUCKET_S
        self._ends_s = max(self._ends_s, now_s - 100 * BUCKET_S)
        while now_s >= self._ends_s:
            rate, self._sum = self._sum / BUCKET_S, 0.0
            self._ends_s += BUCKET_S
            self._take(rate)

    def _take(self, rate: float) -> None:
        self._buckets += 1
        if self._buckets == 1:
            self.level = rate
            return
        weight = max(LEVEL, 1 / self._buckets)
        before, expected = self.level, self.level + DAMPED * self.slope
        self.level = weight * rate + (1 - weight) * expected
        self.slope = SLOPE * (self.level - before) + (1 - SLOPE) * DAMPED * self.slope


@dataclass(slots=True)
class Mean:
    """Of amounts by weights, the latest counting most."""

    amount: float = 0.0
    weight: float = 0.0

    def add(self, amount: float, weight: float) -> None:
        self.amount, self.weight = KEEP * self.amount + amount, KEEP * self.weight + weight

    @property
    def value(self) -> float | None:
        return self.amount / self.weight if self.weight else None


@dataclass(slots=True)
class Asked:
    """A request that has not ended."""

    request: Request
    prefill: WorkerId | None = None  # None: it waits for a reservation
    first_s: float | None = None  # when its first token came
    decode: WorkerId | None = None  # that drew the latest of its tokens
    told: int = 0


@dataclass(slots=True)
class Busy:
    """One worker's prompts, and since when it has had some."""

    prompts: set[RequestId] = field(default_factory=set[RequestId])
    since_s: float = 0.0


class Demand:
    """An observer of the router's driver (`observe`); `load` is what it predicts, `work` what each worker has now."""

    def __init__(self, workers: Iterable[WorkerConfig] = ()) -> None:
        self.configs = {each.worker: each for each in workers}
        self._rows: dict[RequestId, Asked] = {}
        self._busy: dict[WorkerId, Busy] = {}
        self._prompts, self._requests = Trend(), Trend()  # tokens, and requests
        self.prompt_s, self.decode_s = Mean(), Mean()  # busy seconds a prompt token; worker-seconds a request

    # ------------------------------------------------------------ what is observed

    def observe(self, actor: WorkerId, item: Any, now_s: float) -> None:
        """Every event and effect of the driver; those of the router count."""
        if actor != ROUTER:
            return
        if isinstance(item, Send):
            if isinstance(item.message, StartPrefill):
                self._prefills(item.to, item.message.attempt.request_id, now_s)
            return
        match item:
            case EmitTokens():
                self._emitted(item, now_s)
            case Submit(request):
                self._submitted(request, now_s)
            case Finish() | Reject():
                self._ended(item, now_s)
            case WorkerJoined(config) | Received(_, Joined(config=config)):
                self.configs[config.worker] = config
                self._busy.pop(config.worker, None)
            case WorkerLost(worker):
                self.configs.pop(worker, None)
                self._busy.pop(worker, None)
            case _:
                pass

    def _submitted(self, request: Request, now_s: float) -> None:
        self._rows[request.request_id] = Asked(request)
        self._prompts.add(len(request.prompt), now_s)
        self._requests.add(1, now_s)

    def _prefills(self, worker: WorkerId, request_id: RequestId, now_s: float) -> None:
        row = self._rows.get(request_id)
        if row is None or row.first_s is not None:
            return
        self._leave(row, now_s)
        row.prefill = worker
        busy = self._busy.setdefault(worker, Busy())
        if not busy.prompts:
            busy.since_s = now_s
        busy.prompts.add(request_id)

    def _emitted(self, effect: EmitTokens, now_s: float) -> None:
        row = self._rows.get(effect.request_id)
        if row is None:
            return
        row.told += len(effect.delta.sampled)
        row.decode = effect.worker
        if row.first_s is None:
            row.first_s = now_s
            self._leave(row, now_s, answered=True)

    def _leave(self, row: Asked, now_s: float, answered: bool = False) -> None:
        """It is among its worker's prompts no more. The time since one left it last was of all of them."""
        busy = None if row.prefill is None else self._busy.get(row.prefill)
        if busy is None or row.request.request_id not in busy.prompts:
            return
        busy.prompts.discard(row.request.request_id)
        self.prompt_s.add(max(0.0, now_s - busy.since_s), len(row.request.prompt) if answered else 0)
        busy.since_s = now_s

    def _ended(self, effect: Finish | Reject, now_s: float) -> None:
        row = self._rows.pop(effect.request_id, None)
        if row is None:
            return
        self._leave(row, now_s)
        config = self.configs.get(row.decode) if isinstance(effect, Finish) and row.decode else None
        if config is not None and config.role.decodes and row.first_s is not None:
            self.decode_s.add(_share(row, config) * (now_s - row.first_s), 1)

    # ------------------------------------------------------------ what is predicted

    def load(self, now_s: float, ahead_s: float) -> Load | None:
        """So far ahead; None before anything was measured."""
        prompt_s, decode_s = self.prompt_s.value, self.decode_s.value
        if prompt_s is None or decode_s is None:
            return None
        unanswered = [row for row in self._rows.values() if row.first_s is None]
        waiting = sum(row.prefill is None for row in unanswered)
        tokens = self._prompts.ahead(now_s, ahead_s) + sum(len(row.request.prompt) for row in unanswered) / DRAIN_S
        requests = self._requests.ahead(now_s, ahead_s) + waiting / DRAIN_S
        return Load(tokens * prompt_s, max(requests * decode_s, self._held()))

    def work(self) -> Counter[WorkerId]:
        """Requests by the worker that has them."""
        holders = (row.prefill if row.first_s is None else row.decode for row in self._rows.values())
        return Counter(each for each in holders if each is not None)

    def _held(self) -> float:
        """Decode workers' worth of what runs now."""
        decoders = [each for each in self.configs.values() if each.role.decodes]
        if not decoders:
            return 0.0
        return sum(_share(row, decoders[0]) for row in self._rows.values() if row.first_s is not None)


def _share(row: Asked, config: WorkerConfig) -> float:
    """Of a decode worker that this request holds: of its pages or of its slots, whichever is more."""
    pages = config.pages_for(len(row.request.prompt) + row.told)
    return max(pages / config.num_pages, 1 / config.num_slots)
