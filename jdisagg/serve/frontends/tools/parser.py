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


# Reasoning before the answer, between two marks; what follows is the next reader's.


class Plain:
    """Implements `Reader`: all is content."""

    def feed(self, text: str) -> Said:
        return Said(text)

    def end(self, whole: bool) -> Said:
        return NOTHING


class ThinkingReader:
    """Implements `Reader`. Blanks at the ends of the reasoning, and before what follows it, are no part of either."""

    def __init__(self, opener: str, closer: str, then: Reader, *, begun: bool) -> None:
        """begun: the prompt ended with the opener."""
        self._opener, self._closer, self._then = opener, closer, then
        self._state = "thinks" if begun else "begins"
        self._text, self._thought = "", False

    def feed(self, text: str) -> Said:
        if self._state == "answers":
            return self._then.feed(text)
        self._text += text
        if self._state == "begins":
            begun = self._text.lstrip()
            if self._opener.startswith(begun):
                if begun != self._opener:
                    return NOTHING
            elif not begun.startswith(self._opener):
                return self._answers(self._text)
            self._state, self._text = "thinks", begun[len(self._opener) :]
        return self._thinks() if self._state == "thinks" else self._after()

    def _thinks(self) -> Said:
        thought, closer, rest = self._text.partition(self._closer)
        if closer:
            self._state, self._text = "after", rest
            said = self._after()
            return Said(said.content, self._shown(thought.rstrip()) + said.reasoning, said.calls)
        kept = self._text[: len(self._text) - self._partial()].rstrip()
        self._text = self._text[len(kept) :]
        return Said(reasoning=self._shown(kept))

    def _shown(self, text: str) -> str:
        text = text if self._thought else text.lstrip()
        self._thought = self._thought or bool(text)
        return text

    def _partial(self) -> int:
        sizes = range(min(len(self._closer) - 1, len(self._text)), 0, -1)
        return next((size for size in sizes if self._closer.startswith(self._text[-size:])), 0)

    def _after(self) -> Said:
        return NOTHING if not self._text.strip() else self._answers(self._text.lstrip())

    def _answers(self, text: str) -> Said:
        self._state, self._text = "answers", ""
        return self._then.feed(text)

    def end(self, whole: bool) -> Said:
        if self._state == "thinks":
            return Said(reasoning=self._shown(self._text.rstrip()))
        if self._state == "begins" and self._text:
            first = self._answers(self._text)
            rest = self._then.end(whole)
            return Said(first.content + rest.content, first.reasoning + rest.reasoning, first.calls + rest.calls)
        return self._then.end(whole)
