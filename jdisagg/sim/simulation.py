"""Virtual time: the very router and workers that serve, a queue of what is to happen, and clients that ask.

How long anything takes is said by who inherits from here. No tokens are computed: a prompt is a length, a drawn token
is always the same, and every output ends by its max_tokens. Equal inputs give equal outcomes, event for event: nothing
here draws lots. Pages have names where the trace has, and workers that keep pages find them again.
"""

from __future__ import annotations

import gc
import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import count as event_numbers
from typing import Any, cast

from jdisagg.core.events import (
    ROUTER,
    DropKV,
    EmitTokens,
    Event,
    Finish,
    InsertKV,
    OpenGates,
    Received,
    Reject,
    Reshape,
    Reshaped,
    RunStep,
    Send,
    SetTimer,
    ShipKV,
    Submit,
    TimerFired,
    WorkerStands,
)
from jdisagg.core.interpreter import interpret
from jdisagg.core.request import Request, RequestId, SamplingParams, WorkerId
from jdisagg.core.router_config import RouterConfig
from jdisagg.core.tiers import DropPages, InsertPages, MovePages, Tier
from jdisagg.core.worker_config import WorkerConfig
from jdisagg.policy.router.router import CAPACITY_TIMER, Router
from jdisagg.policy.worker.worker import Worker
from jdisagg.sim.fast_forward import NamedPrompts, SimulatedSequence
from jdisagg.sim.outcome import SLO, Record
from jdisagg.sim.stops import STOP_TOKEN
from jdisagg.sim.traces import Trace

# What workers did and held, over virtual time: spans for a Gantt, counts of pages for a curve.
#
# A cluster that is given a `SpanLog` writes into it; without one it records nothing. Decode steps that follow
# each other without a gap and with the same batch are one span, so that a log grows with changes and not with
# steps.

SAME_INSTANT_S = 1e-9  # gaps up to this are sums of floats, not idleness


class Work(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    TRANSFER = "transfer"  # KV on its way to the worker


@dataclass(slots=True)
class WorkSpan:
    """One thing that a worker did. amount: prompt tokens, slots of a step, or KV tokens."""

    worker: WorkerId
    work: Work
    start_s: float
    done_s: float
    amount: int

    def continues(self, later: WorkSpan) -> bool:
        """Whether `later` is more of the same decoding."""
        alike = self.work is later.work is Work.DECODE and self.amount == later.amount
        return alike and later.start_s - self.done_s <= SAME_INSTANT_S


class Place(StrEnum):
    """Where KV lies. A page that lies in two places is in both."""

    IN_USE = "HBM, in use"
    KEPT = "HBM, kept"
    DRAM = "DRAM"
    DISK = "disk"
    POOL = "pool"


Curve = list[tuple[float, int]]  # (at_s, how many from then on), an entry a change


@dataclass(slots=True)
class SpanLog:
    """Spans in order of their dispatch; taken pages of each worker; tokens by where they lie, of workers that keep any;
    and tokens that came to HBM from below, or from another worker."""

    spans: list[WorkSpan] = field(default_factory=list)
    pages: dict[WorkerId, Curve] = field(default_factory=dict[WorkerId, Curve])
    lies: dict[tuple[WorkerId, Place], Curve] = field(default_factory=dict[tuple[WorkerId, Place], Curve])
    came: list[tuple[float, Tier, int]] = field(default_factory=list[tuple[float, Tier, int]])  # (at_s, from, tokens)
    num_pages: dict[WorkerId, int] = field(default_factory=dict)
    _last: dict[WorkerId, WorkSpan] = field(default_factory=dict)  # of the worker's devices

    def did(self, span: WorkSpan) -> None:
        last = self._last.get(span.worker)
        if last is not None and last.continues(span):
            last.done_s = span.done_s
            return
        self.spans.append(span)
        if span.work is not Work.TRANSFER:
            self._last[span.worker] = span

    def held(self, worker: WorkerId, at_s: float, pages: int, num_pages: int) -> None:
        """pages: that are not free, of `num_pages`."""
        self.num_pages[worker] = num_pages
        _add(self.pages.setdefault(worker, []), at_s, pages)

    def lie(self, worker: WorkerId, at_s: float, tokens: Mapping[Place, int]) -> None:
        """tokens: that the worker has in each of these places, or the pool where it is the worker."""
        for place, count in tokens.items():
            _add(self.lies.setdefault((worker, place), []), at_s, count)

    @property
    def workers(self) -> list[WorkerId]:
        """All that did or held anything, in the order of their names."""
        return sorted({*self.num_pages, *(span.worker for span in self.spans)})

    def of(self, worker: WorkerId) -> Iterable[WorkSpan]:
        return (span for span in self.spans if span.worker == worker)


def _add(curve: Curve, at_s: float, count: int) -> None:
    if curve and curve[-1][1] == count:
        return
    if curve and curve[-1][0] == at_s:
        curve[-1] = (at_s, count)
    else:
        curve.append((at_s, count))


# The requests of a simulated run: those still to come, and what became of the others.


def requests_of(trace: Trace) -> Iterator[Request]:
    """The trace's rows as requests, named by their place in it."""
    sizes = zip(trace.arrival_s.tolist(), trace.input_tokens.tolist(), trace.output_tokens.tolist(), strict=True)
    for index, ((arrival_s, _, outputs), prompt) in enumerate(zip(sizes, _prompts(trace), strict=True)):
        words = cast(tuple[int, ...], prompt)  # the actors only slice, join, measure it, and ask what its pages are
        yield Request(RequestId(f"r{index:07d}"), words, SamplingParams(max_tokens=outputs), arrival_s)


def _prompts(trace: Trace) -> Iterator[SimulatedSequence]:
    if not trace.block_hashes:
        return map(SimulatedSequence, trace.input_tokens.tolist())
    return map(NamedPrompts(trace.block_tokens).prompt, trace.input_tokens.tolist(), trace.block_hashes)


class Requests:
    """Of an open loop they come at the trace's times; of a closed one when another has ended, and `think_s` later."""

    def __init__(self) -> None:
        self.records: dict[RequestId, Record] = {}
        self.closed, self.think_s = False, 0.0
        self.asks: SLO | None = None  # what each states as its objectives
        self.limit = 0  # output tokens that each asks for where its length is not foreseen; 0: it is
        self.lengths: dict[RequestId, int] = {}  # then, how long each turns out
        self._coming: Iterator[Request] = iter(())

    def begin(self, trace: Trace, closed: bool, think_s: float) -> None:
        self._coming, self.closed, self.think_s = requests_of(trace), closed, think_s

    def next(self, at_s: float) -> Request | None:
        """The next one, booked; of a closed loop it arrives at `at_s`."""
        request = next(self._coming, None)
        if request is None:
            return None
        request = replace(request, arrival_s=at_s) if self.closed else request
        if self.asks is not None:
            request = replace(request, ttft_s=self.asks.ttft_s, tpot_s=self.asks.tpot_s)
        self.book(request, request.arrival_s)
        return self._unforeseen(request) if self.limit else request

    def _unforeseen(self, request: Request) -> Request:
        """It asks for up to the limit, and ends by a stop."""
        length = self.lengths[request.request_id] = request.sampling.max_tokens
        limited = replace(request.sampling, max_tokens=max(self.limit, length), stop_token_ids=(STOP_TOKEN,))
        return replace(request, sampling=limited)

    def book(self, request: Request, arrival_s: float) -> None:
        sizes = len(request.prompt), request.sampling.max_tokens
        self.records[request.request_id] = Record(request.request_id, arrival_s, *sizes)

    def emit(self, effect: EmitTokens, now_s: float) -> None:
        record = self.records[effect.request_id]
        assert not record.ends, f"{effect.request_id} got tokens after its end"
        if not record.told_tokens:
            record.first_s = now_s
        record.told_tokens += len(effect.delta.sampled)
        record.last_s = now_s

    def end(self, effect: Finish | Reject, now_s: float) -> None:
        record = self.records[effect.request_id]
        record.reason = effect.reason if isinstance(effect, Finish) else "rejected"
        record.detail, record.end_s = effect.detail, now_s
        record.ends += 1
        if isinstance(effect, Finish):
            record.ledger = effect.ledger
            record.prefill_worker, record.decode_worker = effect.prefill_worker or "", effect.decode_worker or ""

    def check_all_ended(self) -> None:
        """Asserts that each ended once."""
        wrong = [record for record in self.records.values() if record.ends != 1]
        assert not wrong, f"{wrong[0].request_id} ended {wrong[0].ends} times"


# Events to come, by their times and then in the order of their pushing.

Timed = tuple[float, int, WorkerId, Any]


class EventQueue:
    """Timers lie apart: where all is over, those that are left are of no concern."""

    def __init__(self) -> None:
        self._heap: list[Timed] = []
        self._timers: list[Timed] = []
        self._ties = event_numbers()
        self._armed: dict[tuple[WorkerId, str], float] = {}

    def push(self, at_s: float, actor: WorkerId, event: Any) -> None:
        heapq.heappush(self._heap, (at_s, next(self._ties), actor, event))

    def push_first(self, at_s: float, actor: WorkerId, event: Any) -> None:
        """Before all else of its instant."""
        heapq.heappush(self._heap, (at_s, -1, actor, event))

    def set_timer(self, at_s: float, actor: WorkerId, key: str) -> None:
        """One timer a key: it replaces what was set before."""
        self.arm(at_s, actor, key)
        heapq.heappush(self._timers, (at_s, next(self._ties), actor, TimerFired(key)))

    def arm(self, at_s: float, actor: WorkerId, key: str) -> None:
        """The timer counts only if it fires at that time; whoever arms it apart from `set_timer` pushes it as well."""
        self._armed[actor, key] = at_s

    def is_armed(self, at_s: float, actor: WorkerId, key: str) -> bool:
        return self._armed.get((actor, key)) == at_s

    def disarm(self, actor: WorkerId, key: str) -> None:
        del self._armed[actor, key]

    def forget(self, which: Callable[[WorkerId, Any], bool]) -> None:
        """Nothing of these happens any more."""
        for queue in (self._heap, self._timers):
            queue[:] = [each for each in queue if not which(each[2], each[3])]
            heapq.heapify(queue)
        for actor, key in [*self._armed]:
            if which(actor, TimerFired(key)):
                del self._armed[actor, key]

    def pop(self, until_s: float, is_over: Callable[[], bool]) -> tuple[float, WorkerId, Any] | None:
        """The next thing to happen until then; None where nothing does, or only timers are left and all is over."""
        heap, timers = self._heap, self._timers
        if heap and (not timers or heap[0] < timers[0]):
            first = heap
        elif timers and (heap or not is_over()):
            first = timers
        else:
            return None
        if first[0][0] > until_s:
            return None
        at_s, _, actor, event = heapq.heappop(first)
        return at_s, actor, event


class Simulation:
    """Runs the actors. Messages take `message_s`; steps and transfers what the class that inherits says."""

    def __init__(self, workers: Sequence[WorkerConfig], router: RouterConfig, message_s: float) -> None:
        self.router = Router(router, workers)
        self.workers = {config.worker: Worker(config) for config in workers}
        self.message_s, self.now_s, self.events = message_s, 0.0, 0
        self.requests, self._queue = Requests(), EventQueue()

    def _catch_up_all(self, at_s: float) -> bool:
        """What ended by `at_s` without an event of its own is told now; whether there was anything."""
        return False

    # ------------------------------------------------------------ running

    def _run(self, trace: Trace, until_s: float = math.inf, clients: int = 0, think_s: float = 0.0) -> None:
        """Until all requests have ended and nothing is left to happen, or until `until_s`."""
        caches = any(worker.config.prefix_caching for worker in self.workers.values())
        self.requests.begin(trace if caches else trace.unnamed(), clients > 0, think_s)
        for _ in range(max(1, clients)):
            self._next_arrival()
        with _no_collection():
            while self._run_until(until_s) or self._catch_up_all(until_s):
                continue

    def _run_until(self, until_s: float) -> bool:
        """Whatever happens until then; False where nothing does."""
        happened = False
        while (found := self._queue.pop(until_s, self._all_over)) is not None:
            self.now_s, actor, event = found
            self._take(actor, event)
            happened = True
        return happened

    def _all_over(self) -> bool:
        return not self.router.rows and all(worker.idle for worker in self.workers.values())

    def _take(self, actor: WorkerId, event: Any) -> None:
        kind = type(event)
        if kind is TimerFired:
            if not self._queue.is_armed(self.now_s, actor, event.key):
                return  # moved since
            if actor == ROUTER and event.key != CAPACITY_TIMER and self._catch_up_all(self.now_s - self.message_s):
                self._at(self.now_s, actor, event)  # whether a token is late depends on all that were told before
                return
            self._queue.disarm(actor, event.key)
        elif kind is Submit and not self.requests.closed:
            self._next_arrival()
        self._deliver(actor, event)

    def _deliver(self, actor: WorkerId, event: Event) -> None:
        self.events += 1
        for effect in (self.router if actor == ROUTER else self.workers[actor]).handle(event, self.now_s):
            interpret(actor, effect, self)

    def _at(self, at_s: float, actor: WorkerId, event: Any) -> None:
        self._queue.push(at_s, actor, event)

    def _next_arrival(self, after_s: float = 0.0) -> None:
        """Only the next request is in the queue, however long the trace."""
        request = self.requests.next(self.now_s + after_s)
        if request is not None:
            self._at(request.arrival_s, ROUTER, Submit(request))

    # ------------------------------------------------------------ effects

    def send(self, actor: WorkerId, effect: Send) -> None:
        self._at(self.now_s + self.message_s, effect.to, Received(actor, effect.message))

    def set_timer(self, actor: WorkerId, effect: SetTimer) -> None:
        self._queue.set_timer(effect.at_s, actor, effect.key)

    def run_step(self, actor: WorkerId, effect: RunStep) -> None:
        raise NotImplementedError

    def ship(self, actor: WorkerId, effect: ShipKV) -> None:
        raise NotImplementedError

    def insert(self, actor: WorkerId, effect: InsertKV) -> None:
        """A write into pages takes no time, beside the way there."""

    def drop(self, actor: WorkerId, effect: DropKV) -> None:
        """It takes no time and holds nothing."""

    def open_gates(self, actor: WorkerId, effect: OpenGates) -> None:
        """Only where steps wait at gates."""

    def move_pages(self, actor: WorkerId, effect: MovePages) -> None:
        raise AssertionError("simulated workers have no tiers below HBM")

    def insert_pages(self, actor: WorkerId, effect: InsertPages) -> None:
        """A write into pages takes no time, beside the way there."""

    def drop_pages(self, actor: WorkerId, effect: DropPages) -> None:
        """It takes no time and holds nothing."""

    def emit(self, actor: WorkerId, effect: EmitTokens) -> None:
        self.requests.emit(effect, self.now_s)

    def finish(self, actor: WorkerId, effect: Finish) -> None:
        self._end(effect)

    def reject(self, actor: WorkerId, effect: Reject) -> None:
        self._end(effect)

    def reshape(self, actor: WorkerId, effect: Reshape) -> None:
        """Only who inherits from here knows what a change of role costs: here it is done at once."""
        self._at(self.now_s, actor, Reshaped(effect.config))

    def stands(self, actor: WorkerId, effect: WorkerStands) -> None:
        """It is for people."""

    def _end(self, effect: Finish | Reject) -> None:
        self.requests.end(effect, self.now_s)
        if self.requests.closed:
            self._next_arrival(self.requests.think_s)

    def check_all_ended(self) -> None:
        """Asserts that each request ended once, and that every page is back."""
        assert not self.router.rows, f"still running: {sorted(self.router.rows)[:5]}"
        self.requests.check_all_ended()
        for name, worker in self.workers.items():
            held = worker.config.num_pages - worker.shared.available
            assert worker.idle and held == 0, f"{name} holds {held} pages"


@contextmanager
def _no_collection() -> Iterator[None]:
    """A simulation makes much that lasts and nothing that goes round: to look for cycles takes time and finds none."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
