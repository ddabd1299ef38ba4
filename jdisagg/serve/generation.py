"""One answer, or several at once, as streams of pieces: what HTTP, gRPC and the Python interface all read from."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial

from jdisagg.core.errors import JdisaggError, RequestError
from jdisagg.core.events import Finish
from jdisagg.core.ledger import Ledger
from jdisagg.core.request import FinishReason, Request, RequestId
from jdisagg.serve.service import Rejected, Service, Update
from jdisagg.serve.structured.beginnings import with_beginning
from jdisagg.serve.structured.endings import explain
from jdisagg.serve.text import Piece, TextOptions, Transcript

CANCEL_WAIT_S = 2.0  # for the ledger of an answer that a stop string ended
RETRY_S = 0.5  # at the most, before an answer that was turned away while others of its request ran tries again


class AnswerFailed(JdisaggError):
    """A request that was taken ended without its answer; `finish` says why."""

    def __init__(self, finish: Finish) -> None:
        super().__init__(finish.detail or f"the request ended as {finish.reason.value!r}")
        self.finish = finish


class GrammarEnded(AnswerFailed):
    """Its grammar allowed no token half way: it went over its limits."""


def failure_of(piece: Piece) -> AnswerFailed | None:
    """The error that an answer's last piece stands for; None where the answer goes on or is whole."""
    if piece.finish_reason != "abort" or piece.finish is None:
        return None
    return GrammarEnded(piece.finish) if piece.by_grammar else AnswerFailed(piece.finish)


async def pieces(service: Service, request: Request, options: TextOptions) -> AsyncGenerator[Piece]:
    """The answer to one request; the last piece has its `finish_reason`. Closing it early cancels the request.

    Raises what `Service.stream` raises, before the first piece.
    """
    transcript, drawn = Transcript(service.tokenizer, options), list[int]()
    begun = await with_beginning(request, service)
    async with aclosing(service.stream(begun)) as updates:
        async for update in updates:
            piece = transcript.take(update)
            if request.sampling.grammar:
                drawn += [each.token for each in update.delta.sampled]
                await explain(piece, request.sampling.grammar, drawn, service)
            if transcript.stopped and piece.finish is None:
                service.cancel(request.request_id, FinishReason.STOP)
                piece.finish = await _finish_of(updates)
            yield piece
            if piece.finish_reason is not None:
                return


async def _finish_of(updates: AsyncGenerator[Update]) -> Finish | None:
    """The finish of a request that was just cancelled; None if it does not come in time."""
    try:
        async with asyncio.timeout(CANCEL_WAIT_S):
            async for update in updates:
                if update.finish is not None:
                    return update.finish
    except TimeoutError:
        return None
    return None


Batch = list[tuple[int, Piece]]  # pieces with their answer's index
Arrival = tuple[int, Piece | Exception | None]  # None: the answer is whole
Start = Callable[[], AsyncGenerator[Piece]]  # begins an answer, anew each time


def check_work(service: Service, requests: Sequence[Request], queue_timeout_s: float | None, runs_on: bool) -> None:
    """Raises RequestError where the last of these answers could not begin within `queue_timeout_s`, alone as they are.

    `runs_on`: nothing ends them before their `max_tokens`; else each may be over after its `min_tokens`.
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
    """Pieces of the answers to one client's requests. A single one waits for its turn as its own deadline says.

    Several take the server's slots in turn, `at_once` at the most. They wait for each other as long as that takes, and
    for others `queue_timeout_s`: AnswerFailed is raised where none of them ran for so long.
    """
    if len(requests) == 1:
        return merged([partial(pieces, service, requests[0], options)], 1)
    capacity = service.capacity()
    at_once = min(at_once, capacity.slots) if capacity else at_once
    return merged([partial(_in_turn, service, each, options) for each in requests], at_once, queue_timeout_s)


def _in_turn(service: Service, request: Request, options: TextOptions) -> AsyncGenerator[Piece]:
    """It arrives when its turn has come: else the last of a thousand would go before all who came meanwhile."""
    return pieces(service, replace(request, arrival_s=service.now_s(), queue_deadline_s=math.inf), options)


@dataclass(slots=True)
class _Turns:
    """What is known of several answers that run in turns."""

    patience_s: float | None
    inbox: asyncio.Queue[Arrival] = field(default_factory=asyncio.Queue)
    under_way: set[int] = field(default_factory=set)  # begun and not ended

    async def next(self) -> list[Arrival]:
        """All that has come, at least one thing. Raises AnswerFailed when it took too long for one to begin."""
        waits_s = None if self.under_way else self.patience_s
        try:
            async with asyncio.timeout(waits_s):
                first = await self.inbox.get()
        except TimeoutError:
            detail = f"no slot came free for {waits_s:g} s, the longest wait in the queue"
            raise AnswerFailed(Finish(RequestId(""), FinishReason.TIMEOUT, Ledger(), detail=detail)) from None
        arrived = [first, *_taken(self.inbox)]
        for index, item in arrived:
            ended = not isinstance(item, Piece) or item.finish_reason is not None
            self.under_way.discard(index) if ended else self.under_way.add(index)
        return arrived


async def merged(starts: Sequence[Start], at_once: int, patience_s: float | None = None) -> AsyncGenerator[Batch]:
    """Pieces of all answers as they come, those that are there at once together; `at_once` answers run at a time.

    The first error of any answer is raised, and the others are closed; but only the first may be `Rejected`: the others
    try again while there is `patience_s`.
    """
    if len(starts) == 1:
        async with aclosing(starts[0]()) as only:
            async for piece in only:
                yield [(0, piece)]
        return
    turns, room = _Turns(patience_s), asyncio.Semaphore(at_once)
    pumps = [asyncio.create_task(_pump(i, start, turns.inbox, room)) for i, start in enumerate(starts)]
    try:
        running = len(pumps)
        while running:
            arrived = await turns.next()
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
