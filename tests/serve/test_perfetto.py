"""A window of what is remembered, as a trace for Perfetto: of a running stack, and of a journal."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from jdisagg.commands.replay import main
from jdisagg.core.events import EngineFailed, RunStep, StepDone
from jdisagg.core.steps import StepPlan
from jdisagg.serve.frontends.http.app import create_app
from jdisagg.serve.observability.records import Records
from jdisagg.serve.observability.step_log import RanStep, StepLog
from jdisagg.serve.observability.tracing import chrome_trace
from tests.serve.live_http import eventually, serving
from tests.serve.live_toy import ToyStack
from tests.sim.cases import pair
from tests.sim.fault_injector import Faults
from tests.test_replay import record

PROMPT = list(range(5, 45))


@pytest.fixture(scope="module")
def url(stack: ToyStack) -> Iterator[str]:
    with serving(create_app(stack.service, None, stack.metrics, stack.service.debug_state)) as url:
        yield url


def ask(url: str, stack: ToyStack) -> None:
    body = {"prompt": PROMPT, "max_tokens": 8, "ignore_eos": True}
    assert httpx.post(f"{url}/v1/completions", json=body).status_code == 200
    eventually(stack.idle)


def read(trace: dict[str, Any]) -> tuple[dict[tuple[str, str], list[dict[str, Any]]], list[dict[str, Any]]]:
    """Slices by (worker, row), and arrows; each event is checked to be on a row that has a name."""
    events = trace["traceEvents"]
    workers = {each["pid"]: each["args"]["name"] for each in events if each["name"] == "process_name"}
    rows = {(each["pid"], each["tid"]): each["args"]["name"] for each in events if each["name"] == "thread_name"}
    slices: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for each in events:
        if each["ph"] == "X":
            slices.setdefault((workers[each["pid"]], rows[each["pid"], each["tid"]]), []).append(each)
    return slices, [each for each in events if each["ph"] in "sf"]


def test_a_request_is_shown_where_it_was_with_its_steps_and_its_kv(url: str, stack: ToyStack) -> None:
    ask(url, stack)
    slices, arrows = read(httpx.get(f"{url}/debug/trace?seconds=60").json())
    steps = slices["decode-0", "steps of microbatch 0"]
    assert slices["prefill-0", "steps"][0]["name"] == f"{len(PROMPT)} prompt tokens"
    assert len(steps) >= 7 and steps[0]["name"] == "1 rows"
    (kv_out,) = [row for worker, row in slices if worker == "prefill-0" and row.endswith("out")]
    assert ("decode-0", kv_out.removesuffix("out") + "in") in slices
    by_worker = {
        worker: {each["name"] for each in found} for (worker, row), found in slices.items() if "request" in row
    }
    assert "queue" in by_worker["router"] and by_worker["prefill-0"] == {"prefill"}
    assert by_worker["decode-0"] == {"transfer", "first_step", "decode"}
    starts, ends = ([each for each in arrows if each["ph"] == kind] for kind in "sf")
    assert {each["id"] for each in starts} == {each["id"] for each in ends} and starts
    assert starts[0]["pid"] != ends[0]["pid"] and starts[0]["ts"] <= ends[0]["ts"]


def test_slices_of_one_row_do_not_overlap(url: str, stack: ToyStack) -> None:
    ask(url, stack)
    slices, _ = read(httpx.get(f"{url}/debug/trace?seconds=60").json())
    for (_, row), found in slices.items():
        if row.startswith(("steps", "request")):
            assert all(one["ts"] + one["dur"] <= other["ts"] + 2 for one, other in pairwise(found))


def test_what_was_before_the_window_is_left_out(url: str, stack: ToyStack) -> None:
    ask(url, stack)
    time.sleep(1.1)
    slices, arrows = read(httpx.get(f"{url}/debug/trace?seconds=1").json())
    assert not slices and not arrows


def test_a_window_that_is_none_is_refused(url: str) -> None:
    for seconds in ("0", "x", "-1", "9" * 9):
        refused = httpx.get(f"{url}/debug/trace?seconds={seconds}")
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "seconds"


def test_a_journal_becomes_a_trace(tmp_path: Path, capsys: Any) -> None:
    record(tmp_path / "run.jsonl", pair(num_pages=12, reserve_tokens=2), Faults())
    assert main(["replay", str(tmp_path / "run.jsonl"), f"--perfetto={tmp_path / 'trace.json'}"]) == 0
    assert "same decisions" in capsys.readouterr().out
    slices, arrows = read(json.loads((tmp_path / "trace.json").read_text()))
    requests = {row for _, row in slices if row.startswith("request")}
    assert len(requests) == 10 and arrows and any(row.startswith("steps") for _, row in slices)
    assert main(["replay", str(tmp_path / "run.jsonl"), f"--perfetto={tmp_path}"]) == 2
    assert "--perfetto" in capsys.readouterr().err


# ------------------------------------------------------------------ its parts by themselves


def test_steps_that_overlap_are_shown_one_behind_the_other():
    steps = [RanStep("d", 1, 1.0, 3.0, 0, 2, 0), RanStep("d", 2, 2.0, 4.0, 5, 1, 0)]
    steps.append(RanStep("d", 3, 2.0, 5.0, 5, 0, None))
    slices, _ = read(chrome_trace([], steps, 0.0, 9.0))
    one, other = slices["d", "steps of microbatch 0"]
    assert (one["ts"], one["dur"], other["ts"], other["dur"]) == (1e6, 2e6, 3e6, 1e6)
    assert other["name"] == "5 prompt tokens, 1 rows" and slices["d", "steps"][0]["ts"] == 2e6


def test_steps_are_kept_to_a_bound_whether_they_end_or_not():
    log = StepLog(limit=3)
    for step_id in range(1, 9):
        log.began("d", StepPlan(step_id), float(step_id))
    for step_id in range(1, 9):
        log.ended("d", step_id, 10.0 + step_id)
    assert [each.step_id for each in log.since(0.0)] == [6, 7, 8] and len(log.since(17.5)) == 1


def test_a_step_that_failed_ended_and_a_part_that_failed_is_no_step():
    records = Records()
    for step_id in (1, 2):
        records.observe("d", RunStep(StepPlan(step_id)), 1.0)
    records.observe("d", EngineFailed(1, "fault"), 2.0)
    records.observe("d", EngineFailed(None, "lost", part=0), 2.0)
    records.observe("d", StepDone(2), 3.0)
    assert [(each.step_id, each.ended_s) for each in records.steps.since(0.0)] == [(1, 2.0), (2, 3.0)]
