"""Calls whose arguments are texts between marks, one behind the other: Qwen3-Coder, GLM, DeepSeek's DSML, Kimi K3.

A text may hold the marks themselves: a value ends where its mark is followed by the next argument's or the call's end.
"""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jdisagg.serve.tools.calls import Section
from jdisagg.serve.tools.said import Call, arguments_text, blanks_end
from jdisagg.serve.tools.typed import properties_of, typed


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
