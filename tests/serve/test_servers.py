"""The servers around a stack: ports that two want, and clients that keep a stopped server waiting."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import warnings

import pytest

from jdisagg.core.errors import ConfigError
from jdisagg.core.settings import Settings
from jdisagg.serve.deploy import servers
from tests.serve.live_toy import toy_stack


def test_a_client_that_never_reads_does_not_keep_a_stopped_server() -> None:
    settings = Settings(http_port=0, grpc_port=-1)

    async def run() -> bool:
        with toy_stack(decode_pages=2048) as stack:
            running = await servers.start(stack.service, settings, sockets := servers.bind(settings))
            assert sockets.http is not None
            deaf = socket.socket()
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            deaf.connect(sockets.http.getsockname())
            fields = {"prompt": [5], "max_tokens": 200, "n": 64, "logprobs": 20, "ignore_eos": True, "stream": True}
            body = json.dumps(fields).encode()
            deaf.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
            )
            assert running.http is not None and running.http_task is not None
            async with asyncio.timeout(60):
                while not running.http.server_state.tasks:  # until the answer is under way
                    await asyncio.sleep(0.01)
            await running.stop()
            done, _ = await asyncio.wait({running.http_task}, timeout=servers.GRACE_S + 60)
            deaf.close()
            return bool(done)

    assert asyncio.run(run())


@pytest.mark.parametrize("flag", ["http_port", "grpc_port"])
def test_of_two_that_start_at_once_on_a_port_the_second_says_so(flag: str) -> None:
    async def run() -> None:
        with toy_stack() as stack:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            settings = Settings(**{"http_port": -1, "grpc_port": -1, flag: port})
            both = servers.bind(settings), servers.bind(settings)
            first = await servers.start(stack.service, settings, both[0])
            with pytest.raises(ConfigError, match=f"--{flag}={port}: cannot"):
                await servers.start(stack.service, settings, both[1])
            await first.stop()
            if first.http_task is not None:
                await first.http_task

    asyncio.run(run())


def test_a_port_in_use_leaves_no_other_bound() -> None:
    with socket.socket() as taken, socket.socket() as free:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        free.bind(("127.0.0.1", 0))
        http_port, grpc_port = free.getsockname()[1], taken.getsockname()[1]
        free.close()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", ResourceWarning)
            with pytest.raises(ConfigError, match=f"--grpc_port={grpc_port}"):
                servers.bind(Settings(http_port=http_port, grpc_port=grpc_port))
            gc.collect()
        assert not [each for each in told if "unclosed" in str(each.message)]
        with servers.bind(Settings(http_port=http_port, grpc_port=-1)) as sockets:
            assert sockets.http is not None and sockets.http.fileno() >= 0
        assert sockets.http.fileno() < 0, "who bound it and did not serve has closed it"
