"""Requests with random features against a server within this process: a small edition of `benchmarks.features`."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

import jdisagg
from benchmarks.asked import CHAT, COMPLETIONS, PERSON, Asked, asked, wrong_of
from benchmarks.asked_elsewhere import EMBEDDINGS, MESSAGES, RESPONSES, SCORE, Items, Vectors, asked_elsewhere
from benchmarks.features import Book, drive, left_held
from jdisagg.serve.frontends.front_settings import FrontSettings
from jdisagg.serve.frontends.http.app import create_app
from tests.serve.live_http import serving

VECTORS_TOO = FrontSettings(embeddings="mean")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_requests_with_random_features_are_answered_as_they_ask_or_refused_and_nothing_is_left():
    sizes: dict[str, Any] = {"max_model_len": 512, "kv_tokens": 2048, "page_size": 16, "max_num_seqs": 8}
    few: dict[str, Any] = {
        "prefill_buckets": "128",
        "table_buckets": "512",
        "short_prompt_tokens": 0,
        "embeddings": "mean",
    }
    drafting: dict[str, Any] = {"mesh": "prefill:tp1,decode:tp1", "speculative": "ngram", "queue_limit": 256}
    with jdisagg.LLM(**drafting, **sizes, **few) as llm, serving(create_app(llm.service, VECTORS_TOO)) as url:
        book = asyncio.run(drive(url, 60, 8, seed=7))
        held = left_held(url, 60.0)
    assert not book.faults and not held
    assert book.ends["answered"] > 35 and book.ends["left"] and book.ends["refused"]


def test_what_is_asked_is_the_same_for_the_same_seed_and_holds_every_feature():
    many = [asked(random.Random(f"1 {n}")) for n in range(600)]
    assert many[:50] == [asked(random.Random(f"1 {n}")) for n in range(50)]
    assert {each.path for each in many} == {CHAT, COMPLETIONS}
    features = {name for each in many for name in each.features}
    assert features >= {
        "tools",
        "schema",
        "regex",
        "choice",
        "n",
        "logprobs",
        "penalties",
        "stop",
        "bias",
        "min_tokens",
    }
    named = [asked(random.Random(f"1 {n}"), ("sql", "tales")) for n in range(60)]
    assert {each.body["model"] for each in named if "adapter" in each.features} == {"sql", "tales"}
    assert len({str(wrong_of(random.Random(n)).body) for n in range(200)}) > 20


def answer(text: str, finish: str = "stop", **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish, **more}], "usage": {"completion_tokens": 3}}


def called(*arguments: str) -> dict[str, Any]:
    calls = [{"function": {"name": "store_person", "arguments": each}} for each in arguments]
    choice = {"index": 0, "message": {"content": None, "tool_calls": calls}, "finish_reason": "tool_calls"}
    return {"choices": [choice], "usage": {"completion_tokens": 3}}


FORMED = {"prompt": "x", "max_tokens": 9}
FAULTS: list[tuple[dict[str, Any], Any, str]] = [
    (FORMED, answer("a"), ""),
    (FORMED, answer("a", "abort"), "1 choices were asked for"),
    ({**FORMED, "n": 2}, answer("a"), "2 choices were asked for"),
    ({**FORMED, "max_tokens": 2}, answer("a"), "of at most 2 tokens"),
    (FORMED, answer("a", logprobs={"tokens": ["a"]}), "logprobs"),
    ({**FORMED, "guided_regex": "x"}, answer("abc-12"), ""),
    ({**FORMED, "guided_regex": "x"}, answer("abc-1"), "not of its form"),
    ({**FORMED, "guided_regex": "x"}, answer("abc-1", "length"), ""),
    ({**FORMED, "guided_choice": []}, [answer("per"), answer("haps")], "choices"),
    ({**FORMED, "guided_choice": []}, [answer("per", ""), answer("haps")], ""),
    ({**FORMED, "guided_json": PERSON}, answer('{"name":"x","age":3}'), ""),
    ({**FORMED, "guided_json": PERSON}, answer('{"name":"x"}'), "not of its form"),
    ({**FORMED, "tools": []}, called('{"name":"x","age":3}', '{"name":"y","age":4}'), ""),
    ({**FORMED, "tools": []}, called('{"name":"x","age":3}', '{"name":"y"}'), "not of its form"),
    ({**FORMED, "tools": []}, called(), "not of its form"),
]


@pytest.mark.parametrize(("body", "said", "fault"), FAULTS, ids=[str(n) for n in range(len(FAULTS))])
def test_what_is_wrong_with_an_answer_is_told(body: dict[str, Any], said: Any, fault: str):
    found = Asked(COMPLETIONS, body).fault(said)
    assert fault in found if fault else not found


def test_what_is_asked_elsewhere_is_each_of_four_and_the_same_for_the_same_seed():
    many = [asked_elsewhere(random.Random(n), ("sql",)) for n in range(80)]
    assert many == [asked_elsewhere(random.Random(n), ("sql",)) for n in range(80)]
    assert {each.path for each in many} == {EMBEDDINGS, SCORE, RESPONSES, MESSAGES}
    assert {"adapter", "format", "embedding"} <= {name for each in many for name in each.features}


def responded(text: str, status: str = "completed", tokens: int = 3) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text}]
    return {"status": status, "output": [{"content": content}], "usage": {"output_tokens": tokens}}


VECTORS = Vectors(EMBEDDINGS, {"input": ["a", "b"], "dimensions": 2})
FORMAT = Items(RESPONSES, {"max_output_tokens": 9}, ("format",))
ELSEWHERE: list[tuple[Asked, Any, str]] = [
    (VECTORS, {"data": [{"embedding": [0.6, 0.8]}] * 2}, ""),
    (VECTORS, {"data": [{"embedding": [0.6, 0.8]}]}, "2 texts gave 1 vectors"),
    (VECTORS, {"data": [{"embedding": [0.6]}] * 2}, "2 texts gave 2 vectors of [1] numbers"),
    (VECTORS, {"data": [{"embedding": [6.0, 8.0]}] * 2}, "not of length one"),
    (Vectors(SCORE, {"text_1": "a", "text_2": ["b"]}), {"data": [{"score": 0.5}]}, ""),
    (FORMAT, responded('{"name":"x","age":3}'), ""),
    (FORMAT, responded('{"name":"x"'), "not of its form"),
    (FORMAT, responded('{"name":"x"', "incomplete"), ""),
    (FORMAT, responded("", "failed"), "ended as"),
    (FORMAT, responded("", tokens=10), "of at most 9 tokens"),
    (
        Items(MESSAGES, {"max_tokens": 9}),
        {"content": [{"text": "x"}], "stop_reason": "end_turn", "usage": {"output_tokens": 1}},
        "",
    ),
]


@pytest.mark.parametrize(("one", "said", "fault"), ELSEWHERE, ids=[str(n) for n in range(len(ELSEWHERE))])
def test_what_is_wrong_elsewhere_is_told(one: Asked, said: Any, fault: str):
    found = one.fault(said)
    assert fault in found if fault else not found


def test_memory_that_grows_through_the_second_half_is_told():
    def grown(values: list[float]) -> str:
        return Book(samples=[{"server rss_mib": value} for value in values]).grown()

    assert not grown([500.0] * 20 + [1000.0] * 20) and not grown([500.0, 900.0])
    assert grown([1000.0] * 39 + [1051.0]) == "1000 MiB in the middle, 1051 at the end"
