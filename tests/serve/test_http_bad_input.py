"""Bad requests get the conventional error, hold nothing, and the server goes on."""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from jdisagg.core.errors import RequestError
from jdisagg.core.request import FinishReason
from jdisagg.serve.driver.service import Capacity, ObjectiveUnmet, Rejected
from jdisagg.serve.frontends.front_settings import FrontSettings
from jdisagg.serve.frontends.http.app import create_app
from jdisagg.serve.frontends.http.schema import REFUSED, CompletionBody, parse
from tests.serve.live_http import Front, eventually, serving
from tests.serve.scripted import ScriptedService, echo, end

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(autouse=True)
def goes_on(front: Front) -> Iterator[None]:
    """After each test nothing is held and the server still answers."""
    yield
    eventually(lambda: not front.service.running)
    front.service.script, front.service.ready, front.service.draining = echo, True, False
    assert front.client.completions.create(model="tiny", prompt="ok", max_tokens=1).usage is not None


def refusal(front: Front, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    """The error object of a request that must fail with `status`, before anything was submitted."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = httpx.post(front.url + path, content=content, headers={"content-type": "application/json"})
    assert response.status_code == status, response.text
    assert not front.service.seen
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    return error


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'"text"', b'{"prompt": \xff}', b"null", b"[" * 5000])
def test_malformed_json_is_refused(front: Front, raw: bytes) -> None:
    error = refusal(front, COMPLETIONS, raw)
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0),
        ("top_p", float("nan")),
        ("top_p", 1.5),
        ("min_p", -1),
        ("top_k", -2),
        ("top_k", 10**30),
        ("presence_penalty", 3),
        ("frequency_penalty", float("-inf")),
        ("repetition_penalty", 0),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 2.5),
        ("max_tokens", "many"),
        ("max_tokens", 10**400),
        ("min_tokens", 17),
        ("n", 0),
        ("n", 1000),
        ("logprobs", 21),
        ("seed", 2**70),
        ("stop", 7),
        ("stop", ["x" * 257]),
        ("logit_bias", {"seven": 1}),
        ("logit_bias", {"7": float("nan")}),
        ("logit_bias", {"99999": 1}),
        ("logit_bias", {"9" * 5000: 1}),
        ("stop_token_ids", [99999]),
        ("stream", "perhaps"),
        ("stream_options", {"include_usage": True}),
        ("prompt", None),
        ("prompt", []),
        ("prompt", [[]]),
        ("prompt", [-1]),
        ("prompt", [99999]),
        ("prompt", [1, "two"]),
        ("prompt", {"text": "x"}),
    ],
)
def test_a_field_out_of_range_is_named(front: Front, field: str, value: Any) -> None:
    error = refusal(front, COMPLETIONS, {"model": "tiny", "prompt": "x", field: value})
    assert field in f"{error['message']} {error['param']}"


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_is_not_supported_is_refused_by_name_and_never_ignored(front: Front, name: str) -> None:
    error = refusal(front, COMPLETIONS, {"prompt": "x", name: {"some": "thing"}})
    assert error["param"] == name
    assert name in error["message"]


def test_harmless_values_and_unknown_fields_are_let_by(front: Front) -> None:
    harmless = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "best_of": 1, "novel": 1}
    response = httpx.post(front.url + CHAT, json={**USER, **harmless, "max_tokens": 1, "suffix": None})
    assert response.status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"content": "no role"}]}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [1]}]}, "messages.0.tool_calls"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"guided_json": {"type": "nothing"}}, "guided_json"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"echo": True}, "echo"),
    ],
)
def test_a_chat_that_cannot_be_is_refused(front: Front, fields: dict[str, Any], param: str) -> None:
    assert refusal(front, CHAT, {**USER, **fields})["param"] == param


def test_a_prompt_over_the_limit_is_told_with_both_numbers(front: Front) -> None:
    error = refusal(front, COMPLETIONS, {"prompt": [70] * 500, "max_tokens": 13})
    assert "513" in error["message"]
    assert "512" in error["message"]
    assert error["param"] == "max_tokens"
    assert "512" in refusal(front, CHAT, {"messages": [{"role": "user", "content": "x" * 600}]})["message"]


def test_ten_thousand_stop_strings_are_refused(front: Front) -> None:
    stops = [f"{i}" for i in range(10_000)]
    error = refusal(front, COMPLETIONS, {"prompt": "x", "stop": stops})
    assert error["param"] == "stop"
    assert "10000" in error["message"]


def test_too_many_choices_are_refused(front: Front) -> None:
    assert refusal(front, COMPLETIONS, {"prompt": ["x"] * 100, "n": 11})["param"] == "n"


def test_an_unknown_model_is_not_found(front: Front) -> None:
    for path, body in ((COMPLETIONS, {"prompt": "x"}), (CHAT, USER), ("/tokenize", {"prompt": "x"})):
        error = refusal(front, path, {**body, "model": "huge"}, status=404)
        assert error["code"] == "model_not_found"
        assert "tiny" in error["message"]


def test_a_body_over_the_limit_is_refused(front: Front) -> None:
    before = len(front.service.seen)
    error = refusal(front, COMPLETIONS, {"prompt": "x" * 100_000}, status=413)
    assert "100014 bytes, at most 100000" in error["message"] and len(front.service.seen) == before


def test_a_chunked_body_over_the_limit_is_refused_before_its_end(front: Front) -> None:
    host, port = front.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(11):
            raw.sendall(b"2710\r\n" + b"x" * 10_000 + b"\r\n")
        assert raw.recv(1000).startswith(b"HTTP/1.1 413 ")  # the last chunk was never sent


def test_unknown_paths_and_methods_have_the_same_form(front: Front) -> None:
    assert refusal(front, "/v1/nothing", {}, status=404)["code"] == "not_found"
    assert refusal(front, "/v1/models", {}, status=405)["code"] == "method_not_allowed"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("kind", "code"), [(Rejected, "queue_full"), (ObjectiveUnmet, "objective_unmet")])
def test_who_is_turned_away_is_told_why_and_when_to_come_again(
    front: Front, kind: type[Rejected], code: str, stream: bool
) -> None:
    front.service.script = lambda _: iter([kind("not now", 2.3)])
    with pytest.raises(openai.RateLimitError) as caught:
        front.client.completions.create(model="tiny", prompt="x", stream=stream)
    assert caught.value.response.headers["retry-after"] == "3" and caught.value.code == code


def test_where_the_first_choice_is_turned_away_the_others_go_with_it(front: Front) -> None:
    def script(request: Any) -> Iterator[Any]:
        return iter([Rejected("full", 1.0)]) if request.request_id.endswith("-0") else iter([5.0])

    front.service.script = script
    with pytest.raises(openai.RateLimitError):
        front.client.completions.create(model="tiny", prompt="x", n=3)


def test_a_later_choice_turned_away_tries_again_when_others_have_ended(front: Front) -> None:
    turned_away: list[str] = []

    def script(request: Any) -> Iterator[Any]:
        if request.request_id.endswith("-2") and len(turned_away) < 2:
            turned_away.append(request.request_id)
            return iter([Rejected("full", 0.01)])
        return echo(request)

    front.service.script = script
    answer = front.client.completions.create(model="tiny", prompt="x", n=3, max_tokens=2)
    assert len(turned_away) == 2
    assert [choice.finish_reason for choice in answer.choices] == ["length"] * 3


@pytest.mark.parametrize("stream", [False, True])
def test_while_draining_new_requests_are_not_taken(front: Front, stream: bool) -> None:
    front.service.draining = True
    with pytest.raises(openai.InternalServerError) as caught:
        front.client.completions.create(model="tiny", prompt="x", stream=stream)
    assert caught.value.status_code == 503


@pytest.mark.parametrize(
    ("reason", "status"), [(FinishReason.TIMEOUT, 408), (FinishReason.ERROR, 500), (FinishReason.ABORT, 503)]
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_fails_before_its_first_token_is_an_http_error(
    front: Front, reason: FinishReason, status: int, stream: bool
) -> None:
    front.service.script = lambda request: iter([end(request, reason, "it went wrong")])
    with pytest.raises(openai.APIStatusError) as caught:
        front.client.completions.create(model="tiny", prompt="x", stream=stream)
    assert caught.value.status_code == status
    assert "it went wrong" in caught.value.message


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_mistake_of_ours_is_a_500_without_its_insides(front: Front) -> None:
    front.service.script = lambda _: iter([ZeroDivisionError("secret")])
    response = httpx.post(front.url + COMPLETIONS, json={"prompt": "x"})
    assert response.status_code == 500
    assert "secret" not in response.text
    assert response.json()["error"]["type"] == "server_error"


def test_with_a_key_only_those_who_have_it_come_in() -> None:
    service = ScriptedService()
    with serving(create_app(service, FrontSettings(api_key="open sesame"))) as url:
        for given in ({}, {"authorization": "Bearer wrong"}, {"authorization": "open sesame"}):
            response = httpx.post(url + COMPLETIONS, json={"prompt": "x"}, headers=given)
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert "x-request-id" in response.headers
        assert httpx.get(f"{url}/v1/models").status_code == 401
        assert httpx.get(f"{url}/ready").status_code == 200
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="open sesame")
        assert client.completions.create(model="tiny", prompt="x", max_tokens=1).choices
    assert len(service.seen) == 1


def test_an_error_names_the_first_few_problems_and_how_many_there_are(front: Front) -> None:
    body = {"prompt": "x", "n": 0, "seed": "s", "top_k": "k", "echo": 7, "stop": [3, 4, 5]}
    message = refusal(front, COMPLETIONS, body)["message"]
    assert "n: " in message and "these are 3 of " in message
    assert len(message) < 1000


def test_a_list_is_read_up_to_its_first_wrong_item(front: Front) -> None:
    for path, body in (
        (COMPLETIONS, {"prompt": ["x", {}, {}, {}]}),
        (COMPLETIONS, {"prompt": "x", "stop": [0, 0, 0]}),
        (CHAT, {"messages": [0, 0, 0]}),
        ("/detokenize", {"tokens": [-1, -1, -1]}),
    ):
        message = refusal(front, path, body)["message"]
        assert ".2" not in message and ".3" not in message, message


def test_a_body_of_too_many_values_is_refused_before_they_are_made(front: Front) -> None:
    with pytest.raises(RequestError, match=r"1000001 values, at most 131072"):
        parse(CompletionBody, b'{"prompt":[' + b"0," * 1_000_000 + b"0]}")
    with pytest.raises(RequestError, match=r"lists, objects and fields, at most 16384"):
        parse(CompletionBody, b'{"prompt":[' + b"{}," * 100_000 + b"0]}")
    assert parse(CompletionBody, b'{"prompt":"' + b"{[,:" * 500_000 + rb"\"\\" + b'"}').prompt


@pytest.mark.parametrize(
    ("path", "fields", "status"),
    [
        ("/tokenize", {"messages": []}, 400),
        ("/tokenize", {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"self": 1}}, 200),
        (CHAT, {**USER, "chat_template_kwargs": {"self": 1}, "max_tokens": 1}, 200),
        (CHAT, {**USER, "chat_template_kwargs": {"raise_exception": 1, "range": "x", "namespace": []}}, None),
        (COMPLETIONS, {"prompt": "x", "temperature": 10**5000}, 400),
        (COMPLETIONS, {"prompt": "x", "tools": 10**5000}, 400),
        (COMPLETIONS, {"prompt": "x", "priority": -11}, 400),
        (COMPLETIONS, {"prompt": "x", "ttft_s": 0}, 400),
        (COMPLETIONS, {"prompt": "x", "ttft_s": float("nan")}, 400),
        (CHAT, {**USER, "tpot_s": -1.0}, 400),
        (CHAT, {**USER, "tpot_s": float("inf")}, 400),
    ],
)
def test_nothing_that_a_body_says_is_a_500(front: Front, path: str, fields: dict[str, Any], status: int | None) -> None:
    sys.set_int_max_str_digits(0)
    try:
        content = json.dumps(fields)
    finally:
        sys.set_int_max_str_digits(4300)
    response = httpx.post(front.url + path, content=content)
    assert response.status_code == status if status else response.status_code < 500, response.text


@pytest.mark.parametrize(
    ("message", "names"),
    [
        ({"role": "tool", "content": "x"}, "no role tool"),
        ({"role": "function", "content": "x"}, "must be one of"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "["}}]},
            "'f' are no JSON object",
        ),
        ({"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}, "tool_calls"),
        ({"role": "user"}, "messages[0] has no content"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "'image_url'"),
        ({"role": "user", "content": [{"type": {}}]}, "an object of 0"),
        ({"role": "wizard", "content": "x"}, "must be one of system, developer, user, assistant"),
    ],
)
def test_a_message_that_cannot_be_is_refused_by_what_is_missing(
    front: Front, message: dict[str, Any], names: str
) -> None:
    assert names in refusal(front, CHAT, {"messages": [message]})["message"]


def test_what_a_message_says_never_runs_as_a_template(front: Front) -> None:
    content = "{{ 7 * 7 }}{% for x in range(3) %}x{% endfor %}{# gone #}"
    body = {"messages": [{"role": "user", "content": content}], "return_token_ids": True, "max_tokens": 1}
    answer = httpx.post(front.url + CHAT, json=body).json()
    shown = front.service.tokenizer.decode(answer["choices"][0]["prompt_token_ids"])
    assert content in shown


def test_the_bodys_request_id_is_the_answers_header(front: Front) -> None:
    response = httpx.post(front.url + COMPLETIONS, json={"prompt": "x", "max_tokens": 1, "request_id": "mine-7"})
    assert response.headers["x-request-id"] == "mine-7" and response.json()["id"] == "cmpl-mine-7"
    both = {"x-request-id": "header"}
    response = httpx.post(front.url + COMPLETIONS, json={"prompt": "x", "request_id": "mine-7"}, headers=both)
    assert response.headers["x-request-id"] == "header" and response.json()["id"] == "cmpl-header"


def test_a_slash_at_the_end_is_not_a_redirect_to_whatever_host_was_named(front: Front) -> None:
    response = httpx.get(f"{front.url}/health/", headers={"host": "evil.example"}, follow_redirects=False)
    assert response.status_code == 404 and "location" not in response.headers


def test_a_prompt_of_more_bytes_than_the_model_can_hold_is_refused_before_it_is_tokenized() -> None:
    service = ScriptedService(max_model_len=16)
    most = 16 * max(len(token.encode()) for token in service.tokenizer.vocabulary.raw.get_vocab())
    with serving(create_app(service)) as url:
        for path, body in (
            (COMPLETIONS, {"prompt": "x" * (most + 1)}),
            (COMPLETIONS, {"prompt": ["x", "x" * (most + 1)]}),
            (CHAT, {"messages": [{"role": "user", "content": "é" * (most // 2 + 1)}]}),
            ("/tokenize", {"prompt": "x" * (most + 1)}),
        ):
            response = httpx.post(url + path, json=body)
            assert response.status_code == 400
            message = response.json()["error"]["message"]
            assert str(most) in message and "bytes" in message


def test_choices_that_could_never_begin_in_time_are_refused_with_the_numbers() -> None:
    service = ScriptedService()
    service.most = Capacity(slots=8, token_s=0.01)
    body = {"prompt": "x", "max_tokens": 100, "ignore_eos": True}
    with serving(create_app(service, FrontSettings(queue_timeout_s=4.0))) as url:
        response = httpx.post(url + COMPLETIONS, json={**body, "n": 128})
        assert response.status_code == 400
        message = response.json()["error"]["message"]
        assert all(number in message for number in ("128", "100 tokens", "8 at a time", "15.0 s", "4 s"))
        assert httpx.post(url + COMPLETIONS, json={**body, "n": 32}).status_code == 200
        assert httpx.post(url + COMPLETIONS, json={**body, "n": 128, "ignore_eos": False}).status_code == 200


def test_choices_wait_for_each_other_and_not_for_others_longer_than_the_queues_timeout() -> None:
    service = ScriptedService(lambda request: iter([0.2, *echo(request)]))
    service.most = Capacity(slots=2)
    with serving(create_app(service, FrontSettings(queue_timeout_s=0.5))) as url:
        begun_s = time.monotonic()
        assert httpx.post(url + COMPLETIONS, json={"prompt": "x", "n": 8, "max_tokens": 2}).status_code == 200
        assert time.monotonic() - begun_s > 0.5
        service.script = lambda request: iter([30.0])
        response = httpx.post(url + COMPLETIONS, json={"prompt": "x", "n": 8, "max_tokens": 2})
        assert response.status_code == 408 and "0.5 s" in response.json()["error"]["message"]
