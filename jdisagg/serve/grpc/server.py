"""The gRPC front: JetStream's Orchestrator, HTTP's routes as methods, the standard health service, and reflection."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import NoReturn

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from starlette.types import ASGIApp

from jdisagg.core.errors import JdisaggError, RequestError
from jdisagg.core.request import Request, RequestId, SamplingParams
from jdisagg.core.traceparent import parse_traceparent, span_id_of
from jdisagg.serve import offload
from jdisagg.serve.clients import Clients
from jdisagg.serve.front_settings import FrontSettings
from jdisagg.serve.generation import answers, check_work, failure_of
from jdisagg.serve.grpc.calls import Call, metadata, write
from jdisagg.serve.grpc.codes import code_for
from jdisagg.serve.grpc.health import HealthOfService
from jdisagg.serve.grpc.inference import NAME as INFERENCE
from jdisagg.serve.grpc.inference import Inference
from jdisagg.serve.grpc.inference_pb2_grpc import add_InferenceServicer_to_server
from jdisagg.serve.grpc.jetstream_pb2 import (
    DESCRIPTOR,
    DecodeRequest,
    DecodeResponse,
    HealthCheckRequest,
    HealthCheckResponse,
)
from jdisagg.serve.grpc.jetstream_pb2_grpc import OrchestratorServicer, add_OrchestratorServicer_to_server
from jdisagg.serve.http.app import create_app
from jdisagg.serve.sampling import choice_seed, fold_seed, sampling_params
from jdisagg.serve.service import Rejected, Service
from jdisagg.serve.text import TextOptions

MAX_SAMPLES = 128
NAME = DESCRIPTOR.services_by_name["Orchestrator"].full_name
Sample = DecodeResponse.StreamContent.Sample


def create_grpc_server(
    service: Service,
    settings: FrontSettings | None = None,
    clients: Clients | None = None,
    app: ASGIApp | None = None,
) -> grpc.aio.Server:
    """A server without a port yet: `add_insecure_port`, then `await start()`. `app` is that of HTTP, where it is."""
    settings = settings or FrontSettings()
    clients = clients or Clients(settings, service.now_s)
    server = grpc.aio.server(options=_options(settings))
    add_OrchestratorServicer_to_server(Orchestrator(service, settings, clients), server)
    app = create_app(service, settings, clients=clients) if app is None else app
    add_InferenceServicer_to_server(Inference(app, settings.client_timeout_s), server)
    health_pb2_grpc.add_HealthServicer_to_server(HealthOfService(service, ("", NAME, INFERENCE)), server)
    reflection.enable_server_reflection((NAME, INFERENCE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
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

    async def HealthCheck(self, request: HealthCheckRequest, context: Call) -> HealthCheckResponse:
        return HealthCheckResponse(is_live=self._service.ready)

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
        said = {
            "max_tokens": asked.max_tokens or max(1, service.max_model_len - prompt_tokens),
            "temperature": 0.0 if asked.num_samples <= 1 else 1.0,
            "seed": fold_seed(None),
            "adapter": adapter,
            "stop_token_ids": tuple(eos_ids),
        }
        return sampling_params(said, settings.sampling_defaults)

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
