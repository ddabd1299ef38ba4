"""Completions without a server: one prompt, or a file of them that can be interrupted and taken up again."""

from __future__ import annotations

import asyncio
import itertools
import json
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
from jdisagg.serve.service import Rejected, Service
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
    """The request of one prompt; the model's end tokens stop it unless `sampling` names its own stop tokens."""
    tokens = service.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
    if not sampling.stop_token_ids:
        sampling = replace(sampling, stop_token_ids=service.tokenizer.eos_ids)
    return Request(RequestId(f"local-{next(_numbers)}"), tuple(tokens), sampling, arrival_s=service.now_s())


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
        jobs.append(Job(number, prompt, {key: row[key] for key in _OVERRIDES if key in row}))
    return jobs


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
    service: Service, jobs: Sequence[Job], sampling: SamplingParams, out: TextIO, told: Callable[[Completion], None]
) -> None:
    """Runs the jobs, writing each answer as a line of JSON as soon as it is whole."""
    room = asyncio.Semaphore(64)

    async def one(job: Job) -> None:
        async with room:
            answer = await complete(service, job.prompt, replace(sampling, **job.overrides))
        row = {
            "line": job.line,
            "text": answer.text,
            "finish_reason": answer.finish_reason,
            "usage": {"prompt_tokens": answer.num_prompt_tokens, "completion_tokens": len(answer.token_ids)},
        }
        out.write(json.dumps(row) + "\n")
        out.flush()
        told(answer)

    async with asyncio.TaskGroup() as group:
        for job in jobs:
            group.create_task(one(job))
