"""Pauses between two starts of what fails."""

from __future__ import annotations

from jdisagg.policy.restarts import LONGEST_S, MOST, STEADY_S, Restarts


def test_pauses_grow_to_the_longest_and_end() -> None:
    restarts = Restarts()
    pauses = [restarts.pause_s(1.0) for _ in range(MOST)]
    assert pauses[:6] == [1.0, 2.0, 4.0, 8.0, 16.0, LONGEST_S] and set(pauses[5:-1]) == {LONGEST_S}
    assert pauses[-1] is None


def test_who_lived_long_starts_anew_at_once() -> None:
    restarts = Restarts()
    for _ in range(MOST - 1):
        restarts.pause_s(1.0)
    assert restarts.pause_s(STEADY_S) == 1.0 and restarts.pause_s(1.0) == 2.0
