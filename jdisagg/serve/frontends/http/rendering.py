"""Renders answers as JSON: whole ones as dictionaries, streams as events around a skeleton made once per choice.

HTTP (`front.py`) and gRPC run jobs by `batches_of` and show them by the same renderers.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

from jdisagg.core.events import Finish
from jdisagg.core.request import Sampled
from jdisagg.serve.driver.local_service import AnswerFailed, Batch, answers, failure_of
from jdisagg.serve.driver.service import Service
from jdisagg.serve.frontends.best_of import likeliest, likelihood
from jdisagg.serve.frontends.clients import Clients
from jdisagg.serve.frontends.front_settings import FrontSettings
from jdisagg.serve.frontends.http.errors import describe
from jdisagg.serve.frontends.http.jobs import Job
from jdisagg.serve.frontends.text import (
    SLICE,
    Piece,
    TokenNames,
    chat_logprobs,
    completion_logprobs,
    dump,
    dump_slowly,
    prompt_logprobs,
)
from jdisagg.serve.frontends.tools.parser import Call
from jdisagg.serve.frontends.tools.told import told
from jdisagg.serve.observability.records import ledger_json

HOLE = "\x00hole\x00"  # where a chunk's text goes
StreamEvent = tuple[str, bytes]  # its name, where the interface names its events, and its JSON


@dataclass(slots=True)
class Answer:
    """The state of one choice: the parts of its answer so far."""

    parts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: dict[str, Any] | None = None  # of the output so far
    prompt_logprobs: list[dict[str, Any] | None] = field(default_factory=list)
    echo_logprobs: dict[str, Any] | None = None
    last: Piece | None = None
    thoughts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    num_tokens: int = 0
    offset: int = 0  # characters of text that logprobs cover, for text_offset

    @property
    def finish(self) -> Finish | None:
        return self.last.finish if self.last is not None else None


class Renderer:
    """Renders one job of completions or chat. Chunks are made in order: each continues the counts of the last."""

    stream_end = b"[DONE]"

    def __init__(self, job: Job, names: TokenNames, fingerprint: str) -> None:
        self.job, self.answers = job, [Answer() for _ in job.choices]
        self._names = names
        self._head = {
            "id": job.public_id,
            "object": _object_of(job),
            "created": job.created,
            "model": job.model,
            "system_fingerprint": fingerprint,
        }
        self._skeletons: dict[int, tuple[bytes, bytes]] = {}
        self._plain = not (job.logprobs or job.token_ids or job.usage_everywhere)

    # ------------------------------------------------------------ counts

    @property
    def finish(self) -> Finish | None:
        return self.answers[0].finish

    def usage(self) -> dict[str, Any]:
        completion = sum(answer.num_tokens for answer in self.answers)
        return {
            "prompt_tokens": self.job.prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self.job.prompt_tokens + completion,
            "prompt_tokens_details": {"cached_tokens": self._cached_tokens()},
        }

    def _cached_tokens(self) -> int:
        """Of each prompt as its first choice found it, as far as it has ended."""
        firsts = (answer for answer, each in zip(self.answers, self.job.choices, strict=True) if each.first_of_prompt)
        return sum(answer.finish.ledger.cached_tokens for answer in firsts if answer.finish is not None)

    def _noted(self, index: int, piece: Piece) -> Piece:
        """The piece, its end kept; without the drawn token where only the prompt was asked for."""
        if self.job.prompt_only:
            reason = piece.finish_reason if piece.finish_reason in (None, "abort") else "length"
            piece = replace(
                piece, text="", delta=replace(piece.delta, sampled=()), finish_reason=reason, stop_reason=None
            )
        if piece.finish_reason is not None:
            self.answers[index].last = piece
        return piece

    # ------------------------------------------------------------ streams

    async def opening(self, index: int, piece: Piece) -> list[StreamEvent]:
        """Returns the events before a choice's first chunk, which is made of `piece`; none later.

        In chat it has the role, with `echo` the prompt.
        """
        if index in self._skeletons:
            return []
        self._skeletons[index] = self._skeleton(index)
        if self.job.chat:
            delta = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
            return [_event(self._chunk_of(index, self._prompt_ids(index) | delta))]
        if not self.job.echo:
            return []
        await self._read_prompt(index, piece.delta.prompt)
        fields = {"logprobs": self.answers[index].echo_logprobs, "finish_reason": None}
        echoed = self._chunk_of(index, {"text": self.job.choices[index].prompt.text} | fields)
        return [("", (await dump_slowly(echoed)).encode())]

    def chunk(self, index: int, piece: Piece) -> list[StreamEvent]:
        """Returns the event of one piece; none if it shows nothing (half a character)."""
        piece, answer = self._noted(index, piece), self.answers[index]
        answer.num_tokens += len(piece.delta.sampled)
        if piece.finish_reason is None and self._plain and not (piece.reasoning or piece.calls):
            if not piece.text:
                return []
            head, tail = self._skeletons[index]
            return [("", head + json.dumps(piece.text).encode() + tail)]
        return self._full_chunk(index, piece)

    def _skeleton(self, index: int) -> tuple[bytes, bytes]:
        _, whole = _event(self._chunk_of(index, self._delta(index, Piece(HOLE)) | self._ending(None)))
        head, _, tail = whole.rpartition(dump(HOLE).encode())
        return head, tail

    def _full_chunk(self, index: int, piece: Piece) -> list[StreamEvent]:
        shown = piece.text or piece.calls or piece.finish_reason or (piece.reasoning and self.job.shows_reasoning)
        if not (shown or (piece.delta.sampled and not self._plain)):
            return []
        fields = self._delta(index, piece) | self._ending(piece)
        fields["logprobs"] = self._logprobs(index, piece.delta.sampled)
        if self.job.token_ids:
            fields["token_ids"] = [each.token for each in piece.delta.sampled]
        return [_event(self._chunk_of(index, fields | self._ledger(piece.finish)))]

    def _delta(self, index: int, piece: Piece) -> dict[str, Any]:
        if not self.job.chat:
            return {"text": piece.text}
        return {"delta": delta_of(self.answers[index], piece, thoughts=self.job.shows_reasoning)}

    def _chunk_of(self, index: int, fields: dict[str, Any]) -> dict[str, Any]:
        chunk = {**self._head, "choices": [{"index": index, **fields}]}
        if self.job.include_usage or self.job.usage_everywhere:
            chunk["usage"] = self.usage() if self.job.usage_everywhere else None
        return chunk

    def broken(self, error: Exception) -> list[StreamEvent]:
        """Returns the end of every choice that has begun and not ended, and the error."""
        aborted = Piece(finish_reason="abort")
        open_ones = [i for i in self._skeletons if self.answers[i].last is None]
        ends = [each for i in open_ones for each in self._full_chunk(i, aborted)]
        return [*ends, _event(describe(error)[1])]

    def closing(self) -> list[StreamEvent]:
        """Returns the counts, if the client asked for them, in a chunk without choices."""
        return [_event({**self._head, "choices": [], "usage": self.usage()})] if self.job.include_usage else []

    # ------------------------------------------------------------ whole answers

    async def gather(self, index: int, piece: Piece) -> None:
        """Keeps a piece for `whole`."""
        piece, answer = self._noted(index, piece), self.answers[index]
        if not answer.parts:
            await self._read_prompt(index, piece.delta.prompt)
        answer.parts.append(piece.text)
        answer.thoughts.append(piece.reasoning)
        answer.calls += map(call_json, piece.calls)
        answer.num_tokens += len(piece.delta.sampled)
        answer.logprobs = _joined(answer.logprobs, self._logprobs(index, piece.delta.sampled))
        if self.job.token_ids:
            answer.token_ids += [each.token for each in piece.delta.sampled]

    async def _read_prompt(self, index: int, prompt: Sequence[Sampled]) -> None:
        """What is asked for of the prompt, which may be long: a slice at a time."""
        job, answer, names = self.job, self.answers[index], self._names
        if job.prompt_logprobs:
            answer.prompt_logprobs += prompt_logprobs(names, ())
        if job.logprobs and job.echo:
            first = job.choices[index].prompt.ids[:1]
            answer.echo_logprobs, answer.offset = completion_logprobs(names, (), 0, first=first)
        for start in range(0, len(prompt), SLICE):
            part = prompt[start : start + SLICE]
            if job.prompt_logprobs:
                answer.prompt_logprobs += prompt_logprobs(names, part)[1:]
            if job.logprobs and job.echo:
                fields, answer.offset = completion_logprobs(names, part, answer.offset)
                answer.echo_logprobs = _joined(answer.echo_logprobs, fields)
            await asyncio.sleep(0)

    def whole(self) -> dict[str, Any]:
        """The response body, once every choice has ended."""
        choices = [{"index": place, **self._choice(index)} for place, index in enumerate(self.shown())]
        return {**self._head, "choices": choices, "usage": self.usage()}

    def shown(self) -> Sequence[int]:
        """Which answers, in their order."""
        return range(len(self.answers))

    def _choice(self, index: int) -> dict[str, Any]:
        answer, job = self.answers[index], self.job
        text = "".join(answer.parts)
        if job.chat:
            fields: dict[str, Any] = {"message": message_of(answer, text, thoughts=job.shows_reasoning)}
        else:
            fields = {"text": job.choices[index].prompt.text + text if job.echo else text}
        fields |= self._ending(answer.last)
        fields["logprobs"] = _joined(answer.echo_logprobs, answer.logprobs)
        if job.prompt_logprobs:
            fields["prompt_logprobs"] = answer.prompt_logprobs
        if job.token_ids:
            fields |= {"token_ids": answer.token_ids} | self._prompt_ids(index)
        return fields | self._ledger(answer.finish)

    # ------------------------------------------------------------ parts of both

    def _ending(self, piece: Piece | None) -> dict[str, Any]:
        return {
            "logprobs": None,
            "finish_reason": piece.finish_reason if piece else None,
            "stop_reason": piece.stop_reason if piece else None,
        }

    def _prompt_ids(self, index: int) -> dict[str, Any]:
        return {"prompt_token_ids": [*self.job.choices[index].prompt.ids]} if self.job.token_ids else {}

    def _ledger(self, finish: Finish | None) -> dict[str, Any]:
        if finish is None or not self.job.ledger:
            return {}
        return {"ledger": ledger_json(finish.ledger)}

    def _logprobs(self, index: int, sampled: Sequence[Sampled]) -> dict[str, Any] | None:
        if not self.job.logprobs:
            return None
        if self.job.chat:
            return chat_logprobs(self._names, sampled)
        answer = self.answers[index]
        fields, answer.offset = completion_logprobs(self._names, sampled, answer.offset)
        return fields


def _event(body: dict[str, Any]) -> StreamEvent:
    return "", dump(body).encode()


def _object_of(job: Job) -> str:
    if not job.chat:
        return "text_completion"
    return "chat.completion.chunk" if job.stream else "chat.completion"


def delta_of(answer: Answer, piece: Piece, *, thoughts: bool) -> dict[str, Any]:
    """A chat chunk's news; its calls are kept with the answer's, which number them."""
    found: dict[str, Any] = {"reasoning_content": piece.reasoning} if thoughts and piece.reasoning else {}
    if piece.calls:
        first, calls = len(answer.calls), [call_json(each) for each in piece.calls]
        answer.calls += calls
        found["tool_calls"] = [{"index": first + place, **call} for place, call in enumerate(calls)]
    return found if found and not piece.text else {"content": piece.text, **found}


def message_of(answer: Answer, text: str, *, thoughts: bool) -> dict[str, Any]:
    """A chat's whole answer."""
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if thoughts and (thought := "".join(answer.thoughts)):
        message["reasoning_content"] = thought
    if answer.calls:
        message |= {"content": text or None, "tool_calls": answer.calls}
    return message


def call_json(call: Call) -> dict[str, Any]:
    """With an id of nine characters, which is what Mistral's templates take."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": uuid.uuid4().hex[:9], "type": "function", "function": function}


def _joined(before: dict[str, Any] | None, after: dict[str, Any] | None) -> dict[str, Any] | None:
    """`before` with the logprobs of what follows it; it is `before` itself that grows."""
    if before is None or after is None:
        return before or after
    for name, values in after.items():
        if isinstance(values, list):
            before[name] += values
    return before


class BestOfRenderer(Renderer):
    """Renders whole answers with `best_of`: the `job.kept` likeliest of every `job.drawn` that follow each other."""

    def __init__(self, job: Job, names: TokenNames, fingerprint: str) -> None:
        super().__init__(job, names, fingerprint)
        self._sums = [0.0] * len(job.choices)

    async def gather(self, index: int, piece: Piece) -> None:
        self._sums[index] += likelihood(piece.delta.sampled)
        await super().gather(index, piece)

    def shown(self) -> Sequence[int]:
        return likeliest(self._sums, self.job.drawn, self.job.kept)


class Rendering(Protocol):
    """A renderer of one interface, which shows a job's answers once they are whole."""

    @property
    def finish(self) -> Finish | None:
        """The finish of the first answer, once it has ended."""
        ...

    async def gather(self, index: int, piece: Piece) -> None: ...

    def whole(self) -> dict[str, Any]: ...


@runtime_checkable
class Streaming(Rendering, Protocol):
    """A renderer that can show a job's answers as a stream of events too."""

    stream_end: bytes  # the last data of the stream over HTTP; b"": none

    async def opening(self, index: int, piece: Piece) -> list[StreamEvent]: ...

    def chunk(self, index: int, piece: Piece) -> list[StreamEvent]: ...

    def closing(self) -> list[StreamEvent]: ...

    def broken(self, error: Exception) -> list[StreamEvent]: ...


RendererOf = Callable[[Job, TokenNames, str], Rendering]


def batches_of(
    job: Job, service: Service, settings: FrontSettings, clients: Clients, client: str
) -> AsyncGenerator[Batch]:
    """Runs a job for a client, to whom it is charged. Raises RateLimited before the first batch."""
    requests = [each.request for each in job.choices]
    batches = answers(service, requests, job.options, settings.choices_at_once, settings.queue_timeout_s)
    if job.reads is not None:
        batches = told(batches, job.reads)
    return clients.metered(client, job.prompt_tokens, requests, batches)


async def gather_batch(renderer: Rendering, batch: Batch) -> None:
    """Gives a batch to a renderer of whole answers. Raises AnswerFailed for an answer that failed."""
    for index, piece in batch:
        await renderer.gather(index, piece)
    raise_if_failed(batch)


async def events_of(renderer: Streaming, batch: Batch) -> list[StreamEvent]:
    """Returns the events of a batch, openings first."""
    found: list[StreamEvent] = []
    for index, piece in batch:
        found += await renderer.opening(index, piece)
        found += renderer.chunk(index, piece)
    return found


def failure_in(batch: Batch) -> AnswerFailed | None:
    return next((failure for _, piece in batch if (failure := failure_of(piece)) is not None), None)


def raise_if_failed(batch: Batch) -> None:
    failure = failure_in(batch)
    if failure is not None:
        raise failure


def instance_headers(finish: Finish | None) -> dict[str, str]:
    """Returns the headers that name the workers of the first answer."""
    if finish is None:
        return {}
    named = {"x-prefill-instance-id": finish.prefill_worker, "x-decode-instance-id": finish.decode_worker}
    return {name: worker for name, worker in named.items() if worker is not None}
