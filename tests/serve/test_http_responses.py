"""The Responses API as the official client speaks it: whole, streamed, parsed, with tools, and refused by name."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.types.responses import ResponseFunctionToolCall, ResponseOutputMessage, ResponseReasoningItem
from pydantic import BaseModel

from jdisagg.core.events import Finish
from jdisagg.core.ledger import Ledger
from jdisagg.core.request import FinishReason
from jdisagg.serve.driver.local_service import GrammarEnded
from tests.serve.live_http import Front
from tests.serve.live_tools import ANSWER, TIME, WEATHER, prompt_of, says
from tests.serve.scripted import tokens

TOOLS: Any = [{"type": "function", **each["function"]} for each in (WEATHER, TIME)]


class Answer(BaseModel):
    city: str


@pytest.fixture
def client(with_tools: Front) -> openai.OpenAI:
    says(with_tools, ANSWER)
    with_tools.service.seen.clear()
    return with_tools.client


def test_an_answer_is_reasoning_a_message_and_calls(client: openai.OpenAI, with_tools: Front):
    answer = client.responses.create(model="tiny", input="Weather?", instructions="Be brief.", tools=TOOLS)
    reasoning, message, first, second = answer.output
    assert isinstance(reasoning, ResponseReasoningItem) and reasoning.content is not None
    assert isinstance(message, ResponseOutputMessage) and answer.output_text == "Let me see."
    assert reasoning.content[0].text == "Hm, weather."
    assert isinstance(first, ResponseFunctionToolCall) and isinstance(second, ResponseFunctionToolCall)
    assert (first.name, json.loads(first.arguments), second.name) == ("get_weather", {"city": "Ulm"}, "get_time")
    assert answer.status == "completed" and answer.id.startswith("resp_")
    assert "system:Be brief.user:Weather?" in prompt_of(with_tools) and '"name": "get_weather"' in prompt_of(with_tools)
    usage = answer.usage
    assert usage is not None and usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert 0 < usage.output_tokens_details.reasoning_tokens < usage.output_tokens


def test_a_stream_builds_the_very_items_that_it_ends_with(client: openai.OpenAI):
    with client.responses.stream(model="tiny", input="Weather?", tools=TOOLS) as stream:
        events = list(stream)
        final = stream.get_final_response()
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    assert [getattr(event, "sequence_number", None) for event in events] == list(range(len(events)))
    texts = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(texts) == "Let me see." and len(texts) > 1
    thoughts = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(thoughts) == "Hm, weather."
    done = [event.item.id for event in events if event.type == "response.output_item.done"]
    assert done == [item.id for item in final.output]  # pyright: ignore[reportAttributeAccessIssue]
    assert final.output_text == "Let me see."
    calls = [item for item in final.output if item.type == "function_call"]
    assert [call.name for call in calls] == ["get_weather", "get_time"]


def test_a_conversation_goes_on_with_the_items_of_the_last_answer(client: openai.OpenAI, with_tools: Front):
    first = client.responses.create(model="tiny", input="Weather?", tools=TOOLS)
    call = next(item for item in first.output if item.type == "function_call")
    past: Any = [{"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]}]
    past += [item.to_dict() for item in first.output[:-1]]
    past.append({"type": "function_call_output", "call_id": call.call_id, "output": "20 C"})
    client.responses.create(model="tiny", input=past, tools=TOOLS)
    assert "assistant:Let me see.get_weather=Ulmtool:20 C" in prompt_of(with_tools)


def test_a_form_is_asked_for_as_a_class_and_comes_back_as_one(client: openai.OpenAI, with_tools: Front):
    says(with_tools, '</think>{"city": "Ulm"}')
    parsed = client.responses.parse(model="tiny", input="Where?", text_format=Answer)
    assert parsed.output_parsed == Answer(city="Ulm")
    assert "city" in with_tools.service.seen[-1].sampling.grammar
    with client.responses.stream(model="tiny", input="Where?", text_format=Answer) as stream:
        assert stream.get_final_response().output_parsed == Answer(city="Ulm")


def test_a_tool_that_must_be_called_is(client: openai.OpenAI, with_tools: Front):
    says(with_tools, '{"city": "Ulm"}')
    choice: Any = {"type": "function", "name": "get_weather"}
    answer = client.responses.create(model="tiny", input="Weather?", tools=TOOLS, tool_choice=choice)
    (call,) = answer.output
    assert isinstance(call, ResponseFunctionToolCall) and call.arguments == '{"city": "Ulm"}'


def test_an_answer_that_is_cut_short_says_so(client: openai.OpenAI):
    answer = client.responses.create(model="tiny", input="Weather?", max_output_tokens=3)
    assert answer.status == "incomplete" and answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    events = list(client.responses.create(model="tiny", input="Weather?", max_output_tokens=3, stream=True))
    assert events[-1].type == "response.incomplete"


def test_logprobs_cover_every_token_of_the_message(client: openai.OpenAI, with_tools: Front):
    says(with_tools, "</think>Grüße, 世界")
    include: Any = ["message.output_text.logprobs"]
    answer = client.responses.create(model="tiny", input="x", include=include, top_logprobs=2)
    (message,) = answer.output
    assert isinstance(message, ResponseOutputMessage) and message.content[0].type == "output_text"
    scores = message.content[0].logprobs
    assert scores is not None and b"".join(bytes(each.bytes) for each in scores).decode().endswith("Grüße, 世界")
    assert all(len(each.top_logprobs) == 2 for each in scores)


def test_sampling_fields_and_the_requests_name_are_those_of_chat(client: openai.OpenAI, with_tools: Front):
    more = {"seed": 7, "top_k": 3, "min_tokens": 2, "stop": ["x"], "priority": 2, "cache_salt": "s"}
    answer = client.responses.with_raw_response.create(
        model="tiny", input="x", temperature=0.5, extra_body=more, extra_headers={"x-request-id": "mine"}
    )
    request = with_tools.service.seen[-1]
    assert (request.sampling.seed, request.sampling.top_k, request.sampling.min_tokens) == (7, 3, 2)
    assert (request.priority, request.cache_salt) == (2, "s")
    assert answer.headers["x-request-id"] == "mine" and answer.parse().id == "resp_mine"
    assert answer.parse().temperature == 0.5


def test_tokens_are_counted_as_the_answer_counts_them(client: openai.OpenAI):
    counted = client.responses.input_tokens.count(model="tiny", input="Weather?", tools=TOOLS)
    usage = client.responses.create(model="tiny", input="Weather?", tools=TOOLS).usage
    assert usage is not None and counted.input_tokens == usage.input_tokens


def test_a_stream_that_breaks_ends_as_failed_with_what_had_come(client: openai.OpenAI, with_tools: Front):
    ids = with_tools.service.tokenizer.encode("</think>Let me", False)

    def breaks(request: Any) -> Any:
        yield from [*tokens(request, ids)][:-1]
        raise RuntimeError("gone")

    with_tools.service.script = breaks
    last = list(client.responses.create(model="tiny", input="x", stream=True))[-1]
    assert last.type == "response.failed" and last.response.error is not None
    assert last.response.output_text.startswith("Let") and last.response.error.code == "server_error"


def test_a_stream_whose_grammar_ends_half_way_says_what_http_would(client: openai.OpenAI, with_tools: Front):
    ids = with_tools.service.tokenizer.encode("</think>Let me", False)

    def ends(request: Any) -> Any:
        yield from [*tokens(request, ids)][:-1]
        raise GrammarEnded(Finish(request.request_id, FinishReason.ERROR, Ledger(), detail="it went over its limits"))

    with_tools.service.script = ends
    last = list(client.responses.create(model="tiny", input="x", stream=True))[-1]
    assert last.type == "response.failed" and last.response.error is not None
    assert str(last.response.error.code) == "grammar_limit"


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"previous_response_id": "resp_1"}, "previous_response_id is not supported"),
    ({"background": True}, "background is not supported"),
    ({"tools": [{"type": "web_search"}]}, r"tools\.0\.type is 'web_search'"),
    ({"tools": TOOLS, "tool_choice": {"type": "mcp"}}, "tool_choice is 'mcp'"),
    ({"input": []}, "at least 1 item"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, r"input\.0\.type is 'item_reference'"),
    ({"input": [{"role": "cat", "content": "x"}]}, r"input\.0\.role is 'cat'"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, r"content\.0 is 'input_image'"),
    ({"input": [{"role": "user", "content": 3}]}, "must be a text"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "[", "call_id": "1"}]}, "no JSON object"),
    ({"input": [{"type": "reasoning", "summary": []}]}, "none of which says anything"),
    ({"truncation": "later"}, "truncation is 'later'"),
    ({"text": {"format": {"type": "xml"}}}, "'xml'"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"extra_body": {"n": 2}}, "n: Input should be less than or equal to 1"),
]


@pytest.mark.parametrize(("fields", "says_so"), WRONG, ids=[says_so for _, says_so in WRONG])
def test_what_cannot_be_done_is_refused_by_name(client: openai.OpenAI, fields: dict[str, Any], says_so: str):
    create: Any = client.responses.create
    with pytest.raises(openai.BadRequestError, match=says_so):
        create(**{"model": "tiny", "input": "x"} | fields)
