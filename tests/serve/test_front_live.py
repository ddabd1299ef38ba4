"""The HTTP front on the real router, workers and driver: answers are right, and what clients drop is given back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import httpx
import openai
import pytest

from jdisagg.core.request import SamplingParams
from jdisagg.engine.toy import toy_output
from jdisagg.serve.frontends.http.app import create_app
from tests.serve.live_http import eventually, serving
from tests.serve.live_toy import ToyStack

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13]


@pytest.fixture(scope="module")
def url(stack: ToyStack) -> Iterator[str]:
    with serving(create_app(stack.service, metrics=stack.metrics)) as url:
        yield url


@pytest.fixture(autouse=True)
def everything_comes_back(stack: ToyStack) -> Iterator[None]:
    stack.machines["decode-0"].pause_s = 0.0  # type: ignore[index]
    yield
    eventually(stack.idle)


def right_text(stack: ToyStack, prompt: list[int], max_tokens: int, ends: bool = True) -> str:
    eos_ids = stack.service.tokenizer.eos_ids if ends else ()
    sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=eos_ids)
    ids = toy_output(tuple(prompt), sampling)
    return stack.service.tokenizer.decode([each for each in ids if each not in sampling.stop_token_ids])


def test_many_streams_at_once_all_get_their_own_answer(stack: ToyStack, url: str) -> None:
    async def one(client: openai.AsyncOpenAI, i: int) -> str:
        prompt = [*PROMPT, i]
        stream = await client.completions.create(model="toy", prompt=prompt, max_tokens=20 + i, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def everyone() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
            return await asyncio.gather(*(one(client, i) for i in range(24)))

    assert asyncio.run(everyone()) == [right_text(stack, [*PROMPT, i], 20 + i) for i in range(24)]


def test_who_asks_for_more_than_was_ever_given_is_told_so_at_once(stack: ToyStack, url: str) -> None:
    """By its own first token the prompt of one request tells how fast the next one can be."""
    body = {"prompt": PROMPT, "max_tokens": 4}
    assert httpx.post(f"{url}/v1/completions", json={**body, "ttft_s": 60.0}).status_code == 200
    refused = httpx.post(f"{url}/v1/completions", json={**body, "prompt": [*PROMPT, 3], "ttft_s": 1e-9})
    error = refused.json()["error"]
    assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
    assert error["code"] == "objective_unmet", "the queue is not full"
    assert "its first token is predicted in" in error["message"] and "on prefill-0" in error["message"]
    with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
        asked = {"model": "toy", "prompt": PROMPT, "max_tokens": 4}
        assert client.completions.create(**asked, extra_body={"ttft_s": 60.0, "tpot_s": 60.0}).choices


def test_the_ledger_of_a_real_run_sums_exactly_and_names_the_workers(url: str) -> None:
    response = httpx.post(f"{url}/v1/completions", json={"prompt": PROMPT, "max_tokens": 30, "ledger": True})
    ledger = response.json()["choices"][0]["ledger"]
    assert sum(ledger["parts_ns"].values()) == ledger["total_ns"] > 0
    assert ledger["parts_ns"]["decode"] > 0
    assert response.headers["x-prefill-instance-id"] == "prefill-0"
    assert response.headers["x-decode-instance-id"] == "decode-0"


def test_a_stop_string_ends_the_work_and_not_only_the_text(stack: ToyStack, url: str) -> None:
    stack.machines["decode-0"].pause_s = 0.002  # type: ignore[index]
    whole = right_text(stack, PROMPT, 200, ends=False)
    stop = whole[20:23]
    body = {"prompt": PROMPT, "max_tokens": 200, "stop": stop, "ignore_eos": True, "ledger": True}
    choice = httpx.post(f"{url}/v1/completions", json=body).json()["choices"][0]
    assert choice["text"] == whole[: whole.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert choice["ledger"]["total_ns"] > 0
    assert 'jdisagg_requests_total{model_name="toy",reason="stop"}' in httpx.get(f"{url}/metrics").text


@pytest.mark.parametrize("n", [1, 4])
def test_a_vanished_client_gives_back_every_page(stack: ToyStack, url: str, n: int) -> None:
    stack.machines["decode-0"].pause_s = 0.01  # type: ignore[index]
    body = {"prompt": PROMPT, "max_tokens": 200, "stream": True, "n": n, "ignore_eos": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body) as response:
        parts = response.iter_raw()  # kept: the stream is closed with it
        next(parts)
        eventually(lambda: stack.service.running == n)
        assert not stack.idle()
    eventually(stack.idle)


def test_prompt_logprobs_come_through_the_stack(url: str) -> None:
    body = {"prompt": PROMPT, "max_tokens": 1, "echo": True, "logprobs": 0}
    choice = httpx.post(f"{url}/v1/completions", json=body).json()["choices"][0]
    assert choice["logprobs"]["token_logprobs"][: len(PROMPT)] == [None, *[0.0] * (len(PROMPT) - 1)]
