"""Messages become one prompt, by the model's own chat template; what they say never becomes a special token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jdisagg.core.errors import RequestError
from jdisagg.model.chat_template import new_mark
from jdisagg.model.tokenizer import Tokenizer
from jdisagg.serve.frontends import text as offload
from jdisagg.serve.frontends.http.schema import ChatFields, ChatMessage, brief
from jdisagg.serve.frontends.tools.parser import json_value

OURS = frozenset({"messages", "add_generation_prompt", "tools"})  # not for chat_template_kwargs
ROLES = ("system", "developer", "user", "assistant", "tool")
UNSUPPORTED = ("function_call", "audio")


@dataclass(frozen=True, slots=True)
class Rendered:
    """A template's text, with `mark` before each special token that a client wrote."""

    text: str
    mark: str


async def chat_ids(
    body: ChatFields, tokenizer: Tokenizer, max_model_len: int, add_special_tokens: bool
) -> tuple[int, ...]:
    """Token ids of the prompt. Raises RequestError, or TooLong for what no `max_model_len` tokens can hold."""
    texts = [[each.content, each.model_extra, 100 * " "] for each in body.messages]
    size = _size(texts) + _size(body.chat_template_kwargs) + _size(body.tools)
    rendered = await offload.reading(size, lambda: render(body, tokenizer))
    tokenizer.check_size([rendered.text], max_model_len)
    text, mark = rendered.text, rendered.mark
    ids = await offload.tokenizing(len(text), lambda: tokenizer.encode_chat(text, mark, add_special_tokens))
    return tuple(ids)


def _size(value: Any) -> int:
    """Characters of all texts in it."""
    match value:
        case str():
            return len(value)
        case list():
            return sum(map(_size, value))
        case dict():
            return sum(map(_size, value.values()))
    return 1


def render(body: ChatFields, tokenizer: Tokenizer) -> Rendered:
    """The prompt, special tokens written out. Raises RequestError where template, parts or options do not go."""
    mark = new_mark()
    plain = [_message(each, index) for index, each in enumerate(body.messages)]
    messages = [{**tokenizer.special_text.marked(each, mark), "role": each["role"]} for each in plain]
    variables = tokenizer.special_text.marked(body.chat_template_kwargs or {}, mark)
    if OURS.isdisjoint(variables) and body.tools:
        variables["tools"] = tokenizer.special_text.marked(body.tools, mark)
    return Rendered(_text_of(body, tokenizer, messages, variables), mark)


def _text_of(body: ChatFields, tokenizer: Tokenizer, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
    clash = sorted(OURS & (body.chat_template_kwargs or {}).keys())
    if clash:
        raise RequestError(f"chat_template_kwargs must not hold {clash[0]!r}", param="chat_template_kwargs")
    if body.reasoning_effort is not None:
        variables["reasoning_effort"] = body.reasoning_effort[:64]
    if not body.continue_final_message:
        return tokenizer.chat(messages, body.add_generation_prompt, **variables)
    if body.add_generation_prompt and "add_generation_prompt" in body.model_fields_set:
        raise RequestError("continue_final_message and add_generation_prompt are both true", "continue_final_message")
    return _left_open(tokenizer.chat(messages, False, **variables), messages[-1]["content"])


def _left_open(prompt: str, last: str) -> str:
    """The prompt up to the end of the last message's content, so that the model goes on with it."""
    for content in (last, last.rstrip(), last.strip()):  # templates may trim
        at = prompt.rfind(content)
        if content and at >= 0:
            return prompt[: at + len(content)]
    raise RequestError(
        "continue_final_message: the template does not show the last message as it is", "continue_final_message"
    )


def _message(message: ChatMessage, index: int) -> dict[str, Any]:
    """A message for the template: parts of text joined, what is not text refused by name."""
    fields, place = message.model_dump(exclude_none=True), f"messages.{index}"
    for name in UNSUPPORTED:
        if fields.get(name):
            raise RequestError(f"messages[{index}].{name} is not supported yet", param=f"{place}.{name}")
    if message.role not in ROLES:
        known = ", ".join(ROLES)
        raise RequestError(
            f"messages[{index}] has the role {message.role[:40]!r}, must be one of {known}", f"{place}.role"
        )
    if fields.get("tool_calls"):
        fields["tool_calls"] = [_past_call(each, f"{place}.tool_calls") for each in fields["tool_calls"]]
        fields.setdefault("content", "")
    elif message.content is None:
        raise RequestError(f"messages[{index}] has no content", param=f"{place}.content")
    return {**fields, "content": _text(message.content or "", index)}


def _past_call(call: Any, place: str) -> dict[str, Any]:
    """A call of an earlier answer: templates want its arguments as an object, clients have them as text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f"{place} has {brief(call)}, must be calls of functions by name", param=place)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = json_value(arguments) if arguments.strip() else {}
    if not isinstance(arguments, dict):
        raise RequestError(f"{place}: the arguments of {function['name'][:64]!r} are no JSON object", param=place)
    return {"type": "function", **call, "function": {**function, "arguments": arguments}}


def _text(content: str | list[dict[str, Any]], index: int) -> str:
    """The text; of parts, all of them joined. Raises RequestError naming the first part that is none."""
    if isinstance(content, str):
        return content
    place, texts = f"messages.{index}.content", []
    for number, part in enumerate(content):
        kind = part.get("type", "text")
        if kind not in ("text", "input_text"):
            raise RequestError(
                f"messages[{index}] has a part of type {brief(kind)}, only text is supported", param=place
            )
        if not isinstance(part.get("text"), str):
            raise RequestError(
                f"messages[{index}].content[{number}] is a part of type {kind!r} without text", param=place
            )
        texts.append(part["text"])
    return "".join(texts)
