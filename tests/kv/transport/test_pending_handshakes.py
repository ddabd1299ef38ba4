"""Strangers are few, have little time, and are in nobody's way but their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from jdisagg.core.errors import PeerDead
from jdisagg.kv.transport.listener import PendingHandshakes


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def out() -> Iterator[list[str]]:
    yield []


def test_who_has_waited_longest_makes_room_for_who_comes(out: list[str]) -> None:
    handshakes = PendingHandshakes(2, 10.0)
    with pytest.raises(PeerDead, match="of here was cut off"), ExitStack() as stack:
        for name in ("first", "second", "third"):
            stack.enter_context(handshakes.admit("here", lambda name=name: out.append(name)))
        assert out == ["first"] and len(handshakes) == 2


def test_a_host_that_sends_many_displaces_its_own(out: list[str]) -> None:
    handshakes = PendingHandshakes(3, 10.0)
    with pytest.raises(PeerDead), ExitStack() as stack:
        stack.enter_context(handshakes.admit("honest", lambda: out.append("honest")))
        for number in range(20):
            stack.enter_context(handshakes.admit("crowd", lambda number=number: out.append(str(number))))
        assert "honest" not in out and len(handshakes) == 3


def test_who_takes_too_long_is_cut_off_once_and_who_has_left_is_not(out: list[str]) -> None:
    clock = Clock()
    handshakes = PendingHandshakes(10, 5.0, clock)
    with handshakes.admit("here", lambda: out.append("quick")):
        clock.now_s = 4.0
    with pytest.raises(PeerDead), handshakes.admit("here", lambda: out.append("slow")):
        clock.now_s = 8.0
        handshakes.sweep()
        assert out == []
        clock.now_s = 9.5
        handshakes.sweep()
        handshakes.sweep()
        assert out == ["slow"]
    assert len(handshakes) == 0
