"""The routes of HTTP by gRPC: the same bodies, the same answers, the same refusals, whole and streamed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
import pytest

from jdisagg.serve.driver.service import Rejected
from jdisagg.serve.frontends.front_settings import FrontSettings
from jdisagg.serve.frontends.grpc.inference_pb2 import Body
from jdisagg.serve.frontends.grpc.inference_pb2_grpc import InferenceStub
from tests.serve.scripted import ScriptedService, tokens
from tests.serve.test_grpc_front import with_channel

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "temperature": 0}


async def posted(method: Any, body: dict[str, Any], **metadata: str) -> list[dict[str, Any]]:
    told = tuple((name.replace("_", "-"), value) for name, value in metadata.items())
    return [json.loads(each.json) async for each in method(Body(json=json.dumps(body)), metadata=told)]


def asked(test: Callable[[InferenceStub], Awaitable[None]], **rest: Any) -> ScriptedService:
    async def run(channel: grpc.aio.Channel) -> None:
        await test(InferenceStub(channel))

    return with_channel(run, **rest)


def test_an_answer_is_that_of_http_with_all_that_was_asked_for() -> None:
    async def test(stub: InferenceStub) -> None:
        body = {"prompt": "hello", "max_tokens": 4, "logprobs": 1, "stop": ["x"], "n": 2, "seed": 2**62 + 1}
        more = {"logit_bias": {"70": 1}, "min_tokens": 2, "priority": 1, "cache_salt": "s", "speculative": False}
        (answer,) = await posted(stub.Complete, body | more, x_request_id="mine")
        assert answer["id"] == "cmpl-mine" and len(answer["choices"]) == 2
        assert answer["choices"][0]["logprobs"] and answer["usage"]["completion_tokens"] == 8

    request = asked(test).seen[0]
    assert request.sampling.seed == 2**62 + 1 and request.sampling.logit_bias == ((70, 1.0),)
    assert (request.priority, request.cache_salt, request.sampling.speculative) == (1, "s", False)


def test_a_stream_has_a_message_an_event_and_its_usage_last() -> None:
    async def test(stub: InferenceStub) -> None:
        events = await posted(stub.Chat, CHAT | {"stream": True, "stream_options": {"include_usage": True}})
        assert {event["object"] for event in events} == {"chat.completion.chunk"}
        assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == 6
        kinds = [
            event["type"]
            for event in await posted(stub.Respond, {"input": "hi", "stream": True, "max_output_tokens": 4})
        ]
        assert kinds[0] == "response.created" and kinds[-1] == "response.incomplete"

    asked(test)


def test_forms_and_tools_are_asked_for_as_over_http() -> None:
    service = ScriptedService()
    ids = service.tokenizer.encode('{"a": 1}', False)
    service.script = lambda request: tokens(request, ids)

    async def test(stub: InferenceStub) -> None:
        form = {"structured_outputs": {"regex": "[a-f]+"}}
        await posted(stub.Complete, {"prompt": "x"} | form)
        choice = {"type": "function", "function": {"name": "f"}}
        (answer,) = await posted(stub.Chat, CHAT | {"max_tokens": 50, "tools": [TOOL], "tool_choice": choice})
        assert answer["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'

    asked(test, service=service)
    assert all(request.sampling.grammar for request in service.seen)


def test_tokens_go_there_and_back() -> None:
    async def test(stub: InferenceStub) -> None:
        (found,) = await posted(stub.Tokenize, {"prompt": "Grüße"})
        (back,) = await posted(stub.Detokenize, {"tokens": found["tokens"], "skip_special_tokens": True})
        assert back["prompt"] == "Grüße"

    asked(test)


def refusal(stub_of: Callable[[InferenceStub], Any], body: dict[str, Any], **rest: Any) -> grpc.aio.AioRpcError:
    found: list[grpc.aio.AioRpcError] = []

    async def test(stub: InferenceStub) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await posted(stub_of(stub), body)
        found.append(refused.value)

    asked(test, **rest)
    return found[0]


def test_a_refusal_has_the_status_that_belongs_to_it_and_https_words() -> None:
    error = refusal(lambda stub: stub.Complete, {"prompt": "x", "temperature": -1})
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and "temperature is -1" in str(error.details())
    error = refusal(lambda stub: stub.Chat, CHAT | {"model": "other"})
    assert error.code() is grpc.StatusCode.NOT_FOUND
    error = refusal(lambda stub: stub.Embed, {"input": "x"})
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and "--embeddings" in str(error.details())
    error = refusal(lambda stub: stub.Complete, {"prompt": "x"}, settings=FrontSettings(api_key="k"))
    assert error.code() is grpc.StatusCode.UNAUTHENTICATED


def test_a_full_queue_says_when_to_come_again() -> None:
    def full(request: Any) -> Any:
        raise Rejected("full", 2.0)
        yield

    service = ScriptedService(full)
    error = refusal(lambda stub: stub.Complete, {"prompt": "x"}, service=service)
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert dict(error.trailing_metadata() or ())["retry-after"] == "2"


def test_a_client_that_leaves_cancels_its_request() -> None:
    def slow(request: Any) -> Any:
        for step in tokens(request, [70] * 400):
            yield step
            yield 0.01

    service = ScriptedService(slow)

    async def test(stub: InferenceStub) -> None:
        call = stub.Complete(Body(json=json.dumps({"prompt": "x", "max_tokens": 400, "stream": True})))
        await call.read()  # type: ignore[attr-defined]
        assert service.running
        call.cancel()  # type: ignore[attr-defined]
        while service.running:
            await asyncio.sleep(0.01)

    asked(test, service=service)
