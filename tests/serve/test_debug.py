"""/debug on the real router, workers and driver over toy machines: each request's way is told, with reasons."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from jdisagg.core.errors import BadTicket
from jdisagg.core.events import Received, Reject, Submit
from jdisagg.core.messages import Abort, Ask, Withdraw
from jdisagg.core.request import Attempt, Request, RequestId, SamplingParams, WorkerId
from jdisagg.serve.frontends.http.app import create_app
from jdisagg.serve.observability.records import MAX_ROWS, Records, read_transfer_stats
from tests.serve.live_http import serving
from tests.serve.live_toy import KEY, ToyStack, watched

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13]


@pytest.fixture(scope="module")
def url(stack: ToyStack) -> Iterator[str]:
    with watched(stack) as url:
        yield url


def get(url: str, path: str) -> Any:
    return httpx.get(f"{url}{path}", headers=KEY)


def ask(url: str, name: str, **fields: Any) -> Any:
    body = {"prompt": PROMPT, "max_tokens": 6, "ignore_eos": True, **fields}
    return httpx.post(f"{url}/v1/completions", json=body, headers=KEY | {"x-request-id": name}).json()


def test_a_requests_trace_has_its_phases_workers_messages_parts_and_ledger(url: str) -> None:
    answer = ask(url, "whole", ledger=True)
    (trace,) = get(url, "/debug/requests/whole").json()["requests"]
    assert trace == get(url, f"/debug/requests/{answer['id']}").json()["requests"][0]
    assert (trace["phase"], trace["tokens"], trace["prompt_tokens"], trace["left_out"]) == ("finished", 6, 9, 0)
    assert trace["finish"] == {"reason": "length", "detail": ""}
    assert trace["workers"] == {"prefill": "prefill-0", "decode": "decode-0"}
    assert trace["ledger"] == answer["choices"][0]["ledger"]
    assert [each["mark"] for each in trace["marks"]][:3] == ["arrived", "reserve_sent", "reserved"]
    messages = [each["message"] for each in trace["messages"]]
    for message in ("Reserve", "Reserved", "StartPrefill", "Progress", "Commit", "Ack", "Ended"):
        assert message in messages
    assert sum(each["tokens"] for each in trace["chunks"]) == 9
    assert {"arrived", "inserted"} <= {each["what"] for each in trace["parts"]}
    assert [each["decision"] for each in trace["decisions"]] == ["taken"]


def test_a_ledger_tells_what_of_the_transfer_was_hidden(url: str) -> None:
    ledger = ask(url, "split", ledger=True)["choices"][0]["ledger"]
    assert ledger["transfer_ns"]["exposed"] == ledger["parts_ns"]["transfer"] > 0
    assert ledger["transfer_ns"]["hidden"] >= 0


def test_decisions_say_who_was_weighed_and_why_latest_first(url: str) -> None:
    for name in ("first", "second"):
        ask(url, name)
    latest, before = get(url, "/debug/decisions?n=2").json()["decisions"]
    assert "second" in latest["request_id"] and "first" in before["request_id"]
    assert latest["taken"] == {"prefill": "prefill-0", "decode": "decode-0"} and latest["routing"] in (
        "least_loaded",
        "cache_aware",
    )
    assert latest["candidates"]["prefill"][0]["worker"] == "prefill-0"
    assert latest["reason"] == "least_loaded: prefill-0 costs work 0; decode-0 costs work 0"


def test_every_choice_of_a_request_is_a_life_of_its_own(url: str) -> None:
    ask(url, "three", n=3, temperature=1.0)
    assert len(get(url, "/debug/requests/three").json()["requests"]) == 3
    remembered = get(url, "/debug/requests").json()["requests"]
    assert remembered[0]["phase"] == "finished" and "-three-" in remembered[0]["request_id"]


def test_transfer_statistics_are_told_by_worker(url: str) -> None:
    workers = get(url, "/debug/transfer").json()["workers"]
    assert list(workers) == ["prefill-0"]
    assert "tokens or more are streamed" in workers["prefill-0"]["streaming"]
    assert workers["prefill-0"]["wires"].startswith("--transfer_compress=none: ")


def test_debug_needs_the_key_and_refuses_what_is_not_there(url: str) -> None:
    assert httpx.get(f"{url}/debug/decisions").status_code == 401
    assert get(url, "/debug/requests/nobody").status_code == 404
    for n in ("0", "-1", "x", "9" * 30):
        refused = get(url, f"/debug/decisions?n={n}")
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "n"


def test_without_records_there_is_no_debug(stack: ToyStack) -> None:
    with serving(create_app(stack.service)) as bare:
        assert httpx.get(f"{bare}/debug/decisions").status_code == 404


# ------------------------------------------------------------------ the records by themselves


def submitted(records: Records, name: str) -> None:
    records.observe("router", Submit(Request(RequestId(name), (1,), SamplingParams(), 1.0)), 1.0)


def test_only_the_last_requests_are_remembered_and_only_so_many_messages_of_each():
    records = Records(keep=2)
    for name in ("a", "b", "c"):
        submitted(records, name)
    assert [each["request_id"] for each in records.requests()] == ["c", "b"]
    for at_s in range(MAX_ROWS + 5):
        records.observe("router", Received(WorkerId("d"), Abort(Attempt(RequestId("c"), 1), "no")), float(at_s))
    (trace,) = records.request("c")
    assert len(trace["messages"]) == MAX_ROWS and trace["left_out"] == 5
    assert trace["messages"][0] == {
        "at_s": 0.0, "from": "d", "to": "router", "message": "Abort", "attempt": 1, "detail": "no", "reason": "error"
    }  # fmt: skip


def test_a_reject_is_an_end():
    records = Records()
    submitted(records, "a")
    assert records.request("a")[0]["finish"] is None
    records.observe("router", Reject(RequestId("a"), 2.0, "full"), 1.5)
    assert records.request("a")[0]["finish"] == {"reason": "rejected", "detail": "full", "retry_after_s": 2.0}


def test_a_request_of_a_front_elsewhere_has_its_trace_like_any_other():
    records, front = Records(), WorkerId("front-0")
    asked = Request(RequestId("a"), (1, 2), SamplingParams(), 1.0)
    records.observe("router", Received(front, Ask(asked)), 1.0)
    records.observe("router", Received(front, Withdraw(asked.request_id)), 2.0)
    (trace,) = records.request("a")
    assert trace["request_id"] == "a" and trace["finish"] is None and not trace["messages"]


def test_a_peers_transfer_statistics_are_cut_short_or_refused():
    assert read_transfer_stats({"p": {"streaming": "x" * 900}}) == {"p": {"streaming": "x" * 500}}
    for junk in ([1], {"p": 3}):
        with pytest.raises(BadTicket):
            read_transfer_stats(junk)
