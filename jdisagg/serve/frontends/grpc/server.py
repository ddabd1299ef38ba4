"""The gRPC front: JetStream's Orchestrator, HTTP's routes as methods, the standard health service, and reflection."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypeVar

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2_grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_reflection.v1alpha import reflection
from pydantic import BaseModel

from jdisagg.core.errors import JdisaggError, RequestError
from jdisagg.core.request import Request, RequestId, SamplingParams
from jdisagg.core.traceparent import parse_traceparent, span_id_of
from jdisagg.serve.driver.local_service import Batch, answers, check_work, failure_of
from jdisagg.serve.driver.service import Rejected, Service
from jdisagg.serve.frontends import text as offload
from jdisagg.serve.frontends.clients import Clients
from jdisagg.serve.frontends.front_settings import FrontSettings
from jdisagg.serve.frontends.grpc.inference_pb2 import DESCRIPTOR as INFERENCE_DESCRIPTOR
from jdisagg.serve.frontends.grpc.inference_pb2 import Body
from jdisagg.serve.frontends.grpc.inference_pb2_grpc import InferenceServicer, add_InferenceServicer_to_server
from jdisagg.serve.frontends.grpc.jetstream_pb2 import DESCRIPTOR, DecodeRequest, DecodeResponse
from jdisagg.serve.frontends.grpc.jetstream_pb2 import HealthCheckRequest as JetStreamHealthRequest
from jdisagg.serve.frontends.grpc.jetstream_pb2 import HealthCheckResponse as JetStreamHealthResponse
from jdisagg.serve.frontends.grpc.jetstream_pb2_grpc import OrchestratorServicer, add_OrchestratorServicer_to_server
from jdisagg.serve.frontends.http.app import detokenized, prepare_chat, prepare_completion, tokenized
from jdisagg.serve.frontends.http.connections import log_request
from jdisagg.serve.frontends.http.embeddings import EmbeddingsBody, ScoreBody, prepare_embeddings, prepare_scores
from jdisagg.serve.frontends.http.errors import BodyTooLarge, Unauthorized, describe, error_headers
from jdisagg.serve.frontends.http.front import Front, Prepare
from jdisagg.serve.frontends.http.gate import plain_id
from jdisagg.serve.frontends.http.jobs import Job
from jdisagg.serve.frontends.http.rendering import (
    Rendering,
    StreamEvent,
    Streaming,
    batches_of,
    events_of,
    failure_in,
    gather_batch,
    instance_headers,
    raise_if_failed,
)
from jdisagg.serve.frontends.http.responses import ResponsesBody, prepare_response
from jdisagg.serve.frontends.http.schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from jdisagg.serve.frontends.sampling import choice_seed, resolved
from jdisagg.serve.frontends.text import TextOptions, dump_slowly
from jdisagg.serve.observability.log_lines import SERVED

# `grpc.health.v1` of a service, asked afresh each time: serving while new requests are taken.

WATCH_EVERY_S = 0.2


class HealthOfService(health_pb2_grpc.HealthServicer):
    """Answers for the names it is given; "" is the server as a whole."""

    def __init__(self, service: Service, names: Collection[str]) -> None:
        self._service, self._names = service, names

    def _now(self, name: str) -> HealthCheckResponse.ServingStatus:
        if name not in self._names:
            return HealthCheckResponse.SERVICE_UNKNOWN
        taken = self._service.ready and not self._service.draining
        return HealthCheckResponse.SERVING if taken else HealthCheckResponse.NOT_SERVING

    async def Check(self, request: HealthCheckRequest, context: grpc.aio.ServicerContext) -> HealthCheckResponse:
        if request.service not in self._names:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service[:100]!r} here")
        return HealthCheckResponse(status=self._now(request.service))

    async def Watch(
        self, request: HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[HealthCheckResponse]:
        """The status now and after each change, until the client leaves."""
        told = None
        while True:
            now = self._now(request.service)
            if now != told:
                told = now
                yield HealthCheckResponse(status=now)
            await asyncio.sleep(WATCH_EVERY_S)


# gRPC's code of every error: that of the status which HTTP answers it with, so that both say the same of all.

CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    409: grpc.StatusCode.ABORTED,
    413: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    431: grpc.StatusCode.INVALID_ARGUMENT,
    499: grpc.StatusCode.CANCELLED,
    503: grpc.StatusCode.UNAVAILABLE,
}


def code_of(status: int) -> grpc.StatusCode:
    return CODES.get(status, grpc.StatusCode.INTERNAL)


def code_for(error: Exception) -> grpc.StatusCode:
    return code_of(describe(error)[0])


# What calls of every service here share: what came with them, and clients that do not read.

Call = grpc.aio.ServicerContext


def metadata(context: Call, name: str) -> str:
    """What the client sent under `name`; empty where it sent nothing."""
    return str(dict(context.invocation_metadata() or ()).get(name, ""))


async def write(context: Call, response: Any, timeout_s: float) -> None:
    """Ends the call where the client has not read for too long."""
    try:
        await asyncio.wait_for(context.write(response), timeout_s)
    except TimeoutError:
        await context.abort(grpc.StatusCode.CANCELLED, f"the client read nothing for {timeout_s:g} s")


# jdisagg.v1.Inference: each method makes the job that its route of HTTP makes, and shows it by the same renderer.

INFERENCE = INFERENCE_DESCRIPTOR.services_by_name["Inference"].full_name
NO_METADATA: Mapping[str, str] = {}
AnyBody = TypeVar("AnyBody", bound=BaseModel)
LookUp = Callable[[Front, AnyBody], Awaitable[dict[str, Any]]]
REFUSED_KEY = "the API key is missing or wrong"
log = logging.getLogger("jdisagg.grpc")


@dataclass(slots=True)
class CallState:
    """One call of Inference: its client, its request's id, and how it ended, in the statuses of HTTP."""

    client: str
    served: dict[str, Any]  # "request_id" and "client", as log lines show them
    status: int = 499  # until it has ended: its client left
    traceresponse: str = ""

    @property
    def request_id(self) -> str:
        return self.served["request_id"]

    @property
    def headers(self) -> dict[str, str]:
        """Returns the metadata that every answer has."""
        traced = {"traceresponse": self.traceresponse} if self.traceresponse else {}
        return {"x-request-id": self.request_id, **traced}


class Inference(InferenceServicer):
    """The routes of HTTP as methods: the same bodies, jobs, answers and errors."""

    def __init__(self, front: Front) -> None:
        self._front, self._timeout_s = front, front.settings.client_timeout_s

    async def Complete(self, request: Body, context: Call) -> None:
        await self._answer("Complete", CompletionBody, prepare_completion, request, context)

    async def Chat(self, request: Body, context: Call) -> None:
        await self._answer("Chat", ChatBody, prepare_chat, request, context)

    async def Respond(self, request: Body, context: Call) -> None:
        await self._answer("Respond", ResponsesBody, prepare_response, request, context)

    async def Embed(self, request: Body, context: Call) -> None:
        await self._answer("Embed", EmbeddingsBody, prepare_embeddings, request, context)

    async def Score(self, request: Body, context: Call) -> None:
        await self._answer("Score", ScoreBody, prepare_scores, request, context)

    async def Tokenize(self, request: Body, context: Call) -> None:
        await self._look_up("Tokenize", TokenizeBody, tokenized, request, context)

    async def Detokenize(self, request: Body, context: Call) -> None:
        await self._look_up("Detokenize", DetokenizeBody, detokenized, request, context)

    async def _answer(
        self, method: str, kind: type[AnyBody], prepare: Prepare[AnyBody], request: Body, context: Call
    ) -> None:
        async def run(state: CallState) -> None:
            front, body = self._front, await self._read(request, kind)
            if not plain_id(metadata(context, "x-request-id")):
                state.served["request_id"] = plain_id(getattr(body, "request_id", None)) or state.request_id
            job, renderer_of = await prepare(front, body, state.request_id)
            job, state.traceresponse = front.traced(job, metadata(context, "traceparent"))
            show = self._stream if job.stream else self._send_whole
            await show(job, front.renderer(job, renderer_of), state, context)

        await self._guarded(method, run, context)

    async def _look_up(
        self, method: str, kind: type[AnyBody], find: LookUp[AnyBody], request: Body, context: Call
    ) -> None:
        async def run(state: CallState) -> None:
            found = await find(self._front, await self._read(request, kind))
            await self._begin(state, context)
            await write(context, Body(json=await dump_slowly(found)), self._timeout_s)

        await self._guarded(method, run, context)

    async def _read(self, request: Body, kind: type[AnyBody]) -> AnyBody:
        raw, most = request.json.encode(), self._front.settings.max_body_bytes
        if len(raw) > most:
            raise BodyTooLarge(f"the body has {len(raw)} bytes, at most {most} are allowed")
        return await self._front.read(raw, kind)

    async def _guarded(self, method: str, run: Callable[[CallState], Awaitable[None]], context: Call) -> None:
        """Runs a call of a client with a key; ends it with the code, the message and the metadata of its error."""
        address, began_s = context.peer().rpartition(":")[0], time.monotonic()
        client = self._front.clients.recognised(metadata(context, "authorization"), address)
        name = plain_id(metadata(context, "x-request-id")) or uuid.uuid4().hex
        state = CallState(client or "", {"request_id": name, "client": client})
        SERVED.set(state.served)
        failure: Exception | None = None if client is not None else Unauthorized(REFUSED_KEY)
        try:
            if failure is None:
                await run(state)
                state.status = 200
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            failure = error
        finally:
            if failure is not None:
                state.status = describe(failure)[0]
            log_request("gRPC", f"/{INFERENCE}/{method}", state.status, time.monotonic() - began_s, state.served)
        if failure is not None:
            if not isinstance(failure, JdisaggError):
                log.error("a call failed", exc_info=failure)
            await _abort_inference(context, failure, state)

    async def _begin(self, state: CallState, context: Call, more: Mapping[str, str] = NO_METADATA) -> None:
        await context.send_initial_metadata(tuple((state.headers | dict(more)).items()))

    def _batches(self, job: Job, state: CallState) -> AsyncGenerator[Batch]:
        front = self._front
        return batches_of(job, front.service, front.settings, front.clients, state.client)

    async def _send_whole(self, job: Job, renderer: Rendering, state: CallState, context: Call) -> None:
        async with aclosing(self._batches(job, state)) as batches:
            async for batch in batches:
                await gather_batch(renderer, batch)
        await self._begin(state, context, instance_headers(renderer.finish))
        await write(context, Body(json=await dump_slowly(renderer.whole())), self._timeout_s)

    async def _stream(self, job: Job, renderer: Rendering, state: CallState, context: Call) -> None:
        """Sends a message per event. An answer that fails after the first one is ended by its events, then the call."""
        assert isinstance(renderer, Streaming), "a streamed job has a renderer of events"
        has_begun, failure = False, None
        try:
            async with aclosing(self._batches(job, state)) as batches:
                async for batch in batches:
                    if not has_begun:
                        raise_if_failed(batch)
                        await self._begin(state, context)
                        has_begun = True
                    await self._send_events(await events_of(renderer, batch), context)
                    failure = failure or failure_in(batch)
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            if not has_begun:
                raise
            failure = error
        await self._send_events(renderer.closing() if failure is None else renderer.broken(failure), context)
        if failure is not None:
            raise failure

    async def _send_events(self, events: Sequence[StreamEvent], context: Call) -> None:
        for _, data in events:
            await write(context, Body(json=data.decode()), self._timeout_s)


async def _abort_inference(context: Call, error: Exception, state: CallState) -> NoReturn:
    status, body = describe(error)
    told = {name: value for name, value in error_headers(error).items() if name == "retry-after"}
    await context.abort(code_of(status), body["error"]["message"], (*told.items(), ("x-request-id", state.request_id)))


MAX_SAMPLES = 128
ORCHESTRATOR = DESCRIPTOR.services_by_name["Orchestrator"].full_name
Sample = DecodeResponse.StreamContent.Sample


def create_grpc_server(
    service: Service,
    settings: FrontSettings | None = None,
    clients: Clients | None = None,
) -> grpc.aio.Server:
    """Returns a server without a port: `add_insecure_port`, then `await start()`. `clients` are those of HTTP."""
    settings = settings or FrontSettings()
    clients = clients or Clients(settings, service.now_s)
    server = grpc.aio.server(options=_options(settings))
    add_OrchestratorServicer_to_server(Orchestrator(service, settings, clients), server)
    add_InferenceServicer_to_server(Inference(Front(service, settings, clients)), server)
    health_pb2_grpc.add_HealthServicer_to_server(HealthOfService(service, ("", ORCHESTRATOR, INFERENCE)), server)
    reflection.enable_server_reflection((ORCHESTRATOR, INFERENCE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    return server


def _options(settings: FrontSettings) -> list[tuple[str, int]]:
    """Without reuse a port has one server, not the half of two servers' calls."""
    timeout_ms = math.ceil(1000 * settings.client_timeout_s)
    return [
        ("grpc.max_receive_message_length", settings.max_body_bytes),
        ("grpc.so_reuseport", 0),
        ("grpc.max_allowed_incoming_connections", settings.max_connections),
        ("grpc.max_concurrent_streams", settings.choices_at_once),
        ("grpc.server_handshake_timeout_ms", timeout_ms),
        ("grpc.max_connection_idle_ms", timeout_ms),
        ("grpc.keepalive_time_ms", timeout_ms),  # a client whose host is gone holds no descriptor
    ]


class Orchestrator(OrchestratorServicer):
    """`jetstream_proto.Orchestrator` over a running stack."""

    def __init__(self, service: Service, settings: FrontSettings, clients: Clients) -> None:
        self._service, self._settings, self._numbers, self._clients = service, settings, itertools.count(), clients

    async def HealthCheck(self, request: JetStreamHealthRequest, context: Call) -> JetStreamHealthResponse:
        return JetStreamHealthResponse(is_live=self._service.ready)

    async def Decode(self, request: DecodeRequest, context: Call) -> None:
        """One answer is greedy; several are drawn at temperature 1, each with its own seed."""
        client = await self._recognised(context)
        try:
            objectives = {name: _seconds(context, name) for name in ("ttft_s", "tpot_s")}
            requests = await self._traced(context, await self._requests(request, objectives))
            options, settings = self._options(requests[0].sampling), self._settings
            drawn = answers(self._service, requests, options, settings.choices_at_once, settings.queue_timeout_s)
            metered = self._clients.metered(client, len(requests[0].prompt), requests, drawn)
            async with aclosing(metered) as batches:
                async for batch in batches:
                    for index, piece in batch:
                        failure = failure_of(piece)
                        if failure is not None:
                            raise failure
                        if piece.text or piece.delta.sampled:
                            ids = [each.token for each in piece.delta.sampled]
                            response = _response(index, len(requests), piece.text, ids)
                            await write(context, response, settings.client_timeout_s)
        except JdisaggError as error:
            await _abort(context, error)

    async def _recognised(self, context: Call) -> str:
        client = self._clients.recognised(metadata(context, "authorization"), context.peer().rpartition(":")[0])
        if client is None:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the API key is missing or wrong")
        return client

    async def _traced(self, context: Call, requests: list[Request]) -> list[Request]:
        """The requests in the trace of whoever asked, who is told the first one's span, as HTTP tells it."""
        header = metadata(context, "traceparent") if self._settings.tracing else ""
        parent = parse_traceparent(header)
        if parent is None:
            return requests
        told = parent.header(span_id_of(requests[0].request_id))
        await context.send_initial_metadata((("traceresponse", told),))
        return [replace(each, traceparent=parent.header(parent.parent_id)) for each in requests]

    async def _requests(self, asked: DecodeRequest, objectives: dict[str, float | None]) -> list[Request]:
        """The samples' requests, all checked. Raises RequestError."""
        if not 0 <= asked.num_samples <= MAX_SAMPLES:
            raise RequestError(f"num_samples is {asked.num_samples}, must lie in [0, {MAX_SAMPLES}]")
        service, settings, now_s = self._service, self._settings, self._service.now_s()
        prompt = await self._prompt(asked)
        sampling = self._sampling(asked, len(prompt))
        deadline_s = None if settings.queue_timeout_s is None else now_s + settings.queue_timeout_s
        name, requests = f"grpc-{next(self._numbers)}", []
        for i in range(max(1, asked.num_samples)):
            drawn = replace(sampling, seed=choice_seed(sampling.seed, i))
            own = Request(RequestId(f"{name}-{i}"), prompt, drawn, now_s, queue_deadline_s=deadline_s)
            requests.append(replace(own, **objectives))
        requests[0].check(service.model_config.vocab_size, service.max_model_len)
        check_work(service, requests, settings.queue_timeout_s, runs_on=not sampling.stop_token_ids)
        return requests

    async def _prompt(self, asked: DecodeRequest) -> tuple[int, ...]:
        kind = asked.WhichOneof("content")
        if kind is None:
            raise RequestError("content is missing: give text_content or token_content")
        if kind == "token_content":
            return tuple(asked.token_content.token_ids)
        text, tokenizer = asked.text_content.text, self._service.tokenizer
        tokenizer.check_size([text], self._service.max_model_len)
        return tuple(await offload.tokenizing(len(text), lambda: tokenizer.encode(text, not asked.has_bos)))

    def _sampling(self, asked: DecodeRequest, prompt_tokens: int) -> SamplingParams:
        service, settings, name = self._service, self._settings, asked.lora_adapter_id
        adapter, known = settings.adapters.find(name), ", ".join(settings.adapters.found) or "none"
        if name and adapter is None:
            raise RequestError(f"lora_adapter_id is {name[:100]!r}; the adapters that are loaded: {known}")
        eos_ids = service.tokenizer.eos_ids if settings.eos_ids is None else settings.eos_ids
        sampling = SamplingParams(
            max_tokens=asked.max_tokens or max(1, service.max_model_len - prompt_tokens),
            temperature=0.0 if asked.num_samples <= 1 else 1.0,
            adapter=adapter,
        )
        return resolved(sampling, settings.sampling_defaults, eos_ids)

    def _options(self, sampling: SamplingParams) -> TextOptions:
        ends = frozenset(sampling.stop_token_ids)
        return TextOptions(stop_token_ids=ends, eos_ids=ends)


def _seconds(context: Call, name: str) -> float | None:
    """An objective of the call, by its metadata, for the interface has no field for it. Raises RequestError."""
    text = metadata(context, name)
    try:
        return float(text) if text else None
    except ValueError:
        raise RequestError(f"{name} is {text[:40]!r}, must be a number of seconds", param=name) from None


def _response(index: int, count: int, text: str, token_ids: Sequence[int]) -> DecodeResponse:
    samples = [Sample() for _ in range(count)]
    samples[index] = Sample(text=text, token_ids=token_ids)
    return DecodeResponse(stream_content=DecodeResponse.StreamContent(samples=samples))


async def _abort(context: Call, error: JdisaggError) -> NoReturn:
    after = (("retry-after", f"{error.retry_after_s:.3f}"),) if isinstance(error, Rejected) else ()
    await context.abort(code_for(error), str(error), after)
