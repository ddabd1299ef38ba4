"""The protocol with one thing taken out of it, a time: each must be found out.

Rows of the handoff's table are deleted; deadlines, acknowledgements and answers are never sent; and fences fall: a
word of an earlier attempt is taken for one of the attempt that is under way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from jdisagg.core.events import Effect, Event, InsertKV, KVArrived, OpenGates, Received, RunStep, Send, SetTimer
from jdisagg.core.messages import Abort, AbortAck, Ack, Commit, Refused, Renew, Resend, Reserved
from jdisagg.core.request import Attempt
from jdisagg.policy.router.request_state import Waiting
from jdisagg.policy.router.router import Router
from jdisagg.policy.worker.handoff import TABLE
from jdisagg.policy.worker.worker import Worker
from tests.explore.actors import Actor, ActorPatch


class Mutation(NamedTuple):
    name: str
    patch: ActorPatch = ActorPatch()
    row: Any = None  # of the handoff's table, to be deleted


def rows() -> Iterator[Mutation]:
    yield from (Mutation(f"no row {' '.join(row)}", row=row) for row in TABLE)


# ------------------------------------------------------------------ what is never said


def unsaid(name: str, drop: Callable[[Actor, Event, Effect], bool]) -> Mutation:
    def alter(actor: Actor, event: Event, effects: list[Effect]) -> list[Effect]:
        return [effect for effect in effects if not drop(actor, event, effect)]

    return Mutation(name, ActorPatch(alter=alter))


def silent(word: type) -> Mutation:
    """Workers never say this to anybody."""

    def drop(actor: Actor, event: Event, effect: Effect) -> bool:
        return isinstance(actor, Worker) and isinstance(effect, Send) and isinstance(effect.message, word)

    return unsaid(f"no {word.__name__}", drop)


def untimed(name: str, prefix: str, when: Callable[[Actor, str], bool] = lambda actor, key: True) -> Mutation:
    """Timers of these keys are never armed."""

    def drop(actor: Actor, event: Event, effect: Effect) -> bool:
        return isinstance(effect, SetTimer) and effect.key.startswith(prefix) and when(actor, effect.key)

    return unsaid(f"no deadline for {name}", drop)


def in_state(*states: str) -> Callable[[Actor, str], bool]:
    """Whether the prompt that a timer is of is in one of these states."""

    def when(actor: Actor, key: str) -> bool:
        assert isinstance(actor, Worker)
        return any(
            each.handoff.timer == key and each.handoff.state in states for each in actor.prefill.sequences.values()
        )

    return when


# Routers die in no scene: `tests/policy/router/test_membership.py` tests the deadline of the one wait that begins so.
IN_SCENES = [waiting for waiting in Waiting if waiting is not Waiting.KEEPER]


def row_waits(waiting: Waiting) -> Callable[[Actor, str], bool]:
    def when(actor: Actor, key: str) -> bool:
        assert isinstance(actor, Router)
        return any(f"row/{row.request_id}" == key and row.waiting is waiting for row in actor.rows.values())

    return when


def deadlines() -> Iterator[Mutation]:
    yield untimed("a prompt's step", "source/", in_state("computing", "streaming"))
    yield untimed("Ack", "source/", in_state("shipped"))
    yield untimed("a reservation", "destination/")
    yield untimed("a missing part", "parts/")
    yield untimed("the next Renew", "renew/")
    yield untimed("an abort", "abort/")
    yield untimed("a full house", "capacity")
    yield from (untimed(f"a row that waits for {waiting}", "row/", row_waits(waiting)) for waiting in IN_SCENES)


SAID = Ack, AbortAck, Reserved, Refused, Commit, Abort, Resend, Renew


def words() -> Iterator[Mutation]:
    yield from (silent(word) for word in SAID)


# ------------------------------------------------------------------ fences


def unfenced(word: type) -> Mutation:
    """Late words of this kind are taken for words of the present attempt."""

    def amend(actor: Actor, event: Event) -> Event:
        if isinstance(event, KVArrived) and word is KVArrived:
            return replace(event, transfer=_of_present(actor, event.transfer))
        if isinstance(event, Received) and isinstance(event.message, word):
            return replace(event, message=_of_present(actor, event.message))
        return event

    return Mutation(f"no fence for {word.__name__}", ActorPatch(amend=amend))


def _of_present(actor: Actor, word: Any) -> Any:
    present = [attempt for attempt in _attempts(actor) if attempt.request_id == word.attempt.request_id]
    return replace(word, attempt=max(present)) if present else word


def _attempts(actor: Actor) -> list[Attempt]:
    if isinstance(actor, Router):
        return [row.attempt for row in actor.rows.values() if row.epoch]
    return [*actor.decode.sequences, *actor.prefill.sequences]


def fences() -> Iterator[Mutation]:
    """Not that of Drawn: the router hears only who has a part in an attempt that has begun, and what a request draws
    follows from its tokens, so that an earlier attempt's draws are the same."""
    yield from (unfenced(word) for word in (KVArrived, Commit, Ack, Abort, Reserved))


def unchecked() -> Mutation:
    """Digests are not looked at: broken KV is taken for good."""

    def amend(actor: Actor, event: Event) -> Event:
        return replace(event, intact=True) if isinstance(event, KVArrived) else event

    return Mutation("no digest", ActorPatch(amend=amend))


def uncounted() -> Mutation:
    """COMMIT says that it counts no part: a reservation is complete before its KV is."""

    def amend(actor: Actor, event: Event) -> Event:
        if isinstance(event, Received) and isinstance(event.message, Commit):
            return replace(event, message=replace(event.message, num_parts=0))
        return event

    return Mutation("no count of parts", ActorPatch(amend=amend))


def unwritten() -> Mutation:
    """KV that arrives is booked and not inserted."""
    return unsaid("no InsertKV", lambda actor, event, effect: isinstance(effect, InsertKV))


# ------------------------------------------------------------------ gates


def ungated() -> Mutation:
    """Stages do not wait for their KV."""

    def alter(actor: Actor, event: Event, effects: list[Effect]) -> list[Effect]:
        return [
            replace(each, plan=replace(each.plan, decode=replace(each.plan.decode, gates=())))
            if isinstance(each, RunStep) and each.plan.decode
            else each
            for each in effects
        ]

    return Mutation("no gate", ActorPatch(alter=alter))


def unopened() -> Mutation:
    """A step that waits for KV of a handoff that is over waits for ever."""
    return unsaid("no OpenGates", lambda actor, event, effect: isinstance(effect, OpenGates))


def opened_late() -> Mutation:
    """It runs when the pages it writes to are another's already."""

    def alter(actor: Actor, event: Event, effects: list[Effect]) -> list[Effect]:
        return sorted(effects, key=lambda effect: isinstance(effect, OpenGates))

    return Mutation("OpenGates behind all else", ActorPatch(alter=alter))


def gates() -> list[Mutation]:
    return [ungated(), unopened(), opened_late()]


def forgetful() -> Mutation:
    """A router that starts again counts its epochs from 1 again."""
    return Mutation("no fresh epochs", ActorPatch(fresh_epochs=False))


def every() -> list[Mutation]:
    return [*rows(), *deadlines(), *words(), *fences(), *gates(), unchecked(), uncounted(), unwritten(), forgetful()]
