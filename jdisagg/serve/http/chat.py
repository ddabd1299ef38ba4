"""Messages become one prompt text, by the model's own chat template."""

from __future__ import annotations

from typing import Any

from jdisagg.core.errors import RequestError
from jdisagg.model.tokenizer import Tokenizer
from jdisagg.serve.http.schema import ChatFields, ChatMessage

OURS = frozenset({"messages", "add_generation_prompt", "tools"})  # not for chat_template_kwargs


def chat_prompt(body: ChatFields, tokenizer: Tokenizer) -> str:
    """The prompt, special tokens written out. Raises RequestError where template, parts or options do not go."""
    messages = [_message(each, index) for index, each in enumerate(body.messages)]
    variables = dict(body.chat_template_kwargs or {})
    clash = sorted(OURS & variables.keys())
    if clash:
        raise RequestError(f"chat_template_kwargs must not hold {clash[0]!r}", param="chat_template_kwargs")
    if body.reasoning_effort is not None:
        variables["reasoning_effort"] = body.reasoning_effort
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
    fields = message.model_dump(exclude_none=True)
    for name in ("tool_calls", "function_call", "tool_call_id", "audio"):
        if fields.get(name):
            raise RequestError(f"messages[{index}].{name} is not supported yet", param=f"messages.{index}.{name}")
    return {**fields, "content": _text(message.content, index)}


def _text(content: str | list[dict[str, Any]] | None, index: int) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content:
        if part.get("type", "text") not in ("text", "input_text") or not isinstance(part.get("text"), str):
            kind = str(part.get("type"))[:40]
            place = f"messages.{index}.content"
            raise RequestError(f"messages[{index}] has a part of type {kind!r}, only text is supported", param=place)
        texts.append(part["text"])
    return "".join(texts)
