"""A whole cluster in virtual time: the same router and workers as live, over toy machines, driven by one heap.

After every event the pages of every worker are counted. `run` returns when nothing is left to happen but timers that
no longer matter, so a request that hangs is a request that a test finds unfinished.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count

from jdisagg.core.events import (
    ROUTER,
    Cancel,
    DropKV,
    Effect,
    EmitTokens,
    EngineFailed,
    Event,
    Finish,
    InsertKV,
    KVArrived,
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
    WorkerLost,
    WorkerStands,
)
from jdisagg.core.interpreter import interpret
from jdisagg.core.journal import Journal
from jdisagg.core.request import Request, RequestId, Sampled, WorkerId
from jdisagg.core.router_config import RouterConfig
from jdisagg.core.steps import KVTransfer, StepPlan, last_layer
from jdisagg.core.tiers import DropPages, InsertPages, MovePages, Tier
from jdisagg.core.worker_config import WorkerConfig
from jdisagg.engine.executor import PendingStep
from jdisagg.engine.runner import HeldStep
from jdisagg.engine.toy import ToyError, ToyExecutor, ToyShipment
from jdisagg.policy.router.router import Router
from jdisagg.policy.worker.worker import Worker
from tests.policy.tier_yard import TierYard
from tests.sim.costs import Costs
from tests.sim.fault_injector import FaultInjector, Faults

MAX_EVENTS = 200_000
RESHAPE_S = 0.5


class World:
    """Hosts the actors and their machines; `now_s` is virtual."""

    def __init__(
        self,
        workers: Sequence[WorkerConfig],
        router: RouterConfig | None = None,
        costs: Costs | None = None,
        faults: Faults | None = None,
        journal: Journal | None = None,
        yard: TierYard | None = None,
    ) -> None:
        self.router = Router(router or RouterConfig(), workers)
        self.workers = {config.worker: Worker(config) for config in workers}
        self.machines = {config.worker: ToyExecutor(config) for config in workers}
        self.costs, self.injector, self.journal = costs or Costs(), FaultInjector(faults or Faults()), journal
        self.yard = yard or TierYard()
        self.now_s = 0.0
        self.told: dict[RequestId, list[Sampled]] = {}  # what each client got
        self.scored: dict[RequestId, list[Sampled]] = {}  # prompt logprobs
        self.finished: dict[RequestId, list[Finish]] = {}
        self.rejected: dict[RequestId, list[Reject]] = {}
        self.effects: list[tuple[float, WorkerId, Effect]] = []  # all, in order
        self.stood: list[WorkerStands] = []
        self._heap: list[tuple[float, int, WorkerId, Event]] = []
        self._ties = count()
        self._timers: dict[tuple[WorkerId, str], float] = {}
        self._busy_until_s: dict[WorkerId, float] = {}
        self._last_word_s: dict[tuple[WorkerId, WorkerId], float] = {}
        self._shipments: dict[KVTransfer, ToyShipment] = {}
        self._link_free_s: dict[tuple[WorkerId, WorkerId], float] = {}
        self._held: list[tuple[WorkerId, StepPlan, HeldStep]] = []
        self._failing: Counter[WorkerId] = Counter()  # failures that their actors have not heard of

    # ------------------------------------------------------------ the script

    def submit(self, request: Request, at_s: float = 0.0) -> None:
        self._at(at_s, ROUTER, Submit(request))

    def cancel(self, request_id: RequestId, at_s: float) -> None:
        self._at(at_s, ROUTER, Cancel(request_id))

    def lose(self, worker: WorkerId, at_s: float) -> None:
        """The worker is gone at `at_s`; the router is told at once."""
        self._at(at_s, ROUTER, WorkerLost(worker))

    def kill(self, worker: WorkerId, at_s: float) -> None:
        """The worker is gone at `at_s` and nobody is told: deadlines must find it out."""
        self.run(at_s)
        self.workers.pop(worker, None)

    def run(self, until_s: float = float("inf"), watch: Callable[[], None] | None = None) -> None:
        """Until nothing is left to happen (timers of what is over do not count), or until `until_s`."""
        for _ in range(MAX_EVENTS):
            if not self._heap or self._heap[0][0] > until_s:
                break
            self.step()
            if watch is not None:
                watch()
        else:
            raise AssertionError(f"{MAX_EVENTS} events and no end: {sorted(self.router.rows)} still run")
        if until_s != float("inf"):
            self.now_s = max(self.now_s, until_s)

    def step(self) -> None:
        """Takes the next event; then counts every page."""
        at_s, _, actor, event = heapq.heappop(self._heap)
        if isinstance(event, TimerFired):
            if self._timers.get((actor, event.key)) != at_s:
                return  # moved since
            del self._timers[actor, event.key]
        if actor not in self.workers and actor != ROUTER:
            return  # it was lost
        self.now_s = max(self.now_s, at_s)
        self._deliver(actor, event)
        for worker in self.workers.values():
            worker.check_invariants()

    def _deliver(self, actor: WorkerId, event: Event) -> None:
        if isinstance(event, WorkerLost):
            self.workers.pop(event.worker, None)
        if isinstance(event, EngineFailed) and event.step_id is not None:
            self._failing[actor] -= 1
        effects = (self.router if actor == ROUTER else self.workers[actor]).handle(event, self.now_s)
        if self.journal is not None:
            self.journal.record(self.now_s, actor, event, effects)
        for effect in effects:
            self.effects.append((self.now_s, actor, effect))
            interpret(actor, effect, self)

    # ------------------------------------------------------------ effects

    def ship(self, actor: WorkerId, effect: ShipKV) -> None:
        self._ship(actor, effect.transfer, max(self.now_s, self._busy_until_s.get(actor, 0.0)))

    def insert(self, actor: WorkerId, effect: InsertKV) -> None:
        self.machines[actor].insert(self._shipments.pop(effect.transfer))
        self._run_on(actor)

    def open_gates(self, actor: WorkerId, effect: OpenGates) -> None:
        self.machines[actor].open_gates(effect.attempt)
        self._run_on(actor)

    def drop(self, actor: WorkerId, effect: DropKV) -> None:
        self._shipments.pop(effect.transfer, None)

    def move_pages(self, actor: WorkerId, effect: MovePages) -> None:
        move = effect.move
        if move.source is Tier.PEER and move.asked is None:
            self.yard.coming[actor, move.owner] = move
            return
        answer = self.yard.begin(actor, self.machines[actor], move)
        if answer is None:
            return
        took_s, event = answer
        self._at(self.now_s + took_s, actor, event)
        if move.destination is Tier.PEER and any(event.good) and move.peer in self.workers:
            if self.injector.occurs(self.injector.faults.lose_transfer):
                return
            arrived = self.yard.arrive(actor, self.machines[move.peer], move, took_s)
            if arrived is not None:
                self._at(self.now_s + took_s + self.costs.message_s, move.peer, arrived)

    def insert_pages(self, actor: WorkerId, effect: InsertPages) -> None:
        self.machines[actor].insert(self.yard.read.pop((actor, effect.move)))

    def drop_pages(self, actor: WorkerId, effect: DropPages) -> None:
        self.yard.read.pop((actor, effect.move), None)
        self.yard.coming.pop((actor, effect.move.owner), None)

    def set_timer(self, actor: WorkerId, effect: SetTimer) -> None:
        self._timers[actor, effect.key] = effect.at_s
        self._at(effect.at_s, actor, TimerFired(effect.key))

    def emit(self, actor: WorkerId, effect: EmitTokens) -> None:
        assert effect.request_id not in self.finished, f"{effect.request_id} got tokens after its end"
        self.told.setdefault(effect.request_id, []).extend(effect.delta.sampled)
        self.scored.setdefault(effect.request_id, []).extend(effect.delta.prompt)

    def finish(self, actor: WorkerId, effect: Finish) -> None:
        self.finished.setdefault(effect.request_id, []).append(effect)

    def reject(self, actor: WorkerId, effect: Reject) -> None:
        self.rejected.setdefault(effect.request_id, []).append(effect)

    def reshape(self, actor: WorkerId, effect: Reshape) -> None:
        """Another machine, whose pages hold nothing of the last one's, `RESHAPE_S` later."""
        self.machines[actor] = ToyExecutor(effect.config)
        self._at(self.now_s + RESHAPE_S, actor, Reshaped(effect.config))

    def stands(self, actor: WorkerId, effect: WorkerStands) -> None:
        self.stood.append(effect)

    def send(self, sender: WorkerId, effect: Send) -> None:
        """Messages of one pair stay in order; each may be late, lost or doubled."""
        faults, to, event = self.injector.faults, effect.to, Received(sender, effect.message)
        if self.injector.occurs(faults.lose_message):
            return
        for _ in range(2 if self.injector.occurs(faults.double_message) else 1):
            at_s = self.now_s + self.costs.message_s + self.injector.delay_s()
            at_s = max(at_s, self._last_word_s.get((sender, to), 0.0))
            self._last_word_s[sender, to] = at_s
            self._at(at_s, to, event)

    def run_step(self, actor: WorkerId, effect: RunStep) -> None:
        """A machine takes steps in order and one after the other; a failed one costs nothing and changes nothing.

        Steps that its worker made before it heard of the failure may build on the failed one, so they fail as well.
        """
        plan = effect.plan
        start_s = max(self.now_s, self._busy_until_s.get(actor, 0.0))
        done_s = start_s + self.costs.of_step(plan)
        try:
            if self._failing[actor] > 0 or self.injector.occurs(self.injector.faults.fail_plan):
                raise ToyError(f"an injected fault in step {plan.step_id}")
            pending = self._dispatch(actor, effect, start_s, done_s)
            if isinstance(pending, HeldStep) and not pending.done:
                self._held.append((actor, plan, pending))
                return
            result = pending.read()
        except ToyError as fault:
            self._failing[actor] += 1
            self._at(self.now_s, actor, EngineFailed(plan.step_id, str(fault)))
            return
        self._busy_until_s[actor] = done_s
        self._at(done_s, actor, result)

    def _run_on(self, actor: WorkerId) -> None:
        """Steps that wait at no gate any more take their time from now on."""
        for each in [each for each in self._held if each[0] == actor and each[2].done]:
            self._held.remove(each)
            done_s = max(self.now_s, self._busy_until_s.get(actor, 0.0)) + self.costs.of_step(each[1])
            self._busy_until_s[actor] = done_s
            self._at(done_s, actor, each[2].read())

    def _dispatch(self, actor: WorkerId, effect: RunStep, start_s: float, done_s: float) -> PendingStep:
        """Layer groups take equal shares of the step's time; the parts of each leave when it is done."""
        machine, waiting = self.machines[actor], sorted(effect.ships, key=last_layer)
        dispatched = count(1)

        def group_done(layers: float, at_s: float | None = None) -> None:
            if at_s is None:
                at_s = start_s + (done_s - start_s) * next(dispatched) / len(machine.groups)
            while waiting and last_layer(waiting[0]) <= layers:
                self._ship(actor, waiting.pop(0), at_s)

        pending = machine.run(effect.plan, group_done)
        group_done(float("inf"), done_s)
        return pending

    def _ship(self, actor: WorkerId, transfer: KVTransfer, ready_s: float) -> None:
        """A part leaves when it is packed and the link is free, and lands a transfer's time later."""
        if transfer.destination not in self.machines or self.injector.occurs(self.injector.faults.lose_transfer):
            return
        if self.injector.occurs(self.injector.faults.fail_transfer):
            failure = EngineFailed(None, "an injected transfer fault", transfer.attempt, transfer.part)
            self._at(ready_s, actor, failure)
            return
        machine, link = self.machines[actor], (actor, transfer.destination)
        shipment = machine.ship(transfer, self.machines[transfer.destination])
        if self.injector.occurs(self.injector.faults.flip_bit):
            shipment = shipment.flipped()
        self._shipments[transfer] = shipment
        wire_s = self.costs.of_transfer(transfer, machine.num_layers)
        landed_s = max(ready_s, self._link_free_s.get(link, 0.0)) + wire_s
        self._link_free_s[link] = landed_s
        self._at(landed_s, transfer.destination, KVArrived(transfer, shipment.intact(), wire_s))

    def _at(self, at_s: float, actor: WorkerId, event: Event) -> None:
        heapq.heappush(self._heap, (at_s, next(self._ties), actor, event))

    # ------------------------------------------------------------ what came of it

    @property
    def waiting(self) -> bool:
        """Whether anything is left to happen."""
        return bool(self._heap)

    def output(self, request_id: RequestId) -> list[int]:
        return [sampled.token for sampled in self.told.get(request_id, [])]

    def check_all_ended(self) -> None:
        """Asserts that nothing is left anywhere: every page is back, no row, no abort unanswered."""
        assert not self.router.rows, f"still running: {sorted(self.router.rows)}"
        for name, worker in self.workers.items():
            held = worker.config.num_pages - worker.shared.available
            assert worker.idle and held == 0, f"{name} holds {held} pages"
