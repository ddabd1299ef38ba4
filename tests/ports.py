"""Ports for servers that tests start: below those that the kernel gives to connections, and each given away once."""

from __future__ import annotations

import itertools
import os
import random
import socket

FIRST, COUNT = 10_000, 20_000  # below those that the kernel gives to whoever asks for any
_NUMBERS = itertools.count(random.Random(os.getpid()).randrange(COUNT))


def free_port() -> int:
    """One of 127.0.0.1 that nobody listens at, and that this process has not given away before."""
    while True:
        port = FIRST + next(_NUMBERS) % COUNT
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
