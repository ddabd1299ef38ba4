"""The bystander itself: it sees a server that stands still, and one that does not."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.hostile.bystander import Server


def test_a_server_that_is_left_alone_keeps_its_streams_going(server: Server) -> None:
    with server.bystander() as felt:
        time.sleep(1.0)
    assert felt[0].events > 10 and felt[0].live_calls > 3


def test_a_server_that_stands_still_is_seen(server: Server) -> None:
    with pytest.raises(AssertionError, match="stood still"), server.bystander():
        os.kill(server.process.pid, signal.SIGSTOP)
        time.sleep(5.0)
        os.kill(server.process.pid, signal.SIGCONT)
