"""Requests with random features against a server within this process: a small edition of `benchmarks.features`."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

import jdisagg
from benchmarks.asked import CHAT, COMPLETIONS, PERSON, Asked, asked, wrong_of
from benchmarks.features import drive, left_held
from jdisagg.serve.http.app import create_app
from tests.serve.live_http import serving


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_requests_with_random_features_are_answered_as_they_ask_or_refused_and_nothing_is_left():
    sizes: dict[str, Any] = {"max_model_len": 512, "kv_tokens": 2048, "page_size": 16, "max_num_seqs": 8}
    few: dict[str, Any] = {"prefill_buckets": "128", "table_buckets": "512", "short_prompt_tokens": 0}
    drafting: dict[str, Any] = {"mesh": "prefill:tp1,decode:tp1", "speculative": "ngram", "queue_limit": 256}
    with jdisagg.LLM(**drafting, **sizes, **few) as llm, serving(create_app(llm.service)) as url:
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
    assert len({str(wrong_of(random.Random(n)).body) for n in range(200)}) > 20


def answer(text: str, finish: str = "stop", **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish, **more}], "usage": {"completion_tokens": 3}}


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
]


@pytest.mark.parametrize(("body", "said", "fault"), FAULTS, ids=[str(n) for n in range(len(FAULTS))])
def test_what_is_wrong_with_an_answer_is_told(body: dict[str, Any], said: Any, fault: str):
    found = Asked(COMPLETIONS, body).fault(said)
    assert fault in found if fault else not found
