"""Calls among an answer's text: content before, between and after them is told as it comes, a call once it is whole."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from jdisagg.serve.frontends.tools.parser import NOTHING, Call, Said, json_value

CLOSERS = frozenset("})]>")  # without one of these no call ends
BLANK = re.compile(r"[\s;]*")


@dataclass(frozen=True, slots=True)
class Section:
    """What the text begins with, up to `end`: calls, or content after all."""

    end: int
    calls: tuple[Call, ...] = ()
    content: str = ""


class Syntax(Protocol):
    """How a family of models writes calls."""

    @property
    def openers(self) -> tuple[str, ...]: ...

    @property
    def first_openers(self) -> tuple[str, ...]:
        """Single characters that open one where nothing was said before."""
        ...

    def read(self, text: str, whole: bool) -> Section | None:
        """Of a text that begins with an opener; None where more of it must come. `whole`: none will."""
        ...


class CallReader:
    """Implements `Reader`. Blanks around calls are no content; those within it are kept."""

    def __init__(self, syntax: Syntax) -> None:
        self._syntax = syntax
        self._opener = re.compile("|".join(map(re.escape, syntax.openers)) or "(?!)")
        self._text, self._blanks = "", ""
        self._open = self._said = self._called = False

    def feed(self, text: str) -> Said:
        self._text += text
        if self._open and CLOSERS.isdisjoint(text):
            return NOTHING
        return self._read(ended=False, whole=False)

    def end(self, whole: bool) -> Said:
        said = self._read(ended=True, whole=whole)
        return said if self._called else Said(said.content + self._blanks, calls=said.calls)

    def _read(self, *, ended: bool, whole: bool) -> Said:
        content, calls = "", list[Call]()
        while self._text:
            at = self._opening()
            if at is None:
                kept = 0 if ended else self._partial()
                content += self._shown(self._text[: len(self._text) - kept])
                self._text = self._text[len(self._text) - kept :]
                break
            content += self._shown(self._text[:at])
            self._text = self._text[at:]
            section = self._syntax.read(self._text, whole) or (self._unfinished() if ended else None)
            self._open = section is None
            if section is None:
                break
            self._called = self._called or bool(section.calls)
            calls += section.calls
            content += self._shown(section.content)
            self._text = self._text[section.end :]
        return Said(content, calls=tuple(calls))

    def _opening(self) -> int | None:
        found = self._opener.search(self._text)
        if not self._said:
            blank = BLANK.match(self._text) if self._called else re.match(r"\s*", self._text)
            first = blank.end() if blank else 0
            if self._text[first : first + 1] in self._syntax.first_openers and first < len(self._text):
                if self._called:
                    self._text, first = self._text[first:], 0
                return first
        return None if found is None else found.start()

    def _unfinished(self) -> Section:
        """What no call came of; behind a marker it is nobody's, else it was content all the time."""
        marked = self._opener.match(self._text) is not None
        return Section(len(self._text), content="" if marked else self._text)

    def _partial(self) -> int:
        """Characters at the end that may be the beginning of an opener."""
        longest = max(map(len, self._syntax.openers), default=1) - 1
        for size in range(min(longest, len(self._text)), 0, -1):
            if any(opener.startswith(self._text[-size:]) for opener in self._syntax.openers):
                return size
        return 0

    def _shown(self, text: str) -> str:
        text = self._blanks + text
        kept = text.rstrip()
        self._blanks = text[len(kept) :]
        self._said = self._said or bool(kept)
        return kept


def only(calls: list[Call | None]) -> tuple[Call, ...]:
    return tuple(call for call in calls if call is not None)


def offered(calls: Collection[Call], names: Collection[str]) -> bool:
    """Whether all are of tools that there are."""
    return bool(calls) and all(call.name in names for call in calls)


# What an argument is whose text stands between marks: its tool's schema says whether it is a text.

TYPES: Mapping[str, tuple[type, ...]] = {
    "integer": (int, float),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}
WORDS = {"True": True, "False": False, "None": None}  # as Python has them
NO_JSON, MOST_NESTED = object(), 8


def typed(text: str, schema: Any) -> Any:
    """The value that the text is by its schema; where that says nothing, what it is as JSON, or the text itself."""
    said = types_of(schema)
    if said == {"string"}:
        return text
    value = _value(text.strip())
    if value is NO_JSON:
        return text
    if not said or (value is None and "null" in said):
        return value
    allowed = tuple(kind for name in said for kind in TYPES.get(name, ()))
    fits = isinstance(value, allowed) and (bool in allowed or not isinstance(value, bool))
    return value if fits or "string" not in said else text


def types_of(schema: Any, depth: int = 0) -> set[str]:
    """Names of the types that it may take; none where it does not say."""
    if not isinstance(schema, Mapping) or depth > MOST_NESTED:
        return set()
    said = schema.get("type")
    listed = [said] if isinstance(said, str) else said if isinstance(said, list) else []
    found = {each for each in listed if isinstance(each, str)}
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(key), list):
            found = found.union(*(types_of(each, depth + 1) for each in schema[key]))
    return found


def _value(text: str) -> Any:
    if text in WORDS:
        return WORDS[text]
    value = json_value(text)
    endless = isinstance(value, float) and not math.isfinite(value)  # no number of JSON, though Python reads it
    return NO_JSON if endless or (value is None and text != "null") else value


def properties_of(schemas: Mapping[str, Any], tool: str) -> Mapping[str, Any]:
    """The schemas of a tool's arguments, by name; none where nobody offered it."""
    parameters = schemas.get(tool)
    found = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return found if isinstance(found, Mapping) else {}
