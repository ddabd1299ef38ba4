"""W3C trace context: what is valid is kept, what is not is nobody's."""

import pytest

from jdisagg.core.traceparent import TraceParent, parse_traceparent, span_id_of, trace_id_of

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize(
    ("header", "flags"),
    [
        (f"00-{TRACE}-{SPAN}-01", 1),
        (f" 00-{TRACE}-{SPAN}-00 ", 0),
        (f"00-{TRACE}-{SPAN}-ff", 1),
        (f"cc-{TRACE}-{SPAN}-01-what.comes", 1),
    ],
)
def test_what_is_valid_is_kept(header, flags):
    context = parse_traceparent(header)
    assert context is not None and context == TraceParent(TRACE, SPAN, flags) and context.sampled == bool(flags)
    assert parse_traceparent(context.header(SPAN)) == context


@pytest.mark.parametrize(
    "header",
    [
        "",
        "x" * 10_000,
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-01-more",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}-01\nx",
    ],
)
def test_what_is_not_is_nobodys(header):
    assert parse_traceparent(header) is None


def test_names_of_spans_and_traces_are_the_same_wherever_they_are_worked_out():
    assert span_id_of("a") == span_id_of("a") != span_id_of("b") and len(span_id_of("a")) == 16
    assert trace_id_of("a") != trace_id_of("b") and len(trace_id_of("a")) == 32
