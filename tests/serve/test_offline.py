"""A batch of prompts from a file, on toy machines: who can be answered is, and the output says who cannot."""

from __future__ import annotations

import asyncio
import io
import json
import time
from pathlib import Path

import pytest

from jdisagg.core.errors import RequestError
from jdisagg.core.request import SamplingParams, WorkerId
from jdisagg.engine.sampling import SEED_HIGH, SEED_LOW
from jdisagg.engine.sampling_metadata import SamplingRows
from jdisagg.serve import offline
from jdisagg.serve.front_settings import FrontSettings
from jdisagg.serve.http.jobs import completion_job
from jdisagg.serve.http.schema import CompletionBody
from tests.serve.live_toy import MAX_LEN, ToyStack, toy_stack
from tests.serve.scripted import ScriptedService

TEN = SamplingParams(max_tokens=10, temperature=0.0)


def run(stack: ToyStack, jobs: list[offline.Job]) -> tuple[int, dict[int, dict]]:
    out, ends = io.StringIO(), []
    failed = asyncio.run(offline.run_jobs(stack.service, jobs, TEN, out, lambda: ends.append(1)))
    assert len(ends) == len(jobs)
    rows = [json.loads(line) for line in out.getvalue().splitlines()]
    return failed, {row["line"]: row for row in rows}


def test_a_prompt_that_cannot_be_answered_is_said_so_and_the_others_go_on() -> None:
    jobs = [
        offline.Job(0, [5, 6, 7], {}),
        offline.Job(1, [5] * MAX_LEN, {}),
        offline.Job(2, [5, 6], {"temperature": -1.0}),
        offline.Job(3, [], {}),
        offline.Job(4, [8, 9], {"max_tokens": 3}),
    ]
    with toy_stack() as stack:
        failed, rows = run(stack, jobs)
    assert failed == 0
    assert [rows[line]["finish_reason"] in ("length", "stop") for line in (0, 4)] == [True, True]
    assert "over the limit" in rows[1]["error"] and "temperature" in rows[2]["error"] and "empty" in rows[3]["error"]


def test_a_failed_prompt_gets_no_line_so_that_the_next_run_takes_it_up() -> None:
    with toy_stack() as stack:
        stack.service.draining = True
        assert run(stack, [offline.Job(0, [5, 6, 7], {}), offline.Job(1, [5], {})]) == (2, {})


def test_prompts_of_a_batch_wait_for_their_step_however_long_it_takes() -> None:
    with toy_stack(queue_timeout_s=0.1) as stack:
        stack.machines[WorkerId("decode-0")].pause_s = 0.02
        start_s = time.monotonic()
        failed, rows = run(stack, [offline.Job(line, [5, 6, line], {}) for line in range(40)])
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
        offline.read_jobs(file)


@pytest.mark.parametrize("seed", [0, 7, 2**31, 2**40, 2**63 - 1, -1, -(2**63)])
def test_a_seed_is_the_same_number_in_python_and_over_http(seed: int) -> None:
    service = ScriptedService()
    body = CompletionBody(prompt=[1, 2], seed=seed, n=3)
    job = asyncio.run(completion_job(body, service, FrontSettings(), "x"))
    here = offline.request_of(service, [1, 2], SamplingParams(seed=seed)).sampling
    seeds = [choice.request.sampling.seed for choice in job.choices]
    assert seeds[0] == here.seed and len(set(seeds)) == 3
    assert [knob_seed(seed), knob_seed(seeds[0])] == [knob_seed(here.seed)] * 2, "and the device draws by all of it"


def knob_seed(seed: int) -> list[int]:
    rows = SamplingRows(1)
    rows.set(0, SamplingParams(seed=seed), 0)
    return rows.ints[0, [SEED_LOW, SEED_HIGH]].tolist()
