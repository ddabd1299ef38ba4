"""What happened, on record: every event with its time and its actor, and what it led to, as JSON lines.

A record is exact: decoded, it is equal to what was encoded, floats to the last bit. Fields at their defaults are left
out. The ring in memory keeps objects and is encoded only when somebody reads it, so that recording costs little.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import types
import typing
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from typing import Any

from jdisagg.core import events, messages, plans
from jdisagg.core.errors import JournalError
from jdisagg.core.events import Effect, Event
from jdisagg.core.ledger import Ledger
from jdisagg.core.request import Request, Sampled, SamplingParams, WorkerId
from jdisagg.core.router_config import RouterConfig
from jdisagg.core.worker_config import WorkerConfig

TAG = "is"
VERSION = 1


def _dataclasses_of(module: types.ModuleType) -> list[type]:
    return [each for each in vars(module).values() if isinstance(each, type) and dataclasses.is_dataclass(each)]


NOUNS: dict[str, type] = {
    each.__name__: each
    for each in (
        *_dataclasses_of(plans),
        *_dataclasses_of(messages),
        *_dataclasses_of(events),
        *(Request, SamplingParams, Sampled, Ledger, WorkerConfig, RouterConfig),
    )
}

# ------------------------------------------------------------------ values to JSON and back


def encode(value: Any) -> Any:
    """A noun, or anything one is made of, as JSON values; dataclasses carry their names under "is"."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        given = {each.name: getattr(value, each.name) for each in _fields(type(value))}
        defaults = _defaults(type(value))
        kept = {name: encode(one) for name, one in given.items() if name not in defaults or one != defaults[name]}
        return {TAG: type(value).__name__, **kept}
    if isinstance(value, tuple | list):
        return [encode(each) for each in value]
    if isinstance(value, Enum):
        return value.value
    return value


def decode(value: Any) -> Any:
    """The noun that `encode` was given. Raises JournalError where it is none of this version's."""
    try:
        return _decode_noun(value)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise JournalError(f"cannot read {str(value)[:120]!r}: {type(error).__name__}: {error}") from error


def _decode_noun(value: dict[str, Any]) -> Any:
    noun = NOUNS[value[TAG]]
    readers = _readers(noun)
    return noun(**{name: readers[name](one) for name, one in value.items() if name != TAG})


@cache
def _fields(noun: type) -> tuple[dataclasses.Field[Any], ...]:
    return tuple(each for each in dataclasses.fields(noun) if each.init)


@cache
def _defaults(noun: type) -> dict[str, Any]:
    return {each.name: each.default for each in _fields(noun) if each.default is not dataclasses.MISSING}


@cache
def _readers(noun: type) -> dict[str, Callable[[Any], Any]]:
    hints = typing.get_type_hints(noun)
    return {each.name: _reader(hints[each.name]) for each in _fields(noun)}


def _reader(hint: Any) -> Callable[[Any], Any]:
    """What turns the JSON of a value of type `hint` back into it."""
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(hint, typing.NewType):
        return _reader(hint.__supertype__)
    if origin in (types.UnionType, typing.Union):
        return _union_reader(inside)
    if origin in (tuple, list):
        return _row_reader(origin, inside)
    if dataclasses.is_dataclass(hint):
        return _decode_noun
    return hint if issubclass(hint, Enum) else _as_is


def _as_is(value: Any) -> Any:
    return value


def _union_reader(members: tuple[Any, ...]) -> Callable[[Any], Any]:
    """Unions here are of nouns, which name themselves, or of one plain type and None."""
    some = [member for member in members if member is not types.NoneType]
    read = _decode_noun if dataclasses.is_dataclass(some[0]) else _reader(some[0])
    return lambda value: None if value is None else read(value)


def _row_reader(origin: type, inside: tuple[Any, ...]) -> Callable[[Any], Any]:
    if origin is list or inside[-1] is Ellipsis:
        read = _reader(inside[0])
        return lambda value: origin(read(each) for each in value)
    reads = [_reader(each) for each in inside]
    return lambda value: tuple(read(each) for read, each in zip(reads, value, strict=True))


def digest(effects: Iterable[Effect]) -> str:
    """16 hexadecimal digits of BLAKE2b over the effects in their order: equal decisions, equal digests."""
    text = json.dumps([encode(effect) for effect in effects], separators=(",", ":"), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


# ------------------------------------------------------------------ the record


@dataclass(frozen=True, slots=True)
class Header:
    """What the actors were made of."""

    router: RouterConfig
    workers: tuple[WorkerConfig, ...]

    def to_line(self) -> str:
        workers = [encode(each) for each in self.workers]
        return json.dumps({"version": VERSION, "router": encode(self.router), "workers": workers})


@dataclass(slots=True)
class Entry:
    """One event, when it was taken (seconds of the driver's clock) and by whom, and the effects that followed."""

    at_s: float
    actor: WorkerId
    event: Event
    effects: list[Effect] = field(default_factory=list)

    def to_line(self) -> str:
        decided = digest(self.effects)
        record = {"at_s": self.at_s, "actor": self.actor, "event": encode(self.event), "decided": decided}
        return json.dumps(record, separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class Recorded:
    """An entry as read back: its effects only as their digest."""

    at_s: float
    actor: WorkerId
    event: Event
    decided: str


class Journal:
    """The last `limit` entries in memory; all of them to `sink`, a line each, where one is given."""

    def __init__(self, header: Header, limit: int = 10_000, sink: Callable[[str], Any] | None = None) -> None:
        self.header, self.sink = header, sink
        self.entries: deque[Entry] = deque(maxlen=limit)
        self.num_recorded = 0
        self._open: Entry | None = None  # its effects are still being observed
        self._unwritten: Entry | None = None
        if sink is not None:
            sink(header.to_line())

    def record(self, at_s: float, actor: WorkerId, event: Event, effects: Sequence[Effect]) -> None:
        self._add(Entry(at_s, actor, event, list(effects)))
        self.close()

    def observe(self, actor: WorkerId, item: Event | Effect, now_s: float) -> None:
        """For drivers that show events and effects one by one: an event, then the effects it led to."""
        if isinstance(item, Event):
            self.close()
            self._open = Entry(now_s, actor, item)
            self._add(self._open)
        elif self._open is not None:
            self._open.effects.append(item)

    def close(self) -> None:
        """The last entry has all its effects: it may be written."""
        self._open = None
        if self.sink is not None and self._unwritten is not None:
            self.sink(self._unwritten.to_line())
        self._unwritten = None

    def _add(self, entry: Entry) -> None:
        self.entries.append(entry)
        self.num_recorded += 1
        self._unwritten = entry

    def lines(self) -> Iterator[str]:
        """The header and what the ring holds. A ring that has forgotten its beginning cannot be replayed."""
        yield self.header.to_line()
        yield from (entry.to_line() for entry in self.entries)


def read_lines(lines: Iterable[str]) -> tuple[Header, Iterator[Recorded]]:
    """A journal's header and its entries, read as they are asked for. Raises JournalError, naming the line."""
    numbered = enumerate(lines, 1)
    _, first = next(numbered, (0, ""))
    head = _parse(first, 1)
    if head.get("version") != VERSION:
        raise JournalError(f"line 1 says version {head.get('version')}, this program reads {VERSION}")
    header = Header(decode(head["router"]), tuple(decode(each) for each in head["workers"]))
    return header, (_recorded(line, number) for number, line in numbered if line.strip())


def _parse(line: str, number: int) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise JournalError(f"line {number} is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise JournalError(f"line {number} is no record: {line[:60]!r}")
    return record


def _recorded(line: str, number: int) -> Recorded:
    record = _parse(line, number)
    missing = {"at_s", "actor", "event", "decided"} - record.keys()
    if missing:
        raise JournalError(f"line {number} lacks {', '.join(sorted(missing))}")
    return Recorded(record["at_s"], WorkerId(record["actor"]), decode(record["event"]), record["decided"])
