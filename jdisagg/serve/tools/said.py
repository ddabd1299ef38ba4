"""What comes of an answer's text: things said, things thought, and tools called."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Call:
    """A tool called, whole: nobody is given half of one. `arguments` is the text of a JSON object."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Said:
    content: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()


NOTHING = Said()


class Reader(Protocol):
    """Reads one answer. What it has told is the same however the text was cut."""

    def feed(self, text: str) -> Said: ...

    def end(self, whole: bool) -> Said:
        """The rest; `whole` where the model ended it, and was not cut short."""
        ...


def call_of(record: Any) -> Call | None:
    """Of a JSON object with a name and arguments, by either name for them; None where it is none."""
    if not isinstance(record, dict) or not isinstance(record.get("name"), str):
        return None
    given = record.get("arguments", record.get("parameters"))
    if isinstance(given, str):
        given = json_value(given)
    return None if not isinstance(given, dict) else Call(record["name"], arguments_text(given))


def arguments_text(arguments: dict[str, Any]) -> str:
    return json.dumps(arguments, ensure_ascii=False)


DECODER = json.JSONDecoder(strict=False)  # models write line breaks within texts


def json_at(text: str, start: int) -> tuple[Any, int] | None:
    """The JSON value that begins there and its end; None where none is, or it goes on."""
    try:
        return DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None


def no_json_from(text: str, start: int) -> int | None:
    """Where the value that begins there stops being JSON: marks count from there on, and not within its texts.

    None where it ends within a text.
    """
    try:
        return DECODER.raw_decode(text, start)[1]
    except json.JSONDecodeError as error:
        within = error.msg.startswith(("Unterminated string", "Invalid \\"))
        return None if within else error.pos
    except RecursionError:
        return start


def blanks_end(text: str, start: int) -> int:
    return len(text) - len(text[start:].lstrip())


def json_value(text: str) -> Any:
    """None where it is not JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return None
    except RecursionError:
        return None
