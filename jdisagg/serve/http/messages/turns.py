"""A body of `/v1/messages` as one of chat: blocks are texts, calls and what came of calls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jdisagg.core.errors import RequestError
from jdisagg.serve.http.json_bounds import brief
from jdisagg.serve.http.messages.body import CountBody, MessagesBody
from jdisagg.serve.http.schema import ChatBody, DrawingFields, valid
from jdisagg.serve.tools.asked import AUTO, NONE, REQUIRED

ROLES = ("user", "assistant", "system")
CHOICES = {"auto": AUTO, "any": REQUIRED, "none": NONE}


def chat_body_of(body: CountBody) -> ChatBody:
    """Raises RequestError naming the block, tool or field at fault."""
    drawn = {name: getattr(body, name) for name in body.model_fields_set & DrawingFields.model_fields.keys()}
    fields = drawn | {"messages": [*_system(body.system), *_messages(body)]}
    if body.tools:
        fields["tools"] = [_tool(each, index) for index, each in enumerate(body.tools)]
    if body.tool_choice is not None:
        fields |= _choice(body.tool_choice)
    fields |= _thinking(body)
    if body.output_config is not None:
        fields |= _output(body.output_config.format, body.output_config.effort)
    if isinstance(body, MessagesBody):
        fields |= {"max_completion_tokens": body.max_tokens, "stream": body.stream}
        if body.stop_sequences:
            fields["stop"] = body.stop_sequences
    return valid(ChatBody, fields)


def _system(system: str | Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    return [{"role": "system", "content": _text(system, "system")}] if system else []


def _messages(body: CountBody) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for index, turn in enumerate(body.messages):
        place = f"messages.{index}"
        if turn.role not in ROLES:
            said = f"{place}.role is {brief(turn.role)}, must be one of {', '.join(ROLES)}"
            raise RequestError(said, param=f"{place}.role")
        if isinstance(turn.content, str):
            found.append({"role": turn.role, "content": turn.content})
        elif turn.role == "assistant":
            found.append(_said(turn.content, f"{place}.content"))
        else:
            found += _asked(turn.role, turn.content, f"{place}.content")
    return found


def _said(blocks: Sequence[Mapping[str, Any]], place: str) -> dict[str, Any]:
    """An earlier answer: what it thought, said and called."""
    texts, thoughts, calls = list[str](), list[str](), list[dict[str, Any]]()
    for number, block in enumerate(blocks):
        match block.get("type"):
            case "thinking":
                thoughts.append(_field(block, "thinking", f"{place}.{number}"))
            case "redacted_thinking":
                continue
            case "tool_use":
                arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
                function = {"name": block.get("name"), "arguments": arguments}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case _:
                texts.append(_block_text(block, f"{place}.{number}"))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    message |= {"tool_calls": calls} if calls else {}
    return message | ({"reasoning_content": "".join(thoughts)} if thoughts else {})


def _asked(role: str, blocks: Sequence[Mapping[str, Any]], place: str) -> list[dict[str, Any]]:
    """What came of calls first, each a message of its own, then what the user says to it."""
    found, texts = list[dict[str, Any]](), list[str]()
    for number, block in enumerate(blocks):
        at = f"{place}.{number}"
        if block.get("type") == "tool_result":
            content = _text(block.get("content") or "", f"{at}.content")
            found.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content})
        else:
            texts.append(_block_text(block, at))
    return [*found, {"role": role, "content": "".join(texts)}] if texts or not found else found


def _text(content: Any, place: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{place} is {brief(content)}, must be a text or blocks of text", param=place)
    return "".join(_block_text(block, f"{place}.{number}") for number, block in enumerate(content))


def _block_text(block: Any, place: str) -> str:
    kind = block.get("type") if isinstance(block, Mapping) else block
    if kind != "text":
        raise RequestError(f"{place} is a block of type {brief(kind)}, only text is supported", param=place)
    return _field(block, "text", place)


def _field(block: Mapping[str, Any], name: str, place: str) -> str:
    value = block.get(name)
    if isinstance(value, str):
        return value
    raise RequestError(f"{place}.{name} is {brief(value)}, must be a text", param=f"{place}.{name}")


def _tool(tool: Mapping[str, Any], index: int) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        said = f"tools.{index}.type is {brief(tool['type'])}, only tools of your own are supported"
        raise RequestError(said, param=f"tools.{index}.type")
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
    described = {"description": tool["description"]} if tool.get("description") else {}
    return {"type": "function", "function": function | described}


def _choice(choice: Mapping[str, Any]) -> dict[str, Any]:
    kind = choice.get("type")
    parallel = {"parallel_tool_calls": False} if choice.get("disable_parallel_tool_use") else {}
    if kind == "tool":
        return {"tool_choice": {"type": "function", "function": {"name": choice.get("name")}}, **parallel}
    if kind not in CHOICES:
        raise RequestError(f"tool_choice.type is {brief(kind)}, must be auto, any, tool or none", "tool_choice.type")
    return {"tool_choice": CHOICES[kind], **parallel}


def _thinking(body: CountBody) -> dict[str, Any]:
    """Whether templates that can do both ask for thoughts; how many is the model's own affair."""
    if body.thinking is None:
        return {"chat_template_kwargs": body.chat_template_kwargs}
    thinks = body.thinking.get("type") != "disabled"
    variables = {"enable_thinking": thinks, **(body.chat_template_kwargs or {})}
    return {"chat_template_kwargs": variables, "include_reasoning": thinks}


def _output(form: Mapping[str, Any] | None, effort: str | None) -> dict[str, Any]:
    found: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    if not form:
        return found
    if form.get("type") != "json_schema":
        said = f"output_config.format.type is {brief(form.get('type'))}, must be json_schema"
        raise RequestError(said, param="output_config.format.type")
    return {**found, "response_format": {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}}
