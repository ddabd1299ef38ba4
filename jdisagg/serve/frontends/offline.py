"""Completions without a server: prompts or messages in, whole answers or pieces of them out."""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import json
import math
import os
import stat
import uuid
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from starlette.types import ASGIApp

from jdisagg.core.errors import OutputError, RequestError
from jdisagg.core.ledger import Ledger
from jdisagg.core.request import Request, RequestId, Sampled, SamplingParams
from jdisagg.serve.driver.local_service import Batch, merged, pieces
from jdisagg.serve.driver.service import Rejected, Service
from jdisagg.serve.frontends.best_of import answers_drawn, likeliest, likelihood
from jdisagg.serve.frontends.front_settings import FrontSettings
from jdisagg.serve.frontends.http.chat import chat_ids
from jdisagg.serve.frontends.http.embeddings import PoolingFields, pooling_job, vector
from jdisagg.serve.frontends.http.jobs import chat_job, grammar_for
from jdisagg.serve.frontends.http.rendering import HttpResponse, answered
from jdisagg.serve.frontends.http.schema import ChatBody, ChatFields, brief, valid
from jdisagg.serve.frontends.sampling import choice_seed, resolved, text_options
from jdisagg.serve.frontends.structured import form_of
from jdisagg.serve.frontends.text import Piece, TextOptions
from jdisagg.serve.frontends.tools.parser import Call
from jdisagg.serve.frontends.tools.told import told

Prompt = str | Sequence[int]  # text, or token ids
Messages = Sequence[Mapping[str, Any]]
AT_ONCE = 64  # prompts of one call that are asked for together
PLAIN, NO_OPTIONS = FrontSettings(), dict[str, Any]()
CHAT_OPTIONS = frozenset(
    {"tools", "tool_choice", "parallel_tool_calls", "response_format", "reasoning_effort", "chat_template_kwargs"}
    | {"add_generation_prompt", "continue_final_message"}
)
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer. `finish_reason` is "stop", "length" or "abort"; `stop_reason` a stop string or token you named."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stop_reason: str | int | None
    logprobs: tuple[Sampled, ...] | None  # of each token, where they were asked for
    ledger: Ledger | None
    reasoning: str = ""  # in chat, where the model marks it
    calls: tuple[Call, ...] = ()  # of tools, in chat


@dataclass(frozen=True, slots=True)
class Completion:
    """All answers to one prompt; `text` and its kin are the first one's."""

    choices: tuple[Choice, ...]
    num_prompt_tokens: int
    prompt_logprobs: tuple[Sampled, ...] | None = None  # of each prompt token but the first, where asked for

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> str:
        return self.choices[0].finish_reason

    @property
    def logprobs(self) -> tuple[Sampled, ...] | None:
        return self.choices[0].logprobs

    @property
    def ledger(self) -> Ledger | None:
        return self.choices[0].ledger

    @property
    def cached_tokens(self) -> int:
        """Of the prompt, those whose KV was there already."""
        return 0 if self.ledger is None else self.ledger.cached_tokens


@dataclass(frozen=True, slots=True)
class Order:
    """One prompt made ready: a request a choice, and how their tokens are read."""

    requests: tuple[Request, ...]
    options: TextOptions


def order_of(service: Service, prompt: Prompt, sampling: SamplingParams, grammar: str = "") -> Order:
    """Raises RequestError for what cannot be. It waits for its turn as long as that takes: --queue_timeout_s is for
    clients who may have left."""
    tokenizer = service.tokenizer
    tokens = tuple(tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
    drawn = resolved(sampling, service.sampling_defaults, tokenizer.eos_ids, grammar)
    name, now_s = f"local-{next(_numbers)}", service.now_s()
    requests = tuple(
        Request(
            RequestId(f"{name}-{choice}"),
            tokens,
            replace(drawn, seed=choice_seed(drawn.seed, choice)),
            arrival_s=now_s,
            queue_deadline_s=math.inf,
        )
        for choice in range(sampling.n)
    )
    requests[0].check(service.model_config.vocab_size, service.max_model_len)
    return Order(requests, text_options(sampling, drawn, tokenizer.eos_ids))


async def chat_prompt(service: Service, messages: Messages, sampling: SamplingParams) -> tuple[Prompt, SamplingParams]:
    """Messages as token ids by the model's template, as over HTTP; an answer may fill what room the model has left."""
    body = valid(ChatFields, {"messages": [dict(each) for each in messages]})
    ids = await chat_ids(body, service.tokenizer, service.max_model_len, False)
    left = max(1, service.max_model_len - len(ids))
    return ids, sampling if "max_tokens" in sampling.given() else replace(sampling, max_tokens=left)


async def _retrying(service: Service, request: Request, options: TextOptions) -> AsyncGenerator[Piece]:
    """Pieces of one answer; waits and tries again while the queue is full."""
    while True:
        try:
            async with aclosing(pieces(service, request, options)) as answer:
                async for piece in answer:
                    yield piece
            return
        except Rejected as full:
            await asyncio.sleep(full.retry_after_s)


async def stream(
    service: Service, prompt: Prompt, sampling: SamplingParams, settings: FrontSettings = PLAIN
) -> AsyncGenerator[Piece]:
    """Pieces of the answers as they come, each with its `choice`; closing the generator cancels the rest."""
    answers_drawn(sampling.n, sampling.best_of, stream=True)
    form = form_of({"structured_outputs": sampling.structured_outputs})
    order = order_of(service, prompt, sampling, await grammar_for(form, service, settings))
    async with aclosing(_batches(service, order)) as batches:
        async for batch in batches:
            for choice, piece in batch:
                piece.choice = choice
                yield piece


def _batches(service: Service, order: Order) -> AsyncGenerator[Batch]:
    return merged([partial(_retrying, service, request, order.options) for request in order.requests], AT_ONCE)


@dataclass(slots=True)
class _Answer:
    """One choice as it grows."""

    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    sampled: list[Sampled] = field(default_factory=list)
    prompt: tuple[Sampled, ...] = ()
    last: Piece | None = None

    def take(self, piece: Piece) -> None:
        self.texts.append(piece.text)
        self.thoughts.append(piece.reasoning)
        self.calls += piece.calls
        self.sampled.extend(piece.delta.sampled)
        self.prompt = self.prompt or piece.delta.prompt
        self.last = piece

    def choice(self, index: int, logprobs: bool) -> Choice:
        assert self.last is not None and self.last.finish_reason is not None
        return Choice(
            index,
            "".join(self.texts),
            tuple(each.token for each in self.sampled),
            self.last.finish_reason,
            self.last.stop_reason,
            tuple(self.sampled) if logprobs else None,
            self.last.finish.ledger if self.last.finish else None,
            "".join(self.thoughts),
            tuple(self.calls),
        )


async def complete(
    service: Service, prompt: Prompt, sampling: SamplingParams, settings: FrontSettings = PLAIN
) -> Completion:
    """All answers to one prompt, whole; of `best_of`, the likeliest."""
    number = answers_drawn(sampling.n, sampling.best_of, stream=False)
    scored = sampling.logprobs if number == sampling.n else sampling.logprobs or 0
    drawn = replace(sampling, n=number, best_of=None, logprobs=scored)
    answers = [_Answer() for _ in range(number)]
    async with aclosing(stream(service, prompt, drawn, settings)) as found:
        async for piece in found:
            answers[piece.choice].take(piece)
    if number > sampling.n:
        answers = [answers[i] for i in likeliest([likelihood(each.sampled) for each in answers], number, sampling.n)]
    length = len(service.tokenizer.encode(prompt)) if isinstance(prompt, str) else len(prompt)
    return _completion(answers, length, sampling)


def _completion(answers: Sequence[_Answer], prompt_tokens: int, sampling: SamplingParams) -> Completion:
    choices = tuple(answer.choice(index, sampling.logprobs is not None) for index, answer in enumerate(answers))
    return Completion(choices, prompt_tokens, None if sampling.prompt_logprobs is None else answers[0].prompt)


async def chat(
    service: Service,
    messages: Messages,
    sampling: SamplingParams,
    settings: FrontSettings = PLAIN,
    options: Mapping[str, Any] = NO_OPTIONS,
) -> Completion:
    """The answer to a conversation, made as HTTP's: by the model's template, read for reasoning and calls."""
    unknown = sorted(options.keys() - CHAT_OPTIONS)
    if unknown:
        raise RequestError(f"chat takes no {unknown[0]!r}, it takes {', '.join(sorted(CHAT_OPTIONS))}", unknown[0])
    if sampling.best_of not in (None, sampling.n):
        raise RequestError(f"best_of is {sampling.best_of} in a chat, which draws n: {sampling.n}", param="best_of")
    fields = {"messages": [dict(each) for each in messages], **_body_of(sampling), **options}
    job = await chat_job(valid(ChatBody, fields), service, settings, str(next(_numbers)), "local-")
    requests = tuple(_adapted(each.request, sampling) for each in job.choices)
    batches, answers = _batches(service, Order(requests, job.options)), [_Answer() for _ in requests]
    async with aclosing(batches if job.reads is None else told(batches, job.reads)) as found:
        async for batch in found:
            for choice, piece in batch:
                answers[choice].take(piece)
    return _completion(answers, job.prompt_tokens, sampling)


def _body_of(sampling: SamplingParams) -> dict[str, Any]:
    """Returns the parameters that the caller gave as the fields of a chat over HTTP."""
    given = {name: value for name, value in sampling.given().items() if name in ChatBody.model_fields}
    if "logit_bias" in given:
        given["logit_bias"] = {str(token): bias for token, bias in dict(given["logit_bias"]).items()}
    if sampling.logprobs is not None:
        given |= {"logprobs": True, "top_logprobs": sampling.logprobs}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}


def _adapted(request: Request, sampling: SamplingParams) -> Request:
    """The request with its caller's adapter; it waits for its turn as long as that takes."""
    drawn = replace(request.sampling, adapter=sampling.adapter or request.sampling.adapter)
    return replace(request, sampling=drawn, queue_deadline_s=math.inf)


async def embed(
    service: Service, prompts: Sequence[Prompt], settings: FrontSettings, pooling: str | None = None
) -> list[list[float]]:
    """A vector of length one for each prompt, as /v1/embeddings gives."""
    body = valid(PoolingFields, {"pooling": pooling})
    encoded = [[*(service.tokenizer.encode(each) if isinstance(each, str) else each)] for each in prompts]
    job = await pooling_job(body, encoded, service, settings, str(next(_numbers)), "local-")
    requests = tuple(replace(each.request, queue_deadline_s=math.inf) for each in job.choices)
    found: dict[int, tuple[int, ...]] = {}
    async with aclosing(_batches(service, Order(requests, job.options))) as batches:
        async for batch in batches:
            found |= {index: piece.delta.pooled for index, piece in batch if piece.delta.pooled}
    return [vector(found[i], choice, None, normalize=True).tolist() for i, choice in enumerate(job.choices)]


async def complete_all(
    service: Service, prompts: Sequence[Prompt], sampling: SamplingParams, settings: FrontSettings = PLAIN
) -> list[Completion]:
    """One completion a prompt, in the prompts' order, AT_ONCE at a time."""
    room = asyncio.Semaphore(AT_ONCE)

    async def one(prompt: Prompt) -> Completion:
        async with room:
            return await complete(service, prompt, sampling, settings)

    return await asyncio.gather(*map(one, prompts))


# The file of a batch's answers: a line of JSON each, whole or not at all, and never a line that is somebody
# else's.


@dataclass(frozen=True, slots=True)
class Rows:
    """What lines of answers look like: how all of them begin, and which line of the prompts one answers, if any."""

    begins: bytes
    line_of: Callable[[Any], int | None]


def _answered(row: Any) -> int | None:
    if not isinstance(row, dict) or type(row.get("line")) is not int:
        return None
    return row["line"] if isinstance(row.get("text", row.get("error")), str) else None


PLAIN_ROWS = Rows(b'{"line": ', _answered)


class AnswerFile:
    """An --output that is open for one run: what it has already, and room for more. It is locked until closed."""

    def __init__(self, path: Path, lines: Collection[int], prompts: Path, rows: Rows = PLAIN_ROWS) -> None:
        """Takes up the file where an earlier run stopped, or begins it; `lines` are those that `prompts` has.

        Raises OutputError, the file untouched, where a line of it is not an answer to one of `lines`, where it is the
        file of prompts, a link, a pipe or a device, or where another process writes it.
        """
        self.path, self._rows = path, rows
        self._refuse_what_is_no_file(prompts)
        self._is_new = not path.exists()
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise self._error(error.strerror) from error
        try:
            self._lock()
            self.done, self._end = self._taken_up(lines)
            self._cut()
        except OutputError:
            os.close(self._file)
            raise

    def _error(self, why: str | None) -> OutputError:
        return OutputError(f"--output={self.path}: {why}")

    def _refuse_what_is_no_file(self, prompts: Path) -> None:
        try:
            found = self.path.lstat()
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            raise self._error(getattr(error, "strerror", None) or str(error)) from error
        if stat.S_ISLNK(found.st_mode):
            raise self._error(f"is a link to {os.readlink(self.path)}; name the file itself")
        if not stat.S_ISREG(found.st_mode):
            raise self._error("is a folder, a pipe or a device, not a regular file")
        if prompts.exists() and self.path.samefile(prompts):
            raise self._error(f"is the file of --prompts={prompts}")

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise self._error(f"another process writes it ({error.strerror})") from error

    def _taken_up(self, lines: Collection[int]) -> tuple[set[int], int]:
        """Which lines are answered, and where the last whole answer ends."""
        done: set[int] = set()
        end = 0
        with os.fdopen(os.dup(self._file), "rb") as file:
            for number, text in enumerate(file, start=1):
                line = self._line_of(text)
                if line is not None and line in lines:
                    done.add(line)
                    end += len(text)
                elif line is not None:
                    raise self._error(f"line {number} answers line {line + 1} of other prompts: it has no such line")
                elif not self._was_cut_off(text):
                    raise self._error(f"line {number} is not an answer of this command; nothing was changed")
        return done, end

    def _line_of(self, text: bytes) -> int | None:
        """None where it is no whole answer."""
        try:
            return self._rows.line_of(json.loads(text)) if text.endswith(b"\n") else None
        except (ValueError, RecursionError):
            return None

    def _was_cut_off(self, text: bytes) -> bool:
        """Whether it is the beginning of an answer, the end of which was never written."""
        begins = self._rows.begins
        return not text.endswith(b"\n") and (text.startswith(begins) or begins.startswith(text))

    def _cut(self) -> None:
        """Drops what a crash or a full disk left of a line."""
        try:
            os.ftruncate(self._file, self._end)
            os.lseek(self._file, self._end, os.SEEK_SET)
        except OSError as error:
            raise self._error(error.strerror) from error

    def write(self, row: Mapping[str, Any]) -> None:
        """Adds one answer, its name first. Raises OutputError where there is no room for all of it: none stays."""
        text = json.dumps(row).encode() + b"\n"
        left = memoryview(text)
        try:
            while left:
                left = left[os.write(self._file, left) :]
        except OSError as error:
            self._cut()
            why = f"{error.strerror}; what it has is whole, and the next run goes on from there"
            raise self._error(why) from error
        self._end += len(text)

    def close(self) -> None:
        """A file that was begun and got no answer goes."""
        if self._is_new and not self._end:
            self.path.unlink(missing_ok=True)
        os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


# A file of requests in OpenAI's batch format: a line each in, a line each out, known again by its custom_id.

MARK = "custom_id"
TRY_LATER = frozenset({408, 500, 503})  # that the next run may have an answer where this one has none
FULL = 429


@dataclass(frozen=True, slots=True)
class BatchCall:
    """One line: what is to be posted where."""

    line: int
    custom_id: str
    url: str
    body: bytes


def holds_calls(path: Path) -> bool:
    """Whether the first line that says anything has a custom_id."""
    with path.open("rb") as file:
        first = next((text for text in file if text.strip()), b"")
    try:
        row = json.loads(first.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return False
    return isinstance(row, dict) and MARK in row


def read_calls(path: Path) -> list[BatchCall]:
    """Raises RequestError naming the first line that is no request, or the custom_id that comes twice."""
    calls, seen = list[BatchCall](), dict[str, int]()
    with path.open("rb") as file:
        for number, text in enumerate(file):
            if not text.strip():
                continue
            call = _call(number, text, f"{path}, line {number + 1}")
            first = seen.setdefault(call.custom_id, number)
            if first != number:
                said = f"{path}, line {number + 1}: custom_id {call.custom_id[:100]!r} is that of line {first + 1}"
                raise RequestError(said)
            calls.append(call)
    return calls


def _call(number: int, text: bytes, place: str) -> BatchCall:
    try:
        row = json.loads(text.decode("utf-8-sig" if number == 0 else "utf-8"))
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{place}: not JSON ({error})") from error
    fields = row if isinstance(row, dict) else {}
    for name, kind in (("custom_id", str), ("url", str), ("body", dict)):
        if not isinstance(fields.get(name), kind):
            said = f"{place}: {name} is {brief(fields.get(name))}, must be {'a text' if kind is str else 'an object'}"
            raise RequestError(said)
    if fields.get("method") != "POST":
        raise RequestError(f"{place}: method is {brief(fields.get('method'))}, must be POST")
    if fields["body"].get("stream"):
        raise RequestError(f"{place}: body.stream is {brief(fields['body']['stream'])}: a line has a whole answer")
    return BatchCall(number, fields["custom_id"], fields["url"], json.dumps(fields["body"]).encode())


def rows_of(calls: Sequence[BatchCall]) -> Rows:
    """How the lines of their answers are known."""
    lines = {call.custom_id: call.line for call in calls}

    def line_of(row: Any) -> int | None:
        known = isinstance(row, dict) and isinstance(row.get("response"), dict) and isinstance(row.get(MARK), str)
        return lines.get(row[MARK]) if known else None

    return Rows(b'{"custom_id": ', line_of)


async def row_of(app: ASGIApp, call: BatchCall) -> dict[str, Any] | None:
    """The line of its answer, or of why it can have none; None where trying again may help."""
    answer = await _answer(app, call)
    if answer.status in TRY_LATER:
        return None
    response = {
        "status_code": answer.status,
        "request_id": answer.headers.get("x-request-id"),
        "body": json.loads(answer.body),
    }
    return {MARK: call.custom_id, "id": f"batch_req_{uuid.uuid4().hex}", "response": response, "error": None}


async def _answer(app: ASGIApp, call: BatchCall) -> HttpResponse:
    """Waits and tries again while the queue is full."""
    while (answer := await answered(app, call.url, call.body)).status == FULL:
        await asyncio.sleep(float(answer.headers.get("retry-after", "1")))
    return answer
