"""Which tools a chat offers, and whether one must be called: then the answer is JSON that a schema of them takes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jdisagg.core.errors import RequestError
from jdisagg.serve.http.json_bounds import brief
from jdisagg.serve.structured.forms import SCHEMA, Form
from jdisagg.serve.tools.said import NOTHING, Call, Said, arguments_text, call_of, json_value

NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
MAX_TOOLS = 1024
NONE, AUTO, REQUIRED = "none", "auto", "required"


@dataclass(frozen=True, slots=True)
class Tools:
    """`choice` is one of the words above, or the name of the one that must be called."""

    listed: tuple[dict[str, Any], ...]
    choice: str
    named: bool = False
    parallel: bool = True

    @property
    def schemas(self) -> dict[str, Any]:
        """Of each one's arguments, by its name; None where it has none."""
        return {each["function"]["name"]: each["function"].get("parameters") for each in self.listed}

    @property
    def forced(self) -> bool:
        return self.named or self.choice == REQUIRED


def tools_of(body: Mapping[str, Any]) -> Tools | None:
    """None where nothing is offered. Raises RequestError naming the field at fault."""
    listed, choice = body.get("tools"), body.get("tool_choice")
    if not listed:
        if choice in (None, NONE, AUTO):
            return None
        raise RequestError(f"tool_choice is {brief(choice)} while there are no tools", param="tool_choice")
    if len(listed) > MAX_TOOLS:
        raise RequestError(f"tools has {len(listed)} entries, at most {MAX_TOOLS} are allowed", param="tools")
    checked = tuple(_tool(each, index) for index, each in enumerate(listed))
    names = [each["function"]["name"] for each in checked]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise RequestError(f"tools has {twice!r} twice", param="tools")
    parallel = body.get("parallel_tool_calls") is not False
    if choice in (None, NONE, AUTO, REQUIRED):
        return Tools(checked, choice or AUTO, parallel=parallel)
    return Tools(checked, _named(choice, names), named=True, parallel=parallel)


def _tool(tool: Mapping[str, Any], index: int) -> dict[str, Any]:
    place, function = f"tools.{index}", tool.get("function")
    if tool.get("type", "function") != "function" or not isinstance(function, Mapping):
        raise RequestError(f"tools[{index}] is no function; other kinds are not supported", param=place)
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or NAME.fullmatch(name) is None:
        raise RequestError(
            f"tools[{index}].function.name is {brief(name)}, must be up to 64 letters, digits, . _ -", place
        )
    if parameters is not None and not isinstance(parameters, Mapping):
        raise RequestError(f"tools[{index}].function.parameters is {brief(parameters)}, must be a JSON schema", place)
    return {**tool, "type": "function", "function": dict(function)}


def _named(choice: Any, names: Sequence[str]) -> str:
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if name is None:
        raise RequestError(f"tool_choice is {brief(choice)}, must be none, auto, required or a function", "tool_choice")
    if name not in names:
        raise RequestError(f"tool_choice names {brief(name)}, which is none of the tools", param="tool_choice")
    return name


def form_of_choice(tools: Tools) -> Form | None:
    """What an answer is to be where a tool must be called: the arguments of the one, or a list of calls."""
    if not tools.forced:
        return None
    if tools.named:
        (tool,) = (each for each in tools.listed if each["function"]["name"] == tools.choice)
        return Form(SCHEMA, _parameters(tool), "tool_choice")
    found: dict[str, Any] = {}
    items = [_call_schema(tool, found) for tool in tools.listed]
    most = {} if tools.parallel else {"maxItems": 1}
    schema = {"type": "array", "minItems": 1, **most, "items": {"anyOf": items}}
    return Form(SCHEMA, {**schema, "$defs": found} if found else schema, "tool_choice")


def _parameters(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", **(tool["function"].get("parameters") or {})}


def _call_schema(tool: Mapping[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """Of one call; the schema's own definitions move to the root, where its pointers lead then."""
    name, parameters = tool["function"]["name"], _parameters(tool)
    for kind in ("$defs", "definitions"):
        for key, each in (parameters.pop(kind, None) or {}).items():
            definitions[f"{name}.{key}"] = _moved(each, name)
    fields = {"name": {"const": name}, "parameters": _moved(parameters, name)}
    return {"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False}


def _moved(value: Any, name: str) -> Any:
    match value:
        case dict():
            return {key: _pointer(each, name) if key == "$ref" else _moved(each, name) for key, each in value.items()}
        case list():
            return [_moved(each, name) for each in value]
    return value


def _pointer(pointer: Any, name: str) -> Any:
    found = re.fullmatch(r"#/(?:\$defs|definitions)/(.+)", pointer) if isinstance(pointer, str) else None
    return pointer if found is None else f"#/$defs/{name}.{found[1]}"


class ForcedReader:
    """Implements `Reader`, of an answer that is nothing but calls."""

    def __init__(self, tools: Tools) -> None:
        self._tools, self._text = tools, ""

    def feed(self, text: str) -> Said:
        self._text += text
        return NOTHING

    def end(self, whole: bool) -> Said:
        """One that was cut short calls nothing: its text is shown as it is."""
        found = json_value(self._text)
        if self._tools.named and isinstance(found, dict):
            return Said(calls=(Call(self._tools.choice, arguments_text(found)),))
        calls = [call_of(each) for each in found] if isinstance(found, list) else []
        return Said(calls=tuple(call for call in calls if call is not None)) if calls else Said(self._text)
