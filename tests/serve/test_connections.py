"""Connections that would keep the server waiting: each is ended within its bound, counted, and in nobody's way."""

from __future__ import annotations

import asyncio
import json
import re
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx
import pytest
import uvloop

from jdisagg.core.settings import Settings
from jdisagg.serve.deploy import servers
from jdisagg.serve.frontends.http.connections import CloseReason, ConnectionLimiter, Limits
from tests.serve.live_http import eventually
from tests.serve.live_toy import ToyStack, toy_stack

SHORT_S = 1.0
PATIENCE_S = 60.0  # of a test; what it waits for comes much sooner
HEADER_LIMIT = 64 << 10
HELLO = b"GET /live HTTP/1.1\r\nHost: x\r\n"
ENDLESS = {"prompt": [5], "max_tokens": 200, "ignore_eos": True, "stream": True}


@dataclass
class Door:
    """A server with short limits and those who knock at it."""

    stack: ToyStack
    address: tuple[str, int]
    running: servers.Running
    callers: list[socket.socket] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://{self.address[0]}:{self.address[1]}"

    def call(self, said: bytes = b"", receive_bytes: int | None = None) -> socket.socket:
        caller = socket.socket()
        if receive_bytes is not None:
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        caller.connect(self.address)
        caller.settimeout(PATIENCE_S)
        caller.sendall(said)
        self.callers.append(caller)
        return caller

    def post(self, **body: object) -> bytes:
        text = json.dumps(body).encode()
        return b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text)

    def cuts(self, reason: str) -> float:
        text = self.stack.metrics.render().decode()
        found = re.search(rf'^jdisagg_http_connections_cut_total{{.*reason="{reason}".*}} (\S+)$', text, re.MULTILINE)
        assert found is not None, f"no count of {reason}"
        return float(found[1])

    @property
    def ended(self) -> float:
        """Requests that have ended, of any kind."""
        text = self.stack.metrics.render().decode()
        return sum(float(count) for count in re.findall(r"^jdisagg_requests_total{.*} (\S+)$", text, re.MULTILINE))

    @property
    def open(self) -> int:
        assert self.running.http is not None
        return self.running.http.num_connections

    def alive(self) -> bool:
        return httpx.get(f"{self.url}/live", timeout=PATIENCE_S).status_code == 200


def rest(caller: socket.socket) -> bytes:
    """All that comes until the server hangs up."""
    told = b""
    try:
        while piece := caller.recv(1 << 16):
            told += piece
    except ConnectionError:
        pass
    return told


def answer(caller: socket.socket) -> bytes:
    """One answer of /live."""
    told = b""
    while not told.endswith(b"}"):
        told += caller.recv(4096)
    return told


@contextmanager
def door(**more: object) -> Iterator[Door]:
    settings = Settings(http_port=0, grpc_port=-1, **{"client_timeout_s": SHORT_S, **more})  # type: ignore[arg-type]
    found: list[servers.Running] = []
    stop = threading.Event()

    async def serve() -> None:
        found.append(await servers.start(stack.service, settings, sockets))
        while not stop.is_set():
            await asyncio.sleep(0.01)
        await found[0].stop()
        assert found[0].http_task is not None
        await found[0].http_task

    with toy_stack(decode_pages=2048) as stack:
        sockets = servers.bind(settings)
        assert sockets.http is not None
        sockets.http.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # else megabytes wait in the kernel
        address = sockets.http.getsockname()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            thread = threading.Thread(target=lambda: runner.run(serve()), daemon=True)
            thread.start()
            eventually(lambda: bool(found))
            here = Door(stack, address, found[0])
            try:
                yield here
            finally:
                for caller in here.callers:
                    caller.close()
                stop.set()
                thread.join(timeout=PATIENCE_S)


@pytest.fixture(scope="module")
def served() -> Iterator[Door]:
    with door() as one:
        yield one


def test_a_header_over_its_limit_is_refused_before_it_ends(served: Door) -> None:
    caller, sent = served.call(HELLO + b"X-Long: "), 0
    before = served.cuts("long_header")
    try:
        for _ in range(64):
            sent += caller.send(b"x" * 65536)
            time.sleep(0.002)
    except ConnectionError:
        pass
    assert sent < 3 << 20, "the server went on reading"
    eventually(lambda: served.cuts("long_header") == before + 1)
    assert served.alive()


@pytest.mark.parametrize("header", [b"X: " + b"x" * HEADER_LIMIT, b"a: b\r\n" * (HEADER_LIMIT // 4)])
def test_a_header_that_ends_over_its_limit_gets_431(served: Door, header: bytes) -> None:
    told = rest(served.call(HELLO + header + b"\r\n\r\n"))
    assert told.startswith(b"HTTP/1.1 431 ") and b'"code": "long_header"' in told


def test_a_header_just_below_its_limit_is_served(served: Door) -> None:
    said = HELLO + b"Connection: close\r\nX: " + b"x" * (HEADER_LIMIT - 200) + b"\r\n\r\n"
    assert rest(served.call(said)).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("after", [b"0\r\nX: ", b"5;"], ids=["trailer", "chunk extension"])
def test_what_follows_a_body_without_end_is_cut_off(served: Door, after: bytes) -> None:
    start = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    caller, sent = served.call(start + after), 0
    try:
        for _ in range(64):
            sent += caller.send(b"x" * 65536)
            time.sleep(0.002)
    except ConnectionError:
        pass
    assert sent < 3 << 20


def test_a_trailer_is_no_header_for_the_app(served: Door) -> None:
    start = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    told = rest(served.call(start + b'e\r\n{"prompt":"x"}\r\n0\r\nX-Request-Id: forged\r\n\r\n'))
    assert told.startswith(b"HTTP/1.1 200 ") and b"forged" not in told


def test_silent_connections_are_closed_and_counted(served: Door) -> None:
    before, began_s = served.cuts("idle"), time.monotonic()
    callers = [served.call() for _ in range(20)]
    assert [rest(each) for each in callers] == [b""] * 20
    assert SHORT_S * 0.8 < time.monotonic() - began_s < PATIENCE_S
    eventually(lambda: served.cuts("idle") == before + 20)


def test_blank_lines_do_not_keep_a_connection(served: Door) -> None:
    caller = served.call()
    with pytest.raises(ConnectionError):
        for _ in range(int(PATIENCE_S / 0.1)):
            caller.sendall(b"\r\n")
            time.sleep(0.1)


def test_a_connection_that_has_its_answer_is_kept_for_the_next_one_and_then_closed(served: Door) -> None:
    caller = served.call(HELLO + b"\r\n")
    assert answer(caller).startswith(b"HTTP/1.1 200")
    time.sleep(SHORT_S / 10)
    caller.sendall(HELLO + b"\r\n")
    assert answer(caller).startswith(b"HTTP/1.1 200")
    assert rest(caller) == b""


def test_a_header_that_trickles_in_gets_408(served: Door) -> None:
    caller, before = served.call(HELLO), served.cuts("slow_header")
    with pytest.raises(ConnectionError):
        for _ in range(int(PATIENCE_S / 0.1)):
            caller.sendall(b"a")
            time.sleep(0.1)
    eventually(lambda: served.cuts("slow_header") == before + 1)


def test_a_body_that_does_not_come_gets_408(served: Door) -> None:
    told = rest(served.call(b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{"))
    assert told.startswith(b"HTTP/1.1 408 ") and b"slow_body" in told
    eventually(lambda: served.stack.service.running == 0)


def test_a_long_body_that_comes_fast_enough_has_longer_than_the_timeout(served: Door) -> None:
    body = json.dumps({"prompt": "x"}).encode() + b" " * 40_000
    caller = served.call(b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body))
    for start in range(0, len(body), 4000):
        caller.sendall(body[start : start + 4000])
        time.sleep(2 * SHORT_S / (len(body) / 4000))
    assert caller.recv(4096).startswith(b"HTTP/1.1 200")


def test_an_answer_longer_than_the_timeout_is_not_cut(served: Door) -> None:
    for machine in served.stack.machines.values():
        machine.pause_s = 0.02
    try:
        told = httpx.post(f"{served.url}/v1/completions", json={**ENDLESS, "max_tokens": 150}, timeout=PATIENCE_S)
    finally:
        for machine in served.stack.machines.values():
            machine.pause_s = 0.0
    assert told.elapsed.total_seconds() > 2 * SHORT_S and "[DONE]" in told.text


def test_a_reader_that_stops_reading_is_dropped_and_its_pages_come_back(served: Door) -> None:
    before = served.cuts("unread")
    said = served.post(**ENDLESS, n=16, logprobs=20)
    served.call(said, receive_bytes=2048)
    eventually(lambda: served.cuts("unread") == before + 1)
    eventually(served.stack.idle)
    eventually(lambda: served.open == 0)
    assert served.cuts("unread") == before + 1, "one reader, cut once"


def test_an_answer_that_is_over_and_never_read_keeps_no_descriptor(served: Door) -> None:
    """Less than what makes the transport pause: only the closing has to wait."""
    before = served.ended
    said = served.post(**{**ENDLESS, "max_tokens": 20}, logprobs=20)
    served.call(said, receive_bytes=2048)
    eventually(lambda: served.ended == before + 1)  # it may run for less than one look
    eventually(served.stack.idle)
    eventually(lambda: served.open == 0)
    assert served.stack.service.running == 0 and served.open == 0


def test_pipelined_requests_are_answered_in_order_and_bounded(served: Door) -> None:
    caller = served.call((HELLO + b"\r\n") * 10 + HELLO + b"Connection: close\r\n\r\n")
    assert rest(caller).count(b"HTTP/1.1 200") == 11
    before = served.cuts("pipelined")
    rest(served.call((HELLO + b"\r\n") * 2000))
    eventually(lambda: served.cuts("pipelined") == before + 1)


def test_a_websocket_is_not_spoken_here(served: Door) -> None:
    upgrade = b"Connection: Upgrade, close\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    told = rest(served.call(HELLO + upgrade + b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"))
    assert not told.startswith(b"HTTP/1.1 101")
    assert served.alive()


def test_at_the_limit_who_asks_nothing_makes_room_for_who_does() -> None:
    with door(max_connections=8, client_timeout_s=30.0) as here:
        for _ in range(40):
            here.call()
        assert all(here.alive() for _ in range(5))
        eventually(lambda: here.open <= 8)
        eventually(lambda: here.cuts("displaced") >= 32)


class Caller:
    """A connection as the limiter sees it, which counts how often it is looked at."""

    looked = 0

    def __init__(self, limiter: ConnectionLimiter, *, busy: bool) -> None:
        self.limiter, self.busy, self.is_cut = limiter, busy, False

    @property
    def asks_nothing(self) -> bool:
        Caller.looked += 1
        return not self.busy

    def drop(self, reason: CloseReason) -> None:
        self.is_cut = True
        self.limiter.left(self)  # type: ignore[arg-type]

    def refuse(self, status: int, message: str, reason: CloseReason) -> None:
        self.drop(reason)


def test_at_the_limit_a_newcomer_costs_as_little_among_a_thousand_as_among_ten() -> None:
    """Every connection there is was gone through, twice, for each that came: a flood paid for itself a thousandfold."""
    for busy in (True, False):
        limiter, Caller.looked = ConnectionLimiter(Limits(max_connections=1000)), 0
        for _ in range(1000):
            limiter.admit(Caller(limiter, busy=busy))  # type: ignore[arg-type]
        flood = [Caller(limiter, busy=False) for _ in range(500)]
        for each in flood:
            limiter.admit(each)  # type: ignore[arg-type]
        assert Caller.looked <= 1000 + 2 * 500
        assert all(each.is_cut for each in flood) if busy else not any(each.is_cut for each in flood)


def test_the_one_that_waits_longest_makes_room_and_one_that_was_busy_when_looked_at_has_its_turn_later() -> None:
    limiter = ConnectionLimiter(Limits(max_connections=2))
    busy, idle, third, fourth = (Caller(limiter, busy=number == 0) for number in range(4))
    for each in (busy, idle, third):
        limiter.admit(each)  # type: ignore[arg-type]
    assert [each.is_cut for each in (busy, idle, third)] == [False, True, False]
    busy.busy = False
    limiter.waits(busy)  # type: ignore[arg-type]
    limiter.waits(third)  # type: ignore[arg-type]
    limiter.admit(fourth)  # type: ignore[arg-type]
    assert [each.is_cut for each in (busy, third, fourth)] == [True, False, False]


def test_where_all_are_busy_a_newcomer_gets_503_and_is_served_as_soon_as_one_has_ended() -> None:
    with door(max_connections=2, client_timeout_s=30.0) as here:
        for machine in here.stack.machines.values():
            machine.pause_s = 0.02
        busy = [here.call(here.post(**ENDLESS)) for _ in range(2)]
        eventually(lambda: here.stack.service.running == 2)
        told = rest(here.call(HELLO + b"\r\n"))
        assert told == b"" or told.startswith(b"HTTP/1.1 503 ")
        eventually(lambda: here.cuts("full") == 1)
        busy[0].close()
        eventually(lambda: here.open < 2)
        assert here.alive()


def test_the_limit_stays_below_that_of_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda what: (300, 300))
    assert servers.max_connections(Settings()) < 100
    monkeypatch.setattr(resource, "getrlimit", lambda what: (1 << 20, 1 << 20))
    assert servers.max_connections(Settings()) == Settings().max_connections
