"""Strangers are few, have little time, and are in nobody's way but their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from jdisagg.core.errors import PeerDead
from jdisagg.kv.transport.lobby import Lobby


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def out() -> Iterator[list[str]]:
    yield []


def test_who_sat_longest_makes_room_for_who_comes(out: list[str]) -> None:
    lobby = Lobby(2, 10.0)
    with pytest.raises(PeerDead, match="of here was shown out"), ExitStack() as seats:
        for name in ("first", "second", "third"):
            seats.enter_context(lobby.seat("here", lambda name=name: out.append(name)))
        assert out == ["first"] and len(lobby) == 2


def test_a_host_that_sends_many_displaces_its_own(out: list[str]) -> None:
    lobby = Lobby(3, 10.0)
    with pytest.raises(PeerDead), ExitStack() as seats:
        seats.enter_context(lobby.seat("honest", lambda: out.append("honest")))
        for number in range(20):
            seats.enter_context(lobby.seat("crowd", lambda number=number: out.append(str(number))))
        assert "honest" not in out and len(lobby) == 3


def test_who_takes_too_long_is_shown_out_once_and_who_has_left_is_not(out: list[str]) -> None:
    clock = Clock()
    lobby = Lobby(10, 5.0, clock)
    with lobby.seat("here", lambda: out.append("quick")):
        clock.now_s = 4.0
    with pytest.raises(PeerDead), lobby.seat("here", lambda: out.append("slow")):
        clock.now_s = 8.0
        lobby.sweep()
        assert out == []
        clock.now_s = 9.5
        lobby.sweep()
        lobby.sweep()
        assert out == ["slow"]
    assert len(lobby) == 0
