"""Gemma 4: `<|tool_call>call:NAME{key:value,...}<tool_call|>`, its texts between <|"|> and its keys bare."""

from __future__ import annotations

import re
from typing import Any

from jdisagg.serve.tools.calls import Section
from jdisagg.serve.tools.said import Call, arguments_text, json_value

QUOTE, CLOSER = '<|"|>', "<tool_call|>"
BARE = re.compile(r"[^,\]}]*")
MOST_NESTED = 64


class Unreadable(Exception):
    """No value of the notation, or not yet."""


class Gemma:
    openers, first_openers = ("<|tool_call>",), ()

    def read(self, text: str, whole: bool) -> Section | None:
        start = len(self.openers[0])
        brace = text.find("{", start)
        ends = text.find(CLOSER, start)
        if brace < 0 or 0 <= ends < brace:
            return None if ends < 0 else Section(ends + len(CLOSER), content=text[: ends + len(CLOSER)])
        try:
            arguments, end = _value(text, brace, 0)
        except Unreadable:
            return None
        if not text.startswith(CLOSER, end):
            return None if CLOSER.startswith(text[end:]) and not whole else self._call(text, brace, arguments, end)
        return self._call(text, brace, arguments, end + len(CLOSER))

    def _call(self, text: str, brace: int, arguments: Any, end: int) -> Section:
        name = text[len(self.openers[0]) : brace].strip().removeprefix("call:").strip()
        return Section(end, (Call(name, arguments_text(arguments)),))


def _value(text: str, at: int, depth: int) -> tuple[Any, int]:
    if depth > MOST_NESTED:
        raise Unreadable
    if text.startswith(QUOTE, at):
        end = text.find(QUOTE, at + len(QUOTE))
        if end < 0:
            raise Unreadable
        return text[at + len(QUOTE) : end], end + len(QUOTE)
    if text[at : at + 1] == "{":
        return _object(text, at + 1, depth)
    if text[at : at + 1] == "[":
        return _list(text, at + 1, depth)
    found = BARE.match(text, at)
    if found is None or found.end() == len(text):
        raise Unreadable
    word = found[0].strip()
    known = json_value(word)
    return (known if known is not None or word == "null" else word), found.end()


def _object(text: str, at: int, depth: int) -> tuple[dict[str, Any], int]:
    found: dict[str, Any] = {}
    while text[at : at + 1] != "}":
        if text.startswith(QUOTE, at):
            key, at = _value(text, at, depth)
        else:
            colon = text.find(":", at)
            if colon < 0:
                raise Unreadable
            key, at = text[at:colon].strip(), colon
        if text[at : at + 1] != ":":
            raise Unreadable
        found[key], at = _value(text, _past_blanks(text, at + 1), depth + 1)
        at = _past_comma(text, at)
    return found, at + 1


def _list(text: str, at: int, depth: int) -> tuple[list[Any], int]:
    found: list[Any] = []
    while text[at : at + 1] != "]":
        value, at = _value(text, _past_blanks(text, at), depth + 1)
        found.append(value)
        at = _past_comma(text, at)
    return found, at + 1


def _past_comma(text: str, at: int) -> int:
    at = _past_blanks(text, at)
    if at >= len(text):
        raise Unreadable
    return _past_blanks(text, at + 1) if text[at] == "," else at


def _past_blanks(text: str, at: int) -> int:
    while text[at : at + 1].isspace():
        at += 1
    return at
