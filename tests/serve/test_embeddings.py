"""Embeddings and scores: of toy workers, whose states are known, and of the model here, whose head must agree."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from safetensors.numpy import load_file

import jdisagg
from jdisagg.core.worker_config import Role
from jdisagg.named_models import EMBEDDED_FOLDER
from jdisagg.serve.frontends.front_settings import FrontSettings
from jdisagg.serve.frontends.http.app import create_app
from tests.serve.live_http import serving
from tests.serve.live_toy import toy_stack, worker_config

LONG = [7 * i % 250 for i in range(200)]  # several chunks


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with toy_stack() as stack:
        with serving(create_app(stack.service, FrontSettings(embeddings="mean"))) as url:
            yield url
        assert stack.idle()


@pytest.fixture
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)


def embed(client: openai.OpenAI, given: Any, **extra: Any) -> list[list[float]]:
    more = {name: extra.pop(name) for name in ("dimensions", "encoding_format") if name in extra}
    answer = client.embeddings.create(model="", input=given, extra_body=extra, **more)
    assert [each.index for each in answer.data] == list(range(len(answer.data)))
    return [each.embedding for each in answer.data]


def test_a_prompts_states_are_pooled_over_all_its_chunks(client: openai.OpenAI):
    (mean,) = embed(client, LONG, normalize=False)
    assert mean == [pytest.approx(np.mean(LONG)), pytest.approx(99.5)]
    (last,) = embed(client, LONG, normalize=False, pooling="last")
    assert last == [LONG[-1], 199.0]


def test_a_prompt_whose_kv_is_held_is_pooled_whole_all_the_same(client: openai.OpenAI):
    client.completions.create(model="toy", prompt=LONG, max_tokens=2)
    assert embed(client, LONG, normalize=False)[0][1] == 99.5
    assert embed(client, LONG, normalize=False, pooling="last") == [[LONG[-1], 199.0]]


def test_vectors_have_length_one_also_where_they_are_shortened(client: openai.OpenAI):
    whole, short = embed(client, LONG)[0], embed(client, LONG, dimensions=1)[0]
    assert np.linalg.norm(whole) == pytest.approx(1) and short == [1.0]


def test_numbers_and_bytes_are_the_same(client: openai.OpenAI):
    kinds: list[Any] = ["float", "base64"]
    floats, encoded = (
        client.embeddings.create(model="toy", input=[LONG, [1, 2]], encoding_format=kind).data for kind in kinds
    )
    plain = [np.array(each.embedding, np.float32) for each in floats]
    raw: Any = [each.embedding for each in encoded]
    assert all(np.array_equal(np.frombuffer(base64.b64decode(r), "<f4"), p) for r, p in zip(raw, plain, strict=True))


@pytest.mark.parametrize(("given", "count"), [("one", 1), (["one", "two"], 2), ([1, 2], 1), ([[1, 2], [3]], 2)])
def test_every_spelling_of_the_input_is_taken(client: openai.OpenAI, given: Any, count: int):
    answer = client.embeddings.create(model="toy", input=given)
    assert len(answer.data) == count and answer.usage.prompt_tokens == answer.usage.total_tokens


def test_scores_are_cosines_of_one_against_each_or_of_pairs(url: str):
    asked = {"model": "toy", "text_1": "abc", "text_2": ["abc", "b", "xyz"]}
    answer = httpx.post(f"{url}/v1/score", json=asked).json()
    assert [each["index"] for each in answer["data"]] == [0, 1, 2]
    assert answer["data"][0]["score"] == pytest.approx(1) and answer["data"][2]["score"] < 1
    pairs = httpx.post(f"{url}/v1/score", json={"text_1": ["abc", "b"], "text_2": ["abc", "b"]}).json()
    assert [each["score"] for each in pairs["data"]] == [pytest.approx(1)] * 2


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("embeddings", {"input": []}, "0 inputs, must be 1 to"),
    ("embeddings", {"input": [[]]}, "these are 3 of 4 problems"),
    ("embeddings", {"input": "x", "dimensions": 9}, "dimensions is 9, the model's states have 8"),
    ("embeddings", {"input": "x", "pooling": "max"}, "pooling"),
    ("embeddings", {"input": [1] * 256}, "over the limit of 256"),
    ("embeddings", {"input": [-1]}, "input"),
    ("score", {"text_1": ["a", "b"], "text_2": "c"}, "text_1 has 2 texts and text_2 1"),
]


@pytest.mark.parametrize(("path", "body", "says"), WRONG, ids=[says for *_, says in WRONG])
def test_what_cannot_be_is_refused_with_both_numbers(url: str, path: str, body: dict[str, Any], says: str):
    answer = httpx.post(f"{url}/v1/{path}", json=body)
    assert answer.status_code == 400 and says in answer.json()["error"]["message"]


def test_a_server_without_embeddings_says_which_flag_makes_them():
    with toy_stack() as stack, serving(create_app(stack.service)) as url:
        answer = httpx.post(f"{url}/v1/embeddings", json={"input": "x"})
    assert answer.status_code == 400 and "--embeddings" in answer.json()["error"]["message"]


def test_a_colocated_worker_pools_as_well():
    configs = [worker_config("both-0", Role.COLOCATED, 256)]
    with (
        toy_stack(configs=configs) as stack,
        serving(create_app(stack.service, FrontSettings(embeddings="last"))) as url,
    ):
        answer = httpx.post(f"{url}/v1/embeddings", json={"input": LONG, "normalize": False}).json()
    assert answer["data"][0]["embedding"] == [LONG[-1], 199.0]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_models_head_draws_of_the_state_what_the_model_draws_and_company_changes_no_bit():
    sizes: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 64, "kv_tokens": 2048}
    prompt = "def fibonacci(n):\n    " * 6
    with jdisagg.LLM(mesh="prefill:tp1,decode:tp1", embeddings="mean", prefill_buckets="64", **sizes) as llm:
        tokens = llm.service.tokenizer.encode(prompt)
        drawn = llm.generate(tokens, jdisagg.SamplingParams(max_tokens=1, temperature=0.0, logprobs=1)).choices[0]
        with serving(create_app(llm.service, FrontSettings(embeddings="mean"))) as url:
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)
            (state,) = embed(client, tokens, pooling="last", normalize=False)
            alone = embed(client, tokens)[0]
            with ThreadPoolExecutor(12) as pool:
                company = list(pool.map(lambda n: embed(client, [*tokens[: 5 * n], *tokens]), range(6)))
                again = list(pool.map(lambda _: embed(client, tokens)[0], range(6)))
        assert llm.service.recompiles() == 0
    table = load_file(EMBEDDED_FOLDER / "model.safetensors")["model.embed_tokens.weight"].astype(np.float32)
    logits = table @ np.array(state, np.float32)
    logprobs = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
    assert int(logits.argmax()) == drawn.token_ids[0] and drawn.logprobs is not None
    assert logprobs.max() == pytest.approx(drawn.logprobs[0].logprob, abs=1e-3)
    assert all(each == alone for each in again) and company[0][0] == alone
