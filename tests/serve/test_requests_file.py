"""Files in OpenAI's batch format: every line has the answer that HTTP gives, a second run asks for what is left."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jdisagg.core.errors import OutputError, RequestError
from jdisagg.core.request import FinishReason, SamplingParams
from jdisagg.serve.driver.service import Rejected
from jdisagg.serve.frontends.batch import AnswerFile, Batch, holds_calls, read_calls, rows_of
from jdisagg.serve.frontends.front_settings import FrontSettings
from jdisagg.serve.frontends.http.app import create_app
from tests.serve.scripted import ScriptedService, echo, end, told

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
LINES: list[dict[str, Any]] = [
    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": CHAT},
    {"custom_id": "b", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "max_tokens": 3, "n": 2}},
    {"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "temperature": -1}},
    {"custom_id": "d", "method": "POST", "url": "/v1/nothing", "body": {}},
    {"custom_id": "e", "method": "POST", "url": "/v1/responses", "body": {"input": "hi", "max_output_tokens": 4}},
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return written(tmp_path / "in.jsonl", LINES)


@pytest.fixture
def service() -> Iterator[ScriptedService]:
    yield ScriptedService()


def written(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def run(service: ScriptedService, file: Path) -> tuple[int, dict[str, dict[str, Any]]]:
    """How many failed, and what the output holds then, by custom_id."""
    calls, output = read_calls(file), file.with_name("out.jsonl")
    with AnswerFile(output, {call.line for call in calls}, file, rows_of(calls)) as answers:
        batch, app = Batch(calls, answers), create_app(service, FrontSettings())
        failed = asyncio.run(batch.run(service, app, SamplingParams(), lambda: None))
    rows = [json.loads(line) for line in output.read_text().splitlines()] if output.exists() else []
    return failed, {row["custom_id"]: row for row in rows}


def test_every_line_has_the_answer_of_its_route_or_its_mistake(file: Path, service: ScriptedService):
    failed, rows = run(service, file)
    assert failed == 0 and sorted(rows) == ["a", "b", "c", "d", "e"]
    assert {name: row["response"]["status_code"] for name, row in rows.items()} == {
        **dict.fromkeys("abe", 200),
        "c": 400,
        "d": 404,
    }
    assert rows["a"]["response"]["body"]["object"] == "chat.completion"
    assert len(rows["b"]["response"]["body"]["choices"]) == 2
    assert "temperature" in rows["c"]["response"]["body"]["error"]["message"]
    assert rows["e"]["response"]["body"]["object"] == "response"
    assert all(rows[name]["response"]["request_id"] for name in rows)


def test_a_second_run_asks_only_for_what_is_left(file: Path, service: ScriptedService):
    def breaks(request: Any) -> Iterator[Any]:
        if len(request.prompt) > 3:  # the chats
            raise RuntimeError("gone")
        yield from echo(request)

    service.script = breaks
    failed, rows = run(service, file)
    assert failed == 2 and sorted(rows) == ["b", "c", "d"]
    service.seen.clear()
    service.script = echo
    failed, rows = run(service, file)
    assert failed == 0 and sorted(rows) == ["a", "b", "c", "d", "e"] and len(service.seen) == 2


def test_a_full_queue_is_waited_for(file: Path, service: ScriptedService):
    def full_at_first(request: Any) -> Iterator[Any]:
        if len(service.seen) <= 1:
            raise Rejected("full", 0.001)
        yield told(request, 70)
        yield end(request, FinishReason.STOP)

    service.script = full_at_first
    failed, rows = run(service, written(file, LINES[:1]))
    assert failed == 0 and rows["a"]["response"]["status_code"] == 200
    assert rows["a"]["error"] is None and len(service.seen) == 2


def test_an_output_of_other_requests_is_left_alone(file: Path, service: ScriptedService, tmp_path: Path):
    run(service, file)
    other = written(tmp_path / "in.jsonl", [{**LINES[0], "custom_id": "z"}])
    before = file.with_name("out.jsonl").read_text()
    with pytest.raises(OutputError, match="not an answer of this command"):
        run(service, other)
    assert file.with_name("out.jsonl").read_text() == before


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"custom_id": 3}, "line 1: custom_id is 3, must be a text"),
    ({"method": "GET"}, "method is 'GET', must be POST"),
    ({"url": None}, "url is None, must be a text"),
    ({"body": []}, "body is a list of 0, must be an object"),
    ({"body": {"stream": True}}, "a line has a whole answer"),
]


@pytest.mark.parametrize(("fields", "says"), WRONG, ids=[says for _, says in WRONG])
def test_a_line_that_is_no_request_is_named(tmp_path: Path, fields: dict[str, Any], says: str):
    file = written(tmp_path / "in.jsonl", [{**LINES[0], **fields}])
    assert holds_calls(file)
    with pytest.raises(RequestError, match=says):
        read_calls(file)


def test_a_name_that_comes_twice_is_named_with_both_lines(tmp_path: Path):
    file = written(tmp_path / "in.jsonl", [LINES[0], LINES[1], LINES[0]])
    with pytest.raises(RequestError, match="line 3: custom_id 'a' is that of line 1"):
        read_calls(file)


def test_plain_prompts_are_told_from_requests(tmp_path: Path):
    assert not holds_calls(written(tmp_path / "in.jsonl", [{"prompt": "x"}]))
    (tmp_path / "none.jsonl").write_text("\n\n")
    assert not holds_calls(tmp_path / "none.jsonl")
