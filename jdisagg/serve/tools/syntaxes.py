"""How families of models write calls of tools; each is a `calls.Syntax`."""

from __future__ import annotations

import re
from collections.abc import Collection

from jdisagg.serve.tools.calls import Section, offered, only
from jdisagg.serve.tools.said import Call, arguments_text, blanks_end, call_of, json_at, no_json_from


class Tagged:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Qwen, Hermes. Phi: a list between its tags."""

    first_openers: tuple[str, ...] = ()

    def __init__(self, opener: str = "<tool_call>", closer: str = "</tool_call>") -> None:
        self.openers, self._closer = (opener,), closer

    def read(self, text: str, whole: bool) -> Section | None:
        start = len(self.openers[0])
        start = blanks_end(text, start)
        found = json_at(text, start)
        if found is None:
            wrong = no_json_from(text, start)
            ends = -1 if wrong is None else text.find(self._closer, wrong)
            return None if ends < 0 else self._malformed(text, ends)
        value, end = found
        after = blanks_end(text, end)
        if not text.startswith(self._closer, after):
            if len(text) - after < len(self._closer) and self._closer.startswith(text[after:]) and not whole:
                return None
            after -= len(self._closer)  # it forgot to close it
        calls = only([call_of(each) for each in (value if isinstance(value, list) else [value])])
        if not calls:
            return self._malformed(text, after)
        return Section(min(len(text), after + len(self._closer)), calls)

    def _malformed(self, text: str, ends: int) -> Section:
        return Section(ends + len(self._closer), content=text[: ends + len(self._closer)])


class Functools:
    """`functools[{"name": ..., "arguments": {...}}]`: Phi 4 mini."""

    openers, first_openers = ("functools[",), ()

    def read(self, text: str, whole: bool) -> Section | None:
        found = json_at(text, len("functools"))
        if found is None:
            return None
        calls = only([call_of(each) for each in found[0]]) if isinstance(found[0], list) else ()
        return Section(found[1], calls, "" if calls else text[: found[1]])


class Llama3:
    """`{"name": ..., "parameters": {...}}`, alone or behind <|python_tag|>; several behind semicolons."""

    openers, first_openers = ("<|python_tag|>",), ("{",)

    def __init__(self, names: Collection[str]) -> None:
        self._names = names

    def read(self, text: str, whole: bool) -> Section | None:
        tagged = text.startswith(self.openers[0])
        start = blanks_end(text, len(self.openers[0]) if tagged else 0)
        found = json_at(text, start)
        if found is None:
            return Section(start) if tagged and text[start : start + 1] not in ("", "{") else None
        value, end = found
        call = call_of(value)
        if call is None or not (tagged or offered([call], self._names)):
            return Section(end, content=text[start:end])
        if not tagged and not text[end:].strip() and not whole:
            return None  # `{...} is a dict` begins like a call
        if not tagged and text[end:].strip() and text[end:].lstrip()[0] not in ";{<":
            return Section(end, content=text[:end])
        return Section(end, (call,))


CALL_IN_MISTRAL = re.compile(r"\s*([^\[\]{}\s]+)\s*(?:\[CALL_ID\][^\[\]{}]*)?(?:\[ARGS\])?\s*(?=\{)")


class Mistral:
    """`[TOOL_CALLS] [{...}, ...]`, and since version 11 `[TOOL_CALLS]name[ARGS]{...}`."""

    openers, first_openers = ("[TOOL_CALLS]",), ()

    def read(self, text: str, whole: bool) -> Section | None:
        start = blanks_end(text, len(self.openers[0]))
        if text[start : start + 1] in ("[", "{"):
            found = json_at(text, start)
            if found is None:
                return None
            listed = found[0] if isinstance(found[0], list) else [found[0]]
            return Section(found[1], only([call_of(each) for each in listed]))
        named = CALL_IN_MISTRAL.match(text, len(self.openers[0]))
        if named is None:
            return Section(start) if whole or "\n" in text[start:].strip() else None
        found = json_at(text, named.end())
        if found is None or not isinstance(found[0], dict):
            return None
        return Section(found[1], (Call(named[1], arguments_text(found[0])),))


BEGIN, END, SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"


class DeepSeek:
    """Version 3: `function SEP name` and a block of ```json; 3.1: `name SEP {...}`; both between marks of their own."""

    openers = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", BEGIN, END, SEP)
    first_openers: tuple[str, ...] = ()

    def read(self, text: str, whole: bool) -> Section | None:
        if not text.startswith(BEGIN):
            return Section(next(len(each) for each in self.openers if text.startswith(each)))
        head, sep, rest = text[len(BEGIN) :].partition(SEP)
        if not sep:
            return None
        start, name = len(text) - len(rest), head.strip()
        if not rest.lstrip().startswith("{"):
            line, newline, _ = rest.partition("\n")
            fence = rest.find("```json", len(line))
            if not newline or fence < 0:
                return self._closed(text)
            name, start = line.strip(), start + fence + len("```json")
        found = json_at(text, blanks_end(text, start))
        if found is None or not isinstance(found[0], dict):
            return self._closed(text)
        ends = text.find(END, found[1])
        if ends < 0 and not whole:
            return None
        end = len(text) if ends < 0 else ends + len(END)
        return Section(end, (Call(name, arguments_text(found[0])),))

    def _closed(self, text: str) -> Section | None:
        """Where it is over and was no call."""
        ends = text.find(END)
        return None if ends < 0 else Section(ends + len(END), content=text[: ends + len(END)])


class KimiK2:
    """`functions.NAME:0` between marks of its own, and a JSON object."""

    HEAD = re.compile(
        r"<\|tool_call_begin\|>\s*(?:functions\.)?([^<\s]+?)(?::\d+)?\s*<\|tool_call_argument_begin\|>\s*"
    )
    NEXT = re.compile(r"<\|tool_call(?:_begin|s_section_end)\|>")
    openers = (
        *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        *("<|tool_call_begin|>", "<|tool_call_end|>"),
    )
    first_openers: tuple[str, ...] = ()

    def read(self, text: str, whole: bool) -> Section | None:
        section, _, begin, end = self.openers
        if text.startswith(section):  # what stands between it and the first call is nobody's
            first = self.NEXT.search(text, len(section))
            return None if first is None else Section(first.start())
        if not text.startswith(begin):
            return Section(next(len(each) for each in self.openers if text.startswith(each)))
        head = self.HEAD.match(text)
        found = None if head is None else json_at(text, head.end())
        if head is not None and found is not None and isinstance(found[0], dict):
            after = blanks_end(text, found[1])
            if end.startswith(text[after:]) and text[after:] != end and not whole:
                return None
            ends = after + len(end) if text.startswith(end, after) else found[1]
            return Section(ends, (Call(head[1], arguments_text(found[0])),))
        wrong = 0 if head is None else no_json_from(text, head.end())
        ends = -1 if wrong is None else text.find(end, wrong)
        return None if ends < 0 else Section(ends + len(end), content=text[: ends + len(end)])
