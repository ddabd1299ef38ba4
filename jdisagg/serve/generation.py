"""One answer, or several at once, as streams of pieces: what HTTP, gRPC and the Python interface all read from."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing

from jdisagg.core.errors import JdisaggError
from jdisagg.core.events import Finish
from jdisagg.core.request import FinishReason, Request
from jdisagg.serve.service import Delta, Service
from jdisagg.serve.text import Piece, TextOptions, Transcript

CANCEL_WAIT_S = 2.0  # for the ledger of an answer that a stop string ended


class AnswerFailed(JdisaggError):
    """A request that was taken ended without its answer; `finish` says why."""

    def __init__(self, finish: Finish) -> None:
        super().__init__(finish.detail or f"the request ended as {finish.reason.value!r}")
        self.finish = finish


def failure_of(piece: Piece) -> AnswerFailed | None:
    """The error that an answer's last piece stands for; None where the answer goes on or is whole."""
    return AnswerFailed(piece.finish) if piece.finish_reason == "abort" and piece.finish is not None else None


async def pieces(service: Service, request: Request, options: TextOptions) -> AsyncGenerator[Piece]:
    """The answer to one request; the last piece has its `finish_reason`. Closing it early cancels the request.

    Raises what `Service.stream` raises, before the first piece.
    """
    transcript = Transcript(service.tokenizer, options)
    async with aclosing(service.stream(request)) as deltas:
        async for delta in deltas:
            piece = transcript.take(delta)
            if transcript.stopped and piece.finish is None:
                service.cancel(request.request_id, FinishReason.STOP)
                piece.finish = await _finish_of(deltas)
            yield piece
            if piece.finish_reason is not None:
                return


async def _finish_of(deltas: AsyncGenerator[Delta]) -> Finish | None:
    """The finish of a request that was just cancelled; None if it does not come in time."""
    try:
        async with asyncio.timeout(CANCEL_WAIT_S):
            async for delta in deltas:
                if delta.finish is not None:
                    return delta.finish
    except TimeoutError:
        return None
    return None


Batch = list[tuple[int, Piece]]  # pieces with their answer's index
Arrival = tuple[int, Piece | Exception | None]  # None: the answer is whole


async def merged(answers: Sequence[AsyncGenerator[Piece]], at_once: int) -> AsyncGenerator[Batch]:
    """Pieces of all answers as they come, those that are there at once together; `at_once` answers run at a time.

    The first error of any answer is raised, and the others are closed.
    """
    if len(answers) == 1:
        async with aclosing(answers[0]) as only:
            async for piece in only:
                yield [(0, piece)]
        return
    inbox: asyncio.Queue[Arrival] = asyncio.Queue()
    room = asyncio.Semaphore(at_once)
    pumps = [asyncio.create_task(_pump(i, answer, inbox, room)) for i, answer in enumerate(answers)]
    try:
        running = len(pumps)
        while running:
            arrived = [await inbox.get(), *_taken(inbox)]
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


async def _pump(
    index: int, answer: AsyncGenerator[Piece], inbox: asyncio.Queue[Arrival], room: asyncio.Semaphore
) -> None:
    try:
        async with room, aclosing(answer):
            async for piece in answer:
                inbox.put_nowait((index, piece))
        inbox.put_nowait((index, None))
    except Exception as error:
        inbox.put_nowait((index, error))
