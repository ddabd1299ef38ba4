"""A file of requests in OpenAI's batch format: a line each in, a line each out, known again by its custom_id."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp

from jdisagg.core.errors import RequestError
from jdisagg.serve.answer_file import Rows
from jdisagg.serve.http.inside import Answer, answered
from jdisagg.serve.http.json_bounds import brief

MARK = "custom_id"
TRY_LATER = frozenset({408, 500, 503})  # that the next run may have an answer where this one has none
FULL = 429


@dataclass(frozen=True, slots=True)
class Call:
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


def read_calls(path: Path) -> list[Call]:
    """Raises RequestError naming the first line that is no request, or the custom_id that comes twice."""
    calls, seen = list[Call](), dict[str, int]()
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


def _call(number: int, text: bytes, place: str) -> Call:
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
    return Call(number, fields["custom_id"], fields["url"], json.dumps(fields["body"]).encode())


def rows_of(calls: Sequence[Call]) -> Rows:
    """How the lines of their answers are known."""
    lines = {call.custom_id: call.line for call in calls}

    def line_of(row: Any) -> int | None:
        known = isinstance(row, dict) and isinstance(row.get("response"), dict) and isinstance(row.get(MARK), str)
        return lines.get(row[MARK]) if known else None

    return Rows(b'{"custom_id": ', line_of)


async def row_of(app: ASGIApp, call: Call) -> dict[str, Any] | None:
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


async def _answer(app: ASGIApp, call: Call) -> Answer:
    """Waits and tries again while the queue is full."""
    while (answer := await answered(app, call.url, call.body)).status == FULL:
        await asyncio.sleep(float(answer.headers.get("retry-after", "1")))
    return answer
