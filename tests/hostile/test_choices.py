"""Requests of many answers: they do not defeat themselves, and do not keep others out."""

from __future__ import annotations

import json

import httpx

from tests.hostile.bystander import Server

FLAGS = ("--queue_timeout_s=2", "--queue_limit=20")
COMPLETIONS = "/v1/completions"


def test_more_choices_than_the_queue_has_places_are_served_on_an_idle_server(server: Server) -> None:
    answer = httpx.post(server.url + COMPLETIONS, json={"prompt": "x", "n": 64, "max_tokens": 4}, timeout=120)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] <= 64 * 4


def test_choices_that_take_longer_than_the_queues_timeout_are_served(server: Server) -> None:
    """Any may end early, so none is refused; before, the last of them ran into the first one's deadline."""
    body = {"prompt": "x", "n": 128, "max_tokens": 120, "temperature": 1.0, "seed": 3, "logit_bias": {"1": -100}}
    answer = httpx.post(server.url + COMPLETIONS, json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    assert answer.elapsed.total_seconds() > 2.0, "they did not take longer"
    assert len(answer.json()["choices"]) == 128


def test_a_stream_of_three_hundred_prompts_ends_with_all_of_them_while_others_stream_too(server: Server) -> None:
    body = {"prompt": [f"p{i}" for i in range(300)], "max_tokens": 20, "stream": True}
    ends: dict[int, str] = {}
    with (
        server.bystander(longest_gap_s=3.0),
        httpx.stream("POST", server.url + COMPLETIONS, json=body, timeout=120) as answer,
    ):
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                choice = json.loads(line.removeprefix("data: "))["choices"][0]
                if choice["finish_reason"]:
                    ends[choice["index"]] = choice["finish_reason"]
    assert len(ends) == 300 and set(ends.values()) <= {"length", "stop"}


def test_what_can_never_begin_in_time_is_refused_with_the_numbers(server: Server) -> None:
    body = {"prompt": "x", "n": 1000, "max_tokens": 200, "ignore_eos": True}
    assert httpx.post(server.url + COMPLETIONS, json={**body, "n": 1}, timeout=120).status_code == 200
    answer = httpx.post(server.url + COMPLETIONS, json={**body, "prompt": ["x"] * 8, "n": 128}, timeout=120)
    assert answer.status_code == 400
    assert "1024 answers of 200 tokens, 8 at a time" in answer.json()["error"]["message"]
    assert answer.elapsed.total_seconds() < 20.0
