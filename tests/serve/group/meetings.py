"""Leaders and members of a group in one process, over real sockets."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from jdisagg.policy.group_handshake import MemberInfo
from jdisagg.serve.cluster.group.assembly import Assembly, Meeting
from tests.ports import free_port

SECRET = b"thirty two bytes of no real secret"
WAIT_S = 20.0


def card(rank: int = 0, **other: Any) -> MemberInfo:
    return replace(MemberInfo("p0", rank, 2, "1", "0.10", "aaaa", {"mesh": "prefill:tp2"}, time.time()), **other)


def meeting(wait_s: float = WAIT_S, **other: Any) -> Meeting:
    return replace(Meeting(f"127.0.0.1:{free_port()}", SECRET, time.monotonic() + wait_s, wait_s), **other)


class Door:
    """A leader that waits, and every line it says."""

    def __init__(self, at: Meeting, own: MemberInfo | None = None) -> None:
        self.said: list[str] = []
        self.assembly = Assembly(at, own or card(), self.said.append)
