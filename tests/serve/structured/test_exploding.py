"""Grammars that explode, at once or half way: their own requests end with a 400 that says why, and nobody else's do."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import grpc.aio
import pytest

from benchmarks.exploding import AMBIGUITY, exploding
from jdisagg import LLM
from jdisagg.serve.frontends.front_settings import FrontSettings
from jdisagg.serve.frontends.grpc.inference_pb2_grpc import InferenceStub
from jdisagg.serve.frontends.http.app import create_app
from tests.serve.live_http import eventually, serving
from tests.serve.test_grpc_front import channel_to
from tests.serve.test_grpc_inference import posted

PLAIN = {"prompt": "def area(", "max_tokens": 40, "temperature": 0.8, "ignore_eos": True}
HALF_WAY = {"prompt": "x", "max_tokens": 150, "structured_outputs": {"grammar": AMBIGUITY}, "logit_bias": {"68": 50}}
SIZES: dict[str, Any] = {
    "max_model_len": 256,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "prefill_buckets": "64",
    "kv_tokens": 2048,
    "table_buckets": "256",
}
WITHIN_S = 30.0  # the machine may be busy


@pytest.fixture(scope="module")
def live() -> Iterator[tuple[str, LLM]]:
    with (
        LLM(mesh="prefill:tp1,decode:tp1", **SIZES) as llm,
        serving(create_app(llm.service, FrontSettings(eos_ids=llm.service.tokenizer.eos_ids))) as url,
    ):
        yield url, llm
        assert llm.service.recompiles() == 0


def ask(url: str, **body: Any) -> tuple[int, Any]:
    """Status and answer; of a stream its events."""
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            text = answer.read().decode()
            return answer.status, text.split("\n\n") if body.get("stream") else json.loads(text)
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


@pytest.mark.slow
def test_streams_go_on_with_the_same_tokens_while_grammars_explode(live: tuple[str, LLM]):
    url, _ = live

    def plain(seed: int) -> tuple[int, Any]:
        return ask(url, seed=seed, return_token_ids=True, **PLAIN)

    def refused(number: int) -> tuple[int, Any, float]:
        began_s = time.monotonic()
        schema = exploding(number)["json"]
        told = ask(url, prompt="x", response_format={"type": "json_schema", "json_schema": {"schema": schema}})
        return *told, time.monotonic() - began_s

    alone = [plain(seed) for seed in range(2)]
    with ThreadPoolExecutor() as pool:
        exploded, ambiguous = [pool.submit(refused, number) for number in range(3)], pool.submit(ask, url, **HALF_WAY)
        beside = [pool.submit(plain, seed % 2) for seed in range(4)]
        for seed, answer in enumerate(beside):
            (status, told), (_, expected) = answer.result(), alone[seed % 2]
            assert status == 200 and told["choices"][0]["text"] == expected["choices"][0]["text"]
        for status, told, seconds in (each.result() for each in exploded):
            assert status == 400 and "too large" in told["error"]["message"] and seconds < WITHIN_S
            assert told["error"]["type"] == "invalid_request_error" and told["error"]["param"]
        assert ambiguous.result()[0] == 400


@pytest.mark.slow
def test_an_answer_whose_grammar_explodes_half_way_ends_with_its_reason_and_gives_its_pages_back(live: tuple[str, LLM]):
    url, llm = live
    status, told = ask(url, **HALF_WAY)
    assert status == 400 and told["error"]["code"] == "grammar_limit"
    assert "the answer's grammar went over its limits after" in told["error"]["message"]
    status, events = ask(url, stream=True, **HALF_WAY)
    assert status == 200 and any(event.startswith('data: {"error"') and "grammar_limit" in event for event in events)
    assert ask(url, **PLAIN)[0] == 200
    eventually(lambda: used_pages(llm) == [0.0, 0.0])


@pytest.mark.slow
def test_by_grpc_it_ends_as_an_invalid_argument_with_the_same_reason_streamed_or_not(live: tuple[str, LLM]):
    _, llm = live

    async def test() -> None:
        async with channel_to(llm.service) as channel:
            for streamed in (False, True):
                with pytest.raises(grpc.aio.AioRpcError) as ended:
                    await posted(InferenceStub(channel).Complete, {**HALF_WAY, "stream": streamed})
                assert ended.value.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert "the answer's grammar went over its limits after" in str(ended.value.details())

    asyncio.run(test())


def used_pages(llm: LLM) -> list[float]:
    """Of each worker."""
    assert llm.service.metrics is not None
    lines = llm.service.metrics.render().decode().splitlines()
    return [float(line.split(" ")[1]) for line in lines if line.startswith("jdisagg_kv_pages{") and '"used"' in line]
