"""Every error that HTTP has a status for ends a gRPC call with the code of that status, and with its reason."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import grpc
import grpc.aio
import pytest

from jdisagg.core.errors import RequestError
from jdisagg.core.events import Finish
from jdisagg.core.ledger import Ledger
from jdisagg.core.request import FinishReason, Request, RequestId
from jdisagg.policy.client_limits import LimitProblem
from jdisagg.serve.driver.local_service import AnswerFailed, GrammarEnded
from jdisagg.serve.driver.service import Draining, ObjectiveUnmet, Rejected
from jdisagg.serve.frontends.adapters import NoSuchAdapter
from jdisagg.serve.frontends.clients import RateLimited
from jdisagg.serve.frontends.grpc.inference_pb2 import Body
from jdisagg.serve.frontends.grpc.inference_pb2_grpc import InferenceStub
from jdisagg.serve.frontends.grpc.jetstream_pb2_grpc import OrchestratorStub
from jdisagg.serve.frontends.grpc.server import CODES, code_of
from jdisagg.serve.frontends.http.errors import (
    FAILED_STATUS,
    MEANINGS,
    RESPONSES,
    BodyTooLarge,
    ModelNotFound,
    describe,
)
from tests.serve.scripted import ScriptedService, Step, told
from tests.serve.test_grpc_front import text_request, with_channel

Code = grpc.StatusCode


def ended(reason: FinishReason, kind: type[AnswerFailed] = AnswerFailed) -> AnswerFailed:
    return kind(Finish(RequestId("r"), reason, Ledger(), detail=f"it ended by {reason}"))


ERRORS: list[tuple[Exception, int, Code]] = [
    (RequestError("temperature is -1"), 400, Code.INVALID_ARGUMENT),
    (ended(FinishReason.ERROR, GrammarEnded), 400, Code.INVALID_ARGUMENT),
    (ModelNotFound("no such model"), 404, Code.NOT_FOUND),
    (NoSuchAdapter("no such adapter"), 404, Code.NOT_FOUND),
    (ended(FinishReason.TIMEOUT), 408, Code.DEADLINE_EXCEEDED),
    (BodyTooLarge("the body is large"), 413, Code.INVALID_ARGUMENT),
    (RateLimited(LimitProblem("requests", 1, 1.5), ()), 429, Code.RESOURCE_EXHAUSTED),
    (ObjectiveUnmet("it would be late", 1.5), 429, Code.RESOURCE_EXHAUSTED),
    (Rejected("the queue is full", 1.5), 429, Code.RESOURCE_EXHAUSTED),
    (ended(FinishReason.ERROR), 500, Code.INTERNAL),
    (ended(FinishReason.ABORT), 503, Code.UNAVAILABLE),
    (Draining("not ready"), 503, Code.UNAVAILABLE),
]


def test_each_status_of_http_has_its_code_and_each_kind_of_error_is_in_the_table() -> None:
    assert [(describe(error)[0], code_of(status)) for error, status, _ in ERRORS] == [each[1:] for each in ERRORS]
    statuses = {*MEANINGS, *FAILED_STATUS.values(), *(status for _, status, _, _ in RESPONSES)} - {500}
    assert statuses <= set(CODES), "a status of HTTP that gRPC answers as a mistake of ours"


def test_a_call_that_fails_before_or_after_its_first_token_ends_with_the_code_and_the_reason() -> None:
    begun = False  # whether a token is out when it fails
    error: Exception = RequestError("")

    def script(request: Request) -> Iterator[Step]:
        if begun:
            yield told(request, 70)
        yield error

    async def check(call: Any, code: Code, *, events: int) -> None:
        heard = 0
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                heard += 1
        assert (caught.value.code(), heard > 0) == (code, events > 0), (error, caught.value)
        assert str(error) in str(caught.value.details())

    async def test(channel: grpc.aio.Channel) -> None:
        nonlocal error, begun
        stub: Any = InferenceStub(channel)
        body: dict[str, Any] = {"max_tokens": 9, "temperature": 0}
        chat = {**body, "messages": [{"role": "user", "content": "hi"}]}
        for each, _, code in ERRORS:
            error = each
            for begun in (False, True):
                await check(OrchestratorStub(channel).Decode(text_request(max_tokens=9)), code, events=begun)
                for method, asked in ((stub.Complete, {**body, "prompt": "hi"}), (stub.Chat, chat)):
                    await check(posting(method, asked), code, events=0)
                    await check(posting(method, {**asked, "stream": True}), code, events=begun)
                respond = {"input": "hi", "stream": True}
                await check(posting(stub.Respond, respond), code, events=begun)

    def posting(method: Any, body: dict[str, Any]) -> Any:
        return method(Body(json=json.dumps(body)))

    service = with_channel(test, ScriptedService(script))
    assert not service.running
