"""What clients do to a server during a soak: most ask, some leave, read slowly or not at all, or talk nonsense.

A caller keeps one HTTP connection open from one job to the next, as clients with a pool of connections do. A job says
how it ended in one word; what is the server's fault raises `Fault`.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from jdisagg.serve.frontends.grpc.jetstream_pb2 import DecodeRequest
from jdisagg.serve.frontends.grpc.jetstream_pb2_grpc import OrchestratorStub

JOB_S = 120.0  # longest time of one job
CLIENT_S = 60.0  # that the server gives a client to ask or to read
DEAF_S = CLIENT_S + 15.0
HOST = "127.0.0.1"
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends RST
HELLO = bytes.fromhex("160301006a0100006603038f") + bytes(range(94))  # the beginning of TLS
SCANNED = (b"", b"", b"\0", b"\r\n\r\n", b"SSH-2.0-x\r\n", b"PRI * HTTP/2.0\r\n")
VOCAB_SIZE = 256  # token ids are drawn below this
PREAMBLES = 20  # prompts begin with one of as many, so that kept KV is found again
MALFORMED = (
    b"{",
    b"[]",
    b"null",
    b'{"prompt": 7}',
    b'{"prompt": [1, -5]}',
    b'{"prompt": "x", "max_tokens": "many"}',
    b'{"prompt": "x", "temperature": NaN}',
    b'{"prompt": "x", "top_p": 7}',
    b'{"prompt": "\xff\xfe"}',
    b'{"prompt": "x", "n": -1}',
    b"[" * 5000,
    b'{"prompt": [999999999]}',
)


class Fault(Exception):
    """What a server should not have done."""


class Gone(Exception):
    """The server ended a connection before it said anything, as it may with one that asked nothing for long."""


@dataclass(frozen=True, slots=True)
class Ports:
    """Where the server hears: HTTP, gRPC, and the control messages of its processes."""

    http: int
    grpc: int
    control: int  # 0: there is none


@dataclass(slots=True)
class Book:
    """How many jobs of each kind ended how, and the first faults in words."""

    ends: Counter[tuple[str, str]] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    @property
    def jobs(self) -> int:
        return self.ends.total()

    def table(self) -> dict[str, dict[str, int]]:
        """By kind, then by how it ended."""
        table: dict[str, dict[str, int]] = {}
        for (kind, end), count in sorted(self.ends.items()):
            table.setdefault(kind, {})[end] = count
        return table


@dataclass(slots=True)
class Answer:
    status: int
    body: bytes


class Caller:
    """One client's connection; opened when there is something to ask, and again where the server closed it."""

    def __init__(self, ports: Ports, seed: int) -> None:
        self.ports, self.draw = ports, random.Random(seed)
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def open(self) -> None:
        """Does nothing where it is open."""
        if self._reader is None or self._reader.at_eof():
            await self.close()
            self._reader, self._writer = await asyncio.open_connection(HOST, self.ports.http)

    async def close(self, reset: bool = False) -> None:
        reader, writer = self._reader, self._writer
        self._reader = self._writer = None
        if reader is None or writer is None:
            return
        if reset:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()

    async def ask(self, message: bytes) -> Answer:
        """The whole answer, asked for once more where the server had closed the connection."""
        for _ in range(3):
            try:
                reader = await self.send(message)
                status, headers = await head_of(reader)
                answer = Answer(status, await body_of(reader, headers))
            except Gone:
                await self.close()
                continue
            if headers.get("connection") == "close":
                await self.close()
            return answer
        raise Fault("three connections in a row were closed without an answer")

    async def send(self, message: bytes) -> asyncio.StreamReader:
        await self.open()
        assert self._reader is not None and self._writer is not None
        try:
            self._writer.write(message)
            await self._writer.drain()
        except OSError as error:
            raise Gone from error
        return self._reader


async def head_of(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """Status and headers. Raises Gone where nothing came."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise Fault(f"half a header: {error.partial[:100]!r}") from error
        raise Gone from error
    except OSError as error:
        raise Gone from error
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return int(first.split()[1]), headers


async def body_of(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> bytes:
    try:
        if "content-length" in headers:
            return await reader.readexactly(int(headers["content-length"]))
        body = b""
        while size := int((await reader.readline()).partition(b";")[0] or b"x", 16):
            body += (await reader.readexactly(size + 2))[:-2]
        await reader.readline()
        return body
    except (asyncio.IncompleteReadError, OSError, ValueError) as error:
        raise Fault(f"an answer broke off: {error!r}") from error


def message(method: str, path: str, body: bytes = b"", more: str = "") -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n{more}"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def completion(draw: random.Random, **more: Any) -> tuple[bytes, int]:
    """A request, and how many tokens must come."""
    begin = random.Random(draw.randrange(PREAMBLES))
    prompt = [begin.randrange(3, VOCAB_SIZE) for _ in range(begin.choice((8, 32, 64, 96)))]
    prompt += [draw.randrange(3, VOCAB_SIZE) for _ in range(draw.randrange(1, 40))]
    tokens = draw.randrange(1, 6)
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": draw.choice((0, 0, 0.7)), "ignore_eos": True}
    fields = body | more
    return message("POST", "/v1/completions", json.dumps(fields).encode()), int(fields["max_tokens"])


# ------------------------------------------------------------ those who want an answer


async def whole(caller: Caller) -> str:
    asked, tokens = completion(caller.draw)
    answer = await caller.ask(asked)
    if answer.status != 200:
        return refused(answer)
    told = json.loads(answer.body)
    if told["usage"]["completion_tokens"] != tokens or told["choices"][0]["finish_reason"] != "length":
        raise Fault(f"{tokens} tokens were asked for: {answer.body[:300]!r}")
    return "answered"


async def stream(caller: Caller) -> str:
    asked, tokens = completion(caller.draw, stream=True, stream_options={"include_usage": True})
    answer = await caller.ask(asked)
    return refused(answer) if answer.status != 200 else streamed(answer.body, tokens)


def streamed(body: bytes, tokens: int) -> str:
    """Raises Fault where a stream is not whole."""
    events = [line.removeprefix(b"data: ") for line in body.split(b"\n") if line.startswith(b"data: ")]
    if events[-1:] != [b"[DONE]"] or b'"error"' in body:
        raise Fault(f"a stream ended with {body[-300:]!r}")
    usage = json.loads(events[-2])["usage"]
    if usage["completion_tokens"] != tokens:
        raise Fault(f"{tokens} tokens were asked for: {usage}")
    return "answered"


def refused(answer: Answer) -> str:
    """One more than the queue takes is told so; anything else is a fault."""
    if answer.status == 429:
        return "429"
    raise Fault(f"status {answer.status}: {answer.body[:300]!r}")


async def over_grpc(caller: Caller) -> str:
    tokens, leaves = caller.draw.randrange(2, 9), caller.draw.random() < 0.3
    request = DecodeRequest(max_tokens=tokens)
    request.token_content.token_ids.extend(caller.draw.randrange(3, VOCAB_SIZE) for _ in range(20))
    async with grpc.aio.insecure_channel(f"{HOST}:{caller.ports.grpc}") as channel:
        call = OrchestratorStub(channel).Decode(request, timeout=JOB_S)
        try:
            async for _ in call:
                if leaves:
                    return "left"
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                return "429"
            raise Fault(f"gRPC: {error.code()}: {error.details()}") from error
    return "answered"


# ------------------------------------------------------------ those who leave, or do not read


async def cancel(caller: Caller) -> str:
    """Leaves after the first pieces."""
    asked, _ = completion(caller.draw, stream=True, max_tokens=120)
    try:
        reader = await caller.send(asked)
        status, _ = await head_of(reader)
        await reader.readline()
    except Gone:
        status = 0
    await caller.close(reset=caller.draw.random() < 0.5)
    if status not in (0, 200, 429):
        raise Fault(f"status {status} for a stream")
    return "left"


async def hang_up(caller: Caller) -> str:
    """Leaves without having heard anything."""
    asked, _ = completion(caller.draw, max_tokens=120)
    with suppress(Gone):
        await caller.send(asked)
    await asyncio.sleep(caller.draw.random() / 10)
    await caller.close(reset=caller.draw.random() < 0.5)
    return "left"


async def trickle(caller: Caller) -> str:
    """Reads a few bytes at a time, and all of it in the end."""
    asked, tokens = completion(caller.draw, stream=True, max_tokens=24, stream_options={"include_usage": True})
    slow = Caller(caller.ports, 0)
    try:
        reader = await slow.send(asked.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
        status, headers = await head_of(reader)
        read, taken = asyncio.StreamReader(), 0
        while piece := await reader.read(200):
            read.feed_data(piece)
            taken += 1
            await asyncio.sleep(0.1 if taken < 30 else 0)
        read.feed_eof()
        answer = Answer(status, await body_of(read, headers))
        return refused(answer) if status != 200 else streamed(answer.body, tokens)
    except Gone:
        return "displaced"
    finally:
        await slow.close()


async def deaf(caller: Caller) -> str:
    """Asks for much and reads nothing until the server has had enough."""
    asked, _ = completion(caller.draw, stream=True, max_tokens=100, n=32, logprobs=20)
    loop = asyncio.get_running_loop()
    with socket.socket() as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        line.setblocking(False)
        await loop.sock_connect(line, (HOST, caller.ports.http))
        await loop.sock_sendall(line, asked)
        await asyncio.sleep(DEAF_S)
    return "left"


# ------------------------------------------------------------ those who are no clients at all


async def malformed(caller: Caller) -> str:
    return expected(await caller.ask(message("POST", "/v1/completions", caller.draw.choice(MALFORMED))), {400, 422})


async def over_a_limit(caller: Caller) -> str:
    """A prompt, a number of choices, a body or a header that is too long."""
    kind = caller.draw.randrange(4)
    if kind == 0:
        asked = message("POST", "/v1/completions", json.dumps({"prompt": [5] * 300}).encode())
    elif kind == 1:
        asked = message("POST", "/v1/completions", json.dumps({"prompt": [5], "n": 100_000}).encode())
    elif kind == 2:
        asked = f"POST /v1/completions HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: 100000000\r\n\r\n".encode()
    else:
        asked = message("GET", "/live", more=f"X: {'x' * 70_000}\r\n")
    answer = await caller.ask(asked)
    if kind > 1:
        await caller.close()
    return expected(answer, {400, 413, 422, 431})


async def look(caller: Caller) -> str:
    path = caller.draw.choice(("/health", "/metrics", "/v1/models", "/live", "/", "/debug/requests", "/nothing/here"))
    return expected(await caller.ask(message("GET", path)), {200, 404})


def expected(answer: Answer, statuses: set[int]) -> str:
    if answer.status not in statuses:
        raise Fault(f"status {answer.status}: {answer.body[:300]!r}")
    return str(answer.status)


async def bad_tls(caller: Caller) -> str:
    """TLS, whole or garbled, where none is spoken."""
    garbled = HELLO[: caller.draw.randrange(5, len(HELLO))]
    return await _knock(caller, caller.draw.choice((HELLO, garbled, HELLO[:5] + b"\xff" * 200)))


async def scan(caller: Caller) -> str:
    """A port scan's connections: nothing said, or a few bytes."""
    return await _knock(
        caller, caller.draw.choice((b"", b"", b"\0", b"\r\n\r\n", b"SSH-2.0-x\r\n", b"PRI * HTTP/2.0\r\n"))
    )


async def _knock(caller: Caller, said: bytes) -> str:
    ports = caller.ports
    port = caller.draw.choice((ports.http, ports.http, ports.grpc, ports.control or ports.http))
    try:
        reader, writer = await asyncio.open_connection(HOST, port)
        writer.write(said)
        with suppress(TimeoutError, OSError):
            await asyncio.wait_for(reader.read(1000), caller.draw.random() / 2)
        if caller.draw.random() < 0.5:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
    except OSError:
        return "turned away"
    return "left"


JOBS: Mapping[Callable[[Caller], Awaitable[str]], float] = {  # and their shares
    whole: 0.49,
    stream: 0.24,
    over_grpc: 0.02,
    cancel: 0.07,
    hang_up: 0.03,
    trickle: 0.01,
    deaf: 0.0002,
    malformed: 0.05,
    over_a_limit: 0.03,
    look: 0.03,
    bad_tls: 0.01,
    scan: 0.02,
}


async def serve(caller: Caller, jobs: asyncio.Queue[Callable[[Caller], Awaitable[str]]], book: Book) -> None:
    """Opens the connection, and does what it is given, to its end or the task's."""
    with suppress(OSError):
        await caller.open()
    while True:
        job = await jobs.get()
        try:
            async with asyncio.timeout(JOB_S):
                end = await job(caller)
        except (Fault, TimeoutError, OSError, ValueError, KeyError, IndexError, asyncio.IncompleteReadError) as error:
            end = "FAULT"
            book.faults.append(f"{job.__name__}: {error!r}"[:500])
            await caller.close()
        book.ends[job.__name__, end] += 1
        jobs.task_done()
