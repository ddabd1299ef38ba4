"""The Messages API as Anthropic's own client speaks it: whole, streamed, parsed, with tools, and refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from pydantic import BaseModel

from jdisagg.serve.frontends.front_settings import FrontSettings
from jdisagg.serve.frontends.http.app import create_app
from tests.serve.live_http import Front, serving
from tests.serve.live_tools import ANSWER, TIME, WEATHER, prompt_of, says
from tests.serve.scripted import ScriptedService, tokens

TOOLS: Any = [
    {"name": each["function"]["name"], "input_schema": each["function"].get("parameters", {"type": "object"})}
    for each in (WEATHER, TIME)
]
USER: Any = [{"role": "user", "content": "Weather?"}]
ASKED: Any = {"model": "tiny", "max_tokens": 500, "messages": USER}


class Answer(BaseModel):
    city: str


@pytest.fixture
def client(with_tools: Front) -> Iterator[anthropic.Anthropic]:
    says(with_tools, ANSWER)
    with_tools.service.seen.clear()
    with anthropic.Anthropic(base_url=with_tools.url, api_key="any", max_retries=0) as client:
        yield client


def test_an_answer_is_blocks_of_thoughts_text_and_calls(client: anthropic.Anthropic, with_tools: Front):
    answer = client.messages.create(**ASKED, system="Be brief.", tools=TOOLS)
    assert [block.type for block in answer.content] == ["thinking", "text", "tool_use", "tool_use"]
    thought, text, first, second = answer.content
    assert thought.type == "thinking" and thought.thinking == "Hm, weather."
    assert text.type == "text" and text.text == "Let me see."
    assert first.type == "tool_use" and (first.name, first.input) == ("get_weather", {"city": "Ulm"})
    assert second.type == "tool_use" and second.name == "get_time" and first.id != second.id
    assert answer.stop_reason == "tool_use" and answer.usage.output_tokens > 0
    assert prompt_of(with_tools).startswith('[{"type": "function"') and "system:Be brief.user:Weather?" in prompt_of(
        with_tools
    )


def test_a_stream_builds_the_same_message(client: anthropic.Anthropic):
    whole = client.messages.create(**ASKED, tools=TOOLS)
    with client.messages.stream(**ASKED, tools=TOOLS) as stream:
        texts = [event.text for event in stream if event.type == "text"]
        final = stream.get_final_message()
    assert "".join(texts) == "Let me see." and len(texts) > 1
    told = [block.to_dict() for block in final.content if block.type != "tool_use"]
    assert [{**each, "parsed_output": None} for each in told] == [
        {**block.to_dict(), "parsed_output": None} for block in whole.content if block.type != "tool_use"
    ]
    calls = [(block.name, block.input) for block in final.content if block.type == "tool_use"]
    assert calls == [("get_weather", {"city": "Ulm"}), ("get_time", {})]
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    assert final.usage.input_tokens == whole.usage.input_tokens


def test_a_conversation_goes_on_with_the_blocks_of_the_last_answer(client: anthropic.Anthropic, with_tools: Front):
    first = client.messages.create(**ASKED, tools=TOOLS)
    call = next(block for block in first.content if block.type == "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "20 C"}]}
    said: Any = [block.to_dict() for block in first.content[:3]]
    past: Any = [*USER, {"role": "assistant", "content": said}]
    past.append({"role": "user", "content": [result, {"type": "text", "text": "So?"}]})
    client.messages.create(**ASKED | {"messages": past}, tools=TOOLS)
    assert "assistant:Let me see.get_weather=Ulmtool:20 Cuser:So?" in prompt_of(with_tools)


def test_the_clients_own_runner_calls_tools_until_the_answer(client: anthropic.Anthropic, with_tools: Front):
    asked: list[str] = []

    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """The weather."""
        asked.append(city)
        says(with_tools, "</think>It is 20 C.")
        return "20 C"

    says(with_tools, '</think><tool_call>{"name": "get_weather", "arguments": {"city": "Ulm"}}</tool_call>')
    last = client.beta.messages.tool_runner(**ASKED, tools=[get_weather]).until_done()
    assert asked == ["Ulm"] and last.content[0].type == "text" and last.content[0].text == "It is 20 C."
    assert last.stop_reason == "end_turn" and "tool:20 C" in prompt_of(with_tools)


@pytest.mark.parametrize("choice", [{"type": "tool", "name": "get_weather"}, {"type": "any"}])
def test_a_tool_that_must_be_called_is(client: anthropic.Anthropic, with_tools: Front, choice: Any):
    named = choice["type"] == "tool"
    call = {"city": "Ulm"} if named else [{"name": "get_weather", "parameters": {"city": "Ulm"}}]
    says(with_tools, json.dumps(call))
    answer = client.messages.create(**ASKED, tools=TOOLS, tool_choice=choice)
    (block,) = answer.content
    assert block.type == "tool_use" and block.input == {"city": "Ulm"} and answer.stop_reason == "tool_use"
    assert with_tools.service.seen[-1].sampling.grammar


def test_a_form_is_asked_for_as_a_class_and_comes_back_as_one(client: anthropic.Anthropic, with_tools: Front):
    says(with_tools, '</think>{"city": "Ulm"}')
    parsed = client.messages.parse(**ASKED, output_format=Answer)
    assert parsed.parsed_output == Answer(city="Ulm")
    assert "city" in with_tools.service.seen[-1].sampling.grammar


def test_the_reason_tells_a_limit_from_a_stop_sequence(client: anthropic.Anthropic, with_tools: Front):
    assert client.messages.create(**ASKED | {"max_tokens": 3}).stop_reason == "max_tokens"
    says(with_tools, "</think>one two three")
    answer = client.messages.create(**ASKED, stop_sequences=[" three", "x"])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", " three")
    assert answer.content[0].type == "text" and answer.content[0].text == "one two"


def test_thoughts_are_left_out_where_thinking_is_off(client: anthropic.Anthropic):
    answer = client.messages.create(**ASKED, thinking={"type": "disabled"})
    assert {block.type for block in answer.content} == {"text"}


def test_tokens_are_counted_as_the_answer_counts_them(client: anthropic.Anthropic):
    counted = client.messages.count_tokens(model="tiny", messages=USER, tools=TOOLS).input_tokens
    assert counted == client.messages.create(**ASKED, tools=TOOLS).usage.input_tokens


def test_a_stream_that_breaks_is_an_error_of_the_client(client: anthropic.Anthropic, with_tools: Front):
    ids = with_tools.service.tokenizer.encode("</think>Let me", False)

    def breaks(request: Any) -> Iterator[Any]:
        yield from [*tokens(request, ids)][:-1]
        raise RuntimeError("gone")

    with_tools.service.script = breaks
    with pytest.raises(anthropic.APIStatusError, match="internal error"):
        list(client.messages.create(**ASKED, stream=True))


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "at least 1 item"),
    ({"messages": [{"role": "cat", "content": "x"}]}, r"messages\.0\.role is 'cat'"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "block of type 'image'"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]}, r"content\.0\.text is 3"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "only tools of your own"),
    ({"tools": TOOLS, "tool_choice": {"type": "some"}}, r"tool_choice\.type is 'some'"),
    ({"max_tokens": 5000}, "over the limit of 4096"),
    ({"extra_body": {"mcp_servers": [{"url": "x"}]}}, "mcp_servers is not supported"),
    ({"extra_body": {"output_config": {"format": {"type": "xml"}}}}, r"output_config\.format\.type is 'xml'"),
]


@pytest.mark.parametrize(("fields", "says_so"), WRONG, ids=[says_so for _, says_so in WRONG])
def test_what_cannot_be_done_is_refused_by_name(client: anthropic.Anthropic, fields: dict[str, Any], says_so: str):
    create: Any = client.messages.create
    with pytest.raises(anthropic.BadRequestError, match=says_so) as refused:
        create(**ASKED | fields)
    body: Any = refused.value.body
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"


def test_the_key_may_come_in_either_header():
    with serving(create_app(ScriptedService(), FrontSettings(api_key="k"))) as url:
        with anthropic.Anthropic(base_url=url, api_key="k", max_retries=0) as client:
            assert client.messages.create(**ASKED | {"max_tokens": 5}).stop_reason == "max_tokens"
        client = anthropic.Anthropic(base_url=url, api_key="wrong", max_retries=0)
        with client, pytest.raises(anthropic.AuthenticationError) as refused:
            client.messages.create(**ASKED | {"max_tokens": 5})
        assert refused.value.type == "authentication_error"
        asked = {"model": "tiny", "max_tokens": 5, "messages": USER}
        bearer = httpx.post(f"{url}/v1/messages", json=asked, headers={"authorization": "Bearer k"})
        assert bearer.status_code == 200
