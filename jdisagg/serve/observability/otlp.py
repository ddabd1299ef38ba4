"""OpenTelemetry traces, made from each request's ledger when it ends, and sent by OpenTelemetry's exporter.

A request is one trace, however many processes and attempts it took: one span for the whole, and one per part of its
ledger, with the worker. While a request runs only its caller's context and its number of tokens are recorded. A thread
sends the spans from a bounded queue; spans that do not fit or are refused are dropped, with a log line.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan as Span
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from jdisagg.core.events import EmitTokens, Finish, Reject, Submit
from jdisagg.core.ledger import Mark
from jdisagg.core.request import FinishReason, RequestId
from jdisagg.core.traceparent import TraceParent, parse_traceparent, span_id_of, trace_id_of

ROOM_SPANS, BATCH_SPANS = 8192, 512  # spans in the queue, and in one export
TIMEOUT_S, SEND_EVERY_S = 5.0, 0.5  # of one export, and between two
FLUSH_S = 2.0  # the longest wait at exit for spans that were not sent yet
WHOSE = {"prefill": "prefill", "transfer": "decode", "first_step": "decode", "decode": "decode"}


@dataclass(slots=True)
class Asked:
    """A running request: its caller's trace context and token counts."""

    context: TraceParent
    prompt_tokens: int
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Source:
    """The identity of this process in its spans: model, resource and scope."""

    model: str
    resource: Resource
    scope: InstrumentationScope

    @classmethod
    def of(cls, model: str, version: str) -> Source:
        named = {"service.name": "jdisagg", "service.version": version}
        return cls(model, Resource.create({**named}), InstrumentationScope("jdisagg", version))


def traceparent_of(request_id: RequestId, header: str) -> TraceParent:
    """Returns the caller's context, else a new trace that all choices of one client's request share."""
    return parse_traceparent(header) or TraceParent(trace_id_of(request_id.rpartition("-")[0] or request_id), "")


def spans_of(state: Asked, finish: Finish, source: Source, shift_ns: int) -> list[Span]:
    """Returns the spans of an ended request, the whole first; `shift_ns` leads to wall-clock time."""
    ledger, spans = finish.ledger, finish.ledger.spans()
    if not spans:
        return []
    root = _identity(state.context.trace_id, span_id_of(finish.request_id))
    caller = _identity(state.context.trace_id, state.context.parent_id) if state.context.parent_id else None
    good = finish.reason in (FinishReason.STOP, FinishReason.LENGTH)
    whole = Span(
        f"{source.model} answer",
        root,
        caller,
        source.resource,
        {
            "gen_ai.system": "jdisagg",
            "gen_ai.request.model": source.model,
            "gen_ai.usage.input_tokens": state.prompt_tokens,
            "gen_ai.usage.output_tokens": state.tokens,
            "gen_ai.response.finish_reasons": finish.reason.value,
            "jdisagg.request_id": finish.request_id,
            "jdisagg.cached_tokens": ledger.cached_tokens,
            "jdisagg.prefill_worker": finish.prefill_worker or "",
            "jdisagg.decode_worker": finish.decode_worker or "",
        },
        kind=SpanKind.SERVER,
        status=Status(StatusCode.OK) if good else Status(StatusCode.ERROR, finish.detail or finish.reason.value),
        start_time=spans[0][1] + shift_ns,
        end_time=spans[-1][2] + shift_ns,
        instrumentation_scope=source.scope,
    )
    return [whole, *_parts(root, finish, source, shift_ns)]


def _parts(root: SpanContext, finish: Finish, source: Source, shift_ns: int) -> list[Span]:
    found, attempt = list[Span](), 1
    workers = {"prefill": finish.prefill_worker, "decode": finish.decode_worker}
    again = {at_ns for mark, at_ns in finish.ledger.marks if mark is Mark.REQUEUED}
    last = 1 + len([mark for mark, _ in finish.ledger.marks if mark is Mark.REQUEUED])
    for number, (part, began, ended) in enumerate(finish.ledger.spans()):
        attempt += part == "queue" and began in again
        again -= {began} if part == "queue" else set()
        worker = workers.get(WHOSE.get(part, "")) if attempt == last else None  # unknown for earlier attempts
        named: Mapping[str, str | int] = {"jdisagg.attempt": attempt} | ({"jdisagg.worker": worker} if worker else {})
        context = _identity(f"{root.trace_id:032x}", span_id_of(f"{finish.request_id}/{number}"))
        one = Span(
            part,
            context,
            root,
            source.resource,
            named,
            start_time=began + shift_ns,
            end_time=ended + shift_ns,
            instrumentation_scope=source.scope,
        )
        found.append(one)
    return found


def _identity(trace_id: str, span_id: str) -> SpanContext:
    return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))


class Tracer:
    """Makes spans of requests that end; `observe` is one of the driver's observers."""

    def __init__(
        self, source: Source, export: Callable[[list[Span]], None], wall_s: Callable[[], float] = time.time
    ) -> None:
        self._source, self._export, self._wall_s = source, export, wall_s
        self._running: dict[RequestId, Asked] = {}

    def observe(self, actor: str, item: Any, now_s: float) -> None:
        if isinstance(item, EmitTokens):
            state = self._running.get(item.request_id)
            if state is not None:
                state.tokens += len(item.delta.sampled)
        elif isinstance(item, Submit):
            request = item.request
            context = traceparent_of(request.request_id, request.traceparent)
            if context.sampled:
                self._running[request.request_id] = Asked(context, request.prompt_tokens)
        elif isinstance(item, Finish):
            state = self._running.pop(item.request_id, None)
            if state is not None:
                self._export(spans_of(state, item, self._source, round((self._wall_s() - now_s) * 1e9)))
        elif isinstance(item, Reject):
            self._running.pop(item.request_id, None)


class Exporter:
    """Sends spans to an `endpoint` such as http://localhost:4318, on a thread of OpenTelemetry."""

    def __init__(self, endpoint: str) -> None:
        sender = OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces", timeout=TIMEOUT_S)
        self._waiting = BatchSpanProcessor(sender, ROOM_SPANS, 1000 * SEND_EVERY_S, BATCH_SPANS)

    def put(self, spans: list[Span]) -> None:
        for span in spans:
            self._waiting.on_end(span)

    def close(self) -> None:
        """Sends the queued spans, waiting at most FLUSH_S seconds."""
        flush = threading.Thread(target=self._waiting.force_flush, name="otlp-flush", daemon=True)
        flush.start()
        flush.join(FLUSH_S)
