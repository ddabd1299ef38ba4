"""What happened, on record: every event with its time and its actor, and what it led to, as JSON lines.

A record is exact (see `codec.py`). The ring in memory keeps objects and is encoded only when somebody reads it, so
that recording costs little.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from jdisagg.core.codec import decode, decode_as, encode, read_json, shown
from jdisagg.core.errors import ConfigError, DecodeError, JournalError
from jdisagg.core.events import Effect, Event
from jdisagg.core.request import WorkerId
from jdisagg.core.router_config import RouterConfig
from jdisagg.core.worker_config import WorkerConfig

VERSION = 5
LATEST_S = 1e12  # a clock says no more


def digest(effects: Iterable[Effect]) -> str:
    """16 hexadecimal digits of BLAKE2b over the effects in their order: equal decisions, equal digests."""
    text = json.dumps([encode(effect) for effect in effects], separators=(",", ":"), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


# ------------------------------------------------------------------ the record


@dataclass(frozen=True, slots=True)
class Header:
    """Names what the actors were made of, and the model that drew the tokens."""

    router: RouterConfig
    workers: tuple[WorkerConfig, ...]
    model: str = ""  # its identity in one line, NAME:FINGERPRINT first; empty in older journals and of toy machines

    @property
    def model_fingerprint(self) -> str:
        """Returns the model's short fingerprint; empty if the journal names none."""
        return self.model.partition(" (")[0].rpartition(":")[2]

    def to_line(self) -> str:
        """Returns the header as the first line of a file."""
        workers = [encode(each) for each in self.workers]
        return json.dumps({"version": VERSION, "model": self.model, "router": encode(self.router), "workers": workers})


@dataclass(slots=True)
class Entry:
    """One event, when it was taken (seconds of the driver's clock) and by whom, and the effects that followed."""

    at_s: float
    actor: WorkerId
    event: Event
    effects: list[Effect] = field(default_factory=list[Effect])

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
    line: int = field(default=0, compare=False)  # of the file


class Journal:
    """The last `limit` entries in memory; all of them to `sink`, a line each, where one is given.

    A sink that fails is dropped, for a full disk is to cost the record and nothing else; `dropped` is told why, once.
    """

    def __init__(
        self,
        header: Header,
        limit: int = 10_000,
        sink: Callable[[str], Any] | None = None,
        dropped: Callable[[OSError], None] = lambda error: None,
    ) -> None:
        """Raises OSError where the sink does not even take the header."""
        self.header, self.sink, self._dropped = header, sink, dropped
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
            self._write(self.sink, self._unwritten.to_line())
        self._unwritten = None

    def _write(self, sink: Callable[[str], Any], line: str) -> None:
        try:
            sink(line)
        except OSError as error:
            self.sink = None
            self._dropped(error)

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
    head = _parse(first, 1, ("version",))
    if head["version"] != VERSION:
        raise JournalError(f"line 1 says version {shown(head['version'])}, this program reads {VERSION}")
    _check_there(head, 1, ("router", "workers"))
    if not isinstance(head["workers"], list):
        raise JournalError(f"line 1: workers is {shown(head['workers'])} and no list")
    workers, model = cast(list[Any], head["workers"]), head.get("model", "")
    if not isinstance(model, str):
        raise JournalError(f"line 1: model is {shown(model)} and no text")
    try:
        configs = tuple(decode_as(WorkerConfig, each) for each in workers)
        header = Header(decode_as(RouterConfig, head["router"]), configs, model)
        for worker in header.workers:
            worker.check()
    except (DecodeError, ConfigError) as error:
        raise JournalError(f"line 1: {error}") from error
    return header, (_recorded(line, number) for number, line in numbered if line.strip())


def _parse(line: str, number: int, names: Sequence[str]) -> dict[str, Any]:
    """The record of a line that has these fields."""
    try:
        record = read_json(line)
    except (ValueError, RecursionError) as error:
        cut = "" if line.endswith("\n") else ", and has no end: the file may have been cut off there"
        raise JournalError(f"line {number} is not JSON: {str(error)[:120]}{cut}") from error
    if not isinstance(record, dict):
        raise JournalError(f"line {number} is no record: {shown(record)}")
    found = cast(dict[str, Any], record)
    _check_there(found, number, names)
    return found


def _check_there(record: dict[str, Any], number: int, names: Sequence[str]) -> None:
    missing = [name for name in names if name not in record]
    if missing:
        raise JournalError(f"line {number} lacks {', '.join(sorted(missing))}")


def _recorded(line: str, number: int) -> Recorded:
    record = _parse(line, number, ("at_s", "actor", "event", "decided"))
    at_s, actor, decided = record["at_s"], record["actor"], record["decided"]
    if type(at_s) not in (int, float) or not abs(at_s) <= LATEST_S:
        raise JournalError(f"line {number}: at_s is {shown(at_s)} and no time")
    if not isinstance(actor, str) or not isinstance(decided, str):
        raise JournalError(f"line {number}: actor is {shown(actor)} and decided {shown(decided)}, both are texts")
    try:
        event = decode(record["event"])
    except DecodeError as error:
        raise JournalError(f"line {number}: {error}") from error
    if not isinstance(event, Event):
        raise JournalError(f"line {number}: {type(event).__name__} is no event")
    return Recorded(at_s, WorkerId(actor), event, decided, number)
