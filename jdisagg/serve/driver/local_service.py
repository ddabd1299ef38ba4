"""The service of this process, and answers as streams of text pieces, which HTTP, gRPC and Python read from.

`LocalService` connects front ends on the event loop with the driver's thread: requests in, token deltas out.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial

from jdisagg.core.errors import JdisaggError, RequestError
from jdisagg.core.events import ROUTER, Cancel, EmitTokens, Finish, Reject, Submit, WorkerStands
from jdisagg.core.journal import Journal
from jdisagg.core.ledger import Ledger
from jdisagg.core.messages import joined
from jdisagg.core.model_config import ModelConfig
from jdisagg.core.request import FinishReason, Request, RequestId, WorkerId
from jdisagg.engine.executor import Executor
from jdisagg.model.tokenizer import Tokenizer
from jdisagg.serve.deploy.pools import NO_POOLS, Pools
from jdisagg.serve.driver.driver import Actor, LiveDriver, Observer, Outcome
from jdisagg.serve.driver.executors import RemoteWorkers
from jdisagg.serve.driver.kv_moves import NO_STORES, WorkerStores
from jdisagg.serve.driver.role_change import Reshaper
from jdisagg.serve.driver.service import Capacity, Draining, NotLeader, ObjectiveUnmet, Rejected, Service, Update
from jdisagg.serve.frontends.structured import explain, with_beginning
from jdisagg.serve.frontends.text import Piece, TextOptions, Transcript
from jdisagg.serve.observability.metrics import Metrics
from jdisagg.serve.observability.records import DebugState

Deliver = Callable[[list[tuple[RequestId, Outcome]]], None]
UNREADY = "the server is not ready, has failed, or is going down: running requests finish, new ones are not taken"


class Mailbox:
    """Outcomes of one request that its reader has not taken yet."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop, self._items, self._waiter = loop, deque[Outcome](), asyncio.Event()

    def put(self, item: Outcome) -> None:
        self._items.append(item)
        self._waiter.set()

    async def take(self) -> list[Outcome]:
        """Waits for an outcome and returns all that have come."""
        await self._waiter.wait()
        self._waiter.clear()
        items = list(self._items)
        self._items.clear()
        return items


class LocalService:
    """Implements `Service` over a `LiveDriver` that it starts and stops."""

    deliver_remote: Deliver | None = None  # takes the outcomes of every event, on the driver's thread, for fronts

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
        fingerprint: str = "",
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
        standby_error: Callable[[], NotLeader | None] = lambda: None,
    ) -> None:
        """`metrics`, `journal` and `debug_state` are for the front ends; their `observe` must be among the observers.

        `remote` reaches workers of other processes; `able` then returns True if every phase has a worker. `reshaper`
        rebuilds executors for role changes. `standby_error` returns the error of requests to a standby router.
        """
        self.model_name, self.model_config, self.fingerprint = model_name, model_config, fingerprint
        self.max_model_len, self.tokenizer = max_model_len, tokenizer
        self.recompiles, self.metrics, self.journal, self.debug_state = recompiles, metrics, journal, debug_state
        self.sampling_defaults = dict(sampling_defaults or {})
        self.draining, self.why_dead = False, ""  # `why_dead`: the reason why the driver died
        self._on_death = list[Callable[[], object]]()
        self._mailboxes: dict[RequestId, Mailbox] = {}
        self.driver = LiveDriver(
            router,
            workers,
            machines,
            deliver=self._deliver_all,
            died=self._died,
            observers=observers,
            remote=remote,
            reshaper=reshaper,
            stood=self._stood,
            stores=stores,
        )
        self.pools, self._standby_error = pools(self.driver), standby_error
        self._able, self._others_may_join = able or (lambda: self.driver.able), remote is not None

    def _stood(self, effect: WorkerStands) -> None:
        self.pools.stood(effect)

    @property
    def ready(self) -> bool:
        """True if requests are answered; a standby router answers them with the leader's address."""
        return self._is_open and (self._able() or self._standby_error() is not None)

    @property
    def _is_open(self) -> bool:
        return self.driver.alive and not (self.why_dead or self.draining)

    @property
    def running(self) -> int:
        return len(self._mailboxes)

    @property
    def alive(self) -> bool:
        """True unless the driver died: requests can be served, now or when workers have joined."""
        return not self.why_dead

    async def died(self) -> str:
        """Waits until the driver dies and returns the reason. A driver cannot be restarted: the process must exit."""
        death = asyncio.Event()
        self._on_death.append(partial(asyncio.get_running_loop().call_soon_threadsafe, death.set))
        if not self.why_dead:
            await death.wait()
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
        if not (self.ready or (self._is_open and self._others_may_join)):  # requests queue until a worker joins
            raise Draining(UNREADY)
        if (not_leader := self._standby_error()) is not None:
            raise not_leader
        request.check(self.model_config.vocab_size, self.max_model_len)
        if request.request_id in self._mailboxes:
            raise RequestError(f"a request with the id {request.request_id!r} is running", param="request_id")
        mailbox = self._mailboxes[request.request_id] = Mailbox(asyncio.get_running_loop())
        self.driver.post(ROUTER, Submit(request))
        ended = False
        try:
            if self.why_dead:  # after `ready` was read: a mailbox added after `end` gets no outcome
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
        """Ends every running request with an error; no further request can be served."""
        self.why_dead = why
        self._deliver(
            [(each, Finish(each, FinishReason.ERROR, Ledger(), detail=self.why_dead)) for each in [*self._mailboxes]]
        )
        for notify in self._on_death:
            with contextlib.suppress(RuntimeError):  # its event loop has ended
                notify()

    def _deliver_all(self, outcomes: list[tuple[RequestId, Outcome]]) -> None:
        """Hands the outcomes of one event to the clients of this process and to those of front processes."""
        self._deliver(outcomes)
        if self.deliver_remote is not None:
            self.deliver_remote(outcomes)

    def _deliver(self, outcomes: list[tuple[RequestId, Outcome]]) -> None:
        """Puts outcomes into mailboxes, with one wake-up per event loop. Called on the driver thread."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Mailbox, Outcome]]] = {}
        for request_id, item in outcomes:
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
    """Joins outcomes of one request into one update. Raises Rejected or ObjectiveUnmet for a `Reject`."""
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


# Answers as streams of text pieces.

CANCEL_WAIT_S = 2.0  # the longest wait for the ledger of an answer that a stop string ended
RETRY_S = 0.5  # the longest pause before a rejected answer is tried again while others of its request run


class AnswerFailed(JdisaggError):
    """An admitted request ended without its answer; `finish` has the reason."""

    def __init__(self, finish: Finish) -> None:
        super().__init__(finish.detail or f"the request ended as {finish.reason.value!r}")
        self.finish = finish


class GrammarEnded(AnswerFailed):
    """The answer ended early because its grammar went over its limits and allowed no token."""


def failure_of(piece: Piece) -> AnswerFailed | None:
    """Returns the error of an aborted answer's last piece; None if the answer goes on or is complete."""
    if piece.finish_reason != "abort" or piece.finish is None:
        return None
    return GrammarEnded(piece.finish) if piece.by_grammar else AnswerFailed(piece.finish)


async def pieces(service: Service, request: Request, options: TextOptions) -> AsyncGenerator[Piece]:
    """Yields the answer to one request; the last piece has a `finish_reason`. Closing early cancels the request.

    Raises what `Service.stream` raises, before the first piece.
    """
    transcript, sampled = Transcript(service.tokenizer, options), list[int]()
    prefixed = await with_beginning(request, service)
    async with aclosing(service.stream(prefixed)) as updates:
        async for update in updates:
            piece = transcript.take(update)
            if request.sampling.grammar:
                sampled += [each.token for each in update.delta.sampled]
                await explain(piece, request.sampling.grammar, sampled, service)
            if transcript.stopped and piece.finish is None:
                service.cancel(request.request_id, FinishReason.STOP)
                piece.finish = await _finish_of(updates)
            yield piece
            if piece.finish_reason is not None:
                return


async def _finish_of(updates: AsyncGenerator[Update]) -> Finish | None:
    """Returns the finish of a request that was just cancelled; None after CANCEL_WAIT_S seconds."""
    try:
        async with asyncio.timeout(CANCEL_WAIT_S):
            async for update in updates:
                if update.finish is not None:
                    return update.finish
    except TimeoutError:
        return None
    return None


Batch = list[tuple[int, Piece]]  # pieces with their answer's index
Arrival = tuple[int, Piece | Exception | None]  # None if the answer is complete
Start = Callable[[], AsyncGenerator[Piece]]  # starts an answer; called again after a rejection


def check_work(service: Service, requests: Sequence[Request], queue_timeout_s: float | None, runs_on: bool) -> None:
    """Raises RequestError if the last of these answers cannot start within `queue_timeout_s` even on an idle stack.

    With `runs_on` no answer ends before `max_tokens`; otherwise each may end after `min_tokens`.
    """
    capacity = service.capacity()
    if queue_timeout_s is None or capacity is None:
        return
    sampling = requests[0].sampling
    tokens = sampling.max_tokens if runs_on else max(1, sampling.min_tokens)
    least_s = capacity.least_s(len(requests), tokens)
    if least_s > queue_timeout_s:
        raise RequestError(
            f"{len(requests)} answers of {tokens} tokens, {capacity.slots} at a time and {capacity.token_s:.4f} s a"
            f" token at best: the last would begin after {least_s:.1f} s, over the queue's {queue_timeout_s:g} s",
            param="n",
        )


def answers(
    service: Service, requests: Sequence[Request], options: TextOptions, at_once: int, queue_timeout_s: float | None
) -> AsyncGenerator[Batch]:
    """Yields pieces of the answers to one client's requests. A single request queues until its own deadline.

    Of several, at most `at_once` run at a time. They wait for each other without limit, and for other clients'
    requests `queue_timeout_s` seconds: AnswerFailed is raised if none of them ran for so long.
    """
    if len(requests) == 1:
        return merged([partial(pieces, service, requests[0], options)], 1)
    capacity = service.capacity()
    at_once = min(at_once, capacity.slots) if capacity else at_once
    return merged([partial(_start_now, service, each, options) for each in requests], at_once, queue_timeout_s)


def _start_now(service: Service, request: Request, options: TextOptions) -> AsyncGenerator[Piece]:
    """Sets the arrival time when the answer starts, so that one client's batch does not go ahead of later requests."""
    return pieces(service, replace(request, arrival_s=service.now_s(), queue_deadline_s=math.inf), options)


@dataclass(slots=True)
class _AnswerQueue:
    """The state of several answers that share a limited number of slots."""

    patience_s: float | None
    inbox: asyncio.Queue[Arrival] = field(default_factory=asyncio.Queue)
    running: set[int] = field(default_factory=set)  # answers that started and have not ended

    async def next(self) -> list[Arrival]:
        """Waits for an arrival and returns all that have come. Raises AnswerFailed if no answer started in time."""
        waits_s = None if self.running else self.patience_s
        try:
            async with asyncio.timeout(waits_s):
                first = await self.inbox.get()
        except TimeoutError:
            detail = f"no slot came free for {waits_s:g} s, the longest wait in the queue"
            raise AnswerFailed(Finish(RequestId(""), FinishReason.TIMEOUT, Ledger(), detail=detail)) from None
        arrived = [first, *_taken(self.inbox)]
        for index, item in arrived:
            ended = not isinstance(item, Piece) or item.finish_reason is not None
            self.running.discard(index) if ended else self.running.add(index)
        return arrived


async def merged(starts: Sequence[Start], at_once: int, patience_s: float | None = None) -> AsyncGenerator[Batch]:
    """Yields pieces of all answers as they arrive, in batches; at most `at_once` answers run at a time.

    The first error of any answer is raised and the others are closed. A rejected answer other than the first is tried
    again; AnswerFailed is raised if no answer runs for `patience_s` seconds.
    """
    if len(starts) == 1:
        async with aclosing(starts[0]()) as only:
            async for piece in only:
                yield [(0, piece)]
        return
    answers_queue, room = _AnswerQueue(patience_s), asyncio.Semaphore(at_once)
    pumps = [asyncio.create_task(_pump(i, start, answers_queue.inbox, room)) for i, start in enumerate(starts)]
    try:
        running = len(pumps)
        while running:
            arrived = await answers_queue.next()
            for _, item in arrived:
                if isinstance(item, Exception):
                    raise item
                running -= item is None
            batch = [(index, item) for index, item in arrived if isinstance(item, Piece)]
            if batch:
                yield batch
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


def _taken(inbox: asyncio.Queue[Arrival]) -> Iterator[Arrival]:
    while not inbox.empty():
        yield inbox.get_nowait()


async def _pump(index: int, start: Start, inbox: asyncio.Queue[Arrival], room: asyncio.Semaphore) -> None:
    try:
        async with room:
            while True:
                try:
                    async with aclosing(start()) as answer:
                        async for piece in answer:
                            inbox.put_nowait((index, piece))
                    break
                except Rejected as full:
                    if index == 0:
                        raise
                    await asyncio.sleep(min(full.retry_after_s, RETRY_S))
        inbox.put_nowait((index, None))
    except Exception as error:
        inbox.put_nowait((index, error))
