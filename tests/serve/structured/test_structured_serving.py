"""Answers held to a form, from a disaggregated stack under load: each is of its form, and nobody else notices."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Annotated, Any

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

import jdisagg
from jdisagg.serve.frontends.http.app import create_app
from tests.serve.live_http import serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ITEM = {
    "type": "object",
    "properties": {"id": {"type": "integer"}, "ok": {"type": "boolean"}},
    "required": ["id", "ok"],
}
SCHEMAS: list[dict[str, Any]] = [
    {"type": "array", "items": {"enum": ["red", "green", 3, None]}, "minItems": 1, "maxItems": 5},
    {"type": "object", "properties": {"a": {"type": "number"}}, "required": ["a"], "additionalProperties": False},
    {
        "$defs": {"item": {**ITEM, "additionalProperties": False}},
        "type": "object",
        "properties": {"items": {"type": "array", "items": {"$ref": "#/$defs/item"}, "maxItems": 3}},
        "required": ["items"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"type": "integer", "minimum": 10**8, "maximum": 10**9}, "minItems": 14, "maxItems": 16},
    {"type": "string", "format": "date"},
    {"anyOf": [{"type": "boolean"}, {"type": "string", "pattern": "^[a-f0-9]{4}$"}]},
]
PROMPT = "def f(x):\n    return"
FREE = {"prompt": PROMPT, "max_tokens": 100, "temperature": 0.8, "seed": 11, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def llm() -> Iterator[jdisagg.LLM]:
    """With so few pages that sequences are preempted where many run."""
    sizes = {"max_model_len": 384, "max_num_seqs": 8, "max_num_batched_tokens": 128, "kv_tokens": 384, "page_size": 16}
    few: dict[str, Any] = {"prefill_buckets": "128", "table_buckets": "384", "short_prompt_tokens": 0}
    with jdisagg.LLM(mesh="prefill:tp1,decode:pp2", reserve_tokens=1, **sizes, **few) as running:
        yield running
        assert running.service.recompiles() == 0


@pytest.fixture(scope="module")
def client(llm: jdisagg.LLM) -> Iterator[openai.OpenAI]:
    with serving(create_app(llm.service)) as url:
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)


def complete(client: openai.OpenAI, fields: dict[str, Any]) -> Any:
    return client.completions.create(model="embedded", **fields).choices[0]


def held(schema: dict[str, Any], seed: int) -> dict[str, Any]:
    form = {"json": schema, "disable_any_whitespace": seed % 2 == 0}
    warm = {"temperature": 0.3 * seed, "seed": seed}
    return {"prompt": PROMPT * (1 + seed % 3), "max_tokens": 300, **warm, "extra_body": {"structured_outputs": form}}


def test_every_answer_is_what_its_schema_takes_and_those_beside_it_are_as_ever(llm: jdisagg.LLM, client: openai.OpenAI):
    alone = complete(client, FREE).text
    asked = [held(SCHEMAS[n % len(SCHEMAS)], n // len(SCHEMAS)) for n in range(24)]
    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(partial(complete, client), [*asked, *[FREE] * 8]))
    for n, answer in enumerate(answers[:24]):
        assert answer.finish_reason == "stop", answer
        jsonschema.validate(json.loads(answer.text), SCHEMAS[n % len(SCHEMAS)])
    assert {answer.text for answer in answers[24:]} == {alone}
    assert llm.service.metrics is not None
    assert re.search(rb"jdisagg_preemptions_total\{.*\} [1-9]", llm.service.metrics.render())


def test_streams_are_held_to_their_form_as_well(client: openai.OpenAI):
    chunks = client.completions.create(
        model="embedded", prompt=PROMPT, stream=True, temperature=1.0, extra_body={"guided_regex": r"[a-f]{3}-\d{2}"}
    )
    assert re.fullmatch(r"[a-f]{3}-\d{2}", "".join(chunk.choices[0].text for chunk in chunks))


def test_an_answer_of_one_of_some_texts_is_one_of_them_also_where_ends_are_ignored(client: openai.OpenAI):
    body = {"guided_choice": ["yes", "no"], "ignore_eos": True}
    answer = complete(client, {"prompt": PROMPT, "extra_body": body})
    assert answer.text in ("yes", "no") and answer.finish_reason == "stop"


class Person(BaseModel):
    name: Annotated[str, Field(max_length=16)]
    age: Annotated[int, Field(ge=0, le=200)]


def test_the_official_client_parses_what_it_asked_for(client: openai.OpenAI):
    messages: Any = [{"role": "user", "content": "Who?"}]
    for seed in range(3):
        asked = {"model": "embedded", "messages": messages, "max_tokens": 250, "temperature": 0.7, "seed": seed}
        answer = client.chat.completions.parse(**asked, response_format=Person).choices[0]
        assert answer.finish_reason == "stop" and isinstance(answer.message.parsed, Person)


def test_a_schema_that_does_not_compile_is_a_bad_request_and_the_others_run_on(client: openai.OpenAI):
    with pytest.raises(openai.BadRequestError, match="Pointer"):
        complete(client, {"prompt": "x", "extra_body": {"guided_json": {"$ref": "#/$defs/none"}}})
    assert complete(client, FREE).finish_reason == "length"
