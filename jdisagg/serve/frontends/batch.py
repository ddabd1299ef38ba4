"""A file of prompts or requests that can be interrupted and continued: read, run and answered line by line."""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import stat
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from starlette.types import ASGIApp, Message

from jdisagg.core.errors import OutputError, RequestError
from jdisagg.core.request import LARGEST, NUMBERS, ParameterRoute, SamplingParams
from jdisagg.serve.driver.service import Draining, Service
from jdisagg.serve.frontends.http.schema import brief
from jdisagg.serve.frontends.offline import AT_ONCE, Prompt, complete

log = logging.getLogger("jdisagg.http")

# A line of a batch may name any route of the HTTP app, which is called without a socket.

AHEAD = 64  # messages that the app may be ahead of who reads them
Header = tuple[bytes, bytes]


@dataclass(frozen=True, slots=True)
class HttpReply:
    status: int
    headers: dict[str, str]
    body: bytes


async def messages(
    app: ASGIApp, path: str, body: bytes, headers: Iterable[Header] = (), client: str = "inside"
) -> AsyncGenerator[Message]:
    """Yields the messages that the app sends for a POST; closing the generator is its client leaving."""
    sent, room, gone = asyncio.Queue[Message | None](), asyncio.Semaphore(AHEAD), asyncio.Event()
    unread = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if unread:
            return unread.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        await room.acquire()
        sent.put_nowait(message)

    async def run() -> None:
        try:
            await app(_scope(path, body, headers, client), receive, send)
        except Exception:  # after its 500 was sent, as a server logs it
            log.exception("POST %s", path)
        finally:
            sent.put_nowait(None)

    work = asyncio.create_task(run())
    try:
        while (message := await sent.get()) is not None:
            yield message
            room.release()
    finally:
        gone.set()
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


def _scope(path: str, body: bytes, headers: Iterable[Header], client: str) -> Message:
    given = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *headers]
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": given,
        "client": (client, 0),
        "server": ("inside", 0),
    }


async def answered(app: ASGIApp, path: str, body: bytes, headers: Iterable[Header] = ()) -> HttpReply:
    """Returns the whole answer to a POST."""
    status, told, parts = 500, dict[str, str](), list[bytes]()
    async with aclosing(messages(app, path, body, headers)) as sent:
        async for message in sent:
            if message["type"] == "http.response.start":
                status = message["status"]
                told = {name.decode(): value.decode() for name, value in message.get("headers", ())}
            else:
                parts.append(message.get("body", b""))
    return HttpReply(status, told, b"".join(parts))


# The file of answers: one line of JSON each, written whole or not at all, and no line of another command.


@dataclass(frozen=True, slots=True)
class Rows:
    """The form of the lines of answers: how each begins, and which line of the prompts one answers, if any."""

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
        """Returns the line of the prompts that `text` answers; None if it is no whole answer."""
        try:
            return self._rows.line_of(json.loads(text)) if text.endswith(b"\n") else None
        except (ValueError, RecursionError):
            return None

    def _was_cut_off(self, text: bytes) -> bool:
        """Returns True for the beginning of an answer whose end was never written."""
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
    """One line of the file: a body and the route that it is posted to."""

    line: int
    custom_id: str
    url: str
    body: bytes


def holds_calls(path: Path) -> bool:
    """Returns True if the first line that is not blank has a custom_id."""
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
    """Returns the form of the lines of their answers."""
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


async def _answer(app: ASGIApp, call: BatchCall) -> HttpReply:
    """Posts a call; waits and tries again while the queue is full."""
    while (answer := await answered(app, call.url, call.body)).status == FULL:
        await asyncio.sleep(float(answer.headers.get("retry-after", "1")))
    return answer


# Files of prompts, and the runs of both kinds of file.


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
        """Returns the jobs without an answer yet."""
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
    """Runs jobs as `run_jobs` does; `row_of` makes their rows, None if trying again may help."""
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
    """Returns the row of a job: its answer or its error; None if trying again may help."""
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
