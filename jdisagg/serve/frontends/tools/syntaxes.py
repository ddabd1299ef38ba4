"""How families of models write calls of tools; each is a `calls.Syntax`."""

from __future__ import annotations

import ast
import html
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from jdisagg.serve.frontends.tools.calls import Section, offered, only, properties_of, typed
from jdisagg.serve.frontends.tools.parser import (
    Call,
    Said,
    arguments_text,
    blanks_end,
    call_of,
    json_at,
    json_value,
    no_json_from,
)


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


# Calls whose arguments are texts between marks, one behind the other: Qwen3-Coder, GLM, DeepSeek's DSML, Kimi K3.
#
# A text may hold the marks themselves: a value ends where its mark is followed by the next argument's or the
# call's end.


@dataclass(frozen=True, slots=True)
class Style:
    """How one family writes them. Each pattern is matched where its mark is due."""

    openers: tuple[str, ...]
    around: re.Pattern[str]  # marks around calls, which say nothing
    head: re.Pattern[str]  # of a call; its group `name`
    argument: re.Pattern[str]  # its group `key`; `type` where the mark says that
    ends: re.Pattern[str]  # where an argument's value ends
    tail: re.Pattern[str]  # of a call
    settled: re.Pattern[str]  # whether enough of a mark has come to say what it is


def style(openers: str, around: str, head: str, argument: str, ends: str, tail: str, settled: str) -> Style:
    patterns = (re.compile(each, re.DOTALL) for each in (around, head, argument, ends, tail, settled))
    return Style(tuple(openers.split()), *patterns)


XML = r"<[^>\n]*[>\n]"
QWEN = style(
    "<tool_call> </tool_call> <function=",
    r"</tool_call>|<tool_call>(?=\s*<function=)",
    r"<function=(?P<name>[^>\n]+)>",
    r"<parameter=(?P<key>[^>\n]+)>\n?",
    r"\n?</parameter>\s*(?=<parameter=|</function>)|\n(?=<parameter=[^>\n]+>\n)|\n(?=</function>\s*</tool_call>)",
    r"</function>",
    rf"<tool_call>\s*(?:[^<\s]|<[^f]|<f[^u])|(?!<tool_call>){XML}",
)
GLM = style(
    "<tool_call>",
    r"(?!)",
    r"<tool_call>\s*(?P<name>[^\s<{]+)\s*(?=<arg_key>|</tool_call>)",
    r"<arg_key>(?P<key>[^<]*)</arg_key>\s*<arg_value>",
    r"</arg_value>\s*(?=<arg_key>|</tool_call>)",
    r"</tool_call>",
    rf"<tool_call>\s*(?:\{{|[^<]*{XML})|<arg_key>[^<]*</arg_key>\s*{XML}|(?!<tool_call>|<arg_key>){XML}",
)
DSML = style(
    "<｜DSML｜ </｜DSML｜",
    r"</?｜DSML｜ ?(?:function_calls|tool_calls|calls)>",
    r"<｜DSML｜ ?invoke name=\"(?P<name>[^\"]+)\"\s*(?:>|(?=/>))",
    r"<｜DSML｜ ?parameter name=\"(?P<key>[^\"]+)\"(?: string=\"(?P<type>true|false)\")?>",
    r"</｜DSML｜ ?parameter>\s*(?=<｜DSML｜ ?parameter|</｜DSML｜ ?invoke>)",
    r"</｜DSML｜ ?invoke>|/>",
    XML,
)
KIMI_K3 = style(
    "<|open|> <|close|>",
    r"<\|(?:open|close)\|>(?:response|tools|message)(?:(?!<\|sep\|>).)*<\|sep\|>",
    r"<\|open\|>call tool=\"(?P<name>[^\"]+)\"(?:(?!<\|sep\|>).)*<\|sep\|>",
    r"<\|open\|>argument key=\"(?P<key>[^\"]*)\"(?: type=\"(?P<type>[a-z]+)\")?<\|sep\|>",
    r"<\|close\|>argument<\|sep\|>(?=<\|open\|>argument key=|<\|close\|>call<\|sep\|>)",
    r"<\|close\|>call<\|sep\|>",
    r"<\|.*?<\|sep\|>",
)
TEXTS = ("true", "string")  # what a mark says of an argument that is one


class Marked:
    """Implements `Syntax`."""

    first_openers: tuple[str, ...] = ()

    def __init__(self, style: Style, schemas: Mapping[str, Any]) -> None:
        """schemas: of each tool's arguments, by its name."""
        self._style, self._schemas, self.openers = style, schemas, style.openers

    def read(self, text: str, whole: bool) -> Section | None:
        around, head = self._style.around.match(text), self._style.head.match(text)
        if head is not None:
            return self._call(text, head)
        if around is not None:
            return Section(around.end())
        return self._no_mark(text, 0)

    def _call(self, text: str, head: re.Match[str]) -> Section | None:
        arguments, at = dict[str, Any](), head.end()
        properties = properties_of(self._schemas, head["name"])
        while True:
            at = blanks_end(text, at)
            tail = self._style.tail.match(text, at)
            if tail is not None:
                return Section(tail.end(), (Call(head["name"], arguments_text(arguments)),))
            argument = self._style.argument.match(text, at)
            if argument is None:
                return self._no_mark(text, at)
            ends = self._style.ends.search(text, argument.end())
            if ends is None:
                return None
            key, value = html.unescape(argument["key"].strip()), text[argument.end() : ends.start()]
            arguments[key] = self._typed(value, argument.groupdict().get("type"), properties.get(key))
            at = ends.end()

    def _typed(self, value: str, said: str | None, schema: Any) -> Any:
        """What the mark says of it goes before what the schema does."""
        if said in TEXTS:
            return value
        return typed(value, schema if said is None else {})

    def _no_mark(self, text: str, at: int) -> Section | None:
        """What is due does not stand there: more is to come, or it is content after all."""
        if at < len(text) and (text[at] != "<" or self._style.settled.match(text, at)):
            end = max(1, at)
            return Section(end, content=text[:end])
        return None


# Gemma 4: `<|tool_call>call:NAME{key:value,...}<tool_call|>`, its texts between <|"|> and its keys bare.

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


# gpt-oss: messages one behind the other, each with a channel, a recipient or none, and a text (OpenAI's Harmony).
#
# The prompt ends with `<|start|>assistant`: an answer begins within a header. Texts on the analysis channel are
# reasoning, those to `functions.NAME` calls, and those on the final and commentary channels content.

MESSAGE = "<|message|>"
ENDS = re.compile(r"<\|(?:end|return|start)\|>")  # of a text
CALL_ENDS = re.compile(r"<\|(?:end|call|return|start)\|>")
MARKS = ("<|end|>", "<|return|>", "<|start|>")
RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<]+)")
CHANNEL = re.compile(r"<\|channel\|>\s*([a-z]+)")


class HarmonyReader:
    """Implements `Reader`."""

    def __init__(self) -> None:
        self._text, self._header = "", ""
        self._within = False  # of a message's text

    def feed(self, text: str) -> Said:
        self._text += text
        told = list[Said]()
        while self._begun():
            over = self._read_call(told) if self._callee is not None else self._read_text(told)
            if not over:
                break
            self._within = False
        calls = tuple(call for said in told for call in said.calls)
        return Said("".join(said.content for said in told), "".join(said.reasoning for said in told), calls)

    def _begun(self) -> bool:
        """Whether the text of a message has begun."""
        if not self._within:
            header, mark, rest = self._text.partition(MESSAGE)
            if mark:
                self._header, self._text, self._within = header, rest, True
        return self._within

    def _read_text(self, told: list[Said]) -> bool:
        """What is certain of it; whether it is over."""
        found = ENDS.search(self._text)
        shown = len(self._text) - len(self._partial()) if found is None else found.start()
        told.append(self._told(self._text[:shown]))
        self._text = self._text[shown if found is None else found.end() :]
        return found is not None

    def _read_call(self, told: list[Said]) -> bool:
        """Whether it is whole."""
        start = blanks_end(self._text, 0)
        known = no_json_from(self._text, start)
        found = None if known is None else CALL_ENDS.search(self._text, known)
        if found is None:
            return False
        told.append(Said(calls=self._called(self._text[: found.start()])))
        self._text = self._text[found.end() :]
        return True

    def end(self, whole: bool) -> Said:
        if not self._within:
            return Said()
        if self._callee is None:
            return self._told(self._text)
        return Said(calls=self._called(self._text) if whole else ())

    @property
    def _callee(self) -> str | None:
        found = RECIPIENT.search(self._header)
        return None if found is None else found[1]

    def _called(self, text: str) -> tuple[Call, ...]:
        name, arguments = self._callee, json_value(text)
        return () if name is None or not isinstance(arguments, dict) else (Call(name, arguments_text(arguments)),)

    def _told(self, text: str) -> Said:
        found = CHANNEL.search(self._header)
        return Said(reasoning=text) if found is not None and found[1] == "analysis" else Said(text)

    def _partial(self) -> str:
        """What may be the beginning of a mark."""
        for size in range(min(len(MARKS[-1]), len(self._text)), 0, -1):
            if any(mark.startswith(self._text[-size:]) for mark in MARKS):
                return self._text[-size:]
        return ""


# Llama 4: `[f(a=1), g()]`, a Python list of calls, alone or between <|python_start|> and <|python_end|>.

START, PYTHONIC_END = "<|python_start|>", "<|python_end|>"


class Pythonic:
    openers, first_openers = (START,), ("[",)

    def __init__(self, names: Collection[str]) -> None:
        self._names = names

    def read(self, text: str, whole: bool) -> Section | None:
        start = len(START) if text.startswith(START) else 0
        for end in (at + 1 for at, char in enumerate(text) if char == "]"):
            calls = _calls(text[start:end])
            if calls is not None:
                break
        else:
            return None
        if not offered(calls, self._names):
            return Section(end, content=text[start:end])
        rest = text[end:].lstrip()
        if start and not rest.startswith(PYTHONIC_END):
            return None if PYTHONIC_END.startswith(rest) and not whole else Section(end, calls)
        return Section(text.index(PYTHONIC_END, end) + len(PYTHONIC_END) if start else end, calls)


def _calls(text: str) -> tuple[Call, ...] | None:
    """None where it is no list of calls."""
    try:
        found = ast.parse(text.strip(), mode="eval").body
        if not isinstance(found, ast.List):
            return None
        return tuple(_call(each) for each in found.elts)
    except (SyntaxError, ValueError, RecursionError, MemoryError, TypeError):
        return None


def _call(node: ast.expr) -> Call:
    if not isinstance(node, ast.Call) or node.args or not isinstance(node.func, ast.Name | ast.Attribute):
        raise ValueError
    arguments = {str(each.arg): ast.literal_eval(each.value) for each in node.keywords}
    return Call(ast.unparse(node.func), arguments_text(arguments))
