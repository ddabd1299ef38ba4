"""Which tools a chat offers, and whether one must be called: then the answer is JSON that a schema of them takes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jdisagg.core.errors import RequestError
from jdisagg.model.chat_template import SpecialTokens
from jdisagg.model.tokenizer import Tokenizer
from jdisagg.serve.frontends.http.schema import brief
from jdisagg.serve.frontends.structured import SCHEMA, Form
from jdisagg.serve.frontends.tools.calls import CallReader, Syntax
from jdisagg.serve.frontends.tools.parser import (
    NOTHING,
    Call,
    Plain,
    Reader,
    Said,
    ThinkingReader,
    arguments_text,
    call_of,
    json_value,
)
from jdisagg.serve.frontends.tools.syntaxes import (
    DSML,
    GLM,
    KIMI_K3,
    QWEN,
    DeepSeek,
    Functools,
    Gemma,
    HarmonyReader,
    KimiK2,
    Llama3,
    Marked,
    Mistral,
    Pythonic,
    Tagged,
)
from jdisagg.serve.frontends.tools.told import TOOL_CALLS, Told

NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
MAX_TOOLS = 1024
NONE, CHOICE_AUTO, REQUIRED = "none", "auto", "required"


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
        if choice in (None, NONE, CHOICE_AUTO):
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
    if choice in (None, NONE, CHOICE_AUTO, REQUIRED):
        return Tools(checked, choice or CHOICE_AUTO, parallel=parallel)
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


# Which reader is for a model: by name, or by what its chat template and its vocabulary hold.

AUTO, OFF, HARMONY = "auto", "off", "gpt_oss"
SYNTAXES: dict[str, Callable[[Mapping[str, Any]], Syntax]] = {  # by the schemas of the tools' arguments
    "hermes": lambda tools: Tagged(),
    "llama3": Llama3,
    "llama4": Pythonic,
    "mistral": lambda tools: Mistral(),
    "deepseek": lambda tools: DeepSeek(),
    "gemma4": lambda tools: Gemma(),
    "phi4": lambda tools: Tagged("<|tool_call|>", "<|/tool_call|>"),
    "functools": lambda tools: Functools(),
    "qwen3_coder": lambda tools: Marked(QWEN, tools),
    "glm": lambda tools: Marked(GLM, tools),
    "dsml": lambda tools: Marked(DSML, tools),
    "kimi_k2": lambda tools: KimiK2(),
    "kimi_k3": lambda tools: Marked(KIMI_K3, tools),
}
THINKING = {"think": ("<think>", "</think>"), "mistral": ("[THINK]", "[/THINK]")}
THINKING["gemma4"] = ("<|channel>thought\n", "<channel|>")
THINKING["kimi_k3"] = ("<|open|>think<|sep|>", "<|close|>think<|sep|>")
# What a template or a vocabulary has that a syntax needs; the first that is there counts.
SIGNS = (
    ("<|constrain|>", HARMONY),
    ("<|tool_call>", "gemma4"),
    ("[TOOL_CALLS]", "mistral"),
    ("｜DSML｜", "dsml"),
    ("<｜tool▁calls▁begin｜>", "deepseek"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("<|open|>", "kimi_k3"),
    ("<arg_key>", "glm"),
    ("<function=", "qwen3_coder"),
    ("<|/tool_call|>", "phi4"),
    ("functools[", "functools"),
    ("<tool_call>", "hermes"),
    ("<|python_start|>", "llama4"),
    ("<|python_tag|>", "llama3"),
)
THINKING_SIGNS = (
    *(("<|constrain|>", HARMONY), ("<|channel>", "gemma4"), ("[THINK]", "mistral")),
    *(("<|open|>", "kimi_k3"), ("</think>", "think")),
)


@dataclass(frozen=True, slots=True)
class Parsers:
    """Of one model, by name; OFF where it has none."""

    tools: str = OFF
    reasoning: str = OFF

    def reader(self, tools: Mapping[str, Any] | None, prompt: str) -> Reader | None:
        """For one answer to `prompt`, whose tools have these names and arguments' schemas (None: it has none); None
        where all is content."""
        if HARMONY in (self.tools, self.reasoning):
            return HarmonyReader()
        calls = tools is not None and self.tools != OFF
        if not calls and self.reasoning == OFF:
            return None
        then = CallReader(SYNTAXES[self.tools](tools or {})) if calls else Plain()
        if self.reasoning == OFF:
            return then
        opener, closer = THINKING[self.reasoning]
        return ThinkingReader(opener, closer, then, begun=prompt.rstrip().endswith(opener.rstrip()))


def parsers_of(tokenizer: Tokenizer, tools: str = AUTO, reasoning: str = AUTO) -> Parsers:
    """What --tool_call_parser and --reasoning_parser come to for this model."""

    def found(signs: tuple[tuple[str, str], ...]) -> str:
        return next((name for sign, name in signs if tokenizer.holds(sign)), OFF)

    return Parsers(found(SIGNS) if tools == AUTO else tools, found(THINKING_SIGNS) if reasoning == AUTO else reasoning)


def reads_of(
    parsers: Parsers, tools: Tools | None, prompt: str, special: SpecialTokens, skip_special: bool
) -> Callable[[], Told] | None:
    """What begins to read an answer to `prompt`; None where all of it is content."""
    hidden = special.pattern if skip_special else None
    if tools is not None and tools.forced:
        word = "stop" if tools.named else TOOL_CALLS  # as OpenAI has it
        return lambda: Told(ForcedReader(tools), hidden, stop_word=word)
    schemas = None if tools is None or tools.choice == NONE else tools.schemas
    if parsers.reader(schemas, prompt) is None:
        return None

    def begin() -> Told:
        reader = parsers.reader(schemas, prompt)
        assert reader is not None
        return Told(reader, hidden, stop_word=TOOL_CALLS)

    return begin
