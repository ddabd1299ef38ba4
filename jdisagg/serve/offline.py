"""Completions without a server: one prompt, or a file of them that can be interrupted and taken up again."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from jdisagg.core.errors import RequestError
from jdisagg.core.ledger import Ledger
from jdisagg.core.request import Request, RequestId, SamplingParams
from jdisagg.serve.generation import pieces
from jdisagg.serve.sampling import fold_seed
from jdisagg.serve.service import Draining, Rejected, Service
from jdisagg.serve.text import Piece, TextOptions

Prompt = str | Sequence[int]  # text, or token ids
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Completion:
    """One whole answer. `finish_reason` is "stop", "length" or "abort"."""

    text: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    finish_reason: str
    ledger: Ledger | None


def request_of(service: Service, prompt: Prompt, sampling: SamplingParams) -> Request:
    """The request of one prompt; the model's end tokens stop it unless `sampling` names its own stop tokens.

    It waits for its turn as long as that takes: --queue_timeout_s is for clients who may have left.
    """
    tokens = service.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
    if not sampling.stop_token_ids:
        sampling = replace(sampling, stop_token_ids=service.tokenizer.eos_ids)
    sampling = replace(sampling, seed=fold_seed(sampling.seed))
    name = RequestId(f"local-{next(_numbers)}")
    return Request(name, tuple(tokens), sampling, arrival_s=service.now_s(), queue_deadline_s=math.inf)


async def stream(
    service: Service, prompt: Prompt, sampling: SamplingParams, stop: tuple[str, ...] = ()
) -> AsyncGenerator[Piece]:
    """Pieces of one answer as they come; waits and tries again while the house is full."""
    request = request_of(service, prompt, sampling)
    options = TextOptions(
        stop=stop,
        stop_token_ids=frozenset(request.sampling.stop_token_ids),
        eos_ids=frozenset(service.tokenizer.eos_ids),
        min_tokens=sampling.min_tokens,
    )
    while True:
        try:
            async with aclosing(pieces(service, request, options)) as answer:
                async for piece in answer:
                    yield piece
            return
        except Rejected as full:
            await asyncio.sleep(full.retry_after_s)


async def complete(
    service: Service, prompt: Prompt, sampling: SamplingParams, stop: tuple[str, ...] = ()
) -> Completion:
    """One whole answer."""
    text, tokens, last = [], [], None
    async for piece in stream(service, prompt, sampling, stop):
        text.append(piece.text)
        tokens.extend(each.token for each in piece.sampled)
        last = piece
    assert last is not None and last.finish_reason is not None
    length = len(service.tokenizer.encode(prompt)) if isinstance(prompt, str) else len(prompt)
    ledger = last.finish.ledger if last.finish else None
    return Completion("".join(text), tuple(tokens), length, last.finish_reason, ledger)


async def complete_all(
    service: Service, prompts: Sequence[Prompt], sampling: SamplingParams, stop: tuple[str, ...] = (), at_once: int = 64
) -> list[Completion]:
    """One answer a prompt, in the prompts' order, `at_once` at a time."""
    room = asyncio.Semaphore(at_once)

    async def one(prompt: Prompt) -> Completion:
        async with room:
            return await complete(service, prompt, sampling, stop)

    return await asyncio.gather(*map(one, prompts))


# ---------------------------------------------------------------- a file of prompts


@dataclass(frozen=True, slots=True)
class Job:
    """One line of the input: its number, its prompt and the settings it overrides."""

    line: int
    prompt: Prompt
    overrides: dict[str, Any]


_OVERRIDES = ("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "seed")


def read_jobs(path: Path) -> list[Job]:
    """Lines of JSON with "prompt" (text or token ids) and sampling fields; RequestError names the first bad line."""
    jobs = []
    for number, text in enumerate(path.read_text().splitlines()):
        if not text.strip():
            continue
        try:
            row = json.loads(text)
            prompt = row["prompt"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise RequestError(f"{path}, line {number + 1}: not an object with a prompt ({error})") from error
        job = Job(number, prompt, {key: row[key] for key in _OVERRIDES if key in row})
        wrong = _not_of_its_kind(job)
        if wrong:
            raise RequestError(f"{path}, line {number + 1}: {wrong}")
        jobs.append(job)
    return jobs


def _not_of_its_kind(job: Job) -> str:
    """Which value of a line is of the wrong kind; empty where none is. Ranges are the request's own business."""
    tokens = job.prompt if isinstance(job.prompt, list) else []
    if not (isinstance(job.prompt, str | list) and all(type(token) is int for token in tokens)):
        return "prompt is neither a text nor a list of token ids"
    kinds = {"temperature": int | float, "top_p": int | float, "min_p": int | float}
    for key, value in job.overrides.items():
        if isinstance(value, bool) or not isinstance(value, kinds.get(key, int)):
            return f"{key} is {value!r}, which is no number of its kind"
    return ""


def done_lines(path: Path) -> set[int]:
    """Numbers of the lines that the output has whole; a line cut off by a crash is dropped from the file."""
    if not path.exists():
        return set()
    whole = []
    for text in path.read_text().splitlines():
        try:
            whole.append((json.loads(text)["line"], text))
        except (json.JSONDecodeError, KeyError, TypeError):
            continue
    partial = path.with_suffix(path.suffix + ".partial")
    partial.write_text("".join(text + "\n" for _, text in whole))
    os.replace(partial, path)
    return {line for line, _ in whole}


async def run_jobs(
    service: Service, jobs: Sequence[Job], sampling: SamplingParams, out: TextIO, told: Callable[[], object]
) -> int:
    """Runs the jobs, writing each answer as a line of JSON as soon as it is whole; `told` hears of each job's end.

    Returns how many failed for no fault of theirs: they get no line, so that the next run takes them up again.
    """
    room, failed = asyncio.Semaphore(64), 0

    async def one(job: Job) -> None:
        nonlocal failed
        async with room:
            row = await _row(service, job, sampling)
        if row is None:
            failed += 1
        else:
            out.write(json.dumps(row) + "\n")
            out.flush()
        told()

    async with asyncio.TaskGroup() as group:
        for job in jobs:
            group.create_task(one(job))
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
