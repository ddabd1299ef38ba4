"""/debug/cluster on the real router, workers and driver over toy machines: one document tells the whole cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.samples import Sample

from jdisagg.core.events import Received, Send, Submit, WorkerJoined, WorkerLost
from jdisagg.core.layout.reshard import StageShape
from jdisagg.core.ledger import Ledger, Mark
from jdisagg.core.messages import Preempted, Progress, Reserve, Reserved, StartPrefill
from jdisagg.core.request import Attempt, Request, RequestId, SamplingParams, WorkerId
from jdisagg.core.worker_config import Role, Stages
from jdisagg.serve.deploy.pools import place_of
from jdisagg.serve.observability.cluster_view import DECISIONS, REQUESTS, Counted, SharedDocument
from jdisagg.serve.observability.metric_families import Families
from jdisagg.serve.observability.metrics import Metrics
from jdisagg.serve.observability.records import MAX_CHANGES, Records
from jdisagg.serve.observability.worker_metrics import MergedRegistry
from tests.serve.live_http import eventually
from tests.serve.live_toy import KEY, PAGE_BYTES, ToyStack, watched, worker_config

PROMPT = list(range(5, 37))
ROUTER, DECODE, PREFILL = WorkerId("router"), WorkerId("decode-0"), WorkerId("prefill-0")


@pytest.fixture(scope="module")
def url(stack: ToyStack) -> Iterator[str]:
    with watched(stack) as url:
        yield url


def get(url: str, path: str = "/debug/cluster") -> Any:
    answer = httpx.get(f"{url}{path}", headers=KEY)
    assert answer.status_code == 200, answer.text
    return answer.json()


def ask(url: str, name: str = "one", **fields: Any) -> Any:
    body = {"prompt": PROMPT, "max_tokens": 6, "ignore_eos": True, **fields}
    return httpx.post(f"{url}/v1/completions", json=body, headers=KEY | {"x-request-id": name}).json()


def fresh(url: str, stack: ToyStack) -> Any:
    """A document of after this call, and of a stack at rest."""
    eventually(lambda: stack.service.running == 0)
    asked_s = stack.service.now_s()
    found: list[Any] = []
    eventually(lambda: bool(found.append(get(url)) or found[-1]["now_s"] >= asked_s))
    return found[-1]


def test_one_document_tells_workers_pages_links_requests_and_decisions(url: str, stack: ToyStack) -> None:
    answer = ask(url, "told")
    document = fresh(url, stack)
    assert (document["model"], document["state"], document["chat"]) == ("toy", "ready", True)
    prefill, decode = document["workers"]
    assert (prefill["worker"], prefill["role"], prefill["num_slots"]) == ("prefill-0", "prefill", 0)
    assert decode["stages"] == [{"layers": [0, 2], "shards": 1}]
    for worker in (prefill, decode):
        assert sum(worker["pages"].values()) == worker["num_pages"]
        assert worker["pages"]["live"] == worker["pages"]["in_flight"] == 0 < worker["pages"]["cached"]
    assert prefill["prefill_tokens"] >= len(PROMPT) and prefill["prefix_queries"] >= len(PROMPT)
    assert decode["sequences"]["running"] == 0 and decode["decode_tokens"] >= 5
    (link,) = document["links"]
    assert (link["source"], link["destination"]) == ("prefill-0", "decode-0")
    assert link["bytes"] >= PAGE_BYTES and link["parts"] >= 1 and link["wire_s"] > 0
    request = next(each for each in document["requests"] if each["request_id"].startswith(answer["id"]))
    assert (request["phase"], request["finish"], request["tokens"]) == ("finished", "length", 6)
    assert request["workers"] == {"prefill": "prefill-0", "decode": "decode-0"}
    (trace,) = get(url, "/debug/requests/told")["requests"]
    assert request["parts_ns"] == trace["ledger"]["parts_ns"]
    assert document["decisions"][0]["decision"] == "taken" and "candidates" not in document["decisions"][0]


def test_pages_fill_and_empty_while_one_watches(url: str, stack: ToyStack) -> None:
    machine = stack.machines[DECODE]
    machine.pause_s = 0.02
    try:
        with httpx.stream(
            "POST", f"{url}/v1/completions", headers=KEY,
            json={"prompt": PROMPT, "max_tokens": 200, "ignore_eos": True, "stream": True},
        ) as answer:  # fmt: skip
            lines = answer.iter_lines()  # the stream ends with it
            next(lines)
            eventually(lambda: get(url)["workers"][1]["pages"]["live"] > 0)
            running = next(each for each in get(url)["requests"] if each["phase"] == "decoding")
            assert running["finish"] is None and running["parts_ns"]["decode"] > 0
            assert get(url)["totals"]["running"] == 1
    finally:
        machine.pause_s = 0.0
    eventually(lambda: get(url)["workers"][1]["pages"]["live"] == 0)
    assert get(url)["requests"][0]["finish"] == "abort"


def test_a_document_is_bounded_however_much_is_remembered(url: str, stack: ToyStack) -> None:
    for _ in range(2):
        ask(url, "many", n=REQUESTS)
    document = fresh(url, stack)
    assert len(document["requests"]) == REQUESTS and len(document["decisions"]) == DECISIONS
    assert len(httpx.get(f"{url}/debug/cluster", headers=KEY).content) < 40_000


def test_the_cluster_is_shown_to_nobody_without_the_key(url: str) -> None:
    assert httpx.get(f"{url}/debug/cluster").status_code == 401


def test_many_watchers_share_one_document_and_nothing_is_made_while_nobody_asks():
    made: list[int] = []

    def make() -> dict[str, int]:
        made.append(1)
        return {"number": len(made)}

    async def watch() -> list[bytes]:
        shared = SharedDocument(make, shared_s=30.0)
        return await asyncio.gather(*(shared.get() for _ in range(100)))

    assert set(asyncio.run(watch())) == {b'{"number":1}'} and len(made) == 1


def test_a_document_that_is_old_is_made_again():
    made: list[int] = []

    async def watch() -> list[bytes]:
        shared = SharedDocument(lambda: {"number": len(made.append(1) or made)}, shared_s=0.0)  # type: ignore[func-returns-value]
        return [await shared.get(), await shared.get()]

    assert asyncio.run(watch()) == [b'{"number":1}', b'{"number":2}']


# ------------------------------------------------------------------ its parts by themselves


def test_samples_of_other_processes_count_and_what_is_not_asked_for_is_not_read():
    registry = CollectorRegistry()
    families = Families(registry, "m")
    families.counter("prefill_tokens", "here", "worker").of("near").inc(3)
    families.gauge("other", "not asked for").of().set_function(lambda: pytest.fail("it was read"))
    merged = MergedRegistry(registry)
    far = [Sample(f"jdisagg_prefill_tokens_{end}", {"worker": "far"}, 5.0) for end in ("total", "created")]
    merged.update("link", {"jdisagg_prefill_tokens": far})
    counted = Counted(list(merged.values({"jdisagg_prefill_tokens_total"})))
    assert [counted.worker(name)["prefill_tokens"] for name in ("near", "far", "nobody")] == [3.0, 5.0, 0.0]
    merged.forget("link")
    assert Counted(list(merged.values({"jdisagg_prefill_tokens_total"}))).worker("far")["prefill_tokens"] == 0.0


def test_layer_groups_of_one_mesh_are_one_stage_and_stages_of_a_pipeline_are_several():
    groups = [StageShape(range(0, 3), 2, 16), StageShape(range(3, 5), 2, 16), StageShape(range(5, 6), 2, 16, draft="a")]
    one = place_of(worker_config("prefill-0", Role.PREFILL, 8), groups).to_json()
    assert one["stages"] == [{"layers": [0, 5], "shards": 2}]
    config = replace(worker_config("decode-0", Role.DECODE, 8), decode=Stages(2))
    assert [each["layers"] for each in place_of(config, groups).to_json()["stages"]] == [[0, 3], [3, 5]]


def test_a_ledgers_spans_have_no_gap_and_those_of_a_request_that_runs_reach_to_now():
    ledger = Ledger()
    assert ledger.spans(5) == []
    ledger.mark(Mark.ARRIVED, 1.0)
    ledger.mark(Mark.PREFILL_STARTED, 3.0)
    assert ledger.spans(5_000_000_000) == [("queue", 10**9, 3 * 10**9), ("prefill", 3 * 10**9, 5 * 10**9)]
    ledger.mark(Mark.ENDED, 4.0)
    assert ledger.spans(9_000_000_000)[-1] == ("prefill", 3 * 10**9, 4 * 10**9)
    assert sum(ledger.parts_ns().values()) == ledger.total_ns


def test_a_request_that_runs_has_the_marks_that_messages_told_so_far():
    records, attempt = Records(), Attempt(RequestId("a"), 1)
    request = Request(attempt.request_id, (1, 2), SamplingParams(), 1.0)
    records.observe("router", Submit(request), 1.0)
    records.observe("router", Send(DECODE, Reserve(attempt, 2, SamplingParams(), 0, PREFILL, 9.0)), 2.0)
    records.observe("router", Received(DECODE, Reserved(attempt, (1,))), 3.0)
    records.observe("router", Send(PREFILL, StartPrefill(attempt, request, 0, DECODE, (1,), 9.0, 9.0)), 3.0)
    records.observe("router", Received(PREFILL, Progress(attempt, Mark.PREFILL_STARTED, 4.0, cached_tokens=1)), 4.5)
    (trace,) = records.request("a", now_s=6.0)
    assert [each["part"] for each in trace["spans"]] == ["queue", "reserve_wait", "queue", "prefill"]
    assert trace["spans"][-1] == {"part": "prefill", "start_s": 4.0, "end_s": 6.0}
    assert (trace["phase"], trace["finish"], trace["cached_tokens"]) == ("prefilling", None, 1)
    records.observe("router", Received(DECODE, Preempted(attempt, (7,), "no pages")), 7.0)
    assert [each["part"] for each in records.request("a", now_s=8.0)[0]["spans"]][-2:] == ["prefill", "queue"]


def test_another_try_after_a_lost_worker_begins_with_the_queue():
    records, attempt = Records(), Attempt(RequestId("a"), 1)
    records.observe("router", Submit(Request(attempt.request_id, (1, 2), SamplingParams(), 1.0)), 1.0)
    for at_s in (2.0, 5.0):
        records.observe("router", Send(DECODE, Reserve(attempt, 2, SamplingParams(), 0, PREFILL, 9.0)), at_s)
    marks = [each["mark"] for each in records.request("a")[0]["marks"]]
    assert marks == ["arrived", "reserve_sent", "requeued", "reserve_sent"]


def test_who_came_and_who_went_is_remembered_the_latest_of_them():
    records = Records()
    config = worker_config("decode-0", Role.DECODE, 8)
    records.observe("router", WorkerJoined(config), 1.0)
    records.observe("router", WorkerLost(DECODE), 2.0)
    assert list(records.changes) == [
        {"at_s": 1.0, "what": "joined", "worker": "decode-0"},
        {"at_s": 2.0, "what": "gone", "worker": "decode-0"},
    ]
    for _ in range(MAX_CHANGES):
        records.observe("router", WorkerLost(DECODE), 3.0)
    assert len(records.changes) == MAX_CHANGES and records.changes[0]["at_s"] == 3.0


def test_a_request_whose_worker_is_elsewhere_stops_waiting_when_its_prefill_began():
    metrics = Metrics("m")
    attempt = Attempt(RequestId("a"), 1)
    metrics.observe("router", Submit(Request(attempt.request_id, (1, 2), SamplingParams(), 1.0)), 1.0)
    names = {"jdisagg_requests_waiting", "jdisagg_requests_running"}
    waiting = {each.name: each.value for each in metrics.merged.values(names)}
    metrics.observe("router", Received(PREFILL, Progress(attempt, Mark.PREFILL_STARTED, 2.0)), 2.0)
    running = {each.name: each.value for each in metrics.merged.values(names)}
    assert waiting == {"jdisagg_requests_waiting": 1, "jdisagg_requests_running": 0}
    assert running == {"jdisagg_requests_waiting": 0, "jdisagg_requests_running": 1}
