"""A running stack in this process, as the front ends see it: requests in, deltas out, on the event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from functools import partial

from jdisagg.core.errors import RequestError
from jdisagg.core.events import ROUTER, Cancel, EmitTokens, Finish, Reject, Submit, WorkerStands
from jdisagg.core.journal import Journal
from jdisagg.core.ledger import Ledger
from jdisagg.core.messages import joined
from jdisagg.core.model_config import ModelConfig
from jdisagg.core.request import FinishReason, Request, RequestId, WorkerId
from jdisagg.engine.executor import Executor
from jdisagg.model.tokenizer import Tokenizer
from jdisagg.serve.driver import Actor, LiveDriver, Observer, Outcome
from jdisagg.serve.executors import RemoteWorkers
from jdisagg.serve.metrics import Metrics
from jdisagg.serve.pools import NO_POOLS, Pools
from jdisagg.serve.records import DebugState
from jdisagg.serve.reshaping import Reshaper
from jdisagg.serve.service import Capacity, Draining, ObjectiveUnmet, Rejected, Update
from jdisagg.serve.tier_moves import NO_STORES, WorkerStores

UNREADY = "the server is not ready, has failed, or is going down: running requests finish, new ones are not taken"


class Mailbox:
    """Outcomes of one request that its reader has not yet taken."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop, self._items, self._waiter = loop, deque[Outcome](), asyncio.Event()

    def put(self, item: Outcome) -> None:
        self._items.append(item)
        self._waiter.set()

    async def take(self) -> list[Outcome]:
        """Everything there is, at least one thing."""
        await self._waiter.wait()
        self._waiter.clear()
        items = list(self._items)
        self._items.clear()
        return items


class LocalService:
    """Implements `Service` over a `LiveDriver` that it starts and stops."""

    def __init__(
        self,
        router: Actor,
        workers: Mapping[WorkerId, Actor],
        machines: Mapping[WorkerId, Executor],
        *,
        model_name: str,
        model_config: ModelConfig,
        max_model_len: int,
        tokenizer: Tokenizer,
        observers: Sequence[Observer] = (),
        metrics: Metrics | None = None,
        journal: Journal | None = None,
        debug_state: DebugState | None = None,
        recompiles: Callable[[], int] = lambda: 0,
        remote: RemoteWorkers | None = None,
        able: Callable[[], bool] | None = None,
        sampling_defaults: Mapping[str, float] | None = None,
        reshaper: Reshaper | None = None,
        pools: Callable[[LiveDriver], Pools] = lambda driver: NO_POOLS,
        stores: Mapping[WorkerId, WorkerStores] = NO_STORES,
    ) -> None:
        """`metrics`, `journal` and the records of `debug_state` are among the observers; here they are for the fronts.

        With workers in other processes, `remote` is the way to them and `able` says whether every phase has one.
        `reshaper` makes machines anew, and `pools` what the operator's routes, or its autoscaler, ask for that.
        `sampling_defaults` are what the model says where a client is silent, by whatever way it asks.
        """
        self.model_name, self.model_config = model_name, model_config
        self.max_model_len, self.tokenizer = max_model_len, tokenizer
        self.recompiles, self.metrics, self.journal, self.debug_state = recompiles, metrics, journal, debug_state
        self.sampling_defaults = dict(sampling_defaults or {})
        self.draining, self.why_dead = False, ""  # why the driver has died
        self._on_death = list[Callable[[], object]]()
        self._mailboxes: dict[RequestId, Mailbox] = {}
        self.driver = LiveDriver(
            router,
            workers,
            machines,
            deliver=self._deliver,
            died=self._died,
            observers=observers,
            remote=remote,
            reshaper=reshaper,
            stood=self._stood,
            stores=stores,
        )
        self.pools = pools(self.driver)
        self._able, self._others_may_join = able or (lambda: self.driver.able), remote is not None

    def _stood(self, effect: WorkerStands) -> None:
        self.pools.stood(effect)

    @property
    def ready(self) -> bool:
        return self._open and self._able()

    @property
    def _open(self) -> bool:
        return self.driver.alive and not (self.why_dead or self.draining)

    @property
    def running(self) -> int:
        """Requests that have not ended."""
        return len(self._mailboxes)

    @property
    def alive(self) -> bool:
        """The driver has not died: requests can be served, now or when workers are there."""
        return not self.why_dead

    async def died(self) -> str:
        """Waits until the driver dies, and returns why. Nothing brings it back: the process is to end."""
        told = asyncio.Event()
        self._on_death.append(partial(asyncio.get_running_loop().call_soon_threadsafe, told.set))
        if not self.why_dead:
            await told.wait()
        return self.why_dead

    def now_s(self) -> float:
        return self.driver.now_s()

    def capacity(self) -> Capacity | None:
        return self.metrics.capacity() if self.metrics is not None else None

    def start(self) -> None:
        self.driver.start()
        if self.pools.scaling is not None:
            self.pools.scaling.start(self.driver)

    def stop(self) -> None:
        if self.pools.scaling is not None:
            self.pools.scaling.stop()
        self.driver.stop()
        if self.journal is not None:
            self.journal.close()

    def cancel(self, request_id: RequestId, reason: FinishReason = FinishReason.ABORT) -> None:
        self.driver.post(ROUTER, Cancel(request_id, reason))

    async def stream(self, request: Request) -> AsyncGenerator[Update]:
        """See `Service.stream`."""
        if not (self.ready or (self._open and self._others_may_join)):  # those who wait for a worker wait in the queue
            raise Draining(UNREADY)
        request.check(self.model_config.vocab_size, self.max_model_len)
        if request.request_id in self._mailboxes:
            raise RequestError(f"a request with the id {request.request_id!r} is running", param="request_id")
        mailbox = self._mailboxes[request.request_id] = Mailbox(asyncio.get_running_loop())
        self.driver.post(ROUTER, Submit(request))
        ended = False
        try:
            if self.why_dead:  # since `ready` was asked: who came after `_died` looked round would wait for ever
                raise Draining(UNREADY)
            while not ended:
                update = _joined(await mailbox.take())
                ended = update.finish is not None
                yield update
        except Rejected:
            ended = True
            raise
        finally:
            del self._mailboxes[request.request_id]
            if not ended:
                self.cancel(request.request_id)

    async def drain(self, deadline_s: float) -> None:
        """Takes no new requests, lets running ones finish for `deadline_s` seconds, then cancels the rest."""
        self.draining = True
        end_s = self.now_s() + deadline_s
        while self._mailboxes and self.now_s() < end_s:
            await asyncio.sleep(0.02)
        for request_id in list(self._mailboxes):
            self.cancel(request_id)
        while self._mailboxes and self.now_s() < end_s + 2.0:
            await asyncio.sleep(0.02)

    def _died(self, error: BaseException) -> None:
        self.end(f"the driver stopped: {type(error).__name__}: {error}")

    def end(self, why: str) -> None:
        """Nothing more can be served: every running request ends as an error instead of waiting for ever."""
        self.why_dead = why
        self._deliver(
            [(each, Finish(each, FinishReason.ERROR, Ledger(), detail=self.why_dead)) for each in [*self._mailboxes]]
        )
        for tell in self._on_death:
            with contextlib.suppress(RuntimeError):  # its loop has ended
                tell()

    def _deliver(self, told: list[tuple[RequestId, Outcome]]) -> None:
        """On the driver thread: one wake-up of each event loop an event, however many tokens there are."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Mailbox, Outcome]]] = {}
        for request_id, item in told:
            mailbox = self._mailboxes.get(request_id)
            if mailbox is not None:
                by_loop.setdefault(mailbox.loop, []).append((mailbox, item))
        for loop, items in by_loop.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(_put_all, items)


def _put_all(items: list[tuple[Mailbox, Outcome]]) -> None:
    for mailbox, item in items:
        mailbox.put(item)


def _joined(items: list[Outcome]) -> Update:
    """One update of all outcomes since the last; a `Reject` is raised as `Rejected`."""
    deltas, finish = [], None
    for item in items:
        match item:
            case EmitTokens(delta):
                deltas.append(delta)
            case Finish():
                finish = item
            case Reject():
                raise (ObjectiveUnmet if item.objective else Rejected)(item.detail, item.retry_after_s)
    return Update(joined(deltas), finish)
