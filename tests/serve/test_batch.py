"""A batch of prompts from a file, on toy machines: who can be answered is, and the output says who cannot."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest

from jdisagg.core.errors import OutputError, RequestError
from jdisagg.core.request import SamplingParams, WorkerId
from jdisagg.serve.frontends import batch
from tests.serve.live_http import eventually
from tests.serve.live_toy import MAX_LEN, ToyStack, toy_stack

TEN = SamplingParams(max_tokens=10, temperature=0.0)


def run(stack: ToyStack, jobs: list[batch.Job]) -> tuple[int, dict[int, dict]]:
    rows: list[dict] = []
    ends: list[int] = []
    failed = asyncio.run(batch.run_jobs(stack.service, jobs, TEN, rows.append, lambda: ends.append(1)))
    assert len(ends) == len(jobs)
    return failed, {row["line"]: row for row in rows}


def test_a_prompt_that_cannot_be_answered_is_said_so_and_the_others_go_on() -> None:
    jobs = [
        batch.Job(0, [5, 6, 7], {}),
        batch.Job(1, [5] * MAX_LEN, {}),
        batch.Job(2, [5, 6], {"temperature": -1.0}),
        batch.Job(3, [], {}),
        batch.Job(4, [8, 9], {"max_tokens": 3}),
    ]
    with toy_stack() as stack:
        failed, rows = run(stack, jobs)
    assert failed == 0
    assert [rows[line]["finish_reason"] in ("length", "stop") for line in (0, 4)] == [True, True]
    assert "over the limit" in rows[1]["error"] and "temperature" in rows[2]["error"] and "empty" in rows[3]["error"]


def test_a_failed_prompt_gets_no_line_so_that_the_next_run_takes_it_up() -> None:
    with toy_stack() as stack:
        stack.service.draining = True
        assert run(stack, [batch.Job(0, [5, 6, 7], {}), batch.Job(1, [5], {})]) == (2, {})


def test_prompts_of_a_batch_wait_for_their_turn_however_long_it_takes() -> None:
    with toy_stack(queue_timeout_s=0.1) as stack:
        stack.machines[WorkerId("decode-0")].pause_s = 0.02
        start_s = time.monotonic()
        failed, rows = run(stack, [batch.Job(line, [5, 6, line], {}) for line in range(40)])
        assert time.monotonic() - start_s > 0.2, "somebody waited longer than the limit of the queue"
    assert failed == 0 and len(rows) == 40


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"prompt": 5}', "prompt is neither"),
        ('{"prompt": ["a"]}', "prompt is neither"),
        ('{"prompt": "a", "temperature": "hot"}', "temperature is 'hot'"),
        ('{"prompt": "a", "max_tokens": 2.5}', "max_tokens is 2.5"),
        ("[1]", "not an object with a prompt"),
    ],
)
def test_a_line_of_the_wrong_kind_is_named_before_anything_runs(tmp_path: Path, line: str, says: str) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text('{"prompt": "fine", "temperature": 0}\n' + line + "\n")
    with pytest.raises(RequestError, match="line 2: .*" + says):
        batch.read_jobs(file)


def test_only_a_line_feed_ends_a_line(tmp_path: Path) -> None:
    """U+2028, U+2029, U+0085, a form feed and the like are characters of a text."""
    prompts = ["a\u2028b", "c\u2029d\u0085e", "f\x0bg\x0ch\x1ci", "last"]
    rows = [json.dumps({"prompt": prompt}, ensure_ascii=False) for prompt in prompts]
    file = tmp_path / "in.jsonl"
    file.write_bytes("\ufeff".encode() + "\r\n".join([*rows[:2], "", *rows[2:]]).encode())
    jobs = batch.read_jobs(file)
    assert [job.prompt for job in jobs[:2] + jobs[3:]] == [prompts[0], prompts[1], prompts[3]]
    assert [job.line for job in jobs] == [0, 1, 3, 4]


@pytest.mark.parametrize(
    "line", [b'{"prompt": "\xff"}', b"[" * 100_000, b'{"prompt": "a", "top_k": 2147483648}', b"null"]
)
def test_bytes_that_are_no_prompt_are_one_line(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "in.jsonl").write_bytes(line + b"\n")
    with pytest.raises(RequestError, match=r"in\.jsonl, line 1: [^\n]+$"):
        batch.read_jobs(tmp_path / "in.jsonl")


def test_a_disk_that_fills_up_ends_the_batch_in_one_error_and_the_others_stop() -> None:
    written: list[dict] = []

    def write(row: dict) -> None:
        written.append(row)
        if len(written) == 3:
            raise OutputError("--output=x: No space left on device")

    jobs = [batch.Job(line, [5, 6, line], {}) for line in range(200)]
    with toy_stack() as stack:
        with pytest.raises(OutputError, match="No space left"):
            asyncio.run(batch.run_jobs(stack.service, jobs, TEN, write, lambda: None))
        assert len(written) < 100, "those that were answered at the same moment, and nobody after"
        eventually(stack.idle)
