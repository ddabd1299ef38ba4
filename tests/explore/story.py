"""A trace as a story: who said what to whom, what each did about it, and what every page was then."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from jdisagg.core import events as ev
from jdisagg.core.messages import Drawn
from jdisagg.core.request import Attempt
from tests.explore.device import Violation, name, told
from tests.explore.search import Found
from tests.explore.steps import follow
from tests.explore.world import GONE, Action, State, World

UNTOLD = frozenset({"attempt", "request_id", "request", "sampling", "detail", "at_s"})


def tell(world: World, found: Found) -> str:
    """The whole story of a search that found a violation."""
    lines = [f"after {found.states} states: {found.violation}", ""]
    state = world.start()
    for number, action in enumerate(found.trace, 1):
        lines.append(f"{number:3}. {_opening(world, state, action)}")
        try:
            then = follow(world, state, action)
        except Violation as violation:
            return "\n".join([*lines, f"     !! {violation}"])
        lines += [f"     {line}" for line in _changes(world, state, then)]
        state = then
    return "\n".join([*lines, f"     !! {found.violation}"])


def _opening(world: World, state: State, action: Action) -> str:
    match action.kind:
        case "submit" | "cancel" | "stop" | "again":
            words = {
                "submit": "asks",
                "cancel": "goes away",
                "stop": "has what ends its answer",
                "again": "asks again, under the same id",
            }
            word = words[action.kind]
            return f"the client of {world.ids[action.which]} {word}"
        case "timer" | "early":
            timer = state.timers[action.which]
            when = "too early: " if action.kind == "early" else ""
            return f"{when}the timer {timer.key} of {world.names[timer.actor]} fires, at {timer.at_s:g} s"
        case "restart":
            return f"{world.names[action.which]} crashes and starts again, empty; nobody is told"
        case "lose":
            return f"{world.names[action.which]} crashes for good"
        case "back":
            return f"{world.names[action.which]} starts again, empty, and joins"
        case "leave":
            return "the router crashes and starts again; its workers notice some time, its clients at once"
        case "change":
            target = world.scene.changes[action.which]
            return f"{target.worker} is to become {target.role}"
        case "reboot":
            return "the router crashes and starts again; its clients see their connections cut"
        case "stray":
            return f"late or again: {_item(world, state.strays[action.which])}"
    item = state.queues[action.which][action.at]
    before = {"deliver": "", "loss": "LOST: ", "dup": "the first of two copies: ", "late": "OVERTAKEN: "}
    before |= {"flip": "BROKEN: ", "burst": "the transfer FAILS: ", "fail": "and the plan that follows FAILS: "}
    return f"{before[action.kind]}{_item(world, item)}"


def _item(world: World, number: int) -> str:
    to, event, _ = world.items[number]
    there = world.names[to]
    match event:
        case ev.Received(sender, message):
            return f"{sender} -> {there}: {words(message)}"
        case ev.KVArrived(transfer):
            return f"{transfer.source} => {there}: KV of {words(transfer)}"
        case ev.EngineFailed():
            return f"the devices of {there} say that {event.reason}"
        case ev.RouterLost():
            return f"{there} learns that its router is gone, and joins the new one"
        case ev.WorkerJoined(config):
            return f"the router learns that {config.worker} has joined"
        case ev.Reshaped(config):
            return f"the devices of {there} are those of a {config.role} worker now"
        case ev.WorkerLost(worker):
            return f"the router learns that {worker} is lost"
    return f"the devices of {there} are done with {words(event)}"


def words(noun: Any) -> str:
    """A noun with the attempt it is of and the fields that matter."""
    if isinstance(noun, Drawn):
        return "Drawn " + ", ".join(words(delta) for delta in noun.deltas)
    attempt = f" {name(noun.attempt)}" if hasattr(noun, "attempt") else f" {getattr(noun, 'request_id', '')}".rstrip()
    assert is_dataclass(noun), f"{noun!r} has no fields"
    given = [(each.name, getattr(noun, each.name)) for each in fields(noun) if each.name not in UNTOLD]
    return (
        type(noun).__name__
        + attempt
        + "".join(f" {key}={_value(value)}" for key, value in given if value not in ((), None))
    )


def _value(value: Any) -> str:
    if is_dataclass(value):
        return words(value)
    return str([_value(each) for each in value]).replace("'", "") if isinstance(value, tuple) else str(value)


def _changes(world: World, before: State, after: State) -> Iterator[str]:
    """What the actors hold now, where that changed."""
    for number, (old, new) in enumerate(zip(before.actors, after.actors, strict=True)):
        if new not in (old, GONE):
            yield f"{world.names[number]}: {world.cast.notes[new].holds or 'nothing to do'}"
    for at, (old, new) in enumerate(zip(before.queues, after.queues, strict=True)):
        for item in new[len(old) :] if new[: len(old)] == old else ():
            yield f"says {_item(world, item)}" if world.queue_names[at][0] == "mail" else f"starts {_item(world, item)}"
    for request_id, old, new in zip(world.ids, before.clients, after.clients, strict=True):
        if old != new:
            yield f"client of {request_id}: {new.status}, {new.told} tokens"
    for number, (old, new) in enumerate(zip(before.devices, after.devices, strict=True), 1):
        if old != new:
            yield f"pages of {world.names[number]}: {_pages(world, new)}"


def _pages(world: World, device: int) -> str:
    owners, contents, *_ = world.devices[device]
    return "; ".join(f"{page} {_page(owners[page], contents[page])}" for page in range(1, len(owners)))


def _page(owner: Attempt | None, content: Any) -> str:
    return "free" if owner is None else f"of {name(owner)} with {told(content)}"
