"""One worker on a bench: its effects carried out on a toy machine at once, its plans read when the test says so."""

from __future__ import annotations

from collections import deque
from typing import Any

from jdisagg.core.events import (
    ROUTER,
    DropKV,
    Effect,
    EngineFailed,
    Event,
    InsertKV,
    KVArrived,
    Received,
    Reshape,
    RunStep,
    Send,
    SetTimer,
    ShipKV,
    StepDone,
    TimerFired,
)
from jdisagg.core.interpreter import Unheeded, interpret
from jdisagg.core.messages import Abort, Ack, Commit, Message, Reserved, StartPrefill
from jdisagg.core.request import Attempt, Request, RequestId, Sampled, WorkerId
from jdisagg.core.steps import KVTransfer, StepPlan, last_layer
from jdisagg.core.worker_config import WorkerConfig
from jdisagg.engine.toy import NOTHING, ToyExecutor, ToyShipment
from jdisagg.policy.cache.prefix_cache import page_hashes
from jdisagg.policy.request_size import tail_tokens
from jdisagg.policy.router.request_state import reserve_for
from jdisagg.policy.worker.worker import Worker
from tests.sim.cases import definition
from tests.steps import decode_runs, prefill_runs

OTHER = WorkerId("other-end")
OF_A_WORKER = (Send, RunStep, ShipKV, SetTimer, InsertKV, DropKV, Reshape)


class Bench(Unheeded):
    """Speaks to the worker as the router and as the other end of every handoff do. Request ids name handoffs."""

    def __init__(self, config: WorkerConfig) -> None:
        self.worker, self.machine, self.now_s = Worker(config), ToyExecutor(config), 0.0
        self.pending: deque[Any] = deque()  # results nobody has read, in order
        self.heard: list[Message] = []  # what the worker has said
        self.effects: list[Effect] = []
        self.timers: dict[str, float] = {}
        self.shipped: dict[str, list[ToyShipment]] = {}
        self.epochs: dict[str, int] = {}
        self.requests: dict[str, Request] = {}  # those that asked for a reservation

    def take(self, event: Event) -> list[Effect]:
        effects = self.worker.handle(event, self.now_s)
        for effect in effects:
            assert isinstance(effect, OF_A_WORKER), f"a worker has no business with {effect!r}"
            interpret(self.worker.config.worker, effect, self)
        self.effects += effects
        self.worker.check_invariants()
        return effects

    def send(self, actor: WorkerId, effect: Send) -> None:
        self.heard.append(effect.message)

    def run_step(self, actor: WorkerId, effect: RunStep) -> None:
        self.pending.append(self._run(effect.plan, deque(effect.ships)))

    def ship(self, actor: WorkerId, effect: ShipKV) -> None:
        self._ship(effect.transfer)

    def set_timer(self, actor: WorkerId, effect: SetTimer) -> None:
        self.timers[effect.key] = effect.at_s

    def insert(self, actor: WorkerId, effect: InsertKV) -> None:
        self.machine.insert(self._shipment(effect.transfer))

    def _run(self, plan: StepPlan, ships: deque[KVTransfer]) -> StepDone:
        def group_done(layers: float) -> None:
            while ships and last_layer(ships[0]) <= layers:
                self._ship(ships.popleft())

        done = self.machine.run(plan, group_done).read()
        group_done(float("inf"))
        return done

    def _ship(self, transfer: KVTransfer) -> None:
        self.shipped.setdefault(transfer.attempt.request_id, []).append(self.machine.ship(transfer, self.machine))

    # ------------------------------------------------------------ the other parties

    def says(self, message: Message, sender: WorkerId = ROUTER) -> list[Effect]:
        return self.take(Received(sender, message))

    def reserve(self, request: Request, *, num_output: int = 0, lease_s: float = 100.0) -> bool:
        """Whether a reservation was given."""
        epoch = self.epochs[request.request_id] = len(self.epochs) + 1
        self.requests[request.request_id] = request
        config = self.worker.config
        names = page_hashes(request.prompt, config.page_size, request.cache_salt) if config.prefix_caching else ()
        attempt = Attempt(request.request_id, epoch)
        self.says(reserve_for(attempt, request, num_output, OTHER, lease_s, names))
        answers = [message for message in self.heard if isinstance(message, Reserved)]
        return bool(answers) and answers[-1].attempt.epoch == epoch

    def commit(self, request: Request, num_parts: int = 1) -> list[Effect]:
        name = request.request_id
        first = Sampled(definition(request)[0])
        length = len(request.prompt)
        tail = request.prompt[length - tail_tokens(request, self.worker.config) :]
        return self.says(Commit(self.attempt(name), first, length, num_parts, tail=tail), OTHER)

    def arrive(self, request: Request, part: int = 0, num_parts: int = 1, *, intact: bool = True) -> list[Effect]:
        """Part `part` of a prompt cut into `num_parts` runs of pages."""
        return self.take(KVArrived(self.transfer(request, part, num_parts), intact))

    def fill(self, request: Request, pages: tuple[int, ...]) -> None:
        """Writes the KV of the prompt's first pages there, as an earlier request with this prefix would have."""
        self.requests[request.request_id] = request
        places = tuple(range(len(pages)))
        transfer = KVTransfer(Attempt(request.request_id, 0), OTHER, self.worker.config.worker, places, pages, 0)
        self.machine.insert(self._shipment(transfer))

    def start(self, request: Request, *, decode: WorkerId = OTHER, **fields: Any) -> list[Effect]:
        epoch = self.epochs.setdefault(request.request_id, len(self.epochs) + 1)
        self.requests[request.request_id] = request
        all_pages = tuple(range(1, 1 + self.worker.config.pages_for(len(request.prompt))))
        pages = fields.pop("decode_pages", all_pages)
        tail = tail_tokens(request, self.worker.config)
        given = {"timeout_s": 100.0, "lease_s": 100.0, "tail_tokens": tail, **fields}
        return self.says(StartPrefill(Attempt(request.request_id, epoch), request, 0, decode, pages, **given))

    def attempt(self, name: str) -> Attempt:
        return Attempt(RequestId(name), self.epochs[name])

    def abort(self, name: str) -> list[Effect]:
        return self.says(Abort(self.attempt(name), "no longer wanted"))

    def ack(self, name: str) -> list[Effect]:
        return self.says(Ack(self.attempt(name)), OTHER)

    def read(self) -> list[Effect]:
        """The oldest result is read."""
        return self.take(self.pending.popleft())

    def read_all(self) -> None:
        while self.pending:
            self.read()

    def fail(self, step_id: int) -> list[Effect]:
        return self.take(EngineFailed(step_id, "it broke"))

    def fire(self, key: str) -> list[Effect]:
        self.now_s = max(self.now_s, self.timers.pop(key))
        return self.take(TimerFired(key))

    # ------------------------------------------------------------ what came of it

    def said(self, kind: type) -> list[Any]:
        return [message for message in self.heard if isinstance(message, kind)]

    @property
    def decode_runs(self) -> list[Any]:
        return decode_runs(self.effects)

    @property
    def prefill_runs(self) -> list[Any]:
        return prefill_runs(self.effects)

    def made(self, kind: type) -> list[Any]:
        return [effect for effect in self.effects if isinstance(effect, kind)]

    def joined(self, name: str) -> tuple[int, ...]:
        """The prompt as its shipped parts hold it, page by page; every group of every page came once."""
        held: dict[tuple[int, int], tuple[int, ...]] = {}
        for shipment in self.shipped.get(name, []):
            runs = self.machine.layer_groups
            groups = [i for i, run in enumerate(runs) if shipment.transfer.layers in (None, run)]
            for group, contents in zip(groups, shipment.contents, strict=True):
                for page, content in zip(shipment.transfer.destination_pages, contents, strict=True):
                    assert (group, page) not in held, f"page {page} of group {group} was shipped twice"
                    held[group, page] = content
        pages = sorted({page for _, page in held})
        rows = [[token for page in pages for token in held[group, page]] for group in range(len(self.machine.groups))]
        assert all(row == rows[0] for row in rows), rows
        return tuple(rows[0][: len(self.requests[name].prompt)])

    @property
    def free_pages(self) -> int:
        return self.worker.shared.pool.free_pages

    def transfer(self, request: Request, part: int = 0, num_parts: int = 1) -> KVTransfer:
        name = request.request_id
        epoch, tokens = self.epochs[name], len(request.prompt)
        reserved = [
            message for message in self.heard if isinstance(message, Reserved) and message.attempt.epoch == epoch
        ]
        pages = reserved[0].pages[: self.worker.config.pages_for(tokens)] if reserved else ()
        each = -(-len(pages) // num_parts)
        run = slice(part * each, (part + 1) * each)
        indices = tuple(range(len(pages)))[run]  # places in the prompt, which `_shipment` reads
        return KVTransfer(self.attempt(name), OTHER, self.worker.config.worker, indices, pages[run], tokens, part)

    def _shipment(self, transfer: KVTransfer) -> ToyShipment:
        """The prompt's KV as a source would have packed it."""
        prompt, size = list(self.requests[transfer.attempt.request_id].prompt), self.worker.config.page_size
        padded = prompt + [NOTHING] * (-len(prompt) % size)
        contents = tuple(tuple(padded[i * size : (i + 1) * size]) for i in transfer.source_pages)
        return ToyShipment(transfer, (contents,) * len(self.machine.groups), 0)
