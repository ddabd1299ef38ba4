"""gRPC clients with the generated stubs: JetStream's Orchestrator, health and reflection, on a real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from jdisagg.core.request import Adapter, FinishReason
from jdisagg.core.traceparent import span_id_of
from jdisagg.serve.driver.service import Rejected, Service
from jdisagg.serve.frontends.adapters import Adapters
from jdisagg.serve.frontends.front_settings import FrontSettings
from jdisagg.serve.frontends.grpc.jetstream_pb2 import DecodeRequest, DecodeResponse, HealthCheckRequest
from jdisagg.serve.frontends.grpc.jetstream_pb2_grpc import OrchestratorStub
from jdisagg.serve.frontends.grpc.server import create_grpc_server
from tests.serve.scripted import ScriptedService, end, tokens

TEXT = "Grüße, 世界"


@asynccontextmanager
async def channel_to(service: Service, settings: FrontSettings | None = None) -> AsyncIterator[grpc.aio.Channel]:
    server = create_grpc_server(service, settings)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        await server.stop(grace=0)


def with_channel(
    test: Callable[[grpc.aio.Channel], Awaitable[None]],
    service: ScriptedService | None = None,
    settings: FrontSettings | None = None,
) -> ScriptedService:
    service = service or ScriptedService()

    async def run() -> None:
        async with channel_to(service, settings) as channel:
            await asyncio.wait_for(test(channel), timeout=60)

    asyncio.run(run())
    return service


def text_request(text: str = TEXT, **fields: Any) -> DecodeRequest:
    return DecodeRequest(text_content=DecodeRequest.TextContent(text=text), **fields)


async def decode(channel: grpc.aio.Channel, request: DecodeRequest) -> list[DecodeResponse]:
    return [response async for response in OrchestratorStub(channel).Decode(request)]


def texts(responses: list[DecodeResponse], sample: int = 0) -> str:
    return "".join(response.stream_content.samples[sample].text for response in responses)


def ids(responses: list[DecodeResponse], sample: int = 0) -> list[int]:
    return [token for response in responses for token in response.stream_content.samples[sample].token_ids]


def test_text_comes_back_whole_with_its_tokens() -> None:
    service = ScriptedService()
    prompt = service.tokenizer.encode(TEXT)

    async def test(channel: grpc.aio.Channel) -> None:
        responses = await decode(channel, text_request(max_tokens=len(prompt)))
        assert texts(responses) == TEXT
        assert ids(responses) == prompt
        assert all("\ufffd" not in sample.text for each in responses for sample in each.stream_content.samples)
        assert len(responses) == len(prompt)

    with_channel(test, service)
    assert service.seen[0].sampling.greedy


def test_tokens_go_in_as_they_are_and_has_bos_adds_none() -> None:
    async def test(channel: grpc.aio.Channel) -> None:
        await decode(channel, DecodeRequest(token_content=DecodeRequest.TokenContent(token_ids=[70, 71]), max_tokens=3))
        await decode(channel, text_request("hello", max_tokens=1, has_bos=True))
        await decode(channel, text_request("hello", max_tokens=1))

    service = with_channel(test)
    tokens, bare, with_bos = (request.prompt for request in service.seen)
    assert tokens == (70, 71)
    assert with_bos == (service.tokenizer.bos_id, *bare)


def test_without_a_limit_the_answer_may_fill_the_models_length() -> None:
    async def test(channel: grpc.aio.Channel) -> None:
        await decode(channel, text_request("hello"))

    request = with_channel(test, ScriptedService(max_model_len=64)).seen[0]
    assert request.sampling.max_tokens == 64 - len(request.prompt)


def test_several_samples_are_told_apart_by_their_place() -> None:
    async def test(channel: grpc.aio.Channel) -> None:
        responses = await decode(channel, text_request("abcdefgh", max_tokens=9, num_samples=3))
        assert {len(each.stream_content.samples) for each in responses} == {3}
        assert [len(ids(responses, sample)) for sample in range(3)] == [9, 9, 9]

    service = with_channel(test)
    assert len({request.sampling.seed for request in service.seen}) == 3


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (DecodeRequest(max_tokens=1), "content"),
        (text_request(max_tokens=-1), "max_tokens"),
        (text_request(max_tokens=600), "512"),
        (text_request(num_samples=1000), "num_samples"),
        (text_request(lora_adapter_id="x"), "lora_adapter_id"),
        (DecodeRequest(token_content=DecodeRequest.TokenContent(token_ids=[-1]), max_tokens=1), "-1"),
        (DecodeRequest(token_content=DecodeRequest.TokenContent(), max_tokens=1), "empty"),
    ],
)
def test_bad_requests_are_invalid_arguments(request_: DecodeRequest, words: str) -> None:
    async def test(channel: grpc.aio.Channel) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await decode(channel, request_)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert words in str(caught.value.details())

    assert not with_channel(test).seen


def test_an_adapter_is_asked_for_by_its_name() -> None:
    adapter = Adapter("sql", "1" * 32, "/adapters/sql")

    async def test(channel: grpc.aio.Channel) -> None:
        await decode(channel, text_request(lora_adapter_id="sql"))
        await decode(channel, text_request())

    settings = FrontSettings(adapters=Adapters(found={"sql": adapter}))
    asked = with_channel(test, settings=settings).seen
    assert [each.sampling.adapter for each in asked] == [adapter, None]


@pytest.mark.parametrize(
    ("step", "code"),
    [
        (Rejected("full", 1.5), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (FinishReason.TIMEOUT, grpc.StatusCode.DEADLINE_EXCEEDED),
        (FinishReason.ERROR, grpc.StatusCode.INTERNAL),
        (FinishReason.ABORT, grpc.StatusCode.UNAVAILABLE),
    ],
)
def test_what_fails_later_has_its_status(step: Any, code: grpc.StatusCode) -> None:
    service = ScriptedService(lambda request: iter([step if isinstance(step, Exception) else end(request, step)]))

    async def test(channel: grpc.aio.Channel) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await decode(channel, text_request(max_tokens=1))
        assert caught.value.code() is code
        if isinstance(step, Rejected):
            assert ("retry-after", "1.500") in tuple(caught.value.trailing_metadata() or ())

    assert not with_channel(test, service).running


def test_a_cancelled_call_frees_its_requests() -> None:
    service = ScriptedService(lambda request: iter([30.0, end(request, FinishReason.LENGTH)]))

    async def until(true: Callable[[], bool]) -> None:
        while not true():
            await asyncio.sleep(0.005)

    async def test(channel: grpc.aio.Channel) -> None:
        call = OrchestratorStub(channel).Decode(text_request(max_tokens=1, num_samples=2))
        reading = asyncio.create_task(call.read())
        await until(lambda: len(service.running) == 2)
        call.cancel()
        await until(lambda: not service.running)
        with pytest.raises(asyncio.CancelledError):
            await reading

    with_channel(test, service)
    assert not service.running


def test_health_follows_the_service() -> None:
    service = ScriptedService()
    name = health_pb2.HealthCheckRequest(service="jetstream_proto.Orchestrator")

    async def test(channel: grpc.aio.Channel) -> None:
        stub: Any = health_pb2_grpc.HealthStub(channel)  # its methods are made at run time
        watch = stub.Watch(name)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        assert (await OrchestratorStub(channel).HealthCheck(HealthCheckRequest())).is_live
        service.draining = True
        assert (await stub.Check(name)).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await stub.Check(health_pb2.HealthCheckRequest(service="nobody"))
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
        with pytest.raises(grpc.aio.AioRpcError) as turned_away:
            await decode(channel, text_request(max_tokens=1))
        assert turned_away.value.code() is grpc.StatusCode.UNAVAILABLE

    with_channel(test, service)
    assert not service.seen


def test_reflection_describes_jetstreams_field_numbers() -> None:
    def ask(target: str) -> dict[str, int]:
        with grpc.insecure_channel(target) as channel:
            pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))  # type: ignore[arg-type]
            message = pool.FindMessageTypeByName("jetstream_proto.DecodeRequest")
            return {field.name: field.number for field in message.fields}

    async def run() -> dict[str, int]:
        server = create_grpc_server(ScriptedService())
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        found = await asyncio.to_thread(ask, f"127.0.0.1:{port}")
        await server.stop(grace=0)
        return found

    assert asyncio.run(run()) == {
        "max_tokens": 4,
        "text_content": 5,
        "token_content": 6,
        "metadata": 7,
        "num_samples": 8,
        "lora_adapter_id": 9,
        "has_bos": 10,
    }


def test_with_a_key_only_those_who_have_it_come_in() -> None:
    async def test(channel: grpc.aio.Channel) -> None:
        stub = OrchestratorStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await decode(channel, text_request(max_tokens=1))
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        call = stub.Decode(text_request(max_tokens=1), metadata=(("authorization", "Bearer sesame"),))
        assert len([response async for response in call]) == 1

    service = with_channel(test, settings=FrontSettings(api_key="sesame"))
    assert len(service.seen) == 1


def test_a_call_joins_the_trace_of_who_asked_and_is_told_its_span() -> None:
    said = f"00-{'a' * 32}-{'b' * 16}-01"

    async def test(channel: grpc.aio.Channel) -> None:
        for metadata in ((("traceparent", said),), (("traceparent", "nonsense"),), ()):
            call = OrchestratorStub(channel).Decode(text_request(max_tokens=1, num_samples=2), metadata=metadata)
            assert [response async for response in call]
            told.append(dict(await call.initial_metadata()).get("traceresponse"))

    told = list[Any]()
    service = with_channel(test, settings=FrontSettings(tracing=True))
    assert [request.traceparent for request in service.seen] == [said, said, "", "", "", ""]
    assert told == [f"00-{'a' * 32}-{span_id_of(service.seen[0].request_id)}-01", None, None]
    told.clear()
    assert {request.traceparent for request in with_channel(test).seen} == {""}, "who traces nothing keeps no context"


def test_a_call_says_its_objectives_by_its_metadata() -> None:
    async def test(channel: grpc.aio.Channel) -> None:
        stub = OrchestratorStub(channel)
        said = (("ttft_s", "0.5"), ("tpot_s", "0.05"))
        assert [response async for response in stub.Decode(text_request(max_tokens=1), metadata=said)]
        for wrong in ("soon", "0", "nan", "-1"):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await stub.Decode(text_request(max_tokens=1), metadata=(("tpot_s", wrong),)).read()
            assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert str(raised.value.details()).startswith("tpot_s is ")

    (request,) = with_channel(test).seen
    assert (request.ttft_s, request.tpot_s) == (0.5, 0.05)


def test_silent_connections_are_closed_and_those_over_the_limit_are_refused() -> None:
    async def test() -> None:
        service, settings = ScriptedService(), FrontSettings(client_timeout_s=0.3, max_connections=20)
        server = create_grpc_server(service, settings)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(40)]
        for reader, _ in silent:
            await asyncio.wait_for(reader.read(), timeout=60)  # what HTTP/2 greets with, and then the end
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            assert texts(await decode(channel, text_request(max_tokens=3)))
        await server.stop(grace=0)

    asyncio.run(test())


def test_a_client_that_stops_reading_is_dropped_with_its_request() -> None:
    service = ScriptedService(lambda request: tokens(request, [65] * 20_000), max_model_len=1_000_000)
    narrow = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]  # what the client takes unread

    async def test() -> None:
        server = create_grpc_server(service, FrontSettings(client_timeout_s=0.5))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", narrow) as channel:
            call: Any = OrchestratorStub(channel).Decode(text_request(max_tokens=20_000))
            await call.read()
            while service.running:
                await asyncio.sleep(0.05)
            with pytest.raises(grpc.aio.AioRpcError):
                while await call.read():
                    continue
        await server.stop(grace=0)

    asyncio.run(asyncio.wait_for(test(), timeout=60))
