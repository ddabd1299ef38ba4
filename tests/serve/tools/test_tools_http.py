"""Tools over HTTP, as the official client asks for them and reads what comes."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from jdisagg.serve.frontends.tools.asked import Parsers, parsers_of
from tests.serve.live_http import Front
from tests.serve.live_tools import ANSWER, TIME, WEATHER, prompt_of, says

USER: Any = [{"role": "user", "content": "Weather?"}]


@pytest.fixture
def client(with_tools: Front) -> openai.OpenAI:
    says(with_tools, ANSWER)
    with_tools.service.seen.clear()
    return with_tools.client


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(model="tiny", messages=fields.pop("messages", USER), **fields)


def test_an_answers_reasoning_words_and_calls_are_told_apart(client: openai.OpenAI, with_tools: Front):
    choice = ask(client, tools=[WEATHER, TIME], max_tokens=500).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert (choice.message.content, choice.message.reasoning_content) == ("Let me see.", "Hm, weather.")
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]
    assert calls == [("get_weather", {"city": "Ulm"}), ("get_time", {})]
    assert len({call.id for call in choice.message.tool_calls}) == 2
    assert '"name": "get_weather"' in prompt_of(with_tools)


def test_a_stream_tells_the_same_call_by_call(client: openai.OpenAI):
    deltas = [chunk.choices[0] for chunk in ask(client, tools=[WEATHER, TIME], stream=True, max_tokens=500)]
    assert "".join(each.delta.content or "" for each in deltas) == "Let me see."
    assert "".join(getattr(each.delta, "reasoning_content", None) or "" for each in deltas) == "Hm, weather."
    calls = [call for each in deltas for call in each.delta.tool_calls or []]
    assert [(call.index, call.function.name, call.function.arguments) for call in calls] == [
        (0, "get_weather", '{"city": "Ulm"}'),
        (1, "get_time", "{}"),
    ]
    assert deltas[-1].finish_reason == "tool_calls"


def test_a_call_that_is_cut_short_is_none(client: openai.OpenAI, with_tools: Front):
    says(with_tools, ANSWER[:-40])
    choice = ask(
        client, tools=[WEATHER, TIME], max_tokens=len(with_tools.service.tokenizer.encode(ANSWER[:-40], False))
    )
    assert choice.choices[0].finish_reason == "length"
    assert [call.function.name for call in choice.choices[0].message.tool_calls] == ["get_weather"]


def test_reasoning_is_told_apart_without_tools_and_left_out_where_nobody_wants_it(client: openai.OpenAI):
    message = ask(client, max_tokens=500).choices[0].message
    assert message.reasoning_content == "Hm, weather." and message.content.startswith("Let me see.\n<tool_call>")
    message = ask(client, max_tokens=500, extra_body={"include_reasoning": False}).choices[0].message
    assert not hasattr(message, "reasoning_content") and message.content.startswith("Let me see.")


def test_tools_that_may_not_be_called_are_not_shown(client: openai.OpenAI, with_tools: Front):
    assert not ask(client, tools=[WEATHER], tool_choice="none", max_tokens=500).choices[0].message.tool_calls
    assert "get_weather" not in prompt_of(with_tools)


def test_a_conversation_goes_on_with_the_calls_and_what_came_of_them(client: openai.OpenAI, with_tools: Front):
    call = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Ulm"}'}}
    past: Any = [*USER, {"role": "assistant", "tool_calls": [call]}]
    ask(client, messages=[*past, {"role": "tool", "tool_call_id": "1", "content": "20 C"}], max_tokens=500)
    assert "assistant:get_weather=Ulm" in prompt_of(with_tools) and "tool:20 C" in prompt_of(with_tools)


def test_a_tool_that_must_be_called_is_by_a_grammar_whatever_the_model_writes(client: openai.OpenAI, with_tools: Front):
    says(with_tools, '[{"name": "get_weather", "parameters": {"city": "Ulm"}}]')
    choice = ask(client, tools=[WEATHER, TIME], tool_choice="required", max_tokens=500).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    assert choice.message.tool_calls[0].function.arguments == '{"city": "Ulm"}'
    assert "get_weather" in with_tools.service.seen[-1].sampling.grammar
    says(with_tools, '{"city": "Ulm"}')
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    choice = ask(client, tools=[WEATHER, TIME], tool_choice=named, max_tokens=500).choices[0]
    assert choice.finish_reason == "stop" and choice.message.tool_calls[0].function.name == "get_weather"


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "web"}]}, "tools\\[0\\] is no function"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "must be up to 64"),
    ({"tools": [TIME, TIME]}, "'get_time' twice"),
    ({"tools": [TIME], "tool_choice": "maybe"}, "'maybe'"),
    ({"tools": [TIME], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "none of the tools"),
    ({"tool_choice": "required"}, "there are no tools"),
    ({"tools": [TIME], "tool_choice": "required", "response_format": {"type": "json_object"}}, "one form"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"$ref": "#/$defs/x"}}}]}
        | {"tool_choice": "required"},
        "does not exist",
    ),
]


@pytest.mark.parametrize(("fields", "says_so"), WRONG, ids=[says for _, says in WRONG])
def test_what_cannot_be_called_is_refused_by_name(client: openai.OpenAI, fields: dict[str, Any], says_so: str):
    with pytest.raises(openai.BadRequestError, match=says_so):
        ask(client, **fields)


def test_the_parsers_follow_from_the_template_and_the_vocabulary(with_tools: Front):
    assert parsers_of(with_tools.service.tokenizer).tools == "hermes"
    assert parsers_of(with_tools.service.tokenizer, tools="off", reasoning="off") == Parsers()
