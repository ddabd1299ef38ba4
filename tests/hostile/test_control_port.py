"""Strangers at the control port of a router: they have no secret, and get neither memory nor anybody's time."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import grpc
import pytest

from jdisagg.serve.cluster.link import METHOD, PROTOCOL
from tests.hostile.bystander import Server, serving
from tests.ports import free_port

FIRST = b'{"jdisagg": %d, "nonce": "%s"}' % (PROTOCOL, b"0" * 32)


@pytest.fixture(scope="module")
def control() -> int:
    return free_port()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, control: int) -> Iterator[Server]:
    """A router that serves by itself and lets others join."""
    folder: Path = tmp_path_factory.mktemp("router")
    secret = folder / "secret"
    secret.touch(0o600)
    secret.write_text("sixteen bytes of secret, or more")
    flags = ("--role=router,colocated", f"--secret_file={secret}", f"--control_port={control}")
    with serving(folder, flags) as running:
        yield running


def channel(control: int) -> grpc.Channel:
    unlimited = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    return grpc.insecure_channel(f"127.0.0.1:{control}", unlimited)


def test_eight_strangers_with_sixty_megabytes_each(server: Server, control: int) -> None:
    before_mib, most = server.rss_mib(), [0.0]
    over = threading.Event()

    def weigh() -> None:
        while not over.wait(0.05):
            most[0] = max(most[0], server.rss_mib())

    threading.Thread(target=weigh, daemon=True).start()
    with server.bystander():
        channels = [channel(control) for _ in range(8)]
        calls = [each.stream_stream(METHOD)(iter([FIRST, b"x" * (60 << 20)])) for each in channels]
        for call in calls:
            with pytest.raises(grpc.RpcError):
                list(call)
        for each in channels:
            each.close()
    over.set()
    print(f"measured: {before_mib:.0f} to {most[0]:.0f} MiB")
    assert most[0] - before_mib < 100


def test_three_hundred_half_open_streams(server: Server, control: int) -> None:
    """One more who asks is answered at once: the router's challenge is the first that a worker waits for."""
    silence, calls, channels = threading.Event(), [], []
    with server.bystander():
        for number in range(40):
            channels.append(channel(control))
            for _ in range(8):
                words = chain([FIRST] if number % 2 else [], (b"" for _ in iter(silence.wait, None)))
                calls.append(channels[-1].stream_stream(METHOD)(words))
        time.sleep(1.0)
        began_s, mine = time.monotonic(), queue.SimpleQueue[bytes]()
        mine.put(FIRST)
        with channel(control) as last:
            call = last.stream_stream(METHOD)(iter(mine.get, b""))
            assert b"nonce" in next(call)
            challenged_s = time.monotonic() - began_s
            mine.put(b"")
        silence.set()
        for each in channels:
            each.close()
    print(f"measured: challenged after {challenged_s:.2f} s")
    assert challenged_s < 6.0


def test_noise_and_silence_on_bare_connections(server: Server, control: int) -> None:
    noise = (b"", b"\xff" * 4096, b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 4096)
    with server.bystander():
        callers = [socket.create_connection(("127.0.0.1", control), timeout=60) for _ in range(200)]
        for number, caller in enumerate(callers):
            caller.sendall(noise[number % len(noise)])
        time.sleep(2.0)
        for caller in callers:
            caller.close()


def test_what_a_stranger_says_is_no_line_of_the_log(server: Server, control: int) -> None:
    with channel(control) as mine, pytest.raises(grpc.RpcError):
        list(mine.stream_stream(METHOD)(iter([b'{"jdisagg": "\\nERROR forged"}'])))
    assert "forged" in server.log() and "\nERROR forged" not in server.log()
