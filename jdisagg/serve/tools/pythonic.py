"""Llama 4: `[f(a=1), g()]`, a Python list of calls, alone or between <|python_start|> and <|python_end|>."""

from __future__ import annotations

import ast
from collections.abc import Collection

from jdisagg.serve.tools.calls import Section, offered
from jdisagg.serve.tools.said import Call, arguments_text

START, END = "<|python_start|>", "<|python_end|>"


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
        if start and not rest.startswith(END):
            return None if END.startswith(rest) and not whole else Section(end, calls)
        return Section(text.index(END, end) + len(END) if start else end, calls)


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
