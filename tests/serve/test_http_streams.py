"""Server-sent events byte by byte: framing, errors after the first byte, clients that vanish or lag."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdisagg.core.request import FinishReason, Request
from tests.serve.live_http import Front, eventually
from tests.serve.scripted import Step, echo, end, told

BODY = {"model": "tiny", "prompt": "x", "max_tokens": 50, "stream": True}


def slowly(request: Request) -> Iterator[Step]:
    """A token every 10 ms, for a long time."""
    for _ in range(500):
        yield told(request, 70)
        yield 0.01
    yield end(request, FinishReason.LENGTH)


def breaks(with_: Any) -> Any:
    """A script of two tokens and then `with_`, an exception or a finish reason."""

    def script(request: Request) -> Iterator[Step]:
        yield told(request, 70)
        yield told(request, 71)
        yield end(request, with_, "the engine fell over") if isinstance(with_, FinishReason) else with_

    return script


def events(front: Front, body: dict[str, Any], path: str = "/v1/completions") -> list[Any]:
    """The parsed events of a stream, after checking every byte of the framing."""
    response = httpx.post(front.url + path, json=body)
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    parts = response.content.split(b"\n\n")
    assert parts[-1] == b""
    assert parts[-2] == b"data: [DONE]"
    for part in parts[:-1]:
        assert part.startswith(b"data: ")
        assert b"\n" not in part
    return [json.loads(part[6:]) for part in parts[:-2]]


def test_every_event_is_one_line_of_json_and_the_last_is_done(front: Front) -> None:
    for body in (BODY, {**BODY, "logprobs": 2, "return_token_ids": True}, {**BODY, "echo": True, "n": 2}):
        chunks = events(front, body)
        assert len({chunk["id"] for chunk in chunks}) == 1
        for chunk in chunks:
            assert chunk["object"] == "text_completion"
            assert chunk["model"] == "tiny"
            assert chunk["choices"][0].keys() >= {"index", "text", "logprobs", "finish_reason"}


def test_text_that_looks_like_framing_comes_through(front: Front) -> None:
    text = 'data: "x"\n\n\x00hole\x00\r\n[DONE] \u2028 \\'
    ids = front.service.tokenizer.encode(text, add_special_tokens=False)
    chunks = events(front, {**BODY, "prompt": ids, "max_tokens": len(ids), "temperature": 0})
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text


def test_usage_can_come_with_every_chunk(front: Front) -> None:
    options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    chunks = events(front, {**BODY, **options, "prompt": [70], "max_tokens": 3})
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 3, 3]
    assert chunks[-1]["choices"] == []


def test_tokens_that_come_at_once_go_out_in_one_event(front: Front) -> None:
    def script(request: Request) -> Iterator[Step]:
        yield told(request, 70)
        yield told(request, *range(71, 79))
        yield end(request, FinishReason.LENGTH)

    front.service.script = script
    chunks = events(front, {**BODY, "logprobs": 0, "stream_options": {"include_usage": True}})
    assert [len(chunk["choices"][0]["text"]) for chunk in chunks[:-1]] == [1, 8, 0]
    assert len(chunks[1]["choices"][0]["logprobs"]["tokens"]) == 8
    assert chunks[-1]["usage"]["completion_tokens"] == 9


@pytest.mark.parametrize("with_", [ZeroDivisionError("secret"), FinishReason.ERROR, FinishReason.TIMEOUT])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_what_breaks_later_ends_as_abort_and_an_error_object(front: Front, with_: Any, n: int, path: str) -> None:
    front.service.script = breaks(with_)
    body = {"messages": [{"role": "user", "content": "x"}], **BODY, "n": n}
    chunks = events(front, body, path)
    assert "secret" not in json.dumps(chunks)
    assert chunks[-1]["error"]["type"] == "server_error"
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]]
    assert set(reasons) == {None, "abort"}
    assert "abort" in reasons[-n:]
    assert not front.service.running


def test_the_official_client_raises_what_breaks_later(front: Front) -> None:
    front.service.script = breaks(FinishReason.ERROR)
    stream = front.client.completions.create(model="tiny", prompt="x", stream=True)
    with pytest.raises(openai.APIError, match="the engine fell over"):
        list(stream)


def test_a_client_that_vanishes_mid_stream_frees_its_request(front: Front) -> None:
    front.service.script = slowly
    with httpx.stream("POST", f"{front.url}/v1/completions", json={**BODY, "n": 3}) as response:
        parts = response.iter_raw()  # kept: the stream is closed with it
        next(parts)
        assert len(front.service.running) == 3
    eventually(lambda: not front.service.running)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_vanishes_before_the_first_token_frees_its_request(front: Front, stream: bool) -> None:
    front.service.script = lambda request: iter([30.0, end(request, FinishReason.LENGTH)])
    host, port = front.url.removeprefix("http://").split(":")
    body = json.dumps({**BODY, "stream": stream}).encode()
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        eventually(lambda: len(front.service.running) == 1)
    eventually(lambda: not front.service.running)


def test_a_client_that_vanishes_within_its_body_is_forgotten(front: Front) -> None:
    host, port = front.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"prompt":')
    assert len(events(front, {**BODY, "max_tokens": 1, "prompt": [70]})) == 2
    assert len(front.service.seen) == 1


def test_choices_over_the_parallel_limit_wait_for_their_step(front: Front) -> None:
    most = 0

    def script(request: Request) -> Iterator[Step]:
        nonlocal most
        most = max(most, len(front.service.running))
        yield told(request, 70)
        yield end(request, FinishReason.LENGTH)

    front.service.script = script
    answer = front.client.completions.create(model="tiny", prompt=["x"] * 100, max_tokens=1)
    assert len(answer.choices) == 100
    assert most <= 64


TEXTS = st.text(alphabet=st.sampled_from("ab \n世界é🦜👩\u200d\u0301<|>"), min_size=1, max_size=30)
STOPS = st.lists(st.text(alphabet=st.sampled_from("ab 世é🦜"), min_size=1, max_size=3), max_size=3)


@settings(deadline=None, max_examples=60)
@given(TEXTS, STOPS, st.integers(1, 3), st.booleans(), st.integers(1, 90), st.integers(0, 2**63 - 1))
def test_streamed_text_ends_and_counts_are_those_of_the_whole_answer(
    served: Front, text: str, stop: list[str], n: int, echoed: bool, tokens: int, seed: int
) -> None:
    service = served.service
    service.script = echo
    body = {"prompt": text, "stop": stop, "n": n, "echo": echoed, "max_tokens": tokens, "seed": seed}
    whole = httpx.post(f"{served.url}/v1/completions", json=body).json()
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    shown, ends, usage = [""] * n, [("", None)] * n, {}
    for line in httpx.post(f"{served.url}/v1/completions", json=asked).text.splitlines():
        chunk = json.loads(line.removeprefix("data: ")) if line.startswith("data: {") else {"choices": []}
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            shown[choice["index"]] += choice["text"]
            if choice["finish_reason"]:
                ends[choice["index"]] = (choice["finish_reason"], choice["stop_reason"])
    assert shown == [choice["text"] for choice in whole["choices"]]
    assert ends == [(choice["finish_reason"], choice["stop_reason"]) for choice in whole["choices"]]
    assert usage == whole["usage"]
    for each, (reason, word) in zip(shown, ends, strict=True):
        answer = each.removeprefix(text) if echoed else each
        assert reason == ("stop" if word else "length")
        assert not any(each in answer for each in stop), "the stop string is shown"
