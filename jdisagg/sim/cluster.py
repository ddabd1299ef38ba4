"""A simulated cluster: the serving router and workers, on devices that only compute how long plans take."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jdisagg.core.events import ROUTER, Event, InsertKV, KVArrived, OpenGates, Received, RunStep, Send, ShipKV
from jdisagg.core.request import Attempt, WorkerId
from jdisagg.core.router_config import RouterConfig
from jdisagg.core.steps import KVTransfer, StepPlan, last_layer
from jdisagg.core.tiers import DropPages, MovePages, PagesMoved, Tier
from jdisagg.core.worker_config import WorkerConfig
from jdisagg.sim.cost_models import CostModel
from jdisagg.sim.device import Device, TimeSpan
from jdisagg.sim.fast_forward import PrefixLookups, StepEndSchedule
from jdisagg.sim.links import NETWORK, FairLinks, PartPackedEvent, TransferDueEvent, TransferNetwork
from jdisagg.sim.outcome import SLO, Outcome
from jdisagg.sim.simulation import KVLocation, SimulationDriver, SpanLog, WorkKind, WorkSpan
from jdisagg.sim.stops import StopSchedule
from jdisagg.sim.tiers import SimulatedTiers
from jdisagg.sim.traces import Trace

# Simulated steps with KV waits. Each runs in one piece when the last KV part that it waits for has arrived.


class WaitingSteps:
    """The waiting steps of all workers, by the attempt that they wait for."""

    def __init__(self) -> None:
        self._held: dict[tuple[WorkerId, Attempt], tuple[RunStep, set[int]]] = {}

    def hold(self, actor: WorkerId, effect: RunStep) -> bool:
        """Keeps the step if it has to wait; returns True if so."""
        gates = effect.plan.decode.gates if effect.plan.decode else ()
        if gates:
            parts = {part for gate in gates for part in gate.parts}
            self._held[actor, gates[0].attempt] = (effect, parts)
        return bool(gates)

    def forget(self, actor: WorkerId) -> None:
        """Drops the steps of a lost worker."""
        self._held = {key: step for key, step in self._held.items() if key[0] != actor}

    def take_ready(self, actor: WorkerId, effect: InsertKV | OpenGates) -> RunStep | None:
        """Returns the step that no longer waits for anything, if this effect completed one."""
        waited_for = effect.transfer if isinstance(effect, InsertKV) else effect
        key = actor, waited_for.attempt
        if key not in self._held:
            return None
        step, parts = self._held[key]
        if isinstance(effect, InsertKV):
            parts.discard(effect.transfer.part)
        else:
            parts.clear()
        if parts:
            return None
        del self._held[key]
        return step


PLACE = {Tier.DRAM: KVLocation.DRAM, Tier.DISK: KVLocation.DISK}
POOL = WorkerId("pool")  # the worker name of the shared pool's curve
STEP_END = object()  # queued before all other events of its instant
PATIENT = RouterConfig(
    queue_limit=1 << 40, queue_timeout_s=0.0, prefill_timeout_s=1e9, stall_timeout_s=1e9, handoff_timeout_s=1e6
)  # nothing is refused and nothing times out, so that saturation shows


class Cluster(SimulationDriver):
    """A cluster whose steps and transfers take what `costs` and `links` say; ports are ("out" | "in", worker)."""

    def __init__(
        self,
        workers: Sequence[WorkerConfig],
        costs: Mapping[WorkerId, CostModel],
        links: FairLinks | None = None,
        router: RouterConfig = PATIENT,
        message_s: float = 50e-6,
        latency_s: float = 0.0,
        log: SpanLog | None = None,
        fast_forward: bool = True,
        tiers: SimulatedTiers | None = None,
    ) -> None:
        """Builds the cluster. `message_s` is the time of a message between actors; `latency_s` is added to each KV
        part. `log` is written to. With `fast_forward`, steps that only repeat are run together, with the same outcome
        and fewer events. `tiers` runs page moves if workers have a tier below HBM."""
        super().__init__(workers, router, message_s)
        self.devices = {config.worker: Device(config) for config in workers}
        self.costs, self.log = dict(costs), log
        self.network = TransferNetwork(links or FairLinks(), latency_s)
        self._held, self._steps, self._stops = WaitingSteps(), StepEndSchedule(fast_forward), StopSchedule()
        self._lookups, self.tiers = PrefixLookups(workers), tiers

    @property
    def skipped_steps(self) -> int:
        """Returns the number of steps that had no event of their own."""
        return self._steps.skipped

    def run(
        self,
        trace: Trace,
        until_s: float = math.inf,
        clients: int = 0,
        think_s: float = 0.0,
        asks: SLO | None = None,
        limit: int = 0,
    ) -> Outcome:
        """Runs all of the trace's requests until no event is left (or until `until_s`).

        `clients`: a closed loop of that many clients, whose next request comes `think_s` after the last ended; the
        trace's times are ignored. `asks`: objectives that each request states; one that is predicted to miss them is
        rejected. `limit`: tokens that each request asks for, while it ends earlier by a stop token; 0: as many as it
        generates.
        """
        if limit or asks is not None:  # predictions depend on the progress of each request, so no step is skipped
            self.requests.stated_objectives, self.requests.limit, self._steps = asks, limit, StepEndSchedule(False)
            self._stops = StopSchedule(self.requests.lengths)
        self._run(trace, until_s, clients, think_s)
        records = list(self.requests.records.values())
        span_s = max((record.end_s for record in records), default=0.0)
        busy = {str(name): device.pipeline.busy_s / span_s if span_s else 0.0 for name, device in self.devices.items()}
        moved = self.tiers.moved if self.tiers is not None else {}
        return Outcome(records, self.events, span_s, busy, self._lookups.by_role, moved)

    def _take(self, actor: WorkerId, event: Any) -> None:
        if event is STEP_END:
            self._step_end(actor)
        elif actor == NETWORK:
            self._network(event)
        else:
            super()._take(actor, event)

    def _deliver(self, actor: WorkerId, event: Event) -> None:
        if actor in self._steps.foreseen:
            self._catch_up(actor, self.now_s)
        super()._deliver(actor, event)
        if actor == ROUTER:
            return
        worker, device = self.workers[actor], self.devices[actor]
        if self.log is not None:
            self._note_pages(self.log, actor, event)
        if device.flight:
            due_s = self._steps.look_ahead(actor, worker, device, self.costs[actor])
            if due_s is not None:
                self._queue.push_first(due_s, actor, STEP_END)

    def _note_pages(self, log: SpanLog, actor: WorkerId, event: Event) -> None:
        worker, size = self.workers[actor], self.workers[actor].config.page_size
        pool, use = worker.shared.pool, worker.shared.by_use()
        log.held(actor, self.now_s, pool.num_pages - pool.free_pages, pool.num_pages)
        if not worker.config.prefix_caching:
            return
        tokens_by_location = {KVLocation.IN_USE: use["live"] + use["in_flight"], KVLocation.KEPT: use["cached"]}
        tokens_by_location |= {
            PLACE[tier]: below.num_pages - below.free_pages for tier, below in worker.tiers.pools.items()
        }
        log.lie(actor, self.now_s, {place: size * pages for place, pages in tokens_by_location.items()})
        if self.tiers is not None and self.tiers.pool.room:
            log.lie(POOL, self.now_s, {KVLocation.POOL: size * len(self.tiers.pool.held)})
        if isinstance(event, PagesMoved) and event.move.destination is Tier.HBM:
            log.came.append((self.now_s, event.move.source, size * sum(event.good)))

    def send(self, actor: WorkerId, effect: Send) -> None:
        if self._lookups.by_role:
            self._lookups.on_message(actor, effect)
        super().send(actor, effect)

    def run_step(self, actor: WorkerId, effect: RunStep) -> None:
        if not self._held.hold(actor, effect):
            self._begin_step(actor, effect)

    def insert(self, actor: WorkerId, effect: InsertKV) -> None:
        self._open(actor, effect)

    def open_gates(self, actor: WorkerId, effect: OpenGates) -> None:
        self._open(actor, effect)

    def _open(self, actor: WorkerId, effect: InsertKV | OpenGates) -> None:
        """Starts the step that waited for this effect, if there is one."""
        step = self._held.take_ready(actor, effect)
        if step is not None:
            self._begin_step(actor, step)

    def _begin_step(self, actor: WorkerId, effect: RunStep) -> None:
        plan, device = effect.plan, self.devices[actor]
        span = device.dispatch(self.now_s, plan, self.costs[actor])
        self._note_step(actor, plan, span)
        self._at_layers(actor, effect.ships, span)
        if plan.decode is None:
            self._at(span.done_s, actor, self._stops.done(actor, plan))

    def _note_step(self, actor: WorkerId, plan: StepPlan, span: TimeSpan) -> None:
        if plan.prefill is not None:
            self._note(actor, WorkKind.PREFILL, span, plan.prefill.num_tokens)
        if plan.decode is not None:
            self._note(actor, WorkKind.DECODE, span, plan.decode.most_tokens)

    def _note(self, actor: WorkerId, work: WorkKind, span: TimeSpan, amount: int) -> None:
        if self.log is not None:
            self.log.did(WorkSpan(actor, work, span.start_s, span.done_s, amount))

    def _step_end(self, actor: WorkerId) -> None:
        if not self._steps.is_due(actor, self.now_s):
            return  # another step is due
        if actor in self._steps.foreseen:
            self._catch_up(actor, self.now_s)
            del self._steps.foreseen[actor]
        self._deliver(actor, self._stops.done(actor, self.devices[actor].flight.popleft().plan))

    def _catch_up(self, actor: WorkerId, at_s: float) -> bool:
        """Applies the worker's quiet steps that have ended by `at_s`. Returns True if there were any."""
        caught_up = self._steps.catch_up(actor, self.workers[actor], at_s)
        if caught_up is None:
            return False
        for effect in caught_up.sends:
            self._at(caught_up.ended_s + self.message_s, effect.to, Received(actor, effect.message))
        for rows, span in caught_up.ran:
            self._note(actor, WorkKind.DECODE, span, len(rows.active))
        return True

    def _catch_up_all(self, at_s: float) -> bool:
        caught_up = [self._catch_up(actor, at_s) for actor in self._steps.foreseen]
        return any(caught_up)

    def _at_layers(self, actor: WorkerId, ships: Sequence[KVTransfer], span: TimeSpan) -> None:
        """Sends the parts of each layer group when it is done; layer groups take equal shares of a plan's time."""
        groups = self.workers[actor].config.layer_groups
        ends = [stop for _, stop in groups]
        for transfer in ships:
            layer = last_layer(transfer)
            time_share = (ends.index(int(layer)) + 1) / len(ends) if layer < math.inf else 1.0
            self._at(span.start_s + time_share * (span.done_s - span.start_s), NETWORK, PartPackedEvent(transfer))

    def ship(self, actor: WorkerId, effect: ShipKV) -> None:
        """Sends KV in program order, after the plans that the device already has."""
        self._at(max(self.now_s, self.devices[actor].free_s), NETWORK, PartPackedEvent(effect.transfer))

    def move_pages(self, actor: WorkerId, effect: MovePages) -> None:
        assert self.tiers is not None, f"{actor} moves pages, and nothing says how long that takes"
        if effect.move.source is Tier.PEER:
            self.tiers.expect(actor, effect.move)
            return
        ready_s = max(self.now_s, self.devices[actor].free_s)
        done_s, moved = self.tiers.begin(actor, effect.move, self.now_s, ready_s)
        self._at(done_s, actor, moved)
        lent = self.tiers.lent(actor, moved) if effect.move.destination is Tier.PEER else None
        if lent is not None:
            self._at(done_s, effect.move.peer, lent)

    def drop_pages(self, actor: WorkerId, effect: DropPages) -> None:
        assert self.tiers is not None, f"{actor} drops pages, and has no tiers"
        self.tiers.forget(actor, effect.move)

    def _network(self, event: PartPackedEvent | TransferDueEvent) -> None:
        if isinstance(event, PartPackedEvent):
            size_bytes = self.costs[event.transfer.source].transfer_bytes(event.transfer)
            self.network.start(event.transfer, size_bytes, self.now_s)
        elif self.network.is_void(event):
            return
        for transfer, span in self.network.landed(self.now_s):
            self._note(transfer.destination, WorkKind.TRANSFER, span, transfer.num_tokens)
            self._at(span.done_s, transfer.destination, KVArrived(transfer, True, span.done_s - span.start_s))
        due = self.network.next_done()
        if due is not None:
            self._at(due[0], NETWORK, due[1])
