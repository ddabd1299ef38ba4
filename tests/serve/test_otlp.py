"""Traces of OpenTelemetry, as a collector gets them: one a request, made of its ledger after it ended."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.trace import StatusCode

from jdisagg.core.errors import ConfigError
from jdisagg.core.events import Finish, Reject, Submit
from jdisagg.core.ledger import Ledger, Mark
from jdisagg.core.request import FinishReason, Request, RequestId, SamplingParams, WorkerId
from jdisagg.core.settings import Settings
from jdisagg.core.traceparent import span_id_of
from jdisagg.serve.deploy import assemble
from jdisagg.serve.frontends.front_settings import FrontSettings
from jdisagg.serve.frontends.http.app import create_app
from jdisagg.serve.observability import otlp
from jdisagg.serve.observability.otlp import Exporter, Source, Span, Tracer
from jdisagg.serve.observability.records import Records
from tests.ports import free_port
from tests.serve.live_http import eventually, serving
from tests.serve.live_toy import toy_stack

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAID = f"00-{TRACE}-{SPAN}-01"
PROMPT = list(range(5, 45))
Heard = list[tuple[str, ExportTraceServiceRequest]]


@contextmanager
def collector(status: int = 200) -> Iterator[tuple[str, Heard]]:
    """A URL, and what was sent there: (path, body)."""
    heard: Heard = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            sent = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
            heard.append((self.path, sent))
            self.send_response(status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", heard
    finally:
        server.shutdown()
        server.server_close()


def spans_in(heard: Heard) -> list[Any]:
    """As they came, each as OTLP has it; ids in hexadecimal digits."""
    scopes = [scope for _, sent in heard for resource in sent.resource_spans for scope in resource.scope_spans]
    return [span for scope in scopes for span in scope.spans]


def attributes(span: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


def ask(url: str, headers: dict[str, str], **more: Any) -> httpx.Response:
    body = {"prompt": PROMPT, "max_tokens": 6, "ignore_eos": True, **more}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200
    return answer


@contextmanager
def traced_stack() -> Iterator[tuple[str, Heard]]:
    """A front, and what its collector heard."""
    with collector() as (endpoint, heard):
        tracer = Tracer(Source.of("toy", "1.0"), Exporter(endpoint).put)
        with (
            toy_stack(observers=[tracer.observe]) as stack,
            serving(create_app(stack.service, FrontSettings(tracing=True))) as url,
        ):
            yield url, heard


def test_a_request_joins_the_trace_of_who_asked_and_its_parts_are_its_children() -> None:
    with traced_stack() as (url, heard):
        before_ns = time.time_ns()
        answer = ask(url, {"traceparent": SAID}, ledger=True)
        eventually(lambda: bool(spans_in(heard)))
    (path, sent), spans = heard[0], spans_in(heard)
    assert path == "/v1/traces" and attributes(sent.resource_spans[0].resource)["service.name"] == "jdisagg"
    whole, *parts = spans
    assert {each.trace_id.hex() for each in spans} == {TRACE} and whole.parent_span_id.hex() == SPAN
    assert answer.headers["traceresponse"] == f"00-{TRACE}-{whole.span_id.hex()}-01"
    assert {each.parent_span_id for each in parts} == {whole.span_id}
    assert len({each.span_id for each in spans}) == len(spans)
    told = attributes(whole)
    assert (told["gen_ai.usage.input_tokens"], told["gen_ai.usage.output_tokens"]) == (len(PROMPT), 6)
    assert told["gen_ai.response.finish_reasons"] == "length" and (whole.status.code, whole.kind) == (1, 2)
    took_ns = whole.end_time_unix_nano - whole.start_time_unix_nano
    ledger = answer.json()["choices"][0]["ledger"]
    assert took_ns == ledger["total_ns"] == sum(e.end_time_unix_nano - e.start_time_unix_nano for e in parts)
    assert [each.name for each in parts if each.name != "queue"] == [
        "reserve_wait", "prefill", "transfer", "first_step", "decode"
    ]  # fmt: skip
    assert abs(whole.start_time_unix_nano - before_ns) < 60e9
    workers = {each.name: attributes(each).get("jdisagg.worker") for each in parts}
    assert (workers["queue"], workers["prefill"], workers["decode"]) == (None, "prefill-0", "decode-0")


def test_without_a_context_all_choices_of_a_request_are_one_trace_of_our_own() -> None:
    with traced_stack() as (url, heard):
        answer = ask(url, {"traceparent": "nonsense"}, n=3, temperature=1.0)
        eventually(lambda: sum(not each.parent_span_id for each in spans_in(heard)) == 3)
        assert "traceresponse" not in answer.headers
        assert len({each.trace_id for each in spans_in(heard)}) == 1


def test_who_asks_not_to_be_traced_is_not() -> None:
    with traced_stack() as (url, heard):
        ask(url, {"traceparent": f"00-{TRACE}-{SPAN}-00"})
        ask(url, {"traceparent": f"00-{'a' * 32}-{SPAN}-01"})
        eventually(lambda: bool(spans_in(heard)))
        assert {each.trace_id.hex() for each in spans_in(heard)} == {"a" * 32}


# ------------------------------------------------------------------ its parts by themselves


def finished(reason: FinishReason, marks: list[tuple[Mark, float]]) -> list[Span]:
    """Spans of a request that went through `marks`."""
    told: list[list[Span]] = []
    tracer = Tracer(Source.of("m", "1.0"), told.append, wall_s=lambda: 1000.0)
    request_id = RequestId("cmpl-x-12345678-0")
    tracer.observe("router", Submit(Request(request_id, (1, 2), SamplingParams(), 1.0, traceparent=SAID)), 1.0)
    ledger = Ledger()
    for mark, at_s in marks:
        ledger.mark(mark, at_s)
    workers = WorkerId("p"), WorkerId("d")
    tracer.observe("router", Finish(request_id, reason, ledger, *workers, detail="why"), 10.0)
    return told[0]


def test_a_request_that_was_tried_again_is_one_trace_with_its_attempts() -> None:
    marks = [
        (Mark.ARRIVED, 1.0), (Mark.RESERVE_SENT, 2.0), (Mark.RESERVED, 3.0), (Mark.PREFILL_STARTED, 4.0),
        (Mark.REQUEUED, 5.0), (Mark.RESERVE_SENT, 6.0), (Mark.RESERVED, 7.0), (Mark.PREFILL_STARTED, 8.0),
        (Mark.ENDED, 9.0),
    ]  # fmt: skip
    whole, *parts = finished(FinishReason.ERROR, marks)
    told = [(each.name, each.attributes or {}) for each in parts]
    assert [each["jdisagg.attempt"] for _, each in told] == [1] * 4 + [2] * 4
    assert [each.get("jdisagg.worker") for name, each in told if name == "prefill"] == [None, "p"]
    assert (whole.status.status_code, whole.status.description) == (StatusCode.ERROR, "why")
    assert whole.context is not None and f"{whole.context.span_id:016x}" == span_id_of("cmpl-x-12345678-0")
    assert (whole.start_time, whole.end_time) == (991 * 10**9, 999 * 10**9)


def test_a_request_that_was_refused_leaves_nothing_behind() -> None:
    told: list[list[Span]] = []
    tracer = Tracer(Source.of("m", "1.0"), told.append)
    tracer.observe("router", Submit(Request(RequestId("a"), (1,), SamplingParams())), 1.0)
    tracer.observe("router", Reject(RequestId("a"), 1.0, "full"), 1.0)
    tracer.observe("router", Finish(RequestId("a"), FinishReason.STOP, Ledger()), 2.0)
    assert not told


def some_spans() -> list[Span]:
    return finished(FinishReason.STOP, [(Mark.ARRIVED, 1.0), (Mark.RESERVE_SENT, 2.0), (Mark.ENDED, 3.0)])


def test_a_collector_that_is_not_there_costs_traces_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(otlp, "ROOM_SPANS", 16)
    monkeypatch.setattr(otlp, "BATCH_SPANS", 8)
    monkeypatch.setattr(otlp, "TIMEOUT_S", 0.5)
    monkeypatch.setattr(otlp, "FLUSH_S", 0.2)
    exporter, spans = Exporter(f"http://127.0.0.1:{free_port()}"), some_spans()
    began_s = time.monotonic()
    for _ in range(200):
        exporter.put(spans)
    exporter.close()
    assert time.monotonic() - began_s < 5.0, "nobody waits for a collector, not even at the end"
    eventually(lambda: "Queue full, dropping Span" in caplog.text and "Failed to export spans" in caplog.text)


def test_a_collector_that_refuses_is_not_asked_again_and_one_that_is_busy_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "TIMEOUT_S", 4.0)
    for status, enough in ((400, 1), (503, 2)):
        with collector(status) as (endpoint, heard):
            exporter = Exporter(endpoint)
            exporter.put(some_spans())
            eventually(lambda heard=heard, enough=enough: len(heard) >= enough)
            exporter.close()
            assert status == 503 or len(heard) == 1


def test_what_waits_at_the_end_is_still_sent() -> None:
    with collector() as (endpoint, heard):
        exporter, spans = Exporter(endpoint), some_spans()
        exporter.put(spans)
        exporter.close()
        assert len(spans_in(heard)) == len(spans)


def test_an_endpoint_that_is_none_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="--otlp_endpoint is 'localhost:4318'"):
        Settings(otlp_endpoint="localhost:4318").check()


def test_an_endpoint_without_opentelemetry_is_one_line_that_names_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "jdisagg.serve.observability.otlp", None)
    with pytest.raises(ConfigError, match=r"--otlp_endpoint=http://x needs .*pip install opentelemetry-exporter-otlp"):
        assemble.asked_observers(Records(), None, Settings(otlp_endpoint="http://x", debug_keep=0))  # type: ignore[arg-type]
