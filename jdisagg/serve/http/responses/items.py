"""A body of `/v1/responses` as one of chat: its items are messages, its tools and its format are spelt otherwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jdisagg.core.errors import RequestError
from jdisagg.serve.http.json_bounds import brief
from jdisagg.serve.http.responses.body import ResponsesBody
from jdisagg.serve.http.schema import ChatBody, DrawingFields, valid

ROLES = ("system", "developer", "user", "assistant")
TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "reasoning_text": "text", "refusal": "refusal"}
LOGPROBS = "message.output_text.logprobs"  # of `include`
SAME = ("parallel_tool_calls", "chat_template_kwargs")  # in both bodies


def chat_body_of(body: ResponsesBody) -> ChatBody:
    """Raises RequestError naming the item, tool or field at fault."""
    drawn = {name: getattr(body, name) for name in body.model_fields_set & DrawingFields.model_fields.keys()}
    fields = drawn | {name: getattr(body, name) for name in SAME if getattr(body, name) is not None}
    fields |= {"messages": _messages(body), "stream": body.stream, "max_completion_tokens": body.max_output_tokens}
    if body.tools:
        fields["tools"] = [_tool(each, index) for index, each in enumerate(body.tools)]
    if body.tool_choice is not None:
        fields["tool_choice"] = _choice(body.tool_choice)
    if body.text is not None and body.text.format is not None:
        fields["response_format"] = _format(body.text.format)
    if body.reasoning is not None and body.reasoning.effort is not None:
        fields["reasoning_effort"] = body.reasoning.effort
    if LOGPROBS in (body.include or ()) or body.top_logprobs:
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    return valid(ChatBody, fields | _truncation(body.truncation))


def _truncation(asked: str | None) -> dict[str, Any]:
    if asked in (None, "disabled"):
        return {}
    if asked == "auto":
        return {"truncate_prompt_tokens": -1}
    raise RequestError(f"truncation is {brief(asked)}, must be auto or disabled", param="truncation")


def _messages(body: ResponsesBody) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if body.instructions:
        found.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*found, {"role": "user", "content": body.input}]
    thought = ""
    for index, item in enumerate(body.input):
        place, kind = f"input.{index}", item.get("type", "message")
        if kind == "reasoning":
            thought += _text(item.get("content") or [], f"{place}.content")
            continue
        message = _message(item, kind, place)
        if kind == "function_call" and found and found[-1]["role"] == "assistant" and not thought:
            found[-1].setdefault("tool_calls", []).extend(message["tool_calls"])
            continue
        if thought and message["role"] == "assistant":
            message["reasoning_content"], thought = thought, ""
        found.append(message)
    if not found:
        raise RequestError(f"input has {len(body.input)} items, none of which says anything", param="input")
    return found


def _message(item: Mapping[str, Any], kind: Any, place: str) -> dict[str, Any]:
    if kind == "message":
        role = item.get("role")
        if role not in ROLES:
            raise RequestError(f"{place}.role is {brief(role)}, must be one of {', '.join(ROLES)}", f"{place}.role")
        return {"role": role, "content": _text(item.get("content"), f"{place}.content")}
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        return {
            "role": "assistant",
            "tool_calls": [{"id": item.get("call_id"), "type": "function", "function": function}],
        }
    if kind == "function_call_output":
        output = _text(item.get("output"), f"{place}.output")
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
    known = "message, function_call, function_call_output or reasoning"
    raise RequestError(f"{place}.type is {brief(kind)}, must be {known}", param=f"{place}.type")


def _text(content: Any, place: str) -> str:
    """All parts joined. Raises RequestError for one that is no text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise RequestError(f"{place} is {brief(content)}, must be a text or parts of text", param=place)
    texts: list[str] = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get(TEXTS[kind]) if isinstance(kind, str) and kind in TEXTS else None
        if not isinstance(text, str):
            said = f"{place}.{number} is {brief(part if kind is None else kind)}, only text is supported"
            raise RequestError(said, param=f"{place}.{number}")
        texts.append(text)
    return "".join(texts)


def _tool(tool: Mapping[str, Any], index: int) -> dict[str, Any]:
    if tool.get("type") != "function":
        said = f"tools.{index}.type is {brief(tool.get('type'))}, only functions are supported"
        raise RequestError(said, param=f"tools.{index}.type")
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _choice(choice: str | Mapping[str, Any]) -> Any:
    if isinstance(choice, str):
        return choice
    if choice.get("type") != "function":
        raise RequestError(
            f"tool_choice is {brief(choice.get('type'))}, must be none, auto, required or a function", "tool_choice"
        )
    return {"type": "function", "function": {"name": choice.get("name")}}


def _format(asked: Mapping[str, Any]) -> dict[str, Any]:
    kind = asked.get("type")
    if kind != "json_schema":
        return dict(asked)
    return {"type": kind, "json_schema": {name: value for name, value in asked.items() if name != "type"}}
