"""A simulation in virtual time: the serving router and workers, an event queue, and clients.

Subclasses define how long anything takes. No tokens are computed: a prompt is a length, a sampled token is always
the same, and every output ends by its max_tokens. Equal inputs give equal outcomes, event for event, without
randomness. Pages have hashes if the trace has, and workers with prefix caching find them again.
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

# The work of the workers and their page use over virtual time: spans for a Gantt chart, page counts for a curve.
#
# A cluster with a `SpanLog` writes into it; without one it records nothing. Decode steps without a gap and with the
# same batch are one span, so that a log grows with changes and not with steps.

SAME_INSTANT_S = 1e-9  # gaps up to this are rounding errors of float sums


class WorkKind(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    TRANSFER = "transfer"  # KV on its way to the worker


@dataclass(slots=True)
class WorkSpan:
    """One piece of work of a worker. `amount`: prompt tokens, slots of a step, or KV tokens."""

    worker: WorkerId
    work: WorkKind
    start_s: float
    done_s: float
    amount: int

    def continues(self, later: WorkSpan) -> bool:
        """Returns True if `later` continues the same decode batch without a gap."""
        is_same_batch = self.work is later.work is WorkKind.DECODE and self.amount == later.amount
        return is_same_batch and later.start_s - self.done_s <= SAME_INSTANT_S


class KVLocation(StrEnum):
    """Locations of KV. A page that is in two locations counts in both."""

    IN_USE = "HBM, in use"
    KEPT = "HBM, kept"
    DRAM = "DRAM"
    DISK = "disk"
    POOL = "pool"


Curve = list[tuple[float, int]]  # (at_s, count from then on), one entry per change


@dataclass(slots=True)
class SpanLog:
    """Work spans in order of dispatch, and page use. `pages`: used pages of each worker. `lies`: tokens by location, of
    workers that keep any. `came`: tokens loaded into HBM from a lower tier or from another worker."""

    spans: list[WorkSpan] = field(default_factory=list)
    pages: dict[WorkerId, Curve] = field(default_factory=dict[WorkerId, Curve])
    lies: dict[tuple[WorkerId, KVLocation], Curve] = field(default_factory=dict[tuple[WorkerId, KVLocation], Curve])
    came: list[tuple[float, Tier, int]] = field(default_factory=list[tuple[float, Tier, int]])  # (at_s, from, tokens)
    num_pages: dict[WorkerId, int] = field(default_factory=dict)
    _last: dict[WorkerId, WorkSpan] = field(default_factory=dict)  # last span of the worker's devices

    def did(self, span: WorkSpan) -> None:
        last = self._last.get(span.worker)
        if last is not None and last.continues(span):
            last.done_s = span.done_s
            return
        self.spans.append(span)
        if span.work is not WorkKind.TRANSFER:
            self._last[span.worker] = span

    def held(self, worker: WorkerId, at_s: float, pages: int, num_pages: int) -> None:
        """Records the number of pages that are not free, out of `num_pages`."""
        self.num_pages[worker] = num_pages
        _add(self.pages.setdefault(worker, []), at_s, pages)

    def lie(self, worker: WorkerId, at_s: float, tokens: Mapping[KVLocation, int]) -> None:
        """Records the tokens of the worker in each of these locations; `worker` may be the shared pool."""
        for place, count in tokens.items():
            _add(self.lies.setdefault((worker, place), []), at_s, count)

    @property
    def workers(self) -> list[WorkerId]:
        """Returns all workers with any record, ordered by name."""
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


# The requests of a simulated run: those still to come, and the records of the others.


def requests_of(trace: Trace) -> Iterator[Request]:
    """Yields the trace's rows as requests, named by their index."""
    sizes = zip(trace.arrival_s.tolist(), trace.input_tokens.tolist(), trace.output_tokens.tolist(), strict=True)
    for index, ((arrival_s, _, outputs), prompt) in enumerate(zip(sizes, _prompts(trace), strict=True)):
        tokens = cast(tuple[int, ...], prompt)  # actors only slice, join, measure it and read its page hashes
        yield Request(RequestId(f"r{index:07d}"), tokens, SamplingParams(max_tokens=outputs), arrival_s)


def _prompts(trace: Trace) -> Iterator[SimulatedSequence]:
    if not trace.block_hashes:
        return map(SimulatedSequence, trace.input_tokens.tolist())
    return map(NamedPrompts(trace.block_tokens).prompt, trace.input_tokens.tolist(), trace.block_hashes)


class Requests:
    """The requests of a run: an open loop arrives at the trace's times, a closed one `think_s` after another ended."""

    def __init__(self) -> None:
        self.records: dict[RequestId, Record] = {}
        self.closed, self.think_s = False, 0.0
        self.stated_objectives: SLO | None = None  # objectives that each request states
        self.limit = 0  # output tokens each request asks for if its length is unknown; 0: its length
        self.lengths: dict[RequestId, int] = {}  # the real length of each in that case
        self._trace_requests: Iterator[Request] = iter(())

    def begin(self, trace: Trace, closed: bool, think_s: float) -> None:
        self._trace_requests, self.closed, self.think_s = requests_of(trace), closed, think_s

    def next(self, at_s: float) -> Request | None:
        """Returns the next request and records it; in a closed loop it arrives at `at_s`."""
        request = next(self._trace_requests, None)
        if request is None:
            return None
        request = replace(request, arrival_s=at_s) if self.closed else request
        if self.stated_objectives is not None:
            request = replace(request, ttft_s=self.stated_objectives.ttft_s, tpot_s=self.stated_objectives.tpot_s)
        self.book(request, request.arrival_s)
        return self._with_unknown_length(request) if self.limit else request

    def _with_unknown_length(self, request: Request) -> Request:
        """Makes the request ask for up to the limit and end by a stop token."""
        length = self.lengths[request.request_id] = request.sampling.max_tokens
        limited = replace(request.sampling, max_tokens=max(self.limit, length), stop_token_ids=(STOP_TOKEN,))
        return replace(request, sampling=limited)

    def book(self, request: Request, arrival_s: float) -> None:
        sizes = len(request.prompt), request.sampling.max_tokens
        self.records[request.request_id] = Record(request.request_id, arrival_s, *sizes)

    def emit(self, effect: EmitTokens, now_s: float) -> None:
        record = self.records[effect.request_id]
        assert not record.ends, f"{effect.request_id} got tokens after its end"
        if not record.emitted_tokens:
            record.first_s = now_s
        record.emitted_tokens += len(effect.delta.sampled)
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
        """Asserts that each request ended exactly once."""
        not_once = [record for record in self.records.values() if record.ends != 1]
        assert not not_once, f"{not_once[0].request_id} ended {not_once[0].ends} times"


# Future events, ordered by time and then by insertion.

Timed = tuple[float, int, WorkerId, Any]


class EventQueue:
    """A queue of events. Timers are kept apart: once all work is over, the remaining timers are ignored."""

    def __init__(self) -> None:
        self._heap: list[Timed] = []
        self._timers: list[Timed] = []
        self._ties = event_numbers()
        self._armed: dict[tuple[WorkerId, str], float] = {}

    def push(self, at_s: float, actor: WorkerId, event: Any) -> None:
        heapq.heappush(self._heap, (at_s, next(self._ties), actor, event))

    def push_first(self, at_s: float, actor: WorkerId, event: Any) -> None:
        """Inserts an event before all others of its instant."""
        heapq.heappush(self._heap, (at_s, -1, actor, event))

    def set_timer(self, at_s: float, actor: WorkerId, key: str) -> None:
        """Sets the actor's timer `key`, replacing an earlier one."""
        self.arm(at_s, actor, key)
        heapq.heappush(self._timers, (at_s, next(self._ties), actor, TimerFired(key)))

    def arm(self, at_s: float, actor: WorkerId, key: str) -> None:
        """Makes the timer count only if it fires at `at_s`. Callers other than `set_timer` must also push its event."""
        self._armed[actor, key] = at_s

    def is_armed(self, at_s: float, actor: WorkerId, key: str) -> bool:
        return self._armed.get((actor, key)) == at_s

    def disarm(self, actor: WorkerId, key: str) -> None:
        del self._armed[actor, key]

    def forget(self, which: Callable[[WorkerId, Any], bool]) -> None:
        """Removes all events that `which(actor, event)` selects."""
        for queue in (self._heap, self._timers):
            queue[:] = [each for each in queue if not which(each[2], each[3])]
            heapq.heapify(queue)
        for actor, key in [*self._armed]:
            if which(actor, TimerFired(key)):
                del self._armed[actor, key]

    def pop(self, until_s: float, is_over: Callable[[], bool]) -> tuple[float, WorkerId, Any] | None:
        """Returns the next event until then; None if there is none, or if only timers are left and all work is over."""
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


class SimulationDriver:
    """Runs the actors. Messages take `message_s`; subclasses define the times of steps and transfers."""

    def __init__(self, workers: Sequence[WorkerConfig], router: RouterConfig, message_s: float) -> None:
        self.router = Router(router, workers)
        self.workers = {config.worker: Worker(config) for config in workers}
        self.message_s, self.now_s, self.events = message_s, 0.0, 0
        self.requests, self._queue = Requests(), EventQueue()

    def _catch_up_all(self, at_s: float) -> bool:
        """Delivers what ended by `at_s` without an event of its own. Returns True if there was anything."""
        return False

    def _run(self, trace: Trace, until_s: float = math.inf, clients: int = 0, think_s: float = 0.0) -> None:
        """Runs until all requests have ended and no event is left, or until `until_s`."""
        caches = any(worker.config.prefix_caching for worker in self.workers.values())
        self.requests.begin(trace if caches else trace.unnamed(), clients > 0, think_s)
        for _ in range(max(1, clients)):
            self._next_arrival()
        with _no_collection():
            while self._run_until(until_s) or self._catch_up_all(until_s):
                continue

    def _run_until(self, until_s: float) -> bool:
        """Handles events until then; returns False if there were none."""
        handled = False
        while (next_event := self._queue.pop(until_s, self._all_over)) is not None:
            self.now_s, actor, event = next_event
            self._take(actor, event)
            handled = True
        return handled

    def _all_over(self) -> bool:
        return not self.router.rows and all(worker.idle for worker in self.workers.values())

    def _take(self, actor: WorkerId, event: Any) -> None:
        kind = type(event)
        if kind is TimerFired:
            if not self._queue.is_armed(self.now_s, actor, event.key):
                return  # rearmed since
            if actor == ROUTER and event.key != CAPACITY_TIMER and self._catch_up_all(self.now_s - self.message_s):
                self._at(self.now_s, actor, event)  # a token's lateness depends on everything delivered before
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
        """Queues the next request only, however long the trace is."""
        request = self.requests.next(self.now_s + after_s)
        if request is not None:
            self._at(request.arrival_s, ROUTER, Submit(request))

    def send(self, actor: WorkerId, effect: Send) -> None:
        self._at(self.now_s + self.message_s, effect.to, Received(actor, effect.message))

    def set_timer(self, actor: WorkerId, effect: SetTimer) -> None:
        self._queue.set_timer(effect.at_s, actor, effect.key)

    def run_step(self, actor: WorkerId, effect: RunStep) -> None:
        raise NotImplementedError

    def ship(self, actor: WorkerId, effect: ShipKV) -> None:
        raise NotImplementedError

    def insert(self, actor: WorkerId, effect: InsertKV) -> None:
        """Does nothing: a write into pages takes no time beyond the transfer."""

    def drop(self, actor: WorkerId, effect: DropKV) -> None:
        """Does nothing: dropping takes no time and frees nothing."""

    def open_gates(self, actor: WorkerId, effect: OpenGates) -> None:
        """Does nothing: only simulated steps with KV waits use it."""

    def move_pages(self, actor: WorkerId, effect: MovePages) -> None:
        raise AssertionError("simulated workers have no tiers below HBM")

    def insert_pages(self, actor: WorkerId, effect: InsertPages) -> None:
        """Does nothing: a write into pages takes no time beyond the transfer."""

    def drop_pages(self, actor: WorkerId, effect: DropPages) -> None:
        """Does nothing: dropping takes no time and frees nothing."""

    def emit(self, actor: WorkerId, effect: EmitTokens) -> None:
        self.requests.emit(effect, self.now_s)

    def finish(self, actor: WorkerId, effect: Finish) -> None:
        self._end(effect)

    def reject(self, actor: WorkerId, effect: Reject) -> None:
        self._end(effect)

    def reshape(self, actor: WorkerId, effect: Reshape) -> None:
        """Changes the role at once; subclasses may add its cost."""
        self._at(self.now_s, actor, Reshaped(effect.config))

    def stands(self, actor: WorkerId, effect: WorkerStands) -> None:
        """Does nothing: the role change status is for operators."""

    def _end(self, effect: Finish | Reject) -> None:
        self.requests.end(effect, self.now_s)
        if self.requests.closed:
            self._next_arrival(self.requests.think_s)

    def check_all_ended(self) -> None:
        """Asserts that each request ended once and that every page is free again."""
        assert not self.router.rows, f"still running: {sorted(self.router.rows)[:5]}"
        self.requests.check_all_ended()
        for name, worker in self.workers.items():
            held = worker.config.num_pages - worker.shared.available
            assert worker.idle and held == 0, f"{name} holds {held} pages"


@contextmanager
def _no_collection() -> Iterator[None]:
    """Disables garbage collection: a simulation makes many lasting objects and no cycles."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
