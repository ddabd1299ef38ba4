"""Fresh actors taken through a record, event by event, as a driver would have: what they decide, or why they cannot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from jdisagg.core.codec import shown
from jdisagg.core.errors import JournalError
from jdisagg.core.events import ROUTER, Effect, Event, Received
from jdisagg.core.journal import Header, Recorded
from jdisagg.core.request import WorkerId
from jdisagg.policy.router import Router
from jdisagg.policy.worker import Worker


class Actor(Protocol):
    def handle(self, event: Event, now_s: float) -> list[Effect]: ...


def actors_of(header: Header) -> dict[WorkerId, Actor]:
    """The router and the workers of a record, at their beginning. Raises JournalError where they cannot be made."""
    try:
        return {ROUTER: Router(header.router, header.workers), **{each.worker: Worker(each) for each in header.workers}}
    except Exception as error:
        raise JournalError(f"line 1: no such actors can be: {_said(error)}") from error


def decide(actors: Mapping[WorkerId, Actor], recorded: Recorded, number: int) -> list[Effect]:
    """What the record's event `number` leads to now. Raises JournalError, naming the line."""
    if recorded.actor not in actors:
        raise JournalError(
            f"line {recorded.line}: event {number} is for {shown(recorded.actor)}, which the header does not have"
        )
    try:
        return actors[recorded.actor].handle(recorded.event, recorded.at_s)
    except Exception as error:
        if isinstance(recorded.event, Received) and recorded.event.sender not in actors:
            return []  # live it ended the session with its speaker
        what = f"event {number}, {type(recorded.event).__name__} to {recorded.actor}"
        raise JournalError(f"line {recorded.line}: {what}, cannot follow on those before: {_said(error)}") from error


def _said(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
