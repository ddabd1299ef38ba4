"""Clients that open connections and keep them: long headers, silence, trickles, no reading. Each ends in its time."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest

from tests.hostile.bystander import Server, until

TIMEOUT_S = 3.0
PATIENCE_S = 60.0  # of a test; what it waits for comes much sooner
FLAGS = (f"--client_timeout_s={TIMEOUT_S}", "--max_connections=200", "--log_level=error")
HEADER = b"GET /live HTTP/1.1\r\nHost: x\r\nX: "
ENDLESS = {"prompt": [5, 6, 7], "max_tokens": 200, "ignore_eos": True, "stream": True, "logprobs": 20, "n": 64}


def place(server: Server) -> tuple[str, int]:
    found = urlsplit(server.url)
    assert found.hostname is not None and found.port is not None
    return found.hostname, found.port


def dial(address: tuple[str, int], said: bytes = b"") -> socket.socket:
    caller = socket.create_connection(address, timeout=PATIENCE_S)
    caller.sendall(said)
    return caller


@contextmanager
def many(count: int, address: tuple[str, int], said: bytes = b"") -> Iterator[list[socket.socket]]:
    callers = [dial(address, said) for _ in range(count)]
    try:
        yield callers
    finally:
        for caller in callers:
            caller.close()


def sample(server: Server, pattern: str) -> float:
    return sum(
        float(value) for value in re.findall(rf"^jdisagg_{pattern} (\S+)$", server.get("/metrics"), re.MULTILINE)
    )


def cuts(server: Server, reason: str) -> float:
    return sample(server, rf'http_connections_cut_total{{.*reason="{reason}".*}}')


def until_hung_up(callers: list[socket.socket]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    for caller in callers:
        caller.settimeout(max(0.01, end_s - time.monotonic()))
        try:
            while caller.recv(1 << 16):
                continue
        except ConnectionError:
            continue


def test_a_header_without_end(server: Server) -> None:
    before_mib, sent = server.rss_mib(), 0
    with server.bystander():
        for _ in range(4):
            caller = dial(place(server), HEADER)
            try:
                for _ in range(60):
                    sent += caller.send(b"x" * (1 << 20))
            except OSError:
                caller.close()
    print(f"measured: {sent >> 20} MiB taken, {server.rss_mib() - before_mib:+.0f} MiB resident")
    assert sent < 40 << 20 and server.rss_mib() - before_mib < 50
    until(lambda: cuts(server, "long_header") >= 4, "the count of four cuts")


@pytest.mark.parametrize(
    "said",
    [b"", pytest.param(b"\r\n", marks=pytest.mark.hostile), HEADER],
    ids=["nothing", "a blank line", "half a header"],
)
def test_150_who_ask_nothing(server: Server, said: bytes) -> None:
    with server.bystander(), many(150, place(server), said) as callers:
        until_hung_up(callers)


def test_150_bodies_that_do_not_come(server: Server) -> None:
    said = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{"
    with server.bystander(), many(150, place(server), said) as callers:
        until_hung_up(callers)
    until(lambda: cuts(server, "slow_body") >= 150, "the count of 150 cuts")


def test_over_the_limit_of_connections(server: Server) -> None:
    """Five times as many as there may be: none of the strangers keeps the bystander out."""
    before = cuts(server, "displaced")
    with server.bystander(), many(1000, place(server)):
        until(lambda: cuts(server, "displaced") - before >= 700, "strangers to make room")
        assert sample(server, "http_connections{.*}") <= 210  # with those on their way out


def test_a_reader_that_stops_reading(server: Server) -> None:
    before, said = cuts(server, "unread"), json.dumps(ENDLESS).encode()
    post = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(said), said)
    with server.bystander(longest_gap_s=5.0):  # it waits its turn among the rows of a model of eight
        deaf = socket.socket()
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        deaf.connect(place(server))
        deaf.sendall(post)
        until(lambda: cuts(server, "unread") > before, "the deaf one to be dropped")  # counted before that
    deaf.close()
    assert cuts(server, "unread") == before + 1
    until(lambda: not sample(server, 'kv_pages{.*state="used".*}'), "every page to be free")


def test_silent_grpc_connections(server: Server) -> None:
    host, port = server.grpc.split(":")
    with server.bystander(), many(300, (host, int(port))) as callers:
        until_hung_up(callers)
