"""A file of prompts that can be interrupted and taken up again: read, run, and answered line by line."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from starlette.types import ASGIApp

from jdisagg.core.errors import OutputError, RequestError
from jdisagg.core.request import LARGEST, NUMBERS, ParameterRoute, SamplingParams
from jdisagg.serve.driver.service import Draining, Service
from jdisagg.serve.frontends.offline import AT_ONCE, AnswerFile, BatchCall, Prompt, complete, row_of


@dataclass(frozen=True, slots=True)
class Job:
    """One line of the input: its number, its prompt and the settings it overrides."""

    line: int
    prompt: Prompt
    overrides: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Batch:
    """A file of prompts, and that of their answers."""

    jobs: Sequence[Job] | Sequence[BatchCall]
    answers: AnswerFile

    @property
    def left(self) -> list[Job | BatchCall]:
        """Those without an answer yet."""
        return [job for job in self.jobs if job.line not in self.answers.done]

    async def run(
        self, service: Service, app: ASGIApp, sampling: SamplingParams, on_progress: Callable[[], object]
    ) -> int:
        """Runs those: requests by the routes of `app`, bare prompts by `sampling`. Returns how many failed."""

        async def one(job: Job | BatchCall) -> dict[str, Any] | None:
            return await (row_of(app, job) if isinstance(job, BatchCall) else _row(service, job, sampling))

        return await run_each(self.left, one, self.answers.write, on_progress)


AnyJob = TypeVar("AnyJob")
OVERRIDES = frozenset(  # numbers of the table of sampling parameters: a line has one answer
    name for name, spec in NUMBERS.items() if spec.is_default_marked and spec.route is not ParameterRoute.PYTHON
)


def read_jobs(path: Path) -> list[Job]:
    """Lines of JSON with "prompt" (text or token ids) and sampling fields; RequestError names the first bad line.

    Only a line feed ends a line: JSON's texts may hold every other character that some call the end of one.
    """
    jobs = []
    with path.open("rb") as file:
        for number, text in enumerate(file):
            if text.strip():
                jobs.append(_job(number, text, f"{path}, line {number + 1}"))
    return jobs


def _job(number: int, text: bytes, place: str) -> Job:
    try:
        row = json.loads(text.decode("utf-8-sig" if number == 0 else "utf-8"))
        prompt = row["prompt"]
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise RequestError(f"{place}: not an object with a prompt ({error})") from error
    job = Job(number, prompt, {key: row[key] for key in OVERRIDES & row.keys()})
    wrong = _not_of_its_kind(job)
    if wrong:
        raise RequestError(f"{place}: {wrong}")
    return job


def _not_of_its_kind(job: Job) -> str:
    """Returns which value of a line is of the wrong type; "" if none is. Ranges are checked with the request."""
    tokens = job.prompt if isinstance(job.prompt, list) else []
    if not (isinstance(job.prompt, str | list) and all(type(token) is int for token in tokens)):
        return "prompt is neither a text nor a list of token ids"
    try:
        SamplingParams(**job.overrides)
    except RequestError as error:
        return str(error)
    for name, value in job.overrides.items():
        spec = NUMBERS[name]
        if type(value) is int and abs(value) > LARGEST >= spec.high:
            return f"{name} is {value}, must lie in [{spec.low}, {spec.high}]"
    return ""


async def run_jobs(
    service: Service,
    jobs: Sequence[Job],
    sampling: SamplingParams,
    write: Callable[[dict[str, Any]], object],
    on_progress: Callable[[], object],
) -> int:
    """Runs the jobs, giving `write` each answer as soon as it is whole; `on_progress` is called at each job's end.

    Returns how many failed for no fault of theirs: they get no line, so that the next run takes them up again.
    Raises OutputError, the others cancelled, where `write` does.
    """
    return await run_each(jobs, lambda job: _row(service, job, sampling), write, on_progress)


async def run_each(
    jobs: Sequence[AnyJob],
    row_of: Callable[[AnyJob], Awaitable[dict[str, Any] | None]],
    write: Callable[[dict[str, Any]], object],
    on_progress: Callable[[], object],
) -> int:
    """As `run_jobs`, of jobs whose rows `row_of` makes: None where trying again may help."""
    room, failed = asyncio.Semaphore(AT_ONCE), 0

    async def one(job: AnyJob) -> None:
        nonlocal failed
        async with room:
            row = await row_of(job)
        if row is None:
            failed += 1
        else:
            write(row)
        on_progress()

    try:
        async with asyncio.TaskGroup() as group:
            for job in jobs:
                group.create_task(one(job))
    except ExceptionGroup as errors:
        lost = errors.subgroup(OutputError)
        raise (errors if lost is None else lost.exceptions[0]) from None
    return failed


async def _row(service: Service, job: Job, sampling: SamplingParams) -> dict[str, Any] | None:
    """What the output says of a job: its answer, or why it can have none; None where trying again may help."""
    try:
        answer = await complete(service, job.prompt, replace(sampling, **job.overrides))
    except RequestError as error:
        return {"line": job.line, "error": str(error)}
    except Draining:
        return None
    if answer.finish_reason == "abort":
        return None
    usage = {"prompt_tokens": answer.num_prompt_tokens, "completion_tokens": len(answer.token_ids)}
    return {"line": job.line, "text": answer.text, "finish_reason": answer.finish_reason, "usage": usage}
