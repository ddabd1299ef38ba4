"""Streams completions from an OpenAI-compatible server over one plain socket each.

The client shares its cores with the server it measures, so while an answer runs it only notes when bytes came; chunks
and events are read out of them afterwards.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
import urllib.parse
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.load import Sample
from benchmarks.workload import Job

LAST_CHUNK = b"\r\n0\r\n\r\n"


class HTTPFailed(Exception):
    """The server answered with a status other than 200, or with something that is not HTTP."""


class Exchange(asyncio.Protocol):
    """One request and every byte of its answer, with the second at which each piece came."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self.pieces: list[tuple[float, bytes]] = []
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.pieces.append((time.perf_counter(), data))
        if data.endswith(LAST_CHUNK) or data == LAST_CHUNK[2:]:
            self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)
        if self._transport is not None:
            self._transport.close()


@dataclass(frozen=True, slots=True)
class Timed:
    """An answer's body and where in it each arrival ended."""

    body: bytes
    ends: tuple[int, ...]
    times_s: tuple[float, ...]

    def at_s(self, offset: int) -> float:
        """When the byte at `offset` came."""
        return self.times_s[min(bisect_right(self.ends, offset), len(self.times_s) - 1)]


def body_of(pieces: list[tuple[float, bytes]]) -> Timed:
    """Joins the pieces and takes HTTP's framing away. Raises HTTPFailed for any status but 200."""
    whole = b"".join(data for _, data in pieces)
    head, parted, rest = whole.partition(b"\r\n\r\n")
    status = head.split(b"\r\n", 1)[0]
    if not parted or b" 200" not in status:
        raise HTTPFailed(f"{status.decode(errors='replace') or 'no answer'}: {rest[:300].decode(errors='replace')}")
    start = len(head) + len(parted)
    raw_ends = list(itertools.accumulate(len(data) for _, data in pieces))
    if b"transfer-encoding: chunked" in head.lower():
        spans = list(_chunks(whole, start))
    else:
        spans = list(itertools.pairwise([start, *(end for end in raw_ends if end > start)]))
    return _cut(whole, spans, raw_ends, [at_s for at_s, _ in pieces])


def _chunks(whole: bytes, at: int) -> Iterator[tuple[int, int]]:
    """Begin and end of the payload of each HTTP chunk; stops at a chunk that is not whole."""
    while (line_end := whole.find(b"\r\n", at)) >= 0:
        size = int(whole[at:line_end].partition(b";")[0], 16)
        begin = line_end + 2
        if size == 0 or begin + size > len(whole):
            return
        yield begin, begin + size
        at = begin + size + 2


def _cut(whole: bytes, spans: list[tuple[int, int]], raw_ends: list[int], raw_times: list[float]) -> Timed:
    """The spans joined, each with the time at which its last byte came."""
    ends = itertools.accumulate(end - begin for begin, end in spans)
    times = (raw_times[bisect_right(raw_ends, end - 1)] for _, end in spans)
    return Timed(b"".join(whole[begin:end] for begin, end in spans), tuple(ends), tuple(times))


def events(answer: Timed) -> Iterator[tuple[float, dict[str, Any]]]:
    """Every server-sent event but [DONE], with its time."""
    at = 0
    while (start := answer.body.find(b"data:", at)) >= 0:
        end = answer.body.find(b"\n", start)
        end = len(answer.body) if end < 0 else end
        payload = answer.body[start + 5 : end].strip()
        at = end
        if payload and payload != b"[DONE]":
            yield answer.at_s(end - 1), json.loads(payload)


def sample_of(sent_s: float, answer: Timed) -> Sample:
    """What the events say: events that came at once are one arrival; tokens are the usage's, else one an event."""
    arrivals, usage, ledger = [], {}, None
    for at_s, event in events(answer):
        if "error" in event:
            return Sample(sent_s, error=str(event["error"])[:300], ended_s=at_s)
        usage = event.get("usage") or usage
        for choice in event.get("choices", ()):
            ledger = (choice.get("ledger") or {}).get("parts_ns") or ledger
            arrivals.append(at_s)
    if not arrivals:
        return Sample(sent_s, error="an answer without a token", ended_s=sent_s)
    num_tokens = usage.get("completion_tokens", len(arrivals))
    shown = tuple(dict.fromkeys(arrivals))
    return Sample(sent_s, shown, answer.times_s[-1], usage.get("prompt_tokens", 0), num_tokens, ledger)


@dataclass(frozen=True, slots=True)
class Server:
    """Where completions are asked for. `url` ends before /completions, as http://127.0.0.1:8000/v1."""

    url: str
    model: str
    extra: Mapping[str, Any] = field(default_factory=dict)  # more fields of every body
    timeout_s: float = 300.0

    async def ask(self, job: Job) -> Sample:
        """One streamed completion, greedy and of exactly `job.max_tokens`; failures are samples with an `error`."""
        body = {
            "model": self.model,
            "prompt": job.prompt,
            "max_tokens": job.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        message = self._message("POST", "/completions", json.dumps(body | dict(self.extra)).encode())
        sent_s = time.perf_counter()
        try:
            return sample_of(sent_s, await self._exchange(message))
        except (OSError, TimeoutError, HTTPFailed, ValueError) as error:
            return Sample(sent_s, error=f"{type(error).__name__}: {error}", ended_s=time.perf_counter())

    async def post(self, path: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """One whole answer to a body of JSON. Raises HTTPFailed, OSError or TimeoutError."""
        return json.loads((await self._exchange(self._message("POST", path, json.dumps(fields).encode()))).body)

    async def get(self, path: str) -> dict[str, Any]:
        """Raises HTTPFailed, OSError or TimeoutError."""
        return json.loads((await self._exchange(self._message("GET", path))).body)

    async def answers(self, path: str) -> bool:
        """Whether a GET of `path` gives 200."""
        try:
            await self._exchange(self._message("GET", path))
        except (OSError, TimeoutError, HTTPFailed):
            return False
        return True

    async def _exchange(self, message: bytes) -> Timed:
        place = urllib.parse.urlsplit(self.url)
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self.timeout_s):
            _, exchange = await loop.create_connection(
                lambda: Exchange(message), place.hostname or "127.0.0.1", place.port or 80
            )
            try:
                await exchange.ended
            finally:
                exchange.connection_lost(None)
        return body_of(exchange.pieces)

    def _message(self, method: str, path: str, body: bytes = b"") -> bytes:
        place = urllib.parse.urlsplit(self.url)
        head = (
            f"{method} {place.path.rstrip('/')}{path} HTTP/1.1\r\nHost: {place.netloc}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


async def first_model(url: str) -> str:
    """The name of the first model that the server lists. Raises HTTPFailed or OSError."""
    return (await Server(url, "").get("/models"))["data"][0]["id"]
