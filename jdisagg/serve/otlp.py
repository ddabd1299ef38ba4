"""OpenTelemetry traces, made of each request's ledger after the fact, and sent as OTLP over HTTP (JSON).

A request is one trace however many processes and attempts it took: a span of the whole, and one for each part of its
ledger, which names the worker. Nothing is traced while requests run but who asked and how many tokens they got; sending
is a thread's business, its queue is bounded, and what does not fit or is not taken is dropped and told.
"""

from __future__ import annotations

import http.client
import logging
import queue
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jdisagg.core.events import EmitTokens, Finish, Reject, Submit
from jdisagg.core.ledger import Mark
from jdisagg.core.request import FinishReason, RequestId
from jdisagg.core.traceparent import TraceParent, parse_traceparent, span_id_of, trace_id_of
from jdisagg.serve.offload import dump

SERVER, INTERNAL = 2, 1  # kinds of spans
OK, FAILED = 1, 2  # their status
ROOM, BATCH, TIMEOUT_S, TRIES, PAUSE_S = 1024, 64, 5.0, 3, 0.5  # requests waiting, and of one message; of sending
WHOSE = {"prefill": "prefill", "transfer": "decode", "first_step": "decode", "decode": "decode"}
log = logging.getLogger("jdisagg.otlp")
Span = dict[str, Any]


@dataclass(slots=True)
class Asked:
    """A request that runs."""

    context: TraceParent
    prompt_tokens: int
    tokens: int = 0


def traceparent_of(request_id: RequestId, header: str) -> TraceParent:
    """Who asked; else a trace of our own, which all choices of one client's request share."""
    return parse_traceparent(header) or TraceParent(trace_id_of(request_id.rpartition("-")[0] or request_id), "")


def spans_of(asked: Asked, finish: Finish, model: str, shift_ns: int) -> list[Span]:
    """The whole first. `shift_ns`: what the driver's clock lacks to be the time of day."""
    ledger, spans = finish.ledger, finish.ledger.spans()
    if not spans:
        return []
    root, trace = span_id_of(finish.request_id), asked.context.trace_id
    began, ended = spans[0][1] + shift_ns, spans[-1][2] + shift_ns
    whole = _span(trace, root, asked.context.parent_id, f"{model} answer", SERVER, began, ended)
    whole["attributes"] = _attributes(
        {
            "gen_ai.system": "jdisagg",
            "gen_ai.request.model": model,
            "gen_ai.usage.input_tokens": asked.prompt_tokens,
            "gen_ai.usage.output_tokens": asked.tokens,
            "gen_ai.response.finish_reasons": finish.reason.value,
            "jdisagg.request_id": finish.request_id,
            "jdisagg.cached_tokens": ledger.cached_tokens,
            "jdisagg.prefill_worker": finish.prefill_worker or "",
            "jdisagg.decode_worker": finish.decode_worker or "",
        }
    )
    good = finish.reason in (FinishReason.STOP, FinishReason.LENGTH)
    whole["status"] = {"code": OK} if good else {"code": FAILED, "message": finish.detail or finish.reason.value}
    return [whole, *_parts(trace, root, finish, shift_ns)]


def _parts(trace: str, root: str, finish: Finish, shift_ns: int) -> list[Span]:
    found, attempt = list[Span](), 1
    workers = {"prefill": finish.prefill_worker, "decode": finish.decode_worker}
    again = {at_ns for mark, at_ns in finish.ledger.marks if mark is Mark.REQUEUED}
    last = 1 + len([mark for mark, _ in finish.ledger.marks if mark is Mark.REQUEUED])
    for number, (part, began, ended) in enumerate(finish.ledger.spans()):
        attempt += part == "queue" and began in again
        again -= {began} if part == "queue" else set()
        one = _span(trace, span_id_of(f"{finish.request_id}/{number}"), root, part, INTERNAL, began, ended, shift_ns)
        worker = workers.get(WHOSE.get(part, "")) if attempt == last else None  # of earlier ones it is not known
        one["attributes"] = _attributes({"jdisagg.attempt": attempt} | ({"jdisagg.worker": worker} if worker else {}))
        found.append(one)
    return found


def _span(
    trace: str, span: str, parent: str, name: str, kind: int, began_ns: int, ended_ns: int, shift_ns: int = 0
) -> Span:
    made = {"traceId": trace, "spanId": span, "name": name, "kind": kind}
    made |= {"startTimeUnixNano": str(began_ns + shift_ns), "endTimeUnixNano": str(ended_ns + shift_ns)}
    return made | ({"parentSpanId": parent} if parent else {})


def _attributes(values: Mapping[str, str | int]) -> list[dict[str, Any]]:
    kinds: dict[type, str] = {int: "intValue", str: "stringValue"}
    return [{"key": key, "value": {kinds.get(type(value), "stringValue"): str(value)}} for key, value in values.items()]


class Tracer:
    """`observe` is one of the driver's observers."""

    def __init__(
        self, model: str, export: Callable[[list[Span]], None], wall_s: Callable[[], float] = time.time
    ) -> None:
        self._model, self._export, self._wall_s = model, export, wall_s
        self._running: dict[RequestId, Asked] = {}

    def observe(self, actor: str, item: Any, now_s: float) -> None:
        if isinstance(item, EmitTokens):
            asked = self._running.get(item.request_id)
            if asked is not None:
                asked.tokens += len(item.delta.sampled)
        elif isinstance(item, Submit):
            request = item.request
            context = traceparent_of(request.request_id, request.traceparent)
            if context.sampled:
                self._running[request.request_id] = Asked(context, request.prompt_tokens)
        elif isinstance(item, Finish):
            asked = self._running.pop(item.request_id, None)
            if asked is not None:
                self._export(spans_of(asked, item, self._model, round((self._wall_s() - now_s) * 1e9)))
        elif isinstance(item, Reject):
            self._running.pop(item.request_id, None)


class Exporter:
    """Sends spans to `endpoint`, as http://localhost:4318, on a thread of its own."""

    def __init__(self, endpoint: str, version: str) -> None:
        self._place = f"{endpoint.rstrip('/')}/v1/traces"
        named = {"service.name": "jdisagg", "service.version": version}
        self._resource, self._scope = {"attributes": _attributes({**named})}, {"name": "jdisagg", "version": version}
        self._waiting: queue.Queue[list[Span]] = queue.Queue(ROOM)
        self.dropped = 0  # requests whose spans were not sent
        threading.Thread(target=self._run, name="otlp", daemon=True).start()

    def put(self, spans: list[Span]) -> None:
        """Never waits."""
        try:
            self._waiting.put_nowait(spans)
        except queue.Full:
            self.dropped += 1

    def _run(self) -> None:
        while True:
            batch = [self._waiting.get()]
            while len(batch) < BATCH and not self._waiting.empty():
                batch.append(self._waiting.get())
            why = self._send([span for spans in batch for span in spans])
            if why:
                self.dropped += len(batch)
                log.warning("traces of %d requests were dropped (%d so far): %s", len(batch), self.dropped, why)

    def _send(self, spans: list[Span]) -> str:
        """Why they were not taken; empty where they were."""
        scoped = {"scope": self._scope, "spans": spans}
        body = dump({"resourceSpans": [{"resource": self._resource, "scopeSpans": [scoped]}]}).encode()
        why = ""
        for attempt in range(TRIES):
            time.sleep(PAUSE_S * attempt)
            try:
                request = urllib.request.Request(self._place, body, {"Content-Type": "application/json"})
                with urllib.request.urlopen(request, timeout=TIMEOUT_S):
                    return ""
            except urllib.error.HTTPError as error:
                why = f"HTTP {error.code} of {self._place}"
                if error.code < 500 and error.code != 429:
                    break
            except (OSError, http.client.HTTPException) as error:
                why = f"{self._place}: {error}"
        return why
