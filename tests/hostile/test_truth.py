"""The same request has the same answer: streamed or whole, alone or in company, before and after a restart."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.hostile.bystander import Server, serving

ASKED: list[dict[str, Any]] = [
    {"prompt": "def f(x):", "max_tokens": 60, "temperature": 1.0, "seed": seed, "n": n, **more}
    for seed, n, more in (
        (7, 1, {}),
        (2**40, 3, {}),
        (-1, 2, {"stop": ["a", "\n\n"]}),
        (5, 2, {"stop": ["e"], "echo": True}),
        (11, 1, {"logit_bias": {"243": 60, "162": 60, "194": 60}}),  # bytes of emoji and CJK: broken ones mostly
        (13, 1, {"ignore_eos": True, "skip_special_tokens": False}),
    )
]
Answer = list[tuple[str, str, str | None]]


def whole(url: str, body: dict[str, Any]) -> tuple[Answer, dict[str, int]]:
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
    choices = sorted(answer["choices"], key=lambda each: each["index"])
    return [(each["text"], each["finish_reason"], each["stop_reason"]) for each in choices], counts(answer)


def counts(answer: dict[str, Any]) -> dict[str, int]:
    return {name: answer["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}


def streamed(url: str, body: dict[str, Any]) -> tuple[Answer, dict[str, int]]:
    texts, ends, usage = [""] * body["n"], [("", None)] * body["n"], {}
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    with httpx.stream("POST", f"{url}/v1/completions", json=asked, timeout=60) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            for choice in chunk["choices"]:
                texts[choice["index"]] += choice["text"]
                if choice["finish_reason"]:
                    ends[choice["index"]] = (choice["finish_reason"], choice["stop_reason"])
            usage = counts(chunk) if chunk["usage"] else usage
    return [(text, *end) for text, end in zip(texts, ends, strict=True)], usage


@pytest.mark.parametrize("body", ASKED)
def test_streamed_text_is_the_whole_text_byte_for_byte(server: Server, body: dict[str, Any]) -> None:
    assert streamed(server.url, body) == whole(server.url, body)


@pytest.mark.slow
@pytest.mark.hostile
def test_the_same_seed_gives_the_same_answer_in_company_and_after_a_restart(server: Server, tmp_path: Path) -> None:
    alone = [whole(server.url, body) for body in ASKED]
    company: dict[int, Any] = {}
    threads = [
        threading.Thread(target=lambda i=i, body=body: company.__setitem__(i, whole(server.url, body)))
        for i, body in enumerate(ASKED)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join(timeout=60)
    assert [company[i] for i in range(len(ASKED))] == alone
    with serving(tmp_path) as restarted:
        assert [whole(restarted.url, body) for body in ASKED] == alone
