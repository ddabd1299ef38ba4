"""A cluster in virtual time: the very router and workers that serve, and devices that only say how long plans take.

One heap of timed events. No tokens are computed: a prompt is a length, a drawn token is always the same, and every
output ends by its max_tokens. Equal inputs give equal outcomes, event for event: nothing here draws lots.
"""

from __future__ import annotations

import gc
import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, cast

from jdisagg.core.events import (
    ROUTER,
    DropKV,
    EmitTokens,
    Event,
    Finish,
    InsertKV,
    KVArrived,
    OpenGates,
    Received,
    Reject,
    RunStep,
    Send,
    SetTimer,
    ShipKV,
    Submit,
    TimerFired,
)
from jdisagg.core.request import Request, RequestId, SamplingParams, WorkerId
from jdisagg.core.router_config import RouterConfig
from jdisagg.core.steps import KVTransfer, StepPlan, last_layer
from jdisagg.core.worker_config import WorkerConfig
from jdisagg.policy.router import CAPACITY_TIMER, Router
from jdisagg.policy.worker import Worker
from jdisagg.sim import sequence
from jdisagg.sim.cost_models import CostModel
from jdisagg.sim.device import TOKEN, Device, Span, done
from jdisagg.sim.fast_forward import FastForward
from jdisagg.sim.held_steps import HeldSteps
from jdisagg.sim.links import FairLinks
from jdisagg.sim.outcome import Outcome, Record
from jdisagg.sim.spans import SpanLog, Work, WorkSpan
from jdisagg.sim.traces import Trace

NETWORK = WorkerId("network")
TURN_END = object()  # in the heap before all else of its instant
WORTH = 4  # quiet steps from which on foreseeing them takes less than taking them
PATIENT = RouterConfig(
    queue_limit=1 << 40, queue_timeout_s=0.0, prefill_timeout_s=1e9, stall_timeout_s=1e9, handoff_timeout_s=1e6
)  # nothing is refused and nobody gives up: a saturated cluster is to be seen, not to be spared


@dataclass(frozen=True, slots=True)
class Leave:
    """A part is packed: it takes its place on the network."""

    transfer: KVTransfer


@dataclass(frozen=True, slots=True)
class Through:
    """A flow may be through; of an earlier state of the network it is void."""

    version: int


def requests_of(trace: Trace) -> Iterator[Request]:
    """The trace's rows as requests, named by their place in it."""
    rows = zip(trace.arrival_s.tolist(), trace.input_tokens.tolist(), trace.output_tokens.tolist(), strict=True)
    for index, (arrival_s, inputs, outputs) in enumerate(rows):
        prompt = cast(tuple[int, ...], sequence.Sequence(inputs))  # the actors only slice, join and measure it
        yield Request(RequestId(f"r{index:07d}"), prompt, SamplingParams(max_tokens=outputs), arrival_s)


class Cluster:
    """Hosts the actors; `costs` answers for each worker, `links` are ports named ("out" | "in", worker)."""

    def __init__(
        self,
        workers: Sequence[WorkerConfig],
        costs: Mapping[WorkerId, CostModel],
        links: FairLinks | None = None,
        router: RouterConfig = PATIENT,
        message_s: float = 50e-6,
        latency_s: float = 0.0,
        log: SpanLog | None = None,
        foresee: bool = True,
    ) -> None:
        """message_s: of a word between actors; latency_s: of a part of KV, besides its bytes; log: is written into.

        foresee: steps that only repeat are taken at once; the outcome is the same, told in fewer events.
        """
        self.router = Router(router, workers)
        self.workers = {config.worker: Worker(config) for config in workers}
        self.devices = {config.worker: Device(config) for config in workers}
        self.costs, self.links = dict(costs), links or FairLinks()
        self.message_s, self.latency_s = message_s, latency_s
        self.now_s, self.events, self.repeatable_steps = 0.0, 0, 0  # steps that no event stands for
        self.records: dict[RequestId, Record] = {}
        self.log = log
        self._arrivals: Iterator[Request] = iter(())
        self._closed, self._think_s = False, 0.0  # whether arrivals wait for ends, and how long after them
        self._heap: list[tuple[float, int, WorkerId, Any]] = []
        self._timer_heap: list[tuple[float, int, WorkerId, Any]] = []
        self._ties = count()
        self._held = HeldSteps()
        self._timers: dict[tuple[WorkerId, str], float] = {}
        self._foresee = foresee
        self._foreseen: dict[WorkerId, FastForward] = {}
        self._step_due_s: dict[WorkerId, float] = {}  # when the next step ends that an event stands for
        self._version = 0  # of the network
        self._left_s: dict[KVTransfer, float] = {}
        self._act: dict[type, Callable[[WorkerId, Any], None]] = {
            Send: self._send,
            RunStep: self._run_step,
            ShipKV: self._ship,
            SetTimer: self._set_timer,
            EmitTokens: self._emit,
            Finish: self._finish,
            Reject: self._reject,
            InsertKV: self._let_go,
            DropKV: _nothing,
            OpenGates: self._let_go,
        }

    # ------------------------------------------------------------ running

    def run(self, trace: Trace, until_s: float = math.inf, clients: int = 0, think_s: float = 0.0) -> Outcome:
        """All of the trace's requests, to their ends and until nothing is left to happen (or until `until_s`).

        clients: that many keep one request each, whatever the trace's times are: the next comes `think_s` after the
        last one has ended.
        """
        self._think_s = think_s
        self._arrivals, self._closed = requests_of(trace), clients > 0
        for _ in range(max(1, clients)):
            self._next_arrival()
        with _no_collection():
            while self._go_on(until_s) or self._catch_all_up(until_s):
                continue
        return self._outcome()

    def _go_on(self, until_s: float) -> bool:
        """Whatever happens until then; False where nothing does."""
        heap, timers, stepped = self._heap, self._timer_heap, False
        while heap or timers:
            if heap and (not timers or heap[0] < timers[0]):
                first = heap
            elif heap or not self._all_over():
                first = timers
            else:
                break  # timers of what is over
            if first[0][0] > until_s:
                break
            self.now_s, _, actor, event = heapq.heappop(first)
            self._step(actor, event)
            stepped = True
        return stepped

    def _all_over(self) -> bool:
        return not self.router.rows and all(worker.idle for worker in self.workers.values())

    def _step(self, actor: WorkerId, event: Any) -> None:
        kind = type(event)
        if event is TURN_END:
            self._step_end(actor)
            return
        if kind is TimerFired:
            if self._timers.get((actor, event.key)) != self.now_s:
                return  # moved since
            if actor == ROUTER and event.key != CAPACITY_TIMER and self._catch_all_up(self.now_s - self.message_s):
                self._at(self.now_s, actor, event)  # whether a token is late depends on all that were told before
                return
            del self._timers[actor, event.key]
        elif kind is Submit:
            if not self._closed:
                self._next_arrival()
        elif actor == NETWORK:
            self._network(event)
            return
        self._deliver(actor, event)

    def _deliver(self, actor: WorkerId, event: Event) -> None:
        self.events += 1
        act = self._act
        if actor in self._foreseen:
            self._catch_up(actor, self.now_s)
        for effect in (self.router if actor == ROUTER else self.workers[actor]).handle(event, self.now_s):
            act[type(effect)](actor, effect)
        if self.log is not None and actor != ROUTER:
            pool = self.workers[actor].pool
            self.log.held(actor, self.now_s, pool.num_pages - pool.free_pages, pool.num_pages)
        if actor != ROUTER and self.devices[actor].flight:
            self._look_ahead(actor)

    def _at(self, at_s: float, actor: WorkerId, event: Any) -> None:
        heapq.heappush(self._heap, (at_s, next(self._ties), actor, event))

    def _next_arrival(self, after_s: float = 0.0) -> None:
        """Only the next request is in the heap, however long the trace."""
        request = next(self._arrivals, None)
        if request is not None:
            request = replace(request, arrival_s=self.now_s + after_s) if self._closed else request
            self.records[request.request_id] = Record(
                request.request_id, request.arrival_s, len(request.prompt), request.sampling.max_tokens
            )
            self._at(request.arrival_s, ROUTER, Submit(request))

    # ------------------------------------------------------------ effects

    def _send(self, actor: WorkerId, effect: Send) -> None:
        self._at(self.now_s + self.message_s, effect.to, Received(actor, effect.message))

    def _set_timer(self, actor: WorkerId, effect: SetTimer) -> None:
        self._timers[actor, effect.key] = effect.at_s
        heapq.heappush(self._timer_heap, (effect.at_s, next(self._ties), actor, TimerFired(effect.key)))

    def _run_step(self, actor: WorkerId, effect: RunStep) -> None:
        if not self._held.hold(actor, effect):
            self._begin_step(actor, effect)

    def _let_go(self, actor: WorkerId, effect: InsertKV | OpenGates) -> None:
        """A write into pages takes no time, beside the way there; a step may have waited for it."""
        step = self._held.freed(actor, effect)
        if step is not None:
            self._begin_step(actor, step)

    def _begin_step(self, actor: WorkerId, effect: RunStep) -> None:
        plan, device = effect.plan, self.devices[actor]
        span = device.dispatch(self.now_s, plan, self.costs[actor])
        self._note_step(actor, plan, span)
        self._at_layers(actor, effect.ships, span)
        if plan.decode is None:
            self._at(span.done_s, actor, done(plan))

    def _note_step(self, actor: WorkerId, plan: StepPlan, span: Span) -> None:
        if plan.prefill is not None:
            self._note(actor, Work.PREFILL, span, plan.prefill.num_tokens)
        if plan.decode is not None:
            self._note(actor, Work.DECODE, span, len(plan.decode.active))

    def _note(self, actor: WorkerId, work: Work, span: Span, amount: int) -> None:
        if self.log is not None:
            self.log.did(WorkSpan(actor, work, span.start_s, span.done_s, amount))

    def _at_layers(self, actor: WorkerId, ships: Sequence[KVTransfer], span: Span) -> None:
        """Layer groups take equal shares of a plan's time; the parts of each leave when it is done."""
        groups = self.workers[actor].config.layer_groups
        ends = [stop for _, stop in groups]
        for transfer in ships:
            layer = last_layer(transfer)
            share = (ends.index(int(layer)) + 1) / len(ends) if layer < math.inf else 1.0
            self._at(span.start_s + share * (span.done_s - span.start_s), NETWORK, Leave(transfer))

    def _ship(self, actor: WorkerId, effect: ShipKV) -> None:
        """Packed in program order: after the plans that the device has already."""
        self._at(max(self.now_s, self.devices[actor].free_s), NETWORK, Leave(effect.transfer))

    def _emit(self, _: WorkerId, effect: EmitTokens) -> None:
        record = self.records[effect.request_id]
        assert not record.ends, f"{effect.request_id} got tokens after its end"
        if not record.told_tokens:
            record.first_s = self.now_s
        record.told_tokens += len(effect.sampled)
        record.last_s = self.now_s

    def _finish(self, _: WorkerId, effect: Finish) -> None:
        record = self._end(effect.request_id, effect.reason, effect.detail)
        record.ledger = effect.ledger
        record.prefill_worker, record.decode_worker = effect.prefill_worker or "", effect.decode_worker or ""

    def _reject(self, _: WorkerId, effect: Reject) -> None:
        self._end(effect.request_id, "rejected", effect.detail)

    def _end(self, request_id: RequestId, reason: str, detail: str) -> Record:
        record = self.records[request_id]
        record.reason, record.detail, record.end_s = reason, detail, self.now_s
        record.ends += 1
        if self._closed:
            self._next_arrival(self._think_s)
        return record

    # ------------------------------------------------------------ steps

    def _look_ahead(self, actor: WorkerId) -> None:
        """An event for the next step that does not end quietly; what was foreseen stands while the worker says so."""
        worker, device, seen = self.workers[actor], self.devices[actor], self._foreseen.get(actor)
        quiet = worker.repeatable_steps if self._foresee else 0
        if seen is not None and seen.stands(quiet):
            return
        due_s = device.flight[0].done_s
        if quiet < WORTH:
            self._foreseen.pop(actor, None)
        else:
            seen = self._foreseen[actor] = FastForward(device, self.costs[actor], worker.next_repeated_rows(), quiet)
            due_s = seen.next_s
        if self._step_due_s.get(actor) != due_s:
            self._step_due_s[actor] = due_s
            heapq.heappush(self._heap, (due_s, -1, actor, TURN_END))

    def _step_end(self, actor: WorkerId) -> None:
        if self._step_due_s.get(actor) != self.now_s:
            return  # it is another that is due
        del self._step_due_s[actor]
        if actor in self._foreseen:
            self._catch_up(actor, self.now_s)
            del self._foreseen[actor]
        self._deliver(actor, done(self.devices[actor].flight.popleft().plan))

    def _catch_up(self, actor: WorkerId, at_s: float) -> bool:
        """The worker's quiet steps that have ended by now end in its books; whether there were any."""
        seen = self._foreseen[actor]
        steps = seen.ended(at_s)
        if not steps:
            return False
        effects = self.workers[actor].end_repeated_steps(steps, TOKEN)
        told_s = seen.done_s[seen.taken + steps - 1] + self.message_s
        for effect in effects:
            if isinstance(effect, Send):
                self._at(told_s, effect.to, Received(actor, effect.message))
        for rows, span in seen.take(steps, [effect.plan for effect in effects if isinstance(effect, RunStep)]):
            self._note(actor, Work.DECODE, span, len(rows.active))
        self.repeatable_steps += steps
        return True

    def _catch_all_up(self, at_s: float) -> bool:
        caught_up = [self._catch_up(actor, at_s) for actor in self._foreseen]
        return any(caught_up)

    # ------------------------------------------------------------ the network

    def _network(self, event: Leave | Through) -> None:
        if isinstance(event, Leave):
            transfer = event.transfer
            size_bytes = self.costs[transfer.source].transfer_bytes(transfer)
            ports = (("out", transfer.source), ("in", transfer.destination))
            self._left_s[transfer] = self.now_s
            self.links.start(transfer, ports, size_bytes, self.now_s)
        elif event.version != self._version:
            return
        for landed in self.links.finish(self.now_s):
            self._land(cast(KVTransfer, landed))
        self._version += 1
        if self.links.flows:
            self._at(self.links.next_end_s, NETWORK, Through(self._version))

    def _land(self, transfer: KVTransfer) -> None:
        landed_s = self.now_s + self.latency_s
        left_s = self._left_s.pop(transfer)
        self._note(transfer.destination, Work.TRANSFER, Span(left_s, landed_s), transfer.num_tokens)
        self._at(landed_s, transfer.destination, KVArrived(transfer, True, landed_s - left_s))

    # ------------------------------------------------------------ what came of it

    def _outcome(self) -> Outcome:
        records = list(self.records.values())
        span_s = max((record.end_s for record in records), default=0.0)
        busy = {str(name): device.pipeline.busy_s / span_s if span_s else 0.0 for name, device in self.devices.items()}
        return Outcome(records, self.events, span_s, busy)

    def check_all_ended(self) -> None:
        """Asserts that each request ended once, and that every page is back."""
        assert not self.router.rows, f"still running: {sorted(self.router.rows)[:5]}"
        wrong = [record for record in self.records.values() if record.ends != 1]
        assert not wrong, f"{wrong[0].request_id} ended {wrong[0].ends} times"
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


def _nothing(_: WorkerId, effect: DropKV) -> None:
    """It takes no time and holds nothing."""
